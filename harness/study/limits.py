"""The bounds of any attack on one target, the limit of each victim among them; a long limit is computed in parts."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from leakgauge.harness.audit.attacked import Proved, proved_identification
from leakgauge.harness.audit.limit import Limit, NoLimit, limits
from leakgauge.harness.core.cell import Cell, Target
from leakgauge.harness.core.contract import Observation
from leakgauge.harness.core.stored import canonical, to_data
from leakgauge.harness.federation.observe import TrainedFederation, Truth
from leakgauge.harness.learn.prior import GaussianPrior, gaussian_prior
from leakgauge.harness.study.environment import code_behind
from leakgauge.harness.study.jobs import RunContext, limit_id, named, victims_of
from leakgauge.harness.study.prepare import StoredTraining, claimed, observe_stored
from leakgauge.harness.study.store import Arrays


class Bounds(NamedTuple):
    """Bounds of any attack on one target: the limit of each victim or why there is none, and the proofs' bound."""

    limits: list[Limit] | str
    proved: Proved | None


def run_limit(cell: Cell, victims: range, context: RunContext) -> None:
    """Compute the limit of some victims of a cell's target, and store it."""
    start = time.perf_counter()
    stored = StoredTraining.of(cell.training, context)
    observation, truth = observe_stored(stored, cell.threat, cell.target, context.device)
    arrays = of_limits(_limits(stored.federation, observation, truth, cell.target, victims))
    code = code_behind(context.store, cell.training, None, cell.threat)
    context.store.write_part(named(limit_id(cell), victims), arrays, time.perf_counter() - start, code)


def bounds_of(cell: Cell, context: RunContext, parts: Sequence[str] = ()) -> Bounds:
    """The bounds of a cell, which are the same for every attack on its target.

    Args:
        parts: names of stored parts of the limit, among others; missing victims are computed.
    """
    mine = sorted((name for name in parts if name.startswith(limit_id(cell))), key=lambda name: victims_of(name).start)
    code = code_behind(context.store, cell.training, None, cell.threat) if mine else ""
    stored = StoredTraining.of(cell.training, context)
    return _bounds(stored, cell.threat, cell.target, context.device, tuple(mine), code)


@functools.lru_cache(maxsize=8)
def _bounds(
    stored: StoredTraining, threat: str, target: Target, device: str, parts: tuple[str, ...], code: str
) -> Bounds:
    """`bounds_of`, cached for the next attacks on the same messages."""
    observation, truth = observe_stored(stored, threat, target, device)
    among = 1 + truth.rivals
    claim = claimed(stored.federation, target.looks_at) if observation.messages and among > 1 else None
    proved = proved_identification(claim, observation.view.threat, among) if claim else None
    known = [(name, stored.store.read_part(name, code)) for name in parts]
    whole = [(victims_of(name), arrays) for name, arrays in known if arrays is not None]
    if not parts or len(whole) < len(parts):
        return Bounds(_limits(stored.federation, observation, truth, target), proved)
    for _, arrays in whole:
        if "reason" in arrays:
            return Bounds(str(arrays["reason"]), proved)
    assert observation.auxiliary is not None  # without auxiliary data there is a reason
    prior = gaussian_prior(observation.auxiliary.x, 0.0)
    joined = dict(pair for victims, arrays in whole for pair in zip(victims, to_limits(arrays, prior), strict=True))
    return Bounds([joined[number] for number in range(len(truth.victims))], proved)


def _limits(
    federation: TrainedFederation, observation: Observation, truth: Truth, target: Target, only: range | None = None
) -> list[Limit] | str:
    """The limit of some victims of a target, None: all; or the reason why there is none."""
    try:
        return limits(observation, truth.victims, federation.key.child("limit", canonical(to_data(target))), only)
    except NoLimit as error:
        return str(error)


def of_limits(bounds: Sequence[Limit] | str) -> Arrays:
    """The arrays of limits, or of the reason why there are none; without the directions, which the prior gives."""
    if isinstance(bounds, str):
        return {"reason": np.array(bounds, np.str_)}
    each = {f"errors {i}": np.stack([limit.error, limit.average, limit.blind]) for i, limit in enumerate(bounds)}
    about = np.array([(limit.basis.shape[1], limit.linear) for limit in bounds], np.int64)
    return {"about": about, **each}


def to_limits(arrays: Arrays, prior: GaussianPrior) -> list[Limit]:
    """The limits from the arrays of `of_limits`; `prior`: the prior of the attacker's data."""
    known = []
    for i, (kept, linear) in enumerate(arrays["about"].tolist()):
        error, average, blind = arrays[f"errors {i}"]
        known.append(Limit(error, average, blind, prior.axes[0][:, :kept], bool(linear)))
    return known
