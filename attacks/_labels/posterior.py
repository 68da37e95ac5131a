"""The count of each label in a batch, given the usual contributions of each label's inputs to the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Binomial
from torch.nn.functional import one_hot

from leakgauge.harness.core import rng
from leakgauge.harness.core.rng import Key

_KINDS, _MEMBERS = 8, 4
"""A label has at most 8 kinds of inputs, each with at least 4 examples, as a model's certainty spans decades."""

_BORROWED = 3.0
"""Weight of the variance that a kind borrows from equally sure kinds of other labels, in numbers of examples."""

_ROUNDING = 1e-7
"""Rounding of single precision, as a share of one image's largest possible entry."""

_TAILS = 4.0
"""Degrees of freedom of the t law; a normal law treated too many badly fitting entries as proofs."""

_SWEEPS, _DROPPED = 30, 8
"""Number of passes over the inputs of a batch, and of first passes that are discarded."""

_AT_ONCE = 2**22
"""Maximum number of entries of an intermediate result."""

_DOUBT = 1e-3
"""A probability from one round is kept at least this far from 0 and 1."""


class Kinds(NamedTuple):
    """Kinds of inputs. mean, variance [k, f]: of one's contribution; log_share [k]; of_label [k, labels]: 0 or 1."""

    mean: Tensor
    variance: Tensor
    log_share: Tensor
    of_label: Tensor


class Sums(NamedTuple):
    """Sums for n batches. value [n, f]; noise [n, f]: noise variance; proven [n, labels]: labels that surely occur."""

    value: Tensor
    noise: Tensor
    proven: Tensor


