"""Two runs side by side."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
import typer
from rich.console import Console
from scipy import stats as reference
from typer.testing import CliRunner

from leakgauge.harness.cli.report import compare as command
from leakgauge.harness.core.cell import PartSpec, Target
from leakgauge.harness.core.result import Pictures, Scores
from leakgauge.harness.core.stats import mean
from leakgauge.harness.gate.compare import compare, compare_all, rows
from leakgauge.harness.gate.measure import measured, placements
from leakgauge.harness.gate.output import escaped
from leakgauge.harness.gate.rules import caught
from leakgauge.reports.compared import side_by_side, to_json
from tests import report_fixtures as double
from tests.by_rows import by_rows
from tests.stored import on_disk

GAUSSIAN = double.GAUSSIAN[0]
IMAGES = [(double.MATCHING, double.PROBE, "server")]


def ssim(table):
    def make(cell):
        return double.with_estimates(double.result_of(cell), mean("ssim", table[cell.training.seed]))

    return make


def draws(seed, shift=0.0):
    return [round(0.3 + shift + 0.2 * double.wave(seed, at, shift), 6) for at in range(6)]


def attacked(seeds=(0, 1), *, shift=0.0, **changes):
    cells = double.grid([GAUSSIAN], IMAGES, seeds)
    fields = {"make": ssim({seed: draws(seed, shift) for seed in seeds})} | changes
    return double.make_run(cells, **fields)  # type: ignore[arg-type]


def trained(accuracies, defense=GAUSSIAN):
    """A run whose trainings end at these accuracies, by seed."""
    run = double.make_run(double.grid([defense], IMAGES, list(accuracies)))

    def changed(record):
        last = dataclasses.replace(record.evaluations[-1], accuracy=accuracies[record.spec.seed])
        return dataclasses.replace(record, evaluations=(*record.evaluations[:-1], last))

    return dataclasses.replace(run, trainings={key: changed(record) for key, record in run.trainings.items()})


def only(found, metric):
    (one,) = (one for one in found.differences if one.either.metric == metric)
    return one


def lone(rows):
    """Measures that only the first and only the second run has."""
    return [row for row in rows if row.after is None], [row for row in rows if row.before is None]


def numbers(one):
    return one.difference, *one.interval


def plain(*found, width=140):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(side_by_side(found).terminal(width))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def to_markdown(compared):
    return side_by_side(compared).markdown(escaped)


def test_a_run_does_not_differ_from_itself():
    run = double.full_run()
    found = compare(run, run)
    assert len(found.differences) > 50
    assert all(one.difference in (0.0, None) for one in found.differences)
    assert not any(one.differs for one in found.differences)
    assert (lone(found.rows), found.remarks) == (([], []), ())


def test_the_same_images_are_compared_in_pairs_with_students_interval():
    one = only(compare(attacked(), attacked(shift=0.1)), "ssim")
    pairs = np.array([draws(s, 0.1) for s in (0, 1)]).ravel() - np.array([draws(s) for s in (0, 1)]).ravel()
    low, high = reference.ttest_1samp(pairs, 0.0).confidence_interval(0.95)
    assert numbers(one) == pytest.approx((pairs.mean(), low, high), rel=1e-9)
    assert (one.method, one.n, one.note, one.differs) == ("pairs", (12,), "", True)


def test_pairs_are_of_the_same_image_in_whatever_order_the_seeds_stand():
    one = only(compare(attacked((0, 1)), attacked((1, 0))), "ssim")
    assert numbers(one) == (0.0, 0.0, 0.0)
    assert one.n == (12,)


def test_other_images_are_said_and_compared_by_welch():
    one = only(compare(attacked((0, 1)), attacked((2, 3), shift=0.1)), "ssim")
    samples = [np.ravel([draws(s, 0.1) for s in (2, 3)]), np.ravel([draws(s) for s in (0, 1)])]
    low, high = reference.ttest_ind(*samples, equal_var=False).confidence_interval(0.95)
    assert numbers(one) == pytest.approx((samples[0].mean() - samples[1].mean(), low, high), rel=1e-9)
    assert (one.method, one.n, one.note) == ("Welch", (12, 12), "not paired: the images differ")


def test_of_images_that_are_shared_in_part_only_those_are_compared():
    one = only(compare(attacked((0, 1)), attacked((1, 2), shift=0.1)), "ssim")
    pairs = np.array(draws(1, 0.1)) - np.array(draws(1))
    assert one.difference == pytest.approx(pairs.mean(), rel=1e-9)
    assert (one.n, one.note) == ((6,), "only the 6 of 12 images that are in both runs")


def test_an_image_that_every_seed_attacks_is_one_image():
    same = Pictures(np.zeros((6, 1, 4, 4, 1), np.float32), np.zeros((6, 1, 4, 4, 1), np.float32))
    one = only(compare(*(attacked(pictures=lambda cell: same, shift=shift) for shift in (0.0, 0.1))), "ssim")
    first, second = (np.mean([draws(s, shift) for s in (0, 1)], axis=0) for shift in (0.0, 0.1))
    low, high = reference.ttest_1samp(second - first, 0.0).confidence_interval(0.95)
    assert numbers(one) == pytest.approx((np.mean(second - first), low, high), rel=1e-9)
    assert one.n == (6,)


def test_values_that_do_not_divide_into_sets_are_paired_only_for_the_same_images():
    run = measured(attacked())
    (one,) = (measure for measure in run.measures if measure.metric == "ssim")
    first, same, other = (
        dataclasses.replace(run, measures=(dataclasses.replace(one, values=one.values[:-1], items=items),))
        for items in (("a", "b"), ("a", "b"), ("a", "c"))
    )
    assert [row.method for row in rows(first, same)] == ["pairs"]
    assert [row.method for row in rows(first, other)] == ["Welch"]


def test_images_of_one_batch_are_not_taken_for_independent():
    cells = double.grid([GAUSSIAN], [(double.MATCHING, Target("probe", 0, count=6, batch=2), "server")])
    run = double.make_run(cells, make=ssim({0: draws(0), 1: draws(1)}))
    assert "too narrow" in only(compare(run, run), "ssim").note


def test_a_case_that_failed_in_one_run_has_no_difference():
    one = only(compare(attacked(), attacked(failed=lambda cell: cell.training.seed == 1)), "ssim")
    assert numbers(one) == (None, None, None)
    assert one.note == "second: a cell failed: RuntimeError: out of memory"
    assert (one.before.value is None, one.after.value is None) == (False, False)


def test_what_only_one_run_has_is_named_with_its_value():
    open_ = double.make_run(double.grid([double.NONE, GAUSSIAN], IMAGES))
    found = compare(open_, double.make_run(double.grid([GAUSSIAN, double.SQSGD], IMAGES)))
    first, second = lone(found.rows)
    assert [found.names[one.key] for one in first] == [
        "no defense under matching, server, probe, round 0: ssim",
        "no defense: accuracy",
        "no defense: bits",
    ]
    assert second[2].after.value == pytest.approx(2.1)
    assert {found.names[one.key].split(" ")[0].split(":")[0] for one in found.differences} == {"gaussian"}
    assert found.remarks[0].startswith("study_hash: ")


def membership(shift, *, count=300, members=None, seeds=(0, 1)):
    """A run whose members' scores are higher by about `shift`."""
    target = Target("members", count=count)
    run = double.make_run(double.grid([GAUSSIAN], [(double.THRESHOLD, target, "server")], seeds))

    def scores(identity):
        found = double.scores_of(next(cell for cell in run.cells if cell.id == identity))
        noise = np.array([shift * (1 + double.wave(identity, at)) for at in range(count)])
        return Scores((found.members + noise)[:members], found.outside)

    return dataclasses.replace(run, scores=scores)


