"""leakgauge measures how much a federated-learning defense really leaks.

Public names are imported at their first use, so the command starts without torch.
"""

TYPE_CHECKING = False  # imports nothing, because `python -m leakgauge` starts with the working folder in its path
if TYPE_CHECKING:
    from typing import Any

    from leakgauge.harness.audit.claims import claim
    from leakgauge.harness.audit.standalone import audit
    from leakgauge.harness.cli.inspect import inspect
    from leakgauge.harness.cli.python import report, run
    from leakgauge.harness.core.contract import Attack, Defense, Task
    from leakgauge.harness.core.result import Run
    from leakgauge.harness.core.rng import Key
    from leakgauge.harness.study.store import load_run
    from leakgauge.harness.study.study import Study, load_study

__version__ = "0.1.0"

__all__ = [
    "Attack",
    "Defense",
    "Key",
    "Run",
    "Study",
    "Task",
    "__version__",
    "audit",
    "claim",
    "inspect",
    "load_run",
    "load_study",
    "report",
    "run",
]

_WHERE = {
    "Attack": ("core.contract", "Attack"),
    "Defense": ("core.contract", "Defense"),
    "Key": ("core.rng", "Key"),
    "Run": ("core.result", "Run"),
    "Study": ("study.study", "Study"),
    "Task": ("core.contract", "Task"),
    "audit": ("audit.standalone", "audit"),
    "claim": ("audit.claims", "claim"),
    "inspect": ("cli.inspect", "inspect"),
    "load_study": ("study.study", "load_study"),
    "load_run": ("study.store", "load_run"),
    "report": ("cli.python", "report"),
    "run": ("cli.python", "run"),
}


def __getattr__(name: str) -> "Any":
    """Import a public name at its first use."""
    import importlib

    if name not in _WHERE:
        raise AttributeError(f"module 'leakgauge' has no attribute {name!r}; it has: {', '.join(__all__)}")
    module, attribute = _WHERE[name]
    return getattr(importlib.import_module(f"leakgauge.harness.{module}"), attribute)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
