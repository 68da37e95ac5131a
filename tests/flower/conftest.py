"""Tests on Flower's simulation; `.ci/flower` runs them in an environment of their own."""

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("flwr") is None else []
