"""Claimed and proved epsilon: the table of claims, the charts, the download, the terminal."""

import dataclasses
import json
import math
import re

import pytest

from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.labels import part_text
from leakgauge.harness.core.result import Dropped, Flag
from leakgauge.harness.core.rows import rows as all_rows
from leakgauge.reports.charts import figures
from leakgauge.reports.charts.epsilon import SSIM, accuracy_charts, leakage_charts
from leakgauge.reports.export import to_jsonl
from leakgauge.reports.html import render
from leakgauge.reports.sections.checked import (
    BADGES,
    BY_AUDIT,
    CODES,
    brief,
    broken,
    overview,
    states,
    tally,
    verdict_of,
)
from leakgauge.reports.sections.claims import claims, place
from leakgauge.reports.sections.limits import limits
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.notation import bound, epsilon
from tests import report_fixtures as double
from tests.by_rows import by_rows
from tests.report_page import Page, complete, content, full_source, part, small, with_trainings
from tests.terminal_text import plain

POINTS, _, DITHERED, _, SAMPLED, _, GENEROUS, _ = double.CHECKED_PARTS


@pytest.fixture(scope="module")
def analysis():
    return Analysis(double.checked_run())


@pytest.fixture(scope="module")
def rows(analysis):
    return {row.defense.text: row for row in content(claims(analysis)).rows}


@pytest.fixture(scope="module")
def source():
    return render(double.checked_run())


def changed(cells, change):
    """A run with other claims, by claim and seed."""

    def both(record):
        one, whole = (change(claim, record.spec.seed) for claim in (record.one_round, record.whole_run))
        return dataclasses.replace(record, one_round=one, whole_run=whole)

    return with_trainings(double.make_run(cells), both)


def first_line(run):
    """The first line of the table of claims."""
    return content(claims(Analysis(run))).rows[0].lines[0]


def with_proved(claim, **changes):
    return dataclasses.replace(claim, proved=dataclasses.replace(claim.proved, **changes))


def test_claimed_and_proved_stand_side_by_side_with_unit_and_delta(rows):
    one, whole = rows["gaussian epsilon=4"].lines
    assert (one.horizon, one.claimed[:3]) == ("one round", ("4", "per record, δ = 1e−5", True))
    assert one.claimed.notes == ("adversary right up to 98.2 %",)
    assert one.proved == ("4", "per record, δ = 1e−5", True, (*one.claimed.notes, "analytic Gaussian, attained"))
    assert (whole.horizon, whole.claimed.epsilon, whole.proved.epsilon) == ("whole run", "11.31", "11.31")
    assert rows["laplace"].lines[1].claimed[:2] == ("32", "per coordinate, δ = 0")
    assert rows["points epsilon=2"].lines[0].proved[:2] == ("223.1", "per message, δ = 0")
    one, whole = rows["dithered epsilon=8"].lines
    assert (one.claimed.epsilon, one.proved.epsilon) == ("8", "∞")
    assert whole.proved == ("∞", "per sub-vector, δ = 1e−5", False, ("closed form, no finite bound",))
    assert rows["sampled epsilon=2"].lines[1].proved.notes[1:] == ("privacy loss distribution, upper bound",)


