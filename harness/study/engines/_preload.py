"""Imports that a worker needs for any job; the fork server imports this module once."""

from leakgauge.harness.federation import registry
from leakgauge.harness.study import attack, training  # noqa: F401

registry.classes("defense")
registry.classes("attack")
