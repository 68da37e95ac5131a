"""RQM: each coordinate is rounded at random between the nearest of a few levels that were kept at random."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import optimize

from leakgauge.defenses._common.channel import ByChannel, Design
from leakgauge.defenses._common.clip import DEFAULT_EPSILON
from leakgauge.defenses._common.scale import Scaling
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import Finite, repeat
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Proof, Unit, claim_over
from leakgauge.harness.core.codec import pack_levels, width_of
from leakgauge.harness.core.contract import Link, Setting
from leakgauge.harness.core.distribution import Integers
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Vector

_MOST_LEVELS = 64
_RARE = 1e-11  # smallest probability of an outcome; a draw of 53 bits resolves a hundred-thousandth of it
_EPSILONS = 1e-3, 24.0
_MOST_MARGIN = 1e6


@dataclass(frozen=True)
class RQM(ByChannel):
    """The randomized quantization mechanism: a coordinate's levels are drawn first, then the rounding.

    The m levels are equally spaced on [-(C + Delta), C + Delta]. For each coordinate, each inner level is kept with
    probability q, the two outer ones always. The clamped coordinate is rounded to the nearest kept level below or
    above it, with probabilities that make it unbiased. The number of the level is sent.

    Args:
        clip: C, bound on the magnitude of a coordinate, in units of the update.
        levels: m, 2 to 64.
        keep: q, strictly between 0 and 1; without effect for two levels, which are randomized response.
        margin: Delta / C, at most 1e6.
        epsilon: budget of one coordinate, 0.001 to 24, which sets the margin; default 8 unless `margin` is given.

    Guarantees:
        Messages have ceil(d * ceil(log2 m) / 8) bytes.
        decode(encode(u)) is unbiased for the clamped update.
        The probabilities of an output for any two values of a coordinate differ by at most a factor of e^epsilon, and
        two values attain it.

    Raises:
        ValueError: a parameter is out of range, both `epsilon` and `margin` are given, or an outcome has a probability
            below 1e-11, which the draws would not resolve.

    Source: Youn, Hu, Ziani, Abernethy 2023, "Randomized quantization is all you need for differential privacy in
        federated learning". We had its abstract, not its tables and its bound: the defaults are ours, and so is the
        claim, the exact epsilon of the mechanism. Differs: epsilon is that of the worst two inputs, which may be inner
        ones (m = 16, q = 0.42, Delta = 0.66 C: 6.682 instead of 6.670 for the two ends); no secure aggregation.
    """

    clip: float = 1.0
    levels: int = 16
    keep: float = 0.42
    margin: float | None = None
    epsilon: float | None = None

    def __post_init__(self) -> None:
        positive(clip=self.clip)
        if self.levels not in range(2, _MOST_LEVELS + 1):
            raise ValueError(f"expected 2 to {_MOST_LEVELS} levels, got levels={self.levels}")
        if not 0 < self.keep < 1:
            raise ValueError(f"expected 0 < keep < 1, got keep={self.keep}")
        if self.margin is None:
            object.__setattr__(self, "epsilon", DEFAULT_EPSILON if self.epsilon is None else self.epsilon)
            if not _EPSILONS[0] <= (self.epsilon or math.nan) <= _EPSILONS[1]:
                raise ValueError(f"expected {_EPSILONS[0]:g} <= epsilon <= {_EPSILONS[1]:g}, got {self.epsilon}")
        elif self.epsilon is not None:
            raise ValueError(f"expected epsilon or margin, got both: epsilon={self.epsilon} and margin={self.margin}")
        elif not 0 < self.margin <= _MOST_MARGIN:
            raise ValueError(f"expected 0 < margin <= {_MOST_MARGIN:g}, got margin={self.margin}")
        rarest = float(np.min(self.inputs.rows))
        if rarest < _RARE:
            raise ValueError(
                f"expected outcomes of probability {_RARE:g} or more, got {rarest:.3g}; lower keep or levels"
            )

    @property
    def reach(self) -> float:
        """C / (C + Delta)."""
        if self.margin is not None:
            return 1 / (1 + self.margin)
        assert self.epsilon is not None  # __post_init__ sets one of the two
        return _reach(self.epsilon, self.levels, self.keep)

    @property
    def scaling(self) -> Scaling:
        """In units of C + Delta."""
        return Scaling("public", bound=self.clip / self.reach)

    @property
    def width(self) -> int:
        """ceil(log2 m)."""
        return width_of(self.levels)

    @property
    def inputs(self) -> Finite:
        """The outcomes of one coordinate, for inputs of which all others are mixtures."""
        return inputs(self.levels, self.keep, self.reach)

    def init(self, setting: Setting) -> Design:
        """The public channel from levels to levels."""
        return Design(channel(self.levels, self.keep), np.linspace(0.0, 1.0, self.levels))

    def encode(self, state: Design, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Clamp, draw the nearest kept levels, round. Draws no outcome from the channel's matrix.

        Of the levels on one side, so many are skipped as a geometric distribution says; the outer one ends the row.
        """
        check_update(update)
        _, numbers = self.scaling.normalize(update, link.setting.layout)
        place, top = self.places(numbers, self.levels), self.levels - 1
        cell = np.clip(place, 0, top - 1).astype(np.int64)
        below = cell - np.minimum(self._skipped(private.child("below"), len(cell)), cell)
        above = cell + 1 + np.minimum(self._skipped(private.child("above"), len(cell)), top - 1 - cell)
        chance = rng.uniform(private.child("rounding"), (len(cell),), dtype=torch.float64).numpy()
        up = chance * (above - below) < place - below
        return pack_levels(np.where(up, above, below), self.width), None

    def low_noise_variant(self) -> RQM:
        """The same with 16 levels, of which most are kept, and nearly no margin."""
        return replace(self, levels=16, keep=0.7, margin=0.01, epsilon=None)

    def claim(self, history: Sequence[Design], setting: Setting) -> Claim:
        """Pure epsilon for one coordinate; the epsilons of T rounds add up."""
        rounds, one = len(history), self.inputs
        why = "the largest ratio of an output's probabilities, over all pairs of inputs: these are piecewise linear."
        proved = Proof(repeat(one, rounds), Unit.COORDINATE, "enumeration of inputs and outputs", why)
        why = f"the clip bounds each coordinate alone: all {setting.dim} may move between the worst inputs at once."
        whole = Proof(repeat(one, rounds * setting.dim), Unit.MESSAGE, "enumeration; Renyi divergences add up", why)
        promised = rounds * (one.pure if self.epsilon is None else self.epsilon)
        source = "Youn et al. 2023, its exact epsilon"
        return claim_over(rounds, promised, proved, source=source, further=(whole,))

    def _skipped(self, key: Key, count: int) -> Integers:
        """[count] numbers of levels before the first kept one, at most m."""
        drawn = rng.uniform(key, (count,), dtype=torch.float64).numpy()
        with np.errstate(divide="ignore"):
            skipped: Numbers = np.log(drawn) / math.log1p(-self.keep)
        return np.minimum(skipped, self.levels).astype(np.int64)


