"""UDP with communication-rounds discounting: a run that no longer improves ends sooner, with less noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from leakgauge.defenses._udp.claim import UDPRounds
from leakgauge.defenses._udp.formulas import Calibration, Schedule, Spending, budget, discount, next_multiplier, spend
from leakgauge.harness.core.contract import Feedback, Setting


@dataclass(frozen=True)
class UDPCRD(UDPRounds[Spending]):
    """UDP with communication-rounds discounting: where a round brings little, T shrinks and so does the later noise.

    The state is T, the noise of the rounds that were run, and the budget: the same for all clients. A client that is
    not picked counts the round as spent.

    Args:
        clip: C, bound on the l2 norm of one record's gradient, or of the update, in units of each.
        epsilon: of the whole run, for one record of a client, at `delta`.
        delta: of the whole run.
        rounds: T at the start; None: the federation's.
        clips: `records` or `update`, as for `udp`.
        calibration: `paper`, `zcdp` or `tight`, as for `udp`.
        zeta: T shrinks after a round that lowers the test loss by less than this.
        beta: to which share of the rounds from that one on, rounded down.

    Guarantees:
        4 * d bytes.
        decode(encode(u)) - u (or - clip(u), where the update is clipped) is normal with standard deviation `sigma` in
        each coordinate, independently, up to float32 rounding.
        Until T shrinks, sigma is that of `udp`.
        Whatever the losses, the rounds spend no more than the budget; a run that reaches T spends all of it, unless T
        shrinks to the number of rounds already run.
        A round whose loss before or after was not evaluated never shrinks T: evaluate every round.

    Raises:
        ValueError: a parameter out of range.

    Source: Wei et al. 2021 (see `udp`), Algorithm 2 and (25). Differs: noise on the trained model, where line 9 prints
        the old one; one central test loss, where each client reports its own.
    """

    source: ClassVar[str] = "Wei et al. 2021, (25)"

    calibration: Calibration = "paper"
    zeta: float = 1e-3
    beta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.zeta < math.inf:
            raise ValueError(f"expected zeta >= 0, got zeta={self.zeta}")
        if not 0 < self.beta < 1:
            raise ValueError(f"expected 0 < beta < 1, got beta={self.beta}")

    @property
    def formula(self) -> Calibration:
        """The calibration."""
        return self.calibration

    def init(self, setting: Setting) -> Spending:
        """Nothing is spent."""
        share = setting.participants / setting.clients
        allowed = budget(self.epsilon, self.delta, share, self.calibration)
        return Spending(Schedule(self.horizon(setting)), allowed)

    def advance(self, state: Spending, feedback: Feedback) -> Spending:
        """One round is spent; T shrinks if it brought little."""
        spent = spend(state.schedule, state.budget)
        shorter = discount(spent, feedback.before, feedback.after, zeta=self.zeta, beta=self.beta)
        return state._replace(schedule=shorter)

    def stops(self, state: Spending) -> bool:
        """After T rounds, as T is now."""
        return state.schedule.ended

    def noise_multiplier(self, state: Spending, setting: Setting) -> float:
        """An even share of what is left."""
        return next_multiplier(state.schedule, state.budget)

    def assumes(self, setting: Setting) -> list[str]:
        """What the claim takes for granted."""
        losses = "the test losses that shrink T are told in clear; the records behind them are not covered"
        return [*super().assumes(setting), losses]
