"""About how long a study takes: an upper bound from measured unit costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leakgauge.harness.core.cell import Cell, TrainingSpec

if TYPE_CHECKING:
    from leakgauge.harness.study.study import Study

_STEP_MS = 2.0
"""One local step of one client on one core; measured: 1.5 to 2.5 ms for CNNs of 6,000 to 16,000 weights, batch 32."""

_EVALUATION_MS = 1.6
"""One evaluation of one image of LeNet on one core: 0.8 ms (benchmarks/matching.py), and as much for L-BFGS."""


def estimate(study: Study) -> str:
    """One line: an upper bound of the time on one core, for models of the size of LeNet."""
    training = sum(training_seconds(spec) for spec in study.trainings)
    attacks = sum(attack_seconds(cell) for cell in study.cells)
    return (
        f"at most about {span(training)} of training and {span(attacks)} of attacks on one core, for models of "
        "LeNet's size; most attacks stop early"
    )


def training_seconds(spec: TrainingSpec) -> float:
    """Seconds for the local steps of all clients and rounds; an epoch covers an equal share of the samples."""
    one = spec.federation
    steps = one.local_steps or 1
    if one.algorithm == "fedavg" and one.local_steps is None:
        share = (one.samples or 50_000) / one.clients
        steps = (one.local_epochs or 1) * max(1, round(share / (one.batch or share)))
    return one.rounds * (one.participants or one.clients) * steps * _STEP_MS / 1000


def attack_seconds(cell: Cell) -> float:
    """Seconds for the evaluations of all victims and restarts; 0.1 for an attack without a budget of evaluations."""
    budget = cell.attack.parameters.get("evaluations")
    restarts = cell.attack.parameters.get("restarts", 1)
    if not isinstance(budget, int) or not isinstance(restarts, int):
        return 0.1
    return cell.target.count * cell.target.batch * restarts * budget * _EVALUATION_MS / 1000


def span(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
