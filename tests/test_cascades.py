"""Two defenses in a row: the parameters, the messages, and the claim of the first.

test_defenses.py runs the contract suite on cascades. Every statistical test has a false-alarm rate of at most 1e-6.
"""

import json
import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from leakgauge import Key, Links, rng
from leakgauge.defenses._common.cascade import Cascade
from leakgauge.defenses._jopeq.lattice import Lattice
from leakgauge.defenses._jopeq.privacy import GENERATOR, scalar_epsilon
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.sdq import SDQ
from leakgauge.defenses.sdq_lattice import LatticeSDQ
from leakgauge.defenses.t_noise import TNoise
from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.claim import Horizon, Unit, Verdict, judge
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.registry import ParameterError
from tests.by_rows import by_rows
from tests.command import call
from tests.jopeq_case import PRIVATE, SHARED, WHO, build, decode, encode, setting_of
from tests.oracles import follows


def likelihood(defense, wires, setting, shared):
    return defense.likelihood(None, wires, Links(setting, [WHO] * len(wires), shared))


def test_the_summary_of_a_cascade_names_both_defenses():
    assert registry.build_defense(PartSpec("laplace+sdq", {})) == build("laplace+sdq")
    assert registry.summary("defense", "laplace+sdq").count(", then ") == 1


def test_each_parameter_goes_to_the_defense_that_has_it():
    found = build("laplace+sdq", epsilon=2.0, bits=3, gamma=2.0, scale="tensor")
    assert found == Cascade(("laplace", "sdq"), Laplace(epsilon=2.0, scale="tensor"), SDQ(bits=3, gamma=2.0))
    for name in ("laplace+sdq", "t-noise+sdq-lattice", "gaussian+sdq"):  # no pair shares a parameter name
        assert not [key for key in build(name).parameters() if "." in key]
    with pytest.raises(ParameterError, match=r"laplace\+sdq: expected epsilon > 0"):
        build("laplace+sdq", epsilon=-1.0)
    with pytest.raises(ParameterError, match=r"laplace\+sdq\.nu: unknown key"):
        build("laplace+sdq", nu=4.0)


@by_rows(
    ("sdq+laplace", "expected a defense that adds noise before '\\+', got 'sdq'"),
    ("jopeq+sdq", "expected a defense that adds noise before '\\+', got 'jopeq'"),
    ("laplace+gaussian", "expected a quantizer after '\\+', got 'gaussian'"),
    ("laplace+jopeq", "expected a quantizer after '\\+', got 'jopeq'"),
)
def test_two_defenses_that_do_not_fit_are_refused(name, message):
    with pytest.raises(ParameterError, match=message):
        build(name)


def test_the_likelihood_counts_the_quantization_error_as_noise_of_its_variance():
    setting, update = setting_of(400), rng.normal(Key(4), (400,))
    defense = build("gaussian+sdq", noise_std=0.2, clip=100.0, bits=4, gamma=3.0)
    unit, step = 3 * 100 / 20, 6 / 17
    wire = encode(defense, update)
    for shared, errors in (([SHARED], 1), (None, 2)):
        sent = decode(defense, wire, setting, None if shared is None else SHARED)
        expected = (update - sent).double().square().sum() / (2 * (0.2**2 + errors * unit**2 * step**2 / 12))
        assert float(likelihood(defense, [wire], setting, shared)(update[None])) == pytest.approx(
            float(expected), rel=1e-4
        )


@by_rows(
    ("laplace+sdq", {"bits": 1}, 0, 1001),
    ("laplace+sdq", {"bits": 4, "scale": "tensor"}, 16, 1001),
    ("laplace+sdq", {"bits": 8, "scale": "vector"}, 4, 1001),
    ("gaussian+sdq", {"bits": 2}, 0, 1001),
    ("t-noise+sdq-lattice", {"bits": 2}, 24, 1002),
    ("t-noise+sdq-lattice", {"bits": 1, "scale": "public"}, 0, 1002),
    ("laplace+sdq-lattice", {"bits": 2}, 0, 1002),
)
def test_the_levels_replace_the_floats_of_the_first_message_and_its_header_stays(name, parameters, header, count):
    defense, setting = build(name, **parameters), setting_of(500, 501)
    update = 0.01 * rng.normal(Key(5), (1001,))
    wire = encode(defense, update, setting=setting)
    assert len(wire) == header + math.ceil(count * (parameters["bits"] + 1) / 8)
    first = encode(defense.first, update, shared=SHARED.child("noise"), setting=setting)
    assert wire[:header] == first[:header]


