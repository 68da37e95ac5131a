"""sqSGD: a rotated, subsampled gradient through PrivQuant, with a residual that stays at the client."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy import special
from torch import Tensor

from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses._common.hadamard import fast_walsh_hadamard
from leakgauge.defenses._privquant import Matched, PrivQuant, choose, levels_to_values, round_levels
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Arithmetic, Claim, Proof, Unit, added_up, claim_over
from leakgauge.harness.core.codec import pack_levels, unpack_levels
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import Integers, MessageDistribution
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Vector

_RESOLUTION = 128 * math.log(2)  # ln(1/x) of the smallest probability x that a generator with a 128-bit key can realize


class Plan(NamedTuple):
    """Public state, the same in all rounds: the signs of the rotation [dt], and the channel on dt coordinates."""

    signs: Tensor
    channel: PrivQuant


@dataclass(frozen=True)
class SqSGD(Defense[Plan, Tensor]):
    """Takes a subset of the residual plus update, rotates it and sends it through PrivQuant; the rest is the residual.

    Args:
        epsilon: privacy budget of one message.
        clip: U, l2 bound of the update and of the sent vector, and the range of the levels.
        bits: bits per coordinate; there are K = 2^bits levels.
        ratio: r, share of the coordinates; dt = 2^floor(log2(r d)) are sent, but at least one.
        alpha: weight with which unsent coordinates enter the residual.
        beta: weight of the new update in the sent vector.
        share: share of epsilon for the threshold; the rest is for the branch.
        rotation: seed of the public signs of the rotation.
        reclip: whether the sent vector is clipped to U again; otherwise only its rotated coordinates are clamped to U.

    Guarantees:
        Messages have ceil(dt * bits / 8) bytes; the coordinates and the rotation follow from shared randomness.
        decode(encode(u)) has expectation x on the sent coordinates and is zero on the others. x is the residual plus
        beta times the clipped update, clipped again; without `reclip`, x is that sum with its rotation clamped.
        One message is epsilon-DP for any two updates and residuals, with the proved epsilon of `claim`.

    | case | what happens |
    |---|---|
    | d below 1/r | one coordinate is sent |
    | a zero update | uniform rounding to the two middle levels, then the channel |
    | no shared key | the coordinates are unknown: the estimate is zero, the likelihood constant |

    Raises:
        ValueError: a parameter is out of range; in `init`, no threshold exists for this epsilon.

    Source: sqSGD (ICLR 2021 submission), Algorithms 1 and 2. Differs: with `reclip`, the sent vector is clipped again
        after the residual is added, because coordinates could otherwise leave the range of the levels; the server, not
        the client, divides by m, and only once; the rotation is undone before the coordinates return to their
        positions.
    """

    arithmetic: ClassVar[Arithmetic] = Arithmetic.ROUNDING_SAFE

    epsilon: float = 400.0
    clip: float = 10.0
    bits: int = 4
    ratio: float = 0.005
    alpha: float = 1.0
    beta: float = 1.0
    share: float = 0.9
    rotation: int = 0
    reclip: bool = True

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
        """dt, the number of sent coordinates out of d."""
        return 1 << max(0, math.floor(math.log2(self.ratio * dim)))

    def init(self, setting: Setting) -> Plan:
        """The rotation's signs and the channel."""
        return _plan(self.sent(setting.dim), 1 << self.bits, self.epsilon, self.share, self.rotation)

    def remember(self, setting: Setting) -> Tensor:
        """A residual of zero."""
        return torch.zeros(setting.dim)

    def compensated(self, memory: Tensor, update: Vector) -> Vector:
        """The residual plus beta times the update."""
        return memory + self.beta * update

    def encode(self, state: Plan, memory: Tensor, update: Vector, link: Link, private: Key) -> tuple[bytes, Tensor]:
        """Clip, add the residual, select the round's coordinates, rotate, round, sample; the rest is the residual."""
        check_update(update)
        # numpy takes half the time of torch for a short update
        chosen, before = self._chosen(link.key, link.setting), memory.numpy()
        clipped = clip_l2(update.detach().cpu(), self.clip).numpy()
        sent = torch.from_numpy(before[chosen] + self.beta * clipped[chosen])
        sent = clip_l2(sent, self.clip) if self.reclip else sent
        residual = self.alpha * clipped
        residual += before
        residual[chosen] = 0.0
        # `astype` and in place, because numpy allocates faster, and reusing memory is faster still
        exact = torch.from_numpy(sent.numpy().astype(np.float64)).mul_(state.signs)
        rotated = fast_walsh_hadamard(exact).div_(math.sqrt(len(exact)))
        levels = round_levels(rotated, self.clip, 1 << self.bits, private.child("rounding"))
        out = state.channel.privatize(levels, private.child("channel"))
        return pack_levels(out.numpy(), self.bits), torch.from_numpy(residual)

    def estimate(self, state: Plan, received: bytes, link: Link) -> Vector:
        """Unbiased on the sent coordinates, zero elsewhere."""
        levels = self._levels(state, received)
        update = np.zeros(link.setting.dim, np.float32)
        if link.shared is not None:
            table = levels_to_values(torch.arange(1 << self.bits), self.clip, 1 << self.bits) / state.channel.normalizer
            values = torch.from_numpy(table.numpy().take(levels.numpy()))
            back = fast_walsh_hadamard(values).mul_(state.signs).div_(math.sqrt(len(values)))
            update[self._chosen(link.shared, link.setting)] = back.numpy().astype(np.float32)
        return torch.from_numpy(update)

    def likelihood(self, state: Plan, received: Sequence[bytes], links: Links) -> Likelihood:
        """The exact distributions of the sent coordinates, continued where they have no slope; see `PrivQuant.misfit`.

        It ignores that the matches depend on each other, whose inclusion has no visible gain (docs/attacks.md).

        The residual is zero in a client's first message. Later it holds the unsent part of about 1 / ratio rounds,
        which an attacker does not know. The likelihood always assumes a zero residual, so attacks on later rounds are
        weaker than they could be.

        Without the shared key, the likelihood is constant: the message then reveals at most a norm, which is ignored.
        """
        levels = torch.stack([self._levels(state, wire) for wire in received])
        if links.shared is None:
            return lambda update: 0.0 * update.sum(-1)
        chosen = torch.stack([self.coordinates(key, links.setting) for key in links.shared])

        def score(update: Tensor) -> Tensor:
            sent = self.beta * clip_l2(update, self.clip).gather(1, chosen)
            sent = (clip_l2(sent, self.clip) if self.reclip else sent).double()
            rotated = fast_walsh_hadamard(sent * state.signs) / math.sqrt(sent.shape[1])
            rotated = rotated if self.reclip else rotated.clamp(-self.clip, self.clip)
            return state.channel.misfit(levels, rotated, self.clip).to(update.dtype)

        return score

    def message_distribution(self, state: Plan, memory: Tensor, update: Vector, link: Link) -> MessageDistribution:
        """The rotated vector through stochastic rounding and the public channel, whose epsilon is checked."""
        dim = link.setting.dim
        count = 1 << max(0, math.floor(math.log2(self.ratio * dim)))
        chosen = rng.subset(link.key.child("coordinates"), dim, count)
        clipped = _shortened(update.numpy(), self.clip)
        sent = memory.numpy()[chosen] + np.float32(self.beta) * clipped[chosen]
        sent = _shortened(sent, self.clip) if self.reclip else sent
        rotated = sent * _stated_signs(count, self.rotation)
        for _ in range(count.bit_length() - 1):
            even, odd = rotated[::2], rotated[1::2]
            rotated = np.concatenate([even + odd, even - odd])
        values = np.clip(rotated / math.sqrt(count) / self.clip, -1.0, 1.0)
        levels, channel = 1 << self.bits, state.channel
        hidden = channel.epsilon - _epsilons(channel, self.beta, self.reclip)[1]
        return Matched((values + 1) * (levels - 1) / 2, levels, channel.tau, channel.logit, self.epsilon, hidden)

    def low_noise_variant(self) -> SqSGD:
        """The same with 1024 levels, and a channel that is the identity up to 1298 coordinates."""
        return replace(self, epsilon=1e4, bits=10)

    def claim(self, history: Sequence[Plan], setting: Setting) -> Claim:
        """Pure epsilon for one message; the epsilons of T rounds add up."""
        channel, rounds = history[0].channel, len(history)
        further: tuple[Proof, ...] = ()
        if -channel.log_rest > _RESOLUTION:
            chance = channel.log_rest / math.log(10)
            reason = f"the rarer branch has a probability of 10^{chance:.0f}, too small for a generator: it never runs."
            further = (Proof.none(Unit.MESSAGE, reason, "arithmetic"),)
        bound, shown = _epsilons(channel, self.beta, self.reclip)
        tight = shown >= bound * (1 - 1e-9)
        why = f"an output has one of two probabilities, counted exactly{'; both are attained' if tight else ''}."
        proved = Proof.pure(bound, rounds, Unit.MESSAGE, why, tight=tight)
        why = "two updates attain this: one makes all outputs match as often as the clip allows, the other seldom."
        attained = None if tight else Proof.pure(shown, rounds, Unit.MESSAGE, why, "closed form for two inputs")
        source = added_up("sqSGD (2021), Algorithm 1 and sec. 4", rounds)
        return claim_over(rounds, self.epsilon * rounds, proved, source=source, further=further, attained=attained)

    def coordinates(self, shared: Key, setting: Setting) -> Tensor:
        """[dt]: the coordinates that this client sends in the round, in increasing order."""
        return torch.from_numpy(self._chosen(shared, setting))

    def _chosen(self, shared: Key, setting: Setting) -> Integers:
        return rng.subset(shared.child("coordinates"), setting.dim, self.sent(setting.dim))

    def _levels(self, state: Plan, received: bytes) -> Tensor:
        return torch.from_numpy(unpack_levels(received, state.channel.d, self.bits))


