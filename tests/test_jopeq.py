"""JoPEQ and its baselines: golden values, messages, parameters.

"As printed" is a value that an independent script derived from Lang et al. 2022 and its reference code; tolerances
follow from its digits.
"""

import math

import numpy as np
import pytest
import torch

from leakgauge import Key, MessageError, rng
from leakgauge.defenses._jopeq.privacy import GENERATOR
from leakgauge.defenses.jopeq import JoPEQ
from leakgauge.defenses.jopeq_sound import SoundJoPEQ
from leakgauge.defenses.jopeq_t import JoPEQT
from leakgauge.defenses.sdq import SDQ
from leakgauge.defenses.sdq_lattice import LatticeSDQ
from leakgauge.defenses.t_noise import TNoise
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.registry import ParameterError
from tests.jopeq_case import PRIVATE, SHARED, decode, encode, levels_of, round_trip, setting_of

INF = math.inf


def test_golden_radii_steps_and_scales_at_epsilon_4_and_one_bit():
    code, text = JoPEQ(epsilon=4.0, bits=1), JoPEQ(epsilon=4.0, bits=1, gamma="paper")
    assert code.lattice.step == code.lattice.edge == pytest.approx(1.2247448714, abs=5.1e-11)
    assert code.lattice.step * 3 / 2 == pytest.approx(1.8371173071, abs=1e-10)
    assert code.noise_scale == pytest.approx(0.4330127019, abs=5.1e-11)
    assert text.lattice.step == text.lattice.edge == 2.25
    assert text.noise_scale == pytest.approx(0.1976423538, abs=5.1e-11)
    assert SoundJoPEQ(epsilon=4.0).noise_scale == 0.5
    assert SoundJoPEQ(epsilon=4.0, bits=1).lattice == code.lattice
    assert JoPEQ(epsilon=4.0, bits=1, gamma=1.8371173071).lattice.step == pytest.approx(1.2247448714, abs=1e-10)


def test_golden_steps_without_noise_and_with_t_noise():
    assert SDQ(bits=2).lattice.step == pytest.approx(0.6)
    assert LatticeSDQ(bits=2).lattice.edge == pytest.approx(1.2)
    assert LatticeSDQ(bits=2).lattice.covariance[1].tolist() == pytest.approx([0.0173205081, 0.05], abs=5.1e-11)
    # as printed: (0.5, 4) has steps 1.414 and 0.849, (0.2, 4) 1.183 and 0.710
    for nominal, steps in ((2.0, (1.414, 0.849)), (3.0, (1.183, 0.710))):
        assert [JoPEQT(nominal, bits=R).lattice.step for R in (1, 2)] == pytest.approx(steps, abs=5.1e-4)
    assert JoPEQT(gamma="paper").lattice.step == 1.5
    assert JoPEQT(gamma=1.5).lattice.step == pytest.approx(0.6)
    # 2 (2 R)/2^R, and 2 (1.5)/2^R
    assert [SDQ(bits=R, gamma="paper").lattice.step for R in (1, 2, 8)] == [2.0, 2.0, 0.125]
    assert LatticeSDQ(bits=2, gamma="paper").lattice.step == 0.75
    assert SDQ(bits=3, gamma="reference").lattice == SDQ(bits=3).lattice


def test_the_scale_puts_a_message_on_the_sphere_of_radius_root_m_over_3():
    update = rng.normal(Key(2), (7850,))
    for mode in ("vector", "tensor"):
        _, numbers = JoPEQ(scale=mode).scaling.normalize(update, setting_of(7850).layout)
        assert float(numbers.double().norm()) == pytest.approx(math.sqrt(7850) / 3, rel=1e-6)
        _, pairs = JoPEQT(scale=mode).scaling.normalize(update, setting_of(7850).layout)
        assert float(pairs.double().norm()) == pytest.approx(math.sqrt(3925) / 3, rel=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 7, 8, 15, 16])
def test_a_message_is_the_scales_and_exactly_the_bits_of_the_levels(bits):
    for d in (1, 17, 1000):
        update, pairs = rng.normal(Key(3), (d,)), 2 * math.ceil(d / 2)
        alone, together = (math.ceil(count * math.ceil(math.log2(2**bits + 1)) / 8) for count in (d, pairs))
        for mode, header in (("tensor", 8), ("vector", 4), ("public", 0)):
            assert len(encode(JoPEQ(bits=bits, scale=mode), update)) == header + alone
        assert len(encode(SoundJoPEQ(bits=bits), update)) == alone
        assert len(encode(SDQ(bits=bits), update)) == 8 + alone
        assert len(encode(LatticeSDQ(bits=bits), update)) == 12 + together
        for mode, header in (("tensor", 12), ("vector", 4), ("public", 0)):
            assert len(encode(JoPEQT(epsilon=0.84, bits=bits, scale=mode), update)) == header + together
            assert len(encode(TNoise(scale=mode), update)) == header + 4 * pairs


