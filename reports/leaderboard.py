"""The page of the leaderboard, from the data of `leaderboard.json`, and the same as Markdown.

First the headline: the share of the undefended accuracy that an entry keeps, against the people whom the track's
adversary identifies, one picture for each task and number of bits. Then each track: accuracy over epsilon, and a table
that sorts. Last, how each entry was tuned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from markupsafe import Markup

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import counted, written
from leakgauge.harness.core.metrics import MANY
from leakgauge.harness.core.rating import LEVEL
from leakgauge.harness.core.stats import holm, mean_interval
from leakgauge.harness.core.threats import ADVERSARIES
from leakgauge.reports.charts import plane
from leakgauge.reports.charts.figures import ACCURACY_BETTER, Chart, Point, Series, drawable, slug
from leakgauge.reports.html import page
from leakgauge.reports.sections import FOLDED, TABLES, Section
from leakgauge.reports.sections.asked import drawing
from leakgauge.reports.table import Cell, Column, Fields, Table
from leakgauge.reports.text.notation import NO_VALUE, percent, short, spread

Data = dict[str, Any]

PROVED = 8.0
"""The largest epsilon of a whole run for which a marker is not hollow."""

BITS = {"at most 3 bits a parameter": (0.0, 3.2), "12 bits a parameter or more": (12.0, math.inf)}
"""The pictures of the headline: the range of bits a parameter of a message, with its header. JoPEQ's 2 bits send 3."""

_UNDEFENDED, _TRUSTED = "none", ", by the server, which is trusted here"
_KEPT = 100 / 3  # a tuned entry that keeps a smaller share of the accuracy has no name in a picture
_HEADLINE = """
<h2 id="headline-title">{{ title }}</h2>
<p class="lead">{{ data.lead }}</p>
{% for title, picture in data.pictures %}
<h3>{{ title }}</h3>
<div class="plane">{{ picture }}</div>
{% endfor %}
<p class="note">{{ data.key }}</p>
"""
_TRACK = """
{% from "macros.html" import chart, table %}
<h2 id="{{ id }}-title">{{ title }}</h2>
<p class="lead">{{ data.lead }}</p>
{% if data.charts %}<div class="charts">
{% for drawing in data.charts %}{{ chart(drawing, "%s-chart-%d"|format(id, loop.index), "h3") }}{% endfor %}
</div>{% endif %}
{% for one in data.tables %}
{{ table(one, "%s-table-%d"|format(id, loop.index), style="sorts") }}
{% for note in one.notes %}<p class="note">{{ note }}</p>{% endfor %}
{% endfor %}
"""


def leaderboard(made: Data) -> str:
    """The page; it loads nothing, and the same data give the same page."""
    made = _adjusted(made)
    parts: list[Section[Data]] = [
        Section("headline", "Accuracy kept, against people identified", "Headline", _headline, template=_HEADLINE)
    ]
    parts += [
        Section(slug(f"track {track['name']}"), track["title"], track["name"], partial(_track, track=track), 1, _TRACK)
        for track in _tracks(made)
    ]
    how = "How each entry was tuned"
    parts.append(Section("tuning", how, "Tuning", lambda data: [_tuning(data)], FOLDED, TABLES))
    return page(made["title"], parts, made)


def scoreboard(made: Data, pictures: Sequence[str] = (), drawn: Mapping[str, str] | None = None) -> str:
    """The tables of all tracks as Markdown, for a page under version control.

    Args:
        pictures: addresses of `headline`'s.
        drawn: addresses of the pictures of `charts`, by the chart's name.
    """
    made = _adjusted(made)
    lines = [line for one in pictures for line in (f"![Accuracy that is kept, against people identified]({one})", "")]
    for track in _tracks(made):
        its = [line for line in made["lines"] if line["track"] == track["name"]]
        lines += [f"## {track['title']}", "", _lead(track, its), ""]
        shown = [(one.title, drawn[one.name]) for one in charts(made, track) if drawn and one.name in drawn]
        lines += [line for title, address in shown for line in (f"![{title}]({address})", "")]
        lines += [table.markdown() for table in _tables(made, track)]
    lines += ["## What each entry is good for", ""]
    lines += [f"- **{entry['name']}**: {entry['good_for']}" for entry in made["entries"] if entry["good_for"]]
    return "\n".join([*lines, "", "## How each entry was tuned", "", _tuning(made).markdown()]) + "\n"


