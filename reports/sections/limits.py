"""What a report does not show, derived from what was and was not run."""

from __future__ import annotations

from leakgauge.reports.sections.checked import tally
from leakgauge.reports.select import RECOGNIZABLE, Analysis
from leakgauge.reports.text.labels import UNDEFENDED
from leakgauge.reports.text.notation import listing, plural

FEW_IMAGES = 8
FEW_SEEDS = 3


def _attacks(analysis: Analysis) -> list[str]:
    """Which attacks ran, which of them know the defense, which kinds did not run."""
    infos = {group.info.name: group.info for group in analysis.attacked}
    if not infos:
        return ["No attack was planned: there is no number on leakage."]
    aware = [name for name, info in infos.items() if info.aware]
    blind = [name for name, info in infos.items() if not info.aware]
    found = [f"Other attacks than {listing(infos)}: an attack that did not run may succeed where these did not."]
    if not aware:
        found.append(
            f"An attacker who uses what is known of the defense: {listing(blind)} "
            f"{'ignores' if len(blind) == 1 else 'ignore'} it, so each number is a lower bound of what leaks."
        )
    else:
        rest = f"; {listing(blind)} {'ignores' if len(blind) == 1 else 'ignore'} it" if blind else ""
        uses = "uses" if len(aware) == 1 else "use"
        found.append(f"Better adapted attacks: {listing(aware)} {uses} what is known of the defense{rest}.")
    kinds = {group.kind for group in analysis.attacked}
    missing = [word for kind, word in (("reconstruction", "Reconstruction of images"), ("membership", "Membership"))
               if kind not in kinds]  # fmt: skip
    return found + [f"{word}: no such attack ran." for word in missing]


def _adversaries(analysis: Analysis) -> list[str]:
    """Which adversaries and targets the numbers are about."""
    threats = dict.fromkeys(group.column.threat for group in analysis.attacked)
    found = []
    if threats:
        found.append(f"Other adversaries than {listing(threats)}, or any who deviates from the protocol.")
    kinds = {group.column.target.kind for group in analysis.attacked}
    if "probe" in kinds:
        found.append(
            "Real messages, where the target is a probe: a probe sends a chosen batch alone through the client's path, "
            "which is easier to attack than a message that mixes all of a client's images."
        )
    targets = [g.column.target for g in analysis.attacked if g.column.target.round is not None]
    rounds = sorted({target.round for target in targets if target.round is not None})
    if targets and all(target.rounds == 1 for target in targets):
        found.append(
            f"Several messages of one client taken together: each attack sees one round ({listing(map(str, rounds))}), "
            "and noise averages out over rounds."
        )
    return found


def _certainty(analysis: Analysis) -> list[str]:
    """How far the numbers carry."""
    found = []
    seeds = {cell.training.seed for cell in analysis.run.cells}
    if len(seeds) == 1:
        found.append(
            "The spread between trainings: there is one seed, so intervals cover the images of one training only."
        )
    elif len(seeds) < FEW_SEEDS:
        found.append(f"A reliable spread between trainings: there are only {plural(len(seeds), 'seed')}.")
    if len(seeds) > 1:
        found.append(
            "Differences between seeds: their images are pooled into one sample; if seeds differ much from each other, "
            "the intervals are too narrow."
        )
    small = [g for g in analysis.attacked if g.kind == "reconstruction" and g.column.target.images < FEW_IMAGES]
    if small:
        least = min(group.column.target.images for group in small)
        found.append(
            f"Small differences: some cells rest on {plural(least, 'image')}; {FEW_IMAGES} or more are advised."
        )
    if any(group.kind == "reconstruction" for group in analysis.attacked):
        found.append(
            f"Whether a person would recognize an image: “recognizable” means SSIM ≥ {RECOGNIZABLE}, and a flat image "
            "can reach that against a flat original."
        )
    return found


def _controls(analysis: Analysis) -> list[str]:
    """Where a number has no floor or no ceiling, or its attack fails without a defense."""
    defended = [group for group in analysis.attacked if not group.undefended]
    found = []
    if any(analysis.floor_value(group) is None for group in analysis.attacked):
        found.append("How much a guess without any message scores, in columns without a floor.")
    if any(analysis.ceiling(group) is None for group in defended):
        found.append("How much leaks without a defense, in columns without a ceiling.")
    nothing = {
        analysis.column_text(group.column)
        for group in analysis.attacked
        if analysis.says_nothing(group.setting, group.column)
    }
    for text in sorted(nothing):
        found.append(f"Anything about the defenses in the column {text}: the attack fails without a defense too.")
    return found


def _claims(analysis: Analysis) -> list[str]:
    """What claimed and proved do not say."""
    worked = "claimed and proved are worked out from the law of the mechanism and what its claim assumes"
    if any(training.audited is not None for training in analysis.run.trainings.values()):
        rest = "an audit runs it, but in a small federation of its own, and one that refutes nothing proves nothing."
    else:
        rest = "no epsilon here is audited, that is, bounded from below by an attack."
    found = [f"Whether the code that ran keeps an epsilon: {worked}; {rest}"]
    unproved = tally(analysis)["UNPROVED"]
    if unproved:
        holds = "holds" if unproved == 1 else "hold"
        found.append(
            f"Whether {plural(unproved, 'unproved claim')} {holds}: what is proved is an upper bound above the claim."
        )
    return found


def _gaps(analysis: Analysis) -> list[str]:
    """Cells without a result."""
    run = analysis.run
    gaps = [(len(run.failures), "failed"), (len(run.missing), "not run")]
    lacking = [f"{plural(count, 'cell')} {word}" for count, word in gaps if count]
    return [f"The cells without a result: {listing(lacking)}. The same command runs them again."] if lacking else []


def limits(analysis: Analysis) -> tuple[str, ...]:
    """One sentence a limit, the ones that weigh most first."""
    data = dict.fromkeys(cell.training.task.data for cell in analysis.run.cells)
    general = [f"Other data, models and federations than those measured ({listing(data)})."]
    if all(cell.training.defense.name == UNDEFENDED for cell in analysis.run.cells):
        general.insert(0, "Any defense: none was measured.")
    parts = [_attacks, _claims, _adversaries, _controls, _certainty, _gaps]
    return (*[text for part in parts for text in part(analysis)], *general)
