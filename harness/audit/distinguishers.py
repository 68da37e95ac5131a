"""Distinguishers of input 1 from input 0: by the defense's likelihood, or independent of the defense's own model.

The bound of an audit holds for any distinguisher; a better one only makes the bound larger. The distinguishers find
these faults:

| name | score | finds |
|---|---|---|
| `likelihood ratio` | by the defense's own likelihood | too little noise |
| `projection` | the estimated updates along the difference of both inputs, if local training is random | as `linear` |
| `linear` | a linear function of the estimated updates, summed over the rounds | a missing clip |
| `direction` | the same along the line from input 0 to input 1, which needs no fit | too little noise in sums |
| `rounds` | the same function, weighted over the rounds | noise that is reused, cancels or is missing |
| `nearest` | nearness to earlier trials with each input | little noise for some senders or updates, or in some rounds |
| `bytes` | bytes of all messages, and their lengths | a scale sent in clear |
| `replay` | replays of both inputs, with the shared key as the private key | noise that the receiver can reproduce |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy import special
from torch import Tensor

from leakgauge.harness.audit.neighbors import Inputs
from leakgauge.harness.audit.trials import Part, Source, Trace
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers

_FULL_COVARIANCE = 512  # the most features whose full covariance is estimated; of more, only the variances are

_RIDGE, _RIDGE_OF_ROUNDS = 0.1, 1e-4
"""Ridge of the covariance as a share of the mean variance: over many coordinates, and over a few rounds."""

_CHANCE = 0.016  # probability that some byte moves significantly by chance
_MOST_BYTES = 256  # the most bytes that are used as features; the bytes that move most are taken
_LAST_BYTES = 64  # bytes that are also taken from the end of messages, if lengths differ
_BLOCK = 4096  # bytes of each message whose moments are computed at a time, in float64

_KNOWN, _COLUMNS = 128, 256
"""The most known trials of each input, and the most numbers of each round, in comparisons; evenly spaced."""

_REPLAYED = 10, 20  # trials of each input that test whether messages repeat: at first, and after a first success

_OFTEN = 0.2
"""Share of these trials in which the right replay, not the wrong one, must match to need no comparison with chance."""


class Distinguisher(NamedTuple):
    """Scores trials; a higher score makes input 1 more likely.

    Attributes:
        name: for people.
        reads: the part of a trace that the scores use.
        linear: whether scores of Gaussian messages are Gaussian, with the same variance for both inputs.
        score: the scores [n] of the n trials of a trace.
    """

    name: str
    reads: Part
    linear: bool
    score: Callable[[Trace], Numbers]

    def scores(self, trace: Trace) -> Numbers:
        """[n] scores; 0 for NaN, such as the difference of infinite estimates of an update without a clip."""
        scores = self.score(trace)
        return np.where(np.isnan(scores), 0.0, scores)


def distinguishers(source: Source, inputs: Inputs, zero: Trace, one: Trace) -> list[Distinguisher]:
    """The distinguishers that apply, fitted to trials with each input; they must be judged on other trials."""
    fitted = [Distinguisher("likelihood ratio", "ratios", True, _ratio)] if zero.ratios is not None else []
    if inputs.draw is not None and inputs.focus is None and bool((inputs.one != inputs.zero).any()):
        direction = torch.nn.functional.normalize((inputs.one - inputs.zero).double(), dim=0)
        fitted.append(Distinguisher("projection", "estimates", False, partial(_linear, direction)))
    weights = _fisher(zero.estimates, one.estimates)
    if weights is not None:
        fitted.append(Distinguisher("linear", "estimates", True, partial(_linear, weights)))
        if inputs.zero.dim() == 1:  # pairs that take turns have no common line
            low, high = inputs.hypotheses
            line = (high - low if inputs.focus is None else (high - low)[inputs.focus]).double()
            fitted.append(Distinguisher("direction", "estimates", True, partial(_linear, line / line.norm())))
        of_rounds = None
        if zero.rounds is not None and one.rounds is not None:
            of_rounds = _fisher(zero.rounds.double() @ weights, one.rounds.double() @ weights, _RIDGE_OF_ROUNDS)
        if of_rounds is not None:
            fitted.append(Distinguisher("rounds", "estimates", True, partial(_linear, of_rounds[:, None] * weights)))
        zeros, ones = (_by_round(trace)[:, :_KNOWN] for trace in (zero, one))
        fitted.append(Distinguisher("nearest", "estimates", False, partial(_nearest, zeros, ones)))
    if source.sees_messages:
        moving = _moving_bytes(zero, one) if inputs.focus is None else None
        if moving is not None:
            fitted.append(Distinguisher("bytes", "wires", False, moving))
        replay = _replay(source, inputs, zero, one)
        if replay is not None:
            fitted.append(Distinguisher("replay", "wires", False, replay.scores))
    # if both inputs look the same to the adversary
    return fitted or [Distinguisher("nothing to see", "estimates", False, lambda trace: np.zeros(len(trace.estimates)))]


def _ratio(trace: Trace) -> Numbers:
    """The log-likelihood ratio by the defense's own likelihood."""
    assert trace.ratios is not None
    return np.asarray(trace.ratios.numpy(), np.float64)


