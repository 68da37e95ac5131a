"""All results: one row a cell, finished, failed or missing, and the flags that go with them."""

from __future__ import annotations

from typing import NamedTuple

from leakgauge.harness.core.cell import Cell
from leakgauge.harness.core.result import Failure, Result
from leakgauge.reports.export import data_uri, to_csv
from leakgauge.reports.pool import cut
from leakgauge.reports.select import HEADLINE, Analysis, Group
from leakgauge.reports.text.labels import Label
from leakgauge.reports.text.notation import duration, first_line, interval, measured, metric, where

ICONS = {"done": "✓", "failed": "✕", "missing": "–"}


class CellRow(NamedTuple):
    """One cell. `order` is the headline value for sorting, empty where there is none."""

    id: str
    status: str
    icon: str
    defense: Label
    attack: Label
    threat: str
    target: str
    setting: str
    seed: int
    metric: str
    value: str
    interval: str
    order: str
    n: str
    others: str
    reason: str
    flags: tuple[str, ...]
    seconds: str
    seconds_order: str


class FlagRow(NamedTuple):
    """A flag and on how many cells it is."""

    code: str
    severity: str
    messages: tuple[str, ...]
    cells: int


class Everything(NamedTuple):
    """The table with its flags and its download."""

    rows: tuple[CellRow, ...]
    flags: tuple[FlagRow, ...]
    several_settings: bool
    csv: str
    done: int
    failed: int
    missing: int


def _finished(result: Result, kind: str) -> dict[str, str]:
    """The columns of a finished cell that come from its estimates."""
    name = HEADLINE.get(kind)
    head = next((e for e in result.estimates if e.name == name), None)
    head = head or next((e for e in result.estimates if e.higher_leaks), None)
    others = [f"{metric(e.name)} {measured(e)}" for e in result.estimates if e is not head]
    if head is None:
        return {"metric": "", "value": "n/a", "interval": "", "order": "", "n": "", "others": " · ".join(others)}
    if head.value is None and head.note:
        others.insert(0, head.note)
    return {
        "metric": metric(head.name).removeprefix("mean "),
        "value": measured(head),
        "interval": interval(cut(head)),
        "order": "" if head.value is None else repr(head.value),
        "n": str(head.n),
        "others": " · ".join(others),
    }


def _lacking(failure: Failure | None) -> dict[str, str]:
    """The same columns of a cell without a result."""
    value = "failed" if failure is not None else "missing"
    return {"metric": "", "value": value, "interval": "", "order": "", "n": "", "others": ""}


def _row(analysis: Analysis, group: Group, cell: Cell) -> CellRow:
    """One row."""
    run, cell_id = analysis.run, cell.id
    result, failure = run.results.get(cell_id), run.failures.get(cell_id)
    status = "done" if result is not None else "failed" if failure is not None else "missing"
    columns = _finished(result, group.kind) if result is not None else _lacking(failure)
    seconds = run.seconds.get(cell_id)
    return CellRow(
        id=cell_id,
        status=status,
        icon=ICONS[status],
        defense=analysis.defenses[cell.training.defense.label],
        attack=analysis.attacks[cell.attack.label],
        threat=cell.threat,
        target=where(cell.target),
        setting=analysis.settings[group.setting],
        seed=cell.training.seed,
        reason=f"{failure.kind}: {first_line(failure.message)}" if failure is not None and result is None else "",
        flags=tuple(dict.fromkeys(flag.code for flag in analysis.flags_of(cell))),
        seconds=duration(seconds) if seconds is not None else "",
        seconds_order="" if seconds is None else repr(seconds),
        **columns,
    )


def _flag_rows(analysis: Analysis) -> tuple[FlagRow, ...]:
    """The distinct flags, warnings first, the frequent ones first; three messages each."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    cells: dict[tuple[str, str], int] = {}
    for cell in analysis.run.cells:
        flags = analysis.flags_of(cell)
        for flag in flags:
            found.setdefault((flag.severity, flag.code), {})[flag.message] = None
        for key in {(flag.severity, flag.code) for flag in flags}:
            cells[key] = cells.get(key, 0) + 1
    rows = [
        FlagRow(code, severity, _few(tuple(messages)), cells[severity, code])
        for (severity, code), messages in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.severity != "warning", -row.cells, row.code)))


def _few(messages: tuple[str, ...]) -> tuple[str, ...]:
    """Three messages, and how many more there are."""
    return messages if len(messages) <= 3 else (*messages[:3], f"and {len(messages) - 3} more like these")


def everything(analysis: Analysis) -> Everything:
    """The table of all cells, in the study's order."""
    run = analysis.run
    groups = {cell.id: group for group in analysis.groups for cell in group.cells}
    return Everything(
        rows=tuple(_row(analysis, groups[cell.id], cell) for cell in run.cells),
        flags=_flag_rows(analysis),
        several_settings=len(analysis.settings) > 1,
        csv=data_uri(to_csv(analysis)),
        done=len(run.results),
        failed=len(run.failures),
        missing=len(run.missing),
    )
