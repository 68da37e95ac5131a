"""A function of an update as a defense, `function:module.name`, with what is stated of it."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from leakgauge.defenses._common.clip import clip_coordinates, clip_l2
from leakgauge.defenses._common.misfit import TIP, gaussian_misfit, laplace_misfit
from leakgauge.defenses._common.plain import Plain
from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import Scalar
from leakgauge.harness.core.checks import check_update, numbers, positive
from leakgauge.harness.core.claim import Claim, Proof, Relation, Unit, added_up, claim_over
from leakgauge.harness.core.code import FUNCTION
from leakgauge.harness.core.codec import pack_float32
from leakgauge.harness.core.contract import Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import Additive, Laplacian, Normal, clamped, projected
from leakgauge.harness.core.errors import NoLikelihood, UnknownNameError, suggestion
from leakgauge.harness.core.gaussian import gaussian_mu
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout, Vector

_LONGEST = 2.0**50
"""Longer updates are scaled down to this norm: the squares of their numbers would overflow in float32."""

_DELTA = 1e-5  # the delta of normal noise, if none is stated
_PROBE = Layout(("probe",), ((8,),))

_GROWS = {("normal", "entry"): 0.5, ("laplace", "entry"): 1.0, ("laplace", "l2"): 0.5}
"""Power of the number of coordinates by which a clip in another norm than the noise's moves an update further."""

_TYPES: dict[type, Any] = {bool: bool, int: int | float, float: float, str: str, type(None): Scalar}
"""Types of the parameters that a function's own keywords become, by the types of their defaults."""


