"""Checks the results of the demo: nothing failed, and the attacks and their controls behave as expected."""

import sys

from leakgauge.harness.core.labels import cell_text
from leakgauge.harness.core.result import Result
from leakgauge.harness.study.store import load_run


def main() -> None:
    """Check the folder of results in the first argument; exit 1 with one line for each problem."""
    run = load_run(sys.argv[1])
    problems = [f"{cell_text(failure.cell)}: {failure.message}" for failure in run.failures.values()]
    problems += [f"no result: {cell_id}" for cell_id in run.missing]

    def find(defense: str, attack: str, guess: str | None = None) -> Result:
        """The first cell of this defense and attack: the one at round 0."""
        wanted = (defense, attack, guess)
        parts = [(one.cell.training.defense, one.cell.attack, one) for one in run.results.values()]
        return next(one for d, a, one in parts if (d.name, a.name, a.parameters.get("guess")) == wanted)

    undefended, floor = find("none", "idlg"), find("none", "prior", "mean")
    success = undefended.estimate("success")
    recovered = round(sum(value or 0.0 for value in success.values))
    ssim, guessed = undefended.estimate("ssim").value, floor.estimate("ssim").value
    print(
        f"idlg, no defense, round 0: {recovered} of {len(success.values)} images with MSE < 1e-3, "
        f"mean SSIM {ssim:.3f}; the floor (a flat image of the mean color) has {guessed:.3f}"
    )
    if recovered < 7:
        problems.append(f"idlg recovered {recovered} images of {len(success.values)}, expected at least 7")
    for defense in ("gaussian", "laplace"):
        naive, aware = (find(defense, attack).estimate("ssim").value for attack in ("idlg", "map"))
        print(f"{defense}: SSIM {naive:.3f} for the naive attack, {aware:.3f} for the defense-aware attack")
        if not aware > naive:
            problems.append(f"{defense}: the defense-aware attack does no better than the naive attack")
    for problem in problems:
        print(f"demo: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
