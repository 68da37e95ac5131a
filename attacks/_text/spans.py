"""Texts behind an exact gradient: bags from rows, places by equations, and spans of weight gradients.

Source: Petrov et al. 2024 (DAGER) for the check that a hidden state lies in the row space of a weight's gradient.
Differs: rows count by their singular value, not by a rank; all layers whose states depend on the tokens before are used,
not the second block alone; thresholds follow from the number of texts; for encoders, whole texts are searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from leakgauge.attacks._text.network import Network, Site
from leakgauge.harness.core.vec import Vector

_ROUNDING = 2e-7  # of a row space: singular values below this share of the largest one are rounding
_QUIET = 8  # directions that the rows of absent tokens have in common if the words' tensor is also the output layer
_FAR = 0.05  # about the distance of a state of another text; the bound is the geometric mean with the b-th nearest
_SPARE = 4  # prefixes kept for each text
_STATES = 2**24  # numbers of hidden states that are held at once


class Span(NamedTuple):
    """The row space of a site's gradients. strength: [r] in [0, 1], how sure each direction [r, width] is."""

    site: Site
    directions: Tensor
    strength: Tensor

    @classmethod
    def of(cls, site: Site, tensors: Sequence[Tensor]) -> Span:
        """From the gradients of all tensors."""
        _, values, right = torch.linalg.svd(site.rows(tensors).double(), full_matrices=False)
        squares = values.square()
        return cls(site, right.float(), (squares / (squares + (_ROUNDING * values[0]).square())).nan_to_num(0.0).float())

    @property
    def full(self) -> bool:
        """Whether it says nothing, because it has all directions."""
        return float(self.strength.sum()) > self.site.width - 1

    def distance(self, states: Tensor) -> Tensor:
        """[...] relative distances of hidden states [..., width]."""
        unit = states / states.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        inside = unit @ self.directions.T
        off = unit - (inside * self.strength) @ self.directions
        return off.norm(dim=-1).clamp(min=1e-7)


def bag(network: Network, tensors: Sequence[Tensor], most: int) -> Tensor:
    """The ids of tokens that occur, at most `most`, by the rows of the words' gradient; the strongest first."""
    rows = tensors[network.words].double()
    norms = rows.norm(dim=1)
    if network.tied:
        quiet = rows[norms <= norms.median()]
        _, _, right = torch.linalg.svd(quiet, full_matrices=False)
        common = right[:_QUIET]
        norms = (rows - rows @ common.T @ common).norm(dim=1)
    count = most if network.tied else min(most, int((norms > _ROUNDING * norms.max()).sum()))
    return norms.topk(min(count, len(norms))).indices


def in_places(rows: Tensor, places: Tensor) -> tuple[Tensor, float]:
    """[T] which row is at each place, if each row [k, d] is the sum of its places' rows [T, d]; and the misfit.

    Least squares, then moves of single places, each of which lowers the misfit.
    """
    place = (rows @ torch.linalg.pinv(places)).argmax(0)
    rest = rows.clone().index_add_(0, place, -places)
    for _ in range(20):
        before = place.clone()
        for at in range(len(places)):
            rest[place[at]] += places[at]
            place[at] = (rest @ places[at]).argmax()
            rest[place[at]] -= places[at]
        if torch.equal(before, place):
            break
    return place, float(rest.norm() / rows.norm().clamp(min=1e-30))


class Exact(NamedTuple):
    """An exact gradient of b texts of T tokens: tensors in the layout's shapes."""

    network: Network
    params: Vector
    tensors: Sequence[Tensor]
    texts: int
    length: int

    def solve(self) -> Tensor | None:
        """[b, T] ids; None: nothing is known."""
        network = self.network
        pool = bag(network, self.tensors, (2 if network.tied else 1) * self.texts * self.length)
        if not len(pool):
            return None
        if self.texts == 1 and network.places is not None and not network.tied:
            number, at = network.places
            table = self.tensors[number].reshape(-1, self.tensors[network.words].shape[1])[at].double()
            place, misfit = in_places(self.tensors[network.words][pool].double(), network.scale * table)
            if misfit < 1e-2:
                return pool[place][None]
        spans = [Span.of(site, self.tensors) for site in network.sites]
        spans = [span for span in spans if not span.full]
        near = self._near(pool, spans)
        ahead = [span for span in spans if span.site.causal and not span.site.local and self._heard(span)]
        if ahead:
            return self._prefixes(pool, near, ahead[:2])
        if self.texts == 1 and near is not None:
            return pool[near.argmin(0)][None]
        return None

    def _heard(self, span: Span) -> bool:
        first = next((site for site in self.network.sites if site.local), span.site)
        return bool((span.site.heard >= first.heard).all())

    def _near(self, pool: Tensor, spans: Sequence[Span]) -> Tensor | None:
        """[C, T] distances of each token at each place from the first layer's span; None: unknown."""
        local = [span for span in spans if span.site.local]
        if not local:
            return None
        size = max(1, _STATES // (self.length * local[0].site.width))
        parts = [
            local[0].distance(self.network.states(self.params, some[:, None].repeat(1, self.length), [local[0].site])[0])
            for some in pool.split(size)
        ]
        return torch.cat(parts)

    def _prefixes(self, pool: Tensor, near: Tensor | None, spans: Sequence[Span]) -> Tensor:
        """[b, T] the texts whose every prefix has states in all spans."""
        heard = int(spans[0].site.heard.sum())
        texts, scores = pool.new_zeros(1, 0), torch.zeros(1)
        for at in range(self.length):
            tokens = pool if near is None else pool[self._likely(near[:, at])]
            longer = torch.cat([texts.repeat_interleave(len(tokens), 0), tokens.repeat(len(texts))[:, None]], 1)
            if at >= heard:
                texts, scores = longer[:: len(tokens)], scores
                continue
            off = self._off(longer, spans)
            kept = self._likely(off, _SPARE * self.texts)
            texts, scores = longer[kept], (scores.repeat_interleave(len(tokens)) + off.log())[kept]
        order = scores.argsort()
        order = order[torch.arange(self.texts) % len(order)]
        return texts[order]

    def _likely(self, off: Tensor, most: int | None = None) -> Tensor:
        """The nearest candidates, by distances [n]."""
        order = off.argsort()[:most]
        nearest = off[order[min(self.texts, len(order)) - 1]]
        return order[off[order] <= torch.maximum(nearest, (nearest * _FAR).sqrt())]

    def _off(self, texts: Tensor, spans: Sequence[Span]) -> Tensor:
        """[n] distances of the last states of prefixes [n, k] from the spans, their geometric mean."""
        count = texts.shape[1]
        ids = texts
        if not self.network.short:
            ids = torch.cat([texts, texts[:, -1:].expand(-1, self.length - count)], 1)
        size = max(1, _STATES // (8 * ids.shape[1] * max(span.site.width for span in spans)))
        rows = []
        for part in ids.split(size):
            states = self.network.states(self.params, part, [span.site for span in spans])
            each = [span.distance(h[:, count - 1]).log() for span, h in zip(spans, states, strict=True)]
            rows.append(torch.stack(each).mean(0))
        return torch.cat(rows).exp()
