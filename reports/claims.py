"""What each defence claims: epsilon of one round and of the whole run, with all that an epsilon needs to be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.result import ClaimRecord
from reports.labels import Label
from reports.notation import NO_VALUE, adversaries, epsilon, listing, scope, short
from reports.select import Analysis


class Promise(NamedTuple):
    """One claim: the epsilon, and unit, horizon and delta in words. `sort` orders it, infinity last."""

    epsilon: str
    scope: str
    finite: bool


class ClaimRow(NamedTuple):
    """One defence in one setting."""

    defense: Label
    setting: str
    one_round: Promise
    whole_run: Promise
    relation: str
    against: str
    source: str
    assumes: tuple[str, ...]
    reason: str


class Claims(NamedTuple):
    """The table; settings are named only where there are several."""

    rows: tuple[ClaimRow, ...]
    several_settings: bool
    units: tuple[str, ...]


def _promise(claims: Sequence[ClaimRecord]) -> Promise:
    """The claim of one horizon over the seeds."""
    if not claims:
        return Promise(NO_VALUE, "no training finished", False)
    finite = all(claim.epsilon is not None for claim in claims)
    if not finite:
        return Promise(epsilon(claims), f"per {claims[0].unit}, {claims[0].horizon}, any δ < 1", False)
    return Promise(epsilon(claims), " / ".join(dict.fromkeys(scope(claim) for claim in claims)), True)


def _both(first: Sequence[str], second: Sequence[str]) -> str:
    """One text where one round and the whole run agree, else both."""
    mine, theirs = listing(dict.fromkeys(first)), listing(dict.fromkeys(second))
    return mine if mine == theirs else f"one round: {mine}; whole run: {theirs}"


def claims(analysis: Analysis) -> Claims:
    """One row a defence and setting, in the study's order."""
    rows = []
    for setting, defense in analysis.pairs:
        trainings = analysis.trainings.get((setting, defense), ())
        one, whole = [t.one_round for t in trainings], [t.whole_run for t in trainings]
        both = one + whole
        rows.append(
            ClaimRow(
                defense=analysis.defenses[defense],
                setting=analysis.settings[setting],
                one_round=_promise(one),
                whole_run=_promise(whole),
                relation=_both([c.relation for c in one], [c.relation for c in whole]) or NO_VALUE,
                against=_both([adversaries(c.against) for c in one], [adversaries(c.against) for c in whole])
                or NO_VALUE,
                source=_both([c.source for c in one], [c.source for c in whole]),
                assumes=tuple(dict.fromkeys(text for claim in both for text in claim.assumes)),
                reason=_both([c.reason for c in one], [c.reason for c in whole]),
            )
        )
    units = dict.fromkeys(
        claim.unit
        for trainings in analysis.trainings.values()
        for training in trainings
        for claim in (training.one_round, training.whole_run)
        if claim.epsilon is not None
    )
    return Claims(tuple(rows), len(analysis.settings) > 1, tuple(units))


def brief(claims_of_seeds: Sequence[ClaimRecord]) -> str:
    """One defence's claim on two lines, for a terminal; the largest epsilon of the seeds."""
    if not claims_of_seeds:
        return NO_VALUE
    first = claims_of_seeds[0]
    if any(claim.epsilon is None for claim in claims_of_seeds):
        return "∞: nothing\npromised"
    high = max(claim.epsilon or 0.0 for claim in claims_of_seeds)
    return f"{short(high)} per {first.unit}\n{first.horizon}, δ {short(first.delta)}"
