"""The results of a run as rows, one per value, for `Run.frame`, the exports and notebooks.

| rows of | quantities |
|---|---|
| a cell | its metrics, `finished` (1, or 0 with the reason in `note`), `seconds`; `verdict`: see `labels.unpromised` |
| a training | `accuracy`, `loss`, `message_bytes`, `snr_db`, `update_norm` (the median before the defense) by round, |
| | of UDP `noise_multiplier` and `planned_rounds`, |
| | `final_accuracy`, `final_loss`, `late_accuracy`, `late_loss` (means of the last `LATE` evaluations), `rounds_run`, |
| | `bits`, `dim`, `seconds` |
| its claims | `claimed_epsilon`, `proved_epsilon` (a bound) and, if known, a smaller `attained_epsilon`, by horizon |
| of each client | `client_claimed_epsilon`, `client_proved_epsilon`, if clients differ: `item` is the client's number |
| its audit | `audited_epsilon`, `audited_strict`, `audited_ceiling`, and the two epsilons of the small federation |
| its assumptions | `broken` messages, coordinates or rounds, out of `n` |

A row of a training has no cell, attack, adversary or target. An infinite epsilon is `inf`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from leakgauge.harness.core.cases import Case, cases, gathered
from leakgauge.harness.core.cell import Cell, TrainingSpec
from leakgauge.harness.core.labels import counted, label_parts, part_text, server_text, unpromised, where
from leakgauge.harness.core.result import AuditRecord, ClaimRecord, Flag, ProofRecord, Run, TrainingRecord
from leakgauge.harness.core.sinks import element
from leakgauge.harness.core.stats import STRICT, clopper_pearson, cut
from leakgauge.harness.core.stored import number

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

COLUMNS: dict[str, str] = {
    **dict.fromkeys(("cell", "training", "data", "model", "algorithm"), "str"),
    **dict.fromkeys(("clients", "rounds"), "Int64"),
    **dict.fromkeys(("defense", "server", "attack", "adversary", "target"), "str"),
    "seed": "Int64",
    "quantity": "str",
    **dict.fromkeys(("round", "item"), "Int64"),
    **dict.fromkeys(("value", "low", "high", "level"), "float64"),
    "n": "Int64",
    **dict.fromkeys(("unit", "method", "privacy_unit", "relation", "horizon", "arithmetic"), "str"),
    "delta": "float64",
    **dict.fromkeys(("adversaries", "verdict", "flags", "note"), "str"),
}
"""Each column with its type in a data frame. A value that does not apply is missing; in a text column, it is empty."""


LATE = 5
"""The evaluations at the end of a training whose mean depends less on where it ends."""

QUANTITIES = (
    *("finished", "accuracy", "loss", "final_accuracy", "final_loss", "late_accuracy", "late_loss"),
    *("rounds_run", "message_bytes", "snr_db", "bits"),
    *("update_norm", "noise_multiplier", "planned_rounds", "dim", "seconds", "claimed_epsilon", "proved_epsilon"),
    *(
        "client_claimed_epsilon",
        "client_proved_epsilon",
        "attained_epsilon",
        "broken",
        "audited_epsilon",
        "audited_strict",
        "audited_ceiling",
        "audit_claimed_epsilon",
    ),
    "audit_proved_epsilon",
)
"""The quantities that are not metrics of attacks."""


def rows(run: Run, *, items: bool = False) -> Iterator[Row]:
    """Every value of a run with its question, in the study's order: a training's values, then those of its cells.

    Args:
        items: also give one row for each victim or record of a metric, numbered in `item`.
    """
    for cells in gathered((cell.training.id, cell) for cell in run.cells).values():
        spec = cells[0].training
        question, record = _question(spec), run.trainings.get(spec.id)
        if record is not None:
            for row in _of_training(record, run.seconds.get(spec.id)):
                yield question | row
        for cell in cells:
            names = dict(cell=cell.id, attack=part_text(cell.attack), adversary=cell.threat, target=where(cell.target))
            names["verdict"] = unpromised(cell, record)
            for row in _of_cell(run, cell, items):
                yield question | names | row


def frame(table: Sequence[Row]) -> pd.DataFrame:
    """Rows as a data frame with the columns and types of `COLUMNS`.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("a data frame needs pandas: pip install pandas") from error
    return pd.DataFrame({name: pd.Series(column(table, name), dtype=kind) for name, kind in COLUMNS.items()})


def column(table: Iterable[Row], name: str) -> list[Any]:
    """One column of rows; a row without a value gives an empty text, or None in columns of numbers."""
    nothing = "" if COLUMNS[name] == "str" else None
    return [nothing if (value := row.get(name)) is None else value for row in table]


