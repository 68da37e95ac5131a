"""What the dossier is about: one protection in one setting, with its ratings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from leakgauge.harness.core.cell import FederationSpec, TaskSpec
from leakgauge.harness.core.errors import unknown
from leakgauge.harness.core.labels import UNDEFENDED, counted
from leakgauge.harness.core.rating import Finding, Rating, Word
from leakgauge.harness.core.result import TrainingRecord
from leakgauge.reports.dossier.words import NOUNS, PROTECTIONS, cut
from leakgauge.reports.sections.checked import Badge
from leakgauge.reports.sections.ratings import WORDS
from leakgauge.reports.select import Analysis, Group, final_accuracy
from leakgauge.reports.text.notation import listing


@dataclass(frozen=True)
class Subject:
    """A protection in a setting, and what the run knows about it.

    Attributes:
        place: the keys of setting and defense.
    """

    analysis: Analysis
    place: tuple[str, str]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Its attacks."""
        return tuple(group for group in self.analysis.attacked if (group.setting, group.defense) == self.place)

    @cached_property
    def ratings(self) -> tuple[Rating, ...]:
        """Its ratings, one for each adversary, the worst first, whether or not something is promised against it."""
        return tuple(sorted(self.analysis.ratings.of(*self.place), key=badness))

    @property
    def rating(self) -> Rating | None:
        """The rating against the adversary who learns most; None: no attack."""
        return next(iter(self.ratings), None)

    @property
    def badness(self) -> tuple[int, bool, float]:
        """Its order by its rating, the worst first; those without a rating come last."""
        return (len(Word), True, 0.0) if self.rating is None else badness(self.rating)

    @property
    def word(self) -> Word | None:
        """The word of its rating."""
        return None if self.rating is None else self.rating.word

    @property
    def badge(self) -> Badge:
        """The badge of its rating."""
        return Badge("none", "?", "No result") if self.rating is None else WORDS[self.rating.word]

    @property
    def people(self) -> Finding | None:
        """The attack of its rating that recognized most people."""
        return None if self.rating is None else self.rating.people

    @property
    def trainings(self) -> tuple[TrainingRecord, ...]:
        """Its finished trainings."""
        return self.analysis.trainings_of(*self.place)

    @property
    def accuracy(self) -> float | None:
        """The mean of the trainings' final accuracies."""
        estimate = final_accuracy(self.trainings)
        return None if estimate is None else estimate.value

    @cached_property
    def _some(self) -> Group:
        return next(group for group in self.analysis.groups if (group.setting, group.defense) == self.place)

    @property
    def task(self) -> TaskSpec:
        """Its task."""
        return self._some.case.training.task

    @property
    def shipped(self) -> bool:
        """Whether the records are of a data set of leakgauge, so nobody's own."""
        return ":" not in self.task.data

    @property
    def federation(self) -> FederationSpec:
        """Its federation."""
        return self._some.case.training.federation

    @property
    def name(self) -> str:
        """The name of the defense, without parameters."""
        return self._some.case.training.defense.name

    @property
    def label(self) -> str:
        """Name and varying parameters."""
        return self.analysis.defenses[self.place[1]].text

    @property
    def words(self) -> str:
        """What it does; else its name."""
        return PROTECTIONS.get(self.name, cut(self.name))

    @property
    def used(self) -> bool:
        """Whether it is a protection."""
        return self.name != UNDEFENDED

    @cached_property
    def nouns(self) -> tuple[str, str]:
        """What is recognized, and what the records are."""
        names = {one.name for group in self.groups for result in group.case.results for one in result.estimates}
        return next((words for name, words in NOUNS.items() if name in names), ("People", "records"))

    @cached_property
    def alike(self) -> list[Subject]:
        """Every protection in this setting, itself included."""
        return [Subject(self.analysis, pair) for pair in self.analysis.pairs if pair[0] == self.place[0]]

    @property
    def bare(self) -> Subject | None:
        """The same system without protection; None: not in this run."""
        return next((one for one in self.alike if not one.used), None)

    @property
    def attacked(self) -> set[int]:
        """The rounds whose messages were attacked."""
        targets = [group.case.target for group in self.groups]
        return {at for one in targets if one.round is not None for at in range(one.round, one.round + one.rounds)}

    @property
    def single(self) -> bool:
        """Whether all victims send messages of one record."""
        probes = [group.case.target for group in self.groups if group.case.target.kind == "probe"]
        return bool(probes) and all(target.batch == 1 for target in probes)

    @property
    def lost(self) -> str:
        """How many attacks failed or are missing; empty: none."""
        cases = [group.case for group in self.groups]
        failed, missing = sum(len(case.failures) for case in cases), sum(case.missing for case in cases)
        parts = [f"{n} {what}" for n, what in ((failed, "failed"), (missing, "did not run")) if n]
        return f"Of {counted(sum(len(case.cells) for case in cases), 'attack')}, {listing(parts)}" if parts else ""

    def kind(self, finding: Finding) -> str:
        """What was found: a key of `words.FOUND`."""
        if finding.among:
            return "named"
        kind = next(group.case.kind for group in self.groups if group.case.identity == finding.case)
        return {"lineup": "foreseen", "reconstruction": "labels"}.get(kind, kind)


def badness(rating: Rating) -> tuple[int, bool, float]:
    """The order of ratings, the worst first; for equal ones, those of adversaries to whom something is promised."""
    return [*Word].index(rating.word), rating.excluded, 0.0 if rating.people is None else -rating.people.value


def chosen(analysis: Analysis, wanted: str) -> Subject:
    """The protection of this name or label, the worst-rated if it has several settings or parameters.

    Without a name it is the worst-rated one in use, or without any the system as it is.

    Raises:
        UnknownNameError: no defense of the run has this name.
    """
    every = [Subject(analysis, pair) for pair in analysis.pairs]
    some = [one for one in every if one.used] or every
    if wanted:
        some = [one for one in every if wanted in (one.name, one.label, one.place[1])]
        if not some:
            raise unknown("defense", wanted, dict.fromkeys(one.label for one in every))
    return min(some, key=lambda one: one.badness)
