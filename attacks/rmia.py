"""Membership by the ratio of a record's probability to its probability under a few shadow models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakgauge.attacks._members.scores import confidence, rmia
from leakgauge.attacks._members.shadowing import ByShadows, Mode, Shadowing, outputs
from leakgauge.harness.core.contract import Examples, Task
from leakgauge.harness.core.stats import auc, tpr_at_fpr
from leakgauge.harness.core.vec import Vector

_TEMPERATURES, _WEIGHTS = (1.5, 1.0, 2.0, 3.0), (0.4, 0.3, 0.5)  # the first ones with too few shadows to choose
_TIE = 0.001  # largest difference in AUC that counts as none


@dataclass(frozen=True)
class RMIA(ByShadows):
    """Compares a label's probability under the final model with its mean probability under shadow models.

    The score is the logarithm of their ratio. It ranks records as the attack of the source does, but without ties; see
    `attacks._members.scores.rmia`. The population is the auxiliary data outside the shadows' pool; it does not change
    the ranking.

    With `auto`, the shadows choose the parameter: each shadow is once attacked with the shadows of the other pairs, and
    all scores of the pool's records are pooled. The choice has the highest AUC; among choices that come within 0.001 of
    it, it has the highest TPR at 1 % FPR. It holds for all candidates and does not use the final model. With fewer than
    two shadows in other pairs, the temperature is 1.5, the weight 0.4, and the variant follows `mode`.

    Must know: the final model, the candidates with their labels, how the federation trains and on how many records, and
    auxiliary data to train shadow models on. With `simulate`, it must also know the defense.

    Cannot: use the model or the messages of a round, or how much the shadows disagree on a record.

    Args:
        mode: `online`: there are shadows with and without each candidate. `offline`: no shadow trains on a candidate.
        shadows: number of shadow models.
        offline_a: a of the offline variant, where shadows with the record are assumed to have p_in = a p_out + 1 - a.
        simulate: whether the shadows' updates pass through the defense.
        temperature: number that divides the outputs before the softmax; `auto` chooses among 1, 1.5, 2 and 3.
        weight: of the shadows with the record in the mean of the online variant; `auto` chooses among 0.3, 0.4 and 0.5.
        variant: whether the mean is over shadows with and without the record (`online`), or only over those without it
            (`offline`). The mode `offline` has no other variant.

    Raises:
        ValueError: a parameter is out of range; in `run`: fewer than two classes, too few records to train shadows on,
            or all shadows diverged.

    Source: Zarifzadeh, Liu, Shokri 2024, "Low-cost high-power membership inference attacks" (arXiv 2312.03262). Their a
        = 0.3 is for CIFAR-10, tuned on pairs of shadows. Differs: uses the log ratio instead of the count; has no
        augmented queries. The weight and the choices are ours.
    """

    mode: Mode = "online"
    shadows: int = 4
    offline_a: float = 0.3
    simulate: bool = False
    temperature: float | Literal["auto"] = "auto"
    weight: float | Literal["auto"] = "auto"
    variant: Literal["auto", "online", "offline"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.offline_a <= 1:
            raise ValueError(f"expected 0 <= offline_a <= 1, got offline_a={self.offline_a}")
        if self.temperature != "auto" and not 0 < float(self.temperature) < math.inf:
            raise ValueError(f"expected temperature > 0 or 'auto', got temperature={self.temperature}")
        if self.weight != "auto" and not 0 <= float(self.weight) <= 1:
            raise ValueError(f"expected 0 <= weight <= 1 or 'auto', got weight={self.weight}")
        if self.variant not in ("auto", "online", "offline"):
            raise ValueError(f"expected variant 'auto', 'online' or 'offline', got {self.variant!r}")

    def scores(self, task: Task, model: Vector, candidates: Examples, trained: Shadowing) -> Tensor:
        """The log ratios, minus the population's median."""
        t, a, weight = self.choose(task, trained)
        models = [model, *trained.models]
        own, aside = (confidence(outputs(task, models, x) / t, y).sigmoid() for x, y in (candidates, trained.aside))
        return rmia(own[0], own[1:], trained.candidates, aside[0], aside[1:], offline_a=a, weight=weight)

    def choose(self, task: Task, trained: Shadowing) -> tuple[float, float | None, float]:
        """The temperature; `offline_a` or, for the online variant, None; and the weight."""
        temperatures = _TEMPERATURES if isinstance(self.temperature, str) else (self.temperature,)
        weights = _WEIGHTS if isinstance(self.weight, str) else (self.weight,)
        variant = "offline" if self.mode == "offline" else self.variant
        marginals: list[tuple[float | None, float]] = [(None, weight) for weight in weights if variant != "offline"]
        marginals += [(self.offline_a, 0.5)] if variant != "online" else []
        usual = temperatures[0], *marginals[0]
        if len(temperatures) * len(marginals) == 1:
            return usual
        pool, pairs, inside = outputs(task, trained.models, trained.pool.x), trained.pairs, trained.inside
        usable = pool.isfinite().flatten(1).all(1)
        rivals = {i: ((pairs != pairs[i]) & usable).nonzero()[:, 0] for i in usable.nonzero()[:, 0].tolist()}
        rivals = {i: rows for i, rows in rivals.items() if len(rows) > 1}
        if not rivals:
            return usual
        members, found = inside[list(rivals)], []
        for temperature in temperatures:
            p = confidence(pool / temperature, trained.pool.y).sigmoid()
            for a, weight in marginals:
                parts = ((p[i], p[rows], inside[rows], p[i, :0], p[rows, :0]) for i, rows in rivals.items())
                scores = torch.stack([rmia(*part, offline_a=a, weight=weight) for part in parts])
                sides = scores[members].numpy(), scores[~members].numpy()
                area, rate = auc(*sides).value, tpr_at_fpr(*sides, 0.01).value
                found.append((area or 0.0, rate or 0.0, (temperature, a, weight)))
        best = max(area for area, _, _ in found)
        return max((one for one in found if one[0] >= best - _TIE), key=lambda one: (one[1], one[0]))[2]
