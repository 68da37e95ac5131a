"""Audited epsilon next to claimed and proved: the table of claims, the top of the page, the download, the terminal."""

import dataclasses
import math
import re

import pytest

from leakgauge.harness.core.labels import part_text
from leakgauge.harness.core.result import AssumedBound, StatedRecord
from leakgauge.reports.html import render
from leakgauge.reports.sections.checked import BADGES, BY_AUDIT, broken, checked, overview, tally
from leakgauge.reports.sections.claims import claims
from leakgauge.reports.sections.limits import limits
from leakgauge.reports.select import Analysis
from tests import report_fixtures as double
from tests.by_rows import by_rows
from tests.report_page import complete, content, full_source, part, with_trainings
from tests.terminal_text import plain


@pytest.fixture(scope="module")
def run():
    return double.audited_run()


@pytest.fixture(scope="module")
def page(run):
    return complete(render(run))


def rows_of(run):
    return {row.defense.text: row for row in content(claims(Analysis(run))).rows}


@pytest.fixture(scope="module")
def rows(run):
    return rows_of(run)


def with_audits(run, change):
    """The same run with other audits, by audit and seed."""
    return with_trainings(
        run, lambda one: dataclasses.replace(one, audited=one.audited and change(one.audited, one.spec.seed))
    )


def badges(row):
    return [[state.badge.words for state in line.states] for line in row.lines]


def test_a_bound_stands_with_its_confidence_its_trials_its_adversary_and_its_federation(
    rows,
):
    one, whole, audit = rows["dithered"].lines
    assert (one.audited, whole.audited) == (None, None)
    notes = "per sub-vector, δ = 1e−5, one round", "3 clients, d = 36"
    assert audit.audited == ("≥ 2.834", "95 %, n = 1000, server", True, notes)
    assert (audit.horizon, audit.claimed.epsilon, audit.proved.epsilon) == ("one round, audit", "2", "4.054")
    # where the small federation has the claim and the proof of the training, only its size is named
    points = rows["points"].lines[0].audited
    assert (points.epsilon, points.notes[1]) == ("≥ 0", "3 clients, d = 36")
    assert rows["no defense"].lines[0].audited.notes == ("per message, δ = 0, one round", "3 clients, d = 36")


def test_an_audit_stands_beside_the_claim_of_its_horizon(rows):
    one, whole, audit = rows["generous"].lines
    assert [line.horizon for line in (one, whole, audit)] == ["one round", "whole run", "whole run, audit"]
    assert (one.audited, whole.audited, audit.claimed.epsilon, audit.proved.epsilon) == (None, None, "9", "4.5")
    assert audit.audited.notes == ("per record, δ = 1e−5, whole run", "3 clients, d = 36, 5 rounds")


def test_what_promises_nothing_keeps_its_one_line_with_the_audit_on_it(rows):
    (line,) = rows["no defense"].lines
    assert line.horizon == "one round and whole run"
    assert line.audited is not None
    assert badges(rows["no defense"]) == [["NOTHING PROMISED"]]
    (other,) = rows["sqsgd"].lines
    assert other.audited is None


def test_how_an_audit_was_made_stands_below(rows):
    assert rows["generous"].audits == (
        "Audited over a whole run of 5 rounds in a separate small federation: 3 clients with 20 records each, "
        "d = 36. Neighbors: any-two-inputs, one record "
        "(distinguisher: likelihood ratio). Bound: Gaussian trade-off, assuming the distribution's family; ≥ 0.31 "
        "without assumptions about the mechanism. At 99.9 %, as a refutation needs: ≥ 1.75; these trials cannot refute "
        "an epsilon above 4.88.",
        "Code CONSISTENT: seen.",
    )
    assert rows["sqsgd"].audits == ()


