"""UDP with communication-rounds discounting: a run that no longer improves ends earlier, with less noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from leakgauge.defenses._udp import Calibrated, Schedule, Spending, budget, discount, next_multiplier, spend
from leakgauge.harness.core.contract import Feedback, Setting


@dataclass(frozen=True)
class UDPCRD(Calibrated[Spending]):
    """UDP with communication-rounds discounting: a round with little progress reduces T and so the later noise.

    The state holds T, the noise of the past rounds, and the budget. It is the same for all clients: a client that is
    not selected also counts the round as spent.

    Args:
        clip, epsilon, delta, clips, calibration: as for `udp`.
        rounds: T at the start; None: the federation's number of rounds.
        zeta: T shrinks after a round that lowers the test loss by less than this.
        beta: the share of the remaining rounds, from that round on, that is then kept, rounded down.

    Guarantees:
        Messages have 4 * d bytes and the distribution of `udp`; until T shrinks, sigma is that of `udp`.
        For any losses, the rounds spend no more than the budget. A run that reaches T spends the whole budget, unless T
        shrinks to the number of rounds already run.
        A round never shrinks T if its loss before or after was not evaluated: evaluate every round.

    Raises:
        ValueError: a parameter is out of range.

    Source: Wei et al. 2021 (see `udp`), Algorithm 2 and eq. (25). Differs: noise is added to the trained model, not to
        the old model as printed in line 9; one central test loss replaces the losses that the clients report.
    """

    source: ClassVar[str] = "Wei et al. 2021, (25)"

    zeta: float = 1e-3
    beta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.zeta < math.inf:
            raise ValueError(f"expected zeta >= 0, got zeta={self.zeta}")
        if not 0 < self.beta < 1:
            raise ValueError(f"expected 0 < beta < 1, got beta={self.beta}")

    def init(self, setting: Setting) -> Spending:
        """T rounds and an unspent budget."""
        share = setting.share
        return Spending(Schedule(self.horizon(setting)), budget(self.epsilon, self.delta, share, self.calibration))

    def advance(self, state: Spending, feedback: Feedback) -> Spending:
        """Spend one round; T shrinks if the round made little progress."""
        spent = spend(state.schedule, state.budget)
        shorter = discount(spent, feedback.before, feedback.after, zeta=self.zeta, beta=self.beta)
        return Spending(shorter, state.budget)

    def stops(self, state: Spending) -> bool:
        """Whether the current T rounds are done."""
        return state.schedule.ended

    def planned_rounds(self, state: Spending, setting: Setting) -> int:
        """The current T."""
        return state.schedule.rounds

    def noise_multiplier(self, state: Spending, setting: Setting) -> float:
        """z of a round that spends an even share of the remaining budget."""
        return next_multiplier(state.schedule, state.budget)

    def assumes(self, setting: Setting) -> list[str]:
        """The assumptions of the claim."""
        losses = "the test losses that shrink T are public; the test records are not covered"
        return [*super().assumes(setting), losses]
