"""Choosing a defense: accuracy, leakage under the best attack, bits, proved epsilon, and dominated defenses."""

from __future__ import annotations

from typing import NamedTuple

from leakgauge.harness.core.result import ClaimRecord
from leakgauge.harness.core.stats import joined
from leakgauge.reports.charts.figures import Chart, Point, by_defense
from leakgauge.reports.sections import Section
from leakgauge.reports.select import Analysis, Group, final_accuracy
from leakgauge.reports.table import Cell, Column, Fields, Table
from leakgauge.reports.text.notation import NO_VALUE, fixed, interval, listing, number, percent, short


class Standing(NamedTuple):
    """One defense in one setting: its accuracy, its leakage under the best attack, its bits and its claim.

    Attributes:
        accuracy: final accuracy, mean over the seeds; low, high: its interval.
        place: position of the group that leaks most between its floor (0) and its ceiling (1); `worst` is this group.
        least, most: ends of the interval of `place`.
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
    worst: Group
    bits: float
    claim: ClaimRecord


class Frontier(NamedTuple):
    """The table of each setting, by its name, and how the goals of the study were solved."""

    tables: tuple[tuple[str, Table], ...]
    goals: tuple[str, ...]


_COLUMNS = (
    *("Defense", Column("Final accuracy", "num"), Column("Leakage", "num"), Column("Best attack", "text")),
    *(Column("Bits per parameter", "num"), Column("ε proved", "num"), Column("Dominated by", "text")),
)


def frontier(analysis: Analysis) -> Frontier | None:
    """The tables of the settings with at least two defenses; None without tables and goals."""
    goals = tuple(analysis.run.study.get("goals", ()))
    tables = []
    for key, name in analysis.settings.items():
        compared = standings(analysis, key)
        if len(compared) > 1:
            rows = tuple(_row(analysis, standing, compared) for standing in compared)
            tables.append((name, Table(f"Defenses compared: {name}", _COLUMNS, rows)))
    return Frontier(tuple(tables), goals) if tables or goals else None


SECTION = Section("frontier", "Choosing a defense", "Choosing", frontier, 50)


def standings(analysis: Analysis, setting: str) -> list[Standing]:
    """The defenses of a setting that have an accuracy, a message and a rated attack, in the study's order."""
    found = []
    for defense in (name for place, name in analysis.pairs if place == setting):
        trainings = analysis.trainings_of(setting, defense)
        accuracy = final_accuracy(trainings)
        groups = [one for one in analysis.attacked if (one.setting, one.defense) == (setting, defense)]
        places = [(max(0.0, at), group) for group in groups if (at := analysis.rating(group).place) is not None]
        bits = [one.bits for one in trainings if one.bits is not None]
        if accuracy is None or accuracy.value is None or not places or not bits:
            continue
        place, worst = max(places, key=lambda pair: pair[0])
        low, high = (accuracy.value if end is None else end for end in (accuracy.low, accuracy.high))
        ends = accuracy.value, low, high, place, *_ends(analysis, worst, place)
        found.append(Standing(defense, *ends, worst, sum(bits) / len(bits), trainings[0].whole_run))
    return found


def _ends(analysis: Analysis, group: Group, place: float) -> tuple[float, float]:
    """The ends of the interval of `place`, not below 0, given floor and ceiling; `place` itself without an interval."""
    ceiling, floor = analysis.ceiling(group), analysis.floor_value(group)
    one = group.estimate
    if group.undefended or one is None or one.low is None or one.high is None or ceiling is None or floor is None:
        return place, place
    width = (ceiling.value or 0.0) - floor
    return max(0.0, (one.low - floor) / width), max(0.0, (one.high - floor) / width)


def dominates(one: Standing, other: Standing) -> bool:
    """Whether `one` is not worse than `other` in accuracy, leakage and bits, and clearly better in one of these.

    Clearly better: the intervals of the accuracies or of the leakages are disjoint, or at least 1 % fewer bits are
    sent.
    """
    if one.accuracy < other.accuracy or one.place > other.place or one.bits > other.bits:
        return False
    return one.low > other.high or one.most < other.least or one.bits < 0.99 * other.bits


def _row(analysis: Analysis, one: Standing, compared: list[Standing]) -> Fields:
    value, estimate, proved = f"{one.worst.metric.words} {fixed(one.worst.value)}", one.worst.estimate, one.claim.proved
    ends = interval(estimate) if estimate is not None else ""
    better = [analysis.defenses[other.defense].text for other in compared if dominates(other, one)]
    bound = Cell(NO_VALUE, below=("nothing is promised",))
    if one.claim.epsilon is not None:
        scope = f"per {proved.unit}, {one.claim.horizon}, δ {short(proved.delta)}"
        bound = Cell(number(proved.epsilon), below=(joined(scope, analysis.unpromised(one.worst)),))
    span = (f"{percent(one.least, 0)} to {percent(one.most, 0)}",) if one.most > one.least else ()
    return (
        analysis.defenses[one.defense].text,
        Cell(percent(one.accuracy), below=(f"{percent(one.low)} to {percent(one.high)}",)),
        Cell(percent(one.place, 0), below=span),
        f"{analysis.attack_text(one.worst)}: {value}{f' ({ends})' if ends else ''}",
        fixed(one.bits, 2),
        bound,
        listing(better) or "– on the frontier",
    )


def frontier_chart(analysis: Analysis, setting: str) -> Chart:
    """Accuracy against leakage: the best defenses are at the top left."""
    points, rows = [], []
    for one in standings(analysis, setting):
        point = Point(100 * one.place, 100 * one.accuracy, 100 * one.low, 100 * one.high)
        points.append((one.worst.case.training.defense.name, point))
        rows.append((analysis.defenses[one.defense].text, percent(one.place, 0), percent(one.accuracy)))
    shown, rest = by_defense(points)
    return Chart(
        name="frontier",
        title="Accuracy against leakage",
        x_label="leakage under the best attack, % of the way from the floor to the ceiling",
        y_label="final accuracy, %",
        series=shown,
        better="The best defenses are at the top left.",
        caption=f"The attack with the highest place between its floor and its ceiling counts. {rest}".strip(),
        header=("Defense", "Leakage", "Final accuracy"),
        rows=tuple(rows),
        joined=False,
    )
