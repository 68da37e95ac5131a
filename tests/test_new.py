"""What `leakgauge new` writes runs as it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leakgauge.harness.integrations.quick import Effort
from leakgauge.harness.integrations.suite import examine
from leakgauge.harness.study.study import load_study
from tests.by_rows import by_rows
from tests.command import call

KINDS = ("defense", "attack", "task")
QUICK = Effort(trials=100, evaluations=60, victims=1)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def new(*words):
    return call("new", *words)


@pytest.mark.parametrize("kind", KINDS)
def test_a_skeleton_names_its_next_commands_and_nothing_is_overwritten(kind):
    done = new(kind, f"our_{kind}.py")
    assert done.exit_code == 0, done.output
    commands = [f"leakgauge doctor our_{kind}.py", f"leakgauge run our_{kind}.toml -o runs/our_{kind} --allow-code"]
    text, study = (Path(f"our_{kind}.{end}").read_text() for end in ("py", "toml"))
    assert [line.strip() for line in done.stdout.splitlines()[1:]] == commands
    assert all(f"    {command}\n" in text for command in commands)
    assert f"my_{kind}" not in text + study
    assert len(study.splitlines()) < 30
    Path(f"our_{kind}.py").write_text("mine")
    again = new(kind, f"our_{kind}.py")
    assert again.exit_code == 2
    assert len(again.stderr.splitlines()) == 1
    assert "is there already; nothing is overwritten" in again.stderr
    assert Path(f"our_{kind}.py").read_text() == "mine"
    Path(f"our_{kind}.py").unlink()
    assert new(kind, f"our_{kind}.py").exit_code == 2  # its study is there
    assert not Path(f"our_{kind}.py").exists()


@by_rows(
    (("defence", "x.py"), "no skeleton 'defence'; did you mean 'defense'?"),
    (("defense", "my-defense.py"), "expected a file such as my_defense.py"),
    (("defense", "x.txt"), "expected a file such as my_defense.py"),
    (("defense", "file/x.py"), "cannot write file/x.py"),
)
def test_what_cannot_be_written_is_one_line(words, line):
    Path("file").write_text("")
    done = new(*words)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert line in done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_the_doctor_finds_nothing_wrong_with_a_skeleton(kind):
    new(kind, f"fresh_{kind}.py")
    found = list(examine(f"fresh_{kind}.py", {"restarts": 1} if kind == "attack" else {}, QUICK))
    assert [one for one in found if one.mark == "FAIL"] == []
    assert len(found) == {"defense": 22, "attack": 9, "task": 4}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_study_beside_a_skeleton_finds_its_module_there_once_it_may(kind, monkeypatch):
    new(kind, f"there/found_{kind}.py")
    assert len(load_study(f"there/found_{kind}.toml").cells) == 10
    monkeypatch.delenv("LEAKGAUGE_ALLOW_CODE")
    done = call("show", f"there/found_{kind}.toml")
    assert (done.exit_code, "pass --allow-code" in done.stderr) == (2, True)


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "cells"), [("attack", "whole_attack:MyAttack"), ("task", "under prior")])
@pytest.mark.ci("task-under prior")
def test_the_study_beside_a_skeleton_runs_in_worker_processes(kind, cells):
    # all of a defense's: docs/how-to/own-defense.md
    new(kind, f"whole_{kind}.py")
    environment = {key: value for key, value in os.environ.items() if key != "LEAKGAUGE_ALLOW_CODE"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    words = ["run", f"whole_{kind}.toml", "-o", "out", "--allow-code", "--workers", "1", "--only", cells]
    code = "from leakgauge.harness.cli.main import main\nif __name__ == '__main__':\n    main()"
    Path("command.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-P", "command.py", *words], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert Path("out/report.html").is_file()
