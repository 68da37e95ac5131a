"""Linkability, source and property: what targets hold, what attacks find, and how it is scored."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from leakgauge.attacks._engine.own_clients import drawn, held, labels_of
from leakgauge.attacks.linkability import Linkability
from leakgauge.attacks.property import Property
from leakgauge.attacks.source import Source
from leakgauge.harness.core.cell import FederationSpec, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.contract import Traced
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.table import Column, has_property, spread_evenly
from leakgauge.harness.core.threats import View
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep
from leakgauge.harness.federation.observe import observe
from leakgauge.harness.study.jobs import RunContext
from leakgauge.harness.study.prepare import StoredTraining
from leakgauge.harness.study.score import score_property, score_traced
from leakgauge.harness.study.study import StudyError, resolve
from leakgauge.harness.study.training import run_training
from tests.by_rows import by_rows
from tests.doubles import study_table

TWO_LABELS = {"partition": "labels", "labels": 2}
SERVER, KEY = View.parse("server"), Key(4)
LINKED = Target(count=12, batch=6, rounds=2, shuffled=True)
SOURCES = Target("members", round=0, count=40)
BRIGHT = Target(count=80, batch=16, property="brightness", share=1.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function that trains digits for two rounds and gives the federation."""

    @functools.cache
    def federation(defense="none", seed=3, **changes):
        asked = {"clients": 10, "rounds": 2, "algorithm": "fedsgd", "batch": 0, "samples": 80, **changes}
        part = PartSpec(defense, registry.build("defense", defense, {}).parameters())
        spec = TrainingSpec(TaskSpec("digits", "mlp-small"), FederationSpec(**asked), part, seed=seed)
        context = RunContext(tmp_path_factory.mktemp("groups"), tmp_path_factory.getbasetemp())
        run_training(spec, Keep(frozenset({0, 1}), frozenset({0, 1})), context)
        return StoredTraining.of(spec, context).federation

    return federation


def linked(federation, **changes):
    seen, truth = observe(federation, SERVER, dataclasses.replace(LINKED, **changes))
    return {e.name: e for e in score_traced(Linkability().run(seen, KEY), truth.sources, linked=True)}


def traced(federation):
    seen, truth = observe(federation, SERVER, SOURCES)
    return {e.name: e for e in score_traced(Source().run(seen, KEY), truth.sources, linked=False)}


def told(federation, view=SERVER, **changes):
    seen, truth = observe(federation, view, dataclasses.replace(BRIGHT, **changes))
    return {e.name: e for e in score_property(Property().run(seen, KEY).scores, truth.is_member)}


@by_rows(("none", 1.0), ("jopeq", 0.9), ("cepam-gaussian", 0.8), ("top-k", 1.0), ("t-noise", 0.8))
def test_messages_of_two_rounds_are_linked_behind_these_defenses(defense, least, trained):
    found = linked(trained(defense))
    assert found["linked"].value >= least
    assert found["linked"].p == 1e-4
    assert found["linked"].chance == 1 / 12


@by_rows(
    ("none", {}, 0.9),
    ("jopeq", {}, 0.75),
    ("cepam-gaussian", {}, 0.3),
    ("sdq-lattice", {}, 0.9),
    ("none", TWO_LABELS, 0.9),
    ("jopeq", TWO_LABELS, 0.7),
    ("cepam-gaussian", TWO_LABELS, 0.3),
    ("sdq-lattice", TWO_LABELS, 0.9),
)
def test_records_are_traced_to_their_client_behind_these_defenses(defense, partition, least, trained):
    found = traced(trained(defense, **partition))
    assert found["source"].value >= least
    assert found["source"].p <= 1e-3


@by_rows(("none", 0.85), ("jopeq", 0.7), ("sdq-lattice", 0.7))
@pytest.mark.ci("none-0.85", "jopeq-0.7")
def test_a_property_of_the_records_is_found_behind_these_defenses(defense, least, trained):
    found = told(trained(defense, samples=400))
    assert found["property_auc"].value >= least
    assert found["property_auc"].p <= 0.02


