"""DP-FedAvg: the messages, the noise of the server, the claims."""

import math

import pytest
import torch
from scipy import integrate, stats

from leakgauge import Key, Links, rng
from leakgauge.defenses.dp_fedavg import DPFedAvg, _moments_epsilon
from leakgauge.harness.core.accounting import epsilon
from leakgauge.harness.core.claim import Horizon, Unit, Verdict, judge
from leakgauge.harness.core.threats import Threat
from tests.baselines_case import SENDERS, SERVER, SHARED, encode, estimate, score, setting_of
from tests.by_rows import by_rows
from tests.oracles import follows


def decode(defense, updates, setting, server=SERVER):
    wires = [encode(defense, update)[0] for update in updates]
    who = SENDERS[: len(updates)]
    return defense.decode(None, wires, Links(setting, who, [SHARED] * len(who)), server)


@by_rows(
    (1e5, 1e2, [0.97, 0.98, 1.00, 1.07, 1.18, 2.21, 7.50]),
    (1e6, 1e3, [1.17, 1.17, 1.20, 1.28, 1.39, 2.44, 8.13]),
    (1e6, 1e4, [1.73, 1.92, 2.08, 3.06, 8.49, 32.38, 187.01]),
)
def test_the_moments_accountant_returns_the_epsilons_of_the_source(clients, drawn, printed):
    # McMahan et al. 2018, Table 1: z = 1, delta = K^-1.1, 1 to 10^6 rounds; two decimals
    found = [_moments_epsilon(drawn / clients, 1.0, 10**power, clients**-1.1) for power in range(7)]
    assert found == pytest.approx(printed, abs=0.0051)


def test_dp_fedavg_sends_the_clipped_update_and_the_server_adds_normal_noise_to_the_mean():
    # alpha 1e-6; 300,000 errors detect a scale off by 6 % with a miss rate under 1e-6 (the twin)
    d, defense = 300_000, DPFedAvg(clip=2.0, noise_std=0.5)
    setting, update = setting_of(d), 0.1 * rng.normal(Key(12), (d,))
    wire = encode(defense, update)[0]
    assert len(wire) == 4 * d
    clipped = estimate(defense, wire, d)
    assert float(clipped.double().norm()) == pytest.approx(2.0, rel=1e-6)
    assert torch.allclose(clipped, update * 2.0 / update.norm(), rtol=1e-5)
    error = (decode(defense, [update] * 3, setting) - 3 / 4 * clipped).double().numpy()
    distribution = stats.norm(scale=0.5 / 4).cdf
    assert follows(error, distribution)
    assert not follows(1.06 * error, distribution)
    assert abs(stats.pearsonr(error[1:], error[:-1]).statistic) < 5 / d**0.5


def test_the_mean_of_dp_fedavg_has_equal_weights_and_a_fixed_denominator():
    defense = DPFedAvg(clip=10.0, noise_std=1e-9)
    mean = decode(defense, [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 3.0])], setting_of(2))
    assert SENDERS[1].samples == 10 * SENDERS[0].samples
    assert torch.allclose(mean, torch.tensor([0.25, 0.75]), atol=1e-6)


def test_if_all_take_part_dp_fedavg_is_exactly_gaussian_with_sensitivity_clip():
    # sensitivity 1, delta 1e-5, sigma 1 -> epsilon 4.3771780957; mu = 2: 9.9972561464, see test_accounting
    defense, setting = DPFedAvg(clip=3.0, noise_std=3.0), setting_of(10)
    one, four = (defense.claim([None] * rounds, setting) for rounds in (1, 4))
    assert one.epsilon == judge(one).proved == pytest.approx(4.3771780957, rel=1e-9)
    assert four.epsilon == judge(four).proved == pytest.approx(9.9972561464, rel=1e-9)
    assert judge(one).verdict is Verdict.HOLDS
    assert (one.horizon, four.horizon) == (Horizon.ONE_ROUND, Horizon.WHOLE_RUN)
    assert one.unit is Unit.CLIENT