def _tracks(made: Data) -> list[Data]:
    """The tracks that have lines."""
    used = {line["track"] for line in made["lines"]}
    return [track for track in made["tracks"] if track["name"] in used]


def _adjusted(made: Data) -> Data:
    """The board with every p of its findings adjusted by Holm over all lines; within a line they are already."""
    found = [one for line in made["lines"] for one in line.get("found", ())]
    adjusted = iter(holm(np.array([one["p"] for one in found])).tolist())
    lines = [
        {**line, "found": [{**one, "p": next(adjusted)} for one in line["found"]]} if "found" in line else line
        for line in made["lines"]
    ]
    return {**made, "lines": lines}


def headline(made: Data) -> dict[str, Markup]:
    """The pictures of the headline, by title."""
    return {
        f"{task['name']}, {bits}": plane.drawn(spots, _frame())
        for task in made["tasks"]
        for bits, ends in BITS.items()
        if (spots := list(_spots(made, task["name"], *ends)))
    }


def _headline(made: Data) -> Data | None:
    pictures = headline(made)
    if not pictures:
        return None
    return {
        "pictures": list(pictures.items()),
        "lead": f"Each entry at its tuned best. The lower right corner is the best: the accuracy of a model without a "
        f"defense, and nobody is recognized among {MANY} people.",
        "key": f"Filled: an epsilon of at most {PROVED:g} is proved for a client and the whole run, against the "
        "adversary that identified these people. Half: only against one that sees less. Hollow: against nobody. The "
        "adversary is that of the entry's track: behind a secure sum it sees a round's sum, and knows all other "
        "updates. Where it sees only models, people are identified by a server, which is trusted there. Each "
        f"entry is at its largest epsilon up to {PROVED:g}; of many, those that keep little have no name.",
    }


def _frame() -> plane.Frame:
    lines = ((100 / MANY, f"by guessing: 1 of {MANY}", "floor"),)
    what = f"people identified among {MANY}, by one round"
    return plane.Frame("share of the undefended accuracy", what, lines, None, None)


def _spots(made: Data, task: str, least: float, most: float) -> Iterator[plane.Spot]:
    """Each entry of a track, at its largest epsilon up to `PROVED`."""
    whole, largest = _undefended(made, task), dict[tuple[str, str], Data]()
    if not whole:
        return
    for line in sorted(made["lines"], key=lambda line: line["epsilon"] or 0.0):
        if line["task"] == task and line["accuracy"] and (line["epsilon"] or 0.0) <= PROVED:
            largest[line["entry"], line["track"]] = line
    several = {entry for entry, alike in gathered((entry, track) for entry, track in largest).items() if len(alike) > 1}
    for (entry, track), line in largest.items():
        found = _people(line)
        if found is None or not least <= line["bits"] <= most:
            continue
        share = [100 * one / whole for one in line["accuracy"]]
        low, high = mean_interval(share)
        x, name = min(fmean(share), 100.0), f"{_name(line)}, {track}" if entry in several else _name(line)
        yield plane.Spot(
            name=name,
            note="",
            about=f"{name}, {track}: {percent(found['value'])} identified by {_who(found['adversary'])}",
            state=_state(line, found["adversary"]),
            x=x,
            left=x if low is None else min(x, max(0.0, low)),
            right=x if high is None else min(high, 100.0),
            y=100 * found["value"],
            low=100 * (found["low"] or 0.0),
            high=100 * (found["high"] or 0.0),
            named=x >= _KEPT or line["epsilon"] is None,
        )


def _who(adversary: str) -> str:
    return ADVERSARIES.get(adversary, adversary)


