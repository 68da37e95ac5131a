"""Searches on another device, which is simulated on the CPU: equal results, and no tensor on the wrong device."""

import dataclasses

import pytest
import torch

from leakgauge.attacks._engine import matching
from leakgauge.attacks._members.shadowing import shadow
from leakgauge.attacks._search import features
from leakgauge.attacks.dlg import DLG
from leakgauge.attacks.idlg import IDLG
from leakgauge.attacks.inverting_gradients import InvertingGradients
from leakgauge.attacks.map import MAP
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.core.rng import Key
from leakgauge.harness.data import default_root
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.jobs import run_attack
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.store import Store
from leakgauge.harness.study.study import resolve
from tests.doubles import random_examples, small_task, study_table
from tests.elsewhere import DEVICE, Away, Elsewhere
from tests.victims import make


def test_the_simulated_device_refuses_tensors_of_the_cpu_and_counts_reads():
    with Elsewhere() as device:
        there = torch.ones(3).to(DEVICE)
        assert isinstance(there + torch.zeros(3, device=DEVICE), Away)
        with pytest.raises(RuntimeError, match="expected all tensors on one device"):
            there + torch.ones(3)
        assert not device.reads
        assert bool((there > 0).all())
        assert device.reads.total() == 1
        assert torch.equal((2 * there).cpu(), torch.full((3,), 2.0))
        assert device.reads.total() == 2


@pytest.mark.parametrize(
    ("attack", "changes"),
    [
        (IDLG(evaluations=12, labels="given"), {}),
        (DLG(evaluations=12), {}),
        (InvertingGradients(evaluations=8, restarts=2, labels="given"), {}),
        (MAP(evaluations=8, warm=8, labels="given"), {"defense": Gaussian(noise_std=0.01)}),
        (MAP(evaluations=8, warm=8, labels="given"), {"task": ModelTask(build("cnn2", (1, 16, 16), 10))}),
        (MAP(evaluations=8, labels="given", restarts=2), {"steps": 2, "images": 2, "sends": "update"}),
        (MAP(evaluations=8, labels="given", objective="l2"), {}),
        (MAP(evaluations=8, labels="given", prior="tv", solve=False), {}),
    ],
)
def test_a_search_on_another_device_has_the_results_of_the_cpu(attack, changes, monkeypatch):
    for module in (matching, features):  # the hand-written kernels are for the CPU
        monkeypatch.setattr(module, "kernel_of", lambda *_, **__: None)
    monkeypatch.setattr(matching, "_ACCELERATED", 8 * 20_000)
    seen = make(**changes).seen
    here = attack.run(seen, Key(1)).guesses
    with Elsewhere():
        there = attack.run(dataclasses.replace(seen, device=str(DEVICE)), Key(1)).guesses
    for one, other in zip(here, there, strict=True):
        assert one.failure == other.failure == ""
        assert one.evaluations == other.evaluations
        assert type(other.x) is torch.Tensor
        assert torch.equal(one.y, other.y)
        assert torch.allclose(one.x, other.x, atol=1e-3)
        assert one.objective == pytest.approx(other.objective, rel=1e-4)


def test_a_job_runs_its_search_on_the_device_of_the_study(tmp_path):
    federation = {"clients": 2, "rounds": 1, "samples": 20, "algorithm": "fedsgd", "batch": 1, "test_samples": 20}
    asked = {"name": "idlg", "evaluations": 5, "target": {"count": 2, "batch": 1}}
    made = resolve(study_table(federation, ["none"], [asked], limit=False, threats=["server+labels"]))
    run = run_study(made, tmp_path, workers=0)
    (cell,) = made.cells
    assert not run.failures
    with Elsewhere() as device:
        again = run_attack(cell, Store(tmp_path), default_root(), device=str(DEVICE))
    assert device.reads.total()
    for one, other in zip(run.results[cell.id].estimates, again.estimates, strict=True):
        assert one.value == pytest.approx(other.value, rel=0.01, abs=0.01), one.name
    with Elsewhere() as device:
        run_attack(cell, Store(tmp_path), default_root())
    assert not device.reads.total()


@pytest.mark.parametrize("defense", [None, Gaussian(clip=1.0, noise_std=0.01)])
def test_shadow_models_train_on_the_device_to_the_models_of_the_cpu(defense):
    seen = make(task=small_task(), n=12, defense=defense).seen
    seen = dataclasses.replace(seen, auxiliary=random_examples(120, seen.task.input_shape), candidates=seen.candidates)
    with Elsewhere() as device:
        here, there = (
            shadow(dataclasses.replace(seen, device=where), Key(3), runs=3, online=True, simulate=True)
            for where in ("cpu", str(DEVICE))
        )
    assert device.reads.total()
    assert torch.equal(here.inside, there.inside)
    assert type(there.models) is torch.Tensor
    torch.testing.assert_close(there.models, here.models, rtol=1e-3, atol=1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [IDLG, InvertingGradients])
def test_a_search_on_an_accelerator_seldom_waits_for_its_numbers(kind, monkeypatch):
    monkeypatch.setattr(matching, "kernel_of", lambda *_, **__: None)
    seen = make(task=ModelTask(build("linear", (1, 4, 4), 4)), defense=Gaussian(noise_std=0.01)).seen
    waits = []
    for evaluations in (32, 160):
        attack = kind(evaluations=evaluations, restarts=1, labels="given")
        with Elsewhere() as device:
            (first, *_) = attack.run(dataclasses.replace(seen, device=str(DEVICE)), Key(1)).guesses
        waits.append((first.evaluations, device.reads.total()))
    (few, least), (many, most) = waits
    assert many > few + 32
    assert most - least < (many - few) / 4


@pytest.mark.gpu
@pytest.mark.parametrize("attack", [IDLG(labels="given"), MAP(labels="given"), InvertingGradients(labels="given")])
def test_a_search_on_a_gpu_recovers_what_the_cpu_recovers(attack):
    case = make()
    found = [attack.run(dataclasses.replace(case.seen, device=device), Key(1)).guesses for device in ("cpu", "cuda")]
    for here, there in zip(*map(case.mse, found), strict=True):
        assert float(there) == pytest.approx(float(here), rel=0.5, abs=1e-4)
