"""Checks of a defense that need no statistics: its class, its parameters, its bytes and its keys."""

from __future__ import annotations

import dataclasses
import math
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Defense, Links, Sender
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.round import Exchange, Round
from leakgauge.harness.federation.small import Federation
from leakgauge.harness.integrations.findings import Fault, Skip, told
from leakgauge.harness.integrations.generators import Draw, check_repeats, plain, watched
from leakgauge.harness.integrations.parts import Part, built
from leakgauge.harness.integrations.quick import DIM, SENDER, DefenseUnderTest, Wire

_DIMS = (1, 7, 1000)

_POSITIVE = ("clip", "epsilon", "delta", "noise_std", "noise_scale", "noise", "sigma", "std", "scale", "bits", "levels")
"""Parameters that must not be negative."""

_NORMS = (0.0, 1e-6, 1e-3, 1.0, 1e3, 1e10, 1e20, 1e30)  # norms of honest updates, in clips
_MUTATED = 160  # the number of damaged messages that are decoded
_HUGE = 1_000_000  # bytes of a message that is much too long
_MEMORY = 20  # the most memory that a refused message may take, in multiples of its size
_MEANS = 200  # messages behind the mean estimate of an update of zero

KINDS = ("flip", "cut", "extend", "float32", "float64", "floats", "bytes", "noise")
"""Kinds of damage."""

_EXTREME = (*(sign * x for sign in (1.0, -1.0) for x in (float("inf"), 3.4e38, 1e30, 2.0**41, 1e-45)), float("nan"))
_FLOATS = [struct.pack("<f", x) for x in _EXTREME]
_DOUBLES = [struct.pack("<d", x) for x in (*_EXTREME, 1e300, -1e300, 1e155)]


def check_class(tested: Any) -> str:
    """The class of a defense or an attack is a frozen dataclass that rebuilds from its parameters."""
    part: Part = tested.part
    made, code = built(part), part.code
    if "__dataclass_params__" not in vars(code):
        raise Fault(
            f"expected @dataclass(frozen=True) above class {code.__name__}: without it, fields are not parameters"
        )
    parameters = made.parameters()
    odd = [f"{k}={v!r}" for k, v in parameters.items() if not isinstance(v, bool | int | float | str | None)]
    if odd:
        raise Fault(f"expected numbers, texts, true or false as parameters, got {', '.join(odd)}")
    if built(part._replace(parameters=parameters)) != made:
        raise Fault(f"{code.__name__} does not equal itself when it is built from its parameters {parameters}")
    fields = ", ".join(f"{field.name}={getattr(made, field.name)!r}" for field in dataclasses.fields(made))
    if repr(made) != f"{code.__qualname__}({fields})":
        raise Fault(f"expected {code.__qualname__}({fields}) as repr, got {made!r}: it must rebuild the object")
    if not code.__doc__ or code.__doc__.startswith(f"{code.__name__}("):
        raise Fault(f"expected a docstring in class {code.__name__}: lists and reports show its first line")
    if ":" in part.name and registry.lookup("attack" if part.kind == "attack" else "defense", part.name) is not code:
        raise Fault(f"{part.name} is another class now: a study finds a class by this name")
    return f"{part.name}({', '.join(f'{k}={v}' for k, v in parameters.items() if v is not None)})"


def check_parameters(tested: Any) -> str:
    """Unknown keys, wrong types and impossible values are refused by a defense or an attack."""
    part: Part = tested.part
    made = built(part)
    fields = {field.name for field in dataclasses.fields(made)}  # a cascade's parameters are those of its parts
    numbers = {k: v for k, v in made.parameters().items() if isinstance(v, int | float) and not isinstance(v, bool)}
    tables: list[dict[str, Any]] = [{"no_such_key": 1}, *({name: "text"} for name in numbers)]
    for name, value in numbers.items():
        if name in fields:
            tables += [{name: bad} for bad in (math.nan, math.inf) if isinstance(value, float)]
            own = name in getattr(part.code, "_keywords", ())  # only a function of an update knows what it means
            tables += [{name: -value}] if name in _POSITIVE and value > 0 and not own else []
    accepted = [f"{name}={value}" for table in tables for name, value in table.items() if _accepts(part, made, table)]
    if accepted:
        raise Fault(f"{', '.join(accepted)} is accepted; refuse it in `__post_init__` with a ValueError")
    return f"{len(tables)} bad values are refused" if numbers else "no numeric parameters; an unknown key is refused"


