"""Checks of a defense that need no statistics: its class, its parameters, its bytes and its keys."""

from __future__ import annotations

import dataclasses
import functools
import math
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Defense, Message, Sender, Setting
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.round import Client, Exchange, Round
from leakgauge.harness.own.findings import Fault, Skip, told
from leakgauge.harness.own.generators import Draw, Watched, check_repeats, watched
from leakgauge.harness.own.parts import Part, built

DIM = 50
"""Default length of an update."""

_DIMS = (1, 7, 1000)

_POSITIVE = ("clip", "epsilon", "delta", "noise_std", "noise_scale", "noise", "sigma", "std", "scale", "bits", "levels")
"""Parameters that must not be negative."""

_MUTATED = 100
"""The number of damaged messages that are decoded."""

_HUGE = 1_000_000
"""Bytes of a message that is much too long."""

_MEMORY = 20
"""The most memory that a refused message may take, in multiples of its size."""

_MEANS = 200
"""Messages behind the mean estimate of an update of zero."""

_SENDER = Sender(0, 8)


@dataclasses.dataclass(frozen=True)
class Wire:
    """Messages of a defense in a small federation; numbers name keys."""

    defense: Defense[Any, Any]
    dim: int = DIM

    @functools.cached_property
    def here(self) -> Round:
        """The first round, of four clients with eight samples and a model of two tensors."""
        sizes = (self.dim - self.dim // 3, self.dim // 3) if self.dim > 2 else (self.dim,)
        layout = Layout(tuple(f"tensor {k}" for k in range(len(sizes))), tuple((size,) for size in sizes))
        setting = Setting(layout, 4, 4, 3, sends="gradient", steps=1, lr=0.1, batch=8, samples=8)
        return Round(self.defense, setting, self.defense.init(setting))

    @property
    def clip(self) -> float:
        """The norm to which the defense clips an update, by its parameter `clip`; 1 without it."""
        return float(self.defense.parameters().get("clip") or 1.0)

    def update(self, norm: float = 0.9, number: int = 0) -> Vector:
        """An update of this norm, in units of the clip."""
        drawn = rng.normal(Key(1).child("update", number), (self.dim,), torch.float64)
        length = float(torch.linalg.vector_norm(drawn))
        return (drawn * (norm * self.clip / length)).float()

    def client(self, update: Vector, private: int = 0, shared: int = 0) -> Client:
        """The client that sends this update."""
        memory = self.defense.remember(self.here.setting)
        return Client(_SENDER, update, memory, Key(0).child("private", private), Key(0).child("shared", shared))

    def exchange(self, update: Vector, private: int = 0, shared: int = 0) -> Exchange:
        """The message of this update, with silent other clients if the channel adds messages up."""
        clients, key = [self.client(update, private, shared)], Key(0).child("others", private)
        others = self.here.silent([_SENDER], key) if self.defense.superposes else []
        return self.here.exchange([*clients, *others], key.child("channel"))

    def read(self, received: bytes, shared: int | None = 0) -> Vector:
        """The estimate of the server, or without the shared key; raises `Fault` unless it is shaped like an update."""
        key = None if shared is None else Key(0).child("shared", shared)
        found: Any = self.here.read(Message(0, _SENDER, received, key, _SENDER.samples))
        if not isinstance(found, Tensor) or found.shape != (self.dim,) or found.dtype != torch.float32:
            shown = (
                f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            )
            raise Fault(f"`estimate` returns {shown}, expected a float32 tensor of shape ({self.dim},)")
        if not bool(found.isfinite().all()):
            raise MessageError("an estimate that is not finite")  # a round refuses such an estimate
        return found

    def estimates(self, update: Vector, privates: Sequence[int], shareds: Sequence[int]) -> Tensor:
        """[n, d] float64: the server's estimates from messages of one update."""
        rows = zip(privates, shareds, strict=True)
        read = [self.read(self.exchange(update, *keys).received[0], keys[1]) for keys in rows]
        return torch.stack(read).double()


@dataclasses.dataclass(frozen=True)
class Patient:
    """A defense under examination."""

    part: Part

    @functools.cached_property
    def defense(self) -> Defense[Any, Any]:
        """The defense with its parameters."""
        found: Defense[Any, Any] = built(self.part)
        return found

    @functools.cached_property
    def wire(self) -> Wire:
        """The messages of the defense."""
        return Wire(self.defense)

    @functools.cached_property
    def traced(self) -> tuple[Watched, Watched]:
        """One encoding, traced twice."""
        wire, update = self.wire, self.wire.update()
        one, other = (watched(lambda: wire.here.encode(wire.client(update))[0], self.part.folder) for _ in range(2))
        return one, other


def check_class(part: Part, made: Any) -> str:
    """The class of a defense or an attack is a frozen dataclass that rebuilds from its parameters."""
    found = part.found
    if "__dataclass_params__" not in vars(found):
        raise Fault(
            f"expected @dataclass(frozen=True) above class {found.__name__}: without it, fields are not parameters"
        )
    odd = [f"{name}={value!r}" for name, value in made.parameters().items() if not _is_scalar(value)]
    if odd:
        raise Fault(f"expected numbers, texts, true or false as parameters, got {', '.join(odd)}")
    if registry.construct(found, made.parameters(), part.name) != made:
        raise Fault(f"{found.__name__} does not equal itself when it is built from its parameters {made.parameters()}")
    if not found.__doc__ or found.__doc__.startswith(f"{found.__name__}("):
        raise Fault(f"expected a docstring in class {found.__name__}: lists and reports show its first line")
    shown = ", ".join(f"{name}={value}" for name, value in made.parameters().items() if value is not None)
    return f"{part.name}({shown})"


def check_parameters(part: Part, made: Any) -> str:
    """Unknown keys, wrong types and impossible values are refused by a defense or an attack."""
    numbers = [k for k, v in made.parameters().items() if isinstance(v, int | float) and not isinstance(v, bool)]
    tables: list[dict[str, Any]] = [{"no_such_key": 1}, *({name: "text"} for name in numbers)]
    for name in numbers:
        value = getattr(made, name)
        tables += [{name: bad} for bad in (math.nan, math.inf) if isinstance(value, float)]
        tables += [{name: -value}] if name in _POSITIVE and value > 0 else []
    accepted = [f"{name}={value}" for table in tables for name, value in table.items() if _accepts(part, made, table)]
    if accepted:
        raise Fault(f"{', '.join(accepted)} is accepted; refuse it in `__post_init__` with a ValueError")
    return f"{len(tables)} bad values are refused" if numbers else "no numeric parameters; an unknown key is refused"


def _accepts(part: Part, made: Any, changed: dict[str, Any]) -> bool:
    """Whether the class accepts these values."""
    try:
        if any(isinstance(value, str) or name == "no_such_key" for name, value in changed.items()):
            registry.construct(part.found, made.parameters() | changed, part.name)
        else:
            dataclasses.replace(made, **changed)
    except ValueError:
        return False
    return True


def _is_scalar(value: Any) -> bool:
    """Whether a study can state a value."""
    return isinstance(value, bool | int | float | str | None)


def check_encode(patient: Patient) -> str:
    """Messages are bytes, for updates of several sizes and tensors."""
    shown = []
    for dim in _DIMS:
        try:
            wire = Wire(patient.defense, dim)
            sizes = {len(_bytes(wire, wire.update(norm, n))) for n, norm in enumerate((0.9, 1e-3, 30.0, 0.9))}
        except ValueError as error:
            if dim == _DIMS[-1]:
                raise
            shown.append(f"d = {dim} is refused ({' '.join(str(error).split())})")
            continue
        except Fault:
            raise
        except Exception as error:
            raise Fault(f"an update of {dim} numbers raises {told(error, patient.part.folder)}") from error
        low, high = min(sizes), max(sizes)
        shown.append(f"{low if low == high else f'{low} to {high}'} bytes for d = {dim}")
    return ", ".join(shown)


def _bytes(wire: Wire, update: Vector) -> bytes:
    """The message; raises `Fault` unless it is bytes."""
    sent: Any = wire.here.encode(wire.client(update))
    if not (isinstance(sent, tuple) and len(sent) == 2 and type(sent[0]) is bytes):
        got = f"({', '.join(type(one).__name__ for one in sent)})" if isinstance(sent, tuple) else type(sent).__name__
        raise Fault(f"`encode` returns {got}, expected (bytes, memory): nothing but bytes leaves the client")
    found: bytes = sent[0]
    return found


def check_update(patient: Patient) -> str:
    """The update is not modified; an update of zero is accepted, an update that is not finite is refused."""
    wire = patient.wire
    update = wire.update(30.0)
    before = update.clone()
    wire.here.encode(wire.client(update))
    if not torch.equal(update, before):
        raise Fault("`encode` modifies the update that it is given; work on a copy, as in update.clone()")
    zero = wire.exchange(torch.zeros(wire.dim)).received[0]
    if not bool(wire.read(zero).isfinite().all()):
        raise Fault("a zero update is decoded to numbers that are not finite")
    for bad in (math.nan, math.inf):
        update = wire.update()
        update[3] = bad
        try:
            wire.here.encode(wire.client(update))
        except ValueError:
            continue
        raise Fault(f"`encode` accepts an update with {bad}; begin it with check_update(update) of core.checks")
    return "not modified; zero passes; NaN and infinity are refused"


def check_keys(patient: Patient) -> str:
    """The same keys give the same bytes, and every random draw uses a key."""
    check_repeats(*patient.traced, "`encode`")
    wire, seen = patient.wire, dict[Key, Any]()
    for name, key, place in patient.traced[0].draws:
        if key in seen:
            raise Fault(f"one key is drawn from twice, at {seen[key]} and {place}; take two of its children")
        if key.path[:1] == ("private",) or place is not None:
            seen[key] = place or name
    update = wire.update()
    received = wire.exchange(update).received[0]
    one, other = (watched(lambda: wire.read(received).tolist(), patient.part.folder) for _ in range(2))
    check_repeats(one, other, "`estimate`")
    return f"same keys, same bytes; {len(seen)} draws, each by a key of its own"


def check_private(patient: Patient) -> str:
    """Noise comes from the private key: an adversary that knows the shared key could subtract other noise."""
    defense, wire = patient.defense, patient.wire
    update, draws = wire.update(), patient.traced[0].draws
    sent = wire.exchange(update).sent[0]
    moves = any(wire.exchange(update, private).sent[0] != sent for private in range(1, 9))
    public = [draw for draw in draws if draw.place is not None and draw.key.path[:1] != ("private",)]
    if moves and not defense.randomized:
        raise Fault("other private keys give other bytes, but `randomized` is False; set it to True")
    if not moves and defense.randomized:
        where = f" at {public[0].place}" if public else ""
        seen = f"`{public[0].name}` draws from {_whose(public[0])}{where}" if public else ""
        why = f"{seen}, and an adversary with that key can subtract the noise" if seen else "nothing is drawn from them"
        raise Fault(
            f"other private keys give the same bytes: {why}. Draw from `private`, or set "
            "`randomized = False` if the defense hides nothing"
        )
    noisy = [draw for draw in public if draw.name in ("normal", "laplace", "signed_exponential")]
    if defense.randomized and noisy and _is_added(wire):
        raise Fault(
            f"`{noisy[0].name}` draws from {_whose(noisy[0])} at {noisy[0].place}: an adversary with this "
            "key can subtract the noise; draw from `private`"
        )
    return "other private keys give other bytes" if moves else "no private randomness, as `randomized = False` says"


def _is_added(wire: Wire) -> bool:
    """Whether the shared key moves the mean estimate of an update of zero: a rotation does not, noise does."""
    numbers = range(_MEANS)
    one, other = (wire.estimates(torch.zeros(wire.dim), numbers, [shared] * _MEANS) for shared in (0, 1))
    error = (one.var(0) + other.var(0)) / _MEANS + 1e-30
    gaps = (one.mean(0) - other.mean(0)).square() / error
    return float(gaps.mean()) > 1 + 6 * math.sqrt(2 / wire.dim)


def _whose(draw: Draw) -> str:
    """The key of a draw without the private key, in words."""
    return (
        "the shared key (known to the server)" if draw.key.path[:1] == ("shared",) else "a key that anyone can derive"
    )


def check_damaged(patient: Patient) -> str:
    """Damaged messages raise MessageError or decode to finite numbers, in bounded memory."""
    wire = patient.wire
    sent = wire.exchange(wire.update()).received[0]
    for name, damaged in (
        ("a cut", sent[:-1]),
        ("a longer", sent + b"\0"),
        ("an empty", b""),
        ("a half", sent[: len(sent) // 2]),
    ):
        if damaged != sent and not _refused(patient, damaged, name):
            raise Fault(
                f"`estimate` accepts {name} message ({len(damaged)} bytes instead of {len(sent)}); raise MessageError"
            )
    refused = 0
    for number in range(_MUTATED):
        key = Key(2).child(number)
        places = rng.integers(key, max(1, len(sent)), 1 + number % 4)
        noise = np.frombuffer(sent, np.uint8).copy()
        noise[places[places < len(noise)]] ^= np.uint8(1 + number % 255)
        if number % 2:
            noise = rng.integers(key.child("random"), len(sent), 256).astype(np.uint8)
        refused += _refused(patient, noise.tobytes(), "a damaged")
    tracemalloc.start()
    try:
        huge = _refused(patient, sent[:1] * _HUGE, "a huge")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if not huge and sent:
        raise Fault(f"`estimate` accepts a message of {_HUGE} bytes; raise MessageError")
    if peak > _MEMORY * _HUGE:
        raise Fault(f"a message of {_HUGE:,} bytes takes {peak:,} bytes of memory; look at its length first")
    return f"cut, longer, empty and huge ones are refused, {refused} of {_MUTATED} damaged ones too"


def _refused(patient: Patient, damaged: bytes, name: str) -> bool:
    """Whether a message is properly refused; otherwise it decodes to finite numbers."""
    try:
        patient.wire.read(damaged)
    except MessageError:
        return True
    except Fault:
        raise
    except Exception as error:
        text = told(error, patient.part.folder)
        raise Fault(f"{name} message raises {text}; expected MessageError") from error
    return False


def check_memory(patient: Patient) -> str:
    """State and memory pass from round to round."""
    defense, wire = patient.defense, patient.wire
    if type(defense).remember is Defense.remember and type(defense).init is Defense.init:
        raise Skip("neither state nor memory")
    from leakgauge.harness.audit.claims import states_of

    setting = wire.here.setting
    client, lengths = wire.client(wire.update()), list[int]()
    for number, state in enumerate(states_of(defense, setting)):
        sent, memory = dataclasses.replace(wire.here, state=state, number=number).encode(client)
        client, lengths = client._replace(memory=memory), [*lengths, len(sent)]
    return f"{len(lengths)} rounds, messages of {', '.join(map(str, lengths))} bytes"
