"""MVU: each coordinate passes through the unbiased channel of least variance between a few levels.

The minimum over only the channel P is a linear program, and over only the values alpha a least squares problem.
Alternating the two stops at once: if P is invertible, alpha = P^-1 u is the only unbiased choice. So both move
together, by linear programs within a trust region, from several starts.

Source: Chaudhuri, Guo, Rabbat 2022, "Privacy-aware compression for federated data analysis" (strict LDP). Differs: only
    channels that commute with the reflection of levels, which halves the programs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from scipy import optimize, sparse

from leakgauge.defenses._common.channel import ByChannel
from leakgauge.defenses._common.channel import Design as Design
from leakgauge.defenses._common.scale import Mode
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Proof, Unit
from leakgauge.harness.core.codec import pack_levels
from leakgauge.harness.core.contract import Link, Setting
from leakgauge.harness.core.distribution import DistributionError, Integers
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Vector

# Largest epsilon: the least probabilities are near e^-24 = 4e-11, which a 53-bit draw resolves to a share of 3e-6
_MOST_EPSILON = 24.0
_LEAST_EPSILON = 0.01
_MOST_BITS = 4

# Largest epsilon of the programs, above which the solver's tolerances do not suffice. From epsilon 9 on, the programs
# find nothing better than the rounded response, unless there are fewer columns than levels
_PROGRAM_EPSILON = 12.0
# Number of starts with equally spaced values, which differ in the distance of the outer values from [0, 1]
_SPREADS = 6
# Probability below which a column stays unused, because a draw of 53 bits could not keep the ratios of its rows
_DUST = 1e-7
_STEPS = 80  # largest number of steps of one descent


@dataclass(frozen=True)
class MVU(ByChannel):
    """The minimum variance unbiased mechanism on each coordinate, with equal numbers of input and output bits.

    Args:
        epsilon: privacy budget of one coordinate, 0.01 to 24.
        bits: b, 1 to 4: the stochastic rounding has 2^b levels, and the message b bits per coordinate.
        clip: C, bound on the magnitude of a coordinate, in units of the update; for `scale = "public"`.
        scale: `public`: coordinates are clamped to [-C, C]. `tensor` and `vector`: the baseline of JoPEQ, which divides
            by three times a norm of the update, sends that norm in the clear, and clamps the result to [-1, 1].

    Guarantees:
        Messages have ceil(d * bits / 8) bytes, plus 8 bytes per tensor for `tensor`, or 4 bytes for `vector`.
        decode(encode(u)) is unbiased for the clamped update.
        The probabilities of an output for any two values of a coordinate differ by at most a factor of e^epsilon.

    Raises:
        ValueError: a parameter is out of range.

    Source: Chaudhuri, Guo, Rabbat 2022, "Privacy-aware compression for federated data analysis", strict LDP. JoPEQ's
        comparison apparently uses b in = b out = R.
    """

    assumes_range: ClassVar[bool] = False

    epsilon: float = 4.0
    bits: int = 1
    clip: float = 1.0
    scale: Mode = "public"

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon, clip=self.clip)
        design(self.epsilon, self.bits, self.bits)

    @property
    def width(self) -> int:
        """b."""
        return self.bits

    def init(self, setting: Setting) -> Design:
        """The public channel."""
        return design(self.epsilon, self.bits, self.bits)

    def encode(self, state: Design, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Clamp, round stochastically to a level, sample the channel. Does not use the shared key."""
        check_update(update)
        header, numbers = self.scaling.normalize(update, link.setting.layout)
        place = self.places(numbers, len(state.P))
        chance = rng.uniform(private.child("rounding"), (len(place),), dtype=torch.float64).numpy()
        rows = np.floor(place).astype(np.int64)
        rows += chance < place - rows
        return header + pack_levels(sample(state.P, rows, private.child("channel")), self.bits), None

    def checked(self, channel: Numbers) -> Numbers:
        """The channel, whose ratios are at most e^epsilon."""
        P = super().checked(channel)
        if (P.max(0) > np.exp(self.epsilon) * (1 + 1e-9) * P.min(0)).any():
            raise DistributionError(f"expected a channel of epsilon at most {self.epsilon:g}, got a larger epsilon")
        return P

    def low_noise_variant(self) -> MVU:
        """The same with the largest epsilon and the finest levels for the stochastic rounding."""
        return replace(self, epsilon=24.0, bits=4)

    def claim(self, history: Sequence[Design], setting: Setting) -> Claim:
        """Pure epsilon for one coordinate; the epsilons of T rounds add up."""
        rounds, exact = len(history), exact_epsilon(history[0].P)
        why = "the largest ratio of an output's probabilities under two inputs, in the sampled channel."
        proved = Proof.pure(exact, rounds, Unit.COORDINATE, why, "largest ratio in the channel")
        return self.claim_of_each(self.epsilon, exact, proved, "Chaudhuri, Guo, Rabbat 2022", rounds, setting)


