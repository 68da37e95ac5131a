"""A function of an update is a defense: its facts, the audit of its messages, and what becomes of a wrong one."""

import dataclasses
import math
import sys

import numpy as np
import pytest
import torch

import leakgauge
from leakgauge import Key, Layout, Link, Links, Sender, Setting, audit, claim, rng
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.claim import Unit
from leakgauge.harness.core.contract import claim_of
from leakgauge.harness.core.distribution import DistributionError
from leakgauge.harness.core.errors import NoLikelihood, StudyError, UnknownNameError
from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.federation import registry
from leakgauge.harness.integrations import suite
from leakgauge.harness.integrations.findings import ConformanceError
from leakgauge.harness.study.environment import code_of
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from tests import functions
from tests.by_rows import by_rows
from tests.command import call, refused

LAYOUT = Layout(("weight", "bias"), ((5, 4), (4,)))
SETTING = Setting(LAYOUT, 2, 2, 1, "gradient", 1, 0.1, 0, 8)
LINK = Link(SETTING, Sender(0, 8), Key(0, ("shared",)))
STATED = {"clip": 1.0, "noise": 0.8, "epsilon": 20.0, "delta": 1e-5}
"""What the liars state: 13.2 is proved."""

HONEST = {
    "numpy_normal": "HOLDS",
    "torch_in_place": "LOOSE",
    "laplace": "HOLDS",
    "laplace_of_each": "HOLDS",
    "own_generator": "NOTHING PROMISED",
    "of_tensors": "NOTHING PROMISED",
    "noise_alone": "BROKEN",
}
LIARS = {
    name: kind
    for kind, names in {
        "BROKEN": "no_clip half_noise constant_seed by_largest own_norm repeated",
        "VACUOUS": "less_noise first_tensor each_tensor other_family after_some of_the_system counting",
    }.items()
    for name in names.split()
}
"""The verdict on the claim of each: 1000 trials refute it, or see only that it promises little."""

QUICK = ["own_norm", "less_noise", "repeated", "other_family", "after_some", "counting"]
"""A clip by another norm, then noise that is too little, repeated, of another family, less at times, or counted."""


def name_of(function):
    return f"function:tests.functions.{function}"


def made(function, **parameters):
    return registry.build("defense", name_of(function), parameters)


def sent(defense, update, private=0, layout=LAYOUT):
    setting = Setting(layout, 2, 2, 1, "gradient", 1, 0.1, 0, 8)
    wire, _ = defense.encode(None, None, update, Link(setting, Sender(0, 8), None), Key(private, ("private",)))
    return defense.estimate(None, wire, Link(setting, Sender(0, 8), None))


def an_update(norm=3.0, dim=LAYOUT.dim):
    drawn = rng.normal(Key(1), (dim,), torch.float64)
    return (drawn * (norm / drawn.norm())).float()


def test_the_formula_of_a_platform_is_broken_in_each_command():
    parameters = {"clip": 1.0, "noise": 4.845e-05, "epsilon": 10.0, "delta": 1e-5, "unit": "record"}
    told = claim(name_of("local_dp"), parameters, {}, None, None)
    assert told["verdict"] == "BROKEN"
    assert told["proved"]["epsilon"] == pytest.approx(gaussian_epsilon(2 / 4.845e-05, 1e-5), rel=1e-9)
    assert told["proved"]["epsilon"] == pytest.approx(8.5e8, rel=0.01)
    for words in ("noise of 4.845e-05 is 1/20,640 of the clip", "one record moves the update by up to 2 clips"):
        assert words in told["reason"]
    options = [f"--set={key}={value}" for key, value in parameters.items()]
    shown = call("audit", name_of("local_dp"), *options, "--allow-code", "--trials", "200").stdout
    assert "code     CONSISTENT" in shown
    assert "BROKEN: claimed 10, proved 8.52182e+08 per record at delta 1e-05: noise of 4.845e-05 is 1/20,640" in shown


