"""All results, one line per cell: CSV that is safe to open in a spreadsheet, or JSON with all estimates."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from typing import Any

from leakgauge.harness.core.cell import Cell, Scalar
from leakgauge.harness.core.labels import part_text
from leakgauge.harness.core.result import AuditRecord, ClaimRecord, ProofRecord, Run, TrainingRecord, to_data
from leakgauge.reports.sections.checked import verdict_of
from leakgauge.reports.select import Analysis

_SIGNS = "=+\\-@\uff1d\uff0b\uff0d\uff20"
_FORMULA = re.compile(rf"\A(?=[{_SIGNS}\t\r\n])|(?<=[;\t\r\n])(?=[{_SIGNS}])")
"""Where a formula could begin: at a sign, also a wide one of an East Asian keyboard. `;`, tabs and line ends begin a
cell in the spreadsheets of countries where the comma is the decimal mark."""

_CELL = (
    *("cell", "status", "data", "model", "algorithm", "clients", "rounds", "defense", "attack", "threat"),
    *("target", "target_round", "target_rounds", "target_count", "target_batch", "target_users"),
    *("target_client", "target_outside"),
    *("seed", "accuracy", "seconds", "flags", "reason"),
)
_CLAIM = ("epsilon", "delta", "unit", "relation", "against", "verdict", "reason")
_PROVED = ("epsilon", "delta", "unit", "method", "tight", "against")
_AUDIT = {
    "audited_epsilon": "epsilon_lower",
    **{f"audited_{name}": name for name in ("strict", "ceiling", "trials", "confidence", "verdict", "reason")},
    **{f"audited_{name}": name for name in ("code", "seen")},
    **{f"audited_{name}": name for name in ("delta", "unit", "relation", "horizon", "threat", "method")},
    **{f"audited_{name}_epsilon": name for name in ("claimed", "proved")},
    **{f"audited_{name}": name for name in ("rounds", "clients", "samples", "dim")},
}
"""Fields of an audit, by column. Like the verdict, the claimed and the proved epsilon are those of the small federation
that was audited."""


def harmless(value: Scalar) -> str:
    """A value as a field that no spreadsheet runs as a formula: a quote goes before each start of one in a text.

    Numbers are unchanged: -0.5 is a number of the results, "-0.5" is a text from outside.
    """
    if value is None:
        return ""
    return _FORMULA.sub("'", value) if isinstance(value, str) else str(value)


def status_of(run: Run, cell: Cell) -> str:
    """`done`, `failed` or `missing`."""
    return "done" if cell.id in run.results else "failed" if cell.id in run.failures else "missing"


def _epsilon(value: float | None) -> float | str:
    """An epsilon; infinity is the text `inf`, which spreadsheets and number parsers know and JSON lacks."""
    return "inf" if value is None else value


def _proof_data(proof: ProofRecord) -> dict[str, Any]:
    """A proof as plain data."""
    return {**to_data(proof), "epsilon": _epsilon(proof.epsilon)}


def _claim_data(claim: ClaimRecord) -> dict[str, Any]:
    """A claim with its proofs as plain data."""
    further = [_proof_data(proof) for proof in claim.further]
    proofs = {"proved": _proof_data(claim.proved), "further": further}
    return {**to_data(claim), "epsilon": _epsilon(claim.epsilon), "verdict": verdict_of(claim), **proofs}


def _audit_data(audit: AuditRecord) -> dict[str, Any]:
    """An audit as plain data."""
    return {**to_data(audit), "claimed": _epsilon(audit.claimed), "proved": _epsilon(audit.proved)}


def _breaches_data(training: TrainingRecord) -> list[Any]:
    """How often the run broke each counted assumption, as plain data."""
    return [to_data(one) for one in training.breaches]


def _claim_fields(claim: ClaimRecord | None) -> list[Scalar]:
    """The columns of one claim and its proofs."""
    if claim is None:
        return [None] * (len(_CLAIM) + len(_PROVED) + 1)
    data = _claim_data(claim)
    fields = [data[name] for name in _CLAIM] + [data["proved"][name] for name in _PROVED]
    further = json.dumps(data["further"], ensure_ascii=False, allow_nan=False) if data["further"] else None
    return [*(" ".join(field) if isinstance(field, tuple) else field for field in fields), further]


def _training_fields(training: TrainingRecord | None) -> list[Scalar]:
    """The columns of the claims, of the counted assumptions and of the audit."""
    claims = (None, None) if training is None else (training.one_round, training.whole_run)
    audit = None if training is None or training.audited is None else _audit_data(training.audited)
    audited = [None if audit is None else audit[name] for name in _AUDIT.values()]
    counts = json.dumps(_breaches_data(training), ensure_ascii=False) if training and training.breaches else None
    return [*(field for claim in claims for field in _claim_fields(claim)), counts, *audited]


def _fields(analysis: Analysis, cell: Cell, metrics: list[str]) -> list[Scalar]:
    """One line."""
    run, spec, target = analysis.run, cell.training, cell.target
    result, failure, training = run.results.get(cell.id), run.failures.get(cell.id), run.trainings.get(spec.id)
    line: list[Scalar] = [cell.id, status_of(run, cell), spec.task.data, spec.task.model]
    line += [spec.federation.algorithm, spec.federation.clients, spec.federation.rounds]
    line += [part_text(spec.defense), part_text(cell.attack), cell.threat]
    line += [target.kind, target.round, target.rounds, target.count, target.batch, target.users]
    line += [target.client, target.outside, spec.seed, None if training is None else training.accuracy]
    line += [run.seconds.get(cell.id), " ".join(dict.fromkeys(flag.code for flag in analysis.flags_of(cell)))]
    line.append(f"{failure.kind}: {failure.message}" if failure is not None and result is None else "")
    line += _training_fields(training)
    estimates = {estimate.name: estimate for estimate in result.estimates} if result is not None else {}
    for name in metrics:
        e = estimates.get(name)
        line += [None, None, None, None] if e is None else [e.value, e.low, e.high, e.n]
    return line


def to_csv(analysis: Analysis) -> str:
    """One line per cell, all its estimates in columns; RFC 4180 with a header."""
    run = analysis.run
    metrics = list(dict.fromkeys(e.name for result in run.results.values() for e in result.estimates))
    claim = [*_CLAIM, *(f"proved_{name}" for name in _PROVED), "further"]
    claims = [f"{horizon}_{name}" for horizon in ("one_round", "whole_run") for name in claim]
    numbers = [column for name in metrics for column in (name, f"{name}_low", f"{name}_high", f"{name}_n")]
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(map(harmless, [*_CELL, *claims, "breaches", *_AUDIT, *numbers]))
    for cell in run.cells:
        writer.writerow(map(harmless, _fields(analysis, cell, metrics)))
    return buffer.getvalue()


def _training_data(training: TrainingRecord | None) -> dict[str, object]:
    """Accuracy, claims, counted assumptions and audit of a cell's training, for JSON; null if it did not finish."""
    if training is None:
        return dict.fromkeys(("accuracy", "one_round", "whole_run", "breaches", "audited"))
    return {
        "accuracy": training.accuracy,
        "one_round": _claim_data(training.one_round),
        "whole_run": _claim_data(training.whole_run),
        "breaches": _breaches_data(training),
        "audited": None if training.audited is None else _audit_data(training.audited),
    }


def _object(analysis: Analysis, cell: Cell) -> dict[str, object]:
    """One cell as plain data: the question and the results."""
    run, spec = analysis.run, cell.training
    result, failure = run.results.get(cell.id), run.failures.get(cell.id)
    estimates = [to_data(estimate) for estimate in result.estimates] if result is not None else []
    failed = None if failure is None or result is not None else {"kind": failure.kind, "message": failure.message}
    return {
        "cell": cell.id,
        "status": status_of(run, cell),
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
    """One JSON object per line and cell, in the study's order, with all estimates and their values per victim.

    An infinite epsilon is `"inf"`; null means unknown. The text is ASCII, so that a line ends only where its cell does.
    """
    return "".join(json.dumps(_object(analysis, cell), allow_nan=False) + "\n" for cell in analysis.run.cells)


def data_uri(text: str) -> str:
    """A CSV as a data URI: the download works without a script and without a network."""
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(text.encode()).decode()
