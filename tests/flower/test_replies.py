"""What clients may send, without a simulation: the app is called as Flower calls it."""

import logging
import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian
from flwr.supercore.task_identity import TaskIdentity

from leakgauge.flower import Facts, defend, defended, tap
from leakgauge.harness.core.contract import LocalRule
from leakgauge.harness.federation.recording import read

CLIENTS = 4
FACTS = Facts(CLIENTS, CLIENTS, "update", epochs=1, batch=0, lr=0.5)
START = torch.arange(6.0).reshape(2, 3)
STEP = torch.tensor([[1.0, 2.0, 1.0], [3.0, 1.0, 2.0]])


@pytest.fixture(autouse=True, scope="module")
def _task():
    """Messages of this process name a task, as those of an app do."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    yield
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = None, None, None


class Grid:
    """The nodes of a federation."""

    def get_node_ids(self):
        return [100 + k for k in range(CLIENTS)]


def strategy_of(kind=FedAvg):
    return kind(min_train_nodes=CLIENTS, min_available_nodes=CLIENTS, fraction_evaluate=0.0, min_evaluate_nodes=0)


def model():
    return ArrayRecord({"w": Array(START.numpy()), "seen": Array(np.array(3))})


def train(message, context):
    """A client that moves by its number."""
    weight = message.content["arrays"]["w"].numpy() + (context.node_id - 99) * STEP.numpy()
    moved = {"w": Array(weight), "seen": Array(np.array(9))}
    metrics = MetricRecord({"num-examples": 2, "loss": float(context.node_id)})
    return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)


MEAN = (START + 2.5 * STEP).numpy()


class Federation:
    """An app whose clients are called one after the other; `spoil(reply)` changes what a client sends."""

    def __init__(self, strategy, *mods):
        self.strategy, self.app = strategy, ClientApp(mods=list(mods))
        self.app.train()(train)
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in Grid().get_node_ids()}
        self.orders = []

    def send_and_receive(self, messages, timeout=0):
        replies = []
        for message in messages:
            self.orders.append(dict(message.content["leakgauge"]) if "leakgauge" in message.content else None)
            node = message.metadata.dst_node_id
            reply = self.app(message, self.contexts[node])
            reply.metadata.__dict__["_src_node_id"] = node
            replies.append(reply)
        return replies

    def get_node_ids(self):
        return Grid().get_node_ids()

    def go(self, rounds=1, **named):
        return self.strategy.start(self, model(), num_rounds=rounds, **named).arrays


def defending(kind=FedAvg, name="none", parameters=None, **named):
    return defend(strategy_of(kind), name, parameters, facts=FACTS, sizes=[2], **{"secret": 5, **named})


def test_a_defended_mean_is_the_mean_of_the_updates_and_counts_stay():
    arrays = Federation(defending(), defended("none", secret=5)).go()
    torch.testing.assert_close(torch.from_numpy(arrays["w"].numpy()), START + 2.5 * STEP)
    assert arrays["seen"].numpy() == 3


@pytest.mark.parametrize("kind", [FedMedian, FedAdam, FedAvg])
def test_a_strategy_that_is_no_mean_can_have_every_decoded_model(kind):
    plain = Federation(strategy_of(kind)).go()
    arrays = Federation(defending(kind, each=True), defended("none", secret=5)).go()
    np.testing.assert_allclose(arrays["w"].numpy(), plain["w"].numpy(), rtol=1e-6)
    if kind is FedAdam:  # of the mean, it makes the same step
        mean = Federation(defending(kind), defended("none", secret=5)).go()
        np.testing.assert_allclose(mean["w"].numpy(), plain["w"].numpy(), rtol=1e-6)


def test_without_a_seed_private_noise_is_new_and_shared_keys_agree():
    runs = [Federation(defending(name="jopeq"), defended("jopeq", secret=5)).go()["w"].numpy() for _ in range(2)]
    assert not np.array_equal(*runs)
    # subtracted with another dither than the clients', the mean is farther off
    far = [
        np.abs(
            Federation(defending(name="sdq", secret=secret), defended("sdq", secret=5)).go()["w"].numpy() - MEAN
        ).max()
        for secret in (5, 6)
    ]
    assert far[0] < far[1]
    same = [Federation(defending(name="jopeq", seed=2), defended("jopeq", seed=2)).go()["w"].numpy() for _ in range(2)]
    assert np.array_equal(*same)
    other = Federation(defending(name="jopeq", seed=2), defended("jopeq", seed=2)).go(2)["w"].numpy()
    assert not np.array_equal(other, same[0])


def test_the_losses_that_the_server_learned_reach_the_clients():
    loss = iter([0.75, 0.5, math.nan])
    federation = Federation(defending(), defended("none", secret=5))
    federation.go(2, evaluate_fn=lambda number, arrays: MetricRecord({"loss": next(loss)}))
    assert [order["losses"] for order in federation.orders] == [[0.75]] * CLIENTS + [[0.75, 0.5]] * CLIENTS
    assert [order["counted"] for order in federation.orders] == [-1] * CLIENTS + [0] * CLIENTS
    strategy = defending()
    Federation(strategy, defended("none", secret=5)).go()
    evaluated = MetricRecord({"num-examples": 2, "loss": 0.25})
    strategy.aggregate_evaluate(
        1, [Message(RecordDict({"metrics": evaluated}), dst_node_id=1, message_type="evaluate")]
    )
    (first, *_) = strategy.configure_train(2, model(), ConfigRecord(), Grid())
    known = first.content["leakgauge"]["losses"]
    assert math.isnan(known[0])
    assert known[1] == 0.25


def array(data, dtype="uint8", shape=(3,)):
    return ArrayRecord({"leakgauge": Array(dtype, shape, "numpy.ndarray", data)})


HOSTILE = {
    "no arrays": {"arrays": None},
    "two records of arrays": {"more": ArrayRecord({"w": Array(np.zeros(2))})},
    "an array of another name": {"arrays": ArrayRecord({"w": Array(np.zeros(2, np.uint8))})},
    "floats": {"arrays": ArrayRecord({"leakgauge": Array(np.zeros(24, np.float32))})},
    "no bytes": {"arrays": array(b"")},
    "an archive": {"arrays": array(b"PK\x05\x06" + bytes(18))},
    "a pickle": {"arrays": array(b"\x80\x04K\x01.")},
    "another type of bytes": {"arrays": ArrayRecord({"leakgauge": Array("uint8", (3,), "pickle", b"abc")})},
    "a short message": {"arrays": ArrayRecord({"leakgauge": Array(np.zeros(9, np.uint8))})},
    "no metrics": {"metrics": None},
    "no weight": {"metrics": MetricRecord({"loss": 1.0})},
    "an infinite weight": {"metrics": MetricRecord({"num-examples": math.inf})},
    "a weight that is no number": {"metrics": MetricRecord({"num-examples": math.nan})},
    "a weight of zero": {"metrics": MetricRecord({"num-examples": 0})},
    "several weights": {"metrics": MetricRecord({"num-examples": [1, 2]})},
    "no number": {"leakgauge": None},
    "another client's number": {"leakgauge": ConfigRecord({"client": 2, "fault": ""})},
    "a number too high": {"leakgauge": ConfigRecord({"client": CLIENTS, "fault": ""})},
    "a text for a number": {"leakgauge": ConfigRecord({"client": "3", "fault": ""})},
    "a fault of many lines": {"leakgauge": ConfigRecord({"client": 3, "fault": "it\n::error::broke"})},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_reply_is_refused_in_one_line_and_the_others_count(what, tmp_path, caplog):
    def spoil(message, context, call_next):
        reply = call_next(message, context)
        if context.node_id == 103 and message.content["config"]["server-round"] == 2:
            for name, record in HOSTILE[what].items():
                if record is None:
                    del reply.content[name]
                else:
                    reply.content[name] = record
        return reply

    strategy = tap(defending(), tmp_path / "recording", FACTS)
    federation = Federation(strategy, spoil, defended("none", secret=5))
    with caplog.at_level(logging.WARNING, "flwr"):
        arrays = federation.go(2)
    # all four, then the first three
    np.testing.assert_allclose(arrays["w"].numpy(), MEAN + 2 * STEP.numpy(), rtol=1e-6)
    lines = [record.getMessage() for record in caplog.records if "does not count" in record.getMessage()]
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert "round 1, node 103" in lines[0] or "round 1, client 3" in lines[0]
    assert read(tmp_path / "recording").sent[1] in [(0, 1, 2), (0, 1, 2, 3)]


def test_mistakes_are_told_in_one_line(tmp_path):
    with pytest.raises(
        ValueError, match=r"dp-sgd requires LocalRule\(clip=.* of local training; train with this rule and pass"
    ):
        defended("dp-sgd")
    with pytest.raises(ValueError, match="of local training"):
        defended("none", local=LocalRule(clip=1.0))
    with pytest.raises(ValueError, match="expected a secret of the shared keys"):
        defending(secret=None)
    with pytest.raises(ValueError, match="expected each=False with ota: only the sum"):
        defending(name="ota", each=True)
    with pytest.raises(ValueError, match="defend it once, then tap"):
        defend(tap(strategy_of(), tmp_path / "a", FACTS), "none", facts=FACTS, sizes=[2], secret=1)
    with pytest.raises(ValueError, match="expected a strategy without a tap"):
        tap(tap(strategy_of(), tmp_path / "a", FACTS), tmp_path / "b", FACTS)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="expected an empty folder for a recording"):
        tap(strategy_of(), tmp_path / "c", FACTS)
    with pytest.raises(ValueError, match=r"expected facts\.sends='update'"):
        tap(strategy_of(), tmp_path / "d", FACTS._replace(sends="gradient", steps=1, epochs=None))
    few = defend(strategy_of(), "none", facts=FACTS._replace(participants=3), sizes=[2], secret=5)
    with pytest.raises(ValueError, match="expected 3 participants as in facts, got 4"):
        Federation(few, defended("none", secret=5)).go()
    with pytest.raises(ValueError, match="expected leakgauge-secret in the run's configuration"):
        Federation(defending(), defended("none")).go()
    with pytest.raises(ValueError, match=r"expected a strategy with leakgauge\.flower\.defend"):
        Federation(strategy_of(), defended("none", secret=5)).go()
