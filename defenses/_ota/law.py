"""The law of a waveform."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from leakgauge.harness.core.law import Law, LawError, Normal, Reading, expect_size
from leakgauge.harness.core.rng import Key, integers, uniform
from leakgauge.harness.core.stats import Numbers

_ROUNDING = 1e-13
"""Relative difference between a waveform without noise and its definition that float64 rounding explains."""


@dataclass(frozen=True, eq=False)
class Waveform(Law):
    """Float64 numbers: `center` [k] plus normal noise of standard deviation `spread`.

    A client that relies on the others' noise may send no noise of its own; its numbers are then compared with the
    center. The reading then holds the auditor's own random numbers, because nothing random is left to test.
    """

    center: Numbers
    spread: float

    def read(self, wire: bytes, own: Key) -> Reading:
        """Reads a waveform by the normal cdf."""
        count = len(self.center)
        expect_size(wire, 8 * count)
        sent, places = np.frombuffer(wire, "<f8"), np.arange(count)
        if self.spread > 0:
            # the terms of a float64 sum are no finer than the sum, so its last bits are not fair coins
            grid = np.exp2(np.ceil(np.log2(np.abs(self.center) + 16 * self.spread)) - 48)
            bits = np.rint(sent / grid).astype(np.int64) & 1
            lowest = (np.frombuffer(wire, "<u8") & 1).astype(np.int64)
            return Reading(Normal().uniforms((sent - self.center) / self.spread), places, bits, lowest)
        # not `>`, because a NaN would pass
        if not (np.abs(sent - self.center) <= _ROUNDING * np.abs(self.center)).all():
            raise LawError("a waveform without noise is not the projected update at its amplitude")
        drawn = uniform(own.child("noise"), (count,), dtype=torch.float64).numpy()
        coins = integers(own.child("bits"), count, 2)
        return Reading(drawn, places, coins, coins)
