"""Builds what one adversary sees, and beside it the truth that only the scoring sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import FederationSpec, Target
from leakgauge.harness.core.contract import (
    Defense,
    Examples,
    Message,
    Observation,
    Sender,
    Sighting,
    Snapshot,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import View
from leakgauge.harness.federation.loop import Training, make_plan, replay_state
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.batch import Engine, Indices, LocalPlan, Work, train_clients
from leakgauge.harness.learn.tasks import ModelTask


class _Sent(NamedTuple):
    """The victims' messages by round, the truth behind each, and the training rows and clients that are theirs."""

    sightings: tuple[Sighting, ...]
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
        key: of the study's seed, without the training's part: what is drawn from it is the same for every defense.
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
    """What really was behind the messages, or who really took part. Only `harness.study.score` sees it.

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
            _looking(seen, _traffic(scene, target)),
            candidates=asked.candidates if "candidates" in sees else None,
            suspect=target.client,
            auxiliary=_auxiliary(scene, asked.test_rows) if "auxiliary" in sees else None,
            others=_others(scene, asked.rows, frozenset({target.client})) if "others" in sees else None,
        )
        return seen, Truth(is_member=asked.is_member, note=asked.note)
    look = _probes if target.kind == "probe" else _real_messages
    sent = look(scene, target)
    seen = dataclasses.replace(
        _looking(seen, sent.sightings),
        auxiliary=scene.test if "auxiliary" in sees else None,
        others=_others(scene, sent.rows, sent.senders) if "others" in sees else None,
        labels=tuple(victim.y.sort().values for victim in sent.victims) if "labels" in sees else None,
    )
    return seen, Truth(sent.victims)


def _looking(seen: Observation, sightings: Sequence[Sighting]) -> Observation:
    """With what its adversary sees of these rounds; unchanged where there is none."""
    if not sightings:
        return seen
    sees = seen.view.sees
    first, *later = (_through(sighting, sees) for sighting in sightings)
    return dataclasses.replace(
        seen,
        lr=first.lr,
        messages=first.messages if "messages" in sees else None,
        model=first.model if "models" in sees else None,
        later=tuple(later) if {"messages", "models"} <= sees else (),
    )


def _traffic(scene: Scene, target: Target) -> tuple[Sighting, ...]:
    """Everybody's messages in the rounds that are looked at."""
    training = scene.training
    return tuple(
        Sighting(training.messages.get(number, ()), _snapshot(scene, number), training.learning_rates[number])
        for number in target.looks_at
    )


def _through(sighting: Sighting, sees: frozenset[str]) -> Sighting:
    """A sighting as an adversary sees it who may lack the shared keys."""
    if "shared" in sees:
        return sighting
    return sighting._replace(messages=tuple(message._replace(shared=None) for message in sighting.messages))


def _snapshot(scene: Scene, number: int) -> Snapshot:
    """The model before round `number` and the defense's state then."""
    trained = len(scene.training.feedback)
    if number >= trained:
        raise ValueError(f"there is no round {number}: the training ended after {trained} rounds")
    if number not in scene.training.models:
        raise ValueError(f"the model of round {number} was not kept; kept: {sorted(scene.training.models)}")
    state = replay_state(scene.defense, scene.training.setting, scene.training.feedback[:number])
    return Snapshot(number, scene.training.models[number], state)


def _probes(scene: Scene, target: Target) -> _Sent:
    """Victims, each with `batch` images of its own, through the real encode path in every round that is looked at.

    The images are those of the federation's clients, chosen by the study's seed alone: the same for every defense.
    """
    used = np.sort(np.concatenate(list(scene.clients.values())))
    if target.images > len(used):
        raise ValueError(
            f"expected at most {len(used)} images, got {target.count} x {target.users} victims x {target.batch}"
        )
    rows = used[rng.permutation(scene.key.child("victims"), len(used))[: target.images]]
    together = target.users if scene.defense.superposes else 1
    if together > scene.training.setting.participants:
        raise ValueError(f"expected users <= {scene.training.setting.participants} participants, got {together}")
    probe = _Probe(scene, rows.reshape(-1, target.batch), together)
    sightings = tuple(probe.sighting(number) for number in target.looks_at)
    groups = rows.reshape(-1, together * target.batch)
    return _Sent(sightings, tuple(scene.rows(part) for part in groups), rows)


