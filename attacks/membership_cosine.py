"""Membership by the direction of a client's message: a member's gradient points along it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from leakgauge.attacks._members import clear
from leakgauge.attacks._members.presence import presence
from leakgauge.attacks._members.traffic import ByTraffic, Traffic, over_rounds
from leakgauge.harness.core.contract import Membership, Observation
from leakgauge.harness.core.rng import Key

Statistic = Literal["cosine", "difference", "likelihood", "norm"]


@dataclass(frozen=True)
class MembershipCosine(ByTraffic):
    """Measures how a candidate's gradient aligns with each message of the suspect, summed over the rounds.

    Args:
        statistic: `cosine`: the cosine of the message and minus the candidate's gradient g at the round's model,
            averaged over the rounds; `difference`: |U|^2 - |U - g|^2 with the message U as a mean gradient;
            `likelihood`: log likelihood ratio that the message holds the record beside unknown others (see
            `_members.presence`), which finds most; `norm`: log likelihood ratio of only the numbers that the defense
            sends in clear beside those of the update, such as a norm.

    Must know: every client's messages, the models of their rounds, and the candidates with their labels; a server or an
    eavesdropper does. Without the shared key, it uses an outsider's estimate. `likelihood` and `norm` need auxiliary
    data of the same kind, from which they simulate clients without memory of earlier rounds.

    If the channel adds the messages up, the attack reads the sum, as `membership-sum` does.

    Cannot: separate a member from a record whose gradient resembles those of the client's other records; `fedmia` can,
    with the other clients' messages. If no suspect is named, a record's score is the largest among the clients, which
    costs most of the signal with ten clients (AUC 0.56 instead of 0.70).

    Raises:
        ValueError: an unknown statistic; in `run`: no message of the suspect.

    Source: Li et al. 2022, "Effective passive membership inference attacks in federated learning against
        overparameterized models" (cosine and difference in one round); Zhu et al. 2025 (arXiv 2402.06289) for the sum
        over rounds. `likelihood` is the likelihood-ratio test of Neyman and Pearson for normal messages; it is ours.
    """

    reads_sums: ClassVar[bool] = True

    statistic: Statistic = "cosine"

    def __post_init__(self) -> None:
        if self.statistic not in get_args(Statistic):
            raise ValueError(f"expected statistic cosine, difference, likelihood or norm, got {self.statistic!r}")

    @property
    def aware(self) -> bool:
        """True with `likelihood` and `norm`."""
        return self.statistic in ("likelihood", "norm")

    @property
    def needs(self) -> frozenset[str]:
        """What other attacks on messages need; `likelihood` and `norm` also need auxiliary data."""
        return super().needs | ({"auxiliary"} if self.aware else set())

    @property
    def averages(self) -> bool:
        """True with `cosine`, whose score is a mean over the rounds."""
        return self.statistic == "cosine"

    def run(self, observation: Observation, key: Key) -> Membership:
        """One score per candidate; only `likelihood` and `norm` draw from the key, for clients of their own."""
        if self.statistic == "likelihood":
            suspect = None if observation.defense.superposes else observation.suspect
            return over_rounds(presence(observation, key, suspect), suspect)
        if self.statistic == "norm":
            return clear.judge(observation, key, clear.by_batches)
        return super().run(observation, key)

    def evidence(self, traffic: Traffic, row: int) -> Tensor:
        """[n]: the statistic of each candidate for one message."""
        match self.statistic:
            case "cosine":
                return traffic.cosines[row]
            case "difference":
                return traffic.differences[row]
            case _:
                raise ValueError(f"expected a statistic that reads `Traffic`, got {self.statistic}")
