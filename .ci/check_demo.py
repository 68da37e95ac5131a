"""What must hold of the demo's results: nothing failed, and the attacks and their controls are what they should be."""

import sys

from leakgauge.harness.core.result import Result
from leakgauge.harness.study.store import load_run


def main() -> None:
    """Check the folder that is given; exit 1 with a line for each thing that does not hold."""
    run = load_run(sys.argv[1])
    problems = [f"{failure.cell.label}: {failure.message}" for failure in run.failures.values()]
    problems += [f"no result: {cell_id}" for cell_id in run.missing]

    def find(defense: str, attack: str, guess: str | None = None) -> Result:
        """The first cell of this defense and attack, which is the one at round 0."""
        return next(
            result
            for result in run.results.values()
            if result.cell.training.defense.name == defense
            and result.cell.attack.name == attack
            and result.cell.attack.parameters.get("guess") == guess
        )

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
        print(f"{defense}: SSIM {naive:.3f} to who ignores the defense, {aware:.3f} to who knows it")
        if not aware > naive:
            problems.append(f"{defense}: who knows the defense sees no more than who ignores it")
    for problem in problems:
        print(f"demo: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
