"""The top of the page: one sentence, a badge and four numbers, each traceable to a row below."""

from __future__ import annotations

import operator
from typing import NamedTuple

from leakgauge.harness.core.labels import UNDEFENDED, case_text, counted, where
from leakgauge.harness.core.metrics import RECOGNIZABLE
from leakgauge.reports.sections import Section
from leakgauge.reports.sections.checked import Badge, broken
from leakgauge.reports.select import HIGH, LOW, Analysis, Group, Recognized, Word, best, final_accuracy, recognizable
from leakgauge.reports.text.notation import NO_VALUE, fixed, interval, listing, percent, points

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


LEAKS = Badge("bad", "✕", "Leaks")
PARTLY = Badge("warn", "!", "Leaks in part")
NOTHING_SEEN = Badge("good", "○", "Nothing recognizable")
NEAR_FLOOR = Badge("good", "○", "Close to the floor")
NO_VERDICT = Badge("none", "?", "No verdict")

_RULE = (
    f"“Leaks”: at least one defended case is High: it is at least {percent(HIGH, 0)} of the way from the floor to "
    f"the ceiling, or has more recognizable images (SSIM ≥ {RECOGNIZABLE}, nearer to the original than to 99 others) "
    "than the floor; or a case without a ceiling, as in a study without a defense, beats its floor. "
    f"“Leaks in part”: no case is High, at least one reaches {percent(LOW, 0)} of the way. “Nothing "
    "recognizable” and “Close to the floor”: all rated cases are below that, or their interval contains the floor (“at "
    "floor”). The badge is valid only for the attacks and adversaries of this report. It does not depend on claimed "
    "epsilons."
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
    words: set[Word] = {analysis.rating(group).word for group in analysis.judged if group.value is not None}
    recognized = recognized_images(analysis, defended=bool(analysis.defended))
    if words & {"High", "leaks"}:
        return LEAKS
    if "Moderate" in words:
        return PARTLY
    if words & {"Low", "at floor"}:
        return NOTHING_SEEN if recognized is not None and recognized.hits == 0 else NEAR_FLOOR
    return LEAKS if recognized is not None and recognized.hits else NO_VERDICT


def _sentence(analysis: Analysis, badge: Badge, worst: Group | None) -> tuple[str, str]:
    columns = counted(len({group.column for group in analysis.attacked}), "combination")
    frame = f"Measured with {columns} of attack, adversary and target."
    if not analysis.attacked:
        lost = [str(note) for note in analysis.run.study.get("notes", ()) if str(note).startswith("attack ")]
        why = f"Only a floor ran{': ' if lost else ''}{'; '.join(lost)}."
        return "No attack fits this model" if lost else "No attack ran", why
    if worst is None:
        support = "Every cell that counts here failed, is missing or has no value; see “All results”."
        return f"No attack{' on a defense' if analysis.defended else ''} returned a value", support
    case = worst.case
    name = case_text(
        analysis.defenses[worst.defense].text, analysis.attack_text(worst), case.threat, where(case.target)
    )
    most = "The highest value is of" if badge is NO_VERDICT else "The case that leaks most is"
    value = ", ".join(filter(None, [f"{worst.metric.words} {fixed(worst.value)}", analysis.unpromised(worst)]))
    support = f"{most} {name}: {value}.{_through(analysis)}"
    rated = [(group, analysis.rating(group)) for group in analysis.judged]
    if badge is LEAKS:
        if not analysis.defended:
            return "Without a defense, this training leaks", f"{support} {frame}"
        high = {group.defense for group, rating in rated if rating.word in ("High", "leaks")}
        high = high or {group.defense for group, _ in rated if group.recognized and group.recognized.hits}
        return f"{_leaking(analysis, high)} under the attacks that ran", f"{support} {frame}"
    if badge is PARTLY:
        moderate = {group.defense for group, rating in rated if rating.word == "Moderate"}
        return f"{_leaking(analysis, moderate)} in part", f"No case is High. {support} {frame}"
    if badge is NOTHING_SEEN:
        scope = f"Criterion: nearest of 100 images and SSIM ≥ {RECOGNIZABLE}, under the attacks that ran."
        return "No image was recognizable under any defense", f"{scope} {support} {frame}"
    if badge is NEAR_FLOOR:
        return "Every defended case is close to the floor", f"Under the attacks that ran. {support} {frame}"
    reasons = dict.fromkeys(rating.why for group, rating in rated if group.value is not None)
    weak = "Too weak to tell: no attack beats the floor" if "too weak to tell" in {r.word for _, r in rated} else ""
    return weak or "The numbers allow no verdict", f"No case is rated: {'; '.join(reasons)}. {support}"


_FOUND = {
    "reconstruction": "Inputs are reconstructed",
    "lineup": "People are named",
    "membership": "Members are found",
    "labels": "Labels are found",
    "source": "Records are traced to their client",
    "linkability": "Messages of one client are linked",
    "property": "Properties of the data are found",
}


def _through(analysis: Analysis) -> str:
    words: dict[str, dict[str, set[Word]]] = {}
    for group in analysis.judged:
        found = words.setdefault(analysis.defenses[group.defense].text, {})
        found.setdefault(group.case.kind, set()).add(analysis.rating(group).word)
    leaking = {
        kind: [name for name, kinds in words.items() if kinds.get(kind, set()) & {"High", "Moderate", "leaks"}]
        for kind in _FOUND
    }
    way = "through " if analysis.defended else "with "
    sentences = [f" {text} {way}{listing(leaking[kind])}." for kind, text in _FOUND.items() if leaking[kind]]
    quiet = [name for name, kinds in words.items() if set().union(*kinds.values()) <= {"Low", "at floor"}]
    return "".join([*sentences, f" No attack on {listing(quiet)} gets far above the floor." if quiet else ""])


def _leaking(analysis: Analysis, defenses: set[str]) -> str:
    """`2 of 3 defenses leak`; a defense at several settings counts once, and leaks if it leaks at one setting."""
    names = {group.defense: group.case.training.defense.name for group in analysis.defended}
    count, total = len({names[defense] for defense in defenses}), len(set(names.values()))
    return f"{count} of {counted(total, 'defense')} {'leaks' if count == 1 else 'leak'}"


def _worst_figure(analysis: Analysis, worst: Group | None) -> Figure:
    title = "Worst defended case" if analysis.defended else "Worst case"
    if worst is None or worst.estimate is None:
        return (title, NO_VALUE, "", "No case has a number.")
    ceiling, floor, ends = analysis.ceiling(worst), analysis.floor_value(worst), interval(worst.estimate)
    detail = analysis.defenses[worst.defense].text + (f" ({ends})" if ends else "")
    if not worst.undefended:
        detail += f"; no defense {fixed(ceiling.value)}" if ceiling is not None else "; no ceiling measured"
    detail += f", floor {fixed(floor)}" if floor is not None else ", no floor measured"
    return (title, fixed(worst.value), worst.metric.words, detail)


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


def _worst(analysis: Analysis) -> Group | None:
    """The judged group that leaks most: the nearest to its ceiling; without ratings, reconstruction comes first."""
    rated = [(place, group) for group in analysis.judged if (place := analysis.rating(group).place) is not None]
    if not rated:
        images = [group for group in analysis.judged if group.case.kind == "reconstruction"]
        return best(images) or best(analysis.judged)
    furthest = max(rated, key=lambda pair: pair[0])[1]
    # ratings only choose the metric: the page shows the highest value of the chosen metric
    return best([group for _, group in rated if group.metric == furthest.metric])


def verdict(analysis: Analysis) -> Verdict:
    """The top of the page."""
    run, badge, worst = analysis.run, _badge(analysis), _worst(analysis)
    sentence, support = _sentence(analysis, badge, worst)
    done = [cell for cell in run.cells if cell.id in run.results]
    warned = sum(any(flag.severity == "warning" for flag in analysis.flags_of(cell)) for cell in done)
    coverage = f"{len(run.failures)} failed, {len(run.missing)} missing, {warned} with a warning"
    figures = (
        _worst_figure(analysis, worst),
        _recognized_figure(analysis),
        _accuracy_figure(analysis),
        ("Coverage", str(len(run.results)), f"of {counted(len(run.cells), 'cell')}", coverage),
    )
    return Verdict(sentence, support, badge, broken(analysis), _RULE, figures, _origin(analysis))


SECTION = Section("verdict", "Verdict", "Verdict", verdict, 0)
