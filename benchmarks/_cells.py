"""Cells for benchmarks: those of a study with their seconds, and equal ones, which compute for some seconds each."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from leakgauge.harness.core.cell import Cell
from leakgauge.harness.core.contract import Attack, Membership, Observation
from leakgauge.harness.core.result import Estimate
from leakgauge.harness.core.rng import Key
from leakgauge.harness.study.attack import run_attack
from leakgauge.harness.study.jobs import Job, RunContext, perform
from leakgauge.harness.study.study import Study, resolve


@dataclass(frozen=True)
class Busy(Attack):
    """Compute for `seconds` of processor time; all scores are zero. `number` makes cells differ."""

    kind: ClassVar[str] = "membership"
    seconds: float = 1.0
    number: int = 0

    @property
    def needs(self) -> frozenset[str]:
        """The candidates, which are only counted."""
        return frozenset({"candidates"})

    def run(self, seen: Observation, key: Key) -> Membership:
        """Scores of zero."""
        assert seen.candidates is not None
        end, x = time.process_time() + self.seconds, torch.ones(200, 200)
        while time.process_time() < end:
            x @ x
        return Membership(torch.zeros(len(seen.candidates.y)))


def attacked(study: Study, root: Path) -> Iterator[tuple[Cell, dict[str, Estimate], float]]:
    """Each cell of a study with its estimates by name, and processor seconds of a victim without the training."""
    with tempfile.TemporaryDirectory() as folder:
        context = RunContext(Path(folder), root)
        for spec in study.trainings:
            outcome = perform(Job("training", spec, study.cells_of[spec.id]), context)
            assert not outcome.error, outcome.error
        for cell in study.cells:
            start = time.process_time()
            found = {one.name: one for one in run_attack(cell, context).estimates}
            yield cell, found, (time.process_time() - start) / cell.target.count


def equal(cells: int, seconds: float) -> Study:
    """Equal cells on one small training."""
    table = {
        "name": "equal",
        "tasks": [{"data": "digits", "model": "linear"}],
        "federations": [{"rounds": 1, "clients": 2, "samples": 40, "test_samples": 20}],
        "defenses": [{"name": "none"}],
        "attacks": [
            {
                "name": "_cells:Busy",
                "seconds": seconds,
                "number": list(range(cells)),
                "target": {"kind": "members", "count": 10},
            }
        ],
    }
    return resolve(table, allow_code=True)
