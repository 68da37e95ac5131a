"""Membership by the ratio of a record's probability to that by other models, with few shadow models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leakgauge.attacks._members.scores import confidence, rmia
from leakgauge.attacks._members.shadowing import ByShadows, check_runs, outputs, shadow
from leakgauge.harness.core.contract import Membership, Observation
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class RMIA(ByShadows):
    """How much more probable the final model finds a record's label than the mean of shadow models does.

    Ranked by the logarithm of that ratio, which is the attack of the source without its ties: see
    `attacks._members.scores.rmia`. The population is the auxiliary data in no shadow's pool; it changes no order.

    Must know: the final model, the candidates with their labels, how the federation trains and on how many records, and
    auxiliary data, of which the shadow models' training sets are made up. With `simulate`, the defense as well.

    Cannot: use a round's model or message, or how much the shadows disagree on a record: with many shadows, LiRA is
    better at few false alarms.

    Args:
        mode: `online`: shadows with and without each candidate. `offline`: no shadow sees a candidate.
        shadows: models trained by the attacker.
        offline_a: a, in `offline`: the shadows with the record are taken to have p_in = a p_out + 1 - a.
        simulate: the shadows' updates pass through the defense.

    Raises:
        ValueError: a parameter out of range; in `run`, fewer than two classes, too few records to train shadows on, or
            all shadows diverged.

    Source: Zarifzadeh, Liu, Shokri 2024, "Low-cost high-power membership inference attacks" (arXiv 2312.03262); a = 0.3
        is theirs for CIFAR-10, tuned there on pairs of shadows. Differs: the log ratio for the count; no augmented
        queries.
    """

    mode: Literal["online", "offline"] = "online"
    shadows: int = 4
    offline_a: float = 0.3
    simulate: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("online", "offline"):
            raise ValueError(f"expected mode 'online' or 'offline', got {self.mode!r}")
        check_runs(self.shadows, 2 if self.mode == "online" else 1)
        if not 0 <= self.offline_a <= 1:
            raise ValueError(f"expected 0 <= offline_a <= 1, got offline_a={self.offline_a}")

    def run(self, seen: Observation, key: Key) -> Membership:
        """The log ratios, less the population's median."""
        assert seen.final is not None
        assert seen.candidates is not None
        made = shadow(seen, key, runs=self.shadows, online=self.mode == "online", simulate=self.simulate)
        probabilities = []
        for x, y in (seen.candidates, made.aside):
            models = [seen.final, *made.models]
            probabilities.append(confidence(outputs(seen.task, models, x), y).sigmoid())
        asked, aside = probabilities
        offline_a = self.offline_a if self.mode == "offline" else None
        return Membership(rmia(asked[0], asked[1:], made.asked, aside[0], aside[1:], offline_a=offline_a))
