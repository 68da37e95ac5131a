"""A thousand small cells: the overhead of the harness, apart from training and attacks.

A hundred trainings with ten cells each. Prints the seconds to run the study, to run it again with nothing to do, and to
render the report, and the size of the page.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from leakgauge.reports.html import render

STUDY = {
    "name": "scale",
    "seeds": [0, 1, 2, 3, 4],
    "tasks": [{"data": "digits", "model": "mlp-small"}],
    "federations": [{"rounds": 2, "clients": 4, "samples": 100, "test_samples": 50}],
    "defenses": [{"name": "none"}, {"name": "gaussian", "noise_std": [0.001 * k for k in range(1, 20)]}],
    "attacks": [
        {"name": "prior", "target": {"round": [0, 1], "count": [1, 2, 3, 4]}},
        {"name": "membership-loss", "target": {"kind": "members", "count": [10, 20]}},
    ],
}


def main() -> None:
    """Print the four numbers."""
    study = resolve(STUDY)
    print(f"{len(study.cells)} cells on {len(study.trainings)} trainings")
    with tempfile.TemporaryDirectory() as folder:
        for word in ("run", "run again"):
            start = time.perf_counter()
            run = run_study(study, Path(folder))
            print(f"{word}: {time.perf_counter() - start:.1f} s, {len(run.results)} results")
        start = time.perf_counter()
        page = render(run)
        print(f"report: {time.perf_counter() - start:.1f} s, {len(page) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
