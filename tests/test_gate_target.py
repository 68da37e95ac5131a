"""Attacks on the gate, in small repositories: whoever proposes a change may edit everything that the branch holds.

Each is a row of the threat model in `docs/ci-threats.md`.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.gate import rerun
from leakgauge.harness.gate.baseline import Baseline, BaselineError, read, write
from leakgauge.harness.gate.judge import Rules
from leakgauge.harness.gate.target import changes, trusted
from leakgauge.harness.study.store import Store
from tests import report_fixtures as made
from tests.by_rows import by_rows
from tests.check_case import ASKED, CELLS, PROBE, inconclusive, one, with_values, worse, write_run
from tests.command import call
from tests.gate_case import IMAGES, measure, measured
from tests.report_fixtures import GAUSSIAN, MAP, NONE

FILE = Path("baselines/smoke.json")
NOT_ACCEPTED = "not accepted: "
ROOT = Path(__file__).parents[1]


def git(*words):
    named = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *named, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(text="a change"):
    git("add", "-A")
    git("commit", "--quiet", "--allow-empty", "-m", text)
    return git("rev-parse", "HEAD")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    write_run(folder / "run")
    (folder / "repository").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "repository")
        git("init", "--quiet", "--template=", "--initial-branch", "main")
        update(folder / "run", "first numbers")
        commit("baseline")
        git("switch", "--quiet", "-c", "change")
        commit("nothing yet")
    return folder


@pytest.fixture
def run(made_once, tmp_path, monkeypatch):
    """A run beside a repository with its baseline on `main`; a branch `change` is checked out there."""
    for name in ("GITHUB_BASE_REF", "CI_MERGE_REQUEST_TARGET_BRANCH_NAME"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(made_once, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path / "repository")
    return tmp_path / "run"


def update(run, reason, *words):
    """Make a run the baseline of the checkout."""
    words = ["--reason", reason, "--baseline", FILE, *words]
    done = call("baseline", "update", run, *words)
    assert done.exit_code == 0, done.output


def check(run, *words, file=FILE, **environment):
    """Exit code and output of a check without reruns."""
    done = call("check", run, "--baseline", file, "--no-rerun", *words, **environment)
    return done.exit_code, done.output


def edit(**fields):
    """Change the first gated SSIM in the baseline of the checkout; a callable gets the old value."""
    base = read(FILE)
    at = next(at for at, one in enumerate(base.measured.measures) if one.metric == "ssim" and not one.control)
    was = base.measured.measures[at]
    fields = {name: value(getattr(was, name)) if callable(value) else value for name, value in fields.items()}
    with_measures(
        base, [*base.measured.measures[:at], dataclasses.replace(was, **fields), *base.measured.measures[at + 1 :]]
    )
    return was


def with_measures(base, measures):
    write(dataclasses.replace(base, measured=dataclasses.replace(base.measured, measures=tuple(measures))), FILE)


def replaced(old, new):
    """Replace a text in the baseline of the checkout, once."""
    text = FILE.read_text("utf-8")
    assert old in text
    FILE.write_text(text.replace(old, new, 1), "utf-8")


def test_a_branch_that_changes_nothing_passes(run):
    code, said = check(run)
    assert (code, NOT_ACCEPTED in said, "warning: HEAD" in said) == (0, False, False)


def test_a_the_commit_that_a_baseline_names_is_no_base(run):
    main = git("rev-parse", "main")
    worse(run)
    weakening = commit("weaker noise")
    assert check(run)[0] == 1
    text = f'"commit": "{read(FILE).measured.commit}"'
    replaced(text, f'"commit": "{weakening}"')
    commit("one line")
    code, said = check(run)
    assert code == 1
    assert f"changed in the baseline: commit: {read_commit(text)} -> {weakening}" in said
    found = trusted(FILE)
    assert (found.base, found.baseline.measured.commit) == (main, read_commit(text))


def read_commit(text):
    return text.split('"')[3]


@pytest.mark.parametrize("also_in_the_baseline", [False, True])
def test_b_a_victim_that_is_no_longer_measured_is_missed(run, also_in_the_baseline):
    less = [cell for cell in CELLS if cell.attack != MAP]
    write_run(run, less)
    if also_in_the_baseline:
        update(run, "less")
        commit()
    code, said = check(run)
    assert code == 5
    assert "removed: the run no longer has this measure" in said
    assert "warning: the study changed" in said
    assert ("removed from the baseline: gaussian/map/server/ssim/" in said) == also_in_the_baseline
    if also_in_the_baseline:
        assert check(run, "--accept-baseline", "the attack is retired")[0] == 0


def test_c_results_of_other_code_fail(run):
    store = Store(run)
    for cell in CELLS[:1]:
        result = store.examine(store.cell(cell.id)).value
        other = dataclasses.replace(result.environment, commit="0" * 40)
        store.write_result(dataclasses.replace(result, environment=other), {}, 1.0)
    code, said = check(run)
    assert code == 4
    assert "not comparable: the results were made at " in said
    assert "run the study again, in a new folder" in said


@pytest.mark.matrix
def test_d_a_defense_that_is_added_is_named_and_the_others_are_checked(run):
    write_run(run, made.grid([NONE, *GAUSSIAN[1:3]], ASKED, seeds=[0]))
    code, said = check(run)
    assert code == 0
    assert said.count("this measure is not compared: new: ") == 5  # three attacks' SSIM or AUC, accuracy, bits
    update(run, "one more")
    commit()
    code, said = check(run)
    assert (code, "added to the baseline: gaussian/" in said, NOT_ACCEPTED in said) == (0, True, False)
    worse(run)
    assert check(run)[0] == 1


@by_rows(
    (lambda: edit(value=lambda old: old + 0.1), "weakened in the baseline: gaussian/"),
    (lambda: edit(values=lambda old: (0.41, *old[1:])), "(values)"),
    (lambda: edit(values=lambda old: (-9.0, *old[1:])), "changed in the baseline: gaussian/"),
    (lambda: edit(items=("another",)), "(items)"),
    (lambda: edit(unseen=tuple(range(16))), "(unseen)"),
    (lambda: edit(control="floor"), "(control)"),
    (lambda: edit(problem="a cell failed"), "(problem)"),
    (lambda: edit(key=lambda old: old.replace("/ssim/", "/SSIM/")), "removed from the baseline: gaussian/"),
    (lambda: edit(metric="epsilon"), "(metric)"),
    (lambda: with_measures(read(FILE), read(FILE).measured.measures[:1]), "removed from the baseline: gaussian/"),
)
def test_a_baseline_that_is_edited_does_not_count_and_is_not_accepted(change, said, run):
    change()
    commit()
    code, output = check(run)
    assert code == 6, output
    assert any(line.startswith(NOT_ACCEPTED) and said in line for line in output.splitlines())
    assert "leakgauge: Not accepted: " in output.splitlines()[-1]
    worse(run)
    assert check(run)[0] == 1


def test_a_reason_or_another_package_is_named_and_needs_nobody(run):
    replaced('"reason": "first numbers"', '"reason": "other words"')
    replaced('"torch": "', '"torch": "9.')
    code, said = check(run)
    assert (code, "changed in the baseline: packages, torch" in said) == (0, True)


@by_rows(
    (lambda: with_measures(read(FILE), ()), "it has no measures"),
    (lambda: with_measures(read(FILE), read(FILE).measured.measures[:2] * 2), "is there twice"),
    (lambda: FILE.write_text("{}"), "got schema None"),
    (lambda: FILE.unlink(), "no baseline"),
)
def test_a_baseline_that_is_emptied_or_has_a_key_twice_is_refused(change, said, run):
    change()
    commit()
    code, output = check(run)
    assert (code, said in output) == (4, True)


def test_another_file_or_a_link_to_one_does_not_count(run):
    worse(run)
    Path("other.json").write_bytes(FILE.read_bytes())
    words = ["--reason", "mine", "--accept-increase", "*", "--baseline"]
    assert call("baseline", "update", run, *words, "other.json").exit_code == 0
    code, said = check(run, file="other.json")
    assert (code, "other.json is not in the target branch at " in said) == (6, True)
    FILE.unlink()
    FILE.symlink_to("../other.json")
    commit()
    assert check(run)[0] == 1
    FILE.parent.rename("moved")
    Path("baselines").symlink_to("moved")
    assert check(run)[0] == 6


def test_a_repository_inside_the_repository_vouches_for_nothing(run):
    worse(run)
    update(run, "mine", "--accept-increase", "*")
    subprocess.run(["git", "init", "--quiet", "--initial-branch", "main"], cwd=FILE.parent, check=True)
    assert check(run)[0] == 1


def test_a_study_of_weaker_parameters_or_fewer_images_asks_other_questions(run):
    few = [
        (attack, dataclasses.replace(PROBE, count=8) if target == PROBE else target, who)
        for attack, target, who in ASKED
    ]
    write_run(run, made.grid([NONE, GAUSSIAN[1]], few, seeds=[0]))
    code, said = check(run)
    assert (code, "removed: the run no longer has this measure" in said) == (5, True)
    write_run(run, made.grid([NONE, GAUSSIAN[3]], ASKED, seeds=[0]))
    update(run, "weaker")
    commit()
    code, said = check(run)
    assert (code, "the run and the baseline are of different studies" in said) == (4, True)


def test_fewer_seeds_are_fewer_values(run):
    git("switch", "--quiet", "main")
    write_run(run, made.grid([NONE, GAUSSIAN[1]], ASKED, seeds=[0, 1]))
    update(run, "two seeds")
    commit()
    git("switch", "--quiet", "-C", "change")
    write_run(run)
    code, said = check(run)
    assert (code, "16 against 32" in said) == (4, True)


@pytest.mark.matrix
def test_the_code_that_decides_is_named_where_it_changed(run):
    git("switch", "--quiet", "main")
    for folder in ("harness/gate", "leakgauge"):
        Path(folder).mkdir(parents=True)
    Path("leakgauge/__init__.py").touch()
    Path("harness/gate/rules.py").write_text("margin = 0.02\n")
    commit("the gate")
    git("switch", "--quiet", "-C", "change")
    assert check(run)[0] == 0
    Path("harness/gate/rules.py").write_text("margin = 0.9\n")
    code, said = check(run)
    assert code == 6
    assert "not accepted: changed since the target branch: harness/gate/rules.py, which decides this check" in said
    code, said = check(run, "--accept-baseline", "a better rule")
    assert (code, "warning: accepted (a better rule): changed since the target branch" in said) == (0, True)


def test_the_rules_are_those_of_the_targets_code(run):
    place = Path("leakgauge/harness/gate")
    place.mkdir(parents=True)
    for folder in (place, *list(place.parents)[:-1]):
        (folder / "__init__.py").touch()
    lines = [
        "from dataclasses import dataclass",
        "@dataclass",
        "class Rules:",
        "    margin: float = 0.5",
        "    old: int = 3",
    ]
    (place / "rules.py").write_text("\n".join(lines))
    old = commit()
    (place / "rules.py").write_text("raise SystemExit(1)")
    broken = commit()
    assert rerun.rules_at(old) == Rules(margin=0.5)
    with pytest.raises(StudyError, match="could not state the rules"):
        rerun.rules_at(broken)


def test_a_commit_that_is_no_ancestor_is_refused(run):
    git("switch", "--quiet", "-c", "side", "main")
    side = commit("elsewhere")
    git("switch", "--quiet", "change")
    replaced(f'"commit": "{read(FILE).measured.commit}"', f'"commit": "{side}"')
    code, said = check(run)
    assert code == 4
    assert f"its commit {side[:12]} is no ancestor of HEAD; make a new one with 'leakgauge baseline make'" in said
    assert check(run, "--accept-baseline", "mine")[0] == 4


def test_a_commit_that_git_does_not_know_is_refused_where_the_code_is(run, monkeypatch):
    monkeypatch.setattr("leakgauge.harness.gate.target.__file__", str(Path("x.py").resolve()))
    replaced(f'"commit": "{read(FILE).measured.commit}"', f'"commit": "{"f" * 40}"')
    with pytest.raises(BaselineError, match="its commit ffffffffffff is no ancestor of HEAD"):
        trusted(FILE)
    commit()
    git("switch", "--quiet", "-C", "main")
    assert any("its commit ffffffffffff is no ancestor" in said for said in trusted(FILE).warnings)


@pytest.mark.matrix
def test_on_the_target_itself_its_own_baseline_counts_and_the_last_commit_is_shown(run):
    git("switch", "--quiet", "main")
    introduced = git("rev-parse", "HEAD")
    code, said = check(run)
    assert (code, "warning: HEAD is in the target branch: judged by its own baseline" in said) == (0, True)
    worse(run)
    weakening = commit("weaker noise")
    replaced(f'"commit": "{read(FILE).measured.commit}"', f'"commit": "{weakening}"')
    commit("one line")
    assert check(run)[0] == 1
    assert trusted(FILE).base == introduced
    update(run, "worse", "--accept-increase", "*")
    assert check(run)[0] == 1  # not committed
    commit("new numbers")
    code, said = check(run)
    assert (code, "its last commit made 2 changes" in said) == (0, True), said
    assert "warning: weakened in the baseline: gaussian/" in said
    assert trusted(FILE).base == git("rev-parse", "HEAD^")
    assert check(run, "--target", introduced)[0] == 1


def test_the_target_is_that_of_ci_or_of_origin(run):
    worse(run)
    update(run, "worse", "--accept-increase", "*")
    commit()
    git("switch", "--quiet", "-C", "main")
    assert check(run)[0] == 0
    git("update-ref", "refs/remotes/origin/main", "HEAD^")
    git("tag", "origin/main")
    assert check(run)[0] == 1
    git("update-ref", "refs/remotes/origin/next", "HEAD")
    assert check(run, GITHUB_BASE_REF="next")[0] == 0
    assert check(run, GITHUB_BASE_REF="lost")[0] == 6


@pytest.mark.matrix
def test_without_a_repository_or_a_target_somebody_must_accept(run, tmp_path, monkeypatch):
    git("branch", "--quiet", "-D", "main")
    code, said = check(run)
    assert (code, "the baseline cannot be verified" in said) == (6, True)
    for ref in ("lost", "--help"):
        code, said = check(run, f"--target={ref}")
        assert (code, "HEAD has no merge base with this target; fetch its history" in said) == (2, True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "base.json").write_bytes(FILE.read_bytes())
    monkeypatch.chdir(elsewhere)
    assert check(run, file="base.json")[0] == 6
    code, said = check(run, "--accept-baseline", "no git here", file="base.json")
    assert (code, "warning: accepted (no git here): no git repository" in said) == (0, True)
    assert check(run, "--rerun-base", file="base.json")[0] == 2
    assert check(run, "--accept-baseline", " ", file="base.json")[0] == 6


def test_an_accepted_baseline_is_never_judged_by_a_rerun_of_what_is_not_its_code(run):
    inconclusive(run)
    update(run, "mine")
    base = trusted(FILE, accepted="mine")
    assert (base.base, base.baseline) == (None, read(FILE))
    git("restore", str(FILE))
    assert trusted(FILE, accepted="mine").base == git("rev-parse", "main")


@by_rows(
    ("accuracy", [0.8], [0.7], "weakened"),
    ("accuracy", [0.8], [0.9], "changed"),
    ("bits", [2.0], [3.0], "weakened"),
    ("ssim", IMAGES, IMAGES - 0.01, "changed"),
)
def test_a_number_is_weakened_where_more_may_leak(metric, before, now, word):
    old, new = (Baseline(measured(measure(metric, values)), "") for values in (before, now))
    (line,), notes = changes(old, new)
    assert line.startswith(f"{word} in the baseline: laplace/")
    assert notes == []
    assert changes(old, old) == ([], [])


@by_rows((8.0, 9.0, "weakened"), (8.0, None, "weakened"), (None, 8.0, "changed"))
def test_a_claim_that_is_lifted_is_weakened(before, now, word):
    old, new = (Baseline(measured(measure("epsilon", [1.0], limit=limit)), "") for limit in (before, now))
    (line,), _ = changes(old, new)
    assert line == f"{word} in the baseline: laplace/epsilon/abcdef (limit)"


def test_a_forged_result_is_not_seen_here(run):
    """The store's manifest is to see it; the gate believes what `load_run` returns."""
    worse(run)
    assert check(run)[0] == 1
    with_values(run, one(MAP), made.ssim_values(one(MAP)))
    assert check(run)[0] == 0


