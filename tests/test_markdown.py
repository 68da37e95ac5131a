"""The ratings and the matrix as Markdown."""

import re

from leakgauge.harness.core.cell import PartSpec, Target
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.tables import to_matrix
from tests import report_fixtures as double
from tests.report_page import with_ssim

PROBE = Target("probe", 0, count=3)
VALUES = {
    ("none", "matching"): (0.9, 0.91, 0.92),
    ("none", "map"): (0.8, 0.81, 0.82),
    ("gaussian", "matching"): (0.1, 0.11, 0.12),
    ("gaussian", "map"): (0.5, 0.51, 0.52),
    ("sqsgd", "matching"): (0.1, 0.11, 0.12),
    ("sqsgd", "map"): (0.12, 0.3, 0.2),
}


def run_of(values):
    make = with_ssim(lambda cell: values.get((cell.training.defense.name, cell.attack.name), (0.2, 0.2, 0.2)))
    attacks = [(attack, PROBE, "server") for attack in (double.MATCHING, double.MAP, double.PRIOR)]
    defenses = [double.NONE, double.GAUSSIAN[0], double.SQSGD]
    return double.make_run(double.grid(defenses, attacks, seeds=(0,)), make=make)


def tables(text):
    """Of each table, the cells of each line, by its first cell."""
    found = []
    for block in text.split("\n\n"):
        lines = [
            [cell.strip() for cell in line.strip("| ").split(" | ")] for line in block.splitlines() if line[:1] == "|"
        ]
        found += [{line[0].strip(): line[1:] for line in lines}] if lines else []
    return found


def test_the_ratings_come_first_and_then_the_numbers_with_the_strongest_attack_in_bold():
    ratings, matrix = tables(to_matrix(Analysis(run_of(VALUES))))
    assert ratings["Defense"] == ["Rating", "People", "Accuracy", "Claim per round"]
    assert [ratings[name][:2] for name in ("no defense", "gaussian", "sqsgd")] == [
        ["Leaks", "3 of 3"],
        ["Leaks", "3 of 3"],
        ["Too weak to tell", "1 of 3"],
    ]
    assert matrix["gaussian"][1] == "**0.510** (0.485 to 0.535)"
    assert matrix["no defense"][0].startswith("**0.910** (")
    assert not any(matrix[name][at].startswith("**") for name, at in (("gaussian", 0), ("no defense", 1), ("sqsgd", 1)))
    assert matrix["gaussian"][2] == "Leaks (server, 3 of 3 people identified among 100)"
    assert matrix["sqsgd"][2] == "Too weak to tell (server, no lineup ran)"
    assert matrix["floor"] == ["0.200 (0.200 to 0.200)"] * 2
    assert matrix["defense"][0::2] == ["matching, server, probe, round 0 (mean SSIM)", "rating"]


def test_each_adversary_has_a_row_of_ratings_and_its_words_in_the_matrix():
    attacks = [(double.MATCHING, PROBE, "server"), (double.MATCHING, PROBE, "public")]
    run = double.make_run(double.grid([double.SQSGD], attacks, seeds=(0,)))
    text = to_matrix(Analysis(run))
    assert "| Defense | Adversary | Rating |" in text
    assert "| sqsgd | server | Leaks |" in text
    assert "| sqsgd | public | Leaks |" in text
    ending = "Leaks (server, 3 of 3 people identified among 100); Leaks (public, 3 of 3 people identified among 100) |"
    assert ending in text


def test_a_bar_in_a_name_does_not_end_a_cell():
    odd = PartSpec("matching", {"objective": "a | b"}), PartSpec("matching", {"objective": "c"})
    cells = double.grid([double.NONE], [(attack, PROBE, "server") for attack in odd], seeds=(0,))
    text = to_matrix(Analysis(double.make_run(cells)))
    assert "objective=a \\| b" in text
    lines = [line for line in text.splitlines() if line[:1] == "|"]
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines] == [6] * 3 + [5] * 4


def test_failed_cells_have_their_reason():
    run = double.make_run(run_of(VALUES).cells, failed=lambda cell: cell.training.defense.name == "sqsgd")
    ratings, matrix = tables(to_matrix(Analysis(run)))
    lacks = "Too weak to tell (server, of 2 cells, 2 failed; no lineup ran)"
    assert matrix["sqsgd"] == ["failed (out of memory)"] * 2 + [lacks]
    assert ratings["sqsgd"] == ["Too weak to tell", "n/a", "n/a", "n/a"]
