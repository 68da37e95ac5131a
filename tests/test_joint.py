"""Batches across cells: the guesses of each cell alone, and no others' cost twice."""

import dataclasses

import pytest
import torch

from leakgauge.attacks.dlg import DLG
from leakgauge.attacks.idlg import IDLG
from leakgauge.attacks.inverting_gradients import InvertingGradients
from leakgauge.attacks.map import MAP
from leakgauge.harness.core.device import capacity
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation import registry
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study import attack
from leakgauge.harness.study.attack import Batches, alike, fits, joined
from leakgauge.harness.study.environment import shipped
from leakgauge.harness.study.jobs import Job, family
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
def test_in_a_batch_every_victim_has_the_guess_of_its_own_cell(attack, changes):
    # in single precision, a search carries differences of last digits on to other inputs
    seens = [seen.double() for seen in observations(**changes)]
    for other in seens:
        assert fits(seens[0], other.defense)
        assert alike(seens[0], other)
    alone = [guess for seen in seens for guess in attack.run(seen, Key(1)).guesses]
    for one, other in zip(alone, attack.run(joined(seens), Key(1)).guesses, strict=True):
        assert one.failure == other.failure == ""
        assert one.evaluations == pytest.approx(other.evaluations, abs=10)
        assert torch.equal(one.y, other.y)
        assert one.objective == pytest.approx(other.objective, rel=1e-8, abs=1e-12)
        assert float((one.x - other.x).abs().max()) <= 1e-7 * max(1.0, float(one.x.abs().max()))


def test_a_batch_shows_nothing_that_only_one_federation_has():
    both = joined(observations())
    assert (both.models, both.final, both.others) == (None, None, None)
    assert [message.sender.number for message in both.messages] == [0, 1] * len(DEFENSES)


def test_other_rules_of_training_sums_and_other_parameters_do_not_join():
    none, private, other = (
        make(defense=registry.build("defense", name, {}), n=2, task=MLP).seen for name in ("none", "dp-sgd", "none")
    )
    assert not fits(none, private.defense)
    quiet = registry.build("defense", "udp", {})
    assert quiet.step_noise(none.setting) == 0.0
    assert not fits(none, quiet)
    assert not fits(none, registry.build("defense", "ota", {}))
    assert alike(none, other)
    params = other.model.params.clone()
    params[0] += 1e-6
    assert not alike(none, dataclasses.replace(other, model=other.model._replace(params=params)))
    assert not alike(none, dataclasses.replace(other, later=other.observed_rounds))


def test_no_batch_has_more_victims_than_fit():
    seens, looked, found = observations(task=MLP), [], Batches()

    def look(number):
        looked.append(number)
        return seens[number]

    others = [(str(number), lambda number=number: look(number)) for number in range(1, len(seens))]
    attack = InvertingGradients(evaluations=2, labels="given")
    assert found.search(attack, Key(1), ("0", seens[0]), others, size=3) is None
    assert not looked
    guesses, elsewhere = found.search(attack, Key(1), ("0", seens[0]), others, size=7)
    assert looked == [1, 2]
    assert len(guesses.guesses) == 2
    share = found.guesses.pop("1")[1]
    assert share > 0
    assert elsewhere == pytest.approx(-2 * share)  # spent for two others
    assert found.guesses.keys() == {"2"}


def test_a_cell_that_cannot_be_observed_does_not_join():
    seens, found = observations(task=MLP), Batches()

    def lost():
        raise OSError("its training is gone")

    others = [("lost", lost), ("2", lambda: seens[2])]
    guesses, _ = found.search(InvertingGradients(evaluations=2), Key(1), ("0", seens[0]), others, size=100)
    assert len(guesses.guesses) == 2
    assert found.guesses.keys() == {"2"}


@pytest.mark.parametrize("error", [NoLikelihood, KeyError])
def test_if_one_cell_of_a_batch_fails_each_is_attacked_alone(error):
    class Silent(type(registry.build("defense", "laplace", {}))):
        def likelihood(self, state, received, links):
            raise error("states none")

    seens, found = observations(task=MLP), Batches()
    broken = dataclasses.replace(seens[1], defense=Silent())
    tries = []
    others = [("broken", lambda: tries.append(1) or broken), ("2", lambda: tries.append(2) or seens[2])]
    attack = MAP(evaluations=2, warm=0, labels="given")
    assert found.search(attack, Key(1), ("0", seens[0]), others, size=100) is None
    assert found.search(attack, Key(1), ("2", seens[2]), others, size=100) is None
    assert tries == [1, 2]


FEDERATION = {"clients": 2, "rounds": 2, "samples": 20, "algorithm": "fedsgd", "batch": 1, "test_samples": 20}
NAMED = ["none", {"name": "gaussian", "clip": 1.0, "noise_std": 0.001}, "laplace+sdq", "dp-sgd"]
ATTACKS = [
    {"name": "map", "evaluations": 20, "warm": 0, "target": {"count": 2, "batch": 1}},
    {"name": "inverting-gradients", "evaluations": 8, "target": {"round": 1, "count": 2, "batch": 1}},
]


@pytest.mark.parametrize("room", [True, False])
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


def test_with_batches_all_trainings_run_first_and_an_attack_knows_the_others(tmp_path):
    made = resolve(study_table(FEDERATION, NAMED, ATTACKS, threats=["server+labels"], limit=False))
    engine, progress = simulate(tmp_path, made.cells, 1, lambda job: 1.0, batches=True)
    kinds = [job.kind for _, _, job in engine.log]
    assert kinds == ["training"] * 4 + ["attack"] * 8
    assert progress.done == 8
    batched = {name: [] for name in ("map", "inverting-gradients")}
    for _, _, job in engine.log:
        if job.kind == "attack":
            batched[job.cells[0].attack.name].append(len(job.batched))
            assert job.cells[0] not in job.batched
    assert batched == {"map": [3, 2, 1, 0], "inverting-gradients": [0] * 4}
    engine, _ = simulate(tmp_path, made.cells, 1, lambda job: 1.0)
    assert not any(job.batched for _, _, job in engine.log)


def test_a_job_reads_the_trainings_of_the_cells_beside_it():
    first, second = resolve(study_table(FEDERATION, ["none", "laplace"], ATTACKS[:1], threats=["server+labels"])).cells
    job = Job("attack", first.training, (first,), batched=(second,))
    assert job.reads == (f"trainings/{first.training.id}", f"trainings/{second.training.id}")
    assert capacity(DEVICE) == 2**28


@by_rows(("laplace", True), ("laplace+sdq", True), ("mine:Own", False), ("laplace+mine:Own", False), ("lap", False))
def test_a_cascade_is_shipped_if_all_its_parts_are(name, ours):
    assert shipped("defense", name) == ours