def test_facts_that_are_computed_from_others_follow_them():
    computed = claim(name_of("by_formula"), {}, {}, None, None)
    assert (computed["verdict"], computed["claimed"]["unit"]) == ("BROKEN", "record")
    assert "the claim takes a sensitivity of 0.0001" in computed["reason"]
    # with its own sensitivity, the textbook formula is right
    right = claim(name_of("by_formula"), {"sensitivity": 2.0, "epsilon": 0.5}, {}, None, None)
    assert right["verdict"] == "LOOSE"


@pytest.mark.matrix
@pytest.mark.ci("laplace_of_each-HOLDS", "of_tensors-NOTHING PROMISED", "noise_alone-BROKEN")
@by_rows(*HONEST.items())
def test_an_honest_function_is_consistent(function, expected):
    found = audit(name_of(function), {}, {}, None, seed=0)
    assert (found["verdict"], found["audited"]["verdict"]) == (expected, "CONSISTENT")


@pytest.mark.matrix
@pytest.mark.ci("0.05")
@by_rows(0.05, 0.5, 20.0, 400.0)
def test_an_honest_function_is_consistent_at_other_sizes(noise):
    parameters = {"noise": noise, "epsilon": gaussian_epsilon(2 / noise, 1e-5), "delta": 1e-5}
    for setting, rounds in (({"dim": 5}, 1), ({"dim": 700, "clients": 9}, 3)):
        found = audit(name_of("local_dp"), parameters, setting, rounds, trials=100, seed=1)
        assert found["audited"]["verdict"] == "CONSISTENT"
        assert found["verdict"] in (["HOLDS", "VACUOUS"] if rounds == 1 else ["LOOSE", "VACUOUS"])


@pytest.mark.matrix
@pytest.mark.ci(*(f"{name}-{LIARS[name]}" for name in QUICK))
@by_rows(*LIARS.items())
def test_a_liar_is_contradicted(function, verdict):
    trials = 1000 if verdict == "BROKEN" else 100  # one that is not refuted is contradicted by other tests
    found = audit(name_of(function), STATED, {}, None, trials=trials, seed=0)
    assert (found["verdict"], found["audited"]["verdict"]) == (verdict, "CONTRADICTED")


@pytest.mark.matrix
@by_rows("no_clip", "half_noise", "by_largest")
@pytest.mark.ci("by_largest")
def test_a_sensitivity_without_a_clip_is_tested_on_messages(function):
    stated = {"noise": 0.8, "sensitivity": 2.0, "epsilon": 14.0, "delta": 1e-5}
    assert claim(name_of(function), stated, {}, None, None)["verdict"] == "VACUOUS"
    found = audit(name_of(function), stated, {}, None, seed=0)
    assert (found["verdict"], found["audited"]["verdict"]) == ("BROKEN", "CONTRADICTED")


@pytest.mark.matrix
def test_noise_on_the_grid_of_a_sampler_is_found():
    found = audit(name_of("laplace_on_a_grid"), {}, {}, None, seed=0)
    assert "grid" in found["audited"]["seen"]


@by_rows(
    ("nothing", "a changed update of 24 numbers from tests.functions.nothing, got NoneType"),
    ("longer", r"a changed update of 24 numbers from tests.functions.longer, got float64 \[\[25\]\]"),
    ("not_a_number", "tests.functions.not_a_number: expected a finite update, got nan"),
    ("raises", "tests.functions.raises raised KeyError: .*, for an update of norm 3"),
    ("leaves", "tests.functions.leaves raised SystemExit: 3"),
    ("words", "a changed update of 24 numbers from tests.functions.words, got list"),
    ("imaginary", r"a changed update of 24 numbers from tests.functions.imaginary, got complex64 \[\[24\]\]"),
)
def test_a_wrong_result_is_one_line(function, error):
    with pytest.raises(ValueError, match=error) as caught:
        sent(made(function), an_update())
    assert "\n" not in str(caught.value)
    with pytest.raises(StudyError):
        audit(name_of(function), {}, {}, None, trials=20, seed=0)


