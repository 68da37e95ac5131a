"""The cells of a run, grouped over their seeds: one case is one question."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from leakgauge.harness.core.cell import Cell, PartSpec, Target, TrainingSpec
from leakgauge.harness.core.metrics import headline
from leakgauge.harness.core.result import Estimate, Failure, PartInfo, Result, Run
from leakgauge.harness.core.stored import fingerprint, to_data

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """The cells that differ only in their seed, with their results and failures.

    Attributes:
        identity: fingerprint of the question without its seed; the same in every run.
        cells: in the study's order; results and failures: of the finished or failed cells, in the same order.
        info: description of the attack.
    """

    identity: str
    cells: tuple[Cell, ...]
    results: tuple[Result, ...]
    failures: tuple[Failure, ...]
    info: PartInfo

    @property
    def training(self) -> TrainingSpec:
        """The training of the first seed."""
        return self.cells[0].training

    @property
    def attack(self) -> PartSpec:
        """The attack."""
        return self.cells[0].attack

    @property
    def target(self) -> Target:
        """The target of the attack."""
        return self.cells[0].target

    @property
    def threat(self) -> str:
        """The adversary."""
        return self.cells[0].threat

    @property
    def missing(self) -> int:
        """Number of cells that neither finished nor failed."""
        return len(self.cells) - len(self.results) - len(self.failures)

    @property
    def kind(self) -> str:
        """`reconstruction`, `labels` or `membership`: the attack's kind, or if unknown, the kind by the target."""
        return self.info.kind or ("membership" if self.target.kind == "members" else "reconstruction")

    def estimates(self, name: str) -> list[Estimate]:
        """The estimates of this name, one per result that has it."""
        return [estimate for result in self.results for estimate in result.estimates if estimate.name == name]

    @property
    def pooled(self) -> Estimate | None:
        """The headline over the seeds; of several metrics the usual one of this kind, else the first; None: none."""
        from leakgauge.harness.core.stats import pool  # scipy, which a claim does not need

        found = [estimate for result in self.results if (estimate := headline_estimate(result, self.kind)) is not None]
        known = [estimate for estimate in found if estimate.name == headline(self.kind)] or found
        return pool([estimate for estimate in known if estimate.name == known[0].name]) if known else None


def headline_estimate(result: Result, kind: str) -> Estimate | None:
    """The headline metric of this kind of attack, or the first metric whose higher value means more leakage."""
    first = next((estimate for estimate in result.estimates if estimate.higher_leaks), None)
    return next((estimate for estimate in result.estimates if estimate.name == headline(kind)), first)


def identity(cell: Cell) -> str:
    """Fingerprint of a cell's question without its seed."""
    return fingerprint([cell.training.question, *to_data([cell.attack, cell.target, cell.threat])])


def training_identity(spec: TrainingSpec) -> str:
    """Fingerprint of a training without its seed."""
    return fingerprint([spec.question])


def cases(run: Run) -> tuple[Case, ...]:
    """All cases of a run, in the study's order."""
    return tuple(
        Case(
            identity=name,
            cells=tuple(cells),
            results=tuple(run.results[cell.id] for cell in cells if cell.id in run.results),
            failures=tuple(run.failures[cell.id] for cell in cells if cell.id in run.failures),
            info=run.attacks.get(cells[0].attack.key, PartInfo(cells[0].attack.name, "")),
        )
        for name, cells in gathered((identity(cell), cell) for cell in run.cells).items()
    )


def trainings(run: Run) -> dict[str, list[TrainingSpec]]:
    """The trainings of a run, one per seed, in the study's order, by `training_identity` of the first.

    Those of seeds that are not audited are with those of seeds that are.
    """
    specs = {cell.training.id: cell.training for cell in run.cells}.values()
    alike = gathered((training_identity(replace(spec, audit=0)), spec) for spec in specs)
    return {training_identity(specs[0]): specs for specs in alike.values()}


def gathered(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """The values of each key; keys and values keep their order."""
    groups: dict[K, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
