"""Formulas of UDP: the noise of a run, its split over rounds, and the resulting privacy.

A noise multiplier is z = noise_std / sensitivity. A run spends the sum of 1/z^2 over its rounds. Only this sum matters:
all rounds together reveal as much as one Gaussian mechanism with mu = sqrt(sum 1/z^2).

Source: Wei, Li, Ding, Ma, Su, Zhang, Poor 2021, "User-level privacy-preserving federated learning: analysis and
    performance optimization". Despite the title, neighbors differ in one record.
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

from leakgauge.defenses._common.clip import check_delta
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.gaussian import gaussian_epsilon, gaussian_mu

Calibration = Literal["paper", "zcdp", "tight"]
"""How (epsilon, delta) sets a budget: as printed in the paper, by zCDP, or exactly; see `budget`."""

_ROUNDING = 1e-12  # largest relative rounding error of a sum of 1/z^2


def sensitivity(clip: float, lr: float, samples: int) -> float:
    """2 * lr * clip / samples: how far replacing one record can move a client's model in one full-batch step.

    Two records with opposite gradients of norm `clip` attain this bound. With several local steps or a mini-batch, the
    model can move further. If all records are replaced, a client counts as one sample.

    Raises:
        ValueError: an argument is not above zero.
    """
    positive(clip=clip, lr=lr, samples=samples)
    return 2 * lr * clip / samples


@functools.lru_cache(maxsize=16)  # `tight` needs a search, and every message of a run needs the same budget
def budget(epsilon: float, delta: float, participation: float, calibration: Calibration) -> float:
    """The sum of 1/z^2 that a client's rounds may spend together, for (epsilon, delta).

    Args:
        participation: q, the share of clients in a round.

    | calibration | budget | |
    |---|---|---|
    | paper | epsilon^2 / (2 q ln(1/delta)) | false above epsilon = 6.98 at delta = 1e-3, q = 1; see below for q < 1 |
    | zcdp | (sqrt(2 ln(1/delta) + 2 epsilon) - sqrt(2 ln(1/delta)))^2 | true, not the largest |
    | tight | mu^2 of the Gaussian mechanism | true, the largest |

    Only `paper` uses q. It assumes an adversary that does not know the participants of a round. A server knows the
    participants: it selects the clients and receives their messages by name. The other two calibrations hold against a
    server and ignore q: they cover a client that is selected in every round.

    Raises:
        ValueError: an argument is out of range, or the calibration is unknown.

    Source: paper, (10) and (25); zcdp, Bun, Steinke 2016, Prop. 1.3, implied by the paper's (19); tight, Balle, Wang
        2018, Thm 8.
    """
    positive(epsilon=epsilon)
    check_delta(delta)
    if not 0 < participation <= 1:
        raise ValueError(f"expected 0 < participation <= 1, got participation={participation}")
    log = -math.log(delta)
    if calibration == "paper":
        return epsilon**2 / (2 * participation * log)
    if calibration == "zcdp":
        # the difference of the two roots in a form without cancellation
        return (2 * epsilon / (math.sqrt(2 * log + 2 * epsilon) + math.sqrt(2 * log))) ** 2
    if calibration == "tight":
        return gaussian_mu(epsilon, delta) ** 2
    raise ValueError(f"expected calibration paper, zcdp or tight, got {calibration!r}")


def claimed_epsilon(spent: float, delta: float, participation: float, calibration: Calibration) -> float:
    """The epsilon of a calibration at `delta` for rounds that spend this budget: the inverse of `budget`.

    | calibration | epsilon, spent = sum 1/z^2 |
    |---|---|
    | paper | sqrt(2 q ln(1/delta) spent); sqrt(2 q ln(1/delta)) / z for one round |
    | zcdp | spent / 2 + sqrt(2 ln(1/delta) spent) |
    | tight | epsilon of the Gaussian mechanism with mu = sqrt(spent); 0 where delta alone suffices |
    """
    log = -math.log(delta)
    if calibration == "paper":
        return math.sqrt(2 * participation * log * spent)
    if calibration == "zcdp":
        return spent / 2 + math.sqrt(2 * log * spent)
    return gaussian_epsilon(math.sqrt(spent), delta)


def multiplier(epsilon: float, delta: float, rounds: int, participation: float, calibration: Calibration) -> float:
    """z of each round if `rounds` equal rounds spend the whole `budget`; (10) of the paper for `paper`.

    Raises:
        ValueError: an argument is out of range, or the calibration is unknown.
    """
    positive(rounds=rounds)
    return math.sqrt(rounds / budget(epsilon, delta, participation, calibration))


@dataclass(frozen=True)
class Schedule:
    """The state of a run with communication-rounds discounting: public, and the same for all clients.

    A client that is not selected in a round counts that round as spent.

    Attributes:
        rounds: the current T: the run ends before round T.
        multipliers: z of the past rounds.
    """

    rounds: int
    multipliers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rounds < 1 and not self.multipliers:
            raise ValueError(f"expected rounds >= 1, got rounds={self.rounds}")

    @property
    def round(self) -> int:
        """t, the number of the next round, from 0."""
        return len(self.multipliers)

    @property
    def ended(self) -> bool:
        """Whether the run has no next round."""
        return self.round >= self.rounds

    @property
    def spent(self) -> float:
        """The sum of 1/z^2 over the past rounds."""
        return _spent(self.multipliers)


class Spending(NamedTuple):
    """The schedule of a run, and the sum of 1/z^2 that the whole run may spend."""

    schedule: Schedule
    budget: float


def next_multiplier(schedule: Schedule, budget: float) -> float:
    """z of the next round, if this round and all later rounds share the remaining budget evenly.

    Guarantees:
        Equals (10) in round 0.
        Constant while T is constant.
        The budget is spent in round T - 1 and never exceeded, up to rounding.

    Raises:
        ValueError: the run has ended, or has spent the budget.

    Source: (25), in units of the sensitivity.
    """
    if schedule.ended:
        raise ValueError(f"expected a running schedule, got one that ended before round {schedule.rounds}")
    left = budget - schedule.spent
    if not left > 0:
        raise ValueError(f"expected a budget above the sum spent, got budget={budget}, spent={schedule.spent}")
    return math.sqrt((schedule.rounds - schedule.round) / left)


def spend(schedule: Schedule, budget: float) -> Schedule:
    """The schedule after its next round.

    Raises:
        ValueError: as for `next_multiplier`.
    """
    return replace(schedule, multipliers=(*schedule.multipliers, next_multiplier(schedule, budget)))


def discount(schedule: Schedule, before: float | None, after: float | None, *, zeta: float, beta: float) -> Schedule:
    """The schedule with fewer rounds, if the last round has not improved the model.

    If before - after < zeta, T becomes t + floor(beta (T - t)), where t is the number of that round.

    Args:
        schedule: the schedule after a round.
        before, after: test loss of the model before and after the last round; None: not evaluated.
        beta: in (0, 1); read as its printed decimal fraction, so that 0.7 of 90 rounds are 63.

    | case | T |
    |---|---|
    | a loss is None | unchanged |
    | a loss is NaN, or both are infinite | shortened: no improvement |
    | beta (T - t) < 2 | the run ends, and the rest of the budget is not spent |

    Source: Algorithm 2, step 8.
    """
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
    """z of all rounds of the baseline "Lei's approach": z decreases linearly, and the run stops before it overspends.

    z_t = first * (1 - slope * t), while it is above zero and sum 1/z^2 is within the `zcdp` budget.

    Uncertain: UDP's paper, which compares with this approach, states only that z decreases linearly until the budget is
    spent. It gives neither `first` nor `slope`; the defaults are our choice. The budget is by zCDP as in the approach's
    source (Yu et al. 2019).

    Args:
        rounds: T0, which sets only the defaults.
        first: z of round 0; default: (10) with T0, and so with q, or the least z of a single round if that is larger.
        slope: relative decrease of z per round; default 1 / (2 T0), which would halve z at T0.
        longest: maximum number of rounds; without it, the budget of a flat and noisy run could cover billions of
            rounds.

    Guarantees:
        The multipliers spend at most the `zcdp` budget, up to rounding. One more round would overspend, have no noise,
        or exceed `longest`.

    Raises:
        ValueError: an argument is out of range, or the first round alone overspends.
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
    # z never increases, so no run has more rounds than the budget in units of round 0's spending
    scale = 1 - slope * np.arange(int(min(allowed * first * first, longest)))
    z = first * scale[scale > 0]
    z = z[np.cumsum(1 / z**2) <= allowed]
    if z.size == 0:
        raise ValueError(f"expected a first round within the budget {allowed:.6g}, got first={first}")
    return tuple(z.tolist())