@dataclass(frozen=True)
class Function(Plain[None]):
    """A function of an update whose result is sent as float32; all that is stated of it is a parameter.

    If `noise` and `clip` are stated, the message is stated to be the clipped update plus noise; an audit tests this.
    The function gets a copy of the update: a flat tensor or array [d], or a list or a dictionary of the model's
    tensors, as the annotation of its first parameter says; it returns the same. Its other keywords are parameters, too.
    A keyword that is named like a parameter below gets the stated value.

    Args:
        clip: C, bound on the `norm` of the update before noise is added, in units of the update.
        noise: standard deviation of normal noise in each number, or the scale b of Laplace noise.
        epsilon: what is claimed for one message; None: nothing.
        delta: of the claim; default 1e-5 for normal noise, else 0.
        unit: what `epsilon` covers.
        relation: the neighbors of the claim; an added client moves the update by C, a replaced one by 2C.
        sensitivity: the furthest that neighbors move what is added to the noise, as the claim has it: the l2 norm, or
            the l1 norm for Laplace noise. The proof uses it only if no clip is stated.
        family: of the noise.
        norm: of the clip: `l2`, `l1`, or `entry` for each number; `none`: it is stated that nothing is clipped.

    Guarantees:
        Messages have 4 * d bytes. Draws from the global generators of numpy, torch and Python, and from generators that
        numpy makes without a seed, follow from the private key. Updates of an l2 norm above 2^50 are scaled down to it.

    Raises:
        ValueError: a parameter is out of range; the function raises, or returns no finite update.
    """

    clip: float | None = None
    noise: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    unit: Literal["message", "client", "record", "coordinate"] = "message"
    relation: Literal["replace", "add-remove", "any-two-inputs"] = "replace"
    sensitivity: float | None = None
    family: Literal["normal", "laplace", "unknown"] = "normal"
    norm: Literal["l2", "l1", "entry", "none"] = "l2"

    _function: ClassVar[Callable[..., Any]]
    _keywords: ClassVar[tuple[str, ...]]
    _shape: ClassVar[str]
    _arrays: ClassVar[tuple[bool, ...]]

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Function).items():
            value = self.fact(name) if name in _STATED else None
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise ValueError(f"expected {name} to be one of {', '.join(get_args(hint))}, got {value!r}")
        facts = {name: self.fact(name) for name in ("clip", "noise", "epsilon", "delta", "sensitivity")}
        own = {name: getattr(self, name) for name in self._keywords if isinstance(getattr(self, name), float)}
        facts = {name: value for name, value in facts.items() if value is not None}
        numbers((int, float), **own | facts)
        if not 0 <= facts.pop("delta", 0.0) < 1:
            raise ValueError(f"expected 0 <= delta < 1, got delta={self.delta}")
        positive(**facts)

    def fact(self, name: str, *more: Any) -> Any:
        """A parameter; if it is None, what `states` computes from the others."""
        value, computed = getattr(self, name, None), getattr(self._function, "facts", {}).get(name)
        try:
            return computed(self, *more) if value is None and callable(computed) else value
        except Exception as error:
            raise ValueError(f"{name} cannot be computed: {type(error).__name__}: {error}") from error

    @property
    def _delta(self) -> float:
        stated = self.fact("delta")
        return float(stated if stated is not None else _DELTA * (self.family == "normal"))

    @property
    def _noise(self) -> float | None:
        """The noise, if what it is added to and its family are stated too: the distribution of the message."""
        known = self.family != "unknown" and (self.norm == "none" or self.clip is not None)
        return self.fact("noise") if known else None

    @cached_property
    def randomized(self) -> bool:  # type: ignore[override]  # the class does not know it
        """Whether noise is stated, or two keys give different messages."""
        with_noise, update = self.fact("noise") is not None, torch.linspace(-1, 1, _PROBE.dim)
        try:
            return with_noise or len({self._sent(update, _PROBE, Key(0, (n,))).numpy().tobytes() for n in (0, 1)}) > 1
        except ValueError:  # it needs other updates
            return True

    def bounded(self, update: Tensor) -> Tensor:
        """The update [..., d] with the stated clip."""
        if self.norm == "none" or self.clip is None:
            return update
        if self.norm == "l1":
            size = update.double().abs().sum(-1, keepdim=True).clamp(min=self.clip)
            return update * (self.clip / size).to(update.dtype)
        return (clip_l2 if self.norm == "l2" else clip_coordinates)(update, self.clip)

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """The function's result as float32; the private key seeds the global generators."""
        check_update(update)
        return pack_float32(self._sent(update, link.setting.layout, private)), None

    def _sent(self, update: Vector, layout: Layout, private: Key) -> Tensor:
        """[d] float32: the function's result; of two kinds of arguments, the second is tried if the first fails."""
        name, failed = type(self).__qualname__.removeprefix(FUNCTION), ""
        given = {keyword: self.fact(keyword) for keyword in self._keywords}
        for arrays in self._arrays:
            own = clip_l2(update.detach().cpu(), _LONGEST).clone()
            tensors = [own] if self._shape == "flat" else layout.split(own)
            pieces: list[Any] = [tensor.numpy() for tensor in tensors] if arrays else tensors
            as_named = dict(zip(layout.names, pieces, strict=False))
            argument = {"flat": pieces[0], "list": pieces, "dict": as_named}[self._shape]
            with rng.global_generators(private.child("array" if arrays else "tensor")), np.errstate(all="ignore"):
                try:
                    result = self._function(argument, **given)
                except (Exception, SystemExit) as error:
                    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
                    failed = failed or f"{name} raised {text}, for an update of norm {float(update.norm()):.3g}"
                    continue
            return _flat(result, self._shape, layout, name)
        raise ValueError(failed)

    def likelihood(self, state: None, received: Sequence[bytes], links: Links, tip: float = TIP) -> Likelihood:
        """By the stated noise around the clipped candidate; of Laplace noise, with a rounded tip."""
        if self._noise is None:
            raise NoLikelihood("no likelihood is known without the function's clip, noise and family; state them")
        normal, sent = partial(gaussian_misfit, variance=self._noise**2), self.sent(received, links)
        misfit = normal if self.family == "normal" else partial(laplace_misfit, scale=self._noise, tip=tip)
        return lambda update: misfit(self.bounded(update) - sent)

    def exact_likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """As `likelihood`, with a sharp tip."""
        return self.likelihood(state, received, links, 0.0)

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> Additive | None:
        """The stated noise around the clipped update; None unless both are stated."""
        if self._noise is None:
            return None
        update, clip = clip_l2(update, _LONGEST), math.inf if self.norm == "none" else self.clip or math.inf
        center = (
            clamped(update, clip) if self.norm == "entry" else projected(update, clip, 1 if self.norm == "l1" else 2)
        )
        # a function may add its noise in float32
        return Additive(center, Laplacian() if self.family == "laplace" else Normal(), self._noise, fair=False)

    def low_noise_variant(self) -> Function | None:
        """The same function with a noise of at most 0.001 C, if the noise is one of its keywords."""
        if self.noise is None or self.clip is None or "noise" not in self._keywords:
            return None
        return replace(self, noise=min(self.noise, 1e-3 * self.clip))

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """What is stated for one message, added up over the rounds."""
        rounds, epsilon, proved = len(history), self.fact("epsilon"), self._proof(len(history), setting)
        if epsilon is None or rounds * self._delta >= 1:
            return claim_over(rounds, math.inf, proved, source="", delta=self._delta)
        source = added_up(f"stated of {type(self).__qualname__}", rounds)
        terms = rounds * self._delta, Relation(self.relation)
        return claim_over(rounds, rounds * epsilon, proved, source=source, delta=terms[0], relation=terms[1])

    def summed_proof(self, history: Sequence[None], setting: Setting, senders: int) -> Proof | None:
        """For normal noise on a clipped update, or of a stated sensitivity to a message: n noises add up to one."""
        noise, sensitivity = self.fact("noise"), self.fact("sensitivity")
        if self.family != "normal" or noise is None or self.fact("proves", setting.dim) is not None:
            return None
        if self.clip is not None and self.norm != "none" and self.unit != "coordinate":
            moved = self.clip * setting.dim ** _GROWS.get((self.family, self.norm), 0.0)
        elif sensitivity is not None and self.norm == "none" and self.unit in ("message", "client"):
            moved = sensitivity
        else:
            return None
        why = f"an update moves the sum by up to {moved:.4g}, and each noise has a deviation of {noise:g}."
        return Proof.gaussian(math.sqrt(senders) * noise / moved, len(history), Unit.CLIENT, why)

    def _proof(self, rounds: int, setting: Setting) -> Proof:
        unit, noise, sensitivity, tight = Unit(self.unit), self.fact("noise"), self.fact("sensitivity"), True
        if (stated := self.fact("proves", setting.dim)) is not None:
            size, why = stated if isinstance(stated, tuple) and len(stated) == 2 else (stated, None)
            if not isinstance(size, int | float) or not size > 0 or not isinstance(why, str):
                raise ValueError(f"expected an epsilon above 0 and its reason from proves, got {stated!r:.80}")
            return Proof.pure(size, rounds, unit, why, "stated", tight=False)
        if noise is None or self.family == "unknown" or not (self.clip or sensitivity or self.norm == "none"):
            lacks = "nothing is proved without the function's clip, noise and family; state them."
            return Proof(None, unit, "unknown", lacks, tight=False)
        if self.clip is not None and self.norm != "none":
            moved, tight = self._moved(setting)
            why = self._why(moved, noise)
        elif sensitivity is not None:
            moved, why = sensitivity, f"noise of {noise:g}, if neighbors move the update by up to {sensitivity:g}."
        else:
            return Proof.none(unit, "nothing bounds the update to which the noise is added.")
        if self.family == "laplace":  # at delta > 0, this is an upper bound
            return Proof.pure(moved / noise, rounds, unit, why, tight=tight and not self._delta)
        return Proof.gaussian(noise / moved, rounds, unit, why, tight=tight)

    def _moved(self, setting: Setting) -> tuple[float, bool]:
        """How far neighbors move the clipped update, in l2 norm, or l1 norm for Laplace noise; whether some do."""
        assert self.clip is not None  # a proof of the clip
        power = _GROWS.get((self.family, self.norm), 0.0) if (self.unit, self.norm) != ("coordinate", "entry") else 0.0
        # an added client comes to an update of zero, an added record to the update of the other records
        once = self.relation == "add-remove" and self.unit in ("message", "client")
        return (1 if once else 2) * self.clip * setting.dim**power, not (self.unit == "coordinate" and power)

    def _why(self, moved: float, noise: float) -> str:
        """Why this epsilon is proved, and what the stated one would need."""
        clip, epsilon, sensitivity, hides = self.clip or 1.0, self.fact("epsilon"), self.fact("sensitivity"), math.inf
        less, clips = clip / noise, moved / clip
        share = f"1/{f'{less:,.0f}' if less > 10 else f'{less:.3g}'} of" if less > 1 else f"{1 / less:.3g} times"
        text = f"noise of {noise:g} is {share} the clip, and one {self.unit} moves the update by up to "
        text += f"{clips:.4g} {'clip' if clips == 1 else 'clips'}"
        if epsilon is not None:
            hides = noise * (epsilon if self.family == "laplace" else gaussian_mu(epsilon, self._delta))
        if sensitivity is not None and sensitivity < moved:
            text += f"; the claim takes a sensitivity of {sensitivity:g}"
        elif hides < moved * (1 - 1e-6):
            text += f"; epsilon {epsilon:g} needs a sensitivity of {hides:.3g} or less"
        return f"{text}."


