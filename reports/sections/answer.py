"""The first screen: the answer in one sentence, accuracy against leakage, one record under each defense, the scope."""

from __future__ import annotations

from collections import Counter
from typing import Any

from markupsafe import Markup

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import UNDEFENDED, counted
from leakgauge.harness.core.metrics import MANY
from leakgauge.harness.core.rating import Finding, Rating, Word
from leakgauge.harness.core.result import Estimate
from leakgauge.harness.core.sinks import clipped
from leakgauge.harness.core.stats import clopper_pearson
from leakgauge.harness.core.threats import ADVERSARIES
from leakgauge.reports.charts.plane import Frame, Spot, drawn
from leakgauge.reports.sections import Section
from leakgauge.reports.sections.checked import Badge, broken, checked, is_broken
from leakgauge.reports.sections.pictures import strip
from leakgauge.reports.sections.ratings import STATES, WORDS
from leakgauge.reports.select import Analysis, final_accuracy
from leakgauge.reports.text.notation import first_line, fixed, listing, percent

NOTHING_RATED = Badge("none", "?", "Nothing to rate")

_RULE = (
    "The worst rating counts, over the defenses and the adversaries against whom they promise something. “Leaks”: "
    f"people are recognized among at least {MANY} candidates, more often than by chance. “Some leak”: anything else is "
    "found beyond chance, such as a record among two, its client or a member; or a record would be named within the "
    "rounds. “Hidden for these records”: at most 60 % of the records are named among two, by its certificate no other "
    "attack on these messages names more, and the model learned. Otherwise “Too weak to tell”. All tests are exact or "
    "by ranks (the forecast: Student's t), one-sided at 2.5 %, and adjusted together by Holm. A rating is valid only "
    "for the adversaries and records of this report. It does not depend on claimed epsilons."
)


def headline(analysis: Analysis) -> tuple[str, str]:
    """The answer in one sentence, and what it rests on."""
    columns = counted(len({group.column for group in analysis.attacked}), "combination")
    frame = f"Measured with {columns} of attack, adversary and target."
    if not analysis.attacked:
        lost = [str(note) for note in analysis.run.study.get("notes", ()) if str(note).startswith("attack ")]
        why = f"Only a floor ran{': ' if lost else ''}{'; '.join(lost)}."
        return "No attack fits this model" if lost else "No attack ran", why if analysis.groups else ""
    worst = analysis.worst
    if worst is None or not any(group.case.results for group in analysis.judged):
        failures = analysis.run.failures.values()
        most = Counter(f"{one.kind}: {first_line(one.message)}" for one in failures).most_common(1)
        first = f" The most frequent reason: {clipped(most[0][0])}" if most else ""
        support = f"Every cell that counts here failed, is missing or has no value; see “All results”.{first}"
        return f"No attack{' on a defense' if analysis.defended else ''} returned a value", support
    promise = ", against whom nothing is promised" if worst.excluded else ""
    support = f"{analysis.defenses[worst.defense].text}, against {worst.adversary}{promise}: {worst.reason}. {frame}"
    return _counted(analysis) if analysis.defended else _ALONE[worst.word], support


_ALONE = {
    Word.LEAKS: "Without a defense, this training leaks",
    Word.SOME: "Without a defense, this training leaks in part",
    Word.WEAK: "Too weak to tell: the attacks on this training without a defense find nothing",
    Word.HIDDEN: "These records are hidden even without a defense",
}

_SAID = {
    Word.LEAKS: ("leaks", "leak"),
    Word.SOME: ("leaks in part", "leak in part"),
    Word.HIDDEN: ("hides these records", "hide these records"),
}
"""Each rating as a verb, for one defense and for several."""


