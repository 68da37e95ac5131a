"""How numbers become bytes on the wire, and back."""

from __future__ import annotations

import numpy as np
import torch

from harness.contract import MessageError
from harness.vec import Vector


def pack_float32(vector: Vector) -> bytes:
    """4 * d bytes: little-endian IEEE single precision, the same on every machine."""
    return vector.detach().cpu().numpy().astype("<f4").tobytes()


def unpack_float32(wire: bytes, dim: int) -> Vector:
    """The vector [dim] that `pack_float32` made into `wire`.

    Raises:
        MessageError: not 4 * dim bytes, or an entry is not finite.
    """
    if len(wire) != 4 * dim:
        raise MessageError(f"expected a message of {4 * dim} bytes ({dim} floats), got {len(wire)} bytes")
    values = np.frombuffer(wire, "<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise MessageError(f"expected a finite message, got {int((~np.isfinite(values)).sum())} non-finite entries")
    return torch.from_numpy(values)
