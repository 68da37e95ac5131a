"""What a defense leaves of a text, measured on messages that the adversary makes from its own texts."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from leakgauge.attacks._engine.imitation import own_messages, own_updates
from leakgauge.attacks._engine.objective import received_gradients, update_per_gradient
from leakgauge.attacks._text.chances import Chances
from leakgauge.attacks._text.network import Network
from leakgauge.attacks._text.spans import bag
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples, Link, Message, Observation, ObservedRound, log_likelihoods
from leakgauge.harness.core.rng import Key

_FITTED, _KEPT = 24, 8  # own messages for the fits, and for their calibration
_ABSENT = 150  # rows of absent tokens of each own message
_ALL = 0.98  # the share of coordinates that differ from zero, below which a defense leaves coordinates out
_SURE = 30.0  # nats for or against tokens, if rows are exact
_EXACT = 1e-4  # relative error of an estimate that counts as none
_LEAST = 1e-6  # weight of a tensor's errors, as a share of the largest weight
_EXPLAINED = 1e-2  # relative distance of gradients up to which a text is right
_TOGETHER = 2**21  # numbers of gradients that are computed at once: they stay in the cache
_HELD = 2**19  # numbers of gradients whose likelihoods are computed at once, with many steps in double precision
_SLOPES = torch.linspace(0, 1.2, 13, dtype=torch.float64)


class _Normal(NamedTuple):
    """A normal distribution of rows [d] with a shrunken covariance."""

    mean: Tensor
    inverse: Tensor
    log_det: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> _Normal:
        """Fitted to rows [n, d]; few rows count less than their mean variance."""
        (n, d), mean = rows.shape, rows.mean(0)
        spread, share = torch.cov(rows.T).view(d, d), d / (n + d)
        level = spread.diagonal().mean().clamp(min=1e-300)
        whole = (1 - share) * spread + share * level * torch.eye(d, dtype=rows.dtype)
        return cls(mean, torch.linalg.inv(whole), torch.logdet(whole))

    def log_density(self, rows: Tensor) -> Tensor:
        off = rows - self.mean
        return -0.5 * ((off @ self.inverse * off).sum(1) + self.log_det)


class Channel:
    """One attacked round.

    Attributes:
        exact: whether estimates are the gradients themselves, up to a factor.
        told: by how many nats messages tell more of a batch than its prior: the rows of words, or all coordinates.
    """

    def __init__(self, seen: Observation, observed: ObservedRound, network: Network, chances: Chances, key: Key):
        self.seen, self.observed, self.network, self.chances, self.key = seen, observed, network, chances, key
        self.factor = update_per_gradient(seen.setting, observed)[0]
        updates, estimates, _ = self._own(0)
        self.estimate = received_gradients(seen, observed, numbers=True)[0]
        self.slope, self.told, self.shrink, self.omits, self.heavy = 1.0, math.inf, 1.0, False, False
        self.precision = torch.ones(seen.setting.dim)
        self.exact = _parallel(estimates, updates, _EXACT)
        if not self.exact:
            self._fit()

    def _own(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient [d] of an own batch, what its message reveals [d], and its ids [b, T]."""
        own, b = self.seen.auxiliary, self.observed.messages[0].images
        assert own is not None
        rows = torch.from_numpy(rng.integers(self.key.child("rows", number), b, len(own.y)))
        batch = Examples(own.x[rows][None], own.y[rows][None])
        updates, made = own_messages(self.seen, self.observed, batch, number, self.key.child("own"))
        read = received_gradients(self.seen, made, numbers=True)[0]
        return updates.sum(1)[0] / self.factor, read, own.x[rows].long()

    def _fit(self) -> None:
        """Fit the distributions of rows and of errors."""
        layout, size = self.seen.setting.layout, len(self.chances.token)
        present, absent, kept, sums = [], [], [], torch.zeros(3, len(layout.sizes), dtype=torch.float64)
        pairs, held = [], []
        for number in range(_FITTED + _KEPT):
            gradient, read, ids = self._own(number)
            rows, on = layout.split(read)[self.network.words].double(), torch.zeros(size, dtype=torch.bool)
            on[ids] = True
            if number >= _FITTED:
                kept.append((rows, on))
                held.append((gradient, read))
                continue
            off = (~on).nonzero()[:, 0]
            some = rng.subset(self.key.child("absent", number), len(off), min(_ABSENT, len(off)))
            present.append(rows[on])
            absent.append(rows[off[torch.from_numpy(some)]])
            sent = read != 0
            pairs.append((float((read * gradient * sent).sum()), float((gradient.square() * sent).sum())))
            sums += self._errors(gradient, read)
        self.shrink = sum(a for a, _ in pairs) / max(1e-300, sum(b for _, b in pairs))
        self.omits = bool(sums[2].sum() < _ALL * _FITTED * layout.dim)
        count = sums[2].clamp(min=1)
        width, variance = (sums[:2] / count).clamp(min=1e-30)
        laplace = (count * (2 * math.e * width).log()).sum()
        normal = (count * (2 * math.pi * math.e * variance).log() / 2).sum()
        self.heavy = bool(laplace < normal)
        each = 1 / width if self.heavy else 1 / variance
        each = (each / each.max()).clamp(min=_LEAST)  # the scale of all errors together is fitted to each message
        self.precision = torch.cat([p.expand(n) for p, n in zip(each, layout.sizes, strict=True)]).float()
        self.present, self.absent = _Normal.of(torch.cat(present)), _Normal.of(torch.cat(absent))
        self._calibrate(kept)
        gradients = torch.stack([gradient for gradient, _ in held])
        misfits = torch.stack([self._off(read, gradients) for _, read in held])
        self.told = max(self.told, float((misfits - misfits.diagonal()[:, None]).mean()) * _KEPT / (_KEPT - 1))

    def _errors(self, gradient: Tensor, read: Tensor) -> Tensor:
        """[3, tensors]: sums of the errors' sizes and squares, and of the coordinates that were sent."""
        layout = self.seen.setting.layout
        error, sent = (read - gradient).double(), (read != 0).double()
        parts = zip(layout.split(error * sent), layout.split(sent), strict=True)
        return torch.stack([torch.stack([e.abs().sum(), e.square().sum(), s.sum()]) for e, s in parts], 1)

    def _calibrate(self, kept: list[tuple[Tensor, Tensor]]) -> None:
        """The weight of the rows against the prior, by own messages that were not fitted."""
        ratios = torch.stack([self.present.log_density(rows) - self.absent.log_density(rows) for rows, _ in kept])
        sign = torch.stack([on for _, on in kept]).double() * 2 - 1
        gains = torch.stack([logsigmoid(sign * (s * ratios + self.chances.first)).sum() for s in _SLOPES]) / len(kept)
        self.slope, self.told = float(_SLOPES[gains.argmax()]), float(gains.max() - gains[0])

    def of(self, message: Message) -> Channel:
        """The same for another message."""
        other = copy.copy(self)
        other.observed = self.observed._replace(messages=(message,))
        other.estimate = received_gradients(self.seen, other.observed, numbers=True)[0]
        return other

    def words(self) -> Tensor:
        """[V] log likelihood ratios that a token occurs."""
        if self.exact:
            b, t = self.observed.messages[0].images, self.seen.task.input_shape[0]
            found = bag(self.network, self.seen.task.layout.split(self.estimate), (1 + self.network.tied) * b * t)
            return torch.full((len(self.chances.token),), -_SURE, dtype=torch.float64).index_fill_(0, found, _SURE)
        rows = self.seen.setting.layout.split(self.estimate)[self.network.words].double()
        return self.slope * (self.present.log_density(rows) - self.absent.log_density(rows))

    def at_places(self, x: Tensor, y: Tensor) -> Tensor:
        """[V, T] log likelihood ratios that a token's row is that of a new token at a place of a text x [1, T]."""
        layout, at, count = self.seen.setting.layout, self.network.words, self._count(self.estimate)
        sizes = list(layout.sizes)
        new, power = int(x.flatten().bincount(minlength=len(self.chances.token)).argmin()), 1 if self.heavy else 2
        tried = x.repeat(x.shape[1], 1).fill_diagonal_(new)[:, None]
        tables = (torch.split(sent.sum(1), sizes, 1)[at] for sent in self._updates(tried, y))
        rows = torch.cat([table.view(len(table), *layout.shapes[at])[:, new] for table in tables])
        read = layout.split(self.estimate)[at]
        off = torch.cdist(read, rows * (self.shrink / self.factor), p=float(power)).pow(power)
        weight = torch.split(self.precision, sizes)[at][0] * count * (-self.misfit(x[None], y) / count).exp()
        ratios: Tensor = weight * (read.abs().pow(power).sum(1, keepdim=True) - off).double()
        return ratios

    def misfit(self, x: Tensor, y: Tensor) -> Tensor:
        """[m] minus the log likelihoods of texts x [m, b, T] with labels y [b], by the errors' distribution."""
        return torch.cat([self._off(self.estimate, sent.sum(1) / self.factor) for sent in self._updates(x, y)])

    def _updates(self, x: Tensor, y: Tensor) -> Iterator[Tensor]:
        """[m, users, d] the updates of texts x [m, b, T] with labels y [b], some at a time."""
        for part in torch.split(x.float(), max(1, _TOGETHER // self.seen.setting.dim)):
            yield own_updates(self.seen, self.observed, Examples(part, y.expand(len(part), *y.shape)))

    def unlikelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """[m] minus the defense's own log likelihoods of texts x [m, b, T] with labels y [b].

        Raises:
            NoLikelihood: the defense has none.
        """
        (message,), model = self.observed.messages, self.observed.model
        link = Link(self.seen.setting, message.sender, message.shared)
        together = min(len(x), max(1, _HELD // (self.seen.setting.dim * message.users)))
        score = log_likelihoods(self.seen.defense, model.state, message.wire, link, together, search=True)
        return -torch.cat([score(sent if message.users > 1 else sent[:, 0]) for sent in self._updates(x, y)])

    def explains(self, x: Tensor, y: Tensor) -> bool:
        """Whether texts x [b, T] with labels y [b] have the gradient that the message reveals, up to a factor."""
        updates = own_updates(self.seen, self.observed, Examples(x.float()[None], y[None])).sum(1)[0]
        return _parallel(self.estimate, updates / self.factor, _EXPLAINED)

    def _off(self, estimate: Tensor, gradients: Tensor) -> Tensor:
        """[m] misfits of gradients [m, d] of what a message reveals [d], with the likeliest scale of its errors."""
        off, sent = torch.sub(estimate, gradients, alpha=self.shrink), (estimate != 0) | (not self.omits)
        total = (off.abs_() if self.heavy else off.square_()) @ (self.precision * sent)
        return self._count(estimate) * total.double().clamp(min=1e-30).log()

    def _count(self, estimate: Tensor) -> float:
        """How often the logarithm of a sum of errors counts."""
        return int(((estimate != 0) | (not self.omits)).sum()) * (1.0 if self.heavy else 0.5)


def _parallel(rows: Tensor, wanted: Tensor, error: float) -> bool:
    """Whether a vector is a positive multiple of another one, up to this relative error."""
    factor = (rows * wanted).sum() / wanted.square().sum().clamp(min=1e-30)
    return bool(factor > 0) and bool((rows - factor * wanted).norm() < error * rows.norm())
