"""The report's grid of pictures: naive and aware attacks, withheld pictures, the size of the page."""

import base64
import dataclasses
import re

import numpy as np
import pytest

from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.result import Pictures
from leakgauge.reports.html import render
from leakgauge.reports.sections.pictures import MOST_DEFENSES, gallery
from leakgauge.reports.select import Analysis
from tests import report_fixtures as double
from tests.report_page import Page, complete, content, small, ssim_of, with_ssim

NAIVE, AWARE, FLOOR = ((part, double.PROBE, "server") for part in (double.MATCHING, double.MAP, double.PRIOR))
BOTH = [NAIVE, AWARE, FLOOR]
OTHER = PartSpec("matching", {"objective": "cosine", "restarts": 2})


def shown(cells, **changes):
    return content(gallery(Analysis(double.make_run(cells, **changes))))


def only_grid(cells, **changes):
    (grid,) = shown(cells, **changes).grids
    return grid


def heads(grid):
    return [(head.defense.name, [(column.word, column.attack) for column in head.columns]) for head in grid.heads]


def test_a_defense_has_a_column_of_the_best_naive_and_one_of_the_best_aware_attack():
    attacks = [*BOTH, (OTHER, double.PROBE, "server")]
    values = {OTHER.key: 0.4, double.MATCHING.key: 0.3, double.MAP.key: 0.6, double.PRIOR.key: 0.1}
    grid = only_grid(small(attacks=attacks), make=with_ssim(lambda cell: [values[cell.attack.key]] * 6))
    assert heads(grid) == [
        ("no defense", [("", "map, server")]),
        ("gaussian", [("naive", "matching objective=cosine, server"), ("aware", "map, server")]),
        ("floor", [("", "prior, server")]),
    ]
    captions = [[tile.caption for tile in row] for _, row in grid.rows]
    assert captions == [["", "0.60", "0.40", "0.60", "0.10"]] * 6
    assert [tile.recognizable for tile in grid.rows[0][1]] == [False, True, False, True, False]
    assert grid.opening == (True, True, True, False, True)


@pytest.mark.parametrize(("attacks", "word"), [([NAIVE, FLOOR], "naive"), ([AWARE, FLOOR], "aware")])
def test_a_run_with_attacks_of_one_kind_has_one_column_a_defense(attacks, word):
    grid = only_grid(small(attacks=attacks))
    assert [[kind for kind, _ in columns] for _, columns in heads(grid)] == [[""], [word], [""]]


def test_an_aware_attack_that_failed_keeps_its_column():
    grid = only_grid(small(attacks=BOTH), failed=lambda c: c.attack == double.MAP and c.training.defense != double.NONE)
    assert heads(grid)[1] == ("gaussian", [("naive", "matching, server"), ("aware", "map, server")])
    assert [row[3].word for _, row in grid.rows] == ["failed"] * 6
    assert all(row[2].source for _, row in grid.rows)


