"""Distributions of messages as data: a defense's guarantees about its bytes, which an audit can test.

A distribution states the distribution of a message given everything except its noise: the update, the public state, the
client's memory and the shared key. `MessageDistribution.read` turns a message into independent uniform numbers
(Rosenblatt's transform): the probability integral transform for a density, and lo + v (hi - lo) with the auditor's own
uniform v for a discrete outcome between the cumulative probabilities lo and hi. The same tests then work for every
mechanism.

A distribution is written in numpy and float64, separately from the code that it describes: a distribution that called
the defense's own clip would accept a wrong clip.

Source: Rosenblatt 1952, "Remarks on a multivariate transformation".
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy import special
from torch import Tensor

from leakgauge.harness.core.codec import unpack_levels
from leakgauge.harness.core.concentrated import Concentrated
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.gaussian import gaussian_delta, gaussian_epsilon
from leakgauge.harness.core.rng import Key, integers, uniform
from leakgauge.harness.core.stats import Numbers

Integers = npt.NDArray[np.int64]

SHARES = (-0.25, -0.05, 0.02, 0.035, 0.05, 0.1, 0.25, 0.5, 0.9)
"""Shares of the noise that the alternatives of a discrete distribution lack; a negative share means more noise."""

DISTINCT = 8
"""Numbers with continuous noise from which on equal messages are no chance."""

_FEW = (0.01, 0.1)  # further alternatives, in which this share of the message's numbers lacks nearly all noise
_HEADER = 0.500001  # how far a sent scale may be from its definition, in float32 steps: its rounding; at a tie, either


_COARSE = 2.0**-21  # half the distance of two floats, in scales of the noise, from which their ties would be noticed


class DistributionError(ValueError):
    """The bytes are impossible: wrong length, wrong header, or an outcome without probability."""


class Reading(NamedTuple):
    """A message, transformed by its distribution.

    Attributes:
        uniforms: [k]; independent and uniform on (0, 1) if the message follows the distribution.
        places: [k] int; the coordinate of the update that each number carries, -1 if it carries no single coordinate.
        bits: [k] the lowest mantissa bit of each sent float; None: the message holds no floats.
        lowest: [k] lowest mantissa bits that may be biased, but must not depend on the signs of the update.
        ratios: [a] for a discrete distribution, logarithms of the message's likelihood ratios, alternatives over
            distribution, with the alternatives of `SHARES` first. The ratios' mean is at most 1 under the distribution.
            None: the noise is continuous.
    """

    uniforms: Numbers
    places: Integers
    bits: Integers | None = None
    lowest: Integers | None = None
    ratios: Numbers | None = None


class Branches(NamedTuple):
    """A message under a distribution that takes one of two branches at random, up to a common factor.

    Attributes:
        likelier, lesser: logarithms of the message's likelihoods in the two branches.
        gain: the distribution's epsilon minus the logit of the likelier branch's probability.
    """

    likelier: float
    lesser: float
    gain: float


class StepDistribution(NamedTuple):
    """What each local step does with the gradients of records.

    Attributes:
        clip: bound on the l2 norm of one record's gradient.
        noise: standard deviation of the noise in a step's sum of gradients, in units of the clip.
        share: probability with which a step takes a record, independently of the others.
        single: whether a round always has one step.
    """

    clip: float
    noise: float
    share: float
    single: bool = False


class PairLoss(NamedTuple):
    """The privacy loss between the distributions of two messages, or of several rounds of them: parts add up.

    Attributes:
        pure: the loss of parts whose largest log-likelihood ratio is bounded, as for Laplace noise and choices.
        squares: mu^2 of parts that are N(0, 1) against N(mu, 1); infinite: a message shows which input it is of.
        attained: whether these are the losses of the messages themselves; False: upper bounds.
        rho: of the parts in `pure`, as in `Concentrated`; infinite: only what follows from `pure` is known.
    """

    pure: float = 0.0
    squares: float = 0.0
    attained: bool = True
    rho: float = math.inf

    def plus(self, other: PairLoss) -> PairLoss:
        """The loss of both."""
        attained, rho = self.attained and other.attained, math.inf
        if math.isfinite(min(self.rho, other.rho)):
            rho = sum(min(one.rho, one.pure**2 / 2) for one in (self, other))
        return PairLoss(self.pure + other.pure, self.squares + other.squares, attained, rho)

    def times(self, rounds: int) -> PairLoss:
        """The loss of so many rounds."""
        return PairLoss(rounds * self.pure, rounds * self.squares, self.attained, rounds * self.rho)

    def ends(self, delta: float) -> tuple[float, float]:
        """Epsilon at delta: what the pair attains, 0 if that is not known, and an upper bound.

        At delta > 0, bounded losses are known only by their sum and by `rho`, which are upper bounds.
        """
        high = self.pure + (gaussian_epsilon(math.sqrt(self.squares), delta) if self.squares else 0.0)
        if math.isfinite(self.rho):
            high = min(high, Concentrated(self.rho + self.squares / 2).epsilon(delta))
        return high if self.attained and (delta == 0 or not self.pure) else 0.0, high

    @property
    def error(self) -> float:
        """A lower bound of the mean of the two error rates of any test: (1 - total variation distance) / 2.

        By Pinsker's inequality, parts of divergence rho have a distance of at most sqrt(rho / 2).
        """
        apart = min(math.tanh(self.pure / 2), math.sqrt(self.rho / 2))
        return (1 - apart) * (1 - gaussian_delta(math.sqrt(self.squares), 0.0)) / 2


REVEALED = PairLoss(squares=math.inf)
"""The loss where one message is impossible under the other distribution."""


class MessageDistribution(ABC):
    """The distribution of one message."""

    from_shared: bool = False
    """Whether the distribution is over the shared key, which decides the message alone or with the private key."""

    @property
    def given_shared(self) -> MessageDistribution | None:
        """The distribution given the shared key, by private randomness alone; None: there is none, or it is unknown."""
        return None if self.from_shared else self

    @property
    def product(self) -> bool:
        """Whether the numbers of a message are independent given the update.

        If number i carries coordinate i, its distribution then depends on no other coordinate, as long as the header
        stays the same. An audit may then count each number as a separate trial.
        """
        return False

    quadratic = False
    """Whether reading takes time and memory that grow with the square of the count of numbers."""

    noiseless = False
    """Whether the message has no randomness of its own, so that its reading holds the auditor's numbers."""

    @property
    def distinct(self) -> bool:
        """Whether two messages are equal with negligible probability, because all of their numbers have noise."""
        return False

    redraws = False
    """Whether the update decides which numbers are drawn, so that the same keys may give other noise to it."""

    def agreement(self, one: bytes, other: bytes) -> tuple[Numbers, Numbers] | None:
        """[k] whether outcomes of two messages are equal, and the probability that independent ones are; None: unknown.

        The k outcomes of a message are independent of each other.
        """
        return None

    def loss(self, other: MessageDistribution, among: Integers | None = None) -> PairLoss | None:
        """The privacy loss between this distribution and another one of the same defense; None: unknown.

        Args:
            among: only the header and the numbers that carry these coordinates count; None: the whole message.
        """
        return None

    def branches(self, wire: bytes) -> Branches | None:
        """The message under both branches of the distribution; None: the distribution has no branches."""
        return None

    @abstractmethod
    def read(self, wire: bytes, own: Key) -> Reading:
        """The message as uniform numbers.

        Args:
            own: key of the auditor's own uniform numbers, for discrete outcomes.

        Raises:
            DistributionError: the bytes are impossible under the distribution.
        """


