"""DP-SGD at the client: every local step clips records and adds noise."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.defenses._common.budget import check_delta, epsilon_unless
from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses._common.misfit import gaussian_misfit
from leakgauge.harness.core.accounting import repeat
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, every_round
from leakgauge.harness.core.codec import pack_float32, unpack_float32
from leakgauge.harness.core.contract import (
    Defense,
    Likelihood,
    Link,
    Links,
    LocalRule,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class DPSGD(Defense[None, None]):
    """DP-SGD: each local step takes records at random, clips their gradients and adds normal noise to the sum.

    Args:
        clip: C, bound on the l2 norm of one record's gradient.
        epsilon: of one record over the whole run, at `delta`, by opacus' Renyi accountant. Default 8 unless
            `noise_std` is given.
        delta: of the whole run.
        noise_std: z, standard deviation of the noise in a step's sum in units of the clip; instead of `epsilon`.

    Guarantees:
        4 * d bytes: the update, whose noise was added while training (`LocalRule`, `step_noise`).
        Each step takes every record with probability B/n, and its mean gradient is a sum of gradients of norm C or
        less, over B, with noise of standard deviation z C / B.

    Raises:
        ValueError: a parameter out of range, or both `epsilon` and `noise_std`.

    Source: Abadi et al. 2016, Algorithm 1; noise and claim by opacus 1.5 (`get_noise_multiplier`, `RDPAccountant`), the
        steps by `harness.learn.clipping`, which agrees with opacus' per-sample gradients (tested) and is many times
        faster. Clients of different size: noise and claim are those of the smallest, who takes a record most often.
    """

    promises: ClassVar[Horizon] = Horizon.WHOLE_RUN
    randomized: ClassVar[bool] = False

    clip: float = 1.0
    epsilon: float | None = None
    delta: float = 1e-5
    noise_std: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", epsilon_unless(self.epsilon, self.noise_std))
        positive(clip=self.clip)
        check_delta(self.delta)

    @property
    def local(self) -> LocalRule:
        """Clipped records, taken at random."""
        return LocalRule(clip=self.clip, poisson=True)

    def step_noise(self, setting: Setting) -> float:
        """z, from epsilon and the whole run's steps where it is not given."""
        if self.noise_std is not None:
            return self.noise_std
        assert self.epsilon is not None  # __post_init__ leaves one of the two
        return _multiplier(self.epsilon, self.delta, _share(setting), setting.steps * setting.rounds)

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """The update's float32 bytes. Uses neither key: the noise is in the update."""
        check_update(update)
        return pack_float32(update), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The update, exactly."""
        return unpack_float32(received, link.setting.dim)

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """|y - u|^2 / (2 sigma^2), sigma^2 the sum of the steps' variances, with what momentum makes of each.

        Exact for one step. Of several it leaves out that a step's noise moves where the later ones start. The learning
        rate is that of round 0 and the number of steps that of the largest client: under a schedule, or with clients of
        different size that count epochs, sigma is too large for the messages with less of either.
        A candidate's norm is held to what clipped steps can reach, B nominal and all n records drawn; which records are
        clipped is for who makes it.
        """
        sent = torch.stack([unpack_float32(wire, links.setting.dim) for wire in received])
        weights = _weights(links.setting)
        scale = self.clip * (1.0 if links.setting.sends == "gradient" else links.setting.lr)
        sizes = [min(links.setting.batch or who.samples, who.samples) for who in links.senders]
        each = scale * self.step_noise(links.setting) * math.hypot(*weights)
        std = torch.tensor([[each / size] for size in sizes])
        pairs = zip(links.senders, sizes, strict=True)
        reach = torch.tensor([[scale * sum(weights) * who.samples / size] for who, size in pairs])

        def score(update: Tensor) -> Tensor:
            return gaussian_misfit((reach * clip_l2(update / reach, 1.0) - sent) / std, 1.0)

        return score

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """(epsilon, delta) of one record over these rounds: opacus' figure, and ours by privacy loss distributions."""
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

        noise, share, steps = self.step_noise(setting), _share(setting), setting.steps * len(history)
        step = GaussianDpEvent(noise) if share == 1 else PoissonSampledDpEvent(share, GaussianDpEvent(noise))
        return Claim(
            epsilon=_opacus_epsilon(noise, share, steps, self.delta),
            delta=self.delta,
            unit=Unit.RECORD,
            relation=Relation.ADD_REMOVE,
            horizon=Horizon.of(len(history)),
            against=frozenset(Threat),
            source="opacus, Renyi accountant",
            assumes=("which records a step takes is secret", *every_round(len(history))),
            proved=Proof(
                repeat(step, steps),
                Unit.RECORD,
                "analytic Gaussian" if share == 1 else "privacy loss distribution",
                f"{steps} steps with noise of {noise:.4g} clips, each record taken with probability {share:.4g}.",
                tight=share == 1,
            ),
            further=(
                Proof(
                    repeat(GaussianDpEvent(noise), steps),
                    Unit.RECORD,
                    "analytic Gaussian",
                    "a record that is known to be in every batch.",
                ),
            ),
        )


def _weights(setting: Setting) -> list[float]:
    """How often each step's gradient enters the message: 1, and with momentum as part of the later steps, too."""
    if setting.sends == "gradient":
        return [1.0]
    return list(itertools.accumulate(setting.momentum**k for k in range(setting.steps)))


def _share(setting: Setting) -> float:
    """q, with which the smallest client takes a record into a step."""
    return min(1.0, setting.batch / setting.samples) if setting.batch else 1.0


@functools.lru_cache(maxsize=64)
def _multiplier(epsilon: float, delta: float, share: float, steps: int) -> float:
    """The noise multiplier that opacus finds for a budget."""
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of the orders it tries, which is its search's business
        try:
            found = get_noise_multiplier(
                target_epsilon=epsilon, target_delta=delta, sample_rate=share, steps=steps, accountant="rdp"
            )
        except ValueError as error:
            raise ValueError(
                f"expected an epsilon that opacus finds a noise for, got epsilon={epsilon} at delta={delta}, "
                f"{steps} steps with probability {share:.4g}: give noise_std instead"
            ) from error
    return float(found)


@functools.lru_cache(maxsize=64)
def _opacus_epsilon(noise: float, share: float, steps: int, delta: float) -> float:
    """Epsilon by opacus' Renyi accountant."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(noise, share, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))