@pytest.mark.parametrize("participants", [1, 40, 400])
def test_the_epsilon_of_dp_fedavg_is_that_of_the_whole_run(participants):
    setting = setting_of(10, clients=400, participants=participants, rounds=50)
    defense = DPFedAvg(clip=0.5, epsilon=3.0)
    claim = defense.claim([None] * 50, setting)
    assert claim.epsilon == pytest.approx(3.0, rel=1e-9)
    assert DPFedAvg(clip=5.0, epsilon=3.0).sigma(setting) == pytest.approx(10 * defense.sigma(setting), rel=1e-9)


def remove_delta(share, distance, eps):
    """delta of (1-q) N(0, 1) + q N(distance, 1) against N(0, 1), by integration."""

    def excess(y):
        null = stats.norm.pdf(y)
        return max(0.0, (1 - share) * null + share * stats.norm.pdf(y - distance) - math.exp(eps) * null)

    start = distance / 2 + math.log((math.exp(eps) - 1 + share) / share) / distance
    return integrate.quad(excess, start, start + 15, limit=200)[0]


def test_a_drawn_sample_of_fixed_size_moves_the_sum_by_two_clips_and_breaks_the_claim():
    defense = DPFedAvg(clip=1.0, noise_std=1.0)
    claim = defense.claim([None], setting_of(10, clients=40, participants=4))
    found = judge(claim)
    assert found.verdict is Verdict.BROKEN
    # 1e-4: the grid of the privacy loss distribution; the source claims far less at this noise
    assert remove_delta(0.1, 2.0, found.proved) == pytest.approx(1e-5, rel=1e-2)
    assert remove_delta(0.1, 1.0, claim.epsilon) < 1e-5 < remove_delta(0.1, 2.0, claim.epsilon) / 100


def test_the_two_clips_are_attained_if_all_others_send_the_opposite():
    one, others = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0])
    defense, setting = DPFedAvg(clip=1.0, noise_std=1e-9), setting_of(2, clients=40)
    drawn, replaced = (decode(defense, [first, *[others] * 3], setting) for first in (one, others))
    assert torch.allclose(4 * (drawn - replaced), torch.tensor([2.0, 0.0]), atol=1e-6)


def test_dp_fedavg_promises_nothing_against_adversaries_that_see_messages():
    claim = DPFedAvg().claim([None], setting_of(10))
    assert claim.against == {Threat.PARTICIPANT, Threat.PUBLIC}
    (against_messages,) = claim.further
    assert against_messages.against == set(Threat) - {Threat.PARTICIPANT, Threat.PUBLIC}
    assert against_messages.epsilon(0.5) == math.inf


def test_the_claim_for_drawn_clients_is_above_the_tight_one_for_independent_draws():
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    tight = epsilon(SelfComposedDpEvent(PoissonSampledDpEvent(0.1, GaussianDpEvent(5.0)), 100), 1e-5)
    assert tight < _moments_epsilon(0.1, 5.0, 100, 1e-5) < 2 * tight


def test_the_likelihood_of_dp_fedavg_is_zero_at_the_truth_for_any_length():
    defense, update = DPFedAvg(clip=0.5), rng.normal(Key(13), (50,))
    wire = encode(defense, update)[0]
    scores = score(defense, [wire] * 3, 50, torch.stack([update, 7 * update, 0.4 * update / update.norm()]))
    assert scores[:2].tolist() == pytest.approx([0.0, 0.0], abs=0.1)
    # a distance of 0.1 in units of 1e-6
    assert float(scores[2]) == pytest.approx(0.5 * 1e10, rel=1e-3)


def test_an_epsilon_that_no_noise_reaches_by_32_moments_is_refused():
    # ln(1e5) / 32 = 0.35977893
    with pytest.raises(ValueError, match=r"expected epsilon > 0\.359779 at delta=1e-05, got epsilon=0\.3"):
        DPFedAvg(epsilon=0.3).sigma(setting_of(10, clients=40))
    assert DPFedAvg(epsilon=0.3).sigma(setting_of(10)) > 1
