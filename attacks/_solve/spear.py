"""The batch behind a gradient of a dense layer with ReLU, from the rank of its weight's gradient and the zeros in it.

With D = dL/dZ [b, m] and X [b, n] the weight's gradient is D^T X = U diag(s) V^T, of rank b, and D^T = U M for some
M [b, b]; then X = M^-1 diag(s) V^T. A column q of M gives the slopes U q of one image, which are zero at units that it
does not activate: q is orthogonal to their rows of U. So b - 1 rows are drawn, and the vector orthogonal to them is a
column of M, up to a factor, if one image activates none of these units. The bias' gradient D^T 1 gives the factors.

Source: Dimitrov, Baader, Mueller and Vechev 2024, "SPEAR: exact gradient inversion of batches in federated learning".
Differs: a slope counts as zero by the noise that is measured in the gradient; candidates are fitted to all their zeros;
the exchanges also try candidates that follow from an image known up to its factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import inv_ex, solve_ex, svd

from leakgauge.harness.core import rng
from leakgauge.harness.core.rng import Key

_ROUNDING = 2.0**-24
"""Of float32, relative: the noise of a gradient that is told exactly. Measured noise takes its place where larger."""

_CLEAR = 10.0
"""Standard deviations of noise within which a slope may be zero, and beyond which a direction or a unit is signal. Of
some thousand slopes none of pure noise is beyond 4; the rest is for noise that a candidate itself carries."""

_DRAWN = 4096
"""Sets of rows drawn at once, at most: enough that nothing is looped over, few enough that they stay in memory."""

_ROUND = 4 * _DRAWN
"""Sets of rows in the first round, at most; rounds then double. The sparsest batch is looked at after each draw, costly
exchanges are tried after a round only."""

_REFINED = 64
"""Candidates of a draw that are fitted to all their zeros."""

_POOL = 256
"""Candidates kept from round to round."""

_PASSES = 2
"""Of exchanges over a batch, which bounds their time."""

_SCALES = 16
"""Factors of an image that are tried when its own slopes are missing, on each side of zero; from 1/30 to 30."""


class Undecided(ValueError):
    """This gradient has no batch that can be told; the message says why, for a reader of the report."""


class FirstLayer(NamedTuple):
    """What is known of a dense layer with ReLU behind it; float64, finite.

    Attributes:
        weight, bias: [m, n] and [m], of the model.
        of_weight, of_bias: their gradients, with one common factor.
    """

    weight: Tensor
    bias: Tensor
    of_weight: Tensor
    of_bias: Tensor


class Found(NamedTuple):
    """x: [b, n] float64; contradictions: slopes that do not fit the sign of the unit's input; drawn: sets of rows."""

    x: Tensor
    contradictions: int
    drawn: int


class _Evidence(NamedTuple):
    """[k, live] whether a slope is zero but for noise, and whether it is other than zero; neither: it tells nothing."""

    none: Tensor
    some: Tensor


class _Batch(NamedTuple):
    """columns: [b, b], a column of M a row, up to a factor; contradictions: all possible where nothing is solved."""

    columns: Tensor
    contradictions: int


def find(layer: FirstLayer, images: int, samples: int, key: Key) -> Found:
    """The batch with the fewest contradictions that was seen before one had none, or `samples` sets of rows were drawn.

    Args:
        images: b.
        samples: a budget; at least 1.
        key: draws the rows.

    Guarantees:
        The inputs are finite.

    Raises:
        Undecided: the weight's gradient does not have b directions above its noise, or no b candidates were seen.
    """
    factors = _factor(layer, images)
    # 64 hits of an image that activates half of the units
    drawn, size = 0, min(_ROUND, 64 << images)
    pool, best = torch.empty(0, images, dtype=torch.float64), None
    while drawn < samples and (best is None or best.contradictions):
        size = min(size, samples - drawn)
        for start in range(0, size, _DRAWN):
            count = min(_DRAWN, size - start)
            pool = factors.distinct(torch.cat([pool, factors.refine(factors.draw(count, key.child(drawn)))]), _POOL)
            drawn += count
            best = _better(best, factors.assemble(pool))
            if best is not None and best.contradictions == 0:
                break
        else:
            best = _better(best, factors.complete(pool))
            size = drawn
    x = None if best is None else factors.inputs(best.columns)
    if best is None or x is None or (images > 1 and factors.by_chance(best.columns)):
        raise Undecided(
            f"no {images} images were found in {drawn} draws: too few units are inactive for one; map needs none"
        )
    return Found(x, best.contradictions, drawn)


