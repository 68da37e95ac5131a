"""What a training starts from, and what attacks on it start from: the federation of a specification.

`prepare` builds it, `StoredTraining` restores it with the models and messages that the training kept, and
`observe_stored` shows it to an adversary.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from leakgauge.harness.core.cell import FederationSpec, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.claim import Claim, Violation
from leakgauge.harness.core.contract import Defense, Examples, Feedback, Message, Observation, Sender, Setting, claim_of
from leakgauge.harness.core.result import TrainingRecord
from leakgauge.harness.core.rng import Key, integers, subset
from leakgauge.harness.core.stored import canonical, to_data
from leakgauge.harness.core.threats import View
from leakgauge.harness.data import DataSet
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep, Training, make_setting
from leakgauge.harness.federation.observe import TrainedFederation, Truth, observe
from leakgauge.harness.federation.recording import RecordedData, load
from leakgauge.harness.federation.round import client_key
from leakgauge.harness.learn import models
from leakgauge.harness.learn.batch import Engine, choose_engine
from leakgauge.harness.learn.modules import paced
from leakgauge.harness.learn.partition import Holdings, partition
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.jobs import RunContext
from leakgauge.harness.study.recorded import clients_of, shared_key, sizes_of
from leakgauge.harness.study.store import Arrays, Store


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


def trained_federation(spec: TrainingSpec, ready: Prepared, training: Training, engine: Engine) -> TrainedFederation:
    """The trained federation of a training."""
    return TrainedFederation(
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


class StoredTraining(NamedTuple):
    """A training as it was stored at the time `written`: what this process remembers of it, it finds by this value."""

    folder: Path
    root: Path
    id: str
    written: int

    @classmethod
    def of(cls, spec: TrainingSpec, context: RunContext) -> StoredTraining:
        """The stored training of a specification.

        Raises:
            ValueError: the training is not stored.
        """
        try:
            written = (context.store.training(spec.id) / "kept.npz").stat().st_mtime_ns
        except OSError as error:
            raise ValueError(f"the training {spec.id} of this cell is not stored; run the study again") from error
        return cls(context.folder.absolute(), context.root, spec.id, written)

    @property
    def store(self) -> Store:
        """The store that has it."""
        return Store(self.folder)

    @property
    def federation(self) -> TrainedFederation:
        """The trained federation of the training; this process remembers the last two.

        Raises:
            ValueError: the training cannot be read.
        """
        return _federation(self)


@functools.lru_cache(maxsize=2)
def _federation(stored: StoredTraining) -> TrainedFederation:
    store = stored.store
    record = store.read_training(stored.id)
    arrays = store.read_arrays(store.training(stored.id) / "kept.npz")
    if record is None or arrays is None:
        raise ValueError(f"the stored training {stored.id} cannot be read; run the study again")
    ready = prepare(record.spec, stored.root)
    key = shared_key(ready.data, ready.key.child("training"))
    training = from_arrays(arrays, ready.setting, record, key)
    return trained_federation(record.spec, ready, training, choose_engine(ready.task))


def seen_by(federation: TrainedFederation, view: View, root: Path) -> TrainedFederation:
    """The trained federation with the auxiliary data of this adversary, if they are from another data set than the
    victims'.

    The labels of such data do not apply to the victims and are drawn at random.
    """
    if not view.other:
        return federation
    x, classes = load_data(view.other, root).test.x, federation.task.classes
    drawn = torch.from_numpy(integers(federation.key.child("auxiliary", view.other), len(x), classes))
    return dataclasses.replace(federation, auxiliary=Examples(x, drawn.to(federation.train.y.dtype)))


def observe_stored(stored: StoredTraining, threat: str, target: Target, device: str) -> tuple[Observation, Truth]:
    """What an adversary sees of a target of a stored training, and the truth; `device` is where it computes."""
    view = View.parse(threat)
    observation, truth = observe(seen_by(stored.federation, view, stored.root), view, target)
    return dataclasses.replace(observation, device=device), truth


def public_states(defense: Defense[Any, Any], training: Training) -> list[Any]:
    """The defense's public state in each round."""
    states = [defense.init(training.setting)]
    for feedback in training.feedback[:-1]:
        states.append(defense.advance(states[-1], feedback))
    return states


