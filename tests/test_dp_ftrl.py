"""DP-FTRL with banded noise: the noise over rounds, the proof, the error of the models, planted faults."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import optimize, signal, special

from leakgauge import Key, Links, MessageError, Sender, audit, rng
from leakgauge.defenses.dp_fedavg import DPFedAvg
from leakgauge.defenses.dp_ftrl import DPFTRL
from leakgauge.harness.audit.engine import contradicts
from leakgauge.harness.audit.goodness_of_fit import check_fit
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.claim import Unit, Verdict, judge
from leakgauge.harness.core.contract import Defense, Feedback, claim_of
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.federation.round import Round
from leakgauge.harness.federation.small import Federation
from tests.audit_case import audit_mechanism
from tests.audit_case import setting_of as audited_setting
from tests.baselines_case import SHARED, encode, estimate, score, setting_of
from tests.doubles import random_examples, small_task
from tests.faults.library import lying
from tests.oracles import follows

RUN = Key(4).child("run", "server")


def turns(d, rounds=11, groups=4, **changes):
    """Two clients in each round, and `groups` groups."""
    changes = {"participation": "turns", **changes}
    return setting_of(d, clients=2 * groups, participants=2, rounds=rounds, **changes)


def decoded(defense, setting, updates, key=RUN):
    """[T, d] the means of all rounds; `updates` has the clients' updates of each round."""
    means, state = [], defense.init(setting)
    for number, each in enumerate(updates):
        wires = [encode(defense, update)[0] for update in each]
        links = Links(setting, [Sender(k, 8) for k in range(len(wires))], [SHARED] * len(wires))
        means.append(defense.decode(state, wires, links, key))
        state = defense.advance(state, Feedback(number, None, None))
    return torch.stack(means).double().numpy()


def matrix(band, rounds, momentum=0.0):
    """C [T, T], from a power series whose square is that of the models, term by term."""
    models = [sum(momentum**j for j in range(k + 1)) for k in range(rounds)]
    root = [1.0]
    for k in range(1, rounds):
        root.append((models[k] - sum(root[i] * root[k - i] for i in range(1, k))) / 2)
    return sum(root[k] * np.eye(rounds, k=-k) for k in range(min(band, rounds)))


def models(rounds, momentum=0.0):
    """A [T, T]: the models of a server with momentum, as sums of the means."""
    return np.array([[sum(momentum**j for j in range(t - s + 1)) for s in range(rounds)] for t in range(rounds)])


def distance(mu, delta):
    """Epsilon of N(0, 1) against N(mu, 1), by its definition."""

    def excess(eps):
        return special.ndtr(mu / 2 - eps / mu) - math.exp(eps) * special.ndtr(-mu / 2 - eps / mu) - delta

    return optimize.brentq(excess, 0.0, 200.0, xtol=1e-12)


def column(taken, rounds):
    return np.isin(np.arange(rounds), taken).astype(float)


def test_the_first_coefficients_are_those_of_the_square_root():
    # 1 / sqrt(1 - x) = 1 + x/2 + 3 x^2 / 8 + 5 x^3 / 16 + ...
    defense = DPFTRL(band=4)
    assert defense.diagonals(turns(1), 0.0) == pytest.approx((1, 1 / 2, 3 / 8, 5 / 16))
    assert defense.diagonals(turns(1), 0.9) == pytest.approx(matrix(4, 4, 0.9)[:, 0])
    assert len(DPFTRL().diagonals(turns(1, groups=3), 0.0)) == 3
    assert len(DPFTRL().diagonals(turns(1, groups=30), 0.0)) == 11
    assert DPFTRL().diagonals(setting_of(1), 0.9) == (1.0,)


def test_clients_send_the_clipped_update_and_the_mean_has_a_fixed_denominator():
    defense, update = DPFTRL(clip=2.0, noise_std=1e-9), torch.tensor([3.0, 4.0])
    wire = encode(defense, update)[0]
    assert len(wire) == 8
    assert torch.allclose(estimate(defense, wire, 2), torch.tensor([1.2, 1.6]))
    (mean,) = decoded(defense, setting_of(2), [[update, update]])
    assert mean == pytest.approx([0.6, 0.8])  # two of four
    assert score(defense, [wire], 2, update[None]).tolist() == pytest.approx([0.0], abs=0.1)
    for damaged in (b"", wire[:-1], wire + b"\0"):
        with pytest.raises(MessageError):
            estimate(defense, damaged, 2)
    with pytest.raises(ValueError, match="finite"):
        encode(defense, torch.tensor([math.nan, 1.0]))


