"""A federated round compared with Flower's simulation, in a separate environment for Flower (see `.ci/flower`).

    python benchmarks/rows/flower.py    # in that environment: prints the seconds of each round, both sides, as JSON

Both sides train the same clients for the same number of steps on the same data. Flower's clients run the plain loop.
Flower's rounds and ours take turns in one process; Ray's actors are idle during our rounds. The first rounds, which
start the actors, are left out.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _measure import Row, Rows, Skipped, Work

ROOT = Path(__file__).parents[2]
ROUNDS, FIRST = 12, 3
VENVS = (os.environ.get("FLOWER_VENV", ""), ".venv-flower", "~/.cache/leakgauge/venv-flower")


def row(name: str) -> Row:
    """The row, measured in Flower's environment.

    Raises:
        Skipped: the environment is missing, or the simulation failed.
    """
    places = [Path(one).expanduser() / "bin" / "python" for one in VENVS if one]
    python = next((place for place in places if place.exists()), None)
    if python is None:
        raise Skipped("expected Flower's environment, got none; run .ci/flower to create it")
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks")))
    environment = {**os.environ, "PYTHONPATH": paths, "FLWR_TELEMETRY_ENABLED": "0"}
    command = [str(python), "-W", "ignore", __file__, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"ours"')]
    if done.returncode or not lines:
        why = (done.stderr.strip().splitlines() or ["no times were printed"])[-1]
        raise Skipped(f"Flower's simulation failed: {why[:200]}")
    found = json.loads(lines[0])
    work = Work(
        _no, _no, "Flower's simulation", 1, "round", note=f"flwr {found['version']}, 2 actors of Ray; wall time"
    )
    return Row.paired(work, (found["ours"], found["base"]))


def _no() -> None:
    """Do nothing, because the row is measured elsewhere."""


def main(name: str) -> None:
    """Run Flower's simulation, with one of our rounds before each of its rounds."""
    import flwr
    import torch
    from flwr.app import Message, MetricRecord, RecordDict
    from rows.training import CLIENTS, PLAIN, PLAN, SAMPLES, clients, step_by_step
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    from leakgauge.defenses.none import NoDefense
    from leakgauge.harness.core.cell import FederationSpec
    from leakgauge.harness.core.contract import Examples
    from leakgauge.harness.core.rng import Key
    from leakgauge.harness.federation.loop import Keep, train
    from leakgauge.harness.learn.batch import choose_engine
    from leakgauge.harness.learn.models import build
    from leakgauge.harness.learn.tasks import ModelTask
    from tests.flower.simulated import InOrder, app_of, as_record, as_vector, simulate

    torch.set_num_threads(1)
    task = ModelTask(build(name, (1, 28, 28), 10))

    def local(message: Message, context: Any) -> Message:
        turn, net = clients(CLIENTS, SAMPLES)[int(context.node_config["partition-id"])], PLAIN[name]()
        vector_to_parameters(as_vector(task, message.content["arrays"]), net.parameters())
        step_by_step(net, turn.data, turn.key, PLAN)
        arrays = as_record(task, parameters_to_vector(net.parameters()).detach())
        metrics = MetricRecord({"num-examples": SAMPLES})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    data = {number: turn.data for number, turn in enumerate(clients(CLIENTS, SAMPLES))}
    test = Examples(*(part[:1] for part in data[0]))
    spec = FederationSpec(clients=CLIENTS, rounds=1, local_steps=PLAN.steps, lr=PLAN.lr, momentum=PLAN.momentum)
    taken: dict[str, list[float]] = {"ours": [], "base": []}

    class Timed(InOrder):
        """FedAvg that times its rounds."""

        def configure_train(self, server_round: int, *given: Any) -> Any:
            start = time.perf_counter()
            train(task, spec, NoDefense(), data, test, Key(0), engine=choose_engine(task), keep=Keep())
            self.began = time.perf_counter()
            taken["ours"].append(self.began - start)
            return super().configure_train(server_round, *given)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            assert all(reply.has_content() for reply in replies), "a client of Flower failed"
            found = super().aggregate_train(server_round, replies)
            taken["base"].append(time.perf_counter() - self.began)
            return found

    def run(grid: Any) -> None:
        Timed(CLIENTS).start(grid=grid, initial_arrays=as_record(task, task.init(Key(0))), num_rounds=ROUNDS)

    simulate(run, app_of([], local), CLIENTS)
    print(json.dumps({**{side: seconds[FIRST:] for side, seconds in taken.items()}, "version": flwr.__version__}))


def rows(quick: bool) -> Rows:
    """A round of the MLP and of the CNN; the quick table has no such row."""
    return {} if quick else {f"round, {name}, Flower": functools.partial(row, name) for name in ("mlp", "cnn2")}


if __name__ == "__main__":
    main(sys.argv[1])
