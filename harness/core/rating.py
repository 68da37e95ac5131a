"""How much a defense lets an adversary learn about people: one rating, which every surface shows.

| rating | when |
|---|---|
| leaks | records are named, or pictures identified, among at least `MANY` candidates, more often than by chance |
| some leak | anything else is found beyond chance: a record among 2 or 10, its client, a member, a label, a property; |
| | or the record would be named within the rounds of the training, by its log likelihood ratio |
| too weak to tell | neither of the others; `Rating.lacks` says what is missing |
| hidden for these records | the lineup names at most 60 % among 2, and no better attack exists, by its certificate |

All tests of a run are one-sided and adjusted together by Holm; they are exact or by ranks, but for that of the forecast
(Student's t). A rating holds for one defense in one setting and one adversary; side knowledge, such as labels, makes no
other adversary, powers over the model do.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy import special

from leakgauge.harness.core import stats
from leakgauge.harness.core.cases import Case, cases, gathered
from leakgauge.harness.core.cell import Cell
from leakgauge.harness.core.labels import UNDEFENDED, counted, setting_key, unpromised
from leakgauge.harness.core.metrics import MANY, metric
from leakgauge.harness.core.result import Estimate, Run, TrainingRecord
from leakgauge.harness.core.threats import POWERS

LEVEL = 0.025
"""Level of the tests after Holm: each is one end of a 95 % interval."""

MOST_HIDDEN = 0.6
"""Largest upper end of the share that is named among two, for a rating `hidden`."""

_CERTAIN = 0.998  # confidence of the interval in which an exact likelihood's gap has to contain 0


class Word(enum.StrEnum):
    """A rating, the worst first."""

    LEAKS = "leaks"
    SOME = "some leak"
    WEAK = "too weak to tell"
    HIDDEN = "hidden for these records"


@dataclass(frozen=True)
class Finding:
    """What one attack found, beside chance.

    Attributes:
        case: `Case.identity` of the attack's cells.
        what: in words, such as `people named`.
        hits, n: independent items that were found, and all; 0 of 0 if nothing is counted.
        value, low, high: the share or the AUC with its 95 % interval.
        chance: its value by guessing.
        p: one-sided, adjusted for all tests of the run.
        among: for a record that is picked out, the number of candidates; else 0.
    """

    case: str
    what: str
    hits: int
    n: int
    value: float
    low: float | None
    high: float | None
    chance: float
    p: float
    among: int = 0

    @property
    def text(self) -> str:
        """Such as `12 of 16 people named among 100`."""
        among = f" among {self.among}" if self.among else ""
        if self.n:
            return f"{self.hits} of {self.n} {self.what}{among}"
        return self.what if self.low is None else f"AUC {self.value:.3f}: {self.what}"

    @property
    def people(self) -> bool:
        """Whether a hit is a person, recognized among at least `MANY`."""
        return self.among >= MANY

    @property
    def beyond(self) -> bool:
        """Whether it is more than chance."""
        return self.p <= LEVEL

    def beyond_chance(self, value: float | None) -> float:
        """How far the value, or an end of its interval, is from chance (0) to certainty (1)."""
        return max(0.0, ((self.value if value is None else value) - self.chance) / (1 - self.chance))

    def rank(self) -> tuple[bool, bool, float, float]:
        """The order of findings: people first, then what is surest."""
        return not (self.beyond and self.people), not self.beyond, self.p, -self.value

    @property
    def word(self) -> Word | None:
        """What this attack alone shows; None: nothing beyond chance."""
        return None if not self.beyond else Word.LEAKS if self.people else Word.SOME


@dataclass(frozen=True)
class Rating:
    """The rating of one defense in one setting against one adversary.

    Attributes:
        setting, defense: keys of setting and defense.
        adversary: the threat model, and powers over the model: `server`, `server+broadcast`.
        findings: of all its attacks, what counts most first.
        lacks: for `too weak to tell`, what is missing, in words.
        excluded: a finite claim is made, but not against this adversary: nothing is promised.
    """

    setting: str
    defense: str
    adversary: str
    word: Word
    findings: tuple[Finding, ...]
    lacks: tuple[str, ...]
    excluded: bool

    @property
    def people(self) -> Finding | None:
        """The attack that recognized the largest share of people; None: none was counted."""
        return max((one for one in self.findings if one.people), key=lambda one: one.value, default=None)

    @property
    def text(self) -> str:
        """The rating in words: `leaks`, `some leak, not promised`."""
        return self.word + (", not promised" if self.excluded else "")

    @property
    def reason(self) -> str:
        """The finding that decides, or what is missing."""
        if self.word is Word.HIDDEN:
            return next(one.text for one in self.findings if one.among == 2)
        return "; ".join(self.lacks) if self.word is Word.WEAK else self.findings[0].text


def adversary_of(threat: str) -> str:
    """The adversary that a cell's threat names, without its side knowledge."""
    name, *grants = threat.split("+")
    return "+".join([name, *(grant for grant in grants if grant in POWERS)])


