"""The attacker does not know which label was used in which step: further starts try other orders."""

import dataclasses

import pytest
import torch
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.simulate import client_updates
from leakgauge.attacks.map import MAP
from leakgauge.harness.core.codec import pack_float32
from leakgauge.harness.learn.batch import LocalPlan
from tests.doubles import small_task
from tests.victims import KEY, make

LR = 1.0
ORDER = torch.tensor([[7, 2]])


def stepped():
    """One victim that took two steps of one image each, with the larger label first."""
    case = make(small_task(), n=1, images=2, sends="update", lr=LR, labels=ORDER)
    seen = case.seen
    local = LocalPlan(gradient=False, steps=2, epochs=None, batch=1, lr=LR, momentum=0.0)
    update = client_updates(seen.task, seen.model.params, case.x, one_hot(ORDER, 10).float(), local)
    message = seen.messages[0]._replace(wire=pack_float32(update[0]), steps=2)
    setting = dataclasses.replace(seen.setting, steps=2, batch=1)
    return case, dataclasses.replace(seen, messages=(message,), setting=setting)


@pytest.mark.slow
def test_further_starts_find_the_order_of_the_labels():
    case, seen = stepped()
    attack = MAP(prior="tv", tv=0.0, objective="l2", naive_std=1e-3, labels="given", evaluations=400)
    (first,) = attack.run(seen, KEY).guesses
    (best,) = dataclasses.replace(attack, restarts=8).run(seen, KEY).guesses
    assert first.y.tolist() == [2, 7]
    assert best.y.tolist() == [7, 2]
    assert best.objective < first.objective / 10
    assert (best.x[0] - case.x[0, 0]).square().mean() < 1e-5
    assert (first.x[1] - case.x[0, 0]).square().mean() > 1e-3


@pytest.mark.parametrize("ease", [0.0, -1.0, float("nan")])
def test_a_search_that_never_eases_is_refused(ease):
    with pytest.raises(ValueError, match="expected ease > 0, got ease="):
        MAP(ease=ease)


def test_a_single_step_keeps_its_order():
    case = make(small_task(), n=1, images=2, labels=ORDER)
    (guess,) = (
        MAP(prior="tv", tv=0.0, labels="given", restarts=3, evaluations=100, unroll=False).run(case.seen, KEY).guesses
    )
    assert guess.y.tolist() == [2, 7]
