"""MVU: the unbiased channel between a few levels that is epsilon-LDP and errs least.

Minimizing over the channel P alone is a linear program and over the values alpha alone least squares, but taking turns
stops at once: where P is invertible, alpha = P^-1 u is the only unbiased choice. So both move together, by linear
programs within a trust region, from several starts.

Source: Chaudhuri, Guo, Rabbat 2022, "Privacy-aware compression for federated data analysis" (strict LDP). Differs: only
    channels that commute with the reflection of levels, which halves the programs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy import optimize, sparse

from leakgauge.harness.core import rng
from leakgauge.harness.core.rng import Key

Floats = npt.NDArray[np.float64]

_MOST_EPSILON = 24.0
"""Least probabilities are near e^-24 = 4e-11 there; a draw of 53 bits still resolves them to 3e-6 of themselves."""

_LEAST_EPSILON = 0.01
_MOST_BITS = 4

_PROGRAM_EPSILON = 12.0
"""Largest of the programs: above it the solver's tolerances are not enough. From 9 on they find nothing better than the
rounded response, unless there are fewer columns than levels."""

_SPREADS = 6
"""Starts with equally spaced values; they differ in how far the outer ones lie outside [0, 1]."""

_DUST = 1e-7
"""Probability below which a column counts as unused: a draw of 53 bits could not keep the ratios between its rows."""

_STEPS = 80
"""Of one descent, at most."""


class Design(NamedTuple):
    """A channel between levels and the values that make it unbiased.

    Attributes:
        P: [levels in, levels out]; P[i, j] is the probability to send column j for the level u_i = i / (levels in - 1).
        alpha: [levels out], increasing; the value that the server reads from column j.
    """

    P: Floats
    alpha: Floats

    @property
    def objective(self) -> float:
        """Mean over the levels u_i of E (alpha_j - u_i)^2: the variance that the channel adds, in units of [0, 1]^2."""
        u = np.linspace(0.0, 1.0, len(self.P))
        return float((self.P * (u[:, None] - self.alpha) ** 2).sum() / len(u))


@functools.lru_cache(maxsize=64)
def design(epsilon: float, bits_in: int, bits_out: int) -> Design:
    """The best unbiased epsilon-LDP channel found from 2^bits_in levels of [0, 1] to 2^bits_out columns.

    Both arrays are read-only and the same object for equal arguments. Seconds at 4 bits, then cached.

    | case | design |
    |---|---|
    | bits_out = 1 | randomized response between -1/(e^epsilon - 1) and e^epsilon/(e^epsilon - 1): the optimum |
    | epsilon > 12, bits_out >= bits_in | randomized response among as many columns as there are levels |
    | epsilon > 12, bits_out < bits_in | the design for 12, or rounding first, then randomized response |
    | else | the best of several local optima; no certificate that it is the global one |

    Guarantees:
        Rows of P sum to 1 and P alpha = u, both within 1e-12 (the second relative to max |alpha|).
        Columns of no use are in the middle and have probability zero; all other entries are above 1e-7 e^-epsilon.
        exact_epsilon(P) <= epsilon + 1e-12.
        P[i, j] = P[-1-i, -1-j] and alpha_j + alpha_-1-j = 1, within 1e-12.
        Its objective is not above that of the rounded response.

    Raises:
        ValueError: epsilon is outside [0.01, 24], or a number of bits outside 1..4.
    """
    if not _LEAST_EPSILON <= epsilon <= _MOST_EPSILON:
        raise ValueError(f"expected {_LEAST_EPSILON} <= epsilon <= {_MOST_EPSILON:g}, got epsilon={epsilon}")
    for name, bits in (("bits_in", bits_in), ("bits_out", bits_out)):
        if bits not in range(1, _MOST_BITS + 1):
            raise ValueError(f"expected {name} between 1 and {_MOST_BITS}, got {name}={bits}")
    best = _rounded_response(epsilon, 2**bits_in, 2**bits_out)
    if bits_out > 1 and (epsilon <= _PROGRAM_EPSILON or bits_out < bits_in):
        program = _Program(min(epsilon, _PROGRAM_EPSILON), 2**bits_in, 2**bits_out)
        found = (_repair(program.epsilon, *_descend(program, lower)) for lower in _starts(program))
        best = min(best, *found, key=lambda candidate: candidate.objective)
    for array in best:
        array.setflags(write=False)
    return best


def exact_epsilon(P: Floats) -> float:
    """max over columns j and rows i, i' of ln P[i, j] / P[i', j]: the pure LDP level of the channel, as stored.

    | column | counts |
    |---|---|
    | all zero | nothing: it is never sent |
    | zero for some rows only | inf |
    """
    most, least = P.max(0), P.min(0)
    sent = most > 0
    if np.any(least[sent] <= 0):
        return math.inf
    return float(np.log(most[sent] / least[sent]).max(initial=0.0))


def sample(P: Floats, rows: npt.NDArray[np.int64], key: Key) -> npt.NDArray[np.int64]:
    """One column for each row index: column j with probability P[rows, j], independently.

    Args:
        P: [levels in, levels out], rows sum to 1.
        rows: [n], each in 0..levels in - 1.
        key: used for one draw of n uniform numbers.

    Raises:
        ValueError: an index that is not a row of P.
    """
    if rows.size and not 0 <= rows.min() <= rows.max() < len(P):
        raise ValueError(f"expected rows in 0..{len(P) - 1}, got {rows.min()}..{rows.max()}")
    u = rng.uniform(key, rows.shape, dtype=torch.float64).numpy()
    columns = np.empty(rows.shape, dtype=np.int64)
    # level by level: one search on row + u would cost the bits of u that the row takes
    for row, ends in enumerate(np.cumsum(P, axis=1)[:, :-1]):
        mine = rows == row
        columns[mine] = np.searchsorted(ends, u[mine], side="right")
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
    """1 / (e^epsilon - 1): least distance of the outer values from [0, 1]."""
    return 1.0 / math.expm1(epsilon)


class _Program:
    """The linear program in P for given values, of a channel that the reflection of levels maps to itself.

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

    def values(self, lower: Floats) -> Floats:
        """All values, from the lower half."""
        return np.concatenate([lower, 1.0 - lower[::-1]])

    def best_channel(self, lower: Floats) -> tuple[float, Floats] | None:
        """Least objective at these values and the lower half of its channel; None where nothing is feasible."""
        return self._solve(lower, None, 0.0)

    def best_move(self, lower: Floats, channel: Floats, radius: float) -> tuple[float, Floats] | None:
        """Objective and move of `lower`, linearized about `channel`, with no entry further than `radius`."""
        return self._solve(lower, channel, radius)

    def _solve(self, lower: Floats, channel: Floats | None, radius: float) -> tuple[float, Floats] | None:
        """The program, with the values as variables too where a channel to linearize about is given."""
        alpha, rows = self.values(lower), len(self.u)
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

    def _fold(self, by_column: Floats) -> Floats:
        """Derivative by `lower` from the derivative by alpha."""
        return by_column[:, : self.half] - by_column[:, self.half :][:, ::-1]


