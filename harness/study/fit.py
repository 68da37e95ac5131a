"""The fit check: whether recorded messages are what model, records and local training say, and what they are instead.

An attack on a message that was made by another loss, another optimizer or from other records must fail, and its failure
would look like a strong defense. So before any attack, the client's update is computed again from the records that are
named for a message. A defense is imitated: what the message reveals along this update is compared with what messages
of our own reveal, which carry the same update through the same defense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from leakgauge.harness.core.contract import Examples, Message
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.batch import Indices, LocalPlan, Work, train_clients
from leakgauge.harness.learn.losses import BINARY, CROSS_ENTROPY, SQUARED
from leakgauge.harness.learn.modules import other_norms
from leakgauge.harness.learn.tasks import ModelTask

_MOST, _STEPS, _ENTRIES = 8, 500, 2**24
"""The most messages of a round that are checked, and the most local steps and numbers of them together; at least one
message is."""

_IMITATED = 3  # own messages for each of them

_COSINE, _SCALE = 0.95, 0.1
"""The least cosine with the computed update, as a share of that of own messages, and the largest error of the length.
16-bit floats and noise of a tenth of the norm are within both."""

_SURE = 4.0  # standard deviations that a defense's noise may explain

_TELLS = 0.5  # the largest relative error, by this noise, with which the check still says anything

_INPUTS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("inputs 255 times as large", lambda x: 255 * x),
    ("inputs 255 times as small", lambda x: x / 255),
    ("inputs in [-1, 1] instead of [0, 1]", lambda x: 2 * x - 1),
    ("inputs in [0, 1] instead of [-1, 1]", lambda x: (x + 1) / 2),
    ("standardized inputs", lambda x: (x - x.mean()) / x.std().clamp(min=1e-12)),
)


def chosen(messages: Sequence[Message], dim: int) -> Sequence[Message]:
    """Some of the messages, evenly spaced."""
    steps = max(message.steps for message in messages)
    most = max(1, min(_MOST, _STEPS // max(1, steps), _ENTRIES // dim))
    return messages[:: -(-len(messages) // most)]


class Fit(NamedTuple):
    """How messages lie to the updates that were computed for them, relative to own messages, each [n].

    Attributes:
        scales, cosines: length along the update, and cosine with it, over the means of own messages.
        errors: [2] the relative errors of one message's scale and cosine that the defense's noise may explain.
    """

    scales: Tensor
    cosines: Tensor
    errors: Tensor

    @property
    def tells(self) -> bool:
        """Whether own messages show their update well enough."""
        return bool((self.errors / math.sqrt(len(self.scales)) <= _TELLS).all())

    @property
    def direction(self) -> bool:
        """Whether each message, and the mean of all, have the direction of the updates, or the opposite one."""
        return _within(self.cosines.abs(), _COSINE, math.inf, float(self.errors[1]))

    @property
    def length(self) -> bool:
        """Whether each message, and the mean of all, have the length of the updates."""
        return _within(self.scales, 1 - _SCALE, 1 + _SCALE, float(self.errors[0]))

    @property
    def alike(self) -> bool:
        """Whether all messages are the same times as long as their updates."""
        mean = float(self.scales.mean())
        return bool(((self.scales / mean - 1).abs() <= _SCALE + float(self.errors[0])).all())


def _within(values: Tensor, low: float, high: float, error: float) -> bool:
    alone, mean = error, error / math.sqrt(len(values))
    each = bool(((values >= low - alone) & (values <= high + alone)).all())
    return each and low - mean <= float(values.mean()) <= high + mean


@dataclass(frozen=True)
class Said:
    """Messages of one round, and what is said about them.

    Attributes:
        records: those behind each message; rows: their places in `data`.
        data: all training records.
        key: for simulated training and own messages.
    """

    task: ModelTask
    params: Tensor
    lr: float
    round_: Round
    messages: Sequence[Message]
    records: Sequence[Examples]
    rows: Sequence[Indices]
    data: Examples
    key: Key

    def plan(self, message: Message) -> LocalPlan:
        """How the client trains: the records of a gradient are one batch."""
        setting, defense = self.round_.setting, self.round_.defense
        plan = LocalPlan.of(setting, lr=self.lr, steps=message.steps)
        return replace(plan, batch=0 if plan.gradient else plan.batch).under(defense.local, defense.step_noise(setting))

    def updates(self, number: int = 0) -> Tensor:
        """[n, d] the update of each client; the order of records and what else training draws depend on the number."""
        found = []
        for at, (message, records) in enumerate(zip(self.messages, self.records, strict=True)):
            work = [Work(records, self.key.child("train", number, at))]
            found.append(train_clients(self.task, self.params, work, self.plan(message), "loop").updates[0])
        return torch.stack(found)

    def imitated(self, number: int) -> Tensor:
        """[n, d] what own messages with these updates reveal; the first messages of their clients."""
        rows, setting = [], self.round_.setting
        for at, (message, update) in enumerate(zip(self.messages, self.updates(number), strict=True)):
            memory, key = self.round_.defense.remember(setting), self.key.child("own", number, at)
            sent = self.round_.exchange([Client.of(message.sender, update, memory, key)], key.child("channel"))
            shared = None if message.shared is None else sent.links.each()[0].shared
            rows.append(self.round_.read(message._replace(wire=sent.received[0], shared=shared)))
        return torch.stack(rows)

    @property
    def steps_once(self) -> bool:
        """Whether each update is one step on all of the client's records."""
        each = zip(map(self.plan, self.messages), (len(records.y) for records in self.records), strict=True)
        return all((p.gradient or (p.steps == 1 and p.size(n) >= n)) and p.clip is None for p, n in each)

    @property
    def factor(self) -> float:
        """The update of one step over its gradient."""
        return 1.0 if self.round_.setting.sends == "gradient" else -self.lr


