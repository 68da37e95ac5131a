"""The server's optimizer, and which clients take part."""

import dataclasses
import math
from pathlib import Path

import dp_accounting as dp
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant

from leakgauge.defenses.dp_fedavg import DPFedAvg
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.jopeq_sound import SoundJoPEQ
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.accounting import epsilon
from leakgauge.harness.core.cell import FederationSpec, PartSpec, TaskSpec, TrainingSpec
from leakgauge.harness.core.claim import EVERY_ROUND, IN_SUMS, Horizon
from leakgauge.harness.core.contract import Setting, claim_of
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.federation.round import participants
from leakgauge.harness.learn.batch import Server
from leakgauge.harness.study.prepare import prepare

DELTA = 1e-5


def setting(**changes) -> Setting:
    plain = Setting(Layout(("w",), ((12,),)), 60, 20, 9, "gradient", 1, 0.3, 0, 5)
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize("sends", ["gradient", "update"])
@pytest.mark.parametrize("how", [{}, {"server_momentum": 0.9}, {"server_optimizer": "adam"}, {"server_lr": 2.5}])
def test_server_steps_as_torch_does(sends, how):
    means = torch.randn(5, 12, generator=torch.Generator().manual_seed(1)).double()
    rates = [0.3, 0.3, 0.2, 0.1, 0.05] if sends == "gradient" else [1.0] * 5
    server, params = Server.of(setting(sends=sends, **how)), torch.ones(12).double()
    theirs = torch.nn.Parameter(torch.ones(12).double())
    optimizer = (
        torch.optim.Adam([theirs])
        if "server_optimizer" in how
        else torch.optim.SGD([theirs], lr=1.0, momentum=how.get("server_momentum", 0.0))
    )
    for mean, rate in zip(means, rates, strict=True):
        params = server.step(params, mean, rate)
        optimizer.param_groups[0]["lr"] = rate * how.get("server_lr", 1.0)
        theirs.grad = mean if sends == "gradient" else -mean
        optimizer.step()
    assert torch.allclose(params, theirs.detach(), rtol=0, atol=1e-6)


def test_clients_that_take_turns_take_part_equally_often():
    turns = setting(participation="turns", rounds=7)
    rounds = [participants(Key(3), number, range(60), turns) for number in range(7)]
    assert [len(drawn) for drawn in rounds] == [20] * 7
    assert sorted([k for drawn in rounds[:3] for k in drawn]) == list(range(60))
    assert rounds[3] == rounds[0]
    counts = np.bincount([k for drawn in rounds for k in drawn])
    assert (counts.min(), counts.max(), turns.turns) == (2, 3, 3)


def test_clients_of_poisson_rounds_are_drawn_by_themselves():
    drawn = [participants(Key(3), number, range(60), setting(participation="poisson")) for number in range(400)]
    sizes = np.array([len(each) for each in drawn])
    assert abs(sizes.mean() - 20) < 4 * math.sqrt(60 / 3 * 2 / 3 / 400)
    assert abs(sizes.var() / (60 / 3 * 2 / 3) - 1) < 4 * math.sqrt(2 / 400)


def test_a_client_that_speaks_once_has_the_claim_of_one_message():
    once, defense = setting(participation="turns", rounds=3), Gaussian(epsilon=2.0, delta=DELTA)
    whole = claim_of(defense, [None] * 3, once)
    assert whole.epsilon == pytest.approx(2.0) == pytest.approx(whole.proved.epsilon(DELTA))
    assert whole.horizon is Horizon.WHOLE_RUN
    assert EVERY_ROUND not in whole.assumes
    assert whole.assumes == (IN_SUMS, "clients take turns, each in at most 1 of 3 rounds")
    twice = claim_of(SoundJoPEQ(epsilon=1.0), [None] * 6, setting(participation="turns", rounds=6))
    assert twice.epsilon == pytest.approx(2.0)
    assert twice.proved.epsilon(0.0) <= 2.0
    every = claim_of(defense, [None] * 3, setting(rounds=3))
    assert every.proved.epsilon(DELTA) > 3.5