@functools.lru_cache(maxsize=8)
def _plan(sent: int, levels: int, epsilon: float, share: float, rotation: int) -> Plan:
    signs = 2.0 * torch.from_numpy(rng.integers(Key(rotation).child("rademacher"), sent, 2)).double() - 1.0
    return Plan(signs, choose(sent, levels, epsilon, share))


@functools.lru_cache(maxsize=8)
def _stated_signs(count: int, rotation: int) -> Numbers:
    """The signs [count] of the rotation for `message_distribution`, computed independently of `_plan`."""
    return np.asarray(2.0 * rng.integers(Key(rotation).child("rademacher"), count, 2) - 1, np.float64)


@functools.lru_cache(maxsize=8)
def _epsilons(channel: PrivQuant, beta: float, reclip: bool) -> tuple[float, float]:
    """Epsilon of one message: an upper bound, and what two updates attain without residuals.

    The channel's epsilon e needs inputs that surely reach tau matches, but the clip bounds the rotated vector. With F
    the chance of tau matches, an output's ratio is at most 1 + (e^e - 1) F. An output is matched with h_j <= 1/2 +
    |x_j| (K - 1) / 2U, a mean of at most h = 1/2 + (K - 1) / (2 sqrt dt). So F is at most that of dt matches with
    chance h each, if tau is dt, or at least dt h + 1 (Hoeffding 1956, Thm 4).

    The two updates are 0 where the output has an outer level, which then matches neither. In n coordinates, one update
    is even, and the other its negative, or at the other middle level in (K - 1)^2 of them, and 0 in the rest.
    """
    d, tau, steps = channel.d, channel.tau, channel.levels - 1
    first = min(1.0, beta)  # the norm of a first message, relative to the clip

    def share(norm: float, count: int) -> float:
        return min(1.0, 0.5 + steps * norm / (2 * math.sqrt(count)))

    def shown(count: int) -> float:
        near = share(first, count)
        other = min(_log_tail(count, 1 - near, tau), _log_tail(max(0, count - far), 0.5, tau))
        return _diluted(channel.epsilon, _log_tail(count, near, tau)) - _diluted(channel.epsilon, other)

    far, fewest = int((steps * first) ** 2), tau if steps > 1 else d
    counts = {*np.geomspace(fewest, d, 24).round().astype(int).tolist(), min(d, max(fewest, tau + far - 1))}
    limited = reclip and (tau == d or tau >= d * share(1.0, d) + 1)
    bound = _diluted(channel.epsilon, _log_tail(d, share(1.0, d), tau) if limited else 0.0)
    return bound, max(map(shown, counts))


