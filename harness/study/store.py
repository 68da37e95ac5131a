"""Results on disk: one folder per cell, every file written atomically, the manifest last.

    DIR/study.json                      the resolved study, or several; also the original study.toml
    DIR/trainings/<id>/record.json      accuracy, bytes, claim; also kept.npz: models and messages for the attacks
    DIR/cells/<id>/result.json          estimates with per-image values; also arrays.npz: pictures or scores
    DIR/cells/<id>/failure.json         why a cell has no result
    .../timing.json                     seconds; separate, so that the same cell gives the same bytes
    .../manifest.json                   the digest of each file, and the code that made them
    DIR/parts/<name>/part.npz           a part of a cell or a limit, until all parts are joined
    DIR/quarantine/                     damaged results and results of other code, each with its reason

A cell or a training is finished if it has a manifest. It is whole if every file matches the manifest and has the id of
the folder. The JSON files that no manifest lists hold their own digest. Records and `study.json` state the version of
their stored form (`core.stored`). Only `load` reads stored files, and one process at a time writes (`writing`).
"""

from __future__ import annotations

import errno
import fcntl
import functools
import gc
import hashlib
import io
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar

import numpy as np
import numpy.typing as npt

from leakgauge.harness.core.cell import Cell, TrainingSpec
from leakgauge.harness.core.files import MISSING, Damaged, attempt
from leakgauge.harness.core.files import content as content_of
from leakgauge.harness.core.result import Failure, PartInfo, Pictures, Result, Run, Scores, TrainingRecord
from leakgauge.harness.core.stored import VERSION, canonical, from_data, to_data, upgraded
from leakgauge.harness.federation.recorder import LIST

if TYPE_CHECKING:
    from leakgauge.harness.federation.recording import Recording

T = TypeVar("T")
Arrays = Mapping[str, npt.NDArray[Any]]

MANIFEST, TIMING, FAILURE, QUARANTINE = "manifest.json", "timing.json", "failure.json", "quarantine"
_TEMPORARY = ".part"  # the suffix of a file that is being written

_MAIN: dict[str, tuple[str, type]] = {"cells": ("result.json", Result), "trainings": ("record.json", TrainingRecord)}
_PART = "part.npz"
_BEAT, _STALE = 10.0, 120.0
"""Seconds between two touches of a lock, and seconds after which an untouched lock of another host is free."""


def load(path: Path, parse: Callable[[bytes], T], faults: dict[str, str], sha256: str | None = None) -> T | None:
    """The result of `parse` on a stored file, or None with the reason in `faults`; only this reads stored files."""
    most = 2**28 if path.suffix == ".json" else 2**40
    return attempt(path, lambda file: parse(content_of(file, most, sha256=sha256)), faults)


