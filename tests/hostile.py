"""Runs and baselines whose every text is hostile, for the tests of what leaves the program."""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from pathlib import Path
from typing import Any

from leakgauge.harness.core.cell import Cell, PartSpec
from leakgauge.harness.core.result import Run
from leakgauge.harness.gate.baseline import Baseline
from leakgauge.harness.gate.measure import Measured, measured
from tests import report_fixtures as double
from tests.stored import on_disk

PAYLOADS = (
    "\n::error::x",
    "\r\n  ::stop-commands::t\n",
    "::add-mask::a",
    "##[error]x ###[group]y ##vso[task.setvariable variable=x]y",
    "a | b \\| c \\\\| `d` ``` *e* __f__ ~~g~~",
    "<script>alert(1)</script><img src=x onerror=alert(1)> &lt;b&gt; ]]> <!-- -->",
    "[x](javascript:alert(1)) ![y](z) <javascript:x> [r]: z",
    "=cmd|' /C calc'!A0",
    "+1;=2\t@SUM(A1)",
    "-x;\uff1dy",
    "@z",
    "\t=1",
    "\\input{/etc/passwd} % { } $x_1^2$ # & ~ \\\\[1cm] ^^5c",
    "[1cm]",
    "* x",
    "\x1b[2J\x1b]0;t\x07 \x9b31m \x00\x08\x7f\x85",
    "\u202ea\u2066b\u2069c\u200fd\u200ee\u061cf\ufeffg",
    "a\u2028::error::b\u2029c",
    "[bold red]x[/] {{ 7 * 7 }} {% raw %}",
    "x" * 500,
)
KEPT = {"metric", "verdict", "control", "kind", "Estimate.name"}
"""Fields that name a known thing; another name there is refused or unknown to the report."""


def poisoned(value: Any, text: str) -> Any:
    """The same value with `text` before every string in it, and before every key of a mapping, but for `KEPT`."""
    if isinstance(value, str):
        return text + value
    if isinstance(value, tuple | list):
        return type(value)(poisoned(one, text) for one in value)
    if isinstance(value, dict):
        return {text + key: poisoned(one, text) for key, one in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    hints = typing.get_type_hints(type(value), localns={"Cell": Cell})
    names = [field.name for field in dataclasses.fields(value) if f"{type(value).__name__}.{field.name}" not in KEPT]
    free = [name for name in names if name not in KEPT and typing.get_origin(hints[name]) is not typing.Literal]
    return dataclasses.replace(value, **{name: poisoned(getattr(value, name), text) for name in free})


@functools.cache
def tame_run() -> Run:
    """A small run with results, a failed cell, a missing one, audits and a membership attack."""
    defenses = [double.NONE, PartSpec("dithered", {"epsilon": 2.0, "note": "a"}), double.GAUSSIAN[0]]
    attacks = [(attack, double.PROBE, "server") for attack in (double.MATCHING, double.MAP, double.PRIOR)]
    attacks += [(double.THRESHOLD, dataclasses.replace(double.PROBE, kind="members", count=100, round=None), "public")]
    cells = double.grid(defenses, attacks, (0,))
    lost = {cells[5].id}
    run = double.make_run(cells, failed=lambda cell: cell.id in lost, missing=lambda cell: cell.id == cells[9].id)
    audit = double.audit(2.0, 4.0545, 2.8337, "sub-vector", contradictions=("a distribution",))
    trainings = {key: dataclasses.replace(one, audited=audit) for key, one in run.trainings.items()}
    return dataclasses.replace(run, trainings=trainings)


def hostile_run(text: str) -> Run:
    """The small run with `text` before every string of its cells, records, results, failures and study."""
    tame = tame_run()
    cells = {cell.id: poisoned(cell, text) for cell in tame.cells}
    return dataclasses.replace(
        tame,
        name=text + tame.name,
        study={"name": text, "title": text, "text": text, "goals": [text]},
        study_hash=text + tame.study_hash,
        cells=tuple(cells.values()),
        trainings={one.spec.id: one for one in (poisoned(record, text) for record in tame.trainings.values())},
        results={cells[key].id: poisoned(one, text) for key, one in tame.results.items()},
        failures={cells[key].id: poisoned(one, text) for key, one in tame.failures.items()},
        missing=tuple(cells[key].id for key in tame.missing),
        pictures=lambda key: None,
        scores=lambda key: next(
            (double.scores_of(tame_cell) for tame_cell in tame.cells if cells[tame_cell.id].id == key
             and tame_cell.attack == double.THRESHOLD), None),
        seconds={},
        data_hashes=poisoned(tame.data_hashes, text),
        attacks={
            cells[cell.id].attack.key: poisoned(double.ATTACKS[cell.attack.name], text) for cell in tame.cells
        },
    )  # fmt: skip


def hostile_baseline(text: str) -> Baseline:
    """A baseline with `text` before every string in it, with the numbers of the small run moved a little."""
    found: Measured = poisoned(measured(tame_run()), text)
    return Baseline(found, text)


def hostile_folder(run: Run, folder: Path) -> Path:
    """The run as a folder of results, whose study has a lone surrogate: UTF-8 has none, but JSON can spell it."""
    path = on_disk(run, folder) / "study.json"
    data = json.loads(path.read_text())
    del data["digest"]
    path.write_text(json.dumps(data | {"name": data["name"] + "\ud800"}))
    return folder
