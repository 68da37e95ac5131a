"""The distribution of dithered levels given the dither, overload included; it shares no code with the quantizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy import special

from leakgauge.defenses._common.reference import Scaled
from leakgauge.defenses._jopeq.lattice import Lattice
from leakgauge.harness.core import rng
from leakgauge.harness.core.distribution import (
    REVEALED,
    SHARES,
    DistributionError,
    Integers,
    Laplacian,
    MessageDistribution,
    Noise,
    Normal,
    PairLoss,
    Reading,
    StudentPairs,
    carried,
    evidence,
    outcomes,
    same_header,
    split,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
# Maps a pair of numbers to lattice coordinates at step 1, by dimension; for a scalar quantizer, the identity
_INVERSE = {1: np.eye(2), 2: np.array([[1.0, 0.0], [-0.5, 0.75**0.5]])}
_SCALES = 1 - np.array([0.0, *SHARES])  # scales of the noise, in the distribution and in its alternatives
_ERROR = 1e-15  # rounding error of a probability
_TINY = 1e-9
_FAR = 1e-6  # the least probability of a tail that the quadrature of `_second` finds
_EXACT, _DITHERS = 2**11, 33  # maximum number of levels of all numbers whose loss is that of levels; number of dithers
_AGREE = 2**19  # maximum number of probabilities in the comparison of two messages
_ROUNDING = 2.0**-20  # upper bound on the shift of a lattice coordinate by float32 arithmetic, as a share of its terms


@dataclass(frozen=True, eq=False)
class _Levels(MessageDistribution):
    """A header, then packed levels -top..top as unsigned numbers: `cells` [n, 2], rounded and clipped.

    Attributes:
        cells: lattice coordinates plus dither, in cells, without noise.
        places: [count] the coordinates of the sent numbers; if their count is odd, `cells` has one number more.
    """

    header: Numbers
    places: Integers
    cells: Numbers
    bits: int

    @property
    def top(self) -> int:
        return 1 << (self.bits - 1)

    def levels(self, wire: bytes) -> Numbers:
        """[n, 2] the levels -top..top."""
        unsigned = outcomes(split(wire, self.header), len(self.places), self.bits + 1)
        if unsigned.max(initial=0) > 2 * self.top:
            raise DistributionError(f"expected levels of at most {2 * self.top}, got {unsigned.max()}")
        return _pairs((unsigned - self.top).astype(np.float64))

    def reading(self, uniforms: Numbers, ratios: Numbers) -> Reading:
        return Reading(uniforms.ravel()[: len(self.places)], self.places, ratios=ratios)

    def own(self, key: Key) -> Numbers:
        return rng.uniform(key, self.cells.shape, dtype=torch.float64).numpy()


@dataclass(frozen=True, eq=False)
class _NoisyLevels(_Levels):
    """Levels of `cells` plus noise: triangular `roots` [n, 2, 2] times standard pairs. They include `dither`."""

    noise: Noise
    roots: Numbers
    dither: Numbers

    @property
    def product(self) -> bool:
        """Whether levels are independent: with a scalar quantizer and independent noise, not in a lattice."""
        return self.noise.product and not self.roots[:, 1, 0].any()

    def agreement(self, one: bytes, other: bytes) -> tuple[Numbers, Numbers]:
        """Equal levels of numbers that are independent: all, or in a lattice the first of each pair; at most `_AGREE`.

        Two draws agree with the sum of the squared probabilities of the levels.
        """
        chosen = slice(max(1, _AGREE // (2 * self.top + 1))), slice(2 if self.product else 1)
        equal = (self.levels(one) == self.levels(other))[chosen]
        edges = np.concatenate([[-np.inf], np.arange(-self.top, self.top) + 0.5, [np.inf]])
        spread = self.roots.diagonal(axis1=1, axis2=2)[chosen]
        chances = np.diff(_chances(self.noise, (edges - self.cells[chosen][..., None]) / spread[..., None]))
        return equal.ravel().astype(float), _numbers(np.square(chances).sum(-1)).ravel()

    def loss(self, other: MessageDistribution, among: Integers | None = None) -> PairLoss | None:
        """That of the numbers before they become levels, an upper bound; of few with Laplace noise, of the levels.

        The latter is for the worst dither, which the server may see.
        """
        if not isinstance(other, _NoisyLevels) or not np.array_equal(self.roots, other.roots):
            return None
        if not same_header(self.header, other.header):
            return REVEALED
        flat = (self.cells - other.cells).ravel()
        flat[: len(self.places)] = carried(flat[: len(self.places)], self.places, among)
        moved, spread = flat.reshape(-1, 2), self.roots.diagonal(axis1=1, axis2=2)
        if moved[spread == 0].any():
            return REVEALED
        moving, found = moved != 0, self.noise.loss(_numbers(np.linalg.solve(self.roots, moved[..., None]).ravel()))
        if found and self.product and isinstance(self.noise, Laplacian) and moving.sum() * self.top <= _EXACT:
            centers = np.stack([(each.cells - each.dither)[moving] for each in (self, other)])
            return _of_levels(centers, spread[moving], self.top)._replace(rho=found.rho)
        return found and found._replace(attained=False)

    def read(self, wire: bytes, own: Key) -> Reading:
        """The first level of a pair by its marginal distribution, the second by its distribution given the first's
        level.

        The likelihood ratios cover all levels if the levels are independent, else the first level of each pair.
        """
        levels = self.levels(wire)
        below = np.where(levels == -self.top, -np.inf, levels - 0.5) - self.cells
        above = np.where(levels == self.top, np.inf, levels + 0.5) - self.cells
        ends, alone = np.stack([below, above]), slice(2 if self.product else 1)
        spread = self.roots.diagonal(axis1=1, axis2=2)[:, alone]
        every = _chances(self.noise, ends[..., alone] / spread / _SCALES[:, None, None, None])
        lows, highs = every[0] if self.product else np.concatenate([every[0], self._second(ends, every[0])], -1)
        # the distribution's own probability counts as at least its rounding error
        with np.errstate(divide="ignore"):
            logs = np.log(every[:, 1] - every[:, 0])
        ratios = (logs[1:] - np.maximum(logs[0], np.log(_ERROR))).reshape(len(SHARES), -1)
        return self.reading(lows + self.own(own) * (highs - lows), evidence(ratios))

    def _second(self, ends: Numbers, first: Numbers) -> Numbers:
        """[2, n, 1]: the cdf at the ends [2, n, 2] of the second level of a pair, given the first level.

        It is a mean over the first number's noise, by Gaussian quadrature between the cdf values `first` [2, n, 1] at
        the ends of the first level. The quadrature misses the first number's far tail, on which the second number's
        tail depends: values nearer to 0 or 1 than `_FAR` are not known, and end there.
        """
        (turned, straight), (low, high) = self.roots[:, 1].T[..., None], first
        drawn = _quantiles(self.noise, np.clip((low + high + (high - low) * _NODES) / 2, 1e-300, 1 - 2.0**-53))
        chances = _chances_given(self.noise, drawn, (ends[..., 1:] - turned * drawn) / straight)
        return np.clip(np.asarray(chances @ _WEIGHTS / 2, np.float64), _FAR, 1 - _FAR)[..., None]


class _ExactLevels(_Levels):
    """Levels of numbers without noise: the error within a cell is uniform over the dither."""

    from_shared = True

    def loss(self, other: MessageDistribution, among: Integers | None = None) -> PairLoss | None:
        """None at all if the numbers are equal, else everything, for a receiver with the shared key."""
        if not isinstance(other, _ExactLevels):
            return None
        moved = carried((self.cells - other.cells).ravel()[: len(self.places)], self.places, among)
        return PairLoss() if same_header(self.header, other.header) and not moved.any() else REVEALED

    def read(self, wire: bytes, own: Key) -> Reading:
        """Reads the place within a cell before rounding; the dither is a multiple of 2^-24."""
        levels, room = self.levels(wire), _ROUNDING * (1 + np.abs(self.cells).max(1, keepdims=True))
        least, most = (np.clip(np.rint(self.cells + side), -self.top, self.top) for side in (-room, room))
        if ((levels < least) | (levels > most)).any():
            raise DistributionError("a level is not the rounded number")
        # without private noise there are no alternatives
        return self.reading((self.cells + 0.5 + 2.0**-24 * self.own(own)) % 1.0, np.zeros(0))


def _of_levels(centers: Numbers, spread: Numbers, top: int) -> PairLoss:
    """The loss of levels of two centers [2, k] plus Laplace noise of scale `spread` [k], at the worst dither.

    It is largest where a threshold is at the end of the dithers, or at a center.
    """
    ends = np.concatenate([np.linspace(-0.5, 0.5, _DITHERS), (np.round(centers) + 0.5 - centers).ravel()]).clip(
        -0.5, 0.5
    )
    edges = np.concatenate([[-np.inf], np.arange(-top, top) + 0.5, [np.inf]])
    at = (edges[:, None, None, None] - ends[:, None, None] - centers) / spread  # [edges, dithers, 2, k]
    low, high = at[:-1], at[1:]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        beyond = np.where(low >= 0, -low, high) + np.log(-np.expm1(low - high) / 2)
        logs = np.where((low < 0) & (high > 0), np.log(-(np.expm1(low) + np.expm1(-high)) / 2), beyond)
    ratios = (logs[:, :, 0] - logs[:, :, 1]).reshape(-1, logs.shape[-1])
    return PairLoss(float(max(ratios.max(0).sum(), -ratios.min(0).sum())))


def _pairs(values: Numbers) -> Numbers:
    """[n / 2, 2]: the values [n] in pairs, with a 0 at the end if n is odd."""
    return (np.append(values, 0.0) if len(values) % 2 else values).reshape(-1, 2)


def leveled(sent: Scaled, noise: Noise, root: Numbers, lattice: Lattice, shared: Key) -> MessageDistribution:
    """The distribution of numbers plus noise that are sent as dithered levels.

    Args:
        root: [2, 2], lower triangular: the noise of a pair of numbers is `root` times a standard pair; 0: no noise.
        lattice: only its parameters are read.
        shared: key of the dither.
    """
    count, size, find = len(sent.numbers), lattice.dimension, _INVERSE[lattice.dimension] / lattice.step
    coded = -(-count // size) * size
    pairs = _pairs(sent.numbers)
    dither = rng.uniform32(shared, (coded,) if size == 1 else (2, coded // 2), -0.5, 0.5).numpy().astype(np.float64)
    dither = _pairs(dither) if size == 1 else dither.T
    places = np.append(sent.places, np.full(coded - count, -1))
    cells = pairs @ find.T + dither
    if not root.any():
        return _ExactLevels(sent.header, places, cells, lattice.bits)
    roots = np.repeat((find @ root)[None], len(pairs), 0)
    if count % 2:
        # padding has no noise
        roots[-1, 1, 1] = _TINY
    return _NoisyLevels(sent.header, places, cells, lattice.bits, noise, roots, dither)


def _chances(noise: Noise, x: Numbers) -> Numbers:
    return _numbers(special.stdtr(noise.degrees, x)) if isinstance(noise, StudentPairs) else noise.uniforms(x)


def _chances_given(noise: Noise, first: Numbers, x: Numbers) -> Numbers:
    if not isinstance(noise, StudentPairs):
        return noise.uniforms(x)
    wide = np.sqrt((noise.degrees + first**2) / (noise.degrees + 1))
    return _numbers(special.stdtr(noise.degrees + 1, x / wide))


def _quantiles(noise: Noise, u: Numbers) -> Numbers:
    if isinstance(noise, Normal):
        return _numbers(special.ndtri(u))
    if isinstance(noise, Laplacian):
        return _numbers(-np.sign(u - 0.5) * np.log(2 * np.minimum(u, 1 - u)))
    if isinstance(noise, StudentPairs):
        return _numbers(special.stdtrit(noise.degrees, u))
    raise TypeError(f"no quantiles of {noise!r}")


def _numbers(values: object) -> Numbers:
    return np.asarray(values, np.float64)
