"""Checks of a defense, an attack or a task in a test suite; `leakgauge doctor` prints the same checks.

def test_my_defense():
    check_defense(MyDefense)
"""

from leakgauge.harness.integrations.findings import ConformanceError, Finding
from leakgauge.harness.integrations.quick import Effort
from leakgauge.harness.integrations.suite import check_attack, check_defense, check_task, checks_of

__all__ = ["ConformanceError", "Effort", "Finding", "check_attack", "check_defense", "check_task", "checks_of"]
