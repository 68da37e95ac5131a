"""The parts of the report: verdict, leakage, charts, results, limits, and the table in the terminal."""

import base64
import dataclasses
import io
import itertools
import re
import zipfile
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from leakgauge.harness.core.cell import PartSpec, Target
from leakgauge.harness.core.result import Estimate
from leakgauge.harness.core.stats import mean, pool
from leakgauge.reports.charts import figures
from leakgauge.reports.export import rows_as
from leakgauge.reports.html import render
from leakgauge.reports.sections.leakage import leakage
from leakgauge.reports.sections.limits import limits
from leakgauge.reports.sections.tradeoffs import charts
from leakgauge.reports.sections.verdict import verdict
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.notation import fixed, short
from leakgauge.reports.text.tables import plain
from tests import report_fixtures as double
from tests.by_rows import by_rows
from tests.report_page import Page, complete, content, full_source, small, ssim_of, with_ssim

RUN = double.full_run()


@by_rows((0.36, "High", "Leaks"), (0.355, "Moderate", "Leaks in part"), (0.24, "Moderate", "Leaks in part"),
     (0.235, "Low", "Nothing recognizable"))  # fmt: skip
def test_the_word_follows_from_the_way_between_floor_and_ceiling(ssim, word, badge):
    table = {"none": [0.505, 0.495], "gaussian": [ssim, ssim], "prior": [0.21, 0.21]}
    analysis = Analysis(double.make_run(small(), make=ssim_of(table)))
    group = analysis.defended[0]
    assert analysis.rating(group)._replace(place=None) == (word, None, "")
    assert verdict(analysis).badge.words == badge


@by_rows((2, "High", "1 of 1 defense leaks under the attacks that ran"),
     # chance identifies one of sixteen in one study of seven
     (1, "at floor", "Every defended case is close to the floor"))  # fmt: skip
def test_a_few_recognizable_images_are_high_although_the_mean_is_low(seen, word, sentence):
    table = {"none": [0.95] * 15 + [0.9], "gaussian": [0.1] * (16 - seen) + [0.6] * seen, "prior": [0.1] * 15 + [0.11]}
    analysis = Analysis(double.make_run(small(), make=ssim_of(table)))
    group = analysis.defended[0]
    assert analysis.rating(group).word == word
    assert (analysis.rating(group).place or 0.0) < 0.1
    found = verdict(analysis)
    assert found.figures[1][1:3] == (str(seen), "of 16 defended")
    assert found.sentence == sentence


def unidentified(result):
    """The same without an image that is identified or recognizable."""
    return double.with_estimates(result, *result.estimates[:1], *double.of_lineups([0.0] * 4))


def test_no_word_stands_on_an_interval_that_holds_the_floor():
    # the mean is a quarter of the way to the ceiling, but four such images say nothing
    make = ssim_of({"none": [0.9, 0.91, 0.9, 0.92], "gaussian": [-0.2, 0.8, 0.1, 0.6], "prior": [0.1, 0.11, 0.1, 0.11]})
    analysis = Analysis(double.make_run(small(), make=lambda cell: unidentified(make(cell))))
    found = analysis.rating(analysis.defended[0])
    assert (found.word, found.place > 0.1) == ("at floor", True)


def test_a_defense_at_several_settings_is_counted_once():
    table = {"none": [0.9] * 8, "gaussian": [0.8, 0.81] * 4, "prior": [0.1] * 8}
    attacks = [(attack, double.PROBE, "server") for attack in (double.MATCHING, double.PRIOR)]
    cells = double.grid([double.NONE, *double.GAUSSIAN[:2]], attacks, (0,))
    assert verdict(Analysis(double.make_run(cells, make=ssim_of(table)))).sentence.startswith("1 of 1 defense leaks")


def test_an_attack_that_fails_without_a_defense_shows_nothing_about_defenses():
    table = {"none": [0.2, 0.3, 0.25], "gaussian": [0.2, 0.2, 0.2], "prior": [0.25, 0.25, 0.25]}
    made = double.make_run(small(), make=ssim_of(table))
    page = complete(render(made))
    flag = "without a defense, the attack does not beat the floor. These columns show nothing about the defenses:"
    assert f"Warning: {flag} matching, server, probe, round 0" in page.text
    assert "! does not beat the floor" in page.text
    assert "? No verdict" in page.text
    assert any("fails without a defense too" in limit for limit in limits(Analysis(made)))


