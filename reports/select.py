"""What a page needs from a run: cells grouped over seeds, with their floor, their ceiling and a word between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from leakgauge.harness.core import stats
from leakgauge.harness.core.cell import Cell, PartSpec, Target
from leakgauge.harness.core.result import Estimate, Failure, Flag, PartInfo, Result, Run, TrainingRecord
from leakgauge.reports.pool import pool
from leakgauge.reports.text.labels import UNDEFENDED, Label, label_parts, label_settings, setting_key
from leakgauge.reports.text.notation import fixed, metric, where

RECOGNIZABLE = 0.5
"""SSIM from which a reconstruction counts as recognizable."""

HIGH, LOW = 0.5, 0.1
"""Shares of the way from the floor to the ceiling: High from the first, Low below the second."""

HEADLINE = {"reconstruction": "ssim", "labels": "label_accuracy", "membership": "auc"}
CHANCE = {"auc": 0.5}
"""What blind guessing scores: the floor where no control was run."""

Word = Literal["High", "Moderate", "Low", "not rated"]


class Rating(NamedTuple):
    """How much leaks, between the floor and the ceiling. `place` is 0 at the floor and 1 at the ceiling."""

    word: Word
    place: float | None
    why: str


class Recognized(NamedTuple):
    """How many of how many images reach `RECOGNIZABLE`."""

    hits: int
    of: int


@dataclass(frozen=True)
class Column:
    """One attack by one adversary on one target."""

    attack: PartSpec
    target: Target
    threat: str

    @property
    def key(self) -> tuple[str, str, Target]:
        """What tells columns apart."""
        return self.attack.label, self.threat, self.target


@dataclass(frozen=True)
class Group:
    """The cells that differ only in their seed; `estimate` is the headline metric over these."""

    setting: str
    defense: PartSpec
    column: Column
    info: PartInfo
    kind: str
    cells: tuple[Cell, ...]
    results: tuple[Result, ...]
    failures: tuple[Failure, ...]
    estimate: Estimate | None

    @property
    def value(self) -> float | None:
        """The headline number, None where there is none."""
        return None if self.estimate is None else self.estimate.value

    @property
    def metric(self) -> str:
        """Name of the headline metric."""
        return HEADLINE.get(self.kind, "") if self.estimate is None else self.estimate.name

    @property
    def undefended(self) -> bool:
        """Whether this is a ceiling."""
        return self.defense.name == UNDEFENDED

    @property
    def missing(self) -> int:
        """Cells that neither finished nor failed."""
        return len(self.cells) - len(self.results) - len(self.failures)

    @property
    def recognized(self) -> Recognized | None:
        """Recognizable images among those attacked; a failed one is not recognizable. None: no image was attacked."""
        if self.estimate is None or self.estimate.name != "ssim" or not self.estimate.values:
            return None
        return Recognized(sum(is_recognizable(value) for value in self.estimate.values), len(self.estimate.values))


def is_recognizable(ssim: float | None) -> bool:
    """Whether a reconstruction with this SSIM counts as recognizable."""
    return ssim is not None and ssim >= RECOGNIZABLE


def _kind(run: Run, cell: Cell) -> str:
    """`reconstruction` or `membership`; by the target where the attack does not say."""
    info = run.attacks.get(cell.attack.label)
    return (info.kind if info else "") or ("membership" if cell.target.kind == "members" else "reconstruction")


def _headline(kind: str, results: Sequence[Result]) -> Estimate | None:
    """The kind's metric pooled over the seeds; without it the first metric of which more means more leakage."""
    name = HEADLINE.get(kind)
    pools = [[e for e in result.estimates if e.name == name] for result in results]
    if not any(pools):
        pools = [[e for e in result.estimates if e.higher_leaks][:1] for result in results]
    found = [estimates[0] for estimates in pools if estimates]
    found = [estimate for estimate in found if estimate.name == found[0].name]
    return pool(found) if found else None


