"""An Opacus training: its facts, what it promises, and what the audit of one step says about all of its steps."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from torch.utils import data as loading

from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import epsilon, gaussian_steps
from leakgauge.harness.core.claim import Claim, Code, Proof, Relation, Unit, claim_over
from leakgauge.harness.core.gaussian import gaussian_epsilon, gaussian_mu
from leakgauge.harness.core.result import AuditRecord
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import clopper_pearson

_BATCHES, _DRAWS, _ERROR = 5000, 2_000_000, 1e-3
"""The most batches and about the most draws of a record that are counted, and the error of the share's bound."""

_ACCOUNTANTS = ("prv", "rdp", "gdp")
_OURS = "leakgauge's own accounting"
_POINTS = 1e7  # of a grid of prv at most: they take 10 s and 3 GB; rdp and gdp take seconds at most


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
    if not (0 < clip < math.inf and 1e-100 < noise < 1e100):  # below, rdp does not end
        raise OpacusError(f"expected max_grad_norm > 0 and noise_multiplier > 0, got {clip:g} and {noise:g}")
    batch = int(optimizer.expected_batch_size or round(samples / steps))
    return Facts(clip, noise, batch, samples, steps, share > 0, share, weight)


def _draws(loader: Any) -> tuple[int, int, float, int]:
    """Samples, steps, share and weight of `Facts`, by the type of the sampler; nothing is drawn at random."""
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler

    try:
        data, sampler = loader.dataset, _sampler_of(loader)
        own = type(loader).__iter__ is not loading.DataLoader.__iter__
        if own or isinstance(data, loading.IterableDataset):
            raise _unknown(loader if own else data)
        samples = len(data)
    except (AttributeError, TypeError) as error:
        text = f"expected a data loader with a length over a data set with a length, got {type(loader).__name__}"
        raise OpacusError(text) from error
    if (copies := max(Counter(_records(data)).values(), default=1)) > 1:
        raise OpacusError(f"{type(data).__name__} holds a record {copies} times: inspect a data set that holds it once")
    poisson = type(sampler) is UniformWithReplacementSampler
    share, weight = (min(1.0, float(sampler.sample_rate)), 0) if poisson else (0.0, _weight(sampler, samples))
    if not len(sampler):
        raise OpacusError(f"expected a loader with batches, got none of {samples:,} records: lower its batch_size")
    return samples, len(sampler), share, weight


def _sampler_of(loader: Any) -> Any:
    """The batch sampler; inside a `BatchMemoryManager` that of the real loader: a step takes all parts of a batch."""
    from opacus.utils.batch_memory_manager import BatchSplittingSampler

    sampler = loader.batch_sampler
    while type(sampler) is BatchSplittingSampler:
        sampler = sampler.sampler
    return sampler


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
    if isinstance(data, loading.Subset):
        inner = _records(data.dataset)
        return [inner[int(row)] for row in data.indices]
    if isinstance(data, loading.ConcatDataset):
        return [record for subset in data.datasets for record in _records(subset)]
    return [(id(data), row) for row in range(len(data))]


def _unknown(what: Any) -> OpacusError:
    from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler

    name = "a loader with batch_size=None" if what is None else type(what).__name__
    if isinstance(what, loading.DistributedSampler | DistributedUniformWithReplacementSampler):
        return OpacusError(f"{name} draws for one of several processes: inspect a training in one process")
    return OpacusError(f"{name} may draw a record any number of times: use poisson_sampling=True, or shuffle=True")


class TrainingBound(NamedTuple):
    """A lower bound of the epsilon of a training, if all of its steps are like the audited one.

    Attributes:
        epsilon_lower, confidence: the bound, and the probability that it is one.
        drawn, draws: how often the sampler took a record, and in how many draws of a record; 0 if no draw is random.
    """

    epsilon_lower: float
    confidence: float
    drawn: int
    draws: int


def training_bound(
    facts: Facts, loader: Any, epochs: int, delta: float, step: AuditRecord, key: Key
) -> TrainingBound | None:
    """What the audit of one step says about a training whose records arrive by the loader's own sampler.

    The bound of the step bounds the distance of its two Gaussians from below, and the counted draws the share of steps
    that take a record. The bound is the epsilon of this composition of sampled Gaussians; without Poisson sampling, the
    epsilon of the draws of the record that is drawn most.

    None: the step is not consistent with its distribution, so that it may not be Gaussian.
    """
    if step.code != Code.CONSISTENT.value:
        return None
    mu, count = gaussian_mu(step.epsilon_lower, step.delta) if step.epsilon_lower > 0 else 0.0, epochs * facts.steps
    if not facts.poisson or facts.share == 1 or mu == 0:
        many = count if facts.poisson else epochs * facts.weight
        return TrainingBound(gaussian_epsilon(mu * math.sqrt(many), delta), step.confidence, 0, 0)
    drawn, draws = _count_draws(loader, key)
    share = clopper_pearson(drawn, draws, 1 - 2 * _ERROR).low or 0.0
    event = gaussian_steps(1 / mu, share, count)
    return TrainingBound(epsilon(event, delta), step.confidence - _ERROR, drawn, draws)


