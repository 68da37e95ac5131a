"""How numbers, intervals, targets and epsilons are written; every page and table says them the same way."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from leakgauge.harness.core.cell import Target
from leakgauge.harness.core.result import ClaimRecord, Estimate, ProofRecord

NO_VALUE = "n/a"
NO_PROMISE = "∞ (nothing promised)"
INFINITE = "∞"
METRICS = {
    "ssim": "mean SSIM",
    "mse": "MSE",
    "psnr": "PSNR",
    "label_accuracy": "labels right",
    "exact": "victims with all labels right",
    "recognized": "recognized",
    "success": "success",
    "failed": "failed",
    "auc": "AUC",
    "tpr@1%": "TPR at 1 % FPR",
    "tpr@0.1%": "TPR at 0.1 % FPR",
    "balanced_accuracy": "balanced accuracy",
}
_GROUP = "\u00a0"
"""Between thousands: a space that does not break a line."""

_ADVERSARIES = ("server", "colluding-server", "eavesdropper", "participant", "public")
"""All threat models, as `harness.core.threats.Threat` names them."""

_EXPONENT = re.compile(r"e([+-])0*(\d+)$")


def _sign(text: str) -> str:
    """A real minus sign, and no minus zero."""
    if text.startswith("-") and not text.strip("-0."):
        text = text[1:]
    return text.replace("-", "−")


def fixed(value: float | None, digits: int = 3) -> str:
    """A number with so many decimals; `n/a` for None."""
    return NO_VALUE if value is None else _sign(f"{value:.{digits}f}")


def short(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits, large ones grouped: `57 930`; `n/a` for None."""
    if value is None:
        return NO_VALUE
    text = f"{value:.{digits}g}"
    if 1e4 <= abs(value) < 1e9:
        return _sign(f"{float(text):,.0f}".replace(",", _GROUP))
    return _sign(_EXPONENT.sub(r"e\1\2", text).replace("e+", "e"))


def measured(estimate: Estimate) -> str:
    """The value of an estimate with its unit: three decimals where these say something, else significant digits."""
    value = estimate.value
    if value is None:
        return NO_VALUE
    if estimate.unit == "dB":
        return f"{fixed(value, 1)} dB"
    text = fixed(value) if value == 0 or 0.01 <= abs(value) < 1000 or is_bounded(estimate.name) else short(value, 3)
    return f"{text} {estimate.unit}".strip()


def is_bounded(name: str) -> bool:
    """Whether a metric lies between -1 and 1, so that three decimals always say enough."""
    return name in METRICS and name not in ("mse", "psnr")


def interval(estimate: Estimate) -> str:
    """`0.180 to 0.246`, or nothing where there is no interval."""
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return ""
    write = fixed if is_bounded(estimate.name) or abs(estimate.value) >= 0.01 else short
    return f"{write(estimate.low)} to {write(estimate.high)}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share of one as a percentage."""
    return NO_VALUE if share is None else f"{_sign(f'{100 * share:.{digits}f}')} %"


def points(share: float) -> str:
    """A difference of two shares, in percentage points with its sign."""
    return f"+{100 * share:.1f}" if share > 0 else _sign(f"{100 * share:.1f}")


def plural(count: int, noun: str) -> str:
    """`1 cell`, `2 cells`, `4 batches`."""
    ending = "es" if noun.endswith(("ch", "x", "s")) else "s"
    return f"{count:,}".replace(",", _GROUP) + f" {noun}" + ("" if count == 1 else ending)


def listing(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *head, last = list(words) or [""]
    return f"{', '.join(head)} and {last}" if head else last


def first_line(text: str) -> str:
    """The first line of a message."""
    return (text.splitlines() or [""])[0]


def adversaries(names: Iterable[str]) -> str:
    """Whom a claim is about: names in a fixed order, `every adversary` or `nobody`."""
    found = set(names)
    if found >= set(_ADVERSARIES):
        return "every adversary"
    return listing(sorted(found, key=lambda name: ([*_ADVERSARIES, name].index(name), name))) or "nobody"


def size(count: float) -> str:
    """Bytes for people: `512 B`, `3.9 kB`, `1.2 MB`."""
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float | None) -> str:
    """Seconds for people: `0.4 s`, `3 min`, `2.1 h`."""
    if seconds is None:
        return NO_VALUE
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def metric(name: str) -> str:
    """The name of a metric for people."""
    return METRICS.get(name, name)


def where(target: Target) -> str:
    """What an attack is aimed at: `probe, round 0`, `probe, rounds 2 to 5`, `members of client 3, rounds 0 to 9`."""
    kind = target.kind if target.client is None else f"{target.kind} of client {target.client}"
    if target.round is None:
        return kind
    last = f" to {target.round + target.rounds - 1}" if target.rounds > 1 else ""
    batch = f", batch {target.batch}" if target.batch > 1 else ""
    users = f", {target.users} users at once" if target.users > 1 else ""
    return f"{kind}, round{'s' if last else ''} {target.round}{last}{batch}{users}"


def epsilon(claims: Sequence[ClaimRecord], digits: int = 4) -> str:
    """The claimed epsilon of one defense's trainings: a number, a range over the seeds, or that nothing is promised."""
    if any(claim.epsilon is None for claim in claims):
        return NO_PROMISE
    return over_seeds([claim.epsilon for claim in claims], digits)


def bound(proofs: Sequence[ProofRecord], digits: int = 4) -> str:
    """The proved epsilon of one defense's trainings: a number or a range over the seeds, up to ∞."""
    return over_seeds([proof.epsilon for proof in proofs], digits)


def over_seeds(values: Sequence[float | None], digits: int = 4) -> str:
    """A number, or its range; None is infinity."""
    finite = sorted(value for value in values if value is not None)
    if not values:
        return NO_VALUE
    low = short(finite[0], digits) if finite else INFINITE
    high = short(finite[-1], digits) if len(finite) == len(values) else INFINITE
    return low if low == high else f"{low} to {high} over the seeds"


def per(unit: str, delta: float) -> str:
    """What an epsilon covers and at which delta, in words; its horizon stands beside it."""
    return f"per {unit}, δ = {short(delta)}"