def _unit(rows: Tensor) -> Tensor:
    """Rows of the last axis at norm 1."""
    norms: Tensor = rows.norm(dim=-1, keepdim=True)
    return rows / norms


def _replaced(rows: Tensor, i: int, others: Tensor) -> Tensor:
    """[k, *rows.shape]: copies of rows, the i-th replaced by one of `others` each."""
    copies = rows.repeat(len(others), 1, 1)
    copies[:, i] = others
    return copies


def _better(one: _Batch | None, other: _Batch | None) -> _Batch | None:
    """The one with fewer contradictions."""
    if one is None or (other is not None and other.contradictions < one.contradictions):
        return other
    return one


def _factor(layer: FirstLayer, images: int) -> _Factors:
    """The singular value decomposition, checked, with the noise of each row measured by what is beyond rank b."""
    gradient = layer.of_weight
    units, inputs = gradient.shape
    if images > min(units, inputs):
        raise Undecided(
            f"{images} images need as many units and inputs of the first layer, which has {units} and {inputs}; map "
            "does not"
        )
    left, values, right = svd(gradient, full_matrices=False)
    floor = _ROUNDING * values[0]
    beyond = torch.maximum(values[images], floor) if len(values) > images else floor
    rank = int((values[:images] > _CLEAR * beyond).sum())
    if rank < images:
        noisy = bool(beyond > 1e3 * floor)
        raise Undecided(
            f"the gradient has {rank} directions above its noise for {images} images: "
            + ("too much noise; map withstands it" if noisy else "two are alike, or one leaves no trace")
        )
    left, values, right = left[:, :images], values[:images], right[:images]
    rest = gradient - (left * values) @ right
    noise = (rest.square().sum(1) / max(inputs - images, 1)).sqrt()
    noise = noise.maximum(_ROUNDING * gradient.square().mean(1).sqrt())
    live = (left * values).norm(dim=1) > _CLEAR * math.sqrt(images) * noise
    if int(live.sum()) < images:
        raise Undecided(f"only {int(live.sum())} units of the first layer have a gradient, for {images} images")
    offset = (layer.bias[live], layer.bias[~live])
    scores = (values[:, None] * right) @ layer.weight.T
    return _Factors(
        left[live], values, right, noise[live], left.T @ layer.of_bias, scores[:, live], scores[:, ~live], *offset
    )


