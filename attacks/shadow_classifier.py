"""Membership by a classifier that learned from shadow models what outputs on members look like."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from leakgauge.attacks._members.scores import confidence, finite
from leakgauge.attacks._members.shadowing import ByShadows, check_runs, outputs, shadow
from leakgauge.harness.core.contract import Membership, Observation
from leakgauge.harness.core.rng import Key

_TOP = 3
"""Largest probabilities that the classifier sees, as many as the source found to suffice."""

_FAR = 1e6
"""Features beyond it count as it: a model that is hopelessly wrong must not decide the classifier's scale."""


@dataclass(frozen=True)
class ShadowClassifier(ByShadows):
    """Logistic regression tells records that a model trained on from others, by the model's output and their label.

    It learns from shadow models, trained on halves of auxiliary data: their outputs on the half that they had, and on
    the half that they had not. Then it reads the final model's outputs on the candidates.

    Must know: the final model, the candidates with their labels, how the federation trains and on how many records, and
    auxiliary data. With `simulate`, the defense as well.

    Cannot: compare a record with itself under other models, as LiRA and RMIA do: a record that is easy for any model
    looks like a member.

    Args:
        shadows: models trained by the attacker.
        simulate: the shadows' updates pass through the defense.

    Raises:
        ValueError: a parameter out of range; in `run`, fewer than two classes, too few auxiliary records to train
            shadows on, or all shadows diverged.

    Source: Shokri, Stronati, Song, Shmatikov 2017, "Membership inference attacks against machine learning models"
        (arXiv 1610.05820), section V. Differs: the three largest probabilities, the log odds and the loss of the label,
        for the whole output; one logistic regression for all classes, for a network a class: the federation's records
        of one class are few.
    """

    shadows: int = 16
    simulate: bool = False

    def __post_init__(self) -> None:
        check_runs(self.shadows, 1)

    def run(self, seen: Observation, key: Key) -> Membership:
        """The classifier's log odds."""
        # here, for it takes a second that no other attack should pay
        from sklearn.linear_model import LogisticRegression

        assert seen.final is not None
        assert seen.candidates is not None
        x, y = seen.candidates
        made = shadow(seen, key, runs=self.shadows, online=False, simulate=self.simulate)
        learned = _features(outputs(seen.task, made.models, made.pool.x), made.pool.y).flatten(0, 1)
        usable = learned.isfinite().all(1)
        learned, had = learned[usable], made.inside.flatten()[usable]
        mean, std = learned.mean(0), learned.std(0, correction=0)
        scale = torch.where(std > 0, std, 1.0)
        model = LogisticRegression(max_iter=1000).fit(((learned - mean) / scale).numpy(), had.numpy())
        weights = torch.from_numpy(model.coef_[0])
        asked = _features(outputs(seen.task, [seen.final], x)[0], y)
        return Membership(finite(((asked - mean) / scale) @ weights))


def _features(scores: Tensor, y: Tensor) -> Tensor:
    """[..., n, features] float64 of a model's outputs [..., n, classes]."""
    top = scores.double().softmax(-1).sort(-1, descending=True).values[..., :_TOP]
    phi = confidence(scores, y)
    # -log p of the label, out of its log odds
    rest = torch.stack([phi, softplus(-phi)], -1).clamp(-_FAR, _FAR)
    return torch.cat([top, rest], -1)
