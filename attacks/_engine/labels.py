"""Inference of the labels behind a gradient from its last layer, and of the probability of each label count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributions import Binomial
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.last_layer import LastLayer, last_layer
from leakgauge.attacks._engine.objective import Kind, bent, received_gradients
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Attack, Examples, Observation, ObservedRound, Reconstruction, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.losses import SLOPES
from leakgauge.harness.learn.tasks import ModelTask

LabelSource = Literal["inferred", "given"]

_DUMMIES = 64  # number of inputs behind the mean activation, a direction of projection that need not be exact
_CLEAR = 0.1  # noise of an entry, as a share of one image's contribution, up to which only the bias is used
_EXAMPLES = 400  # maximum number of examples that are evaluated
_STAND_INS = 64  # maximum number of examples of other labels that stand in for a label without examples
_RIDGE = 1e-2  # penalty on the square of a label's own direction, in units of an input's mean square entry
_KINDS, _MEMBERS = 8, 4  # most kinds of a label's inputs, and fewest examples of each: certainty spans decades
_BORROWED = 3.0  # weight of the variance that a kind borrows from equally sure kinds of other labels, in examples
_ROUNDING = 1e-7  # rounding of single precision, as a share of one image's largest possible entry
_TAILS = 4.0  # degrees of freedom of the t distribution; normal noise took too many badly fitting entries as proofs
_SWEEPS, _DROPPED = 30, 8  # number of passes over the inputs of a batch, and of first passes that are discarded
_AT_ONCE = 2**22  # maximum number of entries of an intermediate result
_EXACT = 1e-4  # noise of a gradient, relative to the label's row, up to which it counts as exact
_SURE = 4.0  # an entry counts as negative if it is at least this many standard deviations below zero
_DOUBT = 1e-3  # a probability from one round is kept at least this far from 0 and 1


class ByLabels(Attack):
    """The common part of reconstructions that need labels and perhaps a prior; labels None: they are searched, too."""

    kind: ClassVar[str] = "reconstruction"
    labels: LabelSource | None = None
    objective: Kind = "l2"
    prior: str = "none"
    imitates: ClassVar[bool] = False  # whether it learns from messages of auxiliary data

    @property
    def aware(self) -> bool:
        """True if it uses the defense's likelihood, or learns from messages of the defense."""
        return self.imitates or self.objective == "likelihood"

    @property
    def needs(self) -> frozenset[str]:
        """Messages, the round's model, the labels if given, and auxiliary data to infer them or to fit the prior."""
        of_labels = {None: set[str](), "given": {"labels"}, "inferred": {"auxiliary"}}[self.labels]
        of_prior = set[str]() if self.prior in ("none", "tv") and not self.imitates else {"auxiliary"}
        return frozenset({"messages", "models"}) | of_labels | of_prior


def check_source(source: str) -> None:
    """Refuse an unknown source of labels."""
    if source not in get_args(LabelSource):
        raise ValueError(f"expected labels 'inferred' or 'given', got {source!r}")


def by_slopes(attack: Any, observation: Observation, key: Key) -> Reconstruction | None:
    """What a reconstruction with inferred labels finds behind single records of a regression; None: it is none.

    The last bias's gradient is the loss's slopes in the scores, so a candidate needs no label. Its numbers follow from
    its scores and the slopes.

    Raises:
        ValueError: there are several records or rounds, or the last layer has no bias.
    """
    task = observation.task
    if not isinstance(task, ModelTask) or attack.labels != "inferred" or not task.numbers or task.bounded:
        return None
    round_, layer = observation.observed_rounds[0], last_layer(task)
    many = len(observation.observed_rounds) > 1 or any(message.images > 1 for message in round_.messages)
    if many or not layer.biased:
        text = "a message of one record, in one round, to a layer with a bias"
        raise ValueError(f"expected {text} to infer the numbers of a regression; give labels, or use dlg")
    slopes = layer.rows(received_gradients(observation, numbers=True))[..., -1]
    known = tuple(slopes if task.classes == 1 else slopes[:, None])
    told = replace(task, model=replace(task.model, loss=SLOPES))
    found: Reconstruction = replace(attack, labels="given").run(replace(observation, task=told, labels=known), key)
    guesses = []
    for guess, slope in zip(found.guesses, slopes, strict=True):
        scores = task.outputs(round_.model.params, guess.x)
        y = task.link(scores) - slope / task.slope if task.linked else scores
        guesses.append(guess._replace(y=y[:, 0] if task.classes == 1 else y))
    return found._replace(guesses=tuple(guesses))


