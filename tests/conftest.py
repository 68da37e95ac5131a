"""Shared by all tests: one thread, and the folder of the real data."""

import functools
import gc
import importlib.util
import os
import zlib
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


@pytest.fixture(scope="session", autouse=True)
def _made_once():
    """What gives the same in every test is made once: the names in a source.

    Nothing waits for the disk, because no test loses power; tests of this set `os.fsync` themselves.
    """
    from leakgauge.harness.study import environment

    named = environment.named_modules
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(environment, "named_modules", functools.cache(lambda *given: tuple(named(*given))))
        yield


@pytest.fixture(scope="module")
def digits():
    from leakgauge.harness.data import load

    return load("digits", Path()).train


@pytest.fixture
def without_fit(monkeypatch):
    """Audits without the goodness-of-fit test, which takes longer than few trials: for tests of bounds and verdicts."""
    monkeypatch.setattr("leakgauge.harness.audit.standalone.check_fit", lambda *_: None)


@pytest.fixture
def young(request, monkeypatch):
    """In rows that are not slow, audits follow a client for 100 messages instead of 10,000.

    For liars: whatever is found so, a whole audit finds, too. Honest code has whole audits elsewhere.
    """
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr("leakgauge.harness.audit.keys._LATE", (100,))


def _named(ci: pytest.Mark) -> set[str]:
    return {row for row in (*ci.args, *ci.kwargs.get("without", ())) if isinstance(row, str)}


def _in_ci(ci: pytest.Mark, item: pytest.Item, number: int) -> bool:
    """Whether CI runs this row, the one of this number."""
    if ci.args and isinstance(ci.args[0], int):
        return number % ci.args[0] == 0
    named = item.nodeid.partition("[")[2][:-1] in _named(ci)
    return named != ("without" in ci.kwargs)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Rows of tests with `table` or `ci` get their markers. What takes longest comes first.

    MATRIX=K/N leaves only part K, from 0, of N of the rows that are `matrix`.
    """
    seen, missing = Counter[str](), set[str]()
    part, parts = map(int, os.environ.get("MATRIX", "0/1").split("/"))
    for item in items:
        name = item.nodeid.partition("[")[0]
        table, ci = item.get_closest_marker("table"), item.get_closest_marker("ci")
        if table is not None and seen[name] % table.args[0]:
            item.add_marker(pytest.mark.matrix)
        if item.get_closest_marker("matrix") is not None and zlib.crc32(item.nodeid.encode()) % parts != part:
            item.add_marker(pytest.mark.slow)
        if ci is not None:
            missing |= set() if seen[name] else {f"{name}[{row}]" for row in _named(ci)}
            if not _in_ci(ci, item, seen[name]):
                item.add_marker(pytest.mark.slow)
        seen[name] += 1
        missing.discard(item.nodeid)
    if missing and not any("::" in given for given in config.args):
        raise pytest.UsageError(f"ci names rows that do not exist: {', '.join(sorted(missing))}")
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))  # so that no process is left alone with it


def pytest_collection_finish() -> None:
    """Modules and tests stay: a full garbage collection would walk their 600,000 objects, in half a second each."""
    gc.freeze()
    gc.enable()
