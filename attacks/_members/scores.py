"""Membership scores from the outputs of a model and of its shadow models, for all records at once.

All arithmetic is float64. A higher score indicates a member. Permuting the records permutes the scores.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Variance = Literal["pooled", "per-example", "global"]
"""How to estimate the spread of a record's confidence over the shadows, see `lira_online`."""

_LEAST_STD = 1e-6  # smallest standard deviation of a confidence, in nats, because float32 models resolve nothing finer
_LEAST_P = 1e-300  # smallest probability, because a label with probability 0 still needs a logarithm


def confidence(scores: Tensor, y: Tensor) -> Tensor:
    """phi = z_y - logsumexp_{j != y} z_j, the log odds of the label.

    Args:
        scores: [..., n, classes], outputs of a model before the softmax.
        y: [n] int64.

    Returns:
        [..., n] float64; NaN or infinite where an output is not finite.

    Raises:
        ValueError: a single output, as of a regression.

    Source: Carlini et al. 2022 (arXiv 2112.03570), section IV: log(p / (1 - p)). Computed from the outputs, because p
        rounds to 1.
    """
    if scores.shape[-1] == 1:
        raise ValueError(
            "expected scores of at least 2 classes, got a regression; use membership-loss or loss-trajectory instead"
        )
    wide = scores.double()
    true = y.expand(wide.shape[:-1])[..., None]
    return wide.gather(-1, true)[..., 0] - wide.scatter(-1, true, -torch.inf).logsumexp(-1)


def finite(scores: Tensor) -> Tensor:
    """Scores [n], with each non-finite score set to the lowest finite score, or to 0 without finite scores."""
    usable = scores.isfinite()
    lowest = float(scores[usable].min()) if bool(usable.any()) else 0.0
    return torch.where(usable, scores, lowest)


def or_nan(values: Tensor) -> Tensor:
    """The values in float64, NaN where not finite, because an infinite value would have a finite tail probability."""
    return torch.where(values.isfinite(), values.double(), torch.nan)


class _Side(NamedTuple):
    """Of the shadows with (or without) each record, [n]: number, mean and sum of squared deviations of their values."""

    size: Tensor
    mean: Tensor
    squares: Tensor

    @property
    def overall(self) -> Tensor:
        """Mean over all records and shadows; 0 without values."""
        return (self.size * self.mean).sum() / self.size.sum().clamp_min(1)

    def std(self, variance: Variance) -> Tensor:
        """[n]: standard deviations, at least `_LEAST_STD`."""
        total = self.size.sum()
        around = self.squares.sum() + (self.size * (self.mean - self.overall).square()).sum()
        spread = around / total.clamp_min(1)
        freedom = total - (self.size > 0).sum()
        if variance != "global" and freedom > 0:
            spread = self.squares.sum() / freedom
        spread = spread.expand_as(self.mean)
        if variance == "per-example":
            spread = torch.where(self.size > 1, self.squares / self.size.clamp_min(1), spread)
        return spread.sqrt().clamp_min(_LEAST_STD)


def _side(values: Tensor, taken: Tensor) -> _Side:
    """Statistics of the taken entries of values [m, n]; non-finite entries are left out."""
    usable = taken & values.isfinite()
    count = usable.sum(0).double()
    known = torch.where(usable, values.double(), 0.0)
    mean = known.sum(0) / count.clamp_min(1)
    return _Side(count, mean, torch.where(usable, known - mean, 0.0).square().sum(0))


def _means(inner: _Side, outer: _Side) -> tuple[Tensor, Tensor]:
    """The means [n] of both sides; a record missing on one side gets the other side's mean plus the mean gap."""
    both = (inner.size > 0) & (outer.size > 0)
    gap = (inner.mean - outer.mean)[both].mean() if bool(both.any()) else inner.overall - outer.overall
    filled = []
    for side, other, shift in ((inner, outer, gap), (outer, inner, -gap)):
        instead = torch.where(other.size > 0, other.mean + shift, side.overall)
        filled.append(torch.where(side.size > 0, side.mean, instead))
    return filled[0], filled[1]


