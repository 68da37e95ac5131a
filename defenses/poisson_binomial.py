"""The Poisson-binomial mechanism in a secure sum."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy import optimize, special

from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses._secure_sum import Plan, SecureSum, rotated, signs_of, stated_rotation
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import Event, epsilon
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.contract import Link, Setting
from leakgauge.harness.core.distribution import (
    SHARES,
    DistributionError,
    MessageDistribution,
    Reading,
    evidence,
    outcomes,
)
from leakgauge.harness.core.integer_noise import Coins
from leakgauge.harness.core.rng import Key, uniform
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Vector

_TRIALS = (256, 512, 1024, 128, 64, 32, 16, 8, 4, 2)
"""Numbers of coins, the preferred ones first: more than 256 hardly reduce the noise."""

_CLOSE = 1e-5  # relative difference from the largest theta at which epsilon holds
_MOST = 0.25  # the largest distance of a coin's chance from 1/2


@dataclass(frozen=True)
class PoissonBinomial(SecureSum):
    """The Poisson-binomial mechanism: each client tosses coins for each number, and only the sum of heads is seen.

    The update is clipped, rotated, and clamped; a number x gives m coins of chance 1/2 + theta x / r, where r is the
    clamp. There is no noise besides the coins, and no rounding.

    Args:
        clip: C, bound on the l2 norm of a client's update, in units of the update.
        epsilon: privacy budget of the whole run of `setting.turns` rounds, for one client, at `delta`; sets theta.
            Default 8 unless `noise_std` is given.
        delta: delta of the guarantee for the whole run.
        noise_std: standard deviation of the coins in a coordinate of the sum of `senders` clients whose updates are
            zero, in units of the update; replaces `epsilon`.
        bits, reach: m, the number of coins, is 256, or less if 2^bits values do not hold `reach` standard deviations of
            a rotated coordinate of the sum on both sides of its mean, for equal updates of norm C; up to 1024 if theta
            were above 1/4.
        senders, rotation: as for `skellam`.
        clamp: r in standard deviations of a rotated coordinate of an update of norm C.

    Guarantees:
        Messages have ceil(n * bits / 8) bytes, where n is d, rounded up to a power of two; so has the sum.
        decode - sum(clip(u)) / U has mean 0, if no rotated number is clamped and no sum wraps around.
        The variance of a coordinate is that of `noise_std` or less.

    Raises:
        ValueError: a parameter is out of range; in `init`, no number of coins suffices.

    Source: Chen, Ozgur, Kairouz 2022, "The Poisson binomial mechanism for unbiased federated learning with secure
        aggregation", Algorithms 1 and 2. Differs: a rotation instead of Kashin's representation; sums modulo 2^bits;
        the proof is that of `Coins`.
    """

    source: ClassVar[str] = "Chen, Ozgur, Kairouz 2022; Renyi divergences by us"
    rounding: ClassVar[float] = 0.0

    clamp: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(clamp=self.clamp)

    def init(self, setting: Setting) -> Plan:
        """The number of coins and theta.

        Raises:
            ValueError: a round has fewer clients than `senders`, or no number of coins suffices.
        """
        return _plan(self, setting.dim, setting.participants, setting.turns)

    def radius(self, size: int) -> float:
        """r, in units of the update."""
        return self.clip * min(1.0, self.clamp / math.sqrt(size))

    def coins(self, plan: Plan) -> tuple[int, float]:
        """m and theta."""
        trials = round(4 * plan.variance / plan.senders)
        return trials, self.radius(len(plan.signs)) / (trials * plan.grid)

    def encode(self, state: Plan, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Clip, rotate, clamp, toss coins, and pack the heads beyond m / 2. Does not use the shared key."""
        check_update(update)
        trials, offset = self.coins(state)
        values = rotated(clip_l2(update.detach().cpu().double(), self.clip), state).numpy()
        shares = (values / self.radius(len(values))).clip(-1.0, 1.0)
        return self.packed(rng.binomial(private.child("coins"), trials, 0.5 + offset * shares) - trials // 2), None

    def message_distribution(self, state: Plan, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """Binomial numbers."""
        trials, offset = self.coins(state)
        values = stated_rotation(update, self.clip, self.rotation)
        shares = np.zeros(len(state.signs)) if values is None else values / self.radius(len(values))
        return _Heads(0.5 + offset * shares.clip(-1.0, 1.0), trials, self.bits)

    def event(self, plan: Plan, senders: int, rounds: int) -> Event:
        """The coins of these clients."""
        size, (trials, offset) = len(plan.signs), self.coins(plan)
        squared = min(float(size), (self.clip / self.radius(size)) ** 2)
        return Coins(size, rounds, trials, offset, senders, squared)


@functools.lru_cache(maxsize=64)
def _plan(defense: PoissonBinomial, dim: int, participants: int, rounds: int) -> Plan:
    senders, size = defense.counted(participants), 1 << (dim - 1).bit_length()
    signs, radius = torch.from_numpy(signs_of(defense.rotation, size)), defense.radius(size)

    def at(trials: int, offset: float) -> Plan:
        grid = radius / (trials * offset)
        return Plan(signs, grid, defense.clip / grid, senders * trials / 4, senders)

    def excess(log: float, trials: int) -> float:
        found = epsilon(defense.event(at(trials, math.exp(log)), senders, rounds), defense.delta)
        return math.log(max(found, 1e-9) / target) if found < math.inf else 700.0

    for trials in _TRIALS:
        noise = math.sqrt(participants * trials) / 2
        if 2 * defense.reach * noise > 2**defense.bits:
            continue
        if defense.noise_std is not None:
            offset = radius * math.sqrt(senders / trials) / (2 * defense.noise_std)
        else:
            assert defense.epsilon is not None  # __post_init__ of `Clipped` sets one of the two
            target, (low, high) = defense.epsilon, (math.log(1e-9), math.log(_MOST))
            if excess(high, trials) <= 0:
                continue  # less noise would do: more coins
            if excess(low, trials) > 0:
                continue
            log = optimize.brentq(excess, low, high, args=(trials,), xtol=_CLOSE / 4)
            offset = math.exp(log if excess(log, trials) <= 0 else log - _CLOSE)
        plan = at(trials, offset)
        spread = math.hypot(
            participants * defense.clip / math.sqrt(size) / plan.grid, math.sqrt(participants * trials) / 2
        )
        if offset <= _MOST and 2 * defense.reach * spread <= 2**defense.bits:
            return plan
    asked = f"noise {defense.noise_std:g}" if defense.noise_std is not None else f"epsilon {defense.epsilon:g}"
    raise ValueError(
        f"no number of coins up to {max(_TRIALS)} has {asked} over {rounds} rounds in {size} numbers of "
        f"{defense.bits} bits of {senders} clients; use more bits, a smaller reach, or more noise"
    )


@dataclass(frozen=True, eq=False)
class _Heads(MessageDistribution):
    """Packed numbers of heads of `trials` coins with chances [n], minus trials / 2, modulo 2^bits."""

    chances: Numbers
    trials: int
    bits: int

    def read(self, wire: bytes, own: Key) -> Reading:
        """By the cumulative probabilities."""
        circle = 1 << self.bits
        heads = (outcomes(wire, len(self.chances), self.bits) + self.trials // 2) % circle
        if heads.max() > self.trials:
            raise DistributionError(f"{heads.max()} heads of {self.trials} coins")
        high = special.bdtr(heads, self.trials, self.chances)
        low = np.where(heads > 0, special.bdtr(np.maximum(heads - 1, 0), self.trials, self.chances), 0.0)
        within = uniform(own, (len(heads),), dtype=torch.float64).numpy()
        # alternatives: chances farther from 1/2
        farther = (0.5 + (self.chances - 0.5) / (1 - np.array(SHARES)[:, None])).clip(1e-9, 1 - 1e-9)
        ratios = heads * np.log(farther / self.chances)
        ratios += (self.trials - heads) * np.log((1 - farther) / (1 - self.chances))
        return Reading(low + (high - low) * within, np.full(len(heads), -1), ratios=evidence(ratios))
