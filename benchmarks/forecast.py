"""Forecast costs that cannot be measured here: many cells, many clients and large models, from small sizes.

    python benchmarks/forecast.py    # measure, print the tables

Each cost is a line through two small sizes: a fixed cost and a cost per unit. One larger size is actually run, and the
error of its forecast is printed. `make bench` writes the constants into bench.json and the tables into docs/scale.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from _cells import equal  # noqa: E402
from _measure import MEMORY, Machine, Row, in_child, measure_machine, peak_of  # noqa: E402
from rows import encoders  # noqa: E402

from leakgauge.harness.core import rng  # noqa: E402
from leakgauge.harness.core.cell import FederationSpec  # noqa: E402
from leakgauge.harness.core.contract import Examples  # noqa: E402
from leakgauge.harness.core.rng import Key  # noqa: E402
from leakgauge.harness.core.vec import Layout  # noqa: E402
from leakgauge.harness.federation import registry  # noqa: E402
from leakgauge.harness.federation.loop import Keep, train  # noqa: E402
from leakgauge.harness.learn.batch import choose_engine  # noqa: E402
from leakgauge.harness.learn.models import build  # noqa: E402
from leakgauge.harness.learn.tasks import ModelTask  # noqa: E402
from leakgauge.harness.study.run import run_study  # noqa: E402
from leakgauge.harness.study.store import load_run  # noqa: E402
from leakgauge.reports.html import render  # noqa: E402

CELLS, MANY_CELLS = (100, 400), 2000
CLIENTS, MANY_CLIENTS, TURNS, REPEATED = (10_000, 40_000), 100_000, 100, 40
CODED, MANY_NUMBERS = ("none", "gaussian", "jopeq", "top-k"), 40_000_000
RESNET18 = 11_689_512
TRAINED, ROUNDS, BATCH, STEPS = ("none", "top-k"), 100, 32, 5


class Price(NamedTuple):
    """A linear cost: the fixed cost, and the cost of each unit."""

    start: float
    each: float

    @classmethod
    def through(cls, sizes: tuple[int, int], found: tuple[float, float]) -> Price:
        """The line through two sizes; no part of the cost is negative."""
        each = max(0.0, (found[1] - found[0]) / (sizes[1] - sizes[0]))
        return cls(max(0.0, found[0] - each * sizes[0]), each)

    def of(self, size: float) -> float:
        """The cost of a size."""
        return self.start + self.each * size


def cells(count: int) -> dict[str, float]:
    """The cost of `count` empty cells, run and reported: processor seconds, bytes on disk and page, MB."""
    found: dict[str, float] = {}

    def go() -> None:
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            start = time.process_time()
            run_study(equal(count, 0.0), Path(folder), workers=0)
            middle = time.process_time()
            page = render(load_run(folder))
            found["run s"], found["report s"] = middle - start, time.process_time() - middle
            found["page bytes"] = len(page.encode())
            found["disk bytes"] = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())

    found["MB"] = peak_of(go)
    return found


def federation(name: str, clients: int) -> dict[str, float]:
    """A training with 100 participants of `clients`: processor seconds before the first round, of a round, and MB."""
    task = ModelTask(build("linear", (1, 8, 8), 10))
    x, y = rng.uniform32(Key(0), (clients, 1, 8, 8)), torch.arange(clients) % 10
    data = {number: Examples(x[number : number + 1], y[number : number + 1]) for number in range(clients)}
    test, defense = (
        Examples(x[:100], y[:100]),
        registry.build("defense", name, {"feedback": True} if name == "top-k" else {}),
    )

    def go(rounds: int) -> float:
        spec = FederationSpec(clients=clients, participants=TURNS, rounds=rounds, local_steps=1)
        start = time.process_time()
        train(task, spec, defense, data, test, Key(1), engine=choose_engine(task), keep=Keep())
        return time.process_time() - start

    go(1)
    taken: list[float] = []
    megabytes = peak_of(lambda: taken.append(go(1)))
    each = max(0.0, (go(1 + REPEATED) - taken[0]) / REPEATED)  # many, because the start takes seconds
    return {"start s": max(0.0, taken[0] - each), "round s": each, "MB": megabytes}


def message(name: str, dim: int) -> dict[str, float]:
    """The cost of one message of `dim` numbers: processor seconds and MB."""
    ours = encoders.work(name, {}, Layout(("w",), ((dim,),))).ours
    megabytes, start = peak_of(ours), time.process_time()
    ours()
    return {"s": time.process_time() - start, "MB": megabytes}


Measured = dict[str, dict[str, Any]]


def measure() -> dict[str, Measured]:
    """Measured costs by what grows and by size; the last size of each is for the check."""
    found: dict[str, Measured] = {}

    def add(what: str, size: int, function: Callable[[int], dict[str, float]]) -> None:
        found.setdefault(what, {})[str(size)] = in_child(partial(function, size))
        print(what, size, found[what][str(size)], flush=True)

    for size in (*CELLS, MANY_CELLS):
        add("cells", size, cells)
    for name in TRAINED:
        for size in (*CLIENTS, MANY_CLIENTS):
            add(f"clients, {name}", size, partial(federation, name))
    for name in CODED:
        for size in (RESNET18 // 4, RESNET18, MANY_NUMBERS):
            add(f"numbers, {name}", size, partial(message, name))
    return found


def prices(measured: Measured) -> dict[str, Price]:
    """The line of each cost through the two smaller sizes."""
    (one, two), *_ = [tuple(measured)[:2]]
    first, second = measured[one], measured[two]
    return {key: Price.through((int(one), int(two)), (first[key], second[key])) for key in first}


def checks(scale: Mapping[str, Measured]) -> list[str]:
    """The forecast for each largest size, with the measured value."""
    lines = ["| size | cost | forecast | measured | error |", "|---|---|---|---|---|"]
    for what, measured in scale.items():
        size = tuple(measured)[-1]
        kind, _, of = what.partition(", ")
        for key, price in prices(measured).items():
            guess, real = price.of(int(size)), measured[size][key]
            error = f"{guess / real - 1:+.0%}" if real else ""
            name = f"{int(size):,} {kind}" + (f", `{of}`" if of else "")
            lines.append(f"| {name} | {key} | {guess:.3g} | {real:.3g} | {error} |")
    return lines


def span(seconds: float) -> str:
    """A duration in words."""
    for unit, length in (("days", 86_400.0), ("hours", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def many_cells(measured: Measured) -> list[str]:
    """10^4 and 10^6 cells: the cost of the harness, and the time of trainings and attacks at 10 s per cell."""
    price = prices(measured)
    lines = ["| cells | harness | report | on the disk | page | memory | 10 s a cell, 2 cores | 1,000 cores |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for count in (10_000, 1_000_000):
        run, report = (span(price[key].of(count)) for key in ("run s", "report s"))
        disk, page = (f"{price[key].of(count) / 1e6:,.0f} MB" for key in ("disk bytes", "page bytes"))
        cores = " | ".join(span(10 * count / one) for one in (2, 1000))
        lines.append(f"| {count:,} | {run} | {report} | {disk} | {page} | {price['MB'].of(count):,.0f} MB | {cores} |")
    return lines


def many_clients(scale: Mapping[str, Measured]) -> list[str]:
    """10^6 clients with 100 participants, of a linear model with 650 weights."""
    lines = ["| defense | before the first round | 100 rounds | memory |", "|---|---|---|---|"]
    for what, measured in scale.items():
        if what.startswith("clients"):
            price = prices(measured)
            start, each = price["start s"].of(1e6), price["round s"].of(1e6)
            cells = f"{span(start)} | {span(ROUNDS * each)} | {price['MB'].of(1e6):,.0f} MB"
            lines.append(f"| `{what.partition(', ')[2]}` | {cells} |")
    return lines


def many_numbers(scale: Mapping[str, Measured], rows: Mapping[str, Row], machine: Machine) -> list[str]:
    """10^8 parameters: a client's steps at the rate of a product of matrices, its message, and the memory of both."""
    dim = 1e8
    steps = 6 * dim * BATCH * STEPS / machine.flops_per_s
    lines = ["| 10^8 parameters | seconds | memory |", "|---|---|---|"]
    note = f"{STEPS} local steps of {BATCH}, dense layers, at the rate of a product"
    lines.append(f"| {note} | {steps:.3g} | {4 * 4 * dim / 1e9:.2g} GB |")
    for what, measured in scale.items():
        if what.startswith("numbers"):
            price = prices(measured)
            name = what.partition(", ")[2]
            lines.append(f"| message, `{name}` | {price['s'].of(dim):.2g} | {price['MB'].of(dim) / 1e3:.2g} GB |")
    known = {what.partition(", ")[2] for what in scale}
    for title, row in rows.items():
        name = title.removeprefix("message of ResNet-18, ")
        if name != title and name not in known:
            times = dim / row.amount
            lines.append(
                f"| message, `{name}`, as ResNet-18 | {times * row.seconds:.2g} | {times * row.peak_mb / 1e3:.2g} GB |"
            )
    lines.append(f"| updates of {TURNS} participants, held at once | | {4 * TURNS * dim / 1e9:.2g} GB |")
    return lines


def tables(data: Mapping[str, Any]) -> str:
    """The tables of docs/scale.md."""
    scale, machine = data["scale"], Machine(**data["rates"])
    rows = {name: Row.of(row) for name, row in data["rows"].items()}
    parts = [f"At commit {data['commits']['scale']}, on {data['machine']}; processor time of one core."]
    parts += ["\n## Many cells\n", *many_cells(scale["cells"])]
    parts += ["\n## A million clients\n", *many_clients(scale)]
    parts += ["\n## Large models\n", *many_numbers(scale, rows, machine)]
    return "\n".join([*parts, "\n## How good the forecasts are\n", *checks(scale)])


def main() -> None:
    """Measure, and print the tables."""
    torch.set_num_threads(1)
    rates = vars(measure_machine())
    data = {
        "scale": json.loads(json.dumps(measure())),
        "rates": rates,
        "rows": {},
        "commits": {"scale": ""},
        "machine": "",
    }
    print(tables(data))


if __name__ == "__main__":
    main()
