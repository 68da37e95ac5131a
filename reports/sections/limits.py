"""The limits of a report, derived from the cells that ran and the cells that did not run."""

from __future__ import annotations

from collections.abc import Iterator

from leakgauge.harness.core.labels import UNDEFENDED, counted
from leakgauge.harness.core.metrics import RECOGNIZABLE
from leakgauge.reports.sections import Section
from leakgauge.reports.sections.checked import tally
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.notation import listing

_TEMPLATE = """<h2 id="limits-title">{{ title }}</h2>
<p class="lead">Read the numbers of this report with these limits:</p>
<ul class="limits">
{% for limit in data %}
<li>{{ limit }}</li>
{% endfor %}
</ul>
"""

FEW_IMAGES = 8
FEW_SEEDS = 3


def _attacks(analysis: Analysis) -> Iterator[str]:
    infos = {group.case.info.name: group.case.info for group in analysis.attacked}
    if not infos:
        yield "No attack was planned: the report has no number on leakage."
        return
    aware = [name for name, info in infos.items() if info.aware]
    naive = [name for name, info in infos.items() if not info.aware]
    ignored = f"{listing(naive)} {'ignores' if len(naive) == 1 else 'ignore'} the defense"
    yield f"Only these attacks ran: {listing(infos)}. Another attack may succeed where these fail."
    if aware:
        uses = f"{listing(aware)} {'uses' if len(aware) == 1 else 'use'} knowledge of the defense"
        rest = f"; {ignored}" if naive else ""
        yield f"An attack that is better adapted to the defense may learn more: {uses}{rest}."
    else:
        yield f"No attack is defense-aware: {ignored}, so each number is a lower bound of the leakage."
    kinds = {group.case.kind for group in analysis.attacked}
    if "reconstruction" not in kinds:
        yield "Reconstruction of images was not measured: no such attack ran."
    if "membership" not in kinds:
        yield "Membership inference was not measured: no such attack ran."


def _claims(analysis: Analysis) -> Iterator[str]:
    yield "Claimed and proved epsilons are derived from the mechanism and its assumptions, not from the running code."
    if any(training.audited is not None for training in analysis.run.trainings.values()):
        yield "An audit runs the code in a separate small federation; an audit without a violation proves nothing."
    else:
        yield "No epsilon in this report is audited: no attack tests whether the implementation matches its proof."
    unproved = tally(analysis)["UNPROVED"]
    if unproved:
        yield f"{counted(unproved, 'unproved claim')} may not hold: the proved upper bound is above the claim."


def _adversaries(analysis: Analysis) -> Iterator[str]:
    threats = dict.fromkeys(group.case.threat for group in analysis.attacked)
    targets = [group.case.target for group in analysis.attacked]
    if threats:
        yield f"Only these adversaries were measured: {listing(threats)}. One that sees or does more may learn more."
    if any(target.kind == "probe" for target in targets):
        yield "A probe sends a chosen batch alone. It is easier to attack than a message that mixes all images."
    rounds = sorted({target.round for target in targets if target.round is not None})
    if rounds and all(target.rounds == 1 for target in targets if target.round is not None):
        several = "Several messages of a client may reveal more, because noise averages out."
        yield f"Each attack sees one round (attacked rounds: {listing(map(str, rounds))}). {several}"


def _controls(analysis: Analysis) -> Iterator[str]:
    if any(analysis.floor_value(group) is None for group in analysis.attacked):
        yield "Some columns have no floor: the score of a guess that uses no message is unknown."
    if any(analysis.ceiling(group) is None for group in analysis.defended):
        yield "Some columns have no ceiling: the leakage without a defense is unknown."
    for text in sorted({analysis.column_text(group) for group in analysis.attacked if analysis.is_void(group)}):
        yield f"The column {text} shows nothing about the defenses: its attack fails without a defense too."


def _certainty(analysis: Analysis) -> Iterator[str]:
    seeds = len({cell.training.seed for cell in analysis.run.cells})
    if seeds == 1:
        yield "There is one seed: the intervals cover the images of one training, not the spread of trainings."
    elif seeds < FEW_SEEDS:
        yield f"There are only {counted(seeds, 'seed')}: the spread of trainings is not known reliably."
    if seeds > 1:
        yield "The images of all seeds form one sample: if seeds differ much, the intervals are too narrow."
    images = [group.case.target.images for group in analysis.attacked if group.case.kind == "reconstruction"]
    if images and min(images) < FEW_IMAGES:
        few = counted(min(images), "image")
        yield f"Some cells have only {few}: small differences cannot be detected. Use {FEW_IMAGES} or more."
    if images:
        nearer = "nearer to the original than 99 other images by squared error, not recognition by a person"
        yield f"“Recognizable” means SSIM ≥ {RECOGNIZABLE} and {nearer}."


def _scope(analysis: Analysis) -> Iterator[str]:
    yield from (f"{str(note)[:1].upper()}{str(note)[1:]}." for note in analysis.run.study.get("notes", ()))
    failed, missing = len(analysis.run.failures), len(analysis.run.missing)
    if failed or missing:
        yield f"{failed} cells failed and {missing} are missing. Run the same command again to compute them."
    if all(cell.training.defense.name == UNDEFENDED for cell in analysis.run.cells):
        yield "No defense was measured."
    data = listing(dict.fromkeys(cell.training.task.data for cell in analysis.run.cells))
    yield f"Other data, models and federations than those of this study ({data}) may leak more or less."


def limits(analysis: Analysis) -> tuple[str, ...]:
    """The limits, the most important ones first."""
    parts = (_attacks, _claims, _adversaries, _controls, _certainty, _scope)
    return tuple(text for sentences in parts for text in sentences(analysis))


SECTION = Section("limits", "What this report does not show", "Limits", limits, 90, _TEMPLATE)
