"""Builds what one adversary sees, and beside it the truth that only the scoring sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness import rng
from harness.batch import Engine, Indices, Work, train_clients
from harness.cell import FederationSpec, Target
from harness.contract import Defense, Examples, Message, Observation, Sender, Snapshot
from harness.loop import Training, make_plan, replay_state
from harness.rng import Key
from harness.tasks import ModelTask
from harness.threats import View


class _Sent(NamedTuple):
    """The victims' messages, the truth behind each, and the training rows and clients that are the victims'."""

    messages: tuple[Message, ...]
    victims: tuple[Examples, ...]
    rows: Indices
    senders: frozenset[int] = frozenset()


class _Asked(NamedTuple):
    """Candidates in random order, who is a member, the training and test rows among them, and a note."""

    candidates: Examples
    is_member: Tensor
    rows: Indices
    test_rows: Indices
    note: str


@dataclass(frozen=True)
class Scene:
    """A finished training with its data: everything, before anybody's view of it is cut out.

    Attributes:
        clients: indices into `train` by client number.
        key: of the study's seed, without the training's part: what is drawn from it is the same for every defence.
    """

    task: ModelTask
    spec: FederationSpec
    defense: Defense[Any, Any]
    training: Training
    train: Examples
    test: Examples
    clients: Mapping[int, Indices]
    engine: Engine
    key: Key

    def rows(self, index: Any) -> Examples:
        """Training samples by index."""
        chosen = torch.as_tensor(index)
        return Examples(self.train.x[chosen], self.train.y[chosen])


@dataclass(frozen=True)
class Truth:
    """What really was behind the messages, or who really took part. Only `harness.score` sees it.

    Attributes:
        victims: each victim's images and labels; empty for membership.
        is_member: [n] bool, one a candidate; None for reconstruction.
        note: what a reader must know about how it was chosen.
    """

    victims: tuple[Examples, ...] = ()
    is_member: Tensor | None = None
    note: str = ""


def observe(scene: Scene, view: View, target: Target) -> tuple[Observation, Truth]:
    """What the adversary `view` sees of the scene at `target`, and the truth.

    The one place where an observation is built: a field that `view.sees` does not name stays None.

    Raises:
        ValueError: the scene does not hold what the target asks for; the message says what.
    """
    sees = view.sees
    training = scene.training
    seen = Observation(
        view=view,
        setting=training.setting,
        task=scene.task,
        defense=scene.defense,
        lr=scene.spec.lr,
        models=tuple(_snapshot(scene, t) for t in sorted(training.models)) if "models" in sees else None,
        final=training.final if "final" in sees else None,
    )
    if target.kind == "members":
        asked = _candidates(scene, target)
        seen = dataclasses.replace(
            seen,
            candidates=asked.candidates if "candidates" in sees else None,
            auxiliary=_auxiliary(scene, asked.test_rows) if "auxiliary" in sees else None,
            others=_others(scene, asked.rows, frozenset()) if "others" in sees else None,
        )
        return seen, Truth(is_member=asked.is_member, note=asked.note)
    assert target.round is not None  # Target's own check
    model = _snapshot(scene, target.round)
    lr = training.learning_rates[target.round]
    sent = (_probe if target.kind == "probe" else _real_messages)(scene, target, model, lr)
    messages = sent.messages
    if "shared" not in sees:
        messages = tuple(message._replace(shared=None) for message in messages)
    seen = dataclasses.replace(
        seen,
        lr=lr,
        messages=messages if "messages" in sees else None,
        model=model if "models" in sees else None,
        auxiliary=scene.test if "auxiliary" in sees else None,
        others=_others(scene, sent.rows, sent.senders) if "others" in sees else None,
        labels=tuple(victim.y.sort().values for victim in sent.victims) if "labels" in sees else None,
    )
    return seen, Truth(sent.victims)


def _snapshot(scene: Scene, number: int) -> Snapshot:
    """The model before round `number` and the defence's state then."""
    if number not in scene.training.models:
        raise ValueError(f"the model of round {number} was not kept; kept: {sorted(scene.training.models)}")
    state = replay_state(scene.defense, scene.training.setting, scene.training.feedback[:number])
    return Snapshot(number, scene.training.models[number], state)


