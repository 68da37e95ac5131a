"""Regressions: tasks whose label is a number, attacked by whatever can."""

import re

import numpy as np
import pytest
import torch

from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.rng import normal, uniform
from leakgauge.harness.core.threats import View
from leakgauge.harness.data.given import given
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.federation.observe import observe
from leakgauge.harness.federation.registry import defaults
from leakgauge.harness.learn.losses import SQUARED
from leakgauge.harness.learn.models import build, names
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.prepare import attack_key, prepare, trained_federation
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from tests.doubles import study_table
from tests.test_own_data import KEY, refused


def test_every_architecture_but_svm_has_one_output_and_squared_loss_for_numbers():
    for name, _ in names():
        if name in ("svm", "resnet110"):
            continue
        model = build(name, (3, 32, 32), 0)
        assert (model.classes, model.loss, model.numbers) == (1, SQUARED, True)
        task = ModelTask(model)
        params, x = task.init(KEY), uniform(KEY, (2, 3, 32, 32))
        assert task.outputs(params, x).shape == (2, 1)
    refused(
        lambda: build("svm", (3,), 0), "classes >= 2, got classes=0; the label of this task is a number", ValueError
    )
    refused(lambda: build("mlp", (3,), 1), "expects classes >= 2, got classes=1", ValueError)


WIDE = np.array([1.0, 50.0, 2000.0, 0.1, 1.0])
TABLE = normal(KEY.child("table"), (150, 5)).numpy() * WIDE + np.array([0, 10, 5000, 0, 3])
NUMBERS = TABLE[:, 1] / 10 + TABLE[:, 0]
WORK = {
    "analytic": "server",
    "dlg": "server",
    "idlg": "server",
    "map": "server+labels",
    "inverting-gradients": "server+labels",
    "prior": "server",
    "membership-loss": "server",
    "membership-cosine": "server",
    "membership-sum": "server",
    "fedmia": "server",
    "loss-trajectory": "server",
    "lineup": "server+lineup",
    "linkability": "server",
    "source": "server",
    "property": "server",
}
"""Attacks on regressions, and an adversary who can."""


MEMBERS = {"kind": "members", "count": 6, "round": 0}
TARGETS = {
    "membership": MEMBERS,
    "source": MEMBERS,
    "linkability": {"count": 4, "batch": 2, "rounds": 2, "shuffled": True},
    "property": {"count": 4, "batch": 2, "property": "brightness"},
}


def regression(name, lr, tmp_path):
    """All attacks on a regression, undefended."""
    attacks = []
    for attack in registry.classes("attack"):
        built = registry.build("attack", attack, {})
        few = {"evaluations": 100, "restarts": 1, "shadows": 2}
        one = {"name": attack, **{key: value for key, value in few.items() if key in defaults("attack", attack)}}
        powers = {"broadcast": "malicious-server", "craft": "participant+craft"}
        threats = [threat for power, threat in powers.items() if power in built.needs]
        one["threat"] = threats[0] if threats else WORK.get(attack, "colluding-server")
        one |= {"labels": "given"} if "labels" in one["threat"] else {}
        target = TARGETS.get(built.kind, {"count": 2})
        attacks.append(one | {"target": target | {"round": 1} if "craft" in built.needs else target})
    federation = {"clients": 3, "rounds": 2, "samples": 60, "algorithm": "fedsgd", "lr": lr}
    table = study_table(federation, ["none"], attacks, data=name)
    with pytest.raises(StudyError) as caught:  # those that are known not to fit, before anything runs
        run_study(resolve(table), tmp_path / "out", workers=0)
    lines = [line for line in caught.value.problems if line.startswith("attacks (")]
    assert lines == list(caught.value.problems)
    unfit = {line[len("attacks (") :].partition(")")[0]: line for line in lines}
    assert unfit.keys().isdisjoint(WORK)
    table["attacks"] = [one for one in attacks if one["name"] not in unfit]
    return run_study(resolve(table), tmp_path / "out", workers=0), unfit


