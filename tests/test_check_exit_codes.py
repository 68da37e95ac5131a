"""What the commands of the gate print, and their exit codes, from files as a run leaves them."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from leakgauge.harness.gate.baseline import read, write
from leakgauge.harness.gate.measure import measured
from leakgauge.harness.study.store import Store, load_run
from tests import command
from tests.by_rows import by_rows
from tests.check_case import (
    better,
    cut,
    cut_result,
    cut_training,
    failed_cell,
    failed_image,
    inconclusive,
    missing_cell,
    nan_in_a_file,
    no_results,
    one,
    one_image_worse,
    other_images,
    other_study,
    with_values,
    worse,
    write_run,
)
from tests.report_fixtures import MATCHING, result_of

ACCEPTED = ("--accept-baseline", "these files are in no repository")


def call(*words, **environment):
    """A command in a folder of no repository."""
    return command.call(*words, *(ACCEPTED if words[0] == "check" else ()), **environment)


@pytest.fixture(autouse=True)
def outside(tmp_path, monkeypatch):
    """Nothing here is in a repository; `test_gate_target.py` has those that are."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    place = tmp_path_factory.mktemp("template")
    write_run(place / "run")
    words = ["--reason", "first numbers", "--baseline", place / "base.json"]
    assert call("baseline", "update", place / "run", *words).exit_code == 0
    return place


@pytest.fixture
def folder(template, tmp_path):
    return shutil.copytree(template / "run", tmp_path / "run")


@pytest.fixture
def base(template, tmp_path):
    return shutil.copy(template / "base.json", tmp_path / "base.json")


def stale(path):
    """Made with another version of what the numbers rest on."""
    found = read(path)
    packages = found.measured.packages | {"torch": "2.0.0"}
    write(dataclasses.replace(found, measured=dataclasses.replace(found.measured, packages=packages)), path)


def no_baseline(path):
    path.unlink()


@by_rows(
    ([], 0, "No increase detected in "),
    ([better], 0, "No increase detected in "),
    ([worse], 1, "Leakage increased in 1 of "),
    ([one_image_worse], 0, "Inconclusive: 1 of "),
    ([inconclusive], 0, "Inconclusive: 1 of "),
    ([missing_cell], 5, "Incomplete: 1 of "),
    ([failed_cell], 5, "out of memory"),
    ([failed_image], 5, "1 of 16 images have no number"),
    ([nan_in_a_file], 5, "Incomplete: 1 of "),
    ([cut_result], 5, "Incomplete: 1 of "),
    ([cut_training], 5, "1 of 1 trainings not finished"),
    ([other_images], 4, "Not comparable: "),
    ([other_study], 4, "Not comparable: "),
    ([worse, cut_training], 1, "Leakage increased in 1 of "),
    ([other_images, missing_cell], 5, "Incomplete: 1 of "),
    ([no_results], 2, "there is no study.json"),
)
def test_the_exit_code_of_a_check_follows_from_the_run(changes, code, said, folder, base):
    for change in changes:
        change(folder)
    done = call("check", folder, "--baseline", base, "--no-rerun")
    assert done.exit_code == code, done.output
    assert said in done.output.splitlines()[-1]
    assert "Traceback" not in done.output


@by_rows((stale, "torch"), (no_baseline, "make one with 'leakgauge baseline make'"), (cut, "restore it with git"))
def test_a_baseline_that_does_not_do_is_exit_code_4(change, said, folder, base):
    change(base)
    done = call("check", folder, "--baseline", base)
    assert done.exit_code == 4, done.output
    assert said in done.output.splitlines()[-1]


def test_inconclusive_is_exit_code_3_where_it_is_to_fail(folder, base):
    inconclusive(folder)
    words = ["check", folder, "--baseline", base, "--no-rerun", "--inconclusive"]
    assert [call(*words, policy).exit_code for policy in ("warn", "fail")] == [0, 3]
    worse(folder)
    assert call(*words, "fail").exit_code == 1


@by_rows([], ["--baseline"], ["--baseline", "x", "--inconclusive", "perhaps"], ["--bsaeline"])
def test_a_wrong_call_is_exit_code_2(words, folder):
    assert call("check", folder, *words).exit_code == 2


