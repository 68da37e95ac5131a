"""The tap in apps as they are: the older API, a part of the layers, 16 bits, no examples, a server without torch."""

import json
import logging
import subprocess
import sys
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import Server, SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg as OlderFedAvg
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from leakgauge.flower import Facts, numbered, recorded, tap
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.federation.recording import read
from leakgauge.harness.study.prepare import _mismatch

CLIENTS, ROUNDS = 4, 2
FACTS = Facts(CLIENTS, CLIENTS, "update", epochs=1, batch=0, lr=0.5, rounds=ROUNDS)
ROWS = {client: np.arange(2) + 2 * client for client in range(CLIENTS)}
START = {
    "body.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "norm.weight": np.ones(2, np.float32),
    "seen": np.array(3),
    "head.weight": np.arange(8, dtype=np.float32).reshape(4, 2),
}


@pytest.fixture(autouse=True, scope="module")
def _task():
    """Messages of this process name a task, as those of an app do."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    yield
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = None, None, None


class Federation:
    """The nodes of an app, called one after the other; node 100 + k has the partition k."""

    def __init__(self, app):
        self.app, nodes = app, [100 + k for k in range(CLIENTS)]
        self.contexts = {node: Context(1, node, {"partition-id": node - 100}, RecordDict(), {}) for node in nodes}

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, timeout=0):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            replies.append(self.app(message, self.contexts[node]))
            replies[-1].metadata.__dict__["_src_node_id"] = node
        return replies


def lines_of(caplog):
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("leakgauge")]


# the older API


class Mover(NumPyClient):
    """Moves every array of floats by a number of its own, and goes wrong on request."""

    def __init__(self, client, fault):
        self.client, self.fault = client, fault

    def fit(self, parameters, config):
        if self.fault == f"raise {self.client}":
            raise RuntimeError("no data")
        moved = [array + (self.client + 1) / 8 if array.dtype.kind == "f" else array for array in parameters]
        if "16" in self.fault:
            moved = [array.astype(np.float16) if array.dtype.kind == "f" else array for array in moved]
        if "head" in self.fault:
            moved = moved[:3]
        return moved, 0 if self.fault == f"empty {self.client}" else 2, {}


def older(strategy, folder, fault="", mods=(numbered,), rounds=ROUNDS):
    """The final arrays of a training by Flower's own older server."""

    def client_fn(context):
        return Mover(context.node_config["partition-id"], fault).to_client()

    grid = Federation(ClientApp(client_fn, mods=list(mods)))
    manager = SimpleClientManager()
    for node in grid.get_node_ids():
        manager.register(GridClientProxy(node, grid, 1))
    server = Server(client_manager=manager, strategy=strategy)
    server.set_max_workers(1)
    server.fit(rounds, None)
    return parameters_to_ndarrays(server.parameters)


def older_strategy():
    start = ndarrays_to_parameters(list(START.values()))
    more = {"min_fit_clients": CLIENTS, "min_available_clients": CLIENTS, "fraction_evaluate": 0.0}
    return OlderFedAvg(initial_parameters=start, **more)


def test_a_tap_of_the_older_api_records_every_message_and_changes_no_bit(tmp_path, caplog):
    plain = older(older_strategy(), tmp_path)
    final = older(tap(older_strategy(), tmp_path / "r", FACTS, rows=ROWS), tmp_path)
    assert [array.tobytes() for array in plain] == [array.tobytes() for array in final]
    recording = read(tmp_path / "r")
    assert recording.closed
    assert recording.layout == Layout(("0", "1", "3"), ((2, 3), (2,), (4, 2)))
    assert recording.sent == {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}
    for one in recording.messages(0):
        np.testing.assert_array_equal(np.frombuffer(one.wire, "<f4"), np.full(16, (one.client + 1) / 8, np.float32))
        assert (one.samples, one.images, one.steps, list(one.rows)) == (2, 2, 1, list(ROWS[one.client]))
    np.testing.assert_allclose(recording.model(1), recording.model(0) + 2.5 / 8)
    assert lines_of(caplog) == []