def surely_less(one: Group, other: Group) -> bool:
    """Whether a group's values, paired with another's, are lower on average with the whole of the interval."""
    if one.estimate is None or other.estimate is None or one.metric != other.metric:
        return False
    pairs = zip(one.estimate.values, other.estimate.values, strict=False)
    gaps = [b - a for a, b in pairs if a is not None and b is not None]
    low = stats.mean_interval(gaps).low
    return low is not None and low > 0


class Analysis:
    """A run, grouped. Everything is derived once and kept."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def settings(self) -> dict[str, str]:
        """Name of each setting by its key, in the study's order."""
        return label_settings(self.run.cells)

    @cached_property
    def defenses(self) -> dict[str, Label]:
        """Label of each defense by `PartSpec.label`, in the study's order."""
        return label_parts(cell.training.defense for cell in self.run.cells)

    @cached_property
    def attacks(self) -> dict[str, Label]:
        """Label of each attack by `PartSpec.label`, in the study's order."""
        return label_parts(cell.attack for cell in self.run.cells)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """All cells, grouped over the seeds, in the study's order."""
        members: dict[tuple[str, str, str, str, Target], list[Cell]] = {}
        for cell in self.run.cells:
            training = cell.training
            place = setting_key(training.task, training.federation), training.defense.label
            members.setdefault((*place, cell.attack.label, cell.threat, cell.target), []).append(cell)
        return tuple(self._group(key[0], cells) for key, cells in members.items())

    def _group(self, setting: str, cells: Sequence[Cell]) -> Group:
        """One group."""
        run, first = self.run, cells[0]
        results = tuple(run.results[cell.id] for cell in cells if cell.id in run.results)
        kind = _kind(run, first)
        return Group(
            setting=setting,
            defense=first.training.defense,
            column=Column(first.attack, first.target, first.threat),
            info=run.attacks.get(first.attack.label, PartInfo(first.attack.name, "")),
            kind=kind,
            cells=tuple(cells),
            results=results,
            failures=tuple(run.failures[cell.id] for cell in cells if cell.id in run.failures),
            estimate=_headline(kind, results),
        )

    @cached_property
    def attacked(self) -> tuple[Group, ...]:
        """The groups without the controls."""
        return tuple(group for group in self.groups if not group.info.floor)

    @cached_property
    def _ceilings(self) -> dict[tuple[str, tuple[str, str, Target]], Group]:
        """The undefended group of each setting and column."""
        return {(group.setting, group.column.key): group for group in self.groups if group.undefended}

    @cached_property
    def _floors(self) -> dict[tuple[str, str, Target], Group]:
        """The best control of each setting, kind and target; the undefended ones where there are some."""
        best: dict[tuple[str, str, Target], Group] = {}
        controls = [group for group in self.groups if group.info.floor and group.value is not None]
        for group in sorted(controls, key=lambda g: (not g.undefended, -(g.value or 0.0))):
            best.setdefault((group.setting, group.kind, group.column.target), group)
        return best

    def ceiling(self, group: Group) -> Group | None:
        """The same attack, adversary and target without a defense."""
        return self._ceilings.get((group.setting, group.column.key))

    def floor(self, group: Group) -> Group | None:
        """The best guess on the same target that looks at nothing protected."""
        return self._floors.get((group.setting, group.kind, group.column.target))

    def floor_value(self, group: Group) -> float | None:
        """The floor's number; chance where no control was run and chance is known."""
        found = self.floor(group)
        return found.value if found is not None else CHANCE.get(group.metric)

    def beats_floor(self, ceiling: Group, floor: float) -> bool:
        """Whether the attack on no defense is above the floor with the whole of its interval."""
        estimate = ceiling.estimate
        if estimate is None or estimate.value is None:
            return False
        return (estimate.value if estimate.low is None else estimate.low) > floor

    def rating(self, group: Group) -> Rating:
        """The word for a group, and where it stands between floor and ceiling."""
        ceiling, floor = self.ceiling(group), self.floor_value(group)
        if group.value is None:
            return Rating("not rated", None, "no value")
        if floor is None:
            return Rating("not rated", None, "no floor was measured")
        if ceiling is None or ceiling.value is None:
            return Rating("not rated", None, "no ceiling was measured")
        if not self.beats_floor(ceiling, floor):
            return Rating("not rated", None, "the attack does not beat the floor without a defense")
        place = (group.value - floor) / (ceiling.value - floor)
        found, blind = group.recognized, self.floor(group)
        guessed = blind.recognized if blind is not None else None
        if place >= HIGH or (found and guessed and found.hits * guessed.of > guessed.hits * found.of):
            return Rating("High", place, "")
        return Rating("Moderate" if place >= LOW else "Low", place, "")

    def says_nothing(self, setting: str, column: Column) -> bool:
        """Whether a column's attack was measured without a defense and does not beat the floor there."""
        ceiling = self._ceilings.get((setting, column.key))
        if ceiling is None or ceiling.value is None:
            return False
        floor = self.floor_value(ceiling)
        return floor is not None and not self.beats_floor(ceiling, floor)

    def best(self, groups: Sequence[Group]) -> Group | None:
        """The group that leaks most; the first of equals."""
        known = [group for group in groups if group.value is not None]
        return max(known, key=lambda group: group.value or 0.0) if known else None

    def defended(self, kind: str) -> tuple[Group, ...]:
        """The attacked groups of one kind with a defense."""
        return tuple(group for group in self.attacked if group.kind == kind and not group.undefended)

    @cached_property
    def trainings(self) -> dict[tuple[str, str], tuple[TrainingRecord, ...]]:
        """Finished trainings over the seeds, by setting and defense."""
        found: dict[tuple[str, str], list[TrainingRecord]] = {}
        for record in self.run.trainings.values():
            spec = record.spec
            key = setting_key(spec.task, spec.federation), spec.defense.label
            found.setdefault(key, []).append(record)
        return {key: tuple(sorted(records, key=lambda r: r.spec.seed)) for key, records in found.items()}

    def of(self, group: Group) -> tuple[TrainingRecord, ...]:
        """The trainings behind a group."""
        return self.trainings.get((group.setting, group.defense.label), ())

    @cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(setting, defense) in the study's order."""
        return tuple(dict.fromkeys((group.setting, group.defense.label) for group in self.groups))

    @cached_property
    def outdone(self) -> dict[str, Flag]:
        """By cell: where the best attack that knows a defense gets less than one that ignores it, beyond noise.

        Compared image by image, on the same target, by the same adversary, and where the naive attack is above the
        floor: below it both have nothing. Such an aware attack is not the strongest, and its number is not what leaks.
        """
        places: dict[tuple[str, str, str, str, Target], list[Group]] = {}
        for group in self.attacked:
            if group.value is not None and not group.undefended:
                column = group.column
                key = (group.setting, group.defense.label, group.kind, column.threat, column.target)
                places.setdefault(key, []).append(group)
        found: dict[str, Flag] = {}
        for groups in places.values():
            aware = self.best([group for group in groups if group.info.aware])
            naive = self.best([group for group in groups if not group.info.aware])
            if aware is not None and naive is not None and self._above_floor(naive) and surely_less(aware, naive):
                name = self.attacks[naive.column.attack.label].text
                values = f"{metric(naive.metric)} {fixed(naive.value)}, here {fixed(aware.value)}"
                text = f"{name} ignores the defense and gets more: {values}"
                found |= {cell.id: Flag("naive-beats-aware", text) for cell in aware.cells}
        return found

    def _above_floor(self, group: Group) -> bool:
        """Whether a group's value is above its floor, as far as one was measured."""
        floor = self.floor_value(group)
        return floor is None or (group.value or 0.0) > floor

    def flags_of(self, cell: Cell) -> tuple[Flag, ...]:
        """The flags of a cell and of its training, warnings first."""
        result, training = self.run.results.get(cell.id), self.run.trainings.get(cell.training.id)
        found = (result.flags if result is not None else ()) + (training.flags if training is not None else ())
        if cell.id in self.outdone:
            found += (self.outdone[cell.id],)
        return tuple(sorted(dict.fromkeys(found), key=lambda flag: flag.severity != "warning"))

    def column_text(self, column: Column) -> str:
        """A column in one line."""
        return f"{self.attacks[column.attack.label].text}, {column.threat}, {where(column.target)}"