@by_rows(
    # 2 (2/4)^2; s2 nu/(nu - 2); (sigma / (3 C / sqrt d))^2
    ("laplace+sdq", {"epsilon": 4.0, "clip": 0.1}, 0.5),
    ("t-noise+sdq-lattice", {"epsilon": 3.0}, 0.4),
    ("gaussian+sdq", {"noise_std": 0.5, "clip": 2.0}, 0.5**2 * 1000 / 36),
)
def test_the_range_of_the_quantizer_follows_the_variance_of_the_noise(name, parameters, variance):
    defense = build(name, bits=2, **parameters)
    assert defense.first.noise_variance(setting_of(1000)) == pytest.approx(variance)
    # gamma = 1.5 sqrt(1 + variance), edge = 2 steps of 2 gamma / 5
    assert defense.second.lattice_for(variance).edge == pytest.approx(4 / 5 * 1.5 * math.sqrt(1 + variance))
    assert build(name, bits=2, gamma=1.0, **parameters).second.lattice_for(variance).edge == pytest.approx(4 / 5)
    printed = build(name, bits=2, gamma="paper", **parameters).second
    radius = 1.5 * (1 + variance) if printed.dimension == 2 else 2 * 2 + math.sqrt(variance / 8)
    assert printed.lattice_for(variance).edge == pytest.approx(radius)


CARRIED = [
    ("laplace+sdq", {"epsilon": 4.0, "clip": 0.5}, 0.5),
    ("laplace+sdq", {"epsilon": 4.0, "scale": "tensor"}, None),
    ("gaussian+sdq", {"noise_std": 1.0, "clip": 100.0}, 3 * 100 / math.sqrt(600_000)),
    ("t-noise+sdq-lattice", {"scale": "public", "clip": 2.0}, 2.0),
]


@pytest.mark.parametrize(("name", "parameters", "unit"), CARRIED)
def test_the_quantization_error_is_uniform_in_the_cell_and_independent_of_the_first_message(name, parameters, unit):
    # alpha 1e-6; 300,000 errors detect a cell that is 6 % too wide with the same certainty (the twin); no overload
    defense = build(name, bits=12, gamma=40.0, **parameters)
    update, setting = 0.1 * rng.normal(Key(6), (600_000,)), setting_of(600_000)
    wire = encode(defense, update)
    first = decode(defense.first, encode(defense.first, update, shared=SHARED.child("noise")), setting, None)
    unit = unit or float(np.frombuffer(wire[4:8], "<f4")[0])
    error = (decode(defense, wire, setting) - first).double().numpy() / unit
    lanes = 2 if name.endswith("lattice") else 1
    cells = np.linalg.inv(GENERATOR) @ error.reshape(2, -1) if lanes == 2 else error[None, :300_000]
    for row in cells / (80 / 4097):
        assert follows(row, stats.uniform(-0.5, 1).cdf)
        assert not follows(1.06 * row, stats.uniform(-0.5, 1).cdf)
        assert abs(stats.pearsonr(row, first.numpy()[:300_000]).statistic) < 5 / math.sqrt(300_000)


def test_the_proof_of_the_first_is_a_bound_for_the_cascade():
    setting = setting_of(100)
    for name, first in (("laplace+sdq", Laplace(epsilon=2.0)), ("gaussian+sdq", Gaussian(epsilon=2.0))):
        for rounds in (1, 3):
            alone, both = (d.claim([None] * rounds, setting) for d in (first, build(name, epsilon=2.0)))
            assert judge(both).verdict is Verdict.HOLDS
            assert judge(both)[1:3] == judge(alone)[1:3]
            assert (both.unit, both.horizon) == (alone.unit, Horizon.of(rounds))
            assert "post-processing" in both.proved.method
            # at the edge, a threshold tells 1 from -1 as well as the noise does
            assert both.proved.tight is (name == "laplace+sdq")
            assert not any(proof.tight for proof in both.further)
            assert [proof.epsilon(0) for proof in both.further] == [proof.epsilon(0) for proof in alone.further]


def test_a_scale_in_the_clear_stays_in_the_clear():
    claim = build("laplace+sdq", scale="tensor").claim([None], setting_of(100))
    assert "neighboring updates have the same scale" in claim.assumes
    assert math.isinf(claim.further[0].epsilon(0))
    assert claim.further[0].tight


@pytest.mark.parametrize(("nominal", "bits"), [(2.0, 2), (3.0, 2), (3.0, 1)])
def test_t_noise_breaks_its_nominal_epsilon_behind_the_quantizer_too(nominal, bits):
    defense = build("t-noise+sdq-lattice", epsilon=nominal, bits=bits)
    claim, run = (defense.claim([None] * rounds, setting_of(100)) for rounds in (1, 4))
    verdict, claimed, proved, _ = judge(claim)
    assert (verdict, claimed, claim.unit) == (Verdict.BROKEN, nominal, Unit.SUBVECTOR)
    alone = TNoise(epsilon=nominal).claim([None], setting_of(100))
    assert proved == judge(alone).proved  # an upper bound, by post-processing
    attained = claim.attained.epsilon(0)
    assert judge(run)[:3] == (Verdict.BROKEN, 4 * nominal, pytest.approx(4 * proved))
    assert run.attained.epsilon(0) == pytest.approx(4 * attained)
    assert nominal < attained < proved
    assert not claim.proved.tight
    assert {proof.unit for proof in claim.further} == {Unit.MESSAGE}
    # from the tails of one coordinate's distribution, at the best threshold that a level may have
    s2, nu = defense.first.noise
    edge = defense.second.lattice_for(s2 * nu / (nu - 2)).edge
    t = np.linspace(-edge, edge, 100_001)
    tails = [special.stdtr(nu, (x - t) / math.sqrt(s2)) for x in (1, -1)]
    assert attained == pytest.approx(np.log(tails[0] / tails[1]).max(), rel=1e-5)