def labels_of(observation: Observation, gradients: Tensor, source: LabelSource, key: Key) -> tuple[Tensor, ...]:
    """[b] labels of each victim, granted or restored from the gradients [n, d] that the messages reveal."""
    if source == "given":
        return _granted(observation)
    if observation.task.numbers:
        return _signs(observation, gradients)
    return tuple(map(most_expected, _of_round(observation, observation.observed_rounds[0], gradients, key)))


def labels_over_rounds(observation: Observation, source: LabelSource, key: Key) -> tuple[Tensor, ...]:
    """Same as `labels_of`, from all observed rounds, whose evidence is added up as if they were independent."""
    if source == "given":
        return _granted(observation)
    if observation.task.numbers:
        return _signs(observation, received_gradients(observation))
    rounds = [
        _of_round(observation, observed, received_gradients(observation, observed), key.child(number))
        for number, observed in enumerate(observation.observed_rounds)
    ]
    if len(rounds) == 1:
        return tuple(map(most_expected, rounds[0]))
    share = torch.full((observation.task.classes,), 1 / observation.task.classes, dtype=torch.float64)
    if observation.auxiliary is not None and len(observation.auxiliary.y):
        share = expected_share(observation.auxiliary, observation.task.classes)
    victims = zip(*rounds, strict=True)
    return tuple(most_expected(joined(each, prior(share, each[0].shape[1]))) for each in victims)


def _of_round(observation: Observation, observed: ObservedRound, gradients: Tensor, key: Key) -> list[Tensor]:
    images = [message.images for message in observed.messages]
    numbers = [message.sender.number for message in observed.messages]
    # Adam leaves little but the signs, which single records need no data for
    known = None if bent(observation, observed) else observation.auxiliary
    return _chances(observation.task, observed.model.params, gradients, images, key, known, numbers)


def _signs(observation: Observation, gradients: Tensor) -> tuple[Tensor, ...]:
    """The yes or no labels of single records: with sigmoids, an entry of the last bias is negative where it is yes."""
    task = observation.task
    if any(message.images > 1 for message in observation.observed_rounds[0].messages):
        raise ValueError("labels of several yes or no numbers are inferred from messages of one record only; give them")
    layer = last_layer(task)
    rows = layer.rows(gradients)
    shown = rows[..., -1] if layer.biased else rows.sum(2)
    return tuple((shown < 0).long()) if task.classes == 1 else tuple((shown < 0).to(gradients.dtype)[:, None])


def _granted(observation: Observation) -> tuple[Tensor, ...]:
    assert observation.labels is not None
    for labels in () if observation.task.numbers else observation.labels:
        wrong = labels[(labels < 0) | (labels >= observation.task.classes)]
        if len(wrong):
            raise ValueError(f"expected labels in 0 to {observation.task.classes - 1}, got {int(wrong[0])}")
    return observation.labels


def apportion(counts: Tensor, size: int) -> Tensor:
    """[size] labels by largest remainder, from fractional counts [classes] that sum to `size`."""
    whole = counts.floor()
    left = size - int(whole.sum())
    whole[(counts - whole).sort(descending=True, stable=True).indices[:left]] += 1
    return torch.arange(len(counts)).repeat_interleave(whole.long())


