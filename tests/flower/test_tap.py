"""The tap loses no message, changes no bit and keeps its bound; a refused message drops its client for the round."""

import logging

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from leakgauge.flower import Facts, defend, defended, numbered, recorded, tap
from leakgauge.harness.core.contract import LocalRule, Sender
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import setting_of
from leakgauge.harness.federation.recording import read
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.integrations.flower import federation
from tests.flower.simulated import InOrder, app_of, simulate

CLIENTS, ROUNDS, SAMPLES = 20, 50, 10
FACTS = Facts(CLIENTS, CLIENTS, "update", epochs=1, batch=4, lr=0.5)
START = {"weight": np.zeros((3, 4), np.float32), "seen": np.array(7), "bias": np.zeros(3, np.float32)}
TOP = {"fraction": 0.2, "feedback": True}


def model():
    return ArrayRecord({name: Array(value) for name, value in START.items()})


def towards(client):
    """What a client's weights move to."""
    return (np.arange(12, dtype=np.float32) - client).reshape(3, 4) / 16


def pull(message, context):
    """A client that moves halfway to its own point, counts what it has seen, and goes wrong on request."""
    client, held = context.node_config["partition-id"], message.content["arrays"]
    if f"raise {client}" == message.content["config"].get("fault"):
        raise RuntimeError("no data")
    weight = held["weight"].numpy()
    weight = weight + (towards(client) - weight) / 2
    if f"diverge {client}" == message.content["config"].get("fault"):
        weight[0, 0] = np.nan
    arrays = {"weight": weight, "seen": held["seen"].numpy() + 1, "bias": held["bias"].numpy() + client}
    metrics = MetricRecord({"num-examples": SAMPLES, "client": client, "at": float(weight.sum())})
    content = {"arrays": ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})}
    return Message(RecordDict({**content, "metrics": metrics}), reply_to=message)


def mods(message, context, call_next):
    """The mods that the configuration names."""
    config = message.content["config"]
    if config.get("mod") == "top-k":
        reply = defended("top-k", TOP, secret=config.get("secret", 5))(message, context, call_next)
        if config.get("fault") == f"garble {context.node_config['partition-id']}" and config["server-round"] == 1:
            reply.content["arrays"] = ArrayRecord({"leakgauge": Array(np.zeros(3, np.uint8))})
        return reply
    if config.get("mod") == "recorded":
        return recorded(config["folder"], FACTS, rounds=[1])(message, context, call_next)
    return numbered(message, context, call_next) if config.get("mod") == "numbered" else call_next(message, context)


class Said(logging.Handler):
    """What Flower's log said, as lines."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs of one simulation: by name, the final arrays of each, and what the log said of it."""
    folder, final, said = tmp_path_factory.mktemp("taps"), {}, {}

    def go(grid, name, strategy, rounds, **config):
        listener = Said()
        logging.getLogger("flwr").addHandler(listener)
        try:
            result = strategy.start(grid, model(), num_rounds=rounds, train_config=ConfigRecord(config))
        finally:
            logging.getLogger("flwr").removeHandler(listener)
        final[name] = {key: array.numpy() for key, array in result.arrays.items()}
        said[name] = [line for line in listener.lines if line.startswith("leakgauge")]

    def main(grid):
        go(grid, "plain", InOrder(CLIENTS), 4)
        rows = {k: np.arange(SAMPLES) + SAMPLES * k for k in range(CLIENTS)}
        go(grid, "tapped", tap(InOrder(CLIENTS), folder / "tapped", FACTS, rows=rows), ROUNDS, mod="numbered")
        bound = tap(InOrder(CLIENTS), folder / "bound", FACTS, most_bytes=30_000)
        go(grid, "bound", bound, 6, lr=0.25)
        go(grid, "chosen", tap(InOrder(CLIENTS), folder / "chosen", FACTS, rounds=[1, 3]), 4, mod="numbered")
        go(grid, "recorded", InOrder(CLIENTS), 3, mod="recorded", folder=str(folder / "clients"))
        for fault in ("garble 3", "diverge 3", "raise 3", "none"):
            strategy = defend(InOrder(CLIENTS), "top-k", TOP, facts=FACTS, sizes=[SAMPLES], secret=5)
            strategy = tap(strategy, folder / fault, FACTS)
            go(grid, fault, strategy, 2, mod="top-k", fault=fault)
        strategy = defend(InOrder(CLIENTS), "top-k", TOP, facts=FACTS, sizes=[SAMPLES], secret=5)
        go(grid, "in the clear", strategy, 1)
        strategy = defend(InOrder(CLIENTS), "gaussian", {}, facts=FACTS, sizes=[SAMPLES], secret=5)
        go(grid, "another", strategy, 1, mod="top-k")
        go(grid, "no server", InOrder(CLIENTS), 1, mod="top-k")

    simulate(main, app_of([mods], pull), CLIENTS)
    return folder, final, said


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_tap_changes_no_bit_of_the_training(runs):
    _, final, _ = runs
    assert final["plain"].keys() == final["chosen"].keys()
    for name, array in final["plain"].items():
        assert array.tobytes() == final["chosen"][name].tobytes()
    assert final["plain"]["weight"].any()


