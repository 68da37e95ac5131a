"""How long jobs take: one forecast, for users before a study runs and for the schedule while it runs.

A job's seconds are a sum of sizes, each times a price. `Pace` learns prices from the jobs that ended. `estimate` runs
small versions of the study's own jobs on this machine, learns from these, and adds up what all jobs are expected to
take. Only the time of an audit is a constant.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.cell import Cell, FederationSpec, PartSpec, TaskSpec, TrainingSpec
from leakgauge.harness.core.code import RECORDING
from leakgauge.harness.core.contract import Setting
from leakgauge.harness.core.threads import one_thread
from leakgauge.harness.federation.loop import Keep, reads_losses
from leakgauge.harness.federation.registry import build_attack, build_defense
from leakgauge.harness.federation.small import Federation
from leakgauge.harness.study.attack import run_attack, run_part
from leakgauge.harness.study.environment import code_of, origin
from leakgauge.harness.study.goal import first_try, goal_of
from leakgauge.harness.study.jobs import Job, RunContext, limit_id
from leakgauge.harness.study.prepare import load_data, make_task, prepare
from leakgauge.harness.study.study import Study
from leakgauge.harness.study.training import run_training, training_suffices

_AUDIT = 3.5
"""Seconds of an audit in a study; measured: 1 to 10 for the shipped defenses, mean 2 (60 trials) to 4 (300 trials)."""

_TRIES = 6  # trainings of a search for a loss of accuracy besides the last, for each seed; measured mean: 5.7
_LONG = 1.5  # if a small job takes more than these seconds, no larger one is tried
_SHARE = 0.6  # the share of the time for measuring attacks and limits; the rest is for trainings

_GOLDEN = 0.6180339887
"""The golden ratio: the fractional parts of its multiples are spread evenly for any number of multiples."""

_CLIENTS, _FEW, _MOST, _TEST = 8, 3, 20, 100  # of small trainings: participants, rounds or steps, steps, test samples

_AMOUNTS = {"evaluations": (2, 10, 60), "shadows": (2, 4), "samples": (200, 400)}
"""Parameters of attacks whose work grows with them, with small values. Searches also make `_WARM` evaluations."""

_WARM = "warm"

_START, _TURN, _STEP, _TESTED, _TRIAL = 5e-3, 2e-4, 2e-4, 2e-6, 0.01
_VICTIM, _LIMIT, _PRICES = 1e-3, 0.05, {"evaluations": 1e-4, "shadows": 0.3, "samples": 1e-4}
"""Seconds, for a model of few parameters, of any job, a client's turn and its steps, a tested sample and a trial of an
audit; of a victim, a victim's limit and a unit of an attack's work: prices before any job has ended, measured with a
linear model of digits."""

_DIM = 2e4  # the number of model parameters at which these seconds double

_TRUST = 0.03
"""The deviation of a price from the wider kind's, as a share, that counts as much as seconds that are wrong by all."""


class Cost(NamedTuple):
    """Seconds on one core; kinds of jobs that were not measured count like wider kinds.

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


class Size(NamedTuple):
    """The parameters of a task's model, and its training and test samples."""

    dim: int
    samples: int
    tested: int

    @classmethod
    def of(cls, task: TaskSpec, root: Path) -> Size:
        """The size of a task whose data are in `root`."""
        data = load_data(task.data, root)
        return cls(make_task(task, data).layout.dim, len(data.train.y), len(data.test.y))


Sizes = npt.NDArray[np.float64]


class _Ended:
    """The jobs of a kind that ended: sums over their sizes f, as shares of their seconds s."""

    def __init__(self, length: int) -> None:
        self.squares, self.sums = np.zeros((length, length)), np.zeros(length)  # of f f^T / s^2 and f / s

    def add(self, sizes: Sizes, seconds: float) -> None:
        """Add a job."""
        shares = sizes / max(seconds, 1e-6)
        self.squares += np.outer(shares, shares)
        self.sums += shares

    def prices(self, wider: Sizes) -> Sizes:
        """The prices by least squares of relative errors, near those of the wider kind in proportion."""
        prices = wider * (wider @ self.sums) / (wider @ self.squares @ wider)
        weighed = prices[:, None] * self.squares * prices
        changes = np.linalg.solve(weighed + _TRUST**2 * np.eye(len(prices)), prices * self.sums - weighed.sum(1))
        found: Sizes = prices * np.maximum(1 + changes, 0.01)
        return found


