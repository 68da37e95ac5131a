"""An Opacus training from outside: what it promises, and an audit of the optimizer that it really uses."""

import dataclasses
import warnings

import opacus
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import leakgauge.opacus
from leakgauge import Layout, audit
from leakgauge.harness.core.accounting import epsilon
from leakgauge.harness.core.claim import Verdict, judge
from leakgauge.harness.core.contract import Link, Sender, Setting
from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.core.rng import Key, global_generators, normal
from leakgauge.harness.integrations.opacus import OpacusError, claim_of, facts_of, training_bound
from leakgauge.harness.integrations.opacus_step import (
    STEP,
    Step,
    _copied,
    _inner,
    _step,
    bare,
    gradient_of,
    loss_of,
    shaped_as,
    stepping,
)
from tests.by_rows import by_rows

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of Opacus, on a first layer

X, Y = normal(Key(0), (320, 8)), torch.arange(320) % 3
LAYOUT = Layout(("w", "b"), ((4, 5), (3,)))


def private(*, noise=1.0, clip=0.5, poisson=True, mode="hooks", clipping="flat", samples=320, batch=32):
    """Model, optimizer and loader of a PrivacyEngine."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(X[:samples], Y[:samples]), batch_size=batch)
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


def audited(optimizer, trials=100):
    with stepping(optimizer) as name:
        return audit(STEP, {"of": name}, {"dim": 36}, 1, trials=trials, seed=0)


@pytest.mark.matrix
def test_the_claim_is_what_the_accountant_says_after_as_many_steps():
    engine, model, optimizer, loader = private()
    facts = facts_of(optimizer, loader)
    assert facts == (0.5, 1.0, 32, 320, 10, True, 0.1, 0)
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


def step_of(optimizer, gradients, layout):
    """[d]: the sum that the optimizer's own step makes of records with these gradients [d] or [n, d]."""
    attributes, records = _copied(optimizer, vars(optimizer)), gradients.reshape(-1, layout.dim)
    return _step(optimizer, _inner(layout), records, layout, attributes, None, "whole")[0]


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


