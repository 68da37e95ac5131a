"""Choosing a defense: accuracy, leakage under the best attack, bits, proved epsilon, and dominated defenses."""

from __future__ import annotations

from typing import Any, NamedTuple

from leakgauge.harness.core.rating import Finding, Rating
from leakgauge.harness.core.result import ClaimRecord
from leakgauge.harness.core.stats import joined
from leakgauge.reports.sections import Section
from leakgauge.reports.select import Analysis, final_accuracy
from leakgauge.reports.table import Cell, Column, Fields, Table
from leakgauge.reports.text.notation import NO_VALUE, fixed, listing, number, percent, short


class Standing(NamedTuple):
    """One defense in one setting: its accuracy, its leakage under the best attack, its bits and its claim.

    Attributes:
        accuracy: final accuracy, mean over the seeds; low, high: its interval.
        place: how often the best attack is right beyond chance: 0 by guessing, 1 if always; `worst` is what it found.
        least, most: ends of the interval of `place`, not below 0.
        bits: bits per parameter of a client's message in one round, mean over the seeds.
        claim: claim for the whole run, of the first seed.
    """

    defense: str
    accuracy: float
    low: float
    high: float
    place: float
    least: float
    most: float
    worst: Finding
    rating: Rating
    bits: float
    claim: ClaimRecord


_COLUMNS = (
    *("Defense", Column("Final accuracy", "num"), Column("Leakage", "num"), Column("Best attack", "text")),
    *(Column("Bits per parameter", "num"), Column("ε proved", "num"), Column("Dominated by", "text")),
)


def frontier(analysis: Analysis) -> dict[str, Any] | None:
    """The tables of settings with at least two defenses, and how goals were solved; None without both."""
    goals, tables = tuple(analysis.run.study.get("goals", ())), _tables(analysis)
    return {"tables": tables, "goals": goals} if tables or goals else None


def _tables(analysis: Analysis) -> list[Table]:
    tables = list[Table]()
    for key, name in analysis.settings.items():
        if len(compared := standings(analysis, key)) > 1:
            rows = tuple(_row(analysis, one, compared) for one in compared)
            tables.append(Table(f"Defenses compared: {name}", _COLUMNS, rows))
    return tables


SECTION = Section("frontier", "Choosing a defense", "Choosing", frontier, 50, tables=_tables)


def standings(analysis: Analysis, setting: str) -> list[Standing]:
    """The defenses of a setting that have an accuracy, a message and an attack with a chance, first no defense."""
    rated = []
    for defense in analysis.defenses_of(setting):
        trainings = analysis.trainings_of(setting, defense)
        accuracy = final_accuracy(trainings)
        rating = analysis.overall(setting, defense)
        bits = [training.bits for training in trainings if training.bits is not None]
        worst = None if rating is None else rating.people or next(iter(rating.findings), None)
        if accuracy is None or accuracy.value is None or rating is None or worst is None or not bits:
            continue
        low, high = (accuracy.value if end is None else end for end in (accuracy.low, accuracy.high))
        place, least, most = (worst.beyond_chance(v) for v in (worst.value, worst.low, worst.high))
        ends = accuracy.value, low, high, place, least, most
        rated.append(Standing(defense, *ends, worst, rating, sum(bits) / len(bits), trainings[0].whole_run))
    return rated


def dominates(one: Standing, other: Standing) -> bool:
    """Whether `one` is not worse than `other` in accuracy, leakage and bits, and clearly better in one of these.

    Clearly better: the intervals of the accuracies or of the leakages are disjoint, or at least 1 % fewer bits are
    sent.
    """
    if one.accuracy < other.accuracy or one.place > other.place or one.bits > other.bits:
        return False
    return one.low > other.high or one.most < other.least or one.bits < 0.99 * other.bits


def _row(analysis: Analysis, standing: Standing, compared: list[Standing]) -> Fields:
    proved = standing.claim.proved
    better = [analysis.defenses[other.defense].text for other in compared if dominates(other, standing)]
    bound = Cell(NO_VALUE, below=("nothing is promised",))
    if standing.claim.epsilon is not None:
        scope = f"per {proved.unit}, {standing.claim.horizon}, δ {short(proved.delta)}"
        bound = Cell(number(proved.epsilon), below=(joined(scope, "not promised" if standing.rating.excluded else ""),))
    span = (f"{percent(standing.least, 0)} to {percent(standing.most, 0)}",) if standing.most > standing.least else ()
    return (
        analysis.defenses[standing.defense].text,
        Cell(percent(standing.accuracy), below=(f"{percent(standing.low)} to {percent(standing.high)}",)),
        Cell(percent(standing.place, 0), below=span),
        standing.worst.text,
        fixed(standing.bits, 2),
        bound,
        listing(better) or "– on the frontier",
    )
