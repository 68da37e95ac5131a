"""What the dossier is about: one protection in one setting, with its ratings."""

from __future__ import annotations

from functools import cached_property
from itertools import chain

from leakgauge.harness.core.errors import unknown
from leakgauge.harness.core.labels import UNDEFENDED, counted
from leakgauge.harness.core.rating import Finding, Rating, Word
from leakgauge.reports.dossier.words import NOUNS, PROTECTIONS, cut
from leakgauge.reports.sections.checked import Badge
from leakgauge.reports.sections.ratings import WORDS
from leakgauge.reports.select import Analysis, final_accuracy
from leakgauge.reports.text.notation import listing


class Subject:
    """A protection in a setting, and what the run knows about it.

    Attributes:
        place: the keys of setting and defense.
        task, federation, name, label: those of its cells; `label` has the varying parameters.
        shipped: whether the records are of a data set of leakgauge, so nobody's own.
        used, words: whether it is a protection, and what it does, else its name.
        groups, trainings, accuracy: its attacks, its finished trainings, and the mean of their final accuracies.
        ratings: one for each adversary, the worst first, whether or not something is promised against it.
        rating, word, badge: the rating against the adversary who learns most; None: no attack.
        people: the attack of this rating that recognized most people.
        badness: its order by its rating, the worst first; those without a rating come last.
        nouns: what is recognized, and what the records are.
        attacked: the rounds whose messages were attacked.
        single: whether all victims send messages of one record.
    """

    def __init__(self, analysis: Analysis, place: tuple[str, str]) -> None:
        self.analysis, self.place = analysis, place
        alike = [group for group in analysis.groups if (group.setting, group.defense) == place]
        spec = alike[0].case.training
        self.task, self.federation, self.name = spec.task, spec.federation, spec.defense.name
        self.label = analysis.defenses[place[1]].text
        self.shipped, self.used = ":" not in self.task.data, self.name != UNDEFENDED
        self.words = PROTECTIONS.get(self.name, cut(self.name))
        self.groups = [group for group in alike if not group.case.info.floor]
        self.trainings, accuracy = analysis.trainings_of(*place), final_accuracy(analysis.trainings_of(*place))
        self.accuracy = None if accuracy is None else accuracy.value
        self.ratings = sorted(analysis.ratings.of(*place), key=badness)
        self.rating = rating = next(iter(self.ratings), None)
        self.word = None if rating is None else rating.word
        self.people = None if rating is None else rating.people
        self.badge = Badge("none", "?", "No result") if rating is None else WORDS[rating.word]
        self.badness = (len(Word), True, 0.0) if rating is None else badness(rating)
        names = {one.name for group in self.groups for result in group.case.results for one in result.estimates}
        self.nouns = next((words for name, words in NOUNS.items() if name in names), ("People", "records"))
        targets = [group.case.target for group in self.groups]
        rounds = [range(one.round, one.round + one.rounds) for one in targets if one.round is not None]
        self.attacked = set(chain(*rounds))
        probes = [target for target in targets if target.kind == "probe"]
        self.single = bool(probes) and all(target.batch == 1 for target in probes)

    @cached_property
    def alike(self) -> list[Subject]:
        """Every protection in this setting, itself included."""
        places = [place for place in self.analysis.pairs if place[0] == self.place[0]]
        return [self if place == self.place else Subject(self.analysis, place) for place in places]

    @property
    def bare(self) -> Subject | None:
        """The same system without protection; None: not in this run."""
        return next((one for one in self.alike if not one.used), None)

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