def _count_draws(loader: Any, key: Key) -> tuple[int, int]:
    """How often the sampler takes a record, and the draws; its generator has its state back afterwards."""
    sampler, drawn, draws = _sampler_of(loader), 0, 0
    own, sampler.generator = sampler.generator, None  # the global one, so that equal seeds give equal bounds
    try:
        with rng.global_generators(key):
            for number, batch in enumerate(itertools.chain.from_iterable(itertools.repeat(sampler))):
                if number == _BATCHES or draws >= _DRAWS:
                    break
                drawn, draws = drawn + len(set(batch)), draws + sampler.num_samples
    finally:
        sampler.generator = own
    return drawn, draws


def _counted(noise: float, share: float, count: int, delta: float, accountant: str) -> tuple[float, str]:
    """The accountant's epsilon, or ours if it has no finite one or would take too long; and whose it is."""
    from opacus.accountants import create_accountant

    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # about orders that the accountant tries, and that gdp is no bound
            if accountant == "prv" and (points := _points(noise, share, count, delta)) > _POINTS:
                raise ValueError(f"it would need {points:.1e} points")
            counted = create_accountant(accountant)
            counted.history = [(noise, share, count)]
            if not math.isfinite(found := float(counted.get_epsilon(delta))):
                raise ValueError(f"its epsilon is {found:g}")
        return max(0.0, found), f"Opacus, accountant {accountant}"
    except (ArithmeticError, ValueError, RuntimeError, MemoryError) as error:
        why = "it searches from 0 to 500" if accountant == "gdp" else " ".join(str(error).split())
        own = epsilon(gaussian_steps(noise, share, count), delta)
        return own, f"{_OURS}, because Opacus' accountant {accountant} gives no epsilon ({why})"


def _points(noise: float, share: float, count: int, delta: float) -> float:
    """The points of prv's grid, at its own errors of epsilon (0.01) and of delta."""
    from opacus.accountants.analysis.prv import PoissonSubsampledGaussianPRV, compute_safe_domain_size

    width = compute_safe_domain_size([PoissonSubsampledGaussianPRV(share, noise)], [count], 0.01, delta / 1000)
    return 2 * float(width) / 0.01 * math.sqrt(count * math.log(12_000 / delta) / 2)


def claim_of(facts: Facts, epochs: int, delta: float, accountant: str = "prv") -> Claim:
    """The accountant's epsilon for a training of `epochs` epochs as the claim, and the proof for its batches.

    With Poisson sampling, the accountant counts every step with probability 1/steps, the proof with the sampler's own.
    Without it (`poisson_sampling=False`), the accountant counts the same, but its formula requires independent draws. A
    record that a step draws k times adds up to k clips to it, so an epoch is at most one step with noise z /
    sqrt(weight). This assumes that a missing record leaves its place in the order empty.

    Where the accountant has no finite number or needs too long for it, the claim is our own epsilon for what it counts,
    and its source says so.

    Args:
        delta: the delta of the epsilons.
        accountant: the engine's accountant: prv (its default), rdp or gdp.

    Raises:
        OpacusError: the accountant is none of these, or not epochs >= 1 and 0 < delta < 1.
    """
    if not (epochs >= 1 and 0 < delta < 1 and accountant in _ACCOUNTANTS):
        expected = f"epochs >= 1, 0 < delta < 1 and the accountant {', '.join(_ACCOUNTANTS)}"
        raise OpacusError(f"expected {expected}, got epochs={epochs}, delta={delta}, accountant={accountant!r}")
    count = epochs * facts.steps
    claimed, source = _counted(facts.noise, 1 / facts.steps, count, delta, accountant)
    noisy = f"noise of {facts.noise:.4g} clips"
    if facts.poisson:
        event = gaussian_steps(facts.noise, facts.share, count)
        why = f"{count} steps with {noisy}, each taking a record with probability {facts.share:.4g}."
        proof = Proof(event, Unit.RECORD, "privacy loss distribution", why, tight=facts.share == 1)
    else:
        many = "" if facts.weight == 1 else f" that count as {facts.weight}"
        why = f"without Poisson sampling a record is in a step{many} of each of {epochs} epochs, with {noisy}."
        proof = Proof.gaussian(facts.noise, epochs * facts.weight, Unit.RECORD, why, tight=False)
    return claim_over(
        1,
        claimed,
        proof,
        source=f"{source}, {epochs} epochs",
        delta=delta,
        relation=Relation.ADD_REMOVE,
        assumes=("each step takes every record independently",),
    )


def notes_of(facts: Facts, claim: Claim) -> tuple[str, ...]:
    """Caveats: an epsilon that is not the accountant's, and a delta that protects too few records."""
    notes = [f"claimed by {claim.source}"] if claim.source.startswith(_OURS) else []
    few = f"delta {claim.delta:g} is not below one in {facts.samples:,} records: publishing all about one satisfies it"
    return (*notes, few) if claim.delta * facts.samples >= 1 else tuple(notes)
