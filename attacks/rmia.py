"""Membership by the ratio of a record's probability to its probability under a few shadow models."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from leakgauge.attacks._members.scores import confidence, rmia
from leakgauge.attacks._members.shadowing import ByShadows, Mode, Shadowing, outputs
from leakgauge.harness.core.contract import Examples, Task
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class RMIA(ByShadows):
    """Compares a label's probability under the final model with its mean probability under shadow models.

    The score is the logarithm of their ratio. It ranks records as the attack of the source does, but without ties; see
    `attacks._members.scores.rmia`. The population is the auxiliary data outside the shadows' pool; it does not change
    the ranking.

    Must know: the final model, the candidates with their labels, how the federation trains and on how many records, and
    auxiliary data to train shadow models on. With `simulate`, it must also know the defense.

    Cannot: use the model or the messages of a round, or how much the shadows disagree on a record. With many shadows,
    LiRA is better at low false positive rates.

    Args:
        mode: `online`: there are shadows with and without each candidate. `offline`: no shadow trains on a candidate.
        shadows: number of shadow models.
        offline_a: a in `offline`, where shadows with the record are assumed to have p_in = a p_out + 1 - a.
        simulate: whether the shadows' updates pass through the defense.

    Raises:
        ValueError: a parameter is out of range; in `run`: fewer than two classes, too few records to train shadows on,
            or all shadows diverged.

    Source: Zarifzadeh, Liu, Shokri 2024, "Low-cost high-power membership inference attacks" (arXiv 2312.03262). Their a
        = 0.3 is for CIFAR-10, tuned on pairs of shadows. Differs: uses the log ratio instead of the count; has no
        augmented queries.
    """

    mode: Mode = "online"
    shadows: int = 4
    offline_a: float = 0.3
    simulate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.offline_a <= 1:
            raise ValueError(f"expected 0 <= offline_a <= 1, got offline_a={self.offline_a}")

    def scores(self, task: Task, model: Vector, candidates: Examples, trained: Shadowing) -> Tensor:
        """The log ratios, minus the population's median."""
        models = [model, *trained.models]
        own, aside = (confidence(outputs(task, models, x), y).sigmoid() for x, y in (candidates, trained.aside))
        offline_a = self.offline_a if self.mode == "offline" else None
        return rmia(own[0], own[1:], trained.candidates, aside[0], aside[1:], offline_a=offline_a)
