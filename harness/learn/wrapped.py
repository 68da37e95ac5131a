"""What is around a user's network, such as `DataParallel`, and around its scores, such as a dictionary."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_SEGMENTS = {"module", "_module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""What wrappers put into the names of tensors."""

_SCORES = ("logits", "scores", "out", "output")
"""Names of the scores in a result of several parts; the first one that is there counts."""


def bare(module: nn.Module) -> nn.Module:
    """The network inside `DataParallel`, `torch.compile` and the wrapper of Opacus."""
    while True:
        inner: Any = module  # the wrappers' attributes have no types
        if isinstance(module, DataParallel | DistributedDataParallel):
            module = inner.module
        elif type(module).__name__ == "OptimizedModule":  # its class is imported only with the compiler
            module = inner._orig_mod
        elif _is_of_opacus(module):
            module = inner._module
        else:
            return module


def unwrap(module: nn.Module, outputs: int) -> nn.Module:
    """The network without wrappers around it or its layers, which returns its scores alone.

    Args:
        module: a private copy; modified.
        outputs: number of scores, which tells them from other parts of a result; 0: unknown.
    """
    opacus: list[Any] = list(filter(_is_of_opacus, module.modules()))
    for wrapper in opacus:
        wrapper.to_standard_module()  # takes its hooks off
    module = bare(module)
    for layer in list(module.modules()):
        for name, child in layer.named_children():
            if bare(child) is not child:
                setattr(layer, name, bare(child))
    module.register_forward_hook(partial(_scores_alone, outputs))
    return module


def plain_name(name: str) -> str:
    """The name of a tensor without what wrappers put into it."""
    return ".".join(word for word in name.split(".") if word not in _SEGMENTS)


def _is_of_opacus(module: nn.Module) -> bool:
    return type(module).__module__.startswith("opacus.grad_sample")


def _scores_alone(outputs: int, module: nn.Module, inputs: object, result: Any) -> Any:
    """The scores in the result of a forward, or the whole result if nothing tells which part they are."""
    if isinstance(result, Tensor):
        return result
    named: Mapping[str, Any] = {}
    if isinstance(result, Mapping):
        named = result
    elif isinstance(result, tuple) and hasattr(result, "_asdict"):
        named = result._asdict()
    elif dataclasses.is_dataclass(result):
        named = vars(result)
    for name in _SCORES:
        if named.get(name) is not None:
            return _scores_alone(outputs, module, inputs, named[name])
    parts = list(named.values()) if named else list(result) if isinstance(result, tuple | list) else []
    fitting = [part for part in parts if isinstance(part, Tensor) and part.ndim == 2]
    fitting = [part for part in fitting if part.shape[1] == outputs] if outputs else fitting
    return fitting[0] if len(fitting) == 1 else result
