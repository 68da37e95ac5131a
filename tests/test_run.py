"""A study from end to end: every way of running it gives the same bytes, and no finished result is lost."""

import errno
import os
import re
import shutil

import numpy as np
import pytest

from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.core.rng import Key, uniform
from leakgauge.harness.gate.measure import measured
from leakgauge.harness.study.engines.workers import cores
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.store import load_run
from leakgauge.harness.study.study import resolve
from leakgauge.reports.select import Analysis
from tests.by_rows import by_rows
from tests.doubles import study_table

ECHO, COIN = "tests.doubles:Echo", "tests.doubles:Coin"


def study(**changes):
    """Two small trainings with three cells each."""
    federation = {"clients": 4, "rounds": 2, "samples": 80, "test_samples": 50, "local_steps": 1}
    attacks = [
        {"name": ECHO, "target": {"round": 1, "count": 2}},
        {"name": ECHO, "target": {"kind": "messages", "round": 0, "count": 2}},
        {"name": COIN, "target": {"kind": "members", "count": 20}},
    ]
    return resolve({**study_table(federation, ["none", {"name": "gaussian", "noise_std": 0.01}], attacks), **changes})


def contents(folder):
    """Bytes of every file except the times, and what was set aside."""
    return {
        name: path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "timing.json"
        if not (name := str(path.relative_to(folder))).startswith("quarantine")
    }


def outcomes(*words, **named):
    """Run a study in this process: the outcomes of its jobs."""
    found = []
    run_study(*words, **named, workers=0, listen=lambda progress, outcome: found.append(outcome))
    return [outcome for outcome in found if outcome]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    run = run_study(study(), folder, workers=0)
    assert len(run.results) == 6
    return folder


@pytest.fixture
def copy(reference, tmp_path):
    return shutil.copytree(reference, tmp_path / "copy")


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


def test_the_claim_of_a_whole_run_covers_every_round(reference):
    (record,) = (one for one in load_run(reference).trainings.values() if one.spec.defense.name == "gaussian")
    noise = 2 * 1.0 / 0.01  # of a replaced update with norm 1 over the noise: mu of one round
    assert (record.one_round.horizon, record.whole_run.horizon) == ("one round", "whole run")
    assert record.one_round.proved.epsilon == pytest.approx(gaussian_epsilon(noise, record.one_round.delta))
    assert record.whole_run.proved.epsilon == pytest.approx(gaussian_epsilon(noise * 2**0.5, record.whole_run.delta))


def test_the_folder_states_which_attacks_are_defense_aware(tmp_path):
    quick = {"evaluations": 2, "restarts": 1, "target": {"count": 1}}
    both = [{"name": "map", "warm": 0, **quick}, {"name": "idlg", **quick}]
    run = run_study(study(attacks=both), tmp_path, workers=0)
    assert {cell.attack.key for cell in run.cells} == set(run.attacks)
    assert all(run.attacks[cell.attack.key].aware == (cell.attack.name == "map") for cell in run.cells)


def test_a_second_run_trains_once_for_all_attacks_and_gives_the_same_bytes(reference, tmp_path):
    kinds = [outcome.job.kind for outcome in outcomes(study(), tmp_path)]
    assert (kinds.count("training"), kinds.count("attack")) == (2, 6)
    assert contents(tmp_path) == contents(reference)


@pytest.mark.matrix
def test_other_processes_give_the_same_bytes(reference, tmp_path):
    run_study(study(), tmp_path, workers=2)
    assert contents(tmp_path) == contents(reference)


def test_resuming_gives_the_same_bytes_and_repeats_nothing(reference, copy):
    cells = sorted((copy / "cells").iterdir())
    shutil.rmtree(cells[0])
    (cells[1] / "result.json").write_text('{"cell": {')
    before = (cells[2] / "result.json").stat().st_mtime_ns
    assert len(outcomes(study(), copy)) == 2
    assert contents(copy) == contents(reference)
    assert (cells[2] / "result.json").stat().st_mtime_ns == before


@pytest.mark.matrix
def test_a_lost_training_is_trained_again_to_the_same_bytes(reference, copy):
    for path in copy.glob("trainings/*/kept.npz"):
        path.write_bytes(path.read_bytes()[:-100])
    shutil.rmtree(copy / "cells")
    run_study(study(), copy, workers=0)
    assert contents(copy) == contents(reference)


def test_a_cell_added_later_finds_its_training(reference, copy):
    more = study(attacks=[{"name": ECHO, "target": {"round": [0, 1], "count": 2}}])
    run = run_study(more, copy, workers=0, merge=True)
    assert len(run.results) == 8
    for cell_id in run.results:
        known = reference / "cells" / cell_id / "result.json"
        assert not known.exists() or known.read_bytes() == (copy / "cells" / cell_id / "result.json").read_bytes()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.matrix
def test_a_failed_cell_has_its_reason_and_affects_no_other(tmp_path, workers):
    broken = study(attacks=[{"name": ECHO, "break_with": ["", "the reason"]}], defenses=[{"name": "none"}])
    run = run_study(broken, tmp_path, workers=workers)
    assert len(run.results) == 1
    (failure,) = run.failures.values()
    assert (failure.kind, failure.message) == ("RuntimeError", "the reason")
    assert "doubles.py" in failure.trace


@pytest.mark.matrix
def test_a_killed_worker_loses_only_its_cell(tmp_path):
    broken = study(attacks=[{"name": ECHO, "break_with": ["kill", ""], "target": {"round": [0, 1]}}])
    run = run_study(broken, tmp_path, workers=2)
    assert len(run.results) == 4
    assert {failure.message for failure in run.failures.values()} == {
        "the worker process died (killed by signal 9); out of memory, or killed; tried 3 times"
    }


