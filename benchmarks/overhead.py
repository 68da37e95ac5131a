"""The cost of safe storage: the share of manifests, digests, checks on load and the lock in a run's time.

    python benchmarks/overhead.py [--study demo]

The run uses one process. All reading and writing of stored results is counted, including the digests of code and of
data sets, so the share also contains work that is not for integrity. A second call, which finds everything finished, is
reported separately. Bar: 2 %.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from leakgauge.harness.data import DataSet
from leakgauge.harness.study import environment, run, store
from leakgauge.harness.study.study import load_study

COUNTED: dict[Any, tuple[str, ...]] = {
    store.Store: ("write_study", "_write", "write_failure", "examine", "read_arrays", "read_study", "cells", "seconds"),
    store: ("load_run", "sealed", "load", "_locked"),
    run: ("load_run", "_described"),
    environment: ("package", "environment"),
}


class Clock:
    """Seconds inside any counted function; a counted function inside another is counted once."""

    def __init__(self) -> None:
        self.seconds, self.inside = 0.0, False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its time counted."""

        @functools.wraps(function)
        def timed(*given: Any, **named: Any) -> Any:
            if self.inside:
                return function(*given, **named)
            self.inside, started = True, time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                self.inside, self.seconds = False, self.seconds + time.perf_counter() - started

        return timed


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--study", default="demo")
    study, clock = load_study(parser.parse_args().study), Clock()
    torch.set_num_threads(1)
    for owner, names in COUNTED.items():
        for name in names:
            setattr(owner, name, clock.around(getattr(owner, name)))
    digest = functools.cached_property(clock.around(DataSet.digest.func))
    digest.__set_name__(DataSet, "digest")
    DataSet.digest = digest  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        for what in ("first run", "all finished"):
            clock.seconds, started = 0.0, time.perf_counter()
            run.run_study(study, Path(folder), workers=0)
            total = time.perf_counter() - started
            share = clock.seconds / total
            print(f"{study.name}, {what}: {total:.1f} s, counted {clock.seconds:.2f} s, {share:.2%} of the run")


if __name__ == "__main__":
    main()
