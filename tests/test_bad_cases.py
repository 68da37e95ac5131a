"""What every reconstruction does with messages, models and parameters that it cannot use, or only in part."""

import dataclasses
import math

import pytest
import torch

from leakgauge.harness.core.contract import Reconstruction
from leakgauge.harness.federation import registry
from tests.by_rows import by_rows
from tests.doubles import small_task
from tests.victims import KEY, LENET, Says, make

CHEAP = {name: {"evaluations": 40} for name in ("dlg", "idlg", "inverting-gradients")}
CHEAP |= {name: {"evaluations": 40, "warm": 10} for name in ("map", "trap-weights")}
CHEAP |= {"learned": {"samples": 60, "epochs": 2}, "regressed": {"samples": 60}, "spear": {"samples": 2000}}
NAMES = [
    name
    for name in registry.classes("attack")
    if (attack := registry.build("attack", name, {})).kind == "reconstruction"
    and not attack.floor
    and "image" in attack.forms
]
every = pytest.mark.parametrize("name", NAMES)
labeled = pytest.mark.parametrize("name", [name for name in NAMES if "labels" in registry.defaults("attack", name)])
DENSE = small_task("mlp-small")


def run(name, seen, **parameters):
    found = registry.build("attack", name, {**CHEAP.get(name, {}), **parameters}).run(seen, KEY)
    assert isinstance(found, Reconstruction)
    for guess, message in zip(found.guesses, seen.messages, strict=True):
        assert guess.x.shape == (message.images, *seen.task.input_shape)
        assert guess.x.isfinite().all()
        assert guess.y.shape == (message.images,)
        assert guess.y.min() >= 0
        assert guess.y.max() < seen.task.classes
    return found.guesses


@every
def test_a_gradient_without_information_is_a_failure_and_costs_nothing(name):
    for value, what in ((0.0, "zero"), (math.nan, "not finite"), (math.inf, "not finite")):
        for guess in run(name, make(DENSE, defense=Says(value)).seen):
            assert guess.failure == f"the gradient is {what}"
            assert (guess.objective, guess.evaluations) == (math.inf, 0)
            assert not guess.x.any()


@every
def test_a_model_that_diverged_is_a_failure(name):
    case = make(DENSE)
    model = case.seen.model._replace(params=case.seen.model.params * math.nan)
    for guess in run(name, dataclasses.replace(case.seen, model=model, models=(model,))):
        assert guess.failure
        assert not guess.x.any()


@every
@pytest.mark.parametrize("task", [DENSE, LENET], ids=["mlp-small", "lenet-dlg"])
@pytest.mark.table(3)
def test_a_batch_of_a_single_class_is_no_error(name, task):
    if name == "quantile-biases" and task is LENET:
        pytest.skip("it refuses models without a dense ReLU layer")
    case = make(task, n=2, images=3, labels=torch.full((2, 3), 4))
    for guess in run(name, case.seen):
        # images that quantile-biases does not certify have no label
        assert guess.failure or guess.y.tolist() == [4, 4, 4] or name in ("dlg", "quantile-biases")


@every
@pytest.mark.table(3)
def test_a_batch_larger_than_the_model_can_separate_is_no_error(name):
    # 40 images behind a first layer of 32 units: their gradients have no unique explanation
    run(name, make(DENSE, n=1, images=40).seen)


@every
def test_one_label_of_a_task_with_two_classes_is_no_error(name):
    case = make(small_task("mlp-small", classes=2), n=2, labels=torch.ones(2, 1, dtype=torch.int64))
    for guess in run(name, case.seen):
        assert guess.failure or guess.y.tolist() == [1] or name == "dlg"


@labeled
def test_given_labels_are_needed_and_used_and_inferred_ones_are_neither(name):
    case, attack = make(DENSE), registry.build("attack", name, {"labels": "given"})
    assert attack.needs - {"auxiliary", "broadcast"} == {"messages", "models", "labels"}
    assert registry.build("attack", name, {}).needs - {"broadcast"} == {"messages", "models", "auxiliary"}
    wrong = tuple((labels + 1) % 10 for labels in case.seen.labels)
    guesses = run(name, dataclasses.replace(case.seen, labels=wrong), labels="given")
    assert [guess.y.tolist() for guess in guesses] == [labels.tolist() for labels in wrong]


@labeled
def test_labels_out_of_range_are_refused(name):
    case = make(DENSE)
    for label in (-1, 10):
        wrong = tuple(torch.full_like(labels, label) for labels in case.seen.labels)
        seen = dataclasses.replace(case.seen, labels=wrong)
        with pytest.raises(ValueError, match=f"expected labels in 0 to 9, got {label}"):
            run(name, seen, labels="given")


@every
@pytest.mark.table(3)
def test_a_model_that_is_not_covered_is_a_failure_that_names_an_attack_for_it(name):
    case = make(small_task("cnn2", (1, 16, 16)), n=1)
    (guess,) = run(name, case.seen)
    if name in ("analytic", "spear", "imprint"):
        assert ("trap-weights" if name == "imprint" else "map") in guess.failure
    else:
        assert guess.failure == ""


