"""UDP: the noise of a run, its split over rounds, the resulting privacy, and the base of the variants.

A noise multiplier is z = noise_std / sensitivity. A run spends the sum of 1/z^2 over its rounds. Only this sum matters:
all rounds together reveal as much as one Gaussian mechanism with mu = sqrt(sum 1/z^2).

Source: Wei, Li, Ding, Ma, Su, Zhang, Poor 2021, "User-level privacy-preserving federated learning: analysis and
    performance optimization". Despite the title, neighbors differ in one record.

The variants differ in the noise multipliers of their rounds.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from scipy import special
from torch import Tensor

from leakgauge.defenses._common.clip import check_delta, clip_l2, normal_reach
from leakgauge.defenses._common.misfit import gaussian_misfit
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import repeat
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, Violation
from leakgauge.harness.core.codec import pack_float32, unpack_float32
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links, LocalRule, Sender, Setting
from leakgauge.harness.core.distribution import (
    Additive,
    MessageDistribution,
    Normal,
    StepDistribution,
    numbers,
    projected,
)
from leakgauge.harness.core.gaussian import gaussian_epsilon, gaussian_mu
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import ANYBODY, LISTED, seeing
from leakgauge.harness.core.vec import Vector

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


def moment(share: float, step: float, records: int, sigma: float, order: int) -> dict[str, list[float] | float]:
    """The logarithm of the moment of one round: exactly, by (15) and by (14), to compare (13) to (15).

    Args:
        share: q, the probability that a client takes part.
        step: the learning rate times C.
        records: those of the client.
        sigma: the standard deviation of the noise.
        order: lambda.

    Returns:
        `moment`: log E_Q[(P/Q)^(lambda + 1)] with Q = N(0, 1) and P = (1 - q) N(0, 1) + q N(s, 1), where s is the
        sensitivity over sigma, exactly; (15), q (lambda + 1) x with x = lambda s^2 / 2; (14), q (lambda + 1) (e^x - 1).
        `gap`: how far (15) is from the exact one.
    """
    shift = sensitivity(1.0, step, records) / sigma
    x = order * shift**2 / 2
    # E_Q of a binomial in e^(shift z - shift^2/2): each power has a closed form
    powers = np.arange(order + 2)
    terms = special.gammaln(order + 2) - special.gammaln(powers + 1) - special.gammaln(order + 2 - powers)
    terms = terms + special.xlogy(powers, share) + special.xlogy(order + 1 - powers, 1 - share)
    exact = float(special.logsumexp(terms + powers * (powers - 1) * shift**2 / 2))
    bounds = [share * (order + 1) * x, share * (order + 1) * math.expm1(x)]
    return {"moment": [exact, *bounds], "gap": abs(bounds[0] - exact)}


def epsilons(epsilon: float, delta: float) -> dict[str, list[float]]:
    """`run_epsilon`: the epsilon that the paper claims for a whole run with q = 1, and the epsilon of its noise."""
    return {"run_epsilon": [epsilon, claimed_epsilon(budget(epsilon, delta, 1.0, "paper"), delta, 1.0, "tight")]}


def _spent(multipliers: Iterable[float]) -> float:
    all_z = tuple(multipliers)
    if not all(z > 0 for z in all_z):
        raise ValueError(f"expected noise multipliers > 0, got {min(all_z)}")
    return math.fsum(1 / z**2 for z in all_z)


S = TypeVar("S")
Clips = Literal["records", "update"]
"""The vectors that are clipped: each record's gradient, as printed, or the update after local training."""

_EXACT = "analytic Gaussian"
_MESSAGES = seeing(LISTED, some={"messages"})
_QUIET = 1e6  # the sum of 1/z^2 of a quieter run; z is then 3e-3 over ten rounds
_FALLING = "no round's learning rate is above that of round 0"

_OFTEN = 0.95  # quantile of the number of selections that defines a client selected often
# The part of a claim's source that names the calibration
_BY: dict[Calibration, str] = {
    "paper": "",
    "zcdp": ", noise by zCDP (Bun & Steinke 2016, Prop. 1.3)",
    "tight": ", exact noise (Balle & Wang 2018, Thm 8)",
}


