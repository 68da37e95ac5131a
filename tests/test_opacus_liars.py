"""Optimizers that do not do what Opacus' own does, each in a mild and a strong form."""

import itertools
import types
import warnings

import opacus
import pytest
import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from leakgauge import audit
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.integrations.opacus_step import STEP, stepping


class Liar(DPOptimizer):
    """An optimizer whose clip factors and noise subclasses change.

    strong: whether the lie is strong; steps: steps that ended.
    """

    strong, steps = True, 0

    def rows(self):
        """[n, d] the gradients of the records."""
        return torch.cat([self._get_flat_grad_sample(p).flatten(1) for p in self.params], 1)

    def factors(self, rows):
        """[n] or [n, d]: what multiplies the gradients of the records."""
        return (self.max_grad_norm / (rows.norm(dim=1) + 1e-6)).clamp(max=1.0)

    def clip_and_accumulate(self):
        rows = self.rows()
        factors = self.factors(rows)
        total = ((factors if factors.dim() == 2 else factors[:, None]) * rows).sum(0)
        self.arrived = len(rows)
        for p, part in zip(self.params, total.split([p.numel() for p in self.params]), strict=True):
            part = part.view_as(p)
            p.summed_grad = part if p.summed_grad is None else p.summed_grad + part

    def noise(self):
        """The noise of each tensor."""
        std = self.noise_multiplier * self.max_grad_norm
        return [std * torch.randn(p.shape, generator=self.generator) for p in self.params]

    def add_noise(self):
        for p, noise in zip(self.params, self.noise(), strict=True):
            p.grad = p.summed_grad + noise
        self.steps += 1


class Honest(Liar):
    """The same as Opacus, in other words."""


class ClipsTheBatch(Liar):
    """Clips the sum of the batch; mild: the mean, so that n records may add up to n clips."""

    def factors(self, rows):
        norm = rows.sum(0).norm() if self.strong else rows.mean(0).norm()
        return (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0).expand(len(rows))


class TwiceTheClip(Liar):
    """A clip of 2C if there are two or more records; mild: 1.1 C."""

    def factors(self, rows):
        times = (2.0 if self.strong else 1.1) if len(rows) > 1 else 1.0
        return (times * self.max_grad_norm / (rows.norm(dim=1) + 1e-6)).clamp(max=1.0)


class DividesByTheBatch(Liar):
    """Noise divided by the records that arrived instead of the expected ones; mild: only if more arrived."""

    def noise(self):
        times = self.expected_batch_size / max(1, self.arrived)
        return [noise * (times if self.strong else min(1.0, times)) for noise in super().noise()]


class BareLargeTensors(Liar):
    """No noise in tensors of more than 1,000 numbers; mild: 10 % less."""

    def noise(self):
        times = 0.0 if self.strong else 0.9
        return [noise * (times if noise.numel() > 1000 else 1.0) for noise in super().noise()]


class SeededAnew(Liar):
    """Noise of a generator that is seeded anew in each step; mild: by one of 4,096 seeds."""

    def noise(self):
        seed = 7 if self.strong else int(torch.randint(4096, ()))
        std, own = self.noise_multiplier * self.max_grad_norm, torch.Generator().manual_seed(seed)
        return [std * torch.randn(p.shape, generator=own) for p in self.params]


class HalfNoise(Liar):
    """Half of the noise; mild: 96 %."""

    def noise(self):
        return [noise * (0.5 if self.strong else 0.96) for noise in super().noise()]


class EverySecondStep(Liar):
    """Noise in every second step; mild: all but the tenth step of ten."""

    def noise(self):
        silent = self.steps % 2 == 1 if self.strong else self.steps % 10 == 9
        return [noise * (0.0 if silent else 1.0) for noise in super().noise()]