def _counted(analysis: Analysis) -> str:
    """`2 of 7 defenses leak, 1 leaks in part`; a defense counts once, by its worst setting."""
    each = gathered((one.defense, one) for one in analysis.rated)
    worst = {name: min(alike, key=lambda one: (one.excluded, [*Word].index(one.word))) for name, alike in each.items()}
    counts = Counter(one.word for one in worst.values() if not one.excluded)
    total, parts = counts.total(), list[str]()
    if not total:
        verb = "promises" if len(worst) == 1 else "promise"
        return f"{counted(len(worst), 'defense')} {verb} nothing against these adversaries"
    for word, (one, several) in _SAID.items():
        if count := counts[word]:
            of = "" if parts else f" of {counted(total, 'defense')}"
            parts.append(f"{count}{of} {one if count == 1 else several}")
    if total == 1 and counts[Word.WEAK]:
        name = next(name for name, one in worst.items() if not one.excluded)
        return f"The test of {analysis.defenses[name].text} is too weak to tell"
    if weak := counts[Word.WEAK]:
        of = f"{weak} of {counted(total, 'defense')}" if not parts else str(weak)
        parts.append(f"{'the test' if parts else 'The test'} is too weak to tell about {of}")
    others = {name for name, one in worst.items() if one.word in (Word.WEAK, Word.HIDDEN)}
    near = _near(analysis, others) if len(others) < len(worst) else ""
    return ", ".join(parts) + (f"; {near}" if near else "")


def _near(analysis: Analysis, others: set[str]) -> str:
    """Which of these defenses cost little accuracy, in the first setting; empty if that is not known."""
    setting = next(iter(analysis.settings))
    costs = {name: final_accuracy(analysis.trainings_of(setting, name)) for name in analysis.defenses_of(setting)}
    bare = costs.get(UNDEFENDED)
    known = {name: one.value for name in others if (one := costs.get(name)) is not None and one.value is not None}
    if bare is None or bare.value is None or not known:
        return ""
    close = [analysis.defenses[name].text for name in costs if known.get(name, 0.0) >= bare.value - _NEAR / 100]
    verb = "stays" if len(close) == 1 else "stay"
    who = f"only {close[0]}" if len(close) == 1 < len(known) else listing(close) or "none"
    who = who if len(close) <= _FEW else f"{len(close)} of {len(known)}"
    return f"of the others, {who} {verb} within {_NEAR:.0f} points of the undefended accuracy"


_FEW = 3  # defenses that the sentence names
_NEAR = 5.0  # points of accuracy below that without a defense, in the best corner


def answer(analysis: Analysis) -> dict[str, Any]:
    """The first screen."""
    sentence, support = headline(analysis)
    each = {setting: [(setting, name) for name in analysis.defenses_of(setting)] for setting in analysis.settings}
    rated = {at: [one for pair in pairs if (one := analysis.overall(*pair)) is not None] for at, pairs in each.items()}
    planes = [(analysis.settings[setting], _plane(analysis, setting, alike)) for setting, alike in rated.items()]
    first = next((setting for setting, alike in rated.items() if alike), next(iter(analysis.settings), ""))
    tested, untested = _scope(analysis)
    return {
        "sentence": sentence,
        "support": support,
        "badge": NOTHING_RATED if analysis.worst is None else WORDS[analysis.worst.word],
        "planes": [(name, plane) for name, plane in planes if plane is not None],
        "alone": None if analysis.defended else next(iter(analysis.rated), None),
        "strip": _strip(analysis, first),
        "tested": tested,
        "untested": untested,
        "broken": broken(analysis),
        "legend": list(zip(STATES.values(), WORDS.values(), _MEANS, strict=True)),
        "rule": _RULE,
    }


def _strip(analysis: Analysis, setting: str) -> list[dict[str, Any]]:
    try:
        return strip(analysis, setting)
    except Exception:  # pictures that cannot be read: their own section says why
        return []


_MEANS = ("people recognized", "more than chance", "what lacks: in Attacks", "by lineup's certificate")

SECTION = Section("answer", "Answer", "Answer", answer, 0)


def _counts(rating: Rating) -> Finding | None:
    """What is shown as its leakage: people, or the surest finding."""
    return rating.people or next(iter(rating.findings), None)


