"""What a client's message costs and how faithfully it arrives: counted bytes, bits per parameter, signal to noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from leakgauge.harness.core.result import TrainingRecord
from leakgauge.reports.charts.figures import Chart, Point, Series, capped
from leakgauge.reports.pool import accuracy
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.notation import fixed, percent, size


class Traffic(NamedTuple):
    """What one client's message costs: a row of the table of messages. `share` is of the largest, for the bar."""

    defense: str
    bytes: str
    bits: str
    snr: str
    accuracy: str
    share: float


def _mean_bytes(trainings: Sequence[TrainingRecord]) -> float | None:
    """Mean bytes of a message over rounds and seeds."""
    found = [count for training in trainings for count in training.message_bytes]
    return float(np.mean(found)) if found else None


def _mean_snr(trainings: Sequence[TrainingRecord]) -> float | None:
    """Mean signal-to-noise ratio in dB over rounds and seeds; None where the update arrives as it is."""
    found = [snr for training in trainings for snr in training.snr_db if snr is not None]
    return float(np.mean(found)) if found else None


def traffic(analysis: Analysis, setting: str) -> tuple[Traffic, ...]:
    """The table of messages of one setting, in the study's order."""
    found = []
    for defense in analysis.defenses:
        trainings = analysis.trainings.get((setting, defense), ())
        mean = _mean_bytes(trainings)
        if mean is not None:
            found.append((defense, trainings, mean))
    most = max((mean for _, _, mean in found), default=0.0) or 1.0
    rows = []
    for defense, trainings, mean in found:
        snr, value = _mean_snr(trainings), accuracy(trainings)
        rows.append(
            Traffic(
                defense=analysis.defenses[defense].text,
                bytes=size(mean),
                bits=fixed(8 * mean / trainings[0].dim, 2),
                snr="exact" if snr is None else f"{fixed(snr, 1)} dB",
                accuracy=percent(value.value if value is not None else None),
                share=mean / most,
            )
        )
    return tuple(rows)


def fidelity_charts(analysis: Analysis, setting: str) -> list[Chart]:
    """Signal-to-noise ratio of the decoded update against the bits a parameter costs."""
    families: dict[str, list[Point]] = {}
    rows = []
    for defense in analysis.defenses:
        trainings = analysis.trainings.get((setting, defense), ())
        mean, snr = _mean_bytes(trainings), _mean_snr(trainings)
        if mean is not None and snr is not None:
            bits = 8 * mean / trainings[0].dim
            families.setdefault(trainings[0].spec.defense.name, []).append(Point(bits, snr))
            rows.append((analysis.defenses[defense].text, fixed(bits, 2), fixed(snr, 1)))
    shown, rest = capped([Series(name, tuple(sorted(p)), look) for look, (name, p) in enumerate(families.items())])
    return [
        Chart(
            name="fidelity",
            title="Fidelity of the update against its size",
            x_label="bits per parameter, counted from the bytes sent",
            y_label="SNR of the decoded update, dB",
            series=shown,
            better="Higher means that the update arrives more faithfully: better for learning, and for an attacker.",
            caption=" ".join(filter(None, ("Mean over rounds and seeds.", rest))),
            header=("Defense", "Bits per parameter", "SNR, dB"),
            rows=tuple(rows),
            joined=False,
        )
    ]
