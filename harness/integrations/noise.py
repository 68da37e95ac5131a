"""Checks of a defense by samples: its estimates, its noise, its likelihood and its claim."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy import optimize, special, stats
from torch import Tensor

from leakgauge.harness.audit.keys import send
from leakgauge.harness.audit.neighbors import Inputs
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core.claim import Unit
from leakgauge.harness.core.contract import Defense, Likelihood, Links, likelihood_of
from leakgauge.harness.core.distribution import DistributionError, Integers
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.federation.small import Federation
from leakgauge.harness.integrations.findings import Fault, Skip, told
from leakgauge.harness.integrations.quick import DefenseUnderTest, Wire

_MESSAGES = 200  # messages behind a mean
_OFF = 0.2  # relative error of a scale that neither rounding nor an overloaded quantizer explains
_ALONG = 0.95  # cosine of an update and its mean estimate above which the estimate counts as a multiple of the update
_FAR, _GROWN = 1e6, 1e3  # in clips: length of an update far above the clip, and of an estimate that shows a missing one
_TWINS = 100  # messages of one update under one shared key
_LEVEL = 1e-7  # probability that one of these tests rejects an honest defense
_PAIRS = 1000  # messages of each of the two updates whose likelihood ratios are compared

_SHARES = (0.9, 0.3, 0.1, 0.03, 0.01, 0.003)
"""Norms of the two updates, in clips; the first norm whose ratios are not too large is used."""

_TELLING = 0.3, 5.0  # range of the mean size of log likelihood ratios, in nats, in which they can be compared

_WRONG = "it prefers the wrong update: a score is -log p, lower for the better candidate"


def check_estimate(tested: DefenseUnderTest) -> str:
    """The server's estimate has the length of the update, on average or in the coordinates that were sent."""
    quiet = tested.defense.low_noise_variant() or tested.defense
    wire = Wire(quiet)
    update = wire.update().double()
    numbers = range(_MESSAGES)
    read = wire.estimates(update.float(), numbers, numbers)
    each = read @ update / update.square().sum()
    slope, error = float(each.mean()), float(each.std()) / math.sqrt(_MESSAGES)
    large = update.abs() >= update.abs().median()
    sent = (read / update)[:, large]
    median = float(sent[sent != 0].median()) if bool((sent != 0).any()) else 0.0
    mean = read.mean(0)
    power = float(mean.square().sum() - read.var(0).sum() / _MESSAGES)
    # signs and coarse levels also shorten an update, but the estimate is then not a multiple of it
    straight = slope > 1 or abs(slope) * float(update.norm()) > _ALONG * math.sqrt(max(power, 0.0))
    if abs(slope - 1) > _OFF + 5 * error and abs(median - 1) > _OFF and straight:
        raise Fault(
            f"`estimate` reads {slope:.3g} times the update on average, {median:.3g} times where a coordinate was "
            "sent; the model then takes steps of the wrong length. Undo the scale of `encode`"
        )
    if not tested.defense.superposes:
        try:
            tested.wire.read(tested.wire.exchange(tested.wire.update()).received[0], None)
        except Exception as failure:
            reason = told(failure, tested.part.folder)
            raise Fault(f"`estimate` fails for an eavesdropper, whose `link.shared` is None: {reason}") from failure
    if error > _OFF:
        return f"the noise hides its scale: {slope:.2g} +- {error:.2g} times the update"
    return f"{slope:.3g} times the update on average, {median:.3g} times where a coordinate was sent"


