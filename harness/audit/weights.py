"""Tests by which a client can notice manipulated parameters from a server, with only its own data.

The client compares the parameters with honest models that it makes itself: fresh ones, also after local steps.

| test | what it measures | trips |
|---|---|---|
| small | root mean square of a weight | below a tenth of the smallest honest value |
| large | the same | above 100 times the largest honest value, and 100 times the smallest received weight |
| parallel | share of a weight's pairs of rows with a cosine of +-1 | above the honest share plus 0.1 |
| repeated | share of a weight's entries that repeat another entry | above the honest share plus 0.1 |
| stuck | share of a layer's units that no input moves, by interval arithmetic | above the honest share plus 0.8 |
| loud | share of the gradient's energy outside its loudest weight | below a hundredth of the smallest honest value |

A test that trips is evidence; a test that does not trip proves nothing. Random numbers of a tenth of the size of fresh
weights hide parallel, repeated or small weights; the cost to the server's attack was not measured. With them, no test
trips for the trap of the last dense layer. Loss, dead units on the client's own records and scores that do not vary are
not used as tests, because noise and training that kills units cause them in honest models too.

| parameters | n | a test trips |
|---|---|---|
| trap of the last dense layer of `lenet-dlg`; of its first convolution | 26; 4 | 26; 4 |
| imprint in `mlp` and `mlp-small` | 48 | 48 |
| one neuron per candidate; one candidate that turns the message (`mlp-small`) | 30; 24 | 30; 24 |
| traps of dense and convolutional models | 52 | 52 |
| these traps plus random numbers of a tenth of the size of fresh weights | 92 | 65 |
| honest weights, biases of `quantile-biases` (`mlp-small`, `mlp`, `lenet5`, `cnn2`) | 72 | 0 |
| fresh parameters of eleven models, both initializations, 1 to 64 records | 332 | 0 |
| rounds 0 to 100 of federations used to set the tests: no defense; `gaussian`; `jopeq` | 90; 155; 90 | 0 |
| of other federations: no defense; `gaussian`; `jopeq`; `dp-sgd` | 354; 342; 174; 180 | at most 2; 0; 0; 0 |

The false alarms come from one diverged training without a defense, with a loss of 4e29. Clients had 8 or 32 records.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.batch import LocalPlan, Work, choose_engine, train_clients
from leakgauge.harness.learn.layers import Conv, Dense, Dropout, Relu, Sigmoid, Tanh
from leakgauge.harness.learn.structure import Structure
from leakgauge.harness.learn.tasks import ModelTask

_RATES = (0.1, 0.5, 1.0, 2.0)
"""Learning rates of the honest models; high ones are included, so training that kills units or blows up is honest."""

_STEPS = 8  # local steps of the honest models
_RECORDS = 64  # the most records that the client uses
_ROWS = 4  # the fewest rows that are compared: with two classes, training makes the rows opposite
_PARALLEL = 0.999  # the least magnitude that counts as a cosine of +-1
_STILL = 0.01  # a sigmoid or tanh that changes by less counts as not moved


class _Facts(NamedTuple):
    """Measured values of the tests in the module's table.

    size, parallel, repeated: one entry per weight; stuck: per activation; rest: a scalar.
    """

    size: Tensor
    parallel: Tensor
    repeated: Tensor
    stuck: Tensor
    rest: Tensor


def suspicious(task: ModelTask, params: Vector, data: Examples, key: Key) -> tuple[str, ...]:
    """The names of the tests that trip for these parameters and this client's data; empty if no test trips.

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
    """The values that the tests compare."""
    tensors, structure = task.layout.split(params), task.structure
    weights = [tensor.flatten(1).double() for tensor in tensors if tensor.ndim > 1]
    return _Facts(
        torch.stack([weight.square().mean().sqrt() for weight in weights]),
        torch.stack([_parallel(weight) for weight in weights]),
        torch.stack([(weight.flatten().sort().values.diff() == 0).double().mean() for weight in weights]),
        torch.zeros(1) if structure is None or not structure.plain else _stuck(structure, params, data.x),
        _rest(task, tensors, data),
    )


def _parallel(rows: Tensor) -> Tensor:
    """Share of the pairs of rows [k, n] that are parallel or opposite; a row of zeros is parallel to every row."""
    k, norms = len(rows), rows.norm(dim=1)
    if k < _ROWS:
        return torch.zeros(())
    return (((rows @ rows.T).abs() >= _PARALLEL * torch.outer(norms, norms)).sum() - k) / (k * (k - 1))


def _stuck(structure: Structure, params: Vector, x: Tensor) -> Tensor:
    """The share of units (channels) of each activation that no input in the range of x moves or takes over the kink."""
    tensors, shares = iter(structure.split(params)), [torch.zeros(())]
    low, high = x[:1].new_full(x[:1].shape, min(0.0, float(x.min()))), x.new_full(x[:1].shape, max(1.0, float(x.max())))
    for layer in structure.layers:
        if isinstance(layer, (Conv, Dense)):
            weight, *bias = [next(tensors) for _ in range(layer.owns)]
            middle = layer.apply((low + high) / 2, weight, *bias)
            radius = layer.apply((high - low) / 2, weight.abs(), *map(torch.zeros_like, bias))
            low, high = middle - radius, middle + radius
        elif not isinstance(layer, Dropout):
            before, low, high = (low, high), layer.apply(low), layer.apply(high)
            if isinstance(layer, (Relu, Sigmoid, Tanh)):
                still = (before[1] <= 0) | (before[0] >= 0) if isinstance(layer, Relu) else high - low < _STILL
                shares.append(still[0].flatten(1).all(1).float().mean() if still.ndim > 2 else still.float().mean())
    return torch.stack(shares)


def _rest(task: ModelTask, tensors: list[Tensor], data: Examples) -> Tensor:
    """Share of the weights' gradient energy outside of the weight with the most energy.

    1 if there is no energy outside: no gradient passes units that died in training.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    gradient = torch.autograd.grad(task.loss_at(leaves, *data), leaves)
    energy = torch.stack([part.double().square().sum() for part in gradient if part.ndim > 1]).sort().values
    return energy[:-1].sum() / energy.sum() if energy[:-1].any() else torch.ones_like(energy[0])
