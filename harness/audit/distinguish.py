"""Ways to tell input 1 from input 0: by the defense's likelihood, or without believing what the defense says of itself.

Whatever a distinguisher is, the bound of an audit holds; a better one only makes it larger. Those that ignore the
likelihood are there for faults: noise that the receiver can draw too, a scale in the clear, a clip that is missing.
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

_TOGETHER = 512
"""Features whose covariance is told; of more, the variances alone."""

_BYTES = 256
"""Bytes of a message that are features, from its beginning."""

_SURE = 4.0
"""Standard errors by which a byte must move to count: of 256 bytes that do not, one does with probability 0.016."""

_REPLAYED = 10
"""Trials of each input on which it is tried whether a message can be made again."""


class Distinguisher(Protocol):
    """Scores trials: the higher, the likelier input 1."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def reads(self) -> Part:
        """What of a trace it looks at."""

    def scores(self, trace: Trace) -> Numbers:
        """[n]."""


def distinguishers(mechanism: Mechanism, inputs: Inputs, zero: Trace, one: Trace) -> list[Distinguisher]:
    """Those that apply, fitted to trials with each input; they are to be judged on other trials."""
    found: list[Distinguisher] = [] if zero.loss is None else [_Ratio()]
    if (told := _fisher(zero.told, one.told)) is not None:
        found.append(_Linear("linear", told, "told"))
    if mechanism.sees_messages:
        if inputs.focus is None and (raw := _plain(_raw(zero), _raw(one))) is not None:
            found.append(_Linear("bytes", raw, "wires"))
        replay = _Replay(mechanism, inputs)
        if any(replay.scores(trace.first(_REPLAYED)).any() for trace in (zero, one)):
            found.append(replay)
    return found or [_Blind()]


@dataclass(frozen=True)
class _Blind:
    """For an adversary to whom both inputs look the same."""

    name: str = "nothing to see"
    reads: Part = "told"

    def scores(self, trace: Trace) -> Numbers:
        return np.zeros(len(trace.told))


@dataclass(frozen=True)
class _Ratio:
    """The likelihood ratio, by the defense's own law."""

    name: str = "likelihood ratio"
    reads: Part = "loss"

    def scores(self, trace: Trace) -> Numbers:
        assert trace.loss is not None
        return np.asarray(trace.loss.numpy(), np.float64)


@dataclass(frozen=True, eq=False)
class _Linear:
    """Linear in what the messages tell, or in the bytes of the first one."""

    name: str
    weights: Tensor
    reads: Part

    def scores(self, trace: Trace) -> Numbers:
        features = _raw(trace) if self.reads == "wires" else trace.told
        return np.asarray((features.double() @ self.weights).numpy(), np.float64)


@dataclass(frozen=True, eq=False)
class _Replay:
    """How much nearer what a message of the first round tells is to what the client's own code makes of input 1, with
    the shared key for its private one, than to what it makes of input 0; in units of the move. Where no channel adds
    noise, 0 unless one of the two is met exactly."""

    mechanism: Mechanism
    inputs: Inputs
    name: str = "replay"
    reads: Part = "wires"

    def scores(self, trace: Trace) -> Numbers:
        each = zip(trace.wires, trace.shared, strict=True)
        return np.array([self._score(self.mechanism.tell(wire, key), key) for wire, key in each])

    def _score(self, told: Tensor, shared: Key) -> float:
        zero, one = (self.mechanism.replay(update, shared) for update in (self.inputs.zero, self.inputs.one))
        if self.inputs.focus is not None:
            told, zero, one = (seen[self.inputs.focus] for seen in (told, zero, one))
        if not self.mechanism.defense.analog:
            return float(torch.equal(told, one)) - float(torch.equal(told, zero))
        return float(((one - zero) * (told - (zero + one) / 2)).sum() / (one - zero).norm().clamp(min=1e-12))


def _raw(trace: Trace) -> Tensor:
    """[n, _BYTES + 1]: the first bytes of each message of the first round, and its length."""
    rows = np.zeros((len(trace.wires), _BYTES + 1))
    for row, wire in zip(rows, trace.wires, strict=True):
        part = np.frombuffer(wire[:_BYTES], np.uint8)
        row[: len(part)], row[-1] = part, len(wire)
    return torch.from_numpy(rows)


def _plain(zero: Tensor, one: Tensor) -> Tensor | None:
    """Weights of features [n, f], each by itself: its move over its variance, where that move is no accident."""
    a, b = zero.double(), one.double()
    move = b.mean(0) - a.mean(0)
    variance = a.var(0) + b.var(0) + 1e-6
    weights = torch.where(move.abs() > _SURE * (variance / len(a)).sqrt(), move / variance, 0.0)
    return weights / weights.norm() if bool(weights.any()) else None


def _fisher(zero: Tensor, one: Tensor) -> Tensor | None:
    """Weights of Fisher's discriminant of features [n, f]; None where nothing moves, or not finitely.

    Its covariance is pulled towards a multiple of one: there may be fewer trials than features.
    """
    a, b = zero.double(), one.double()
    move = b.mean(0) - a.mean(0)
    spread = torch.cat([a - a.mean(0), b - b.mean(0)])
    if not bool(move.any()) or not bool(torch.isfinite(spread).all()):
        return None
    variance = spread.square().mean(0)
    ridge = 0.1 * variance.mean() + 1e-12 * move.square().mean()
    weights = move / (variance + ridge)
    if len(move) <= _TOGETHER:
        covariance = spread.T @ spread / len(spread)
        weights = torch.linalg.solve(covariance + ridge * torch.eye(len(move), dtype=torch.float64), move)
    found: Tensor = weights / weights.norm()
    return found