@by_rows(
    ("without_arguments", {}, UnknownNameError, "expected a function of an update"),
    ("torch", {}, UnknownNameError, "expected a function of an update .*, got a module"),
    ("no_such", {}, UnknownNameError, "has no attribute 'no_such'"),
    ("named_like_a_method", {}, UnknownNameError, "keyword 'local'"),
    ("misspelled", {}, UnknownNameError, "states 'clib'; did you mean 'clip'"),
    ("needs", {}, StudyError, "strength: missing"),
    ("rounded", {"digit": 1}, StudyError, "digit: unknown key, got 1; did you mean 'digits'"),
    ("no_clip", {"epsilon": -1.0}, StudyError, "expected epsilon > 0"),
    ("no_clip", {"clip": 0.0}, StudyError, "expected clip > 0"),
    ("no_clip", {"delta": 1.0}, StudyError, "expected 0 <= delta < 1"),
    ("no_clip", {"unit": "sub-vector"}, StudyError, "unit: got 'sub-vector', expected 'message'"),
    ("no_clip", {"noise": "much"}, StudyError, "noise: got 'much'"),
    ("words_as_facts", {}, StudyError, "expected a number as noise, got 'much'"),
    ("family_in_capitals", {}, StudyError, "expected family to be one of normal, laplace, unknown, got 'Laplace'"),
    ("not_computable", {}, StudyError, "noise cannot be computed: TypeError"),
    ("local_dp+sdq", {}, StudyError, "expected a defense that adds noise before"),
)
def test_wrong_names_and_facts_are_refused(function, parameters, kind, error):
    with pytest.raises(kind, match=error):
        claim(name_of(function), parameters, {}, None, None)


def test_keywords_are_parameters_beside_the_facts():
    needs, update = made("needs", strength=2, clip=0.5), an_update()
    assert (needs.parameters()["strength"], needs.parameters()["clip"], needs.parameters()["noise"]) == (2, 0.5, None)
    torch.testing.assert_close(sent(needs, update), update / 3)
    assert torch.equal(sent(made("rounded", digits=1), update), torch.from_numpy(np.round(update.numpy(), 1)))
    assert torch.equal(sent(made("by_name"), update), update)


def test_messages_repeat_by_key_and_leave_the_update_and_the_global_generators():
    update, before = an_update(), rng.global_states()
    for function in HONEST:
        defense, kept = made(function), update.clone()
        first = sent(defense, update)
        assert torch.equal(update, kept)
        assert torch.equal(first, sent(defense, update)), function
        assert not torch.equal(first, sent(defense, update, private=1)), function
    assert rng.global_states() == before


def test_a_partial_function_has_its_own_values_and_the_module_that_names_it():
    made_of_it = made("part_of_it", clip=0.1)
    assert made_of_it.noise == 2.0
    assert type(made_of_it).__module__ == "tests.functions"
    assert float(sent(made_of_it, an_update()).std()) > 1


def test_a_function_without_noise_is_known_to_have_none():
    assert not made("rounded").randomized
    assert not made("needs", strength=1, clip=1).randomized
    assert made("own_generator").randomized
    assert made("raises").randomized


@by_rows("local_dp", "torch_in_place", "laplace", "laplace_of_each", "of_tensors", "noise_alone")
def test_the_stated_center_is_that_of_the_likelihood(function):
    defense = made(function)
    for norm in (0.0, 1e-3, 0.5, 40.0, 1e30):
        update = an_update(norm) if norm else torch.zeros(LAYOUT.dim)
        stated = defense.message_distribution(None, None, update, LINK)
        center = torch.from_numpy(stated.center)
        close = center.float() if norm < 1e30 or function != "noise_alone" else update * (2.0**50 / 1e30)
        torch.testing.assert_close(center.float(), close)
        if norm < 1e30:
            torch.testing.assert_close(defense.bounded(update[None])[0], center.float(), rtol=1e-5, atol=1e-7)
        wire, _ = defense.encode(None, None, update, LINK, Key(2, ("private",)))
        assert len(stated.read(wire, Key(0)).uniforms) == LAYOUT.dim
        with pytest.raises(DistributionError):
            stated.read(wire + b"0", Key(0))


