"""Membership by a classifier trained on the outputs of shadow models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from leakgauge.attacks._members.scores import confidence, finite
from leakgauge.attacks._members.shadowing import ByShadows, Shadowing, outputs
from leakgauge.harness.core.contract import Examples, Task
from leakgauge.harness.core.vec import Vector

_TOP = 3  # number of largest probabilities among the features; three suffice, according to the source
_FAR = 1e6  # bound on a feature, so that a single badly wrong model does not set the scale of the classifier


@dataclass(frozen=True)
class ShadowClassifier(ByShadows):
    """Separates members from other records by logistic regression on the model's output and the record's label.

    Each shadow model trains on half of the auxiliary pool. The regression is trained on the shadow models' outputs for
    both halves, then applied to the final model's outputs on the candidates.

    Must know: the final model, the candidates with their labels, how the federation trains and on how many records, and
    auxiliary data. With `simulate`, it must also know the defense.

    Cannot: compare a record with itself under other models, as LiRA and RMIA do. A record that is easy for every model
    looks like a member.

    Args:
        shadows: number of shadow models.
        simulate: whether the shadows' updates pass through the defense.

    Raises:
        ValueError: a parameter is out of range; in `run`: fewer than two classes, too few auxiliary records to train
            shadows on, or all shadows diverged.

    Source: Shokri, Stronati, Song, Shmatikov 2017, "Membership inference attacks against machine learning models"
        (arXiv 1610.05820), section V. Differs: the features are the three largest probabilities, the log odds and the
        loss of the label instead of the whole output; one logistic regression for all classes replaces one network per
        class, because a federation has few records of each class.
    """

    shadows: int = 16
    simulate: bool = False

    def scores(self, task: Task, model: Vector, candidates: Examples, trained: Shadowing) -> Tensor:
        """The classifier's log odds."""
        # imported here because the import takes a second
        from sklearn.linear_model import LogisticRegression

        features = _features(outputs(task, trained.models, trained.pool.x), trained.pool.y).flatten(0, 1)
        usable = features.isfinite().all(1)
        features, inside = features[usable], trained.inside.flatten()[usable]
        mean, std = features.mean(0), features.std(0, correction=0)
        scale = torch.where(std > 0, std, 1.0)
        classifier = LogisticRegression(max_iter=1000).fit(((features - mean) / scale).numpy(), inside.numpy())
        own = _features(outputs(task, [model], candidates.x)[0], candidates.y)
        return finite(((own - mean) / scale) @ torch.from_numpy(classifier.coef_[0]))


def _features(scores: Tensor, y: Tensor) -> Tensor:
    top = scores.double().softmax(-1).sort(-1, descending=True).values[..., :_TOP]
    phi = confidence(scores, y)
    # softplus(-phi) is -log p of the label
    rest = torch.stack([phi, softplus(-phi)], -1).clamp(-_FAR, _FAR)
    return torch.cat([top, rest], -1)