def _accepts(part: Part, made: Any, changed: dict[str, Any]) -> bool:
    try:
        if any(isinstance(value, str) or name == "no_such_key" for name, value in changed.items()):
            built(part._replace(parameters=made.parameters() | changed))
        else:
            dataclasses.replace(made, **changed)
    except ValueError:
        return False
    return True


def check_encode(tested: DefenseUnderTest) -> str:
    """Messages are bytes, for updates of several sizes and tensors."""
    shown = []
    for dim in _DIMS:
        try:
            wire = Wire(tested.defense, dim)
            sizes = {len(_bytes(wire, wire.update(norm, n))) for n, norm in enumerate((0.9, 1e-3, 30.0, 0.9))}
        except ValueError as error:
            if dim == _DIMS[-1]:
                raise
            shown.append(f"d = {dim} is refused ({' '.join(str(error).split())})")
            continue
        except Fault:
            raise
        except Exception as error:
            raise Fault(f"an update of {dim} numbers raises {told(error, tested.part.folder)}") from error
        low, high = min(sizes), max(sizes)
        shown.append(f"{low if low == high else f'{low} to {high}'} bytes for d = {dim}")
    return ", ".join(shown)


def _bytes(wire: Wire, update: Vector) -> bytes:
    """The message; raises `Fault` unless it is bytes."""
    sent: Any = wire.round_.encode(wire.client(update))
    if not (isinstance(sent, tuple) and len(sent) == 2 and type(sent[0]) is bytes):
        got = f"({', '.join(type(x).__name__ for x in sent)})" if isinstance(sent, tuple) else type(sent).__name__
        raise Fault(f"`encode` returns {got}, expected (bytes, memory): nothing but bytes leaves the client")
    message: bytes = sent[0]
    return message


def check_update(tested: DefenseUnderTest) -> str:
    """The update is not modified; zero is accepted, what is not finite or not flat is refused."""
    wire = tested.wire
    update = wire.update(30.0)
    before = update.clone()
    wire.round_.encode(wire.client(update))
    if not torch.equal(update, before):
        raise Fault("`encode` modifies the update that it is given; work on a copy, as in update.clone()")
    zero = wire.exchange(torch.zeros(wire.dim)).received[0]
    if not bool(wire.read(zero).isfinite().all()):
        raise Fault("a zero update is decoded to numbers that are not finite")
    refused: list[tuple[str, Vector]] = [("that is not flat", wire.update().reshape(2, -1))]
    for bad in (math.inf, math.nan):
        update = wire.update()
        update[3] = bad
        refused.insert(0, (f"with {bad}", update))
    for what, update in refused:
        try:
            wire.round_.encode(wire.client(update))
        except ValueError:
            continue
        raise Fault(f"`encode` accepts an update {what}; begin it with leakgauge.check_update(update)")
    return "not modified; zero passes; NaN, infinity and other shapes are refused"


def check_keys(tested: DefenseUnderTest) -> str:
    """The same keys give the same bytes, and every random draw uses a key."""
    check_repeats(*tested.traced, "`encode`")
    wire, drawn = tested.wire, dict[Key, Any]()
    for name, key, place in tested.traced[0].draws:
        if key in drawn:
            raise Fault(f"one key is drawn from twice, at {drawn[key]} and {place}; take two of its children")
        if key.path[:1] == ("private",) or place is not None:
            drawn[key] = place or name
    received = wire.exchange(wire.update()).received[0]
    once, again = (watched(lambda: wire.read(received).tolist(), tested.part.folder) for _ in range(2))
    check_repeats(once, again, "`estimate`")
    return f"same keys, same bytes; {len(drawn)} draws, each by a key of its own"


def check_private(tested: DefenseUnderTest) -> str:
    """Noise comes from the private key: an adversary that knows the shared key could subtract other noise."""
    defense, wire = tested.defense, tested.wire
    update, draws = wire.update(), tested.traced[0].draws
    sent = wire.exchange(update).sent[0]
    moves = any(wire.exchange(update, private).sent[0] != sent for private in range(1, 9))
    public = [draw for draw in draws if draw.place is not None and draw.key.path[:1] != ("private",)]
    if moves and not defense.randomized:
        raise Fault("other private keys give other bytes, but `randomized` is False; set it to True")
    if not moves and defense.randomized:
        where = f" at {public[0].place}" if public else ""
        drawn = f"`{public[0].name}` draws from {_whose(public[0])}{where}" if public else ""
        why = f"{drawn}, and an adversary with that key can subtract the noise" if drawn else "nothing is drawn by them"
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
    fixed = [draw for draw in public if draw.key.path[:1] != ("shared",)]
    if fixed:
        raise Fault(
            f"`{fixed[0].name}` draws from {_whose(fixed[0])} at {fixed[0].place}, so every message has the same "
            "numbers; draw from `private` or `link.key`, or once, in `init`"
        )
    return "other private keys give other bytes" if moves else "no private randomness, as `randomized = False` says"


