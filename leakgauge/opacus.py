"""Opacus: `inspect` says what a training promises, audits its own optimizer, and attacks its gradients."""

from leakgauge.harness.cli.opacus import Inspection, inspect
from leakgauge.harness.own.opacus import OpacusError

__all__ = ["Inspection", "OpacusError", "inspect"]
