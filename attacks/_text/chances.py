"""What an adversary knows of texts without a message: how often tokens occur, and which follows which."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_DOUBT = 5.0  # occurrences of a token that its successors' frequencies weigh against the frequencies of all tokens


class Chances(NamedTuple):
    """Frequencies in the adversary's own texts.

    token: [V] log probabilities at a place. first: [V] log odds that a text of the batch has the token. size: V.
    pairs, counts: sorted numbers of pairs of neighbors, and how often each occurs; total: [V] of pairs' first tokens.
    """

    token: Tensor
    first: Tensor
    pairs: Tensor
    counts: Tensor
    total: Tensor

    @classmethod
    def of(cls, x: Tensor, size: int, texts: int) -> Chances:
        """From texts x [n, T], for batches of `texts` texts."""
        ids = x.long()
        often = ids.flatten().bincount(minlength=size).double() + 0.5
        present = torch.zeros(len(ids), size, dtype=torch.bool).scatter_(1, ids, True).sum(0)
        share = 1 - (1 - (present + 0.1) / (len(ids) + 0.2)) ** texts
        pairs, counts = torch.unique(ids[:, :-1] * size + ids[:, 1:], return_counts=True)
        total = torch.zeros(size, dtype=torch.float64).index_add_(0, pairs // size, counts.double())
        return cls((often / often.sum()).log(), share.double().logit(), pairs, counts.double(), total)

    def after(self, before: Tensor, token: Tensor) -> Tensor:
        """Log probabilities [...] that the token [...] follows the one before [...]."""
        code = before * len(self.token) + token
        place = torch.searchsorted(self.pairs, code).clamp(max=len(self.pairs) - 1)
        seen = torch.where(self.pairs[place] == code, self.counts[place], 0.0)
        return ((seen + _DOUBT * self.token[token].exp()) / (self.total[before] + _DOUBT)).log()

    def of_texts(self, x: Tensor) -> Tensor:
        """[m] log probabilities of texts x [m, b, T]."""
        return self.token[x[..., 0]].sum(-1) + self.after(x[..., :-1], x[..., 1:]).sum((-2, -1))

    def at_places(self, x: Tensor) -> Tensor:
        """[V, b, T] log probabilities of each token at each place of texts x [b, T], given its neighbors."""
        every = torch.arange(len(self.token))[:, None, None]
        found = self.token[every].expand(-1, *x.shape).clone()
        found[..., 1:] = self.after(x[:, :-1], every)
        found[..., :-1] += self.after(every.expand(-1, *x[:, 1:].shape), x[:, 1:])
        return found