def _descend(program: _Program, lower: Floats) -> tuple[Floats, Floats]:
    """Values and channel (lower halves) of a local optimum: trust region, linear model, exact program at each trial."""
    solved = program.best_channel(lower)
    assert solved is not None  # every start leaves room for randomized response between its outer values
    objective, channel = solved
    radius = 0.1 * (1.0 + float(np.ptp(lower)))
    for _ in range(_STEPS):
        model = program.best_move(lower, channel, radius)
        # 1e-9: what is left to gain is below every digit that is read
        if model is None or objective - model[0] <= 1e-9 * objective:
            break
        trial = program.best_channel(lower + model[1])
        gain = -math.inf if trial is None else (objective - trial[0]) / (objective - model[0])
        if trial is not None and gain > 0:
            lower, (objective, channel) = lower + model[1], trial
        radius *= 2.0 if gain > 0.5 else 0.25 if gain <= 0 else 0.5 if gain < 0.1 else 1.0
        if radius < 1e-9:
            break
    return lower, channel


def _starts(program: _Program) -> Iterator[Floats]:
    """Lower halves of equally spaced values, then the ones that a program with many values picks."""
    floor, half = _floor(program.epsilon), program.half
    # from the least distance that is feasible with room to spare up to that of the rounded response
    for distance in floor * np.geomspace(1.2, half, _SPREADS):
        yield np.linspace(-distance, 1.0 + distance, 2 * half)[:half]
    yield _pick(program)


