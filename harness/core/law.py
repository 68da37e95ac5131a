"""Laws of messages as data: what a defense guarantees about its bytes, so that an audit can test it.

A law states the distribution of a message given everything but its noise: the update, the public state, the client's
memory and the shared key. `Law.read` turns a message into independent uniform numbers (Rosenblatt's transform): their
own probability integral transform for a density, and lo + v (hi - lo) with the auditor's own uniform v for a discrete
outcome between the cumulative probabilities lo and hi. One battery of tests then serves every mechanism.

A law is written in numpy and float64, apart from the code that it describes: a law that called the defense's own clip
would pass a wrong clip.

Source: Rosenblatt 1952, "Remarks on a multivariate transformation".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy import special
from torch import Tensor

from leakgauge.harness.core.codec import pack_levels, unpack_levels
from leakgauge.harness.core.rng import Key, integers, uniform
from leakgauge.harness.core.stats import Numbers

Integers = npt.NDArray[np.int64]

_HEADER = 1e-6
"""Relative difference that rounding may put between a sent scale and its definition."""


class LawError(ValueError):
    """The bytes are impossible under the law: wrong length, wrong header, or an outcome without probability."""


class Reading(NamedTuple):
    """A message, transformed by its law.

    Attributes:
        uniforms: [k]; independent and uniform on (0, 1) if the message follows the law.
        places: [k] int; the coordinate of the update that each number carries, -1 if it carries no single one.
        bits: [k] the lowest mantissa bit of each sent float; None: the message holds no floats.
    """

    uniforms: Numbers
    places: Integers
    bits: Integers | None = None


class StepLaw(NamedTuple):
    """What each local step does with the gradients of records.

    Attributes:
        clip: bound on the l2 norm of one record's gradient.
        noise: standard deviation of the noise in a step's sum of gradients, in units of the clip.
        share: probability with which a step takes a record, independently of the others.
        single: whether a round is one step, whatever the study sets.
    """

    clip: float
    noise: float
    share: float
    single: bool = False


class Law(ABC):
    """The law of one message."""

    from_shared: bool = False
    """Whether its randomness comes from the shared key, and not from the private one."""

    @abstractmethod
    def read(self, wire: bytes, own: Key) -> Reading:
        """The message as uniform numbers.

        Args:
            own: key of the auditor's own uniform numbers, for discrete outcomes.

        Raises:
            LawError: the bytes are impossible under the law.
        """


class Noise(ABC):
    """The law of noise in units of its scale."""

    @abstractmethod
    def uniforms(self, noise: Numbers) -> Numbers:
        """[k] uniform numbers of [k] draws."""


class Normal(Noise):
    """Independent standard normal numbers."""

    def uniforms(self, noise: Numbers) -> Numbers:
        """The normal cdf."""
        return np.asarray(special.ndtr(noise), np.float64)


class Laplacian(Noise):
    """Independent Laplace numbers of scale 1."""

    def uniforms(self, noise: Numbers) -> Numbers:
        """The Laplace cdf."""
        tail = 0.5 * np.exp(-np.abs(noise))
        return np.where(noise < 0, tail, 1 - tail)


@dataclass(frozen=True)
class StudentPairs(Noise):
    """Pairs of neighbors, each bivariate t with `degrees` degrees of freedom and an identity scale matrix."""

    degrees: float

    def uniforms(self, noise: Numbers) -> Numbers:
        """The cdf of each pair's first number, then of the second given the first."""
        first, second = noise.reshape(-1, 2).T
        # given the first number, the second is t with one more degree of freedom
        wide = np.sqrt((self.degrees + first**2) / (self.degrees + 1))
        pair = special.stdtr(self.degrees, first), special.stdtr(self.degrees + 1, second / wide)
        return np.stack(pair, 1).ravel()


@dataclass(frozen=True)
class Exact(Law):
    """A message without randomness: these bytes."""

    wire: bytes

    def read(self, wire: bytes, own: Key) -> Reading:
        """No numbers: the bytes are equal, or impossible."""
        if wire != self.wire:
            raise LawError("bytes other than those of a message without randomness")
        return Reading(np.zeros(0), np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False)