def misfit(said: Said) -> str:
    """What does not fit between messages and what is said about them, and what would; empty: nothing was found.

    Nothing is said where the noise of a defense hides even whether the update is in its message.
    """
    read = torch.stack([said.round_.read(message) for message in said.messages]).double()
    updates = said.updates().double()
    usual = torch.stack([_along(said.imitated(number).double(), updates) for number in range(1, 1 + _IMITATED)])
    if not bool(torch.isfinite(usual).all()) or not bool((usual.mean((0, 2)) > 0).all()):
        return ""

    def compared(shown: Tensor, expected: Tensor) -> Fit:
        means = usual.mean((0, 2))
        errors = _SURE * usual.std((0, 2), correction=0) * math.sqrt(1 + 1 / _IMITATED) / means
        scales, cosines = _along(shown, expected) / means[:, None]
        return Fit(scales, cosines, errors)

    fit = compared(read, updates)
    if not fit.tells or (fit.direction and fit.length):
        return ""
    if fit.direction and fit.alike:
        return f"{_start(fit)}: {_by_length(said, fit)}"
    for text, shown, expected in _alternatives(said, read, updates):
        tried = compared(shown, expected)
        if tried.direction and (tried.length or not fit.direction):
            also = "" if tried.length else f", and {float(tried.scales.mean()):.3g} times as long"
            return f"{_start(fit)}, but they are those of {text}{also}"
    if fit.direction:
        return f"{_start(fit)}: their lengths differ, as by weights of classes or of records, or by other rates"
    return f"{_start(fit)}: another loss, optimizer, model, preprocessing, or other records"


def _along(shown: Tensor, expected: Tensor) -> Tensor:
    """[2, n] the length of rows [n, d] along the expected ones, in their lengths, and the cosine; 0 of a zero row."""
    products, square = (shown * expected).sum(1), expected.square().sum(1)
    lengths = (shown.square().sum(1) * square).sqrt()
    return torch.stack([products / square.clamp(min=1e-300), products / lengths.clamp(min=1e-300)])


def _start(fit: Fit) -> str:
    low, high = (float(end) for end in torch.aminmax(fit.cosines))
    shown = f"cosine {low:.3g}" if high - low < 0.01 else f"cosines {low:.3g} to {high:.3g}"
    long = f"{float(fit.scales.mean()):.3g} times as long"
    return f"messages are not what model, records and training give ({shown}, {long})"


def _by_length(said: Said, fit: Fit) -> str:
    """What a wrong length alone says."""
    scale, gradient = float(fit.scales.mean()), said.round_.setting.sends == "gradient"
    sizes = {len(records.y) for records in said.records}

    def near(value: float) -> bool:
        return abs(scale / value - 1) <= _SCALE + float(fit.errors[0]) / math.sqrt(len(fit.scales))

    if gradient and near(-said.lr):
        return "they are updates of one step, not gradients"
    if not gradient and near(-1 / said.lr):
        return "they are gradients, not updates"
    if len(sizes) == 1 and near(size := max(sizes)) and size > 1:
        return "their loss is the sum over the records, not the mean"
    if near(-1.0):
        return "they have the opposite sign"
    rate = "" if gradient else f", or the learning rate is {scale * said.lr:.3g} instead of {said.lr:.3g}"
    sign = " and has the opposite sign" if scale < 0 else ""
    return f"their loss is multiplied by {abs(scale):.3g}{sign}{rate}"


