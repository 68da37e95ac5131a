"""Results on disk: one folder per cell, `result.json` written last and atomically.

    DIR/study.json                      the resolved study; beside it the original study.toml
    DIR/trainings/<id>/record.json      accuracy, bytes, claim; beside it kept.npz: models and messages for the attacks
    DIR/cells/<id>/result.json          estimates with per-image values; beside it arrays.npz: pictures or scores
    DIR/cells/<id>/failure.json         why a cell has no result
    .../timing.json                     seconds; separate, so that the same cell gives the same bytes

A cell is finished if its `result.json` can be read, a training if its `record.json` can be read. An unreadable file
counts as missing; its cell runs again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from leakgauge.harness.core.cell import Cell
from leakgauge.harness.core.result import Failure, PartInfo, Pictures, Result, Run, Scores, TrainingRecord, to_data

T = TypeVar("T")
Arrays = Mapping[str, npt.NDArray[Any]]


class StoreError(OSError):
    """A folder of results cannot be written or read; one line."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`: after a crash, and for every reader, all of it is there or nothing.

    Raises:
        StoreError: the folder cannot be written (full disk, no permission).
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # only its owner may read a temporary file
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error


def _json(data: Any) -> bytes:
    """Indented JSON with sorted keys: one text for one value. NaN is refused."""
    return (json.dumps(data, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def arrays_digest(arrays: Arrays) -> str:
    """SHA-256 of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _npz(arrays: Arrays) -> bytes:
    """A compressed npz; numpy dates every member 1980, so the same arrays give the same bytes."""
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

    def write_study(self, data: dict[str, Any]) -> None:
        """Write the resolved study, and beside it its TOML."""
        if data["text"]:
            write_atomically(self.folder / "study.toml", data["text"].encode())
        write_atomically(self.folder / "study.json", _json(data))

    def read_study(self) -> dict[str, Any]:
        """The resolved study.

        Raises:
            StoreError: it is missing or cannot be read.
        """
        path = self.folder / "study.json"
        try:
            data: dict[str, Any] = json.loads(path.read_text("utf-8"))
            return data
        except FileNotFoundError as error:
            text = f"no results in {self.folder}: there is no study.json; make some with 'leakgauge run'"
            raise StoreError(text) from error
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(f"cannot read {path}: {error}") from error

    def cells(self) -> tuple[Cell, ...]:
        """The planned cells, in the study's order."""
        try:
            cells: tuple[Cell, ...] = _adapter(tuple[Cell, ...]).validate_python(self.read_study()["cells"])
            return cells
        except (KeyError, ValidationError) as error:
            raise StoreError(f"cannot read {self.folder / 'study.json'}: {str(error).splitlines()[0]}") from error

    def write_result(self, result: Result, arrays: Arrays, seconds: float) -> None:
        """Write a finished cell, and remove its earlier failure."""
        folder = self.cell(result.cell.id)
        if arrays:
            write_atomically(folder / "arrays.npz", _npz(arrays))
        _write_last(folder / "result.json", result, seconds)
        (folder / "failure.json").unlink(missing_ok=True)

    def write_failure(self, failure: Failure) -> None:
        """Write why a cell has no result."""
        write_atomically(self.cell(failure.cell.id) / "failure.json", _json(to_data(failure)))

    def read_result(self, cell_id: str) -> Result | None:
        """The result of a cell; None if it is missing or unreadable."""
        return _read(self.cell(cell_id) / "result.json", Result)

    def read_failure(self, cell_id: str) -> Failure | None:
        """The failure of a cell; None if it is missing or unreadable."""
        return _read(self.cell(cell_id) / "failure.json", Failure)

    def write_training(self, record: TrainingRecord, kept: Arrays, seconds: float) -> None:
        """Write a finished training with the models and messages for its attacks."""
        folder = self.training(record.spec.id)
        write_atomically(folder / "kept.npz", _npz(kept))
        _write_last(folder / "record.json", record, seconds)

    def read_training(self, training_id: str) -> TrainingRecord | None:
        """The record of a training; None if it is missing or unreadable."""
        return _read(self.training(training_id) / "record.json", TrainingRecord)

    def read_arrays(self, path: Path) -> dict[str, npt.NDArray[Any]] | None:
        """The arrays of an npz; None if it is missing or unreadable."""
        try:
            # through memory: numpy does not close a truncated file
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
            return None

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
        who = hashlib.sha256(np.packbits(is_member).tobytes()).hexdigest()[:16]
        return Scores(scores[is_member], scores[~is_member], who)

    def seconds(self, folder: Path) -> float | None:
        """The seconds of the cell or training in `folder`; None if they are unknown."""
        try:
            return float(json.loads((folder / "timing.json").read_text())["seconds"])
        except (OSError, ValueError, KeyError):
            return None


def _write_last(path: Path, value: Result | TrainingRecord, seconds: float) -> None:
    """Write the time and then the file that marks its folder as finished."""
    write_atomically(path.parent / "timing.json", _json({"seconds": round(seconds, 3)}))
    write_atomically(path, _json(to_data(value)))


def load_run(folder: str | Path) -> Run:
    """All results in a folder.

    Raises:
        StoreError: there is no study in it, or it cannot be read.
    """
    store = Store(Path(folder))
    study, cells = store.read_study(), store.cells()
    ids = [cell.id for cell in cells]
    results = {one: result for one in ids if (result := store.read_result(one)) is not None}
    unfinished = [one for one in ids if one not in results]
    failures = {one: failure for one in unfinished if (failure := store.read_failure(one)) is not None}
    training_ids = dict.fromkeys(cell.training.id for cell in cells)
    trainings = {one: record for one in training_ids if (record := store.read_training(one)) is not None}
    folders = [*map(store.training, training_ids), *map(store.cell, ids)]
    return Run(
        name=study["name"],
        study=study,
        study_hash=study["hash"],
        cells=cells,
        trainings=trainings,
        results=results,
        failures=failures,
        missing=tuple(one for one in unfinished if one not in failures),
        pictures=store.pictures,
        scores=store.scores,
        seconds={path.name: took for path in folders if (took := store.seconds(path)) is not None},
        public_data=frozenset(study["public"]),
        data_hashes=study["data"],
        attacks={label: PartInfo(**part) for label, part in study["attacks"].items()},
    )


def _read(path: Path, kind: type[T]) -> T | None:
    """A dataclass from its JSON; None if the file is missing, truncated or of another version."""
    adapter: Any = _adapter(kind)  # type: ignore[arg-type]  # mypy: a type variable is not known to be hashable
    try:
        found: T = adapter.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return found


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """The reader of a type, cached: building one takes milliseconds, and a study has thousands of cells."""
    return TypeAdapter(kind)
