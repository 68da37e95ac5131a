"""Audits in words: a bound with its confidence, always beside the federation that it was measured in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from leakgauge.harness.core.result import AuditRecord, ClaimRecord, TrainingRecord
from leakgauge.reports.text.notation import (
    INFINITE,
    NO_PROMISE,
    bound,
    epsilon,
    over_seeds,
    per,
    percent,
    plural,
    short,
)


class Measured(NamedTuple):
    """An audit over the seeds. `epsilon` is a lower bound, `scope` says how sure, `notes` of what and in which
    federation.
    """

    epsilon: str
    scope: str
    notes: tuple[str, ...]


def federation(audit: AuditRecord) -> str:
    """`3 clients, d = 36`, with the rounds where there are several."""
    rounds = f", {plural(audit.rounds, 'round')}" if audit.rounds > 1 else ""
    return f"{plural(audit.clients, 'client')}, d = {audit.dim}{rounds}"


def surety(audit: AuditRecord) -> str:
    """`95 %, n = 1000, server`."""
    return f"{percent(audit.confidence, 0)}, n = {audit.trials}, {audit.threat}"


def refutation(audit: AuditRecord) -> str:
    """What an audit above the claim of its own federation says."""
    return (
        f"audited ≥ {short(audit.epsilon_lower)} {per(audit.unit, audit.delta)} ({surety(audit)}) "
        f"where {_number(audit.claimed)} is claimed ({federation(audit)})"
    )


def of_horizon(trainings: Sequence[TrainingRecord], horizon: str) -> list[AuditRecord]:
    """The audits of the claim for one horizon."""
    return [t.audited for t in trainings if t.audited is not None and t.audited.horizon == horizon]


def measured(audits: Sequence[AuditRecord], claims: Sequence[ClaimRecord]) -> Measured | None:
    """The bound over the seeds, and what is claimed and proved where it was measured if that is not what `claims` say.

    Audits of different units, deltas or adversaries are not merged: the first decides, the others are left to
    `details`.
    """
    if not audits:
        return None
    first = audits[0]
    same = [one for one in audits if _kind(one) == _kind(first)]
    notes = [f"{per(first.unit, first.delta)}, {first.horizon}", f"{federation(first)}{_elsewhere(first, claims)}"]
    if len(same) < len(claims):
        notes.append(f"in {len(same)} of {plural(len(claims), 'seed')}")
    return Measured(f"≥ {over_seeds([one.epsilon_lower for one in same])}", surety(first), tuple(notes))


def details(trainings: Sequence[TrainingRecord]) -> tuple[str, ...]:
    """What was audited, where and how; and whether a bound is above what is proved."""
    alike: dict[tuple[object, ...], list[AuditRecord]] = {}
    for training in trainings:
        if training.audited is not None:
            alike.setdefault(_kind(training.audited), []).append(training.audited)
    return tuple(text for audits in alike.values() for text in _told(audits))


def _told(audits: Sequence[AuditRecord]) -> list[str]:
    """Audits that differ in their seed only."""
    first = audits[0]
    where = f"{plural(first.clients, 'client')} with {plural(first.samples, 'record')} each and d = {first.dim}"
    ways = dict.fromkeys(f"{one.pair} (told apart by {one.distinguisher})" for one in audits)
    method = first.method
    if method != "Clopper-Pearson":
        method += f"; whatever the mechanism is, ≥ {over_seeds([one.any_mechanism for one in audits])}"
    span = f"a {first.horizon} of {plural(first.rounds, 'round')}" if first.rounds > 1 else first.horizon
    claimed = "nothing is claimed" if first.claimed is None else f"{short(first.claimed)} is claimed"
    found = [
        f"Audited for {span} in a small federation of {where}, where {claimed} and {_number(first.proved)} proved "
        f"{per(first.unit, first.delta)}. "
        f"Neighbors: {first.relation}, {' / '.join(ways)}. Bound: {method}."
    ]
    above = sum(one.contradicts for one in audits)
    if above:
        found.append(
            f"In {above} of {plural(len(audits), 'audit')} the bound is above what is proved there: the code does not "
            "draw from the law of the proof, or this is the audit's error."
        )
    return found


def _elsewhere(audit: AuditRecord, claims: Sequence[ClaimRecord]) -> str:
    """Claimed and proved in the small federation, where these differ from those of the training."""
    here = epsilon(claims), bound([claim.proved for claim in claims])
    there = NO_PROMISE if audit.claimed is None else short(audit.claimed), _number(audit.proved)
    if here == there and all((claim.unit, claim.delta) == (audit.unit, audit.delta) for claim in claims):
        return ""
    return f": there claimed {_number(audit.claimed)}, proved {_number(audit.proved)}"


def _kind(audit: AuditRecord) -> tuple[object, ...]:
    """What must be the same for two bounds to make a range."""
    setting = audit.rounds, audit.clients, audit.dim, audit.samples, audit.claimed, audit.proved
    return audit.unit, audit.delta, audit.relation, audit.threat, audit.confidence, audit.trials, setting


def _number(value: float | None) -> str:
    """An epsilon; None is infinity."""
    return INFINITE if value is None else short(value)