def test_a_check_prints_the_worst_first_and_ends_with_the_line_to_look_at(folder, base):
    worse(folder)
    lines = call("check", folder, "--baseline", base).stdout.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("FAIL")]
    key = lines[at].split()[1]
    assert key.startswith("gaussian/map/server/ssim/")
    assert lines[at - 1].startswith("verdict")
    assert [line.split()[:2] for line in lines[at + 1 : at + 3]] == [["gaussian", "under"], ["mean", "SSIM"]]
    ratings = [line for line in lines if line.startswith("rating  ")]
    rest = lines[at + 3 : -1 - len(ratings)]
    assert ratings
    assert all(line.startswith("PASS") for line in rest)
    assert lines[-1].startswith(f"leakgauge: Leakage increased in 1 of {1 + len(rest)} checks, against {base}; ")
    assert key in lines[-1]


def test_a_check_writes_what_it_is_asked_for(folder, base, tmp_path):
    worse(folder)
    page, job = tmp_path / "page.md", tmp_path / "job.md"
    job.write_text("before\n")
    files = ["--junit", tmp_path / "new" / "j.xml", "--json", tmp_path / "c.json"]
    words = ["check", folder, "--baseline", base, *files]
    done = call(*words, "--summary", "auto", GITHUB_STEP_SUMMARY=str(job), GITHUB_ACTIONS="true")
    assert done.exit_code == 1
    assert job.read_text().startswith("before\n## ")
    assert "<failure" in (tmp_path / "new" / "j.xml").read_text()
    assert json.loads((tmp_path / "c.json").read_text())["exit_code"] == 1
    assert sum(line.startswith("::error") for line in done.stdout.splitlines()) == 1
    assert done.stdout.splitlines()[-1].startswith("leakgauge: ")
    done = call(*words, "--summary", page, "--annotations", "off", GITHUB_ACTIONS="true")
    assert page.read_text().startswith("## ")
    assert "::" not in done.stdout
    assert call(*words, "--summary", "auto").exit_code == 1
    done = call("check", folder, "--baseline", base, "--junit", page / "j.xml")
    assert done.exit_code == 2
    assert f"cannot write {page / 'j.xml'}" in done.stderr
    assert "FAIL" in done.stdout


@pytest.mark.parametrize("said", ["true", "1", "woodpecker"])
def test_a_baseline_is_never_updated_under_ci(said, folder, base):
    before = base.read_bytes()
    done = call("baseline", "update", folder, "--reason", "x", "--baseline", base, CI=said)
    assert (done.exit_code, "CI is set" in done.stderr) == (2, True)
    assert base.read_bytes() == before
    assert call("baseline", "update", folder, "--reason", "x", "--baseline", base, CI="false").exit_code == 0


@by_rows([], ["--reason", " "], ["--reason", "two\nlines"], ["--reason", "x", "--accept-increase", "gaussian/*"])
def test_an_update_that_is_asked_for_wrongly_is_exit_code_2(words, folder, tmp_path):
    assert call("baseline", "update", folder, "--baseline", tmp_path / "x.json", *words).exit_code == 2
    assert not (tmp_path / "x.json").exists()


@by_rows(
    *((change, 5, ": gaussian/") for change in (missing_cell, failed_cell, failed_image, cut_result, cut_training)),
    (no_results, 2, "there is no study.json"),
)
def test_an_update_from_an_incomplete_run_is_refused(change, code, said, folder, tmp_path):
    change(folder)
    done = call("baseline", "update", folder, "--reason", "x", "--baseline", tmp_path / "x.json")
    assert (done.exit_code, said in done.stderr) == (code, True)
    assert not (tmp_path / "x.json").exists()


def test_an_update_wants_each_increase_accepted_by_its_key(folder, base):
    worse(folder)
    before = base.read_bytes()
    words = ["baseline", "update", folder, "--reason", "a better attack", "--baseline", base]
    done = call(*words)
    assert done.exit_code == 1
    assert "Leakage increased in 1 of " in done.stderr
    assert " -> " in done.stdout
    key = done.stderr.splitlines()[-1].split()[1].removesuffix(":")
    assert call(*words, "--accept-increase", "laplace/*").exit_code == 2
    assert call(*words, "--accept-increase", key, "--accept-increase", "none/*").exit_code == 2
    assert base.read_bytes() == before
    assert call(*words, "--accept-increase", "gaussian/*/ssim/*").exit_code == 0
    assert read(base).reason == "a better attack"
    assert call("check", folder, "--baseline", base).exit_code == 0
    base.write_bytes(before)
    assert call(*words, "--accept-increase", key).exit_code == 0


