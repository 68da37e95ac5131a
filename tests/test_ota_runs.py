"""Over-the-air aggregation and its orthogonal baseline in training runs and under observation."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from leakgauge import Key, rng
from leakgauge.defenses.none import NoDefense
from leakgauge.defenses.ota import OTA
from leakgauge.defenses.ota_orthogonal import OTAOrthogonal
from leakgauge.harness.core.cell import FederationSpec, Target
from leakgauge.harness.core.codec import unpack_float64
from leakgauge.harness.core.contract import Examples, Link
from leakgauge.harness.core.threats import Threat, View
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.federation.observe import TrainedFederation, observe
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from tests.by_rows import by_rows
from tests.doubles import random_examples, small_task
from tests.oracles import ALPHA
from tests.ota_case import FIRST, both

"""False-alarm rate of every statistical test in this file."""

TASK = small_task()
TEST = random_examples(40, seed=99)
CLIENTS = {k: random_examples(10, seed=k) for k in range(4)}
SPEC = FederationSpec(clients=4, rounds=3, batch=0, lr=0.1, algorithm="fedsgd")
KEEP = Keep(frozenset({0, 1, 2}), frozenset({0, 1, 2}))


def go(defense, spec=SPEC, keep=KEEP):
    return train(TASK, spec, defense, CLIENTS, TEST, Key(0), engine="loop", keep=keep)


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
@both
def test_a_run_goes_through_the_loop(kind, algorithm):
    d = TASK.layout.dim
    trained = go(kind(), dataclasses.replace(SPEC, algorithm=algorithm))
    assert torch.isfinite(trained.final).all()
    assert trained.message_bytes == [8 * d] * 3
    alone = kind is not OTA  # of OTA, one sum of all arrives
    assert [len(messages) for messages in trained.messages.values()] == [4 if alone else 1] * 3
    assert {message.users for message in trained.messages[1]} == {1 if alone else 4}
    assert {len(message.wire) for message in trained.messages[1]} == {8 * d}
    if not alone:
        assert trained.snr_db == [None] * 3
    assert not torch.equal(trained.final, go(kind(channel_seed=1), SPEC).final)


@both
def test_a_channel_without_noise_trains_as_no_defense_does(kind):
    # noise of standard deviation 1e-6 at most in the mean; every gradient is shorter than L
    plain, clear = go(NoDefense()), go(kind(clip=100.0, epsilon=1e9, noise_variance=0.0))
    torch.testing.assert_close(clear.final, plain.final, rtol=0, atol=1e-5)


def federation(defense):
    train_set = random_examples(60, seed=1)
    rows = {k: np.arange(10 * k, 10 * k + 10) for k in range(4)}
    holdings = {k: Examples(train_set.x[own], train_set.y[own]) for k, own in rows.items()}
    training = train(TASK, SPEC, defense, holdings, TEST, Key(0), engine="loop", keep=KEEP)
    return TrainedFederation(TASK, SPEC, defense, training, train_set, TEST, rows, "loop", Key(0))


def clipped_gradients(defense, here, truth):
    """[n, d]: the victims' own clipped gradients."""
    params = here.training.models[1].clone().requires_grad_()
    gradients = [torch.autograd.grad(TASK.loss(params, *victim), params)[0] for victim in truth.victims]
    return torch.stack([gradient.double() * min(1.0, defense.clip / float(gradient.norm())) for gradient in gradients])


def test_a_probe_is_one_wire_that_holds_the_victim_and_everybodys_noise():
    # more victims than clients; 16,668 squares detect a variance off by 12 % (a scale by 6 %) as 11 standard errors
    defense = OTA(clip=0.5, **FIRST)
    here = federation(defense)
    seen, truth = observe(here, View(Threat.SERVER), Target(round=1, count=6, batch=2))
    assert len(seen.messages) == 6
    assert {len(message.wire) for message in seen.messages} == {8 * TASK.layout.dim}
    assert seen.model.state == defense.init(seen.setting)
    received = torch.stack([unpack_float64(message.wire, TASK.layout.dim) for message in seen.messages])
    rest = received - seen.model.state.gain * clipped_gradients(defense, here, truth)
    distribution, total = stats.chi2(rest.numel()), float(rest.square().sum()) / (696.745373 + 1)
    assert distribution.ppf(ALPHA / 2) < total < distribution.ppf(1 - ALPHA / 2) < 1.06**2 * total
    assert np.abs(np.corrcoef(rest.numpy()) - np.eye(6)).max() < 6 / TASK.layout.dim**0.5


