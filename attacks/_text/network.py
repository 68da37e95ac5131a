"""Which tensors of a network read tokens, places and hidden states, found by dry runs and never by names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.called import Called
from leakgauge.harness.learn.tasks import ModelTask

_KEY = Key(0).child("text", "dry run")
_SAME = 1e-4  # relative difference in double precision up to which two things count as equal


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
    width: int
    local: bool
    causal: bool
    heard: Tensor

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """[o, width]: the gradients of the weights, whose rows are combinations of the hidden states."""
        return torch.cat([tensors[at].T if turned else tensors[at] for at, turned in self.weights])


class _Stopped(Exception):
    """Ends a forward pass once all states are known."""


class Network(NamedTuple):
    """A network of tokens.

    Attributes:
        words: number of the tensor with a row for each token.
        places: number of the tensor with a row for each place, if there is one, and these rows.
        scale: of a word's row, if a place's row counts 1.
        tied: whether the words' tensor is also used elsewhere.
        sites: in the order of the forward pass.
        short: whether the network also takes shorter texts.
    """

    task: ModelTask
    words: int
    places: tuple[int, Tensor] | None
    scale: float
    tied: bool
    sites: tuple[Site, ...]
    order: tuple[str, ...]
    short: bool

    @classmethod
    def of(cls, task: Task, params: Vector) -> Network:
        """Find the tensors by dry runs.

        Raises:
            ValueError: the network has no embedding that is called with the ids.
        """
        assert isinstance(task, ModelTask)
        (length,), size = task.input_shape, _vocabulary(task)
        names, tensors = {}, [each.double() for each in task.layout.split(params)]
        for number, name in enumerate(task.layout.names):
            names[name] = number
        x = _dry(3 if length != 3 else 4, length, size)
        log = _Log(task.model.apply, len(x), length)
        leaves = [each.clone().requires_grad_() for each in tensors]
        y = torch.zeros(len(x), dtype=torch.int64)
        with log:
            loss = task.loss_at(leaves, x, y if not task.numbers else task.outputs(params.double(), x).detach() + 1)
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
        slopes = [torch.zeros_like(t) if s is None else s for s, t in zip(slopes, tensors, strict=True)]
        words = next((names[f"{path}.weight"] for path in log.embeddings(x) if f"{path}.weight" in names), None)
        if words is None:
            raise ValueError("expected an nn.Embedding that the network calls with the ids")
        sites = _heard(task, _sites(log, names, slopes), tensors, x[:1], y[:1])
        first = next((site for site in sites if site.local), None)
        places, scale = None, 1.0
        if first is not None:
            places, scale = _places(log, task, tensors, first, x, words)
        absent = torch.ones(size, dtype=torch.bool)
        absent[x.unique().long()] = False
        network = cls(task, words, places, scale, bool(slopes[words][:size][absent].any()), sites, log.order, True)
        return network._replace(short=network._takes_short(params, length))

    def _takes_short(self, params: Vector, length: int) -> bool:
        """Whether states of prefixes are those of whole texts."""
        causal, half = [site for site in self.sites if site.causal], max(1, length // 2)
        if not causal or length < 2:
            return False
        x = _dry(3, length, _vocabulary(self.task))[:2]
        try:
            whole, part = (self.states(params, ids, causal[-1:])[0] for ids in (x, x[:, :half]))
        except (RuntimeError, ValueError, IndexError):
            return False
        return bool(torch.allclose(whole[:, :half], part, atol=1e-4, rtol=1e-3))

    def states(self, params: Vector, x: Tensor, sites: Sequence[Site]) -> list[Tensor]:
        """[b, t, d] the hidden states of ids x [b, t] at each site."""
        last = max((self.order.index(site.source.path) for site in sites), default=0)
        steps = any(site.source.kind == "steps" or site.source.place < 0 for site in sites)
        after = None if steps or last + 1 >= len(self.order) else self.order[last + 1]
        log = _Log(self.task.model.apply, *x.shape, {site.source.path for site in sites}, after)
        with log, torch.no_grad():
            self.task.model.apply(self.task.layout.split(params), x, None)
        return [log.arranged(site.source) for site in sites]


class _Log:
    """Hooks that record what the modules of a network get."""

    def __init__(self, net: Any, b: int, t: int, only: set[str] | None = None, after: str | None = None) -> None:
        assert isinstance(net, Called)
        self.net, self.b, self.t, self.only, self.after = net, b, t, only, after
        self.got: dict[str, list[list[Tensor]]] = {}
        self.gave: dict[str, list[Tensor]] = {}
        self.order: tuple[str, ...] = ()
        self.modules = dict(net.module.named_modules())

    def __enter__(self) -> None:
        self.hooks = []
        for path, module in self.modules.items():
            if self.only is None or path in self.only or path == self.after:
                self.hooks.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
                self.hooks.append(module.register_forward_hook(self._behind(path)))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        for hook in self.hooks:
            hook.remove()
        return isinstance(error, _Stopped)

    def _before(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path == self.after:
                raise _Stopped
            if path not in self.got:
                self.order += (path,)
            self.got.setdefault(path, []).append([a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)])

        return hook

    def _behind(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor):
                self.gave.setdefault(path, []).append(first)

        return hook

    def embeddings(self, x: Tensor) -> list[str]:
        """The paths of embeddings that got the ids."""
        return [
            path
            for path, calls in self.got.items()
            if isinstance(self.modules[path], nn.Embedding | nn.EmbeddingBag)
            and all(calls)
            and any(_equal(ids.double(), x) for ids in (calls[0][0], torch.stack([call[0] for call in calls], 1)))
        ]

    def sources(self, path: str) -> list[Source]:
        """The hidden states that a module gets or, for a recurrent one, gives."""
        calls, found = self.got[path], []
        for place, tensor in enumerate(_floating(calls[0])):
            kind = self._kind(tensor, len(calls))
            if kind:
                found.append(Source(path, place, kind))
        if isinstance(self.modules[path], nn.RNNBase) and self.gave.get(path):
            found.append(Source(path, -1, self._kind(self.gave[path][0], 1)))
        return found

    def _kind(self, tensor: Tensor, calls: int) -> str:
        if tensor.ndim == 3:
            return {(self.b, self.t): "bt", (self.t, self.b): "tb"}.get((tensor.shape[0], tensor.shape[1]), "")
        if tensor.ndim == 2 and len(tensor) == self.b and calls == self.t:
            return "steps"
        return "flat" if tensor.ndim == 2 and len(tensor) == self.b * self.t else ""

    def arranged(self, source: Source) -> Tensor:
        """[b, t, d] hidden states."""
        if source.place < 0:
            first = self.gave[source.path][0]
        elif source.kind == "steps":
            return torch.stack([_floating(call)[source.place] for call in self.got[source.path]], 1)
        else:
            first = _floating(self.got[source.path][0])[source.place]
        return first.transpose(0, 1) if source.kind == "tb" else first.view(self.b, self.t, first.shape[-1])


def _floating(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each for each in tensors if each.is_floating_point()]


def _vocabulary(task: ModelTask) -> int:
    size: int = task.form.vocabulary.size  # type: ignore[attr-defined]  # the form is that of tokens
    return size


def _dry(b: int, length: int, size: int) -> Tensor:
    """[b, length] ids: a text, the same with all places but one changed, and with the later places changed; others."""
    ids = torch.from_numpy(rng.integers(_KEY, b * length, size)).view(b, length)
    # different tokens within a text, as far as there are enough
    ids = (ids[:, :1] + torch.arange(length) * max(1, size // (3 * length))) % size
    middle, turn = length // 2, max(1, size // 2)
    ids[1] = (ids[0] + turn) % size
    ids[1, middle] = ids[0, middle]
    ids[2, : middle + 1], ids[2, middle + 1 :] = ids[0, : middle + 1], (ids[0, middle + 1 :] + turn) % size
    return ids.double()


def _sites(log: _Log, names: dict[str, int], slopes: Sequence[Tensor]) -> tuple[Site, ...]:
    """The weights whose gradients lie in the span of hidden states that their module got."""
    found: dict[tuple[Any, ...], Site] = {}
    for path in log.order:
        own = [names[f"{path}.{name}"] for name, _ in log.modules[path].named_parameters(recurse=False)
               if f"{path}.{name}" in names]  # fmt: skip
        for at in own:
            if slopes[at].ndim != 2 or not bool(slopes[at].any()) or isinstance(log.modules[path], nn.Embedding):
                continue
            for source in log.sources(path):
                states = log.arranged(source).detach()
                turned = _spanned(slopes[at], states)
                if turned is None:
                    continue
                known = next((key for key, site in found.items() if _equal(states, key[0])), (states,))
                site = found.get(known)
                weights = (site.weights if site else ()) + ((at, turned),)
                found[known] = (site or _site(source, states))._replace(weights=weights)
                break
    return tuple(found.values())


def _heard(
    task: ModelTask, sites: Sequence[Site], tensors: Sequence[Tensor], x: Tensor, y: Tensor
) -> tuple[Site, ...]:
    """The sites with the places at which they are heard."""
    leaves, log = [each.clone().requires_grad_() for each in tensors], _Log(task.model.apply, *x.shape)
    with log:
        loss = task.loss_at(leaves, x, y if not task.numbers else task.outputs(task.layout.join(tensors), x) + 1)
    slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
    found = []
    for site in sites:
        states = log.arranged(site.source).detach()[0]
        rows = site.rows([torch.zeros_like(t) if s is None else s for s, t in zip(slopes, tensors, strict=True)])
        _, values, right = torch.linalg.svd(rows, full_matrices=False)
        basis = right[values > 1e-10 * values[0]]
        off = (states - states @ basis.T @ basis).norm(dim=1) / states.norm(dim=1).clamp(min=1e-30)
        found.append(site._replace(heard=off < _SAME))
    return tuple(found)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b))


def _site(source: Source, states: Tensor) -> Site:
    middle = states.shape[1] // 2
    near = _SAME * states.norm(dim=-1).mean()
    local = bool((states[0, middle] - states[1, middle]).norm() < near)
    causal = bool((states[0, : middle + 1] - states[2, : middle + 1]).norm(dim=-1).max() < near)
    return Site(source, (), states.shape[2], local, causal, torch.ones(states.shape[1], dtype=torch.bool))


def _spanned(slope: Tensor, states: Tensor) -> bool | None:
    """Whether the second (False) or first (True) axis of a gradient lies in the span of the states; None: neither."""
    basis = torch.linalg.qr(states.flatten(0, 1).T.double())[0]
    for turned, rows in ((False, slope), (True, slope.T)):
        if rows.shape[1] == len(basis) and (rows - rows @ basis @ basis.T).norm() < _SAME * rows.norm():
            return turned
    return None


def _places(
    log: _Log, task: ModelTask, tensors: Sequence[Tensor], site: Site, x: Tensor, words: int
) -> tuple[tuple[int, Tensor] | None, float]:
    """The tensor with a row for each place: it gets the same slopes as the words' rows of a single text."""
    leaves = [each.clone().requires_grad_() for each in tensors]
    own = _Log(log.net, 1, x.shape[1])
    with own:
        task.model.apply(leaves, x[:1], None)
    states = own.arranged(site.source)
    loss = (states * rng.normal(_KEY.child("mixed"), states.shape, torch.float64)).sum()
    slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
    word = slopes[words]
    if word is None or len(x[0].unique()) < x.shape[1]:
        return None, 1.0
    wanted = word[x[0].long()]
    for number, slope in enumerate(slopes):
        if number == words or slope is None or slope.numel() % wanted.shape[1] or slope.ndim < 2:
            continue
        table = slope.reshape(-1, wanted.shape[1])
        rows = table.any(1).nonzero()[:, 0]
        if len(rows) == len(wanted):
            scale = float((wanted * table[rows]).sum() / table[rows].square().sum())
            if (wanted - scale * table[rows]).norm() < _SAME * wanted.norm():
                return (number, rows), scale
    return None, 1.0
