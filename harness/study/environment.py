"""The environment of a result: commit, versions, machine."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path

from leakgauge.harness.core.result import Environment

_PACKAGES = ("torch", "torchvision", "numpy", "scipy", "scikit-image", "scikit-learn", "dp-accounting", "opacus")


@functools.cache
def environment() -> Environment:
    """Commit, package versions and machine of this process; outside a checkout, the release stands for the commit."""
    commit = _git("rev-parse", "HEAD")
    return Environment(
        commit=commit or f"release {importlib.metadata.version('leakgauge')}",
        dirty=bool(_git("status", "--porcelain")) if commit else False,
        python=platform.python_version(),
        packages={name: importlib.metadata.version(name) for name in _PACKAGES},
        machine=f"{platform.system()} {platform.machine()}",
    )


def _git(*words: str) -> str | None:
    """The output of git in this checkout; None outside a checkout."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
