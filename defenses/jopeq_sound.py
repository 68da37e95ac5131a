"""JoPEQ repaired: a public scale, clamped coordinates, and Laplace noise in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from leakgauge.defenses._common.misfit import Misfit, rounded_misfit
from leakgauge.defenses._common.scale import Scaling
from leakgauge.defenses._jopeq.lattice import Lattice
from leakgauge.defenses._jopeq.privacy import cube_epsilon, scalar_epsilon
from leakgauge.defenses._jopeq.quantizer import Dithered, Radius, added_up, scalar_lattice
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import Pure, repeat
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, every_round
from leakgauge.harness.core.contract import Setting
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat


@dataclass(frozen=True)
class SoundJoPEQ(Dithered):
    """JoPEQ repaired: clamp to a public bound, add Laplace noise in full, quantize with a shared dither.

    Args:
        epsilon: of one coordinate of one message; the noise has scale 2/epsilon in units of `clip`.
        bits: R, 1 to 16; 2^R + 1 levels.
        clip: C, bound on the magnitude of each coordinate, in units of the update.
        gamma: radius of the quantizer, as in `jopeq`.

    Guarantees:
        ceil(d * ceil(log2(2^R + 1)) / 8) bytes.
        Without overload decode(encode(u)) - clamp(u) is C times Laplace(2/epsilon) plus Uniform(-Delta/2, Delta/2) in
        each coordinate, independently and of u.
        One coordinate of one message is epsilon-DP for any two updates: what is sent is a function of the noisy
        coordinate and of the dither, which does not depend on the update.

    | case | what happens |
    |---|---|
    | an outermost level within [-1, 1] (a small gamma) | part of the noise is hidden: less than epsilon is told |

    Raises:
        ValueError: a parameter out of range.

    Source: our repair of Lang, Sofer, Shaked, Shlezinger 2022: no data-dependent scale, no credit for the error.
    """

    epsilon: float = 4.0
    bits: int = 1
    clip: float = 1.0
    gamma: Radius = "reference"

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon, clip=self.clip)
        scalar_lattice(self.bits, self.epsilon, self.gamma)

    @property
    def scaling(self) -> Scaling:
        """By the public bound."""
        return Scaling("public", 1, self.clip)

    @property
    def lattice(self) -> Lattice:
        """The multiples of Delta."""
        return scalar_lattice(self.bits, self.epsilon, self.gamma)

    @property
    def noise_scale(self) -> float:
        """b of the Laplace noise, in units of `clip`."""
        return 2 / self.epsilon

    def perturb(self, values: Tensor, private: Key) -> Tensor:
        """Laplace(b) more, in place."""
        return values.add_(rng.signed_exponential(private, (len(values),)), alpha=self.noise_scale)

    def misfit(self, side: Tensor, *, dithered: bool) -> Misfit:
        """The law of Laplace(b) plus the error of the cell, or of cell and dither."""
        return rounded_misfit(side, self.lattice.step, self.noise_scale, dithered=dithered)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Pure epsilon for one coordinate; T rounds add up."""
        rounds = len(history)
        each = scalar_epsilon(self.epsilon, 0.0, self.lattice.edge)
        return Claim(
            epsilon=self.epsilon * rounds,
            delta=0.0,
            unit=Unit.COORDINATE,
            relation=Relation.ANY_TWO,
            horizon=Horizon.of(rounds),
            against=frozenset(Threat),
            source=added_up("Dwork et al. 2006, and post-processing", rounds),
            assumes=every_round(rounds),
            proved=Proof(
                repeat(Pure(each), rounds),
                Unit.COORDINATE,
                "closed form",
                "Laplace noise in full on coordinates in [-C, C]; a message is a function of it and of the dither.",
            ),
            further=(
                Proof(
                    repeat(Pure(cube_epsilon(each, setting.dim)), rounds),
                    Unit.MESSAGE,
                    "closed form",
                    f"all {setting.dim} coordinates may move across their range at once.",
                ),
            ),
        )
