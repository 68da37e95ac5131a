"""Membership from the sum of all messages, the only output of a superposing channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from leakgauge.attacks._members.presence import presence
from leakgauge.attacks._members.traffic import ByTraffic, Traffic, over_rounds
from leakgauge.harness.core.contract import Membership, Observation
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class MembershipSum(ByTraffic):
    """Measures how a candidate's gradient aligns with the mean of all clients' messages, summed over the rounds.

    For a superposing channel, this mean is the one message divided by the number of users. For other defenses, it is
    the mean of the messages weighted by their senders' samples, as behind secure aggregation; `membership-cosine` and
    `fedmia` show what single messages add.

    Args:
        statistic: `cosine`: the cosine of the mean and minus the candidate's gradient at the round's model;
            `likelihood`: log likelihood ratio that the mean holds one record's share of that gradient; for a channel
            that adds messages up, that of `membership-cosine`.

    Must know: the messages that arrive in each round, the rounds' models, and the candidates with their labels; a
    server or an eavesdropper does. The choice of the suspect has no effect.

    Cannot: identify the owner of a record, or separate a member from a record that resembles many others: a record's
    share falls with the number of clients, and there are no other messages for comparison.

    Raises:
        ValueError: an unknown statistic; in `run`: a loss that is neither softmax cross-entropy nor squared, or no
            message.

    Source: the cosine of Li et al. 2022 ("Effective passive membership inference attacks in federated learning against
        overparameterized models"), applied to a sum. `likelihood` is ours.
    """

    together: ClassVar[bool] = True

    statistic: Literal["cosine", "likelihood"] = "cosine"

    def __post_init__(self) -> None:
        if self.statistic not in ("cosine", "likelihood"):
            raise ValueError(f"expected statistic 'cosine' or 'likelihood', got {self.statistic!r}")

    @property
    def aware(self) -> bool:
        """True with `likelihood`."""
        return self.statistic == "likelihood"

    @property
    def needs(self) -> frozenset[str]:
        """What other attacks on messages need; `likelihood` also needs auxiliary data."""
        return super().needs | ({"auxiliary"} if self.aware else set())

    def run(self, observation: Observation, key: Key) -> Membership:
        """One score per candidate; `likelihood` of a sum draws clients of its own from the key."""
        if self.aware and observation.defense.superposes:
            return over_rounds(presence(observation, key), None)
        return super().run(observation, key)

    def evidence(self, traffic: Traffic, row: int) -> Tensor:
        """[n]: the statistic of each candidate for the mean message of a round."""
        return traffic.ratios[row] if self.aware else traffic.cosines[row]
