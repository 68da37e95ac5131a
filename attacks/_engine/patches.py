"""The closed form of networks that project the patches of an image and add a trained position to each projection.

With patches X [places, entries], projection W and positions P, the loss sees X W^T + P. So its slopes in the projected
patches are the gradient of P, and the gradient of W is their product with X: linear equations for X.

Source: Lu et al. 2022, "APRIL: finding the Achilles' heel on privacy for vision transformers". Differs: finds the
tensors by dry runs, and weighs equations that are too few or noisy against a smooth image.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but not listed in __all__

from leakgauge.harness.core.rng import Key, normal, uniform
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.learn.called import Called
from leakgauge.harness.learn.tasks import ModelTask

_KEY = Key(0).child("patches", "dry run")
_AWAY = 0.03  # standard deviation of what dry runs add to parameters, so that no slope is zero, as behind a zero head
_SAME = 1e-5  # relative difference in double precision up to which two things count as equal
_OFTEN = 4  # most times that patches hold a pixel
_ROUNDING = 1e-7  # relative error of a gradient's entries, if nothing shows it
_GRAY, _VARIANCE = 0.5, 0.06  # mean and variance of a pixel; those of CIFAR-10
_ALIKE, _CHANNELS = 0.95, 0.9  # correlation of neighboring pixels, and of the channels of a pixel
_TURNS = 60  # of conjugate gradients
_DONE = 1e-18  # share of the first gain at which they end


class _Place(NamedTuple):
    """A tensor of the layout, and its axis that has the width of the projection."""

    at: int
    axis: int

    def rows(self, tensor: Tensor) -> Tensor:
        """[n, width]."""
        return tensor.movedim(self.axis, -1).flatten(0, -2)


@dataclass(frozen=True, eq=False)
class PatchForm:
    """A model whose first operation projects patches.

    Attributes:
        weight, position, bias: where the tensors are; bias None: there is none.
        places: [t], the rows of the positions that are added to patches.
        pixels: [t, m], the pixel that each entry of a patch shows; scale, shift: [t, m], what the entry does to it.
        shape: of an image.
    """

    layout: Layout
    weight: _Place
    position: _Place
    bias: int | None
    places: Tensor
    pixels: Tensor
    scale: Tensor
    shift: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, task: ModelTask, params: Tensor) -> PatchForm | None:
        """Find the tensors by dry runs near these parameters [d] float64; None: the model is no such network."""
        if len(task.input_shape) != 3 or not isinstance(task.model.apply, Called):
            return None
        if not (pairs := list(_pairs(task.layout.shapes, math.prod(task.input_shape)))):
            return None
        images = uniform(_KEY.child("images"), (4, *task.input_shape), dtype=torch.float64)
        wanted = sorted({place.at for pair in pairs for place in pair[:2]})
        first = next(_slopes(task, params, images[0], 1, wanted))
        for weight, position, rows, width in pairs:
            # one run shows almost all other tensors to be none
            if rows < width and not _spanned(position.rows(first[position.at]).T, weight.rows(first[weight.at]).T):
                continue
            if (form := cls._found(task, params, images, weight, position, 2 + 2 * rows // width)) is not None:
                return form
        return None

    @classmethod
    def _found(
        cls, task: ModelTask, params: Tensor, images: Tensor, weight: _Place, position: _Place, runs: int
    ) -> PatchForm | None:
        """The form with these tensors, if they are those of a projection and its positions."""
        width, shown = task.layout.shapes[weight.at][weight.axis], list[Tensor]()
        biases = [at for at, shape in enumerate(task.layout.shapes) if shape == (width,)]
        for image in images:
            slopes = list(_slopes(task, params, image, runs, [weight.at, position.at, *biases]))
            if (found := _solved(slopes, weight, position)) is None:
                return None
            shown.append(found)
        patches, x = torch.stack(shown), images.flatten(1)
        places = (patches.abs().amax((0, 2)) > _SAME * patches.abs().max()).nonzero()[:, 0]
        read = _pixels(patches[:, places], x)
        if read is None:
            return None
        total = position.rows(slopes[0][position.at])[places].sum(0)
        bias = next((at for at in biases if torch.dist(slopes[0][at], total) <= _SAME * total.norm()), None)
        return cls(task.layout, weight, position, bias, places, *read, task.input_shape)

    def solve(self, gradient: Tensor) -> Tensor:
        """Implement `ClosedForm`; all entries count as equally sure.

        The bias's gradient is the sum of the slopes, so its distance from this sum shows the noise of the entries. With
        fewer equations than places, or noisy ones, the image is the likeliest that is smooth.

        Raises:
            LinAlgError: the gradient of the positions is zero.
        """
        tensors = self.layout.split(gradient)
        slopes = self.position.rows(tensors[self.position.at])[self.places]
        wanted = self.weight.rows(tensors[self.weight.at]).T
        unit = slopes.square().mean().sqrt()
        if not unit > 0:
            raise LinAlgError("the gradient of the positions is zero, so the patches are not determined")
        slopes, wanted = slopes / unit, wanted / unit
        total = slopes.sum(0) if self.bias is None else tensors[self.bias] / unit
        noise = ((total - slopes.sum(0)).square().mean() / (1 + len(slopes))).clamp(min=_ROUNDING**2)
        return self._likeliest(_shrunk(slopes, noise), wanted, noise)

    def _likeliest(self, slopes: Tensor, wanted: Tensor, noise: Tensor) -> Tensor:
        """The image with slopes.T @ patches = wanted up to noise of this variance in both, by a smooth prior.

        Conjugate gradients; their preconditioner is the exact solution for independent entries of a patch.
        """
        axes = [torch.linalg.inv(_ALIKE ** _apart(torch.arange(n, dtype=noise.dtype)[None])) for n in self.shape[1:]]
        between = torch.full(self.shape[:1] * 2, _CHANNELS * _VARIANCE, dtype=noise.dtype).fill_diagonal_(_VARIANCE)
        between, mean, (of_places, of_entries) = torch.linalg.inv(between), self._gray, self._covariances()
        # errors of slopes are multiplied with the patches, so the entries of a patch share them
        errors = noise * (torch.eye(mean.shape[1], dtype=noise.dtype) + mean.T @ mean + len(mean) * of_entries)
        half, sure = torch.linalg.cholesky(errors), torch.linalg.inv(errors)
        halved = torch.linalg.solve_triangular(half, of_entries, upper=False)
        spread, turned = torch.linalg.eigh(torch.linalg.solve_triangular(half, halved.T, upper=False))
        root, turned = torch.linalg.cholesky(of_places), half @ turned
        strength, basis = torch.linalg.eigh(root.T @ slopes @ slopes.T @ root)
        shrunk = 1 / (strength.clamp(min=0)[:, None] + 1 / spread.clamp(min=1e-12 * spread.max()))
        back, root = (1 / self.scale).where(self.scale != 0, 0.0), root @ basis

        def curved(x: Tensor) -> Tensor:
            smooth = torch.einsum("cd,dhw,hi,wj->cij", between, x, *axes)
            return self._total(self.scale * (slopes @ (slopes.T @ self._rows(x, self.scale) @ sure))) + smooth

        def solved(x: Tensor) -> Tensor:
            return self._total(back * (root @ (shrunk * (root.T @ self._rows(x, back) @ turned)) @ turned.T))

        shown = slopes @ ((wanted - slopes.T @ mean) @ sure)
        return _GRAY + _conjugate(curved, solved, self._total(self.scale * shown))

    @property
    def _gray(self) -> Tensor:
        """[t, m] the patches of the mean image."""
        return _GRAY * self.scale + self.shift

    def _rows(self, x: Tensor, scale: Tensor) -> Tensor:
        """[t, m] the patches of an image."""
        return scale * x.flatten()[self.pixels]

    def _total(self, rows: Tensor) -> Tensor:
        """[*shape] the sums of the entries [t, m] that show a pixel."""
        total = rows.new_zeros(math.prod(self.shape))
        return total.index_add_(0, self.pixels.flatten(), rows.flatten()).reshape(self.shape)

    def _covariances(self) -> tuple[Tensor, Tensor]:
        """Of the places [t, t], relative to a pixel's variance, and of the entries of a patch [m, m]."""
        channel, row, column = torch.unravel_index(self.pixels, self.shape)
        at = torch.stack([row, column]).double()
        of_entries = _ALIKE ** _apart(at[:, 0]) * _CHANNELS ** (channel[0, :, None] != channel[0]).double()
        size = self.scale.square().mean(0).sqrt()
        return _ALIKE ** _apart(at.mean(2)), _VARIANCE * size[:, None] * of_entries * size


