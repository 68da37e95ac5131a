"""What UDP and its variants share: a round of noisy messages, and what a run of them claims.

They differ in the noise multipliers of their rounds.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses._common.misfit import gaussian_misfit
from leakgauge.defenses._udp.formulas import (
    Calibration,
    budget,
    claimed_epsilon,
    participations,
    sensitivity,
    whole_run_mu,
)
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import repeat
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit
from leakgauge.harness.core.codec import pack_float32, unpack_float32
from leakgauge.harness.core.contract import (
    Defense,
    Likelihood,
    Link,
    Links,
    LocalRule,
    Sender,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Vector

if TYPE_CHECKING:
    from dp_accounting import DpEvent

S = TypeVar("S")
Clips = Literal["records", "update"]
"""What is clipped: each record's gradient, as printed, or the update that local training made."""

_OFTEN = 0.95
"""Quantile of the client that is picked often."""

_BY: dict[Calibration, str] = {
    "paper": "",
    "zcdp": ", noise by zCDP (Bun & Steinke 2016, Prop. 1.3)",
    "tight": ", exact noise (Balle & Wang 2018, Thm 8)",
}
"""What a calibration adds to the source of a claim."""


@dataclass(frozen=True)
class UDPRounds(Defense[S, None]):
    """Normal noise on a clipped message, round by round, of a multiplier z that the public state tells.

    The noise of client i has the standard deviation z Dl_i, Dl_i the sensitivity of its message:

    | clips | sends | Dl_i | of |
    |---|---|---|---|
    | records | update | 2 lr C / n_i, lr of round 0 | one replaced record |
    | records | gradient | 2 C / n_i | one replaced record |
    | update | either | 2 C | any two messages |
    """

    promises: ClassVar[Horizon] = Horizon.WHOLE_RUN
    source: ClassVar[str]
    """Where the schedule stands."""

    clip: float = 1.0
    epsilon: float = 8.0
    delta: float = 1e-3
    rounds: int | None = None
    clips: Clips = "records"

    def __post_init__(self) -> None:
        positive(clip=self.clip)
        budget(self.epsilon, self.delta, 1.0, self.formula)
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"expected rounds >= 1, got rounds={self.rounds}")
        if self.clips not in ("records", "update"):
            raise ValueError(f"expected clips records or update, got {self.clips!r}")

    @property
    @abstractmethod
    def formula(self) -> Calibration:
        """By which an epsilon follows from the noise of a run, and the reverse."""

    @abstractmethod
    def noise_multiplier(self, state: S, setting: Setting) -> float:
        """z in the round of this state."""

    @property
    def local(self) -> LocalRule:
        """One full-batch step on clipped gradients, the only one that `records` has a sensitivity for."""
        return LocalRule(clip=self.clip, full_batch=True) if self.clips == "records" else LocalRule()

    def horizon(self, setting: Setting) -> int:
        """T, the number of rounds that the noise is made for."""
        return setting.rounds if self.rounds is None else self.rounds

    def sigma(self, state: S, sender: Sender, setting: Setting) -> float:
        """Standard deviation of the noise in each coordinate of this client's message."""
        z = self.noise_multiplier(state, setting)
        if self.clips == "update":
            return z * 2 * self.clip
        return z * sensitivity(self.clip, self._step(setting), sender.samples)

    def encode(self, state: S, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Clip where it is the update that is clipped, add noise from the private key, send float32."""
        check_update(update)
        noise = rng.normal(private, (update.numel(),), torch.float64)
        kept = clip_l2(update, self.clip) if self.clips == "update" else update
        noisy = kept.cpu().double() + self.sigma(state, link.sender, link.setting) * noise
        return pack_float32(noisy.float()), None

    def estimate(self, state: S, received: bytes, link: Link) -> Vector:
        """The noisy message: unbiased for what the client clipped."""
        return unpack_float32(received, link.setting.dim)

    def likelihood(self, state: S, received: Sequence[bytes], links: Links) -> Likelihood:
        """|y - clip(u)|^2 / (2 sigma_i^2), sigma_i of each message's sender.

        A candidate is clipped to the norm that no message exceeds. That is exact where the update is clipped, or there
        is one record. Of several clipped records it is all that the mean tells; who tries records clips each of them.
        An l2 penalty of the model, which no message's clip covers, is left out.
        """
        sent = torch.stack([unpack_float32(wire, links.setting.dim) for wire in received])
        noise = torch.tensor([[self.sigma(state, who, links.setting)] for who in links.senders], dtype=torch.float64)
        bound = self.clip if self.clips == "update" else self.clip * self._step(links.setting)

        def score(update: Tensor) -> Tensor:
            return gaussian_misfit((clip_l2(update, bound) - sent) / noise.to(update.dtype), 1.0)

        return score

    def claim(self, history: Sequence[S], setting: Setting) -> Claim:
        """(epsilon, delta) for a client's part of these rounds, by the formula; and the exact composition of Gaussians.

        What is proved is for a client that takes part in every one of the rounds.
        """
        multipliers = [self.noise_multiplier(state, setting) for state in history]
        share = setting.participants / setting.clients
        records = self.clips == "records"
        unit = Unit.RECORD if records else Unit.MESSAGE
        return Claim(
            epsilon=claimed_epsilon(whole_run_mu(multipliers) ** 2, self.delta, share, self.formula),
            delta=self.delta,
            unit=unit,
            relation=Relation.REPLACE if records else Relation.ANY_TWO,
            horizon=Horizon.of(len(history)),
            against=frozenset(Threat),
            source=self.source + _BY[self.formula],
            assumes=tuple(self.assumes(setting)),
            proved=_exact(_composition(multipliers), unit, _every(share)),
            further=(*_picked(multipliers, unit, share), self._client(multipliers, setting)),
        )

    def assumes(self, setting: Setting) -> list[str]:
        """What the claim takes for granted."""
        found = ["C and T are set without a look at private data (the source takes C from the gradients' norms)"]
        if self.clips == "records" and setting.sends == "update":
            found.append("no round's learning rate is above that of round 0")
        if self.formula == "paper" and setting.participants < setting.clients:
            found.append(
                "the adversary does not know who takes part in a round: for that, epsilon is lowered by sqrt(q)"
            )
        return found

    def _step(self, setting: Setting) -> float:
        """What a mean of clipped gradients is multiplied with to give a message."""
        return setting.lr if setting.sends == "update" else 1.0

    def _client(self, multipliers: Sequence[float], setting: Setting) -> Proof:
        """Of all of a client's records."""
        if self.clips == "update":
            why = "two messages differ by no more, from however many records they are made."
            return _exact(_composition(multipliers), Unit.CLIENT, why)
        n = setting.samples
        why = f"all {n} records of the smallest client move its message {n} times as far as one; larger clients more."
        return _exact(_composition(z / n for z in multipliers), Unit.CLIENT, why)


def _every(share: float) -> str:
    """Why the exact number is what it is."""
    known = "" if share == 1 else "; for a client that is picked in all of them, as the server knows whom it picks"
    return f"normal noise on a message of known sensitivity; rounds compose exactly{known}."


def _picked(multipliers: Sequence[float], unit: Unit, share: float) -> tuple[Proof, ...]:
    """Of clients that take part in some of the rounds only."""
    if share == 1 or len(multipliers) < 2:
        return ()
    from dp_accounting import GaussianDpEvent

    mean = GaussianDpEvent(1 / (math.sqrt(share) * whole_run_mu(multipliers)))
    often = participations(len(multipliers), share, _OFTEN)
    least = _composition(sorted(multipliers)[:often])
    rounds = f"{often} of {len(multipliers)} rounds, those of least noise"
    return (
        _exact(mean, unit, f"a client with a share of {share:g} in what the run spends: the average."),
        _exact(least, unit, f"a client that is picked in {rounds}; {_OFTEN:.0%} of clients are not picked more often."),
    )


def _exact(event: DpEvent, unit: Unit, reason: str) -> Proof:
    """Of Gaussians alone."""
    return Proof(event, unit, "analytic Gaussian", reason)


def _composition(multipliers: Iterable[float]) -> DpEvent:
    """One Gaussian a round."""
    from dp_accounting import ComposedDpEvent, GaussianDpEvent

    counts = Counter(multipliers)
    return ComposedDpEvent([repeat(GaussianDpEvent(z), count) for z, count in counts.items()])
