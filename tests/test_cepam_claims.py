"""The claims of CEPAM and their correct bounds.

A printed value was derived from Ling et al. 2025 by an independent script; tolerances follow from its digits.
"""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtr

from leakgauge import Key, Layout, Link, Links, Sender, Setting
from leakgauge.defenses._cepam.wire import encode, gaussian_radii, pack
from leakgauge.defenses.cepam_clip import CepamClip
from leakgauge.defenses.cepam_gaussian import CepamGaussian
from leakgauge.defenses.cepam_laplace import CepamLaplace
from leakgauge.harness.audit import claims
from leakgauge.harness.core import accounting, rng
from leakgauge.harness.core.accounting import Leak
from leakgauge.harness.core.claim import Horizon, Relation, Unit, Verdict, judge
from leakgauge.harness.core.gaussian import gaussian_delta
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.learn.batch import LocalPlan, plan_batches
from tests.by_rows import by_rows
from tests.oracles import ALPHA

"""False-alarm rate of every statistical test in this file."""

# CEPAM's experiment
SETTING = Setting(Layout(("w",), ((25_818,),)), 30, 30, 100, sends="update", steps=15, lr=0.01, batch=1, samples=1666)
USED = 15 / 1666
"""Probability that local training here uses a given record: it cuts permutations."""

RECIPIENTS = {Threat.AGGREGATOR, Threat.PARTICIPANT, Threat.PUBLIC}
SERVERS = {Threat.SERVER, Threat.COLLUDING_SERVER, Threat.MALICIOUS_SERVER}


def claim(defense, rounds=1, **changes):
    return defense.claim([None] * rounds, dataclasses.replace(SETTING, **changes))


def test_the_default_claim_is_the_one_that_is_printed():
    found = claims.claim("cepam-gaussian", {}, {}, None, None)
    claimed = found["claimed"]
    assert claimed["epsilon"] == pytest.approx(1.450187, abs=5e-7)
    assert claimed["delta"] == pytest.approx(9.688740e-03, abs=5e-10)
    assert [claimed[key] for key in ("unit", "adjacency", "horizon")] == ["record", "replace", "one round"]
    assert claimed["against"] == ["aggregator", "participant", "public"]
    assert found["verdict"] == "LOOSE"
    assert found["proved"]["epsilon"] == 0


@by_rows(
    *((0.01, 3.668982e-10), (0.02, 3.674190e-06), (0.05, 1.600418e-03), (0.08, 7.172220e-03), (0.1, 9.018037e-03)),
    *((0.12, 9.563496e-03), (0.15, 9.683223e-03), (0.2, 9.688733e-03), (1.0, 9.688740e-03)),
)
def test_the_delta_of_theorem_12_is_the_printed_one(gamma, delta):
    found = claim(CepamGaussian(gamma=gamma))
    assert found.delta == pytest.approx(delta, rel=5e-7)
    assert found.epsilon == pytest.approx(1.450187, abs=5e-7)
    assert claim(CepamClip(clip=gamma)).delta == found.delta


@pytest.mark.parametrize(("samples", "epsilon", "delta"), [(1333, 1.624327, 0.012323), (2000, 1.313924, 0.007975)])
def test_theorem_12_for_other_numbers_of_samples(samples, epsilon, delta):
    found = claim(CepamGaussian(gamma=1e3), samples=samples)
    assert (found.epsilon, found.delta) == pytest.approx((epsilon, delta), abs=5e-7)


def test_theorem_13_is_the_printed_one_where_its_condition_is_met():
    # the condition is 5000 >= 2 * 15 * gamma / 0.1
    assert claim(CepamLaplace()).epsilon == pytest.approx(4995.285670, abs=5e-7)
    assert claim(CepamLaplace(gamma=16.66)).epsilon == claim(CepamLaplace()).epsilon
    beyond = claim(CepamLaplace(gamma=16.67))
    assert judge(beyond).verdict is Verdict.NOTHING_PROMISED
    assert not beyond.against


def test_a_large_local_epsilon_does_not_overflow():
    # ln(1 + p (e^1e5 - 1)) = 1e5 + ln p
    p = -math.expm1(15 * math.log1p(-1 / 1666))
    assert claim(CepamLaplace(local_epsilon=1e5)).epsilon == pytest.approx(1e5 + math.log(p), abs=1e-9)
    assert claim(CepamGaussian(local_epsilon=1e5, noise_std=1e-5)).epsilon == math.inf
    assert claim(CepamGaussian(local_epsilon=2000.0)).delta == 0