def departs(noise, covariance):
    """The largest error of the covariance of noise [T, d] over rounds, in standard deviations."""
    variances = np.diag(covariance)
    spread = np.sqrt((np.outer(variances, variances) + covariance**2) / noise.shape[1])
    return np.abs((noise @ noise.T / noise.shape[1] - covariance) / spread).max()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_noise_of_all_rounds_has_the_covariance_of_the_inverse_of_the_matrix(momentum):
    # 36 entries: a normal quantile of 1e-6 / 36 is 5.5
    setting = turns(60_000, rounds=8, server_momentum=momentum)
    defense = DPFTRL(noise_std=0.5, band=3)
    noise = decoded(defense, setting, [[torch.zeros(60_000)]] * 8) * 2 / 0.5
    inverse = np.linalg.inv(matrix(3, 8, momentum))
    assert departs(noise, inverse @ inverse.T) < 5.5
    assert departs(noise, np.eye(8)) > 50
    white = matrix(3, 8, momentum) @ noise
    for row in white:
        assert follows(row, "norm")
        assert not follows(1.06 * row, "norm")
    assert np.abs(np.sum(noise[:, 1:] * noise[:, :-1], 1) / np.sum(noise**2, 1)).max() < 6 / 60_000**0.5


def test_a_training_adds_this_noise_to_its_models():
    # with a learning rate of almost zero, only noise moves the model
    changes = {"participation": "turns", "server_momentum": 0.5, "lr": 1e-12, "batch": 0}
    spec = FederationSpec(clients=6, participants=2, rounds=5, **changes)
    task, key, defense = small_task("linear"), Key(8), DPFTRL(noise_std=0.3)
    clients = {k: random_examples(10, seed=k) for k in range(6)}
    kept = Keep(frozenset(range(5)))
    training = train(task, spec, defense, clients, clients[0], key, engine="loop", keep=kept)
    d = training.setting.dim
    z = np.stack([rng.normal(key.child("server", t), (d,), torch.float64).numpy() for t in range(5)])
    moved = models(5, 0.5) @ np.linalg.inv(matrix(3, 5, 0.5)) @ z * 0.3 / 2
    found = torch.stack([*(training.models[t] for t in range(1, 5)), training.final]) - training.models[0]
    assert np.abs(found.double().numpy() - moved).max() < 1e-5
    assert np.abs(moved).max() > 0.5


def test_other_defenses_keep_one_key_a_round():
    setting, key = setting_of(3), Key(9)
    here = Round(DPFedAvg(), setting, None, 4)
    assert here.server_key(key, key.child("round", 4)) == key.child("round", 4, "server")
    again = Round(DPFTRL(), setting, None, 4)
    assert again.server_key(key, key.child("round", 4)) == key.child("server")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("groups", "band"), [(4, 1), (4, 3), (4, 4), (4, 6), (1, 1), (1, 3), (20, None)])
def test_the_proof_is_that_of_the_columns_of_the_worst_client(groups, band, momentum):
    setting = turns(5, rounds=11, groups=groups, server_momentum=momentum)
    defense = DPFTRL(clip=0.7, noise_std=5.0, band=band, delta=1e-6)
    c = matrix(band or groups, 11, momentum)
    mus = [0.7 * np.linalg.norm(c @ column(range(first, 11, groups), 11)) / 5 for first in range(groups)]
    claim = claim_of(defense, Federation.of(defense, setting).history, setting)
    assert claim.epsilon == judge(claim).proved == pytest.approx(distance(max(mus), 1e-6), rel=1e-9)
    assert (judge(claim).verdict, claim.unit) == (Verdict.HOLDS, Unit.CLIENT)
    assert claim.against == {Threat.PARTICIPANT, Threat.PUBLIC}
    assert claim.further[0].epsilon(0.5) == math.inf
    if band is not None and band <= groups:
        norms = np.linalg.norm(c[:, ::groups], axis=0)
        assert max(mus) == pytest.approx(0.7 * math.sqrt(norms @ norms) / 5, rel=1e-12)


