"""`leakgauge.opacus.inspect`: an Opacus training's epsilon, an audit of its optimizer, attacks on its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from leakgauge.harness.core.claim import Judgment

if TYPE_CHECKING:
    from leakgauge.harness.core.answer import Answer
    from leakgauge.harness.core.result import Run
    from leakgauge.harness.integrations.opacus import Facts, TrainingBound
    from leakgauge.harness.integrations.synthetic import Part


@dataclass(frozen=True)
class Inspection:
    """The results of an inspection; its text has a few lines for each part.

    Attributes:
        facts: facts about the training.
        promise: for one record over the whole training: the accountant's epsilon, the proved epsilon, and the verdict.
        audit: an audit of one optimizer step that takes the record, in the form that `leakgauge.audit` returns.
        run: the attacks on the gradients of single records; the adversary knows the other records of the batch.
        page: the file of the report.
        trained: a lower bound for the whole training, from the audited step and the draws of the loader's sampler;
            None if the step departs from its distribution.
        notes: a claimed epsilon that is not the accountant's, and a delta that protects too few records.
    """

    facts: Facts
    promise: Judgment
    audit: Answer
    run: Run
    page: Path
    trained: TrainingBound | None = None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        from leakgauge.harness.cli.claim_text import audit_lines

        noise = f"noise of {self.facts.noise:g} times the clip {self.facts.clip:g}"
        how = "by Poisson sampling" if self.facts.poisson else "without Poisson sampling"
        rows = [
            f"steps of {self.facts.batch} of {self.facts.samples:,} records {how}, {noise}",
            f"training: {self.promise.verdict.value}: {self.promise.reason}",
            *self._trained(),
            *(f"note: {note}" for note in self.notes),
            f"one step: {self.audit['verdict']}: {self.audit['reason']}",
            *audit_lines(self.audit.record),
            repr(self.run),
            f"report: {self.page}",
        ]
        return "\n".join(rows)

    def _trained(self) -> list[str]:
        if self.trained is None:
            return []
        low, confidence, drawn, draws = self.trained
        share = f"; its sampler took a record in {drawn:,} of {draws:,} draws" if draws else ""
        finite = 0 < self.promise.proved < math.inf
        proved = f"{low / self.promise.proved:.0%} of what is proved" if finite else "proved: 0"
        how = f"confidence {confidence:g}, if all steps are like the audited one{share}"
        return [f"training: audited epsilon >= {low:.4g}, {proved} ({how})"]


def inspect(
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    *,
    epochs: int,
    folder: str | Path,
    delta: float = 1e-5,
    accountant: str = "prv",
    loss: object = None,
    victims: int = 8,
    attacks: Sequence[Part] | None = None,
    minutes: float = 5.0,
    trials: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Inspection:
    """Inspect what `PrivacyEngine.make_private` returned: promise, optimizer, gradients; writes `folder/report.html`.

    The audit and the attacks use this optimizer's own step; they change neither the training nor its accountant.

    Args:
        model, optimizer, loader: as `make_private` returned them. The attacks use the model's current weights.
        epochs: number of epochs of the whole training.
        delta: delta at which the training's epsilon is stated.
        accountant: the engine's accountant: prv (its default), rdp or gdp.
        loss: what the training minimizes, as for `leakgauge.inspect`; default: cross-entropy, for one output the binary
            one. Where it is a function of scores and labels, as the data set has them, the attacks assume this default.
        victims: number of records whose gradients are attacked.
        attacks, minutes, progress: as for `leakgauge.inspect`.
        trials: trials of the audit with each input; default: 1000, or more if the proof needs them.

    Raises:
        OpacusError, ValueError, LookupError: ghost, per-layer or adaptive clipping, a model that cannot be attacked, or
            a wrong argument; the error is one line.

    Source: Abadi et al. 2016, Algorithm 1; Opacus 1.6.
    """
    from leakgauge.harness.audit.standalone import audit
    from leakgauge.harness.cli import inspect as attacked
    from leakgauge.harness.core.checks import listed, numbers, path_of, positive
    from leakgauge.harness.core.claim import judge
    from leakgauge.harness.core.result import AuditRecord
    from leakgauge.harness.core.rng import Key
    from leakgauge.harness.integrations import opacus as own
    from leakgauge.harness.integrations import opacus_step as steps
    from leakgauge.harness.integrations.synthetic import part_spec

    numbers((int, np.integer), epochs=epochs, victims=victims, seed=seed)
    numbers((int, float), delta=delta, minutes=minutes)
    positive(victims=victims, minutes=minutes)
    folder, (assumed, minimized) = path_of("folder", folder), steps.loss_of(loss)
    for attack in [] if attacks is None else listed("attacks", attacks):
        part_spec("attack", attack)
    facts, network = own.facts_of(optimizer, loader), steps.bare(model)
    claim = own.claim_of(facts, epochs, delta, accountant)
    with steps.stepping(optimizer) as name:
        audited = audit(steps.STEP, {"of": name, "delta": delta}, {"dim": steps.DIM}, 1, trials=trials, seed=seed)
        run = attacked.inspect(
            network,
            loader.dataset,
            train_step=lambda _, x, y: steps.gradient_of(
                model, optimizer, minimized, x, steps.shaped_as(loader.dataset, y)
            ),
            defense={"name": "dp-sgd", "clip": facts.clip, "noise_std": facts.noise, "delta": delta},
            folder=folder,
            victims=victims,
            attacks=attacks,
            loss=assumed,
            minutes=minutes,
            seed=seed,
            progress=progress,
        )
    step = audited.record.audit
    assert isinstance(step, AuditRecord)
    trained = own.training_bound(facts, loader, epochs, delta, step, Key(seed).child("sampler"))
    notes = own.notes_of(facts, claim)
    return Inspection(facts, judge(claim), audited, run, Path(folder) / "report.html", trained, notes)
