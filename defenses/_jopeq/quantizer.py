"""What the defenses of JoPEQ have in common: scale, add private noise, quantize with a shared dither.

Source: Lang, Sofer, Shaked, Shlezinger 2022, "Joint privacy enhancement and quantization in federated learning", and
    its reference code.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from leakgauge.defenses._common.cascade import Quantizes, Rounded
from leakgauge.defenses._common.dither import draw_dither
from leakgauge.defenses._common.misfit import Misfit, rounded_misfit
from leakgauge.defenses._common.scale import Mode, Scaling
from leakgauge.defenses._jopeq.lattice import (
    Lattice,
    laplace_variance,
    paper_lattice_gamma,
    paper_scalar_gamma,
    paper_step,
    reference_gamma,
    reference_step,
    student_variance,
)
from leakgauge.defenses._jopeq.privacy import GENERATOR, SHIPPED, Student
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Proof, nothing_promised
from leakgauge.harness.core.codec import pack_levels, unpack_levels, width_of
from leakgauge.harness.core.contract import (
    Defense,
    Likelihood,
    Link,
    Links,
    MessageError,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Parts, Vector

Radius: TypeAlias = Literal["reference", "paper"] | float
"""gamma by the rule of the reference code, by that of the text, or as a number; the step of a number is the reference
code's. The rules are in `_lattice`."""

_PLACE = torch.tensor(GENERATOR, dtype=torch.float32)
_FIND = torch.tensor(np.linalg.inv(GENERATOR), dtype=torch.float32)


