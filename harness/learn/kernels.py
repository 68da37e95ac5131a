"""Gradients of a network of layers by hand, and the slopes of their inner products with given directions.

m instances share the parameters theta; each has its own gradient g and its own direction v. <v, g> is the derivative of
the loss along v, so its slope in the inputs takes one forward pass with the tangents of v, and one backward pass. The
loss's slopes, known from the gradient's backward pass, are the slopes of <v, g> in the tangents. So the second backward
pass carries only values: 19 products in total for the three convolutions of the LeNet of DLG.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.convolution import Scratch
from leakgauge.harness.learn.layers import Scale
from leakgauge.harness.learn.steps import DenseStep, Step, maker_of
from leakgauge.harness.learn.structure import Structure


class Pulled(NamedTuple):
    """Slopes with respect to the inputs x [m, b, *input_shape] and the labels y [m, b, classes]."""

    x: Tensor
    y: Tensor


class Outer(NamedTuple):
    """The gradient of the last layer's weights at one input, from entry `first` of a gradient on: an outer product.

    slopes: [m, outputs], of the loss; inputs: [m, inputs].
    """

    first: int
    slopes: Tensor
    inputs: Tensor


_KEPT = 4
"""Maximum number of unused tapes that are kept for the next evaluation of their shape. A kept tape saves nearly all
allocations: with new memory and views, a single image behind the LeNet of DLG took three times as long."""


class Kernel:
    """Gradients of the mean softmax cross-entropy of a network at fixed parameters, with dropout off.

    Args:
        structure: its output is one row of scores for each input; batch norms use the statistics of an instance's
            batch.
        params: [d]. Not modified; later changes of params have no effect.
        linear: use as loss the inner product of the outputs and y, summed over the inputs of an instance.
    """

    def __init__(self, structure: Structure, params: Vector, *, linear: bool = False) -> None:
        self._structure, self._head = structure, _Linear if linear else _Softmax
        tensors = iter(structure.split(params.detach().clone()))
        self.scale = structure.scale if isinstance(structure.layers[0], Scale) else None
        self._makers = [maker_of(layer, tensors) for layer in structure.core]
        self._owns = [layer.owns for layer in structure.core]
        self.first = next(position for position, owns in enumerate(self._owns) if owns)
        """The position of the first layer with parameters."""
        self._free: list[_Tape] = []
        last = sum(self._owns[:-1])
        place = structure.places[last] if structure.places else last
        self._before = sum(structure.layout.sizes[:place])  # entries before the weight of the last layer

    @torch.no_grad()
    def trace(self, x: Tensor, y: Tensor, *, whole: bool = True) -> tuple[Tensor, Trace]:
        """Gradients [m, d], each the mean over the b inputs of an instance, and the trace that computes their slopes.

        Args:
            x: [m, b, *input_shape]; do not modify it while the trace is in use.
            y: [m, b, classes] probabilities; if linear, the loss's slopes with respect to the outputs.
            whole: False leaves out the entries that `Trace.outer` describes, if there are any; the caller sets them.
        """
        x = x if self.scale is None else self.scale.apply(x)
        gradients = x.new_empty(len(x), self._structure.layout.dim)
        with torch.inference_mode():  # operations and views take a sixth less time
            tape, into, h = self._tape(x), self.split(gradients), x.transpose(1, 2)
            for step in tape.steps:
                h = step.forward(h)
            head = self._head(h, y)
            d = head.slope
            outer = None if whole else self._outer(tape, d)
            for position in reversed(range(self.first, len(tape.steps))):
                d = tape.steps[position].backward(d, into[position], position > self.first)
        return gradients, Trace(self, tape, head, gradients, into, outer)

    def _outer(self, tape: _Tape, d: Tensor) -> Outer | None:
        """The outer product of the last layer, if it is dense and the instances have one input each."""
        step = tape.steps[-1]
        if not isinstance(step, DenseStep) or d.shape[1] != 1:
            return None
        step.product = False
        return Outer(self._before, d[:, 0].contiguous(), step.h[:, 0].contiguous())

    def _tape(self, x: Tensor) -> _Tape:
        """A free tape for inputs like x, or a new one."""
        for place, tape in enumerate(self._free):
            if tape.shape == x.shape:
                return self._free.pop(place)
        shape, steps, scratch = (len(x), x.shape[2], x.shape[1], *x.shape[3:]), [], Scratch(x)
        for make in self._makers:
            steps.append(make(shape, scratch))
            shape = steps[-1].shape
        return _Tape(x.shape, steps)

    def give_back(self, tape: _Tape) -> None:
        """Take back a tape that is no longer read."""
        self._free = [*self._free[1 - _KEPT :], tape]

    def split(self, vectors: Tensor) -> list[list[Tensor]]:
        """Views of the rows of vectors [m, d], one list per layer."""
        tensors = iter(self._structure.split(vectors))
        return [[next(tensors) for _ in range(owns)] for owns in self._owns]


class _Tape(NamedTuple):
    """The steps for inputs [m, b, *input_shape] of this shape, with the memory for their results."""

    shape: torch.Size
    steps: list[Step]


class Trace:
    """The intermediate results of one `Kernel.trace`; `pull` may be called any number of times.

    Its memory is reused after the trace is deleted.
    """

    def __init__(
        self,
        kernel: Kernel,
        tape: _Tape,
        head: _Softmax | _Linear,
        gradients: Tensor,
        parts: list[list[Tensor]],
        outer: Outer | None,
    ) -> None:
        self._kernel, self._tape, self._head, self._gradients, self._parts = kernel, tape, head, gradients, parts
        self.outer = outer

    def __del__(self) -> None:
        self._kernel.give_back(self._tape)

    @property
    def outputs(self) -> Tensor:
        """[m, b, classes] outputs of the network; valid as long as the trace exists."""
        return self._head.outputs

    @torch.no_grad()
    def pull(self, slopes: Tensor, of_outputs: Tensor | None = None) -> Pulled:
        """The slopes of sum_i <slopes_i, gradients_i> + <of_outputs_i, outputs_i>, with both [m, ...] held fixed."""
        first, steps = self._kernel.first, self._tape.steps
        with torch.inference_mode():
            along = self._parts if slopes is self._gradients else self._kernel.split(slopes.contiguous())
            t: Tensor | None = None
            for step, directions in zip(steps[first:], along[first:], strict=True):
                t = step.tangent(t, directions)
            assert t is not None  # the first of these layers has parameters
            a, y = self._head.pull(t)
            a = a if of_outputs is None else a + of_outputs
            for step in reversed(steps):
                a = step.reverse(a)
        x = a.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        scale = self._kernel.scale
        return Pulled(x if scale is None else x * scale.span.to(x), y.clone())


class _Softmax:
    """Softmax cross-entropy, the mean over the b rows of an instance.

    Its slope in the scores is p - y. For a confident and correct prediction, this difference loses most digits, so the
    entry of the likeliest label is computed as minus the sum of the others; see `attacks._engine.matching`.
    """

    def __init__(self, scores: Tensor, y: Tensor) -> None:
        self.outputs = scores
        self.likeliest = y.argmax(dim=2, keepdim=True)
        self.p = scores.softmax(dim=2)
        self.b = scores.shape[1]
        slope = (self.p - y).div_(self.b).scatter_(2, self.likeliest, 0.0)
        self.slope = slope.scatter_(2, self.likeliest, slope.sum(dim=2, keepdim=True).neg_())

    def pull(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes of the loss's derivative along score tangents t, in the scores and in y."""
        gaps = (t - t.gather(2, self.likeliest)).div_(self.b)
        return (gaps - (self.p * gaps).sum(dim=2, keepdim=True)).mul_(self.p), gaps.neg()


class _Linear:
    """The loss <y, outputs>, whose slope in the outputs is always y."""

    def __init__(self, outputs: Tensor, y: Tensor) -> None:
        self.outputs, self.slope = outputs, y

    def pull(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes of the loss's derivative along output tangents t, in the outputs and in y."""
        return torch.zeros_like(t), t
