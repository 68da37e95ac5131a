"""Every number of four studies is what it was: see tests/digests/compare.py, which CI runs on all four."""

import json
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

    def digests(value, note="one"):
        for number in range(compare.ROUNDED + 1):
            cell = tmp_path / "cells" / f"c{number}" / "result.json"
            cell.parent.mkdir(parents=True, exist_ok=True)
            cell.write_text(json.dumps({"estimates": [{"value": value if number <= last else 1.5, "note": note}]}))
        return compare.digests(tmp_path)

    last = compare.ROUNDED
    stored = {"processor": compare.processor(), "arithmetic": compare.arithmetic(), "digests": digests(1.5)}
    monkeypatch.setattr(compare, "stored", lambda name: stored)
    digests(1.5, "other words")
    assert compare.compare("x", tmp_path) == []
    digests(1.5001)
    assert len(compare.compare("x", tmp_path)) == compare.ROUNDED + 1
    last = 0
    digests(1.5001)
    assert compare.compare("x", tmp_path) == []
    digests(1.6)
    assert compare.compare("x", tmp_path) == ["x: cell c0 differs"]
    (tmp_path / "cells" / "c0" / "result.json").unlink()
    assert compare.compare("x", tmp_path) == ["x: cell c0 is missing"]


def test_where_linear_algebra_rounds_differently_four_digits_are_compared(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import compare

    def digests(value):
        path = tmp_path / "cells" / "c" / "result.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"estimates": [{"value": value}]}))
        return compare.digests(tmp_path)

    assert compare.arithmetic() == compare.arithmetic()
    stored = {"processor": compare.processor(), "arithmetic": "another", "digests": digests(1.5)}
    monkeypatch.setattr(compare, "stored", lambda name: stored)
    digests(1.50001)
    assert compare.compare("x", tmp_path) == []
    digests(1.501)
    assert compare.compare("x", tmp_path) == ["x: cell c differs"]
