"""Likelihood ratios of discrete distributions, and what the battery makes of them."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from leakgauge import Key, MessageError, pack_levels
from leakgauge.defenses._common.reference import Scaled
from leakgauge.defenses._jopeq.distribution import leveled
from leakgauge.defenses._jopeq.lattice import Lattice
from leakgauge.defenses._privquant import Matched, PrivQuant
from leakgauge.harness.audit.goodness_of_fit import check_fit
from leakgauge.harness.audit.uniformity import Sample, detectable_by_ratios, p_values, ratio_values
from leakgauge.harness.core.distribution import (
    SHARES,
    Additive,
    Choices,
    DistributionError,
    Laplacian,
    Normal,
    powers,
    split,
)
from leakgauge.harness.core.rng import laplace, normal
from leakgauge.harness.federation import registry
from tests.audit_case import at_most, setting_of
from tests.faults.library import lying, of_epsilon


def messages(count, outcomes, width):
    """The bytes of every vector of outcomes."""
    return [pack_levels(np.array(one), width) for one in itertools.product(range(outcomes), repeat=count)]


def assert_means_are_one(stated, wires, chances):
    """Under the distribution, the mean of each likelihood ratio is 1."""
    ratios = np.array([stated.read(wire, Key(0)).ratios for wire in wires])
    assert chances.sum() == pytest.approx(1, rel=1e-9)
    assert chances @ np.exp(ratios) == pytest.approx(np.ones(ratios.shape[1]), rel=1e-9)


def test_ratios_of_choices_have_a_mean_of_one():
    chances = np.array([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5]])
    wires = messages(2, 3, 2)
    found = np.array([chances[0, i] * chances[1, j] for i, j in itertools.product(range(3), repeat=2)])
    possible = [wire for wire, chance in zip(wires, found, strict=True) if chance]
    assert_means_are_one(Choices(chances, 2, others=powers(chances)), possible, found[found > 0])


def test_powers_multiply_epsilon():
    channel = np.array([[0.8, 0.2], [0.2, 0.8]])
    for share, power in zip(SHARES, powers(channel), strict=True):
        assert np.log(power[0, 0] / power[1, 0]) == pytest.approx(np.log(4) / (1 - share), rel=1e-12)


@pytest.mark.parametrize(("levels", "tau"), [(2, 2), (3, 1), (3, 3)])
def test_ratios_of_matches_have_a_mean_of_one(levels, tau):
    pq, place, width = PrivQuant(3, levels, tau, 2.5), np.array([0.3, levels - 1.0, 0.5]), (levels - 1).bit_length()
    stated = Matched(place, levels, tau, 2.5, pq.epsilon)
    every = np.array(list(itertools.product(range(levels), repeat=3)))
    rounded = np.clip(1 - np.abs(every - place), 0, None).prod(1)
    match = (every[:, None] == every[None]).sum(2) >= tau
    favored = 1 / (1 + np.exp(-2.5))
    distribution_of = np.where(match, favored / match.sum(1)[:, None], (1 - favored) / (~match).sum(1)[:, None])
    assert_means_are_one(stated, messages(3, levels, width), rounded @ distribution_of)


def test_ratios_of_levels_have_a_mean_of_one():
    lattice, numbers = Lattice(0.5, 1), np.array([0.2, -0.4])
    stated = leveled(Scaled(np.zeros(0), numbers, np.arange(2)), Laplacian(), 0.3 * np.eye(2), lattice, Key(1))
    edges = np.array([-np.inf, -0.5, 0.5, np.inf])
    first, second = (np.diff(Laplacian().uniforms((edges - cell) / 0.6)) for cell in stated.cells[0])
    assert_means_are_one(stated, messages(2, 3, 2), np.outer(first, second).ravel())


def test_the_far_tail_of_the_second_number_of_a_pair_is_never_certain():
    """With a lattice of pairs, the second level depends on the first number's tail, which no quadrature finds."""
    lattice, root = Lattice(1.0, 10, dimension=2), 0.6 * np.array([[1.0, 0.0], [0.0, 1.0]])
    stated = leveled(Scaled(np.zeros(0), np.zeros(2), np.arange(2)), Laplacian(), root, lattice, Key(1))
    top = 2**9
    for first, second in ((top + 40, top - 30), (top, top + 60), (top - 60, top + 90)):
        uniforms = stated.read(pack_levels(np.array([first, second]), 11), Key(0)).uniforms
        assert 1e-7 < uniforms[1] < 1 - 1e-7


def test_a_scale_at_a_rounding_tie_may_be_rounded_to_both_sides_and_no_other_may():
    low, step = np.float32(1.5), float(np.spacing(np.float32(1.5)))
    wires = [np.array([value], "<f4").tobytes() for value in (low, low + np.float32(step))]
    for wire in wires:
        for middle in (0.5, 0.5 + 1e-8):
            assert split(wire, np.array([1.5 + middle * step])) == b""
    with pytest.raises(DistributionError, match="the header is not the declared function"):
        split(wires[1], np.array([1.5 + 0.499 * step]))


def normal_ratios(n, shift, key):
    """[n, len(SHARES)] log ratios: alternative s moves the sum of n normal numbers by `shift` s standard deviations."""
    unit = np.array(SHARES) * shift / n**0.5
    drawn = np.random.Generator(np.random.Philox(key)).standard_normal((n, 1))
    return drawn * unit - unit**2 / 2


