"""Hand-made victims: the observation of an adversary, and the truth."""

import dataclasses

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge import Key, rng
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.contract import Defense, Examples, Link, Message, Observation, Sender, Setting, Snapshot
from leakgauge.harness.core.threats import View
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.federation.observe import TrainedFederation
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.score import match

KEY = Key(0)
SHAPE = (1, 8, 8)
LENET = ModelTask(build("lenet-dlg", SHAPE, 10), "dlg")
EXACT = 1e-6
"""Raw MSE of an exact reconstruction; gradients are float32."""


@dataclasses.dataclass(frozen=True, eq=False)
class Says(Defense):
    """A defense with an estimate of one value in every coordinate."""

    value: float = 0.0

    def encode(self, state, memory, update, link, private):
        return b"", None

    def estimate(self, state, received, link):
        return torch.full((link.setting.dim,), self.value)

    def likelihood(self, state, received, links):
        return lambda update: update.sum(1) * torch.nan

    def claim(self, history, setting):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Case:
    seen: Observation
    x: Tensor
    y: Tensor

    @property
    def batches(self):
        return list(zip(self.x, self.y, strict=True))

    def mse(self, guesses):
        """[n] of each victim; a batch in its better order of two."""
        orders = [torch.stack([guess.x for guess in guesses]).roll(i, 1) for i in range(self.x.shape[1])]
        return torch.stack([(order - self.x).square().flatten(1).mean(1) for order in orders]).amin(0)


def encoded(setting, defense, updates, images, key):
    """The messages of clients 0, 1, ..., each with 8 samples, for updates of that many images each."""
    messages = []
    for i, (update, count) in enumerate(zip(updates, images, strict=True)):
        own, sender = key.child("client", i), Sender(i, 8)
        link, memory = Link(setting, sender, own.child("shared")), defense.remember(setting)
        wire, _ = defense.encode(defense.init(setting), memory, update, link, own.child("private"))
        messages.append(Message(0, sender, wire, own.child("shared"), count, setting.steps))
    return tuple(messages)


def sent(task, batches, defense=None, steps=0, lr=0.1, params=None):
    """A server's observation of the gradient, or the update of full-batch steps, of each batch (x, y), by autograd."""
    defense = defense or NoDefense()
    setting = Setting(task.layout, 8, 8, 1, "update" if steps else "gradient", steps or 1, lr, 0, 8)
    params = task.init(KEY.child("model")) if params is None else params
    updates = []
    for x, y in batches:
        here = params
        for _ in range(steps or 1):
            leaf = here.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(task.loss(leaf, x, y), leaf)
            here = here - lr * gradient
        updates.append(here - params if steps else gradient)
    messages = encoded(setting, defense, updates, [len(y) for _, y in batches], KEY)
    model = Snapshot(0, params, defense.init(setting))
    return Observation(View.parse("server"), setting, task, defense, lr, messages=messages, model=model)


def errors(batch, guess):
    """[b] raw MSE of the images in their best order, and how many labels match their own image's."""
    x, y = batch
    order = match(x, guess.x)
    return (guess.x[order] - x).square().flatten(1).mean(1), int((guess.y[order] == y).sum())


def assert_found(truth, guesses, mse=EXACT):
    """Every batch of `truth` is found, with each image's label."""
    for batch, guess in zip(truth, guesses, strict=True):
        assert guess.failure == ""
        worst, right = errors(batch, guess)
        assert worst.max() < mse
        assert right == len(batch[1])


def make(task=LENET, n=3, images=1, defense=None, sends="gradient", lr=0.1, steps=1, labels=None, scale=1.0, key=KEY):
    """n victims that send the gradient of their images, or the update of one step; `key` draws the defense's noise."""
    defense = defense or NoDefense()
    shape, classes = task.input_shape, task.classes
    setting = Setting(task.layout, 8, 8, 1, sends, steps, lr, images, 8)
    params = task.init(KEY.child("model"))
    x = rng.normal(KEY.child("x"), (n, images, *shape)).sigmoid()
    y = (3 + torch.arange(n * images).reshape(n, images)) % classes if labels is None else labels
    updates = gradients(task, params, x, one_hot(y, classes).float())
    updates = scale * (updates if sends == "gradient" else -lr * steps * updates)
    messages = encoded(setting, defense, updates, [images] * n, key)
    aside = rng.normal(KEY.child("aside"), (12, *shape)).sigmoid()
    seen = Observation(
        View.parse("server+labels"),
        setting,
        task,
        defense,
        lr,
        messages=messages,
        model=Snapshot(0, params, defense.init(setting)),
        models=(Snapshot(0, params, defense.init(setting)),),
        final=params,
        auxiliary=Examples(aside, torch.tensor([2] * 7 + [1] * 5) % classes),
        candidates=Examples(x.flatten(0, 1), y.flatten()),
        labels=tuple(row.sort().values for row in y),
    )
    return Case(seen, x, y)


def only(seen, needs):
    """The observation of an adversary that sees `needs` and public facts, nothing else."""
    fields = ("messages", "models", "final", "auxiliary", "candidates", "labels")
    hidden = {name: None for name in fields if name not in needs}
    if "models" in hidden:
        hidden["model"] = None
    if "shared" not in needs and "messages" in needs:
        hidden["messages"] = tuple(message._replace(shared=None) for message in seen.messages)
    return dataclasses.replace(seen, **hidden)


def trained_federation(task, spec, defense, train_set, test_set, kept, messages=None):
    """Four clients with ten examples each; `kept` are the rounds whose models are kept, and messages, unless named."""
    clients = {k: np.arange(10 * k, 10 * k + 10) for k in range(4)}
    holdings = {k: Examples(train_set.x[rows], train_set.y[rows]) for k, rows in clients.items()}
    keep = Keep(frozenset(kept), frozenset(kept if messages is None else messages))
    training = train(task, spec, defense, holdings, test_set, Key(0).child("training"), engine="loop", keep=keep)
    return TrainedFederation(task, spec, defense, training, train_set, test_set, clients, "loop", Key(0))