def placed(run):
    """By cell, the share of others below each member and of members above each other."""
    scores = [run.scores(cell.id) for cell in run.cells]
    above = [one.members[:, None] > one.outside for one in scores]
    return [(one.mean(axis=1), one.mean(axis=0)) for one in above]


def sides(run):
    """By cell, the placements of members and of others."""
    return [placements(run.scores(cell.id)) for cell in run.cells]


def test_auc_has_the_interval_of_delong_over_the_seeds():
    runs = membership(0.0), membership(0.1)
    one = only(compare(*runs), "auc")
    means, variances = [], []
    for before, now in zip(*map(placed, runs), strict=True):
        member, other = now[0] - before[0], now[1] - before[1]
        means.append(member.mean())
        variances.append(member.var(ddof=1) / len(member) + other.var(ddof=1) / len(other))
    half = 1.96 * np.sqrt(np.sum(variances)) / 2
    assert numbers(one) == pytest.approx((np.mean(means), np.mean(means) - half, np.mean(means) + half), rel=5e-3)
    assert (one.method, one.n, one.differs) == ("DeLong", (1200,), True)


def test_auc_over_other_records_has_the_interval_of_two_independent_curves():
    first, second = membership(0.0), membership(0.1, seeds=(2, 3))
    one = only(compare(first, second), "auc")
    halves = [side.var(ddof=1) / 300 for sides in placed(first) + placed(second) for side in sides]
    assert (one.interval[1] - one.interval[0]) / 2 == pytest.approx(1.96 * np.sqrt(np.sum(halves)) / 2, rel=0.1)
    assert (one.method, one.note) == ("DeLong", "the seeds differ, so the records differ")


