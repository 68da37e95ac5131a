"""Active membership inference: a malicious server broadcasts neurons that fire only for candidates."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from leakgauge.attacks._engine.closed_form import neurons_of
from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._members import clear
from leakgauge.attacks._members.traffic import over_rounds, weight_of
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Attack, Membership, Observation, ObservedRound
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

Statistic = Literal["gradient", "norm"]

_RIDGE = 0.3  # ridge added to the variance of each input of the neurons, in units of the mean variance

_FIRES = {"gradient": 0.85, "norm": 0.99}
"""Threshold of a neuron, for which an average record scores 0 and its candidates 1; a norm needs a stricter one."""

_QUIET, _LOUD = 1e-9, 1e3
"""Output of a firing neuron, and slope of the scores over a later unit: the scores hardly move, the gradients do."""

_LEAST = 0.2  # least weight of a message's records, in units of the largest weight that a message of the round shows
_LENGTH = 100.0  # approximate length of a candidate's gradient over that of the gradient of all other layers together


@dataclass(frozen=True)
class ActiveMembership(Attack):
    """Broadcasts a dense layer whose neurons fire only for candidates, and finds whose gradients are in a message.

    A neuron is on for its candidates and off for nearly all other records: its weights are the linear map of least
    variance over the auxiliary data that gives its candidates 1 and their mean 0. All other neurons are dead. The
    update of a client without a candidate is hardly more than the last layer's bias. With a candidate, the candidate's
    gradient is nearly all of the update, and a clip or noise in proportion to the update's size protects the candidate
    no better than any other update. The score is the log likelihood ratio that the record is in the message; it treats
    the other candidates and the noise as normal and measures the noise in the layer's median row. The server discards
    the updates of the attacked rounds.

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
    statistic: Statistic = "gradient"

    def __post_init__(self) -> None:
        if self.statistic not in get_args(Statistic):
            raise ValueError(f"expected statistic 'gradient' or 'norm', got {self.statistic!r}")

    @property
    def needs(self) -> frozenset[str]:
        """Messages, models, candidates, auxiliary data, and the choice of the parameters."""
        return frozenset({"messages", "models", "candidates", "auxiliary", "broadcast"})

    def broadcast(self, seen: Observation, key: Key) -> Vector:
        """Neurons for the candidates, behind the convolutions of a fresh model."""
        assert seen.auxiliary is not None
        assert seen.candidates is not None
        if len(seen.auxiliary.x) < 2:
            raise ValueError(f"expected at least 2 auxiliary inputs to fit the neurons, got {len(seen.auxiliary.x)}")
        task, params = seen.task, seen.task.init(key.child("init"))
        structure, front, head = neurons_of(task, params, "active-membership")
        made = [torch.zeros_like(tensor) for tensor in head]
        like, candidates = front(seen.auxiliary.x), front(seen.candidates.x)
        made[0], made[1], gain = _neurons(like, candidates, len(head[0]), _FIRES[self.statistic], key.child("groups"))
        if self.statistic == "norm":
            gain *= (1 + rng.uniform(key.child("lengths"), (len(gain),))).sqrt()
        for middle in made[2:-2:2]:
            middle[0] = 1.0  # one unit adds up all units before it; the others are off
        side = torch.tensor([_LOUD, -_LOUD]).repeat(task.classes)[: task.classes]
        made[-2] += side[:, None]
        made[2] *= gain
        return structure.join([*structure.split(params)[: -len(made)], *made])

    def run(self, seen: Observation, key: Key) -> Membership:
        """One score per candidate; nothing is drawn."""
        if self.statistic == "norm":
            return clear.judge(seen, key, clear.by_sets)
        evidence: list[tuple[int, Tensor]] = []
        for observed in seen.observed_rounds:
            if observed.messages:
                senders = [message.sender.number for message in observed.messages]
                evidence += zip(senders, _ratios(seen, observed), strict=True)
        return over_rounds(evidence, None if seen.defense.superposes else seen.suspect)


