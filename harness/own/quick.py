"""A quick audit and a quick study of a user's part: digits, a small network, the floor, and two attacks."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakgauge.harness.audit import standalone
from leakgauge.harness.core.claim import Code, Verdict
from leakgauge.harness.core.contract import Defense, claim_of
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.result import Failure, Result, Run
from leakgauge.harness.core.threads import one_thread
from leakgauge.harness.own.findings import Fault, Skip
from leakgauge.harness.own.parts import Part
from leakgauge.harness.own.wire import Patient
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve

_DIGITS = {"data": "digits", "model": "mlp-small"}
CLIENTS: dict[str, Any] = {
    "clients": 4,
    "rounds": 2,
    "samples": 240,
    "test_samples": 200,
    "algorithm": "fedsgd",
    "batch": 16,
    "lr": 0.1,
}


@dataclass(frozen=True)
class Effort:
    """The work of an examination: trials of the audit, evaluations of each search, and victims."""

    trials: int = 1000
    evaluations: int = 600
    victims: int = 4


@dataclass(frozen=True)
class Trial(Patient):
    """A defense under examination, with its audit and its study, which each run once."""

    effort: Effort

    @functools.cached_property
    def audited(self) -> dict[str, Any] | StudyError:
        """The result of `leakgauge audit`, or its error."""
        try:
            return standalone.audit(self.part.name, self.part.parameters, {}, None, trials=self.effort.trials, seed=0)
        except StudyError as error:
            return error

    @functools.cached_property
    def study(self) -> Run:
        """The study of the defense next to no defense."""
        mine = {"name": self.part.name, **self.part.parameters}
        return quick_study(_DIGITS, [{"name": "none"}, mine], attacks(self.effort))


def attacks(effort: Effort) -> list[dict[str, Any]]:
    """The floor and two attacks: one ignores the defense, the other uses its likelihood."""
    target = {"kind": "probe", "count": effort.victims}
    table = {"evaluations": effort.evaluations, "restarts": 1, "target": target}
    return [{"name": "prior", "target": target}, {"name": "idlg", **table}, {"name": "map", **table}]


@one_thread()
def quick_study(
    task: dict[str, Any], defenses: list[dict[str, Any]], attacked: list[dict[str, Any]], *, limit: bool = False
) -> Run:
    """The results of a study in this process, in a folder that is deleted afterwards."""
    table = {
        "name": "doctor",
        "tasks": [task],
        "federations": [CLIENTS],
        "defenses": defenses,
        "attacks": attacked,
        "limit": limit,
    }
    with tempfile.TemporaryDirectory() as folder:
        return run_study(resolve(table, allow_code=True), Path(folder) / "runs", workers=0)


def check_claim(patient: Trial) -> str:
    """The claim, and whether its own proof supports it."""
    defense, wire = patient.defense, patient.wire
    if type(defense).claim is Defense.claim:
        raise Skip("no `claim`: nothing is promised")
    found = _audit(patient)
    claimed = found["claimed"]
    one, three = (claim_of(defense, [wire.here.state] * rounds, wire.here.setting).epsilon for rounds in (1, 3))
    if three < one:
        raise Fault(f"epsilon {three:.4g} is claimed for three rounds, {one:.4g} for one; it grows with the rounds")
    said = f"{found['verdict']}: {found['reason']}"
    if found["verdict"] == Verdict.BROKEN.value:
        if not type(defense).__module__.startswith("leakgauge."):
            raise Fault(f"{said} Add noise, or claim what is proved")
        said += " The published claim is false; this is not a fault of the code."
    asked = defense.parameters().get("epsilon")
    horizon = claimed["horizon"]
    also = f"; epsilon={asked} was asked for" if isinstance(asked, float) and asked != claimed["epsilon"] else ""
    return f"{said} ({horizon}{also})"


def check_law(patient: Trial) -> str:
    """The messages of a small federation against the stated law."""
    row = _audit(patient)["audited"]
    if "law" not in row:
        raise Skip("no `law` is stated: an audit cannot say that the code is the mechanism of the claim")
    law = row["law"]
    if law["rejects"]:
        raise Fault(f"messages depart from `law`: {', '.join(law['rejects'][:3])}; `encode` or `law` is wrong")
    power = f"; {law['detects']:.1%} less noise would show" if law["detects"] else ""
    return f"{law['numbers']} numbers of {law['messages']} messages follow `law`{power}"


def check_audit(patient: Trial) -> str:
    """A measured lower bound of epsilon."""
    row = _audit(patient)["audited"]
    epsilon, delta = row["epsilon_lower"], row["delta"]
    text = f"epsilon >= {epsilon:.4g} at delta {delta:g} by {row['trials']} trials ({row['pair']})"
    if row["verdict"] == Code.CONTRADICTED.value:
        raise Fault(f"code {row['verdict']}: {row['seen']}; {text}")
    return f"{text}; code {row['verdict']}: {row['seen']}"


def _audit(patient: Trial) -> dict[str, Any]:
    """The audit; each line that needs a failed audit shows its error."""
    if isinstance(patient.audited, StudyError):
        raise Fault(" ".join(str(patient.audited).split()))
    return patient.audited


def check_training(run: Run, part: Part) -> str:
    """A training on digits with the defense, or a training of the task."""
    mine = [one for one in run.trainings.values() if one.spec.defense.name == part.name or part.kind != "defense"]
    if not mine:
        raise Fault(_failed(run, part) or "no training of it was finished")
    wrong = [flag.message for flag in mine[0].flags if flag.code in ("not-repeatable", "dropped-clients")]
    if wrong:
        raise Fault("; ".join(wrong))
    last, first = mine[0].evaluations[-1], mine[0].evaluations[0]
    accuracy = f", accuracy {last.accuracy:.2f}" if last.accuracy is not None else ""
    sent = mine[0].message_bytes[-1]
    return f"2 rounds: loss {first.loss:.3f} to {last.loss:.3f}{accuracy}, {sent:,.0f} bytes a message"


def check_attacks(run: Run, part: Part) -> str:
    """What attacks see of digits behind the defense, or of the task's data."""
    failed = _failed(run, part)
    if failed:
        raise Fault(failed)
    shown: dict[str, dict[str, float]] = {}
    refused = [one.message for one in run.failures.values() if one.kind == "NoLikelihood"]
    for result in run.results.values():
        shown.setdefault(result.cell.training.defense.name, {})[result.cell.attack.name] = ssim(result)
    rows = [f"{name}: {_row(values)}" for name, values in shown.items()]
    return f"mean SSIM {'; '.join(rows)}{f'; refused: {refused[0]}' if refused else ''}"


def ssim(result: Result) -> float:
    """The mean SSIM of a result; NaN if there is none."""
    values = [one.value for one in result.estimates if one.name == "ssim" and one.value is not None]
    return values[0] if values else float("nan")


def _row(values: dict[str, float]) -> str:
    """Attacks with their SSIM."""
    return ", ".join(f"{'floor' if name == 'prior' else name} {value:.2f}" for name, value in values.items())


def _failed(run: Run, part: Part) -> str:
    """Why a cell failed, unless it needs a likelihood that the defense does not state."""
    failed: list[Failure] = [one for one in run.failures.values() if one.kind != "NoLikelihood"]
    return "; ".join(dict.fromkeys(f"{one.cell.attack.name}: {one.message}" for one in failed))
