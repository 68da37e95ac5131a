"""The flags of cells and trainings: caveats about their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leakgauge.harness.audit.attacked import Promised
from leakgauge.harness.audit.limit import Limit
from leakgauge.harness.core.cell import Target
from leakgauge.harness.core.contract import Answer, Attack, Defense, Reconstruction
from leakgauge.harness.core.form import SUCCESS
from leakgauge.harness.core.result import Estimate, Flag, TrainingRecord
from leakgauge.harness.federation.observe import Truth

_WEAK = 0.5  # an attack is called weak if the limit is below this share of its MSE
_AT_FLOOR = 0.9  # a limit is at the floor from this share of the mean image's MSE on
_FEW, _FEW_BATCHES = 8, 4  # the fewest images, and batches, for which noise does not hide changes of a mean


def cell_flags(
    attack: Attack,
    defense: Defense[Any, Any],
    target: Target,
    answer: Answer,
    truth: Truth,
    estimates: Sequence[Estimate],
    limits: Sequence[Limit] | str = "",
) -> tuple[Flag, ...]:
    """The flags of one attack cell, most serious first."""
    flags = []
    if isinstance(answer, Reconstruction):
        flags += [] if attack.floor else _by_limit({estimate.name: estimate for estimate in estimates}, limits)
        failed = [guess.failure for guess in answer.guesses if guess.failure]
        if failed:
            reasons = "; ".join(sorted(set(failed)))
            flags.append(Flag("failed-victims", f"{len(failed)} of {len(answer.guesses)} victims failed: {reasons}"))
        images = target.images if target.kind == "probe" else sum(len(victim.y) for victim in truth.victims)
        if answer.prior:
            flags.append(Flag("prior", f"what the attack believes about inputs: {answer.prior}", "note"))
        if images < _FEW:
            flags.append(Flag("few-images", f"{images} images; a comparison needs {_FEW} or more"))
        if target.batch > 1 and target.count < _FEW_BATCHES:
            flags.append(Flag("few-batches", f"{target.count} batches; an interval needs {_FEW_BATCHES} or more"))
    if target.kind == "probe" and not attack.floor:
        flags.append(Flag("probe", "the victim's batch is encoded alone, not as part of a real message", "note"))
    if defense.parameters() and not attack.aware and not attack.floor:
        flags.append(Flag("naive", "the attack ignores the defense: its value is a lower bound of the leakage", "note"))
    if truth.note:
        flags.append(Flag("candidates", truth.note, "warning" if "test set" in truth.note else "note"))
    flags += [Flag("not-available", f"{e.name}: {e.note}", "note") for e in estimates if e.value is None and e.note]
    return tuple(flags)


def _by_limit(estimates: Mapping[str, Estimate], limits: Sequence[Limit] | str) -> list[Flag]:
    """Whether the attack is far from the limit, or the limit is at the floor."""
    if isinstance(limits, str) or "efficiency" not in estimates:
        return []
    efficiency, mse = estimates["efficiency"].value, estimates["mse"].value
    limit, blind = sum(float(x.error.sum()) for x in limits), sum(float(x.blind.sum()) for x in limits)
    if limit >= _AT_FLOOR * blind:
        text = f"no linear estimate has less than {limit / blind:.0%} of the MSE of the mean image"
        return [Flag("strong-defense", text, "note")]
    if efficiency is None or efficiency >= _WEAK or mse is None or mse < SUCCESS or not limits[0].complete:
        return []
    text = f"its MSE is {1 / efficiency:.2g} times the limit: a better attack may find more"
    return [Flag("weak-attack", text)]


def promise_flags(shown: Sequence[Estimate], made: Promised) -> tuple[Flag, ...]:
    """Whether an attack refutes the claim or the proof; a refuted proof means that the code is not what was proved."""
    flags = []
    for bound in shown:
        value, attacker = (
            bound.value or 0.0,
            f"the attack shows an epsilon of at least {bound.value:.3g} ({bound.method})",
        )
        if value > made.proved:
            text = f"{attacker}, the proof says {made.proved:.3g}: the code or it is wrong"
            flags.append(Flag("proof-contradicted", text))
        if value > made.claimed:
            flags.append(
                Flag("claim-contradicted", f"{attacker}, the claim is {made.claimed:.3g} per {made.unit.value}")
            )
    return tuple(flags)


def notice_flag(noticed: Estimate) -> Flag:
    """How many clients notice a malicious server's broadcast, and by which tests."""
    share = f"{round(noticed.n * (noticed.value or 0.0))} of {noticed.n} clients notice"
    by = f", by the tests {noticed.note}" if noticed.note else "; this does not prove that they are honest"
    return Flag("detectable", f"{share} that the parameters are not honest{by}", "note")


def training_flags(
    record: TrainingRecord,
    classes: int,
    unaudited: str = "",
    *,
    misfits: Sequence[str] = (),
    data: str = "",
    unrepeated: str = "",
    scores: bool = True,
) -> tuple[Flag, ...]:
    """The flags of one training.

    Args:
        unaudited: why a requested audit is missing.
        misfits: what does not fit between recorded messages and what is said about them.
        data: changes to the data, and other facts that a reader must know about them.
        unrepeated: as `Training.unrepeated`.
        scores: whether the defense states a likelihood.
    """
    flags = [Flag("data", data, "note")] if data else []
    if misfits:
        text = "an attack on these messages says nothing about the defense"
        flags.append(Flag("misfit", f"{'; '.join(misfits)}: {text}"))
    if unrepeated:
        flags.append(Flag("not-repeatable", f"another run gives other numbers: {unrepeated}, not from a key"))
    if not scores:
        text = "the defense states no likelihood: attacks that need it fail, and there is no limit of reconstruction"
        flags.append(Flag("no-likelihood", text))
    last = record.evaluations[-1]
    if last.accuracy is not None and classes and last.accuracy <= 1.5 / classes:
        flags.append(Flag("no-learning", f"final accuracy {last.accuracy:.3f} is near chance (1 of {classes})"))
    if record.dropped:
        first, clients = record.dropped[0], len({dropped.client for dropped in record.dropped})
        text = f"{len(record.dropped)} updates of {clients} clients were dropped, the first of client {first.client}"
        flags.append(Flag("dropped-clients", f"{text} in round {first.round}: {first.reason}"))
    if unaudited:
        flags.append(Flag("not-audited", f"the audit could not be made: {unaudited}", "note"))
    return tuple(flags)
