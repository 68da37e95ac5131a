"""The piecewise mechanism on a few coordinates of each client's message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from leakgauge.defenses._common.clip import clip_coordinates
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Proof, Unit, claim_over
from leakgauge.harness.core.codec import unpack_float32
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import (
    DISTINCT,
    DistributionError,
    Integers,
    MessageDistribution,
    PairLoss,
    Reading,
    carried,
    clamped,
    expect_size,
)
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Vector

# Epsilon of one coordinate if epsilon is divided; this value minimizes the second moment of Algorithm 4 at t = 1
_SHARE = 2.5
# Blur of the likelihood, whose steps have no slope, in half-widths of the interval of inputs that an output
# indicates; measured in docs/attacks.md
_BLUR = 0.03
_LEAST = 1e-3  # smallest blur, in units of the clip: L-BFGS fails in narrower minima


class _Output(NamedTuple):
    """PM maps t in [-1, 1] to y in [-C, C]; its density is e^epsilon times higher in an interval of length C - 1."""

    epsilon: float

    @property
    def tail(self) -> float:
        """e^(-epsilon / 2), kept above zero so that float64 can represent the interval's length."""
        return max(math.exp(-self.epsilon / 2), 1e-250)

    @property
    def bound(self) -> float:
        """C, the largest output."""
        return 1 / math.tanh(self.epsilon / 4)

    @property
    def width(self) -> float:
        """C - 1, the length of the interval."""
        return 2 * self.tail / -math.expm1(-self.epsilon / 2)

    @property
    def inside(self) -> float:
        return 1 / (1 + self.tail)

    def left(self, t: Numbers) -> Numbers:
        return ((self.bound + 1) * t - self.width) / 2

    def variance(self, t: Tensor) -> Tensor:
        spread = self.width / 2  # 1 / (e^(epsilon / 2) - 1)
        return t.square() * spread + spread * (1 + 4 * spread) / 3

    def sample(self, t: Numbers, key: Key) -> Numbers:
        chosen = rng.uniform(key.child("inside"), t.shape, dtype=torch.float64).numpy() < self.inside
        place = rng.uniform(key.child("place"), t.shape, dtype=torch.float64).numpy()
        bound, width, left = self.bound, self.width, self.left(t)
        # outside the interval: a uniform point in the rest of [-C, C]
        rest = -bound + (bound + 1) * place
        # the gap stays float32, as in stored results
        y = np.where(chosen, left + width * place, rest + np.float32(width) * (rest >= left))
        return np.asarray(y.clip(-bound, bound), np.float64)

    def misfit(self, y: Tensor, t: Tensor) -> Tensor:
        """-ln of the density at t plus a Cauchy error, minus its least value; the tails are never flat."""
        blur = max(_BLUR * self.tail, _LEAST)
        # an input explains y if it is within `tail` of this point
        distance = t - y * (1 - self.tail)
        best = self._blurred(blur, torch.zeros((), dtype=torch.float64))
        return (best / self._blurred(blur, distance)).log()

    def exact(self, y: Tensor, t: Tensor) -> Tensor:
        """-ln of the density at t, minus its least value: 0, or epsilon; y was rounded to float32."""
        return self.epsilon * ((t - y * (1 - self.tail)).abs() > self.tail + 1e-6 * self.bound)

    def _blurred(self, blur: float, distance: Tensor) -> Tensor:
        width = torch.tensor(2 * self.tail * blur, dtype=torch.float64)
        window = torch.atan2(width, blur**2 - self.tail**2 + distance.square()) / math.pi
        return self.tail**2 + (1 - self.tail**2) * window


