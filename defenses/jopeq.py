"""JoPEQ with Laplace noise: quantization with a shared dither, and noise that leaves some of its variance to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from leakgauge.defenses._common.misfit import Misfit, rounded_misfit
from leakgauge.defenses._common.scale import Mode, Scaling, unclipped
from leakgauge.defenses._jopeq.lattice import Lattice
from leakgauge.defenses._jopeq.privacy import (
    cube_epsilon,
    scalar_epsilon,
    sphere_epsilon,
    surrogate_scale,
    uniform_delta,
)
from leakgauge.defenses._jopeq.quantizer import Dithered, Radius, added_up, scalar_lattice
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import Leak, Pure, repeat
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, every_round
from leakgauge.harness.core.contract import Setting
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat


@dataclass(frozen=True)
class JoPEQ(Dithered):
    """JoPEQ on single coordinates: scale, add reduced Laplace noise, quantize with a shared dither.

    The noise of Theorems III.1 and III.2 does not exist: its characteriztic function would have to be unbounded where
    that of the quantization error is zero. This is the surrogate of the reference code, of the right variance only.

    Args:
        epsilon: as configured, of one coordinate of one message; noise and error should amount to b = 2/epsilon.
        bits: R, 1 to 16; 2^R + 1 levels.
        gamma: radius of the quantizer: `reference` 1.5 sqrt(1 + 2 b^2) and `paper` 2 R + 1/epsilon, each with its own
            step, Delta = 2 gamma/(2^R + 1) and 2 gamma/2^R; or a number, with the first step.
        scale: `tensor` (the reference code) or `vector` (the text), by a norm of the update, which is sent; `public`:
            no norm, and coordinates are clamped to [-clip, clip].
        clip: C, for `scale = "public"`, in units of the update.

    Guarantees:
        The scales (8 bytes a tensor, 4 for `vector`, none for `public`), then ceil(d * ceil(log2(2^R + 1)) / 8) bytes.
        An honest rate is log2(2^R + 1) bits a coordinate, not R.
        Without overload decode(encode(u)) - u is Laplace(b') plus Uniform(-Delta/2, Delta/2), times the scale, in each
        coordinate, independently and of u; b'^2 = b^2 - Delta^2/24.

    | case | what happens |
    |---|---|
    | Delta^2 >= 24 b^2 | b' = 0: no private noise, `randomized` is then without effect |
    | a zero tensor | its scale is 0: it comes back as its mean |
    | beyond the outermost level | clipped to it |

    Raises:
        ValueError: a parameter out of range.

    Source: Lang, Sofer, Shaked, Shlezinger 2022, Algorithm 1 and Thm III.2, with noise, levels and clipping of the
        reference code. Differs: the private noise is drawn from a stream of its own, not from the dither's.
    """

    epsilon: float = 4.0
    bits: int = 1
    gamma: Radius = "reference"
    scale: Mode = "tensor"
    clip: float = 1.0

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon, clip=self.clip)
        scalar_lattice(self.bits, self.epsilon, self.gamma)

    @property
    def scaling(self) -> Scaling:
        """By single coordinates."""
        return Scaling(self.scale, 1, self.clip)

    @property
    def lattice(self) -> Lattice:
        """The multiples of Delta."""
        return scalar_lattice(self.bits, self.epsilon, self.gamma)

    @property
    def noise_scale(self) -> float:
        """b' of the private Laplace noise, in units of the scaled coordinates; 0: none."""
        return surrogate_scale(self.epsilon, self.lattice.step)

    def perturb(self, values: Tensor, private: Key) -> Tensor:
        """Laplace(b') more, in place."""
        if self.noise_scale == 0:
            return values
        return values.add_(rng.signed_exponential(private, (len(values),)), alpha=self.noise_scale)

    def misfit(self, side: Tensor, *, dithered: bool) -> Misfit:
        """The law of Laplace(b') plus the error of the cell, or of cell and dither."""
        return rounded_misfit(side, self.lattice.step, self.noise_scale, dithered=dithered)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Epsilon for one coordinate of one message; T rounds add up, by us."""
        rounds, theorem = len(history), "III.2" if self.noise_scale > 0 else "III.3"
        return Claim(
            epsilon=self.epsilon * rounds,
            delta=0.0,
            unit=Unit.COORDINATE,
            relation=Relation.ANY_TWO,
            horizon=Horizon.of(rounds),
            against=frozenset(Threat),
            source=added_up(f"Lang et al. 2022, Thm {theorem} and Cor. 1", rounds),
            assumes=(*every_round(rounds), *unclipped(self.scale)),
            proved=self._proof(rounds),
            further=self._messages(setting, rounds),
        )

    @property
    def _known(self) -> float:
        """Epsilon of one coordinate for who knows the dither, as the server does."""
        return scalar_epsilon(self.epsilon, self.lattice.step, self.lattice.edge)

    def _proof(self, rounds: int) -> Proof:
        """Of one coordinate."""
        if self.noise_scale > 0:
            why = (
                f"a server knows the dither, and only the private noise, of scale {self.noise_scale:.6g} instead of "
                f"{2 / self.epsilon:.6g}, stands between it and the update; the error is bounded and hides nothing."
            )
            return Proof(repeat(Pure(self._known), rounds), Unit.COORDINATE, "closed form", why)
        chance = uniform_delta(self.lattice.step)
        why = (
            "no private noise is drawn: for a server, who knows the dither, a message is a function of the update, and "
            f"the two ends of a coordinate's range differ in it with probability {chance:.3g}."
        )
        return Proof(repeat(Leak(chance), rounds), Unit.COORDINATE, "closed form", why)

    def _messages(self, setting: Setting, rounds: int) -> tuple[Proof, ...]:
        """Of whole messages."""
        dim, given = setting.dim, "" if self.scale == "public" else "given the scale, "
        if self.noise_scale == 0:
            event = Leak(uniform_delta(self.lattice.step), dim * rounds)
            why = f"{given}any of {dim} coordinates may tell; no private noise is drawn."
            cube = Proof(event, Unit.MESSAGE, "closed form, coordinates in [-1, 1]", why)
        else:
            pure = repeat(Pure(cube_epsilon(self._known, dim)), rounds)
            why = f"{given}all {dim} coordinates may move across their range at once."
            cube = Proof(pure, Unit.MESSAGE, "closed form, coordinates in [-1, 1]", why)
        if self.scale == "public":
            return (cube,)
        told = "the complete message: its scale, a norm of the update, is sent in the clear."
        complete = Proof(None, Unit.MESSAGE, "by definition", told)
        if self.noise_scale == 0:
            return cube, complete
        # (1/3, ..., 1/3) and its negative are the farthest apart; centerd, half of them change sign
        even = self.scale == "vector" or all(size % 2 == 0 for size in setting.layout.sizes)
        sphere = Proof(
            repeat(Pure(sphere_epsilon(2 / self.noise_scale, dim)), rounds),
            Unit.MESSAGE,
            "closed form, on the sphere",
            f"given the scale, which puts all {dim} coordinates on a sphere; without any clipping.",
            tight=even and self.lattice.edge >= 1 / 3,
        )
        return cube, sphere, complete
