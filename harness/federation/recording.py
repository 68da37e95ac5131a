"""Recordings: reads what `recorder` has written; a study can attack it."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import math
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from leakgauge.harness import data
from leakgauge.harness.core.cell import FederationSpec, PartSpec
from leakgauge.harness.core.code import RECORDING, recording_options
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.files import attempt, content
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.data import DataMissing, DataSet, DataUnreadable, check_unpacked, reading
from leakgauge.harness.data.arrays import Arrays, data_set
from leakgauge.harness.federation.recorder import (
    DATA,
    KINDS,
    LIST,
    MOST_LISTED,
    MOST_NUMBER,
    VERSION,
    Data,
    End,
    Entry,
    File,
    Indices,
    Message,
    Model,
    Start,
    check_message,
    place,
)
from leakgauge.harness.federation.recorder import Facts as Facts
from leakgauge.harness.federation.recorder import Recorded as Recorded
from leakgauge.harness.federation.recorder import Recorder as Recorder
from leakgauge.harness.federation.recorder import spec_of_facts as spec_of_facts
from leakgauge.harness.federation.registry import construct

FORM = (
    f"{RECORDING}DIR",
    "the models and messages of a training that ran elsewhere; "
    "?data=NAME&public=yes names their data set and lets reports show it",
)
"""The name that `load` accepts besides those of `data.names`, and its one-line description."""

_MOST_ENTRIES = 2**31  # maximum number of parameters of a model
_HEADER = 4096  # maximum bytes of a numpy file besides its numbers, well above the real size


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
    _models: dict[int, Model] = field(repr=False)
    _messages: dict[int, tuple[Message, ...]] = field(repr=False)
    _data: Data | None = field(repr=False)

    @property
    def files(self) -> Iterator[File]:
        """The entries of all files."""
        yield from itertools.chain(self._models.values(), *self._messages.values(), [self._data] if self._data else [])

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

    def lacks(self, number: int) -> str:
        """That the recording has no model of a round, but others."""
        shown = ", ".join(map(str, self.models[:8]))
        shown = f"{shown}, ... {self.models[-1]}" if len(self.models) > 8 else shown or "none"
        return f"the recording has no model of round {number}; it has those of {shown}"

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
            raise ValueError(self.lacks(number))
        entry, dim = self._models[number], self.layout.dim
        with reading(path := self.folder / place(entry)):
            held = np.load(io.BytesIO(_content(entry, path)), allow_pickle=False)
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
            with reading(path := self.folder / place(entry)):
                wire = _content(entry, path)
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
        path = self.folder / DATA
        with reading(path):
            held = _content(self._data, path)
            with zipfile.ZipFile(io.BytesIO(held)) as members:
                check_unpacked(sum(member.file_size for member in members.infolist()), len(held))
            with np.load(io.BytesIO(held), allow_pickle=False) as arrays:
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
    if not (folder / LIST).exists():
        raise DataMissing(f"no recording in {folder}: there is no {LIST}; leakgauge.inspect makes one")
    recording, faults = examine(folder)
    for name, reason in faults.items():
        raise DataUnreadable(f"cannot read {folder / name}: it {reason}")
    assert recording is not None
    return recording


def examine(folder: Path) -> tuple[Recording | None, dict[str, str]]:
    """The recording in a folder, None if its list is invalid, and why files cannot be used, by their place in it.

    Files that the list does not name are never read, so they are no faults.
    """
    faults = dict[str, str]()
    recording = attempt(folder / LIST, _listed, faults)
    for entry in recording.files if recording else ():
        attempt(folder / place(entry), functools.partial(_content, entry), faults, place(entry))
    return recording, faults


def _content(entry: File, path: Path) -> bytes:
    return content(path, 2**62, links=False, size=entry.size, sha256=entry.sha256)


def _entries(text: bytes) -> Iterator[Entry]:
    """The entries of a list, without an unfinished last line; a ValueError names the line that is not an entry."""
    for number, line in enumerate(text.split(b"\n")[:-1], 1):
        try:
            table = json.loads(line)
            kind = table.pop("kind") if isinstance(table, dict) else None
            if kind not in KINDS:
                raise ValueError(f"expected one of {', '.join(KINDS)}, got {str(kind)[:40]!r}")
            entry: Entry = construct(KINDS[kind], table)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {str(error).removeprefix('.')[:200]}") from error
        yield entry


def _listed(path: Path) -> Recording:
    """The recording that a list describes; raises ValueError if entries contradict each other."""
    text = content(path, MOST_LISTED, links=False).removeprefix(codecs.BOM_UTF8)
    entries = list(_entries(text))
    if not entries or not isinstance(start := entries[0], Start):
        raise ValueError("expected the description of a federation in the first line")
    if start.version != VERSION:
        raise ValueError(f"expected version {VERSION}, got {start.version}: another version of leakgauge wrote it")
    layout = _layout(start)
    ends = [entry for entry in entries if isinstance(entry, End)]
    held = [entry for entry in entries if isinstance(entry, Data)]
    if ends not in ([], entries[-1:]) or len(held) > 1 or any(isinstance(entry, Start) for entry in entries[1:]):
        raise ValueError("expected one description, records once, and nothing after the end")
    models: dict[int, Model] = {}
    for model in (entry for entry in entries if isinstance(entry, Model)):
        _check_model(model, models, layout.dim)
        models[model.round] = model
    messages: dict[int, dict[int, Message]] = {}
    for message in (entry for entry in entries if isinstance(entry, Message)):
        check_message(message, layout.dim)
        sent = messages.setdefault(message.round, {})
        known = message.round in models and message.client < start.facts.clients
        if not known or message.client in sent:
            where = f"round {message.round}, client {message.client}"
            raise ValueError(f"{where}: expected a round with a model, and one message of a known client")
        sent[message.client] = message
    recording = Recording(
        folder=path.parent,
        facts=start.facts,
        layout=layout,
        defense=PartSpec(start.defense, start.parameters),
        seed=start.seed,
        digest=hashlib.sha256(text).hexdigest()[:16],
        closed=bool(ends),
        left_out=(ends[0].models, ends[0].messages) if ends else (0, 0),
        _models=dict(sorted(models.items())),
        _messages={number: tuple(sent.values()) for number, sent in sorted(messages.items())},
        _data=held[0] if held else None,
    )
    spec_of(recording)
    return recording


def _layout(start: Start) -> Layout:
    layout = Layout(start.names, start.shapes)
    if len(set(layout.names)) < len(layout.names) or any(length < 0 for shape in layout.shapes for length in shape):
        raise ValueError("expected tensors with different names and non-negative lengths")
    if not 0 < layout.dim <= _MOST_ENTRIES:
        raise ValueError(f"expected 1 to {_MOST_ENTRIES:,} parameters, got {layout.dim:,}")
    return layout


def _check_model(entry: Model, models: dict[int, Model], dim: int) -> None:
    if not 0 <= entry.round <= MOST_NUMBER or entry.round in models:
        raise ValueError(f"round {entry.round}: expected one model, of a round from 0 to {MOST_NUMBER}")
    if entry.loss is not None and not math.isfinite(entry.loss):
        raise ValueError(f"round {entry.round}: expected a finite loss, got {entry.loss}")
    if not 0 < entry.lr < math.inf:
        raise ValueError(f"round {entry.round}: expected a learning rate > 0, got {entry.lr}")
    if entry.size > 4 * dim + _HEADER:
        raise ValueError(f"round {entry.round}: expected {dim:,} numbers, got {entry.size:,} bytes")


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
    with reading(recording.folder / DATA):
        return data_set(name, inside, outside, recording.classes or ())


def _note(recording: Recording, records: DataSet) -> str:
    models, messages = recording.left_out
    lost = f"{models} models and {messages} messages did not fit into it" if models or messages else ""
    end = "" if recording.closed else "it is incomplete: it was interrupted, or is still being written"
    last = recording.models[-1] if recording.models else None
    final = "" if last == recording.rounds else f"the model before round {last} is used as the final model"
    return "; ".join(filter(None, ("read from a recording", end, lost, final, records.note)))
