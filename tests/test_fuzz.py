"""Decoders answer any bytes with finite numbers within the public bound, or with a `MessageError`."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from leakgauge import Key, Layout, Link, MessageError, Sender, rng
from leakgauge.defenses._cepam import wire as cepam
from leakgauge.defenses._common.clip import normal_reach
from leakgauge.defenses.cepam_clip import CepamClip
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.t_noise import TNoise
from leakgauge.harness.core.codec import pack_float32, pack_float64
from leakgauge.harness.federation import registry
from leakgauge.harness.integrations.message_checks import KINDS, mutated
from leakgauge.testing import checks_of
from tests.by_rows import by_rows
from tests.fuzz import DEFENSES, SETTING, honest, taken

MESSAGES = 100_000
MEGABYTE = 1 << 20
LARGE = dataclasses.replace(SETTING, layout=Layout(("w",), ((66_001,),)))

every_defense = pytest.mark.parametrize(("name", "parameters"), DEFENSES, ids=[f"{n} {p or ''}" for n, p in DEFENSES])
CHECKS = dict(checks_of("defense"))


@every_defense
def test_any_bytes_decode_to_finite_numbers_or_are_refused_and_honest_messages_never_are(name, parameters):
    for check in ("messages", "bound"):
        CHECKS[check](registry.build("defense", name, parameters))


def peak():
    """The most memory that this process has held since the last `forget`, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def forget():
    """Measure `peak` from now on; returns the memory that is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


@pytest.mark.slow
def test_a_hundred_thousand_messages_raise_nothing_else_and_take_little_memory():
    held = forget()
    block = np.ones(60 * MEGABYTE, np.uint8)
    assert peak() - held > 50 * MEGABYTE  # the measure sees what would be too much
    del block
    cases = [(honest(*case), -(-MESSAGES // len(DEFENSES))) for case in DEFENSES]
    large = ("cepam-gaussian", {"dimension": 3}), ("cepam-laplace", {}), ("top-k", {})
    cases += [(honest(*case, setting=LARGE), 60) for case in large]
    draws, counts = np.random.default_rng(0), []
    for one, count in cases:
        assert taken(one, one.wire)
        held, kept = forget(), 0
        for number in range(count):
            wire = one.wire
            for _ in range(1 + number % 3):
                wire = mutated(wire, KINDS[draws.integers(len(KINDS))], *draws.integers(2**32, size=2).tolist())
            kept += taken(one, wire)
        assert peak() - held < 50 * MEGABYTE
        counts.append(kept)
    assert sum(map(bool, counts)) > len(DEFENSES) / 2  # some mutations give another valid message


@pytest.mark.parametrize("dim", [1, 2, 30, 1000, 10**7])
def test_honest_noise_exceeds_its_bound_with_a_probability_below_1e_12(dim):
    assert stats.chi2.sf((normal_reach(2.0, dim) / 2.0) ** 2, dim) < 1e-12
    setting = dataclasses.replace(SETTING, layout=Layout(("w",), ((dim,),)))
    link = Link(setting, Sender(0, 8), None)
    defense = Laplace(clip=0.5, epsilon=2.0)
    far = defense.longest(None, link) / math.sqrt(dim) - 0.5
    assert 0 < dim * 2 * stats.laplace(scale=0.5).sf(far) < 1e-12
    for parameters in ({}, {"s2": 0.1, "nu": 2.1}, {"s2": 2.0, "nu": 50.0}):
        noisy = TNoise(clip=0.5, scale="public", **parameters)
        (s2, nu), pairs = noisy.noise, -(-dim // 2)
        far = noisy.longest(None, link) / math.sqrt(pairs) / 0.5 - 1
        # |r|^2 / 2 s2 of bivariate t noise has the F distribution with 2 and nu degrees of freedom
        assert 0 < pairs * stats.f(2, nu).sf(far**2 / (2 * s2)) < 1e-12


def forged(one, update):
    """The bytes that decode to about this update: neither clipped nor noisy."""
    defense, state = one.here.defense, one.here.state
    if defense.analog:
        gain = state.gain if defense.superposes else float(defense._gains(state)[one.link.sender.number])
        return pack_float64(gain * update.double())
    if isinstance(defense, CepamClip):
        radii = defense.radii(one.link.key.child("radii"), SETTING.dim, 1.0)
        spread = defense._spread(1.0, SETTING)
        return cepam.pack(update.double().numpy()[:, None], radii, spread, one.link.key.child("dithers"))
    return pack_float32(update)


@by_rows(
    ("cepam-clip", {}),
    ("dp-fedavg", {}),
    ("gaussian", {"noise_std": 1e-3}),
    ("laplace", {}),
    ("ota", {}),
    ("ota-orthogonal", {}),
    ("t-noise", {"scale": "public"}),
    *((name, {"clips": "update"}) for name in ("udp", "udp-crd", "udp-lei")),
)
def test_a_message_beyond_the_public_bound_is_refused_by_the_server_and_read_by_an_adversary(name, parameters):
    one = honest(name, parameters)
    longest = one.here.defense.longest(one.here.state, one.link)
    update = rng.normal(Key(0), (SETTING.dim,))
    for factor, refused in ((0.5, False), (2.0, True), (1e6, True)):
        wire = forged(one, factor * longest * update / update.norm())
        read = one.here.estimate(wire, one.link.sender, one.link.shared)
        assert 0.7 < float(read.norm()) / (factor * longest) < 1.4
        assert taken(one, wire) != refused
    with pytest.raises(MessageError, match=r"expected an update of norm .* or less, the public bound, got "):
        one.here.accept(wire, one.link)


def test_a_clip_without_noise_is_a_bound_on_the_norm_and_others_promise_none():
    for name, parameters in (
        ("dp-fedavg", {}),
        ("none", {}),
        ("top-k", {}),
        ("udp", {}),
        ("laplace", {"scale": "vector"}),
    ):
        one = honest(name, parameters)
        expected = 1.0 if name == "dp-fedavg" else math.inf
        assert one.here.defense.longest(one.here.state, one.link) == expected
