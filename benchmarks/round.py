"""Time of a whole federated training at default settings, compared with a plain loop that only trains; and memory.

There are ten clients with 600 MNIST images each (noise of the same shape if MNIST is missing), five local steps of 32,
the MLP of 203,530 weights, and 20 rounds. Our training encodes, decodes, computes the signal-to-noise ratio, evaluates
each round, and tests on 10,000 images at the end. The plain loop has one `nn.Module`, `optim.SGD`, and an average; it
evaluates nothing, and ends at the same model. Times are processor time on one thread, with runs in turns in one
process; the median ratio and its range are printed. The time of a defense's messages, measured alone, is subtracted
from the round.

`--clients` trains with this many clients, of which ten take part, with `top-k` and feedback, and prints the peak
memory.

    python benchmarks/round.py [FOLDER] [--defense gaussian] [--repeats 9]
    python benchmarks/round.py [FOLDER] --clients 10000 [--rounds 50]

The exit code is 1 if a bar is missed: at most 1.1 times the plain loop, and at most 1.2 GB.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import FederationSpec, PartSpec
from leakgauge.harness.core.contract import Defense, Examples, Sender
from leakgauge.harness.core.rng import Key
from leakgauge.harness.data import default_root, load
from leakgauge.harness.federation.loop import Keep, Training, make_plan, make_setting, train
from leakgauge.harness.federation.registry import build_defense
from leakgauge.harness.federation.round import Client, Round, client_key
from leakgauge.harness.learn.batch import Work, plan_batches, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.partition import Holdings, partition
from leakgauge.harness.learn.tasks import ModelTask

SPEC = FederationSpec(samples=6000, local_steps=5)
BAR, MEMORY = 1.1, 1.2
KEY = Key(0)


def data_of(folder: Path) -> tuple[Examples, Examples]:
    """60,000 images to train on and 10,000 to test on."""
    try:
        loaded = load("mnist", folder)
    except (LookupError, OSError, ValueError):
        print("MNIST is missing: using noise of the same shape")
        sets = [rng.uniform32(KEY.child("images", n), (n, 1, 28, 28)) for n in (60_000, 10_000)]
        train_set, test = (Examples(x, torch.arange(len(x)) % 10) for x in sets)
        return train_set, test
    return loaded.train, loaded.test


def plain(task: ModelTask, data: Examples, clients: Holdings) -> Tensor:
    """The textbook loop on the same batches; returns the flat final model."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    plan = make_plan(SPEC, SPEC.lr)
    start = task.layout.split(task.init(KEY.child("init")))
    model = dict(zip(net.state_dict(), start, strict=True))
    for number in range(SPEC.rounds):
        total = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        for client, rows in clients.rows.items():
            net.load_state_dict(model)
            optimizer = torch.optim.SGD(net.parameters(), lr=SPEC.lr)
            for index in plan_batches(len(rows), plan, client_key(KEY, number, client).child("train")):
                here = torch.from_numpy(rows[index])
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(data.x[here]), data.y[here]).backward()
                optimizer.step()
            for name, tensor in net.state_dict().items():
                total[name].add_(tensor, alpha=1 / len(clients))
        model = total
    return task.layout.join(list(model.values()))


def own_work(task: ModelTask, defense: Defense[Any, Any], clients: Holdings) -> Callable[[], object]:
    """The defense's own work in a training: making and decoding its messages."""
    setting = make_setting(task, SPEC, clients, defense.local)
    plan = make_plan(SPEC, SPEC.lr, defense.local, defense.step_noise(setting))
    work = [Work(clients.data, KEY.child(k), rows) for k, rows in clients.rows.items()]
    updates = train_clients(task, task.init(KEY), work, plan, "dense").updates
    here = Round(defense, setting, defense.init(setting))
    pairs = zip(clients.rows, updates, strict=True)
    sending = [Client.of(Sender(k, 600), u, defense.remember(setting), KEY.child(k)) for k, u in pairs]

    def messages() -> None:
        for _ in range(SPEC.rounds):
            here.collect(sending, KEY.child("channel"), KEY.child("server"))

    return messages


def seconds(work: Callable[[], object]) -> float:
    """Processor seconds of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(task: ModelTask, folder: Path, name: str, repeats: int) -> bool:
    """Print the table; return whether the bar holds for no defense and for this defense."""
    data, test = data_of(folder)
    clients = Holdings(data, dict(enumerate(partition(SPEC, data.y, KEY.child("partition")))))
    defenses = {one: build_defense(PartSpec(one)) for one in ("none", name)}

    def ours(defense: Defense[Any, Any]) -> Training:
        return train(task, SPEC, defense, clients, test, KEY, engine="dense", keep=Keep())

    apart = (ours(defenses["none"]).final - plain(task, data, clients)).abs().max()
    print(f"largest difference of the two models: {float(apart):.1e}")
    assert apart < 1e-3, "expected both trainings to end at the same model"
    alone = {one: own_work(task, defense, clients) for one, defense in defenses.items()}
    ratios: dict[str, list[float]] = {one: [] for one in (*defenses, f"{name} without its messages")}
    for _ in range(repeats):
        base = seconds(lambda: plain(task, data, clients))
        taken = {one: seconds(lambda defense=defense: ours(defense)) for one, defense in defenses.items()}
        own = seconds(alone[name]) - seconds(alone["none"])
        for one in defenses:
            ratios[one].append(taken[one] / base)
        ratios[f"{name} without its messages"].append((taken[name] - own) / base)
    for one, found in ratios.items():
        print(f"{one:<32} {statistics.median(found):5.2f} of the plain loop ({min(found):.2f} to {max(found):.2f})")
    judged = [found for one, found in ratios.items() if one != name or name == "none"]
    return all(statistics.median(found) <= BAR for found in judged)


def remember(task: ModelTask, folder: Path, count: int, rounds: int) -> bool:
    """Print the peak memory of a training with residuals; return whether the bar holds."""
    data, test = data_of(folder)
    spec = FederationSpec(clients=count, participants=10, rounds=rounds, local_steps=5)
    clients = Holdings(data, dict(enumerate(partition(spec, data.y, KEY.child("partition")))))
    defense = build_defense(PartSpec("top-k", {"fraction": 0.01, "feedback": True}))
    before = most()
    train(task, spec, defense, clients, test, KEY, engine="dense", keep=Keep())
    print(f"{count} clients, {rounds} rounds of 10: {most():.2f} GB at most, {before:.2f} GB before the training")
    return most() <= MEMORY


def most() -> float:
    """The largest resident memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    """Print ratios or memory; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=default_root())
    parser.add_argument("--defense", default="gaussian")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--rounds", type=int, default=50)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task = ModelTask(build("mlp", (1, 28, 28), 10))
    if given.clients is None:
        holds = compare(task, given.folder, given.defense, given.repeats)
    else:
        holds = remember(task, given.folder, given.clients, given.rounds)
    print("the bar holds" if holds else "the bar is missed")
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
