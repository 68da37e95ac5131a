"""Membership by the likelihood ratio of shadow models with and without the record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from leakgauge.attacks._members.scores import Variance, confidence, lira_offline, lira_online
from leakgauge.attacks._members.shadowing import ByShadows, check_runs, outputs, shadow
from leakgauge.harness.core.contract import Membership, Observation
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class LiRA(ByShadows):
    """How likely the final model's confidence in a record is if it trained on it, against if it did not.

    Must know: the final model, the candidates with their labels, how the federation trains and on how many records, and
    auxiliary data, of which the shadow models' training sets are made up. With `simulate`, the defense as well.

    Cannot: use a round's model or message. Shadows that train on fewer records than the federation, for want of
    auxiliary data, or without the defense, are wrong about how much a record changes.

    Args:
        mode: `online`: each shadow trains on a random part of the candidates and auxiliary records, and every candidate
            is compared with shadows of both kinds. `offline`: no shadow sees a candidate, so that they can be trained
            before it is known; the test is then one-sided.
        shadows: models trained by the attacker.
        variance: `pooled` over the records, `per-example` or `global`: see `attacks._members.scores.lira_online`.
            With 4 shadows, a record's own variance ruins the attack.
        shrink: of `online`: a record's two means are drawn towards what those of other records suggest, see there.
        simulate: the shadows' updates pass through the defense.

    Raises:
        ValueError: a parameter out of range; in `run`, fewer than two classes, too few records to train shadows on, or
            all shadows diverged.

    Source: Carlini et al. 2022, "Membership inference attacks from first principles" (arXiv 2112.03570), Algorithm 1
        and section V.D. Differs: `pooled` and `shrink`; means, as in the text, not the medians of the public code; no
        augmented queries.
    """

    mode: Literal["online", "offline"] = "online"
    shadows: int = 16
    variance: Variance = "pooled"
    shrink: bool = True
    simulate: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("online", "offline"):
            raise ValueError(f"expected mode 'online' or 'offline', got {self.mode!r}")
        if self.variance not in get_args(Variance):
            raise ValueError(f"expected variance {', '.join(map(repr, get_args(Variance)))}, got {self.variance!r}")
        check_runs(self.shadows, 2 if self.mode == "online" else 1)

    def run(self, seen: Observation, key: Key) -> Membership:
        """The log likelihood ratio, offline the log of one tail."""
        assert seen.final is not None
        assert seen.candidates is not None
        x, y = seen.candidates
        made = shadow(seen, key, runs=self.shadows, online=self.mode == "online", simulate=self.simulate)
        target = confidence(outputs(seen.task, [seen.final], x)[0], y)
        others = confidence(outputs(seen.task, made.models, x), y)
        if self.mode == "offline":
            return Membership(lira_offline(target, others, made.asked, self.variance))
        return Membership(lira_online(target, others, made.asked, self.variance, shrink=self.shrink))
