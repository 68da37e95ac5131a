"""A noise scale is named by the epsilon that it buys or by itself, never by both."""

from __future__ import annotations

from leakgauge.harness.core.checks import positive

DEFAULT_EPSILON = 8.0
"""Of a defense that is told neither."""


def epsilon_unless(epsilon: float | None, noise_std: float | None) -> float | None:
    """The epsilon that sets the noise, by default `DEFAULT_EPSILON`; None where `noise_std` sets it.

    Raises:
        ValueError: both are given, or the one that is given is not a finite number above zero.
    """
    if epsilon is not None and noise_std is not None:
        raise ValueError(f"expected epsilon or noise_std, got both: epsilon={epsilon} and noise_std={noise_std}")
    if noise_std is not None:
        positive(noise_std=noise_std)
        return None
    epsilon = DEFAULT_EPSILON if epsilon is None else epsilon
    positive(epsilon=epsilon)
    return epsilon


def check_delta(delta: float) -> None:
    """Refuse a delta that a claim cannot have.

    Raises:
        ValueError: it is not strictly between 0 and 1.
    """
    if not 0 < delta < 1:
        raise ValueError(f"expected 0 < delta < 1, got delta={delta}")