def test_the_page_names_the_defense_once_above_its_two_columns():
    text = render(double.make_run(small(attacks=BOTH)))
    page = complete(text)
    assert [attributes["colspan"] for attributes in page.all("th") if "colspan" in attributes] == ["1", "2", "1"]
    table = text[text.index('<table class="pictures') :].split("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    cells = [len(re.findall("<t[dh][ >]", row)) for row in rows]
    assert cells == [5, 5] + [6] * 6  # 2 + 3 headings, one empty + 4 attacks, name + original + 4 pictures


def test_every_recognizable_picture_has_the_outline_and_the_word():
    table = {"none": [0.9, 0.6], "gaussian": [0.5, 0.499], "prior": [0.1, 0.2]}

    def two(cell):
        made = double.pictures_of(cell)
        return Pictures(made.original[:2], made.guess[:2])

    text = render(double.make_run(small(), make=ssim_of(table), pictures=two))
    classes = [attributes.get("class", "") for attributes in Page(text).all("div")]
    tiles = [name for name in classes if name.startswith("tile")]
    assert tiles == ["tile", "tile seen", "tile seen", "tile", "tile", "tile seen", "tile", "tile"]
    assert len(re.findall('"sub seen-word">[0-9.]+ recognizable</span>', text)) == 3


def test_of_many_defenses_those_that_leak_most_are_shown_in_the_order_of_the_study():
    many = [PartSpec("gaussian", {"clip": 1.0, "epsilon": float(e), "delta": 1e-5}) for e in range(30, 0, -1)]
    grid = only_grid(small(double.NONE, *many, attacks=BOTH))
    assert len(grid.heads) == MOST_DEFENSES + 1
    names = [head.defense.text for head in grid.heads]
    assert names == ["no defense", *(f"gaussian epsilon={e}" for e in range(30, 31 - MOST_DEFENSES, -1)), "floor"]
    assert f"{MOST_DEFENSES} of 31 defenses are shown: those with the highest mean SSIM." in grid.notes


def test_pictures_of_data_not_known_to_be_public_are_withheld_with_a_word():
    text = render(double.make_run(small(), public=()))
    assert "data:image" not in text
    for words in ("the data set invented is not known to be public", "0.92 recognizable"):
        assert words in complete(text).text
    for images in ("redact", "none"):
        text = render(double.make_run(small()), images=images)
        assert "data:image" not in text
        assert f"option --images {images}" in text


def test_the_attack_is_chosen_on_the_mean_and_not_image_by_image():
    values = {double.MATCHING.key: [0.9, 0.1, 0.1, 0.1, 0.1, 0.1], OTHER.key: [0.3] * 5 + [None]}
    attacks = [NAIVE, (OTHER, double.PROBE, "server")]
    grid = only_grid(small(attacks=attacks), make=with_ssim(lambda cell: values[cell.attack.key]))
    assert [columns[0][1] for _, columns in heads(grid)] == ["matching objective=cosine, server"] * 2
    assert [row[1][1].caption for row in grid.rows] == ["0.30"] * 5 + ["no reconstruction"]
    assert grid.rows[5][1][1].word == "failed"
    assert not any(tile.recognizable for _, row in grid.rows for tile in row)


def test_a_picture_has_its_own_size_and_a_column_of_failed_cells_has_a_word():
    grid = only_grid(small(), failed=lambda cell: cell.training.defense != double.NONE)
    first, undefended, defended, floor = grid.rows[0][1]
    content = base64.b64decode(first.source.split(",", 1)[1])
    assert content[:4] == b"\x89PNG"
    assert (int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")) == (24, 24)
    assert undefended.recognizable
    assert (defended.word, defended.source) == ("failed", "")
    assert floor.source


def test_a_guess_that_is_not_finite_is_a_failed_one_and_gray_images_are_shown():
    def gray(cell):
        made = double.pictures_of(cell)
        guess = made.guess[..., :1].copy()
        guess[0] = np.nan
        return Pictures(made.original[..., :1], guess)

    rows = only_grid(small(), pictures=gray).rows
    assert rows[0][1][1].word == "failed"
    assert rows[1][1][1].source


def noise(size):
    """Pictures that no format makes smaller."""
    images = np.random.default_rng(0).uniform(size=(6, 1, size, size, 3)).astype(np.float32)
    return Pictures(images, images)


def test_large_pictures_are_left_out_before_the_page_grows_too_big():
    text = render(double.make_run(small(), pictures=lambda cell: noise(256)))
    assert len(text) < 3_000_000
    assert "of 6 images, in the order of the victims" in text


def test_each_setting_has_its_share_of_the_page():
    federations = [double.FEDERATION, dataclasses.replace(double.FEDERATION, rounds=9)]
    defenses = [double.NONE, double.GAUSSIAN[0]]
    cells = [c for f in federations for c in double.grid(defenses, [NAIVE, FLOOR], (0,), federation=f)]

    grids = shown(tuple(cells), pictures=lambda cell: noise(144)).grids
    assert [len(grid.rows) for grid in grids] == [3, 3]


def test_an_image_that_is_too_large_for_the_page_is_left_out_with_a_note(monkeypatch):
    monkeypatch.setattr("leakgauge.reports.sections.pictures.MOST_BYTES", 1_000)
    grid = only_grid(small())
    assert (grid.rows, grid.notes) == ((), ("The images are too large for this page.",))
