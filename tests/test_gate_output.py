"""What the gate writes for machines and job pages."""

import dataclasses
import functools
import json
import math
import re
from xml.etree import ElementTree

import pytest

from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.gate.baseline import Baseline
from leakgauge.harness.gate.judge import Outcome, Verdict
from leakgauge.harness.gate.measure import titles
from leakgauge.harness.gate.output import annotations, as_json, escaped, headline, junit, number, signed, summary
from tests import gate_case
from tests.by_rows import by_rows
from tests.gate_case import check, measured

GAUSSIAN = PartSpec("gaussian", {"epsilon": 1.0})
MAP = PartSpec("map", {"tv": 5.0})
HOSTILE = 'a|b <script>alert("1")</script> & [x](http://x) `c` *d* \x00\x1b[31m \ud800 \u202e ]]> \\| %0A::error::, :'


measure = functools.partial(
    gate_case.measure, values=(0.2,) * 6, defense=GAUSSIAN, attack=MAP, setting="photos", aware=True
)
run_of = functools.partial(measured, commit="c" * 40)
RUN = run_of(measure(key="gaussian/map/server/ssim/000000"))
BASE = Baseline(dataclasses.replace(RUN, commit="b" * 40), "first numbers")
EACH = Outcome(
    (
        check(Verdict.FAIL, 0, images=(2,)),
        check(Verdict.INCOMPLETE, 1, before=0.1, now=None, rise=None, low=None, high=None, p=None, n=0),
        check(Verdict.NOT_COMPARABLE, 2),
        check(Verdict.INCONCLUSIVE, 3),
        check(Verdict.PASS, 4),
    ),
    (),
    ("another machine",),
)
NOTHING = Outcome((), ("other study", "other data"), ())


def cases(text):
    return list(ElementTree.fromstring(text.encode()).iter("testcase"))