def test_a_rate_has_the_interval_of_paired_rates_as_in_the_gate():
    runs = [membership(shift, count=1000) for shift in (0.0, 0.1)]
    one = only(compare(*runs), "tpr@1%")
    rises = [caught(before, now, 0.01) for before, now in zip(*map(sides, runs), strict=True)]
    half = 1.96 * np.sqrt(sum(rise.error**2 for rise in rises)) / 2
    assert one.difference == pytest.approx(np.mean([rise.mean for rise in rises]))
    assert one.interval == pytest.approx((one.difference - half, one.difference + half), rel=0.05, abs=1e-9)
    assert (one.method, one.n) == ("paired rates", (2000,))
    assert one.interval[0] < one.difference < one.interval[1]


def test_a_rate_of_other_records_has_no_pairs():
    one = only(compare(membership(0.0, count=1000), membership(0.1, count=1000, members=900)), "tpr@1%")
    assert (one.method, one.interval) == ("none", (None, None))


def test_accuracy_is_paired_over_the_same_seeds():
    found = compare(trained({0: 0.80, 1: 0.82, 2: 0.84}), trained({0: 0.79, 1: 0.80, 2: 0.85}))
    low, high = reference.ttest_1samp([-0.01, -0.02, 0.01], 0.0).confidence_interval(0.95)
    assert numbers(only(found, "accuracy")) == pytest.approx((-0.02 / 3, low, high), rel=1e-9)
    assert only(found, "accuracy").n == (3,)


def test_accuracy_over_other_seeds_is_not_paired():
    found = compare(trained({0: 0.80, 1: 0.82}), trained({2: 0.79, 3: 0.80, 4: 0.85}))
    one = only(found, "accuracy")
    assert (one.method, one.n, one.note) == ("Welch", (2, 3), "not paired: the seeds differ")
    assert found.remarks[0] == "the seeds differ"


@by_rows(
    (
        lambda: (attacked(), attacked(shift=0.1, pictures=lambda cell: None)),
        *("ssim", "Welch", "not paired: the images are not stored"),
    ),
    (lambda: (membership(0.0), membership(0.1, members=290)), "auc", "none", "the numbers of records differ"),
    (lambda: (trained({0: 0.80}), trained({0: 0.79})), "accuracy", "none", "no interval: only one pair"),
)
def test_a_difference_that_is_not_paired_states_why(runs, metric, method, note):
    one = only(compare(*runs()), metric)
    assert (one.method, one.note, one.interval[0] is None) == (method, note, method == "none")
    assert one.difference == pytest.approx(one.after.value - one.before.value)


def test_two_lower_bounds_have_no_interval_of_their_difference():
    cells = double.grid([GAUSSIAN], IMAGES)
    asked = [dataclasses.replace(cell, training=dataclasses.replace(cell.training, audit=100)) for cell in cells]
    run = double.make_run(asked)
    audit = double.audit(2.0, 4.0, 1.5, "record")
    trainings = {key: dataclasses.replace(record, audited=audit) for key, record in run.trainings.items()}
    run = dataclasses.replace(run, trainings=trainings)
    one = only(compare(run, run), "epsilon")
    assert numbers(one) == (0.0, None, None)
    assert "lower bounds" in one.note


def test_samples_without_spread_have_an_interval_of_width_zero():
    found = compare(trained({0: 0.5, 1: 0.5}), trained({2: 0.75, 3: 0.75}))
    assert numbers(only(found, "accuracy")) == (0.25, 0.25, 0.25)


def test_a_lone_value_of_another_seed_has_no_interval():
    found = compare(trained({0: 0.5}), trained({2: 0.75, 3: 0.25}))
    assert only(found, "accuracy").note == "not paired: the seeds differ; no interval: only one value"


def test_what_differs_as_a_whole_is_said():
    run = attacked()

    def moved(result):
        packages = result.environment.packages | {"torch": "2.14.0"}
        other = dataclasses.replace(result.environment, packages=packages, machine="Linux arm64", dirty=True)
        return dataclasses.replace(result, environment=other)

    later = dataclasses.replace(run, results={key: moved(result) for key, result in run.results.items()})
    later = dataclasses.replace(later, trainings={}, study_hash="e" * 16, data_hashes={"invented": "f" * 16})
    remarks = " ".join(compare(run, later).remarks)
    for part in ("study_hash: ", "data, invented: ", "torch: 2.13.0 -> 2.14.0", "arm64", "second run's code had"):
        assert part in remarks


def test_the_terminal_and_markdown_say_the_same_numbers():
    found = compare(attacked(), attacked(shift=0.1))
    one = only(found, "ssim")
    for text in (plain(found), to_markdown([found])):
        assert "{:+.3f} ({:+.3f} to {:+.3f})".format(*numbers(one)) in text
        assert "never fails the build" in " ".join(text.split())
    assert f"**{one.difference:+.3f}" in to_markdown([found])
    assert "**0.000" not in to_markdown([compare(attacked(), attacked())])


