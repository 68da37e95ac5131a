"""Whether a study fits its data, models and defenses: found before any training, all problems together.

Nothing is trained. The samples are dealt to the clients, and the records and senders of each target are chosen, with
the keys of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from leakgauge.harness.core.cell import Malice, PartSpec, TrainingSpec
from leakgauge.harness.core.contract import Feedback, Snapshot
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.labels import UNDEFENDED, label_parts
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import View
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.data import DataSet, default_root
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Training, make_plan, setting_of
from leakgauge.harness.federation.observe import TrainedFederation, check_target
from leakgauge.harness.federation.small import Federation
from leakgauge.harness.learn.batch import Indices, check_records
from leakgauge.harness.learn.losses import parse
from leakgauge.harness.learn.modules import check
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.attack import check_form
from leakgauge.harness.study.goal import goal_of, solve
from leakgauge.harness.study.prepare import deal, disagreements, load_data, make_task, numbers_of, tested
from leakgauge.harness.study.study import Study
from leakgauge.harness.study.training import chooser

T = TypeVar("T")

_PLAIN = ("sgd", 0.0, 1.0)  # the server's optimizer, momentum and learning rate that a crafted update reckons with
_DEALING = ("clients", "samples", "validation", "partition", "alpha", "shards", "labels", "imbalance", "sizes")
"""The fields of a federation that determine which samples a client has."""


def check_study(study: Study, data: Path | None = None) -> dict[str, tuple[str, bool]]:
    """The digest of each data set, and whether the data set is public.

    Args:
        data: folder of the data sets; None: the default folder.

    Raises:
        StudyError: a data set is missing or unreadable; a model, a loss or an attack does not fit it; a defense does
            not fit the model or the federation; there are fewer samples, labels, clients, messages or rounds than a
            federation or a target asks for; no goal can be met. One line for each problem.
    """
    load_data.cache_clear()  # a file may have changed since this process last read it
    root = default_root() if data is None else data
    digests, problems = dict[str, tuple[str, bool]](), list[str]()
    for task in dict.fromkeys(training.task for training in study.trainings):
        specs, key = [spec for spec in study.trainings if spec.task == task], "tasks.data"
        try:
            loaded, key = load_data(task.data, root), "tasks.loss"
            _, key = parse(task.loss or "cross-entropy"), "tasks.model"
            made = make_task(task, loaded)
            check(made)
        except (LookupError, ValueError, OSError) as error:
            problems.append(f"{key}: {error}")
            continue
        digests[task.data] = (loaded.digest, loaded.public)
        wrong = disagreements(specs, study.cells, loaded, made)
        problems += wrong or _OnTask(study, loaded, made).problems(specs)
    for task, name in dict.fromkeys((cell.training.task, View.parse(cell.threat).other) for cell in study.cells):
        if name and task.data in digests:
            try:
                other = load_data(name, root)
                _check_alike(other, load_data(task.data, root))
                digests[name] = (other.digest, other.public)
            except (LookupError, ValueError, OSError) as error:
                problems.append(str(error))
    if problems := problems or _out_of_reach(study, root):
        raise StudyError(study.name, problems)
    return digests


def _check_alike(other: DataSet, own: DataSet) -> None:
    if other.input_shape != own.input_shape:
        text = f"expected inputs {own.input_shape} as in {own.name!r}, got {other.input_shape}"
        raise ValueError(f"auxiliary={other.name}: {text}")
    if other.scale != own.scale:
        text = f"its inputs are scaled to [0, 1] otherwise than those of {own.name!r}; give both in [0, 1]"
        raise ValueError(f"auxiliary={other.name}: {text}")


def _out_of_reach(study: Study, root: Path) -> list[str]:
    """The goals of a study whose only goals are proved epsilons, if none of them can be met."""
    goals = [goal_of(spec.defense) for spec in study.trainings]
    if not all(goal and goal.proved_epsilon for goal in goals):
        return []
    cells, notes = solve(study.cells, root, lambda trainings: {})
    return [] if cells else [f"defenses.target: {note}" for note in notes]


class _OnTask:
    """The trainings of a study on one task, whose model fits its data."""

    def __init__(self, study: Study, data: DataSet, task: ModelTask) -> None:
        self.study, self.data, self.task = study, data, task
        self._labels = label_parts(spec.defense for spec in study.trainings)
        self._known: dict[Hashable, Any] = {}

    def problems(self, specs: Iterable[TrainingSpec]) -> list[str]:
        """What does not fit, in a line each."""
        found = list[str]()
        for spec in specs:
            with suppress(Exception):  # in a user's code: its job reports the error, with the trace
                found.extend(self._of_training(spec))
        return found

    def _tried(self, about: Hashable, make: Callable[[], T]) -> T | str:
        """What `make` returned when it was first asked about this, or the text of its error."""
        if about not in self._known:
            try:
                self._known[about] = make()
            except ValueError as error:
                self._known[about] = str(error)
        found: T | str = self._known[about]
        return found

    def _of_training(self, spec: TrainingSpec) -> Iterator[str]:
        """Parts, then samples, then targets; what needs something that does not fit is not tried."""
        federation, cells, key = spec.federation, self.study.cells_of[spec.id], Key(spec.seed)
        for attack in {cell.attack.key: cell.attack for cell in cells}.values():
            if wrong := self._tried(("attack", attack.key), partial(self._check_attack, attack)):
                yield f"attacks ({attack.name}): {wrong}"
        if wrong := self._tried(("defense", spec.defense.key), partial(self._check_defense, spec.defense)):
            yield f"defenses ({self._labels[spec.defense.key].text}): {wrong}"
        dealing = tuple(getattr(federation, name) for name in _DEALING)
        hand = self._tried((spec.seed, dealing), partial(deal, federation, self.data, key))
        if isinstance(hand, str):
            yield f"federations.{hand}"
            return
        sizes = {"test": len(self.data.test.y), "train": sum(map(len, hand[0].values())), "validation": len(hand[1])}
        if (federation.test_samples or 0) > (most := sizes[federation.evaluate_on]):
            yield f"federations.test_samples: got {federation.test_samples}, expected at most {most}"
        rounds = 1 + max(number for cell in cells for number in (0, *cell.target.looks_at))
        scene = self._tried((federation, spec.defense.key, rounds), partial(self._scene, spec, hand[0], rounds))
        if isinstance(scene, str):
            yield from () if wrong else [f"defenses ({self._labels[spec.defense.key].text}): {scene}"]
            return
        scene = replace(scene, clients=hand[0], key=key)
        if spec.malice or any(cell.target.kind == "members" or cell.target.property for cell in cells):
            scene = replace(scene, test=tested(federation, self.data, *hand, key))
        yield from self._of_targets(spec, scene)

    def _of_targets(self, spec: TrainingSpec, scene: TrainedFederation) -> Iterator[str]:
        federation, defense = spec.federation, scene.defense
        of = spec.seed, federation, defense.local, defense.superposes, len(scene.training.feedback)
        for cell in self.study.cells_of[spec.id]:
            view, malice = View.parse(cell.threat), spec.malice
            about = *of, cell.target, view.sees & {"craft", "sums"}
            plain = federation.server_optimizer, federation.server_momentum, federation.server_lr
            if wrong := self._tried(about, partial(check_target, scene, view, cell.target)):
                yield f"attacks.target ({cell.attack.name}): {wrong}"
            elif "craft" in view.sees and plain != _PLAIN:
                yield f"attacks ({cell.attack.name}): expected server_optimizer=sgd, server_momentum=0 and server_lr=1"
            elif malice:
                chosen = federation, malice.attack.key, malice.target
                params = self._tried(chosen, partial(_choose, malice, scene))
                yield from [f"attacks ({cell.attack.name}): {params}"] * isinstance(params, str)

    def _check_attack(self, attack: PartSpec) -> None:
        check_form(registry.build_attack(attack), self.task.form)

    def _check_defense(self, defense: PartSpec) -> None:
        goal, (x, y) = goal_of(defense), self.data.test
        if goal is None:
            rule = registry.build_defense(defense).local
            check_records(self.task.under(rule), rule)
        elif goal.accuracy_loss and self.task.tested(self.task.init(Key(0)), x[:1], y[:1])[1] is None:
            raise ValueError("target.accuracy_loss: the task has no accuracy")

    def _scene(self, spec: TrainingSpec, clients: dict[int, Indices], rounds: int) -> TrainedFederation:
        """The federation before its training, with as many of the rounds as the defense allows.

        A defense that is solved for a goal is left out.

        Raises:
            ValueError: the defense does not fit the federation.
        """
        federation = spec.federation
        defense = registry.build_defense(PartSpec(UNDEFENDED) if goal_of(spec.defense) else spec.defense)
        task = self.task.under(defense.local)
        setting = setting_of(task.layout, federation, numbers_of(self.data, clients), defense.local)
        make_plan(federation, federation.lr, defense.local, defense.step_noise(setting))
        training = Training(setting, torch.zeros(0))
        for number in range(len(Federation.of(defense, setting, rounds).history)):
            training.feedback.append(Feedback(number, None, None))
        if not training.feedback:
            raise ValueError("it stops before the first round")
        parts = task, federation, defense, training, self.data.train, self.data.test, clients
        return TrainedFederation(*parts, "loop", Key(spec.seed), classes=self.data.classes)


def _choose(malice: Malice, scene: TrainedFederation) -> Vector:
    """What a malicious server or participant chooses in place of the first model."""
    first, setting = scene.task.init(scene.key.child("training", "init")), scene.training.setting
    choose = chooser(malice, scene, scene.key.seed)
    return choose(Snapshot(0, first, scene.defense.init(setting)), scene.spec.lr)
