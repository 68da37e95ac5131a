"""Runs a training, and stores its record and what attacks need of it: the requested models and messages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from leakgauge.harness.audit.claims import claim_to_data, record_claim
from leakgauge.harness.audit.standalone import audit_for_study, audited_part
from leakgauge.harness.core.cell import Cell, TrainingSpec
from leakgauge.harness.core.contract import Defense, claim_of
from leakgauge.harness.core.result import AuditRecord, ClaimRecord, Execution, TrainingRecord, ViolationRecord
from leakgauge.harness.core.threats import Threat, View
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Broadcast, Keep, Training, train
from leakgauge.harness.federation.observe import before_rounds
from leakgauge.harness.federation.recording import RecordedData, Recording
from leakgauge.harness.learn.batch import Engine, choose_engine
from leakgauge.harness.study.cache import known
from leakgauge.harness.study.environment import code_of, environment
from leakgauge.harness.study.flags import training_flags
from leakgauge.harness.study.jobs import RunContext
from leakgauge.harness.study.prepare import (
    Prepared,
    attack_key,
    holds,
    prepare,
    public_states,
    to_arrays,
    trained_federation,
)
from leakgauge.harness.study.recorded import as_recorded, problems, shared_key
from leakgauge.harness.study.store import Store, arrays_digest


def keep_for(cells: Iterable[Cell]) -> Keep:
    """The rounds that a training must keep for these cells."""
    targets = [cell.target for cell in cells]
    rounds = frozenset(number for target in targets for number in target.looks_at)
    return Keep(rounds, frozenset(number for t in targets if t.kind != "probe" for number in t.looks_at))


def training_suffices(spec: TrainingSpec, keep: Keep, store: Store) -> bool:
    """Whether the stored training has everything that these attacks need."""
    if store.read_training(spec.id) is None:
        return False
    arrays = store.read_arrays(store.training(spec.id) / "kept.npz")
    return arrays is not None and holds(arrays, keep)


def run_training(spec: TrainingSpec, keep: Keep, context: RunContext) -> TrainingRecord:
    """Run one training; store its record, and the models and messages that the attacks need."""
    start = time.perf_counter()
    ready = prepare(spec, context.root)
    engine = choose_engine(ready.task, context.device)
    if isinstance(ready.data, RecordedData):
        training = _recorded(spec, ready, ready.data.recording, keep)
    else:
        training = train(
            *(ready.task, spec.federation, ready.defense, ready.holdings, ready.test, ready.key.child("training")),
            engine=engine,
            keep=keep,
            device=context.device,
            broadcasts=broadcasts(spec, ready, engine),
            strict=spec.strict,
        )
    states = public_states(ready.defense, training)
    claims = [claim_of(ready.defense, history, ready.setting) for history in (states[:1], states)]
    one_round, whole_run = (
        known(ClaimRecord, spec.defense, claim_to_data(claim), partial(record_claim, claim)) for claim in claims
    )
    audited, unaudited = _audit(ready, spec, context.device)
    record = TrainingRecord(
        spec=spec,
        environment=environment(),
        execution=Execution(context.device, torch.get_num_threads(), engine),
        dim=ready.task.layout.dim,
        evaluations=tuple(training.evaluations),
        test_samples=len(ready.test.y),
        message_bytes=tuple(training.message_bytes),
        snr_db=tuple(training.snr_db),
        one_round=one_round,
        whole_run=whole_run,
        classes=ready.data.classes,
        flags=(),
        digest=arrays_digest({"final": training.final.numpy()}),
        audited=audited,
        violations=_violations(training, one_round, whole_run),
        dropped=tuple(training.dropped),
        state_metrics=_state_metrics(ready, training, states[: len(training.message_bytes)]),
    )
    caveats = training_flags(
        *(record, len(ready.data.classes), unaudited),
        data=ready.data.note,
        unrepeated=training.unrepeated,
        scores=type(ready.defense).likelihood is not Defense.likelihood,
    )
    record = dataclasses.replace(record, flags=caveats)
    context.store.write_training(record, to_arrays(training, keep), time.perf_counter() - start, code_of(spec))
    return record


def _recorded(spec: TrainingSpec, ready: Prepared, recording: Recording, keep: Keep) -> Training:
    """The training that a recording holds.

    Raises:
        ValueError: the recording is of another training, or is damaged.
    """
    for problem in problems(spec, (), recording, ready.task.layout):
        raise ValueError(problem)
    key = shared_key(ready.data, ready.key.child("training"))
    parts = ready.task, ready.defense, ready.setting, ready.test, ready.clients
    training = as_recorded(recording, keep, *parts, key)
    if spec.strict and training.dropped:
        first = training.dropped[0]
        raise ValueError(f"round {first.round}, client {first.client}: {first.reason}; the study is strict")
    return training


def broadcasts(spec: TrainingSpec, ready: Prepared, engine: Engine) -> dict[int, Broadcast]:
    """The broadcast of a malicious server in each attacked round; empty if the server is honest."""
    if spec.malice is None:
        return {}
    attack, target = registry.build_attack(spec.malice.attack), spec.malice.target
    nothing = Training(ready.setting, ready.task.init(ready.key.child("training", "init")))
    before = before_rounds(trained_federation(spec, ready, nothing, engine), View(Threat.MALICIOUS_SERVER), target)
    key = attack_key(spec.seed, spec.malice.attack, target)
    return dict.fromkeys(
        target.looks_at, lambda model, lr: attack.broadcast(dataclasses.replace(before, model=model, lr=lr), key)
    )


def _audit(ready: Prepared, spec: TrainingSpec, device: str) -> tuple[AuditRecord | None, str]:
    """The audit that the study requests, or the reason why there is none; the training is valid without it."""
    if not spec.audit:
        return None, ""
    asked = spec.defense, ready.setting, spec.audit, ready.key.child("training", "audit")
    try:
        training, rounds = audited_part(*asked[:2])
        question = {"training": training, "rounds": rounds, "trials": spec.audit, "key": repr(asked[3])}
        if device != "cpu":  # the last digits depend on the card
            return audit_for_study(*asked, device), ""
        return known(AuditRecord, spec.defense, question, partial(audit_for_study, *asked)), ""
    except ValueError as error:
        return None, " ".join(str(error).split())


def _violations(training: Training, *claims: ClaimRecord) -> tuple[ViolationRecord, ...]:
    """The counts of broken assumptions of these claims, in the order of the assumptions."""
    texts, counts = dict.fromkeys(text for claim in claims for text in claim.assumes), training.violations
    return tuple(ViolationRecord(text, *counts[text]) for text in texts if text in counts)


def _state_metrics(ready: Prepared, training: Training, states: Sequence[Any]) -> dict[str, tuple[float, ...]]:
    """The numbers of the rounds' states and the norms of the updates, by name and round."""
    rounds = [ready.defense.state_metrics(state, ready.setting) for state in states]
    state_metrics = {name: tuple(numbers[name] for numbers in rounds) for name in (rounds[0] if rounds else ())}
    return state_metrics | ({"update_norm": tuple(training.norms)} if training.norms else {})
