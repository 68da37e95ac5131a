"""A defense run many times on two inputs, by its real encode path, as one adversary sees it.

What moves from input 0 to input 1 is what the claim's unit names: one coordinate, one sub-vector, a whole message, all
of a client, or one record, which goes through real local training. Everything else stays still.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.claim import Relation, Unit
from leakgauge.harness.core.contract import (
    Defense,
    Examples,
    Links,
    Sender,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.core.vec import Parts, Vector
from leakgauge.harness.federation.round import Client, Exchange, Round
from leakgauge.harness.learn.batch import LocalPlan, Work, choose_engine, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask

_FAR = 100.0
"""Entries of an input: far outside every clip, so that each defense cuts them down to the ends of its own range."""

_CANARY = 1e4
"""Entry of a canary's input; its gradient is twice that times its label, above every clip."""


class Inputs(NamedTuple):
    """A pair of neighbors: what a client's update is with input 0 and with input 1, before the defense.

    Attributes:
        name: for people.
        zero, one: [d], the update itself, or what it is without the noise of local training.
        draw: (1 or 0, trials, key) -> [n, d] updates, where local training is random; None: always the same.
        focus: where more moves than the unit, so that the norm stays: the unit's coordinates, which alone may be looked
            at; None: all.
    """

    name: str
    zero: Vector
    one: Vector
    draw: Callable[[int, int, Key], Tensor] | None = None
    focus: Tensor | None = None

    @property
    def hypotheses(self) -> tuple[Vector, Vector]:
        """[d] each: input 0 and input 1, with the same values outside the focus."""
        if self.focus is None:
            return self.zero, self.one
        zero = self.one.clone()
        zero[self.focus] = self.zero[self.focus]
        return zero, self.one


Part = Literal["loss", "told", "wires"]
"""Of a trace."""


class Trace(NamedTuple):
    """What n trials showed.

    Attributes:
        loss: [n] log-likelihood ratio of input 1 against input 0, by the defense's own likelihood, summed over the
            rounds; None for an adversary who sees no messages.
        told: [n, d], or the focus of it: what messages tell by the defense's estimate, or the new model's move; summed
            over the rounds.
        wires: [n] what arrived first of the first round's message.
        shared: [n] the key that client and server share in the first round.
    """

    loss: Tensor | None
    told: Tensor
    wires: tuple[bytes, ...]
    shared: tuple[Key, ...]

    def first(self, n: int) -> Trace:
        """The first n trials."""
        return Trace(None if self.loss is None else self.loss[:n], self.told[:n], self.wires[:n], self.shared[:n])

    def after(self, n: int) -> Trace:
        """Those after the first n."""
        return Trace(None if self.loss is None else self.loss[n:], self.told[n:], self.wires[n:], self.shared[n:])


@dataclass(frozen=True)
class Mechanism:
    """What a trial runs: a defense in a federation over the rounds of `history`, one client, one adversary.

    The other clients send updates of zero, which is as good as knowing and subtracting them, but for their noise.

    Args:
        history: the public state of each round.
        threat: an adversary; without shared keys, messages are read as an outsider reads them.
    """

    defense: Defense[Any, Any]
    setting: Setting
    history: tuple[Any, ...]
    threat: Threat

    @property
    def sees_messages(self) -> bool:
        """Whether the adversary sees messages, and not the models alone."""
        return "messages" in SEES[self.threat]

    def run(self, inputs: Inputs, bit: int, trials: int, key: Key, *, only: Part | None = None) -> Trace:
        """So many independent trials with input `bit`; `only` this part of the trace is worked out, None: all of it."""
        setting, sender = self.setting, Sender(0, self.setting.samples)
        memories = [self.defense.remember(setting) for _ in range(trials)]
        loss = torch.zeros(trials, dtype=torch.float64) if self.sees_messages and only in (None, "loss") else None
        told = torch.zeros(trials, setting.dim)
        first: tuple[tuple[bytes, ...], tuple[Key, ...]] = ((), ())
        for number, state in enumerate(self.history):
            here, key_here = Round(self.defense, setting, state, number), key.child("round", number)
            updates = self._updates(inputs, bit, trials, key_here.child("train"))
            sent = []
            for trial, update in enumerate(updates):
                mine = key_here.child("trial", trial)
                sent.append(self._send(here, Client.of(sender, update, memories[trial], mine), mine))
                memories[trial] = sent[-1].memories[0]
            wires, shared = [one.received[0] for one in sent], [one.links.keys[0] for one in sent]
            if number == 0:
                first = tuple(wires), tuple(shared)
            if loss is not None:
                loss += self._ratio(state, wires, sender, shared, inputs)
            for trial, one in enumerate(sent if only in (None, "told") else ()):
                told[trial] += self._told(here, one, key_here.child("trial", trial, "server"))
        return Trace(loss, told if inputs.focus is None else told[:, inputs.focus], *first)

    def replay(self, update: Vector, shared: Key) -> Vector:
        """[d] what the first round's message of an update tells where the shared key is the private one, too.

        A channel adds noise of its own, from a child of that key.
        """
        here = Round(self.defense, self.setting, self.history[0])
        sender, memory = Sender(0, self.setting.samples), self.defense.remember(self.setting)
        (heard,) = here.exchange([Client(sender, update, memory, shared, shared)], shared.child("replay")).received
        return self.tell(heard, shared)

    def tell(self, wire: bytes, shared: Key) -> Vector:
        """[d] what a message of the first round tells."""
        here = Round(self.defense, self.setting, self.history[0])
        return here.estimate(wire, Sender(0, self.setting.samples), self._known(shared))

    def _updates(self, inputs: Inputs, bit: int, trials: int, key: Key) -> Tensor:
        """[n, d]."""
        if inputs.draw is not None:
            return inputs.draw(bit, trials, key)
        return (inputs.one if bit else inputs.zero).expand(trials, -1)

    def _send(self, here: Round, client: Client, key: Key) -> Exchange:
        """The one message; among those of all participants, where it matters what becomes of it there."""
        alone = self.sees_messages and not self.defense.superposes
        return here.exchange([client, *([] if alone else here.silent([client.sender], key))], key.child("channel"))

    def _known(self, shared: Key) -> Key | None:
        """The shared key, to an adversary who sees it."""
        return shared if "shared" in SEES[self.threat] else None

    def _ratio(
        self, state: Any, wires: Sequence[bytes], sender: Sender, shared: Sequence[Key], inputs: Inputs
    ) -> Tensor:
        """[n] log-likelihood ratios of one round."""
        n = len(wires)
        known = shared if "shared" in SEES[self.threat] else None
        score = self.defense.likelihood(state, wires, Links(self.setting, [sender] * n, known))
        with torch.no_grad():
            zero, one = (score(update.expand(n, -1).clone()).double() for update in inputs.hypotheses)
        return (zero - one).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)

    def _told(self, here: Round, sent: Exchange, private: Key) -> Vector:
        """[d] for one trial and round; private: the server's key."""
        if not self.sees_messages:
            return here.decode(sent, private)
        return here.estimate(sent.received[0], sent.links.senders[0], self._known(sent.links.keys[0]))


