"""The clients of the tests of local training, and a loop over records as the reference for clipped gradients."""

import torch

from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.batch import Work
from tests.doubles import random_examples

SHAPES = {"cnn2": (1, 16, 16), "cnn3": (3, 22, 22), "lenet5": (1, 14, 14)}


def shape_of(model):
    return SHAPES.get(model, (1, 8, 8))


def clients(shape=(1, 8, 8), sizes=(20, 13, 8)):
    return [Work(random_examples(n, shape, seed=n), Key(0).child("client", n)) for n in sizes]


def record_gradients(task, params, x, y, keep=None):
    """[b, d] float64, one backward pass a record."""
    at = params.detach().double().clone().requires_grad_()
    rows = []
    for i in range(len(x)):
        masks = None if keep is None else [mask[i : i + 1].double() for mask in keep]
        target = y[i : i + 1] if y.dtype == torch.int64 else y[i : i + 1].double()
        rows.append(torch.autograd.grad(task.losses(at, x[i : i + 1].double(), target, masks)[0], at)[0])
    return torch.stack(rows) if rows else torch.zeros(0, len(params), dtype=torch.float64)


def clipped_sum(rows, clip):
    """The sum of the rows, each scaled down to a norm of at most `clip` (None: not scaled)."""
    if clip is None:
        return rows.sum(0)
    clipped = [row * min(1.0, clip / float(row.norm())) for row in rows if row.norm() > 0]
    return sum(clipped, torch.zeros_like(rows[:1].sum(0)))


def median_norm(task, params, x, y, keep=None):
    """A clip that half of the records are above."""
    return float(record_gradients(task, params, x, y, keep).norm(dim=1).median())


def assert_near(found, wanted, rtol=1e-5):
    """||found - wanted|| <= rtol ||wanted||."""
    assert float(wanted.norm()) > 0
    assert float((found.double() - wanted).norm()) <= rtol * float(wanted.norm())
