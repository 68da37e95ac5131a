"""An app like Flower's PyTorch quickstart is tapped by few changed lines, and its recording is inspected."""

import difflib
import os
import subprocess
import sys
from pathlib import Path

from leakgauge.harness.federation.recording import read

APP = Path(__file__).parents[2] / "examples" / "flower"


def run(folder, *words):
    """The output of a command in a folder, with the example's modules."""
    paths = os.pathsep.join([str(APP), str(APP.parents[1])])
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    made = subprocess.run([sys.executable, *words], cwd=folder, env=variables, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    return made.stdout + made.stderr


def test_the_quickstart_is_tapped_by_at_most_five_changed_lines_and_inspected(tmp_path):
    plain, tapped = ((APP / name).read_text().splitlines() for name in ("app.py", "tapped.py"))
    changed = [line for line in difflib.ndiff(plain, tapped) if line.startswith("+ ")]
    assert 0 < len(changed) <= 5
    assert [line for line in difflib.ndiff(plain, tapped) if line.startswith("- ")] == ["- client_app = ClientApp()"]
    said = run(tmp_path, str(APP / "tapped.py"))
    # the environment's own folder may be named after the project, and Ray's warnings name it
    assert not [line for line in said.splitlines() if "leakgauge" in line and "site-packages" not in line]
    recording = read(tmp_path / "recording")
    assert recording.closed
    assert recording.sent == {0: tuple(range(10))}
    assert recording.layout.names[:2] == ("conv1.weight", "conv1.bias")
    assert recording.layout.dim == 61_836
    assert all(list(one.rows) == list(range(one.client, 2800, 70)) for one in recording.messages(0))
    options = ["--model", "app:Net", "--data", "app:photos", "--allow-code", "--attacks", "label-restoration"]
    said = run(
        tmp_path, "-m", "leakgauge", "inspect", "recording", *options, "--no-limit", "--victims", "3", "--details"
    )
    assert "labels right" in said
    assert (tmp_path / "recording" / "results" / "report.html").stat().st_size > 10_000
