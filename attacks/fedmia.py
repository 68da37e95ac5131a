"""FedMIA: a record belongs to the client whose message stands out from the others' messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakgauge.attacks._members.scores import fedmia
from leakgauge.attacks._members.traffic import ByTraffic, Traffic
from leakgauge.harness.core.contract import Membership


@dataclass(frozen=True)
class FedMIA(ByTraffic):
    """Compares a candidate's cosine with the suspect's message to its cosines with the other clients' messages.

    Args:
        pooled: True: the score sums (own - mean) / std over the rounds, with the variance pooled over the candidates.
            False: it uses each record's own variance, and Phi of the quotient, as in the source.

    Must know: every client's messages, the models of their rounds, and the candidates with their labels; a server or an
    eavesdropper does. Without the shared key, it uses an outsider's estimate. The attack assumes that the other clients
    rarely hold the same record. It needs no knowledge of the defense's noise, because the other messages carry this
    noise too.

    Cannot: handle fewer than three messages in a round (`membership-cosine` can) or a channel that adds messages up
    (`membership-sum` can). If no suspect is named, a record's score is the largest among the clients; with ten clients,
    most scores are then the largest of ten noise values (AUC 0.54 instead of 0.69).

    Raises:
        ValueError: in `run`: fewer than three messages in a round, a channel that adds messages up, or no message of
            the suspect.

    Source: Zhu et al. 2025, "FedMIA: an effective membership inference attack exploiting 'all for one' principle in
        federated learning" (arXiv 2402.06289), on the cosine. `pooled` is ours.
    """

    pooled: bool = True

    def judge(self, rounds: Sequence[Traffic], suspect: int | None = None) -> Membership:
        """Same as `ByTraffic.judge`, but every round needs three messages."""
        fewest = min((len(traffic.senders) for traffic in rounds), default=3)
        if fewest < 3:
            raise ValueError(
                f"expected at least three messages in every round, to compare one with the others, got {fewest}; "
                "use membership-cosine, which needs one"
            )
        return super().judge(rounds, suspect)

    def evidence(self, traffic: Traffic, row: int) -> Tensor:
        """[n]: the evidence of one message, compared with the other messages of its round."""
        cosines, others = traffic.cosines, torch.arange(len(traffic.senders)) != row
        return fedmia(cosines[None, row], cosines[None, others], pooled=self.pooled)
