"""A run that is killed or stopped loses nothing that is finished, and leaves no process and no temporary file."""

import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import threading
import tomllib

import pytest

from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.rng import Key, uniform
from leakgauge.harness.study.engine import Interrupted
from leakgauge.harness.study.orphans import handling, interrupt
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Limits
from leakgauge.harness.study.store import Store, load_run, verify
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.killed import STUDY, ends_within, litter, start, until
from tests.test_run import COIN, study

STUCK = "tests.doubles:Stuck"
WAITS = f"""
[[attacks]]
name = "{STUCK}"
seconds = 600
target = {{kind = "members", count = 10}}
"""


def of(text):
    return dataclasses.replace(resolve(tomllib.loads(text)), text=text)


def finished(folder):
    """Bytes of what is finished, except the times."""
    return {
        path.relative_to(folder): path.read_bytes()
        for one in folder.glob("*/*/manifest.json")
        for path in one.parent.iterdir()
        if path.name != "timing.json"
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    assert not run_study(of(STUDY), folder, workers=0).missing
    return folder


def stuck(folder):
    """Whether a run has reached an attack that takes ten minutes."""
    log = folder / "out" / "run.log"
    return log.exists() and "under tests.doubles:Stuck" in log.read_text()


@pytest.mark.matrix
def test_a_killed_run_leaves_no_process_and_ends_as_if_it_had_not_been_killed(reference, tmp_path):
    process = start(tmp_path, "--workers", 2, study=STUDY + WAITS)
    until(lambda: stuck(tmp_path))
    process.kill()
    assert ends_within(2, process.pid)
    process.communicate()
    out = tmp_path / "out"
    assert finished(out)
    assert finished(out).items() < finished(reference).items()
    (out / ".study.json.abcdefgh.part").write_text("{")
    run_study(of(STUDY), out, workers=0, merge=True)
    assert finished(out) == finished(reference)
    assert litter(out) == []


@pytest.mark.slow
def test_runs_killed_at_200_random_moments_end_as_if_they_had_not_been_killed(reference, tmp_path):
    kills, folder = 0, tmp_path / "0"
    for number in itertools.count():
        moment, how = uniform(Key(0).child(number), (2,)).tolist()
        process = start(folder, "--workers", 2)
        if how < 0.7:  # while results are written; else at any moment, most of which are imports
            until(lambda: (folder / "out" / "trainings").exists() or process.poll() is not None)  # noqa: B023
            moment /= 4
        if kills < 200:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(8 * moment)
            kills += process.poll() is None
            process.kill()
            assert ends_within(2, process.pid)
        said = process.communicate()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, said
            assert finished(folder / "out") == finished(reference)
            assert verify(folder / "out")[1] == {}
            assert litter(folder / "out") == []
            if kills == 200:
                return
            folder = tmp_path / str(number + 1)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGHUP, signal.SIGINT))]
)
@pytest.mark.matrix
def test_a_stop_keeps_finished_cells_and_is_exit_code_130(reference, tmp_path, number):
    process = start(tmp_path, "--workers", 2, study=STUDY + WAITS)
    until(lambda: stuck(tmp_path))
    os.killpg(process.pid, number)  # the workers too, as a closed terminal does
    said = process.communicate(timeout=60)[1]
    assert said == "leakgauge: stopped; finished results are kept, the same command resumes\n"
    assert process.returncode == 130
    assert ends_within(2, process.pid)
    out = tmp_path / "out"
    assert 0 < len(finished(out).items() & finished(reference).items()) == len(finished(out))
    assert not list(out.glob("cells/*/failure.json"))
    assert not (out / "lock").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.matrix
def test_a_stop_of_a_run_without_workers_keeps_finished_cells(tmp_path, number):
    def stop(progress, outcome):
        if progress.done == 1:
            os.kill(os.getpid(), number)

    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP, and what is ignored stays ignored
    with pytest.raises(Interrupted):
        run_study(study(), tmp_path, workers=0, listen=stop)
    assert signal.signal(number, before) == signal.SIG_DFL
    assert len(load_run(tmp_path).results) == 1
    assert len(run_study(study(), tmp_path, workers=0).results) == 6


