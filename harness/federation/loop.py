"""The federated loop: clients train, a defense wraps what they send, the server decodes and averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import (
    Defense,
    Examples,
    Feedback,
    LocalRule,
    Message,
    Sender,
    Setting,
)
from leakgauge.harness.core.result import Evaluation
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.federation.round import Client, Exchange, Round, client_key
from leakgauge.harness.learn.batch import Engine, Indices, LocalPlan, Work, train_clients
from leakgauge.harness.learn.tasks import ModelTask

_NO_RULE = LocalRule()


class Keep(NamedTuple):
    """What to keep of a training for the attacks: models before these rounds, messages of those."""

    models: frozenset[int] = frozenset()
    messages: frozenset[int] = frozenset()


@dataclass
class Training:
    """What one training left behind. `truth` is for scoring only and never enters an observation.

    Attributes:
        final: parameters after the last round.
        evaluations: in the order of the rounds.
        feedback: what everybody learned after each round; replays the defense's state.
        learning_rates: of each round.
        models: parameters before the kept rounds.
        messages: of the kept rounds, in the order of the senders' numbers; one of all where the channel adds them up.
        truth: of the kept rounds, by sender, the samples (indices into its data) behind its message.
        message_bytes: mean bytes of a client's message, by round.
        snr_db: mean over a round's messages, by evaluated round; None where decoding was exact.
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


def make_setting(
    task: ModelTask, spec: FederationSpec, clients: Mapping[int, Examples], rule: LocalRule = _NO_RULE
) -> Setting:
    """The public setting of a federation over these clients, who train by the defense's rule."""
    plan = make_plan(spec, spec.lr, rule)
    largest = max(len(data.y) for data in clients.values())
    size = largest if plan.batch == 0 else min(plan.batch, largest)
    steps = 1 if plan.gradient else plan.steps or -(-largest // size) * (plan.epochs or 1)
    return Setting(
        layout=task.layout,
        clients=spec.clients,
        participants=spec.participants or spec.clients,
        rounds=spec.rounds,
        sends="gradient" if plan.gradient else "update",
        steps=steps,
        lr=spec.lr,
        batch=plan.batch,
        samples=min(len(data.y) for data in clients.values()),
        momentum=plan.momentum,
    )


def make_plan(spec: FederationSpec, lr: float, rule: LocalRule = _NO_RULE, noise: float = 0.0) -> LocalPlan:
    """How a client trains at this learning rate; one epoch where the study names neither steps nor epochs.

    rule, noise: see `LocalPlan.under`.
    """
    unsaid = spec.local_steps is None and spec.local_epochs is None
    plan = LocalPlan(
        gradient=spec.algorithm == "fedsgd",
        steps=spec.local_steps,
        epochs=1 if unsaid else spec.local_epochs,
        batch=spec.batch,
        lr=lr,
        momentum=spec.momentum,
    )
    return plan.under(rule, noise)


def replay_state(defense: Defense[Any, Any], setting: Setting, feedback: Sequence[Feedback]) -> Any:
    """The defense's public state after these rounds: a function of what everybody knows."""
    state = defense.init(setting)
    for item in feedback:
        state = defense.advance(state, item)
    return state


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
) -> Training:
    """Run the whole federation.

    Args:
        clients: data by client number; the order in which they are listed changes nothing.
        key: of everything that is drawn. Equal for two defenses, so that they start from the same model with the same
            clients, batches and test set.
        device: where the clients train and the model is evaluated; messages are made, sent and decoded on the CPU.

    Raises:
        ValueError: training diverged: an update or the test loss is not finite; or the defense allows no round.
    """
    setting = make_setting(task, spec, clients, defense.local)
    placed = {number: _on(clients[number], device) for number in sorted(clients)}
    run = _Run(task, spec, defense, placed, _on(test, device), key, engine, setting, device)
    params = task.init(key.child("init"))
    state = defense.init(setting)
    training = Training(setting, params)
    schedule = _Schedule(spec)
    before: float | None = run.evaluate(params, 0, training)
    for number in range(spec.rounds):
        if defense.stops(state):
            break
        if number in keep.models:
            training.models[number] = params.clone()
        lr = schedule.lr(number, before)
        training.learning_rates.append(lr)
        params = run.round(
            params, state, number, lr, training, kept=number in keep.messages, measured=before is not None
        )
        due = (number + 1) % spec.evaluate_every == 0 or number + 1 == spec.rounds
        after = run.evaluate(params, number + 1, training) if due else None
        training.feedback.append(Feedback(number, before, after))
        state, before = defense.advance(state, training.feedback[-1]), after
    if not training.feedback:
        raise ValueError("the defense stops before the first round: nothing was trained")
    if before is None:
        run.evaluate(params, len(training.feedback), training)
    training.final = params
    return training