@functools.lru_cache(maxsize=64)
def design(epsilon: float, bits_in: int, bits_out: int) -> Design:
    """The best unbiased epsilon-LDP channel found from 2^bits_in levels of [0, 1] to 2^bits_out columns.

    Both arrays are read-only, and equal arguments return the same objects. The design takes seconds at 4 bits and is
    cached.

    | case | design |
    |---|---|
    | bits_out = 1 | randomized response between -1/(e^epsilon - 1) and e^epsilon/(e^epsilon - 1): the optimum |
    | epsilon > 12, bits_out >= bits_in | randomized response among as many columns as there are levels |
    | epsilon > 12, bits_out < bits_in | the design for epsilon 12, or rounding, then randomized response |
    | else | the best of several local optima, without a certificate of global optimality |

    Guarantees:
        Rows of P sum to 1 and P alpha = u, both within 1e-12 (the second relative to max |alpha|).
        Unused columns are in the middle and have probability zero; all other entries are above 1e-7 e^-epsilon.
        exact_epsilon(P) <= epsilon + 1e-12.
        P[i, j] = P[-1-i, -1-j] and alpha_j + alpha_-1-j = 1, both within 1e-12.
        The objective is at most that of the rounded response.

    Raises:
        ValueError: epsilon is outside [0.01, 24], or a number of bits is outside 1..4.
    """
    if not _LEAST_EPSILON <= epsilon <= _MOST_EPSILON:
        raise ValueError(f"expected {_LEAST_EPSILON} <= epsilon <= {_MOST_EPSILON:g}, got epsilon={epsilon}")
    for name, bits in (("bits_in", bits_in), ("bits_out", bits_out)):
        if bits not in range(1, _MOST_BITS + 1):
            raise ValueError(f"expected {name} between 1 and {_MOST_BITS}, got {name}={bits}")
    best = _rounded_response(epsilon, 2**bits_in, 2**bits_out)
    if bits_out > 1 and (epsilon <= _PROGRAM_EPSILON or bits_out < bits_in):
        program = _Program(min(epsilon, _PROGRAM_EPSILON), 2**bits_in, 2**bits_out)
        candidates = (_repair(program.epsilon, *_descend(program, lower)) for lower in _starts(program))
        best = min(best, *candidates, key=lambda candidate: candidate.objective)
    for array in best:
        array.setflags(write=False)
    return best


def exact_epsilon(P: Numbers) -> float:
    """The pure LDP epsilon of the stored channel: max over columns j and rows i, i' of ln P[i, j] / P[i', j].

    | column | contribution |
    |---|---|
    | all zero | none, because the column is never sent |
    | zero for some rows only | inf |
    """
    most, least = P.max(0), P.min(0)
    sent = most > 0
    if np.any(least[sent] <= 0):
        return math.inf
    return float(np.log(most[sent] / least[sent]).max(initial=0.0))


def sample(P: Numbers, rows: Integers, key: Key) -> Integers:
    """Draw one column for each row index: column j with probability P[rows, j], independently.

    Args:
        P: [levels in, levels out], rows sum to 1.
        rows: [n], each in 0..levels in - 1.
        key: used for one draw of n uniform numbers.

    Raises:
        ValueError: an index is not a row of P.
    """
    if rows.size and not 0 <= rows.min() <= rows.max() < len(P):
        raise ValueError(f"expected rows in 0..{len(P) - 1}, got {rows.min()}..{rows.max()}")
    u = rng.uniform(key, rows.shape, dtype=torch.float64).numpy()
    columns = np.empty(rows.shape, dtype=np.int64)
    # row by row, because a single search on row + u would lose the low bits of u
    for row, ends in enumerate(np.cumsum(P, axis=1)[:, :-1]):
        same = rows == row
        columns[same] = np.searchsorted(ends, u[same], side="right")
    return columns


