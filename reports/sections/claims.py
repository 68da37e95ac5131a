"""Claimed, proved and audited epsilon of each defense, for one round and for the whole run, with the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import ARITHMETIC, counted, odds
from leakgauge.harness.core.result import ClaimRecord, ProofRecord, TrainingRecord, chance
from leakgauge.reports.sections import Section
from leakgauge.reports.sections import checked as judged
from leakgauge.reports.select import Analysis
from leakgauge.reports.table import Cell, Column, Fields, Table
from leakgauge.reports.text.notation import adversaries, bound, epsilon, grouped, listing, number, per, short


class Line(NamedTuple):
    """One horizon of one defense, or both horizons if all their texts agree; `unkept` marks a broken assumption.

    marks: claimed, proved and audited epsilon, of the seed where it is largest; None: none.
    """

    horizon: str
    claimed: judged.Amount
    proved: judged.Amount
    states: tuple[judged.State, ...]
    reason: str
    codes: tuple[judged.State, ...] = ()
    audited: judged.Amount | None = None
    unkept: tuple[judged.State, ...] = ()
    unit: str = ""
    marks: tuple[float | None, float | None, float | None] = (None, None, None)

    @property
    def tone(self) -> str:
        """The color of the proved epsilon: that of the worst verdict."""
        return self.states[0].badge.tone


def _distinct(texts: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(texts))


def _claimed(claims: Sequence[ClaimRecord], digits: int) -> judged.Amount:
    if any(claim.epsilon is None for claim in claims):
        return judged.Amount(epsilon(claims), f"per {_distinct(claim.unit for claim in claims)}, any δ < 1", False, ())
    right = _distinct(_odds(claim.epsilon, claim.delta) for claim in claims)
    scope = _distinct(per(claim.unit, claim.delta) for claim in claims)
    return judged.Amount(epsilon(claims, digits), scope, True, (right,))


def _attained(proof: ProofRecord) -> str:
    if proof.epsilon is None:
        return "no finite bound" if proof.tight else "no finite bound is known"
    return "attained" if proof.tight else "upper bound"


def _proved(claims: Sequence[ClaimRecord], digits: int) -> judged.Amount:
    proofs = [claim.proved for claim in claims]
    others = [f"against {adversaries(c.proved.against)}" for c in claims if set(c.proved.against) != set(c.against)]
    methods = _distinct(f"{proof.method}, {_attained(proof)}" for proof in proofs)
    finite = all(proof.epsilon is not None for proof in proofs)
    scope = _distinct(per(proof.unit, proof.delta) for proof in proofs)
    right = _distinct(_odds(proof.epsilon, proof.delta) for proof in proofs) if finite else ""
    lower = [f"attained {number(c.attained.epsilon)}, {c.attained.method}" for c in claims if c.attained is not None]
    notes = right, methods, _distinct(others), _distinct(lower)
    return judged.Amount(bound(proofs, digits), scope, finite, tuple(filter(None, notes)))


def _odds(value: float | None, delta: float) -> str:
    """The probability with which this epsilon lets an adversary be right about one bit, in words."""
    return f"adversary {odds(chance(math.inf if value is None else value, delta))}"


def _line(claims: Sequence[ClaimRecord], trainings: Sequence[TrainingRecord]) -> Line:
    code, mark = judged.codes(trainings), judged.unkept(claims, trainings)
    first, *others = dict.fromkeys(judged.why(claim) for claim in sorted(claims, key=judged.severity, reverse=True))
    more = f" ({counted(len(others), 'other reason')} in other seeds)" if others else ""
    close = epsilon(claims) == bound([claim.proved for claim in claims])
    # enough digits to separate the two epsilons if the verdict depends on their difference
    apart = any(judged.is_broken(claim) or judged.verdict_of(claim) == "UNPROVED" for claim in claims)
    digits = 7 if close and apart else 4
    verdicts = judged.states(claims)
    if mark or any(state.badge.tone != "good" for state in code):
        # a claim is green only if its code is CONSISTENT with the proof and the proof covers the run
        weaker = {badge: badge._replace(tone="info") for badge in judged.BADGES.values() if badge.tone == "good"}
        verdicts = tuple(state._replace(badge=weaker.get(state.badge, state.badge)) for state in verdicts)
    amounts = _claimed(claims, digits), _proved(claims, digits)
    unit = _distinct(claim.unit for claim in claims)
    marks = _largest([c.epsilon for c in claims], None), _largest([c.proved.epsilon for c in claims], math.inf), None
    return Line(claims[0].horizon, *amounts, verdicts, first + more, code, None, mark, unit, marks)


def _largest(epsilons: Sequence[float | None], unknown: float | None) -> float | None:
    known = [epsilon for epsilon in epsilons if epsilon is not None]
    return max(known) if len(known) == len(epsilons) else unknown


def place(epsilon: float) -> float:
    """Where an epsilon lies on the chart, in percent of its width: a log scale from 0.1 to 10^5, then infinity."""
    return 95.0 if math.isinf(epsilon) else 2 + 14.5 * (math.log10(min(max(epsilon, 0.1), 1e5)) + 1)


def _further(claims: Sequence[ClaimRecord]) -> tuple[tuple[str, str, str], ...]:
    """Epsilon, scope and reason of other proofs: seeds are merged, horizons if all else agrees; units, deltas and
    adversaries are never merged.
    """
    every = [(claim.horizon, proof) for claim in claims for proof in claim.further]
    proofs = gathered(((at, p.unit, p.delta, p.against, p.method, p.tight, p.relation), p) for at, p in every)
    horizons: dict[tuple[str, str, str, str], list[str]] = {}
    for (horizon, *_), merged in proofs.items():
        first = merged[0]
        against = f", against {adversaries(first.against)}" if first.against else ""
        neighbors = f", {first.relation}" if first.relation else ""
        scope, how = per(first.unit, first.delta) + neighbors + against, f"{first.method}, {_attained(first)}"
        horizons.setdefault((bound(merged), scope, how, first.reason), []).append(horizon)
    return tuple(
        (value, f"{scope}, {listing(spans)} ({how})", reason) for (value, scope, how, reason), spans in horizons.items()
    )


def _lines(trainings: Sequence[TrainingRecord]) -> tuple[Line, ...]:
    """Lines for one round and the whole run; a single line if all their texts agree, as in a run of one round.

    A bound is in the line with the claim and proof of its own federation; if no line has these, in one of its own.
    """
    if not trainings:
        return ()
    both = list(zip(*map(judged.checked, trainings), strict=True))
    one_round, whole = (_line(claims, trainings) for claims in both)
    lines, more = [one_round, whole], list[Line]()
    if one_round._replace(horizon="") == whole._replace(horizon=""):
        lines = [one_round._replace(horizon=listing(dict.fromkeys((one_round.horizon, whole.horizon))))]
    for audits in judged.alike(trainings):
        first, amount = audits[0], judged.measured(audits, len(trainings))
        at = first.horizon == whole.horizon
        row = _line(
            [judged.audited_claim(both[at][0], a) for a in audits], [t for t in trainings if t.audited in audits]
        )
        named = [names for claim in both[at] for names in (claim.against, claim.proved.against) if names]
        shown = max(audit.epsilon_lower for audit in audits)
        fits = row[:3] == (one_round, whole)[at][:3] and all(first.threat in names for names in named)
        if fits and lines[at % len(lines)].audited is None:
            line = lines[at % len(lines)]
            lines[at % len(lines)] = line._replace(audited=amount, marks=(*line.marks[:2], shown))
        else:
            marks = (*row.marks[:2], shown)
            more.append(row._replace(horizon=f"{first.horizon}, audit", audited=amount, unkept=(), marks=marks))
    return (*lines, *more)


def _both(texts: Iterable[tuple[str, str]]) -> str:
    distinct = dict.fromkeys(texts)
    if len({text for _, text in distinct}) <= 1:
        return next((text for _, text in distinct), "")
    return "; ".join(f"{horizon}: {text}" for horizon, text in distinct)


def _basis(claims: Sequence[ClaimRecord]) -> str:
    finite = [claim for claim in claims if claim.epsilon is not None]
    parts = {
        "Claimed in": _both((claim.horizon, claim.source) for claim in finite),
        "Neighbors:": _both((claim.horizon, claim.relation) for claim in finite),
        "Against": _both((claim.horizon, adversaries(claim.against)) for claim in finite),
        "Numbers:": _both(
            (claim.horizon, f"{claim.arithmetic}, {ARITHMETIC.get(claim.arithmetic, 'unknown')}") for claim in finite
        ),
    }
    return " ".join(f"{name} {text}." for name, text in parts.items() if text)


def _with_count(assumption: str, trainings: Sequence[TrainingRecord]) -> str:
    violations = [one for training in trainings for one in training.violations if one.assumption == assumption]
    if not violations:
        return assumption
    broken, of = (sum(counts) for counts in zip(*((one.broken, one.of) for one in violations), strict=True))
    what = violations[0].what
    runs = "this run" if len(violations) == 1 else f"these {len(violations)} runs"
    if not broken:
        return f"{assumption}: holds for {f'all {counted(of, what)}' if of > 1 else f'the only {what}'} of {runs}"
    share = f"{grouped(broken)} of {counted(of, what)} of {runs} ({short(100 * broken / of, 3)} %)"
    rest = "" if any(violation.voids for violation in violations) else "; the proof still holds"
    return f"{assumption}: broken by {share}{rest}"


def _of_clients(trainings: Sequence[TrainingRecord]) -> tuple[Fields, ...]:
    """Horizon, parameters, clients, unit, claimed and proved epsilon, and verdict of each group of clients."""
    rows = [
        (
            claim.horizon,
            group.label,
            ", ".join(map(str, group.clients)),
            claim.unit,
            number(group.epsilon),
            number(group.proved.epsilon),
            group.verdict,
        )
        for training in trainings
        for claim in (training.one_round, training.whole_run)
        for group in claim.groups
    ]
    return tuple(dict.fromkeys(rows))


def claims(analysis: Analysis) -> dict[str, Any]:
    """One row per defense and setting, in the study's order; `units` are those of the finite claims.

    A row has the basis of the claim (source, neighbors, adversaries), the assumptions, each with its count in the run
    if messages can break it, and the number of those that a proof needs and the run broke.
    """
    rows, units = [], []
    for setting, defense in analysis.pairs:
        trainings = analysis.trainings_of(setting, defense)
        both = [t.one_round for t in trainings] + [t.whole_run for t in trainings]
        texts, lines = dict.fromkeys(text for claim in both for text in claim.assumes).keys(), _lines(trainings)
        broken = {violation.assumption for t in trainings for violation in t.violations if violation.voids}
        units += [claim.unit for claim in both if claim.epsilon is not None]
        rows.append(
            {
                "defense": analysis.defenses[defense],
                "setting": analysis.settings[setting],
                "lines": lines,
                "clients": _of_clients(trainings),
                "further": _further(both),
                "basis": _basis(both),
                "numbers": _distinct(claim.arithmetic for claim in both if claim.epsilon is not None),
                "assumes": tuple(_with_count(text, trainings) for text in texts),
                "audits": tuple(text for audits in judged.alike(trainings) for text in judged.described(audits)),
                "broken": len(texts & broken) if any(line.unkept for line in lines) else 0,
            }
        )
    return {
        "rows": rows,
        "several_settings": len(analysis.settings) > 1,
        "units": list(dict.fromkeys(units)),
        "overview": judged.overview(analysis),
        "audited": any(row["audits"] for row in rows),
        "place": place,
        "ticks": [(place(10.0**power), f"{10.0**power:,g}") for power in range(-1, 6)] + [(place(math.inf), "∞")],
    }


def table(analysis: Analysis) -> list[Table]:
    """The claims as a table: one row per line of the chart."""
    rows = list[Fields]()
    for row in claims(analysis)["rows"]:
        for line in row["lines"]:
            amounts = (Cell(*(one[:2] if one else ("",))) for one in (line.claimed, line.proved, line.audited))
            states = (state.badge.words for state in line.states + line.unkept + line.codes if state.badge.words)
            where = row["defense"].text, row["setting"], line.horizon, line.unit, row["numbers"]
            rows.append((*where, *amounts, "; ".join(states)))
    epsilons = tuple(Column(f"ε {name}", "num") for name in ("claimed", "proved", "audited"))
    heads: tuple[Column | str, ...] = ("Defense", "Setting", "Horizon", "Unit", "Numbers", *epsilons, "Verdict")
    each = [
        (row["defense"].text, row["setting"], *clients)
        for row in claims(analysis)["rows"]
        for clients in row["clients"]
    ]
    columns = *heads[:3], "Parameters", "Clients", "Unit", *epsilons[:2], "Verdict"
    tables = ("Claimed, proved and audited epsilon", heads, rows), ("Epsilon of each client", columns, each)
    return [Table(title, names, tuple(lines)) for title, names, lines in tables if lines]


SECTION = Section("claims", "Claimed and proved epsilon", "Claims", claims, 20, tables=table)
