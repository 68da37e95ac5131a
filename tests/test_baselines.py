"""Parameters that PM, vqSGD, gradient pruning and DP-FedAvg refuse."""

import math

import pytest

from leakgauge.defenses.dp_fedavg import DPFedAvg
from leakgauge.defenses.piecewise import Piecewise
from leakgauge.defenses.top_k import TopK
from leakgauge.defenses.vqsgd import VQSGD


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        (Piecewise, {"epsilon": 0.0}, "expected epsilon > 0, got epsilon=0.0"),
        (Piecewise, {"clip": math.inf}, "expected clip > 0"),
        (VQSGD, {"repeats": 0}, "expected repeats > 0, got repeats=0"),
        (VQSGD, {"epsilon": math.nan}, "expected epsilon > 0"),
        (VQSGD, {"clip": -1.0}, "expected clip > 0"),
        (TopK, {"fraction": 0.0}, "expected 0 < fraction <= 1, got fraction=0.0"),
        (TopK, {"fraction": 1.5}, "expected 0 < fraction <= 1"),
        (DPFedAvg, {"epsilon": 1.0, "noise_std": 1.0}, "expected epsilon or noise_std, got both"),
        (DPFedAvg, {"delta": 0.0}, "expected 0 < delta < 1"),
        (DPFedAvg, {"clip": 0.0}, "expected clip > 0"),
    ],
)
def test_parameters_out_of_range_are_named(kind, parameters, message):
    with pytest.raises(ValueError, match=message):
        kind(**parameters)
