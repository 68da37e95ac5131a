"""The data behind every page and table: cases with their setting, floor, ceiling and rating."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from leakgauge.harness.core.cases import Case, gathered
from leakgauge.harness.core.cell import Cell, Target
from leakgauge.harness.core.labels import (
    UNDEFENDED,
    label_parts,
    label_settings,
    server_text,
    setting_key,
    unpromised,
    where,
)
from leakgauge.harness.core.metrics import headline, metric
from leakgauge.harness.core.rating import Finding, Rating, Ratings, Word
from leakgauge.harness.core.result import Estimate, Flag, Result, Run, TrainingRecord
from leakgauge.harness.core.stats import clopper_pearson, cut, mean_interval, pool
from leakgauge.reports.text.notation import fixed, listing

if TYPE_CHECKING:
    from leakgauge.reports.sections.changes import Against

Images = Literal["public", "redact", "none"]


class Group:
    """A case with its place on the page.

    Attributes:
        case: the cells that differ only in their seed, with their results.
        setting, defense: the keys in `Analysis.settings` and `Analysis.defenses`.
        column: attack, adversary and target: the groups of one column differ in their defense.
        undefended: whether the group has no defense, so that it is a ceiling.
        estimate, metric, value: the headline metric, pooled over the seeds (None if no result has one), and its value.
    """

    def __init__(self, case: Case) -> None:
        spec, self.case, self.estimate = case.training, case, case.pooled
        self.setting, self.defense = setting_key(spec.task, spec.federation), spec.defense.key
        self.column = case.attack.key, case.threat, case.target
        self.undefended = spec.defense.name == UNDEFENDED
        self.value = None if self.estimate is None else self.estimate.value
        self.metric = metric(headline(case.kind) if self.estimate is None else self.estimate.name)

    def pooled(self, name: str) -> Estimate | None:
        """The estimate of another metric, pooled over the seeds; None if no result has it."""
        estimates = [estimate for estimate in self.case.estimates(name) if estimate.value is not None]
        return pool(estimates) if estimates else None


def recognizable(result: Result) -> tuple[bool, ...]:
    """Whether each image of a result is recognizable; empty without images."""
    flags = next((estimate.values for estimate in result.estimates if estimate.name == "recognized"), ())
    return tuple(value == 1 for value in flags)


def final_accuracy(trainings: Sequence[TrainingRecord]) -> Estimate | None:
    """Final test accuracy; interval by Student's t over seeds, or Clopper-Pearson over the test set for one seed."""
    known = [value for training in trainings if (value := training.accuracy) is not None]
    return accuracy_of(known, trainings[0].test_samples) if known else None


def accuracy_of(values: Sequence[float], n: int) -> Estimate:
    """The mean of a round's accuracies on n test samples; interval by Student's t, or Clopper-Pearson for one seed."""
    if len(values) == 1 and n:
        ends, method = clopper_pearson(round(values[0] * n), n), f"Clopper-Pearson over {n} test images"
    else:
        ends, method = mean_interval(values), f"Student t over {len(values)} seeds" if len(values) > 1 else ""
    return cut(Estimate("accuracy", float(np.mean(values)), *ends, len(values), method))


def surely_less(one: Group, other: Group) -> bool:
    """Whether the values of `one` are below the paired values of `other` on average, by the 95 % interval."""
    if one.estimate is None or other.estimate is None or one.metric != other.metric:
        return False
    pairs = zip(one.estimate.values, other.estimate.values, strict=False)
    low = mean_interval([b - a for a, b in pairs if a is not None and b is not None]).low
    return low is not None and low > 0


def best(groups: Sequence[Group]) -> Group | None:
    """The group with the highest value; the first one if several are equal."""
    known = [group for group in groups if group.value is not None]
    return max(known, key=lambda group: group.value or 0.0, default=None)


