"""What a training starts from: the data, the model, the clients with their records, the defense and the keys."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from leakgauge.harness.core.cell import FederationSpec, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.contract import Defense, Examples, Setting
from leakgauge.harness.core.rng import Key, subset
from leakgauge.harness.core.stored import canonical, to_data
from leakgauge.harness.data import DataSet
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Training, make_setting
from leakgauge.harness.federation.observe import Scene
from leakgauge.harness.federation.recording import RecordedData, load
from leakgauge.harness.learn import models
from leakgauge.harness.learn.batch import Engine
from leakgauge.harness.learn.modules import paced
from leakgauge.harness.learn.partition import Holdings, partition
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.recorded import clients_of, sizes_of


class Prepared(NamedTuple):
    """The ingredients of a training; `clients` are the rows of each client's data, `holdings` the data themselves."""

    task: ModelTask
    data: DataSet
    test: Examples
    clients: dict[int, Any]
    holdings: Holdings
    defense: Defense[Any, Any]
    setting: Setting
    key: Key


@functools.lru_cache(maxsize=4)
def load_data(name: str, root: Path) -> DataSet:
    """A data set, cached for the next jobs of this process."""
    return load(name, root)


def make_task(spec: TaskSpec, loaded: DataSet, federation: FederationSpec | None = None) -> ModelTask:
    """The task of a specification on its data.

    Args:
        federation: if its clients send updates, the running statistics of a user's model move as in torch.

    Raises:
        LookupError: there is no such model.
        ValueError: the model does not fit the shape of the data.
    """
    model = models.build(spec.model, loaded.input_shape, len(loaded.classes))
    if federation is not None and federation.algorithm == "fedavg":
        model = paced(model, federation.lr)
    if spec.inputs == "centered":
        model = models.scaled(model, torch.tensor(-1.0), torch.tensor(2.0))
    return ModelTask(models.scaled(model, loaded.low, loaded.span), spec.init, loaded.columns)


def prepare(spec: TrainingSpec, root: Path) -> Prepared:
    """Load the data, build the model and the defense, and partition the data among the clients."""
    federation, key = spec.federation, Key(spec.seed)
    loaded = load_data(spec.task.data, root)
    task = make_task(spec.task, loaded, federation)
    x, y = loaded.train
    if federation.validation >= len(y):
        raise ValueError(f"expected validation < {len(y)} training samples, got validation={federation.validation}")
    held_out = subset(key.child("training", "validation"), len(y), federation.validation)
    recording = loaded.recording if isinstance(loaded, RecordedData) else None
    if recording is None:
        rest = np.delete(np.arange(len(y)), held_out)
        shares = partition(federation, y[rest], key.child("training", "partition"))
        clients = {number: rest[rows] for number, rows in enumerate(shares)}
    else:
        clients = clients_of(recording, len(y))
    holdings = Holdings(loaded.train, clients)
    test = loaded.test
    if federation.evaluate_on == "train":
        test = Examples(*(torch.cat(parts) for parts in zip(*holdings.values(), strict=True)))
    elif federation.evaluate_on == "validation":
        test = Examples(x[held_out], y[held_out])
    if federation.test_samples is not None and federation.test_samples < len(test.y):
        rows = subset(key.child("training", "test"), len(test.y), federation.test_samples)
        test = Examples(test.x[rows], test.y[rows])
    defense = registry.build_defense(spec.defense)
    sized = holdings if recording is None else sizes_of(recording, len(y))
    setting = make_setting(task, federation, sized, defense.local)
    return Prepared(task, loaded, test, clients, holdings, defense, setting, key)


def scene_of(spec: TrainingSpec, ready: Prepared, training: Training, engine: Engine) -> Scene:
    """The scene of a training."""
    return Scene(
        task=ready.task,
        spec=spec.federation,
        defense=ready.defense,
        training=training,
        train=ready.data.train,
        test=ready.test,
        clients=ready.clients,
        engine=engine,
        key=ready.key,
    )


def attack_key(seed: int, attack: PartSpec, target: Target) -> Key:
    """The key of an attack on a target: the same for every defense."""
    return Key(seed).child("attack", attack.name, canonical(to_data(target)))
