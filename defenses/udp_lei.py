"""The baseline that UDP calls Lei's approach: noise that falls linearly until the budget is spent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakgauge.defenses._udp.claim import UDPRounds
from leakgauge.defenses._udp.formulas import Calibration, linear_decay
from leakgauge.harness.core.contract import Feedback, Setting


@dataclass(frozen=True)
class UDPLei(UDPRounds[tuple[float, ...]]):
    """UDP with linearly falling noise that stops before it overspends, as in its "Lei's approach"; uncertain.

    Uncertain: the paper says no more than that the noise falls linearly until the budget is gone, and gives neither its
    start nor its slope; the defaults are a choice of this project. The budget is by zCDP, as in the approach's source.

    The state is z of the rounds to come.

    Args:
        clip: C, bound on the l2 norm of one record's gradient, or of the update, in units of each.
        epsilon: of the whole run, for one record of a client, at `delta`.
        delta: of the whole run.
        rounds: T0, which sets the defaults of `first` and `slope` and nothing else; None: the federation's.
        clips: `records` or `update`, as for `udp`.
        first: z of round 0, noise over sensitivity; default: that of `udp` for T0 rounds, or what one round needs, if
            that is more.
        slope: z_t = first * (1 - slope * t); default 1 / (2 T0).

    Guarantees:
        4 * d bytes.
        decode(encode(u)) - u (or - clip(u), where the update is clipped) is normal with standard deviation `sigma` in
        each coordinate, independently, up to float32 rounding.
        The federation ends before the rounds spend more than zCDP allows.

    Raises:
        ValueError: a parameter out of range, or a `first` that overspends in one round.

    Source: Wei et al. 2021 (see `udp`), who compare themselves with Yu, Liu, Pu, Gursoy, Truex 2019, "Differentially
        private model publishing for deep learning": epsilon = rho + 2 sqrt(rho ln(1/delta)), rho = sum 1 / (2 z^2).
    """

    source: ClassVar[str] = "Wei et al. 2021, of Yu et al. 2019"

    first: float | None = None
    slope: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # neither T0 nor q decides whether the first round can be paid
        linear_decay(self.epsilon, self.delta, 1, 1.0, first=self.first, slope=self.slope, longest=1)

    @property
    def formula(self) -> Calibration:
        """Of the approach's source."""
        return "zcdp"

    def init(self, setting: Setting) -> tuple[float, ...]:
        """All rounds are to come."""
        return linear_decay(
            self.epsilon,
            self.delta,
            self.horizon(setting),
            setting.participants / setting.clients,
            first=self.first,
            slope=self.slope,
            longest=setting.rounds,
        )

    def advance(self, state: tuple[float, ...], feedback: Feedback) -> tuple[float, ...]:
        """One round fewer is to come."""
        return state[1:]

    def stops(self, state: tuple[float, ...]) -> bool:
        """When no round is to come: the budget pays for none."""
        return not state

    def noise_multiplier(self, state: tuple[float, ...], setting: Setting) -> float:
        """The first of those to come."""
        return state[0]
