"""Trials of an audit: many runs of a defense on two inputs, by its real encode path, as one adversary sees them.

Inputs 0 and 1 differ in what the claim's unit names: one coordinate, one sub-vector, a whole message, all of a client,
or one record, which goes through real local training. Everything else is the same in both.
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
from leakgauge.harness.core.contract import Defense, Examples, Likelihood, Links, Sender, Setting
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.core.vec import Parts, Vector
from leakgauge.harness.federation.round import Client, Exchange, Round
from leakgauge.harness.learn.batch import LocalPlan, Work, choose_engine, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask

_FAR = 100.0
"""Entries of an input: far outside every clip, so that each defense clips them to the ends of its own range."""

CANARY = 1e-2, 1e6
"""Input entry and label of a canary record. Its gradient is twice their product, above every clip, and so steep a loss
stays steep: several local steps go the same way."""

Part = Literal["ratios", "estimates", "wires"]
"""A field of `Trace`."""


class Deployment(NamedTuple):
    """A defense in a federation, and its public state in each round."""

    defense: Defense[Any, Any]
    setting: Setting
    history: tuple[Any, ...]


class Inputs(NamedTuple):
    """A pair of neighbors: a client's update with input 0 and with input 1, before the defense.

    Attributes:
        name: for people.
        zero, one: [d], the update, or the update without the noise of local training.
        draw: (1 or 0, trials, key) -> [n, d] updates, if local training is random; None: the update is fixed.
        focus: the unit's coordinates, if others move too to keep the norm; the adversary sees only these. None: all.
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


class Trace(NamedTuple):
    """What the adversary sees in n trials.

    Attributes:
        ratios: [n] log-likelihood ratio of input 1 to input 0 by the defense's own likelihood, summed over the rounds;
            None for an adversary who sees no messages.
        estimates: [n, d] or [n, focus]: the update estimated from the message, or the decoded mean update for an
            adversary who sees no messages; summed over the rounds.
        wires: [n] the first message received in the first round.
        shared: [n] the key that client and server share in the first round.
    """

    ratios: Tensor | None
    estimates: Tensor
    wires: tuple[bytes, ...]
    shared: tuple[Key, ...]

    def select(self, trials: slice) -> Trace:
        """The trace of some of the trials."""
        ratios = None if self.ratios is None else self.ratios[trials]
        return Trace(ratios, self.estimates[trials], self.wires[trials], self.shared[trials])


@dataclass(frozen=True)
class Mechanism:
    """What a trial runs: a defense in a federation over the rounds of `history`, one client, one adversary.

    The other clients send zero updates. Apart from their noise, this is as good as knowing and subtracting them.

    Args:
        history: the public state of each round.
        threat: the adversary. Without the shared keys it reads messages as an outsider.
    """

    defense: Defense[Any, Any]
    setting: Setting
    history: tuple[Any, ...]
    threat: Threat

    @property
    def sees_messages(self) -> bool:
        """Whether the adversary sees messages, and not only models."""
        return "messages" in SEES[self.threat]

    def run(self, inputs: Inputs, bit: int, trials: int, key: Key, *, only: Part | None = None) -> Trace:
        """Run independent trials with input `bit`.

        Args:
            only: the part of the trace to compute, beside `wires` and `shared`; None: all parts.
        """
        ratios = torch.zeros(trials, dtype=torch.float64) if self.sees_messages and only in (None, "ratios") else None
        estimates = torch.zeros(trials, self.setting.dim)
        memories = [self.defense.remember(self.setting) for _ in range(trials)]
        first: tuple[tuple[bytes, ...], tuple[Key, ...]] = ((), ())
        for number, state in enumerate(self.history):
            current, round_key = Round(self.defense, self.setting, state, number), key.child("round", number)
            updates = self._updates(inputs, bit, trials, round_key.child("train"))
            keys = [round_key.child("trial", trial) for trial in range(trials)]
            sender, each = self._sender, zip(updates.unbind(), memories, keys, strict=True)
            clients = [Client.of(sender, *of_trial) for of_trial in each]
            sent, wires, memories = self._send(current, clients, keys)
            shared = [client.shared for client in clients]
            if number == 0:
                first = tuple(wires), tuple(shared)
            if ratios is not None:
                ratios += self._ratios(state, wires, shared, inputs)
            if only in (None, "estimates") and self.sees_messages:
                estimates += torch.stack(
                    [current.estimate(w, sender, self._visible(key)) for w, key in zip(wires, shared, strict=True)]
                )
            elif only in (None, "estimates"):
                decoded = [current.decode(one, mine.child("server")) for one, mine in zip(sent, keys, strict=True)]
                estimates += torch.stack(decoded)
        return Trace(ratios, estimates if inputs.focus is None else estimates[:, inputs.focus], *first)

    def replay(self, update: Vector, shared: Key) -> Vector:
        """[d] estimated from a first-round message of an update, made with the shared key as the private key.

        A channel adds noise of its own, from a child of that key.
        """
        client = Client(self._sender, update, self.defense.remember(self.setting), shared, shared)
        exchange = Round(self.defense, self.setting, self.history[0]).exchange([client], shared.child("replay"))
        return self.estimate(exchange.received[0], shared)

    def estimate(self, wire: bytes, shared: Key) -> Vector:
        """The update [d] that a message of the first round reveals to the adversary."""
        current = Round(self.defense, self.setting, self.history[0])
        return current.estimate(wire, self._sender, self._visible(shared))

    def _visible(self, shared: Key) -> Key | None:
        """The shared key if the adversary sees it."""
        return shared if "shared" in SEES[self.threat] else None

    @property
    def _sender(self) -> Sender:
        """The client whose input moves."""
        return Sender(0, self.setting.samples)

    def _updates(self, inputs: Inputs, bit: int, trials: int, key: Key) -> Tensor:
        """[n, d] updates of one round."""
        if inputs.draw is not None:
            return inputs.draw(bit, trials, key)
        return (inputs.one if bit else inputs.zero).expand(trials, -1)

    def _send(
        self, current: Round, clients: Sequence[Client], keys: Sequence[Key]
    ) -> tuple[list[Exchange], list[bytes], list[Any]]:
        """Send the client's message of each trial: the exchanges, what arrives of the messages, the memories.

        All other participants send too if the adversary sees what messages add up to.
        """
        alone = self.sees_messages and not self.defense.superposes
        if alone and not self.defense.analog:
            together = current.exchange(clients, keys[0])  # no channel in which the trials could meet
            return [together], list(together.received), together.memories
        others = ([] if alone else current.silent([self._sender], key) for key in keys)
        rounds = zip(clients, others, keys, strict=True)
        sent = [current.exchange([client, *rest], key.child("channel")) for client, rest, key in rounds]
        return sent, [one.received[0] for one in sent], [one.memories[0] for one in sent]

    def _ratios(self, state: Any, wires: Sequence[bytes], keys: Sequence[Key], inputs: Inputs) -> Tensor:
        """[n] log-likelihood ratios of one round."""
        n = len(wires)
        links = Links(self.setting, [self._sender] * n, keys if "shared" in SEES[self.threat] else None)
        likelihood = self.defense.likelihood(state, wires, links)
        zero, one = (update.expand(n, -1).clone() for update in inputs.hypotheses)
        return log_ratios(likelihood, zero, one)


