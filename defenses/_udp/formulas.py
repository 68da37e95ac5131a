"""UDP in numbers: how much noise a run is told to add, how its rounds share it, and what it amounts to.

A noise multiplier is z = noise_std / sensitivity. A run spends sum 1/z^2 over its rounds, and that is all that matters:
the rounds together tell as much as one Gaussian of mu = sqrt(sum 1/z^2).

Source: Wei, Li, Ding, Ma, Su, Zhang, Poor 2021, "User-level privacy-preserving federated learning: analysis and
    performance optimization". Despite the title the neighbors differ in one record.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np
from scipy import special

from leakgauge.defenses._common.budget import check_delta
from leakgauge.harness.core.accounting import gaussian_epsilon, gaussian_mu
from leakgauge.harness.core.checks import positive

Calibration = Literal["paper", "zcdp", "tight"]
"""How a budget comes from (epsilon, delta): as printed, by zCDP, or exactly; see `budget`."""

_ROUNDING = 1e-12
"""Of a sum of 1/z^2, relatively: what floats may add to it."""


def sensitivity(clip: float, lr: float, samples: int) -> float:
    """2 * lr * clip / samples: how far one replaced record moves a client's model in one full-batch step.

    Attained by two records with opposite gradients of norm `clip`. Several local steps or a mini-batch move it further.
    Against the replacement of all records, a client counts as one sample.

    Raises:
        ValueError: an argument is not above zero.
    """
    positive(clip=clip, lr=lr, samples=samples)
    return 2 * lr * clip / samples


@functools.lru_cache(maxsize=16)  # `tight` searches, and every message of a run asks for the same budget
def budget(epsilon: float, delta: float, participation: float, calibration: Calibration) -> float:
    """Sum of 1/z^2 that a client's rounds may spend together, for (epsilon, delta).

    Args:
        participation: q, the share of clients in a round.

    | calibration | budget | |
    |---|---|---|
    | paper | epsilon^2 / (2 q ln(1/delta)) | false above epsilon = 6.98 at delta = 1e-3, q = 1; see below for q < 1 |
    | zcdp | (sqrt(2 ln(1/delta) + 2 epsilon) - sqrt(2 ln(1/delta)))^2 | true, not the largest |
    | tight | mu^2 of the Gaussian mechanism | true, the largest |

    Only `paper` uses q. It argues with an adversary who does not know who takes part in a round; a server knows, as it
    picks the clients and gets their messages by name. The other two hold against it and grant nothing for q < 1: they
    cover the client that is picked every time.

    Raises:
        ValueError: an argument out of range, or an unknown calibration.

    Source: paper, (10) and (25); zcdp, Bun, Steinke 2016, Prop. 1.3, which is what the paper's (19) implies; tight,
        Balle, Wang 2018, Thm 8.
    """
    positive(epsilon=epsilon)
    check_delta(delta)
    if not 0 < participation <= 1:
        raise ValueError(f"expected 0 < participation <= 1, got participation={participation}")
    log = -math.log(delta)
    if calibration == "paper":
        return epsilon**2 / (2 * participation * log)
    if calibration == "zcdp":
        # the difference of the two roots, without the cancellation
        return (2 * epsilon / (math.sqrt(2 * log + 2 * epsilon) + math.sqrt(2 * log))) ** 2
    if calibration == "tight":
        return gaussian_mu(epsilon, delta) ** 2
    raise ValueError(f"expected calibration paper, zcdp or tight, got {calibration!r}")


def claimed_epsilon(spent: float, delta: float, participation: float, calibration: Calibration) -> float:
    """The epsilon that a calibration claims at `delta` for rounds that spend so much: the inverse of `budget`.

    | calibration | epsilon, spent = sum 1/z^2 |
    |---|---|
    | paper | sqrt(2 q ln(1/delta) spent); sqrt(2 q ln(1/delta)) / z for one round |
    | zcdp | spent / 2 + sqrt(2 ln(1/delta) spent) |
    | tight | of the Gaussian mechanism with mu = sqrt(spent); 0 where delta alone covers it |
    """
    log = -math.log(delta)
    if calibration == "paper":
        return math.sqrt(2 * participation * log * spent)
    if calibration == "zcdp":
        return spent / 2 + math.sqrt(2 * log * spent)
    return gaussian_epsilon(math.sqrt(spent), delta)


def multiplier(epsilon: float, delta: float, rounds: int, participation: float, calibration: Calibration) -> float:
    """z of each round, where `rounds` equal rounds spend the whole `budget`; (10) of the paper for `paper`.

    Raises:
        ValueError: an argument out of range, or an unknown calibration.
    """
    positive(rounds=rounds)
    return math.sqrt(rounds / budget(epsilon, delta, participation, calibration))


@dataclass(frozen=True)
class Schedule:
    """Where a run with communication-rounds discounting stands; the same for all clients, and public.

    A client that is not picked in a round counts that round as spent.

    Attributes:
        rounds: T as it is now: the run ends before round T.
        multipliers: z of the rounds that were run.
    """

    rounds: int
    multipliers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rounds < 1 and not self.multipliers:
            raise ValueError(f"expected rounds >= 1, got rounds={self.rounds}")

    @property
    def round(self) -> int:
        """t, the number of the round to come, from 0."""
        return len(self.multipliers)

    @property
    def ended(self) -> bool:
        """Whether no round is to come."""
        return self.round >= self.rounds

    @property
    def spent(self) -> float:
        """Sum of 1/z^2 over the rounds that were run."""
        return _spent(self.multipliers)


class Spending(NamedTuple):
    """Where a run stands, and the sum of 1/z^2 that all of it may spend."""

    schedule: Schedule
    budget: float


def next_multiplier(schedule: Schedule, budget: float) -> float:
    """z of the round to come: it and those after it share evenly what is left of the budget.

    Guarantees:
        (10) in round 0.
        Constant as long as T is.
        The budget is spent in round T - 1, and never overspent, up to rounding.

    Raises:
        ValueError: the run has ended, or has spent the budget.

    Source: (25), in units of the sensitivity.
    """
    if schedule.ended:
        raise ValueError(f"expected a run that goes on, got one that ended before round {schedule.rounds}")
    left = budget - schedule.spent
    if not left > 0:
        raise ValueError(f"expected a budget above what is spent, got budget={budget}, spent={schedule.spent}")
    return math.sqrt((schedule.rounds - schedule.round) / left)


def spend(schedule: Schedule, budget: float) -> Schedule:
    """The schedule after its next round.

    Raises:
        ValueError: as for `next_multiplier`.
    """
    return replace(schedule, multipliers=(*schedule.multipliers, next_multiplier(schedule, budget)))


def discount(schedule: Schedule, before: float | None, after: float | None, *, zeta: float, beta: float) -> Schedule:
    """The schedule with fewer rounds, if the round that was just spent has not improved the model.

    T becomes t + floor(beta (T - t)), t the number of that round, where before - after < zeta.

    Args:
        before, after: test loss of the model before and after that round; None: not evaluated.
        beta: below 1; read as the decimal fraction that it prints as, so that 0.7 of 90 rounds are 63.

    | case | T |
    |---|---|
    | a loss is None | unchanged |
    | a loss is NaN, or both are infinite | shortened: that is no improvement |
    | beta (T - t) < 2 | no round is to come, and what is left of the budget stays unspent |

    Raises:
        ValueError: no round was spent, or beta is outside (0, 1).

    Source: Algorithm 2, step 8.
    """
    if not 0 < beta < 1:
        raise ValueError(f"expected 0 < beta < 1, got beta={beta}")
    if schedule.round == 0:
        raise ValueError("expected a schedule after its first round, got one before it: spend it first")
    if before is None or after is None or before - after >= zeta:
        return schedule
    last = schedule.round - 1
    # as floats, 0.7 * 90 is 62.99999999999999
    return replace(schedule, rounds=last + math.floor(Fraction(repr(float(beta))) * (schedule.rounds - last)))


def linear_decay(
    epsilon: float,
    delta: float,
    rounds: int,
    participation: float,
    *,
    first: float | None = None,
    slope: float | None = None,
    longest: float = math.inf,
) -> tuple[float, ...]:
    """z of all rounds of the baseline "Lei's approach": z falls linearly, and the run stops before it overspends.

    z_t = first * (1 - slope * t), as long as it is above zero and sum 1/z^2 within the `zcdp` budget.

    Uncertain: the paper that compares itself with it says no more than that z falls linearly until the budget is gone,
    and gives neither `first` nor `slope`: the defaults are a choice of this project. The budget is by zCDP as in the
    approach's source (Yu et al. 2019).

    Args:
        rounds: T0, which sets the defaults and nothing else.
        first: z of round 0; default (10) with T0, hence with q, but no less than one round may have.
        slope: default 1 / (2 T0), which would halve z at T0.
        longest: rounds that are asked for; a flat and noisy run could pay billions.

    Guarantees:
        The multipliers spend at most the `zcdp` budget, up to rounding; one more round would spend more, have no
        noise, or be the first beyond `longest`.

    Raises:
        ValueError: an argument out of range, or the first round alone overspends.
    """
    positive(rounds=rounds)
    if first is None:
        # (10) overspends in a single round where q T0 is below about 1.5
        alone = multiplier(epsilon, delta, 1, participation, "zcdp")
        first = max(multiplier(epsilon, delta, rounds, participation, "paper"), alone)
    slope = 0.5 / rounds if slope is None else slope
    positive(first=first)
    if not 0 <= slope < math.inf:
        raise ValueError(f"expected slope >= 0, got slope={slope}")
    allowed = budget(epsilon, delta, participation, "zcdp") * (1 + _ROUNDING)
    # z never grows, so that no run is longer than the budget in units of round 0
    scale = 1 - slope * np.arange(int(min(allowed * first * first, longest)))
    z = first * scale[scale > 0]
    kept = z[np.cumsum(1 / z**2) <= allowed]
    if kept.size == 0:
        raise ValueError(f"expected a first round within the budget {allowed:.6g}, got first={first}")
    return tuple(kept.tolist())


def whole_run_mu(multipliers: Iterable[float]) -> float:
    """mu of the one Gaussian that rounds of these multipliers amount to: sqrt(sum 1/z^2); 0 of no rounds.

    What a client tells a server that sees who takes part, over the rounds in which the client took part.

    Raises:
        ValueError: a multiplier is not above zero.
    """
    return math.sqrt(_spent(multipliers))


def participations(rounds: int, participation: float, quantile: float) -> int:
    """In how many of `rounds` a client is picked, at that quantile of Binomial(rounds, participation).

    Exact where each round picks a fixed number of clients, uniformly and anew.

    Raises:
        ValueError: participation or quantile outside (0, 1], or rounds below 1.
    """
    positive(rounds=rounds)
    for name, value in (("participation", participation), ("quantile", quantile)):
        if not 0 < value <= 1:
            raise ValueError(f"expected 0 < {name} <= 1, got {name}={value}")
    return int(np.searchsorted(special.bdtr(np.arange(rounds), rounds, participation), quantile))


def _spent(multipliers: Iterable[float]) -> float:
    """Sum of 1/z^2."""
    known = tuple(multipliers)
    if not all(z > 0 for z in known):
        raise ValueError(f"expected noise multipliers > 0, got {min(known)}")
    return math.fsum(1 / z**2 for z in known)
