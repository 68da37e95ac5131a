"""Claims as they came out of their check: the verdicts over the seeds, how many are broken, a short form."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from leakgauge.harness.core.result import AuditRecord, ClaimRecord, TrainingRecord
from leakgauge.reports.sections.audits import refutation
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.notation import INFINITE, NO_VALUE, listing, plural, short

MOST_SENTENCES = 5
"""Broken claims that are told one by one at the top of the page."""


class Badge(NamedTuple):
    """A state: `tone` picks the colors, the icon and the words carry the meaning."""

    tone: str
    icon: str
    words: str


BY_AUDIT = "BROKEN (audit)"
"""The verdict where an audit is above the claim of the federation that it was made in."""

BADGES = {
    BY_AUDIT: Badge("bad", "✕", BY_AUDIT),
    "BROKEN": Badge("bad", "✕", "BROKEN"),
    "UNPROVED": Badge("warn", "?", "UNPROVED"),
    "LOOSE": Badge("info", "~", "LOOSE"),
    "HOLDS": Badge("good", "✓", "HOLDS"),
    "NOTHING PROMISED": Badge("none", "–", "NOTHING PROMISED"),
}
"""By verdict, the worst first."""

_SAID = {
    "HOLDS": ("holds", "hold"),
    "LOOSE": ("is loose", "are loose"),
    "BROKEN": ("is broken", "are broken"),
    "UNPROVED": ("is unproved", "are unproved"),
}


class State(NamedTuple):
    """A verdict; `seeds` says in how many of them where they differ."""

    badge: Badge
    seeds: str


class Broken(NamedTuple):
    """The broken claims: how many of how many, a sentence on each, and how many more there are."""

    heading: str
    sentences: tuple[str, ...]
    more: int


class Checked(NamedTuple):
    """A training's claims with the verdicts that a report shows."""

    one_round: ClaimRecord
    whole_run: ClaimRecord


def checked(training: TrainingRecord) -> Checked:
    """The claims as recorded, but BROKEN (audit) where an audit for the same unit and horizon refutes one."""
    claims = training.one_round, training.whole_run
    return Checked(*(_with_audit(claim, training.audited) for claim in claims))


def _with_audit(claim: ClaimRecord, audit: AuditRecord | None) -> ClaimRecord:
    """The verdict, and before its reason what the audit found."""
    if audit is None or not audit.refutes or (audit.unit, audit.horizon) != (claim.unit, claim.horizon):
        return claim
    return dataclasses.replace(claim, verdict=BY_AUDIT, reason=f"{refutation(audit)}; here {claim.reason}")


def is_broken(claim: ClaimRecord) -> bool:
    """By proof or by audit."""
    return verdict_of(claim) in ("BROKEN", BY_AUDIT)


def verdict_of(claim: ClaimRecord) -> str:
    """The verdict of a claim; an infinite epsilon promises nothing, whatever else is said of it."""
    return "NOTHING PROMISED" if claim.epsilon is None else claim.verdict


def severity(claim: ClaimRecord) -> int:
    """Higher is worse."""
    return -list(BADGES).index(verdict_of(claim))


def states(claims: Sequence[ClaimRecord]) -> tuple[State, ...]:
    """The distinct verdicts of one defense's trainings, the worst first."""
    found = Counter(map(verdict_of, claims))
    return tuple(
        State(BADGES[name], "" if count == len(claims) else f"in {count} of {plural(len(claims), 'seed')}")
        for name, count in sorted(found.items(), key=lambda pair: list(BADGES).index(pair[0]))
    )


def why(claim: ClaimRecord) -> str:
    """The reason for a verdict, for a place where both numbers stand beside it."""
    if claim.proved.delta != claim.delta:
        return said(claim)
    audited = "The audit is above what is claimed in its own federation. Proved: "
    return f"{audited if verdict_of(claim) == BY_AUDIT else ''}{claim.proved.reason}"


def said(claim: ClaimRecord) -> str:
    """The reason for a verdict with both numbers, infinity as a sign."""
    return claim.reason.replace("proved inf ", f"proved {INFINITE} ")


def _claims(analysis: Analysis) -> Mapping[tuple[str, str], list[ClaimRecord]]:
    """The claims of each setting and defense that has a training: one round first, then the whole run."""
    found = {}
    for pair in analysis.pairs:
        trainings = analysis.trainings.get(pair, ())
        if trainings:
            both = [checked(training) for training in trainings]
            found[pair] = [one.one_round for one in both] + [one.whole_run for one in both]
    return found


def tally(analysis: Analysis) -> Counter[str]:
    """How many defenses have which verdict, counted once a setting; the worst over seeds and horizons decides.

    What an audit broke counts as BROKEN.
    """
    worst = [max(claims, key=severity) for claims in _claims(analysis).values()]
    return Counter("BROKEN" if is_broken(claim) else verdict_of(claim) for claim in worst)


def overview(analysis: Analysis) -> str:
    """The tally as a sentence; empty where no training finished."""
    found = tally(analysis)
    empty = found["NOTHING PROMISED"]
    total = found.total() - empty
    if not total:
        return "No defense here promises an epsilon." if empty else ""
    parts = [f"{found[name]} {words[found[name] != 1]}" for name, words in _SAID.items() if found[name]]
    rest = f"; {empty} more {'promises' if empty == 1 else 'promise'} nothing" if empty else ""
    return f"Of {plural(total, 'claim')} {listing(parts)}{rest}."


def broken(analysis: Analysis) -> Broken | None:
    """The broken claims, in the study's order; None where there is none."""
    found = tally(analysis)
    count, total = found["BROKEN"], found.total() - found["NOTHING PROMISED"]
    if not count:
        return None
    sentences = []
    for (setting, defense), claims in _claims(analysis).items():
        mine = [claim for claim in claims if is_broken(claim)]
        if mine:
            place = f" ({analysis.settings[setting]})" if len(analysis.settings) > 1 else ""
            horizons = list(dict.fromkeys(claim.horizon for claim in mine))
            first = f"for {horizons[0]} " if len(horizons) > 1 else ""
            name = analysis.defenses[defense].text
            sentences.append(f"{name}{place}, {listing(horizons)}: {first}{said(mine[0])}")
    heading = f"{count} of {plural(total, 'claim')} {_SAID['BROKEN'][count != 1]}"
    return Broken(heading, tuple(sentences[:MOST_SENTENCES]), max(0, count - MOST_SENTENCES))


def brief(one_round: Sequence[ClaimRecord], whole_run: Sequence[ClaimRecord]) -> tuple[str, str]:
    """One defense's claim in a few short lines for a terminal, and its worst verdict.

    The numbers are of the seed with the worst verdict, for one round; the whole run is named where its verdict differs.
    """
    if not one_round or not whole_run:
        return NO_VALUE, ""
    first, whole = (max(claims, key=lambda c: (severity(c), c.epsilon or 0.0)) for claims in (one_round, whole_run))
    proved = INFINITE if first.proved.epsilon is None else short(first.proved.epsilon)
    if first.epsilon is None:
        lines = [f"{INFINITE}: nothing", "promised"]
    else:
        lines = [f"{short(first.epsilon)} per {first.unit}", f"{first.horizon}, δ {short(first.delta)}"]
        lines.append(f"proved {proved}: {verdict_of(first)}")
    if verdict_of(whole) != verdict_of(first):
        lines.append(f"{whole.horizon}: {verdict_of(whole)}")
    return "\n".join(lines), verdict_of(max(first, whole, key=severity))
