"""The pages of a folder of runs: all runs, one run, one cell, and runs side by side. Each is made on its own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import quote

from leakgauge.harness.core.cell import Cell as Question
from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.labels import counted, part_text, setting_key, shown_name, where, written
from leakgauge.harness.core.metrics import metric
from leakgauge.harness.core.result import Result, TrainingRecord
from leakgauge.harness.core.stats import cut
from leakgauge.harness.gate.compare import ORDINALS, Comparison
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
    worst = analysis.worst
    left = [f"{len(lost)} {what}" for lost, what in ((run.failures, "failed"), (run.missing, "missing")) if lost]
    done = str(100 * len(run.results) // max(1, len(run.cells)))
    rated = Cell("Nothing was rated")
    if worst is not None:
        about = f"{analysis.defenses[worst.defense].text}: {worst.reason}"
        rated = Cell(WORDS[worst.word].words, below=(about,), tone=WORDS[worst.word].tone)
    commits = dict.fromkeys(e.commit[:10] + " (changed)" * e.dirty for e in run.environments)
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
    title, columns = "Runs, and how many of their defenses have which rating", (*head, *words, Column("Commit", "mono"))
    table = Table(title, columns, linked, lead)
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
    study = Cell(run.name, str(run.study.get("title", "")))
    rows: list[Fields] = [("Study", study), ("Cells", Cell(counts, lost, below=run.faults))]
    rows += [(f"Its {name}", Cell(f"open the {name}", link=links.to("run", shown.name, name))) for name in shown.more]
    return Table("About this run", _ABOUT, tuple(rows))


def cell_page(shown: Shown, cell: Question, links: Links) -> str:
    """One cell: its question and its answer, with pictures, log, claims and messages."""
    analysis, record = shown.analysis, shown.analysis.run.trainings.get(cell.training.id)
    result = analysis.run.results.get(cell.id)
    parts: list[Section[Analysis]] = [
        Section("question", "One cell", "Question", lambda _: [_question(shown, cell, links)], template=_TOP),
        Section("estimates", "Estimates", "Estimates", lambda _: result and _estimates(result), template=TABLES),
        Section("flags", "Flags", "Flags", partial(_flags, cell=cell), template=TABLES),
        Section("pictures", "Pictures", "Pictures", partial(of_cell, cell=cell)),
        Section("claims", "Claims of its training", "Claims", lambda _: record and _claims(record), template=TABLES),
        Section(
            "messages",
            "Messages of its training",
            "Messages",
            lambda _: record and _messages(record),
            template=TABLES,
        ),
        Section("log", "Lines of run.log", "Log", lambda _: _log(shown.log, cell), template='{% include "log.html" %}'),
    ]
    return page(shown.name, parts, analysis, home=links.to(), linked=bool(links.files))


def _question(shown: Shown, cell: Question, links: Links) -> Table:
    run, spec = shown.analysis.run, cell.training
    result, failure, training = run.results.get(cell.id), run.failures.get(cell.id), run.trainings.get(spec.id)
    seconds = run.seconds.get(cell.id)
    rows: list[Fields] = [
        ("Run", Cell(shown.name, link=links.to("run", shown.name))),
        ("Status", status_of(run, cell) + (f": {failure.kind}: {failure.message}" if failure and not result else "")),
        ("Defense", part_text(spec.defense)),
        ("Attack", part_text(cell.attack)),
        ("Adversary", cell.threat),
        ("Target", f"{where(cell.target)}, {counted(cell.target.count, 'victim')}"),
        ("Setting", shown.analysis.settings[setting_key(spec.task, spec.federation)]),
        ("Seed", str(spec.seed)),
        ("Time", "unknown" if seconds is None else duration(seconds)),
        ("Cell", Cell(cell.id, f"digest {result.digest}" if result else "")),
        ("Training", Cell(spec.id, f"digest {training.digest}" if training else "not finished")),
    ]
    return Table("The question", _ABOUT, tuple(rows))


def _estimates(result: Result) -> list[Table]:
    rows: list[Fields] = []
    for each in map(cut, result.estimates):
        ends = Cell(interval(each), percent(each.level, 0) if interval(each) else "")
        guess = "" if each.chance is None else fixed(each.chance)
        p = "" if each.p is None else short(each.p, 2)
        rows.append((metric(each.name).words, measured(each), ends, str(each.n), guess, p, each.method, each.note))
    numbers = [Column(name, "num") for name in ("Value", "Interval", "n", "By guessing", "p")]
    columns = (Column("Metric"), *numbers, Column("Method", "text"), Column("Note", "text"))
    return [Table("All estimates of this cell", columns, tuple(rows))] if rows else []


def _flags(analysis: Analysis, cell: Question) -> list[Table] | None:
    rows = tuple((flag.code, flag.severity, flag.message) for flag in analysis.flags_of(cell))
    return [Table("Caveats of these numbers", ("Flag", "Severity", Column("Message", "text")), rows)] if rows else None


def _claims(training: TrainingRecord) -> list[Table]:
    columns = "Horizon", Column("Claimed epsilon", "num"), Column("Proved", "num"), "Verdict", Column("Reason", "text")
    rows = list[Fields]()
    for claim in (training.one_round, training.whole_run):
        epsilons = (Cell(number(one.epsilon), per(one.unit, one.delta)) for one in (claim, claim.proved))
        rows.append((claim.horizon, *epsilons, verdict_of(claim), claim.reason))
    audit = () if training.audited is None else (stated(training.audited),)
    return [Table("Claimed and proved", columns, tuple(rows), notes=audit)]


def _messages(training: TrainingRecord) -> list[Table] | None:
    if not training.message_bytes:
        return None
    rows = tuple((str(at), f"{sent:.10g}", size(sent)) for at, sent in enumerate(training.message_bytes))
    lead = f"The model has {counted(training.dim, 'parameter')}: {training.bits:.3g} bits for each."
    columns = ("Round", Column("Bytes", "num"), Column("Size", "num"))
    return [Table("One client's message, by round", columns, rows, lead)]


def _log(log: Sequence[str], cell: Question) -> str | None:
    """The lines on the cell, on its parts and on its training."""
    seed, name = rf", seed {cell.training.seed}(?!\d)", re.escape(cell.attack.name)
    place = rf"{re.escape(cell.threat)}, {re.escape(where(cell.target))}"
    attack = rf" under {name}(?:, |(?= ){_with(cell.attack)}.*?, ){place}"
    known = rf"(?<![\w+-]){re.escape(shown_name(cell.training.defense.name))}(?![\w+-]){_with(cell.training.defense)}"
    pattern = re.compile(rf"(?:training|trial) of {known}[^:]*?{seed}|{known}.*?{attack}{seed}")
    return "\n".join(filter(pattern.search, log)) or None


def _with(part: PartSpec) -> str:
    """A pattern: each parameter follows, in any order, because a log has the order of the study."""
    texts = (written(part.parameters, [name]) for name in part.parameters)
    return "".join(rf"(?=.*[ ,]{re.escape(text)}(?![\w.-]))" for text in texts if text)


def comparison_page(names: Sequence[str], compared: Sequence[Comparison], links: Links) -> str:
    """Runs side by side, each with the first."""
    runs = tuple((w, Cell(n, link=links.to("run", n))) for w, n in zip(ORDINALS, names, strict=False))
    tables = [Table("The runs", ("Which", "Run"), runs), side_by_side(compared)]
    section: Section[None] = Section("compared", "Runs side by side", "Runs", lambda _: tables, template=_TOP)
    return page("comparison", [section], None, home=links.to(), linked=bool(links.files))
