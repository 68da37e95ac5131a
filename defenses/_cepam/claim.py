"""The claim of CEPAM for the averaged model, correct bounds, and the leakage to the server.

Claimed (Ling et al. 2025): in a round, a client draws tau samples out of |D| with replacement, one per step, so it uses
a given sample with probability p = 1 - (1 - 1/|D|)^tau. Thm 12, normal noise, with eps~ the local epsilon:

    eps = ln(1 + p (e^eps~ - 1)),    a = tau gamma / (sqrt(K) sigma),
    delta = sum_j P(j of the tau draws are the record) (e^eps~ - 1) / (e^(eps~/j) - 1) delta_2a(eps~/j),

with delta_mu the delta of the Gaussian mechanism. Thm 13, Laplace noise: (eps, 0) if eps~ >= 2 tau gamma / b. Here a
step of B samples counts as B draws; the source has B = 1.

Bound for a record: local training cuts permutations into batches, so a given record is used with probability p' =
min(1, tau B / |D|) >= p. Whatever happens to the record then, (0, p') holds, even without noise. No better bound holds
where noise grows with the update's norm: if no other record moves the model, the model stays exactly unchanged without
this record.

Bounds against the server: the server knows radii and dithers, and the message is a function of these and the input.
Take one sub-vector of two inputs at a distance D. Both inputs give the same message if the first dither that either
accepts is accepted by both, with the same cell. For n = 1 each dither is accepted, and the messages differ with
probability t = 2 Phi(D / 2 sigma) - 1, the total variation of the noise (1 - exp(-D / 2b) for Laplace). For n > 1, the
rejected dithers leak too: the probability is between t and 2t / (1 + t), from the volumes of a union and an
intersection of balls. Over N sub-vectors, the probabilities of equal messages multiply. This also holds where the
dithers of an attempt depend on which sub-vectors are still open, as in `wire`: as long as all attempts of both inputs
agree, both get the same dithers, which are new. With either bound, a total D leaks most if it is spread evenly, because
the logarithm of the probability is convex in D^2. Two different messages are never confused, so this leakage holds at
every epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy import special, stats

from leakgauge.harness.core.accounting import Leak, delta, repeat
from leakgauge.harness.core.claim import Claim, Proof, Relation, Unit, Violation, added_up, claim_over
from leakgauge.harness.core.contract import Links, Setting
from leakgauge.harness.core.gaussian import gaussian_delta
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Layout, Vector

# The adversaries of the claim, which see only averages
_RECIPIENTS = frozenset({Threat.AGGREGATOR, Threat.PARTICIPANT, Threat.PUBLIC})
_SERVERS = frozenset({Threat.SERVER, Threat.COLLUDING_SERVER, Threat.MALICIOUS_SERVER})

_SINGLE = "samples are drawn one per step, with replacement"
_ONE_NORM = "all updates of a round have the same norm and the same weight"
ONE_WEIGHT = "all updates of a round have the same weight"

_ROUNDING = 1e-6  # relative difference of two norms that rounding may explain
# Shift, in noise standard deviations, above which a bound ignores sampling, whose accounting would take too long
_FAR = 5.0
_NOTHING = -200.0  # logarithm of a probability too small to change any delta


class Promise(NamedTuple):
    """A claimed epsilon at a delta; infinite epsilon: no claim."""

    epsilon: float
    delta: float


def theorem_12(local_epsilon: float, reach: float, setting: Setting) -> Promise:
    """Thm 12: one round with normal noise; `reach` is gamma / sigma. The delta may exceed 1."""
    mu = 2 * setting.steps * reach / math.sqrt(setting.participants)
    times = np.arange(1, _draws(setting) + 1)
    share = local_epsilon / times
    # as logarithms, because (e^eps~ - 1) / (e^(eps~/j) - 1) overflows
    growth = local_epsilon - share + np.log1p(-np.exp(-local_epsilon)) - np.log1p(-np.exp(-share))
    most = stats.binom.logpmf(times, _draws(setting), 1 / setting.samples) + growth
    relevant = most > _NOTHING
    single = np.array([gaussian_delta(mu, each) for each in share[relevant].tolist()])
    with np.errstate(divide="ignore", over="ignore"):
        total = np.exp(most[relevant] + np.log(single)).sum()
    return Promise(_amplified(local_epsilon, setting), float(total))


def printed(
    local_epsilon: float, steps: int, samples: int, clients: int, noise_std: float, gamma: float
) -> dict[str, float | list[float]]:
    """Thm 12 for steps of one sample: `thm_12_epsilon`, and in `thm_12_delta` its delta and the delta without noise.

    Without noise, (0, p) holds, where p is the probability that the record is used.
    """
    promise = theorem_12(local_epsilon, gamma / noise_std, _single(steps, samples, clients))
    return {"thm_12_epsilon": promise.epsilon, "thm_12_delta": [promise.delta, 1 - (1 - 1 / samples) ** steps]}


def printed_13(local_epsilon: float, steps: int, samples: int, clients: int, noise_scale: float, gamma: float) -> float:
    """The epsilon of Thm 13 for steps of one sample; infinite if the theorem's condition fails."""
    return theorem_13(local_epsilon, gamma / noise_scale, _single(steps, samples, clients)).epsilon


