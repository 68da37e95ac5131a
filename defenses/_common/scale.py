"""How an update gets the unit that a noise scale and a quantizer's range refer to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.contract import MessageError
from leakgauge.harness.core.vec import Layout, Parts, Vector

Mode = Literal["tensor", "vector", "public"]

_SPREAD = 3.0
"""JoPEQ: entries get a standard deviation of 1/3, so that Chebyshev keeps most of them in [-1, 1]."""


def unclipped(mode: Mode) -> tuple[str, ...]:
    """What a claim for numbers in [-1, 1] takes for granted."""
    return () if mode == "public" else ("the scale is given", "no coordinate lies outside [-1, 1]; nothing clips it")


@dataclass(frozen=True)
class Scaling:
    """From an update to unit-free numbers and back; the pairs of a two-dimensional lattice stand side by side.

    | mode | numbers | header |
    |---|---|---|
    | `tensor` | of each tensor, (u - row means) / s, s = 3 |u - row means| / sqrt(columns) | means, s |
    | `vector` | u / s, s = 3 |u| / sqrt(M), M sub-vectors | s |
    | `public` | u / bound, clipped: to [-1, 1], or each pair to the unit disc | none |

    Args:
        lanes: L, 1 or 2; a tensor of n entries has L rows of ceil(n / L) columns, and row pairs make sub-vectors.
        bound: of `public`, in units of the update.

    Guarantees:
        undo(normalize(u)) is u (clipped, for `public`) up to float32 rounding.
        A zero tensor has s = 0, numbers 0, and comes back as its mean.

    Source: Lang et al. 2022: `vector` is the text, eq. (13), `tensor` the authors' code.
    """

    mode: Mode
    lanes: int = 1
    bound: float = 1.0

    def __post_init__(self) -> None:
        positive(clip=self.bound)

    def header_size(self, layout: Layout) -> int:
        """Bytes of the scales and means."""
        if self.mode == "public":
            return 0
        return 4 if self.mode == "vector" else 4 * (self.lanes + 1) * len(layout.sizes)

    def count(self, layout: Layout) -> int:
        """Numbers, padding included."""
        return sum(self.lanes * -(-size // self.lanes) for size in self._sizes(layout))

    def parts(self, layout: Layout) -> Parts:
        """The sub-vectors of the first piece that are whole: columns of its L rows."""
        size = self._sizes(layout)[0]
        columns = -(-size // self.lanes)
        index = torch.arange(self.lanes * columns).reshape(self.lanes, columns).T
        return Parts(index[(index < size).all(1)], self.mode != "public")

    def normalize(self, update: Vector, layout: Layout) -> tuple[bytes, Tensor]:
        """The header, and the numbers [count] float32."""
        header, parts = [], []
        for part in torch.split(update.detach().cpu(), self._sizes(layout)):
            rows = _rows(part, self.lanes)
            means, scale = self._measure(rows)
            header += [*means, scale] if self.mode == "tensor" else [scale]
            if self.mode == "tensor":
                rows = rows - torch.tensor(means)[:, None]
            values = rows / scale if scale > 0 else torch.zeros_like(rows)
            parts.append(values.T.reshape(-1))
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.mode == "public":
            return b"", self._clip(values)
        return np.array(header, "<f4").tobytes(), values

    def undo(self, header: bytes, values: Tensor, layout: Layout) -> Vector:
        """The update [d] float32 of these numbers [count].

        Raises:
            MessageError: a header of another length, or a scale that is not finite or below zero.
        """
        scales = iter(self._read(header, layout))
        parts = []
        sizes = self._sizes(layout)
        padded = [self.lanes * -(-size // self.lanes) for size in sizes]
        for part, size in zip(torch.split(values, padded), sizes, strict=True):
            means = [next(scales) for _ in range(self.lanes)] if self.mode == "tensor" else []
            rows = part.reshape(-1, self.lanes).T * next(scales)
            if means:
                rows = rows + torch.tensor(means)[:, None]
            parts.append(rows.reshape(-1)[:size])
        return torch.cat(parts)

    def _sizes(self, layout: Layout) -> list[int]:
        """Lengths of the pieces that have a scale of their own."""
        return list(layout.sizes) if self.mode == "tensor" else [layout.dim]

    def candidates(self, headers: Sequence[bytes], layout: Layout) -> Candidates:
        """What an attacker makes of n headers: how candidate updates turn into numbers."""
        read = torch.tensor([list(self._read(header, layout)) for header in headers], dtype=torch.float32)
        sizes, lanes = self._sizes(layout), self.lanes
        columns = [-(-size // lanes) for size in sizes]
        piece = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor([lanes * c for c in columns]))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        # the index d stands for the padding, which is zero
        places = [
            torch.where(within < size, start + within, layout.dim)
            for start, size, width in zip(starts, sizes, columns, strict=True)
            for within in [torch.arange(lanes * width).reshape(lanes, width).T.reshape(-1)]
        ]
        table = read.reshape(len(headers), len(sizes) if self.mode == "tensor" else 1, -1)
        lane = torch.arange(len(piece)) % lanes
        means = table[:, piece, lane] if self.mode == "tensor" else torch.zeros(1, 1)
        return Candidates(self, torch.cat(places), piece, lane, means, table[..., -1])

    def _measure(self, rows: Tensor) -> tuple[list[float], float]:
        """Means and scale of one piece [L, columns], as float32 can hold them."""
        if self.mode == "public":
            return [], self.bound
        exact = rows.double()
        means = exact.mean(1) if self.mode == "tensor" else torch.zeros(self.lanes, dtype=torch.float64)
        means = means.float().double()
        scale = _SPREAD * torch.linalg.vector_norm(exact - means[:, None]) / rows.shape[1] ** 0.5
        return means.tolist(), float(scale.float())

    def _clip(self, values: Tensor) -> Tensor:
        """Into [-1, 1], or each pair into the unit disc."""
        if self.lanes == 1:
            return values.clamp(-1.0, 1.0)
        pairs = values.reshape(-1, self.lanes)
        norms: Tensor = torch.linalg.vector_norm(pairs, dim=1, keepdim=True)
        return (pairs / norms.clamp(min=1.0)).reshape(-1)

    def _read(self, header: bytes, layout: Layout) -> Iterator[float]:
        """The numbers of a header."""
        expected = self.header_size(layout)
        if len(header) != expected:
            raise MessageError(f"expected a header of {expected} bytes, got {len(header)} bytes")
        if self.mode == "public":
            return iter([self.bound])
        numbers = np.frombuffer(header, "<f4").astype(np.float64)
        scales = numbers if self.mode == "vector" else numbers[self.lanes :: self.lanes + 1]
        if not np.isfinite(numbers).all() or (scales < 0).any():
            raise MessageError(f"expected finite means and scales >= 0, got {numbers.tolist()}")
        return iter(numbers.tolist())


_STIFF = 1e-3
"""Relative deviation of a candidate's scale from the one that was sent which counts as one standard deviation. What was
sent is exact to 6e-8; an optimizer that starts far away needs a softer wall."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """How n candidate updates, one a message, turn into the numbers of their messages.

    index, piece, lane: [count], where a number comes from, which scale it has, which row it is in; means: [n, count];
    scales: [n, pieces], as they were sent.
    """

    scaling: Scaling
    index: Tensor
    piece: Tensor
    lane: Tensor
    means: Tensor
    scales: Tensor

    def numbers(self, updates: Tensor) -> Tensor:
        """[n, count] of updates [n, d], by the scales that were sent."""
        centerd = self._take(updates) - self.means
        scales = self.scales[:, self.piece]
        numbers = torch.where(scales > 0, centerd / scales.where(scales > 0, 1.0), 0.0)
        if self.scaling.mode != "public":
            return numbers
        if self.scaling.lanes == 1:
            return numbers.clamp(-1.0, 1.0)
        pairs = numbers.reshape(len(numbers), -1, self.scaling.lanes)
        # the square's root has no gradient at zero
        return (pairs / pairs.square().sum(-1, keepdim=True).clamp(min=1.0).sqrt()).reshape(len(numbers), -1)

    def penalty(self, updates: Tensor) -> Tensor:
        """[n]: how far the candidates' own scales and means are from those that were sent, which is news in itself."""
        if self.scaling.mode == "public":
            return updates.new_zeros(len(updates))
        taken = self._take(updates)
        lanes, pieces = self.scaling.lanes, self.scales.shape[1]
        group = self.piece * lanes + self.lane
        columns = torch.bincount(group, minlength=pieces * lanes).to(taken.dtype)
        own = taken.new_zeros(len(taken), pieces * lanes).index_add(1, group, taken) / columns
        if self.scaling.mode == "vector":
            own = torch.zeros_like(own)
        sent = taken.new_zeros(len(taken), pieces * lanes)
        sent[:, group] = self.means.expand(len(taken), -1).to(taken) if self.scaling.mode == "tensor" else 0.0
        squares = taken.new_zeros(len(taken), pieces).index_add(1, self.piece, (taken - own[:, group]).square())
        scales = _SPREAD * (squares / columns[::lanes] + 1e-30).sqrt()
        # a constant tensor has scale 0, and its mean tells all of it
        floor = (_STIFF * self.scales.amax(1, keepdim=True)).clamp(min=1e-12)
        unit = _STIFF * torch.maximum(self.scales, floor)
        drift = ((own - sent).reshape(len(taken), pieces, lanes) / unit[..., None]).square().sum((1, 2))
        return 0.5 * (((scales - self.scales) / unit).square().sum(1) + drift)

    def _take(self, updates: Tensor) -> Tensor:
        """[n, count]: the updates' entries in the order of the numbers, zeros as padding."""
        return torch.cat([updates, updates.new_zeros(len(updates), 1)], 1)[:, self.index]


def _rows(part: Tensor, lanes: int) -> Tensor:
    """[L, columns] float32, padded with zeros at the end: entry i is paired with entry i + columns."""
    short = -len(part) % lanes
    whole = torch.cat([part, part.new_zeros(short)]) if short else part
    return whole.reshape(lanes, -1)