@pytest.mark.matrix
def test_a_regression_on_raw_numbers_is_trained_and_attacked_and_what_cannot_refuses(tmp_path):
    run, unfit = regression(given("houses", (TABLE, NUMBERS)), 1e-8, tmp_path)
    found = {one.cell.attack.name: {e.name: e for e in one.estimates} for one in run.results.values()}
    assert set(found) == set(WORK)
    refusals = {one.cell.attack.name: one for one in run.failures.values()}
    assert {*refusals, *unfit} == registry.classes("attack").keys() - WORK.keys()
    words = "|".join(
        (
            "it reads tokens, not",
            "softmax cross-entropy",
            "at least 2 classes",
            "numbers of a regression",
            "mlp-small with",
            "for a regression, use",
        )
    )
    assert all(re.search(words, line) and "\n" not in line for line in unfit.values())
    for one in refusals.values():
        assert re.search(words, one.message)
        assert (one.kind, "\n" in one.message) == ("ValueError", False)
    training = next(one for one in run.trainings.values() if one.spec.malice is None)
    assert [one.accuracy for one in training.evaluations] == [None] * 3
    assert training.evaluations[-1].loss < training.evaluations[0].loss
    assert training.classes == ()
    # exact, behind inputs of five ranges
    assert found["analytic"]["mse"].value < 1e-9
    assert found["lineup"]["named"].value == 1.0
    assert found["map"]["mse"].value < 1e-6 < found["prior"]["mse"].value
    assert all("label_accuracy" not in estimates for estimates in found.values())


@pytest.mark.matrix
def test_the_number_of_a_regression_is_found_by_analytic_and_dlg_and_the_floor_guesses_the_mean(tmp_path):
    unit = uniform(KEY.child("unit"), (100, 5)).numpy()
    data, federation = given("unit", (unit, 3 + unit[:, 0])), {"clients": 2, "rounds": 1, "samples": 40}
    federation |= {"algorithm": "fedsgd", "lr": 0.01}
    attacks = [{"name": name, "target": {"count": 3}} for name in ("analytic", "dlg", "prior")]
    study = resolve(study_table(federation, ["none"], attacks, data=data, model="linear"))
    spec = study.trainings[0]
    ready = prepare(spec, tmp_path)
    key, keep = ready.key.child("training"), Keep(frozenset({0}), frozenset({0}))
    record = train(
        ready.task, spec.federation, ready.defense, ready.holdings, ready.test, key, engine="loop", keep=keep
    )
    federation = trained_federation(spec, ready, record, "loop")
    for cell in study.cells:
        seen, truth = observe(federation, View.parse(cell.threat), cell.target)
        made = registry.build_attack(cell.attack).run(seen, attack_key(0, cell.attack, cell.target))
        got, true = (torch.cat([one.y for one in many]) for many in (made.guesses, truth.victims))
        if cell.attack.name == "prior":
            assert torch.equal(got, seen.auxiliary.y.mean().expand(3))
        else:
            assert torch.allclose(got, true, atol=1e-2), cell.attack.name
    assert true.dtype == torch.float32


@pytest.mark.parametrize("partition", ["shards", "dirichlet", "unbalanced"])
def test_a_regression_is_not_dealt_by_class(partition, tmp_path):
    name = given("houses", (TABLE, NUMBERS))
    federation = {"clients": 3, "rounds": 1, "partition": partition, "lr": 1e-9}
    attacks = [{"name": "membership-loss"}]
    table = study_table(federation, ["none"], attacks, data=name, model="linear-regression")
    if partition == "unbalanced":
        assert len(run_study(resolve(table), tmp_path / "out", workers=0).results) == 1
        return
    words = f"federations.partition: got {partition!r}, which deals by class, but the labels are the numbers of a regr"
    refused(lambda: run_study(resolve(table), tmp_path / "out", workers=0), words, StudyError)