_STATED = tuple(field.name for field in dataclasses.fields(Function))


@cache
def of(name: str, function: Any) -> type[Function]:
    """The class of `function:module.name`, the function, whose facts by `states` are its defaults.

    Raises:
        UnknownNameError: it is no function of an update, states an unknown fact, or has a keyword that is named like a
            method of defenses.
    """
    try:
        update, *rest = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        got = type(function).__name__
        raise UnknownNameError(f"expected a function of an update for {name!r}, got a {got}") from None
    facts, hints, keywords, fields = getattr(function, "facts", {}), get_type_hints(Function), list[str](), list[Any]()
    for fact, value in facts.items():
        if fact == "proves":
            continue
        if fact not in _STATED:
            raise UnknownNameError(f"{name} states {fact!r}{suggestion(fact, _STATED)}")
        fields.append((fact, hints[fact], dataclasses.field(default=None if callable(value) else value)))
    for one in rest:
        kind = hints.get(one.name, Scalar if one.default is one.empty else _TYPES.get(type(one.default)))
        if kind is None or one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            continue  # it keeps its default
        if one.name not in _STATED and hasattr(Function, one.name):
            raise UnknownNameError(f"{name} has a keyword {one.name!r}, as defenses have a method; rename it")
        keywords.append(one.name)
        if one.name not in facts and (one.name not in _STATED or one.default is not one.empty):
            default = dataclasses.MISSING if one.default is one.empty else one.default
            fields.append((one.name, kind, dataclasses.field(default=default, kw_only=True)))
    shape, arrays = _wants(function, update)
    body = {"_function": staticmethod(function), "_keywords": tuple(keywords), "_shape": shape, "_arrays": arrays}
    body["__doc__"] = inspect.getdoc(function) or f"The function {name.removeprefix(FUNCTION)} of an update."
    made = dataclasses.make_dataclass(name, fields, bases=(Function,), namespace=body, frozen=True)
    module = getattr(function, "__module__", None) if inspect.isroutine(function) else None
    made.__module__ = str(module or name.removeprefix(FUNCTION).rpartition(".")[0])
    return made