@pytest.mark.parametrize("moved", [False, True])
def test_an_update_without_an_increase_needs_no_word_of_it(moved, folder, base):
    if moved:
        better(folder)
    done = call("baseline", "update", folder, "--reason", "y", "--baseline", base)
    assert done.exit_code == 0
    assert ("no measure moved" in done.stdout) == (not moved)
    assert ("(16 of 16 values)" in done.stdout) == moved
    assert "(before: first numbers)" in done.stdout
    assert read(base).reason == "y"
    assert read(base).measured == measured(load_run(folder))


def test_an_update_of_what_cannot_be_compared_says_so(folder, base):
    other_study(folder)
    words = ["baseline", "update", folder, "--reason", "other numbers", "--baseline", base]
    done = call(*words)
    assert (done.exit_code, "nothing could be compared: " in done.stderr) == (0, True)
    assert call("check", folder, "--baseline", base).exit_code == 0
    stale(base)
    done = call(*words)
    assert (done.exit_code, "torch" in done.stderr) == (0, True)
    cut(base)
    assert call(*words).exit_code == 4


def test_a_baseline_lies_by_default_in_baselines_under_the_name_of_the_study(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("baseline", "update", folder, "--reason", "x").exit_code == 0
    assert read(Path("baselines/smoke.json")).reason == "x"
    store = Store(folder)
    store.write_study({**store.read_study(), "name": "../smoke"})
    done = call("baseline", "update", folder, "--reason", "x")
    assert (done.exit_code, "give --baseline FILE" in done.stderr) == (2, True)


@by_rows((ZeroDivisionError, 70, ["internal error, please report it: ZeroDivisionError"]), (KeyboardInterrupt, 130, []))
def test_a_bug_in_the_gate_or_a_stop_does_not_look_like_a_leak(error, code, said, folder, base, monkeypatch):
    monkeypatch.setattr("leakgauge.harness.gate.judge.judge", mock.Mock(side_effect=error))
    done = call("check", folder, "--baseline", base)
    assert done.exit_code == code
    assert all(words in done.stderr for words in said)


def test_a_check_needs_no_torch_and_its_code_is_that_of_the_process(folder, base):
    worse(folder)
    code = (
        "import sys\nfrom leakgauge.harness.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    words = [sys.executable, "-c", code, "check", str(folder), "--baseline", str(base), *ACCEPTED]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "False"


@pytest.mark.matrix
def test_a_run_with_named_gaps_can_be_a_baseline_and_check_reports_each(folder, base, tmp_path):
    cell = one(MATCHING)
    values = list(result_of(cell).estimates[0].values)
    with_values(folder, cell, [None, None, *values[2:]])
    (key,) = [measure.key for measure in measured(load_run(folder)).measures if measure.problem]
    words = ("baseline", "update", folder, "--reason", "two images diverge", "--baseline", tmp_path / "gaps.json")
    done = call(*words)
    assert (done.exit_code, f"{key}: 2 of 16 images have no number" in done.stderr) == (5, True)
    done = call(*words, "--allow-gaps", "none/*")
    assert (done.exit_code, f"matches no gap; gaps: {key}" in done.stderr) == (2, True)
    done = call(*words, "--allow-gaps", key)
    assert (done.exit_code, f"gaps: {key}\n" in done.stdout) == (0, True)
    assert read(tmp_path / "gaps.json").gaps == (key,)
    assert f"gaps: {key}" in call("baseline", "show", tmp_path / "gaps.json").stdout

    check = ("check", folder, "--baseline", tmp_path / "gaps.json", "--no-rerun", "--json", tmp_path / "out.json")
    done = call(*check)
    assert done.exit_code == 0
    assert f": a gap that the baseline accepts, {key}: the run has no number: 2 of 16 images" in done.stdout
    assert "with 1 accepted gaps" in done.stdout.splitlines()[-1]
    assert any(key in warning for warning in json.loads((tmp_path / "out.json").read_text())["warnings"])
    with_values(folder, cell, [None, None, None, *values[3:]])  # the gap grew
    assert call(*check).exit_code == 5
    with_values(folder, cell, values)  # it closed
    done = call(*check)
    assert (done.exit_code, "a gap that the baseline accepts" in done.stdout) == (0, True)
    assert call("check", folder, "--baseline", base, "--no-rerun").exit_code == 0
    with_values(folder, cell, [None, None, *values[2:]])  # not accepted by this one
    assert call("check", folder, "--baseline", base, "--no-rerun").exit_code == 5
    text = (tmp_path / "gaps.json").read_text().replace(f'"{key}"', '"elsewhere"', 1)
    (tmp_path / "gaps.json").write_text(text)
    assert "the gap elsewhere names no measure" in call(*check).stderr
