"""Claims of defenses, their proofs, and whether a proof supports a claim."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from leakgauge.harness.core.accounting import Event, Leak, Pure, epsilon, repeat
from leakgauge.harness.core.threats import ANYBODY, LISTED, Threat, seeing

_EQUAL = 1e-6  # relative difference of two epsilons that is attributed to rounding
VACUOUS = 10.0
"""Above this epsilon an adversary may guess one bit correctly with probability 0.99995: the claim promises nothing."""

# A claim is loose if it exceeds the proved epsilon by more than this, relatively: less noise would suffice
_LOOSE = 0.01


EVERY_ROUND = "the client takes part in every round"
"""The assumption behind a sum of epsilons over rounds. A client that misses rounds has a smaller epsilon."""


IN_SUMS = (
    "where only sums are seen: all clients of a round send with equal weights, each with noise that it keeps secret, "
    "also one that is left out"
)
"""The assumption of the proofs of `in_sums`."""

_SEE_SUMS = seeing(LISTED - {"messages", "shared", "others", "broadcast"}) - {Threat.PARTICIPANT}


class Unit(enum.Enum):
    """What one epsilon covers. Epsilons of different units are never merged."""

    COORDINATE = "coordinate"
    SUBVECTOR = "sub-vector"
    MESSAGE = "message"
    RECORD = "record"
    CLIENT = "client"


class Relation(enum.Enum):
    """The definition of neighboring inputs."""

    REPLACE = "replace"
    ADD_REMOVE = "add-remove"
    ANY_TWO = "any-two-inputs"


class Horizon(enum.Enum):
    """The part of the run that one epsilon covers."""

    ONE_ROUND = "one round"
    WHOLE_RUN = "whole run"

    @classmethod
    def of(cls, rounds: int) -> Horizon:
        """The horizon of a claim over `rounds` rounds."""
        return cls.ONE_ROUND if rounds == 1 else cls.WHOLE_RUN


class Arithmetic(enum.Enum):
    """The numbers for which a proof holds; `labels.ARITHMETIC` says what each means, in a sentence.

    REALS: a message, or a mean that others see, holds floats with noise. A proof for real numbers says nothing of their
        low bits (Mironov 2012, "On significance of the least significant bits for differential privacy").
    ROUNDING_SAFE: the numbers of a message come from finite sets that no update changes, so that there are no low bits.
        Their distributions are right up to rounding: if those of n numbers are off by t each, in total variation,
        (epsilon, delta) becomes (epsilon, delta + (1 + e^epsilon) n t); t is about the number of outcomes times 2^-53,
        or times 2^-24 if floats of 24 bits are rounded to levels.
    EXACT: besides, the probabilities are the stated ones, by integers or fractions. No shipped defense is.
    """

    REALS = "reals"
    ROUNDING_SAFE = "rounding-safe"
    EXACT = "exact"


class Verdict(enum.Enum):
    """The result of checking a claim by formulas, best first; an audited bound above the claim makes it BROKEN."""

    HOLDS = "HOLDS"
    LOOSE = "LOOSE"
    AUTHORS_WORD = "AUTHOR'S WORD"
    BROKEN = "BROKEN"
    UNPROVED = "UNPROVED"
    VACUOUS = "VACUOUS"
    NOTHING_PROMISED = "NOTHING PROMISED"


class Code(enum.Enum):
    """The result of auditing the code behind a claim: whether the observed behavior matches the proved mechanism."""

    CONTRADICTED = "CONTRADICTED"
    CONSISTENT = "CONSISTENT"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_AUDITED = "NOT AUDITED"


@dataclass(frozen=True)
class Proof:
    """A proved epsilon for one unit.

    Attributes:
        event: the distribution of the adversary's view; None: no bound, epsilon is infinite at every delta below 1.
        method: how the number is computed, e.g. `analytic Gaussian`, `closed form`, `privacy loss distribution`.
        reason: one sentence that explains the number.
        tight: whether some pair of neighbors attains the bound; a smaller claim is then false, not only unproved.
        against: the adversaries that the proof covers; empty: the adversaries of the claim.
        relation: of the neighbors; None: that of the claim.
    """

    event: Event | None
    unit: Unit
    method: str
    reason: str
    tight: bool = True
    against: frozenset[Threat] = frozenset()
    relation: Relation | None = None

    @classmethod
    def pure(
        cls, epsilon: float, rounds: int, unit: Unit, reason: str, method: str = "closed form", *, tight: bool = True
    ) -> Proof:
        """`rounds` releases, each epsilon-DP at delta = 0."""
        return cls(repeat(Pure(epsilon), rounds), unit, method, reason, tight)

    @classmethod
    def leak(
        cls,
        chance: float,
        rounds: int,
        unit: Unit,
        reason: str,
        method: str = "closed form",
        *,
        tight: bool = True,
        against: frozenset[Threat] = frozenset(),
    ) -> Proof:
        """`rounds` releases, each of which reveals everything with probability `chance`, and nothing otherwise."""
        return cls(repeat(Leak(chance), rounds), unit, method, reason, tight, against)

    @classmethod
    def gaussian(
        cls,
        noise_multiplier: float,
        rounds: int,
        unit: Unit,
        reason: str,
        *,
        tight: bool = True,
        against: frozenset[Threat] = frozenset(),
    ) -> Proof:
        """`rounds` Gaussian mechanisms; the noise multiplier is noise_std / sensitivity."""
        from dp_accounting import GaussianDpEvent

        event = repeat(GaussianDpEvent(noise_multiplier), rounds)
        return cls(event, unit, "analytic Gaussian", reason, tight, against)

    @classmethod
    def none(
        cls, unit: Unit, reason: str, method: str = "by definition", *, against: frozenset[Threat] = frozenset()
    ) -> Proof:
        """No finite epsilon at any delta below 1."""
        return cls(None, unit, method, reason, against=against)

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon known to hold at `delta`."""
        return epsilon(self.event, delta)


