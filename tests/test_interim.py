"""Interim models are tested on a stated subsample; final and attacked ones, and those whose loss is read, on all."""

import dataclasses
import itertools
import json

import pytest
import torch

from leakgauge import Key, rng
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.result import Evaluation
from leakgauge.harness.core.rows import rows
from leakgauge.harness.federation.loop import Keep, evaluation, replay_state, train
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.store import Store
from leakgauge.reports.charts.curves import training_charts
from leakgauge.reports.select import Analysis
from tests.doubles import Counting, random_examples, small_task
from tests.test_run import COIN, study

TASK = small_task()
CLIENTS = {k: random_examples(10 + 3 * k, seed=k) for k in range(5)}
TEST = random_examples(60, seed=99)
FEW = 20


class Impatient(NoDefense):
    """No defense, which ends the federation before the third round without a state."""

    asked = 0

    def stops(self, state):
        Impatient.asked += 1
        return Impatient.asked == 3


def go(defense=None, models=(), seed=0, *, held_out=None, **changes):
    spec = FederationSpec(**{"clients": 5, "rounds": 4, "batch": 4, "lr": 0.5, "interim_samples": FEW, **changes})
    keep = Keep(frozenset(models), frozenset(models))
    how = {"engine": "loop", "keep": keep, "held_out": held_out}
    return train(TASK, spec, defense or NoDefense(), CLIENTS, TEST, Key(seed), **how)


def samples(training):
    return [one.samples for one in training.evaluations]


def test_interim_models_are_tested_on_few_samples_and_final_and_attacked_ones_on_all():
    assert samples(go()) == [FEW] * 4 + [60]
    assert samples(go(models=[0, 2])) == [60, FEW, 60, FEW, 60]
    assert samples(go(evaluate_every=3)) == [FEW, FEW, 60]
    assert samples(go(interim_samples=0)) == samples(go(interim_samples=60)) == [60] * 5


@pytest.mark.parametrize("defense", [NoDefense(), Gaussian(noise_std=0.01)])
def test_the_subsample_is_the_same_in_all_rounds_and_for_all_defenses_of_a_seed(defense):
    training, models = go(defense), go(defense, models=range(4)).models
    chosen = rng.subset(Key(0).child("interim"), 60, FEW)
    few = Examples(TEST.x[chosen], TEST.y[chosen])
    assert training.evaluations[:4] == [evaluation(TASK, models[number], few, number) for number in range(4)]
    losses = [one.loss for one in training.evaluations]
    assert [(one.before, one.after) for one in training.feedback] == list(itertools.pairwise(losses))
    assert go(defense, seed=1).evaluations[0] != training.evaluations[0]


def test_a_subsample_changes_neither_model_nor_messages_nor_the_final_accuracy():
    few, whole = (go(Gaussian(noise_std=0.01), [1], interim_samples=n) for n in (FEW, 0))
    assert torch.equal(few.final, whole.final)
    assert few.messages == whole.messages
    assert few.snr_db == whole.snr_db
    assert few.evaluations[-1] == whole.evaluations[-1]
    assert few.evaluations[1] == whole.evaluations[1]  # attacked
    assert few.evaluations[2] != whole.evaluations[2]


def test_losses_that_a_defense_or_a_schedule_reads_are_of_all_samples():
    plateau = go(schedule="plateau", patience=1)
    assert samples(plateau) == samples(go(Counting())) == [60] * 5
    whole = go(schedule="plateau", patience=1, interim_samples=0)
    assert (plateau.learning_rates, plateau.feedback) == (whole.learning_rates, whole.feedback)
    assert replay_state(Counting(), whole.setting, go(Counting()).feedback) == 4


def test_losses_that_are_read_are_of_held_out_samples_if_there_are_any():
    held_out = random_examples(40, seed=7)
    training = go(Counting(), models=range(4), held_out=held_out)
    losses = [evaluation(TASK, training.models[number], held_out, number).loss for number in range(4)]
    assert [one.before for one in training.feedback] == losses
    assert [one.loss for one in training.evaluations[:4]] != losses  # of test samples
    assert samples(go(Counting(), held_out=held_out)) == [FEW] * 4 + [60]


def test_a_training_that_stops_early_is_tested_on_all_samples():
    Impatient.asked = 0
    training = go(Impatient(), rounds=9)
    assert [(one.round, one.samples) for one in training.evaluations] == [(0, FEW), (1, FEW), (2, 60)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A study of two seeds without attacked rounds, whose interim models are tested on 20 of 50 samples."""
    federation = {"clients": 4, "rounds": 3, "samples": 80, "test_samples": 50, "interim_samples": FEW}
    attacks = [{"name": COIN, "target": {"kind": "members", "count": 20}}]
    small = study(seeds=[0, 1], federations=[federation], attacks=attacks, defenses=[{"name": "none"}], limit=False)
    folder = tmp_path_factory.mktemp("interim")
    return folder, run_study(small, folder, workers=0)


def test_record_rows_and_chart_state_the_same_numbers_of_samples(run):
    folder, found = run
    for record in found.trainings.values():
        assert Store(folder).read_training(record.spec.id) == record
        assert samples(record) == [FEW] * 3 + [50]
        stored = json.loads((folder / "trainings" / record.spec.id / "record.json").read_text("utf-8"))
        assert [one.get("samples") for one in stored["evaluations"]] == [FEW] * 3 + [50]
    table = [row for row in rows(found) if row["quantity"] in ("accuracy", "loss", "final_accuracy")]
    assert {(row["quantity"], row.get("round"), row["n"]) for row in table} == {
        *((name, number, FEW) for name in ("accuracy", "loss") for number in range(3)),
        *((name, 3, 50) for name in ("accuracy", "loss")),
        ("final_accuracy", None, 50),
    }
    wide, narrow = (next(r for r in table if (r["quantity"], r.get("round")) == ("accuracy", at)) for at in (2, 3))
    assert wide["high"] - wide["low"] > narrow["high"] - narrow["low"]
    analysis = Analysis(found)
    for chart in training_charts(analysis, next(iter(analysis.settings))):
        assert "Points of interim rounds are of 20 of 50 test samples" in chart.caption
        assert [row[-1] for row in chart.rows] == ["20"] * 3 + ["50"]
        assert all(" to " in row[3] for row in chart.rows)


def test_a_record_without_numbers_of_samples_is_of_all_test_samples(run):
    record = next(iter(run[1].trainings.values()))
    old = [Evaluation(one.round, one.accuracy, one.loss) for one in record.evaluations]
    assert samples(dataclasses.replace(record, evaluations=tuple(old))) == [50] * 4