class _Probe:
    """Clients that send the same images in every round, and remember as clients do.

    rows: [clients, batch]; so many of them as `together` send at once where the channel superposes.
    """

    def __init__(self, scene: Scene, rows: Indices, together: int) -> None:
        self.scene, self.together = scene, together
        self.clients = [scene.rows(part) for part in rows]
        setting = scene.training.setting
        self.memories = [scene.defense.remember(setting) for _ in self.clients]

    def sighting(self, number: int) -> Sighting:
        """What arrives in one round."""
        scene = self.scene
        model, lr = _snapshot(scene, number), scene.training.learning_rates[number]
        plan = make_plan(scene.spec, lr, scene.defense.local, scene.defense.step_noise(scene.training.setting))
        if plan.gradient:
            plan = dataclasses.replace(plan, batch=0, poisson=False)
        keys = [scene.key.child("probe", number, client) for client in range(len(self.clients))]
        messages = []
        for first in range(0, len(keys), self.together):
            group = range(first, first + self.together)
            trained = [self._train(model, plan, client, keys[client]) for client in group]
            received = self._send(model, group, [update for update, _ in trained], keys)
            sender, *others = map(self._sender, group)
            images = self.together * len(self.clients[first].y)
            shared = keys[first].child("shared")
            messages.append(Message(number, sender, received, shared, images, trained[0][1], tuple(others)))
        return Sighting(tuple(messages), model, lr)

    def _train(self, model: Snapshot, plan: LocalPlan, client: int, key: Key) -> tuple[Tensor, int]:
        """One client's update, and how many steps it took."""
        scene = self.scene
        work = Work(self.clients[client], key.child("train"))
        trained = train_clients(scene.task, model.params, [work], plan, scene.engine)
        return trained.updates[0], len(trained.batches[0])

    def _sender(self, client: int) -> Sender:
        """A client as everybody knows it."""
        return Sender(client, len(self.clients[client].y))

    def _send(self, model: Snapshot, group: range, updates: Sequence[Tensor], keys: Sequence[Key]) -> bytes:
        """What arrives of a group's updates: one client's, or what the channel makes of several.

        Where the channel adds messages up, the others send an update of zero: an adversary who knows their data can
        take it away from the sum, but not the noise that they put in.
        """
        here = Round(self.scene.defense, self.scene.training.setting, model.state, model.round)
        clients = [
            Client.of(self._sender(client), update, self.memories[client], keys[client])
            for client, update in zip(group, updates, strict=True)
        ]
        key = keys[group[0]]
        beside = here.silent([client.sender for client in clients], key) if here.defense.superposes else []
        sent = here.exchange([*clients, *beside], key.child("channel"))
        self.memories[group.start : group.stop] = sent.memories[: len(group)]
        (received,) = sent.received
        return received


def _real_messages(scene: Scene, target: Target) -> _Sent:
    """The first `count` senders of the first real round, their messages in all rounds, and the samples behind them."""
    training, sightings = scene.training, []
    chosen: dict[int, Indices] = {}
    for number in target.looks_at:
        model = _snapshot(scene, number)
        if number not in training.messages or scene.defense.superposes:
            raise ValueError(f"no single client's message of round {number} reached the receiver, or it was not kept")
        if not chosen:
            found = training.messages[number][: target.count]
            chosen = {message.sender.number: training.truth[number][message.sender.number] for message in found}
        messages = tuple(message for message in training.messages[number] if message.sender.number in chosen)
        if len(messages) < target.count:
            raise ValueError(
                f"expected at most {len(messages)} messages in round {number}, got count={target.count}: so many of "
                "those clients took part"
            )
        truth = training.truth[number]
        if any(set(rows) != set(truth[client]) for client, rows in chosen.items()):
            raise ValueError("expected the same samples behind a client's messages of several rounds: needs batch = 0")
        sightings.append(Sighting(messages, model, training.learning_rates[number]))
    rows = [scene.clients[number][mine] for number, mine in chosen.items()]
    victims = tuple(scene.rows(part) for part in rows)
    return _Sent(tuple(sightings), victims, np.concatenate(rows), frozenset(chosen))


def _candidates(scene: Scene, target: Target) -> _Asked:
    """Whose membership is asked about.

    Non-members are training samples that no client holds, where there are enough; else test samples.
    """
    used = np.sort(np.concatenate(list(scene.clients.values())))
    idle = np.setdiff1d(np.arange(len(scene.train.y)), used)
    key = scene.key.child("candidates")
    inside, outside = target.count, target.outside or target.count
    if target.client is not None:
        if target.client not in scene.clients:
            raise ValueError(f"there is no client {target.client}: expected less than {len(scene.clients)}")
        used, key = np.sort(scene.clients[target.client]), key.child("client", target.client)
    if inside > len(used):
        raise ValueError(f"expected at most {len(used)} members, got count={inside}")
    rows = used[rng.subset(key.child("members"), len(used), inside)]
    taken, test_rows = scene.rows(rows), np.empty(0, np.int64)
    note = "non-members are training samples that no client holds"
    if len(idle) >= outside:
        others = scene.rows(idle[rng.subset(key.child("others"), len(idle), outside)])
    elif outside < len(scene.test.y):
        note = "non-members come from the test set: part of the difference may be between the two sets"
        test_rows = rng.subset(key.child("others"), len(scene.test.y), outside)
        others = Examples(scene.test.x[test_rows], scene.test.y[test_rows])
    else:
        raise ValueError(
            f"expected fewer than {len(scene.test.y)} non-members (no idle training samples, and the attacker's own "
            f"data come from the test set too), got {outside}"
        )
    order = torch.from_numpy(rng.permutation(key.child("order"), inside + outside))
    members = torch.arange(inside + outside) < inside
    x, y = torch.cat([taken.x, others.x])[order], torch.cat([taken.y, others.y])[order]
    return _Asked(Examples(x, y), members[order], rows, test_rows, note)


def _auxiliary(scene: Scene, taken: Indices) -> Examples:
    """Data of the same kind that belongs to no victim and no candidate: the test set without what was taken."""
    free = np.setdiff1d(np.arange(len(scene.test.y)), taken)
    return Examples(scene.test.x[free], scene.test.y[free])


def _others(scene: Scene, taken: Indices, senders: Collection[int | None]) -> dict[int, Examples]:
    """What the clients other than `senders` hold, without the rows that are the victims'."""
    return {
        number: scene.rows(np.setdiff1d(rows, taken)) for number, rows in scene.clients.items() if number not in senders
    }
