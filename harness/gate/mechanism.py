"""The gate by code: only cells that a change of the code or the study affects are rerun and judged.

1. The fingerprints of the code are compared with those in the target branch's baseline. Cells that no change affects
   are not run.
2. A changed part must be acknowledged: the fingerprints in the checkout's baseline must be those of its code.
3. The messages of changed defenses are tested against the law of the old messages.
4. The cells behind changed parts run, together with the controls, and are judged by the rules of `gate.judge`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from leakgauge.harness.core.cases import training_identity
from leakgauge.harness.core.cell import Cell, PartSpec
from leakgauge.harness.core.labels import UNDEFENDED
from leakgauge.harness.core.prints import Print
from leakgauge.harness.gate.baseline import Baseline
from leakgauge.harness.gate.judge import Outcome, Verdict, judge
from leakgauge.harness.gate.measure import DIGITS, Measured, key_end, measured
from leakgauge.harness.gate.prints import LEVEL, Changed, compare, law_checks
from leakgauge.harness.gate.rules import Rules
from leakgauge.harness.study.environment import environment
from leakgauge.harness.study.prints import take
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Listener
from leakgauge.harness.study.study import Study

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
    """The measures of the cells that ran, and the outcome.

    Args:
        folder: for the results of the cells that run.
        held: the baseline of the target branch.
        own: the baseline of the checkout, which acknowledges changes.

    Raises:
        StudyError, StoreError: as `run_study`.
    """
    now = take(study.cells, data)
    changed = compare(now, held.prints)
    unaccepted = _unacknowledged(now, held, own)
    cells = [cell for cell in study.cells if _concerned(changed, cell.training.defense, cell.attack)]
    ends, known = _ends(study.cells), held.measured.measures
    behind = [one for one in known if _end(one.key) not in ends or _concerned(changed, one.defense, one.attack)]
    unchanged, here = len(known) - len(behind), environment()
    nothing = dataclasses.replace(
        held.measured, measures=(), commit=here.commit, dirty=here.dirty, machine=here.machine, packages=here.packages
    )
    if not behind and not cells:
        return nothing, Outcome((), (), (), unaccepted, unchanged)
    ran = nothing
    if cells:
        part = dataclasses.replace(study, cells=tuple(cells))
        ran = measured(run_study(part, folder, data=data, workers=workers, listen=listen, part=True))
    # a training that runs only for an attack has measures that cannot have moved; the folder may hold other cells
    left, asked = {one.key for one in known} - {one.key for one in behind}, _ends(cells)
    kept = tuple(one for one in ran.measures if one.key not in left and _end(one.key) in asked)
    ran = dataclasses.replace(ran, measures=kept)
    notes = [] if unaccepted else [f"changed, acknowledged ({own.reason}): {line}" for line in changed.lines]
    laws = law_checks(now, held.prints, changed)
    base = dataclasses.replace(held.measured, measures=tuple(behind), study_hash=ran.study_hash)
    judged = judge(ran, base, dataclasses.replace(rules, level=max(0.0, rules.level - LEVEL)), gaps=held.gaps)
    checks = sorted([*laws, *judged.checks], key=lambda one: list(Verdict).index(one.verdict))
    return ran, Outcome(tuple(checks), judged.problems, (*notes, *judged.warnings), unaccepted, unchanged)


def _concerned(changed: Changed, defense: PartSpec, attack: PartSpec | None) -> bool:
    """Whether a change affects a cell or a measure. Those without a defense are controls and run with every change."""
    return changed.concerns(defense.key, attack.key if attack else None, control=defense.name == UNDEFENDED)


def _ends(cells: Iterable[Cell]) -> set[str]:
    """The ends of the keys of all measures of these cells and of their trainings."""
    found = {training_identity(cell.training)[:DIGITS] for cell in cells}
    return found | {key_end(cell) for cell in cells}


def _end(key: str) -> str:
    """The end of a key."""
    return key.rpartition("/")[2]


def _unacknowledged(now: Iterable[Print], held: Baseline, own: Baseline) -> tuple[str, ...]:
    """The parts whose fingerprint in the checkout's baseline differs from its code.

    Parts with unchanged code are included: otherwise a baseline could be prepared for a later change.
    """
    lines = compare(now, own.prints).lines if held.prints or own.prints else ()
    return tuple(f"differs from the baseline of this checkout: {line}; {_ACKNOWLEDGE}" for line in lines)
