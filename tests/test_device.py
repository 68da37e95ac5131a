"""Searches on another device, which is simulated on the CPU: equal results, and no tensor on the wrong device."""

import dataclasses

import numpy as np
import pytest
import torch

from leakgauge import Key, Links
from leakgauge.attacks._engine import matching
from leakgauge.attacks._members.shadowing import shadow
from leakgauge.attacks._search import features, lbfgs
from leakgauge.attacks.dlg import DLG
from leakgauge.attacks.idlg import IDLG
from leakgauge.attacks.inverting_gradients import InvertingGradients
from leakgauge.attacks.map import MAP
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.laplace import Laplace
from leakgauge.harness.audit import canaries, neighbors, standalone, trials
from leakgauge.harness.audit.limit import limits
from leakgauge.harness.core.device import Placed
from leakgauge.harness.data import default_root
from leakgauge.harness.federation import registry
from leakgauge.harness.learn.batch import LocalPlan, Work, choose_engine, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study import training as trainings
from leakgauge.harness.study.attack import run_attack
from leakgauge.harness.study.jobs import RunContext
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from leakgauge.harness.study.training import keep_for, run_training
from tests.by_rows import by_rows
from tests.doubles import random_examples, small_task, study_table
from tests.elsewhere import DEVICE, Away, Elsewhere
from tests.test_defenses import CASCADES, SENDERS, SETTING, SHARED, UPDATE, receive
from tests.test_limit import federation as limit_scene
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


@by_rows(
    (IDLG(evaluations=12, labels="given"), {}),
    (DLG(evaluations=12), {}),
    (InvertingGradients(evaluations=8, restarts=2, labels="given"), {}),
    (MAP(evaluations=8, warm=8, labels="given"), {"defense": Gaussian(noise_std=0.01)}),
    (MAP(evaluations=8, warm=8, labels="given"), {"task": ModelTask(build("cnn2", (1, 16, 16), 10))}),
    (MAP(evaluations=8, labels="given", restarts=2), {"steps": 2, "images": 2, "sends": "update"}),
    (MAP(evaluations=8, labels="given", objective="l2"), {}),
    (MAP(evaluations=8, labels="given", prior="tv", solve=False), {}),
)
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.table(3)
@pytest.mark.ci(2)
def test_a_search_on_another_device_has_the_results_of_the_cpu(attack, changes, kernels, monkeypatch):
    if not kernels:
        for module in (matching, features):
            monkeypatch.setattr(module, "kernel_of", lambda *_, **__: None)
    monkeypatch.setattr(matching, "capacity", lambda device: 64 * 20_000)
    # a last digit that differs may round a pair to another number of 8 bits
    monkeypatch.setattr(lbfgs, "_PAIRS", torch.float32)
    monkeypatch.setattr(lbfgs, "library_for", lambda tensor: None)
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
        again = run_attack(cell, RunContext(tmp_path, default_root(), str(DEVICE)))
    assert device.reads.total()
    for one, other in zip(run.results[cell.id].estimates, again.estimates, strict=True):
        assert one.value == pytest.approx(other.value, rel=0.01, abs=0.01), one.name
    with Elsewhere() as device:
        run_attack(cell, RunContext(tmp_path, default_root()))
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


LIKELIHOODS = [(name, shared) for name in (*registry.classes("defense"), *CASCADES) for shared in (True, False)]


def scored(name, shared, place):
    """Scores of three messages and their slopes on a device, which `place` gives, and whether the CPU computed them."""
    defense = registry.build("defense", name, {})
    keys = [SHARED.child(number) for number in range(3)]
    wires = [receive(defense, UPDATE, shared=key) for key in keys]
    links = Links(SETTING, SENDERS[:1] * 3, keys if shared else None)
    likelihood = defense.likelihood(defense.init(SETTING), wires, links)
    x = place(torch.stack([UPDATE, -UPDATE, torch.zeros_like(UPDATE)])).requires_grad_()
    placed = Placed(likelihood, x.device)
    value = placed(x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    assert value.device == slope.device == x.device
    return value.detach().cpu(), slope.cpu(), placed._there is None


@pytest.mark.parametrize(("name", "shared"), LIKELIHOODS)
@pytest.mark.table(5)
def test_every_likelihood_computes_where_the_update_is(name, shared):
    here, slope, _ = scored(name, shared, torch.clone)
    with Elsewhere():
        there, other, stays = scored(name, shared, lambda x: x.to(DEVICE))
    assert not stays
    torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other, slope, rtol=1e-4, atol=1e-5)


