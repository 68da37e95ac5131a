"""Gradient matching: find inputs whose gradient explains each victim's message.

The shared engine of attacks that differ only in how they obtain the labels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but not listed in __all__

from leakgauge.attacks._engine.closed_form import RIDGE, Unsolvable, closed_form
from leakgauge.attacks._engine.imitation import explained_at, imitated_gradients, regressed
from leakgauge.attacks._engine.matching import Evaluation, Function, Latest, unpack
from leakgauge.attacks._engine.objective import Explains, Objective, bent, objective
from leakgauge.attacks._engine.prior import Prior, mapped, near_center
from leakgauge.attacks._engine.simulate import one_gradient, plan_of
from leakgauge.attacks._engine.tables import FirstLayer, Mixture, restore
from leakgauge.attacks._search.adam import Schedule, descend
from leakgauge.attacks._search.batches import shown
from leakgauge.attacks._search.direction import Direction
from leakgauge.attacks._search.features import CLEAN, VEILED, Features, settled
from leakgauge.attacks._search.lbfgs import Minima, Stop, minimize
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples, Guess, Message, Observation, ObservedRound, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.batch import LocalPlan
from leakgauge.harness.learn.layers import Block
from leakgauge.harness.learn.tasks import ModelTask

Start = Literal["normal", "uniform"]

_TOLERANCE = 3e-9  # a search ends at this share of the misfit of a zero gradient; single precision reaches 1e-10
_STAGE = 100.0  # factor of the messages' weight from one stage to the next
_EXPLAINED = 1e-7  # at this share, another start would find the same inputs again; soft labels often miss the tolerance
_FARTHER = (1, 2, 4, 8)  # restart numbers whose larger distances a search tries if all units are dead nearer
_LAST = 0.5  # share of the evaluations for the search after the softened ones
_AFTER = 0.125  # the same after softened searches that did not explain the messages
_UNBENT = 0.1  # size of the first steps of a search behind Adam, in units of coordinates; 0.03 and 0.3 are worse
_NEAR = 1e-5  # below this share, a stalled search has found the inputs up to the limits of single precision

_BENDS = ((0.1, 16.0), (0.03, 160.0), (0.01, 1600.0), (0.003, math.inf))
"""For each of the successive searches before the search with kinks: the width of the bends, and the messages' weight,
as their misfit for an update of zero, in nats per input entry. Wide bends with messages at full weight mislead the
search: for 16 digits behind `mlp-small`, these weights raised the SSIM from 0.53 to 0.73 behind `random-mask`, and from
0.64 to 0.81 behind `top-k`."""

_CLOSE = 1e-4
"""At this share of the misfit for an update of zero, a candidate counts as right even if its misfit exceeds that of
imitated messages: without noise, no search in single precision gets as close as these."""


def unusable(target: Tensor) -> str:
    """Why a target [d] cannot be matched; an empty string if it can."""
    if not bool(target.isfinite().all()):
        return "the gradient is not finite"
    return "" if bool(target.any()) else "the gradient is zero"


def failed(task: Task, message: Message, failure: str, evaluations: int = 0) -> Guess:
    """A guess for a failed reconstruction: zeros, with the reason."""
    x = torch.zeros(message.images, *task.input_shape)
    return Guess(x, torch.zeros(message.images, dtype=torch.int64), torch.inf, evaluations, failure)


def alike(targets: Tensor, kinds: Iterable[tuple[int, ...]]) -> list[tuple[tuple[int, ...], list[int]]]:
    """The kinds in order, each with its victims, which are attacked in one batch; without unusable targets [n, d]."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, (target, kind) in enumerate(zip(targets, kinds, strict=True)):
        if not unusable(target):
            groups.setdefault(kind, []).append(i)
    return sorted(groups.items())


def kinds_of(rounds: Sequence[ObservedRound]) -> list[tuple[int, ...]]:
    """Number of images and users of each victim, and its steps in each round: equal for victims attacked together."""
    each = zip(*(observed.messages for observed in rounds), strict=True)
    return [(own[0].images, own[0].users, *(message.steps for message in own)) for own in each]


