"""The commands of the README and of docs/ run as they are printed."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from leakgauge.harness.study.study import load_study
from tests.page_case import PAGES, ROOT, commands, name_of
from tests.test_site import ELSEWHERE, PLAYED

MINE = ("docs/studies.md", "docs/how-to/officer.md", "docs/how-to/view.md")
"""Pages whose commands are about the study `mine`, in any order."""

SMALL = """
name = "mine"
threats = ["server"]
[[tasks]]
data = "digits"
model = "mlp-small"
[[federations]]
clients = 2
rounds = 2
samples = 40
algorithm = "fedsgd"
[[defenses]]
name = "none"
[[defenses]]
name = "gaussian"
clip = 4.0
epsilon = [100.0, 10_000.0]
[[attacks]]
name = "idlg"
evaluations = 5
target = { kind = "probe", round = [0, 1], count = 8 }
[[attacks]]
name = "prior"
target = { kind = "probe", round = [0, 1], count = 8 }
"""
"""A small study in place of that of the pages."""

LONG = (
    "adaptive",
    "inferences",
    "lineup",
    "malicious",
    "membership-papers",
    "rounds",
    "sums",
    "tabular",
    "text",
    "local-steps",
    "trained-models",
)
"""Studies that run for minutes to hours: their commands are checked, not run."""


def is_long(words):
    """Whether a command belongs to a study or a benchmark of minutes."""
    return words[0] == "python" or any(name in (word, Path(word).name) for word in words for name in LONG)


PLAYS = [name_of(page) for page in PLAYED]
EVERY = {name_of(page): commands(page) for page in PAGES}


def leakgauge(*words, at):
    """Run the command in a folder, as a user without CI does."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    done = subprocess.run(
        [sys.executable, "-m", "leakgauge", *words], cwd=at, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"leakgauge {shlex.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands of the pages find what they name: a study, its signed results, others, a baseline."""
    at = tmp_path_factory.mktemp("user")
    (at / "mine.toml").write_text(SMALL)
    leakgauge("run", "mine.toml", "-o", "runs/mine", at=at)
    shutil.copytree(at / "runs" / "mine", at / "runs" / "other")
    leakgauge("baseline", "update", "runs/mine", "--reason", "first numbers", at=at)
    leakgauge("sign", "runs/mine", "--new-key", "me.pem", at=at)
    return at


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [words for name in MINE for words in EVERY[name] if words[0] == "leakgauge"], ids=" ".join
)
def test_a_command_about_a_study_runs(words, folder):
    assert leakgauge(*words[1:], at=folder)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/ci.md", "README.md"])
def test_the_commands_of_a_page_run_in_their_order(page, tmp_path):
    for words in EVERY[page]:
        if words[0] == "leakgauge":
            assert leakgauge(*words[1:], at=tmp_path)


def test_no_page_has_a_command_that_no_test_runs():
    others = [words for name, lines in EVERY.items() if name not in (*ELSEWHERE, *PLAYS) for words in lines]
    assert others
    assert all(is_long(words) for words in others)
    assert {words[0] for name in ELSEWHERE for words in EVERY[name]} == {"leakgauge", "make", "."}


@pytest.mark.parametrize(
    "words",
    [words for name, lines in EVERY.items() if name not in PLAYS for words in lines if is_long(words)],
    ids=" ".join,
)
def test_a_long_command_names_what_is_there(words):
    if words[0] == "python":
        source = (ROOT / words[1]).read_text("utf-8")
        assert all(word in source for word in words[2:] if word.startswith("--"))
    elif words[1] == "run":
        assert load_study(words[2]).cells


def test_every_target_of_make_is_there():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    named = {words[1] for lines in EVERY.values() for words in lines if words[0] == "make"}
    assert named
    assert named <= set(targets)
