"""Two defenses in a row: what is sent, and what stays of the first one's promise.

Every statistical test has a false-alarm rate of 1e-6 or less.
"""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from leakgauge.defenses._common.cascade import Cascade
from leakgauge.defenses._jopeq.privacy import GENERATOR
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.sdq import SDQ
from leakgauge.defenses.sdq_lattice import LatticeSDQ
from leakgauge.defenses.t_noise import TNoise
from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.claim import Horizon, Unit, Verdict, judge
from leakgauge.harness.core.contract import (
    Links,
    MessageError,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.registry import ParameterError
from tests.jopeq_case import PRIVATE, SHARED, WHO, build, decode, encode, setting_of

ALPHA = 1e-6
NAMES = ["laplace+sdq", "t-noise+sdq-lattice", "gaussian+sdq", "laplace+sdq-lattice", "t-noise+sdq"]

every_cascade = pytest.mark.parametrize("name", NAMES)


def likelihood(defense, wires, setting, shared):
    return defense.likelihood(None, wires, Links(setting, [WHO] * len(wires), shared))


# the contract


@every_cascade
def test_a_cascade_rebuilds_from_its_parameters_and_has_a_summary(name):
    defense = build(name)
    assert build(name, **defense.parameters()) == defense
    assert registry.build_defense(PartSpec(name, {})) == defense
    assert registry.summary("defense", name).count("then") >= 1


def test_each_parameter_goes_to_the_defense_that_has_it():
    found = build("laplace+sdq", epsilon=2.0, bits=3, gamma=2.0, scale="tensor")
    assert found == Cascade(("laplace", "sdq"), Laplace(epsilon=2.0, scale="tensor"), SDQ(bits=3, gamma=2.0))
    # none of the papers' pairs has a name twice
    for name in NAMES:
        assert not [key for key in build(name).parameters() if "." in key]
    with pytest.raises(ParameterError, match=r"laplace\+sdq: expected epsilon > 0"):
        build("laplace+sdq", epsilon=-1.0)
    with pytest.raises(ParameterError, match=r"laplace\+sdq\.nu: unknown key"):
        build("laplace+sdq", nu=4.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sdq+laplace", "expected a defense that adds noise before '\\+', got 'sdq'"),
        ("jopeq+sdq", "expected a defense that adds noise before '\\+', got 'jopeq'"),
        ("laplace+gaussian", "expected a quantizer after '\\+', got 'gaussian'"),
        ("laplace+jopeq", "expected a quantizer after '\\+', got 'jopeq'"),
    ],
)
def test_two_defenses_that_do_not_fit_are_refused(name, message):
    with pytest.raises(ParameterError, match=message):
        build(name)


@every_cascade
@pytest.mark.parametrize("sizes", [(1000,), (17,), (7, 10)])
def test_a_message_decodes_to_an_update_and_another_length_is_refused(name, sizes):
    defense, setting = build(name), setting_of(*sizes)
    update = 0.01 * rng.normal(Key(2), (setting.dim,))
    kept = update.clone()
    wire = encode(defense, update, setting=setting)
    assert wire == encode(defense, update, setting=setting)
    assert wire != encode(defense, update, private=PRIVATE.child("other"), setting=setting)
    assert torch.equal(update, kept)
    for shared in (SHARED, None):
        found = decode(defense, wire, setting, shared)
        assert (found.shape, found.dtype) == ((setting.dim,), torch.float32)
        assert torch.isfinite(found).all()
    assert torch.isfinite(decode(defense, encode(defense, torch.zeros(setting.dim), setting=setting), setting)).all()
    for bad in (wire[:-1], wire + b"\0", b""):
        with pytest.raises(MessageError, match="expected"):
            decode(defense, bad, setting)


@every_cascade
def test_an_update_that_is_not_finite_is_refused(name):
    with pytest.raises(ValueError, match="finite update, got nan at coordinate 1"):
        encode(build(name), torch.tensor([0.0, math.nan, 1.0]))


@every_cascade
def test_no_key_is_drawn_from_twice_and_no_private_key_reaches_the_receiver(name, monkeypatch):
    defense, drawn = build(name), []
    inside = rng._digest
    monkeypatch.setattr(rng, "_digest", lambda key: drawn.append(key) or inside(key))
    wire = encode(defense, torch.ones(100))
    assert len(set(drawn)) == len(drawn) >= 2
    drawn.clear()
    decode(defense, wire, setting_of(100))
    assert all(key.path[:1] == SHARED.path for key in drawn)


