"""The trade-offs of each setting: its charts, and the size and fidelity of the messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from leakgauge.harness.core.result import TrainingRecord
from leakgauge.reports.charts.curves import attack_charts, roc_charts, training_charts
from leakgauge.reports.charts.epsilon import AUC, MSE, SSIM, accuracy_charts, leakage_charts
from leakgauge.reports.charts.figures import Chart, Point, by_defense, drawable
from leakgauge.reports.sections import Section
from leakgauge.reports.sections.asked import drawing
from leakgauge.reports.sections.frontier import frontier_chart
from leakgauge.reports.select import Analysis, final_accuracy
from leakgauge.reports.table import Column, Table
from leakgauge.reports.text.notation import fixed, percent, size


class _Messages(NamedTuple):
    """The messages of one defense: mean bytes, bits per parameter, mean SNR in dB (None: an exact update)."""

    defense: str
    trainings: tuple[TrainingRecord, ...]
    bytes: float
    bits: float
    snr: float | None


def trade_offs(analysis: Analysis) -> list[dict[str, object]] | None:
    """The charts and the table of messages of each setting that has any; None if no setting has."""
    settings: list[dict[str, object]] = []
    for index, (setting, name) in enumerate(analysis.settings.items()):
        drawings = [drawing(chart, f"s{index}") for chart in charts(analysis, setting)]
        traffic = _traffic(analysis, setting)
        if drawings or traffic is not None:
            settings.append({"setting": name, "drawings": drawings, "traffic": traffic})
    return settings or None


SECTION = Section("tradeoffs", "Trade-offs", "Trade-offs", trade_offs, 70)


def charts(analysis: Analysis, setting: str) -> tuple[Chart, ...]:
    """The charts of one setting, in the order of the page; only charts with points at two or more values of x."""
    drawn = [
        *accuracy_charts(analysis, setting),
        *(chart for measure in (SSIM, MSE, AUC) for chart in leakage_charts(analysis, setting, measure)),
        frontier_chart(analysis, setting),
        fidelity_chart(analysis, setting),
        *attack_charts(analysis, setting),
        *roc_charts(analysis, setting),
        *training_charts(analysis, setting),
    ]
    return tuple(drawable(chart) for chart in drawn if chart.places >= 2)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _messages(analysis: Analysis, setting: str) -> list[_Messages]:
    messages = []
    for defense in analysis.defenses:
        trainings = analysis.trainings_of(setting, defense)
        mean = _mean([count for training in trainings for count in training.message_bytes])
        snr = _mean([snr for training in trainings for snr in training.snr_db if snr is not None])
        if mean is not None:
            messages.append(_Messages(defense, trainings, mean, 8 * mean / trainings[0].dim, snr))
    return messages


def _traffic(analysis: Analysis, setting: str) -> Table | None:
    messages = _messages(analysis, setting)
    most = max((message.bytes for message in messages), default=0.0) or 1.0
    rows = []
    for message in messages:
        accuracy = final_accuracy(message.trainings)
        bar, snr = (
            f"{100 * message.bytes / most:.2f}",
            "exact" if message.snr is None else f"{fixed(message.snr, 1)} dB",
        )
        name, share = analysis.defenses[message.defense].text, percent(None if accuracy is None else accuracy.value)
        rows.append((name, size(message.bytes), bar, fixed(message.bits, 2), snr, share))
    names = ("Bytes per message", "Bar: share of the largest", "Bits per parameter", "SNR", "Final accuracy")
    columns = (Column(name, "bar" if name.startswith("Bar") else "num") for name in names)
    return Table("Size of a message, by defense", ("Defense", *columns), tuple(rows)) if rows else None


def fidelity_chart(analysis: Analysis, setting: str) -> Chart:
    """Signal-to-noise ratio of the decoded update against bits per parameter; exact updates have no point."""
    points, rows = [], []
    for message in _messages(analysis, setting):
        if message.snr is not None:
            points.append((message.trainings[0].spec.defense.name, Point(message.bits, message.snr)))
            rows.append((analysis.defenses[message.defense].text, fixed(message.bits, 2), fixed(message.snr, 1)))
    shown, rest = by_defense(points)
    return Chart(
        name="fidelity",
        title="Fidelity of the update against its size",
        x_label="bits per parameter, counted from the bytes sent",
        y_label="SNR of the decoded update, dB",
        series=shown,
        better="Higher is a more faithful update: better for learning, and for the adversary.",
        caption=f"Mean over rounds and seeds. {rest}".strip(),
        header=("Defense", "Bits per parameter", "SNR, dB"),
        rows=tuple(rows),
        joined=False,
    )
