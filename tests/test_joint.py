"""Batches across cells: every cell has the guesses that it has alone, and its share of the seconds."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from leakgauge.attacks.dlg import DLG
from leakgauge.attacks.idlg import IDLG
from leakgauge.attacks.inverting_gradients import InvertingGradients
from leakgauge.attacks.map import MAP
from leakgauge.harness.core.device import capacity
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.rng import Key
from leakgauge.harness.data import default_root
from leakgauge.harness.federation import registry
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study import attack
from leakgauge.harness.study.attack import alike, joined, run_part
from leakgauge.harness.study.environment import shipped
from leakgauge.harness.study.jobs import Job, RunContext, family, named
from leakgauge.harness.study.prepare import StoredTraining, attack_key, observe_stored
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.doubles import study_table
from tests.elsewhere import DEVICE, Elsewhere
from tests.test_schedule import simulate
from tests.victims import make

MLP, CNN = ModelTask(build("mlp-small", (1, 8, 8), 10)), ModelTask(build("cnn2", (1, 16, 16), 10))
DEFENSES = [
    ("none", {}),
    ("gaussian", {"clip": 1000.0, "noise_std": 0.01}),
    ("jopeq", {}),
    ("sqsgd", {}),
    ("ota-orthogonal", {}),
    ("top-k", {}),
]


def observations(names=DEFENSES, **changes):
    """What an adversary sees of the same victims behind several defenses."""
    return [make(defense=registry.build("defense", *one), n=2, **changes).seen for one in names]


@by_rows(
    (IDLG(evaluations=12, labels="given"), {}),
    (IDLG(evaluations=12, objective="likelihood"), {"task": MLP}),
    (DLG(evaluations=12), {}),
    (InvertingGradients(evaluations=8, restarts=2, labels="given"), {}),
    (MAP(evaluations=12, warm=16, labels="given"), {}),
    (MAP(evaluations=12, warm=16), {"task": MLP}),
    (MAP(evaluations=12, warm=16), {"task": MLP, "images": 3}),
    (MAP(evaluations=12, warm=16), {"task": CNN}),
    (MAP(evaluations=12, labels="given", restarts=2), {"steps": 2, "images": 2, "sends": "update"}),
    (MAP(evaluations=12, objective="l2", prior="tv"), {"task": MLP}),
)
@pytest.mark.table(4)
@pytest.mark.ci(without=("attack9-changes9",))
def test_in_a_batch_every_victim_has_the_guess_of_its_own_cell(attack, changes):
    # in single precision, a search carries differences of last digits on to other inputs
    seens = [seen.double() for seen in observations(**changes)]
    for other in seens:
        assert alike(seens[0], other)
    alone = [guess for seen in seens for guess in attack.run(seen, Key(1)).guesses]
    for one, other in zip(alone, attack.run(joined(seens), Key(1)).guesses, strict=True):
        assert one.failure == other.failure == ""
        assert one.evaluations == pytest.approx(other.evaluations, abs=10)
        # restarts that find the images in another order tie, and the last digits of a processor decide
        first, second = one.y.argsort(stable=True), other.y.argsort(stable=True)
        assert torch.equal(one.y[first], other.y[second])
        assert one.objective == pytest.approx(other.objective, rel=1e-8, abs=1e-12)
        assert float((one.x[first] - other.x[second]).abs().max()) <= 1e-7 * max(1.0, float(one.x.abs().max()))


def test_a_batch_shows_nothing_that_only_one_federation_has():
    both = joined(observations())
    assert (both.models, both.final, both.others) == (None, None, None)
    assert [message.sender.number for message in both.messages] == [0, 1] * len(DEFENSES)


def test_other_rules_of_training_sums_and_other_parameters_do_not_join():
    none, other, private, quiet, summing = (
        make(defense=registry.build("defense", name, {}), n=2, task=MLP).seen
        for name in ("none", "none", "dp-sgd", "udp", "ota")
    )
    assert alike(none, other)
    assert not alike(none, private)
    assert quiet.defense.step_noise(none.setting) == 0.0
    assert not alike(none, quiet)
    assert not alike(none, summing)
    params = other.model.params.clone()
    params[0] += 1e-6
    assert not alike(none, dataclasses.replace(other, model=other.model._replace(params=params)))
    assert not alike(none, dataclasses.replace(other, later=other.observed_rounds))


FEDERATION = {"clients": 2, "rounds": 2, "samples": 20, "algorithm": "fedsgd", "batch": 1, "test_samples": 20}
NAMED = ["none", {"name": "gaussian", "clip": 1.0, "noise_std": 0.001}, "laplace+sdq", "dp-sgd"]
ATTACKS = [
    {"name": "map", "evaluations": 20, "warm": 0, "target": {"count": 2, "batch": 1}},
    {"name": "inverting-gradients", "evaluations": 8, "target": {"round": 1, "count": 2, "batch": 1}},
]


@pytest.fixture
def stored(tmp_path):
    """The context of a run, and its four cells."""
    made = resolve(study_table(FEDERATION, NAMED, ATTACKS[:1], threats=["server+labels"], limit=False))
    run_study(made, tmp_path, workers=0)
    return RunContext(tmp_path, default_root()), made.cells


def searched(context, cells):
    """The guesses of the cells that a job attacks in batches, by defense."""
    job = Job("search", cells[0].training, tuple(cells), (0, 2))
    run_part(job, context)
    found = {}
    for name, cell in zip(job.writes, cells, strict=True):
        code = context.store.examine(context.store.cell(cell.id)).code
        found[cell.training.defense.name] = context.store.read_part(Path(name).name, code)
    return {name: arrays for name, arrays in found.items() if arrays is not None}


def test_cells_that_do_not_fit_have_no_guesses_and_the_others_have_their_own(stored):
    context, cells = stored
    found = searched(context, cells)
    assert [*found] == ["none", "gaussian", "laplace+sdq"]  # `dp-sgd` trains otherwise
    alone = observe_stored(StoredTraining.of(cells[2].training, context), cells[2].threat, cells[2].target, "cpu")[0]
    key = attack_key(cells[2].training.seed, cells[2].attack, cells[2].target)
    guesses = registry.build_attack(cells[2].attack).run(alone, key).guesses
    for number, guess in enumerate(guesses):
        close = torch.from_numpy(found["laplace+sdq"][f"x {number}"])
        torch.testing.assert_close(close, guess.x, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("size", "batches"), [(7, [6]), (5, [4]), (4, [4]), (3, [])])
def test_no_batch_has_more_victims_than_fit_and_no_cell_is_a_batch(stored, size, batches, monkeypatch):
    context, cells = stored
    runs, run = [], MAP.run
    monkeypatch.setattr(MAP, "run", lambda self, seen, key: runs.append(len(seen.messages)) or run(self, seen, key))
    monkeypatch.setattr(attack, "at_once", lambda *_: size)
    assert len(searched(context, cells)) == sum(batches) / 2
    assert runs == batches


def test_a_cell_that_cannot_be_observed_does_not_join(stored):
    context, cells = stored
    shutil.rmtree(context.store.training(cells[1].training.id))
    assert [*searched(context, cells)] == ["none", "laplace+sdq"]


@pytest.mark.parametrize("error", [NoLikelihood, KeyError])
def test_if_one_cell_of_a_batch_fails_no_cell_has_guesses(stored, error, monkeypatch):
    context, cells = stored

    def likelihood(self, state, received, links):
        raise error("states none")

    monkeypatch.setattr(type(registry.build("defense", "gaussian", {})), "likelihood", likelihood)
    assert not searched(context, cells)


def test_the_seconds_of_a_batch_are_shared_among_its_cells(stored):
    context, cells = stored
    searched(context, cells)
    parts = [context.store.part(named(cell.id, range(2))) for cell in cells[:3]]
    first, *others = (context.store.seconds(part) for part in parts)
    assert first > 0
    assert others == [first, first]


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.ci("True")
def test_a_study_on_a_device_attacks_cells_of_the_first_model_together(tmp_path, monkeypatch, room):
    made = resolve(study_table(FEDERATION, NAMED, ATTACKS, threats=["server+labels"], limit=False))
    here = run_study(made, tmp_path / "here", workers=0)
    runs = []
    for kind in (MAP, InvertingGradients):
        run = kind.run
        monkeypatch.setattr(kind, "run", lambda self, seen, key, run=run: runs.append(seen) or run(self, seen, key))
    monkeypatch.setattr("leakgauge.harness.study.run.available", lambda device: True)
    if not room:
        monkeypatch.setattr(attack, "capacity", lambda device: 0)
        monkeypatch.setattr(MAP, "at_once", lambda self, dim: 2)
    with Elsewhere():
        there = run_study(made, tmp_path / "there", workers=0, device=str(DEVICE))
    assert not here.failures
    assert not there.failures
    # round 1 follows other updates behind each defense, and `dp-sgd` trains otherwise
    assert sorted(len(seen.messages) for seen in runs) == ([2] * 5 + [6] if room else [2] * 8)
    for cell in made.cells:
        for one, other in zip(here.results[cell.id].estimates, there.results[cell.id].estimates, strict=True):
            assert other.value == (one.value and pytest.approx(one.value, rel=0.02, abs=0.01)), one.name


def test_cells_share_a_batch_only_for_the_same_victims_of_the_first_model():
    attacks = [
        {"name": "map", "evaluations": 20, "target": [{"count": 2}, {"count": 3}, {"round": 1}, {"rounds": 2}]},
        {"name": "lira", "shadows": 8, "target": {"kind": "members", "count": 20}},
    ]
    made = resolve(study_table(FEDERATION, ["none", "laplace"], attacks, seeds=[0, 1], threats=["server"]))
    groups = {}
    for cell in made.cells:
        groups.setdefault(family(cell), []).append(cell)
    alone = groups.pop(None)
    assert len(alone) == 12
    assert [len(cells) for cells in groups.values()] == [2] * 4
    for cells in groups.values():
        assert [cell.training.defense.name for cell in cells] == ["none", "laplace"]


def test_with_batches_all_trainings_run_first_and_one_search_serves_all_alike(tmp_path):
    made = resolve(study_table(FEDERATION, NAMED, ATTACKS, threats=["server+labels"], limit=False))
    engine, progress = simulate(tmp_path, made.cells, 1, lambda job: 1.0, batches=True)
    kinds = [job.kind for _, _, job in engine.log]
    assert kinds[:4] == ["training"] * 4
    assert sorted(kinds[4:]) == ["attack"] * 8 + ["search"]
    assert progress.done == 8
    (search,) = (job for _, _, job in engine.log if job.kind == "search")
    assert [cell.attack.name for cell in search.cells] == ["map"] * 4
    assert search.reads == tuple(f"trainings/{cell.training.id}" for cell in search.cells)
    after = [job for _, _, job in engine.log[kinds.index("search") :] if job.kind == "attack" and job.parts]
    assert sorted(job.parts[0] for job in after) == sorted(Path(name).name for name in search.writes)
    engine, _ = simulate(tmp_path, made.cells, 1, lambda job: 1.0)
    assert {job.kind for _, _, job in engine.log} == {"training", "attack"}


def test_if_a_batch_loses_its_workers_each_cell_is_attacked_alone(tmp_path):
    made = resolve(study_table(FEDERATION, NAMED, ATTACKS[:1], threats=["server+labels"], limit=False))
    deaths = {tuple(f"parts/{named(cell.id, range(2))}" for cell in made.cells): 3}
    engine, progress = simulate(tmp_path, made.cells, 1, lambda job: 1.0, deaths, batches=True)
    assert (progress.done, progress.failed) == (4, 0)
    assert [job.kind for _, _, job in engine.log].count("search") == 3


def test_a_device_without_a_known_memory_holds_a_quarter_of_a_gigabyte():
    assert capacity(DEVICE) == 2**28


@by_rows(("laplace", True), ("laplace+sdq", True), ("mine:Own", False), ("laplace+mine:Own", False), ("lap", False))
def test_a_cascade_is_shipped_if_all_its_parts_are(name, ours):
    assert shipped("defense", name) == ours