def test_a_step_sums_the_clipped_gradients_of_its_records_and_may_have_none():
    _, _, optimizer, _ = private(noise=1e-6)
    gradients = normal(Key(2), (3, LAYOUT.dim)) * torch.tensor([[10.0], [0.01], [1.0]])
    with global_generators(Key(3)):
        total, nothing = (step_of(optimizer, rows, LAYOUT) for rows in (gradients, gradients[:0]))
    clipped = gradients * (0.5 / gradients.norm(dim=1, keepdim=True)).clamp(max=1.0)
    assert total == pytest.approx(clipped.sum(0), abs=1e-5)
    assert nothing == pytest.approx(torch.zeros(LAYOUT.dim), abs=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_in_parts_gives_the_same_sum_as_a_whole_one(reduction):
    _, _, optimizer, _ = private(noise=1e-6)
    optimizer.loss_reduction, setting = reduction, Setting(LAYOUT, 5, 5, 1, "update", 1, 0.1, 0, 20)
    with stepping(optimizer) as name:
        step, sums = Step(name), []
        for number in range(5):  # whole, split and accumulated; three records with the one that moves
            link, memory = Link(setting, Sender(number, 60), None), step.remember(setting)
            wire, _ = step.encode(None, memory, normal(Key(2), (LAYOUT.dim,)), link, Key(4).child(number))
            sums.append(step.estimate(None, wire, link))
    assert all(other == pytest.approx(sums[0], abs=1e-5) for other in sums)


def test_an_optimizer_remembers_its_steps_in_the_audit_and_forgets_them_after_it():
    _, _, optimizer, _ = private()

    class Counts(DPOptimizer):
        def add_noise(self):
            self.counts[0] += 1
            self.noise_multiplier *= 2
            super().add_noise()

    optimizer.__class__, optimizer.counts = Counts, [0]
    setting = Setting(LAYOUT, 5, 5, 1, "update", 1, 0.1, 0, 20)
    with stepping(optimizer) as name:
        step, link = Step(name), Link(setting, Sender(0, 20), None)
        memory = first = step.remember(setting)
        for _ in range(3):
            _, memory = step.encode(None, memory, torch.ones(LAYOUT.dim), link, Key(4))
    assert (first["counts"], first["noise_multiplier"]) == ([0], 1.0)
    assert (memory["counts"], memory["noise_multiplier"]) == ([3], 8.0)
    assert (optimizer.counts, optimizer.noise_multiplier) == ([0], 1.0)


@pytest.mark.matrix
@pytest.mark.ci("20-5-True-1")
@by_rows((20, 5, True, 1), (320, 32, True, 2), (320, 32, False, 2))
def test_a_sampled_training_is_audited_at_six_tenths_of_its_proof(samples, batch, poisson, epochs, young):
    _, _, optimizer, loader = private(poisson=poisson, samples=samples, batch=batch)
    if poisson:
        loader.batch_sampler.generator = generator(7)
        before = loader.batch_sampler.generator.get_state()
    facts, claim = facts_of(optimizer, loader), claim_of(facts_of(optimizer, loader), epochs, 1e-5)
    found = audited(optimizer, None)
    bound = training_bound(facts, loader, epochs, 1e-5, found.record.audit, Key(0))
    assert 0.6 * claim.proved.epsilon(1e-5) < bound.epsilon_lower < claim.proved.epsilon(1e-5)
    assert bound.draws == (0 if not poisson else 100_000 if samples == 20 else 1_600_000)
    assert not poisson or torch.equal(before, loader.batch_sampler.generator.get_state())
    wrong = dataclasses.replace(found.record.audit, code="CONTRADICTED")
    assert training_bound(facts, loader, epochs, 1e-5, wrong, Key(0)) is None


@pytest.mark.matrix
def test_opacus_own_optimizer_is_consistent():
    _, _, optimizer, _ = private()
    found = audited(optimizer, 300)
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
@pytest.mark.ci("NoClip", "OwnSeed", "NoiseBeforeTheClip")  # tests/test_opacus_liars.py has the others in mild forms
@pytest.mark.parametrize("lying", [HalfNoise, NoClip, OnlyTheFirstTensor, OneNoise, OwnSeed, NoiseBeforeTheClip])
def test_an_optimizer_that_lies_is_contradicted(lying, young):
    _, _, optimizer, _ = private()
    optimizer.__class__ = lying
    assert audited(optimizer)["audited"]["verdict"] == "CONTRADICTED"


def generator(seed=0):
    made = torch.default_generator.clone_state()
    made.manual_seed(seed)
    return made


@pytest.mark.parametrize("seed", [0, pytest.param(1 << 40, marks=pytest.mark.slow)])
def test_an_honest_noise_generator_is_consistent_and_put_back(seed, young):
    _, _, optimizer, _ = private()
    optimizer.generator = generator(seed)
    before = optimizer.generator.get_state()
    found = audited(optimizer)
    assert found["audited"]["verdict"] == "CONSISTENT", found["reason"]
    assert torch.equal(before, optimizer.generator.get_state())


class TwoGenerators(DPOptimizer):
    def add_noise(self):
        for one in self.params:
            own, shared = (torch.empty_like(one.summed_grad).normal_(generator=of) for of in (self.generator, None))
            one.grad = (one.summed_grad + 0.5 * (own + shared) / 2**0.5).view_as(one)


def test_noise_from_two_honest_generators_is_consistent(young):
    _, _, optimizer, _ = private()
    optimizer.generator, optimizer.__class__ = generator(), TwoGenerators
    assert audited(optimizer)["audited"]["verdict"] == "CONSISTENT"


class SeededAnew(DPOptimizer):
    def add_noise(self):
        self.generator.manual_seed(7)
        super().add_noise()


class BackToItsSeed(DPOptimizer):
    def add_noise(self):
        self.generator.manual_seed(self.generator.initial_seed())
        super().add_noise()


class BackToAState(DPOptimizer):
    def add_noise(self):
        self.generator.set_state(self.kept)
        super().add_noise()


@pytest.mark.matrix
@pytest.mark.ci("BackToAState")
@pytest.mark.parametrize("lying", [SeededAnew, BackToItsSeed, BackToAState])
def test_a_generator_that_repeats_its_noise_is_contradicted(lying, young):
    _, _, optimizer, _ = private()
    optimizer.generator, optimizer.__class__ = generator(3), lying
    optimizer.kept = optimizer.generator.get_state()
    assert audited(optimizer)["audited"]["verdict"] == "CONTRADICTED"


DATA = TensorDataset(X, Y)


class MySampler(Sampler):
    def __iter__(self):
        return iter([0] * 320)

    def __len__(self):
        return 320


class MyBatches(MySampler):
    def __iter__(self):
        return iter([[0] * 32] * 10)

    def __len__(self):
        return 10


class MyPoisson(UniformWithReplacementSampler):
    def __iter__(self):
        return iter([[0] * 32] * 10)


class MyLoader(DataLoader):
    def __iter__(self):
        yield from [(X[:32], Y[:32])] * 10


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)

    def __len__(self):
        return 320


def with_(sampler, **named):
    return DataLoader(DATA, batch_size=32, sampler=sampler, **named)


