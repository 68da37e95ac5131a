"""PrivUnit: each client sends a random unit vector, which is likelier near its update's direction than elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakgauge.defenses._common.clip import DEFAULT_EPSILON
from leakgauge.defenses._privunit import TINY, UNIT, Channel, best_cap
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Proof, Unit, added_up, claim_over
from leakgauge.harness.core.codec import unpack_float32
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import (
    MessageDistribution,
)
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class PrivUnit(Defense[None, None]):
    """PrivUnit: sends a random unit vector v, drawn from a cap around the update's direction with most probability.

    The cap and its probability are those with the least variance for epsilon and d.

    Args:
        clip: C, the length of the estimate's mean, or for the ball the largest one, in units of the update.
        epsilon: privacy budget of one message.
        form: `direction`: the update is scaled to the norm C. `ball`: it is clipped to the norm C, and the direction
            is reversed with probability (1 - norm / C) / 2.

    Guarantees:
        Messages have 4 * d bytes: v as float32.
        The estimate C v / m is unbiased, for the scaled or for the clipped update. Its error has the mean square
        C^2 (1 / m^2 - 1), for the ball C^2 / m^2 - norm^2.
        An update of zero, which has no direction, is sent as a uniform vector.
        For d = 1, this is randomized response on the sign.
        Rounding v to float32 follows the draw, so that it costs no privacy. A probability outside the cap below 2^-53,
        as for epsilon above about 18 (d + 1), is never drawn; this implementation then has a delta of about that
        probability. From epsilon 600 on, the cap shrinks no further, so that it has more variance than the least.

    Raises:
        ValueError: a parameter is out of range.

    Source: Bhowmick, Duchi, Freudiger, Kapoor, Rogers 2018, "Protection Against Reconstruction and Its Applications in
        Private Federated Learning", PrivUnit2; its parameters by the least variance: Asi, Feldman, Talwar 2022,
        "Optimal Algorithms for Mean Estimation under Local Differential Privacy". Differs: the norm of an update in the
        ball is not sent by a mechanism of its own.
    """

    clip: float = 1.0
    epsilon: float = DEFAULT_EPSILON
    form: Literal["direction", "ball"] = "direction"

    def __post_init__(self) -> None:
        positive(clip=self.clip, epsilon=self.epsilon)
        if self.form not in ("direction", "ball"):
            raise ValueError(f"expected form direction or ball, got form={self.form!r}")

    @property
    def channel(self) -> Channel:
        """How the vector is drawn."""
        return Channel(self.clip, self.epsilon, self.form)

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Draw the vector in the cap around the update's direction, or outside. Does not use the shared key."""
        check_update(update)
        values = update.detach().cpu().double()
        dim, norm = values.numel(), float(torch.linalg.vector_norm(values))
        u = values if norm else rng.normal(private.child("direction"), (dim,), torch.float64)
        u = u / torch.linalg.vector_norm(u)
        if self.form == "ball" and float(rng.uniform(private.child("sign"), (1,), dtype=torch.float64)) < (
            (1 - min(norm / self.clip, 1.0)) / 2
        ):
            u = -u
        x = best_cap(dim, self.epsilon).sample(private.child("cap"))
        side = rng.normal(private.child("side"), (dim,), torch.float64)
        side -= (side @ u) * u
        width = 2 * math.sqrt(x * (1 - x)) / max(float(torch.linalg.vector_norm(side)), TINY)
        return ((1 - 2 * x) * u + width * side).numpy().astype("<f4").tobytes(), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """C v / m."""
        return (self.clip / best_cap(link.setting.dim, self.epsilon).mean * self._read(received, link.setting)).float()

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """-ln of the density, blurred by threshold / epsilon in <u, v>, because its two levels have no slope."""
        return self.channel.score(self._vectors(received, links), blurred=True)

    def exact_likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """-ln of the density, minus its least value; the cap is widened by the rounding to float32, 2^-23."""
        return self.channel.score(self._vectors(received, links), blurred=False)

    def error_variance(self, state: None, received: Sequence[bytes], links: Links) -> Tensor:
        """C^2 (1 / m^2 - 1) / d, the mean over the coordinates."""
        return self.channel.error_variance(len(received), links.setting.dim)

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution | None:
        """The cap's distribution; None if the cap's radius is below 1e-3, where float32 numbers are too coarse."""
        return self.channel.distribution(update)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Pure epsilon for one message; the epsilons of T rounds add up."""
        rounds = len(history)
        why = "the density of a vector in a cap is e^epsilon times that outside, and caps of two directions differ."
        source = added_up("Bhowmick et al. 2018, PrivUnit2", rounds)
        proved = Proof.pure(self.epsilon, rounds, Unit.MESSAGE, why)
        return claim_over(rounds, self.epsilon * rounds, proved, source=source)

    def _vectors(self, received: Sequence[bytes], links: Links) -> Tensor:
        return torch.stack([self._read(wire, links.setting) for wire in received])

    def _read(self, received: bytes, setting: Setting) -> Tensor:
        """[d] float64: the unit vector in a message."""
        sent = unpack_float32(received, setting.dim).double()
        norm = float(torch.linalg.vector_norm(sent))
        if abs(norm - 1) > UNIT:
            raise MessageError(f"expected a vector of norm 1, got {norm:.9g}")
        return sent / norm
