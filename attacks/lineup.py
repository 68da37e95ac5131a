"""Lineup: finds out which of k candidate records is behind a message, by the defense's own likelihood."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from leakgauge.attacks._engine.others import AttackedRound
from leakgauge.harness.core.contract import Attack, Candidates, Examples, Named, Observation
from leakgauge.harness.core.rng import Key, subset


@dataclass(frozen=True)
class Lineup(Attack):
    """Compares the message with what it would be for each candidate, and names the likeliest one.

    A candidate's update takes one gradient for each local step, and no search; the model may be any that trains. If
    the records beside the one in question are known, or there are none, the scores are log likelihoods of the whole
    message: no test of the same candidates is better on average (Neyman and Pearson 1933). The log likelihoods of
    several rounds add up.

    Otherwise the other records are unknown, apart from their labels, which their own candidates show. The message's
    estimate then counts as normal: its mean has the other records at the mean of their labels, its covariance is that
    of other records of these labels plus the error of the defense, both measured on the adversary's own data and
    messages. The same score serves a defense without a likelihood.

    Must know: the messages of each victim, the models of their rounds, the defense with its parameters, data of the
    same kind, and the candidates (`lineup`), which a study grants; with `mates`, also the other records.

    Cannot: tell near-copies of a record apart once the noise is larger than what they differ by; say that the record
    is among the candidates, for which `references` are compared. The order in which a client takes its records is
    unknown; the order of the candidate's batch is used.

    Args:
        references: records of the same label, no candidates, whose likelihoods show whether any candidate stands out.

    Raises:
        ValueError: references < 0.

    Source: the likelihood-ratio test of Balle, Cherubin, Hayes 2022 ("Reconstructing training data with informed
        adversaries", sec. 2), with real records as the prior. Whitening by the covariance of other records is ours.
    """

    kind: ClassVar[str] = "lineup"

    references: int = 28

    def __post_init__(self) -> None:
        if self.references < 0:
            raise ValueError(f"expected references >= 0, got {self.references}")

    @property
    def aware(self) -> bool:
        """True: it is the defense's own likelihood."""
        return True

    @property
    def needs(self) -> frozenset[str]:
        """Messages, models, data of the same kind, and the candidates."""
        return frozenset({"messages", "models", "auxiliary", "lineup"})

    def at_once(self, dim: int) -> int:
        """A few victims, so that a long lineup can be split."""
        return 16

    def run(self, seen: Observation, key: Key) -> Named:
        """The candidates' scores; the key draws references and the adversary's own messages."""
        seen = seen.placed()
        assert seen.lineups is not None
        assert seen.messages is not None
        rounds = [
            AttackedRound(seen, observed, key.child("others", number))
            for number, observed in enumerate(seen.observed_rounds)
        ]
        records = list[tuple[Candidates, ...]]()
        for victim, (lineups, message) in enumerate(zip(seen.lineups, seen.messages, strict=True)):
            mates = None if seen.mates is None else seen.mates[victim]
            each = list[Candidates]()
            for place, lineup in enumerate(lineups):
                tried, k = (
                    self._tried(seen, lineup, key.child("references", message.sender.number, place)),
                    len(lineup.y),
                )
                others = [other.y[0] for number, other in enumerate(lineups) if number != place]
                labels = torch.tensor(others, dtype=lineup.y.dtype)
                scores = torch.stack([round_.scores(victim, tried, mates, labels) for round_ in rounds]).sum(0)
                fits = torch.full((k,), math.nan, dtype=torch.float64)
                for number in scores[:k].topk(min(2, k)).indices.tolist() if all(r.exact for r in rounds) else ():
                    own = Examples(lineup.x[number : number + 1], lineup.y[number : number + 1])
                    fits[number] = scores[number] - sum(round_.usual(victim, own, mates) for round_ in rounds)
                each.append(Candidates(scores[:k], scores[k:], fits))
            records.append(tuple(each))
        return Named(tuple(records), all(round_.exact for round_ in rounds))

    def _tried(self, seen: Observation, lineup: Examples, key: Key) -> Examples:
        """The candidates, and then the references: records of their label from the adversary's own data."""
        assert seen.auxiliary is not None
        labels, (least, most) = seen.auxiliary.y, (lineup.y.min(), lineup.y.max())  # numbers of a regression differ
        alike = torch.nonzero((labels >= least) & (labels <= most))[:, 0]
        chosen = alike[torch.from_numpy(subset(key, len(alike), min(self.references, len(alike))))]
        return Examples(*(torch.cat([own, other[chosen]]) for own, other in zip(lineup, seen.auxiliary, strict=True)))
