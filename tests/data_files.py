"""Shared by the tests of data sets: the real ones beside the checkout, and pixels for small ones."""

from pathlib import Path

import numpy as np
import pytest

from leakgauge import Key, rng
from leakgauge.harness import data

REAL = Path(__file__).parents[2] / "shared" / "data"
KEY = Key(0, ("test_data",))


def real(name):
    """A data set beside the checkout."""
    if not (REAL / name).is_dir():
        pytest.skip("real data not beside the checkout")
    return data.load(name, REAL)


def pixels(*shape, name="pixels"):
    return rng.integers(KEY.child(name, *shape), int(np.prod(shape)), 256).astype(np.uint8).reshape(shape)


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text
