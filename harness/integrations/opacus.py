"""An Opacus training: what it promises, an audit of its own optimizer, and attacks on the gradients that it would send.

A step of DP-SGD clips the gradient of each record, adds normal noise to the sum, and divides by the expected batch.
`Step` is that step as a defense of one record: `DPOptimizer.pre_step` of the user's own optimizer object makes its
messages from the gradient of one record. The audit thus tests the optimizer itself, not a copy of its formula.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import data as loading

from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import repeat
from leakgauge.harness.core.checks import check_update
from leakgauge.harness.core.claim import Claim, Proof, Relation, Unit, claim_over
from leakgauge.harness.core.codec import pack_float32, unpack_float32
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import Additive, MessageDistribution, Normal, projected
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout, Vector

STEP = "leakgauge.harness.integrations.opacus:Step"
"""The name of `Step` as a defense."""

DIM = 36
"""Length of a gradient in the audit; a bound for a small model is a bound for the mechanism."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""(scores, labels) -> the mean loss over a batch."""

_OPTIMIZERS: dict[str, Any] = {}
"""The optimizers of `Step` in this process, by name, because a parameter of a defense is a plain value."""


class OpacusError(ValueError):
    """An optimizer or a loader that cannot be inspected; the message is one line."""


class Facts(NamedTuple):
    """The facts of an Opacus training.

    Attributes:
        clip: C, bound on the l2 norm of one record's gradient.
        noise: z, standard deviation of the noise in a step's sum, in units of the clip.
        batch: B, the expected number of records in a step, by which the sum is divided.
        samples: N, records of the data set.
        steps: steps in an epoch.
        poisson: whether a step takes each record independently, as the accountant assumes.
        share: q, the probability with which a step takes a record, if `poisson`; else 0.
        weight: if not `poisson`, the largest sum over an epoch's steps of the squared number of draws of one record; 1
            if an epoch draws no record twice. It divides the variance of the noise; 0 if `poisson`.
    """

    clip: float
    noise: float
    batch: int
    samples: int
    steps: int
    poisson: bool
    share: float
    weight: int


def facts_of(optimizer: Any, loader: Any) -> Facts:
    """The facts of a training with the optimizer and the loader of `PrivacyEngine.make_private`.

    Raises:
        OpacusError: the optimizer is not Opacus' `DPOptimizer` with one clip for the whole gradient; the loader has no
            known length; nothing bounds how often its sampler draws a record.
    """
    from opacus.optimizers import DPOptimizer

    if type(optimizer).__name__.endswith("FastGradientClipping"):
        raise OpacusError("ghost clipping does its clipping in the backward pass: use grad_sample_mode='hooks'")
    if not isinstance(optimizer, DPOptimizer):
        raise OpacusError(f"expected the optimizer that make_private returned, got {type(optimizer).__name__}")
    if type(optimizer).__module__.startswith("opacus.") and type(optimizer) is not DPOptimizer:
        text = "per-layer, adaptive and distributed clipping have other claims"
        raise OpacusError(f"expected DPOptimizer with flat clipping, got {type(optimizer).__name__}: {text}")
    samples, steps, share, weight = _draws(loader)
    clip, noise = float(optimizer.max_grad_norm), float(optimizer.noise_multiplier)
    if not (0 < clip < math.inf and 0 < noise < math.inf):
        raise OpacusError(f"expected max_grad_norm > 0 and noise_multiplier > 0, got {clip:g} and {noise:g}")
    batch = int(optimizer.expected_batch_size or round(samples / steps))
    return Facts(clip, noise, batch, samples, steps, share > 0, share, weight)


def _draws(loader: Any) -> tuple[int, int, float, int]:
    """Samples, steps, share and weight of `Facts`, by the type of the sampler; nothing is drawn at random."""
    from opacus.utils.batch_memory_manager import BatchSplittingSampler
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler

    try:
        data, sampler, samples, _ = loader.dataset, loader.batch_sampler, len(loader.dataset), len(loader)
    except (AttributeError, TypeError) as error:
        text = f"expected a data loader with a length over a data set with a length, got {type(loader).__name__}"
        raise OpacusError(text) from error
    own = getattr(type(loader), "__iter__", None) is not loading.DataLoader.__iter__
    while type(sampler) is BatchSplittingSampler:  # of BatchMemoryManager: one step takes all of its parts
        sampler = sampler.sampler
    if own or isinstance(data, loading.IterableDataset):
        raise _unknown(loader if own else data)
    if (copies := max(Counter(_records(data)).values(), default=1)) > 1:
        raise OpacusError(f"{type(data).__name__} holds a record {copies} times: inspect a data set that holds it once")
    if type(sampler) is UniformWithReplacementSampler:
        return samples, len(sampler), min(1.0, float(sampler.sample_rate)), 0
    weight = _weight(sampler, samples)
    return samples, len(sampler), 0.0, weight


