"""Checked claims: their verdicts over the seeds, sentences about broken claims, and a short form for the terminal."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.result import AuditRecord, ClaimRecord, TrainingRecord
from leakgauge.reports.sections.audits import stated
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.notation import INFINITE, NO_VALUE, listing, number, short

MOST_SENTENCES = 5
"""Largest number of broken claims that each get a sentence at the top of the page."""


class Badge(NamedTuple):
    """A state. `tone` picks the colors; icon and words carry the meaning."""

    tone: str
    icon: str
    words: str


BY_AUDIT = "BROKEN (audit)"
"""The verdict if an audit is above the claim for the audited federation."""

BADGES = {
    BY_AUDIT: Badge("bad", "✕", BY_AUDIT),
    "BROKEN": Badge("bad", "✕", "BROKEN"),
    "UNPROVED": Badge("warn", "?", "UNPROVED"),
    "VACUOUS": Badge("warn", "∞", "VACUOUS"),
    "LOOSE": Badge("info", "~", "LOOSE"),
    "HOLDS": Badge("good", "✓", "HOLDS"),
    "NOTHING PROMISED": Badge("none", "–", "NOTHING PROMISED"),
}
"""Badges by verdict, the worst verdict first."""

CODES = {
    "CONTRADICTED": Badge("bad", "✕", "code CONTRADICTED"),
    "INCONCLUSIVE": Badge("warn", "?", "code INCONCLUSIVE"),
    "NOT AUDITED": Badge("none", "–", "code NOT AUDITED"),
    "CONSISTENT": Badge("good", "✓", "code CONSISTENT"),
}
"""Badges by verdict on the code, the worst verdict first."""

UNKEPT = Badge("warn", "!", "assumption broken")
"""The badge of a claim whose proof does not cover the run."""

_COUNTED = {
    "HOLDS": ("holds", "hold"),
    "LOOSE": ("is loose", "are loose"),
    "BROKEN": ("is broken", "are broken"),
    "UNPROVED": ("is unproved", "are unproved"),
    "VACUOUS": ("is vacuous", "are vacuous"),
}
"""Each verdict as a verb, for one claim and for several claims."""


class State(NamedTuple):
    """A verdict; `seeds` states in how many seeds, if the seeds differ."""

    badge: Badge
    seeds: str


class Broken(NamedTuple):
    """The broken claims: a heading with their number, sentences for the first ones, and the number of the others."""

    heading: str
    sentences: tuple[str, ...]
    more: int


def checked(training: TrainingRecord) -> tuple[ClaimRecord, ClaimRecord]:
    """The recorded claims for one round and for the whole run.

    If an audit for the same unit and horizon refutes a claim, it is BROKEN (audit).
    """
    return _with_audit(training.one_round, training.audited), _with_audit(training.whole_run, training.audited)


def _with_audit(claim: ClaimRecord, audit: AuditRecord | None) -> ClaimRecord:
    """The claim with the verdict of an audit, and the audit as the first part of its reason."""
    if audit is None or not audit.refutes or (audit.unit, audit.horizon) != (claim.unit, claim.horizon):
        return claim
    return dataclasses.replace(claim, verdict=BY_AUDIT, reason=f"{stated(audit)}; in this study {claim.reason}")


def audited_claim(claim: ClaimRecord, audit: AuditRecord) -> ClaimRecord:
    """The claim for the audited federation and adversary, with its own proof and verdict."""
    terms: dict[str, Any] = {"delta": audit.delta, "unit": audit.unit, "reason": audit.reason}
    terms["against"] = (audit.threat,)
    proved = dataclasses.replace(claim.proved, epsilon=audit.proved, **terms)
    terms |= {"relation": audit.relation, "verdict": BY_AUDIT if audit.refutes else audit.verdict}
    return dataclasses.replace(claim, epsilon=audit.claimed, horizon=audit.horizon, proved=proved, **terms)


def is_broken(claim: ClaimRecord) -> bool:
    """Whether a proof or an audit refutes the claim."""
    return verdict_of(claim) in ("BROKEN", BY_AUDIT)


def verdict_of(claim: ClaimRecord) -> str:
    """The verdict of a claim; an infinite epsilon promises nothing, whatever verdict is recorded."""
    return "NOTHING PROMISED" if claim.epsilon is None else claim.verdict


def severity(claim: ClaimRecord) -> int:
    """Higher is worse."""
    return -list(BADGES).index(verdict_of(claim))


def _states(badges: Mapping[str, Badge], names: Sequence[str]) -> tuple[State, ...]:
    """The distinct badges among the names of one defense's trainings, in the order of the badges."""
    counts, total = Counter(names), counted(len(names), "seed")
    return tuple(
        State(badge, "" if counts[name] == len(names) else f"in {counts[name]} of {total}")
        for name, badge in badges.items()
        if name in counts
    )


def states(claims: Sequence[ClaimRecord]) -> tuple[State, ...]:
    """The distinct verdicts of one defense's trainings, the worst first."""
    return _states(BADGES, list(map(verdict_of, claims)))


def codes(trainings: Sequence[TrainingRecord]) -> tuple[State, ...]:
    """The distinct verdicts on the code of one defense's trainings, the worst first."""
    audits = [training.audited for training in trainings]
    return _states(CODES, ["NOT AUDITED" if audit is None else audit.code for audit in audits])


