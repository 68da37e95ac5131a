"""Checks that the demo tells its story: every defense and attack is there, and the controls behave as expected."""

import sys
from collections.abc import Iterator

from leakgauge.harness.core.labels import Names
from leakgauge.harness.core.result import Run
from leakgauge.harness.study.store import load_run
from leakgauge.reports.sections.checked import tally
from leakgauge.reports.select import Analysis, final_accuracy

DEFENSES = {"none", "jopeq", "cepam-gaussian", "sqsgd", "udp-crd", "ota", "gaussian"}
MOST_LOST = 0.15
"""Accuracy that a defense may lose, on average over the seeds."""
PEOPLE, SEEDS = 16, 3


def problems(run: Run) -> Iterator[str]:
    """What is not as it should be, one line each."""
    analysis = Analysis(run)
    yield from (f"{Names().cell(failure.cell)}: {failure.message}" for failure in run.failures.values())
    yield from (f"no result: {cell_id}" for cell_id in run.missing)
    names = {group.case.training.defense.name for group in analysis.groups}
    yield from (f"the defense {name} is missing" for name in DEFENSES - names)
    yield from (
        f"{analysis.column_text(one)} does not beat the floor" for one in analysis.attacked if analysis.is_void(one)
    )
    if tally(analysis)["BROKEN"] < 2:
        yield "fewer than two claims are broken"
    yield from _trained(analysis)
    yield from _identified(analysis)


def _trained(analysis: Analysis) -> Iterator[str]:
    accuracy = {key: final_accuracy(records) for (_, key), records in analysis.trainings.items()}
    reached = {key: (one and one.value) or 0.0 for key, one in accuracy.items()}
    best = max(reached.values())
    for (_, key), records in analysis.trainings.items():
        if best - reached[key] > MOST_LOST:
            yield f"{key} reaches {reached[key]:.3f}, the best defense {best:.3f}"
        if len(records) != SEEDS or sum(record.audited is not None for record in records) != 1:
            yield f"{key}: expected {SEEDS} trainings and one audit"


def _identified(analysis: Analysis) -> Iterator[str]:
    """Whether the attacks identify as many people as in the story."""
    found = dict[tuple[str, str], int]()
    for group in analysis.groups:
        share = group.pooled("identification")
        if share is not None and group.case.target.count == PEOPLE:
            key = group.case.training.defense.name, group.case.attack.name
            found[key] = max(found.get(key, 0), round(PEOPLE * (share.value or 0.0)))
    naive, aware = found["cepam-gaussian", "idlg"], found["cepam-gaussian", "map"]
    print(f"cepam-gaussian: {naive} of {PEOPLE} people by the naive attack, {aware} by the one that knows its noise")
    if aware < naive + PEOPLE // 2:
        yield "the aware attack gains little on cepam-gaussian"
    if found["none", "idlg"] < PEOPLE - 1 or found["none", "prior"] > 1:
        yield f"without a defense {found['none', 'idlg']} are identified, by guessing {found['none', 'prior']}"


def main() -> None:
    """Check the folder of results in the first argument; exit 1 with one line for each problem."""
    found = list(problems(load_run(sys.argv[1])))
    for problem in found:
        print(f"demo: {problem}", file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
