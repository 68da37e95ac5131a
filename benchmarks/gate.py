"""False alarms and power of the gate on a study: all private noise redrawn, or less noise in one defense at a time.

    python benchmarks/gate.py redraws [--number 20] [--first 0] [--study smoke]
    python benchmarks/gate.py power [--study smoke]

`redraws` runs the study's attacks again with renamed private keys, so with other draws, and judges each run as
`leakgauge gate` does: by the distribution of the messages at 1 %, and by the attacks at 4 %. Bar: an alarm in at most 1
run of 20. Audits and limits are left out, because no rule compares them between draws.

`power` scales the draws of each defense around zero. If the decoder shares the noise, or the noise has another form,
the defense gets another noise parameter instead. Keys are renamed, so that no draw is shared. Bar: half the noise is
detected in all defenses, 0.8 of the noise in nine of ten.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import Cell
from leakgauge.harness.core.contract import Defense
from leakgauge.harness.core.fingerprints import Fingerprint
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.round import Client
from leakgauge.harness.gate.judge import Verdict, judge
from leakgauge.harness.gate.measure import Measured, measured
from leakgauge.harness.gate.mechanism import LEVEL, Changed, distribution_checks
from leakgauge.harness.gate.rules import Rules
from leakgauge.harness.study.fingerprints import take
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import Study, load_study

WHOLE = (
    *("cepam-gaussian", "cepam-laplace", "cepam-clip", "mvu", "vqsgd", "sqsgd", "piecewise", "skellam"),
    *("distributed-gaussian", "poisson-binomial", "rqm", "ppr", "privunit"),
)
"""Defenses whose noise is not an added draw around zero: they get another noise parameter instead."""

NOISELESS = ("none", "sdq", "sdq-lattice", "top-k", "random-mask", "soteria", "precode")

DRAWN = ("normal", "laplace", "signed_exponential")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("redraws", "power"))
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="first redraw, to divide the redraws among processes")
    parser.add_argument("--study", default="smoke")
    given = parser.parse_args()
    torch.set_num_threads(1)
    study = load_study(given.study)
    if given.what == "redraws":
        redraws(study, range(given.first, given.first + given.number))
    else:
        power(study)


def redraws(study: Study, numbers: range) -> None:
    """Run the same code with other draws, and compare each run with the first."""
    light = dataclasses.replace(study, cells=tuple(_light(cell) for cell in study.cells))
    before, base = _run(light), take(_floors(study))
    alarms = 0
    for at in numbers:
        start = time.process_time()
        with renamed(at):
            now, fingerprints = _run(light), take(_floors(study))
        rules = Rules(level=Rules().level - LEVEL)
        checks = [
            *distribution_checks(fingerprints, base, Changed(("redrawn",), training=True)),
            *judge(now, before, rules).checks,
        ]
        failed = [check for check in checks if check.verdict is Verdict.FAIL]
        alarms += bool(failed)
        said = "; ".join(f"{check.key}: {check.reason}" for check in failed)
        seconds = time.process_time() - start
        print(f"redraw {at + 1}: {len(failed)} of {len(checks)} checks fail, {seconds:.0f} s {said}", flush=True)
    print(f"{alarms} of {len(numbers)} runs with an alarm")


def power(study: Study) -> None:
    """Print whether the goodness-of-fit test finds less noise in one defense at a time."""
    base = take(_floors(study))
    specs = {cell.training.defense.key: cell.training.defense for cell in study.cells}
    for key, spec in specs.items():
        if spec.name in NOISELESS:
            continue
        cells = [cell for cell in _floors(study) if cell.training.defense.key == key]
        words = [f"{factor:g}: {_found(base, cells, spec.name in WHOLE, factor)}" for factor in (0.5, 0.8)]
        print(f"{key[:70]:<72}{'; '.join(words)}", flush=True)


def _found(base: Sequence[Fingerprint], cells: Sequence[Cell], whole: bool, factor: float) -> str:
    """Whether the goodness-of-fit test finds a defense with this share of its noise, with the reason."""
    with renamed(0), quieter(factor, whole=whole):
        now = take(cells)
    failed = [
        one for one in distribution_checks(now, base, Changed(("x",), training=True)) if one.verdict is Verdict.FAIL
    ]
    return f"found, {failed[0].reason}" if failed else "not found"


@contextmanager
def renamed(number: int) -> Iterator[None]:
    """Rename the private keys of all clients."""
    old = Client.__dict__["of"]

    def of(cls: type[Client], sender: Any, update: Any, memory: Any, key: rng.Key) -> Client:
        return cls(sender, update, memory, key.child("private", f"renamed {number}"), key.child("shared"))

    Client.of = classmethod(of)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Client.of = old  # type: ignore[method-assign]


@contextmanager
def quieter(factor: float, *, whole: bool) -> Iterator[None]:
    """Scale draws around zero by clients, the server or the channel; `whole`: build defenses with less noise."""
    old = {name: getattr(rng, name) for name in DRAWN}
    build = registry.build_defense

    def scaled(name: str) -> Any:
        def drawn(key: rng.Key, *rest: Any, **more: Any) -> Any:
            noise = {"private", "server", "channel", "noise"} & set(map(str, key.path)) and "update" not in key.path
            return old[name](key, *rest, **more) * (factor if noise else 1.0)

        return drawn

    if whole:
        registry.build_defense = lambda spec: _less(build(spec), factor)
    else:
        for name in DRAWN:
            setattr(rng, name, scaled(name))
    try:
        yield
    finally:
        registry.build_defense = build
        for name, draw in old.items():
            setattr(rng, name, draw)


def _less(defense: Defense[Any, Any], factor: float) -> Defense[Any, Any]:
    """The defense with a parameter that gives less noise."""
    for name in ("noise_std", "noise_scale"):
        if getattr(defense, name, None) is not None and name in defense.parameters():
            return dataclasses.replace(defense, **{name: factor * getattr(defense, name)})
    return dataclasses.replace(defense, epsilon=defense.parameters()["epsilon"] / factor)


def _light(cell: Cell) -> Cell:
    """The cell without audit and limit."""
    return dataclasses.replace(cell, training=dataclasses.replace(cell.training, audit=0), limit=False)


def _floors(study: Study) -> list[Cell]:
    """One cheap cell of each training."""
    return [cell for cell in study.cells if cell.attack.parameters.get("guess") == "mean"]


def _run(study: Study) -> Measured:
    """The measures of a run in this process."""
    with tempfile.TemporaryDirectory() as folder:
        return measured(run_study(study, Path(folder), workers=0))


if __name__ == "__main__":
    main()
