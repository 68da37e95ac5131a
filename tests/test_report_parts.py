"""The parts of the report: answer, attacks, charts, results, limits, and the table in the terminal."""

import base64
import dataclasses
import io
import itertools
import re
import zipfile
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from leakgauge.harness.core.cell import FederationSpec, PartSpec, Target
from leakgauge.harness.core.result import Estimate
from leakgauge.harness.core.stats import mean, pool
from leakgauge.reports.charts import figures
from leakgauge.reports.export import rows_as
from leakgauge.reports.html import render
from leakgauge.reports.sections.answer import headline
from leakgauge.reports.sections.attacks import attacks, matrices
from leakgauge.reports.sections.limits import limits
from leakgauge.reports.sections.ratings import found, ratings
from leakgauge.reports.sections.tradeoffs import charts
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.notation import fixed, short
from tests import report_fixtures as double
from tests.by_rows import by_rows
from tests.report_page import Page, complete, content, full_source, small, ssim_of, with_ssim
from tests.terminal_text import plain

RUN = double.full_run()


@by_rows((2, "1 of 1 defense leaks"),
     # chance identifies one of sixteen in one study of seven
     (1, "The test of gaussian is too weak to tell"))  # fmt: skip
def test_a_few_identified_images_count_although_the_mean_is_low(seen, sentence):
    table = {"none": [0.95] * 15 + [0.9], "gaussian": [0.1] * (16 - seen) + [0.6] * seen, "prior": [0.1] * 15 + [0.11]}
    analysis = Analysis(double.make_run(small(), make=ssim_of(table)))
    assert headline(analysis)[0] == sentence
    bare, row = content(attacks(analysis)).matrices[0].rows
    assert [cell.text for cell in (*bare.cells, *row.cells)] == ["16/16", f"{seen}/16"]
    assert any(f"{seen}/16 recognizable" in line for line in row.cells[0].lines)


def test_a_defense_in_several_settings_is_counted_once_by_the_worst():
    table = {"none": [0.9] * 8, "gaussian": [0.8, 0.81] * 4, "prior": [0.1] * 8}
    attacks = [(attack, double.PROBE, "server") for attack in (double.MATCHING, double.PRIOR)]
    cells = double.grid([double.NONE, *double.GAUSSIAN[:2]], attacks, (0,))
    more = double.grid(double.GAUSSIAN[:1], attacks, (0,), federation=FederationSpec(clients=3, rounds=2))
    make = ssim_of(table)

    def made(cell):
        return make(cell) if cell.training.federation.clients > 3 else double.with_estimates(make(cell))

    assert headline(Analysis(double.make_run([*cells, *more], make=made)))[0] == "2 of 2 defenses leak"


def test_an_attack_that_fails_without_a_defense_shows_nothing_about_defenses():
    table = {"none": [0.2, 0.25, 0.25], "gaussian": [0.2, 0.2, 0.2], "prior": [0.25, 0.25, 0.25]}
    made = double.make_run(small(), make=ssim_of(table))
    page = complete(render(made))
    assert "finds nothing without a defense" in page.text
    assert "nothing even without a defense" in page.text
    assert "The test of gaussian is too weak to tell" in page.text
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


def rows_of(cells, **changes):
    """The small cells of each defense on the page, by its name."""
    (matrix,) = content(attacks(Analysis(double.make_run(cells, **changes)))).matrices
    return {row.defense.name: row.cells for row in matrix.rows}


def test_a_cell_has_value_interval_and_floor_and_the_file_a_row_for_the_floor():
    (cell,) = rows_of(small(double.NONE))["no defense"]
    assert (cell.state, cell.text) == ("leaks", "6/6")
    assert cell.lines == [
        "probe, round 0; mean SSIM 0.925 0.872 to 0.979; floor 0.147; leaks; "
        "6 of 6 people identified among 100 (54 % to 100 %); 6/6 recognizable"
    ]
    (table,) = matrices(Analysis(double.make_run(small(double.NONE))))
    assert [(row[0].text, row[1].text) for row in table.cells] == [("no defense", "0.925"), ("floor", "0.147")]


