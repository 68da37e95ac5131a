"""Over-the-air aggregation: all clients send simultaneously, and the server receives the sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from leakgauge.defenses._common.clip import clip_l2, normal_reach
from leakgauge.defenses._common.misfit import gaussian_misfit
from leakgauge.defenses._ota import FORMULAS as FORMULAS
from leakgauge.defenses._ota import Allocation, OverTheAir, Waveform, allocate, colluding_mu, exact, user_of
from leakgauge.harness.core import rng
from leakgauge.harness.core.claim import Claim, Proof, Unit
from leakgauge.harness.core.codec import pack_float64, unpack_float64
from leakgauge.harness.core.contract import Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import MessageDistribution, projected
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import EAVESDROPPERS, LISTED, Threat, seeing
from leakgauge.harness.core.vec import Vector

# The adversaries that observe a round only through the server's receiver
_RECEIVER = seeing(LISTED - {"others"}) - EAVESDROPPERS


@dataclass(frozen=True)
class OTA(OverTheAir[Allocation]):
    """Over-the-air aggregation: clients send noisy waveforms simultaneously, and the channel adds them up.

    The server receives only y = c * (sum of clipped updates) + the noise of all clients + its receiver's noise. The
    state is the `Allocation` of power, which is public, the same in every round, and computed for all clients together.

    Args:
        clip: L, bound on the l2 norm of an update, in units of the update. The paper assumes this bound and does not
            clip.
        epsilon: privacy budget of one round for each client, at `delta`, by the paper's formula; sets the noise.
        delta: delta of the guarantee for one round.
        power: P, power of each client per channel use, in units of `noise_variance`: 1000 is 30 dB above a receiver
            noise of 1.
        noise_variance: variance of the receiver's noise per real channel use.
        fading: distribution of the squared gains: exponential with mean 1 (`rayleigh`), or all 1 (`equal`).
        gains: the squared gains, comma-separated, one per client; replaces `fading`.
        channel_seed: seed of the gains, which are constant over the run and the same in every study.
        infeasible: what happens if the clients' power does not suffice for the noise at the strongest signal: `lower`
            the signal, or `refuse`.

    Guarantees:
        A client sends 8 * d bytes: a waveform of d channel uses, one float64 each. No antenna exceeds P: alpha + beta
        <= 1.
        One message of 8 * d bytes arrives, whatever the number of senders. It depends on the updates only through the
        sum of the clipped updates.
        decode minus the mean of clip(u_k) is normal with variance `Allocation.gradient_variance` in each coordinate,
        independently, up to float32 rounding.

    Raises:
        ValueError: a parameter is out of range; in `init`, some clients do not take part, the gains are for another
            number of clients, or the channel is infeasible and `infeasible` is `refuse`.

    Source: Seif, Tandon, Li 2020, "Wireless federated learning with local differential privacy", Thm 1 and 3. Differs:
        clips; defines the result for an infeasible channel. As in the paper, all clients have equal weight, whatever
        their numbers of samples. Gradients are of the full batch only if the study sets batch = 0. Despite the title,
        this is not local DP: the claim relies on the other clients' noise (see `claim`).
    """

    superposes: ClassVar[bool] = True
    relies: ClassVar[str] = "every client adds its noise and keeps it secret"
    source: ClassVar[str] = "Seif et al. 2020, Thm 1"

    infeasible: Literal["lower", "refuse"] = "lower"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.infeasible not in ("lower", "refuse"):
            raise ValueError(f"expected infeasible lower or refuse, got {self.infeasible!r}")

    def init(self, setting: Setting) -> Allocation:
        """The signal and noise power of each client."""
        if setting.share < 1 or setting.groups > 1:
            raise ValueError(
                "expected all clients to take part in every round, because each relies on the noise of all, "
                f"got {setting.participants} of {setting.clients}"
            )
        epsilons = (self.epsilon,) * setting.clients
        return allocate(self.make_channel(setting), epsilons, self.delta, self.clip, lower=self.infeasible == "lower")

    def transmit(self, state: Allocation, wires: Sequence[bytes], links: Links, channel: Key) -> Sequence[bytes]:
        """The sum of all signals, each with its gain, plus the receiver's noise from the channel's key."""
        gains = state.channel.squared_gains
        heard = math.sqrt(self.noise_variance) * rng.normal(channel, (links.setting.dim,), torch.float64)
        for wire, sender in zip(wires, links.senders, strict=True):
            heard.add_(unpack_float64(wire, links.setting.dim), alpha=math.sqrt(gains[user_of(sender, links.setting)]))
        return [pack_float64(heard)]

    def estimate(self, state: Allocation, received: bytes, link: Link) -> Vector:
        """y / c: unbiased for the SUM of all clipped updates, so for the sender's update if the others are zero."""
        return (unpack_float64(received, link.setting.dim) / state.gain).float()

    def longest(self, state: Allocation, link: Link) -> float:
        """A bound on the norm of the sum of all participants' clipped updates, plus one on that of the noise."""
        noise = normal_reach(math.sqrt(state.noise_variance), link.setting.dim) / state.gain
        return self.clip * link.setting.participants + noise

    def decode(self, state: Allocation, received: Sequence[bytes], links: Links, private: Key) -> Vector:
        """y / (K c): unbiased for the mean of the clipped updates, with equal weights."""
        (heard,) = received
        return (unpack_float64(heard, links.setting.dim) / (state.gain * len(links.senders))).float()

    def likelihood(self, state: Allocation, received: Sequence[bytes], links: Links) -> Likelihood:
        """|y - c sum_k clip(u_k)|^2 / (2 * variance of all noise); a single update counts as the whole sum."""
        heard = torch.stack([unpack_float64(wire, links.setting.dim) for wire in received])
        gain, variance = state.gain, state.noise_variance

        def score(update: Tensor) -> Tensor:
            signal = gain * clip_l2(update.double(), self.clip).reshape(len(update), -1, links.setting.dim).sum(dim=1)
            return gaussian_misfit(signal - heard, variance).to(update.dtype)

        return score

    def message_distribution(self, state: Allocation, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The projected update, aligned, plus the noise that the allocation gives this client, possibly zero."""
        user = user_of(link.sender, link.setting)
        gain = state.channel.squared_gains[user]
        center = projected(update, self.clip) * (math.sqrt(state.aligned_power / gain) / self.clip)
        return Waveform(center, math.sqrt(state.noise[user] / gain))

    def aggregate_distribution(self, state: Allocation, updates: Sequence[Vector], links: Links) -> MessageDistribution:
        """Normal noise of all clients and the receiver around c times the sum of the projected updates."""
        total = np.sum([projected(update, self.clip) for update in updates], axis=0)
        variance = math.fsum(state.noise) + state.channel.noise_variance
        return Waveform(total * (math.sqrt(state.aligned_power) / self.clip), math.sqrt(variance))

    def claim(self, history: Sequence[Allocation], setting: Setting) -> Claim:
        """Thm 1 for one round, (16) for several, against adversaries that see the sum; exact Gaussian composition.

        No privacy is claimed against a server that colludes with the other clients, or against an eavesdropper with its
        own receiver. A participant that is a client knows its own noise. `further` holds the proofs for these
        adversaries.
        """
        state, rounds = history[0], len(history)
        why = (
            "replacing an update moves the sum by at most 2cL (gain c, clip L); all clients and the receiver add noise"
        )
        return self.claim_rounds(
            state.epsilon,
            rounds,
            assumes=(
                self.relies,
                "the adversary hears the sum only through the server's receiver, with the stated noise and gains",
            ),
            proofs=[exact(state.mu, rounds, _RECEIVER, f"{why}; rounds compose exactly."), *_further(state, rounds)],
        )

    def summed_proof(self, history: Sequence[Allocation], setting: Setting, senders: int) -> Proof | None:
        """Half of the shift of two updates; for n - 1 senders without the noise of the client that sends most of it."""
        state, left_out = history[0], setting.participants - senders
        noise = math.fsum(sorted(state.noise)[: len(state.noise) - left_out]) + state.channel.noise_variance
        if not noise > 0:
            return None
        why = "an update moves the sum by at most cL (gain c, clip L); rounds compose exactly."
        return Proof.gaussian(math.sqrt(noise / state.aligned_power), len(history), Unit.CLIENT, why)


def _further(state: Allocation, rounds: int) -> list[Proof]:
    """The proofs against adversaries that know more than the sum, for the client with the weakest protection."""
    users = range(state.channel.users)
    colluding = max(colluding_mu(state, user) for user in users)
    antenna = max(colluding_mu(state, user, receiver_noise=False) for user in users)
    collusion = (
        "the other clients reveal their noise; the client with the least noise has only its own and the receiver's."
    )
    direct = (
        "an eavesdropper may hear one client without receiver noise; the client with the least noise has only its own."
    )
    proofs = [
        exact(colluding, rounds, frozenset({Threat.COLLUDING_SERVER}), collusion),
        exact(antenna, rounds, frozenset({Threat.EAVESDROPPER}), direct, tight=False),
    ]
    if len(users) > 1:
        left = math.fsum(sorted(state.noise)[:-1]) + state.channel.noise_variance
        mu = 2 * math.sqrt(state.aligned_power / left) if left > 0 else math.inf
        own = "a client subtracts its own noise from the sum; the bound is for the client with the most noise."
        proofs.append(exact(mu, rounds, frozenset({Threat.PARTICIPANT}), own))
    return proofs
