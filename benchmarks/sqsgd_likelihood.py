"""The attacker's gain from sqSGD's exact distribution: MAP with four likelihoods of the same messages.

CIFAR-10 training images, the LeNet of DLG with its initialization, one image per victim, labels given. `smooth` is
`SqSGD.likelihood`; `exact` is the distribution of each coordinate, which has no gradient if a coordinate is off by a
level or more; `tail` is the distribution of the whole vector, at its best tilt; `moments` is the normal distribution
with the mean and variance of the message. Prints mean SSIM, median MSE and processor seconds per image. Needs `cifar10`
(see README); a part suffices.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from leakgauge.attacks.map import MAP
from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses._common.hadamard import fast_walsh_hadamard
from leakgauge.defenses._privquant import PrivQuant, levels_to_values
from leakgauge.defenses.sqsgd import Plan, SqSGD
from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.codec import unpack_levels
from leakgauge.harness.core.contract import (
    Defense,
    Examples,
    Likelihood,
    Link,
    Links,
    Message,
    Observation,
    Sender,
    Setting,
    Snapshot,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import View
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.data import default_root, load
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.score import score_reconstruction

FIRST = 1000
PLAN = LocalPlan(gradient=True, steps=None, epochs=None, batch=0, lr=0.1, momentum=0.0)

SETTINGS = {
    # the channel of the paper's LeNet: 512 coordinates, 16 levels, range 10; the paper's network has 119,850 parameters
    # and this one 15,826, so the ratio differs
    "paper": SqSGD(ratio=0.04),
    "256 levels, 70 % match": SqSGD(ratio=1.0, epsilon=3e4, bits=8, clip=3.0),
    "256 levels, all match": SqSGD(ratio=1.0, epsilon=1e5, bits=8, clip=3.0),
    "4096 levels, 90 % match": SqSGD(ratio=1.0, epsilon=6.5e4, bits=12, clip=10.0),
    "4096 levels, all match": SqSGD(ratio=1.0, epsilon=1e5, bits=12, clip=10.0),
}

MessageDistribution = Callable[[PrivQuant, Tensor, Tensor, float], Tensor]
"""(channel, received levels [n, dt], rotated values [n, dt], range) to [n] nats."""


def exact(channel: PrivQuant, received: Tensor, y: Tensor, bound: float) -> Tensor:
    """The product of the exact distributions of the coordinates."""
    offset = (((y.double() / bound).clip(-1, 1) + 1) * ((channel.levels - 1) / 2) - received.to(y.device)).abs()
    background = max((1 - channel.normalizer) / channel.levels, 1e-12)  # 1e-12, because the channel may be the identity
    return -(background + channel.normalizer * (1 - offset).clamp(min=0)).log().sum(-1)


def smooth(channel: PrivQuant, received: Tensor, y: Tensor, bound: float) -> Tensor:
    """`exact`, extended where it has no gradient, as in `SqSGD.likelihood`."""
    return channel.misfit(received, y, bound)


def tail(channel: PrivQuant, received: Tensor, y: Tensor, bound: float) -> Tensor:
    """-ln of Chernoff's bound on P(at least tau matches), at its best tilt: nearly the distribution of the whole
    vector.

    The tilt is held constant for the gradient, because the derivative with respect to the best tilt is zero.
    """
    place = (y / bound).clamp(-1, 1) + 1
    chance = (1 - (place * ((channel.levels - 1) / 2) - received).abs()).clamp(min=1e-12)
    fixed, tilt = chance.detach(), torch.ones(len(y), 1, dtype=torch.float64)
    for _ in range(20):  # Newton steps on the convex exponent
        odds = fixed * tilt.exp()
        matches = odds / (1 - fixed + odds)
        spread = (matches * (1 - matches)).sum(-1, keepdim=True).clamp(min=1e-3)
        step = (channel.tau - matches.sum(-1, keepdim=True)) / spread
        tilt = (tilt + step.clamp(-2, 2)).clamp(0, 27)
    return channel.tau * tilt[:, 0] - (chance * tilt.expm1()).log1p().sum(-1)


def moments(channel: PrivQuant, received: Tensor, y: Tensor, bound: float) -> Tensor:
    """Normal, with mean m y and the variance of a level; the variance of rounding is its mean over a level."""
    m, step = channel.normalizer, 2 * bound / (channel.levels - 1)
    y, values = y.clamp(-bound, bound), levels_to_values(received, bound, channel.levels)
    least = (1 - m) * bound**2 * (channel.levels + 1) / (3 * (channel.levels - 1)) + m * step**2 / 6
    variance = least + m * (1 - m) * y.square()
    return 0.5 * ((values - m * y).square() / variance + (variance / least).log()).sum(-1)


DISTRIBUTIONS: dict[str, MessageDistribution] = {"exact": exact, "tail": tail, "moments": moments, "smooth": smooth}


@dataclass(frozen=True)
class Rescored(Defense[Plan, Tensor]):
    """sqSGD with another likelihood."""

    inner: SqSGD
    distribution: MessageDistribution

    def init(self, setting: Setting) -> Plan:
        """As the inner defense."""
        return self.inner.init(setting)

    def remember(self, setting: Setting) -> Tensor:
        """As the inner defense."""
        return self.inner.remember(setting)

    def encode(self, state: Plan, memory: Tensor, update: Vector, link: Link, private: Key) -> tuple[bytes, Tensor]:
        """As the inner defense."""
        return self.inner.encode(state, memory, update, link, private)

    def estimate(self, state: Plan, received: bytes, link: Link) -> Vector:
        """As the inner defense."""
        return self.inner.estimate(state, received, link)

    def likelihood(self, state: Plan, received: Sequence[bytes], links: Links) -> Likelihood:
        """As `SqSGD.likelihood`, with `message_distribution`."""
        assert links.shared is not None
        clip, count = self.inner.clip, self.inner.sent(links.setting.dim)
        levels = torch.stack([torch.from_numpy(unpack_levels(wire, count, self.inner.bits)) for wire in received])
        chosen = torch.stack([self.inner.coordinates(key, links.setting) for key in links.shared])

        def score(update: Tensor) -> Tensor:
            sent = clip_l2(self.inner.beta * clip_l2(update, clip).gather(1, chosen), clip)
            rotated = fast_walsh_hadamard(sent.double() * state.signs) / math.sqrt(count)
            return self.message_distribution(state.channel, levels, rotated, clip).to(update.dtype)

        return score

    def claim(self, history: Sequence[Plan], setting: Setting) -> Claim:
        """As the inner defense."""
        return self.inner.claim(history, setting)


class Victims(NamedTuple):
    """n clients with one image each and a common model; gradients: [n, d]."""

    task: ModelTask
    params: Vector
    data: list[Examples]
    gradients: Tensor


def victims_of(root: Path, count: int) -> Victims:
    """The images, and their clients' gradients."""
    x, y = load("cifar10", root).train
    task = ModelTask(build("lenet-dlg", (3, 32, 32), 10), "dlg")
    params = task.init(Key(5))
    data = [Examples(x[i : i + 1], y[i : i + 1]) for i in range(FIRST, FIRST + count)]
    return Victims(
        task, params, data, train_clients(task, params, [Work(d, Key(0)) for d in data], PLAN, "loop").updates
    )


