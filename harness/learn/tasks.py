"""A model and its loss as one function of the flat parameter vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import InTraining, LocalRule, Task
from leakgauge.harness.core.form import Form, form_of
from leakgauge.harness.core.layout import DECODER, ENCODER
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.learn.layers import Sampled
from leakgauge.harness.learn.losses import NEXT_TOKEN
from leakgauge.harness.learn.models import Initialization, Model
from leakgauge.harness.learn.structure import Structure

_DLG_BOUND = 0.5  # the bound of the initialization `dlg`: Zhu et al. 2019, and JoPEQ's inversion experiment


@dataclass(frozen=True)
class ModelTask(Task):
    """A model with its loss.

    Attributes:
        initialization: `default`: weights and biases uniform in +-1/sqrt(fan_in), a norm's scale 1 and bias 0, as in
            torch; `dlg`: all uniform in +-0.5, except a norm's scale 1. A user's network: by `default` with its own
            initialization, by `dlg` with all weights uniform in +-0.5. `zero`: all 0.
        stated: the form of the inputs, see `DataSet`; None: the usual one of their shape.

    Raises:
        ValueError: the initialization is unknown.
    """

    model: Model
    initialization: Initialization = "default"
    stated: Form | None = None

    def __post_init__(self) -> None:
        known = get_args(Initialization)
        if self.initialization not in known:
            raise ValueError(f"no initialization {self.initialization!r}; known: {', '.join(known)}")

    def pruned(self, share: float) -> ModelTask:
        """The task with `Structure.pruned` gradients.

        Raises:
            ValueError: the model's layers are not known, mix records, or are not those of `Structure.body`.
        """
        if self.structure is None or self.mixes:
            why = "mixes the records of a batch" if self.mixes else "is called as it is"
            raise ValueError(f"model {self.model.name!r} {why}, but the defense prunes each record's representation")
        return replace(self, model=replace(self.model, apply=self.structure.pruned(share)))

    def under(self, rule: LocalRule) -> ModelTask:
        """The task that a federation trains by a defense's rule: with its bottleneck, which it gets only once.

        The bottleneck starts like dense layers, all other tensors as they do without it. Evaluations have no noise.

        Raises:
            ValueError: there is a bottleneck, and the model's layers are not known or are not those of
                `Structure.body`.
        """
        if not rule.bottleneck or (self.structure is not None and self.structure.sampled is not None):
            return self
        if self.structure is None:
            text = "the defense inserts a bottleneck before its last dense layer"
            raise ValueError(f"model {self.model.name!r} is called as it is, but {text}")
        wide = self.structure.bottlenecked(rule.bottleneck, rule.divergence)
        return replace(self, model=replace(self.model, apply=wide, start=partial(self._start, wide)))

    def drawn(self, key: Key, images: int) -> ModelTask:
        """The task with noise for this many records, where it has noise and none is given: a client's own draw."""
        if self.structure is None or (at := self.structure.sampled) is None:
            return self
        layers = self.structure.layers
        layer = layers[at]
        assert isinstance(layer, Sampled)
        noisy = replace(layer, drawn=rng.normal(key, (images, layer.width)))
        known = replace(self.structure, layers=(*layers[:at], noisy, *layers[at + 1 :]))
        return replace(self, model=replace(self.model, apply=known))

    def _start(self, wide: Structure, key: Key, initialization: Initialization) -> Vector:
        """Fresh parameters of these layers, which are this task's with a bottleneck."""
        task, layout = replace(self, initialization=initialization), wide.layout
        others = iter(self.layout.split(task.init(key)))
        return layout.join(
            [
                task._scale(rng.uniform(key.child(name), shape, -1.0, 1.0), fan_in)
                if name.startswith((ENCODER, DECODER))
                else next(others)
                for name, shape, fan_in in zip(layout.names, layout.shapes, wide.fan_in, strict=True)
            ]
        )

    @property
    def layout(self) -> Layout:
        """Names and shapes of the tensors in the flat vector."""
        return self.model.layout

    @property
    def structure(self) -> Structure | None:
        """The model's layers; None: they are not known."""
        return self.model.structure

    @property
    def form(self) -> Form:
        """What an input is."""
        return self.stated or form_of(self.input_shape)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch axis."""
        return self.model.input_shape

    @property
    def classes(self) -> int:
        """Number of label classes; 1 if the label is a number."""
        return self.model.classes

    @property
    def softmax(self) -> bool:
        """Whether the loss is softmax cross-entropy, without weights and smoothing."""
        return self.model.loss.softmax

    @property
    def numbers(self) -> bool:
        """Whether the label is a number for each score, not a class."""
        return self.model.numbers

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of one label: () for a class, one number, or none; else [classes] or [places]."""
        if not self.numbers or self.classes == 1 or self.model.loss == NEXT_TOKEN:
            return ()
        return (self.model.places or self.classes,)

    @property
    def separable(self) -> bool:
        """Whether the loss of a batch is the mean of its records' losses."""
        return not self.mixes and self.model.loss.separable

    @property
    def linked(self) -> bool:
        """Whether a record's gradient in its scores is `slope` (`link`(scores) - target), times its label's weight."""
        return self.model.loss.linked

    @property
    def bounded(self) -> bool:
        """Whether `link` is above 0, so that a negative entry of that gradient proves a label."""
        return self.model.loss.bounded

    @property
    def balanced(self) -> bool:
        """Whether the entries of that gradient sum to 0."""
        return self.model.loss.name == "cross-entropy"

    @property
    def slope(self) -> float:
        """See `linked`."""
        return self.model.loss.slope(self.classes)

    def weights(self, labels: Tensor) -> Tensor:
        """See `linked`: [...] of class labels [...]."""
        stated = self.model.loss.weights
        return torch.tensor(stated)[labels] if stated else torch.ones(labels.shape)

    def link(self, scores: Tensor) -> Tensor:
        """See `linked`: [..., classes] of the scores [..., classes]."""
        return self.model.loss.link(scores)

    @property
    def smooth(self) -> bool:
        """Whether the scores are known to be a smooth function of the inputs.

        A model with a penalty is searched as if they were not.
        """
        return self.model.apply.smooth and not self.model.l2

    @property
    def mixes(self) -> bool:
        """Whether the records of a batch change each other's scores while a client trains, as with a batch norm."""
        return self.model.apply.mixes

    def init(self, key: Key) -> Vector:
        """Fresh parameters [d] from one draw.

        Guarantees:
            No entry is larger in magnitude than its tensor's bound.
        """
        if self.initialization == "zero":
            return torch.zeros(self.layout.dim)
        if self.model.start is not None:
            return self.model.start(key, self.initialization)
        flat = rng.uniform(key, (self.layout.dim,), -1.0, 1.0)
        assert self.structure is not None  # a shipped model's
        each = zip(self.layout.split(flat), self.structure.fan_in, strict=True)
        return self.layout.join([self._scale(draws, fan_in) for draws, fan_in in each])

    def _scale(self, draws: Tensor, fan_in: int) -> Tensor:
        """A tensor's initial values, from draws in [-1, 1]."""
        if fan_in == 0:
            return torch.ones_like(draws)
        if self.initialization == "dlg":
            return draws * _DLG_BOUND
        return draws * fan_in**-0.5 if fan_in > 0 else torch.zeros_like(draws)

    def outputs(self, params: Vector, x: Tensor) -> Tensor:
        """[b, classes] scores of the inputs x [b, *input_shape], with dropout off."""
        return self.model.apply(self.layout.split(params), x, None)

    def in_training(self, params: Vector, x: Tensor) -> InTraining:
        """The scores that x has while a client trains: a batch norm uses the statistics of x."""
        return self.model.apply.in_training(self.layout.split(params), x, None)

    def loss(self, params: Vector, x: Tensor, y: Tensor, keep: Sequence[Tensor] | None = None) -> Tensor:
        """The scalar that a client minimizes: mean loss plus `penalty`; batch norms use the batch's statistics."""
        return self.loss_at(self.layout.split(params), x, y, keep)

    def loss_at(self, tensors: Sequence[Tensor], x: Tensor, y: Tensor, keep: Sequence[Tensor] | None = None) -> Tensor:
        """`loss` for separate tensors in the layout's shapes, so that a hot loop needs no flat gradient."""
        scores, term = self.model.apply.in_training(tensors, x, keep)
        loss = self.model.loss.batch(scores, self._checked(scores, y))
        loss = loss if term is None else loss + term
        return loss + self.penalty(tensors) if self.model.l2 else loss

    def losses(self, params: Vector, x: Tensor, y: Tensor, keep: Sequence[Tensor] | None = None) -> Tensor:
        """[b] losses of the examples, without the penalty.

        Args:
            x: [b, *input_shape].
            y: [b] int64, or [b, classes] probabilities, which give the expected loss. If the labels are numbers:
                [b, classes], or [b] if there is one score.
            keep: dropout masks, see `dropout_masks`; None: dropout off. With noise, each loss has its divergence.

        Raises:
            ValueError: the labels have another shape.
        """
        tensors = self.layout.split(params)
        scores = self.model.apply(tensors, x, keep)
        losses = self.model.loss.each(scores, self._checked(scores, y))
        if keep is None or self.structure is None or self.structure.sampled is None:
            return losses
        return losses + self.structure.divergence(tensors, x, keep)

    def _checked(self, scores: Tensor, y: Tensor) -> Tensor:
        """The labels in the form that the loss takes: classes, of whose probabilities a user's function sees one."""
        own = (len(scores), *self.label_shape)
        allowed = (own,) if self.numbers else (own, (len(scores), self.classes))
        if y.shape not in allowed:
            raise ValueError(f"expected labels of shape {' or '.join(map(str, allowed))}, got {tuple(y.shape)}")
        return y.argmax(-1) if ":" in self.model.loss.name and not self.numbers and y.ndim == 2 else y

    def penalty(self, tensors: Sequence[Tensor]) -> Tensor:
        """l2/2 ||tensors||^2, a scalar."""
        if not self.model.l2:
            return tensors[0].new_zeros(())  # not 0 * ||tensors||^2, which is NaN for a diverged model
        return self.model.l2 / 2 * torch.stack([tensor.square().sum() for tensor in tensors]).sum()

    def tested(self, params: Vector, x: Tensor, y: Tensor) -> tuple[Tensor, float | None]:
        """`losses` of the examples, and how many labels y [b] int64 the scores find; None: the labels are numbers.

        A text whose next tokens are predicted, or a label of many places, counts with the share that is right.
        """
        with torch.no_grad():
            scores = self.outputs(params, x)
            losses = self.model.loss.each(scores, self._checked(scores, y))
            if self.model.loss == NEXT_TOKEN:
                return losses, float(scores[:, 1].sum())
            if self.model.places:
                found = scores.view(len(scores), -1, self.model.places).argmax(1)
                return losses, float((found == y).double().mean(1).sum())
            if y.is_floating_point() or (self.numbers and not self.bounded):
                return losses, None
            guess = scores[:, 0] > 0 if self.numbers else scores.argmax(1)
            return losses, int((guess == y).sum())

    def dropout_masks(self, key: Key, b: int) -> list[Tensor] | None:
        """Masks of the model's dropouts for b examples, and its noise; None for a model without both.

        Guarantees:
            An entry is 0 with probability rate, else 1/(1-rate); a mask has shape [b, *shape]. Noise is standard
            normal.
        """
        dropouts = self.model.apply.dropout
        if not dropouts:
            return None
        return [
            rng.normal(key.child(i), (b, *shape))
            if rate is None
            else (rng.uniform(key.child(i), (b, *shape)) >= rate) / (1.0 - rate)
            for i, (shape, rate) in enumerate(dropouts)
        ]
