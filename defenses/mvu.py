"""MVU: each coordinate passes through the unbiased channel of least variance for a number of bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from leakgauge.defenses._common.reference import scaled
from leakgauge.defenses._common.scale import ByScale, Mode, Scaling, unclipped, whole_message
from leakgauge.defenses._mvu import Design, design, exact_epsilon, sample
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Proof, Unit, claim_over
from leakgauge.harness.core.codec import pack_levels, unpack_levels
from leakgauge.harness.core.contract import Likelihood, Link, Links, Setting
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.law import Choices, Law, LawError, powers
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Vector

_LEAST = 1e-30
"""Smallest probability in the likelihood; keeps the logarithm and its gradient within float32."""


@dataclass(frozen=True)
class MVU(ByScale[Design]):
    """The minimum variance unbiased mechanism on each coordinate, with equal numbers of input and output bits.

    Args:
        epsilon: privacy budget of one coordinate, 0.01 to 24.
        bits: b, 1 to 4: the stochastic rounding has 2^b levels, and the message b bits per coordinate.
        clip: C, bound on the magnitude of a coordinate, in units of the update; for `scale = "public"`.
        scale: `public`: coordinates are clamped to [-C, C]. `tensor` and `vector`: the baseline of JoPEQ, which divides
            by three times a norm of the update, sends that norm in the clear, and clamps the result to [-1, 1].

    Guarantees:
        Messages have ceil(d * bits / 8) bytes, plus 8 bytes per tensor for `tensor`, or 4 bytes for `vector`.
        decode(encode(u)) is unbiased for the clamped update.
        The probabilities of an output for any two values of a coordinate differ by at most a factor of e^epsilon.

    Raises:
        ValueError: a parameter is out of range.

    Source: Chaudhuri, Guo, Rabbat 2022, "Privacy-aware compression for federated data analysis", strict LDP. JoPEQ's
        comparison apparently uses b in = b out = R.
    """

    epsilon: float = 4.0
    bits: int = 1
    clip: float = 1.0
    scale: Mode = "public"

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon, clip=self.clip)
        design(self.epsilon, self.bits, self.bits)

    @property
    def scaling(self) -> Scaling:
        """How an update becomes numbers."""
        return Scaling(self.scale, 1, self.clip)

    def init(self, setting: Setting) -> Design:
        """The public channel."""
        return design(self.epsilon, self.bits, self.bits)

    def encode(self, state: Design, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Clamp, round stochastically to a level, sample the channel. Does not use the shared key."""
        check_update(update)
        header, numbers = self.scaling.normalize(update, link.setting.layout)
        place = (numbers.double().clamp(-1.0, 1.0).numpy() + 1) / 2 * (len(state.P) - 1)
        chance = rng.uniform(private.child("rounding"), (len(place),), dtype=torch.float64).numpy()
        rows = np.floor(place).astype(np.int64)
        rows += chance < place - rows
        return header + pack_levels(sample(state.P, rows, private.child("channel")), self.bits), None

    def estimate(self, state: Design, received: bytes, link: Link) -> Vector:
        """The values of the columns, which are unbiased for the clamped update."""
        header, columns = self._read(received, link.setting)
        values = torch.from_numpy(2 * state.alpha[columns] - 1).float()
        return self.scaling.undo(header, values, link.setting.layout)

    def likelihood(self, state: Design, received: Sequence[bytes], links: Links) -> Likelihood:
        """Exact: a column's probability is linear between two levels. Adds a penalty for norms unlike the sent ones."""
        read = [self._read(wire, links.setting) for wire in received]
        candidates = self.scaling.candidates([header for header, _ in read], links.setting.layout)
        columns = torch.from_numpy(np.stack([columns for _, columns in read]))
        steps = len(state.P) - 1
        # one entry per column and two neighboring levels; flat, because indexing by pairs is several times slower
        low = torch.from_numpy(state.P[:-1].T.copy()).float().flatten()
        rise = torch.from_numpy(np.diff(state.P, axis=0).T.copy()).float().flatten()
        first = steps * columns

        def score(update: Tensor) -> Tensor:
            place = (candidates.numbers(update).clamp(-1.0, 1.0) + 1) / 2 * steps
            below = place.detach().floor().clamp(max=steps - 1).long()
            at = first + below
            chance = low[at] + rise[at] * (place - below)
            return -chance.clamp(_LEAST, 1.0).log().sum(-1) + candidates.penalty(update)

        return score

    def law(self, state: Design, memory: None, update: Vector, link: Link) -> Law:
        """The probability of each column of the public channel, linear between two levels; epsilon is checked.

        Raises:
            LawError: the channel is not a table of probabilities, or its ratios exceed e^epsilon.
        """
        header, numbers, places = scaled(update, link.setting.layout, self.scale, bound=self.clip)
        # float32, as on the client: a number rounded past a level could make the sent column impossible
        place = (np.clip(numbers.astype(np.float32), -1.0, 1.0).astype(np.float64) + 1) / 2 * (len(state.P) - 1)
        below = np.minimum(place.astype(np.int64), len(state.P) - 2)
        share, channel = (place - below)[:, None], _checked(state.P, self.epsilon)
        every = np.concatenate([channel[None], powers(channel)])
        found = (1 - share) * every.take(below, 1) + share * every.take(below + 1, 1)
        return Choices(found[0], self.bits, places, header, found[1:])

    def quieter(self) -> MVU:
        """The same with the largest epsilon and the finest levels for the stochastic rounding."""
        return replace(self, epsilon=24.0, bits=4)

    def claim(self, history: Sequence[Design], setting: Setting) -> Claim:
        """Pure epsilon for one coordinate; the epsilons of T rounds add up."""
        rounds, exact = len(history), exact_epsilon(history[0].P)
        why = "the largest ratio of an output's probabilities under two inputs, in the sampled channel."
        return claim_over(
            rounds,
            self.epsilon * rounds,
            Proof.pure(exact, rounds, Unit.COORDINATE, why, "largest ratio in the channel"),
            source="Chaudhuri, Guo, Rabbat 2022",
            assumes=unclipped(self.scale)[:1],
            further=(whole_message(self.scale, exact * setting.dim, rounds, f"{setting.dim} coordinates"),),
        )

    def _read(self, received: bytes, setting: Setting) -> tuple[bytes, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
        """The header and the columns [d] in a message."""
        size = self.scaling.header_size(setting.layout)
        if len(received) < size:
            raise MessageError(f"expected a message with a header of {size} bytes, got {len(received)} bytes")
        return received[:size], unpack_levels(received[size:], setting.dim, self.bits)


def _checked(P: Numbers, epsilon: float) -> Numbers:
    """The channel; raises a `LawError` unless it holds probabilities whose ratios are at most e^epsilon."""
    if not (P.min() >= 0 and np.abs(P.sum(1) - 1).max() <= 1e-9):
        raise LawError("the rows of the channel are not probabilities")
    if (P.max(0) > np.exp(epsilon) * (1 + 1e-9) * P.min(0)).any():
        raise LawError(f"expected a channel of epsilon at most {epsilon:g}, got a larger epsilon")
    return P
