"""Which tensors of a network read tokens, places and hidden states, found by dry runs and never by names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leakgauge.harness.core import rng
from leakgauge.harness.core.form import Tokens
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.called import Called
from leakgauge.harness.learn.losses import NEXT_TOKEN
from leakgauge.harness.learn.tasks import ModelTask

_KEY = Key(0).child("text", "dry run")
_SAME = 1e-4  # relative difference in double precision up to which two things count as equal
_ZERO = 1e-10  # of a singular value in double precision


class Source(NamedTuple):
    """Hidden states: the place-th floating tensor that a module gets, or its output if place is -1.

    kind: how they are arranged: `bt` [b, t, d], `tb` [t, b, d], `flat` [b * t, d], `steps`: t calls with [b, d].
    """

    path: str
    place: int
    kind: str


class Site(NamedTuple):
    """Weights whose gradients are sums of products with the same hidden states.

    weights: their numbers in the layout, and whether the inputs are the first axis. local: whether a state depends on
    the token at its place alone; causal: on this token and those before it. heard: [T], at which places the states are
    in the span of the gradients' rows.
    """

    source: Source
    weights: tuple[tuple[int, bool], ...]
    local: bool
    causal: bool
    heard: Tensor

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """[o, width]: the gradients of the weights, whose rows are combinations of the hidden states."""
        return torch.cat([tensors[at].T if turned else tensors[at] for at, turned in self.weights])


class Network(NamedTuple):
    """A network of tokens.

    Attributes:
        words: number of the tensor with a row for each token.
        tied: whether the words' tensor is also used elsewhere.
        sites: in the order of the forward pass.
        places: number of the tensor with a row for each place, and these rows; None: there is none.
        scale: of a word's row, if a place's row counts 1.
        short: whether the network also takes shorter texts.
    """

    task: ModelTask
    words: int
    tied: bool
    sites: tuple[Site, ...]
    places: tuple[int, Tensor] | None = None
    scale: float = 1.0
    short: bool = False

    @classmethod
    def of(cls, task: ModelTask, params: Vector) -> Network:
        """Find the tensors by dry runs.

        Raises:
            ValueError: the network has no embedding that is called with the ids.
        """
        assert isinstance(task.form, Tokens)
        numbers = {name: number for number, name in enumerate(task.layout.names)}
        tensors, x = task.layout.split(params.double()), _dry(task.input_shape[0], task.form.vocabulary.size)
        log, alone = _Log(task, x), _Log(task, x[:1])
        with log, torch.no_grad():
            task.model.apply(tensors, x, None)
        leaves = [each.clone().requires_grad_() for each in tensors]
        with alone:
            loss = task.loss_at(leaves, x[:1], _labels(task, params.double(), x[:1]))
        slopes = _slopes(loss, leaves)
        words = next((numbers[name] for name in log.embeddings(x) if name in numbers), None)
        if words is None:
            raise ValueError("expected an nn.Embedding that the network calls with the ids")
        present = torch.zeros(len(slopes[words]), dtype=torch.bool)
        present[x[0].long()] = True
        network = cls(task, words, bool(slopes[words][~present].any()), _sites(log, alone, numbers, slopes))
        network = network._with_places(tensors, x[:1])
        return network._replace(short=network._takes_short(params, x[:2]))

    def _with_places(self, tensors: Sequence[Tensor], x: Tensor) -> Network:
        """With the tensor of places: it gets the same slopes as the words' rows of a single text [1, T]."""
        first = next((site for site in self.sites if site.local), None)
        if first is None or len(torch.unique(x)) < x.shape[1]:
            return self
        leaves, log = [each.clone().requires_grad_() for each in tensors], _Log(self.task, x)
        with log:
            self.task.model.apply(leaves, x, None)
        states = log.arranged(first.source)
        slopes = _slopes((states * rng.normal(_KEY.child("mixed"), states.shape, torch.float64)).sum(), leaves)
        wanted = slopes[self.words][x[0].long()]
        for number, slope in enumerate(slopes):
            if number == self.words or slope.numel() % wanted.shape[1]:
                continue
            table = slope.reshape(-1, wanted.shape[1])
            rows = table.any(1).nonzero()[:, 0]
            if len(rows) == len(wanted):
                scale = float((wanted * table[rows]).sum() / table[rows].square().sum())
                if (wanted - scale * table[rows]).norm() < _SAME * wanted.norm():
                    return self._replace(places=(number, rows), scale=scale)
        return self

    def _takes_short(self, params: Vector, x: Tensor) -> bool:
        """Whether states of prefixes are those of whole texts."""
        causal, half = [site for site in self.sites if site.causal][-1:], max(1, x.shape[1] // 2)
        try:
            (whole,), (part,) = (self.states(params, ids, causal) for ids in (x, x[:, :half]))
        except (RuntimeError, ValueError, IndexError):
            return False
        return bool(torch.allclose(whole[:, :half], part, atol=1e-4, rtol=1e-3))

    def states(self, params: Vector, x: Tensor, sites: Sequence[Site]) -> list[Tensor]:
        """[b, t, d] the hidden states of ids x [b, t] at each site."""
        log = _Log(self.task, x, [site.source for site in sites])
        with log, torch.no_grad():
            self.task.model.apply(self.task.layout.split(params), x, None)
        return [log.arranged(site.source) for site in sites]


class _Stopped(Exception):
    """Ends a forward pass once all states are known."""


class _Log:
    """Hooks that record what modules get and give; with `wanted` sources, of their modules alone."""

    def __init__(self, task: ModelTask, x: Tensor, wanted: Iterable[Source] | None = None) -> None:
        assert isinstance(task.model.apply, Called)
        self.modules, (self.b, self.t) = dict(task.model.apply.module.named_modules()), x.shape
        self.got, self.gave = dict[str, list[list[Tensor]]](), dict[str, Tensor]()
        some = None if wanted is None else list(wanted)
        self.only = None if some is None else {source.path for source in some}
        self.stops = some is not None and all(source.place >= 0 and source.kind != "steps" for source in some)

    def __enter__(self) -> None:
        self.hooks = []
        for path, module in self.modules.items():
            if self.only is None or path in self.only:
                self.hooks.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
                self.hooks.append(module.register_forward_hook(self._behind(path)))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        for hook in self.hooks:
            hook.remove()
        return isinstance(error, _Stopped)

    def _before(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.got.setdefault(path, []).append([a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)])
            if self.stops and self.only is not None and self.only <= self.got.keys():
                raise _Stopped

        return hook

    def _behind(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor):
                self.gave.setdefault(path, first)

        return hook

    def embeddings(self, x: Tensor) -> Iterable[str]:
        """The names of the tensors of embeddings that got the ids."""
        for path, calls in self.got.items():
            if not isinstance(self.modules[path], nn.Embedding | nn.EmbeddingBag) or not all(calls):
                continue
            if any(_equal(ids.double(), x) for ids in (calls[0][0], torch.stack([call[0] for call in calls], -1))):
                yield f"{path}.weight"

    def sources(self, path: str) -> list[Source]:
        """The hidden states that a module gets or, for a recurrent one, gives."""
        calls = self.got[path]
        found = [Source(path, place, self._kind(h, len(calls))) for place, h in enumerate(_floating(calls[0]))]
        if isinstance(self.modules[path], nn.RNNBase):
            found.append(Source(path, -1, self._kind(self.gave[path], 1)))
        return [source for source in found if source.kind]

    def _kind(self, tensor: Tensor, calls: int) -> str:
        if tensor.ndim == 3:
            return {(self.b, self.t): "bt", (self.t, self.b): "tb"}.get((tensor.shape[0], tensor.shape[1]), "")
        if tensor.ndim == 2 and len(tensor) == self.b and calls == self.t:
            return "steps"
        return "flat" if tensor.ndim == 2 and len(tensor) == self.b * self.t else ""

    def arranged(self, source: Source) -> Tensor:
        """[b, t, d] hidden states."""
        if source.kind == "steps":
            return torch.stack([_floating(call)[source.place] for call in self.got[source.path]], 1)
        tensor = self.gave[source.path] if source.place < 0 else _floating(self.got[source.path][0])[source.place]
        return tensor.transpose(0, 1) if source.kind == "tb" else tensor.reshape(self.b, self.t, tensor.shape[-1])


def _floating(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each for each in tensors if each.is_floating_point()]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b))