def _shrunk(rows: Tensor, noise: Tensor) -> Tensor:
    """The matrix nearest to rows without their noise of this variance.

    Source: Gavish and Donoho 2017, "Optimal shrinkage of singular values", eq. (7).
    """
    left, strength, right = torch.linalg.svd(rows, full_matrices=False)
    size, ratio = noise * max(rows.shape), min(rows.shape) / max(rows.shape)
    excess = (strength.square() / size - 1 - ratio).clamp(min=2 * math.sqrt(ratio))
    kept: Tensor = left * ((excess.square() - 4 * ratio).sqrt() * size / strength) @ right
    return kept


def _conjugate(apply: Callable[[Tensor], Tensor], solve: Callable[[Tensor], Tensor], left: Tensor) -> Tensor:
    """The x with apply(x) = left, by conjugate gradients with the preconditioner `solve`."""
    x, step, gains = torch.zeros_like(left), torch.zeros_like(left), [math.inf]
    for _ in range(_TURNS):
        better = solve(left)
        gain, before = float((left * better).sum()), gains[-1]
        gains.append(gain)
        if not gain > _DONE * gains[1]:
            break
        step = better + gain / before * step
        moved = apply(step)
        length = gain / (step * moved).sum()
        x, left = x + length * step, left - length * moved
    return x