class Carrier(NamedTuple):
    """A dithered lattice as a code for unit-free numbers [n]: neighbors share a cell where it has two dimensions.

    Guarantees:
        ceil(n * ceil(log2(2^R + 1)) / 8) bytes, with n rounded up to whole cells: levels of R + 1 bits each. There are
        2^R + 1 of them, so that the honest rate is log2(2^R + 1) bits a number, not R.
    """

    lattice: Lattice

    def pack(self, values: Tensor, shared: Key) -> bytes:
        """The levels of values [n]."""
        short = -len(values) % self.lattice.dimension
        rows = self._rows(torch.cat([values, values.new_zeros(short)]) if short else values)
        levels = _flat(self.lattice.quantize(rows, draw_dither(shared, tuple(rows.shape)))).numpy()
        # -top..top becomes 0..2 top modulo the integer's size, which has no room for 2 top as a signed number
        unsigned = levels.view(f"u{levels.itemsize}")
        unsigned += self.lattice.top
        return pack_levels(unsigned, width_of(self.lattice.levels))

    def levels(self, payload: bytes, count: int) -> Tensor:
        """The levels, -top..top, float32 [count rounded up to whole cells].

        Raises:
            MessageError: another length, or a level that does not exist.
        """
        size = self.lattice.dimension
        read = unpack_levels(payload, -(-count // size) * size, width_of(self.lattice.levels))
        if read.max(initial=0) >= self.lattice.levels:
            raise MessageError(f"expected levels in 0..{self.lattice.levels - 1}, got {int(read.max())}")
        return torch.from_numpy(read).float().sub_(self.lattice.top)

    def place(self, levels: Tensor, count: int, shared: Key | None) -> Tensor:
        """The values [count] of levels; without the dither, the middle of what each may be."""
        rows = self._rows(levels)
        if shared is None:
            return _flat(self.lattice.point(rows))[:count]
        return _flat(self.lattice.restore(rows, draw_dither(shared, tuple(rows.shape))))[:count]

    def error_variance(self, dithered: bool) -> float:
        """Of a value without overload; who does not know the dither has it as a further error of the same law."""
        once = float(self.lattice.covariance.diagonal().mean())
        return once if dithered else 2 * once

    def side(self, levels: Tensor) -> Tensor:
        """1 where a level is the topmost, whose cell has no upper end, -1 where it is the lowest, else 0."""
        return (levels == self.lattice.top).float() - (levels == -self.lattice.top).float()

    def inside(self, residual: Tensor, side: Tensor) -> Tensor:
        """[n, count] candidates minus values, along a generator of the lattice zero where the cell has no end.

        What is beyond the edge is clipped to it, so that an outermost level speaks only against what is inside of its
        cell; there, the distance from the cell counts.
        """
        count, padded = residual.shape[1], side.shape[1]
        cells = self.in_cells(pad(residual, (0, padded - count)) if count < padded else residual)
        beyond = (cells * side + 0.5 * self.lattice.step).clamp(max=0.0) * side
        cells = torch.where(side == 0, cells, beyond)
        return cells if self.lattice.dimension == 1 else _turn(cells, _PLACE)[:, :count]

    def in_cells(self, residual: Tensor) -> Tensor:
        """[n, count] along the generators of the lattice at step 1."""
        return residual if self.lattice.dimension == 1 else _turn(residual, _FIND)

    def _rows(self, values: Tensor) -> Tensor:
        """[M], or [2, M] with neighbors in one column."""
        return values if self.lattice.dimension == 1 else values.reshape(-1, 2).T


@dataclass(frozen=True)
class Dithered(Defense[None, None]):
    """A defense that scales an update, adds noise from the private key and sends levels with dither from the shared."""

    @property
    @abstractmethod
    def scaling(self) -> Scaling:
        """How an update becomes numbers."""

    @property
    @abstractmethod
    def lattice(self) -> Lattice:
        """What the noisy numbers are rounded to."""

    @abstractmethod
    def perturb(self, values: Tensor, private: Key) -> Tensor:
        """The numbers [n] with their noise."""

    @abstractmethod
    def misfit(self, side: Tensor, *, dithered: bool) -> Misfit:
        """Of candidates minus values [n, count], those of levels whose `Carrier.side` is given.

        Args:
            dithered: the values are without their dither, which is known; else the middles of the levels.
        """

    def parts(self, setting: Setting) -> Parts:
        """Of the first tensor."""
        return self.scaling.parts(setting.layout)

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """The scales, then the levels of the noisy numbers."""
        check_update(update)
        header, values = self.scaling.normalize(update, link.setting.layout)
        return header + Carrier(self.lattice).pack(self.perturb(values, private), link.key), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The values without their dither, scaled back: unbiased but for overload; without the shared key, coarser."""
        header, levels = self._read(received, link.setting)
        values = Carrier(self.lattice).place(levels, len(levels), link.shared)
        return self.scaling.undo(header, values, link.setting.layout)

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """How far a candidate is from the values, by the law of noise and quantization error, and from the scales.

        A value at the edge tells that the number is there or beyond.
        """
        carrier, scaling = Carrier(self.lattice), self.scaling
        parts = [self._read(wire, links.setting) for wire in received]
        levels = torch.stack([read for _, read in parts])
        each = zip(parts, links.each(), strict=True)
        values = [carrier.place(read, len(read), link.shared) for (_, read), link in each]
        sent = torch.stack(values)
        candidates = scaling.candidates([header for header, _ in parts], links.setting.layout)
        misfit = self.misfit(carrier.side(levels), dithered=links.shared is not None)

        def score(update: Tensor) -> Tensor:
            return misfit(candidates.numbers(update) - sent) + candidates.penalty(update)

        return score

    def _read(self, received: bytes, setting: Setting) -> tuple[bytes, Tensor]:
        """The header and the levels of a message."""
        size = self.scaling.header_size(setting.layout)
        levels = Carrier(self.lattice).levels(received[size:], self.scaling.count(setting.layout))
        return received[:size], levels


@dataclass(frozen=True, eq=False)
class _AlongGenerators:
    """A law of lattice coordinates."""

    carrier: Carrier
    misfit: Misfit

    def __call__(self, residual: Tensor) -> Tensor:
        """Implement `Misfit`."""
        return self.misfit(self.carrier.in_cells(residual))


@dataclass(frozen=True)
class Bare(Dithered, Quantizes):
    """Subtractive dithered quantization by itself: no noise, no promise; after a '+' it carries another's numbers."""

    randomized: ClassVar[bool] = False
    dimension: ClassVar[int]

    bits: int = 1
    gamma: float | None = None

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.gamma is not None:
            positive(gamma=self.gamma)

    @property
    def scaling(self) -> Scaling:
        """Of each tensor."""
        return Scaling("tensor", self.dimension)

    @property
    def lattice(self) -> Lattice:
        """For numbers without noise."""
        return self._carrier(0.0).lattice

    def perturb(self, values: Tensor, private: Key) -> Tensor:
        """The numbers themselves."""
        return values

    def misfit(self, side: Tensor, *, dithered: bool) -> Misfit:
        """Of each lattice coordinate by itself, as it is rounded and overloads; see `rounded_misfit` for the law."""
        return _AlongGenerators(Carrier(self.lattice), rounded_misfit(side, self.lattice.step, 0.0, dithered=dithered))

    def compress(self, values: Tensor, *, shared: Key, noise_variance: float) -> bytes:
        """The levels of values [n]."""
        return self._carrier(noise_variance).pack(values, shared)

    def restore(self, payload: bytes, count: int, *, shared: Key | None, noise_variance: float) -> Tensor:
        """[count] values."""
        carrier = self._carrier(noise_variance)
        return carrier.place(carrier.levels(payload, count), count, shared)

    def rounded(self, payloads: Sequence[bytes], count: int, *, noise_variance: float, dithered: bool) -> Rounded:
        """The levels' cells; the variance is, of both values of a pair, the mean."""
        carrier = self._carrier(noise_variance)
        side = carrier.side(torch.stack([carrier.levels(payload, count) for payload in payloads]))
        return Rounded(
            step=carrier.lattice.step,
            side=side,
            dithered=dithered,
            variance=carrier.error_variance(dithered),
            inside=partial(carrier.inside, side=side),
            alone=self.dimension == 1,
        )

    def edge(self, noise_variance: float) -> float:
        """The outermost level."""
        return self._carrier(noise_variance).lattice.edge

    def _carrier(self, noise_variance: float) -> Carrier:
        """For numbers with noise of this variance."""
        gamma = reference_gamma(noise_variance) if self.gamma is None else self.gamma
        return Carrier(Lattice(reference_step(gamma, self.bits), self.bits, self.dimension))


def scalar_lattice(bits: int, epsilon: float, gamma: Radius) -> Lattice:
    """Of one coordinate with Laplace noise of scale 2/epsilon.

    Raises:
        ValueError: a parameter out of range.
    """
    check_bits(bits)
    positive(epsilon=epsilon)
    if gamma == "paper":
        return Lattice(paper_step(paper_scalar_gamma(bits, epsilon), bits), bits)
    return Lattice(reference_step(_radius(gamma, laplace_variance(epsilon)), bits), bits)


def pair_lattice(bits: int, noise: Student, gamma: Radius) -> Lattice:
    """Of two coordinates with t noise.

    Raises:
        ValueError: a parameter out of range.
    """
    check_bits(bits)
    variance = student_variance(*noise)
    if gamma == "paper":
        return Lattice(paper_step(paper_lattice_gamma(variance), bits), bits, 2)
    return Lattice(reference_step(_radius(gamma, variance), bits), bits, 2)


def student(epsilon: float, s2: float | None, nu: float | None) -> Student:
    """The t noise that is given, or the reference code's first for a nominal epsilon.

    Raises:
        ValueError: one of s2 and nu without the other, a number out of range, or an epsilon that has no noise.
    """
    positive(epsilon=epsilon)
    if s2 is not None and nu is not None:
        positive(s2=s2)
        student_variance(s2, nu)
        return Student(s2, nu)
    if s2 is not None or nu is not None:
        raise ValueError(f"expected s2 and nu or neither, got s2={s2} and nu={nu}")
    if epsilon not in SHIPPED:
        known = ", ".join(f"{value:g}" for value in SHIPPED)
        raise ValueError(f"expected epsilon {known}, or s2 and nu beside it, got epsilon={epsilon}")
    return SHIPPED[epsilon][0]


def draw_student(private: Key, pairs: int, root: Tensor, nu: float) -> Tensor:
    """[2 pairs] float32: bivariate t draws, one pair after the other, with scale matrix root root^T, root [2, 2]."""
    drawn = rng.normal(private.child("normal"), (pairs, 2), torch.float64) @ root.T
    drawn /= rng.chisquare(private.child("chi-square"), nu, (pairs, 1), torch.float64).div_(nu).sqrt_()
    return drawn.float().reshape(-1)


def pairs_unclipped(mode: Mode) -> tuple[str, ...]:
    """What a claim for pairs in the unit disc takes for granted."""
    return () if mode == "public" else ("the scale is given", "no pair lies outside the unit disc; nothing clips it")


def bare_claim(rounds: int, leak: Proof) -> Claim:
    """The claim of a quantizer without noise; what its dither hides is `leak`."""
    why = "no noise: for who knows the dither, a message is a function of the update; a norm is sent in the clear."
    return nothing_promised(rounds, why, leak)


def added_up(source: str, rounds: int) -> str:
    """The source of a claim over several rounds, of which the paper has none."""
    return source + (", rounds added up by us" if rounds > 1 else "")


def check_bits(bits: int) -> None:
    """Refuse a rate at which float32 would round the dither away.

    Raises:
        ValueError: not 1 to 16.
    """
    if not 1 <= bits <= 16:
        raise ValueError(f"expected 1 to 16 bits, got bits={bits}")


def _radius(gamma: Radius, variance: float) -> float:
    """gamma for the reference code's step."""
    if gamma == "reference":
        return reference_gamma(variance)
    if isinstance(gamma, str):
        raise ValueError(f"expected gamma reference, paper or a number, got gamma={gamma!r}")
    positive(gamma=gamma)
    return gamma


def _flat(rows: Tensor) -> Tensor:
    """[n] from [M] or [2, M], column by column."""
    return rows if rows.ndim == 1 else rows.T.reshape(-1)


def _turn(values: Tensor, matrix: Tensor) -> Tensor:
    """[n, count]: the matrix times each pair."""
    return (values.reshape(len(values), -1, 2) @ matrix.T.to(values)).reshape(len(values), -1)
