"""Soteria: the gradient of the last dense layer is computed from a pruned representation of each record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from leakgauge.defenses._common.misfit import rounding_misfit
from leakgauge.defenses._common.plain import Plain
from leakgauge.harness.core.claim import Claim, nothing_promised
from leakgauge.harness.core.contract import Likelihood, Link, Links, LocalRule, Sender, Setting
from leakgauge.harness.core.distribution import Exact, MessageDistribution, numbers
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class Soteria(Plain[None]):
    """Soteria: prunes each record's representation where it leaks most, in the gradient of one layer's weight.

    The defended layer is the last dense one. Its weight has the gradient sum_b delta_b r_b' / B, where r_b' is the
    representation of record b (the layer's input) without the share `rate` of its nonzero entries for which
    |r_i| / ||dr_i/dx|| is largest. All other gradients, also that of the layer's bias, are as without the defense.

    Args:
        rate: share of the nonzero entries that are pruned. Default 0.6: the authors' command for their example.

    Guarantees:
        Messages have 4 * d bytes: the update, whose gradients were pruned in training (`LocalRule.prune`).

    Raises:
        ValueError: rate is outside (0, 1); in training: a model whose last dense layer is not known, or with a batch
            norm.

    Source: Sun et al. 2021, "Soteria: provable defense against privacy leakage in federated learning from
        representation perspective" (arXiv 2012.06043), and the authors' code; `harness.learn.pruning` says where we
        differ.
    """

    rate: float = 0.6

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(f"expected 0 < rate < 1, got rate={self.rate}")

    @property
    def local(self) -> LocalRule:
        """Training prunes representations."""
        return LocalRule(prune=self.rate)

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The update itself, as float32."""
        return Exact(numbers(update).astype("<f4").tobytes())

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """Squared distance in units of `ROUNDING`, for updates that were computed without pruning.

        The defended weight does not count, except behind one step of one record: its zero columns are the pruned
        ones, and the others are exact.
        """
        sent, layout = self.sent(received, links), links.setting.layout
        counts = torch.ones_like(sent)
        if (place := layout.last_matrix) is not None:
            shown = (layout.split(sent)[place] != 0).any(1, keepdim=True)
            single = torch.tensor([_alone(links.setting, sender) for sender in links.senders])[:, None, None]
            # a decay or a penalty leaves no zeros
            layout.split(counts)[place].mul_(shown & single & ~shown.all(2, keepdim=True))
        return lambda update: rounding_misfit(counts * (update - sent))

    def exact_likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """Squared distance of all entries, for updates that were computed with pruning."""
        return super().likelihood(state, received, links)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """No privacy in a formal sense is claimed."""
        return nothing_promised(len(history), "One layer's gradient is pruned; all others are sent as they are.")


def _alone(setting: Setting, sender: Sender) -> bool:
    """Whether one record and one step are behind a message."""
    return setting.steps == 1 and min(setting.batch or sender.samples, sender.samples) == 1