def test_a_likelihood_that_needs_the_cpu_computes_there():
    sent = torch.ones(4)

    def by_numpy(update):
        return torch.from_numpy(((update - sent).detach().numpy() ** 2).sum(1))

    with Elsewhere():
        x = torch.zeros(2, 4).to(DEVICE)
        placed = Placed(by_numpy, DEVICE)
        found = placed(x)
        assert placed._there is None
        assert found.device == x.device
        assert found.cpu().tolist() == [4.0, 4.0]
    with pytest.raises(RuntimeError, match="size"):
        Placed(lambda x: x + torch.ones(3), torch.device("cpu"))(torch.ones(4))


PLANS = {
    "steps": LocalPlan(False, 2, None, 4, 0.1, 0.5),
    "gradient": LocalPlan(True, 1, None, 0, 0.1, 0.0),
    "private": LocalPlan(False, 2, None, 4, 0.1, 0.0, clip=0.1, noise_multiplier=0.5, poisson=True),
}


def trained(name, plan, device):
    """The updates of three clients with 9 records each."""
    shape = (3, 22, 22)
    task = ModelTask(build(name, shape, 10))
    data = [random_examples(9, shape, seed=number).on(device) for number in range(3)]
    work = [Work(one, Key(number)) for number, one in enumerate(data)]
    return train_clients(task, task.init(Key(9)).to(device), work, plan, choose_engine(task, device)).updates


MODELS = ["linear", "mlp-small", "cnn2", "cnn3", "lenet-dlg", "svm"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.table(5)
def test_clients_train_on_the_device_to_the_updates_of_the_cpu(model, plan):
    here = trained(model, PLANS[plan], "cpu")
    with Elsewhere():
        there = trained(model, PLANS[plan], DEVICE)
        assert type(there) is Away
        torch.testing.assert_close(there.cpu(), here, rtol=1e-3, atol=1e-5)


@by_rows((Gaussian(noise_std=0.01), "linear", 2), (Laplace(noise_std=0.01), "mlp-small", 1))
def test_the_limit_on_the_device_is_the_limit_of_the_cpu(defense, model, images):
    seen, truth = limit_scene(2, defense, ModelTask(build(model, (1, 4, 4), 4)), images=images, zero=False)
    here = limits(seen, truth, Key(1))
    with Elsewhere() as device:
        there = limits(dataclasses.replace(seen, device=str(DEVICE)), truth, Key(1))
    assert device.reads.total()
    for one, other in zip(here, there, strict=True):
        np.testing.assert_allclose(other.error, one.error, rtol=1e-6)
        np.testing.assert_allclose(other.average, one.average, rtol=1e-6)


AUDITS = [
    ("gaussian", {"trials": 60}),
    ("dp-sgd", {"trials": 60, "rounds": 2}),  # local training
    ("laplace", {"by": "messages", "rounds": 8}),
]


def audited(name, asked, device):
    rest = {key: value for key, value in asked.items() if key != "rounds"}
    return standalone.audit(name, {}, {}, asked.get("rounds"), seed=1, device=device, **rest)["audited"]


@pytest.mark.parametrize(("name", "asked"), AUDITS)
@pytest.mark.ci("dp-sgd-asked1")
def test_an_audit_on_the_device_counts_what_the_cpu_counts(name, asked, monkeypatch):
    monkeypatch.setattr(standalone, "available", lambda device: True)
    here = audited(name, asked, None)
    assert here["device"] == "cpu"
    places = {"likelihoods": set(), "training": set()}

    class Spied(Placed):
        def __call__(self, x):
            found = super().__call__(x)
            places["likelihoods"].add((x.device.type, self._there is None))
            return found

    def trains(task, params, work, *rest):
        places["training"].add((params.device.type, work[0].data.x.device.type))
        return train_clients(task, params, work, *rest)

    monkeypatch.setattr(trials, "Placed", Spied)
    monkeypatch.setattr(canaries if asked.get("by") else neighbors, "train_clients", trains)
    with Elsewhere():
        there = audited(name, asked, str(DEVICE))
    assert there == here | {"device": str(DEVICE)}
    assert places["likelihoods"] == {(DEVICE.type, False)}
    if name != "gaussian":  # whose updates are given
        assert (DEVICE.type, DEVICE.type) in places["training"]


def test_a_study_audits_on_the_device_of_its_training(tmp_path, monkeypatch):
    places = []
    monkeypatch.setattr(
        trainings, "audit_for_study", lambda *asked: places.append(asked[4:5]) or standalone.audit_for_study(*asked)
    )
    federation = {"clients": 2, "rounds": 1, "samples": 20, "algorithm": "fedsgd", "batch": 1, "test_samples": 20}
    made = resolve(study_table(federation, ["gaussian"], [{"name": "prior"}], limit=False, audit=30))
    (spec,) = made.trainings
    keep, root = keep_for(made.cells), default_root()
    here = run_training(spec, keep, RunContext(tmp_path / "here", root))
    with Elsewhere():
        there = run_training(spec, keep, RunContext(tmp_path / "there", root, str(DEVICE)))
    assert here.audited is not None
    assert here.audited.trials == 30
    assert there.audited == here.audited
    assert places[-1] == (str(DEVICE),)


@pytest.mark.matrix
@pytest.mark.ci("True-MAP")
@pytest.mark.parametrize("kind", [IDLG, InvertingGradients, MAP])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_search_on_an_accelerator_seldom_waits_for_its_numbers(kind, kernels, monkeypatch):
    if not kernels:
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


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "shared"), LIKELIHOODS)
def test_every_likelihood_on_a_gpu_has_the_scores_of_the_cpu(name, shared):
    here, slope, _ = scored(name, shared, torch.clone)
    there, other, stays = scored(name, shared, torch.Tensor.cuda)
    assert not stays
    torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-5)
    # the slopes of the scales cancel near the truth
    torch.testing.assert_close(other, slope, rtol=1e-4, atol=1e-4 * float(slope.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_clients_train_on_a_gpu_to_the_updates_of_the_cpu_and_again_to_the_same(model, plan):
    here, there, again = (trained(model, PLANS[plan], device) for device in ("cpu", "cuda", "cuda"))
    torch.testing.assert_close(there.cpu(), here, rtol=1e-3, atol=1e-5)
    assert torch.equal(there, again)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, None])
