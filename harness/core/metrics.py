"""Every metric in one table: its words, range and direction, and how the gate tests it.

The scoring, the gate, the report, the terminal and the exports read this table. A new metric needs one row here and the
code that computes its estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

MANY = 20
"""Fewest candidates among whom a named record counts as a person who is recognized."""

RECOGNIZABLE = 0.5
"""Minimum SSIM at which a reconstruction that identifies its original counts as recognizable."""


class GateTest(StrEnum):
    """How the gate judges a rise of a metric."""

    PAIRED = "paired"
    """Student's t of the paired differences of the items."""
    DELONG = "DeLong"
    """DeLong's test on the placements of the records."""
    RATE = "rate"
    """A paired test of the true positive rate at a false positive rate, on the same placements."""
    AUDIT = "audit"
    """The largest value over the seeds must not exceed the claim."""
    NEVER = "never"
    """The metric must be zero in all seeds if it was zero in all seeds of the baseline."""
    RISE = "rise"
    """The mean over the seeds must not rise by more than a relative tolerance."""
    DISTRIBUTION = "distribution"
    """The messages of two versions of the code must follow the same distribution; see `gate.mechanism`."""
    FALL = "fall"
    """The mean over the seeds must not fall by more than a tolerance."""


Item = Literal["image", "text", "label", "victim", "record", "member", "client", "message", "seed"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: the name in results, keys and baselines.
        words: the name for readers.
        item: what one value belongs to.
        kind: the kind of attack (see `Attack.kind`), or `training`.
        interval: method of the 95 % interval of one run.
        low, high: ends of the range; None: the range has no such end.
        unit: for example `dB`; empty for a pure number.
        higher_leaks: True if a higher value means that the adversary learns more; None if the value does not measure
            leakage.
        gate: how the gate tests the metric; None: the gate ignores it.
        headline: whether the report rates attacks of this kind by this metric.
        chance: the score of blind guessing; None: unknown.
        false_positives: for a true positive rate, its false positive rate.
        recognizable: the value from which a single item counts as recognizable; one image can become recognizable
            while the mean hardly changes.
        decimals: the number of decimals that a baseline keeps of each value.
        failed, passed: the gate's verdicts in words.
        fell, rose: the words for a change that passes.
        percent: whether the value is written as a percentage.
    """

    name: str
    words: str
    item: Item
    kind: str
    interval: str = "Clopper-Pearson"
    low: float | None = 0.0
    high: float | None = 1.0
    unit: str = ""
    higher_leaks: bool | None = True
    gate: GateTest | None = None
    headline: bool = False
    chance: float | None = None
    false_positives: float | None = None
    recognizable: float | None = None
    decimals: int = 6
    failed: str = "leakage increased"
    passed: str = "no increase detected"
    fell: str = "leakage decreased"
    rose: str = "within tolerance"
    percent: bool = False

    @property
    def items(self) -> str:
        """The name of its items, in the plural."""
        return f"{self.item}s"


_TABLE = (
    Metric(
        *("ssim", "mean SSIM", "image", "reconstruction", "Student t"),
        low=-1.0,
        gate=GateTest.PAIRED,
        headline=True,
        recognizable=RECOGNIZABLE,
    ),
    Metric("columns", "columns right", "record", "reconstruction", "Student t"),
    Metric("words", "words right", "text", "reconstruction", "Student t", gate=GateTest.PAIRED),
    Metric("in_place", "tokens right in their place", "text", "reconstruction", "Student t"),
    Metric("rouge1", "ROUGE-1", "text", "reconstruction", "Student t"),
    Metric("rouge2", "ROUGE-2", "text", "reconstruction", "Student t"),
    Metric("rougeL", "ROUGE-L", "text", "reconstruction", "Student t"),
    Metric("exact_text", "texts exactly right", "text", "reconstruction", "Clopper-Pearson", gate=GateTest.PAIRED),
    Metric("limit_wrong", "limit of tokens wrong", "text", "reconstruction", "Student t", higher_leaks=False),
    Metric("correlation", "correlation", "record", "reconstruction", "Student t", low=-1.0),
    Metric("mse", "MSE", "image", "reconstruction", "order statistics", high=None, higher_leaks=False),
    Metric("psnr", "PSNR", "image", "reconstruction", "Student t", low=None, high=None, unit="dB"),
    Metric("limit", "limit of the MSE", "image", "reconstruction", "Student t", high=None, higher_leaks=False),
    Metric(
        *("average_limit", "limit of the MSE over all images", "image", "reconstruction", "Student t"),
        high=None,
        higher_leaks=False,
    ),
    Metric("efficiency", "limit over MSE", "image", "reconstruction", "Student t", high=None, higher_leaks=None),
    Metric("label_accuracy", "labels right", "label", "labels", headline=True),
    Metric("exact", "victims with all labels right", "victim", "labels"),
    Metric("named", "people named", "record", "lineup", gate=GateTest.PAIRED, headline=True, chance=0.01),
    Metric("named@2", "named among 2 candidates", "record", "lineup", chance=0.5),
    Metric("named@10", "named among 10 candidates", "record", "lineup", chance=0.1),
    Metric("named@100", "named among 100 candidates", "record", "lineup", chance=0.01),
    Metric("named_bound", "proved limit of people named", "record", "lineup"),
    Metric(*("named_epsilon", "epsilon shown by named people", "record", "lineup", ""), high=None),
    Metric("lineup_auc", "rivals less likely than the record", "record", "lineup", "Student t", chance=0.5),
    Metric(*("nats", "log likelihood ratio of record to rival", "record", "lineup", "Student t"), low=None, high=None),
    Metric("posterior_gap", "posterior of the record above its expectation", "record", "lineup", "Student t", low=-1.0),
    Metric("present_auc", "AUC of presence, by likelihood over references", "record", "lineup", "DeLong", chance=0.5),
    Metric("present_auc_fit", "AUC of presence, by fit", "record", "lineup", "DeLong", chance=0.5),
    Metric("identification", "images identified", "image", "reconstruction", chance=0.01),
    Metric("identification_bound", "proved limit of images identified", "image", "reconstruction"),
    Metric(*("identification_epsilon", "epsilon shown by identified images", "image", "reconstruction", ""), high=None),
    Metric("recognized", "recognizable", "image", "reconstruction"),
    Metric("success", "success", "image", "reconstruction"),
    Metric("failed", "failed", "victim", "reconstruction", higher_leaks=None),
    Metric(
        *("auc", "AUC", "record", "membership", "DeLong"), gate=GateTest.DELONG, headline=True, chance=0.5, decimals=5
    ),
    Metric("tpr@0.1%", "TPR at 0.1 % FPR", "member", "membership", gate=GateTest.RATE, false_positives=0.001),
    Metric("tpr@1%", "TPR at 1 % FPR", "member", "membership", gate=GateTest.RATE, false_positives=0.01),
    Metric("membership_epsilon", "epsilon shown by guessed members", "record", "membership", "", high=None),
    Metric(*("source", "records traced to their client", "record", "source"), gate=GateTest.PAIRED, headline=True),
    Metric(
        *("linked", "messages linked to their client", "message", "linkability"), gate=GateTest.PAIRED, headline=True
    ),
    Metric(*("property_auc", "AUC of a property", "victim", "property", "DeLong"), headline=True, chance=0.5),
    Metric(
        *("detectable", "clients that notice the broadcast parameters", "client", "reconstruction"), higher_leaks=None
    ),
    Metric("balanced_accuracy", "balanced accuracy", "record", "membership", "DKW-Massart band"),
    Metric(
        *("epsilon", "audited epsilon, lower bound", "seed", "training", ""),
        high=None,
        higher_leaks=None,
        gate=GateTest.AUDIT,
        failed="audited epsilon too high",
        fell="audited epsilon fell",
    ),
    Metric(
        *("contradicted", "code contradicted by its audit", "seed", "training", ""),
        higher_leaks=None,
        gate=GateTest.NEVER,
        failed="code contradicted",
        passed="no contradiction found",
        fell="no longer contradicted",
    ),
    Metric(
        *("messages", "distribution of the messages", "message", "training", ""),
        low=None,
        high=None,
        higher_leaks=None,
        gate=GateTest.DISTRIBUTION,
        failed="mechanism changed",
        passed="no change detected",
    ),
    Metric(
        *("accuracy", "final accuracy", "seed", "training"),
        higher_leaks=None,
        gate=GateTest.FALL,
        failed="accuracy fell",
        passed="no loss detected",
        fell="within tolerance",
        rose="accuracy rose",
        percent=True,
    ),
    Metric(
        *("bits", "bits per parameter", "seed", "training", "Student t"),
        high=None,
        higher_leaks=None,
        gate=GateTest.RISE,
        failed="more bits sent",
        fell="fewer bits sent",
    ),
)

METRICS = {metric.name: metric for metric in _TABLE}
"""The metrics by name, in the order in which the gate lists them."""


def metric(name: str) -> Metric:
    """The metric called `name`; a metric outside the table has no range, no direction and no test.

    A true positive rate at another false positive rate, such as `tpr@20%`, is like those in the table, but without a
    test; `column/age` is the share of records in which the column `age` is right.
    """
    if name in METRICS:
        return METRICS[name]
    if name.startswith("column/"):
        return replace(METRICS["success"], name=name, words=f"{name[7:]} right", item="record")
    if name.startswith("tpr@"):
        return replace(METRICS["tpr@1%"], name=name, words=f"TPR at {name[4:-1]} % FPR", gate=None)
    return Metric(name, name, "image", "", "", None, None, higher_leaks=None)


def gated(*tests: GateTest) -> list[Metric]:
    """The metrics that the gate judges by one of these tests; without tests, by any."""
    return [row for row in METRICS.values() if row.gate is not None and (not tests or row.gate in tests)]


def headline(kind: str) -> str:
    """The metric by which the report rates attacks of this kind; empty if there is none."""
    return next((row.name for row in METRICS.values() if row.headline and row.kind == kind), "")
