"""The baseline of over-the-air aggregation: each client sends in channel uses of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses._common.misfit import gaussian_misfit
from leakgauge.defenses._ota.channel import OverTheAir, exact, user_of
from leakgauge.defenses._ota.formulas import Orthogonal, orthogonal
from leakgauge.harness.core import rng
from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.codec import pack_float64, unpack_float64
from leakgauge.harness.core.contract import (
    Likelihood,
    Link,
    Links,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Vector, weighted_mean

_RECEIVER = frozenset(Threat) - {Threat.EAVESDROPPER}
"""Who learns of a message through the server's own receiver, to which other clients have nothing to tell."""


@dataclass(frozen=True)
class OTAOrthogonal(OverTheAir[Orthogonal]):
    """Orthogonal transmission: each client's noisy waveform arrives by itself; the baseline of `ota`.

    A round takes K d channel uses, K times as many as with `ota`: at equal bandwidth the run has T / K rounds, which
    is for the study to set. The state is the split of each client's power: public, the same in every round.

    Args:
        clip: L, bound on the l2 norm of an update, in its units. The paper assumes it and does not clip.
        epsilon: of one round and each client, at `delta`, by the paper's formula; sets the noise.
        delta: of one round.
        power: P of every client, a channel use, in units of `noise_variance`: 1000 is 30 dB above a receiver with 1.
        noise_variance: of the receiver's noise, a real channel use.
        fading: squared gains exponential of mean 1 (`rayleigh`), or all 1 (`equal`).
        gains: the squared gains themselves, one a client with commas between them, instead of `fading`.
        channel_seed: of the gains; they are fixed over the run, the same in every study, and those of `ota`.

    Guarantees:
        8 * d bytes a client: a waveform of d channel uses, one float64 each. No antenna exceeds P: alpha + beta <= 1.
        decode - mean of clip(u_k) is normal with variance `Orthogonal.gradient_variance` in each coordinate,
        independently, up to float32 rounding, where all clients take part.

    Raises:
        ValueError: a parameter out of range; in `init`, gains for another number of clients.

    Source: Seif, Tandon, Li 2020 (see `ota`), (15). Differs: clips; the paper does not say how a client splits its
        power, here noise is as little as epsilon allows. All clients count alike, whatever their numbers of samples.
    """

    source: ClassVar[str] = "Seif et al. 2020, (15)"

    def init(self, setting: Setting) -> Orthogonal:
        """How each client splits its power."""
        return orthogonal(self.make_channel(setting), (self.epsilon,) * setting.clients, self.delta, self.clip)

    def transmit(self, state: Orthogonal, wires: Sequence[bytes], links: Links, channel: Key) -> Sequence[bytes]:
        """Each waveform with its gain and receiver noise of its own, from the sender's child of the channel's key."""
        gains, spread = state.channel.squared_gains, math.sqrt(self.noise_variance)
        received = []
        for wire, who in zip(wires, links.senders, strict=True):
            noise = spread * rng.normal(channel.child(who.number), (links.setting.dim,), torch.float64)
            gain = math.sqrt(gains[user_of(who, links.setting)])
            received.append(pack_float64(noise.add_(unpack_float64(wire, links.setting.dim), alpha=gain)))
        return received

    def estimate(self, state: Orthogonal, received: bytes, link: Link) -> Vector:
        """y_k over the factor at which the update arrives: unbiased for the clipped update."""
        gain = self._gains(state)[user_of(link.sender, link.setting)]
        return (unpack_float64(received, link.setting.dim) / gain).float()

    def decode(self, state: Orthogonal, received: Sequence[bytes], links: Links, private: Key) -> Vector:
        """The mean of the estimates, in which all senders count alike."""
        pairs = zip(received, links.senders, strict=True)
        updates = [self.estimate(state, wire, Link(links.setting, who, None)) for wire, who in pairs]
        return weighted_mean(updates, [1.0] * len(updates))

    def likelihood(self, state: Orthogonal, received: Sequence[bytes], links: Links) -> Likelihood:
        """|y_k - c_k clip(u)|^2 / 2 over the variance of the noise in the sender's channel uses."""
        users = [user_of(who, links.setting) for who in links.senders]
        spread = torch.from_numpy(state.noise_variances)[users, None].sqrt()
        gains = self._gains(state)[users, None] / spread
        heard = torch.stack([unpack_float64(wire, links.setting.dim) for wire in received]) / spread

        def score(update: Tensor) -> Tensor:
            return gaussian_misfit(gains * clip_l2(update.double(), self.clip) - heard, 1.0).to(update.dtype)

        return score

    def claim(self, history: Sequence[Orthogonal], setting: Setting) -> Claim:
        """(15) for a round and (16) for several, of the client that is worst off; the exact composition of Gaussians.

        Nothing is claimed against an eavesdropper with a receiver of its own; `further` tells of it.
        """
        state, rounds = history[0], len(history)
        why = "any two clipped updates move a message by 2 c_k L, under its own noise and the receiver's"
        antenna = max(
            math.sqrt(4 * alpha / beta) if beta > 0 else math.inf
            for alpha, beta in zip(state.alpha, state.beta, strict=True)
        )
        eavesdropper = frozenset({Threat.EAVESDROPPER})
        sent = "what an antenna sends, to whatever receiver: a client has no noise but its own."
        return self.claim_rounds(
            max(state.epsilons),
            rounds,
            assumes=("a message is heard through the server's receiver alone, whose noise and gains are as stated",),
            proofs=[
                exact(float(state.mus.max()), rounds, _RECEIVER, f"{why}; rounds compose exactly."),
                exact(antenna, rounds, eavesdropper, sent, tight=False),
            ],
        )

    def _gains(self, state: Orthogonal) -> Tensor:
        """[K] c_k, the factor at which each client's update arrives."""
        return torch.from_numpy(state.signal).sqrt() / self.clip
