"""Finds where code uses randomness without a key: from a global generator, the system's entropy, or the clock.

Two runs of the same call are traced line by line. A line draws from a global generator if the generator's state differs
after it. The first line after which the two runs differ uses another source.
"""

from __future__ import annotations

import os
import re
import sys
import time
import zlib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from leakgauge.harness.core import rng
from leakgauge.harness.core.rng import Key
from leakgauge.harness.integrations.findings import Fault, Place, is_own

_GLOBAL = {
    "torch": "torch's global generator",
    "numpy.random": "numpy's global generator",
    "random": "the global generator of Python's random",
}

_CLOCKS = (time.time, time.time_ns, time.monotonic, time.monotonic_ns, time.perf_counter, time.perf_counter_ns)
_WORDS = {
    r"default_rng|RandomState|SeedSequence": "a generator of numpy without a seed",
    r"urandom|secrets|SystemRandom|uuid": "the system's entropy",
    r"Random\(|\.seed\(": "a generator that the system seeds",
    r"time|clock|now\(|today\(": "the clock",
    r"\bhash\(|\bid\(": "an address or a hash of this process",
}
"""The source of randomness in a line, by a pattern of its text."""


class _Step(NamedTuple):
    """A line that is about to run or that continues after a call, with its local variables and global generators."""

    place: Place
    values: int
    states: dict[str, int]


class Draw(NamedTuple):
    """A draw by a key: the function of `core.rng`, the key, and the line of the user's code."""

    name: str
    key: Key
    place: Place | None


class Watched(NamedTuple):
    """A traced call: its result, its draws by keys, and the lines that read the clock or the system's entropy."""

    result: Any
    draws: list[Draw]
    read: list[tuple[str, Place]]
    steps: list[_Step]


def watched(call: Callable[[], Any], folder: Path) -> Watched:
    """Run a call, and trace code of this folder."""
    draws, read, steps = list[Draw](), list[tuple[str, Place]](), list[_Step]()

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        back = event == "return"
        place = (_nearest(frame.f_back, folder) if back else None) or _place(frame)
        steps.append(_Step(place, _sum({"": argument} if back else frame.f_locals), _states()))
        return line

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code.co_filename == rng.__file__ and code.co_name == "_digest":
            draws.append(_draw(frame, folder))
        return line if is_own(code, folder) else None

    def profiled(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and (what := _source(argument)):
            place = _nearest(frame, folder)
            # torch may read a clock; entropy counts in any library, because numpy draws it for its caller
            if place and (what == "the system's entropy" or is_own(frame.f_code, folder)):
                read.append((what, place))

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(called)
    sys.setprofile(profiled)
    try:
        result = call()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    steps.append(_Step(steps[-1].place, 0, _states()) if steps else _Step(Place("", 0), 0, _states()))
    return Watched(result, draws, read, steps)


def check_repeats(once: Watched, again: Watched, what: str) -> None:
    """Raise a Fault with the generator and the line unless two traced runs of one call drew only by keys.

    Args:
        what: the name of the call, for people.
    """
    seeded = any(draw.name == rng.global_generators.__name__ for draw in once.draws)
    instead = "draw from a global generator, which is seeded for each message" if seeded else _INSTEAD
    for step, after in zip(once.steps, once.steps[1:], strict=False):
        moved = [_GLOBAL[name] for name, state in step.states.items() if after.states[name] != state]
        if moved and not seeded:
            raise Fault(f"{what} draws from {' and '.join(moved)} at {step.place}; {instead}")
    if once.read:
        source, place = once.read[0]
        raise Fault(f"{what} draws from {_named(place) or source} at {place}; {instead}")
    if once.result == again.result:
        return
    both = zip(once.steps[1:], again.steps[1:], strict=False)
    apart = (at for at, (mine, others) in enumerate(both) if mine[:2] != others[:2])
    at = next(apart, len(once.steps) - 1)
    # an earlier line may have made the generator
    words = (_named(step.place) for step in reversed(once.steps[: at + 1]))
    source = next(filter(None, words), "a source other than a key")
    raise Fault(
        f"{what} gives another result for the same keys: it draws from {source} at {once.steps[at].place}; {instead}"
    )


_INSTEAD = "draw by a key, as in rng.normal(private.child('noise'), shape)"


def _named(place: Place) -> str:
    """The source of randomness in a line, as far as its text shows; empty if unknown."""
    return next((source for pattern, source in _WORDS.items() if re.search(pattern, place.source)), "")


def _source(function: Any) -> str:
    """The source without a key that a C function reads; empty if there is none."""
    if function is os.urandom:
        return "the system's entropy"
    clock = function in _CLOCKS or getattr(function, "__self__", None) is datetime
    return "the clock" if clock else ""


def _draw(frame: FrameType, folder: Path) -> Draw:
    """The draw of the key whose digest is taken in this frame."""
    key: Key = frame.f_locals["key"]
    caller, name = frame.f_back, ""
    while caller is not None and caller.f_code.co_filename == rng.__file__:
        name, caller = caller.f_code.co_name, caller.f_back
    return Draw(name, key, _nearest(caller, folder))


def _nearest(frame: FrameType | None, folder: Path) -> Place | None:
    """The line of this folder from which a frame was reached."""
    while frame is not None and not is_own(frame.f_code, folder):
        frame = frame.f_back
    return _place(frame) if frame is not None else None


def _place(frame: FrameType) -> Place:
    return Place(frame.f_code.co_filename, frame.f_lineno)


def _states() -> dict[str, int]:
    return {name: zlib.crc32(state) for name, state in rng.global_states().items()}


def _sum(values: dict[str, Any]) -> int:
    """A checksum of numbers, texts and arrays by name; other values count by their type."""
    return zlib.crc32(repr([(name, _brief(plain(value))) for name, value in values.items()]).encode())


def _brief(value: Any) -> Any:
    """The same with a checksum in place of bytes, whose text would take much longer."""
    if isinstance(value, list):
        return [_brief(item) for item in value]
    return zlib.crc32(value) if isinstance(value, bytes) else value


def plain(value: Any) -> Any:
    """A value that can be compared, without addresses of objects; unknown objects count by their type."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.dtype != object else value.shape
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | bytes | None) else type(value).__name__
