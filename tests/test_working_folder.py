"""A stranger's folder: no process of ours executes a module of the working folder without permission."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.by_rows import by_rows
from tests.command import call

POISON = (
    *("torch", "selectors", "socket", "random", "numpy", "typing"),
    *("json", "pickle", "scipy", "hashlib", "subprocess", "ctypes", "pandas", "attacks", "defenses"),
)
STUDY = """
name = "small"
lineup = false
tasks = [{data = "digits", model = "linear"}]
federations = [{clients = 2, rounds = 1, samples = 20, test_samples = 10, algorithm = "fedsgd"}]
defenses = [{name = "none"}, {name = "gaussian", noise_std = 0.01}]
[[attacks]]
name = "prior"
target = {count = 2}
"""
CONSOLE = ("../console.py",)
"""Like the console script, which is in another folder. (With `python -P`, child processes would have -P, too.)"""

COMMANDS = """
import sys
from leakgauge.__main__ import main
for line in " ".join(sys.argv[1:]).split(";") if __name__ == "__main__" else ():
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as end:
        assert not end.code, line
"""
MANY = (
    "run ../s.toml -o ../out --workers 1",
    *("show ../s.toml", "report ../out", "export ../out -o ../out.csv", "verify ../out", "compare ../out ../out"),
    *("claim gaussian", "audit gaussian --trials 50", "list attacks", "new defense ../new_defense.py"),
    *("baseline update ../out --reason first --baseline ../b.json", "baseline show ../b.json"),
    "baseline make ../s.toml --reason first --baseline ../made.json -o ../made --workers 1",
)
LIBRARY = """
def test_a_run(tmp_path):
    import leakgauge
    assert len(leakgauge.run("../s.toml", tmp_path / "out", workers=1, progress=False).results) == 2
"""
RERUN = """
from pathlib import Path
from leakgauge.harness.gate import rerun
from leakgauge.harness.study.study import load_study
cells, bench = load_study("../s.toml").cells, rerun.Bench(Path("../out"), workers=1)
assert rerun.rules_at("HEAD") == rerun.Rules()
assert len(rerun._run_at("HEAD", cells, "base", bench).results) == 2
"""
OWN = """
from helper import Helped
class Own(Helped):
    pass
"""


@pytest.fixture
def here(tmp_path):
    return poisoned(tmp_path)


def poisoned(tmp_path):
    """A folder with modules that leave their names in the file `executed` beside it; a study is beside it, too."""
    (tmp_path / "s.toml").write_text(STUDY)
    (tmp_path / "console.py").write_text(COMMANDS)
    (tmp_path / "rerun.py").write_text(RERUN)
    (tmp_path / "here").mkdir()
    for name in POISON:
        mark = f"open({str(tmp_path / 'executed')!r}, 'a').write('{name} ')\n"
        (tmp_path / "here" / f"{name}.py").write_text(f"{mark}1 / 0\n")
    return tmp_path / "here"


def executed(folder):
    path = folder.parent / "executed"
    return path.read_text() if path.exists() else ""


def python(folder, *words, **variables):
    """A Python process that works in a folder, in a user's environment."""
    ours = ("LEAKGAUGE_ALLOW_CODE", "PYTHONPATH", "PYTHONSAFEPATH")  # the last: another test's runs may have left it
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    words = [sys.executable, *map(str, words)]
    return subprocess.run(words, cwd=folder, env=kept | variables, capture_output=True, text=True, check=False)


def unharmed(folder, *words, **variables):
    done = python(folder, *words, **variables)
    assert (done.returncode, executed(folder)) == (0, ""), (done.stdout + done.stderr)[-2000:]
    return done.stdout


def test_no_command_executes_a_module_of_the_working_folder(here):
    unharmed(here, *CONSOLE, ";".join(MANY))


@pytest.mark.slow
def test_the_doctor_of_a_shipped_part_does_not_either(here):
    unharmed(here, *CONSOLE, "doctor", "random-mask")


@by_rows(
    (("-m", "leakgauge", "list", "defenses"), ""),
    (("-E", "-m", "leakgauge", "run", "../s.toml", "-o", "../out", "--workers", "1"), ""),
    ((*CONSOLE, "run", "../s.toml", "-o", "../out", "--workers", "1"), os.pathsep),
)
@pytest.mark.ci("words0-", "words2-:")
def test_it_does_not_matter_how_python_was_started(words, path, here):
    unharmed(here, *words, PYTHONPATH=path)


def test_workers_of_a_test_or_a_script_do_not_execute_it_and_the_variables_are_as_before(here, tmp_path):
    (tmp_path / "test_it.py").write_text(f"{LIBRARY}    import os\n    assert 'PYTHONSAFEPATH' not in os.environ\n")
    pytest = Path(sys.executable).with_name("pytest")
    unharmed(here, pytest, "../test_it.py", "--import-mode=importlib", "-p", "no:cacheprovider")


def git(folder, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, check=True)


def test_a_rerun_of_the_gate_executes_neither_the_modules_nor_the_hooks_of_a_repository(here):
    git(here, "init", "--quiet", ".")
    hook = here / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho hook >> ../executed ../../executed\n")
    hook.chmod(0o755)
    git(here, "add", ".")
    git(here, "commit", "--quiet", "--message", "all")
    unharmed(here, "../rerun.py")


def test_with_permission_a_defense_in_the_working_folder_runs_in_workers(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "own.py").write_text(OWN)
    (tmp_path / "here" / "helper.py").write_text("from leakgauge.defenses.gaussian import Gaussian as Helped\n")
    (tmp_path / "s.toml").write_text(STUDY.replace('"none"', '"own:Own", noise_std = 0.1'))
    run = ("-m", "leakgauge", "run", "../s.toml", "-o", "../out", "--workers", "1")
    refused = python(tmp_path / "here", *run)
    assert "'own:Own' names code to import; pass --allow-code" in refused.stderr
    unharmed(tmp_path / "here", *run, "--allow-code")
    assert "finished\n" in unharmed(tmp_path / "here", *run, "--allow-code", "--dry-run")
    (tmp_path / "here" / "helper.py").write_text(
        "from leakgauge.defenses.gaussian import Gaussian as Helped  # other\n"
    )
    assert "finished by other code" in unharmed(tmp_path / "here", *run, "--allow-code", "--dry-run")


@pytest.mark.parametrize("command", ["claim", "audit"])
def test_a_shipped_defense_does_not_open_the_working_folder(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert call(command, "gaussian", *(["--trials", 50] if command == "audit" else [])).exit_code == 0
    assert str(Path.cwd()) not in sys.path