def test_arrays_without_names_match_a_model_by_their_order():
    names, shapes = ("body.weight", "head.weight"), ((2, 3), (4, 2))
    assert _mismatch(Layout(names, shapes), Layout(("0", "3"), shapes)) == ""
    assert "tensor 1" in _mismatch(Layout(names, shapes), Layout(("0", "3"), ((2, 3), (2, 4))))
    assert "tensor 0" in _mismatch(Layout(names, shapes), Layout(("0", "head.weight"), shapes))


@pytest.mark.parametrize("fault", ["raise 1", "empty 1"])
def test_a_failed_or_empty_client_of_the_older_api_is_left_out_and_said(tmp_path, caplog, fault):
    with caplog.at_level(logging.WARNING, "flwr"):
        older(tap(older_strategy(), tmp_path / "r", FACTS), tmp_path, fault)
    assert read(tmp_path / "r").sent == {0: (0, 2, 3), 1: (0, 2, 3)}
    said = {"raise 1": "a client failed: no data", "empty 1": "expected a whole number of samples"}[fault]
    assert [said in line for line in lines_of(caplog)] == [True, True]


def test_fewer_arrays_without_names_are_placed_by_their_shapes(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "flwr"):
        older(tap(older_strategy(), tmp_path / "r", FACTS), tmp_path, "no head", rounds=1)
    recording = read(tmp_path / "r")
    assert recording.layout == Layout(("0", "1"), ((2, 3), (2,)))
    assert recording.sent == {0: (0, 1, 2, 3)}
    assert lines_of(caplog) == ["leakgauge: 1 arrays are not recorded: 3"]


def test_arrays_without_names_that_fit_in_two_ways_are_refused(tmp_path, caplog):
    strategy, same = tap(older_strategy(), tmp_path / "r", FACTS), [np.zeros(2, np.float32)] * 2
    strategy.initial_parameters = None
    manager = SimpleNamespace(
        num_available=lambda: 1, sample=lambda **_: [SimpleNamespace(cid="1")], all=lambda: {"1": None}
    )
    strategy.configure_fit(1, ndarrays_to_parameters(same), manager)
    fit = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(same[:1]), 2, {})
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy.aggregate_fit(1, [(SimpleNamespace(cid="1"), fit)], [])
    assert "expected 2 arrays, or fewer that fit in one way, got 1" in lines_of(caplog)[0]


def test_of_a_secure_sum_only_the_models_are_recorded(tmp_path, caplog):
    """SecAgg+ of Flower gives the strategy the same mean in place of each client's parameters."""

    class Summed(OlderFedAvg):
        def aggregate_fit(self, server_round, results, failures):
            mean = results[0][1].parameters
            for _, fit in results:
                fit.parameters = mean
            return self.tapped(server_round, results, failures)

    strategy = tap(older_strategy(), tmp_path / "r", FACTS)
    outer = Summed(initial_parameters=strategy.initial_parameters, fraction_evaluate=0.0)
    outer.configure_fit, outer.tapped = strategy.configure_fit, strategy.aggregate_fit
    with caplog.at_level(logging.WARNING, "flwr"):
        older(outer, tmp_path)
    assert read(tmp_path / "r").models == (0, 1)
    assert read(tmp_path / "r").sent == {}
    assert lines_of(caplog)[0] == "leakgauge: round 0: only the sum of the messages arrives"


def test_clients_of_the_older_api_record_themselves(tmp_path):
    older(older_strategy(), tmp_path, mods=[recorded(tmp_path / "clients", FACTS)])
    for client in range(CLIENTS):
        for number in range(ROUNDS):
            recording = read(tmp_path / "clients" / f"client-{client:05d}" / f"round-{number:05d}")
            assert recording.sent == {number: (client,)}
            assert recording.layout.names == ("0", "1", "3")


# what is sent