class Noise(ABC):
    """The distribution of noise, in units of the noise's scale."""

    product: ClassVar[bool] = True
    """Whether the numbers are independent."""

    @abstractmethod
    def uniforms(self, noise: Numbers) -> Numbers:
        """[k] uniform numbers of [k] draws."""

    def loss(self, moved: Numbers) -> PairLoss | None:
        """The privacy loss if the noise's center moves by `moved` [k], in units of its scale; None: unknown."""
        return None


@dataclass(frozen=True)
class Normal(Noise):
    """Independent standard normal numbers."""

    def uniforms(self, noise: Numbers) -> Numbers:
        """The normal cdf."""
        return np.asarray(special.ndtr(noise), np.float64)

    def loss(self, moved: Numbers) -> PairLoss:
        """N(0, 1) against N(|moved|, 1)."""
        return PairLoss(squares=float(np.square(moved).sum()))


@dataclass(frozen=True)
class Laplacian(Noise):
    """Independent Laplace numbers of scale 1."""

    def uniforms(self, noise: Numbers) -> Numbers:
        """The Laplace cdf."""
        tail = 0.5 * np.exp(-np.abs(noise))
        return np.where(noise < 0, tail, 1 - tail)

    def loss(self, moved: Numbers) -> PairLoss:
        """The l1 norm, and half of the squared l2 norm (`laplace_l2`)."""
        return PairLoss(float(np.abs(moved).sum()), rho=float(np.square(moved).sum()) / 2)


