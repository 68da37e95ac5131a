"""Runs of a small study in processes of their own, killed at random moments."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STUDY = """
name = "small"
lineup = false
tasks = [{data = "digits", model = "mlp-small"}]
federations = [{clients = 4, rounds = 2, samples = 80, test_samples = 50, local_steps = 1}]
defenses = [{name = "none"}, {name = "gaussian", noise_std = 0.01}]
seeds = [0, 1]
[[attacks]]
name = "tests.doubles:Echo"
target = {round = [0, 1], count = 2}
[[attacks]]
name = "tests.doubles:Coin"
target = {kind = "members", count = [10, 20, 30]}
"""


def start(folder, *words, study=STUDY, **environment):
    """Run a study in a session of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "asked.toml").write_text(study)
    words = ["-m", "leakgauge", "run", str(folder / "asked.toml"), "-o", str(folder / "out"), *map(str, words)]
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_as_in_a_terminal,
    )


def _as_in_a_terminal():
    """Handle signals that the tests' own shell may ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def session_of(number):
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == number and state != "Z":
            found.append(int(path.parent.name))
    return found


def ends_within(seconds, number):
    """Whether a session is empty after so many seconds; the rest of it is killed."""
    deadline = time.monotonic() + seconds
    while (left := session_of(number)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for one in left:
        os.kill(one, signal.SIGKILL)
    return not left


def until(true, seconds=300):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)


def litter(folder):
    """What a run should not leave: temporary files, a lock, a quarantine."""
    return [path for path in folder.rglob("*") if path.name.endswith(".part") or path.name in ("lock", "quarantine")]