@dataclass
class _Schedule:
    """The learning rate by round."""

    spec: FederationSpec
    best: float = float("inf")
    stale: int = 0
    factor: float = 1.0

    def lr(self, number: int, loss: float | None) -> float:
        """Of round `number`; `loss` is the test loss before it, where it was evaluated."""
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
    """What does not change from round to round."""

    task: ModelTask
    spec: FederationSpec
    defense: Defense[Any, Any]
    clients: dict[int, Examples]
    test: Examples
    key: Key
    engine: Engine
    setting: Setting
    device: str

    def __post_init__(self) -> None:
        self.memories = {number: self.defense.remember(self.setting) for number in self.clients}

    def evaluate(self, params: Vector, number: int, training: Training) -> float:
        """Test loss before round `number`; the evaluation is added to the training."""
        accuracy, loss = evaluate(self.task, params.to(self.device), self.test)
        if not torch.isfinite(torch.tensor(loss)):
            raise ValueError(f"training diverged: the test loss before round {number} is {loss}")
        training.evaluations.append(Evaluation(number, accuracy, loss))
        return loss

    def round(
        self, params: Vector, state: Any, number: int, lr: float, training: Training, *, kept: bool, measured: bool
    ) -> Vector:
        """One round; the next parameters."""
        senders = self._participants(number)
        work = [Work(self.clients[k], client_key(self.key, number, k).child("train")) for k in senders]
        plan = make_plan(self.spec, lr, self.defense.local, self.defense.step_noise(self.setting))
        trained, batches = train_clients(self.task, params.to(self.device), work, plan, self.engine)
        updates = trained.cpu()
        here = Round(self.defense, self.setting, state, number)
        sent = here.exchange(
            [
                Client.of(Sender(k, len(self.clients[k].y)), update, self.memories[k], client_key(self.key, number, k))
                for k, update in zip(senders, updates, strict=True)
            ],
            self.key.child("round", number, "channel"),
        )
        self.memories.update(zip(senders, sent.memories, strict=True))
        mean = here.decode(sent, self.key.child("round", number, "server"))
        training.message_bytes.append(sum(map(len, sent.sent)) / len(senders))
        if measured:
            training.snr_db.append(self._snr_db(here, updates, sent))
        if kept:
            training.truth[number] = {k: _flatten(mine) for k, mine in zip(senders, batches, strict=True)}
            images, steps = [len(_flatten(mine)) for mine in batches], [len(mine) for mine in batches]
            who, keys = sent.links.senders, sent.links.keys
            if self.defense.superposes:
                training.messages[number] = (
                    Message(number, who[0], sent.received[0], keys[0], sum(images), max(steps), tuple(who[1:])),
                )
            else:
                training.messages[number] = tuple(
                    Message(number, *each) for each in zip(who, sent.received, keys, images, steps, strict=True)
                )
        return params - lr * mean if self.setting.sends == "gradient" else params + mean

    def _participants(self, number: int) -> list[int]:
        """Client numbers of this round, in increasing order."""
        numbers = list(self.clients)
        chosen = rng.subset(self.key.child("round", number, "participants"), len(numbers), self.setting.participants)
        return [numbers[i] for i in chosen]

    def _snr_db(self, here: Round, updates: Tensor, sent: Exchange) -> float | None:
        """Mean over messages of 10 log10(|u|^2 / |decoded - u|^2); None where decoding is exact or u is zero."""
        if self.defense.superposes:
            return None
        ratios = []
        for update, wire, link in zip(updates, sent.received, sent.links.each(), strict=True):
            decoded = here.estimate(wire, link.sender, link.shared)
            signal = float(update.double().square().sum())
            noise = float((decoded.double() - update.double()).square().sum())
            if signal > 0 and noise > 0:
                ratios.append(10 * float(torch.log10(torch.tensor(signal / noise, dtype=torch.float64))))
        return sum(ratios) / len(ratios) if ratios else None


def _on(data: Examples, device: str) -> Examples:
    """Examples on a device."""
    return Examples(data.x.to(device), data.y.to(device))


def _flatten(batches: Sequence[Indices]) -> Indices:
    """The distinct samples behind a message, in the order of their first use."""
    seen = dict.fromkeys(int(i) for batch in batches for i in batch)
    return torch.tensor(list(seen), dtype=torch.int64).numpy()


def evaluate(task: ModelTask, params: Vector, data: Examples, chunk: int = 1000) -> tuple[float | None, float]:
    """(accuracy, mean loss) over `data`; accuracy is None for a regression."""
    loss, correct = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(data.y), chunk):
            x, y = data.x[start : start + chunk], data.y[start : start + chunk]
            loss += float(task.losses(params, x, y).double().sum())
            if task.model.loss != "squared":
                correct += task.correct(params, x, y)
    accuracy = None if task.model.loss == "squared" else correct / len(data.y)
    return accuracy, loss / len(data.y)
