"""The mechanisms of Flower and NVFlare by hand; `tests/flower` and `tests/nvflare` compare them with their packages."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

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


def sparse_vector(values, n, tau, selection, replace):
    """P(sent positions), and P(all positions above), exactly, of |values| at gamma 1: by threshold, then integrated."""
    of_threshold, d = selection / (1 + (2 * n) ** (2 / 3)), len(values)
    scale, noise = 2 * n / (selection - of_threshold), 1 / of_threshold
    edges = tau + np.concatenate([-np.geomspace(60, 0.1, 12), [0.0], np.geomspace(0.1, 60, 12)]) * max(noise, scale)
    edges, (x, w) = np.unique([*edges, 0.0, 1.0]), np.polynomial.legendre.leggauss(40)
    half = np.diff(edges)[:, None] / 2
    at, weight = (half * x + edges[:-1, None] + half).ravel(), (half * w).ravel()
    above = stats.laplace.sf(at - np.abs(values)[:, None], scale=scale)
    below = stats.laplace.cdf(at - np.abs(values)[:, None], scale=scale)
    reached, drawn = {(): weight * stats.laplace.pdf(at, tau, noise)}, {}
    for held in (s for k in range(d) for s in itertools.combinations(range(d), k)):
        if held not in reached or len(held) >= n:
            continue
        rest = [i for i in range(d) if i not in held]
        passes = {}
        for more in (s for k in range(1, d + 1) for s in itertools.combinations(rest, k)):
            passes[tuple(sorted(held + more))] = np.prod([(above if i in more else below)[i] for i in rest], axis=0)
        for to, chance in passes.items():
            reached[to] = reached.get(to, 0.0) + reached[held] * chance / sum(passes.values())
    ends = {held: chance.sum() for held, chance in reached.items() if len(held) >= n}
    for held, chance in ends.items():
        draws = [*(itertools.product(held, repeat=n) if replace else itertools.combinations(held, n))]
        for one in draws:
            drawn[frozenset(one)] = drawn.get(frozenset(one), 0.0) + chance / len(draws)
    return drawn, ends


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize(("d", "n", "tau", "selection"), [(3, 1, 1.0, 10.0), (4, 2, 0.1, 1.0), (4, 2, 3.0, 10.0)])
def test_the_density_ratio_of_the_sparse_vector_technique_is_within_its_proof(d, n, tau, selection, replace):
    noise_var, updates = 0.1, [np.array(signs) for signs in itertools.product((-1.0, 0.0, 1.0), repeat=d)]
    tables = {sizes: sparse_vector(sizes, n, tau, selection, replace) for sizes in itertools.product((0, 1), repeat=d)}
    assert [sum(one.values()) for table in tables.values() for one in table] == pytest.approx([1.0] * 2 ** (d + 1))
    most = 0.0
    for u, v in itertools.product(updates, repeat=2):
        (p, _), (q, _) = (tables[tuple(np.abs(one).astype(int))] for one in (u, v))
        released = noise_var / 2 * np.abs(u - v)  # the largest log ratio of the noise, of scale 2 / noise_var
        most = max(most, *(math.log(p[s] / q[s]) + released[[*s]].sum() for s in p))
    parameters = {"fraction": n / d, "selection": selection}
    answer = claim("function:leakgauge.deployed.nvflare_svt", parameters, {"dim": d}, 1, None)
    assert answer["proved"]["epsilon"] == pytest.approx(selection + n * noise_var)
    assert 0.2 * selection < most <= answer["proved"]["epsilon"]


def test_positions_are_sent_as_often_as_is_computed():
    update, n = np.array([1.0, 0.0, -0.5, 0.0]), 4000
    sent = drawn(deployed.nvflare_svt, update, n, fraction=0.5, selection=20.0, gamma=1.0, tau=0.5) != 0
    expected, _ = sparse_vector(update, 2, 0.5, 20.0, True)
    for positions, chance in expected.items():
        found = (sent == np.isin(range(4), [*positions])).all(1).mean()
        assert found == pytest.approx(chance, abs=5.5 * math.sqrt(chance / n))  # ten shares, each wrong at 4e-8


def test_to_send_all_numbers_above_the_threshold_would_break_the_proof():
    half = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    (_, p), (_, q) = (sparse_vector(values, 1, 0.5, 10.0, False) for values in (half, half[::-1]))
    assert max(math.log(p[s] / q[s]) for s in p) > 10.0


def test_the_page_states_what_is_claimed_and_proved(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import deployed as command

    page = command.PAGE.read_text("utf-8")
    for row in command.ROWS:
        assert command.front(row) in page, "write the page with python benchmarks/deployed.py"