def _weight(batches: Any, n: int) -> int:
    """The weight of `Facts`: counted if the order is fixed, else the square of the most draws in an epoch."""
    order, many = batches.sampler if type(batches) is loading.BatchSampler else batches, Counter[int]()
    if type(order) in (list, tuple, range, loading.SequentialSampler):
        for batch in batches:
            step = Counter(int(row) % n for row in batch)  # -1 is also the last record
            many.update({record: times**2 for record, times in step.items()})
        return max(many.values(), default=0)
    if type(order) is loading.RandomSampler and not order.replacement:
        return int(math.ceil(order.num_samples / len(order.data_source)) ** 2)
    if type(order) is loading.SubsetRandomSampler:
        return int(max(Counter(int(row) % n for row in order.indices).values(), default=0) ** 2)
    if type(order) is loading.WeightedRandomSampler and not order.replacement:
        return 1
    raise _unknown(order)


def _records(data: Any) -> list[tuple[int, int]]:
    """The data set and the index that each record comes from, inside torch's subsets and concatenations."""
    if type(data) is loading.Subset:
        inner = _records(data.dataset)
        return [inner[int(row)] for row in data.indices]
    if type(data) is loading.ConcatDataset:
        return [record for subset in data.datasets for record in _records(subset)]
    return [(id(data), row) for row in range(len(data))]


def _unknown(what: Any) -> OpacusError:
    name = "a loader with batch_size=None" if what is None else type(what).__name__
    return OpacusError(f"{name} may draw a record any number of times: use poisson_sampling=True, or shuffle=True")