def test_a_p_value_of_ratios_is_rarely_small():
    groups = {"sender": np.arange(200) % 20, "round": np.arange(200) // 20}
    found = [ratio_values(normal_ratios(200, 20.0, key), groups) for key in range(1000)]
    for name in found[0]:
        assert sum(one[name] <= 0.01 for one in found) <= at_most(0.01, 1000)


def test_the_stated_share_of_missing_noise_is_seen_with_its_power():
    level, n = 1e-5, 400
    share = detectable_by_ratios(normal_ratios(n, 150.0, 1), level)
    assert share == 0.05
    seen, everyone = 0, {"round": np.zeros(n, np.int64)}
    for key in range(200):
        ratios = normal_ratios(n, 150.0, key)
        unit = np.array(SHARES) * 150.0 / n**0.5
        # messages that lack the share are shifted by their part of it
        seen += ratio_values(ratios + unit * share * 150.0 / n**0.5, everyone)["likelihood ratio"] < level
    assert seen >= 180


@pytest.mark.parametrize("shift", [0.0, 5.0])
def test_no_share_is_stated_where_messages_say_too_little(shift):
    assert detectable_by_ratios(normal_ratios(400, shift, 1), 1e-5) is None


def sample_of(**changes):
    """Honest numbers of 200 messages, each of three other coordinates out of 50."""
    draw = np.random.Generator(np.random.Philox(5))
    n, k = 200, 3
    places = np.array([draw.permutation(50)[:k] for _ in range(n)])
    found = Sample(
        uniforms=draw.random((n, k)),
        places=places,
        tensors=np.repeat([0, 1], 25),
        carried=draw.standard_normal((n, k)),
        norms=np.ones(n),
        sizes=np.full(n, 20),
        senders=np.arange(n) % 20,
        rounds=np.arange(n) // 20,
        runs=np.zeros(n, np.int64),
        patterns=np.zeros(n, np.int64),
        bits=None,
        lowest=draw.integers(0, 2, (n, k)),
        ratios=None,
    )
    return dataclasses.replace(found, **changes)


def test_each_message_has_its_own_places():
    honest = sample_of()
    quiet = np.where(honest.places == 7, 0.5 + 1e-3 * honest.uniforms, honest.uniforms)
    name = "magnitude: squares by coordinate"
    assert p_values(honest, coarse=True)[name] > 1e-3 > 1e-9 > p_values(sample_of(uniforms=quiet), coarse=True)[name]


def test_lowest_bits_may_favor_a_value_but_not_tell_signs():
    honest = sample_of()
    name = "lowest bits against centered signs"
    assert p_values(sample_of(lowest=np.zeros_like(honest.lowest)), coarse=False)[name] > 0.5
    assert p_values(sample_of(lowest=(honest.carried > 0).astype(np.int64)), coarse=False)[name] < 1e-20


def test_messages_that_the_defense_itself_rejects_are_an_error_not_a_departure():
    def refuse(liar, transmit, *call):
        raise MessageError("expected another waveform")

    with pytest.raises(MessageError, match="another waveform"):
        check_fit(lying(registry.build("defense", "ota", {}), refuse, "transmit"), setting_of(36), Key(0))


def test_bytes_that_a_distribution_cannot_parse_depart_from_it():
    def cut(liar, encode, *call):
        wire, memory = encode(*call)
        return wire[:-1], memory

    result = check_fit(lying(registry.build("defense", "mvu", {}), cut), setting_of(36), Key(0))
    assert result.rejects == ("24 bytes after the header, expected 25",)


def test_no_share_is_overstated_by_rare_messages():
    # under the alternative, most messages are among those of which an honest sample has one
    ratios = normal_ratios(400, 5.0, 1)
    ratios[0], ratios[1] = 1500.0, -np.inf
    assert detectable_by_ratios(ratios, 1e-5) is None


@pytest.mark.matrix
def test_a_channel_that_never_errs_shows_its_noise_in_long_messages():
    honest = registry.build("defense", "sqsgd", {})
    result = check_fit(lying(honest, of_epsilon(1 / 0.965)), setting_of(36), Key(0))
    assert result.detects == 0.02
    assert {name.partition(", ")[2] for name in result.rejects} == {"d = 81600 at the clip"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "epsilon"), [("mvu", 8.0), ("vqsgd", 1.0), ("sqsgd", 400.0)])
def test_a_discrete_defense_detects_the_share_that_it_states(name, epsilon):
    honest = registry.build("defense", name, {"epsilon": epsilon})
    share = check_fit(honest, setting_of(36), Key(0)).detects
    assert share <= 0.05
    liar = lying(honest, of_epsilon(1 / (1 - share)))
    # 95 % in expectation; 6 of 10 or fewer with a chance of 1e-3
    assert sum(bool(check_fit(liar, setting_of(36), Key(seed)).rejects) for seed in range(10)) >= 7


@pytest.mark.parametrize("scale", [1e-7, 1e-6, 1e-4, 1.0])
@pytest.mark.parametrize("noise", [Normal(), Laplacian()])
def test_floats_that_are_coarse_beside_the_noise_read_as_uniform_numbers(noise, scale):
    center = normal(Key(1, ("center",)), (20_000,), torch.float64).numpy()
    drawn = (laplace if noise == Laplacian() else normal)(Key(2, ("noise",)), (20_000,), torch.float64).numpy()
    wire = (center + scale * drawn).astype("<f4").tobytes()
    even = (np.arange(20_000) + 0.5) / 20_000
    read = np.sort(Additive(center, noise, scale).read(wire, Key(3)).uniforms)
    assert np.abs(read - even).max() < 1.95 / np.sqrt(20_000)  # Kolmogorov, 1e-3
    assert (np.diff(read) < 1e-9).sum() < 10  # no two numbers are equal
    # too little noise is still seen
    quiet = (center + 0.5 * scale * drawn).astype("<f4").tobytes()
    far = np.abs(
        np.sort(Additive(center, noise, scale).read(quiet, Key(3)).uniforms) - (np.arange(20_000) + 0.5) / 20_000
    )
    assert far.max() > (0.05 if scale > 1e-7 else 0.01)
