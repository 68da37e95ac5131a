"""What every reconstruction says of messages from which nothing, or not everything, can be told."""

import dataclasses

import pytest
import torch

from leakgauge.harness.core.contract import Reconstruction
from leakgauge.harness.federation import registry
from tests.doubles import small_task
from tests.victims import KEY, LENET, Says, make

CHEAP = {name: {"evaluations": 40} for name in ("dlg", "idlg", "map", "inverting-gradients")}
CHEAP |= {"learned": {"samples": 60, "epochs": 2}, "spear": {"samples": 2000}}
NAMES = [
    name
    for name in registry.classes("attack")
    if (attack := registry.build("attack", name, {})).kind == "reconstruction" and not attack.floor
]
every = pytest.mark.parametrize("name", NAMES)
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
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_gradient_of_zeros_or_none_is_a_failure_with_its_reason(name, value):
    for guess in run(name, make(DENSE, defense=Says(value)).seen):
        assert guess.failure in ("the gradient is zero", "the gradient is not finite")
        assert guess.objective == float("inf")
        assert not guess.x.any()


@every
@pytest.mark.parametrize("task", [DENSE, LENET], ids=["mlp-small", "lenet-dlg"])
def test_a_batch_of_a_single_class_is_no_error(name, task):
    case = make(task, n=2, images=3, labels=torch.full((2, 3), 4))
    for guess in run(name, case.seen):
        assert guess.failure or guess.y.tolist() == [4, 4, 4] or name == "dlg"


@every
def test_a_batch_larger_than_the_model_can_separate_is_no_error(name):
    # 40 images behind a first layer of 32 units: their gradients have no unique explanation
    run(name, make(DENSE, n=1, images=40).seen)


@every
def test_one_label_of_a_task_with_two_classes_is_no_error(name):
    case = make(small_task("mlp-small", classes=2), n=2, labels=torch.ones(2, 1, dtype=torch.int64))
    for guess in run(name, case.seen):
        assert guess.failure or guess.y.tolist() == [1] or name == "dlg"


@pytest.mark.parametrize("name", [name for name in NAMES if "labels" in registry.defaults("attack", name)])
@pytest.mark.parametrize("label", [-1, 10])
def test_labels_out_of_range_are_refused(name, label):
    case = make(DENSE)
    wrong = tuple(torch.full_like(labels, label) for labels in case.seen.labels)
    seen = dataclasses.replace(case.seen, labels=wrong)
    with pytest.raises(ValueError, match=f"expected labels in 0 to 9, got {label}"):
        run(name, seen, labels="given")


@every
def test_a_model_that_is_not_covered_is_a_failure_that_names_who_does_it(name):
    case = make(small_task("cnn2", (1, 16, 16)), n=1)
    (guess,) = run(name, case.seen)
    if name in ("analytic", "spear"):
        assert "map" in guess.failure
    else:
        assert guess.failure == ""
