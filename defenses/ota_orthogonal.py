"""The baseline of over-the-air aggregation, in which each client has its own channel uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.defenses._common.clip import clip_l2, normal_reach
from leakgauge.defenses._common.misfit import gaussian_misfit
from leakgauge.defenses._ota import Orthogonal, OverTheAir, Waveform, exact, orthogonal, user_of
from leakgauge.harness.core import rng
from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.codec import pack_float64, unpack_float64
from leakgauge.harness.core.contract import Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import MessageDistribution, projected
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import ANYBODY, EAVESDROPPERS, Threat
from leakgauge.harness.core.vec import Vector, weighted_mean

# The adversaries that observe a message only through the server's receiver; collusion does not help them
_RECEIVER = ANYBODY - EAVESDROPPERS


@dataclass(frozen=True)
class OTAOrthogonal(OverTheAir[Orthogonal]):
    """Orthogonal transmission: each client's noisy waveform arrives separately; the baseline of `ota`.

    A round takes K d channel uses, K times as many as with `ota`: at equal bandwidth the run has T / K rounds, which
    the study must set. The state is the split of each client's power, which is public and the same in every round.

    Args:
        clip, epsilon, delta, power, noise_variance, fading, gains, channel_seed: as for `ota`; the gains are the same.

    Guarantees:
        A client sends 8 * d bytes: a waveform of d channel uses, one float64 each. No antenna exceeds P: alpha + beta
        <= 1.
        If all clients take part, decode minus the mean of clip(u_k) is normal with variance
        `Orthogonal.gradient_variance` in each coordinate, independently, up to float32 rounding.

    Raises:
        ValueError: a parameter is out of range; in `init`, the gains are for another number of clients.

    Source: Seif, Tandon, Li 2020 (see `ota`), (15). Differs: clips; splits a client's power, which the paper does not:
        the noise is the least that epsilon allows. All clients have equal weight, whatever their numbers of samples.
    """

    source: ClassVar[str] = "Seif et al. 2020, (15)"

    def init(self, setting: Setting) -> Orthogonal:
        """The split of each client's power."""
        return orthogonal(self.make_channel(setting), (self.epsilon,) * setting.clients, self.delta, self.clip)

    def transmit(self, state: Orthogonal, wires: Sequence[bytes], links: Links, channel: Key) -> Sequence[bytes]:
        """Each waveform times its gain, plus receiver noise from the sender's child of the channel's key."""
        gains, spread = state.channel.squared_gains, math.sqrt(self.noise_variance)
        received = []
        for wire, sender in zip(wires, links.senders, strict=True):
            noise = spread * rng.normal(channel.child(sender.number), (links.setting.dim,), torch.float64)
            gain = math.sqrt(gains[user_of(sender, links.setting)])
            received.append(pack_float64(noise.add_(unpack_float64(wire, links.setting.dim), alpha=gain)))
        return received

    def estimate(self, state: Orthogonal, received: bytes, link: Link) -> Vector:
        """y_k / c_k, where c_k is the factor of the update in the signal: unbiased for the clipped update."""
        gain = self._gains(state)[user_of(link.sender, link.setting)]
        return (unpack_float64(received, link.setting.dim) / gain).float()

    def longest(self, state: Orthogonal, link: Link) -> float:
        """L plus a bound on the norm of the noise of client and receiver."""
        user = user_of(link.sender, link.setting)
        noise = math.sqrt(state.noise_variances[user]) / float(self._gains(state)[user])
        return self.clip + normal_reach(noise, link.setting.dim)

    def average(self, updates: Sequence[Vector], links: Links, private: Key) -> Vector:
        """The mean with equal weights."""
        return weighted_mean(updates, [1.0] * len(updates))

    def likelihood(self, state: Orthogonal, received: Sequence[bytes], links: Links) -> Likelihood:
        """|y_k - c_k clip(u)|^2 / (2 * variance of the noise in the sender's channel uses)."""
        users = [user_of(sender, links.setting) for sender in links.senders]
        spread = torch.from_numpy(state.noise_variances)[users, None].sqrt()
        gains = self._gains(state)[users, None] / spread
        heard = torch.stack([unpack_float64(wire, links.setting.dim) for wire in received]) / spread
        return lambda u: gaussian_misfit(gains * clip_l2(u.double(), self.clip) - heard, 1.0).to(u.dtype)

    def message_distribution(self, state: Orthogonal, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The received waveform: the projected update at its share of the power, plus client and receiver noise."""
        user = user_of(link.sender, link.setting)
        power = state.channel.power * state.channel.squared_gains[user]
        center = projected(update, self.clip) * (math.sqrt(power * state.alpha[user]) / self.clip)
        return Waveform(center, math.sqrt(power * state.beta[user] + state.channel.noise_variance))

    def claim(self, history: Sequence[Orthogonal], setting: Setting) -> Claim:
        """(15) for one round, (16) for several, for the client with the weakest protection; exact Gaussian composition.

        No privacy is claimed against an eavesdropper with its own receiver; `further` holds the proof for this
        adversary.
        """
        state, rounds = history[0], len(history)
        why = "replacing an update moves a message by at most 2 c_k L (gain c_k, clip L); client and receiver add noise"
        shares = zip(state.alpha, state.beta, strict=True)
        antenna = max(math.sqrt(4 * alpha / beta) if beta > 0 else math.inf for alpha, beta in shares)
        sent = "an eavesdropper may hear a client without receiver noise; the client has only its own noise."
        return self.claim_rounds(
            max(state.epsilons),
            rounds,
            assumes=(
                "the adversary hears a message only through the server's receiver, with the stated noise and gains",
            ),
            proofs=[
                exact(float(state.mus.max()), rounds, _RECEIVER, f"{why}; rounds compose exactly."),
                exact(antenna, rounds, frozenset({Threat.EAVESDROPPER}), sent, tight=False),
            ],
        )

    def _gains(self, state: Orthogonal) -> Tensor:
        """[K]: c_k, the factor of each client's update in its signal."""
        return torch.from_numpy(state.signal).sqrt() / self.clip
