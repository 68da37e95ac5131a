"""The gate by the code: only what the code, or the study, changed runs again, and is judged as draws of a mechanism.

1. The fingerprints of the code are compared with those of the baseline of the target branch. Nothing changed: no
   measure can have moved.
2. A changed part must be acknowledged: the baseline of the checkout has its new fingerprint, with a reason.
3. The messages of changed defenses are tested against the law of the old ones.
4. The cells behind changed parts run, with the controls beside them, and are judged by the rules of `gate.judge`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from leakgauge.harness.core.cases import training_identity
from leakgauge.harness.core.cell import Cell
from leakgauge.harness.core.labels import UNDEFENDED
from leakgauge.harness.core.prints import Prints
from leakgauge.harness.gate.baseline import Baseline
from leakgauge.harness.gate.judge import Outcome, Verdict, judge
from leakgauge.harness.gate.measure import DIGITS, Measured, key_end, measured
from leakgauge.harness.gate.prints import LEVEL, Changed, compare, law_checks
from leakgauge.harness.gate.rules import Rules
from leakgauge.harness.study.prints import code_behind, take
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import Study
from leakgauge.harness.study.supervisor import Listener

_ACKNOWLEDGE = "if that is meant, 'leakgauge baseline acknowledge' records it with a reason"


def gate(
    study: Study,
    folder: Path,
    held: Baseline,
    own: Baseline,
    rules: Rules,
    *,
    data: Path | None = None,
    workers: int | None = None,
    listen: Listener | None = None,
) -> tuple[Measured, Outcome]:
    """The measures of what ran, and the outcome.

    Args:
        folder: of the results of what runs.
        held: the baseline that the target branch vouches for.
        own: that of the checkout, which acknowledges changes.

    Raises:
        StudyError, StoreError: as `run_study`.
    """
    now = held.prints if held.prints.code == code_behind(study.cells) else take(study.cells, data)
    changed = (
        compare(now, held.prints) if held.prints.parts else Changed(("the baseline has no prints",), training=True)
    )
    ends = _ends(study.cells)
    cells = [cell for cell in study.cells if _concerned(cell, changed)]
    ran = dataclasses.replace(held.measured, measures=())
    if cells:
        part = dataclasses.replace(study, cells=tuple(cells))
        ran = measured(run_study(part, folder, data=data, workers=workers, listen=listen, part=True))
        asked = _ends(cells)  # the folder may hold more
        kept = tuple(one for one in ran.measures if _end(one.key) in asked)
        ran = dataclasses.replace(ran, measures=kept)
    behind = [
        one
        for one in held.measured.measures
        if _end(one.key) not in ends
        or changed.concerns(
            one.defense.key, one.attack.key if one.attack else None, control=one.defense.name == UNDEFENDED
        )
    ]
    unchanged = len(held.measured.measures) - len(behind)
    unaccepted = _unacknowledged(now, held, own)
    notes = [] if unaccepted else [f"changed, acknowledged ({own.reason}): {line}" for line in changed.lines]
    if not behind and not cells:
        return ran, Outcome((), (), (), unchanged=unchanged)
    laws = law_checks(now, held.prints, changed)
    base = dataclasses.replace(held.measured, measures=tuple(behind), study_hash=ran.study_hash)
    left = dataclasses.replace(rules, level=max(0.0, rules.level - LEVEL))
    judged = judge(ran, base, left, gaps=held.gaps)
    checks = sorted([*laws, *judged.checks], key=lambda one: list(Verdict).index(one.verdict))
    return ran, Outcome(tuple(checks), judged.problems, (*notes, *judged.warnings), unaccepted, unchanged)


def _concerned(cell: Cell, changed: Changed) -> bool:
    """Whether a cell runs again."""
    defense = cell.training.defense
    return changed.concerns(defense.key, cell.attack.key, control=defense.name == UNDEFENDED)


def _ends(cells: Iterable[Cell]) -> set[str]:
    """The ends of the keys of all measures of these cells and of their trainings."""
    found = {training_identity(cell.training)[:DIGITS] for cell in cells}
    return found | {key_end(cell) for cell in cells}


def _end(key: str) -> str:
    """The end of a key."""
    return key.rpartition("/")[2]


def _unacknowledged(now: Prints, held: Baseline, own: Baseline) -> tuple[str, ...]:
    """The parts whose fingerprint the checkout's baseline does not have."""
    lines = compare(now, own.prints).lines if held.prints.parts or own.prints.parts else ()
    return tuple(f"changed: {line}; {_ACKNOWLEDGE}" for line in lines)
