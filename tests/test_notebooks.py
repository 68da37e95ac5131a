"""The notebooks of docs/ run as committed, and say what they said."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
pytestmark = [pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]


def words(notebook):
    """The printed lines of a notebook, without numbers: they differ in the last digits between machines."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    return [re.sub(r"[\d.]+(e-\d+)?", "0", output.text) for output in outputs if output.output_type == "stream"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.ci("audit-my-mechanism")
def test_a_notebook_runs_and_prints_the_same_words(path, tmp_path):
    stored = nbformat.read(path, 4)
    before = words(stored)
    assert before
    if "tapped" in path.read_text("utf-8"):
        shutil.copytree(path.parent / "tapped", tmp_path / "tapped")
    NotebookClient(stored, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert words(stored) == before


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["audit-my-mechanism", "choose-a-defense", "does-my-flower-app-leak"]


STUDY = """
name = "tiny"
[[tasks]]
data = "digits"
model = "linear"
[[federations]]
clients = 3
rounds = 1
samples = 60
algorithm = "fedsgd"
[[defenses]]
name = "none"
[[attacks]]
name = "prior"
target = { count = 2 }
"""


def test_a_notebook_shows_the_progress_the_table_and_the_page(tmp_path):
    (tmp_path / "tiny.toml").write_text(STUDY)
    code = ["import leakgauge", 'run = leakgauge.run("tiny.toml", "out", workers=0)', "run", "leakgauge.report(run)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(line) for line in code])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    progress, table, page = (cell.outputs for cell in notebook.cells[1:])
    (shown,) = progress
    assert "tiny: 3 of 3 cells" in shown["data"]["text/html"]
    assert "ssim" in shown["data"]["text/html"]
    assert table[0]["data"]["text/html"].startswith("<table><caption>&lt;Run &#x27;tiny&#x27;: 3 of 3 cells")
    assert "srcdoc=" in page[0]["data"]["text/html"]
