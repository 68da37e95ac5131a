"""The first thing on the page: one sentence, a badge and four figures, each traceable to a row below."""

from __future__ import annotations

from typing import NamedTuple

from leakgauge.harness.core.result import Environment
from leakgauge.reports.pool import accuracy
from leakgauge.reports.sections.checked import Badge, Broken, broken
from leakgauge.reports.select import HIGH, LOW, RECOGNIZABLE, Analysis, Group, Recognized, Word, is_recognizable
from leakgauge.reports.text.notation import fixed, interval, listing, metric, percent, plural, points


class Figure(NamedTuple):
    """One number of the four: what it is, its value, its unit, where it comes from."""

    title: str
    value: str
    unit: str
    detail: str


class Verdict(NamedTuple):
    """The top of the page. `rule` says when the badge reads how; `origin` is the provenance line.

    `broken`: the claims that do not hold; the badge is about leakage and does not look at them.
    """

    sentence: str
    support: str
    badge: Badge
    broken: Broken | None
    rule: str
    figures: tuple[Figure, ...]
    origin: tuple[str, ...]


LEAKS = Badge("bad", "✕", "Leaks")
PARTLY = Badge("warn", "!", "Leaks in part")
NOTHING_SEEN = Badge("good", "○", "Nothing recognizable")
NEAR_FLOOR = Badge("good", "○", "Close to the floor")
NO_VERDICT = Badge("none", "?", "No verdict")


def recognized_images(analysis: Analysis, *, defended: bool) -> Recognized | None:
    """Images that at least one attack makes recognizable, counted once a defense, seed and target."""
    hit: dict[tuple[object, ...], list[bool]] = {}
    for group in analysis.attacked:
        if group.kind != "reconstruction" or group.undefended is defended:
            continue
        for result in group.results:
            values = next((e.values for e in result.estimates if e.name == "ssim"), ())
            key = group.setting, group.defense.label, group.column.target, result.cell.training.seed
            seen = hit.setdefault(key, [False] * len(values))
            seen.extend([False] * (len(values) - len(seen)))
            for at, value in enumerate(values):
                seen[at] = seen[at] or is_recognizable(value)
    images = [found for seen in hit.values() for found in seen]
    return Recognized(sum(images), len(images)) if images else None


def badge(analysis: Analysis) -> Badge:
    """The worst word among the defended groups decides; without words, whether an image is recognizable."""
    groups = [group for group in analysis.attacked if not group.undefended and group.value is not None]
    words: set[Word] = {analysis.rating(group).word for group in groups}
    found = recognized_images(analysis, defended=True)
    if "High" in words:
        return LEAKS
    if "Moderate" in words:
        return PARTLY
    if "Low" in words:
        return NOTHING_SEEN if found is not None and found.hits == 0 else NEAR_FLOOR
    return LEAKS if found is not None and found.hits else NO_VERDICT


def rule() -> str:
    """When the badge says what."""
    return (
        f"“Leaks”: some defended case is High, which means at least {100 * HIGH:.0f} % of the way from the floor to "
        f"the ceiling, or more recognizable images (SSIM ≥ {RECOGNIZABLE}) than the floor has. “Leaks in part”: none "
        f"is High, one is at least {100 * LOW:.0f} % of the way. “Nothing recognizable” and “Close to the floor”: all "
        "are below that. Each word holds for the attacks and adversaries of this report only. Claimed epsilons do not "
        "enter."
    )


def describe(analysis: Analysis, group: Group) -> str:
    """Defense, attack, adversary and target of a group in one phrase."""
    return f"{analysis.defenses[group.defense.label].text} under {analysis.column_text(group.column)}"


def _sentence(analysis: Analysis, state: Badge, worst: Group | None) -> tuple[str, str]:
    """The headline, and the line below it."""
    defended = [group for group in analysis.attacked if not group.undefended]
    total = len({group.defense.label for group in defended})
    known = plural(len({group.column.key for group in analysis.attacked}), "combination")
    frame = f"Measured with {known} of attack, adversary and target."
    if not defended:
        return "No defense was measured", f"The numbers show what leaks without one. {frame}"
    if worst is None:
        return (
            "No attack on a defense gave a number",
            "Every such cell failed, is missing or has no value; see all results.",
        )
    worst_text = (
        f"The case that leaks most is {describe(analysis, worst)}: {metric(worst.metric)} {fixed(worst.value)}."
    )
    rated = {"High": "High", "Moderate": "Moderate"}
    found = recognized_images(analysis, defended=True)
    if state is LEAKS:
        bad = {g.defense.label for g in defended if analysis.rating(g).word == "High"}
        bad = bad or {g.defense.label for g in defended if g.recognized and g.recognized.hits}
        text = (
            f"{len(bad)} of {plural(total, 'defense')} {'leaks' if len(bad) == 1 else 'leak'} to the attacks that ran"
        )
        return text, f"{worst_text} {frame}"
    if state is PARTLY:
        part = {g.defense.label for g in defended if analysis.rating(g).word in rated}
        text = f"{len(part)} of {plural(total, 'defense')} {'leaks' if len(part) == 1 else 'leak'} in part"
        return text, f"No case is High. {worst_text} {frame}"
    if state is NOTHING_SEEN and found is not None:
        text = "No image was recognizable under any defense"
        return text, f"By SSIM ≥ {RECOGNIZABLE}, with the attacks that ran. {worst_text} {frame}"
    if state is NEAR_FLOOR:
        return "Every defended case is close to the floor", f"With the attacks that ran. {worst_text} {frame}"
    reasons = dict.fromkeys(analysis.rating(group).why for group in defended if group.value is not None)
    return "The numbers allow no verdict", f"No defended case is rated: {'; '.join(reasons)}. {worst_text}"


