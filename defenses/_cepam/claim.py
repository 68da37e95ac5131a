"""What CEPAM claims of the averaged model, what holds of it, and what the server can tell.

Claimed (Ling et al. 2025): in a round a client draws tau samples out of |D| with replacement, one a step, so that it
uses a given one with probability p = 1 - (1 - 1/|D|)^tau. Thm 12, normal noise, with eps~ the local epsilon:

    eps = ln(1 + p (e^eps~ - 1)),    a = tau gamma / (sqrt(K) sigma),
    delta = sum_j P(j of the tau draws are the record) (e^eps~ - 1) / (e^(eps~/j) - 1) delta_2a(eps~/j),

delta_mu that of the Gaussian mechanism. Thm 13, Laplace noise: (eps, 0) if eps~ >= 2 tau gamma / b. Here a step of B
samples counts as B draws; the source has B = 1.

Holds: local training cuts permutations, so that a given record is used with probability p' = min(1, tau B / |D|), which
is p or more. Whatever is then done to it, (0, p') holds, without any noise. And no more, where noise grows with the
update's norm: if no other record moves the model, then without this one it stands still, exactly.

The server knows radii and dithers, and the message is a function of them and the input. One sub-vector of two inputs a
distance D apart: they send the same if the first dither that either accepts is accepted by both, with the same cell.
For n = 1 each dither is accepted, and they differ with probability t = 2 Phi(D / 2 sigma) - 1, the total variation of
the noise (1 - exp(-D / 2b) for Laplace). For n > 1 the rejected dithers tell too: it is t at least and 2t / (1 + t) at
most, from the volumes of a union and an intersection of balls. Over N sub-vectors the chances to send the same
multiply. Whichever of the two it takes, D in all tells most where it is spread evenly: the logarithm of the chance is
convex in D^2. Two different messages are never confused: what is told is told at every epsilon.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import special, stats

from leakgauge.harness.core.accounting import Leak, delta, gaussian_delta, repeat
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, every_round
from leakgauge.harness.core.contract import Setting
from leakgauge.harness.core.threats import Threat

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_RECIPIENTS = frozenset({Threat.PARTICIPANT, Threat.PUBLIC})
"""Who sees averages alone: against them the claim is made."""

_SERVERS = frozenset({Threat.SERVER, Threat.COLLUDING_SERVER})

_FAR = 5.0
"""Shift, in noise, above which a bound leaves sampling out: its privacy loss distribution would take many seconds."""


_NOTHING = -200.0
"""Logarithm of what no delta is changed by."""


class Promise(NamedTuple):
    """An epsilon at a delta, as claimed; infinite: nothing is claimed."""

    epsilon: float
    delta: float


def theorem_12(local_epsilon: float, reach: float, setting: Setting) -> Promise:
    """One round with normal noise; `reach` is gamma / sigma. The delta may come out above 1."""
    mu = 2 * setting.steps * reach / math.sqrt(setting.participants)
    times = np.arange(1, _draws(setting) + 1)
    share = local_epsilon / times
    # as logarithms: (e^eps~ - 1) / (e^(eps~/j) - 1) overflows
    growth = local_epsilon - share + np.log1p(-np.exp(-local_epsilon)) - np.log1p(-np.exp(-share))
    most = stats.binom.logpmf(times, _draws(setting), 1 / setting.samples) + growth
    kept = most > _NOTHING
    single = np.array([gaussian_delta(mu, each) for each in share[kept].tolist()])
    with np.errstate(divide="ignore", over="ignore"):
        found = np.exp(most[kept] + np.log(single)).sum()
    return Promise(_amplified(local_epsilon, setting), float(found))


def theorem_13(local_epsilon: float, reach: float, setting: Setting) -> Promise:
    """One round with Laplace noise; `reach` is gamma / b. Nothing where the theorem's condition is not met."""
    met = local_epsilon >= 2 * setting.steps * reach
    return Promise(_amplified(local_epsilon, setting) if met else math.inf, 0.0)


def norm_scaled(one: Promise, source: str, variation: float, n: int, rounds: int, setting: Setting) -> Claim:
    """The claim where noise grows with the update's norm, and the server is told that norm.

    Args:
        variation: total variation of the noise of a sub-vector that moves as far as it can, given the norm.
    """
    promise, leak = _over(one, rounds), repeat(Leak(_used(setting)), rounds)
    touched = delta(leak, 0.0)
    reason = _vacuous(touched)
    if promise.delta < touched:
        reason = (
            f"a record is used with probability {touched:.6g}; where no other one moves the model, its noise is zero "
            "too unless this one is used, and a model that moved says so."
        )
    proved = Proof(leak, Unit.RECORD, "closed form", reason, against=_RECIPIENTS)
    norm = Proof(None, Unit.MESSAGE, "closed form", "the update's norm is sent in the clear.", against=_SERVERS)
    assumed = "all updates of a round have one norm, and one weight"
    return _claim(promise, source, assumed, proved, (norm, _sub_vector(variation, n, rounds)), rounds)


