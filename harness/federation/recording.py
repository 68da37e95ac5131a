"""Recordings: a folder with the models and messages of a training that ran elsewhere; a study can attack it.

    DIR/recording.jsonl                     one line for the federation, each model, each message, the data, the end
    DIR/rounds/NNNNN/model.npy              the parameters from which the clients of a round train
    DIR/rounds/NNNNN/client-NNNNN.bin       a message as it crossed the wire
    DIR/data.npz                            the records behind the messages, and others of the same kind

Each file is complete before its line is written, and the line has the file's size and SHA-256. So an interrupted
recording holds all complete files. Appending a line costs the same for each message; rewriting one file would not.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import io
import json
import math
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch

from leakgauge.harness import data
from leakgauge.harness.core.cell import FederationSpec, PartSpec, Scalar
from leakgauge.harness.core.code import RECORDING, recording_options
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.files import regular
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.data import DataMissing, DataSet, DataUnreadable, check_unpacked, reading
from leakgauge.harness.data.arrays import Arrays, data_set
from leakgauge.harness.federation.registry import ParameterError, build_defense, construct
from leakgauge.harness.learn.batch import Indices

LIST, _DATA = "recording.jsonl", "data.npz"
FORM = (
    f"{RECORDING}DIR",
    "the models and messages of a training that ran elsewhere; "
    "?data=NAME&public=yes names their data set and lets reports show it",
)
"""The name that `load` accepts besides those of `data.names`, and its one-line description."""

_VERSION = 1
_MOST_LISTED = 64 * 2**20  # maximum bytes of the list: room for 100,000 messages of 100 rows each
_MOST_ENTRIES = 2**31  # maximum number of parameters of a model
_MOST_NUMBER = 10_000_000  # the largest number of a round or a client
_HEADER = 4096  # maximum bytes of a numpy file besides its numbers, well above the real size
_WIRE, _LONG_WIRE = 2**20, 64  # maximum bytes of a message: a constant, plus bytes per parameter (a waveform has 16)


class Facts(NamedTuple):
    """The public facts about a federation.

    Attributes:
        clients, participants: all clients, and how many of them train in a round.
        sends: `gradient` of one batch, or the `update` after local training.
        steps, epochs: length of local training; at most one of the two is set.
        batch: records per step; 0: all records of the client.
        lr, momentum: of local SGD; the learning rate of each round is stored with its model.
        optimizer, weight_decay, proximal: see `FederationSpec`.
        rounds: planned rounds, on which a defense's noise may depend; 0: the recorded rounds.
    """

    clients: int
    participants: int
    sends: Literal["gradient", "update"]
    steps: int | None = None
    epochs: int | None = None
    batch: int = 0
    lr: float = 0.1
    momentum: float = 0.0
    rounds: int = 0
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    weight_decay: float = 0.0
    proximal: float = 0.0


class Recorded(NamedTuple):
    """One message of a training.

    Attributes:
        samples: number of the client's records, the weight of its message.
        wire: the bytes as they crossed the wire.
        images, steps: distinct records and SGD steps behind the message; public.
        rows: indices of these records among the training records of the recording, or if it has none, of the data set
            named in `?data=NAME`; None: unknown.
    """

    round: int
    client: int
    samples: int
    wire: bytes
    images: int
    steps: int
    rows: Indices | None = None


class _Strict:
    """A line of the list; unknown keys are refused."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True)
class _Start(_Strict):
    version: int
    facts: Facts
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    defense: str
    parameters: dict[str, Scalar]
    seed: int | None


@dataclass(frozen=True)
class _Model(_Strict):
    round: int
    lr: float
    size: int
    sha256: str
    loss: float | None = None


@dataclass(frozen=True)
class _Message(_Strict):
    round: int
    client: int
    samples: int
    images: int
    steps: int
    rows: tuple[int, ...] | None
    size: int
    sha256: str


@dataclass(frozen=True)
class _Data(_Strict):
    classes: tuple[str, ...]
    size: int
    sha256: str


@dataclass(frozen=True)
class _End(_Strict):
    models: int
    messages: int


