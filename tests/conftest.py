"""Shared by all tests: one thread, and the folder of the real data."""

from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real data not beside the checkout")
    return folder


@pytest.fixture
def without_law(monkeypatch):
    """Audits without the test of the law, which takes longer than few trials: for tests of bounds and verdicts."""
    monkeypatch.setattr("leakgauge.harness.audit.standalone.check_law", lambda *_: None)
