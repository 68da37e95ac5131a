"""Checked claims and audits in words: verdicts over the seeds, bounds with their federation, broken claims."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import assumption, counted
from leakgauge.harness.core.result import AuditRecord, ClaimRecord, TrainingRecord
from leakgauge.harness.core.stats import STRICT
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.notation import INFINITE, NO_VALUE, listing, number, over_seeds, per, percent, short


class Amount(NamedTuple):
    """An epsilon over the seeds: `scope` is its unit and delta, or how it was audited; `notes`: method, adversaries."""

    epsilon: str
    scope: str
    finite: bool
    notes: tuple[str, ...]


def _federation(audit: AuditRecord) -> str:
    rounds = f", {counted(audit.rounds, 'round')}" if audit.rounds > 1 else ""
    return f"{counted(audit.clients, 'client')}, d = {audit.dim}{rounds}"


def _scope(audit: AuditRecord) -> str:
    return f"{percent(audit.confidence, 0)}, n = {audit.trials}, {audit.threat}"


def stated(audit: AuditRecord) -> str:
    """A bound in one line, with the claim and the proof of its own federation, horizon and adversary."""
    known = f"claimed {number(audit.claimed)}, proved {number(audit.proved)}"
    where = f"{per(audit.unit, audit.delta)}, {audit.horizon}, {_federation(audit)}"
    return f"audited ≥ {short(audit.epsilon_lower)} ({_scope(audit)}), {known} {where}"


def alike(trainings: Sequence[TrainingRecord]) -> Iterable[list[AuditRecord]]:
    """The audits by kind: those that differ in more than their seed are never merged."""
    return gathered(
        (_kind(training.audited), training.audited) for training in trainings if training.audited is not None
    ).values()


def measured(audits: Sequence[AuditRecord], seeds: int) -> Amount:
    """The bound of audits that differ only in their seed, of this number of seeds."""
    first = audits[0]
    notes = [f"{per(first.unit, first.delta)}, {first.horizon}", _federation(first)]
    if len(audits) < seeds:
        notes.append(f"in {len(audits)} of {counted(seeds, 'seed')}")
    return Amount(f"≥ {over_seeds([audit.epsilon_lower for audit in audits])}", _scope(first), True, tuple(notes))


def described(audits: Sequence[AuditRecord]) -> list[str]:
    """How audits of one kind were made, what their bound assumes, and their verdicts on the code."""
    first = audits[0]
    span = f"a {first.horizon} of {counted(first.rounds, 'round')}" if first.rounds > 1 else first.horizon
    where = f"{counted(first.clients, 'client')} with {counted(first.samples, 'record')} each, d = {first.dim}"
    pairs = dict.fromkeys(f"{audit.pair} (distinguisher: {audit.distinguisher})" for audit in audits)
    method = f"{' / '.join(dict.fromkeys(audit.method for audit in audits))}, assuming {assumption(first.method)}"
    if assumption(first.method) != "nothing":
        least = over_seeds([audit.any_mechanism for audit in audits])
        method += f"; ≥ {least} without assumptions about the mechanism"
    neighbors = f"{first.relation}, {' / '.join(pairs)}"
    sentences = [
        f"Audited over {span} in a separate small federation: {where}. Neighbors: {neighbors}. Bound: {method}."
    ]
    ceilings = [audit.ceiling for audit in audits if audit.ceiling is not None]
    if ceilings:
        sure = percent(max(first.confidence, STRICT))
        sentences[0] += f" At {sure}, as a refutation needs: ≥ {over_seeds([audit.strict for audit in audits])}; "
        sentences[0] += f"these trials cannot refute an epsilon above {over_seeds(ceilings)}."
    sentences += _assuming(audits)
    verdicts = Counter(f"{audit.code}: {audit.seen}." for audit in audits)
    shares = (f" In {n} of {len(audits)} audits." if n < len(audits) else "" for n in verdicts.values())
    return sentences + [f"Code {text}{share}" for text, share in zip(verdicts, shares, strict=True)]


def _assuming(audits: Sequence[AuditRecord]) -> list[str]:
    alike = gathered(((bound.assumes, bound.unit), bound) for audit in audits for bound in audit.assuming)
    return [
        f"Assuming {assumes}, per {unit}: ≥ {over_seeds([bound.epsilon_lower for bound in bounds])}; proved "
        f"{short(bounds[0].proved)}. {counted(bounds[0].trials, 'message')} with each input."
        for (assumes, unit), bounds in alike.items()
    ]


def _kind(audit: AuditRecord) -> tuple[object, ...]:
    """The fields that two audits must share to form a range."""
    setting = audit.rounds, audit.clients, audit.dim, audit.samples, audit.claimed, audit.proved
    return audit.horizon, audit.unit, audit.delta, audit.relation, audit.threat, audit.confidence, audit.trials, setting


class Badge(NamedTuple):
    """A state. `tone` picks the colors; icon and words carry the meaning."""

    tone: str
    icon: str
    words: str


BY_AUDIT = "BROKEN (audit)"
"""The verdict if an audit is above the claim for the audited federation."""

AUTHORS_WORD = "AUTHOR'S WORD"
"""The verdict if the proved epsilon does not follow from the distribution that the defense states."""

_WORD = "The proof is its author's word: "

BADGES = {
    BY_AUDIT: Badge("bad", "✕", BY_AUDIT),
    "BROKEN": Badge("bad", "✕", "BROKEN"),
    "UNPROVED": Badge("warn", "?", "UNPROVED"),
    "VACUOUS": Badge("warn", "∞", "VACUOUS"),
    AUTHORS_WORD: Badge("warn", "✎", AUTHORS_WORD),
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
    AUTHORS_WORD: ("is its author's word", "are their authors' words"),
}
"""Each verdict as a verb, for one claim and for several claims."""


class State(NamedTuple):
    """A verdict; `seeds` states in how many seeds, if the seeds differ."""

    badge: Badge
    seeds: str


def checked(training: TrainingRecord) -> tuple[ClaimRecord, ClaimRecord]:
    """The recorded claims for one round and for the whole run.

    If an audit for the same unit and horizon refutes a claim, it is BROKEN (audit). If its proof does not follow from
    the stated distribution, it is at most AUTHOR'S WORD.
    """
    return _with_audit(training.one_round, training.audited), _with_audit(training.whole_run, training.audited)


def _with_audit(claim: ClaimRecord, audit: AuditRecord | None) -> ClaimRecord:
    if audit is not None and audit.refutes and (audit.unit, audit.horizon) == (claim.unit, claim.horizon):
        return dataclasses.replace(claim, verdict=BY_AUDIT, reason=f"{stated(audit)}; in this study {claim.reason}")
    if audit is not None and audit.stated and audit.stated.lacks and claim.verdict in ("HOLDS", "LOOSE"):
        return dataclasses.replace(claim, verdict=AUTHORS_WORD, reason=f"{claim.reason} {_WORD}{audit.stated.lacks}.")
    return claim


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
    counts, total = Counter(names), counted(len(names), "seed")
    found = [(badge, counts[name]) for name, badge in badges.items() if name in counts]
    return tuple(State(badge, "" if n == len(names) else f"in {n} of {total}") for badge, n in found)


def states(claims: Sequence[ClaimRecord]) -> tuple[State, ...]:
    """The distinct verdicts of one defense's trainings, the worst first."""
    return _states(BADGES, list(map(verdict_of, claims)))


