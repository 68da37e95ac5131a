"""The command as a user meets it: its output and its exit codes."""

import io
import json
import re
import subprocess
import sys
import textwrap

import pandas
import pandas.testing
import pytest
from rich.console import Console

import leakgauge
from leakgauge import __version__, load_study
from leakgauge.harness.cli.progress import listener
from leakgauge.harness.study.jobs import Job
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Progress
from tests.by_rows import by_rows
from tests.command import call, refused

STUDY = textwrap.dedent("""
    name = "tiny"
    lineup = false
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
FAILING = STUDY.replace('name = "membership-loss"', 'name = "tests.doubles:Wrong"')


def imported_by(*words):
    """The heavy packages that a successful call imports, in its own process."""
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom leakgauge.harness.cli.main import app\n"
        f"assert CliRunner().invoke(app, {[str(word) for word in words]!r}).exit_code == 0\n"
        "print(*{'torch', 'numpy', 'pydantic', 'matplotlib', 'skimage'} & set(sys.modules))"
    )
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(STUDY)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The study, the folder of its results, and what the run printed."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.toml").write_text(STUDY)
    done = call("run", folder / "tiny.toml", "-o", folder / "out", "--workers", 0)
    assert done.exit_code == 0, done.output
    return folder / "tiny.toml", folder / "out", done.output


@pytest.mark.matrix
def test_a_study_runs_resumes_and_is_reported_without_torch(finished):
    study, out, printed = finished
    assert "[6/6] done" in printed
    assert f"report: {out / 'report.html'}" in printed
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
    assert "torch" not in imported_by("report", out)


def test_an_export_is_chosen_written_and_refused(finished, tmp_path):
    out, file = finished[1], tmp_path / "rows.parquet"
    chosen = call("export", out, "--to", "csv", "--quantity", "auc", "--columns", "defense,value").output.splitlines()
    assert chosen[0] == "defense,value"
    assert len(chosen) == 3
    assert call("export", out, "--to", "parquet", "-o", file).output == ""
    pandas.testing.assert_frame_equal(pandas.read_parquet(file), leakgauge.load_run(out).frame())
    assert "no quantity 'acu'; known: " in refused("export", out, "--to", "csv", "--quantity", "acu")
    assert "--quantity, --columns and --items need a format with rows" in refused("export", out, "--items")


@pytest.mark.matrix
def test_from_python_a_study_runs_with_its_progress_and_its_report(study, tmp_path, capsys):
    run = leakgauge.run(study, tmp_path / "out", workers=0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert any(re.match(r"\[1/6, about \d+ s left\] done ", line) for line in lines), lines
    assert lines[-1].startswith("[6/6] done ")
    page = leakgauge.report(run)
    assert (tmp_path / "out" / "report.html").read_text() == page.html
    assert page._repr_html_().startswith("<iframe srcdoc=")
    assert len(repr(page)) < 100
    assert repr(run) == "<Run 'tiny': 6 of 6 cells on 2 trainings>"
    leakgauge.run(str(study), tmp_path / "out", workers=0, progress=False)
    assert capsys.readouterr().out == ""


def test_only_some_cells_run_and_a_dry_run_shows_which_are_finished(study, tmp_path):
    out = tmp_path / "out"
    done = call("run", study, "-o", out, "--workers", 0, "--only", "GAUSSIAN*members", "--verbose")
    assert done.exit_code == 0, done.output
    assert "[1/1] done" in done.output
    assert "start  training of gaussian" in done.output
    assert len(leakgauge.load_run(out).results) == 1
    lines = (out / "run.log").read_text().splitlines()
    assert [re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (start|done) ", line)[1] for line in lines] == [
        "start",
        "done",
    ] * 2
    shown = call("run", study, "-o", out, "--dry-run").output
    assert shown.count("  finished") == 1
    assert "on one core" in shown
    assert not (tmp_path / "none").exists()
    assert "--only: no cell holds 'nothing'; the first of 6: " in refused("run", study, "-o", out, "--only", "nothing")
    assert "Install completion" in call("--help").output


def test_a_verbose_run_prints_the_trace_of_a_failure(study, tmp_path):
    study.write_text(FAILING)
    assert "Traceback" in call("run", study, "-o", tmp_path / "out", "--workers", 0, "--verbose").output


def test_a_failed_cell_is_printed_with_its_reason_and_exit_code_5(study, tmp_path):
    study.write_text(FAILING)
    done = call("run", study, "-o", tmp_path / "out", "--workers", 0)
    assert done.exit_code == 5
    assert "failed: " in done.output
    assert "Traceback" not in done.output
    assert "expected nothing, got 20 candidates" in done.output
    assert call("report", tmp_path / "out").exit_code == 5
    next((tmp_path / "out").glob("cells/*/failure.json")).unlink()
    assert "cells without a result: 1" in call("report", tmp_path / "out").stderr


def test_a_terminal_shows_finished_running_and_failed_jobs(study, tmp_path):
    def screen(work):
        text = io.StringIO()
        with listener("tiny", Console(file=text, force_terminal=True, width=120)) as listen:
            work(listen)
        return text.getvalue()

    def run(listen):
        run_study(load_study(study), tmp_path / "out", workers=0, listen=listen)

    study.write_text(FAILING)
    first, again = screen(run), screen(run)
    assert all(text in first for text in ("tiny: starting", "done  ", "failed  ", "6 of 6 cells, 2 failed"))
    assert "6 of 6 cells, 4 reused, 2 failed" in again
    spec = load_study(study).trainings[0]
    running = Progress(total=1, running=[Job("training", spec, ())])
    shown = screen(lambda listen: listen(running, None))
    assert re.search(r"running +training of no defense, seed 0.*0 of 1 cells", shown, re.DOTALL)


@by_rows(
    ('"gaussian"', '"gausian"', "defenses[1]: no defense 'gausian'; did you mean 'gaussian'? Known: "),
    ('"digits"', '"mnist"', "mnist"),
    ('"digits"', '"npz:/nowhere/x.npz"', "looked for x.npz in /nowhere"),
)
def test_an_invalid_study_is_one_clear_line_and_exit_code_2(old, new, message, study, tmp_path):
    study.write_text(STUDY.replace(old, new, 1))
    assert message in refused("run", study, "-o", tmp_path / "out", "--data", tmp_path, most=800)


def test_a_missing_study_or_folder_is_one_line_and_exit_code_2(study, tmp_path):
    (tmp_path / "file").write_text("")
    known = "no study 'dmeo'; did you mean 'demo'? Known: adaptive, demo"
    assert known in refused("run", "dmeo", "-o", tmp_path / "out")
    assert "there is no study.json" in refused("export", tmp_path)
    assert "there is no study.json" in refused("report", tmp_path / "nothing")
    assert "cannot write" in refused("run", study, "-o", tmp_path / "file" / "out", "--workers", 0)


@pytest.mark.parametrize("what", ["defenses", "attacks", "tasks", "studies"])
def test_lists_have_names_and_summaries_also_as_json(what):
    rows = json.loads(call("list", what, "--json").stdout)
    assert rows
    assert all(row["name"] and row["summary"] for row in rows)
    text = call("list", what).stdout
    assert all(row["name"] in text for row in rows)


@pytest.mark.parametrize("what", ["defences", "defence"])
def test_british_spelling_gets_a_hint(study, what):
    assert "no list of 'defence" in refused("list", what)
    assert "did you mean 'defenses'?" in refused("list", what)
    study.write_text(STUDY.replace("defenses =", f"{what} ="))
    text = call("show", study).stderr
    assert f"leakgauge: {study}: {what}: unknown key; did you mean 'defenses'? Known: name, title, seeds" in text


def test_show_prints_the_cells_and_the_cost(study):
    text = call("show", study).stdout
    assert "6 cells on 2 trainings" in text
    assert re.search(r"about \d+ s of training, 0 s of audits and \d+ s of attacks on one core \(6 of 6 kinds", text)
    data = json.loads(call("show", study, "--json").stdout)
    assert len(data["cells"]) == 6


def test_help_and_the_version_need_nothing_heavy():
    assert imported_by("--help") == imported_by("--version") == set()
    done = subprocess.run([sys.executable, "-m", "leakgauge", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == call("--version").stdout == f"leakgauge {__version__}\n"


@pytest.mark.matrix
def test_a_study_is_audited_at_its_own_size_one_defense_after_the_other(study):
    options = ("audit", "--study", study, "--trials", 20)
    printed = call(*options).stdout
    assert printed.count("in tiny: 3 of 3 clients in each of 2 rounds, d 2778, 20 records or more") == 2
    for line in printed.splitlines():
        assert not ("d 2778" in line and "d 36" in line), "one line, one federation"
        assert not ("in the small federation" in line and "of the study" in line)
    assert printed.count("  small    federation of the trials: clients 3, rounds 1, d 36") == 2
    (found,) = json.loads(call(*options, "--only", "gaussian", "--json").stdout)
    assert (found["defense"], found["setting"]["dim"], found["audited"]["dim"]) == ("gaussian", 2778, 36)


@by_rows(
    (["--only", "gausian"], "no defense in tiny 'gausian'; did you mean 'gaussian'? Known: none, gaussian"),
    (["gaussian"], "expected one of a defense"),
    (["--rounds", "3"], "--study states parameters, federation and rounds"),
    (["--delta", "0.1"], "--delta is for --scores"),
)
def test_an_audit_of_a_study_refuses_what_it_cannot_use(options, words, study):
    result = call("audit", "--study", study, *options)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", "").split())


def test_options_of_a_study_are_refused_without_one():
    assert call("audit", "gaussian", "--only", "gaussian").exit_code == 2


@pytest.mark.matrix
def test_a_goal_that_needs_trainings_is_refused_by_an_audit_of_a_study(study):
    study.write_text(STUDY.replace("noise_std = 0.01", "target = {accuracy_loss = 0.02}"))
    result = call("audit", "--study", study)
    assert result.exit_code == 2
    assert "its goal is solved by trainings" in result.stderr
