"""Texts behind an exact gradient: bags from rows, places by equations, and spans of weight gradients.

Source: Petrov et al. 2024 (DAGER) for the check that a hidden state lies in the row space of a weight's gradient.
Differs: directions count by their singular value, not by a rank; all layers whose states depend on the tokens before
are used, not the second block alone; thresholds follow from the number of texts; texts of encoders are searched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from leakgauge.attacks._text.chances import Chances
from leakgauge.attacks._text.network import Network, Site
from leakgauge.attacks._text.search import Found, search
from leakgauge.harness.core import rng
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.gradients import gradients, targets_of

_ROUNDING = 2e-7  # of a row space: singular values below this share of the largest one are rounding
_LEAST = 64  # tokens that are tried where the words' tensor is also the output layer
_QUIET = 8  # directions that the rows of absent tokens have in common if the words' tensor is also the output layer
_FAR = 0.05  # about the distance of a state of another text; the bound is the geometric mean with the b-th nearest
_MISFIT = 1e-2  # of the equations of one token a place, up to which they hold
_STARTS = 6  # searches for a text of a batch
_ABSENT = 30.0  # nats against tokens that do not occur
_TOLD, _SHARE = 2.0, 0.02  # nats a factor of e in a token's share of a place, and the least share
_ZERO = 1e-6  # of a singular value of tokens' slopes
_TURNS, _SMALL = 3, 1e-12  # changes of a text's token, and the least gain, relative to the square of a change
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
        strength = squares / (squares + (_ROUNDING * values[0]).square().clamp(min=1e-300))
        return cls(site, right.float(), strength.float())

    @property
    def full(self) -> bool:
        """Whether it says nothing, because it has all directions."""
        return float(self.strength.sum()) > self.directions.shape[1] - 1

    def distance(self, states: Tensor) -> Tensor:
        """[...] relative distances of hidden states [..., width]."""
        unit = states / states.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        inside = unit @ self.directions.T
        off = unit - (inside * self.strength) @ self.directions
        distances: Tensor = off.norm(dim=-1).clamp(min=1e-7)
        return distances


def bag(network: Network, tensors: Sequence[Tensor], most: int) -> Tensor:
    """The ids of tokens that occur, at most `most`, by the rows of the words' gradient; the strongest first."""
    rows = tensors[network.words].double()
    norms = rows.norm(dim=1)
    if network.tied:
        quiet = rows[norms <= norms.median()]
        _, _, right = torch.linalg.svd(quiet, full_matrices=False)
        common = right[: min(_QUIET, rows.shape[1] // 4)]
        norms = (rows - rows @ common.T @ common).norm(dim=1)
    count = most if network.tied else min(most, int((norms > _ROUNDING * norms.max()).sum()))
    found: Tensor = norms.topk(min(count, len(norms))).indices
    return found


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
    """An exact gradient [d] of b texts of T tokens with labels y [b]."""

    network: Network
    params: Vector
    gradient: Vector
    y: Tensor
    length: int

    @property
    def tensors(self) -> list[Tensor]:
        """The gradient in the layout's shapes."""
        return self.network.task.layout.split(self.gradient)

    @property
    def texts(self) -> int:
        """b."""
        return len(self.y)

    def solve(self, chances: Chances, sweeps: int, key: Key) -> Tensor | None:
        """[b, T] ids; None: nothing is known. Chances and sweeps: of the search for texts that are read both ways."""
        network = self.network
        pool = bag(
            network,
            self.tensors,
            max(_LEAST, 2 * self.texts * self.length) if network.tied else self.texts * self.length,
        )
        if not len(pool):
            return None
        first = next((site for site in network.sites if site.local), None)
        heard = torch.ones(self.length, dtype=torch.bool) if first is None else first.heard
        found = placed = None
        if self.texts == 1 and network.places is not None and not network.tied:
            placed, misfit = self._placed(pool)
            found = placed if misfit < _MISFIT else None
        if found is None:
            local = None if first is None else Span.of(first, self.tensors)
            sites = [site for site in network.sites if not site.local and 2 * site.heard.sum() > len(heard)]
            sites.sort(key=lambda site: -int(site.heard.sum()))
            rest = [span for span in (Span.of(site, self.tensors) for site in sites) if not span.full]
            ahead = [span for span in rest if span.site.causal]
            near = None if local is None or local.full else self._near(pool, local)
            if ahead:
                heard = heard & ahead[0].site.heard
                found = self._prefixes(pool, near, ahead[:2], heard)
            elif self.texts == 1 and near is not None and float(near.std(1).max()) > 0:
                found = pool[near.argmin(0)][None]
            elif rest:
                found = self._peeled(pool, rest[:2], chances, sweeps, key)
        found = placed if found is None else found
        return found if found is None or bool(heard.all()) else self._unheard(found, heard)

    def _placed(self, pool: Tensor) -> tuple[Tensor, float]:
        """[1, T] one token a place, and the misfit of the equations."""
        place, misfit = in_places(*self._rows(pool))
        return pool[place][None], misfit

    def _near(self, pool: Tensor, span: Span) -> Tensor:
        """[C, T] distances of each token at each place from the first layer's span."""
        size = max(1, _STATES // (self.length * span.directions.shape[1]))
        every = [some[:, None].repeat(1, self.length) for some in torch.split(pool, size)]
        return torch.cat([span.distance(self.network.states(self.params, x, [span.site])[0]) for x in every])

    def _prefixes(self, pool: Tensor, near: Tensor | None, spans: Sequence[Span], heard: Tensor) -> Tensor:
        """[b, T] the texts whose every prefix has states in all spans."""
        texts, scores = pool.new_zeros(1, 0), torch.zeros(1)
        for at in range(self.length):
            if not heard[at]:
                texts = torch.cat([texts, pool[:1].expand(len(texts), 1)], 1)
                continue
            tokens = pool if near is None else pool[self._likely(near[:, at])]
            longer = torch.cat([texts.repeat_interleave(len(tokens), 0), tokens.repeat(len(texts))[:, None]], 1)
            off = self._off(longer, spans)[:, -1]
            kept = self._likely(off.exp(), _SPARE * self.texts)
            texts, scores = longer[kept], (scores.repeat_interleave(len(tokens)) + off)[kept]
        order = scores.argsort()
        return texts[order[torch.arange(self.texts) % len(order)]]

    def _likely(self, off: Tensor, most: int | None = None) -> Tensor:
        """The nearest candidates, by distances [n]."""
        order = off.argsort()[:most]
        nearest = off[order[min(self.texts, len(order)) - 1]]
        return order[off[order] <= torch.maximum(nearest, (nearest * _FAR).sqrt())]

    def _off(self, texts: Tensor, spans: Sequence[Span]) -> Tensor:
        """[n, k] log distances of the states of texts or prefixes [n, k] from the spans, their mean."""
        count, ids = texts.shape[1], texts
        if not self.network.short and count < self.length:
            ids = torch.cat([texts, texts[:, -1:].expand(-1, self.length - count)], 1)
        rows = []
        for part in torch.split(ids, max(1, _STATES // (8 * ids.shape[1] * max(s.directions.shape[1] for s in spans)))):
            states = self.network.states(self.params, part, [span.site for span in spans])
            each = [span.distance(h[:, :count]).log() for span, h in zip(spans, states, strict=True)]
            rows.append(torch.stack(each).mean(0))
        return torch.cat(rows)

    def _peeled(self, pool: Tensor, spans: Sequence[Span], chances: Chances, sweeps: int, key: Key) -> Tensor:
        """[b, T] a text in the spans at the place of its label, and those behind the gradient without this text."""
        found = self._whole(pool, spans, chances, sweeps, key)
        if self.texts == 1 or found.energy >= self._enough:
            return found.x.repeat(self.texts, 1)
        task, shares = self.network.task, self.network.task.weights(self.y).to(self.gradient)
        shares = shares / shares.sum()
        tried = [i for i, y in enumerate(self.y) if not bool((self.y[:i] == y).any())]
        y = targets_of(task, self.y[tried], torch.float32)[:, None]
        with torch.no_grad():
            own = gradients(task, self.params, found.x.float().repeat(len(tried), 1, 1), y) * shares[tried, None]
        rest = self.gradient - own
        # with the right label, nothing is left in the rows of the text's own words
        left = [task.layout.split(each)[self.network.words][found.x[0]].norm() for each in rest]
        best = int(torch.stack(left).argmin())
        at = tried[best]
        others = self._replace(gradient=rest[best] / (1 - shares[at]), y=torch.cat([self.y[:at], self.y[at + 1 :]]))
        texts = others.solve(chances, sweeps, key.child("rest"))
        texts = found.x.repeat(len(others.y), 1) if texts is None else texts
        return torch.cat([texts[:at], found.x, texts[at:]])

    @property
    def _enough(self) -> float:
        """The sum of a text's log distances from spans, below which it is taken as right."""
        return 2 * self.length * math.log(_FAR)

    def _whole(self, pool: Tensor, spans: Sequence[Span], chances: Chances, sweeps: int, key: Key) -> Found:
        """The text all of whose states are nearest to the spans, by searches from different tokens."""
        words = torch.full((len(chances.token), self.length), -_ABSENT, dtype=torch.float64)
        words[pool] = _TOLD * self._shares(pool).clamp(min=_SHARE).log()
        found = list[Found]()

        def energy(x: Tensor) -> Tensor:
            return self._off(x[:, 0], spans).sum(1).double()

        for number in range(_STARTS):
            own = key.child(number)
            draws = rng.uniform(own.child("start"), (len(pool), self.length), dtype=torch.float64)
            start = pool[(words[pool] - (-draws.log()).log()).argmax(0)][None]
            found.append(search(energy, chances, words, start, sweeps, own, self._enough))
            if found[-1].energy < self._enough:
                break
        return min(found, key=lambda each: each.energy)

    def _shares(self, pool: Tensor) -> Tensor:
        """[C, T] about 1 for a token that is at a place and nowhere else, 0 for one that is not there.

        A token's slopes are the sum over its occurrences, a place's slopes the sum over its tokens: these are solved
        for how much of each token's slopes each place has. Equal for all tokens where places have no rows.
        """
        network = self.network
        if network.places is None or network.tied:
            return torch.ones(len(pool), self.length, dtype=torch.float64)
        rows, places = self._rows(pool)
        shares: Tensor = (places @ torch.linalg.pinv(rows, rtol=_ZERO)).T
        return shares

    def _rows(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        """The slopes [C, d] of tokens and [T, d] of places, which there are."""
        rows = self.tensors[self.network.words][pool].double()
        assert self.network.places is not None
        number, at = self.network.places
        return rows, self.network.scale * self.tensors[number].reshape(-1, rows.shape[1])[at].double()

    def _unheard(self, texts: Tensor, heard: Tensor) -> Tensor:
        """The texts with the tokens that are predicted but not read, by the rows of tensors over the vocabulary."""
        task, size, b = self.network.task, len(self.tensors[self.network.words]), self.texts
        over = [at for at, shape in enumerate(task.layout.shapes) if shape[0] == size]

        def rows(gradients: Tensor, at: Tensor | slice) -> Tensor:
            tensors = task.layout.split(gradients)
            parts = [tensors[n][:, at] for n in over]
            return torch.cat([part.reshape(*part.shape[:2], -1) for part in parts], 2)

        def records(x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                return gradients(task, self.params, x.float()[:, None], targets_of(task, y, torch.float32)[:, None])

        for place in (~heard).nonzero()[:, 0].tolist():
            old = records(texts, self.y)
            rest = rows((b * self.gradient - old.sum(0))[None], slice(None))[0]
            tokens = torch.unique(torch.cat([rest.norm(dim=1).topk(min(size, 4 * b + 4)).indices, texts[:, place]]))
            moves = list[Tensor]()
            for text, label, own in zip(texts, self.y, old, strict=True):
                tried = text.repeat(len(tokens), 1)
                tried[:, place] = tokens
                moves.append(rows(records(tried, label.expand(len(tokens))) - own, tokens).flatten(1))
            start = (tokens == texts[:, place, None]).int().argmax(1)
            texts[:, place] = tokens[_chosen(torch.stack(moves).double(), rest[tokens].flatten().double(), start)]
        return texts


def _chosen(moves: Tensor, goal: Tensor, start: Tensor) -> Tensor:
    """[b] which of k vectors [b, k, D] of each text to take so that their sum is nearest to the goal [D].

    From `start` [b], two texts change at a time, as long as the sum comes nearer.
    """
    (b, k, _), every = moves.shape, moves.flatten(0, 1)
    gram, toward, first = every @ every.T, every @ goal, torch.arange(b) * k
    taken, same = first + start, torch.eye(b).repeat_interleave(k, 0).repeat_interleave(k, 1).bool()
    for _ in range(_TURNS * b):
        own = taken.repeat_interleave(k)
        between = gram - gram[own] - gram[:, own] + gram[own][:, own]
        left = toward - gram[:, taken].sum(1)
        gain = between.diagonal() - 2 * (left - left[own])
        # a text that changes with itself changes alone
        both = torch.where(same, gain[:, None].expand(-1, b * k), gain[:, None] + gain + 2 * between)
        best = int(both.argmin())
        if not float(both.flatten()[best]) < -_SMALL * float(gram.diagonal().mean()):
            break
        one, other = divmod(best, b * k)
        taken[other // k] = other
        taken[one // k] = one
    return taken - first