def test_a_tap_loses_no_message_of_20_clients_in_50_rounds(runs):
    folder, _, said = runs
    recording = read(folder / "tapped")
    assert said["tapped"] == []
    assert recording.closed
    assert recording.sent == {number: tuple(range(CLIENTS)) for number in range(ROUNDS)}
    assert recording.layout.names == ("weight", "bias")
    before = recording.model(49)
    for one in recording.messages(49):
        update = torch.frombuffer(bytearray(one.wire), dtype=torch.float32)
        weight = before[:12].numpy().reshape(3, 4)
        moved = weight + (towards(one.client) - weight) / 2
        assert (update[:12].numpy() == (moved - weight).reshape(-1)).all()
        assert (one.samples, one.images, one.steps) == (SAMPLES, SAMPLES, 3)
        assert list(one.rows) == list(range(SAMPLES * one.client, SAMPLES * (one.client + 1)))


def test_a_full_recording_keeps_its_bound_and_whole_rounds_and_says_so_once(runs):
    folder, _, said = runs
    recording = read(folder / "bound")
    assert 15_000 < size(folder / "bound") <= 30_000
    assert 0 < len(recording.models) < 6
    assert recording.sent == {number: tuple(range(CLIENTS)) for number in recording.models}
    assert said["bound"] == [
        f"leakgauge: {folder / 'bound'} is full, rounds from {len(recording.models)} on are not recorded"
    ]
    assert recording.lr(0) == 0.25
    assert recording.rows == {number: {} for number in recording.models}  # nobody said whose replies these are


def test_a_tap_records_the_chosen_rounds_only(runs):
    assert read(runs[0] / "chosen").models == (1, 3)


def test_a_client_can_record_what_it_sends_without_the_server(runs):
    folder, _, _ = runs
    for client in range(CLIENTS):
        recording = read(folder / "clients" / f"client-{client:05d}" / "round-00001")
        assert recording.sent == {1: (client,)}
        (one,) = recording.messages(1)
        (same,) = (other for other in read(folder / "tapped").messages(1) if other.client == client)
        assert one.wire == same.wire


def update_of(client, params):
    """What a client adds to these parameters."""
    weight, bias = params[:12].numpy().reshape(3, 4), params[12:].numpy()
    ends = [weight + (towards(client) - weight) / 2, bias + client]
    return torch.from_numpy(np.concatenate([ends[0].reshape(-1), ends[1]])) - params


@pytest.mark.parametrize("fault", ["none", "garble 3", "diverge 3", "raise 3"])
def test_a_refused_message_drops_its_client_for_the_round(runs, fault):
    folder, final, said = runs
    recording, defense = read(folder / fault), registry.build("defense", "top-k", TOP)
    setting = setting_of(recording.layout, federation(FACTS, 2), [SAMPLES], LocalRule())
    memories, bad = {k: defense.remember(setting) for k in range(CLIENTS)}, () if fault == "none" else (3,)
    for number in range(2):
        here, params, updates = Round(defense, setting, None, number), recording.model(number), []
        sent = {one.client: one.wire for one in recording.messages(number)}
        for client in range(CLIENTS):
            if number == 1 and fault in ("diverge 3", "raise 3") and client in bad:
                continue
            key = Key(0)  # top-k draws nothing
            sealed, after = here.send(
                Client(Sender(client, SAMPLES), update_of(client, params), memories[client], key, key)
            )
            if number == 0 and client in bad:
                assert sent.get(client) != here.opened(sealed)
                continue
            assert sent[client] == here.opened(sealed)
            memories[client] = after
            updates.append(here.estimate(sent[client], sealed.sender, None))
        if number == 0:
            torch.testing.assert_close(recording.model(1), params + torch.stack(updates).mean(0), rtol=1e-5, atol=1e-7)
    assert final[fault]["seen"] == 7
    lines = [line for line in said[fault] if "does not count" in line]
    assert len(lines) == {"none": 0, "garble 3": 1}.get(fault, 2)
    expected = {"none": "", "garble 3": "expected an envelope of at least 8 bytes, got 3 bytes"}
    expected |= {"diverge 3": "expected a finite update, got nan at coordinate 0", "raise 3": "no data"}
    assert all(expected[fault] in line for line in lines)


def test_defend_and_defended_refuse_to_go_alone(runs):
    _, final, said = runs
    assert all("expected a reply of `defended`" in line for line in said["in the clear"])
    assert len(said["in the clear"]) == CLIENTS
    assert len(said["another"]) == CLIENTS
    assert all("expected a server that decodes top-k(" in line for line in said["another"])
    assert final["in the clear"] == final["another"] == final["no server"] == {}


class OfTheOlderApi:
    """Has the methods of `flwr.server.strategy.Strategy`."""

    def configure_fit(self, server_round, parameters, client_manager):
        return []

    def aggregate_fit(self, server_round, results, failures):
        return None, {}


def test_a_strategy_of_the_older_api_has_no_defense_and_other_objects_no_tap(tmp_path):
    with pytest.raises(ValueError, match=r"expected a strategy of flwr\.serverapp\.strategy, got OfTheOlderApi"):
        defend(OfTheOlderApi(), "none", facts=FACTS, sizes=[1], seed=0)
    with pytest.raises(ValueError, match="expected a strategy of Flower, got object"):
        tap(object(), tmp_path, FACTS)
