"""What a training starts from, and what attacks on it start from: the federation of a specification.

`prepare` builds it, `StoredTraining` restores it with the models and messages that the training kept, and
`observe_stored` shows it to an adversary. `as_recorded` reads a recording in place of a training; `problems` says where
the study must agree with it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.cell import Cell, FederationSpec, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.claim import Claim, Violation
from leakgauge.harness.core.contract import (
    Defense,
    Examples,
    Feedback,
    Link,
    Message,
    Observation,
    Sender,
    Setting,
    claim_of,
)
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.labels import part_text
from leakgauge.harness.core.result import Dropped, TrainingRecord
from leakgauge.harness.core.rng import Key, integers, subset
from leakgauge.harness.core.stored import canonical, to_data
from leakgauge.harness.core.threats import View
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.data import DataSet
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep, Training, evaluation, replay_state, setting_of
from leakgauge.harness.federation.observe import TrainedFederation, Truth, observe
from leakgauge.harness.federation.recording import RecordedData, Recording, load, spec_of
from leakgauge.harness.federation.round import Round, SealedMessage, client_key
from leakgauge.harness.learn import models
from leakgauge.harness.learn.batch import Engine, Indices, choose_engine
from leakgauge.harness.learn.modules import paced
from leakgauge.harness.learn.partition import Holdings, partition
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.learn.wrapped import plain_name
from leakgauge.harness.study.jobs import RunContext
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
    held_out: Examples | None = None


@functools.lru_cache(maxsize=4)
def load_data(name: str, root: Path) -> DataSet:
    """A data set, cached for the next jobs of this process."""
    return load(name, root)


def make_task(spec: TaskSpec, loaded: DataSet, federation: FederationSpec | None = None) -> ModelTask:
    """The task of a specification on its data.

    Args:
        federation: if its clients send updates, the running statistics of a user's model move as in torch.

    Raises:
        LookupError: there is no such model or loss.
        ValueError: model or loss does not fit the shape of the data.
    """
    y = loaded.train.y
    if y.ndim == 2 and not spec.loss and bool(((y.sum(1) - 1).abs() < 1e-4).all()):
        text = "expected one label of each example, got rows that sum to 1: of one-hot labels, take the argmax"
        raise ValueError(f"{text}; if several labels may hold, state loss=binary-cross-entropy")
    classes, numbers = (0, y.shape[1]) if y.ndim == 2 else (len(loaded.classes), 1)
    loss = spec.loss or ("binary-cross-entropy" if y.ndim == 2 and loaded.classes else "")
    form = loaded.form
    if loaded.places and not loss:
        loss = "cross-entropy-per-place"
    if not form.continuous and not loss and not loaded.classes and not bool(y.any()):
        loss = "next-token"
    model = models.build(spec.model, loaded.input_shape, classes, loss, numbers, form)
    if federation is not None and federation.algorithm == "fedavg":
        model = paced(model, federation.lr)
    if spec.inputs == "centered":
        model = models.scaled(model, torch.tensor(-1.0), torch.tensor(2.0))
    return ModelTask(models.scaled(model, loaded.low, loaded.span), spec.init, form)


def prepare(spec: TrainingSpec, root: Path) -> Prepared:
    """Load the data, build the model and the defense, and partition the data among the clients."""
    federation, key = spec.federation, Key(spec.seed)
    loaded = load_data(spec.task.data, root)
    defense = registry.build_defense(spec.defense)
    task = make_task(spec.task, loaded, federation).under(defense.local)
    clients, rows = deal(federation, loaded, key)
    holdings = Holdings(loaded.train, clients)
    test = tested(federation, loaded, clients, rows, key)
    held_out = Examples(*(part[rows] for part in loaded.train)) if len(rows) else None
    setting = setting_of(task.layout, federation, numbers_of(loaded, clients), defense.local)
    if spec.malice is not None or isinstance(loaded, RecordedData):  # weights and missing clients are not known
        setting = dataclasses.replace(setting, equal=False)
    return Prepared(task, loaded, test, clients, holdings, defense, setting, key, held_out)


def deal(federation: FederationSpec, loaded: DataSet, key: Key) -> tuple[dict[int, Indices], Indices]:
    """The training samples of each client, and those that no client gets.

    Raises:
        ValueError: the federation does not fit the data; the error begins with a field of the federation.
    """
    y = loaded.train.y
    if federation.validation >= len(y):
        raise ValueError(f"validation: got {federation.validation}, expected less than {len(y)} training samples")
    held_out = subset(key.child("training", "validation"), len(y), federation.validation)
    if isinstance(loaded, RecordedData):
        return clients_of(loaded.recording, len(y)), held_out
    rest = np.delete(np.arange(len(y)), held_out)
    shares = partition(federation, y[rest], key.child("training", "partition"))
    return {number: rest[rows] for number, rows in enumerate(shares)}, held_out


def tested(
    federation: FederationSpec, loaded: DataSet, clients: Mapping[int, Indices], held_out: Indices, key: Key
) -> Examples:
    """The records on which the models are evaluated; the whole set if it has fewer than `test_samples`."""
    test = loaded.test
    if federation.evaluate_on == "train":
        held = Holdings(loaded.train, clients).values()
        test = Examples(*(torch.cat(parts) for parts in zip(*held, strict=True)))
    elif federation.evaluate_on == "validation":
        test = Examples(*(part[held_out] for part in loaded.train))
    if federation.test_samples is not None and federation.test_samples < len(test.y):
        rows = subset(key.child("training", "test"), len(test.y), federation.test_samples)
        test = Examples(test.x[rows], test.y[rows])
    return test


def numbers_of(loaded: DataSet, clients: Mapping[int, Indices]) -> list[int]:
    """The number of samples of each client; those of a recording state it, as their records may be unknown."""
    if not isinstance(loaded, RecordedData):
        return list(map(len, clients.values()))
    recording = loaded.recording
    return list((recording.samples or {0: max(1, len(loaded.train.y) // recording.facts.clients)}).values())


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
        classes=ready.data.classes,
    )


def attack_key(seed: int, attack: PartSpec, target: Target) -> Key:
    """The key of an attack on a target: the same for every defense."""
    return Key(seed).child("attack", attack.name, canonical(to_data(target)))


_SAME = (
    *("clients", "participants", "rounds", "algorithm", "local_steps", "local_epochs", "batch"),
    *("lr", "momentum", "optimizer", "weight_decay", "proximal"),
)
"""The fields of a federation that a recording states."""

_UNHEARD = Key(0, ("unheard",))  # the key of a channel's noise, if the training's key is unknown


def disagreements(
    trainings: Iterable[TrainingSpec], cells: Sequence[Cell], loaded: DataSet, task: ModelTask
) -> list[str]:
    """Disagreements of these trainings on one task, or of their cells' targets, with a recording; one line each."""
    if not isinstance(loaded, RecordedData):
        return []
    lines = list[str]()
    for spec in trainings:
        alike = loaded.recording.defense == spec.defense
        layout = (task.under(registry.build_defense(spec.defense).local) if alike else task).layout
        lines += problems(spec, [cell for cell in cells if cell.training == spec], loaded.recording, layout)
    return [f"{loaded.name}: {text}" for text in lines]