def _plane(analysis: Analysis, setting: str, rated: list[Rating]) -> Markup | None:
    """Accuracy against leakage; None for one defense alone, or without anything that was counted."""
    pairs = [(rating, found) for rating in rated if (found := _counts(rating)) is not None]
    if len(pairs) < 2:
        return None
    people = any(found.people for _, found in pairs)
    spots = [_spot(analysis, rating, found, people) for rating, found in pairs]
    bare = next((spot for spot, (rating, _) in zip(spots, pairs, strict=True) if rating.defense == UNDEFENDED), None)
    guess = max((_guessed(found) for _, found in pairs if found.people == people), default=0.0)
    lines = [(100 * guess, f"floor: guessing, up to {percent(guess, 0)}", "floor")] if people else []
    corner = None
    if bare is not None:
        lines.append((bare.y, f"ceiling: {bare.name}", "ceil"))
        corner = None if bare.x is None or not people else (max(0.0, bare.x - _NEAR), max(2.0, 100 * guess))
    classes = [len(t.classes) for t in analysis.trainings_of(setting, rated[0].defense) if t.classes]
    y_words = "people recognized by the best attack" if people else "how often the best attack is right beyond chance"
    x_words = "" if all(spot.x is None for spot in spots) else "accuracy of the model on new records"
    order = [STATES[word] for word in Word]
    best = [s for s in spots if s.state in ("hides", "weak")] or spots
    keep = {id(bare), id(max(spots, key=lambda s: s.y)), id(max(best, key=lambda s: s.x or 0.0))}
    spots = [spot._replace(named=bool(spot.note) or id(spot) in keep) for spot in spots]
    shown = sorted(spots, key=lambda spot: (order.index(spot.state), -spot.y))
    frame = Frame(x_words, y_words, tuple(lines), 100 / classes[0] if classes and x_words else None, corner)
    return drawn(shown, frame)


def _guessed(found: Finding) -> float:
    """The largest share that guessing explains, by the interval of n items."""
    return clopper_pearson(round(found.chance * found.n), found.n).high or 0.0 if found.n else 0.0


def _spot(analysis: Analysis, rating: Rating, found: Finding, people: bool) -> Spot:
    trainings = analysis.trainings_of(rating.setting, rating.defense)
    known = [100 * t.accuracy for t in trainings if t.accuracy is not None]
    mean = sum(known) / len(known) if known else None
    note = "claim broken" if any(is_broken(claim) for t in trainings for claim in checked(t)) else ""
    note = "nothing promised" if rating.excluded else note
    if people and not found.people:  # no lineup, or it failed: what else was found is not on this axis
        y, low, high = 0.0, 0.0, 0.0
    elif people:
        y, low, high = (100 * (found.value if end is None else end) for end in (found.value, found.low, found.high))
    else:
        y, low, high = (100 * found.beyond_chance(end) for end in (found.value, found.low, found.high))
    ends = f"95 %: {percent(low / 100, 0)} to {percent(high / 100, 0)}"
    name = analysis.defenses[rating.defense].text
    accuracy = _range(final_accuracy(trainings), known)
    about = f"{name}: {WORDS[rating.word].words.lower()}. {found.text} ({ends}){accuracy}. {rating.reason}"
    ends_x = (min(known), max(known)) if known else (0.0, 0.0)
    return Spot(name, note, about, STATES[rating.word], mean, *ends_x, y, low, high, named=False)


def _range(accuracy: Estimate | None, known: list[float]) -> str:
    if accuracy is None or accuracy.value is None:
        return ""
    spread = f" ({fixed(min(known), 0)} to {fixed(max(known), 0)} % in {len(known)} trainings)"
    return f", accuracy {percent(accuracy.value)}{spread if len(known) > 1 else ''}"


def _scope(analysis: Analysis) -> tuple[list[str], list[str]]:
    """What was tested, and what of the known list was not."""
    groups = analysis.attacked
    threats = {group.case.threat.split("+")[0] for group in groups}
    threats |= {"malicious-server"} if any("broadcast" in group.case.threat for group in groups) else set()
    kinds, targets = {group.case.kind for group in groups}, [group.case.target for group in groups]
    federations = [cell.training.federation for cell in analysis.run.cells]
    seeds = {cell.training.seed for group in groups for cell in group.case.cells}
    checks = {
        **{words: name in threats for name, words in ADVERSARIES.items()},
        "attacks blind to the defense": any(not g.case.info.aware or g.undefended for g in analysis.judged),
        "attacks aware of it": any(group.case.info.aware for group in analysis.defended),
        "lineups": "lineup" in kinds,
        "membership": "membership" in kinds,
        "batches": any(t.batch > 1 or t.kind == "messages" for t in targets),
        "local steps": any(f.algorithm == "fedavg" for f in federations),
        "several rounds together": any(target.rounds > 1 for target in targets),
        "a trained model": any((target.round or 0) > 0 for target in targets),
        "several seeds": len(seeds) > 1,
        "audits": any(record.audited is not None for record in analysis.run.trainings.values()),
    }
    return [words for words, did in checks.items() if did], [words for words, did in checks.items() if not did]