@dataclass(frozen=True)
class StudentPairs(Noise):
    """Pairs of neighbors, each bivariate t with `degrees` degrees of freedom and an identity scale matrix."""

    product = False

    degrees: float

    def uniforms(self, noise: Numbers) -> Numbers:
        """The cdf of each pair's first number, then of the second given the first."""
        first, second = noise.reshape(-1, 2).T
        # given the first number, the second is t with one more degree of freedom
        wide = np.sqrt((self.degrees + first**2) / (self.degrees + 1))
        pair = special.stdtr(self.degrees, first), special.stdtr(self.degrees + 1, second / wide)
        return np.stack(pair, 1).ravel()

    def loss(self, moved: Numbers) -> PairLoss:
        """The sum over the pairs of the largest log ratio of two densities at their distance r.

        On the line through both centers, the ratio ((nu + (x + r)^2) / (nu + x^2))^(nu / 2 + 1) is largest where
        x (x + r) = nu.
        """
        r = np.linalg.norm(np.append(moved, np.zeros(len(moved) % 2)).reshape(-1, 2), axis=1)
        x = (np.sqrt(r**2 + 4 * self.degrees) - r) / 2
        each = (self.degrees / 2 + 1) * np.log1p((r**2 + 2 * x * r) / (self.degrees + x**2))
        return PairLoss(float(each.sum()))


@dataclass(frozen=True)
class Exact(MessageDistribution):
    """The distribution of a message without randomness: exactly these bytes."""

    wire: bytes

    def loss(self, other: MessageDistribution, among: Integers | None = None) -> PairLoss | None:
        """None at all if the bytes are equal, else everything."""
        return (PairLoss() if other.wire == self.wire else REVEALED) if isinstance(other, Exact) else None

    def read(self, wire: bytes, own: Key) -> Reading:
        """An empty reading: the bytes are either equal or impossible."""
        if wire != self.wire:
            raise DistributionError("expected the exact bytes of a message without randomness, got others")
        return Reading(np.zeros(0), np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False)
class Additive(MessageDistribution):
    """A header of exact float32 numbers, then floats: `center` [k] plus `scale` times noise.

    Attributes:
        scale: a number, or [k].
        places: as in `Reading`; by default number i carries coordinate i.
        header: the float32 numbers before the noisy ones.
        dtype: type of the noisy numbers on the wire.
        fair: whether their lowest mantissa bits are fair coins; noise that is added in float32 makes them unfair.
    """

    center: Numbers
    noise: Noise
    scale: float | Numbers
    places: Integers | None = None
    header: Numbers = ()  # type: ignore[assignment]  # an empty array
    dtype: str = "<f4"
    fair: bool = True

    @property
    def product(self) -> bool:
        """Whether the numbers of its noise are independent."""
        return self.noise.product

    @property
    def distinct(self) -> bool:
        """Whether so many numbers have noise; a single float32 repeats in one of a million pairs."""
        return len(self.center) >= DISTINCT and bool(np.all(np.asarray(self.scale) > 0))

    def loss(self, other: MessageDistribution, among: Integers | None = None) -> PairLoss | None:
        """That of the noise at the distance of the centers; unknown if the scales differ."""
        if not isinstance(other, Additive) or not np.array_equal(self.scale, other.scale) or self.noise != other.noise:
            return None
        if not same_header(self.header, other.header):
            return REVEALED
        return moved_by(self.noise, carried(self.center - other.center, self.places, among), self.scale)

    def read(self, wire: bytes, own: Key) -> Reading:
        """Transform the numbers by the cdf of the noise.

        Where floats are coarse beside the noise, a number stands for all reals that round to it: its uniform number is
        the auditor's own draw between the cdf's values at both ends.
        """
        body, floats = split(wire, self.header), np.dtype(self.dtype)
        expect_size(body, floats.itemsize * len(self.center))
        sent = np.frombuffer(body, floats)
        noise, half = (sent.astype(np.float64) - self.center) / self.scale, np.spacing(np.abs(sent)) / 2 / self.scale
        uniforms = self.noise.uniforms(noise)
        if self.product and half.max(initial=0.0) > _COARSE:
            low, high = (self.noise.uniforms(noise + sign * half) for sign in (-1, 1))
            uniforms = low + (high - low) * uniform(own.child("rounding"), (len(sent),), dtype=torch.float64).numpy()
        bits = (np.frombuffer(body, f"<u{floats.itemsize}") & 1).astype(np.int64)
        if not self.fair:
            bits = integers(own, len(bits), 2)
        return Reading(uniforms, np.arange(len(sent)) if self.places is None else self.places, bits)