@dataclass(frozen=True)
class UDPRounds(Defense[S, None]):
    """Normal noise on a clipped message in each round, with a multiplier z from the public state.

    The noise of client i has standard deviation z Dl_i, where Dl_i is the sensitivity of the client's message:

    | clips | sends | Dl_i | to |
    |---|---|---|---|
    | records | update | 2 lr C / n_i, lr of round 0 | one replaced record |
    | records | gradient | 2 C / n_i | one replaced record |
    | update | either | 2 C | any two messages |
    """

    promises: ClassVar[Horizon] = Horizon.WHOLE_RUN
    source: ClassVar[str]
    """The source of the schedule."""

    clip: float = 1.0
    epsilon: float = 8.0
    delta: float = 1e-3
    rounds: int | None = None
    clips: Clips = "records"

    def __post_init__(self) -> None:
        positive(clip=self.clip)
        budget(self.epsilon, self.delta, 1.0, self.formula)
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"expected rounds >= 1, got rounds={self.rounds}")
        if self.clips not in ("records", "update"):
            raise ValueError(f"expected clips records or update, got {self.clips!r}")

    @property
    @abstractmethod
    def formula(self) -> Calibration:
        """The formula between the epsilon and the noise of a run."""

    @abstractmethod
    def noise_multiplier(self, state: S, setting: Setting) -> float:
        """z in the round of this state."""

    @property
    def local(self) -> LocalRule:
        """For `records`, one full-batch step on clipped gradients: only then is the sensitivity known."""
        return LocalRule(clip=self.clip, full_batch=True) if self.clips == "records" else LocalRule()

    def horizon(self, setting: Setting) -> int:
        """T, the number of rounds for which the noise is calibrated."""
        return setting.rounds if self.rounds is None else self.rounds

    def state_metrics(self, state: S, setting: Setting) -> dict[str, float]:
        """z of the round, and the current T."""
        rounds = self.planned_rounds(state, setting)
        return {"noise_multiplier": self.noise_multiplier(state, setting), "planned_rounds": float(rounds)}

    def planned_rounds(self, state: S, setting: Setting) -> int:
        """The number of rounds after which the run ends, as planned in this state."""
        return self.horizon(setting)

    def sigma(self, state: S, sender: Sender, setting: Setting) -> float:
        """Standard deviation of the noise in each coordinate of this client's message."""
        z = self.noise_multiplier(state, setting)
        if self.clips == "update":
            return z * 2 * self.clip
        return z * sensitivity(self.clip, self._step(setting), sender.samples)

    def encode(self, state: S, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Clip the update if `clips` is `update`, add noise from the private key, send float32."""
        check_update(update)
        noise = rng.normal(private, (update.numel(),), torch.float64)
        clipped = clip_l2(update, self.clip) if self.clips == "update" else update
        noisy = clipped.cpu().double() + self.sigma(state, link.sender, link.setting) * noise
        return pack_float32(noisy.float()), None

    def estimate(self, state: S, received: bytes, link: Link) -> Vector:
        """The noisy message, unbiased for the clipped update or mean of clipped gradients."""
        return unpack_float32(received, link.setting.dim)

    def longest(self, state: S, link: Link) -> float:
        """C plus a bound on the noise if updates are clipped; else infinite: a penalty of the model is not clipped."""
        noise = normal_reach(self.sigma(state, link.sender, link.setting), link.setting.dim)
        return self.clip + noise if self.clips == "update" else math.inf

    def likelihood(self, state: S, received: Sequence[bytes], links: Links) -> Likelihood:
        """|y - clip(u)|^2 / (2 sigma_i^2), where sigma_i is that of each message's sender.

        A candidate is clipped to the norm bound of a message. This is exact for a clipped update or a single record.
        For several clipped records, the mean shows only this bound; an attack that tries records clips each of them. An
        l2 penalty of the model, which is not clipped, is ignored.
        """
        sent = torch.stack([unpack_float32(wire, links.setting.dim) for wire in received])
        sigmas = [[self.sigma(state, sender, links.setting)] for sender in links.senders]
        noise = torch.tensor(sigmas, dtype=torch.float64)
        bound = self.clip if self.clips == "update" else self.clip * self._step(links.setting)

        def score(update: Tensor) -> Tensor:
            return gaussian_misfit((clip_l2(update, bound) - sent) / noise.to(update.dtype), 1.0)

        return score

    def message_distribution(self, state: S, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """Normal noise of z times the sensitivity around the update's projection, or the already bounded update."""
        center, sensitive = projected(update, self.clip), 2 * self.clip
        if self.clips == "records":
            center = numbers(update)
            sensitive *= (link.setting.lr if link.setting.sends == "update" else 1.0) / link.sender.samples
        return Additive(center, Normal(), self.noise_multiplier(state, link.setting) * sensitive)

    def step_distribution(self, setting: Setting) -> StepDistribution | None:
        """For `records`, one step on all records without noise, because noise is added to the message."""
        return StepDistribution(self.clip, 0.0, 1.0, single=True) if self.clips == "records" else None

    def low_noise_variant(self) -> UDPRounds[S]:
        """The same with an epsilon that allows z far below 1."""
        return replace(self, epsilon=claimed_epsilon(_QUIET, self.delta, 1.0, self.formula))

    def claim(self, history: Sequence[S], setting: Setting) -> Claim:
        """(epsilon, delta) over these rounds, claimed by `formula` and proved by exact composition of Gaussians.

        The proof is for a client that takes part in every round.
        """
        multipliers = [self.noise_multiplier(state, setting) for state in history]
        share = setting.share
        records = self.clips == "records"
        unit = Unit.RECORD if records else Unit.MESSAGE
        known = "" if share == 1 else "; for a client selected in all rounds, because the server knows the selection"
        why = f"normal noise on a message of known sensitivity; rounds compose exactly{known}."
        return Claim(
            epsilon=claimed_epsilon(whole_run_mu(multipliers) ** 2, self.delta, share, self.formula),
            delta=self.delta,
            unit=unit,
            relation=Relation.REPLACE if records else Relation.ANY_TWO,
            horizon=Horizon.of(len(history)),
            against=ANYBODY,
            source=self.source + _BY[self.formula],
            assumes=tuple(self.assumes(setting)),
            proved=_composed(multipliers, unit, why),
            further=(*_picked(multipliers, unit, share), self._client(multipliers, setting)),
        )

    def summed_proof(self, history: Sequence[S], setting: Setting, senders: int) -> Proof | None:
        """For clipped updates, the noises of n clients add up to sqrt(n) times that of one."""
        if self.clips == "records":
            return None
        multipliers = [2 * math.sqrt(senders) * self.noise_multiplier(state, setting) for state in history]
        return _composed(multipliers, Unit.CLIENT, "normal noise on clipped updates; rounds compose exactly.")

    def violations(self, updates: Sequence[Vector], links: Links, lr: float) -> dict[str, Violation]:
        """The rounds whose learning rate is above that of round 0, for which the noise is calibrated."""
        if _FALLING not in self.assumes(links.setting):
            return {}
        return {_FALLING: Violation(int(lr > links.setting.lr), 1, "round")}

    def assumes(self, setting: Setting) -> list[str]:
        """The assumptions of the claim."""
        texts = ["C and T do not depend on private data (the source takes C from the gradients' norms)"]
        if self.clips == "records" and setting.sends == "update":
            texts.append(_FALLING)
        if self.formula == "paper" and setting.share < 1:
            texts.append(
                "the adversary does not know which clients take part (a share q); this multiplies epsilon by sqrt(q)"
            )
        return texts

    def _step(self, setting: Setting) -> float:
        return setting.lr if setting.sends == "update" else 1.0

    def _client(self, multipliers: Sequence[float], setting: Setting) -> Proof:
        if self.clips == "update":
            why = "two clipped updates differ by no more than the sensitivity, whatever their records."
            return replace(_composed(multipliers, Unit.CLIENT, why), against=_MESSAGES)
        n = setting.samples
        why = (
            f"all {n} records of the smallest client move its message {n} times as far as one; more for larger clients."
        )
        return _composed((z / n for z in multipliers), Unit.CLIENT, why)


@dataclass(frozen=True)
class Calibrated(UDPRounds[S]):
    """A variant whose formula is a parameter."""

    calibration: Calibration = "paper"

    @property
    def formula(self) -> Calibration:
        """The calibration."""
        return self.calibration


def _picked(multipliers: Sequence[float], unit: Unit, share: float) -> tuple[Proof, ...]:
    if share == 1 or len(multipliers) < 2:
        return ()
    from dp_accounting import GaussianDpEvent

    mean = GaussianDpEvent(1 / (math.sqrt(share) * whole_run_mu(multipliers)))
    average = f"for the average client, which spends a share of {share:g} of the run's budget."
    often = participations(len(multipliers), share, _OFTEN)
    rounds = f"the {often} of {len(multipliers)} rounds with the least noise"
    most = f"for a client selected in {rounds}; {_OFTEN:.0%} of clients are not selected more often."
    return Proof(mean, unit, _EXACT, average), _composed(sorted(multipliers)[:often], unit, most)


def _composed(multipliers: Iterable[float], unit: Unit, reason: str) -> Proof:
    from dp_accounting import ComposedDpEvent, GaussianDpEvent

    events = [repeat(GaussianDpEvent(z), count) for z, count in Counter(multipliers).items()]
    return Proof(ComposedDpEvent(events), unit, _EXACT, reason)