def codes(trainings: Sequence[TrainingRecord]) -> tuple[State, ...]:
    """The distinct verdicts on the code of one defense's trainings, the worst first."""
    asked = [training for training in trainings if training.spec.audit] or trainings
    audits = [training.audited for training in asked]
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
        return claim.reason.replace("proved inf ", f"proved {INFINITE} ")
    audited = "The audited bound is above the claim for the audited federation. Proved: "
    decides = claim.attained if claim.attained is not None and verdict_of(claim) == "BROKEN" else claim.proved
    word = claim.reason[claim.reason.find(_WORD) :] + " Proved: " if verdict_of(claim) == AUTHORS_WORD else ""
    return f"{audited if verdict_of(claim) == BY_AUDIT else word}{decides.reason}"


def tally(analysis: Analysis) -> Counter[str]:
    """Number of defenses by verdict, once per setting; the worst verdict over seeds and horizons counts.

    BROKEN (audit) counts as BROKEN.
    """
    trained = filter(None, (analysis.trainings_of(*pair) for pair in analysis.pairs))
    worst = [max((claim for one in trainings for claim in checked(one)), key=severity) for trainings in trained]
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


def broken(analysis: Analysis) -> str:
    """How many claims are broken, such as `4 of 11 claims are broken`; empty if none is."""
    counts = tally(analysis)
    count, total = counts["BROKEN"], counts.total() - counts["NOTHING PROMISED"]
    return f"{count} of {counted(total, 'claim')} {_COUNTED['BROKEN'][count != 1]}" if count else ""


def brief(one_round: Sequence[ClaimRecord], whole_run: Sequence[ClaimRecord]) -> tuple[str, str]:
    """One defense's claim for one round in a few words with its verdict, and its worst verdict.

    The numbers are those of the seed with the worst verdict. The whole run is named if it comes out worse.
    """
    if not one_round or not whole_run:
        return NO_VALUE, ""
    first, whole = (max(claims, key=lambda c: (severity(c), c.epsilon or 0.0)) for claims in (one_round, whole_run))
    text = "nothing promised"
    if first.epsilon is not None:
        text = f"ε {short(first.epsilon)} per {first.unit}: {verdict_of(first)}"
    worse = severity(whole) > severity(first)
    return text + (f"; {whole.horizon}: {verdict_of(whole)}" if worse else ""), verdict_of(whole if worse else first)
