"""Membership by the direction of what a client sent: a member's gradient points the way of its client's update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from leakgauge.attacks._members.traffic import Traffic, membership, read
from leakgauge.harness.core.contract import Attack, Membership, Observation
from leakgauge.harness.core.rng import Key

Statistic = Literal["cosine", "difference", "likelihood"]


@dataclass(frozen=True)
class MembershipCosine(Attack):
    """A candidate's gradient against each message of the suspect, by itself, summed over the rounds.

    Args:
        statistic: `cosine` of the message with minus the candidate's gradient at the round's model, the mean over the
            rounds; `difference`: |U|^2 - |U - g|^2, the message U as a mean gradient; `likelihood`: log of the ratio
            that U holds a member's share of g and not, of the coordinates that were sent, g clipped as the defense
            clips records.

    Must know: every client's messages, the models of their rounds and the candidates with their labels. So for a server
    or an eavesdropper; without the shared key, the estimate is an outsider's. `likelihood` also knows which
    coordinates a message tells of; noise it estimates, for most of it is not the defense's but the other records'.

    Cannot: look through a channel that adds the messages up (`membership-sum`); tell a member from a record whose
    gradient is like that of the client's other records, which `fedmia` does by the other clients' messages. Where it is
    not said in whose data membership is asked about, a record's score is the largest among the clients, which of ten
    clients leaves little (AUC 0.56 for 0.70).

    Raises:
        ValueError: an unknown statistic; in `run`, a loss that is not softmax cross-entropy, a channel that adds
            messages up, or no message of the suspect.

    Source: Li et al. 2022, "Effective passive membership inference attacks in federated learning against
        overparameterized models" (cosine and difference of one round; summed over rounds: Zhu et al. 2025, arXiv
        2402.06289). `likelihood` is ours: see `attacks._members.traffic.Traffic.ratios`.
    """

    kind: ClassVar[str] = "membership"

    statistic: Statistic = "cosine"

    def __post_init__(self) -> None:
        if self.statistic not in ("cosine", "difference", "likelihood"):
            raise ValueError(f"expected statistic cosine, difference or likelihood, got {self.statistic!r}")

    @property
    def aware(self) -> bool:
        """With `likelihood`."""
        return self.statistic == "likelihood"

    @property
    def needs(self) -> frozenset[str]:
        """Messages, the rounds' models and the candidates."""
        return frozenset({"messages", "models", "candidates"})

    def run(self, seen: Observation, key: Key) -> Membership:
        """One score a candidate; nothing is drawn."""
        return self.judge(list(read(seen, sent=self.aware)), seen.suspect)

    def judge(self, rounds: Sequence[Traffic], suspect: int | None) -> Membership:
        """Of rounds that were read before: one reading serves several attacks."""
        return membership(rounds, partial(_evidence, self.statistic), suspect, mean=self.statistic == "cosine")


def _evidence(statistic: Statistic, traffic: Traffic, row: int) -> Tensor:
    """[n], of one message."""
    match statistic:
        case "cosine":
            return traffic.cosines[row]
        case "difference":
            return traffic.differences[row]
        case "likelihood":
            return traffic.ratios[row]
