"""Figures that a study asks for: what is drawn, what is averaged, and what is refused."""

import math

import pytest

from leakgauge.harness.query.lines import Best, Figure, draw
from leakgauge.harness.query.points import Value, flat, select
from leakgauge.reports.sections.asked import chart_of


def value(number, quantity="loss", **at):
    return Value(quantity, number, flat({key.replace("_", "."): one for key, one in at.items()}))


SWEPT = [
    value(number + seed / 10, defense=name, federation_rounds=rounds, seed=seed)
    for name, course in (("a", {5: 3.0, 10: 1.0, 20: 2.0}), ("b", {5: 3.0, 10: 2.0, 20: 1.5}))
    for rounds, number in course.items()
    for seed in (0, 1)
]


def test_a_line_for_each_series_with_means_and_intervals_over_the_seeds():
    (panel,) = draw(Figure("t", "loss", "federation.rounds"), SWEPT)
    assert [line.label for line in panel.lines] == ["a", "b"]
    assert [(spot.x, round(spot.y, 6), spot.n) for spot in panel.lines[0].spots] == [
        (5, 3.05, 2),
        (10, 1.05, 2),
        (20, 2.05, 2),
    ]
    spot = panel.lines[0].spots[0]
    assert (spot.low + spot.high) / 2 == pytest.approx(spot.y)
    assert spot.high - spot.low == pytest.approx(2 * 12.706 * 0.05, rel=1e-3)  # Student's t of two values


def test_the_best_along_a_path_is_where_the_mean_is_least():
    where = Figure("t", "loss", "defense", ("task.model",), best=Best("federation.rounds", show="where"))
    (panel,) = draw(where, SWEPT)
    assert panel.names == ("a", "b")
    assert [spot.y for spot in panel.lines[0].spots] == [10, 20]
    (panel,) = draw(Figure("t", "loss", "defense", (), best=Best("federation.rounds", "max", "value")), SWEPT)
    assert [round(spot.y, 6) for spot in panel.lines[0].spots] == [3.05, 3.05]


def test_a_quantity_of_the_same_training_may_be_x_and_may_be_infinite():
    found = [
        value(0.9, "accuracy", defense_name="a", seed=0),
        value(0.8, "accuracy", defense_name="b", seed=0),
        value(4.0, "proved_epsilon", defense_name="a", seed=0, horizon="run"),
        value(1.0, "proved_epsilon", defense_name="a", seed=0, horizon="round"),
        value(math.inf, "proved_epsilon", defense_name="b", seed=0, horizon="run"),
    ]
    (panel,) = draw(Figure("t", "accuracy", "proved_epsilon", x_where={"horizon": "run"}), found)
    assert [(line.label, [spot[:2] for spot in line.spots], line.level) for line in panel.lines] == [
        ("a", [(4.0, 0.9)], None),
        ("b", [(math.inf, 0.8)], None),
    ]
    with pytest.raises(ValueError, match="mixes values of horizon"):
        draw(Figure("t", "accuracy", "proved_epsilon"), found)


def test_settings_with_the_same_measured_x_are_not_averaged():
    settings = [{"defense_name": "a", "defense_epsilon": one, "seed": seed} for one in (1, 2) for seed in (0, 1)]
    found = [value(one["defense_epsilon"] + one["seed"] / 10, "accuracy", **one) for one in settings]
    found += [value(math.inf, "proved_epsilon", **one) for one in settings]
    (panel,) = draw(Figure("t", "accuracy", "proved_epsilon"), found)
    spots = [(spot.x, round(spot.y, 6), spot.n) for spot in panel.lines[0].spots]
    assert spots == [(math.inf, 1.05, 2), (math.inf, 2.05, 2)]
    chart = chart_of(Figure("t", "accuracy", "proved_epsilon", log_x=True), panel, "c")
    assert chart.infinity is not None
    assert (chart.x_label, chart.y_label) == ("proved epsilon", "accuracy")


def test_a_value_without_the_path_of_x_is_a_level():
    found = [*SWEPT, value(0.5, defense="none", seed=0)]
    (panel,) = draw(Figure("t", "loss", "federation.rounds"), found)
    assert [(line.label, line.level) for line in panel.lines] == [("a", None), ("b", None), ("no defense", 0.5)]


def test_panels_split_and_filters_choose():
    (one, two) = draw(Figure("t", "loss", "federation.rounds", panel=("defense",)), SWEPT)
    assert (one.title, two.title) == ("a", "b")
    (panel,) = draw(Figure("t", "loss", "federation.rounds", where={"defense.name": ["b"]}), SWEPT)
    assert [line.label for line in panel.lines] == ["b"]
    assert len(select(SWEPT, "loss", {"defense": {"name": "a"}, "federation": {"rounds": [5, 10]}})) == 4


def test_a_figure_that_mixes_questions_is_refused_unless_it_averages_over_them():
    with pytest.raises(ValueError, match=r"mixes values of defense.name \('a', 'b'\): name it in series"):
        draw(Figure("t", "loss", "federation.rounds", series=()), SWEPT)
    (panel,) = draw(Figure("t", "loss", "federation.rounds", series=(), over=("defense",)), SWEPT)
    assert panel.lines[0].spots[0].n == 4