@dataclass(frozen=True, eq=False)
class Choices(MessageDistribution):
    """A header of exact float32 numbers, then packed outcomes; number i has outcome j with probability chances[i, j].

    Attributes:
        chances: [k, m] probabilities of the m outcomes of each number, or [1, m] if all have one distribution.
        width: bits of an outcome on the wire.
        places: [k], as in `Reading`; by default number i carries coordinate i.
        others: [len(SHARES), ...] the probabilities if the channel lacks these shares of its noise; an audit tests
            them against `chances`. By convention, the channel's epsilon then is epsilon / (1 - share).
    """

    chances: Numbers
    width: int
    places: Integers | None = None
    header: Numbers = ()  # type: ignore[assignment]  # an empty array
    others: Numbers | None = None

    @property
    def product(self) -> bool:
        """True: outcomes are drawn independently."""
        return True

    def loss(self, other: MessageDistribution, among: Integers | None = None) -> PairLoss | None:
        """The sum over the numbers of the largest log ratio of an outcome's probabilities, in the worse direction."""
        if not isinstance(other, Choices) or self.chances.shape != other.chances.shape:
            return None
        count = len(self.chances) if self.places is None else len(self.places)
        if not same_header(self.header, other.header):
            return REVEALED
        chances, others = (each.chances / each.chances.sum(1, keepdims=True) for each in (self, other))
        if ((chances > 0) != (others > 0)).any():
            return REVEALED
        ratios = np.log(chances, where=chances > 0, out=np.zeros_like(chances))
        ratios -= np.log(others, where=others > 0, out=np.zeros_like(others))
        every = [each.max(1)[np.arange(count) % len(each)] for each in (ratios, -ratios)]
        return PairLoss(float(max(carried(each, self.places, among).sum() for each in every)))

    def agreement(self, one: bytes, other: bytes) -> tuple[Numbers, Numbers]:
        """Equal outcomes, and the sum of the squared probabilities of each number's outcomes."""
        count = len(self.chances) if self.places is None else len(self.places)
        drawn = [outcomes(split(wire, self.header), count, self.width) for wire in (one, other)]
        chances = self.chances / self.chances.sum(1, keepdims=True)
        return (drawn[0] == drawn[1]).astype(float), np.square(chances).sum(1)[np.arange(count) % len(chances)]

    def read(self, wire: bytes, own: Key) -> Reading:
        """Transform by the cumulative probabilities, rare outcomes first, so that errors shift all numbers alike."""
        places = np.arange(len(self.chances)) if self.places is None else self.places
        sent = outcomes(split(wire, self.header), len(places), self.width)
        rows = np.arange(len(places)) % len(self.chances)
        if sent.max(initial=0) >= self.chances.shape[1]:
            raise DistributionError(f"an outcome of {sent.max()}, expected at most {self.chances.shape[1] - 1}")
        chance = self.chances[rows, sent]
        if not chance.all():
            raise DistributionError("an outcome has probability 0")
        order = np.argsort(self.chances, 1, kind="stable")
        rising = np.cumsum(np.sort(self.chances, 1), 1)
        upper = rising[rows, np.argsort(order, 1)[rows, sent]]
        within = uniform(own, (len(rows),), dtype=torch.float64).numpy()
        uniforms = (upper - chance * within) / rising[rows, -1]
        if self.others is None:
            return Reading(uniforms, places)
        with np.errstate(divide="ignore"):
            ratios = np.log(self.others[:, rows, sent]) - np.log(chance)
        return Reading(uniforms, places, ratios=evidence(ratios))


