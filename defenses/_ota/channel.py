"""The common base of the defenses over a fading channel: gains, waveforms with their distribution, and claim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar

import numpy as np
import torch

from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses._ota.formulas import Allocation, Channel, Orthogonal, claimed_mu, composed_claim, rayleigh_gains
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Proof, Unit, claim_over
from leakgauge.harness.core.codec import pack_float64
from leakgauge.harness.core.contract import Defense, Link, Sender, Setting
from leakgauge.harness.core.distribution import DistributionError, MessageDistribution, Normal, Reading, expect_size
from leakgauge.harness.core.rng import Key, integers, uniform
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Vector

P = TypeVar("P", Allocation, Orthogonal)
Fading = Literal["rayleigh", "equal"]
"""Distribution of the squared gains: exponential with mean 1, or all 1."""

# Relative difference between a waveform without noise and its definition that float64 rounding explains
_ROUNDING = 1e-13


@dataclass(frozen=True)
class OverTheAir(Defense[P, None]):
    """Sends clipped updates as waveforms with each client's own noise, over public and constant gains.

    The public state holds the powers and is the same in every round. The noise in a client's waveform depends only on
    the client's private key.
    """

    analog: ClassVar[bool] = True
    source: ClassVar[str]
    """The source of the claim for one round."""

    clip: float = 1.0
    epsilon: float = 1.2
    delta: float = 1e-4
    power: float = 1000.0
    noise_variance: float = 1.0
    fading: Fading = "rayleigh"
    gains: str = ""
    channel_seed: int = 0

    def __post_init__(self) -> None:
        positive(clip=self.clip, epsilon=self.epsilon)
        claimed_mu(self.epsilon, self.delta)
        Channel(_read_gains(self.gains) or (1.0,), self.power, self.noise_variance)
        if self.fading not in ("rayleigh", "equal"):
            raise ValueError(f"expected fading rayleigh or equal, got {self.fading!r}")

    def make_channel(self, setting: Setting) -> Channel:
        """The channel from all clients to the server.

        Raises:
            ValueError: `gains` is for another number of clients.
        """
        squared = _read_gains(self.gains)
        if not squared and self.fading == "rayleigh":
            squared = rayleigh_gains(Key(self.channel_seed).child("gains"), setting.clients)
        squared = squared or (1.0,) * setting.clients
        if len(squared) != setting.clients:
            raise ValueError(f"expected one gain per client, got {len(squared)} for {setting.clients} clients")
        return Channel(squared, self.power, self.noise_variance)

    def encode(self, state: P, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """The waveform sqrt(alpha P) clip(u) / L + sqrt(beta P) n, with its phase compensated.

        n comes from the private key. The shared key is unused.
        """
        check_update(update)
        user = user_of(link.sender, link.setting)
        noise = rng.normal(private, (update.numel(),), torch.float64)
        signal = clip_l2(update.detach().cpu().double(), self.clip) / self.clip
        sent = math.sqrt(state.alpha[user] * self.power) * signal + math.sqrt(state.beta[user] * self.power) * noise
        return pack_float64(sent), None

    def low_noise_variant(self) -> OverTheAir[P]:
        """The same with an epsilon that needs no client noise, and receiver noise of 0.001 of a full-power signal."""
        return replace(self, epsilon=1e6, noise_variance=1e-6 * self.power)

    def claim_rounds(self, epsilon: float, rounds: int, *, assumes: tuple[str, ...], proofs: Sequence[Proof]) -> Claim:
        """The claim of `epsilon` per round, by (16) for several rounds; no claim if the deltas of (16) reach 1.

        Args:
            proofs: bounds for these rounds; the first bound is against the adversaries of the claim.
        """
        claimed, delta, source = epsilon, self.delta, self.source
        if rounds > 1:
            claimed, total = composed_claim(epsilon, self.delta, rounds, self.delta)
            delta, source = total if total < 1 else delta, f"{source}, composed by (16)"
        proved, against, further = proofs[0], proofs[0].against, tuple(proofs[1:])
        return claim_over(
            rounds, claimed, proved, source=source, delta=delta, against=against, assumes=assumes, further=further
        )


def user_of(sender: Sender, setting: Setting) -> int:
    """The client whose gain and power a sender has, because a probe may have more victims than there are clients."""
    return sender.number % setting.clients


def exact(mu: float, rounds: int, against: frozenset[Threat], reason: str, *, tight: bool = True) -> Proof:
    """The bound for rounds of N(0, 1) against N(mu, 1), for any two updates; no bound where mu is infinite."""
    if math.isinf(mu):
        return Proof(None, Unit.CLIENT, "analytic Gaussian", reason, tight, against)
    return Proof.gaussian(1 / mu, rounds, Unit.CLIENT, reason, tight=tight, against=against)


def _read_gains(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(gain) for gain in text.split(",")) if text else ()
    except ValueError as error:
        raise ValueError(f"expected comma-separated squared gains, got gains={text!r}") from error


@dataclass(frozen=True, eq=False)
class Waveform(MessageDistribution):
    """Float64 numbers: `center` [k] plus normal noise of standard deviation `spread`.

    A client that relies on the others' noise may send no noise of its own; its numbers are then compared with the
    center. The reading then holds the auditor's own random numbers, because nothing random is left to test.
    """

    center: Numbers
    spread: float

    @property
    def noiseless(self) -> bool:  # type: ignore[override]  # a constant of other distributions
        return self.spread == 0

    def read(self, wire: bytes, own: Key) -> Reading:
        """Reads a waveform by the normal cdf."""
        count = len(self.center)
        expect_size(wire, 8 * count)
        sent, places = np.frombuffer(wire, "<f8"), np.arange(count)
        if self.spread > 0:
            # the terms of a float64 sum are no finer than the sum, so its last bits are not fair coins
            grid = np.exp2(np.ceil(np.log2(np.abs(self.center) + 16 * self.spread)) - 48)
            bits = np.rint(sent / grid).astype(np.int64) & 1
            lowest = (np.frombuffer(wire, "<u8") & 1).astype(np.int64)
            return Reading(Normal().uniforms((sent - self.center) / self.spread), places, bits, lowest)
        # not `>`, because a NaN would pass
        if not (np.abs(sent - self.center) <= _ROUNDING * np.abs(self.center)).all():
            raise DistributionError("a waveform without noise is not the projected update at its amplitude")
        drawn = uniform(own.child("noise"), (count,), dtype=torch.float64).numpy()
        coins = integers(own.child("bits"), count, 2)
        return Reading(drawn, places, coins, coins)