@dataclass(frozen=True, eq=False)
class _TwoLevels(MessageDistribution):
    """The distribution of PM's outputs, rounded to float32, for the inputs t [k] in [-1, 1] at `places`.

    Source: Wang et al. 2019, Algorithm 2.
    """

    t: Numbers
    places: Integers
    epsilon: float
    redraws = True

    @property
    def product(self) -> bool:
        return True

    @property
    def distinct(self) -> bool:
        return len(self.t) >= DISTINCT

    def loss(self, other: MessageDistribution, among: Integers | None = None) -> PairLoss | None:
        """The log ratio of the two densities, for each number whose inputs differ."""
        if not isinstance(other, _TwoLevels):
            return None
        tail, width, bound = self._interval
        inside, outside = 1 / width, tail / (bound + 1)
        moved = carried(self.t - other.t, self.places, among)
        return PairLoss(np.count_nonzero(moved) * math.log(inside / outside))

    @property
    def _interval(self) -> tuple[float, float, float]:
        """The probability of an output outside the interval over that inside, the interval's width, the bound."""
        tail = max(math.exp(-self.epsilon / 2), 1e-250)
        width = 2 * tail / -math.expm1(-self.epsilon / 2)
        return tail, width, 1 + width

    def read(self, wire: bytes, own: Key) -> Reading:
        """Uniform draws between the cdf's values at the two ends of the numbers that round to an output."""
        expect_size(wire, 4 * len(self.t))
        (tail, width, bound), sent = self._interval, np.frombuffer(wire, "<f4")
        if not (np.abs(sent) <= np.float32(bound)).all():
            raise DistributionError(f"an output is not within {bound:.9g}")
        left = (1 + width / 2) * self.t - width / 2

        def cdf(y: Numbers) -> Numbers:
            inside = np.clip(y - left, 0.0, width)
            rest = np.clip(y, -bound, bound) + bound - inside
            return np.asarray((inside / width + tail * rest / (bound + 1)) / (1 + tail), np.float64)

        # a little more than half a step, because an exact half may round to either side
        ends = np.nextafter(sent, np.array([[-np.inf], [np.inf]], np.float32)).astype(np.float64)
        lower, upper = cdf(sent + 0.500001 * (ends - sent))
        chance = rng.uniform(own, (len(sent),), dtype=torch.float64).numpy()
        # the last bit is a fair coin only while the interval holds thousands of float32 numbers
        bits = (sent.view(np.int32) & 1).astype(np.int64) if width > 1e-3 else None
        return Reading(lower + chance * (upper - lower), self.places, bits)