def problems(spec: TrainingSpec, cells: Iterable[Cell], recording: Recording, layout: Layout) -> Iterator[str]:
    """Disagreements of this training, or of its cells' targets, with the recording; one line each."""
    expected = spec_of(recording)
    for name in _SAME:
        want, got = _field(expected, name), _field(spec.federation, name)
        if want != got:
            yield f"federation.{name}: got {got}, expected {want} as in the recording"
    if recording.defense != spec.defense:  # compared as data: an untrusted recording must not import code
        yield f"defense: got {part_text(spec.defense)}, expected {part_text(recording.defense)} as in the recording"
    if recording.seed not in (None, spec.seed):
        yield f"seeds: got {spec.seed}, expected {recording.seed} as in the recording, whose shared keys follow from it"
    if spec.malice is not None:
        yield f"attack {spec.malice.attack.name!r} chooses models; in a recording they were chosen already"
    if difference := _mismatch(layout, recording.layout):
        yield f"model {spec.task.model!r}: {difference}"
    yield from dict.fromkeys(_missing(cells, recording))


def _field(spec: FederationSpec, name: str) -> Any:
    value = getattr(spec, name)
    if name == "participants":
        return value or spec.clients
    trains = spec.algorithm == "fedavg" and spec.local_steps is None
    return 1 if name == "local_epochs" and value is None and trains else value


