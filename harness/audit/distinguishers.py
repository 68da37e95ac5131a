"""Distinguishers of input 1 from input 0: by the defense's likelihood, or without trust in the defense's own model.

The bound of an audit holds for any distinguisher; a better one only makes the bound larger. Those that ignore the
likelihood find faults: noise that the receiver can reproduce, a scale sent in clear, a missing clip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from leakgauge.harness.audit.trials import Inputs, Mechanism, Part, Trace
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers

_FULL_COVARIANCE = 512
"""The largest number of features whose full covariance is estimated; for more, only variances."""

_BYTES = 256
"""Bytes at the start of a message that are used as features."""

_SIGNIFICANT = 4.0
"""Standard errors by which the mean of a byte must move; chance alone moves one of 256 as far in 1.6 % of cases."""

_REPLAYED = 10
"""Trials of each input that test whether messages can be reproduced."""


class Distinguisher(Protocol):
    """Scores trials; a higher score makes input 1 more likely."""

    @property
    def name(self) -> str:
        """Name for people."""

    @property
    def reads(self) -> Part:
        """The part of a trace that it uses."""

    def scores(self, trace: Trace) -> Numbers:
        """[n] scores of the n trials."""


def distinguishers(mechanism: Mechanism, inputs: Inputs, zero: Trace, one: Trace) -> list[Distinguisher]:
    """The distinguishers that apply, fitted to trials with each input; other trials must judge them."""
    found: list[Distinguisher] = [] if zero.ratios is None else [_Ratio()]
    if (weights := _fisher(zero.estimates, one.estimates)) is not None:
        found.append(_Linear("linear", weights, "estimates"))
    if mechanism.sees_messages:
        if inputs.focus is None and (weights := _independent(_first_bytes(zero), _first_bytes(one))) is not None:
            found.append(_Linear("bytes", weights, "wires"))
        replay = _Replay(mechanism, inputs)
        if any(replay.scores(trace.select(slice(_REPLAYED))).any() for trace in (zero, one)):
            found.append(replay)
    return found or [_Blind()]


@dataclass(frozen=True)
class _Blind:
    """Equal scores, for an adversary to whom both inputs look the same."""

    name: str = "nothing to see"
    reads: Part = "estimates"

    def scores(self, trace: Trace) -> Numbers:
        return np.zeros(len(trace.estimates))


@dataclass(frozen=True)
class _Ratio:
    """The log-likelihood ratio by the defense's own likelihood."""

    name: str = "likelihood ratio"
    reads: Part = "ratios"

    def scores(self, trace: Trace) -> Numbers:
        assert trace.ratios is not None
        return np.asarray(trace.ratios.numpy(), np.float64)


@dataclass(frozen=True, eq=False)
class _Linear:
    """A linear function of the estimated updates, or of the bytes of the first message."""

    name: str
    weights: Tensor
    reads: Part

    def scores(self, trace: Trace) -> Numbers:
        features = _first_bytes(trace) if self.reads == "wires" else trace.estimates
        return np.asarray((features.double() @ self.weights).numpy(), np.float64)


@dataclass(frozen=True, eq=False)
class _Replay:
    """Distance of a first-round message to replays of both inputs, made with the shared key as the private key."""

    mechanism: Mechanism
    inputs: Inputs
    name: str = "replay"
    reads: Part = "wires"

    def scores(self, trace: Trace) -> Numbers:
        each = zip(trace.wires, trace.shared, strict=True)
        return np.array([self._score(self.mechanism.estimate(wire, key), key) for wire, key in each])

    def _score(self, estimate: Tensor, shared: Key) -> float:
        """How much nearer replay 1 is than replay 0, in units of their distance; without channel noise, exact only."""
        zero, one = (self.mechanism.replay(update, shared) for update in (self.inputs.zero, self.inputs.one))
        if self.inputs.focus is not None:
            estimate, zero, one = (update[self.inputs.focus] for update in (estimate, zero, one))
        if not self.mechanism.defense.analog:
            return float(torch.equal(estimate, one)) - float(torch.equal(estimate, zero))
        return float(((one - zero) * (estimate - (zero + one) / 2)).sum() / (one - zero).norm().clamp(min=1e-12))


def _first_bytes(trace: Trace) -> Tensor:
    """[n, _BYTES + 1]: the first bytes of each first-round message, and its length."""
    rows = np.zeros((len(trace.wires), _BYTES + 1))
    for row, wire in zip(rows, trace.wires, strict=True):
        part = np.frombuffer(wire[:_BYTES], np.uint8)
        row[: len(part)], row[-1] = part, len(wire)
    return torch.from_numpy(rows)


def _independent(zero: Tensor, one: Tensor) -> Tensor | None:
    """Weights of features [n, f]: move over variance of each feature that moves significantly; None if none does."""
    a, b = zero.double(), one.double()
    move = b.mean(0) - a.mean(0)
    variance = a.var(0) + b.var(0) + 1e-6
    weights = torch.where(move.abs() > _SIGNIFICANT * (variance / len(a)).sqrt(), move / variance, 0.0)
    return weights / weights.norm() if bool(weights.any()) else None


def _fisher(zero: Tensor, one: Tensor) -> Tensor | None:
    """Weights of Fisher's discriminant of features [n, f]; None if no feature moves or one is not finite."""
    a, b = zero.double(), one.double()
    move = b.mean(0) - a.mean(0)
    spread = torch.cat([a - a.mean(0), b - b.mean(0)])
    if not bool(move.any()) or not bool(torch.isfinite(spread).all()):
        return None
    variance = spread.square().mean(0)
    # the covariance shrinks towards a multiple of the identity, because there may be fewer trials than features
    ridge = 0.1 * variance.mean() + 1e-12 * move.square().mean()
    weights = move / (variance + ridge)
    if len(move) <= _FULL_COVARIANCE:
        covariance = spread.T @ spread / len(spread)
        weights = torch.linalg.solve(covariance + ridge * torch.eye(len(move), dtype=torch.float64), move)
    found: Tensor = weights / weights.norm()
    return found
