"""Statements on values: what confirms and contradicts each kind, and that chance alone seldom does."""

import numpy as np
import pytest

from leakgauge.harness.query.points import Value
from leakgauge.harness.query.statements import Best, Statement, Verdict, judge
from tests.by_rows import by_rows


def values(means, seeds=5, noise=0.01, quantity="accuracy", seed=0, exact=False):
    """Values of each (defense, bits) with a common part for each seed."""
    draws = np.random.default_rng(seed)
    common = draws.normal(0, 0.1, seeds)
    return [
        Value(
            quantity,
            mean + common[number] + draws.normal(0, noise),
            {"defense.name": name, "defense.bits": bits, "seed": number},
            exact,
        )
        for (name, bits), mean in means.items()
        for number in range(seeds)
    ]


def verdict(found, that, **more):
    (judged,) = judge([Statement("a claim", that, "accuracy", **more)], found)
    return judged


A, B = {"defense.name": "a"}, {"defense.name": "b"}
PAIR = {("a", 1): 0.8, ("b", 1): 0.7}
CURVES = {
    "flat": [0.5, 0.5, 0.5, 0.5],
    "rising": [0.2, 0.4, 0.6, 0.8],
    "falling": [0.8, 0.6, 0.4, 0.2],
    "hollow": [0.8, 0.3, 0.4, 0.9],
}


def curve(name, **more):
    return values({("a", bits): mean for bits, mean in enumerate(CURVES[name])}, **more)


@by_rows(
    ("above", {"a": A, "b": B}, "CONFIRMED"),
    ("above", {"a": B, "b": A}, "CONTRADICTED"),
    ("above", {"a": A, "b": B, "margin": 0.2}, "CONTRADICTED"),
    ("below", {"a": A, "b": B}, "CONTRADICTED"),
    ("below", {"a": B, "b": A, "margin": 0.05}, "CONFIRMED"),
    ("below", {"a": B, "b": A, "margin": 0.15}, "CONTRADICTED"),
    ("within", {"a": A, "b": B, "margin": 0.15}, "CONFIRMED"),
    ("within", {"a": A, "b": B, "margin": 0.05}, "CONTRADICTED"),
)
def test_paired_differences_far_beyond_their_noise_decide_a_comparison(that, more, expected):
    assert verdict(values(PAIR), that, **more).verdict == expected


@by_rows(
    ("flat", "flat", {"margin": 0.05}, "CONFIRMED"),
    ("flat", "rising", {"margin": 0.05}, "CONTRADICTED"),
    ("monotone", "rising", {}, "CONFIRMED"),
    ("monotone", "falling", {}, "CONTRADICTED"),
    ("monotone", "falling", {"direction": "falling"}, "CONFIRMED"),
    ("monotone", "hollow", {}, "CONTRADICTED"),
    ("monotone", "flat", {"margin": 0.05}, "CONFIRMED"),
    ("interior-minimum", "hollow", {}, "CONFIRMED"),
    ("interior-minimum", "rising", {}, "CONTRADICTED"),
    ("interior-minimum", "falling", {}, "CONTRADICTED"),
)
def test_the_course_along_a_path_decides_a_shape(that, shape, more, expected):
    assert verdict(curve(shape), that, a=A, along="defense.bits", **more).verdict == expected


def test_a_printed_number_is_compared_within_its_margin_and_enters_nothing_else():
    found = values({("a", 1): 3.0}, noise=0.01, seeds=40)
    assert verdict(found, "equals", a=A, value=3.05, margin=0.3).verdict is Verdict.CONFIRMED
    assert verdict(found, "equals", a=A, value=5.0, margin=0.3).verdict is Verdict.CONTRADICTED
    with_text = verdict(found, "above", a=A, b=A, printed="9.9")
    without = verdict(found, "above", a=A, b=A)
    assert with_text[2:] == without[2:]