class Ratings:
    """The ratings of a run, in the study's order: by setting, defense and adversary.

    Attributes:
        run, cases: the run and all its cases.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.cases = run, cases(run)
        self._cases = [case for case in self.cases if not case.info.floor]
        floors = [case for case in self.cases if case.info.floor]
        self._floors = gathered(((_place(case.cells[0])[0], case.kind, case.target), case) for case in floors)

    @cached_property
    def all(self) -> tuple[Rating, ...]:
        """Every rating."""
        return tuple(self._rated(*place, alike) for place, alike in self._places.items())

    @cached_property
    def findings(self) -> dict[str, tuple[Finding, ...]]:
        """What each case found, by `Case.identity`, adjusted by Holm over the run."""
        found = [one for case in self._cases for one in self._found(case)]
        adjusted: stats.Numbers = stats.holm(np.array([one.p for one in found]))
        each = gathered((one.case, replace(one, p=float(p))) for one, p in zip(found, adjusted, strict=True))
        return {name: tuple(sorted(alike, key=Finding.rank)) for name, alike in each.items()}

    def of(self, setting: str, defense: str) -> tuple[Rating, ...]:
        """The ratings of a defense in a setting, the worst one first; those of excluded adversaries last."""
        alike = self._by_defense.get((setting, defense), [])
        return tuple(sorted(alike, key=lambda one: (one.excluded, [*Word].index(one.word))))

    def of_cell(self, cell: Cell) -> Rating | None:
        """The rating that a cell belongs to; None for a floor alone."""
        setting, defense, adversary = _place(cell)
        return next((one for one in self._by_defense.get((setting, defense), []) if one.adversary == adversary), None)

    def of_case(self, case: Case) -> Word | None:
        """What the attack of a case shows alone; None: nothing beyond chance."""
        first = next(iter(self.findings.get(case.identity, ())), None)
        return None if first is None else first.word

    @cached_property
    def _places(self) -> dict[tuple[str, str, str], list[Case]]:
        return gathered((_place(case.cells[0]), case) for case in self._cases)

    @cached_property
    def _by_defense(self) -> dict[tuple[str, str], list[Rating]]:
        return gathered(((one.setting, one.defense), one) for one in self.all)

    def _rated(self, setting: str, defense: str, adversary: str, alike: Sequence[Case]) -> Rating:
        found = sorted((one for case in alike for one in self.findings.get(case.identity, ())), key=Finding.rank)
        worst = found[0].word if found else None
        lacks = () if worst else tuple(dict.fromkeys(self._lacks(alike)))
        records = [(cell, self.run.trainings.get(cell.training.id)) for case in alike for cell in case.cells]
        finite = any(claim.epsilon is not None for _, r in records if r for claim in (r.one_round, r.whole_run))
        excluded = finite and any(unpromised(cell, record) for cell, record in records)
        word = worst or (Word.WEAK if lacks else Word.HIDDEN)
        return Rating(setting, defense, adversary, word, tuple(found), lacks, excluded)

    def _found(self, case: Case) -> Iterator[Finding]:
        """What a case found, with p-values that are not adjusted yet."""
        for name, what in _KINDS.get(case.kind, {}).items():
            estimates = [one for one in case.estimates(name) if one.value is not None]
            one = _tested(case, stats.pool(estimates)) if estimates else None
            if one is None or one.value is None or (name == "label_accuracy" and "labels" in case.threat):
                continue
            floor = self._floor(case, name)
            if name == "label_accuracy":
                if floor is not None:
                    yield _finding(case, one, what, floor.value or 0.0, _higher(one, floor))
            elif one.p is not None and one.chance is not None:
                above = floor is not None and (floor.value or 0.0) > one.chance
                p = max(one.p, _higher(one, floor)) if floor is not None and above else one.p
                among = round(1 / one.chance) if name in _AMONG else 0
                yield _finding(case, one, what, one.chance, p, among)
        yield from _foreseen(case)

    def _floor(self, case: Case, name: str) -> Estimate | None:
        """The best guess without protected data on the same target; one without a defense if there is one."""
        kind = "reconstruction" if case.kind == "labels" else case.kind  # a blind guess of a record has a label
        alike = self._floors.get((_place(case.cells[0])[0], kind, case.target), [])
        undefended = [floor for floor in alike if floor.training.defense.name == UNDEFENDED] or alike
        values = [stats.pool(found) for floor in undefended if (found := floor.estimates(name))]
        return max(values, key=lambda one: one.value or 0.0, default=None)

    def _lacks(self, alike: Sequence[Case]) -> Iterator[str]:
        """Why these cases cannot show that records are hidden."""
        failed, missing = (sum(len(case.failures) for case in alike), sum(case.missing for case in alike))
        if failed or missing:
            parts = [f"{n} {what}" for n, what in ((failed, "failed"), (missing, "missing")) if n]
            yield f"of {counted(sum(len(case.cells) for case in alike), 'cell')}, {' and '.join(parts)}"
        lineups = [case for case in alike if case.kind == "lineup"]
        if not lineups:
            sees = "+" not in adversary_of(alike[0].threat) and alike[0].threat.split("+")[0] in _HEARS
            yield "no lineup ran" if sees else "no lineup can tell what this adversary cannot learn"
        for same in gathered((replace(case.target, count=1, skip=0, among=2), case) for case in lineups).values():
            yield from _uncertain(same)
        for name in dict.fromkeys(cell.training.id for case in alike for cell in case.cells):
            record = self.run.trainings.get(name)
            if record is not None and (why := unlearned(record)):
                yield why


def unlearned(record: TrainingRecord) -> str:
    """Why a training may have learned nothing, so that hiding the records is easy; empty: it learned."""
    if any(flag.code == "no-learning" for flag in record.flags):
        return "the model did not learn"
    losses = [each.loss for each in record.evaluations]
    if record.accuracy is not None or losses[-1] < losses[0]:
        return ""
    return "the model's loss did not fall" if len(losses) > 1 else "whether the model learned is unknown"


def messages_needed(share: float) -> int | None:
    """The fewest messages at which this share, or one half, named among two is surely at most `MOST_HIDDEN`."""
    for n in range(10, _MOST):
        if (stats.clopper_pearson(math.ceil(max(0.5, share) * n), n).high or 1.0) <= MOST_HIDDEN:
            return n
    return None


_MOST = 2000  # messages that are tried

_AMONG = ("identification", "named", "named@2", "named@10", "named@100")

_KINDS: dict[str, dict[str, str]] = {
    "reconstruction": {"identification": "people identified", "label_accuracy": "labels right"},
    "lineup": dict.fromkeys(("named", "named@2", "named@10", "named@100"), "people named"),
    "labels": {"label_accuracy": "labels right"},
    "membership": {"auc": "members found"},
    "source": {"source": "records traced to their client"},
    "linkability": {"linked": "messages linked to their client"},
    "property": {"property_auc": "a property of the data found"},
}
"""By kind of attack, the estimates that are tested, in words."""

_HEARS = ("server", "colluding-server", "aggregator", "eavesdropper")


def _place(cell: Cell) -> tuple[str, str, str]:
    spec = cell.training
    return setting_key(spec.task, spec.federation), spec.defense.key, adversary_of(cell.threat)


def _tested(case: Case, one: Estimate) -> Estimate:
    """The estimate with its test; results of earlier versions hold the share alone."""
    if one.p is not None or not stats.is_share(one) or one.name not in _AMONG:
        return one
    known = [each.value for each in case.estimates(f"{one.name}_chance")]
    chance = known[0] if known else metric(one.name).chance
    return one if chance is None else stats.against(one, chance)


def _finding(case: Case, one: Estimate, what: str, chance: float, p: float, among: int = 0) -> Finding:
    hits = stats.firsts(one) if stats.is_share(one) else []
    assert one.value is not None
    return Finding(case.identity, what, sum(hits), len(hits), one.value, one.low, one.high, chance, p, among)


def _higher(one: Estimate, other: Estimate) -> float:
    """The p-value that a share is no higher than another attack's."""
    mine, theirs = stats.firsts(one), stats.firsts(other)
    return stats.fisher(sum(mine), len(mine), sum(theirs), len(theirs))