@every_cascade
def test_the_likelihood_prefers_the_truth_and_can_be_differentiated(name):
    # 100 messages of an update against its negative; the least gap is 1.1 a message with standard deviation 1.5
    defense, setting = build(name), setting_of(1000)
    update = rng.normal(Key(3), (1000,))
    update *= 0.9 / update.norm()
    keys = [SHARED.child(i) for i in range(100)]
    wires = [encode(defense, update, PRIVATE.child(i), key) for i, key in enumerate(keys)]
    candidate = update.expand(100, -1).clone().requires_grad_()
    for shared in (keys, None):
        score = likelihood(defense, wires, setting, shared)
        assert score(candidate).shape == (100,)
        if shared is not None:
            assert score(candidate).mean() < score(-candidate).mean()
        (gradient,) = torch.autograd.grad(score(candidate).sum(), candidate)
        assert torch.isfinite(gradient).all()


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


# what is sent


@pytest.mark.parametrize(
    ("name", "parameters", "header", "count"),
    [
        ("laplace+sdq", {"bits": 1}, 0, 1001),
        ("laplace+sdq", {"bits": 4, "scale": "tensor"}, 16, 1001),
        ("laplace+sdq", {"bits": 8, "scale": "vector"}, 4, 1001),
        ("gaussian+sdq", {"bits": 2}, 0, 1001),
        ("t-noise+sdq-lattice", {"bits": 2}, 24, 1002),
        ("t-noise+sdq-lattice", {"bits": 1, "scale": "public"}, 0, 1002),
        ("laplace+sdq-lattice", {"bits": 2}, 0, 1002),
    ],
)
def test_the_levels_replace_the_floats_of_the_first_message_and_its_header_stays(name, parameters, header, count):
    defense, setting = build(name, **parameters), setting_of(500, 501)
    update = 0.01 * rng.normal(Key(5), (1001,))
    wire = encode(defense, update, setting=setting)
    assert len(wire) == header + math.ceil(count * (parameters["bits"] + 1) / 8)
    first = encode(defense.first, update, shared=SHARED.child("noise"), setting=setting)
    assert wire[:header] == first[:header]


@pytest.mark.parametrize(
    ("name", "parameters", "variance"),
    [
        # 2 (2/4)^2; s2 nu/(nu - 2); (sigma / (3 C / sqrt d))^2
        ("laplace+sdq", {"epsilon": 4.0, "clip": 0.1}, 0.5),
        ("t-noise+sdq-lattice", {"epsilon": 3.0}, 0.4),
        ("gaussian+sdq", {"noise_std": 0.5, "clip": 2.0}, 0.5**2 * 1000 / 36),
    ],
)
def test_the_range_of_the_quantizer_follows_the_variance_of_the_noise(name, parameters, variance):
    defense = build(name, bits=2, **parameters)
    assert defense.first.noise_variance(setting_of(1000)) == pytest.approx(variance)
    # gamma = 1.5 sqrt(1 + variance), edge = 2 steps of 2 gamma / 5
    assert defense.second.edge(variance) == pytest.approx(4 / 5 * 1.5 * math.sqrt(1 + variance))
    assert build(name, bits=2, gamma=1.0, **parameters).second.edge(variance) == pytest.approx(4 / 5)


CARRIED = [
    ("laplace+sdq", {"epsilon": 4.0, "clip": 0.5}, 0.5),
    ("laplace+sdq", {"epsilon": 4.0, "scale": "tensor"}, None),
    ("gaussian+sdq", {"noise_std": 1.0, "clip": 100.0}, 3 * 100 / math.sqrt(600_000)),
    ("t-noise+sdq-lattice", {"scale": "public", "clip": 2.0}, 2.0),
]


