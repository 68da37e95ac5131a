"""UDP: clipped records, one full-batch step, and normal noise calibrated to the epsilon of a whole run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakgauge.defenses._udp import Calibrated, epsilons, moment, multiplier
from leakgauge.harness.core.contract import Feedback, Setting

FORMULAS = {"moment": moment, "epsilons": epsilons}
"""Formulas of the paper that recipes draw."""


@dataclass(frozen=True)
class UDP(Calibrated[int]):
    """UDP: clip each record's gradient, take one full-batch step, add normal noise for the epsilon of the whole run.

    The state is the number of the round; all rounds have the same noise.

    Args:
        clip: C, bound on the l2 norm of one record's gradient, or of the update, in units of each.
        epsilon: privacy budget of the whole run, for one record of a client, at `delta`.
        delta: delta of the guarantee for the whole run.
        rounds: T, the number of rounds for which the noise is calibrated; the federation then ends. None: the
            federation's number of rounds.
        clips: `records`: clip each record's gradient, as printed. `update`: clip the update of any local training; the
            sensitivity is then 2C, and epsilon covers any two messages.
        calibration: `paper` (eq. (10)), `zcdp` or `tight`; the claim holds for the last two, see
            `_udp.budget`.

    Guarantees:
        Messages have 4 * d bytes.
        decode(encode(u)) - u is normal with standard deviation `sigma` in each coordinate, independently, up to float32
        rounding. If the update is clipped, u is the clipped update.
        sigma is z times the sensitivity of the sender's message, 2 lr C / n_i. lr is the learning rate of round 0, so
        that the proof also holds for a decreasing learning rate.
        The federation runs at most T rounds.

    Raises:
        ValueError: a parameter is out of range.

    Source: Wei, Li, Ding, Ma, Su, Zhang, Poor 2021, "User-level privacy-preserving federated learning: analysis and
        performance optimization", Algorithm 1 and eq. (10). Differs: participating clients are weighted by their
        numbers of samples. Despite the title, neighbors differ in one record; `claim` also covers all records of a
        client. Eq. (10) gives too little noise above epsilon 6.98 (delta 1e-3, all clients take part): its proof
        replaces e^x - 1 by x.
    """

    source: ClassVar[str] = "Wei et al. 2021, (10)"

    def init(self, setting: Setting) -> int:
        """Round 0."""
        return 0

    def advance(self, state: int, feedback: Feedback) -> int:
        """The number of the next round."""
        return state + 1

    def stops(self, state: int) -> bool:
        """Whether T rounds are done, which spend the budget."""
        return self.rounds is not None and state >= self.rounds

    def noise_multiplier(self, state: int, setting: Setting) -> float:
        """z, the same in all rounds."""
        share = setting.share
        return multiplier(self.epsilon, self.delta, self.rounds or setting.turns, share, self.calibration)