class Analysis:
    """The groups of a run, and what its report shall show. Each part is in the study's order, and computed once.

    Attributes:
        images: `public` shows pictures of the data sets in `run.public_data` and withholds the others, with the reason;
            `redact` withholds all pictures and keeps their numbers; `none` leaves them out.
        against: a finished comparison for the section on changes; None: the report has no such section.
        settings: the name of each setting by its key.
        defenses, attacks: the label of each defense and attack by `PartSpec.key`.
    """

    def __init__(self, run: Run, *, images: Images = "public", against: Against | None = None) -> None:
        self.run, self.images, self.against = run, images, against
        self.settings = label_settings(run.cells)
        self.defenses = label_parts(cell.training.defense for cell in run.cells)
        self.attacks = label_parts(cell.attack for cell in run.cells)

    @cached_property
    def ratings(self) -> Ratings:
        """The ratings of the run: how much leaks, in people."""
        return Ratings(self.run)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """All groups."""
        return tuple(map(Group, self.ratings.cases))

    @cached_property
    def attacked(self) -> tuple[Group, ...]:
        """The groups without the floors."""
        return tuple(group for group in self.groups if not group.case.info.floor)

    @cached_property
    def defended(self) -> tuple[Group, ...]:
        """The attacked groups with a defense."""
        return tuple(group for group in self.attacked if not group.undefended)

    @property
    def judged(self) -> tuple[Group, ...]:
        """The groups that the headline is about: the defended ones; without any, all attacked groups."""
        return self.defended or self.attacked

    @cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(setting, defense)."""
        return tuple(dict.fromkeys((group.setting, group.defense) for group in self.groups))

    def defenses_of(self, setting: str) -> list[str]:
        """The keys of the defenses in a setting, first that of no defense."""
        return sorted((name for place, name in self.pairs if place == setting), key=lambda name: name != UNDEFENDED)

    @cached_property
    def _ceilings(self) -> dict[tuple[str, tuple[str, str, Target]], Group]:
        return {(group.setting, group.column): group for group in self.groups if group.undefended}

    @cached_property
    def _floors(self) -> dict[tuple[str, str, Target], Group]:
        """The best floor of each setting, kind and target; an undefended floor if there is one."""
        floors: dict[tuple[str, str, Target], Group] = {}
        controls = [group for group in self.groups if group.case.info.floor and group.value is not None]
        for group in sorted(controls, key=lambda g: (not g.undefended, -(g.value or 0.0))):
            floors.setdefault((group.setting, group.case.kind, group.case.target), group)
        return floors

    def ceiling(self, group: Group) -> Group | None:
        """The same attack, adversary and target without a defense."""
        return self._ceilings.get((group.setting, group.column))

    def floor(self, group: Group) -> Group | None:
        """The best guess on the same target without protected data."""
        return self._floors.get((group.setting, group.case.kind, group.case.target))

    def floor_value(self, group: Group) -> float | None:
        """Value of the floor; without a floor, the chance level if it is known."""
        if (floor := self.floor(group)) is not None:
            return floor.value
        chance = None if group.estimate is None else group.estimate.chance  # of the lineups or clients as they were
        return group.metric.chance if chance is None else chance

    def rating(self, group: Group) -> Rating:
        """The rating of a group's defense against its adversary, by all attacks together."""
        rating = self.ratings.of_cell(group.case.cells[0])
        assert rating is not None  # a group that is rated is no floor
        return rating

    def overall(self, setting: str, defense: str) -> Rating | None:
        """The rating of a defense against the adversary who learns most; None: only floors."""
        return next(iter(self.ratings.of(setting, defense)), None)

    @cached_property
    def rated(self) -> tuple[Rating, ...]:
        """The ratings that the headline counts, one for each defense in each setting; without a defense, of none."""
        pairs = dict.fromkeys((group.setting, group.defense) for group in self.judged)
        return tuple(rating for pair in pairs if (rating := self.overall(*pair)) is not None)

    @property
    def worst(self) -> Rating | None:
        """The rating that decides: of an adversary to whom something is promised, if there is one."""
        shares = {one: 0.0 if one.people is None else -one.people.value for one in self.rated}
        return min(shares, key=lambda one: (one.excluded, [*Word].index(one.word), shares[one]), default=None)

    def strongest(self, groups: Sequence[Group]) -> Group | None:
        """The group whose attack found most beyond chance; None: none did."""
        found = {each.case: (rank, each) for rank, each in enumerate(self._ranked)}
        known = [(found[group.case.identity][0], group) for group in groups if group.case.identity in found]
        return min(known, key=lambda pair: pair[0], default=(0, None))[1]

    @cached_property
    def _ranked(self) -> list[Finding]:
        """The first finding of each case that is beyond chance, what counts most first."""
        firsts = (found[0] for found in self.ratings.findings.values())
        return sorted((one for one in firsts if one.beyond), key=Finding.rank)

    def unpromised(self, group: Group) -> str:
        """See `labels.unpromised`; empty if no training of the group finished."""
        return next(filter(None, (unpromised(c, self.run.trainings.get(c.training.id)) for c in group.case.cells)), "")

    def is_void(self, group: Group) -> bool:
        """Whether the attack of a group finds nothing beyond chance even without a defense."""
        ceiling = self.ceiling(group)
        found = () if ceiling is None else self.ratings.findings.get(ceiling.case.identity, ())
        return bool(found) and not any(one.beyond for one in found)

    @cached_property
    def trainings(self) -> dict[tuple[str, str], tuple[TrainingRecord, ...]]:
        """Finished trainings, one per seed, by setting and defense; those with an honest server if there are any.

        Otherwise the trainings of one attack in which the server broadcasts; their accuracy counts as the defense's.
        """
        records: dict[tuple[str, str], list[TrainingRecord]] = {}
        every = self.run.trainings.values()
        for record in sorted(every, key=lambda one: (one.spec.malice is not None, server_text(one.spec))):
            key = (setting_key(record.spec.task, record.spec.federation), record.spec.defense.key)
            alike = records.setdefault(key, [])
            if not alike or (record.spec.malice == alike[0].spec.malice and record not in alike):
                alike.append(record)
        return {key: tuple(sorted(alike, key=lambda r: r.spec.seed)) for key, alike in records.items()}

    def trainings_of(self, setting: str, defense: str) -> tuple[TrainingRecord, ...]:
        """The finished trainings of one defense in one setting."""
        return self.trainings.get((setting, defense), ())

    @cached_property
    def outdone(self) -> dict[str, Flag]:
        """A flag for each cell of a best aware attack that a naive attack beats significantly.

        The attacks are compared image by image, on the same target by the same adversary, and only if the naive attack
        is above the floor: below the floor neither attack learns anything. Such an aware attack understates the
        leakage.
        """
        known = [(group.case, group) for group in self.defended if group.value is not None]
        rows = gathered(((one.setting, one.defense, case.kind, case.threat, case.target), one) for case, one in known)
        flags: dict[str, Flag] = {}
        for groups in rows.values():
            aware = best([group for group in groups if group.case.info.aware])
            naive = best([group for group in groups if not group.case.info.aware])
            if aware is None or naive is None or not surely_less(aware, naive):
                continue
            floor = self.floor_value(naive)
            if floor is None or (naive.value or 0.0) > floor:
                values = f"{naive.metric.words} {fixed(naive.value)}, here {fixed(aware.value)}"
                text = f"{self.attack_text(naive)} ignores the defense and gets more: {values}"
                flags |= {cell.id: Flag("naive-beats-aware", text) for cell in aware.case.cells}
        return flags

    def flags_of(self, cell: Cell) -> tuple[Flag, ...]:
        """The flags of a cell and of its training, warnings first."""
        result, training = self.run.results.get(cell.id), self.run.trainings.get(cell.training.id)
        flags = (result.flags if result is not None else ()) + (training.flags if training is not None else ())
        if cell.id in self.outdone:
            flags += (self.outdone[cell.id],)
        return tuple(sorted(dict.fromkeys(flags), key=lambda flag: flag.severity != "warning"))

    def attack_text(self, group: Group) -> str:
        """The attack with its varying parameters."""
        return self.attacks[group.case.attack.key].text

    def column_text(self, group: Group) -> str:
        """Attack, adversary and target in one line."""
        return f"{self.attack_text(group)}, {group.case.threat}, {where(group.case.target)}"

    @cached_property
    def origin(self) -> str:
        """Data, model, seeds, and what is lacking, in one line."""
        cells = self.run.cells
        seeds = sorted({cell.training.seed for cell in cells})
        shown = ", ".join(map(str, seeds[:6])) + (f" and {len(seeds) - 6} more" if len(seeds) > 6 else "")
        tasks = [cell.training.task for cell in cells]
        data = ("a recording" if task.data.startswith("recording:") else task.data for task in tasks)
        parts = [listing(dict.fromkeys(data)), listing(dict.fromkeys(task.model for task in tasks))]
        parts += [f"{'seed' if len(seeds) == 1 else 'seeds'} {shown}"] if seeds else []
        counts = ((len(self.run.failures), "failed"), (len(self.run.missing), "missing"))
        return " · ".join(filter(None, [*parts, *(f"{count} {what}" for count, what in counts if count)]))
