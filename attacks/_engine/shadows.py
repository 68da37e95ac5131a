"""Shadow federations: what an attacker trains to learn how a model tells of the records that were inside.

Many runs at once: in each round the clients of all runs train side by side. Under the same key a run draws what
`harness.federation.loop` draws, so it is the real federation, but for what the public setting does not tell.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import (
    Defense,
    Examples,
    Feedback,
    Sender,
    Setting,
    Task,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector, weighted_mean
from leakgauge.harness.federation.round import Client, Round, client_key
from leakgauge.harness.learn.batch import Engine, LocalPlan, Work, choose_engine, train_clients
from leakgauge.harness.learn.tasks import ModelTask

_ENTRIES = 2**27
"""Numbers that the runs which train side by side may hold: their clients' records, models and updates."""


class Recipe(NamedTuple):
    """What a shadow federation does. Clients count by their samples.

    Attributes:
        plan: of a client in a round; the learning rate is that of all rounds.
        participants: clients of a round, drawn anew in each; None: all.
    """

    clients: int
    rounds: int
    plan: LocalPlan
    participants: int | None = None

    @classmethod
    def of(cls, setting: Setting, records: int) -> Recipe:
        """As a federation does of which everybody knows this.

        Steps that make whole passes over the data of a client are taken for passes, and so each record of a smaller
        shadow is seen as often. Not public, and so not followed: a schedule of the learning rate, and how unequal the
        clients are.

        Args:
            records: of all clients of the federation together, as far as known.

        Raises:
            ValueError: fewer records than clients.
        """
        if records < setting.clients:
            raise ValueError(f"expected a record for each of {setting.clients} clients or more, got records={records}")
        gradient = setting.sends == "gradient"
        largest = max(setting.samples, -(-records // setting.clients))
        size = largest if setting.batch == 0 else min(setting.batch, largest)
        passes, rest = divmod(setting.steps, -(-largest // size))
        whole = not rest and not gradient
        plan = LocalPlan(
            gradient=gradient,
            steps=None if whole else setting.steps,
            epochs=passes if whole else None,
            batch=setting.batch,
            lr=setting.lr,
            momentum=setting.momentum,
        )
        return cls(setting.clients, setting.rounds, plan, setting.participants)

    def under(self, defense: Defense[Any, Any], setting: Setting) -> Recipe:
        """With what the defense asks of local training."""
        return self._replace(plan=self.plan.under(defense.local, defense.step_noise(setting)))


class Shadows(NamedTuple):
    """final: [runs, d], after the last round; models: before each round that was to be kept, [runs, d].

    A run that diverged is NaN after the round in which an update was not finite.
    """

    final: Tensor
    models: dict[int, Tensor]


def halves(key: Key, runs: int, records: int, inside: int) -> Tensor:
    """[runs, records] bool: which records are inside which run.

    Guarantees:
        Each run takes exactly `inside` records, each subset with the same chance.
        Run 2i+1 shares with run 2i as few as can be. With inside = records / 2 it takes the complement, and every
        record is inside half of an even number of runs.

    Raises:
        ValueError: inside is not between 0 and records.
    """
    if not 0 <= inside <= records:
        raise ValueError(f"expected 0 <= inside <= records={records}, got inside={inside}")
    taken = torch.zeros(runs, records, dtype=torch.bool)
    for first in range(0, runs, 2):
        order = torch.from_numpy(rng.permutation(key.child("pair", first // 2), records))
        taken[first, order[:inside]] = True
        taken[first + 1 : first + 2, order[records - inside :]] = True
    return taken


def train_shadows(
    task: Task,
    recipe: Recipe,
    pool: Examples,
    inside: Tensor,
    key: Key,
    *,
    defense: Defense[Any, Any] | None = None,
    setting: Setting | None = None,
    engine: Engine | None = None,
    keep: Collection[int] = (),
    start: Vector | None = None,
) -> Shadows:
    """Train one federation for each row of `inside`.

    A run deals its records to the clients at random, as evenly as they go. Run i draws from `key.child("run", i)` alone
    and hangs on the other runs by rounding at most.

    Args:
        inside: [runs, records of the pool] bool.
        defense: each client's update goes through its encode, the channel and its decode, with memory and state; local
            training keeps its rule. The test losses that some defenses look at are those of the records left out.
        setting: of the defended federation, for the defense; not looked at without one.
        engine: of local training; None: the fastest for the model, where the pool lies.
        keep: rounds before which the models are kept. A run that its defense has ended stands still.
        start: [d], where all runs start; None: each draws its own.

    Raises:
        TypeError: a task that is no model of this project.
        ValueError: `inside` does not fit the pool, a run has fewer records than clients, keep names a round that there
            is not, or the setting is missing or of another federation.
    """
    if not isinstance(task, ModelTask):
        raise TypeError(f"expected a ModelTask, which clients can train, got {type(task).__name__}")
    _check(recipe, pool, inside, keep)
    protection = _protect(recipe, defense, setting)
    if protection is not None:
        recipe = recipe.under(protection.defense, protection.setting)
    engine = engine or choose_engine(task, pool.x.device)
    final = torch.empty(len(inside), task.layout.dim)
    models = {number: torch.empty_like(final) for number in sorted(keep)}
    size = _side_by_side(task, recipe, pool, inside)
    for first in range(0, len(inside), size):
        numbers = range(first, min(first + size, len(inside)))
        runs = [_Run(task, recipe, pool, inside[i], key.child("run", i), start, protection) for i in numbers]
        for number in range(recipe.rounds):
            if number in models:
                models[number][first : first + size] = torch.stack([run.params for run in runs])
            _round(task, recipe, runs, number, engine)
        final[first : first + size] = torch.stack([run.params for run in runs])
    return Shadows(final, models)


def _check(recipe: Recipe, pool: Examples, inside: Tensor, keep: Collection[int]) -> None:
    """Refuses what makes no federation."""
    if inside.dtype != torch.bool or inside.ndim != 2 or inside.shape[1] != len(pool.y) or not len(inside):
        raise ValueError(
            f"expected inside [runs, {len(pool.y)}] bool, got {list(inside.shape)} {str(inside.dtype)[len('torch.') :]}"
        )
    fewest = int(inside.sum(1).min())
    if fewest < recipe.clients:
        raise ValueError(f"expected a record for each of {recipe.clients} clients or more, got a run of {fewest}")
    unknown = sorted(set(keep) - set(range(recipe.rounds)))
    if unknown:
        raise ValueError(f"expected rounds 0 to {recipe.rounds - 1} to keep, got {unknown}")


def _side_by_side(task: ModelTask, recipe: Recipe, pool: Examples, inside: Tensor) -> int:
    """How many runs fit in memory at once."""
    records = int(inside.sum(1).max()) * pool.x[0].numel()
    models = 2 * (recipe.participants or recipe.clients) * task.layout.dim
    return max(1, _ENTRIES // (records + models))


class _Protection(NamedTuple):
    """A defense, its setting, and its state before round 0."""

    defense: Defense[Any, Any]
    setting: Setting
    state: Any


def _protect(recipe: Recipe, defense: Defense[Any, Any] | None, setting: Setting | None) -> _Protection | None:
    """None without a defense; refuses one whose setting is missing or of another federation."""
    if defense is None:
        return None
    if setting is None:
        raise ValueError("expected a setting beside the defense, which needs it to encode")
    clients, participants = recipe.clients, recipe.participants or recipe.clients
    if (clients, participants) != (setting.clients, setting.participants):
        raise ValueError(
            f"expected the setting of the recipe's {clients} clients and {participants} participants, "
            f"got clients={setting.clients}, participants={setting.participants}"
        )
    return _Protection(defense, setting, defense.init(setting))


class _Defended:
    """A defense in one run: its state, and what each client remembers."""

    def __init__(self, protection: _Protection, clients: int) -> None:
        self.defense, self.setting, self.state = protection
        self.memories = [self.defense.remember(self.setting) for _ in range(clients)]
        self.loss: float | None = None

    def mean(self, key: Key, number: int, senders: Sequence[Sender], updates: Tensor) -> Vector:
        """[d], what the server makes of these updates [clients, d]. `key` is the run's."""
        here = Round(self.defense, self.setting, self.state, number)
        clients = [
            Client.of(who, update, self.memories[who.number], client_key(key, number, who.number))
            for who, update in zip(senders, updates, strict=True)
        ]
        sent = here.exchange(clients, key.child("round", number, "channel"))
        for who, memory in zip(senders, sent.memories, strict=True):
            self.memories[who.number] = memory
        return here.decode(sent, key.child("round", number, "server"))

    def learn(self, number: int, run: _Run) -> None:
        """The state after a round, from the losses before and after it."""
        before = run.loss(run.before) if self.loss is None else self.loss
        self.loss = run.loss(run.params)
        self.state = self.defense.advance(self.state, Feedback(number, before, self.loss))

    def stops(self) -> bool:
        """Whether the defense ends the run here."""
        return self.defense.stops(self.state)


class _Run:
    """One federation on its way. params: [d], on the CPU; before: those before its latest round."""

    def __init__(
        self,
        task: ModelTask,
        recipe: Recipe,
        pool: Examples,
        inside: Tensor,
        key: Key,
        start: Vector | None,
        protection: _Protection | None,
    ) -> None:
        self.task, self.recipe, self.pool, self.key = task, recipe, pool, key
        self.defended = None if protection is None else _Defended(protection, recipe.clients)
        self.params = task.init(key.child("init")) if start is None else start.detach().cpu()
        self.before, self.ended = self.params, self.defended is not None and self.defended.stops()
        self.left_out = (~inside.cpu()).nonzero()[:, 0]
        mine = inside.cpu().numpy().nonzero()[0]
        hands = np.array_split(mine[rng.permutation(key.child("deal"), len(mine))], recipe.clients)
        self.clients = [_rows(pool, torch.from_numpy(np.sort(hand))) for hand in hands]

    def senders(self, number: int) -> list[Sender]:
        """Of a round, by increasing number."""
        every = self.recipe.clients
        chosen = rng.subset(self.key.child("round", number, "participants"), every, self.recipe.participants or every)
        return [Sender(int(k), len(self.clients[k].y)) for k in chosen]

    def work(self, number: int, senders: Sequence[Sender]) -> list[Work]:
        """Of these clients in a round."""
        return [
            Work(self.clients[who.number], client_key(self.key, number, who.number).child("train")) for who in senders
        ]

    def take(self, number: int, senders: Sequence[Sender], updates: Tensor) -> None:
        """The round's updates [clients, d] or gradients: the model moves on."""
        if not bool(updates.isfinite().all()):  # which a defense refuses to encode
            self.params, self.ended = torch.full_like(self.params, torch.nan), True
            return
        if self.defended is None:
            mean = weighted_mean(list(updates), [float(who.samples) for who in senders])
        else:
            mean = self.defended.mean(self.key, number, senders, updates)
        plan, self.before = self.recipe.plan, self.params
        self.params = self.params - plan.lr * mean if plan.gradient else self.params + mean
        if self.defended is not None:
            self.defended.learn(number, self)
            self.ended = self.defended.stops()

    def loss(self, params: Vector) -> float | None:
        """Mean loss over the records that were left out; None where there are none."""
        if not len(self.left_out):
            return None
        total, here = 0.0, params.to(self.pool.x.device)
        with torch.no_grad():
            for part in torch.split(self.left_out, 1000):
                total += float(self.task.losses(here, *_rows(self.pool, part)).double().sum())
        return total / len(self.left_out)


def _round(task: ModelTask, recipe: Recipe, runs: Sequence[_Run], number: int, engine: Engine) -> None:
    """One round of all these runs but those that have ended."""
    going = [run for run in runs if not run.ended]
    if not going:
        return
    senders = [run.senders(number) for run in going]
    work = [each for run, who in zip(going, senders, strict=True) for each in run.work(number, who)]
    starts = torch.stack([run.params for run in going]).repeat_interleave(len(senders[0]), 0)
    updates = train_clients(task, starts.to(work[0].data.x.device), work, recipe.plan, engine).updates.cpu()
    for run, who, mine in zip(going, senders, torch.split(updates, len(senders[0])), strict=True):
        run.take(number, who, mine)


def _rows(data: Examples, index: Tensor) -> Examples:
    """Some of the records."""
    index = index.to(data.x.device)
    return Examples(data.x[index], data.y[index])