def moved(names, to=np.float32, prefix="", **metrics):
    """A ClientApp that sends these arrays, moved by the client's number."""

    def train(message, context):
        held, client = message.content["arrays"], context.node_config["partition-id"]
        arrays = {name: held[name].numpy() if name in held else START[name] for name in names}
        arrays = {name: array + (client + 1) / 8 if name != "seen" else array for name, array in arrays.items()}
        sent = ArrayRecord({prefix + name: as_sent(array, to) for name, array in arrays.items()})
        counts = MetricRecord({"num-examples": 2, **metrics} if metrics.get("count", 1) else {"loss": 1.0})
        return Message(RecordDict({"arrays": sent, "metrics": counts}), reply_to=message)

    app = ClientApp(mods=[numbered])
    app.train()(train)
    return Federation(app)


def as_sent(array, to):
    """An array of 32 or 16 bits; numpy stores a bfloat16 as two bytes without a type."""
    if to != "bfloat16" or array.dtype.kind != "f":
        return Array(array.astype(to) if array.dtype.kind == "f" else array)
    content = BytesIO()
    np.save(content, (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view("V2"))
    return Array("bfloat16", array.shape, "numpy.ndarray", content.getvalue())


def strategy_of():
    return FedAvg(min_train_nodes=CLIENTS, min_available_nodes=CLIENTS, fraction_evaluate=0.0, min_evaluate_nodes=0)


def newer(folder, grid, strategy=None, **options):
    start = ArrayRecord({name: Array(array) for name, array in START.items()})
    strategy = tap(strategy or strategy_of(), folder, FACTS, **options)
    return strategy.start(grid, start, num_rounds=ROUNDS).arrays


PARTS = {
    "FedBN": ["body.weight", "seen", "head.weight"],
    "a personal head": ["body.weight", "norm.weight", "seen"],
    "an adapter": ["norm.weight"],
}


@pytest.mark.parametrize("part", PARTS)
def test_clients_that_send_a_part_of_the_layers_are_recorded_in_its_layout(tmp_path, caplog, part):
    with caplog.at_level(logging.WARNING, "flwr"):
        newer(tmp_path / "r", moved(PARTS[part]))
    recording, sent = read(tmp_path / "r"), [name for name in PARTS[part] if name != "seen"]
    assert recording.layout.names == tuple(sent)
    assert recording.sent == {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}
    start = np.concatenate([START[name].reshape(-1) for name in sent])
    np.testing.assert_array_equal(recording.model(0), start)
    for number in (0, 1):
        for one in recording.messages(number):
            np.testing.assert_allclose(np.frombuffer(one.wire, "<f4"), (one.client + 1) / 8, rtol=1e-5)
    left = [name for name in START if name not in [*sent, "seen"]]
    assert lines_of(caplog) == [f"leakgauge: {len(left)} arrays are not recorded: {', '.join(left)}"]


@pytest.mark.parametrize(("to", "close"), [(np.float16, 2**-9), ("bfloat16", 2**-6)])
def test_arrays_of_16_bits_are_recorded(tmp_path, to, close):
    strategy = strategy_of()
    strategy.aggregate_train = lambda server_round, replies: (None, None)  # Flower's own cannot add bfloat16
    newer(tmp_path / "r", moved(["body.weight"], to), strategy, rounds=[0])
    recording = read(tmp_path / "r")
    assert recording.sent == {0: (0, 1, 2, 3)}
    for one in recording.messages(0):
        got = np.frombuffer(one.wire, "<f4") + START["body.weight"].reshape(-1)
        np.testing.assert_allclose(got, START["body.weight"].reshape(-1) + (one.client + 1) / 8, rtol=close)


def test_names_of_wrapped_networks_are_those_of_the_network(tmp_path):
    newer(tmp_path / "r", moved(["body.weight", "head.weight"], prefix="module."))
    assert read(tmp_path / "r").layout.names == ("body.weight", "head.weight")


def test_without_a_number_of_examples_known_rows_count_and_else_nothing_is_recorded(tmp_path, caplog):
    grid, strategy = moved(["body.weight"], count=0), strategy_of()
    strategy.aggregate_train = lambda server_round, replies: (None, None)
    newer(tmp_path / "a", grid, strategy, rows=ROWS)
    assert [one.samples for one in read(tmp_path / "a").messages(0)] == [2] * CLIENTS
    strategy = strategy_of()
    strategy.aggregate_train = lambda server_round, replies: (None, None)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flwr"):
        newer(tmp_path / "b", grid, strategy)
    assert "expected a whole number of samples as metric 'num-examples', got None" in lines_of(caplog)[0]


class Broken:
    """Fails in any way that a caller did not think of."""

    def __getattr__(self, name):
        raise RuntimeError("it broke")


@pytest.mark.parametrize("where", ["nodes", "rows", "disk", "rate"])
def test_whatever_breaks_in_a_tap_is_said_and_the_training_goes_on(tmp_path, caplog, where):
    grid, plain = moved(list(START)), strategy_of().start
    start = ArrayRecord({name: Array(array) for name, array in START.items()})
    expected = plain(grid, start, num_rounds=ROUNDS).arrays
    strategy = tap(strategy_of(), tmp_path / "r", FACTS)
    hooks = strategy.leakgauge_hook
    if where == "nodes":
        hooks.nodes = Broken()
    if where == "rows":
        hooks.folder.rows = Broken()
    if where == "disk":
        (tmp_path / "r").write_text("a file, not a folder")
    if where == "rate":
        hooks.folder.facts = None
    with caplog.at_level(logging.WARNING, "flwr"):
        arrays = strategy.start(grid, start, num_rounds=ROUNDS).arrays
    assert {name: array.numpy().tobytes() for name, array in arrays.items()} == {
        name: array.numpy().tobytes() for name, array in expected.items()
    }
    assert lines_of(caplog)
    assert all("not recorded" in line for line in lines_of(caplog))


ALONE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "opacus", "skimage", "pandas", "scipy", "sklearn", "pydantic"):
            raise ImportError(f"{name} is not in this server")

