"""Flower apps: `tap` records what clients send, `defend` and `defended` apply a defense to it.

Needs the extra `flower`; a tap alone needs numpy and flwr.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("flwr") is None:
    raise ImportError("leakgauge.flower needs Flower: from a checkout, pip install '.[flower]'")

from leakgauge.harness.federation.recorder import Facts
from leakgauge.harness.integrations.flower_tap import numbered, recorded, tap

if TYPE_CHECKING:
    from leakgauge.harness.integrations.flower import defend, defended

__all__ = ["Facts", "defend", "defended", "numbered", "recorded", "tap"]


def __getattr__(name: str) -> Any:
    """Import what needs torch at its first use."""
    if name in ("defend", "defended"):
        return getattr(importlib.import_module("leakgauge.harness.integrations.flower"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