def test_the_floor_is_the_best_guess_and_the_undefended_one():
    other = PartSpec("prior", {"guess": "other"})
    attacks = [(a, double.PROBE, "server") for a in (double.MATCHING, double.PRIOR, other)]

    def values(cell):
        value = 0.9 if cell.attack == double.MATCHING else 0.3 if cell.attack == other else 0.2
        return [value + 0.05 * (cell.training.defense != double.NONE)] * 3

    analysis = Analysis(double.make_run(small(attacks=attacks), make=with_ssim(values)))
    assert [analysis.floor_value(group) for group in analysis.attacked] == pytest.approx([0.3, 0.3])


def test_seeds_are_pooled_into_one_sample():
    one, two = mean("ssim", [0.1, 0.2, None]), mean("ssim", [0.4, 0.5])
    pooled, direct = pool([one, two]), mean("ssim", [0.1, 0.2, 0.4, 0.5])
    assert (pooled.value, pooled.low, pooled.high, pooled.n) == (direct.value, direct.low, direct.high, 4)
    assert pooled.values == (0.1, 0.2, None, 0.4, 0.5)


def test_numbers_without_items_are_averaged_over_the_seeds():
    aucs = [Estimate("auc", value, 0.4, 0.9, 100, "DeLong", higher_leaks=True) for value in (0.6, 0.7)]
    pooled, direct = pool(aucs), mean("auc", [0.6, 0.7])
    assert (pooled.value, pooled.low, pooled.high) == (direct.value, direct.low, 1.0)
    assert (direct.high or 0.0) > 1.0  # Student's t does not know the range
    assert pooled.method.endswith("over the seeds")
    lost = Estimate("auc", None, None, None, 0, "", higher_leaks=True, note="no score")
    assert pool([aucs[0], lost]).note == "no value in 1 of 2 seeds"


def test_the_four_figures_are_the_numbers_of_the_run():
    worst, images, cost, cells = verdict(Analysis(RUN)).figures
    assert worst[1] == "0.904"
    assert "gaussian epsilon=64" in worst[3]
    assert images[2] == "of 168 defended"  # 7 defenses x 6 images x 2 rounds x 2 seeds
    assert cost[1].startswith("−")
    assert cells[1:3] == ("141", "of 144 cells")
    assert cells[3].startswith("2 failed, 1 missing")


def rows_of(cells, **changes):
    (matrix,) = content(leakage(Analysis(double.make_run(cells, **changes)))).matrices
    return {row.defense.name: row.entries for row in matrix.rows}


def test_a_study_without_a_defense_has_its_ceiling_above_its_floor():
    rows = rows_of(small(double.NONE))
    found = [(name, entry.value, entry.word) for name, (entry,) in rows.items()]
    assert found == [("no defense", "0.925", "leaks"), ("floor", "0.147", "prior")]


@by_rows(
    (small(double.GAUSSIAN[0]), None, "too weak to tell", "no ceiling was measured"),
    (small(), double.PRIOR, "not rated", "no floor was measured"),
)
def test_an_entry_that_cannot_be_rated_names_what_is_lacking(cells, lost, word, why):
    rows = rows_of(cells, failed=lambda cell: cell.attack == lost)
    (entry,) = rows["gaussian"]
    assert (entry.word, entry.tone, entry.notes[:2]) == (word, "none", (why, entry.notes[1]))
    assert entry.notes[1].endswith(" identified (0 % to 46 %)")
    assert rows["floor"][0].value == ("0.147" if lost is None else "n/a")


def test_an_entry_that_was_not_planned_and_a_ceiling_of_other_seeds_have_their_words():
    extra = small(double.NONE, attacks=[(double.MAP, double.PROBE, "server")]), small(double.GAUSSIAN[0], seeds=(1,))
    first, second = rows_of((*small(), *itertools.chain(*extra)))["gaussian"]
    assert (first.notes[-1], second.word) == ("ceiling from other seeds", "not planned")


def test_the_strongest_of_each_kind_is_marked_and_of_equals_each():
    threats = ("server", "eavesdropper")
    attacks = [(a, double.PROBE, t) for a in (double.MATCHING, double.MAP, double.PRIOR) for t in threats]
    attacks += [(double.THRESHOLD, Target("members", count=200), "public")]

    def values(cell):
        first = cell.threat == "server" and cell.training.seed == 0
        return [0.2 + 0.2 * (cell.attack == double.MAP) + 0.1 * first] * 2

    for seed, ties in ((0, False), (1, True)):
        rows = rows_of(small(attacks=attacks, seeds=(seed,)), make=with_ssim(values))
        assert [entry.strongest for entry in rows["gaussian"]] == [False, False, True, ties, False]