def test_a_step_of_several_samples_counts_as_that_many_draws():
    # by hand: one step of 3 samples of 100; p = 1 - 0.99^3; saturated, each factor of delta is 1
    found = claim(CepamGaussian(gamma=1e3, local_epsilon=1.0), steps=1, batch=3, samples=100)
    grown = math.expm1(1.0)
    assert found.epsilon == pytest.approx(math.log1p((1 - 0.99**3) * grown), rel=1e-12)
    times = [3 * 0.01 * 0.99**2, 3 * 0.01**2 * 0.99 * grown / math.expm1(1 / 2), 0.01**3 * grown / math.expm1(1 / 3)]
    assert found.delta == pytest.approx(sum(times), rel=1e-9)
    assert found.proved.event == Leak(0.03)
    # all of the client's samples
    assert claim(CepamGaussian(), steps=1, batch=0).proved.event == Leak(1.0)


def test_a_delta_of_one_or_more_promises_nothing():
    for defense in (CepamGaussian(), CepamClip()):
        found = claim(defense, steps=1, batch=0)
        assert judge(found).verdict is Verdict.NOTHING_PROMISED
        assert judge(found).proved == math.inf
    assert judge(claim(CepamGaussian(), rounds=103)).verdict is Verdict.LOOSE
    assert judge(claim(CepamGaussian(), rounds=104)).verdict is Verdict.NOTHING_PROMISED


def test_the_printed_claim_is_weaker_than_no_noise_at_all():
    found = claim(CepamGaussian())
    assert found.proved.event == Leak(USED)
    assert found.proved.epsilon(found.delta) == 0
    assert found.proved.epsilon(0.999 * USED) == math.inf
    assert judge(found).verdict is Verdict.LOOSE
    assert "vacuous" in judge(found).reason


@pytest.mark.parametrize("defense", [CepamGaussian(gamma=0.05), CepamGaussian(gamma=0.01), CepamLaplace()], ids=repr)
def test_a_claim_below_the_chance_of_being_used_is_broken(defense):
    found = claim(defense)
    assert found.delta < USED
    assert judge(found).verdict is Verdict.BROKEN
    assert judge(found).proved == math.inf


@pytest.mark.parametrize("defense", [CepamGaussian(gamma=0.05), CepamLaplace()], ids=repr)
def test_the_break_is_real_as_an_unmoved_client_adds_no_noise(defense):
    # if no other record moves the model, a recipient sees exactly zero unless the one record was used
    here = dataclasses.replace(SETTING, layout=Layout(("w",), ((50,),)))
    who = Sender(0, 1666)
    moved = 1e-6 * rng.normal(Key(1), (50,))
    for update, still in ((torch.zeros(50), True), (moved, False)):
        for i in range(20):
            key = Key(2).child(i)
            wire, _ = defense.encode(None, None, update, Link(here, who, key), Key(0))
            seen = defense.decode(None, [wire], Links(here, [who], [key]), Key(0))
            assert bool((seen == 0).all()) == still


def test_local_training_uses_a_record_with_the_stated_chance():
    # 20,000 rounds see 6 % of 0.6 with a miss rate under 1e-6: it is 10 standard errors
    plan = LocalPlan(gradient=False, steps=3, epochs=None, batch=2, lr=0.1, momentum=0.0)
    used = sum(0 in np.concatenate(plan_batches(10, plan, Key(3).child(i))) for i in range(20_000))
    leak = claim(CepamGaussian(), steps=3, batch=2, samples=10).proved.event
    assert leak == Leak(0.6)
    assert stats.binomtest(used, 20_000, leak.delta).pvalue > ALPHA
    assert stats.binomtest(used, 20_000, 0.94 * leak.delta).pvalue < ALPHA
    # drawn with replacement it would be used less often
    assert stats.binomtest(used, 20_000, 1 - 0.9**6).pvalue < ALPHA


