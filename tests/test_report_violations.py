"""Counted assumptions beside their proof: the table of claims, its overview, the terminal, the downloads."""

import dataclasses
import json

import pytest

from leakgauge.harness.core.result import ViolationRecord
from leakgauge.reports.export import to_jsonl
from leakgauge.reports.html import render
from leakgauge.reports.sections.checked import overview
from leakgauge.reports.sections.claims import claims
from leakgauge.reports.select import Analysis
from tests import report_fixtures as double
from tests.report_page import complete, content, part, small, with_trainings
from tests.terminal_text import plain

SINGLE, CLIP = "a record is in one batch per round", "the clip bounds each record's gradient"
KEPT = ViolationRecord(CLIP, 0, 3_600_000, "coordinate", covered=False)
BROKEN = dataclasses.replace(KEPT, broken=1204)
COVERED = ViolationRecord(SINGLE, 2, 8, "round", covered=True)
NARROW = "\u00a0"


def run_of(*violations, seeds=(0,), only=None):
    """A defense whose claim HOLDS and whose code is CONSISTENT, with these counts, in one of the seeds or in all."""
    audit = double.audit(1.0, 1.0, 0.5, "record")
    return with_trainings(
        double.make_run(small(double.GAUSSIAN[0], seeds=seeds)),
        lambda one: dataclasses.replace(
            one, audited=audit, violations=violations if only in (None, one.spec.seed) else (KEPT,)
        ),
    )


def row_of(run):
    (row,) = content(claims(Analysis(run))).rows
    return row


def test_an_assumption_stands_with_its_count_in_the_run():
    row = row_of(run_of(BROKEN))
    count = f"1{NARROW}204 of 3{NARROW}600{NARROW}000 coordinates of this run (0.0334 %)"
    assert row.assumes == (SINGLE, f"{CLIP}: broken by {count}")
    assert row_of(run_of(KEPT)).assumes[1] == f"{CLIP}: holds for all 3{NARROW}600{NARROW}000 coordinates of this run"
    single = dataclasses.replace(COVERED, broken=0, of=1)
    assert row_of(run_of(single)).assumes == (f"{SINGLE}: holds for the only round of this run", CLIP)
    holds = f"{SINGLE}: broken by 2 of 8 rounds of this run (25 %); the proof still holds"
    assert row_of(run_of(COVERED)).assumes == (holds, CLIP)
    assert row_of(run_of()).assumes == (SINGLE, CLIP)
    text = complete(render(run_of(BROKEN))).text.replace(NARROW, " ")
    assert "2 assumptions, 1 broken by this run" in text
    assert f"{CLIP}: broken by {count}".replace(NARROW, " ") in text


def test_a_claim_is_green_only_if_the_run_kept_what_its_proof_needs():
    for violations, tone in (((), "good"), ((KEPT,), "good"), ((COVERED,), "good"), ((BROKEN, COVERED), "info")):
        row = row_of(run_of(*violations))
        for line in row.lines[:2]:
            assert [(state.badge.words, state.badge.tone) for state in line.states] == [("HOLDS", tone)]
            marks = [(state.badge.words, state.badge.tone, state.seeds) for state in line.unkept]
            assert marks == ([("assumption broken", "warn", "")] if tone == "info" else [])
        assert row.broken == (tone == "info")
    marked = render(run_of(BROKEN))
    assert '<span class="verdict info"><i aria-hidden="true">✓</i>HOLDS</span>' in marked
    assert '<span class="verdict warn"><i aria-hidden="true">!</i>assumption broken</span>' in marked
    assert marked.count('<details class="claim first printed">') == 1  # print shows what is inside
    kept = render(run_of(KEPT))
    assert '<span class="verdict good"><i aria-hidden="true">✓</i>HOLDS</span>' in kept
    assert "assumption broken" not in part(kept, "claims")
    assert "printed" not in part(kept, "claims")


def test_only_claims_that_make_the_assumption_are_marked():
    run = with_trainings(
        run_of(BROKEN),
        lambda one: dataclasses.replace(one, one_round=dataclasses.replace(one.one_round, assumes=(SINGLE,))),
    )
    one, whole, audit = row_of(run).lines
    assert (audit.horizon, audit.unkept) == ("one round, audit", ())
    assert (one.unkept, one.states[0].badge.tone) == ((), "good")
    assert [state.badge.words for state in whole.unkept] == ["assumption broken"]
    bare = with_trainings(run, lambda r: dataclasses.replace(r, whole_run=double.claim_of(double.NONE, "whole run")))
    assert not any(line.unkept for line in row_of(bare).lines)


def test_counts_add_up_over_the_seeds_and_the_mark_names_how_many_broke_it():
    row = row_of(run_of(BROKEN, seeds=(0, 1), only=1))
    count = f"1{NARROW}204 of 7{NARROW}200{NARROW}000 coordinates of these 2 runs (0.0167 %)"
    assert row.assumes[1] == f"{CLIP}: broken by {count}"
    assert [state.seeds for line in row.lines for state in line.unkept] == ["in 1 of 2 seeds"] * 2


@pytest.mark.parametrize(("violation", "broken"), [(BROKEN, True), (KEPT, False), (COVERED, False)])
def test_the_overview_and_the_terminal_name_a_broken_assumption(violation, broken):
    run = run_of(violation, seeds=(0, 1))
    said = overview(Analysis(run))
    assert said == "Of 1 claim, 1 holds." + (" This run broke an assumption of 1 claim." if broken else "")
    assert ("assumption broken" in plain(run)) == broken


def test_the_downloads_hold_the_counts():
    run = run_of(BROKEN, COVERED)
    expected = [
        {"assumption": CLIP, "broken": 1204, "of": 3_600_000, "what": "coordinate", "covered": False},
        {"assumption": SINGLE, "broken": 2, "of": 8, "what": "round", "covered": True},
    ]
    assert json.loads(to_jsonl(Analysis(run)).splitlines()[0])["violations"] == expected
    frame = run.frame()
    found = frame[frame.quantity == "broken"]
    assert found[["value", "n", "unit"]].values.tolist() == [[1204, 3_600_000, "coordinate"], [2, 8, "round"]]
    assert list(found.note) == [f"{CLIP}; not covered by the proof", f"{SINGLE}; covered by the proof"]
    unfinished = dataclasses.replace(run, trainings={})
    assert json.loads(to_jsonl(Analysis(unfinished)).splitlines()[0])["violations"] is None
