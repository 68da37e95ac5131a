"""Scores an attack: compares its guesses with the truth, which no attack sees."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy import special
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakgauge.harness.audit.attacked import LEVEL, Promised, Proved, shown_by_identification, shown_by_membership
from leakgauge.harness.audit.limit import Limit
from leakgauge.harness.core import rng, stats
from leakgauge.harness.core.contract import Answer, Candidates, Guess, Membership, Named, Traced
from leakgauge.harness.core.form import PICTURE, Form, form_of, numbers_of
from leakgauge.harness.core.metrics import RECOGNIZABLE
from leakgauge.harness.core.result import Estimate, Pictures
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.table import Column, columns_right
from leakgauge.harness.federation.observe import Truth

_LEAST = 1e-6  # in a ratio of MSEs, a smaller MSE counts as this one: smaller differences are invisible

NATS = 1e3
"""Largest log likelihood ratio that is counted: without noise, ratios have no bound."""

_TURNS, _ORDERS = 9999, Key(0).child("orders")  # random orders of the clients in a permutation test

_NEVER = "no number of messages is foreseen to name the record"

_FAR = 1e300  # stands for infinity where scores are compared


class _Scores(NamedTuple):
    """One victim's guess in the order of the truth, and its scores [b] by name; `right` is 1 for a correct label."""

    guess: Tensor
    each: dict[str, Numbers]


def match(truth: Tensor, guess: Tensor, form: Form | None = None) -> Tensor:
    """Match guesses to true inputs, because a batch has no order.

    Args:
        truth: [b, ...].
        guess: [b, ...], finite.
        form: of the inputs; None: the usual one of their shape.

    Returns:
        [b] int64, a permutation: guess[permutation] is in the order of the truth.

    Guarantees:
        No other permutation has a lower total cost (`Form.costs`).
        The scores of a batch do not depend on the order of the guesses.
    """
    cost = (form or form_of(truth.shape[1:])).costs(truth, guess)
    return torch.from_numpy(linear_sum_assignment(cost.numpy())[1].astype(np.int64))


def identified(truth: Tensor, guess: Tensor, candidate_set: Tensor, form: Form | None = None) -> Numbers:
    """[b], 1 if a guess is nearer to its truth (`Form.costs`) than to every other input of its candidate set, else 0.

    A guess that does not depend on the truth is right with probability at most 1 / (k + 1), if truth and candidate set
    are drawn alike. Inputs of the candidate set that equal the truth are left out.

    Args:
        truth, guess: [b, ...]. candidate_set: [b, k, ...].
        form: as in `match`.
    """
    form, hits = form or form_of(truth.shape[1:]), list[bool]()
    guess = form.valid(guess)
    for x, found, others in zip(truth, guess, candidate_set, strict=True):
        costs = form.costs(torch.cat([x[None], others]), found[None])[:, 0]
        equal = (others.cpu() == x.cpu()).flatten(1).all(1)
        hits.append(bool((costs[0] < costs[1:].masked_fill(equal, math.inf)).all()))
    return np.array(hits, np.float64)


