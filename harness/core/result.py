"""Results as plain frozen data, without torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from leakgauge.harness.core.cell import Cell, TrainingSpec

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Execution:
    """How a cell ran; recorded, but not part of the cell's id."""

    device: str
    threads: int
    engine: str


@dataclass(frozen=True)
class Environment:
    """The code and machine behind a result.

    Attributes:
        dirty: the checkout differed from `commit`.
        numerics: what decides how the process rounded, by name: vector instructions, BLAS with version, kernels and
            threads, processor, variables. Empty: unknown, a result of an earlier version.
    """

    commit: str
    dirty: bool
    python: str
    packages: dict[str, str]
    machine: str
    numerics: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    Attributes:
        name: name of the metric, e.g. `ssim`.
        value: None if there is no meaningful number ("n/a"); `note` gives the reason.
        low, high: ends of the interval; None without an interval.
        level: confidence of the interval.
        n: number of items behind the value.
        unit: e.g. `dB`; empty for a pure number.
        higher_leaks: True if a higher value means that the adversary learns more, False if less, None if neither.
        method: how the interval is computed.
        values: per item, in the order of the victims; None for a failed item.
        note: why there is no value, or a caveat.
        chance: the value of blind guessing; None: not known, or that of the metric.
        p: the one-sided p-value of a test against chance (`stats.against`); None: not tested.
        sizes: the number of items of each message, which are not independent; empty: one each.
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    n: int
    method: str
    level: float = 0.95
    unit: str = ""
    higher_leaks: bool | None = None
    values: tuple[float | None, ...] = ()
    note: str = ""
    chance: float | None = None
    p: float | None = None
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for number in (self.value, self.low, self.high, *self.values):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"expected finite numbers in {self.name!r}, got {number}; use None for n/a")


@dataclass(frozen=True)
class Flag:
    """A caveat about a number. `severity` is `warning` or `note`."""

    code: str
    message: str
    severity: Literal["warning", "note"] = "warning"


@dataclass(frozen=True)
class Evaluation:
    """The quality of the global model before round `round`, which after the last round is the number of rounds.

    samples: number of test samples behind accuracy and loss. A record stored without it used all test samples.
    """

    round: int
    accuracy: float | None
    loss: float
    samples: int = 0


def chance(epsilon: float, delta: float) -> float:
    """The highest probability, under (epsilon, delta), of guessing correctly which of two neighbors is the input.

    It is (e^epsilon + delta) / (1 + e^epsilon) for equally likely neighbors, and 1 for an infinite epsilon.

    Source: Kairouz, Oh, Viswanath 2015, Thm 2.1.
    """
    return min(1.0, 1.0 - (1.0 - delta) / (1.0 + math.exp(min(epsilon, 700.0))))


@dataclass(frozen=True)
class ProofRecord:
    """A proved epsilon for one unit; None is infinity.

    `tight`: some pair of neighbors attains the epsilon. `against`: the adversaries that the proof covers.
    `relation`: of the neighbors; empty: that of the claim.
    """

    epsilon: float | None
    delta: float
    unit: str
    method: str
    reason: str
    tight: bool
    against: tuple[str, ...]
    relation: str = ""


@dataclass(frozen=True)
class GroupRecord:
    """The claim of clients with parameters of their own.

    Attributes:
        label: the parameters, as `epsilon 4`.
        clients: their numbers.
        epsilon, delta, proved, verdict, reason: as in `ClaimRecord`.
    """

    label: str
    clients: tuple[int, ...]
    epsilon: float | None
    delta: float
    proved: ProofRecord
    verdict: str
    reason: str


@dataclass(frozen=True)
class ClaimRecord:
    """A defense's claim with its numbers; `epsilon` None means that the defense claims nothing (infinity).

    Attributes:
        proved: the proof for the claim's unit and adversaries, at the requested delta.
        further: proofs for other units or adversaries.
        attained: an epsilon that a pair of neighbors attains, at the claim's own delta, if `proved` is larger.
        verdict: a `claim.Verdict`, at the claim's own delta.
        reason: the reason for the verdict, with both numbers.
        groups: the claims of clients whose epsilons differ. This record then has the largest epsilon of them, and
            the verdict BROKEN or UNPROVED if one of them has.
        arithmetic: a `claim.Arithmetic`; `reals` in records of versions without it.
    """

    epsilon: float | None
    delta: float
    unit: str
    relation: str
    horizon: str
    against: tuple[str, ...]
    source: str
    assumes: tuple[str, ...]
    proved: ProofRecord
    further: tuple[ProofRecord, ...]
    verdict: str
    reason: str
    attained: ProofRecord | None = None
    groups: tuple[GroupRecord, ...] = ()
    arithmetic: str = "reals"