def log_ratios(likelihood: Likelihood, zero: Tensor, one: Tensor) -> Tensor:
    """[n] float64 log-likelihood ratios of the updates `one` [n, d] to `zero`; 0 if both are impossible."""
    with torch.no_grad():
        ratios = likelihood(zero).double() - likelihood(one).double()
    return ratios.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)


def pairs(defense: Defense[Any, Any], setting: Setting, unit: Unit, relation: Relation, key: Key) -> list[Inputs]:
    """Neighbors that differ as far as the unit allows, in several directions; the worst depends on the defense.

    | unit | what moves |
    |---|---|
    | coordinate, sub-vector | the first one (see `Defense.parts`); a sub-vector in four directions of its first plane |
    | message, client | all coordinates together, only the first, or all with random signs |
    | record | one record, whose gradient is reversed, in local training as the defense requires it |

    A pair goes from one end of the range to the other, and one pair from zero to one end. With add-remove, all pairs
    go from zero to one end.
    """
    if unit is Unit.RECORD:
        # a replaced record is also tried against one without a gradient, because then the norm moves
        return [_records(defense, setting, each) for each in dict.fromkeys((relation, Relation.ADD_REMOVE))]
    if unit in (Unit.COORDINATE, Unit.SUBVECTOR):
        return _part_pairs(defense.parts(setting), setting.dim)
    d = setting.dim
    first = torch.zeros(d)
    first[0] = _FAR
    signs = torch.where(rng.uniform(key.child("signs"), (d,)) < 0.5, -_FAR, _FAR)
    ends = {"first coordinate": first, "all coordinates": torch.full((d,), _FAR), "all, signs at random": signs}
    from_nothing = [Inputs(f"{name}, from nothing", torch.zeros(d), end) for name, end in ends.items()]
    if relation is Relation.ADD_REMOVE:
        return from_nothing
    return [*(Inputs(name, -end, end) for name, end in ends.items()), from_nothing[1]]


def _part_pairs(parts: Parts, d: int) -> list[Inputs]:
    """Pairs that move the first sub-vector from end to end, at one norm if the update sets its own scale."""
    # at one norm, the second sub-vector moves the other way, which keeps norm and mean; others of alternating sign set
    # the norm so that the ends are those of [-1, 1], if there are 18 sub-vectors or more
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
    """A pair of clients with one record whose gradient is not zero, along the first coordinate; this record moves."""
    # a linear regression from parameters of zero: the loss of (x, y) is (w.x - y)^2, its gradient -2 y x
    task = ModelTask(build("linear-regression", (setting.dim,), 1))
    study = LocalPlan(setting.sends == "gradient", setting.steps, None, setting.batch, setting.lr, setting.momentum)
    plan = study.under(defense.local, defense.step_noise(setting))
    start = torch.zeros(setting.dim)

    def data(bit: int) -> Examples:
        x, y = torch.zeros(setting.samples, setting.dim), torch.zeros(setting.samples)
        if bit or relation is not Relation.ADD_REMOVE:
            x[0, 0], y[0] = CANARY[0], CANARY[1] if bit else -CANARY[1]
        return Examples(x, y)

    def draw(bit: int, trials: int, key: Key) -> Tensor:
        work = [Work(data(bit), key.child(trial)) for trial in range(trials)]
        return train_clients(task, start, work, plan, choose_engine(task)).updates

    still = LocalPlan(plan.gradient, plan.steps, None, 0, plan.lr, plan.momentum, plan.clip)
    zero, one = (train_clients(task, start, [Work(data(bit), Key(0))], still, "loop").updates[0] for bit in (0, 1))
    random = plan.noise_multiplier > 0 or plan.poisson or plan.size(setting.samples) < setting.samples
    name = "one record, from nothing" if relation is Relation.ADD_REMOVE else "one record"
    return Inputs(name, zero, one, draw if random else None)
