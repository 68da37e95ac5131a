"""The engine on Ray: no result differs from the serial run's, whatever dies. `.ci/ray` runs this beside Ray.

The cluster has two nodes on this machine. Its processes are ended by their numbers: others may have a Ray, too.
"""

import os
import platform
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.study.engines.ray import RayEngine, _Unfit, _versions, _Worker
from leakgauge.harness.study.environment import code_of
from leakgauge.harness.study.jobs import Job
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Limits
from leakgauge.harness.study.store import verify
from tests.by_rows import by_rows
from tests.killed import STUDY, litter, start, until
from tests.test_processes import STUCK, WAITS, finished, of, stuck
from tests.test_run import COIN, ECHO, study
from tests.test_working_folder import CONSOLE, poisoned, unharmed

GOOD = f"""{STUDY.replace("seeds = [0, 1]", "seeds = [0]")}
[[attacks]]
name = "{STUCK}"
seconds = 1
target = {{kind = "members", count = [10, 20, 30]}}
"""
BAD = f"""
[[attacks]]
name = "{ECHO}"
break_with = "kill"
target = {{count = 2}}
[[attacks]]
name = "{STUCK}"
seconds = 600
megabytes = 2000
target = {{kind = "members", count = 10}}
[[exclude]]
defense = "gaussian"
attack = {{name = "{ECHO}", break_with = "kill"}}
[[exclude]]
defense = "gaussian"
attack = {{name = "{STUCK}", seconds = 600}}
"""


def census(folder, age):
    row = "{}, Private, 1, HS-grad, 9, Never-married, Sales, Husband, White, Male, 0, 0, 40, Peru, {}\n"
    rows = "".join(row.format(20 + n % age, ("<=50K", ">50K")[n % 2]) for n in range(80))
    (folder / "adult").mkdir(parents=True)
    for name in ("adult.data", "adult.test"):
        (folder / "adult" / name).write_text(rows)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    assert not run_study(of(GOOD), folder, workers=0).missing
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes with one processor each, and a folder of data of their own."""
    folder = tmp_path_factory.mktemp("data")
    census(folder, age=30)
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
    started = [psutil.Process(one.process.pid) for group in node.all_processes.values() for one in group]
    return {process for one in started for process in (one, *one.children(recursive=True))}


def lives(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_node_with_other_data_ends_the_run_in_one_line(cluster, tmp_path):
    census(tmp_path / "data", age=31)
    asked = study(tasks=[{"data": "adult", "model": "linear"}], attacks=[{"name": COIN, "target": {"kind": "members"}}])
    with pytest.raises(StudyError, match=r"^ray: the node \S+ has another data set 'adult' in .*: every node needs"):
        run_study(asked, tmp_path / "out", data=tmp_path / "data", engine=partial(RayEngine, address=cluster.address))


def test_no_process_of_ray_executes_a_module_of_the_working_folder(tmp_path):
    words = "run", "../s.toml", "-o", "../out", "--engine", "ray", "--workers", "1"
    # the kept environment of CI may have been installed from another checkout
    unharmed(poisoned(tmp_path), *CONSOLE, *words, PYTHONPATH=str(Path(__file__).parents[1]))


def test_whatever_dies_on_a_cluster_the_other_cells_have_the_bytes_of_the_serial_run(cluster, reference, tmp_path):
    (lost,) = cluster.worker_nodes
    ended, notes = [], []

    def listen(progress, outcome):
        notes.extend(progress.notes)
        progress.notes.clear()
        ended.extend(outcome.job.writes if outcome else [])
        if len(progress.running) == 2 and len(ended) > 3 and lost in cluster.worker_nodes:
            for process in family(lost):
                process.kill()
            cluster.worker_nodes.discard(lost)

    engine, limits = partial(RayEngine, address=cluster.address), Limits(megabytes=1800)
    run = run_study(of(GOOD + BAD), tmp_path, engine=engine, listen=listen, limits=limits)
    assert finished(tmp_path) == finished(reference)
    kept = [one for one in ended if not one.startswith("parts/")]  # limits that several attacks read, deleted later
    assert len(ended) == len(set(ended))
    assert verify(tmp_path)[0] == len(kept) == len(list(reference.glob("[ct]*s/*/"))) + 2
    assert litter(tmp_path) == []
    said = sorted((failure.kind, failure.message) for failure in run.failures.values())
    died = f"the worker process on {platform.node()} died (out of memory, or killed)"
    assert said[0][0] == "LimitExceeded"
    assert said[0][1].endswith("MB, more than the 1800 MB of --cell-memory")
    assert said[1:] == [("WorkerDied", f"{died}; tried 3 times")]
    assert len(notes) in (2, 3)  # the node may die under the attack that kills
    assert all(note.startswith("done again: ") for note in notes)


def test_a_private_ray_ends_with_its_run_even_if_that_is_killed(tmp_path):
    process = start(tmp_path, "--engine", "ray", "--workers", 2, study=STUDY + WAITS)
    until(lambda: stuck(tmp_path) or process.poll() is not None)
    ours = {one: one.name() for one in psutil.Process(process.pid).children(recursive=True)}
    assert "raylet" in ours.values(), process.communicate()
    process.kill()
    until(lambda: not any(lives(one) for one, name in ours.items() if "Agent" not in name), seconds=20)
    left = [one for one in ours if lives(one)]
    for one in left:
        one.kill()
    assert all("Agent" in ours[one] for one in left)  # Ray's own, which wait some time for the others
    assert finished(tmp_path / "out")


@by_rows(
    ("127.0.0.1:1", "no cluster at 127.0.0.1:1 (Connection refused): start one there with 'ray start --head"),
    ("ray://127.0.0.1:10001", "expected --address HOST:PORT, got 'ray://127.0.0.1:10001'"),
)
def test_an_address_without_a_cluster_is_refused_in_one_line(address, text, tmp_path):
    with pytest.raises(StudyError) as raised:
        run_study(study(), tmp_path, engine=partial(RayEngine, address=address))
    assert str(raised.value).startswith(f"ray: {text}")
    assert "\n" not in str(raised.value)
    assert not ray.is_initialized()


def test_a_node_with_other_code_or_versions_does_nothing():
    job = Job("trial", study().trainings[0], ())
    asked = {**_versions(), "Python": "3.0.1"}
    worker = _Worker(Path("data"), False, "cpu", tuple(sys.path), os.getcwd(), asked)
    try:
        with pytest.raises(_Unfit, match=rf"has Python {platform.python_version()} instead of 3\.0\.1$"):
            worker.ready()
        own = code_of(job.training)
        with pytest.raises(_Unfit, match=rf"has code {own} instead of 0123$"):
            worker.perform(job, "0123", {}, {})
        with pytest.raises(_Unfit, match=r"cannot load what the job needs: no npz file: looked for own.npz"):
            worker.perform(job, own, {"npz:own.npz": "0123"}, {})
    finally:
        worker.leave()
    assert not worker.folder.exists()
