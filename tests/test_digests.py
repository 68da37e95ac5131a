"""Every number of four studies is what it was: see tests/digests/compare.py, which CI runs on all four."""

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


def test_a_result_that_changed_shows(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import compare

    cell = tmp_path / "cells" / "abc" / "result.json"
    cell.parent.mkdir(parents=True)
    found = []
    for text in (
        '{"value": 1.5, "note": "one"}',
        '{"value": 1.5, "note": "other words"}',
        '{"value": 1.6, "note": "one"}',
    ):
        cell.write_text(text)
        found.append(compare.digests(tmp_path))
    assert found[0] == found[1] != found[2]
    stored = {"processor": compare.processor(), "digests": found[0]}
    monkeypatch.setattr(compare, "stored", lambda name: stored)
    assert compare.compare("x", tmp_path) == ["x: cell abc differs"]
    cell.unlink()
    assert compare.compare("x", tmp_path) == ["x: cell abc is missing"]
