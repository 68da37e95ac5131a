"""Shadow models, which the attacker trains on known records to learn how training on a record changes a model.

All shadow federations train side by side: each round batches the clients of all runs. With the same key, a run makes
the same draws as `harness.federation.loop`, so it equals the real federation except for what the public setting does
not contain.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import (
    Attack,
    Defense,
    Examples,
    Feedback,
    Membership,
    Observation,
    Sender,
    Setting,
    Task,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector, weighted_mean
from leakgauge.harness.federation.round import Client, Round, client_key, participants
from leakgauge.harness.learn.batch import Engine, LocalPlan, Server, Work, choose_engine, train_clients
from leakgauge.harness.learn.tasks import ModelTask

_CHUNK = 1024  # number of records evaluated at once

Mode = Literal["online", "offline"]
"""Whether shadow models may train on the candidates."""

_ENTRIES = 2**27  # number of entries that the runs of one batch may hold: their clients' records, models and updates


class Shadowing(NamedTuple):
    """The shadow models and their training records.

    Attributes:
        models: [m, d], the shadow models that did not diverge.
        pool: p records; each model was trained on some of them.
        inside: [m, p] bool, which model was trained on which record.
        candidates: [m, n] bool, which model was trained on which candidate; all False if the pool has no candidates.
        aside: auxiliary records outside the pool.
        pairs: [m] int64, the number of each model's pair; the two of a pair share as few records as possible.
    """

    models: Tensor
    pool: Examples
    inside: Tensor
    candidates: Tensor
    aside: Examples
    pairs: Tensor


class ByShadows(Attack):
    """The common part of membership attacks with shadow models."""

    kind: ClassVar[str] = "membership"
    needs: ClassVar[frozenset[str]] = frozenset({"final", "candidates", "auxiliary"})
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
    drawn = max(0, 2 * records - n) if online else 2 * records
    order = torch.from_numpy(rng.permutation(key.child("auxiliary"), len(observation.auxiliary.y)))
    x, y = observation.auxiliary
    pool, aside = (Examples(x[rows], y[rows]) for rows in (order[:drawn], order[drawn:]))
    if online:
        pool = Examples(*(torch.cat(pair) for pair in zip(observation.candidates, pool, strict=True)))
    size = len(pool.y)
    if size <= clients:
        raise ValueError(f"expected more than {clients} records, one per client, to train shadow models, got {size}")
    inside = halves(key.child("halves"), runs, size, min(records, max(size // 2, clients)))
    setting, defense = observation.setting, observation.defense if simulate else None
    given = observation.task, setting, local_plan(setting), pool.on(observation.device), inside
    final = train_shadows(*given, key.child("train"), defense=defense)
    usable = final.isfinite().all(1)
    if not bool(usable.any()):
        raise ValueError(f"expected at least 1 shadow model that did not diverge, got 0 of {runs}")
    inside = inside[usable]
    candidates = inside[:, :n] if online else torch.zeros(len(inside), n, dtype=torch.bool)
    return Shadowing(final[usable], pool, inside, candidates, aside, torch.arange(runs)[usable] // 2)


def outputs(task: Task, models: Sequence[Tensor] | Tensor, x: Tensor) -> Tensor:
    """[m, n, classes]: outputs of models [m, d] on records x [n, *input_shape]."""
    with torch.no_grad():
        chunks = torch.split(x, _CHUNK)
        return torch.stack([torch.cat([task.outputs(model, chunk) for chunk in chunks]) for model in models])


def local_plan(setting: Setting) -> LocalPlan:
    """How a client of a shadow federation trains in every round.

    Steps that make whole passes over a client's data become passes, so that a smaller shadow uses each record equally
    often. A learning-rate schedule and unequal client sizes are not public and so not imitated.
    """
    gradient = setting.sends == "gradient"
    size = min(setting.batch or setting.samples, setting.samples)
    passes, rest = divmod(setting.steps, -(-setting.samples // size))
    steps, epochs = (setting.steps, None) if rest or gradient else (None, passes)
    return replace(LocalPlan.of(setting), steps=steps, epochs=epochs)


def halves(key: Key, runs: int, records: int, inside: int) -> Tensor:
    """[runs, records] bool: which run trains on which records.

    Guarantees:
        Each run takes exactly `inside` records; each subset has the same probability.
        Runs 2i and 2i+1 share as few records as possible. With inside = records / 2, the two runs are complements, and
        every record is in half of an even number of runs.
    """
    taken = torch.zeros(runs, records, dtype=torch.bool)
    for first in range(0, runs, 2):
        order = torch.from_numpy(rng.permutation(key.child("pair", first // 2), records))
        taken[first, order[:inside]] = True
        taken[first + 1 : first + 2, order[records - inside :]] = True
    return taken


def train_shadows(
    task: Task,
    setting: Setting,
    local: LocalPlan,
    pool: Examples,
    inside: Tensor,
    key: Key,
    *,
    defense: Defense[Any, Any] | None = None,
) -> Tensor:
    """[runs, d]: the models after the last round of one federation for each row of `inside`.

    A run deals its records to the clients at random, as evenly as possible; clients are weighted by their numbers of
    samples, and participants are drawn anew in each round. Run i draws only from
    `key.child("run", i)`; other runs change it at most by rounding. The model is NaN if an update was not finite.

    Args:
        setting: without a defense, only its numbers of clients, participants and rounds count.
        local: the plan of a client in a round; its learning rate holds in all rounds.
        inside: [runs, records of the pool] bool; each run has at least as many records as clients.
        defense: each client's update passes through the defense's encoder and channel, with memory and state; local
            training follows the defense's rule. Defenses that use test losses get the losses of the records left out. A
            run that the defense ends keeps its model.

    Raises:
        TypeError: the task is not a `ModelTask`.
    """
    if not isinstance(task, ModelTask):
        raise TypeError(f"expected a ModelTask, which clients can train, got {type(task).__name__}")
    state, engine = None, choose_engine(task, pool.x.device)
    if defense is not None:
        state, local = defense.init(setting), local.under(defense.local, defense.step_noise(setting))
    records = int(inside.sum(1).max()) * pool.x[0].numel()
    models = 2 * setting.participants * task.layout.dim
    final, size = torch.empty(len(inside), task.layout.dim), max(1, _ENTRIES // (records + models))
    for first in range(0, len(inside), size):
        numbers = range(first, min(first + size, len(inside)))
        given = task, setting, local, pool, defense, state
        runs = [_Run(*given, inside[i], key.child("run", i)) for i in numbers]
        for number in range(setting.rounds):
            _round(task, local, runs, number, engine)
        final[first : first + size] = torch.stack([run.params for run in runs])
    return final


class _Run:
    """One federation in progress, with the defense's state and each client's memory. params: [d], on the CPU."""

    def __init__(
        self,
        task: ModelTask,
        setting: Setting,
        local: LocalPlan,
        pool: Examples,
        defense: Defense[Any, Any] | None,
        state: Any,
        inside: Tensor,
        key: Key,
    ) -> None:
        self.task, self.setting, self.local, self.pool, self.key = task, setting, local, pool, key
        self.defense, self.state, self.params = defense, state, task.init(key.child("init"))
        self.server = Server.of(setting)
        self.memories = [] if defense is None else [defense.remember(setting) for _ in range(setting.clients)]
        self.ended = defense is not None and defense.stops(state)
        self.evaluated: float | None = None  # the loss after the last round
        self.left_out = (~inside.cpu()).nonzero()[:, 0]
        members = inside.cpu().numpy().nonzero()[0]
        shares = np.array_split(members[rng.permutation(key.child("deal"), len(members))], setting.clients)
        self.clients = [_rows(pool, torch.from_numpy(np.sort(share))) for share in shares]

    def senders(self, number: int) -> list[Sender]:
        chosen = participants(self.key, number, range(self.setting.clients), self.setting)
        return [Sender(k, len(self.clients[k].y)) for k in chosen]

    def take(self, number: int, senders: Sequence[Sender], updates: Tensor) -> None:
        if not bool(updates.isfinite().all()):  # defenses refuse to encode these
            self.params, self.ended = torch.full_like(self.params, torch.nan), True
            return
        defense, before = self.defense, self.params
        if defense is None:
            mean = weighted_mean(list(updates), [float(sender.samples) for sender in senders])
        else:
            mean = self._defended(defense, number, senders, updates)
        self.params = self.server.step(before, mean, self.local.lr)
        if defense is not None:
            previous = self.loss(before) if self.evaluated is None else self.evaluated
            self.evaluated = self.loss(self.params)
            self.state = defense.advance(self.state, Feedback(number, previous, self.evaluated))
            self.ended = defense.stops(self.state)

    def _defended(self, defense: Defense[Any, Any], number: int, senders: Sequence[Sender], updates: Tensor) -> Vector:
        """[d]: the server's mean of updates [clients, d]."""
        server = Round(defense, self.setting, self.state, number)
        clients = [
            Client.of(sender, update, self.memories[sender.number], client_key(self.key, number, sender.number))
            for sender, update in zip(senders, updates, strict=True)
        ]
        sent = server.exchange(clients, self.key.child("round", number, "channel"))
        for sender, memory in zip(senders, sent.memories, strict=True):
            self.memories[sender.number] = memory
        return server.decode(sent, server.server_key(self.key, self.key.child("round", number)))

    def loss(self, params: Vector) -> float | None:
        """Mean loss over the records that were left out; None if there are none."""
        if not len(self.left_out):
            return None
        total, placed = 0.0, params.to(self.pool.x.device)
        with torch.no_grad():
            for rows in torch.split(self.left_out, 1000):
                total += float(self.task.losses(placed, *_rows(self.pool, rows)).double().sum())
        return total / len(self.left_out)


def _round(task: ModelTask, local: LocalPlan, runs: Sequence[_Run], number: int, engine: Engine) -> None:
    going = [run for run in runs if not run.ended]
    if not going:
        return
    senders = [run.senders(number) for run in going]
    work = [
        Work(run.clients[sender.number], client_key(run.key, number, sender.number).child("train"))
        for run, chosen in zip(going, senders, strict=True)
        for sender in chosen
    ]
    starts = torch.stack([run.params for run in going]).repeat_interleave(len(senders[0]), 0)
    updates = train_clients(task, starts.to(work[0].data.x.device), work, local, engine).updates.cpu()
    for run, chosen, own in zip(going, senders, torch.split(updates, len(senders[0])), strict=True):
        run.take(number, chosen, own)


def _rows(data: Examples, index: Tensor) -> Examples:
    index = index.to(data.x.device)
    return Examples(data.x[index], data.y[index])
