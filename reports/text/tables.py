"""The results for a terminal and as Markdown: a line per defense and adversary; on request, what each attack found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group

from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.result import Run
from leakgauge.harness.core.sinks import styled
from leakgauge.reports.sections import Section, sections
from leakgauge.reports.sections.answer import headline
from leakgauge.reports.sections.checked import stated
from leakgauge.reports.sections.ratings import found
from leakgauge.reports.select import Analysis
from leakgauge.reports.table import Table


def printed(run: Run, width: int, *, details: bool = False) -> Group:
    """What a terminal of this many characters shows of a run: the answer, then the tables of sections.

    details: also what each attack found.
    """
    analysis = Analysis(run)
    counts = [(len(run.failures), "failed"), (len(run.missing), "missing")]
    lacking = "".join(f", {count} {word}" for count, word in counts if count)
    title = f"{run.name}: {len(run.results)} of {counted(len(run.cells), 'cell')}{lacking}"
    tables = [table for section in sections() if section.brief for table in _tables(section, analysis)]
    tables += found(analysis) if details else []
    rest = [*_audits(analysis), *([] if details else ["Each attack, with its interval and floor: --details."])]
    drawn = (table.terminal(width) for table in tables)
    return Group(styled(title), styled(headline(analysis)[0], "bold"), *drawn, *map(styled, rest))


def _audits(analysis: Analysis) -> Iterator[str]:
    """What the audits found, each with its own horizon, adversary and federation."""
    for setting, defense in analysis.pairs:
        audits = [one.audited for one in analysis.trainings_of(setting, defense) if one.audited is not None]
        place = f" ({analysis.settings[setting]})" if len(analysis.settings) > 1 else ""
        if audits:
            yield f"{analysis.defenses[defense].text}{place}: {stated(max(audits, key=lambda a: a.epsilon_lower))}."


def _tables(section: Section[Analysis], analysis: Analysis) -> Sequence[Table]:
    """The tables of a section, or its error if they cannot be built: the page is still written."""
    try:
        return section.tables(analysis)
    except Exception as error:
        return [Table(section.title, ("This section could not be built.",), ((f"{type(error).__name__}: {error}",),))]


def to_matrix(analysis: Analysis) -> str:
    """The ratings and the matrix of each setting as Markdown, then the sections that the terminal shows."""
    shown = (section for section in sections() if section.brief or section.id == "attacks")
    tables = (table for section in shown for table in section.tables(analysis))
    return "\n".join(table.markdown() for table in tables) or "\n"