def _is_added(wire: Wire) -> bool:
    """Whether the shared key moves the mean estimate of an update of zero: a rotation does not, noise does."""
    numbers = range(_MEANS)
    some, others = (wire.estimates(torch.zeros(wire.dim), numbers, [shared] * _MEANS) for shared in (0, 1))
    error = (some.var(0) + others.var(0)) / _MEANS + 1e-30
    gaps = (some.mean(0) - others.mean(0)).square() / error
    return float(gaps.mean()) > 1 + 6 * math.sqrt(2 / wire.dim)


def _whose(draw: Draw) -> str:
    shared = draw.key.path[:1] == ("shared",)
    return "the shared key (known to the server)" if shared else "a key that anyone can derive"


def check_memory(tested: DefenseUnderTest) -> str:
    """State and memory pass from round to round, `init` is a function of the setting, and `encode` changes neither."""
    defense, wire = tested.defense, tested.wire
    if type(defense).remember is Defense.remember and type(defense).init is Defense.init:
        raise Skip("neither state nor memory")
    setting = wire.round_.setting
    if _content(defense.init(setting)) != _content(defense.init(setting)):
        raise Fault("`init` gives another state when it is called again: both ends compute it, so draw from Key(0)")
    client, lengths = wire.client(wire.update()), list[int]()
    for number, state in enumerate(Federation.of(defense, setting).history):
        before = _content((state, client.memory))
        sent, memory = dataclasses.replace(wire.round_, state=state, number=number).encode(client)
        if _content((state, client.memory)) != before:
            raise Fault("`encode` modifies its state or its memory, which a refused message must not change; copy it")
        client, lengths = client._replace(memory=memory), [*lengths, len(sent)]
    return f"{len(lengths)} rounds, messages of {', '.join(map(str, lengths))} bytes"


def _content(value: Any) -> Any:
    """The numbers in a state or a memory, to compare; what a dataclass caches is left out."""
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = [*value.items()]
    return [_content(item) for item in value] if isinstance(value, list | tuple) else plain(value)


def check_plaintext(tested: DefenseUnderTest) -> str:
    """A message shows the numbers that `plaintext_statistic` states and `read_plaintext_statistic` reads."""
    for dim in (DIM, DIM + 1):
        wire = Wire(tested.defense, dim)
        updates = torch.stack([0.5 + wire.update(), torch.zeros(dim)])
        stated = tested.defense.plaintext_statistic(updates.double(), wire.round_.setting)
        received = [wire.exchange(update).received[0] for update in updates]
        read = tested.defense.read_plaintext_statistic(received, wire.round_.setting)
        if read.shape != stated.shape:
            raise Fault(
                f"`plaintext_statistic` states numbers {list(stated.shape)}, "
                f"`read_plaintext_statistic` reads {list(read.shape)}"
            )
        if not torch.allclose(read, stated, rtol=1e-6, atol=1e-12):
            off = float((read - stated).abs().max())
            raise Fault(
                "`read_plaintext_statistic` reads other numbers than `plaintext_statistic` states, "
                f"off by up to {off:.3g}"
            )
    if not stated.shape[1]:
        raise Skip("no number is sent in clear")
    return f"{stated.shape[1]} numbers of each message are read as `plaintext_statistic` states them"


def check_mean(tested: DefenseUnderTest) -> str:
    """The server's mean is shaped like an update, whatever the order of the clients; what `average` reads stays."""
    for dim, count in ((17, 1), (17, 3), (DIM, 3)):
        wire, server = Wire(tested.defense, dim), Key(0).child("server")
        round_: Round = wire.round_
        clients = [wire.client(wire.update(0.9, k), k, k, Sender(k, 8 + 4 * k)) for k in range(count)]
        collected = round_.collect(clients, Key(0).child("channel"), server)
        if collected.dropped:
            raise Fault(f"an honest message is refused: {collected.dropped[min(collected.dropped)]}")
        mean = wire.shaped(collected.mean, "decode")
        senders = zip(collected.exchange.received, collected.links.each(), strict=False)
        estimates = [round_.accept(message, link) for message, link in senders]
        if not all(map(torch.equal, collected.updates, estimates)):
            raise Fault("`average` modifies the updates that it is given; work on copies")
        turned = round_.decode(round_.exchange(clients[::-1], Key(0).child("channel")), server)
        if not torch.allclose(turned, mean, rtol=1e-4, atol=1e-5 * float(mean.abs().max())):
            raise Fault("the decoded mean depends on the order of the clients; use each link's own sender and key")
    return "shaped like an update; the order of the clients does not matter"