def _single(steps: int, samples: int, clients: int) -> Setting:
    """One round of steps of one sample."""
    return Setting(Layout(("update",), ((1,),)), clients, clients, 1, "update", steps, 0.1, 1, samples)


def fixed_length(dimension: int, noise_std: float, gamma: float) -> float:
    """Mean bits of a coordinate if attempts and cells are sent as in section III, each cell in a fixed length.

    The length of a cell follows from the radius r: cells of side 2r that may hold a point within gamma + r of the
    dither, whose mean number is the volume of a unit cube with a margin of (gamma + r) / 2r.
    """
    radii = noise_std * np.sqrt(stats.chi2.ppf((np.arange(10_000) + 0.5) / 10_000, dimension + 2))
    balls, margin = (1.0, 2.0, math.pi, 4 * math.pi / 3), (gamma + radii) / (2 * radii)
    cells = sum(math.comb(dimension, k) * balls[k] * margin**k for k in range(dimension + 1))
    attempts = stats.geom.entropy(balls[dimension] / 2**dimension) / math.log(2) if dimension > 1 else 0.0
    return float((np.ceil(np.log2(cells)).mean() + attempts) / dimension)


def theorem_13(local_epsilon: float, reach: float, setting: Setting) -> Promise:
    """Thm 13: one round with Laplace noise; `reach` is gamma / b. No claim if the theorem's condition fails."""
    met = local_epsilon >= 2 * setting.steps * reach
    return Promise(_amplified(local_epsilon, setting) if met else math.inf, 0.0)


def norm_scaled(single: Promise, source: str, variation: float, n: int, rounds: int, setting: Setting) -> Claim:
    """The claim if noise grows with the update's norm, which is sent to the server.

    Args:
        variation: total variation of the noise of a sub-vector that moves as far as possible, given the norm.
    """
    promise, chance = _over(single, rounds), _used(setting)
    touched = delta(repeat(Leak(chance), rounds), 0.0)
    reason = _vacuous(touched)
    if promise.delta < touched:
        reason = (
            f"a record is used with probability {touched:.6g}; if no other record changes the model, a changed model "
            "reveals that this record was used, because the noise is zero if the update is zero."
        )
    proved = Proof.leak(chance, rounds, Unit.RECORD, reason, against=_RECIPIENTS)
    norm = Proof.none(Unit.MESSAGE, "the update's norm is sent in the clear.", "closed form", against=_SERVERS)
    return _claim(promise, source, _ONE_NORM, proved, (norm, _sub_vector(variation, n, rounds)), rounds)


