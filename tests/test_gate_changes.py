"""What a change of code may affect, read from files alone."""

import dataclasses
import subprocess
from pathlib import Path

import pytest

from leakgauge.harness.gate import mechanism
from leakgauge.harness.gate.baseline import Baseline
from leakgauge.harness.gate.changes import Behind, Changes, behind, changes_since, new_choices, new_lines
from leakgauge.harness.gate.judge import Verdict
from leakgauge.harness.gate.replay import Replay, Side
from leakgauge.harness.gate.target import Trusted
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.gate_case import measure, measured

FILES = {
    "own/__init__.py": "",
    "own/defense.py": "from own import noise\n\n\ndef f(x):\n    return noise.draw(x)\n",
    "own/noise.py": "import json\nfrom pathlib import Path\n\n\ndef draw(x):\n    return json.loads(Path('f.json'))\n",
    "own/other.py": "import own.defense\n",
    "own/late.py": "def g():\n    import own.noise\n",
    "own/f.json": "1",
    "notes.md": "",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        write(name, text)
    git("init", "--quiet", "--template=", "--initial-branch", "main")
    git("add", "-A")
    git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "-m", "first")
    return tmp_path


def git(*words):
    subprocess.run(["git", *words], check=True, capture_output=True)


def write(name, text):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)


def cells(*names):
    """Cells of these defenses, as a study names them; their code is not imported."""
    table = {
        "name": "x",
        "tasks": [{"data": "digits", "model": "linear"}],
        "federations": [{"clients": 2, "rounds": 1, "samples": 20}],
        "defenses": [{"name": "none"}],
        "attacks": [{"name": "prior"}],
    }
    (cell, *_) = resolve(table).cells
    part = cell.training.defense
    for name in names:
        training = dataclasses.replace(cell.training, defense=dataclasses.replace(part, name=name))
        yield dataclasses.replace(cell, training=training)


def parts(here, *names):
    found = behind(changes_since("main"), cells(*names), [here])
    return {file: [part.partition("(")[0] for part in of] for file, of in found.files.items()}


def test_a_change_is_behind_all_that_imports_it(here):
    write("own/noise.py", FILES["own/noise.py"] + "\n# more\n")
    asked = ("own.defense:Own", "own.other:Own", "own.late:Own", "gaussian")
    assert parts(here, *asked) == {"own/noise.py": ["own.defense:Own", "own.other:Own", "own.late:Own"]}


def test_a_file_that_code_names_is_behind_it_and_prose_is_behind_nothing(here):
    write("own/f.json", "2")
    write("notes.md", "f")
    write("own/unnamed.json", "2")
    assert parts(here, "own.defense:Own", "gaussian") == {"own/f.json": ["own.defense:Own"]}


def test_new_removed_and_linked_files_are_changes(here):
    write("own/new.py", "x = 1\n")
    (here / "own" / "late.py").unlink()
    (here / "own" / "link").symlink_to("/etc/passwd")
    changes = changes_since("main")
    assert {name: bool(digest) for name, digest in changes.digests.items()} == {
        "own/late.py": False,
        "own/link": True,
        "own/new.py": True,
    }
    assert changes.deciding == []
    write("own/fast.so", "x")
    assert changes_since("main").deciding == ["own/fast.so"]


@by_rows(
    ("def draw(x):\n    y = x\n    return y\n", {2, 3}),
    ("def draw(x):\n    '''Text.'''\n    if x < 0:\n        raise ValueError(x)\n    return x\n", {3, 5}),
    ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import os\nx: int\ny: int = 2\n", {1, 5}),
    ("class A:\n    def f(self):\n        pass\n", set()),
    ("def f(x):\n    return noise.draw(x)\n\n\ndef draw(x):\n    return 2\n", {6}),
    ("def broken(:\n", set()),
)
def test_the_lines_that_have_to_run(text, lines, here):
    write("own/defense.py", "")  # `f` moved
    write("own/noise.py", text)
    assert new_lines(changes_since("main"), ["own/noise.py", "own/f.json"]).get("own/noise.py", set()) == lines


