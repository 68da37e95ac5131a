"""One round of messages: its envelopes, its bytes, and that nothing else calls a defense's wire methods."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch

from leakgauge import Defense, MessageError, Sender
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.ota import OTA
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep, make_plan, replay_state, train
from leakgauge.harness.federation.round import Client, Round, SealedMessage, client_key
from leakgauge.harness.learn.batch import Work, train_clients
from tests.by_rows import by_rows
from tests.doubles import random_examples, small_task
from tests.fuzz import DEFENSES, SETTING

ROOT = Path(__file__).parents[1]


def envelope(number, sender):
    """A round whose messages have envelopes, and what makes a sealed message of a client of it."""
    return Round(Gaussian(), SETTING, None, number), lambda wire: SealedMessage(Sender(sender, 1), wire, Key(0))


def test_a_message_comes_out_of_its_envelope():
    round_, message = envelope(7, 3)
    assert len(round_.sealed(b"abc", Sender(3, 1))) == 8 + 3
    for wire in (b"abc", b""):
        assert round_.opened(message(round_.sealed(wire, Sender(3, 1)))) == wire


@pytest.mark.parametrize(("number", "sender"), [(8, 3), (7, 4)])
def test_an_envelope_of_another_round_or_client_is_refused(number, sender):
    expected = f"expected a message of round {number} from client {sender}, got one of round 7 from client 3"
    round_, message = envelope(number, sender)
    with pytest.raises(MessageError, match=expected):
        round_.opened(message(envelope(7, 3)[0].sealed(b"abc", Sender(3, 1))))
    with pytest.raises(MessageError, match="expected an envelope of at least 8 bytes, got 3 bytes"):
        round_.opened(message(b"abc"))


@pytest.mark.parametrize("defense", [Gaussian(noise_std=0.1), OTA()], ids=["digital", "analog"])
def test_an_exchange_gives_the_bytes_of_a_training(defense):
    task, key, number = small_task(), Key(0), 1
    clients = {k: random_examples(10, seed=k) for k in range(4)}
    spec = FederationSpec(clients=4, rounds=2, batch=4, local_steps=2)
    keep = Keep(frozenset({number}), frozenset({number}))
    training = train(task, spec, defense, clients, clients[0], key, engine="loop", keep=keep)
    messages = training.messages[number]
    senders = [sender for message in messages for sender in (message.sender, *message.others)]
    assert [sender.number for sender in senders] == list(clients)
    keys = [client_key(key, number, k) for k in clients]
    plan = make_plan(spec, spec.lr, defense.local, defense.step_noise(training.setting))
    work = [Work(data, own.child("train")) for data, own in zip(clients.values(), keys, strict=True)]
    updates = train_clients(task, training.models[number], work, plan, "loop").updates
    state = replay_state(defense, training.setting, training.feedback[:number])
    columns = senders, updates, [defense.remember(training.setting) for _ in senders], keys
    sending = [Client.of(*row) for row in zip(*columns, strict=True)]
    here = Round(defense, training.setting, state, number)
    exchange = here.exchange(sending, key.child("round", number, "channel"))
    assert list(exchange.received) == [message.wire for message in messages]
    assert [message.shared for message in messages] == list(exchange.links.keys[: len(messages)])
    other = here.exchange(sending, Key(1))
    assert other.sent == exchange.sent
    assert (other.received == exchange.received) == (not defense.analog)


@pytest.mark.parametrize(("name", "parameters"), DEFENSES, ids=[f"{n}{list(p.values()) or ''}" for n, p in DEFENSES])
def test_a_message_is_decoded_once_for_mean_and_for_all_else(name, parameters):
    plain = registry.build("defense", name, parameters)
    calls = []

    def estimate(self, state, received, link):
        calls.append(received)
        return kind.estimate(self, state, received, link)

    kind = type(plain)
    content = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain) if field.init}
    counted = type(kind.__name__, (kind,), {"estimate": estimate})(**content)
    updates = list(0.01 * normal(Key(3), (4, SETTING.dim)))
    here = Round(counted, SETTING, counted.init(SETTING))
    pairs = enumerate(updates)
    sending = [Client.of(Sender(k, 8 + k), u, plain.remember(SETTING), Key(1).child(k)) for k, u in pairs]
    found = here.collect(sending, Key(4), Key(5))
    assert calls == list(found.exchange.received)
    again = here.decode(found.exchange, Key(5))
    assert torch.equal(found.mean, again)


WIRE = {
    name: len(inspect.signature(getattr(Defense, name)).parameters) - 1
    for name in ("encode", "transmit", "estimate", "decode")
}
"""A defense's wire methods with their numbers of arguments. Only Round.estimate has the same, none of bytes or str."""


def is_defense(node):
    return isinstance(node, ast.ClassDef) and any(
        name.split("[")[0] in ("Defense", "Mechanism", "Wrapper") for name in (node.name, *map(ast.unparse, node.bases))
    )


def is_wire_call(node, rounds):
    """Whether a node calls a wire method of anything but the variables in `rounds`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WIRE):
        return False
    unpacks = any(isinstance(one, ast.Starred) for one in node.args) or None in [one.arg for one in node.keywords]
    fits = len(node.args) + len(node.keywords) == WIRE[node.func.attr]
    return (unpacks or fits) and ast.unparse(node.func.value) not in rounds


def wire_calls(source):
    """Calls of a defense's wire methods outside defenses, as `method:line`."""
    tree = ast.parse(source)
    assigned, annotated = (
        re.findall(r"(?m)^ *(.*) = .*(?:\bRound|\.round)\(", source),
        re.findall(r"(\w+): Round\b", source),
    )
    rounds = {name for names in (*assigned, *annotated) for name in names.split(", ")}
    inside = {id(node) for one in ast.walk(tree) if is_defense(one) for node in ast.walk(one)}
    calls = [node for node in ast.walk(tree) if id(node) not in inside and is_wire_call(node, rounds)]
    return sorted(f"{node.func.attr}:{node.lineno}" for node in calls)


def test_only_a_round_calls_the_wire_methods_of_a_defense():
    files = [path for top in ("harness", "attacks", "reports", "benchmarks") for path in (ROOT / top).rglob("*.py")]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): wire_calls(path.read_text("utf-8")) for path in files}
    lawful = found.pop("harness/federation/round.py")
    assert {call.split(":")[0] for call in lawful} == set(WIRE)
    assert {path: calls for path, calls in found.items() if calls} == {}


@by_rows(
    ("wire, memory = defense.encode(state, memory, update, link, key)", ["encode:1"]),
    ("self.defense.transmit(state, wires, links=links, channel=key)", ["transmit:1"]),
    ("seen.defense.estimate(state, wire, link)", ["estimate:1"]),
    ("build('none').decode(*arguments)", ["decode:1"]),
    ("def f(here: Round, defense):\n    here.estimate(a, b, c)\n    defense.estimate(a, b, c)", ["estimate:3"]),
    ("here, key = Round(defense, setting, state), 1\nhere.estimate(a, b, c)\nhere.decode(sent, key)", []),
    ("here, links = federation.round(number), []\nhere.estimate(a, b, c)\nother.estimate(a, b, c)", ["estimate:3"]),
    ("class Wrapped(Defense[None, None]):\n    def f(self):\n        self.inner.estimate(a, b, c)", []),
    ("class Summed(Wrapper[None, None]):\n    def f(self):\n        self.inner.estimate(a, b, c)", []),
    ("text.encode('utf-8', 'strict').decode()", []),
)
def test_a_call_of_a_wire_method_is_found(source, found):
    assert wire_calls(source) == found