def observed(victims: Victims, defense: Rescored) -> Observation:
    """The server's observation of the victims, with their labels."""
    n, layout = len(victims.data), victims.task.layout
    setting = Setting(layout, n, n, 1, sends="gradient", steps=1, lr=PLAN.lr, batch=0, samples=1)
    state, messages = defense.init(setting), []
    for i, gradient in enumerate(victims.gradients):
        memory = defense.remember(setting)
        client = Client(Sender(i, 1), gradient, memory, private=Key(6).child(i), shared=Key(8).child(i))
        (wire,) = Round(defense, setting, state).exchange([client], Key(6)).sent
        messages.append(Message(0, client.sender, wire, client.shared, 1))
    return Observation(
        View.parse("server+labels"),
        setting,
        victims.task,
        defense,
        PLAN.lr,
        messages=tuple(messages),
        model=Snapshot(0, victims.params, state),
        labels=tuple(one.y for one in victims.data),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", type=Path, default=None)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--evaluations", type=int, default=800)
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    victims = victims_of(given.data or default_root(), given.images)
    truth = [one.x for one in victims.data], [one.y for one in victims.data]
    attack = MAP(labels="given", evaluations=given.evaluations)
    for name in given.settings:
        channel = SETTINGS[name].init(observed(victims, Rescored(SETTINGS[name], exact)).setting).channel
        print(f"{name} (m = {channel.normalizer:.3f}, epsilon {channel.epsilon:.4g})", flush=True)
        for title, distribution in DISTRIBUTIONS.items():
            seen = observed(victims, Rescored(SETTINGS[name], distribution))
            start = time.process_time()
            guesses = attack.run(seen, Key(7)).guesses
            seconds = (time.process_time() - start) / given.images
            (ssim, mse, *_), _ = score_reconstruction(*truth, guesses)
            print(f"  {title:8} SSIM {ssim.value:.3f}   MSE {mse.value:.4f}   {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