def claim_of(facts: Facts, epochs: int, delta: float, accountant: str = "prv") -> Claim:
    """The accountant's epsilon for a training of `epochs` epochs as the claim, and the proof for its batches.

    With Poisson sampling, the accountant counts every step with probability 1/steps, the proof with the sampler's own.
    Without it (`poisson_sampling=False`), the accountant counts the same, but its formula requires independent draws. A
    record that a step draws k times adds up to k clips to it, so an epoch is at most one step with noise z /
    sqrt(weight). This assumes that a missing record leaves its place in the order empty.

    Args:
        delta: the delta of the epsilons.
        accountant: the engine's accountant: prv (its default), rdp or gdp.
    """
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from opacus.accountants import create_accountant

    counted, count = create_accountant(accountant), epochs * facts.steps
    counted.history = [(facts.noise, 1 / facts.steps, count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the orders that the accountant tries
        claimed = float(counted.get_epsilon(delta))
    alone, noisy = GaussianDpEvent(facts.noise), f"noise of {facts.noise:.4g} clips"
    if facts.poisson:
        step = alone if facts.share == 1 else PoissonSampledDpEvent(facts.share, alone)
        why = f"{count} steps with {noisy}, each taking a record with probability {facts.share:.4g}."
        proof = Proof(repeat(step, count), Unit.RECORD, "privacy loss distribution", why, tight=facts.share == 1)
    else:
        many = "" if facts.weight == 1 else f" that count as {facts.weight}"
        why = f"without Poisson sampling a record is in a step{many} of each of {epochs} epochs, with {noisy}."
        proof = Proof.gaussian(facts.noise, epochs * facts.weight, Unit.RECORD, why, tight=False)
    return claim_over(
        1,
        claimed,
        proof,
        source=f"Opacus, accountant {accountant}, {epochs} epochs",
        delta=delta,
        relation=Relation.ADD_REMOVE,
        assumes=("each step takes every record independently",),
    )


@dataclass(frozen=True)
class Step(Defense[None, None]):
    """One step of an Opacus optimizer, as the defense of one record; the adversary knows the rest of the batch.

    A message is the sum that the step would divide by the expected batch: the record's clipped gradient plus noise.

    Args:
        of: the name under which `stepping` holds the optimizer.
        delta: of the claim.

    Guarantees:
        4 * d bytes.
        A message minus the clipped gradient is normal with standard deviation z C in each coordinate, independently.
        The lowest bits are not covered: torch draws normal numbers in float32, which leaves traces in them (arXiv
        2112.05307); Opacus' `secure_mode` avoids this.

    Source: Abadi et al. 2016, Algorithm 1; Opacus' `DPOptimizer`. Its noise comes from torch's global generator, or
    from one that it was given; the private key seeds both here.
    """

    of: str
    delta: float = 1e-5

    @property
    def optimizer(self) -> Any:
        """The optimizer.

        Raises:
            OpacusError: the optimizer is not in this process.
        """
        if self.of not in _OPTIMIZERS:
            raise OpacusError(f"no optimizer {self.of!r} in this process: see leakgauge.opacus.inspect")
        return _OPTIMIZERS[self.of]

    @property
    def std(self) -> float:
        """z C."""
        return float(self.optimizer.noise_multiplier) * float(self.optimizer.max_grad_norm)

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """The optimizer's step on a batch of only this record; the private key seeds all generators that it uses."""
        check_update(update)
        with rng.global_generators(private.child("own")):
            start = torch.get_rng_state()
        with rng.global_generators(private):
            noisy = step_of(self.optimizer, update, link.setting.layout, start)
        return pack_float32(noisy), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The noisy clipped gradient."""
        return unpack_float32(received, link.setting.dim)

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """|y - clip(u)|^2 / (2 z^2 C^2)."""
        sent = torch.stack([unpack_float32(wire, links.setting.dim) for wire in received])
        clip, std = float(self.optimizer.max_grad_norm), self.std

        def score(update: Tensor) -> Tensor:
            norm = torch.linalg.vector_norm(update, dim=-1, keepdim=True).clamp(min=1e-30)
            misfit: Tensor = (update * (clip / norm).clamp(max=1.0) - sent) / std
            return misfit.square().sum(-1) / 2

        return score

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """Normal around the gradient's projection onto the ball of radius C."""
        return Additive(projected(update, float(self.optimizer.max_grad_norm)), Normal(), self.std, fair=False)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """The claim of a step that takes the record with certainty: sensitivity C, noise z C."""
        reason = "normal noise on a sum to which a record adds at most the clip."
        noise = float(self.optimizer.noise_multiplier)
        proved = Proof.gaussian(noise, len(history), Unit.MESSAGE, reason)
        return claim_over(
            len(history),
            proved.epsilon(self.delta),
            proved,
            source="a step of Opacus that takes the record",
            delta=self.delta,
            relation=Relation.ADD_REMOVE,
        )


@contextmanager
def stepping(optimizer: Any) -> Iterator[str]:
    """The name by which `Step` finds the optimizer, inside the block; its generator has its state back afterwards."""
    name = next(text for number in itertools.count() if (text := f"optimizer-{number}") not in _OPTIMIZERS)
    _OPTIMIZERS[name] = optimizer
    drawn = optimizer.generator if not optimizer.secure_mode else None
    state = drawn.get_state() if drawn is not None else None
    try:
        yield name
    finally:
        del _OPTIMIZERS[name]
        if drawn is not None:
            drawn.set_state(state)


def step_of(optimizer: Any, gradient: Vector, layout: Layout, start: Tensor | None = None) -> Vector:
    """[d]: the sum that the optimizer's own `pre_step` makes of a batch of one record with this gradient [d].

    The step acts on separate parameters of these shapes; the model, the optimizer's state and its accountant do not
    change.

    start: the state in which generators of the optimizer's own begin; default: their present state.
    """
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in layout.shapes]
    twin = object.__new__(type(optimizer))  # Opacus' optimizers cannot be copied
    twin.__dict__ |= optimizer.__dict__
    twin.original_optimizer = torch.optim.SGD(parameters, lr=1.0)
    twin.step_hook, twin._step_skip_queue, twin._is_last_step_skipped = None, [], False
    if not optimizer.secure_mode:  # its generator is a device without a state
        kind = type(torch.default_generator)
        twin.__dict__ |= {name: _twin(value, start) for name, value in vars(twin).items() if isinstance(value, kind)}
    for parameter, tensor in zip(parameters, layout.split(gradient), strict=True):
        parameter.summed_grad = None  # type: ignore[attr-defined]  # Opacus' own
        parameter.grad_sample = tensor[None].clone()  # type: ignore[attr-defined]
    twin.pre_step()
    noisy: Vector = layout.join([parameter.grad for parameter in parameters if parameter.grad is not None])
    return noisy * _divisor(optimizer)


def _twin(generator: Any, start: Tensor | None) -> Any:
    """A copy of a generator, in the state `start` if one is given, but with its own seed.

    An optimizer that goes back to this seed in each step thus repeats its noise here too.
    """
    if start is None:
        return generator.clone_state()
    seed = (generator.initial_seed() % (1 << 64)).to_bytes(8, "little")
    state = torch.cat([torch.tensor(list(seed), dtype=torch.uint8), start[8:]])  # torch's state begins with the seed
    return torch.default_generator.clone_state().set_state(state)


def _divisor(optimizer: Any) -> float:
    return float(optimizer.expected_batch_size) if optimizer.loss_reduction == "mean" else 1.0


def bare(model: nn.Module) -> nn.Module:
    """A copy of the network without the hooks of `GradSampleModule`.

    Raises:
        OpacusError: the model is not one that `make_private` returned.
    """
    from opacus import GradSampleModule

    if not isinstance(model, GradSampleModule):
        raise OpacusError(f"expected the model that make_private returned, got {type(model).__name__}")
    network: nn.Module = copy.deepcopy(model).to_standard_module()
    network.zero_grad(set_to_none=True)
    return network


def gradient_of(model: nn.Module, optimizer: Any, loss: Loss, x: Tensor, y: Tensor) -> list[Tensor]:
    """The sum of a step of this optimizer for a batch x, y: clipped gradients and noise, before the division.

    The tensors have the order of the trainable parameters. Parameters, the optimizer's state and the accountant do not
    change; gradients that are being accumulated are lost.
    """
    hook, optimizer.step_hook = optimizer.step_hook, None
    training = model.training
    try:
        model.train()  # otherwise Opacus has no per-example gradients
        optimizer.zero_grad()
        loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.pre_step()
        scale = _divisor(optimizer)
        tensors = [p.grad * scale for p in model.parameters() if p.grad is not None and p.requires_grad]
    finally:
        optimizer.zero_grad()
        optimizer.step_hook = hook
        model.train(training)
    return tensors
