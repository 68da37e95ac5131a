"""What a client can notice about the parameters that a server broadcasts, with nothing but its own data.

The client compares them with honest models that it makes itself: fresh ones, and these after local steps.

| test | what it measures | trips |
|---|---|---|
| small | root mean square of a weight | below a tenth of the least honest one |
| large | the same | above 100 times the largest honest one, and 100 times the smallest weight received |
| parallel | share of a weight's pairs of rows with a cosine of +-1 | above the honest share plus 0.1 |
| repeated | share of a weight's entries that repeat another one | above the honest share plus 0.1 |
| stuck | share of a layer's units that no input moves, by interval arithmetic | above the honest share plus 0.8 |
| loud | share of the gradient's energy outside of its loudest weight | below a hundredth of the least honest one |

A test that trips is evidence. One that does not is no proof: a server that adds random numbers a tenth of the size of
fresh weights hides what is parallel, repeated or small (at what cost to its attack was not measured). No test trips
then for the trap of the last dense layer. Loss, dead units on the client's own records and scores that do not vary are
no tests: noise and training that kills units do the same to honest models.

| parameters | n | a test trips |
|---|---|---|
| trap of the last dense layer of `lenet-dlg`; of its first convolution | 26; 4 | 26; 4 |
| imprint in `mlp` and `mlp-small` | 48 | 48 |
| one neuron a candidate, one candidate that turns the message (`mlp-small`) | 30, 24 | 30, 24 |
| traps of dense and convolutional models | 52 | 52 |
| these with random numbers a tenth of the size of fresh weights added | 92 | 65 |
| fresh ones of eleven models, both initializations, 1 to 64 records | 332 | 0 |
| rounds 0 to 100 of federations that chose the rules: no defense; `gaussian`; `jopeq` | 90; 155; 90 | 0 |
| of others: no defense; `gaussian`; `jopeq`; `dp-sgd` | 354; 342; 174; 180 | at most 2; 0; 0; 0 |

The false alarms are of a training without a defense that diverged: its loss was 4e29. Clients had 8 or 32 records.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.batch import LocalPlan, Work, choose_engine, train_clients
from leakgauge.harness.learn.layers import Chain, Conv, Dense, Dropout, Relu, Sigmoid
from leakgauge.harness.learn.tasks import ModelTask

_RATES = (0.1, 0.5, 1.0, 2.0)
"""Learning rates of the honest models: also rough ones, so that training that kills units or blows up is honest too."""

_STEPS = 8
"""Local steps of the honest models."""

_RECORDS = 64
"""Records that the client uses, at most."""

_ROWS = 4
"""Least rows that are compared: training makes the rows of two classes opposite."""

_PARALLEL = 0.999
"""Least magnitude of a cosine of +-1."""

_STILL = 0.01
"""A sigmoid that changes less is not moved."""


class _Facts(NamedTuple):
    """size, parallel, repeated: by weight; stuck: by activation; rest: a scalar; see the table above."""

    size: Tensor
    parallel: Tensor
    repeated: Tensor
    stuck: Tensor
    rest: Tensor


def suspicious(task: ModelTask, params: Vector, data: Examples, key: Key) -> tuple[str, ...]:
    """The tests by which a client with these data tells these parameters from honest ones; empty: none trips.

    Args:
        data: one record or more; the first 64 are used.
        key: of the client's honest models.
    """
    data = Examples(data.x[:_RECORDS], data.y[:_RECORDS])
    honest = []
    for number, lr in enumerate(_RATES):
        fresh = task.init(key.child("init", number))
        plan, work = LocalPlan(False, _STEPS, None, 0, lr, 0.0), Work(data, key.child("train", number))
        update = train_clients(task, fresh, [work], plan, choose_engine(task)).updates[0]
        honest += [_facts(task, fresh, data), _facts(task, fresh + update, data)]
    columns = [torch.stack(column).nan_to_num(torch.inf, torch.inf) for column in zip(*honest, strict=True)]
    low, high = _Facts(*(column.amin(0) for column in columns)), _Facts(*(column.amax(0) for column in columns))
    found = _facts(task, params, data)
    trips = {
        "small": found.size < 0.1 * low.size,
        "large": found.size > 100 * high.size.maximum(found.size.min()),  # noise makes all weights large
        "parallel": found.parallel > high.parallel + 0.1,
        "repeated": found.repeated > high.repeated + 0.1,
        "stuck": found.stuck > high.stuck + 0.8,
        "loud": found.rest < 0.01 * low.rest,
    }
    return tuple(name for name, where in trips.items() if bool(where.any()))


def _facts(task: ModelTask, params: Vector, data: Examples) -> _Facts:
    """What the tests compare."""
    tensors, chain = task.layout.split(params), task.model.apply
    weights = [tensor.flatten(1).double() for tensor in tensors if tensor.ndim > 1]
    return _Facts(
        torch.stack([weight.square().mean().sqrt() for weight in weights]),
        torch.stack([_parallel(weight) for weight in weights]),
        torch.stack([(weight.flatten().sort().values.diff() == 0).double().mean() for weight in weights]),
        _stuck(chain, tensors, data.x) if isinstance(chain, Chain) else torch.zeros(1),
        _rest(task, tensors, data),
    )


def _parallel(rows: Tensor) -> Tensor:
    """Share of the pairs of rows [k, n] that are parallel or opposite; a row of zeros is parallel to all."""
    k, norms = len(rows), rows.norm(dim=1)
    if k < _ROWS:
        return torch.zeros(())
    return (((rows @ rows.T).abs() >= _PARALLEL * torch.outer(norms, norms)).sum() - k) / (k * (k - 1))


def _stuck(chain: Chain, tensors: list[Tensor], x: Tensor) -> Tensor:
    """By activation, the share of units (channels) that no input in the range of x moves or takes across the kink."""
    rest, shares = iter(tensors), [torch.zeros(())]
    low, high = x[:1].new_full(x[:1].shape, min(0.0, float(x.min()))), x.new_full(x[:1].shape, max(1.0, float(x.max())))
    for layer in chain.layers:
        if isinstance(layer, (Conv, Dense)):
            weight, bias = next(rest), next(rest)
            middle = layer.apply((low + high) / 2, weight, bias)
            radius = layer.apply((high - low) / 2, weight.abs(), torch.zeros_like(bias))
            low, high = middle - radius, middle + radius
        elif not isinstance(layer, Dropout):
            before, low, high = (low, high), layer.apply(low), layer.apply(high)
            if isinstance(layer, (Relu, Sigmoid)):
                still = high - low < _STILL if isinstance(layer, Sigmoid) else (before[1] <= 0) | (before[0] >= 0)
                shares.append(still[0].flatten(1).all(1).float().mean() if still.ndim > 2 else still.float().mean())
    return torch.stack(shares)


def _rest(task: ModelTask, tensors: list[Tensor], data: Examples) -> Tensor:
    """Share of the weights' gradient energy outside of the weight that holds most of it.

    1 if there is none: behind units that died in training, no gradient comes through.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    gradient = torch.autograd.grad(task.loss_at(leaves, *data), leaves)
    energy = torch.stack([part.double().square().sum() for part in gradient if part.ndim > 1]).sort().values
    return energy[:-1].sum() / energy.sum() if energy[:-1].any() else torch.ones_like(energy[0])
