"""The benchmark of a large model: what it measures, and that it can fail."""

import importlib
from pathlib import Path

import pytest

from leakgauge.harness.core.vec import Layout

SMALL = Layout(("w", "b"), ((8, 8), (3,)))

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    large = importlib.import_module("large")


@pytest.mark.parametrize("name", ["gaussian", "sqsgd", "cepam-gaussian", "ota"])
def test_a_defense_is_measured_from_the_update_to_the_slope_of_its_likelihood(name):
    found = large.measure(name, {}, SMALL)
    assert found.failure == ""
    assert not found.missed
    assert found.size > 0
    assert 0.05 < found.coded <= found.attacked < 24


def test_a_defense_that_fails_is_named():
    found = large.measure("sqsgd", {"epsilon": 1e-9}, SMALL)
    assert found.failure.startswith("ValueError: expected epsilon >= ")
    assert found.missed


@pytest.mark.parametrize("bad", [{"encode": 15.0, "decode": 5.1}, {"coded": 4.1}, {"attacked": 24.1}])
def test_each_bar_can_be_missed(bad):
    assert large.Measured(**bad).missed
    assert not large.Measured(encode=10.0, decode=9.9, coded=3.9, attacked=23.9).missed


@pytest.mark.slow
def test_a_resnet18_is_encoded_within_its_bars(capsys):
    assert large.main(["sqsgd", "cepam-gaussian", "mvu"]) == 0
    assert "0 bars missed" in capsys.readouterr().out