def test_every_verdict_is_a_badge_with_its_word(rows, source):
    found = {name: [[s.badge.words for s in line.states] for line in row.lines] for name, row in rows.items()}
    assert found["gaussian epsilon=1"] == [["HOLDS"], ["HOLDS"]]
    assert found["generous epsilon=2"] == [["LOOSE"], ["LOOSE"]]
    assert found["points epsilon=2"] == found["dithered epsilon=2"] == [["BROKEN"], ["BROKEN"]]
    assert found["sampled epsilon=2"] == [["HOLDS"], ["UNPROVED"]]
    assert found["sqsgd"] == [["NOTHING PROMISED"]]
    by_proof = [badge for name, badge in BADGES.items() if name != BY_AUDIT]
    assert len({badge.icon for badge in by_proof}) == len({badge.words for badge in by_proof}) == 7
    for badge in by_proof:
        # no claim is green before its code is audited
        tone = "info" if badge.tone == "good" else badge.tone
        shown = f'<span class="verdict {tone}"><i aria-hidden="true">{badge.icon}</i>{badge.words}</span>'
        assert (shown in source) == (badge.words not in ("VACUOUS", "AUTHOR'S WORD"))
    assert part(source, "claims").count("code NOT AUDITED") == sum(len(row.lines) for row in rows.values())
    assert rows["points epsilon=2"].lines[0].reason.startswith("a message has 113 points of one update")
    assert rows["no defense"].lines[0].reason == "The update is sent as it is."


@pytest.mark.parametrize("code", CODES)
def test_a_claim_is_green_only_if_it_holds_and_its_code_is_consistent(code):
    audit = dataclasses.replace(double.audit(2.0, 2.0, 1.0, "record"), code=code)
    run = double.checked_run()
    audited = {key: dataclasses.replace(record, audited=audit) for key, record in run.trainings.items()}
    found = content(claims(Analysis(dataclasses.replace(run, trainings=audited))))
    (row,) = [row for row in found.rows if row.defense.text == "gaussian epsilon=1"]
    for line in row.lines:
        assert [state.badge.words for state in line.codes] == [f"code {code}"]
        assert [state.badge.tone for state in line.states] == ["good" if code == "CONSISTENT" else "info"]


def test_the_page_holds_all_of_it_and_no_infinite_number_by_name(source):
    page = complete(source)
    for text in (
        "Claimed in an article, Algorithm 1. Neighbors: add-remove. Against participant and public.",
        "ε = ∞ per client, δ = 1e−5, against server, colluding-server and eavesdropper, one round and whole run "
        "(by definition, no finite bound): messages are clipped and sent without noise.",
        "the server is honest and reveals no message",
        "No epsilon in this report is audited",
        "Never compare ε of different units: here per record, per coordinate, per message, per sub-vector, per client.",
    ):
        assert text in page.text
    assert not re.search(r"proves or audits|∞[^.]{0,30}HOLDS", page.text)


def test_an_infinite_epsilon_never_holds():
    wrong = dataclasses.replace(double.claim_of(double.NONE, "one round"), verdict="HOLDS")
    assert verdict_of(wrong) == "NOTHING PROMISED"
    made = changed(small(double.NONE), lambda claim, _: dataclasses.replace(claim, verdict="HOLDS"))
    assert [state.badge.words for state in first_line(made).states] == ["NOTHING PROMISED"]
    assert overview(Analysis(made)) == "No defense in this report promises a finite epsilon."
    assert "HOLDS" not in plain(made)


def test_every_line_names_its_defense_its_numbers_and_its_worst_verdict_before_it_is_opened(rows, source):
    lines = [(row, line) for row in rows.values() for line in row.lines]
    summaries = re.findall(r"<summary>\n(<span class=\"who.*?)</summary>", source, re.S)
    assert len(summaries) == len(lines) == 2 + 2 * 11  # one for what promises nothing, two for what promises
    for (row, line), summary in zip(lines, summaries, strict=True):
        page = Page(summary)
        assert page.text.startswith(f"{row.defense.name} ")
        assert f"{line.horizon} · one {line.unit}" in page.text
        assert page.text.endswith(f"{line.states[0].badge.icon} {line.states[0].badge.words}")
        (drawn,) = [attributes for attributes in page.all("svg") if "aria-label" in attributes]
        assert drawn["aria-label"] == f"claimed {line.claimed.epsilon}, proved {line.proved.epsilon}"
    assert Page(source).text.count("claimed by the source") == 1


