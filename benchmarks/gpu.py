"""Training, attacks, likelihoods, limits and audits on a GPU compared with one core of its host.

    python benchmarks/gpu.py [--only NAME ...] [--json FILE]    # measure; FILE gets the rows
    python benchmarks/gpu.py --pages FILE                       # write the table of docs/performance.md from FILE

Both devices run in turns in one process, with wall-clock seconds up to the copy of the results to the CPU. A result has
a row for each client, image, message, model or audit. `difference` is the largest difference in a row between the
results of the two devices, as a share of the largest number on the CPU: the median over the rows, and `largest`, the
largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _victims import observed, photographs
from matching import Mapped
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.matching import SquaredDistance, evaluator
from leakgauge.attacks._members.shadowing import halves, train_shadows
from leakgauge.harness.audit import standalone
from leakgauge.harness.audit.limit import limits
from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import Scalar
from leakgauge.harness.core.contract import Examples, Links, Sender, Setting, likelihood_of
from leakgauge.harness.core.device import Placed, moved
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.batch import Engine, LocalPlan, Work, choose_engine, train_clients
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.attack import joined

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- made by benchmarks/gpu.py -->\n", "<!-- end of the GPU -->"
FEWEST, SECONDS = 3, 1.0
"""Least pairs of runs of a row, and its measuring time; rows that take longer have two pairs."""

AT_ONCE = 32
"""Images of a search on the GPU; a search on the CPU has 8."""

BEHIND: dict[str, dict[str, Scalar]] = {
    "none": {},
    "gaussian": {"clip": 1000.0, "noise_std": 0.01},
    "laplace": {"noise_std": 0.01},
    "jopeq": {},
    "sdq": {},
    "sqsgd": {},
}
"""Defenses of cells that share a batch."""

PLAN = LocalPlan(gradient=False, steps=5, epochs=None, batch=32, lr=0.1, momentum=0.9)


class Run(NamedTuple):
    """One run of a case, and how many units of work it does."""

    go: Callable[[], Tensor]
    amount: int = 1


@dataclass(frozen=True)
class Row:
    """A measured row: seconds of one run, the ratio CPU over GPU, the differences, and the memory of the GPU."""

    cpu: float
    gpu: float
    ratio: float
    quartiles: tuple[float, float]
    pairs: int
    difference: float
    worst: float
    peak_mb: float


def local(name: str, shape: tuple[int, ...], clients: int, engine: Engine | None, device: str) -> Run:
    """One round's local training of all clients; engine None: the one that the package chooses."""
    task = ModelTask(build(name, shape, 10))
    data = Examples(rng.normal(Key(2), (10_000, *shape)), torch.arange(10_000) % 10).on(device)
    work = [Work(data, Key(1).child(k), rng.subset(Key(3).child(k), 10_000, 200)) for k in range(clients)]
    chosen = choose_engine(task, device) if engine is None or device == "cpu" else engine
    params = task.init(Key(0)).to(device)
    return Run(lambda: train_clients(task, params, work, PLAN, chosen).updates)


def matching(name: str, count: int, kind: type[ModelTask], device: str) -> Run:
    """One gradient-matching evaluation of `count` images of 3 x 32 x 32: all slopes; `Mapped` on a GPU: by `vmap`."""
    kind = ModelTask if device == "cpu" else kind
    task = kind(build(name, (3, 32, 32), 10), "dlg" if name == "lenet-dlg" else "default")
    params = task.init(Key(0))
    x, other = (rng.uniform(Key(i), (count, 1, 3, 32, 32)) for i in (1, 2))
    y = one_hot(torch.arange(count)[:, None] % 10, 10).float()
    parts = zip(torch.split(other, 32), torch.split(y, 32), strict=True)
    targets = torch.cat([gradients(task, params, *part) for part in parts])
    there = partial(moved, device=device)
    function = evaluator(task, there(params), SquaredDistance(there(targets)), images=1, labels=there(y))
    candidates, instances = there(x.flatten(1)), there(torch.arange(count))
    return Run(lambda: function(candidates, instances).gradient)


def search(attack: str, name: str, more: dict[str, Scalar], device: str) -> Run:
    """An attack with 200 evaluations behind the LeNet of DLG and a defense: the guesses of the first 8 photographs.

    The CPU attacks 8 photographs, because more at once do not make it faster, and the GPU attacks `AT_ONCE`.
    """
    victims = photographs(AT_ONCE, 100, Key(3))
    noise: dict[str, Scalar] = {} if name == "none" else {"noise_std": 0.01}
    noise |= {"clip": 1000.0} if name == "gaussian" else {}
    seen = replace(observed(victims, registry.build("defense", name, noise), Key(4)), device=device)
    count = 8 if device == "cpu" else AT_ONCE
    seen, made = seen.of(range(count)), registry.build("attack", attack, {"evaluations": 200} | more)
    return Run(lambda: torch.stack([guess.x for guess in made.run(seen, Key(5)).guesses[:8]]), count)


