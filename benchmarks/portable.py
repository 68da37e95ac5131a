"""What equal kernels on all processors would cost.

    python benchmarks/portable.py cost [--number 3] [--study smoke]

Runs a study in turns with this processor's kernels and with those that every processor with AVX2 has (`AVX2`), and
compares processor seconds. Bar for such a mode: at most 1.3 times.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from statistics import median

import torch

from leakgauge.harness.cli.main import AVX2
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import load_study

KERNELS: dict[str, dict[str, str]] = {"own": {}, "avx2": AVX2}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("cost", "study"))  # `study`: one process of `cost`
    parser.add_argument("--number", type=int, default=3)
    parser.add_argument("--study", default="smoke")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "cost":
        cost(given.number, given.study)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run_study(load_study(given.study), folder, workers=0)


def cost(number: int, study: str) -> None:
    """Print processor seconds with both kernels, in turns, and their ratio."""
    seconds: dict[str, list[float]] = {"own": [], "avx2": []}
    for _ in range(number):
        for kernels, taken in seconds.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            _process(("study", "--study", study), KERNELS[kernels])
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            print(f"{kernels:<6}{taken[-1]:>8.1f} s", flush=True)
    print(f"ratio of the medians {median(seconds['avx2']) / median(seconds['own']):.2f}")


def _process(words: tuple[str, ...], kernels: dict[str, str]) -> str:
    """The output of this file with these words in a process with these variables, without a cache."""
    variables = {**os.environ, **kernels, "LEAKGAUGE_CACHE": "off", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *words]
    return subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
