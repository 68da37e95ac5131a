"""The studies of this project's own gate, and their baselines."""

import dataclasses
from pathlib import Path

import pytest

from leakgauge.harness.federation import registry
from leakgauge.harness.gate.baseline import read
from leakgauge.harness.study.study import load_study

BASELINES = Path(__file__).parents[1] / "baselines"


@pytest.mark.parametrize("name", ["smoke", "nightly"])
def test_the_baseline_is_of_the_study_as_it_is(name):
    base = read(BASELINES / f"{name}.json")
    assert base.measured.study_hash == load_study(name).hash
    assert not base.measured.dirty
    assert not [measure.key for measure in base.measured.measures if measure.problem]


def test_every_defense_meets_a_naive_attack_and_one_that_knows_it():
    asked = {}
    for cell in load_study("smoke").cells:
        asked.setdefault(cell.training.defense.name, set()).add(cell.attack.parameters.get("objective"))
    assert asked.keys() >= set(registry.classes("defense"))
    assert all({"l2", "likelihood"} <= objectives for objectives in asked.values())


def test_the_nightly_study_is_the_other_with_twice_the_images():
    smoke, nightly = (load_study(name).cells for name in ("smoke", "nightly"))
    doubled = [
        dataclasses.replace(cell, target=dataclasses.replace(cell.target, count=2 * cell.target.count))
        if cell.target.kind == "probe"
        else cell
        for cell in smoke
    ]
    assert [cell.id for cell in doubled] == [cell.id for cell in nightly]
