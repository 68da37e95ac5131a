"""The leakage matrix as Markdown."""

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


def rows(text):
    """Cells of each line of the table, by its first cell."""
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return {line[0].strip(): line[1:] for line in lines}


def test_the_strongest_attack_of_a_row_is_bold_and_named():
    table = rows(to_matrix(Analysis(run_of(VALUES))))
    assert table["gaussian"][1].startswith("**0.510** (")
    assert not table["gaussian"][0].startswith("**")
    assert table["gaussian"][2] == "map 0.510, High"
    assert table["no defense"][2] == "matching 0.910, leaks"
    assert table["floor"][0] == "0.200 (0.200 to 0.200)"
    assert table["defense"][2] == "strongest"
    assert "matching, server · probe, round 0 (mean SSIM)" in table["defense"][0]


def test_a_row_where_nothing_beats_the_floor_states_it():
    # 0.207 is above the floor's 0.2, but its interval contains the floor
    found = rows(to_matrix(Analysis(run_of(VALUES))))["sqsgd"][2]
    assert found == "nothing beats the floor; not promised against server"


def test_a_bar_in_a_name_does_not_end_a_cell():
    odd = PartSpec("matching", {"objective": "a | b"}), PartSpec("matching", {"objective": "c"})
    cells = double.grid([double.NONE], [(attack, PROBE, "server") for attack in odd], seeds=(0,))
    lines = to_matrix(Analysis(double.make_run(cells))).splitlines()[2:]
    assert "objective=a \\| b" in lines[0]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {5}


def test_failed_cells_have_their_reason():
    run = double.make_run(run_of(VALUES).cells, failed=lambda cell: cell.training.defense.name == "sqsgd")
    assert rows(to_matrix(Analysis(run)))["sqsgd"] == ["failed (out of memory)"] * 2 + [""]
