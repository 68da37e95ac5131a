"""What runs again for a gate: fresh images on both sides, and the baseline's own code."""

import dataclasses
import subprocess

import pytest

from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.metrics import metric
from leakgauge.harness.gate import rerun
from leakgauge.harness.gate.comparable import TESTED
from leakgauge.harness.gate.judge import Rules, Verdict, judge
from leakgauge.harness.gate.measure import key_end, measured
from leakgauge.harness.study.environment import code_of
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.store import Store
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.check_case import CELLS, write_run
from tests.doubles import study_table
from tests.report_fixtures import ENVIRONMENT

ATTACKS = [
    {"name": "analytic", "target": {"kind": "probe", "count": 8}},
    {"name": "membership-loss", "target": {"kind": "members", "count": 12}},
]
FEDERATION = {"clients": 2, "rounds": 1, "algorithm": "fedsgd", "samples": 40}
STUDY = study_table(FEDERATION, [{"name": "gaussian", "noise_std": 0.05}], ATTACKS, model="linear")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("small")
    run_study(resolve(STUDY), path, workers=0)
    return path


def outcome_of(folder, verdict):
    """A run beside itself, with a verdict put on the checks of its attacks."""
    now = measured(rerun.load_run(folder))
    found = judge(now, now, Rules())
    assert {check.verdict for check in found.checks} == {Verdict.PASS}
    checks = [dataclasses.replace(c, verdict=verdict) if metric(c.metric).gate in TESTED else c for c in found.checks]
    return dataclasses.replace(found, checks=tuple(checks))


@pytest.mark.slow
def test_inconclusive_checks_are_decided_on_twice_as_many_fresh_images(folder):
    bench = rerun.Bench(folder, workers=0)
    before = outcome_of(folder, Verdict.INCONCLUSIVE)
    after = rerun.settle(before, "HEAD", bench, Rules())
    assert sorted(check.key for check in after.checks) == sorted(check.key for check in before.checks)
    old, new = ({check.metric: check for check in outcome.checks} for outcome in (before, after))
    assert new["ssim"].verdict is Verdict.PASS
    assert (old["ssim"].n, new["ssim"].n) == (8, 16)
    assert new["auc"].n == 2 * old["auc"].n
    assert new["ssim"].before != old["ssim"].before
    assert "all fresh" in new["ssim"].reason
    for name in ("bits", "accuracy"):
        assert new[name] == old[name]


def test_what_is_decided_does_not_run_again(folder):
    before = outcome_of(folder, Verdict.FAIL)
    assert rerun.settle(before, "no such commit", rerun.Bench(folder), Rules()) is before


def test_the_second_time_has_other_seeds_and_twice_the_images(folder):
    for cell in rerun.Store(folder).cells():
        twice = rerun._twice(cell)
        assert twice.training.seed == cell.training.seed + rerun.FRESH
        assert twice.target.count == 2 * cell.target.count
        assert twice.target.outside == (24 if cell.target.kind == "members" else None)
        assert key_end(twice) != key_end(cell)
        assert key_end(dataclasses.replace(cell, training=twice.training)) == key_end(cell)


@pytest.mark.matrix
def test_the_baseline_at_its_commit_gives_the_measures_of_the_run(folder):
    own = measured(rerun.load_run(folder))
    # the run no longer asks the first, and asks the second of fewer images
    lost, fewer = (
        dataclasses.replace(own.measures[0], key=key, values=(0.5,)) for key in ("a/b/c/ssim/0", own.measures[0].key)
    )
    held = dataclasses.replace(own, measures=(lost, fewer, *own.measures[1:]))
    found = rerun.at_commit("HEAD", rerun.Bench(folder, workers=0), held)
    assert found.measures[:2] == (lost, fewer)
    assert found.measures[2].value == pytest.approx(own.measures[1].value)
    assert (found.study, found.study_hash, found.data) == (own.study, own.study_hash, own.data)
    assert found.by_key().keys() == {lost.key, *own.by_key()}
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert (found.commit, found.dirty) == (head, False)
    assert not any("leakgauge-" in line and line.endswith("/tree") for line in _worktrees())


def test_a_commit_that_is_not_there_is_said_in_a_line(folder):
    with pytest.raises(StudyError, match="git rev-parse no such commit"):
        rerun.at_commit("no such commit", rerun.Bench(folder), measured(rerun.load_run(folder)))


def test_a_rerun_of_a_run_without_the_cells_of_the_baseline_is_refused(folder):
    held = dataclasses.replace(measured(rerun.load_run(folder)), measures=())
    with pytest.raises(StudyError, match="the run has no cell of the baseline"):
        rerun.at_commit("HEAD", rerun.Bench(folder), held)


def test_the_rules_of_a_commit_are_read_from_its_code():
    assert rerun.rules_at("HEAD") == Rules()


def test_a_check_that_cannot_tell_runs_again_where_the_commit_is_known(folder, monkeypatch):
    bench, asked = rerun.Bench(folder), []
    monkeypatch.setattr(rerun, "settle", lambda found, ref, *rest, **named: asked.append(ref) or found)
    unsure = outcome_of(folder, Verdict.INCONCLUSIVE)
    found = rerun.again(unsure, None, bench, Rules())
    assert "no cell ran again: no commit of the target branch" in found.warnings[-1]
    assert rerun.again(unsure, "HEAD", bench, Rules()) is unsure
    cannot = dataclasses.replace(unsure.checks[-1], verdict=Verdict.NOT_COMPARABLE)
    other = dataclasses.replace(unsure, checks=(cannot, *unsure.checks))
    for decided in (other, *(outcome_of(folder, verdict) for verdict in (Verdict.PASS, Verdict.FAIL))):
        assert rerun.again(decided, "HEAD", bench, Rules()) is decided
    assert asked == ["HEAD"]


def test_results_of_other_code_are_said_to_be_so(folder):
    now, bench = measured(rerun.load_run(folder)), rerun.Bench(folder)
    assert rerun.about_code(now, bench) == ()
    assert rerun.about_code(dataclasses.replace(now, commit="0" * 40, dirty=not now.dirty), bench) == ()
    store = Store(folder)
    cell = store.cells()[0]
    own = code_of(cell.training, cell.attack)
    for code, found in (("0" * 16, 1), (own, 0)):
        folder = store.cell(cell.id)
        store.write_result(store.examine(folder).value, store.read_arrays(folder / "arrays.npz"), 1.0, code)
        said = "1 result made by other code: run the study again to check this code"
        assert rerun.about_code(now, bench) == (said,) * found


@by_rows((True, False, 1), (True, True, 0), (False, True, 1), (False, False, 0))
def test_changes_that_the_results_do_not_have_are_said(here, now, said, tmp_path, folder, monkeypatch):
    bench, found = rerun.Bench(tmp_path), measured(rerun.load_run(folder))
    write_run(tmp_path, CELLS)  # results that do not say which code made them
    monkeypatch.setattr(rerun, "origin", lambda: dataclasses.replace(ENVIRONMENT, commit=found.commit, dirty=here))
    assert len(rerun.about_code(dataclasses.replace(found, dirty=now), bench)) == said
    (words,) = rerun.about_code(dataclasses.replace(found, commit="0" * 40), bench)
    assert words.startswith("the results were made at 000000000000 and this code is at ")


def _worktrees():
    """Those that git knows of."""
    done = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
