"""A pytest plugin: the fixture `leakage`, for defenses in somebody's own tests.

    def test_my_defense(leakage):
        leak = leakage(MyDefense(clip=1.0))
        leak.assert_below(0.3)
        leak.assert_recognizable(at_most=0)
        leak.assert_no_increase()

Every test has a baseline file of its own, so that tests may run side by side. Nothing heavy is imported before a test
asks for the fixture.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from leakgauge.harness.cli.fixture import Leakage


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the fixture."""
    group = parser.getgroup("leakgauge", "leakage of federated-learning defenses")
    group.addoption(
        "--leakage-baseline", metavar="DIR", default="leakage", help="Folder of baselines, from the root of the tests."
    )
    group.addoption(
        "--leakage-update", metavar="REASON", help="Make the present numbers the baselines; refused where CI is set."
    )
    group.addoption(
        "--leakage-inconclusive", choices=("warn", "fail"), default="warn", help="Of checks that cannot tell."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse an update without a reason, or in CI."""
    reason = config.getoption("--leakage-update")
    if reason is None:
        return
    if not reason.strip():
        raise pytest.UsageError("--leakage-update: say why these numbers are accepted")
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        raise pytest.UsageError("--leakage-update: refused where CI is set; a person accepts numbers, and commits them")


@pytest.fixture
def leakage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Leakage:
    """Attacks a defense: `leakage(MyDefense())`; see `harness.cli.fixture.Leakage`."""
    from leakgauge.harness.cli.fixture import Leakage, Options

    config = request.config
    return Leakage(
        Options(
            folder=config.rootpath / config.getoption("--leakage-baseline"),
            update=config.getoption("--leakage-update"),
            inconclusive=config.getoption("--leakage-inconclusive"),
            scratch=tmp_path_factory.mktemp("leakage"),
            test=request.node.nodeid,
        )
    )
