"""A digital defense behind secure aggregation: the server receives only the sum of a round's decoded messages."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core.codec import pack_float64, unpack_float64
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links, Message, Sender, Setting
from leakgauge.harness.core.defense import Wrapper
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.federation.round import Round

_KEY = Key(0).child("aggregate")
"""Key of the messages that an adversary imitates; it is public, and used for nothing else."""

_TIMES = 4  # number of imitated messages; the size of the errors is estimated from their many coordinates
_LONGER = 1e3  # factor on an update's length; an update scaled by it shows whether the defense clips
_NEVER = 1e15  # clip length that stands for no clipping; finite, so that derivatives exist
_ROUNDING = 1e-6  # assumed standard deviation of a coordinate without noise, as in `defenses._common.misfit`


class _Errors(NamedTuple):
    """The effect of a defense on an update u: shrink * u, clipped to length `clip`, plus errors of this variance."""

    shrink: float
    clip: float
    variance: float
    omits: float  # 1 if the defense leaves coordinates out, which then decode to zero; else 0


@dataclass(frozen=True)
class Aggregated(Wrapper[Any, Any]):
    """The defense `inner` as an aggregator sees it: for each round, the sum of the clients' decoded messages.

    The messages are those of `inner`; each is decoded with its shared key before the sum. The sum excludes noise that
    the server adds. Attacks treat it like a channel that superposes.

    The likelihood is normal: the errors of `inner` add up over the clients, and an attack estimates their size from
    imitated messages, whose updates are about as long as those in the sum. Coordinates that no client sends are left
    out, and so is a weight whose gradients local training prunes (`LocalRule.prune`), and all behind the noise of a
    bottleneck (`LocalRule.bottleneck`). So if one client sends and the
    noise of `inner` is not normal, the attack knows less than from its message.
    """

    superposes: ClassVar[bool] = True
    analog: ClassVar[bool] = True
    delegated: ClassVar[str] = (
        "randomized relies promises arithmetic local step_noise training_noise parts init remember advance compensated "
        "stops settled state_metrics step_distribution violations claim summed_proof parameters"
    )
    # a sum shows no header, its errors have Fisher information, and the server refuses no sum
    default: ClassVar[str] = (
        "correlates independent plaintext_statistic read_plaintext_statistic error_variance longest average"
    )
    refused: ClassVar[dict[str, str]] = {
        "message_distribution aggregate_distribution low_noise_variant": "they are stated for single messages"
    }

    inner: Defense[Any, Any]

    @property
    def wrapped(self) -> Defense[Any, Any]:
        """The defense `inner`."""
        return self.inner

    def encode(self, state: Any, memory: Any, update: Vector, link: Link, private: Key) -> tuple[bytes, Any]:
        """The decoded message of `inner`, [d] float64."""
        wire, memory = self.inner.encode(state, memory, update, link, private)
        return pack_float64(self.inner.estimate(state, wire, link).double()), memory

    def transmit(self, state: Any, wires: Sequence[bytes], links: Links, channel: Key) -> Sequence[bytes]:
        """The sum of the decoded messages."""
        return [pack_float64(torch.stack([unpack_float64(wire, links.setting.dim) for wire in wires]).sum(0))]

    def estimate(self, state: Any, received: bytes, link: Link) -> Vector:
        """The sum of all updates, which is the sender's update if the others are zero."""
        return unpack_float64(received, link.setting.dim).float()

    def decode(self, state: Any, received: Sequence[bytes], links: Links, private: Key) -> Vector:
        """The mean, with equal weights."""
        (total,) = received
        return (unpack_float64(total, links.setting.dim) / len(links.senders)).float()

    def likelihood(self, state: Any, received: Sequence[bytes], links: Links) -> Likelihood:
        """|sum - sum of the shrunk and clipped updates|^2 / (2 * variance of all errors), over the sent coordinates."""
        setting = links.setting
        sums = torch.stack([unpack_float64(wire, setting.dim) for wire in received])
        whole = torch.ones(setting.dim, dtype=torch.float64)
        if self.local.prune and (place := setting.layout.last_matrix) is not None:
            setting.layout.split(whole)[place].zero_()
        if (at := setting.layout.encoder) is not None:
            whole[sum(setting.layout.sizes[:at]) :] = 0

        @functools.cache
        def errors(users: int) -> list[_Errors]:
            pairs = zip(sums, links.senders, strict=True)
            return [self._errors(state, total, users, sender, setting) for total, sender in pairs]

        def score(update: Tensor) -> Tensor:
            each: Tensor = update.double().reshape(len(update), -1, setting.dim)
            distribution = errors(each.shape[1])
            shrink, clip, variance, omits = each.new_tensor(distribution).T
            center = each * shrink[:, None, None]
            length = center.norm(dim=2, keepdim=True).clamp(min=1e-12)
            center = (center * (clip[:, None, None] / length).clamp(max=1.0)).sum(1)
            counted = torch.where(sums == 0, 1 - omits[:, None], 1.0) * whole
            misfit: Tensor = ((center - sums).square() * counted).sum(1) / (2 * variance)
            return misfit.to(update.dtype)

        return score

    def exact_likelihood(self, state: Any, received: Sequence[bytes], links: Links) -> Likelihood:
        """As `likelihood`; raises NoLikelihood if a bottleneck's noise is in the updates, which nobody can compute."""
        if links.setting.layout.encoder is not None:
            raise NoLikelihood("only the clients know the noise that is behind their updates")
        return self.likelihood(state, received, links)

    def _errors(self, state: Any, total: Tensor, users: int, sender: Sender, setting: Setting) -> _Errors:
        """The effect of `inner` on each update if `users` clients like `sender` are behind a sum, and its errors."""
        silent, d = max(0, setting.participants - users), setting.dim
        nothing = torch.zeros_like(total)
        other = Sender(0, setting.samples)
        idle = float(self._imitated(state, nothing, other, setting, many=True).square().mean()) if silent else 0.0
        direction, masked = self._direction(total, setting), users == 1 and idle == 0
        energy = float(total.square().sum())

        def at(length: float) -> tuple[float, float]:
            update = (direction * length).float().double()  # as it is sent
            made = self._imitated(state, update, sender, setting, many=users > 1)
            known = (made != 0).double() if masked else torch.ones_like(made)
            sent = float((known @ update.square()).sum().clamp(min=1e-60))
            shrink = float((made @ update).sum()) / sent
            error = float(((made - shrink * update) * known).square().sum() / known.sum().clamp(min=1))
            # a deviation from 1 within the noise of these few messages does not count as shrinking
            return 1.0 if (shrink - 1) ** 2 < 9 * error / sent else shrink, error

        # the length of the updates follows from that of the sum, with an error variance of a + b length^2
        long = math.sqrt(energy / users)
        short = long / 100
        (_, far), (shrink, near) = at(long), at(short)
        rise = max(far - near, 0.0) / max(long**2 - short**2, 1e-60)
        rest = energy - d * (users * max(near - rise * short**2, 0.0) + silent * idle)
        length = math.sqrt(max(rest, 1e-4 * energy) / users / max(shrink**2 + d * rise, 1e-12))
        shrink, error = at(length)
        longer = self._imitated(state, direction * length * _LONGER, sender, setting, many=users > 1)
        reach, omits = float((longer @ direction).mean()), float((longer[:, direction != 0] == 0).any())
        clip = reach if reach < 0.5 * shrink * length * _LONGER else _NEVER
        return _Errors(shrink, clip, users * (error + _ROUNDING**2) + silent * idle, omits)

    def _direction(self, total: Tensor, setting: Setting) -> Tensor:
        """[d] normal numbers of total length 1, with the same share of energy in each tensor as the sum."""
        # a defense that sends only the largest coordinates would send all nonzero coordinates of the sum itself
        drawn = setting.layout.split(normal(_KEY.child("direction"), (setting.dim,), torch.float64))
        sizes = [piece.norm() for piece in setting.layout.split(total)]
        pieces: list[Tensor] = [
            piece * (size / piece.norm().clamp(min=1e-30)) for piece, size in zip(drawn, sizes, strict=True)
        ]
        joined = setting.layout.join(pieces)
        return torch.as_tensor(joined / joined.norm().clamp(min=1e-30))

    def _imitated(self, state: Any, update: Tensor, sender: Sender, setting: Setting, *, many: bool = False) -> Tensor:
        """[times, d] decoded messages with this update, to which training noise is added first.

        They are those of the sender, or with `many` of as many clients from it on, which may differ in their noise.
        """
        made, std = [], self.training_noise(setting, sender.samples)
        for number in range(_TIMES):
            key = _KEY.child(number)
            client = sender.number + number * many
            link = Link(setting, Sender(client, sender.samples), key.child("shared"))
            noisy = update + std * normal(key.child("training"), (setting.dim,), torch.float64) if std else update
            wire, _ = self.encode(state, self.remember(setting), noisy.float(), link, key.child("private"))
            made.append(unpack_float64(wire, setting.dim))
        return torch.stack(made)


def aggregated(defense: Defense[Any, Any]) -> Defense[Any, Any]:
    """The defense as an aggregator sees it; a defense that superposes is returned unchanged, it shows only the sum.

    Raises:
        ValueError: each client sends a separate waveform, which secure aggregation cannot add up.
    """
    if defense.analog and not defense.superposes:
        raise ValueError(
            "secure aggregation needs digital messages, but with this defense each client sends a waveform"
        )
    return defense if defense.superposes else Aggregated(defense)


def summed(round_: Round, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The one message that an aggregator sees instead of these messages of a round."""
    if not messages or round_.defense.superposes:
        return tuple(messages)
    total = torch.stack([round_.read(message).double() for message in messages]).sum(0)
    first, others = messages[0], tuple(message.sender for message in messages[1:])
    images = sum(message.images for message in messages)
    return (first._replace(wire=pack_float64(total), shared=None, images=images, others=others),)