def unkept(claims: Sequence[ClaimRecord], trainings: Sequence[TrainingRecord]) -> tuple[State, ...]:
    """A mark if a training broke an assumption that the proof of its claim needs; empty if no training did."""
    return _states({"broken": UNKEPT}, ["broken" if broken else "" for broken in map(is_unkept, claims, trainings)])


def is_unkept(claim: ClaimRecord, training: TrainingRecord) -> bool:
    """Whether a training broke an assumption of its claim; a claim that promises nothing has no assumptions."""
    broken = {violation.assumption for violation in training.violations if violation.voids}
    return claim.epsilon is not None and not broken.isdisjoint(claim.assumes)


def why(claim: ClaimRecord) -> str:
    """The reason for a verdict, for a place where the claimed and the proved number are shown."""
    if claim.proved.delta != claim.delta:
        return reason(claim)
    audited = "The audited bound is above the claim for the audited federation. Proved: "
    decides = claim.attained if claim.attained is not None and verdict_of(claim) == "BROKEN" else claim.proved
    return f"{audited if verdict_of(claim) == BY_AUDIT else ''}{decides.reason}"


def reason(claim: ClaimRecord) -> str:
    """The reason for a verdict with both numbers, with infinity as a symbol."""
    return claim.reason.replace("proved inf ", f"proved {INFINITE} ")


def _claims(analysis: Analysis) -> dict[tuple[str, str], list[ClaimRecord]]:
    """The claims of each setting and defense that has a training: those for one round, then those for the whole run."""
    both = {pair: [checked(training) for training in analysis.trainings_of(*pair)] for pair in analysis.pairs}
    return {
        pair: [claim for claims in zip(*found, strict=True) for claim in claims]
        for pair, found in both.items()
        if found
    }


def tally(analysis: Analysis) -> Counter[str]:
    """Number of defenses by verdict, once per setting; the worst verdict over seeds and horizons counts.

    BROKEN (audit) counts as BROKEN.
    """
    worst = [max(claims, key=severity) for claims in _claims(analysis).values()]
    return Counter("BROKEN" if is_broken(claim) else verdict_of(claim) for claim in worst)


def overview(analysis: Analysis) -> str:
    """The tally as a sentence; empty if no training finished."""
    counts = tally(analysis)
    empty = counts["NOTHING PROMISED"]
    total = counts.total() - empty
    if not total:
        return "No defense in this report promises a finite epsilon." if empty else ""
    parts = [f"{counts[name]} {words[counts[name] != 1]}" for name, words in _COUNTED.items() if counts[name]]
    rest = f"; {counted(empty, 'more defense')} {'promises' if empty == 1 else 'promise'} nothing" if empty else ""
    pairs = [[(c, t) for t in analysis.trainings_of(*pair) for c in checked(t)] for pair in analysis.pairs]
    broken = sum(any(is_unkept(*claim) for claim in pair) for pair in pairs)
    uncovered = f" This run broke an assumption of {counted(broken, 'claim')}." if broken else ""
    return f"Of {counted(total, 'claim')}, {listing(parts)}{rest}.{uncovered}"


def broken(analysis: Analysis) -> Broken | None:
    """The broken claims, in the study's order; None if no claim is broken."""
    counts = tally(analysis)
    count, total = counts["BROKEN"], counts.total() - counts["NOTHING PROMISED"]
    if not count:
        return None
    sentences = []
    for (setting, defense), claims in _claims(analysis).items():
        refuted = [claim for claim in claims if is_broken(claim)]
        if refuted:
            place = f" ({analysis.settings[setting]})" if len(analysis.settings) > 1 else ""
            horizons = list(dict.fromkeys(claim.horizon for claim in refuted))
            first = f"for {horizons[0]} " if len(horizons) > 1 else ""
            name = analysis.defenses[defense].text
            sentences.append(f"{name}{place}, {listing(horizons)}: {first}{reason(refuted[0])}")
    heading = f"{count} of {counted(total, 'claim')} {_COUNTED['BROKEN'][count != 1]}"
    return Broken(heading, tuple(sentences[:MOST_SENTENCES]), max(0, count - MOST_SENTENCES))


def brief(one_round: Sequence[ClaimRecord], whole_run: Sequence[ClaimRecord]) -> tuple[str, str]:
    """One defense's claim in a few short lines for a terminal, and its worst verdict.

    The numbers are those of the seed with the worst verdict, for one round. The whole run gets a line if its verdict
    differs.
    """
    if not one_round or not whole_run:
        return NO_VALUE, ""
    first, whole = (max(claims, key=lambda c: (severity(c), c.epsilon or 0.0)) for claims in (one_round, whole_run))
    if first.epsilon is None:
        lines = [f"{INFINITE}: nothing", "promised"]
    else:
        lines = [f"{short(first.epsilon)} per {first.unit}", f"{first.horizon}, δ {short(first.delta)}"]
        lines.append(f"proved {number(first.proved.epsilon)}: {verdict_of(first)}")
    if verdict_of(whole) != verdict_of(first):
        lines.append(f"{whole.horizon}: {verdict_of(whole)}")
    return "\n".join(lines), verdict_of(max(first, whole, key=severity))