def _worst_figure(analysis: Analysis, worst: Group | None) -> Figure:
    """The defended case that leaks most, with its floor and ceiling."""
    if worst is None or worst.estimate is None:
        return Figure("Worst defended case", "n/a", "", "No defended case has a number.")
    ceiling, floor = analysis.ceiling(worst), analysis.floor_value(worst)
    bounds = f"no defense {fixed(ceiling.value)}" if ceiling is not None else "no ceiling measured"
    bounds += f", floor {fixed(floor)}" if floor is not None else ", no floor measured"
    spread = f" ({interval(worst.estimate)})" if interval(worst.estimate) else ""
    name = analysis.defenses[worst.defense.label].text
    return Figure("Worst defended case", fixed(worst.value), metric(worst.metric), f"{name}{spread}; {bounds}")


def _recognized_figure(analysis: Analysis) -> Figure:
    """How many defended images are recognizable; for membership only, the worst rate at few false alarms."""
    found, open_ = recognized_images(analysis, defended=True), recognized_images(analysis, defended=False)
    if found is not None:
        detail = f"SSIM ≥ {RECOGNIZABLE} under at least one attack"
        detail += f"; no defense: {open_.hits} of {open_.of}" if open_ is not None else ""
        return Figure("Recognizable images", str(found.hits), f"of {found.of} defended", detail)
    rates = [
        (estimate.value, group)
        for group in analysis.defended("membership")
        for result in group.results
        for estimate in result.estimates
        if estimate.name == "tpr@1%" and estimate.value is not None
    ]
    if not rates:
        return Figure("Recognizable images", "n/a", "", "No reconstruction attack gave a number on a defense.")
    rate, group = max(rates, key=lambda pair: pair[0])
    name = analysis.defenses[group.defense.label].text
    return Figure(
        "Members identified", percent(rate), "at 1 % false alarms", f"{name}, its worst seed; blind guessing: 1 %"
    )


def _accuracy_figure(analysis: Analysis) -> Figure:
    """The largest loss of accuracy against no defense in the same setting."""
    costs = []
    for setting, defense in analysis.pairs:
        mine = accuracy(analysis.trainings.get((setting, defense), ()))
        theirs = accuracy(analysis.trainings.get((setting, "none"), ()))
        if defense != "none" and mine is not None and theirs is not None:
            assert mine.value is not None
            assert theirs.value is not None
            costs.append((mine.value - theirs.value, mine.value, theirs.value, analysis.defenses[defense].text))
    if not costs:
        return Figure(
            "Largest accuracy cost", "n/a", "", "Needs a defended and an undefended training with an accuracy."
        )
    change, mine_value, theirs_value, name = min(costs)
    detail = f"{name}: {percent(mine_value)} against {percent(theirs_value)} without a defense"
    return Figure("Largest accuracy cost", points(change), "points", detail)


def _coverage_figure(analysis: Analysis) -> Figure:
    """Cells that finished, failed and are missing, and the warnings on those that finished."""
    run = analysis.run
    done = [cell for cell in run.cells if cell.id in run.results]
    warned = sum(any(flag.severity == "warning" for flag in analysis.flags_of(cell)) for cell in done)
    parts = [f"{len(run.failures)} failed", f"{len(run.missing)} missing", f"{warned} with a warning"]
    return Figure("Coverage", str(len(run.results)), f"of {plural(len(run.cells), 'cell')}", ", ".join(parts))


def environments(analysis: Analysis) -> tuple[Environment, ...]:
    """The distinct environments of trainings and results."""
    run = analysis.run
    found = [record.environment for record in run.trainings.values()] + [r.environment for r in run.results.values()]
    distinct: list[Environment] = []
    for environment in found:
        if environment not in distinct:
            distinct.append(environment)
    return tuple(distinct)


def _origin(analysis: Analysis) -> tuple[str, ...]:
    """Where the numbers come from, in short pieces."""
    cells = analysis.run.cells
    commits = dict.fromkeys(f"{e.commit[:10]}{' (dirty)' if e.dirty else ''}" for e in environments(analysis))
    data = dict.fromkeys(cell.training.task.data for cell in cells)
    models = dict.fromkeys(cell.training.task.model for cell in cells)
    seeds = sorted({cell.training.seed for cell in cells})
    shown = ", ".join(map(str, seeds[:6])) + (f" and {len(seeds) - 6} more" if len(seeds) > 6 else "")
    counts = sorted({group.column.target.count for group in analysis.attacked if group.column.target.kind != "members"})
    images = [f"{listing(map(str, counts))} victims a cell"] if counts else []
    return (
        f"Study {analysis.run.name}",
        f"commit {listing(commits) or 'unknown'}",
        listing(data),
        listing(models),
        f"{'seed' if len(seeds) == 1 else 'seeds'} {shown}",
        *images,
    )


def verdict(analysis: Analysis) -> Verdict:
    """The top of the page."""
    defended = [group for group in analysis.attacked if not group.undefended]
    by_place = [(analysis.rating(group).place, group) for group in defended]
    placed = [(place, group) for place, group in by_place if place is not None]
    images = analysis.best(analysis.defended("reconstruction"))
    worst = images or analysis.best(defended)
    if placed:
        furthest = max(placed, key=lambda pair: pair[0])[1]
        # of that metric the highest number, as the page shows it; places are only for choosing between metrics
        worst = analysis.best([group for _, group in placed if group.metric == furthest.metric])
    state = badge(analysis)
    sentence, support = _sentence(analysis, state, worst)
    figures = (
        _worst_figure(analysis, worst),
        _recognized_figure(analysis),
        _accuracy_figure(analysis),
        _coverage_figure(analysis),
    )
    return Verdict(sentence, support, state, broken(analysis), rule(), figures, _origin(analysis))
