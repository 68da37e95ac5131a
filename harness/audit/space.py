"""Random neighbors: senders, sizes, norms, shapes and places that the fixed pairs of an audit leave out.

Some faults show only for a certain sender, norm or shape. `varied` draws several pairs of neighbors that take turns
over the trials. Each trial compares two neighbors, so a bound from all trials holds: error rates are means over the
pairs, and means of points above a convex trade-off curve lie above the curve. If only one of v pairs shows a fault,
the bound is lower by at most log(v).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from leakgauge.harness.audit.trials import FAR, Inputs, part_pairs
from leakgauge.harness.core import rng
from leakgauge.harness.core.claim import Relation, Unit
from leakgauge.harness.core.contract import Defense, Sender, Setting
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Parts, Vector

_NORMS = (-6.0, -3.75, -1.5, 0.75, 3.0, 9.75, 16.5, 23.25, 30.0)
"""Decimal logarithms of the norms: each pair draws its norm between two neighboring entries."""

_SIZES = 10
"""The largest number of samples of a sender, in multiples of the smallest."""

_SHAPES = ("dense", "sparse", "constant", "one tensor", "random signs")
_FEW = 3
"""Nonzero numbers of a sparse update."""


def varied(defense: Defense[Any, Any], setting: Setting, unit: Unit, relation: Relation, key: Key) -> list[Inputs]:
    """Eight pairs in turn, and a pair of equal numbers in other places; none for a record, which acts by training.

    | | of one pair |
    |---|---|
    | sender | a client with 1 to 10 times the smallest number of samples |
    | norm of input 0, or of input 1 with add-remove | from 1e-6 to 1e30, each pair in its own range |
    | shape | dense, sparse, constant, zero outside one tensor, random signs |
    | what moves | the whole update; for a smaller unit one part anywhere, at equal norm if the norm sets the scale |
    """
    if unit is Unit.RECORD:
        return []
    count = len(_NORMS) - 1
    order = [rng.permutation(key.child("order", what), count).tolist() for what in ("senders", "shapes")]
    rows = []
    for number, (sender, shape) in enumerate(zip(*order, strict=True)):
        own = key.child(number)
        place, size = rng.uniform(own.child("numbers"), (2,), dtype=torch.float64).tolist()
        norm = 10 ** (_NORMS[number] + place * (_NORMS[number + 1] - _NORMS[number]))
        drawn = norm * _shape(_SHAPES[shape % len(_SHAPES)], setting, own.child("shape"))
        row = _pair(defense, setting, unit, relation, drawn.float(), norm, own.child("part"))
        rows.append(
            row._replace(senders=(Sender(sender % setting.clients, setting.samples * (1 + int(_SIZES * size))),))
        )
    focus = [row.focus for row in rows if row.focus is not None]
    return [
        Inputs(
            "drawn from a space",
            torch.stack([row.zero for row in rows]),
            torch.stack([row.one for row in rows]),
            focus=torch.stack(focus) if focus else None,
            senders=tuple(row.senders[0] for row in rows),
        ),
        *_elsewhere(setting, unit, relation, key.child("elsewhere")),
    ]


def _elsewhere(setting: Setting, unit: Unit, relation: Relation, key: Key) -> list[Inputs]:
    """The same few numbers in other places: a defense may reveal which numbers are large.

    The other pairs do not show this: end to end, or from nothing, a choice by magnitude is the same for both inputs.
    """
    few = min(_FEW, setting.dim // 2)
    if unit in (Unit.COORDINATE, Unit.SUBVECTOR) or relation is Relation.ADD_REMOVE or not few:
        return []
    places = torch.from_numpy(rng.permutation(key, setting.dim)[: 2 * few])
    zero, one = torch.zeros(2, setting.dim)
    zero[places[:few]], one[places[few:]] = FAR, FAR
    return [Inputs("few numbers, elsewhere", zero, one)]


def _pair(
    defense: Defense[Any, Any], setting: Setting, unit: Unit, relation: Relation, drawn: Vector, norm: float, key: Key
) -> Inputs:
    """One pair around a random update [d] of this norm."""
    if unit not in (Unit.COORDINATE, Unit.SUBVECTOR):
        if relation is Relation.ADD_REMOVE:
            return Inputs("", torch.zeros_like(drawn), drawn)
        return Inputs("", drawn, -FAR * drawn / float(drawn.abs().max()))
    parts = defense.parts(setting)
    k, n = parts.places.shape
    order = rng.permutation(key.child("order"), k)
    if parts.self_scaled and k > 1:
        found = part_pairs(Parts(parts.places[torch.from_numpy(order)], self_scaled=True), setting.dim)
        pair = found[int(rng.permutation(key.child("angle"), len(found))[0])]
        return pair._replace(zero=norm * pair.zero, one=norm * pair.one)
    end = torch.nn.functional.normalize(rng.normal(key.child("end"), (n,)), dim=0)
    zero, one, place = drawn.clone(), drawn.clone(), parts.places[int(order[0])]
    zero[place], one[place] = -min(norm, FAR) * end, FAR * end
    return Inputs("", zero, one)


def _shape(name: str, setting: Setting, key: Key) -> Tensor:
    """[d] float64: a random update of this shape, of norm 1."""
    values = rng.normal(key, (setting.dim,), torch.float64)
    if name == "sparse":
        values[torch.from_numpy(rng.permutation(key.child("places"), setting.dim)[_FEW:])] = 0.0
    elif name == "constant":
        values[:] = math.copysign(1.0, float(values[0]))
    elif name == "one tensor":
        values[setting.layout.sizes[0] :] = 0.0
    elif name == "random signs":
        values = values.sign()
    found: Tensor = values / values.norm()
    return found