def _alternatives(said: Said, read: Tensor, updates: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What messages may be instead, the messages seen that way, and the updates expected then, each [n, d]."""
    params = said.params.double()
    yield "whole weights after training, not of differences", read - params, updates
    yield "whole weights after training, whose difference counts from the other side", params - read, updates
    count = len(said.data.y)
    for shift, where in ((1, "after"), (-1, "before")):
        rows = [(own + shift) % count for own in said.rows]
        records = [Examples(said.data.x[own], said.data.y[own]) for own in rows]
        yield f"the records {where} the named ones", read, replace(said, records=records).updates().double()
    for text, change in _INPUTS:
        records = [Examples(change(own.x), own.y) for own in said.records]
        yield text, read, replace(said, records=records).updates().double()
    yield "Adam or another method that takes signs", read, updates.sign()
    if said.steps_once:
        yield from _of_one_step(said, read, updates)


def _of_one_step(said: Said, read: Tensor, updates: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """As `_alternatives`, of one step on all records of a client: other losses, models and weight decay."""
    task, params, factor, gradient = said.task, said.params, said.factor, said.round_.setting.sends == "gradient"
    if not bool(torch.isfinite(read).all()):
        return
    back = [row * said.lr if gradient else -row for row in read]
    before = [replace(said, params=(params + move).float()) for move in back]
    moved = [_only(own, at).updates()[0].double() for at, own in enumerate(before)]
    yield "the model before the step, and the given one is after it", read, torch.stack(moved)
    yield "a loss with weight decay", read, _fitted(read, [updates, params.double().expand_as(read)])
    if (other := other_norms(task.model)) is not None:
        scores_of, trained = other
        flipped = factor * _by_loss(said, task.model.loss.batch, scores_of)
        yield f"batch norms in {'eval' if task.mixes else 'train'} mode", trained * read, trained * flipped
    for text, expected in _of_losses(said, read, factor):
        yield text, read, expected


def _of_losses(said: Said, read: Tensor, factor: float) -> Iterator[tuple[str, Tensor]]:
    """Other losses, and the updates [n, d] expected then."""
    own = said.task.model.loss
    if said.task.numbers:
        others = {"the squared error": SQUARED, "the binary cross-entropy": BINARY}
    else:
        others = {"the softmax cross-entropy": CROSS_ENTROPY, "binary cross-entropy on one-hot labels": BINARY}
        others |= {"the squared error of the scores": SQUARED}
    for text, loss in others.items():
        if loss != own:
            yield text, factor * _by_loss(said, loss.batch)
    if said.task.numbers:
        return

    def uniform(scores: Tensor, y: Tensor) -> Tensor:
        return -scores.log_softmax(1).mean()

    parts = [factor * _by_loss(said, part) for part in (CROSS_ENTROPY.batch, uniform)]
    yield "a loss with label smoothing", _fitted(read, parts)

    def of_probabilities(scores: Tensor, y: Tensor) -> Tensor:
        return SQUARED.batch(scores.softmax(1), y)

    yield "the squared error of the probabilities", factor * _by_loss(said, of_probabilities)

    def twice(scores: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(scores.softmax(1), y)

    yield "a cross-entropy of probabilities, with the softmax twice", factor * _by_loss(said, twice)


def _only(said: Said, at: int) -> Said:
    """The same for one message."""
    some = slice(at, at + 1)
    return replace(said, messages=said.messages[some], records=said.records[some], rows=said.rows[some])


def _by_loss(
    said: Said, loss: Callable[[Tensor, Tensor], Tensor], scores_of: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Tensor:
    """[n, d] float64: the gradients, at each message's records, of a loss of scores [b, classes] and labels [b]."""
    rows = []
    for records in said.records:
        leaf = said.params.clone().requires_grad_()
        scores = scores_of(leaf, records.x) if scores_of else said.task.in_training(leaf, records.x).scores
        rows.append(torch.autograd.grad(loss(scores, records.y), leaf)[0].double())
    return torch.stack(rows)


def _fitted(shown: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """[n, d] the combination of parts [n, d], with the same weights in all rows, that is nearest to what is shown."""
    basis = torch.stack([part.flatten() for part in parts], 1)
    weights = torch.linalg.lstsq(basis, shown.flatten()[:, None]).solution
    fitted: Tensor = (basis @ weights).view_as(shown)
    return fitted
