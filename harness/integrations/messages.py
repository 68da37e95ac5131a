"""A user's messages as flat vectors in the order of a model's layout, or refused with a one-line error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leakgauge.harness.core.vec import Layout, Vector

TrainStep = Callable[[nn.Module, Tensor, Tensor], object]
"""(model, x, y) -> a message, or None if the function trains the model in place."""

_STATISTICS = ("running_mean", "running_var")


class Names(NamedTuple):
    """The tensors that messages may hold.

    Attributes:
        layout: of the flat vector.
        statistics: the tensors in the layout that are running statistics of batch norms.
        ignored: other tensors of the model; a state_dict may hold them, the vector does not.
    """

    layout: Layout
    statistics: frozenset[str]
    ignored: frozenset[str] = frozenset()

    @classmethod
    def of(cls, layout: Layout, module: nn.Module | None) -> Names:
        """The names of a model."""
        statistics = frozenset(name for name in layout.names if name.rpartition(".")[2] in _STATISTICS)
        others = set() if module is None else set(module.state_dict(keep_vars=False)) - set(layout.names)
        return cls(layout, statistics, frozenset(others))

    @property
    def parameters(self) -> Layout:
        """The layout without running statistics: the order of `model.parameters()`."""
        pairs = zip(self.layout.names, self.layout.shapes, strict=True)
        kept = [pair for pair in pairs if pair[0] not in self.statistics]
        return Layout(tuple(name for name, _ in kept), tuple(shape for _, shape in kept))


def flattened(messages: Sequence[object], names: Names) -> tuple[Sequence[Vector | bytes], bool]:
    """The messages as vectors [d], and whether they hold the running statistics of batch norms; bytes stay bytes.

    Raises:
        ValueError: a message does not fit the model; names the message and its first wrong tensor, expected and got.
    """
    if encoded := [message for message in messages if isinstance(message, bytes)]:
        if len(encoded) < len(messages):
            raise ValueError(
                f"expected bytes in all messages or in none, got them in {len(encoded)} of {len(messages)}"
            )
        return encoded, True
    flat = [_flat(message, names, f"message {number}") for number, message in enumerate(messages)]
    kinds = {complete for _, complete in flat}
    if len(kinds) > 1:
        raise ValueError("expected running statistics in all messages or in none: some have them")
    return [vector for vector, _ in flat], kinds == {True}


def _flat(message: object, names: Names, what: str) -> tuple[Vector, bool]:
    """One message, and whether it is complete."""
    if isinstance(message, Tensor):
        return _one_tensor(message, names, what)
    if isinstance(message, Mapping):
        layout, tensors = _by_name(message, names, what)
    elif isinstance(message, list | tuple):
        layout = names.layout if len(message) == len(names.layout.names) else names.parameters
        if len(message) != len(layout.names):
            text = f"expected {len(layout.names)} tensors, one for each of model.parameters(), got {len(message)}"
            first = (
                f"; the first that is missing is {layout.names[len(message)]!r}"
                if len(message) < len(layout.names)
                else ""
            )
            raise ValueError(f"{what}: {text}{first}")
        tensors = list(message)
    else:
        kind = type(message).__name__
        raise ValueError(f"{what}: expected a flat tensor, a list of tensors or a dictionary by name, got {kind}")
    checked = [
        _checked(tensor, name, shape, what, number)
        for number, (tensor, name, shape) in enumerate(zip(tensors, layout.names, layout.shapes, strict=True))
    ]
    return layout.join(checked), layout == names.layout


def _one_tensor(message: Tensor, names: Names, what: str) -> tuple[Vector, bool]:
    sizes = [names.parameters.dim, names.layout.dim]
    if message.ndim != 1 or len(message) not in sizes:
        wanted = " or ".join(f"{size:,}" for size in dict.fromkeys(sizes))
        raise ValueError(f"{what}: expected a flat tensor of {wanted} numbers, got shape {tuple(message.shape)}")
    layout = names.layout if len(message) == names.layout.dim else names.parameters
    vector = message.detach().to("cpu", torch.float32)
    for name, tensor in zip(layout.names, layout.split(vector), strict=True):
        _finite(tensor, name, what)
    return vector.clone(), layout == names.layout


def _by_name(message: Mapping[object, object], names: Names, what: str) -> tuple[Layout, list[object]]:
    """The tensors of a dictionary in the order of the layout, whatever its own order."""
    has_statistics = any(name in message for name in names.statistics)
    layout = names.layout if has_statistics else names.parameters
    for name in layout.names:
        if name not in message:
            raise ValueError(f"{what}: expected a tensor {name!r}, got none; it has {_some(message)}")
    for other in message:
        if other not in layout.names and other not in names.ignored:
            raise ValueError(f"{what}: the model has no tensor {other!r}; it has {_some(layout.names)}")
    return layout, [message[name] for name in layout.names]


def _some(names: Collection[object]) -> str:
    shown = ", ".join(repr(name) for name in list(names)[:4])
    return f"{shown}, ..." if len(names) > 4 else shown or "none"


def _checked(tensor: object, name: str, shape: tuple[int, ...], what: str, number: int) -> Tensor:
    """A finite tensor of this shape, as float32."""
    if tensor is None:
        raise ValueError(
            f"{what}: tensor {number} ({name!r}) is None: no gradient reaches it; give zeros, or freeze it"
        )
    if not isinstance(tensor, Tensor):
        tensor = torch.as_tensor(tensor)
    if tuple(tensor.shape) != shape:
        text = f"tensor {number}: expected {name!r} of shape {shape}, got shape {tuple(tensor.shape)}"
        raise ValueError(f"{what}: {text}; the order is that of model.parameters()")
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{what}: tensor {number}: expected {name!r} of real numbers, got {tensor.dtype}")
    values = tensor.detach().to("cpu", torch.float32)
    _finite(values, name, what)
    return values


def _finite(tensor: Tensor, name: str, what: str) -> None:
    if wrong := int((~tensor.isfinite()).sum()):
        raise ValueError(f"{what}: expected finite numbers, got {wrong} of {tensor.numel()} that are not in {name!r}")


def stepped(
    train_step: TrainStep, module: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], sends: str, names: Names
) -> list[object]:
    """The message of a user's training for each batch, by name if it trains in place; the model is not changed.

    Raises:
        ValueError: the training fails, or trains in place although gradients are sent.
    """
    messages: list[object] = []
    for number, (x, y) in enumerate(batches):
        own = copy.deepcopy(module)
        try:
            sent = train_step(own, x.clone(), y.clone())
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ValueError(f"train_step failed for victim {number}: {text}") from error
        if sent is None and sends == "gradient":
            raise ValueError(
                "train_step returned nothing, so its update counts: say sends='update', or return gradients"
            )
        if sent is None:
            before, after = module.state_dict(), own.state_dict()
            sent = {name: after[name].detach() - before[name].detach() for name in names.layout.names}
            if not any(bool(tensor.any()) for tensor in sent.values()):
                raise ValueError(
                    "train_step returned nothing, and changed nothing: expected it to train the model in place"
                )
        messages.append(sent)
    return messages
