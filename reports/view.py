"""The pages of a folder of runs: all runs, one run, one cell, and runs side by side. Each is made on its own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from urllib.parse import quote

from leakgauge.harness.core.cell import Cell as Question
from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.labels import counted, part_text, setting_key, shown_name, where, written
from leakgauge.harness.core.metrics import metric
from leakgauge.harness.core.rating import Word
from leakgauge.harness.core.result import ClaimRecord
from leakgauge.harness.core.stats import cut
from leakgauge.harness.gate.compare import CAPTION, ORDINALS, Comparison
from leakgauge.reports.compared import side_by_side
from leakgauge.reports.export import status_of
from leakgauge.reports.html import page
from leakgauge.reports.sections import TABLES, Section
from leakgauge.reports.sections.checked import stated, verdict_of
from leakgauge.reports.sections.pictures import of_cell
from leakgauge.reports.sections.ratings import WORDS, ratings
from leakgauge.reports.sections.results import everything
from leakgauge.reports.select import Analysis
from leakgauge.reports.table import Cell, Column, Fields, Table
from leakgauge.reports.text.notation import duration, fixed, interval, measured, number, per, percent, short, size

_TOP = f'{{% set heading = "h1" %}}{TABLES}'
"""The template of the first section of a page."""

_ABOUT = ("What", Column("Value", "text"))


class Links(NamedTuple):
    """The addresses of the pages: on a server, or of files, for a page that lies `up` below the first page.

    files: the file name of each run, which is safe in a path; None: on a server.
    """

    files: Mapping[str, str] | None = None
    up: str = "/"

    def to(self, *parts: str) -> str:
        """Of no parts, `compare`, or `run`, the name of a run, and `report`, `dossier`, or `cell` and its id."""
        if self.files is None:
            return self.up + "/".join(quote(part, safe="") for part in parts)
        safe = [self.files[part] if at == 1 else part for at, part in enumerate(parts)]
        return f"{self.up}{'/'.join(safe) or 'index'}.html"


class Shown(NamedTuple):
    """A run that has pages.

    Attributes:
        log: the lines of its `run.log`.
        more: the other pages that it has: `report`, `dossier`.
    """

    name: str
    analysis: Analysis
    log: Sequence[str]
    more: tuple[str, ...]


def row(name: str, analysis: Analysis) -> Fields:
    """A run in the list of runs: progress, ratings as in its report, and the code that made it."""
    run, counts = analysis.run, Counter(one.word for one in analysis.rated)
    worst = min(analysis.rated, key=lambda one: [*Word].index(one.word), default=None)
    left = [f"{len(lost)} {what}" for lost, what in ((run.failures, "failed"), (run.missing, "missing")) if lost]
    done = str(100 * len(run.results) // max(1, len(run.cells)))
    rated = Cell("Nothing was rated")
    if worst is not None:
        about = f"{analysis.defenses[worst.defense].text}: {worst.reason}"
        rated = Cell(WORDS[worst.word].words, below=(about,), tone=WORDS[worst.word].tone)
    commits = dict.fromkeys(e.commit[:10] + " (changed)" * e.dirty for e in analysis.environments)
    cells = Cell(f"{len(run.results)}\u00a0of\u00a0{len(run.cells)}", below=tuple(left))
    return name, done, cells, rated, *(str(counts[word]) for word in WORDS), ", ".join(commits) or "no commit"


def unreadable(name: str, why: str) -> Fields:
    """A folder in the list of runs whose study cannot be read."""
    return name, "0", "", Cell("Cannot be read", below=(why,), tone="bad"), *[""] * len(WORDS), ""


def home_page(place: str, rows: Sequence[Fields], links: Links) -> str:
    """The list of all runs, and a form to compare some of them."""
    words = [Column(badge.words, "num") for badge in WORDS.values()]
    head: tuple[Column | str, ...] = ("Run", Column("Finished", "bar"), "Cells", "Worst rating")
    names = [str(one[0]) for one in rows if one[2]]
    linked = tuple((Cell(str(one[0]), link=links.to("run", str(one[0])) if one[2] else ""), *one[1:]) for one in rows)
    lead = f"{counted(len(rows), 'run')} in {place}. Open this page again to see how far they are."
    table = Table(
        "Runs, and how many of their defenses have which rating",
        (*head, *words, Column("Commit", "mono")),
        linked,
        lead,
    )
    asked = None if len(names) < 2 else {"names": () if links.files else names, "to": links.to("compare")}
    parts: list[Section[None]] = [
        Section("runs", "Runs", "Runs", lambda _: [table], template=_TOP),
        Section("compare", "Compare", "Compare", lambda _: asked, template='{% include "compare.html" %}'),
    ]
    return page(place, parts, None, home=links.to(), linked=bool(links.files), asks=not links.files)


def run_page(shown: Shown, links: Links) -> str:
    """One run: its ratings, and all its cells."""
    before, _, behind = links.to("run", shown.name, "cell", "ID").rpartition("ID")
    parts: list[Section[Analysis]] = [
        Section("run", shown.name, "Run", lambda _: [_about(shown, links)], template=_TOP),
        Section("ratings", "Ratings", "Ratings", lambda one: ratings(one) or None, template=TABLES),
        Section("results", "All cells", "All cells", partial(everything, cells=(before, behind))),
    ]
    return page(shown.name, parts, shown.analysis, home=links.to(), linked=bool(links.files))


def _about(shown: Shown, links: Links) -> Table:
    run = shown.analysis.run
    counts = f"{len(run.results)} of {len(run.cells)} finished"
    lost = f"{len(run.failures)} failed, {len(run.missing)} missing"
    rows: list[Fields] = [
        ("Study", Cell(run.name, str(run.study.get("title", "")))),
        ("Cells", Cell(counts, lost, below=run.faults)),
    ]
    rows += [(f"Its {name}", Cell(f"open the {name}", link=links.to("run", shown.name, name))) for name in shown.more]
    return Table("About this run", _ABOUT, tuple(rows))


class _Asked(NamedTuple):
    shown: Shown
    cell: Question
    links: Links

    @property
    def origin(self) -> str:
        return self.shown.analysis.origin


def cell_page(shown: Shown, cell: Question, links: Links) -> str:
    """One cell: its question and its answer, with pictures, log, claims and messages."""
    parts: list[Section[_Asked]] = [
        Section("question", "One cell", "Question", _question, template=_TOP),
        Section("estimates", "Estimates", "Estimates", _estimates, template=TABLES),
        Section("flags", "Flags", "Flags", _flags, template=TABLES),
        Section("pictures", "Pictures", "Pictures", lambda one: of_cell(one.shown.analysis, one.cell)),
        Section("claims", "Claims of its training", "Claims", _claims, template=TABLES),
        Section("messages", "Messages of its training", "Messages", _messages, template=TABLES),
        Section("log", "Lines of run.log", "Log", _log, template='{% include "log.html" %}'),
    ]
    return page(shown.name, parts, _Asked(shown, cell, links), home=links.to(), linked=bool(links.files))


def _question(one: _Asked) -> list[Table]:
    run, cell, spec = one.shown.analysis.run, one.cell, one.cell.training
    result, failure, training = run.results.get(cell.id), run.failures.get(cell.id), run.trainings.get(spec.id)
    seconds = run.seconds.get(cell.id)
    rows: list[Fields] = [
        ("Run", Cell(one.shown.name, link=one.links.to("run", one.shown.name))),
        ("Status", status_of(run, cell) + (f": {failure.kind}: {failure.message}" if failure and not result else "")),
        ("Defense", part_text(spec.defense)),
        ("Attack", part_text(cell.attack)),
        ("Adversary", cell.threat),
        ("Target", f"{where(cell.target)}, {counted(cell.target.count, 'victim')}"),
        ("Setting", one.shown.analysis.settings[setting_key(spec.task, spec.federation)]),
        ("Seed", str(spec.seed)),
        ("Time", "unknown" if seconds is None else duration(seconds)),
        ("Cell", Cell(cell.id, f"digest {result.digest}" if result else "")),
        ("Training", Cell(spec.id, f"digest {training.digest}" if training else "not finished")),
    ]
    return [Table("The question", _ABOUT, tuple(rows))]


def _estimates(one: _Asked) -> list[Table] | None:
    result = one.shown.analysis.run.results.get(one.cell.id)
    rows: list[Fields] = []
    for each in map(cut, result.estimates if result else ()):
        ends = Cell(interval(each), percent(each.level, 0) if interval(each) else "")
        guess = "" if each.chance is None else fixed(each.chance)
        p = "" if each.p is None else short(each.p, 2)
        rows.append((metric(each.name).words, measured(each), ends, str(each.n), guess, p, each.method, each.note))
    numbers = [Column(name, "num") for name in ("Value", "Interval", "n", "By guessing", "p")]
    columns = (Column("Metric"), *numbers, Column("Method", "text"), Column("Note", "text"))
    return [Table("All estimates of this cell", columns, tuple(rows))] if rows else None


def _flags(one: _Asked) -> list[Table] | None:
    rows = tuple((flag.code, flag.severity, flag.message) for flag in one.shown.analysis.flags_of(one.cell))
    return [Table("Caveats of these numbers", ("Flag", "Severity", Column("Message", "text")), rows)] if rows else None


def _claims(one: _Asked) -> list[Table] | None:
    training = one.shown.analysis.run.trainings.get(one.cell.training.id)
    if training is None:
        return None
    columns = (
        "Horizon",
        Column("Claimed epsilon", "num"),
        Column("Proved", "num"),
        "Verdict",
        Column("Reason", "text"),
    )
    rows = tuple(map(_claim, (training.one_round, training.whole_run)))
    audit = () if training.audited is None else (stated(training.audited),)
    return [Table("Claimed and proved", columns, rows, notes=audit)]


def _claim(claim: ClaimRecord) -> Fields:
    claimed = Cell(number(claim.epsilon), per(claim.unit, claim.delta))
    proved = Cell(number(claim.proved.epsilon), per(claim.proved.unit, claim.proved.delta))
    return claim.horizon, claimed, proved, verdict_of(claim), claim.reason


def _messages(one: _Asked) -> list[Table] | None:
    training = one.shown.analysis.run.trainings.get(one.cell.training.id)
    if training is None or not training.message_bytes:
        return None
    rows = tuple((str(at), f"{sent:.10g}", size(sent)) for at, sent in enumerate(training.message_bytes))
    lead = f"The model has {counted(training.dim, 'parameter')}: {training.bits:.3g} bits for each."
    columns = ("Round", Column("Bytes", "num"), Column("Size", "num"))
    return [Table("One client's message, by round", columns, rows, lead)]


def _log(one: _Asked) -> str | None:
    """The lines on the cell, on its parts and on its training."""
    cell, defense = one.cell, one.cell.training.defense
    seed, name = rf", seed {cell.training.seed}(?!\d)", re.escape(cell.attack.name)
    attack = (
        rf" under {name}(?:, |(?= ){_with(cell.attack)}.*?, ){re.escape(cell.threat)}, {re.escape(where(cell.target))}"
    )
    known = rf"(?<![\w+-]){re.escape(shown_name(defense.name))}(?![\w+-]){_with(defense)}"
    pattern = re.compile(rf"(?:training|trial) of {known}[^:]*?{seed}|{known}.*?{attack}{seed}")
    return "\n".join(filter(pattern.search, one.shown.log)) or None


def _with(part: PartSpec) -> str:
    """A pattern: each parameter follows, in any order, because a log has the order of the study."""
    texts = (written(part.parameters, [name]) for name in part.parameters)
    return "".join(rf"(?=.*[ ,]{re.escape(text)}(?![\w.-]))" for text in texts if text)


def comparison_page(names: Sequence[str], compared: Sequence[Comparison], links: Links) -> str:
    """Runs side by side, each with the first."""
    table = side_by_side(compared)
    about = ("Which", "Run")
    runs = tuple((w, Cell(n, link=links.to("run", n))) for w, n in zip(ORDINALS, names, strict=False))
    tables = [Table("The runs", about, runs), replace(table, notes=(*table.notes, CAPTION))]
    section: Section[None] = Section("compared", "Runs side by side", "Runs", lambda _: tables, template=_TOP)
    return page("comparison", [section], None, home=links.to(), linked=bool(links.files))
