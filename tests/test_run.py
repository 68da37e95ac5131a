"""A study from end to end: the same bytes however it ran, and nothing that was finished is lost."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.rng import Key, uniform
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.store import Store, load_run
from leakgauge.harness.study.study import resolve
from leakgauge.harness.study.supervisor import cores

ECHO, COIN = "tests.doubles:Echo", "tests.doubles:Coin"


def study(**changes):
    """Two small trainings with three cells each."""
    base = {
        "name": "small",
        "tasks": [{"data": "digits", "model": "mlp-small"}],
        "federations": [{"clients": 4, "rounds": 2, "samples": 80, "test_samples": 50, "local_steps": 1}],
        "defenses": [{"name": "none"}, {"name": "gaussian", "noise_std": 0.01}],
        "attacks": [
            {"name": ECHO, "target": {"round": 1, "count": 2}},
            {"name": ECHO, "target": {"kind": "messages", "round": 0, "count": 2}},
            {"name": COIN, "target": {"kind": "members", "count": 20}},
        ],
    }
    return resolve({**base, **changes})


def contents(folder):
    """Bytes of every file that must repeat: everything but the seconds."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "timing.json"
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The study, run in this process."""
    folder = tmp_path_factory.mktemp("reference")
    run = run_study(study(), folder, workers=0)
    assert len(run.results) == 6
    return folder


def test_every_cell_has_estimates_with_n_and_a_digest(reference):
    run = load_run(reference)
    assert not run.failures
    assert not run.missing
    for result in run.results.values():
        assert len(result.digest) == 64
        assert all(estimate.n > 0 for estimate in result.estimates)
    names = {estimate.name for result in run.results.values() for estimate in result.estimates}
    assert {"ssim", "mse", "psnr", "label_accuracy", "recognized", "auc", "balanced_accuracy"} <= names
    record = next(iter(run.trainings.values()))
    assert len(record.evaluations) == 3
    assert record.message_bytes == (4 * record.dim,) * 2


def test_what_is_known_of_an_attack_is_found_again_from_the_folder(tmp_path):
    both = [{"name": ["map", "idlg"], "evaluations": 2, "restarts": 1, "target": {"count": 1}}]
    run = run_study(study(attacks=both), tmp_path, workers=0)
    assert {cell.attack.label for cell in run.cells} == set(run.attacks)
    assert all(run.attacks[cell.attack.label].aware == (cell.attack.name == "map") for cell in run.cells)


def test_twice_the_same_bytes(reference, tmp_path):
    run_study(study(), tmp_path, workers=0)
    assert contents(tmp_path) == contents(reference)


def test_other_processes_give_the_same_bytes(reference, tmp_path):
    run_study(study(), tmp_path, workers=2)
    assert contents(tmp_path) == contents(reference)


def test_resuming_gives_the_same_bytes_and_repeats_nothing(reference, tmp_path):
    shutil.copytree(reference, tmp_path, dirs_exist_ok=True)
    cells = sorted((tmp_path / "cells").iterdir())
    shutil.rmtree(cells[0])
    (cells[1] / "result.json").write_text('{"cell": {')
    before = (cells[2] / "result.json").stat().st_mtime_ns
    done = []
    run_study(study(), tmp_path, workers=0, listen=lambda progress, outcome: done.append(outcome))
    assert contents(tmp_path) == contents(reference)
    assert len([outcome for outcome in done if outcome]) == 2
    assert (cells[2] / "result.json").stat().st_mtime_ns == before


def test_a_lost_training_is_trained_again_to_the_same_bytes(reference, tmp_path):
    shutil.copytree(reference, tmp_path, dirs_exist_ok=True)
    for folder in (tmp_path / "trainings").iterdir():
        path = folder / "kept.npz"
        path.write_bytes(path.read_bytes()[:-100])
    shutil.rmtree(tmp_path / "cells")
    run_study(study(), tmp_path, workers=0)
    assert contents(tmp_path) == contents(reference)


def test_a_cell_added_later_finds_what_it_needs(reference, tmp_path):
    shutil.copytree(reference, tmp_path, dirs_exist_ok=True)
    more = study(attacks=[{"name": ECHO, "target": {"round": [0, 1], "count": 2}}])
    run = run_study(more, tmp_path, workers=0)
    assert len(run.results) == 4
    for cell_id in run.results:
        known = reference / "cells" / cell_id / "result.json"
        assert not known.exists() or known.read_bytes() == (tmp_path / "cells" / cell_id / "result.json").read_bytes()


def test_training_is_done_once_for_all_attacks(tmp_path):
    jobs = []
    run_study(study(), tmp_path, workers=0, listen=lambda progress, outcome: jobs.append(outcome))
    kinds = [outcome.job.kind for outcome in jobs if outcome]
    assert kinds.count("training") == 2
    assert kinds.count("attack") == 6


@pytest.mark.parametrize("workers", [0, 1])
def test_a_cell_that_fails_says_why_and_costs_no_other(tmp_path, workers):
    broken = study(attacks=[{"name": ECHO, "break_with": ["", "the reason"]}], defenses=[{"name": "none"}])
    run = run_study(broken, tmp_path, workers=workers)
    assert len(run.results) == 1
    (failure,) = run.failures.values()
    assert (failure.kind, failure.message) == ("RuntimeError", "the reason")
    assert "doubles.py" in failure.trace


def test_a_worker_that_is_killed_costs_the_one_cell_it_held(tmp_path):
    broken = study(attacks=[{"name": ECHO, "break_with": ["kill", ""], "target": {"round": [0, 1]}}])
    run = run_study(broken, tmp_path, workers=2)
    assert len(run.results) == 4
    assert {failure.message for failure in run.failures.values()} == {
        "the worker process died (killed by signal 9); out of memory, or killed"
    }


def test_a_training_that_diverges_fails_its_cells_with_the_reason(tmp_path):
    wild = study(federations=[{"clients": 4, "rounds": 3, "samples": 80, "lr": 1e30}], defenses=[{"name": "none"}])
    run = run_study(wild, tmp_path, workers=0)
    assert not run.results
    assert all(failure.message.startswith("training failed: ") for failure in run.failures.values())
    assert all("diverged" in f.message or "finite update" in f.message for f in run.failures.values())


def test_a_failed_cell_is_tried_again(tmp_path):
    broken = study(attacks=[{"name": ECHO, "break_with": "x"}], defenses=[{"name": "none"}])
    run_study(broken, tmp_path, workers=0)
    jobs = []
    run_study(broken, tmp_path, workers=0, listen=lambda progress, outcome: jobs.append(outcome))
    assert [outcome.job.kind for outcome in jobs if outcome] == ["attack"]


def test_a_full_disk_fails_the_cell_and_keeps_what_was_finished(reference, tmp_path, monkeypatch):
    shutil.copytree(reference, tmp_path, dirs_exist_ok=True)
    lost = sorted((tmp_path / "cells").iterdir())[0]
    shutil.rmtree(lost)
    real, seen = os.replace, []

    def full(source, target):
        if "cells" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    run = run_study(study(), tmp_path, workers=0, listen=lambda progress, outcome: seen.append(outcome))
    (error,) = [outcome.error for outcome in seen if outcome]
    assert "No space left on device" in error
    assert len(run.results) == 5
    assert run.missing == (lost.name,)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"data": "mnits", "model": "mlp"}, "no data set 'mnits'; did you mean 'mnist'?"),
        ({"data": "digits", "model": "mpl"}, "no model 'mpl'; did you mean 'mlp'?"),
        ({"data": "mnist", "model": "mlp"}, "mnist"),
        ({"data": "digits", "model": "lenet5"}, "lenet5"),
    ],
)
def test_data_and_models_that_do_not_fit_are_named_before_anything_runs(tmp_path, task, said):
    with pytest.raises(StudyError) as caught:
        run_study(study(tasks=[task]), tmp_path / "out", data=tmp_path, workers=0)
    (line,) = caught.value.problems
    assert said in line
    assert "\n" not in line
    assert not (tmp_path / "out").exists()


def test_data_that_changed_under_old_results_is_refused(tmp_path):
    path = tmp_path / "mine.npz"
    x, y = uniform(Key(0), (40, 8, 8)).numpy(), np.arange(40) % 4
    mine = study(
        tasks=[{"data": f"npz:{path}", "model": "mlp-small"}],
        federations=[{"clients": 2, "rounds": 1}],
        attacks=[{"name": ECHO, "target": {"count": 1}}],
    )
    np.savez(path, x=x, y=y)
    assert len(run_study(mine, tmp_path / "out", workers=0).results) == 2
    np.savez(path, x=x[::-1], y=y)
    with pytest.raises(StudyError, match="is not the one of the results in"):
        run_study(mine, tmp_path / "out", workers=0)


def test_a_device_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(StudyError, match="device: got 'tpu', expected cpu, or cuda where there is one"):
        run_study(study(), tmp_path, device="tpu")


def test_ctrl_c_keeps_what_is_done(tmp_path):
    script = tmp_path / "go.py"
    out = tmp_path / "out"
    script.write_text(
        "import sys, time\n"
        "from tests.test_run import study\n"
        "from leakgauge.harness.study.run import run_study\n"
        "from leakgauge.harness.study.supervisor import Interrupted\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        f"        run_study(study(seeds=list(range(200))), {str(out)!r}, workers=1)\n"
        "    except Interrupted:\n"
        "        sys.exit(130)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen([sys.executable, str(script)], env=environment, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(out.glob("cells/*/result.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
        if list(out.glob("trainings/*/record.json")) and len(list(out.glob("trainings/*"))) > 3:
            break
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert (out / "study.json").exists()
    for path in out.glob("trainings/*/record.json"):
        assert Store(out).read_training(path.parent.name) is not None
        json.loads(path.read_text())


def test_workers_are_one_a_core():
    assert 1 <= cores() <= (os.cpu_count() or 1)
