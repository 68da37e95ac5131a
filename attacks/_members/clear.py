"""Membership from the numbers that a defense sends in clear (a norm, scales, means) and nothing else.

Two distributions of these numbers are used: batches of random records with and without a candidate, for any model; and
sums of the candidates' gradients, for a model in which no other record has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from leakgauge.attacks._engine.imitation import own_updates
from leakgauge.attacks._engine.objective import update_per_gradient
from leakgauge.attacks._members.traffic import chance_of, mixture, over_rounds, weight_of
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples, Membership, Message, Observation, ObservedRound
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.gradients import gradients, targets_of

_BATCHES = 256  # number of simulated batches: 64 lose 0.02 of AUC, 1024 gain 0.01 (`jopeq`, `mlp-small`)
_ENTRIES = 2**23  # maximum number of entries of the records' gradients behind simulated updates that are held at once
_CHUNK = 64  # number of records whose gradients are computed at once
_ROUNDING = 1e-6  # deviation that rounding explains, relative to the largest number in clear; also for constant zeros
_SETS = 10**6  # maximum number of sets of candidates that are weighed, smaller sets first
_EXACT = 3e-7  # relative deviation of a sum of float32 gradients from a message's number; at most 4e-7 occurred
_ANYWHERE = Key(0).child("anywhere")  # public key of an update with nonzero entries; nothing else draws from it

Ratios = Callable[[Observation, ObservedRound, Tensor, Key], Tensor]
"""[k, n]: log likelihood ratios that a candidate is in each message of a round, from numbers in clear [k, h]."""


def judge(observation: Observation, key: Key, ratios: Ratios) -> Membership:
    """One score per candidate from only the numbers in clear, combined over the rounds by `over_rounds`.

    Raises:
        ValueError: the defense sends no such numbers, or the suspect sent no message.
    """
    evidence: list[tuple[int, Tensor]] = []
    for observed in observation.observed_rounds:
        messages = tuple(sent for sent in observed.messages if observation.suspect in (None, sent.sender.number))
        if messages:
            numbers = _numbers(observation, messages)
            rows = ratios(observation, observed._replace(messages=messages), numbers, key.child(observed.model.round))
            chances = torch.tensor([[chance_of(message)] for message in messages], dtype=torch.float64)
            evidence += zip((message.sender.number for message in messages), mixture(rows, chances), strict=True)
    return over_rounds(evidence, observation.suspect)


def _numbers(observation: Observation, messages: tuple[Message, ...]) -> Tensor:
    defense, setting = observation.defense, observation.setting
    read = defense.read_plaintext_statistic([message.wire for message in messages], setting)
    named = defense.plaintext_statistic(torch.zeros(1, setting.dim), setting).shape[1]
    if not 0 < read.shape[1] == named:
        raise ValueError(
            "expected a defense that sends numbers in the clear, such as a norm, got "
            f"{named} from its plaintext_statistic and {read.shape[1]} from its read_plaintext_statistic; "
            "use another statistic"
        )
    return read.double()


def by_batches(observation: Observation, observed: ObservedRound, numbers: Tensor, key: Key) -> Tensor:
    """`Ratios` for any model: compares random batches of auxiliary records with the same batches with the candidate.

    The numbers are treated as normal, with the same covariance for both sides. Clients are simulated as they train; the
    candidate replaces a record in the first step, and its later passes are not counted (see `traffic`).

    Raises:
        ValueError: there are fewer than two auxiliary records.
    """
    assert observation.candidates is not None
    assert observation.auxiliary is not None
    if len(observation.auxiliary.x) < 2:
        raise ValueError(
            f"expected at least 2 auxiliary records to simulate batches, got {len(observation.auxiliary.x)}"
        )
    each = _gradients(observation, observed.model.params, observation.candidates)
    kinds = [(message.images, message.steps, message.sender.samples) for message in observed.messages]
    ratios = torch.empty(len(kinds), len(each), dtype=torch.float64)
    for kind in dict.fromkeys(kinds):
        rows = [row for row, other in enumerate(kinds) if other == kind]
        like = observed._replace(messages=(observed.messages[rows[0]],))
        ratios[rows] = _simulated(observation, like, each, key.child(*kind)).ratios(numbers[rows])
    return ratios


class _Distribution(NamedTuple):
    """Numbers in clear of simulated batches without a candidate [m, h], and their mean with each candidate [n, h]."""

    without: Tensor
    mean_with: Tensor

    def ratios(self, numbers: Tensor) -> Tensor:
        """[k, n]: log likelihood ratios of numbers [k, h]."""
        count, h = self.without.shape
        mean = self.without.mean(0)
        rounding = _ROUNDING * self.without.square().mean(0).max().sqrt() + 1e-30
        std = (self.without.var(0, correction=0) + rounding**2).sqrt()
        away, shift = (self.without - mean) / std, (self.mean_with - mean) / std
        spread = (away.T @ away + h * torch.eye(h).double()) / (count + h)  # shrunk by h uncorrelated draws
        toward: Tensor = torch.linalg.solve(spread, shift.T)
        return (numbers - mean) / std @ toward - (shift.T * toward).sum(0) / 2


def _simulated(observation: Observation, observed: ObservedRound, each: Tensor, key: Key) -> _Distribution:
    """The distribution of the numbers in the observed round's one message, for candidates with gradients `each` [n, d].

    A number that can be negative (a mean) is a linear function of the update; otherwise it is a length, the root of a
    quadratic form (a norm). So its value with the candidate follows from its slope, without an update for each pair of
    batch and candidate.
    """
    assert observation.auxiliary is not None
    (message,), params, setting = observed.messages, observed.model.params, observation.setting
    factor = float(update_per_gradient(setting, observed)) * weight_of(setting, message)
    own = (factor * observation.defense.plaintext_statistic(each, setting).double()).square()[:, None]
    groups = [[(number, at, each[:, at]) for number, at in group] for group in _apart(observation)]
    without, linear, lengths = [], [], []
    (x, y), images = observation.auxiliary, max(1, message.images)
    drawn = torch.from_numpy(rng.integers(key.child("records"), _BATCHES * images, len(y))).view(_BATCHES, images)
    for chunk, rows in enumerate(torch.split(drawn, max(1, _ENTRIES // (setting.dim * images)))):
        updates = _updates(observation, observed, Examples(x[rows], y[rows]), key.child("noise", chunk))
        without.append(observation.defense.plaintext_statistic(updates, setting).double())
        leaf = updates - factor * _gradients(observation, params, Examples(x[rows[:, 0]], y[rows[:, 0]]))
        rest = observation.defense.plaintext_statistic(leaf.requires_grad_(), setting)
        along = own.new_empty(len(each), len(rows), own.shape[2])
        for group in groups:
            total = rest[:, [number for number, *_ in group]].sum()
            (slope,) = torch.autograd.grad(total, leaf, retain_graph=True)
            for number, at, candidates in group:
                along[..., number] = factor * (candidates @ slope[:, at].T)
        base = rest.detach().double()
        linear.append((base + along).sum(1))
        lengths.append((base.square() + 2 * base * along + own).clamp(min=0).sqrt().sum(1))
    plain = torch.cat(without)
    signed = plain.amin(0) < 0
    return _Distribution(plain, torch.where(signed, sum(linear), sum(lengths)) / len(plain))


def _apart(observation: Observation) -> list[list[tuple[int, Tensor]]]:
    """Groups of numbers with disjoint coordinates, each number with its own, so one backward pass finds all slopes."""
    groups: list[list[tuple[int, Tensor]]] = []
    used: list[Tensor] = []
    leaf = rng.normal(_ANYWHERE, (1, observation.setting.dim)).requires_grad_()
    for number, value in enumerate(observation.defense.plaintext_statistic(leaf, observation.setting)[0]):
        (slope,) = torch.autograd.grad(value, leaf, retain_graph=True)
        on = slope[0] != 0
        free = next((row for row, others in enumerate(used) if not bool((others & on).any())), len(groups))
        if free == len(groups):
            groups.append([])
            used.append(torch.zeros_like(on))
        groups[free].append((number, on.nonzero().flatten()))
        used[free] |= on
    return groups


def _updates(observation: Observation, observed: ObservedRound, batches: Examples, key: Key) -> Tensor:
    """[m, d]: the undefended updates of clients with these records [m, b, ...], for the round's one message."""
    (message,), setting = observed.messages, observation.setting
    updates = own_updates(observation, observed, batches).sum(1).nan_to_num(0.0, 0.0, 0.0)
    noise = observation.defense.training_noise(setting, message.sender.samples)
    return updates + noise * rng.normal(key, tuple(updates.shape)) if noise else updates


