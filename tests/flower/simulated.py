"""Flower's simulation in this process, and an app whose clients train as ours do, with the same keys."""

import functools
import os
import warnings

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from leakgauge.harness import data
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import make_plan, make_setting
from leakgauge.harness.federation.round import client_key
from leakgauge.harness.learn import models
from leakgauge.harness.learn.batch import Work, choose_engine, train_clients
from leakgauge.harness.learn.partition import partition
from leakgauge.harness.learn.tasks import ModelTask

SEED = 3
BATCHES = FederationSpec(clients=4, rounds=2, local_steps=3, batch=8, lr=0.1, samples=120, test_samples=60)
WHOLE = FederationSpec(clients=4, rounds=2, local_steps=2, batch=0, lr=0.1, samples=4, test_samples=60)
"""One record each, in every step: a recording knows which records are behind a message, and in which order."""

SPECS = {"batches": BATCHES, "whole": WHOLE}
DEFENSES = {
    "none": {},
    "gaussian": {"noise_std": 0.01},
    "jopeq": {},
    "ota": {},
    "top-k": {"fraction": 0.2, "feedback": True},
    "laplace+sdq": {},
    "udp-crd": {},  # whose noise is in local training, and which ends a training by the losses
}
BACKEND = {
    "init_args": {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"},
    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
}


def simulate(main, client, supernodes):
    """Run an app: `main(grid)` on the server."""
    server = ServerApp()

    @server.main()
    def start(grid, context):
        main(grid)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray
        run_simulation(server, client, supernodes, backend_config=BACKEND)


def metrics_of(reply):
    """Of clients that have different ones."""
    return str(list(reply.content.metric_records.values())) if reply.has_content() else ""


class InOrder(FedAvg):
    """FedAvg of all nodes, whose sums do not depend on who answers first."""

    def __init__(self, clients):
        super().__init__(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        self.min_evaluate_nodes = 0

    def aggregate_train(self, server_round, replies):
        return super().aggregate_train(server_round, sorted(replies, key=metrics_of))


@functools.cache
def world(spec):
    """The task, each client's data, and the test set of our own loop, as `prepare` makes them."""
    torch.set_num_threads(1)
    loaded = data.load("digits", None)
    task = ModelTask(models.build("mlp-small", loaded.input_shape, len(loaded.classes)))
    x, y = loaded.train
    rows = dict(enumerate(partition(spec, y, Key(SEED).child("training", "partition"))))
    return task, {k: Examples(x[own], y[own]) for k, own in rows.items()}, loaded, rows


def as_record(task, params):
    """A flat vector as the arrays of a model."""
    return ArrayRecord(dict(zip(task.layout.names, task.layout.split(params.clone()), strict=True)))


def as_vector(task, record):
    """The arrays of a model as a flat vector."""
    return task.layout.join([torch.from_numpy(record[name].numpy().copy()) for name in task.layout.names])


def moved(params, update):
    """The parameters after local training, whose difference from `params` is `update`, bit for bit."""
    found = params + update
    for toward in (torch.inf, -torch.inf, -torch.inf):
        off = found - params != update
        found = torch.where(off, torch.nextafter(found, torch.full_like(found, toward)), found)
    assert torch.equal(found - params, update)
    return found


def train_as_ours(message, context):
    """Local training by `train_clients`, under the keys of our loop."""
    config, client = message.content["config"], context.node_config["partition-id"]
    spec, number = SPECS[config["spec"]], config["server-round"] - 1
    task, clients = world(spec)[:2]
    defense = registry.build("defense", config["defense"], DEFENSES[config["defense"]])
    noise = defense.step_noise(make_setting(task, spec, clients, defense.local))
    # all clients side by side, as in our loop: the sums of a batched product may depend on their number
    keys = {k: client_key(Key(SEED).child("training"), number, k).child("train") for k in clients}
    work = [Work(clients[k], key) for k, key in keys.items()]
    params, plan = as_vector(task, message.content["arrays"]), make_plan(spec, spec.lr, defense.local, noise)
    updates, _ = train_clients(task, params, work, plan, choose_engine(task))
    arrays = as_record(task, moved(params, updates[client]))
    metrics = MetricRecord({"num-examples": len(clients[client].y), "client": client})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def app_of(mods, train=train_as_ours):
    """A ClientApp with these mods around its training."""
    client = ClientApp(mods=mods)
    client.train()(train)
    return client
