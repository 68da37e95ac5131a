"""The section that compares defenses: accuracy, leakage, bits, proved epsilon, and who is dominated."""

import dataclasses

import pytest

from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.stats import clopper_pearson
from leakgauge.reports.html import render
from leakgauge.reports.sections.frontier import Standing, dominates, frontier, standings
from leakgauge.reports.select import Analysis
from tests import report_fixtures as double
from tests.report_page import complete, small, ssim_of

GOOD, BAD = PartSpec("laplace", {"scale": 0.5}), PartSpec("sqsgd", {"epsilon": 4.0})
TABLE = {"none": [0.9] * 8, "laplace": [0.9] * 2 + [0.1] * 6, "sqsgd": [0.9] * 6 + [0.1] * 2, "prior": [0.1] * 8}


def analysis():
    return Analysis(double.make_run(small(double.NONE, GOOD, BAD), make=ssim_of(TABLE)))


def standing(**changes):
    base = standings(analysis(), next(iter(analysis().settings)))[1]
    return base._replace(
        **{"accuracy": 0.9, "low": 0.88, "high": 0.92, "place": 0.5, "least": 0.4, "most": 0.6, "bits": 8.0} | changes
    )


def test_each_defense_stands_with_its_best_attack():
    none, good, bad = standings(analysis(), next(iter(analysis().settings)))
    assert (none.place, none.worst.text) == (1.0, "8 of 8 people identified among 100")
    assert [good.place, bad.place] == pytest.approx([(0.25 - 0.01) / 0.99, (0.75 - 0.01) / 0.99])
    assert (none.bits, bad.bits) == (32.0, 2.1)
    assert good.claim.proved.unit == "coordinate"
    assert 0 < good.least < good.place < good.most < bad.place


def test_what_is_below_chance_leaks_nothing():
    table = TABLE | {"laplace": [0.1] * 8}
    found = Analysis(double.make_run(small(double.NONE, GOOD), make=ssim_of(table)))
    _, below = standings(found, next(iter(found.settings)))
    assert (below.place, below.least) == (0, 0)
    assert 0 < below.most == pytest.approx((clopper_pearson(0, 8).high - 0.01) / 0.99)


def test_domination_is_no_worse_in_all_and_better_beyond_doubt_in_one():
    one = standing()
    assert not dominates(one, one)
    assert dominates(standing(bits=4.0), one)
    assert dominates(standing(place=0.3, least=0.2, most=0.39), one)
    assert not dominates(standing(place=0.3, least=0.2, most=0.41), one)
    assert dominates(standing(accuracy=0.97, low=0.95, high=0.99), one)
    assert not dominates(standing(accuracy=0.91, low=0.89, high=0.93), one)
    assert not dominates(standing(bits=4.0, place=0.6), one)
    assert not dominates(standing(place=0.1, accuracy=0.89), one)
    assert isinstance(one, Standing)


def test_the_table_names_who_is_dominated_and_the_goals():
    run = double.make_run(small(double.NONE, GOOD, BAD), make=ssim_of(TABLE))
    run = dataclasses.replace(run, study=run.study | {"goals": ["laplace, accuracy loss 0.02: out of reach <b>"]})
    (table,) = frontier(Analysis(run))["tables"]
    rows = {row[0]: row[1:] for row in table.rows}
    # sqsgd sends 2.1 bits with a higher accuracy than laplace, but leaks more
    assert [rows[name][-1] for name in ("laplace", "sqsgd")] == ["– on the frontier"] * 2
    equal = Analysis(double.make_run(small(GOOD, BAD), make=ssim_of(TABLE | {"sqsgd": TABLE["laplace"]})))
    assert {row[0]: row[-1] for row in frontier(equal)["tables"][0].rows}["laplace"] == "sqsgd"
    assert (rows["no defense"][1].text, rows["no defense"][4].text) == ("100 %", "n/a")
    assert rows["laplace"][2] == "2 of 8 people identified among 100"
    assert rows["laplace"][4].below == ("per coordinate, whole run, δ 0",)
    page = complete(render(run))
    for words in ("Choosing a defense", "out of reach <b>", "– on the frontier", "Goals of this study"):
        assert words in page.text


def test_one_defense_is_no_frontier():
    assert frontier(Analysis(double.make_run(small(double.NONE)))) is None
