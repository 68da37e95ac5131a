"""The rating of each defense against each adversary, in people, and what each attack found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from leakgauge.harness.core.labels import where
from leakgauge.harness.core.rating import Rating, Word
from leakgauge.harness.core.result import TrainingRecord
from leakgauge.reports.sections import Section
from leakgauge.reports.sections.checked import BADGES, UNKEPT, Badge, brief, checked, codes, is_unkept
from leakgauge.reports.select import Analysis, Group, final_accuracy
from leakgauge.reports.table import Cell, Column, Fields, Table
from leakgauge.reports.text.notation import NO_VALUE, fixed, interval, percent

WORDS = {
    Word.LEAKS: Badge("bad", "✕", "Leaks"),
    Word.SOME: Badge("warn", "▲", "Some leak"),
    Word.WEAK: Badge("none", "?", "Too weak to tell"),
    Word.HIDDEN: Badge("good", "○", "Hidden for these records"),
}
"""The badge of each rating, the worst first."""

STATES = {Word.LEAKS: "leaks", Word.SOME: "some", Word.WEAK: "weak", Word.HIDDEN: "hides"}
"""The class of each rating on the page."""

_CAPTION = (
    "Leaks: people are recognized among at least 20 candidates. Some leak: anything else is found beyond chance. "
    "Hidden for these records: at most 60 % are named among two, and no other attack on these messages names more."
)


def ratings(analysis: Analysis) -> list[Table]:
    """One table per setting, one row per defense and adversary: rating, people, accuracy, claim."""
    several, tables = len({rating.adversary for rating in analysis.ratings.all}) > 1, list[Table]()
    for setting, name in analysis.settings.items():
        each = (enumerate(analysis.ratings.of(setting, defense)) for defense in analysis.defenses_of(setting))
        rows = tuple(_row(analysis, one, several=several, first=not at) for alike in each for at, one in alike)
        who = ("Adversary",) if several else ()
        columns = ("Defense", *who, "Rating", Column("People", "num"), Column("Accuracy", "num"), "Claim per round")
        if rows:
            tables.append(Table(name, columns, rows, notes=(_CAPTION,)))
    return tables


# the page shows them in its answer and its matrix
SECTION: Section[Analysis] = Section("ratings", "Ratings", "", lambda _: None, 5, tables=ratings, brief=True)


def cell_of(rating: Rating) -> Cell:
    """A rating as a field, with its reason below."""
    badge = WORDS[rating.word]
    below = ("not promised", rating.reason) if rating.excluded else (rating.reason,)
    return Cell(badge.words, "not promised" if rating.excluded else "", below, tone=badge.tone)


def _row(analysis: Analysis, rating: Rating, *, several: bool, first: bool) -> Fields:
    trainings = analysis.trainings_of(rating.setting, rating.defense)
    name = analysis.defenses[rating.defense].text
    who = (rating.adversary,) if several else ()
    more = (trained(trainings), claimed(trainings)) if first else ("", "")
    people = NO_VALUE if rating.people is None else f"{rating.people.hits} of {rating.people.n}"
    return (name, *who, cell_of(rating), people, *more)


def trained(trainings: Sequence[TrainingRecord]) -> Cell:
    """Final accuracy, and what may have spoiled it."""
    accuracy = final_accuracy(trainings)
    lost = sum(flag.code == "no-learning" for training in trainings for flag in training.flags)
    dropped = sum(len(training.dropped) for training in trainings)
    notes = [f"no learning{f' in {lost} of {len(trainings)}' if lost < len(trainings) else ''}"] if lost else []
    notes += [f"{dropped} dropped"] if dropped else []
    return Cell(percent(accuracy.value if accuracy is not None else None), "; ".join(notes))


def claimed(trainings: Sequence[TrainingRecord]) -> Cell:
    """The claim for one round with its verdict, and what the audit and the messages say about it."""
    pairs = [checked(training) for training in trainings]
    text, worst = brief([one for one, _ in pairs], [whole for _, whole in pairs])
    marked = any(is_unkept(claim, training) for pair, training in zip(pairs, trainings, strict=True) for claim in pair)
    code = codes(trainings) if any(training.audited is not None for training in trainings) else ()
    bad = [UNKEPT.words] if marked else []
    bad += [f"{state.badge.words} {state.seeds}".rstrip() for state in code if state.badge.tone != "good"]
    return Cell(text, "; ".join(bad), tone=BADGES[worst].tone if worst else "")


def found(analysis: Analysis) -> list[Table]:
    """One row per defense, attack, adversary and target: what was measured, beside floor and ceiling."""
    rows, several = list[Fields](), len(analysis.settings) > 1
    for group in sorted(analysis.attacked, key=lambda g: list(analysis.settings).index(g.setting)):
        name = analysis.defenses[group.defense].text + (f" ({analysis.settings[group.setting]})" if several else "")
        rows.append((name, *_measured(analysis, group)))
    columns = ("Defense", "Attack", "Adversary, target", "Found", "Measured", "95 %", "n", "Floor", "Ceiling")
    return [Table("What each attack found", columns, tuple(rows))] if rows else []


def _measured(analysis: Analysis, group: Group) -> Iterator[str]:
    yield analysis.attack_text(group)
    yield f"{group.case.threat}, {where(group.case.target)}"
    yield said(analysis, group)
    estimate, ceiling = group.estimate, analysis.ceiling(group)
    yield NO_VALUE if group.value is None else f"{group.metric.words} {fixed(group.value)}"
    yield interval(estimate) if estimate is not None else ""
    yield "" if estimate is None else str(estimate.n)
    yield fixed(analysis.floor_value(group))
    yield fixed(None if ceiling is None else ceiling.value)


def said(analysis: Analysis, group: Group) -> str:
    """What the attack of a group found beyond chance, or why it says nothing."""
    findings = analysis.ratings.findings.get(group.case.identity, ())
    if findings and findings[0].beyond:
        return findings[0].text
    if not group.case.results:
        return f"failed: {group.case.failures[0].message}" if group.case.failures else "not run"
    if not findings:
        return "not compared with chance"
    return "nothing even without a defense" if analysis.is_void(group) else "nothing beyond chance"
