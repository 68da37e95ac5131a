"""No line of a generated study mixes claim, proof and audit of other horizons, units, adversaries or federations."""

import dataclasses
import re

import numpy as np
import pytest

from leakgauge.reports.sections.checked import checked, stated
from leakgauge.reports.sections.claims import claims
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.notation import number, short
from tests import report_fixtures as double
from tests.command import call
from tests.report_page import content, with_trainings
from tests.terminal_text import plain

UNITS, THREATS = ("record", "message", "client", "coordinate", "sub-vector"), ("server", "eavesdropper", "public")


def generated(seed):
    """A run whose audits have federations of their own; each epsilon is another number."""
    draw = np.random.default_rng(seed)
    fresh = iter(draw.permutation(np.arange(1001, 9999)) / 1000)
    run = double.checked_run() if seed % 2 else double.full_run()

    def audit(record):
        if draw.random() < 0.2:
            return None
        own = record.one_round if draw.random() < 0.5 else record.whole_run
        alike = draw.random() < 0.3
        claimed, proved = (own.epsilon, own.proved.epsilon) if alike else sorted((next(fresh), next(fresh)))
        lower, rounds = next(fresh), int(draw.integers(1, 9))
        terms = {"unit": own.unit if alike else str(draw.choice(UNITS)), "delta": own.delta if alike else 1e-7}
        terms |= {"horizon": own.horizon if alike else str(draw.choice(["one round", "whole run"])), "rounds": rounds}
        terms |= {"clients": int(draw.integers(3, 99)), "threat": str(draw.choice(THREATS)), "strict": lower}
        terms |= {"confidence": float(draw.choice([0.9, 0.95, 0.99])), "epsilon_lower": lower}
        terms["verdict"] = "BROKEN" if claimed is not None and lower > claimed else "HOLDS"
        return double.audit(claimed, proved, lower, **{k: v for k, v in terms.items() if k != "epsilon_lower"})

    return with_trainings(run, lambda record: dataclasses.replace(record, audited=audit(record)))


def audits_of(run):
    return [record.audited for record in run.trainings.values() if record.audited]


@pytest.mark.parametrize("seed", range(12))
def test_an_audit_stands_on_the_page_only_beside_the_claim_and_the_proof_of_its_own_federation(seed):
    run, shown = generated(seed), 0
    for row in content(claims(Analysis(run))).rows:
        for line in row.lines:
            if line.audited is None:
                continue
            shown_numbers = line.audited.epsilon.split()
            beside = [audit for audit in audits_of(run) if short(audit.epsilon_lower) in shown_numbers]
            assert beside, line.audited.epsilon
            shown += 1
            for audit in beside:
                known = {number(audit.claimed), number(audit.proved)}
                assert {line.claimed.epsilon.split()[0], line.proved.epsilon.split()[0]} <= known
                assert audit.threat in line.audited.scope
                assert audit.horizon in line.audited.notes[0]
                assert audit.unit in line.audited.notes[0]
                assert f"{audit.clients} clients" in line.audited.notes[1]
                assert f"{audit.confidence:.0%}"[:2] in line.audited.scope
    assert shown > 3


@pytest.mark.parametrize("seed", range(12))
def test_a_reason_and_a_line_of_the_terminal_name_an_audit_with_its_own_claim_and_proof(seed):
    run = generated(seed)
    reasons = [claim.reason for record in run.trainings.values() for claim in checked(record)]
    text, counted = " ".join([*reasons, *plain(run).split()]), 0
    for audit in audits_of(run):
        words = f"audited ≥ {short(audit.epsilon_lower)} "
        counted += text.count(words)
        assert text.count(words) == text.count(stated(audit))
    assert counted == text.count("audited ≥") > 2


@pytest.mark.parametrize("seed", range(12))
def test_a_row_of_the_download_has_the_terms_of_its_own_number(seed):
    run = generated(seed)
    rows = [row for row in run.frame().to_dict("records") if str(row["quantity"]).startswith("audit")]
    known = {
        (quantity, value): audit
        for audit in audits_of(run)
        for quantity, value in (
            ("audited_epsilon", audit.epsilon_lower),
            ("audit_claimed_epsilon", audit.claimed),
            ("audit_proved_epsilon", audit.proved),
        )
        if value not in (None, *(c.epsilon for r in run.trainings.values() for c in (r.one_round, r.whole_run)))
    }
    hits = 0
    for row in rows:
        audit = known.get((row["quantity"], row["value"]))
        if audit is not None:
            hits += 1
            terms = (audit.unit, audit.horizon, audit.threat, audit.clients, audit.rounds)
            assert terms == tuple(row[key] for key in ("privacy_unit", "horizon", "adversaries", "clients", "rounds"))
    assert hits > 3


@pytest.mark.parametrize(
    "command",
    ["dp-fedavg", "udp-crd --rounds 3", "sqsgd", "dp-sgd --rounds 2", "jopeq-t", "ota --threat colluding-server"],
)
@pytest.mark.ci("udp-crd --rounds 3", "dp-sgd --rounds 2", "ota --threat colluding-server")
def test_the_three_lines_of_a_command_have_one_unit_delta_and_horizon(command):
    found = call("audit", *command.split(), "--trials", "60")
    lines = {line.split()[0]: line for line in found.output.splitlines() if line.split()[:1]}
    claimed, proved, audited = (lines[word] for word in ("claimed", "proved", "audited"))
    unit = re.search(r" per ([\w-]+)", claimed)[1]
    assert f" per {unit}" in audited
    assert f" per {unit}" in proved
    terms = re.search(r"(, delta [^,]+, (one round|whole run[^,]*))", claimed)[1]
    assert terms in proved
    assert "claimed, proved and audited in the same federation" in found.output