def check_clip(tested: DefenseUnderTest) -> str:
    """An update far above the clip is bounded, if the defense claims anything."""
    wire, defense = tested.wire, tested.defense
    claim = tested.claim(1)
    read = wire.estimates(wire.update(_FAR), range(4), range(4))
    length = float(read.norm(dim=1).mean()) / wire.clip
    if not math.isfinite(claim.epsilon):
        raise Skip("nothing is promised")
    if claim.unit is Unit.RECORD:
        raise Skip("records are clipped in local training")
    if defense.plaintext_statistic(torch.zeros(1, wire.dim), wire.round_.setting).shape[1]:
        shown = f"an update of norm {_FAR:g} is read as {length:.3g}"
        return f"a scale is sent in clear, as `plaintext_statistic` says; {shown}"
    if length > _GROWN:
        raise Fault(
            f"an update of norm {_FAR * wire.clip:g} is sent with norm {length * wire.clip:.3g}: its norm is not "
            "bounded, so no noise hides it; scale it down to the clip before the noise is added"
        )
    return f"an update of norm {_FAR * wire.clip:g} is read with norm {length * wire.clip:.3g}"


def _bare(tested: DefenseUnderTest) -> str:
    """Why noise is not compared without a stated distribution; raises `Fault` if only some coordinates have noise."""
    wire, defense = tested.wire, tested.defense
    if not defense.randomized or defense.superposes:
        return "messages have no randomness of their own to compare"
    numbers, shared = range(_TWINS), [0] * _TWINS
    read, opposite = (wire.estimates(sign * wire.update(), numbers, shared) for sign in (1, -1))
    spread = read.std(0)
    # a coordinate that is not sent is the same for every update; rounded coordinates may be constant by chance
    still = (spread < 1e-6 * spread.median()) & (read[0] != opposite[0])
    if bool(still.any()) and all(len(row.unique()) == _TWINS for row in read.T[~still]):
        places = ", ".join(map(str, still.nonzero()[:5, 0].tolist()))
        raise Fault(f"{int(still.sum())} of {wire.dim} coordinates have no noise, unlike the others: {places}")
    return "no `message_distribution` states the noise of a message; an audit then sees less"


def check_noise(tested: DefenseUnderTest) -> str:
    """Messages of one update under one shared key have the stated noise in every number."""
    tried = list[Numbers]()
    for norm, shared in itertools.product((0.9, 3.0, 1e4), (0, 1)):
        try:
            repeated = _twins(tested.wire, tested.wire.update(norm), shared)
        except DistributionError as error:
            raise Fault(
                f"a message is impossible under `message_distribution`: {error}; this or `encode` is wrong"
            ) from error
        if repeated is None:
            raise Skip(_bare(tested))
        if repeated[0].size:
            tried.append(repeated[0])
            _check_twins(tried, repeated[1], norm)
    if not tried:
        return "messages are as `message_distribution` states them, without noise"
    together = float(np.sqrt(np.mean([np.square(scores).mean() for scores in tried])))
    return f"{together:.3g} of the noise that `message_distribution` states, in each of {tried[0].shape[1]} numbers"


def _twins(wire: Wire, update: Tensor, shared: int) -> tuple[Numbers, Integers] | None:
    """Normal scores [n, k] of messages of one update under one shared key, and the coordinates [k] that they carry.

    None: there is no distribution, or it draws from the shared key.
    """
    readings = []
    for private in range(_TWINS):
        sent = send(wire.round_, wire.client(update, private, shared), Key(0).child("others", private, "channel"))
        if sent.stated is None or sent.stated.from_shared:
            return None
        readings.append(sent.stated.read(sent.wire, Key(3).child(private, shared)))
    if len({len(reading.uniforms) for reading in readings}) > 1:
        return None
    uniforms = np.array([reading.uniforms for reading in readings])
    return np.asarray(special.ndtri(uniforms.clip(1e-15, 1 - 1e-15)), np.float64), readings[-1].places