def cells(attack: str, more: dict[str, Scalar], device: str) -> Run:
    """An attack with 200 evaluations on 8 photographs behind each of `BEHIND`: a GPU takes all cells in one batch."""
    victims, made = photographs(8, 100, Key(3)), registry.build("attack", attack, {"evaluations": 200} | more)
    behind = [observed(victims, registry.build("defense", name, options), Key(4)) for name, options in BEHIND.items()]
    seens = [replace(seen, device=device) for seen in behind]
    batches = seens if device == "cpu" else [joined(seens)]

    def go() -> Tensor:
        return torch.stack([guess.x for seen in batches for guess in made.run(seen, Key(5)).guesses])

    return Run(go, 8 * len(seens))


def likelihood(name: str, dim: int, device: str) -> Run:
    """The value and the slope of a defense's likelihood of 8 messages: the slopes."""
    setting = Setting(Layout(("w",), ((dim,),)), 8, 8, 1, sends="gradient", steps=1, lr=0.1, batch=8, samples=8)
    defense = registry.build("defense", name, {})
    here = Round(defense, setting, defense.init(setting))
    updates = 0.01 * rng.normal(Key(1), (8, dim))
    clients = [
        Client.of(Sender(k, 8), row, defense.remember(setting), Key(2).child(k)) for k, row in enumerate(updates)
    ]
    received = here.exchange(clients, Key(3)).received
    links = Links(setting, [one.sender for one in clients], [one.shared for one in clients])
    score = Placed(likelihood_of(defense, here.state, received, links), torch.device(device))
    x = moved(0.5 * updates, device).requires_grad_()
    return Run(lambda: torch.autograd.grad(score(x).sum(), x)[0])


def shadows(name: str, runs: int, device: str) -> Run:
    """Shadow federations of two clients and two passes: the models."""
    task = ModelTask(build(name, (1, 28, 28), 10))
    pool = Examples(rng.normal(Key(1), (1000, 1, 28, 28)), torch.arange(1000) % 10).on(device)
    setting, plan = (
        Setting(task.layout, 2, 2, 1, "update", 10, 0.05, 50, 250, 0.9),
        LocalPlan(False, None, 2, 50, 0.05, 0.9),
    )
    return Run(lambda: train_shadows(task, setting, plan, pool, halves(Key(2), runs, 1000, 500), Key(3)))


def limit(name: str, device: str) -> Run:
    """The limit of one photograph behind a model and normal noise: the errors."""
    victims = photographs(1, 10, Key(3))
    victims = victims._replace(task=ModelTask(build(name, (3, 32, 32), 10)))
    victims = victims._replace(params=victims.task.init(Key(1)))
    seen = observed(victims, registry.build("defense", "gaussian", {"clip": 1000.0, "noise_std": 0.01}), Key(4))
    seen = replace(seen, device=device)
    truth = [Examples(victims.x, victims.y)]
    return Run(lambda: torch.from_numpy(limits(seen, truth, Key(5))[0].error)[:, None])


def audit(name: str, rounds: int | None, by: str, device: str) -> Run:
    """A whole audit of a defense at its defaults: its bound."""
    return Run(lambda: bound(standalone.audit(name, {}, {}, rounds, by=by, seed=0, device=device)))


def bound(found: dict[str, Any]) -> Tensor:
    """The bound of an audit, as a row."""
    return torch.tensor([[found["audited"]["epsilon_lower"]]])


def norms() -> str:
    """How many of 100 updates have the same norm on both devices: the norm of a clip decides the bytes of a message."""
    rows = rng.normal(Key(1), (100, 203_530))
    here, there = (torch.linalg.vector_norm(moved(rows, device), dim=1).cpu() for device in ("cpu", "cuda"))
    equal = int((here == there).sum())
    return f"{equal} of 100 updates of 203,530 entries have the same float32 norm on both devices."


