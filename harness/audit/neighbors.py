"""Pairs of neighbors: inputs 0 and 1 of a trial, which differ in the claim's unit.

The unit is one coordinate, one sub-vector, a whole message, all of a client, or one record, which goes through real
local training. Everything else is the same in both inputs. `pairs` are fixed and differ as far as the unit allows.

Some faults show only for a certain sender, norm or shape. `varied` draws several pairs of neighbors that take turns
over the trials. Each trial compares two neighbors, so a bound from all trials holds: error rates are means over the
pairs, and means of points above a convex trade-off curve lie above the curve. If only one of v pairs shows a fault,
the bound is lower by at most log(v).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.claim import Relation, Unit
from leakgauge.harness.core.contract import Defense, Examples, Sender, Setting
from leakgauge.harness.core.device import moved
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout, Parts, Vector
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask

FAR = 100.0
"""Entries of an input: far above every clip, so that each defense clips them to the ends of its own range."""

CANARY = 1e-2, 1e6
"""Input entry and label of a canary record. Its gradient is twice their product, above every clip. The loss stays so
steep that several local steps go the same way."""

_NORMS = (-6.0, -3.75, -1.5, 0.75, 3.0, 9.75, 16.5, 23.25, 30.0)
"""Decimal logarithms of the norms: each pair draws its norm between two neighboring entries."""

_SIZES = 10  # the largest number of samples of a sender, in multiples of the smallest

SHAPES = ("dense", "sparse", "constant", "one tensor", "random signs")
_FEW = 3  # nonzero numbers of a sparse update


class Inputs(NamedTuple):
    """A pair of neighbors, or v pairs in turn: a client's update with input 0 and with input 1, before the defense.

    Attributes:
        name: for people.
        zero, one: [d], the update, or the update without the noise of local training; [v, d] for v pairs.
        draw: (1 or 0, negated or not, trials, key, device) -> [n, d] updates, if local training is random; the clients
            train on the device. None: the update is fixed.
        focus: the unit's coordinates, if others also move to keep the norm; the adversary sees only these. None: all.
            [f], or [v, f] for v pairs.
        senders: the sender of each pair; if empty, client 0 with the smallest number of samples.
        reverses: whether both inputs are negated in the second half of the rounds.
    """

    name: str
    zero: Tensor
    one: Tensor
    draw: Callable[[int, bool, int, Key, str], Tensor] | None = None
    focus: Tensor | None = None
    senders: tuple[Sender, ...] = ()
    reverses: bool = False

    @property
    def hypotheses(self) -> tuple[Tensor, Tensor]:
        """Input 0 and input 1, as `zero` and `one`, with the same values outside the focus."""
        if self.focus is None:
            return self.zero, self.one
        return self.one.scatter(-1, self.focus, self.zero.gather(-1, self.focus)), self.one

    def row(self, trial: int) -> Inputs:
        """The pair of one trial, because pairs take turns."""
        if self.zero.dim() == 1:
            return self
        at = trial % len(self.zero)
        focus, senders = None if self.focus is None else self.focus[at], self.senders[at : at + 1]
        return self._replace(zero=self.zero[at], one=self.one[at], focus=focus, senders=senders)

    def seen(self, updates: Tensor, trials: Tensor) -> Tensor:
        """The coordinates that the adversary sees, of updates [n, d] in these trials [n]."""
        if self.focus is None:
            return updates
        return updates[:, self.focus] if self.focus.dim() == 1 else updates.gather(1, in_turn(self.focus, trials))


def clip_of(defense: Defense[Any, Any]) -> float:
    """The norm that tested updates are near: the attribute `clip` if it is a positive number, else 1."""
    clip = getattr(defense, "clip", None)
    return float(clip) if isinstance(clip, int | float) and 0 < clip < math.inf else 1.0


def in_turn(rows: Tensor, trials: Tensor) -> Tensor:
    """[n, d]: the row of each trial [n], of rows [v, d] that take turns or of one row [d] for all."""
    return rows.expand(len(trials), -1) if rows.dim() == 1 else rows[trials % len(rows)]


def pairs(defense: Defense[Any, Any], setting: Setting, unit: Unit, relation: Relation, key: Key) -> list[Inputs]:
    """Neighbors that differ as far as the unit allows, in several directions; the worst depends on the defense.

    | unit | what moves |
    |---|---|
    | coordinate, sub-vector | the first (see `Defense.parts`); a sub-vector in four directions of its first plane |
    | message, client | all coordinates together, only the first, or all with random signs |
    | record | one record, whose gradient is reversed, in the local training that the defense requires |

    The pairs go from one end of the range to the other, except one pair from zero to one end. With add-remove, all
    pairs go from zero to one end. If there are several rounds, one more pair changes its sign after half of the rounds.
    """
    if unit is Unit.RECORD:
        # a replaced record is also compared with a record without a gradient, because then the norm moves
        found = [_records(defense, setting, each) for each in dict.fromkeys((relation, Relation.ADD_REMOVE))]
        return found + _reversing(setting, found[0])
    if unit in (Unit.COORDINATE, Unit.SUBVECTOR):
        return part_pairs(defense.parts(setting), setting.dim)
    d = setting.dim
    first = torch.zeros(d)
    first[0] = FAR
    signs = torch.where(rng.uniform(key.child("signs"), (d,)) < 0.5, -FAR, FAR)
    ends = {"first coordinate": first, "all coordinates": torch.full((d,), FAR), "all, signs at random": signs}
    from_nothing = [Inputs(f"{name}, from nothing", torch.zeros(d), end) for name, end in ends.items()]
    if relation is Relation.ADD_REMOVE:
        return from_nothing + _reversing(setting, from_nothing[1])
    from_end_to_end = [Inputs(name, -end, end) for name, end in ends.items()]
    return [*from_end_to_end, from_nothing[1], *_reversing(setting, from_end_to_end[1])]


def _reversing(setting: Setting, inputs: Inputs) -> list[Inputs]:
    """The pair with the opposite sign in the second half of the rounds: noise that is used twice then cancels."""
    return [inputs._replace(name=f"{inputs.name}, reversing", reverses=True)] if setting.rounds > 1 else []


def part_pairs(parts: Parts, d: int) -> list[Inputs]:
    """Pairs that move the first sub-vector from end to end, at constant norm if the update sets its own scale."""
    # at constant norm, the second sub-vector moves the other way, which keeps norm and mean; further entries of
    # alternating sign set the norm so that the ends are those of [-1, 1], if there are 18 sub-vectors or more
    k, n = parts.places.shape
    found = []
    for degrees in (0.0, 22.5, 45.0, 67.5) if n > 1 else (0.0,):
        end = torch.zeros(n)
        end[:2] = torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])[:n]
        name = f"one sub-vector, at {degrees:g} degrees" if n > 1 else "one coordinate"
        one = torch.zeros(d)
        if not parts.self_scaled or k < 2:
            one[parts.places[0]] = FAR * end
            found.append(Inputs(name, -one, one))
            if not found[1:]:
                found.append(Inputs(f"{name}, from nothing", torch.zeros(d), one))
            continue
        fill = parts.places[2 : 2 + (k - 2) // 2 * 2, 0]
        one[fill] = math.sqrt(max(0.0, k / 9 - 2) / max(1, len(fill))) * (1 - 2 * (torch.arange(len(fill)) % 2)).float()
        zero = one.clone()
        one[parts.places[0]], one[parts.places[1]] = end, -end
        zero[parts.places[0]], zero[parts.places[1]] = -end, end
        found.append(Inputs(f"{name}, at one norm", zero, one, focus=parts.places[0]))
    return found


def _records(defense: Defense[Any, Any], setting: Setting, relation: Relation) -> Inputs:
    """A pair of clients with one moving record; only its gradient is not zero, along the first coordinate."""
    # a linear regression from parameters of zero: the loss of (x, y) is (w.x - y)^2, its gradient -2 y x
    task = ModelTask(build("linear-regression", (setting.dim,), 1))
    plan = LocalPlan.of(setting).under(defense.local, defense.step_noise(setting))
    start = torch.zeros(setting.dim)

    def data(bit: int, *, negated: bool = False) -> Examples:
        x, y = torch.zeros(setting.samples, setting.dim), torch.zeros(setting.samples)
        if bit or relation is not Relation.ADD_REMOVE:
            x[0, 0], y[0] = CANARY[0], CANARY[1] if bool(bit) is not negated else -CANARY[1]
        return Examples(x, y)

    def draw(bit: int, negated: bool, trials: int, key: Key, device: str) -> Tensor:
        own = data(bit, negated=negated).on(device)
        work = [Work(own, key.child(trial)) for trial in range(trials)]
        # many clients of a small model
        return train_clients(task, moved(start, device), work, plan, "vmap").updates.cpu()

    still = replace(plan, epochs=None, batch=0, noise_multiplier=0.0, poisson=False)
    zero, one = (train_clients(task, start, [Work(data(bit), Key(0))], still, "loop").updates[0] for bit in (0, 1))
    random = plan.noise_multiplier > 0 or plan.poisson or plan.size(setting.samples) < setting.samples
    name = "one record, from nothing" if relation is Relation.ADD_REMOVE else "one record"
    return Inputs(name, zero, one, draw if random else None)


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
        name, values = SHAPES[shape % len(SHAPES)], rng.normal(own.child("shape"), (setting.dim,), torch.float64)
        values = shaped(name, values.sign() if name == "constant" else values, setting.layout, own.child("shape"))
        drawn = norm * (values / values.norm())
        row = _pair(defense, setting, unit, relation, drawn.float(), norm, own.child("part"))
        sender = Sender(sender % setting.clients, setting.samples * (1 + int(_SIZES * size)))
        rows.append(row._replace(senders=(sender,)))
    zeros, ones = torch.stack([row.zero for row in rows]), torch.stack([row.one for row in rows])
    focus, senders = [row.focus for row in rows if row.focus is not None], tuple(row.senders[0] for row in rows)
    drawn = Inputs("drawn from a space", zeros, ones, None, torch.stack(focus) if focus else None, senders)
    return [drawn, *_elsewhere(setting, unit, relation, key.child("elsewhere"))]


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


def shaped(name: str, values: Tensor, layout: Layout, key: Key) -> Tensor:
    """Random values [d] in a shape of an update: `SHAPES`; `key` draws the places of a sparse update."""
    if name == "sparse":
        values[torch.from_numpy(rng.permutation(key.child("places"), len(values))[_FEW:])] = 0.0
    elif name == "constant":
        values[:] = values[0]
    elif name == "one tensor":
        values[layout.sizes[0] :] = 0.0
    elif name == "random signs":
        values = values.sign()
    return values