def claimed(federation: TrainedFederation, rounds: Sequence[int]) -> Claim:
    """The defense's claim for these rounds; for the whole run if there are none."""
    states = public_states(federation.defense, federation.training)
    return claim_of(federation.defense, [states[number] for number in rounds] or states, federation.training.setting)


def to_arrays(training: Training, keep: Keep) -> Arrays:
    """The arrays of a training. Shared keys are not stored, because the seed determines them."""
    losses = [training.feedback[0].before, *(item.after for item in training.feedback)]
    arrays: dict[str, npt.NDArray[Any]] = {
        # the requested rounds: after a defense has stopped, a round has no model and no messages
        "asked": np.array(sorted(keep.messages), np.int64),
        "asked models": np.array(sorted(keep.models), np.int64),
        "final": training.final.numpy(),
        "learning_rates": np.array(training.learning_rates),
        # before the first round, and after each; NaN: not evaluated
        "losses": np.array([np.nan if loss is None else loss for loss in losses]),
    }
    for number, params in training.models.items():
        arrays[f"model {number}"] = params.numpy()
    for number, messages in training.messages.items():
        arrays[f"wires {number}"] = np.frombuffer(b"".join(message.wire for message in messages), np.uint8)
        senders = [(*m.sender, len(m.wire), m.images, m.steps) for m in messages]
        arrays[f"senders {number}"] = np.array(senders, np.int64).reshape(-1, 5)
        others = [(i, *other) for i, message in enumerate(messages) for other in message.others]
        arrays[f"others {number}"] = np.array(others, np.int64).reshape(-1, 3)
        for sender, samples in training.truth[number].items():
            arrays[f"truth {number} {sender}"] = samples
    return arrays


def holds(arrays: Arrays, keep: Keep) -> bool:
    """Whether the arrays contain the requested rounds; False for arrays of another version."""
    if "asked" not in arrays or "asked models" not in arrays:
        return False
    return keep.messages <= set(arrays["asked"].tolist()) and keep.models <= set(arrays["asked models"].tolist())


def from_arrays(arrays: Arrays, setting: Setting, record: TrainingRecord, key: Key | None) -> Training:
    """The training that `to_arrays` stored; `key` is the key of the training, None: the shared keys are unknown."""
    losses = [None if np.isnan(loss) else float(loss) for loss in arrays["losses"]]
    training = Training(
        setting,
        torch.from_numpy(arrays["final"]),
        evaluations=list(record.evaluations),
        learning_rates=[float(lr) for lr in arrays["learning_rates"]],
        feedback=[Feedback(number, *pair) for number, pair in enumerate(itertools.pairwise(losses))],
        message_bytes=list(record.message_bytes),
        snr_db=list(record.snr_db),
        violations={b.assumption: Violation(b.broken, b.of, b.what, b.covered) for b in record.violations},
        dropped=list(record.dropped),
    )
    for name, array in arrays.items():
        kind, _, rest = name.partition(" ")
        if kind == "model":
            training.models[int(rest)] = torch.from_numpy(array)
        elif kind == "truth":
            number, sender = map(int, rest.split())
            training.truth.setdefault(number, {})[sender] = array
        elif kind == "senders":
            wires, others = arrays[f"wires {rest}"].tobytes(), arrays[f"others {rest}"]
            training.truth.setdefault(int(rest), {})
            training.messages[int(rest)] = _messages(int(rest), array, others, wires, key)
    return training


def _messages(
    number: int, senders: npt.NDArray[Any], others: npt.NDArray[Any], wires: bytes, key: Key | None
) -> tuple[Message, ...]:
    """The messages of one round from their joined bytes; others: [k, 3] index of the message, sender, samples."""
    ends = np.cumsum(senders[:, 2])
    return tuple(
        Message(
            number,
            Sender(int(sender), int(samples)),
            wires[end - length : end],
            key and client_key(key, number, int(sender)).child("shared"),
            int(images),
            int(steps),
            tuple(Sender(int(k), int(n)) for index, k, n in others if index == i),
        )
        for i, ((sender, samples, length, images, steps), end) in enumerate(zip(senders, ends, strict=True))
    )
