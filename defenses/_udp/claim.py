"""The base of UDP and its variants: a round of noisy messages, and the claim of a run.

The variants differ in the noise multipliers of their rounds.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from leakgauge.defenses._common.clip import clip_l2, normal_reach
from leakgauge.defenses._common.misfit import gaussian_misfit
from leakgauge.defenses._udp import formulas
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import repeat
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, Violation
from leakgauge.harness.core.codec import pack_float32, unpack_float32
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links, LocalRule, Sender, Setting
from leakgauge.harness.core.distribution import (
    Additive,
    MessageDistribution,
    Normal,
    StepDistribution,
    numbers,
    projected,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import ANYBODY
from leakgauge.harness.core.vec import Vector

S = TypeVar("S")
Clips = Literal["records", "update"]
"""The vectors that are clipped: each record's gradient, as printed, or the update after local training."""

_EXACT = "analytic Gaussian"
_QUIET = 1e6  # the sum of 1/z^2 of a quieter run; z is then 3e-3 over ten rounds
_FALLING = "no round's learning rate is above that of round 0"

_OFTEN = 0.95  # quantile of the number of selections that defines a client selected often
# The part of a claim's source that names the calibration
_BY: dict[formulas.Calibration, str] = {
    "paper": "",
    "zcdp": ", noise by zCDP (Bun & Steinke 2016, Prop. 1.3)",
    "tight": ", exact noise (Balle & Wang 2018, Thm 8)",
}


