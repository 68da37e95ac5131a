"""A secure sum of integers, and the base of defenses whose noise the clients add to it together.

A client clips its update to l2 norm C, rotates it by public random signs and a Hadamard matrix, divides it by the grid
g, rounds it to integers at random, and adds integer noise. Its message is the result modulo 2^bits. The secure sum adds
all messages of a round modulo 2^bits, and nobody sees anything but this sum. The masks that hide a message in a real
protocol cancel in the sum, so they are left out here: `transmit` is the trusted sum.

Rounding makes a vector longer, which costs privacy. So the rounded vector is drawn again, each time from a slightly
shorter one, until its norm is at most a public bound. The bound is that of rotated updates of norm C, whose coordinates
are about normal.

A coordinate of the sum that does not fit into 2^bits wraps around. This costs accuracy, not privacy.

Source: Kairouz, Liu, Steinke 2021, "The distributed discrete Gaussian mechanism for federated learning with secure
    aggregation", Algorithms 1 and 2; Agarwal, Kairouz, Liu 2021, "The Skellam mechanism for differentially private
    federated learning". Differs: their bound of a rounded vector's norm holds for every update without drawing again
    more than a few times; ours is shorter, and an update with a longer rounded vector is shortened, too.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from leakgauge.defenses._common.clip import Clipped, clip_l2
from leakgauge.defenses._common.hadamard import fast_walsh_hadamard
from leakgauge.defenses._common.misfit import gaussian_misfit
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import Event
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Arithmetic, Claim, Horizon, Proof, Relation, Unit, Violation, claim_over
from leakgauge.harness.core.codec import pack_levels, unpack_levels
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import (
    DistributionError,
    Integers,
    MessageDistribution,
    PairLoss,
    Reading,
    outcomes,
    projected,
)
from leakgauge.harness.core.gaussian import gaussian_mu
from leakgauge.harness.core.integer_noise import LAWS, IntegerNoise, reach
from leakgauge.harness.core.rng import Key, uniform
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.threats import LISTED, Threat, seeing
from leakgauge.harness.core.vec import Vector

_MOST_BITS = 20
_SPREADS = 5.0  # spreads of a rounded vector's squared norm above its mean up to which it is not drawn again
_RARE = 40.0  # minus the logarithm of half the probability of larger noise, which is neither drawn nor stated
_WIDEST = 1e4  # largest noise that is tried, in the noise that suffices without rounding
_CLOSE = 1e-6  # relative difference from the least noise at which epsilon holds

_SEES = seeing(LISTED - {"others"}) - {Threat.PARTICIPANT}
"""The adversaries that learn a round's sum and no client's secrets; of a message on the wire, masks leave nothing."""

_TRUSTED = "the secure sum is trusted: of a round's messages, nobody learns more than their sum"
_PUBLIC = "it is public which clients send; a client that is left out sends its noise without an update"


class Plan(NamedTuple):
    """The public state, the same in all rounds.

    Attributes:
        signs: [n] 1 and -1, of the rotation; n is d, rounded up to a power of two.
        grid: g, the step of the grid, in units of the update.
        bound: the largest l2 norm of a client's integers without noise.
        variance: of the noise of `senders` clients in an integer of the sum.
        senders: the number of clients on whose noise the proof relies.
    """

    signs: Tensor
    grid: float
    bound: float
    variance: float
    senders: int


@dataclass(frozen=True)
class SecureSum(Clipped, Defense[Plan, None]):
    """Integers with noise in a secure sum; the parameters are those of its defenses.

    `bits`, `reach`: the grid is such that the 2^bits values hold the mean of a rotated coordinate of the sum, and
    `reach` spreads on both sides, if all updates are equal and of norm C.
    """

    superposes: ClassVar[bool] = True
    promises: ClassVar[Horizon] = Horizon.WHOLE_RUN
    arithmetic: ClassVar[Arithmetic] = Arithmetic.ROUNDING_SAFE
    source: ClassVar[str]
    """The source of the claim."""
    rounding: ClassVar[float] = 1 / 6
    """The variance that rounding adds to a number on average, in steps of the grid."""

    bits: int = 16
    reach: float = 4.0
    senders: int = 0
    rotation: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(reach=self.reach)
        if self.bits not in range(2, _MOST_BITS + 1):
            raise ValueError(f"expected bits between 2 and {_MOST_BITS}, got bits={self.bits}")
        if self.senders < 0:
            raise ValueError(f"expected senders >= 0, got senders={self.senders}")

    @abstractmethod
    def event(self, plan: Plan, senders: int, rounds: int) -> Event:
        """What rounds show of one client, if so many clients keep their noise secret."""

    def counted(self, participants: int) -> int:
        """The number of senders that the proof counts, of these participants.

        Raises:
            ValueError: there are fewer participants.
        """
        if self.senders > participants:
            raise ValueError(f"expected senders <= {participants} participants, got senders={self.senders}")
        return self.senders or participants

    def centered(self, wire: bytes, size: int) -> Integers:
        """[size] the integers of a message or a sum, from -2^bits / 2 on.

        Raises:
            MessageError: the bytes are not a message of this defense.
        """
        half = 1 << self.bits - 1
        return (unpack_levels(wire, size, self.bits) + half) % (2 * half) - half

    def packed(self, levels: Integers) -> bytes:
        """The integers modulo 2^bits."""
        return pack_levels(levels & (1 << self.bits) - 1, self.bits)

    def transmit(self, state: Plan, wires: Sequence[bytes], links: Links, channel: Key) -> Sequence[bytes]:
        """The sum of the messages modulo 2^bits. Does not use the key.

        Raises:
            MessageError: the bytes are not a message of this defense.
        """
        total = np.zeros(len(state.signs), np.int64)
        for wire in wires:
            total += unpack_levels(wire, len(total), self.bits)
        return [self.packed(total)]

    def estimate(self, state: Plan, received: bytes, link: Link) -> Vector:
        """The SUM of all clipped updates plus noise: the sender's update if the others are zero."""
        return self._sum(state, received)[: link.setting.dim].float()

    def decode(self, state: Plan, received: Sequence[bytes], links: Links, private: Key) -> Vector:
        """The sum divided by the public number U of clients of a round, even if fewer clients send."""
        (wire,) = received
        return (self._sum(state, wire)[: links.setting.dim] / links.setting.participants).float()

    def likelihood(self, state: Plan, received: Sequence[bytes], links: Links) -> Likelihood:
        """|sum of the clipped updates - received sum|^2 / (2 * its variance), as if all U clients had sent.

        Not exact: the noise of all clients and their rounding is about normal, and wrapping is left out.
        """
        heard = torch.stack([self._sum(state, wire)[: links.setting.dim] for wire in received])
        users = links.setting.participants
        variance = state.grid**2 * users * (state.variance / state.senders + self.rounding)

        def score(update: Tensor) -> Tensor:
            signal = clip_l2(update.double(), self.clip).reshape(len(update), -1, links.setting.dim).sum(dim=1)
            return gaussian_misfit(signal - heard, variance).to(update.dtype)

        return score

    def violations(self, updates: Sequence[Vector], links: Links, lr: float) -> dict[str, Violation]:
        """The rounds in which fewer clients send than the proof counts."""
        least = self.senders or links.setting.participants
        return {_enough(least): Violation(int(len(links.senders) < least), 1, "round")}

    def claim(self, history: Sequence[Plan], setting: Setting) -> Claim:
        """(epsilon, delta) for one client over these rounds, against adversaries that learn the sums.

        A client may be in every round: it is public who sends, so that drawing clients at random hides nothing.
        """
        state, rounds = history[0], len(history)
        why = f"one client moves the sum by integers of norm {state.bound:.6g} or less"
        proved = self._proof(state, state.senders, rounds, f"{why}; the clients' noises add up.", _SEES)
        alone = "the other clients reveal their noise, and one client's remains."
        further = [self._proof(state, 1, rounds, alone, frozenset({Threat.COLLUDING_SERVER}))]
        if state.senders > 1:
            own = "a client subtracts its own noise from the sum."
            further.append(self._proof(state, state.senders - 1, rounds, own, frozenset({Threat.PARTICIPANT})))
        return claim_over(
            rounds,
            proved.epsilon(self.delta),
            proved,
            source=self.source,
            delta=self.delta,
            relation=Relation.ADD_REMOVE,
            against=_SEES,
            assumes=(_TRUSTED, _PUBLIC, _enough(state.senders)),
            further=tuple(further),
        )

    def _proof(self, state: Plan, senders: int, rounds: int, reason: str, against: frozenset[Threat]) -> Proof:
        event = self.event(state, senders, rounds)
        return Proof(event, Unit.CLIENT, "comparison with normal noise, or Renyi divergences", reason, False, against)

    def _sum(self, state: Plan, wire: bytes) -> Tensor:
        """[n] float64: the update behind a message or a sum; the last n - d numbers are noise."""
        levels = self.centered(wire, len(state.signs))
        back = fast_walsh_hadamard(torch.from_numpy(levels * (state.grid / math.sqrt(len(levels)))))
        return back * state.signs


