"""The baseline that UDP calls Lei's approach: noise that decreases linearly until the budget is spent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from leakgauge.defenses._udp import Calibration, UDPRounds, linear_decay
from leakgauge.harness.core.contract import Feedback, Setting


@dataclass(frozen=True)
class UDPLei(UDPRounds[tuple[float, ...]]):
    """UDP with linearly decreasing noise, as in the paper's "Lei's approach" (uncertain); stops before it overspends.

    Uncertain: the paper states only that the noise decreases linearly until the budget is spent. It gives neither start
    nor slope; the defaults are a choice of this project. The budget follows zCDP, as in the approach's source.

    The state holds z of each remaining round.

    Args:
        clip, epsilon, delta, clips: as for `udp`.
        rounds: T0, which sets only the defaults of `first` and `slope`; None: the federation's number of rounds.
        first: z of round 0, the noise over the sensitivity; default: the larger of the z of `udp` for T0 rounds and the
            z that one round needs.
        slope: z_t = first * (1 - slope * t); default 1 / (2 T0).

    Guarantees:
        Messages have 4 * d bytes and the distribution of `udp`.
        The federation ends before the rounds spend more than zCDP allows.

    Raises:
        ValueError: a parameter is out of range, or a `first` that overspends in one round.

    Source: a comparison in Wei et al. 2021 (see `udp`) with Yu, Liu, Pu, Gursoy, Truex 2019, "Differentially private
        model publishing for deep learning": epsilon = rho + 2 sqrt(rho ln(1/delta)), rho = sum 1 / (2 z^2).
    """

    source: ClassVar[str] = "Wei et al. 2021, of Yu et al. 2019"

    first: float | None = None
    slope: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # whether the budget covers the first round does not depend on T0 or q
        linear_decay(self.epsilon, self.delta, 1, 1.0, first=self.first, slope=self.slope, longest=1)

    @property
    def formula(self) -> Calibration:
        """The calibration of the approach's source."""
        return "zcdp"

    def init(self, setting: Setting) -> tuple[float, ...]:
        """z of each round."""
        rounds, share = self.horizon(setting), setting.share
        return linear_decay(
            self.epsilon, self.delta, rounds, share, first=self.first, slope=self.slope, longest=setting.rounds
        )

    def advance(self, state: tuple[float, ...], feedback: Feedback) -> tuple[float, ...]:
        """z of each round after this one."""
        return state[1:]

    def stops(self, state: tuple[float, ...]) -> bool:
        """Whether the budget covers no further round."""
        return not state

    def low_noise_variant(self) -> UDPLei:
        """A large budget, and a first z that spends little of it."""
        return replace(self, epsilon=super().low_noise_variant().epsilon, first=1e-2)

    def noise_multiplier(self, state: tuple[float, ...], setting: Setting) -> float:
        """z of the next round."""
        return state[0]
