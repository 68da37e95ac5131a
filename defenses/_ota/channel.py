"""What the defenses over a fading channel have in common: who is heard how well, what is sent, what is claimed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch

from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses._ota.formulas import (
    Allocation,
    Channel,
    Composed,
    Orthogonal,
    claimed_mu,
    composed_claim,
    rayleigh_gains,
)
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import repeat
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, every_round
from leakgauge.harness.core.codec import pack_float64
from leakgauge.harness.core.contract import (
    Defense,
    Link,
    Sender,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Vector

P = TypeVar("P", Allocation, Orthogonal)
Fading = Literal["rayleigh", "equal"]
"""Squared gains that are exponential of mean 1, or all 1."""


@dataclass(frozen=True)
class OverTheAir(Defense[P, None]):
    """Clipped updates as waveforms with noise of the client's own, over gains that all know and that never change.

    The public state tells the powers; it is the same in every round. The noise of each client's waveform comes from its
    private key alone.
    """

    analog: ClassVar[bool] = True
    promises: ClassVar[Horizon] = Horizon.ONE_ROUND
    source: ClassVar[str]
    """Where the claim for one round stands."""

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
        """From all clients to the server.

        Raises:
            ValueError: gains are given for another number of clients.
        """
        squared = _read_gains(self.gains)
        if not squared and self.fading == "rayleigh":
            squared = rayleigh_gains(Key(self.channel_seed).child("gains"), setting.clients)
        squared = squared or (1.0,) * setting.clients
        if len(squared) != setting.clients:
            raise ValueError(f"expected one gain a client, got {len(squared)} for {setting.clients} clients")
        return Channel(squared, self.power, self.noise_variance)

    def encode(self, state: P, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """sqrt(alpha P) clip(u) / L + sqrt(beta P) n: the waveform, with its phase compensated.

        n comes from the private key. Does not use the shared key.
        """
        check_update(update)
        user = user_of(link.sender, link.setting)
        noise = rng.normal(private, (update.numel(),), torch.float64)
        signal = clip_l2(update.detach().cpu().double(), self.clip) / self.clip
        sent = math.sqrt(state.alpha[user] * self.power) * signal + math.sqrt(state.beta[user] * self.power) * noise
        return pack_float64(sent), None

    def claim_rounds(self, epsilon: float, rounds: int, *, assumes: tuple[str, ...], proofs: Sequence[Proof]) -> Claim:
        """`epsilon` a round, by (16) where there are several; nothing where the deltas of (16) reach 1.

        Args:
            proofs: what holds of these rounds; the first is against whom the claim is made.
        """
        claimed = Composed(epsilon, self.delta)
        if rounds > 1:
            claimed = composed_claim(epsilon, self.delta, rounds, self.delta)
        proved, *further = proofs
        return Claim(
            epsilon=claimed.epsilon,
            delta=claimed.delta if claimed.delta < 1 else self.delta,
            unit=Unit.CLIENT,
            relation=Relation.ANY_TWO,
            horizon=Horizon.of(rounds),
            against=proved.against if math.isfinite(claimed.epsilon) else frozenset(),
            source=f"{self.source}, composed by (16)" if rounds > 1 else self.source,
            assumes=(*assumes, *every_round(rounds)),
            proved=proved,
            further=tuple(further),
        )


def user_of(sender: Sender, setting: Setting) -> int:
    """Whose place a sender takes: a probe may have more victims than there are clients."""
    return sender.number % setting.clients


def exact(mu: float, rounds: int, against: frozenset[Threat], reason: str, *, tight: bool = True) -> Proof:
    """Rounds of N(0, 1) against N(mu, 1), whichever two updates a client has; no bound where mu is infinite."""
    from dp_accounting import GaussianDpEvent

    event = repeat(GaussianDpEvent(1 / mu), rounds) if math.isfinite(mu) else None
    return Proof(event, Unit.CLIENT, "analytic Gaussian", reason, tight, against)


def _read_gains(text: str) -> tuple[float, ...]:
    """The numbers in a comma-separated text; none in an empty one."""
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise ValueError(f"expected squared gains with commas between them, got gains={text!r}") from error
