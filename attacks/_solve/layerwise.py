"""Inverts a convolution: finds its input from its output, the loss's slope in the output, and the kernel's gradient.

Two systems are linear in the input. Kernel equations: the kernel's gradient is the slope times the patches of the
input, separately for each input channel. Output equations: the output is the convolution of the input.

Source: Zhu and Blaschko 2021, "R-GAP: recursive gradient attack on privacy". Differs: weights output equations by the
certainty of the output, and uses each system only in directions that the other system leaves open.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import conv2d, conv_transpose2d, unfold

from leakgauge.harness.core.rng import Key, normal

_WEAK = 1e-2  # strength in the kernel equations, relative to the strongest, below which output equations replace them
_OPEN = 128  # number of directions of an input in which the kernel equations correct the output equations
_ROUNDS = 2  # rounds of subspace iteration for the open directions and of refinement; the last system corrects both


class Geometry(NamedTuple):
    """A convolution with a square kernel; `shape` is (channels, height, width) of its input."""

    shape: tuple[int, int, int]
    stride: int
    padding: int


class Evidence(NamedTuple):
    """The known values of a convolution at one input; all float64.

    Attributes:
        output: [o, h, w], without the bias.
        trust: [o, h, w], inverse standard deviation of the output, up to a factor.
        slope: [o, h, w], slope of the loss in the output, up to a factor.
        gradient: [o, i, k, k], gradient of the loss in the kernel, with the same factor.
    """

    output: Tensor
    trust: Tensor
    slope: Tensor
    gradient: Tensor


class Underdetermined(ValueError):
    """There are fewer equations than unknowns."""


class Inverse(Protocol):
    """A convolution with a known kernel that is prepared for many inputs."""

    def solve(self, evidence: Evidence) -> Tensor:
        """The input [i, h, w].

        Raises:
            Underdetermined: the two systems do not determine the input.
        """


def inverse(kernel: Tensor, geometry: Geometry, ridge: float) -> Inverse:
    """The better of two inversions of the convolution with `kernel` [o, i, k, k] float64.

    Kernel equations are more precise, because they come directly from the received gradient, but each channel has only
    o * k * k of them.

    Args:
        ridge: added to the squared output equations, as a share of their largest entry.
    """
    channels, height, width = geometry.shape
    positions = _positions(kernel.shape[-1], geometry)
    outputs, pixels = len(kernel) * len(positions), height * width
    if pixels > kernel[:, 0].numel() and outputs >= channels * pixels:
        return _OutputFirst(kernel, geometry, positions, _band(positions, geometry), ridge)
    return _KernelFirst(kernel, geometry, positions)


def _positions(side: int, geometry: Geometry) -> Tensor:
    """[outputs, side * side]: the pixel of a channel behind each patch entry; height * width means outside."""
    _, height, width = geometry.shape
    numbers = torch.arange(1, height * width + 1, dtype=torch.float64).reshape(1, 1, height, width)
    pixels = unfold(numbers, side, padding=geometry.padding, stride=geometry.stride)[0].T.long() - 1
    return pixels.where(pixels >= 0, height * width)


def _kernel_equations(slope: Tensor, positions: Tensor, pixels: int) -> Tensor:
    """[o * k * k, pixels]: the map from an input channel to the gradient of the kernel's slice for it."""
    outputs, taps = len(slope), positions.shape[1]
    rows = slope.new_zeros(outputs, taps, pixels + 1)
    values = slope.reshape(outputs, 1, -1).expand(outputs, taps, -1)
    rows.scatter_(2, positions.T.expand(outputs, -1, -1), values)
    return rows[:, :, :pixels].reshape(outputs * taps, pixels)


