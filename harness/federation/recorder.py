"""Writes recordings: a folder with the models and messages of a training (`recording` reads them).

    DIR/recording.jsonl                     one line for the federation, each model, each message, the data, the end
    DIR/rounds/NNNNN/model.npy              the parameters from which the clients of a round train
    DIR/rounds/NNNNN/client-NNNNN.bin       a message as it crossed the wire
    DIR/data.npz                            the records behind the messages, and others of the same kind

Each file is complete before its line is written, and the line has the file's size and SHA-256. So an interrupted
recording holds all complete files. Appending a line costs the same for each message; rewriting one file would not.
Writing needs numpy alone, so that it can run in a server without torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from leakgauge.harness.core.cell import FederationSpec, PartSpec, Scalar
from leakgauge.harness.core.layout import Layout

if TYPE_CHECKING:
    from leakgauge.harness.core.contract import Examples
    from leakgauge.harness.core.vec import Vector

LIST, DATA = "recording.jsonl", "data.npz"
VERSION = 1
MOST_LISTED = 64 * 2**20  # maximum bytes of the list: room for 100,000 messages of 100 rows each
MOST_NUMBER = 10_000_000  # the largest number of a round or a client
_WIRE, _LONG_WIRE = 2**20, 64  # maximum bytes of a message: a constant, plus bytes per parameter (a waveform has 16)

Array = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


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
class Start(_Strict):
    """The federation, in the first line."""

    version: int
    facts: Facts
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    defense: str
    parameters: dict[str, Scalar]
    seed: int | None


@dataclass(frozen=True)
class Model(_Strict):
    """The model before a round."""

    round: int
    lr: float
    size: int
    sha256: str
    loss: float | None = None


@dataclass(frozen=True)
class Message(_Strict):
    """One message."""

    round: int
    client: int
    samples: int
    images: int
    steps: int
    rows: tuple[int, ...] | None
    size: int
    sha256: str


@dataclass(frozen=True)
class Data(_Strict):
    """The records."""

    classes: tuple[str, ...]
    size: int
    sha256: str


@dataclass(frozen=True)
class End(_Strict):
    """What was left out, in the last line."""

    models: int
    messages: int


File = Model | Message | Data
Entry = Start | File | End
KINDS: dict[str, type] = {"start": Start, "model": Model, "message": Message, "data": Data, "end": End}
_NAMES = {kind: name for name, kind in KINDS.items()}


def _line(entry: Entry) -> bytes:
    table = {"kind": _NAMES[type(entry)], **dataclasses.asdict(entry)}
    if isinstance(entry, Start):
        table["facts"] = entry.facts._asdict()
    return json.dumps(table, separators=(",", ":"), allow_nan=False).encode() + b"\n"


_LAST = len(_line(End(MOST_NUMBER, MOST_NUMBER)))  # bytes that are reserved for the end line


def place(entry: File) -> str:
    """The file of an entry, derived from its numbers; the list itself contains no paths."""
    if isinstance(entry, Data):
        return DATA
    name = "model.npy" if isinstance(entry, Model) else f"client-{entry.client:05d}.bin"
    return f"rounds/{entry.round:05d}/{name}"


def _parameters(defense: PartSpec) -> dict[str, Any]:
    """All parameters of a defense; without a defense nothing is imported that needs torch."""
    if defense == PartSpec("none"):
        return {}
    from leakgauge.harness.federation.registry import build_defense

    return build_defense(defense).parameters()


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
        parameters = _parameters(defense)
        start = Start(VERSION, facts, layout.names, layout.shapes, defense.name, parameters, seed)
        if len(_line(start)) + _LAST > most_bytes:
            raise ValueError(f"expected most_bytes >= {len(_line(start)) + _LAST}, got {most_bytes}")
        folder.mkdir(parents=True, exist_ok=True)
        self._closed = False
        self._add(start)

    def model(self, number: int, params: Vector | Array, lr: float, loss: float | None = None) -> bool:
        """Record the parameters [d] before round `number`; False: they do not fit, and nothing of this round is kept.

        Args:
            loss: the public loss of this model on test data; a defense's state may depend on it. None: unknown.

        Raises:
            ValueError: the vector has another length, or the round already has a model.
        """
        if params.shape != (self.layout.dim,):
            raise ValueError(f"expected a model of {self.layout.dim} numbers, got shape {tuple(params.shape)}")
        if number in self._rates or number in self._left or not 0 <= number <= MOST_NUMBER:
            raise ValueError(f"expected a new round from 0 to {MOST_NUMBER}, got {number}")
        content = io.BytesIO()
        numbers = params if isinstance(params, np.ndarray) else params.detach().cpu().numpy()
        np.save(content, numbers.astype("<f4", copy=False), allow_pickle=False)
        held = content.getbuffer()
        finite = None if loss is None or not math.isfinite(loss) else float(loss)
        if self._keep(Model(number, float(lr), len(held), hashlib.sha256(held).hexdigest(), finite), held):
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
        entry = Message(number, client, samples, images, steps, rows, len(recorded.wire), digest)
        check_message(entry, self.layout.dim)
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
        if not self._keep(Data(names, len(held), hashlib.sha256(held).hexdigest()), held):
            left = self.most_bytes - self.written
            raise ValueError(f"expected records of at most {left:,} bytes, got {len(held):,}: raise most_bytes")

    def close(self) -> None:
        """Write the end, with the numbers of models and messages that were left out; a second call does nothing."""
        if not self._closed:
            self._add(End(len(self._left), self._lost))
            self._closed = True

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, entry: File, content: bytes | memoryview) -> bool:
        line = len(_line(entry)) + _LAST
        if self.written + len(content) + line > self.most_bytes or self._listed + line > MOST_LISTED:
            return False
        path = self.folder / place(entry)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_bytes(content)
        os.replace(temporary, path)
        self.written += len(content)
        self._add(entry)
        return True

    def _add(self, entry: Entry) -> None:
        line = _line(entry)
        with (self.folder / LIST).open("ab") as file:  # opened for each line: an unclosed Recorder leaks no handle
            file.write(line)
        self.written += len(line)
        self._listed += len(line)


def check_message(entry: Message, dim: int) -> None:
    """Raise ValueError if the numbers of a message contradict each other."""
    where, rows = f"round {entry.round}, client {entry.client}", entry.rows
    if min(entry.samples, entry.images, entry.steps) < 1 or entry.client < 0:
        counts = f"samples={entry.samples}, images={entry.images}, steps={entry.steps}"
        raise ValueError(f"{where}: expected samples, images and steps >= 1, got {counts}")
    if entry.size > _WIRE + _LONG_WIRE * dim:
        raise ValueError(f"{where}: a message of {entry.size:,} bytes for {dim:,} parameters")
    if rows is not None and (len(set(rows)) != entry.images or len(rows) != entry.images or min(rows) < 0):
        raise ValueError(f"{where}: expected {entry.images} different rows for its images, got {len(rows)}")


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