def test_a_study_on_a_gpu_has_the_results_of_the_cpu(workers, tmp_path):
    federation = {"clients": 2, "rounds": 2, "samples": 20, "algorithm": "fedsgd", "batch": 1, "test_samples": 20}
    attacks = [
        {"name": "map", "evaluations": 50, "labels": "given", "target": {"count": 2, "batch": 1}},
        {"name": "lira", "shadows": 8, "target": {"kind": "members", "count": 20}},
    ]
    defense = {"name": "gaussian", "clip": 1.0, "noise_std": 0.001}
    made = resolve(study_table(federation, ["none", defense], attacks, threats=["server+labels"]))
    here = run_study(made, tmp_path / "cpu", workers=0)
    there = run_study(made, tmp_path / "gpu", workers=workers, device="cuda")
    assert not here.failures
    assert not there.failures
    for cell in made.cells:
        one, other = here.results[cell.id], there.results[cell.id]
        assert (one.execution.device, other.execution.device) == ("cpu", "cuda")
        for mine, theirs in zip(one.estimates, other.estimates, strict=True):
            assert theirs.value == (mine.value and pytest.approx(mine.value, rel=0.2, abs=0.05)), mine.name


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "images"), [("linear", 2), ("mlp-small", 1)])
def test_the_limit_on_a_gpu_is_the_limit_of_the_cpu(model, images):
    task = ModelTask(build(model, (1, 4, 4), 4))
    seen, truth = limit_scene(2, Laplace(noise_std=0.01), task, images=images, zero=False)
    here, there = (limits(dataclasses.replace(seen, device=device), truth, Key(1)) for device in ("cpu", "cuda"))
    for one, other in zip(here, there, strict=True):
        np.testing.assert_allclose(other.error, one.error, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "asked"), AUDITS)
def test_an_audit_on_a_gpu_has_the_bound_of_the_cpu(name, asked):
    here, there = (audited(name, asked, device) for device in ("cpu", "cuda"))
    # Not the distinguisher: of two that separate the pilot alike, rounding decides.
    assert there["strict"] == pytest.approx(here["strict"], rel=1e-3)
