"""Membership scores out of what a model and its shadows say of records, for all records at once.

Everything is computed in float64. A higher score is a sign of a member. Permuting the records permutes the scores.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Variance = Literal["pooled", "per-example", "global"]
"""Where the spread of a record's confidence over the shadows comes from: see `lira_online`."""

_LEAST_STD = 1e-6
"""Of a confidence, in nats: models compute in float32, which resolves no less."""

_LEAST_P = 1e-300
"""Of a probability, so that a record on which a model is hopelessly wrong has a logarithm."""


def confidence(scores: Tensor, y: Tensor) -> Tensor:
    """phi = z_y - logsumexp_{j != y} z_j, the log odds of the label.

    Args:
        scores: [..., n, classes], a model's outputs before the softmax.
        y: [n] int64.

    Returns:
        [..., n] float64; NaN or infinite where an output is not finite.

    Raises:
        ValueError: fewer than two classes, or not one label a row.

    Source: Carlini et al. 2022 (arXiv 2112.03570), section IV: log(p / (1 - p)). From the outputs,
        as p rounds to 1.
    """
    if scores.ndim < 2 or scores.shape[-1] < 2 or y.shape != scores.shape[-2:-1]:
        raise ValueError(
            f"expected scores [..., n, classes >= 2] and labels [n], got {tuple(scores.shape)} and {tuple(y.shape)}"
        )
    wide = scores.double()
    true = y.expand(wide.shape[:-1])[..., None]
    return wide.gather(-1, true)[..., 0] - wide.scatter(-1, true, -torch.inf).logsumexp(-1)


def finite(scores: Tensor) -> Tensor:
    """Scores [n] in which one that is not finite counts as the lowest that is, 0 where none is: no sign of a member."""
    usable = scores.isfinite()
    lowest = float(scores[usable].min()) if bool(usable.any()) else 0.0
    return torch.where(usable, scores, lowest)


def _known(values: Tensor) -> Tensor:
    """float64, with NaN for what is not finite: the tail of an infinite value would be a number."""
    return torch.where(values.isfinite(), values.double(), torch.nan)


class _Side(NamedTuple):
    """Of the shadows that had a record inside, or outside: their number, mean and sum of squares about it; [n] each."""

    size: Tensor
    mean: Tensor
    squares: Tensor

    @property
    def overall(self) -> Tensor:
        """Mean over all records and shadows; 0 where there is none."""
        return (self.size * self.mean).sum() / self.size.sum().clamp_min(1)

    def std(self, variance: Variance) -> Tensor:
        """[n], at least `_LEAST_STD`."""
        total = self.size.sum()
        spread = self.squares.sum() + (self.size * (self.mean - self.overall).square()).sum()
        found = spread / total.clamp_min(1)
        freedom = total - (self.size > 0).sum()
        if variance != "global" and freedom > 0:
            found = self.squares.sum() / freedom
        found = found.expand_as(self.mean)
        if variance == "per-example":
            found = torch.where(self.size > 1, self.squares / self.size.clamp_min(1), found)
        return found.sqrt().clamp_min(_LEAST_STD)


def _side(values: Tensor, taken: Tensor) -> _Side:
    """Of values [m, n] the taken ones, without those that are not finite."""
    usable = taken & values.isfinite()
    count = usable.sum(0).double()
    known = torch.where(usable, values.double(), 0.0)
    mean = known.sum(0) / count.clamp_min(1)
    return _Side(count, mean, torch.where(usable, known - mean, 0.0).square().sum(0))


def _means(inner: _Side, outer: _Side) -> tuple[Tensor, Tensor]:
    """The two sides' means [n]. A record that one side lacks has the other's mean, moved by the usual gap."""
    both = (inner.size > 0) & (outer.size > 0)
    gap = (inner.mean - outer.mean)[both].mean() if bool(both.any()) else inner.overall - outer.overall
    filled = []
    for mine, other, shift in ((inner, outer, gap), (outer, inner, -gap)):
        instead = torch.where(other.size > 0, other.mean + shift, mine.overall)
        filled.append(torch.where(mine.size > 0, mine.mean, instead))
    return filled[0], filled[1]


