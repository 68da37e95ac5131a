"""`leakgauge init`: each answer gives a study that runs, or commands that exist."""

import re
import tomllib
from typing import get_args

import pytest

from leakgauge.harness.cli import init
from leakgauge.harness.core.threats import ADVERSARIES
from leakgauge.harness.data import default_root
from leakgauge.harness.gate.rules import Rules
from leakgauge.harness.study.check import check_study
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import load_study, resolve
from tests.command import call


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(data, adversary, defense="gaussian"):
    return tomllib.loads(init.study_text("mine", defense, data, adversary))


def test_the_adversaries_are_those_of_the_threat_table():
    assert get_args(init.Adversary) == tuple(ADVERSARIES)


@pytest.mark.parametrize("adversary", get_args(init.Adversary))
@pytest.mark.parametrize("data", ["pictures", "texts", "tables"])
def test_every_answer_gives_a_study_that_is_not_refused(data, adversary, place):
    study = resolve(table(data, adversary))
    assert {cell.threat for cell in study.cells} >= {adversary}
    assert {cell.training.defense.name for cell in study.cells} == {"none", "gaussian"}
    if data == "tables" and not (default_root() / "adult").is_dir():
        pytest.skip("the data set adult is downloaded, and is not here")
    assert check_study(study)


@pytest.mark.matrix
def test_a_study_that_was_written_runs_and_finds_something(place):
    asked = table("texts", "server") | {"lineup": False}
    asked["federations"] = [{"clients": 2, "rounds": 1, "samples": 8, "test_samples": 4, "algorithm": "fedsgd"}]
    asked["attacks"] = [
        one | {"target": one["target"] | {"count": 2}} for one in asked["attacks"] if "tokens" in one.values()
    ]
    run = run_study(resolve(asked), place / "out", workers=0)
    assert (len(run.results), run.failures) == (2, {})


def test_the_command_writes_the_study_and_names_commands_that_exist(place):
    done = call("init", "--have", "defense", "--adversary", "aggregator", "--data", "pictures", "-o", "mine.toml")
    assert (done.exit_code, done.stderr) == (0, "")
    assert load_study("mine.toml").name == "mine"
    assert done.stdout.splitlines()[1:] == ["  leakgauge show mine.toml", "  leakgauge run mine.toml -o runs/mine"]
    again = call("init", "-o", "mine.toml")
    assert again.exit_code == 2
    assert (
        again.stderr
        == "leakgauge: init: mine.toml is there already; nothing is overwritten, name another file with -o\n"
    )


def test_a_defense_that_does_not_exist_is_refused_and_leaves_no_file(place):
    done = call("init", "--defense", "gausian")
    assert done.exit_code == 2
    assert "no defense 'gausian'; did you mean 'gaussian'?" in done.stderr
    assert list(place.iterdir()) == []


def test_a_defense_of_ones_own_is_written_with_the_permission_that_it_needs(place):
    (place / "defense_of_init.py").write_text(
        "from leakgauge.defenses.gaussian import Gaussian\n\n\nclass Mine(Gaussian):\n    pass\n"
    )
    done = call("init", "--defense", "defense_of_init:Mine")
    assert done.exit_code == 0, done.stderr
    assert "run study.toml -o runs/study --allow-code" in done.stdout


@pytest.mark.parametrize(("have", "files"), [("app", []), ("repository", ["study.toml"])])
def test_an_app_and_a_repository_get_commands_that_exist(have, files, place):
    done = call("init", "--have", have)
    assert done.exit_code == 0
    words = re.findall(r"^ {2,4}leakgauge ((?:baseline )?\w+)", done.stdout, re.MULTILINE)
    assert words
    for word in words:
        assert call(*word.split(), "--help").exit_code == 0
    assert [path.name for path in place.iterdir()] == files


@pytest.mark.parametrize("adversary", get_args(init.Adversary))
@pytest.mark.parametrize("data", ["pictures", "texts"])
def test_the_gate_can_judge_every_measure_of_a_study_for_a_repository(data, adversary):
    study = resolve(tomllib.loads(init.study_text("mine", "gaussian", data, adversary, "repository")))
    assert all(cell.target.count >= Rules().least and cell.attack.name != "lineup" for cell in study.cells)
    assert check_study(study)
