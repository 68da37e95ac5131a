"""Without the package of an extra, what needs it says what to install; everything else works.

The tests with Flower are in tests/flower, those with Ray in tests/test_ray.py.
"""

import importlib
import importlib.util

import pytest

from leakgauge.harness.cli.options import engine_of
from leakgauge.harness.core.errors import StudyError


@pytest.mark.skipif(importlib.util.find_spec("flwr") is not None, reason="Flower is installed")
def test_without_flower_its_module_says_what_to_install():
    with pytest.raises(ImportError, match=r"Flower: from a checkout, pip install '\.\[flower\]'"):
        importlib.import_module("leakgauge.flower")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_its_engine_says_what_to_install():
    with pytest.raises(StudyError, match=r"^engine: Ray is not installed: from a checkout, pip install '\.\[ray\]'$"):
        engine_of("ray", None, None)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (("dask", None, None), "expected workers or ray, got 'dask'"),
        (("workers", "10.0.0.1:6379", None), "an address needs the engine ray, got --address 10.0.0.1:6379 without it"),
        (("ray", None, 0), "ray needs worker processes: expected workers >= 1, got workers=0"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_in_one_line(asked, text):
    with pytest.raises(StudyError) as raised:
        engine_of(*asked)
    assert str(raised.value) == f"engine: {text}"


def test_the_default_engine_is_none_of_these():
    assert engine_of("workers", None, 3) is None