class CopiesNoise(Liar):
    """The noise of the first tensor in the others; mild: as a tenth of their variance."""

    def noise(self):
        first, *others = super().noise()
        share = 1.0 if self.strong else 0.1
        copied = [first.flatten().repeat(1 + p.numel() // first.numel())[: p.numel()].view_as(p) for p in others]
        return [first, *(share**0.5 * c + (1 - share) ** 0.5 * n for c, n in zip(copied, others, strict=True))]


class ClipsTensors(Liar):
    """Clips each tensor to C; mild: the last tensor apart from the others."""

    def factors(self, rows):
        sizes = [p.numel() for p in self.params]
        groups = sizes if self.strong else [sum(sizes[:-1]), sizes[-1]]
        each = [
            (self.max_grad_norm / (part.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0).expand_as(part)
            for part in rows.split(groups, 1)
        ]
        return torch.cat(each, 1)


class NoiseByArrivals(Liar):
    """Noise that grows with the root of the records that arrived; mild: with their tenth root."""

    def noise(self):
        times = (self.arrived / self.expected_batch_size) ** (0.5 if self.strong else 0.1)
        return [noise * times for noise in super().noise()]


class FadingNoise(Liar):
    """Noise that fades by a tenth in each step; mild: by a hundredth."""

    def noise(self):
        return [noise * (0.9 if self.strong else 0.99) ** self.steps for noise in super().noise()]


LIARS = [
    ClipsTheBatch,
    TwiceTheClip,
    DividesByTheBatch,
    BareLargeTensors,
    SeededAnew,
    HalfNoise,
    EverySecondStep,
    CopiesNoise,
    ClipsTensors,
    NoiseByArrivals,
    FadingNoise,
]


def private(sizes=(64, 32, 10), batch=32, **named):
    """The optimizer of a PrivacyEngine for a network with layers of these sizes."""
    layers = [layer for size in itertools.pairwise(sizes) for layer in (nn.Linear(*size), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    data = TensorDataset(normal(Key(0), (320, sizes[0])), torch.arange(320) % sizes[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its generator
        return opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=batch),
            **({"noise_multiplier": 1.0, "max_grad_norm": 0.5} | named),
        )[1]


def audited(optimizer, seed=0, trials=100):
    with stepping(optimizer) as name:
        return audit(STEP, {"of": name}, {"dim": 36}, 1, trials=trials, seed=seed)["audited"]


@pytest.mark.matrix
@pytest.mark.ci(2)  # the mild ones
@pytest.mark.parametrize("strong", [False, True], ids=["mild", "strong"])
@pytest.mark.parametrize("liar", LIARS)
def test_an_optimizer_that_lies_is_contradicted(liar, strong, young):
    optimizer = private()
    optimizer.__class__, optimizer.strong = liar, strong
    assert audited(optimizer)["verdict"] == "CONTRADICTED"


@pytest.mark.matrix
def test_the_same_optimizer_in_other_words_is_consistent(young):
    optimizer = private()
    optimizer.__class__ = Honest
    assert audited(optimizer)["verdict"] == "CONSISTENT"


@pytest.mark.matrix
@pytest.mark.ci("function")
@pytest.mark.parametrize("bound", [True, False], ids=["method", "function"])
def test_a_method_that_was_replaced_on_the_object_is_audited_and_stays_in_place(bound, young):
    optimizer = private()

    def bare(self):
        for p in self.params:
            p.grad = p.summed_grad.view_as(p)

    optimizer.add_noise = types.MethodType(bare, optimizer) if bound else lambda: bare(optimizer)
    replaced, before = optimizer.add_noise, dict(vars(optimizer))
    assert audited(optimizer)["verdict"] == "CONTRADICTED"
    assert optimizer.add_noise is replaced
    assert vars(optimizer) == before
    assert all(p.grad is None for p in optimizer.params)


def seeded():
    return torch.Generator().manual_seed(5)


HONEST = [
    {},
    {"noise_generator": seeded()},
    {"loss_reduction": "sum"},
    {"poisson_sampling": False, "batch": 5},
    {"secure_mode": True},
    {"max_grad_norm": 1e-4},
    {"max_grad_norm": 1e3, "noise_multiplier": 0.05},
    {"noise_multiplier": 8.0, "batch": 160},
    {"sizes": (16,) * 30 + (3,)},
    {"sizes": (784, 128, 10), "noise_generator": seeded(), "loss_reduction": "sum"},
]


def honest(named):
    """The optimizer; `secure_mode` without the package that Opacus asks for."""
    optimizer = private(**{name: value for name, value in named.items() if name != "secure_mode"})
    optimizer.secure_mode = named.get("secure_mode", False)
    return optimizer


@pytest.mark.matrix
@pytest.mark.ci("poisson_sampling,batch", "max_grad_norm,noise_multiplier", "sizes,noise_generator,loss_reduction")
@pytest.mark.parametrize("named", HONEST, ids=lambda named: ",".join(named) or "defaults")
def test_an_honest_optimizer_with_documented_arguments_is_consistent(named, young):
    found = audited(honest(named))
    assert found["verdict"] == "CONSISTENT", found["contradictions"]


@pytest.mark.slow
@pytest.mark.parametrize("named", HONEST)
def test_at_most_one_of_twenty_audits_of_an_honest_optimizer_is_a_false_alarm(named):
    # 200 audits at 1 in 1,000: more than 1 false alarm in 20 has probability 2e-4
    verdicts = [audited(honest(named), seed)["verdict"] for seed in range(20)]
    assert verdicts.count("CONSISTENT") >= 19
