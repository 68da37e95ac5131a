"""The flags of cells and trainings: caveats about their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leakgauge.harness.core.cell import Target
from leakgauge.harness.core.contract import Attack, Defense, Labels, Membership, Reconstruction
from leakgauge.harness.core.result import Estimate, Flag, TrainingRecord
from leakgauge.harness.federation.observe import Truth

_FEW = 8
"""With fewer images, noise hides any change of a mean."""


def cell_flags(
    attack: Attack,
    defense: Defense[Any, Any],
    target: Target,
    found: Reconstruction | Labels | Membership,
    truth: Truth,
    estimates: Sequence[Estimate],
) -> tuple[Flag, ...]:
    """The flags of one attack cell, most serious first."""
    flags = []
    if isinstance(found, Reconstruction):
        failed = [guess.failure for guess in found.guesses if guess.failure]
        if failed:
            reasons = "; ".join(sorted(set(failed)))
            flags.append(Flag("failed-victims", f"{len(failed)} of {len(found.guesses)} victims failed: {reasons}"))
        images = target.images if target.kind == "probe" else sum(len(victim.y) for victim in truth.victims)
        if found.prior:
            flags.append(Flag("prior", f"what the attack believes about inputs: {found.prior}", "note"))
        if images < _FEW:
            flags.append(Flag("few-images", f"{images} images; a comparison needs {_FEW} or more"))
    if target.kind == "probe" and not attack.floor:
        flags.append(Flag("probe", "the victim's batch is encoded alone, not as part of a real message", "note"))
    if defense.parameters() and not attack.aware and not attack.floor:
        flags.append(Flag("naive", "the attack ignores the defense: its value is a lower bound of the leakage", "note"))
    if truth.note:
        flags.append(Flag("candidates", truth.note, "warning" if "test set" in truth.note else "note"))
    flags += [Flag("not-available", f"{e.name}: {e.note}", "note") for e in estimates if e.value is None and e.note]
    return tuple(flags)


def training_flags(record: TrainingRecord, classes: int, unaudited: str = "") -> tuple[Flag, ...]:
    """The flags of one training; `unaudited`: why a requested audit is missing."""
    flags = []
    last = record.evaluations[-1]
    if last.accuracy is not None and last.accuracy <= 1.5 / classes:
        flags.append(Flag("no-learning", f"final accuracy {last.accuracy:.3f} is near chance (1 of {classes})"))
    if unaudited:
        flags.append(Flag("not-audited", f"the audit could not be made: {unaudited}", "note"))
    return tuple(flags)