def test_bounds_that_assume_a_part_of_the_distribution_stand_below_with_what_they_assume():
    def assuming(audit, seed):
        low = 270.0 + 4 * seed
        one = AssumedBound(low, low - 1, "a declared product", "message", 288.0, 36, 5000, "all coordinates")
        return dataclasses.replace(audit, assuming=(one,))

    rows = rows_of(with_audits(double.audited_run((0, 1)), assuming))
    assert rows["generous"].audits[1] == (
        "Assuming a declared product, per message: ≥ 270 to 274 over the seeds; proved 288. "
        "5\N{NO-BREAK SPACE}000 messages with each input."
    )


def test_an_audit_above_the_claim_of_its_federation_breaks_it_and_no_other_verdict_changes(
    rows,
):
    assert badges(rows["dithered"]) == [["BROKEN (audit)"], ["BROKEN"], ["BROKEN (audit)"]]
    assert badges(rows["generous"]) == [["LOOSE"], ["LOOSE"], ["HOLDS"]]
    assert badges(rows["points"]) == [["BROKEN"], ["BROKEN"]]
    assert rows["dithered"].lines[0].reason == (
        "The audited bound is above the claim for the audited federation. Proved: "
        "noise of bounded support: with chance 0.31 the two cells do not overlap."
    )


@by_rows(
    ({}, BY_AUDIT),
    ({"unit": "coordinate"}, "BROKEN"),
    ({"horizon": "two rounds"}, "BROKEN"),
    ({"claimed": 40.0, "epsilon_lower": 30.0}, "BROKEN"),  # the training claims 2
)
def test_an_audit_breaks_only_a_claim_of_its_own_unit_horizon_and_federation(changes, verdict):
    found = with_audits(double.audited_run(), lambda audit, _: dataclasses.replace(audit, **changes))
    record = next(r for r in found.trainings.values() if r.spec.defense.name == "dithered")
    assert [claim.verdict for claim in checked(record)] == [verdict, "BROKEN"]


@by_rows((1.75, "AUTHOR'S WORD"), (20.0, BY_AUDIT))
def test_a_proof_that_does_not_follow_is_an_authors_word_unless_the_claim_is_broken(lower, verdict):
    lacks = "no privacy loss can be computed from a stated distribution"
    about = {"stated": StatedRecord(0.0, None, None, 0, lacks, ()), "epsilon_lower": lower, "strict": lower}
    found = with_audits(double.audited_run(), lambda audit, _: dataclasses.replace(audit, **about))
    record = next(r for r in found.trainings.values() if r.spec.defense.name == "generous")
    one, whole = checked(record)
    assert (one.verdict, whole.verdict) == ("AUTHOR'S WORD", verdict)
    assert one.reason.endswith(f"The proof is its author's word: {lacks}.")


def test_bounds_of_several_seeds_are_a_range_and_a_missing_one_is_counted():
    def vary(audit, seed):
        return None if seed == 2 else dataclasses.replace(audit, epsilon_lower=audit.epsilon_lower + seed)

    row = rows_of(with_audits(double.audited_run((0, 1, 2)), vary))["dithered"]
    assert row.lines[2].audited.epsilon == "≥ 2.834 to 3.834 over the seeds"
    assert row.lines[2].audited.notes[-1] == "in 2 of 3 seeds"
    states = [f"{state.badge.words} {state.seeds}" for state in row.lines[0].states]
    assert states == ["BROKEN (audit) in 2 of 3 seeds", "BROKEN in 1 of 3 seeds"]
    assert len(row.audits) == 2


def test_audits_of_different_units_are_not_merged():
    def vary(audit, seed):
        return dataclasses.replace(audit, unit="message", epsilon_lower=9.0) if seed else audit

    row = rows_of(with_audits(double.audited_run((0, 1)), vary))["dithered"]
    found = [(line.audited.epsilon, line.audited.notes[0]) for line in row.lines if line.audited]
    assert found == [("≥ 2.834", "per sub-vector, δ = 1e−5, one round"), ("≥ 9", "per message, δ = 1e−5, one round")]
    assert len(row.audits) == 4