def test_every_tensor_has_a_scale_of_its_own():
    small, large = 1e-3 * rng.normal(Key(4), (500,)), 10 * rng.normal(Key(5), (501,))
    setting = setting_of(500, 501)
    for defense, header in ((SDQ(bits=8), 16), (LatticeSDQ(bits=8), 24)):
        wire = encode(defense, torch.cat([small, large]), setting=setting)
        payload = 1001 + (header == 24)
        assert len(wire) == header + math.ceil(payload * 9 / 8)
        found = decode(defense, wire, setting)
        assert (found[:500] - small).abs().max() < 1e-4
        assert (found[500:] - large).abs().max() < 1


@pytest.mark.parametrize("defense", [JoPEQ(bits=1), JoPEQ(bits=2), SDQ(bits=2), SDQ(bits=8), JoPEQT(bits=2)])
def test_a_level_that_does_not_exist_is_refused(defense):
    wire = encode(defense, rng.normal(Key(3), (16,)))
    header = 12 if defense.scaling.lanes == 2 else 8
    with pytest.raises(MessageError, match=rf"expected levels in 0\.\.{2**defense.bits}, got "):
        decode(defense, wire[:header] + b"\xff" * (len(wire) - header), setting_of(16))
    with pytest.raises(MessageError, match="scales >= 0"):
        decode(defense, np.full(header // 4, -1, "<f4").tobytes() + wire[header:], setting_of(16))


def test_a_constant_tensor_comes_back_as_its_mean():
    for defense in (JoPEQ(), JoPEQT(), SDQ(), LatticeSDQ(), TNoise()):
        assert torch.equal(round_trip(defense, torch.full((10,), 0.25)), torch.full((10,), 0.25))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", [JoPEQ, SoundJoPEQ, SDQ])
def test_both_sides_follow_the_formula_in_every_coordinate_beyond_the_edge_too(kind, bits):
    # q = clip(round((x + n)/Delta + d)), y = Delta (q - d), worked out again in float64
    size = 100_000
    defense, update = kind(bits=bits), rng.normal(Key(6), (size,)) + 0.3
    mean, scale = (update.double().mean(), update.double().std(correction=0) * 3)
    if kind is SoundJoPEQ:
        mean, scale = 0.0, 1.0
    x = (update.double() - mean) / scale if kind is not SoundJoPEQ else update.double().clamp(-1, 1)
    noise = 0.0 if kind is SDQ else defense.noise_scale * rng.signed_exponential(PRIVATE, (size,), torch.float64)
    dither, step, top = rng.uniform32(SHARED, (size,), -0.5, 0.5).double(), defense.lattice.step, 2 ** (bits - 1)
    cells = (x + noise) / step + dither
    levels = cells.round().clamp(-top, top)
    # float32 may decide differently for a number within its own rounding of the border of two cells
    clear = (cells - cells.floor() - 0.5).abs() > 1e-6 * (1 + cells.abs())
    assert clear.double().mean() > 0.999
    wire = encode(defense, update)
    sent = torch.from_numpy(levels_of(defense, wire, size))
    assert torch.equal(sent[clear], levels[clear].long())
    expected = mean + scale * step * (sent - dither)
    found = decode(defense, wire, setting_of(size)).double()
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-5)
    if bits == 1 and kind is not SDQ:
        assert (cells.abs() > top + 0.5).any()


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_both_sides_follow_the_formula_on_the_lattice(bits):
    size = 50_000
    defense, update = LatticeSDQ(bits=bits), rng.normal(Key(7), (2 * size,))
    rows = update.double().reshape(2, -1)
    means = rows.mean(1, keepdim=True)
    scale = 3 * (rows - means).norm() / math.sqrt(size)
    generator = torch.tensor(GENERATOR)
    dither = rng.uniform32(SHARED, (2, size), -0.5, 0.5).double()
    cells = torch.linalg.solve(generator, (rows - means) / scale) / defense.lattice.step + dither
    top = 2 ** (bits - 1)
    levels = cells.round().clamp(-top, top)
    clear = ((cells - cells.floor() - 0.5).abs() > 1e-5 * (1 + cells.abs())).all(0)
    assert clear.double().mean() > 0.99
    expected = means + scale * defense.lattice.step * generator @ (levels - dither)
    found = round_trip(defense, update).double().reshape(2, -1)
    assert torch.allclose(found[:, clear], expected[:, clear], rtol=1e-6, atol=1e-5)


def test_gamma_is_a_rule_or_a_number_in_a_study():
    assert registry.build("defense", "jopeq", {"gamma": 2}) == JoPEQ(gamma=2.0)
    assert registry.build("defense", "jopeq-t", {"gamma": "paper"}) == JoPEQT(gamma="paper")
    with pytest.raises(ParameterError, match="gamma"):
        registry.build("defense", "jopeq", {"gamma": "printed"})


def test_the_step_that_takes_all_of_the_noise_is_the_border():
    most = math.sqrt(6 * 0.5 * 4 / 2)
    assert JoPEQT(bits=1, gamma=most * 1.499999).surrogate.is_proper
    with pytest.raises(ValueError, match="so that the quantization error is less than the whole noise"):
        JoPEQT(bits=1, gamma=most * 1.500001)
