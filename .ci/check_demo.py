"""Checks that the demo tells its story: every defense and attack is there, and the controls behave as expected."""

import sys
from collections.abc import Iterator

from leakgauge.harness.core.labels import cell_text
from leakgauge.harness.core.result import Run
from leakgauge.harness.study.store import load_run
from leakgauge.reports.sections.checked import tally
from leakgauge.reports.select import Analysis

PUBLISHED = {"jopeq", "cepam-gaussian", "sqsgd", "udp-crd", "ota"}
MOST_LOST = 0.06
"""Accuracy that a defense may lose at one of its settings."""


def problems(run: Run) -> Iterator[str]:
    """What is not as it should be, one line each."""
    analysis = Analysis(run)
    yield from (f"{cell_text(failure.cell)}: {failure.message}" for failure in run.failures.values())
    yield from (f"no result: {cell_id}" for cell_id in run.missing)
    names = {group.case.training.defense.name for group in analysis.groups}
    yield from (f"the defense {name} is missing" for name in PUBLISHED - names)
    if len(names) < 8:
        yield f"{len(names)} defenses, expected no defense and at least seven others"
    yield from (
        f"{analysis.column_text(one)} does not beat the floor" for one in analysis.attacked if analysis.is_void(one)
    )
    if tally(analysis)["BROKEN"] < 2:
        yield "fewer than two claims are broken"
    accuracy = {
        name: max(r.accuracy or 0.0 for r in run.trainings.values() if r.spec.defense.name == name) for name in names
    }
    for name, reached in accuracy.items():
        if accuracy["none"] - reached > MOST_LOST:
            yield f"{name} reaches {reached:.3f}, no defense {accuracy['none']:.3f}"
    yield from (f"{r.spec.defense.name} was not audited" for r in run.trainings.values() if r.audited is None)
    value = {(g.case.training.defense.name, g.case.attack.name): g.value or 0.0 for g in analysis.groups}
    naive, aware = value["dp-fedavg", "idlg"], value["dp-fedavg", "map"]
    print(f"dp-fedavg: SSIM {naive:.3f} for the naive attack, {aware:.3f} for the attack that knows the clip")
    if aware < naive + 0.3:
        yield "the aware attack gains little on dp-fedavg"


def main() -> None:
    """Check the folder of results in the first argument; exit 1 with one line for each problem."""
    found = list(problems(load_run(sys.argv[1])))
    for problem in found:
        print(f"demo: {problem}", file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