def rows(text):
    """The rows of all tables, without their heads."""
    return [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| Verdict", "| ---"))]


@by_rows(
    ((check(Verdict.FAIL), check(Verdict.FAIL), check()), "Leakage increased in 2 of 3 checks"),
    (
        (check(Verdict.FAIL, metric="bits"), check(Verdict.FAIL), check(Verdict.FAIL, metric="accuracy")),
        "Leakage increased in 1, accuracy fell in 1, more bits sent in 1 of 3 checks",
    ),
    ((check(Verdict.FAIL, metric="bits"),), "More bits sent in 1 of 1 check"),
    ((check(Verdict.INCOMPLETE), check(Verdict.INCONCLUSIVE)), "Incomplete: 1 of 2 checks could not be made"),
    ((check(Verdict.NOT_COMPARABLE), check()), "Not comparable: 1 of 2 checks"),
    ((check(Verdict.INCONCLUSIVE), check()), "Inconclusive: 1 of 2 checks"),
    ((check(), check()), "No increase detected in 2 checks"),
    ((), "Nothing was checked"),
)
def test_the_headline_counts_the_worst_verdict(checks, expected):
    assert headline(Outcome(checks, (), ())) == expected
    assert headline(Outcome(checks, ("other data",), ())) == "Not comparable: nothing was checked"


def test_numbers_have_no_minus_zero_and_no_nan():
    assert [number(-0.0001), number(None), number(math.nan), number(-0.5)] == ["0.000", "n/a", "n/a", "-0.500"]
    assert [signed(0.0001), signed(0.065), signed(-0.065), signed(None)] == ["0.000", "+0.065", "-0.065", "n/a"]


def test_every_verdict_has_its_element():
    found = cases(junit(EACH, RUN))
    tags = [[child.tag for child in case] for case in found]
    assert tags == [["failure"], ["error"], ["skipped"], ["skipped"], ["system-out"]]
    assert [case.get("name") for case in found] == [one.key for one in EACH.checks]
    assert found[0][0].get("message") == "reason 0"
    assert "change +0.065 (+0.047 to +0.083)" in str(found[0][0].text)
    assert "now n/a" in str(found[1][0].text)

    assert [case.get("classname") for case in found][:2] == ["gaussian epsilon=1", "gaussian"]
    suite = ElementTree.fromstring(junit(EACH, RUN).encode())[0]
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["5", "1", "1", "2"]
    assert suite.findtext("system-err") == "another machine"


def test_problems_are_errors():
    found = [(case[0].tag, case[0].get("message")) for case in cases(junit(NOTHING, RUN))]
    assert found == [("error", "other study"), ("error", "other data")]


def test_changes_that_nobody_accepted_are_errors_beside_the_checks():
    found = Outcome((check(),), (), (), ("limit", "a key"))
    assert headline(found) == "Not accepted: 2 changes of the baseline, the rules or the code, with 1 check"
    assert headline(Outcome((check(Verdict.FAIL),), (), (), ("limit",))) == "Leakage increased in 1 of 1 check"
    shown = [(case[0].tag, case[0].get("type"), case[0].get("message")) for case in cases(junit(found, RUN))[:2]]
    assert shown == [("error", "NOT ACCEPTED", "limit"), ("error", "NOT ACCEPTED", "a key")]
    assert "- **Not accepted:** a key" in summary(found, RUN, BASE)
    assert annotations(found)[0] == "::error title=leakgauge%3A not accepted::limit"
    content = json.loads(as_json(found, RUN, BASE))
    assert (content["verdict"], content["exit_code"], content["unaccepted"]) == ("NOT ACCEPTED", 6, ["limit", "a key"])


def test_hostile_names_leave_the_xml_whole():
    odd = check(Verdict.FAIL, key=HOSTILE, name=HOSTILE, reason=HOSTILE + "\nsecond line")
    text = junit(
        Outcome((odd,), (), (HOSTILE,)), run_of(measure(key=HOSTILE, defense=PartSpec(HOSTILE)), study=HOSTILE)
    )
    (case,) = cases(text)
    for said in (case.get("name"), case.get("classname"), case[0].get("message"), case[0].text):
        assert said is not None
        assert '<script>alert("1")</script> &' in said
        assert not re.search("[\x00\x1b\ud800\u202e]", said)


def test_the_verdict_comes_first_then_what_did_not_pass_then_the_rest_folded():
    text = summary(EACH, RUN, BASE)
    assert text.splitlines()[0] == "## ✕ leakgauge: Leakage increased in 1 of 5 checks"
    above, below = text.split("<details>")
    assert [row.split(" | ")[0] for row in rows(above)] == [
        "| ✕ leakage increased (image 3)",
        "| ! incomplete",
        "| ≠ not comparable",
        "| ? inconclusive",
    ]
    assert [row.split(" | ")[0] for row in rows(below)] == ["| ✓ no increase detected"]
    assert "0.148 | 0.213 | +0.065 (+0.047 to +0.083) | 16 | 0.021 | reason 0" in above
    assert "another machine" in above
    assert "first numbers" in below
    assert "b" * 40 in below
    assert "left out" not in text


def test_a_summary_of_problems_has_no_empty_table():
    text = summary(NOTHING, RUN, BASE)
    assert "- **Not comparable:** other study" in text
    assert "| Verdict" not in text


def test_a_hostile_name_ends_no_cell_and_opens_no_element():
    odd = check(Verdict.FAIL, 1, name=HOSTILE, reason=HOSTILE + "\n| x |")
    (row,) = rows(summary(Outcome((odd,), (), (HOSTILE,)), RUN, BASE))
    assert len(re.split(r"(?<!\\)(?:\\\\)*\|", row)) == 8 + 2
    assert "<script>" not in row
    assert "[x](" not in row.replace("\\[", "")
    assert escaped("a|b\n<i> *x* \\") == "a\\|b &lt;i&gt; \\*x\\* \\\\"


def test_a_long_summary_is_cut_at_a_row_and_counts_what_it_leaves_out():
    failed = tuple(check(Verdict.FAIL, at, reason="ü" * 300) for at in range(1, 2001))
    text = summary(Outcome((*failed, check(Verdict.PASS, 2001)), (), ("w" * 9000,) * 50), RUN, BASE)
    found = rows(text)
    assert 890_000 < len(text.encode()) < 900_000
    assert all(row.endswith(" |") and row.count(" | ") == 7 for row in found)
    assert f"{2001 - len(found)} checks left out here" in text
    assert all(f"map {at}:" in row for at, row in enumerate(found, 1))
    assert text.rstrip().endswith("</details>")


@pytest.mark.parametrize("most", [2_000, 3_000, 4_000, 5_000])
def test_a_summary_is_never_longer_than_allowed(most):
    checks = tuple(check(Verdict.FAIL if at < 15 else Verdict.PASS, at) for at in range(40))
    text = summary(Outcome(checks, (), ()), RUN, BASE, most=most)
    assert most - 500 < len(text.encode()) <= most
    assert f"{40 - len(rows(text))} checks left out" in text


def test_the_json_holds_verdict_exit_code_sources_and_every_check():
    said = json.loads(as_json(EACH, RUN, BASE))
    assert (said["schema"], said["verdict"], said["exit_code"]) == (1, "FAIL", 1)
    assert (said["now"]["commit"], said["baseline"]["commit"]) == ("c" * 40, "b" * 40)
    assert said["baseline"]["reason"] == "first numbers"
    assert [one["verdict"] for one in said["checks"]] == [one.verdict.value for one in EACH.checks]
    assert said["checks"][0]["images"] == [2]
    assert said["checks"][0]["defense"] == "gaussian epsilon=1"
    assert said["checks"][1]["defense"] is None
    assert said["warnings"] == ["another machine"]


def test_the_exit_code_follows_what_inconclusive_means():
    outcome = Outcome((check(Verdict.INCONCLUSIVE),), (), ())
    assert json.loads(as_json(outcome, RUN, BASE))["exit_code"] == 0
    assert json.loads(as_json(outcome, RUN, BASE, inconclusive_fails=True))["exit_code"] == 3


def test_a_number_that_is_none_is_null_and_the_order_is_fixed():
    outcome = Outcome((check(Verdict.FAIL, now=math.nan, rise=math.inf, name=HOSTILE),), (), ())
    text = as_json(outcome, RUN, BASE)
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["checks"][0]["now"] is None
    assert text == as_json(outcome, RUN, BASE)
    assert text.isascii()


def test_annotations_are_worst_first_with_their_levels():
    found = annotations(EACH)
    levels = ["::error ", "::error ", "::warning ", "::warning ", "::warning "]
    assert [line.split("title=")[0] for line in found] == levels
    assert found[0] == ("::error title=leakgauge%3A leakage increased::gaussian under map 0: ssim: reason 0")
    assert annotations(NOTHING)[1] == "::error title=leakgauge%3A not comparable::other data"
    assert annotations(Outcome((check(),), (), ())) == []


def test_there_are_at_most_ten_and_the_last_counts_the_rest():
    def many(count):
        return annotations(Outcome(tuple(check(Verdict.FAIL, at) for at in range(count)), (), ("note",)))

    assert len(many(9)) == 10
    assert "more" not in many(9)[-1]
    assert len(many(30)) == 10
    assert many(30)[-1] == "::error title=leakgauge::22 more: see the summary"


def test_a_text_cannot_end_a_command_or_begin_another():
    odd = check(Verdict.FAIL, name="100 %, a: b", reason="first\r\n::error::second", metric="auc")
    (line,) = annotations(Outcome((odd,), (), ()))
    assert line.endswith("::100 %25, a: b: first%0D%0A::error::second")
    assert "\n" not in line
    assert "\r" not in line
    assert line.split("::")[1] == "error title=leakgauge%3A leakage increased"


def test_names_say_only_the_parameters_in_which_measures_differ():
    parts = [PartSpec("gaussian", {"clip": 1.0, "epsilon": epsilon}) for epsilon in (1.0, 4.0)]
    one, two = (measure(key=key, defense=part) for key, part in zip("ab", parts, strict=True))
    assert titles([one, two]) == {
        "a": "gaussian epsilon=1 under map, server, probe: ssim",
        "b": "gaussian epsilon=4 under map, server, probe: ssim",
    }


def test_names_say_the_setting_where_there_are_several_and_never_coincide():
    one, two = measure(key="a/000001"), measure(key="b/000002", setting="digits")
    assert titles([one, two])["b/000002"].endswith(": ssim (digits)")
    assert list(titles([one, measure(key="b/000002")]).values()) == [
        f"gaussian under map, server, probe: ssim [{end}]" for end in ("000001", "000002")
    ]


def test_images_of_several_seeds_are_told_apart():
    key = EACH.checks[0].key
    seeded = run_of(measure(key=key, items=("d0", "d1", "d2"), values=(0.2,) * 18))
    outcome = Outcome((check(Verdict.FAIL, 0, images=(0, 7)),), (), ())
    assert "images 1 (seed no. 1), 2 (seed no. 2)" in summary(outcome, seeded, BASE)


@pytest.mark.parametrize("verdict", list(Verdict))
def test_nothing_is_called_safe_or_private(verdict):
    for metric in ("ssim", "auc", "epsilon", "bits", "accuracy"):
        outcome = Outcome((check(verdict, metric=metric),), (), ())
        said = summary(outcome, RUN, BASE) + junit(outcome, RUN) + as_json(outcome, RUN, BASE) + headline(outcome)
        assert not re.search(r"\b(safe|private|secure)", said, re.IGNORECASE)
