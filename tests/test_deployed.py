"""The mechanisms of Flower and NVFlare by hand; `tests/flower` and `tests/nvflare` compare them with their packages."""

import math
from pathlib import Path

import numpy as np
import pytest

from leakgauge import claim, deployed
from leakgauge.harness.core.rng import Key, global_generators

ROOT = Path(__file__).parents[1]
UPDATE = np.array([-3.0, 0.5, -0.25, 0.0, 1.0])


def drawn(function, update, n=4000, **options):
    """[n, d]: what a function sends, with n keys."""
    sent = []
    for k in range(n):
        with global_generators(Key(k, ("deployed",))):
            sent.append(function(update, **options))
    return np.array(sent)


def proved(name, **parameters):
    return claim(f"function:leakgauge.deployed.{name}", parameters, {}, 1, None)


def test_the_noise_of_local_dp_is_that_of_its_formula_and_its_claim_is_refuted():
    sent = drawn(deployed.flower_local_dp, UPDATE, sensitivity=2.0, epsilon=4.0)
    noise = 2.0 * math.sqrt(2 * math.log(1.25e5)) / 4.0
    # of 20,000 normal numbers, the standard deviation is off by 0.5 %; ten times that is a probability of 1e-23
    assert (sent - UPDATE / np.linalg.norm(UPDATE)).std() == pytest.approx(noise, rel=0.05)
    answer = proved("flower_local_dp", sensitivity=1e-4, epsilon=10.0)
    assert (answer["claimed"]["epsilon"], answer["verdict"]) == (10.0, "BROKEN")
    assert answer["proved"]["epsilon"] == pytest.approx(8.52e8, rel=1e-3)
    assert proved("flower_local_dp", sensitivity=2.0, epsilon=0.5)["verdict"] in ("HOLDS", "LOOSE")


def test_the_noise_of_adaptive_clipping_is_split_as_in_the_source():
    """Andrew et al. 2021, Thm 1: with multiplier 1 and a count noise of 1, the sum gets (1 - 1/4)^-1/2."""
    found = deployed.flower_adaptive(1.0, 20)
    assert found[:2] == pytest.approx((1.0, 1.1547), abs=1e-4)
    assert found.effective == pytest.approx((0.75 * math.exp(0.2) + 0.25) ** -0.5)
    assert deployed.flower_adaptive(1.0, 20, rate=1e-12).effective == pytest.approx(1.0)


def test_a_secure_sum_rounds_to_its_grid_without_bias():
    step, sent = 16 / 8, drawn(deployed.flower_secagg, UPDATE, levels=8)
    assert not np.abs(sent / step - np.round(sent / step)).max()
    # a number on a grid of 2 has a standard deviation of at most 1; 8 standard errors of 4000 draws
    assert np.abs(sent.mean(0) - UPDATE).max() < 8 / math.sqrt(4000)
    assert deployed.flower_secagg(np.array([99.0, -99.0])).tolist() == [8.0, -8.0]


def test_filters_without_noise():
    assert deployed.nvflare_percentile(UPDATE, percentile=50, gamma=2).tolist() == [-2.0, 0.5, 0.0, 0.0, 1.0]
    assert deployed.nvflare_percentile(UPDATE, percentile=50, gamma=1, steps=2).tolist() == [-2.0, 0.5, 0.0, 0.0, 1.0]
    kept = deployed.nvflare_exclude_vars({"head.w": UPDATE, "w": UPDATE}, "^head")
    assert [array.tolist() for array in kept.values()] == [[0.0] * 5, UPDATE.tolist()]
    assert deployed.flower_clipping(np.zeros(3)).tolist() == [0.0] * 3


def test_relative_noise_grows_with_the_update():
    for scale in (1.0, 100.0):
        sent = drawn(deployed.nvflare_gaussian, scale * UPDATE, sigma0=0.5, max_percentile=100)
        assert (sent - scale * UPDATE).std() == pytest.approx(1.5 * scale, rel=0.05)
    assert deployed.nvflare_gaussian(np.zeros(3)).tolist() == [0.0] * 3


def test_the_sparse_vector_technique_sends_few_numbers_with_laplace_noise():
    update = np.linspace(-1, 1, 40)
    sent = drawn(deployed.nvflare_svt, update, gamma=0.5, replace=False)
    assert set((sent != 0).sum(1)) == {4}
    errors = (sent - update.clip(-0.5, 0.5))[sent != 0]
    # the mean size of Laplace noise is its scale, 2 gamma / noise_var
    assert np.abs(errors).mean() == pytest.approx(2 * 0.5 / 0.1, rel=0.05)
    with pytest.raises(ValueError, match="expected numbers above the threshold, got 0 of 4: NVFlare would not return"):
        deployed.nvflare_svt(update, selection=100.0, gamma=1e-5, tau=1.0)


def test_the_page_states_what_is_claimed_and_proved(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import deployed as command

    page = command.PAGE.read_text("utf-8")
    for row in command.ROWS:
        assert command.front(row) in page, "write the page with python benchmarks/deployed.py"
