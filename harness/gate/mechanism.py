"""The gate by code: the cells that a change of the code concerns run by both versions of it, and are compared.

1. The files that differ from the target branch are named, with the parts of the study behind which they are.
2. The cells behind them run by the code before and after, from the same fresh keys (`gate.replay`).
3. What differs must be acknowledged. Changed lines that did not run, new choices, and changed files that decide must be
   accepted by a person.
4. The messages of changed defenses are tested against the distribution of the old messages.
5. The measures of both runs are judged by the rules of `gate.judge`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from leakgauge.harness.core.cases import gathered, training_identity
from leakgauge.harness.core.cell import Cell
from leakgauge.harness.core.fingerprints import COLUMNS, DRAWN, DRAWS, ROUNDS, STATISTICS, Fingerprint
from leakgauge.harness.core.labels import UNDEFENDED, counted
from leakgauge.harness.core.stats import Numbers, holm
from leakgauge.harness.gate import rules as statistics
from leakgauge.harness.gate.baseline import Baseline
from leakgauge.harness.gate.changes import Changes, changes_since, new_choices
from leakgauge.harness.gate.judge import Check, Outcome, Verdict, judge
from leakgauge.harness.gate.measure import DIGITS, Measured, key_end, measured
from leakgauge.harness.gate.replay import Replay, differences, replay
from leakgauge.harness.gate.rerun import Bench
from leakgauge.harness.gate.rules import Rise
from leakgauge.harness.gate.target import Trusted
from leakgauge.harness.study.check import check_study
from leakgauge.harness.study.environment import origin
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Listener
from leakgauge.harness.study.study import load_study

LEVEL = 0.01
"""Probability of a false alarm over all tests of draws."""

_LEAST = 0.01
"""A smaller relative change of a statistic does not count: rounding may cause it."""

_MOST = 6
"""The most differences that are named one by one."""

_FILES = 20
"""Of more changed files of a folder that no cell reads, only their number is named."""


def gate(
    source: str, held: Trusted, own: Baseline, bench: Bench, number: int, listen: Listener | None = None
) -> tuple[Measured, Outcome]:
    """The measures of the cells that ran, and the outcome.

    Args:
        source: path or name of the study.
        held: the baseline of the target branch; without the commit of the target, the study runs whole.
        own: the baseline of the checkout, which acknowledges changes.
        bench: `bench.folder` is for the results.
        number: from which the replay draws.

    Raises:
        StudyError, StoreError: as `run_study`, or one of the two versions of the code cannot run the study.
    """
    if held.merge is None:
        return _whole(source, held, bench, listen)
    changes = changes_since(held.merge)
    if not changes.digests and not changes.others:
        cells = load_study(source, allow_code=bench.allow_code).cells
        return _judged(Replay(cells, None, None, None), held, changes, own, number)
    return _judged(replay(source, changes, number, bench), held, changes, own, number)


def _whole(source: str, held: Trusted, bench: Bench, listen: Listener | None) -> tuple[Measured, Outcome]:
    """All cells by this code, judged by the stored numbers: there is no code to compare with."""
    study = load_study(source, allow_code=bench.allow_code)
    check_study(study, bench.data)
    now = measured(run_study(study, bench.folder, data=bench.data, workers=bench.workers, listen=listen))
    return now, judge(now, held.baseline.measured, held.rules, gaps=held.baseline.gaps)


def _judged(replayed: Replay, held: Trusted, changes: Changes, own: Baseline, number: int) -> tuple[Measured, Outcome]:
    known, made_by = held.baseline.measured, origin()
    ends = _ends(replayed.cells)
    gone = tuple(measure for measure in known.measures if measure.key.rpartition("/")[2] not in ends)
    nothing = dataclasses.replace(
        known, measures=(), ratings=(), study_hash="", numerics=(), commit=made_by.commit, dirty=made_by.dirty,
        machine=made_by.machine, packages=made_by.packages,
    )  # fmt: skip
    missing = judge(nothing, dataclasses.replace(nothing, measures=gone), held.rules, gaps=held.baseline.gaps)
    checks, notes, problems = [*missing.checks] if gone else [], list[str](), tuple[str, ...]()
    unaccepted = [
        f"acknowledges another state of {file} than that of this checkout"
        for file, digest in _new(own, held.baseline).items()
        if changes.digests.get(file) != digest and file not in changes.others
    ]
    before, after, unchanged = replayed.before, replayed.after, len(known.measures) - len(gone)
    if replayed.behind is not None:
        notes += _named(changes, replayed)
    ran = nothing
    if before is not None and after is not None and replayed.behind is not None:
        ran, was = (_without_problems(side.measured, before.measured) for side in (after, before))
        changed = compare(after.fingerprints, before.fingerprints)
        strict = dataclasses.replace(held.rules, level=max(0.0, held.rules.level - LEVEL))
        judged = judge(ran, was, strict, gaps=held.baseline.gaps)
        checks += [*distribution_checks(after.fingerprints, before.fingerprints, changed), *judged.checks]
        notes, problems = [*notes, *judged.warnings], judged.problems
        unaccepted += _unacknowledged(replayed, changed, changes, own, held.baseline)
        unaccepted += _not_run(after.left)
        unaccepted += _untried(new_choices(changes, replayed.behind.files))
        notes.append(f"replayed from {number} by the code of {changes.before[:12]} and by this code: --draw repeats it")
        unchanged = max(0, unchanged - len(ran.measures))
    checks.sort(key=lambda check: list(Verdict).index(check.verdict))
    return ran, Outcome(tuple(checks), problems, tuple(notes), tuple(unaccepted), unchanged)


def _named(changes: Changes, replayed: Replay) -> Iterable[str]:
    files = replayed.behind.files if replayed.behind is not None else {}
    for file in sorted(changes.digests.keys() | files.keys()):
        parts = files.get(file, ["no cell of the study"])
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        yield f"changed: {file}, behind {', '.join(parts[:3])}{more}"
    folders = gathered((file.rpartition("/")[0] or ".", file) for file in sorted(changes.others.keys() - files.keys()))
    rest = [f"{at} ({len(of)} files)" if len(of) > _FILES else ", ".join(of) for at, of in folders.items()]
    if rest:
        yield f"also changed: {', '.join(rest)}"


def _without_problems(one: Measured, before: Measured) -> Measured:
    """The measures, without those that had no number before the change."""
    lost = {measure.key for measure in before.measures if measure.problem}
    return dataclasses.replace(one, measures=tuple(measure for measure in one.measures if measure.key not in lost))


def _new(own: Baseline, held: Baseline) -> dict[str, str]:
    """The files that the checkout's baseline acknowledges and the target's does not."""
    return {file: digest for file, digest in own.acknowledged.items() if held.acknowledged.get(file) != digest}


def _unacknowledged(replayed: Replay, changed: Changed, changes: Changes, own: Baseline, held: Baseline) -> list[str]:
    """What differs, unless the checkout's baseline acknowledges each file in its present state, for the first time."""
    before, after, files = replayed.before, replayed.after, replayed.behind.files if replayed.behind else {}
    if before is None or after is None:
        return []
    lines = [*changed.lines, *differences(before, after)]
    new = _new(own, held)
    digests = changes.digests | changes.others
    open_ = [file for file in files if new.get(file) != digests[file]]
    if not lines or not open_:
        return []
    rest = [f"{counted(len(lines) - _MOST, 'more difference')}"] if len(lines) > _MOST else []
    hint = "if that is meant, 'leakgauge baseline acknowledge' records it with a reason"
    told = [f"differs from the target branch: {line}" for line in [*lines[:_MOST], *rest]]
    return [*told, f"changed and not acknowledged: {', '.join(open_)}; {hint}"]