def summary_html(run: Run) -> str:
    """The headline of each case, pooled over the seeds, as an HTML table for a notebook."""
    lines = [f"<tr>{''.join(f'<th>{name}</th>' for name in _SUMMARY)}</tr>"]
    labels = label_parts(cell.training.defense for cell in run.cells)
    for case in cases(run):
        texts = [labels[case.training.defense.key].text, part_text(case.attack), case.threat, where(case.target)]
        each = "".join(f"<td>{element(text)}</td>" for text in texts + _numbers(case, run))
        lines.append(f"<tr>{each}</tr>")
    return f"<table><caption>{element(repr(run))}</caption>{''.join(lines)}</table>"


_SUMMARY = ("defense", "attack", "adversary", "target", "metric", "value", "95 %", "n", "final accuracy")


def _numbers(case: Case, run: Run) -> list[str]:
    known = [r.accuracy for cell in case.cells if (r := run.trainings.get(cell.training.id)) and r.accuracy is not None]
    accuracy = f"{np.mean(known):.1%}" if known else ""
    if (pooled := case.pooled) is None:
        return ["", "no result", "", "", accuracy]
    ends = "" if pooled.low is None or pooled.high is None else f"{pooled.low:.3f} to {pooled.high:.3f}"
    return [pooled.name, "n/a" if pooled.value is None else f"{pooled.value:.3f}", ends, str(pooled.n), accuracy]


def _question(spec: TrainingSpec) -> Row:
    return {
        "training": spec.id,
        "data": spec.task.data,
        "model": spec.task.model,
        "algorithm": spec.federation.algorithm,
        "clients": spec.federation.clients,
        "rounds": spec.federation.rounds,
        "defense": part_text(spec.defense),
        "server": server_text(spec),
        "seed": spec.seed,
    }


def _of_cell(run: Run, cell: Cell, items: bool) -> Iterator[Row]:
    result, failure = run.results.get(cell.id), run.failures.get(cell.id)
    why = "" if result is not None else "no result" if failure is None else f"{failure.kind}: {failure.message}"
    flags = _codes(() if result is None else result.flags)
    yield {"quantity": "finished", "value": float(result is not None), "n": 1, "note": why, "flags": flags}
    yield from _seconds(run.seconds.get(cell.id))
    for estimate in () if result is None else map(cut, result.estimates):
        row = {"quantity": estimate.name, "value": estimate.value, "n": estimate.n, "unit": estimate.unit}
        if estimate.low is not None:
            row |= {"low": estimate.low, "high": estimate.high, "level": estimate.level, "method": estimate.method}
        yield row | {"note": estimate.note, "flags": flags}
        for item, value in enumerate(estimate.values if items else ()):
            yield {"quantity": estimate.name, "item": item, "value": value, "unit": estimate.unit}


def _of_training(record: TrainingRecord, seconds: float | None) -> Iterator[Row]:
    for evaluation in record.evaluations:
        if evaluation.accuracy is not None:
            yield {"round": evaluation.round} | _accuracy(evaluation.accuracy, evaluation.samples, "accuracy")
        yield {"quantity": "loss", "round": evaluation.round, "value": evaluation.loss, "n": evaluation.samples}
    for round_, size in enumerate(record.message_bytes):
        yield {"quantity": "message_bytes", "round": round_, "value": size, "unit": "bytes"}
    for round_, snr in enumerate(record.snr_db):
        yield {"quantity": "snr_db", "round": round_, "value": snr, "unit": "dB"}
    for name, numbers in record.state_metrics.items():
        yield from ({"quantity": name, "round": round_, "value": value} for round_, value in enumerate(numbers))
    yield from _final(record)
    if record.bits is not None:
        yield {"quantity": "bits", "value": record.bits, "unit": "bits per parameter"}
    yield {"quantity": "dim", "value": record.dim}
    yield from _seconds(seconds)
    for claim in (record.one_round, record.whole_run):
        yield from _of_claim(claim)
    if record.audited is not None:
        yield from _of_audit(record.audited)
    for violation in record.violations:
        note = f"{violation.assumption}; {'covered by the proof' if violation.covered else 'not covered by the proof'}"
        yield {"quantity": "broken", "value": violation.broken, "n": violation.of, "unit": violation.what, "note": note}


