"""Nothing damaged, of other code or of another study is used in silence, and nothing that is whole is lost."""

import dataclasses
import importlib
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest

import leakgauge
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.result import Failure
from leakgauge.harness.core.rng import Key, subset
from leakgauge.harness.study import environment
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.store import Store, StoreError, load_run, sealed, verify, write_atomically, writing
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.command import call
from tests.stored import damage, listed
from tests.test_run import COIN, ECHO, contents, outcomes
from tests.test_store import ARRAYS, CELL, RESULT

TEXT = """
name = "small"
lineup = false
tasks = [{data = "digits", model = "mlp-small"}]
federations = [{clients = 4, rounds = 2, samples = 80, test_samples = 50, local_steps = 1}]
defenses = [{name = "none"}, {name = "gaussian", noise_std = 0.01}]
[[attacks]]
name = "tests.doubles:Echo"
target = {round = 1, count = 2}
[[attacks]]
name = "tests.doubles:Coin"
target = {kind = "members", count = 20}
"""


def study(text=TEXT, **changes):
    return dataclasses.replace(resolve(tomllib.loads(text) | changes), text=text)


def notes(*words, **named):
    """What a run in this process says about stored results."""
    found = []
    run_study(*words, **named, workers=0, listen=lambda progress, outcome: found.extend(progress.notes))
    return list(dict.fromkeys(found))


def files(folder):
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.relative_to(folder).parts[0] != "quarantine":
            found.setdefault(path.name, []).append(path)
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    assert len(run_study(study(), folder, workers=0).results) == 4
    return folder


@pytest.fixture
def copy(reference, tmp_path):
    return shutil.copytree(reference, tmp_path / "copy")


def broken(reference, folder, name, how, key):
    """Damage one file called `name` in a copy; the copy's path of it."""
    for number in itertools.count():
        shutil.rmtree(folder, ignore_errors=True)
        found = files(shutil.copytree(reference, folder))[name]
        draw = key.child(number)
        path, *others = (found[at] for at in subset(draw.child("file"), len(found), len(found)))
        numbers = itertools.count()
        if damage(path, how, lambda n: int(subset(draw.child("at", next(numbers)), n, 1)[0]), others):  # noqa: B023
            return path
    raise AssertionError


def check_repair(reference, folder, name, how, key):
    """A damaged file is found, never used, and made again."""
    path = broken(reference, folder, name, how, key)
    bad, where, whole = path.read_bytes(), str(path.relative_to(folder)), load_run(reference)
    assert list(verify(folder)[1]) == [where]
    if name == "study.json":
        with pytest.raises(StoreError, match="run the study again with"):
            load_run(folder)
    else:
        read = load_run(folder)
        assert read.results.items() <= whole.results.items()
        assert read.trainings.items() <= whole.trainings.items()
        assert read.study == whole.study
        left = set(whole.results) - set(read.results) or set(whole.trainings) - set(read.trainings)
        assert left == (set() if name in ("study.toml", "kept.npz") else {path.parent.name})
        assert len(read.faults) == (name not in ("study.toml", "kept.npz"))
    said = notes(study(), folder)
    assert contents(folder) == contents(reference)
    assert path.read_bytes() != bad
    assert verify(folder)[1] == {}
    if name != "study.toml":  # which is written from study.json each time
        assert ["damaged, set aside in quarantine" in note and name in note for note in said] == [True]
        (reason,) = (folder / "quarantine").glob("*/reason.txt")
        assert name in reason.read_text()
        assert bad in [kept.read_bytes() for kept in reason.parent.rglob(name)]


HOWS = ("digit", "cut", "another", "bit")
NAMES = [
    "arrays.npz",
    "kept.npz",
    "manifest.json",
    "record.json",
    "result.json",
    "study.json",
    "study.toml",
    "timing.json",
]


@pytest.mark.parametrize(("at", "name"), list(enumerate(NAMES)))
def test_a_damaged_file_is_found_set_aside_and_made_again(reference, tmp_path, at, name):
    assert set(NAMES) == set(files(reference))
    for how in HOWS[at % 2 :: 2]:
        check_repair(reference, tmp_path / "copy", name, how, Key(0).child(name, how))


@pytest.mark.slow
def test_none_of_250_damaged_files_is_used_or_left(reference, tmp_path):
    for number, (name, how) in zip(range(250), itertools.cycle(itertools.product(NAMES, HOWS)), strict=False):
        check_repair(reference, tmp_path / "copy", name, how, Key(1).child(number))