def score_reconstruction(
    truth_x: Sequence[Tensor],
    truth_y: Sequence[Tensor],
    guesses: Sequence[Guess],
    candidate_sets: Iterable[Tensor] | None = None,
    form: Form | None = None,
) -> tuple[tuple[Estimate, ...], Pictures | None]:
    """Score one guess per victim.

    A victim failed if its guess has a `failure` or is not finite. A failed victim counts in `failed`, has no SSIM, MSE,
    PSNR and labels (None in `values`; every note states how many), and is not identified, recognized or a success.

    Args:
        truth_x: [b, *input_shape] of each victim; b may differ.
        truth_y: [b] int64 of each victim, or numbers of a regression, for which there is no `label_accuracy`.
        guesses: in the order of the victims.
        candidate_sets: [b, k, ...] of each victim: k other inputs for each of its own. None: no `identification`.
        form: of the inputs; None: the usual one of their shape.

    Returns:
        The form's scores, such as `ssim`, `mse` (the median, because one diverged image would dominate the mean) and
        `psnr` of images, `label_accuracy` (labels in common, in any order), `identification` (the original is the
        nearest of its candidate set), for images `recognized` (identified, with SSIM >= 0.5), `success` (of images: MSE
        < 1e-3) and `failed`. For a table, first `columns` (the share of a record's columns that are right) and
        `column/NAME` (for each column, the share of records). `values` follow the order of the
        victims, then of the images in a batch; intervals are over batches (`stats.over_batches`). Also the pictures, or
        the tokens, if all batches have the same size; a failed victim's are gray, or blank.

    Raises:
        ValueError: not one guess per victim, no victim, or a guess of another shape than the truth.
    """
    if not len(truth_x) == len(truth_y) == len(guesses) > 0:
        raise ValueError(
            f"expected one guess a victim, got {len(guesses)} guesses, {len(truth_x)} inputs and {len(truth_y)} labels"
        )
    asked: Iterable[Tensor | None] = itertools.repeat(None, len(guesses)) if candidate_sets is None else candidate_sets
    form = form or form_of(truth_x[0].shape[1:])
    scores = [_judge(*victim, form) for victim in zip(truth_x, truth_y, guesses, asked, strict=True)]
    sizes = [len(x) for x in truth_x]
    failed = scores.count(None)
    notes = [f"{failed} of {len(guesses)} victims failed"] if failed else []
    note = "; ".join(notes)

    right = _spread(scores, sizes, "right")
    known = [value for value in right if value is not None]
    numbers = not all(map(_classifies, truth_y))
    of_labels = (
        [] if numbers else [stats.proportion("label_accuracy", round(sum(known)), len(known), values=right, note=note)]
    )
    of_failed = stats.proportion("failed", failed, len(guesses), values=[float(score is None) for score in scores])
    near = [] if candidate_sets is None else [value == 1 for value in _spread(scores, sizes, "identified")]
    of_lineup = [_share("identification", near, notes)] if near else []
    among = min((int(score.each["among"].min()) for score in scores if score and "among" in score.each), default=1)
    estimates = [
        (stats.median if name == "mse" else stats.of_items)(name, _spread(scores, sizes, name), note=note)
        for name in _scored(form, truth_x[0])
    ]
    estimates += [*of_labels, *of_lineup]
    if estimates[0].name == "ssim":
        alike = [value is not None and value >= RECOGNIZABLE for value in estimates[0].values]
        estimates.append(_share("recognized", list(map(all, zip(alike, near, strict=True))) if near else alike, notes))
    if len(estimates[0].values) and form.axes != 1:
        estimates.append(_share("success", [value == 1 for value in _spread(scores, sizes, "success")], notes))
    every = *_of_columns(truth_x, scores, form.columns, note), *estimates, of_failed
    found = (stats.over_batches(estimate, sizes) for estimate in every)
    guessed = (stats.against(one, 1 / among) if one.name == "identification" else one for one in found)
    return tuple(guessed), _pictures(truth_x, scores, form)


def _of_columns(
    truth_x: Sequence[Tensor], scores: Sequence[_Scores | None], columns: Sequence[Column], note: str
) -> list[Estimate]:
    """The share of right columns, and of right records for each column; a failed victim's columns count as wrong."""
    if not columns:
        return []
    each_right = [
        torch.zeros(len(x), len(columns)) if score is None else columns_right(x.cpu(), score.guess, columns).double()
        for x, score in zip(truth_x, scores, strict=True)
    ]
    right = torch.cat(each_right)
    each = [
        stats.proportion(f"column/{column.name}", int(hits.sum()), len(hits), values=hits.tolist(), note=note)
        for column, hits in zip(columns, right.T, strict=True)
    ]
    return [stats.mean("columns", right.mean(1).tolist(), note=note), *each]