def _rounded_response(epsilon: float, levels_in: int, levels_out: int) -> Design:
    """Stochastic rounding to equal steps, then randomized response among them."""
    k = min(levels_in, levels_out)
    levels, position = np.linspace(0.0, 1.0, k), np.linspace(0.0, k - 1.0, levels_in)
    rounded = np.maximum(0.0, 1.0 - np.abs(position[:, None] - np.arange(k)))
    least = 1.0 / (math.expm1(epsilon) + k)
    alpha = levels + (levels - 0.5) * k * _floor(epsilon)
    return _padded(rounded * (1 - k * least) + least, alpha, levels_out)


def _floor(epsilon: float) -> float:
    """1 / (e^epsilon - 1), the least distance of the outer values from [0, 1]."""
    return 1.0 / math.expm1(epsilon)


class _Program:
    """The linear program in P for given values, over channels that the reflection of levels leaves unchanged.

    P[i, j] = r[i, j] + f M[j] with 0 <= r <= M, f = 1/(e^epsilon - 1) and M[j] = M[-1-j], for the lower half of the
    rows i; alpha = (lower, 1 - reversed lower).
    """

    def __init__(self, epsilon: float, levels_in: int, levels_out: int) -> None:
        self.epsilon, self.levels_in, self.levels_out = epsilon, levels_in, levels_out
        self.half = levels_out // 2
        self.u = np.linspace(0.0, 1.0, levels_in)[: levels_in // 2]
        entries = len(self.u) * levels_out
        column = np.arange(entries) % levels_out
        pair = np.minimum(column, levels_out - 1 - column)
        spread = sparse.csr_array((np.ones(entries), (np.arange(entries), pair)), shape=(entries, self.half))
        self._channel = sparse.hstack([sparse.eye_array(entries), _floor(epsilon) * spread]).tocsr()
        self._below = sparse.hstack([sparse.eye_array(entries), -spread]).tocsr()

    def solve(
        self, lower: Numbers, channel: Numbers | None = None, radius: float = 0.0
    ) -> tuple[float, Numbers] | None:
        """The least objective and its solution; None if the program is infeasible.

        The solution is the lower half of the channel for the values `lower`. If a `channel` is given, the program is
        linearized about it, and the solution is a move of `lower` with no entry above `radius`.
        """
        alpha, rows = np.concatenate([lower, 1.0 - lower[::-1]]), len(self.u)
        entries, free = self._channel.shape[0], 0 if channel is None else self.half
        each_row = sparse.eye_array(rows)
        sums = sparse.kron(each_row, np.ones((1, self.levels_out))) @ self._channel
        means = sparse.kron(each_row, alpha[None]) @ self._channel
        off = self.u[:, None] - alpha
        cost = (2.0 / self.levels_in * off**2).ravel() @ self._channel
        bounds = [(0.0, None)] * len(cost) + [(-radius, radius)] * free
        tilt = np.zeros((rows, free))
        if channel is not None:
            tilt = self._fold(channel)
            cost = np.concatenate([cost, self._fold(-4.0 / self.levels_in * channel * off).sum(0)])
        solved = optimize.linprog(
            cost,
            A_ub=sparse.hstack([self._below, sparse.csr_array((entries, free))]),
            b_ub=np.zeros(entries),
            A_eq=sparse.block_array([[sums, sparse.csr_array((rows, free))], [means, sparse.csr_array(tilt)]]),
            b_eq=np.concatenate([np.ones(rows), self.u]),
            bounds=bounds,
            method="highs",
        )
        if solved.status != 0:
            return None
        if channel is not None:
            return float(solved.fun), solved.x[len(solved.x) - free :]
        return float(solved.fun), (self._channel @ solved.x).reshape(rows, self.levels_out)

    def _fold(self, by_column: Numbers) -> Numbers:
        return by_column[:, : self.half] - by_column[:, self.half :][:, ::-1]


def _descend(program: _Program, lower: Numbers) -> tuple[Numbers, Numbers]:
    """Values and channel (lower halves) of a local optimum: trust region, linear model, exact program at each trial."""
    solved = program.solve(lower)
    assert solved is not None  # at every start, randomized response between the outer values is feasible
    objective, channel = solved
    radius = 0.1 * (1.0 + float(np.ptp(lower)))
    for _ in range(_STEPS):
        model = program.solve(lower, channel, radius)
        # below 1e-9, the remaining gain is negligible
        if model is None or objective - model[0] <= 1e-9 * objective:
            break
        trial = program.solve(lower + model[1])
        gain = -math.inf if trial is None else (objective - trial[0]) / (objective - model[0])
        if trial is not None and gain > 0:
            lower, (objective, channel) = lower + model[1], trial
        radius *= 2.0 if gain > 0.5 else 0.25 if gain <= 0 else 0.5 if gain < 0.1 else 1.0
        if radius < 1e-9:
            break
    return lower, channel


def _starts(program: _Program) -> Iterator[Numbers]:
    """Lower halves of equally spaced values, then of the values that a program with many values selects."""
    floor, half = _floor(program.epsilon), program.half
    # from a little above the least feasible distance to that of the rounded response
    for distance in floor * np.geomspace(1.2, half, _SPREADS):
        yield np.linspace(-distance, 1.0 + distance, 2 * half)[:half]
    yield _pick(program)


def _pick(program: _Program) -> Numbers:
    """The values that a program over 80 candidate pairs uses; the least useful pairs are removed one by one."""
    floor = _floor(program.epsilon)
    grid = np.unique(np.concatenate([-floor * np.linspace(1, 4, 20), np.linspace(-floor, 0.5, 60)]))
    wide = _Program(program.epsilon, program.levels_in, 2 * len(grid)).solve(grid)
    assert wide is not None
    weight = wide[1].sum(0)
    chosen = grid[weight[: len(grid)] + weight[::-1][: len(grid)] > 1e-9]
    while len(chosen) > program.half:
        smaller = _Program(program.epsilon, program.levels_in, 2 * len(chosen) - 2)
        without = [smaller.solve(np.delete(chosen, k)) for k in range(len(chosen))]
        costs = [math.inf if solved is None else solved[0] for solved in without]
        chosen = np.delete(chosen, int(np.argmin(costs)))
    return np.concatenate([chosen, np.full(program.half - len(chosen), 0.5)])


def _repair(epsilon: float, lower: Numbers, channel: Numbers) -> Design:
    """The full design, whose constraints hold up to rounding instead of the solver's tolerance."""
    # a pair may have crossed the middle; sorting restores the reflection as the reversal
    crossed = lower > 0.5
    full = np.concatenate([channel, channel[::-1, ::-1]])
    alpha = np.concatenate([lower, 1.0 - lower[::-1]])
    order = np.argsort(np.where(crossed, 1.0 - lower, lower), kind="stable")
    left = np.where(crossed, len(alpha) - 1 - np.arange(len(lower)), np.arange(len(lower)))[order]
    columns = np.concatenate([left, len(alpha) - 1 - left[::-1]])
    full, alpha = full[:, columns], alpha[columns]
    u = np.linspace(0.0, 1.0, len(full))
    used = full.max(0) > _DUST
    sent, values = full[:, used], alpha[used]
    both = np.stack([np.ones_like(values), values])
    for _ in range(2):  # project on the two equalities; the second pass removes the rounding of the first
        missing = np.stack([np.ones_like(u), u], axis=1) - sent @ both.T
        sent = sent + missing @ np.linalg.solve(both @ both.T, both)
    # mix in as much of the uniform channel as the ratios need; the values stay unbiased
    excess = (sent.max(0) - math.exp(epsilon) * sent.min(0)).max()
    mixed = 1.0 - 1.0 / (1.0 + len(values) * _floor(epsilon) * max(0.0, float(excess)))
    return _padded((1 - mixed) * sent + mixed / len(values), (values - mixed * values.mean()) / (1 - mixed), len(alpha))


def _padded(P: Numbers, alpha: Numbers, columns: int) -> Design:
    """The design with unused columns in the middle: at an end, rounding in a cumulative row could send them."""
    middle = [len(alpha) // 2] * (columns - len(alpha))
    return Design(np.insert(P, middle, 0.0, axis=1), np.insert(alpha, middle, 0.5))
