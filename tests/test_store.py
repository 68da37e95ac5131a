import errno
import os
from pathlib import Path

import numpy as np
import pytest

from leakgauge.harness.core.result import Environment, Estimate, Execution, Failure, Result
from leakgauge.harness.gate.baseline import Baseline, write
from leakgauge.harness.study.store import Store, StoreError, arrays_digest, write_atomically
from tests.by_rows import by_rows
from tests.gate_case import measure, measured
from tests.test_run import study

CELL = study().cells[0]
RESULT = Result(
    CELL,
    Execution("cpu", 1, "loop"),
    Environment("abc", False, "3.11", {"torch": "2"}, "Linux"),
    (Estimate("ssim", 0.5, None, None, 1, "mean", values=(0.5, None)),),
    (),
    "d",
)
ARRAYS = {"original": np.zeros((1, 1, 2, 2, 3), np.float32), "guess": np.ones((1, 1, 2, 2, 3), np.float32)}


def test_a_stored_result_is_read_back(tmp_path):
    store = Store(tmp_path)
    store.write_result(RESULT, ARRAYS, 1.25)
    assert store.examine(store.cell(CELL.id)).value == RESULT
    assert (store.pictures(CELL.id).guess == 1).all()
    assert store.seconds(store.cell(CELL.id)) == 1.25


def test_the_same_result_is_the_same_bytes(tmp_path):
    a, b = Store(tmp_path / "a"), Store(tmp_path / "b")
    for store, seconds in ((a, 1.0), (b, 2.0)):
        store.write_result(RESULT, ARRAYS, seconds)
    for file in ("result.json", "arrays.npz"):
        assert (a.cell(CELL.id) / file).read_bytes() == (b.cell(CELL.id) / file).read_bytes()


@by_rows(*(("result.json", end) for end in (0, 1, 100, -2)), ("arrays.npz", -30))
def test_a_truncated_file_counts_as_missing(name, end, tmp_path):
    store = Store(tmp_path)
    store.write_result(RESULT, ARRAYS, 1.0)
    path = store.cell(CELL.id) / name
    path.write_bytes(path.read_bytes()[:end])
    assert (store.examine(store.cell(CELL.id)).value if name == "result.json" else store.pictures(CELL.id)) is None


def test_a_result_removes_an_earlier_failure(tmp_path):
    store = Store(tmp_path)
    store.write_failure(Failure(CELL, "ValueError", "why", "trace"))
    assert store.read_failure(CELL.id).message == "why"
    store.write_result(RESULT, {}, 1.0)
    assert store.read_failure(CELL.id) is None


def test_a_full_disk_is_one_line_and_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_atomically(path, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"cannot write .*result\.json: No space left on device"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["result.json"]


def _quarantined(folder):
    Store(folder).write_failure(Failure(CELL, "ValueError", "why", "trace"))
    Store(folder).set_aside(Store(folder).cell(CELL.id), "damaged")


WRITERS = {
    "a result": lambda folder: Store(folder).write_result(RESULT, {}, 1.0),
    "a failure": lambda folder: Store(folder).write_failure(Failure(CELL, "ValueError", "why", "trace")),
    "study.json": lambda folder: Store(folder).write_study({"name": "x", "text": "y"}),
    "the quarantine": _quarantined,
    "a baseline": lambda folder: write(Baseline(measured(measure()), "first"), folder / "baselines" / "x.json"),
    "a report": lambda folder: write_atomically(folder / "a" / "b" / "report.html", b"<p>"),
}


@pytest.mark.parametrize("what", WRITERS)
def test_every_file_and_folder_that_exists_at_the_end_was_synced_with_its_folder(what, tmp_path, monkeypatch):
    known, sync = {tmp_path.stat().st_ino: set()}, os.fsync

    def recorded(descriptor):
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if place.is_dir():  # what a power failure now leaves of this folder
            known[place.stat().st_ino] = {*os.listdir(place)}
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    WRITERS[what](tmp_path)
    for folder in (tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())):
        assert known[folder.stat().st_ino] == {*os.listdir(folder)}, folder


def test_a_file_system_that_cannot_sync_folders_still_gets_the_file_and_a_broken_one_is_one_line(tmp_path, monkeypatch):
    sync = os.fsync

    def failing(number):
        def fsync(descriptor):
            if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
                raise OSError(number, os.strerror(number))
            sync(descriptor)

        return fsync

    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    write_atomically(tmp_path / "result.json", b"new")
    assert (tmp_path / "result.json").read_bytes() == b"new"
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(StoreError, match=r"cannot write .*result\.json: Input/output error"):
        write_atomically(tmp_path / "result.json", b"newer")


def test_a_folder_that_cannot_be_created_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        write_atomically(tmp_path / "file" / "x" / "result.json", b"")


def test_a_folder_without_a_study_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(StoreError, match=r"there is no study\.json; make some with 'leakgauge run'"):
        Store(tmp_path).cells()
    for text in ("{", "{}"):
        (tmp_path / "study.json").write_text(text)
        with pytest.raises(StoreError, match=r"cannot read .*study\.json"):
            Store(tmp_path).cells()


def test_nan_is_refused_everywhere():
    with pytest.raises(ValueError, match="finite numbers in 'ssim', got nan"):
        Estimate("ssim", float("nan"), None, None, 1, "mean")
    with pytest.raises(ValueError, match="finite numbers"):
        Estimate("ssim", 0.1, None, None, 1, "mean", values=(float("inf"),))


def test_a_cell_and_its_training_have_two_ids():
    assert len({CELL.id, CELL.training.id}) == 2


def test_a_digest_of_arrays_covers_names_types_shapes_and_values():
    base = {"a": np.zeros(4)}
    others = [{"b": np.zeros(4)}, {"a": np.zeros(4, np.float32)}, {"a": np.zeros((2, 2))}, {"a": np.ones(4)}]
    assert len({arrays_digest(arrays) for arrays in [base, *others]}) == 5
