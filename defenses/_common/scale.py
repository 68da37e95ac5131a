"""Scaling of updates to unit-free numbers, to which noise scales and the ranges of quantizers refer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from leakgauge.defenses._common.clip import Norm, clip_l2
from leakgauge.defenses._common.reference import scaled
from leakgauge.harness.core.accounting import repeat
from leakgauge.harness.core.claim import Arithmetic, Claim, Proof, Unit, Violation, claim_over
from leakgauge.harness.core.concentrated import laplace_l2
from leakgauge.harness.core.contract import Defense, Links, Setting
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.vec import Layout, Parts, Vector

Mode = Literal["tensor", "vector", "public"]
S = TypeVar("S")

_SPREAD = 3.0  # JoPEQ scales entries to a standard deviation of 1/3, so most lie in [-1, 1] by Chebyshev's inequality

# The assumption about single numbers, and about pairs
_INSIDE = {
    1: "all scaled coordinates are in [-1, 1], although nothing clips them",
    2: "all scaled pairs are in the unit disc, although nothing clips them",
}
_ROUNDING = 1e-6  # how far a number may exceed 1 because its scale is rounded to float32


def unclipped(mode: Mode, lanes: int = 1) -> tuple[str, ...]:
    """The assumptions of a claim for single numbers, or for pairs of numbers (lanes 2)."""
    return () if mode == "public" else ("neighboring updates have the same scale", _INSIDE[lanes])


@dataclass(frozen=True)
class Scaling:
    """Maps an update to unit-free numbers and back; the two numbers of a lattice pair are adjacent.

    | mode | numbers | header |
    |---|---|---|
    | `tensor` | of each tensor, (u - row means) / s, s = 3 |u - row means| / sqrt(columns) | means, s |
    | `vector` | u / s, s = 3 |u| / sqrt(M), M sub-vectors | s |
    | `public` | u / bound, clipped to [-1, 1], or each pair to the unit disc; or all to an l2 norm of 1 | none |

    Args:
        lanes: L, 1 or 2; a tensor of n entries has L rows of ceil(n / L) columns, and each column is a sub-vector.
        bound: the public bound of `public`, in units of the update.
        norm: what the bound holds for.

    Guarantees:
        undo(normalize(u)) is u (clipped, for `public`) up to float32 rounding.
        A zero tensor has s = 0 and numbers 0; undo returns its mean.

    Source: Lang et al. 2022: `vector` follows the text, eq. (13), `tensor` the authors' code.
    """

    mode: Mode
    lanes: int = 1
    bound: float = 1.0
    norm: Norm = "entry"

    def header_size(self, layout: Layout) -> int:
        """Number of bytes of the scales and means."""
        if self.mode == "public":
            return 0
        return 4 if self.mode == "vector" else 4 * (self.lanes + 1) * len(layout.sizes)

    def count(self, layout: Layout) -> int:
        """Number of numbers, padding included."""
        return sum(size + -size % self.lanes for size in self.sizes(layout))

    def normalize(self, update: Vector, layout: Layout) -> tuple[bytes, Tensor]:
        """The header, and the numbers [count] float32."""
        header, parts = [], []
        update = clip_l2(update, self.bound) if self.norm == "l2" else update
        for piece in update.detach().cpu().split_with_sizes(self.sizes(layout)):
            rows = _rows(piece, self.lanes)
            means, scale = self._measure(rows)
            header += [*means.flatten().tolist(), scale]
            if self.mode == "tensor":
                rows = rows - means
            values = rows / scale if scale > 0 else torch.zeros_like(rows)
            parts.append(values.T.reshape(-1))
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.mode == "public":
            return b"", self._clip(values)
        return np.array(header, "<f4").tobytes(), values

    def undo(self, header: bytes, values: Tensor, layout: Layout) -> Vector:
        """The update [d] float32 of these numbers [count].

        Raises:
            MessageError: a header of the wrong length, or a scale that is negative or not finite.
        """
        scales = iter(self.read(header, layout))
        sizes, parts = self.sizes(layout), []
        padded = [size + -size % self.lanes for size in sizes]
        for piece, size in zip(values.split_with_sizes(padded), sizes, strict=True):
            means = [[next(scales)] for _ in range(self.lanes)] if self.mode == "tensor" else []
            rows = piece.reshape(-1, self.lanes).T * next(scales)
            if means:
                rows = rows + torch.tensor(means)
            parts.append(rows.reshape(-1)[:size])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def before_levels(self) -> Arithmetic:
        """The arithmetic of a message of this header and levels: scales of the update are floats in the clear."""
        return Arithmetic.ROUNDING_SAFE if self.mode == "public" else Arithmetic.REALS

    def sizes(self, layout: Layout) -> list[int]:
        """Lengths of the pieces; each has its own scale."""
        return list(layout.sizes) if self.mode == "tensor" else [layout.dim]

    def candidates(self, headers: Sequence[bytes], layout: Layout) -> Candidates:
        """The map from candidate updates to numbers that an attacker derives from the scales in n received headers."""
        read = torch.tensor([list(self.read(header, layout)) for header in headers], dtype=torch.float32)
        sizes, lanes = self.sizes(layout), self.lanes
        table = read.reshape(len(headers), len(sizes), -1)
        if self.mode != "tensor":
            return Candidates(self, sizes, torch.zeros(1, 1, lanes), table[..., -1], torch.zeros(1, 1), table[..., -1])
        columns = torch.tensor([-(-size // lanes) for size in sizes])
        means, scales = table[..., :-1], table[..., -1]
        each = means, scales[..., None].expand_as(means)
        of_numbers = (values.repeat_interleave(columns, 1).flatten(1) for values in each)
        return Candidates(self, sizes, means, scales, *of_numbers)

    def _measure(self, rows: Tensor) -> tuple[Tensor, float]:
        """Means [L, 1] (empty except for `tensor`) and scale of one piece [L, columns], rounded to float32."""
        means = rows.new_empty(0)
        if self.mode == "public":
            return means, self.bound
        exact = rows.double()
        if self.mode == "tensor":
            means = exact.mean(1, keepdim=True).float()
            exact = exact - means
        norm = float(torch.linalg.vector_norm(exact))
        with np.errstate(over="ignore"):  # writing the header refuses an infinite scale
            return means, float(np.float32(_SPREAD * norm / rows.shape[1] ** 0.5))

    def _clip(self, values: Tensor) -> Tensor:
        if self.lanes == 1:
            return values.clamp(-1.0, 1.0)
        pairs = values.reshape(-1, self.lanes)
        norms: Tensor = torch.linalg.vector_norm(pairs, dim=1, keepdim=True)
        if not bool(torch.isfinite(norms).all()):  # squares overflow above 1e19
            norms = torch.linalg.vector_norm(pairs.double(), dim=1, keepdim=True)
            return (pairs / norms.clamp(min=1.0)).float().reshape(-1)
        return (pairs / norms.clamp(min=1.0)).reshape(-1)

    def read(self, header: bytes, layout: Layout) -> Iterator[float]:
        """The means and scales in a header."""
        expected = self.header_size(layout)
        if len(header) != expected:
            raise MessageError(f"expected a header of {expected} bytes, got {len(header)} bytes")
        if self.mode == "public":
            return iter([self.bound])
        numbers = np.frombuffer(header, "<f4")
        scales = numbers if self.mode == "vector" else numbers[self.lanes :: self.lanes + 1]
        if not np.isfinite(numbers).all() or (scales < 0).any():
            raise MessageError(f"expected finite means and scales >= 0, got {numbers.tolist()}")
        return iter(numbers.tolist())


class ByScale(Defense[S, None]):
    """A defense whose messages begin with the scales of the update, if these are not public.

    Each concrete class defines these fields in its own order, or `scaling`.
    """

    scale: Mode
    clip: float

    lanes: ClassVar[int] = 1
    """As in `Scaling`."""

    assumes_range: ClassVar[bool] = True
    """Whether the claim makes all assumptions of `unclipped`."""

    @property
    def scaling(self) -> Scaling:
        """How an update becomes unit-free numbers."""
        return Scaling(self.scale, self.lanes, self.clip)

    def parts(self, setting: Setting) -> Parts:
        """The complete sub-vectors of the first scaled piece: the columns of its L rows that have no padding."""
        scaling = self.scaling
        size = scaling.sizes(setting.layout)[0]
        index = torch.arange(size + -size % scaling.lanes).reshape(scaling.lanes, -1).T
        return Parts(index[(index < size).all(1)], scaling.mode != "public")

    def plaintext_statistic(self, updates: Tensor, setting: Setting) -> Tensor:
        """[n, h]: means and scales; h is 0 if the scale is public."""
        scaling, layout = self.scaling, setting.layout
        if scaling.mode == "public":
            return super().plaintext_statistic(updates, setting)
        header, _ = scaling.normalize(updates[0].float(), layout)
        means, scales = scaling.candidates([header], layout).measured(updates)
        return torch.cat([means.flatten(1), scales], 1) if scaling.mode == "tensor" else scales

    def read_plaintext_statistic(self, received: Sequence[bytes], setting: Setting) -> Tensor:
        """The numbers of `plaintext_statistic`, from the headers."""
        scaling, layout = self.scaling, setting.layout
        if scaling.mode == "public":
            return super().read_plaintext_statistic(received, setting)
        size, columns = scaling.header_size(layout), scaling.lanes + 1 if scaling.mode == "tensor" else 1
        read = torch.tensor([list(scaling.read(wire[:size], layout)) for wire in received], dtype=torch.float64)
        pieces = read.reshape(len(received), -1, columns)
        return torch.cat([pieces[..., :-1].flatten(1), pieces[..., -1]], 1)

    def violations(self, updates: Sequence[Vector], links: Links, lr: float) -> dict[str, Violation]:
        """The scaled numbers outside [-1, 1], or pairs outside the unit disc; a public scale has none."""
        mode, lanes = self.scaling.mode, self.scaling.lanes
        if mode == "public" or not self.assumes_range:
            return {}
        numbers = [scaled(update, links.setting.layout, mode, lanes).numbers for update in updates]
        rows = np.concatenate(numbers).reshape(-1, lanes)
        broken = int((np.einsum("ij,ij->i", rows, rows) > (1 + _ROUNDING) ** 2).sum())
        return {_INSIDE[lanes]: Violation(broken, len(rows), "coordinate" if lanes == 1 else "pair")}

    def claim_of_each(
        self, promised: float, each: float, proved: Proof, source: str, rounds: int, setting: Setting
    ) -> Claim:
        """The claim for a coordinate or pair: `promised` in a round; the epsilons of the rounds add up.

        Also the proof for a whole message: none if a norm is sent, else `each`, the proved epsilon, for all at once.
        """
        mode, lanes = self.scaling.mode, self.scaling.lanes
        count, assumes = self.scaling.count(setting.layout) // lanes, unclipped(mode, lanes)
        whole = Proof.none(Unit.MESSAGE, "a norm of the update is sent in the clear.")
        if mode == "public":
            why = f"all {count} {'coordinates' if lanes == 1 else 'pairs'} may change across their whole range at once."
            whole = Proof.pure(each * count, rounds, Unit.MESSAGE, why)
        assumes = assumes if self.assumes_range else assumes[:1]
        return claim_over(rounds, promised * rounds, proved, source=source, assumes=assumes, further=(whole,))

    def claim_of_l2(self, scale: float, delta: float, rounds: int, setting: Setting) -> Claim:
        """The claim of Laplace noise on updates in an l2 ball, and of what follows from them and the shared key.

        Args:
            scale: of the noise, in radii of the ball.
        """
        event = repeat(laplace_l2(2.0, scale, setting.dim), rounds)
        why = "Laplace noise on an update in a public l2 ball has at most the Renyi divergence of normal noise."
        proved = Proof(event, Unit.MESSAGE, "Renyi divergence", why, tight=False)
        return claim_over(rounds, proved.epsilon(delta), proved, source="our proof (`laplace_l2`)", delta=delta)


# Assumed relative standard deviation between a candidate's scale and the sent scale. The sent scale is exact to 6e-8,
# but an optimizer that starts far away needs a softer wall
_STIFF = 1e-3


@dataclass(frozen=True, eq=False)
class Candidates:
    """The map from n candidate updates, one per message, to the numbers of their messages.

    sizes: entries of each piece. means: [n, pieces, L] and scales: [n, pieces], as sent. center, spread: [n, count] or
    [n, 1], mean and scale of each number.
    """

    scaling: Scaling
    sizes: Sequence[int]
    means: Tensor
    scales: Tensor
    center: Tensor
    spread: Tensor

    def numbers(self, updates: Tensor) -> Tensor:
        """[n, count]: the numbers of updates [n, d] at the sent scales."""
        columns = self._columns(clip_l2(updates, self.scaling.bound) if self.scaling.norm == "l2" else updates)
        centered = torch.cat([piece.flatten(1) for piece in columns], 1) if len(columns) > 1 else columns[0].flatten(1)
        spread, centered = self.spread, centered - self.center
        numbers = torch.where(spread > 0, centered / spread.where(spread > 0, 1.0), 0.0)
        if self.scaling.mode != "public":
            return numbers
        if self.scaling.lanes == 1:
            return numbers.clamp(-1.0, 1.0)
        pairs = numbers.reshape(len(numbers), -1, self.scaling.lanes)
        # clamped before the root, which has no gradient at zero
        return (pairs / pairs.square().sum(-1, keepdim=True).clamp(min=1.0).sqrt()).reshape(len(numbers), -1)

    def penalty(self, updates: Tensor) -> Tensor:
        """[n]: the misfit of the candidates' own scales and means to the sent ones, which also carry information."""
        if self.scaling.mode == "public":
            return updates.new_zeros(len(updates))
        own, scales = self.measured(updates)
        # a constant tensor has scale 0, and its mean determines it
        floor = (_STIFF * self.scales.amax(1, keepdim=True)).clamp(min=1e-12)
        unit = _STIFF * torch.maximum(self.scales, floor)
        drift = ((own - self.means) / unit[..., None]).square().sum((1, 2))
        return 0.5 * (((scales - self.scales) / unit).square().sum(1) + drift)

    def measured(self, updates: Tensor) -> tuple[Tensor, Tensor]:
        """The means [n, pieces, L] and the scales [n, pieces] of the updates themselves."""
        means, squares = [], []
        for piece in self._columns(updates):
            mean = piece.mean(1) if self.scaling.mode == "tensor" else piece.new_zeros(len(piece), piece.shape[2])
            means.append(mean)
            squares.append((piece - mean[:, None]).square().sum((1, 2)) / piece.shape[1])
        return torch.stack(means, 1), _SPREAD * (torch.stack(squares, 1) + 1e-30).sqrt()

    def _columns(self, updates: Tensor) -> list[Tensor]:
        """[n, columns, L]: the sub-vectors of each piece of the updates [n, d], with zeros as padding."""
        lanes, columns = self.scaling.lanes, []
        for piece in updates.split_with_sizes(list(self.sizes), 1):
            rows = pad(piece, (0, -piece.shape[1] % lanes)) if piece.shape[1] % lanes else piece
            columns.append(rows.reshape(len(rows), lanes, -1).transpose(1, 2))
        return columns


def _rows(piece: Tensor, lanes: int) -> Tensor:
    """[L, columns]: the entries, zero-padded at the end; entry i is paired with entry i + columns."""
    short = -len(piece) % lanes
    whole = torch.cat([piece, piece.new_zeros(short)]) if short else piece
    return whole.reshape(lanes, -1)