def check_bound(tested: DefenseUnderTest) -> str:
    """The server accepts honest messages of updates of any norm, also by the bound that `longest` states."""
    wire = tested.wire
    drawn = wire.update()
    for number, norm in enumerate(_NORMS):
        for update in (drawn, drawn.sign(), drawn * (drawn == drawn.max())):
            update = (norm * wire.clip * update.double() / update.double().norm()).float()
            exchange = wire.exchange(update, number, number)
            try:
                wire.round_.accept(exchange.received[0], exchange.links.each()[0])
            except MessageError as error:
                raise Fault(
                    f"the honest message of an update of norm {norm * wire.clip:g} is refused: {error}"
                ) from error
    longest = tested.defense.longest(wire.round_.state, exchange.links.each()[0]._replace(shared=None))
    bound = f", up to a norm of {longest:.3g}" if math.isfinite(longest) else "; no bound is stated"
    return f"honest messages are accepted{bound}"


def check_messages(tested: DefenseUnderTest) -> str:
    """Damaged messages raise MessageError or decode to finite numbers, in bounded memory."""
    wire = tested.wire
    sent = wire.exchange(wire.update()).received[0]
    lengths = {"a cut": sent[:-1], "a longer": sent + b"\0", "an empty": b"", "a half": sent[: len(sent) // 2]}
    for name, damaged in lengths.items():
        if damaged != sent and not _refused(tested, damaged, name):
            raise Fault(
                f"`estimate` accepts {name} message ({len(damaged)} bytes instead of {len(sent)}); raise MessageError"
            )
    refused = 0
    for number in range(_MUTATED):
        places = rng.integers(Key(2).child(number), 2, 2**31).tolist()
        refused += _refused(tested, mutated(sent, KINDS[number % len(KINDS)], *places), "a damaged")
    tracemalloc.start()
    try:
        huge = _refused(tested, sent[:1] * _HUGE, "a huge")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if not huge and sent:
        raise Fault(f"`estimate` accepts a message of {_HUGE} bytes; raise MessageError")
    if peak > _MEMORY * _HUGE:
        raise Fault(f"a message of {_HUGE:,} bytes takes {peak:,} bytes of memory; look at its length first")
    return f"cut, longer, empty and huge ones are refused, {refused} of {_MUTATED} damaged ones too"


def mutated(message: bytes, kind: str, at: int, value: int) -> bytes:
    """The message after one mutation of a kind in `KINDS`; `at` and `value` are any integers >= 0."""
    if kind == "extend":
        return message + bytes([value % 256]) * (1 + at % 9)
    if kind == "cut":
        return message[: at % (len(message) + 1)]
    if kind == "noise":
        return rng.integers(Key(value), len(message), 256).astype("u1").tobytes()
    fresh = bytearray(message)
    if not fresh:
        return bytes(fresh)
    if kind == "flip":
        fresh[at % len(fresh)] ^= 1 << value % 8
        return bytes(fresh)
    if kind == "bytes":
        start = at % len(fresh)
        part = rng.integers(Key(value), min(8, len(fresh) - start), 256).astype("u1").tobytes()
        fresh[start : start + len(part)] = part
        return bytes(fresh)
    fields = _DOUBLES if kind == "float64" else _FLOATS
    field = fields[value % len(fields)]
    if kind == "floats":
        return (field * (len(fresh) // 4 + 1))[: len(fresh)]
    start = at % len(fresh) // len(field) * len(field)
    fresh[start : start + len(field)] = field
    return bytes(fresh[: len(message)])


def _refused(tested: DefenseUnderTest, damaged: bytes, name: str) -> bool:
    """Whether the server properly refuses a message; else it, an outsider and the mean read finite numbers."""
    wire = tested.wire
    round_: Round = wire.round_
    links = Links(round_.setting, [SENDER], [Key(0).child("shared", 0)])
    alone = Exchange([damaged], [damaged], [], links)
    readers: list[Callable[[], Any]] = [lambda: wire.read(damaged), lambda: wire.read(damaged, None)]
    readers += [lambda: round_.decode(alone, Key(1))] if wire.defense.superposes else []
    outcomes = []
    for read in readers:
        try:
            read()
            outcomes.append(False)
        except MessageError:
            outcomes.append(True)
        except Fault:
            raise
        except Exception as error:
            raise Fault(f"{name} message raises {told(error, tested.part.folder)}; expected MessageError") from error
    return outcomes[0]