def test_a_training_that_diverges_fails_its_cells_with_the_reason(tmp_path):
    wild = study(federations=[{"clients": 4, "rounds": 3, "samples": 80, "lr": 1e30}], defenses=[{"name": "none"}])
    run = run_study(wild, tmp_path, workers=0)
    assert not run.results
    for failure in run.failures.values():
        assert re.match("training failed: .*(diverged|finite update)", failure.message)


def test_a_failed_cell_is_tried_again(tmp_path):
    broken = study(attacks=[{"name": ECHO, "break_with": "x"}], defenses=[{"name": "none"}])
    run_study(broken, tmp_path, workers=0)
    assert [outcome.job.kind for outcome in outcomes(broken, tmp_path)] == ["attack"]


def test_a_full_disk_fails_the_cell_and_keeps_the_finished_ones(copy, monkeypatch):
    lost = sorted((copy / "cells").iterdir())[0]
    shutil.rmtree(lost)
    real = os.replace

    def full(source, target):
        if "cells" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    (outcome,) = outcomes(study(), copy)
    assert "No space left on device" in outcome.error
    run = load_run(copy)
    assert len(run.results) == 5
    assert run.missing == (lost.name,)


@by_rows(
    ({"data": "mnits", "model": "mlp"}, "no data set 'mnits'; did you mean 'mnist'?"),
    ({"data": "digits", "model": "mpl"}, "no model 'mpl'; did you mean 'mlp'?"),
    ({"data": "mnist", "model": "mlp"}, "mnist"),
    ({"data": "digits", "model": "lenet5"}, "lenet5"),
)
def test_missing_data_and_unfit_models_are_reported_before_anything_runs(task, message, tmp_path):
    with pytest.raises(StudyError) as caught:
        run_study(study(tasks=[task]), tmp_path / "out", data=tmp_path, workers=0)
    (line,) = caught.value.problems
    assert message in line
    assert "\n" not in line
    assert not (tmp_path / "out").exists()


def test_an_unknown_class_of_victims_is_reported_before_anything_runs(tmp_path):
    targets = [{"kind": kind, "count": 2, "victim_classes": ["3", "eleven"]} for kind in ("probe", "members")]
    attacks = [{"name": name, "target": target} for name, target in zip((ECHO, COIN), targets, strict=True)]
    with pytest.raises(StudyError) as caught:
        run_study(study(attacks=attacks), tmp_path / "out", workers=0)
    known = "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    said = {problem.partition("): ")[2] for problem in caught.value.problems}
    assert said == {f"victim_classes: no class 'eleven'. Known: {known}"}
    assert not (tmp_path / "out").exists()


def test_seeds_without_attacks_count_for_the_accuracy_and_not_for_the_audits(tmp_path):
    noise = {"name": "gaussian", "noise_std": 0.01}
    asked = study(defenses=[noise], attacks=[{"name": ECHO}], seeds=[0, 1, 2], attack_seeds=[1], audit=4)
    run = run_study(asked, tmp_path, workers=0)
    assert not run.failures
    (records,) = Analysis(run).trainings.values()
    assert [(r.spec.seed, r.audited is not None) for r in records] == [(0, False), (1, True), (2, False)]
    found = {one.metric: one.values for one in measured(run).measures if one.attack is None}
    assert [len(found[metric]) for metric in ("accuracy", "bits", "epsilon")] == [3, 3, 1]
    assert None not in found["epsilon"]


def test_a_model_with_batch_norm_and_a_defense_of_single_records_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(StudyError) as caught:
        run_study(
            study(tasks=[{"data": "photos", "model": "resnet20-bn"}], defenses=[{"name": ["none", "dp-sgd", "udp"]}]),
            tmp_path / "out",
            workers=0,
        )
    assert [line.split(":")[0] for line in caught.value.problems] == ["defenses (dp-sgd)", "defenses (udp)"]
    assert all("model 'resnet20-bn' mixes the records of a batch" in line for line in caught.value.problems)


def test_auxiliary_data_of_another_kind_have_the_victims_shape_and_random_labels(tmp_path):
    x = uniform(Key(0), (40, 8, 8)).numpy()
    np.savez(tmp_path / "alike.npz", x=x, y=np.zeros(40, np.int64))
    np.savez(tmp_path / "small.npz", x=x[:, :4], y=np.arange(40) % 4)
    threats = {name: f"server+auxiliary=npz:{tmp_path}/{name}.npz" for name in ("alike", "small", "nowhere")}
    of = {"name": "prior", "guess": "other", "target": {"round": 0, "count": 3}}
    mine = study(threats=["server", threats["alike"]], attacks=[of])
    run = run_study(mine, tmp_path / "out", workers=0)
    other = [
        np.load(tmp_path / f"out/cells/{cell.id}/arrays.npz")["guess"] for cell in mine.cells if cell.threat != "server"
    ]
    assert len(run.results) == len(mine.cells)
    assert all(any(np.allclose(one[0, 0, :, :, 0], image) for image in x) for one in other)
    with pytest.raises(StudyError) as caught:
        run_study(study(threats=[threats["small"], threats["nowhere"]], attacks=[of]), tmp_path / "no", workers=0)
    assert len(caught.value.problems) == 2
    assert any("expected inputs (1, 8, 8) as in 'digits', got (1, 4, 8)" in line for line in caught.value.problems)


def test_changed_data_under_old_results_is_refused(tmp_path):
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


def test_an_unknown_device_is_one_line(tmp_path):
    with pytest.raises(StudyError, match="device: got 'tpu', expected cpu, or cuda if there is one"):
        run_study(study(), tmp_path, device="tpu")


def test_workers_are_one_a_core():
    assert 1 <= cores() <= (os.cpu_count() or 1)
