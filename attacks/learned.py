"""A small network, trained on auxiliary data through the defense itself, tells the image from the message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.failure import failed, unusable
from leakgauge.attacks._engine.inverter import Inverter, Pairs, Plan, fit
from leakgauge.attacks._engine.objective import received_gradients, update_per_gradient
from leakgauge.attacks._engine.simulate import Local, client_updates
from leakgauge.attacks._labels.infer import LabelSource, check_source, labels_of, needs, restore
from leakgauge.attacks._labels.last_layer import last_layer, rows_of
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import (
    Attack,
    Examples,
    Guess,
    Message,
    Observation,
    Reconstruction,
    Sender,
    Sighting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation.round import Client, Round

_CHUNK = 32
"""Images whose gradients are computed at once."""

_HELD = 8
"""One of so many auxiliary inputs of each label is held out."""

_ASKED = 1024
"""Auxiliary inputs that show what the model usually says of each label."""


@dataclass(frozen=True)
class Learned(Attack):
    """A network from message to image, trained on auxiliary data: the attacker with data instead of a search.

    Auxiliary images are sent as clients would send them, through the defense's own code with the attacker's own keys,
    and the network learns to tell them from what arrives. One network serves all victims whose messages hold equally
    many images, users and steps. It reads the last layer alone: from the restored labels follows which rows belong to
    which image, and these give the layer's input. Of held-out photographs behind the LeNet of DLG, without noise, a
    network without the linear part told SSIM 0.59 from that and 0.39 from 2000 random projections of the whole gradient
    after three epochs each; a linear map of the last layer's input told 0.72. Random projections beside it changed
    nothing there, lost 0.03 to 0.09 against normal noise, and won 0.04 behind a clamp of single coordinates, which cuts
    the last layer's rows off.

    Must know: one message of each victim, the model it trained from, the defense with its parameters, how clients
    train, and data of the same kind as the victims'. So for a server or an eavesdropper; without the shared key, it
    trains on an outsider's estimates. How alike the data are decides much: of `photos` the auxiliary crops share no
    pixel with the victims', but they are of the same eight photographs.

    Cannot: tell images of one label in a batch apart, for which it tells their mean; use layers before the last, later
    rounds, what a client remembers of rounds before, or a victim's shared key beyond the estimate. Which records a
    Poisson sample left out is not imitated. A label that is restored wrongly misleads it.

    Args:
        samples: auxiliary images sent through the defense, in passes over the data. After the first pass they are
            mirrored and faded at random, where they are images; the defense's noise is always drawn anew.
        components: principal components by which an image is told, at most.
        hidden: units of the hidden layer; 0: the network is linear.
        epochs: of the hidden layer's training, at most; it ends early by the error on held-out auxiliary data.
        lr: of Adam's first steps, falling to zero.
        labels: `inferred`, or `given`: the true ones, which a study must grant.

    Guarantees:
        Objective: the mean squared error an entry on held-out auxiliary data, the same for all victims of a network,
        and a little too low, as penalties and epoch were chosen by it. Evaluations: auxiliary messages made.
        No key of a victim is used but to read its message.

    Raises:
        ValueError: a parameter out of range; in `run`, fewer than two auxiliary inputs, a loss that is not softmax
            cross-entropy, or a last layer that is not dense with one row a class.

    Source: Wu, Chen, Guo, Weinberger 2023, "Learning to invert: simple adaptive attacks for gradient inversion in
        federated learning" (UAI). Differs: the last layer's rows by label instead of hashed gradients, which also spare
        the loss over permutations of a batch; principal components instead of pixels; a linear part in closed form
        beside one hidden layer instead of three of 3000 units: a few hundred images instead of 50,000.
    """

    kind: ClassVar[str] = "reconstruction"

    samples: int = 6000
    components: int = 512
    hidden: int = 500
    epochs: int = 10
    lr: float = 3e-4
    labels: LabelSource = "inferred"

    def __post_init__(self) -> None:
        for name, value, least in (
            ("samples", self.samples, 1),
            ("components", self.components, 1),
            ("hidden", self.hidden, 0),
            ("epochs", self.epochs, 1),
        ):
            if value < least:
                raise ValueError(f"expected {name} >= {least}, got {name}={value}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"expected lr > 0, got lr={self.lr}")
        check_source(self.labels)

    @property
    def aware(self) -> bool:
        """It learns from messages that the defense made."""
        return True

    @property
    def needs(self) -> frozenset[str]:
        """Messages, the round's model and auxiliary data; the labels where they are given."""
        return needs(self.labels) | {"auxiliary"}

    def run(self, seen: Observation, key: Key) -> Reconstruction:
        """Images in [0, 1], other inputs as they are, and the labels."""
        assert seen.auxiliary is not None
        if len(seen.auxiliary.x) < 2:
            raise ValueError(f"expected at least 2 auxiliary inputs, got {len(seen.auxiliary.x)}")
        targets = received_gradients(seen)
        labels = labels_of(seen, targets, self.labels, key.child("dummies"))
        messages = seen.sightings[0].messages
        guesses = [failed(seen.task, *pair) for pair in zip(messages, map(unusable, targets), strict=True)]
        alike: dict[tuple[int, ...], list[int]] = {}
        for i, (message, guess) in enumerate(zip(messages, guesses, strict=True)):
            if guess.failure == "":
                alike.setdefault((message.images, message.users, message.steps), []).append(i)
        for kind, victims in sorted(alike.items()):
            told = torch.stack([labels[i] for i in victims])
            found = self._invert(seen, victims, targets[victims], told, key.child("network", *kind))
            for i, guess in zip(victims, found, strict=True):
                guesses[i] = guess
        return Reconstruction(tuple(guesses))

    def _invert(
        self, seen: Observation, victims: Sequence[int], targets: Tensor, labels: Tensor, key: Key
    ) -> list[Guess]:
        """Victims with equally many images, told by one network; targets [n, d], labels [n, b]."""
        sighting = seen.sightings[0]
        sighting = sighting._replace(messages=tuple(sighting.messages[i] for i in victims))
        assert seen.auxiliary is not None
        train, held = _apart(seen.auxiliary)
        usual = _usual(seen, sighting, train)
        if not bool(usual.isfinite().all()):
            return [failed(seen.task, message, "the model is not finite") for message in sighting.messages]
        imitation = _Imitation(seen, sighting, usual, self.labels, key)
        many = imitation.pairs(train, self.samples, "train")
        few = imitation.pairs(held, min(len(held.x), max(1, self.samples // _HELD)), "held")
        made = (len(many.images) + len(few.images)) // labels.shape[1]
        network = self._network(many, few, len(seen.task.input_shape) == 3, key.child("fit"))
        features = imitation.features(targets, labels)
        images = network(features.flatten(0, 1)).view(*labels.shape, *seen.task.input_shape)
        why = "" if math.isfinite(network.error) else "the network's training is not finite"
        return [
            failed(seen.task, message, why, made) if why else Guess(x, y, network.error, made)
            for message, x, y in zip(sighting.messages, images, labels, strict=True)
        ]

    def _network(self, train: Pairs, held: Pairs, pixels: bool, key: Key) -> Inverter:
        """Trained by these parameters."""
        plan = Plan(self.components, self.hidden, self.epochs, self.lr)
        return fit(train, held, plan, pixels=pixels, key=key)


class _Batches(NamedTuple):
    """x: [m, b, *input_shape]; y: [m, b] int64, each row sorted."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class _Imitation:
    """Makes messages as the victims do, of data that the attacker has; every victim is imitated in turn.

    usual: [classes, classes] what the model usually says of an input of each label.
    """

    seen: Observation
    sighting: Sighting
    usual: Tensor
    labels: LabelSource
    key: Key

    def pairs(self, data: Examples, count: int, name: str) -> Pairs:
        """About `count` images of `data`, in whole messages; after the first pass over the data they are altered."""
        images, key = self.sighting.messages[0].images, self.key.child(name)
        messages = max(1, count // images)
        passes = -(-messages * images // len(data.x))
        order = torch.from_numpy(rng.permutations(key.child("order"), passes, len(data.x))).flatten()
        order = order[: messages * images].view(messages, images)
        parts = []
        for start in range(0, messages, max(1, _CHUNK // images)):
            rows = order[start : start + max(1, _CHUNK // images)]
            first_pass = (start + len(rows)) * images <= len(data.x)
            x = data.x[rows]
            if not first_pass:
                x = _altered(x, key.child("alter", start))
            y, by_label = data.y[rows].sort(dim=1, stable=True)
            batches = _Batches(torch.stack([one[i] for one, i in zip(x, by_label, strict=True)]), y)
            parts.append(self._pairs(batches, start, key))
        return Pairs(*(torch.cat(columns).flatten(0, 1) for columns in zip(*parts, strict=True)))

    def _pairs(self, batches: _Batches, start: int, key: Key) -> tuple[Tensor, Tensor]:
        """Features [m, b, f] and images [m, b, ...] of the messages from number `start` on."""
        updates = self._updates(batches)
        broken = ~updates.isfinite().flatten(1).all(dim=1)
        # no defense carries such an update; the fit is told by its features
        updates[broken] = 0.0
        gradients = torch.stack(
            [self._told(update, start + i, key.child("message", start + i)) for i, update in enumerate(updates)]
        )
        labels = batches.y
        if self.labels == "inferred":
            params, many = self.sighting.model.params, [labels.shape[1]] * len(labels)
            labels = torch.stack(restore(self.seen.task, params, gradients, many, key.child("dummies", start)))
        features = self.features(gradients, labels)
        features[broken] = torch.nan
        return features, batches.x

    def _updates(self, batches: _Batches) -> Tensor:
        """[m, users, d]: what the clients hand to the defense, but for the noise of their steps."""
        seen, sighting = self.seen, self.sighting
        message, m = sighting.messages[0], len(batches.x)
        noisy = seen.defense.step_noise(seen.setting) > 0
        local = Local.of(
            seen.setting,
            sighting.lr,
            message.steps,
            seen.defense.local.clip,
            nominal=seen.defense.local.poisson or noisy,
        )
        # dealt in turn, so that a user's images are not all of one label
        each = message.images // message.users
        x = batches.x.reshape(m, each, message.users, *batches.x.shape[2:]).transpose(1, 2).flatten(0, 1)
        y = batches.y.reshape(m, each, message.users).transpose(1, 2).flatten(0, 1)
        soft = one_hot(y, seen.task.classes).to(x.dtype)
        return client_updates(seen.task, sighting.model.params, x, soft, local).view(m, message.users, -1)

    def _told(self, updates: Tensor, number: int, key: Key) -> Tensor:
        """[d]: the gradient that one message tells of, after its users' updates [users, d] went through the defense."""
        seen, model = self.seen, self.sighting.model
        here = Round(seen.defense, seen.setting, model.state, model.round)
        turn = number % len(self.sighting.messages)
        message = self.sighting.messages[turn]
        clients = []
        for i, (who, update) in enumerate(zip([message.sender, *message.others], updates, strict=True)):
            mine = key.child("user", i)
            noise = self._step_noise(message, who)
            if noise > 0:
                update = update + noise * rng.normal(mine.child("steps"), (seen.setting.dim,))
            clients.append(Client.of(who, update, seen.defense.remember(seen.setting), mine))
        beside = here.silent([client.sender for client in clients], key) if seen.defense.superposes else []
        (received,) = here.exchange([*clients, *beside], key.child("channel")).received
        told = here.estimate(received, message.sender, None if message.shared is None else clients[0].shared)
        return told / update_per_gradient(seen.setting, self.sighting)[turn]

    def _step_noise(self, message: Message, who: Sender) -> float:
        """Standard deviation of the noise in a client's update that comes from its steps."""
        defense, setting = self.seen.defense, self.seen.setting
        multiplier = defense.step_noise(setting)
        if not multiplier:
            return 0.0
        assert defense.local.clip is not None  # noise is in units of the clip
        gradient = setting.sends == "gradient"
        size = message.images // message.users if gradient else min(setting.batch or who.samples, who.samples)
        length = 1.0 if gradient else self.sighting.lr * math.sqrt(message.steps)
        return length * multiplier * defense.local.clip / size

    def features(self, gradients: Tensor, labels: Tensor) -> Tensor:
        """[m, b, f] of gradients [m, d] and labels [m, b]: for each image the last layer's input, its size, its label.

        The layer's gradient is the mean over the images of (p - e) h: with the p that is usual for its label, the
        inputs h follow by least squares. Their length goes apart, as a clip changes it.
        """
        task = self.seen.task
        rows = rows_of(task, last_layer(task), gradients)
        errors = self.usual[labels] - one_hot(labels, task.classes)
        inputs = labels.shape[1] * torch.linalg.pinv(errors.transpose(1, 2)) @ rows
        length = torch.linalg.vector_norm(inputs, dim=2, keepdim=True).clamp(min=torch.finfo(inputs.dtype).tiny)
        return torch.cat([inputs / length, length.log(), one_hot(labels, task.classes)], dim=2)


def _apart(data: Examples) -> tuple[Examples, Examples]:
    """What is trained on, and what is held out: of each label the last ones, as neighbors may be alike."""
    held = torch.zeros(len(data.y), dtype=torch.bool)
    for label in torch.unique(data.y):
        rows = (data.y == label).nonzero()[:, 0]
        held[rows[len(rows) - len(rows) // _HELD :]] = True
    if not bool(held.any()):
        held[-1] = True
    return Examples(data.x[~held], data.y[~held]), Examples(data.x[held], data.y[held])


def _usual(seen: Observation, sighting: Sighting, data: Examples) -> Tensor:
    """[classes, classes]: the mean softmax of inputs of each label; of a label without any, that of all."""
    spread = torch.linspace(0, len(data.x) - 1, min(len(data.x), _ASKED)).long()
    with torch.no_grad():
        said = seen.task.outputs(sighting.model.params, data.x[spread]).softmax(dim=1)
    members = one_hot(data.y[spread], seen.task.classes).to(said.dtype)
    count = members.sum(dim=0)[:, None]
    return torch.where(count > 0, members.T @ said / count.clamp(min=1), said.mean(dim=0))


def _altered(x: Tensor, key: Key) -> Tensor:
    """Images [m, b, c, h, w] mirrored at random, and faded by up to half towards a random gray; others as they are."""
    if x.ndim != 5:
        return x
    lead = x.shape[:2]
    for axis in (3, 4):
        mirrored = rng.uniform(key.child("mirror", axis), (*lead, 1, 1, 1)) < 0.5
        x = torch.where(mirrored, x.flip(axis), x)
    keeps = rng.uniform(key.child("fade"), (*lead, 1, 1, 1), 0.5, 1.0)
    return keeps * x + (1 - keeps) * rng.uniform(key.child("grey"), (*lead, 1, 1, 1))
