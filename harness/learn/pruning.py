"""Pruned representations: which entries of the input of the last dense layer a client leaves out of a gradient.

Source: Sun et al. 2021, "Soteria: provable defense against privacy leakage in federated learning from representation
    perspective" (arXiv 2012.06043), and the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from leakgauge.harness.learn.layers import Conv, Dense, Dropout, Flatten, Relu, Scale, Sigmoid, SoftRelu, Tanh

if TYPE_CHECKING:
    from leakgauge.harness.learn.structure import Structure

_ENTRIES = 2**24  # slopes of representations that are held at once
_SAME = (Scale, Flatten)  # layers that neither mix nor bend entries
_BENDING = (Flatten, Relu, SoftRelu, Sigmoid, Tanh, Dropout)  # layers that map each entry by itself


def kept(front: Structure, share: float, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
    """[b, m] 0 at the pruned entries of each record's representation, else 1; it has no slope.

    Of the n entries r_i that are not zero, the round(share * n) ones with the smallest ||dr_i/dx|| / |r_i| are pruned,
    the first ones if several are equal.

    Args:
        front: the layers before the last dense layer; no batch norm.
        tensors: of these layers, in their order.
        x: [b, *input_shape].
        keep: dropout masks of these layers.

    Source: the authors' code, which prunes below a percentile of this score. Differs: each record has its own mask,
        where the code sums the scores of a batch; no 0.1 is added to r_i. For the code, zeros behind a ReLU count as
        the first pruned entries, which changes no gradient: a rate below their share would prune nothing.
    """
    tensors, x = [tensor.detach() for tensor in tensors], x.detach()
    r = front(tensors, x, keep)
    score = (slopes(front, tensors, x, keep) / r.abs()).where(r != 0, torch.inf)
    rank = score.argsort(dim=1, stable=True).argsort(dim=1)
    return (rank >= (share * (r != 0).sum(1, keepdim=True)).round()).to(r)


def slopes(front: Structure, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
    """[b, m] norms of the slopes of each record's representation in its stored input; arguments as for `kept`."""
    owners = [at for at, layer in enumerate(front.layers) if not isinstance(layer, (*_SAME, *_BENDING))]
    first = owners[0] if owners else len(front.layers) - 1
    mixing = isinstance(front.layers[first], (Dense, Conv, *_SAME)) and len(owners) <= 1
    if mixing and all(isinstance(layer, _SAME) for layer in front.layers[:first]):
        return _by_rows(front, first, tensors, x, keep)

    def one(x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
        return front(tensors, x[None], keep and [mask[None] for mask in keep])[0]

    drops = list(keep[: len(front.dropout)]) if keep is not None and front.dropout else None
    entries = front(tensors, x[:1], None).numel() * x[0].numel()
    rows = vmap(jacrev(one), (0, None if drops is None else 0), chunk_size=max(1, _ENTRIES // entries))(x, drops)
    return torch.as_tensor(rows.flatten(2).norm(dim=2))


def _by_rows(
    front: Structure, first: int, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None
) -> Tensor:
    """`slopes` behind one layer of sums, whose rows have the same norms for all records."""
    layer, after = front.layers[first], front.layers[first + 1 :]
    span = front.scale.span.to(x).square().expand(x.shape[1:])[None]
    flat = span.flatten(1) if isinstance(layer, Dense) else span
    squares = layer.apply(flat, tensors[0].square()) if tensors else flat

    def total(z: Tensor) -> Tensor:
        return type(front)(after)([], z, keep).sum()

    bends = grad(total)(front.front(first + 1)(tensors, x, None))
    return torch.as_tensor((bends.flatten(1) * squares.sqrt().flatten(1)).abs())
