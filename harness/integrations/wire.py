"""A defense in a small federation: its messages, and what is read from them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Defense, Message, Sender, Setting
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.federation.round import Client, Exchange, Round
from leakgauge.harness.integrations.findings import Fault

DIM = 50
"""Default length of an update."""

SENDER = Sender(0, 8)
"""The client whose messages are examined."""


@dataclasses.dataclass(frozen=True)
class Wire:
    """Messages of a defense in a small federation; numbers name keys."""

    defense: Defense[Any, Any]
    dim: int = DIM

    @functools.cached_property
    def round_(self) -> Round:
        """The first round, of four clients with eight samples and a model of two tensors."""
        sizes = (self.dim - self.dim // 3, self.dim // 3) if self.dim > 2 else (self.dim,)
        layout = Layout(tuple(f"tensor {k}" for k in range(len(sizes))), tuple((size,) for size in sizes))
        setting = Setting(layout, 4, 4, 3, sends="gradient", steps=1, lr=0.1, batch=8, samples=8)
        return Round(self.defense, setting, self.defense.init(setting))

    @property
    def clip(self) -> float:
        """The norm to which the defense clips an update, by its parameter `clip`; 1 without it."""
        return float(self.defense.parameters().get("clip") or 1.0)

    def update(self, norm: float = 0.9, number: int = 0) -> Vector:
        """An update of this norm, in units of the clip."""
        drawn = rng.normal(Key(1).child("update", number), (self.dim,), torch.float64)
        length = float(torch.linalg.vector_norm(drawn))
        return (drawn * (norm * self.clip / length)).float()

    def client(self, update: Vector, private: int = 0, shared: int = 0, sender: Sender = SENDER) -> Client:
        """The client that sends this update."""
        memory = self.defense.remember(self.round_.setting)
        return Client(sender, update, memory, Key(0).child("private", private), Key(0).child("shared", shared))

    def exchange(self, update: Vector, private: int = 0, shared: int = 0) -> Exchange:
        """The message of this update, with silent other clients if the channel adds messages up."""
        return self.round_.among_silent([self.client(update, private, shared)], Key(0).child("others", private))

    def read(self, received: bytes, shared: int | None = 0) -> Vector:
        """The estimate of the server, or without the shared key; raises `Fault` unless it is shaped like an update."""
        key = None if shared is None else Key(0).child("shared", shared)
        return self.shaped(self.round_.read(Message(0, SENDER, received, key, SENDER.samples)), "estimate")

    def shaped(self, estimate: Any, method: str) -> Vector:
        """What a method returned; raises `Fault` unless it is shaped like an update, `MessageError` if not finite."""
        if not isinstance(estimate, Tensor) or estimate.shape != (self.dim,) or estimate.dtype != torch.float32:
            is_tensor = isinstance(estimate, Tensor)
            shown = f"{estimate.dtype} of shape {tuple(estimate.shape)}" if is_tensor else type(estimate).__name__
            raise Fault(f"`{method}` returns {shown}, expected a float32 tensor of shape ({self.dim},)")
        if not bool(estimate.isfinite().all()):
            raise MessageError("an estimate that is not finite")  # a round refuses such an estimate
        return estimate

    def estimates(self, update: Vector, privates: Sequence[int], shareds: Sequence[int]) -> Tensor:
        """[n, d] float64: the server's estimates from messages of one update."""
        rows = zip(privates, shareds, strict=True)
        read = [self.read(self.exchange(update, *keys).received[0], keys[1]) for keys in rows]
        return torch.stack(read).double()
