"""The features of the images of a batch, from the gradient of the first dense layer, without labels.

The gradient is D^T X = U diag(s) V^T, with slopes D [b, m] and features X [b, f]; an image has the slopes U q and the
features a V. Behind ReLU, images are vertices of the set of nonnegative a V, because many features are zero. Linear
programs find them: each minimizes the sum of the features that another input lacks. A vertex is an image if U spans its
slopes for a label. All others then have (a / s) q = 0.

Sources: Dimitrov et al. 2024 (SPEAR), who search q by its zeros; Kariyappa et al. 2023, "Cocktail party attack", who
search a by the independence of the images. Differs: searches a by the zeros of the features, and tests each image.
"""

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor
from torch.nn.functional import cross_entropy

from leakgauge.attacks._search.features import CLEAN, front
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.layers import Dropout, Flatten, MaxPool, Mean, MeanPool, Relu, Sigmoid
from leakgauge.harness.learn.structure import Structure
from leakgauge.harness.learn.tasks import ModelTask

_PROGRAMS, _IMITATED = 100, 4  # number of linear programs, each for another input, and of imitated batches
_RIGHT = 0.9  # least share of right features among the imitated images with small misfits
_CLEAR = 10.0  # least ratio of the smallest singular value of the images to the largest of the noise
_FAR = 0.05  # misfit up to which a vertex may be an image
_ALIKE = 0.999  # cosine of slopes from which on two vertices are the same image
_FACTORS = torch.logspace(-0.5, 0.5, 25).double(), torch.linspace(0.96, 1.04, 17).double()  # of lengths: coarse, fine
_POOLS = (Dropout, Flatten, MaxPool, Mean, MeanPool)


def shown(
    task: Task, params: Tensor, targets: Tensor, images: int, known: Examples, imitate: Callable[..., Tensor], key: Key
) -> list[tuple[Tensor, Tensor]]:
    """Features [k, f] and labels [k] that the gradients `targets` [n, d] show of k <= b images each.

    Imitated batches of `known` inputs show which misfits are small enough: nine in ten such images are right. Noise of
    a hundredth hides all features. The list is empty if features may be negative or the layers are unknown.

    Args:
        imitate: from inputs [b, *input_shape], labels [b] and a key to the adversary's estimate of their gradient.
    """
    before, owned = (front(task, params) if isinstance(task, ModelTask) else None) or (Structure(()), 0)
    last = next((layer for layer in reversed(before.layers) if not isinstance(layer, _POOLS)), None)
    usable = owned and isinstance(last, (Relu, Sigmoid)) and len(known.x) > _IMITATED * images
    if not isinstance(task, ModelTask) or task.structure is None or not usable or not bool(params.isfinite().all()):
        return []
    tensors = [tensor.double() for tensor in task.structure.split(params)]
    order = torch.from_numpy(rng.permutation(key, len(known.x)))[: _IMITATED * images + _PROGRAMS]
    truth, others = before(tensors[:owned], known.x[order].double(), None).tensor_split([_IMITATED * images])
    batches = enumerate(torch.split(order[: len(truth)], images))
    made = [imitate(known.x[rows], known.y[rows], key.child(number)) for number, rows in batches]
    found = [_find(task.structure, tensors[owned:], gradient, images, others) for gradient in (*made, *targets)]
    x, _, misfit = (torch.cat(parts) for parts in zip(*found[: len(made)], strict=True))
    misfit, rank = misfit.sort()
    wrong = (torch.cdist(x, truth) / truth.norm(dim=1)).amin(1)[rank] >= CLEAN
    right = wrong.cumsum(0) <= (1 - _RIGHT) * torch.arange(1, len(wrong) + 1)
    least, first = torch.cat([misfit[right], truth.new_zeros(1)]).max(), [*misfit[wrong].tolist(), _FAR][0]
    bound = torch.maximum(least, (least * first).sqrt())  # between right and wrong images
    return [(x[misfit <= bound], y[misfit <= bound]) for x, y, misfit in found[len(made) :]]


def _find(network: Structure, tensors: list[Tensor], gradient: Tensor, images: int, others: Tensor) -> list[Tensor]:
    """What a gradient [d] may show of its images, by the features `others` [s, f]: features, labels and misfits."""
    of_weight = network.split(gradient.double())[-len(tensors)]
    left, values, right = torch.linalg.svd(of_weight, full_matrices=False)
    noise = float(values[images] / values[images - 1]) if len(values) > images else 1.0
    left, values, right = left[:, :images], values[:images], right[:images]
    absent = ((others <= 0) & (others > 0).any(0)).to(others)
    x, q, before = right[:0], left[:0], -1
    while noise < 1 / _CLEAR and before < len(q) < images:
        before = len(q)
        basis = torch.linalg.qr((q / values).T, mode="complete").Q[:, before:]
        new = _vertices(basis.T @ right, absent, noise)
        new = others.norm(dim=1).median() * new / new.norm(dim=1, keepdim=True)
        for factors in _FACTORS:
            every = factors[:, None, None] * new
            misfit = _slopes(network, tensors, every.flatten(0, 1), left)[2].view(len(factors), -1)
            new = every[misfit.argmin(0), torch.arange(len(new))]
        slopes, _, misfit = _slopes(network, tensors, new, left)
        order = misfit.argsort()[: int((misfit < _FAR).sum())]
        new, units = new[order], (slopes @ left)[order]
        q = torch.cat([q, units / (units * (new @ right.T) / values).sum(1, keepdim=True)])
        units = q / q.norm(dim=1, keepdim=True)
        first = ~((units @ units.T).abs() > _ALIKE).tril(-1).any(1)
        q, x = q[first][:images], torch.cat([x, new])[first][:images]
    return [x, *_slopes(network, tensors, x, left)[1:]]


def _slopes(network: Structure, tensors: list[Tensor], x: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slopes [k, m] of unit length at x [k, f] for the label that `left` [m, b] spans best; label; misfit (a sine)."""
    behind, classes = Structure(network.layers[(network.first_dense or 0) + 1 :]), len(tensors[-1])
    z = torch.addmm(tensors[1], x, tensors[0].T).repeat_interleave(classes, 0).requires_grad_()
    scores, y = behind(tensors[2:], z, None), torch.arange(classes).repeat(len(x))
    (each,) = torch.autograd.grad(cross_entropy(scores, y, reduction="sum"), z)
    each = (each / each.norm(dim=1, keepdim=True)).nan_to_num(nan=0.0).view(len(x), classes, len(left))
    misfit, labels = (each - each @ left @ left.T).norm(dim=2).min(1)
    return each[torch.arange(len(x)), labels], labels, misfit


def _vertices(rows: Tensor, costs: Tensor, noise: float) -> Tensor:
    """[k, f]: nonnegative combinations of `rows` [b, f] with the sum 1 and the least of each of the `costs` [s, f]."""
    shape, found = rows.numpy(), [np.zeros((0, len(rows)))]
    sums = {"b_ub": np.full(rows.shape[1], max(_CLEAR * noise, 1e-3) / rows.shape[1]), "A_eq": shape.sum(1)[None]}
    for cost in (costs @ rows.T).numpy():
        result = linprog(cost, A_ub=-shape.T, b_eq=[1.0], bounds=(None, None), method="highs-ds", **sums)
        found += [result.x[None]] if result.status == 0 else []
    return torch.from_numpy(np.concatenate(found)) @ rows