@dataclass(frozen=True)
class RangeRecord:
    """Messages that were looked at.

    Attributes:
        messages: their number.
        dims, clients, samples, rounds: the least and the largest number of coordinates, clients of a federation,
            records of a client, and the first and the last round, among these messages.
    """

    messages: int
    dims: tuple[int, int]
    clients: tuple[int, int]
    samples: tuple[int, int]
    rounds: tuple[int, int]


@dataclass(frozen=True)
class FitRecord:
    """Messages tested against the distribution that their defense states.

    Attributes:
        rejects: the deviations from the distribution, worst first; empty: none was found.
        p: the smallest p-value, times the number of tests.
        messages, numbers: how many messages and numbers were tested.
        tests: the number of p-values among which the level is split.
        detects: the smallest missing share of the noise's scale that is detected with 95 % power; for a discrete
            channel with epsilon, the share s that changes its epsilon to epsilon / (1 - s). None: the distribution has
            no noise, or the noise shows too rarely.
        looked: messages of the small tensors, then those of each larger layout that the defense takes.
    """

    rejects: tuple[str, ...]
    p: float
    messages: int
    numbers: int
    tests: int
    detects: float | None
    looked: tuple[RangeRecord, ...] = ()


@dataclass(frozen=True)
class AssumedBound:
    """A lower bound of epsilon at delta 0 that assumes a part of the distribution that the defense states.

    Attributes:
        epsilon_lower, strict: as in `AuditRecord`, for this unit.
        assumes: the assumption: a declared product, or the distribution's family.
        proved: the proved epsilon for this unit.
        numbers: how many numbers of a message are counted; 1: the message as a whole.
        trials: messages with each input, or with only one input if the family needs no second one.
        pair: the inputs.
    """

    epsilon_lower: float
    strict: float
    assumes: str
    unit: str
    proved: float
    numbers: int
    trials: int
    pair: str


@dataclass(frozen=True)
class KeyRecord:
    """What the key check found (`audit.keys`): messages that depend on what they must not depend on.

    Attributes:
        faults: one sentence each; empty: none was found.
        messages, dims, clients, samples, rounds: as in `RangeRecord`.
    """

    faults: tuple[str, ...]
    messages: int
    dims: tuple[int, int]
    clients: tuple[int, int]
    samples: tuple[int, int]
    rounds: tuple[int, int]


@dataclass(frozen=True)
class StatedRecord:
    """Epsilon under the distribution that the defense states, by a search over pairs of inputs (`audit.stated`).

    Attributes:
        low, high: what a pair attains, 0 if that is not known, and an upper bound over the pairs; None is infinity.
        error: the least mean of the two error rates of any test of two inputs; None: unknown.
        pairs: the number of pairs with a known privacy loss.
        lacks: why the proof is the author's word; empty: the proved epsilon is at least `high`.
        faults: one sentence for each proved epsilon that a pair exceeds.
        distinct: whether messages of one input are never equal.
    """

    low: float | None
    high: float | None
    error: float | None
    pairs: int
    lacks: str
    faults: tuple[str, ...]
    distinct: bool = False

    @property
    def supports(self) -> bool:
        """Whether the stated distribution gives the proved epsilon."""
        return not self.lacks