def to_json(data: Any) -> bytes:
    """Indented JSON with sorted keys: equal values give equal text. NaN is refused."""
    return (json.dumps(data, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sealed(data: dict[str, Any]) -> bytes:
    """JSON that holds its own digest."""
    return to_json({**data, "digest": hashlib.sha256(to_json(data)).hexdigest()})


def unsealed(content: bytes) -> dict[str, Any]:
    """The data of `sealed`.

    Raises:
        Damaged: the content is not what was written, or an older version wrote it, without a digest.
    """
    data: dict[str, Any] = json.loads(content)
    if "digest" not in data:
        raise Damaged("holds no digest: it was changed, or made by a version of leakgauge that is too old to be read")
    stated = data.pop("digest")
    written = f'\n "digest": "{stated}",'.encode()
    rest = content.replace(written, b"", 1)  # writing it again takes long, for a large study
    if hashlib.sha256(rest).hexdigest() != stated and content != sealed(data):
        raise Damaged("is not what was written")
    return data


class StoreError(OSError):
    """A folder of results cannot be written or read; the message is one line."""


class Stored(NamedTuple):
    """The content of a folder of a cell or a training.

    Attributes:
        value: the result; None if it is not finished, or damaged.
        code: the code that made it; None: not finished, "": unknown.
        faults: why the content cannot be used, by file name.
        seconds: its duration; None: unknown.
    """

    value: Result | TrainingRecord | None
    code: str | None
    faults: dict[str, str]
    seconds: float | None = None


_Asked = tuple[dict[str, Any], Cell | TrainingSpec]


class _Manifest(NamedTuple):
    code: str
    files: dict[str, str]


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically: after a crash, and for every reader, either all of it exists or nothing.

    Raises:
        StoreError: the folder cannot be written (full disk, no permission).
    """
    temporary = None
    try:
        new = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_TEMPORARY)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # at first, only its owner may read a temporary file
        os.replace(temporary, path)
        _sync(path.parent, *(folder.parent for folder in new))
    except BaseException as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        if not isinstance(error, OSError):
            raise
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error


def _sync(*folders: Path) -> None:
    """Write the entries of folders to the disk, so that a new or moved file is still there after a power failure."""
    for folder in folders:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems have no such call
                raise
        finally:
            os.close(handle)


def arrays_digest(arrays: Arrays) -> str:
    """SHA-256 of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _npz(arrays: Arrays) -> bytes:
    """A compressed npz; numpy dates every member 1980, so equal arrays give equal bytes."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **{name: arrays[name] for name in sorted(arrays)})
    return buffer.getvalue()


class Store:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def cell(self, cell_id: str) -> Path:
        """The folder of a cell."""
        return self.folder / "cells" / cell_id

    def training(self, training_id: str) -> Path:
        """The folder of a training."""
        return self.folder / "trainings" / training_id

    def part(self, name: str) -> Path:
        """The folder of a part, `<id of the whole>-<first victim>-<end>`."""
        return self.folder / "parts" / name

    def write_study(self, data: dict[str, Any]) -> None:
        """Write the resolved study and the TOML of each study in it."""
        for name, text in _tomls(data).items():
            write_atomically(self.folder / name, text.encode())
        write_atomically(self.folder / "study.json", sealed({**data, "version": VERSION}))

    def read_study(self) -> dict[str, Any]:
        """The resolved study.

        Raises:
            StoreError: the file is missing or damaged.
        """
        return self.planned()[0]

    def cells(self) -> tuple[Cell, ...]:
        """The planned cells, in the study's order; raises StoreError as `read_study`."""
        return self.planned()[1]

    def planned(self) -> tuple[dict[str, Any], tuple[Cell, ...]]:
        """`read_study` and `cells`, read once."""
        faults: dict[str, str] = {}
        planned = load(self.folder / "study.json", _plan, faults)
        if planned is None:
            reason = faults["study.json"]
            if reason == MISSING:
                raise StoreError(f"no results in {self.folder}: there is no study.json; make some with 'leakgauge run'")
            anew = f"run the study again with '-o {self.folder}', which keeps all finished results"
            raise StoreError(f"cannot read {self.folder / 'study.json'}: it {reason}; {anew}")
        return planned

    def write_result(self, result: Result, arrays: Arrays, seconds: float, code: str = "") -> None:
        """Write a finished cell and the code that made it, and remove its earlier failure."""
        files = {"arrays.npz": _npz(arrays)} if arrays else {}
        self._write(self.cell(result.cell.id), files | {"result.json": to_json(_record(result))}, seconds, code)

    def write_training(self, record: TrainingRecord, kept: Arrays, seconds: float, code: str = "") -> None:
        """Write a finished training with the models and messages for its attacks, and the code that made it."""
        files = {"kept.npz": _npz(kept), "record.json": to_json(_record(record))}
        self._write(self.training(record.spec.id), files, seconds, code)

    def write_part(self, name: str, arrays: Arrays, seconds: float, code: str) -> None:
        """Write a finished part, and the code that made it."""
        self._write(self.part(name), {_PART: _npz(arrays)}, seconds, code)

    def read_part(self, name: str, code: str) -> dict[str, npt.NDArray[Any]] | None:
        """The arrays of a part; None if it is not finished, damaged, or made by other code."""
        manifest = self._manifest(self.part(name), {})
        return self.read_arrays(self.part(name) / _PART) if manifest is not None and manifest.code == code else None

    def parts_of(self, whole: str) -> list[str]:
        """The names of the finished parts of the whole with this id."""
        return sorted(path.parent.name for path in self.folder.glob(f"parts/{whole}-*/{MANIFEST}"))

    def drop_parts(self, whole: str = "") -> None:
        """Remove the parts of a whole, or all."""
        for path in self.folder.glob(f"parts/{whole}-*" if whole else "parts"):
            shutil.rmtree(path, ignore_errors=True)

    def write_failure(self, failure: Failure) -> None:
        """Write why a cell has no result."""
        write_atomically(self.cell(failure.cell.id) / FAILURE, sealed(_record(failure)))

    def _write(self, folder: Path, files: dict[str, bytes], seconds: float, code: str) -> None:
        digests = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
        manifest = {"id": folder.name, "code": code, "files": digests}
        timing = {"id": folder.name, "seconds": round(seconds, 3)}
        self.receive(folder, files | {TIMING: sealed(timing), MANIFEST: sealed(manifest)})

    def receive(self, folder: Path, files: Mapping[str, bytes]) -> None:
        """Write the files of a finished folder, which may come from another store; the manifest is written last."""
        _remove(folder / MANIFEST)  # otherwise a stop in between would look like damage
        for name, content in files.items():
            if name != MANIFEST:
                write_atomically(folder / name, content)
        _remove(folder / FAILURE)
        write_atomically(folder / MANIFEST, files[MANIFEST])

    def set_aside(self, path: Path, reason: str) -> None:
        """Move a file or a folder to the quarantine, with its reason."""
        place = self.folder / QUARANTINE
        name = path.name if path.parent == self.folder else f"{path.parent.name}-{path.name}"
        free = next(place / f"{name}-{number}" for number in count(1) if not (place / f"{name}-{number}").exists())
        try:
            free.mkdir(parents=True)
            os.replace(path, free / path.name)
            _sync(free, place, self.folder, path.parent)
        except OSError as error:
            raise StoreError(f"cannot move {path} to {free}: {error.strerror or error}") from error
        write_atomically(free / "reason.txt", f"{reason}\n".encode())

    def examine(self, folder: Path, *, arrays: bool = True, asked: _Asked | None = None) -> Stored:
        """The content of a cell's or training's folder if it is whole.

        Args:
            arrays: False: the large npz is not checked.
            asked: the question of this folder as stored, and as it is, which is then not read again.
        """
        main, kind = _MAIN[folder.parent.name]
        faults: dict[str, str] = {}
        manifest = self._manifest(folder, faults)
        if manifest is None:
            return Stored(None, None if faults[MANIFEST] == MISSING else "", faults)
        value = None
        for name, digest in ({main: None} | manifest.files).items():
            if name == main:
                value = load(folder / main, functools.partial(_value, kind, folder.name, asked=asked), faults, digest)
            elif arrays or not name.endswith(".npz"):
                load(folder / name, bytes, faults, digest)
        took = self.seconds(folder, faults)
        return Stored(None if faults else value, manifest.code, faults, took)

    def _manifest(self, folder: Path, faults: dict[str, str]) -> _Manifest | None:
        read = itemgetter("code", "files")
        return load(folder / MANIFEST, lambda content: _Manifest(*read(_sealed(folder.name, content))), faults)

    def read_training(self, training_id: str) -> TrainingRecord | None:
        """The record of a training; None if it is not finished or damaged; its npz is not checked."""
        value = self.examine(self.training(training_id), arrays=False).value
        return value if isinstance(value, TrainingRecord) else None

    def read_failure(self, cell_id: str) -> Failure | None:
        """The failure of a cell; None if it is missing or damaged."""
        return load(self.cell(cell_id) / FAILURE, functools.partial(_value, Failure, cell_id), {})

    def read_arrays(self, path: Path) -> dict[str, npt.NDArray[Any]] | None:
        """The arrays of an npz; None if it is missing or does not match its manifest."""
        manifest = self._manifest(path.parent, {})
        return manifest and load(path, _arrays, {}, manifest.files.get(path.name, ""))

    def pictures(self, cell_id: str) -> Pictures | None:
        """The pictures of a cell; None if it has none."""
        arrays = self.read_arrays(self.cell(cell_id) / "arrays.npz") or {}
        return Pictures(arrays["original"], arrays["guess"]) if "original" in arrays else None

    def scores(self, cell_id: str) -> Scores | None:
        """The membership scores of a cell; None if it has none."""
        arrays = self.read_arrays(self.cell(cell_id) / "arrays.npz") or {}
        if "scores" not in arrays:
            return None
        scores, is_member = arrays["scores"].astype(np.float64), arrays["is_member"].astype(bool)
        members = hashlib.sha256(np.packbits(is_member).tobytes()).hexdigest()[:16]
        return Scores(scores[is_member], scores[~is_member], members)

    def seconds(self, folder: Path, faults: dict[str, str] | None = None) -> float | None:
        """The seconds of the cell or training in `folder`; None if unknown, with the reason in `faults`."""
        faults = {} if faults is None else faults
        return load(folder / TIMING, lambda content: float(_sealed(folder.name, content)["seconds"]), faults)


def verify(folder: Path) -> tuple[int, dict[str, str], dict[str, Recording], list[dict[str, str]]]:
    """What a folder of results, a recording or an inspection, which has both, has or should have.

    Returns:
        How many cells and trainings; the faults, by file; the recordings, by their lists. Files that no manifest and no
        list names are no faults, nor is a recording without an end. Last the different values of
        `Environment.numerics`.

    Raises:
        StoreError: there are no results and no recording.
    """
    store, faults = Store(folder), dict[str, str]()
    lists = [folder / LIST] if (folder / LIST).exists() else []
    lists += [path / LIST for path in (*folder.glob("recording/"), *sorted(folder.glob("client-*/round-*/")))]
    study, cells = load(folder / "study.json", _plan, faults) or ({}, ())
    for name, text in _tomls(study).items():
        load(folder / name, functools.partial(_same, text), faults)
    planned = [store.cell(cell.id) for cell in cells] + [store.training(cell.training.id) for cell in cells]
    folders = dict.fromkeys([*planned, *sorted(folder.glob("cells/*/")), *sorted(folder.glob("trainings/*/"))])
    if not folders and faults.get("study.json") == MISSING:
        if not lists:
            store.read_study()
        del faults["study.json"]
    numerics = list[dict[str, str]]()
    for path in folders:
        value, _, wrong, _ = store.examine(path)
        if value is not None and value.environment.numerics not in numerics:
            numerics.append(value.environment.numerics)
        if wrong == {MANIFEST: MISSING} and path not in planned:
            continue
        if wrong == {MANIFEST: MISSING} and (failure := store.read_failure(path.name)) is not None:
            wrong = {_MAIN["cells"][0]: f"is missing: {failure.message}"}
        faults |= {f"{path.parent.name}/{path.name}/{name}": reason for name, reason in wrong.items()}
    recordings: dict[str, Recording] = {}
    for path in lists:
        from leakgauge.harness.federation.recording import examine  # needs torch

        recording, wrong = examine(path.parent)
        recordings |= {str(path.relative_to(folder)): recording} if recording else {}
        faults |= {str((path.parent / name).relative_to(folder)): reason for name, reason in wrong.items()}
    return len(folders), faults, recordings, numerics


def load_run(folder: str | Path, seen: dict[Path, tuple[int, Stored]] | None = None) -> Run:
    """All results in a folder; damaged results count as missing.

    Args:
        seen: whole results by their folder, with the time of its last change: those that have not changed since are
            not read again. This call adds what it reads.

    Raises:
        StoreError: the folder has no study, or its study is damaged.
    """
    with no_collection():
        return _loaded(Store(Path(folder)), {} if seen is None else seen)


@contextmanager
def no_collection() -> Iterator[None]:
    """Without searches for garbage, which would walk over all results again and again while a run is read or shown."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _loaded(store: Store, seen: dict[Path, tuple[int, Stored]]) -> Run:
    study, cells = store.planned()
    raw = dict(zip((cell.id for cell in cells), study["cells"], strict=True))
    asked: dict[Path, _Asked] = {store.cell(cell.id): (raw[cell.id], cell) for cell in cells}
    asked |= {store.training(cell.training.id): (raw[cell.id]["training"], cell.training) for cell in cells}
    results, trainings, faults = dict[str, Result](), dict[str, TrainingRecord](), list[str]()
    seconds = dict[str, float]()
    for path, question in asked.items():
        value, code, wrong, took = _examined(store, path, question, seen)
        if isinstance(value, Result):
            results[path.name] = value
        elif isinstance(value, TrainingRecord):
            trainings[path.name] = value
        elif code is not None:
            faults += [f"{path.parent.name}/{path.name}/{name} {reason}" for name, reason in wrong.items()]
        if value is not None and took is not None:
            seconds[path.name] = took
    unfinished = [cell_id for cell_id in raw if cell_id not in results]
    failures = {name: failure for name in unfinished if (failure := store.read_failure(name)) is not None}
    return Run(
        name=study["name"],
        study=study,
        study_hash=study["hash"],
        cells=cells,
        trainings=trainings,
        results=results,
        failures=failures,
        missing=tuple(cell_id for cell_id in unfinished if cell_id not in failures),
        pictures=store.pictures,
        scores=store.scores,
        seconds=seconds,
        public_data=frozenset(study["public"]),
        data_hashes=study["data"],
        attacks={label: PartInfo(**part) for label, part in study["attacks"].items()},
        faults=tuple(faults),
    )


def _examined(store: Store, path: Path, asked: _Asked, seen: dict[Path, tuple[int, Stored]]) -> Stored:
    try:
        changed = path.stat().st_mtime_ns  # every file is renamed into its folder, which changes this time
    except FileNotFoundError:
        changed = 0
    if path not in seen or seen[path][0] != changed:
        stored = store.examine(path, arrays=path.parent.name == "cells", asked=asked)
        if stored.value is None:
            return stored
        seen[path] = changed, stored
    return seen[path][1]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Write to a folder of results as its only writer. Removes the temporary files of killed writers.

    The kernel frees the lock of a process that dies. Some file systems lock for one host only, or not at all. There,
    the lock holds as long as the process that the lock file names touches the file.

    Raises:
        StoreError: another process writes to this folder, or the folder cannot be written.
    """
    path, ended = folder / "lock", threading.Event()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _locked(path)
        for depth in ("", "*/", "*/*/"):
            for left in folder.glob(f"{depth}.*.????????{_TEMPORARY}"):
                left.unlink(missing_ok=True)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    beat = threading.Thread(target=_touch, args=(path, ended), daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()
        with suppress(OSError):
            path.unlink()
        file.close()


def _locked(path: Path) -> TextIO:
    host = socket.gethostname()
    while True:
        file = path.open("a+", encoding="utf-8")
        free: str | None = host  # the host whose locks the kernel knows to be free
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = None
        except OSError:  # a file system without locks
            free = ""
        file.seek(0)
        owner = file.read()
        fresh = time.time() - os.fstat(file.fileno()).st_mtime < _STALE
        if free is None or (owner and fresh and owner.rpartition(" on ")[2] != free):
            file.close()
            writer = owner or "another process"
            raise StoreError(f"{path.parent} is being written by {writer}: wait until it ends, or use another folder")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {host}")
                file.flush()
                return file
        file.close()  # the last owner removed the file meanwhile


def _touch(path: Path, ended: threading.Event) -> None:
    while not ended.wait(_BEAT):
        with suppress(OSError):
            os.utime(path)


def _record(value: Result | TrainingRecord | Failure) -> dict[str, Any]:
    return {**to_data(value), "version": VERSION}


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {error.strerror or error}") from error


def _plan(content: bytes) -> tuple[dict[str, Any], tuple[Cell, ...]]:
    study, specs = upgraded(unsealed(content)), dict[str, TrainingSpec]()
    cells = []
    for cell in study["cells"]:  # those of one training share it, and what it has computed of itself
        name = canonical(cell["training"])
        if name not in specs:
            specs[name] = from_data(TrainingSpec, cell["training"])
        cells.append({**cell, "training": specs[name]})
    return study, from_data(tuple[Cell, ...], cells)


def _tomls(study: dict[str, Any]) -> dict[str, str]:
    numbered = enumerate(study.get("studies", [study]), 1)
    return {f"study-{n}.toml" if n > 1 else "study.toml": each["text"] for n, each in numbered if each.get("text")}


def _sealed(name: str, content: bytes) -> dict[str, Any]:
    data = unsealed(content)
    return _of(name, data["id"], data)


def _arrays(content: bytes) -> dict[str, npt.NDArray[Any]]:
    # read through memory, because numpy does not close a truncated file
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _same(text: str, content: bytes) -> None:
    if content != text.encode():
        raise Damaged("differs from study.json")


def _of(name: str, own: str, value: T) -> T:
    """The value; raises Damaged if its own id is not the folder's name."""
    if own != name:
        raise Damaged(f"is of {own}")
    return value


def _value(kind: type[T], name: str, content: bytes, asked: _Asked | None = None) -> T:
    data = upgraded(unsealed(content) if kind is Failure else json.loads(content))
    question = "spec" if kind is TrainingRecord else "cell"
    if asked is not None and data.get(question) == asked[0]:
        data[question] = asked[1]
    value: Any = from_data(kind, data)
    checked: T = _of(name, getattr(value, question).id, value)
    return checked
