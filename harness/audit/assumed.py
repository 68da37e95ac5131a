"""Bounds of epsilon that assume a part of the distribution that a defense states; without it, n trials show at most
about ln n.

A distribution may declare a product, whose independent numbers have an event each, or two branches, whose chances are
counted; `docs/claims.md` has the table of what is assumed. A message of k independent numbers is k trials of one
coordinate, and its epsilon at delta 0 is the sum over its numbers. These bounds are dropped if a test rejects the
distribution, but no test can prove their assumption.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from leakgauge.harness.audit.bounds import clopper_pearson_high
from leakgauge.harness.audit.neighbors import Inputs, pairs
from leakgauge.harness.audit.trials import Mechanism, Trace
from leakgauge.harness.core.claim import Claim, Unit
from leakgauge.harness.core.contract import Link, Sender
from leakgauge.harness.core.distribution import Branches, DistributionError, Integers, MessageDistribution
from leakgauge.harness.core.result import AssumedBound
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.threats import SEES
from leakgauge.harness.core.vec import Vector

_PILOT = 200  # pilot messages that choose the event
_THRESHOLDS = 300  # the number of compared thresholds: quantiles of the scores with input 1

_LEAST, _EVENTS, _FEW = 500, 100, 5
"""The least number of messages with each input, the wanted number of rare events, and the number below which events are
few."""

_LOGITS = np.arange(-10.0, 60.0, 0.1)  # tested chances of the likelier branch, as logits
_WORK = 100  # numbers read per trial of the audit, to tell branches apart
_RARE = 0.9  # share of the error probability given to the pooled rare events, whose interval costs most

_MOST, _MOST_OF_BRANCHES = 5, 3
"""The most counted messages as a multiple of the audit's trials: for a product, and for two branches."""


class _Event(NamedTuple):
    """What is counted: numbers `which` of a message whose score, times `side`, is above a threshold."""

    inputs: Inputs
    side: int
    threshold: float
    which: Integers
    expected: float

    def hits(self, scores: Numbers) -> Integers:
        """[which]: the number of messages [n, k] in which each number is counted."""
        return np.asarray((self.side * scores[:, self.which] > self.threshold).sum(0), np.int64)


def assumed_bounds(
    mechanism: Mechanism, claim: Claim, trials: int, confidence: tuple[float, float], key: Key
) -> tuple[AssumedBound, ...]:
    """The bounds for one round at delta 0, for units that have a proof; none if the distribution declares nothing.

    Args:
        trials: of the audit.
        confidence: of `AssumedBound.epsilon_lower` and of `AssumedBound.strict`.
    """
    sees = mechanism.sees_messages and "shared" in SEES[mechanism.threat] and not mechanism.defense.superposes
    if claim.delta > 0 or not sees or len(mechanism.federation.history) > 1:
        return ()  # before any epsilon at delta 0, which the proof of a claim with delta > 0 need not have
    if min(_proved(claim, Unit.COORDINATE), _proved(claim, Unit.MESSAGE)) == math.inf:
        return ()
    try:
        asked = mechanism, claim, trials, confidence
        return _of_branches(*asked, key.child("branches")) or _of_numbers(*asked, key.child("numbers"))
    except DistributionError:  # the goodness-of-fit test reports an error of a stated distribution, too
        return ()


def _of_branches(
    mechanism: Mechanism, claim: Claim, trials: int, confidence: tuple[float, float], key: Key
) -> tuple[AssumedBound, ...]:
    """The bound of a distribution with two branches: the logit of the chance of the likelier one, plus the branches'
    known gain.

    The branch of a message is hidden; its likelihoods a and b in the two branches are known. A chance q and all smaller
    chances are refuted if the product over messages of (p a + (1 - p) b) / (q a + (1 - q) b), averaged over larger
    chances p, is at least 1 / (1 - confidence). The mean of the product is at most 1, since the ratio rises with a / b.

    Guarantees:
        Above the true epsilon with probability at most 1 - confidence, if messages follow the distribution up to this
        chance.

    Source: Ville 1939; averages of likelihood ratios are e-values.
    """
    inputs = _pairs(mechanism, claim, key)[-1]
    trace, branches = mechanism.run(inputs, 1, 1, key.child("tried"), only="wires"), list[Branches]()
    distribution = next(_distributions(mechanism, inputs.one, trace))
    if distribution.branches(trace.wires[0]) is None:
        return ()
    numbers = len(distribution.read(trace.wires[0], key.child("own")).uniforms)
    counted = math.ceil(trials * min(_MOST_OF_BRANCHES, max(0.5, _WORK / numbers)))
    trace = mechanism.run(inputs, 1, counted, key.child("counted"), only="wires")
    for distribution, wire in zip(_distributions(mechanism, inputs.one, trace), trace.wires, strict=True):
        read = distribution.branches(wire)
        assert read is not None  # the first message had branches
        branches.append(read)
    low, strict = (max(0.0, branches_epsilon(branches, level)) for level in confidence)
    about = "the distribution's family", Unit.MESSAGE.value, _proved(claim, Unit.MESSAGE)
    return (AssumedBound(low, strict, *about, 1, counted, inputs.name),)


