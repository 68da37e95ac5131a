"""The distribution of CEPAM's messages: the error of the decoded update, for a receiver with the shared key."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from leakgauge.defenses._cepam import wire as code
from leakgauge.defenses._cepam.wire import gaussian_radii, laplace_radii
from leakgauge.harness.core.contract import Link
from leakgauge.harness.core.distribution import (
    REVEALED,
    DistributionError,
    Integers,
    MessageDistribution,
    Noise,
    Normal,
    PairLoss,
    Reading,
    carried,
    moved_by,
    numbers,
)
from leakgauge.harness.core.rng import Key, uniform
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True, eq=False)
class Decoded(MessageDistribution):
    """The message that encodes `sent` under the shared key; whatever was sent, the decoding error is the noise.

    Only the error is random: given the shared key, a message is a function of the update, and each of its bytes is
    compared. If n = 1, the message is also a function of the decoded update, so it holds nothing else of the update.

    Attributes:
        sent: [d] the float32 numbers that are quantized, as float64.
        unit: the unit of noise and bound, a float32; 0: there is no noise, and only the header is sent.
        header: the bytes before those of the quantizer.
        scale: scale of the noise, in units. bound: bound on the l2 norm of `sent`, in units.
        dimension: n; 1 unless the noise is normal.
    """

    from_shared = True

    sent: Numbers
    link: Link
    unit: float
    header: bytes
    noise: Noise
    scale: float
    bound: float
    dimension: int = 1

    def loss(self, other: MessageDistribution, among: Integers | None = None) -> PairLoss | None:
        """That of the decoded update, whose error is the noise: for a receiver that sees no more than it."""
        if not isinstance(other, Decoded) or (self.noise, self.scale) != (other.noise, other.scale):
            return None
        if self.header != other.header or self.unit != other.unit:
            return REVEALED
        return moved_by(self.noise, carried(self.sent - other.sent, None, among), self.scale * self.unit)

    def read(self, wire: bytes, own: Key) -> Reading:
        """Reads by the cdf of the noise; without noise, the reading holds the auditor's own numbers."""
        places = np.arange(len(self.sent))
        if self.unit == 0:
            _expect(wire, self.header)
            return Reading(uniform(own, (len(places),), dtype=torch.float64).numpy(), places)
        n, shared, scale = self.dimension, self.link.key, self.scale * self.unit
        x, radii = np.pad(self.sent, (0, -len(places) % n)).reshape(n, -1).T, shared.child("radii")
        count = len(x)
        drawn = (
            gaussian_radii(radii, count, n, scale)
            if isinstance(self.noise, Normal)
            else laplace_radii(radii, count, scale)
        )
        spread, dithers = self.bound * self.unit / math.sqrt(len(places)), shared.child("dithers")
        _expect(wire, self.header + code.pack(x, drawn, spread, dithers))
        points = code.unpack(wire[len(self.header) :], drawn, spread, dithers, n)
        if n == 1:
            _expect(wire, self.header + code.pack(points, drawn, spread, dithers))
        errors = points.T.reshape(-1)[: len(places)] - self.sent
        return Reading(self.noise.uniforms(errors / scale), places)


def scaled(
    update: Vector, link: Link, gamma: float, noise: Noise, scale: float, dimension: int = 1
) -> MessageDistribution:
    """The distribution if noise is in units of |u| / gamma, which is sent as float32 before the rest."""
    unit = np.float32(np.linalg.norm(numbers(update)) / gamma)
    header = np.array(unit, "<f4").tobytes()
    return Decoded(numbers(update), link, float(unit), header, noise, scale, gamma, dimension)


def clipped(
    update: Vector, link: Link, clip: float, noise: Noise, scale: float, dimension: int = 1
) -> MessageDistribution:
    """The distribution if the update is clipped to an l2 norm of `clip` and noise is in units of the update."""
    # as float32, because rounding decides near the edge of a cell
    shorter = np.float32(clip / max(clip, float(np.linalg.norm(numbers(update)))))
    sent = np.asarray(update.numpy() * shorter, np.float64)
    return Decoded(sent, link, 1.0, b"", noise, scale, clip, dimension)


def _expect(wire: bytes, expected: bytes) -> None:
    if wire != expected:
        raise DistributionError(
            f"{len(wire)} bytes differ from the {len(expected)} expected for this update and shared key"
        )