def test_one_side_may_be_a_number():
    found = values({("a", 1): 3.0, ("a", 2): 3.2, ("b", 1): 9.0}, noise=0.01, seeds=40)
    each = {"a": A, "each": ("defense.bits",)}
    assert verdict(found, "below", value=3.3, **each).verdict is Verdict.CONFIRMED
    assert verdict(found, "below", value=2.9, **each).verdict is Verdict.CONTRADICTED
    judged = verdict(found, "above", value=3.3, margin=-0.5, **each)
    assert judged.verdict is Verdict.CONFIRMED
    assert [one.where for one in judged.evidence] == ["defense.bits 1", "defense.bits 2"]
    assert " and 3.3; difference" in judged.evidence[0].measured


def test_one_seed_decides_nothing_and_two_equal_ones_do_not_either():
    one = verdict(values(PAIR, seeds=1), "above", a=A, b=B)
    assert one.verdict is Verdict.UNRESOLVED
    assert one.measured.endswith(", one seed")
    alike = [
        Value("accuracy", value, {**side, "seed": seed}) for side, value in ((A, 0.5), (B, 0.4)) for seed in (0, 1)
    ]
    assert verdict(alike, "above", a=A, b=B).verdict is Verdict.UNRESOLVED


def test_what_is_computed_needs_no_seeds():
    exact = [Value("accuracy", value, side, exact=True) for side, value in ((A, 0.5), (B, 0.4))]
    assert verdict(exact, "above", a=A, b=B).verdict is Verdict.CONFIRMED
    assert verdict(exact, "below", a=A, b=B).verdict is Verdict.CONTRADICTED


def test_an_unresolved_claim_says_about_how_many_seeds_it_would_take():
    found = values({("a", 1): 0.71, ("b", 1): 0.70}, noise=0.02, seeds=4, seed=4)
    judged = verdict(found, "above", a=A, b=B)
    assert judged.verdict is Verdict.UNRESOLVED
    enough = values({("a", 1): 0.71, ("b", 1): 0.70}, noise=0.02, seeds=judged.seeds * 4, seed=4)
    assert judged.seeds > 4
    assert verdict(enough, "above", a=A, b=B).verdict is Verdict.CONFIRMED


def test_many_claims_of_nothing_seldom_get_any_verdict():
    wrong = 0
    for seed in range(200):
        found = values({("a", 1): 0.5, ("b", 1): 0.5}, seed=seed)
        claims = [Statement(str(k), that, "accuracy", A, B) for k, that in enumerate(("above", "below"))]
        found += [value for bits in (1, 2, 3) for value in values({("c", bits): 0.5}, seed=1000 + 10 * seed + bits)]
        claims.append(Statement("shape", "interior-minimum", "accuracy", {"defense.name": "c"}, along="defense.bits"))
        wrong += any(one.verdict in ("CONFIRMED", "CONTRADICTED") for one in judge(claims, found))
    assert wrong <= 18  # 5 % of 200, and three standard deviations


def test_a_claim_for_each_value_of_a_path_is_judged_for_each():
    found = values({("a", 1): 0.8, ("b", 1): 0.7, ("a", 2): 0.6, ("b", 2): 0.7})
    claim = Statement("a is better", "above", "accuracy", A, B, each=("defense.bits",))
    (judged,) = judge([claim], found)
    assert [(one.where, str(one.verdict)) for one in judged.evidence] == [
        ("defense.bits 1", "CONFIRMED"),
        ("defense.bits 2", "CONTRADICTED"),
    ]


def test_a_filter_takes_all_numbers_from_one_on():
    found = values({("a", 0): 0.7, ("b", 0): 0.7, ("a", 1): 0.8, ("b", 1): 0.7, ("a", 3): 0.9, ("b", 3): 0.7})
    found += [Value("accuracy", 0.0, {"defense.name": name, "seed": seed}) for name in "ab" for seed in range(5)]
    for at in ({"defense": {"bits": {"from": 1}}}, {"defense.bits": {"from": 0.5}}):
        claim = Statement("a is better", "above", "accuracy", A, B, at, each=("defense.bits",))
        (judged,) = judge([claim], found)
        assert [one.where for one in judged.evidence] == ["defense.bits 1", "defense.bits 3"]
        asked = [claim.asks({"defense.name": "a", "defense.bits": bits}) for bits in (0, 1, 3)]
        assert asked == [False, True, True]
    with pytest.raises(ValueError, match=r"^expected a number for round\.from, got '1'$"):
        Statement("x", "above", "accuracy", A, B, {"round": {"from": "1"}})


