"""The structure of a network: the list of its layers, as a function of their tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from leakgauge.harness.core.contract import InTraining
from leakgauge.harness.core.layout import DECODER, ENCODER, Layout
from leakgauge.harness.learn.layers import (
    UNSCALED,
    Block,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LogSoftmax,
    Norm,
    Relu,
    Sampled,
    Scale,
    Slot,
    SoftRelu,
)
from leakgauge.harness.learn.pruning import kept

_T = TypeVar("_T")


@dataclass(frozen=True)
class Structure:
    """The layers of a network, each applied to the output of the previous one, as a function of their tensors.

    Args:
        names: names of the tensors, in the order in which the layers take them; empty: those of the layers.
        places: for each of these tensors, its position in the flat vector; empty: they have the order of the layers.
        prune: share of each record's representation that the gradient of the last dense layer's weight leaves out.
    """

    layers: tuple[Layer, ...]
    names: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    prune: float = 0.0

    @functools.cached_property
    def _slots(self) -> tuple[Slot, ...]:
        slots = [slot for layer in self.layers for slot in layer.slots]
        if self.names:
            slots = [slot._replace(name=name) for slot, name in zip(slots, self.names, strict=True)]
        return tuple(slot for _, slot in sorted(zip(self.places or range(len(slots)), slots, strict=True)))

    @functools.cached_property
    def layout(self) -> Layout:
        """Names and shapes of the tensors in the flat vector."""
        return Layout(tuple(slot.name for slot in self._slots), tuple(slot.shape for slot in self._slots))

    @property
    def fan_in(self) -> tuple[int, ...]:
        """One per tensor; the default initialization is uniform in +-1/sqrt(fan_in). 0: ones; -1: zeros."""
        return tuple(slot.fan_in for slot in self._slots)

    def ordered(self, tensors: Sequence[_T]) -> Sequence[_T]:
        """What belongs to the tensors of the layout, in the order in which the layers take them."""
        return [tensors[place] for place in self.places] if self.places else tensors

    def split(self, vectors: Tensor) -> Sequence[Tensor]:
        """Views of vectors [..., d], one per tensor, in the order in which the layers take them."""
        return self.ordered(self.layout.split(vectors))

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The flat vector [d] of tensors in the order in which the layers take them."""
        order = sorted(range(len(tensors)), key=self.places.__getitem__) if self.places else range(len(tensors))
        return self.layout.join([tensors[number] for number in order])

    def by_layers(self, vectors: Tensor) -> Tensor:
        """Vectors [..., d] with their tensors in the order in which the layers take them."""
        return torch.cat([part.flatten(vectors.ndim - 1) for part in self.split(vectors)], dim=-1)

    @functools.cached_property
    def flat(self) -> tuple[Layer, ...]:
        """All layers, with those of residual blocks instead of the blocks."""
        return tuple(_flat(self.layers))

    @functools.cached_property
    def dropout(self) -> tuple[tuple[tuple[int, ...], float | None], ...]:
        """(shape, rate) of each dropout; rate None: of standard normal noise."""
        drawn = [layer for layer in self.flat if isinstance(layer, (Dropout, Sampled))]
        return tuple((each.shape, each.rate) if isinstance(each, Dropout) else ((each.width,), None) for each in drawn)

    @functools.cached_property
    def sampled(self) -> int | None:
        """The position of the layer that draws codes; None: there is none."""
        return next((at for at, layer in enumerate(self.layers) if isinstance(layer, Sampled)), None)

    @functools.cached_property
    def before_encoder(self) -> Structure:
        """The layers before the encoder of the bottleneck; there must be one."""
        assert self.sampled is not None
        return self.front(self.sampled - 1)

    @functools.cached_property
    def mixes(self) -> bool:
        """Whether the records of a batch change each other's scores in training: there is a batch norm."""
        return any(isinstance(layer, Norm) and not layer.groups for layer in self.flat)

    @property
    def smooth(self) -> bool:
        """Whether the scores are a smooth function of the inputs."""
        return all(layer.smooth for layer in self.flat)

    @property
    def is_chain(self) -> bool:
        """Whether there are neither residual blocks nor norms."""
        return not any(isinstance(layer, (Block, Norm)) for layer in self.layers)

    @property
    def plain(self) -> bool:
        """Whether it is a chain without noise whose dense layers all have a bias."""
        biased = all(layer.owns == 2 for layer in self.layers if isinstance(layer, Dense))
        return self.is_chain and self.sampled is None and biased

    @property
    def scale(self) -> Scale:
        """The scale of the stored inputs."""
        first = self.layers[0]
        return first if isinstance(first, Scale) else UNSCALED

    @property
    def unscaled(self) -> tuple[Layer, ...]:
        """The layers behind the scale."""
        return self.layers[1:] if isinstance(self.layers[0], Scale) else self.layers

    @property
    def core(self) -> tuple[Layer, ...]:
        """The layers without a scale, dropouts and a log-softmax at the end, which changes no cross-entropy."""
        return tuple(layer for layer in self.unscaled if not isinstance(layer, (Dropout, LogSoftmax)))

    @property
    def first_dense(self) -> int | None:
        """The position of the first dense layer that is in no residual block; None: there is none."""
        return next((at for at, layer in enumerate(self.layers) if isinstance(layer, Dense)), None)

    @property
    def widths(self) -> tuple[int, ...] | None:
        """(inputs, hidden..., classes) of a dense ReLU stack with biases, with any scale and dropouts; else None."""
        return self.dense_stack(Relu())

    def dense_stack(self, between: Layer) -> tuple[int, ...] | None:
        """As `widths`, with this layer between dense layers."""
        dense = [layer for layer in self.core if isinstance(layer, Dense)]
        bends: tuple[Layer, ...] = (between,) * (len(dense) - 1)
        stack = itertools.chain.from_iterable(itertools.zip_longest(dense, bends))
        if not self.plain or self.core != (Flatten(), *(layer for layer in stack if layer is not None)):
            return None
        return dense[0].inputs, *(layer.outputs for layer in dense)

    @functools.cached_property
    def body(self) -> Structure:
        """The layers before the last dense layer that is in no residual block.

        Raises:
            ValueError: there is no such layer, or another tensor of two axes comes after its weight.
        """
        at = max((at for at, layer in enumerate(self.layers) if isinstance(layer, Dense)), default=None)
        before = None if at is None else self.front(at)
        order = self.ordered(range(len(self.layout.shapes)))
        if before is None or order[len(before.layout.shapes)] != self.layout.last_matrix:
            raise ValueError("expected a model whose last weight of two axes is that of its last dense layer")
        return before

    def pruned(self, share: float) -> Structure:
        """The same scores, with other gradients: those of the last dense layer's weight are for pruned representations.

        Raises:
            ValueError: as `body`.
        """
        return replace(self, prune=share) if self.body else self

    def bottlenecked(self, width: int, weight: float) -> Structure:
        """The layers with a variational bottleneck before the last dense layer: encoder, `Sampled`, decoder.

        Their tensors come before those of the last dense layer.

        Raises:
            ValueError: as `body`.
        """
        at, owned = len(self.body.layers), len(self.body.layout.shapes)
        entries = self.layers[at].slots[0].shape[1]
        own = Dense(ENCODER, entries, 2 * width), Sampled(width, weight), Dense(DECODER, width, entries)
        names, places = self.names, self.places
        if names:
            names = (*names[:owned], *(slot.name for layer in own for slot in layer.slots), *names[owned:])
        if places:
            first = places[owned]
            moved = [place + 4 * (place >= first) for place in places]
            places = (*moved[:owned], *range(first, first + 4), *moved[owned:])
        return replace(self, layers=(*self.layers[:at], *own, *self.layers[at:]), names=names, places=places)

    def unbottlenecked(self) -> Structure:
        """The layers before `bottlenecked`."""
        at, owned = len(self.before_encoder.layers), len(self.before_encoder.layout.shapes)
        names, places = self.names[:owned] + self.names[owned + 4 :], [*self.places[:owned], *self.places[owned + 4 :]]
        first = min(self.places[owned : owned + 4], default=0)
        places = [place - 4 * (place > first) for place in places]
        return replace(self, layers=self.layers[:at] + self.layers[at + 3 :], names=names, places=tuple(places))

    def divergence(self, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
        """[b] the weighted divergence of each record's code; arguments as for a call."""
        assert self.sampled is not None
        layer = self.layers[self.sampled]
        assert isinstance(layer, Sampled)
        return layer.divergence(self.front(self.sampled)(self.ordered(tensors), x, keep))

    def front(self, count: int) -> Structure:
        """The first `count` layers alone; their tensors have the order of the layers."""
        return Structure(self.layers[:count])

    def scaled(self, low: Tensor, span: Tensor) -> Structure:
        """The structure for inputs that are stored as (x - low) / span."""
        return replace(self, layers=(self.scale.after(low, span), *self.unscaled))

    def softened(self, width: float) -> Structure:
        """The same layers with `SoftRelu` for ReLU."""
        layers = _changed(self.layers, lambda layer: SoftRelu(width) if isinstance(layer, Relu) else layer)
        return replace(self, layers=layers)

    def paced(self, lr: float) -> Structure:
        """Batch norms with a momentum move their statistics by it in a step of rate `lr`."""

        def pace(layer: Layer) -> Layer:
            if isinstance(layer, Norm) and layer.momentum is not None:
                return replace(layer, rate=layer.momentum / lr)
            return layer

        return replace(self, layers=_changed(self.layers, pace))

    def __call__(self, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
        """Scores [b, classes] of x [b, *input_shape], from the tensors of the layout.

        Args:
            keep: one mask for each entry of `dropout`, already scaled by 1/(1-rate), or its noise; None: dropout off,
                no noise.
        """
        if self.prune:
            return self._pruned(self.ordered(tensors), x, keep)
        return _through(self.layers, x, iter(self.ordered(tensors)), None if keep is None else iter(keep), None)

    def in_training(self, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> InTraining:
        """As a call, but batch norms use the statistics of x; with their terms and the codes' mean divergence."""
        if self.prune:
            return InTraining(self._pruned(self.ordered(tensors), x, keep))
        terms: list[Tensor] = []
        scores = _through(self.layers, x, iter(self.ordered(tensors)), None if keep is None else iter(keep), terms)
        return InTraining(scores, torch.stack(terms).sum() if terms else None)

    def _pruned(self, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
        """As a call, of tensors in the order of the layers."""
        body = self.body
        last, first, dropped = self.layers[len(body.layers)], len(body.layout.shapes), len(body.dropout)
        h, mask = body(tensors[:first], x, keep), kept(body, self.prune, tensors[:first], x, keep)
        weight, *bias = tensors[first : first + last.owns]
        fixed = weight.detach()
        # the difference is zero, but has the slope of the weight: scores and the slopes of all else stay as they are
        scores = linear(h, fixed, *bias) + linear(h * mask, weight - fixed)
        rest = None if keep is None else iter(keep[dropped:])
        return _through(self.layers[len(body.layers) + 1 :], scores, iter(tensors[first + last.owns :]), rest, None)


def _flat(layers: Sequence[Layer]) -> Iterator[Layer]:
    for layer in layers:
        yield from _flat(layer.layers + layer.shortcut) if isinstance(layer, Block) else (layer,)


def _changed(layers: Sequence[Layer], change: Callable[[Layer], Layer]) -> tuple[Layer, ...]:
    """The layers after `change`, also those of residual blocks."""
    return tuple(
        Block(_changed(layer.layers, change), _changed(layer.shortcut, change))
        if isinstance(layer, Block)
        else change(layer)
        for layer in layers
    )


def _through(
    layers: Sequence[Layer],
    h: Tensor,
    tensors: Iterator[Tensor],
    keep: Iterator[Tensor] | None,
    terms: list[Tensor] | None,
) -> Tensor:
    """The output of the layers; in training, their loss terms are appended to `terms`."""
    for layer in layers:
        if isinstance(layer, Block):
            inner = _through(layer.layers, h, tensors, keep, terms)
            h = inner + _through(layer.shortcut, h, tensors, keep, terms)
        elif isinstance(layer, Norm) and terms is not None:
            h, term = layer.by_batch(h, *itertools.islice(tensors, layer.owns))
            terms += [] if term is None else [term]
        elif isinstance(layer, Sampled):
            if terms is not None:
                terms.append(layer.divergence(h).mean())
            h = layer.apply(h, None if keep is None else next(keep).to(h))
        elif not isinstance(layer, Dropout):
            h = layer.apply(h, *itertools.islice(tensors, layer.owns))
        elif keep is not None:
            h = h * next(keep).to(h)  # masks are drawn on the CPU, h may be elsewhere
    return h
