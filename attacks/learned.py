"""Learned inversion: a small network, trained on defended auxiliary data, maps messages to images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.imitation import CHUNK, imitated_gradients
from leakgauge.attacks._engine.labels import ByLabels, LabelSource, check_source, labels_of, restore
from leakgauge.attacks._engine.last_layer import last_layer
from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._engine.reconstruct import alike, failed, in_order, kinds_of, only
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.contract import Examples, Guess, Observation, ObservedRound, Reconstruction
from leakgauge.harness.core.rng import Key

_HELD = 8  # one in eight auxiliary inputs of each label is held out
_USUAL = 1024  # number of auxiliary inputs behind the model's mean output for each label

_RIDGES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, torch.inf)
"""Candidate penalties, for features of variance 1; with the last penalty, a component stays at its mean."""

_ATLAS = 1024  # maximum number of images that define the principal components
_BATCH = 128
_PATIENCE = 3  # epochs without a lower held-out error before the training of the hidden layer ends at its best epoch
_CONSTANT = 1e-6  # spread below which a feature counts as constant and is ignored, even if a victim's value differs


@dataclass(frozen=True)
class Learned(ByLabels):
    """Maps messages to images with a network trained on auxiliary data that passes through the defense.

    The attacker sends auxiliary images as clients send theirs, through the defense's own code with its own keys. The
    network learns to recover the images from the received messages. One network serves all victims with equal numbers
    of images, users and steps. It reads only the last layer: the restored labels determine which rows belong to which
    image, and the rows give the layer's input; random projections of the whole gradient do worse (`docs/attacks.md`).

    Must know: one message of each victim, the model of its round, the defense with its parameters, how clients train,
    and data of the same kind; a server or an eavesdropper does. Without the shared key, it trains on an outsider's
    estimates. The similarity of the data matters: for `photos`, the auxiliary crops share no pixel with the victims'
    crops but come from the same eight photographs.

    Cannot: separate images of one label in a batch (it returns their mean), or use layers before the last, later
    rounds, a client's memory of earlier rounds, or a victim's shared key beyond the estimate. It does not imitate which
    records a Poisson sample leaves out. A wrongly restored label misleads it.

    Args:
        samples: number of auxiliary images sent through the defense, in passes over the data. After the first pass,
            images are mirrored and faded at random; other inputs are not. Each message draws new noise of the defense.
        components: maximum number of principal components of an image.
        hidden: number of units of the hidden layer; 0: the network is linear.
        epochs: maximum number of epochs of the hidden layer's training, which stops early by the error on held-out
            auxiliary data.
        lr: first step size of Adam, decaying to zero.
        labels: `inferred`, or `given`: the true labels, which a study must grant.

    Guarantees:
        The objective is the mean squared error per entry on held-out auxiliary data, equal for all victims of a
        network. It is slightly too low, because it also selects penalties and epoch. Evaluations count the auxiliary
        messages made.
        A victim's key is used only to read its message.

    Raises:
        ValueError: a parameter is out of range; in `run`: fewer than two auxiliary inputs, a loss that is not softmax
            cross-entropy, or a last layer that is not dense with one row per class.

    Source: Wu, Chen, Guo, Weinberger 2023, "Learning to invert: simple adaptive attacks for gradient inversion in
        federated learning" (UAI). Differs: uses the last layer's rows by label instead of hashed gradients, which also
        avoids the loss over permutations of a batch; principal components instead of pixels; a closed-form linear part
        plus one hidden layer instead of three layers of 3000 units, so a few hundred images suffice instead of 50,000.
    """

    imitates: ClassVar[bool] = True
    samples: int = 6000
    components: int = 512
    hidden: int = 500
    epochs: int = 10
    lr: float = 3e-4
    labels: LabelSource = "inferred"

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("components", 1), ("hidden", 0), ("epochs", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"expected {name} >= {least}, got {name}={getattr(self, name)}")
        positive(lr=self.lr)
        check_source(self.labels)

    def run(self, observation: Observation, key: Key) -> Reconstruction:
        """Inputs and labels; only images are clamped to [0, 1]."""
        assert observation.auxiliary is not None
        if len(observation.auxiliary.x) < 2:
            raise ValueError(f"expected at least 2 auxiliary inputs, got {len(observation.auxiliary.x)}")
        gradients = received_gradients(observation, softmax=True)
        labels = labels_of(observation, gradients, self.labels, key.child("dummies"))
        messages = observation.observed_rounds[0].messages
        guesses = dict[int, Guess]()
        for kind, victims in alike(gradients, kinds_of(observation.observed_rounds[:1])):
            known = torch.stack([labels[i] for i in victims])
            network = self._invert(observation, victims, gradients[victims], known, key.child("network", *kind))
            guesses |= zip(victims, network, strict=True)
        return Reconstruction(in_order(observation.task, messages, gradients, guesses))

    def _invert(
        self, observation: Observation, victims: Sequence[int], targets: Tensor, labels: Tensor, key: Key
    ) -> list[Guess]:
        """Guesses of one network for victims with equal numbers of images; targets [n, d], labels [n, b]."""
        observed = only(observation.observed_rounds[0], victims)
        assert observation.auxiliary is not None
        train, held = _apart(observation.auxiliary)
        usual = _usual(observation, observed, train)
        if not bool(usual.isfinite().all()):
            return [failed(observation.task, message, "the model is not finite") for message in observed.messages]
        imitation = _Imitated(observation, observed, usual, self.labels, key)
        many = imitation.pairs(train, self.samples, "train")
        few = imitation.pairs(held, min(len(held.x), max(1, self.samples // _HELD)), "held")
        made = (len(many.images) + len(few.images)) // labels.shape[1]
        network = _fit(many, few, self, pixels=len(observation.task.input_shape) == 3, key=key.child("fit"))
        features = imitation.features(targets, labels)
        images = network(features.flatten(0, 1)).view(*labels.shape, *observation.task.input_shape)
        if not math.isfinite(network.error):
            why = "the training of the attack's network diverged"
            return [failed(observation.task, message, why, made) for message in observed.messages]
        return [
            Guess(x, y, network.error, made)
            if bool(x.isfinite().all())
            else failed(observation.task, message, "the gradient is too large for the attack's network", made)
            for message, x, y in zip(observed.messages, images, labels, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class _Imitated:
    """Pairs of features and images from imitated messages; usual: [classes, classes], mean softmax for each label."""

    observation: Observation
    observed: ObservedRound
    usual: Tensor
    labels: LabelSource
    key: Key

    def pairs(self, data: Examples, count: int, name: str) -> _Pairs:
        """Pairs from about `count` images of `data`, in whole messages; later passes over the data alter the images."""
        images, key = self.observed.messages[0].images, self.key.child(name)
        messages, at_once = max(1, count // images), max(1, CHUNK // images)
        passes = -(-messages * images // len(data.x))
        order = torch.from_numpy(rng.permutations(key.child("order"), passes, len(data.x))).flatten()
        chunks = []
        for number, rows in enumerate(torch.split(order[: messages * images].view(messages, images), at_once)):
            start, x = number * at_once, data.x[rows]
            if (start + len(rows)) * images > len(data.x):
                x = _altered(x, key.child("alter", start))
            y, by_label = data.y[rows].sort(dim=1, stable=True)
            batches = Examples(torch.stack([batch[i] for batch, i in zip(x, by_label, strict=True)]), y)
            chunks.append(self._pairs(batches, start, key))
        return _Pairs(*(torch.cat(columns).flatten(0, 1) for columns in zip(*chunks, strict=True)))

    def _pairs(self, batches: Examples, start: int, key: Key) -> tuple[Tensor, Tensor]:
        """Features [m, b, f] and images [m, b, ...] for batches x [m, b, ...], y [m, b], numbered from `start`."""
        gradients, labels = imitated_gradients(self.observation, self.observed, batches, start, key), batches.y
        if self.labels == "inferred":
            params, many = self.observed.model.params, [labels.shape[1]] * len(labels)
            labels = torch.stack(restore(self.observation.task, params, gradients, many, key.child("dummies", start)))
        return self.features(gradients, labels), batches.x  # features that are not finite are for `_fit`

    def features(self, gradients: Tensor, labels: Tensor) -> Tensor:
        """[m, b, f] from gradients [m, d] and labels [m, b]: each image's label, and direction and log length of its h.

        h is the last layer's input. The layer's gradient is the mean over the images of (p - e) h; with the mean p of
        each label, least squares gives h. The length of h is a separate feature, because a clip changes it.
        """
        task = self.observation.task
        rows = last_layer(task).rows(gradients)
        errors = self.usual[labels] - one_hot(labels, task.classes)
        inputs = labels.shape[1] * torch.linalg.pinv(errors.transpose(1, 2)) @ rows
        length = torch.linalg.vector_norm(inputs, dim=2, keepdim=True).clamp(min=torch.finfo(inputs.dtype).tiny)
        return torch.cat([inputs / length, length.log(), one_hot(labels, task.classes)], dim=2)


def _apart(data: Examples) -> tuple[Examples, Examples]:
    """Training and held-out data; the last inputs of each label are held out, since neighboring ones may be similar."""
    held = torch.zeros(len(data.y), dtype=torch.bool)
    for label in torch.unique(data.y):
        rows = (data.y == label).nonzero()[:, 0]
        held[rows[len(rows) - len(rows) // _HELD :]] = True
    if not bool(held.any()):
        held[-1] = True
    return Examples(data.x[~held], data.y[~held]), Examples(data.x[held], data.y[held])


def _usual(observation: Observation, observed: ObservedRound, data: Examples) -> Tensor:
    """[classes, classes]: the mean softmax for inputs of each label; a label without inputs gets the mean of all."""
    spread = torch.linspace(0, len(data.x) - 1, min(len(data.x), _USUAL)).long()
    with torch.no_grad():
        p = observation.task.outputs(observed.model.params, data.x[spread]).softmax(dim=1)
    members = one_hot(data.y[spread], observation.task.classes).to(p.dtype)
    count = members.sum(dim=0)[:, None]
    return torch.where(count > 0, members.T @ p / count.clamp(min=1), p.mean(dim=0))


def _altered(x: Tensor, key: Key) -> Tensor:
    """Images [m, b, c, h, w] mirrored at random and faded by up to half towards a random gray; others unchanged."""
    if x.ndim != 5:
        return x
    lead = x.shape[:2]
    for axis in (3, 4):
        mirrored = rng.uniform(key.child("mirror", axis), (*lead, 1, 1, 1)) < 0.5
        x = torch.where(mirrored, x.flip(axis), x)
    keeps = rng.uniform(key.child("fade"), (*lead, 1, 1, 1), 0.5, 1.0)
    return keeps * x + (1 - keeps) * rng.uniform(key.child("grey"), (*lead, 1, 1, 1))


class _Pairs(NamedTuple):
    """features [n, f] and the inputs [n, *input_shape] behind them."""

    features: Tensor
    images: Tensor


class _Inverter(NamedTuple):
    """The fitted network, for features x [f] that it scales to mean 0 and variance 1.

    An image is the mean [D] plus components along directions [D, k], where
    components = offset [k] + x @ linear [f, k] + relu(x @ first [f, h] + bias [h]) @ second [h, k].

    Attributes:
        center, spread: [f], of the features; a constant feature has an infinite spread.
        pixels: whether to clamp images to [0, 1].
        error: held-out mean squared error per entry.
    """

    center: Tensor
    spread: Tensor
    mean: Tensor
    directions: Tensor
    offset: Tensor
    linear: Tensor
    first: Tensor
    bias: Tensor
    second: Tensor
    pixels: bool
    error: float = math.nan

    def components(self, x: Tensor) -> Tensor:
        """[n, k]: the components for normalized features [n, f]."""
        straight = torch.addmm(self.offset, x, self.linear)
        return straight + torch.addmm(self.bias, x, self.first).relu() @ self.second

    def __call__(self, features: Tensor) -> Tensor:
        """[n, D]: the images for features [n, f]."""
        components = self.components((features - self.center) / self.spread)
        flat = torch.addmm(self.mean, components, self.directions.T)
        return flat.clamp(0.0, 1.0) if self.pixels else flat


def _fit(train: _Pairs, held: _Pairs, plan: Learned, *, pixels: bool, key: Key) -> _Inverter:
    """The network with the least squared error on `train`, regularized by the error on `held`.

    Images are represented by their principal components. The linear part is a ridge regression with one penalty per
    component: noise hides fine detail long before it hides color. Then the hidden layer, whose output starts at zero,
    learns the residual by Adam; the epoch (or the start) with the lowest error on `held` wins.

    Args:
        train: its first images define the principal components.
        held: pairs of images that are not in `train`.
        key: draws the first weights and the order of the examples.

    Guarantees:
        The hidden layer never raises the squared error of the held-out components.
        `error` is not finite if a feature is not finite. With one thread, the same arguments give the same numbers.
    """
    mean, directions = _principal(train.images.flatten(1)[:_ATLAS], plan.components)
    center, spread = train.features.mean(dim=0), train.features.std(dim=0, correction=0)
    spread = torch.where(spread < _CONSTANT, torch.inf, spread)
    x, held_x = ((pairs.features - center) / spread for pairs in (train, held))
    target, held_target = ((pairs.images.flatten(1) - mean) @ directions for pairs in (train, held))
    offset = target.mean(dim=0)
    none = (x.new_zeros(x.shape[1], 0), x.new_zeros(0), x.new_zeros(0, len(offset)))
    linear = x.new_zeros(x.shape[1], len(offset))
    network = _Inverter(center, spread, mean, directions, offset, linear, *none, pixels)
    if not bool(x.isfinite().all() and held_x.isfinite().all()):
        return network
    network = network._replace(linear=_ridge(_Pairs(x, target - offset), _Pairs(held_x, held_target - offset)))
    if plan.hidden:
        rest, held_rest = target - network.components(x), held_target - network.components(held_x)
        first, bias, second = _learn(_Pairs(x, rest), _Pairs(held_x, held_rest), plan, key)
        network = network._replace(first=first, bias=bias, second=second)
    return network._replace(error=float((network(held.features) - held.images.flatten(1)).square().mean()))


def _principal(images: Tensor, components: int) -> tuple[Tensor, Tensor]:
    """Mean [D] and first principal directions [D, k] of images [n, D]; k is at most `components`, n and D."""
    mean = images.mean(dim=0)
    off = (images - mean).double()
    if len(off) < off.shape[1]:
        _, vectors = torch.linalg.eigh(off @ off.T)
        # orthonormal even if a direction has almost no variance
        directions, _ = torch.linalg.qr(off.T @ vectors.flip(1)[:, :components])
    else:
        _, vectors = torch.linalg.eigh(off.T @ off)
        directions = vectors.flip(1)[:, :components]
    return mean, directions.to(images.dtype)


def _ridge(train: _Pairs, held: _Pairs) -> Tensor:
    """[f, k] weights; each column has the penalty with the least error on `held`; `images` are components [n, k]."""
    inputs = train.features
    values, vectors = torch.linalg.eigh((inputs.T @ inputs).double() / len(inputs))
    rotated = vectors.T @ ((inputs.T @ train.images).double() / len(inputs))
    turned = held.features.double() @ vectors
    tried = torch.stack([rotated / (values.clamp(min=0.0) + ridge)[:, None] for ridge in _RIDGES])
    errors = (turned @ tried - held.images).square().mean(dim=1)
    columns = torch.arange(train.images.shape[1])
    chosen: Tensor = vectors @ tried[errors.argmin(dim=0), :, columns].T
    return chosen.to(inputs.dtype)


def _learn(train: _Pairs, held: _Pairs, plan: Learned, key: Key) -> tuple[Tensor, Tensor, Tensor]:
    """The hidden layer: weights [f, h], bias [h] and weights [h, k]; `images` are residual components [n, k]."""
    f, k = train.features.shape[1], train.images.shape[1]
    first = rng.normal(key.child("first"), (f, plan.hidden)).mul_(math.sqrt(2 / f)).to(train.features).requires_grad_()
    bias = train.features.new_zeros(plan.hidden, requires_grad=True)
    second = train.features.new_zeros(plan.hidden, k, requires_grad=True)
    weights = [first, bias, second]
    adam = torch.optim.Adam(weights, lr=plan.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, plan.epochs)
    lowest, best, waited = float(held.images.square().mean()), [weight.detach().clone() for weight in weights], 0
    for epoch in range(plan.epochs):
        order = torch.from_numpy(rng.permutation(key.child("order", epoch), len(train.features)))
        for rows in torch.split(order, _BATCH):
            guess = torch.addmm(bias, train.features[rows], first).relu() @ second
            adam.zero_grad()
            (guess - train.images[rows]).square().mean().backward()  # type: ignore[no-untyped-call]
            adam.step()
        schedule.step()
        with torch.no_grad():
            guess = torch.addmm(bias, held.features, first).relu() @ second
            error = float((guess - held.images).square().mean())
        waited += 1
        if error < lowest:
            lowest, best, waited = error, [weight.detach().clone() for weight in weights], 0
        if waited == _PATIENCE:
            break
    return best[0], best[1], best[2]
