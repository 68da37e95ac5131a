"""The sentences of the gate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from leakgauge.harness.gate.rules import Rules, Verdict

_LABELS = {
    "ssim": "mean SSIM",
    "auc": "AUC",
    "tpr@1%": "TPR at 1 % false alarms",
    "tpr@0.1%": "TPR at 0.1 % false alarms",
}
_MOST = 3
"""Images named in a sentence."""


def tested(verdict: Verdict, moved: str, p: float, smallest: float, rules: Rules) -> str:
    """Of a check that is a test, without its images."""
    chance = "p < 0.0001 after Holm" if p < 0.0001 else f"p {p:.2g} after Holm"
    if verdict is Verdict.FAIL:
        return f"{moved}, {chance}"
    if verdict is Verdict.INCONCLUSIVE:
        return f"{moved}, {chance}: no increase is shown, and one of {rules.tolerable:g} is not ruled out"
    what = f"no increase of {rules.margin:g} or more" if p < rules.level else "no increase"
    return f"{what} detected: {moved}; a rise of {smallest:.3f} would have been seen with probability 0.8"


def moved(metric: str, rise: float, low: float, high: float, n: int) -> str:
    """What a mean did, with the 90 % interval of its rise."""
    verb = f"rose by {rise:.3f}" if rise > 0 else f"fell by {-rise:.3f}" if rise < 0 else "did not change"
    ends = f"{low:z.3f} to {high:z.3f}"
    ends = f"rise {ends}" if rise < 0 else ends
    over = {"ssim": f"{n} images", "auc": f"{n} records"}.get(metric, f"{n} members")
    return f"{_LABELS[metric]} {verb} (90 %: {ends}) over {over}"


def recognizable(images: Sequence[int], before: Sequence[float | None], now: Sequence[float | None], seeds: int) -> str:
    """Which images are newly recognizable, counted from 1 within each seed, as on the page."""
    size = len(now) // max(1, seeds)
    names = [f"{at % size + 1} (seed no. {at // size + 1})" if seeds > 1 else str(at + 1) for at in images[:_MOST]]
    each = zip(names, images, strict=False)
    shown = [f"image {name} was {before[at]:.2f} and is {now[at]:.2f}" for name, at in each]
    more = f" and {len(images) - _MOST} more" if len(images) > _MOST else ""
    return f"{', '.join(shown)}{more}: newly recognizable"


def audited(verdict: Verdict, before: float, now: float, claim: float, *, was_above: bool) -> str:
    """Of an audit."""
    found = f"the audited lower bound of epsilon is {now:.4g} and was {before:.4g}"
    claimed = f"the claim of {claim:.4g}" if math.isfinite(claim) else "no finite claim"
    if verdict is Verdict.FAIL:
        return f"{found}: above {claimed}"
    place = f"above {claimed}, as it was" if was_above else f"against {claimed}"
    if verdict is Verdict.INCONCLUSIVE:
        return f"{found}, {place}: the rise of one bound is a hint, not a proof"
    return f"no increase detected: {found}, {place}"


def bits(before: float, now: float, *, worse: bool, rules: Rules) -> str:
    """Of the bits of a parameter."""
    found = f"bits of a parameter went from {before:.4g} to {now:.4g}"
    if worse:
        share = f", by {100 * (now / before - 1):.3g} %" if before > 0 else ""
        return f"{found}{share}, where {100 * rules.bits:g} % is allowed"
    return f"no increase detected: {found}"


def accuracy(before: float, now: float, *, worse: bool, rules: Rules) -> str:
    """Of the accuracy."""
    found = f"accuracy went from {before:.3f} to {now:.3f}"
    if worse:
        return f"{found}, a fall of more than {rules.accuracy:g}: a broken model is no protection"
    return f"no loss of more than {rules.accuracy:g} detected: {found}"


def control(kind: str, moved: str, *, rose: bool) -> str:
    """Of a control that moved."""
    if kind == "floor":
        return f"{moved}: this attack looks at nothing, so the images or the score have changed"
    if rose:
        return f"{moved}: without a defense, so the attack got stronger"
    return f"{moved}: without a defense, so the attack lost strength and a pass says less"