def score_limits(
    truth_x: Sequence[Tensor], guesses: Sequence[Guess], limits: Sequence[Limit] | str, proved: Proved | None = None
) -> tuple[Estimate, ...]:
    """The limit of any attack, and how near these guesses are to it.

    Args:
        truth_x, guesses: as for `score_reconstruction`.
        limits: one per victim, or the reason why there is none.
        proved: the defense's proved bound on the identification by any attack.

    Returns:
        `limit`: the expected MSE of the best linear estimate of each image; `average_limit`: the same over all images
        of the attacker's distribution; `efficiency`: `limit` over the MSE of each guess, without failed victims; and
        `identification_bound`, which is computed, not estimated.
    """
    bound = () if proved is None else (Estimate("identification_bound", proved.share, None, None, 0, proved.words),)
    if isinstance(limits, str):
        return (Estimate("limit", None, None, None, 0, "mean, Student t", higher_leaks=False, note=limits), *bound)
    sizes = [len(x) for x in truth_x]
    if limits and not limits[0].basis.numel():
        wrong = stats.mean("limit_wrong", np.concatenate([limit.error for limit in limits]).tolist())
        return stats.over_batches(wrong, sizes), *bound
    scores = [_judge(x, guess.y, guess, None, form_of(x.shape[1:])) for x, guess in zip(truth_x, guesses, strict=True)]
    for score, limit, x in zip(scores, limits, truth_x, strict=True):
        if score is not None:  # the limit's error over the guess's error
            errors = limit.errors_of(x, form_of(x.shape[1:]).valid(score.guess))
            score.each["efficiency"] = np.maximum(limit.error, _LEAST) / np.maximum(errors, _LEAST)
    note = limits[0].caveat
    each = (
        stats.mean("limit", np.concatenate([limit.error for limit in limits]).tolist(), note=note),
        stats.mean("average_limit", np.concatenate([limit.average for limit in limits]).tolist(), note=note),
        stats.mean("efficiency", _spread(scores, sizes, "efficiency"), note=note),
    )
    return *(stats.over_batches(estimate, sizes) for estimate in each), *bound


def score_promise(answer: Answer, truth: Truth, estimates: Sequence[Estimate], made: Promised) -> tuple[Estimate, ...]:
    """The epsilon that an attack's success (its `estimates`) refutes, with claimed and proved ones; empty if none."""
    words = f"claimed {made.claimed:.3g}, proved {made.proved:.3g} per {made.unit.value}, delta {made.delta:g}"
    if isinstance(answer, Membership):
        if truth.is_member is None or not truth.alike:
            return ()
        n, shown = int(truth.is_member.sum()), shown_by_membership(answer.scores, truth.is_member, made)
        return (_bound("membership_epsilon", shown, n, "guesses of pairs in one run", words),)
    if isinstance(answer, Traced):
        return ()
    numbers = {estimate.name: estimate for estimate in estimates}
    if isinstance(answer, Named):
        name, sizes, among = "named", [len(each) for each in answer.records], answer.among
    else:
        name, sizes, among = "identification", [len(victim.y) for victim in truth.victims], 1 + truth.rivals
    identification = numbers.get(name)
    if identification is None or not identification.n:
        return ()
    # images of one message are not independent: only the first of each message counts
    first = itertools.accumulate(sizes[:-1], initial=0)
    hits = [identification.values[at] == 1 for at in first]
    shown = shown_by_identification(sum(hits), len(hits), among, made.delta)
    return (_bound(f"{name}_epsilon", shown, len(hits), "Clopper-Pearson", words),)


def _bound(name: str, value: float, n: int, method: str, note: str) -> Estimate:
    return Estimate(name, value, None, None, n, f"{LEVEL:.0%} lower bound, {method}", note=note)


def score_labels(truth: Sequence[Tensor], guesses: Sequence[Tensor]) -> tuple[Estimate, ...]:
    """Score one guess of labels per victim, in any order of the labels.

    Args:
        truth: [b] int64 of each victim, or rows [b, k] of 0 and 1; b may differ.
        guesses: the same number of labels for each victim, in the order of the victims.

    Returns:
        `label_accuracy`: the share of labels in common; `exact`: the share of victims whose labels are all right.

    Raises:
        ValueError: not one guess per victim, no victim, or another number of labels.
    """
    sizes = [len(labels) for labels in truth]
    if not sizes or [guess.shape for guess in guesses] != [labels.shape for labels in truth]:
        raise ValueError(
            f"expected {sizes} labels of the victims, got shapes {[tuple(guess.shape) for guess in guesses]}"
        )
    right = [_right(*pair) for pair in zip(truth, guesses, strict=True)]
    values = [float(hit) for hits in right for hit in hits]
    of_labels = stats.proportion("label_accuracy", round(sum(values)), sum(sizes), values=values)
    exact = _share("exact", [bool(hits.all()) for hits in right], [], "victims")
    return stats.over_batches(of_labels, sizes), exact


