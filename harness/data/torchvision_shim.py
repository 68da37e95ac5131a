"""The only module that imports torchvision.

torchvision's Linux wheel on PyPI is built for the CUDA build of torch. With a CPU-only torch, `import torchvision`
fails with "operator torchvision::nms does not exist", although torchvision's readers need no operator. Declaring two
schemas is enough.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType

import torch

_OPERATORS = ("nms", "qnms")
# Networks that in training also return the scores of auxiliary classifiers, unless they are built without them
_AUXILIARY = ("googlenet", "inception_v3")
_declared: list[torch.library.Library] = []  # keeps the declarations alive: a schema disappears with its `Library`


@functools.cache
def torchvision() -> ModuleType:
    """The module `torchvision`, also with a CPU-only torch.

    Guarantees:
        If a plain import works, nothing is declared.
        A declared operator has a schema but no kernel: calling it raises NotImplementedError.

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
    # the failed import leaves submodules, which a second import would not bind to the new package
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    return importlib.import_module("torchvision")


def _declare() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in _OPERATORS:
        if getattr(torch.ops.torchvision, name, None) is None:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    _declared.append(library)


def classifiers() -> list[str]:
    """The names of torchvision's image classifiers.

    Raises:
        ImportError, RuntimeError: as `torchvision`.
    """
    models = torchvision().models
    return list(models.list_models(module=models))


def classifier(name: str, num_classes: int) -> torch.nn.Module:
    """An image classifier of torchvision without auxiliary classifiers; torch's global generator draws its weights."""
    plain = {"aux_logits": False, "init_weights": True} if name in _AUXILIARY else {}
    net: torch.nn.Module = torchvision().models.get_model(name, num_classes=num_classes, weights=None, **plain)
    return net
