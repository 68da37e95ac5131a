"""A defense of your own: clip the update, add normal noise, send float32.

It runs unchanged. Edit it step by step, and after each step run

    leakgauge doctor my_defense.py
    leakgauge run my_defense.toml -o runs/my_defense --allow-code
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakgauge import (
    Additive,
    Claim,
    Defense,
    Key,
    Likelihood,
    Link,
    Links,
    MessageDistribution,
    Normal,
    Proof,
    Setting,
    Unit,
    check_update,
    claim_over,
    gaussian_mu,
    pack_float32,
    positive,
    projected,
    rng,
    unpack_float32,
)
from leakgauge.testing import check_defense


@dataclass(frozen=True)
class MyDefense(Defense[None, None]):
    """Clips the update's l2 norm and adds normal noise.

    The fields are the parameters: a study sets them by name, the command line by `--set clip=2`.

    Args:
        clip: largest l2 norm of an update that is not scaled down.
        epsilon, delta: of one message.
    """

    clip: float = 1.0
    epsilon: float = 8.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        # refuse impossible values, so that no epsilon is computed from them
        positive(clip=self.clip, epsilon=self.epsilon)
        if not 0 < self.delta < 1:
            raise ValueError(f"expected 0 < delta < 1, got delta={self.delta}")

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise in each coordinate: two clipped updates differ by at most 2 * clip."""
        return 2 * self.clip / gaussian_mu(self.epsilon, self.delta)

    def clipped(self, update: Tensor) -> Tensor:
        """Updates [..., d], each scaled down to a norm of at most `clip`."""
        norm: Tensor = torch.linalg.vector_norm(update.double(), dim=-1, keepdim=True)
        return update * (self.clip / norm.clamp(min=self.clip)).to(update.dtype)

    def encode(self, state: None, memory: None, update: Tensor, link: Link, private: Key) -> tuple[bytes, None]:
        """Client: the bytes to send.

        All randomness comes from keys: only this client knows `private`; the server also knows `link.key`. Noise that
        protects must come from `private`. Use each key for one draw only: for two draws, take `private.child("a")` and
        `private.child("b")`.
        """
        check_update(update)
        noise = self.sigma * rng.normal(private, tuple(update.shape), torch.float64)
        return pack_float32(self.clipped(update).double() + noise), None

    def estimate(self, state: None, received: bytes, link: Link) -> Tensor:
        """Server: the update that one message reveals. `unpack_float32` raises MessageError for invalid bytes."""
        return unpack_float32(received, link.setting.dim)

    # What follows is optional. Without `likelihood`, attacks that need one cannot run; without `claim`, nothing is
    # promised; without `message_distribution`, an audit cannot tell whether the code is the mechanism of the claim.

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """Adversary: -log p(message | update) of candidate updates [n, d], up to a constant; differentiable."""
        sent = torch.stack([unpack_float32(wire, links.setting.dim) for wire in received])
        return lambda update: (self.clipped(update) - sent).square().sum(-1) / (2 * self.sigma**2)

    def message_distribution(self, state: None, memory: None, update: Tensor, link: Link) -> MessageDistribution:
        """The message's distribution by the paper, written independently of `encode`: an audit compares the two."""
        return Additive(projected(update, self.clip), Normal(), self.sigma)

    def low_noise_variant(self) -> "MyDefense":
        """The same defense with hardly any noise, so that an audit sees the message under the noise."""
        return replace(self, epsilon=1e6)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """The promise for these rounds, and the proof: the noise in units of the sensitivity 2 * clip."""
        rounds = len(history)
        proof = Proof.gaussian(self.sigma / (2 * self.clip), rounds, Unit.MESSAGE, "normal noise on a clipped update.")
        promised = self.epsilon if rounds == 1 else proof.epsilon(self.delta)
        return claim_over(rounds, promised, proof, source="the Gaussian mechanism", delta=self.delta)

    def summed_proof(self, history: Sequence[None], setting: Setting, senders: int) -> Proof:
        """Where only sums of messages are seen: the noises of all senders add up, and an update moves a sum by clip."""
        multiplier = senders**0.5 * self.sigma / self.clip
        return Proof.gaussian(multiplier, len(history), Unit.CLIENT, "normal noise on a clipped update.")


def test_the_defense_passes_every_check() -> None:
    """`pytest my_defense.py` runs it: the checks of `leakgauge doctor`, with an error that lists what is wrong."""
    check_defense(MyDefense)
