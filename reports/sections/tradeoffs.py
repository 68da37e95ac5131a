"""Which charts a run has, in the order of the page."""

from __future__ import annotations

from leakgauge.reports.charts.epsilon import AUC, MSE, SSIM, accuracy_charts, leakage_charts
from leakgauge.reports.charts.figures import Chart
from leakgauge.reports.charts.messages import fidelity_charts
from leakgauge.reports.charts.roc import roc_charts
from leakgauge.reports.charts.rounds import attack_charts, training_charts
from leakgauge.reports.select import Analysis


def charts(analysis: Analysis, setting: str) -> tuple[Chart, ...]:
    """All charts of one setting with points at two places or more."""
    found = [
        *accuracy_charts(analysis, setting),
        *leakage_charts(analysis, setting, "reconstruction", SSIM),
        *leakage_charts(analysis, setting, "reconstruction", MSE),
        *leakage_charts(analysis, setting, "membership", AUC),
        *fidelity_charts(analysis, setting),
        *attack_charts(analysis, setting),
        *roc_charts(analysis, setting),
        *training_charts(analysis, setting),
    ]
    return tuple(chart for chart in found if chart.places >= 2)
