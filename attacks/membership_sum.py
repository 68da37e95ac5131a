"""Membership by the sum of everybody's messages: all that crosses a channel that adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from leakgauge.attacks._members.traffic import Traffic, membership, read
from leakgauge.harness.core.contract import Attack, Membership, Observation
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class MembershipSum(Attack):
    """A candidate's gradient against the mean of all clients' messages, over the rounds.

    Of a channel that superposes, the one message over its number of users. Of another defense, the mean of the messages
    weighted by their senders' samples, as behind secure aggregation: what single messages add to it is the difference
    to `membership-cosine` and `fedmia`.

    Args:
        statistic: `cosine` of the mean with minus the candidate's gradient at the round's model; `likelihood`: log of
            the ratio that the mean holds one record's share of that gradient and not. That share is small beside what
            the records have in common: without a defense the cosine finds as many or more.

    Must know: what arrives in each round, the rounds' models and the candidates with their labels. So for a server or
    an eavesdropper. In whose data membership is asked about changes nothing.

    Cannot: say who holds a record; tell a member from a record like many others', for a record's share falls with the
    clients and nobody is left to compare with.

    Raises:
        ValueError: an unknown statistic; in `run`, a loss that is not softmax cross-entropy, or no message.

    Source: the cosine of Li et al. 2022 ("Effective passive membership inference attacks in federated learning against
        overparameterized models"), on a sum. `likelihood` is ours.
    """

    kind: ClassVar[str] = "membership"

    statistic: Literal["cosine", "likelihood"] = "cosine"

    def __post_init__(self) -> None:
        if self.statistic not in ("cosine", "likelihood"):
            raise ValueError(f"expected statistic cosine or likelihood, got {self.statistic!r}")

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
        return self.judge(list(read(seen, sent=self.aware, together=True)))

    def judge(self, rounds: Sequence[Traffic]) -> Membership:
        """Of rounds that were read before, `together`: one reading serves several attacks."""
        return membership(rounds, partial(_evidence, self.aware), None)


def _evidence(aware: bool, traffic: Traffic, row: int) -> Tensor:
    """[n], of the one message of a round."""
    return traffic.ratios[row] if aware else traffic.cosines[row]