def kinds_of(added: Tensor, y: Tensor, unsure: Tensor, share: Tensor, counts: Tensor) -> Kinds:
    """Kinds of the inputs of each label, from the surest to the least sure.

    Args:
        added: [n, f], each example's contribution; y: [n], its label, each label at least once; unsure: [n], sort key.
        share: [labels], shares of all inputs.
        counts: [labels], number of examples that really have the label, which sets its number of kinds.
    """
    labels = len(share)
    rows = [torch.nonzero(y == label)[:, 0] for label in range(labels)]
    cuts = [max(1, min(_KINDS, count // _MEMBERS)) for count in counts.tolist()]
    parts = [part for each, k in zip(rows, cuts, strict=True) for part in each[unsure[each].argsort()].tensor_split(k)]
    place = torch.tensor([(2 * i + 1) * _KINDS // (2 * k) for k in cuts for i in range(k)])
    size = torch.tensor([len(part) for part in parts], dtype=added.dtype)[:, None]
    mean = torch.stack([added[part].mean(dim=0) for part in parts])
    squares = torch.stack([(added[part] - mean[i]).square().sum(dim=0) for i, part in enumerate(parts)])
    pooled = added.new_zeros(_KINDS, added.shape[1]).index_add_(0, place, squares)
    pooled = pooled / added.new_zeros(_KINDS, 1).index_add_(0, place, size).clamp(min=1)
    # with one example each, only the spread of all examples is known
    borrowed = torch.where(pooled > 0, pooled, added.var(dim=0, correction=0))[place]
    variance = (squares + _BORROWED * borrowed) / (size + _BORROWED) + _ROUNDING**2
    label = torch.arange(labels).repeat_interleave(torch.tensor(cuts))
    members = added.new_zeros(labels).index_add_(0, label, size[:, 0])
    log_share = (share[label] * size[:, 0] / members[label]).log()
    return Kinds(mean, variance, log_share, one_hot(label, labels).to(added.dtype))


def chances(kinds: Kinds, sums: Sums, images: int, copies: int, keys: Sequence[Key]) -> Tensor:
    """[n, labels, images]: entry [v, c, k - 1] is the probability that label c occurs at least k times in batch v.

    The entries of a sum are treated as independent, and as `copies` readings of the same quantity. Gibbs sampling
    removes one input after another and redraws its kind given the others; it accumulates the probabilities of its
    label.
    """
    size = max(1, _AT_ONCE // kinds.mean.numel())
    draws = [rng.uniform(key, (_SWEEPS, images), dtype=torch.float64) for key in keys]
    parts = [
        _sampled(kinds, Sums(*(part[start : start + size] for part in sums)), images, copies, draws[start:])
        for start in range(0, len(sums.value), size)
    ]
    return torch.cat(parts) if parts else sums.value.new_zeros(0, kinds.of_label.shape[1], images)


def _sampled(kinds: Kinds, sums: Sums, images: int, copies: int, draws: Sequence[Tensor]) -> Tensor:
    """`chances` for batches that fit in memory."""
    n, every = len(sums.value), torch.arange(len(sums.value))
    times = torch.arange(1, images + 1)
    proven = sums.proven & (sums.proven.sum(dim=1) <= images)[:, None]
    sums = sums._replace(proven=proven)
    counts = sums.value.new_zeros(n, len(kinds.mean))
    drawn = sums.value.new_zeros(n, images, dtype=torch.int64)
    for i in range(images):
        drawn[:, i] = _weights(kinds, sums, counts, copies, unknown=images - i - 1).argmax(dim=1)
        counts[every, drawn[:, i]] += 1
    found = sums.value.new_zeros(n, kinds.of_label.shape[1], images)
    uniform = torch.stack(list(draws[:n]))
    # with a single input, nothing depends on earlier draws
    for sweep in range(_SWEEPS if images > 1 else 1):
        for i in range(images):
            counts[every, drawn[:, i]] -= 1
            share = _weights(kinds, sums, counts, copies).softmax(dim=1)
            if sweep >= _DROPPED or images == 1:
                other = (counts @ kinds.of_label).round()[..., None]
                found += (other >= times).double() + (other == times - 1) * (share @ kinds.of_label)[..., None]
            below = share.cumsum(dim=1) < uniform[:, sweep, i, None] * share.sum(dim=1, keepdim=True)
            drawn[:, i] = below.sum(dim=1).clamp(max=len(kinds.mean) - 1)
            counts[every, drawn[:, i]] += 1
    return found / (images * (_SWEEPS - _DROPPED) if images > 1 else 1)


def _weights(kinds: Kinds, sums: Sums, counts: Tensor, copies: int, unknown: int = 0) -> Tensor:
    """[n, k]: log probability, up to a constant, that an input is of kind k, given the others' counts [n, k].

    unknown: number of further inputs, each with the average contribution of an input.
    """
    mean, variance = counts @ kinds.mean, sums.noise + counts @ kinds.variance
    if unknown:
        share = kinds.log_share.softmax(dim=0)
        usual = share @ kinds.mean
        mean = mean + unknown * usual
        variance = variance + unknown * (share @ (kinds.variance + (kinds.mean - usual).square()))
    spread = variance[:, None] + kinds.variance
    off = (sums.value - mean)[:, None] - kinds.mean
    surprise = (_TAILS + 1) * (off.square() / (_TAILS * spread)).log1p() + spread.log()
    weights = kinds.log_share - surprise.sum(dim=2) / (2 * copies)
    lacking = sums.proven & (counts @ kinds.of_label < 0.5)
    barred = lacking.any(dim=1)[:, None] & (lacking.double() @ kinds.of_label.T < 0.5)
    return weights.masked_fill(barred, -torch.inf)


def prior(share: Tensor, images: int) -> Tensor:
    """[labels, images]: entry [c, k - 1] is the probability that c occurs at least k times among `images` inputs."""
    times = torch.arange(1, images + 1, dtype=share.dtype)
    exactly: Tensor = Binomial(images, share[:, None]).log_prob(times).exp()  # type: ignore[no-untyped-call]
    return exactly.flip(1).cumsum(dim=1).flip(1)


def joined(rounds: Sequence[Tensor], before: Tensor) -> Tensor:
    """[labels, images]: log odds from the probabilities of several rounds, each with the prior `before`."""
    odds = [chance.clamp(_DOUBT, 1 - _DOUBT).logit() for chance in rounds]
    return torch.stack(odds).sum(dim=0) - (len(rounds) - 1) * before.clamp(1e-12, 1 - 1e-12).logit()


def most_expected(chance: Tensor) -> Tensor:
    """[images] int64, sorted: the labels with most expected hits; `chance` [labels, images] may be log odds."""
    images = chance.shape[1]
    best = chance.nan_to_num(nan=-torch.inf).flatten().sort(descending=True, stable=True).indices[:images]
    return (best // images).sort().values