_File = _Model | _Message | _Data
_Entry = _Start | _File | _End
_KINDS: dict[str, type] = {"start": _Start, "model": _Model, "message": _Message, "data": _Data, "end": _End}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def _line(entry: _Entry) -> bytes:
    table = {"kind": _NAMES[type(entry)], **dataclasses.asdict(entry)}
    if isinstance(entry, _Start):
        table["facts"] = entry.facts._asdict()
    return json.dumps(table, separators=(",", ":"), allow_nan=False).encode() + b"\n"


_LAST = len(_line(_End(_MOST_NUMBER, _MOST_NUMBER)))  # bytes that are reserved for the end line


def _place(entry: _File) -> str:
    """The file of an entry, derived from its numbers; the list itself contains no paths."""
    if isinstance(entry, _Data):
        return _DATA
    name = "model.npy" if isinstance(entry, _Model) else f"client-{entry.client:05d}.bin"
    return f"rounds/{entry.round:05d}/{name}"


class Recorder:
    """Writes a recording from one process, with at most `most_bytes` in all its files.

    Everything is counted before it is written. Models and messages that do not fit are left out, and the recording
    states how many; a round without its model has no messages.

    Args:
        folder: a missing or empty folder.
        layout: layout of the flat vectors.
        defense: the defense that made the messages; `none` without a defense.
        seed: seed of the shared keys: those of client k in round t are children of
            `client_key(Key(seed).child("training"), t, k)`; None: unknown, so every adversary is an outsider.

    Raises:
        LookupError: there is no such defense.
        ValueError: the folder is not empty, `most_bytes` is too small for the description, or the facts contradict each
            other.
    """

    def __init__(
        self, folder: Path, facts: Facts, layout: Layout, defense: PartSpec, *, most_bytes: int, seed: int | None = None
    ) -> None:
        spec_of_facts(facts, 1)
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"expected an empty folder for a recording, got {folder}: name another one")
        self.folder, self.facts, self.layout, self.most_bytes = folder, facts, layout, most_bytes
        self.written = self._listed = 0
        self._rates: dict[int, float] = {}
        self._left = set[int]()  # rounds whose model was left out
        self._messages: set[tuple[int, int]] = set()
        self._lost = 0
        parameters = build_defense(defense).parameters()
        start = _Start(_VERSION, facts, layout.names, layout.shapes, defense.name, parameters, seed)
        if len(_line(start)) + _LAST > most_bytes:
            raise ValueError(f"expected most_bytes >= {len(_line(start)) + _LAST}, got {most_bytes}")
        folder.mkdir(parents=True, exist_ok=True)
        self._closed = False
        self._add(start)

    def model(self, number: int, params: Vector, lr: float, loss: float | None = None) -> bool:
        """Record the parameters [d] before round `number`; False: they do not fit, and nothing of this round is kept.

        Args:
            loss: the public loss of this model on test data; a defense's state may depend on it. None: unknown.

        Raises:
            ValueError: the vector has another length, or the round already has a model.
        """
        if params.shape != (self.layout.dim,):
            raise ValueError(f"expected a model of {self.layout.dim} numbers, got shape {tuple(params.shape)}")
        if number in self._rates or number in self._left or not 0 <= number <= _MOST_NUMBER:
            raise ValueError(f"expected a new round from 0 to {_MOST_NUMBER}, got {number}")
        content = io.BytesIO()
        np.save(content, params.detach().cpu().numpy().astype("<f4", copy=False), allow_pickle=False)
        held = content.getbuffer()
        finite = None if loss is None or not math.isfinite(loss) else float(loss)
        if self._keep(_Model(number, float(lr), len(held), hashlib.sha256(held).hexdigest(), finite), held):
            self._rates[number] = lr
        else:
            self._left.add(number)
        return number in self._rates

    def message(self, recorded: Recorded) -> bool:
        """Record one message of a round whose model was given; False: message or model does not fit, it is left out.

        Raises:
            ValueError: the round has no model, or already has a message of this client, or numbers contradict each
                other.
        """
        if recorded.round not in self._rates and recorded.round not in self._left:
            raise ValueError(f"expected the model of round {recorded.round} before its messages")
        if (recorded.round, recorded.client) in self._messages or not 0 <= recorded.client < self.facts.clients:
            text = f"a new client from 0 to {self.facts.clients - 1} in round {recorded.round}, got {recorded.client}"
            raise ValueError(f"expected {text}")
        rows = None if recorded.rows is None else tuple(int(row) for row in recorded.rows)
        counts = recorded.round, recorded.client, recorded.samples, recorded.images, recorded.steps
        number, client, samples, images, steps = map(int, counts)
        digest = hashlib.sha256(recorded.wire).hexdigest()
        entry = _Message(number, client, samples, images, steps, rows, len(recorded.wire), digest)
        _check_message(entry, self.layout.dim)
        self._messages.add((recorded.round, recorded.client))
        if recorded.round in self._rates and self._keep(entry, recorded.wire):
            return True
        self._lost += 1
        return False

    def data(self, train: Examples, auxiliary: Examples | None, names: tuple[str, ...]) -> None:
        """Record the training records, whose rows the messages name, and auxiliary records that are behind no message.

        Args:
            train, auxiliary: x as the model takes it, [n, *input_shape] float32; y int64, or float32 for a regression.
            names: names of the classes; empty for a regression.

        Raises:
            ValueError: the records do not fit into `most_bytes`; pass them before the messages, or pass fewer.
        """
        arrays = {"x": train.x, "y": train.y}
        arrays |= {} if auxiliary is None else {"x_auxiliary": auxiliary.x, "y_auxiliary": auxiliary.y}
        content = io.BytesIO()
        np.savez(content, allow_pickle=False, **{name: tensor.cpu().numpy() for name, tensor in arrays.items()})
        held = content.getbuffer()
        if not self._keep(_Data(names, len(held), hashlib.sha256(held).hexdigest()), held):
            left = self.most_bytes - self.written
            raise ValueError(f"expected records of at most {left:,} bytes, got {len(held):,}: raise most_bytes")

    def close(self) -> None:
        """Write the end, with the numbers of models and messages that were left out; a second call does nothing."""
        if not self._closed:
            self._add(_End(len(self._left), self._lost))
            self._closed = True

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, entry: _File, content: bytes | memoryview) -> bool:
        line = len(_line(entry)) + _LAST
        if self.written + len(content) + line > self.most_bytes or self._listed + line > _MOST_LISTED:
            return False
        path = self.folder / _place(entry)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_bytes(content)
        os.replace(temporary, path)
        self.written += len(content)
        self._add(entry)
        return True

    def _add(self, entry: _Entry) -> None:
        line = _line(entry)
        with (self.folder / LIST).open("ab") as file:  # opened for each line: an unclosed Recorder leaks no handle
            file.write(line)
        self.written += len(line)
        self._listed += len(line)


