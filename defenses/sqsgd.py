"""sqSGD: a rotated, subsampled gradient through PrivQuant, with a residual that stays at the client."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses._privquant import PrivQuant, choose, levels_to_values, round_levels
from leakgauge.defenses._wire.hadamard import fast_walsh_hadamard
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import Pure, repeat
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, every_round
from leakgauge.harness.core.codec import pack_levels, unpack_levels
from leakgauge.harness.core.contract import (
    Defense,
    Likelihood,
    Link,
    Links,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Vector

_RESOLUTION = 128 * math.log(2)
"""ln(1/x) of the smallest chance x that a generator with a 128-bit key honors."""


class Plan(NamedTuple):
    """Public and the same in every round: the signs of the rotation [dt], and the channel on dt coordinates."""

    signs: Tensor
    channel: PrivQuant


@dataclass(frozen=True)
class SqSGD(Defense[Plan, Tensor]):
    """Subset, rotation and PrivQuant of each client's update, with residual accumulation.

    Args:
        epsilon: of one message.
        clip: U, l2 bound of the update, again of what is sent, and the range of the levels.
        bits: of one coordinate; K = 2^bits levels.
        ratio: r; dt = 2^floor(log2(r d)) coordinates are sent, at least one.
        alpha: how much of what is not sent is kept for later.
        beta: weight of the new update in what is sent.
        share: of epsilon that buys the threshold, the rest buys the branch.
        rotation: names the public signs of the rotation.

    Guarantees:
        ceil(dt * bits / 8) bytes; the coordinates and the rotation follow from shared randomness.
        decode(encode(u)) has expectation x on the sent coordinates and is zero on the others, where x is the residual
        plus beta times the clipped update, clipped again.
        One message is `PrivQuant.epsilon`-DP for any two updates and residuals, and no less.

    | case | what happens |
    |---|---|
    | d below 1/r | one coordinate is sent |
    | a zero update | uniform rounding to the two middle levels, then the channel |
    | no shared key | nobody knows which coordinates: the estimate is zero, the likelihood flat |

    Raises:
        ValueError: a parameter out of range; in `init`, an epsilon for which no threshold fits.

    Source: sqSGD (ICLR 2021 submission), Algorithms 1 and 2. Differs: what is sent is clipped again after the residual
        is added (without that, coordinates leave the range of the levels); the server, not the client, divides by m,
        once; the rotation is undone before the coordinates are put back.
    """

    promises: ClassVar[Horizon] = Horizon.ONE_ROUND

    epsilon: float = 400.0
    clip: float = 10.0
    bits: int = 4
    ratio: float = 0.005
    alpha: float = 1.0
    beta: float = 1.0
    share: float = 0.9
    rotation: int = 0

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon, clip=self.clip, beta=self.beta)
        if not 1 <= self.bits <= 16:
            raise ValueError(f"expected 1 to 16 bits, got bits={self.bits}")
        if not 0 < self.ratio <= 1:
            raise ValueError(f"expected 0 < ratio <= 1, got ratio={self.ratio}")
        if not 0 < self.share < 1:
            raise ValueError(f"expected 0 < share < 1, got share={self.share}")
        if not (self.alpha >= 0 and math.isfinite(self.alpha)):
            raise ValueError(f"expected alpha >= 0, got alpha={self.alpha}")

    def sent(self, dim: int) -> int:
        """dt, how many of d coordinates are sent."""
        return 1 << max(0, math.floor(math.log2(self.ratio * dim)))

    def init(self, setting: Setting) -> Plan:
        """The rotation's signs and the channel."""
        return _plan(self.sent(setting.dim), 1 << self.bits, self.epsilon, self.share, self.rotation)

    def remember(self, setting: Setting) -> Tensor:
        """The residual: nothing yet."""
        return torch.zeros(setting.dim)

    def encode(self, state: Plan, memory: Tensor, update: Vector, link: Link, private: Key) -> tuple[bytes, Tensor]:
        """Clip, add the residual, take the round's coordinates, rotate, round, privatise; the rest is kept."""
        check_update(update)
        chosen = self.coordinates(link.key, link.setting)
        clipped = clip_l2(update.cpu(), self.clip)
        sent = clip_l2(memory[chosen] + self.beta * clipped[chosen], self.clip)
        kept = memory + self.alpha * clipped
        kept[chosen] = 0.0
        rotated = _rotate(sent.double(), state.signs)
        levels = round_levels(rotated, self.clip, 1 << self.bits, private.child("rounding"))
        out = state.channel.privatize(levels, private.child("channel"))
        return pack_levels(out.numpy(), self.bits), kept

    def estimate(self, state: Plan, received: bytes, link: Link) -> Vector:
        """Unbiased on the coordinates that were sent, zero elsewhere."""
        levels = self._levels(state, received)
        found = torch.zeros(link.setting.dim)
        if link.shared is not None:
            values = levels_to_values(levels, self.clip, 1 << self.bits) / state.channel.normalizer
            back = fast_walsh_hadamard(values) * state.signs / math.sqrt(len(values))
            found[self.coordinates(link.shared, link.setting)] = back.float()
        return found

    def likelihood(self, state: Plan, received: Sequence[bytes], links: Links) -> Likelihood:
        """The exact laws of the coordinates that were sent, continued where they have no slope: see `PrivQuant.misfit`.

        It leaves out that the matches depend on each other (`tail` below keeps it, and won nothing that shows).

        The residual is zero in a client's first message. Later it holds what about 1 / ratio rounds left unsent, which
        an attacker does not know; the law still takes it for zero, so that attacks on later rounds are weaker than they
        need be.

        Without the shared key it is flat: who does not know which coordinates were sent learns of their norm at most,
        which is left out.

        Mean SSIM of MAP, labels given, 6 CIFAR-10 images behind the LeNet of DLG, 600 evaluations, 1.2 to
        2.5 s an image (`benchmarks/sqsgd_likelihood.py`; six images tell no 0.02 apart):

        | coordinates, levels, share that matches | exact | tail | normal moments | ours |
        |---|---|---|---|---|
        | 512, 16, 0.49: the paper's | 0.058 | 0.055 | 0.043 | 0.058 |
        | 8192, 256, 0.70 | 0.156 | 0.163 | 0.054 | 0.156 |
        | 8192, 256, 1 | 0.196 | 0.195 | 0.157 | 0.213 |
        | 8192, 4096, 0.90 | 0.037 | 0.031 | 0.048 | 0.821 |
        | 8192, 4096, 1 | 0.031 | 0.031 | 0.833 | 0.833 |
        """
        levels = torch.stack([self._levels(state, wire) for wire in received])
        if links.shared is None:
            return lambda update: 0.0 * update.sum(-1)
        chosen = torch.stack([self.coordinates(key, links.setting) for key in links.shared])

        def score(update: Tensor) -> Tensor:
            sent = clip_l2(self.beta * clip_l2(update, self.clip).gather(1, chosen), self.clip)
            rotated = _rotate(sent.double(), state.signs)
            return state.channel.misfit(levels, rotated, self.clip).to(update.dtype)

        return score

    def claim(self, history: Sequence[Plan], setting: Setting) -> Claim:
        """Pure epsilon for one message; T rounds add up."""
        channel, rounds = history[0].channel, len(history)
        further = []
        if -channel.log_rest > _RESOLUTION:
            chance = channel.log_rest / math.log(10)
            reason = f"the lesser branch has a chance of 10^{chance:.0f}, which no generator draws; what runs lacks it."
            further.append(Proof(None, Unit.MESSAGE, "arithmetic", reason))
        return Claim(
            epsilon=self.epsilon * rounds,
            delta=0.0,
            unit=Unit.MESSAGE,
            relation=Relation.ANY_TWO,
            horizon=Horizon.of(rounds),
            against=frozenset(Threat),
            source="sqSGD (2021), Algorithm 1 and sec. 4" + (", rounds added up by us" if rounds > 1 else ""),
            assumes=every_round(rounds),
            proved=Proof(
                repeat(Pure(channel.epsilon), rounds),
                Unit.MESSAGE,
                "closed form",
                "the two probabilities of an output, counted exactly, and both are reached.",
            ),
            further=tuple(further),
        )

    def coordinates(self, shared: Key, setting: Setting) -> Tensor:
        """The round's coordinates of this client [dt], in increasing order."""
        return torch.from_numpy(rng.subset(shared.child("coordinates"), setting.dim, self.sent(setting.dim)))

    def _levels(self, state: Plan, received: bytes) -> Tensor:
        """The levels of a message [dt]."""
        return torch.from_numpy(unpack_levels(received, state.channel.d, self.bits))


@functools.lru_cache(maxsize=8)
def _plan(sent: int, levels: int, epsilon: float, share: float, rotation: int) -> Plan:
    """The signs and the channel, worked out once."""
    signs = 2.0 * torch.from_numpy(rng.integers(Key(rotation).child("rademacher"), sent, 2)).double() - 1.0
    return Plan(signs, choose(sent, levels, epsilon, share))


def _rotate(x: Tensor, signs: Tensor) -> Tensor:
    """H A x / sqrt(dt) along the last axis: an l2 norm of U leaves no coordinate above U."""
    return fast_walsh_hadamard(x * signs) / math.sqrt(x.shape[-1])
