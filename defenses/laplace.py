"""The Laplace mechanism on each coordinate of each client's message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from leakgauge.defenses._common.budget import epsilon_unless
from leakgauge.defenses._common.cascade import Perturbs, Rounded, split_message
from leakgauge.defenses._common.clip import clip_coordinates
from leakgauge.defenses._common.misfit import Misfit, laplace_misfit, rounded_misfit
from leakgauge.defenses._common.scale import Mode, Scaling, unclipped
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import Pure, repeat
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, every_round
from leakgauge.harness.core.codec import pack_float32
from leakgauge.harness.core.contract import (
    Defense,
    Likelihood,
    Link,
    Links,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Parts, Vector


@dataclass(frozen=True)
class Laplace(Defense[None, None], Perturbs):
    """The Laplace mechanism: bound each coordinate, add Laplace noise, send float32.

    Args:
        clip: C, bound on the magnitude of each coordinate, in units of the update; for `scale = "public"`.
        epsilon: of one coordinate of one message; the noise scale is 2C/epsilon. Default 8 unless `noise_std` is given.
        noise_std: standard deviation of the noise a coordinate (scale times sqrt 2); instead of `epsilon`.
        scale: `public`: coordinates are clamped to [-C, C]. `tensor` and `vector`: the baseline of JoPEQ, which divides
            by three times a norm of the update, sends that norm in the clear and clamps nothing; C is then 1.

    Guarantees:
        4 * d bytes, and for `tensor` 8 a tensor, for `vector` 4 more.
        decode(encode(u)) - clamp(u) is Laplace with scale `noise_scale` (times the norm that was sent) in each
        coordinate, independently, up to float32 rounding.

    Raises:
        ValueError: a parameter out of range, or both `epsilon` and `noise_std`.

    Source: Dwork, McSherry, Nissim, Smith 2006. The unit is one coordinate, as in the local-DP baselines of JoPEQ
        (Lang et al. 2022, sec. IV): a whole message of d coordinates is d times epsilon.
    """

    clip: float = 1.0
    epsilon: float | None = None
    noise_std: float | None = None
    scale: Mode = "public"

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", epsilon_unless(self.epsilon, self.noise_std))
        positive(clip=self.clip)

    @property
    def noise_scale(self) -> float:
        """b of the Laplace law: density exp(-|r|/b) / 2b."""
        if self.noise_std is not None:
            return self.noise_std / 2**0.5
        assert self.epsilon is not None  # __post_init__ leaves one of the two
        return 2 * self._bound / self.epsilon

    @property
    def _bound(self) -> float:
        """What the numbers of the message are bounded by."""
        return self.clip if self.scale == "public" else 1.0

    @property
    def _scaling(self) -> Scaling:
        """How an update becomes numbers."""
        return Scaling(self.scale, 1, self.clip)

    def header_size(self, setting: Setting) -> int:
        """Of the means and norms."""
        return self._scaling.header_size(setting.layout)

    def count(self, setting: Setting) -> int:
        """d."""
        return setting.dim

    def unit(self, setting: Setting) -> float:
        """The bound."""
        return self._bound

    def noise_variance(self, setting: Setting) -> float:
        """2 b^2, in squared bounds."""
        return 2 * (self.noise_scale / self._bound) ** 2

    def parts(self, setting: Setting) -> Parts:
        """Of the first tensor."""
        return self._scaling.parts(setting.layout)

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Bound, add noise from the private key, send float32. Does not use the shared key."""
        check_update(update)
        header, numbers = b"", clip_coordinates(update, self.clip)
        if self.scale != "public":
            header, numbers = self._scaling.normalize(update, link.setting.layout)
        noise = rng.laplace(private, (len(numbers),), torch.float64)
        return header + pack_float32((numbers.cpu().double() + self.noise_scale * noise).float()), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The noisy bounded update: unbiased for the bounded one."""
        header, numbers = split_message(received, self.header_size(link.setting), link.setting.dim)
        return numbers if self.scale == "public" else self._scaling.undo(header, numbers, link.setting.layout)

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """sum |y - clamp(u)| / b, with the tip rounded; and how well the norms fit that were sent."""
        return self.misfit(received, setting=links.setting)

    def misfit(self, received: Sequence[bytes], *, setting: Setting, rounded: Rounded | None = None) -> Likelihood:
        """The likelihood; with the cells of numbers that were rounded one by one, else with a tip as wide as theirs."""
        parts = [split_message(wire, self.header_size(setting), setting.dim) for wire in received]
        candidates = self._scaling.candidates([header for header, _ in parts], setting.layout)
        sent = torch.stack([numbers for _, numbers in parts]) / self._bound
        b = self.noise_scale / self._bound

        if rounded is None:
            misfit: Misfit = partial(laplace_misfit, scale=b)
        elif rounded.alone:
            misfit = rounded_misfit(rounded.side, rounded.step, b, dithered=rounded.dithered)
        else:
            misfit = partial(_coarse, rounded, b)

        def score(update: Tensor) -> Tensor:
            return misfit(candidates.numbers(update) - sent) + candidates.penalty(update)

        return score

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Pure epsilon for one coordinate; T rounds add up."""
        from dp_accounting import LaplaceDpEvent

        pure = 2 * self._bound / self.noise_scale
        each = repeat(LaplaceDpEvent(1 / pure), len(history))
        whole = repeat(Pure(pure * setting.dim), len(history))
        whole = Proof(
            repeat(Pure(pure * setting.dim), len(history)),
            Unit.MESSAGE,
            "closed form",
            f"all {setting.dim} coordinates may move across their range at once.",
        )
        if self.scale != "public":
            whole = Proof(None, Unit.MESSAGE, "closed form", "a norm of the update is sent in the clear.")
        return Claim(
            epsilon=pure * len(history),
            delta=0.0,
            unit=Unit.COORDINATE,
            relation=Relation.ANY_TWO,
            horizon=Horizon.of(len(history)),
            against=frozenset(Threat),
            source="Dwork et al. 2006" if self.scale == "public" else "Lang et al. 2022, sec. IV",
            assumes=(*every_round(len(history)), *unclipped(self.scale)),
            proved=Proof(each, Unit.COORDINATE, "closed form", "noise of scale 2C/epsilon on coordinates in [-C, C]."),
            further=(whole,),
        )


def _coarse(rounded: Rounded, scale: float, residual: Tensor) -> Tensor:
    """[n]: of a lattice's cells by their variance."""
    return laplace_misfit(rounded.inside(residual), scale, rounded.variance)
