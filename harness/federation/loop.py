"""The federated loop: clients train, a defense carries their updates, the server averages what it decodes."""

from __future__ import annotations

import math
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from io import BufferedRandom
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.claim import EVERY_ROUND, Violation
from leakgauge.harness.core.contract import Defense, Examples, Feedback, LocalRule, Message, Sender, Setting, Snapshot
from leakgauge.harness.core.result import Dropped, Evaluation
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.federation.forge import forged
from leakgauge.harness.federation.round import Client, Collected, Round, client_key, participants
from leakgauge.harness.learn.batch import Engine, Indices, LocalPlan, Server, Work, plan_batches, train_clients
from leakgauge.harness.learn.gradients import keep_freed_memory
from leakgauge.harness.learn.partition import Holdings, sizes
from leakgauge.harness.learn.tasks import ModelTask

_NO_RULE = LocalRule()

Broadcast = Callable[[Snapshot, float], Vector]
"""A function of a round's model and learning rate: the parameters that a malicious server sends instead, or that a
malicious participant wants in the next round."""


class Craft(NamedTuple):
    """Where a malicious participant moves the model, and whether it sends bytes of its own choice (`forged`)."""

    aim: Broadcast
    forges: bool = False


class Keep(NamedTuple):
    """The rounds whose models and messages a training keeps for the attacks."""

    models: frozenset[int] = frozenset()
    messages: frozenset[int] = frozenset()


@dataclass
class Training:
    """The record of one training. `truth` is for scoring only and never enters an observation.

    Attributes:
        final: parameters after the last round.
        evaluations: evaluations in the order of the rounds.
        feedback: the public facts after each round; the defense's state is replayed from them.
        learning_rates: one per round.
        models: parameters from which the clients train in the kept rounds.
        messages: messages of the kept rounds, in the order of the senders' numbers; one if the channel adds them up.
        truth: for the kept rounds, by sender: the samples (indices into its data) behind its message.
        message_bytes: mean bytes of a client's message, by round.
        snr_db: mean over a round's messages, by evaluated round; None if decoding was exact.
        norms: median l2 norm of the updates before the defense, by round; 0 for a round without a finite update.
        violations: by assumption, how often the rounds broke it (`Defense.violations`); under `EVERY_ROUND`, the
            clients that missed a round.
        dropped: the clients that did not count in a round, in the order of the rounds.
        unrepeated: why the first message does not follow from its keys (`Round.unrepeated`); empty: it does.
    """

    setting: Setting
    final: Vector
    evaluations: list[Evaluation] = field(default_factory=list)
    feedback: list[Feedback] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    models: dict[int, Vector] = field(default_factory=dict)
    messages: dict[int, tuple[Message, ...]] = field(default_factory=dict)
    truth: dict[int, dict[int, Indices]] = field(default_factory=dict)
    message_bytes: list[float] = field(default_factory=list)
    snr_db: list[float | None] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    violations: dict[str, Violation] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    unrepeated: str = ""


def make_setting(task: ModelTask, spec: FederationSpec, clients: Mapping[int, Examples], rule: LocalRule) -> Setting:
    """The public setting of a federation of these clients; they train by the defense's rule."""
    return setting_of(task.under(rule).layout, spec, list(sizes(clients).values()), rule)


