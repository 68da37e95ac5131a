"""Lineup: finds out which of k candidate records is behind a message, by the defense's own likelihood."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from leakgauge.attacks._engine.bottleneck import spanned
from leakgauge.attacks._engine.imitation import imitated
from leakgauge.attacks._engine.others import Blur
from leakgauge.attacks._engine.simulate import client_updates, one_step, plan_of
from leakgauge.harness.core.contract import (
    Attack,
    Candidates,
    Examples,
    Link,
    Message,
    Named,
    Observation,
    ObservedRound,
    log_likelihoods,
)
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.rng import Key, integers, subset
from leakgauge.harness.federation.round import Round
from leakgauge.harness.learn.batch import LocalPlan
from leakgauge.harness.learn.gradients import targets_of

_ENTRIES = 2**23  # the most numbers of candidates' updates that are held at once

_OTHERS = 300  # the most records by which the spread of unknown others is measured

_IMITATED = 4  # messages of the adversary's own, by which the error of the defense's estimate is measured

_ALL = 0.98  # the share of coordinates that differ from zero, below which a defense leaves coordinates out

_SIMULATED = 30  # batches of other records that are simulated, if their effects on an update do not add up

_FITS = 2  # messages of the adversary's own that each of the two likeliest candidates is compared with


@dataclass(frozen=True)
class Lineup(Attack):
    """Compares the message with what it would be for each candidate, and names the likeliest one.

    A candidate's update takes one gradient for each local step, and no search; the model may be any that trains. If
    the records beside the one in question are known, or there are none, the scores are log likelihoods of the whole
    message: no test of the same candidates is better on average (Neyman and Pearson 1933). The log likelihoods of
    several rounds add up.

    Otherwise the other records are unknown, apart from their labels, which their own candidates show. The message's
    estimate then counts as normal: its mean has the other records at the mean of their labels, its covariance is that
    of other records of these labels plus the error of the defense, both measured on the adversary's own data and
    messages. The same score serves a defense without a likelihood. Behind a bottleneck with noise, records of one step
    are told by the span of the encoder's gradient (`bottleneck.spanned`), if they are fewer than its inputs.

    Must know: the messages of each victim, the models of their rounds, the defense with its parameters, data of the
    same kind, and the candidates (`lineup`), which a study grants; with `mates`, also the other records.

    Cannot: tell near-copies of a record apart once the noise is larger than what they differ by; say that the record
    is among the candidates, for which `references` are compared. The order in which a client takes its records is
    unknown; the order of the candidate's batch is used.

    Args:
        references: records of the same label, no candidates, whose likelihoods show whether any candidate stands out.

    Raises:
        ValueError: references < 0.

    Source: the likelihood-ratio test of Balle, Cherubin, Hayes 2022 ("Reconstructing training data with informed
        adversaries", sec. 2), with real records as the prior. Whitening by the covariance of other records is ours.
    """

    kind: ClassVar[str] = "lineup"
    aware: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"messages", "models", "auxiliary", "lineup"})

    references: int = 28

    def __post_init__(self) -> None:
        if self.references < 0:
            raise ValueError(f"expected references >= 0, got {self.references}")

    def at_once(self, dim: int) -> int:
        """A few victims, so that a long lineup can be split."""
        return 16

    def run(self, seen: Observation, key: Key) -> Named:
        """The candidates' scores; the key draws references and the adversary's own messages."""
        seen = seen.placed()
        assert seen.lineups is not None
        assert seen.messages is not None
        rounds = [
            _Round(seen, observed, key.child("others", number)) for number, observed in enumerate(seen.observed_rounds)
        ]
        records = list[tuple[Candidates, ...]]()
        for victim, (lineups, message) in enumerate(zip(seen.lineups, seen.messages, strict=True)):
            mates = None if seen.mates is None else seen.mates[victim]
            each = list[Candidates]()
            for place, lineup in enumerate(lineups):
                tried, k = (
                    self._tried(seen, lineup, key.child("references", message.sender.number, place)),
                    len(lineup.y),
                )
                others = [other.y[0] for number, other in enumerate(lineups) if number != place]
                labels = torch.stack(others) if others else lineup.y[:0]
                scores = torch.stack([round_.scores(victim, tried, mates, labels) for round_ in rounds]).sum(0)
                fits = torch.full((k,), math.nan, dtype=torch.float64)
                for number in scores[:k].topk(min(2, k)).indices.tolist() if all(r.exact for r in rounds) else ():
                    own = Examples(lineup.x[number : number + 1], lineup.y[number : number + 1])
                    fits[number] = scores[number] - sum(round_.usual(victim, own, mates) for round_ in rounds)
                each.append(Candidates(scores[:k], scores[k:], fits))
            records.append(tuple(each))
        return Named(tuple(records), all(round_.exact for round_ in rounds))

    def _tried(self, seen: Observation, lineup: Examples, key: Key) -> Examples:
        """The candidates, and then the references: records of their label from the adversary's own data."""
        assert seen.auxiliary is not None
        labels, (least, most) = seen.auxiliary.y, lineup.y.aminmax(dim=0)  # numbers of a regression differ
        alike = torch.nonzero(((labels >= least) & (labels <= most)).reshape(len(labels), -1).all(1))[:, 0]
        chosen = alike[torch.from_numpy(subset(key, len(alike), min(self.references, len(alike))))]
        return Examples(*(torch.cat([own, other[chosen]]) for own, other in zip(lineup, seen.auxiliary, strict=True)))


class _Spread(NamedTuple):
    """Shares [n, d] of single records in an update: their means by label, and deviations `rows` [n, d] from these."""

    labels: Tensor
    means: Tensor
    rows: Tensor

    @classmethod
    def of(cls, shares: Tensor, labels: Tensor) -> _Spread:
        """The spread of these shares; all labels count as one for a regression."""
        alike = torch.zeros(len(labels)) if labels.is_floating_point() else labels
        known, place = torch.unique(alike, return_inverse=True)
        means = torch.zeros(len(known), shares.shape[1], dtype=shares.dtype).index_add_(0, place, shares)
        means /= place.bincount()[:, None]
        return cls(known, means, shares - means[place])

    def mean(self, label: Tensor) -> Tensor:
        """[d] the mean share of a record of this label; of all labels, if the label is not among them."""
        at: list[int] = torch.nonzero(self.labels == label)[:, 0].tolist() if label.ndim == 0 else []
        return self.means[at[0]] if len(at) else self.means.mean(0)


class _Errors(NamedTuple):
    """The effect of a defense on an update u: shrink * u plus errors of this variance; omits: it leaves numbers out."""

    shrink: float
    variance: float
    omits: bool

    @classmethod
    def of(cls, updates: Tensor, estimates: Tensor) -> _Errors:
        """The effect, from updates and their estimates [n, d]."""
        sent = (estimates != 0).double()
        omits = bool(sent.mean() < _ALL)
        sent = sent if omits else torch.ones_like(sent)
        shrink = float((sent * estimates * updates).sum() / (sent * updates.square()).sum().clamp(min=1e-300)) or 1.0
        return cls(shrink, float((sent * (estimates - shrink * updates).square()).sum() / sent.sum()), omits)


class _Round:
    """One attacked round, and what the adversary measures at its model.

    Attributes:
        exact: whether all scores so far are log likelihoods of whole messages.
    """

    def __init__(self, seen: Observation, observed: ObservedRound, key: Key) -> None:
        self.seen, self.observed, self.key, self.exact = seen, observed, key, True
        self.server = Round(seen.defense, seen.setting, observed.model.state, observed.model.round)
        layout = seen.setting.layout
        self._before = layout.dim if layout.encoder is None else sum(layout.sizes[: layout.encoder])
        self._measured: dict[tuple[LocalPlan, int], _Spread] = {}
        self._of_errors: dict[tuple[LocalPlan, int, int], _Errors] = {}
        self._blur: tuple[object, Blur] | None = None  # the last one, and what it depends on

    def scores(self, victim: int, tried: Examples, mates: Examples | None, labels: Tensor) -> Tensor:
        """[n] log likelihoods of the message, up to a constant, for each tried record in the place in question.

        Args:
            mates: the other records; None: they are unknown, or there are none.
            labels: [images - 1] of the other records.
        """
        message = self.observed.messages[victim]
        plan = plan_of(self.seen.setting, self.observed.lr, message.steps, self.seen.defense)
        images = message.images
        if mates is not None or images == 1:
            # the order in which steps take the records is the client's own
            ordered = plan.gradient or plan.steps == 1 or images == 1 or plan.batch == 0
            try:
                scores = self._known(message, plan, tried, mates)
                self.exact = self.exact and ordered
                return scores
            except NoLikelihood:
                pass
        self.exact = False
        return self._unknown(message, plan, tried, mates, labels)

    def _updates(self, records: Examples, mates: Examples | None, plan: LocalPlan) -> Iterator[Tensor]:
        """The updates [m, d] of clients that have one of these records and all of `mates`, some at a time."""
        y = targets_of(self.seen.task, records.y, self.observed.model.params.dtype)
        size = max(1, _ENTRIES // (self.seen.setting.dim * (1 + (0 if mates is None else len(mates.y)))))
        for x, labels in zip(torch.split(records.x, size), torch.split(y, size), strict=True):
            x, labels = x[:, None], labels[:, None]
            if mates is not None:
                known = targets_of(self.seen.task, mates.y, y.dtype)
                both = ((x, mates.x), (labels, known))
                x, labels = (torch.cat([own, rest.expand(len(own), *rest.shape)], 1) for own, rest in both)
            with torch.no_grad():
                yield client_updates(self.seen.task, self.observed.model.params, x, labels, plan)

    def _known(self, message: Message, plan: LocalPlan, tried: Examples, mates: Examples | None) -> Tensor:
        """The defense's own log likelihoods; in a sum, the record in question is the first user's."""
        link = Link(self.seen.setting, message.sender, message.shared)
        together = max(1, min(len(tried.y), _ENTRIES // (self.seen.setting.dim * message.users)))
        score = log_likelihoods(self.seen.defense, self.observed.model.state, message.wire, link, together)
        return torch.cat([score(updates) for updates in self._sums(message, plan, tried, mates)])

    def _sums(self, message: Message, plan: LocalPlan, tried: Examples, mates: Examples | None) -> Iterator[Tensor]:
        """Updates [m, d], or [m, users, d] for a sum, for each tried record beside the known others."""
        own = message.images // message.users
        if mates is None or message.users == 1:
            yield from self._updates(tried, mates, plan)
            return
        near, far = (Examples(*(part[rows] for part in mates)) for rows in (slice(own - 1), slice(own - 1, None)))
        others = self._sent(far, own, plan)
        for updates in self._updates(tried, near if own > 1 else None, plan):
            yield torch.cat([updates[:, None], others.expand(len(updates), *others.shape)], 1)

    def _unknown(
        self, message: Message, plan: LocalPlan, tried: Examples, mates: Examples | None, labels: Tensor
    ) -> Tensor:
        """Log densities of the estimate of the whole message, which is normal: other records and errors are noise."""
        own, estimate = message.images // message.users, self.server.read(message).double()
        if message.users == 1 and one_step(plan, own):
            shown = spanned(self.seen.task, self.observed.model.params, estimate, own)
            if shown is not None:
                return shown(tried.x).cpu()
        center, share, rows, mixed = torch.zeros_like(estimate), 1.0, estimate.new_zeros(0, len(estimate)), None
        if mates is not None or message.images == 1:
            updates = self._sums(message, plan, tried, mates)
        elif self._adds_up(plan, own):
            spread, share, mixed = self._spread(plan, own), 1 / own, (plan, message.images, message.users)
            center = torch.stack([spread.mean(label) for label in labels]).sum(0)
            rows, updates = math.sqrt(len(labels)) * spread.rows, self._updates(tried, None, plan)
        else:
            common = self._drawn(self.key.child("common", message.sender.number), labels[: own - 1])
            moved = self._moved(message, plan, Examples(tried.x[:1], tried.y[:1]), common, labels)
            center, updates = moved.mean(0), self._updates(tried, common, plan)
            rows = moved - center
        errors = self._errors(message, plan)
        # coordinates that the defense left out show nothing, and those behind a bottleneck's noise little
        sent = estimate != 0 if errors.omits else torch.ones_like(estimate, dtype=torch.bool)
        sent[self._before :] = False
        noise = torch.full((int(sent.sum()),), errors.variance / errors.shrink**2, dtype=torch.float64)
        alike = None if mixed is None else (*mixed, sent.numpy().tobytes())
        if alike is None or self._blur is None or self._blur[0] != alike:
            self._blur = alike, Blur.of(rows[:, sent], noise)
        blur = self._blur[1]
        target = (estimate / errors.shrink - center)[sent]
        sums = (each.double().cpu().reshape(len(each), -1, len(estimate)).sum(1)[:, sent] for each in updates)
        return torch.cat([blur.log_density(target - share * each) for each in sums])

    def usual(self, victim: int, record: Examples, mates: Examples | None) -> float:
        """The mean log likelihood of messages of the adversary's own that carry this record, given its update."""
        message = self.observed.messages[victim]
        plan = plan_of(self.seen.setting, self.observed.lr, message.steps, self.seen.defense)
        (update,) = self._sums(message, plan, record, mates)
        values = []
        for number in range(_FITS):
            key = self.key.child("usual", message.sender.number, number)
            made = self._made(message, update.view(message.users, -1).cpu(), key)
            values.append(float(self._known(made, plan, record, mates)))
        return sum(values) / _FITS

    def _made(self, message: Message, updates: Tensor, key: Key) -> Message:
        """A message of the adversary's own from updates [users, d], made like this one."""
        finite = updates.float().nan_to_num(0.0, 0.0, 0.0)  # if a model diverged: no client sends this
        return imitated(self.seen, self.observed._replace(messages=(message,)), finite[None], [key]).messages[0]

    def _adds_up(self, plan: LocalPlan, own: int) -> bool:
        """Whether an update is the mean of its records' updates."""
        return one_step(plan, own) and self.seen.task.separable

    def _drawn(self, key: Key, labels: Tensor) -> Examples:
        """Records of the adversary's own data with these labels, or with the nearest ones, with replacement."""
        own = self.seen.auxiliary
        assert own is not None
        rows = []
        for number, label in enumerate(labels):
            off = (own.y - label).abs().reshape(len(own.y), -1).sum(1)
            alike = torch.nonzero(off == off.min())[:, 0]
            rows.append(int(alike[int(integers(key.child(number), 1, len(alike))[0])]))
        return Examples(own.x[rows], own.y[rows])

    def _spread(self, plan: LocalPlan, own: int) -> _Spread:
        """Mean and spread of one of `own` records' share of an update, if shares add up."""
        if (plan, own) not in self._measured:
            assert self.seen.auxiliary is not None
            count = max(2, min(_OTHERS, 4 * _ENTRIES // self.seen.setting.dim))
            some = Examples(*(part[:count] for part in self.seen.auxiliary))
            shares = torch.cat(list(self._updates(some, None, plan))).double().cpu() / own
            self._measured[plan, own] = _Spread.of(shares, some.y)
        return self._measured[plan, own]

    def _moved(self, message: Message, plan: LocalPlan, record: Examples, common: Examples, labels: Tensor) -> Tensor:
        """[r, d] by how much the sum moves if others take the place of `common` beside one record, by simulation."""
        own = message.images // message.users
        near, far = labels[: own - 1], labels[own - 1 :]
        (start,) = self._updates(record, common, plan)
        moved = list[Tensor]()
        for number in range(max(3, _SIMULATED // message.users)):
            key = self.key.child("simulated", message.sender.number, number)
            (drawn,) = self._updates(record, self._drawn(key.child("near"), near), plan)
            moved.append((drawn - start)[0].double().cpu())
            if len(far):
                moved[-1] += self._sent(self._drawn(key.child("far"), far), own, plan).double().cpu().sum(0)
        return torch.stack(moved)

    def _errors(self, message: Message, plan: LocalPlan) -> _Errors:
        """What the defense does to an update, by messages of the adversary's own, which are made like this one."""
        own, place = message.images // message.users, (plan, message.images, message.users)
        if place in self._of_errors:
            return self._of_errors[place]
        auxiliary, updates, estimates = self.seen.auxiliary, [], []
        assert auxiliary is not None
        for number in range(_IMITATED):
            key = self.key.child("imitated", number)
            rows = torch.from_numpy(integers(key.child("rows"), message.images, len(auxiliary.y)))
            sent = self._sent(Examples(auxiliary.x[rows], auxiliary.y[rows]), own, plan).cpu()
            updates.append(sent.double().sum(0))
            estimates.append(self.server.read(self._made(message, sent, key)).double())
        pair = (torch.stack(rows)[:, : self._before] for rows in (updates, estimates))
        self._of_errors[place] = _Errors.of(*pair)
        return self._of_errors[place]

    def _sent(self, records: Examples, own: int, plan: LocalPlan) -> Tensor:
        """[users, d] the updates of users that have `own` of these records each, in order."""
        x = records.x.view(-1, own, *records.x.shape[1:])
        y = targets_of(self.seen.task, records.y, self.observed.model.params.dtype)
        with torch.no_grad():
            rows = [
                client_updates(self.seen.task, self.observed.model.params, *each, plan)
                for each in zip(torch.split(x, 1), torch.split(y.view(len(x), own, *y.shape[1:]), 1), strict=True)
            ]
        return torch.cat(rows)