def _probe(scene: Scene, target: Target, model: Snapshot, lr: float) -> _Sent:
    """`count` victims, each with `batch` images of its own and a fresh memory, through the real encode path.

    The images are those of the federation's clients, chosen by the study's seed alone: the same for every defence.
    """
    used = np.sort(np.concatenate(list(scene.clients.values())))
    needed = target.count * target.batch
    if needed > len(used):
        raise ValueError(f"expected at most {len(used)} images, got {target.count} victims x {target.batch}")
    rows = used[rng.permutation(scene.key.child("victims"), len(used))[:needed]]
    victims = tuple(scene.rows(part) for part in rows.reshape(target.count, target.batch))
    plan = make_plan(scene.spec, lr, scene.defense.local, scene.defense.step_noise(scene.training.setting))
    if plan.gradient:
        plan = dataclasses.replace(plan, batch=0, poisson=False)
    messages = []
    for number, victim in enumerate(victims):
        key = scene.key.child("probe", model.round, number)
        trained = train_clients(scene.task, model.params, [Work(victim, key.child("train"))], plan, scene.engine)
        sender = Sender(number, target.batch)
        received = _send(scene, model, sender, trained.updates[0], key)
        steps = len(trained.batches[0])
        messages.append(Message(model.round, sender, received, key.child("shared"), target.batch, steps))
    return _Sent(tuple(messages), victims, rows)


def _send(scene: Scene, model: Snapshot, sender: Sender, update: Tensor, key: Key) -> bytes:
    """What arrives of one victim's update.

    Where the channel adds messages up, the others send an update of zero: an adversary who knows their data can take it
    away from the sum, but not the noise that they put in.
    """
    defense, setting, state = scene.defense, scene.training.setting, model.state
    senders = [sender]
    if defense.superposes:
        senders += [Sender(k, setting.samples) for k in range(setting.clients) if k != sender.number % setting.clients]
    senders = senders[: setting.participants]
    wires = []
    for who in senders:
        mine = key if who == sender else key.child("other", who.number)
        wire, _ = defense.encode(
            state,
            defense.remember(setting),
            update if who == sender else torch.zeros_like(update),
            sender=who,
            private=mine.child("private"),
            shared=mine.child("shared"),
            setting=setting,
        )
        wires.append(wire)
    (received,) = defense.transmit(state, wires, senders=senders, channel=key.child("channel"), setting=setting)
    return received


def _real_messages(scene: Scene, target: Target, model: Snapshot, lr: float) -> _Sent:
    """The first `count` messages of the real round, with the samples behind each."""
    if model.round not in scene.training.messages:
        raise ValueError(f"no single client's message of round {model.round} reached the receiver, or it was not kept")
    messages = scene.training.messages[model.round][: target.count]
    if len(messages) < target.count:
        raise ValueError(f"expected at most {len(messages)} messages in round {model.round}, got count={target.count}")
    truth = scene.training.truth[model.round]
    numbers = [message.sender.number for message in messages]
    rows = [scene.clients[number][truth[number]] for number in numbers]
    return _Sent(messages, tuple(scene.rows(part) for part in rows), np.concatenate(rows), frozenset(numbers))


def _candidates(scene: Scene, target: Target) -> _Asked:
    """Whose membership is asked about.

    Non-members are training samples that no client holds, where there are enough; else test samples.
    """
    used = np.sort(np.concatenate(list(scene.clients.values())))
    idle = np.setdiff1d(np.arange(len(scene.train.y)), used)
    key = scene.key.child("candidates")
    if target.count > len(used):
        raise ValueError(f"expected at most {len(used)} members, got count={target.count}")
    rows = used[rng.subset(key.child("members"), len(used), target.count)]
    inside, test_rows = scene.rows(rows), np.empty(0, np.int64)
    note = "non-members are training samples that no client holds"
    if len(idle) >= target.count:
        outside = scene.rows(idle[rng.subset(key.child("others"), len(idle), target.count)])
    elif target.count < len(scene.test.y):
        note = "non-members come from the test set: part of the difference may be between the two sets"
        test_rows = rng.subset(key.child("others"), len(scene.test.y), target.count)
        outside = Examples(scene.test.x[test_rows], scene.test.y[test_rows])
    else:
        raise ValueError(
            f"expected count below {len(scene.test.y)} (no idle training samples, and the attacker's own data come "
            f"from the test set too), got count={target.count}"
        )
    order = torch.from_numpy(rng.permutation(key.child("order"), 2 * target.count))
    members = torch.arange(2 * target.count) < target.count
    x, y = torch.cat([inside.x, outside.x])[order], torch.cat([inside.y, outside.y])[order]
    return _Asked(Examples(x, y), members[order], rows, test_rows, note)


def _auxiliary(scene: Scene, taken: Indices) -> Examples:
    """Data of the same kind that belongs to no victim and no candidate: the test set without what was taken."""
    free = np.setdiff1d(np.arange(len(scene.test.y)), taken)
    return Examples(scene.test.x[free], scene.test.y[free])


def _others(scene: Scene, taken: Indices, senders: frozenset[int]) -> dict[int, Examples]:
    """What the clients other than `senders` hold, without the rows that are the victims'."""
    return {
        number: scene.rows(np.setdiff1d(rows, taken)) for number, rows in scene.clients.items() if number not in senders
    }
