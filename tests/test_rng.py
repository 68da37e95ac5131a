import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from harness import rng
from harness.rng import Key

ALPHA = 1e-6
"""False-alarm rate of every statistical test in this file."""


def test_equal_keys_draw_equal_numbers_and_children_differ():
    key = Key(3).child("round", 1)
    assert torch.equal(rng.normal(key, (5,)), rng.normal(Key(3, ("round", 1)), (5,)))
    assert not torch.equal(rng.normal(key.child("a"), (5,)), rng.normal(key.child("b"), (5,)))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (Key(5), Key(5 + 2**32)),  # one stream for a CPU torch.Generator
        (Key(1, ("2",)), Key(1, (2,))),
        (Key(1, ("a", "b")), Key(1, ("a,b",))),
        (Key(12), Key(1, (2,))),
        (Key(-1), Key(1)),
    ],
)
def test_different_names_are_different_streams(left, right):
    assert not torch.equal(rng.normal(left, (8,)), rng.normal(right, (8,)))


def test_a_key_draws_the_same_in_another_process():
    code = "from harness import rng; print(rng.normal(rng.Key(7).child('x', 1), (3,)).numpy().tobytes().hex())"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert there == rng.normal(Key(7).child("x", 1), (3,)).numpy().tobytes().hex()


@pytest.mark.parametrize("seed", [1.0, "1", True])
def test_a_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(TypeError, match="expected an integer seed"):
        Key(seed)


def test_permutations_are_independent_permutations():
    rows = rng.permutations(Key(0), 50, 20)
    assert (np.sort(rows, axis=1) == np.arange(20)).all()
    assert len({tuple(row) for row in rows}) == 50


def test_a_subset_is_sorted_and_without_repeats():
    chosen = rng.subset(Key(0), 100, 30)
    assert (np.diff(chosen) > 0).all()
    assert len(chosen) == 30
    assert list(rng.subset(Key(0), 4, 4)) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="subset of 0 to 4 elements, got size=5"):
        rng.subset(Key(0), 4, 5)


LAWS = [
    (rng.normal, stats.norm.cdf),
    (rng.laplace, stats.laplace.cdf),
    (lambda key, shape, dtype: rng.uniform(key, shape, -1.0, 1.0, dtype), stats.uniform(-1, 2).cdf),
]


@pytest.mark.parametrize(("draw", "cdf"), LAWS)
def test_draws_have_their_law(draw, cdf):
    # 300,000 draws see a scale off by 6 % (effect over 0.01 in the distribution function) with a miss rate under 1e-6
    x = draw(Key(11).child("law"), (300_000,), torch.float64).numpy()
    assert stats.kstest(x, cdf).pvalue > ALPHA
    assert stats.kstest(1.06 * x, cdf).pvalue < ALPHA