def test_marks_stand_at_their_epsilon_and_infinity_beyond_all_numbers(rows):
    assert [place(10.0**power) for power in (-3, -1, 0, 1, 5, 6)] == [2, 2, 16.5, 31, 89, 89]
    assert place(math.inf) == 95
    assert rows["points epsilon=2"].lines[0].marks == (2.0, pytest.approx(223.132), None)
    assert rows["dithered epsilon=2"].lines[0].marks == (2.0, math.inf, None)
    assert rows["no defense"].lines[0].marks == (None, math.inf, None)


def test_proofs_of_other_units_and_horizons_stay_apart(rows):
    assert [proof[:2] for proof in rows["laplace"].further] == [
        ("48\u00a0000", "per message, δ = 0, against every adversary, one round (closed form, attained)"),
        ("384\u00a0000", "per message, δ = 0, against every adversary, whole run (closed form, attained)"),
    ]
    (bare,) = rows["sampled epsilon=2"].further
    assert bare[0] == "∞"
    assert rows["points epsilon=2"].further == ()


def test_two_proofs_of_different_deltas_are_not_merged_over_the_seeds():
    def other(claim, seed):
        further = tuple(dataclasses.replace(proof, delta=1e-7 * seed) for proof in claim.further)
        return dataclasses.replace(claim, further=further)

    made = changed(small(double.LAPLACE[0], seeds=(0, 1)), other)
    (row,) = content(claims(Analysis(made))).rows
    assert [("1e−7" in proof[1]) for proof in row.further] == [False, True, False, True]


def test_a_study_of_one_round_has_one_line():
    cells = double.grid([double.GAUSSIAN[1]], [(double.MATCHING, double.PROBE, "server")], (0, 1),
                        federation=FederationSpec(clients=3, rounds=1))  # fmt: skip
    (row,) = content(claims(Analysis(changed(cells, lambda *_: double.claim_of(double.GAUSSIAN[1], "one round"))))).rows
    assert [line.horizon for line in row.lines] == ["one round"]


def test_a_defense_without_a_training_has_a_row():
    made = double.make_run(small(), failed=lambda cell: cell.training.defense != double.NONE)
    assert [len(row.lines) for row in content(claims(Analysis(made))).rows] == [1, 0]
    assert "no training finished" in complete(render(made)).text


def test_an_epsilon_that_differs_between_seeds_is_a_range():
    claim = double.claim_of(double.GAUSSIAN[0], "one round")
    other = dataclasses.replace(claim, epsilon=1.25)
    assert epsilon([claim, other]) == "1 to 1.25 over the seeds"
    assert epsilon([claim, dataclasses.replace(claim, epsilon=None)]) == "∞ (nothing promised)"
    assert epsilon([]) == bound([]) == "n/a"
    without = dataclasses.replace(claim.proved, epsilon=None)
    assert bound([claim.proved, without]) == "1 to ∞ over the seeds"
    assert bound([without, without]) == "∞"


def test_verdicts_that_differ_between_seeds_are_counted_the_worst_first():
    def worse(claim, seed):
        new = with_proved(claim, epsilon=9.0, reason="the second seed stopped later.")
        return dataclasses.replace(new, verdict="BROKEN") if seed else claim

    made = changed(small(double.GAUSSIAN[1], seeds=(0, 1, 2)), worse)
    line = first_line(made)
    assert [f"{s.badge.words} {s.seeds}" for s in line.states] == ["BROKEN in 2 of 3 seeds", "HOLDS in 1 of 3 seeds"]
    assert line.proved.epsilon == "4 to 9 over the seeds"
    assert line.reason == "the second seed stopped later. (1 other reason in other seeds)"
    assert tally(Analysis(made)) == {"BROKEN": 1}
    assert "✕ BROKEN in 2 of 3 seeds" in complete(render(made)).text


