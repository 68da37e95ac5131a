"""No proof of an Opacus training is below the epsilon that its sampler really gives, counted over many epochs."""

import contextlib
import math

import numpy as np
import opacus
import pytest
import torch
from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler
from scipy import optimize
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from leakgauge.harness.core.accounting import epsilon, gaussian_steps
from leakgauge.harness.core.gaussian import gaussian_delta, gaussian_epsilon
from leakgauge.harness.core.rng import Key, global_generators
from leakgauge.harness.core.stats import clopper_pearson
from leakgauge.harness.integrations.opacus import OpacusError, claim_of, facts_of
from tests.by_rows import by_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus, about its generator and its accountants

N, BATCH, EPOCHS, DELTA = 40, 8, 2000, 1e-5
LEVEL = 1 - 1e-6 / N
"""Each lower bound of a probability is wrong with probability 2.5e-8, so all of a training with 1e-6."""


class Records(Dataset):
    """The numbers of the records."""

    def __len__(self):
        return N

    def __getitem__(self, row):
        return (torch.tensor(range(N)[row]),)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Records())

    def __len__(self):
        return N


class Mine(Sampler):
    """The first records again and again."""

    def __iter__(self):
        return iter([row % 4 for row in range(N)])

    def __len__(self):
        return N


class MyRandom(RandomSampler):
    def __iter__(self):
        return iter(sorted(super().__iter__()) * 2)


class MyBatches(BatchSampler):
    def __iter__(self):
        return iter([batch * 2 for batch in super().__iter__()])


class MyPoisson(UniformWithReplacementSampler):
    def __iter__(self):
        return iter([batch * 2 for batch in super().__iter__()])


DATA, RARE = Records(), [1.0] * (N - 1) + [50.0]
TWICE = [*range(20), 0, 0, -N]
"""Record 0 four times, once as -N."""


def by(sampler):
    """The arguments of a loader with this sampler."""
    return {"sampler": sampler, "batch_size": BATCH}


def batched(sampler, size, drop):
    """The arguments of a loader with torch's batches of this sampler."""
    return {"batch_sampler": BatchSampler(sampler, size, drop)}


SAMPLERS = {  # the arguments of a loader, and what a refusal without Poisson sampling names
    "in order": (by(SequentialSampler(DATA)), ""),
    "random": (by(RandomSampler(DATA)), ""),
    "half": (by(RandomSampler(DATA, num_samples=20)), ""),
    "two and a half": (by(RandomSampler(DATA, num_samples=100)), ""),
    "of ten": (by(RandomSampler(range(10), num_samples=35)), ""),
    "replaced": (by(RandomSampler(DATA, replacement=True)), "RandomSampler"),
    "half replaced": (by(RandomSampler(DATA, replacement=True, num_samples=20)), "RandomSampler"),
    "subset": (by(SubsetRandomSampler(range(20))), ""),
    "subset with copies": (by(SubsetRandomSampler(TWICE)), ""),
    "weighted": (by(WeightedRandomSampler(RARE, 20, replacement=False)), ""),
    "weighted, replaced": (by(WeightedRandomSampler(RARE, N)), "WeightedRandomSampler"),
    "shuffled": ({"shuffle": True, "batch_size": BATCH}, ""),
    "batches": (batched(SequentialSampler(DATA), 7, False), ""),
    "whole batches": (batched(RandomSampler(DATA), 7, True), ""),
    "batches of copies": (batched(SubsetRandomSampler(TWICE), 7, True), ""),
    "batches, weighted": (batched(WeightedRandomSampler(RARE, N), 7, False), "WeightedRandomSampler"),
    "list": (by([0, 0, *range(20), 0]), ""),
    "range": (by(range(5, 25)), ""),
    "lists": ({"batch_sampler": [[0, 0, -N], [1, 2], [0, 3]]}, ""),
    "a process": (by(DistributedSampler(DATA, 2, 0)), "DistributedSampler draws for one of several processes"),
    "third process": (by(DistributedSampler(DATA, 3, 2, shuffle=False)), "DistributedSampler draws for one"),
    "mine": (by(Mine()), "Mine"),
    "my random": (by(MyRandom(DATA)), "MyRandom"),
    "my batches": ({"batch_sampler": MyBatches(RandomSampler(DATA), 4, False)}, "MyBatches"),
    "Poisson": ({"batch_sampler": UniformWithReplacementSampler(num_samples=N, sample_rate=0.3, steps=7)}, ""),
    "my Poisson": ({"batch_sampler": MyPoisson(num_samples=N, sample_rate=0.1)}, "MyPoisson"),
    "no batches": ({"batch_size": None}, "batch_size=None"),
}

LOOSE = ("half", "weighted", "two and a half", "of ten", "subset with copies", "batches of copies")
"""Where a record may miss an epoch, or where all draws of a record are rarely in one step."""


def private(poisson, **named):
    """Optimizer and loader of a PrivacyEngine with noise of 1 clip; a batch is a tensor of the records' numbers."""
    model = nn.Linear(2, 1)
    loader = DataLoader(DATA, collate_fn=lambda items: torch.tensor([row for (row,) in items], dtype=int), **named)
    made = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=poisson,
    )
    return made[1], made[2]


@contextlib.contextmanager
def split(optimizer, loader, is_split):
    """The loader, inside a memory manager if `is_split`."""
    with contextlib.ExitStack() as stack:
        if is_split:
            manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer)
            loader = stack.enter_context(manager)
        yield loader