def only(observed: ObservedRound, victims: Sequence[int]) -> ObservedRound:
    """The round with the messages of these victims."""
    return observed._replace(messages=tuple(observed.messages[i] for i in victims))


def in_order(
    task: Task, messages: Sequence[Message], targets: Tensor, guesses: Mapping[int, Guess]
) -> tuple[Guess, ...]:
    """One guess per victim; a victim without one has an unusable target."""
    each = enumerate(zip(messages, targets, strict=True))
    return tuple(guesses.get(i) or failed(task, message, unusable(target)) for i, (message, target) in each)


def searched(
    task: Task, messages: Sequence[Message], x: Tensor, y: Tensor, values: Sequence[float], used: Sequence[int]
) -> list[Guess]:
    """The guesses of a search that ended at inputs x [n, b, ...] and labels y [n, b] after `used` evaluations."""
    return [
        Guess(x[i], y[i], values[i], used[i])
        if math.isfinite(values[i])
        else failed(task, message, "no restart had a finite objective", used[i])
        for i, message in enumerate(messages)
    ]


@dataclass(frozen=True)
class Search:
    """The budget, starts and objective of a search.

    Attributes:
        restarts: maximum number; a victim whose target is explained is not restarted. If steps are followed or a
            message has several users, each restart takes the labels in another order, because the true order is
            unknown.
        evaluations: maximum number of evaluations of the objective and its gradient, for one victim and restart.
        start: distribution of the first dummy inputs, standard normal or uniform in [0, 1], unless the prior has a
            center.
        explains: how well a candidate explains the messages.
        decrease: least share of the objective that the last evaluations must gain, see `Stop`. With 3e-2, the slowest
            of the undefended photographs still gains 0.1; under noise, this saves two thirds of the evaluations, which
            would only fit the noise.
        ease: the messages' weighted misfit for an update of zero in the first stage; the weight grows in stages up to
            1. A likelihood without noise is so steep that a random-start search ignores the prior.
        warm: evaluations of each preliminary search, in every second restart, if the model has kinks and labels are
            known. Its steps of one size cross points at which a search with decreasing values stops. It is a search by
            features where these are known (`Features`), and a search by direction where they are unknown or noise hides
            much of them. If both run, the start that explains the messages better is used.
        solve: whether to also try the closed form's image, if it covers the model and the message has one image, and
            regressed inputs.
        table: distribution of the records of a table, by which the found records are restored column by column; None:
            no table.
    """

    restarts: int
    evaluations: int
    start: Start
    explains: Explains = field(default_factory=Explains)
    decrease: float = 3e-2
    ease: float = math.inf
    warm: int = 0
    solve: bool = False
    table: Mixture | None = None

    def __post_init__(self) -> None:
        for name, least in (("restarts", 1), ("evaluations", 1), ("warm", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"expected {name} >= {least}, got {name}={getattr(self, name)}")
        if not self.ease > 0:
            raise ValueError(f"expected ease > 0, got ease={self.ease}")
        if self.start not in ("normal", "uniform"):
            raise ValueError(f"expected start 'normal' or 'uniform', got {self.start!r}")


def match(
    observation: Observation,
    targets: Tensor,
    labels: Sequence[Tensor] | None,
    search: Search,
    key: Key,
    *,
    rounds: int | None = 1,
) -> tuple[Guess, ...]:
    """One guess per victim.

    Args:
        targets: [n, d], see `received_gradients`.
        labels: [b] int64 of each victim; None: the search includes soft labels.
        key: draws the starts; a victim's starts do not depend on the other victims.
        rounds: how many of the observed rounds to explain; None: all.

    Guarantees:
        Each guess is the restart with the lowest finite objective, or regressed.
        A target that is zero or not finite gives a failure, without any evaluation.
    """
    placed = observation.placed()
    observed_rounds, device = placed.observed_rounds[:rounds], observation.device
    messages, guesses = observed_rounds[0].messages, dict[int, Guess]()
    for _, victims in alike(targets, kinds_of(observed_rounds)):
        known = None if labels is None else torch.stack([labels[i] for i in victims]).to(device)
        chosen = tuple(only(observed, victims) for observed in observed_rounds)
        sought = settled(placed, chosen[0], targets[victims].to(chosen[0].model.params))
        group = _Group(placed, chosen, sought, known, search)
        guesses |= zip(victims, group.run(key), strict=True)
    return in_order(observation.task, messages, targets, guesses)


@dataclass(frozen=True, eq=False)
class _Group:
    """Victims with equal numbers of images, users and steps, which are attacked in one batch.

    targets: [n, d]. labels: [n, b] int64 or None.
    """

    observation: Observation
    observed_rounds: tuple[ObservedRound, ...]
    targets: Tensor
    labels: Tensor | None
    search: Search

    def run(self, key: Key) -> list[Guess]:
        infinite = self.targets.new_full((len(self.targets),), torch.inf)
        best = Minima(self._starts(key, 0), infinite, torch.zeros_like(infinite, dtype=torch.int64))
        labels, known = self._by_features(best, key.child("hidden"))
        goal, rows = self._goal(labels), known.nonzero()[:, 0]
        if len(rows):
            best.value[rows] = goal.at(math.inf)(self._coordinates(best.x[rows]), rows).value
        self._try_closed_form(best, goal.at(math.inf))
        explained = _share(_EXPLAINED, goal)
        pending = ((best.value > explained) & ~known).nonzero()[:, 0]
        begun = None
        if len(pending) and (soft := self._soft):
            begun, used = self._begin(key, 0, labels, goal, pending)
            best.evaluations[pending] += used
            left = ~self._explained_behind(soft, begun, best, goal, pending, key.child("softened"))
            left |= bent(self.observation, self.observed_rounds[0])  # its misfit for no update is no measure
            begun, pending = begun[left], pending[left]
        for restart in range(self.search.restarts if len(pending) else 0):
            minima, tried = self._restart(key, restart, goal, pending, begun if restart == 0 else None)
            better = minima.value < best.value[pending]
            rows = pending[better]
            best.x[rows], best.value[rows] = minima.x[better], minima.value[better]
            if labels is not None and tried is not None:
                labels = labels.index_put((rows,), tried[rows])
            best.evaluations[pending] += minima.evaluations
            pending = pending[best.value[pending] > explained[pending]]
            if not len(pending):
                break
        if self.search.solve and len(pending):
            replace(self, labels=labels)._regress(best, pending, key.child("regression"))
        if self.search.table is not None:
            self._restore(best, labels, self.search.table, key.child("table"))
        x, logits = unpack(self.observation.task, best.x.cpu(), self._message.images)
        if labels is None:
            task = self.observation.task
            labels = logits.argmax(dim=2) if not task.numbers else logits[..., 0] if task.classes == 1 else logits
        numbers = best.value.tolist(), best.evaluations.tolist()
        return searched(self.observation.task, self.observed_rounds[0].messages, x, labels.cpu(), *numbers)

    @property
    def _message(self) -> Message:
        return self.observed_rounds[0].messages[0]

    @property
    def _plan(self) -> LocalPlan:
        return plan_of(self.observation.setting, self.observed_rounds[0].lr, self._message.steps)

    @property
    def _prior(self) -> Prior | None:
        """The prior if preliminary searches may use it: of one gradient, with known labels."""
        prior, used = self.search.explains.prior, self.search.warm and self._is_gradient and self.labels is not None
        return prior if used and prior is not None and prior.centered else None

    @property
    def _one_image(self) -> bool:
        return (self._message.images, self._message.users) == (1, 1)

    @property
    def _is_gradient(self) -> bool:
        return self._message.users == 1 and one_gradient(self._plan, self._message.images)

    def _goal(self, labels: Tensor | None) -> Objective:
        return objective(self.observation, self.observed_rounds, labels, self.search.explains)

    def _restore(self, best: Minima, labels: Tensor | None, mixture: Mixture, key: Key) -> None:
        layer = FirstLayer.of(self.observation.task, self.targets) if self._one_image else None
        records = best.x.view(len(best.x), self._message.images, -1).nan_to_num(0.0)
        settled = restore(self._goal(labels).messages, mixture, records, layer, key)
        best.x[:], best.value[:] = settled.x.flatten(1), settled.value
        best.evaluations[:] += settled.evaluations

    def _by_features(self, best: Minima, key: Key) -> tuple[Tensor | None, Tensor]:
        """Store the images of batches whose gradients show the features of at least half of them; the mean for others.

        Returns all labels [n, b], and which batches these are, [n]. The sum of the gradients is not used: it misleads
        the search, to an SSIM of 0.57 instead of 0.60.
        """
        task, labels, prior, first = self.observation.task, self.labels, self._prior, self.observed_rounds[0]
        done, params, images = torch.zeros_like(best.value, dtype=torch.bool), first.model.params, self._message.images
        features = None if images == 1 or prior is None else Features.of(task, params, self.targets[:1])
        if features is None or labels is None or prior is None or (known := self.observation.auxiliary) is None:
            return labels, done

        def imitate(x: Tensor, y: Tensor, key: Key) -> Tensor:
            alone = first._replace(messages=first.messages[:1])
            return imitated_gradients(self.observation, alone, Examples(x[None], y[None]), 0, key)[0].cpu()

        targets, labels = self.targets.cpu(), labels.clone()
        all_shown = enumerate(shown(task, params.cpu(), targets, images, known, imitate, key))
        each = [(row, x, own) for row, (x, own) in all_shown if 2 * len(own) >= images]
        if each:
            blank = torch.zeros_like(self._coordinates(best.x[:1]).view(images, -1))
            x, sizes = torch.cat([x for _, x, _ in each]).to(blank), [len(own) for *_, own in each]
            starts = blank.new_zeros(len(x), blank.shape[1])
            minima = features.of_batches(x).search(prior, starts, self.search.warm, key.child("features"))
            parts = zip(each, torch.split(minima.x, sizes), torch.split(minima.evaluations, sizes), strict=True)
            for (row, _, own), found, used in parts:
                z = torch.cat([found, blank[len(own) :]])
                best.x[row], done[row], best.evaluations[row] = prior.inputs(z).flatten(), True, used.sum()
                rest = Counter(labels[row].tolist()) - Counter(own.tolist())
                labels[row] = torch.tensor([*own.tolist(), *rest.elements()][:images])
        return labels, done

    def _try_closed_form(self, best: Minima, function: Function) -> None:
        """Store the closed form's images in `best`, where it has a solution."""
        params = self.observed_rounds[0].model.params.cpu()
        if not (self.search.solve and self._one_image) or self.labels is None or not bool(params.isfinite().all()):
            return
        if (form := closed_form(self.observation.task, params, RIDGE)) is None:
            return
        for row, target in enumerate(self.targets.cpu()):
            try:
                x = form.solve(target.double()).to(best.x).flatten()
            except (Unsolvable, LinAlgError):
                continue
            if bool(x.isfinite().all()):
                value = function(self._coordinates(x[None]), torch.tensor([row], device=x.device)).value[0]
                best.evaluations[row] += 1
                if bool(value.isfinite()):
                    best.x[row], best.value[row] = x, value

    @property
    def _soft(self) -> list[tuple[Task, float]]:
        """The softened task and the messages' weight for each of the successive searches; empty: no such searches."""
        task = self.observation.task
        if self._prior is None:
            return []
        stages = [(softened(task, width), nats * math.prod(task.input_shape)) for width, nats in _BENDS]
        return [(soft, strength) for soft, strength in stages if soft is not None]

    def _explained_behind(
        self, soft: list[tuple[Task, float]], start: Tensor, best: Minima, goal: Objective, rows: Tensor, key: Key
    ) -> Tensor:
        """Search with softened layers, and store explained victims in `best`; returns [m], which were explained."""
        search, labels, prior = self.search, self.labels, self.search.explains.prior
        assert labels is not None
        assert prior is not None
        z, least = start, _share(_TOLERANCE, goal)
        for task, nats in soft:
            soft_goal = replace(self, observation=replace(self.observation, task=task))._goal(labels).at(nats)
            stop = Stop(max(1, search.warm // 2 // len(soft)), least[rows], decrease=search.decrease)
            z, _, used = minimize(_Subset(soft_goal, rows), z, stop)
            best.evaluations[rows] += used
        minima = self._staged(goal, rows, z, int(_LAST * search.evaluations), lambda strength: least)
        best.evaluations[rows] += minima.evaluations
        x = self._mapped(minima.x, prior.inputs)
        done = self._explained(goal, x, rows, key) & (minima.value < best.value[rows])
        best.x[rows[done]], best.value[rows[done]] = x[done], minima.value[done]
        return done

    def _explained(self, goal: Objective, x: Tensor, rows: Tensor, key: Key) -> Tensor:
        """[m]: whether inputs x [m, D] explain the messages as well as inputs explain their own imitated messages."""
        assert self.labels is not None
        bound, labels = _share(_CLOSE, goal)[rows], self.labels[rows]
        if self._is_gradient:
            images = x.view(*labels.shape, *self.observation.task.input_shape).nan_to_num(0.0)
            chosen = [only(observed, rows.tolist()) for observed in self.observed_rounds]
            bound = bound.maximum(explained_at(self.observation, chosen, images, labels, self.search.explains, key))
        return goal.messages(x, rows).value <= bound

    def _regress(self, best: Minima, rows: Tensor, key: Key) -> None:
        """Regress the inputs behind messages that stay unexplained, if the model has blocks or mixes: searches fail."""
        (seen, labels), task = (self.observation, self.labels), self.observation.task
        layers = task.structure.layers if isinstance(task, ModelTask) and task.structure is not None else ()
        weak = task.mixes or any(isinstance(layer, Block) for layer in layers)
        if not weak or labels is None or seen.auxiliary is None or len(seen.auxiliary.x) < 2:
            return
        goal = self._goal(labels)
        rows = rows[~self._explained(goal, best.x[rows], rows, key.child("imitated"))]
        for _, at in alike(self.targets[rows], map(tuple, labels[rows].tolist())):
            own = rows[at]
            chosen = [only(observed, own.tolist()) for observed in self.observed_rounds]
            x = regressed(seen, chosen, labels[own[0]].cpu(), key)[0].flatten(1).to(best.x)
            best.x[own], best.value[own] = x, goal.at(math.inf)(self._coordinates(x), own).value

    def _restart(
        self, key: Key, restart: int, goal: Objective, rows: Tensor, begun: Tensor | None
    ) -> tuple[Minima, Tensor | None]:
        """The minima of the victims `rows`, with all evaluations of this restart, and the restart's labels [n, b].

        begun: [m, D], the start points of softened searches that did not succeed; None: start points are still to be
            found.
        """
        labels, explains, images = self.labels, self.search.explains, self._message.images
        tolerance, evaluations = _share(_TOLERANCE, goal), self.search.evaluations
        # the order of the labels of several steps or users is unknown: each restart takes another
        if labels is not None and restart and images > 1 and (explains.unroll or self._message.users > 1):
            labels = labels[:, torch.from_numpy(rng.permutation(key.child("order", restart), images))]
            goal = self._goal(labels)
        if begun is None:
            z, used = self._begin(key, restart, labels, goal, rows)
        else:
            z, used, evaluations = begun, torch.zeros_like(rows), int(_AFTER * evaluations)
        minima = self._staged(goal, rows, z, evaluations, lambda strength: tolerance.clamp(max=_TOLERANCE * strength))
        used = used + minima.evaluations
        if explains.prior is not None:
            minima = minima._replace(x=self._mapped(minima.x, explains.prior.inputs))
        # the objective is only a distance, which is zero at the truth
        if explains.kind == "l2" and explains.prior is None and not explains.unroll:
            minima = self._refined(minima, labels, rows, tolerance)
            used = used + minima.evaluations
        return minima._replace(evaluations=used), labels

    def _begin(
        self, key: Key, restart: int, labels: Tensor | None, goal: Objective, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Start points [m, D] of a restart for the victims `rows`, and their evaluations [m] so far."""
        prior = self.search.explains.prior
        z, used = self._coordinates(self._starts(key, restart)[rows]), torch.zeros_like(rows)
        if prior is not None and prior.centered:
            z = self._awake(prior, z, restart, goal, rows)
        if labels is None or prior is None or not self.search.warm or restart % 2 or self.observation.task.smooth:
            return z, used
        features = None
        if prior.centered and self._one_image:
            features = Features.of(self.observation.task, self.observed_rounds[0].model.params, self.targets[rows])
        if features is None:
            z, used = self._by_direction(prior, z, labels, rows)
        else:
            z, used = self._by_known(features, prior, z, labels, goal, rows, key.child("features", restart))
        if bent(self.observation, self.observed_rounds[0]):
            minima = descend(_Subset(goal.at(math.inf), rows), z, Schedule(self.search.warm, _UNBENT, signed=False))
            z, used = _finite(minima, z), used + minima.evaluations
        return z, used

    def _by_known(
        self, features: Features, prior: Prior, begin: Tensor, labels: Tensor, goal: Objective, rows: Tensor, key: Key
    ) -> tuple[Tensor, Tensor]:
        """Points that explain the features, or the direction of noisy gradients, and the evaluations [m]."""
        starts = features.search(prior, begin, self.search.warm, key)
        z, used = _finite(starts, begin), starts.evaluations
        noisy = (features.error > (VEILED if self._soft else CLEAN)).nonzero()[:, 0]
        if len(noisy):
            other, more = self._by_direction(prior, begin[noisy], labels, rows[noisy])
            function, used[noisy] = _Subset(goal.at(math.inf), rows[noisy]), used[noisy] + more + 2
            each = torch.arange(len(noisy), device=noisy.device)
            lower = function(other, each).value < function(z[noisy], each).value
            z[noisy[lower]] = other[lower]
        return z, used

    def _awake(self, prior: Prior, z: Tensor, restart: int, goal: Objective, rows: Tensor) -> Tensor:
        """Start points near the center, or farther away where all units are dead and the messages have no slope."""
        starts = near_center(z, restart)
        for farther in () if self.observation.task.smooth else _FARTHER:
            asleep = (goal.messages(self._mapped(starts, prior.inputs), rows).gradient == 0).all(1)
            if not bool(asleep.any()):
                break
            starts[asleep] = near_center(z[asleep], restart + farther)
        return starts

    def _by_direction(self, prior: Prior, z: Tensor, labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Points that explain the direction of the gradients, searched from starts [m, D], and the evaluations [m]."""
        message, plan, unroll = self._message, self._plan, self.search.explains.unroll
        followed = unroll and message.users == 1 and not one_gradient(plan, message.images)
        direction = Direction.of(prior, max(1, self.search.warm // (2 if self._soft else 1)))
        given = self.targets[rows], labels[rows], z[:, None]
        minima = direction.search(self.observation, *given, plan if followed else None)
        return _finite(minima, z), minima.evaluations

    def _coordinates(self, x: Tensor) -> Tensor:
        prior = self.search.explains.prior
        return x if prior is None else self._mapped(x, prior.coordinates)

    def _mapped(self, rows: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows with `change` applied to each image's inputs or coordinates; searched labels stay unchanged."""
        images = self._message.images
        return mapped(rows, images, 0 if self.labels is not None else images * self.observation.task.classes, change)

    def _refined(self, minima: Minima, labels: Tensor | None, rows: Tensor, tolerance: Tensor) -> Minima:
        """The minima after searches that stalled near zero continue in float64; `evaluations` counts only these."""
        spare = self.search.evaluations - minima.evaluations
        near = (minima.value > tolerance[rows]) & (minima.value <= _NEAR * tolerance[rows] / _TOLERANCE) & (spare > 0)
        used = torch.zeros_like(minima.evaluations)
        if not bool(near.any()):
            return minima._replace(evaluations=used)
        exact = tuple(s._replace(model=s.model._replace(params=s.model.params.double())) for s in self.observed_rounds)
        distance = replace(self, observed_rounds=exact)._goal(labels).at(math.inf)
        most, least = int(spare[near].max()), tolerance[rows[near]].double()
        stop = Stop(most, least, decrease=self.search.decrease, each=spare[near])
        better = minimize(_Subset(distance, rows[near]), minima.x[near].double(), stop)
        used[near] = better.evaluations
        x, value = minima.x.clone(), minima.value.clone()
        x[near], value[near] = better.x.to(x.dtype), better.value.to(value.dtype)
        return minima._replace(x=x, value=value, evaluations=used)

    def _staged(
        self, goal: Objective, rows: Tensor, z: Tensor, evaluations: int, least: Callable[[float], Tensor]
    ) -> Minima:
        """The minima from z [m, D] of searches in stages of growing weight, for the victims `rows` [m].

        A victim's stages depend only on its own misfit, and share the evaluations.

        Args:
            least: the tolerances [n] of a stage, by its weight.
        """
        minima = Minima(z.clone(), z.new_zeros(len(z)), torch.zeros_like(rows))
        stages = [self._strengths(whole) for whole in goal.nothing[rows].tolist()]
        for strengths in sorted(set(stages)):
            at = torch.tensor([i for i, own in enumerate(stages) if own == strengths], device=rows.device)
            x, victims = z[at], rows[at]
            for strength in strengths:
                most = max(1, evaluations // len(strengths))
                stop = Stop(most, least(strength)[victims], decrease=self.search.decrease)
                x, minima.value[at], used = minimize(_Subset(goal.at(strength), victims), x, stop)
                minima.evaluations[at] += used
            minima.x[at] = x
        return minima

    def _strengths(self, whole: float) -> tuple[float, ...]:
        """The messages' weight in each stage of a search; in the last stage, their full weight."""
        strengths, strength = [], self.search.ease
        while strength * _STAGE < whole:
            strengths.append(strength)
            strength *= _STAGE
        return (*strengths, math.inf)

    def _starts(self, key: Key, restart: int) -> Tensor:
        """[n, D]: each victim's first dummy inputs, and label logits if labels are searched too."""
        draw = rng.normal if self.search.start == "normal" else rng.uniform
        task, rows = self.observation.task, []
        for message in self.observed_rounds[0].messages:
            own = key.child("start", message.sender.number, restart)
            x = draw(own.child("inputs"), (message.images, *task.input_shape)).flatten()
            logits = rng.normal(own.child("labels"), (message.images, task.classes)).flatten()
            rows.append(x if self.labels is not None else torch.cat([x, logits]))
        return torch.stack(rows).to(self.targets)


def _share(share: float, goal: Objective) -> Tensor:
    """[n]: this share of the misfit for updates of zero; -inf where this misfit is not positive."""
    return torch.where(goal.nothing > 0, share * goal.nothing, -torch.inf)


def _finite(minima: Minima, start: Tensor) -> Tensor:
    """[m, D]: the minima, or the start where no value is finite."""
    return torch.where(minima.value.isfinite()[:, None], minima.x, start)


@dataclass(frozen=True, eq=False)
class _Subset:
    """A function of some of the instances, renumbered."""

    function: Function
    rows: Tensor
    _numbers: Latest[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_numbers", Latest(self.rows.__getitem__))

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        return self.function(candidates, self._numbers(instances))


def softened(task: Task, width: float) -> Task | None:
    """The task with bends of this width instead of kinks.

    None: it has kinks other than ReLU's, or no kinks; or residual blocks or norms, behind which softening was not
    measured.
    """
    if not isinstance(task, ModelTask) or (task.structure is not None and not task.structure.is_chain):
        return None
    soft = task.model.apply.softened(width)
    if task.model.apply.smooth or not soft.smooth:
        return None
    return replace(task, model=replace(task.model, apply=soft))
