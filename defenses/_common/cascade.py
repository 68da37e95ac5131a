"""Two defenses in a row, `laplace+sdq`: the second carries the numbers of the first, whose promise stays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from leakgauge.harness.core.accounting import Pure, repeat
from leakgauge.harness.core.claim import Claim, Proof
from leakgauge.harness.core.codec import pack_float32, unpack_float32
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


class Rounded(NamedTuple):
    """How the numbers of n messages were quantized, all in units.

    step: width of a cell, along each generator of the lattice where numbers share one.
    side: [n, count], 1 where the cell of a number (of a lattice coordinate) has no upper end, -1 where it has no lower.
    dithered: the dither is known, and no longer in the restored numbers.
    variance: of the error of one number, apart from overload.
    inside: from candidates minus restored numbers, [n, count], to the same without what overload hides: along a
        generator, zero beyond the inner end of a cell that has no outer one.
    alone: each number is rounded by itself, and its error is uniform; else a lattice has several.
    """

    step: float
    side: Tensor
    dithered: bool
    variance: float
    inside: Callable[[Tensor], Tensor]
    alone: bool


class Perturbs(ABC):
    """A defense that may stand first: its message is a header and the noisy numbers as float32."""

    @abstractmethod
    def header_size(self, setting: Setting) -> int:
        """Bytes before the numbers."""

    @abstractmethod
    def count(self, setting: Setting) -> int:
        """Numbers in the message: d, or a few more where tensors are padded."""

    @abstractmethod
    def unit(self, setting: Setting) -> float:
        """What one unit of a quantizer's input is in the message's numbers.

        In that unit the numbers without their noise lie in [-1, 1] but for outliers; their mean square is 1/9 or less.
        """

    @abstractmethod
    def noise_variance(self, setting: Setting) -> float:
        """Of one number, in squared units."""

    @abstractmethod
    def misfit(self, received: Sequence[bytes], *, setting: Setting, rounded: Rounded | None = None) -> Likelihood:
        """The likelihood, where the numbers have been quantized in addition."""

    def attained(self, edge: float) -> float:
        """Epsilon of the claim's unit that one round attains even if numbers are quantized; 0: none is known.

        Args:
            edge: in units; all that is told of a number is whether it exceeds a threshold, of which those from -edge to
                edge are at hand.
        """
        return 0.0


class Quantizes(ABC):
    """A defense that may stand second: it carries any numbers as bits, with a dither from the shared key."""

    @abstractmethod
    def compress(self, values: Tensor, *, shared: Key, noise_variance: float) -> bytes:
        """values [n], in units in which they lie in [-1, 1] apart from noise of this variance; n tells the length."""

    @abstractmethod
    def restore(self, payload: bytes, count: int, *, shared: Key | None, noise_variance: float) -> Tensor:
        """[count] values; without the shared key, each is the middle of what it may be.

        Raises:
            MessageError: not the payload of so many values.
        """

    @abstractmethod
    def rounded(self, payloads: Sequence[bytes], count: int, *, noise_variance: float, dithered: bool) -> Rounded:
        """What values of n payloads, `count` each, have lost; `dithered`: for who knows the dither."""

    @abstractmethod
    def edge(self, noise_variance: float) -> float:
        """The outermost level: values beyond it all look the same."""


@dataclass(frozen=True)
class Cascade(Defense[None, None]):
    """A perturbation, then a quantizer that replaces the floats of its message.

    Guarantees:
        What is sent is a function of the first defense's message and of the shared key: whatever holds of that message
        holds of this one (post-processing).

    Raises:
        ValueError: the first does not perturb, or the second does not quantize.
    """

    randomized: ClassVar[bool] = True

    names: tuple[str, str]
    first: Defense[None, None]
    second: Defense[None, None]

    def __post_init__(self) -> None:
        if not isinstance(self.first, Perturbs):
            raise ValueError(f"expected a defense that adds noise before '+', got {self.names[0]!r}")
        if not isinstance(self.second, Quantizes):
            raise ValueError(f"expected a quantizer after '+', got {self.names[1]!r}")

    @property
    def _noise(self) -> Perturbs:
        """The first, as what it is."""
        assert isinstance(self.first, Perturbs)
        return self.first

    @property
    def _quantizer(self) -> Quantizes:
        """The second, as what it is."""
        assert isinstance(self.second, Quantizes)
        return self.second

    def parts(self, setting: Setting) -> Parts:
        """Of the first."""
        return self.first.parts(setting)

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """The first's header, then its numbers as the second carries them."""
        wire, _ = self.first.encode(None, None, update, link._replace(shared=link.key.child("noise")), private)
        header, numbers = split_message(wire, self._noise.header_size(link.setting), self._noise.count(link.setting))
        payload = self._quantizer.compress(
            numbers / self._noise.unit(link.setting),
            shared=link.key.child("dither"),
            noise_variance=self._noise.noise_variance(link.setting),
        )
        return header + payload, None

    def _first_message(self, received: bytes, shared: Key | None, setting: Setting) -> bytes:
        """The first's message, as far as the second has kept it."""
        size, variance = self._noise.header_size(setting), self._noise.noise_variance(setting)
        if len(received) < size:
            raise MessageError(f"expected a message with a header of {size} bytes, got {len(received)} bytes")
        key = None if shared is None else shared.child("dither")
        values = self._quantizer.restore(
            received[size:], self._noise.count(setting), shared=key, noise_variance=variance
        )
        return received[:size] + pack_float32(values * self._noise.unit(setting))

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """What the first makes of the restored numbers."""
        wire = self._first_message(received, link.shared, link.setting)
        return self.first.estimate(None, wire, link._replace(shared=None))

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """The first's, with the quantizer's error as further noise of the same variance.

        That error is uniform and not normal: a surrogate that is close where one of the two errors is much larger than
        the other. A number in an outermost cell speaks only against candidates that are not as far out.
        """
        each = zip(received, links.each(), strict=True)
        wires = [self._first_message(wire, link.shared, links.setting) for wire, link in each]
        rounded = self._quantizer.rounded(
            [wire[self._noise.header_size(links.setting) :] for wire in received],
            self._noise.count(links.setting),
            noise_variance=self._noise.noise_variance(links.setting),
            dithered=links.shared is not None,
        )
        return self._noise.misfit(wires, setting=links.setting, rounded=rounded)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """The first's: the second is post-processing, so that what is proved is a bound and need not be attained.

        Where what is known to be attained is more than is claimed, it comes first.
        """
        claim, rounds = self.first.claim(history, setting), len(history)
        bounds = tuple(map(_after_processing, (claim.proved, *claim.further)))
        shown = self._noise.attained(self._quantizer.edge(self._noise.noise_variance(setting)))
        if shown * rounds <= claim.epsilon:
            return replace(claim, proved=bounds[0], further=bounds[1:])
        reason = "two inputs are so far apart by whether one number exceeds a threshold that the dither may set."
        attained = Proof(repeat(Pure(shown), rounds), claim.unit, "closed form for two inputs", reason)
        return replace(claim, proved=attained, further=bounds)

    def parameters(self) -> dict[str, Any]:
        """Of both, by name; `first.name` and `second.name` where both have one of that name."""
        return join_parameters(self.names, self.first.parameters(), self.second.parameters())


def _after_processing(proof: Proof) -> Proof:
    """What is left of a proof about a message where a function of it is sent. The header, and what it tells, stays."""
    if proof.event is None:
        return proof
    return replace(proof, method=f"{proof.method}, post-processing", tight=False)


def split_message(wire: bytes, header_size: int, count: int) -> tuple[bytes, Tensor]:
    """The header and the numbers of a perturbation's message.

    Raises:
        MessageError: another length, or numbers that are not finite.
    """
    if len(wire) != header_size + 4 * count:
        raise MessageError(f"expected a message of {header_size + 4 * count} bytes, got {len(wire)} bytes")
    return wire[:header_size], unpack_float32(wire[header_size:], count)


def join_parameters(names: tuple[str, str], first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """One table from two: a key that both have is written `defense.key`."""
    tables = zip(names, (first, second), (second, first), strict=True)
    return {
        f"{name}.{key}" if key in other else key: value for name, mine, other in tables for key, value in mine.items()
    }
