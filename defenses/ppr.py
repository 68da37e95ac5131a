"""Poisson private representation: PrivUnit's vector, sent as the number of one of many shared random vectors."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from leakgauge.defenses._common.clip import DEFAULT_EPSILON
from leakgauge.defenses._privunit import Channel, OnSphere, best_cap
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Arithmetic, Claim, Proof, Unit, added_up, claim_over
from leakgauge.harness.core.codec import BitReader, BitWriter, pack_float32, width_of
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import Integers, MessageDistribution, PairLoss, Reading
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Vector

_STRETCHES = 60  # stretches of the times: [0, 1), [1, 2), [2, 4), ...; points after 2^59 are not searched
_WIDTH = 6  # bits of a stretch's number
_MOST = 12.0  # largest epsilon of PrivUnit: a search takes a small multiple of e^epsilon vectors
_EARLY = 8  # stretches whose points the distribution given the shared key knows
_TOGETHER = 1 << 22  # numbers of the vectors that are drawn before their densities are computed


class _Points:
    """The shared Poisson process of rate 1 on times [0, inf), with a uniform unit vector for each point.

    Stretch m has a Poisson number of points, each of which follows from its own key.
    """

    def __init__(self, shared: Key, dim: int) -> None:
        self.key, self.dim = shared.child("points"), dim

    def start(self, stretch: int) -> float:
        return 2.0 ** (stretch - 1) if stretch else 0.0

    def count(self, stretch: int) -> int:
        return int(rng.poisson(self.key.child(stretch, "count"), max(self.start(stretch), 1.0), 1)[0])

    def point(self, stretch: int, number: int) -> tuple[float, Tensor]:
        """The time, and the vector [d] float64."""
        stream = rng.shared_stream(self.key.child(stretch, number))
        time = self.start(stretch) + max(self.start(stretch), 1.0) * float(stream.random())
        drawn = torch.from_numpy(stream.standard_normal(self.dim))
        return time, drawn.div_(torch.linalg.vector_norm(drawn))


@functools.lru_cache(1)
def _early(shared: Key, dim: int) -> tuple[list[tuple[int, int]], Numbers, Numbers]:
    """The points of the first stretches: names, times [n] and vectors [n, d]."""
    points = _Points(shared, dim)
    names = [(stretch, number) for stretch in range(_EARLY) for number in range(points.count(stretch))]
    times, vectors = zip(*(points.point(*name) for name in names), strict=True)
    return names, np.array(times), torch.stack(vectors).numpy()


@dataclass(frozen=True, eq=False)
class _OfPoint(MessageDistribution):
    """The distribution of the point's number given the shared key."""

    defense: PPR
    vector: OnSphere
    link: Link

    def read(self, wire: bytes, own: Key) -> Reading:
        """By the weights of the early points, given that it is one of them; else the auditor's own number."""
        names, times, vectors = _early(self.link.key, self.link.setting.dim)
        name = self.defense.point(wire, self.link.key, self.link.setting)
        at = rng.uniform(own, (1,), dtype=torch.float64).numpy()
        if name in names:
            weights = np.exp(self.defense.alpha * (self.vector.log_density(vectors) - np.log(times)))
            place = names.index(name)
            at = (weights[:place].sum() + at * weights[place]) / weights.sum()
        return Reading(at, np.full(1, -1))


@dataclass(frozen=True, eq=False)
class _OfVector(MessageDistribution):
    """The distribution of the decoded vector, over all shared keys; with one shared key, a bound of the loss."""

    defense: PPR
    vector: OnSphere
    link: Link
    from_shared = True

    @property
    def given_shared(self) -> MessageDistribution:
        """That of the point's number."""
        return _OfPoint(self.defense, self.vector, self.link)

    def loss(self, other: MessageDistribution, among: Integers | None = None) -> PairLoss | None:
        """2 alpha times that of the vectors: the weights of a point and of all points differ by alpha times it each."""
        one = self.vector.loss(other.vector, among) if isinstance(other, _OfVector) else None
        return None if one is None else PairLoss(2 * self.defense.alpha * one.pure, attained=one.pure == 0)

    def read(self, wire: bytes, own: Key) -> Reading:
        """The decoded vector as PrivUnit's."""
        return self.vector.read(pack_float32(self.defense.vector(wire, self.link.key, self.link.setting)), own)