def _missing(cells: Iterable[Cell], recording: Recording) -> Iterator[str]:
    unknown = {t: set(sent) - set(recording.rows.get(t, {})) for t, sent in recording.sent.items()}
    for cell in cells:
        for number in cell.target.looks_at:
            if number not in recording.models or number >= recording.rounds:
                yield f"target.round: {recording.lacks(number)}"
            elif cell.target.kind == "messages" and set(recording.sent.get(number, ())) <= unknown.get(number, set()):
                yield f"target: the recording has no message of round {number} with the records behind it; use a probe"
        if cell.target.kind == "members" and (not unknown or any(unknown.values())):
            yield "target: the recording does not say which records are behind each message: who is a member is unknown"


def _mismatch(model: Layout, recorded: Layout) -> str:
    """The first tensor in which a recorded layout differs from the model's, and how; empty if they are equal.

    What wrappers such as `DataParallel` put into names does not count. Flower's older API sends arrays without names,
    which are recorded by their numbers; these match by their order.
    """
    numbered = len(model.names) == len(recorded.names) and all(name.isdecimal() for name in recorded.names)
    names = [plain_name(name) for name in model.names]
    pairs = itertools.zip_longest(
        zip(names, model.shapes, strict=True),
        zip(names if numbered else map(plain_name, recorded.names), recorded.shapes, strict=True),
    )
    for at, pair in enumerate(pairs):
        if pair[0] != pair[1]:
            ours, theirs = ("none" if tensor is None else f"{tensor[0]!r} of shape {tensor[1]}" for tensor in pair)
            return f"tensor {at}: the model has {ours}, the recording has {theirs}"
    return ""


def clients_of(recording: Recording, samples: int) -> dict[int, Indices]:
    """The rows behind each client's messages; if none are known, client 0 has all `samples`."""
    rows = gathered(pair for sent in recording.rows.values() for pair in sent.items())
    known = {client: np.unique(np.concatenate(rows[client])) for client in sorted(rows)}
    return known or {0: np.arange(samples)}


def shared_key(loaded: DataSet, key: Key) -> Key | None:
    """The key of a training, which determines its shared keys; None if this recording's shared keys are unknown."""
    return None if isinstance(loaded, RecordedData) and loaded.recording.seed is None else key


def as_recorded(
    recording: Recording,
    keep: Keep,
    task: ModelTask,
    defense: Defense[Any, Any],
    setting: Setting,
    test: Examples,
    clients: Mapping[int, Indices],
    key: Key | None,
) -> Training:
    """The training that a recording holds, with the requested rounds.

    The recorded losses determine the defense's state; other losses count as not evaluated. A message that the defense
    refuses is dropped, as by a server.

    Args:
        test: the records on which the kept models, the first model and the last model are evaluated.
        key: of the training; None: the shared keys are unknown.

    Raises:
        ValueError: a file is damaged, or a model is not finite or gives no finite loss.
    """
    last = max(recording.models, default=None)
    if last is None:
        raise ValueError(f"the recording in {recording.folder} has no model")
    training = Training(setting, recording.model(last), message_bytes=list(recording.message_bytes))
    training.learning_rates = [recording.lr(number) for number in range(recording.rounds)]
    training.feedback = _feedback([recording.loss(number) for number in range(recording.rounds + 1)])
    for number in sorted({recording.models[0], *keep.models & set(recording.models), last}):
        params = recording.model(number)
        training.evaluations.append(evaluation(task, params, test, number))
        if number in keep.models:
            training.models[number] = params
    for number in sorted(keep.messages & set(recording.sent)):
        state = replay_state(defense, setting, training.feedback[:number])
        _receive(training, recording, Round(defense, setting, state, number), clients, key)
    return training