@pytest.mark.parametrize("kind", ["cells", "trainings"])
def test_the_folder_of_another_id_is_not_taken_for_its_own(reference, copy, kind):
    one, other, *_ = sorted((copy / kind).iterdir())
    shutil.rmtree(one)
    shutil.copytree(other, one)
    assert one.name not in load_run(copy).results | load_run(copy).trainings
    assert any("is of" in reason for reason in verify(copy)[1].values())
    run_study(study(), copy, workers=0)
    assert contents(copy) == contents(reference)


def test_an_array_that_no_manifest_lists_is_not_read(tmp_path):
    store = Store(tmp_path)
    store.write_result(RESULT, {}, 1.0)
    np.savez(store.cell(CELL.id) / "arrays.npz", **ARRAYS)
    assert store.pictures(CELL.id) is None


def test_a_damaged_failure_counts_as_missing_and_a_whole_one_is_the_reason(copy):
    store = Store(copy)
    cell = store.cells()[0]
    shutil.rmtree(store.cell(cell.id))
    store.write_failure(Failure(cell, "ValueError", "the reason", "trace"))
    path = f"cells/{cell.id}/result.json"
    assert verify(copy)[1] == {path: "is missing: the reason"}
    failure = store.cell(cell.id) / "failure.json"
    failure.write_text(failure.read_text().replace("the reason", "a reason"))
    assert store.read_failure(cell.id) is None
    assert load_run(copy).missing == (cell.id,)
    assert verify(copy)[1] == {f"cells/{cell.id}/manifest.json": "is missing"}


def deep_json(path):
    path.write_text("[" * 100_000)


def no_text(path):
    path.write_bytes(b"\xff\xfe{")


def long_number(path):
    path.write_text(f'{{"cell": {"9" * 5000}}}')


def unknown_compression(path):
    content = bytearray(path.read_bytes())
    for start in (m.start() for m in re.finditer(b"PK\x01\x02", content)):
        content[start + 10 : start + 12] = (99).to_bytes(2, "little")  # the method, in the directory
    path.write_bytes(content)


def bad_deflate(path):
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:
        start = file.infolist()[0].header_offset
    content[start + 80 : start + 100] = b"\xff" * 20
    path.write_bytes(content)