def clipped(one: Promise, source: str, reach: float, n: int, rounds: int, setting: Setting) -> Claim:
    """The claim where updates are clipped to a public bound of `reach` sigmas, to which noise of `reach` 1 is added."""
    # a participant knows its own noise and takes it out of the average
    mu = 2 * reach / math.sqrt(max(1, setting.participants - 1))
    promise, average = _over(one, rounds), _gaussians(mu, rounds)
    moved = "clipped messages of equal weights, and the noise of all but the participant who looks."
    further = (
        Proof(average, Unit.MESSAGE, "analytic Gaussian", moved, against=_RECIPIENTS),
        _message(reach, n, rounds, setting),
        _sub_vector(1 - 2 * float(special.ndtr(-reach)), n, rounds),
    )
    proved = _clipped_record(promise, mu, rounds, setting)
    return _claim(promise, source, "all updates of a round have one weight", proved, further, rounds)


def _clipped_record(promise: Promise, mu: float, rounds: int, setting: Setting) -> Proof:
    """What holds of a record in an average of clipped messages; the best bound at the delta that is promised."""
    chance = _used(setting)
    leak = repeat(Leak(chance), rounds)
    if promise.delta >= (touched := delta(leak, 0.0)):
        return Proof(leak, Unit.RECORD, "closed form", _vacuous(touched), tight=False, against=_RECIPIENTS)
    if rounds == 1 and promise.delta > 0 and mu <= _FAR:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

        reason = (
            f"used with probability p = {chance:.6g}, it moves the average by {mu:.6g} of its noise at most: delta is "
            "p times that of the Gaussian mechanism at ln(1 + (e^epsilon - 1) / p)."
        )
        sampled = PoissonSampledDpEvent(chance, GaussianDpEvent(1 / mu))
        return Proof(sampled, Unit.RECORD, "privacy loss distribution", reason, tight=False, against=_RECIPIENTS)
    reason = f"a record moves the average by {mu:.6g} of its noise at most; that it may not be used is left out."
    tight = chance == 1
    if tight:
        reason = f"a record, which is always used, moves the average by {mu:.6g} of its noise at most."
    event = _gaussians(mu, rounds)
    return Proof(event, Unit.RECORD, "analytic Gaussian", reason, tight=tight, against=_RECIPIENTS)


def _message(reach: float, n: int, rounds: int, setting: Setting) -> Proof:
    """What the server tells of a message that moves as far as it can, in all its sub-vectors alike."""
    count = -(-setting.dim // n)
    shift = reach / math.sqrt(count)
    same = float(special.log_ndtr(-shift)) - (-math.log(2) if n == 1 else float(special.log_ndtr(shift)))
    reason = (
        f"a change that is spread over all {count} sub-vectors leaves each on a known ball, but rarely all of them."
    )
    event = repeat(Leak(-math.expm1(count * same)), rounds)
    return Proof(event, Unit.MESSAGE, "closed form", reason, tight=n == 1, against=_SERVERS)


def _sub_vector(variation: float, n: int, rounds: int) -> Proof:
    """What the server tells of a sub-vector whose noise has this total variation."""
    told = variation if n == 1 else 2 * variation / (1 + variation)
    reason = "the server knows the dithers, so that the error is uniform on a known ball: two inputs share it or not."
    event = repeat(Leak(told), rounds)
    return Proof(event, Unit.SUBVECTOR, "closed form", reason, tight=n == 1, against=_SERVERS)


def _claim(
    promise: Promise, source: str, assumed: str, proved: Proof, further: tuple[Proof, ...], rounds: int
) -> Claim:
    """One record replaced, against those who see averages."""
    drawn = "samples are drawn one a step, with replacement"
    return Claim(
        epsilon=promise.epsilon,
        delta=promise.delta,
        unit=Unit.RECORD,
        relation=Relation.REPLACE,
        horizon=Horizon.of(rounds),
        against=_RECIPIENTS if math.isfinite(promise.epsilon) else frozenset(),
        source=source + (", rounds added up by us" if rounds > 1 else ""),
        assumes=("the server is trusted", drawn, assumed, *every_round(rounds)),
        proved=proved,
        further=further,
    )


def _over(one: Promise, rounds: int) -> Promise:
    """Of so many rounds, added up; with a delta of 1 or more nothing is promised."""
    total = one.delta * rounds
    return Promise(one.epsilon * rounds, total) if total < 1 else Promise(math.inf, 0.0)


def _draws(setting: Setting) -> int:
    """Samples that the smallest client takes in a round, each counted as often as it is taken."""
    batch = min(setting.batch, setting.samples) if setting.batch else setting.samples
    return setting.steps * batch


def _used(setting: Setting) -> float:
    """p', the chance that local training uses a given record of the smallest client in a round."""
    return min(1.0, _draws(setting) / setting.samples)


def _amplified(local_epsilon: float, setting: Setting) -> float:
    """ln(1 + p (e^eps~ - 1)), p by the source's way to draw."""
    missed = (1 - 1 / setting.samples) ** _draws(setting)
    with np.errstate(divide="ignore"):
        return float(np.logaddexp(np.log(missed), np.log1p(-missed) + local_epsilon))


def _vacuous(touched: float) -> str:
    """Why a claim says nothing of its noise."""
    return (
        f"vacuous: weaker than no noise at all; a record is used with probability {touched:.6g}, and no delta above "
        "that needs noise."
    )


def _gaussians(mu: float, rounds: int) -> DpEvent:
    """A shift of so many standard deviations, in each round."""
    from dp_accounting import GaussianDpEvent

    event: DpEvent = repeat(GaussianDpEvent(1 / mu), rounds)
    return event
