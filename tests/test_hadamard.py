"""The Walsh-Hadamard transform against its matrix, its inverse and a printed value."""

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from leakgauge.defenses._common import hadamard as module
from leakgauge.defenses._common.hadamard import fast_walsh_hadamard
from leakgauge.harness.core.rng import Key, integers, normal

DTYPES = [torch.float32, torch.float64]


def whole(*shape, dtype=torch.float64):
    """Small integers as floats: their transforms are exact."""
    return torch.from_numpy(integers(Key(1, shape), int(np.prod(shape)), 17).reshape(shape) - 8).to(dtype)


def test_the_rotation_of_sqsgd_has_the_golden_value():  # worked by hand
    signs, x = torch.tensor([1.0, -1.0, -1.0, 1.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    rotated = fast_walsh_hadamard(signs * x) / 2
    assert rotated.tolist() == [0, -2, -1, 5]
    assert (signs * fast_walsh_hadamard(rotated) / 2).tolist() == x.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_product_with_sylvesters_matrix(dtype):
    for n in (2**bits for bits in range(12)):
        x = whole(3, n, dtype=dtype)
        assert torch.equal(fast_walsh_hadamard(x), x @ torch.from_numpy(hadamard(n)).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [13, 17, 20])
def test_a_unit_vector_becomes_its_row_of_signs(bits, dtype):
    n, one = 2**bits, 2**bits * 5 // 7
    x = torch.zeros(n, dtype=dtype)
    x[one] = 1
    odd = np.bitwise_count(np.arange(n) & one) % 2
    assert torch.equal(fast_walsh_hadamard(x), torch.from_numpy(1.0 - 2.0 * odd).to(dtype))


@pytest.mark.parametrize(("dtype", "roundings"), [(torch.float32, 2.0**-24), (torch.float64, 2.0**-53)])
@pytest.mark.parametrize("n", [1, 2, 32, 2**9, 2**17])
def test_twice_is_n_times_the_identity(n, dtype, roundings):
    x = normal(Key(2), (2, n), dtype)
    twice = fast_walsh_hadamard(fast_walsh_hadamard(x))
    # each addition rounds by at most half an ulp: the l2 error is under a rounding for each of 2 log2(n) levels
    assert (twice / n - x).norm() <= 2 * (1 + 4 * np.log2(n)) * roundings * x.norm()


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 64), (0, 16), (3, 1), (7, 2**10)])
def test_every_row_is_transformed_by_itself(shape):
    x = whole(*shape)
    got = fast_walsh_hadamard(x)
    assert got.shape == x.shape
    assert got.dtype == x.dtype
    rows = [fast_walsh_hadamard(row) for row in x.reshape(-1, shape[-1])] if x.numel() else []
    assert torch.equal(got.reshape(-1, shape[-1]), torch.stack(rows) if rows else got.reshape(-1, shape[-1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2**9,), (3, 2**10), (0, 2**9), (2, 2, 2**11)])
@pytest.mark.parametrize("chunk", [1, 2**6, 2**20])
def test_two_passes_over_memory_give_the_same(shape, chunk, dtype, monkeypatch):
    x = whole(*shape, dtype=dtype)
    expected, before = fast_walsh_hadamard(x), x.clone()
    monkeypatch.setattr(module, "_LARGE", 2**8)
    monkeypatch.setattr(module, "_CHUNK", chunk)
    found = fast_walsh_hadamard(x)
    assert torch.equal(found, expected)
    found.fill_(3.0)
    assert torch.equal(x, before)


@pytest.mark.parametrize("n", [1, 4, 2**9])
def test_the_input_is_neither_modified_nor_shared(n):
    x = whole(2, n)
    before = x.clone()
    fast_walsh_hadamard(x).fill_(3.0)
    fast_walsh_hadamard(x[0]).fill_(3.0)
    assert torch.equal(x, before)


def test_strided_tensors_pass():
    x = whole(16, 6)
    assert torch.equal(fast_walsh_hadamard(x.T), fast_walsh_hadamard(x.T.contiguous()))


def test_its_gradient_is_the_transform_of_the_gradient():
    x, weight = whole(2, 64).requires_grad_(), whole(1, 64)
    (gradient,) = torch.autograd.grad((fast_walsh_hadamard(x) * weight).sum(), x)
    assert torch.equal(gradient, fast_walsh_hadamard(weight).expand(2, 64))


@pytest.mark.parametrize("shape", [(3,), (4, 6), (0,), (2, 0), ()])
def test_a_length_that_is_no_power_of_two_is_refused(shape):
    with pytest.raises(ValueError, match="power of two, got shape"):
        fast_walsh_hadamard(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16])
def test_other_numbers_than_floats_and_doubles_are_refused(dtype):
    with pytest.raises(ValueError, match="expected float32 or float64, got"):
        fast_walsh_hadamard(torch.zeros(4, dtype=dtype))
