"""A lower bound of epsilon from scores that a user already has, such as those of their own canaries.

A row is one independent trial: a score, and whether the canary was in (1) or out (0). Larger scores should mean in.
"""

from __future__ import annotations

import csv
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from leakgauge.harness.audit.bounds import best_ceiling, best_epsilon_lower
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.files import content, text
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.data import check_unpacked, reading

NAMES = ("score", "in")
"""The columns of a CSV file, or the arrays of an npz file."""

_FORM = 'expected a CSV file with the columns "score" and "in", or an npz file with these arrays'


@dataclass(frozen=True)
class ScoresRecord:
    """The bound of a file of scores.

    Attributes:
        epsilon_lower: with this confidence, epsilon at `delta` is at least this, for any mechanism.
        ceiling: the bound if all scores of canaries that were in were above all others.
        ins, outs: the numbers of trials with and without the canary.
    """

    epsilon_lower: float
    delta: float
    confidence: float
    ceiling: float
    ins: int
    outs: int


def audit_scores(path: Path, delta: float, confidence: float) -> ScoresRecord:
    """The largest bound over all thresholds, valid for all of them at once (`bounds.best_epsilon_lower`).

    Raises:
        StudyError: the file cannot be read, has other columns, a score that is not a number, a side that is neither 0
            nor 1, or trials of one side only; delta outside [0, 1), or confidence outside (0, 1).
    """
    try:
        data = content(path)
        with reading(path):
            scores, inside = _columns(data)
        outs, ins = scores[inside == 0], scores[inside == 1]
        bound = best_epsilon_lower(outs, ins, delta, confidence)
        most = best_ceiling(len(outs), len(ins), delta, confidence)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise StudyError(str(path), [reason.removeprefix(f"cannot read {path}: ")]) from error
    return ScoresRecord(bound, delta, confidence, most, len(ins), len(outs))


def _columns(data: bytes) -> tuple[Numbers, Numbers]:
    """[n] scores and [n] sides of a file, as float64."""
    columns = _arrays(data) if data.startswith(b"PK") else _table(text(data))
    shapes = [np.shape(column) for column in columns]
    if len(shapes[0]) != 1 or shapes[0] != shapes[1] or not shapes[0][0]:
        raise ValueError(f'expected "score" [n] and "in" [n], n >= 1, got {shapes[0]} and {shapes[1]}')
    scores, inside = (np.asarray(column, np.float64) for column in columns)
    if np.isnan(scores).any():
        raise ValueError(f"row {int(np.isnan(scores).argmax()) + 1} has a score that is not a number")
    wrong = inside[(inside != 0) & (inside != 1)]
    if len(wrong):
        raise ValueError(f'"in" has {wrong[0]:g}, expected 1 (the canary was in) or 0 (it was out)')
    if inside.min() == inside.max():
        raise ValueError(f"all {len(inside)} scores have in = {int(inside[0])}, expected some of 0 and of 1")
    return scores, inside


def _arrays(data: bytes) -> list[Numbers]:
    with zipfile.ZipFile(io.BytesIO(data)) as members:
        check_unpacked(sum(member.file_size for member in members.infolist()), len(data))
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        missing = [name for name in NAMES if name not in file]
        if missing:
            raise ValueError(f'no array "{missing[0]}": {_FORM}')
        return [file[name] for name in NAMES]


def _table(lines: str) -> list[Numbers]:
    rows = csv.DictReader(io.StringIO(lines))
    names = [name.strip().lower() for name in rows.fieldnames or []]
    missing = [name for name in NAMES if name not in names]
    if missing:
        raise ValueError(f'no column "{missing[0]}": {_FORM}')
    rows.fieldnames = names
    columns: list[list[float]] = [[], []]
    for number, row in enumerate(rows, 2):
        for column, name in zip(columns, NAMES, strict=True):
            try:
                column.append(float(row[name]))
            except (TypeError, ValueError):
                raise ValueError(f'line {number} has {row[name]!r} as "{name}", expected a number') from None
    return [np.array(column) for column in columns]


def lines_of(record: ScoresRecord, path: Path) -> list[str]:
    """The record for a terminal."""
    reach = "" if record.epsilon_lower < 0.9 * record.ceiling else "; more trials could show more"
    return [
        f"{path}: {record.ins} scores of canaries that were in, {record.outs} that were out",
        f"  audited  epsilon >= {record.epsilon_lower:.4g} at delta {record.delta:g}, confidence {record.confidence:g}"
        f", any mechanism (the best of all thresholds; these trials show at most {record.ceiling:.4g}{reach})",
        "  The bound is for the unit, the adversary and the rounds behind the scores, if the trials are independent.",
    ]
