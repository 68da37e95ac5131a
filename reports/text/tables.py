"""A run as text: tables in the terminal at its end, and as Markdown for a page under version control."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.console import Group as RichGroup
from rich.table import Table as RichTable
from rich.text import Text

from leakgauge.harness.core.labels import counted, where
from leakgauge.harness.core.result import Estimate, Run, TrainingRecord
from leakgauge.harness.core.sinks import styled
from leakgauge.reports.sections import Section, sections
from leakgauge.reports.sections.checked import BADGES, UNKEPT, brief, checked, codes, is_unkept, stated
from leakgauge.reports.sections.leakage import entry_of
from leakgauge.reports.sections.verdict import verdict
from leakgauge.reports.select import Analysis, Group, final_accuracy
from leakgauge.reports.table import Table
from leakgauge.reports.text.notation import fixed, percent

NARROW = 80
"""If the table is narrower than this many characters, each row is a block of lines."""

_COLUMNS = (
    *("Defense", "Attack", "Adversary\nTarget", "Measured\n95 %\nidentified", "Leakage"),
    *("Floor\nCeiling", "Accuracy\nbits each", "ε claimed,\nproved"),
)

_NARROW = ("", "", "", "", "leakage ", "floor, ceiling ", "accuracy, bits ", "ε ")
_STYLES = {"bad": "bold red", "warn": "yellow", "good": "green", "none": "dim", "info": ""}
_BOX = box.Box("    \n    \n ── \n    \n    \n    \n    \n    \n", ascii=False)
"""A line under the header and one space between columns, so that the columns fit in a hundred characters."""

_CAPTION = (
    "Higher means that the adversary learns more. Never compare ε of different units. Identified: nearer to the "
    "original than to 99 other images. Bits: per parameter of a client's message. Audited: a lower bound from n "
    "trials in a small federation, beside claim and proof for it."
)


def _claim(trainings: Sequence[TrainingRecord]) -> Text:
    claims = [checked(training) for training in trainings]
    text, worst = brief([one_round for one_round, _ in claims], [whole_run for _, whole_run in claims])
    audits = any(training.audited is not None for training in trainings)
    code = codes(trainings)
    text += "".join(f"\n{state.badge.words} {state.seeds}".rstrip() for state in code if audits)
    marked = any(is_unkept(claim, training) for pair, training in zip(claims, trainings, strict=True) for claim in pair)
    text += f"\n{UNKEPT.words}" if marked else ""
    is_clean = not marked and all(state.badge.tone == "good" for state in code)
    tone = BADGES[worst].tone if worst else "none"
    return styled(text, _STYLES["info" if tone == "good" and not is_clean else tone] if worst else "")


def _audits(analysis: Analysis) -> Iterator[str]:
    for setting, defense in analysis.pairs:
        audits = [
            training.audited for training in analysis.trainings_of(setting, defense) if training.audited is not None
        ]
        place = f" ({analysis.settings[setting]})" if len(analysis.settings) > 1 else ""
        if audits:
            yield f"{analysis.defenses[defense].text}{place}: {stated(max(audits, key=lambda a: a.epsilon_lower))}."


def _trained(trainings: Sequence[TrainingRecord], accuracy: Estimate | None) -> Text:
    text = styled(percent(accuracy.value if accuracy is not None else None))
    lost = sum(flag.code == "no-learning" for training in trainings for flag in training.flags)
    if lost:
        text.append(f"\nno learning{f'{chr(10)}in {lost}' if lost < len(trainings) else ''}", style=_STYLES["bad"])
    dropped = sum(len(training.dropped) for training in trainings)
    if dropped:
        text.append(f"\n{dropped} dropped", style=_STYLES["warn"])
    sizes = [training.bits for training in trainings if training.bits is not None]
    if sizes:
        text.append(f"\n{sum(sizes) / len(sizes):.3g} bits")
    return text


def _row(analysis: Analysis, group: Group, *, first: bool) -> list[Text]:
    """One row, as `Text` so that no name is read as markup. `first`: whether it is the first of its defense."""
    ceiling, trainings = analysis.ceiling(group), analysis.trainings_of(group.setting, group.defense)
    accuracy, label, entry = final_accuracy(trainings), analysis.defenses[group.defense], entry_of(analysis, group)
    metric = "" if group.value is None else group.metric.words.removeprefix("mean ")
    setting = [analysis.settings[group.setting]] if len(analysis.settings) > 1 else []
    share = group.identified
    identified = "" if share is None or share.value is None else f"{round(share.value * share.n)}/{share.n}"
    floor, top = fixed(analysis.floor_value(group)), fixed(ceiling.value if ceiling is not None else None)
    return [
        styled("\n".join(filter(None, [label.name, label.varying, *setting]))),
        styled(analysis.attack_text(group)),
        styled(f"{group.case.threat}\n{where(group.case.target)}"),
        styled("\n".join(filter(None, [f"{metric} {entry.value}".strip(), entry.interval, identified]))),
        styled("\n".join(filter(None, [entry.word, analysis.unpromised(group)])), _STYLES[entry.tone]),
        styled(f"{floor}\n{top}"),
        _trained(trainings, accuracy),
        _claim(trainings) if first else styled(""),
    ]


def summary(run: Run, width: int = NARROW) -> RichTable:
    """One row per defense, attack, adversary and target; the controls are in the columns floor and ceiling.

    Below `NARROW` characters, the columns of a row are below each other.
    """
    analysis, narrow = Analysis(run), width < NARROW
    caption = styled("\n".join([*_audits(analysis), _CAPTION]))
    counts = [(len(run.failures), "failed"), (len(run.missing), "missing")]
    lacking = "".join(f", {count} {word}" for count, word in counts if count)
    done = f"{run.name}: {len(run.results)} of {counted(len(run.cells), 'cell')}{lacking}"
    title = styled(f"{done}\n{verdict(analysis).sentence}")
    table = RichTable(title=title, caption=caption, box=_BOX, padding=0, show_header=not narrow)
    table.caption_justify = "left"
    if narrow:
        table.add_column(overflow="fold")
    for name in _COLUMNS if not narrow else ():
        side: Literal["left", "right"] = "right" if name[0] in "FA" and name != "Attack" else "left"
        # the words of a rating fill short lines, the other columns need more
        table.add_column(name, overflow="fold", justify=side, max_width=9 if name == "Leakage" else None)
    previous = None
    for group in sorted(analysis.attacked, key=lambda g: list(analysis.settings).index(g.setting)):
        place = group.setting, group.defense
        if previous is not None and previous != place:
            table.add_section()
        row = _row(analysis, group, first=previous != place)
        if narrow:
            lines = [
                (name, styled(" · ").join(text.split("\n"))) for name, text in zip(_NARROW, row, strict=True) if text
            ]
            row = [styled("\n").join(styled(name) + text for name, text in lines)]
        table.add_row(*row)
        if narrow:
            table.add_section()
        previous = place
    return table


def printed(run: Run, width: int = NARROW) -> RichGroup:
    """What the terminal shows of a run: the table of `summary`, then the tables of sections that have some for it."""
    analysis = Analysis(run)
    tables = (table.terminal() for section in sections() for table in _tables(section, analysis))
    return RichGroup(summary(run, width), *tables)


def _tables(section: Section[Analysis], analysis: Analysis) -> Sequence[Table]:
    """The tables of a section, or its error if they cannot be built: the page is still written."""
    try:
        return section.terminal(analysis)
    except Exception as error:
        return [Table(section.title, ("This section could not be built.",), ((f"{type(error).__name__}: {error}",),))]


def plain(run: Run, *, width: int = 100) -> str:
    """The text of `printed`, with no line longer than `width`."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(printed(run, width))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def to_matrix(analysis: Analysis) -> str:
    """The Markdown of all sections that have one: the leakage matrix of each setting, then those of new sections."""
    tables = (table for section in sections() for table in section.markdown(analysis))
    return "\n".join(table.markdown() for table in tables) or "\n"