@dataclass(frozen=True)
class Recording:
    """A recording on disk; its files are checked against its list when it is read, and again when they are used.

    Attributes:
        facts, layout, defense, seed: as in `Recorder`.
        digest: digest of the list, which covers every file.
        closed: whether the recording has its end line.
        left_out: numbers of models and of messages that did not fit.
    """

    folder: Path
    facts: Facts
    layout: Layout
    defense: PartSpec
    seed: int | None
    digest: str
    closed: bool
    left_out: tuple[int, int]
    _models: dict[int, _Model] = field(repr=False)
    _messages: dict[int, tuple[_Message, ...]] = field(repr=False)
    _data: _Data | None = field(repr=False)

    @property
    def models(self) -> tuple[int, ...]:
        """The rounds that have a model, in order."""
        return tuple(self._models)

    @property
    def sent(self) -> dict[int, tuple[int, ...]]:
        """For each round with messages, the clients that sent them, in order."""
        return {number: tuple(sorted(entry.client for entry in sent)) for number, sent in self._messages.items()}

    @property
    def message_bytes(self) -> tuple[float, ...]:
        """The mean bytes of a message, for each round with messages."""
        return tuple(sum(entry.size for entry in sent) / len(sent) for sent in self._messages.values())

    @property
    def rounds(self) -> int:
        """The least number of rounds of the training: a last model without messages follows the last round."""
        last = max(self._models, default=0)
        return last if self._messages and last and last not in self._messages else last + 1

    @property
    def samples(self) -> dict[int, int]:
        """The number of records that each client reports, by client."""
        return {entry.client: entry.samples for sent in self._messages.values() for entry in sent}

    @cached_property
    def rows(self) -> dict[int, dict[int, Indices]]:
        """The rows behind the messages, where they are known, by round and client."""
        known = {number: [entry for entry in sent if entry.rows is not None] for number, sent in self._messages.items()}
        return {t: {entry.client: np.array(entry.rows, np.int64) for entry in sent} for t, sent in known.items()}

    def lr(self, number: int) -> float:
        """The learning rate of a round; the federation's learning rate if the round has no model."""
        return self._models[number].lr if number in self._models else self.facts.lr

    def loss(self, number: int) -> float | None:
        """The public test loss before round `number`; None: unknown."""
        return self._models[number].loss if number in self._models else None

    def model(self, number: int) -> Vector:
        """The parameters [d] before round `number`.

        Raises:
            ValueError: there is no such model, or it is damaged.
        """
        if number not in self._models:
            shown = ", ".join(map(str, self.models[:8]))
            shown = f"{shown}, ... {self.models[-1]}" if len(self.models) > 8 else shown or "none"
            raise ValueError(f"the recording has no model of round {number}; it has those of {shown}")
        entry, dim = self._models[number], self.layout.dim
        with reading(self.folder / _place(entry)):
            held = np.load(io.BytesIO(_content(self.folder, entry)), allow_pickle=False)
            if held.dtype != np.dtype("<f4") or held.shape != (dim,):
                raise ValueError(f"expected {dim} numbers of float32, got {held.dtype} of shape {held.shape}")
        return torch.from_numpy(held.astype(np.float32, copy=False))

    def messages(self, number: int) -> tuple[Recorded, ...]:
        """The messages of round `number`, by client number; may be empty.

        Raises:
            ValueError: a message is damaged.
        """
        rows = self.rows.get(number, {})
        messages = []
        for entry in sorted(self._messages.get(number, ()), key=lambda entry: entry.client):
            with reading(self.folder / _place(entry)):
                wire = _content(self.folder, entry)
            public = entry.samples, wire, entry.images, entry.steps, rows.get(entry.client)
            messages.append(Recorded(number, entry.client, *public))
        return tuple(messages)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes; None: the recording has no records."""
        return None if self._data is None else self._data.classes

    @cached_property
    def records(self) -> tuple[Examples, Examples | None] | None:
        """The records behind the messages, and the auxiliary records; None: the recording has no records.

        Raises:
            ValueError: the records are damaged.
        """
        if self._data is None:
            return None
        path = self.folder / _DATA
        with reading(path):
            content = _content(self.folder, self._data)
            with zipfile.ZipFile(io.BytesIO(content)) as members:
                check_unpacked(sum(member.file_size for member in members.infolist()), len(content))
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                if set(arrays) not in ({"x", "y"}, {"x", "y", "x_auxiliary", "y_auxiliary"}):
                    raise ValueError(f"expected x and y, maybe x_auxiliary and y_auxiliary, got {', '.join(arrays)}")
                read = {name: torch.from_numpy(arrays[name]) for name in arrays}
        auxiliary = Examples(read["x_auxiliary"], read["y_auxiliary"]) if "x_auxiliary" in read else None
        return Examples(read["x"], read["y"]), auxiliary


def read(folder: Path) -> Recording:
    """The recording in a folder; every file is checked, and nothing in it is trusted.

    A recording without its end line holds all complete files.

    Raises:
        DataMissing: there is no recording.
        DataUnreadable: a file is missing or differs from the list, or the list is invalid; one line names the file.
    """
    path = folder / LIST
    if not path.exists():
        raise DataMissing(f"no recording in {folder}: there is no {LIST}; leakgauge.inspect makes one")
    with reading(path):
        regular(path, _MOST_LISTED, links=False)
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        recording, files = _listed(folder, content, list(_entries(content)))
    for entry in files:
        with reading(folder / _place(entry)):
            _content(folder, entry)
    return recording


def _entries(content: bytes) -> Iterator[_Entry]:
    """The entries of a list, without an unfinished last line; a ValueError names the line that is not an entry."""
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            table = json.loads(line)
            kind = table.pop("kind") if isinstance(table, dict) else None
            if kind not in _KINDS:
                raise ValueError(f"expected one of {', '.join(_KINDS)}, got {str(kind)[:40]!r}")
            entry: _Entry = construct(_KINDS[kind], table)
        except ParameterError as error:
            raise ValueError(f"line {number}: {str(error).removeprefix('.')[:200]}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {str(error)[:200]}") from error
        yield entry


def _listed(folder: Path, content: bytes, entries: list[_Entry]) -> tuple[Recording, list[_File]]:
    """The recording that a list describes, and its files; raises ValueError if entries contradict each other."""
    if not entries or not isinstance(start := entries[0], _Start):
        raise ValueError("expected the description of a federation in the first line")
    if start.version != _VERSION:
        raise ValueError(f"expected version {_VERSION}, got {start.version}: another version of leakgauge wrote it")
    layout = _layout(start)
    ends = [entry for entry in entries if isinstance(entry, _End)]
    held = [entry for entry in entries if isinstance(entry, _Data)]
    if ends not in ([], entries[-1:]) or len(held) > 1 or any(isinstance(entry, _Start) for entry in entries[1:]):
        raise ValueError("expected one description, records once, and nothing after the end")
    models: dict[int, _Model] = {}
    for model in (entry for entry in entries if isinstance(entry, _Model)):
        _check_model(model, models, layout.dim)
        models[model.round] = model
    messages: dict[int, dict[int, _Message]] = {}
    for message in (entry for entry in entries if isinstance(entry, _Message)):
        _check_message(message, layout.dim)
        sent = messages.setdefault(message.round, {})
        known = message.round in models and message.client < start.facts.clients
        if not known or message.client in sent:
            where = f"round {message.round}, client {message.client}"
            raise ValueError(f"{where}: expected a round with a model, and one message of a known client")
        sent[message.client] = message
    recording = Recording(
        folder=folder,
        facts=start.facts,
        layout=layout,
        defense=PartSpec(start.defense, start.parameters),
        seed=start.seed,
        digest=hashlib.sha256(content).hexdigest()[:16],
        closed=bool(ends),
        left_out=(ends[0].models, ends[0].messages) if ends else (0, 0),
        _models=dict(sorted(models.items())),
        _messages={number: tuple(sent.values()) for number, sent in sorted(messages.items())},
        _data=held[0] if held else None,
    )
    spec_of(recording)
    return recording, [*models.values(), *(entry for sent in messages.values() for entry in sent.values()), *held]


def _layout(start: _Start) -> Layout:
    layout = Layout(start.names, start.shapes)
    if len(set(layout.names)) < len(layout.names) or any(length < 0 for shape in layout.shapes for length in shape):
        raise ValueError("expected tensors with different names and non-negative lengths")
    if not 0 < layout.dim <= _MOST_ENTRIES:
        raise ValueError(f"expected 1 to {_MOST_ENTRIES:,} parameters, got {layout.dim:,}")
    return layout


def _check_model(entry: _Model, models: dict[int, _Model], dim: int) -> None:
    if not 0 <= entry.round <= _MOST_NUMBER or entry.round in models:
        raise ValueError(f"round {entry.round}: expected one model, of a round from 0 to {_MOST_NUMBER}")
    if entry.loss is not None and not math.isfinite(entry.loss):
        raise ValueError(f"round {entry.round}: expected a finite loss, got {entry.loss}")
    if not 0 < entry.lr < math.inf:
        raise ValueError(f"round {entry.round}: expected a learning rate > 0, got {entry.lr}")
    if entry.size > 4 * dim + _HEADER:
        raise ValueError(f"round {entry.round}: expected {dim:,} numbers, got {entry.size:,} bytes")


def _check_message(entry: _Message, dim: int) -> None:
    where, rows = f"round {entry.round}, client {entry.client}", entry.rows
    if min(entry.samples, entry.images, entry.steps) < 1 or entry.client < 0:
        counts = f"samples={entry.samples}, images={entry.images}, steps={entry.steps}"
        raise ValueError(f"{where}: expected samples, images and steps >= 1, got {counts}")
    if entry.size > _WIRE + _LONG_WIRE * dim:
        raise ValueError(f"{where}: a message of {entry.size:,} bytes for {dim:,} parameters")
    if rows is not None and (len(set(rows)) != entry.images or len(rows) != entry.images or min(rows) < 0):
        raise ValueError(f"{where}: expected {entry.images} different rows for its images, got {len(rows)}")


def _content(folder: Path, entry: _File) -> bytes:
    """The content of an entry's file, checked against the list: the size before the file is read, then the digest."""
    path = folder / _place(entry)
    if not path.exists():
        raise DataMissing(f"cannot read {path}: it is missing, but the recording names it")
    if (size := regular(path, links=False)) != entry.size:
        raise ValueError(f"expected {entry.size:,} bytes, got {size:,}")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise ValueError("it has changed since the recording: its SHA-256 differs")
    return content


