"""Differences between the fingerprints of two versions of the code, and tests for a changed law of the messages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import UNDEFENDED
from leakgauge.harness.core.prints import DRAWN, DRAWS, STATISTICS, Print
from leakgauge.harness.core.stats import Numbers, holm
from leakgauge.harness.gate import rules as statistics
from leakgauge.harness.gate.judge import Check
from leakgauge.harness.gate.rules import Rise, Verdict

LEVEL = 0.01
"""Probability of a false alarm over all tests of draws."""

_LEAST = 0.01
"""A smaller relative change of a statistic does not count: rounding on another processor may cause it."""


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

    def concerns(self, defense: str, attack: str | None, *, control: bool) -> bool:
        """Whether a measure may have moved. Controls run with every change."""
        return bool(self.lines) and (control or self.training or defense in self.defenses or attack in self.attacks)


def compare(now: Iterable[Print], before: Iterable[Print]) -> Changed:
    """What differs. A change of the training explains all others; a change of a defense explains its attacks."""
    new, old = ({one.key: one for one in side} for side in (now, before))
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


def law_checks(now: Iterable[Print], before: Iterable[Print], changed: Changed) -> list[Check]:
    """Whether messages of the changed defenses follow another law: paired tests of the draws, in both directions.

    The tests are Student's t over the updates of one length, with Holm's correction over all tests of the run.

    Guarantees:
        If no law changed, the probability that any check fails is at most `LEVEL`.
    """
    old = {one.key: one for one in before}
    both = [
        (one, old[one.key])
        for one in now
        if one.what in DRAWN and one.key in old and (changed.training or one.defense in changed.defenses)
    ]
    if not both:
        return []
    tables = [[_table(one) for one in pair] for pair in both]
    rises = [statistics.paired(was, is_now) for is_now, was in tables]
    chances = [2 * np.minimum(rise.chance(), rise.falling().chance()) for rise in rises]
    adjusted = holm(np.concatenate([p.ravel() for p in chances])).clip(max=1.0)
    split = np.split(adjusted, np.cumsum([p.size for p in chances])[:-1])
    return [
        _law_check(one, was, rise, p.reshape(rise.mean.shape))
        for (one, _), (_, was), rise, p in zip(both, tables, rises, split, strict=True)
    ]


def _law_check(one: Print, was: Numbers, rise: Rise, p: Numbers) -> Check:
    """The check of one defense's draws [scales, statistics], with the rise of the most significant statistic."""
    through = np.arange(rise.mean.shape[1]) % len(STATISTICS) == 0
    least = np.where(through, _LEAST * np.abs(was.mean(-1)), _LEAST)
    fails = (p < LEVEL) & (np.abs(rise.mean) >= least)
    found = np.unravel_index(np.argmin(np.where(fails, p, 2.0)) if fails.any() else np.argmin(p), p.shape)
    name, before, mean = STATISTICS[found[1] % len(STATISTICS)], float(was.mean(-1)[found]), float(rise.mean[found])
    if through[found[1]]:
        moved = f"{name} went from {before:.4g} to {before + mean:.4g}"
    else:
        moved = f"{name} is {math.exp(mean):.3g} times what it was"
    at = f"round {found[1] // len(STATISTICS) + 1} of two, {was.shape[-1]} updates, p {float(p[found]):.2g} after Holm"
    words = f"{'' if fails.any() else 'no change detected; most significant: '}{moved} ({at})"
    return Check(
        key=f"{one.defense}/{one.what}/{one.case[:8]}",
        name=f"{one.defense}: {one.what}",
        metric="messages",
        aware=False,
        verdict=Verdict.FAIL if fails.any() else Verdict.PASS,
        before=before,
        now=before + mean,
        rise=mean,
        p=float(p[found]),
        n=was.shape[-1],
        reason=words,
    )


def _table(one: Print) -> Numbers:
    """The numbers of a fingerprint as [scales, statistics, draws]."""
    return np.array(one.numbers).reshape(-1, DRAWS, 2 * len(STATISTICS)).swapaxes(1, 2)