@dataclass(frozen=True, eq=False)
class _KernelFirst:
    """Uses kernel equations, and output equations in the few directions that the kernel equations leave open."""

    kernel: Tensor
    geometry: Geometry
    positions: Tensor

    def solve(self, evidence: Evidence) -> Tensor:
        channels, height, width = self.geometry.shape
        pixels = height * width
        equations = _kernel_equations(evidence.slope, self.positions, pixels)
        left, strength, right = torch.linalg.svd(equations, full_matrices=len(equations) < pixels)
        strong = int((strength > _WEAK * strength[0]).sum())
        amounts = evidence.gradient.transpose(0, 1).flatten(1) @ left[:, :strong] / strength[:strong]
        x: Tensor = (amounts @ right[:strong]).reshape(channels, height, width)
        weak = right[strong:].contiguous()
        return x + self._weak_part(evidence, x, weak) if len(weak) else x

    def _weak_part(self, evidence: Evidence, x: Tensor, weak: Tensor) -> Tensor:
        """The part of the input in the directions `weak` [m, pixels] of each channel, from the output equations."""
        channels, height, width = self.geometry.shape
        if channels * len(weak) > evidence.output.numel():
            raise Underdetermined("a convolution's gradient gives fewer equations than its input has pixels")
        directions = torch.kron(torch.eye(channels, dtype=weak.dtype), weak).reshape(-1, channels, height, width)
        shown = _convolve(directions, self.kernel, self.geometry).flatten(1).T
        missing = evidence.output - _convolve(x[None], self.kernel, self.geometry)[0]
        trust = evidence.trust.flatten()[:, None]
        amount = torch.linalg.lstsq(trust * shown, trust * missing.reshape(-1, 1)).solution
        corrected: Tensor = (amount.T @ directions.flatten(1)).reshape(channels, height, width)
        return corrected


@dataclass(frozen=True, eq=False)
class _OutputFirst:
    """Uses output equations, and kernel equations in the directions that output equations barely determine."""

    kernel: Tensor
    geometry: Geometry
    positions: Tensor
    band: _Band
    ridge: float

    def solve(self, evidence: Evidence) -> Tensor:
        trust = evidence.trust / evidence.trust.max()
        factor = self.band.factor(self.kernel, trust, self.ridge)
        x = evidence.output.new_zeros(1, *self.geometry.shape)
        channels, height, width = self.geometry.shape
        for _ in range(_ROUNDS):
            back = pulled_back(trust * self._missing(evidence, trust, x), self.kernel, self.geometry)
            step = factor.solve(back[0].permute(1, 2, 0).reshape(-1, 1))
            x = x + step.reshape(height, width, channels).permute(2, 0, 1)[None]
        directions = self._open(factor)
        shown = trust * _convolve(directions, self.kernel, self.geometry)
        basis, triangle = torch.linalg.qr(shown.flatten(1).T)
        output_side = basis.T @ self._missing(evidence, trust, x).reshape(-1, 1)
        # divided by the largest slope, so comparable with the weighted output equations at any common factor
        unit = evidence.slope.abs().max()
        equations = _kernel_equations(evidence.slope / unit, self.positions, math.prod(self.geometry.shape[1:]))
        kernel_side = (evidence.gradient / unit).transpose(0, 1).flatten(1) - x[0].flatten(1) @ equations.T
        kernel_rows = (directions.flatten(2) @ equations.T).flatten(1).T
        rows = torch.cat([triangle, kernel_rows])
        amount = torch.linalg.lstsq(rows, torch.cat([output_side, kernel_side.reshape(-1, 1)])).solution
        corrected: Tensor = x[0] + (amount[:, 0, None, None, None] * directions).sum(dim=0)
        return corrected

    def _missing(self, evidence: Evidence, trust: Tensor, x: Tensor) -> Tensor:
        """[1, o, h, w]: weighted residuals of the output equations."""
        return trust * (evidence.output - _convolve(x, self.kernel, self.geometry))

    def _open(self, factor: _Factor) -> Tensor:
        """[m, i, h, w]: orthonormal directions of the input with the smallest output."""
        channels, height, width = self.geometry.shape
        size = channels * height * width
        # any fixed start works here
        x = normal(Key(0).child("open directions"), (size, min(_OPEN, size)), dtype=torch.float64)
        for _ in range(_ROUNDS):
            x = torch.linalg.qr(factor.solve(x)).Q
        return x.T.reshape(-1, height, width, channels).permute(0, 3, 1, 2)


def pulled_back(slope: Tensor, kernel: Tensor, geometry: Geometry) -> Tensor:
    """[b, i, h, w]: the transposed convolution of slopes [b, o, h, w] in the output."""
    padding, stride = geometry.padding, geometry.stride
    height, width = (
        side + 2 * padding - kernel.shape[-1] - stride * (outputs - 1)
        for side, outputs in zip(geometry.shape[1:], slope.shape[2:], strict=True)
    )
    return conv_transpose2d(slope, kernel, stride=stride, padding=padding, output_padding=(height, width))