class Pace:
    """The expected seconds of jobs: sizes times prices, which are learned from the jobs that ended.

    The prices of a kind of jobs are near those of the next wider kind, in proportion, and of all jobs of one sort near
    constants; the more jobs of a kind have ended, the more they follow these jobs.
    """

    def __init__(self, tasks: Mapping[TaskSpec, Size]) -> None:
        self.tasks = tasks
        self._ended: dict[Hashable, _Ended] = {}
        self._prices: dict[Hashable, Sizes] = {}  # since the last job ended

    def dim(self, task: TaskSpec) -> int:
        """The number of parameters of a task's model; 0 if unknown."""
        return self.tasks[task].dim if task in self.tasks else 0

    def expected(self, job: Job) -> float:
        """The expected seconds of a job."""
        sizes = self._sizes(job)
        prices = np.ones(len(sizes))
        for kind in reversed(_kinds(job)):
            if kind not in self._prices:
                self._prices[kind] = self._ended[kind].prices(prices) if kind in self._ended else prices
            prices = self._prices[kind]
        return float(sizes @ prices)

    def learn(self, job: Job, seconds: float, like: Job | None = None) -> None:
        """Record the time of a job that ended; it counts among the jobs that are `like` this one, if given."""
        self._prices.clear()
        sizes = self._sizes(job)
        for kind in _kinds(like or job):
            self._ended.setdefault(kind, _Ended(len(sizes))).add(sizes, seconds)

    def _sizes(self, job: Job) -> Sizes:
        """The seconds that the parts of a job would take at the constant prices."""
        larger = 1 + self.dim(job.training.task) / _DIM
        if job.trains:
            spec, federation = job.training, job.training.federation
            turns = federation.rounds_run * _participants(federation)
            sizes = [turns * _TURN, turns * self._steps(spec) * _STEP, self._tested(spec) * _TESTED]
            return np.array([_START, *(larger * size for size in sizes), spec.audit * _TRIAL])
        cell, victims = job.cells[0], len(job.victims) * len(job.cells)
        if job.kind == "limit":
            return np.array([_START, larger * _LIMIT * victims])
        if _joins(job):
            return np.array([_START * len(job.parts)])
        name, amount = _amount(cell.attack)
        victims = 1 if cell.target.whole else victims
        starts = cell.attack.parameters.get("restarts", 1)
        each = victims * cell.target.rounds * cell.target.batch * (starts if isinstance(starts, int) else 1)
        work = larger * _PRICES.get(name, 0.0) * amount * (each if name == "evaluations" else 1)
        return np.array([_START, larger * _VICTIM * victims, work])

    def _steps(self, spec: TrainingSpec) -> int:
        """The local steps of a client."""
        federation, known = spec.federation, self.tasks.get(spec.task)
        if federation.algorithm == "fedsgd" or federation.local_steps is not None:
            return federation.local_steps or 1
        samples = federation.samples or (known.samples if known else 0)
        batches = math.ceil(samples / federation.clients / federation.batch) if federation.batch else 1
        return (federation.local_epochs or 1) * max(1, batches)

    def _tested(self, spec: TrainingSpec) -> int:
        """The tested samples of all evaluations."""
        federation, known = spec.federation, self.tasks.get(spec.task)
        tested = interim = federation.test_samples or (known.tested if known else 0)
        with suppress(Exception):  # a defense with a goal, or one that cannot be built
            if not reads_losses(build_defense(spec.defense), federation):
                interim = min(tested, federation.interim_samples or tested)
        return federation.rounds_run // federation.evaluate_every * interim + 2 * tested


def _kinds(job: Job) -> tuple[Hashable, ...]:
    """The kinds of a job, each within the next one, by properties that determine its time."""
    spec = job.training
    place, defense = (spec.task, spec.federation), spec.defense.name
    if job.trains:
        return ("training", *place, defense), ("training", *place), "training"
    cell = job.cells[0]
    if job.kind == "limit":
        return ("limit", *place, defense), ("limit", *place), "limit"
    name, target, amount = cell.attack.name, cell.target, _amount(cell.attack)[0]
    if _joins(job):
        return ("join", name), "join"
    others = tuple((key, value) for key, value in cell.attack.parameters.items() if key not in (amount, _WARM))
    about = "attack", name, others, target.kind, target.batch, target.rounds, target.users, *place
    return (*about, defense), about, ("attack", name), "attack"


def _joins(job: Job) -> bool:
    return job.kind == "attack" and any(name.startswith(job.cells[0].id) for name in job.parts)


def _participants(spec: FederationSpec) -> int:
    return spec.participants or spec.clients