def by_sets(observation: Observation, observed: ObservedRound, numbers: Tensor, key: Key) -> Tensor:
    """`Ratios` for a model in which only candidates have a notable gradient: finds which candidates add up to a number.

    The sum of the squared numbers is a quadratic form in the update, as for norms and means, and so in the set of
    members. Each set of candidates, up to `_SETS` sets, is weighed by how near its sum is to the sent sum; rounding and
    other records blur this sum (Student's t, 3 degrees of freedom). Nothing is drawn.

    Raises:
        ValueError: a message has several local steps, and the first step moves the model.
    """
    assert observation.candidates is not None
    assert observation.auxiliary is not None
    if max(message.steps for message in observed.messages) > 1:
        raise ValueError("expected messages of one local step for statistic norm, got more; use statistic gradient")
    params, setting, defense = observed.model.params, observation.setting, observation.defense
    each = _gradients(observation, params, observation.candidates).double().requires_grad_()
    (slope,) = torch.autograd.grad(defense.plaintext_statistic(each, setting).square().sum(), each)
    gram = each.detach() @ slope.T / 2
    few = Examples(observation.auxiliary.x[:_CHUNK], observation.auxiliary.y[:_CHUNK])
    others = defense.plaintext_statistic(_gradients(observation, params, few), setting).double()
    other = float(others.square().sum(1).median())
    sets = _sets(gram, max(message.images for message in observed.messages))
    chance = 0.5 / setting.participants  # probability that a client holds a candidate
    ratios, lengths = [], numbers.norm(dim=1) / update_per_gradient(setting, observed)
    for message, length in zip(observed.messages, lengths.tolist(), strict=True):
        total = (length / weight_of(setting, message)) ** 2
        blur = _EXACT * total + message.images**2 * other + 1e-30
        ratios.append(_posterior(sets, total, blur, chance, len(gram)))
    return torch.stack(ratios)


