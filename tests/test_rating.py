"""One rating of a defense against an adversary, the same on page, terminal, exports, gate and JUnit."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from xml.etree import ElementTree

import pytest
from scipy import stats as scipy_stats

from leakgauge.harness.core import stats
from leakgauge.harness.core.cell import PartSpec, Target
from leakgauge.harness.core.rating import MOST_HIDDEN, Ratings, Word, messages_needed
from leakgauge.harness.core.result import Estimate, Flag
from leakgauge.harness.gate.judge import Outcome
from leakgauge.harness.gate.measure import measured
from leakgauge.harness.gate.output import junit
from leakgauge.reports.export import to_jsonl
from leakgauge.reports.html import page
from leakgauge.reports.sections import sections
from leakgauge.reports.sections.answer import answer
from leakgauge.reports.sections.ratings import WORDS
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.tables import to_matrix
from tests import report_fixtures as double
from tests.by_rows import by_rows
from tests.report_page import Page, part, with_trainings
from tests.terminal_text import plain

PARTS = {"none": double.NONE, "laplace": double.LAPLACE[0], "sqsgd": double.SQSGD}
PARTS |= {name: PartSpec(name, {"epsilon": 2.0}) for name in ("dithered", "sampled")}
ATTACKS = {part.name: part for part in (double.MATCHING, double.MAP, double.THRESHOLD, double.LINEUP, double.PRIOR)}
MEMBERS = Target("members", count=200)
LEAKS, SOME, WEAK, HIDDEN = Word
NO_LINEUP, ONLY = "no lineup ran", "no lineup can tell what this adversary cannot learn"
BETTER, HALF = "a better attack may exist", "100 of 200 people named among 2"


def share(name, hits, n, among, sizes=()):
    """A share with its test, of records of messages of these sizes."""
    values = [1.0] * hits + [0.0] * (n - hits)
    found = stats.of_items(name, values)
    return stats.against(stats.over_batches(found, sizes) if sizes else found, 1 / among)


def identified(hits, n=6, among=100):
    return (share("identification", hits, n, among),)


def lineup(two=100, many=2, n=200, *, among=100, gap=0.0, nats=0.0, exact=True):
    """So many records of n named among two and among all; the mean of the gap and of the log likelihood ratio."""
    found = [share("named", many, n, among), share("named@2", two, n, 2)]
    found += [stats.mean("nats", [nats - 0.1, nats + 0.1] * (n // 2))]
    return (*found, stats.mean("posterior_gap", [gap - 0.01, gap + 0.01] * (n // 2)))[: None if exact else -1]


def members(p):
    return (dataclasses.replace(double.auc_of(0.6), p=p),)


def run_of(found, *, threat="server", seeds=(0,), failed=(), more=(), flags=()):
    """A run with these estimates, or what makes them of a cell, by defense and attack, and `more` questions."""
    attacks = dict.fromkeys(name for each in found.values() for name in each)
    questions = [(ATTACKS[name], MEMBERS if name == "threshold" else double.PROBE, threat) for name in attacks]
    cells = double.grid([PARTS[name] for name in found], [*questions, *more], seeds)

    def made(cell):
        one = found[cell.training.defense.name].get(cell.attack.name, ())
        return double.with_estimates(double.result_of(cell), *(one(cell) if callable(one) else one))

    run = double.make_run(cells, make=made, failed=lambda cell: cell.attack.name in failed)
    return with_trainings(run, lambda record: dataclasses.replace(record, flags=flags))


ALL = "6 of 6 people identified among 100"
WEAK_1 = "The test of sqsgd is too weak to tell"
OPEN = {
    LEAKS: "Without a defense, this training leaks",
    WEAK: "Too weak to tell: the attacks on this training without a defense find nothing",
    HIDDEN: "These records are hidden even without a defense",
}
NAIVE, TABLE = {"matching": identified(0)}, (stats.mean("columns", [0.9, 0.8] * 20), *identified(30, 40))
TWO = {"laplace": {"matching": identified(6), "map": ()}, "sqsgd": {"matching": identified(0), "map": ()}}
SUMS = {"laplace": {"lineup": lineup(150, 80)}, "sqsgd": {"lineup": lineup()}}
SEEDS = {"matching": lambda cell: identified(6 * (cell.training.seed == 0))}
LOST = (Flag("no-learning", "near chance"),)
SITUATIONS = {
    "an app that leaks": ({"none": {"matching": identified(6)}}, {}, [("no defense", LEAKS, ALL)], OPEN[LEAKS]),
    "an app that hides": ({"none": {"lineup": lineup()}}, {}, [("no defense", HIDDEN, HALF)], OPEN[HIDDEN]),
    "a weak attack on it": ({"none": {"matching": identified(1)}}, {}, [("no defense", WEAK, NO_LINEUP)], OPEN[WEAK]),
    "a naive attack alone": ({"sqsgd": NAIVE}, {}, [("sqsgd", WEAK, NO_LINEUP)], WEAK_1),
    "a model that learned nothing": (
        *({"sqsgd": NAIVE | {"lineup": lineup()}}, {"flags": LOST}),
        *([("sqsgd", WEAK, "the model did not learn")], WEAK_1),
    ),
    "central privacy against the server": (
        *({"sampled": {"matching": identified(6)}}, {}, [("sampled", LEAKS, ALL, True)]),
        "1 defense promises nothing against these adversaries",
    ),
    "sums for an aggregator": (
        *(SUMS, {"threat": "aggregator"}),
        [("laplace", LEAKS, "80 of 200 people named among 100"), ("sqsgd", HIDDEN, HALF)],
        "1 of 2 defenses leaks, 1 hides these records",
    ),
    "records of a table": (
        *({"sqsgd": {"matching": TABLE}}, {}, [("sqsgd", LEAKS, "30 of 40 people identified among 100")]),
        "1 of 1 defense leaks",
    ),
    "members that are found": (
        *({"sqsgd": {"threshold": members(1e-4)}}, {"threat": "public"}, [("sqsgd", SOME, "AUC 0.600: members found")]),
        "1 of 1 defense leaks in part",
    ),
    "members that are not": (
        *({"sqsgd": {"threshold": members(0.3)}}, {"threat": "public"}, [("sqsgd", WEAK, ONLY)], WEAK_1),
    ),
    "failed cells": (
        *(TWO, {"failed": ["map"]}),
        [("laplace", LEAKS, ALL), ("sqsgd", WEAK, f"of 2 cells, 1 failed; {NO_LINEUP}")],
        "1 of 2 defenses leaks, the test is too weak to tell about 1",
    ),
    "a broken claim that hides": (
        *({"dithered": {"lineup": lineup()}}, {}, [("dithered", HIDDEN, HALF)]),
        "1 of 1 defense hides these records",
    ),
    "seeds that disagree": (
        *({"sqsgd": SEEDS}, {"seeds": (0, 1)}, [("sqsgd", LEAKS, "6 of 12 people identified among 100")]),
        "1 of 1 defense leaks",
    ),
}
"""Estimates and terms of a run, its ratings (defense, word, reason, whether nothing is promised), and the headline."""


def html_of(analysis):
    """The first three sections of the page: its charts would take most of the time."""
    return page("x", [s for s in sections() if s.id in ("answer", "claims", "attacks")], analysis)


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_surface_has_the_rating_of_the_core(name):
    found, terms, rows, sentence = SITUATIONS[name]
    run, who = run_of(found, **terms), terms.get("threat", "server")
    analysis, wanted = Analysis(run), {row[0]: (*row[1:], False)[:3] for row in rows}
    names = {key: label.text for key, label in analysis.defenses.items()}
    core = {names[one.defense]: one for one in analysis.ratings.all}
    assert {key: (one.word, one.reason, one.excluded) for key, one in core.items()} == wanted
    assert {one.adversary for one in core.values()} == {who}
    badges = {key: WORDS[word] for key, (word, _, _) in wanted.items()}
    out = {key: " (not promised)" * excluded for key, (_, _, excluded) in wanted.items()}

    first, text = answer(analysis), html_of(analysis)
    assert (first["sentence"], first["badge"]) == (sentence, min(badges.values(), key=[*WORDS.values()].index))
    assert Page(text).text.count(sentence) == 1
    column = [Page(cell).text for cell in re.findall(r'<td class="sum">(.*?)</td>', text)]
    assert column == [b.words + f" {who}, not promised" * bool(out[key]) for key, b in badges.items()]

    terminal = [re.split(r"\s{2,}", line.strip())[:2] for line in plain(run, width=200).splitlines()]
    markdown = [line.strip("| ").split(" | ") for line in to_matrix(analysis).splitlines()]
    assert sentence in " ".join(plain(run).split())
    for key, (_, reason, excluded) in wanted.items():
        assert [key, badges[key].words + out[key]] in terminal
        ratings, matrix = (row for row in markdown if row[0] == key)
        assert ratings[1] == badges[key].words + out[key]
        why = ", ".join([who, *["not promised"] * excluded, reason])
        assert matrix[-1] == f"{badges[key].words} ({why})"
    objects = [json.loads(line)["rating"] for line in to_jsonl(analysis).splitlines()]
    for cell, one in zip(run.cells, objects, strict=True):
        assert (one["word"], one["reason"], one["excluded"]) == wanted[names[cell.training.defense.key]]
        assert one["adversary"] == who
    now = measured(run)
    assert now.ratings == tuple(
        (key, who, f"{word}{', not promised' * excluded}: {reason}") for key, (word, reason, excluded) in wanted.items()
    )
    suite = ElementTree.fromstring(junit(Outcome((), (), ()), now).encode())
    properties = {one.attrib["name"]: one.attrib["value"] for one in suite.iter("property")}
    assert properties == {f"rating of {key} against {who}": words for key, _, words in now.ratings}


def test_a_broken_claim_stands_beside_the_rating_and_does_not_change_it():
    run = run_of({"dithered": {"lineup": lineup()}})
    text = html_of(Analysis(run))
    assert "✕ 1 of 1 claim is broken" in part(text, "answer")
    assert "dithered claim broken" in part(text, "attacks")
    assert "ε 2 per sub-vector: BROKEN" in plain(run)


def rated(attacks, **changes):
    """Word and reason of the only rating."""
    (one,) = Ratings(run_of({"sqsgd": attacks}, **changes)).all
    return one.word, one.reason


@by_rows(
    ({}, HIDDEN, HALF),
    ({"exact": False}, WEAK, f"the defense's likelihood is not exact: {BETTER}"),
    ({"gap": 0.02}, WEAK, f"the defense's likelihood contradicts its messages: {BETTER}"),
    ({"two": 108}, WEAK, f"108 of 200 named among 2: {messages_needed(0.54)} messages would do"),
    ({"two": 20, "many": 0, "n": 40}, WEAK, f"20 of 40 named among 2: {messages_needed(0.5)} messages would do"),
    ({"two": 125}, SOME, "125 of 200 people named among 2"),
    ({"many": 10}, LEAKS, "10 of 200 people named among 100"),
    ({"many": 60, "among": 20}, LEAKS, "60 of 200 people named among 20"),
    ({"many": 60, "among": 10}, SOME, "60 of 200 people named among 10"),
    ({"nats": 2.0}, SOME, "half of the people are named among 100 after 7 rounds, by the messages seen"),
    ({"nats": 1.0}, HIDDEN, HALF),  # after 13 rounds, of 8
    ({"two": 2, "many": 0, "n": 4, "nats": 2.0}, WEAK, "2 of 4 named among 2: 104 messages would do"),
    ({"nats": 2.0, "among": 2, "many": 100}, HIDDEN, HALF),  # a half is chance
)
def test_a_lineup_decides(changes, word, reason):
    assert rated({"lineup": lineup(**changes)}) == (word, reason)


@by_rows((38, "server", SOME), (12, "server", WEAK), (38, "server+labels", WEAK))
def test_labels_count_if_they_are_found_more_often_than_by_the_floor_and_not_granted(hits, threat, word):
    right = {"matching": hits, "prior": 10}
    found = {name: (stats.of_items("label_accuracy", [1.0] * k + [0.0] * (40 - k)),) for name, k in right.items()}
    assert rated(found, threat=threat) == (word, "38 of 40 labels right" if word is SOME else NO_LINEUP)


@by_rows((0, LEAKS), (6, WEAK))
def test_a_guess_without_protected_data_that_identifies_as_many_is_no_leak(guessed, word):
    assert rated({"matching": identified(6, 8), "prior": identified(guessed, 8)})[0] == word


@by_rows((True, (LEAKS, "4 of 4 people identified among 100")), (False, (WEAK, NO_LINEUP)))
def test_of_a_batch_only_the_first_record_counts(first, expected):
    values = [float((at % 8 == 0) == first) for at in range(32)]
    one = stats.over_batches(stats.of_items("identification", values), [8] * 4)
    assert rated({"matching": (stats.against(one, 0.01),)}) == expected


@by_rows((1, SOME), (2, WEAK), (30, WEAK))
def test_one_small_p_among_many_tests_is_nothing(tests, word):
    targets = [(double.THRESHOLD, dataclasses.replace(MEMBERS, client=at), "public") for at in range(1, tests)]
    found = {"threshold": lambda cell: members(0.02 if cell.target.client is None else 0.9)}
    assert rated(found, threat="public", more=targets)[0] == word


def test_adversaries_are_rated_apart_side_knowledge_is_none_and_powers_are():
    more = [(double.MATCHING, double.PROBE, who) for who in ("aggregator", "server+labels", "server+broadcast")]
    found = {"sqsgd": {"matching": lambda cell: identified(6 * (cell.threat == "server+labels"))}}
    ratings = Ratings(run_of(found, more=more))
    assert {one.adversary: (one.word, one.reason) for one in ratings.all} == {
        "server": (LEAKS, "6 of 6 people identified among 100"),
        "aggregator": (WEAK, NO_LINEUP),
        "server+broadcast": (WEAK, ONLY),
    }
    who = [ratings.of_cell(cell).adversary for cell in ratings.run.cells]
    assert who == ["server", "aggregator", "server", "server+broadcast"]


def test_results_of_older_versions_are_rated():
    def older(estimates):
        chance = Estimate("named_chance", 1 / 50, None, None, 0, "")
        return [*(dataclasses.replace(one, chance=None, p=None) for one in estimates), chance]

    assert rated({"lineup": older(lineup(many=40))}) == (LEAKS, "40 of 200 people named among 50")
    assert rated({"lineup": older(lineup(many=4))}) == (HIDDEN, HALF)
    assert rated({"matching": older(identified(6))}) == (LEAKS, "6 of 6 people identified among 100")


def test_the_tests_of_shares_are_those_of_scipy():
    for hits, n, p in ((0, 5, 0.1), (1, 1, 0.5), (3, 40, 0.01), (40, 40, 0.5), (7, 200, 0.02)):
        exact = scipy_stats.binomtest(hits, n, p, alternative="greater").pvalue
        assert stats.binomial(hits, n, p) == pytest.approx(exact, rel=1e-9)
        assert share("named", hits, n, 1 / p).p == pytest.approx(exact, rel=1e-9)
    for table in ((3, 4, 0, 4), (10, 40, 10, 40), (0, 5, 3, 5), (38, 40, 10, 40), (5, 5, 1, 30)):
        hits, n, others, m = table
        exact = scipy_stats.fisher_exact([[hits, n - hits], [others, m - others]], alternative="greater").pvalue
        assert stats.fisher(*table) == pytest.approx(exact, rel=1e-9)


def test_the_first_item_of_each_message_is_tested():
    one = share("identification", 5, 9, 100, sizes=(2, 4, 3))
    assert (stats.firsts(one), stats.of_messages(one)) == ([True, True, False], [1.0, 1.0, 0.0])
    assert one.p == stats.binomial(2, 3, 0.01)
    assert stats.firsts(share("identification", 2, 3, 100)) == [True, True, False]
    failed = dataclasses.replace(one, values=(None, *one.values[1:]))
    assert stats.firsts(failed) == [False, True, False]


def test_pooled_seeds_have_the_test_of_all_items_or_fishers_of_the_p_values():
    pooled = stats.pool([share("named", 3, 40, 100), share("named", 0, 60, 100)])
    assert (pooled.chance, pooled.p) == (0.01, stats.binomial(3, 100, 0.01))
    batches = stats.pool([share("identification", 5, 9, 100, sizes=(2, 4, 3)), share("identification", 1, 2, 100)])
    assert batches.p == stats.binomial(3, 5, 0.01)
    for p in ((0.02, 0.3), (1e-9, 0.9, 0.5)):
        both = stats.pool([one for each in p for one in members(each)])
        assert both.p == pytest.approx(scipy_stats.combine_pvalues(p, method="fisher").pvalue, rel=1e-9)
    assert stats.pool([*members(0.1), *members(None)]).p is None


@by_rows(0.0, 0.5, 0.54)
def test_the_fewest_messages_that_certify_are_the_fewest(seen):
    def high(n):
        return stats.clopper_pearson(math.ceil(max(0.5, seen) * n), n).high

    n = messages_needed(seen)
    assert high(n) <= MOST_HIDDEN < min(high(one) for one in range(10, n))
    assert messages_needed(0.6) is None
