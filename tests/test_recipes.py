"""Recipes: sizes, stand-ins, formulas, and a run that repeats bit for bit."""

import json
import math
import re
import tomllib

import pytest
from typer.testing import CliRunner

from leakgauge.harness.cli.main import app
from leakgauge.harness.cli.options import NOT_COMPARABLE
from leakgauge.harness.cli.reproduce import recorded
from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.cell import Size
from leakgauge.harness.core.errors import StudyError, UnknownNameError
from leakgauge.harness.core.metrics import METRICS
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.small import FORMULAS, layer_snr
from leakgauge.harness.query.lines import quantities
from leakgauge.harness.query.points import Value, flat, of_cell, paths_of
from leakgauge.harness.query.statements import Verdict
from leakgauge.harness.study.environment import environment
from leakgauge.harness.study.prepare import prepare
from leakgauge.harness.study.recipes import computed, evaluate, recipe, recipes, reproduce
from leakgauge.harness.study.store import load_run
from leakgauge.harness.study.study import expand, resolve
from tests.by_rows import by_rows

SMALL = """
title = "small"
source = "a paper, Fig. 1"
unstated = ["the number of rounds"]
seeds = [0, 1, 2]

[[tasks]]
data = "mnist"
model = "linear"

[[federations]]
clients = 2
rounds = 50
samples = 60
test_samples = 50

[[defenses]]
name = "none"

[[defenses]]
name = "gaussian"
noise_std = 10.0

[scale.quick]
federations = { rounds = 2 }

[[figures]]
title = "Accuracy over rounds"
x = "round"
y = "accuracy"

[[claims]]
text = "noise costs accuracy"
that = "above"
y = "final_accuracy"
a = { defense = "none" }
b = { defense = "gaussian" }
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def run(source, out, data):
    return reproduce([source], Size.QUICK, out, data, workers=0, listen=lambda name: lambda progress, outcome: None)


@by_rows(
    ('y = "final_accuracy"', 'y = "final_acuracy"', "unknown quantity 'final_acuracy'; did you mean 'final"),
    ('a = { defense = "none" }', 'a = { defence = "none" }', "unknown path 'defence'; did you mean 'def"),
    ('x = "round"', 'x = "rounds"', "figures[0]: unknown path 'rounds'; did you mean 'round'?"),
    ('y = "accuracy"', 'y = "acuracy"', "figures[0]: unknown quantity 'acuracy'; did you mean 'accuracy'?"),
)
def test_a_misspelled_quantity_or_path_is_an_error(right, wrong, why, tmp_path):
    (tmp_path / "a.toml").write_text(SMALL.replace(right, wrong))
    with pytest.raises(StudyError, match=re.escape(why)):
        recipe(str(tmp_path / "a.toml"), Size.QUICK, tmp_path)


def test_a_recipe_in_which_nothing_runs_is_refused(tmp_path):
    (tmp_path / "a.toml").write_text('title = "a"\nsource = "b"\nlooks = [3, 9]\nseeds = [0, 1, 2]\n')
    with pytest.raises(StudyError, match="nothing runs"):
        recipe(str(tmp_path / "a.toml"), Size.QUICK, tmp_path)


def test_the_charts_of_recipes_and_studies_are_written_as_files(small, tmp_path):
    out = tmp_path / "out"
    words = ["reproduce", small, "-o", str(out), "--data", str(tmp_path), "--workers", "0", "--figures", "svg,pdf"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    names = sorted(path.name for path in (out / "figures").iterdir())
    assert names == [f"small-accuracy-over-rounds-0-0.{kind}" for kind in ("pdf", "svg")]
    assert "Accuracy over rounds" in (out / "figures" / names[1]).read_text()
    board = (out / "scoreboard.md").read_text()
    assert f"Code and machine: {environment().commit[:8]}" in board
    assert "| small | noise costs accuracy | UNRESOLVED | final_accuracy" in board or "| CONFIRMED |" in board
    folder = out / "quick" / "small"
    assert CliRunner().invoke(app, ["report", str(folder), "--figures", "svg"]).exit_code == 0
    assert (folder / "figures" / "asked-accuracy-over-rounds-0-0.svg").exists()


def test_recipes_of_several_runs_stand_on_one_recorded_page(small, tmp_path):
    (tmp_path / "other.toml").write_text(SMALL.replace("noise costs accuracy", "noise helps"))
    for source in (small, str(tmp_path / "other.toml")):
        words = [source, "-o", str(tmp_path / "out"), "--data", str(tmp_path), "--workers", "0"]
        assert CliRunner().invoke(app, ["reproduce", *words, "--record", str(tmp_path / "kept")]).exit_code == 0
    page = (tmp_path / "kept" / "quick.md").read_text()
    assert "2 published statements of 2 recipes" in page
    assert page.count("- small: the paper leaves open: the number of rounds.") == 1
    assert "| small | noise costs accuracy |" in page
    assert "| other | noise helps |" in page
    assert "![A figure of small](quick/small.svg)" in page
    assert page == recorded(tmp_path / "kept" / "quick")


@pytest.mark.parametrize("content", ["{", "[]", '{"name": "small"}'])
def test_a_damaged_file_among_the_recorded_ones_is_refused_by_name(small, tmp_path, content):
    (tmp_path / "kept" / "quick").mkdir(parents=True)
    (tmp_path / "kept" / "quick" / "other.json").write_text(content)
    words = [small, "-o", str(tmp_path / "out"), "--data", str(tmp_path), "--workers", "0"]
    told = CliRunner().invoke(app, ["reproduce", *words, "--record", str(tmp_path / "kept")])
    assert told.exit_code == NOT_COMPARABLE
    assert "other.json: expected a recipe of an earlier --record" in told.output.replace("\n", "")


def test_a_recipe_runs_resumes_and_gives_the_same_bytes(small, tmp_path):
    out, again = tmp_path / "out", tmp_path / "again"
    (done,) = run(small, out, tmp_path)
    first = (out / "reproduce.json").read_bytes()
    (cell,) = [path for path in (out / "quick" / "small" / "cells").glob("*") if path.is_dir()][:1]
    for path in cell.iterdir():
        path.unlink()
    run(small, out, tmp_path)
    run(small, again, tmp_path)
    assert (out / "reproduce.json").read_bytes() == (again / "reproduce.json").read_bytes() == first
    (data,) = json.loads(first)
    assert data["notes"] == ["mnist is not here: digits stands in for it"]
    assert [claim["verdict"] for claim in data["claims"]] == [str(one.verdict) for one in done.judged]
    assert [line["label"] for line in data["figures"][0]["panels"][0]["lines"]] == ["no defense", "gaussian"]


@by_rows(
    (None, "quick", 0, "no decided verdict has changed"),
    ("UNRESOLVED", "quick", 0, "no decided verdict has changed"),
    ("CONTRADICTED", "quick", 1, "small (quick): noise costs accuracy: CONTRADICTED before, "),
    ("CONTRADICTED", "standard", 4, "no recipe is in both at the same size"),
    ("broken", "quick", 4, "expected a reproduce.json of 'leakgauge reproduce'"),
)
def test_a_changed_verdict_fails_the_build(verdict, size, code, text, small, tmp_path):
    out, before = tmp_path / "out", tmp_path / "before.json"
    words = ["reproduce", small, "-o", str(out), "--data", str(tmp_path), "--workers", "0"]
    run(small, out, tmp_path)
    (recipe,) = json.loads((out / "reproduce.json").read_text())
    recipe["size"], recipe["claims"][0]["verdict"] = size, verdict or recipe["claims"][0]["verdict"]
    before.write_text(json.dumps([recipe]) if verdict != "broken" else "{}x")
    done = CliRunner().invoke(app, [*words, "--against", str(before)])
    assert (done.exit_code, text in done.output.replace("\n", " ")) == (code, True), done.output


def test_a_size_replaces_values_in_every_table_of_a_list(small, tmp_path):
    rounds = {size: recipe(small, size, tmp_path).study.trainings[0].federation.rounds for size in Size}
    assert rounds == {"quick": 2, "standard": 50, "paper": 50}


def test_a_recipe_without_attacks_measures_utility_and_says_so(small, tmp_path):
    study = recipe(small, Size.QUICK, tmp_path).study
    assert study.notes == ("No attack was asked for: this study measures utility, not leakage.",)
    assert {cell.attack.name for cell in study.cells} == {"prior"}


def test_lists_that_are_zipped_advance_together():
    table = {"name": "x", "bits": [1, 2], "ratio": [0.5, 0.25], "clip": [1.0, 2.0], "zip": ["bits", "ratio"]}
    assert [(one["bits"], one["ratio"], one["clip"]) for one in expand(table)] == [
        (1, 0.5, 1.0),
        (1, 0.5, 2.0),
        (2, 0.25, 1.0),
        (2, 0.25, 2.0),
    ]
    study = tomllib.loads(
        SMALL.replace("clients = 2\nrounds = 50", 'clients = [2, 3]\nrounds = [1]\nzip = ["clients", "rounds"]')
    )
    study = {key: value for key, value in study.items() if key not in ("source", "unstated", "scale")} | {"name": "x"}
    with pytest.raises(StudyError, match=r"federations\[0\]: zip: expected keys with lists of one length"):
        resolve(study)


def test_what_cannot_be_is_refused_in_a_line(small, tmp_path):
    with pytest.raises(UnknownNameError, match="no recipe 'jopec/figure-3'; did you mean 'jopeq/figure-3'"):
        recipe("jopec/figure-3", Size.QUICK, tmp_path)
    for before, after, text in (
        ('that = "above"', 'that = "abvoe"', r"claims\[0\].that"),
        ('x = "round"', 'z = "round"', r"figures\[0\]"),
        ('x = "round"', 'x = "round"\ncolor = "red"', r"figures\[0\].color: unknown key"),
        ('that = "above"', 'that = "above"\nmargins = 0.1', r"claims\[0\].margins"),
        ("[scale.quick]", "[scale.tiny]", r"scale.tiny: expected one of quick, standard, paper"),
    ):
        path = tmp_path / "wrong.toml"
        path.write_text(SMALL.replace(before, after))
        with pytest.raises(StudyError, match=text):
            recipe(str(path), Size.QUICK, tmp_path)


def test_the_snr_of_normal_updates_is_that_of_the_noise():
    # one number per parameter, without an overload: the ratio is 1 / (2 clip^2) for Laplace noise of scale clip
    found = layer_snr("laplace", "linear", draws=6, clip=50.0, epsilon=2.0)["layer_snr_db"]
    assert found == pytest.approx(-10 * math.log10(2 * 50.0**2), abs=0.5)
    assert layer_snr("laplace", "linear", seed=1, clip=50.0, epsilon=2.0) != layer_snr(
        "laplace", "linear", clip=50.0, epsilon=2.0
    )
    with pytest.raises(LookupError, match=r"no formula 'messages.layer_snt'; did you mean 'messages.layer_snr'"):
        registry.formula("messages.layer_snt")


@pytest.fixture
def few_draws(monkeypatch):
    """Formulas of messages with one draw for each value."""
    monkeypatch.setitem(FORMULAS, "layer_snr", lambda **given: layer_snr(**given | {"draws": 1}))


@pytest.mark.parametrize("name", recipes())
@pytest.mark.matrix
@pytest.mark.ci(without=("jopeq/table-2", "mvu/scalar-estimation"))  # these are in the next test
def test_every_shipped_recipe_is_valid_at_every_size(name, tmp_path, few_draws):
    for size in Size:
        made = recipe(name, size, tmp_path)
        assert made.source
        assert made.study.claims or made.study.figures
        evaluate(made, size, [])


_BY_ROUND = ("accuracy", "loss", "snr_db", "message_bytes", "planned_rounds", "noise_multiplier")
_EPSILONS = ("claimed_epsilon", "proved_epsilon")
_OF_TRAININGS = (
    *_BY_ROUND,
    *_EPSILONS,
    *("final_accuracy", "final_loss", "late_accuracy", "late_loss", "rounds_run", "bits"),
)


def made_up(made):
    """A value of every quantity that the recipe asks for, at every place where a run of it has one."""
    asked = quantities(made.study.claims, made.study.figures)
    sides = [flat(side).get("round", []) for one in made.study.claims for side in (one.a, one.b, one.at)]
    named = {
        each for side in sides if not isinstance(side, dict) for each in (side if isinstance(side, list) else [side])
    }
    for number, spec in enumerate(made.study.trainings):
        at = paths_of(spec)
        for name in asked & set(_OF_TRAININGS):
            if name in _BY_ROUND:
                its, every = spec.federation.rounds, spec.federation.evaluate_every
                rounds = {
                    0,
                    its - 1,
                    *(its for side in sides if isinstance(side, dict)),
                    *(one for one in named if one <= its and one % every == 0),
                }
                yield from (Value(name, 0.5, at | {"round": one}) for one in rounds)
            elif name in _EPSILONS:
                whole = {"horizon": "whole run", "privacy_unit": "message", "against.server": True}
                scopes = [whole, whole | {"horizon": "one round"}]
                scopes.append({**scopes[1], "privacy_unit": "coordinate"})
                yield from (Value(name, number + 1.0, at | one, exact=True) for one in scopes)
            else:
                yield Value(name, 0.5, at)
    for cell in made.study.cells:
        at = paths_of(cell.training) | of_cell(cell)
        for name in (asked & METRICS.keys()) - set(_OF_TRAININGS):
            yield from (Value(name, 0.5, at | {"item": number}) for number in range(2))


@pytest.mark.parametrize("size", Size)
@pytest.mark.parametrize("name", recipes())
@pytest.mark.matrix
@pytest.mark.ci(without=("jopeq/table-2-standard", "jopeq/table-2-paper"))
def test_every_claim_and_figure_of_a_recipe_has_its_values(name, size, tmp_path, few_draws):
    made = recipe(name, size, tmp_path)
    if made.missing:
        return
    outcome = evaluate(made, size, [*(made_up(made) if made.trains else ()), *computed(made)])
    unrun = [one for one in outcome.judged if one.verdict is Verdict.NOT_RUN]
    if size is Size.QUICK:  # which has fewer rounds
        unrun = [one for one in unrun if "after 1,000 rounds" not in one.statement.text]
    assert [one.measured for one in unrun if not one.statement.missing] == []
    assert [one for one in outcome.figures if isinstance(one, str)] == []


def test_a_claim_for_each_scaling_of_the_inputs_has_the_evidence_of_both(tmp_path):
    made = recipe("jopeq/figure-3", Size.STANDARD, tmp_path)
    judged = evaluate(made, Size.STANDARD, list(made_up(made))).judged
    judged = [one for one in judged if one.statement.y != "jopeq.message_bits"]
    where = [[each.where for each in one.evidence] for one in judged]
    assert len(judged) == len(made.study.claims) - 1
    assert where == [["task.inputs unit", "task.inputs centered"]] * len(judged)


LOOKS = (
    SMALL.replace("seeds = [0, 1, 2]", "seeds = [0, 1, 2, 3, 4, 5]\nlooks = [6]\nregime = ['federation.rounds']")
    + """
