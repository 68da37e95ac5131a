"""Bounds from a user's own scores: valid for all thresholds at once, and as large as the literature's."""

import json

import numpy as np
import pytest
from scipy import special, stats

from leakgauge.harness.audit.bounds import (
    _band,
    best_epsilon_lower,
    bound_from_trials,
    count,
    epsilon_lower,
    likely_rates,
    split_threshold,
)
from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.core.rng import Key
from tests.by_rows import by_rows
from tests.command import call, refused


def gaussian(mu):
    """Scores of a Gaussian mechanism."""
    return lambda draw, n: (draw.standard_normal(n), mu + draw.standard_normal(n))


def laplace(epsilon):
    """Log likelihood ratios of Laplace noise."""

    def scores(draw, n):
        outputs = draw.laplace(0, 1, n), draw.laplace(epsilon, 1, n)
        return tuple(np.abs(x) - np.abs(x - epsilon) for x in outputs)

    return scores


def response(epsilon):
    """Decisions of randomized response."""
    right = special.expit(epsilon)
    return lambda draw, n: ((draw.random(n) > right).astype(float), (draw.random(n) < right).astype(float))


def ratios(epsilon):
    """Log likelihood ratios of randomized response."""
    return lambda draw, n: tuple(epsilon * (2 * side - 1) for side in response(epsilon)(draw, n))


def asymmetric(draw, n):
    """Randomized response that answers seldom: 1 in 50 trials says the truth almost surely."""
    return np.where(draw.random(n) < 0.02, -5.0, 0.0), np.where(draw.random(n) < 0.02, 5.0, 0.0)


CASES = [
    (gaussian(1.0), gaussian_epsilon(1.0, 1e-5), 500, 1e-5, 1.03, 1.05),
    (gaussian(2.0), gaussian_epsilon(2.0, 1e-5), 500, 1e-5, 2.51, 2.54),
    (gaussian(2.0), gaussian_epsilon(2.0, 1e-5), 5000, 1e-5, 3.78, 3.84),
    (laplace(1.0), 1.0, 500, 0.0, 0.67, 0.67),
    (laplace(3.0), 3.0, 500, 0.0, 2.25, 2.30),
    (response(2.0), 2.0, 500, 0.0, 1.68, 1.78),
    (gaussian(0.0), 0.0, 300, 0.0, 0.0, 0.0),
    (laplace(0.2), 0.2, 100, 0.0, 0.0, 0.0),
]
"""Scores, the true epsilon, the trials a side, delta, jax_privacy's mean bound, and ours in docs/claims-tables.md."""


@pytest.mark.slow
@by_rows(*CASES)
def test_the_mean_bound_is_at_least_the_fields_and_above_the_truth_in_one_of_twenty(
    scores, truth, n, delta, least, printed
):
    draw = np.random.default_rng(1)
    bounds = np.array([best_epsilon_lower(*scores(draw, n), delta) for _ in range(1000)])
    assert bounds.mean() >= least
    assert bounds.mean() == pytest.approx(printed, abs=0.006)
    assert stats.binom.sf((bounds > truth).sum() - 1, 1000, 0.05) > 1e-3


PILOTS = [
    (gaussian(1.0), gaussian_epsilon(1.0, 1e-5), 1e-5, "either"),
    (gaussian(2.0), gaussian_epsilon(2.0, 1e-5), 1e-5, "all"),
    (gaussian(4.0), gaussian_epsilon(4.0, 1e-5), 1e-5, "all"),
    (laplace(1.0), 1.0, 0.0, "either"),
    (laplace(3.0), 3.0, 0.0, "either"),
    (ratios(2.0), 2.0, 0.0, "one"),
    (ratios(4.0), 4.0, 0.0, "one"),
]
"""Scores, the true epsilon, delta, and the thresholds that show more, if the difference is above 2 %."""