def test_noise_above_all_differences_leaves_chance(trained):
    """The defense sqsgd: half a percent of the numbers, with much noise."""
    here = trained("sqsgd", samples=400)
    assert linked(here)["linked"].p > 0.01
    assert traced(here)["source"].p > 0.01
    assert told(here)["property_auc"].p > 0.01


def test_local_steps_and_three_rounds_are_linked(trained):
    here = trained(algorithm="fedavg", local_steps=3, batch=4, rounds=3)
    assert linked(here, rounds=2)["linked"].value >= 0.9


def test_a_sum_tells_no_source(trained):
    assert traced(trained("ota"))["source"].value <= 0.35


def test_all_that_belongs_to_a_client_takes_another_number_in_a_later_round(trained):
    seen, truth = observe(trained(), SERVER, LINKED)
    first, later = seen.observed_rounds
    assert [m.sender.number for m in later.messages] == [m.sender.number for m in first.messages] == [*range(12)]
    assert sorted(truth.sources.tolist()) == [*range(12)]
    assert truth.sources.tolist() != [*range(12)]
    # the same data have nearly the same gradient at the next model, whatever their number
    numbers = [torch.frombuffer(bytearray(m.wire), dtype=torch.float32) for m in (*first.messages, *later.messages)]
    near = torch.cdist(torch.stack(numbers[12:]), torch.stack(numbers[:12])).argmin(1)
    assert (near == truth.sources).double().mean() > 0.8


def test_a_target_that_is_not_shuffled_keeps_its_messages(trained):
    plain, truth = observe(trained(), SERVER, dataclasses.replace(LINKED, shuffled=False))
    shuffled, _ = observe(trained(), SERVER, LINKED)
    assert truth.sources is None
    assert plain.messages == shuffled.messages
    assert plain.later[0].messages != shuffled.later[0].messages


def test_sources_are_the_clients_who_hold_the_candidates(trained):
    here = trained()
    seen, truth = observe(here, SERVER, SOURCES)
    assert (truth.sources >= 0).equal(truth.is_member)
    for x, source in zip(seen.candidates.x, truth.sources.tolist(), strict=True):
        held_by = [k for k, rows in here.clients.items() if (here.train.x[rows] == x).flatten(1).all(1).any()]
        assert held_by == ([] if source < 0 else [source]) or source in held_by


def test_half_of_the_victims_have_many_records_with_the_property(trained):
    here = trained(samples=400)
    seen, truth = observe(here, SERVER, dataclasses.replace(BRIGHT, share=0.75, batch=8))
    usual = here.test.x
    shares = [float(has_property(v.x, (), "brightness", usual).double().mean()) for v in truth.victims]
    assert shares == [0.75 if many else 0.25 for many in truth.is_member.tolist()]
    assert truth.is_member.sum() == 40
    assert truth.is_member.tolist() != [True, False] * 40  # their order shows nothing
    labels = {tuple(v.y.sort().values.tolist()) for v in truth.victims}
    assert len(labels) == 1  # labels show nothing
    assert seen.marked.has.equal(has_property(seen.auxiliary.x, (), "brightness", usual))


def test_a_property_is_spread_evenly_over_the_labels():
    labels = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0, 1, 0]])
    marks = spread_evenly(labels, torch.tensor([6, 2]))
    assert marks.sum(1).tolist() == [6, 2]
    assert [marks[0][labels[0] == k].sum().item() for k in (0, 1)] == [3, 3]
    assert [marks[1][labels[1] == k].sum().item() for k in (0, 1)] == [1, 1]