def test_a_signal_that_is_ignored_stays_ignored_and_a_thread_handles_none():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handling(interrupt):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) == interrupt
    finally:
        signal.signal(signal.SIGHUP, before)
    seen = []

    def look():
        with handling(interrupt):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


@by_rows(
    ({"seconds": 600, "megabytes": 2000}, Limits(megabytes=1500), "MB, more than the 1500 MB of --cell-memory"),
    pytest.param(
        {"seconds": 600},
        Limits(seconds=30),  # enough for any other cell on a loaded machine
        "took longer than 30 s, the limit of --cell-timeout",
        marks=pytest.mark.slow,
    ),
)
@pytest.mark.matrix
def test_a_cell_beyond_a_limit_fails_with_the_reason_and_its_worker_is_replaced(parameters, limits, message, tmp_path):
    attacks = [{"name": COIN}, {"name": STUCK, **parameters}, {"name": COIN, "target": {"kind": "members", "count": 9}}]
    first, asked = (study(attacks=attacks[:end], defenses=[{"name": "none"}]) for end in (1, 3))
    run_study(first, tmp_path, workers=0)
    run = run_study(asked, tmp_path, workers=1, limits=limits)
    (failure,) = run.failures.values()
    assert failure.kind == "LimitExceeded"
    assert failure.message.endswith(message)
    assert [result.cell.attack.name for result in run.results.values()] == [COIN] * 2
    assert Store(tmp_path).read_failure(failure.cell.id) == failure


def test_a_limit_is_broken_above_it_and_by_nobody_who_has_ended():
    assert Limits(seconds=5.0).broken(5.0, None) == ""
    assert Limits(seconds=5.0).broken(5.1, None) == "took longer than 5 s, the limit of --cell-timeout"
    assert Limits(megabytes=2).broken(0.0, 2.0) == ""
    assert Limits(megabytes=1).broken(0.0, 2.0) == "used 2 MB, more than the 1 MB of --cell-memory"
    assert Limits(megabytes=1).broken(0.0, None) == ""  # it has ended


def test_limits_need_a_worker_that_can_be_ended(tmp_path):
    with pytest.raises(StudyError, match="limits of a cell need worker processes: expected workers >= 1, got workers="):
        run_study(study(), tmp_path, workers=0, limits=Limits(seconds=1))


@pytest.mark.slow
def test_two_studies_at_once_in_one_folder_break_nothing_in_eight_trials(reference, tmp_path):
    other = STUDY.replace('"small"', '"other"').replace("seeds = [0, 1]", "seeds = [1, 2]")
    for trial in range(8):
        folder = tmp_path / str(trial)
        (folder / "other").mkdir(parents=True)
        (folder / "other" / "out").symlink_to(folder / "out")
        (folder / "out").mkdir()
        runs = [start(folder, "--workers", 1), start(folder / "other", "--workers", 1, "--merge", study=other)]
        said = [run.communicate() for run in runs]
        codes = [run.returncode for run in runs]
        assert sorted(codes) in ([0, 2], [0, 0]), said
        if 2 in codes:
            text, winner = said[codes.index(2)][1], runs[codes.index(0)]
            assert f"is being written by process {winner.pid} on " in text or "holds the results of" in text
        for where, words in ((folder, {"study": STUDY}), (folder / "other", {"study": other})):
            run = start(where, "--workers", 1, "--merge", **words)
            said = run.communicate()
            assert run.returncode == 0, said
        run = load_run(folder / "out")
        assert (len(run.results), run.failures, run.missing) == (3 * 2 * 5, {}, ())
        assert finished(reference).items() < finished(folder / "out").items()
        assert verify(folder / "out")[1] == {}
