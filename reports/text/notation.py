"""How numbers, intervals, names and epsilons are written, the same on every page and in every table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from leakgauge.harness.core.metrics import metric
from leakgauge.harness.core.result import ClaimRecord, Estimate, ProofRecord
from leakgauge.harness.core.threats import Threat

NO_VALUE = "n/a"
NO_PROMISE = "∞ (nothing promised)"
INFINITE = "∞"
_GROUP = "\u00a0"
"""Separator of thousands: a no-break space."""

_ADVERSARIES = [threat.value for threat in Threat]
_EXPONENT = re.compile(r"e([+-])0*(\d+)$")


def grouped(count: int) -> str:
    """A whole number in groups of three digits."""
    return f"{count:,}".replace(",", _GROUP)


def _sign(text: str) -> str:
    """The text with a real minus sign, and zero without a sign."""
    if text.startswith("-") and not text.strip("-0."):
        text = text[1:]
    return text.replace("-", "−")


def fixed(value: float | None, digits: int = 3) -> str:
    """A number with this many decimals; `n/a` for None."""
    return NO_VALUE if value is None else _sign(f"{value:.{digits}f}")


def short(value: float | None, digits: int = 4) -> str:
    """A number with this many significant digits, large numbers grouped: `57 930`; `n/a` for None."""
    if value is None:
        return NO_VALUE
    if 1e4 <= abs(value) < 1e9:
        return _sign(f"{float(f'{value:.{digits}g}'):,.0f}".replace(",", _GROUP))
    return _sign(_EXPONENT.sub(r"e\1\2", f"{value:.{digits}g}").replace("e+", "e"))


def measured(estimate: Estimate) -> str:
    """The value of an estimate with its unit: three decimals, or significant digits if these show too little."""
    value = estimate.value
    if value is None:
        return NO_VALUE
    if estimate.unit == "dB":
        return f"{fixed(value, 1)} dB"
    text = fixed(value) if value == 0 or 0.01 <= abs(value) < 1000 or is_bounded(estimate.name) else short(value, 3)
    return f"{text} {estimate.unit}".strip()


def is_bounded(name: str) -> bool:
    """Whether a metric has a largest value, so that three decimals suffice."""
    return metric(name).high is not None


def interval(estimate: Estimate) -> str:
    """`0.180 to 0.246`; empty without an interval."""
    if estimate.value is None:
        return ""
    write = fixed if is_bounded(estimate.name) or abs(estimate.value) >= 0.01 else short
    return spread(estimate.low, estimate.high, write)


def spread(low: float | None, high: float | None, write: Callable[[float], str] = short) -> str:
    """The two ends of an interval; empty without an interval."""
    return "" if low is None or high is None else f"{write(low)} to {write(high)}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share as a percentage."""
    return NO_VALUE if share is None else f"{_sign(f'{100 * share:.{digits}f}')} %"


def points(share: float) -> str:
    """A difference of two shares in percentage points, with its sign."""
    return f"+{100 * share:.1f}" if share > 0 else _sign(f"{100 * share:.1f}")


def listing(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *head, last = list(words) or [""]
    return f"{', '.join(head)} and {last}" if head else last


def first_line(text: str) -> str:
    """The first line of a message."""
    return (text.splitlines() or [""])[0]


def adversaries(names: Iterable[str]) -> str:
    """The adversaries of a claim: names in a fixed order, `every adversary` or `no adversary`."""
    distinct = set(names)
    if distinct >= set(_ADVERSARIES):
        return "every adversary"
    return listing(sorted(distinct, key=lambda name: ([*_ADVERSARIES, name].index(name), name))) or "no adversary"


def size(count: float) -> str:
    """A number of bytes: `512 B`, `3.9 kB`, `1.2 MB`."""
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """A time: `0.4 s`, `3 min`, `2.1 h`."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def epsilon(claims: Sequence[ClaimRecord], digits: int = 4) -> str:
    """The claimed epsilon of one defense over its seeds: a number, a range, or no promise."""
    if any(claim.epsilon is None for claim in claims):
        return NO_PROMISE
    return over_seeds([claim.epsilon for claim in claims], digits)


def bound(proofs: Sequence[ProofRecord], digits: int = 4) -> str:
    """The proved epsilon of one defense over its seeds: a number or a range, up to ∞."""
    return over_seeds([proof.epsilon for proof in proofs], digits)


def number(value: float | None) -> str:
    """One epsilon; None is infinity."""
    return INFINITE if value is None else short(value)


def over_seeds(values: Sequence[float | None], digits: int = 4) -> str:
    """One epsilon or the range of several epsilons; None is infinity."""
    finite = sorted(value for value in values if value is not None)
    if not values:
        return NO_VALUE
    low = short(finite[0], digits) if finite else INFINITE
    high = short(finite[-1], digits) if len(finite) == len(values) else INFINITE
    return low if low == high else f"{low} to {high} over the seeds"


def per(unit: str, delta: float) -> str:
    """Unit and delta of an epsilon; the horizon is shown separately."""
    return f"per {unit}, δ = {short(delta)}"
