"""A digital defense behind secure aggregation: what arrives of a round is the sum of what its messages decode to."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.codec import pack_float64, unpack_float64
from leakgauge.harness.core.contract import (
    Defense,
    Feedback,
    Likelihood,
    Link,
    Links,
    LocalRule,
    Message,
    Sender,
    Setting,
)
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.core.vec import Parts, Vector
from leakgauge.harness.federation.round import Round

_KEY = Key(0).child("aggregate")
"""Of the messages that an adversary imitates: public, and no one else draws from it."""

_TIMES = 4
"""Imitated messages, from whose many coordinates the size of the errors is taken."""

_LONGER = 1e3
"""An update so much longer shows whether the defense clips."""

_NEVER = 1e15
"""The length at which a defense clips that does not; finite, for the sake of derivatives."""

_ROUNDING = 1e-6
"""Assumed standard deviation of a coordinate without noise, as in `defenses._common.misfit`."""


class _Errors(NamedTuple):
    """What a defense does to an update u: shrink * u, of a length of at most `clip`, plus errors of this variance.

    omits: 1 if it leaves coordinates out, which then decode to zero; else 0.
    """

    shrink: float
    clip: float
    variance: float
    omits: float


@dataclass(frozen=True)
class Aggregated(Defense[Any, Any]):
    """The defense `inner` as an aggregator sees it: of each round, the sum of what the clients' messages decode to.

    The messages are those of `inner`; each is decoded with its shared key before the sum. Noise that the server adds
    itself is not part of it. Attacks meet it as they meet a channel that superposes.

    Its likelihood is normal: the errors of `inner` add up over the clients, and an attack measures their size on
    messages that it imitates, of updates about as long as those in the sum. Coordinates that no client sends are left
    out. So for one client of a defense without normal noise, the attack knows less than of a single message.
    """

    superposes: ClassVar[bool] = True
    analog: ClassVar[bool] = True

    inner: Defense[Any, Any]

    @property
    def local(self) -> LocalRule:
        """That of `inner`."""
        return self.inner.local

    def step_noise(self, setting: Setting) -> float:
        """That of `inner`."""
        return self.inner.step_noise(setting)

    def parts(self, setting: Setting) -> Parts:
        """Those of `inner`."""
        return self.inner.parts(setting)

    def init(self, setting: Setting) -> Any:
        """That of `inner`."""
        return self.inner.init(setting)

    def remember(self, setting: Setting) -> Any:
        """That of `inner`."""
        return self.inner.remember(setting)

    def encode(self, state: Any, memory: Any, update: Vector, link: Link, private: Key) -> tuple[bytes, Any]:
        """What the message of `inner` decodes to, [d] float64."""
        wire, memory = self.inner.encode(state, memory, update, link, private)
        return pack_float64(self.inner.estimate(state, wire, link).double()), memory

    def transmit(self, state: Any, wires: Sequence[bytes], links: Links, channel: Key) -> Sequence[bytes]:
        """The sum."""
        return [pack_float64(torch.stack([unpack_float64(wire, links.setting.dim) for wire in wires]).sum(0))]

    def estimate(self, state: Any, received: bytes, link: Link) -> Vector:
        """The sum of all updates; the sender's if the others are zero."""
        return unpack_float64(received, link.setting.dim).float()

    def decode(self, state: Any, received: Sequence[bytes], links: Links, private: Key) -> Vector:
        """The mean, with equal weights."""
        (total,) = received
        return (unpack_float64(total, links.setting.dim) / len(links.senders)).float()

    def advance(self, state: Any, feedback: Feedback) -> Any:
        """That of `inner`."""
        return self.inner.advance(state, feedback)

    def stops(self, state: Any) -> bool:
        """As `inner`."""
        return self.inner.stops(state)

    def likelihood(self, state: Any, received: Sequence[bytes], links: Links) -> Likelihood:
        """|sum - sum of the shrunk and clipped updates|^2 / (2 * variance of all errors), where anything is sent."""
        setting = links.setting
        sums = torch.stack([unpack_float64(wire, setting.dim) for wire in received])

        @functools.cache
        def errors(users: int) -> list[_Errors]:
            pairs = zip(sums, links.senders, strict=True)
            return [self._errors(state, total, users, who, setting) for total, who in pairs]

        def score(update: Tensor) -> Tensor:
            each: Tensor = update.double().reshape(len(update), -1, setting.dim)
            law = errors(each.shape[1])
            shrink, clip, variance, omits = each.new_tensor(law).T
            center = each * shrink[:, None, None]
            length = center.norm(dim=2, keepdim=True).clamp(min=1e-12)
            center = (center * (clip[:, None, None] / length).clamp(max=1.0)).sum(1)
            kept = torch.where(sums == 0, 1 - omits[:, None], 1.0)
            misfit: Tensor = ((center - sums).square() * kept).sum(1) / (2 * variance)
            return misfit.to(update.dtype)

        return score

    def _errors(self, state: Any, total: Tensor, users: int, who: Sender, setting: Setting) -> _Errors:
        """What `inner` does to updates of which `users` like `who` are behind a sum, and the variance of its errors.

        The length of the updates follows from that of the sum: the variance of their errors is taken as a + b length^2.
        """
        silent, d = max(0, setting.participants - users), setting.dim
        nothing = torch.zeros_like(total)
        other = Sender(0, setting.samples)
        idle = float(self._imitated(state, nothing, other, setting).square().mean()) if silent else 0.0
        direction, masked = self._direction(total, setting), users == 1 and idle == 0
        energy = float(total.square().sum())

        def at(length: float) -> tuple[float, float]:
            update = (direction * length).float().double()  # as it is sent
            made = self._imitated(state, update, who, setting)
            known = (made != 0).double() if masked else torch.ones_like(made)
            sent = float((known @ update.square()).sum().clamp(min=1e-60))
            shrink = float((made @ update).sum()) / sent
            error = float(((made - shrink * update) * known).square().sum() / known.sum().clamp(min=1))
            # what the noise of a few messages hides is no shrinking
            return 1.0 if (shrink - 1) ** 2 < 9 * error / sent else shrink, error

        long = math.sqrt(energy / users)
        short = long / 100
        (_, far), (shrink, near) = at(long), at(short)
        rise = max(far - near, 0.0) / max(long**2 - short**2, 1e-60)
        rest = energy - d * (users * max(near - rise * short**2, 0.0) + silent * idle)
        length = math.sqrt(max(rest, 1e-4 * energy) / users / max(shrink**2 + d * rise, 1e-12))
        shrink, error = at(length)
        longer = self._imitated(state, direction * length * _LONGER, who, setting)
        reach, omits = float((longer @ direction).mean()), float((longer[:, direction != 0] == 0).any())
        clip = reach if reach < 0.5 * shrink * length * _LONGER else _NEVER
        return _Errors(shrink, clip, users * (error + _ROUNDING**2) + silent * idle, omits)

    def _direction(self, total: Tensor, setting: Setting) -> Tensor:
        """[d] of length 1: normal numbers, with as much in each tensor as the sum has. The sum itself shows too much.

        For example, a defense that sends the largest coordinates sends all of a sum that has no others.
        """
        drawn = setting.layout.split(normal(_KEY.child("direction"), (setting.dim,), torch.float64))
        sizes = [part.norm() for part in setting.layout.split(total)]
        parts: list[Tensor] = [
            part * (size / part.norm().clamp(min=1e-30)) for part, size in zip(drawn, sizes, strict=True)
        ]
        joined = setting.layout.join(parts)
        return torch.as_tensor(joined / joined.norm().clamp(min=1e-30))

    def _imitated(self, state: Any, update: Tensor, who: Sender, setting: Setting) -> Tensor:
        """[times, d] what messages of a sender with this update before the noise of its training decode to."""
        made, std = [], self.training_noise(setting, who.samples)
        for number in range(_TIMES):
            key = _KEY.child(number)
            link = Link(setting, Sender(0, who.samples), key.child("shared"))
            noisy = update + std * normal(key.child("training"), (setting.dim,), torch.float64) if std else update
            wire, _ = self.encode(state, self.remember(setting), noisy.float(), link, key.child("private"))
            made.append(unpack_float64(wire, setting.dim))
        return torch.stack(made)

    def claim(self, history: Sequence[Any], setting: Setting) -> Claim:
        """That of `inner`."""
        return self.inner.claim(history, setting)


def aggregated(defense: Defense[Any, Any]) -> Defense[Any, Any]:
    """The defense as an aggregator sees it; a channel that superposes shows no more than the sum anyway.

    Raises:
        ValueError: each client sends a waveform of its own, which no protocol adds up.
    """
    if defense.analog and not defense.superposes:
        raise ValueError("secure aggregation needs digital messages, and here each client sends a waveform")
    return defense if defense.superposes else Aggregated(defense)


def summed(here: Round, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The one message of a round that an aggregator sees of these."""
    if not messages or here.defense.superposes:
        return tuple(messages)
    total = torch.stack([here.read(message).double() for message in messages]).sum(0)
    first, others = messages[0], tuple(message.sender for message in messages[1:])
    images = sum(message.images for message in messages)
    return (first._replace(wire=pack_float64(total), shared=None, images=images, others=others),)