sys.meta_path.insert(0, Absent())
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from leakgauge.flower import Facts, tap
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

class Strategy:
    def configure_train(self, server_round, arrays, config, grid):
        content = RecordDict({"arrays": arrays, "config": config})
        return [Message(content, dst_node_id=node, message_type="train") for node in grid.get_node_ids()]

    def aggregate_train(self, server_round, replies):
        return None, None

    def start(self, grid, arrays, num_rounds):
        for number in range(1, num_rounds + 1):
            asked = self.configure_train(number, arrays, ConfigRecord({"lr": 0.25}), grid)
            self.aggregate_train(number, [reply(one) for one in asked])

class Grid:
    def get_node_ids(self):
        return [7, 8]

def reply(asked):
    node = asked.metadata.dst_node_id
    arrays = ArrayRecord({"w": Array(asked.content["arrays"]["w"].numpy() + node)})
    made = Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 2})}), reply_to=asked)
    made.metadata.__dict__["_src_node_id"] = node
    return made

strategy = tap(Strategy(), sys.argv[1], Facts(2, 2, "update", epochs=1, lr=0.5))
strategy.start(Grid(), ArrayRecord({"w": Array(np.ones(3, np.float32))}), num_rounds=2)
assert "torch" not in sys.modules
"""


def test_a_server_without_torch_records(tmp_path):
    (tmp_path / "server.py").write_text(ALONE)
    made = subprocess.run([sys.executable, tmp_path / "server.py", tmp_path / "r"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    recording = read(tmp_path / "r")
    assert (recording.closed, recording.lr(0), recording.facts.rounds) == (True, 0.25, 2)
    assert recording.sent == {0: (0, 1), 1: (0, 1)}
    assert [list(np.frombuffer(one.wire, "<f4")) for one in recording.messages(1)] == [[7] * 3, [8] * 3]
    assert json.loads((tmp_path / "r" / "recording.jsonl").read_text().splitlines()[0])["parameters"] == {}
