"""The usual gradient-matching loops, as published: one image, torch's L-BFGS, no line search.

Reimplemented from the papers and the published programs, so that both sides of a comparison use the same images, models
and machine. Intermediate output (losses, pictures) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters

from leakgauge.harness.core.contract import Guess
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.models import Model

OUTER = 300
"""Calls of the optimizer's `step`, each of up to 20 L-BFGS iterations."""

ENOUGH = 1e-6
"""Loss below which iDLG stops; DLG never stops early."""


class LeNet(nn.Module):
    """The LeNet of Zhu et al. 2019: three 5x5 convolutions of 12 channels and a dense layer, with sigmoid."""

    def __init__(self, model: Model, params: Vector) -> None:
        """Take sizes from `model`, a `lenet-dlg`, and values from `params` [d], in the order of its layout."""
        super().__init__()
        *_, (classes, flat), _ = model.layout.shapes
        with torch.device("meta"):  # no initial values are drawn, because `params` replaces them
            self.body = nn.Sequential(
                nn.Conv2d(model.input_shape[0], 12, 5, stride=2, padding=2),
                nn.Sigmoid(),
                nn.Conv2d(12, 12, 5, stride=2, padding=2),
                nn.Sigmoid(),
                nn.Conv2d(12, 12, 5, stride=1, padding=2),
                nn.Sigmoid(),
            )
            self.fc = nn.Linear(flat, classes)
        self.to_empty(device=params.device)
        vector_to_parameters(params.clone(), self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        """[b, classes] scores of x [b, *input_shape]."""
        scores: Tensor = self.fc(self.body(x).flatten(1))
        return scores

    def gradient(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Gradient of the mean cross-entropy of x [b, *input_shape] and labels y [b], one tensor per parameter."""
        return list(torch.autograd.grad(cross_entropy(self(x), y), list(self.parameters())))


class Matching:
    """The optimizer's closure: distance of the dummy's gradient to the target, and the gradient of that distance.

    `calls` counts evaluations. label: [1] int64, held fixed, or [1, classes] logits, which are also searched. As in the
    originals, `backward` also fills the unused gradients of the model's parameters.
    """

    def __init__(self, model: LeNet, target: Sequence[Tensor], x: Tensor, label: Tensor) -> None:
        self.model, self.target, self.calls = model, target, 0
        self.x = x.clone().requires_grad_()
        self.soft = label.is_floating_point()
        self.label = label.clone().requires_grad_() if self.soft else label
        self.optimizer = torch.optim.LBFGS([self.x, self.label] if self.soft else [self.x], lr=1)

    def __call__(self) -> Tensor:
        """One evaluation."""
        self.calls += 1
        self.optimizer.zero_grad()
        loss = self._loss(self.model(self.x))
        dummy = torch.autograd.grad(loss, list(self.model.parameters()), create_graph=True)
        distances = [((own - sent) ** 2).sum() for own, sent in zip(dummy, self.target, strict=True)]
        distance = torch.stack(distances).sum()
        distance.backward()  # type: ignore[no-untyped-call]
        return distance

    def _loss(self, scores: Tensor) -> Tensor:
        """Cross-entropy with the label, or with label probabilities."""
        if not self.soft:
            return cross_entropy(scores, self.label)
        return torch.mean(torch.sum(-self.label.softmax(-1) * scores.log_softmax(-1), 1))


def dlg(model: LeNet, target: Sequence[Tensor], x: Tensor, logits: Tensor, *, outer: int = OUTER) -> Guess:
    """Search image and label together; return the last iterate, even if the search diverged.

    Args:
        target: the received gradient, one tensor per parameter.
        x, logits: first dummies, [1, *input_shape] and [1, classes].

    Returns:
        The guess; its objective is the loss at the start of the last step, which the optimizer returns.

    Source: Zhu, Liu and Han 2019, main.py.
    """
    matching = Matching(model, target, x, logits)
    loss = float("inf")
    for _ in range(outer):
        loss = float(matching.optimizer.step(matching).detach())  # type: ignore[no-untyped-call]
    return Guess(matching.x.detach(), matching.label.detach().argmax(1), loss, matching.calls)


def idlg(model: LeNet, target: Sequence[Tensor], x: Tensor, *, outer: int = OUTER) -> Guess:
    """Take the label from the sign of the last layer's gradient, then search the image; stop below `ENOUGH`.

    The loss is evaluated once more after each step. Arguments as in `dlg`.

    Source: Zhao, Mopuri and Bilen 2020, iDLG.py.
    """
    label = target[-2].sum(1).argmin().reshape(1)
    matching = Matching(model, target, x, label)
    loss = float("inf")
    for _ in range(outer):
        matching.optimizer.step(matching)  # type: ignore[no-untyped-call]
        loss = float(matching().detach())
        if loss < ENOUGH:
            break
    return Guess(matching.x.detach(), label, loss, matching.calls)