def _check_twins(tried: Sequence[Numbers], places: Integers, norm: float) -> None:
    """Raise a Fault unless the newest scores [n, k] of numbers in these places [k] are independent and normal."""
    scores = tried[-1]
    n, k = scores.shape
    means, spread = scores.mean(0), scores.var(0, ddof=1)
    least, share = float(spread.min()), math.sqrt(float(spread.mean()))
    few = np.flatnonzero(stats.chi2.cdf((n - 1) * spread, n - 1) * k < _LEVEL)
    if len(few) and least < 0.5 * np.median(spread):
        where = ", ".join(f"{int(places[at])}" for at in few[:5]) + (", ..." if len(few) > 5 else "")
        raise Fault(
            f"{len(few)} of {k} numbers have too little noise, {math.sqrt(least):.2g} of what "
            f"`message_distribution` states (coordinates {where}); an adversary with the shared key reads them"
        )
    moved = stats.chi2.sf(n * float(np.square(means).sum()), k) < _LEVEL
    if moved and len(tried) % 2 == 0:
        if abs(float(np.corrcoef(means, tried[-2].mean(0))[0, 1])) < 0.5 and k > 2:
            raise Fault(
                "the shared key shifts the mean of messages: part of the noise comes from it, and only "
                f"{share:.2g} of what `message_distribution` states hides the update from who has this key; draw all "
                "noise from `private`"
            )
        inside = "inside the clip" if norm < 1 else f"at {norm:g} times the clip"
        raise Fault(
            f"messages of an update {inside} are not centered as `message_distribution` states; compare clip and scale"
        )
    width = special.ndtri(1 - _LEVEL / 2) / math.sqrt(2 * scores.size)
    if not moved and abs(share - 1) > max(0.02, width):
        raise Fault(
            f"the noise is {share:.3g} of what `message_distribution` states; compare its scale with that of `encode`"
        )


def check_likelihood(tested: DefenseUnderTest) -> str:
    """Scores are finite and differentiable, and their likelihood ratios are calibrated on samples."""
    defense = tested.defense
    try:
        if type(defense).likelihood is Defense.likelihood:
            raise NoLikelihood("no `likelihood`: attacks that need it fail, and reports have no limit")
        _check_scores(tested)
    except NoLikelihood as error:
        if "returned" in str(error) or "expected" in str(error):
            raise Fault(str(error)) from error
        raise Skip(str(error)) from error
    if not defense.randomized:
        return "finite and differentiable; messages have no noise to compare it with"
    zeros, ones = _ratios(tested)
    gap = float(ones.mean() - zeros.mean()) / math.sqrt(float(ones.var() + zeros.var()) / _PAIRS + 1e-12)
    if gap < -6:
        raise Fault(_WRONG)
    size = float(np.abs(np.concatenate([zeros, ones])).mean())
    if not _TELLING[0] < size < _TELLING[1]:
        return f"finite and differentiable; log ratios of {size:.2g} nats cannot be compared with samples"
    right, slope = _calibration(zeros, ones)
    if abs(right) > 6 and abs(math.log(slope)) > math.log(1 + _OFF):
        sharp = f"{1 / slope:.3g} times too sharp" if slope < 1 else f"{slope:.3g} times too flat"
        raise Fault(
            f"its log ratios are {sharp} for the messages that are sent: it assumes noise of "
            f"{math.sqrt(slope):.3g} times the real one, if that is normal; compare its scale with `encode`; if it "
            "is smoothed for searches, write `exact_likelihood` too"
        )
    return f"finite, differentiable; its log ratios should be {slope:.2f} times as large (1: right)"


def _check_scores(tested: DefenseUnderTest) -> None:
    """Scores and slopes of n messages are [n] finite numbers, with and without the shared keys, each by itself."""
    wire, defense, n = tested.wire, tested.defense, 8
    exchanges = [wire.exchange(wire.update(), number, number) for number in range(n)]
    messages = [exchange.received[0] for exchange in exchanges]
    keys = [Key(0).child("shared", number) for number in range(n)]
    senders = [exchange.links.senders[0] for exchange in exchanges]
    for shared in (keys, None) if not defense.superposes else (keys,):
        who = "" if shared else " for an eavesdropper, without shared keys"
        links = Links(wire.round_.setting, senders, shared)
        try:
            score = likelihood_of(defense, wire.round_.state, messages, links)
            right, wrong = (_finite_scores(tested, score, sign * wire.update(), n, who) for sign in (1, -1))
            if shared and not defense.randomized and not right.mean() < wrong.mean():
                raise Fault(_WRONG)
            for start in (torch.zeros(wire.dim), 1e-30 * wire.update(), wire.update(1e3), wire.update(1e6).double()):
                _finite_scores(tested, score, start, n, who)
            first = links._replace(senders=senders[:1], shared=shared and shared[:1])
            alone = likelihood_of(defense, wire.round_.state, messages[:1], first)
            if not torch.allclose(_finite_scores(tested, alone, wire.update(), 1, who), right[:1], 1e-4, 1e-3):
                raise Fault(f"a message has another score beside others than alone{who}; score each row by itself")
        except (Fault, NoLikelihood):
            raise
        except Exception as error:
            raise Fault(f"it fails{who}: {told(error, tested.part.folder)}") from error


