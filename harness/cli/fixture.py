"""The fixture `leakage`: measures in a test how much a user's own defense leaks; see `harness.cli.pytest_plugin`."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from leakgauge.harness.cli.options import computed_anew
from leakgauge.harness.core.cell import Cell, FederationSpec, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.contract import Defense
from leakgauge.harness.core.result import Run
from leakgauge.harness.core.sinks import line
from leakgauge.harness.federation import registry
from leakgauge.harness.gate.baseline import Baseline, BaselineError, read, write
from leakgauge.harness.gate.judge import Rules, Verdict, judge
from leakgauge.harness.gate.measure import Measure, Measured, measured
from leakgauge.harness.integrations.synthetic import part_spec
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import Study


class LeakageWarning(UserWarning):
    """An inconclusive check."""


class Leakage:
    """The fixture `leakage` of a test: a call attacks a defense; its run is in the folder `scratch`."""

    def __init__(self, config: pytest.Config, scratch: Path, test: str) -> None:
        self._config, self._scratch = config, scratch
        self._test = re.sub(r"[^\w.-]+", "-", test).strip("-")
        self._calls = 0

    def __call__(
        self,
        defense: Defense[Any, Any] | str,
        *,
        attacks: Sequence[str | dict[str, Any]] = ("analytic", {"name": "map", "evaluations": 150}),
        images: int = 16,
        data: str = "digits",
        model: str = "mlp-small",
        threat: str = "server",
        federation: dict[str, Any] | None = None,
        audit: int = 0,
        seed: int = 0,
        data_root: Path | None = None,
    ) -> Leak:
        """Train a small federation with the defense and attack the messages of its first round.

        Args:
            defense: an object whose class is at the top level of a module, or the name of a shipped defense.
            attacks: reconstruction attacks: names, or tables with a name and parameters as in a study.
            images: number of victims, with one image each; comparisons need at least 8.
            data, model, threat, federation: as in a study; by default 10 clients and one round of gradients.
            audit: trials with each of two inputs in a separate audit of the defense; 0: no audit.
            data_root: folder of the data sets; default `LEAKGAUGE_DATA`.

        Raises:
            ValueError, LookupError, StudyError: these arguments cannot be run; the error is one line.
        """
        spec = _defense(defense)
        table = {"clients": 10, "rounds": 1, "algorithm": "fedsgd", "samples": 500, **(federation or {})}
        training = TrainingSpec(TaskSpec(data, model), registry.construct(FederationSpec, table), spec, seed, audit)
        cells = tuple(
            Cell(training, _attack(attack), Target("probe", count=images), threat, limit=False) for attack in attacks
        )
        self._calls += 1
        name = self._test if self._calls == 1 else f"{self._test}-{self._calls}"
        with computed_anew():
            run = run_study(Study(name, "", cells), self._scratch / name, data=data_root, workers=0)
        folder = self._config.rootpath / self._config.getoption("--leakage-baseline")
        return Leak(run, self._config, folder / f"{name}.json")


@dataclass(frozen=True)
class Leak:
    """The results of the attacks on a defense, and assertions on them.

    Attributes:
        run: all results.
        config: of pytest, with the options of the plugin.
        file: the file of the baseline.
    """

    run: Run
    config: pytest.Config
    file: Path

    @functools.cached_property
    def measured(self) -> Measured:
        """The numbers that are compared with the baseline."""
        return measured(self.run)

    def assert_below(self, limit: float) -> None:
        """Fail unless the mean SSIM of every attack is below `limit`."""
        high = [one for one in self._reconstructions() if one.value is None or not one.value < limit]
        bad = [f"{one.name} is {one.value:.3f} over {one.n} images" for one in high]
        if bad:
            _fail(f"leakage is not below {limit:g}: {'; '.join(bad)}")

    def assert_recognizable(self, *, at_most: int) -> None:
        """Fail if more than `at_most` images are identified, with an SSIM of 0.5 or more, under some attack."""
        images = set[int]()
        for measure in self._reconstructions():
            seen = (number for number, value in enumerate(measure.values, 1) if (value or 0.0) >= Rules().above)
            images |= {number for number in seen if number - 1 not in measure.unseen}
        if len(images) > at_most:
            named = ", ".join(map(str, sorted(images)[:10]))
            _fail(f"{len(images)} images are recognizable, at most {at_most} may be: image {named}")

    def assert_no_increase(self) -> None:
        """Fail if leakage increased over the baseline of this test; `--leakage-update REASON` makes a new baseline.

        The rules are those of `leakgauge check`, including bits and accuracy. Needs at least 8 images.
        """
        self._reconstructions()
        now = self.measured
        if (update := self.config.getoption("--leakage-update")) is not None:
            write(Baseline(now, update), self.file)
            return
        try:
            base = read(self.file)
        except BaselineError as error:
            _fail(f"{error}; make it with --leakage-update REASON")
        outcome = judge(now, base.measured, Rules())
        if outcome.problems:
            _fail(f"not comparable: {'; '.join(outcome.problems)}")
        fails = self.config.getoption("--leakage-inconclusive") == "fail"
        tolerated = {Verdict.PASS} if fails else {Verdict.PASS, Verdict.INCONCLUSIVE}
        bad = [f"{check.name}: {check.reason}" for check in outcome.checks if check.verdict not in tolerated]
        if bad:
            _fail(f"{outcome.verdict.value.lower()}: {'; '.join(bad)}")
        for check in outcome.checks:
            if check.verdict is Verdict.INCONCLUSIVE:
                warnings.warn(line(f"inconclusive: {check.name}: {check.reason}"), LeakageWarning, stacklevel=2)

    def _reconstructions(self) -> list[Measure]:
        """The mean SSIM of each attack; the test fails if an attack has no number."""
        measures = [measure for measure in self.measured.measures if measure.metric == "ssim"]
        lost = [f"{one.name}: {one.problem}" for one in measures if one.problem or one.value is None]
        if lost or not measures:
            _fail(f"no number: {'; '.join(lost) or 'no attack reconstructs images'}")
        return measures


def _fail(message: str) -> NoReturn:
    pytest.fail(line(message), pytrace=False)


def _defense(defense: Defense[Any, Any] | str) -> PartSpec:
    spec = part_spec("defense", defense)
    if "<locals>" in spec.name:
        raise ValueError(f"expected a defense whose class is at the top of a module, got {spec.name}")
    return spec


def _attack(attack: str | dict[str, Any]) -> PartSpec:
    spec = part_spec("attack", attack)
    if (kind := registry.build_attack(spec).kind) != "reconstruction":
        raise ValueError(f"expected attacks that reconstruct, got {spec.name!r} of kind {kind}")
    return spec
