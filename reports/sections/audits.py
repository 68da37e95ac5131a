"""Audits in words: a lower bound with its confidence, always next to the federation in which it was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import assumption, counted
from leakgauge.harness.core.result import AuditRecord, TrainingRecord
from leakgauge.harness.core.stats import STRICT
from leakgauge.reports.text.notation import number, over_seeds, per, percent, short


class Amount(NamedTuple):
    """An epsilon over the seeds: `scope` is its unit and delta, or how it was audited; `notes`: method, adversaries."""

    epsilon: str
    scope: str
    finite: bool
    notes: tuple[str, ...]


def _federation(audit: AuditRecord) -> str:
    """`3 clients, d = 36`, with the number of rounds if there are several."""
    rounds = f", {counted(audit.rounds, 'round')}" if audit.rounds > 1 else ""
    return f"{counted(audit.clients, 'client')}, d = {audit.dim}{rounds}"


def _scope(audit: AuditRecord) -> str:
    """`95 %, n = 1000, server`."""
    return f"{percent(audit.confidence, 0)}, n = {audit.trials}, {audit.threat}"


def stated(audit: AuditRecord) -> str:
    """A bound in one line, with the claim and the proof of its own federation, horizon and adversary."""
    known = f"claimed {number(audit.claimed)}, proved {number(audit.proved)}"
    where = f"{per(audit.unit, audit.delta)}, {audit.horizon}, {_federation(audit)}"
    return f"audited ≥ {short(audit.epsilon_lower)} ({_scope(audit)}), {known} {where}"


def alike(trainings: Sequence[TrainingRecord]) -> Iterable[list[AuditRecord]]:
    """The audits by kind: those that differ in more than their seed are never merged."""
    return gathered(
        (_kind(training.audited), training.audited) for training in trainings if training.audited is not None
    ).values()


def measured(audits: Sequence[AuditRecord], seeds: int) -> Amount:
    """The bound of audits that differ only in their seed, of this number of seeds."""
    first = audits[0]
    notes = [f"{per(first.unit, first.delta)}, {first.horizon}", _federation(first)]
    if len(audits) < seeds:
        notes.append(f"in {len(audits)} of {counted(seeds, 'seed')}")
    return Amount(f"≥ {over_seeds([audit.epsilon_lower for audit in audits])}", _scope(first), True, tuple(notes))


def details(trainings: Sequence[TrainingRecord]) -> tuple[str, ...]:
    """How each kind of audit was made, what its bound assumes, and its verdicts on the code."""
    return tuple(text for audits in alike(trainings) for text in _described(audits))


def _described(audits: Sequence[AuditRecord]) -> list[str]:
    first = audits[0]
    span = f"a {first.horizon} of {counted(first.rounds, 'round')}" if first.rounds > 1 else first.horizon
    where = f"{counted(first.clients, 'client')} with {counted(first.samples, 'record')} each, d = {first.dim}"
    pairs = dict.fromkeys(f"{audit.pair} (distinguisher: {audit.distinguisher})" for audit in audits)
    method = f"{first.method}, assuming {assumption(first.method)}"
    if first.method != "Clopper-Pearson":
        least = over_seeds([audit.any_mechanism for audit in audits])
        method += f"; ≥ {least} without assumptions about the mechanism"
    sentences = [
        f"Audited over {span} in a separate small federation: {where}. Neighbors: {first.relation}, "
        f"{' / '.join(pairs)}. Bound: {method}."
    ]
    ceilings = [audit.ceiling for audit in audits if audit.ceiling is not None]
    if ceilings:
        sure = percent(max(first.confidence, STRICT))
        sentences[0] += f" At {sure}, as a refutation needs: ≥ {over_seeds([audit.strict for audit in audits])}; "
        sentences[0] += f"these trials cannot refute an epsilon above {over_seeds(ceilings)}."
    sentences += _assuming(audits)
    verdicts = Counter(f"{audit.code}: {audit.seen}." for audit in audits)
    shares = (f" In {n} of {len(audits)} audits." if n < len(audits) else "" for n in verdicts.values())
    return sentences + [f"Code {text}{share}" for text, share in zip(verdicts, shares, strict=True)]


def _assuming(audits: Sequence[AuditRecord]) -> list[str]:
    """Sentences about bounds that assume a part of the distribution, over the seeds, by unit."""
    alike = gathered(((bound.assumes, bound.unit), bound) for audit in audits for bound in audit.assuming)
    return [
        f"Assuming {assumes}, per {unit}: ≥ {over_seeds([bound.epsilon_lower for bound in bounds])}; proved "
        f"{short(bounds[0].proved)}. {counted(bounds[0].trials, 'message')} with each input."
        for (assumes, unit), bounds in alike.items()
    ]


def _kind(audit: AuditRecord) -> tuple[object, ...]:
    """The fields that two audits must share to form a range."""
    setting = audit.rounds, audit.clients, audit.dim, audit.samples, audit.claimed, audit.proved
    return audit.horizon, audit.unit, audit.delta, audit.relation, audit.threat, audit.confidence, audit.trials, setting