def clipped(single: Promise, source: str, reach: float, n: int, rounds: int, setting: Setting) -> Claim:
    """The claim if updates are clipped to a public bound, `reach` times the standard deviation of the noise."""
    # a participant knows its own noise and subtracts it from the average
    mu = 2 * reach / math.sqrt(max(1, setting.participants - 1))
    promise = _over(single, rounds)
    count = -(-setting.dim // n)
    shift = reach / math.sqrt(count)
    same = float(special.log_ndtr(-shift)) - (-math.log(2) if n == 1 else float(special.log_ndtr(shift)))
    spread = (
        f"a change spread over all {count} sub-vectors is hidden only if no error is outside the other input's ball."
    )
    moved = "messages are clipped and have equal weights; the noise of the observing participant does not count."
    further = (
        Proof.gaussian(1 / mu, rounds, Unit.MESSAGE, moved, against=_RECIPIENTS),
        Proof.leak(-math.expm1(count * same), rounds, Unit.MESSAGE, spread, tight=n == 1, against=_SERVERS),
        _sub_vector(1 - 2 * float(special.ndtr(-reach)), n, rounds),
    )
    proved = _clipped_record(promise, mu, rounds, setting)
    return _claim(promise, source, ONE_WEIGHT, proved, further, rounds)


def violations(updates: Sequence[Vector], links: Links, *, sends_norm: bool) -> dict[str, Violation]:
    """The messages whose records are drawn without replacement, and the rounds of unequal norms or weights.

    The bound for a record covers both violations if norms are sent; if updates are clipped, it needs equal weights.
    """
    setting, senders = links.setting, links.senders
    single = setting.steps == 1 and setting.batch == 1
    broken = sum(sender.samples > 1 for sender in senders) * (not single)
    drawn = Violation(broken, len(senders), "message", covered=True)
    unequal = len({sender.samples for sender in senders}) > 1
    if sends_norm:
        norms = [float(torch.linalg.vector_norm(update, dtype=torch.float64)) for update in updates]
        unequal |= max(norms) > (1 + _ROUNDING) * min(norms)
    assumed = _ONE_NORM if sends_norm else ONE_WEIGHT
    return {_SINGLE: drawn, assumed: Violation(int(unequal), 1, "round", covered=sends_norm)}


def _clipped_record(promise: Promise, mu: float, rounds: int, setting: Setting) -> Proof:
    """The best bound for a record in an average of clipped messages, at the claimed delta."""
    chance = _used(setting)
    if promise.delta >= (touched := delta(repeat(Leak(chance), rounds), 0.0)):
        return Proof.leak(chance, rounds, Unit.RECORD, _vacuous(touched), tight=False, against=_RECIPIENTS)
    if rounds == 1 and promise.delta > 0 and mu <= _FAR:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

        reason = (
            f"a record, used with probability p = {chance:.6g}, moves the average by at most {mu:.6g} standard "
            "deviations of its noise: delta is p times that of the Gaussian mechanism at ln(1 + (e^epsilon - 1) / p)."
        )
        sampled = PoissonSampledDpEvent(chance, GaussianDpEvent(1 / mu))
        return Proof(sampled, Unit.RECORD, "privacy loss distribution", reason, tight=False, against=_RECIPIENTS)
    tight = chance == 1
    which = ", which is always used," if tight else ""
    rest = "" if tight else "; the bound ignores that training may not use the record"
    reason = f"a record{which} moves the average by at most {mu:.6g} standard deviations of its noise{rest}."
    return Proof.gaussian(1 / mu, rounds, Unit.RECORD, reason, tight=tight, against=_RECIPIENTS)


def _sub_vector(variation: float, n: int, rounds: int) -> Proof:
    leak = variation if n == 1 else 2 * variation / (1 + variation)
    reason = (
        "the server knows the dithers, so the error is uniform on a known ball; an error outside the other input's "
        "ball reveals the input."
    )
    return Proof.leak(leak, rounds, Unit.SUBVECTOR, reason, tight=n == 1, against=_SERVERS)


def _claim(
    promise: Promise, source: str, assumed: str, proved: Proof, further: tuple[Proof, ...], rounds: int
) -> Claim:
    return claim_over(
        rounds,
        promise.epsilon,
        proved,
        source=added_up(source, rounds),
        delta=promise.delta,
        relation=Relation.REPLACE,
        against=_RECIPIENTS,
        assumes=("the server is trusted", _SINGLE, assumed),
        further=further,
    )


def _over(single: Promise, rounds: int) -> Promise:
    total = single.delta * rounds
    return Promise(single.epsilon * rounds, total) if total < 1 else Promise(math.inf, 0.0)


def _draws(setting: Setting) -> int:
    """Number of samples that the smallest client draws in a round, with multiplicity."""
    batch = min(setting.batch, setting.samples) if setting.batch else setting.samples
    return setting.steps * batch


def _used(setting: Setting) -> float:
    """p', the probability that local training uses a given record of the smallest client in a round."""
    return min(1.0, _draws(setting) / setting.samples)


def _amplified(local_epsilon: float, setting: Setting) -> float:
    missed = (1 - 1 / setting.samples) ** _draws(setting)
    with np.errstate(divide="ignore"):
        return float(np.logaddexp(np.log(missed), np.log1p(-missed) + local_epsilon))


def _vacuous(touched: float) -> str:
    return (
        f"vacuous: a record is used with probability {touched:.6g}, and a delta above this probability holds without "
        "any noise."
    )
