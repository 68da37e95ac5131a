"""All results as CSV that a spreadsheet opens without running anything."""

from __future__ import annotations

import base64
import csv
import io
import json

from harness.cell import Cell, Scalar
from harness.result import AuditRecord, ClaimRecord, ProofRecord, to_data
from reports.checked import verdict_of
from reports.pool import last_accuracy
from reports.select import Analysis

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_CELL = ("cell", "status", "data", "model", "algorithm", "clients", "rounds", "defense", "attack", "threat")
_TARGET = (
    *("target", "target_round", "target_rounds", "target_count", "target_batch", "target_users"),
    *("target_client", "target_outside"),
    *("seed", "accuracy", "seconds", "flags", "reason"),
)
_CLAIM = ("epsilon", "delta", "unit", "relation", "against", "verdict", "reason")
_PROVED = (
    "proved_epsilon",
    "proved_delta",
    "proved_unit",
    "proved_method",
    "proved_tight",
    "proved_against",
    "further",
)
_AUDIT = (
    *("audited_epsilon", "audited_trials", "audited_confidence", "audited_verdict", "audited_reason"),
    *("audited_delta", "audited_unit", "audited_relation", "audited_horizon", "audited_threat", "audited_method"),
    *("audited_claimed_epsilon", "audited_proved_epsilon"),
    *("audited_rounds", "audited_clients", "audited_samples", "audited_dim"),
)
"""The claimed and the proved epsilon are those of the small federation that was audited, like the verdict."""


def harmless(value: Scalar) -> str:
    """A value as a field that no spreadsheet takes for a formula: text that begins like one gets a quote in front.

    Numbers stay numbers: -0.5 is a value of ours, "-0.5" is a text of somebody's.
    """
    if value is None:
        return ""
    if isinstance(value, (bool, int, float)):
        return repr(value)
    return "'" + value if value.startswith(_FORMULA) else value


def _claim(claim: ClaimRecord | None) -> list[Scalar]:
    """The fields of one claim and of what is proved; infinity is written `inf`."""
    if claim is None:
        return [None] * len(_CLAIM + _PROVED)
    proved, further = claim.proved, [_further(proof) for proof in claim.further]
    return [
        _epsilon(claim.epsilon),
        claim.delta,
        claim.unit,
        claim.relation,
        " ".join(claim.against),
        verdict_of(claim),
        claim.reason,
        _epsilon(proved.epsilon),
        proved.delta,
        proved.unit,
        proved.method,
        proved.tight,
        " ".join(proved.against),
        json.dumps(further, ensure_ascii=False, allow_nan=False) if further else None,
    ]


def _audit(audit: AuditRecord | None) -> list[Scalar]:
    """The fields of an audit."""
    if audit is None:
        return [None] * len(_AUDIT)
    return [
        audit.epsilon_lower,
        audit.trials,
        audit.confidence,
        audit.verdict,
        audit.reason,
        audit.delta,
        audit.unit,
        audit.relation,
        audit.horizon,
        audit.threat,
        audit.method,
        _epsilon(audit.claimed),
        _epsilon(audit.proved),
        audit.rounds,
        audit.clients,
        audit.samples,
        audit.dim,
    ]


def _epsilon(value: float | None) -> float | str:
    """Infinity by the word that spreadsheets and parsers of numbers know."""
    return "inf" if value is None else value


def _further(proof: ProofRecord) -> dict[str, object]:
    """One other proof, for JSON, which has no infinity."""
    return {**to_data(proof), "epsilon": _epsilon(proof.epsilon)}


def _fields(analysis: Analysis, cell: Cell, metrics: list[str]) -> list[Scalar]:
    """One line."""
    run, cell_id = analysis.run, cell.id
    result, failure = run.results.get(cell_id), run.failures.get(cell_id)
    spec, target = cell.training, cell.target
    training = run.trainings.get(spec.id)
    line: list[Scalar] = [
        cell_id,
        "done" if result is not None else "failed" if failure is not None else "missing",
        spec.task.data,
        spec.task.model,
        spec.federation.algorithm,
        spec.federation.clients,
        spec.federation.rounds,
        spec.defense.label,
        cell.attack.label,
        cell.threat,
        target.kind,
        target.round,
        target.rounds,
        target.count,
        target.batch,
        target.users,
        target.client,
        target.outside,
        spec.seed,
        None if training is None else last_accuracy(training),
        run.seconds.get(cell_id),
        " ".join(dict.fromkeys(flag.code for flag in analysis.flags_of(cell))),
        f"{failure.kind}: {failure.message}" if failure is not None and result is None else "",
        *_claim(None if training is None else training.one_round),
        *_claim(None if training is None else training.whole_run),
        *_audit(None if training is None else training.audited),
    ]
    estimates = {estimate.name: estimate for estimate in result.estimates} if result is not None else {}
    for name in metrics:
        e = estimates.get(name)
        line += [None, None, None, None] if e is None else [e.value, e.low, e.high, e.n]
    return line


def to_csv(analysis: Analysis) -> str:
    """One line a cell, all its estimates in columns; RFC 4180 with a header."""
    run = analysis.run
    metrics = list(dict.fromkeys(e.name for result in run.results.values() for e in result.estimates))
    claims = [f"{horizon}_{name}" for horizon in ("one_round", "whole_run") for name in (*_CLAIM, *_PROVED)]
    numbers = [column for name in metrics for column in (name, f"{name}_low", f"{name}_high", f"{name}_n")]
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(map(harmless, [*_CELL, *_TARGET, *claims, *_AUDIT, *numbers]))
    for cell in run.cells:
        writer.writerow(map(harmless, _fields(analysis, cell, metrics)))
    return buffer.getvalue()


def data_uri(text: str) -> str:
    """A CSV as a data URI: the download works without a script and without a network."""
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(text.encode()).decode()