def test_markdown_survives_hostile_names():
    odd = PartSpec("a|b<script>", {"x": "*y*\n|z", "w": 1})
    cells = double.grid([odd, PartSpec("a|b<script>", {"x": "2", "w": 1})], IMAGES)
    run = double.make_run(cells)
    lines = [line for line in to_markdown([compare(run, run)]).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 6
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 7 for line in lines)
    assert "<script>" not in "".join(lines)


def test_more_than_two_runs_are_each_compared_with_the_first_in_one_table():
    first, second, third = attacked(), attacked(shift=0.1), attacked((2, 3), shift=0.2)
    found = compare_all(first, second, third)
    for one, other in zip(found, (second, third), strict=True):
        alone = compare(first, other)
        assert [numbers(each) for each in one.differences] == [numbers(each) for each in alone.differences]
        assert [each.method for each in one.differences] == [each.method for each in alone.differences]
    rows = [line.strip("| ").split(" | ") for line in to_markdown(found).splitlines() if line.startswith("|")]
    names = ("First", "Second", "Second − first (95 %)", "Third", "Third − first (95 %)")
    assert rows[0] == ["Measure", *names, "n", "How"]
    moved = [only(one, "ssim") for one in found]
    assert [row[2] for row in rows if "ssim" in row[0]] == [f"{moved[0].after.value:.3f}"]
    assert [row[5].strip("*")[:6] for row in rows if "ssim" in row[0]] == [f"{moved[1].difference:+.3f}"]
    assert rows[2][6:] == ["second: 12; third: 12 and 12", f"second: pairs; third: Welch; {moved[1].note}"]
    assert "first and third: the seeds differ" in plain(*found)
    assert [len(one["differences"]) for one in json.loads(to_json(*found))["comparisons"]] == [3, 3]


def test_what_some_of_several_runs_lack_is_said():
    other = double.make_run(double.grid([double.SQSGD], IMAGES))
    text = to_markdown(compare_all(attacked(), other, attacked()))
    rows = [line for line in text.splitlines() if line.startswith(("| gaussian", "| sqsgd"))]
    assert [row.rpartition("only in the ")[2].strip(" |") for row in rows] == 3 * ["first and third"] + 3 * ["second"]


@pytest.mark.parametrize("count", [0, 1, 11])
def test_two_to_ten_runs_are_compared(count):
    with pytest.raises(ValueError, match=f"^expected 2 to 10 runs to compare, got {count}$"):
        compare_all(*[attacked((0,))] * count)


def test_json_is_whole_and_in_a_fixed_order():
    runs = attacked(), trained({0: 0.8, 1: 0.9}, double.SQSGD)
    text = to_json(compare(*runs))
    said = json.loads(text)
    assert list(said) == [
        "schema",
        "first",
        "second",
        "level",
        "computed",
        "remarks",
        "differences",
        "only_first",
        "only_second",
    ]
    assert [lone["name"] for lone in said["only_second"]][1:] == ["sqsgd: accuracy", "sqsgd: bits"]
    one = json.loads(to_json(compare(runs[0], runs[0])))["differences"][0]
    assert (one["method"], one["n"], one["differs"]) == ("pairs", [12], False)
    assert text == to_json(compare(*runs))


@pytest.fixture
def folder(tmp_path):
    return on_disk(attacked((0,)), tmp_path / "run")


@pytest.fixture
def app():
    made = typer.Typer()
    made.command()(command)
    return made


def test_the_command_prints_each_format(folder, app):
    shown = {kind: CliRunner().invoke(app, [str(folder), str(folder), "--format", kind]) for kind in ("md", "json")}
    assert [done.exit_code for done in shown.values()] == [0, 0]
    assert shown["md"].stdout.startswith("### invented-study at 4f0c2d7a4f")
    assert json.loads(shown["json"].stdout)["differences"][0]["method"] == "pairs"
    assert "3 measures in both" in " ".join(CliRunner().invoke(app, [str(folder), str(folder)]).stdout.split())


def test_the_command_compares_three_folders(folder, app):
    done = CliRunner().invoke(app, [str(folder)] * 3)
    assert done.exit_code == 0
    assert "3 measures in all" in " ".join(done.stdout.split())
    many = CliRunner().invoke(app, [str(folder)] * 11)
    assert (many.exit_code, many.stderr) == (2, "leakgauge: expected 2 to 10 runs to compare, got 11\n")


def test_a_folder_without_results_is_a_wrong_call(folder, app, tmp_path):
    done = CliRunner().invoke(app, [str(folder), str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "no results in" in done.stderr