def restore(
    task: Task, params: Vector, gradients: Tensor, images: Sequence[int], key: Key, auxiliary: Examples | None = None
) -> tuple[Tensor, ...]:
    """Restore the labels behind each gradient.

    Row i of the last layer's gradient is the mean over the inputs of (p_i - [y = i]) h, with the layer's input h (1 for
    the bias) and the softmax p; another loss has a factor and another p (`Task.link`). A negative entry of the bias, or
    of a row's projection on the mean h, proves a label unless noise explains it. The noise is estimated from the
    gradient: without noise its rows sum to zero.

    With auxiliary data, auxiliary inputs at these parameters show the contribution of each label's inputs to three
    readings: the bias, the projections of the rows on the mean h, and the projection of each row on a direction that
    separates its own inputs from others. These readings, the noise and the label frequencies give the probability of
    each count. The result maximizes the expected number of correct labels. For pure
    noise, the result is the most frequent labels. Without auxiliary data: see `_explained`.

    Args:
        gradients: [n, d] of the mean loss over `images[i]` inputs each.
        images: number of labels behind each gradient.
        key: draws dummy inputs, or the samples behind the probabilities.
        auxiliary: data of the same kind. All its labels are counted, and at most 400 evenly spaced examples are
            evaluated. None or empty: not used.

    Returns:
        [images[i]] int64 each, sorted.

    Guarantees:
        Every label is in range, for any gradient.
        One input and no noise: the label is right with a cross-entropy and a bias, or more than two classes; otherwise,
            if h.mean(h) > 0, as behind a sigmoid or ReLU.
        Several inputs and no noise: a label with a negative bias entry, beyond rounding, is returned.

    Cannot: count all labels behind a trained model, where an input that is predicted correctly and with certainty
        leaves almost no trace; benefit from labels that depend on each other, because it assumes independent labels
        (`docs/attacks.md` has the shares of right labels); count labels in a scaled gradient, for example after a clip;
        follow the model through the steps of an update; or undo momentum.

    Raises:
        ValueError: the last layer is not dense with one row per class, or the loss is neither a cross-entropy nor
            squared, and there are several inputs.

    Source: Zhao et al. 2020 (iDLG) for one input; Wainakh et al. 2022 (LLG) for the signs of rows and the use of
        auxiliary data; Ma et al. 2023 (iLRG) for p from the rows, without such data. Differs: uses projections of the
        rows instead of their sums; integer counts by their probability instead of a rounded solution; an estimate of
        the noise.
    """
    chances = _chances(task, params, gradients, images, key, auxiliary, range(len(images)))
    return tuple(map(most_expected, chances))


def _chances(
    task: Task,
    params: Vector,
    gradients: Tensor,
    images: Sequence[int],
    key: Key,
    auxiliary: Examples | None,
    numbers: Sequence[int],
) -> list[Tensor]:
    """For each gradient, [classes, images[i]]: entry [c, k - 1] is the probability of at least k labels c.

    The number of a gradient sets its draws.
    """
    layer = last_layer(task)
    if not task.linked and max(images, default=0) > 1:
        raise ValueError("with this loss, labels are inferred from messages of one record only: give them")
    rows = layer.rows(gradients)
    sure = _single(layer, rows, noise_of(task, rows)) & (torch.tensor(images) == 1)[:, None]
    chances, rest = list(sure[:, :, None].double()), (~sure.any(1)).nonzero()[:, 0].tolist()
    alike, left = bool((task.weights(torch.arange(task.classes)) == 1).all()), [images[i] for i in rest]
    if not rest:
        return chances
    if auxiliary is not None and len(auxiliary.y) and task.linked and alike:
        keys = [key.child("draws", numbers[i]) for i in rest]
        found = label_chances(layer, params, gradients[rest], left, auxiliary, keys)
    else:
        counts = _explained(layer, params, gradients[rest], left, key)
        found = [(n[:, None] >= torch.arange(1, size + 1)).double() for n, size in zip(counts, left, strict=True)]
    for i, chance in zip(rest, found, strict=True):
        chances[i] = chance
    return chances