def test_rounds_are_added_up():
    one, three = claim(CepamGaussian()), claim(CepamGaussian(), rounds=3)
    assert (three.epsilon, three.delta) == pytest.approx((3 * one.epsilon, 3 * one.delta), rel=1e-12)
    assert (one.horizon, three.horizon) == (Horizon.ONE_ROUND, Horizon.WHOLE_RUN)
    assert three.proved.event == Leak(USED, 3)
    assert "added up by us" in three.source
    assert "added up" not in one.source
    assert "the client takes part in every round" in three.assumes


@pytest.mark.parametrize("defense", [CepamGaussian(), CepamLaplace(), CepamClip()], ids=repr)
def test_the_claim_is_for_a_record_against_adversaries_who_see_averages(defense):
    found = claim(defense)
    assert (found.unit, found.relation, found.against) == (Unit.RECORD, Relation.REPLACE, RECIPIENTS)
    assert found.proved.unit is Unit.RECORD
    against = [proof.against for proof in found.further]
    assert against[-2:] == [SERVERS, SERVERS]
    # of the whole message at every delta: the norm, or all the balls
    assert found.further[-2].unit is Unit.MESSAGE
    assert found.further[-2].epsilon(0.99) == math.inf


# printed: unamplified epsilon at delta 1e-5 of a shift of 2 / (sqrt(30) sigma)
@pytest.mark.parametrize(("sigma", "epsilon"), [(0.1, 21.580), (0.5, 3.053), (1, 1.406), (2, 0.657), (5, 0.242)])
def test_a_clipped_message_moves_the_average_by_a_public_number_of_standard_deviations(sigma, epsilon):
    # 31 clients; the observing participant can subtract its own noise
    average = claim(CepamClip(noise_std=float(sigma)), clients=31, participants=31).further[0]
    assert average.epsilon(1e-5) == pytest.approx(epsilon, abs=5e-4)
    assert (average.unit, average.against, average.tight) == (Unit.MESSAGE, RECIPIENTS, True)
    double = claim(CepamClip(noise_std=2.0 * sigma, clip=2.0), clients=31, participants=31).further[0]
    assert double.event == average.event


def test_a_lonely_client_is_hidden_by_its_own_noise():
    alone, two = (claim(CepamClip(noise_std=2.0), clients=n, participants=n).further[0] for n in (1, 2))
    assert alone.epsilon(1e-5) == two.epsilon(1e-5)


def test_a_record_that_may_not_be_used_moves_the_average_less():
    found = claim(CepamClip(noise_std=2.0))
    mu = 2 / (2.0 * math.sqrt(29))
    assert found.delta < USED
    assert not found.proved.tight
    for epsilon in (0.0005, 0.002, 0.01):
        exact = USED * gaussian_delta(mu, math.log1p(math.expm1(epsilon) / USED))
        assert exact * (1 - 1e-9) <= accounting.delta(found.proved.event, epsilon) <= 1.001 * exact + 1e-12
    assert judge(found).verdict is Verdict.LOOSE


def test_a_clipped_claim_takes_the_best_bound_that_is_known():
    vacuous = claim(CepamClip())
    assert vacuous.proved.event == Leak(USED)
    assert not vacuous.proved.tight  # there is noise, whatever moves
    rounds = claim(CepamClip(noise_std=2.0), rounds=3)
    assert rounds.proved.epsilon(1e-5) == rounds.further[0].epsilon(1e-5)
    assert not rounds.proved.tight
    always = claim(CepamClip(noise_std=50.0), steps=1, batch=2, samples=2)
    assert always.proved.tight
    assert always.proved.epsilon(1e-5) == always.further[0].epsilon(1e-5)


def revealed(n, distances, count=200_000):
    """Share of `count` messages, each with its own randomness, that change if sub-vectors move by distances in sigmas.

    The sub-vectors in a column of these messages are quantized at once.
    """

    def own(key, attempt, rows, n):
        return 0.5 - rng.uniform(key.child(attempt), (count, n), dtype=torch.float64).numpy()[rows]

    same = np.ones(count, bool)
    for i, distance in enumerate(distances):
        x = rng.uniform(Key(1).child(i), (count, n), dtype=torch.float64).numpy()
        radii = gaussian_radii(Key(2).child(i), count, n, 1.0)
        drawn = partial(own, Key(3).child(i))
        one, other = (encode(z, radii, drawn) for z in (x, x + distance / math.sqrt(n)))
        same &= (one.attempts == other.attempts) & (one.cells == other.cells).all(1)
    return 1 - same.mean()


