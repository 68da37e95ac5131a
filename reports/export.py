"""All results, a line a cell: CSV that a spreadsheet opens without running anything, or JSON with all estimates."""

from __future__ import annotations

import base64
import csv
import io
import json
import re

from leakgauge.harness.core.cell import Cell, Scalar
from leakgauge.harness.core.result import AuditRecord, ClaimRecord, ProofRecord, Run, TrainingRecord, to_data
from leakgauge.reports.sections.checked import verdict_of
from leakgauge.reports.select import Analysis

_SIGNS = "=+\\-@\uff1d\uff0b\uff0d\uff20"
_FORMULA = re.compile(rf"\A(?=[{_SIGNS}\t\r\n])|(?<=[;\t\r\n])(?=[{_SIGNS}])")
"""Where a formula could begin: at a sign, also a wide one of an East Asian keyboard. `;`, tabs and line ends begin a
cell in the spreadsheets of countries where the comma is the decimal mark."""

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
    """A value as a field that no spreadsheet takes for a formula: in a text, a quote goes where one could begin.

    Numbers stay numbers: -0.5 is a value of ours, "-0.5" is a text of somebody's.
    """
    if value is None:
        return ""
    return _FORMULA.sub("'", value) if isinstance(value, str) else str(value)


def _claim(claim: ClaimRecord | None) -> list[Scalar]:
    """The fields of one claim and of what is proved; infinity is written `inf`."""
    if claim is None:
        return [None] * len(_CLAIM + _PROVED)
    proved, further = claim.proved, [_proof_data(proof) for proof in claim.further]
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


def _proof_data(proof: ProofRecord) -> dict[str, object]:
    """A proof for JSON, which has no infinity."""
    return {**to_data(proof), "epsilon": _epsilon(proof.epsilon)}


def _status(run: Run, cell_id: str) -> str:
    """`done`, `failed` or `missing`."""
    return "done" if cell_id in run.results else "failed" if cell_id in run.failures else "missing"


def _fields(analysis: Analysis, cell: Cell, metrics: list[str]) -> list[Scalar]:
    """One line."""
    run, cell_id = analysis.run, cell.id
    result, failure = run.results.get(cell_id), run.failures.get(cell_id)
    spec, target = cell.training, cell.target
    training = run.trainings.get(spec.id)
    line: list[Scalar] = [
        cell_id,
        _status(run, cell_id),
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
        None if training is None else training.accuracy,
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


def _claim_data(claim: ClaimRecord) -> dict[str, object]:
    """A claim with its proofs, for JSON."""
    changes: dict[str, object] = {"epsilon": _epsilon(claim.epsilon), "verdict": verdict_of(claim)}
    changes |= {"proved": _proof_data(claim.proved), "further": [_proof_data(proof) for proof in claim.further]}
    return {**to_data(claim), **changes}


def _training_data(training: TrainingRecord | None) -> dict[str, object]:
    """What a cell's training says, for JSON; null where it did not finish."""
    if training is None:
        return {"accuracy": None, "one_round": None, "whole_run": None, "audited": None}
    audit = training.audited
    ends = {} if audit is None else {"claimed": _epsilon(audit.claimed), "proved": _epsilon(audit.proved)}
    return {
        "accuracy": training.accuracy,
        "one_round": _claim_data(training.one_round),
        "whole_run": _claim_data(training.whole_run),
        "audited": None if audit is None else {**to_data(audit), **ends},
    }


def _object(analysis: Analysis, cell: Cell) -> dict[str, object]:
    """One cell: what was asked, what came out."""
    run, spec = analysis.run, cell.training
    result, failure = run.results.get(cell.id), run.failures.get(cell.id)
    estimates = [to_data(estimate) for estimate in result.estimates] if result is not None else []
    failed = None if failure is None or result is not None else {"kind": failure.kind, "message": failure.message}
    return {
        "cell": cell.id,
        "status": _status(run, cell.id),
        "task": to_data(spec.task),
        "federation": to_data(spec.federation),
        "defense": to_data(spec.defense),
        "attack": to_data(cell.attack),
        "threat": cell.threat,
        "target": to_data(cell.target),
        "seed": spec.seed,
        "training": spec.id,
        **_training_data(run.trainings.get(spec.id)),
        "estimates": {str(estimate.pop("name")): estimate for estimate in estimates},
        "flags": [to_data(flag) for flag in analysis.flags_of(cell)],
        "seconds": run.seconds.get(cell.id),
        "failure": failed,
    }


def to_jsonl(analysis: Analysis) -> str:
    """One JSON object a line and cell, in the study's order, with all estimates by name and their values per victim.

    An infinite epsilon is `"inf"`; null is not known. All of it is ASCII, so that a line ends where its cell does.
    """
    return "".join(json.dumps(_object(analysis, cell), allow_nan=False) + "\n" for cell in analysis.run.cells)


def data_uri(text: str) -> str:
    """A CSV as a data URI: the download works without a script and without a network."""
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(text.encode()).decode()
