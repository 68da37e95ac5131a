"""Arguments that are refused, with what came and what was expected."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def check_update(update: Tensor) -> None:
    """Refuse an update that no defense can carry.

    Raises:
        ValueError: not one-dimensional, or not finite; the message says which and where.
    """
    if update.ndim != 1:
        raise ValueError(f"expected a flat update [d], got shape {tuple(update.shape)}")
    # numpy: a third of the time for a short update
    if not np.isfinite(update.detach().cpu().numpy()).all():
        finite = torch.isfinite(update)
        bad = int((~finite).nonzero()[0])
        raise ValueError(
            f"expected a finite update, got {float(update[bad])} at coordinate {bad} "
            f"and {int((~finite).sum())} non-finite of {update.numel()} in all"
        )


def positive(**values: float) -> None:
    """Check that each named value is a finite number above zero.

    Raises:
        ValueError: the first that is not, with its name.
    """
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"expected {name} > 0, got {name}={value}")
