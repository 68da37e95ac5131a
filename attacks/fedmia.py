"""FedMIA: a record's owner is the client whose message stands out from the others'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from leakgauge.attacks._members.scores import fedmia
from leakgauge.attacks._members.traffic import Traffic, membership, read
from leakgauge.harness.core.contract import Attack, Membership, Observation
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class FedMIA(Attack):
    """The cosine of the suspect's message with a candidate's gradient, against those of the other clients' messages.

    Args:
        pooled: True: the quotients (own - mean) / std summed over the rounds, the variance pooled over the candidates.
            False: each record's own variance, and Phi of the quotient, as in the source.
        ratio: with `pooled`, each quotient weighs by how far a member's gradient would move the message: the log of the
            likelihood ratio. Of the coordinates that were sent, gradients clipped as the defense clips records.

    Must know: every client's messages, the models of their rounds and the candidates with their labels. So for a server
    or an eavesdropper; without the shared key, the estimate is an outsider's. That the others have the record too is
    taken to be unlikely. The other messages carry the defense's noise as well, so that it needs no knowledge of it.

    Cannot: do with fewer than three messages a round (`membership-cosine` can); look through a channel that adds them
    up (`membership-sum`). Where it is not said in whose data membership is asked about, a record's score is the largest
    among the clients: of ten, most scores then are the largest of ten noises (AUC 0.54 for 0.69).

    Raises:
        ValueError: `ratio` without `pooled`; in `run`, fewer than three messages in a round, a loss that is not softmax
            cross-entropy, a channel that adds messages up, or no message of the suspect.

    Source: Zhu et al. 2025, "FedMIA: an effective membership inference attack exploiting 'all for one' principle in
        federated learning" (arXiv 2402.06289), on the cosine. `pooled` and `ratio` are ours.
    """

    kind: ClassVar[str] = "membership"

    pooled: bool = True
    ratio: bool = False

    def __post_init__(self) -> None:
        if self.ratio and not self.pooled:
            raise ValueError("expected pooled=True with ratio=True: a variance of a few messages makes no likelihood")

    @property
    def aware(self) -> bool:
        """With `ratio`, which knows what was sent and how records were clipped."""
        return self.ratio

    @property
    def needs(self) -> frozenset[str]:
        """Messages, the rounds' models and the candidates."""
        return frozenset({"messages", "models", "candidates"})

    def run(self, seen: Observation, key: Key) -> Membership:
        """One score a candidate; nothing is drawn."""
        return self.judge(list(read(seen, sent=self.ratio)), seen.suspect)

    def judge(self, rounds: Sequence[Traffic], suspect: int | None) -> Membership:
        """Of rounds that were read before: one reading serves several attacks."""
        fewest = min((len(traffic.senders) for traffic in rounds), default=3)
        if fewest < 3:
            raise ValueError(
                f"expected at least three messages in every round, to compare one with the others, got {fewest}; "
                "membership-cosine does with one"
            )
        return membership(rounds, partial(_evidence, self), suspect)


def _evidence(attack: FedMIA, traffic: Traffic, row: int) -> Tensor:
    """[n], of one message."""
    if attack.ratio:
        return traffic.against_others(row)
    cosines = traffic.cosines
    return fedmia(cosines[None, row], cosines[None, traffic.others_of(row)], pooled=attack.pooled)
