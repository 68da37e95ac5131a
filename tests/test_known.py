"""Answers of commands that are read again: what was said before, and without torch."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from leakgauge.harness.cli import list as listing
from leakgauge.harness.cli.known import known
from leakgauge.harness.study import environment
from tests import command

TORCHLESS = """
import sys
from leakgauge.harness.cli.main import app
try:
    app(sys.argv[1:])
finally:
    heavy = {"torch", "scipy", "torchvision"} & set(sys.modules)
    print(f"\\nheavy: {sorted(heavy)}")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKGAUGE_CACHE", str(tmp_path))
    return tmp_path / "answers"


def call(*words):
    done = command.call(*words)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    "words", [("list", "defenses"), ("list", "attacks"), ("list", "tasks"), ("list", "studies"), ("claim", "laplace")]
)
@pytest.mark.matrix
def test_the_second_call_says_the_same_and_imports_no_torch(folder, monkeypatch, words):
    with monkeypatch.context() as off:
        off.setenv("LEAKGAUGE_CACHE", "off")
        fresh = call(*words), call(*words, "--json")
    assert (call(*words), call(*words, "--json")) == fresh
    for number, more in enumerate(([], ["--json"])):
        done = subprocess.run(
            [sys.executable, "-c", TORCHLESS, *words, *more], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{fresh[number]}\nheavy: []\n"


def test_an_edited_or_damaged_answer_is_given_anew(folder):
    assert known(["a question"], lambda: {"b": 1, "a": 2}) == {"b": 1, "a": 2}
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    assert list(known(["a question"], dict)) == ["b", "a"], "in the order that was given"
    for damaged in (b"", whole[:-9], whole.replace(b"1", b"3", 1), b"[" * 9999):
        path.write_bytes(damaged)
        assert known(["a question"], lambda: "anew") == "anew"
        path.write_bytes(whole)
    assert known(["another question"], lambda: "anew") == "anew"


def test_other_code_and_what_json_changes_are_answered_anew(folder, monkeypatch):
    assert known(["code"], lambda: 1) == 1
    with monkeypatch.context() as changed:
        changed.setattr(environment, "package", lambda: "another digest of the sources")
        assert known(["code"], lambda: 2) == 2
    assert known(["code"], lambda: 3) == 1
    assert known(["tuple"], lambda: (1, 2)) == (1, 2)
    assert known(["tuple"], lambda: (1, 3)) == (1, 3)


def test_no_more_than_the_last_answers_stay(folder, monkeypatch):
    monkeypatch.setattr("leakgauge.harness.cli.known._MOST", 3)
    for number in range(6):
        known([number], lambda: "an answer")
    assert len(list(folder.iterdir())) == 3


def test_a_plug_in_is_listed_with_its_parameters_of_now(folder, monkeypatch):
    rows = json.loads(call("list", "defenses", "--json"))
    entries = [EntryPoint("mine", "tests.doubles:Counting", "leakgauge.defenses")]
    monkeypatch.setattr(listing, "entry_points", lambda group: [one for one in entries if one.group == group])
    with_mine = [*rows, {"name": "mine", "summary": "of now", "parameters": {"share": 0.5}}]
    monkeypatch.setattr(listing, "_rows", lambda what: with_mine)
    assert json.loads(call("list", "defenses", "--json")) == with_mine
    kept = next(folder.iterdir()).read_text().replace("\\", "")  # the answer is text in JSON
    assert '"none"' in kept
    assert '"mine"' not in kept


def test_a_claim_of_somebodys_module_is_never_kept(folder):
    call("claim", "tests.doubles:Counting")
    assert not folder.exists()
    call("claim", "laplace")
    assert len(list(folder.iterdir())) == 1
