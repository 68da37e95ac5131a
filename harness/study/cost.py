"""How long jobs take: `estimate` for users, before a study runs, and `Pace` for the schedule, while it runs.

An estimate runs small versions of the study's own jobs on this machine, and scales their seconds up.

The time of a training is a start, its clients' turns (local steps, message, decoding) and its evaluations. The time of
an attack is, for each victim, a start and the amount of work. Only the time of an audit is a constant.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.cell import Cell, FederationSpec, PartSpec, TaskSpec, TrainingSpec
from leakgauge.harness.core.code import RECORDING
from leakgauge.harness.core.contract import Setting
from leakgauge.harness.core.threads import one_thread
from leakgauge.harness.federation.loop import Keep, reads_losses
from leakgauge.harness.federation.registry import build_attack, build_defense
from leakgauge.harness.federation.small import Federation
from leakgauge.harness.study.attack import bounds_of, run_attack
from leakgauge.harness.study.environment import code_of, environment
from leakgauge.harness.study.goal import first_try, goal_of
from leakgauge.harness.study.jobs import Job, RunContext
from leakgauge.harness.study.prepare import prepare
from leakgauge.harness.study.study import Study
from leakgauge.harness.study.training import run_training

_AUDIT = 3.5
"""Seconds of an audit in a study; measured: 1 to 10 for the shipped defenses, mean 2 (60 trials) to 4 (300 trials)."""

_TRIES = 6  # trainings of a search for a loss of accuracy besides the last, for each seed; measured mean: 5.7
_UNKNOWN = 1.0  # seconds of a job if no similar job could be measured
_LONG = 1.5  # if a small job takes more than these seconds, no larger one is tried

_GOLDEN = 0.6180339887
"""The golden ratio: the fractional parts of its multiples are spread evenly for any number of multiples."""

_CLIENTS, _FEW, _TEST = 8, 3, 100  # size of a small training: participants; rounds and local steps; test samples

_AMOUNTS = {"evaluations": (10, 60), "shadows": (2, 4), "samples": (200, 400)}
"""Parameters of attacks whose work grows with them, with two small values."""


_EVALUATION, _SHADOW, _TURN, _TRIAL, _LIMIT, _LEAST = 1e-4, 0.3, 4e-4, 0.01, 0.05, 5e-3
"""Seconds of an evaluation, a shadow model, a client's turn, a trial of an audit, a victim's limit, and of any job, for
a model of few parameters, as `Pace` guesses them; measured with a linear model of digits."""

_DIM = 2e4  # the number of model parameters at which these seconds double


class Cost(NamedTuple):
    """Seconds on one core. Kinds of jobs that were not measured count like the other kinds.

    Attributes:
        problem: the first error that kept a job from being measured; empty if only time was missing.
    """

    training: float
    audits: float
    attacks: float
    measured: int
    kinds: int
    problem: str

    def __str__(self) -> str:
        if not self.measured:
            return f"how long it takes is unknown: {self.problem or 'no job could be measured in time'}"
        problem = f"; a job that cannot run: {self.problem}" if self.problem else ""
        return (
            f"about {span(self.training)} of training, {span(self.audits)} of audits and {span(self.attacks)} of "
            f"attacks on one core ({self.measured} of {self.kinds} kinds of jobs measured on this machine{problem})"
        )


class _Federation(NamedTuple):
    """A federation without a defense: setting, numbers of samples, seconds of a short turn, a step, an evaluation."""

    setting: Setting
    samples: int
    tested: int
    turn: float
    step: float
    evaluation: float


def estimate(study: Study, root: Path, seconds: float = 10.0) -> Cost:
    """The cost of a study whose data are in `root`; no measurement starts after `seconds`."""
    trainings = [first_try(spec) for spec in study.trainings]
    cells = [replace(cell, training=first_try(cell.training)) for cell in study.cells]
    goals = map(goal_of, (spec.defense for spec in study.trainings))
    tries = [spec for spec, goal in zip(trainings, goals, strict=True) if goal and goal.accuracy_loss is not None]
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # the disk's time would dominate short jobs
    with one_thread(), TemporaryDirectory(dir=memory) as folder:  # one thread, as in a worker
        small = _Rehearsal(RunContext(Path(folder), root), time.monotonic() + seconds)
        small.measure(trainings, _place, small.federation)
        small.measure(cells, attacked, small.attack)
        small.measure(trainings, defended, small.training)
    kinds = {*map(attacked, cells), *map(defended, trainings)}
    return Cost(
        small.total(trainings, defended) + _TRIES * small.total(tries, defended),
        _AUDIT * sum(spec.audit > 0 for spec in trainings),
        small.total(cells, attacked),
        sum(kind in small.prices for kind in kinds),
        len(kinds),
        small.problem,
    )


class _Rehearsal:
    """Runs small versions of a study's jobs in a separate store, until a time of `time.monotonic`."""

    def __init__(self, context: RunContext, until: float) -> None:
        self.context, self.until = context, until
        self.prices: dict[_Kind, Any] = {}  # the price of each kind of job
        self.problem = ""  # the first error that kept a job from being measured

    def measure(self, jobs: Iterable[Any], kind: Callable[[Any], _Kind], price: Callable[[Any], Any]) -> None:
        """Measure the middle job of each kind, because the first defense is often none; if it fails, the first."""
        groups = gathered((kind(job), job) for job in jobs)
        # multiples of the golden ratio: whenever the time is over, the measured jobs are spread over all kinds
        for _, (name, group) in sorted(enumerate(groups.items()), key=lambda pair: pair[0] * _GOLDEN % 1):
            for job in (group[len(group) // 2], group[0]):
                if name not in self.prices and time.monotonic() < self.until:
                    try:
                        self.prices[name] = price(job)
                    except Exception as error:  # a job may fail in any way; the others are still measured
                        self.problem = self.problem or str(error).partition("\n")[0] or type(error).__name__

    def total(self, jobs: Sequence[Any], kind: Callable[[Any], _Kind]) -> float:
        """The seconds of all jobs; a job that was not measured takes the mean of its name, or else of all jobs."""
        known: dict[Hashable, list[float]] = {}
        for job in jobs:
            with suppress(Exception):  # not measured, or refused by its defense
                known.setdefault(kind(job)[1], []).append(self.prices[kind(job)](job))
        mean = fmean([seconds for each in known.values() for seconds in each] or [_UNKNOWN])
        names = Counter(kind(job)[1] for job in jobs)
        return sum(count * fmean(known.get(name) or [mean]) for name, count in names.items())

    def federation(self, spec: TrainingSpec) -> _Federation:
        """A federation, measured by one turn of one client: with few test samples, with all, and with more steps."""
        ready = prepare(spec, self.context.root)
        steps = ready.setting.steps
        place = _Federation(ready.setting, sum(map(len, ready.clients.values())), len(ready.test.y), 0.0, 0.0, 0.0)
        short = self._small(spec, place, 1, 1)
        self._train(short)  # the first training of a process compiles
        turn = self._train(short)
        if turn > _LONG:
            return place._replace(turn=turn, step=turn / min(steps, _FEW))
        tested = self._train(self._small(spec, place, 1, 1, test=spec.federation.test_samples))
        step, more = 0.0, min(steps - _FEW, math.ceil(_LONG / turn))
        if more > 0:
            step = (self._train(self._small(spec, place, 1, 1, _FEW + more)) - turn) / more
        return place._replace(turn=turn, step=max(0.0, step), evaluation=max(0.0, tested - turn) / 2)

    def training(self, spec: TrainingSpec) -> Callable[[TrainingSpec], float]:
        """The seconds of a training, measured by one round of a few clients, and by a few rounds."""
        place: _Federation = self.prices[_place(spec)]
        clients, turn = min(_CLIENTS, _participants(spec.federation)), place.turn
        first = self._train(self._small(spec, place, 1, clients))
        if first < _LONG:
            more = self._train(self._small(spec, place, 1 + _FEW, clients))
            turn = max(0.0, more - first) / _FEW / clients
        start, whole = max(0.0, first - clients * turn), turn + max(0, place.setting.steps - _FEW) * place.step

        def seconds(spec: TrainingSpec) -> float:
            federation, defense = spec.federation, build_defense(spec.defense)
            rounds = len(Federation.of(defense, place.setting).history)  # some defenses stop early
            interim = federation.interim_samples or place.tested
            share = 1.0 if reads_losses(defense, federation) else min(1.0, interim / place.tested)
            evaluations = rounds // federation.evaluate_every * share + 2
            return start + rounds * _participants(federation) * whole + evaluations * place.evaluation

        return seconds

    def attack(self, cell: Cell) -> Callable[[Cell], float]:
        """The seconds of an attack, measured on a few victims with a small and a larger amount of work."""
        low, high = _AMOUNTS.get(_amount(cell.attack)[0], (0, 0))
        small, few = self._attackable(cell), 1 if cell.target.whole else min(_CLIENTS, cell.target.count)
        attack, limit = build_attack(cell.attack), 0.0
        if cell.limit and attack.kind == "reconstruction" and not attack.floor:  # a floor shares its target's limit
            start = time.perf_counter()
            bounds_of(replace(small, target=replace(small.target, count=1)), self.context)
            limit = time.perf_counter() - start
        small = replace(small, limit=False)
        seconds = self._run(small, few, low)
        if seconds < _LONG:  # the first attack of a kind compiles
            seconds = self._run(small, few, low)
        more = self._run(small, few, high) if low and seconds < _LONG else seconds
        unit = max(0.0, more - seconds) / few / max(1, high - low)
        start = limit + max(0.0, seconds / few - low * unit)

        def total(cell: Cell) -> float:
            victims = 1 if cell.target.whole else cell.target.count
            return victims * (start + _amount(cell.attack)[1] * unit)

        return total

    def _small(
        self,
        spec: TrainingSpec,
        place: _Federation,
        rounds: int,
        clients: int,
        steps: int = _FEW,
        test: int | None = _TEST,
    ) -> TrainingSpec:
        """A short training of a few clients with unchanged samples, without audit; a recording is not changed."""
        if spec.task.data.startswith(RECORDING):
            return replace(spec.honest, audit=0)
        small = replace(spec.federation, rounds=rounds, test_samples=test)
        if small.partition in ("labels", "sizes"):  # which may not fit fewer clients
            small = replace(small, partition="iid", sizes=())
        if small.participants is None:
            small = replace(small, clients=clients, samples=place.samples * clients // small.clients)
        else:
            small = replace(small, participants=clients)
        if small.algorithm == "fedavg":
            small = replace(small, local_steps=min(steps, place.setting.steps), local_epochs=None)
        return replace(spec.honest, federation=small, audit=0)

    def _attackable(self, cell: Cell) -> Cell:
        """The cell on a training as short as its attack allows, or on round 0 if that training is still long."""
        spec, target = cell.training, cell.target
        kind = defended(spec)
        price = self.prices[kind] = self.prices.get(kind) or self.training(spec)
        rounds = max(target.looks_at, default=0) + 1
        federation = replace(spec.federation, rounds=rounds, evaluate_every=spec.federation.rounds)
        small = replace(spec, federation=federation, audit=0)
        if price(small) > _LONG:
            small = self._small(spec, self.prices[_place(spec)], 1, min(_CLIENTS, _participants(federation)))
            target = target if target.round is None else replace(target, round=0, rounds=1, shuffled=False)
        if spec.task.data.startswith(RECORDING):
            small, target = replace(spec, audit=0), cell.target
        self._train(small)
        return replace(cell, training=small, target=target)

    def _train(self, spec: TrainingSpec) -> float:
        code_of(spec), environment()  # read once per process and cached, so not part of a training's time
        start, rounds = time.perf_counter(), frozenset(range(spec.federation.rounds))
        run_training(spec, Keep(rounds, rounds), self.context)
        return time.perf_counter() - start

    def _run(self, cell: Cell, victims: int, amount: int) -> float:
        name, _ = _amount(cell.attack)
        attack = replace(cell.attack, parameters={**cell.attack.parameters, **({name: amount} if amount else {})})
        target = cell.target if cell.target.whole else replace(cell.target, count=victims)
        start = time.perf_counter()
        run_attack(replace(cell, attack=attack, target=target), self.context)
        return time.perf_counter() - start


_Kind = tuple[Hashable, ...]
"""The properties that determine the time of a job: its task and federation, its defense or attack, and more."""


def _place(spec: TrainingSpec) -> _Kind:
    """The task and the federation, which the defenses of a study share."""
    return spec.task, spec.federation


def defended(spec: TrainingSpec) -> _Kind:
    """The kind of a training: the other parameters of its defense hardly change its time."""
    return _place(spec), spec.defense.name


def attacked(cell: Cell) -> _Kind:
    """The kind of an attack: the number of its victims and its amount of work scale its time."""
    target, amount = cell.target, _amount(cell.attack)[0]
    others = tuple((name, value) for name, value in cell.attack.parameters.items() if name != amount)
    return _place(cell.training), cell.attack.name, others, target.kind, target.batch, target.rounds, target.users


def _participants(spec: FederationSpec) -> int:
    return spec.participants or spec.clients


def _amount(attack: PartSpec) -> tuple[str, int]:
    """The parameter that scales the work of an attack, and its value; ("", 0) if there is none."""
    amounts = ((name, attack.parameters.get(name)) for name in _AMOUNTS)
    return next(((name, value) for name, value in amounts if isinstance(value, int)), ("", 0))


class Pace:
    """The expected seconds of jobs, which only order them: a guess by size, corrected by the jobs that ended."""

    def __init__(self, dims: Mapping[TaskSpec, int]) -> None:
        self.dims = dims  # parameters of the model of each task
        self.took: dict[Hashable, tuple[float, float]] = {}  # seconds and guesses of the jobs of a kind

    def expected(self, job: Job) -> float:
        """Seconds, by ended jobs of the same kind, else by ended jobs of a wider kind, else by the job's size."""
        guess = self._guess(job)
        seconds, guessed = next((self.took[kind] for kind in _kinds(job) if kind in self.took), (1.0, 1.0))
        return guess * seconds / guessed

    def learn(self, job: Job, seconds: float) -> None:
        """Record the time of a job that ended."""
        guess = self._guess(job)
        for kind in _kinds(job):
            spent, guessed = self.took.get(kind, (0.0, 0.0))
            self.took[kind] = spent + seconds, guessed + guess

    def _guess(self, job: Job) -> float:
        spec, larger = job.training, 1 + self.dims.get(job.training.task, 0) / _DIM
        if job.trains:
            turns = spec.federation.rounds * _participants(spec.federation) * (spec.federation.local_steps or 1)
            return _LEAST + larger * _TURN * turns + _TRIAL * spec.audit
        cell = job.cells[0]
        if job.kind == "limit":
            return _LEAST + larger * _LIMIT * len(job.victims)
        if _joins(job):
            return _LEAST * len(job.parts)
        given = {name: float(value) for name, value in cell.attack.parameters.items() if isinstance(value, int)}
        steps = given.get("evaluations", 1.0) * given.get("restarts", 1.0) * cell.target.rounds * cell.target.batch
        each = _EVALUATION * steps * (1 if cell.target.whole else len(job.victims) * len(job.cells))
        return _LEAST + larger * (each + _SHADOW * given.get("shadows", 0.0) + _EVALUATION * given.get("samples", 0.0))


def _kinds(job: Job) -> Iterator[Hashable]:
    """The kinds of a job, from narrow to wide, by properties that determine its time."""
    if job.trains:
        yield "training", *defended(job.training)
        yield "training", job.training.defense.name
    elif _joins(job):
        yield "join", job.cells[0].attack.name
    else:
        sort = "limit" if job.kind == "limit" else job.cells[0].attack.name
        around = defended(job.training) if job.kind == "limit" else (*attacked(job.cells[0]), job.training.defense.name)
        yield sort, *around
        yield sort, job.training.defense.name
        yield sort
    yield job.kind


def _joins(job: Job) -> bool:
    return job.kind == "attack" and any(name.startswith(job.cells[0].id) for name in job.parts)


def span(seconds: float) -> str:
    """A duration as text, in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
