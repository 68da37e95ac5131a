"""Our functions send what NVFlare's filters send, number by number, with the same draws; neither needs torch."""
# ruff: noqa: NPY002

import numpy as np
import pytest
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy

from leakgauge.deployed import nvflare_exclude_vars, nvflare_percentile, nvflare_svt


def updates(scale=0.01, d=200):
    return [np.random.RandomState(seed).normal(0, scale, d) for seed in range(5)]


def filtered(filter_, data, steps=1):
    """What the filter lets through, and its metadata."""
    meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: steps}
    given = {name: array.copy() for name, array in data.items()}
    dxo = from_shareable(filter_.process(DXO(DataKind.WEIGHT_DIFF, given, meta).to_shareable(), FLContext()))
    return dxo.data, dxo.meta


@pytest.mark.parametrize("options", [{}, {"percentile": 60, "gamma": 0.004}, {"percentile": 0}, {"percentile": 100}])
@pytest.mark.parametrize("steps", [1, 7])
def test_percentiles(options, steps):
    for update in updates():
        theirs, _ = filtered(PercentilePrivacy(**options), {"w": update}, steps)
        np.testing.assert_array_equal(nvflare_percentile(update, steps=steps, **options), theirs["w"])


@pytest.mark.parametrize(
    "options", [{}, {"fraction": 0.5, "gamma": 0.01}, {"replace": False}, {"selection": 5.0, "tau": 1e-5}]
)
def test_the_sparse_vector_technique(options):
    named = {"epsilon" if name == "selection" else name: value for name, value in options.items()}
    for seed, update in enumerate(updates()):
        np.random.seed(seed)
        theirs, meta = filtered(SVTPrivacy(**named), {"w": update})
        np.random.seed(seed)
        np.testing.assert_allclose(nvflare_svt(update, **options), theirs["w"], rtol=1e-12)
        sent = np.ceil(options.get("fraction", 0.1) * 200)
        total = meta["svt_privacy_budget"]["epsilon_total"]
        assert total == pytest.approx(options.get("selection", 0.1) + sent * 0.1)  # what we state as its claim


@pytest.mark.parametrize("exclude", ["", "bias", "^head"])
def test_excluded_variables(exclude):
    update = {"body.bias": np.ones(3), "head.weight": np.ones(2), "body.weight": np.ones(4)}
    theirs, _ = filtered(ExcludeVars(exclude or None), update)
    ours = nvflare_exclude_vars(update, exclude)
    assert {name for name, array in ours.items() if array.any()} == theirs.keys()
