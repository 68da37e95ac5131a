"""Every number of four studies is what it was: see tests/digests/compare.py, which CI runs on all four."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "digests" / "compare.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digest-adaptive", "digest-membership"])
def test_every_number_of_a_study_is_what_it_was(name):
    done = subprocess.run([sys.executable, SCRIPT, "run", name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "digests compared" in done.stdout


@pytest.fixture
def compare(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import compare

    monkeypatch.setattr(compare, "HERE", tmp_path)
    return compare


def folder(compare, tmp_path, values, note="one", epsilon=1.0):
    """A folder of results with these estimates, one a cell, and one training."""
    for number, value in enumerate(values):
        cell = tmp_path / "found" / "cells" / f"c{number}" / "result.json"
        cell.parent.mkdir(parents=True, exist_ok=True)
        cell.write_text(json.dumps({"estimates": [{"value": value, "note": note}]}))
    record = tmp_path / "found" / "trainings" / "t" / "record.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"one_round": epsilon, "whole_run": epsilon, "dim": 2, "classes": 2}))
    return tmp_path / "found"


def test_a_result_that_changed_shows(compare, tmp_path):
    every = compare.ROUNDED + 1
    compare.store("x", folder(compare, tmp_path, [1.5] * every))
    assert compare.compare("x", folder(compare, tmp_path, [1.5] * every, "other words")) == []
    assert len(compare.compare("x", folder(compare, tmp_path, [1.5001] * every))) == every
    assert compare.compare("x", folder(compare, tmp_path, [1.5001] + [1.5] * (every - 1))) == []
    assert compare.compare("x", folder(compare, tmp_path, [1.6] + [1.5] * (every - 1))) == ["x: cell c0 differs"]
    (tmp_path / "found" / "cells" / "c0" / "result.json").unlink()
    assert compare.compare("x", tmp_path / "found") == ["x: cell c0 is missing"]


def test_each_processor_has_digests_of_its_own_and_all_have_the_same_claims(compare, tmp_path, monkeypatch):
    compare.store("x", folder(compare, tmp_path, [1.5]))
    here = compare.own_file("x")
    assert here.name == f"x.{compare.slug()}.json"
    monkeypatch.setattr(compare, "arithmetic", lambda: "another")
    compare.store("x", folder(compare, tmp_path, [1.7]))
    assert compare.own_file("x") != here
    assert compare.compare("x", folder(compare, tmp_path, [1.7])) == []
    assert compare.compare("x", folder(compare, tmp_path, [1.5])) == ["x: cell c0 differs"]
    changed = compare.compare("x", folder(compare, tmp_path, [1.7], epsilon=2.0))
    assert changed == [f"x: ids or claims differ from those of {here.name}", "x: training t differs"]


def test_other_kernels_have_digests_of_their_own(compare):
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import compare; print(compare.slug())"
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert "-default-" in done.stdout
    assert done.stdout.strip() != compare.slug() or os.environ.get("ATEN_CPU_CAPABILITY") == "default"


def commit(tree, text, *, digests=""):
    (tree / "harness").mkdir(exist_ok=True)
    (tree / "harness" / "code.py").write_text(text)
    (tree / "tests" / "digests").mkdir(parents=True, exist_ok=True)
    if digests:
        (tree / "tests" / "digests" / "x.other.json").write_text(digests)
    for words in (["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", text]):
        subprocess.run(["git", *words], cwd=tree, check=True, stdout=subprocess.DEVNULL)


def test_a_processor_without_digests_makes_them_with_the_code_that_recorded_last(
    compare, tmp_path, monkeypatch, capsys
):
    tree = tmp_path / "tree"
    tree.mkdir()
    subprocess.run(["git", "init", "-q", "."], cwd=tree, check=True)
    found = folder(compare, tmp_path, [1.5])
    commit(tree, "1.5", digests=json.dumps({"digests": compare.digests(found)}))
    monkeypatch.setattr(compare, "TREE", tree)
    monkeypatch.setattr(compare, "HERE", tree / "tests" / "digests")
    monkeypatch.setattr(compare, "STUDIES", {"x": "x"})
    monkeypatch.setattr(compare, "library", lambda: None)

    def run(study, out, at):
        told = folder(compare, out.parent, [float((at / "harness" / "code.py").read_text())])
        told.rename(out)

    monkeypatch.setattr(compare, "run", run)
    assert compare.compare("x", found) == []
    assert "stored these" in capsys.readouterr().out
    compare.own_file("x").unlink()
    commit(tree, "1.6")
    assert compare.compare("x", folder(compare, tmp_path, [1.6])) == ["x: cell c0 differs"]
    assert "made with the code of" in capsys.readouterr().out