@functools.lru_cache(maxsize=16)
def channel(levels: int, keep: float) -> Numbers:
    """[levels, levels], read-only: the probabilities of the outputs for an input at each level.

    An input at level j that is kept, with probability q, is sent as it is. Else the kept neighbors a < j < b are
    independent, geometric on each side up to the outer level, and b has the probability (j - a) / (b - a).
    """
    P = np.eye(levels)
    for j in range(1, levels - 1):
        down, up = np.arange(j, 0, -1), np.arange(1, levels - j)
        sides = [np.where(far == far.max(), 1.0, keep) * (1 - keep) ** (far - 1.0) for far in (down, up)]
        both = (1 - keep) * np.outer(*sides) / np.add.outer(down, up)
        P[j] = np.concatenate([both @ up, [keep], down @ both])
    P.setflags(write=False)
    return P


@functools.lru_cache(maxsize=64)
def inputs(levels: int, keep: float, reach: float) -> Finite:
    """The outputs for both ends of the clip, and for the levels inside, between which probabilities are linear."""
    low, high = ((1 + end) / 2 * (levels - 1) for end in (-reach, reach))
    nodes = np.array([low, *range(math.ceil(low), math.floor(high) + 1), high])
    below = np.minimum(nodes.astype(np.int64), levels - 2)
    share, P = (nodes - below)[:, None], channel(levels, keep)
    return Finite(tuple(map(tuple, ((1 - share) * P[below] + share * P[below + 1]).tolist())))


@functools.lru_cache(maxsize=64)
def _reach(epsilon: float, levels: int, keep: float) -> float:
    """The reach at which a coordinate has this epsilon: the logarithm of the margin is searched."""

    def excess(log: float) -> float:
        # at most 1000, because the search does not take infinity
        return min(inputs.__wrapped__(levels, keep, 1 / (1 + math.exp(log))).pure, 1e3) - epsilon

    with np.errstate(divide="ignore"):
        return 1 / (1 + math.exp(optimize.brentq(excess, -30.0, 30.0, xtol=1e-13)))
