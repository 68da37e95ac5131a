"""What an attack says where it has no reconstruction."""

from __future__ import annotations

import torch
from torch import Tensor

from leakgauge.harness.core.contract import Guess, Message, Task


def unusable(target: Tensor) -> str:
    """Why a target [d] cannot be matched, or nothing."""
    if not bool(target.isfinite().all()):
        return "the gradient is not finite"
    return "" if bool(target.any()) else "the gradient is zero"


def failed(task: Task, message: Message, failure: str, evaluations: int = 0) -> Guess:
    """No reconstruction: zeros, with the reason."""
    x = torch.zeros(message.images, *task.input_shape)
    return Guess(x, torch.zeros(message.images, dtype=torch.int64), torch.inf, evaluations, failure)