class _Sets(NamedTuple):
    """All sets of one size [m, size], and the value [m] of the quadratic form for each set."""

    members: Tensor
    values: Tensor


def _sets(gram: Tensor, largest: int) -> list[_Sets]:
    """The sets of 0, 1, ... of n candidates with Gram matrix [n, n]; sizes with too many sets are left out."""
    n = len(gram)
    sets = [_Sets(torch.empty(1, 0, dtype=torch.int64), gram.new_zeros(1))]
    while (size := len(sets)) <= min(n, largest) and (
        size == 1 or sum(math.comb(n, k) for k in range(size + 1)) <= _SETS
    ):
        members, values = sets[-1]
        last = members[:, -1] if size > 1 else torch.full((1,), -1)
        more = n - 1 - last
        rows = torch.repeat_interleave(more)
        first = (more.cumsum(0) - more)[rows]
        new = torch.arange(len(rows)) - first + last[rows] + 1
        values = values[rows] + gram[new, new] + 2 * gram[members[rows], new[:, None]].sum(1)
        sets.append(_Sets(torch.cat([members[rows], new[:, None]], 1), values))
    return sets


def _posterior(sets: list[_Sets], total: float, blur: float, chance: float, n: int) -> Tensor:
    """[n]: log likelihood ratios that a candidate is in the set whose form has the value `total`."""
    odds = math.log(chance / (1 - chance))
    logs = [size * odds - 2 * ((some.values - total) / blur).square().log1p() for size, some in enumerate(sets)]
    top = max(float(each.max()) for each in logs)
    inside, everything = torch.zeros(n, dtype=torch.float64), 0.0
    for size, (some, each) in enumerate(zip(sets, logs, strict=True)):
        weights = (each - top).exp()
        everything += float(weights.sum())
        inside.index_add_(0, some.members.flatten(), weights.repeat_interleave(size))
    outside = (everything - inside).clamp(min=1e-12 * everything)
    return inside.clamp(min=1e-12 * everything).log() - outside.log() - odds


def _gradients(observation: Observation, params: Vector, examples: Examples) -> Tensor:
    """[n, d]: gradients of single records, clipped as the defense clips them; zeros where they are not finite."""
    labels = targets_of(observation.task, examples.y, params.dtype)
    chunks = zip(torch.split(examples.x[:, None], _CHUNK), torch.split(labels[:, None], _CHUNK), strict=True)
    each = torch.cat([gradients(observation.task, params, *chunk) for chunk in chunks]).nan_to_num(0.0, 0.0, 0.0)
    clip = observation.defense.local.clip
    return each if clip is None else each * (clip / each.norm(dim=1, keepdim=True).clamp(min=clip))