def branches_epsilon(branches: Sequence[Branches], confidence: float) -> float:
    """The bound for two branches, from what messages say about their branch; may be negative or -inf."""
    likelier, lesser, gains = np.array(branches).T
    chances = special.log_expit(_LOGITS)[:, None] + likelier, special.log_expit(-_LOGITS)[:, None] + lesser
    evidence = np.logaddexp(*chances).sum(1)
    # entry j: the mean over all chances above chance j
    above = np.logaddexp.accumulate(evidence[::-1])[::-1][1:] - math.log(len(_LOGITS))
    # the largest chance that is refuted together with all smaller ones
    kept = np.flatnonzero(above - evidence[:-1] < -math.log1p(-confidence))
    first = int(kept[0]) if len(kept) else len(above)
    return float(_LOGITS[first - 1] if first else -math.inf) + float(gains[0])


def _pairs(mechanism: Mechanism, claim: Claim, key: Key) -> list[Inputs]:
    """The pairs of neighbors, for whole messages, that stay the same in all trials."""
    setting, key = mechanism.federation.setting, key.child("pairs")
    each = pairs(mechanism.defense, setting, Unit.MESSAGE, claim.relation, key)
    return [inputs for inputs in each if inputs.zero.dim() == 1]


def _distributions(mechanism: Mechanism, update: Vector, trace: Trace) -> Iterator[MessageDistribution]:
    """The distribution of each message of a trace, as if its update were `update`."""
    defense, setting, state = mechanism.defense, mechanism.federation.setting, mechanism.federation.history[0]
    memory, sender = defense.remember(setting), Sender(0, setting.samples)
    for shared in trace.shared:
        distribution = defense.message_distribution(state, memory, update, Link(setting, sender, shared))
        if distribution is None:  # a defense may state one for other numbers of coordinates only
            raise DistributionError("no distribution is stated for this update")
        yield distribution


def _of_numbers(
    mechanism: Mechanism, claim: Claim, trials: int, confidence: tuple[float, float], key: Key
) -> tuple[AssumedBound, ...]:
    """The bounds of a product for one coordinate and for the message.

    The score of a number is its uniform under the distribution of input 0; the event is a score that is rare with input
    0. The event of the message is that of all its numbers. With p_i and q_i the chances of the event with inputs 1 and
    0,

        epsilon of a coordinate >= ln(mean p_i / mean q_i),  epsilon of a message >= sum ln p_i - k ln(mean q_i),

    because the mean is above the geometric mean. Each p_i has its own interval; the q_i are pooled, since the event is
    rare. Equal chances are not assumed: a count with unequal chances is spread at most as widely as a binomial
    (Hoeffding 1956, Thm 4).

    Guarantees:
        Above the true epsilon with probability at most 1 - confidence, if numbers are independent given the update.
    """
    event = _choose(mechanism, claim, trials, key.child("pilot"))
    if event is None:
        return ()
    counted = _needed(claim, len(event.which), trials)
    zeros, ones = (_scores(mechanism, event.inputs, bit, counted, key.child("counted", bit)) for bit in (0, 1))
    assert zeros is not None
    assert ones is not None
    counts, bounds = (event.hits(ones.logits), event.hits(zeros.logits)), list[AssumedBound]()
    for unit in (Unit.COORDINATE, Unit.MESSAGE):
        proved = _proved(claim, unit)
        if proved < math.inf and (unit is Unit.MESSAGE or ones.by_coordinate):
            low, strict = (product_epsilon(*counts, counted, unit, level) for level in confidence)
            numbers, name = len(event.which), event.inputs.name
            bounds.append(AssumedBound(low, strict, "a declared product", unit.value, proved, numbers, counted, name))
    return tuple(bounds)