def _linear(weights: Tensor, trace: Trace) -> Numbers:
    """A linear function of the estimated updates: of their sum over the rounds [d], or of each round [T, d]."""
    if weights.dim() == 1:
        return np.asarray((trace.estimates.double() @ weights).numpy(), np.float64)
    assert trace.rounds is not None
    return np.asarray((trace.rounds.double() * weights).sum((1, 2)).numpy(), np.float64)


def _nearest(zeros: Tensor, ones: Tensor, trace: Trace) -> Numbers:
    """How much nearer each round's estimate is to a known trial [T, m, c] with input 1 than to one with input 0."""
    values, mode = _by_round(trace), "donot_use_mm_for_euclid_dist"
    each = (torch.cdist(values, known, compute_mode=mode).amin(2) for known in (zeros, ones))
    low, high = (distances.clamp(min=1e-30).log() for distances in each)
    return np.asarray((low - high).sum(0).numpy(), np.float64)


@dataclass(frozen=True, eq=False)
class _Replay:
    """Distance of a first-round message to replays of both inputs, made with the shared key as the private key.

    Attributes:
        again: (bit, trial, shared key, private key) -> `Source.again`.
        by_bytes: whether messages are compared, not the estimates from them.
        fresh: whether a new private key is used, as a control.
    """

    source: Source
    inputs: Inputs
    again: Callable[[int, int, Key, Key], bytes]
    by_bytes: bool = False
    fresh: bool = False

    def scores(self, trace: Trace) -> Numbers:
        each = zip(trace.wires, trace.shared, trace.trials.tolist(), strict=True)
        return np.array([self._score(*one) for one in each])

    def _score(self, wire: bytes, shared: Key, trial: int) -> float:
        """How much nearer replay 1 is than replay 0; without channel noise, only exact matches count."""
        private = shared.child("fresh") if self.fresh else shared
        made = [self.again(bit, trial, shared, private) for bit in (0, 1)]
        if self.by_bytes:
            return float(wire == made[1]) - float(wire == made[0])
        estimate, zero, one = (self.source.read(self.inputs, each, trial, shared) for each in (wire, *made))
        if not self.source.defense.analog:
            return float(torch.equal(estimate, one)) - float(torch.equal(estimate, zero))
        return float(((one - zero) * (estimate - (zero + one) / 2)).sum() / (one - zero).norm().clamp(min=1e-12))


def _replay(source: Source, inputs: Inputs, zero: Trace, one: Trace) -> _Replay | None:
    """The comparison with replays, if replays are right often, or more often than with a new private key."""
    again = partial(source.again, inputs)
    if source.defense.analog:
        return _Replay(source, inputs, again)
    first, more = _REPLAYED
    once = cache(again)  # bytes and estimates are compared with the same replays
    for by_bytes in (True, False) if inputs.focus is None else (False,):
        replay = _Replay(source, inputs, once, by_bytes)
        if not _hits(replay, zero, one, first)[0]:
            continue
        right, wrong = _hits(replay, zero, one, more)
        if right - wrong > _OFTEN * 2 * min(more, len(zero.wires)):
            return replace(replay, again=again)
        # coarse messages can be equal by chance, equally often with a key that nobody knows
        chance, _ = _hits(replace(replay, fresh=True), zero, one, more)
        if right > chance + 2 * math.sqrt(chance + 1):
            return replace(replay, again=again)
    return None


def _hits(replay: _Replay, zero: Trace, one: Trace, trials: int) -> tuple[int, int]:
    """How many of the first trials of each input match the replay of their own input, and of the other input."""
    low, high = (replay.scores(trace.select(slice(trials))) for trace in (zero, one))
    return int((low < 0).sum() + (high > 0).sum()), int((low > 0).sum() + (high < 0).sum())


