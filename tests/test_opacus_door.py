"""An Opacus training from outside: what it promises, and an audit of the optimizer that it really uses."""

import warnings

import opacus
import pytest
import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leakgauge.opacus
from leakgauge.harness.audit.standalone import audit
from leakgauge.harness.core.claim import Verdict, judge
from leakgauge.harness.core.rng import Key, global_generators, normal
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.own.opacus import (
    STEP,
    OpacusError,
    bare,
    claim_of,
    facts_of,
    gradient_of,
    step_of,
    stepping,
)

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of Opacus, on a first layer

X, Y = normal(Key(0), (320, 8)), torch.arange(320) % 3
LAYOUT = Layout(("w", "b"), ((4, 5), (3,)))


def private(*, noise=1.0, clip=0.5, poisson=True, mode="hooks", clipping="flat"):
    """Model, optimizer and loader of a PrivacyEngine."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(X, Y), batch_size=32)
    named = {"criterion": nn.CrossEntropyLoss()} if mode == "ghost" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its generator
        engine = opacus.PrivacyEngine()
        made = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=clip if clipping == "flat" else [clip] * 4,
            poisson_sampling=poisson,
            grad_sample_mode=mode,
            clipping=clipping,
            **named,
        )
    return engine, made[0], made[1], made[-1]


def train(model, optimizer, loader, steps):
    for _, (x, y) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def audited(optimizer, trials=300):
    with stepping(optimizer) as name:
        return audit(STEP, {"of": name}, {"dim": 36}, 1, trials=trials, seed=0)


@pytest.mark.matrix
def test_the_claim_is_what_the_accountant_says_after_as_many_steps():
    engine, model, optimizer, loader = private()
    facts = facts_of(optimizer, loader)
    assert facts == (0.5, 1.0, 32, 320, 10, True)
    claim = claim_of(facts, 2, 1e-5)
    with global_generators(Key(1)):
        for _ in range(2):
            train(model, optimizer, loader, 10)
    assert claim.epsilon == pytest.approx(engine.get_epsilon(1e-5), rel=1e-9)
    assert judge(claim).verdict in (Verdict.HOLDS, Verdict.LOOSE)


def test_batches_that_are_no_poisson_samples_leave_the_accountants_epsilon_unproved():
    _, _, optimizer, loader = private(poisson=False)
    claim = claim_of(facts_of(optimizer, loader), 2, 1e-5)
    found = judge(claim)
    assert found.verdict is Verdict.UNPROVED
    assert found.proved > 1.5 * found.claimed
    assert "without Poisson sampling" in found.reason


def test_a_step_is_the_optimizers_own_and_changes_nothing_of_the_training():
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader, 1)
    before = [one.clone() for one in model.parameters()], list(engine.accountant.history), torch.get_rng_state()
    gradient = 10 * normal(Key(2), (LAYOUT.dim,))
    with global_generators(Key(3)):
        one, other = (step_of(optimizer, gradient, LAYOUT) for _ in range(2))
    with global_generators(Key(3)):
        assert torch.equal(one, step_of(optimizer, gradient, LAYOUT))
    assert not torch.equal(one, other)
    with global_generators(Key(3)):
        noise = torch.cat([torch.normal(0.0, 0.5, (size,)) for size in LAYOUT.sizes])
    assert one == pytest.approx(0.5 * gradient / gradient.norm() + noise, abs=1e-5)
    assert all(torch.equal(*pair) for pair in zip(before[0], model.parameters(), strict=True))
    assert engine.accountant.history == before[1]
    assert torch.equal(before[2], torch.get_rng_state())


@pytest.mark.matrix
def test_opacus_own_optimizer_is_consistent():
    _, _, optimizer, _ = private()
    found = audited(optimizer)
    assert (found["verdict"], found["audited"]["verdict"]) == ("HOLDS", "CONSISTENT")
    assert found["audited"]["unit"] == "message"


class HalfNoise(DPOptimizer):
    def add_noise(self):
        for one in self.params:
            one.grad = (one.summed_grad + 0.25 * torch.randn_like(one.summed_grad)).view_as(one)


class NoClip(DPOptimizer):
    def clip_and_accumulate(self):
        for one in self.params:
            one.summed_grad = one.grad_sample.sum(0)


class OnlyTheFirstTensor(DPOptimizer):
    def add_noise(self):
        super().add_noise()
        for one in self.params[1:]:
            one.grad = one.summed_grad.view_as(one)


class OneNoise(DPOptimizer):
    def add_noise(self):
        for one in self.params:
            noise = 0.5 * torch.randn(1)
            one.grad = (one.summed_grad + noise).view_as(one)


class OwnSeed(DPOptimizer):
    def add_noise(self):
        with global_generators(Key(9)):
            super().add_noise()


class NoiseBeforeTheClip(DPOptimizer):
    def pre_step(self, closure=None):
        for one in self.params:
            one.grad_sample = one.grad_sample + 0.5 * torch.randn_like(one.grad_sample)
        self.clip_and_accumulate()
        for one in self.params:
            one.grad = one.summed_grad.view_as(one)
        self.scale_grad()
        return True


@pytest.mark.matrix
@pytest.mark.parametrize("lying", [HalfNoise, NoClip, OnlyTheFirstTensor, OneNoise, OwnSeed, NoiseBeforeTheClip])
def test_an_optimizer_that_lies_is_contradicted(lying):
    _, _, optimizer, _ = private()
    optimizer.__class__ = lying
    assert audited(optimizer)["audited"]["verdict"] == "CONTRADICTED"


@pytest.mark.matrix
def test_a_generator_with_a_seed_of_its_own_is_used_and_put_back():
    _, _, optimizer, _ = private()
    optimizer.generator = torch.Generator().manual_seed(0)
    before = optimizer.generator.get_state()
    assert audited(optimizer)["audited"]["verdict"] == "CONTRADICTED"  # every message has the same noise
    assert torch.equal(before, optimizer.generator.get_state())


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ({"mode": "ghost"}, "ghost clipping does its clipping in the backward pass: use grad_sample_mode='hooks'"),
        ({"clipping": "per_layer"}, "expected DPOptimizer with flat clipping, got DPPerLayerOptimizer"),
        ({"noise": 0.0}, "expected max_grad_norm > 0 and noise_multiplier > 0, got 0.5 and 0"),
    ],
)
def test_what_cannot_be_inspected_is_refused_in_one_line(named, sentence):
    _, _, optimizer, loader = private(**named)
    with pytest.raises(OpacusError, match=sentence) as error:
        facts_of(optimizer, loader)
    assert "\n" not in str(error.value)


def test_another_optimizer_and_a_loader_without_a_length_are_refused_in_one_line():
    _, model, optimizer, loader = private()
    with pytest.raises(OpacusError, match="expected the optimizer that make_private returned, got SGD"):
        facts_of(torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with pytest.raises(OpacusError, match=r"expected a data loader with a length .* got list_iterator"):
        facts_of(optimizer, iter([1]))


def test_the_gradients_that_are_attacked_are_those_of_the_optimizer():
    engine, model, optimizer, loader = private(noise=1e-6)
    train(model, optimizer, loader, 1)
    before = [one.clone() for one in model.parameters()], list(engine.accountant.history)
    network = bare(model)
    with global_generators(Key(4)):
        found = gradient_of(model, optimizer, nn.functional.cross_entropy, X[:1], Y[:1])
    nn.functional.cross_entropy(network(X[:1]), Y[:1]).backward()
    whole = torch.cat([one.grad.flatten() for one in network.parameters()])
    clipped = whole * min(1.0, 0.5 / float(whole.norm()))
    assert torch.cat([one.flatten() for one in found]).numpy() == pytest.approx(clipped.numpy(), abs=2e-5)
    assert all(torch.equal(*pair) for pair in zip(before[0], model.parameters(), strict=True))
    assert engine.accountant.history == before[1]
    with pytest.raises(OpacusError, match="expected the model that make_private returned, got Sequential"):
        bare(network)


@pytest.mark.matrix
def test_a_training_is_inspected_with_promise_audit_attacks_and_report(tmp_path):
    _, model, optimizer, loader = private()
    found = leakgauge.opacus.inspect(
        model, optimizer, loader, epochs=2, folder=tmp_path, attacks=["prior", "analytic"], trials=100, progress=False
    )
    said = repr(found)
    assert "steps of 32 of 320 records by Poisson sampling" in said
    assert "code     CONSISTENT" in said
    assert found.page.read_text().endswith("</html>")
    assert {one.cell.training.defense.name for one in found.run.results.values()} == {"dp-sgd"}
    assert {one.cell.training.defense.parameters["noise_std"] for one in found.run.results.values()} == {1.0}
