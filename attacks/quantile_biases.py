"""Quantile biases: a malicious server changes biases alone, and reads the records that are alone in a neuron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.attacks._engine.bottleneck import Without
from leakgauge.attacks._engine.closed_form import neurons_of
from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._engine.prior import prior_of
from leakgauge.attacks._engine.reconstruct import failed, unusable
from leakgauge.attacks._search.features import Features
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Attack, Guess, Message, Observation, Reconstruction
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.layers import Conv

_OFTEN = 0.5  # share of the records for which the neuron with the largest share fires
_OFF = 0.1  # share of a convolution's outputs below 0: SSIM of MNIST behind `lenet5` 0.78; 0.66 with honest biases
_EXACT = 1e-4  # tolerated relative error of a slope without noise; single precision reaches 1e-5
_QUIET = 1e-5  # share of the largest slope up to which a neuron counts as silent
_VOTES = 3  # fewest neurons that agree on a common factor other than 1


@dataclass(frozen=True)
class QuantileBiases(Attack):
    """Broadcasts the honest model with other biases up to its first dense layer, and reads records alone in a neuron.

    The biases are quantiles of auxiliary data: each neuron fires for another share of the records, and convolutions are
    rarely off. The gradient of a neuron that fires for one record is that record's inputs of the layer, times a slope.
    A certificate tells it from a mixture: the slope is the one that a record with these inputs and some label causes. A
    certified record is subtracted from all neurons, which leaves other records alone. Behind convolutions, each image
    is then searched by its inputs of the dense layer, as `map` does. The server discards these updates.

    Must know: one message of each victim, its number of images (public), and auxiliary data of the same kind. It also
    chooses the biases, without the victims: a malicious server. It infers a clip on which three neurons agree.

    Cannot: attack models without a dense ReLU layer before another dense layer, or updates of several steps, for which
    certificates would be wrong. It needs about twice as many neurons as images, records within the auxiliary range, and
    noise below 1e-8 of the update's length. It ignores per-record clips and dropout.

    A guess has as many images as the message. Images without a certificate are replaced by the auxiliary mean; the
    objective, which is the share of the layer's gradient that is left, shows that images are missing. If no record is
    certified, the guess has a `failure`.

    Args:
        batch: expected number of records behind a message: the least frequent neuron fires for one of them.
        evaluations: maximum number of evaluations in each search for an image behind convolutions.

    Raises:
        ValueError: batch < 2 or evaluations < 1; in `broadcast` and `run`: as `neurons_of`.

    Source: Nowak et al. 2024, "QBI: Quantile-based bias initialization"; Diana et al. 2026, "No more guessing", for a
        certificate. Differs: keeps the honest weights; many shares instead of one; subtracts the records found; the
        certificate compares slopes instead of subspaces, so it needs one neuron.
    """

    kind: ClassVar[str] = "reconstruction"
    needs: ClassVar[frozenset[str]] = frozenset({"messages", "models", "auxiliary", "broadcast"})

    batch: int = 16
    evaluations: int = 400

    def __post_init__(self) -> None:
        if self.batch < 2 or self.evaluations < 1:
            raise ValueError(f"expected batch >= 2 and evaluations >= 1, got {self.batch} and {self.evaluations}")

    def broadcast(self, seen: Observation, key: Key) -> Vector:
        """The honest model with other biases."""
        assert seen.auxiliary is not None
        assert seen.model is not None
        own = Without.of(seen.task)
        params = seen.model.params[own.kept]
        structure, _, head = neurons_of(own.task, params, "quantile-biases")
        tensors, owned = [*structure.split(params)], 0
        for at, layer in enumerate(structure.layers[: structure.first_dense]):
            owned += layer.owns
            if isinstance(layer, Conv) and layer.owns == 2:
                values = structure.front(at + 1)(tensors[:owned], seen.auxiliary.x[:300], None)
                values = values.transpose(0, 1).flatten(1)
                tensors[owned - 1] = tensors[owned - 1] - values.kthvalue(1 + int(_OFF * values.shape[1]), 1).values
        _, front, _ = neurons_of(own.task, structure.join(tensors), "quantile-biases")
        values = front(seen.auxiliary.x) @ head[0].T
        shares = torch.logspace(-math.log10(self.batch), math.log10(_OFTEN), len(head[1]))
        ranks = (shares[torch.from_numpy(rng.permutation(key, len(shares)))] * len(values)).long()
        tensors[owned + 1] = -values.sort(0, descending=True).values.gather(0, ranks[None])[0]
        return own.silenced(structure.join(tensors))

    def run(self, seen: Observation, key: Key) -> Reconstruction:
        """The certified records, in no order, then the fillers."""
        assert seen.auxiliary is not None
        own, (messages, model, _) = Without.of(seen.task), seen.observed_rounds[0]
        params, targets = model.params[own.kept], received_gradients(seen, softmax=True)[:, own.kept]
        structure, front, head = neurons_of(own.task, params, "quantile-biases")
        like, head, guesses = front(seen.auxiliary.x), [tensor.double() for tensor in head], list[Guess]()
        for message, target in zip(messages, targets, strict=True):
            if why := unusable(target) or ("the update has several steps" if message.steps > 1 else ""):
                guesses.append(failed(seen.task, message, why))
                continue
            weight, bias = structure.split(message.images * target.double())[-len(head) :][:2]
            found, y, rest = _certified(head, torch.cat([weight, bias[:, None]], 1), message.images, like)
            shown = target.new_zeros(len(found), len(target))  # gradients of records for which only one neuron fires
            weight, bias = structure.split(shown)[-len(head) :][:2]
            weight[:, 0], bias[:, 0] = found, 1.0
            guesses.append(self._guess(replace(seen, task=own.task), params, message, shown, y, rest, key))
        return Reconstruction(tuple(guesses))

    def _guess(
        self, seen: Observation, params: Tensor, message: Message, shown: Tensor, y: Tensor, rest: float, key: Key
    ) -> Guess:
        """The images behind the gradients `shown` [k, d], then the fillers; `rest` is the objective."""
        assert seen.auxiliary is not None
        missing, used = message.images - len(y), 1
        known = Features.of(seen.task, params, shown) if len(y) else None
        if known is None:
            return failed(seen.task, message, "no neuron certifies a single record: noise, or too many records")
        x, mean = known.features, seen.auxiliary.x.flatten(1).mean(0)
        if known.kernel is not None:
            prior = prior_of("gaussian", replace(seen, device="cpu"))
            minima = known.search(prior, prior.coordinates(mean.expand(len(x), -1)), self.evaluations, key)
            x, used = prior.inputs(minima.x), int(minima.evaluations.sum())
        x = torch.cat([x, mean.expand(missing, -1)]).view(-1, *seen.task.input_shape)
        return Guess(x, torch.cat([y, y.new_zeros(missing)]), rest, used)


def _certified(head: Sequence[Tensor], rows: Tensor, images: int, like: Tensor) -> tuple[Tensor, Tensor, float]:
    """Inputs [k, p] and labels [k] of certified records, and the share of the energy of `rows` that they leave over.

    Args:
        head: tensors of the dense layers; like: [n, p], inputs of the first one that show the range.
        rows: [m, p + 1], the gradients of its m neurons, summed over the records; the bias is last.
    """
    low, high = float(like.min()), float(like.max())
    records, labels, before, factor = rows[:0, :-1], torch.zeros(0, dtype=torch.int64), -1, 0.0
    energy, quiet = float(rows.square().sum()), _QUIET * float(rows[:, -1].abs().max())
    while before < len(labels) < images:
        before, h = len(labels), rows[:, :-1] / rows[:, -1:]
        inside = (h - low > -_EXACT * (high - low)).all(1) & (h - high < high - low).all(1)
        (at,) = (inside & (rows[:, -1].abs() > quiet)).nonzero(as_tuple=True)
        slopes = _slopes(head, h[at])
        ratios = rows[at, -1:] / slopes[torch.arange(len(at)), :, at]
        factor = factor or _factor(ratios[(ratios > 0) & ratios.isfinite()])
        certain = (ratios / factor - 1).abs() < _EXACT
        certain &= certain.sum(1, keepdim=True) == 1  # one label
        k, label = certain.nonzero(as_tuple=True)
        h, slopes = h[at[k]], slopes[k, label]
        first = ~torch.tril(torch.cdist(h, h) < 1e-2 * h.norm(dim=1), -1).any(1)
        h, slopes, label = h[first], slopes[first], label[first]
        rows = rows - factor * slopes.T @ torch.cat([h, h.new_ones(len(h), 1)], 1)
        records, labels = torch.cat([records, h]), torch.cat([labels, label])
    return records[:images].to(like), labels[:images], float(rows.square().sum()) / energy


def _factor(ratios: Tensor) -> float:
    """The common factor of a message: 1, unless more of its ratios of slopes agree on another one."""
    ratios = ratios.sort().values
    votes = torch.searchsorted(ratios, ratios * (1 + 2 * _EXACT), right=True) - torch.arange(len(ratios))
    if not len(votes) or int(votes.max()) < max(_VOTES, 1 + int(((ratios - 1).abs() < _EXACT).sum())):
        return 1.0
    return float(ratios[int(votes.argmax()) :][: int(votes.max())].mean())


def _slopes(head: Sequence[Tensor], h: Tensor) -> Tensor:
    """[k, c, m]: a record's slopes in the first layer's outputs, for its inputs h [k, p] and each label."""
    on, slopes = [], head[-2]
    for weight, bias in zip(head[:-2:2], head[1:-2:2], strict=True):
        h = (h @ weight.T + bias).clamp(min=0)
        on.append((h > 0).to(h)[:, None])
    for active, weight in zip(on[:0:-1], head[-4:0:-2], strict=True):
        slopes = slopes * active @ weight
    residuals = (h @ head[-2].T + head[-1]).softmax(1)[:, None] - torch.eye(len(head[-1])).to(h)
    return residuals @ (slopes * on[0])
