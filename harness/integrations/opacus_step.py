"""One step of an Opacus optimizer as a defense, and attacks on the gradients that it would send.

A step of DP-SGD clips the gradient of each record, adds normal noise to the sum, and divides by the expected batch.
`Step` runs the user's own optimizer object on given gradients. The audit thus tests the optimizer itself, not a copy of
its formula.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update
from leakgauge.harness.core.claim import Claim, Proof, Relation, Unit, claim_over
from leakgauge.harness.core.codec import pack_float32, unpack_float32
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links, OnTensors, Sender, Setting
from leakgauge.harness.core.distribution import Additive, MessageDistribution, Normal, numbers
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.integrations.opacus import OpacusError
from leakgauge.harness.learn import losses

STEP = "leakgauge.harness.integrations.opacus_step:Step"
"""The name of `Step` as a defense."""

DIM = 36
"""Length of a gradient in the trials of an audit."""

_EACH, _MOST, _WIDE = 20, 250, 5000
"""The records of a client for each record in its batch; the most records of a batch; and the records of a client whose
batch has twice the expected size, if this is between the most records and four times as many."""

_NORMS = (3.0, 0.4, 1.0, 50.0, 1.001, 0.999)  # norms of the other gradients in a batch, in clips

_REPLACED = ("original_optimizer", "step_hook", "_step_skip_queue", "_is_last_step_skipped")
"""Attributes of an optimizer that a step of the audit does not use."""

_FAR = 1e15  # the largest number of a gradient; larger gradients are scaled to it, which their clip hides
_HOW = ("whole", "whole", "split", "split", "accumulated")  # how a client's batch reaches the optimizer, by its number

_WHOLE, _FEW = 1000, 100
"""Length of an update from which a step acts on the layout's own tensors, and below which it acts on small ones."""

_TENSORS, _CUT, _LARGEST = (4, 8), (1200, 2000), 3_000_000
"""The most tensors of a step, and the most numbers of a tensor, with short and longer updates; and the most numbers of
all tensors together."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""(scores, labels) -> the mean loss over a batch."""


class _Held(NamedTuple):
    """An optimizer, how the batches of clients reach it, in turn, and the inner optimizers of its steps by layout.

    The inner optimizers stay, so that what an optimizer writes on its parameters changes later messages.
    """

    optimizer: Any
    ways: tuple[str, ...]
    inner: dict[Layout, torch.optim.Optimizer]


_OPTIMIZERS: dict[str, _Held] = {}
"""The optimizers of `Step` in this process, by name, because a parameter of a defense is a plain value."""


Memory = dict[str, Any]
"""The attributes of an optimizer between two steps; they are not changed."""


