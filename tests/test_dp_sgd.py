"""DP-SGD at the client; test_clipping.py tests the clipping itself."""

import dataclasses

import pytest
import torch

from leakgauge import Key, Layout, Setting, audit
from leakgauge.defenses.dp_sgd import DPSGD
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.claim import Verdict, judge
from leakgauge.harness.federation.loop import Keep, make_plan, train
from leakgauge.harness.learn.batch import Work, train_clients
from tests.by_rows import by_rows
from tests.doubles import random_examples, small_task
from tests.oracles import follows

TASK = small_task("linear", (1, 100, 100))  # 100,010 parameters
SETTING = Setting(Layout(("w",), ((100,),)), 4, 4, 20, "update", steps=50, lr=0.1, batch=32, samples=1600)


@pytest.mark.parametrize("sends", ["gradient", "update"])
@pytest.mark.parametrize("clients", [[10, 40], [40]])
def test_a_step_has_noise_of_z_clips_over_the_batch(sends, clients):
    # the same batches with and without noise; alpha 1e-6, and 100,010 coordinates a client reject a scale 6 % off
    defense = DPSGD(clip=0.1, noise_std=0.5)
    algorithm = "fedsgd" if sends == "gradient" else "fedavg"
    spec = FederationSpec(clients=len(clients), algorithm=algorithm, local_steps=1, batch=20, lr=0.25)
    params = TASK.init(Key(0))
    work = [Work(random_examples(n, (1, 100, 100), seed=n), Key(1).child(n)) for n in clients]
    noisy, plain = (
        train_clients(TASK, params, work, make_plan(spec, 0.25, defense.local, noise), "loop").updates
        for noise in (defense.step_noise(SETTING), 0.0)
    )
    scale = 1.0 if sends == "gradient" else 0.25
    for row, n in zip(noisy - plain, clients, strict=True):
        unit = scale * 0.5 * 0.1 / min(20, n)
        error = (row / unit).double().numpy()
        assert follows(error, "norm")
        assert not follows(1.06 * error, "norm")


def test_it_trains_and_noise_comes_from_each_clients_own_key():
    task = small_task()
    clients = {k: random_examples(30, seed=k) for k in range(3)}
    spec = FederationSpec(clients=3, rounds=2, batch=8, lr=0.1)

    def go(defense):
        return train(task, spec, defense, clients, clients[0], Key(0), engine="loop", keep=Keep(frozenset({0, 1})))

    noisy, silent = go(DPSGD(noise_std=1.0)), go(DPSGD(noise_std=1e-9))
    assert torch.isfinite(noisy.final).all()
    assert (noisy.final - silent.final).norm() > 0.01
    assert torch.equal(noisy.final, go(DPSGD(noise_std=1.0)).final)


@pytest.mark.matrix
def test_the_noise_meets_the_budget_by_opacus_and_the_proved_epsilon_is_less():
    # the same numbers by opacus' own functions
    from opacus.accountants import RDPAccountant

    defense = DPSGD(epsilon=8.0, delta=1e-5)
    noise = defense.step_noise(SETTING)
    accountant = RDPAccountant()
    accountant.history = [(noise, 32 / 1600, 50 * 20)]
    claim = defense.claim([None] * 20, SETTING)
    assert claim.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)
    assert 7.9 < claim.epsilon <= 8.0
    assert judge(claim).verdict is Verdict.LOOSE
    assert 0.8 * claim.epsilon < judge(claim).proved < claim.epsilon


def test_a_full_batch_is_the_gaussian_mechanism():
    defense = DPSGD(noise_std=2.0, delta=1e-5)
    full = dataclasses.replace(SETTING, batch=0, steps=1)
    # mu = sqrt(4) / 2 = 1: epsilon 4.3771780957 at 1e-5, see test_accounting
    claim = defense.claim([None] * 4, full)
    assert judge(claim).proved == pytest.approx(4.3771780957, rel=1e-9)
    # the bound by Renyi divergences is slightly larger, never smaller
    assert 4.3771780957 < claim.epsilon < 1.15 * 4.3771780957


def test_a_budget_without_a_noise_is_refused_with_advice():
    with pytest.raises(ValueError, match=r"got epsilon=0.01 at delta=1e-05, 1000 steps .*: give noise_std instead"):
        DPSGD(epsilon=0.01).step_noise(SETTING)


@pytest.mark.matrix
@by_rows(
    pytest.param({}, {"batch": 5, "steps": 4}, 1, marks=pytest.mark.slow),
    pytest.param({"noise_std": 1.0}, {"batch": 5, "steps": 4}, 1, marks=pytest.mark.slow),
    pytest.param({}, {"batch": 2}, 10, marks=pytest.mark.slow),
    ({"noise_std": 1.0}, {"batch": 10}, 3),
    pytest.param({"noise_std": 3.0}, {"batch": 5, "samples": 50}, 20, marks=pytest.mark.slow),
)
def test_sampled_steps_are_audited_at_six_tenths_of_their_proof(parameters, setting, rounds):
    found = audit("dp-sgd", parameters, setting, rounds, seed=0)["audited"]
    # one in twenty bounds at 95 % may be above the proof, the strict one may not
    assert 0.6 * found["proved"] < found["epsilon_lower"]
    assert found["strict"] < found["proved"]
    assert (found["method"], found["distinguisher"]) == ("sampled Gaussian scores", "projection")
    assert (found["verdict"], found["assumes"]) == ("CONSISTENT", "the distribution's family")
