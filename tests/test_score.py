"""Scores of guesses against a known truth."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from leakgauge.harness.core.contract import Guess
from leakgauge.harness.core.form import PICTURE, PSNR_CAP
from leakgauge.harness.core.rng import Key, normal, permutation, permutations, uniform
from leakgauge.harness.data.embedded import digits
from leakgauge.harness.study.score import (
    identified,
    match,
    score_membership,
    score_reconstruction,
)
from tests.by_rows import by_rows

ROOT = Key(7, ("test_score",))


def images(name, *shape):
    """Uniform noise in [0, 1)."""
    return uniform(ROOT.child(name), shape)


def guess(x, y, failure=""):
    return Guess(x, y, objective=0.0, evaluations=1, failure=failure)


def labels(*values):
    """[b] int64."""
    return torch.tensor(values, dtype=torch.int64)


def by_name(estimates):
    return {estimate.name: estimate for estimate in estimates}


def three_victims():
    """Batches of two: the first found exactly but shuffled, the second failed, the third all gray and wrong."""
    x = [images(f"victim-{i}", 2, 1, 8, 8) for i in range(3)]
    y = [labels(3, 4), labels(5, 6), labels(7, 8)]
    guesses = [
        guess(x[0].flip(0), y[0].flip(0)),
        guess(torch.zeros(0), torch.zeros(0), "diverged"),
        guess(torch.full_like(x[2], 0.5), labels(8, 0)),
    ]
    return x, y, guesses


def scored(truth, guess):
    each = PICTURE.score(truth, guess)
    return each["ssim"], each["mse"], each["psnr"]


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (1, 3, 32, 32), (1, 1, 28, 28), (1, 1, 3, 9), (1, 2, 6, 6)])
def test_truth_against_itself_is_ssim_one_mse_zero_and_the_psnr_cap(shape):
    x = images("same", *shape)
    ssim, mse, psnr = scored(x, x)
    assert ssim == pytest.approx(np.ones(shape[0]), abs=1e-12)
    assert mse.tolist() == [0.0] * shape[0]
    assert psnr.tolist() == [PSNR_CAP] * shape[0]


def ssim_of_one_window(x, y):
    """Wang et al. 2004, eq. (13), of a single window, with sample covariances."""
    a, b = x.double().flatten(), y.double().flatten()
    n, c1, c2 = len(a), 0.01**2, 0.03**2
    covariance = float(((a - a.mean()) * (b - b.mean())).sum()) / (n - 1)
    means, spreads = float(a.mean() ** 2 + b.mean() ** 2), float(a.var() + b.var())
    return (2 * float(a.mean() * b.mean()) + c1) * (2 * covariance + c2) / ((means + c1) * (spreads + c2))


@pytest.mark.parametrize(("side", "window"), [(7, 7), (6, 5), (5, 5), (4, 3), (3, 3)])
def test_the_ssim_window_is_the_largest_odd_one_that_fits(side, window):
    # the mean of the one-window formula over all places of the window
    x, y = images("x", 1, 1, side, side), images("y", 1, 1, side, side)
    places = range(side - window + 1)
    tiles = [np.s_[0, 0, i : i + window, j : j + window] for i in places for j in places]
    expected = np.mean([ssim_of_one_window(x[tile], y[tile]) for tile in tiles])
    assert PICTURE.score(x, y)["ssim"][0] == pytest.approx(expected, rel=1e-9)


def test_flat_images_have_the_luminance_term_alone():
    x, y = torch.full((1, 1, 8, 8), 0.25), torch.full((1, 1, 8, 8), 0.75)
    ssim, mse, psnr = scored(x, y)
    assert ssim[0] == pytest.approx((2 * 0.25 * 0.75 + 1e-4) / (0.25**2 + 0.75**2 + 1e-4), rel=1e-9)
    assert mse[0] == 0.25
    assert psnr[0] == pytest.approx(10 * math.log10(4), rel=1e-12)


def test_mse_sees_the_raw_guess_and_the_others_the_clipped_one():
    x = torch.ones(1, 1, 8, 8)
    ssim, mse, psnr = scored(x, x * 3)
    assert (ssim[0], mse[0], psnr[0]) == (1.0, 4.0, PSNR_CAP)


def test_images_that_ssim_cannot_compare_have_none():
    assert PICTURE.score(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8)).keys() == {"mse", "success"}


def test_a_shuffled_batch_is_matched():
    x = images("batch", 9, 3, 8, 8)
    shuffle = torch.from_numpy(permutation(ROOT.child("shuffle"), 9))
    shuffled = (x + 0.1 * normal(ROOT.child("noise"), tuple(x.shape)))[shuffle]
    assert torch.equal(shuffle[match(x, shuffled)], torch.arange(9))
    assert match(x[:1], shuffled[:1]).tolist() == [0]


def test_no_other_permutation_has_a_lower_total_mse():
    # the nearest guess of both is the first; least in total is the other way round
    assert match(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.4], [-2.0]])).tolist() == [1, 0]
    truth, guesses = images("truth", 5, 3), images("guesses", 5, 3)
    totals = {order: float(((truth - guesses[list(order)]) ** 2).sum()) for order in itertools.permutations(range(5))}
    assert tuple(match(truth, guesses).tolist()) == min(totals, key=totals.__getitem__)


def test_scores_of_a_batch_do_not_depend_on_the_order_of_the_guesses():
    x, y = images("x", 5, 1, 8, 8), labels(0, 1, 1, 2, 3)
    noisy, said = x + 0.2 * normal(ROOT.child("noise"), (5, 1, 8, 8)), labels(1, 1, 1, 2, 0)
    order = torch.from_numpy(permutation(ROOT.child("order"), 5))
    straight, _ = score_reconstruction([x], [y], [guess(noisy, said)])
    shuffled, _ = score_reconstruction([x], [y], [guess(noisy[order], said[order])])
    assert straight == shuffled


def test_images_have_seven_estimates_in_order():
    found, _ = score_reconstruction(*three_victims())
    names = ["ssim", "mse", "psnr", "label_accuracy", "recognized", "success", "failed"]
    assert [estimate.name for estimate in found] == names
    assert [estimate.higher_leaks for estimate in found] == [True, False, True, True, True, True, None]
    assert found[2].unit == "dB"


def test_values_are_in_the_order_of_the_victims_with_none_for_a_failed_one():
    found = by_name(score_reconstruction(*three_victims())[0])
    for name in ("ssim", "mse", "psnr", "label_accuracy"):
        values = found[name].values
        assert len(values) == 6
        assert [value is None for value in values] == [False, False, True, True, False, False]
    assert found["ssim"].values[:2] == pytest.approx((1, 1), abs=1e-12)
    assert found["mse"].values[:2] == (0, 0)
    assert found["mse"].values[4] > 0.01
    assert found["recognized"].values == found["success"].values == (1, 1, 0, 0, 0, 0)
    assert found["failed"].values == (0, 1, 0)
    assert [found[name].n for name in ("ssim", "mse", "psnr", "label_accuracy")] == [4, 4, 4, 4]
    assert [found[name].n for name in ("recognized", "success", "failed")] == [6, 6, 3]
    assert found["recognized"].value == found["success"].value == found["failed"].value == 1 / 3
    for name in ("ssim", "mse", "psnr", "label_accuracy", "recognized", "success"):
        assert "1 of 3 victims failed" in found[name].note
    assert found["recognized"].note.startswith("2 of 6 images")
    assert found["ssim"].value == pytest.approx(np.mean([v for v in found["ssim"].values if v is not None]), rel=1e-12)
    assert found["mse"].value == pytest.approx(np.median([v for v in found["mse"].values if v is not None]), rel=1e-12)
    assert "median" in found["mse"].method


def test_one_diverged_image_does_not_hide_the_others_in_the_mse():
    x = [images(str(i), 1, 1, 8, 8) for i in range(7)]
    guesses = [guess(v, labels(0)) for v in x[:6]] + [guess(x[6] * 1e30, labels(0))]
    found = by_name(score_reconstruction(x, [labels(0)] * 7, guesses)[0])
    assert found["mse"].value == 0
    assert found["mse"].values[6] > 1e58


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_a_guess_that_is_not_finite_in_float32_has_failed(bad):
    x, y, guesses = three_victims()
    broken = x[0].double()
    broken[1, 0, 3, 3] = bad
    found = by_name(score_reconstruction(x, y, [guess(broken, y[0]), *guesses[1:]])[0])
    assert found["failed"].value == 2 / 3
    assert found["ssim"].values[:4] == (None,) * 4


def test_all_failed_is_no_value_and_not_zero():
    x, y, _ = three_victims()
    estimates, pictures = score_reconstruction(x, y, [guess(v, w, "diverged") for v, w in zip(x, y, strict=True)])
    found = by_name(estimates)
    for name in ("ssim", "mse", "psnr", "label_accuracy"):
        assert found[name].value is None
        assert "3 of 3 victims failed" in found[name].note
    assert (found["recognized"].value, found["success"].value, found["failed"].value) == (0, 0, 1)
    assert pictures is not None
    assert np.all(pictures.guess == 0.5)


@by_rows(
    (labels(1, 2, 3), labels(1, 2, 3), (1, 1, 1)),
    (labels(1, 2, 3), labels(3, 1, 2), (1, 1, 1)),  # the right labels on the wrong images
    (labels(1, 1, 2), labels(1, 2, 2), (1, 0, 1)),
    (labels(1, 1, 2), labels(5, 1, 1), (1, 1, 0)),
    (labels(1, 1, 1), labels(1, 2, 3), (1, 0, 0)),  # each guess is used once
)
def test_labels_are_compared_as_multisets_the_matched_image_first(truth, said, hits):
    x = images("labeled", 3, 1, 8, 8)
    found = by_name(score_reconstruction([x], [truth], [guess(x, said)])[0])["label_accuracy"]
    assert found.values == hits
    assert found.value == pytest.approx(sum(hits) / 3)


def test_intervals_of_batches_are_over_batches():
    x, y, guesses = three_victims()
    found = by_name(score_reconstruction(x, y, guesses)[0])
    assert all(" over " in found[name].method for name in ("ssim", "mse", "psnr", "label_accuracy", "success"))
    assert "over" not in found["failed"].method
    alone = score_reconstruction([x[0][:1]], [y[0][:1]], [guess(x[0][:1], y[0][:1])])[0]
    assert not any("over" in estimate.method for estimate in alone)


def test_tabular_inputs_have_no_image_scores_and_no_pictures():
    x, y = [images("table", 2, 58)], [labels(0, 1)]
    estimates, pictures = score_reconstruction(x, y, [guess(x[0].flip(0), y[0].flip(0))])
    assert [e.name for e in estimates] == ["mse", "label_accuracy", "failed"]
    assert (estimates[0].value, estimates[1].value, pictures) == (0, 1, None)


def test_pictures_are_channels_last_matched_and_clipped():
    x, y, guesses = three_victims()
    guesses[2] = guess(x[2] * 4 - 1, y[2])
    _, pictures = score_reconstruction(x, y, guesses)
    assert pictures is not None
    assert pictures.original.shape == pictures.guess.shape == (3, 2, 8, 8, 1)
    assert pictures.original.dtype == pictures.guess.dtype == np.float32
    assert np.array_equal(pictures.guess[0], pictures.original[0])
    assert np.array_equal(pictures.original[2, 1, :, :, 0], x[2][1, 0].numpy())
    assert np.all(pictures.guess[1] == 0.5)
    assert (pictures.guess[2].min(), pictures.guess[2].max()) == (0, 1)


def test_batches_of_different_sizes_have_values_and_no_pictures():
    x, y = [images("a", 1, 1, 8, 8), images("b", 2, 1, 8, 8)], [labels(1), labels(2, 3)]
    estimates, pictures = score_reconstruction(x, y, [guess(v, w) for v, w in zip(x, y, strict=True)])
    assert len(estimates[0].values) == 3
    assert pictures is None


def test_scoring_changes_neither_the_truth_nor_the_guess():
    x, y, guesses = three_victims()
    before = [x[0].clone(), guesses[0].x.clone(), guesses[0].y.clone()]
    score_reconstruction(x, y, guesses)
    assert all(torch.equal(a, b) for a, b in zip(before, [x[0], guesses[0].x, guesses[0].y], strict=True))


def test_a_guess_of_another_shape_is_refused():
    x, y = images("x", 2, 1, 8, 8), labels(0, 1)
    for wrong in (guess(x[:1], y), guess(x, y[:1])):
        with pytest.raises(ValueError, match="expected a guess like the truth"):
            score_reconstruction([x], [y], [wrong])
    with pytest.raises(ValueError, match="expected one guess a victim, got 0 guesses, 1 inputs and 1 labels"):
        score_reconstruction([x], [y], [])


def test_membership_has_the_golden_values():
    scores = torch.tensor([0.9, 0.75, 0.8, 0.5, 0.7, 0.3, 0.4, 0.1, 0.2, 0.0])
    found = score_membership(scores, torch.tensor([True, False] * 5))
    assert [e.name for e in found] == ["auc", "tpr@1%", "tpr@0.1%", "balanced_accuracy"]
    assert found[0].value == pytest.approx(0.76, abs=1e-12)
    assert found[3].value == pytest.approx(0.70, abs=1e-12)
    assert (found[1].value, found[2].value) == (None, None)
    assert found[1].note == "n/a: 1 % of 5 non-members is less than one record"


def test_an_attack_that_is_wrong_more_often_than_chance_is_below_a_half():
    found = score_membership(np.arange(200.0), np.arange(200) < 100)
    assert found[0].value == 0.0
    assert found[1].value == 0.0


def test_membership_scores_that_are_not_finite_are_counted():
    scores = np.array([0.1, math.nan, math.inf, 0.4])
    with pytest.raises(ValueError, match="got 2 of 4 that are not"):
        score_membership(scores, np.array([True, False, True, False]))
    with pytest.raises(ValueError, match="expected scores"):
        score_membership(scores, np.array([True]))


def lineup_of(x, size=99):
    return torch.stack([images(f"other {at}", size, *x.shape[1:]) for at in range(len(x))])


def test_an_original_is_identified_by_what_is_nearer_to_it_than_to_all_others():
    x = images("x", 4, 1, 8, 8)
    others = lineup_of(x)
    assert identified(x, x, others).tolist() == [1, 1, 1, 1]
    assert identified(x, x + 0.2 * normal(ROOT, (4, 1, 8, 8)), others).tolist() == [1, 1, 1, 1]
    assert identified(x, others[:, 50], others).tolist() == [0, 0, 0, 0]
    # a tie is no identification, but an other that is the original itself does not count
    assert identified(torch.zeros(1, 2), torch.full((1, 2), 0.5), torch.ones(1, 1, 2)).tolist() == [0]
    assert identified(x, x, x[:, None].repeat(1, 3, 1, 1, 1)).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", ["flat", "another image"])
def test_a_blind_guess_identifies_one_in_a_hundred(kind):
    scenes = digits(Path()).train.x
    rows = torch.from_numpy(permutations(ROOT.child(kind), 1000, len(scenes)))[:, :101]
    x, others = scenes[rows[:, 0]], scenes[rows[:, 1:100]]
    blind = scenes.mean() * torch.ones_like(x) if kind == "flat" else scenes[rows[:, 100]]
    hits = int(identified(x, blind, others).sum())
    assert binomtest(hits, 1000, 0.01).pvalue > 0.01
    assert identified(x, 0.75 * x + 0.25 * blind, others).mean() > 0.9


def test_recognizable_is_an_identified_image_of_high_ssim():
    x = torch.full((2, 1, 8, 8), 0.5)
    x[1] = images("x", 1, 8, 8)
    found = by_name(score_reconstruction([x], [labels(0, 1)], [guess(x.clone(), labels(0, 1))], [lineup_of(x)])[0])
    assert found["identification"].values == found["recognized"].values == (1, 1)
    assert found["identification"].note.startswith("2 of 2 images")
    # a flat guess of a nearly flat image, among other nearly flat ones: SSIM cannot tell, a candidate set can
    flat = 0.5 + 1e-3 * normal(ROOT.child("flat"), (1, 1, 8, 8))
    among = 0.5 + 1e-3 * normal(ROOT.child("others"), (1, 99, 1, 8, 8))
    gray = guess(torch.full((1, 1, 8, 8), 0.5), labels(0))
    found = by_name(score_reconstruction([flat], [labels(0)], [gray], [among])[0])
    assert found["ssim"].value > 0.9
    assert found["identification"].value == found["recognized"].value == 0


def test_a_failed_victim_is_not_identified_and_features_have_lineups_too():
    x, y, guesses = three_victims()
    found = by_name(score_reconstruction(x, y, guesses, [lineup_of(each) for each in x])[0])
    assert found["identification"].values == (1, 1, 0, 0, 0, 0)
    features = images("features", 3, 5)
    exact = guess(features, labels(0, 1, 2))
    found = score_reconstruction([features], [labels(0, 1, 2)], [exact], [lineup_of(features)])
    assert [one.name for one in found[0]] == ["mse", "label_accuracy", "identification", "failed"]
    assert found[0][2].value == 1