def _shrunk(sides: tuple[_Side, _Side], variance: Variance) -> tuple[Tensor, Tensor]:
    """[n, 2] means and variances of one more value on each side, if a record's two means are jointly normal.

    The prior's moments are those of the records that both sides have, less what their few shadows add.
    """
    size = torch.stack([side.size for side in sides], -1)
    mean = torch.stack([side.mean for side in sides], -1)
    noise = torch.stack([side.std(variance) for side in sides], -1).square()
    both = (size > 0).all(-1)
    center = mean[both].mean(0)
    away = mean[both] - center
    values, vectors = torch.linalg.eigh(away.T @ away / len(away) - (noise / size)[both].mean(0).diag())
    prior = vectors * values.clamp_min(0.0) @ vectors.T
    weight = size / noise
    # (prior^-1 + weight)^-1, for a prior that may be singular: where all gaps are equal
    spread = prior @ torch.linalg.inv(torch.eye(2, dtype=prior.dtype) + weight[..., None] * prior)
    drawn = center + (spread @ (weight * (mean - center))[..., None])[..., 0]
    return drawn, noise + spread.diagonal(dim1=-2, dim2=-1).clamp_min(0.0)


def _sides(target: Tensor, shadow: Tensor, inside: Tensor) -> tuple[_Side, _Side]:
    """Shadows that had each record inside, and those that had not.

    Raises:
        ValueError: shapes that do not fit.
    """
    if target.ndim != 1 or shadow.shape[1:] != target.shape or inside.shape != shadow.shape:
        raise ValueError(
            "expected target [n], shadow [m, n] and inside [m, n], got "
            f"{tuple(target.shape)}, {tuple(shadow.shape)} and {tuple(inside.shape)}"
        )
    return _side(shadow, inside), _side(shadow, ~inside)


def _some(side: _Side, where: str) -> None:
    """Refuse a side that no shadow shows."""
    if not bool(side.size.any()):
        raise ValueError(f"expected a finite value of a shadow with some record {where}, got none")


def lira_online(
    target: Tensor, shadow: Tensor, inside: Tensor, variance: Variance = "pooled", *, shrink: bool = False
) -> Tensor:
    """log N(phi; mean_in, std_in) - log N(phi; mean_out, std_out), by the shadows with the record inside and outside.

    Args:
        target: [n], phi of each record by the model that is attacked.
        shadow: [m, n], phi by each shadow; an entry that is not finite is left out.
        inside: [m, n] bool, whether the shadow had the record.
        variance: `pooled`: on each side, sum over x and i of (phi_i(x) - mean(x))^2 / (#values - #records with any);
            for one record the usual ddof = 1. `per-example`: each record's own, divided by its number of shadows.
            `global`: of all values of the side about their one mean, divided by their number: it takes in how far
            records differ.
        shrink: the two means of a record have a normal prior, with the moments that all records show (empirical Bayes);
            N is then the predictive law. It says what few shadows leave open: that a record which models without it
            find hard gains most by being a member. Needs two records with shadows on both sides, else it is off.

    Returns:
        [n] float64.

    | case | what is taken |
    |---|---|
    | no shadow has a record on one side | the other side's mean, moved by the mean gap between the sides over records |
    | | that have both; where there are none, between all values |
    | no shadow shows a record | the mean of all values of the side |
    | `per-example`, one shadow on a side | the pooled variance |
    | `pooled`, no record with two shadows on a side | the global variance |
    | a standard deviation below 1e-6 | 1e-6 |
    | the target's phi is not finite | the lowest score of the others |

    Raises:
        ValueError: shapes that do not fit, or no shadow with any record inside, or outside.

    Source: Carlini et al. 2022 (arXiv 2112.03570), Algorithm 1; its public code takes `per-example` or, with few
        shadows, `global`, and the median. `pooled` and `shrink` are ours.
    """
    inner, outer = _sides(target, shadow, inside)
    _some(inner, "inside")
    _some(outer, "outside")
    if shrink and int(((inner.size > 0) & (outer.size > 0)).sum()) > 1:
        means, squares = _shrunk((inner, outer), variance)
    else:
        means = torch.stack(_means(inner, outer), -1)
        squares = torch.stack([side.std(variance) for side in (inner, outer)], -1).square()
    logs = -(squares.log() + (_known(target)[:, None] - means).square() / squares) / 2
    return finite(logs[:, 0] - logs[:, 1])


