"""Measure a row of `bench.py`: our code and a reference in turns, in a separate process, with a physical limit.

A row is a `Work` that is built in a forked child, so that its peak memory is measured alone and its remains do not
disturb other rows. Times are processor time, or wall time if other processes do the work. Both sides run in turns, so
that other work on the machine slows both equally.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import binom
from torch.utils.flop_counter import FlopCounterMode

from leakgauge.harness.learn.gradients import keep_freed_memory

WORSE = 1.3
"""A ratio that is this many times the committed ratio is a fault."""

FEWEST, LEAST, MOST = 3, 5, 400
"""Pairs of runs of a row: minimum if a run takes longer than `SLOW`, minimum otherwise, maximum."""

SLOW = 3.0

CONFIDENCE = 0.9
"""Least confidence of the interval of the median ratio."""

LONG = 0.1
"""If the first run takes longer than this many seconds, it is not timed again to find the number of repeats."""

NOISE, SHARE = 1e-4, 0.25
"""Least seconds of a side in a pair, and its least share of the other side's: shorter runs are repeated."""


MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Folder for files that must not wait for a disk; None: the default folder for temporary files."""


class Skipped(Exception):
    """A row cannot run here; the text says why."""


class Work(NamedTuple):
    """What a row runs, once it is built.

    Attributes:
        ours, base: one run of each side, with the same purpose; `base` does not use the code that is measured.
        against: name of `base`.
        amount, unit: the work of one run of ours.
        moved, drawn, hashed: bytes that must cross memory, numbers that must come from Philox, bytes for SHA-256.
        flops: FLOPs of one run; None: the smaller of the counts of both sides.
        wall: whether to use the wall clock, because other processes do the work; peak memory is then that of the
            largest.
        note: further remarks.
    """

    ours: Callable[[], object]
    base: Callable[[], object]
    against: str
    amount: float
    unit: str
    moved: float = 0.0
    drawn: float = 0.0
    hashed: float = 0.0
    flops: float | None = None
    wall: bool = False
    note: str = ""


Build = Callable[[], "Work | Row"]
Rows = Mapping[str, Build]
"""The rows of a module: the name of each row, and the function that builds it."""


@dataclass(frozen=True)
class Machine:
    """Measured rates of one core, and the seconds of a new process that imports torch."""

    bytes_per_s: float
    flops_per_s: float
    draws_per_s: float
    hashed_per_s: float
    files_per_s: float
    start_s: float


@dataclass(frozen=True)
class Row:
    """A measured row.

    Attributes:
        seconds, base_seconds: medians of one run.
        ratio: median over the pairs of our time over the reference's; `quartiles` of the pairs, `interval` of this
            median.
        peak_mb: memory that one run adds.
        limit: least seconds of one run on this machine, and `bound`, what limits it; 0 if nothing was counted.
    """

    seconds: float
    base_seconds: float
    against: str
    amount: float
    unit: str
    ratio: float
    quartiles: tuple[float, float]
    interval: tuple[float, float]
    pairs: int
    peak_mb: float
    limit: float
    bound: str
    note: str

    @classmethod
    def paired(
        cls, work: Work, taken: Sequence[Sequence[float]], peak: float = 0.0, limit: float = 0.0, bound: str = ""
    ) -> Row:
        """A row from the paired seconds of both sides."""
        ratios = [a / b for a, b in zip(*taken, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        seconds, base = map(statistics.median, taken)
        spread = (low, high), interval(ratios), len(ratios)
        return cls(seconds, base, work.against, work.amount, work.unit, middle, *spread, peak, limit, bound, work.note)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        """A row from its JSON."""
        return cls(**{**data, "quartiles": tuple(data["quartiles"]), "interval": tuple(data["interval"])})


def best(work: Callable[[], object], times: int = 5, clock: Callable[[], float] = time.process_time) -> float:
    """Seconds of the fastest of several runs after a warm-up run; other work on the machine only adds time."""
    work()
    found = []
    for _ in range(times):
        start = clock()
        work()
        found.append(clock() - start)
    return min(found)


def measure_machine() -> Machine:
    """The rates of one core: a memory pass beyond all caches, a matrix product, Philox, SHA-256, small files."""
    big, square = torch.ones(2**25), torch.ones(1024, 1024)
    out, room = torch.empty_like(big), torch.empty_like(square)
    philox, block = np.random.Generator(np.random.Philox(0)), bytes(2**24)  # noqa: TID251  # the rate only
    numbers = np.empty(2**22, np.float32)
    with tempfile.TemporaryDirectory() as folder:
        files = best(lambda: _small_files(Path(folder), 50), 3, time.perf_counter)
    return Machine(
        bytes_per_s=8 * len(big) / best(lambda: torch.mul(big, 2.0, out=out)),
        flops_per_s=2 * 1024**3 / best(lambda: torch.mm(square, square, out=room)),
        draws_per_s=len(numbers) / best(lambda: philox.random(dtype=np.float32, out=numbers)),
        hashed_per_s=len(block) / best(lambda: hashlib.sha256(block).digest()),
        files_per_s=50 / files,
        start_s=best(lambda: os.system(f"'{sys.executable}' -c 'import torch'"), 2, time.perf_counter),
    )


def _small_files(folder: Path, count: int) -> None:
    """Write files of 1 kB as the store does: under another name, flushed to the disk, renamed."""
    for number in range(count):
        with (folder / "new").open("wb") as file:
            file.write(bytes(1000))
            file.flush()
            os.fsync(file.fileno())
        (folder / "new").rename(folder / str(number))


def limit_of(work: Work, flops: float, machine: Machine) -> tuple[float, str]:
    """The least seconds of one run, and what bounds it; the parts may overlap, so the largest one counts."""
    parts = {
        "memory": work.moved / machine.bytes_per_s,
        "FLOPs": flops / machine.flops_per_s,
        "draws": work.drawn / machine.draws_per_s,
        "hashing": work.hashed / machine.hashed_per_s,
    }
    bound = max(parts, key=parts.__getitem__)
    return (parts[bound], bound) if parts[bound] > 0 else (0.0, "")


def flops_of(*runs: Callable[[], object]) -> float:
    """The smallest FLOP count of these runs, in products and convolutions of torch; 0 if none are counted."""
    found = []
    for run in runs:
        with FlopCounterMode(display=False) as counter:
            run()
        found.append(float(counter.get_total_flops()))
    return min(found)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the median, by order statistics, at `CONFIDENCE`; the whole range if there are too few values."""
    ordered, n = sorted(values), len(values)
    outside = int(binom.ppf((1 - CONFIDENCE) / 2, n, 0.5))
    low = max(0, outside - 1)
    return ordered[low], ordered[n - 1 - low]