@dataclass(frozen=True)
class AuditRecord:
    """A measured lower bound of a defense's epsilon in a small federation, with the claim and the proof for it.

    Attributes:
        claimed, proved: epsilons in the small federation, at `delta`; None is infinity.
        epsilon_lower: lower bound of epsilon in the small federation, at `confidence`.
        delta, unit, relation, horizon: as in the claim for the small federation.
        rounds: rounds of each trial.
        clients, samples, dim: the small federation: clients, records per client, coordinates of an update.
        trials: number of counted trials with each of the two inputs.
        distinguisher, pair: the test that separates the two inputs, and the inputs.
        threat: the adversary.
        method: how the bound is computed. any_mechanism: the bound without assumptions about the mechanism.
        strict: the bound that decides on verdicts. ceiling: the largest `strict` that these trials could have shown;
            None for Gaussian scores, which have no largest bound.
        verdict, reason: the judgment of the claim in the small federation.
        code: CONTRADICTED, CONSISTENT or INCONCLUSIVE; contradictions: how the code differs from the proved mechanism.
        seen: one sentence on the code. fit: None if the defense states no distribution.
        assuming: bounds that assume a part of the distribution; may be empty.
        keys: the key check. stated: epsilon under the stated distribution. None in records of versions without them.
    """

    claimed: float | None
    proved: float | None
    epsilon_lower: float
    delta: float
    unit: str
    relation: str
    horizon: str
    rounds: int
    clients: int
    samples: int
    dim: int
    confidence: float
    trials: int
    distinguisher: str
    pair: str
    threat: str
    method: str
    any_mechanism: float
    strict: float
    ceiling: float | None
    verdict: str
    reason: str
    code: str
    contradictions: tuple[str, ...]
    seen: str
    fit: FitRecord | None
    assuming: tuple[AssumedBound, ...] = ()
    keys: KeyRecord | None = None
    stated: StatedRecord | None = None

    @property
    def refutes(self) -> bool:
        """Whether the strict bound is above the claim in the same federation."""
        return self.claimed is not None and self.strict > self.claimed


@dataclass(frozen=True)
class ViolationRecord:
    """How often a training broke one assumption of its claims; the other fields are those of `claim.Violation`.

    assumption: the text of the assumption in `ClaimRecord.assumes`.
    """

    assumption: str
    broken: int
    of: int
    what: str
    covered: bool

    @property
    def voids(self) -> bool:
        """Whether the proof does not cover this training."""
        return self.broken > 0 and not self.covered


@dataclass(frozen=True)
class Dropped:
    """A client that did not count in a round, because its update was not finite or its message was refused."""

    round: int
    client: int
    reason: str


