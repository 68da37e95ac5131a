"""Results on disk: one folder a cell, `result.json` written last and atomically.

    DIR/study.json                      the resolved study; study.toml beside it as it was written
    DIR/trainings/<id>/record.json      accuracy, bytes, claim; kept.npz beside it: models and messages for the attacks
    DIR/cells/<id>/result.json          estimates with per-image values; arrays.npz beside it: pictures or scores
    DIR/cells/<id>/failure.json         why a cell has no result
    .../timing.json                     seconds; apart, so that the same cell gives the same bytes

`result.json` and `record.json` are the only "done" flags: whoever wrote them, the same command again skips what is
done. A file that cannot be read counts as not there; its cell runs again.
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
    """A folder of results that cannot be written or read; one line."""


def write_atomically(path: Path, content: bytes) -> None:
    """Put `content` at `path` so that a reader, or a crash, sees all of it or nothing.

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
        os.chmod(temporary, 0o644)  # a temporary file is for its owner alone
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error


def _json(data: Any) -> bytes:
    """Readable JSON with sorted keys: one text for one value. NaN is refused."""
    return (json.dumps(data, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def arrays_digest(arrays: Arrays) -> str:
    """SHA-256 over names, types, shapes and bytes."""
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
        """Write the resolved study, and beside it the TOML that asked for it."""
        if data["text"]:
            write_atomically(self.folder / "study.toml", data["text"].encode())
        write_atomically(self.folder / "study.json", _json(data))

    def read_study(self) -> dict[str, Any]:
        """The resolved study.

        Raises:
            StoreError: none is there, or it cannot be read.
        """
        path = self.folder / "study.json"
        try:
            data: dict[str, Any] = json.loads(path.read_text("utf-8"))
        except FileNotFoundError as error:
            raise StoreError(
                f"no results in {self.folder}: there is no study.json; make some with 'leakgauge run'"
            ) from error
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {path}: {error}") from error
        return data

    def cells(self) -> tuple[Cell, ...]:
        """The planned cells, in the study's order."""
        try:
            cells: tuple[Cell, ...] = _adapter(tuple[Cell, ...]).validate_python(self.read_study()["cells"])
        except (KeyError, ValidationError) as error:
            raise StoreError(f"cannot read {self.folder / 'study.json'}: {str(error).splitlines()[0]}") from error
        return cells

    def write_result(self, result: Result, arrays: Arrays, seconds: float) -> None:
        """Write a finished cell; an earlier failure of it goes."""
        folder = self.cell(result.cell.id)
        if arrays:
            write_atomically(folder / "arrays.npz", _npz(arrays))
        write_atomically(folder / "timing.json", _json({"seconds": round(seconds, 3)}))
        write_atomically(folder / "result.json", _json(to_data(result)))
        (folder / "failure.json").unlink(missing_ok=True)

    def write_failure(self, failure: Failure) -> None:
        """Write why a cell has no result."""
        write_atomically(self.cell(failure.cell.id) / "failure.json", _json(to_data(failure)))

    def read_result(self, cell_id: str) -> Result | None:
        """The result of a cell; None where there is none that can be read."""
        return _read(self.cell(cell_id) / "result.json", Result)

    def read_failure(self, cell_id: str) -> Failure | None:
        """The failure of a cell; None where there is none that can be read."""
        return _read(self.cell(cell_id) / "failure.json", Failure)

    def write_training(self, record: TrainingRecord, kept: Arrays, seconds: float) -> None:
        """Write a finished training with what was kept of it."""
        folder = self.training(record.spec.id)
        write_atomically(folder / "kept.npz", _npz(kept))
        write_atomically(folder / "timing.json", _json({"seconds": round(seconds, 3)}))
        write_atomically(folder / "record.json", _json(to_data(record)))

    def read_training(self, training_id: str) -> TrainingRecord | None:
        """The record of a training; None where there is none that can be read."""
        return _read(self.training(training_id) / "record.json", TrainingRecord)

    def read_arrays(self, path: Path) -> dict[str, npt.NDArray[Any]] | None:
        """The arrays of an npz; None where it cannot be read."""
        try:
            # through memory: numpy leaves a cut file open
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
            return None

    def pictures(self, cell_id: str) -> Pictures | None:
        """The pictures of a cell; None where it has none."""
        arrays = self.read_arrays(self.cell(cell_id) / "arrays.npz")
        if arrays is None or "original" not in arrays:
            return None
        return Pictures(arrays["original"], arrays["guess"])

    def scores(self, cell_id: str) -> Scores | None:
        """The membership scores of a cell; None where it has none."""
        arrays = self.read_arrays(self.cell(cell_id) / "arrays.npz")
        if arrays is None or "scores" not in arrays:
            return None
        scores, is_member = arrays["scores"].astype(np.float64), arrays["is_member"].astype(bool)
        who = hashlib.sha256(np.packbits(is_member).tobytes()).hexdigest()[:16]
        return Scores(scores[is_member], scores[~is_member], who)

    def seconds(self, folder: Path) -> float | None:
        """How long what lies in `folder` took."""
        try:
            return float(json.loads((folder / "timing.json").read_text())["seconds"])
        except (OSError, ValueError, KeyError):
            return None


def load_run(folder: str | Path) -> Run:
    """All that a folder of results holds.

    Raises:
        StoreError: there is no study in it, or it cannot be read.
    """
    store = Store(Path(folder))
    study = store.read_study()
    cells = store.cells()
    results = {cell.id: result for cell in cells if (result := store.read_result(cell.id)) is not None}
    failures = {
        cell.id: failure
        for cell in cells
        if cell.id not in results and (failure := store.read_failure(cell.id)) is not None
    }
    trainings: dict[str, TrainingRecord] = {}
    seconds: dict[str, float] = {}
    for training in {cell.training.id: cell.training for cell in cells}.values():
        if (record := store.read_training(training.id)) is not None:
            trainings[training.id] = record
        if (took := store.seconds(store.training(training.id))) is not None:
            seconds[training.id] = took
    for cell in cells:
        if (took := store.seconds(store.cell(cell.id))) is not None:
            seconds[cell.id] = took
    return Run(
        name=study["name"],
        study=study,
        study_hash=study["hash"],
        cells=cells,
        trainings=trainings,
        results=results,
        failures=failures,
        missing=tuple(cell.id for cell in cells if cell.id not in results and cell.id not in failures),
        pictures=store.pictures,
        scores=store.scores,
        seconds=seconds,
        public_data=frozenset(study["public"]),
        data_hashes=study["data"],
        attacks={label: PartInfo(**part) for label, part in study["attacks"].items()},
    )


def _read(path: Path, kind: type[T]) -> T | None:
    """A dataclass from its JSON; None where the file is missing, cut or of another version."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    adapter: Any = _adapter(kind)  # type: ignore[arg-type]  # a type is hashable, which a type variable does not say
    try:
        found: T = adapter.validate_json(content)
    except ValidationError:
        return None
    return found


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """The reader of a type: building one takes milliseconds, and a study has thousands of cells."""
    return TypeAdapter(kind)
