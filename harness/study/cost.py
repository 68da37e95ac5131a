"""About how long a study takes: an upper bound from measured unit costs, so that nobody starts a week by mistake."""

from __future__ import annotations

from leakgauge.harness.core.cell import Cell, TrainingSpec
from leakgauge.harness.study.study import Study

_STEP_MS = 2.0
"""One local step of one client on one core: the CNNs of 6,000 to 16,000 weights at batch 32 take 1.5 to 2.5 ms."""

_EVALUATION_MS = 1.6
"""One evaluation and L-BFGS step of one image of LeNet on one core: 0.8 (benchmarks/matching.py) and as much again."""


def estimate(study: Study) -> str:
    """One line: an upper bound of the work on one core, for models of the size of LeNet."""
    training = sum(_training_seconds(spec) for spec in study.trainings)
    attacks = sum(_attack_seconds(cell) for cell in study.cells)
    return (
        f"at most about {_span(training)} of training and {_span(attacks)} of attacks on one core, for models of "
        "LeNet's size; most attacks stop early"
    )


def _training_seconds(spec: TrainingSpec) -> float:
    """Local steps of all clients and rounds; an epoch counts as the steps over an equal share of the samples."""
    federation = spec.federation
    steps = federation.local_steps or 1
    if federation.algorithm == "fedavg" and federation.local_steps is None:
        share = (federation.samples or 50_000) / federation.clients
        steps = (federation.local_epochs or 1) * max(1, round(share / (federation.batch or share)))
    return federation.rounds * (federation.participants or federation.clients) * steps * _STEP_MS / 1000


def _attack_seconds(cell: Cell) -> float:
    """Evaluations of all victims and restarts, where the attack has a budget of them."""
    budget = cell.attack.parameters.get("evaluations")
    restarts = cell.attack.parameters.get("restarts", 1)
    if not isinstance(budget, int) or not isinstance(restarts, int):
        return 0.1
    return cell.target.count * cell.target.batch * restarts * budget * _EVALUATION_MS / 1000


def _span(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