def drawn(optimizer, loader):
    """How often each step of each epoch takes each record [EPOCHS][steps, N]; the optimizer says where a step ends."""
    epochs = []
    with global_generators(Key(0)):
        for _ in range(EPOCHS):
            rows, many = [], np.zeros(N)
            for batch in loader:
                many += np.bincount(np.asarray(batch), minlength=N)
                if not optimizer._check_skip_next_step():
                    rows.append(many)
                    many = np.zeros(N)
            assert not many.any()
            epochs.append(np.array(rows))
    return epochs


def true_epsilon(epochs, poisson):
    """A lower bound of the true epsilon of one epoch with noise of 1 clip, from the counted draws.

    Poisson sampling: of sampled Gaussians at the counted share. Else the order may be known, so that an epoch is a
    Gaussian whose distance is the root of the sum of the squared draws of the record.
    """
    if poisson:
        steps = len(epochs[0])
        assert {len(rows) for rows in epochs} == {steps}
        assert max(rows.max() for rows in epochs) == 1
        each = np.sum([rows.sum(0) for rows in epochs], 0)
        shares = [clopper_pearson(int(k), EPOCHS * steps, LEVEL).low for k in each]
        pooled = clopper_pearson(int(each.sum()), EPOCHS * steps * N, LEVEL).low
        return epsilon(gaussian_steps(1.0, max(*shares, pooled), steps), DELTA)
    weights = np.array([(rows**2).sum(0) for rows in epochs])
    return max(of_mixture(column) for column in {tuple(sorted(row)) for row in weights.T})


def of_mixture(weights):
    """The epsilon of a record with a random weight [EPOCHS], which the adversary sees, from its least probabilities."""
    values, counts = np.unique(weights, return_counts=True)
    above = np.cumsum(counts[::-1])[::-1]
    least = [clopper_pearson(int(count), len(weights), LEVEL).low for count in above]

    def excess(at):
        deltas = np.diff([0.0, *(gaussian_delta(math.sqrt(value), at) for value in values)])
        return float(np.dot(least, deltas)) - DELTA

    return optimize.brentq(excess, 0.0, 2000.0) if excess(0.0) > 0 else 0.0


@pytest.mark.slow
@pytest.mark.parametrize("is_split", [False, True], ids=["", "in parts"])
@pytest.mark.parametrize("poisson", [False, True], ids=["", "Poisson"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_no_proof_is_below_the_epsilon_of_the_counted_draws(name, poisson, is_split):
    named, refused = SAMPLERS[name]
    optimizer, loader = private(poisson, **named)
    with split(optimizer, loader, is_split) as loader:
        if refused and not poisson:
            with pytest.raises(OpacusError, match=refused) as error:
                facts_of(optimizer, loader)
            assert "\n" not in str(error.value)
            return
        facts = facts_of(optimizer, loader)
        proved = claim_of(facts, 1, DELTA).proved.epsilon(DELTA)
        is_poisson = poisson or name == "Poisson"
        assert facts.poisson == is_poisson
        epochs = drawn(optimizer, loader)
        true = true_epsilon(epochs, is_poisson)
        assert true <= proved
        assert true > 0.9 * proved or name in LOOSE
        assert {len(rows) for rows in epochs} == {facts.steps}


@pytest.mark.slow
def test_the_counted_draws_show_a_proof_that_is_too_small():
    for name, weight in (("weighted, replaced", 2), ("replaced", 1), ("mine", 19), ("my random", 1)):
        optimizer, loader = private(False, **SAMPLERS[name][0])
        assert true_epsilon(drawn(optimizer, loader), False) > gaussian_epsilon(math.sqrt(weight), DELTA)
    optimizer, loader = private(True, **by(RandomSampler(DATA)))
    facts = facts_of(optimizer, loader)
    less = claim_of(facts._replace(share=0.98 * facts.share), 1, DELTA)
    assert true_epsilon(drawn(optimizer, loader), True) > less.proved.epsilon(DELTA)


def test_streams_and_loaders_without_batches_are_refused():
    optimizer, _ = private(False, batch_size=BATCH)
    with pytest.raises(ValueError, match="IterableDataset"):
        DPDataLoader.from_data_loader(DataLoader(Stream(), batch_size=BATCH))
    with pytest.raises(OpacusError, match="Stream may draw a record any number of times"):
        facts_of(optimizer, DataLoader(Stream(), batch_size=BATCH))
    with pytest.raises(OpacusError, match="expected a loader with batches, got none of 40 records"):
        facts_of(optimizer, DataLoader(DATA, batch_size=64, shuffle=True, drop_last=True))


@pytest.fixture
def group():
    """A group of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@by_rows(False, True)
def test_the_samplers_of_several_processes_are_refused_by_name(is_split, group):
    optimizer, _ = private(False, batch_size=BATCH)
    sampler = DistributedUniformWithReplacementSampler(total_size=N, sample_rate=0.2)
    plain = DataLoader(DATA, batch_size=BATCH)
    for loader in (
        DataLoader(DATA, batch_sampler=sampler),
        DPDataLoader.from_data_loader(plain, distributed=True),
    ):
        with split(optimizer, loader, is_split) as wrapped:
            text = (
                "DistributedUniformWithReplacementSampler draws for one of several processes: inspect a training in one"
            )
            with pytest.raises(OpacusError, match=text):
                facts_of(optimizer, wrapped)