@dataclass(frozen=True, eq=False)
class _Factors:
    """A factored gradient. Candidates are [k, b] unit rows q: columns of M up to a factor.

    Attributes:
        left, values, right: [live, b], [b], [b, n]; rows of units with no gradient are left out.
        noise: [live] standard deviation in an entry of a unit's row of the gradient.
        total: [b], M 1, as the bias' gradient is D^T 1.
        scores, dead_scores: [b, live] and [b, m - live]: M X W^T, whose rows the images' share.
        bias, dead_bias: [live] and [m - live].
    """

    left: Tensor
    values: Tensor
    right: Tensor
    noise: Tensor
    total: Tensor
    scores: Tensor
    dead_scores: Tensor
    bias: Tensor
    dead_bias: Tensor

    def blur(self, q: Tensor) -> Tensor:
        """[k, live] noise of each slope, as a share of the root mean square of the candidate's slopes."""
        spread: Tensor = (q / self.values).norm(dim=1, keepdim=True)
        return spread * self.noise * math.sqrt(len(self.left))

    def slopes(self, q: Tensor) -> Tensor:
        """[k, live] absolute slopes, by their root mean square."""
        return (q @ self.left.T).abs() * math.sqrt(len(self.left))

    def assemble(self, pool: Tensor) -> _Batch | None:
        """The sparsest batch from a pool of candidates, if it has b independent ones."""
        columns = self.sparsest(pool)
        return (
            None
            if columns is None
            else _Batch(columns, int(self.contradictions(columns[None], self.evidence(columns))[0]))
        )

    def complete(self, pool: Tensor) -> _Batch | None:
        """The sparsest batch after exchanges with the pool, then with candidates made from the batch itself."""
        batch = self.assemble(pool)
        for extra in (pool, None):
            if batch is not None and batch.contradictions:
                batch = self.exchange(batch, self.rescaled(batch.columns) if extra is None else extra)
        return batch

    def zeros(self, q: Tensor) -> Tensor:
        """[k, live] whether a slope counts as zero.

        Below the geometric mean of noise and signal: few rows magnify the noise of a candidate by a factor that is not
        known, and slopes that are small by chance are as rare as the threshold is small.
        """
        spread: Tensor = (q / self.values).norm(dim=1, keepdim=True)
        scaled = q * (len(self.left) ** 0.25 / spread.sqrt())
        shares: Tensor = scaled @ (self.left / self.noise[:, None].sqrt()).T
        return shares.abs() < 1

    def draw(self, size: int, key: Key) -> Tensor:
        """[k, b] candidates from `size` sets of b - 1 rows, those that are zero there."""
        units, images = self.left.shape
        picked = torch.from_numpy(rng.integers(key, size * (images - 1), units)).reshape(size, images - 1)
        rows = _unit(self.left[picked])
        # a unit drawn twice is a singular system, and no candidate
        solution, singular = solve_ex(rows[:, :, :-1], -rows[:, :, -1])
        q = torch.cat([solution, solution.new_ones(size, 1)], dim=1)
        q = q[(singular == 0) & q.isfinite().all(dim=1)]
        q = _unit(q)
        return q[self.zeros(q).sum(dim=1) >= images - 1]

    def refine(self, q: Tensor) -> Tensor:
        """The sparsest candidates, each fitted twice to all of its zeros."""
        q = self.distinct(q, _REFINED)
        for _ in range(2):
            q = self.fit(self.zeros(q))
        return q

    def fit(self, zeros: Tensor) -> Tensor:
        """[k, b] candidates with the smallest slopes, in units of noise, where zeros [k, live] says so."""
        if not len(zeros):
            return self.left.new_empty(0, len(self.values))
        rows = self.left * self.values / self.noise[:, None]
        return _unit(svd(rows * zeros[:, :, None], full_matrices=False).Vh[:, -1] * self.values)

    def distinct(self, q: Tensor, most: int) -> Tensor:
        """At most so many candidates that differ, those with the most zeros first.

        Last come combinations of sparser ones: two images that share zeros make many, which would crowd others out.
        """
        if not len(q):
            return q
        zeros = self.zeros(q)
        # equal sums of these numbers are equal zeros, and sorting sums is faster than sorting rows
        sums = zeros.double() @ torch.arange(zeros.shape[1], dtype=torch.float64).cos()
        _, group = torch.unique(sums, return_inverse=True)
        # the first of each group, in the order in which they came
        first = torch.full((int(group.max()) + 1,), len(q)).scatter_reduce(0, group, torch.arange(len(q)), "amin")
        q = q[first[zeros[first].sum(dim=1).argsort(descending=True, stable=True)]]
        chosen, free = self.basis(q, len(self.values) - 1)
        free[chosen] = True
        q = q[(~free).long().argsort(stable=True)[: 4 * most]]
        sine = (1 - (q @ q.T).square()).clamp(min=0).sqrt()
        repeats = torch.tril(sine < self.resolution(q)[:, None], -1).any(dim=1)
        return q[~repeats][:most]

    def resolution(self, q: Tensor) -> Tensor:
        """[k] sine of the angle below which candidates are the same; see `zeros`."""
        return self.blur(q).mean(dim=1).sqrt()

    def basis(self, q: Tensor, size: int) -> tuple[list[int], Tensor]:
        """At most `size` independent candidates with the most zeros, and [k] which are independent of all of them.

        Greedily, which is best: independent sets are a matroid.
        """
        count, limit, left = self.zeros(q).sum(dim=1), self.resolution(q), q
        chosen: list[int] = []
        free = torch.ones(len(q), dtype=torch.bool)
        while len(chosen) < size and bool(free.any()):
            chosen.append(int(torch.where(free, count, -1).argmax()))
            unit = _unit(left[chosen[-1]])
            left = left - (left @ unit)[:, None] * unit
            free = left.norm(dim=1) > limit
        return chosen, free

    def sparsest(self, q: Tensor) -> Tensor | None:
        """[b, b] independent candidates with the most zeros, if there are so many."""
        chosen, _ = self.basis(q, len(self.values))
        return q[chosen] if len(chosen) == len(self.values) else None

    def solve(self, columns: Tensor) -> Tensor:
        """[k, b, b] inverses of M from its columns [k, b, b] up to factors; not finite where there is none."""
        inverse, singular = inv_ex(columns.transpose(1, 2))
        inverse = inverse / (inverse @ self.total)[:, :, None]
        return torch.where((singular == 0)[:, None, None], inverse, torch.nan)

    def by_chance(self, columns: Tensor) -> bool:
        """Whether the candidates have fewer than b zeros each, in the mean: any has b - 1, by the rows of its draw."""
        return int(self.zeros(columns).sum()) < len(columns) ** 2

    def inputs(self, columns: Tensor) -> Tensor | None:
        """[b, n] images of candidates [b, b], if they are finite."""
        x = self.solve(columns[None])[0] @ (self.values[:, None] * self.right)
        return x if bool(x.isfinite().all()) else None

    def evidence(self, q: Tensor) -> _Evidence:
        """Of the slopes of candidates."""
        slopes, blur = self.slopes(q), self.blur(q)
        return _Evidence(slopes < _CLEAR * blur, slopes > blur.sqrt())

    def contradictions(self, columns: Tensor, evidence: _Evidence) -> Tensor:
        """[k] slopes of batches [k, b, b] that do not fit the sign of their unit's input; all, where none is solved.

        A slope is not zero at a positive input, nor other than zero at another.
        """
        inverse = self.solve(columns)
        active = inverse @ self.scores + self.bias > 0
        wrong = torch.where(active, evidence.none, evidence.some).sum(dim=(1, 2))
        wrong += (inverse @ self.dead_scores + self.dead_bias > 0).sum(dim=(1, 2))
        worst = len(self.values) * (len(self.bias) + len(self.dead_bias))
        return torch.where(inverse.isfinite().all(dim=2).all(dim=1), wrong, worst)

    def exchange(self, batch: _Batch, pool: Tensor) -> _Batch:
        """The batch after exchanging each candidate, `_PASSES` times over, for the best of a pool where that helps."""
        theirs = self.evidence(pool)
        for i in list(range(len(self.values))) * (_PASSES if len(pool) else 0):
            own = self.evidence(batch.columns)
            tried = _replaced(batch.columns, i, pool)
            evidence = _Evidence(*(_replaced(one, i, other) for one, other in zip(own, theirs, strict=True)))
            wrong = self.contradictions(tried, evidence)
            batch = min(batch, _Batch(tried[wrong.argmin()], int(wrong.min())), key=lambda one: one.contradictions)
        return batch

    def rescaled(self, columns: Tensor) -> Tensor:
        """[k, b] candidates for images of which all is right but the factor.

        Row i of M^-1 is orthogonal to all columns but the i-th: where only one candidate is wrong, its image is right
        up to a factor, which tells the units that it activates, and so the candidate.
        """
        inverse = self.solve(columns[None])[0]
        if not bool(inverse.isfinite().all()):
            return columns[:0]
        factors = torch.logspace(-1.5, 1.5, _SCALES, dtype=torch.float64)
        factors = torch.cat([factors, -factors])
        inactive = factors[:, None, None] * (inverse @ self.scores) + self.bias <= 0
        masks = torch.unique(inactive.reshape(-1, len(self.bias)), dim=0)
        return self.fit(masks[masks.sum(dim=1) >= len(self.values) - 1])
