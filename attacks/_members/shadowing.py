"""Shadow models, which the attacker trains on known records to learn how training on a record changes a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from leakgauge.attacks._engine.shadows import Recipe, halves, train_shadows
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Attack, Examples, Membership, Observation, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

_CHUNK = 1024  # number of records evaluated at once

Mode = Literal["online", "offline"]
"""Whether shadow models may train on the candidates."""


class Shadowing(NamedTuple):
    """The shadow models and their training records.

    Attributes:
        models: [m, d], the shadow models that did not diverge.
        pool: p records; each model was trained on some of them.
        inside: [m, p] bool, which model was trained on which record.
        candidates: [m, n] bool, which model was trained on which candidate; all False if the pool has no candidates.
        aside: auxiliary records outside the pool.
    """

    models: Tensor
    pool: Examples
    inside: Tensor
    candidates: Tensor
    aside: Examples


class ByShadows(Attack):
    """The common part of membership attacks with shadow models."""

    kind: ClassVar[str] = "membership"
    mode: Mode = "offline"
    shadows: int
    simulate: bool

    def __post_init__(self) -> None:
        """Refuse an unknown mode or too few shadows for it."""
        if self.mode not in get_args(Mode):
            raise ValueError(f"expected mode 'online' or 'offline', got {self.mode!r}")
        least = 2 if self.mode == "online" else 1
        if self.shadows < least:
            raise ValueError(f"expected shadows >= {least}, got shadows={self.shadows}")

    @property
    def aware(self) -> bool:
        """True if the shadows pass through the defense."""
        return self.simulate

    @property
    def needs(self) -> frozenset[str]:
        """The final model, the candidates and auxiliary data."""
        return frozenset({"final", "candidates", "auxiliary"})

    @abstractmethod
    def scores(self, task: Task, model: Vector, candidates: Examples, trained: Shadowing) -> Tensor:
        """[n]: the score of each candidate, from the attacked model and the shadow models."""

    def run(self, observation: Observation, key: Key) -> Membership:
        """One score per candidate, see `scores`."""
        assert observation.final is not None
        assert observation.candidates is not None
        trained = shadow(observation, key, runs=self.shadows, online=self.mode == "online", simulate=self.simulate)
        return Membership(self.scores(observation.task, observation.final, observation.candidates, trained))


def shadow(observation: Observation, key: Key, *, runs: int, online: bool, simulate: bool) -> Shadowing:
    """Train `runs` models as the federation trains, each on a random part of a pool.

    The pool has twice as many records as the federation is known to have: its clients times the records of the smallest
    client. Online, it holds all candidates, then random auxiliary records; offline, auxiliary records only. Each model
    trains on as many records as the federation, which is half of the pool, or less with many candidates. With too few
    auxiliary records, the pool is smaller, and a model trains on half of it, but on at least one record per client; it
    then overfits more than the attacked model.

    A model's part is a set of places in the pool, so another order of the candidates assigns them to other models.

    Args:
        simulate: whether the models' updates pass through the defense, as in the federation.

    Raises:
        ValueError: the pool has no more records than the federation has clients, or all models diverged.
    """
    assert observation.auxiliary is not None
    assert observation.candidates is not None
    clients, n = observation.setting.clients, len(observation.candidates.y)
    records = clients * observation.setting.samples
    wanted = max(0, 2 * records - n) if online else 2 * records
    order = torch.from_numpy(rng.permutation(key.child("auxiliary"), len(observation.auxiliary.y)))
    x, y = observation.auxiliary
    pool, aside = (Examples(x[rows], y[rows]) for rows in (order[:wanted], order[wanted:]))
    if online:
        pool = Examples(*(torch.cat(pair) for pair in zip(observation.candidates, pool, strict=True)))
    size = len(pool.y)
    if size <= clients:
        raise ValueError(f"expected more than {clients} records, one per client, to train shadow models, got {size}")
    inside = halves(key.child("halves"), runs, size, min(records, max(size // 2, clients)))
    setting, defense = observation.setting, observation.defense if simulate else None
    given = observation.task, Recipe.of(setting, records), pool.on(observation.device), inside
    final = train_shadows(*given, key.child("train"), defense=defense, setting=setting)
    usable = final.isfinite().all(1)
    if not bool(usable.any()):
        raise ValueError(f"expected at least 1 shadow model that did not diverge, got 0 of {runs}")
    inside = inside[usable]
    candidates = inside[:, :n] if online else torch.zeros(len(inside), n, dtype=torch.bool)
    return Shadowing(final[usable], pool, inside, candidates, aside)


def outputs(task: Task, models: Sequence[Tensor] | Tensor, x: Tensor) -> Tensor:
    """[m, n, classes]: outputs of models [m, d] on records x [n, *input_shape]."""
    with torch.no_grad():
        chunks = torch.split(x, _CHUNK)
        return torch.stack([torch.cat([task.outputs(model, chunk) for chunk in chunks]) for model in models])