def test_two_epsilons_that_round_to_the_same_have_more_digits_if_the_claim_is_broken():
    def closely(claim, _):
        return dataclasses.replace(with_proved(claim, epsilon=4.0004), epsilon=4.0, verdict="BROKEN")

    line = first_line(changed(small(double.GAUSSIAN[1]), closely))
    assert (line.claimed.epsilon, line.proved.epsilon) == ("4", "4.0004")


def test_a_proof_at_another_delta_shows_its_own_and_the_numbers_of_the_verdict():
    made = changed(small(DITHERED), lambda claim, _: with_proved(claim, delta=1e-3, epsilon=5.0))
    line = first_line(made)
    assert line.proved[:2] == ("5", "per sub-vector, δ = 0.001")
    assert line.reason.startswith("claimed 2, proved ∞ a sub-vector at delta 1e-05: noise of bounded support")
    complete(render(made))


def test_broken_claims_stand_in_the_answer_at_their_defense_and_in_the_title_of_the_claims(analysis, source):
    assert broken(analysis) == "4 of 11 claims are broken"
    counts = "3 hold, 2 are loose, 4 are broken and 2 are unproved; 2 more defenses promise nothing."
    assert overview(analysis) == f"Of 11 claims, {counts}"
    assert part(source, "claims").startswith(overview(analysis))
    assert source.count('<span class="brk">claim broken</span>') == 4
    assert "claim broken" in part(source, "answer")
    alone = part(render(double.make_run(small(POINTS))), "answer")  # without a plane
    assert "✕ 1 of 1 claim is broken. See Claims" in alone


def test_a_claim_that_is_broken_over_the_whole_run_only_is_broken():
    def longer(claim, _):
        return dataclasses.replace(claim, verdict="BROKEN") if claim.horizon == "whole run" else claim

    run = changed(small(double.GAUSSIAN[1]), longer)
    assert broken(Analysis(run)) == "1 of 1 claim is broken"
    assert brief(*([getattr(t, h)] for t in run.trainings.values() for h in ("one_round", "whole_run"))) == (
        "ε 4 per record: HOLDS; whole run: BROKEN",
        "BROKEN",
    )


def test_without_a_broken_claim_the_page_says_nothing_of_one():
    assert broken(Analysis(double.full_run())) == ""
    assert "claim broken" not in full_source()
    assert 'class="brk"' not in full_source()


def test_limits_state_that_nothing_is_audited_and_which_claims_are_open(analysis):
    text = " ".join(limits(analysis))
    assert "No epsilon in this report is audited" in text
    assert "2 unproved claims may not hold: the proved upper bound is above the claim." in text
    assert "unproved" not in " ".join(limits(Analysis(double.make_run(small()))))


def test_epsilons_of_different_units_never_share_a_chart(analysis):
    setting = next(iter(analysis.settings))
    found = leakage_charts(analysis, setting, SSIM) + accuracy_charts(analysis, setting)
    assert len({chart.title for chart in found}) == len(found) == 7
    for chart in found:
        assert len(re.findall(r"per (record|coordinate|message|sub-vector|client)", chart.x_label)) == 1
        assert chart.x_label.startswith("claimed ε")
        assert ("one round" in chart.x_label) != ("whole run" in chart.x_label)


def test_a_hollow_marker_stands_where_the_proved_epsilon_differs(analysis):
    setting = next(iter(analysis.settings))
    charts = {c.title.rpartition("per ")[2]: c for c in leakage_charts(analysis, setting, SSIM)}
    marks = {s.label.split(",")[0]: [(p.x, p.proved) for p in s.points] for c in charts.values() for s in c.series}
    assert marks == {
        "gaussian": [(1.0, None), (4.0, None)],
        "generous": [(2.0, pytest.approx(1.6)), (8.0, pytest.approx(6.4))],
        "points": [(2.0, pytest.approx(223.132)), (8.0, pytest.approx(892.528))],
        "dithered": [(2.0, None), (8.0, None)],
    }  # nothing is promised by `sampled` against the server, whose attack this is
    assert "Hollow markers: proved epsilon" in charts["message"].caption
    assert "client" not in charts
    assert "(∞, BROKEN) and dithered epsilon=8 (∞, BROKEN)." in charts["sub-vector"].caption
    assert charts["message"].header[:4] == ("Defense", "ε claimed", "ε proved", "Verdict")
    assert charts["message"].rows[0][:4] == ("points epsilon=2", "2", "223.1", "BROKEN")
    whole = next(c for c in accuracy_charts(analysis, setting) if "client" in c.title)
    assert [p.proved for p in whole.series[0].points] == [pytest.approx(7.6), pytest.approx(30.4)]