def setting_of(layout: Layout, spec: FederationSpec, sizes: Sequence[int], rule: LocalRule) -> Setting:
    """The public setting of a federation whose clients have these numbers of samples."""
    plan = make_plan(spec, spec.lr, rule)
    passes = -(-max(sizes) // plan.size(max(sizes))) * (plan.epochs or 1)
    return Setting(
        layout=layout,
        clients=spec.clients,
        participants=spec.participants or spec.clients,
        rounds=spec.rounds,
        sends="gradient" if plan.gradient else "update",
        steps=1 if plan.gradient else plan.steps or passes,
        lr=spec.lr,
        batch=plan.batch,
        samples=min(sizes),
        equal=min(sizes) == max(sizes) and spec.participation != "poisson" and not spec.dropout,
        momentum=plan.momentum,
        optimizer=plan.optimizer,
        weight_decay=plan.weight_decay,
        proximal=plan.proximal,
        participation=spec.participation,
        server_optimizer=spec.server_optimizer,
        server_momentum=spec.server_momentum,
        server_lr=spec.server_lr,
    )


def make_plan(spec: FederationSpec, lr: float, rule: LocalRule = _NO_RULE, noise: float = 0.0) -> LocalPlan:
    """How a client trains at this learning rate: for one epoch if the study sets neither steps nor epochs.

    rule, noise: see `LocalPlan.under`.
    """
    plan = LocalPlan(
        gradient=spec.algorithm == "fedsgd",
        steps=spec.local_steps,
        epochs=1 if spec.local_steps is None and spec.local_epochs is None else spec.local_epochs,
        batch=spec.batch,
        lr=lr,
        momentum=spec.momentum,
        optimizer=spec.optimizer,
        weight_decay=spec.weight_decay,
        proximal=spec.proximal,
    )
    return plan.under(rule, noise)


def replay_state(defense: Defense[Any, Any], setting: Setting, feedback: Sequence[Feedback]) -> Any:
    """The defense's public state after these rounds, computed from public facts alone."""
    return reduce(defense.advance, feedback, defense.init(setting))


def planned(
    spec: FederationSpec,
    defense: Defense[Any, Any],
    setting: Setting,
    clients: Mapping[int, Indices],
    key: Key,
    rounds: Iterable[int],
) -> Training:
    """A training without models, of which only senders and samples behind the messages of these rounds are known.

    As if no client were dropped. `clients` has the samples of each client; `key` is that of the training.
    """
    training, plan = Training(setting, torch.zeros(0)), make_plan(spec, spec.lr, defense.local)
    for number in rounds:
        drawn = participants(key, number, sorted(clients), setting)
        keys = {client: client_key(key, number, client).child("train") for client in drawn}
        batches = {client: plan_batches(len(clients[client]), plan, own) for client, own in keys.items()}
        training.truth[number] = {client: np.unique(np.concatenate(used)) for client, used in batches.items()}
        senders = [Sender(client, len(clients[client])) for client in drawn]
        each = [Message(number, sender, b"", None, 0, 0) for sender in senders]
        if defense.superposes:
            each = [each[0]._replace(others=tuple(senders[1:]))]
        training.messages[number] = tuple(each)
    return training


def reads_losses(defense: Defense[Any, Any], spec: FederationSpec) -> bool:
    """Whether the defense or the schedule uses losses: those of all test samples, or of held-out training samples."""
    return type(defense).advance is not Defense.advance or spec.schedule == "plateau"


def train(
    task: ModelTask,
    spec: FederationSpec,
    defense: Defense[Any, Any],
    clients: Mapping[int, Examples],
    test: Examples,
    key: Key,
    *,
    engine: Engine,
    keep: Keep,
    device: str = "cpu",
    broadcasts: Mapping[int, Broadcast] | None = None,
    crafts: Mapping[int, Craft] | None = None,
    strict: bool = False,
    held_out: Examples | None = None,
) -> Training:
    """Run the whole federation.

    A client whose update is not finite, or whose message is refused, is dropped for the round (`Round.collect`): the
    others are averaged by their weights, the client's memory stays unchanged, and `Training.dropped` names it. If no
    message of a round counts, the model stays unchanged.

    The model is evaluated on `spec.interim_samples` test examples, the same in all rounds and for all defenses of a
    key. It is evaluated on all test examples at the end, before each round of `keep.models`, and always if the
    defense's state or the learning rate depends on the losses. These losses are public (`Training.feedback`); they are
    of `held_out`, training samples that no client has, if there are any: test samples then decide about no model.

    Args:
        clients: data by client number; the listed order does not matter. `Holdings` are not copied.
        key: key of all random draws. With the same key, two defenses start from the same model and have the same
            clients, batches and test set.
        device: where the clients train and the model is evaluated; messages are made, sent and decoded on the CPU.
        broadcasts: what a malicious server sends, by round; it discards the updates of these rounds, and continues
            from its own model.
        crafts: where a malicious participant, the last client, moves the model, by round: it sends the difference times
            the number of participants, less what the others send if that is about its own update. Without effect if it
            does not take part in the round.
        strict: raise an error instead of dropping a client.

    Raises:
        ValueError: training diverged (the test loss or all updates of a round are not finite), no message counted, the
            defense allows no round, or `strict` and a client would be dropped; the error names round, client, reason.
    """
    keep_freed_memory()
    task = task.under(defense.local)
    params = task.init(key.child("init"))
    training = Training(make_setting(task, spec, clients, defense.local), params)
    data = _placed(clients, device), test.on(device), None if held_out is None else held_out.on(device)
    run = _Run(task, spec, defense, *data, key, engine, keep, device, strict, crafts or {}, training)
    state = defense.init(training.setting)
    schedule = _Schedule(spec)
    before: float | None = run.evaluate(params, 0, whole=False)
    for number in range(spec.rounds_run):
        if defense.stops(state):
            break
        lr = schedule.lr(number, before)
        chosen = (broadcasts or {}).get(number)
        sent = params if chosen is None else chosen(Snapshot(number, params, state), lr)
        if number in keep.models:
            training.models[number] = sent.clone()
        training.learning_rates.append(lr)
        after_round = run.round(sent, state, number, lr, with_snr=before is not None)
        params = after_round if chosen is None else params
        due = (number + 1) % spec.evaluate_every == 0 or number + 1 == spec.rounds_run
        after = run.evaluate(params, number + 1, whole=number + 1 == spec.rounds_run) if due else None
        training.feedback.append(Feedback(number, before, after))
        state, before = defense.advance(state, training.feedback[-1]), after
    if not training.feedback:
        raise ValueError("the defense stops before the first round: nothing was trained")
    if not run.turns:
        first = training.dropped[0]
        raise ValueError(f"no message counted in any round: round {first.round}, client {first.client}: {first.reason}")
    last = len(training.feedback)
    if (training.evaluations[-1].round, training.evaluations[-1].samples) != (last, len(test.y)):
        training.evaluations = [evaluation for evaluation in training.evaluations if evaluation.round < last]
        run.evaluate(params, last, whole=True)
    training.final = params
    missed = sum(run.turns[number] < len(training.feedback) for number in clients)
    training.violations[EVERY_ROUND] = Violation(missed, len(clients), "client", covered=True)
    return training


def _placed(clients: Mapping[int, Examples], device: str) -> Mapping[int, Examples]:
    if isinstance(clients, Holdings):
        return Holdings(clients.data.on(device), clients.rows)
    return {number: data.on(device) for number, data in clients.items()}


def evaluation(task: ModelTask, params: Vector, test: Examples, number: int) -> Evaluation:
    """Accuracy (None for a regression) and mean loss of the model before round `number` on test examples.

    Raises:
        ValueError: the loss is not finite.
    """
    loss, correct = 0.0, list[float | None]()
    for x, y in zip(*(torch.split(column, 1000) for column in test), strict=True):
        losses, hits = task.tested(params, x, y)
        loss += float(losses.double().sum())
        correct.append(hits)
    loss /= len(test.y)
    if not math.isfinite(loss):
        raise ValueError(f"training diverged: the test loss before round {number} is {loss}")
    right = [hits for hits in correct if hits is not None]
    return Evaluation(number, sum(right) / len(test.y) if len(right) == len(correct) else None, loss, len(test.y))


RESIDENT = 2**27
"""Maximum bytes of tensors in main memory; further clients' tensors are stored in a temporary file.

The residual of `top-k` is dense, so the memories of all clients take clients * d floats in main memory or on disk. A
round reads and writes only the memories of its participants: 0.1 ms for 203,530 weights. Compression would reduce the
memories of MNIST to 0.6 of their size but take 13 ms; rounding would change the numbers.
"""


class _Slot(NamedTuple):
    start: int
    dtype: torch.dtype
    shape: torch.Size


class Memories:
    """The memory of each client of a defense.

    Guarantees:
        A client's memory is the last one kept, bit for bit; before that, `first()`.
        At most `resident` bytes of plain tensors are held in main memory. Memories of other types always stay there.
    """

    def __init__(self, first: Callable[[], Any], resident: int | None = None) -> None:
        """`first` makes the memory of a client before its first message; resident: None for `RESIDENT`."""
        self._first, self._left = first, RESIDENT if resident is None else resident
        self._resident: dict[int, Any] = {}
        self._slots: dict[int, _Slot] = {}
        self._file: BufferedRandom | None = None

    def of(self, client: int) -> Any:
        """The memory of a client."""
        if client in self._slots:
            assert self._file is not None  # there are no slots without a file
            slot = self._slots[client]
            memory = torch.empty(slot.shape, dtype=slot.dtype)
            self._file.seek(slot.start)
            self._file.readinto(_bytes(memory))
            return memory
        return self._resident[client] if client in self._resident else self._first()

    def keep(self, client: int, memory: Any) -> None:
        """Keep the memory of a client in place of its last one.

        Raises:
            OSError: the file cannot be written.
        """
        self._left += _size(self._resident.pop(client, None))
        size = _size(memory)
        if size <= self._left or not size:
            self._left -= size
            self._slots.pop(client, None)
            # a view would keep its whole base tensor alive
            is_view = size and memory.untyped_storage().nbytes() > size
            self._resident[client] = memory.clone() if is_view else memory
        else:
            self._write(client, memory.contiguous())

    def _write(self, client: int, memory: Tensor) -> None:
        """Write a tensor to the client's old place in the file if it fits, else at the end."""
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object
            weakref.finalize(self, self._file.close)
        old, size = self._slots.get(client), _size(memory)
        fits = old is not None and old.dtype.itemsize * old.shape.numel() >= size
        start = old.start if old is not None and fits else self._file.seek(0, 2)
        self._file.seek(start)
        self._file.write(_bytes(memory))
        self._slots[client] = _Slot(start, memory.dtype, memory.shape)


def _bytes(memory: Tensor) -> memoryview:
    return memory.view(-1).view(torch.uint8).numpy().data


def _size(memory: Any) -> int:
    """Bytes of a plain tensor on the CPU; 0 for anything else, which is not written to a file."""
    plain = type(memory) is Tensor and memory.device.type == "cpu" and memory.layout == torch.strided
    return memory.nbytes if plain and not memory.requires_grad else 0


@dataclass
class _Schedule:
    spec: FederationSpec
    best: float = math.inf
    stale: int = 0
    factor: float = 1.0

    def lr(self, number: int, loss: float | None) -> float:
        """The learning rate of round `number`; `loss` is the test loss before it, if it was evaluated."""
        if self.spec.schedule == "linear":
            return self.spec.lr * (1 - number / self.spec.rounds)
        if self.spec.schedule == "inverse":
            return self.spec.lr / (1 + self.spec.decay * number)
        if self.spec.schedule == "plateau" and loss is not None:
            if loss < self.best:
                self.best, self.stale = loss, 0
            else:
                self.stale += 1
            if self.stale >= self.spec.patience:
                self.factor, self.stale = self.factor * self.spec.decay, 0
        return self.spec.lr * self.factor


@dataclass
class _Run:
    task: ModelTask
    spec: FederationSpec
    defense: Defense[Any, Any]
    clients: Mapping[int, Examples]
    test: Examples
    held_out: Examples | None
    key: Key
    engine: Engine
    keep: Keep
    device: str
    strict: bool
    crafts: Mapping[int, Craft]
    training: Training

    def __post_init__(self) -> None:
        self.setting = self.training.setting
        self.server = Server.of(self.setting)
        self.turns: Counter[int] = Counter()
        self.memories = Memories(partial(self.defense.remember, self.setting))
        self.sizes = sizes(self.clients)
        self.numbers = sorted(self.clients)
        self.interim = self.test
        if 0 < self.spec.interim_samples < len(self.test.y):
            rows = rng.subset(self.key.child("interim"), len(self.test.y), self.spec.interim_samples)
            self.interim = Examples(self.test.x[rows], self.test.y[rows])

    def evaluate(self, params: Vector, number: int, *, whole: bool) -> float:
        """Record accuracy (None for a regression) and mean test loss before round `number`; returns the public loss.

        whole: evaluate on all test examples.
        """
        reads, here = reads_losses(self.defense, self.spec), params.to(self.device)
        all_of_it = whole or (reads and self.held_out is None) or number in self.keep.models
        test = self.test if all_of_it else self.interim
        self.training.evaluations.append(evaluation(self.task, here, test, number))
        if reads and self.held_out is not None:
            return evaluation(self.task, here, self.held_out, number).loss
        return self.training.evaluations[-1].loss

    def round(self, params: Vector, state: Any, number: int, lr: float, *, with_snr: bool) -> Vector:
        """Run one round; returns the next parameters."""
        round_, key = Round(self.defense, self.setting, state, number), self.key.child("round", number)
        if not (numbers := self._heard(number, key)):
            return self._without_messages(params, with_snr=with_snr)
        keys = [client_key(self.key, number, k) for k in numbers]
        held, owners = self.clients, zip(numbers, keys, strict=True)
        if isinstance(held, Holdings):
            work = [Work(held.data, own.child("train"), held.rows[k]) for k, own in owners]
        else:
            work = [Work(held[k], own.child("train")) for k, own in owners]
        plan = make_plan(self.spec, lr, self.defense.local, self.defense.step_noise(self.setting))
        trained, batches = train_clients(self.task, params.to(self.device), work, plan, self.engine)
        updates = self._crafted(trained.cpu(), numbers, Snapshot(number, params, state), lr)
        clients = [
            Client.of(Sender(k, self.sizes[k]), update, self.memories.of(k), own)
            for k, update, own in zip(numbers, updates, keys, strict=True)
        ]
        clients = self._forged(clients, round_)
        collected = round_.collect(clients, key.child("channel"), round_.server_key(self.key, key))
        if collected.dropped:
            self._drop(number, collected.dropped, diverged=not bool(updates.isfinite().all(1).any()))
        if collected.clients and not number:
            first = collected.clients[0]._replace(memory=self.defense.remember(self.setting))
            self.training.unrepeated = round_.unrepeated(first, collected.exchange.sent[0])
        counted = [sender.number for sender in collected.links.senders]
        for client, memory in zip(collected.clients, collected.exchange.memories, strict=True):
            if client.sender.number in counted:
                self.memories.keep(client.sender.number, memory)
        self.turns.update(counted)
        if collected.clients:
            self._count(collected, lr)
        sent = collected.exchange.sent
        self.training.message_bytes.append(sum(map(len, sent)) / max(1, len(sent)))
        norms = [float(torch.linalg.vector_norm(client.update)) for client in collected.clients]
        self.training.norms.append(float(np.median(norms)) if norms else 0.0)
        if with_snr:
            self.training.snr_db.append(self._snr_db(collected))
        if number in self.keep.messages:
            self._keep(number, collected, [used for k, used in zip(numbers, batches, strict=True) if k in counted])
        return params if collected.mean is None else self.server.step(params, collected.mean, lr)

    def _heard(self, number: int, key: Key) -> list[int]:
        """The clients that take part in a round and whose message arrives."""
        numbers = participants(self.key, number, self.numbers, self.setting)
        if not self.spec.dropout:
            return numbers
        lost = rng.uniform(key.child("lost"), (len(numbers),)) < self.spec.dropout
        return [k for k, gone in zip(numbers, lost.tolist(), strict=True) if not gone]

    def _without_messages(self, params: Vector, *, with_snr: bool) -> Vector:
        self.training.message_bytes.append(0.0)
        self.training.norms.append(0.0)
        if with_snr:
            self.training.snr_db.append(None)
        return params

    def _crafted(self, updates: Tensor, numbers: Sequence[int], model: Snapshot, lr: float) -> Tensor:
        """The updates, of which a malicious participant's moves the mean of all to the parameters that it wants."""
        if (craft := self.crafts.get(model.round)) is not None and self.numbers[-1] in numbers:
            own, all_of_them = updates[numbers.index(self.numbers[-1])], self.setting.participants
            moved = (craft.aim(model, lr) - model.params) / (-lr if self.setting.sends == "gradient" else 1.0)
            own += all_of_them * (moved - own)  # the other honest updates are about its own
        return updates

    def _forged(self, clients: list[Client], round_: Round) -> list[Client]:
        """The clients, of which a malicious participant may send bytes of its own choice."""
        if (craft := self.crafts.get(round_.number)) is None or not craft.forges:
            return clients
        state_of = partial(replay_state, setting=self.setting, feedback=self.training.feedback)
        last = self.numbers[-1]
        return [c._replace(own=forged(round_, c, state_of)) if c.sender.number == last else c for c in clients]

    def _drop(self, number: int, dropped: Mapping[int, str], *, diverged: bool) -> None:
        """Record the clients that do not count in a round; refuse a training that is strict or diverged."""
        for client, reason in dropped.items():
            if self.strict or diverged:
                why = "training diverged, no update of this round is finite" if diverged else "the study is strict"
                raise ValueError(f"round {number}, client {client}: {reason}; {why}")
            self.training.dropped.append(Dropped(number, client, reason))

    def _count(self, collected: Collected[Client], lr: float) -> None:
        total, updates = self.training.violations, [client.update for client in collected.clients]
        violations = self.defense.violations(updates, collected.exchange.links._replace(shared=None), lr)
        if self.defense.relies and len(updates) < self.setting.participants:
            violations |= {self.defense.relies: Violation(1, 1, "round")}
        total |= {
            text: violation.plus(total[text]) if text in total else violation for text, violation in violations.items()
        }

    def _keep(self, number: int, collected: Collected[Client], batches: Sequence[Sequence[Indices]]) -> None:
        # the distinct samples behind a message, in the order of their first use
        samples = [np.array(list(dict.fromkeys(np.concatenate(used).tolist())), np.int64) for used in batches]
        senders, keys, received = collected.links.senders, collected.links.keys, collected.exchange.received
        self.training.truth[number] = {sender.number: used for sender, used in zip(senders, samples, strict=True)}
        images, steps = [len(used) for used in samples], [len(used) for used in batches]
        if self.defense.superposes and senders:
            first, others = senders[0], tuple(senders[1:])
            messages = [Message(number, first, received[0], keys[0], sum(images), max(steps), others)]
        else:
            messages = [Message(number, *row) for row in zip(senders, received, keys, images, steps, strict=True)]
        self.training.messages[number] = tuple(messages)

    def _snr_db(self, collected: Collected[Client]) -> float | None:
        """Mean over messages of 10 log10(|u|^2 / |decoded - u|^2); None if decoding is exact or u is zero."""
        if self.defense.superposes:
            return None
        ratios = []
        for client, decoded in zip(collected.clients, collected.updates, strict=True):
            # u: the update, with error feedback the update plus the residual
            update = self.defense.compensated(client.memory, client.update)
            # numpy takes a third of the time of `torch.equal`
            if np.array_equal(decoded.numpy(), update.numpy()):
                continue
            update = update.double()
            noise = float((decoded.double() - update).square_().sum())
            signal = float(update.square_().sum())
            if signal > 0 and noise > 0:
                ratios.append(10 * float(torch.log10(torch.tensor(signal / noise, dtype=torch.float64))))
        return sum(ratios) / len(ratios) if ratios else None
