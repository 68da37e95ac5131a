"""Imprint: a malicious server's first layer sorts a batch's records into bins, from which it reads them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from leakgauge.attacks._engine.bottleneck import Without
from leakgauge.attacks._engine.closed_form import dense_stack_of
from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._engine.reconstruct import failed, unusable
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Attack, Guess, Message, Observation, Reconstruction
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.structure import Structure
from leakgauge.harness.learn.tasks import ModelTask

_SMALL = 1e-12
"""Length of the first layer's rows: its outputs hardly move the scores, so each record's p - y depends only on its
label. The weights behind are about 1, so nearly all of the gradient's energy is in the first layer."""

_EXACT = 1e-3  # tolerated relative error of a slope, and error of an input over its range, without noise


@dataclass(frozen=True)
class Imprint(Attack):
    """Broadcasts a first layer that sorts a batch's records into bins, and reads each record that is alone in a bin.

    Each group of rows measures one principal component of the inputs and has biases at its quantiles. The difference of
    two neighboring rows' gradients is the sum of the records between their biases, each times a slope that depends only
    on its label. A record alone in a bin of one group is subtracted from its bins of the other groups, which leaves
    other records alone. The labels follow from the slopes. The server discards the updates of the attacked round.

    Must know: one message of each victim, its number of images (public), and auxiliary data of the same kind. It also
    chooses the parameters, which do not depend on the defense or the victims; this requires a malicious server. A
    common factor of a message, for example from a clip, is inferred.

    Cannot: attack models that begin with a convolution or have no hidden layer (see `trap-weights`), or separate
    records that share a bin in every group, such as copies. It needs twice as many hidden units as images, and noise
    far below one record's share of the gradient. It ignores per-record clips. An update of several steps shows the
    images of the first step, which destroys the imprint.

    Share of images with an SSIM above 0.5: all of 256 to 1024 undefended CIFAR-10 and MNIST images behind `mlp` in
    batches of 8, 32, 64 and 128, and all of 128 behind `mlp-small` in batches of 8, with all labels right. Of 96 images
    in CIFAR-10 batches of 32 behind `gaussian` with clip 1 and noise 1e-6, 1e-5, 2e-5, 5e-5, 1e-4: 1.00, 0.98, 0.91,
    0.63, 0.16. Behind `jopeq`, and behind `gaussian` at its defaults, the attack fails. Of 128 images in such batches,
    98 % are exact behind an update of 2 or 5 full-batch steps.

    A guess always has as many images as the message. Images that are not found are replaced by the auxiliary mean, with
    the labels that the last layer's bias leaves over; the objective, which is the energy left in the bins, shows that
    images are missing. If noise hides all records, or the parameters are honest, the guess has a `failure`.

    Args:
        groups: number of principal components that are measured, each with an equal share of the first layer's rows.

    Raises:
        ValueError: groups < 1; in `broadcast`: the model has no dense ReLU layer before another dense layer, the loss
            is not softmax cross-entropy, or the layer has fewer than two rows per group; in `run`: the loss is not
            softmax cross-entropy.

    Source: Fowl et al. 2022, "Robbing the Fed". Differs: uses several groups of rows and subtracts the records found,
        instead of one average of the pixels; uses slopes that depend on the label, which tell a single record from
        several.
    """

    kind: ClassVar[str] = "reconstruction"
    needs: ClassVar[frozenset[str]] = frozenset({"messages", "models", "auxiliary", "broadcast"})

    groups: int = 4

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"expected groups >= 1, got groups={self.groups}")

    def broadcast(self, seen: Observation, key: Key) -> Vector:
        """The imprint: directions and quantiles of the auxiliary data, and one code for each class."""
        assert seen.auxiliary is not None
        own = Without.of(seen.task)
        task = own.task
        assert isinstance(task, ModelTask)
        structure = _structure(task)
        if isinstance(structure, str):
            raise ValueError(structure)
        params, flat = torch.zeros(task.layout.dim), task.model.scale.apply(seen.auxiliary.x).flatten(1)
        tensors = structure.split(params)
        (hidden, inputs), groups = tensors[0].shape, min(self.groups, tensors[0].shape[1])
        if (rows := hidden // groups) < 2:
            raise ValueError(
                f"expected at least 2 rows of the first layer per group, got {hidden} rows for {groups} groups"
            )
        v, off = rng.normal(key.child("directions"), (inputs, groups)), flat - flat.mean(0)
        for _ in range(20):  # subspace iteration
            v = torch.linalg.qr(off.T @ (off @ v)).Q
        cuts = torch.quantile(flat @ v, torch.arange(rows) / rows, dim=0).T
        cuts[:, 0] -= 10 * (cuts[:, -1] - cuts[:, 0]) + 1  # fires for every record
        tensors[0][: groups * rows] = _SMALL * v.T.repeat_interleave(rows, 0)
        tensors[1][: groups * rows] = -_SMALL * cuts.flatten()
        code = torch.tensor([1.0, -1.0]).repeat(task.classes)[: task.classes]
        code *= 2 ** (torch.arange(task.classes) / task.classes)  # geometric, so that sums of codes hardly collide
        for middle in tensors[2:-2:2]:
            middle[0] = 1.0  # one unit adds up all units before it; the others are off
        tensors[-2].add_(code[:, None])
        return own.silenced(params)

    def run(self, seen: Observation, key: Key) -> Reconstruction:
        """The records found, in no order, then the fillers; the objective is the unexplained energy of all bins."""
        assert seen.auxiliary is not None
        own = Without.of(seen.task)
        task = own.task
        assert isinstance(task, ModelTask)
        (messages, model, _), targets = seen.observed_rounds[0], received_gradients(seen, softmax=True).double()
        layer, like = _read(task, model.params[own.kept]), task.model.scale.apply(seen.auxiliary.x)
        both = zip(messages, targets[:, own.kept], strict=True)
        return Reconstruction(tuple(_guess(task, layer, message, target, like) for message, target in both))


class _Layer(NamedTuple):
    """weight [g, p], bias [g, r]: row r of group g fires if weight x + bias > 0; slopes [c]: a record's, by label."""

    structure: Structure
    weight: Tensor
    bias: Tensor
    slopes: Tensor

    def distance(self, x: Tensor) -> Tensor:
        """[n, g, r]: distance of each record x [n, p] from each bin, in units of the inputs; not positive inside."""
        scale = self.weight.norm(dim=1)
        low = -self.bias / scale[:, None]
        high = torch.cat([low[:, 1:], torch.full_like(low[:, :1], torch.inf)], 1)
        at = (x @ self.weight.T / scale)[:, :, None]
        distance: Tensor = (low - at).maximum(at - high)
        return distance


def _structure(task: ModelTask) -> Structure | str:
    """The structure of a model that takes an imprint, or why it takes none."""
    structure, name = dense_stack_of(task), task.model.name
    fits = structure is not None and len(task.layout.shapes) >= 4
    if structure is not None and fits and not task.model.apply.dropout:
        return structure if task.softmax else "imprint needs a softmax cross-entropy loss; this model has another loss"
    known = "has no such layers" if task.structure is not None else "has layers that are not known"
    begins = "begins with a convolution" if len(task.layout.shapes[0]) > 3 else known
    why = "has dropout" if fits else begins
    return f"imprint needs a dense first layer with ReLU and a dense layer behind it; {name} {why}; use trap-weights"


def _read(task: ModelTask, params: Vector) -> _Layer | str:
    """The imprint in the parameters, or the reason why there is no imprint."""
    structure = _structure(task)
    if isinstance(structure, str):
        return structure
    if not bool(params.isfinite().all()):
        return "the model is not finite"
    tensors = structure.split(params.double())
    weight, counts = torch.unique_consecutive(tensors[0], dim=0, return_counts=True)
    weight, counts = weight[weight.any(1)], counts[weight.any(1)]
    codes = functools.reduce(torch.matmul, tensors[-2::-2][:-1])[:, 0]
    slopes = codes.mean() - codes
    if len(counts.unique()) != 1 or int(counts[0]) < 2 or not bool(slopes.all()):
        return "the model has no imprint: the rows of its first layer are not in groups of equal rows"
    return _Layer(structure, weight, tensors[1][: int(counts.sum())].view(len(weight), -1), slopes)


def _guess(task: ModelTask, layer: _Layer | str, message: Message, target: Tensor, like: Tensor) -> Guess:
    """The records of one message, then means of the auxiliary inputs `like`; `layer` may be a reason for failure."""
    if why := unusable(target) or (layer if isinstance(layer, str) else ""):
        return failed(task, message, why)
    assert isinstance(layer, _Layer)
    tensors, images = layer.structure.split(target), message.images
    rows = torch.cat([tensors[0], tensors[1][:, None]], 1)[: layer.bias.numel()].view(*layer.bias.shape, -1)
    bins = rows - torch.cat([rows[:, 1:], torch.zeros_like(rows[:, :1])], 1)
    # neighbors without a record between them have equal rows, up to the noise
    noise = float(bins[:, :-1, :-1].square().mean(2).min().sqrt())
    factor = _factor(bins[..., -1].flatten(), noise, layer.slopes / images, tensors[-1], images)
    x, y = _peel(layer, bins, factor * layer.slopes / images, noise, like)
    if not len(y):
        return failed(task, message, "no bin contains a single record: there is too much noise, or too many records")
    x, y, missing = x[:images], y[:images], max(images - len(y), 0)
    counts = images * (1 / task.classes - tensors[-1] / factor)
    left = (counts.round().long() - y.bincount(minlength=task.classes)).clamp(min=0)
    rest = torch.cat([torch.arange(task.classes).repeat_interleave(left), y.new_zeros(missing)])[:missing]
    x = torch.cat([x.to(like.dtype), like.flatten(1).mean(0).expand(missing, -1)])
    x = task.model.scale.stored(x.view(-1, *task.input_shape))
    return Guess(x, torch.cat([y, rest]), float(bins.square().sum()), 1)


def _factor(slopes: Tensor, noise: float, unit: Tensor, last: Tensor, images: int) -> Tensor:
    """The common factor of a message, for example from its clip: the factor with which most bins hold one record.

    Args:
        slopes: [bins]; unit: [c], a record's slopes without the factor, by label; last: [c] gradient of the last bias.
    """
    full = slopes[slopes.abs() > 5 * noise + 1e-6 * slopes.abs().max()]
    ratios = (full[:, None] / unit).flatten()
    ratios = ratios[ratios > 0].sort().values
    if not len(ratios):
        return unit.new_tensor(torch.nan)
    width = 2 * max(_EXACT, float(noise / full.abs().median()))
    first = torch.arange(len(ratios))
    votes = torch.searchsorted(ratios, ratios * (1 + width), right=True) - first
    sums = torch.cat([ratios.new_zeros(1), ratios.cumsum(0)])
    factors = ((sums[first + votes] - sums[first]) / votes)[votes >= 0.8 * votes.max()]
    counts = images * (1 / len(unit) - last / factors[:, None])
    return factors[(counts - counts.round()).square().sum(1).argmin()]


def _peel(layer: _Layer, bins: Tensor, unit: Tensor, noise: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Records [k, p] and labels [k]; each is subtracted from its `bins` [g, r, p + 1], whose last entry is the slope.

    Args:
        unit: [c] slope of a record, by label; noise: standard deviation in a bin; like: inputs that show the range.
    """
    least = float(unit.abs().min())
    exact, error = _EXACT * float(like.max() - like.min()), noise / least
    records, labels, before = bins[0, :0, :-1], torch.zeros(0, dtype=torch.int64), -1
    while before < len(records) <= layer.bias.numel():
        before = len(records)
        for g in range(len(bins)):
            off, label = (bins[g, :, -1:] - unit).abs().min(1)
            (alone,) = (off < max(_EXACT, 4 * error) * least).nonzero(as_tuple=True)
            label = label[alone]
            x = bins[g, alone, :-1] / unit[label][:, None]
            # a record lies in a nonempty bin of every group; noise and most mixtures do not
            empty = bins[..., :-1].square().mean(2).sqrt() <= least * (exact + 2 * error)
            distance = layer.distance(x)
            distance = distance.masked_fill(empty | (distance > exact + 4 * error), torch.inf)
            away, at = distance.min(2)
            at[:, g] = alone
            new = away.isfinite().all(1) & distance[torch.arange(len(x)), g, alone].isfinite()
            x, label, at = x[new], label[new], at[new]
            taken = unit[label][:, None] * torch.cat([x, torch.ones_like(x[:, :1])], 1)
            for group, places in zip(bins, at.T, strict=True):
                group.index_add_(0, places, taken, alpha=-1)
            records, labels = torch.cat([records, x]), torch.cat([labels, label])
    return records, labels