@dataclass(frozen=True)
class UDPRounds(Defense[S, None]):
    """Normal noise on a clipped message in each round, with a multiplier z from the public state.

    The noise of client i has standard deviation z Dl_i, where Dl_i is the sensitivity of the client's message:

    | clips | sends | Dl_i | to |
    |---|---|---|---|
    | records | update | 2 lr C / n_i, lr of round 0 | one replaced record |
    | records | gradient | 2 C / n_i | one replaced record |
    | update | either | 2 C | any two messages |
    """

    promises: ClassVar[Horizon] = Horizon.WHOLE_RUN
    source: ClassVar[str]
    """The source of the schedule."""

    clip: float = 1.0
    epsilon: float = 8.0
    delta: float = 1e-3
    rounds: int | None = None
    clips: Clips = "records"

    def __post_init__(self) -> None:
        positive(clip=self.clip)
        formulas.budget(self.epsilon, self.delta, 1.0, self.formula)
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"expected rounds >= 1, got rounds={self.rounds}")
        if self.clips not in ("records", "update"):
            raise ValueError(f"expected clips records or update, got {self.clips!r}")

    @property
    @abstractmethod
    def formula(self) -> formulas.Calibration:
        """The formula between the epsilon and the noise of a run."""

    @abstractmethod
    def noise_multiplier(self, state: S, setting: Setting) -> float:
        """z in the round of this state."""

    @property
    def local(self) -> LocalRule:
        """For `records`, one full-batch step on clipped gradients: only then is the sensitivity known."""
        return LocalRule(clip=self.clip, full_batch=True) if self.clips == "records" else LocalRule()

    def horizon(self, setting: Setting) -> int:
        """T, the number of rounds for which the noise is calibrated."""
        return setting.rounds if self.rounds is None else self.rounds

    def state_metrics(self, state: S, setting: Setting) -> dict[str, float]:
        """z of the round, and the current T."""
        rounds = self.planned_rounds(state, setting)
        return {"noise_multiplier": self.noise_multiplier(state, setting), "planned_rounds": float(rounds)}

    def planned_rounds(self, state: S, setting: Setting) -> int:
        """The number of rounds after which the run ends, as planned in this state."""
        return self.horizon(setting)

    def sigma(self, state: S, sender: Sender, setting: Setting) -> float:
        """Standard deviation of the noise in each coordinate of this client's message."""
        z = self.noise_multiplier(state, setting)
        if self.clips == "update":
            return z * 2 * self.clip
        return z * formulas.sensitivity(self.clip, self._step(setting), sender.samples)

    def encode(self, state: S, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Clip the update if `clips` is `update`, add noise from the private key, send float32."""
        check_update(update)
        noise = rng.normal(private, (update.numel(),), torch.float64)
        clipped = clip_l2(update, self.clip) if self.clips == "update" else update
        noisy = clipped.cpu().double() + self.sigma(state, link.sender, link.setting) * noise
        return pack_float32(noisy.float()), None

    def estimate(self, state: S, received: bytes, link: Link) -> Vector:
        """The noisy message, unbiased for the clipped update or mean of clipped gradients."""
        return unpack_float32(received, link.setting.dim)

    def longest(self, state: S, link: Link) -> float:
        """C plus a bound on the noise if updates are clipped; else infinite: a penalty of the model is not clipped."""
        noise = normal_reach(self.sigma(state, link.sender, link.setting), link.setting.dim)
        return self.clip + noise if self.clips == "update" else math.inf

    def likelihood(self, state: S, received: Sequence[bytes], links: Links) -> Likelihood:
        """|y - clip(u)|^2 / (2 sigma_i^2), where sigma_i is that of each message's sender.

        A candidate is clipped to the norm bound of a message. This is exact for a clipped update or a single record.
        For several clipped records, the mean shows only this bound; an attack that tries records clips each of them. An
        l2 penalty of the model, which is not clipped, is ignored.
        """
        sent = torch.stack([unpack_float32(wire, links.setting.dim) for wire in received])
        sigmas = [[self.sigma(state, sender, links.setting)] for sender in links.senders]
        noise = torch.tensor(sigmas, dtype=torch.float64)
        bound = self.clip if self.clips == "update" else self.clip * self._step(links.setting)

        def score(update: Tensor) -> Tensor:
            return gaussian_misfit((clip_l2(update, bound) - sent) / noise.to(update.dtype), 1.0)

        return score

    def message_distribution(self, state: S, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """Normal noise of z times the sensitivity around the update's projection, or the already bounded update."""
        center, sensitive = projected(update, self.clip), 2 * self.clip
        if self.clips == "records":
            center = numbers(update)
            sensitive *= (link.setting.lr if link.setting.sends == "update" else 1.0) / link.sender.samples
        return Additive(center, Normal(), self.noise_multiplier(state, link.setting) * sensitive)

    def step_distribution(self, setting: Setting) -> StepDistribution | None:
        """For `records`, one step on all records without noise, because noise is added to the message."""
        return StepDistribution(self.clip, 0.0, 1.0, single=True) if self.clips == "records" else None

    def low_noise_variant(self) -> UDPRounds[S]:
        """The same with an epsilon that allows z far below 1."""
        return replace(self, epsilon=formulas.claimed_epsilon(_QUIET, self.delta, 1.0, self.formula))

    def claim(self, history: Sequence[S], setting: Setting) -> Claim:
        """(epsilon, delta) over these rounds, claimed by `formula` and proved by exact composition of Gaussians.

        The proof is for a client that takes part in every round.
        """
        multipliers = [self.noise_multiplier(state, setting) for state in history]
        share = setting.participants / setting.clients
        records = self.clips == "records"
        unit = Unit.RECORD if records else Unit.MESSAGE
        known = "" if share == 1 else "; for a client selected in all rounds, because the server knows the selection"
        why = f"normal noise on a message of known sensitivity; rounds compose exactly{known}."
        return Claim(
            epsilon=formulas.claimed_epsilon(formulas.whole_run_mu(multipliers) ** 2, self.delta, share, self.formula),
            delta=self.delta,
            unit=unit,
            relation=Relation.REPLACE if records else Relation.ANY_TWO,
            horizon=Horizon.of(len(history)),
            against=ANYBODY,
            source=self.source + _BY[self.formula],
            assumes=tuple(self.assumes(setting)),
            proved=_composed(multipliers, unit, why),
            further=(*_picked(multipliers, unit, share), self._client(multipliers, setting)),
        )

    def violations(self, updates: Sequence[Vector], links: Links, lr: float) -> dict[str, Violation]:
        """The rounds whose learning rate is above that of round 0, for which the noise is calibrated."""
        if _FALLING not in self.assumes(links.setting):
            return {}
        return {_FALLING: Violation(int(lr > links.setting.lr), 1, "round")}

    def assumes(self, setting: Setting) -> list[str]:
        """The assumptions of the claim."""
        texts = ["C and T do not depend on private data (the source takes C from the gradients' norms)"]
        if self.clips == "records" and setting.sends == "update":
            texts.append(_FALLING)
        if self.formula == "paper" and setting.participants < setting.clients:
            texts.append(
                "the adversary does not know which clients take part (a share q); this multiplies epsilon by sqrt(q)"
            )
        return texts

    def _step(self, setting: Setting) -> float:
        return setting.lr if setting.sends == "update" else 1.0

    def _client(self, multipliers: Sequence[float], setting: Setting) -> Proof:
        if self.clips == "update":
            why = "two clipped updates differ by no more than the sensitivity, whatever their records."
            return _composed(multipliers, Unit.CLIENT, why)
        n = setting.samples
        why = (
            f"all {n} records of the smallest client move its message {n} times as far as one; more for larger clients."
        )
        return _composed((z / n for z in multipliers), Unit.CLIENT, why)


@dataclass(frozen=True)
class Calibrated(UDPRounds[S]):
    """A variant whose formula is a parameter."""

    calibration: formulas.Calibration = "paper"

    @property
    def formula(self) -> formulas.Calibration:
        """The calibration."""
        return self.calibration


def _picked(multipliers: Sequence[float], unit: Unit, share: float) -> tuple[Proof, ...]:
    if share == 1 or len(multipliers) < 2:
        return ()
    from dp_accounting import GaussianDpEvent

    mean = GaussianDpEvent(1 / (math.sqrt(share) * formulas.whole_run_mu(multipliers)))
    average = f"for the average client, which spends a share of {share:g} of the run's budget."
    often = formulas.participations(len(multipliers), share, _OFTEN)
    rounds = f"the {often} of {len(multipliers)} rounds with the least noise"
    most = f"for a client selected in {rounds}; {_OFTEN:.0%} of clients are not selected more often."
    return Proof(mean, unit, _EXACT, average), _composed(sorted(multipliers)[:often], unit, most)


def _composed(multipliers: Iterable[float], unit: Unit, reason: str) -> Proof:
    from dp_accounting import ComposedDpEvent, GaussianDpEvent

    events = [repeat(GaussianDpEvent(z), count) for z, count in Counter(multipliers).items()]
    return Proof(ComposedDpEvent(events), unit, _EXACT, reason)