def _wants(function: Any, update: inspect.Parameter) -> tuple[str, tuple[bool, ...]]:
    """Whether a function wants a flat update, a list or a dictionary, and whether of numpy's arrays: both are tried if
    neither the annotation nor the names in its code say it.
    """
    hint = "" if update.annotation is update.empty else str(update.annotation).lower()
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    names = set(getattr(code, "co_names", ()))
    torches, arrays = "tensor" in hint, any(word in hint for word in ("ndarray", "numpy", "np."))
    if not (torches or arrays):
        torches, arrays = "torch" in names, bool(names & {"np", "numpy"})
    lists = any(word in hint for word in ("list", "sequence", "tuple", "ndarrays"))
    shape = "dict" if "dict" in hint or "mapping" in hint else "list" if lists else "flat"
    return shape, (False, True) if torches == arrays else (arrays,)


def _flat(result: Any, shape: str, layout: Layout, name: str) -> Tensor:
    """[d] float32: what a function returned for an update of this layout."""
    shapes = [(layout.dim,)] if shape == "flat" else [*layout.shapes]
    try:
        pieces = [result] if shape == "flat" else [result[key] for key in layout.names] if shape == "dict" else result
        tensors = [torch.as_tensor(piece).detach().cpu() for piece in pieces]
    except (TypeError, ValueError, RuntimeError, LookupError):
        tensors = []
    if [tuple(tensor.shape) for tensor in tensors] != shapes or any(map(torch.is_complex, tensors)):
        got = f"{tensors[0].dtype} {[[*tensor.shape] for tensor in tensors[:3]]}" if tensors else type(result).__name__
        what = f"of {layout.dim} numbers" if shape == "flat" else f"as a {shape} of {len(shapes)} tensors"
        raise ValueError(f"expected a changed update {what} from {name}, got {got.removeprefix('torch.')}")
    flat = layout.join(tensors).float()
    try:
        check_update(flat)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return flat