def test_an_entry_that_was_not_planned_and_a_ceiling_of_other_seeds_have_their_words():
    extra = small(double.NONE, attacks=[(double.MAP, double.PROBE, "server")]), small(double.GAUSSIAN[0], seeds=(1,))
    first, second = rows_of((*small(), *itertools.chain(*extra)))["gaussian"]
    assert first.lines[0].endswith("ceiling from other seeds")
    assert (second.state, second.text, second.lines) == ("none", "–", ["not planned"])


def test_a_cell_of_several_targets_shows_the_one_that_found_most_and_a_line_for_each():
    questions = [(double.MATCHING, Target("probe", at, 6), "server") for at in (0, 4)]
    make = with_ssim(lambda cell: [0.1 + 0.8 * (cell.target.round == 4)] * 6)
    (cell,) = rows_of(small(attacks=questions), make=make)["gaussian"]
    assert (cell.state, cell.text) == ("leaks", "6/6")
    assert [line.split(";")[0] for line in cell.lines] == ["probe, round 0", "probe, round 4"]
    assert "nothing even without a defense" in cell.lines[0]


def test_cells_that_failed_or_are_missing_are_named_in_their_place():
    cells = small(seeds=(0, 1, 2))
    lost = [cell for cell in cells if (cell.training.defense, cell.attack) == (double.GAUSSIAN[0], double.MATCHING)]
    (cell,) = rows_of(cells, failed=lambda c: c == lost[0], missing=lambda c: c == lost[1])["gaussian"]
    assert "1 seed failed; 1 seed missing" in cell.lines[0]
    (cell,) = rows_of(cells, failed=lambda c: c.training.defense != double.NONE)["gaussian"]
    assert (cell.state, cell.text) == ("weak", "failed")
    assert cell.lines[0].endswith("out of memory")


def test_charts_of_one_point_are_not_drawn():
    analysis = Analysis(double.make_run(small(double.NONE, double.GAUSSIAN[0])))
    titles = [chart.title for chart in charts(analysis, next(iter(analysis.settings)))]
    assert titles == ["Test accuracy over the rounds", "Test loss over the rounds"]


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


def test_the_page_and_its_download_hold_every_cell_and_without_a_script_the_first_hundred_are_seen():
    page = Page(full_source())
    shown = [attributes for attributes in page.all("tr") if "data-status" in attributes]
    assert len(shown) == 100
    assert not any("hidden" in attributes for attributes in shown)
    assert "Without a script, the first 100 cells are shown." in page.text
    assert "Without a script" not in render(double.make_run(small()))
    rest = re.search(r'<div id="rest"[^>]*>(.*?)</div>', full_source(), re.S)[1].splitlines()
    assert len(shown) + len(rest) == len(RUN.cells)
    assert {line.split("¦")[0] for line in rest} == {"done", "failed"}
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


def test_the_terminal_table_fits_a_hundred_columns_and_has_a_row_per_rating_and_on_request_per_attack():
    analysis, details = Analysis(RUN), plain(RUN, details=True)
    assert max(map(len, details.splitlines())) <= 100
    assert [len(table.rows) for table in ratings(analysis)] == [len(analysis.ratings.all)] == [8 * 3]
    assert [len(table.rows) for table in found(analysis)] == [len(analysis.attacked)]
    assert "What each attack found" in details
    assert "What each attack found" not in plain(RUN)


@pytest.mark.parametrize("cells", [(), small(), small(double.GAUSSIAN[0])], ids=["none", "two", "one"])
def test_the_terminal_table_of_small_runs(cells):
    assert "nan" not in plain(double.make_run(cells, failed=lambda cell: cell.training.defense != double.NONE)).lower()


def test_numbers_are_written_with_a_real_minus_and_without_minus_zero():
    assert [fixed(-0.0001), fixed(-0.5), fixed(None), short(1e-5), short(-2.5e-7), short(57934.2), short(1e300)] == [
        "0.000", "−0.500", "n/a", "1e−5", "−2.5e−7", "57\u00a0930", "1e300",
    ]  # fmt: skip