def test_noise_of_dp_fedavg_is_of_the_rounds_of_one_client():
    defense = DPFedAvg(epsilon=1.0, delta=DELTA)
    once, all_of_them = setting(participation="turns", rounds=3), setting(clients=20, rounds=1)
    assert defense.sigma(once) == defense.sigma(all_of_them)
    claim = claim_of(defense, [None] * 3, once)
    assert claim.proved.epsilon(DELTA) == pytest.approx(1.0)
    assert claim.proved.tight


def test_poisson_rounds_of_dp_fedavg_have_the_epsilon_of_the_sampled_gaussian_mechanism():
    poisson, defense = setting(participation="poisson", rounds=30), DPFedAvg(epsilon=2.0, delta=DELTA, clip=0.5)
    claim = claim_of(defense, [None] * 30, poisson)
    event = dp.PoissonSampledDpEvent(1 / 3, dp.GaussianDpEvent(defense.sigma(poisson) / 0.5))
    independent = PLDAccountant(value_discretization_interval=1e-3).compose(event, 30).get_epsilon(DELTA)
    assert claim.proved.epsilon(DELTA) == pytest.approx(independent, rel=0.01)
    assert 0.99 * 2.0 < claim.epsilon <= 2.0
    drawn = claim_of(DPFedAvg(noise_std=defense.sigma(poisson), clip=0.5), [None] * 30, setting(rounds=30))
    assert drawn.proved.epsilon(DELTA) > 1.5 * epsilon(claim.proved.event, DELTA)


def trained(**changes):
    task, known = TaskSpec("digits", "mlp-small"), {"clients": 30, "rounds": 6, "samples": 900, "algorithm": "fedsgd"}
    federation = FederationSpec(**known, batch=0, lr=0.5, **changes)
    ready = prepare(TrainingSpec(task, federation, PartSpec("none"), 0), Path())
    given = ready.task, federation, NoDefense(), ready.holdings, ready.test, ready.key.child("training")
    return train(*given, engine="dense", keep=Keep())


def test_momentum_turns_and_lost_messages_train():
    plain, moved = trained(), trained(server_momentum=0.9)
    assert moved.evaluations[-1].loss < plain.evaluations[-1].loss
    turns = trained(participants=10, participation="turns", schedule="linear")
    assert turns.learning_rates == pytest.approx([0.5 * (1 - t / 6) for t in range(6)])
    assert turns.violations[EVERY_ROUND].broken == 30
    lost = trained(dropout=0.5)
    assert lost.violations[EVERY_ROUND].broken > 20
    assert not torch.equal(lost.final, plain.final)


def test_a_round_in_which_nobody_speaks_leaves_the_model():
    quiet = trained(participants=1, participation="poisson")
    sent = np.array(quiet.message_bytes) > 0
    assert 0 < sent.sum() < 6
    assert len(quiet.norms) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server_momentum": 1.0}, "server_momentum < 1"),
        ({"server_lr": 0.0}, "server_lr > 0"),
        ({"server_optimizer": "adam", "server_momentum": 0.5}, "server_momentum=0 with server_optimizer=adam"),
        ({"dropout": 1.0}, "dropout < 1"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        FederationSpec(**changes)


def test_a_training_that_stops_early_has_the_noise_and_the_learning_rates_of_all_rounds():
    whole = FederationSpec(clients=8, rounds=6, samples=80, algorithm="fedsgd", batch=0, schedule="linear")
    spec = TrainingSpec(TaskSpec("digits", "linear"), whole, PartSpec("dp-fedavg", {"epsilon": 8.0}), 0)
    models = []
    for stop_after in (None, 2, 9):
        federation = dataclasses.replace(whole, stop_after=stop_after)
        ready = prepare(dataclasses.replace(spec, federation=federation), Path("."))
        parts = ready.task, federation, ready.defense, ready.holdings, ready.test, ready.key
        models.append(train(*parts, engine="dense", keep=Keep(frozenset({1}))))
    assert [len(one.learning_rates) for one in models] == [6, 2, 6]
    assert torch.equal(models[0].models[1], models[1].models[1])
    assert torch.equal(models[0].final, models[2].final)
    assert models[0].learning_rates[:2] == models[1].learning_rates
    assert models[1].evaluations[-1].round == 2
    assert models[1].evaluations[-1].samples == len(ready.test.y)
    short = claim_of(ready.defense, [None] * 2, models[1].setting).proved.epsilon(DELTA)
    assert short < claim_of(ready.defense, [None] * 6, models[0].setting).proved.epsilon(DELTA)