def test_properties_of_tables_and_images():
    columns = (Column("age", 1), Column("color", 3))
    x = torch.tensor([[0.1, 1.0, 0, 0], [0.9, 0, 1.0, 0], [0.8, 0, 1.0, 0]])
    assert has_property(x, columns, "age", x).tolist() == [False, True, True]
    assert has_property(x, columns, "color", x).tolist() == [False, True, True]
    images = torch.tensor([0.1, 0.9]).view(2, 1, 1, 1).expand(2, 1, 3, 3)
    assert has_property(images, (), "brightness", images).tolist() == [False, True]
    with pytest.raises(ValueError, match="property: got 'sex', expected one of: age, color"):
        has_property(x, columns, "sex", x)
    with pytest.raises(ValueError, match="property: got 'age', expected one of: brightness"):
        has_property(x, (), "age", x)


def test_the_last_third_of_own_clients_shares_no_record_with_the_others(trained):
    seen, _ = observe(trained(), SERVER, LINKED)
    batches = drawn(seen, labels_of(seen, 30, 6, KEY, skewed=True), KEY)
    rows = [{tuple(x.flatten().tolist()) for x in client} for client in batches.x]
    cut = 30 - held(30)
    assert not set().union(*rows[:cut]) & set().union(*rows[cut:])


def test_scores_of_links_are_one_to_one_and_those_of_sources_count_ties_as_misses():
    scores = torch.tensor([[3.0, 2.0], [2.9, 0.0]], dtype=torch.float64)
    found = {e.name: e for e in score_traced(Traced(scores), torch.tensor([1, 0]), linked=True)}
    assert found["linked"].values == (1.0, 1.0)  # 2 + 2.9 > 3 + 0, although both rows like column 0
    alone = {e.name: e for e in score_traced(Traced(scores), torch.tensor([0, -1]), linked=False)}
    assert alone["source"].value == 1.0
    assert alone["source"].n == 1
    tied = {e.name: e for e in score_traced(Traced(torch.ones(2, 2)), torch.tensor([0, 1]), linked=False)}
    assert tied["source"].value == 0.0


def test_guesses_have_uniform_p_values():
    shares = []
    for seed in range(200):
        scores = torch.from_numpy(np.random.default_rng(seed).normal(size=(12, 12)))
        shares.append({e.name: e for e in score_traced(Traced(scores), torch.arange(12), linked=True)}["linked"].p)
    assert 0.01 <= np.mean(np.array(shares) <= 0.1) <= 0.15  # few links are possible, so the test is conservative


@by_rows(
    (
        {"name": "linkability", "target": {"rounds": 2}},
        "target.shuffled: got False, expected True for a linkability attack",
    ),
    ({"name": "prior", "target": {"rounds": 2, "shuffled": True}}, "got True, expected False for a reconstruction"),
    ({"name": "property"}, "target.property: got '', expected the name of a property"),
    ({"name": "prior", "target": {"property": "brightness"}}, "got 'brightness', expected none for a reconstruction"),
    ({"name": "source", "target": {}}, "expected members for a source attack"),
    ({"name": "linkability", "target": {"rounds": 1, "shuffled": True}}, "expected rounds >= 2"),
    ({"name": "property", "target": {"property": "brightness", "share": 0.5}}, "expected 0.5 < share <= 1"),
    ({"name": "linkability", "threat": "public"}, "needs 'messages'"),
)
def test_a_study_refuses_targets_that_do_not_fit(attack, words):
    table = study_table({"clients": 4, "rounds": 2, "samples": 80, "algorithm": "fedsgd"}, ["none"], [attack])
    with pytest.raises(StudyError, match=words):
        resolve(table)


def test_defaults_fit_each_attack():
    attacks = [{"name": "linkability"}, {"name": "source"}]
    federation = {"clients": 4, "rounds": 2, "samples": 80, "algorithm": "fedsgd"}
    targets = [cell.target for cell in resolve(study_table(federation, ["none"], attacks)).cells]
    assert [target.shuffled for target in targets] == [True, False]
    assert [target.kind for target in targets] == ["probe", "members"]


def test_a_property_that_too_few_records_have_is_refused(trained):
    with pytest.raises(ValueError, match="records of label"):
        observe(trained(samples=40), SERVER, dataclasses.replace(BRIGHT, batch=40, share=1.0))