@dataclass(frozen=True)
class TrainingRecord:
    """The record of one training, without any attack.

    Attributes:
        dim: d, the number of parameters of the model.
        evaluations: test accuracy and loss, in the order of the rounds.
        test_samples: n behind the final accuracy; an interim evaluation may have fewer.
        message_bytes: mean length in bytes of one client's message, by round; 0 if no message counted.
        snr_db: mean over the messages of a round of 10 log10(|u|^2 / |decoded - u|^2); None if the decoded update is
            exact or the update is zero.
        one_round, whole_run: the claim for one round and for all rounds.
        audited: audit of the defense alone; None if the study requests no audit, or if a flag states why it is missing.
        violations: counts for the assumptions that messages can break; empty in results older than these counts.
        dropped: the clients that did not count in a round, in the order of the rounds.
        state_metrics: by name and round, public numbers of the defense's state, such as `noise_multiplier`, and
            `update_norm`, the median l2 norm of the updates before the defense.
    """

    spec: TrainingSpec
    environment: Environment
    execution: Execution
    dim: int
    evaluations: tuple[Evaluation, ...]
    test_samples: int
    message_bytes: tuple[float, ...]
    snr_db: tuple[float | None, ...]
    one_round: ClaimRecord
    whole_run: ClaimRecord
    classes: tuple[str, ...]
    flags: tuple[Flag, ...]
    digest: str
    audited: AuditRecord | None = None
    violations: tuple[ViolationRecord, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    state_metrics: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stated = (each if each.samples else replace(each, samples=self.test_samples) for each in self.evaluations)
        object.__setattr__(self, "evaluations", tuple(stated))

    @property
    def accuracy(self) -> float | None:
        """Test accuracy of the last evaluated model; None for a task without accuracy."""
        return next((each.accuracy for each in reversed(self.evaluations) if each.accuracy is not None), None)

    @property
    def bits(self) -> float | None:
        """Mean bits per parameter that a client sends in a round; None without a round."""
        return 8 * float(np.mean(self.message_bytes)) / self.dim if self.message_bytes else None


@dataclass(frozen=True)
class Result:
    """One finished cell."""

    cell: Cell
    execution: Execution
    environment: Environment
    estimates: tuple[Estimate, ...]
    flags: tuple[Flag, ...]
    digest: str

    def estimate(self, name: str) -> Estimate:
        """The estimate called `name`.

        Raises:
            LookupError: there is no such estimate.
        """
        for estimate in self.estimates:
            if estimate.name == name:
                return estimate
        raise LookupError(f"no estimate {name!r}; there are: {', '.join(e.name for e in self.estimates)}")


@dataclass(frozen=True)
class Failure:
    """One cell that failed: the error in one line, and the full traceback."""

    cell: Cell
    kind: str
    message: str
    trace: str


@dataclass(frozen=True)
class Pictures:
    """The original images or texts and their reconstructions.

    original, guess: [victims, batch, height, width, channels] float32 in [0, 1], or words [victims, batch, places] of
        texts, or of the columns of records; guesses are matched to the originals.
    """

    original: npt.NDArray[np.float32] | npt.NDArray[np.str_]
    guess: npt.NDArray[np.float32] | npt.NDArray[np.str_]

    @property
    def of_text(self) -> bool:
        """Whether these are texts."""
        return self.original.dtype.kind == "U"


@dataclass(frozen=True)
class Scores:
    """Scores of a membership attack; a higher score means member.

    members: [m] float64, scores of records that took part; outside: [n] float64, scores of records that did not. who:
    a digest of the membership of all candidates, in their order.
    """

    members: npt.NDArray[np.float64]
    outside: npt.NDArray[np.float64]
    who: str = ""


@dataclass(frozen=True, repr=False)
class Run:
    """Everything in a folder of results: the input of reports and of the gate.

    Attributes:
        name: name of the study.
        study: the resolved study as plain data.
        study_hash: fingerprint of the resolved cells.
        cells: all planned cells, in the study's order.
        trainings: finished trainings by id.
        results: finished cells by id.
        failures: failed cells by id.
        missing: ids of cells with neither result nor failure.
        pictures: loads the pictures of a cell id; None if the cell has no pictures.
        scores: loads the membership scores of a cell id; None if the cell has no scores.
        seconds: durations by cell id and training id, where known.
        public_data: names of the data sets whose images are shown by default.
        data_hashes: digests by data set name.
        attacks: the attacks of the cells, by `PartSpec.key`.
        faults: the damaged files, each with its reason; their cells and trainings count as missing.
    """

    name: str
    study: dict[str, Any]
    study_hash: str
    cells: tuple[Cell, ...]
    trainings: dict[str, TrainingRecord]
    results: dict[str, Result]
    failures: dict[str, Failure]
    missing: tuple[str, ...]
    pictures: Callable[[str], Pictures | None]
    scores: Callable[[str], Scores | None]
    seconds: dict[str, float]
    public_data: frozenset[str]
    data_hashes: dict[str, str]
    attacks: dict[str, PartInfo]
    faults: tuple[str, ...] = ()

    @property
    def environments(self) -> tuple[Environment, ...]:
        """The distinct environments of trainings and results."""
        every = [one.environment for one in self.trainings.values()]
        every += [one.environment for one in self.results.values()]
        distinct = list[Environment]()
        for one in every:
            distinct += [] if one in distinct else [one]
        return tuple(distinct)

    @property
    def numerics(self) -> tuple[dict[str, str], ...]:
        """The distinct values of `Environment.numerics`."""
        return tuple({tuple(sorted(one.numerics.items())): one.numerics for one in self.environments}.values())

    def frame(self, *, items: bool = False) -> pd.DataFrame:
        """All values as a tidy pandas data frame: one row per value, with its question, interval, n and unit.

        The values are metrics, accuracy and loss by round, bytes, bits, signal-to-noise ratio, seconds, and the
        claimed, proved and audited epsilons. `core.rows` lists the quantities and columns; `leakgauge export` writes
        the same rows.

        Args:
            items: also give one row for each victim or record behind a metric.

        Raises:
            ImportError: pandas is not installed.
        """
        from leakgauge.harness.core.rows import frame, rows

        return frame(list(rows(self, items=items)))

    def __repr__(self) -> str:
        lacking = {"failed": len(self.failures), "without a result": len(self.missing)}
        rest = "".join(f", {count} {what}" for what, count in lacking.items() if count)
        done = f"{len(self.results)} of {len(self.cells)} cells on {len(self.trainings)} trainings{rest}"
        return f"<Run {self.name!r}: {done}>"

    def _repr_html_(self) -> str:
        from leakgauge.harness.core.rows import summary_html

        return summary_html(self)


@dataclass(frozen=True)
class PartInfo:
    """An attack for tables: `summary` is the first line of its docstring; the rest is as in `contract.Attack`."""

    name: str
    summary: str
    kind: str = ""
    aware: bool = False
    floor: bool = False