class _Scores(NamedTuple):
    """[n, k] logits of the uniforms under the distribution of input 0, and whether number i carries coordinate i."""

    logits: Numbers
    by_coordinate: bool


def _scores(mechanism: Mechanism, inputs: Inputs, bit: int, trials: int, key: Key) -> _Scores | None:
    """The messages with an input, scored by the distribution of input 0; None unless it declares a product."""
    trace = mechanism.run(inputs, bit, trials, key, only="wires")
    rows, places = [], np.zeros(0, np.int64)
    each = zip(_distributions(mechanism, inputs.zero, trace), trace.wires, strict=True)
    for number, (distribution, wire) in enumerate(each):
        if not distribution.product or distribution.from_shared:
            return None
        reading = distribution.read(wire, key.child("own", number))
        rows.append(reading.uniforms)
        places = np.asarray(reading.places, np.int64)
    if not len(places):
        return None
    own = bool((places >= 0).all()) and len(np.unique(places)) == len(places)
    with np.errstate(divide="ignore"):
        return _Scores(np.asarray(special.logit(np.clip(rows, 0.0, 1.0)), np.float64), own)


def _choose(mechanism: Mechanism, claim: Claim, trials: int, key: Key) -> _Event | None:
    """The event (pair, side, threshold and numbers) with the largest expected bound of the message."""
    best: _Event | None = None
    for number, inputs in enumerate(_pairs(mechanism, claim, key)):
        scores = _scores(mechanism, inputs, 1, _PILOT, key.child(number))
        if scores is None:
            return None
        for side in (1, -1):
            event = _event(inputs, side, side * scores.logits, _needed(claim, scores.logits.shape[1], trials))
            if best is None or event.expected > best.expected:
                best = event
    return best if best is not None and len(best.which) else None


def _event(inputs: Inputs, side: int, scores: Numbers, counted: int) -> _Event:
    """The best threshold of the scores [n, k] with input 1; the chances with input 0 are those of the distribution."""
    n, k = scores.shape
    candidates = np.unique(np.quantile(scores, np.linspace(0, 1, _THRESHOLDS, endpoint=False), method="lower"))
    above = n - np.stack([np.searchsorted(np.sort(column), candidates, side="right") for column in scores.T])
    # [k, thresholds]: what a number adds; the interval of an event that was never counted ends at about 4 / (n k)
    q = special.expit(-candidates) + 4 / (counted * k)
    with np.errstate(divide="ignore"):
        gains = np.maximum(np.log(np.maximum(above / n - 1 / math.sqrt(n), 0.0)) - np.log(q), 0.0)
    at = int(np.argmax(gains.sum(0)))
    return _Event(inputs, side, float(candidates[at]), np.flatnonzero(gains[:, at]), float(gains[:, at].sum()))


def product_epsilon(tp: Integers, fp: Integers, trials: int, unit: Unit, confidence: float) -> float:
    """The bound of a product from the counts [k] of an event of its numbers with input 1 and with input 0."""
    k, error = len(tp), 1 - confidence
    q = clopper_pearson_high(fp.sum(keepdims=True), trials * k, 1 - 2 * _RARE * error)
    side = 2 * (1 - _RARE) * error
    with np.errstate(divide="ignore"):
        if unit is Unit.COORDINATE:
            p = 1 - clopper_pearson_high(trials * k - tp.sum(keepdims=True), trials * k, 1 - side)
            return max(0.0, float(np.log(p / q)[0]))
        p = 1 - clopper_pearson_high(trials - tp, trials, 1 - side / k)
        return max(0.0, float((np.log(p) - np.log(q)).sum()))


def _needed(claim: Claim, numbers: int, trials: int) -> int:
    """Messages with each input that hold `_EVENTS` rare events, if the proof is attained; at most `_MOST` x trials.

    The maximum is doubled if it would hold fewer than `_FEW` events, where each further event raises the bound.
    """
    each = min(_proved(claim, Unit.COORDINATE), _proved(claim, Unit.MESSAGE) / numbers, 50.0)
    most = _MOST * trials
    if 1 <= most * numbers * math.exp(-each) < _FEW:
        most *= 2
    return math.ceil(min(most, max(_LEAST, _EVENTS * math.exp(each) / numbers)))


def _proved(claim: Claim, unit: Unit) -> float:
    """The smallest epsilon at delta 0 that is proved for a unit; infinite if no epsilon is proved."""
    proofs = (proof for proof in (claim.proved, *claim.further) if proof.unit is unit)
    return min((proof.epsilon(0.0) for proof in proofs), default=math.inf)