@every
def test_hinge_loss_is_refused_by_attacks_that_need_probabilities(name):
    seen, needs = make(small_task("svm")).seen, "expected a softmax cross-entropy loss"
    refusals = dict.fromkeys(("imprint", "learned", "quantile-biases", "spear"), needs)
    if words := (refusals | {"dlg": "expected labels for this loss"}).get(name):
        with pytest.raises(ValueError, match=words):
            run(name, seen)
    else:
        assert len(run(name, seen)) == len(seen.messages)


MODE, LABELS = "expected mode 'online' or 'offline', got 'on'", "expected labels 'inferred' or 'given', got 'guessed'"
START = "expected start 'normal' or 'uniform', got 'zero'"


@by_rows(
    ("dlg", {"restarts": 0}, "expected restarts >= 1, got restarts=0"),
    ("dlg", {"objective": "cosine"}, "expected objective 'l2' or 'likelihood', got 'cosine'"),
    ("idlg", {"evaluations": 0}, "expected evaluations >= 1, got evaluations=0"),
    ("idlg", {"start": "zero"}, START),
    ("idlg", {"labels": "guessed"}, LABELS),
    ("prior", {"guess": "median"}, "expected guess 'mean', 'flat', 'other' or 'majority', got 'median'"),
    ("inverting-gradients", {"restarts": 0}, "expected restarts >= 1, got restarts=0"),
    ("inverting-gradients", {"evaluations": 0}, "expected evaluations >= 1, got evaluations=0"),
    ("inverting-gradients", {"lr": 0.0}, "expected lr > 0, got lr=0.0"),
    ("inverting-gradients", {"lr": math.nan}, "expected lr > 0, got lr=nan"),
    ("inverting-gradients", {"tv": -1.0}, "expected tv >= 0, got tv=-1.0"),
    ("inverting-gradients", {"labels": "guessed"}, LABELS),
    ("inverting-gradients", {"start": "zero"}, START),
    ("map", {"tv": -1.0}, "expected tv >= 0, got tv=-1.0"),
    ("map", {"box": math.inf}, "expected box >= 0"),
    ("map", {"evaluations": 0}, "expected evaluations >= 1"),
    ("map", {"labels": "guessed"}, LABELS),
    ("map", {"warm": -1}, "expected warm >= 0"),
    ("map", {"naive_std": 0.0}, "expected naive_std > 0"),
    ("map", {"naive_std": 0.0, "objective": "l2"}, "expected naive_std > 0"),
    ("learned", {"samples": 0}, "expected samples >= 1, got samples=0"),
    ("learned", {"components": 0}, "expected components >= 1, got components=0"),
    ("learned", {"hidden": -1}, "expected hidden >= 0, got hidden=-1"),
    ("learned", {"epochs": 0}, "expected epochs >= 1, got epochs=0"),
    ("learned", {"lr": 0.0}, "expected lr > 0, got lr=0.0"),
    ("learned", {"lr": math.inf}, "expected lr > 0, got lr=inf"),
    ("learned", {"labels": "guessed"}, LABELS),
    ("regressed", {"samples": 1}, "expected samples >= 2, got samples=1"),
    ("regressed", {"labels": "guessed"}, LABELS),
    ("lira", {"mode": "on"}, MODE),
    ("lira", {"variance": "own"}, "expected variance 'pooled', 'per-example', 'global', got 'own'"),
    ("lira", {"shadows": 1}, "expected shadows >= 2, got shadows=1"),
    ("lira", {"mode": "offline", "shadows": 0}, "expected shadows >= 1, got shadows=0"),
    ("rmia", {"mode": "on"}, MODE),
    ("rmia", {"shadows": 1}, "expected shadows >= 2, got shadows=1"),
    ("rmia", {"offline_a": 1.5}, "expected 0 <= offline_a <= 1, got offline_a=1.5"),
    ("rmia", {"temperature": 0.0}, "expected temperature > 0 or 'auto', got temperature=0.0"),
    ("rmia", {"weight": 1.5}, "expected 0 <= weight <= 1 or 'auto', got weight=1.5"),
    ("rmia", {"variant": "on"}, "expected variant 'auto', 'online' or 'offline', got 'on'"),
    ("shadow-classifier", {"shadows": 0}, "expected shadows >= 1, got shadows=0"),
    ("loss-trajectory", {"statistic": "rank"}, "expected statistic 'loss' or 'confidence', got 'rank'"),
    ("membership-cosine", {"statistic": "loss"}, "cosine, difference, likelihood or norm, got 'loss'"),
    ("active-membership", {"statistic": "loss"}, "expected statistic 'gradient' or 'norm', got 'loss'"),
    *(("analytic", {"ridge": ridge}, "expected 0 < ridge < 1") for ridge in (0.0, 1.0, -1e-9, math.nan)),
    ("spear", {"samples": 0}, "expected samples >= 1, got samples=0"),
    ("imprint", {"groups": 0}, "expected groups >= 1"),
)
def test_parameters_out_of_range_are_refused(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        registry.lookup("attack", name)(**parameters)