def _final(record: TrainingRecord) -> Iterator[Row]:
    if record.accuracy is not None:
        yield _accuracy(record.accuracy, record.test_samples, "final_accuracy") | {"flags": _codes(record.flags)}
    if record.evaluations:
        last = record.evaluations[-1]
        yield {"quantity": "final_loss", "value": last.loss, "n": record.test_samples}
        yield {"quantity": "rounds_run", "value": last.round}
        late = record.evaluations[-LATE:]
        yield {"quantity": "late_loss", "value": fmean(one.loss for one in late), "n": last.samples}
        if all(one.accuracy is not None for one in late):
            right = fmean(one.accuracy for one in late if one.accuracy is not None)
            yield {"quantity": "late_accuracy", "value": right, "n": last.samples}


def _accuracy(value: float, n: int, quantity: str) -> Row:
    if not n:
        return {"quantity": quantity, "value": value}
    low, high = clopper_pearson(round(value * n), n)
    ends = {"low": low, "high": high, "level": 0.95, "method": "Clopper-Pearson"}
    return {"quantity": quantity, "value": value, "n": n} | ends


def _of_claim(claim: ClaimRecord) -> Iterator[Row]:
    verdict = "NOTHING PROMISED" if claim.epsilon is None else claim.verdict
    scope = {name: getattr(claim, name) for name in ("relation", "horizon", "arithmetic")}
    terms = scope | {"delta": claim.delta, "privacy_unit": claim.unit, "adversaries": " ".join(claim.against)}
    words = {"method": claim.source, "verdict": verdict, "note": claim.reason}
    yield {"quantity": "claimed_epsilon", "value": number(claim.epsilon)} | terms | words
    for proof in (claim.proved, *claim.further):
        yield scope | _of_proof(proof) | ({"relation": proof.relation} if proof.relation else {})
    if claim.attained is not None:
        yield scope | _of_proof(claim.attained) | {"quantity": "attained_epsilon", "high": None}
    for group in claim.groups:
        words = {"method": claim.source, "verdict": group.verdict, "note": f"{group.label}: {group.reason}"}
        claimed = terms | words | {"quantity": "client_claimed_epsilon", "value": number(group.epsilon)}
        proved = scope | _of_proof(group.proved) | {"quantity": "client_proved_epsilon"}
        yield from (row | {"item": client} for client in group.clients for row in (claimed, proved))


def _of_proof(proof: ProofRecord) -> Row:
    """A proved epsilon as upper bound; also as lower bound if some pair of neighbors attains it."""
    value = number(proof.epsilon)
    terms = {"delta": proof.delta, "privacy_unit": proof.unit, "adversaries": " ".join(proof.against)}
    ends = {"high": value, "low": value if proof.tight else None}
    return {"quantity": "proved_epsilon", "value": value, "method": proof.method, "note": proof.reason} | ends | terms


def _of_audit(audit: AuditRecord) -> Iterator[Row]:
    federation = f"{counted(audit.clients, 'client')}, {counted(audit.rounds, 'round')}, d = {audit.dim}"
    terms = {"relation": audit.relation, "horizon": audit.horizon, "adversaries": audit.threat, "delta": audit.delta}
    terms |= {"clients": audit.clients, "rounds": audit.rounds}  # of the audited federation, not of the study's
    strict = {"level": max(audit.confidence, STRICT), "n": audit.trials, "note": federation}
    unit = {"privacy_unit": audit.unit}
    ends = {"low": audit.epsilon_lower, "level": audit.confidence, "n": audit.trials, "method": audit.method}
    words = {"verdict": audit.code, "note": audit.seen}
    yield {"quantity": "audited_epsilon", "value": audit.epsilon_lower} | terms | unit | ends | words
    yield {"quantity": "audited_strict", "value": audit.strict, "low": audit.strict} | terms | unit | strict
    yield {"quantity": "audited_ceiling", "value": number(audit.ceiling)} | terms | unit | strict
    words = {"verdict": audit.verdict, "note": audit.reason}
    yield {"quantity": "audit_claimed_epsilon", "value": number(audit.claimed)} | terms | unit | words
    yield {"quantity": "audit_proved_epsilon", "value": number(audit.proved), "note": federation} | terms | unit
    for bound in audit.assuming:
        ends = {"low": bound.epsilon_lower, "level": audit.confidence, "n": bound.trials, "method": bound.assumes}
        more = terms | {"delta": 0.0, "privacy_unit": bound.unit, "note": f"proved {bound.proved:.6g}; {bound.pair}"}
        yield {"quantity": "audited_epsilon", "value": bound.epsilon_lower} | more | ends


def _seconds(seconds: float | None) -> Iterator[Row]:
    if seconds is not None:
        yield {"quantity": "seconds", "value": seconds, "unit": "s"}


def _codes(flags: Iterable[Flag]) -> str:
    return " ".join(dict.fromkeys(flag.code for flag in flags))