def test_a_claim_for_each_value_covers_the_default_which_has_no_path():
    found = values({("a", 1): 0.8, ("a", 2): 0.6, ("b", 1): 0.7, ("b", 2): 0.7})
    for value in found:
        if value.at["defense.bits"] == 1:
            del value.at["defense.bits"]
    claim = Statement("a is better", "above", "accuracy", A, B, each=("defense.bits",))
    (judged,) = judge([claim], found)
    assert {one.where: one.verdict for one in judged.evidence} == {
        "defense.bits default": Verdict.CONFIRMED,
        "defense.bits 2": Verdict.CONTRADICTED,
    }


def test_the_other_side_of_each_may_lack_its_path():
    found = values({("a", 1): 0.8, ("a", 2): 0.6})
    found += [Value("accuracy", 0.7, {"defense.name": "none", "seed": seed}) for seed in range(5)]
    claim = Statement("a is better", "above", "accuracy", A, {"defense.name": "none"}, each=("defense.bits",))
    (judged,) = judge([claim], found)
    assert [one.where for one in judged.evidence if "0.7" in one.measured] == ["defense.bits 1", "defense.bits 2"]


def test_what_is_missing_is_not_run_and_says_what():
    assert verdict(values(PAIR), "above", a=A, b={"defense.name": "z"})[1:3] == (
        Verdict.NOT_RUN,
        "no accuracy where defense.name is z",
    )
    judged = verdict(values(PAIR), "above", a=A, b=B, missing="no such data")
    assert (judged.verdict, judged.measured) == (Verdict.NOT_RUN, "no such data")


def test_a_side_that_mixes_two_questions_is_not_run_and_names_them():
    judged = verdict(values({("a", 1): 1.0, ("a", 2): 2.0, ("b", 1): 0.0}), "above", a=A, b=B)
    assert judged.verdict is Verdict.NOT_RUN
    assert "mixes values of defense.bits (1, 2)" in judged.measured


@by_rows(
    ({"that": "flat"}, "expected a path for 'flat', got along=''"),
    ({"that": "above", "a": A, "b": B, "along": "seed"}, "expected no path for 'above', got along='seed'"),
    ({"that": "equals", "a": A}, "expected a number for equals"),
    ({"that": "above", "a": A}, "expected a and b for 'above', or a and a value"),
    ({"that": "above", "a": A, "b": B, "value": 0.5}, "expected no value with b or 'above', got value=0.5"),
    ({"that": "within", "a": A, "value": 0.5}, "expected no value with b or 'within', got value=0.5"),
    ({"that": "within", "a": A, "b": B, "margin": -1.0}, "expected margin >= 0"),
)
def test_a_statement_that_says_nothing_is_refused(more, text):
    with pytest.raises(ValueError, match=text):
        Statement("x", y="accuracy", **more)


BITS = {"each": ("defense.bits",)}
POINTS = {
    "above": {("a", 1): 0.8, ("b", 1): 0.7, ("a", 2): 0.6, ("b", 2): 0.5},
    "mixed, above on average": {("a", 1): 0.9, ("b", 1): 0.5, ("a", 2): 0.6, ("b", 2): 0.7},
    "mixed, below on average": {("a", 1): 0.6, ("b", 1): 0.5, ("a", 2): 0.3, ("b", 2): 0.7},
    "above, and once equal": {("a", 1): 0.9, ("b", 1): 0.5, ("a", 2): 0.6, ("b", 2): 0.603},
    "equal": {("a", 1): 0.5, ("b", 1): 0.5, ("a", 2): 0.6, ("b", 2): 0.6},
    "mixed, equal on average": {("a", 1): 0.55, ("b", 1): 0.5, ("a", 2): 0.55, ("b", 2): 0.6},
}