def _enough(senders: int) -> str:
    return f"at least {senders} clients send in each round, each with its noise, which it keeps secret"


@dataclass(frozen=True)
class RoundedSum(SecureSum):
    """A secure sum of rounded updates with independent integer noise."""

    law: ClassVar[str]
    """The law of one client's noise, one of `integer_noise.LAWS`."""

    def draw(self, variance: float, n: int, key: Key) -> Integers:
        """[n] one client's noise of this variance, by inversion of its distribution function at uniform numbers."""
        ends = _ends(self.law, variance)
        return rng.inverted(key, ends, n) - len(ends) // 2

    def masses(self, variance: float) -> Numbers:
        """[2 k + 1] the stated probabilities of one client's noise from -k to k, all that count."""
        return _masses(self.law, variance)

    def event(self, plan: Plan, senders: int, rounds: int) -> Event:
        """The noise of these clients."""
        variance = plan.variance * senders / plan.senders
        return IntegerNoise(len(plan.signs), rounds, variance, plan.bound, senders, self.law)

    def init(self, setting: Setting) -> Plan:
        """The grid and the noise.

        Raises:
            ValueError: a round has fewer clients than `senders`, or at so few bits no noise has this epsilon.
        """
        return _plan(self, setting.dim, setting.participants, setting.turns)

    def encode(self, state: Plan, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Clip, rotate, round, add noise, and pack modulo 2^bits. Does not use the shared key."""
        check_update(update)
        values = rotated(clip_l2(update.detach().cpu().double(), self.clip), state).numpy() / state.grid
        levels = _rounded(values, state.bound, private.child("rounding"))
        levels += self.draw(state.variance / state.senders, len(levels), private.child("noise"))
        return self.packed(levels), None

    def message_distribution(self, state: Plan, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The rounded update and the client's own noise, before the sum.

        Without the chance that a rounded vector is drawn again, which is below one in a million unless `bits` is small.
        """
        return self._law(state, [update], 1)

    def aggregate_distribution(self, state: Plan, updates: Sequence[Vector], links: Links) -> MessageDistribution:
        """The sum of the rounded updates, and the noise of all senders, also of those without an update."""
        return self._law(state, updates, len(links.senders))

    def low_noise_variant(self) -> Self:
        """The same mechanism with a noise of 0.001 C in each coordinate of the sum."""
        return replace(self, epsilon=None, noise_std=1e-3 * self.clip)

    def _law(self, state: Plan, updates: Sequence[Vector], noises: int) -> MessageDistribution:
        size = 1 << (len(updates[0]) - 1).bit_length()
        centers = [stated_rotation(update, self.clip, self.rotation) for update in updates]
        centers = [None if center is None else center / state.grid for center in centers]
        variance = state.variance / state.senders
        return _Modular(tuple(centers), size, self.masses(variance), variance * noises, noises, self.bits, state.bound)


@functools.lru_cache(maxsize=64)
def _plan(defense: RoundedSum, dim: int, participants: int, rounds: int) -> Plan:
    senders, size = defense.counted(participants), 1 << (dim - 1).bit_length()
    signs = torch.from_numpy(signs_of(defense.rotation, size))

    def at(std: float) -> Plan:
        """The plan with noise of this standard deviation in the sum of `senders` clients, in units of the update."""
        noise = std * math.sqrt(participants / senders)
        spread = math.hypot(participants * defense.clip / math.sqrt(size), noise)
        grid = 2 * defense.reach * spread / 2**defense.bits
        return Plan(signs, grid, _bound(defense.clip / grid, size), (std / grid) ** 2, senders)

    if defense.noise_std is not None:
        return at(defense.noise_std)
    assert defense.epsilon is not None  # __post_init__ of `Clipped` sets one of the two
    target, delta = defense.epsilon, defense.delta
    least = defense.clip * math.sqrt(rounds) / gaussian_mu(target, delta)

    def excess(log: float) -> float:
        from leakgauge.harness.core.accounting import epsilon

        found = epsilon(defense.event(at(least * math.exp(log)), senders, rounds), delta)
        return math.log(max(found, 1e-9) / target) if found < math.inf else 700.0

    low, high = -0.5, 0.125
    while excess(high) > 0:
        low, high = high, 2 * high
        if math.exp(high) > _WIDEST:
            raise ValueError(
                f"no noise has epsilon {target:g} over {rounds} rounds in {size} numbers of {defense.bits} bits; "
                "use more bits, a smaller reach or a larger epsilon"
            )
    if excess(low) <= 0:
        return at(least * math.exp(low))
    log = optimize.brentq(excess, low, high, xtol=_CLOSE)
    while excess(log) > 0:
        log += _CLOSE
    return at(least * math.exp(log))


def _bound(clip: float, size: int) -> float:
    """The bound of the norm of a rounded vector, for a clip in units of the grid.

    Rounding adds f (1 - f) to the expected square of a number with fraction f: at most its size, and 1/6 on average
    over normal numbers. The square changes by up to 2 |x| + 1, with a variance of about (4 x^2 + 1) / 6.
    """
    mean = clip**2 + size * min(1 / 6, math.sqrt(2 / math.pi / size) * clip)
    spread = math.sqrt((4 * clip**2 + size) / 6)
    return min(math.sqrt(mean + _SPREADS * spread), clip + math.sqrt(size))


def rotated(updates: Tensor, state: Plan) -> Tensor:
    """[..., n] the updates [..., d], rotated; float64."""
    size = len(state.signs)
    padded = torch.nn.functional.pad(updates, (0, size - updates.shape[-1]))
    return fast_walsh_hadamard(padded * state.signs) / math.sqrt(size)


def _rounded(values: Numbers, bound: float, key: Key) -> Integers:
    """Integers of norm `bound` or less: unbiased for the values, unless these are shortened to fit."""
    attempt = 0
    while True:
        drawn = uniform(key.child(attempt), values.shape, dtype=torch.float64).numpy()
        levels: Integers = np.floor(values + drawn).astype(np.int64)
        excess = float(levels @ levels) / bound**2
        if excess <= 1:
            return levels
        values, attempt = values / excess, attempt + 1


def signs_of(rotation: int, size: int) -> Numbers:
    """[size] 1 and -1, by the seed of the rotation."""
    return np.asarray(1.0 - 2.0 * rng.integers(Key(rotation).child("signs"), size, 2), np.float64)


def stated_rotation(update: Vector, clip: float, rotation: int) -> Numbers | None:
    """[n] the update, projected and rotated, apart from the code that it tests; None: it is zero."""
    size = 1 << (len(update) - 1).bit_length()
    flipped = np.zeros(size)
    flipped[: len(update)] = projected(update, clip)
    signs = 1.0 - 2.0 * rng.integers(Key(rotation).child("signs"), size, 2)
    return _turned(flipped * signs) if flipped.any() else None


def _turned(values: Numbers) -> Numbers:
    """H x / sqrt(n) by the definition of H as a Kronecker product; apart from the code that it tests."""
    size, width = len(values), 1
    while width < size:
        pairs = values.reshape(-1, 2, width)
        values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
        width *= 2
    return values / math.sqrt(size)


@dataclass(frozen=True, eq=False)
class _Modular(MessageDistribution):
    """Packed integers modulo 2^bits: of each client, a number that is rounded at random, plus its noise.

    Attributes:
        centers: of each client, [size] numbers in units of the grid; None: all are zero.
        masses: see `RoundedSum.masses`; variance: of all noise, that of so many clients, `noises`.
        bound: see `Plan`.
    """

    centers: tuple[Numbers | None, ...]
    size: int
    masses: Numbers
    variance: float
    noises: int
    bits: int
    bound: float

    @property
    def distinct(self) -> bool:
        """Whether two messages hardly agree in many numbers."""
        return self.size * math.log(1 + self.variance) > 80

    def loss(self, other: MessageDistribution, among: Integers | None = None) -> PairLoss | None:
        """An upper bound: normal noise, and the largest distance of the rounded updates that differ.

        The noise is less normal than this by what the proof counts besides.
        """
        if not isinstance(other, _Modular) or (self.size, self.variance) != (other.size, other.variance):
            return None
        moved = 0.0
        for one, two in zip(self.centers, other.centers, strict=True):
            if (one is None and two is None) or (one is not None and two is not None and np.array_equal(one, two)):
                continue
            moved += sum(min(self.bound, _longest(each)) for each in (one, two) if each is not None)
        normal = self.variance - 1 / 12
        return PairLoss(squares=moved**2 / normal if normal > 0 else math.inf, attained=False)

    def read(self, wire: bytes, own: Key) -> Reading:
        """By the cumulative probabilities, on the circle of 2^bits values that starts opposite of the mean."""
        sent, circle = outcomes(wire, self.size, self.bits), 1 << self.bits
        whole, fractions = np.zeros(self.size, np.int64), []
        for center in self.centers:
            if center is not None:
                below = np.floor(center)
                whole += below.astype(np.int64)
                fractions.append(center - below)
        roundings = np.zeros((len(fractions) + 1, self.size))
        roundings[0] = 1.0
        for fraction in fractions:
            roundings[1:] += (roundings[:-1] - roundings[1:]) * fraction
            roundings[0] *= 1 - fraction
        cumulative = self._cumulative()
        offset = (sent - whole + circle // 2) % circle - circle // 2
        low, high, start = np.zeros((3, self.size))
        for number, chance in enumerate(roundings):
            low += chance * cumulative(offset - number - 1)
            high += chance * cumulative(offset - number)
            start += chance * cumulative(np.full(self.size, -circle // 2 - number - 1))
        if (high <= low).any():
            raise DistributionError("an integer has probability 0")
        within = uniform(own, (self.size,), dtype=torch.float64).numpy()
        return Reading((low - start) + (high - low) * within, np.full(self.size, -1))

    def _cumulative(self) -> Callable[[Integers], Numbers]:
        """The distribution function of all noise, of any integers; it grows by 1 with each turn of the circle."""
        circle = 1 << self.bits
        rising = _rising(self.masses.tobytes(), self.noises, circle)

        def below(at: Integers) -> Numbers:
            turns, rest = np.divmod(at + circle // 2, circle)
            return np.asarray(turns + rising[rest + 1], np.float64)

        return below


@functools.lru_cache(maxsize=8)
def _rising(masses: bytes, noises: int, circle: int) -> Numbers:
    """[circle + 1] cumulative probabilities of a sum of noises modulo `circle`, from -circle / 2 on."""
    each = np.frombuffer(masses)
    wrapped = np.bincount(np.arange(-(len(each) // 2), len(each) // 2 + 1) % circle, each, circle)
    total = np.fft.irfft(np.fft.rfft(wrapped) ** noises, circle) if noises > 1 else wrapped
    rising = np.concatenate([[0.0], np.cumsum(np.roll(total.clip(0.0), circle // 2))])
    return np.asarray(rising / rising[-1], np.float64)


@functools.lru_cache(maxsize=8)
def _masses(law: str, variance: float) -> Numbers:
    most = reach(variance, _RARE)
    return np.asarray(np.exp(LAWS[law](np.arange(-most, most + 1.0), variance)), np.float64)


@functools.lru_cache(maxsize=8)
def _ends(law: str, variance: float) -> Numbers:
    """[2 k] the cumulative probabilities of -k to k - 1."""
    return np.asarray(np.cumsum(_masses(law, variance).astype(np.longdouble))[:-1], np.float64)


def _longest(center: Numbers) -> float:
    """The largest norm of the rounded numbers."""
    return float(np.linalg.norm(np.where(center < 0, np.floor(center), np.ceil(center))))
