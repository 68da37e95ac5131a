"""Runs a training, and stores its record and what attacks need of it: the requested models and messages.

Audits and claims that this user's studies computed before are read from a cache, by their question and the code behind
them. A stored answer is used only if it has the bytes of a fresh one: an entry names its question and is stored under
the digest of everything that an answer depends on (see `_behind`). An entry that is damaged, edited or answers another
question is replaced. Only shipped defenses have entries: for a user's module, neither its imports nor whether it still
matches its file is known.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import TypeAdapter

from leakgauge.harness.audit.claims import claim_to_data, record_claim
from leakgauge.harness.audit.standalone import audit_for_study, audited_part, sizes
from leakgauge.harness.core.cell import Cell, Malice, PartSpec, TrainingSpec
from leakgauge.harness.core.contract import Defense, Examples, Snapshot, claim_of
from leakgauge.harness.core.files import Damaged
from leakgauge.harness.core.result import AuditRecord, ClaimRecord, Execution, TrainingRecord, ViolationRecord
from leakgauge.harness.core.stored import canonical, fingerprint, to_data
from leakgauge.harness.core.threats import Threat, View
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Broadcast, Craft, Keep, Training, replay_state, train
from leakgauge.harness.federation.observe import TrainedFederation, before_rounds
from leakgauge.harness.federation.recording import RecordedData, Recording
from leakgauge.harness.federation.round import Round
from leakgauge.harness.learn.batch import Engine, choose_engine
from leakgauge.harness.learn.partition import sizes as sizes_of
from leakgauge.harness.study import fit
from leakgauge.harness.study.environment import SOURCES, cache_folder, code_of, environment, numerics, shipped
from leakgauge.harness.study.flags import training_flags
from leakgauge.harness.study.jobs import RunContext
from leakgauge.harness.study.prepare import (
    Prepared,
    as_recorded,
    attack_key,
    counted,
    prepare,
    problems,
    public_states,
    shared_key,
    to_arrays,
    trained_federation,
)
from leakgauge.harness.study.store import (
    Store,
    StoreError,
    arrays_digest,
    load,
    sealed,
    to_json,
    unsealed,
    write_atomically,
)

T = TypeVar("T")

_WORTH = 0.02  # the fewest seconds of a computation that gets an entry
_CODES = 8  # the number of code versions whose entries are kept; the oldest are removed first

_LOADED, _MARGIN = time.time(), 10.0
"""When this module was loaded, and the seconds before it in which the other modules may have been loaded."""


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
    if arrays is None or not {"asked", "asked models"} <= arrays.keys():  # other versions had others
        return False
    return keep.messages <= set(arrays["asked"].tolist()) and keep.models <= set(arrays["asked models"].tolist())


def run_training(spec: TrainingSpec, keep: Keep, context: RunContext) -> TrainingRecord:
    """Run one training; store its record, and the models and messages that the attacks need."""
    start = time.perf_counter()
    ready = prepare(spec, context.root)
    engine = choose_engine(ready.task, context.device)
    if isinstance(ready.data, RecordedData):
        training = _recorded(spec, ready, ready.data.recording, keep)
    else:
        sent, wanted = chosen_models(spec, ready, engine)
        training = train(
            *(ready.task, spec.federation, ready.defense, ready.holdings, ready.test, ready.key.child("training")),
            engine=engine,
            keep=keep,
            device=context.device,
            broadcasts=sent,
            crafts=wanted,
            strict=spec.strict,
            held_out=ready.held_out,
        )
    states = public_states(ready.defense, training)
    setting = counted(ready.setting, training)
    claims = [claim_of(ready.defense, history, setting) for history in (states[:1], states)]
    one_round, whole_run = (
        known(ClaimRecord, spec.defense, claim_to_data(claim), partial(record_claim, claim)) for claim in claims
    )
    audited, unaudited = _audit(ready, spec, context.device)
    assumed, counts = dict.fromkeys((*one_round.assumes, *whole_run.assumes)), training.violations
    record = TrainingRecord(
        spec=spec,
        environment=environment(context.device),
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
        violations=tuple(ViolationRecord(text, *counts[text]) for text in assumed if text in counts),
        dropped=tuple(training.dropped),
        state_metrics=_state_metrics(ready, training, states[: len(training.message_bytes)]),
    )
    caveats = training_flags(
        *(record, len(ready.data.classes), unaudited),
        misfits=_misfits(ready, training) if isinstance(ready.data, RecordedData) else (),
        data=ready.data.note,
        unrepeated=training.unrepeated,
        scores=type(ready.defense).likelihood is not Defense.likelihood,
    )
    record = dataclasses.replace(record, flags=caveats)
    context.store.write_training(record, to_arrays(training, keep), time.perf_counter() - start, code_of(spec))
    return record


def _recorded(spec: TrainingSpec, ready: Prepared, recording: Recording, keep: Keep) -> Training:
    """The training that a recording holds; raises ValueError if it is of another training, or is damaged."""
    for problem in problems(spec, (), recording, ready.task.layout):
        raise ValueError(problem)
    key = shared_key(ready.data, ready.key.child("training"))
    parts = ready.task, ready.defense, ready.setting, ready.test, ready.clients
    training = as_recorded(recording, keep, *parts, key)
    if spec.strict and training.dropped:
        first = training.dropped[0]
        raise ValueError(f"round {first.round}, client {first.client}: {first.reason}; the study is strict")
    return training


def _misfits(ready: Prepared, training: Training) -> list[str]:
    """What does not fit in the kept rounds of a recording, for messages whose records are known (`study.fit`)."""
    defense, found, key = ready.defense, list[str](), ready.key.child("fit")
    if defense.superposes or defense.local.poisson:
        return []
    for number, params in training.models.items():
        truth = training.truth.get(number, {})
        known = [message for message in training.messages.get(number, ()) if message.sender.number in truth]
        if not known or (number and defense.remember(ready.setting) is not None):
            continue
        chosen = fit.chosen(known, len(params))
        state = replay_state(defense, ready.setting, training.feedback[:number])
        rows = [np.asarray(ready.clients[sent.sender.number])[truth[sent.sender.number]] for sent in chosen]
        records = [Examples(ready.data.train.x[own], ready.data.train.y[own]) for own in rows]
        round_ = Round(defense, ready.setting, state, number)
        said = fit.Said(
            *(ready.task, params, training.learning_rates[number], round_, chosen, records, rows, ready.data.train),
            key.child(number),
        )
        with suppress(ValueError):  # one record has no gradient where a model mixes records
            if text := fit.misfit(said):
                found.append(f"round {number}: {text}")
    return found


def chosen_models(spec: TrainingSpec, ready: Prepared, engine: Engine) -> tuple[dict[int, Broadcast], dict[int, Craft]]:
    """What a malicious server broadcasts, and where a malicious participant moves the model, by round."""
    if spec.malice is None:
        return {}, {}
    attack, rounds = registry.build_attack(spec.malice.attack), spec.malice.target.looks_at
    nothing = Training(ready.setting, ready.task.init(ready.key.child("training", "init")))
    choose = chooser(spec.malice, trained_federation(spec, ready, nothing, engine), spec.seed)
    if "craft" in attack.needs:
        return {}, {rounds[0] - 1: Craft(choose, attack.forges)}
    return dict.fromkeys(rounds, choose), {}


def chooser(malice: Malice, federation: TrainedFederation, seed: int) -> Broadcast:
    """The function that chooses a model for a malicious server or participant, with what it knows before the training.

    Raises:
        ValueError: the federation lacks something that the target needs; of the function: the attack has no parameters
            for this task.
    """
    attack = registry.build_attack(malice.attack)
    crafts = "craft" in attack.needs
    view = View(Threat.PARTICIPANT, frozenset({"craft"})) if crafts else View(Threat.MALICIOUS_SERVER)
    before, key = before_rounds(federation, view, malice.target), attack_key(seed, malice.attack, malice.target)

    def choose(model: Snapshot, lr: float) -> Vector:
        return attack.broadcast(dataclasses.replace(before, model=model, lr=lr), key)

    return choose


def _audit(ready: Prepared, spec: TrainingSpec, device: str) -> tuple[AuditRecord | None, str]:
    """The audit that the study requests, or the reason why there is none; the training is valid without it."""
    if not spec.audit:
        return None, ""
    part = dataclasses.replace(spec.defense, parameters=spec.defense.parameters | ready.defense.settled(ready.setting))
    asked = part, ready.setting.of_one_client, spec.audit, ready.key.child("training", "audit")
    most = max(sizes_of(ready.holdings).values())
    try:
        training, rounds = audited_part(part, asked[1])
        question = {"training": training, "rounds": rounds, "trials": spec.audit, "key": repr(asked[3])}
        question["sizes"] = sizes(asked[1], most)
        if device != "cpu":  # the last digits depend on the card
            return audit_for_study(*asked, device, most), ""
        return known(AuditRecord, part, question, partial(audit_for_study, *asked, device, most)), ""
    except ValueError as error:
        return None, " ".join(str(error).split())


def _state_metrics(ready: Prepared, training: Training, states: Sequence[Any]) -> dict[str, tuple[float, ...]]:
    """The numbers of the rounds' states and the norms of the updates, by name and round."""
    rounds = [ready.defense.state_metrics(state, ready.setting) for state in states]
    state_metrics = {name: tuple(numbers[name] for numbers in rounds) for name in (rounds[0] if rounds else ())}
    return state_metrics | ({"update_norm": tuple(training.norms)} if training.norms else {})


