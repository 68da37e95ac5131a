"""Claims and audits as lines of text: claimed, proved and audited epsilon, and the verdict."""

from __future__ import annotations

from leakgauge.harness.core.answer import CanaryCounts, CosineRecord, DefenseRecord, MessageCounts
from leakgauge.harness.core.labels import ARITHMETIC, assumption, odds
from leakgauge.harness.core.result import AssumedBound, AuditRecord, ClaimRecord, ProofRecord, chance
from leakgauge.harness.core.stored import number
from leakgauge.harness.core.threats import Threat


def claim_lines(record: DefenseRecord, study: str = "") -> list[str]:
    """A claim with its audit, if there is one; `study`: the name of the study whose federation it is for."""
    claim, audit, judged = record.claim, record.audit, record.judged
    parameters = ", ".join(f"{key}={value}" for key, value in record.parameters.items() if value is not None)
    source = f"{claim.source}, {claim.relation}" if claim.source else ""
    place = "{participants} of {clients} clients in each of {rounds} rounds, d {dim}, {samples} records or more"
    head = f" in {study}: {place.format(**record.setting)}" if study else ""
    lines = [f"{record.defense}({parameters}){head}", _terms("claimed", claim, claim.horizon, source)]
    lines.append(_terms("proved", claim.proved, claim.horizon, claim.proved.method))
    proofs = [("attained", claim.attained)] if claim.attained else []
    for label, proof in [*proofs, *(("", proof) for proof in claim.further)]:
        lines.append(f"{_terms(label, proof, claim.horizon, proof.method)}: {proof.reason}")
    if claim.epsilon is not None:
        lines.append(f"  numbers  {claim.arithmetic}: {ARITHMETIC[claim.arithmetic]}")
    for group in claim.groups:
        epsilons = f"claimed {number(group.epsilon):.6g}, proved {number(group.proved.epsilon):.6g}"
        clients = ", ".join(map(str, group.clients))
        lines.append(f"  clients  {clients} ({group.label}): {epsilons}, {group.verdict}")
    if audit is not None:
        size = "clients {clients}, rounds {rounds}, d {dim}"
        here = size.format(**record.setting)
        rows = [*audit_lines(record), f"           claimed, proved and audited in the same federation: {here}"]
        if study and isinstance(audit, AuditRecord):
            epsilons = f"claimed {number(audit.claimed):.6g}, proved {number(audit.proved):.6g}"
            there = size.format(clients=audit.clients, rounds=audit.rounds, dim=audit.dim)
            lines.append(f"           claimed and proved in the federation of the study: {here}")
            rows = [f"  small    federation of the trials: {there}; {epsilons}", *audit_lines(record)]
        lines += rows
    if isinstance(audit, AuditRecord):
        from leakgauge.harness.core.stats import STRICT  # scipy, which a claim without an audit does not need

        most = "" if audit.ceiling is None else f" (at most {audit.ceiling:.4g} by these trials)"
        bound = f"epsilon >= {audit.strict:.4g}{most}, confidence {max(audit.confidence, STRICT):g}"
        lines.append(f"  verdict  by {bound}, by {audit.threat}")
    lines += [f"  assumes  {text}" for text in claim.assumes] + [f"  note     {text}" for text in record.notes]
    if not study:
        return [*lines, f"  {judged.verdict}: {judged.reason}"]
    small = f"  {judged.verdict} in the small federation: {judged.reason}"
    return [*lines, small, f"  {claim.verdict} in the federation of the study: {claim.reason}"]


def _terms(label: str, row: ClaimRecord | ProofRecord, horizon: str, how: str) -> str:
    epsilon = "inf"
    if row.epsilon is not None:
        epsilon = f"{row.epsilon:.6g} ({odds(chance(row.epsilon, row.delta))})"
    names = "everybody" if len(row.against) == len(Threat) else ", ".join(row.against)
    against = f", against {names}" if names else ""
    against = f", {row.relation}{against}" if isinstance(row, ProofRecord) and row.relation else against
    source = f" ({how})" if how else ""
    return f"  {label:<8} epsilon {epsilon} per {row.unit}, delta {row.delta:g}, {horizon}{against}{source}"


def audit_lines(record: DefenseRecord) -> list[str]:
    """An audit as lines of text: the bound or the estimate, delta at the claimed epsilon, the verdict on the code."""
    audit, at = record.audit, record.delta_at
    assert audit is not None  # an audit was asked for
    what = f"per {audit.unit}, delta {audit.delta:g}"
    if isinstance(audit, CosineRecord):
        counted = f"{audit.canaries} canary clients in one run of {audit.rounds} rounds, {audit.pair}"
        size = f"d {audit.dim}, mu {audit.mu:.4g}"
        epsilon = f"{number(audit.epsilon_estimate):.4g}"
        rows = [f"  ESTIMATE epsilon about {epsilon} {what}, no bound (cosines of {counted}; {size})"]
    else:
        other = f"; {audit.any_mechanism:.4g} without assuming a Gaussian mechanism"
        other = "" if assumption(audit.method) == "nothing" else other
        epsilon = f"{audit.epsilon_lower:.4g} ({odds(chance(audit.epsilon_lower, audit.delta))})"
        how = f"assuming {assumption(audit.method)} ({audit.method}{other}; {_counted(audit, record)})"
        rows = [f"  audited  epsilon >= {epsilon} {what}, confidence {audit.confidence:g}, by {audit.threat}, {how}"]
        rows += map(_assuming, audit.assuming)
    if at is not None:
        how = "exact, of the pair that attains the proof"
        if at.method != "exact":
            how = f"{at.low:.4g} to {at.high:.4g}, {at.n} trials per input, by the defense's own likelihood"
        rows.append(f"  delta    {at.delta:.4g} at epsilon {at.epsilon:.6g} ({how})")
    return rows + ([f"  code     {audit.code}: {audit.seen}."] if isinstance(audit, AuditRecord) else [])


def _counted(audit: AuditRecord, record: DefenseRecord) -> str:
    counts = record.counts
    if isinstance(counts, CanaryCounts):
        clients = f"{counts.canaries} canary clients in one run of {audit.rounds} rounds, {audit.pair}"
        return f"{clients}; {counts.right} of {counts.guesses} guesses right"
    positives, negatives, run = audit.trials, audit.trials, ""
    if isinstance(counts, MessageCounts):
        positives, negatives = counts.messages // 2, -(-counts.messages // 2)
        pilot = f", {counts.pilot} more in the pilot" if counts.pilot else ""
        run = f"{counts.messages} messages of {audit.rounds} rounds{pilot}; "
    assert counts is not None  # a bound has counts
    right = f"{counts.true_positives} of {positives} right on input 1"
    wrong = f"{counts.false_positives} of {negatives} wrong on input 0"
    return f"{audit.distinguisher}, {audit.pair}; {run}{right}, {wrong}"


def _assuming(bound: AssumedBound) -> str:
    numbers = f"{bound.numbers} numbers in each of " if bound.numbers > 1 else ""
    counted = f"{numbers}{bound.trials} messages{' per input' if numbers else ''}"
    text = f"epsilon >= {bound.epsilon_lower:.4g} per {bound.unit}, assuming {bound.assumes} ({counted}, {bound.pair})"
    return f"{'':11}{text}"
