"""Recurrent layers, written out step by step: torch's own kernels cannot be mapped, or have no second derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

States = tuple[Tensor, ...]
"""What a cell hands on to its next step: [b, hidden], and for an LSTM [b, cells] too."""


class _Own(NamedTuple):
    """The tensors of a cell, in torch's order; those of an LSTM with `proj_size` have a projection."""

    of_inputs: Tensor
    of_states: Tensor
    bias: Tensor | None = None
    bias_of_states: Tensor | None = None
    projection: Tensor | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor], *, bias: bool) -> _Own:
        names = cls._fields if bias else ("of_inputs", "of_states", "projection")
        return cls(**dict(zip(names, tensors, strict=False)))

    def projected(self, h: Tensor) -> Tensor:
        return h if self.projection is None else linear(h, self.projection)


Step = Callable[[Tensor, States, _Own], States]
"""The next states, of the linear part [b, gates * hidden] of the inputs."""


def _lstm(given: Tensor, states: States, own: _Own) -> States:
    h, c = states
    enter, forget, new, output = (given + linear(h, own.of_states, own.bias_of_states)).chunk(4, -1)
    c = forget.sigmoid() * c + enter.sigmoid() * new.tanh()
    return own.projected(output.sigmoid() * c.tanh()), c


def _gru(given: Tensor, states: States, own: _Own) -> States:
    (h,) = states
    mine = linear(h, own.of_states, own.bias_of_states)
    reset, update = (given + mine)[..., : 2 * h.shape[-1]].sigmoid().chunk(2, -1)
    new = (given.chunk(3, -1)[2] + reset * mine.chunk(3, -1)[2]).tanh()
    return (new + update * (h - new),)


def _plain(activation: Callable[[Tensor], Tensor], given: Tensor, states: States, own: _Own) -> States:
    return (activation(given + linear(states[0], own.of_states, own.bias_of_states)),)


_LAYERS: dict[object, Step] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: partial(_plain, torch.tanh),
    torch.rnn_relu: partial(_plain, torch.relu),
}

_CELLS = {
    torch.lstm_cell: _LAYERS[torch.lstm],
    torch.gru_cell: _LAYERS[torch.gru],
    torch.rnn_tanh_cell: _LAYERS[torch.rnn_tanh],
    torch.rnn_relu_cell: _LAYERS[torch.rnn_relu],
}

RECURRENT = _LAYERS | _CELLS
"""The functions of torch that `written_out` knows."""


def written_out(
    func: object, args: Sequence[Any], drop: Callable[[float, Tensor], Tensor], relu: Callable[[Tensor], Tensor]
) -> Any:
    """What one of these functions returns.

    Args:
        args: the arguments that `nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells give to the function.
        drop: the dropout, by its rate, between the layers in train mode.
        relu: the activation in place of ReLU.

    Raises:
        ValueError: the inputs are a packed sequence.
    """
    step = partial(_plain, relu) if func in (torch.rnn_relu, torch.rnn_relu_cell) else RECURRENT[func]
    if func in _LAYERS:
        return _layers(step, *args, drop=drop)
    x, states, *tensors = args
    own = _Own.of(tensors, bias=True)
    found = step(linear(x, own.of_inputs, own.bias), (states,) if isinstance(states, Tensor) else states, own)
    return found if len(found) > 1 else found[0]


def _layers(
    step: Step, x: Tensor, first: Any, tensors: Any, bias: Any, layers: int, rate: float, *rest: bool, drop: Any
) -> tuple[Tensor, ...]:
    """The outputs of the last layer, and the last states of all layers and directions."""
    if not isinstance(bias, bool):
        raise ValueError("a packed sequence is laid out by the lengths of a batch; give the padded one")
    training, both, batch_first = rest
    given = list(zip(*map(torch.unbind, [first] if isinstance(first, Tensor) else first), strict=True))
    count = len(tensors) // len(given)
    owns = [_Own.of(tensors[at : at + count], bias=bias) for at in range(0, len(tensors), count)]
    h, last = x.transpose(0, 1) if batch_first else x, []
    for layer in range(layers):
        if layer and training and rate:
            h = drop(rate, h)
        ways = []
        for way in range(1 + both):
            at = layer * (1 + both) + way
            outputs, states = _steps(step, h.flip(0) if way else h, given[at], owns[at])
            ways.append(outputs.flip(0) if way else outputs)
            last.append(states)
        h = torch.cat(ways, -1) if both else ways[0]
    return (h.transpose(0, 1) if batch_first else h), *map(torch.stack, zip(*last, strict=True))


def _steps(step: Step, x: Tensor, states: States, own: _Own) -> tuple[Tensor, States]:
    """The outputs [T, b, hidden] of one layer in one direction, and its last states."""
    hidden = []
    for given in linear(x, own.of_inputs, own.bias).unbind():
        states = step(given, states, own)
        hidden.append(states[0])
    return torch.stack(hidden), states
