"""What each defense claims beside what is proved, for one round and for the whole run, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from leakgauge.harness.core.result import ClaimRecord, ProofRecord, TrainingRecord
from leakgauge.reports.sections.audits import Measured, details, measured, of_horizon
from leakgauge.reports.sections.checked import State, checked, is_broken, overview, severity, states, verdict_of, why
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.labels import Label
from leakgauge.reports.text.notation import adversaries, bound, epsilon, listing, per, plural


class Amount(NamedTuple):
    """An epsilon over the seeds. `scope` is its unit and delta, `notes` what else it needs to be read."""

    epsilon: str
    scope: str
    finite: bool
    notes: tuple[str, ...]


class Line(NamedTuple):
    """One horizon of one defense, or both where all is the same."""

    horizon: str
    claimed: Amount
    proved: Amount
    states: tuple[State, ...]
    reason: str
    audited: Measured | None = None


class Further(NamedTuple):
    """A proof for another unit or other adversaries than those of the claim."""

    epsilon: str
    scope: str
    reason: str


class ClaimRow(NamedTuple):
    """One defense in one setting.

    Attributes:
        basis: source, neighbors and adversaries of the claim.
        audits: how it was audited, and where.
    """

    defense: Label
    setting: str
    lines: tuple[Line, ...]
    further: tuple[Further, ...]
    basis: str
    assumes: tuple[str, ...]
    audits: tuple[str, ...] = ()


class Claims(NamedTuple):
    """The table; settings are named only where there are several.

    Attributes:
        units: those of the finite claims.
        audited: whether any defense was.
    """

    rows: tuple[ClaimRow, ...]
    several_settings: bool
    units: tuple[str, ...]
    overview: str
    audited: bool = False


def _distinct(texts: Sequence[str]) -> str:
    """Each text once; several where the seeds differ."""
    return " / ".join(dict.fromkeys(texts))


def _claimed(claims: Sequence[ClaimRecord], digits: int) -> Amount:
    """The promise of one horizon over the seeds."""
    units = _distinct([claim.unit for claim in claims])
    if any(claim.epsilon is None for claim in claims):
        return Amount(epsilon(claims), f"per {units}, any δ < 1", False, ())
    return Amount(epsilon(claims, digits), _distinct([per(claim.unit, claim.delta) for claim in claims]), True, ())


def attained(proof: ProofRecord) -> str:
    """Whether a smaller epsilon could hold."""
    if proof.epsilon is None:
        return "no finite bound" if proof.tight else "no finite bound is known"
    return "attained" if proof.tight else "upper bound"


def _proved(claims: Sequence[ClaimRecord], digits: int) -> Amount:
    """What holds for one horizon over the seeds."""
    proofs = [claim.proved for claim in claims]
    others = [
        f"against {adversaries(claim.proved.against)}"
        for claim in claims
        if set(claim.proved.against) != set(claim.against)
    ]
    methods = _distinct([f"{proof.method}, {attained(proof)}" for proof in proofs])
    finite = all(proof.epsilon is not None for proof in proofs)
    scope = _distinct([per(proof.unit, proof.delta) for proof in proofs])
    return Amount(bound(proofs, digits), scope, finite, tuple(filter(None, (methods, _distinct(others)))))


def _digits(claims: Sequence[ClaimRecord]) -> int:
    """Enough to tell the two epsilons apart where the verdict rests on their difference."""
    close = epsilon(claims) == bound([claim.proved for claim in claims])
    return 7 if close and any(is_broken(claim) or verdict_of(claim) == "UNPROVED" for claim in claims) else 4


def _line(claims: Sequence[ClaimRecord]) -> Line:
    """One horizon; the reason is that of the worst verdict."""
    reasons = dict.fromkeys(why(claim) for claim in sorted(claims, key=severity, reverse=True))
    first, *others = reasons
    more = f" ({plural(len(others), 'other reason')} in other seeds)" if others else ""
    digits = _digits(claims)
    return Line(claims[0].horizon, _claimed(claims, digits), _proved(claims, digits), states(claims), first + more)


def _further(claims: Sequence[ClaimRecord]) -> tuple[Further, ...]:
    """The other proofs: seeds are merged, different units, deltas and adversaries never, horizons only where all is
    the same.
    """
    proofs: dict[tuple[object, ...], list[ProofRecord]] = {}
    for claim in claims:
        for proof in claim.further:
            key = claim.horizon, proof.unit, proof.delta, proof.against, proof.method, proof.tight
            proofs.setdefault(key, []).append(proof)
    horizons: dict[tuple[str, str, str, str], list[str]] = {}
    for (horizon, *_), found in proofs.items():
        first = found[0]
        against = f", against {adversaries(first.against)}" if first.against else ""
        how = f"{first.method}, {attained(first)}"
        same = bound(found), per(first.unit, first.delta) + against, how, first.reason
        horizons.setdefault(same, []).append(str(horizon))
    return tuple(
        Further(value, f"{scope}, {listing(spans)} ({how})", reason)
        for (value, scope, how, reason), spans in horizons.items()
    )


def _lines(trainings: Sequence[TrainingRecord]) -> tuple[Line, ...]:
    """One round and the whole run; one line where a run has one round only, or where they differ in nothing."""
    if not trainings:
        return ()
    one, whole = (_line(claims) for claims in zip(*map(checked, trainings), strict=True))
    one_audit = measured(of_horizon(trainings, one.horizon), [t.one_round for t in trainings])
    whole_audit = measured(of_horizon(trainings, whole.horizon), [t.whole_run for t in trainings])
    if one._replace(horizon="") != whole._replace(horizon=""):
        return one._replace(audited=one_audit), whole._replace(audited=whole_audit)
    horizon = listing(dict.fromkeys((one.horizon, whole.horizon)))
    return (one._replace(horizon=horizon, audited=one_audit or whole_audit),)


def _both(texts: Sequence[tuple[str, str]]) -> str:
    """(horizon, text) pairs as one text where all agree, else each with its horizon."""
    found = dict.fromkeys(texts)
    if len({text for _, text in found}) <= 1:
        return next((text for _, text in found), "")
    return "; ".join(f"{horizon}: {text}" for horizon, text in found)


def _basis(claims: Sequence[ClaimRecord]) -> str:
    """What the finite claims rest on, in a sentence; empty where nothing is promised."""
    finite = [claim for claim in claims if claim.epsilon is not None]
    if not finite:
        return ""
    parts = {
        "Claimed in": [claim.source for claim in finite],
        "Neighbors:": [claim.relation for claim in finite],
        "Against": [adversaries(claim.against) for claim in finite],
    }
    spans = [claim.horizon for claim in finite]
    said = {name: _both(list(zip(spans, texts, strict=True))) for name, texts in parts.items()}
    return " ".join(f"{name} {text}." for name, text in said.items() if text)


def claims(analysis: Analysis) -> Claims:
    """One row a defense and setting, in the study's order."""
    rows, units = [], []
    for setting, defense in analysis.pairs:
        trainings = analysis.trainings.get((setting, defense), ())
        both = [t.one_round for t in trainings] + [t.whole_run for t in trainings]
        audits = details(trainings)
        units += [claim.unit for claim in both if claim.epsilon is not None]
        rows.append(
            ClaimRow(
                defense=analysis.defenses[defense],
                setting=analysis.settings[setting],
                lines=_lines(trainings),
                further=_further(both),
                basis=_basis(both),
                assumes=tuple(dict.fromkeys(text for claim in both for text in claim.assumes)),
                audits=audits,
            )
        )
    return Claims(
        rows=tuple(rows),
        several_settings=len(analysis.settings) > 1,
        units=tuple(dict.fromkeys(units)),
        overview=overview(analysis),
        audited=any(row.audits for row in rows),
    )
