"""A search over texts by exchanges of single tokens, swaps and shifts, many of which are evaluated at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from leakgauge.attacks._text.chances import Chances
from leakgauge.harness.core import rng
from leakgauge.harness.core.rng import Key

_TOKENS = 16  # tokens that are tried at each place
_TRIED = 512  # moves of which the energy is computed in each sweep
_JUDGED, _HOPEFUL = 48, 16  # of these, the ones that are judged, and how many of them whatever their energy
_JOINED = 16  # most moves that are joined
_WARM = 2.0  # nats by which a random draw may prefer a less likely move
_KICKS, _AMONG = 3, 24  # moves without a gain that are joined if no move gains, and among how many they are drawn


class Found(NamedTuple):
    """ids [b, T], their energy, and the number of evaluations."""

    x: Tensor
    energy: float
    evaluations: int


def search(
    energy: Callable[[Tensor], Tensor],
    chances: Chances,
    words: Tensor,
    start: Tensor,
    sweeps: int,
    key: Key,
    enough: float = -math.inf,
    judge: Callable[[Tensor], Tensor] | None = None,
) -> Found:
    """The text with the lowest energy that moves from `start` [b, T] reach; one with less than `enough` ends it.

    Args:
        energy: of texts [m, b, T]: minus their log probabilities [m], prior included.
        words: [V] log likelihood ratios of tokens, or [V, T] of tokens at places, by which moves are proposed.
        judge: a better energy that takes longer, and decides between the moves of the lowest energies.
    """

    def valued(texts: Tensor) -> Tensor:
        values = energy(texts)
        if judge is None:
            return values
        # the first ones were the most hopeful before any evaluation
        first = torch.arange(len(values)) < _HOPEFUL
        few = values.masked_fill(first, -math.inf).topk(min(_JUDGED, len(values)), largest=False).indices
        return torch.full_like(values, math.inf).index_copy_(0, few, judge(texts[few]))

    at = torch.arange(start.shape[1])
    words = words if words.ndim == 2 else words[:, None].expand(-1, len(at))
    x, used, found = start, 0, Found(start, float(valued(start[None])[0]), 0)
    best = found.energy
    for number in range(sweeps):
        tried, own = _moves(x, chances, words), key.child(number)
        hope = chances.of_texts(tried) + words[tried, at].sum((1, 2))
        draws = rng.uniform(own.child("draws"), (len(tried),), dtype=torch.float64)
        tried = tried[(hope - _WARM * (-draws.log()).log()).topk(min(_TRIED, len(tried))).indices]
        values = valued(tried)
        order, gains = values.argsort(), int((values < best).sum())
        if gains:
            joined = _joined(x, tried[order[:gains]], _JOINED)
            values = valued(joined)
            best, x = float(values.min()), joined[values.argmin()]
            used += len(joined)
        else:
            turn = torch.from_numpy(rng.permutation(own.child("kick"), min(_AMONG, len(order))))
            x = _joined(x, tried[order[turn]], _KICKS)[-1]
            best = float(valued(x[None])[0])
        used += len(tried)
        found = Found(x, best, used) if best < found.energy else found._replace(evaluations=used)
        if best < enough:
            break
    return found


def _moves(x: Tensor, chances: Chances, words: Tensor) -> Tensor:
    """[m, b, T] texts that differ from x [b, T] by one move."""
    b, t = x.shape
    likely = (chances.at_places(x) + words[:, None]).topk(min(_TOKENS, len(words)), 0).indices
    text, place = torch.arange(b).repeat_interleave(t), torch.arange(t).repeat(b)
    new = x.repeat(len(likely), b * t, 1, 1)
    new[:, torch.arange(b * t), text, place] = likely.flatten(1)
    every, order = [new.flatten(0, 1)], torch.arange(t)
    first, second = torch.triu_indices(t, t, 1)
    swapped = order.repeat(len(first), 1)
    swapped[torch.arange(len(first)), first], swapped[torch.arange(len(first)), second] = second, first
    shifts = [torch.cat([order[:i], order[i + 1 : j + 1], order[i : i + 1], order[j + 1 :]])
              for i in range(t) for j in range(i + 2, t)]  # fmt: skip
    orders = torch.cat([swapped, torch.stack(shifts), torch.stack(shifts).argsort(1)]) if shifts else swapped
    for row in range(b):
        turned = x.repeat(len(orders), 1, 1)
        turned[:, row] = x[row][orders]
        every.append(turned)
    moves = torch.cat(every)
    return moves[(moves != x).flatten(1).any(1)]


def _joined(x: Tensor, better: Tensor, most: int) -> Tensor:
    """[m, b, T] x after the first of these moves, after the first two that fit together, and so on."""
    rows, touched = list[Tensor](), torch.zeros_like(x, dtype=torch.bool)
    for moved in better:
        changed = moved != x
        if not bool((changed & touched).any()) and len(rows) < most:
            touched |= changed
            rows.append(torch.where(changed, moved, rows[-1] if rows else x))
    return torch.stack(rows) if rows else better[:0]
