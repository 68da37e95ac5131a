"""A small federation sends the bytes of a training, repeats messages by chosen keys, and shows what adversaries see."""

import pytest
import torch

from leakgauge.defenses.dp_fedavg import DPFedAvg
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.jopeq import JoPEQ
from leakgauge.defenses.ota import OTA
from leakgauge.defenses.top_k import TopK
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import Sender
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep, make_plan, train
from leakgauge.harness.federation.round import client_key
from leakgauge.harness.federation.small import Federation
from leakgauge.harness.learn.batch import Work, train_clients
from tests.doubles import random_examples, small_task
from tests.fuzz import DEFENSES, SETTING

UPDATES = list(0.01 * normal(Key(3), (4, SETTING.dim)))
KEY = Key(7)


@pytest.mark.parametrize("defense", [Gaussian(noise_std=0.1), TopK(fraction=0.2, feedback=True), OTA()])
def test_a_run_gives_the_bytes_of_a_training(defense):
    task, key, rounds = small_task(), Key(0), range(3)
    clients = {k: random_examples(10, seed=k) for k in range(4)}
    spec = FederationSpec(clients=4, rounds=3, batch=4, local_steps=2)
    keep = Keep(frozenset(rounds), frozenset(rounds))
    training = train(task, spec, defense, clients, clients[0], key, engine="loop", keep=keep)
    plan = make_plan(spec, spec.lr, defense.local, defense.step_noise(training.setting))
    work = [[Work(data, client_key(key, t, k).child("train")) for k, data in clients.items()] for t in rounds]
    updates = [train_clients(task, training.models[t], work[t], plan, "loop").updates for t in rounds]
    federation = Federation.of(defense, training.setting)
    for t, exchange in enumerate(federation.run(updates, key)):
        assert list(exchange.received) == [message.wire for message in training.messages[t]]
        assert [message.shared for message in training.messages[t]] == exchange.links.keys[: len(exchange.received)]


@pytest.mark.parametrize(("name", "parameters"), DEFENSES, ids=[f"{n}{list(p.values()) or ''}" for n, p in DEFENSES])
def test_a_repeated_message_has_the_bytes_of_its_keys(name, parameters):
    federation = Federation.of(registry.build("defense", name, parameters), SETTING)
    sender, own = Sender(2, SETTING.samples), KEY.child("client", 2)
    sent = federation.exchange([UPDATES[0]], KEY, senders=[sender]).sent[0]
    keys = own.child("private"), own.child("shared"), KEY.child("channel")
    assert federation.repeat(UPDATES[0], *keys, sender=sender).sent == [sent]
    others = [
        *(federation.repeat(UPDATES[0], Key(seed), *keys[1:], sender=sender) for seed in range(50)),
        federation.repeat(UPDATES[1], *keys, sender=sender),
    ]
    assert any(other.sent != [sent] for other in others)


@pytest.mark.parametrize("defense", [DPFedAvg(), TopK(fraction=0.5, feedback=True), Gaussian()])
def test_a_client_that_drops_out_changes_no_other_message(defense):
    federation, arrived = Federation.of(defense, SETTING), (0, 2, 3)
    memories = list(0.1 * normal(Key(5), (4, SETTING.dim))) if isinstance(defense, TopK) else [None] * 4
    whole = federation.exchange(UPDATES, KEY, memories=memories)
    ends = {"senders": [whole.links.senders[k] for k in arrived], "memories": [memories[k] for k in arrived]}
    less = federation.exchange([UPDATES[k] for k in arrived], KEY, **ends)
    assert less.sent == [whole.sent[k] for k in arrived]
    if isinstance(defense, TopK):
        assert all(torch.equal(own, whole.memories[k]) for own, k in zip(less.memories, arrived, strict=True))
    if isinstance(defense, DPFedAvg):  # the noise and the denominator do not depend on the arrivals
        both = [federation.round().decode(exchange, KEY.child("server")) for exchange in (whole, less)]
        torch.testing.assert_close(both[0] - both[1], UPDATES[1] / SETTING.participants, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("threat", [threat for threat in Threat if "messages" in SEES[threat]])
def test_estimates_are_those_of_an_adversary_with_its_keys_alone(threat):
    federation = Federation.of(JoPEQ(), SETTING)
    exchange, keyed = federation.exchange(UPDATES, KEY, 0), "shared" in SEES[threat]
    round_ = federation.round()
    pairs = zip(exchange.received, exchange.links.each(), strict=True)
    expected = [round_.estimate(wire, link.sender, link.shared if keyed else None) for wire, link in pairs]
    assert torch.equal(federation.estimates(exchange, threat), torch.stack(expected))


def test_a_federation_ends_when_its_defense_stops_and_has_the_asked_rounds():
    udp = registry.build("defense", "udp", {"epsilon": 1.0})
    assert len(Federation.of(udp, SETTING).history) <= SETTING.rounds
    assert len(Federation.of(Gaussian(), SETTING, rounds=7).history) == 7
    assert not Federation.of(Gaussian(), SETTING, rounds=0).history


def test_silent_participants_fill_a_channel_that_superposes():
    federation = Federation.of(OTA(), SETTING)
    assert len(federation.exchange(UPDATES[:1], KEY).sent) == SETTING.participants
    assert len(Federation.of(Gaussian(), SETTING).exchange(UPDATES[:1], KEY).sent) == 1
