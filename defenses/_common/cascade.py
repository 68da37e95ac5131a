"""Two defenses in a row, as in `laplace+sdq`: the second encodes the numbers of the first, whose claim holds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from leakgauge.defenses._common.reference import Scaled
from leakgauge.defenses._common.scale import ByScale
from leakgauge.defenses._jopeq.distribution import leveled
from leakgauge.defenses._jopeq.lattice import Lattice, Rounded
from leakgauge.defenses._jopeq.quantizer import Bare
from leakgauge.harness.core.checks import check_update
from leakgauge.harness.core.claim import Arithmetic, Claim, Proof, Unit
from leakgauge.harness.core.codec import pack_float32, unpack_float32
from leakgauge.harness.core.contract import Likelihood, Link, Links, Setting
from leakgauge.harness.core.defense import Wrapper
from leakgauge.harness.core.distribution import Additive, MessageDistribution
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

THRESHOLD = "two inputs attain this epsilon by how often a number exceeds a threshold that the dither can set."
"""Why quantized numbers attain an epsilon."""


class Perturbs(ByScale[None]):
    """A defense that may come first in a cascade: its message is a header and the noisy numbers as float32."""

    @abstractmethod
    def perturb(self, numbers: Tensor, private: Key) -> Tensor:
        """The numbers [count] with noise from the private key, float32."""

    def unit(self, setting: Setting) -> float:
        """The size of one unit of a quantizer's input, in terms of the message's numbers: 1 if these are scaled.

        In this unit, the numbers without noise lie in [-1, 1], except for outliers; their mean square is at most 1/9.
        """
        return 1.0

    @abstractmethod
    def noise_variance(self, setting: Setting) -> float:
        """Variance of the noise in one number, in squared units."""

    @abstractmethod
    def misfit(self, received: Sequence[bytes], *, setting: Setting, rounded: Rounded | None = None) -> Likelihood:
        """The likelihood of n messages, whose numbers were quantized as `rounded` states."""

    def attained(self, lattice: Lattice, rounds: int, setting: Setting) -> Proof | None:
        """What two inputs attain although their numbers are quantized, for the claim's unit; None: unknown.

        Only the first coordinate of a cell is used. Its thresholds lie in [-edge, edge], in units, as the dither sets.
        """
        return None

    def normalize(self, update: Vector, setting: Setting) -> tuple[bytes, Tensor]:
        """The header, and the bounded or scaled numbers [count], float32."""
        return self.scaling.normalize(update, setting.layout)

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Bound or scale, add noise from the private key, send float32. Does not use the shared key."""
        check_update(update)
        header, numbers = self.normalize(update, link.setting)
        return header + pack_float32(self.perturb(numbers, private)), None

    def split(self, received: bytes, setting: Setting) -> tuple[bytes, Tensor]:
        """The header and the numbers [count] of a message.

        Raises:
            MessageError: wrong length, or numbers that are not finite.
        """
        size, count = self.scaling.header_size(setting.layout), self.scaling.count(setting.layout)
        if len(received) != size + 4 * count:
            raise MessageError(f"expected a message of {size + 4 * count} bytes, got {len(received)} bytes")
        return received[:size], unpack_float32(received[size:], count)

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The noisy numbers, scaled back: unbiased for the update, or for the clipped update if the defense clips."""
        header, numbers = self.split(received, link.setting)
        return self.scaling.undo(header, numbers, link.setting.layout)

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """The distribution of the noise, without quantization: see `misfit`."""
        return self.misfit(received, setting=links.setting)


@dataclass(frozen=True)
class Cascade(Wrapper[None, None]):
    """A perturbation, then a quantizer that encodes the floats of the perturbation's message.

    Guarantees:
        The message is a function of the first defense's message and of the shared key: all guarantees for the first
        message hold for this one (post-processing).

    Raises:
        ValueError: the first does not perturb, or the second does not quantize.
    """

    delegated: ClassVar[str] = (
        "randomized analog superposes relies promises local step_noise training_noise parts transmit average "
        "plaintext_statistic read_plaintext_statistic step_distribution settled state_metrics violations"
    )
    # there is no state; the second defense's error changes norms, variances and the distribution of a mean
    default: ClassVar[str] = (
        "correlates independent init remember exact_likelihood advance compensated stops decode longest error_variance "
        "aggregate_distribution summed_proof"
    )

    names: tuple[str, str]
    first: Perturbs
    second: Bare

    def __post_init__(self) -> None:
        if not isinstance(self.first, Perturbs):
            raise ValueError(f"expected a defense that adds noise before '+', got {self.names[0]!r}")
        if not isinstance(self.second, Bare):
            raise ValueError(f"expected a quantizer after '+', got {self.names[1]!r}")

    @property
    def wrapped(self) -> Perturbs:
        """The first defense."""
        return self.first

    @property
    def arithmetic(self) -> Arithmetic:  # type: ignore[override]  # it follows from a parameter
        """That of what leaves: levels, after the header of the first defense, whose floats stay with the client."""
        return self.first.scaling.before_levels

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """The first defense's header, then its numbers as encoded by the second."""
        check_update(update)
        header, numbers = self.first.normalize(update, link.setting)
        noisy = self.first.perturb(numbers, private) / self.first.unit(link.setting)
        return header + self._lattice(link.setting).pack(noisy, link.key.child("dither")), None

    def _lattice(self, setting: Setting) -> Lattice:
        return self.second.lattice_for(self.first.noise_variance(setting))

    def _levels(self, received: bytes, setting: Setting) -> tuple[bytes, Tensor]:
        size, count = self.first.scaling.header_size(setting.layout), self.first.scaling.count(setting.layout)
        if len(received) < size:
            raise MessageError(f"expected a message with a header of {size} bytes, got {len(received)} bytes")
        return received[:size], self._lattice(setting).read(received[size:], count)

    def _first_message(self, received: bytes, shared: Key | None, setting: Setting) -> bytes:
        """The first defense's message, as far as the second preserves it."""
        (header, levels), count = self._levels(received, setting), self.first.scaling.count(setting.layout)
        values = self._lattice(setting).place(levels, count, None if shared is None else shared.child("dither"))
        return header + pack_float32(values * self.first.unit(setting))

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The first defense's estimate from the restored numbers."""
        wire = self._first_message(received, link.shared, link.setting)
        return self.first.estimate(None, wire, link._replace(shared=None))

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """The first defense's likelihood, with the quantizer's error as further noise of the same variance.

        The quantizer's true error is uniform: the approximation is close if either the noise or this error is much
        larger than the other. A number in an outermost cell counts only against candidates that are less extreme.
        """
        setting, lattice = links.setting, self._lattice(links.setting)
        each = zip(received, links.each(), strict=True)
        wires = [self._first_message(wire, link.shared, setting) for wire, link in each]
        side = lattice.side(torch.stack([self._levels(wire, setting)[1] for wire in received]))
        return self.first.misfit(wires, setting=setting, rounded=Rounded(lattice, side, links.shared is not None))

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution | None:
        """The distribution of the levels of the first defense's numbers; None unless these are numbers plus noise."""
        first = self.first.message_distribution(None, None, update, link._replace(shared=link.key.child("noise")))
        if not isinstance(first, Additive):
            return None
        count, unit = len(first.center), self.first.unit(link.setting)
        places = np.arange(count) if first.places is None else first.places
        numbers = Scaled(np.asarray(first.header), first.center / unit, places)
        lattice, root = self._lattice(link.setting), first.scale / unit * np.eye(2)
        return leveled(numbers, first.noise, root, lattice, link.key.child("dither"))

    def low_noise_variant(self) -> Cascade | None:
        """The first defense's low-noise variant, then a finer second defense; None if the first states none."""
        quiet = self.first.low_noise_variant()
        return replace(self, first=quiet, second=self.second.finer()) if isinstance(quiet, Perturbs) else None

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """The first defense's claim; its proof becomes an upper bound, because the second is post-processing.

        Numbers with Laplace noise that are quantized one by one have exactly what two inputs attain (`scalar_epsilon`).
        """
        claim, rounds, lattice = self.first.claim(history, setting), len(history), self._lattice(setting)
        attained = self.first.attained(lattice, rounds, setting)
        proved, *further = map(_bound, (claim.proved, *claim.further))
        shown = attained.epsilon(claim.delta) if attained is not None else 0.0
        reached = 0 < shown >= proved.epsilon(claim.delta) * (1 - 1e-12)
        if attained is not None and not reached and claim.unit is Unit.COORDINATE and lattice.dimension == 1:
            each, promised = shown / rounds, claim.epsilon / rounds
            return self.first.claim_of_each(promised, each, attained, claim.source, rounds, setting)
        attained = attained if shown > 0 and not reached else None
        return replace(claim, proved=replace(proved, tight=reached), further=tuple(further), attained=attained)

    def parameters(self) -> dict[str, Any]:
        """The parameters of both defenses by name; a name that both have becomes `first.name` and `second.name`."""
        tables = self.first.parameters(), self.second.parameters()
        each = zip(self.names, tables, tables[::-1], strict=True)
        return {f"{name}.{k}" if k in other else k: value for name, own, other in each for k, value in own.items()}


def _bound(proof: Proof) -> Proof:
    """The proof for a function of the message; a missing bound stays missing, because the header is unchanged."""
    if proof.event is None:
        return proof
    return replace(proof, method=f"{proof.method}, post-processing", tight=False)
