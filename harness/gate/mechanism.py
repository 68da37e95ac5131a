"""The gate by code: only cells that a change of the code or the study affects are rerun and judged.

1. The fingerprints of the code are compared with those in the target branch's baseline. Cells that no change affects
   are not run.
2. A changed part must be acknowledged: the fingerprints in the checkout's baseline must be those of its code.
3. The messages of changed defenses are tested against the distribution of the old messages.
4. The cells behind changed parts run, together with the controls, and are judged by the rules of `gate.judge`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from leakgauge.harness.core.cases import gathered, training_identity
from leakgauge.harness.core.cell import Cell, PartSpec
from leakgauge.harness.core.fingerprints import DRAWN, DRAWS, STATISTICS, Fingerprint
from leakgauge.harness.core.labels import UNDEFENDED
from leakgauge.harness.core.stats import Numbers, holm
from leakgauge.harness.gate import rules as statistics
from leakgauge.harness.gate.baseline import Baseline
from leakgauge.harness.gate.judge import Check, Outcome, Verdict, judge
from leakgauge.harness.gate.measure import DIGITS, Measured, key_end, measured
from leakgauge.harness.gate.rules import Rise, Rules
from leakgauge.harness.study.check import check_study
from leakgauge.harness.study.environment import environment
from leakgauge.harness.study.fingerprints import take
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Listener
from leakgauge.harness.study.study import Study

LEVEL = 0.01
"""Probability of a false alarm over all tests of draws."""

_LEAST = 0.01
"""A smaller relative change of a statistic does not count: rounding on another processor may cause it."""

_ACKNOWLEDGE = "if that is meant, 'leakgauge baseline acknowledge' records it with a reason"


def gate(
    study: Study,
    folder: Path,
    held: Baseline,
    own: Baseline,
    rules: Rules,
    *,
    data: Path | None = None,
    workers: int | None = None,
    listen: Listener | None = None,
) -> tuple[Measured, Outcome]:
    """The measures of the cells that ran, and the outcome.

    Args:
        folder: for the results of the cells that run.
        held: the baseline of the target branch.
        own: the baseline of the checkout, which acknowledges changes.

    Raises:
        StudyError, StoreError: as `run_study`.
    """
    check_study(study, data)
    now = take(study.cells, data)
    changed = compare(now, held.fingerprints)
    # parts with unchanged code are included: otherwise a baseline could be prepared for a later change
    differing = compare(now, own.fingerprints).lines if held.fingerprints or own.fingerprints else ()
    unaccepted = tuple(f"differs from the baseline of this checkout: {line}; {_ACKNOWLEDGE}" for line in differing)
    cells = [cell for cell in study.cells if changed.concerns(cell.training.defense, cell.attack)]
    ends, known = _ends(study.cells), held.measured.measures
    behind = [
        measure
        for measure in known
        if _end(measure.key) not in ends or changed.concerns(measure.defense, measure.attack)
    ]
    unchanged, made_by = len(known) - len(behind), environment()
    nothing = dataclasses.replace(
        held.measured,
        measures=(),
        ratings=(),
        commit=made_by.commit,
        dirty=made_by.dirty,
        machine=made_by.machine,
        packages=made_by.packages,
    )
    if not behind and not cells:
        return nothing, Outcome((), (), (), unaccepted, unchanged)
    ran = nothing
    if cells:
        affected = dataclasses.replace(study, cells=tuple(cells))
        ran = measured(run_study(affected, folder, data=data, workers=workers, listen=listen, part=True))
    # a training that runs only for an attack has measures that cannot have moved; the folder may hold other cells
    left, asked = {measure.key for measure in known} - {measure.key for measure in behind}, _ends(cells)
    kept = tuple(measure for measure in ran.measures if measure.key not in left and _end(measure.key) in asked)
    ran = dataclasses.replace(ran, measures=kept, ratings=ran.ratings if len(cells) == len(study.cells) else ())
    notes = [] if unaccepted else [f"changed, acknowledged ({own.reason}): {line}" for line in changed.lines]
    distributions = distribution_checks(now, held.fingerprints, changed)
    base = dataclasses.replace(held.measured, measures=tuple(behind), study_hash=ran.study_hash)
    judged = judge(ran, base, dataclasses.replace(rules, level=max(0.0, rules.level - LEVEL)), gaps=held.gaps)
    checks = sorted([*distributions, *judged.checks], key=lambda check: list(Verdict).index(check.verdict))
    return ran, Outcome(tuple(checks), judged.problems, (*notes, *judged.warnings), unaccepted, unchanged)


def _ends(cells: Iterable[Cell]) -> set[str]:
    ends = {training_identity(cell.training)[:DIGITS] for cell in cells}
    return ends | {key_end(cell) for cell in cells}


def _end(key: str) -> str:
    return key.rpartition("/")[2]


class Changed(NamedTuple):
    """What differs between two versions of the code.

    Attributes:
        lines: one for each part, in words.
        training: whether the training without a defense differs.
        defenses: keys of the defenses whose messages, training or claim differ.
        attacks: keys of the attacks that differ although their defense does not.
    """

    lines: tuple[str, ...] = ()
    training: bool = False
    defenses: frozenset[str] = frozenset()
    attacks: frozenset[str] = frozenset()

    def concerns(self, defense: PartSpec, attack: PartSpec | None) -> bool:
        """Whether a change affects a cell or a measure. Those without a defense are controls: they run with each."""
        every = self.training or defense.name == UNDEFENDED or defense.key in self.defenses
        return bool(self.lines) and (every or (attack is not None and attack.key in self.attacks))


def compare(now: Iterable[Fingerprint], before: Iterable[Fingerprint]) -> Changed:
    """What differs. A change of the training explains all others; a change of a defense explains its attacks."""
    new, old = ({fingerprint.key: fingerprint for fingerprint in side} for side in (now, before))
    if not old:
        return Changed(("the baseline has no fingerprints",), training=True)
    differ = [key for key in {**new, **old} if key not in new or key not in old or not new[key].like(old[key])]
    if any(what == "training" and defense == UNDEFENDED for what, defense, *_ in differ):
        return Changed(("local training or the federated loop",), training=True)
    kinds = gathered((defense, what) for what, defense, *_ in differ if what != "attack")
    attacks = {attack for what, defense, attack, _ in differ if what == "attack" and defense not in kinds}
    lines = [f"{defense}: {', '.join(dict.fromkeys(whats))}" for defense, whats in kinds.items()]
    lines += [f"{attack}: the attack" for attack in sorted(attacks)]
    return Changed(tuple(lines), False, frozenset(kinds), frozenset(attacks))


def distribution_checks(now: Iterable[Fingerprint], before: Iterable[Fingerprint], changed: Changed) -> list[Check]:
    """Whether messages of the changed defenses follow another distribution: paired tests of the draws, in both
    directions.

    The tests are Student's t over the updates of one length, with Holm's correction over all tests of the run.

    Guarantees:
        If no distribution changed, the probability that any check fails is at most `LEVEL`.
    """
    old = {fingerprint.key: fingerprint for fingerprint in before}
    both = [
        (fingerprint, old[fingerprint.key])
        for fingerprint in now
        if fingerprint.what in DRAWN
        and fingerprint.key in old
        and (changed.training or fingerprint.defense in changed.defenses)
    ]
    if not both:
        return []
    shape = -1, DRAWS, 2 * len(STATISTICS)
    tables = [[np.array(fingerprint.numbers).reshape(shape).swapaxes(1, 2) for fingerprint in pair] for pair in both]
    rises = [statistics.paired(was, is_now) for is_now, was in tables]
    chances = [2 * np.minimum(rise.chance(), rise.falling().chance()) for rise in rises]
    adjusted = holm(np.concatenate([p.ravel() for p in chances])).clip(max=1.0)
    split = np.split(adjusted, np.cumsum([p.size for p in chances])[:-1])
    return [
        _distribution_check(fingerprint, was, rise, p.reshape(rise.mean.shape))
        for (fingerprint, _), (_, was), rise, p in zip(both, tables, rises, split, strict=True)
    ]


def _distribution_check(fingerprint: Fingerprint, was: Numbers, rise: Rise, p: Numbers) -> Check:
    """The check of one defense's draws [scales, statistics], with the rise of the most significant statistic."""
    through = np.arange(rise.mean.shape[1]) % len(STATISTICS) == 0
    least = np.where(through, _LEAST * np.abs(was.mean(-1)), _LEAST)
    fails = (p < LEVEL) & (np.abs(rise.mean) >= least)
    place = np.unravel_index(np.argmin(np.where(fails, p, 2.0)) if fails.any() else np.argmin(p), p.shape)
    name, before, mean = STATISTICS[place[1] % len(STATISTICS)], float(was.mean(-1)[place]), float(rise.mean[place])
    if through[place[1]]:
        moved = f"{name} went from {before:.4g} to {before + mean:.4g}"
    else:
        moved = f"{name} is {math.exp(mean):.3g} times what it was"
    round_, least_p = place[1] // len(STATISTICS) + 1, float(p[place])
    at = f"round {round_} of two, {was.shape[-1]} updates, p {least_p:.2g} after Holm"
    words = f"{'' if fails.any() else 'no change detected; most significant: '}{moved} ({at})"
    return Check(
        key=f"{fingerprint.defense}/{fingerprint.what}/{fingerprint.case[:8]}",
        name=f"{fingerprint.defense}: {fingerprint.what}",
        metric="messages",
        aware=False,
        verdict=Verdict.FAIL if fails.any() else Verdict.PASS,
        before=before,
        now=before + mean,
        rise=mean,
        p=least_p,
        n=was.shape[-1],
        reason=words,
    )
