"""What a defense promises, what holds, and whether the second keeps the first."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

from leakgauge.harness.core.accounting import Event, epsilon
from leakgauge.harness.core.threats import Threat

_EQUAL = 1e-6
"""Relative difference of two epsilons that rounding may explain."""

_LOOSE = 0.01
"""A claim that is this much (relatively) above what holds asks for noise that it does not need."""


class Unit(enum.Enum):
    """What one epsilon covers. Epsilons of different units are never merged."""

    COORDINATE = "coordinate"
    SUBVECTOR = "sub-vector"
    MESSAGE = "message"
    RECORD = "record"
    CLIENT = "client"


class Relation(enum.Enum):
    """Which pairs of inputs are neighbors."""

    REPLACE = "replace"
    ADD_REMOVE = "add-remove"
    ANY_TWO = "any-two-inputs"


class Horizon(enum.Enum):
    """How much of the run one epsilon covers."""

    ONE_ROUND = "one round"
    WHOLE_RUN = "whole run"

    @classmethod
    def of(cls, rounds: int) -> Horizon:
        """Of a claim over so many rounds."""
        return cls.ONE_ROUND if rounds == 1 else cls.WHOLE_RUN


class Verdict(enum.Enum):
    """What becomes of a claim when it is checked."""

    HOLDS = "HOLDS"
    LOOSE = "LOOSE"
    BROKEN = "BROKEN"
    UNPROVED = "UNPROVED"
    NOTHING_PROMISED = "NOTHING PROMISED"


@dataclass(frozen=True)
class Proof:
    """What provably holds for one unit.

    Attributes:
        event: the law of what the adversary sees; None: no bound, epsilon is infinite at every delta below 1.
        method: how the number comes about, e.g. `analytic Gaussian`, `closed form`, `privacy loss distribution`.
        reason: one sentence, why it is what it is.
        tight: whether some pair of neighbors attains it, so that a smaller claim is false and not merely unproved.
        against: of whom it speaks; empty: of those against whom the claim is made.
    """

    event: Event | None
    unit: Unit
    method: str
    reason: str
    tight: bool = True
    against: frozenset[Threat] = frozenset()

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon that is known at `delta`."""
        return epsilon(self.event, delta)


@dataclass(frozen=True)
class Claim:
    """What is promised, to whom, for what unit; and what holds of it.

    Attributes:
        epsilon: by the formula of the source, for this horizon; infinite: nothing is promised.
        delta: at which the claim is made (0 for a pure claim).
        against: the adversaries of the claim; empty exactly where nothing is promised.
        assumes: what the source takes for granted.
        proved: what holds for the claim's unit, against the claim's adversaries.
        further: what holds for other units or adversaries, which a reader may take the claim for.
    """

    epsilon: float
    delta: float
    unit: Unit
    relation: Relation
    horizon: Horizon
    against: frozenset[Threat]
    source: str
    assumes: tuple[str, ...]
    proved: Proof
    further: tuple[Proof, ...] = ()

    def __post_init__(self) -> None:
        if math.isnan(self.epsilon) or self.epsilon < 0:
            raise ValueError(f"expected epsilon >= 0, got epsilon={self.epsilon}")
        if bool(self.against) != math.isfinite(self.epsilon):
            raise ValueError(f"expected adversaries exactly where something is promised, got epsilon={self.epsilon}")


class Judgment(NamedTuple):
    """claimed, proved: epsilons at the claim's delta."""

    verdict: Verdict
    claimed: float
    proved: float
    reason: str


def judge(claim: Claim) -> Judgment:
    """Compare what is claimed with what is proved, at the claim's own delta.

    | proved | verdict |
    |---|---|
    | nothing is claimed | NOTHING PROMISED |
    | above the claim, and attained | BROKEN |
    | above the claim, an upper bound only | UNPROVED: neither shown nor refuted |
    | more than 1 % below the claim | LOOSE |
    | else | HOLDS |
    """
    claimed, proved = claim.epsilon, claim.proved.epsilon(claim.delta)
    if math.isinf(claimed):
        return Judgment(Verdict.NOTHING_PROMISED, claimed, proved, claim.proved.reason)
    if proved > claimed * (1 + _EQUAL):
        verdict = Verdict.BROKEN if claim.proved.tight else Verdict.UNPROVED
    else:
        verdict = Verdict.LOOSE if proved < claimed * (1 - _LOOSE) else Verdict.HOLDS
    at = f" at delta {claim.delta:g}" if claim.delta else ""
    said = f"claimed {claimed:.6g}, proved {proved:.6g} a {claim.proved.unit.value}{at}"
    return Judgment(verdict, claimed, proved, f"{said}: {claim.proved.reason}")


def claim_over(
    rounds: int,
    epsilon: float,
    proved: Proof,
    *,
    source: str,
    delta: float = 0.0,
    relation: Relation = Relation.ANY_TWO,
    against: frozenset[Threat] = frozenset(Threat),
    assumes: tuple[str, ...] = (),
    further: tuple[Proof, ...] = (),
) -> Claim:
    """The claim of a mechanism over `rounds` rounds, for the unit of its proof, by default against every adversary.

    Over several rounds it assumes that the client takes part in each of them.
    """
    horizon = Horizon.of(rounds)
    assumes += every_round(rounds)
    return Claim(epsilon, delta, proved.unit, relation, horizon, against, source, assumes, proved, further)


def every_round(rounds: int) -> tuple[str, ...]:
    """What a claim over several rounds assumes."""
    return ("the client takes part in every round",) if rounds > 1 else ()


def nothing_promised(rounds: int, reason: str, *further: Proof) -> Claim:
    """The claim of a defense that makes none, over so many rounds; `further` as in `Claim`."""
    return Claim(
        epsilon=math.inf,
        delta=0.0,
        unit=Unit.MESSAGE,
        relation=Relation.ANY_TWO,
        horizon=Horizon.of(rounds),
        against=frozenset(),
        source="",
        assumes=(),
        proved=Proof(None, Unit.MESSAGE, "by definition", reason),
        further=further,
    )
