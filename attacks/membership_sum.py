"""Membership from the sum of all messages, the only output of a superposing channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from leakgauge.attacks._members.traffic import ByTraffic, Traffic


@dataclass(frozen=True)
class MembershipSum(ByTraffic):
    """The cosine of minus a candidate's gradient and the mean of all clients' messages, summed over the rounds.

    For a superposing channel, this mean is the one message divided by the number of users. For other defenses, it is
    the mean of the messages weighted by their senders' samples, as behind secure aggregation; `membership-cosine` and
    `fedmia` show what single messages add. Where
    only sums can be seen, `membership-cosine` with `likelihood` reads them by the likelihood-ratio test.

    Must know: the messages that arrive in each round, the rounds' models, and the candidates with their labels; a
    server or an eavesdropper does. The choice of the suspect has no effect.

    Cannot: identify the owner of a record, or separate a member from a record that resembles many others: a record's
    share falls with the number of clients, and there are no other messages for comparison.

    Raises:
        ValueError: in `run`: no message.

    Source: the cosine of Li et al. 2022 ("Effective passive membership inference attacks in federated learning against
        overparameterized models"), applied to a sum.
    """

    together: ClassVar[bool] = True

    def evidence(self, traffic: Traffic, row: int) -> Tensor:
        """[n]: the statistic of each candidate for the mean message of a round."""
        return traffic.cosines[row]
