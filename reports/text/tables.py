"""The table in the terminal at the end of a run."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leakgauge.harness.core.result import Run, TrainingRecord
from leakgauge.reports.pool import accuracy
from leakgauge.reports.sections.checked import brief, checked
from leakgauge.reports.select import Analysis, Group
from leakgauge.reports.text.notation import NO_VALUE, fixed, interval, metric, percent, plural, short, where

_STYLES = {"High": "bold red", "Moderate": "yellow", "Low": "green", "not rated": "dim"}
_VERDICTS = {
    "BROKEN (audit)": "bold red",
    "BROKEN": "bold red",
    "UNPROVED": "yellow",
    "HOLDS": "green",
    "NOTHING PROMISED": "dim",
}
_BOX = box.Box("    \n    \n ── \n    \n    \n    \n    \n    \n", ascii=False)
"""A line under the header and one space between columns: nine columns in a hundred characters."""

_CAPTION = (
    "Higher means the attacker learns more. ε of different units do not compare. Audited: a lower bound, measured in a "
    "small federation with this many trials; the report has its unit and confidence."
)


def _measured(group: Group) -> str:
    """The headline number, its interval below it; or why there is none."""
    if group.estimate is not None and group.value is not None:
        name = metric(group.metric).removeprefix("mean ")
        return f"{name} {fixed(group.value)}\n{interval(group.estimate)}".rstrip()
    if group.failures:
        return "failed"
    return NO_VALUE if group.results else "missing"


def _claim(trainings: Sequence[TrainingRecord]) -> Text:
    """Claimed, proved and the verdict of one round; the highest of the seeds' audits, where there are some."""
    claims = [checked(training) for training in trainings]
    text, worst = brief([one.one_round for one in claims], [one.whole_run for one in claims])
    audits = [training.audited for training in trainings if training.audited is not None]
    if audits:
        most = max(audits, key=lambda audit: audit.epsilon_lower)
        text += f"\naudited ≥ {short(most.epsilon_lower)}, n = {most.trials}"
    return Text(text, style=_VERDICTS.get(worst, ""))


def _row(analysis: Analysis, group: Group, *, first: bool) -> list[Text]:
    """One row; `Text`, so that no name is taken for markup. `first`: of its defense and setting."""
    ceiling, trainings = analysis.ceiling(group), analysis.of(group)
    reached = accuracy(trainings)
    word = "ceiling" if group.undefended else analysis.rating(group).word if group.value is not None else ""
    label = analysis.defenses[group.defense.label]
    setting = [analysis.settings[group.setting]] if len(analysis.settings) > 1 else []
    floor, top = fixed(analysis.floor_value(group)), fixed(ceiling.value if ceiling is not None else None)
    return [
        Text("\n".join(filter(None, [label.name, label.varying, *setting]))),
        Text(analysis.attacks[group.column.attack.label].text),
        Text(f"{group.column.threat}\n{where(group.column.target)}"),
        Text(_measured(group)),
        Text(word, style=_STYLES.get(word, "")),
        Text(f"{floor}\n{top}"),
        Text(percent(reached.value if reached is not None else None)),
        _claim(trainings) if first else Text(""),
    ]


def _title(run: Run) -> str:
    """The study and what became of its cells."""
    counts = [(len(run.failures), "failed"), (len(run.missing), "missing")]
    lacking = "".join(f", {count} {word}" for count, word in counts if count)
    return f"{run.name}: {len(run.results)} of {plural(len(run.cells), 'cell')}{lacking}"


def summary(run: Run) -> Table:
    """One row a defense, attack, adversary and target; the controls stand in the columns floor and ceiling."""
    analysis = Analysis(run)
    table = Table(title=Text(_title(run)), caption=Text(_CAPTION), box=_BOX, padding=0)
    for name in ("Defense", "Attack", "Adversary\nTarget", "Measured\n95 %", "Leakage"):
        table.add_column(name, overflow="fold")
    table.add_column("Floor\nCeiling", justify="right")
    table.add_column("Final\naccuracy", justify="right")
    table.add_column("ε claimed,\nproved, audited", overflow="fold")
    previous = None
    for group in sorted(analysis.attacked, key=lambda g: list(analysis.settings).index(g.setting)):
        first = previous is None or (previous.setting, previous.defense) != (group.setting, group.defense)
        if first and previous is not None:
            table.add_section()
        table.add_row(*_row(analysis, group, first=first))
        previous = group
    return table


def plain(run: Run, *, width: int = 100) -> str:
    """The same table as plain text, no line longer than `width`."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(summary(run))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