def whole_run_mu(multipliers: Iterable[float]) -> float:
    """mu = sqrt(sum 1/z^2) of the single Gaussian equivalent to rounds with these multipliers; 0 for no rounds.

    It bounds a client's leakage, over its rounds, to a server that knows the participants.

    Raises:
        ValueError: a multiplier is not above zero.
    """
    return math.sqrt(_spent(multipliers))


def participations(rounds: int, participation: float, quantile: float) -> int:
    """The quantile of Binomial(rounds, participation): the number of rounds in which a client is selected.

    Exact if each round selects a fixed number of clients uniformly and independently.

    Raises:
        ValueError: participation or quantile outside (0, 1], or rounds below 1.
    """
    positive(rounds=rounds)
    for name, value in (("participation", participation), ("quantile", quantile)):
        if not 0 < value <= 1:
            raise ValueError(f"expected 0 < {name} <= 1, got {name}={value}")
    return int(np.searchsorted(special.bdtr(np.arange(rounds), rounds, participation), quantile))


def moment(share: float, shift: float, order: int) -> dict[str, list[float]]:
    """The logarithm of the moment of one round: exactly, by (15) and by (14), to compare (13) to (15).

    Args:
        share: q, the probability that a client takes part.
        shift: the sensitivity over the standard deviation of the noise.
        order: lambda.

    Returns:
        `moment`: log E_Q[(P/Q)^(lambda + 1)] with Q = N(0, 1) and P = (1 - q) N(0, 1) + q N(shift, 1), exactly;
        (15), q x with x = lambda (lambda + 1) shift^2 / 2; (14), ln(1 + q (e^x - 1)).
    """
    x = order * (order + 1) * shift**2 / 2
    # E_Q of a binomial in e^(shift z - shift^2/2): each power has a closed form
    powers = np.arange(order + 2)
    terms = special.gammaln(order + 2) - special.gammaln(powers + 1) - special.gammaln(order + 2 - powers)
    terms = terms + special.xlogy(powers, share) + special.xlogy(order + 1 - powers, 1 - share)
    exact = float(special.logsumexp(terms + powers * (powers - 1) * shift**2 / 2))
    return {"moment": [exact, share * x, float(np.logaddexp(math.log1p(-share), math.log(share) + x))]}


def epsilons(epsilon: float, delta: float) -> dict[str, list[float]]:
    """`run_epsilon`: the epsilon that the paper claims for a whole run with q = 1, and the epsilon of its noise."""
    return {"run_epsilon": [epsilon, claimed_epsilon(budget(epsilon, delta, 1.0, "paper"), delta, 1.0, "tight")]}


def _spent(multipliers: Iterable[float]) -> float:
    all_z = tuple(multipliers)
    if not all(z > 0 for z in all_z):
        raise ValueError(f"expected noise multipliers > 0, got {min(all_z)}")
    return math.fsum(1 / z**2 for z in all_z)