def _finite_scores(tested: DefenseUnderTest, score: Likelihood, update: Tensor, n: int, who: str) -> Tensor:
    """[n] scores of one candidate for n messages; raises `Fault` unless they and their slopes are finite."""
    at = update.expand(n, -1).clone()
    at = (at[:, None] if tested.defense.superposes else at).requires_grad_()
    scores = score(at)
    if not isinstance(scores, Tensor) or scores.shape != (n,) or scores.dtype != update.dtype:
        is_tensor = isinstance(scores, Tensor)
        shown = f"{scores.dtype} of shape {tuple(scores.shape)}" if is_tensor else type(scores).__name__
        raise Fault(f"the likelihood of {n} messages returns {shown}{who}, expected a tensor [{n}] of {update.dtype}")
    if not scores.requires_grad:
        raise Fault(f"the likelihood cannot be differentiated in the update{who}; use torch alone in it")
    (slope,) = torch.autograd.grad(scores.sum(), at)
    if not bool(scores.isfinite().all() and slope.isfinite().all()):
        raise Fault(f"a score or its slope is not finite{who}, for an update of norm {float(update.norm()):.3g}")
    return scores.detach()


def _ratios(tested: DefenseUnderTest) -> tuple[Numbers, Numbers]:
    """[n] log likelihood ratios of messages of an update's negative, and of the update."""
    for share in _SHARES:
        end = tested.wire.update(share)
        few = _run(tested, end, 40, Key(4).child("pilot"))
        if float(np.abs(np.concatenate(few)).mean()) < 2.0:
            break
    return _run(tested, end, _PAIRS, Key(4))


def _run(tested: DefenseUnderTest, end: Tensor, n: int, key: Key) -> tuple[Numbers, Numbers]:
    """[n] log likelihood ratios of fresh messages of -end, and of end."""
    round_, sides = tested.wire.round_, list[Numbers]()
    mechanism = Mechanism(Federation(tested.defense, round_.setting, (round_.state,)), Threat.SERVER)
    for trace in mechanism.run_both(Inputs("an update and its negative", -end, end), n, key, only="ratios"):
        assert trace.ratios is not None  # there is a likelihood
        sides.append(np.asarray(trace.ratios.numpy().clip(-50, 50), np.float64))
    return sides[0], sides[1]


def _calibration(zeros: Numbers, ones: Numbers) -> tuple[float, float]:
    """The error of the calibration of ratios in standard errors, and the factor that would calibrate them.

    For the true ratio L of two equally likely inputs, the probability of the second is expit(L), whatever L is. The
    residual is then zero on average, also if it is weighted by a function of L.
    """
    left = [special.expit(-ones) * np.tanh(ones / 2), -special.expit(zeros) * np.tanh(zeros / 2)]
    error = math.sqrt(sum(float(side.var()) / len(side) for side in left)) + 1e-12

    def loss(logarithm: float) -> float:
        factor = math.exp(logarithm)
        return float(np.logaddexp(0, -factor * ones).mean() + np.logaddexp(0, factor * zeros).mean())

    best = optimize.minimize_scalar(loss, bounds=(-5, 5), method="bounded")
    return sum(float(side.mean()) for side in left) / error, math.exp(float(best.x))
