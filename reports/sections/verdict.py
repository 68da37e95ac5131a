"""The top of the page: one sentence, a badge and four numbers, each traceable to a row below."""

from __future__ import annotations

import operator
from collections import Counter
from typing import NamedTuple

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import UNDEFENDED, counted
from leakgauge.harness.core.metrics import MANY, RECOGNIZABLE
from leakgauge.harness.core.rating import Rating, Word
from leakgauge.reports.sections import Section
from leakgauge.reports.sections.checked import Badge, broken
from leakgauge.reports.sections.ratings import WORDS
from leakgauge.reports.select import Analysis, Recognized, final_accuracy, recognizable
from leakgauge.reports.text.notation import NO_VALUE, listing, percent, points

Figure = tuple[str, str, str, str]
"""Title, value and unit of one of the four numbers, and its source."""


class Verdict(NamedTuple):
    """The top of the page.

    Attributes:
        badge: a rating of leakage only; claims do not change it.
        broken: the claims that are BROKEN.
        rule: how the badge is chosen.
        origin: the provenance in one line.
    """

    sentence: str
    support: str
    badge: Badge
    broken: dict[str, object] | None
    rule: str
    figures: tuple[Figure, ...]
    origin: tuple[str, ...]


NOTHING_RATED = Badge("none", "?", "Nothing to rate")

_RULE = (
    "The worst rating counts, over the defenses and the adversaries against whom they promise something. “Leaks”: "
    f"people are recognized among at least {MANY} candidates, more often than by chance. “Some leak”: anything else is "
    "found beyond chance, such as a record among two, its client or a member; or a record would be named within the "
    "rounds. “Hidden for these records”: at most 60 % of the records are named among two, by its certificate no other "
    "attack on these messages names more, and the model learned. Otherwise “Too weak to tell”. All tests are exact or "
    "by ranks, one-sided at 2.5 %, and adjusted together by Holm. A rating is valid only for the adversaries and "
    "records of this report. It does not depend on claimed epsilons."
)


def recognized_images(analysis: Analysis, *, defended: bool) -> Recognized | None:
    """Images that at least one attack makes recognizable, counted once per defense, seed and target."""
    hit: dict[tuple[object, ...], list[bool]] = {}
    for group in analysis.attacked:
        if group.case.kind != "reconstruction" or group.undefended is defended:
            continue
        for result in group.case.results:
            images = recognizable(result)
            key = group.setting, group.defense, group.case.target, result.cell.training.seed
            hits = hit.setdefault(key, [False] * len(images))
            hits.extend([False] * (len(images) - len(hits)))
            hits[: len(images)] = map(operator.or_, hits, images)
    flags = [flag for hits in hit.values() for flag in hits]
    return Recognized(sum(flags), len(flags)) if flags else None


def _badge(analysis: Analysis) -> Badge:
    worst = _worst(analysis)
    return NOTHING_RATED if worst is None else WORDS[worst.word]


def _worst(analysis: Analysis) -> Rating | None:
    """The rating that decides: of an adversary to whom something is promised, if there is one."""
    return min(analysis.rated, key=lambda one: (one.excluded, [*Word].index(one.word), _share(one)), default=None)


def _share(rating: Rating) -> float:
    return -(rating.people.value if rating.people is not None else 0.0)


def _sentence(analysis: Analysis) -> tuple[str, str]:
    columns = counted(len({group.column for group in analysis.attacked}), "combination")
    frame = f"Measured with {columns} of attack, adversary and target."
    if not analysis.attacked:
        lost = [str(note) for note in analysis.run.study.get("notes", ()) if str(note).startswith("attack ")]
        why = f"Only a floor ran{': ' if lost else ''}{'; '.join(lost)}."
        return "No attack fits this model" if lost else "No attack ran", why
    worst = _worst(analysis)
    if worst is None or not any(group.case.results for group in analysis.judged):
        support = "Every cell that counts here failed, is missing or has no value; see “All results”."
        return f"No attack{' on a defense' if analysis.defended else ''} returned a value", support
    name, promise = (
        analysis.defenses[worst.defense].text,
        ", against whom nothing is promised" if worst.excluded else "",
    )
    support = f"{name}, against {worst.adversary}{promise}: {worst.reason}. {frame}"
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
    of: dict[str, list[Rating]] = gathered((one.defense, one) for one in analysis.rated)
    worst = {name: min(alike, key=lambda one: (one.excluded, [*Word].index(one.word))) for name, alike in of.items()}
    counts = Counter(one.word for one in worst.values() if not one.excluded)
    total, free, parts = counts.total(), len(worst) - counts.total(), list[str]()
    for word, (one, several) in _SAID.items():
        if count := counts[word]:
            of = "" if parts else f" of {counted(total, 'defense')}"
            parts.append(f"{count}{of} {one if count == 1 else several}")
    if weak := counts[Word.WEAK]:
        of = f"{weak} of {counted(total, 'defense')}" if not parts else str(weak)
        parts.append(f"{'the test' if parts else 'The test'} is too weak to tell about {of}")
    rest = f"{counted(free, 'defense')} {'promises' if free == 1 else 'promise'} nothing against these adversaries"
    return "; ".join(filter(None, [", ".join(parts), rest if free else ""]))