def test_a_contradiction_is_on_the_page():
    contradicted = {"code": "CONTRADICTED", "contradictions": ("too quiet",), "seen": "too quiet"}
    found = with_audits(double.audited_run(), lambda audit, _: dataclasses.replace(audit, **contradicted))
    text = complete(render(found)).text
    assert "Code CONTRADICTED: too quiet." in text
    assert "✕ code CONTRADICTED" in text


def test_every_line_of_the_page_has_its_audit_or_says_that_there_is_none(run, rows, page):
    source = render(run)
    lines = [line for row in rows.values() for line in row.lines]
    assert re.findall(r"<dt>(\w+)</dt>", source.split('id="claims"')[1].split("</section>")[0]) == [
        "claimed",
        "proved",
        "audited",
    ] * len(lines)
    assert len(lines) == 10  # two horizons of three, one line of two, two audits
    drawn = [a["aria-label"] for a in page.all("svg") if a.get("aria-label", "").startswith("claimed ")]
    assert [label.partition(", audited ")[2] for label in drawn] == [
        line.audited.epsilon if line.audited else "" for line in lines
    ]
    for text in ("audited ≥ 2.834 95 %, n = 1000, server", "✕ BROKEN (audit)", "audited no", "audited: at least"):
        assert text in page.text
    assert "No epsilon in this report is audited" not in page.text
    assert "n trials cannot show more than about log(n / 3.7)" in page.text


def test_a_report_without_audits_has_neither_the_line_nor_its_words():
    text = complete(full_source()).text
    assert "No epsilon in this report is audited" in text
    assert "<dt>audited</dt>" not in full_source()
    assert "BROKEN (audit)" not in part(full_source(), "claims")
    assert BADGES[BY_AUDIT].tone == BADGES["BROKEN"].tone


def test_the_reason_of_a_claim_that_an_audit_broke_names_the_audit_with_its_own_claim(run):
    analysis = Analysis(run)
    assert broken(analysis) == "2 of 3 claims are broken"
    (record,) = (one for one in run.trainings.values() if one.spec.defense.name == "dithered")
    assert checked(record)[0].reason.startswith(
        "audited ≥ 2.834 (95 %, n = 1000, server), claimed 2, proved 4.054 per sub-vector, δ = 1e−5, one round, "
        "3 clients, d = 36; in this study claimed 2, proved inf a sub-vector"
    )
    assert tally(analysis) == {"BROKEN": 2, "LOOSE": 1, "NOTHING PROMISED": 2}
    assert overview(analysis) == "Of 3 claims, 1 is loose and 2 are broken; 2 more defenses promise nothing."
    assert any("in a separate small federation" in text for text in limits(analysis))


def test_the_download_has_the_audit_with_its_own_claim_and_federation(run):
    rows = {(row["defense"], row["quantity"]): row for row in run.frame().to_dict("records")}
    bound = rows["dithered epsilon=2", "audited_epsilon"]
    names = ("value", "low", "n", "level", "privacy_unit", "horizon")
    assert [bound[name] for name in names] == [2.8337, 2.8337, 1000, 0.95, "sub-vector", "one round"]
    claimed, proved = (rows["dithered epsilon=2", f"audit_{name}_epsilon"] for name in ("claimed", "proved"))
    assert (claimed["value"], claimed["verdict"], proved["value"]) == (2.0, "BROKEN", 4.0545)
    assert proved["note"] == "3 clients, 1 round, d = 36"
    assert rows["no defense", "audit_claimed_epsilon"]["value"] == math.inf
    assert (part_text(double.SQSGD), "audited_epsilon") not in rows


def test_the_terminal_table_shows_which_claims_an_audit_broke(run):
    text = plain(run)
    assert max(map(len, text.splitlines())) <= 100
    assert "(audit)" in text
    assert "audited ≥ 2.834" in text
