"""How a long attack or limit is split: the groups of victims do not depend on the worker."""

from __future__ import annotations

import itertools

from leakgauge.harness.core.cell import Cell, fingerprint
from leakgauge.harness.core.result import to_data


def limit_id(cell: Cell) -> str:
    """The id of the limit of a cell's target: the same for every attack on it."""
    return fingerprint({"limit": [cell.training.id, cell.threat, to_data(cell.target)]})


def named(whole: str, victims: range) -> str:
    """The name of a part."""
    return f"{whole}-{victims.start}-{victims.stop}"


def victims_of(name: str) -> range:
    """The victims of the part with this name."""
    first, end = name.split("-")[1:]
    return range(int(first), int(end))


def groups(victims: range, size: int | None) -> list[range]:
    """The victims in groups of `size`, in order; in one group if there is no size."""
    size = size or len(victims) or 1
    return [victims[first : first + size] for first in range(0, len(victims), size)]


def shares(victims: range, size: int, count: int) -> list[range]:
    """The victims in at most `count` parts of about equal size; each part has whole groups of `size`."""
    each = groups(victims, size)
    count = min(count, len(each))
    bounds = [number * len(each) // count for number in range(count + 1)]
    return [range(each[low].start, each[high - 1].stop) for low, high in itertools.pairwise(bounds)]