def _apart(at: Tensor) -> Tensor:
    """[n, n] distances along both axes of points [2, n]."""
    return (at[:, :, None] - at[:, None]).abs().sum(0)


def _pairs(shapes: tuple[tuple[int, ...], ...], pixels: int) -> Iterator[tuple[_Place, _Place, int, int]]:
    """Each weight and positions that could be those of patches, by their sizes, with the numbers of rows and widths."""
    for (one, weight), (other, position) in itertools.permutations(enumerate(shapes), 2):
        if len(weight) < 2 or not 2 <= len(position) - (position[:1] == (1,)) <= 3:
            continue
        axes = itertools.product((0, 1) if len(weight) == 2 else (0,), {len(position) - 1, len(position) - 3})
        for axis, at in axes:
            if at >= 0 and math.prod(weight) > (width := weight[axis]) == position[at] > 1:
                rows = math.prod(position) // width
                if pixels <= rows * math.prod(weight) // width <= _OFTEN * pixels:
                    yield _Place(one, axis), _Place(other, at), rows, width


def _slopes(
    task: ModelTask, params: Tensor, image: Tensor, runs: int, wanted: list[int]
) -> Iterator[dict[int, Tensor]]:
    """The slopes in the wanted tensors of a function of the scores of an image, for several models near this one."""
    for run in range(runs):
        key = _KEY.child(run)
        near = params + _AWAY * normal(key.child("params"), params.shape, torch.float64)
        leaves = [tensor.clone().requires_grad_(at in wanted) for at, tensor in enumerate(task.layout.split(near))]
        factors = normal(key.child("factors"), (task.classes,), torch.float64)
        value = (task.model.apply(leaves, image[None], None) * factors).sum()
        slopes = torch.autograd.grad(value, [leaves[at] for at in wanted], materialize_grads=True)
        yield dict(zip(wanted, slopes, strict=True))


def _spanned(columns: Tensor, wanted: Tensor) -> bool:
    """Whether the columns [width, rows] may span the wanted ones [width, m]."""
    basis = torch.linalg.qr(columns).Q
    return bool((wanted - basis @ (basis.T @ wanted)).norm() <= _SAME * wanted.norm())


def _solved(slopes: list[dict[int, Tensor]], weight: _Place, position: _Place) -> Tensor | None:
    """[rows, m] the matrix by which the positions' slopes give those of the weight; None: there is none."""
    delta = torch.cat([position.rows(each[position.at]) for each in slopes], 1)
    wanted = torch.cat([weight.rows(each[weight.at]).T for each in slopes])
    found: Tensor = torch.linalg.lstsq(delta.T, wanted, driver="gelsd").solution
    return found if (delta.T @ found - wanted).norm() <= _SAME * wanted.norm() else None


def _pixels(patches: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The pixel of each entry of patches [4, t, m], its factor and its shift, [t, m] each, at images x [4, p].

    None: an entry is no multiple of a single pixel plus a constant, or patches lack a pixel.
    """
    one, two = patches[1] - patches[0], patches[2] - patches[0]
    near, order = torch.atan2(x[2] - x[0], x[1] - x[0]).remainder(math.pi).sort()
    angle = torch.atan2(two, one).remainder(math.pi)
    after = torch.searchsorted(near, angle) % len(near)
    closer = (near[after - 1] - angle).abs() < (near[after] - angle).abs()
    pixels = order[torch.where(closer, after - 1, after)]
    moved = torch.stack([x[1] - x[0], x[2] - x[0]])[:, pixels]
    scale = (moved * torch.stack([one, two])).sum(0) / moved.square().sum(0)
    scale = scale.where(scale.abs() > _SAME * scale.abs().max(), 0.0)
    shift = patches[0] - scale * x[0, pixels]
    told = torch.dist(scale * x[3, pixels] + shift, patches[3]) <= _SAME * patches[3].norm()
    return (pixels, scale, shift) if told and len(set(pixels[scale != 0].tolist())) == x.shape[1] else None