def same_header(one: Numbers, other: Numbers) -> bool:
    """Whether two headers are the same float32 numbers."""
    return np.array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def carried(values: Numbers, places: Integers | None, among: Integers | None) -> Numbers:
    """The values [k] of the numbers that carry these coordinates, and 0 for others; None: all are kept."""
    if among is None:
        return values
    return np.where(np.isin(np.arange(len(values)) if places is None else places, among), values, 0.0)


def moved_by(noise: Noise, moved: Numbers, scale: float | Numbers) -> PairLoss | None:
    """The loss of noise whose center moves by `moved` [k]; everything where a number moves and has no noise."""
    scales = np.broadcast_to(np.asarray(scale, np.float64), moved.shape)
    if moved[scales == 0].any():
        return REVEALED
    return noise.loss(np.divide(moved, scales, where=scales > 0, out=np.zeros_like(moved)))


def powers(chances: Numbers) -> Numbers:
    """[len(SHARES), ..., m] distributions [..., m] to the powers 1 / (1 - share), normalized, as for Laplace noise."""
    raised = np.asarray(chances ** (1 / (1 - np.array(SHARES))).reshape(-1, *(1,) * chances.ndim), np.float64)
    return np.asarray(raised / raised.sum(-1, keepdims=True), np.float64)


def evidence(ratios: Numbers) -> Numbers:
    """[a] log likelihood ratios of a message from those of its independent numbers, `ratios` [len(SHARES), k].

    In the alternatives, all numbers lack a share of their noise, or a few numbers lack nearly all noise.
    """
    few = [np.logaddexp(np.log1p(-share), np.log(share) + ratios[-1]).sum() for share in _FEW]
    return np.append(ratios.sum(1), few)


def split(wire: bytes, header: Numbers) -> bytes:
    """The bytes after the header.

    Raises:
        DistributionError: the header does not hold these float32 numbers.
    """
    size = 4 * len(header)
    if not size:
        return wire
    if len(wire) < size:
        raise DistributionError(f"{len(wire)} bytes, expected a header of {size}")
    sent, expected = np.frombuffer(wire[:size], "<f4").astype(np.float64), np.asarray(header, np.float64)
    step = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
    if not (np.abs(sent - expected) <= _HEADER * step).all():
        raise DistributionError("the header is not the declared function of the update")
    return wire[size:]


def expect_size(body: bytes, size: int) -> None:
    """Raise DistributionError unless there are exactly this many bytes."""
    if len(body) != size:
        raise DistributionError(f"{len(body)} bytes after the header, expected {size}")


def outcomes(body: bytes, count: int, width: int) -> Integers:
    """[count] packed outcomes of `width` bits.

    Raises:
        DistributionError: the number of bytes is wrong, or the padding is not zero.
    """
    expect_size(body, -(-count * width // 8))
    try:
        return unpack_levels(body, count, width)
    except MessageError as error:
        raise DistributionError(str(error)) from error


def clamped(update: Tensor, bound: float) -> Numbers:
    """[d] float64: the update with each coordinate clamped to [-bound, bound]."""
    return numbers(update).clip(-bound, bound)


def projected(update: Tensor, bound: float, order: int = 2) -> Numbers:
    """[d] float64: the update, scaled down to an l2 norm of at most `bound`, or to an l1 norm (order 1)."""
    values = numbers(update)
    largest = np.abs(values).max(initial=0.0)
    if largest == 0:
        return values
    shares = np.abs(values / largest)
    norm = largest * float(np.sqrt(np.square(shares).sum()) if order == 2 else shares.sum())
    return values * (bound / norm) if norm > bound else values


def numbers(update: Tensor) -> Numbers:
    """[d] float64: a copy of the update."""
    return update.detach().cpu().numpy().astype(np.float64)
