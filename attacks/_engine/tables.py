"""An attacker's prior of the records of a table, and a search that changes one column at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.matching import Evaluation, Function
from leakgauge.attacks._search.features import front, outer
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.table import Column, likeliest_number, parts, records
from leakgauge.harness.learn.layers import Scale
from leakgauge.harness.learn.tasks import ModelTask

_CLASSES = 24  # maximum number of classes of the mixture; `docs/attacks.md` has the energies with fewer and with more
_EACH = 125  # minimum mean number of records per class
_LEVELS = 32  # maximum number of values of a number that are tried: medians of equally frequent ranges
_PASSES = 60  # number of passes of expectation maximization
_SMOOTH = 0.5  # number of records with the whole table's frequencies that each class counts besides its own records

_NEAR = torch.cat([sign * 2.0 ** -torch.arange(3, 13)[:, None] for sign in (1, -1)])
"""[20, 1]: changes of a number that are tried besides the levels."""

_SWEEPS = 6  # maximum number of sweeps over all columns
_DRAWS = 18  # number of draws of each column; the first sixth is left out
_TURNS = 4  # number of alternating fits of slopes and records
_ASTRAY = 30.0  # evidence of the first layer's gradient against records, in nats, from which the search failed
_SHOWN = 0.5  # minimum share of nonzero entries of a gradient: if a defense sends few entries, zeros are not estimates
_SANE = 20.0  # largest plausible entry of inputs in [0, 1] as estimated from a noisy gradient


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture of distributions with independent columns: within a class, each column has a probability for each
    value.

    Attributes:
        columns: columns of the records.
        values: possible values of each column, [v, width]: all categories, or levels of a number.
        edges: bounds between the levels of a number, [v - 1] for each column.
        weights: [k] log probabilities of the classes.
        chances: log probabilities of the values in each class, [k, v] for each column.

    Source: Lazarsfeld and Henry 1968, "Latent structure analysis", by expectation maximization.
    """

    columns: tuple[Column, ...]
    values: tuple[Tensor, ...]
    edges: tuple[Tensor, ...]
    weights: Tensor
    chances: tuple[Tensor, ...]

    @classmethod
    def fit(cls, x: Tensor, columns: Sequence[Column], key: Key, classes: int = _CLASSES) -> Mixture:
        """The mixture fitted to records x [n, p]."""
        x, count = records(x.double(), columns), max(1, min(classes, len(x) // _EACH))
        entries = [column for _, column in parts(x, columns)]
        values, edges = zip(*map(_levels, entries), strict=True)
        codes = [
            one_hot(_codes(column, edge), len(value)).double()
            for column, edge, value in zip(entries, edges, values, strict=True)
        ]
        belongs = rng.uniform(key, (len(x), count), dtype=torch.float64) + 1e-3
        belongs = belongs / belongs.sum(1, keepdim=True)
        weights, chances = _maximized(belongs, codes)
        for _ in range(_PASSES - 1):
            scores = [code @ chance.T for code, chance in zip(codes, chances, strict=True)]
            weights, chances = _maximized((weights + torch.stack(scores).sum(0)).softmax(1), codes)
        return cls(tuple(columns), values, edges, weights, chances)

    @property
    def words(self) -> str:
        """Words for the report: what the mixture is."""
        return f"a mixture of {len(self.weights)} classes with independent columns"

    def likeliest(self, x: Tensor) -> Tensor:
        """[m, b, p], as x: each record has the likeliest value of each column."""
        each = zip(self.values, self.chances, strict=True)
        best = [values[(self.weights.exp() @ chances.exp()).argmax()] for values, chances in each]
        return torch.cat(best).to(x.dtype).expand_as(x).clone()

    def draw(self, n: int, key: Key) -> Tensor:
        """[n, p]: n records drawn from the mixture."""
        uniform = rng.uniform(key, (1 + len(self.values), n), dtype=torch.float64)
        kind = _drawn(self.weights.expand(n, -1), uniform[0])
        each = zip(self.values, self.chances, uniform[1:], strict=True)
        return torch.cat([values[_drawn(chances[kind], draws)] for values, chances, draws in each], 1)

    def energy(self, x: Tensor) -> Tensor:
        """[m] float64: -log p of records x [m, ..., p], summed over all axes but the first."""
        score = self.weights.expand(x.shape[:-1].numel(), -1)
        each = parts(x.double().flatten(0, -2), self.columns)
        for (_, entries), edge, chance in zip(each, self.edges, self.chances, strict=True):
            score = score + chance.T[_codes(entries, edge)]
        return -score.logsumexp(1).view(len(x), -1).sum(1)


def _drawn(chances: Tensor, uniform: Tensor) -> Tensor:
    """[n]: indices drawn by log probabilities [n, v] from uniform numbers [n]."""
    total = chances.softmax(1).cumsum(1).contiguous()
    return torch.searchsorted(total, uniform[:, None], right=True)[:, 0].clamp(max=chances.shape[1] - 1)


def _levels(entries: Tensor) -> tuple[Tensor, Tensor]:
    """Values [v, width] of a column and the bounds [v - 1] between them, from its entries [n, width]."""
    if entries.shape[1] > 1:
        return torch.eye(entries.shape[1], dtype=entries.dtype), entries.new_zeros(0)
    ordered = entries[:, 0].sort().values
    chunks = torch.tensor_split(ordered, min(_LEVELS, len(ordered)))
    values = torch.unique(torch.stack([chunk[len(chunk) // 2] for chunk in chunks]))
    return values[:, None], (values[1:] + values[:-1]) / 2


def _codes(entries: Tensor, edges: Tensor) -> Tensor:
    """[n]: the number of the value of each entry [n, width]."""
    return entries.argmax(1) if entries.shape[1] > 1 else torch.bucketize(entries[:, 0].contiguous(), edges)


def _maximized(belongs: Tensor, codes: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`weights` and `chances`, given class probabilities [n, k] and values [n, v] for each column, as 0 or 1.

    The chances are smoothed with those of the whole table.
    """
    chances = []
    for code in codes:
        counts, overall = belongs.T @ code, (code.sum(0) + 0.5) / (code.sum() + 0.5 * code.shape[1])
        chances.append(((counts + _SMOOTH * overall) / (counts.sum(1, keepdim=True) + _SMOOTH)).log())
    return belongs.mean(0).log(), tuple(chances)


class Settled(NamedTuple):
    """x: [m, b, p] records; value: [m] float64, misfit plus energy; evaluations: [m] int64, of the misfit."""

    x: Tensor
    value: Tensor
    evaluations: Tensor


def settle(misfit: Function, mixture: Mixture, x: Tensor) -> Settled:
    """The records near x [m, b, p] that explain the messages best.

    Each column of each record in turn takes the value with the least misfit plus energy, until a sweep changes nothing.
    Every category and level is tried; for numbers, also values near the present one.

    Args:
        misfit: misfit of inputs [m, b p], for instances 0 to m - 1.
    """
    x = records(x, mixture.columns)
    value = _value(misfit, mixture, x)
    used = torch.ones(len(x), dtype=torch.int64)
    for _ in range(_SWEEPS):
        before = value
        for record, place in itertools.product(range(x.shape[1]), range(len(mixture.columns))):
            tried, sums = _alternatives(misfit, mixture, x, record, place, _NEAR)
            least, at = sums.min(1)
            better = least < value
            x[better], value = tried[better, at[better]], torch.where(better, least, value)
            used = used + sums.shape[1]
        if bool((value == before).all()):
            break
    return Settled(x, value, used)


def typical(misfit: Function, mixture: Mixture, x: Tensor, key: Key) -> Settled:
    """The likeliest value of each column separately, starting from x [m, b, p]; more are right than in the best record.

    Gibbs sampling draws each column in turn from its distribution given all others. The result uses the mean of these
    distributions, which varies less than the draws. Before each sweep, each record may be replaced by a record drawn
    from the mixture that explains the messages about as well; if messages show little, the sampling then visits records
    of all classes. Arguments as for `settle`.

    Sources: Geman and Geman 1984, "Stochastic relaxation, Gibbs distributions, and the Bayesian restoration of images";
        Gelfand and Smith 1990, "Sampling-based approaches to calculating marginal densities", for the mean of the
        distributions.
    """
    x, used = x.clone(), 1
    places = list(itertools.product(range(x.shape[1]), range(len(mixture.columns))))
    distributions: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {place: [] for place in places}
    for sweep in range(_DRAWS):
        for record in range(x.shape[1]):
            x = _replaced(misfit, mixture, x, record, key.child("other", sweep, record))
        for record, place in places:
            tried, sums = _alternatives(misfit, mixture, x, record, place, torch.zeros(1, 1))
            values = torch.split(tried[:, :, record], [column.width for column in mixture.columns], -1)[place]
            if mixture.columns[place].width == 1:  # the present value shares the probability of its range with a level
                level = _codes(values[:, -1].double(), mixture.edges[place])[:, None]
                sums = sums.scatter_add(1, level, torch.full_like(sums[:, :1], math.log(2)))
                sums[:, -1] += math.log(2)
            uniform = rng.uniform(key.child(sweep, record, place), (len(x),), dtype=torch.float64)
            x = tried[torch.arange(len(x)), _drawn(-sums, uniform)]
            used += sums.shape[1]
            if sweep >= _DRAWS // 6:
                distributions[record, place].append((values, (-sums).softmax(1)))
    likely = [_likely(mixture.columns[place], distributions[record, place]) for record, place in places]
    x = records(torch.cat(likely, 1).view(x.shape), mixture.columns)
    value = _value(misfit, mixture, x)
    return Settled(x, value, torch.full((len(x),), used + 2 * _DRAWS * x.shape[1]))


def _replaced(misfit: Function, mixture: Mixture, x: Tensor, record: int, key: Key) -> Tensor:
    """Records x [m, b, p] after a Metropolis-Hastings step for one record, which the mixture proposes."""
    other = x.clone()
    other[:, record] = mixture.draw(len(x), key.child("record")).to(x.dtype)
    rows = torch.arange(len(x))
    before, after = (misfit(tried.flatten(1), rows).value.double() for tried in (x, other))
    taken = rng.uniform(key.child("taken"), (len(x),), dtype=torch.float64).log() < before - after
    return torch.where(taken[:, None, None], other, x)


def _likely(column: Column, distributions: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """[m, width]: a column's guess from several distributions of values [m, v, width] with probabilities [m, v]."""
    values, chances = (torch.cat(each, 1) for each in zip(*distributions, strict=True))
    if column.width == 1:
        return likeliest_number(values[:, :, 0], chances, column.tolerance)[:, None]
    return (values * chances[:, :, None].to(values.dtype)).sum(1)


def _value(misfit: Function, mixture: Mixture, x: Tensor) -> Tensor:
    """[m]: misfit plus energy of records [m, b, p]."""
    return misfit(x.flatten(1), torch.arange(len(x))).value.double() + mixture.energy(x)


def _alternatives(
    misfit: Function, mixture: Mixture, x: Tensor, record: int, place: int, near: Tensor
) -> tuple[Tensor, Tensor]:
    """Records [m, v, b, p] with each value of a column, and their misfit plus energy [m, v]; NaN becomes infinite.

    Args:
        near: [w, 1], changes of a number that are also tried.
    """
    m, start, column = len(x), sum(before.width for before in mixture.columns[:place]), mixture.columns[place]
    values = mixture.values[place].to(x.dtype).expand(m, -1, -1)
    if column.width == 1:
        present = x[:, None, record, start : start + 1]
        values = torch.cat([values, (present + near.to(x.dtype)).clamp(0, 1)], 1)
    tried = x[:, None].repeat(1, values.shape[1], 1, 1)
    tried[:, :, record, start : start + column.width] = values
    rows = torch.arange(m).repeat_interleave(values.shape[1])
    each = tried.flatten(0, 1)
    sums = misfit(each.flatten(1), rows).value.double() + mixture.energy(each)
    return tried, sums.view(m, -1).nan_to_num(nan=torch.inf)


@torch.no_grad()
def restore(misfit: Function, mixture: Mixture, x: Tensor, layer: FirstLayer | None, key: Key) -> Settled:
    """Typical records near the records that explain the messages best, searched from x [m, b, p] and other starts.

    Args:
        misfit: as for `settle`.
        layer: the first layer's gradients of the same records, if known.
    """
    starts, shown = [x, mixture.likeliest(x)], None
    if layer is not None:
        layer, shown = layer.settle(mixture, starts[1], key.child("first"))
        starts.append(shown.x.to(x.dtype))
    tried = [settle(misfit, mixture, start) for start in starts]
    best = torch.stack([settled.value for settled in tried]).argmin(0)
    nearest = torch.stack([settled.x for settled in tried])[best, torch.arange(len(x))]
    usual = typical(misfit, mixture, nearest, key.child("typical"))
    x = usual.x
    if layer is not None and shown is not None:
        astray = layer.least(x) > layer.least(shown.x) + _ASTRAY
        x = torch.where(astray[:, None, None], shown.x.to(x.dtype), x)
    used = torch.stack([settled.evaluations for settled in (*tried, usual)]).sum(0)
    return Settled(x, _value(misfit, mixture, x), used)


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """The misfit of a first dense layer's gradients at single records, treating their noise as normal: a `Function`.

    Such a gradient is the outer product of slopes and the record. Slopes and record are fitted in turn; kinks of the
    layers behind have no effect.

    Attributes:
        rows: [n, o, p + 1], gradients of weight and bias.
        noise: [n], variance of their entries.
        slopes, inputs: [n, o] and [n, p], the factors of the outer product; the layer takes the inputs with `scale`.
    """

    rows: Tensor
    noise: Tensor
    slopes: Tensor
    inputs: Tensor
    scale: Scale

    @classmethod
    def of(cls, task: Task, targets: Tensor) -> FirstLayer | None:
        """From gradients `targets` [n, d]; None if the model does not begin with a dense layer or most are zero."""
        params = rng.uniform(Key(0).child("first layer"), (task.layout.dim,), -1.0, 1.0, dtype=torch.float64)
        if not isinstance(task, ModelTask) or (entry := front(task, params)) is None or entry[0].layers:
            return None
        split = task.layout.split if task.structure is None else task.structure.split
        weight, bias = split(targets)[entry[1] : entry[1] + 2]
        rows = torch.cat([weight, bias[:, :, None]], 2).double()
        if not bool(rows.isfinite().all()) or float((rows != 0).double().mean()) < _SHOWN:
            return None
        inputs, slopes, error = outer(rows)
        spread = rows[0].numel() - rows.shape[2]
        noise = rows.square().sum((1, 2)) / (1 + 1 / (rows.shape[1] * error.square())) / max(spread, 1)
        noise, scale = noise.clamp(min=1e-12 * rows.square().mean((1, 2)) + 1e-300), task.model.scale
        return cls(rows, noise, slopes, scale.stored(inputs), scale)

    def settle(self, mixture: Mixture, x: Tensor, key: Key) -> tuple[FirstLayer, Settled]:
        """Fitted slopes and typical records [n, 1, p], starting from records x."""
        # a bias gradient that noise hides does not show the scale
        sane = self.inputs.abs().amax(1, keepdim=True) < _SANE
        layer, x = self._with(torch.where(sane, self.inputs, x[:, 0].double())), x.double()
        for _ in range(_TURNS):
            x = settle(layer, mixture, x).x
            layer = layer._with(x[:, 0])
        return layer, typical(layer, mixture, x, key)

    def _with(self, inputs: Tensor) -> FirstLayer:
        """The same with the slopes that fit inputs [n, p] best."""
        whole = _with_one(self.scale.apply(inputs))
        return replace(self, slopes=(self.rows @ whole[:, :, None])[:, :, 0] / whole.square().sum(1, keepdim=True))

    def least(self, x: Tensor) -> Tensor:
        """[n]: the misfit of records x [n, 1, p] with their own best slopes."""
        return self._with(x[:, 0].double())(x.double().flatten(1), torch.arange(len(x))).value

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        rows, slopes = self.rows[instances], self.slopes[instances]
        inputs = _with_one(self.scale.apply(candidates.double()))
        off = rows.square().sum((1, 2)) - 2 * ((rows.mT @ slopes[:, :, None])[:, :, 0] * inputs).sum(1)
        off = off + slopes.square().sum(1) * inputs.square().sum(1)
        return Evaluation(off / (2 * self.noise[instances]), torch.zeros_like(candidates))


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(len(x), 1)], 1)