def _state(line: Data, adversary: str) -> str:
    """Whether an epsilon of at most `PROVED` is proved for a client in the whole run, against this or any adversary."""
    own = line["proved"].get(adversary, "inf")
    return "full" if _small(own) else "half" if any(map(_small, line["proved"].values())) else "hollow"


def _small(epsilon: float | str) -> bool:
    return not isinstance(epsilon, str) and epsilon <= PROVED * 1.001


def _people(line: Data) -> Data | None:
    """The attack that identified the largest share of people among `MANY`."""
    counted = [one for one in line.get("found", ()) if one["among"] >= MANY]
    return max(counted, key=lambda one: one["value"], default=None)


def _undefended(made: Data, task: str) -> float | None:
    known = [line for line in made["lines"] if line["defense"] == _UNDEFENDED and line["task"] == task]
    return max((fmean(line["accuracy"]) for line in known if line["accuracy"]), default=None)


def _epsilon(line: Data) -> str:
    return "" if line["epsilon"] is None else f"ε = {line['epsilon']:g}"


def _name(line: Data) -> str:
    return ", ".join(filter(None, (line["entry"], _epsilon(line))))


def _lead(track: Data, lines: Sequence[Data]) -> str:
    ranks = (
        "A new rank begins at an entry that is .005 or more behind the one before it, and surely behind one of that "
        "rank (paired t tests over the seeds, Holm). Entries of one rank are not told apart by these seeds."
    )
    if all(line["epsilon"] is None for line in lines):
        return f"No epsilon is asked for: each defense has its own parameters. {ranks}"
    return f"Epsilon protects a {track['unit']} in the whole run, against {_who(track['adversary'])}. {ranks}"


def _track(made: Data, *, track: Data) -> Data:
    return {
        "lead": _lead(track, [line for line in made["lines"] if line["track"] == track["name"]]),
        "charts": [drawing(one, slug(track["name"])) for one in charts(made, track)],
        "tables": _tables(made, track),
    }


def charts(made: Data, track: Data) -> list[Chart]:
    """The share of the undefended accuracy over epsilon: one for each task on which the track has an epsilon."""
    every = (_chart(made, track, task["name"]) for task in made["tasks"])
    return [drawable(one) for one in every if one.series]


def _chart(made: Data, track: Data, task: str) -> Chart:
    """The share of the undefended accuracy over epsilon."""
    whole, lines = _undefended(made, task) or 0.0, _of(made, track, task)
    known = gathered((line["entry"], line) for line in lines if line["accuracy"] and line["epsilon"] is not None)
    known = known if whole else {}
    series, rows = list[Series](), list[tuple[str, ...]]()
    for at, (name, alike) in enumerate(known.items()):
        points = []
        for line in alike:
            share = [100 * one / whole for one in line["accuracy"]]
            low, high = mean_interval(share)
            points.append(Point(line["epsilon"], fmean(share), low, high))
            rows.append((name, short(line["epsilon"]), percent(fmean(share) / 100), spread(low, high), str(len(share))))
        series.append(Series(name, tuple(points), at))
    return Chart(
        *(slug(f"{track['name']} {task}"), f"{task}: accuracy that is kept", "epsilon of the whole run"),
        *("% of the undefended accuracy", tuple(series), ACCURACY_BETTER),
        caption=f"Means over seeds of separately tuned entries; bars: 95 % intervals. Undefended: {short(whole, 3)}.",
        header=("Entry", "epsilon", "share", "95 %", "n"),
        rows=tuple(rows),
        log_x=True,
    )


def _of(made: Data, track: Data, task: str) -> list[Data]:
    return [line for line in made["lines"] if line["track"] == track["name"] and line["task"] == task]


