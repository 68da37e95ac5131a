"""Measure all performance-critical code in one table: `make bench`.

    python benchmarks/bench.py                     # measure all rows; write bench.json and the tables of two pages
    python benchmarks/bench.py --quick             # measure the quick rows, and compare them with bench.json
    python benchmarks/bench.py --only NAME ...     # rows whose name begins with NAME; nothing is written
    python benchmarks/bench.py --scale             # measure the constants of docs/scale.md; nothing is written
    python benchmarks/bench.py --quick --record    # also with --only or --scale: keep this part in bench.json
    python benchmarks/bench.py --pages             # rewrite the tables of the pages

A row is the ratio of our time to that of a reference, run in turns in one process (see `_measure`). `--quick` exits
with 1 if a ratio is 1.3 times the committed ratio and a longer second measurement confirms this, or if a row is new or
missing. The committed ratios are of the processor's own kernels: with ATEN_CPU_CAPABILITY, rows are shown, not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the sources of this checkout, and the report's fixtures in tests/

import forecast  # noqa: E402
import torch  # noqa: E402
from _measure import LEAST, Build, Machine, Row, Rows, Skipped, check, measure_machine, measured, rounded  # noqa: E402
from rows import attacks, audits, encoders, flower, studies, training  # noqa: E402

JSON = ROOT / "benchmarks" / "bench.json"
SECTIONS = {
    "Training": training,
    "Messages": encoders,
    "Attacks": attacks,
    "Audits": audits,
    "Studies": studies,
    "Flower": flower,
}
SECONDS, QUICK, AGAIN, MORE = 4.0, 0.5, 4.0, 15
"""Measuring time of a row, of a quick row, and of a row that seems slower than before, with its least pairs."""


def builds(quick: bool) -> dict[str, Build]:
    """All rows by name."""
    return {name: build for module in SECTIONS.values() for name, build in module.rows(quick).items()}


def run(chosen: Rows, seconds: float, machine: Machine | None, least: int = LEAST) -> dict[str, Row]:
    """Measure and print rows; print the name of a row that cannot run here."""
    found = {}
    for name, build in chosen.items():
        try:
            found[name] = measured(build, seconds, machine, least)
            print(line(name, found[name]), flush=True)
        except Skipped as why:
            print(f"{name}: skipped, {why}", flush=True)
    return found


def line(name: str, row: Row) -> str:
    """A row of the table in the terminal."""
    low, high = row.quartiles
    spread = f"{row.ratio:8.3g} [{low:.3g}, {high:.3g}] of {row.against}"
    limit = f", {row.limit / row.seconds:.1%} of the limit of {row.bound}" if row.bound else ""
    memory = f", {row.peak_mb:.0f} MB" if row.peak_mb >= 0.5 else ""
    return f"{name:<44} {rate(row):>14} {spread}, {row.pairs} pairs{memory}{limit}"


def rate(row: Row) -> str:
    """The speed of our code: units per second, or seconds per unit."""
    each = row.seconds / row.amount
    if each < 1e-6:
        return f"{1e-6 / each:.3g} M/s"
    return f"{1e3 * each:.3g} ms" if each < 1 else f"{each:.3g} s"


def commit() -> str:
    """The measured commit, and whether there are uncommitted changes."""
    ask = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    changed = ask(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    return ask(["git", "rev-parse", "--short=8", "HEAD"]).stdout.strip() + " with changes" * bool(changed)


def machine_text() -> str:
    """The processor, without the name of the host."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((text.partition(":")[2].strip() for text in lines if text.startswith("model name")), "unknown")
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, torch {torch.__version__}, Python {platform.python_version()}"


def take(given: argparse.Namespace) -> dict[str, Any]:
    """Measure what the arguments request; return the data of the JSON, with its existing rows where they are kept."""
    data: dict[str, Any] = json.loads(JSON.read_text()) if JSON.exists() else {}
    machine, everything = measure_machine(), not (given.only or given.quick or given.scale)
    print(machine, flush=True)
    data = {} if everything else data
    now = {"command": "make bench", "machine": machine_text(), "rates": asdict(machine)}
    asked = {name: data.get(name, value) for name, value in now.items()}  # those of the rows that stay
    parts = {"rows": data.get("rows", {}), "quick": data.get("quick", {}), "scale": data.get("scale", {})}
    if everything or (given.only and not given.quick):
        rows = run(named(builds(False), given.only), given.seconds, machine)
        parts["rows"] = parts["rows"] | {name: asdict(row) for name, row in rows.items()}
    if everything or given.quick:
        rows = run(named(builds(True), given.only), given.seconds, None)
        parts["quick"] = (parts["quick"] if given.only else {}) | {name: asdict(row) for name, row in rows.items()}
    if everything or given.scale:
        parts["scale"] = forecast.measure()
    some = f" {' and '.join(given.only)}" if given.only else ""
    fresh = {name + some: commit() for name, part in parts.items() if part != data.get(name)}
    return asked | {"commits": data.get("commits", {}) | fresh} | parts


def named(every: Rows, names: Sequence[str] | None) -> Rows:
    """The rows whose name begins with one of `names`; all rows without names."""
    return {name: build for name, build in every.items() if not names or name.startswith(tuple(names))}


