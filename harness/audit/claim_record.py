"""A claim with its numbers worked out, as plain data: for results, for the command line."""

from __future__ import annotations

import math
from collections.abc import Iterable

from leakgauge.harness.core.claim import Claim, Proof, judge
from leakgauge.harness.core.result import ClaimRecord, ProofRecord
from leakgauge.harness.core.threats import Threat


def record_claim(claim: Claim, delta: float | None = None) -> ClaimRecord:
    """The claim, what holds, and the verdict.

    Args:
        delta: at which to say what holds; by default the claim's. The verdict is always at the claim's.
    """
    verdict, claimed, _, reason = judge(claim)
    at = claim.delta if delta is None else delta
    return ClaimRecord(
        epsilon=_finite(claimed),
        delta=claim.delta,
        unit=claim.unit.value,
        relation=claim.relation.value,
        horizon=claim.horizon.value,
        against=_names(claim.against),
        source=claim.source,
        assumes=claim.assumes,
        proved=_proof(claim.proved, at, claim.against),
        further=tuple(_proof(proof, at, claim.against) for proof in claim.further),
        verdict=verdict.value,
        reason=reason,
    )


def _proof(proof: Proof, delta: float, against: Iterable[Threat]) -> ProofRecord:
    """What holds at `delta`; `against` unless the proof names others."""
    return ProofRecord(
        epsilon=_finite(proof.epsilon(delta)),
        delta=delta,
        unit=proof.unit.value,
        method=proof.method,
        reason=proof.reason,
        tight=proof.tight,
        against=_names(proof.against or against),
    )


def _finite(value: float) -> float | None:
    """None for infinity."""
    return None if math.isinf(value) else value


def _names(threats: Iterable[Threat]) -> tuple[str, ...]:
    """In alphabetical order."""
    return tuple(sorted(threat.value for threat in threats))
