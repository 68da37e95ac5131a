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

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

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
"""The study of the README, small: its commands name it `mine`."""

LONG = ("adaptive", "malicious", "membership-papers", "rounds", "sums", "tabular", "local-steps", "trained-models")
"""Studies that run for minutes to hours: their commands are checked, not run."""


def commands(page):
    """The commands of a page: those in shell blocks, and those in indented lines."""
    text = page.read_text("utf-8")
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines()
    indented = re.findall(r"^    ((?:leakgauge|python) .*)$", text, re.MULTILINE)
    return [words for line in (*shell, *indented) if (words := shlex.split(line, comments=True))]


def is_long(words):
    """Whether a command belongs to a study or a benchmark of minutes."""
    return words[0] == "python" or any(name in (word, Path(word).name) for word in words for name in LONG)


EVERY = {page.name: commands(page) for page in PAGES}


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
    """Where the README's commands find what they name: a study, its results, other results, a baseline."""
    at = tmp_path_factory.mktemp("user")
    (at / "mine.toml").write_text(SMALL)
    leakgauge("run", "mine.toml", "-o", "runs/mine", at=at)
    shutil.copytree(at / "runs" / "mine", at / "runs" / "other")
    leakgauge("baseline", "update", "runs/mine", "--reason", "first numbers", at=at)
    return at


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for words in EVERY["README.md"] if words[0] == "leakgauge"], ids=" ".join)
def test_a_command_of_the_readme_runs(words, folder):
    assert leakgauge(*words[1:], at=folder)


@pytest.mark.slow
def test_the_commands_of_the_ci_page_run_in_their_order(tmp_path):
    for words in EVERY["ci.md"]:
        if words[0] == "leakgauge":
            assert leakgauge(*words[1:], at=tmp_path)


def test_no_page_has_a_command_that_no_test_runs():
    covered = {"README.md", "ci.md"}
    others = [words for name, lines in EVERY.items() if name not in covered for words in lines]
    assert others
    assert all(is_long(words) for words in others)
    assert {words[0] for name in covered for words in EVERY[name]} == {"leakgauge", "make", "pytest"}


@pytest.mark.parametrize(
    "words", [words for lines in EVERY.values() for words in lines if is_long(words)], ids=" ".join
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