class Violation(NamedTuple):
    """How often messages break one assumption of a claim.

    Attributes:
        broken: the number of counted items in which the assumption fails.
        of: the number of counted items in all.
        what: the counted item, in the singular: coordinate, pair, message, round or client.
        covered: the proof holds anyway: only the source's formula, or the tightness, needs the assumption.
    """

    broken: int
    of: int
    what: str
    covered: bool = False

    def plus(self, other: Violation) -> Violation:
        """The sum of both counts, for the same assumption."""
        return self._replace(broken=self.broken + other.broken, of=self.of + other.of)


@dataclass(frozen=True)
class Claim:
    """The claim of a defense's source, and the proofs about it.

    Attributes:
        epsilon: by the formula of the source, for this horizon; infinite: nothing is promised.
        delta: the claimed delta (0 for a pure claim).
        against: the adversaries of the claim; empty if and only if nothing is promised.
        assumes: the assumptions of the source; `Defense.violations` counts those that messages can break.
        proved: the proof for the claim's unit, against the claim's adversaries: an upper bound.
        further: proofs for other units or adversaries that a reader may confuse with those of the claim.
        attained: an epsilon that some pair of neighbors attains, at the claim's delta, if `proved` is larger and not
            tight: a smaller claim is false. None: unknown.
        groups: the claims of clients whose epsilons differ; this claim is the largest of them. Empty: all are equal.
        arithmetic: the numbers for which the proofs hold; `claim_of` takes it from the defense.
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
    attained: Proof | None = None
    groups: tuple[ClientGroup, ...] = ()
    arithmetic: Arithmetic = Arithmetic.REALS

    def __post_init__(self) -> None:
        if math.isnan(self.epsilon) or self.epsilon < 0:
            raise ValueError(f"expected epsilon >= 0, got epsilon={self.epsilon}")
        if bool(self.against) != math.isfinite(self.epsilon):
            got = f"{len(self.against)} with epsilon={self.epsilon}"
            raise ValueError(f"expected adversaries in `against` if epsilon is finite, and none otherwise; got {got}")


class ClientGroup(NamedTuple):
    """Clients with the same parameters, their numbers, and their claim; label: the parameters, as `epsilon 4`."""

    label: str
    clients: tuple[int, ...]
    claim: Claim


class Judgment(NamedTuple):
    """claimed, proved: epsilons at the claim's delta."""

    verdict: Verdict
    claimed: float
    proved: float
    reason: str