def _neurons(like: Tensor, candidates: Tensor, hidden: int, fires: float, key: Key) -> tuple[Tensor, Tensor, Tensor]:
    """Weight [hidden, p] and bias [hidden]: each candidate fires one neuron; the inputs `like` hardly fire any.

    The third result is the gains [hidden] behind the neurons, which make the candidates' gradients about equally long.

    Args:
        like: [m, p]; candidates: [n, p], spread over the neurons at random.
        fires: the threshold.
    """
    n, mean = len(candidates), like.mean(0).double()
    off, to = like.double() - mean, candidates.double() - mean
    covariance = off.T @ off / len(off)
    covariance += _RIDGE * covariance.diagonal().mean().clamp(min=1e-12) * torch.eye(len(covariance)).double()
    toward = torch.linalg.solve(covariance, to.T).T
    weight, bias, gain = torch.zeros(hidden, like.shape[1]), torch.full((hidden,), -_QUIET), torch.ones(hidden)
    order, scale = torch.from_numpy(rng.permutation(key, n)), _QUIET / (1 - fires)
    for neuron, group in enumerate(torch.tensor_split(order, min(n, hidden))):
        gram = to[group] @ toward[group].T
        gram += (1e-6 * gram.diagonal().mean() + 1e-12) * torch.eye(len(group)).double()  # for copies, or the mean
        w = toward[group].T @ torch.linalg.solve(gram, torch.ones(len(group)).double())
        weight[neuron], bias[neuron] = scale * w, -scale * (fires + float(w @ mean))
        gain[neuron] = _LENGTH * (1 + candidates[group].square().sum(1).mean()).rsqrt()
    return weight, bias, gain


def _ratios(seen: Observation, observed: ObservedRound) -> Tensor:
    """[k, n]: the log likelihood ratio that candidate n is in message k of a round.

    A message shows z = G (w m) + N(0, variance G): the products with the candidates' gradients in the layer of neurons.
    G is the Gram matrix of these gradients, and m states which candidates are in the message. The other candidates
    count as normal with the variance of w m.
    """
    assert seen.candidates is not None
    x, y = seen.candidates
    structure, front, head = neurons_of(seen.task, observed.model.params, "active-membership")
    inputs = front(x)
    slopes = functools.reduce(torch.matmul, head[-2:0:-2]).double()  # [classes, hidden], of the scores
    back = (slopes.mean(0) - slopes[y]) * (inputs @ head[0].T + head[1] > 0)  # [n, hidden], at scores of 0
    rows = torch.cat([inputs, torch.ones(len(inputs), 1)], 1).double()
    gram = (back @ back.T) * (rows @ rows.T)
    values, vectors = torch.linalg.eigh(gram)
    values, lengths = values.clamp(min=0), gram.diagonal().clamp(min=1e-30)
    layers = []  # [hidden, p + 1] each: the gradient of the layer of neurons, with the bias last
    for tensors in map(structure.split, received_gradients(seen, observed)):
        weight, bias = tensors[-len(head)], tensors[1 - len(head)]
        layers.append(torch.cat([weight, bias[:, None]], 1).double().nan_to_num(0.0, 0.0, 0.0))
    products = torch.stack([((back @ layer) * rows).sum(1) for layer in layers])  # [k, n]
    # a clip or a quantizer's range lowers the weight of a message's records; not all messages have a candidate
    seems = (products / lengths).amax(1)
    least = _LEAST * float(seems.max().clamp(min=0))
    ratios = []
    for message, layer, product, seem in zip(observed.messages, layers, products, seems, strict=True):
        share = min(weight_of(seen.setting, message), max(least, float(seem)))
        noise = float(layer.square().mean(1).median()) + 1e-6 * share**2 * float(lengths.mean()) + 1e-30
        others = min(0.5, message.images / len(x)) * share**2
        by = 1 / (noise + others * values)
        along, alone = vectors @ (by * (vectors.T @ product)), vectors.square() @ (by * values)
        ratios.append((share * along - share**2 / 2 * alone) / (1 - others * alone))  # exclude the candidate
    return torch.stack(ratios)