def test_the_message_of_a_round_is_the_sum_of_all_clients_who_are_one_victim():
    here = federation(OTA(clip=0.5, **FIRST))
    seen, truth = observe(here, View(Threat.SERVER), Target(kind="messages", round=1, count=1))
    assert seen.messages == here.training.messages[1]
    assert [message.users for message in seen.messages] == [4]
    (victim,) = truth.victims
    sent, held = (sorted(x.flatten(1).tolist()) for x in (victim.x, here.train.x[:40]))
    assert sent == held
    with pytest.raises(ValueError, match="expected at most 1 messages in round 1, got count=2"):
        observe(here, View(Threat.SERVER), Target(kind="messages", round=1, count=2))
    here.training.truth[1][3] = here.training.truth[1][3][:9]
    with pytest.raises(ValueError, match=r"equally many records from each sender of the sum in round 1, got 9 to 10"):
        observe(here, View(Threat.SERVER), Target(kind="messages", round=1, count=1))
    del here.training.truth[1][3]
    with pytest.raises(ValueError, match="the sum of round 1 has messages of clients with unknown records: 3"):
        observe(here, View(Threat.SERVER), Target(kind="messages", round=1, count=1))


def test_a_probe_of_the_baseline_is_heard_alone():
    defense = OTAOrthogonal(epsilon=1e9, noise_variance=0.0)
    here = federation(defense)
    seen, truth = observe(here, View(Threat.SERVER), Target(round=1, count=6, batch=2))
    for message, own in zip(seen.messages, clipped_gradients(defense, here, truth), strict=True):
        found = defense.estimate(seen.model.state, message.wire, Link(seen.setting, message.sender, None))
        torch.testing.assert_close(found.double(), own, rtol=0, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class FromZero(ModelTask):
    """A model that starts at w = 0."""

    def init(self, key):
        return torch.zeros(self.layout.dim)


REGRESSION = FromZero(build("linear-regression", (30,), 1))


def excess(kind, users, rounds, draw):
    """Final training loss above the minimum, with step 1/(t + 10)."""
    key = Key(11).child(draw)
    x, y = rng.normal(key.child("x"), (users, 20, 30)), rng.normal(key.child("y"), (users, 20))
    clients = {k: Examples(x[k], y[k]) for k in range(users)}
    everything = Examples(x.flatten(0, 1), y.flatten())
    local = {"algorithm": "fedsgd", "batch": 0, "lr": 1 / 11, "schedule": "inverse", "decay": 1 / 11}
    spec = FederationSpec(clients=users, rounds=rounds, evaluate_every=rounds, **local)
    trained = train(REGRESSION, spec, kind(channel_seed=draw), clients, everything, key, engine="loop", keep=Keep())
    a, b = everything.x.double().numpy(), everything.y.double().numpy()
    best = np.linalg.solve(2 * a.T @ a / len(a) + 1e-3 * np.eye(30), 2 * a.T @ b / len(a))
    least = float(((a @ best - b) ** 2).mean() + 5e-4 * best @ best)
    return float(REGRESSION.loss(trained.final, *everything)) - least


@pytest.mark.slow
@by_rows((10, 0.949, 6.40, 0.911), (50, 0.974, 1.83, 0.972))
def test_the_regression_of_the_paper_ends_near_the_printed_losses(users, over_the_air, apart, optimum):
    # Printed: means of 5 draws of data, channel and noise, three digits; here 3 draws. The optimum varies with the
    # data, hence losses above it. One draw has a relative standard deviation of a third at most (0.30 to 0.33 in 60
    # to 150 runs written for this), the ratio of the two means 0.24: five of them are a factor of 3.3.
    draws = range(3)
    summed = [excess(OTA, users, 1000, draw) for draw in draws]
    single = [excess(OTAOrthogonal, users, 1000 // users, draw) for draw in draws]
    assert max(summed) < min(single) / 10
    for found, printed in ((summed, over_the_air), (single, apart)):
        assert (printed - optimum - 1e-3) / 3.3 < np.mean(found) < (printed - optimum + 1e-3) * 3.3