@pytest.mark.parametrize("moved", [1, 4])
@pytest.mark.ci("1")
def test_messages_of_many_sub_vectors_change_as_often_as_if_each_had_its_own_dithers(moved):
    # a rejected dither of a sub-vector changes the later dithers of the others
    count, keys, n = 12, 1000, 3
    x = rng.uniform(Key(1), (count, n), dtype=torch.float64).numpy()
    other = x.copy()
    other[:moved] += 0.5 / math.sqrt(n)
    radii = [gaussian_radii(Key(2).child(number), count, n, 1.0) for number in range(keys)]
    changed = sum(pack(x, r, 1.0, Key(3).child(i)) != pack(other, r, 1.0, Key(3).child(i)) for i, r in enumerate(radii))
    expected = revealed(n, [0.5] * moved)
    assert stats.binomtest(changed, keys, expected).pvalue > ALPHA
    assert stats.binomtest(changed, keys, revealed(n, [0.5] * (moved + 1))).pvalue < ALPHA
    assert changed / keys < bound(n, 0.5 * math.sqrt(moved), d=moved * n)[0].event.delta


def bound(n, shift, d=3, **changes):
    """The server's bounds for a whole message of d coordinates and for a sub-vector; the clip is shift / 2 sigmas."""
    found = CepamClip(clip=shift / 2, noise_std=1.0, dimension=n)
    return claim(found, layout=Layout(("w",), ((d,),)), **changes).further[1:]


# 200,000 draws: a standard error is at most 0.0011; ALPHA allows 5 of them
SEEN = 0.0055


@by_rows((0.1, 0.0399), (0.5, 0.1974), (1.0, 0.3829), (2.0, 0.6827), (4.0, 0.9545))
def test_a_coordinate_leaks_to_the_server_by_the_total_variation_of_the_noise(shift, printed):
    # printed for one sub-vector and n = 1
    _, sub_vector = bound(1, shift)
    assert sub_vector.event.delta == pytest.approx(printed, abs=5e-5)
    assert sub_vector.tight
    assert revealed(1, [shift]) == pytest.approx(printed, abs=SEEN)
    assert sub_vector.epsilon(0.99 * printed) == math.inf


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("shift", [0.1, 0.5, 1.0, 2.0])
def test_rejected_dithers_leak_more_than_the_total_variation(n, shift):
    _, sub_vector = bound(n, shift)
    variation = 2 * ndtr(shift / 2) - 1
    share = revealed(n, [shift])
    assert share > variation + SEEN
    assert share < sub_vector.event.delta + SEEN
    assert sub_vector.event.delta == pytest.approx(2 * variation / (1 + variation), rel=1e-12)
    assert not sub_vector.tight


def test_a_change_that_is_spread_out_leaks_more():
    # D = 1 sigma in all, over four sub-vectors: 1 - (2 Phi(-1/4))^4 = 0.5849 against 0.3829 in one of them
    message, _ = bound(1, 1.0, d=4)
    assert message.event.delta == pytest.approx(1 - (2 * ndtr(-0.25)) ** 4, rel=1e-12)
    assert message.tight
    assert revealed(1, [0.5] * 4) == pytest.approx(message.event.delta, abs=SEEN)
    for distances in ([1.0], [0.5**0.5] * 2, [0.9, 0.3, 0.3, 0.1]):
        assert revealed(1, distances) < message.event.delta - SEEN
    # the whole of a small change of a real model: 0.1 sigma, which one coordinate would hide
    assert bound(1, 0.1, d=25_818)[0].event.delta > 0.998
    assert bound(3, 1.0, d=12)[0].event.delta > revealed(3, [0.5] * 4) > bound(1, 1.0, d=4)[0].event.delta


def test_laplace_noise_leaks_by_its_total_variation_too():
    # D / b = 0.5, 1, 2, 4; a coordinate moves by at most 2 gamma
    for shift, printed in ((0.5, 0.2212), (1.0, 0.3935), (2.0, 0.6321), (4.0, 0.8647)):
        found = claim(CepamLaplace(gamma=shift / 2, noise_scale=1.0)).further[1]
        assert found.event.delta == pytest.approx(printed, abs=5e-5)
        assert found.tight
