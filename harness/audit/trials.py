"""Trials of an audit: many runs of a defense on two inputs, through its real `encode`, as one adversary sees them.

Inputs 0 and 1 differ in the claim's unit: one coordinate, one sub-vector, a whole message, all of a client, or one
record, which goes through real local training. Everything else is the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.claim import Relation, Unit
from leakgauge.harness.core.contract import Defense, Examples, Likelihood, Links, Sender, Setting, likelihood_of
from leakgauge.harness.core.device import Placed, moved
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.core.vec import Parts, Vector
from leakgauge.harness.federation.round import Client, Exchange, Round
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask

FAR = 100.0
"""Entries of an input: far above every clip, so that each defense clips them to the ends of its own range."""

CANARY = 1e-2, 1e6
"""Input entry and label of a canary record. Its gradient is twice their product, above every clip. The loss stays so
steep that several local steps go the same way."""

Part = Literal["ratios", "estimates", "wires"]
"""Name of a field of `Trace`."""


class Deployment(NamedTuple):
    """A defense in a federation, and its public state in each round."""

    defense: Defense[Any, Any]
    setting: Setting
    history: tuple[Any, ...]


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


def in_turn(rows: Tensor, trials: Tensor) -> Tensor:
    """[n, d]: the row of each trial [n], of rows [v, d] that take turns or of one row [d] for all."""
    return rows.expand(len(trials), -1) if rows.dim() == 1 else rows[trials % len(rows)]


class Trace(NamedTuple):
    """What the adversary sees in n trials.

    Attributes:
        ratios: [n] log-likelihood ratio of input 1 to input 0 by the defense's own likelihood, summed over the rounds;
            None if the adversary sees no messages, or the defense has no likelihood.
        estimates: [n, d] or [n, focus]: the update estimated from the message, or the decoded mean update for an
            adversary who sees no messages; summed over the rounds, with the opposite sign where inputs are negated.
        wires: [n] the first message received in the first round.
        shared: [n] the key that client and server share in the first round.
        trials: [n] the number of each trial.
        rounds: [n, T, d] or [n, T, focus]: the terms of `estimates`, if an adversary sees several models.
        later: T - 1 times [n], the first message received in each later round.
    """

    ratios: Tensor | None
    estimates: Tensor
    wires: tuple[bytes, ...]
    shared: tuple[Key, ...]
    trials: Tensor
    rounds: Tensor | None = None
    later: tuple[tuple[bytes, ...], ...] = ()

    def select(self, trials: slice | Tensor) -> Trace:
        """The trace of some of the trials."""
        at = torch.arange(len(self.shared))[trials].tolist()
        return Trace(
            None if self.ratios is None else self.ratios[at],
            self.estimates[at],
            tuple(self.wires[trial] for trial in at),
            tuple(self.shared[trial] for trial in at),
            self.trials[at],
            None if self.rounds is None else self.rounds[at],
            tuple(tuple(wires[trial] for trial in at) for wires in self.later),
        )


@dataclass(frozen=True)
class Mechanism:
    """What a trial runs: a defense in a federation over the rounds of `history`, one client, one adversary.

    The other clients send zero updates. Apart from their noise, this equals knowing and subtracting their updates.

    Args:
        history: the public state of each round.
        threat: the adversary. An adversary without the shared keys reads messages as an outsider.
        device: where clients train and likelihoods are computed; messages are encoded and decoded on the CPU.
    """

    defense: Defense[Any, Any]
    setting: Setting
    history: tuple[Any, ...]
    threat: Threat
    device: str = "cpu"

    @property
    def sees_messages(self) -> bool:
        """Whether the adversary sees messages, not only models."""
        return "messages" in SEES[self.threat]

    def run(self, inputs: Inputs, bit: int, trials: int, key: Key, *, only: Part | None = None) -> Trace:
        """Run independent trials with input `bit`.

        Args:
            only: the part of the trace to compute besides `wires` and `shared`; None: all parts.
        """
        numbers = torch.arange(trials)
        senders = [self._sender(inputs.row(number)) for number in range(max(1, len(inputs.senders)))]
        senders = [senders[number % len(senders)] for number in range(trials)]
        memories = [self.defense.remember(self.setting) for _ in range(trials)]
        ratios, terms, rounds, each_round = [], [], [], "models" in SEES[self.threat]
        for number, state in enumerate(self.history):
            current, round_key = Round(self.defense, self.setting, state, number), key.child("round", number)
            negated = inputs.reverses and 2 * number >= len(self.history)
            updates = self._updates(inputs, bit, negated, numbers, round_key.child("train"))
            keys = [round_key.child("trial", trial) for trial in range(trials)]
            each = zip(senders, updates.unbind(), memories, keys, strict=True)
            clients = [Client.of(*of_trial) for of_trial in each]
            sent, wires, memories = self._send(current, clients, keys)
            shared = [client.shared for client in clients]
            rounds.append((tuple(wires), tuple(shared)))
            sign = -1.0 if negated and each_round else 1.0
            if self.sees_messages and only in (None, "ratios"):
                with suppress(NoLikelihood):
                    ratios.append(self._ratios(state, wires, Links(self.setting, senders, shared), inputs, sign))
            if only in (None, "estimates"):
                terms.append(sign * inputs.seen(self._estimates(current, sent, wires, clients, keys), numbers))
        width = self.setting.dim if inputs.focus is None else inputs.focus.shape[-1]
        return Trace(
            torch.stack(ratios).sum(0) if ratios else None,
            torch.stack(terms).sum(0) if terms else torch.zeros(trials, width),
            *rounds[0],
            numbers,
            torch.stack(terms, 1) if len(terms) > 1 and each_round else None,
            tuple(wires for wires, _ in rounds[1:]),
        )

    def again(self, inputs: Inputs, bit: int, trial: int, shared: Key, private: Key) -> bytes:
        """The first-round message of a trial with input `bit`, by these keys."""
        pair = inputs.row(trial)
        return self._send_again(self._sender(pair), pair.one if bit else pair.zero, shared, private)

    def read(self, inputs: Inputs, wire: bytes, trial: int, shared: Key) -> Vector:
        """The coordinates that the adversary learns from a first-round message."""
        pair = inputs.row(trial)
        update = self._read(self._sender(pair), wire, shared)
        return update if pair.focus is None else update[pair.focus]

    def _send_again(self, sender: Sender, update: Vector, shared: Key, private: Key) -> bytes:
        """A first-round message as it is received."""
        client = Client(sender, update, self.defense.remember(self.setting), private, shared)
        return Round(self.defense, self.setting, self.history[0]).exchange([client], shared.child("replay")).received[0]

    def _read(self, sender: Sender, wire: bytes, shared: Key) -> Vector:
        """The update [d] that a first-round message reveals to the adversary."""
        current = Round(self.defense, self.setting, self.history[0])
        return current.estimate(wire, sender, self._visible(shared))

    def _visible(self, shared: Key) -> Key | None:
        """The shared key if the adversary sees it."""
        return shared if "shared" in SEES[self.threat] else None

    def _sender(self, inputs: Inputs) -> Sender:
        """The client whose input moves, in one pair; a sum with other clients needs equal numbers of samples."""
        if not inputs.senders:
            return Sender(0, self.setting.samples)
        alone = self.sees_messages and not self.defense.superposes
        return inputs.senders[0] if alone else inputs.senders[0]._replace(samples=self.setting.samples)

    def _updates(self, inputs: Inputs, bit: int, negated: bool, trials: Tensor, key: Key) -> Tensor:
        """[n, d] updates of one round."""
        if inputs.draw is not None:
            return inputs.draw(bit, negated, len(trials), key, self.device)
        updates = in_turn(inputs.one if bit else inputs.zero, trials)
        return -updates if negated else updates

    def _estimates(
        self,
        current: Round,
        sent: Sequence[Exchange],
        wires: Sequence[bytes],
        clients: Sequence[Client],
        keys: list[Key],
    ) -> Tensor:
        """[n, d] the adversary's estimate of the update in one round, or of the mean update."""
        if not self.sees_messages:
            return torch.stack(
                [current.revealed(one, self.threat, mine.child("server")) for one, mine in zip(sent, keys, strict=True)]
            )
        read = zip(wires, clients, strict=True)
        return torch.stack([current.estimate(wire, one.sender, self._visible(one.shared)) for wire, one in read])

    def _send(
        self, current: Round, clients: Sequence[Client], keys: Sequence[Key]
    ) -> tuple[list[Exchange], list[bytes], list[Any]]:
        """Send the client's message of each trial; returns the exchanges, the received messages and the memories.

        All other participants also send if the adversary sees only a sum of messages.
        """
        alone = self.sees_messages and not self.defense.superposes
        if alone and not self.defense.analog:
            together = current.exchange(clients, keys[0])  # without a channel, trials are independent
            return [together], list(together.received), together.memories
        each = zip(clients, keys, strict=True)
        others = ([] if alone else current.silent([client.sender], key) for client, key in each)
        rounds = zip(clients, others, keys, strict=True)
        sent = [current.exchange([client, *rest], key.child("channel")) for client, rest, key in rounds]
        return sent, [one.received[0] for one in sent], [one.memories[0] for one in sent]

    def _ratios(self, state: Any, wires: Sequence[bytes], links: Links, inputs: Inputs, sign: float) -> Tensor:
        """[n] log-likelihood ratios of one round in which inputs have this sign."""
        links = links if "shared" in SEES[self.threat] else links._replace(shared=None)
        trials = torch.arange(len(wires))
        zero, one = (sign * in_turn(update, trials) for update in inputs.hypotheses)
        return log_ratios(likelihood_of(self.defense, state, wires, links), zero, one, self.device)


def log_ratios(likelihood: Likelihood, zero: Tensor, one: Tensor, device: str) -> Tensor:
    """[n] float64 log-likelihood ratios of the updates `one` [n, d] to `zero`; 0 if both are impossible."""
    there = Placed(likelihood, torch.device(device))
    with torch.no_grad():
        low, high = (there(moved(update, device)).double() for update in (zero, one))
    ratios = (low - high).cpu()
    return ratios.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)


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
    study = LocalPlan(setting.sends == "gradient", setting.steps, None, setting.batch, setting.lr, setting.momentum)
    plan = study.under(defense.local, defense.step_noise(setting))
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

    still = LocalPlan(plan.gradient, plan.steps, None, 0, plan.lr, plan.momentum, plan.clip)
    zero, one = (train_clients(task, start, [Work(data(bit), Key(0))], still, "loop").updates[0] for bit in (0, 1))
    random = plan.noise_multiplier > 0 or plan.poisson or plan.size(setting.samples) < setting.samples
    name = "one record, from nothing" if relation is Relation.ADD_REMOVE else "one record"
    return Inputs(name, zero, one, draw if random else None)
