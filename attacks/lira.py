"""Membership by a likelihood ratio between shadow models with and without the record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from leakgauge.attacks._members.scores import Variance, confidence, lira_offline, lira_online
from leakgauge.attacks._members.shadowing import ByShadows, Mode, Shadowing, outputs
from leakgauge.harness.core.contract import Examples, Task
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class LiRA(ByShadows):
    """Tests the final model's confidence in a record by a likelihood ratio from shadow models with and without it.

    Must know: the final model, the candidates with their labels, how the federation trains and on how many records, and
    auxiliary data to train shadow models on. With `simulate`, it must also know the defense.

    Cannot: use the model or the messages of a round. Shadows that lack the defense, or train on fewer records than the
    federation because auxiliary data are scarce, misjudge how much a record changes the model.

    Args:
        mode: `online`: each shadow trains on a random part of the candidates and auxiliary records, so each candidate
            is compared with shadows with and without it. `offline`: no shadow trains on a candidate, so shadows can be
            trained before the candidates are known; the test is then one-sided.
        shadows: number of shadow models.
        variance: `pooled` over the records, `per-example` or `global`: see `attacks._members.scores.lira_online`.
            With 4 shadows, a record's own variance ruins the attack.
        shrink: for `online`, whether to shrink a record's two means towards the values that the other records suggest;
            see `lira_online`.
        simulate: whether the shadows' updates pass through the defense.

    Raises:
        ValueError: a parameter is out of range; in `run`: fewer than two classes, too few records to train shadows on,
            or all shadows diverged.

    Source: Carlini et al. 2022, "Membership inference attacks from first principles" (arXiv 2112.03570), Algorithm 1
        and section V.D. Differs: adds `pooled` and `shrink`; uses means, as in the text, instead of the public code's
        medians; has no augmented queries.
    """

    mode: Mode = "online"
    shadows: int = 16
    variance: Variance = "pooled"
    shrink: bool = True
    simulate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variance not in get_args(Variance):
            raise ValueError(f"expected variance {', '.join(map(repr, get_args(Variance)))}, got {self.variance!r}")

    def scores(self, task: Task, model: Vector, candidates: Examples, trained: Shadowing) -> Tensor:
        """The log likelihood ratio; offline, the log of one tail probability."""
        x, y = candidates
        target = confidence(outputs(task, [model], x)[0], y)
        others = confidence(outputs(task, trained.models, x), y)
        if self.mode == "offline":
            return lira_offline(target, others, trained.candidates, self.variance)
        return lira_online(target, others, trained.candidates, self.variance, shrink=self.shrink)