def _by_round(trace: Trace) -> Tensor:
    """[T, n, c] float64: some numbers of each round's estimates."""
    rounds = trace.estimates[None] if trace.rounds is None else trace.rounds.transpose(0, 1)
    places = torch.linspace(0, rounds.shape[2] - 1, min(rounds.shape[2], _COLUMNS)).long()
    return rounds[:, :, places].double()


def _moving_bytes(zero: Trace, one: Trace) -> Callable[[Trace], Numbers] | None:
    """The bytes and lengths that move significantly, weighted by move over variance; None if nothing moves."""
    lengths = np.concatenate([_lengths(zero), _lengths(one)])
    sizes, varied = tuple(int(most) for most in lengths.max(0)), bool((lengths != lengths[0]).any())
    tail = _LAST_BYTES if varied else 0
    moves, variances = _moments(_bytes(zero, sizes, tail), _bytes(one, sizes, tail))
    own, own_variances = _moments(_lengths(zero), _lengths(one))
    far = float(special.ndtri(1 - _CHANCE / (2 * (len(moves) + len(own)))))
    deviations = np.abs(moves) / np.sqrt(variances / len(zero.wires))
    columns = np.sort(np.argsort(-deviations, kind="stable")[:_MOST_BYTES])
    columns = columns[deviations[columns] > far]
    weights = np.concatenate([own / own_variances, moves[columns] / variances[columns]])
    weights[: len(own)][np.abs(own) <= far * np.sqrt(own_variances / len(zero.wires))] = 0.0

    def score(trace: Trace) -> Numbers:
        """A linear function of the length of each round's message and of some of its bytes; they are cut to `sizes`."""
        used = np.concatenate([_lengths(trace), _bytes(trace, sizes, tail)[:, columns]], axis=1)
        return np.asarray(used @ weights, np.float64)

    if not weights.any():
        return None
    weights /= np.linalg.norm(weights)
    return score


def _lengths(trace: Trace) -> Numbers:
    """[n, T] the length of the message of each round."""
    return np.array([[len(wire) for wire in wires] for wires in (trace.wires, *trace.later)], np.float64).T


def _bytes(trace: Trace, sizes: Sequence[int], tail: int) -> npt.NDArray[np.uint8]:
    """[n, f] the messages of all rounds, each padded or cut to its round's size, followed by its last bytes."""
    rounds = []
    for wires, size in zip((trace.wires, *trace.later), sizes, strict=True):
        rows = [wire[:size].ljust(size, b"\0") + wire[max(0, len(wire) - tail) :].rjust(tail, b"\0") for wire in wires]
        rounds.append(np.frombuffer(b"".join(rows), np.uint8).reshape(len(wires), size + tail))
    return rounds[0] if len(rounds) == 1 else np.concatenate(rounds, axis=1)


def _moments(zero: npt.NDArray[Any], one: npt.NDArray[Any]) -> tuple[Numbers, Numbers]:
    """[f] the move of the mean from features [n, f] of input 0 to those of input 1, and the sum of both variances."""
    moves, variances = np.zeros(zero.shape[1]), np.zeros(zero.shape[1])
    for start in range(0, zero.shape[1], _BLOCK):
        at = slice(start, start + _BLOCK)
        a, b = zero[:, at].astype(np.float64), one[:, at].astype(np.float64)
        moves[at], variances[at] = b.mean(0) - a.mean(0), a.var(0) + b.var(0) + 1e-6
    return moves, variances


def _fisher(zero: Tensor, one: Tensor, share: float = _RIDGE) -> Tensor | None:
    """Weights of Fisher's discriminant of features [n, f]; None if no feature moves or a feature is not finite."""
    a, b = zero.double(), one.double()
    move = b.mean(0) - a.mean(0)
    spread = torch.cat([a - a.mean(0), b - b.mean(0)])
    if not bool(move.any()) or not bool(torch.isfinite(spread).all()):
        return None
    variance = spread.square().mean(0)
    # the covariance shrinks towards a multiple of the identity, because there may be fewer trials than features
    ridge = share * variance.mean() + 1e-12 * move.square().mean()
    weights = move / (variance + ridge)
    if len(move) <= _FULL_COVARIANCE:
        covariance = spread.T @ spread / len(spread)
        weights = torch.linalg.solve(covariance + ridge * torch.eye(len(move), dtype=torch.float64), move)
    return torch.as_tensor(weights / weights.norm())
