"""The gate: whether a run leaks more than a baseline, by fixed rules on the rows of `gate.compare`.

| metric | FAIL | PASS |
|---|---|---|
| `ssim` | the paired t test fails | the upper bound of the rise is tolerable |
| `auc` | DeLong's test for correlated curves fails | the same |
| `tpr@..` | the test of paired rates, which includes the noise of the threshold, fails | the same |
| `epsilon` | the largest over the seeds is above the claim, and the baseline's was not | no large rise |
| `contradicted` | the code of a seed contradicts its proof, and none of the baseline did | otherwise |
| `bits` | the mean over the seeds rises by more than a share | otherwise |
| `accuracy` | over four seeds or more, a fall above the tolerance with p < 0.001 (a broken model) | no such fall |
| `messages` | a statistic of the messages follows another distribution (`gate.mechanism`) | otherwise |

A check that neither fails nor passes is INCONCLUSIVE. A test fails if its p-value, adjusted by Holm over all tests of
the run, is below the level and the rise is at least the margin. An image that becomes recognizable is named but does
not decide: between two draws of the same noise, the SSIM of one image has a standard deviation of 0.07 to 0.42.

An audited epsilon that rises but stays below its claim never fails. With 100 trials, the lower bounds of one mechanism
under 20 keys have a standard deviation of up to 1.4. The probability that a bound exceeds a true claim is known; the
probability that a bound rises is not. The claim is the smaller of the run's and the baseline's, so a larger claim
cannot hide a leak.

Controls are never judged: no defense (the ceiling), and an attack that observes nothing (the floor). If a control
moves, the strength of the attacks has changed, and a warning is given.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.metrics import METRICS, GateTest, metric
from leakgauge.harness.gate import comparable
from leakgauge.harness.gate import rules as statistics
from leakgauge.harness.gate.comparable import TESTED
from leakgauge.harness.gate.compare import Row, numbers, rows
from leakgauge.harness.gate.compare import curve as curve_of
from leakgauge.harness.gate.measure import Measure, Measured, image_names
from leakgauge.harness.gate.rules import ROUNDING, Rise, Rules, Verdict

__all__ = ["Check", "Outcome", "Rules", "Verdict", "judge"]

_MOST = 3
"""The most images that a sentence names."""

_BROKEN = 0.001
"""A model counts as broken if the p-value of its fall in accuracy, over the seeds, is below this."""

_NAMES = {"bits": "bits of a parameter", "accuracy": "accuracy"}
"""The names of metrics of a training in a sentence, where they differ from the words of the metric."""

_ORDER = list(Verdict)
_CODES = dict(zip(Verdict, (1, 5, 4, 6, 0, 0), strict=True))


@dataclass(frozen=True)
class Check:
    """One measure, now and in the baseline, with its verdict.

    Attributes:
        key, name: of the measure; see `Measure`.
        metric: of the measure.
        aware: whether the attack knows the defense.
        before, now: values; for `epsilon` the largest over the seeds; None if there is no value.
        rise: now - before, for every metric; for `accuracy`, a fall is the failure.
        low, high: 90 % interval of the rise: each end is a one-sided 95 % bound. None if not known.
        p: one-sided, adjusted by Holm over all tests of the run; None if the rule is not a test.
        n: pairs behind the rise: images (the same image under several seeds counts once), records, or seeds.
        smallest: the smallest rise that this check detects with probability 0.8; None if not known.
        images: indices into the values, from 0, of the images that are newly recognizable.
        reason: one sentence for people that needs no context.
    """

    key: str
    name: str
    metric: str
    aware: bool
    verdict: Verdict
    before: float | None
    now: float | None
    rise: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    n: int = 0
    smallest: float | None = None
    images: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Outcome:
    """The verdict of the gate on a run.

    Attributes:
        checks: worst first: FAIL, INCOMPLETE, NOT COMPARABLE, INCONCLUSIVE, PASS; for the same verdict, checks with
            newly recognizable images first, then by metric the largest rise.
        problems: why the two runs cannot be compared at all; there are no checks then.
        warnings: for example another machine, uncommitted code, a new measure, or a ceiling that fell.
        unaccepted: changes of the baseline, of the rules or of the code that nobody accepted.
        unchanged: number of measures of the baseline that were not rerun, because the code behind them is unchanged.
    """

    checks: tuple[Check, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    unaccepted: tuple[str, ...] = ()
    unchanged: int = 0

    @property
    def verdict(self) -> Verdict:
        """The worst: FAIL, INCOMPLETE, NOT COMPARABLE, NOT ACCEPTED, INCONCLUSIVE, PASS in this order.

        NOT COMPARABLE if nothing was checked and no measure is unchanged; NOT ACCEPTED if nobody accepted a change.
        """
        if self.problems or not (self.checks or self.unchanged):
            return Verdict.NOT_COMPARABLE
        verdicts = [check.verdict for check in self.checks] or [Verdict.PASS]
        return min([*verdicts, Verdict.NOT_ACCEPTED] if self.unaccepted else verdicts, key=_ORDER.index)

    def exit_code(self, *, inconclusive_fails: bool = False) -> int:
        """0: no increase, 1: leakage increased, 3: inconclusive, 4: not comparable, 5: incomplete, 6: not accepted."""
        return 3 if inconclusive_fails and self.verdict is Verdict.INCONCLUSIVE else _CODES[self.verdict]


def _moved(row: Row) -> str:
    """The movement of the mean in words, with the 90 % interval of its rise."""
    assert row.rise is not None
    rise, known = float(row.rise.mean), metric(row.either.metric)
    verb = f"rose by {rise:.3f}" if rise > 0 else f"fell by {-rise:.3f}" if rise < 0 else "did not change"
    ends = f"{float(row.rise.low()):z.3f} to {float(row.rise.high()):z.3f}"
    return f"{known.words} {verb} (90 %: {'rise ' if rise < 0 else ''}{ends}) over {row.n[0]} {known.items}"


def judge(now: Measured, base: Measured, rules: Rules, *, gaps: Collection[str] = ()) -> Outcome:
    """Check every gated measure of `now` against the measure of the same key in `base`.

    Args:
        gaps: keys of measures that may lack as many numbers as in `base`; if one cannot be judged, a warning is given.

    Guarantees:
        The order of the measures in either run has no effect.
        A measure without a finite number is never a PASS.
        If no leakage rises, the probability that any test fails is at most `rules.level`.
    """
    warnings = [*comparable.about_runs(now, base)]
    if problems := tuple(comparable.problems(now, base)):
        return Outcome((), problems, tuple(warnings))
    after, before = now.by_key(), base.by_key()
    checks: list[Check] = []
    tested: list[Row] = []
    for row in sorted(rows(base, now), key=lambda row: row.key):
        key, new, old = row.key, row.after, row.before
        curve = curve_of(key)
        refusal = comparable.refusal(new, old, rules) or comparable.refusal(after.get(curve), before.get(curve), rules)
        if refusal is not None:
            shown = row.either
            accepted = key in gaps and new is not None and old is not None and new.n >= old.n
            controls = all(measure is None or measure.control for measure in (new, old))
            uncompared = (controls or old is None) and refusal.verdict is Verdict.NOT_COMPARABLE
            if accepted or uncompared:
                what = "this control" if controls else "this measure"
                words = f"a gap that the baseline accepts, {key}" if accepted else f"{what} is not compared"
                warnings.append(f"{shown.name}: {words}: {refusal.reason}")
            else:
                was, now_is = (None if measure is None else comparable.finite(measure.value) for measure in (old, new))
                checks.append(_check(shown, refusal.verdict, was, now_is, refusal.reason))
            continue
        test = metric(row.either.metric).gate
        if row.either.control:
            warnings += _about_control(row, rules)
        elif test in TESTED:
            tested.append(row)
        elif test is GateTest.AUDIT:
            checks.append(_epsilon(row, rules))
            warnings += _about_claim(row)
        else:
            checks.append(_never(row) if test is GateTest.NEVER else _training(row, rules))
    checks += _together(tested, rules)
    if not checks:
        return Outcome((), ("there is nothing to check: no measure is gated",), tuple(warnings))
    checks.sort(key=_place)
    return Outcome(tuple(checks), (), tuple(warnings))


def _place(check: Check) -> tuple[int, bool, int, float, str]:
    """Sort key: the worst first, then newly recognizable images, then by metric the largest rise."""
    rise = math.inf if check.rise is None else -check.rise
    return _ORDER.index(check.verdict), not check.images, list(METRICS).index(check.metric), rise, check.key


def _recognized(row: Row, rules: Rules) -> tuple[int, ...]:
    """Indices of the images that are newly recognizable."""
    old, new = row.both
    if metric(new.metric).recognizable is None:
        return ()
    images = np.flatnonzero((numbers(old) < rules.below) & (numbers(new) >= rules.above))
    return tuple(images[~np.isin(images, new.unseen)].tolist())


def _together(tested: Sequence[Row], rules: Rules) -> Iterable[Check]:
    rises = [row.rise for row in tested if row.rise is not None]
    if not rises:
        return
    columns = (np.array(column, dtype=np.float64) for column in zip(*rises, strict=True))
    decided = statistics.decide(Rise(*columns), rules)
    for number, (row, rise) in enumerate(zip(tested, rises, strict=True)):
        (old, new), images = row.both, _recognized(row, rules)
        assert row.start is not None
        otherwise = Verdict.PASS if decided.passes[number] else Verdict.INCONCLUSIVE
        verdict = Verdict.FAIL if decided.fails[number] else otherwise
        p = float(decided.p[number])
        smallest = statistics.smallest(float(rise.error), float(rise.df), len(tested), rules)
        reason = _tested_words(verdict, _moved(row), p, smallest, rules)
        if images:
            reason = f"{reason}; {_recognizable_words(images, old, new)}"
        yield replace(
            _check(new, verdict, row.start, row.start + float(rise.mean), reason),
            rise=float(rise.mean),
            low=float(rise.low()),
            high=float(rise.high()),
            p=p,
            n=row.n[0],
            smallest=smallest,
            images=images,
        )


def _about_control(row: Row, rules: Rules) -> Iterable[str]:
    """A warning if a control moved, by the same test as for a check, by itself and in both directions."""
    if metric(row.either.metric).gate not in TESTED or row.rise is None:
        return
    for rise, rose in ((row.rise, True), (row.rise.falling(), False)):
        if statistics.decide(Rise(*(np.atleast_1d(x) for x in rise)), rules).fails[0]:
            why = "without a defense, so the attack got " + (
                "stronger" if rose else "weaker; a pass is then weaker evidence"
            )
            if row.either.control == "floor":
                why = "this attack observes nothing, so the images or the score have changed"
            yield f"{row.either.name}: {_moved(row)}: {why}"


def _about_claim(row: Row) -> Iterable[str]:
    old, new = (math.inf if measure.limit is None else measure.limit for measure in row.both)
    if new != old and not math.isclose(new, old, rel_tol=ROUNDING):
        limit = "the audited bound may not exceed the smaller claim"
        yield f"{row.either.name}: {new:.4g} is claimed and {old:.4g} was; {limit}"


def _epsilon(row: Row, rules: Rules) -> Check:
    old, new = row.both
    now, before = float(np.max(numbers(new))), float(np.max(numbers(old)))
    claim = min(math.inf if limit is None else limit for limit in (new.limit, old.limit))
    was_above = old.limit is not None and before > old.limit
    verdict = Verdict.PASS
    if now > claim and not was_above:
        verdict = Verdict.FAIL
    elif now - before > max(rules.audit_gap, rules.audit_share * before):
        verdict = Verdict.INCONCLUSIVE
    reason = _audited_words(verdict, before, now, claim, was_above=was_above)
    return _untested(row, verdict, before, now, reason)


def _never(row: Row) -> Check:
    before, now = (float(np.mean(numbers(measure))) for measure in row.both)
    verdict = Verdict.FAIL if now > 0 and before == 0 else Verdict.PASS
    new = row.either
    reason = f"{metric(new.metric).words} in {now:.0%} of {len(new.values)} seeds, {before:.0%} before ({new.about})"
    return _untested(row, verdict, before, now, reason)


def _training(row: Row, rules: Rules) -> Check:
    (before, now), rise = (float(np.mean(numbers(measure))) for measure in row.both), row.rise
    known, seeds = metric(row.either.metric), len(row.either.values)
    name = _NAMES.get(known.name, known.words)
    if known.gate is GateTest.RISE:
        worse = now > before * (1 + rules.bits) + ROUNDING
        moved = f"{name} went from {before:.4g} to {now:.4g}"
        share = f", by {100 * (now / before - 1):.3g} %" if before > 0 else ""
        more = f"{moved}{share}, where {100 * rules.bits:g} % is allowed"
        reason = more if worse else f"no increase detected: {moved}"
    else:
        worse = before - now > rules.accuracy + ROUNDING
        moved = f"{name} went from {before:.3f} to {now:.3f}"
        fall = f"{moved}, a fall of more than {rules.accuracy:g}: a broken model is no protection"
        reason = fall if worse else f"no loss of more than {rules.accuracy:g} detected: {moved}"
    verdict = Verdict.FAIL if worse else Verdict.PASS
    if worse and known.gate is GateTest.FALL:
        if rise is None or seeds < rules.trainings:
            few = f"{counted(seeds, 'training')} cannot tell the fall from chance: take {rules.trainings} seeds"
            verdict, reason = Verdict.INCONCLUSIVE, f"{moved}; {few} or more"
        elif float(rise.falling().chance()) >= _BROKEN:
            verdict, reason = Verdict.INCONCLUSIVE, f"{moved}, a fall that the seeds do not show clearly"
    check = _untested(row, verdict, before, now, reason)
    return check if rise is None else replace(check, low=float(rise.low()), high=float(rise.high()))


def _untested(row: Row, verdict: Verdict, before: float, now: float, reason: str) -> Check:
    return replace(_check(row.either, verdict, before, now, reason), rise=now - before, n=len(row.either.values))


def _check(shown: Measure, verdict: Verdict, before: float | None, now: float | None, reason: str) -> Check:
    return Check(shown.key, shown.name, shown.metric, shown.aware, verdict, before, now, reason=reason)


def _tested_words(verdict: Verdict, moved: str, p: float, smallest: float, rules: Rules) -> str:
    chance = "p < 0.0001 after Holm" if p < 0.0001 else f"p {p:.2g} after Holm"
    if verdict is Verdict.FAIL:
        return f"{moved}, {chance}"
    if verdict is Verdict.INCONCLUSIVE:
        return f"{moved}, {chance}: no increase is shown, and one of {rules.tolerable:g} is not ruled out"
    what = f"no increase of {rules.margin:g} or more" if p < rules.level else "no increase"
    return f"{what} detected: {moved}; a rise of {smallest:.3f} would have been detected with probability 0.8"


def _recognizable_words(images: Sequence[int], old: Measure, new: Measure) -> str:
    """Which images are newly recognizable, counted from 1 within each seed, as on the page."""
    each = zip(image_names(images[:_MOST], new), images, strict=False)
    shown = [f"image {name} was {old.values[at]:.2f} and is {new.values[at]:.2f}" for name, at in each]
    more = f" and {len(images) - _MOST} more" if len(images) > _MOST else ""
    return f"{', '.join(shown)}{more}: newly recognizable in this one draw"


def _audited_words(verdict: Verdict, before: float, now: float, claim: float, *, was_above: bool) -> str:
    moved = f"the audited lower bound of epsilon is {now:.4g} and was {before:.4g}"
    claimed = f"the claim of {claim:.4g}" if math.isfinite(claim) else "no finite claim"
    if verdict is Verdict.FAIL:
        return f"{moved}: above {claimed}"
    place = f"above {claimed}, as it was" if was_above else f"against {claimed}"
    if verdict is Verdict.INCONCLUSIVE:
        return f"{moved}, {place}: a higher bound alone does not prove an increase"
    return f"no increase detected: {moved}, {place}"