def _explained(layer: LastLayer, params: Vector, gradients: Tensor, images: Sequence[int], key: Key) -> Tensor:
    """[n, classes] int64 counts without auxiliary data.

    An input of class i adds p - e_i to `images` times the bias gradient; the counts must explain this sum. For a proven
    label i, row i divided by bias entry i is about the h of its inputs, which gives their p. For other labels, p comes
    from dummy inputs. Proven labels are taken first, then greedily the labels that explain most. If noise could hide a
    label, the projections of the rows replace the bias, and no label is proven.
    """
    task, x = layer.task, rng.uniform(key, (_DUMMIES, *layer.task.input_shape), dtype=params.dtype)
    activation, rows, sizes = layer.mean_input(params, x), layer.rows(gradients), torch.tensor(images)
    projection = rows @ (activation / activation.square().sum())
    # for one input, the sign of p - [y = i] decides; subtracting the mean p would only blur it
    single = one_hot(projection.argmin(dim=1), task.classes)
    if not task.linked:
        return single
    with torch.no_grad():
        usual = task.link(task.outputs(params, x)).mean(dim=0)
    score, proven, p = projection, torch.zeros_like(projection, dtype=torch.bool), usual.expand(*projection.shape, -1)
    if layer.biased:
        bias, noise = rows[..., -1], noise_of(task, rows)
        clear = (sizes * noise <= _CLEAR)[:, None]
        score, proven = torch.where(clear, bias, projection), clear & task.bounded & (bias < -_SURE * noise[:, None])
        h = rows / torch.where(proven, bias, 1.0)[..., None]
        p = torch.where(proven[..., None], task.link(h @ layer.rows(params[None])[0].T), p)
    added = task.slope * (p - torch.eye(task.classes, dtype=score.dtype))
    weights = task.weights(torch.arange(task.classes)).to(score)
    if bool((weights != 1).any()):  # sum_i w_i (added_i - score) = 0
        added, score = weights[:, None] * (added - score[:, None]), torch.zeros_like(score)
    return torch.where(sizes[:, None] > 1, _greedy(score, added, proven, sizes), single)


def _greedy(score: Tensor, added: Tensor, proven: Tensor, images: Tensor) -> Tensor:
    """[n, classes] int64: the counts that explain images [n] times `score` [n, classes] best.

    Args:
        added: [n, classes, classes], what an input of each class adds; proven: [n, classes], classes that occur.
    """
    fits = proven.sum(dim=1) <= images
    counts = (proven & fits[:, None]).long()
    left = images[:, None] * score - (counts[:, :, None] * added).sum(dim=1)
    every = torch.arange(len(score))
    for _ in range(int(images.max())):
        missing = (counts.sum(dim=1) < images).long()
        label = (left[:, None] - added).square().sum(dim=2).argmin(dim=1)
        left = left - missing[:, None] * added[every, label]
        counts[every, label] += missing
    return counts


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
    noise = noise_of(layer.task, rows)
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
    if not layer.task.bounded:
        return proven
    if layer.biased:
        proven = rows[..., -1] < -_SURE * noise[:, None]
    if bool((to.on_usual >= 0).all()):
        proven = proven | (rows @ to.usual < -_SURE * noise[:, None] * to.usual.norm())
    return proven


def _single(layer: LastLayer, rows: Tensor, noise: Tensor) -> Tensor:
    """[n, classes]: the label behind each gradient [n, classes, m] of a single input, if there is hardly any noise [n].

    With softmax, the sizes of the rows of other labels sum to the size of the label's row, whatever the sign of h.
    """
    found, sizes = torch.zeros(rows.shape[:2], dtype=torch.bool), rows.norm(dim=2)
    exact = (noise * math.sqrt(rows.shape[2]) < _EXACT * sizes.amax(1)) & layer.task.balanced
    if rows.shape[1] > 2:
        largest = sizes.topk(2, dim=1).values
        clear = largest[:, 0] - largest[:, 1] > 2 * _SURE * noise
        found[torch.arange(len(rows)), sizes.argmax(1)] = exact & clear
    if not layer.biased:
        return found
    bias = rows[..., -1]
    shown = (bias == bias.amin(1, keepdim=True)) & (bias < -_SURE * noise[:, None]) & exact[:, None]
    return torch.where(shown.any(1, keepdim=True), shown, found)


def _shown(layer: LastLayer, params: Vector, auxiliary: Examples) -> _Shown:
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
        probability = task.link(task.outputs(params, x).double())
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
    error = layer.task.slope * (shown.probability[examples] - one_hot(y, classes))
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


def noise_of(task: Task, rows: Tensor) -> Tensor:
    """[n]: standard deviation of the noise in an entry; without noise, the rows of a cross-entropy's sum to zero.

    With another loss, whose rows tell nothing of the noise, it counts as 0.
    """
    if not task.balanced:
        return rows.new_zeros(len(rows))
    return (rows.sum(dim=1).square().mean(dim=1) / rows.shape[1]).sqrt()