def spec_of_facts(facts: Facts, rounds: int) -> FederationSpec:
    """The federation with these facts and this number of rounds.

    Raises:
        ValueError: the facts contradict each other.
    """
    gradient = facts.sends == "gradient"
    return FederationSpec(
        clients=facts.clients,
        participants=facts.participants,
        rounds=rounds,
        algorithm="fedsgd" if gradient else "fedavg",
        local_steps=None if gradient and facts.steps == 1 else facts.steps,
        local_epochs=facts.epochs,
        batch=facts.batch,
        lr=facts.lr,
        momentum=facts.momentum,
        optimizer=facts.optimizer,
        weight_decay=facts.weight_decay,
        proximal=facts.proximal,
    )


def spec_of(recording: Recording) -> FederationSpec:
    """The federation of a recording; its rounds are the planned rounds, or the recorded rounds if these are more.

    Raises:
        ValueError: its facts contradict each other.
    """
    return spec_of_facts(recording.facts, max(recording.rounds, recording.facts.rounds))


@dataclass(frozen=True, eq=False)
class RecordedData(DataSet):
    """The records of a recording as a data set; the digest covers models and messages too."""

    recording: Recording = field(kw_only=True)

    @cached_property
    def digest(self) -> str:
        """The first 16 hex digits of SHA-256 over the digests of the recording and of the records."""
        return hashlib.sha256(f"{self.recording.digest} {super().digest}".encode()).hexdigest()[:16]