def measure(work: Work, seconds: float, machine: Machine | None, least: int = LEAST) -> Row:
    """Run both sides in turns for about `seconds`; without a machine, memory and limit are not measured."""
    clock = time.perf_counter if work.wall else time.process_time
    runs = work.ours, work.base
    keep_freed_memory()  # without this, the heap's history decides whether short runs fault in new pages
    once = [_timed(run, 1, clock) for run in runs]  # the first run fills the caches
    peak, limit, bound = 0.0, 0.0, ""
    if machine is not None:
        peak = peak_of(work.ours, others=work.wall)
        limit, bound = limit_of(work, flops_of(*runs) if work.flops is None else work.flops, machine)
    once = [one if one > LONG else _timed(run, 1, clock) for run, one in zip(runs, once, strict=True)]
    least = FEWEST if max(once) > SLOW else least
    longest = max(SHARE * max(once), NOISE)  # the shorter side has more noise
    times = [max(1, round(longest / max(one, 1e-9))) for one in once]
    taken: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    gc.disable()  # a collection would slow one side by chance
    end = time.perf_counter() + seconds
    while len(taken[0]) < least or (time.perf_counter() < end and len(taken[0]) < MOST):
        sides = (0, 1) if len(taken[0]) % 2 else (1, 0)
        for side in sides:
            taken[side].append(_timed(runs[side], times[side], clock))
    gc.enable()
    return Row.paired(work, taken, peak, limit, bound)


def _timed(run: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
    """Mean seconds of a run over several runs."""
    start = clock()
    for _ in range(times):
        run()
    return (clock() - start) / times


def peak_of(run: Callable[[], object], *, others: bool = False) -> float:
    """Peak megabytes that a run adds to this process; `others`: peak of the largest process that it starts."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # so that memory freed by earlier runs does not hide the need of this run
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak
    before = _status("VmRSS")
    run()
    if others:
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return max(0.0, _status("VmHWM") - before)


def _status(name: str) -> float:
    """A value of this process's status, in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def in_child(function: Callable[[], Any]) -> Any:
    """The result of a function that runs in a forked process; it is passed back as JSON.

    Raises:
        Skipped: the function raised it.
        RuntimeError: the function failed; the child's traceback is on the error stream.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    if not (child := os.fork()):
        status = 1
        try:
            os.close(read)
            try:
                answer = {"value": function()}
            except Skipped as why:
                answer = {"skipped": str(why)}
            with open(write, "w") as pipe:
                json.dump(answer, pipe)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"expected a result of the measuring process, got status {status}")
    answer = json.loads(text)
    if "skipped" in answer:
        raise Skipped(answer["skipped"])
    return answer["value"]


def measured(build: Build, seconds: float, machine: Machine | None, least: int = LEAST) -> Row:
    """A row, measured in a separate process."""

    def row() -> dict[str, Any]:
        built = build()
        return asdict(built if isinstance(built, Row) else measure(built, seconds, machine, least))

    return Row.of(in_child(row))


def is_worse(now: Row, then: Row, *, surely: bool = False) -> bool:
    """Whether a ratio is at least `WORSE` times the committed ratio; `surely`: whether its whole interval is."""
    return (now.interval[0] if surely else now.ratio) >= WORSE * then.ratio


def check(now: Mapping[str, Row], then: Mapping[str, Row], again: Callable[[str], Row]) -> list[str]:
    """The faults of measured rows, compared with the committed ones; a row that seems worse is first measured again.

    Args:
        again: measures a row again, for longer.
    """
    gone = [f"{name}: expected a measurement of this committed row, got none" for name in then if name not in now]
    new = [f"{name}: expected a committed row, got a new one" for name in now if name not in then]
    slow = []
    for name, row in now.items():
        if name in then and is_worse(row, then[name]) and is_worse(once := again(name), then[name], surely=True):
            times = once.ratio / then[name].ratio
            low, high = once.interval
            slow.append(
                f"{name}: {once.ratio:.3g} [{low:.3g}, {high:.3g}] of {once.against}, committed {then[name].ratio:.3g}"
                f": {times:.2f} times worse"
            )
    return gone + new + slow


def rounded(data: Any) -> Any:
    """JSON data with four significant digits per number."""
    if isinstance(data, float):
        return float(f"{data:.4g}")
    if isinstance(data, Mapping):
        return {key: rounded(value) for key, value in data.items()}
    return [rounded(one) for one in data] if isinstance(data, Iterable) and not isinstance(data, str) else data