def test_a_stated_gaussian_function_has_the_likelihood_and_the_proof_of_the_shipped_defense():
    own, shipped = made("local_dp", noise=0.7, epsilon=9.0, delta=1e-5), Gaussian(clip=1.0, noise_std=0.7)
    update, links = an_update(), Links(SETTING, [Sender(0, 8)], None)
    wire, _ = shipped.encode(None, None, update, LINK, Key(3, ("private",)))
    at = torch.stack([0.3 * update])
    for states_likelihood in ("likelihood", "exact_likelihood"):
        mine, theirs = (getattr(each, states_likelihood)(None, [wire], links)(at) for each in (own, shipped))
        assert torch.equal(mine, theirs)
    for rounds in (1, 5):
        mine, theirs = (claim_of(each, [None] * rounds, SETTING).proved.epsilon(1e-6) for each in (own, shipped))
        assert mine == theirs
    with pytest.raises(NoLikelihood, match="state them"):
        made("no_clip").likelihood(None, [wire], links)


def test_a_proof_from_elsewhere_depends_on_the_length_of_an_update():
    found = claim_of(made("proved_elsewhere"), [None] * 3, SETTING).proved
    assert found.epsilon(0.0) == pytest.approx(3 * 0.1 * 24)
    assert (found.reason, found.tight) == ("as is shown elsewhere.", False)
    for wrong in (2.0, 0.0):
        with pytest.raises(ValueError, match="expected an epsilon above 0 and its reason from proves, got"):
            claim_of(made("proved_wrongly", answer=wrong), [None], SETTING)


@by_rows(
    ({}, 2.0),
    ({"unit": "client", "relation": "add-remove"}, 1.0),
    ({"unit": "record", "relation": "add-remove"}, 2.0),
    ({"norm": "entry"}, 2 * 24**0.5),
    ({"norm": "entry", "unit": "coordinate"}, 2.0),
    ({"norm": "l1"}, 2.0),
    ({"norm": "l1", "family": "laplace"}, 2.0),
    ({"norm": "entry", "family": "laplace"}, 48.0),
    ({"norm": "l2", "family": "laplace"}, 2 * 24**0.5),
)
def test_neighbors_move_the_clipped_update_by_as_much_as_the_proof_says(facts, moved):
    clip, noise = 0.25, 0.5
    found = claim_of(made("no_clip", clip=clip, noise=noise, **facts), [None], SETTING)
    at = 0.0 if "family" in facts else 1e-5
    expected = moved * clip / noise if "family" in facts else gaussian_epsilon(moved * clip / noise, 1e-5)
    assert found.proved.epsilon(at) == pytest.approx(expected, rel=1e-9)
    assert found.proved.unit is Unit(facts.get("unit", "message"))
    assert found.proved.tight


@by_rows(
    ({}, "NOTHING PROMISED"),
    ({"clip": 1.0, "noise": 4.0}, "NOTHING PROMISED"),
    ({"epsilon": 3.0, "noise": 0.8}, "UNPROVED"),
    ({"epsilon": 3.0, "noise": 0.8, "clip": 1.0, "family": "unknown"}, "UNPROVED"),
    ({"epsilon": 3.0, "noise": 4.0, "clip": 1.0}, "LOOSE"),
    ({"epsilon": 3.0, "noise": 4.0, "clip": 1.0, "delta": 0.0}, "BROKEN"),
    ({"epsilon": 3.0, "noise": 4.0, "sensitivity": 2.0}, "LOOSE"),
    ({"epsilon": 3.0, "noise": 4.0, "norm": "none"}, "BROKEN"),
)
def test_a_claim_is_judged_by_what_is_stated(facts, verdict):
    facts = {"noise": None, **facts} if "noise" not in facts else facts
    found = claim(name_of("rounded"), facts, {}, None, None)
    assert found["verdict"] == verdict
    assert found["reason"]


def test_rounds_add_up():
    one, three = (claim(name_of("numpy_normal"), {}, {}, rounds, None) for rounds in (1, 3))
    assert (three["claimed"]["epsilon"], three["claimed"]["delta"]) == (
        3 * one["claimed"]["epsilon"],
        pytest.approx(3e-5),
    )
    assert three["verdict"] == "LOOSE"
    assert claim(name_of("numpy_normal"), {"delta": 0.4}, {}, 3, None)["verdict"] == "NOTHING PROMISED"


