"""Shared by all tests: one thread, and the folder of the real data."""

import gc
import importlib.util
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import settings

collect_ignore = [] if importlib.util.find_spec("ray") else ["test_ray.py"]

torch.set_num_threads(1)
os.environ["LEAKGAUGE_ALLOW_CODE"] = "1"  # studies of tests name doubles; without it: tests/test_strangers.py
os.environ["LEAKGAUGE_CACHE"] = "off"  # a test must not pass by what was computed before: tests/test_cache.py
for name in ("CI", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):  # a test that is about CI sets them itself
    os.environ.pop(name, None)
gc.disable()
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")

_LONG = ("tests/test_site.py::test_a_page_runs", "tests/test_notebooks.py::test_a_notebook_runs")


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real data not beside the checkout")
    return folder


@pytest.fixture(scope="module")
def digits():
    from leakgauge.harness.data import load

    return load("digits", Path()).train


@pytest.fixture
def without_fit(monkeypatch):
    """Audits without the goodness-of-fit test, which takes longer than few trials: for tests of bounds and verdicts."""
    monkeypatch.setattr("leakgauge.harness.audit.standalone.check_fit", lambda *_: None)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the rows of a test with `table(n)`, all but each n-th are of the matrix. What takes longest comes first."""
    seen = Counter[str]()
    for item in items:
        table, name = item.get_closest_marker("table"), item.nodeid.partition("[")[0]
        if table is not None:
            if seen[name] % table.args[0]:
                item.add_marker(pytest.mark.matrix)
            seen[name] += 1
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))  # so that no process is left alone with it


def pytest_collection_finish() -> None:
    """Modules and tests stay: a full garbage collection would walk their 600,000 objects, in half a second each."""
    gc.freeze()
    gc.enable()
