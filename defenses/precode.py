"""PRECODE: clients train the model with a variational bottleneck, whose noise they draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakgauge.defenses._common.misfit import rounding_misfit
from leakgauge.defenses._common.plain import Plain
from leakgauge.harness.core.claim import Claim, nothing_promised
from leakgauge.harness.core.contract import Likelihood, Link, Links, LocalRule, Sender, Setting
from leakgauge.harness.core.distribution import Exact, MessageDistribution, numbers
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.layout import Layout
from leakgauge.harness.core.vec import Vector

_SPREAD = 0.5
"""Assumed error of an entry before the encoder that was computed without the noise, over the root mean square entry.

Medians over 20 batches of 4 or 16 digits: 0.4 to 0.8 behind `mlp-small`, `mlp` and `lenet-dlg`, fresh and after 300
steps; 1.1 to 1.5 behind a fresh `lenet-dlg` with the initialization `dlg`.
"""


@dataclass(frozen=True)
class Precode(Plain[None]):
    """PRECODE: clients train the model with a variational bottleneck before its last dense layer.

    An encoder, a dense layer, maps the representation of a record (the last dense layer's input, m entries) to the mean
    mu and the deviation sigma of a code of k entries; the client draws z = mu + sigma eps with its own eps ~ N(0, I),
    anew for each record and step; a decoder, another dense layer, maps z to m entries, which the last dense layer gets.
    The loss has in addition beta KL(N(mu, sigma) || N(0, I)) in bits. Messages hold the gradients of all layers, also
    of encoder and decoder; the noise changes all of them, but what the encoder and the layers before it get depends on
    it only through one slope at the encoder's output, which is the gradient of the encoder's bias.

    Args:
        width: k. Default 256, as the authors'.
        beta: weight of the divergence. Default 1e-3, as the authors'.

    Guarantees:
        Messages have 4 * d bytes, with d = the model's parameters + 3 k m + 2 k + m: the update, whose gradients were
        computed with noise in training (`LocalRule.bottleneck`).

    Raises:
        ValueError: width is below 1, or beta is negative or not finite; in training: a model whose last dense layer is
            not known.

    Source: Scheliga, Maeder and Seeland 2022, "PRECODE - A generic model extension to prevent deep gradient leakage"
        (arXiv 2108.04725), and the authors' code, from which sigma = softplus, the unit of the divergence and the
        defaults are. Differs: a model is evaluated with z = mu, where the code draws noise there, too.
    """

    width: int = 256
    beta: float = 1e-3

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"expected width >= 1, got width={self.width}")
        if not 0 <= self.beta < float("inf"):
            raise ValueError(f"expected 0 <= beta < inf, got beta={self.beta}")

    @property
    def local(self) -> LocalRule:
        """Training inserts the bottleneck."""
        return LocalRule(bottleneck=self.width, divergence=self.beta)

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The update itself, as float32."""
        return Exact(numbers(update).astype("<f4").tobytes())

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """The misfit of updates that were computed with z = mu: of what they show whatever the noise.

        Of one record and one step, the encoder's input, which is the quotient of the gradients of its weight and its
        bias, in units of `ROUNDING`. Otherwise the entries before the encoder, which the noise changes, in units of
        half their root mean square. A layout without a bottleneck counts as a whole.
        """
        sent, layout = self.sent(received, links), links.setting.layout
        if (at := layout.encoder) is None:
            return lambda update: rounding_misfit(update - sent)
        before = sum(layout.sizes[:at])
        alone = torch.tensor([_alone(links.setting, sender) for sender in links.senders])
        shown, scale = _read(sent, layout, at), _SPREAD * sent[:, :before].square().mean(1, keepdim=True).sqrt()

        def score(update: Tensor) -> Tensor:
            off = (update[:, :before] - sent[:, :before]) / scale.clamp(min=1e-30)
            single = rounding_misfit(_read(update, layout, at) - shown)
            return torch.where(alone, single, 0.5 * off.square().sum(1))

        return score

    def exact_likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """As `likelihood`.

        Raises:
            NoLikelihood: several records or steps are behind a message: nobody but the client can compute its update.
        """
        if links.setting.layout.encoder is not None and not all(
            _alone(links.setting, sender) for sender in links.senders
        ):
            raise NoLikelihood("only the client knows the noise that is behind its update")
        return self.likelihood(state, received, links)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """No privacy in a formal sense is claimed."""
        return nothing_promised(
            len(history), "The noise is inside the model; most gradients show inputs whatever it is."
        )


def _read(updates: Tensor, layout: Layout, at: int) -> Tensor:
    """[n, m] the encoder's input, if one record and one step are behind each update [n, d]; `at`: `Layout.encoder`."""
    weight, bias = layout.split(updates)[at : at + 2]
    return (bias[:, None] @ weight)[:, 0] / bias.square().sum(1, keepdim=True).clamp(min=1e-30)


def _alone(setting: Setting, sender: Sender) -> bool:
    """Whether a message is a multiple of one record's gradient."""
    plain = setting.sends == "gradient" or (setting.optimizer == "sgd" and not setting.weight_decay)
    return plain and setting.steps == 1 and min(setting.batch or sender.samples, sender.samples) == 1