DIGIT, PHOTO = (1, 28, 28), (3, 32, 32)
CASES: dict[str, Callable[[str], Run]] = {
    "local steps, mlp, 10 clients": partial(local, "mlp", DIGIT, 10, None),
    "local steps, mlp, 10 clients, vmap": partial(local, "mlp", DIGIT, 10, "vmap"),
    "local steps, mlp, 200 clients": partial(local, "mlp", DIGIT, 200, None),
    "local steps, cnn2, 10 clients": partial(local, "cnn2", DIGIT, 10, None),
    "local steps, cnn2, 200 clients": partial(local, "cnn2", DIGIT, 200, None),
    "local steps, resnet20, 10 clients": partial(local, "resnet20", PHOTO, 10, None),
    **{
        f"matching, {name}, {count} at once": partial(matching, name, count, ModelTask)
        for name, counts in {"lenet-dlg": (8, 256), "mlp": (8,), "cnn2": (8, 256), "resnet20": (8,)}.items()
        for count in counts
    },
    "matching, lenet-dlg, 8 at once, vmap": partial(matching, "lenet-dlg", 8, Mapped),
    "matching, lenet-dlg, 256 at once, vmap": partial(matching, "lenet-dlg", 256, Mapped),
    "matching, mlp, 8 at once, vmap": partial(matching, "mlp", 8, Mapped),
    "matching, resnet20, 8 at once, vmap": partial(matching, "resnet20", 8, Mapped),
    "search, idlg, none": partial(search, "idlg", "none", {}),
    "search, map, gaussian": partial(search, "map", "gaussian", {}),
    "search, map without the closed form, gaussian": partial(search, "map", "gaussian", {"solve": False}),
    "search, map without the closed form, laplace": partial(search, "map", "laplace", {"solve": False}),
    "cells, idlg, 6 defenses": partial(cells, "idlg", {}),
    "cells, map without the closed form, 6 defenses": partial(cells, "map", {"solve": False}),
    **{
        f"likelihood, {name}, 203,530 entries": partial(likelihood, name, 203_530)
        for name in ("gaussian", "laplace", "jopeq", "sdq", "cepam-gaussian", "sqsgd", "piecewise", "ota")
    },
    "shadow models, mlp-small, 64 runs": partial(shadows, "mlp-small", 64),
    "shadow models, cnn2, 64 runs": partial(shadows, "cnn2", 64),
    "limit, lenet-dlg, 3x32x32": partial(limit, "lenet-dlg"),
    "limit, cnn2, 3x32x32": partial(limit, "cnn2"),
    "audit, trials, gaussian": partial(audit, "gaussian", None, "trials"),
    "audit, trials, dp-sgd, 3 rounds": partial(audit, "dp-sgd", 3, "trials"),
    "audit, messages, jopeq": partial(audit, "jopeq", 50, "messages"),
}


def measured(make: Callable[[str], Run]) -> Row:
    """Run a case on both devices in turns; seconds are those of a unit of work."""
    runs = make("cpu"), make("cuda")
    torch.cuda.reset_peak_memory_stats()
    here, there = (run.go().detach().cpu().double().flatten(1) for run in runs)
    off = (there - here).abs().amax(1) / here.abs().max()
    taken: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(taken[1]) < (2 if sum(taken[0][:1]) > SECONDS else FEWEST):
        for run, seconds in zip(runs, taken, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run.go().detach().cpu()
            seconds.append((time.perf_counter() - start) / run.amount)
    ratios = [cpu / gpu for cpu, gpu in zip(*taken, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    cpu, gpu = map(statistics.median, taken)
    peak = torch.cuda.max_memory_allocated() / 1e6
    return Row(cpu, gpu, middle, (low, high), len(ratios), float(off.median()), float(off.max()), peak)


def table(data: Mapping[str, Any]) -> str:
    """The table of the page."""
    lines = [
        f"`{data['command']}` on {data['machine']}, with one thread of its host.\n",
        "| | CPU ms | GPU ms | CPU / GPU | quartiles | difference | largest | peak MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, fields in data["rows"].items():
        row = Row(**fields)
        low, high = row.quartiles
        lines.append(
            f"| {name} | {1e3 * row.cpu:.3g} | {1e3 * row.gpu:.3g} | {row.ratio:.3g} | {low:.3g} to {high:.3g} | "
            f"{row.difference:.0e} | {row.worst:.0e} | {row.peak_mb:,.0f} |"
        )
    return "\n".join([*lines, f"\n{data['norms']}"])


def pages(source: Path) -> None:
    """Write the table of docs/performance.md."""
    from bench import between

    page = ROOT / "docs" / "performance.md"
    page.write_text(between(page.read_text(), table(json.loads(source.read_text())), BEGIN, END))


def main(arguments: Sequence[str]) -> int:
    """Measure and print the rows; return 1 without a GPU."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure the rows whose name begins with NAME")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--pages", type=Path, metavar="FILE", help="write the table of the page from this file")
    given = parser.parse_args(arguments)
    if given.pages:
        pages(given.pages)
        return 0
    if not torch.cuda.is_available():
        print("expected a CUDA device, got none")
        return 1
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    data: dict[str, Any] = {"command": "python benchmarks/gpu.py", "machine": machine, "norms": norms(), "rows": {}}
    print(data["norms"])
    for name, make in CASES.items():
        if given.only and not name.startswith(tuple(given.only)):
            continue
        row = measured(make)
        data["rows"][name] = asdict(row)
        print(
            f"{name:<42} {1e3 * row.cpu:9.2f} ms {1e3 * row.gpu:9.2f} ms {row.ratio:8.3g} "
            f"difference {row.difference:.0e}, largest {row.worst:.0e}, {row.peak_mb:,.0f} MB",
            flush=True,
        )
        if given.json:
            given.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