@by_rows(
    ("above", "CONFIRMED"),
    ("mixed, above on average", "IN PART"),
    ("mixed, below on average", "CONTRADICTED"),
    ("above, and once equal", "CONFIRMED"),
    ("equal", "EQUAL"),
    ("mixed, equal on average", "IN PART"),
)
def test_one_statement_gets_one_verdict_and_its_points_are_the_evidence(name, expected):
    judged = verdict(values(POINTS[name], noise=0.002, seeds=6), "above", a=A, b=B, **BITS)
    assert judged.verdict == expected
    assert [one.where for one in judged.evidence] == ["defense.bits 1", "defense.bits 2"]


def test_many_points_decide_together_what_none_decides_alone():
    found = values({(name, bits): 0.5 + 0.02 * (name == "a") for name in "ab" for bits in range(12)}, noise=0.02)
    judged = verdict(found, "above", a=A, b=B, **BITS)
    assert judged.verdict is Verdict.CONFIRMED
    assert sum(one.verdict is Verdict.CONFIRMED for one in judged.evidence) <= 2


def test_equal_needs_a_margin_near_zero_and_never_follows_from_noise():
    found = values(POINTS["equal"], noise=0.002, seeds=6)
    assert verdict(found, "above", a=A, b=B, margin=0.05, **BITS).verdict is Verdict.CONTRADICTED
    noisy = values(POINTS["equal"], noise=0.1, seeds=4)
    assert verdict(noisy, "above", a=A, b=B, **BITS).verdict is Verdict.UNRESOLVED
    exact = [Value("accuracy", 0.5, side, exact=True) for side in (A, B)]
    assert verdict(exact, "above", a=A, b=B).verdict is Verdict.EQUAL


def test_points_that_are_equal_on_average_are_not_equal_if_one_of_them_is_not():
    many = range(12)
    alike = values({(name, bits): 0.5 for name in "ab" for bits in many}, noise=0.008, seed=2)
    judged = verdict(alike, "above", a=A, b=B, **BITS)
    assert judged.verdict is Verdict.EQUAL
    assert sum(one.verdict is Verdict.EQUAL for one in judged.evidence) <= 2  # none decides it alone
    off = {("a", bits): 0.5 + 0.012 * (-1) ** bits for bits in many} | {("b", bits): 0.5 for bits in many}
    judged = verdict(values(off, noise=0.008, seed=2), "above", a=A, b=B, **BITS)
    assert judged.verdict is Verdict.UNRESOLVED


def test_our_own_statements_cost_published_ones_no_power():
    found = values(PAIR, noise=0.04, seeds=4, seed=1)
    claims = [Statement("published", "above", "accuracy", A, B)]
    ours = [Statement(f"ours {k}", "within", "accuracy", A, B, margin=0.1, own=True) for k in range(50)]
    assert judge([*claims, *ours], found)[0] == judge(claims, found)[0]


def test_the_other_side_may_be_at_its_best_along_a_path():
    found = values({("a", 1): 0.62, ("b", 1): 0.4, ("b", 2): 0.6, ("b", 3): 0.5}, noise=0.002)
    judged = verdict(found, "above", a=A, b=B, best=Best("defense.bits", "max"))
    assert "and 0.60" in judged.measured
    assert judged.verdict is Verdict.CONFIRMED


def test_the_other_side_at_its_best_may_have_any_names():
    found = values({("mine", 1): 0.62, ("a", 1): 0.6, ("b", 1): 0.5}, noise=0.002)
    others = {"defense.name": ["a", "b"]}
    judged = verdict(found, "above", a={"defense.name": "mine"}, b=others, best=Best("defense.name", "max"))
    assert "and 0.60" in judged.measured
    assert judged.verdict is Verdict.CONFIRMED


def test_differences_of_both_signs_are_not_near_because_their_mean_is():
    found = values({("a", 1): 0.58, ("b", 1): 0.55, ("a", 2): 0.52, ("b", 2): 0.55}, noise=0.02, seeds=12)
    judged = verdict(found, "within", a=A, b=B, margin=0.02, equal=0.02, **BITS)
    assert "difference +0.00" in judged.measured or "difference -0.00" in judged.measured
    assert judged.verdict is Verdict.UNRESOLVED
    near = values({("a", 1): 0.55, ("b", 1): 0.55, ("a", 2): 0.56, ("b", 2): 0.55}, noise=0.005, seeds=12)
    assert verdict(near, "within", a=A, b=B, margin=0.03, **BITS).verdict is Verdict.CONFIRMED