def test_an_audit_of_the_bytes_finds_the_attained_epsilon_behind_the_quantizer():
    # P(top level | first number 1) / P(top level | -1) for dithers that put the threshold near the best one; the ratio
    # is known at each threshold, hence also its mean over those dithers; 5 sigma
    defense, pairs = build("t-noise+sdq-lattice", epsilon=3.0, bits=1, scale="public"), 1_000_000
    s2, nu = defense.first.noise
    step = defense.second.lattice_for(s2 * nu / (nu - 2)).edge
    dither = rng.uniform32(SHARED.child("dither"), (2, pairs), -0.5, 0.5)[0].numpy()
    thresholds = (0.5 - dither) * step
    near = thresholds > 0.9 * step
    chances, counts = [], []
    for k, end in enumerate((1.0, -1.0)):
        update = torch.cat([torch.full((pairs,), end), torch.zeros(pairs)])
        wire = encode(defense, update, private=PRIVATE.child(k))
        found = decode(defense, wire, setting_of(2 * pairs)).numpy()[:pairs]
        counts.append(int((np.round(found / step + dither) == 1)[near].sum()))
        chances.append(float(special.stdtr(nu, (end - thresholds[near]) / math.sqrt(s2)).mean()))
    sd = math.sqrt(1 / counts[0] + 1 / counts[1])
    assert math.log(counts[0] / counts[1]) == pytest.approx(math.log(chances[0] / chances[1]), abs=5 * sd)
    assert math.log(counts[0] / counts[1]) > 3.0 + 5 * sd


def test_the_attained_epsilon_is_finite_for_tiny_noise_and_small_for_huge_noise():
    lattice, here = Lattice(2.0, 1), setting_of(10)
    assert math.isfinite(TNoise(s2=1e-6, nu=1000.0).attained(lattice, 1, here).epsilon(0))
    assert TNoise(s2=1e6, nu=3.0).attained(lattice, 1, here).epsilon(0) < 0.01
    assert Laplace().attained(lattice, 1, here).epsilon(0) == 8.0
    assert Gaussian(noise_std=1e-6).attained(lattice, 1, here) is None  # a cell tells the inputs apart
    assert Gaussian(noise_std=1e6).attained(lattice, 1, here).epsilon(1e-5) == 0.0


@by_rows(("tensor", math.inf), ("public", 70_896.45))
def test_laplace_noise_before_a_small_quantizer_is_proved_to_have_less_than_alone(scale, message):
    # edge .0667: (1 + edge) / b + ln(2 - e^(-(1 - edge) / b)), with b = 1/2
    first = build("laplace+sdq", epsilon=4.0, gamma=0.1, scale=scale)
    for rounds in (1, 3):
        claim = first.claim([None] * rounds, setting_of(25_818))
        verdict, claimed, proved, _ = judge(claim)
        assert (claimed, proved) == pytest.approx((4.0 * rounds, 2.746009 * rounds), rel=1e-6)
        assert verdict is Verdict.LOOSE
        assert claim.proved.tight
        assert claim.attained is None
        assert claim.further[0].epsilon(0) == pytest.approx(message * rounds, rel=1e-6)


def test_laplace_noise_before_a_small_lattice_shows_what_its_first_coordinate_attains():
    claim = build("laplace+sdq-lattice", epsilon=4.0, gamma=0.1).claim([None], setting_of(100))
    assert claim.proved.epsilon(0) == pytest.approx(4.0)
    assert not claim.proved.tight
    edge = 2 * 2 * 0.1 / 5
    assert claim.attained.epsilon(0) == pytest.approx(scalar_epsilon(4.0, 0.0, edge))


def test_the_lattice_carries_the_numbers_of_another_defense_in_pairs():
    # an odd count is padded; the padding is dropped
    defense = build("laplace+sdq-lattice", epsilon=1e6, bits=12)
    update = rng.uniform(Key(10), (17,), -0.9, 0.9)
    assert isinstance(defense.second, LatticeSDQ)
    assert torch.allclose(decode(defense, encode(defense, update), setting_of(17)), update, atol=2e-3)


@by_rows(
    ("t-noise+sdq", 3.951, 3.098),
    ("t-noise+sdq-lattice", 3.951, 3.098),
    ("jopeq-t", 4.177, 4.055),
    ("gaussian+sdq", 8, 6.926),
)
def test_the_command_prints_the_bound_as_proved_and_the_attained_epsilon_by_its_own_name(name, proved, attained):
    found = json.loads(call("claim", name, "--json").output)
    assert found["proved"]["epsilon"] == pytest.approx(proved, abs=5.1e-4)
    assert found["attained"]["epsilon"] == pytest.approx(attained, abs=5.1e-4)
    assert all(one["unit"] == "message" for one in found["further"])
    assert f"\n  attained epsilon {found['attained']['epsilon']:.6g} (right" in call("claim", name).output