def test_what_is_proved_for_another_unit_gets_no_marker_but_stands_in_the_table():
    parts = [dataclasses.replace(POINTS, parameters={"epsilon": e}) for e in (1.0, 2.0)]
    made = changed(small(*parts), lambda claim, _: with_proved(claim, unit="record"))
    analysis = Analysis(made)
    (chart,) = leakage_charts(analysis, next(iter(analysis.settings)), SSIM)
    assert [p.proved for p in chart.series[0].points] == [None, None]
    assert chart.rows[0][2] == "111.6 per record, δ = 0"


def test_a_hollow_marker_is_drawn_within_the_axes():
    def drawn(proved):
        points = (figures.Point(1.0, 0.2), figures.Point(2.0, 0.6, None, None, proved))
        series = (figures.Series("one", points),)
        return figures.svg(figures.Chart("a", "t", "x", "y", series, "", "", (), (), log_x=True), prefix="p-")

    marker = re.compile(r'<use [^>]*fill-opacity="0" class="k-s1"')
    assert (len(marker.findall(drawn(200.0))), len(marker.findall(drawn(None)))) == (1, 0)
    assert (">200<" in drawn(200.0), ">200<" in drawn(None)) == (True, False)
    assert "<title>one: proved 200, y 0.6</title>" in drawn(200.0)
    assert [drawn(proved).count("<title>one: ") for proved in (200.0, None)] == [3, 2]


def test_the_download_has_the_proved_epsilon(analysis):
    frame = analysis.run.frame()

    def rows(part, quantity, horizon="whole run"):
        chosen = (frame.defense == part_text(part)) & (frame.quantity == quantity) & (frame.horizon == horizon)
        return frame[chosen].to_dict("records")

    claimed, proved = (rows(POINTS, f"{name}_epsilon", "one round")[0] for name in ("claimed", "proved"))
    assert (claimed["value"], claimed["verdict"]) == (2.0, "BROKEN")
    assert claimed["note"].startswith("claimed 2, proved 223.132 a message: a message has 113")
    assert (proved["value"], proved["low"], proved["high"]) == (pytest.approx(223.132),) * 3
    assert (proved["privacy_unit"], proved["method"]) == ("message", "closed form")
    assert claimed["adversaries"] == proved["adversaries"] == " ".join(double.EVERYBODY)
    assert rows(DITHERED, "proved_epsilon")[0]["value"] == math.inf
    bare = rows(SAMPLED, "proved_epsilon")[1]
    assert (bare["value"], bare["privacy_unit"], bare["adversaries"].split()[0]) == (math.inf, "client", "server")
    verdicts = {part.name: rows(part, "claimed_epsilon")[0]["verdict"] for part in (SAMPLED, GENEROUS, double.NONE)}
    assert list(verdicts.values()) == ["UNPROVED", "LOOSE", "NOTHING PROMISED"]