def _slopes(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradients in the leaves, zero where the loss does not depend on one."""
    slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if slope is None else slope for slope, leaf in zip(slopes, leaves, strict=True)]


def _labels(task: ModelTask, params: Vector, x: Tensor) -> Tensor:
    """Labels [b], or numbers [b, n] that the network misses."""
    if not task.numbers or task.model.loss == NEXT_TOKEN:
        return torch.zeros(len(x), dtype=torch.int64)
    wrong = task.outputs(params, x).detach() + 1
    return wrong[:, 0] if task.classes == 1 else wrong


def _dry(length: int, size: int) -> Tensor:
    """[3 or 4, length] ids: a text of different tokens, as far as there are enough; it but for one place; its start."""
    ids = (torch.arange(length) * max(1, size // (3 * length)) + size // 7) % size
    ids, turned, middle = ids.repeat(3 if length != 3 else 4, 1), (ids + max(1, size // 2)) % size, length // 2
    ids[1] = turned
    ids[1, middle] = ids[0, middle]
    ids[2, middle + 1 :] = turned[middle + 1 :]
    return ids.double()


def _sites(log: _Log, alone: _Log, numbers: dict[str, int], slopes: Sequence[Tensor]) -> tuple[Site, ...]:
    """The weights whose gradients lie in the span of hidden states that their module got, for a text alone."""
    found = list[tuple[Tensor, Site]]()
    for path in log.got:
        named = [f"{path}.{name}" for name, _ in log.modules[path].named_parameters(recurse=False)]
        for at in (numbers[name] for name in named if name in numbers and slopes[numbers[name]].ndim == 2):
            for source in (
                [] if isinstance(log.modules[path], nn.Embedding) or not slopes[at].any() else log.sources(path)
            ):
                turned = _spanned(slopes[at], alone.arranged(source)[0].detach())
                if turned is not None:
                    states = log.arranged(source)
                    same = next((n for n, (known, _) in enumerate(found) if _equal(known, states)), len(found))
                    if same == len(found):
                        found.append((states, _site(source, states)))
                    own = found[same][1]
                    found[same] = states, own._replace(weights=(*own.weights, (at, turned)))
                    break
    return tuple(_heard(site, states[0], slopes) for states, site in found)


def _site(source: Source, states: Tensor) -> Site:
    middle = states.shape[1] // 2
    near = _SAME * states.norm(dim=-1).mean()
    local = bool((states[0, middle] - states[1, middle]).norm() < near)
    causal = bool((states[0, : middle + 1] - states[2, : middle + 1]).norm(dim=-1).max() < near)
    return Site(source, (), local, causal, torch.zeros(0))


def _heard(site: Site, states: Tensor, slopes: Sequence[Tensor]) -> Site:
    _, values, right = torch.linalg.svd(site.rows(slopes), full_matrices=False)
    basis = right[values > _ZERO * values[0]]
    off = (states - states @ basis.T @ basis).norm(dim=1)
    return site._replace(heard=off < _SAME * states.norm(dim=1).clamp(min=1e-30))


def _spanned(slope: Tensor, states: Tensor) -> bool | None:
    """Whether the second (False) or first (True) axis of a gradient lies in the span of the states; None: neither."""
    basis = torch.linalg.qr(states.T)[0]
    for turned, rows in ((False, slope), (True, slope.T)):
        if rows.shape[1] == len(basis) and (rows - rows @ basis @ basis.T).norm() < _SAME * rows.norm():
            return turned
    return None
