"""What stands outside on a digital message: the round that it belongs to and who sent it."""

from __future__ import annotations

import struct

from leakgauge.harness.core.contract import MessageError

_HEADER = struct.Struct("<II")

SIZE = _HEADER.size
"""Bytes that an envelope adds to a message."""


def seal(wire: bytes, number: int, sender: int) -> bytes:
    """The message with its round and sender in front, 4 bytes each."""
    return _HEADER.pack(number, sender) + wire


def unseal(sealed: bytes, number: int, sender: int) -> bytes:
    """The message inside an envelope of this round and sender.

    Raises:
        MessageError: it is too short for an envelope, or of another round or sender.
    """
    if len(sealed) < SIZE:
        raise MessageError(f"expected an envelope of at least {SIZE} bytes, got {len(sealed)} bytes")
    round_of, came_from = _HEADER.unpack_from(sealed)
    if (round_of, came_from) != (number, sender):
        raise MessageError(
            f"expected a message of round {number} from client {sender}, "
            f"got one of round {round_of} from client {came_from}"
        )
    return sealed[SIZE:]
