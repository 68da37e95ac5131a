"""The gate: whether a run leaks more than a baseline, by fixed rules.

| metric | FAIL | PASS |
|---|---|---|
| `ssim` | an image is newly recognizable, or the paired t test fails | the bound of the rise is tolerable |
| `auc` | DeLong's test for correlated curves fails | the same |
| `tpr@..` | the test of paired rates, threshold and all, fails | the same |
| `epsilon` | the largest over the seeds passes the claim, as the baseline's did not | no large rise |
| `bits` | the mean over the seeds rises by more than a share | all else |
| `accuracy` | the mean falls by more than a tolerance: no defense by breaking the model | all else |

What neither fails nor passes is INCONCLUSIVE. A test fails where its p, by Holm's method over all tests of the run, is
below the level, and the rise is no smaller than the margin.

An audited epsilon that rises below its claim never fails: with 100 trials, the lower bounds of one mechanism under 20
keys have a standard deviation of up to 1.4. That one passes a true claim has a known chance; that one rises has not.
The claim is the smaller of the run's and the baseline's, so that no claim can be lifted out of the way.

A control is never judged: no defense (the ceiling), an attack that looks at nothing (the floor). Where one moves, what
the attacks can do has changed, and a warning says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from leakgauge.harness.gate import comparable, words
from leakgauge.harness.gate import rules as tests
from leakgauge.harness.gate.comparable import RATES, TESTED, Refusal, numbers
from leakgauge.harness.gate.measure import Measure, Measured, by_seed
from leakgauge.harness.gate.rules import ROUNDING, Rise, Rules, Verdict

__all__ = ["Check", "Outcome", "Rules", "Verdict", "judge"]

_ORDER = list(Verdict)
_METRICS = ("ssim", "auc", "tpr@0.1%", "tpr@1%", "epsilon", "accuracy", "bits")
_CODES = {
    Verdict.FAIL: 1,
    Verdict.INCOMPLETE: 5,
    Verdict.NOT_COMPARABLE: 4,
    Verdict.INCONCLUSIVE: 0,
    Verdict.PASS: 0,
}


@dataclass(frozen=True)
class Check:
    """One measure, now and in the baseline, and what becomes of it.

    Attributes:
        key, name: of the measure; see `Measure`.
        metric: of the measure.
        aware: whether the attack knows the defense.
        before, now: values, of `epsilon` the largest over the seeds; None where there is none.
        rise: now - before; of `accuracy` also so, though there a fall is what counts.
        low, high: 90 % interval of the rise: each end is a one-sided 95 % bound. None where none is known.
        p: one-sided, adjusted by Holm over all tests of the run; None where the rule is no test.
        n: pairs behind the rise: images (the same image under several seeds is one), records, or seeds.
        smallest: the smallest rise that this check would have failed with probability 0.8; None where not known.
        images: indices into the values, from 0, of the images that are newly recognizable.
        reason: one sentence, for people, that stands by itself.
    """

    key: str
    name: str
    metric: str
    aware: bool
    verdict: Verdict
    before: float | None
    now: float | None
    rise: float | None
    low: float | None
    high: float | None
    p: float | None
    n: int
    smallest: float | None
    images: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What the gate says of a run.

    Attributes:
        checks: worst first: FAIL, INCOMPLETE, NOT COMPARABLE, INCONCLUSIVE, PASS; in each, images newly recognizable
            first, then by metric the largest rise.
        problems: why the two cannot be compared at all; then there are no checks.
        warnings: what a reader must know: another machine, code that was not committed, a ceiling that fell.
    """

    checks: tuple[Check, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst: FAIL, INCOMPLETE, NOT COMPARABLE, INCONCLUSIVE, PASS in this order.

        NOT COMPARABLE where nothing was checked.
        """
        if self.problems or not self.checks:
            return Verdict.NOT_COMPARABLE
        return min((check.verdict for check in self.checks), key=_ORDER.index)

    def exit_code(self, *, inconclusive_fails: bool = False) -> int:
        """0 no increase detected, 1 leakage increased, 3 inconclusive, 4 not comparable, 5 incomplete."""
        return 3 if inconclusive_fails and self.verdict is Verdict.INCONCLUSIVE else _CODES[self.verdict]


class _Pair(NamedTuple):
    """The same measure in both runs."""

    now: Measure
    base: Measure


class _Tested(NamedTuple):
    """A measure with its rise, before all tests of the run are judged together."""

    pair: _Pair
    before: float
    rise: Rise
    n: int
    images: tuple[int, ...] = ()


def judge(now: Measured, base: Measured, rules: Rules, *, noise_sd: float = 0.0) -> Outcome:
    """Check every gated measure of `now` against that of the same key in `base`.

    Args:
        noise_sd: standard deviation of an image's SSIM over repeated runs.

    Guarantees:
        The order of the measures in either run changes nothing.
        A measure without a finite number is never a PASS.
        Where no leakage rises, the chance that any test fails is at most `rules.level`, but for single images.
    """
    warnings = [*comparable.about_runs(now, base)]
    if problems := tuple(comparable.problems(now, base)):
        return Outcome((), problems, tuple(warnings))
    after, before = now.by_key(), base.by_key()
    checks: list[Check] = []
    tested: list[_Tested] = []
    for key in sorted(before.keys() | after.keys()):
        new, old = after.get(key), before.get(key)
        curve = comparable.curve(key)
        refusal = comparable.refusal(new, old, rules) or comparable.refusal(after.get(curve), before.get(curve), rules)
        if refusal or new is None or old is None:
            assert refusal is not None
            shown = new or old
            assert shown is not None
            controls = all(one is None or one.control for one in (new, old))
            if controls and refusal.verdict is Verdict.NOT_COMPARABLE:
                warnings.append(f"{shown.name}: this control is not compared: {refusal.reason}")
            else:
                checks.append(_refused(shown, new, old, refusal))
            continue
        pair, curves = _Pair(new, old), _Pair(after[curve], before[curve])
        if new.control:
            warnings += _about_control(pair, curves, rules, noise_sd)
        elif new.metric in TESTED:
            tested.append(_measure(pair, curves, rules, noise_sd))
        elif new.metric == "epsilon":
            checks.append(_epsilon(pair, rules))
            warnings += _about_claim(pair)
        else:
            checks.append(_training(pair, rules))
    checks += _together(tested, rules, noise_sd)
    if not checks:
        return Outcome((), ("there is nothing to check: no measure is gated",), tuple(warnings))
    checks.sort(key=_place)
    return Outcome(tuple(checks), (), tuple(warnings))


def _place(check: Check) -> tuple[int, bool, int, float, str]:
    """Where a check stands: the worst first, then images newly recognizable, then by metric the largest rise."""
    rise = math.inf if check.rise is None else -check.rise
    return _ORDER.index(check.verdict), not check.images, _METRICS.index(check.metric), rise, check.key


def _measure(pair: _Pair, curves: _Pair, rules: Rules, noise_sd: float) -> _Tested:
    """The rise of a measure that is tested; `curves` has the AUC of the same attack, for a rate."""
    new, old = pair
    if new.metric == "ssim":
        before, now = numbers(old), numbers(new)
        found = np.flatnonzero(tests.newly_recognizable(before, now, rules, noise_sd))
        before, now = comparable.by_image(before, old.items), comparable.by_image(now, new.items)
        return _Tested(pair, float(np.mean(before)), tests.paired(before, now), len(now), tuple(found.tolist()))
    sides = [*zip(*(by_seed(one.values, one.sides) for one in (curves.base, curves.now)), strict=True)]
    if new.metric == "auc":
        rise = tests.over_seeds([tests.delong(before, now) for before, now in sides])
        return _Tested(pair, _known(old.value), rise, len(new.values))
    rise = tests.over_seeds([tests.caught(before, now, RATES[new.metric]) for before, now in sides])
    return _Tested(pair, _known(old.value), rise, sum(len(members) for _, (members, _) in sides))


def _together(tested: Sequence[_Tested], rules: Rules, noise_sd: float) -> Iterable[Check]:
    """The checks of all tests of the run, whose chances are adjusted together."""
    if not tested:
        return
    rises = Rise(*(np.array(column, dtype=np.float64) for column in zip(*(one.rise for one in tested), strict=True)))
    decided = tests.decide(rises, np.array([bool(one.images) for one in tested]), rules)
    for number, one in enumerate(tested):
        new, old = one.pair
        verdict = Verdict.INCONCLUSIVE
        if decided.fails[number]:
            verdict = Verdict.FAIL
        elif decided.passes[number]:
            verdict = Verdict.PASS
        rise, p = one.rise, float(decided.p[number])
        error = float(rise.error)
        if new.metric == "ssim":
            error = max(error, noise_sd * math.sqrt(2 / one.n))
        smallest = tests.smallest(error, float(rise.df), len(tested), rules)
        reason = words.tested(verdict, _moved(one), p, smallest, rules)
        if one.images:
            reason = f"{words.recognizable(one.images, old.values, new.values, len(new.items))}; {_moved(one)}"
        yield Check(
            key=new.key,
            name=new.name,
            metric=new.metric,
            aware=new.aware,
            verdict=verdict,
            before=one.before,
            now=one.before + float(rise.mean),
            rise=float(rise.mean),
            low=float(rise.low()),
            high=float(rise.high()),
            p=p,
            n=one.n,
            smallest=smallest,
            images=one.images,
            reason=reason,
        )


def _moved(one: _Tested) -> str:
    """What the mean of a test did."""
    rise = one.rise
    return words.moved(one.pair.now.metric, float(rise.mean), float(rise.low()), float(rise.high()), one.n)


def _about_control(pair: _Pair, curves: _Pair, rules: Rules, noise_sd: float) -> Iterable[str]:
    """A warning where a control moved: the same test as of a check, by itself, on both sides."""
    if pair.now.metric not in TESTED:
        return
    one = _measure(pair, curves, rules, noise_sd)
    for rise, rose in ((one.rise, True), (one.rise.falling(), False)):
        if tests.decide(Rise(*(np.atleast_1d(x) for x in rise)), np.zeros(1, dtype=bool), rules).fails[0]:
            yield f"{pair.now.name}: {words.control(pair.now.control, _moved(one), rose=rose)}"


def _about_claim(pair: _Pair) -> Iterable[str]:
    """A warning where the claim itself is another one."""
    new, old = (math.inf if one.limit is None else one.limit for one in pair)
    if new != old and not math.isclose(new, old, rel_tol=ROUNDING):
        yield f"{pair.now.name}: {new:.4g} is claimed and {old:.4g} was; the audit may not pass the smaller one"


def _epsilon(pair: _Pair, rules: Rules) -> Check:
    """An audited lower bound beside what is claimed, by the largest over the seeds."""
    new, old = pair
    now, before = float(np.max(numbers(new))), float(np.max(numbers(old)))
    claim = min(math.inf if limit is None else limit for limit in (new.limit, old.limit))
    was_above = old.limit is not None and before > old.limit
    verdict = Verdict.PASS
    if now > claim and not was_above:
        verdict = Verdict.FAIL
    elif now - before > max(rules.audit_gap, rules.audit_share * before):
        verdict = Verdict.INCONCLUSIVE
    reason = words.audited(verdict, before, now, claim, was_above=was_above)
    return _untested(pair, verdict, before, now, (None, None), reason)


def _training(pair: _Pair, rules: Rules) -> Check:
    """Bits, which may not rise, or accuracy, which may not fall: by their means over the seeds."""
    new, old = pair
    after, earlier = numbers(new), numbers(old)
    now, before = float(np.mean(after)), float(np.mean(earlier))
    if new.metric == "bits":
        worse = now > before * (1 + rules.bits) + ROUNDING
        reason = words.bits(before, now, worse=worse, rules=rules)
    else:
        worse = before - now > rules.accuracy + ROUNDING
        reason = words.accuracy(before, now, worse=worse, rules=rules)
    ends: tuple[float | None, float | None] = (None, None)
    if len(after) > 1:
        rise = tests.paired(earlier, after)
        ends = (float(rise.low()), float(rise.high()))
    return _untested(pair, Verdict.FAIL if worse else Verdict.PASS, before, now, ends, reason)


def _untested(
    pair: _Pair,
    verdict: Verdict,
    before: float,
    now: float,
    ends: tuple[float | None, float | None],
    reason: str,
) -> Check:
    """The check of a rule that is no test."""
    new = pair.now
    return Check(
        key=new.key,
        name=new.name,
        metric=new.metric,
        aware=new.aware,
        verdict=verdict,
        before=before,
        now=now,
        rise=now - before,
        low=ends[0],
        high=ends[1],
        p=None,
        n=len(new.values),
        smallest=None,
        images=(),
        reason=reason,
    )


def _refused(shown: Measure, new: Measure | None, old: Measure | None, refusal: Refusal) -> Check:
    """The check of a measure that cannot be judged."""
    return Check(
        key=shown.key,
        name=shown.name,
        metric=shown.metric,
        aware=shown.aware,
        verdict=refusal.verdict,
        before=None if old is None else comparable.finite(old.value),
        now=None if new is None else comparable.finite(new.value),
        rise=None,
        low=None,
        high=None,
        p=None,
        n=0,
        smallest=None,
        images=(),
        reason=refusal.reason,
    )


def _known(value: float | None) -> float:
    """The value of a measure that has one."""
    assert value is not None
    return value