[[claims]]
text = "other noise changes little"
that = "within"
y = "final_loss"
a = { defense = "none" }
b = { defense = "laplace" }
margin = 1.0

[[claims]]
text = "no noise is like itself"
that = "equals"
y = "final_accuracy"
a = { defense = "none" }
value = 0.5
margin = 0.001
"""
).replace(
    "[scale.quick]",
    "[[defenses]]\nname = 'laplace'\nclip = 1.0\nepsilon = 1e9\nscale = 'vector'\n\n[scale.quick]\nlooks = [3, 6]",
)


def test_only_what_is_undecided_gets_the_seeds_of_the_next_look(tmp_path):
    (tmp_path / "looks.toml").write_text(LOOKS)
    (done,) = run(str(tmp_path / "looks.toml"), tmp_path / "out", tmp_path)
    assert [str(one.verdict) for one in done.judged[:2]] == ["UNRESOLVED", "CONFIRMED"], done.judged
    run_ = load_run(tmp_path / "out" / "quick" / "looks")
    seeds = gathered((cell.training.defense.name, cell.training.seed) for cell in run_.cells)
    assert {name: len(set(found)) for name, found in seeds.items()} == {"none": 6, "gaussian": 6, "laplace": 3}
    first = (tmp_path / "out" / "reproduce.json").read_bytes()
    run(str(tmp_path / "looks.toml"), tmp_path / "out", tmp_path)
    assert (tmp_path / "out" / "reproduce.json").read_bytes() == first


def test_each_look_spends_its_share_and_a_decided_statement_stays_as_it_was_seen(tmp_path):
    (tmp_path / "looks.toml").write_text(LOOKS)
    made = recipe(str(tmp_path / "looks.toml"), Size.QUICK, tmp_path)
    at = {"defense.name": "none"}
    early = [Value("final_accuracy", 0.5 + 1e-5 * seed, at | {"seed": seed}) for seed in range(3)]
    late = [Value("final_accuracy", 0.9 + 1e-5 * seed, at | {"seed": seed}) for seed in range(3, 6)]
    verdicts = [evaluate(made, Size.QUICK, known).judged[2] for known in (early, [*early, *late])]
    assert verdicts[0] == verdicts[1]
    assert verdicts[0].verdict is Verdict.CONFIRMED


@by_rows(
    ("federation.rounds", "another regime, federation.rounds: 2, at the size paper 50"),
    (
        "federation.rounds / federation.clients",
        "another regime, federation.rounds / federation.clients: 1, at the size paper 25",
    ),
    ("records * federation.clients", None),
)
def test_a_size_that_changes_a_number_that_decides_says_so(number, line, tmp_path):
    (tmp_path / "a.toml").write_text(LOOKS.replace("'federation.rounds'", f"'{number}'"))
    (tmp_path / "mnist").mkdir()
    notes = recipe(str(tmp_path / "a.toml"), Size.QUICK, tmp_path).notes
    assert [note for note in notes if "regime" in note] == ([line] if line else [])


@by_rows(
    ("'federation.rounds'", "'federation.round'", "regime: expected paths of numbers"),
    ("'federation.rounds'", "'federation.rounds + seed'", "regime: expected paths of numbers"),
    ("'federation.rounds'", "''", "regime: expected paths of numbers"),
    ("looks = [3, 6]", "looks = [6, 3]", "looks: expected rising numbers of seeds"),
    ("looks = [3, 6]", "looks = 0", "looks: expected rising numbers of seeds"),
    ("looks = [3, 6]", "looks = 'all'", "looks: expected rising numbers of seeds"),
)
def test_a_wrong_regime_or_look_is_refused(right, wrong, why, tmp_path):
    (tmp_path / "b.toml").write_text(LOOKS.replace(right, wrong))
    with pytest.raises(StudyError, match=why):
        recipe(str(tmp_path / "b.toml"), Size.QUICK, tmp_path)


def test_a_stand_in_gives_all_its_samples_and_holds_out_at_most_a_fifth(tmp_path):
    made = recipe("jopeq/figure-3", Size.PAPER, tmp_path)
    digits = 1442
    (found,) = {(one.federation.samples, one.federation.validation) for one in made.study.trainings}
    assert found == (digits - digits // 5, digits // 5)
    (ready,) = [prepare(one, tmp_path) for one in made.study.trainings[:1]]
    assert len(ready.test.y) == digits // 5
