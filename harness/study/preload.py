"""What a worker needs for any job: the fork server imports it once."""

from leakgauge.harness.federation import registry
from leakgauge.harness.study import jobs  # noqa: F401

registry.classes("defense")
registry.classes("attack")