@dataclass(frozen=True)
class Piecewise(Defense[None, None]):
    """The piecewise mechanism: clamps a few coordinates to a public bound and perturbs each with a share of epsilon.

    k = max(1, min(d, floor(epsilon / 2.5))) coordinates are sent, each with epsilon / k. The shared key selects them,
    so that their positions cost no bits and reveal nothing about the update. Sending the positions would cost
    k ceil(log2 d) bits, at least ln C(d, k) / ln 2: 2720 and 1754 bits, in addition to the 5120 bits of the values, at
    d = 119,850 and epsilon = 400.

    Args:
        clip: C, bound on the magnitude of each coordinate, in units of the update.
        epsilon: privacy budget of one message. Default 400, as in sqSGD's comparison on LeNet (which has C = 10).

    Guarantees:
        Messages have 4 * k bytes.
        The estimate is unbiased for the clamped update.
        k coordinates of the estimate are clip * d / k times the output of PM, the others 0. From epsilon 73 per
        coordinate on, outputs outside PM's interval have a probability below 2^-53 and are never drawn; this
        implementation then has a delta of about that probability.
        Without the shared key, the estimate is the mean over all choices of coordinates: a constant vector.

    Raises:
        ValueError: a parameter is out of range.

    Source: Wang et al. 2019, "Collecting and analyzing multidimensional data with local differential privacy",
        Algorithms 2 and 4, as sqSGD's baseline uses it. Differs: the coordinates come from the shared key.
    """

    clip: float = 1.0
    epsilon: float = 400.0

    def __post_init__(self) -> None:
        positive(clip=self.clip, epsilon=self.epsilon)

    def count(self, dim: int) -> int:
        """k, the number of sent coordinates out of d."""
        return max(1, min(dim, math.floor(self.epsilon / _SHARE)))

    def output_distribution(self, dim: int) -> _Output:
        """The distribution of one sent coordinate."""
        return _Output(self.epsilon / self.count(dim))

    def positions(self, dim: int, shared: Key) -> Tensor:
        """[k]: the sent coordinates, in the message's random order, which hides them from an outsider."""
        k = self.count(dim)
        chosen = rng.subset(shared.child("positions"), dim, k)
        return torch.from_numpy(chosen[rng.permutation(shared.child("order"), k)])

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Clamp, take the coordinates that the shared key selects, perturb each by the private key, send float32."""
        check_update(update)
        dim = update.numel()
        chosen = update.detach().cpu()[self.positions(dim, link.key)].double()
        t = clip_coordinates(chosen, self.clip).numpy() / self.clip
        return self.output_distribution(dim).sample(t, private).astype("<f4").tobytes(), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """clip * d / k times the outputs, at their positions; a constant vector without the shared key."""
        sent, dim = self._read(received, link.setting), link.setting.dim
        if link.shared is None:
            return (self.clip * sent.mean()).float().expand(dim).clone()
        update = torch.zeros(dim)
        update[self.positions(dim, link.shared)] = (self.clip * dim / len(sent) * sent).float()
        return update

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """-ln of the two-level density, blurred by 3 % of the interval's half-width in t, because it has no slope.

        Without the shared key each output counts as normal, with the mean and variance of the mixture over all
        coordinates.
        """
        distribution, dim = self.output_distribution(links.setting.dim), links.setting.dim
        sent = torch.stack([self._read(wire, links.setting) for wire in received])
        if links.shared is None:
            least = distribution.variance(torch.zeros((), dtype=torch.float64))

            def outsider(update: Tensor) -> Tensor:
                t = self._scaled(update.double())
                mean = t.mean(-1, keepdim=True)
                variance = (distribution.variance(t) + (t - mean).square()).mean(-1, keepdim=True)
                odds = (sent - mean).square() / variance + (variance / least).log()
                return 0.5 * odds.sum(-1).to(update.dtype)

            return outsider
        positions = torch.stack([self.positions(dim, key) for key in links.shared])
        return lambda u: distribution.misfit(sent, self._scaled(u.double().gather(-1, positions))).sum(-1).to(u.dtype)

    def exact_likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """-ln of the two-level density; as `likelihood` without the shared key."""
        if links.shared is None:
            return self.likelihood(state, received, links)
        distribution, dim = self.output_distribution(links.setting.dim), links.setting.dim
        sent = torch.stack([self._read(wire, links.setting) for wire in received])
        positions = torch.stack([self.positions(dim, key) for key in links.shared])
        return lambda u: distribution.exact(sent, self._scaled(u.double().gather(-1, positions))).sum(-1).to(u.dtype)

    def error_variance(self, state: None, received: Sequence[bytes], links: Links) -> Tensor:
        """PM's least variance, that at zero, for sent coordinates; infinite for others and without the shared key."""
        dim = links.setting.dim
        least = self.clip**2 * float(self.output_distribution(dim).variance(torch.zeros(())))
        rows = torch.full((len(received), dim), math.inf)
        for row, shared in zip(rows, links.shared or (), strict=False):
            row[self.positions(dim, shared)] = least
        return rows

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """PM's outputs at the coordinates that the shared key selects."""
        dim = link.setting.dim
        k = max(1, min(dim, math.floor(self.epsilon / 2.5)))
        places = rng.subset(link.key.child("positions"), dim, k)[rng.permutation(link.key.child("order"), k)]
        return _TwoLevels(clamped(update, self.clip)[places] / self.clip, places, self.epsilon / k)

    def low_noise_variant(self) -> Piecewise:
        """The same with epsilon 1e6: up to d = 12,000, sends all coordinates, with less noise than float32 resolves."""
        return replace(self, epsilon=1e6)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Pure epsilon for one message; the epsilons of T rounds add up."""
        rounds, k = len(history), self.count(setting.dim)
        why = f"for every update, {k} of {setting.dim} coordinates are sent, each with epsilon / {k}."
        always = f"for a coordinate that is sent in every round; a round sends it with probability {k}/{setting.dim}."
        each = Proof.pure(self.epsilon / k, rounds, Unit.COORDINATE, always)
        proved, source = Proof.pure(self.epsilon, rounds, Unit.MESSAGE, why), "Wang et al. 2019, Algorithm 4"
        return claim_over(rounds, self.epsilon * rounds, proved, source=source, further=(each,))

    def _scaled(self, update: Tensor) -> Tensor:
        return clip_coordinates(update, self.clip) / self.clip

    def _read(self, received: bytes, setting: Setting) -> Tensor:
        """[k] float64: the PM outputs in a message."""
        sent = unpack_float32(received, self.count(setting.dim))
        largest = float(np.float32(self.output_distribution(setting.dim).bound))
        if float(sent.abs().max()) > largest:
            raise MessageError(f"expected values of at most {largest:.9g}, got {float(sent.abs().max()):.9g}")
        return sent.double()
