"""Shadow models: trained by the attacker on records that it knows, to see what training on a record does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from leakgauge.attacks._engine.shadows import Recipe, halves, train_shadows
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Attack, Examples, Observation, Task
from leakgauge.harness.core.rng import Key

_CHUNK = 1024
"""Records put through a model at once."""


class ByShadows(Attack):
    """What membership attacks with shadow models have in common."""

    kind: ClassVar[str] = "membership"
    simulate: bool

    @property
    def aware(self) -> bool:
        """It uses the defense where its shadows pass through it."""
        return self.simulate

    @property
    def needs(self) -> frozenset[str]:
        """The final model, the candidates and auxiliary data."""
        return frozenset({"final", "candidates", "auxiliary"})


class Shadowing(NamedTuple):
    """An attacker's own models, and what they trained on.

    Attributes:
        models: [m, d], those that did not diverge.
        pool: [p] records out of which each trained on some.
        inside: [m, p] bool, on which.
        asked: [m, n] bool, which had each of the n candidates; False everywhere where the pool holds none.
        aside: auxiliary records outside the pool.
    """

    models: Tensor
    pool: Examples
    inside: Tensor
    asked: Tensor
    aside: Examples


def shadow(seen: Observation, key: Key, *, runs: int, online: bool, simulate: bool) -> Shadowing:
    """Train `runs` models as the federation trains, each on a random part of a pool.

    The pool has twice as many records as the federation, as far as everybody knows: its clients times the records of
    the smallest. Online it holds all candidates, then random auxiliary records; offline auxiliary records alone. Each
    model trains on as many records as the federation: half of the pool, or less where there are more candidates than
    that. Where the auxiliary records are too few, the pool is smaller, and a model trains on half of it, but on one
    record a client at least: it overfits more than the one that is attacked.

    A part is a matter of places in the pool: with the candidates in another order, they meet other models, as under
    another key.

    Args:
        simulate: the models' updates pass through the defense, as in the federation.

    Raises:
        ValueError: the pool has no more records than the federation has clients, or all models diverged.
    """
    assert seen.auxiliary is not None
    assert seen.candidates is not None
    clients, n = seen.setting.clients, len(seen.candidates.y)
    records = clients * seen.setting.samples
    wanted = max(0, 2 * records - n) if online else 2 * records
    order = torch.from_numpy(rng.permutation(key.child("auxiliary"), len(seen.auxiliary.y)))
    pool, aside = _rows(seen.auxiliary, order[:wanted]), _rows(seen.auxiliary, order[wanted:])
    if online:
        pool = Examples(*(torch.cat(pair) for pair in zip(seen.candidates, pool, strict=True)))
    size = len(pool.y)
    if size <= clients:
        raise ValueError(f"expected more than {clients} records, one a client, to train shadow models on, got {size}")
    inside = halves(key.child("halves"), runs, size, min(records, max(size // 2, clients)))
    trained = train_shadows(
        seen.task,
        Recipe.of(seen.setting, records),
        pool,
        inside,
        key.child("train"),
        defense=seen.defense if simulate else None,
        setting=seen.setting,
    )
    usable = trained.final.isfinite().all(1)
    if not bool(usable.any()):
        raise ValueError(f"expected a shadow model that did not diverge, got none of {runs}")
    inside = inside[usable]
    asked = inside[:, :n] if online else torch.zeros(len(inside), n, dtype=torch.bool)
    return Shadowing(trained.final[usable], pool, inside, asked, aside)


def outputs(task: Task, models: Sequence[Tensor] | Tensor, x: Tensor) -> Tensor:
    """[m, n, classes], of models [m, d] on records x [n, *input_shape]."""
    with torch.no_grad():
        parts = torch.split(x, _CHUNK)
        return torch.stack([torch.cat([task.outputs(model, part) for part in parts]) for model in models])


def check_runs(shadows: int, least: int) -> None:
    """Refuse too few shadow models."""
    if shadows < least:
        raise ValueError(f"expected shadows >= {least}, got shadows={shadows}")


def _rows(data: Examples, rows: Tensor) -> Examples:
    """Records by index."""
    return Examples(data.x[rows], data.y[rows])
