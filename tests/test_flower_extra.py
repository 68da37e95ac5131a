"""Without Flower, its module says what to install; everything else works. The tests with it are in tests/flower."""

import importlib
import importlib.util

import pytest


@pytest.mark.skipif(importlib.util.find_spec("flwr") is not None, reason="Flower is installed")
def test_without_flower_its_module_says_what_to_install():
    with pytest.raises(ImportError, match=r"not installed: pip install 'leakgauge\[flower\]'"):
        importlib.import_module("leakgauge.flower")
