"""The probability of each label count, from the last layer's gradient and auxiliary data of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Binomial
from torch.nn.functional import one_hot

from leakgauge.attacks._labels.last_layer import SURE, LastLayer, noise_of
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

_EXAMPLES = 400  # maximum number of examples that are evaluated
_STAND_INS = 64  # maximum number of examples of other labels that stand in for a label without examples
_RIDGE = 1e-2  # penalty on the square of a label's own direction, in units of an input's mean square entry
_KINDS, _MEMBERS = 8, 4  # most kinds of a label's inputs, and fewest examples of each: certainty spans decades
_BORROWED = 3.0  # weight of the variance that a kind borrows from equally sure kinds of other labels, in examples
_ROUNDING = 1e-7  # rounding of single precision, as a share of one image's largest possible entry
_TAILS = 4.0  # degrees of freedom of the t distribution; normal noise took too many badly fitting entries as proofs
_SWEEPS, _DROPPED = 30, 8  # number of passes over the inputs of a batch, and of first passes that are discarded
_AT_ONCE = 2**22  # maximum number of entries of an intermediate result
_DOUBT = 1e-3  # a probability from one round is kept at least this far from 0 and 1


class _Shown(NamedTuple):
    """A model's outputs for n examples of g labels.

    probability [n, classes]; labels [g], sorted; group [n] int64: index of each example's label; means [g, m]: each
    label's mean input h of the last layer, with 1 for the bias; inside [n, g]: products of each h with the means.
    """

    probability: Tensor
    labels: Tensor
    group: Tensor
    means: Tensor
    inside: Tensor


class _Directions(NamedTuple):
    """usual [m]: its product with the mean h is 1; own [classes, m]: 1 with h of inputs of that label, 0 with others.

    on_usual [n], on_own [n, classes]: the products with the examples' h.
    """

    usual: Tensor
    own: Tensor
    on_usual: Tensor
    on_own: Tensor


class _Kinds(NamedTuple):
    """Kinds of inputs. mean, variance [k, f]: of one's contribution; log_share [k]; of_label [k, labels]: 0 or 1."""

    mean: Tensor
    variance: Tensor
    log_share: Tensor
    of_label: Tensor


class _Sums(NamedTuple):
    """Sums for n batches. value [n, f]; noise [n, f]: noise variance; proven [n, labels]: labels that surely occur."""

    value: Tensor
    noise: Tensor
    proven: Tensor


def label_chances(
    layer: LastLayer, params: Vector, gradients: Tensor, images: Sequence[int], examples: Examples, keys: Sequence[Key]
) -> list[Tensor]:
    """For each gradient, [classes, images[i]]: entry [c, k - 1] is the probability of at least k labels c.

    Args:
        keys: one for each gradient.
    """
    classes = layer.task.classes
    share, shown = expected_share(examples, classes), _shown(layer, params, examples)
    chances = [prior(share, size) for size in images]
    if not all(bool(tensor.isfinite().all()) for tensor in shown):
        return chances
    to, rows = _directions(shown, classes), layer.rows(gradients).double()
    noise = noise_of(rows)
    usable = noise.isfinite()
    rows, noise = torch.where(usable[:, None, None], rows, 0.0), torch.where(usable, noise, 0.0)
    readings = [rows @ to.usual, (rows * to.own).sum(dim=2)]
    squares = [to.usual.square().sum().expand(classes), to.own.square().sum(dim=1)]
    if layer.biased:
        readings.append(rows[..., -1])
        squares.append(torch.ones(classes, dtype=torch.float64))
    value, square = torch.cat(readings, dim=1), torch.cat(squares)
    proven, kinds = _proven(rows, noise, to, layer), _kinds(shown, to, share, layer)
    for size in sorted(set(images)):
        which = [i for i, count in enumerate(images) if count == size and usable[i]]
        sums = _Sums(size * value[which], (size * noise[which, None]).square() * square, proven[which])
        sampled = _counted(kinds, sums, size, len(readings), [keys[i] for i in which])
        for i, chance in zip(which, sampled, strict=True):
            chances[i] = chance
    return chances