@dataclass(frozen=True)
class Step(Defense[None, Memory], OnTensors):
    """One step of an Opacus optimizer, as the defense of one record; the adversary knows the rest of the batch.

    A message is the sum that the step would divide by the expected batch: clipped gradients plus noise. A client is a
    training: its memory holds the optimizer's attributes after its steps. Its batch has `Sender.samples` / 20 records
    (at least one): the record whose gradient is the update, and others with known gradients. An update of zero is a
    record that is not in the batch. Of five clients, two split their batch as `BatchMemoryManager` does, and one
    accumulates it over backward passes.

    A step acts on the user's own tensors. If these have more numbers than an update, a step acts on up to
    `_TENSORS` of them, cut to `_CUT` numbers each; an update and a message are then some of their numbers.

    Args:
        of: the name under which `stepping` holds the optimizer.
        delta: of the claim.

    Guarantees:
        4 * d bytes.
        A message minus the clipped gradients is normal with standard deviation z C in each coordinate, independently.
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
        return _OPTIMIZERS[self.of].optimizer

    @property
    def clip(self) -> float:
        """C."""
        return float(self.optimizer.max_grad_norm)

    @property
    def std(self) -> float:
        """z C."""
        return float(self.optimizer.noise_multiplier) * self.clip

    @property
    def layout(self) -> Layout:
        """The user's own tensors, in all at most about `_LARGEST` numbers: larger tensors are cut."""
        shapes = _shapes(self.optimizer)
        if sum(map(math.prod, shapes)) <= _LARGEST:
            return _layout(shapes)
        most = _LARGEST // len(shapes)
        left = _LARGEST - sum(min(math.prod(shape), most) for shape in shapes)
        large = sum(math.prod(shape) > most for shape in shapes)
        return _layout([_cut(shape, most + left // large) for shape in shapes])

    @property
    def looked_at(self) -> str:
        """How batches reached the optimizer, and its tensors, as the end of a sentence."""
        ways = list(dict.fromkeys(_OPTIMIZERS[self.of].ways))
        sizes, given = self.layout.sizes, sum(map(math.prod, _shapes(self.optimizer)))
        cut = "" if sum(sizes) == given else f", cut from {given:,} numbers in all"
        return (
            f"; batches of 0 to {self.records(Sender(0, _WIDE))} records, {', '.join(ways)}, in steps 1 to 26; "
            f"{len(sizes)} tensors of the optimizer, of {min(sizes):,} to {max(sizes):,} numbers{cut}"
        )

    def records(self, sender: Sender) -> int:
        """The records of a client's batch, with the one whose gradient is the update."""
        expected = int(self.optimizer.expected_batch_size or 0)
        if sender.samples >= _WIDE:
            return max(_MOST, min(2 * expected, 4 * _MOST))
        return max(1, min(_MOST, sender.samples // _EACH))

    def remember(self, setting: Setting) -> Memory:
        """The optimizer's present attributes."""
        return _copied(self.optimizer, vars(self.optimizer))

    def encode(self, state: None, memory: Memory, update: Vector, link: Link, private: Key) -> tuple[bytes, Memory]:
        """The optimizer's step on the batch; the private key seeds all generators that it uses."""
        check_update(update)
        start, kind = None, type(torch.default_generator)
        if any(isinstance(value, kind) for value in memory.values()):
            with rng.global_generators(private.child("own")):
                start = torch.get_rng_state()
        number, held = link.sender.number, _OPTIMIZERS[self.of]
        layout, places = _view(_shapes(self.optimizer), link.setting.layout, number)
        if layout not in held.inner:
            held.inner[layout] = _inner(layout)
        records = _others(self.records(link.sender) - 1, link.setting.dim, self.clip)[0]
        # a float32 norm above 1e19 is infinite, and Opacus drops its record
        update = update * min(1.0, _FAR / max(float(update.abs().max()), 1e-30))
        records = torch.cat([records, update[None]]) if bool(update.any()) else records
        if places is not None:
            records = torch.zeros(len(records), layout.dim).index_copy_(1, places, records)
        how = held.ways[number % len(held.ways)]
        with rng.global_generators(private):
            noisy, after = _step(self.optimizer, held.inner[layout], records, layout, memory, start, how)
        return pack_float32(noisy if places is None else noisy[places]), after

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The noisy sum of clipped gradients."""
        return unpack_float32(received, link.setting.dim)

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """|y - others - clip(u)|^2 / (2 z^2 C^2)."""
        dim, clip, std = links.setting.dim, self.clip, self.std
        others = [_others(self.records(sender) - 1, dim, clip)[1] for sender in links.senders]
        sent = torch.stack([unpack_float32(wire, dim) for wire in received]) - torch.tensor(np.array(others)).float()

        def score(update: Tensor) -> Tensor:
            norm = torch.linalg.vector_norm(update, dim=-1, keepdim=True).clamp(min=1e-30)
            misfit: Tensor = (update * (clip / norm).clamp(max=1.0) - sent) / std
            return misfit.square().sum(-1) / 2

        return score

    def message_distribution(self, state: None, memory: Memory, update: Vector, link: Link) -> MessageDistribution:
        """Normal around the sum of the clipped gradients."""
        others = _others(self.records(link.sender) - 1, link.setting.dim, self.clip)[1]
        return Additive(_clipped(update, self.clip) + others, Normal(), self.std, fair=False)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """The claim of a step that takes the record with certainty: sensitivity C, noise z C."""
        noise, rounds = float(self.optimizer.noise_multiplier), len(history)
        reason = "normal noise on a sum to which a record adds at most the clip."
        proved = Proof.gaussian(noise, rounds, Unit.MESSAGE, reason)
        promised, source = proved.epsilon(self.delta), "a step of Opacus that takes the record"
        return claim_over(rounds, promised, proved, source=source, delta=self.delta, relation=Relation.ADD_REMOVE)


@contextmanager
def stepping(optimizer: Any) -> Iterator[str]:
    """The name by which `Step` finds the optimizer, inside the block; its generator has its state back afterwards."""
    name = next(text for number in itertools.count() if (text := f"optimizer-{number}") not in _OPTIMIZERS)
    _OPTIMIZERS[name] = _Held(optimizer, tuple(how for how in _HOW if _runs(optimizer, how)), {})
    drawn = optimizer.generator if not optimizer.secure_mode else None
    state = drawn.get_state() if drawn is not None else None
    try:
        yield name
    finally:
        del _OPTIMIZERS[name]
        if drawn is not None:
            drawn.set_state(state)


def _runs(optimizer: Any, how: str) -> bool:
    """Whether the optimizer takes a batch in this way; one that does not could not train in this way either."""
    layout = _layout([(2,)])
    try:
        with rng.global_generators(Key(0)):
            attributes = _copied(optimizer, vars(optimizer))
            _step(optimizer, _inner(layout), torch.ones(2, 2), layout, attributes, torch.get_rng_state(), how)
    except Exception:
        return how == "whole"
    return True


def _inner(layout: Layout) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(shape)) for shape in layout.shapes], lr=1.0)


def _step(
    optimizer: Any,
    inner: torch.optim.Optimizer,
    records: Tensor,
    layout: Layout,
    attributes: dict[str, Any],
    start: Tensor | None,
    how: str,
) -> tuple[Vector, dict[str, Any]]:
    """The sum [d] of a step from these attributes, and the attributes after it; the optimizer gets its own back."""
    parameters = inner.param_groups[0]["params"]
    for parameter in parameters:
        parameter.data.zero_()
        parameter.grad = parameter.summed_grad = parameter.grad_sample = None
    parts = records.chunk(2) if how != "whole" and len(records) > 1 else (records,)
    kind, own = type(torch.default_generator), dict(vars(optimizer))
    before = _copied(optimizer, attributes)
    before |= {name: _twin(value, start) for name, value in before.items() if isinstance(value, kind)}
    # a lambda of the user may hold the optimizer itself, so that a copy of the object would not do
    vars(optimizer).clear()
    vars(optimizer).update(before, original_optimizer=inner)
    vars(optimizer).update(zip(_REPLACED[1:], (None, [], False), strict=True))
    try:
        optimizer.zero_grad()
        for number, part in enumerate(parts):
            if how == "split":
                optimizer.signal_skip_step(do_skip=number < len(parts) - 1)
            for parameter, tensor in zip(parameters, layout.split(part), strict=True):
                if how == "accumulated" and len(parts) > 1:
                    parameter.grad_sample = [*(parameter.grad_sample or ()), tensor.clone()]
                else:
                    parameter.grad_sample = tensor.clone()
            if how == "accumulated" and number < len(parts) - 1:
                continue
            optimizer.step()
            if number < len(parts) - 1:
                optimizer.zero_grad()
        after = dict(vars(optimizer))
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(own)
    with torch.no_grad():
        moved = layout.join([-parameter for parameter in parameters])
    times = len(parts) if how == "accumulated" and optimizer.loss_reduction == "mean" else 1
    return moved * (_divisor(optimizer) * times), after | {name: own[name] for name in _REPLACED if name in own}


def _twin(generator: Any, start: Tensor | None) -> Any:
    """A copy of a generator, in the state `start` if one is given, but with its own seed.

    An optimizer that goes back to this seed in each step thus repeats its noise here too. A device without a state,
    such as that of `secure_mode`, is replaced by the global generator.
    """
    try:
        if start is None:
            return generator.clone_state()
        seed = (generator.initial_seed() % (1 << 64)).to_bytes(8, "little")
    except RuntimeError:
        return None
    state = torch.cat([torch.tensor(list(seed), dtype=torch.uint8), start[8:]])  # torch's state begins with the seed
    return torch.default_generator.clone_state().set_state(state)


def _copied(optimizer: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """A deep copy of an optimizer's attributes, without its tensors, its inner optimizer and its generators."""
    plain = (int, float, str, type(None), type(torch.default_generator), torch.optim.Optimizer, nn.Module)
    kept = {name: value for name, value in attributes.items() if isinstance(value, plain) or name in _REPLACED}
    changing = {name: value for name, value in attributes.items() if name not in kept}
    if not changing:
        return kept
    same = (optimizer, *optimizer.params, *kept.values())
    try:
        return kept | copy.deepcopy(changing, {id(value): value for value in same})
    except Exception:  # something that cannot be copied
        return dict(attributes)


def _view(shapes: tuple[tuple[int, ...], ...], layout: Layout, number: int) -> tuple[Layout, Tensor | None]:
    """The tensors of the steps of a client, and the places [d] of a message's numbers in them; None: all.

    The tensors are those of the layout if it is large, or larger than the user's tensors.
    """
    if not layout.dim < min(_WHOLE, sum(map(math.prod, shapes)) + 1) or layout.shapes == shapes:
        return layout, None
    size = 0 if layout.dim < _FEW else 1
    rows = math.ceil(len(shapes) / _TENSORS[size])
    return _part(shapes, layout.dim, size, number % (2 * rows))


@functools.lru_cache(maxsize=256)
def _part(shapes: tuple[tuple[int, ...], ...], dim: int, size: int, turn: int) -> tuple[Layout, Tensor]:
    """Some tensors in turn, cut, and places in them: the first numbers of each, or numbers everywhere."""
    first, chosen = turn // 2 * _TENSORS[size], list[tuple[int, ...]]()
    for at in range(len(shapes)):
        if len(chosen) >= _TENSORS[size] and sum(map(math.prod, chosen)) >= dim:
            break
        shape = shapes[(first + at) % len(shapes)]
        chosen.append(_cut(shape, max(dim, _CUT[size])))
    layout, left, places, begin = _layout(chosen), dim, list[Tensor](), 0
    counts = dict[int, int]()
    for rank, tensor in enumerate(sorted(range(len(chosen)), key=layout.sizes.__getitem__)):
        counts[tensor] = min(layout.sizes[tensor], left // (len(chosen) - rank))
        left -= counts[tensor]
    for tensor, length in enumerate(layout.sizes):
        everywhere = torch.arange(counts[tensor]) * length // max(1, counts[tensor])
        places.append(begin + (everywhere if turn % 2 else torch.arange(counts[tensor])))
        begin += length
    return layout, torch.cat(places)


def _shapes(optimizer: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in optimizer.params)


def _layout(shapes: Sequence[tuple[int, ...]]) -> Layout:
    return Layout(tuple(f"tensor {number}" for number in range(len(shapes))), tuple(shapes))


def _cut(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """A shape with at most this many numbers, if it has more: the first axes are cut."""
    sizes = list(shape)
    for axis in range(len(sizes)):
        rest = math.prod(sizes) // sizes[axis] if sizes[axis] else 1
        sizes[axis] = min(sizes[axis], max(1, most // max(1, rest)))
    return tuple(sizes)


@functools.lru_cache(maxsize=64)
def _others(count: int, dim: int, clip: float) -> tuple[Tensor, Numbers]:
    """Known gradients [count, dim] of norms below, at and above the clip, and the sum [dim] of them, clipped."""
    with rng.recorded():  # a constant of the audit, no draw of a message
        drawn = rng.normal(Key(0).child("others"), (count, dim), torch.float64)
    norms = clip * torch.tensor(_NORMS, dtype=torch.float64).repeat(1 + count // len(_NORMS))[:count, None]
    records = (drawn * (norms / drawn.norm(dim=1, keepdim=True))).float()
    return records, _clipped(records, clip).sum(0)


def _clipped(gradients: Tensor, clip: float) -> Numbers:
    """[..., d] float64: gradients times C / (norm + 1e-6) if their norm is larger, as Opacus documents."""
    values = numbers(gradients)
    largest = np.abs(values).max(-1, initial=1e-300, keepdims=True)
    norms = largest * np.linalg.norm(values / largest, axis=-1, keepdims=True)
    return np.asarray(values * np.minimum(1.0, clip / (norms + 1e-6)), np.float64)


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


def loss_of(given: object) -> tuple[str | None, Loss]:
    """What the attacks assume that the training minimizes (None: the usual loss), and the function that it minimizes.

    Raises:
        UnknownNameError, ValueError: as `text_of`.
    """
    text = losses.text_of(given)
    if text.startswith("given:"):
        return None, given  # type: ignore[return-value]
    return text or None, functools.partial(_minimized, losses.parse(text) if text else None)


def _minimized(loss: losses.Loss | None, scores: Tensor, y: Tensor) -> Tensor:
    """A named loss; None: cross-entropy, for one output the binary one."""
    one = loss is None and scores.shape[-1] == 1
    if one and not bool(((y == 0) | (y == 1)).all()):
        raise ValueError("expected labels 0 and 1 for a network with one output: state the loss, as in loss='squared'")
    return (loss or (losses.BINARY if one else losses.CROSS_ENTROPY)).batch(
        scores, y[:, 0] if y.shape[1:] == (1,) else y
    )


def shaped_as(data: Any, y: Tensor) -> Tensor:
    """Labels [n], or [n, 1] if those of the data set have an axis of length 1."""
    item = data[0]
    label = item[1] if isinstance(item, tuple | list) else None
    return y[:, None] if y.dim() == 1 and tuple(getattr(label, "shape", ())) == (1,) else y