@pytest.mark.parametrize(("groups", "band"), [(4, 3), (2, 5), (1, 3)])
def test_equal_updates_attain_the_sensitivity_and_no_others_exceed_it(groups, band):
    setting = turns(6, rounds=11, groups=groups)
    defense = DPFTRL(clip=2.0, epsilon=3.0, band=band)
    c, taken = matrix(band, 11), column(range(0, 11, groups), 11)
    mu = 2.0 * np.linalg.norm(c @ taken) / defense.sigma(setting, 0.0)
    assert distance(mu, 1e-5) == pytest.approx(3.0, rel=1e-9)

    def shift(updates):
        """The distance of the means of all rounds with and without a client, in standard deviations."""
        other = torch.zeros(6)
        pairs = [[other, update] if there else [other] for update, there in zip(updates, taken, strict=True)]
        moved = decoded(defense, setting, pairs) - decoded(defense, setting, [[other]] * 11)
        return np.linalg.norm(c @ moved) * 2 / defense.sigma(setting, 0.0)

    assert shift([9.0 * torch.eye(6)[0]] * 11) == pytest.approx(mu, rel=1e-6)
    for seed in range(5):
        assert shift(9.0 * rng.normal(Key(seed), (11, 6))) <= mu * (1 + 1e-6)


@pytest.mark.parametrize("setting", [setting_of(4, rounds=7), turns(4), turns(4, rounds=3, groups=9)])
def test_one_diagonal_is_dp_fedavg(setting):
    ours, theirs = DPFTRL(epsilon=2.0, band=1), DPFedAvg(epsilon=2.0)
    assert ours.sigma(setting, 0.9) == pytest.approx(theirs.sigma(setting), rel=1e-12)
    claims = [claim_of(one, Federation.of(one, setting).history, setting) for one in (ours, theirs)]
    assert claims[0].epsilon == pytest.approx(claims[1].epsilon, rel=1e-12) == pytest.approx(2.0)
    assert claims[0].assumes == claims[1].assumes


def test_fewer_rounds_and_a_client_that_misses_some_are_covered():
    setting, defense = turns(4), DPFTRL(epsilon=2.0)
    states = Federation.of(defense, setting).history
    whole = defense.claim(states[::4], setting.of_one_client).proved.epsilon(1e-5)
    assert whole == pytest.approx(2.0)
    for missed in itertools.combinations(states[::4], 2):
        assert defense.claim(missed, setting.of_one_client).proved.epsilon(1e-5) < whole
    assert defense.claim([], setting).proved.epsilon(1e-5) == 0


@pytest.mark.parametrize(("rounds", "groups", "momentum", "gain"), [(30, 10, 0.0, 0.53), (30, 10, 0.9, 0.41)])
def test_models_have_less_noise_at_the_same_epsilon(rounds, groups, momentum, gain):
    d = 2000
    setting = turns(d, rounds=rounds, groups=groups, server_momentum=momentum)
    errors = []
    for band in (None, 1):
        defense = DPFTRL(epsilon=4.0, band=band)
        noise = models(rounds, momentum) @ decoded(defense, setting, [[torch.zeros(d)]] * rounds)
        errors.append(float(np.sqrt((noise**2).mean())))
        exact = models(rounds, momentum) @ np.linalg.inv(matrix(band or groups, rounds, momentum))
        expected = defense.sigma(setting, momentum) / 2 * np.linalg.norm(exact) / rounds**0.5
        assert errors[-1] == pytest.approx(expected, rel=0.1)
    assert errors[0] < gain * errors[1]


@pytest.mark.parametrize(("rounds", "groups", "momentum"), [(30, 10, 0.0), (100, 8, 0.0), (30, 10, 0.9)])
def test_the_root_is_within_six_percent_of_the_best_equal_diagonals(rounds, groups, momentum):
    a, taken = models(rounds, momentum), column(range(0, rounds, groups), rounds)

    def error(later):
        c = sum(weight * np.eye(rounds, k=-k) for k, weight in enumerate([1.0, *later]))
        return np.log(np.linalg.norm(np.linalg.solve(c.T, a.T)) * np.linalg.norm(c @ taken))

    ours = matrix(groups, rounds, momentum)[1:groups, 0]
    best = optimize.minimize(error, ours, method="BFGS", options={"maxiter": 30})
    assert error(ours) - best.fun < math.log(1.06)


@pytest.mark.parametrize("participation", ["drawn", "poisson"])
def test_clients_that_may_come_in_any_round_are_refused(participation):
    with pytest.raises(ValueError, match=f"expected clients that take turns.*got 2 of 8 clients, {participation}"):
        DPFTRL().init(turns(3, participation=participation))


@pytest.mark.parametrize("epsilon", [0.01, 1000.0])
def test_extreme_parameters_have_their_epsilon_and_finite_means(epsilon):
    setting = turns(1)
    defense = DPFTRL(epsilon=epsilon, clip=1e-3)
    claim = claim_of(defense, Federation.of(defense, setting).history, setting)
    assert claim.epsilon == pytest.approx(epsilon, rel=1e-6)
    assert np.isfinite(decoded(defense, setting, [[torch.tensor([1e30])]] * 11)).all()


