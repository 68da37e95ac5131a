"""Victims by hand: what an adversary sees of them, and the truth beside it."""

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.matching import gradients
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import (
    Defense,
    Examples,
    Link,
    Message,
    Observation,
    Sender,
    Setting,
    Snapshot,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import View
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask

KEY = Key(0)
SHAPE = (1, 8, 8)
LENET = ModelTask(build("lenet-dlg", SHAPE, 10), "dlg")


@dataclasses.dataclass(frozen=True, eq=False)
class Says(Defense):
    """A defense whose message says one value in every coordinate."""

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
    """What is seen, and the truth."""

    seen: Observation
    x: Tensor
    y: Tensor

    def mse(self, guesses):
        """[n] of each victim; a batch in its better order of two."""
        orders = [torch.stack([guess.x for guess in guesses]).roll(i, 1) for i in range(self.x.shape[1])]
        return torch.stack([(order - self.x).square().flatten(1).mean(1) for order in orders]).amin(0)


def make(task=LENET, n=3, images=1, defense=None, sends="gradient", lr=0.1, steps=1, labels=None, scale=1.0, key=KEY):
    """n victims who sent the gradient of their images, or the update of one step; `key` draws the defense's noise."""
    defense = defense or NoDefense()
    shape, classes = task.input_shape, task.classes
    setting = Setting(task.layout, 8, 8, 1, sends, steps, lr, images, 8)
    params = task.init(KEY.child("model"))
    x = rng.normal(KEY.child("x"), (n, images, *shape)).sigmoid()
    y = (3 + torch.arange(n * images).reshape(n, images)) % classes if labels is None else labels
    sent = gradients(task, params, x, one_hot(y, classes).float())
    sent = scale * (sent if sends == "gradient" else -lr * steps * sent)
    messages = []
    for i in range(n):
        mine = key.child("client", i)
        private, shared = mine.child("private"), mine.child("shared")
        wire, _ = defense.encode(None, None, sent[i], Link(setting, Sender(i, 8), shared), private)
        messages.append(Message(0, Sender(i, 8), wire, shared, images, steps))
    aside = rng.normal(KEY.child("aside"), (12, *shape)).sigmoid()
    seen = Observation(
        View.parse("server+labels"),
        setting,
        task,
        defense,
        lr,
        messages=tuple(messages),
        model=Snapshot(0, params, None),
        models=(Snapshot(0, params, None),),
        final=params,
        auxiliary=Examples(aside, torch.tensor([2] * 7 + [1] * 5) % classes),
        candidates=Examples(x.flatten(0, 1), y.flatten()),
        labels=tuple(row.sort().values for row in y),
    )
    return Case(seen, x, y)


def only(seen, needs):
    """The observation of an adversary who sees `needs`, and nothing else but what is public in any case."""
    fields = ("messages", "models", "final", "auxiliary", "candidates", "labels")
    hidden = {name: None for name in fields if name not in needs}
    if "models" in hidden:
        hidden["model"] = None
    if "shared" not in needs and "messages" in needs:
        hidden["messages"] = tuple(message._replace(shared=None) for message in seen.messages)
    return dataclasses.replace(seen, **hidden)