def known(kind: type[T], defense: PartSpec, question: dict[str, Any], compute: Callable[[], T]) -> T:
    """The answer to a question about a defense: a stored one, else the result of `compute`, which is then stored.

    Args:
        kind: type of the answer, a record of `core.result`.
        question: all arguments of `compute` besides the defense, as data.
    """
    root = cache_folder()
    sources = _behind() if root is not None and shipped("defense", defense.name) else None
    if root is None or sources is None:
        return compute()
    asked = {"kind": kind.__name__, "defense": to_data(defense), "question": question, "behind": sources}
    path = root / "audits" / fingerprint(sources) / f"{fingerprint(asked, 32)}.json"
    stored = load(path, lambda content: _answer(kind, asked, content), {})
    if stored is not None:
        return stored
    start = time.process_time()
    answer = compute()
    if time.process_time() - start < _WORTH:
        return answer
    with suppress(StoreError, ValueError):  # a full disk, another user's folder, an infinite number: computed again
        content = sealed({"asked": asked, "answer": to_data(answer)})
        if to_json(to_data(_answer(kind, asked, content))) == to_json(to_data(answer)):
            _forget(path.parents[1], path.parent)
            write_atomically(path, content)
    return answer


def _answer(kind: type[T], asked: dict[str, Any], content: bytes) -> T:
    """The answer in an entry; raises Damaged if the entry was changed, or answers another question."""
    data = unsealed(content)
    if canonical(data["asked"]) != canonical(asked):
        raise Damaged("answers another question")
    answer: T = TypeAdapter(kind).validate_json(json.dumps(data["answer"]), strict=True)
    return answer


def _behind() -> dict[str, Any] | None:
    """Everything besides the question that an answer depends on; None if files are newer than this process's code."""
    root = Path(__file__).parents[2]
    newest = max(path.stat().st_mtime for room in SOURCES for path in (root / room).rglob("*.py"))
    if newest > _LOADED - _MARGIN:
        return None
    return {**numerics(), "chosen": environment().numerics}


def _forget(root: Path, current: Path) -> None:
    """Remove the entries of old code versions before the first entry of a new version is written."""
    if current.exists():
        return
    with suppress(OSError):
        codes = sorted(filter(Path.is_dir, root.iterdir()), key=lambda folder: folder.stat().st_mtime)
        for old in codes[: 1 - _CODES]:
            shutil.rmtree(old, ignore_errors=True)