def expected_share(auxiliary: Examples, classes: int) -> Tensor:
    """[classes]: expected share of each label; each count is raised by one, as victims may hold absent labels."""
    counts = auxiliary.y.bincount(minlength=classes).double() + 1
    return counts / counts.sum()


def _proven(rows: Tensor, noise: Tensor, to: _Directions, layer: LastLayer) -> Tensor:
    """[n, classes]: labels that certainly occur, because p - e is negative only at an input's own label."""
    proven = torch.zeros(rows.shape[:2], dtype=torch.bool)
    if layer.biased:
        proven = rows[..., -1] < -SURE * noise[:, None]
    if bool((to.on_usual >= 0).all()):
        proven = proven | (rows @ to.usual < -SURE * noise[:, None] * to.usual.norm())
    return proven


def _shown(layer: LastLayer, params: Vector, auxiliary: Examples) -> _Shown:
    """The model's outputs for evenly spaced examples."""
    task = layer.task
    spread = torch.linspace(0, len(auxiliary.y) - 1, min(len(auxiliary.y), _EXAMPLES)).long()
    x = auxiliary.x[spread]
    labels, group = torch.unique(auxiliary.y[spread], return_inverse=True)
    means = torch.stack([layer.mean_input(params, x[group == number]) for number in range(len(labels))])
    probe = params.detach().clone()
    # with the means as the last layer's weights, its outputs are the products
    weight, *bias = task.layout.split(probe)[layer.first : layer.stop]
    weight[: len(means)] = means[:, : weight.shape[1]]
    if bias:
        bias[0][: len(means)] = means[:, -1]
    with torch.no_grad():
        probability = task.outputs(params, x).double().softmax(dim=1)
        inside = task.outputs(probe, x)[:, : len(means)].double()
    return _Shown(probability, labels, group, means.double(), inside)


def _directions(shown: _Shown, classes: int) -> _Directions:
    """The directions of projection; a label without examples gets the usual direction."""
    means, inside, n = shown.means, shown.inside, len(shown.group)
    shares = shown.group.bincount().double() / n
    usual = shares @ means
    tiny = torch.finfo(torch.float64).tiny
    square = usual.square().sum().clamp(min=tiny)
    usual, on_usual = usual / square, inside @ shares / square
    gram, normal = means @ means.T, inside.T @ inside
    ridge = _RIDGE * n * gram.diagonal().mean() / means.shape[1] * gram
    # the means may be equal or zero
    floor = (1e-9 * normal.diagonal().mean() + tiny) * torch.eye(len(means), dtype=torch.float64)
    mix = torch.linalg.solve(normal + ridge + floor, inside.T @ one_hot(shown.group).double())
    own, on_own = usual.repeat(classes, 1), on_usual[:, None].repeat(1, classes)
    own[shown.labels], on_own[:, shown.labels] = mix.T @ means, inside @ mix
    return _Directions(usual, own, on_usual, on_own)