def _pick(program: _Program) -> Floats:
    """The best program over 80 candidate pairs of values, less, one by one, the pair that is missed least."""
    floor = _floor(program.epsilon)
    grid = np.unique(np.concatenate([-floor * np.linspace(1, 4, 20), np.linspace(-floor, 0.5, 60)]))
    wide = _Program(program.epsilon, program.levels_in, 2 * len(grid)).best_channel(grid)
    assert wide is not None
    weight = wide[1].sum(0)
    picked = grid[weight[: len(grid)] + weight[::-1][: len(grid)] > 1e-9]
    while len(picked) > program.half:
        smaller = _Program(program.epsilon, program.levels_in, 2 * len(picked) - 2)
        without = [smaller.best_channel(np.delete(picked, k)) for k in range(len(picked))]
        costs = [math.inf if solved is None else solved[0] for solved in without]
        picked = np.delete(picked, int(np.argmin(costs)))
    return np.concatenate([picked, np.full(program.half - len(picked), 0.5)])


def _repair(epsilon: float, lower: Floats, channel: Floats) -> Design:
    """The full design, with the constraints met to rounding instead of to the solver's tolerance.

    Rows are projected on the two equalities; then as much of the uniform channel is mixed in as the ratios need, which
    (alpha - t mean) / (1 - t) leaves unbiased.
    """
    # a pair may have crossed the middle: ordered, the reflection is again the reversal
    crossed = lower > 0.5
    full = np.concatenate([channel, channel[::-1, ::-1]])
    alpha = np.concatenate([lower, 1.0 - lower[::-1]])
    order = np.argsort(np.where(crossed, 1.0 - lower, lower), kind="stable")
    left = np.where(crossed, len(alpha) - 1 - np.arange(len(lower)), np.arange(len(lower)))[order]
    columns = np.concatenate([left, len(alpha) - 1 - left[::-1]])
    full, alpha = full[:, columns], alpha[columns]
    u = np.linspace(0.0, 1.0, len(full))
    used = full.max(0) > _DUST
    kept, values = full[:, used], alpha[used]
    both = np.stack([np.ones_like(values), values])
    for _ in range(2):  # once is exact but for rounding, twice removes that
        missing = np.stack([np.ones_like(u), u], axis=1) - kept @ both.T
        kept = kept + missing @ np.linalg.solve(both @ both.T, both)
    excess = (kept.max(0) - math.exp(epsilon) * kept.min(0)).max()
    mixed = 1.0 - 1.0 / (1.0 + len(values) * _floor(epsilon) * max(0.0, float(excess)))
    return _padded((1 - mixed) * kept + mixed / len(values), (values - mixed * values.mean()) / (1 - mixed), len(alpha))


def _padded(P: Floats, alpha: Floats, columns: int) -> Design:
    """With columns that are never sent, in the middle: at an end, rounding in a cumulated row would send them."""
    middle = [len(alpha) // 2] * (columns - len(alpha))
    return Design(np.insert(P, middle, 0.0, axis=1), np.insert(alpha, middle, 0.5))