@by_rows(
    (with_(WeightedRandomSampler([1.0] * 319 + [50.0], 320)), "WeightedRandomSampler"),
    (with_(RandomSampler(DATA, replacement=True)), "RandomSampler"),
    (with_(RandomSampler(DATA, replacement=True, num_samples=64)), "RandomSampler"),
    (with_(MySampler()), "MySampler"),
    (with_(DistributedSampler(DATA, 2, 0)), "DistributedSampler"),
    (DataLoader(DATA, batch_sampler=MyBatches()), "MyBatches"),
    (DataLoader(DATA, batch_sampler=MyPoisson(num_samples=320, sample_rate=0.1)), "MyPoisson"),
    (MyLoader(DATA, batch_size=32), "MyLoader"),
    (DataLoader(Stream(), batch_size=32), "Stream"),
    (DataLoader(DATA, batch_size=None), "batch_size=None"),
    (DataLoader(Subset(DATA, [0] * 10 + list(range(310))), batch_size=32), "Subset holds a record 11 times"),
    (DataLoader(ConcatDataset([DATA, DATA]), batch_size=32), "ConcatDataset holds a record 2 times"),
)
def test_a_loader_whose_draws_nothing_bounds_is_refused_by_name(loader, name):
    _, _, optimizer, _ = private()
    before = torch.get_rng_state()
    with pytest.raises(OpacusError, match=name) as error:
        facts_of(optimizer, loader)
    assert "\n" not in str(error.value)
    assert torch.equal(before, torch.get_rng_state())


@by_rows(
    (DataLoader(DATA, batch_size=32), 1),
    (DataLoader(DATA, batch_size=50, shuffle=True), 1),  # a smaller last batch
    (DataLoader(DATA, batch_size=50, shuffle=True, drop_last=True), 1),
    (DataLoader(Subset(DATA, range(0, 320, 2)), batch_size=32, shuffle=True), 1),
    (with_(SubsetRandomSampler(range(100))), 1),
    (with_(SubsetRandomSampler([0, 1, -320])), 4),
    (with_(WeightedRandomSampler([1.0, 2.0] * 160, 100, replacement=False)), 1),
    (with_(RandomSampler(DATA, num_samples=700)), 9),
    (with_([0, *range(31), *range(31), 0]), 4 + 4),  # twice in the first batch, and twice in the second
    (DataLoader(DATA, batch_sampler=[[0, 0, -320], [1, 2], [0]]), 9 + 1),
)
def test_the_proof_counts_how_often_a_record_is_drawn(loader, weight):
    _, _, optimizer, _ = private()
    before, facts = torch.get_rng_state(), facts_of(optimizer, loader)
    assert torch.equal(before, torch.get_rng_state())
    assert (facts.poisson, facts.share, facts.weight, facts.steps) == (False, 0.0, weight, len(loader))
    # a record that is k times in a step moves its sum by k clips, and squares of distances add up over steps
    for epochs in (1, 3):
        mu = (weight * epochs) ** 0.5
        assert claim_of(facts, epochs, 1e-5).proved.epsilon(1e-5) == pytest.approx(gaussian_epsilon(mu, 1e-5))


@pytest.mark.parametrize("poisson", [True, False])
def test_the_loader_of_a_batch_memory_manager_has_the_facts_of_the_real_one(poisson):
    _, _, optimizer, loader = private(poisson=poisson)
    wrapped = loader
    for size in (8, 3):
        with BatchMemoryManager(data_loader=wrapped, max_physical_batch_size=size, optimizer=optimizer) as wrapped:
            assert facts_of(optimizer, wrapped) == facts_of(optimizer, loader)


@pytest.mark.parametrize(("share", "steps"), [(0.1, None), (0.25, 10), (0.02, 7)])
def test_poisson_batches_in_a_plain_loader_are_counted_with_their_own_share(share, steps):
    _, _, optimizer, _ = private()
    sampler = UniformWithReplacementSampler(num_samples=320, sample_rate=share, steps=steps)
    facts = facts_of(optimizer, DataLoader(DATA, batch_sampler=sampler))
    assert (facts.poisson, facts.share, facts.steps) == (True, share, len(sampler))
    event = SelfComposedDpEvent(PoissonSampledDpEvent(share, GaussianDpEvent(1.0)), 2 * len(sampler))
    claim = claim_of(facts, 2, 1e-5)
    assert claim.proved.epsilon(1e-5) == pytest.approx(epsilon(event, 1e-5), rel=1e-9)
    assert (judge(claim).verdict in (Verdict.HOLDS, Verdict.LOOSE)) == (share <= 1 / len(sampler))


def test_a_poisson_loader_made_from_another_one_is_counted_as_poisson():
    _, _, optimizer, _ = private()
    loader = DPDataLoader.from_data_loader(DataLoader(DATA, batch_size=50, shuffle=True))
    assert facts_of(optimizer, loader)[3:] == (320, 7, True, 1 / 7, 0)