def lira_offline(target: Tensor, shadow: Tensor, inside: Tensor, variance: Variance = "pooled") -> Tensor:
    """log P[N(mean_out, std_out) <= phi]: how far the confidence is above that of models without the record.

    Arguments, variances and special cases as of `lira_online`; `inside` may be False everywhere. Beyond 38 standard
    deviations the logarithm is 0: such records tie.

    Raises:
        ValueError: shapes that do not fit, or no shadow with any record outside.

    Source: Carlini et al. 2022, section V.D.
    """
    inner, outer = _sides(target, shadow, inside)
    _some(outer, "outside")
    away = (_known(target) - _means(inner, outer)[1]) / outer.std(variance)
    return finite(torch.special.log_ndtr(away))


def rmia(
    target_p: Tensor,
    shadow_p: Tensor,
    inside: Tensor,
    population_p: Tensor,
    population_shadow_p: Tensor,
    *,
    offline_a: float | None = None,
) -> Tensor:
    """log(p_t(x) / p(x)), less the median of the same over the population.

    The attack of the source counts the population records z with (p_t(x) / p(x)) / (p_t(z) / p(z)) >= gamma. As one
    population serves all x, the count is a step function of log(p_t(x) / p(x)) that never falls, whatever gamma is: who
    ranks by the logarithm ranks as the count does, and breaks its ties, of which it has many beyond the largest z. The
    population changes no order then; taking its median away makes the scores of several models comparable: above 0
    where the count with gamma = 1 is above one half.

    Args:
        target_p: [n], probability of each record's label by the model that is attacked.
        shadow_p: [m, n], by each shadow; an entry that is not finite is left out.
        inside: [m, n] bool, whether the shadow had the record.
        population_p: [k], of records that neither the shadows nor the federation trained on; k = 0: nothing is taken
            away.
        population_shadow_p: [m, k].
        offline_a: None: p(x) = (mean_in + mean_out) / 2. Else the shadows inside are not looked at, and
            p(x) = ((1 + a) mean_out + 1 - a) / 2, for z as well.

    Returns:
        [n] float64. Records that one side of the shadows lacks: as in `lira_online`, of probabilities. Probabilities
        below 1e-300 count as 1e-300; a target's that is not finite has the lowest score of the others.

    Raises:
        ValueError: shapes that do not fit, no shadow with any record outside, or online none inside.

    Source: Zarifzadeh, Liu, Shokri 2024 (arXiv 2312.03262), eq. (4) to (9). Differs: the logarithm for the count.
    """
    ratios, of_population = _log_ratios(target_p, shadow_p, inside, population_p, population_shadow_p, offline_a)
    known = of_population[of_population.isfinite()]
    return finite(ratios - known.median() if len(known) else ratios)


def rmia_count(
    target_p: Tensor,
    shadow_p: Tensor,
    inside: Tensor,
    population_p: Tensor,
    population_shadow_p: Tensor,
    *,
    offline_a: float | None = None,
    gamma: float = 1.0,
) -> Tensor:
    """The score of the source: the share of the population with (p_t(x) / p(x)) / (p_t(z) / p(z)) >= gamma.

    For comparison: it takes only the values 0, 1/k, ..., 1. Arguments as of `rmia`.

    Raises:
        ValueError: as `rmia`; no population; gamma is not positive.
    """
    if not 0 < gamma < math.inf:
        raise ValueError(f"expected gamma > 0, got gamma={gamma}")
    ratios, of_population = _log_ratios(target_p, shadow_p, inside, population_p, population_shadow_p, offline_a)
    known = of_population[of_population.isfinite()].sort().values
    if not len(known):
        raise ValueError("expected a population of at least one record, got none")
    ratios = finite(ratios)
    return torch.searchsorted(known, ratios - math.log(gamma), right=True).double() / len(known)


