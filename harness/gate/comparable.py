"""Whether a run and a baseline, or one measure of both, are comparable."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from leakgauge.harness.core.metrics import GateTest, metric
from leakgauge.harness.core.numerics import unlike
from leakgauge.harness.gate.compare import of_images
from leakgauge.harness.gate.measure import Measure, Measured
from leakgauge.harness.gate.rules import Rules, Verdict

NUMERIC = ("torch", "numpy", "scipy", "scikit-image", "torchvision")
"""Packages that determine the numbers: a baseline made with another version is stale."""

TESTED = (GateTest.PAIRED, GateTest.DELONG, GateTest.RATE)
"""The statistical tests; they need pairs."""

_HELP = "`leakgauge baseline update` makes a new baseline, `leakgauge check --rerun-base` compares with older code"


class Refusal(NamedTuple):
    """Why a measure cannot be judged: INCOMPLETE or NOT COMPARABLE."""

    verdict: Verdict
    reason: str


def problems(now: Measured, base: Measured) -> Iterable[str]:
    """Why two runs cannot be compared at all."""
    shared = now.by_key().keys() & base.by_key().keys()
    if now.study_hash != base.study_hash and all(base.by_key()[key].control for key in shared):
        studies = f"{now.study} {now.study_hash} against {base.study} {base.study_hash}"
        yield f"the run and the baseline are of different studies: {studies}; {_HELP}"
    for name in sorted(base.data):
        if now.data.get(name) != base.data.get(name):
            digests = f"{now.data.get(name, 'none')} against {base.data.get(name, 'none')}"
            yield f"the data of {name!r} differ from the baseline's: {digests}"
    stale = [name for name in NUMERIC if _release(now.packages.get(name)) != _release(base.packages.get(name))]
    if stale:
        changes = [f"{name} {base.packages.get(name, 'none')} to {now.packages.get(name, 'none')}" for name in stale]
        yield f"the baseline is stale: {', '.join(changes)}; {_HELP}"
    for which, run in (("run", now), ("baseline", base)):
        lost = len(run.measures) - len(run.by_key())
        if lost:
            yield f"{lost} measures of the {which} have duplicate keys"


def about_runs(now: Measured, base: Measured) -> Iterable[str]:
    """Warnings about two runs that can be compared; first how they were computed."""
    if unequal := unlike({"this run was": now.numerics, "the baseline was": base.numerics}):
        yield unequal
        yield "`leakgauge check --rerun-base` runs the code behind the baseline here, so that both are computed alike"
    if now.study_hash != base.study_hash:
        yield f"the study changed: {base.study} {base.study_hash} -> {now.study} {now.study_hash}"
    if now.machine != base.machine:
        yield f"another machine than the baseline's: {now.machine} against {base.machine}"
    packages = [(name, base.packages.get(name), now.packages.get(name)) for name in NUMERIC]
    builds = [f"{name} {was} to {is_now}" for name, was, is_now in packages if was and is_now and was != is_now]
    if builds:
        yield f"another build than the baseline's: {', '.join(builds)}"
    for which, run in (("run", now), ("baseline", base)):
        if not run.commit:
            yield f"the {which} does not say which commit made it"
        elif "," in run.commit:
            yield f"several commits made the {which}: {run.commit}"
        if run.dirty:
            yield f"the {which} was made by code that was not committed"


def refusal(new: Measure | None, old: Measure | None, rules: Rules) -> Refusal | None:
    """Why a measure cannot be judged; None if it can. At least one of the two exists."""
    if new is None:
        return Refusal(Verdict.INCOMPLETE, "removed: the run no longer has this measure")
    if lack := new.problem or _lack(new):
        return Refusal(Verdict.INCOMPLETE, f"the run has no number: {lack}")
    if old is None:
        return Refusal(Verdict.NOT_COMPARABLE, "new: the baseline does not have this measure")
    if lack := old.problem or _lack(old):
        return Refusal(Verdict.NOT_COMPARABLE, f"the baseline has no number: {lack}")
    if new.control != old.control:
        was, is_now = (measure.control or "a gated attack" for measure in (old, new))
        return Refusal(Verdict.NOT_COMPARABLE, f"its role is {is_now} in the run and {was} in the baseline")
    known = metric(new.metric)
    what = "records" if new.sides else known.items
    other, least = f"the run and the baseline have different {what}", max(rules.least, 2)
    if len(new.values) != len(old.values) or new.sides != old.sides:
        return Refusal(Verdict.NOT_COMPARABLE, f"{other}: {_size(new)} against {_size(old)}")
    if new.items != old.items:
        return Refusal(Verdict.NOT_COMPARABLE, f"{other}: their digests differ")
    fewest = len(of_images(new)) if known.gate is GateTest.PAIRED else min(map(min, new.sides), default=0)
    if known.gate in TESTED and fewest < least:
        why = f"{fewest} {what} are too few to tell a rise from noise: take {least} or more"
        return Refusal(Verdict.NOT_COMPARABLE, why)
    return None


def _lack(measure: Measure) -> str:
    needed: list[float | None] = [measure.value, *measure.values]
    test = metric(measure.metric).gate
    if test is None:
        return "the gate does not know this metric"
    if not measure.values and test is not GateTest.RATE:
        return "there are no values"
    lost = sum(finite(value) is None for value in needed)
    if lost:
        return f"{lost} of {len(needed)} numbers are missing or not finite"
    if test is GateTest.DELONG and sum(map(sum, measure.sides)) != len(measure.values):
        return f"{len(measure.values)} values for {_size(measure)} records"
    return ""


def finite(value: float | None) -> float | None:
    """The value, or None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def _size(measure: Measure) -> str:
    if measure.sides:
        return " and ".join(f"{members} + {others}" for members, others in measure.sides)
    return str(len(measure.values))


def _release(version: str | None) -> list[str]:
    return [] if version is None else version.split("+")[0].split(".")[:3]
