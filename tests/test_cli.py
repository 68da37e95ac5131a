"""The command as a user meets it: what it prints, and its exit codes."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from leakgauge.harness.cli.app import app

STUDY = textwrap.dedent("""
    name = "tiny"
    tasks = [{data = "digits", model = "mlp-small"}]
    federations = [{clients = 3, rounds = 2, samples = 60, test_samples = 40, algorithm = "fedsgd"}]
    defenses = [{name = "none"}, {name = "gaussian", noise_std = 0.01}]
    [[attacks]]
    name = "prior"
    guess = ["mean", "other"]
    target = {count = 2}
    [[attacks]]
    name = "membership-loss"
    target = {kind = "members", count = 10}
""")


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def start(*words, **environment):
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from leakgauge.harness.cli.app import main; main()", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(STUDY)
    return path


def test_a_study_runs_resumes_and_is_reported(study, tmp_path):
    out = tmp_path / "out"
    first = call("run", study, "-o", out, "--workers", 0)
    assert first.exit_code == 0, first.output
    assert "[6/6] done" in first.output
    assert f"report: {out / 'report.html'}" in first.output
    assert (out / "study.toml").read_text() == STUDY
    page = (out / "report.html").read_bytes()
    assert b"leakgauge run study.toml -o results" in page
    assert page.rstrip().endswith(b"</html>")
    again = call("run", study, "-o", out, "--workers", 0)
    assert again.exit_code == 0
    assert "done  " not in again.output
    assert (out / "report.html").read_bytes() == page
    reported = call("report", out)
    assert reported.exit_code == 0
    assert "gaussian" in reported.output
    assert call("export", out).output.startswith("### digits")
    assert "gaussian" in call("export", out, "--to", "csv").output


def test_a_failed_cell_is_said_with_its_reason_and_exit_code_5(study, tmp_path):
    study.write_text(STUDY.replace('name = "membership-loss"', 'name = "tests.doubles:Coin"').replace("10}", "999}"))
    done = call("run", study, "-o", tmp_path / "out", "--workers", 0)
    assert done.exit_code == 5
    assert "failed: " in done.output
    assert "expected at most 60 members, got count=999" in done.output
    assert call("report", tmp_path / "out").exit_code == 5


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"gaussian"', '"gausian"', "defenses[1]: no defense 'gausian'; did you mean 'gaussian'? Known: "),
        ("noise_std = 0.01", "epsilon = 0", "expected epsilon > 0, got epsilon=0.0"),
        ("clients = 3", "clients = 3, participants = 4", "expected participants <= clients, got participants=4"),
        ("rounds = 2", "ruonds = 2", "federations[0].ruonds: unknown key, got 2"),
        ('"tiny"', '"tiny"\nthreats = ["public"]', "'public' does not see"),
        ('"digits"', '"mnist"', "mnist"),
        ('"digits"', '"npz:/nowhere/x.npz"', "looked for x.npz in /nowhere"),
    ],
)
def test_a_wrong_study_is_one_clear_line_and_exit_code_2(study, tmp_path, old, new, said):
    study.write_text(STUDY.replace(old, new, 1))
    done = call("run", study, "-o", tmp_path / "out", "--data", tmp_path)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.output


def test_a_study_or_a_folder_that_is_not_there_is_exit_code_2(tmp_path):
    done = call("run", "dmeo", "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert call("export", tmp_path).exit_code == 2
    assert "no study 'dmeo'; did you mean 'demo'? Known: adaptive, demo" in done.stderr
    done = call("report", tmp_path / "nothing")
    assert done.exit_code == 2
    assert "there is no study.json" in done.stderr


def test_a_folder_that_cannot_be_written_is_exit_code_2(study, tmp_path):
    (tmp_path / "file").write_text("")
    done = call("run", study, "-o", tmp_path / "file" / "out", "--workers", 0)
    assert done.exit_code == 2
    assert "cannot write" in done.stderr


@pytest.mark.parametrize("what", ["defenses", "attacks", "tasks", "studies"])
def test_lists_have_names_and_summaries_also_as_json(what):
    rows = json.loads(call("list", what, "--json").stdout)
    assert rows
    assert all(row["name"] and row["summary"] for row in rows)
    text = call("list", what).stdout
    assert all(row["name"] in text for row in rows)


def test_show_prints_the_cells_and_the_cost(study):
    text = call("show", study).stdout
    assert "6 cells on 2 trainings" in text
    assert "at most about" in text
    data = json.loads(call("show", study, "--json").stdout)
    assert len(data["cells"]) == 6


def test_help_needs_nothing_heavy():
    done = start("--help")
    assert done.returncode == 0
    assert "run" in done.stdout
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom harness.cli.app import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print({'torch', 'numpy', 'pydantic', 'matplotlib', 'skimage'} & set(sys.modules))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "set()"


def test_the_report_needs_no_torch(study, tmp_path):
    out = tmp_path / "out"
    assert call("run", study, "-o", out, "--workers", 0).exit_code == 0
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom harness.cli.app import app\n"
        f"assert CliRunner().invoke(app, ['report', {str(out)!r}]).exit_code == 0\n"
        "print('torch' in sys.modules)"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "False"
