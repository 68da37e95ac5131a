"""A pytest plugin: the fixture `leakage`, for the tests of a user's own defense.

    def test_my_defense(leakage):
        leak = leakage(MyDefense(clip=1.0))
        leak.assert_below(0.3)
        leak.assert_recognizable(at_most=0)
        leak.assert_no_increase()

Every test has its own baseline file, so tests may run in parallel. Heavy modules are imported only when a test uses
the fixture.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from leakgauge.harness.cli.fixture import Leakage


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the fixture."""
    group = parser.getgroup("leakgauge", "leakage of federated-learning defenses")
    group.addoption("--leakage-baseline", metavar="DIR", default="leakage", help="Baselines, under the test root.")
    group.addoption("--leakage-update", metavar="REASON", help="Make the current numbers the baselines; not in CI.")
    choices = ("warn", "fail")
    group.addoption("--leakage-inconclusive", choices=choices, default="warn", help="Result of an inconclusive check.")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse an update without a reason, or in CI."""
    reason = config.getoption("--leakage-update")
    if reason is None:
        return
    if not reason.strip():
        raise pytest.UsageError("--leakage-update: say why these numbers are accepted")
    if os.environ.get("CI", "").strip().lower() not in ("", "0", "false"):
        raise pytest.UsageError("--leakage-update: refused because CI is set; a person accepts and commits baselines")


@pytest.fixture
def leakage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Leakage:
    """A callable that attacks a defense: `leakage(MyDefense())`; see `harness.cli.fixture.Leakage`."""
    from leakgauge.harness.cli.fixture import Leakage

    return Leakage(request.config, tmp_path_factory.mktemp("leakage"), request.node.nodeid)