def test_the_terminal_table_has_identified_images_dropped_clients_and_trainings_that_did_not_learn():
    run = double.make_run(double.grid([double.NONE, double.SQSGD], [(double.MATCHING, double.PROBE, "server")], (0, 1)))
    text = plain(run)
    assert text.count("12 of 12") == 2
    assert "no learning" not in text
    assert "dropped" not in text
    flag = Flag("no-learning", "final accuracy 0.100 is near chance")
    lost = {key: dataclasses.replace(one, flags=(flag,)) for key, one in run.trainings.items() if one.spec.seed}
    assert plain(dataclasses.replace(run, trainings=run.trainings | lost)).count("no learning in 1 of 2") == 2
    every = with_trainings(run, lambda one: dataclasses.replace(one, flags=(flag,), dropped=(Dropped(1, 3, "nan"),)))
    assert " in 1" not in plain(every)
    assert plain(every).count("no learning; 2 dropped") == 2
    assert part(render(every), "attacks").count("no learning; 2 dropped") == 2


@by_rows((40, True), (58, True), (59, False), (60, False), (61, False), (79, False), (100, False))
def test_a_narrow_terminal_shows_each_row_as_a_block_and_no_width_loses_a_word(width, blocks):
    wide, narrow = (plain(double.checked_run(), width=columns) for columns in (140, width))
    assert max(map(len, narrow.splitlines())) <= width
    assert ("Rating: Leaks" in narrow) == blocks
    words = {word for word in wide.split() if len(word) > 3 and "─" not in word}
    assert words - set(narrow.replace(":", "").split()) - set(narrow.split()) - {"Defense"} == set()


def test_the_terminal_table_has_the_claimed_epsilon_and_the_verdict():
    text = plain(double.checked_run())
    assert max(map(len, text.splitlines())) <= 100
    for words in ("ε 2 per message: BROKEN", "ε 4 per record: HOLDS", "ε 2 per record: LOOSE", "nothing promised"):
        assert words in text
    assert "ε 2 per client: HOLDS; whole run: UNPROVED" in plain(double.checked_run(), width=140)


def test_the_short_form_names_the_whole_run_where_it_comes_out_otherwise():
    one, whole = double.claim_of(SAMPLED, "one round"), double.claim_of(SAMPLED, "whole run")
    text = "ε 2 per client: HOLDS"
    assert brief([one], [whole]) == (f"{text}; whole run: UNPROVED", "UNPROVED")
    assert brief([one], [one]) == (text, "HOLDS")
    none = double.claim_of(double.NONE, "one round")
    assert brief([none], [none]) == ("nothing promised", "NOTHING PROMISED")
    assert brief([], []) == ("n/a", "")
    assert [state.badge.words for state in states([one, whole, none])] == ["UNPROVED", "HOLDS", "NOTHING PROMISED"]


def test_an_attained_epsilon_has_its_own_name_on_the_page_in_rows_and_in_the_download():
    def lowered(claim, seed):
        bounded = with_proved(claim, epsilon=3.951, tight=False, method="closed form, post-processing")
        attained = dataclasses.replace(claim.proved, epsilon=3.098, delta=claim.delta, reason="two inputs show it.")
        return dataclasses.replace(bounded, epsilon=2.0, verdict="BROKEN", attained=attained)

    run = changed(small(double.LAPLACE[0]), lowered)
    line = first_line(run)
    assert line.proved.epsilon == "3.951"
    assert line.proved.notes[1].endswith("post-processing, upper bound")
    assert line.proved.notes[-1].startswith("attained 3.098")
    assert line.reason == "two inputs show it."
    assert "attained 3.098" in render(run)
    found = [row for row in all_rows(run) if row["quantity"] in ("proved_epsilon", "attained_epsilon")]
    ends = {(row["quantity"], row["value"]): (row.get("low"), row.get("high")) for row in found}
    assert ends["attained_epsilon", 3.098] == (3.098, None)
    assert ends["proved_epsilon", 3.951] == (None, 3.951)
    exported = json.loads(to_jsonl(Analysis(run)).splitlines()[0])["one_round"]
    assert (exported["proved"]["epsilon"], exported["attained"]["epsilon"]) == (3.951, 3.098)
