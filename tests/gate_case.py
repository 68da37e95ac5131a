"""Invented measures, runs and checks for the tests of the gate."""

from __future__ import annotations

import dataclasses

import numpy as np

from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.gate.judge import Check, Verdict
from leakgauge.harness.gate.measure import Measure, Measured

IMAGES = np.linspace(0.05, 0.35, 16)


def measure(metric="ssim", values=IMAGES, *, name="laplace", **changes) -> Measure:
    attacked = metric in ("ssim", "auc", "tpr@1%")
    known = [value for value in values if value is not None]
    made = Measure(
        key=f"{name}/dlg/server/{metric}/abcdef" if attacked else f"{name}/{metric}/abcdef",
        metric=metric,
        defense=PartSpec(name),
        attack=PartSpec("dlg") if attacked else None,
        threat="server" if attacked else "",
        target="probe" if attacked else "",
        setting="digits",
        aware=False,
        control="",
        value=float(np.mean(known)) if known else None,
        low=None,
        high=None,
        values=tuple(None if value is None else float(value) for value in values),
        items=("a",) if metric == "ssim" else (),
    )
    return dataclasses.replace(made, **changes)


def measured(*measures: Measure, **changes) -> Measured:
    made = Measured(
        study="smoke",
        study_hash="1" * 16,
        data={"digits": "2" * 16},
        commit="3" * 40,
        dirty=False,
        packages={"torch": "2.13.0+cpu", "numpy": "2.4.6", "scikit-learn": "1.9.1"},
        machine="Linux x86_64",
        numerics=({"vector instructions": "AVX512", "processor": "Invented", "MKL_CBWR": "AVX2"},),
        measures=measures,
    )
    return dataclasses.replace(made, **changes)


def check(verdict: Verdict = Verdict.PASS, at: int = 0, **changes: object) -> Check:
    fields: dict[str, object] = {"key": f"gaussian/map/server/ssim/{at:06x}", "name": f"gaussian under map {at}: ssim"}
    fields |= {"metric": "ssim", "aware": True, "verdict": verdict, "before": 0.148, "now": 0.213, "rise": 0.065}
    fields |= {"low": 0.047, "high": 0.083, "p": 0.0004, "n": 16, "smallest": 0.021, "images": ()}
    return Check(**(fields | {"reason": f"reason {at}"} | changes))  # type: ignore[arg-type]
