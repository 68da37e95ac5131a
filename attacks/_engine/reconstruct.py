"""Gradient matching: find inputs whose gradient explains what each victim sent.

The engine of the attacks that differ only in where the labels come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but not listed in __all__

from leakgauge.attacks._engine.failure import failed, unusable
from leakgauge.attacks._engine.matching import Evaluation, Function, unpack
from leakgauge.attacks._engine.objective import Explains, objective
from leakgauge.attacks._search.direction import Direction
from leakgauge.attacks._search.lbfgs import Minima, Stop, minimize
from leakgauge.attacks._solve.closed_form import RIDGE, Unsolvable, closed_form
from leakgauge.attacks._solve.layerwise import Underdetermined
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Guess, Observation, Sighting
from leakgauge.harness.core.rng import Key

Start = Literal["normal", "uniform"]

_TOLERANCE = 3e-9
"""Share of a zero gradient's misfit at which a search ends: of 24 photographs behind the LeNet of DLG the raw MSE was
then 3e-6 to 5e-4. Single precision goes on to about 1e-10, for half as many evaluations again."""

_STAGE = 100.0
"""How much more the messages weigh from one stage to the next."""

_EXPLAINED = 1e-7
"""Share at which a target counts as explained, so that another start would find the same inputs again. Above the
tolerance, which soft labels often miss: they reach a corner of the simplex ever more slowly."""

_NEAR = 1e-5
"""Share below which a search that stalls has found the inputs, but for digits that single precision does not have."""


@dataclass(frozen=True)
class Search:
    """How hard, and from where, is searched.

    Attributes:
        restarts: at most; a victim whose target is explained is not started again. Where steps are followed, or users
            told apart, each has the labels in another order: which label belongs to which step is not known.
        evaluations: of the objective and its gradient, for one victim and restart, at most.
        start: law of the first dummy inputs: standard normal, or uniform in [0, 1].
        explains: how a candidate is held against what was received.
        decrease: share of the objective that the last evaluations must have won, see `Stop`. 3e-2: the slowest of
            the undefended photographs still wins 0.1; against noise it saves two thirds that would fit the noise.
        ease: what the messages weigh at first for an update of zero; then in stages up to what they do weigh. A
            likelihood without noise is so steep that a search from a random start never comes to heed the prior.
        warm: evaluations of a search by direction that comes first where the model has kinks and labels are known, in
            every second restart; its steps of one size cross what stops steps that must lower the value.
        solve: the closed form's image, where it covers the model and a message is of one image, is a candidate too.
    """

    restarts: int
    evaluations: int
    start: Start
    explains: Explains = field(default_factory=Explains)
    decrease: float = 3e-2
    ease: float = math.inf
    warm: int = 0
    solve: bool = False

    def __post_init__(self) -> None:
        for name, value in (("restarts", self.restarts), ("evaluations", self.evaluations)):
            if value < 1:
                raise ValueError(f"expected {name} >= 1, got {name}={value}")
        if self.warm < 0:
            raise ValueError(f"expected warm >= 0, got warm={self.warm}")
        if not self.ease > 0:
            raise ValueError(f"expected ease > 0, got ease={self.ease}")
        if self.start not in ("normal", "uniform"):
            raise ValueError(f"expected start 'normal' or 'uniform', got {self.start!r}")


def match(
    seen: Observation,
    targets: Tensor,
    labels: Sequence[Tensor] | None,
    search: Search,
    key: Key,
    *,
    rounds: int | None = 1,
) -> tuple[Guess, ...]:
    """One guess a victim.

    Args:
        targets: [n, d], see `received_gradients`.
        labels: [b] int64 of each victim; None: soft labels are searched together with the inputs.
        key: draws the starts; those of a victim do not depend on the others.
        rounds: how many of those that are seen are explained; None: all.

    Guarantees:
        The restart with the lowest objective is told, never one that is not finite.
        A target that is zero or not finite is a failure, and costs nothing.
    """
    sightings = seen.sightings[:rounds]
    messages = sightings[0].messages
    guesses = [failed(seen.task, message, unusable(target)) for message, target in zip(messages, targets, strict=True)]
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, guess in enumerate(guesses):
        if guess.failure == "":
            steps = (sighting.messages[i].steps for sighting in sightings)
            alike.setdefault((messages[i].images, messages[i].users, *steps), []).append(i)
    for _, victims in sorted(alike.items()):
        known = None if labels is None else torch.stack([labels[i] for i in victims])
        theirs = tuple(s._replace(messages=tuple(s.messages[i] for i in victims)) for s in sightings)
        for i, guess in zip(victims, _Group(seen, theirs, targets[victims], known, search).run(key), strict=True):
            guesses[i] = guess
    return tuple(guesses)


@dataclass(frozen=True, eq=False)
class _Group:
    """Victims with equally many images, users and steps, attacked side by side.

    targets: [n, d]. labels: [n, b] int64 or None.
    """

    seen: Observation
    sightings: tuple[Sighting, ...]
    targets: Tensor
    labels: Tensor | None
    search: Search

    def run(self, key: Key) -> list[Guess]:
        """All restarts; the best of each victim."""
        messages, task = self.sightings[0].messages, self.seen.task
        n = len(messages)
        labels = self.labels
        explained_by = objective(self.seen, self.sightings, labels, self.search.explains)
        nothing = explained_by.nothing
        # a negative log-likelihood below zero has no natural end
        tolerance, explained = (
            torch.where(nothing > 0, share * nothing, -torch.inf) for share in (_TOLERANCE, _EXPLAINED)
        )
        best = Minima(self._starts(key, 0), nothing.new_full((n,), torch.inf), torch.zeros(n, dtype=torch.int64), ())
        strengths = self._strengths(float(nothing.max()))
        self._solved(best, explained_by.at(math.inf))
        pending = (best.value > explained).nonzero()[:, 0]
        for restart in range(self.search.restarts if len(pending) else 0):
            order = self._order(key, restart)
            mine = self.labels
            if mine is not None and order is not None:
                mine = mine[:, order]
                explained_by = objective(self.seen, self.sightings, mine, self.search.explains)
            x, used = self._begin(key, restart, mine, pending)
            for strength in strengths:
                least = tolerance[pending].clamp(max=_TOLERANCE * strength)
                stop = Stop(self.search.evaluations // len(strengths), least, decrease=self.search.decrease)
                found = minimize(_Subset(explained_by.at(strength), pending), x, stop)
                x, used = found.x, used + found.evaluations
            if self._to_zero:
                found = self._refined(found, mine, pending, tolerance)
                used = used + found.evaluations
            better = found.value < best.value[pending]
            rows = pending[better]
            best.x[rows], best.value[rows] = found.x[better], found.value[better]
            if labels is not None and mine is not None:
                labels = labels.index_put((rows,), mine[rows])
            best.evaluations[pending] += used
            pending = pending[best.value[pending] > explained[pending]]
            if not len(pending):
                break
        x, logits = unpack(task, best.x, messages[0].images)
        labels = logits.argmax(dim=2) if labels is None else labels
        return [
            Guess(x[i], labels[i], float(best.value[i]), int(best.evaluations[i]))
            if best.value[i].isfinite()
            else failed(task, messages[i], "no restart had a finite objective", int(best.evaluations[i]))
            for i in range(n)
        ]

    def _solved(self, best: Minima, whole: Function) -> None:
        """Put the closed form's images, as far as there are any, where the best ones are kept."""
        task, params, first = self.seen.task, self.sightings[0].model.params, self.sightings[0].messages[0]
        if not self.search.solve or self.labels is None or (first.images, first.users) != (1, 1):
            return
        form = closed_form(task, params, RIDGE) if bool(params.isfinite().all()) else None
        for row, target in enumerate(self.targets if form is not None else ()):
            assert form is not None
            try:
                x = form.solve(target.double()).to(params.dtype).flatten()
            except (Unsolvable, Underdetermined, LinAlgError):
                continue
            if bool(x.isfinite().all()):
                value = whole(x[None], torch.tensor([row])).value[0]
                best.evaluations[row] += 1
                if bool(value.isfinite()):
                    best.x[row], best.value[row] = x, value

    def _begin(self, key: Key, restart: int, labels: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Where a restart of the victims `rows` begins, [m, D], and the evaluations [m] that this took."""
        x, none = self._starts(key, restart)[rows], torch.zeros(len(rows), dtype=torch.int64)
        if labels is None or not self.search.warm or restart % 2 or self.seen.task.smooth:
            return x, none
        found = Direction(self.search.warm).search(self.seen, self.targets[rows], labels[rows], x[:, None])
        return torch.where(found.value.isfinite()[:, None], found.x, x), found.evaluations

    @property
    def _to_zero(self) -> bool:
        """Whether the objective is a distance alone, which the truth would make zero."""
        explains = self.search.explains
        return explains.kind == "l2" and explains.prior is None and not explains.unroll

    def _refined(self, found: Minima, labels: Tensor | None, rows: Tensor, tolerance: Tensor) -> Minima:
        """What the victims `rows` found, those that stalled near zero for want of digits gone on with in double.

        The evaluations are those of this alone.
        """
        spare = self.search.evaluations - found.evaluations
        near = (found.value > tolerance[rows]) & (found.value <= _NEAR * tolerance[rows] / _TOLERANCE) & (spare > 0)
        used = torch.zeros_like(found.evaluations)
        if not bool(near.any()):
            return found._replace(evaluations=used)
        exact = tuple(s._replace(model=s.model._replace(params=s.model.params.double())) for s in self.sightings)
        distance = objective(self.seen, exact, labels, self.search.explains).at(math.inf)
        stop = Stop(int(spare[near].min()), tolerance[rows[near]].double(), decrease=self.search.decrease)
        better = minimize(_Subset(distance, rows[near]), found.x[near].double(), stop)
        used[near] = better.evaluations
        x, value = found.x.clone(), found.value.clone()
        x[near], value[near] = better.x.to(x.dtype), better.value.to(value.dtype)
        return found._replace(x=x, value=value, evaluations=used)

    def _strengths(self, whole: float) -> list[float]:
        """How strongly the messages weigh in each stage of a search; at last as much as they do."""
        strengths, strength = [], self.search.ease
        while strength * _STAGE < whole:
            strengths.append(strength)
            strength *= _STAGE
        return [*strengths, math.inf]

    def _order(self, key: Key, restart: int) -> Tensor | None:
        """The order of the labels, which says in which step each is taken: another in every restart; None: as it is."""
        message = self.sightings[0].messages[0]
        if restart == 0 or message.images == 1 or not (self.search.explains.unroll or message.users > 1):
            return None
        return torch.from_numpy(rng.permutation(key.child("order", restart), message.images))

    def _starts(self, key: Key, restart: int) -> Tensor:
        """[n, D]: every victim's first dummy inputs, and label logits where those are searched too."""
        draw = rng.normal if self.search.start == "normal" else rng.uniform
        task, messages = self.seen.task, self.sightings[0].messages
        rows = []
        for message in messages:
            mine = key.child("start", message.sender.number, restart)
            x = draw(mine.child("inputs"), (message.images, *task.input_shape)).flatten()
            logits = rng.normal(mine.child("labels"), (message.images, task.classes)).flatten()
            rows.append(x if self.labels is not None else torch.cat([x, logits]))
        return torch.stack(rows)


@dataclass(frozen=True, eq=False)
class _Subset:
    """A function of some of the instances, numbered anew."""

    function: Function
    rows: Tensor

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        return self.function(candidates, self.rows[instances])
