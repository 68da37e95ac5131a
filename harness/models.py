"""Models as small named functions of a list of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from harness.vec import Layout

Apply = Callable[[Sequence[Tensor], Tensor, Sequence[Tensor] | None], Tensor]


@dataclass(frozen=True)
class Model:
    """An architecture for one input shape and number of classes.

    Attributes:
        layout: tensors, in the order in which `apply` takes them.
        fan_in: of each tensor; the usual initialisation is uniform in +-1/sqrt(fan_in). 0: ones (a norm's scale);
            -1: zeros.
        apply: (tensors, x [b, *input_shape], keep) -> [b, classes] scores. `keep` holds one dropout mask per entry of
            `dropout`, already scaled by 1/(1-rate), or is None: dropout off.
        loss: the loss that goes with it.
        widths: (inputs, hidden..., classes) of a dense ReLU stack with biases in the order W0, b0, W1, b1, ...
            (W [out, in]), else None; batched products are derived from it.
        dropout: (shape without the batch axis, rate) of each dropout.
    """

    name: str
    layout: Layout
    fan_in: tuple[int, ...]
    input_shape: tuple[int, ...]
    classes: int
    apply: Apply
    loss: Literal["cross-entropy", "hinge", "squared"] = "cross-entropy"
    widths: tuple[int, ...] | None = None
    dropout: tuple[tuple[tuple[int, ...], float], ...] = ()
