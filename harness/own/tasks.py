"""Checks of a task: a model and its data, and a quick study of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakgauge.harness.core.cell import TaskSpec
from leakgauge.harness.core.result import Run
from leakgauge.harness.core.rng import Key
from leakgauge.harness.own.findings import Fault, Finding, Skip, examined
from leakgauge.harness.own.parts import Part
from leakgauge.harness.own.quick import Effort, attacks, check_attacks, check_training, quick_study
from leakgauge.harness.study.prepare import load_data, make_task


@dataclass(frozen=True)
class Trial:
    """A task under examination."""

    part: Part
    effort: Effort

    @property
    def spec(self) -> TaskSpec:
        """The task as a study names it; missing data are replaced by digits, a missing model by a small network."""
        has = vars(self.part.found)
        data = f"{self.part.name}:data" if "data" in has else "digits"
        return TaskSpec(data, f"{self.part.name}:model" if "model" in has else "mlp-small")

    @functools.cached_property
    def study(self) -> Run:
        """The study of the task without a defense."""
        return quick_study({"data": self.spec.data, "model": self.spec.model}, [{"name": "none"}], attacks(self.effort))


def examine(part: Part, effort: Effort) -> Iterator[Finding]:
    """The findings about a task."""
    checks: tuple[tuple[str, Callable[[Trial], str]], ...] = (
        ("data", check_data),
        ("model", check_model),
        ("training", lambda trial: check_training(trial.study, trial.part)),
        ("attacks", lambda trial: check_attacks(trial.study, trial.part)),
    )
    yield from examined(checks, Trial(part, effort), part.folder)


def check_data(trial: Trial) -> str:
    """The data can be used in a study."""
    if trial.spec.data == "digits":
        raise Skip("no `data`: the digits data set is used instead")
    found = load_data(trial.spec.data, Path())
    x = found.train.x
    return (
        f"{len(x):,} training and {len(found.test.y):,} test inputs {list(x.shape[1:])}, {len(found.classes)} classes"
    )


def check_model(trial: Trial) -> str:
    """The model accepts the data, and its parameters are drawn by a key."""
    loaded = load_data(trial.spec.data, Path())
    task = make_task(trial.spec, loaded)
    one, other = (task.init(Key(0)) for _ in range(2))
    if not bool((one == other).all()):
        raise Fault(
            "the same key gives different parameters; the factory must draw only from the seeded global generators"
        )
    scores: Any = task.outputs(one, loaded.train.x[:2])
    return f"{task.layout.dim:,} parameters in {len(task.layout.names)} tensors, scores {list(scores.shape[1:])}"