def score_membership(
    scores: Tensor | npt.NDArray[np.floating], is_member: Tensor | npt.NDArray[np.bool_]
) -> tuple[Estimate, ...]:
    """AUC, TPR at low FPR and balanced accuracy of membership scores [n], where higher means member.

    Guarantees:
        An attack that is wrong more often than chance has an AUC below 0.5: the sign of scores is never flipped.

    Raises:
        ValueError: the shapes differ, a score is not finite, or a side is empty.
    """
    s, truth = numbers_of(torch.as_tensor(scores)), numbers_of(torch.as_tensor(is_member)) > 0
    if s.shape != truth.shape or s.ndim != 1:
        raise ValueError(f"expected scores [n] and is_member [n], got shapes {s.shape} and {truth.shape}")
    bad = int(np.sum(~np.isfinite(s)))
    if bad:
        raise ValueError(f"expected finite scores, got {bad} of {len(s)} that are not")
    members, others = s[truth], s[~truth]
    return (
        stats.auc(members, others),
        stats.tpr_at_fpr(members, others, 0.01),
        stats.tpr_at_fpr(members, others, 0.001),
        stats.balanced_accuracy(members, others),
    )


def score_lineup(answer: Named, places: Sequence[Sequence[int]]) -> tuple[Estimate, ...]:
    """Score the candidates' log likelihoods of each record in question.

    Args:
        places: for each victim, where the true record is in each of its lineups.

    Returns:
        `named`: the record is strictly likelier than all rivals, and `named@k` than the first k - 1, for fewer rivals
        than there are; `lineup_auc`: the share of less likely rivals, ties half; `nats`: the mean log likelihood ratio
        of the record to its rivals, cut at +-`NATS`; `posterior_gap`, if the likelihood is exact: the posterior of the
        record, from a uniform prior, minus the sum of all squared posteriors, whose mean is zero by Bayes'
        rule; `present_auc`, `present_auc_fit`: the AUC that tells lineups with the
        record from the same lineups without it, by the best likelihood over those of the references, and by how well
        the best candidate fits. Several records of one message are not independent: intervals are over messages.

    Raises:
        ValueError: not one place for each record.
    """
    if [len(each) for each in answer.records] != [len(each) for each in places] or not places:
        raise ValueError(
            f"expected a place for each record in question, got {places} for {len(answer.records)} victims"
        )
    rows = list[_Place]()
    for each, own in zip(answer.records, places, strict=True):
        rows += [_Place.of(candidates, place) for candidates, place in zip(each, own, strict=True)]
    sizes = [len(each) for each in places]
    least = min(len(row.rivals) for row in rows)
    words = f"among {1 + least}" + ("" if answer.exact else "; a better test may exist: the likelihood is not exact")

    def over(name: str, values: Sequence[float], note: str = "") -> Estimate:
        return stats.over_batches(stats.of_items(name, values, note=note), sizes)

    def shares(name: str, rivals: int) -> Estimate:
        hits = [float((row.own > row.rivals[:rivals]).all()) for row in rows]
        return stats.against(over(name, hits, words if name == "named" else ""), 1 / (1 + rivals))

    nats = np.array([row.nats for row in rows])
    rounds = stats.rounds_to_name(float(nats.mean()), 1 + least)
    about = f"about {rounds} messages name half of the records among {1 + least}" if rounds else _NEVER
    estimates = [
        shares("named", least),
        *(shares(f"named@{k}", k - 1) for k in (2, 10, 100) if k <= least),
        over("lineup_auc", [row.above for row in rows]),
        over("nats", nats.tolist(), about),
    ]
    if answer.exact:
        estimates.append(over("posterior_gap", [row.gap for row in rows]))
    for name, at in (("present_auc", "over"), ("present_auc_fit", "fit")):
        with_it, without = (np.array([getattr(row, at)[i] for row in rows]) for i in (0, 1))
        if np.isfinite(with_it).all() and np.isfinite(without).all():
            # the two sides are of the same messages: no test for independent ones
            estimates.append(dataclasses.replace(stats.auc(with_it, without), name=name, p=None))
    return tuple(estimates)


