"""Opacus: `inspect` states the epsilon of a training, audits its optimizer, and attacks its gradients."""

from leakgauge.harness.cli.opacus import Inspection, inspect
from leakgauge.harness.integrations.opacus import OpacusError

__all__ = ["Inspection", "OpacusError", "inspect"]
