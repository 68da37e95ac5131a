"""Neurons that fire only for candidates, and which candidates a gradient of such a model holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from leakgauge.attacks._engine.closed_form import neurons_of
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Observation
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

_RIDGE = 0.3  # ridge added to the variance of each input of the neurons, in units of the mean variance

_FREE = 1e-9, 1e3, 100.0
"""Output of a firing neuron, slope of the scores over a later unit, and about the length of a candidate's gradient over
that of all other layers together: the scores hardly move, the gradients do."""

_STEADY = 0.3, 0.1, 30.0
"""The same for neurons that fire for the same records after others have moved the parameters.

Short gradients move the neurons less, and the model is nearer: for a length of 100, AUC after five local steps fell
from 1.0 to 0.8. Behind noise that grows with the update, longer ones are seen better.
"""

_LEAST = 0.2  # least weight of a message's records, in units of the largest weight that a message of the round shows

FIRES = 0.85
"""Threshold of a neuron, for which an average record scores 0 and its candidates 1."""


def firing_for_candidates(
    seen: Observation, attack: str, key: Key, fires: float = FIRES, *, varied: bool = False, steady: bool = False
) -> Vector:
    """Parameters of a fresh model whose first dense layer fires only for candidates; all other neurons are dead.

    A neuron's weights are the linear map of least variance over the auxiliary data that gives its candidates 1 and
    their mean 0.

    Args:
        attack: the attack's name, for errors.
        fires: the threshold of a neuron, for which an average record scores 0 and its candidates 1.
        varied: whether the candidates' gradients have random lengths, else about equal ones.
        steady: whether others may move the parameters a little.

    Raises:
        ValueError: the model has no dense ReLU layer before another dense layer, its loss is not softmax cross-entropy,
            or there are fewer than two auxiliary inputs.
    """
    assert seen.auxiliary is not None
    assert seen.candidates is not None
    if len(seen.auxiliary.x) < 2:
        raise ValueError(f"expected at least 2 auxiliary inputs to fit the neurons, got {len(seen.auxiliary.x)}")
    task, params = seen.task, seen.task.init(key.child("init"))
    structure, front, head = neurons_of(task, params, attack)
    made = [torch.zeros_like(tensor) for tensor in head]
    like, candidates = front(seen.auxiliary.x), front(seen.candidates.x)
    quiet, loud, length = _STEADY if steady else _FREE
    made[0], made[1], gain = _neurons(like, candidates, len(head[0]), fires, quiet, key.child("groups"))
    gain *= length
    if varied:
        gain *= (1 + rng.uniform(key.child("lengths"), (len(gain),))).sqrt()
    for middle in made[2:-2:2]:
        middle[0] = 1.0  # one unit adds up all units before it; the others are off
    side = torch.tensor([loud, -loud]).repeat(task.classes)[: task.classes]
    made[-2] += side[:, None]
    made[2] *= gain
    return structure.join([*structure.split(params)[: -len(made)], *made])


def _neurons(
    like: Tensor, candidates: Tensor, hidden: int, fires: float, quiet: float, key: Key
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight [hidden, p] and bias [hidden]: each candidate fires one neuron; the inputs `like` hardly fire any.

    The third result is the gains [hidden] behind the neurons, which make the candidates' gradients about of length 1.

    Args:
        like: [m, p]; candidates: [n, p], spread over the neurons at random.
        fires: the threshold; quiet: the output of a firing neuron.
    """
    n, mean = len(candidates), like.mean(0).double()
    off, to = like.double() - mean, candidates.double() - mean
    covariance = off.T @ off / len(off)
    covariance += _RIDGE * covariance.diagonal().mean().clamp(min=1e-12) * torch.eye(len(covariance)).double()
    toward = torch.linalg.solve(covariance, to.T).T
    weight, bias, gain = torch.zeros(hidden, like.shape[1]), torch.full((hidden,), -quiet), torch.ones(hidden)
    order, scale = torch.from_numpy(rng.permutation(key, n)), quiet / (1 - fires)
    for neuron, group in enumerate(torch.tensor_split(order, min(n, hidden))):
        gram = to[group] @ toward[group].T
        gram += (1e-6 * gram.diagonal().mean() + 1e-12) * torch.eye(len(group)).double()  # for copies, or the mean
        w = toward[group].T @ torch.linalg.solve(gram, torch.ones(len(group)).double())
        weight[neuron], bias[neuron] = scale * w, -scale * (fires + float(w @ mean))
        gain[neuron] = (1 + candidates[group].square().sum(1).mean()).rsqrt()
    return weight, bias, gain


def fired(
    seen: Observation, params: Vector, gradients: Tensor, weights: Sequence[float], images: Sequence[int], attack: str
) -> Tensor:
    """[k, n]: the log likelihood ratio that candidate n is in message k, which a model of `firing_for_candidates` made.

    A message shows z = G (w m) + N(0, variance G): the products with the candidates' gradients in the layer of neurons.
    G is the Gram matrix of these gradients, and m states which candidates are in the message. The other candidates
    count as normal with the variance of w m.

    Args:
        gradients: [k, d] behind the messages; weights, images: the largest weight of a record, and the number of
            records, of each.
    """
    assert seen.candidates is not None
    x, y = seen.candidates
    structure, front, head = neurons_of(seen.task, params, attack)
    inputs = front(x)
    slopes = functools.reduce(torch.matmul, head[-2:0:-2]).double()  # [classes, hidden], of the scores
    back = (slopes.mean(0) - slopes[y]) * (inputs @ head[0].T + head[1] > 0)  # [n, hidden], at scores of 0
    rows = torch.cat([inputs, torch.ones(len(inputs), 1)], 1).double()
    gram = (back @ back.T) * (rows @ rows.T)
    values, vectors = torch.linalg.eigh(gram)
    values, lengths = values.clamp(min=0), gram.diagonal().clamp(min=1e-30)
    layers = []  # [hidden, p + 1] each: the gradient of the layer of neurons, with the bias last
    for tensors in map(structure.split, gradients):
        matrix, bias = tensors[-len(head)], tensors[1 - len(head)]
        layers.append(torch.cat([matrix, bias[:, None]], 1).double().nan_to_num(0.0, 0.0, 0.0))
    products = torch.stack([((back @ layer) * rows).sum(1) for layer in layers])  # [k, n]
    # a clip or a quantizer's range lowers the weight of a message's records; not all messages have a candidate
    seems = (products / lengths).amax(1)
    least = _LEAST * float(seems.max().clamp(min=0))
    ratios = []
    for weight, count, layer, product, seem in zip(weights, images, layers, products, seems, strict=True):
        share = min(weight, max(least, float(seem)))
        noise = float(layer.square().mean(1).median()) + 1e-6 * share**2 * float(lengths.mean()) + 1e-30
        others = min(0.5, count / len(x)) * share**2
        by = 1 / (noise + others * values)
        along, alone = vectors @ (by * (vectors.T @ product)), vectors.square() @ (by * values)
        ratios.append((share * along - share**2 / 2 * alone) / (1 - others * alone))  # exclude the candidate
    return torch.stack(ratios)