MINE = """
from leakgauge.defenses.gaussian import Gaussian

STRENGTH = 1.0


class Mine(Gaussian):
    @property
    def sigma(self):
        return STRENGTH * super().sigma
"""

SMALL = """
name = "small"
[[tasks]]
data = "digits"
model = "linear"
[[federations]]
clients = 2
rounds = 1
algorithm = "fedsgd"
samples = 40
[[defenses]]
name = "mine:Mine"
noise_std = 0.3
[[attacks]]
name = "analytic"
target = { kind = "probe", count = 8 }
"""


@pytest.mark.slow
def test_less_noise_in_the_users_code_is_seen_by_numbers_and_by_a_rerun(run):
    place = f"{Path.cwd()}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": place, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def leakgauge(*words):
        command = [sys.executable, "-m", "leakgauge", *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    results, base = run.parent / "results", Path("small.json")
    words = ("check", results, "--baseline", base)
    git("switch", "--quiet", "main")
    Path("mine.py").write_text(MINE)
    Path("small.toml").write_text(SMALL)
    assert leakgauge("run", "small.toml", "-o", results)[0] == 0
    assert leakgauge("baseline", "update", results, "--reason", "first", "--baseline", base)[0] == 0
    commit("mine")
    # another processor: its numbers are higher everywhere, and only a rerun tells that from a leak
    lower = read(base)
    moved = [
        dataclasses.replace(one, value=one.value - 0.1, values=tuple(value - 0.1 for value in one.values))
        if one.metric == "ssim"
        else one
        for one in lower.measured.measures
    ]
    write(dataclasses.replace(lower, measured=dataclasses.replace(lower.measured, measures=tuple(moved))), base)
    commit("the numbers of another machine")
    git("switch", "--quiet", "-c", "honest")
    commit("nothing")
    assert leakgauge(*words)[0] == 1
    assert leakgauge(*words, "--rerun-base")[0] == 0
    # less noise, and a baseline that names the commit which weakened it
    Path("mine.py").write_text(MINE.replace("1.0", "0.01"))
    weakening = commit("weaker")
    base.write_text(base.read_text().replace(lower.measured.commit, weakening))
    commit("one line")
    shutil.rmtree(results)
    assert leakgauge("run", "small.toml", "-o", results)[0] == 0
    for more in ((), ("--rerun-base",), ("--accept-baseline", "it is mine", "--rerun-base")):
        code, said = leakgauge(*words, *more)
        assert (code, "mine:Mine" in said) == (1, True), said