def score_traced(answer: Traced, sources: Tensor, linked: bool) -> tuple[Estimate, ...]:
    """Score who is behind records, or behind the messages of later rounds.

    Args:
        sources: [n] the client behind each; -1: no client, it does not count.
        linked: whether the rows are all clients' messages of one round after the other, so that each client is named
            once a round; otherwise a row names its likeliest client, and a tie is a miss.

    Returns:
        The share of right names `linked` or `source`, with its value by guessing, and as p the share of random orders
        of the clients that are right at least as often. Records of one client are not independent: the interval of
        `source` is over clients.

    Raises:
        ValueError: not one row for each source.
    """
    scores, known = numbers_of(answer.scores), numbers_of(sources).astype(np.int64)
    n, clients = scores.shape
    if len(known) != n:
        raise ValueError(f"expected one row for each of {len(known)} sources, got {n}")
    if linked:
        blocks = np.split(scores, n // clients)
        named = np.concatenate([linear_sum_assignment(-np.clip(block, -_FAR, _FAR))[1] for block in blocks])
    else:
        order = np.argsort(known, kind="stable")[np.count_nonzero(known < 0) :]
        scores, known = scores[order], known[order]
        unique = (scores == scores.max(1, keepdims=True)).sum(1) == 1
        named = np.where(unique, scores.argmax(1), -1)
    name, hits = "linked" if linked else "source", [float(hit) for hit in named == known]
    counts = np.zeros((clients, clients))
    np.add.at(counts, (known[named >= 0], named[named >= 0]), 1)
    orders = rng.permutations(_ORDERS, _TURNS, clients)
    random = counts[np.arange(clients), orders].sum(1)
    p = (1 + int((random >= sum(hits)).sum())) / (1 + _TURNS)
    words = f"{sum(hits):.0f} of {len(hits)} among {clients} clients"
    share = stats.of_items(name, hits, note=words)
    sizes = [1] * n if linked else np.unique(known, return_counts=True)[1].tolist()
    return (dataclasses.replace(stats.over_batches(share, sizes), chance=1 / clients, p=p),)


def score_property(scores: Tensor, has: Tensor) -> tuple[Estimate, ...]:
    """Score which victims have the property in many of their records.

    Args:
        scores: [n], higher means in many; has: [n] bool.

    Returns:
        `property_auc`, with the p-value of the rank-sum test that there is no difference.
    """
    many, few = (numbers_of(scores[has == side]) for side in (True, False))
    return (dataclasses.replace(stats.auc(many, few), name="property_auc"),)


class _Place(NamedTuple):
    """One record in question: its log likelihood, those of its rivals, and what presence is judged by, with it and
    without it.
    """

    own: float
    rivals: Numbers
    over: tuple[float, float]
    fit: tuple[float, float]

    @classmethod
    def of(cls, candidates: Candidates, place: int) -> _Place:
        scores, fits = numbers_of(candidates.scores), numbers_of(candidates.fits)
        rivals = np.delete(scores, place)
        among = np.argsort(-scores, kind="stable")
        best = [int(among[0]), int(next(i for i in among if i != place))]
        usual = special.logsumexp(candidates.references.numpy()) if len(candidates.references) else -math.inf
        over = [float(np.clip(np.nan_to_num(scores[i] - usual, nan=0.0), -_FAR, _FAR)) for i in best]
        fit = [float(np.clip(fits[i], -_FAR, _FAR)) for i in best]
        return cls(float(scores[place]), rivals, (over[0], over[1]), (fit[0], fit[1]))

    @property
    def above(self) -> float:
        """The share of rivals that are less likely; ties count half."""
        return float(np.mean((self.own > self.rivals) + 0.5 * (self.own == self.rivals)))

    @property
    def nats(self) -> float:
        """The mean log likelihood ratio of the record to its rivals."""
        ratios = np.where(np.isneginf(self.rivals) & math.isinf(self.own), 0.0, self.own - self.rivals)
        return float(np.clip(ratios, -NATS, NATS).mean())

    @property
    def gap(self) -> float:
        """The posterior of the record minus the sum of all squared posteriors, from a uniform prior."""
        scores = np.append(self.rivals, self.own)
        if not np.isfinite(scores).any():
            return 0.0
        posterior = special.softmax(scores)
        return float(posterior[-1] - np.square(posterior).sum())


def _judge(x: Tensor, y: Tensor, guess: Guess, candidate_set: Tensor | None, form: Form) -> _Scores | None:
    # float32, like the attack's own numbers: an overflow in float32 is a divergence
    if guess.failure or not bool(torch.isfinite(guess.x.float()).all()):
        return None
    if guess.x.shape != x.shape or guess.y.shape != y.shape or x.ndim - 1 not in (1, 2, 3):
        raise ValueError(
            f"expected a guess like the truth, x {tuple(x.shape)} and y {tuple(y.shape)}, got x "
            f"{tuple(guess.x.shape)} and y {tuple(guess.y.shape)}"
        )
    order = match(x, guess.x, form)
    inputs, labels = guess.x.detach().cpu()[order], guess.y.detach().cpu()[order]
    each = form.score(x, inputs) | {"right": _right(y, labels)}
    if candidate_set is not None:
        each["identified"] = identified(x, inputs, candidate_set, form)
        each["among"] = np.full(len(x), 1.0 + candidate_set.shape[1])
    return _Scores(inputs, each)


def _scored(form: Form, x: Tensor) -> tuple[str, ...]:
    """The form's scores; images with a side below 3 pixels have no SSIM and PSNR."""
    return form.scores if form is not PICTURE or min(x.shape[2:]) >= 3 else ("mse",)


def _right(truth: Tensor, guess: Tensor) -> Numbers:
    """[b] 1 for each true label among the guessed labels, each counted once; 0 for the numbers of a regression.

    Rows of 0 and 1 are right as a whole, in their order.
    """
    if not _classifies(truth):
        return np.zeros(len(truth))
    if truth.ndim == 2:
        return (truth.detach().cpu() == guess.double().round()).all(1).double().numpy()
    guess = guess.double().nan_to_num(-1.0, -1.0, -1.0).round().long()  # a number counts as the nearest label
    right = (truth.detach().cpu() == guess).numpy().astype(np.float64)
    unused = [int(label) for label, hit in zip(guess, right, strict=True) if not hit]
    for at in np.flatnonzero(right == 0):
        label = int(truth[at])
        if label in unused:
            unused.remove(label)
            right[at] = 1.0
    return right


def _classifies(y: Tensor) -> bool:
    """Whether labels are classes, or rows of 0 and 1 for several classes, and not the numbers of a regression."""
    return not y.is_floating_point() or (y.ndim == 2 and bool(((y == 0) | (y == 1)).all()))


def _spread(scores: Sequence[_Scores | None], sizes: Sequence[int], name: str) -> list[float | None]:
    """One value per image, in the order of the victims; None for a failed victim."""
    values: list[float | None] = []
    for score, size in zip(scores, sizes, strict=True):
        values += [None] * size if score is None else score.each[name].tolist()
    return values


def _share(name: str, hits: Sequence[bool], notes: Sequence[str], of: str = "images") -> Estimate:
    """The share of hits among all items, including failed ones."""
    note = "; ".join([f"{sum(hits)} of {len(hits)} {of}", *notes])
    return stats.proportion(name, sum(hits), len(hits), values=[float(hit) for hit in hits], note=note)


def _pictures(truth_x: Sequence[Tensor], scores: Sequence[_Scores | None], form: Form) -> Pictures | None:
    if len({x.shape for x in truth_x}) > 1:
        return None
    blank = torch.full_like(truth_x[0], form.nothing)
    guesses = [blank if score is None else form.valid(score.guess) for score in scores]
    words = [form.texts(x, guess) for x, guess in zip(truth_x, guesses, strict=True)]
    if known := [both for both in words if both is not None]:
        return Pictures(*(np.stack(side) for side in zip(*known, strict=True)))
    if "ssim" not in _scored(form, truth_x[0]):
        return None
    stacked = (torch.stack([x.detach().cpu() for x in images]).float().clamp(0, 1) for images in (truth_x, guesses))
    # from [victims, batch, c, h, w] to [victims, batch, h, w, c]
    return Pictures(*(np.ascontiguousarray(images.movedim(2, -1).numpy()) for images in stacked))
