"""A task of your own: a model and its data.

It runs unchanged. Edit it step by step, and after each step run

    leakgauge doctor my_task.py
    leakgauge run my_task.toml -o runs/my_task --allow-code
"""

import sys

import torch
from torch import Tensor, nn

from leakgauge.testing import check_task


def model(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network: any `torch.nn.Module` from inputs [n, *input_shape] to scores [n, classes].

    Its weights are drawn again for each seed of a study; a module instead of a function keeps its own weights.
    """
    size = torch.Size(input_shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 32), nn.Sigmoid(), nn.Linear(32, classes))


def data() -> tuple[Tensor, Tensor]:
    """The data: inputs [n, *input_shape] in [0, 1], and labels [n]; or a `torch.utils.data.Dataset`.

    Here: the 1797 handwritten digits that come with scikit-learn, 8 x 8 pixels.
    """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(y)


def test_the_task_passes_every_check() -> None:
    """`pytest my_task.py` runs it: the checks of `leakgauge doctor`, with an error that lists what is wrong."""
    check_task(sys.modules[__name__])