def judge(claim: Claim) -> Judgment:
    """Compare the claimed with the proved epsilon, at the claim's own delta.

    | proved | verdict |
    |---|---|
    | nothing is claimed | NOTHING PROMISED |
    | above the claim, which is below an attained epsilon | BROKEN |
    | above the claim, an upper bound only | UNPROVED: neither shown nor refuted |
    | at most the claim, but above `VACUOUS` | VACUOUS |
    | more than 1 % below the claim | LOOSE |
    | else | HOLDS |
    """
    claimed, proved = claim.epsilon, claim.proved.epsilon(claim.delta)
    if math.isinf(claimed):
        return Judgment(Verdict.NOTHING_PROMISED, claimed, proved, claim.proved.reason)
    attained = claim.attained or claim.proved
    shown = attained.epsilon(claim.delta) if attained.tight else 0.0
    if proved > claimed * (1 + _EQUAL):
        verdict = Verdict.BROKEN if shown > claimed * (1 + _EQUAL) else Verdict.UNPROVED
    elif proved > VACUOUS:
        verdict = Verdict.VACUOUS
    else:
        verdict = Verdict.LOOSE if proved < claimed * (1 - _LOOSE) else Verdict.HOLDS
    at = f" at delta {claim.delta:g}" if claim.delta else ""
    also = f", attained {shown:.6g}" if claim.attained else ""
    numbers = f"claimed {claimed:.6g}, proved {proved:.6g}{also} per {claim.proved.unit.value}{at}"
    why = attained.reason if verdict is Verdict.BROKEN else claim.proved.reason
    return Judgment(verdict, claimed, proved, f"{numbers}: {why}")


def claim_over(
    rounds: int,
    epsilon: float,
    proved: Proof,
    *,
    source: str,
    delta: float = 0.0,
    relation: Relation = Relation.ANY_TWO,
    against: frozenset[Threat] = ANYBODY,
    assumes: tuple[str, ...] = (),
    further: tuple[Proof, ...] = (),
    attained: Proof | None = None,
) -> Claim:
    """The claim of a mechanism over `rounds` rounds, for the unit of its proof, by default against `ANYBODY`.

    Over several rounds, the claim assumes that the client takes part in each round. An infinite epsilon has no
    adversaries.
    """
    horizon = Horizon.of(rounds)
    against = against if math.isfinite(epsilon) else frozenset()
    assumes += (EVERY_ROUND,) if rounds > 1 else ()
    return Claim(epsilon, delta, proved.unit, relation, horizon, against, source, assumes, proved, further, attained)


def over_turns(claim: Claim, rounds: int, turns: int) -> Claim:
    """A claim of the rounds in which a client takes part, as one of all `rounds`: the others show nothing of it."""
    groups = tuple(group._replace(claim=over_turns(group.claim, rounds, turns)) for group in claim.groups)
    assumes = tuple(text for text in claim.assumes if text != EVERY_ROUND)
    if claim.against and rounds > 1:
        assumes += (f"clients take turns, each in at most {turns} of {rounds} rounds",)
    return replace(claim, horizon=Horizon.of(rounds), assumes=assumes, groups=groups)


def in_sums(claim: Claim, proof_of: Callable[[int], Proof | None], users: int) -> Claim:
    """A claim with what is proved against adversaries that see only sums of a round's messages.

    The neighbors are a client's update and none: a client that is left out sends its noise alone, as if its update were
    zero. So an update moves the sum by its norm, where two updates differ by twice as much.

    Args:
        proof_of: the proof where a sum has the noise of so many clients; see `Defense.summed_proof`.
        users: the clients of a round, all with the same weight.
    """
    all_, own = f"the noises of all {users} clients add up", "a client subtracts its own noise from the sum"
    asked = (users, all_, _SEE_SUMS), (users - 1, own, frozenset({Threat.PARTICIPANT}))
    proofs = [
        replace(proof, unit=Unit.CLIENT, reason=f"{why}; {proof.reason}", against=against, relation=Relation.ADD_REMOVE)
        for senders, why, against in asked
        if users > 1 and (proof := proof_of(senders)) is not None
    ]
    return replace(claim, further=(*claim.further, *proofs), assumes=(*claim.assumes, *[IN_SUMS][: len(proofs)]))


def added_up(source: str, rounds: int) -> str:
    """The source of a claim; states that a sum over several rounds is ours, not the paper's."""
    return source + (", rounds added up by us" if rounds > 1 else "")


def nothing_promised(rounds: int, reason: str, *further: Proof) -> Claim:
    """The claim of a defense that promises nothing, over `rounds` rounds; `further` as in `Claim`."""
    proved, horizon = Proof.none(Unit.MESSAGE, reason), Horizon.of(rounds)
    return Claim(math.inf, 0.0, Unit.MESSAGE, Relation.ANY_TWO, horizon, frozenset(), "", (), proved, further)