def quick(names: Sequence[str] | None) -> int:
    """Measure the quick rows with these names, or all of them; return 1 if there is a fault."""
    start, chosen = time.perf_counter(), named(builds(True), names)
    now = run(chosen, QUICK, None)
    took = time.perf_counter() - start
    if kernels := os.environ.get("ATEN_CPU_CAPABILITY"):
        print(f"{len(now)} rows in {took:.0f} s, not compared: the kernels are {kernels}, not the processor's own")
        return 0
    data = json.loads(JSON.read_text())
    then = {name: Row.of(row) for name, row in data["quick"].items() if not names or name.startswith(tuple(names))}
    faults = check(now, then, lambda name: run({name: chosen[name]}, AGAIN, None, MORE)[name])
    print(f"{len(now)} rows in {took:.0f} s, compared with commit {data['commits']['quick']}: ", end="")
    print("\n".join([f"{len(faults)} faults", *faults]) if faults else "no row is 1.3 times worse")
    return int(bool(faults))


def write(data: Mapping[str, Any]) -> None:
    """Write the JSON and the tables of the pages."""
    JSON.write_text(text_of(rounded(data)) + "\n")
    pages()


def text_of(data: Any, depth: int = 0) -> str:
    """JSON text with a line for each row."""
    if not isinstance(data, dict) or depth == 2:
        return json.dumps(data)
    lines = (f"{json.dumps(key)}: {text_of(value, depth + 1)}" for key, value in data.items())
    return "{\n" + ",\n".join(lines) + "\n}"


def pages() -> None:
    """Write the tables of the pages from the JSON."""
    data = json.loads(JSON.read_text())
    for page, text in {"performance": performance(data), "scale": forecast.tables(data)}.items():
        path = ROOT / "docs" / f"{page}.md"
        path.write_text(between(path.read_text(), text))


def between(page: str, text: str, begin: str = "<!-- made by make bench -->\n", end: str = "<!-- end -->") -> str:
    """The page with `text` between its two markers."""
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(end)
    if not rest or not tail:
        raise ValueError(f"expected a page with the lines {begin.strip()!r} and {end!r}")
    return f"{head}{begin}\n{text.strip()}\n\n{end}{tail}"


def performance(data: Mapping[str, Any]) -> str:
    """The tables of docs/performance.md."""
    rates = Machine(**data["rates"])
    again = {name.removeprefix("rows "): at for name, at in data["commits"].items() if name.startswith("rows ")}
    later = "".join(f" Rows that begin with {names}: at commit {at}." for names, at in again.items())
    parts = [
        f"`{data['command']}` at commit {data['commits']['rows']}, on {data['machine']}.{later}\n",
        "| one core | |\n|---|---|",
        f"| one pass over memory, read and write | {rates.bytes_per_s / 1e9:.3g} GB/s |",
        f"| product of two 1024 x 1024 matrices, float32 | {rates.flops_per_s / 1e9:.3g} GFLOP/s |",
        f"| Philox, uniform float32 | {rates.draws_per_s / 1e6:.3g} M numbers/s |",
        f"| SHA-256 | {rates.hashed_per_s / 1e6:.3g} MB/s |",
        f"| files of 1 kB, flushed to the disk | {rates.files_per_s:.3g} a second |",
        f"| a new process that imports torch | {rates.start_s:.2g} s |",
    ]
    for section, module in SECTIONS.items():
        named = {name: Row.of(data["rows"][name]) for name in module.rows(False) if name in data["rows"]}
        if named:
            parts += [f"\n## {section}\n", HEAD, *(table_row(name, row) for name, row in named.items())]
    return "\n".join(parts)


HEAD = "| | ours | ratio to | | quartiles | peak MB | of the limit | |\n|---|---|---|---|---|---|---|---|"


def table_row(name: str, row: Row) -> str:
    """A row of a page's table."""
    low, high = row.quartiles
    memory = f"{row.peak_mb:.0f}" if row.peak_mb else ""
    limit = f"{row.limit / row.seconds:.1%} {row.bound}" if row.bound else ""
    cells = name, f"{rate(row)} a {row.unit}", row.against, f"{row.ratio:.3g}", f"{low:.3g} to {high:.3g}", memory
    text = " | ".join([*cells, limit, row.note]).replace("M/s a coordinate", "M coordinates/s")
    return f"| {text} |"


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="measure the quick rows and compare them with bench.json")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure the rows whose name begins with NAME")
    parser.add_argument("--scale", action="store_true", help="measure the constants of docs/scale.md")
    parser.add_argument("--record", action="store_true", help="with one of these: write the results to bench.json")
    parser.add_argument("--pages", action="store_true", help="rewrite the tables of the pages")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="measuring time of a recorded row")
    given = parser.parse_args(arguments)
    part = given.quick or given.only or given.scale
    if given.pages:
        pages()
    elif given.record or not part:
        write(take(given))
    elif given.quick:
        return quick(given.only)
    elif given.only:
        run(named(builds(False), given.only), given.seconds, None)
    else:
        forecast.main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