def _shrunk(sides: tuple[_Side, _Side], variance: Variance) -> tuple[Tensor, Tensor]:
    """[n, 2]: predictive means and variances of one more value per side, if a record's two means are jointly normal.

    The moments of this joint prior come from the records present on both sides, corrected for the shadows' sampling
    noise.
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
    # (prior^-1 + weight)^-1; the prior is singular if all gaps are equal
    spread = prior @ torch.linalg.inv(torch.eye(2, dtype=prior.dtype) + weight[..., None] * prior)
    drawn = center + (spread @ (weight * (mean - center))[..., None])[..., 0]
    return drawn, noise + spread.diagonal(dim1=-2, dim2=-1).clamp_min(0.0)


def _some(side: _Side, where: str) -> None:
    if not bool(side.size.any()):
        raise ValueError(f"expected a finite value of a shadow for a record {where} its training data, got none")


def lira_online(
    target: Tensor, shadow: Tensor, inside: Tensor, variance: Variance = "pooled", *, shrink: bool = False
) -> Tensor:
    """log N(phi; mean_in, std_in) - log N(phi; mean_out, std_out), from shadows with and without each record.

    Args:
        target: [n], phi of each record under the attacked model.
        shadow: [m, n], phi under each shadow; non-finite entries are left out.
        inside: [m, n] bool, whether the shadow trained on the record.
        variance: of each side. `pooled`: the sum over x and i of (phi_i(x) - mean(x))^2 / (#values - #records with
            values), for one record the usual ddof = 1. `per-example`: each record's own sum of squares over its number
            of shadows. `global`: all values of the side around their common mean, over their number, so that it
            includes the differences between records.
        shrink: whether to give the two means of a record a normal prior with the moments of all records (empirical
            Bayes); N is then the predictive distribution. With few shadows, this captures that a record that is hard
            for models without it gains most from membership. It has no effect if fewer than two records have shadows on
            both sides.

    Returns:
        [n] float64.

    | case | value used |
    |---|---|
    | no shadow has a record on one side | the mean of the other side, plus the mean gap over records with both sides |
    | | (if there are none: plus the gap between the means of all values) |
    | no shadow shows a record | the mean of all values of the side |
    | `per-example`, one shadow on a side | the pooled variance |
    | `pooled`, no record with two shadows on a side | the global variance |
    | a standard deviation below 1e-6 | 1e-6 |
    | phi of the target is not finite | the lowest finite score |

    Raises:
        ValueError: no shadow has any record inside, or outside.

    Source: Carlini et al. 2022 (arXiv 2112.03570), Algorithm 1. Their public code uses `per-example`, or `global` with
        few shadows, and medians. `pooled` and `shrink` are ours.
    """
    inner, outer = _side(shadow, inside), _side(shadow, ~inside)
    _some(inner, "inside")
    _some(outer, "outside")
    if shrink and int(((inner.size > 0) & (outer.size > 0)).sum()) > 1:
        means, squares = _shrunk((inner, outer), variance)
    else:
        means = torch.stack(_means(inner, outer), -1)
        squares = torch.stack([side.std(variance) for side in (inner, outer)], -1).square()
    logs = -(squares.log() + (or_nan(target)[:, None] - means).square() / squares) / 2
    return finite(logs[:, 0] - logs[:, 1])


def lira_offline(target: Tensor, shadow: Tensor, inside: Tensor, variance: Variance = "pooled") -> Tensor:
    """log P[N(mean_out, std_out) <= phi]: how far the confidence exceeds that of models without the record.

    Arguments, variances and special cases are those of `lira_online`; `inside` may be False everywhere. Beyond 38
    standard deviations, the logarithm is 0, and such records tie.

    Raises:
        ValueError: no shadow has any record outside.

    Source: Carlini et al. 2022, section V.D.
    """
    inner, outer = _side(shadow, inside), _side(shadow, ~inside)
    _some(outer, "outside")
    away = (or_nan(target) - _means(inner, outer)[1]) / outer.std(variance)
    return finite(torch.special.log_ndtr(away))


def rmia(
    target_p: Tensor,
    shadow_p: Tensor,
    inside: Tensor,
    population_p: Tensor,
    population_shadow_p: Tensor,
    *,
    offline_a: float | None = None,
    weight: float = 0.5,
) -> Tensor:
    """log(p_t(x) / p(x)), minus the median of the same quantity over the population.

    The source counts the population records z with (p_t(x) / p(x)) / (p_t(z) / p(z)) >= gamma. All x share one
    population, so for every gamma the count is a non-decreasing step function of log(p_t(x) / p(x)). The logarithm
    ranks records as the count does and breaks the count's many ties above the largest z. Subtracting the median does
    not change the ranking. It makes the scores of several models comparable: a positive score means that the count with
    gamma = 1 exceeds one half.

    Args:
        target_p: [n], probability of each record's label under the attacked model.
        shadow_p: [m, n], the same under each shadow; non-finite entries are left out.
        inside: [m, n] bool, whether the shadow trained on the record.
        population_p: [k], like `target_p`, for records that neither the shadows nor the federation trained on; with k =
            0, nothing is subtracted.
        population_shadow_p: [m, k].
        offline_a: None: p(x) = weight mean_in + (1 - weight) mean_out. Otherwise the shadows inside are ignored, and
            p(x) = ((1 + a) mean_out + 1 - a) / 2, also for z.
        weight: 1/2 in the source.

    Returns:
        [n] float64. Records missing on one side are treated as in `lira_online`, with probabilities. Probabilities
        below 1e-300 count as 1e-300; a record with a non-finite `target_p` gets the lowest finite score.

    Raises:
        ValueError: no shadow has any record outside (online: or inside).

    Source: Zarifzadeh, Liu, Shokri 2024 (arXiv 2312.03262), eq. (4) to (9). Differs: the logarithm, not the count.
    """
    inner, outer = _side(shadow_p, inside), _side(shadow_p, ~inside)
    aside = _side(population_shadow_p, torch.ones_like(population_shadow_p, dtype=torch.bool))
    _some(outer, "outside")
    mean_in, mean_out = _means(inner, outer)
    if offline_a is None:
        _some(inner, "inside")
        p, p_aside = weight * mean_in + (1 - weight) * mean_out, aside.mean
    else:
        p, p_aside = (((1 + offline_a) * mean + 1 - offline_a) / 2 for mean in (mean_out, aside.mean))
    ratios, of_population = (
        _log(or_nan(target)) - _log(reference) for target, reference in ((target_p, p), (population_p, p_aside))
    )
    known = of_population[(aside.size > 0) & of_population.isfinite()]
    return finite(ratios - known.median() if len(known) else ratios)


def _log(p: Tensor) -> Tensor:
    return p.clamp(_LEAST_P, 1.0).log()


def fedmia(own: Tensor, others: Tensor, *, pooled: bool = False) -> Tensor:
    """How far the suspect's statistic of a record exceeds that of the other clients, summed over the rounds.

    Args:
        own: [rounds, n], statistic of the suspect's message; a higher value indicates a member.
        others: [rounds, clients - 1, n], statistics of two or more other clients' messages; non-finite entries are left
            out.
        pooled: False: the sum of Phi((own - mean) / std), with mean and standard deviation over the other clients for
            each record and round (`FedMIA`). True: the sum of the quotients themselves, with the variance pooled over
            the records of a round.

    Returns:
        [n] float64. A round adds the quotient 0 if a record's own value is not finite, or if the other clients show no
        spread and the own value equals their mean.

    Source: Zhu et al. 2025, "FedMIA" (arXiv 2402.06289), with the standard deviation that divides by the number of
        clients. `pooled` is ours.
    """
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
    # below `least`, a spread is only rounding
    least = torch.finfo(torch.float64).eps * (1 + mean.abs())
    z = gap / torch.maximum(std.expand_as(gap), least)
    return (z if pooled else torch.special.ndtr(z)).sum(0)