def test_a_study_names_it_and_attacks_use_what_is_stated(tmp_path, monkeypatch):
    monkeypatch.delenv("LEAKGAUGE_ALLOW_CODE")
    target = {"kind": "probe", "count": 1}
    defense = {"name": name_of("local_dp"), "clip": 1.0, "noise": [4.845e-05, 4.0], "epsilon": 10.0, "unit": "record"}
    table = {
        "name": "mine",
        "tasks": [{"data": "digits", "model": "mlp-small"}],
        "federations": [{"clients": 2, "rounds": 2, "samples": 40, "test_samples": 20, "algorithm": "fedsgd"}],
        "defenses": [defense],
        "attacks": [{"name": "map", "evaluations": 150, "restarts": 1, "target": target}],
        "lineup": False,
    }
    with pytest.raises(StudyError, match="pass --allow-code"):
        resolve(table, allow_code=False)
    run = run_study(resolve(table, allow_code=True), tmp_path / "out", workers=0)
    assert not run.failures
    ssim = {
        result.cell.training.defense.parameters["noise"]: next(e.value for e in result.estimates if e.name == "ssim")
        for result in run.results.values()
    }
    assert ssim[4.845e-05] > 0.9 > 0.8 > ssim[4.0]
    training = next(iter(run.trainings.values())).spec
    assert code_of(training) != code_of(dataclasses.replace(training, defense=PartSpec("none")))


def test_inspect_takes_the_function_itself(tmp_path):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    stated = {"name": functions.local_dp, "epsilon": 10.0, "unit": "record"}
    asked = {"victims": 1, "attacks": ["analytic"], "limit": False, "progress": False}
    run = leakgauge.inspect(net, "digits", folder=tmp_path / "one", defense=stated, **asked)
    defense = next(iter(run.trainings.values())).spec.defense
    assert (defense.name, defense.parameters["epsilon"]) == (name_of("local_dp"), 10.0)
    for wrong, error in ((lambda update: update, "at the top of a module"), (Gaussian, "expected a defense")):
        with pytest.raises(ValueError, match=error):
            leakgauge.inspect(net, "digits", folder=tmp_path / "two", defense=wrong, **asked)


@pytest.mark.matrix
def test_doctor_finds_nothing_wrong_in_an_honest_function_and_says_what_is_wrong_in_others():
    quick = suite.Effort(trials=100, evaluations=30, victims=1)
    for function in (functions.numpy_normal, functions.rounded):
        assert {finding.mark for finding in suite.check_defense(function, quick)} == {"ok", "skipped"}
    check = dict(suite.checks_of("defense", quick))
    for name, function, error in (
        ("claim", functions.by_formula, "claim: BROKEN"),
        ("keys", functions.counting, "draw from a global generator, which is seeded for each message"),
        ("keys", functions.of_the_system, "the system's entropy at functions.py.*draw from a global generator"),
        ("encode", functions.raises, "KeyError"),
    ):
        with pytest.raises(ConformanceError, match=error):
            check[name](function)


@by_rows(
    ("tests.functions:local_dp", "named function:tests.functions.local_dp"),
    ("tests/functions.py", "named function:functions.NAME"),
)
def test_another_name_of_a_function_leads_to_its_own(what, error, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for command in ("doctor", "claim", "audit") if ":" in what else ("doctor",):
        assert error in refused(command, what)


def test_the_laplace_formula_of_l1_is_the_numbers_of_its_definition():
    update = an_update(9.0)
    center = made("laplace").message_distribution(None, None, update, LINK).center
    assert np.abs(center).sum() == pytest.approx(2.0, rel=1e-6)
    assert np.allclose(center, (update * (2.0 / update.abs().sum())).numpy(), rtol=1e-5)
    assert math.isclose(claim(name_of("laplace"), {}, {}, None, None)["proved"]["epsilon"], 4.0)