def _amount(attack: PartSpec) -> tuple[str, int]:
    """The parameter that scales the work of an attack, and its amount; ("", 0) if there is none."""
    amounts = ((name, attack.parameters.get(name)) for name in _AMOUNTS)
    name, value = next(((name, value) for name, value in amounts if isinstance(value, int)), ("", 0))
    warm = attack.parameters.get(_WARM)
    return name, value + (warm if name == "evaluations" and isinstance(warm, int) else 0)


def _with_amount(attack: PartSpec, amount: int) -> PartSpec:
    """The attack with a small value of the parameter that scales its work."""
    name, warm = _amount(attack)[0], attack.parameters.get(_WARM)
    changed = {name: amount} | ({_WARM: min(warm, amount)} if isinstance(warm, int) else {})
    return replace(attack, parameters=attack.parameters | changed)


def estimate(study: Study, root: Path, seconds: float = 10.0) -> Cost:
    """The cost of a study whose data are in `root`; no measurement starts after `seconds`."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # the disk's time would dominate short jobs
    with one_thread(), TemporaryDirectory(dir=memory) as folder:  # one thread, as in a worker
        small = Rehearsal(study, RunContext(Path(folder), root))
        start = time.monotonic()
        cells = [replace(cell, training=first_try(cell.training)) for cell in study.cells]
        trainings = [small.training(first_try(spec)) for spec in study.trainings]
        attacks = [Job("attack", cell.training, (cell,)) for cell in cells]
        limited = {
            limit_id(cell): Job("limit", cell.training, (cell,), (0, cell.target.count))
            for cell in cells
            if cell.limit and build_attack(cell.attack).kind == "reconstruction"
        }
        small.measure([*attacks, *limited.values()], small.attacks, start + _SHARE * seconds)
        small.measure(trainings, small.trainings, start + seconds)
    goals = map(goal_of, (spec.defense for spec in study.trainings))
    tries = [_TRIES if goal and goal.accuracy_loss is not None else 0 for goal in goals]
    pace = small.pace
    return Cost(
        sum((1 + more) * pace.expected(job) for job, more in zip(trainings, tries, strict=True)),
        _AUDIT * sum(spec.audit > 0 for spec in study.trainings),
        math.fsum(map(pace.expected, [*attacks, *limited.values()])),
        len(small.measured),
        len(small.kinds),
        small.problem,
    )


class Rehearsal:
    """Runs small versions of a study's jobs in a separate store."""

    def __init__(self, study: Study, context: RunContext) -> None:
        self.context = context
        self.problem = ""  # the first error that kept a job from being measured
        self.kinds, self.measured = set[Hashable](), set[Hashable]()
        self._known: dict[Hashable, tuple[Setting, int]] = {}
        sizes: dict[TaskSpec, Size] = {}
        for task in dict.fromkeys(spec.task for spec in study.trainings):
            with self._problems():
                sizes[task] = Size.of(task, context.root)
        self.pace = Pace(sizes)

    @contextmanager
    def _problems(self) -> Iterator[None]:
        """A job may fail in any way; the others are still measured."""
        try:
            yield
        except Exception as error:
            self.problem = self.problem or str(error).partition("\n")[0] or type(error).__name__

    def _setting(self, spec: TrainingSpec) -> tuple[Setting, int]:
        """The setting of a federation, and the samples of all its clients."""
        place = spec.task, spec.federation
        if place not in self._known:
            ready = prepare(spec, self.context.root)
            self._known[place] = ready.setting, sum(map(len, ready.clients.values()))
        return self._known[place]

    def training(self, spec: TrainingSpec) -> Job:
        """The training without its audit, and with the rounds after which its defense stops."""
        with self._problems():
            rounds = len(Federation.of(build_defense(spec.defense), self._setting(spec)[0]).history)
            spec = replace(spec, federation=replace(spec.federation, rounds=rounds))
        return Job("training", replace(spec, audit=0), ())

    def measure(self, jobs: Iterable[Job], small: Callable[[Job], Sequence[Job]], until: float) -> None:
        """Run small jobs for the middle job of each kind, because the first defense is often none; or for the first.

        Defenses hardly change the time of attacks and limits. None starts after `until`, of `time.monotonic`.
        """
        groups = gathered((_kinds(job)[0] if job.trains else _kinds(job)[1], job) for job in jobs)
        self.kinds.update(groups)
        # multiples of the golden ratio: whenever the time is over, the measured jobs are spread over all kinds
        for _, (kind, group) in sorted(enumerate(groups.items()), key=lambda pair: pair[0] * _GOLDEN % 1):
            for job in (group[len(group) // 2], group[0]):
                if kind not in self.measured and time.monotonic() < until:
                    with self._problems():
                        tried = small(job)
                        # the first job of a kind compiles, which counts little in a long one
                        if (first := self._run(tried[0])) > _LONG:
                            self.pace.learn(tried[0], first, job)
                        else:
                            for each in tried:
                                if self._run(each, job) > _LONG:
                                    break
                        self.measured.add(kind)

    def trainings(self, job: Job) -> list[Job]:
        """One round of a few clients, and a few rounds with more steps and all test samples."""
        spec, steps = job.training, self._setting(job.training)[0].steps
        clients = min(_CLIENTS, _participants(spec.federation))
        few = self._small(spec, 1, clients, min(steps, _FEW), _TEST)
        more = self._small(spec, 1 + _FEW, clients, min(steps, _MOST), spec.federation.test_samples)
        return [Job("training", few, ()), Job("training", more, ())]

    def attacks(self, job: Job) -> list[Job]:
        """The attack on one victim and on a few, with growing amounts of work."""
        small = self._attackable(job.cells[0])
        if job.kind == "limit":
            small = replace(small, target=replace(small.target, count=min(_CLIENTS, small.target.count)))
            return [job._replace(training=small.training, cells=(small,), part=(0, 1))]
        amounts = _AMOUNTS.get(_amount(small.attack)[0])
        parts = [_with_amount(small.attack, amount) for amount in amounts] if amounts else [small.attack]
        sizes = [(1, parts[0])] + [(_CLIENTS, part) for part in parts]
        cells = [
            replace(small, attack=part, limit=False, target=replace(small.target, count=min(count, small.target.count)))
            for count, part in sizes
        ]
        if small.target.whole:
            cells = [replace(cell, target=small.target) for cell in cells[1:]]
        return [Job("attack", small.training, (cell,)) for cell in cells]

    def _small(self, spec: TrainingSpec, rounds: int, clients: int, steps: int, test: int | None) -> TrainingSpec:
        """A short training of a few clients with unchanged samples, without audit; a recording is not changed."""
        if spec.task.data.startswith(RECORDING):
            return replace(spec.honest, audit=0)
        small = replace(spec.federation, rounds=rounds, test_samples=test)
        if small.partition in ("labels", "sizes"):  # which may not fit fewer clients
            small = replace(small, partition="iid", sizes=())
        if small.participants is None:
            samples = self._setting(spec)[1] * clients // small.clients
            small = replace(small, clients=clients, samples=samples)
        else:
            small = replace(small, participants=clients)
        if small.algorithm == "fedavg":
            small = replace(small, local_steps=steps, local_epochs=None)
        return replace(spec.honest, federation=small, audit=0)

    def _attackable(self, cell: Cell) -> Cell:
        """The cell on a training as short as its attack allows, or on round 0 if that training is still long."""
        spec, target = cell.training, cell.target
        last = max(target.looks_at, default=0)
        federation = replace(spec.federation, rounds=last + 1, evaluate_every=spec.federation.rounds)
        small = replace(spec, federation=federation, audit=0)
        if self.pace.expected(Job("training", small, ())) > _LONG:
            small = self._small(spec, 1, min(_CLIENTS, _participants(federation)), _FEW, _TEST)
            target = target if target.round is None else replace(target, round=0, rounds=1, shuffled=False)
        if spec.task.data.startswith(RECORDING):
            small, target = replace(spec, audit=0), cell.target
        rounds = frozenset(range(small.federation.rounds_run))
        if not training_suffices(small, Keep(rounds, rounds), self.context.store):
            self._run(Job("training", small, ()))
        return replace(cell, training=small, target=target)

    def _run(self, job: Job, like: Job | None = None) -> float:
        """The seconds of a small job, by which those of the jobs like it are forecast."""
        code_of(job.training), origin()  # read once per process and cached, so not part of a training's time
        start = time.perf_counter()
        if job.trains:
            rounds = frozenset(range(job.training.federation.rounds_run))
            run_training(job.training, Keep(rounds, rounds), self.context)
        elif job.kind == "limit":
            run_part(job, self.context)
        else:
            run_attack(job.cells[0], self.context)
        seconds = time.perf_counter() - start
        if like is not None:
            self.pace.learn(job, seconds, like)
        return seconds


def span(seconds: float) -> str:
    """A duration as text, in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
