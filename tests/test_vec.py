import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakgauge.harness.core.vec import Layout, weighted_mean

LAYOUT = Layout(("w", "b", "v"), ((2, 3), (2,), (1, 2, 2)))


def test_split_gives_views_and_join_undoes_it():
    flat = torch.arange(12.0)
    parts = LAYOUT.split(flat)
    assert [tuple(part.shape) for part in parts] == [(2, 3), (2,), (1, 2, 2)]
    assert torch.equal(LAYOUT.join(parts), flat)
    several = torch.zeros(3, 12)
    LAYOUT.split(several)[1].fill_(1.0)
    assert several.sum() == 6
    with pytest.raises(ValueError, match=r"expected a last axis of 12 entries, got \(11,\)"):
        LAYOUT.split(torch.zeros(11))


def test_a_layout_needs_one_shape_per_name():
    with pytest.raises(ValueError, match="got 2 names and 1 shapes"):
        Layout(("a", "b"), ((1,),))


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=8))
def test_the_weighted_mean_of_one_vector_repeated_is_that_vector(weights):
    vector = torch.tensor([1.0, -2.0, 1e-6])
    assert torch.allclose(weighted_mean([vector] * len(weights), weights), vector, rtol=1e-6)


def test_the_weighted_mean_needs_vectors_and_weight():
    mean = weighted_mean([torch.tensor([0.0]), torch.tensor([1.0])], [1, 3])
    assert mean == 0.75
    assert mean.dtype == torch.float32
    with pytest.raises(ValueError, match="at least one vector"):
        weighted_mean([], [])
    with pytest.raises(ValueError, match="positive sum"):
        weighted_mean([torch.zeros(1)], [0.0])
