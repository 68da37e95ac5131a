"""Parts of a long job, as arrays: an attack's guesses for some victims, and the limit of some victims.

Joined parts equal the result of one job: an attack takes victims in fixed groups (`Attack.at_once`), and a limit
depends only on its victim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from leakgauge.harness.audit.limit import Limit
from leakgauge.harness.core.contract import Guess, Reconstruction
from leakgauge.harness.learn.prior import GaussianPrior
from leakgauge.harness.study.store import Arrays


def of_guesses(found: Reconstruction) -> Arrays:
    """The arrays of an attack's guesses."""
    guesses = found.guesses
    images = {f"{name} {i}": getattr(one, name).numpy() for i, one in enumerate(guesses) for name in ("x", "y")}
    return {
        "objective": np.array([one.objective for one in guesses], np.float64),
        "evaluations": np.array([one.evaluations for one in guesses], np.int64),
        "failure": np.array([one.failure for one in guesses], np.str_),
        "prior": np.array(found.prior, np.str_),
        **images,
    }


def to_guesses(arrays: Arrays) -> Reconstruction:
    """An attack's guesses, from the arrays of `of_guesses`."""
    rows = zip(arrays["objective"], arrays["evaluations"], arrays["failure"], strict=True)
    guesses = []
    for i, (value, count, failure) in enumerate(rows):
        x, y = (torch.from_numpy(arrays[f"{name} {i}"]) for name in ("x", "y"))
        guesses.append(Guess(x, y, float(value), int(count), str(failure)))
    return Reconstruction(tuple(guesses), str(arrays["prior"]))


def of_limits(found: Sequence[Limit] | str) -> Arrays:
    """The arrays of limits, or of the reason why there are none; without the directions, which the prior gives."""
    if isinstance(found, str):
        return {"reason": np.array(found, np.str_)}
    each = {f"errors {i}": np.stack([one.error, one.average, one.blind]) for i, one in enumerate(found)}
    about = np.array([(one.basis.shape[1], one.linear) for one in found], np.int64)
    return {"about": about, **each}


def to_limits(arrays: Arrays, prior: GaussianPrior | None) -> list[Limit] | str:
    """The limits from the arrays of `of_limits`; `prior`: the prior of the attacker's data."""
    if "reason" in arrays:
        return str(arrays["reason"])
    assert prior is not None  # without a prior there is no limit
    found = []
    for i, (kept, linear) in enumerate(arrays["about"].tolist()):
        error, average, blind = arrays[f"errors {i}"]
        found.append(Limit(error, average, blind, prior.axes[0][:, :kept], bool(linear)))
    return found