def _log_ratios(
    target_p: Tensor,
    shadow_p: Tensor,
    inside: Tensor,
    population_p: Tensor,
    population_shadow_p: Tensor,
    offline_a: float | None,
) -> tuple[Tensor, Tensor]:
    """log(p_t / p) of the records [n] and of the population [k]."""
    inner, outer = _sides(target_p, shadow_p, inside)
    _, aside = _sides(population_p, population_shadow_p, torch.zeros_like(population_shadow_p, dtype=torch.bool))
    _some(outer, "outside")
    mean_in, mean_out = _means(inner, outer)
    if offline_a is None:
        _some(inner, "inside")
        p, p_aside = (mean_in + mean_out) / 2, aside.mean
    else:
        p, p_aside = (((1 + offline_a) * mean + 1 - offline_a) / 2 for mean in (mean_out, aside.mean))
    pairs = ((target_p, p), (population_p, p_aside))
    of_records, of_population = (_log(_known(target)) - _log(reference) for target, reference in pairs)
    return of_records, torch.where(aside.size > 0, of_population, torch.nan)


def _log(p: Tensor) -> Tensor:
    """The logarithm of probabilities, float64."""
    return p.clamp(_LEAST_P, 1.0).log()


def fedmia(own: Tensor, others: Tensor, *, pooled: bool = False) -> Tensor:
    """How far the suspect's statistic of a record is above that of the other clients, summed over the rounds.

    Args:
        own: [rounds, n], of the message of the client whose data are asked about: higher is a sign of a member.
        others: [rounds, clients - 1, n], of the other clients' messages; an entry that is not finite is left out.
        pooled: False: the sum of Phi((own - mean) / std), mean and standard deviation over the other clients, of each
            record and round by itself (`FedMIA`). True: the sum of the quotients themselves, with the variance pooled
            over the records of a round (`z-sum, variance pooled over samples`).

    Returns:
        [n] float64; a round in which a record's own value is not finite, or the others show no spread and it equals
        them, adds the quotient 0.

    Raises:
        ValueError: shapes that do not fit, or fewer than two other clients: they would show no spread.

    Source: Zhu et al. 2025, "FedMIA" (arXiv 2402.06289), with the standard deviation that divides by the number of
        clients. `pooled` is ours.
    """
    if own.ndim != 2 or others.ndim != 3 or others.shape[::2] != own.shape or others.shape[1] < 2:
        raise ValueError(
            "expected own [rounds, n] and others [rounds, clients - 1 >= 2, n], got "
            f"{tuple(own.shape)} and {tuple(others.shape)}"
        )
    usable = others.isfinite()
    count = usable.sum(1).double()
    known = torch.where(usable, others.double(), 0.0)
    mean = known.sum(1) / count.clamp_min(1)
    squares = torch.where(usable, known - mean[:, None], 0.0).square().sum(1)
    if pooled:
        squares, total = squares.sum(1, keepdim=True), count.sum(1, keepdim=True)
        std = (squares / total.clamp_min(1)).sqrt()
    else:
        std = (squares / count.clamp_min(1)).sqrt()
    gap = torch.where((count > 0) & own.isfinite(), own.double() - mean, 0.0)
    # least: a spread that is only rounding; the quotient of 0 is 0 then
    least = torch.finfo(torch.float64).eps * (1 + mean.abs())
    z = gap / torch.maximum(std.expand_as(gap), least)
    return (z if pooled else torch.special.ndtr(z)).sum(0)
