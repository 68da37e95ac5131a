"""Estimate of each job's time on this machine: a guess from its size, corrected by the jobs that have ended.

The estimate only orders jobs; `cost.estimate` measures for users. No result depends on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from leakgauge.harness.core.cell import TaskSpec
from leakgauge.harness.study.cost import attacked, defended
from leakgauge.harness.study.engine import Job

_EVALUATION, _SHADOW, _TURN, _TRIAL, _LIMIT, _LEAST = 1e-4, 0.3, 4e-4, 0.01, 0.05, 5e-3
"""Seconds of an evaluation, a shadow model, a client's turn, a trial of an audit, a victim's limit, and of any job, for
a model of few parameters; measured with a linear model of digits."""

_DIM = 2e4
"""The number of model parameters at which these seconds double."""


class Pace:
    """The expected seconds of jobs.

    Args:
        dims: parameters of the model of each task.
    """

    def __init__(self, dims: Mapping[TaskSpec, int]) -> None:
        self.dims = dims
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
        """Seconds by only the size of the job."""
        spec, larger = job.training, 1 + self.dims.get(job.training.task, 0) / _DIM
        if job.kind in ("training", "trial"):
            one = spec.federation
            turns = one.rounds * (one.participants or one.clients) * (one.local_steps or 1)
            return _LEAST + larger * _TURN * turns + _TRIAL * spec.audit
        (cell,) = job.cells
        if job.kind == "limit":
            return _LEAST + larger * _LIMIT * len(job.victims)
        if _joins(job):
            return _LEAST * len(job.parts)
        given = {name: float(value) for name, value in cell.attack.parameters.items() if isinstance(value, int)}
        steps = given.get("evaluations", 1.0) * given.get("restarts", 1.0) * cell.target.rounds * cell.target.batch
        each = _EVALUATION * steps * (1 if cell.target.kind == "members" else len(job.victims))
        return _LEAST + larger * (each + _SHADOW * given.get("shadows", 0.0) + _EVALUATION * given.get("samples", 0.0))


def _kinds(job: Job) -> Iterator[Hashable]:
    """The kinds of a job, from narrow to wide, by properties that determine its time."""
    if job.kind in ("training", "trial"):
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
    """Whether an attack only joins the guesses of searches."""
    return job.kind == "attack" and any(name.startswith(job.cells[0].id) for name in job.parts)
