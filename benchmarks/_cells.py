"""Equal cells for benchmarks of schedules and engines: each cell computes for some seconds on one core."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import torch

from leakgauge.harness.core.contract import Attack, Membership, Observation
from leakgauge.harness.core.rng import Key
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
