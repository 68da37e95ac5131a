"""DP-SGD at the client: each local step clips the records' gradients and adds noise."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from leakgauge.defenses._common.clip import Clipped, clip_l2
from leakgauge.defenses._common.misfit import gaussian_misfit
from leakgauge.defenses._common.plain import Plain
from leakgauge.harness.core.accounting import gaussian_steps
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, claim_over
from leakgauge.harness.core.contract import Likelihood, Link, Links, LocalRule, Setting
from leakgauge.harness.core.distribution import Exact, MessageDistribution, StepDistribution, numbers
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class DPSGD(Clipped, Plain[None]):
    """DP-SGD: each local step takes records at random, clips their gradients and adds normal noise to the sum.

    Args:
        clip: C, bound on the l2 norm of one record's gradient.
        epsilon: privacy budget of one record over the whole run, at `delta`, by opacus' Renyi accountant. Default 8
            unless `noise_std` is given.
        delta: delta of the guarantee for the whole run.
        noise_std: z, standard deviation of the noise in a step's sum, in units of the clip; replaces `epsilon`.

    Guarantees:
        Messages have 4 * d bytes: the update, whose noise was added in training (`LocalRule`, `step_noise`).
        Each step takes each record with probability B/n. The step's mean gradient is a sum of gradients of norm at most
        C, divided by B, with noise of standard deviation z C / B.

    Raises:
        ValueError: a parameter is out of range, or both `epsilon` and `noise_std` are given.

    Source: Abadi et al. 2016, Algorithm 1. opacus 1.5 computes noise and claim (`get_noise_multiplier`,
        `RDPAccountant`). `harness.learn.clipping` runs the steps; it agrees with opacus' per-example gradients (tested)
        and is many times faster. For clients of different sizes, noise and claim are those of the smallest client,
        which takes a given record most often.
    """

    promises: ClassVar[Horizon] = Horizon.WHOLE_RUN

    @property
    def local(self) -> LocalRule:
        """Training clips each record's gradient and takes records at random."""
        return LocalRule(clip=self.clip, poisson=True)

    def step_noise(self, setting: Setting) -> float:
        """z, as in `multiplier`."""
        return self.multiplier(setting)

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The update itself, as float32."""
        return Exact(numbers(update).astype("<f4").tobytes())

    def step_distribution(self, setting: Setting) -> StepDistribution:
        """Steps with clip C and noise z that take each record with probability B/n."""
        return StepDistribution(self.clip, self.multiplier(setting), _share(setting))

    def low_noise_variant(self) -> DPSGD:
        """The same steps with a noise of 0.001 times the clip."""
        return replace(self, epsilon=None, noise_std=1e-3)

    def multiplier(self, setting: Setting) -> float:
        """z, the noise over the clip in a step's sum; by default from epsilon and the steps of the whole run."""
        if self.noise_std is not None:
            return self.noise_std
        assert self.epsilon is not None  # __post_init__ sets one of the two
        return _multiplier(self.epsilon, self.delta, _share(setting), setting.steps * setting.turns)

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """|y - u|^2 / (2 sigma^2), where sigma^2 sums the variances of the steps, each weighted by momentum.

        Exact for one step. For several steps, see `training_noise`: with a learning-rate schedule, or with epochs on
        clients of different sizes, sigma is too large for messages of fewer steps or a lower rate.
        A candidate is clipped to the largest norm that clipped steps can reach, for nominal B and all n records drawn.
        The caller that computes the candidate clips the single records.
        """
        sent = self.sent(received, links)
        weights = links.setting.step_weights
        scale = self.clip * (1.0 if links.setting.sends == "gradient" else links.setting.lr)
        sizes = [min(links.setting.batch or sender.samples, sender.samples) for sender in links.senders]
        std = torch.tensor([[self.training_noise(links.setting, sender.samples)] for sender in links.senders])
        pairs = zip(links.senders, sizes, strict=True)
        reach = torch.tensor([[scale * sum(weights) * sender.samples / size] for sender, size in pairs])
        return lambda update: gaussian_misfit((reach * clip_l2(update / reach, 1.0) - sent) / std, 1.0)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """(epsilon, delta) of one record over these rounds: claimed by opacus, proved by privacy loss distributions."""
        noise, share, steps = self.multiplier(setting), _share(setting), setting.steps * len(history)
        method = "analytic Gaussian" if share == 1 else "privacy loss distribution"
        why = f"{steps} steps with noise of {noise:.4g} clips; each step takes a record with probability {share:.4g}."
        known = "the adversary knows that the record is in every batch."
        return claim_over(
            len(history),
            _opacus_epsilon(noise, share, steps, self.delta),
            Proof(gaussian_steps(noise, share, steps), Unit.RECORD, method, why, tight=share == 1),
            source="opacus, Renyi accountant",
            delta=self.delta,
            relation=Relation.ADD_REMOVE,
            assumes=("which records a step takes is secret",),
            further=(Proof.gaussian(noise, steps, Unit.RECORD, known),),
        )


def _share(setting: Setting) -> float:
    """q, the probability that the smallest client takes a given record into a step."""
    return min(1.0, setting.batch / setting.samples) if setting.batch else 1.0


@functools.lru_cache(maxsize=64)
def _multiplier(epsilon: float, delta: float, share: float, steps: int) -> float:
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opacus warns about the orders that its search tries
        try:
            multiplier = get_noise_multiplier(
                target_epsilon=epsilon, target_delta=delta, sample_rate=share, steps=steps, accountant="rdp"
            )
        except ValueError as error:
            raise ValueError(
                f"expected an epsilon for which opacus finds a noise, got epsilon={epsilon} at delta={delta}, "
                f"{steps} steps with probability {share:.4g}: give noise_std instead"
            ) from error
    return float(multiplier)


@functools.lru_cache(maxsize=64)
def _opacus_epsilon(noise: float, share: float, steps: int, delta: float) -> float:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(noise, share, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))
