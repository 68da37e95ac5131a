"""Losses by name or as a user's function: what a client minimizes, and what a gradient in the scores shows of labels.

A label is a class, or a number for each score. As a target, a class is a row of probabilities, 1 for the class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, one_hot, relu

from leakgauge.harness.core.code import imported
from leakgauge.harness.core.errors import UnknownNameError, unknown

Function = Callable[[Tensor, Tensor], Tensor]
"""(scores [b, k], labels [b], or numbers [b, k]) -> the mean loss, or one for each record [b]."""

NAMES = {
    "cross-entropy": "softmax cross-entropy; options smoothing=0.1 and weights=1,2,..., one for each class",
    "binary-cross-entropy": "of sigmoids, mean over the scores; a class counts as its one-hot row",
    "squared": "mean squared error over the scores; a class counts as its one-hot row",
    "hinge": "max(0, 1 + best other score - true score)",
    "cross-entropy-per-place": "softmax cross-entropy, mean over the places of a label, as in a segmentation",
    "next-token": "mean softmax cross-entropy of each token given those before it; the labels are not used",
}
"""The named losses, each with a one-line summary."""

_TORCH: tuple[tuple[type[nn.Module], Any, str], ...] = (
    (nn.CrossEntropyLoss, cross_entropy, "cross-entropy"),
    (nn.BCEWithLogitsLoss, binary_cross_entropy_with_logits, "binary-cross-entropy"),
    (nn.MSELoss, mse_loss, "squared"),
)
"""The names of torch's losses."""

_NAME = "inspect"  # name of the function that is registered in this process
_given: dict[str, Function] = {}


