"""Runs with invented, plausible numbers, in the types that the reports read."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from scipy import special

from leakgauge.harness.core.cell import Cell, FederationSpec, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.result import (
    AuditRecord,
    ClaimRecord,
    Environment,
    Estimate,
    Evaluation,
    Execution,
    Failure,
    Flag,
    PartInfo,
    Pictures,
    ProofRecord,
    Result,
    Run,
    Scores,
    TrainingRecord,
)
from leakgauge.harness.core.stats import against, mean, of_items
from leakgauge.harness.core.stored import fingerprint, to_data
from leakgauge.harness.core.threats import Threat

TASK = TaskSpec("invented", "lenet-dlg")
FEDERATION = FederationSpec(clients=10, rounds=8, batch=1)
PROBE = Target("probe", 0, count=6)
ARITHMETIC = {"vector instructions": "AVX512", "processor": "Invented", "MKL_CBWR": "AVX2"}
ENVIRONMENT = Environment(
    "4f0c2d7a" * 5, False, "3.11.9", {"torch": "2.13.0", "numpy": "2.4.6"}, "Linux x86_64", ARITHMETIC
)
EXECUTION = Execution("cpu", 1, "batched")

NONE = PartSpec("none", {})
GAUSSIAN = [PartSpec("gaussian", {"clip": 1.0, "epsilon": e, "delta": 1e-5}) for e in (1.0, 4.0, 16.0, 64.0)]
LAPLACE = [PartSpec("laplace", {"scale": s}) for s in (0.5, 0.05)]
SQSGD = PartSpec("sqsgd", {"bits": 2})
MATCHING = PartSpec("matching", {"objective": "l2", "restarts": 2})
MAP = PartSpec("map", {"prior": "tv", "weight": 20.0})
THRESHOLD = PartSpec("threshold", {})
PRIOR = PartSpec("prior", {"guess": "mean"})
LINEUP = PartSpec("lineup", {})

NOTHING = "NOTHING PROMISED"
EVERYBODY = tuple(sorted(threat.value for threat in Threat))

ATTACKS = {
    "matching": PartInfo("matching", "Gradient matching.", "reconstruction"),
    "map": PartInfo("map", "Most likely image under the known defense.", "reconstruction", aware=True),
    "threshold": PartInfo("threshold", "Loss threshold.", "membership"),
    "lineup": PartInfo("lineup", "The likeliest of the candidates.", "lineup", aware=True),
    "prior": PartInfo("prior", "A guess that looks at nothing.", "reconstruction", floor=True),
}


def wave(*parts: object) -> float:
    """A number in [0, 1] that depends only on its arguments."""
    return int(fingerprint([str(part) for part in parts], 8), 16) / 0xFFFFFFFF


def leak(defense: PartSpec, attack: PartSpec) -> float:
    """The share of an image that an attack sees, in [0, 1]."""
    if attack.name == "prior":
        return 0.0
    epsilon = float(defense.parameters.get("epsilon") or 1.0)
    noise = {"none": 0.0, "gaussian": 9.0 / epsilon, "sqsgd": 0.35, "generous": 12.0 / epsilon}
    noise |= {"points": 0.6 / epsilon, "dithered": 1.2 / epsilon, "sampled": 2.4 / epsilon}
    strength = noise.get(defense.name, 3.0 * float(defense.parameters.get("scale") or 0.0))
    return math.exp(-strength / (2.5 if attack.name == "map" else 1.0))


def ssim_values(cell: Cell) -> tuple[float, ...]:
    """One SSIM per victim."""
    sees = leak(cell.training.defense, cell.attack) * math.exp(-0.1 * (cell.target.round or 0))
    jitter = [wave(cell.training.seed, "victim", at) - 0.5 for at in range(cell.target.count)]
    return tuple(round(min(0.99, max(0.01, 0.16 + 0.78 * sees + 0.16 * x)), 4) for x in jitter)


def scene(at: int, size: int = 24) -> np.ndarray:
    """A small color picture: hills, a sun, rings or stripes."""
    y, x = np.mgrid[0:size, 0:size] / (size - 1)
    hill = (y > 0.62 + 0.14 * np.sin(6.0 * x + at)).astype(float)
    sun = (np.hypot(x - 0.25 - 0.08 * (at % 6), y - 0.3) < 0.16).astype(float)
    ring = (np.abs(np.hypot(x - 0.5, y - 0.55) - 0.14 - 0.03 * (at % 4)) < 0.045).astype(float)
    sky = np.stack([0.45 + 0.3 * y, 0.62 + 0.1 * y, 0.85 - 0.25 * y], -1)
    image = sky * (1 - hill[..., None]) + hill[..., None] * [0.2 + 0.06 * (at % 5), 0.45 - 0.05 * (at % 3), 0.22]
    image = image * (1 - sun[..., None]) + sun[..., None] * [0.98, 0.82, 0.35]
    if at % 2:
        image = image * (1 - ring[..., None]) + ring[..., None] * [0.75, 0.2, 0.25]
    return image.astype(np.float32)


def pictures_of(cell: Cell) -> Pictures:
    """The scenes, and the same with noise by SSIM."""
    originals = np.stack([scene(at + cell.training.seed) for at in range(cell.target.count)])[:, None]
    seen = np.array(ssim_values(cell)).reshape(-1, 1, 1, 1, 1)
    noise = np.random.default_rng(int(cell.id[:8], 16)).uniform(size=originals.shape)
    guess = np.full_like(originals, 0.5) if cell.attack.name == "prior" else seen * originals + (1 - seen) * noise
    return Pictures(originals, guess.astype(np.float32))


def scores_of(cell: Cell) -> Scores:
    """Normal scores, further apart the more the defense leaks."""
    draws = np.random.Generator(np.random.Philox(key=int(fingerprint(cell.id, 8), 16)))
    count, apart = cell.target.count, 1.5 * leak(cell.training.defense, cell.attack)
    return Scores(apart + draws.standard_normal(count), draws.standard_normal(count))


def reconstruction_estimates(cell: Cell) -> tuple[Estimate, ...]:
    values = ssim_values(cell)
    mse = [0.12 * (1 - value) ** 2 for value in values]
    return (
        mean("ssim", values),
        mean("mse", mse),
        mean("psnr", [-10 * math.log10(m) for m in mse]),
        mean("label_accuracy", [1.0] * len(values)),
        *of_lineups(values),
    )


def of_lineups(values: Sequence[float | None]) -> tuple[Estimate, ...]:
    """Identified among 100 from an SSIM of 0.3 on, recognizable from 0.5 on."""
    identified, recognized = (
        of_items(name, [float(value is not None and value >= least) for value in values])
        for name, least in (("identification", 0.3), ("recognized", 0.5))
    )
    return against(identified, 1 / 100), recognized


def membership_estimates(cell: Cell) -> tuple[Estimate, ...]:
    """The estimates of a membership attack; the last has no value."""
    value = 0.5 + 0.25 * leak(cell.training.defense, MATCHING) + 0.01 * wave(cell.training.seed)
    rate = 0.01 + 0.2 * (value - 0.5)
    few = "0.1 % of 200 non-members is less than one record"
    return (
        auc_of(value),
        Estimate("tpr@1%", rate, rate / 2, 2 * rate, 200, "Clopper-Pearson", higher_leaks=True),
        Estimate("tpr@0.1%", None, None, None, 200, "Clopper-Pearson", higher_leaks=True, note=few),
    )


def auc_of(value: float, each: int = 200) -> Estimate:
    """An AUC of so many members and non-members, with the normal approximation of the rank-sum test."""
    p = float(special.ndtr((0.5 - value) * each * math.sqrt(12 / (2 * each + 1))))
    ends = max(0.0, value - 0.03), min(1.0, value + 0.03)
    return Estimate("auc", value, *ends, 2 * each, "DeLong", higher_leaks=True, chance=0.5, p=p)


def result_of(cell: Cell) -> Result:
    estimates = membership_estimates(cell) if cell.attack.name == "threshold" else reconstruction_estimates(cell)
    few = Flag("few-images", f"{cell.target.count} images; a comparison needs 8 or more")
    flags = [few] * (cell.target.kind == "probe")
    flags += [Flag("naive", "the attack ignores the defense", "note")] * (cell.attack == MATCHING)
    return Result(cell, EXECUTION, ENVIRONMENT, estimates, tuple(flags), fingerprint(cell.id))


def proof(epsilon: float | None, delta: float, unit: str, reason: str, **changes: object) -> ProofRecord:
    """A proof: attained and in closed form by default."""
    fields = {"method": "closed form", "tight": True, "against": EVERYBODY} | changes
    return ProofRecord(epsilon, delta, unit, reason=reason, **fields)


def claim(epsilon: float | None, horizon: str, proved: ProofRecord, verdict: str, **changes: object) -> ClaimRecord:
    """A claim for the unit and delta of its proof, with the reason in the form of `harness.core.claim`."""
    promised = epsilon is not None
    numbers = f"claimed {epsilon:.6g}, proved {proved.epsilon or math.inf:.6g} a {proved.unit}" if promised else ""
    numbers += f" at delta {proved.delta:g}" if promised and proved.delta else ""
    fields = {"relation": "any-two-inputs", "source": "", "assumes": (), "further": (), "unit": proved.unit}
    fields |= {"against": proved.against if promised else (), "delta": proved.delta} | changes
    reason = f"{numbers}: {proved.reason}" if promised else proved.reason
    return ClaimRecord(epsilon, horizon=horizon, proved=proved, verdict=verdict, reason=reason, **fields)


def claim_of(defense: PartSpec, horizon: str) -> ClaimRecord:
    rounds = 1 if horizon == "one round" else FEDERATION.rounds
    if defense.name == "gaussian":
        epsilon = float(defense.parameters["epsilon"] or 0.0) * math.sqrt(rounds)
        why = "normal noise on a record's clipped gradient."
        held = proof(epsilon, 1e-5, "record", why, method="analytic Gaussian", against=("server", "eavesdropper"))
        assumes = ("a record is in one batch per round", "the clip bounds each record's gradient")
        about = {"relation": "replace", "source": "Balle, Wang 2018", "assumes": assumes}
        return claim(epsilon, horizon, held, "HOLDS", **about)
    if defense.name == "laplace":
        epsilon = 2.0 / float(defense.parameters["scale"] or 1.0) * rounds
        held = proof(epsilon, 0.0, "coordinate", "Laplace noise on each coordinate.")
        whole = proof(12_000 * epsilon, 0.0, "message", "all 12000 coordinates may move at once.")
        return claim(epsilon, horizon, held, "HOLDS", source="Dwork 2006", further=(whole,))
    if defense.name in CHECKED:
        return checked_claim(defense.name, float(defense.parameters["epsilon"] or 0.0), horizon, rounds)
    why = "The update is sent as it is." if defense.name == "none" else "A quantizer without noise."
    held = proof(None, 0.0, "message", why, method="by definition", against=())
    return claim(None, horizon, held, NOTHING)


def checked_claim(name: str, epsilon: float, horizon: str, rounds: int) -> ClaimRecord:
    """A claim that does not simply hold.

    points: BROKEN by a finite amount, as a message has several points of one update and the source counts one;
    dithered: BROKEN without bound, as bounded noise reveals the cell of an update with probability 0.31;
    sampled: UNPROVED over a run: only an upper bound per client, and none against adversaries that see the messages;
    generous: LOOSE, as the textbook's formula needs more noise than epsilon does.
    """
    if name == "points":
        why = "a message has 113 points of one update, each with less than epsilon; they add up."
        about = "an article, randomized response on one point; another article, comparison at equal bits"
        held = proof(111.566 * epsilon * rounds, 0.0, "message", why)
        return claim(epsilon * rounds, horizon, held, "BROKEN", source=about)
    if name == "dithered":
        held = proof(
            None, 1e-5, "sub-vector", "noise of bounded support: with chance 0.31 the two cells do not overlap."
        )
        return claim(epsilon * rounds, horizon, held, "BROKEN", source="an article, Theorem 1")
    if name == "generous":
        why = "the formula of the textbook; the exact one needs less noise."
        held = proof(0.8 * epsilon * math.sqrt(rounds), 1e-5, "record", why, method="analytic Gaussian")
        about = {"relation": "replace", "source": "Dwork, Roth 2014, Theorem A.1"}
        return claim(epsilon * rounds, horizon, held, "LOOSE", **about)
    about = {"method": "privacy loss distribution", "tight": False, "against": ("participant", "public")}
    why = "sampling without replacement, composed round by round."
    held = proof(epsilon * (1.0 if rounds == 1 else 3.8), 1e-5, "client", why, **about)
    about = {"method": "by definition", "against": ("server", "colluding-server", "eavesdropper")}
    bare = proof(None, 1e-5, "client", "messages are clipped and sent without noise.", **about)
    assumes = ("the server is honest and reveals no message", "the participants of a round are secret")
    about = {"relation": "add-remove", "source": "an article, Algorithm 1", "assumes": assumes, "further": (bare,)}
    promised, verdict = epsilon * (1.0 if rounds == 1 else 3.4), "HOLDS" if rounds == 1 else "UNPROVED"
    return claim(promised, horizon, held, verdict, **about)


CHECKED = ("points", "dithered", "sampled", "generous")
CHECKED_PARTS = [PartSpec(name, {"epsilon": e}) for name in CHECKED for e in (2.0, 8.0)]


def training_of(spec: TrainingSpec) -> TrainingRecord:
    keep = leak(spec.defense, MAP)
    best = 0.55 + 0.35 * keep + 0.02 * (wave("accuracy", spec.seed) - 0.5)
    rounds = range(spec.federation.rounds + 1)
    curve = [
        Evaluation(r, 0.1 + (best - 0.1) * (1 - math.exp(-0.5 * r)), 2.3 - 1.9 * best * r / (r + 2)) for r in rounds
    ]
    bits = 2.1 if spec.defense.name == "sqsgd" else 32.0
    snr = None if spec.defense.name == "none" else 20.0 * keep - 4.0
    return TrainingRecord(
        spec=spec,
        environment=ENVIRONMENT,
        execution=EXECUTION,
        dim=12_000,
        evaluations=tuple(curve),
        test_samples=500,
        message_bytes=(12_000 * bits / 8,) * spec.federation.rounds,
        snr_db=(snr,) * spec.federation.rounds,
        one_round=claim_of(spec.defense, "one round"),
        whole_run=claim_of(spec.defense, "whole run"),
        classes=("hill", "sun"),
        flags=(),
        digest=fingerprint(spec.id),
    )


def grid(
    defenses: Iterable[PartSpec],
    attacks: Iterable[tuple[PartSpec, Target, str]],
    seeds: Sequence[int] = (0, 1),
    *,
    task: TaskSpec = TASK,
    federation: FederationSpec = FEDERATION,
) -> tuple[Cell, ...]:
    """The cells of a study, in its order."""
    questions = list(attacks)
    return tuple(
        Cell(TrainingSpec(task, federation, defense, seed), attack, target, threat)
        for defense in defenses
        for attack, target, threat in questions
        for seed in seeds
    )


def make_run(
    cells: Sequence[Cell],
    *,
    failed: Callable[[Cell], bool] = lambda cell: False,
    missing: Callable[[Cell], bool] = lambda cell: False,
    make: Callable[[Cell], Result] = result_of,
    pictures: Callable[[Cell], Pictures | None] = pictures_of,
    public: Iterable[str] = ("invented",),
    name: str = "invented-study",
) -> Run:
    """A run as `load_run` reads it; a training has a record if one of its cells is done."""
    lost = {cell.id for cell in cells if failed(cell)}
    absent = {cell.id for cell in cells if missing(cell)} - lost
    done = [cell for cell in cells if cell.id not in lost | absent]
    by_id = {cell.id: cell for cell in cells}
    specs = {cell.training.id: cell.training for cell in done}
    return Run(
        name=name,
        study={"name": name, "title": "An invented study", "cells": [to_data(cell) for cell in cells[:2]]},
        study_hash=fingerprint([cell.id for cell in cells]),
        cells=tuple(cells),
        trainings={key: training_of(spec) for key, spec in specs.items()},
        results={cell.id: make(cell) for cell in done},
        failures={i: Failure(by_id[i], "RuntimeError", "out of memory\nsecond line", "trace") for i in sorted(lost)},
        missing=tuple(sorted(absent)),
        pictures=lambda identity: pictures(by_id[identity]) if by_id[identity].attack.name != "threshold" else None,
        scores=lambda identity: scores_of(by_id[identity]) if by_id[identity].attack.name == "threshold" else None,
        seconds={cell.id: 1.0 + 20.0 * wave(cell.id) for cell in done},
        public_data=frozenset(public),
        data_hashes={"invented": fingerprint("invented")},
        attacks={cell.attack.key: ATTACKS[cell.attack.name] for cell in cells},
    )


@functools.cache
def checked_run() -> Run:
    """Claims with every verdict, for several units, some infinite."""
    defenses = [NONE, *GAUSSIAN[:2], LAPLACE[0], SQSGD, *CHECKED_PARTS]
    attacks = [(MATCHING, PROBE, "server"), (PRIOR, PROBE, "server")]
    return make_run(grid(defenses, attacks), name="checked-study")


def audit(claimed: float | None, proved: float | None, lower: float, unit: str, **changes: object) -> AuditRecord:
    """An audit of one round of three clients by the server, with its verdict."""
    promised = claimed is not None
    verdict = "BROKEN" if promised and lower > claimed else "HOLDS" if promised else NOTHING
    fields: dict[str, object] = {"delta": 0.0, "relation": "any-two-inputs", "horizon": "one round", "rounds": 1}
    fields |= {"clients": 3, "samples": 20, "dim": 36, "confidence": 0.95, "trials": 1000, "threat": "server"}
    fields |= {"distinguisher": "likelihood ratio", "pair": "one sub-vector, at 45 degrees", "strict": lower}
    fields |= {"method": "Clopper-Pearson", "any_mechanism": lower, "verdict": verdict, "reason": f"above {lower}."}
    fields |= {"ceiling": 4.88, "code": "CONSISTENT", "contradictions": (), "seen": "seen", "fit": None}
    return AuditRecord(claimed, proved, lower, unit=unit, **(fields | changes))


def audited_run(seeds: Sequence[int] = (0,)) -> Run:
    """An audit that refutes, one over a whole run, one with a bound of zero, one of an infinite claim, and none."""
    dithered, generous = PartSpec("dithered", {"epsilon": 2.0}), PartSpec("generous", {"epsilon": 2.0})
    gaussian = {"method": "Gaussian trade-off", "delta": 1e-5, "any_mechanism": 0.31, "pair": "one record"}
    audits = {
        "dithered": audit(2.0, 4.0545, 2.8337, "sub-vector", delta=1e-5),
        "generous": audit(9.0, 4.5, 1.75, "record", horizon="whole run", rounds=5, **gaussian),
        "points": audit(2.0, 223.132, 0.0, "message", pair="all coordinates"),
        "none": audit(None, None, 5.6006, "message", pair="first coordinate"),
    }
    run = make_run(grid([NONE, dithered, generous, CHECKED_PARTS[0], SQSGD], [(MATCHING, PROBE, "server")], seeds))
    trainings = {
        key: dataclasses.replace(record, audited=audits.get(record.spec.defense.name))
        for key, record in run.trainings.items()
    }
    return dataclasses.replace(run, trainings=trainings)


@functools.cache
def full_run() -> Run:
    """Every kind of attack on every kind of defense, with failed cells and a missing one."""
    attacks = [(attack, Target("probe", at, 6), "server+labels") for attack in (MATCHING, MAP, PRIOR) for at in (0, 4)]
    attacks += [(MATCHING, PROBE, "eavesdropper"), (PRIOR, PROBE, "eavesdropper")]
    attacks += [(THRESHOLD, Target("members", count=200), "public")]
    cells = grid([NONE, *GAUSSIAN, *LAPLACE, SQSGD], attacks)
    failed = {c.id for c in cells if c.training.defense == SQSGD and c.attack == MAP and c.training.seed == 1}
    return make_run(cells, failed=lambda c: c.id in failed, missing=lambda c: c.id == cells[20].id)


def with_estimates(result: Result, *estimates: Estimate) -> Result:
    return dataclasses.replace(result, estimates=estimates)