def huge_shape(path):
    with zipfile.ZipFile(path, "w") as file:
        text = "{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999,), }".ljust(117) + "\n"
        file.writestr("guess.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode())


@pytest.mark.parametrize("fault", [deep_json, no_text, long_number, unknown_compression, bad_deflate, huge_shape])
def test_a_reader_of_results_survives_every_kind_of_damage(tmp_path, copy, fault):
    store = Store(copy)
    cell = next(cell for cell in store.cells() if cell.attack.name == ECHO)
    name = "result.json" if fault in (deep_json, no_text, long_number) else "arrays.npz"
    fault(store.cell(cell.id) / name)
    listed(store.cell(cell.id) / name)
    if name == "arrays.npz":
        assert store.pictures(cell.id) is None
    else:
        assert store.examine(store.cell(cell.id)).value is None
        assert load_run(copy).missing == (cell.id,)
        assert f"cells/{cell.id}/{name}" in verify(copy)[1]
    (copy / "study.json").write_bytes((store.cell(cell.id) / name).read_bytes())
    with pytest.raises(
        StoreError, match=r"cannot read .*study\.json: it (is damaged|holds no digest): .*; run the study again"
    ):
        load_run(copy)


PLUG_IN = """
from dataclasses import dataclass
from tests.doubles import Coin
@dataclass(frozen=True)
class Mine(Coin):
    number: int = 0
"""


def test_a_changed_attack_from_elsewhere_runs_again_alone_and_reuse_keeps_it(tmp_path, monkeypatch):
    path, out = tmp_path / "my_plug_in.py", tmp_path / "out"
    path.write_text(PLUG_IN)
    monkeypatch.syspath_prepend(tmp_path)
    members = {"target": {"kind": "members", "count": 20}}
    mine = study(attacks=[{"name": name, **members} for name in (COIN, "my_plug_in:Mine")])
    assert len(outcomes(mine, out)) == 2 + 4
    before = contents(out)
    assert outcomes(mine, out) == []
    path.write_text(PLUG_IN + "# changed\n")
    environment._code.cache_clear()
    (said,) = notes(mine, out, reuse=True)
    assert said.startswith("2 results of other code are kept: 2 by ")
    assert contents(out) == before
    assert {outcome.job.cells[0].attack.name for outcome in outcomes(mine, out)} == {"my_plug_in:Mine"}
    assert len(list((out / "quarantine").iterdir())) == 2
    assert "made by" in next((out / "quarantine").glob("*/reason.txt")).read_text()
    del sys.modules["my_plug_in"]
    importlib.invalidate_caches()
    environment._code.cache_clear()


def test_a_cell_on_a_reused_training_of_other_code_runs_again_with_it(copy, monkeypatch):
    lost, *_ = sorted((copy / "cells").iterdir())
    shutil.rmtree(lost)
    environment._code.cache_clear()
    monkeypatch.setattr(environment, "package", lambda: "other code")
    (said,) = notes(study(), copy, reuse=True)
    assert said.startswith("5 results of other code are kept")
    (said,) = notes(study(), copy)
    assert said.startswith("6 results of other code are set aside")
    environment._code.cache_clear()


def test_the_code_is_what_results_depend_on(tmp_path):
    root = Path(__file__).parents[1]
    for name in ("harness", "attacks", "defenses", "reports", "studies"):
        shutil.copytree(root / name, tmp_path / "leakgauge" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "leakgauge" / "__init__.py", tmp_path / "leakgauge")

    def code():
        words = "from leakgauge.harness.study import environment as e; print(e.__file__, e.package())"
        done = subprocess.run(
            [sys.executable, "-c", words], env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        where, digest = done.stdout.split()
        assert where.startswith(str(tmp_path))
        return digest

    first = code()
    assert first == environment.package()
    for name in ("harness/cli/run.py", "harness/gate/rules.py", "reports/html.py", "studies/demo.toml"):
        with (tmp_path / "leakgauge" / name).open("a") as file:
            file.write("\n")
    assert code() == first
    for name in ("harness/core/stats.py", "attacks/_members.py", "defenses/gaussian.py"):
        with (tmp_path / "leakgauge" / name).open("a") as file:
            file.write("\n")
        assert (before := first) != (first := code()), before


def test_two_studies_share_a_folder_only_if_said_and_then_lose_nothing(copy, reference, tmp_path):
    other = study(TEXT.replace('"small"', '"other"').replace("count = 2}", "count = 3}"))
    before = contents(copy)
    with pytest.raises(StudyError, match="holds the results of the study 'small': use another folder, or --merge"):
        run_study(other, copy, workers=0)
    assert contents(copy) == before
    both = run_study(other, copy, workers=0, merge=True)
    alone = run_study(other, tmp_path / "alone", workers=0)
    assert both.results == load_run(reference).results | alone.results
    assert len(both.cells) == len(both.results) == 6
    assert both.name == "small + other"
    exported, one = (call("export", folder, "--to", "csv").output.splitlines() for folder in (copy, reference))
    assert set(one) < set(exported)
    page = leakgauge.report(both).html
    assert "leakgauge run study-2.toml -o results --merge" in page
    assert (copy / "study-2.toml").read_text() == other.text
    assert verify(copy)[1] == {}
    with pytest.raises(StudyError, match="holds the results of the study 'other': use"):
        run_study(study(), copy, workers=0)
    again = run_study(study(), copy, workers=0, merge=True)
    assert (again.results, again.name) == (both.results, "other + small")


def test_another_version_of_a_study_is_another_study_but_a_larger_one_is_not(copy, tmp_path):
    larger, smaller = study(seeds=[0, 1]), study(defenses=[{"name": "none"}])
    with pytest.raises(StudyError, match="holds 2 cells of another version of this study: use another folder, or"):
        run_study(smaller, copy, workers=0)
    assert len(run_study(larger, copy, workers=0).results) == 8
    assert len(run_study(smaller, copy, workers=0, merge=True).results) == 8


@pytest.mark.matrix
def test_some_cells_of_a_study_join_the_others_in_its_folder(tmp_path):
    path, out = tmp_path / "small.toml", tmp_path / "out"
    path.write_text(TEXT)
    for pattern, number in (("gaussian*Echo", 1), ("gaussian*Coin", 2), ("gaussian", 2)):
        assert call("run", path, "-o", out, "--workers", 0, "--only", pattern).exit_code == 0
        assert len(load_run(out).results) == number
    shown = call("run", path, "-o", out, "--dry-run").output
    assert shown.count("  finished\n") == 2


def test_a_damaged_study_file_is_said_what_to_do_about_and_the_run_keeps_the_results(copy, reference, tmp_path):
    path, asked = copy / "study.json", tmp_path / "small.toml"
    asked.write_text(TEXT)
    path.write_bytes(path.read_bytes()[:-20])
    for command in ("report", "export"):
        done = call(command, copy)
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
        assert f"run the study again with '-o {copy}', which keeps all finished results" in done.stderr
    assert call("verify", copy).exit_code == 5
    done = call("run", asked, "-o", copy, "--workers", 0)
    assert done.exit_code == 0, done.output
    assert "damaged, set aside in quarantine and written anew: study.json" in done.output
    assert "done  " not in done.output
    assert path.read_bytes() == (reference / "study.json").read_bytes()


def test_verify_lists_each_file_with_its_reason_and_exits_with_0_or_5(copy):
    done = call("verify", copy)
    assert (done.exit_code, done.output) == (0, "6 cells and trainings, all whole\n")
    cell, training = (next((copy / kind).iterdir()) for kind in ("cells", "trainings"))
    (training / "kept.npz").unlink()
    (cell / "timing.json").write_bytes(sealed({}))
    done = call("verify", copy, "--json")
    assert done.exit_code == 5
    found = json.loads(done.stdout)
    assert (found["cells_and_trainings"], found["whole"]) == (6, False)
    listed = {one["file"]: one["reason"] for one in found["faults"]}
    assert listed[f"trainings/{training.name}/kept.npz"] == "is missing"
    assert listed[f"cells/{cell.name}/timing.json"] == "is damaged: KeyError: 'id'"
    assert "2 files damaged or missing" in call("verify", copy).output
    shown = call("report", copy)
    assert shown.exit_code == 5
    assert f"damaged: cells/{cell.name}/timing.json is damaged: KeyError: 'id'; run the study again" in shown.stderr
    assert call("verify", copy / "nothing").exit_code == 2


@pytest.mark.slow
def test_a_thousand_cells_are_verified_within_five_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # of files that only this test reads
    store = Store(tmp_path)
    cells = [dataclasses.replace(CELL, target=dataclasses.replace(CELL.target, count=n)) for n in range(1, 1001)]
    for cell in cells:
        store.write_result(dataclasses.replace(RESULT, cell=cell), {"a": np.zeros((100, 1000), np.float32)}, 1.0)
    start = time.process_time()
    number, faults = verify(tmp_path)[:2]
    assert (number, list(faults)) == (1000, ["study.json"])
    assert time.process_time() - start < 5


def test_a_second_writer_is_refused_with_the_process_and_host_of_the_first(copy):
    named = f"is being written by process {os.getpid()} on {socket.gethostname()}: wait until it ends, or use another"
    with writing(copy):
        with pytest.raises(StoreError, match=named):
            run_study(study(), copy, workers=0)
        done = call("run", copy / "study.toml", "-o", copy)
        assert done.exit_code == 2
        assert named in done.stderr
        load_run(copy)
    run_study(study(), copy, workers=0)
    assert not (copy / "lock").exists()


@by_rows(
    (f"process 1 on {socket.gethostname()}", 0, False),  # alive, but it does not hold the lock: another process
    ("process 1 on elsewhere", 0, True),
    ("process 1 on elsewhere", 300, False),
    ("", 0, False),
)
def test_a_stale_lock_is_taken_over_and_that_of_a_living_host_is_not(owner, age, refused, tmp_path):
    path = tmp_path / "lock"
    path.write_text(owner)
    os.utime(path, (time.time() - age,) * 2)
    if refused:
        with pytest.raises(StoreError, match="is being written by process 1 on elsewhere"), writing(tmp_path):
            pass
        assert path.read_text() == owner
    else:
        with writing(tmp_path):
            assert path.read_text().startswith(f"process {os.getpid()} on ")
        assert not path.exists()


def test_temporary_files_of_killed_writes_go_with_the_next_run(reference, copy):
    cell = next((copy / "cells").iterdir())
    for left in (copy / ".study.json.abcdefgh.part", cell / ".result.json.a_c3efgh.part"):
        left.write_text("{")
    run_study(study(), copy, workers=0)
    assert contents(copy) == contents(reference)


def test_a_stop_in_the_middle_of_a_write_leaves_no_file(tmp_path, monkeypatch):
    def stopped(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "result.json", b"new")
    assert list(tmp_path.iterdir()) == []