# ---- audits

BANDED = DPFTRL(epsilon=4.0, band=3)


def quieter(liar, honest, state, received, links, private):
    """Half of the noise."""
    loud = honest(state, received, links, private)
    return (loud + liar.sent(received, links).sum(0) / links.setting.participants) / 2


def alone(liar, honest, state, setting, private):
    """The noise of this round only."""
    return rng.normal(private.child(state.number), (setting.dim,), torch.float64)


def repeated(liar, honest, state, setting, private):
    """The same row of Z in every round."""
    row = rng.normal(private, (setting.dim,), torch.float64)
    return row * float(signal.lfilter([1.0], [1.0, 1 / 2, 3 / 8], np.ones(state.number + 1))[-1])


def added(liar, honest, state, setting, private):
    """Noise of each round that adds up instead of taking back: the same size in each round."""
    row = torch.zeros(setting.dim, dtype=torch.float64)
    for ago, part in enumerate(np.abs(signal.lfilter([1.0], [1.0, 1 / 2, 3 / 8], np.eye(1, state.number + 1)[0]))):
        row += part * rng.normal(private.child(state.number - ago), (setting.dim,), torch.float64)
    return row


def fresh(liar, honest, state, setting, private):
    """Noise of the stated size, independent of the other rounds."""
    size = np.linalg.norm(signal.lfilter([1.0], [1.0, 1 / 2, 3 / 8], np.eye(1, state.number + 1)[0]))
    return size * rng.normal(private.child(state.number), (setting.dim,), torch.float64)


FAULTS = {
    "noise that adds up": lying(BANDED, added, "noise"),
    "independent noise": lying(BANDED, fresh, "noise"),
    "half the noise": lying(BANDED, quieter, "decode"),
    "noise of the round only": lying(BANDED, alone, "noise"),
    "one row": lying(BANDED, repeated, "noise"),
}


@pytest.mark.parametrize("seed", range(2))
def test_a_fit_finds_faults_of_the_noise_and_none_without(seed):
    setting, key = audited_setting(36, rounds=3), Key(seed)
    assert not check_fit(BANDED, setting, key).rejects
    for name, faulty in FAULTS.items():
        assert check_fit(faulty, setting, key).rejects, name


@pytest.mark.parametrize("seed", range(2))
def test_trials_over_all_rounds_find_half_the_noise_and_nothing_without(seed):
    federation = Federation.of(BANDED, audited_setting(2, rounds=3))
    claim = claim_of(BANDED, federation.history, federation.setting)
    for defense, above in ((BANDED, False), (FAULTS["half the noise"], True), (FAULTS["one row"], True)):
        mechanism = Mechanism(dataclasses.replace(federation, defense=defense), Threat.PARTICIPANT)
        found = audit_mechanism(mechanism, claim, 300, 0.95, Key(seed))
        assert contradicts(claim, dataclasses.replace(found, strict=found.epsilon_lower)) == above


@pytest.mark.parametrize("band", [1, 3])
def test_the_stated_loss_of_all_rounds_is_that_of_the_proof(band):
    found = audit("dp-ftrl", {"epsilon": 8.0, "band": band}, {}, 3, trials=1000, seed=1)
    assert found["audited"]["code"] == "CONSISTENT"
    stated = found["audited"]["stated"]
    assert stated["low"] == pytest.approx(8, rel=1e-6)
    assert stated["high"] == pytest.approx(8, rel=1e-6)


def test_correlated_rounds_without_independent_parts_state_no_loss(monkeypatch):
    monkeypatch.setattr(DPFTRL, "independent", Defense.independent)
    stated = audit("dp-ftrl", {"epsilon": 8.0, "band": 3}, {}, 3, trials=50, seed=1)["audited"]["stated"]
    assert stated["pairs"] == 0
    assert "no privacy loss can be computed" in stated["lacks"]


def test_a_study_audits_the_band_of_clients_that_take_turns():
    assert DPFTRL().settled(turns(4)) == {"band": 4}
    assert DPFTRL(band=2).settled(turns(4)) == {"band": 2}


def test_an_audit_of_correlated_rounds_is_consistent():
    found = audit("dp-ftrl", {"epsilon": 2.0, "band": 3}, {}, 3, trials=200, seed=0)
    assert (found["verdict"], found["audited"]["code"]) == ("HOLDS", "CONSISTENT")
    assert 0.5 < found["audited"]["epsilon_lower"] <= found["proved"]["epsilon"]