def _receive(
    training: Training, recording: Recording, round_: Round, clients: Mapping[int, Indices], key: Key | None
) -> None:
    """Add the accepted messages of one round, and the records behind them as places in a client's data."""
    number, recorded = round_.number, recording.messages(round_.number)
    messages = [_message(number, Sender(*sent[1:3]), *sent[3:6], key) for sent in recorded]
    accepted, dropped = (_added_up if round_.defense.superposes else _accepted)(round_, messages, key)
    training.dropped += [Dropped(number, client, reason) for client, reason in dropped.items()]
    training.messages[number] = tuple(accepted)
    training.truth[number] = {
        sent.client: np.searchsorted(clients[sent.client], sent.rows).astype(np.int64)
        for sent in recorded
        if sent.rows is not None and sent.client not in dropped
    }


def _accepted(round_: Round, messages: Sequence[Message], key: Key | None) -> tuple[list[Message], dict[int, str]]:
    dropped = dict[int, str]()
    for message in messages:
        try:
            round_.accept(message.wire, Link(round_.setting, message.sender, message.shared))
        except MessageError as error:
            dropped[message.sender.number] = str(error)
    return [message for message in messages if message.sender.number not in dropped], dropped


def _added_up(round_: Round, messages: Sequence[Message], key: Key | None) -> tuple[list[Message], dict[int, str]]:
    """The received sum of the clients' messages, as `_accepted`; without a key, the channel's noise is drawn again."""
    own = (key or _UNHEARD).child("round", round_.number)
    sealed_messages = [
        SealedMessage(
            message.sender,
            round_.sealed(message.wire, message.sender),
            message.shared or own.child("shared", message.sender.number),
        )
        for message in messages
    ]
    collected = round_.collect(sealed_messages, own.child("channel"), own.child("server"))
    counted = [message for message in messages if message.sender.number not in collected.dropped]
    if not counted:
        return [], collected.dropped
    images, steps = sum(message.images for message in counted), max(message.steps for message in counted)
    others = tuple(message.sender for message in counted[1:])
    wire = collected.exchange.received[0]
    return [counted[0]._replace(wire=wire, images=images, steps=steps, others=others)], collected.dropped


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
        """The trained federation, cached for the last two trainings; raises ValueError if it cannot be read."""
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
    """The federation with the adversary's data from another data set, whose labels do not apply and are drawn."""
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
    return [*itertools.accumulate([defense.init(training.setting), *training.feedback[:-1]], defense.advance)]


def claimed(federation: TrainedFederation, rounds: Sequence[int]) -> Claim:
    """The defense's claim for these rounds; for the whole run if there are none."""
    states = public_states(federation.defense, federation.training)
    setting = counted(federation.training.setting, federation.training)
    return claim_of(federation.defense, [states[number] for number in rounds] or states, setting)


def counted(setting: Setting, training: Training) -> Setting:
    """The setting of a claim about a training: where a client was missing in a round, so was its noise."""
    return dataclasses.replace(setting, equal=setting.equal and not training.dropped)


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


def from_arrays(arrays: Arrays, setting: Setting, record: TrainingRecord, key: Key | None) -> Training:
    """The training that `to_arrays` stored; `key` is the key of the training, None: the shared keys are unknown."""
    losses = [None if np.isnan(loss) else float(loss) for loss in arrays["losses"]]
    training = Training(
        setting,
        torch.from_numpy(arrays["final"]),
        evaluations=list(record.evaluations),
        learning_rates=[float(lr) for lr in arrays["learning_rates"]],
        feedback=_feedback(losses),
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
    messages, end = list[Message](), 0
    for i, (sender, samples, length, images, steps) in enumerate(senders.tolist()):
        wire, end = wires[end : end + length], end + length
        summed = tuple(Sender(*other) for index, *other in others.tolist() if index == i)
        messages.append(_message(number, Sender(sender, samples), wire, images, steps, key, summed))
    return tuple(messages)


def _message(
    number: int, sender: Sender, wire: bytes, images: int, steps: int, key: Key | None, others: tuple[Sender, ...] = ()
) -> Message:
    """A message that was read, with its shared key, if the training's key is known."""
    shared = key and client_key(key, number, sender.number).child("shared")
    return Message(number, sender, wire, shared, images, steps, others)


def _feedback(losses: Sequence[float | None]) -> list[Feedback]:
    """The feedback of each round from the loss before the first and after each."""
    return [Feedback(number, *pair) for number, pair in enumerate(itertools.pairwise(losses))]