def wrong(make, that, rounds=150, **more):
    """The share of runs without a difference that get a verdict on one."""
    found = [verdict(make(seed), that, **more).verdict for seed in range(rounds)]
    return sum(one in (Verdict.CONFIRMED, Verdict.CONTRADICTED, Verdict.IN_PART) for one in found) / rounds


def test_items_of_a_seed_are_no_independent_pairs():
    def make(seed):
        draws = np.random.default_rng(seed)
        return [
            Value("accuracy", common + draws.normal(0, 0.1), {**side, "seed": number, "item": item})
            for side in (A, B)
            for number, common in enumerate(draws.normal(0, 0.1, 4))
            for item in range(20)
        ]

    assert wrong(make, "above", a=A, b=B) <= 0.1


def test_the_best_of_many_equal_levels_is_no_better_than_they_are():
    def make(seed):
        return values({("a", 0): 0.5, **{("b", bits): 0.5 for bits in range(12)}}, seeds=6, noise=0.05, seed=seed)

    best = Best("defense.bits", "max")
    assert wrong(make, "below", a=A, b=B, best=best) <= 0.1
    assert wrong(make, "above", a=A, b=B, best=best) <= 0.1


def apart(first, others):
    """A difference at one point, and one at three others."""
    return {("a", 1): 0.5 + first, ("b", 1): 0.5} | {
        (name, k): 0.5 + others * (name == "a") for k in (2, 3, 4) for name in "ab"
    }


@by_rows((1.5, -0.05, "IN PART"), (-0.2, 0.1, "IN PART"), (0.08, -0.03, "CONTRADICTED"))
def test_one_point_that_differs_much_does_not_speak_for_the_others(first, others, expected):
    assert verdict(values(apart(first, others), noise=0.001, seeds=6), "above", a=A, b=B, **BITS).verdict == expected


def test_a_point_that_did_not_run_keeps_a_statement_open():
    found = values({("a", 1): 0.8, ("b", 1): 0.7, ("a", 2): 0.8})
    judged = verdict(found, "above", a=A, b=B, **BITS)
    assert judged.verdict is Verdict.UNRESOLVED
    assert "1 not run" in judged.measured


def test_what_diverged_or_has_other_levels_is_not_run_and_says_so():
    found = values(PAIR)
    broken = [*found, Value("accuracy", float("nan"), {"defense.name": "a", "defense.bits": 1, "seed": 9})]
    assert verdict(broken, "above", a=A, b=B).measured == "accuracy is not finite in some seeds"
    curves = [
        Value("accuracy", 0.5, {"defense.name": "a", "defense.bits": k, "seed": n, "round": r})
        for n in range(3)
        for r, levels in ((0, (1, 2, 3)), (1, (1, 2)))
        for k in levels
    ]
    judged = verdict(curves, "flat", a=A, along="defense.bits", margin=0.1, each=("round",))
    assert judged.verdict is Verdict.NOT_RUN
    assert "other values along its path" in judged.measured


def test_a_computed_side_without_seeds_is_paired_with_every_seed():
    found = values({("a", 1): 0.8}, noise=0.001)
    found.append(Value("accuracy", 0.2, B, exact=True))
    assert verdict(found, "above", a=A, b=B).verdict is Verdict.CONFIRMED


def test_a_statement_asks_for_the_cells_that_its_filters_allow():
    asking = Statement("a claim", "below", "loss", a={"defense": {"bits": [1, 2]}}, at={"round": [20, 40]}, value=1.0)
    assert asking.asks({"defense.bits": 2})  # a cell has no round: its training has all
    assert not asking.asks({"defense.bits": 3})
    assert asking.asks({"defense.bits": 1, "round": 40})
    assert not asking.asks({"defense.bits": 1, "round": 30})