def _tables(made: Data, track: Data) -> list[Table]:
    """A table for each task."""
    names = ("Epsilon", "Rank", "Accuracy", "Of undefended", "Bits")
    numbers = [Column(name, "num") for name in names]
    columns: tuple[Column | str, ...] = ("Entry", *numbers, "Identified", "Also found", "Audited")
    tables, good_for = [], {entry["name"]: entry["good_for"] for entry in made["entries"]}
    for task in made["tasks"]:
        lines = _of(made, track, task["name"])
        whole = _undefended(made, task["name"])
        order = sorted(lines, key=lambda line: (line["epsilon"] or math.inf, -fmean(line["accuracy"] or [0.0])))
        rows = tuple(_row(line, whole, good_for.get(line["entry"], "")) for line in order if line["accuracy"])
        lacking = gathered((line["entry"], line) for line in lines if not line["accuracy"])
        notes = [_missing(name, alike, lines) for name, alike in lacking.items()]
        notes += [f"{_name(line)}: {text}." for line in order for text in line.get("failed", ())]
        if rows or notes:
            tables.append(Table(task["name"], columns, rows, notes=tuple(notes)))
    return tables


def _missing(name: str, alike: Sequence[Data], lines: Sequence[Data]) -> str:
    """Why an entry has no result at some epsilons, or at all."""
    where = (
        ""
        if len(alike) == sum(line["entry"] == name for line in lines)
        else f" at ε = {', '.join(short(line['epsilon']) for line in alike)}"
    )
    what = "no result" if any(line["trials"] for line in alike) else "not in this track"
    return f"{name}: {what}{where}. {alike[0]['note']}."


def _row(line: Data, whole: float | None, good_for: str) -> Fields:
    mean, (low, high) = fmean(line["accuracy"]), mean_interval(line["accuracy"])
    people, audit = _people(line), line["audited"]
    others = [one for one in line["found"] if not one["n"] and one["value"] and one["p"] <= LEVEL]
    own = people is not None and people["adversary"] == line["adversary"]
    return (
        Cell(line["entry"], below=(good_for,) if good_for else ()),
        "not asked" if line["epsilon"] is None else short(line["epsilon"]),
        str(line.get("rank", "")),
        Cell(_three(mean), spread(low, high, _three)),
        percent(mean / whole) if whole else NO_VALUE,
        short(line["bits"], 3),
        NO_VALUE if people is None else Cell(percent(people["value"]), _surely(people) + _TRUSTED * (not own)),
        "; ".join(f"{one['what']}, {short(one['value'], 3)}" for one in others),
        NO_VALUE if audit is None else Cell(audit["code"], _at_least(audit)),
    )


def _at_least(audit: Data) -> str:
    """The lower bound beside what is proved, both in the audit's small federation."""
    proved = "∞" if audit["proved"] is None else short(audit["proved"], 3)
    where = f"{audit['unit']}, {audit['horizon']}, {audit['threat']}, {counted(audit['clients'], 'client')}"
    return f"at least {short(audit['strict'], 3)} of {proved} ({where})"


def _three(share: float) -> str:
    return f"{min(max(share, 0.0), 1.0):.3f}".removeprefix("0")


def _surely(people: Data) -> str:
    return spread(people["low"], people["high"], percent)


def _tuning(made: Data) -> Table:
    """Every setting that was tried, with its accuracies on validation records by stage."""
    rows = [
        (
            *(line["task"], line["track"], Cell(line["entry"], strong=trial["kept"]), _epsilon(line)),
            written(trial["setting"], trial["setting"]),
            "; ".join(" ".join(_three(score) for score in scores) for scores in trial["scores"]),
        )
        for line in made["lines"]
        for trial in line["trials"]
        if trial["scores"]
    ]
    lead = "Accuracies on validation records, by stage; an early stage ends after a part of the rounds."
    number = sum(len(scores) for line in made["lines"] for trial in line["trials"] for scores in trial["scores"])
    text = f"{counted(number, 'training')} of tuning. None of them saw a test record."
    columns: tuple[Column | str, ...] = ("Task", "Track", "Entry", "Epsilon", "Setting", Column("Accuracies", "text"))
    return Table("Settings that were tried; the chosen one is bold", columns, tuple(rows), lead, (text,))