def _kinds(shown: _Shown, to: _Directions, share: Tensor, layer: LastLayer) -> _Kinds:
    """Kinds of each label's inputs, from the surest to the least sure.

    A label without examples borrows inputs of other labels. The more examples a label has, the more kinds.
    """
    n, classes = shown.probability.shape
    counts = torch.zeros(classes, dtype=torch.int64)
    counts[shown.labels] = shown.group.bincount()
    lacking, others = torch.nonzero(counts == 0)[:, 0], torch.linspace(0, n - 1, min(n, _STAND_INS)).long()
    examples = torch.cat([torch.arange(n), others.repeat(len(lacking))])
    y = torch.cat([shown.labels[shown.group], lacking.repeat_interleave(len(others))])
    error = shown.probability[examples] - one_hot(y, classes)
    added = [error * to.on_usual[examples, None], error * to.on_own[examples]] + ([error] if layer.biased else [])
    contribution, unsure = torch.cat(added, dim=1), -error[torch.arange(len(y)), y]

    rows = [torch.nonzero(y == label)[:, 0] for label in range(classes)]
    cuts = [max(1, min(_KINDS, count // _MEMBERS)) for count in counts.tolist()]
    kinds = [kind for each, k in zip(rows, cuts, strict=True) for kind in each[unsure[each].argsort()].tensor_split(k)]
    place = torch.tensor([(2 * i + 1) * _KINDS // (2 * k) for k in cuts for i in range(k)])
    size = torch.tensor([len(kind) for kind in kinds], dtype=contribution.dtype)[:, None]
    mean = torch.stack([contribution[kind].mean(dim=0) for kind in kinds])
    squares = torch.stack([(contribution[kind] - mean[i]).square().sum(dim=0) for i, kind in enumerate(kinds)])
    pooled = squares.new_zeros(_KINDS, squares.shape[1]).index_add_(0, place, squares)
    pooled = pooled / squares.new_zeros(_KINDS, 1).index_add_(0, place, size).clamp(min=1)
    # with one example each, only the spread of all examples is known
    borrowed = torch.where(pooled > 0, pooled, contribution.var(dim=0, correction=0))[place]
    variance = (squares + _BORROWED * borrowed) / (size + _BORROWED) + _ROUNDING**2
    label = torch.arange(classes).repeat_interleave(torch.tensor(cuts))
    members = squares.new_zeros(classes).index_add_(0, label, size[:, 0])
    log_share = (share[label] * size[:, 0] / members[label]).log()
    return _Kinds(mean, variance, log_share, one_hot(label, classes).to(contribution.dtype))


def _counted(kinds: _Kinds, sums: _Sums, images: int, copies: int, keys: Sequence[Key]) -> Tensor:
    """[n, labels, images]: entry [v, c, k - 1] is the probability that label c occurs at least k times in batch v.

    The entries of a sum are treated as independent, and as `copies` readings of the same quantity. Gibbs sampling
    removes one input after another and redraws its kind given the others; it accumulates the probabilities of its
    label.
    """
    size = max(1, _AT_ONCE // kinds.mean.numel())
    draws = [rng.uniform(key, (_SWEEPS, images), dtype=torch.float64) for key in keys]
    chunks = [
        _sampled(kinds, _Sums(*(tensor[start : start + size] for tensor in sums)), images, copies, draws[start:])
        for start in range(0, len(sums.value), size)
    ]
    return torch.cat(chunks) if chunks else sums.value.new_zeros(0, kinds.of_label.shape[1], images)


def _sampled(kinds: _Kinds, sums: _Sums, images: int, copies: int, draws: Sequence[Tensor]) -> Tensor:
    """`_counted` for batches that fit in memory."""
    n, every = len(sums.value), torch.arange(len(sums.value))
    times = torch.arange(1, images + 1)
    proven = sums.proven & (sums.proven.sum(dim=1) <= images)[:, None]
    sums = sums._replace(proven=proven)
    counts = sums.value.new_zeros(n, len(kinds.mean))
    drawn = sums.value.new_zeros(n, images, dtype=torch.int64)
    for i in range(images):
        drawn[:, i] = _weights(kinds, sums, counts, copies, unknown=images - i - 1).argmax(dim=1)
        counts[every, drawn[:, i]] += 1
    chances = sums.value.new_zeros(n, kinds.of_label.shape[1], images)
    uniform = torch.stack(list(draws[:n]))
    # with a single input, nothing depends on earlier draws
    for sweep in range(_SWEEPS if images > 1 else 1):
        for i in range(images):
            counts[every, drawn[:, i]] -= 1
            share = _weights(kinds, sums, counts, copies).softmax(dim=1)
            if sweep >= _DROPPED or images == 1:
                other = (counts @ kinds.of_label).round()[..., None]
                chances += (other >= times).double() + (other == times - 1) * (share @ kinds.of_label)[..., None]
            below = share.cumsum(dim=1) < uniform[:, sweep, i, None] * share.sum(dim=1, keepdim=True)
            drawn[:, i] = below.sum(dim=1).clamp(max=len(kinds.mean) - 1)
            counts[every, drawn[:, i]] += 1
    return chances / (images * (_SWEEPS - _DROPPED) if images > 1 else 1)


def _weights(kinds: _Kinds, sums: _Sums, counts: Tensor, copies: int, unknown: int = 0) -> Tensor:
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