def pairs(defense: Defense[Any, Any], setting: Setting, unit: Unit, relation: Relation, key: Key) -> list[Inputs]:
    """Neighbors that differ as far as the unit allows, along several directions: the worst depends on the defense.

    | unit | what moves |
    |---|---|
    | coordinate, sub-vector | the first, see `Defense.parts`; a sub-vector in four directions of its first plane |
    | message, client | all coordinates together, the first alone, or all with signs at random |
    | record | one record, whose gradient turns round, in local training as the defense asks for it |

    From one end of the range to the other, and once from nothing to one end; with add-remove only so.
    """
    if unit is Unit.RECORD:
        # where a record is replaced, also from one without a gradient: the norm moves
        return [_records(defense, setting, each) for each in dict.fromkeys((relation, Relation.ADD_REMOVE))]
    if unit in (Unit.COORDINATE, Unit.SUBVECTOR):
        return _of_part(defense.parts(setting), setting.dim)
    d = setting.dim
    first = torch.zeros(d)
    first[0] = _FAR
    signs = torch.where(rng.uniform(key.child("signs"), (d,)) < 0.5, -_FAR, _FAR)
    ends = {"first coordinate": first, "all coordinates": torch.full((d,), _FAR), "all, signs at random": signs}
    from_nothing = [Inputs(f"{name}, from nothing", torch.zeros(d), end) for name, end in ends.items()]
    if relation is Relation.ADD_REMOVE:
        return from_nothing
    return [*(Inputs(name, -end, end) for name, end in ends.items()), from_nothing[1]]


def _of_part(parts: Parts, d: int) -> list[Inputs]:
    """The first sub-vector goes from end to end.

    Where the update sets its own unit, the second one goes the other way, which keeps norm and mean, and others of
    alternating sign make the norm such that the ends are those of [-1, 1], if there are 18 sub-vectors or more.
    """
    k, n = parts.places.shape
    found = []
    for degrees in (0.0, 22.5, 45.0, 67.5) if n > 1 else (0.0,):
        end = torch.zeros(n)
        end[:2] = torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])[:n]
        name = f"one sub-vector, at {degrees:g} degrees" if n > 1 else "one coordinate"
        one = torch.zeros(d)
        if not parts.self_scaled or k < 2:
            one[parts.places[0]] = _FAR * end
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
    """A client whose gradients are all zero but for one record's, which is along the first coordinate.

    A linear regression from parameters of zero: the loss of (x, y) is (w.x - y)^2, its gradient -2 y x.
    """
    task = ModelTask(build("linear-regression", (setting.dim,), 1))
    gradient = setting.sends == "gradient"
    asked = LocalPlan(gradient, setting.steps, None, setting.batch, setting.lr, setting.momentum)
    plan = asked.under(defense.local, defense.step_noise(setting))
    start = torch.zeros(setting.dim)

    def data(bit: int) -> Examples:
        x, y = torch.zeros(setting.samples, setting.dim), torch.zeros(setting.samples)
        if bit or relation is not Relation.ADD_REMOVE:
            x[0, 0], y[0] = _CANARY, 1.0 if bit else -1.0
        return Examples(x, y)

    def draw(bit: int, trials: int, key: Key) -> Tensor:
        work = [Work(data(bit), key.child(trial)) for trial in range(trials)]
        return train_clients(task, start, work, plan, choose_engine(task)).updates

    still = LocalPlan(plan.gradient, plan.steps, None, 0, plan.lr, plan.momentum, plan.clip)
    zero, one = (train_clients(task, start, [Work(data(bit), Key(0))], still, "loop").updates[0] for bit in (0, 1))
    random = plan.noise_multiplier > 0 or plan.poisson or plan.size(setting.samples) < setting.samples
    name = "one record, from nothing" if relation is Relation.ADD_REMOVE else "one record"
    return Inputs(name, zero, one, draw if random else None)