def test_charts_of_one_point_are_not_drawn():
    analysis = Analysis(double.make_run(small(double.NONE, double.GAUSSIAN[0])))
    titles = [chart.title for chart in charts(analysis, next(iter(analysis.settings)))]
    assert titles == ["Accuracy against leakage", "Test accuracy over the rounds", "Test loss over the rounds"]


def a_chart(**changes):
    points = (figures.Point(1.0, 0.2, 0.1, 0.3), figures.Point(8.0, 0.6))
    chart = figures.Chart("a", "A title", "x", "y", (figures.Series("one & only", points, 0),), "B.", "C.", ("h",), ())
    return dataclasses.replace(chart, **changes)


@pytest.mark.parametrize("log", [True, False])
def test_a_chart_has_no_inline_style_and_a_tooltip_for_each_marker(log):
    drawn = figures.svg(a_chart(log_x=log, lines=((0.5, "limit"),), x_label="数据 $x_1$ 🙂"), prefix="p-")
    assert not re.search("style|http", drawn)
    assert "数据" in drawn  # a name without a glyph does not stop a chart
    assert drawn.count("<title>one &amp; only: ") == 2
    assert 'class="k-s1"' in drawn
    assert not re.findall(r'(?:fill|stroke)="#0000', drawn)
    assert 'role="img" aria-label="A title. C. B.' in drawn
    ids = set(re.findall(r' id="([^"]+)"', drawn))
    assert all(name.startswith("p-") for name in ids)
    assert set(re.findall(r'href="#([^"]+)"', drawn)) | set(re.findall(r"url\(#([^)]+)\)", drawn)) <= ids


@pytest.mark.parametrize("log", [True, False])
def test_no_number_stands_beyond_infinity_and_no_name_on_it(log):
    axes = Figure().subplots()
    figures.fill(axes, a_chart(log_x=log, infinity=20.0, lines=((0.5, "limit"),)))
    low, _ = axes.get_xlim()
    assert len(axes.get_xticks()) > 1
    assert all(low <= tick < 20.0 for tick in axes.get_xticks())
    assert [text.get_ha() for text in axes.texts if text.get_text() == "limit"] == ["left"]


def test_style_declarations_become_attributes():
    drawn = figures.svg(a_chart(title="<l>"), prefix="p-")
    root = ElementTree.fromstring(drawn)
    assert {"width", "height", "version"}.isdisjoint(root.attrib)
    assert root.attrib["viewBox"].startswith("0 0 ")
    assert "style" not in {name for element in root.iter() for name in element.attrib}
    assert all(text.get("font-size") for text in root.iter("text"))
    assert 'class="f-s1 ' in drawn
    assert 'aria-label="&lt;l&gt;. ' in drawn


def test_the_table_and_its_download_hold_every_cell_without_a_script():
    page = Page(full_source())
    shown = [attributes for attributes in page.all("tr") if "data-status" in attributes]
    assert len(shown) == len(RUN.cells)
    assert not any("hidden" in attributes for attributes in shown)
    assert all(text in page.text for text in ("RuntimeError: out of memory", "few-images"))
    link = next(a for a in page.all("a") if "download" in a)
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(link["href"].split(",", 1)[1]))) as file:
        assert file.read("results.csv") == rows_as("csv", RUN)


def test_limits_name_the_attacks_that_know_the_defense():
    text = " ".join(limits(Analysis(RUN)))
    assert "map uses knowledge of the defense; matching and threshold ignore the defense" in text
    naive = " ".join(limits(Analysis(double.make_run(small()))))
    assert "matching ignores the defense, so each number is a lower bound" in naive
    assert "There is one seed" in naive


def test_the_terminal_table_fits_a_hundred_columns_and_has_a_row_per_group():
    assert max(map(len, plain(RUN).splitlines())) <= 100
    assert summary(RUN).row_count == len(Analysis(RUN).attacked)


@pytest.mark.parametrize("cells", [(), small(), small(double.GAUSSIAN[0])], ids=["none", "two", "one"])
def test_the_terminal_table_of_small_runs(cells):
    assert "nan" not in plain(double.make_run(cells, failed=lambda cell: cell.training.defense != double.NONE)).lower()


def test_numbers_are_written_with_a_real_minus_and_without_minus_zero():
    assert [fixed(-0.0001), fixed(-0.5), fixed(None), short(1e-5), short(-2.5e-7), short(57934.2), short(1e300)] == [
        "0.000", "−0.500", "n/a", "1e−5", "−2.5e−7", "57\u00a0930", "1e300",
    ]  # fmt: skip