def _foreseen(case: Case) -> Iterator[Finding]:
    """Whether a record is named within the rounds of the training, if each message tells as much as these."""
    found = [one for one in case.estimates("nats") if one.value is not None]
    named = [one for one in case.estimates("named") if one.chance is not None]
    if not found or not named:
        return
    one, among = stats.pool(found), round(1 / max(each.chance or 1.0 for each in named))
    rounds, planned = stats.rounds_to_name(one.low or 0.0, among), case.training.federation.rounds_run
    if rounds is not None and rounds <= planned:
        values = np.array([value for value in stats.of_messages(one) if value is not None])
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
        p = float(special.stdtr(len(values) - 1, -float(values.mean()) / error)) if error else 0.0
        p = max(p, 0.5 ** len(values))  # no test of the signs of so few messages is surer
        text = f"half of the people are named among {among} after {counted(rounds, 'round')}, by the messages seen"
        yield Finding(case.identity, text, 0, 0, 0.0, None, None, 0.0, p)


def _uncertain(alike: Sequence[Case]) -> Iterator[str]:
    """Why lineups on messages of one kind do not certify that records are hidden."""
    pairs = [one for case in alike for one in case.estimates("named@2")]
    pairs += [one for case in alike for one in case.estimates("named") if one.chance == 1 / 2]
    gaps = [one for case in alike for one in case.estimates("posterior_gap")]
    if len(gaps) < sum(len(case.results) for case in alike):
        yield "the defense's likelihood is not exact: a better attack may exist"
    elif not all(_holds_zero([value for value in stats.of_messages(one) if value is not None]) for one in gaps):
        yield "the defense's likelihood contradicts its messages: a better attack may exist"
    hits = [hit for one in pairs for hit in stats.firsts(one)]
    if hits and (stats.clopper_pearson(sum(hits), len(hits)).high or 1.0) > MOST_HIDDEN:
        enough = messages_needed(sum(hits) / len(hits))
        more = f"{enough} messages would do" if enough else f"more than {_MOST} messages would tell"
        yield f"{sum(hits)} of {len(hits)} named among 2: {more}"
    elif not hits and gaps:
        yield "the lineup has no rival"


def _holds_zero(gaps: Sequence[float]) -> bool:
    """Whether an interval of the mean contains zero, but for rounding."""
    low, high = stats.mean_interval(gaps, _CERTAIN)
    return low is None or high is None or (low <= 1e-9 and high >= -1e-9)