def _people_figure(analysis: Analysis) -> Figure:
    known = [(one.people, one) for one in analysis.rated if one.people is not None]
    if not known:
        return ("People recognized", NO_VALUE, "", "No attack picked people out of a lineup.")
    best, rating = max(known, key=lambda pair: pair[0].value)
    detail = f"{analysis.defenses[rating.defense].text}, among {best.among}"
    bare = [one.people for one in analysis.ratings.all if _bare(analysis, one) and one.people is not None]
    if analysis.defended and bare:
        most = max(bare, key=lambda one: one.value)
        detail += f"; no defense: {most.hits} of {most.n}"
    return ("People recognized", str(best.hits), f"of {best.n}", detail)


def _bare(analysis: Analysis, rating: Rating) -> bool:
    return any(group.undefended and group.defense == rating.defense for group in analysis.groups)


def _recognized_figure(analysis: Analysis) -> Figure:
    recognized, undefended = (recognized_images(analysis, defended=defended) for defended in (True, False))
    which, recognized = (" defended", recognized) if analysis.defended else ("", undefended)
    if recognized is not None:
        detail = f"nearest of 100 images and SSIM ≥ {RECOGNIZABLE}, under at least one attack"
        detail += f"; no defense: {undefended.hits} of {undefended.of}" if which and undefended is not None else ""
        return ("Recognizable images", str(recognized.hits), f"of {recognized.of}{which}", detail)
    rates = [
        (estimate.value, group)
        for group in analysis.judged
        for estimate in group.case.estimates("tpr@1%")
        if group.case.kind == "membership" and estimate.value is not None
    ]
    if not rates:
        detail = "No attack that counts here returned an image."
        return ("Recognizable images", NO_VALUE, "", detail)
    rate, group = max(rates, key=lambda pair: pair[0])
    detail = f"{analysis.defenses[group.defense].text}, seed with the highest rate; random guessing: 1 %"
    return ("Members identified", percent(rate), "at 1 % FPR", detail)


def _accuracy_figure(analysis: Analysis) -> Figure:
    costs = []
    for setting, defense in analysis.pairs:
        defended = final_accuracy(analysis.trainings_of(setting, defense))
        there = final_accuracy(analysis.trainings_of(setting, UNDEFENDED))
        if defense != UNDEFENDED and defended is not None and there is not None:
            assert defended.value is not None
            assert there.value is not None
            costs.append((defended.value - there.value, defended.value, there.value, analysis.defenses[defense].text))
    if not costs:
        detail = "Needs the accuracy with and without a defense."
        return ("Largest accuracy cost", NO_VALUE, "", detail)
    change, with_defense, without, name = min(costs)
    detail = f"{name}: {percent(with_defense)}; no defense: {percent(without)}"
    return ("Largest accuracy cost", points(change), "points", detail)


def _origin(analysis: Analysis) -> tuple[str, ...]:
    cells = analysis.run.cells
    commits = dict.fromkeys(f"{e.commit[:10]}{' (dirty)' if e.dirty else ''}" for e in analysis.environments)
    seeds = sorted({cell.training.seed for cell in cells})
    shown = ", ".join(map(str, seeds[:6])) + (f" and {len(seeds) - 6} more" if len(seeds) > 6 else "")
    targets = [group.case.target for group in analysis.attacked]
    counts = sorted({target.count for target in targets if target.kind != "members"})
    return (
        f"Study {analysis.run.name}",
        f"commit {listing(commits) or 'unknown'}",
        listing(dict.fromkeys(cell.training.task.data for cell in cells)),
        listing(dict.fromkeys(cell.training.task.model for cell in cells)),
        f"{'seed' if len(seeds) == 1 else 'seeds'} {shown}",
        *([f"{listing(map(str, counts))} victims per cell"] if counts else []),
    )


def verdict(analysis: Analysis) -> Verdict:
    """The top of the page."""
    run, badge = analysis.run, _badge(analysis)
    sentence, support = _sentence(analysis)
    done = [cell for cell in run.cells if cell.id in run.results]
    warned = sum(any(flag.severity == "warning" for flag in analysis.flags_of(cell)) for cell in done)
    coverage = f"{len(run.failures)} failed, {len(run.missing)} missing, {warned} with a warning"
    figures = (
        _people_figure(analysis),
        _recognized_figure(analysis),
        _accuracy_figure(analysis),
        ("Coverage", str(len(run.results)), f"of {counted(len(run.cells), 'cell')}", coverage),
    )
    return Verdict(sentence, support, badge, broken(analysis), _RULE, figures, _origin(analysis))


SECTION = Section("verdict", "Verdict", "Verdict", verdict, 0)
