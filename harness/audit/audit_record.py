"""An audit that a study asks for, as plain data."""

from __future__ import annotations

from leakgauge.harness.audit.claim_record import record_claim
from leakgauge.harness.audit.engine import audit, contradicts, verdict, watcher
from leakgauge.harness.audit.standalone import prepare_audit
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.claim import Horizon
from leakgauge.harness.core.result import AuditRecord
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation import registry

MOST_ROUNDS = 20
"""Of a whole run, so many rounds are audited: each trial runs them all."""

CONFIDENCE = 0.95


def audit_defense(spec: PartSpec, rounds: int, trials: int, key: Key, *, sends: str = "update") -> AuditRecord:
    """A lower bound of a defense's epsilon, in the small federation of `leakgauge audit`.

    Args:
        rounds: of the study's federation; of a defense that promises one round one is audited, else `MOST_ROUNDS` at
            most.
        trials: counted, with each of the two inputs.
        sends: `update` or `gradient`, as in the study's federation.

    Guarantees:
        Same arguments, same record.
        What is claimed and proved in the record is of the small federation, as the bound is.

    Raises:
        ValueError: the defense cannot be used there, or its claim cannot be worked out.
    """
    one_round = registry.build_defense(spec).promises is Horizon.ONE_ROUND
    asked = 1 if one_round else min(rounds, MOST_ROUNDS)
    defense, setting, history = prepare_audit(spec.name, spec.parameters, {"sends": sends}, asked)
    claim = defense.claim(history, setting)
    found = audit(Mechanism(defense, setting, tuple(history), watcher(claim)), claim, trials, CONFIDENCE, key)
    judged, reason = verdict(claim, found)
    record = record_claim(claim)
    return AuditRecord(
        claimed=record.epsilon,
        proved=record.proved.epsilon,
        epsilon_lower=found.epsilon_lower,
        delta=found.delta,
        unit=record.unit,
        relation=record.relation,
        horizon=record.horizon,
        rounds=len(history),
        clients=setting.clients,
        samples=setting.samples,
        dim=setting.dim,
        confidence=found.confidence,
        trials=found.trials,
        distinguisher=found.distinguisher,
        pair=found.pair,
        threat=found.threat.value,
        method=found.method,
        any_mechanism=found.any_mechanism,
        contradicts=contradicts(claim, found),
        verdict=judged.value,
        reason=reason,
    )
