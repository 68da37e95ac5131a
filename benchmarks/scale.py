"""Two thousand small cells: the overhead of the harness, apart from training and attacks.

Two hundred trainings with ten cells each. Prints the seconds to plan the study, to run it, to run it again with nothing
to do, and to render the report, and the size of the page.

    python benchmarks/scale.py [--workers N]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from leakgauge.reports.html import render

STUDY = {
    "name": "scale",
    "limit": False,
    "seeds": list(range(10)),
    "tasks": [{"data": "digits", "model": "mlp-small"}],
    "federations": [{"rounds": 2, "clients": 4, "samples": 100, "test_samples": 50}],
    "defenses": [{"name": "none"}, {"name": "gaussian", "noise_std": [0.001 * k for k in range(1, 20)]}],
    "attacks": [
        {"name": "prior", "target": {"round": [0, 1], "count": [1, 2, 3, 4]}},
        {"name": "membership-loss", "target": {"kind": "members", "count": [10, 20]}},
    ],
}


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, help="0: in this process, whose processor seconds are then all")
    workers = parser.parse_args().workers
    clock = Clock()
    study = resolve(STUDY)
    clock.tell(f"plan: {len(study.cells)} cells on {len(study.trainings)} trainings")
    with tempfile.TemporaryDirectory() as folder:
        for word in ("run", "run again"):
            run = run_study(study, Path(folder), workers=workers)
            clock.tell(f"{word}: {len(run.results)} results")
        page = render(run)
        clock.tell(f"report: {len(page) / 1e6:.1f} MB")


class Clock:
    """Tells the wall and processor seconds of this process since it was last asked."""

    def __init__(self) -> None:
        self.wall, self.own = time.perf_counter(), time.process_time()

    def tell(self, what: str) -> None:
        """Print them."""
        wall, own = time.perf_counter(), time.process_time()
        print(f"{what}, {wall - self.wall:.1f} s, {own - self.own:.1f} processor seconds of this process", flush=True)
        self.wall, self.own = wall, own


if __name__ == "__main__":
    main()