class Additive(Law):
    """A header of exact float32 numbers, then floats: `center` [k] plus `scale` times noise.

    Attributes:
        scale: a number, or [k].
        places: as in `Reading`; by default number i carries coordinate i.
        header: the float32 numbers before the noisy ones.
        dtype: of the noisy numbers on the wire.
        fair: whether their lowest mantissa bits are fair coins: noise that is added in float32 leaves traces in them.
    """

    center: Numbers
    noise: Noise
    scale: float | Numbers
    places: Integers | None = None
    header: Numbers = ()  # type: ignore[assignment]  # an empty array
    dtype: str = "<f4"
    fair: bool = True

    def read(self, wire: bytes, own: Key) -> Reading:
        """By the cdf of the noise."""
        body, floats = split(wire, self.header), np.dtype(self.dtype)
        expect_size(body, floats.itemsize * len(self.center))
        sent = np.frombuffer(body, floats)
        uniforms = self.noise.uniforms((sent.astype(np.float64) - self.center) / self.scale)
        bits = (np.frombuffer(body, f"<u{floats.itemsize}") & 1).astype(np.int64)
        if not self.fair:
            bits = integers(own, len(bits), 2)
        return Reading(uniforms, np.arange(len(sent)) if self.places is None else self.places, bits)


@dataclass(frozen=True, eq=False)
class Choices(Law):
    """A header of exact float32 numbers, then packed outcomes, of which outcome j has the law `chances[j]`.

    Attributes:
        chances: [k, m] probabilities of the m outcomes of each number, or [1, m] if all have one law.
        width: bits of an outcome on the wire.
        places: [k], as in `Reading`; by default number i carries coordinate i.
    """

    chances: Numbers
    width: int
    places: Integers | None = None
    header: Numbers = ()  # type: ignore[assignment]  # an empty array

    def read(self, wire: bytes, own: Key) -> Reading:
        """By the cumulative probabilities, rare outcomes first: errors then move all numbers alike."""
        places = np.arange(len(self.chances)) if self.places is None else self.places
        found, rows = (
            outcomes(split(wire, self.header), len(places), self.width),
            np.arange(len(places)) % len(self.chances),
        )
        if found.max(initial=0) >= self.chances.shape[1]:
            raise LawError(f"an outcome of {found.max()}, expected at most {self.chances.shape[1] - 1}")
        chance = self.chances[rows, found]
        if not chance.all():
            raise LawError("an outcome that has no probability")
        order = np.argsort(self.chances, 1, kind="stable")
        rising = np.cumsum(np.take_along_axis(self.chances, order, 1), 1)
        upper = rising[rows, np.argsort(order, 1)[rows, found]]
        within = uniform(own, (len(rows),), dtype=torch.float64).numpy()
        return Reading((upper - chance * within) / rising[rows, -1], places)


def split(wire: bytes, header: Numbers) -> bytes:
    """What follows the header.

    Raises:
        LawError: the header does not hold these float32 numbers.
    """
    size = 4 * len(header)
    if len(wire) < size:
        raise LawError(f"{len(wire)} bytes, expected a header of {size}")
    found, expected = np.frombuffer(wire[:size], "<f4").astype(np.float64), np.asarray(header, np.float64)
    room = _HEADER * np.abs(expected) + 1e-12 * np.abs(expected).max(initial=0.0)
    if not (np.abs(found - expected) <= room).all():
        raise LawError("a header that is not the declared function of the update")
    return wire[size:]


def expect_size(body: bytes, size: int) -> None:
    """Raise LawError unless there are exactly this many bytes."""
    if len(body) != size:
        raise LawError(f"{len(body)} bytes after the header, expected {size}")


def outcomes(body: bytes, count: int, width: int) -> Integers:
    """[count] packed outcomes of `width` bits.

    Raises:
        LawError: another number of bytes, or padding that is not zero.
    """
    expect_size(body, -(-count * width // 8))
    found = unpack_levels(body, count, width)
    if pack_levels(found, width) != body:
        raise LawError("padding bits that are not zero")
    return found


def clamped(update: Tensor, bound: float) -> Numbers:
    """[d] float64: each coordinate moved into [-bound, bound]."""
    return np.clip(numbers(update), -bound, bound)


def projected(update: Tensor, bound: float) -> Numbers:
    """[d] float64: the update, moved to the nearest point of the ball of radius `bound` in l2 norm."""
    found = numbers(update)
    largest = np.abs(found).max(initial=0.0)
    if largest == 0:
        return found
    norm = largest * float(np.sqrt(np.square(found / largest).sum()))
    return found * (bound / norm) if norm > bound else found


def numbers(update: Tensor) -> Numbers:
    """[d] float64: a copy of the update."""
    return update.detach().cpu().double().numpy().copy()
