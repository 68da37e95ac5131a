"""Flower apps: `tap` records what clients send, `defend` and `defended` apply a defense to it.

Needs the extra `flower`.
"""

import importlib.util

if importlib.util.find_spec("flwr") is None:
    raise ImportError("leakgauge.flower needs Flower: from a checkout, pip install '.[flower]'")

from leakgauge.harness.federation.recording import Facts
from leakgauge.harness.integrations.flower import defend, defended
from leakgauge.harness.integrations.flower_tap import numbered, recorded, tap

__all__ = ["Facts", "defend", "defended", "numbered", "recorded", "tap"]
