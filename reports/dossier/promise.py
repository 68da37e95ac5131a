"""Page 2 of the dossier: the promises in words, whether a record was used, and how sure the test is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.rating import Finding, Word
from leakgauge.harness.core.result import AuditRecord, ClaimRecord, ProofRecord, chance
from leakgauge.reports.dossier.subject import Subject
from leakgauge.reports.dossier.words import CODES, UNITS, VERDICTS, ends, odds, times
from leakgauge.reports.sections.checked import checked, is_broken, is_unkept, severity, verdict_of
from leakgauge.reports.text.notation import grouped, listing, number, short

_UNMEASURED = "not measured"


def promise(subject: Subject) -> dict[str, object]:
    """What page 2 shows; of several trainings, the claims with the worst verdicts count."""
    page: dict[str, Any] = {"member": _member(subject), "sure": " ".join(_sure(subject))}
    page |= dict.fromkeys(("rows", "numbers", "broken"), "")
    pairs = [checked(training) for training in subject.trainings]
    if not pairs:
        return page | {"title": "No training finished: the promise was not checked."}
    one, whole = (max(claims, key=severity) for claims in zip(*pairs, strict=True))
    page |= {"title": _title(subject, one, whole), "numbers": _numbers(subject, one, whole)}
    if one.epsilon is not None or one.proved.epsilon is not None:
        page["rows"] = tuple(_rows(subject, one, whole))
    marked = [t for (first, _), t in zip(pairs, subject.trainings, strict=True) if is_unkept(first, t)]
    for kept in [violation for training in marked for violation in training.violations if violation.voids][:1]:
        page["broken"] = f"The promise assumes that {kept.assumption}. In this run, {grouped(kept.broken)} of "
        page["broken"] += f"{counted(kept.of, kept.what)} broke this."
    return page


def _rows(subject: Subject, one: ClaimRecord, whole: ClaimRecord) -> Iterator[tuple[str, str, str, str]]:
    """What the promise is about, and of 100 guesses, how many it, the proof and the measurement let be right."""
    audit = _audit(subject)
    several = subject.federation.rounds > 1
    yield UNITS.get(one.unit, one.unit) + ", one round" * several, *_row(one, audit)
    if several:
        yield f"The same, all {subject.federation.rounds} rounds", *_row(whole, audit)
    for proof in _further(subject, one):
        yield UNITS.get(proof.unit, proof.unit), "nothing", odds(proof.epsilon, proof.delta), _UNMEASURED


def _audit(subject: Subject) -> AuditRecord | None:
    return next((training.audited for training in subject.trainings if training.audited is not None), None)


def _row(claim: ClaimRecord, audit: AuditRecord | None) -> tuple[str, str, str]:
    fits = audit is not None and (audit.horizon, audit.unit) == (claim.horizon, claim.unit)
    measured = odds(audit.epsilon_lower, audit.delta) if fits and audit is not None else _UNMEASURED
    measured = f"at least {measured}" if measured[:1].isdigit() else measured
    promised = "nothing" if claim.epsilon is None else odds(claim.epsilon, claim.delta)
    return promised, odds(claim.proved.epsilon, claim.proved.delta), measured


def _further(subject: Subject, claim: ClaimRecord) -> list[ProofRecord]:
    """For each other unit, the weakest proof that covers the adversary: a whole message may show more than a part."""
    adversary = "" if subject.rating is None else subject.rating.adversary.split("+")[0]
    weakest: dict[str, ProofRecord] = {}
    for proof in claim.further:
        if proof.unit != claim.unit and adversary in proof.against:
            others = (weakest.get(proof.unit, proof), proof)
            weakest[proof.unit] = max(others, key=lambda p: math.inf if p.epsilon is None else p.epsilon)
    return list(weakest.values())


def _title(subject: Subject, one: ClaimRecord, whole: ClaimRecord) -> str:
    if one.epsilon is None and whole.epsilon is None:
        return "Nothing is promised."
    about = ["about single numbers, not about people"] if one.unit in ("coordinate", "sub-vector") else []
    if subject.rating is not None and subject.rating.excluded:
        about.append("not made against the observer of page 1")
    worst = max((one, whole), key=severity)
    verdict = VERDICTS.get(verdict_of(worst), verdict_of(worst).lower())
    proved = worst.proved
    if verdict == VERDICTS["HOLDS"] and (proved.epsilon is None or chance(proved.epsilon, proved.delta) > 0.99):
        verdict += ", but it is weak"
    elif "not kept" in verdict and worst.epsilon is not None and odds(worst.epsilon, worst.delta) == "all 100":
        verdict = f"{VERDICTS['VACUOUS']}; even so, it {verdict}"
    elif verdict == VERDICTS["VACUOUS"] and worst.epsilon is not None and (proved.epsilon or math.inf) <= worst.epsilon:
        verdict = f"is kept, but it {verdict}"
    later = worst is whole and severity(one) < severity(whole)
    when = f"Over all {subject.federation.rounds} rounds, the" if later else "The"
    return f"{when} promise {f'is {listing(about)}, and it ' if about else ''}{verdict}."


def _numbers(subject: Subject, one: ClaimRecord, whole: ClaimRecord) -> str:
    """The numbers behind the words, for the horizon that was measured."""
    audit = _audit(subject)
    claim = whole if audit is not None and audit.horizon == whole.horizon else one
    delta = f", δ = {short(claim.delta)}" if claim.delta else ""
    scope = f"per {claim.unit} for {'the ' * (claim is whole)}{claim.horizon}{delta}"
    loss = f"For experts: claimed privacy loss ε = {number(claim.epsilon)} {scope}"
    text = f"{loss}, proved {number(claim.proved.epsilon)}"
    if audit is None:
        return f"{text}. The program was not checked against its description."
    text += f"; measured: at least {short(audit.epsilon_lower)}, with {grouped(audit.trials)} trials"
    blame = (
        " What the description promises is more than that." if audit.code == "CONSISTENT" and is_broken(claim) else ""
    )
    return f"{text}. {CODES.get(audit.code, '')}{blame}".strip()


def _member(subject: Subject) -> str:
    """Whether a record that was used can be told from one that was not."""
    asked = [group for group in subject.groups if group.case.kind == "membership"]
    found = [one for rating in subject.ratings for one in rating.findings if subject.kind(one) == "membership"]
    if not found:
        why = "The attack that asks this did not finish." if asked else "The test did not ask this."
        return f"{why} The question is open."
    one = min(found, key=Finding.rank)
    apart = f"Of a used and an unused record, the attack names the used one in {times(one)} of the cases "
    apart += f"({ends(one)}; a coin: 50)."
    if one.beyond:
        return f"An observer can tell, better than by chance. {apart}"
    void = any(map(subject.analysis.is_void, asked)) * "Even without protection, it finds no more than chance. "
    return f"The test could not tell. {apart} {void}This does not show that nobody can."


def _sure(subject: Subject) -> Iterator[str]:
    if subject.used:
        yield _control(subject.bare)
    if not any(group.case.info.aware for group in subject.groups):
        yield "No attack made use of how the protection works: a better one may exist."
    if subject.word in (Word.WEAK, None):
        yield "Here it could not decide: page 1 says what is missing. A smaller leak can be missed."
    more = len(subject.attacked) < subject.federation.rounds
    yield f"The test attacked {rounds(subject)}{'; all together may tell more' if more else ''}."
    yield "Ranges in percent are right in 95 of 100 tests."
    if subject.accuracy is not None:
        known = [training.accuracy for training in subject.trainings if training.accuracy is not None]
        gap = counted(round(100 * (max(known) - min(known))), "percentage point")
        spread = f"; {len(known)} trainings differ by {gap}" if len(known) > 1 else ""
        yield f"The model’s right answers: on {counted(subject.trainings[0].test_samples, 'new record')}{spread}."
    if subject.lost:
        yield f"{subject.lost}."


def _control(bare: Subject | None) -> str:
    """Whether the attacks see anything where nothing is protected."""
    if bare is None:
        return "No system without protection was tested: what these attacks can see is unknown."
    if bare.word is Word.LEAKS and bare.people is not None:
        return f"The method works: without protection, the attack picks out {times(bare.people)} people."
    if bare.word in (Word.LEAKS, Word.SOME):
        return "The method works: without protection, the attacks find more than chance."
    return "Even without protection, the attacks find nothing: they may be too weak."


def rounds(subject: Subject) -> str:
    """How many rounds were attacked."""
    total = counted(subject.federation.rounds, "round")
    return f"{len(subject.attacked)} of {total}" if subject.attacked else "no message"
