"""The engine on Ray: no result differs from the serial run's, whatever dies. `.ci/ray` runs this beside Ray.

The cluster has two nodes on this machine. Its processes are ended by their numbers: others may have a Ray, too.
"""

import os
import platform
import sys
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.rng import Key, uniform
from leakgauge.harness.study.engine import Job
from leakgauge.harness.study.environment import code_of
from leakgauge.harness.study.ray_engine import RayEngine
from leakgauge.harness.study.ray_worker import Home, Order, Unfit, Worker, versions
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.store import verify
from leakgauge.harness.study.supervisor import Limits
from tests.killed import STUDY, litter, start, until
from tests.test_processes import STUCK, WAITS, finished, of, stuck
from tests.test_run import COIN, ECHO, study

SLOW = f"""
[[attacks]]
name = "{STUCK}"
seconds = 1
target = {{kind = "members", count = [10, 20, 30]}}
"""


def images(folder, seed):
    """A small data set in a folder."""
    folder.mkdir(exist_ok=True)
    x = uniform(Key(seed), (40, 1, 8, 8)).numpy().astype(np.float32)
    y = np.arange(40) % 4
    np.savez(folder / "own.npz", x_train=x[:30], y_train=y[:30], x_test=x[30:], y_test=y[30:])


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    assert not run_study(of(STUDY + SLOW), folder, workers=0).missing
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes with one processor each, and a folder of data of their own."""
    folder = tmp_path_factory.mktemp("data")
    images(folder, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEAKGAUGE_DATA", str(folder))
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        made.add_node(num_cpus=1)
        patch.delenv("LEAKGAUGE_DATA")
        try:
            yield made
        finally:
            made.shutdown()


def family(node):
    """All processes of a node."""
    started = [psutil.Process(one.process.pid) for group in node.all_processes.values() for one in group]
    return {process for one in started for process in (one, *one.children(recursive=True))}


def test_a_job_that_kills_its_worker_three_times_or_breaks_a_limit_is_a_failed_cell(cluster, tmp_path):
    attacks = [
        {"name": ECHO, "break_with": "kill"},
        {"name": STUCK, "seconds": 600, "megabytes": 2000},
        {"name": COIN, "target": {"kind": "members", "count": [9, 10]}},
    ]
    notes = []

    def listen(progress, outcome):
        notes.extend(progress.notes)
        progress.notes.clear()

    asked = study(attacks=attacks, defenses=[{"name": "none"}])
    engine, limits = partial(RayEngine, address=cluster.address), Limits(megabytes=1800)
    run = run_study(asked, tmp_path, engine=engine, listen=listen, limits=limits)
    assert [result.cell.attack.name for result in run.results.values()] == [COIN] * 2
    said = sorted((failure.kind, failure.message) for failure in run.failures.values())
    died = f"the worker process on {platform.node()} died (out of memory, or killed)"
    assert [kind for kind, _ in said] == ["LimitExceeded", "WorkerDied"]
    assert said[0][1].endswith("MB, more than the 1800 MB of --cell-memory")
    assert said[1][1] == f"{died}; tried 3 times"
    assert [note.partition(": the worker")[2] for note in notes] == [died.removeprefix("the worker")] * 2


def test_a_node_with_other_data_ends_the_run_in_one_line(cluster, tmp_path):
    images(tmp_path / "data", seed=2)
    asked = study(tasks=[{"data": "npz:own.npz", "model": "linear"}], federations=[{"clients": 2, "rounds": 1}])
    with pytest.raises(StudyError, match=r"^ray: the node \S+ has another data set 'npz:own.npz' in .*data0: every"):
        run_study(asked, tmp_path / "out", data=tmp_path / "data", engine=partial(RayEngine, address=cluster.address))


def test_a_cluster_that_loses_a_node_in_mid_run_gives_the_bytes_of_the_serial_run(cluster, reference, tmp_path):
    (lost,) = cluster.worker_nodes
    ended, notes = [], []

    def listen(progress, outcome):
        notes.extend(progress.notes)
        progress.notes.clear()
        if outcome is not None:
            ended.append(outcome.job.writes)
        busy = len(progress.running) == 2 and "Stuck" in progress.running[0] + progress.running[1]
        if busy and lost in cluster.worker_nodes:
            for process in family(lost):
                process.kill()
            cluster.worker_nodes.discard(lost)

    run = run_study(of(STUDY + SLOW), tmp_path, engine=partial(RayEngine, address=cluster.address), listen=listen)
    assert (run.failures, run.missing) == ({}, ())
    assert len(notes) == 1
    assert notes[0].startswith("done again: ")
    assert sorted(ended) == sorted({f"{one.parent.name}/{one.name}" for one in reference.glob("[ct]*s/*/")})
    assert finished(tmp_path) == finished(reference)
    assert verify(tmp_path)[1] == {}
    assert litter(tmp_path) == []


def test_a_private_ray_ends_with_its_run_even_if_that_is_killed(tmp_path):
    process = start(tmp_path, "--engine", "ray", "--workers", 2, study=STUDY + WAITS)
    until(lambda: stuck(tmp_path) or process.poll() is not None)
    ours = psutil.Process(process.pid).children(recursive=True)
    assert any(one.name() == "raylet" for one in ours), process.communicate()
    process.kill()
    gone, left = psutil.wait_procs(ours, timeout=20)
    for one in left:
        one.kill()
    assert gone
    assert not left
    assert finished(tmp_path / "out")


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("127.0.0.1:1", "no cluster at 127.0.0.1:1 (Connection refused): start one there with 'ray start --head"),
        ("ray://127.0.0.1:10001", "expected --address HOST:PORT, got 'ray://127.0.0.1:10001'"),
    ],
)
def test_an_address_without_a_cluster_is_refused_in_one_line(address, text, tmp_path):
    with pytest.raises(StudyError) as raised:
        run_study(study(), tmp_path, engine=partial(RayEngine, address=address))
    assert str(raised.value).startswith(f"ray: {text}")
    assert "\n" not in str(raised.value)
    assert not ray.is_initialized()


def test_a_node_with_other_code_or_versions_does_nothing():
    job = Job("trial", study().trainings[0], ())
    home = Home(Path("data"), False, "cpu", tuple(sys.path), os.getcwd(), versions())
    worker = Worker(home._replace(versions={**versions(), "Python": "3.0.1"}))
    try:
        with pytest.raises(Unfit, match=rf"has Python {platform.python_version()} instead of 3\.0\.1$"):
            worker.ready()
        own = code_of(job.training)
        with pytest.raises(Unfit, match=rf"has code {own} instead of 0123$"):
            worker.perform(Order(job, "0123", {}, {}))
        with pytest.raises(Unfit, match=r"cannot load what the job needs: .*'own.npz'"):
            worker.perform(Order(job, own, {"npz:own.npz": "0123"}, {}))
    finally:
        worker.leave()
    assert not worker.folder.exists()
