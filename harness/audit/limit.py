"""How near to the images an attack can come: the limit of reconstruction attacks, computed from the true images.

A message shows the update g(x) with the Fisher information F of the defense's noise. The model takes g as linear
around the images x, with the slope J = dg/dx, and draws images from the attacker's normal distribution N(m, S). Then
the best estimate is the posterior mean, with the covariance P = (J' F J + S^-1)^-1. Given x, its expected squared error
is
|(I - P J' F J)(x - m)|^2 + tr(P J' F J P); over all images of the distribution it is tr(P). By van Trees' inequality,
no estimate of images from the distribution has a smaller error than tr(P), if g is linear.

Texts do not change by small steps. Whoever knows all of a text but one token, and that this is one of two tokens, still
errs with probability Q(D / 2) under normal noise, where D' D = (g - g')' F (g - g') for the updates of the two texts.

`docs/attacks.md` lists what the limit takes as known and how it approximates, so that an attack may do better.

Sources: Van Trees 1968, "Detection, estimation, and modulation theory", part I, sec. 2.4.3; Kay 1993, "Fundamentals of
    statistical signal processing: estimation theory", thm 10.3, for the linear model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg.blas import dsyrk
from torch import Tensor

from leakgauge.harness.core.contract import Examples, Message, Observation, ObservedRound, Task, links_of
from leakgauge.harness.core.defense import Likelihood, Links
from leakgauge.harness.core.device import capacity, moved
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.form import Tokens
from leakgauge.harness.core.rng import Key, integers
from leakgauge.harness.core.statements import likelihood_of
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.gradients import gradients, keep_freed_memory, kernel_of, targets_of
from leakgauge.harness.learn.prior import gaussian_prior

_DIRECTIONS = 3072  # the most directions of an instance: all of 3 x 32 x 32 pixels; time grows with the third power
_ENTRIES = 2**26  # the most entries of the slopes of an instance: 512 MiB

_FEWEST = 16
"""The fewest directions of an instance: with fewer, almost all of an image would count as known."""

_COMPUTED = 2**28
"""The most entries of all gradients, without a gradient kernel or above 4 million parameters: 1,000 directions up to
268,000 parameters, 16 for 16 million. If they exceed `_ENTRIES`, random sums of entries replace the entries."""

_MESSAGES = 32
"""Fresh messages that estimate the Fisher information: each entry has a standard error of a quarter, the sum over many
coordinates a standard error of a hundredth."""

_TOGETHER, _MOST, _COPIES = 32, 1024, 16
"""Number of directions whose gradients are computed at once; on an accelerator the most, with so many float32 numbers
for each entry of a gradient."""

_STEP = 1e-6  # step of the differences, in units of the inputs and in float64; relative error 1e-6 for five models
_EXACT = 1e-3  # messages show numbers without noise if the slopes' mean square is below this share of the curvature
_IN_CLEAR = 1e-4  # relative standard deviation of a number sent without noise: exact up to rounding in the inversion
_CLIPPED = 0.9  # share of an update's length below which a clip is assumed; without one, the mean of messages is above
_RIVALS = 16  # tokens with which each token of a text may be confused
_SHARPEST = 1e12  # the most information about a coordinate: float32 does not resolve more


class NoLimit(ValueError):
    """No limit exists for these messages; the text states the reason."""


class Limit(NamedTuple):
    """The limit of one victim's b images; errors are mean squares over the p entries of an image, along `basis`.

    Attributes:
        error: [b] the expected error of the best estimate, given these images.
        average: [b] the expected error over all images of the attacker's distribution.
        blind: [b] the error of the mean image, which uses no message.
        basis: [p, k] orthonormal directions of the attacker's distribution with the most variance.
        sums: number of random sums of a gradient's entries that replace them; 0: the entries themselves.
        linear: whether the messages have no Fisher information; the error is then that of the best linear estimate,
            given the variance of the messages' errors.
    """

    error: Numbers
    average: Numbers
    blind: Numbers
    basis: Tensor
    linear: bool = False
    sums: int = 0

    @property
    def complete(self) -> bool:
        """Whether the basis spans all images; otherwise the rest counts as known, and the errors are too small."""
        return self.basis.shape[0] == self.basis.shape[1]

    @property
    def caveat(self) -> str:
        """What a reader of the errors must know; empty if there is no caveat."""
        p, k = self.basis.shape
        part = "" if self.complete else f"of {k:,} of {p:,} directions: the others count as known"
        uniform = "uniform errors have no Fisher information: of the best linear estimate" if self.linear else ""
        return "; ".join(filter(None, (part, uniform, f"by {self.sums:,} random sums of entries" if self.sums else "")))

    def errors_of(self, truth: Tensor, guess: Tensor) -> Numbers:
        """[b] the same error measure for a guess [b, ...] in the order of the truth."""
        off = (guess - truth).detach().cpu().double().flatten(1)
        return np.asarray((off @ self.basis).square().sum(1).numpy() / off.shape[1], np.float64)


def limits(seen: Observation, truth: Sequence[Examples], key: Key, only: range | None = None) -> list[Limit]:
    """The limit of each victim, in the order of the messages.

    Args:
        truth: the images and labels behind each message.
        key: of the fresh messages, which estimate the Fisher information.
        only: the victims to compute; None: all. A limit does not depend on the other victims.

    Raises:
        NoLimit: the adversary sees no message or no auxiliary data, a parameter is not finite, the model is too large
            or has no per-example gradient, clients follow Adam, a batch has a loss with weights, the model has a
            bottleneck with noise, or the defense has neither a Fisher information nor a variance.
    """
    _check(seen, truth)
    assert seen.auxiliary is not None
    assert seen.model is not None
    if not seen.task.form.continuous:
        return [_of_text(seen, truth[n], n, key) for n in (range(len(truth)) if only is None else only)]
    try:
        prior = gaussian_prior(seen.auxiliary.x, 0.0)
    except ValueError as error:
        raise NoLimit(str(error)) from error
    keep_freed_memory()
    most = followed(seen.task, seen.model.params)  # of parameters on the CPU: equally many on every device
    first = seen.observed_rounds[0]
    links = links_of(seen.setting, first.messages)
    wires = [message.wire for message in first.messages]
    linear = seen.defense.error_variance(first.model.state, wires, links) is not None
    mean, axes, each = prior.mean.double(), prior.axes, list[Limit]()
    slopes = torch.empty(0, 0, dtype=torch.float64)
    for number in range(len(truth)) if only is None else only:
        victim = truth[number]
        images, k = len(victim.y), max(1, min(most // len(victim.y), len(axes[1])))
        basis, variances = axes[0][:, :k], axes[1][:k]
        directions = moved(basis * variances.sqrt(), seen.device)
        information = directions.new_zeros(images * k, images * k).T
        sums = _ENTRIES // (images * k) if seen.setting.dim * images * k > _ENTRIES else 0
        for at, observed in enumerate(seen.observed_rounds):
            try:
                slopes = _slopes(seen, observed, number, victim, directions, key.child(number, at), slopes, sums)
            except ValueError as error:
                # a batch norm may need more than one record
                if seen.task.mixes or isinstance(error, NoLikelihood):
                    raise NoLimit(str(error)) from error
                raise
            information = _summed(information, slopes)
        off = (victim.x.double().flatten(1) - mean) @ basis
        each.append(_limit(information, off, variances, len(mean))._replace(basis=basis, linear=linear, sums=sums))
    return each


def _of_text(seen: Observation, victim: Examples, number: int, key: Key) -> Limit:
    """The share of tokens that are wrong at least, of each text of a victim, by the likeliest confusion at each place.

    Tokens are confused with the commonest ones of the adversary's texts.
    """
    assert seen.auxiliary is not None
    counts = seen.auxiliary.x.flatten().long().bincount()
    rivals = counts.argsort(descending=True, stable=True)[:_RIVALS].double()
    highest = torch.tensor(seen.task.form.highest)[:, None] if isinstance(seen.task.form, Tokens) else rivals
    labels, wrong = targets_of(seen.task, victim.y, torch.float64), list[float]()
    for image, text in enumerate(victim.x.double()):
        tried, own = text.repeat(len(text), len(rivals), 1), text[:, None]
        possible = torch.where(rivals <= highest, rivals, own)  # another place may have other tokens
        tried.diagonal(dim1=0, dim2=2).copy_(possible.T)
        apart = torch.zeros(tried.shape[:2], dtype=torch.float64)
        for at, observed in enumerate(seen.observed_rounds):
            message = observed.messages[number]
            links = links_of(seen.setting, [message])
            if seen.defense.error_variance(observed.model.state, [message.wire], links) is not None:
                raise NoLimit("uniform errors have no Fisher information, which the limit of a text needs")
            gradients_of = _gradients(seen, observed.model.params.double())
            factor = _per_record(seen, observed, message, len(victim.y) // message.users)

            def sent(x: Tensor, y: Tensor) -> Tensor:
                return gradients_of(x[:, None], y.expand(len(x), 1, *y.shape)).mul_(factor)  # noqa: B023

            each = len(victim.y) // message.users
            whole = torch.cat([sent(*pair) for pair in zip(victim.x.double()[:, None], labels, strict=True)])
            updates = whole.view(message.users, each, -1).sum(1)
            weight = _information(seen, observed, message, updates.float(), key.child(number, at)).double()[
                image // each
            ]
            rows = [((sent(part, labels[image]) - whole[image]).square() @ weight) for part in tried]
            apart += torch.stack(rows)
        apart.masked_fill_(possible == own, torch.inf)
        wrong.append(float(torch.special.ndtr(-apart.amin(1).sqrt() / 2).mean()))
    error, blind = np.array(wrong), np.full(len(wrong), 0.5)
    return Limit(error, error, blind, torch.zeros(0, 0, dtype=torch.float64))


def _check(seen: Observation, truth: Sequence[Examples]) -> None:
    """Refuse what no limit covers."""
    if seen.messages is None or seen.model is None:
        raise NoLimit("the adversary sees no message")
    if seen.setting.optimizer != "sgd":
        raise NoLimit("the slopes of gradients are not those of the steps of Adam")
    if seen.setting.layout.encoder is not None:
        raise NoLimit("the gradients have noise of their own, which messages of one record show")
    if not (seen.task.separable or seen.task.mixes) and any(len(victim.y) > 1 for victim in truth):
        raise NoLimit("with this loss, a record's share of a message depends on the others")
    if seen.auxiliary is None:
        raise NoLimit("the adversary has no auxiliary data")
    if not all(bool(observed.model.params.isfinite().all()) for observed in seen.observed_rounds):
        raise NoLimit("a parameter of the model is not finite")
    if (fit := max(_ENTRIES, _COMPUTED) // seen.setting.dim) < _FEWEST:
        text = f"of a model of {seen.setting.dim:,} parameters, only {fit} directions of an image are affordable"
        raise NoLimit(f"{text}: a limit needs {_FEWEST}")


def followed(task: Task, params: Vector) -> int:
    """The number of directions that the limit of one message follows, over all its images."""
    fast = kernel_of(task, params, 1) is not None and _FEWEST * task.layout.dim <= _ENTRIES
    return min(_DIRECTIONS, (_ENTRIES if fast else _COMPUTED) // task.layout.dim)


def _summed(information: Tensor, slopes: Tensor) -> Tensor:
    """The information [n, n] plus that of the rows of slopes [n, d]; only the upper triangle has a meaning."""
    if slopes.device.type != "cpu":
        return torch.addmm(information, slopes, slopes.T)
    # the rows are columns for BLAS, and so are those of the information, which is overwritten
    return torch.from_numpy(dsyrk(1.0, slopes.numpy().T, 1.0, information.numpy(), trans=1, overwrite_c=1))


def _limit(information: Tensor, off: Tensor, variances: Tensor, entries: int) -> Limit:
    """The errors, from J' F J (a triangle) and x - m [b, k], in coordinates where the distribution of images is
    standard normal.

    Raises:
        NoLimit: a number is not finite, or the information spans more than float64 resolves.
    """
    images, k = off.shape
    off, variances = (part.to(information.device) for part in (off, variances))
    information.diagonal().add_(1.0)
    root, wrong = torch.linalg.cholesky_ex(information, upper=True)
    if bool(wrong) or not bool(root.isfinite().all()):
        raise NoLimit("the information of the messages cannot be inverted")
    posterior = torch.cholesky_inverse(root, upper=True)

    def mean_square(squares: Tensor) -> Numbers:
        return np.asarray((squares.view(images, k) * variances).sum(1).cpu().numpy() / entries, np.float64)

    # x - estimate = P (x - m) - P J' F times the noise
    missed = (posterior @ (off / variances.sqrt()).flatten()).square()
    spread = posterior.diagonal() - posterior.square().sum(1)
    return Limit(
        mean_square(missed + spread.clamp(min=0.0)),
        mean_square(posterior.diagonal()),
        mean_square(off.square().flatten() / variances.repeat(images)),
        variances,
    )


def _slopes(
    seen: Observation,
    observed: ObservedRound,
    number: int,
    victim: Examples,
    directions: Tensor,
    key: Key,
    room: Tensor,
    sums: int = 0,
) -> Tensor:
    """[b k, d] the slopes of one message along `directions` [p, k] of each of its images, times sqrt(F).

    Args:
        sums: number of random sums, with signs, that replace the d entries; 0: none.
        room: overwritten and returned if it has this shape; allocating a new array takes a third of the time.
    """
    message, device = observed.messages[number], directions.device
    params = observed.model.params.double().to(device)
    users, images, clip = message.users, len(victim.y), seen.defense.local.clip
    each = images // users
    labels = targets_of(seen.task, victim.y, torch.float64).to(device)
    factor = _per_record(seen, observed, message, each)
    shape, flat, gradients_of = seen.task.input_shape, victim.x.double().flatten(1).to(device), _gradients(seen, params)

    def sent(image: int, x: Tensor) -> Tensor:
        """[m, d] the parts of a client's message that come from records x [m, p] with the label of this image."""
        rows = gradients_of(x.view(-1, 1, *shape), labels[image].expand(len(x), 1, *labels.shape[1:]))
        if clip is not None:
            rows = rows * (clip / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=clip))
        return rows.mul_(factor)

    whole = torch.cat([sent(image, flat[image : image + 1]) for image in range(images)])
    updates = whole.view(users, each, -1).sum(1).cpu()
    weight = _information(seen, observed, message, updates.float(), key).double().sqrt().to(device)
    clear = [_clear(seen, update).to(device) for update in updates]
    k, d = directions.shape[1], seen.setting.dim
    into = torch.from_numpy(integers(key.child("sums"), d, sums or 1)).to(device)
    signs = torch.from_numpy(2.0 * integers(key.child("signs"), d, 2) - 1.0).to(device)
    shape_of_rows = (images * k, (sums or d) + len(clear[0]))
    rows = room if room.shape == shape_of_rows else torch.empty(shape_of_rows, dtype=torch.float64, device=device)
    together = _TOGETHER if device.type == "cpu" else max(_TOGETHER, min(_MOST, capacity(device) // (_COPIES * d)))
    for image in range(images):
        user, of_image = image // each, rows[image * k : (image + 1) * k]
        for row, part in zip(torch.split(of_image, together), torch.split(directions.T, together), strict=True):
            slope = sent(image, flat[image] + _STEP * part).sub_(whole[image]).div_(_STEP)
            row[:, sums or d :] = slope @ clear[user].T
            slope.mul_(weight[user])
            row[:, : sums or d] = torch.zeros_like(row[:, :sums]).index_add_(1, into, slope * signs) if sums else slope
    return rows


def _clear(seen: Observation, update: Tensor) -> Tensor:
    """[h, d] the slopes of the numbers that one client's message shows without noise, over their standard deviation."""
    leaf = update[None].clone().requires_grad_()
    (shown,) = seen.defense.plaintext_statistic(leaf, seen.setting)
    slopes = [torch.autograd.grad(one, leaf, retain_graph=True)[0][0] for one in shown]
    if not slopes:
        return update.new_zeros(0, len(update))
    weight: Tensor = 1 / (_IN_CLEAR * shown.detach().abs() + 1e-12)
    return torch.stack(slopes) * weight[:, None]


def _per_record(seen: Observation, observed: ObservedRound, message: Message, images: int) -> float:
    """The factor of one record's gradient in its client's message, with all steps as one."""
    batch, rule = seen.setting.batch or images, seen.defense.local
    if seen.setting.sends == "gradient":
        return 1.0 / images
    nominal = rule.poisson or seen.defense.step_noise(seen.setting) > 0
    divisor = batch if nominal else min(batch, images)
    return -observed.lr * message.steps * min(batch, images) / (images * divisor)


def _gradients(seen: Observation, params: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """From records x [m, 1, *input_shape] with labels y [m, 1, classes] to their gradients [m, d]."""
    kernel, task = kernel_of(seen.task, params, 1), seen.task
    if kernel is not None:
        return lambda x, y: kernel.trace(x, y)[0]
    if params.device.type != "cpu":
        return lambda x, y: gradients(task, params, x, y)
    # on the CPU, mapping over several records would take several times as long
    return lambda x, y: torch.cat([gradients(task, params, x[i : i + 1], y[i : i + 1]) for i in range(len(x))])


def _information(seen: Observation, observed: ObservedRound, message: Message, updates: Tensor, key: Key) -> Tensor:
    """[users, d] the Fisher information of a message of these updates, or one over the variance if there is none.

    For messages without noise, it is the curvature of the likelihood of the message that was sent.
    """
    state, links = observed.model.state, links_of(seen.setting, [message])
    variance = seen.defense.error_variance(state, [message.wire], links)
    wires, fresh = _fresh(seen, observed, message, updates, key)
    if variance is not None:
        share = _kept(Round(seen.defense, seen.setting, state), wires, fresh, updates)
        return (share**2 / variance).clamp(max=_SHARPEST)
    slopes = torch.zeros_like(updates)
    together = max(1, 2**22 // updates.numel())
    for first in range(0, len(wires), together):
        part = slice(first, first + together)
        shared = None if fresh.shared is None else fresh.shared[part]
        of_part = Links(seen.setting, fresh.senders[part], shared)
        score = likelihood_of(seen.defense, state, wires[part], of_part)
        slopes += _slope(score, updates, len(wires[part])).square().sum(0)
    slopes /= len(wires)
    score = likelihood_of(seen.defense, state, [message.wire], links)
    coins = torch.from_numpy(1.0 - 2.0 * integers(key.child("curvature"), updates.numel(), 2)).to(updates)
    way = coins.view_as(updates) * _EXACT * updates.square().mean().sqrt()
    curvature = (_slope(score, updates + way, 1) - _slope(score, updates - way, 1))[0] / (2 * way)
    exact = float(slopes.sum()) <= _EXACT * float(curvature.clamp(min=0.0).sum())
    found = (curvature.clamp(min=0.0) if exact else slopes).clamp(max=_SHARPEST)
    if not bool(found.isfinite().all()):
        raise NoLimit("the slope of the defense's likelihood is not finite")
    return found


def _kept(here: Round, wires: Sequence[bytes], links: Links, updates: Tensor) -> float:
    """The share of an update's length that its messages keep: below 1 after a clip; 1 if the loss may be noise."""
    whole = updates.sum(0).double()
    pairs = zip(wires, links.each(), strict=True)
    each = [float(here.estimate(wire, link.sender, link.shared).double() @ whole) for wire, link in pairs]
    share = sum(each) / len(each) / max(float(whole.square().sum()), 1e-30)
    return max(share, 0.0) if share < _CLIPPED else 1.0


def _slope(score: Likelihood, updates: Tensor, times: int) -> Tensor:
    """[times, users, d] the slope of a likelihood of `times` messages at the same updates."""
    leaf = updates.expand(times, -1, -1).clone().requires_grad_()
    (slope,) = torch.autograd.grad(score(leaf[:, 0] if len(updates) == 1 else leaf).sum(), leaf)
    return torch.as_tensor(slope)


def _fresh(
    seen: Observation, observed: ObservedRound, message: Message, updates: Tensor, key: Key
) -> tuple[list[bytes], Links]:
    """Messages of these updates with other private noise, and their links as the adversary has them."""
    here = Round(seen.defense, seen.setting, observed.model.state, observed.model.round)
    senders, wires, shared = (message.sender, *message.others), list[bytes](), list[Key]()
    for number in range(_MESSAGES):
        own = key.child("fresh", number)
        clients = [
            Client.of(sender, update, seen.defense.remember(seen.setting), own.child(sender.number))
            for sender, update in zip(senders, updates, strict=True)
        ]
        if message.shared is not None:
            clients[0] = clients[0]._replace(shared=message.shared)
        wires.append(here.among_silent(clients, own).received[0])
        shared.append(clients[0].shared)
    return wires, Links(seen.setting, [message.sender] * len(wires), None if message.shared is None else shared)