@dataclass(frozen=True)
class Loss:
    """A loss of scores [b, k].

    Attributes:
        name: one of `NAMES`, `module:function`, or `given:NAME` of a function that is registered in this process.
        smoothing, weights: of a cross-entropy, as in `torch.nn.CrossEntropyLoss`: in a batch, each record counts with
            the weight of its class.
    """

    name: str = "cross-entropy"
    smoothing: float = 0.0
    weights: tuple[float, ...] = ()

    @property
    def softmax(self) -> bool:
        """Whether it is the softmax cross-entropy, without options."""
        return self == CROSS_ENTROPY

    @property
    def separable(self) -> bool:
        """Whether the loss of a batch is known to be the mean of its records' losses."""
        return ":" not in self.name and not self.weights

    @property
    def linked(self) -> bool:
        """Whether a record's gradient in its scores is `slope` * (`link`(scores) - target), up to its weight."""
        return self.name in NAMES and self not in (HINGE, PER_PLACE, NEXT_TOKEN)

    @property
    def bounded(self) -> bool:
        """Whether the link is above 0, so that a negative entry of the gradient proves a label."""
        return self.linked and self.name != "squared" and not self.smoothing

    def slope(self, k: int) -> float:
        """See `linked`."""
        return {"cross-entropy": 1 - self.smoothing, "squared": 2 / k}.get(self.name, 1 / k)

    def link(self, scores: Tensor) -> Tensor:
        """See `linked`: [..., k] of the scores [..., k]."""
        if self.name == "cross-entropy":
            return (scores.softmax(-1) - self.smoothing / scores.shape[-1]) / (1 - self.smoothing)
        return scores if self.name == "squared" else scores.sigmoid()

    def each(self, scores: Tensor, y: Tensor) -> Tensor:
        """[b] losses of the records alone, times the weight of their class.

        Args:
            y: [b] classes, or targets [b, k] or for k = 1 [b]; a user's function takes no probabilities of classes.
        """
        if self.name == "cross-entropy":
            if not self.smoothing and not self.weights:
                return cross_entropy(scores, y, reduction="none")
            weight = scores.new_tensor(self.weights) if self.weights else None
            return cross_entropy(scores, y, weight, reduction="none", label_smoothing=self.smoothing)
        if self.name == "hinge":
            return _hinge(scores, y)
        if self == NEXT_TOKEN:
            return scores[:, 0]
        if self == PER_PLACE:
            return cross_entropy(scores.view(len(scores), -1, y.shape[1]), y.long(), reduction="none").mean(1)
        if ":" in self.name:
            function = function_of(self.name, scores.dtype)
            losses: Tensor = vmap(lambda row, label: function(row[None], label[None]).mean())(scores, y)
            return losses
        targets = one_hot(y, k) if (k := scores.shape[1]) > 1 and y.ndim == 1 else y
        targets = targets.reshape(scores.shape).to(scores.dtype)
        if self.name in ("squared", "slopes"):
            return (scores - targets).square().mean(1) if self.name == "squared" else (scores * targets).sum(1)
        return binary_cross_entropy_with_logits(scores, targets, reduction="none").mean(1)

    def batch(self, scores: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of a batch; arguments as in `each`."""
        if ":" in self.name:
            return function_of(self.name, scores.dtype)(scores, y).mean()
        losses = self.each(scores, y)
        if not self.weights:
            return losses.mean()
        weights = scores.new_tensor(self.weights)
        return losses.sum() / (weights[y] if y.ndim == 1 else y @ weights).sum()


CROSS_ENTROPY, BINARY, SQUARED, HINGE, PER_PLACE, NEXT_TOKEN = map(Loss, NAMES)
SLOPES = Loss("slopes")
"""The sum of scores times targets: the gradient of any loss whose slopes in the scores are known."""


def _hinge(scores: Tensor, y: Tensor) -> Tensor:
    """Source: Crammer and Singer 2001."""
    itself = torch.eye(scores.shape[1], dtype=torch.bool, device=scores.device)
    rivals = scores[:, None, :].masked_fill(itself, -torch.inf).amax(-1)
    losses = relu(1.0 + rivals - scores)  # [b, classes], one per possible label
    return losses.gather(1, y[:, None])[:, 0] if y.ndim == 1 else (losses * y).sum(1)


def next_tokens(padding: int | None, module: nn.Module, inputs: tuple[Any, ...], logits: Any) -> Tensor:
    """[b, 2] of logits [b, T, V] and ids [b, T]: the mean cross-entropy of the next tokens, and the share found.

    padding: a token that is not predicted; None: all are.
    """
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[1] != inputs[0].shape[1]:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"expected scores [b, T, vocabulary] of the next token at each place, got {got}")
    scores, later = logits[:, :-1].transpose(1, 2), inputs[0][:, 1:].long()
    counted = torch.ones_like(later, dtype=scores.dtype) if padding is None else (later != padding).to(scores.dtype)
    total = counted.sum(1).clamp(min=1)
    losses = (cross_entropy(scores, later, reduction="none") * counted).sum(1) / total
    right = ((scores.detach().argmax(1) == later) * counted).sum(1) / total
    return torch.stack([losses, right], 1)


def parse(text: str) -> Loss:
    """The loss of a text such as `cross-entropy?smoothing=0.1&weights=1,2,5`.

    Raises:
        UnknownNameError: there is no such loss, or its module cannot be imported.
        ValueError: an option is wrong.
    """
    name, _, query = text.partition("?")
    if ":" in name:
        function_of(name)
    elif name not in NAMES:
        raise unknown("loss", name, NAMES)
    loss = Loss(name)
    for option in query.split("&") if query else ():
        key, _, value = option.partition("=")
        try:
            numbers = tuple(map(float, value.split(",")))
        except ValueError:
            numbers = ()
        if key == "smoothing" and len(numbers) == 1 and 0 <= numbers[0] < 1:
            loss = replace(loss, smoothing=numbers[0])
        elif key == "weights" and numbers and 0 <= min(numbers) < max(numbers) + 1 < math.inf and max(numbers) > 0:
            loss = replace(loss, weights=numbers)
        else:
            raise ValueError(f"loss {text!r}: expected 0 <= smoothing < 1, or weights=1,2,... >= 0, got {option!r}")
    if query and name != "cross-entropy":
        raise ValueError(f"loss {text!r}: only cross-entropy has options")
    return loss


def text_of(given: object) -> str:
    """The text of a loss that a user gives: a text, a loss of torch, or a function, which is registered here.

    None: an empty text, the model's own loss.

    Raises:
        UnknownNameError, ValueError: as `parse`, or it is none of these.
    """
    if given is None:
        return ""
    if isinstance(given, str):
        parse(given)
        return given
    if isinstance(given, nn.CrossEntropyLoss) and (given.reduction, given.ignore_index) == ("mean", -100):
        weights = "" if given.weight is None else "weights=" + ",".join(map(repr, given.weight.tolist()))
        smoothing = f"smoothing={given.label_smoothing}" if given.label_smoothing else ""
        return "?".join(filter(None, ("cross-entropy", "&".join(filter(None, (smoothing, weights))))))
    for kind, function, name in _TORCH:
        plain = isinstance(given, kind) and given.reduction == "mean" and not list(given.buffers())
        if plain or given is function:
            return name
    if getattr(given, "reduction", "mean") == "sum":
        text = (
            "the mean over the batch, as the size of a sum changes with it: divide sums of gradients by their records"
        )
        raise ValueError(f"expected a loss that is {text}, got reduction='sum'")
    if not callable(given):
        raise ValueError(f"expected a loss ({', '.join(NAMES)}) or a function of scores and labels, got {given!r}")
    _given[_NAME] = given
    return f"given:{_NAME}"


def function_of(name: str, dtype: torch.dtype = torch.float32) -> Function:
    """The user's function of this name; a module's own tensors get the type of the scores.

    Raises:
        UnknownNameError: there is none.
    """
    kind, _, rest = name.partition(":")
    if kind == "given" and rest not in _given:
        raise UnknownNameError(f"no loss {name!r} in this process: only the process that registered it may run it")
    found: Any = _given[rest] if kind == "given" else imported("loss", name)
    if not callable(found):
        raise UnknownNameError(f"expected a function of scores and labels for {name!r}, got {found!r}")
    return found.to(dtype) if isinstance(found, nn.Module) else found
