"""Active membership inference: a malicious server broadcasts neurons that fire only for candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._members import clear
from leakgauge.attacks._members.neurons import FIRES, fired, firing_for_candidates
from leakgauge.attacks._members.traffic import over_rounds, weight_of
from leakgauge.harness.core.contract import Attack, Membership, Observation
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

Statistic = Literal["gradient", "norm"]

_OF_NORM = 0.99  # threshold of a neuron if only a norm is read, which needs a stricter one than gradients


@dataclass(frozen=True)
class ActiveMembership(Attack):
    """Broadcasts a dense layer whose neurons fire only for candidates, and finds whose gradients are in a message.

    A neuron is on for its candidates and off for nearly all other records (see `_members.neurons`). The update of a
    client without a candidate is hardly more than the last layer's bias. With a candidate, the candidate's gradient
    is nearly all of the update, and a clip or noise in proportion to the update's size protects the candidate no
    better than any other update. The score is the log likelihood ratio that the record is in the message; it treats
    the other candidates and the noise as normal and measures the noise in the layer's median row. The server
    discards the updates of the attacked rounds.

    Args:
        statistic: `gradient`: as above. `norm`: uses only the numbers that the defense sends in clear, such as a norm.
            The candidates' gradients then have random lengths, so the length of a sum shows which of them it contains.

    Must know: every client's messages, the candidates with their labels, and auxiliary data of the same kind. It also
    chooses the parameters, which do not depend on the defense or the clients and are the same in every attacked round;
    this requires a malicious server.

    Cannot: attack models without a dense ReLU layer before another dense layer (`lenet-dlg`, `resnet20`, `linear`); the
    training then fails with the reason. With more candidates than neurons, several candidates share a neuron, and only
    the direction of their gradients separates them. The records of one client share its clip. `norm` finds up to four
    members behind one message among 64 candidates, three among 100, and needs messages of one local step.

    Raises:
        ValueError: in `broadcast`: the model has no such layers, its loss is not softmax cross-entropy, or there are
            fewer than two auxiliary inputs; in `run`: the model has no such layers, its loss is not softmax
            cross-entropy, or there is no message of the suspect; with `norm`: nothing is sent in clear, or messages
            have several steps.

    Source: Nguyen et al. 2023, "Active membership inference attack under local differential privacy in federated
        learning": one neuron for one record. Differs: has a neuron for each candidate or group of candidates, in closed
        form instead of by training, and uses the gradient along each candidate instead of whether the gradient is zero.
        `norm` is ours.
    """

    kind: ClassVar[str] = "membership"
    needs: ClassVar[frozenset[str]] = frozenset({"messages", "models", "candidates", "auxiliary", "broadcast"})
    statistic: Statistic = "gradient"

    def __post_init__(self) -> None:
        if self.statistic not in get_args(Statistic):
            raise ValueError(f"expected statistic 'gradient' or 'norm', got {self.statistic!r}")

    def broadcast(self, seen: Observation, key: Key) -> Vector:
        """Neurons for the candidates, behind the convolutions of a fresh model."""
        norm = self.statistic == "norm"
        steady = seen.setting.steps > 1 and not norm  # the first steps move the parameters
        fires = _OF_NORM if norm else FIRES
        return firing_for_candidates(seen, "active-membership", key, fires, varied=norm, steady=steady)

    def run(self, seen: Observation, key: Key) -> Membership:
        """One score per candidate; nothing is drawn."""
        if self.statistic == "norm":
            return clear.judge(seen, key, clear.by_sets)
        evidence: list[tuple[int, Tensor]] = []
        for observed in seen.observed_rounds:
            if observed.messages:
                senders = [message.sender.number for message in observed.messages]
                weights = [weight_of(seen.setting, message) for message in observed.messages]
                images = [message.images for message in observed.messages]
                shown = received_gradients(seen, observed, softmax=True), weights, images
                ratios = fired(seen, observed.model.params, *shown, "active-membership")
                evidence += zip(senders, ratios, strict=True)
        return over_rounds(evidence, None if seen.defense.superposes else seen.suspect)