@dataclass(frozen=True)
class PPR(Defense[None, None]):
    """Poisson private representation of PrivUnit: a message is the number of a shared vector.

    Client and server share a Poisson process of times T_i with uniform unit vectors z_i. Point i has the weight
    (r_i / T_i)^alpha, with r_i PrivUnit's density of z_i relative to the uniform one. The client draws a point with
    probability proportional to its weight, as the first arrival among exponential clocks, and sends its number.

    Args:
        clip, form: as in `PrivUnit`.
        epsilon: the proved epsilon of one message; PrivUnit has epsilon / (2 alpha), at most 12.
        alpha: above 1. Near 1, numbers have more bits; PrivUnit has a larger epsilon.

    Guarantees:
        Over all shared keys, the decoded vector has PrivUnit's distribution, so that the estimate is unbiased and has
        PrivUnit's error. Not exact: points after the time 2^59 are never sent; their share of the weight is about
        (r 2^-59)^(alpha - 1), with r <= e^epsilon the largest density of PrivUnit.
        Messages have 6 + ceil(log2 n) bits, padded to bytes, for the n points of a stretch of times that doubles the
        time.
        Without the shared key, a message says nothing of the update's direction: its number has the same distribution
        for all directions.

    Raises:
        ValueError: a parameter is out of range.

    Source: Liu, Chen, Ozgur, Li 2024, "Universal exact compression of differentially private mechanisms", Poisson
        private representation, and 2 alpha epsilon for pure privacy. Differs: the points are numbered by stretches of
        time, which gives random access to late points, instead of by their order.
    """

    arithmetic: ClassVar[Arithmetic] = Arithmetic.ROUNDING_SAFE

    clip: float = 1.0
    epsilon: float = DEFAULT_EPSILON
    alpha: float = 2.0
    form: Literal["direction", "ball"] = "direction"

    def __post_init__(self) -> None:
        positive(clip=self.clip, epsilon=self.epsilon)
        if self.form not in ("direction", "ball"):
            raise ValueError(f"expected form direction or ball, got form={self.form!r}")
        if not 1 < self.alpha < math.inf:
            raise ValueError(f"expected alpha > 1, got alpha={self.alpha}")
        if self.mechanism.epsilon > _MOST:
            raise ValueError(f"expected epsilon / (2 alpha) <= {_MOST:g}, got {self.mechanism.epsilon:.6g}")

    @property
    def mechanism(self) -> Channel:
        """The PrivUnit that is simulated."""
        return Channel(self.clip, self.epsilon / (2 * self.alpha), self.form)

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Find the point whose clock, exponential with its weight as rate, rings first.

        A point of a stretch that starts at T can only be first if its unit clock rings before first * (r / T)^alpha,
        with r the largest density: only such points are looked at.
        """
        check_update(update)
        values, mechanism = update.detach().cpu().double(), self.mechanism
        points = _Points(link.key, values.numel())
        largest = best_cap(values.numel(), mechanism.epsilon).density
        first, found = math.inf, (0, 0, 1)
        for stretch in range(_STRETCHES):
            own, start, count = private.child(stretch), points.start(stretch), points.count(stretch)
            late = math.exp(min(math.log(first) + self.alpha * (largest - math.log(start)), 7.0)) if start else math.inf
            chance = -math.expm1(-late)
            several = int(rng.binomial(own.child("count"), count, np.array([chance]))[0])
            if not several:
                continue
            looked = rng.subset(own.child("which"), count, several)
            place = rng.uniform(own.child("clock"), (several,), dtype=torch.float64).numpy()
            clocks = -np.log1p(-chance * place)
            together = max(1, _TOGETHER // values.numel())
            for begin in range(0, several, together):
                part = looked[begin : begin + together].tolist()
                times, vectors = zip(*(points.point(stretch, number) for number in part), strict=True)
                density = mechanism.log_density(values, torch.stack(vectors), blurred=False, rounding=0.0).numpy()
                with np.errstate(divide="ignore"):
                    rings = clocks[begin : begin + together] * np.exp(self.alpha * (np.log(times) - density))
                if rings.min() < first:
                    first, found = float(rings.min()), (stretch, part[int(rings.argmin())], count)
        writer = BitWriter()
        writer.put_number(found[0], _WIDTH)
        writer.put_number(found[1], width_of(found[2]))
        return writer.wire(), None

    def vector(self, received: bytes, shared: Key, setting: Setting) -> Tensor:
        """[d] float64: the unit vector of the point in a message; raises as `point`."""
        return _Points(shared, setting.dim).point(*self.point(received, shared, setting))[1]

    def point(self, received: bytes, shared: Key, setting: Setting) -> tuple[int, int]:
        """The stretch and the number of the point in a message.

        Raises:
            MessageError: there is no such point.
        """
        reader, points = BitReader(received), _Points(shared, setting.dim)
        stretch = reader.take_number(_WIDTH)
        count = points.count(stretch) if stretch < _STRETCHES else 0
        number = reader.take_number(width_of(max(count, 1)))
        reader.done()
        if number >= count:
            raise MessageError(f"expected one of {count} points of stretch {stretch}, got number {number}")
        return stretch, number

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """C z / m, as in PrivUnit; zero without the shared key, which is the mean over all shared keys."""
        if link.shared is None:
            return torch.zeros(link.setting.dim)
        mean = best_cap(link.setting.dim, self.mechanism.epsilon).mean
        return (self.clip / mean * self.vector(received, link.shared, link.setting)).float()

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """PrivUnit's, of the decoded vectors; constant without the shared keys.

        Not exact: the likelihood of a number given the shared key is the point's weight over the sum of all weights,
        which also depends on the update.
        """
        return self._score(received, links, blurred=True)

    def exact_likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """As `likelihood`, without the blur."""
        return self._score(received, links, blurred=False)

    def error_variance(self, state: None, received: Sequence[bytes], links: Links) -> Tensor:
        """PrivUnit's; infinite without the shared keys."""
        known = self.mechanism.error_variance(len(received), links.setting.dim)
        return torch.full_like(known, math.inf) if links.shared is None else known

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution | None:
        """That of the decoded vector over all shared keys."""
        vector = self.mechanism.distribution(update)
        return None if vector is None else _OfVector(self, vector, link)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """2 alpha times PrivUnit's epsilon for one message; the epsilons of T rounds add up."""
        rounds = len(history)
        why = (
            "the weights of a point and of all points each change by at most e^(epsilon / 2), whatever the points are."
        )
        proved = Proof.pure(self.epsilon, rounds, Unit.MESSAGE, why, tight=False)
        return claim_over(rounds, self.epsilon * rounds, proved, source=added_up("Liu et al. 2024, PPR", rounds))

    def _score(self, received: Sequence[bytes], links: Links, *, blurred: bool) -> Likelihood:
        if links.shared is None:
            return lambda update: (0 * update).sum(-1)
        pairs = zip(received, links.shared, strict=True)
        vectors = torch.stack([self.vector(wire, shared, links.setting) for wire, shared in pairs])
        return self.mechanism.score(vectors, blurred=blurred)
