"""How a long attack or limit is split: the groups of victims do not depend on the worker."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from leakgauge.harness.core.cell import Cell
from leakgauge.harness.core.stored import fingerprint, to_data


def limit_id(cell: Cell) -> str:
    """The id of the limit of a cell's target: the same for every attack on it."""
    return fingerprint({"limit": [cell.training.id, cell.threat, to_data(cell.target)]})


def family(cell: Cell) -> Hashable | None:
    """What the cells of a batch on an accelerator have in common; None: the cell is attacked alone.

    They attack messages of round 0 that were made with the same first model; only their defenses may differ.
    """
    target, spec = cell.target, cell.training
    of_first = (target.round, target.rounds, target.users) == (0, 1, 1) and target.kind != "members"
    if not of_first or spec.malice is not None:
        return None
    return cell.attack.key, target, cell.threat, spec.task, spec.federation, spec.seed


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