@pytest.mark.slow
@by_rows(*PILOTS)
def test_a_pilot_chooses_the_better_bound_and_the_bound_is_above_the_truth_in_one_of_twenty(
    scores, truth, delta, better
):
    draw, n, rows = np.random.default_rng(7), 500, []
    for number in range(1000):
        zeros, ones = scores(draw, n // 3)
        threshold = split_threshold(zeros, ones, delta)
        rates = likely_rates(zeros, ones, threshold, n, delta, 0.95, Key(number))
        zeros, ones = scores(draw, n)
        known = threshold, rates, delta, 0.95
        bound, counts = bound_from_trials(zeros, ones, *known, gaussian=False, linear=False)
        fixed = epsilon_lower(count(zeros, ones, threshold), delta)
        rows.append((bound.epsilon_lower, bound.strict, fixed, rates is not None))
        assert bound.strict <= bound.epsilon_lower <= epsilon_lower(counts, delta) + 1e-12
        assert bound.strict <= bound.ceiling
    lower, strict, fixed, free = np.array(rows).T
    # 0.05 +- 0.007 of 1000 repetitions, and 0.001 +- 0.001
    for bounds, level in ((lower, 0.05), (strict, 0.001)):
        assert stats.binom.sf((bounds > truth).sum() - 1, 1000, level) > 1e-3
    assert lower.mean() >= {"one": 1.0, "either": 0.98, "all": 1.005}[better] * fixed.mean()
    assert better == "either" or (free.mean() > 0.6) == (better == "all")


def test_rounding_of_a_ratio_shows_nothing_above_the_truth():
    # without rounding, the ratio is 1 for every output above 1, and -1 below 0
    draw = np.random.default_rng(1)
    assert max(best_epsilon_lower(*laplace(1.0)(draw, 5000), 0.0) for _ in range(5)) < 1.0


def test_a_score_far_from_all_others_hides_nothing():
    zeros, ones = gaussian(4.0)(np.random.default_rng(2), 300)
    far = best_epsilon_lower(zeros, np.append(ones[1:], 1e12), 1e-5)
    assert far == pytest.approx(best_epsilon_lower(zeros, ones, 1e-5), abs=0.1)


@pytest.mark.matrix
@pytest.mark.parametrize("n", [1, 2, 30, 300])
@pytest.mark.parametrize("chosen", [(), (0.02, 20.0)], ids=["usual", "chosen"])
def test_a_band_covers_all_rates_at_once(n, chosen):
    draw, errors, band = np.random.default_rng(3), 0.05, _band(n, 0.05, *chosen)
    ordered = np.sort(draw.random((4000, n)), axis=1)
    missed = (ordered > band[:-1]).any(1).mean()  # the rate is below the next number that counts
    assert missed <= errors + 4 * np.sqrt(errors / 4000)
    assert missed >= 0.6 * errors or n < 30
    assert (np.diff(band) >= 0).all()
    assert band[-1] == 1


def test_a_large_band_has_no_smaller_ends_than_each_rate_alone():
    band = _band(20_000, 0.025)
    alone = special.betainccinv(np.arange(1, 20_001), 20_000 - np.arange(20_000), 0.025)
    assert (band[:-1] >= alone).all()


def test_decisions_have_one_threshold():
    draw = np.random.default_rng(4)
    zeros, ones = response(2.0)(draw, 500)
    assert best_epsilon_lower(zeros, ones, 0.0) == epsilon_lower(count(zeros, ones, 0.5), 0.0)


def test_infinite_scores_and_single_trials_have_a_bound():
    assert best_epsilon_lower(np.array([-np.inf]), np.array([np.inf]), 0.0) == 0.0
    apart = best_epsilon_lower(np.full(500, -np.inf), np.full(500, np.inf), 0.0)
    assert 3.5 < apart < 6.0
    assert best_epsilon_lower(*asymmetric(np.random.default_rng(5), 2000), 0.0) > 0.5


def file_of(folder, text, name="scores.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_the_command_reads_csv_and_npz_alike(tmp_path):
    draw = np.random.default_rng(6)
    zeros, ones = gaussian(2.0)(draw, 300)
    rows = [f"{score!r},1" for score in ones.tolist()] + [f"{score!r},0" for score in zeros.tolist()]
    table = file_of(tmp_path, "\n".join(["Score,IN", *rows]))
    arrays = tmp_path / "scores.npz"
    np.savez(arrays, **{"score": np.append(ones, zeros), "in": np.repeat([True, False], 300)})
    answers = [json.loads(call("audit", "--scores", path, "--json").stdout) for path in (table, arrays)]
    assert answers[0] == answers[1]
    assert answers[0]["audited"]["epsilon_lower"] == best_epsilon_lower(zeros, ones, 1e-5)
    assert (answers[0]["audited"]["ins"], answers[0]["audited"]["outs"]) == (300, 300)
    text = call("audit", "--scores", table, "--delta", "0", "--confidence", "0.99").stdout
    assert f"epsilon >= {best_epsilon_lower(zeros, ones, 0.0, 0.99):.4g} at delta 0, confidence 0.99" in text


@by_rows(
    ("a,b\n1,2\n", 'no column "score"'),
    ("", 'no column "score"'),
    ("score,in\n", "n >= 1"),
    ("score,in\n1,2\n", '"in" has 2'),
    ("score,in\n1,1\n", "all 1 scores have in = 1"),
    ("score,in\n1,1\nx,0\n", "line 3 has 'x' as \"score\""),
    ("score,in\n1,1\n2\n", 'line 3 has None as "in"'),
    ("score,in\nnan,1\n2,0\n", "row 1 has a score that is not a number"),
    (b"PK\x03\x04", "BadZipFile"),
    ('score,in\n1,"' + 140_000 * "1" + '"\n', "field larger than field limit"),
    (b"\xff\xfe", "UTF-16"),
)
def test_a_wrong_file_is_refused_in_one_line(text, match, tmp_path):
    assert match in refused("audit", "--scores", file_of(tmp_path, text))


@by_rows(
    ([], "one of a defense, --scores"),
    (["gaussian", "--scores", "FILE"], "one of a defense, --scores"),
    (["--scores", "FILE", "--rounds", "3"], "--scores has no federation"),
    (["gaussian", "--delta", "1e-6"], "--delta is for --scores"),
)
def test_options_that_do_not_fit_are_refused(options, match, tmp_path):
    path = file_of(tmp_path, "score,in\n1,1\n0,0\n")
    result = call("audit", *(path if word == "FILE" else word for word in options))
    assert result.exit_code == 2
    assert match in " ".join(result.stderr.replace("│", " ").split())
