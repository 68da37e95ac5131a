"""The trade-offs of each setting: its charts, and the size and fidelity of the messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from leakgauge.harness.core.cases import gathered
from leakgauge.reports.charts.curves import attack_charts, roc_charts, training_charts
from leakgauge.reports.charts.epsilon import AUC, MSE, SSIM, accuracy_charts, leakage_charts
from leakgauge.reports.charts.figures import Chart, Point, Series, capped, drawable
from leakgauge.reports.sections import Section
from leakgauge.reports.sections.asked import drawing
from leakgauge.reports.select import Analysis, final_accuracy
from leakgauge.reports.table import Column, Table
from leakgauge.reports.text.notation import fixed, percent, size


def trade_offs(analysis: Analysis) -> list[dict[str, object]] | None:
    """The charts and the table of messages of each setting that has any; None if no setting has."""
    settings: list[dict[str, object]] = []
    for index, (setting, name) in enumerate(analysis.settings.items()):
        drawings = [drawing(chart, f"s{index}") for chart in charts(analysis, setting)]
        traffic = _traffic(analysis, setting)
        if drawings or traffic is not None:
            settings.append({"setting": name, "drawings": drawings, "traffic": traffic})
    return settings or None


def _tables(analysis: Analysis) -> list[Table]:
    every = ((name, _traffic(analysis, setting)) for setting, name in analysis.settings.items())
    return [replace(table, title=f"{table.title}: {name}") for name, table in every if table is not None]


SECTION = Section("tradeoffs", "Trade-offs", "Trade-offs", trade_offs, 70, tables=_tables)


def charts(analysis: Analysis, setting: str) -> tuple[Chart, ...]:
    """The charts of one setting, in the order of the page; only charts with points at two or more values of x."""
    drawn = [
        *accuracy_charts(analysis, setting),
        *(chart for measure in (SSIM, MSE, AUC) for chart in leakage_charts(analysis, setting, measure)),
        fidelity_chart(analysis, setting),
        *attack_charts(analysis, setting),
        *roc_charts(analysis, setting),
        *training_charts(analysis, setting),
    ]
    return tuple(drawable(chart) for chart in drawn if chart.places >= 2)


def _messages(analysis: Analysis, setting: str) -> Iterator[tuple[str, float, float, float | None]]:
    """For each defense the mean bytes of a message, its bits per parameter, and the mean SNR in dB, None if exact."""
    for defense in analysis.defenses:
        trainings = analysis.trainings_of(setting, defense)
        counts = [count for training in trainings for count in training.message_bytes]
        ratios = [snr for training in trainings for snr in training.snr_db if snr is not None]
        if counts:
            mean = float(np.mean(counts))
            yield defense, mean, 8 * mean / trainings[0].dim, float(np.mean(ratios)) if ratios else None


def _traffic(analysis: Analysis, setting: str) -> Table | None:
    messages = list(_messages(analysis, setting))
    most = max((mean for _, mean, *_ in messages), default=0.0) or 1.0
    rows = []
    for defense, mean, bits, ratio in messages:
        accuracy = final_accuracy(analysis.trainings_of(setting, defense))
        snr = "exact" if ratio is None else f"{fixed(ratio, 1)} dB"
        name, share = analysis.defenses[defense].text, percent(None if accuracy is None else accuracy.value)
        rows.append((name, size(mean), f"{100 * mean / most:.2f}", fixed(bits, 2), snr, share))
    names = ("Bytes per message", "Bar: share of the largest", "Bits per parameter", "SNR", "Final accuracy")
    columns = (Column(name, "bar" if name.startswith("Bar") else "num") for name in names)
    return Table("Size of a message, by defense", ("Defense", *columns), tuple(rows)) if rows else None


def fidelity_chart(analysis: Analysis, setting: str) -> Chart:
    """Signal-to-noise ratio of the decoded update against bits per parameter; exact updates have no point."""
    known = [
        (analysis.defenses[name], bits, snr) for name, _, bits, snr in _messages(analysis, setting) if snr is not None
    ]
    alike = gathered((label.name, Point(bits, snr)) for label, bits, snr in known)
    shown, rest = capped([Series(name, tuple(sorted(points)), at) for at, (name, points) in enumerate(alike.items())])
    return Chart(
        name="fidelity",
        title="Fidelity of the update against its size",
        x_label="bits per parameter, counted from the bytes sent",
        y_label="SNR of the decoded update, dB",
        series=shown,
        better="Higher is a more faithful update: better for learning, and for the adversary.",
        caption=f"Mean over rounds and seeds. {rest}".strip(),
        header=("Defense", "Bits per parameter", "SNR, dB"),
        rows=tuple((label.text, fixed(bits, 2), fixed(snr, 1)) for label, bits, snr in known),
        joined=False,
    )