def _log_tail(count: int, chance: float, least: int) -> float:
    """The logarithm of the probability that at least so many (1 or more) of `count` independent events happen."""
    if least > count or chance in (0.0, 1.0):
        return 0.0 if chance == 1 and least <= count else -math.inf
    k = np.arange(least, count + 1)
    ways = special.gammaln(count + 1) - special.gammaln(k + 1) - special.gammaln(count - k + 1)
    return min(0.0, float(special.logsumexp(ways + k * math.log(chance) + (count - k) * math.log1p(-chance))))


def _diluted(epsilon: float, log_chance: float) -> float:
    """ln(1 + (e^epsilon - 1) chance)."""
    return float(np.logaddexp(log_chance + epsilon, math.log(-math.expm1(log_chance)))) if log_chance else epsilon


def _shortened(x: npt.NDArray[np.float32], bound: float) -> npt.NDArray[np.float32]:
    """x clipped to an l2 norm of `bound`, in float32: at the end of the range, float64 would exclude a level."""
    norm = float(np.linalg.norm(x.astype(np.float64)))
    return x * np.float32(bound / max(norm, bound))


def message_bits(dim: int, ratio: float, bits: int) -> int:
    """Bits of a message for a model of `dim` weights."""
    return SqSGD(ratio=ratio, bits=bits).sent(dim) * bits


def reconstruction_bound(entries: int, epsilon: float, a: float = 1.0) -> float:
    """ln of (9), the bound on the probability of an orthogonal reconstruction of so many entries, with rho_0 = 0."""
    return math.log(8) / 2 - (entries - 1) * a**2 / 2 + epsilon


FORMULAS = {"message_bits": message_bits, "reconstruction_bound": reconstruction_bound}
"""Formulas of the paper that recipes draw."""
