"""The one place that imports torchvision.

torchvision's Linux wheel on PyPI is built against the CUDA build of torch. Beside a CPU-only torch its compiled
operators cannot be loaded, and `import torchvision` then fails with "operator torchvision::nms does not exist",
although its readers need no operator. Two declared schemas are all that is missing.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType

import torch

_OPERATORS = ("nms", "qnms")
_declared: list[torch.library.Library] = []
"""Keeps the declarations alive: a schema goes away with the `Library` that made it."""


@functools.cache
def torchvision() -> ModuleType:
    """The module `torchvision`, importable beside a CPU-only torch too.

    Guarantees:
        Where a plain import works, nothing is declared.
        A declared operator has a schema and no kernel: calling it raises NotImplementedError.

    Raises:
        ImportError: torchvision is not installed.
        RuntimeError: the import fails for another reason.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
    _declare()
    # the failed import leaves submodules behind, which a second import would not bind to the new package
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    return importlib.import_module("torchvision")


def _declare() -> None:
    """Declare the operators that are not there."""
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in _OPERATORS:
        if getattr(torch.ops.torchvision, name, None) is None:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    _declared.append(library)
