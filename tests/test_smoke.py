"""The studies of this project's own gate, and their baselines."""

import dataclasses
from pathlib import Path

import pytest

from leakgauge.harness.federation import registry
from leakgauge.harness.gate.baseline import read
from leakgauge.harness.study.study import load_study

BASELINES = Path(__file__).parents[1] / "baselines"


@pytest.mark.parametrize("name", ["smoke", "nightly"])
def test_the_baseline_belongs_to_the_current_study(name):
    base = read(BASELINES / f"{name}.json")
    assert base.measured.study_hash == load_study(name).hash
    assert not base.measured.dirty
    assert not [measure.key for measure in base.measured.measures if measure.problem]


def test_every_defense_meets_a_naive_and_a_defense_aware_attack():
    cells = load_study("smoke").cells
    tested = {(cell.training.defense.name, cell.attack.parameters.get("objective")) for cell in cells}
    assert tested >= {(name, objective) for name in registry.classes("defense") for objective in ("l2", "likelihood")}


def test_the_nightly_study_is_smoke_with_twice_the_images():
    smoke, nightly = (load_study(name).cells for name in ("smoke", "nightly"))
    without = [cell for cell in smoke if cell.attack.name != "lineup"]
    for cell, doubled in zip(without, nightly, strict=True):
        count = cell.target.count * (2 if cell.target.kind == "probe" else 1)
        assert dataclasses.replace(cell, target=dataclasses.replace(cell.target, count=count)) == doubled