def _convolve(x: Tensor, kernel: Tensor, geometry: Geometry) -> Tensor:
    return conv2d(x, kernel, stride=geometry.stride, padding=geometry.padding)


@dataclass(frozen=True, eq=False)
class _Band:
    """Places of the entries of the squared output equations, which form a band if unknowns are ordered by image rows.

    A block of unknowns has one image row less than the kernel, so only neighboring blocks interact.

    Attributes:
        blocks, size: number of blocks, and unknowns in each; the last block may be padded.
        source: place of each entry in the flat [positions, i * k * k, i * k * k] products of patch entries.
        target: place of each entry in the flat [blocks, 2, size, size] blocks on and below the diagonal.
    """

    blocks: int
    size: int
    unknowns: int
    source: Tensor
    target: Tensor

    def factor(self, kernel: Tensor, trust: Tensor, ridge: float) -> _Factor:
        """Cholesky factor of the squared output equations, weighted by `trust` [o, h, w], plus the ridge."""
        taps = kernel.flatten(1)
        weighed = trust.square().flatten(1).T[:, :, None] * taps  # [positions, o, i * k * k]
        products = (taps.T @ weighed).flatten()
        flat = taps.new_zeros(self.blocks * 2 * self.size * self.size)
        flat.scatter_add_(0, self.target, products[self.source])
        stored = flat.reshape(self.blocks, 2, self.size, self.size)
        diagonal = stored[:, 0].diagonal(dim1=1, dim2=2)
        diagonal += ridge * diagonal.max()
        diagonal.reshape(-1)[self.unknowns :] = 1.0
        return _factor(stored)


def _band(positions: Tensor, geometry: Geometry) -> _Band:
    channels, height, width = geometry.shape
    unknowns = channels * height * width
    rows = max(1, math.isqrt(positions.shape[1]) - 1)
    size = rows * width * channels
    inside = (positions < height * width).repeat(1, channels)
    places = torch.cat([positions * channels + channel for channel in range(channels)], dim=1)
    lower, upper = places[:, :, None], places[:, None, :]
    below = lower // size - upper // size
    kept = inside[:, :, None] & inside[:, None, :] & (below >= 0)
    target = ((upper // size * 2 + below) * size + lower % size) * size + upper % size
    return _Band(-(-height // rows), size, unknowns, kept.flatten().nonzero()[:, 0], target[kept])


@dataclass(frozen=True, eq=False)
class _Factor:
    """Lower Cholesky factor of a block tridiagonal matrix: its diagonal blocks and the blocks below them."""

    diagonal: Sequence[Tensor]
    below: Sequence[Tensor]

    def solve(self, right: Tensor) -> Tensor:
        """Solutions [n, m] for right sides [n, m]."""
        size = len(self.diagonal[0])
        blocks = list(torch.split(torch.cat([right, right.new_zeros(-len(right) % size, right.shape[1])]), size))
        for i, block in enumerate(self.diagonal):
            if i:
                blocks[i] = blocks[i] - self.below[i - 1] @ blocks[i - 1]
            blocks[i] = torch.linalg.solve_triangular(block, blocks[i], upper=False)
        for i in reversed(range(len(blocks))):
            if i < len(self.below):
                blocks[i] = blocks[i] - self.below[i].T @ blocks[i + 1]
            blocks[i] = torch.linalg.solve_triangular(self.diagonal[i].T, blocks[i], upper=True)
        return torch.cat(blocks)[: len(right)]


def _factor(stored: Tensor) -> _Factor:
    """The factor of a symmetric matrix with blocks `stored` [blocks, 2, size, size] on and below the diagonal."""
    diagonal, below = [torch.linalg.cholesky(stored[0, 0])], []
    for block, after in itertools.pairwise(stored):
        below.append(torch.linalg.solve_triangular(diagonal[-1], block[1].T, upper=False).T)
        diagonal.append(torch.linalg.cholesky(after[0] - below[-1] @ below[-1].T))
    return _Factor(diagonal, below)
