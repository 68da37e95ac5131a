"""All results: one row per cell (finished, failed or missing), and the flags."""

from __future__ import annotations

import re
from typing import Any

from leakgauge.harness.core.cases import gathered, headline_estimate
from leakgauge.harness.core.cell import Cell
from leakgauge.harness.core.labels import where
from leakgauge.harness.core.metrics import metric
from leakgauge.harness.core.result import Result
from leakgauge.harness.core.rows import rows
from leakgauge.harness.core.stats import cut
from leakgauge.reports.export import data_uri, status_of, to_csv
from leakgauge.reports.sections import Section
from leakgauge.reports.select import Analysis, Group
from leakgauge.reports.text.notation import NO_VALUE, duration, first_line, interval, measured

_ICONS = {"done": "✓", "failed": "✕", "missing": "–"}


def _finished(result: Result, kind: str) -> dict[str, str]:
    """What a finished cell adds to its row; `order` is the headline value for sorting (empty without a value)."""
    head = headline_estimate(result, kind)
    others = [f"{metric(e.name).words} {measured(e)}" for e in result.estimates if e is not head]
    if head is None:
        return {"value": NO_VALUE, "others": " · ".join(others)}
    if head.value is None and head.note:
        others.insert(0, head.note)
    return {
        "metric": metric(head.name).words.removeprefix("mean "),
        "value": measured(head),
        "interval": interval(cut(head)),
        "order": "" if head.value is None else repr(head.value),
        "n": str(head.n),
        "others": " · ".join(others),
    }


def _row(analysis: Analysis, group: Group, cell: Cell) -> dict[str, Any]:
    run, status = analysis.run, status_of(analysis.run, cell)
    seconds, failure = run.seconds.get(cell.id), run.failures.get(cell.id)
    if status == "done":
        numbers = _finished(run.results[cell.id], group.case.kind)
    else:
        reason = "" if failure is None else f"{failure.kind}: {first_line(failure.message)}"
        numbers = {"value": status, "others": reason}
    return (
        dict.fromkeys(("metric", "interval", "order", "n"), "")
        | numbers
        | {
            "id": cell.id,
            "status": status,
            "icon": _ICONS[status],
            "defense": analysis.defenses[group.defense],
            "attack": analysis.attacks[cell.attack.key],
            "threat": cell.threat,
            "target": where(cell.target),
            "setting": analysis.settings[group.setting],
            "seed": cell.training.seed,
            "flags": dict.fromkeys(flag.code for flag in analysis.flags_of(cell)),
            "seconds": "" if seconds is None else duration(seconds),
            "seconds_order": "" if seconds is None else repr(seconds),
        }
    )


def _flag_rows(analysis: Analysis) -> list[tuple[str, str, list[str], int]]:
    every = ((cell, flag) for cell in analysis.run.cells for flag in analysis.flags_of(cell))
    flags = gathered(((flag.code, flag.severity), (flag.message, cell.id)) for cell, flag in every)
    each = ((key, *map(dict.fromkeys, zip(*pairs, strict=True))) for key, pairs in flags.items())
    rows = [(*key, list(messages), len(cells)) for key, messages, cells in each]
    return sorted(rows, key=lambda row: (row[1] != "warning", -row[3], row[0]))


def everything(analysis: Analysis, cells: tuple[str, str] | None = None) -> dict[str, object]:
    """The table of all cells, in the study's order, with their flags and its download.

    cells: what stands before and behind a cell's id in the address of its page; None: they have no pages.
    """
    run = analysis.run
    groups = {cell.id: group for group in analysis.groups for cell in group.case.cells}
    lines = [_row(analysis, groups[cell.id], cell) for cell in run.cells]
    return {
        "rows": lines[:_MOST],
        "more": [_packed(line, linked=cells is not None) for line in lines[_MOST:]],
        "cells": cells,
        "flags": _flag_rows(analysis),
        "several_settings": len(analysis.settings) > 1,
        "csv": data_uri("results.csv", to_csv(list(rows(run)))) if len(run.cells) <= _MOST_INSIDE else "",
        "done": len(run.results),
        "failed": len(run.failures),
        "missing": len(run.missing),
    }


_MOST = 100
"""The rows that the page holds as a table; a script shows the others when they are looked for."""


_MOST_INSIDE = 1000
"""The most cells of which the page holds every value; of more, `leakgauge export` writes them."""


def _packed(row: dict[str, Any], *, linked: bool) -> str:
    """A row as one line: its status, its texts by column, and if linked its id, between broken bars.

    After a double bar stands what is small, and after another one the number by which the column is sorted.
    """
    behind = {"threat": ("target",), "value": ("interval", "order"), "seconds": ("", "seconds_order")}
    texts = {name: [row[name], *(row.get(one, "") for one in others)] for name, others in behind.items()}
    texts |= {"defense": [row["defense"].text], "attack": [row["attack"].text], "flags": [", ".join(row["flags"])]}
    names = ("status", "defense", "attack", "threat", "setting", "seed", "metric", "value", "n", "others", "flags")
    each = [texts.get(name, [row[name]]) for name in (*names, "seconds", *["id"] * linked)]
    return "¦".join("‖".join(" ".join(re.sub("[¦‖]", "|", str(text)).split()) for text in parts) for parts in each)


SECTION = Section("results", "All results", "All results", everything, 80)