@pytest.mark.parametrize(("name", "parameters", "unit"), CARRIED)
def test_what_is_added_to_the_first_message_is_uniform_in_the_cell_and_independent_of_it(name, parameters, unit):
    # alpha 1e-6; 300,000 errors see a cell that is 6 % too wide with the same certainty (the twin); nothing overloads
    defense = build(name, bits=12, gamma=40.0, **parameters)
    update, setting = 0.1 * rng.normal(Key(6), (600_000,)), setting_of(600_000)
    wire = encode(defense, update)
    first = decode(defense.first, encode(defense.first, update, shared=SHARED.child("noise")), setting, None)
    unit = unit or float(np.frombuffer(wire[4:8], "<f4")[0])
    error = (decode(defense, wire, setting) - first).double().numpy() / unit
    lanes = 2 if name.endswith("lattice") else 1
    cells = np.linalg.inv(GENERATOR) @ error.reshape(2, -1) if lanes == 2 else error[None, :300_000]
    for row in cells / (80 / 4097):
        assert stats.kstest(row, stats.uniform(-0.5, 1).cdf).pvalue > ALPHA
        assert stats.kstest(1.06 * row, stats.uniform(-0.5, 1).cdf).pvalue < ALPHA
        assert abs(stats.pearsonr(row, first.numpy()[:300_000]).statistic) < 5 / math.sqrt(300_000)


# claims


def test_what_holds_of_the_first_holds_of_the_cascade_as_a_bound():
    setting = setting_of(100)
    for name, first in (("laplace+sdq", Laplace(epsilon=2.0)), ("gaussian+sdq", Gaussian(epsilon=2.0))):
        for rounds in (1, 3):
            alone, both = (d.claim([None] * rounds, setting) for d in (first, build(name, epsilon=2.0)))
            assert judge(both).verdict is Verdict.HOLDS
            assert judge(both)[1:3] == judge(alone)[1:3]
            assert (both.unit, both.horizon) == (alone.unit, Horizon.of(rounds))
            assert "post-processing" in both.proved.method
            assert not both.proved.tight
            assert [proof.epsilon(0) for proof in both.further] == [proof.epsilon(0) for proof in alone.further]


def test_a_scale_in_the_clear_stays_in_the_clear():
    claim = build("laplace+sdq", scale="tensor").claim([None], setting_of(100))
    assert "the scale is given" in claim.assumes
    assert math.isinf(claim.further[0].epsilon(0))
    assert claim.further[0].tight


@pytest.mark.parametrize(("nominal", "bits"), [(2.0, 2), (3.0, 2), (3.0, 1)])
def test_t_noise_breaks_its_nominal_epsilon_behind_the_quantizer_too(nominal, bits):
    defense = build("t-noise+sdq-lattice", epsilon=nominal, bits=bits)
    claim, run = (defense.claim([None] * rounds, setting_of(100)) for rounds in (1, 4))
    verdict, claimed, attained, _ = judge(claim)
    assert (verdict, claimed, claim.unit) == (Verdict.BROKEN, nominal, Unit.SUBVECTOR)
    assert judge(run)[:3] == (Verdict.BROKEN, 4 * nominal, pytest.approx(4 * attained))
    bound = claim.further[0]
    assert nominal < attained < bound.epsilon(0)
    assert not bound.tight
    # by tails of the law of one coordinate, at the best of all thresholds that the levels may have
    s2, nu = defense.first.noise
    edge = defense.second.edge(s2 * nu / (nu - 2))
    t = np.linspace(-edge, edge, 100_001)
    tails = [special.stdtr(nu, (x - t) / math.sqrt(s2)) for x in (1, -1)]
    assert attained == pytest.approx(np.log(tails[0] / tails[1]).max(), rel=1e-5)


def test_an_auditor_of_bytes_finds_what_is_attained_behind_the_quantizer():
    # P(top level | first number 1) / P(top level | -1) where the dither puts the threshold next to the best one; the
    # ratio at a threshold is known, so that its mean over those dithers is; 5 sigma
    defense, pairs = build("t-noise+sdq-lattice", epsilon=3.0, bits=1, scale="public"), 1_000_000
    s2, nu = defense.first.noise
    step = defense.second.edge(s2 * nu / (nu - 2))
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


def test_no_attained_epsilon_is_made_up_where_the_noise_is_next_to_nothing():
    assert math.isfinite(TNoise(s2=1e-6, nu=1000.0).attained(1.0))
    assert TNoise(s2=1e6, nu=3.0).attained(1.0) < 0.01
    assert Laplace().attained(1.0) == 0.0


def test_the_lattice_carries_the_numbers_of_another_defense_in_pairs():
    # an odd number of them is padded; the padding is not seen
    defense = build("laplace+sdq-lattice", epsilon=1e6, bits=12)
    update = rng.uniform(Key(10), (17,), -0.9, 0.9)
    assert isinstance(defense.second, LatticeSDQ)
    assert torch.allclose(decode(defense, encode(defense, update), setting_of(17)), update, atol=2e-3)