@by_rows(
    ("noise * (link.sender.number <= 50)", True),
    ("noise * float(1 - exp(link.sender.number - 700))", True),
    ("draw(min(turn, 30))", True),
    ("noise[:4096]", True),
    ("noise * (turn // 31 == 0)", True),
    ("noise if turn else 0 * noise", True),
    ("noise * float(environ.get('AMPLIFIER', 1))", True),
    ("torch.clamp_max(noise, 1e9)", True),
    ("noise * noise.__class__(1)", True),
    ("noise * torch.le(turn, 30)", True),
    ("2 * noise", False),
    ("noise + other(turn, noise)", False),
    ("(noise.double() - draw(turn)).float()", False),
)
def test_a_new_choice_is_found(text, new, here):
    write("own/noise.py", f"def noise(noise, turn, link):\n    return {text}\n")
    found = new_choices(changes_since("main"), ["own/noise.py", "own/f.json"])
    assert found == ({"own/noise.py": [2]} if new else {})


def test_a_condition_that_changes_a_value_is_no_guard(here):
    text = "def f(noise, n):\n    if noise.mul_(n <= 50) is None:\n        raise ValueError\n    return noise\n"
    write("own/noise.py", text)
    assert new_choices(changes_since("main"), ["own/noise.py"]) == {"own/noise.py": [2]}


@by_rows(
    ("def f(first, turn):\n    return first if turn > 3 else other(first[:2])\n",),
    ("def f(x, t):\n    late = t > 3\n    if late:\n        return x\n    part = x[:2]\n    return other(part)\n",),
    ("def other(x):\n    return x\n\n\ndef f(x, t):\n    '''Text.'''\n    return x if t > 3 else other(x[:2])\n",),
    ("def f(x: a[:1], t):\n    if t < 0:\n        raise Bad(min(t, 7))\n    return x if t > 3 else other(x[:2])\n",),
)
def test_a_choice_that_was_there_is_not_new(text, here):
    write("own/noise.py", "def f(x, t):\n    return x if t > 3 else other(x[:2])\n")
    git("add", "-A")
    git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "-m", "choices")
    write("own/moved.py", text)
    (here / "own" / "noise.py").unlink()
    assert new_choices(changes_since("HEAD"), ["own/moved.py"]) == {}


def test_a_comment_is_no_new_line_but_a_change(here):
    write("own/noise.py", "# of draws\n" + FILES["own/noise.py"])
    changes = changes_since("main")
    assert list(changes.digests) == ["own/noise.py"]
    assert new_lines(changes, changes.digests) == {}


def test_the_files_of_this_project_that_decide_are_named_unless_only_words_changed(here):
    write("leakgauge/__init__.py", "'''Text.'''\nx = 1\n")
    git("add", "-A")
    git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "-m", "own")
    write("leakgauge/__init__.py", "'''Other text.'''\nx = 1  # one\n")
    assert changes_since("main").deciding == []
    write("leakgauge/__init__.py", "'''Other text.'''\nx = 2\n")
    assert changes_since("main").deciding == ["leakgauge/__init__.py"]


def test_runs_that_cannot_be_compared_are_no_pass(monkeypatch):
    """As if the change gave the data set other records: nothing is checked then."""
    was, now = (measured(measure(), data={"digits": digest * 16}) for digest in "12")
    sides = [Side(Path(), run, (), {}) for run in (was, now)]
    monkeypatch.setattr(mechanism, "differences", lambda *_: iter(()))
    replayed = Replay((), Behind(("own/noise.py",), {}, {}), *sides)
    held = Trusted(Baseline(dataclasses.replace(was, measures=()), "first"), merge="1" * 40)
    changes = Changes("1" * 40, {"own/noise.py": "2"}, {}, Path())
    _, outcome = mechanism._judged(replayed, held, changes, held.baseline, 5)
    assert (outcome.verdict, len(outcome.problems)) == (Verdict.NOT_COMPARABLE, 1)
    assert "the data of 'digits' differ" in outcome.problems[0]


def test_changed_files_that_no_cell_reads_are_named():
    replayed = Replay((), Behind((), {"a cell": ("words.txt",)}, {}), None, None)
    others = {"studies/mine.toml": "1", "words.txt": "2"} | {f"data/{n:03}.csv": "3" for n in range(60)}
    held = Trusted(Baseline(measured(), "first"), merge="1" * 40)
    changes = Changes("1" * 40, {"own/noise.py": "2"}, others, Path())
    _, outcome = mechanism._judged(replayed, held, changes, held.baseline, 5)
    assert outcome.warnings == (
        "changed: own/noise.py, behind no cell of the study",
        "changed: words.txt, behind a cell",
        "also changed: data (60 files), studies/mine.toml",
    )
