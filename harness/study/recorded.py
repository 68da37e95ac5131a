"""A recording in place of a training: what a study reads from it, and where the study must agree with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.cell import Cell, FederationSpec, TrainingSpec
from leakgauge.harness.core.contract import Defense, Examples, Feedback, Link, Message, Sender, Setting
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.labels import part_text
from leakgauge.harness.core.result import Dropped
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.data import DataSet
from leakgauge.harness.federation.loop import Keep, Training, evaluation, replay_state
from leakgauge.harness.federation.recording import RecordedData, Recording, spec_of
from leakgauge.harness.federation.round import Round, SealedMessage, client_key
from leakgauge.harness.learn.batch import Indices
from leakgauge.harness.learn.tasks import ModelTask

_SAME = ("clients", "participants", "rounds", "algorithm", "local_steps", "local_epochs", "batch", "lr", "momentum")
"""The fields of a federation that a recording states."""

_UNHEARD = Key(0, ("unheard",))
"""The key of a channel's noise, if the training's key is unknown."""


def disagreements(
    trainings: Iterable[TrainingSpec], cells: Sequence[Cell], loaded: DataSet, layout: Layout
) -> list[str]:
    """Disagreements of these trainings on one task, or of their cells' targets, with a recording; one line each."""
    if not isinstance(loaded, RecordedData):
        return []
    found = (
        problems(one, [cell for cell in cells if cell.training == one], loaded.recording, layout) for one in trainings
    )
    return [f"{loaded.name}: {text}" for texts in found for text in texts]


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
        yield f"attack {spec.malice.attack.name!r} chooses what the server broadcasts; a recorded server chose already"
    if difference := mismatch(layout, recording.layout):
        yield f"model {spec.task.model!r}: {difference}"
    yield from dict.fromkeys(_missing(cells, recording))


def _field(spec: FederationSpec, name: str) -> Any:
    """A field of a federation, with its default resolved."""
    value = getattr(spec, name)
    if name == "participants":
        return value or spec.clients
    trains = spec.algorithm == "fedavg" and spec.local_steps is None
    return 1 if name == "local_epochs" and value is None and trains else value


def _missing(cells: Iterable[Cell], recording: Recording) -> Iterator[str]:
    """The targets of cells that the recording does not have."""
    unknown = {t: set(sent) - set(recording.rows.get(t, {})) for t, sent in recording.sent.items()}
    for cell in cells:
        for number in cell.target.looks_at:
            if number not in recording.models or number >= recording.rounds:
                yield f"target.round: the recording has no model of round {number}; {those(recording.models)}"
            elif cell.target.kind == "messages" and not set(recording.sent.get(number, ())) - unknown.get(
                number, set()
            ):
                yield f"target: the recording has no message of round {number} with the records behind it; use a probe"
        if cell.target.kind == "members" and (not unknown or any(unknown.values())):
            yield "target: the recording does not say which records are behind each message: who is a member is unknown"


def those(numbers: tuple[int, ...]) -> str:
    """The recorded rounds as a short text."""
    shown = ", ".join(map(str, numbers[:8]))
    return f"it has those of {shown}{', ...' if len(numbers) > 8 else ''}" if numbers else "it has none"


def mismatch(model: Layout, recorded: Layout, whose: str = "the recording") -> str:
    """The first tensor in which a recorded layout differs from the model's, and how; empty if they are equal."""
    for at in range(max(len(model.names), len(recorded.names))):
        want = (model.names[at], model.shapes[at]) if at < len(model.names) else None
        got = (recorded.names[at], recorded.shapes[at]) if at < len(recorded.names) else None
        if want != got:
            return f"tensor {at}: the model has {_tensor(want)}, {whose} has {_tensor(got)}"
    return ""


def _tensor(one: tuple[str, tuple[int, ...]] | None) -> str:
    """A tensor in words."""
    return "none" if one is None else f"{one[0]!r} of shape {one[1]}"


def clients_of(recording: Recording, samples: int) -> dict[int, Indices]:
    """The rows behind each client's messages; if none are known, client 0 has all `samples`."""
    found = gathered(pair for sent in recording.rows.values() for pair in sent.items())
    known = {client: np.unique(np.concatenate(found[client])) for client in sorted(found)}
    return known or {0: np.arange(samples)}


def sizes_of(recording: Recording, samples: int) -> dict[int, Examples]:
    """Clients with the stated numbers of records but unknown contents; for `make_setting`."""
    sizes = recording.samples or {0: max(1, samples // recording.facts.clients)}
    return {client: Examples(torch.empty(size, 0), torch.empty(size)) for client, size in sizes.items()}


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
    losses = [recording.loss(number) for number in range(recording.rounds + 1)]
    training.feedback = [Feedback(number, *pair) for number, pair in enumerate(itertools.pairwise(losses))]
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
    training: Training, recording: Recording, here: Round, clients: Mapping[int, Indices], key: Key | None
) -> None:
    """Add the accepted messages of one round, and the records behind them as places in a client's data."""
    number, sent = here.number, recording.messages(here.number)
    shared = {one.client: key and client_key(key, number, one.client).child("shared") for one in sent}
    messages = [
        Message(number, Sender(one.client, one.samples), one.wire, shared[one.client], one.images, one.steps)
        for one in sent
    ]
    kept, dropped = (_added_up if here.defense.superposes else _accepted)(here, messages, key)
    training.dropped += [Dropped(number, client, reason) for client, reason in dropped.items()]
    training.messages[number] = tuple(kept)
    training.truth[number] = {
        one.client: np.searchsorted(clients[one.client], one.rows).astype(np.int64)
        for one in sent
        if one.rows is not None and one.client not in dropped
    }


def _accepted(here: Round, messages: Sequence[Message], key: Key | None) -> tuple[list[Message], dict[int, str]]:
    """The messages that a server accepts, and for each refused client the reason."""
    dropped = dict[int, str]()
    for one in messages:
        try:
            here.accept(one.wire, Link(here.setting, one.sender, one.shared))
        except MessageError as error:
            dropped[one.sender.number] = str(error)
    return [one for one in messages if one.sender.number not in dropped], dropped


def _added_up(here: Round, messages: Sequence[Message], key: Key | None) -> tuple[list[Message], dict[int, str]]:
    """The received sum of the clients' messages, with the noise of a training's channel; else as `_accepted`.

    key: of the training; None: the noise is drawn again from the same distribution.
    """
    own = (key or _UNHEARD).child("round", here.number)
    sealed_messages = [
        SealedMessage(
            one.sender, here.sealed(one.wire, one.sender), one.shared or own.child("shared", one.sender.number)
        )
        for one in messages
    ]
    found = here.collect(sealed_messages, own.child("channel"), own.child("server"))
    counted = [one for one in messages if one.sender.number not in found.dropped]
    if not counted:
        return [], found.dropped
    images, steps = sum(one.images for one in counted), max(one.steps for one in counted)
    others = tuple(one.sender for one in counted[1:])
    wire = found.exchange.received[0]
    return [counted[0]._replace(wire=wire, images=images, steps=steps, others=others)], found.dropped