def load(name: str, root: Path) -> DataSet:
    """The data set of this name, which may be `recording:DIR` or `recording:DIR?data=NAME&public=yes`.

    Args:
        name: `data=NAME` names a data set for a recording without records: the rows that its messages name are in the
            training part, and the test part gives the auxiliary records. `public=yes`: a report may show the records.

    Raises:
        ValueError, LookupError: as `data.load` and `read`, or records are missing or do not fit the messages.
    """
    if not name.startswith(RECORDING):
        return data.load(name, root)
    path, options = recording_options(name)
    if not path or not options.keys() <= {"data", "public"}:
        raise ValueError(f"expected {RECORDING}DIR, or {RECORDING}DIR?data=NAME&public=yes, got {name!r}")
    recording = read(Path(path).expanduser())
    named = data.load(options["data"], root) if "data" in options else None
    records = _records(name, path, recording, named)
    for number, sent in recording.rows.items():
        for client, rows in sent.items():
            if int(rows.max(initial=0)) >= len(records.train.y):
                text = f"round {number}, client {client}: expected rows below {len(records.train.y)}, got {rows.max()}"
                raise DataUnreadable(f"cannot use {path}: {text}")
    public = options.get("public") == "yes" or (recording.records is None and records.public)
    parts = {field.name: getattr(records, field.name) for field in dataclasses.fields(DataSet)}
    return RecordedData(
        **{**parts, "name": name, "public": public, "note": _note(recording, records)}, recording=recording
    )


def _records(name: str, path: str, recording: Recording, named: DataSet | None) -> DataSet:
    own = recording.records
    if own is None or own[1] is None:
        if named is None:
            what = "records" if own is None else "auxiliary records"
            raise ValueError(f"the recording in {path} has no {what}: name data of their kind, as in {name}?data=mnist")
        if own is None:
            return named
    train, auxiliary = own
    if auxiliary is None:
        assert named is not None
        auxiliary = Examples(named.original(named.test.x), named.test.y)
    inside, outside = (Arrays(x.numpy(), y.numpy(), is_first=True) for x, y in (train, auxiliary))
    with reading(recording.folder / _DATA):
        return data_set(name, inside, outside, recording.classes or ())


def _note(recording: Recording, records: DataSet) -> str:
    models, messages = recording.left_out
    lost = f"{models} models and {messages} messages did not fit into it" if models or messages else ""
    end = "" if recording.closed else "it is incomplete: it was interrupted, or is still being written"
    last = recording.models[-1] if recording.models else None
    final = "" if last == recording.rounds else f"the model before round {last} is used as the final model"
    return "; ".join(filter(None, ("read from a recording", end, lost, final, records.note)))