@by_rows(
    ({"mode": "ghost"}, "ghost clipping does its clipping in the backward pass: use grad_sample_mode='hooks'"),
    ({"clipping": "per_layer"}, "expected DPOptimizer with flat clipping, got DPPerLayerOptimizer"),
    ({"noise": 0.0}, "expected max_grad_norm > 0 and noise_multiplier > 0, got 0.5 and 0"),
    ({"noise": 1e-150}, "expected max_grad_norm > 0 and noise_multiplier > 0, got 0.5 and 1e-150"),
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
def test_a_training_is_inspected_with_promise_audit_attacks_and_report(tmp_path, young):
    _, model, optimizer, loader = private()
    found = leakgauge.opacus.inspect(
        model, optimizer, loader, epochs=2, folder=tmp_path, attacks=["prior", "analytic"], trials=100, progress=False
    )
    said = repr(found)
    assert "steps of 32 of 320 records by Poisson sampling" in said
    assert "code     CONSISTENT" in said
    assert "batches of 0 to 250 records, whole, split, accumulated, in steps 1 to 26; 4 tensors" in said
    assert "training: audited epsilon >= " in said
    assert found.page.read_text().endswith("</html>")
    assert {one.cell.training.defense.name for one in found.run.results.values()} == {"dp-sgd"}
    assert {one.cell.training.defense.parameters["noise_std"] for one in found.run.results.values()} == {1.0}


@by_rows(
    (TensorDataset(X, Y), (3,)),
    (TensorDataset(X, Y[:, None]), (3, 1)),
    ([(x, [int(y)]) for x, y in zip(X, Y, strict=True)], (3,)),
    ([{"image": x, "label": y} for x, y in zip(X, Y, strict=True)], (3,)),
)
def test_labels_have_the_axis_of_the_data_set(data, shape):
    assert shaped_as(data, Y[:3]).shape == shape
    assert torch.equal(shaped_as(data, Y[:3]).flatten(), Y[:3])


@by_rows(
    (None, None, 1),
    (nn.BCEWithLogitsLoss(), "binary-cross-entropy", 1),
    ("binary-cross-entropy", "binary-cross-entropy", 1),
    (None, None, 3),
    (nn.CrossEntropyLoss(), "cross-entropy", 3),
)
def test_a_loss_is_that_of_torch_for_labels_with_and_without_an_axis(given, assumed, outputs):
    scores, labels = normal(Key(0).child("scores"), (8, outputs)), torch.arange(8) % 2
    text, loss = loss_of(given)
    assert text == assumed
    if outputs == 1:
        torch_s = nn.functional.binary_cross_entropy_with_logits(scores[:, 0], labels.float())
    else:
        torch_s = nn.functional.cross_entropy(scores, labels)
    assert torch.equal(loss(scores, labels), torch_s)
    assert torch.equal(loss(scores, labels[:, None]), torch_s)
    if outputs == 1 and given is None:
        assert torch.equal(loss(scores, labels.float()), torch_s)
        with pytest.raises(ValueError, match="expected labels 0 and 1 for a network with one output: state the loss"):
            loss(scores, labels + 1)


@pytest.mark.matrix
def test_a_network_with_one_output_is_inspected(tmp_path, young):
    model = nn.Sequential(nn.Linear(8, 1))
    loader = DataLoader(TensorDataset(X[:60], Y[:60] % 2), batch_size=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Opacus' generator
        made = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1e-3,
            max_grad_norm=1.0,
        )
    named = {"epochs": 1, "attacks": ["analytic"], "victims": 2, "trials": 20, "progress": False}
    run = leakgauge.opacus.inspect(*made, folder=tmp_path, **named).run
    (found,) = [one for one in run.results.values() if one.cell.attack.name == "analytic"]
    assert {one.name: one.value for one in found.estimates}["mse"] < 1e-3


@pytest.mark.matrix
def test_the_loss_gets_labels_as_the_data_set_has_them(tmp_path, young):
    _, model, optimizer, _ = private(samples=100)
    loader, shapes = DataLoader(TensorDataset(X[:100], Y[:100, None]), batch_size=20), set()

    def loss(scores, labels):
        shapes.add(tuple(labels.shape))
        return nn.functional.cross_entropy(scores, labels[:, 0])

    found = leakgauge.opacus.inspect(
        model,
        optimizer,
        loader,
        epochs=1,
        folder=tmp_path,
        delta=0.01,
        accountant="gdp",
        loss=loss,
        attacks=["prior"],
        trials=20,
        progress=False,
    )
    assert shapes == {(1, 1)}
    assert "note: delta 0.01 is not below one in 100 records" in repr(found)