def _not_run(left: dict[str, list[int]]) -> Iterable[str]:
    for file, numbers in left.items():
        if numbers:
            yield f"changed, but not run by any replay, so nothing is known of it: {file}, lines {_listed(numbers)}"


def _untried(choices: dict[str, list[int]]) -> Iterable[str]:
    for file, numbers in choices.items():
        what = "a new condition, minimum, slice, or fact of the client, round or machine"
        yield f"{what}, of which a replay tries only some cases: {file}, lines {_listed(numbers)}"


def _listed(numbers: list[int]) -> str:
    return f"{', '.join(map(str, numbers[:8]))}{' ...' * (len(numbers) > 8)}"


def _ends(cells: Iterable[Cell]) -> set[str]:
    ends = {training_identity(cell.training)[:DIGITS] for cell in cells}
    return ends | {key_end(cell) for cell in cells}


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


def compare(now: Iterable[Fingerprint], before: Iterable[Fingerprint]) -> Changed:
    """What differs. A change of the training explains all others; a change of a defense explains its attacks."""
    new, old = ({fingerprint.key: fingerprint for fingerprint in side} for side in (now, before))
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
    shape = -1, DRAWS, COLUMNS
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
    round_, least_p = ROUNDS[place[1] // len(STATISTICS)], float(p[place])
    at = f"{round_} round, {was.shape[-1]} updates, p {least_p:.2g} after Holm"
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
