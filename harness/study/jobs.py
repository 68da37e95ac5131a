"""The two pieces of work that a study consists of: train once, and attack one cell."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from leakgauge.harness import data
from leakgauge.harness.audit.audit_record import audit_defense
from leakgauge.harness.audit.claim_record import record_claim
from leakgauge.harness.core.cell import Cell, TaskSpec, TrainingSpec, canonical, fingerprint
from leakgauge.harness.core.contract import Defense, Examples, Labels, Membership, Reconstruction, Setting
from leakgauge.harness.core.result import AuditRecord, ClaimRecord, Estimate, Execution, Result, TrainingRecord, to_data
from leakgauge.harness.core.rng import Key, subset
from leakgauge.harness.core.threats import View
from leakgauge.harness.data import DataSet
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep, Training, make_setting, train
from leakgauge.harness.federation.observe import Scene, Truth, observe
from leakgauge.harness.learn import models
from leakgauge.harness.learn.batch import choose_engine
from leakgauge.harness.learn.partition import partition
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.environment import environment
from leakgauge.harness.study.flags import cell_flags, training_flags
from leakgauge.harness.study.replay import from_arrays, holds, to_arrays
from leakgauge.harness.study.score import score_labels, score_membership, score_reconstruction
from leakgauge.harness.study.store import Arrays, Store, arrays_digest


class Prepared(NamedTuple):
    """A training's ingredients, the same in every process."""

    task: ModelTask
    data: DataSet
    test: Examples
    clients: dict[int, Any]
    defense: Defense[Any, Any]
    setting: Setting
    key: Key

    @property
    def holdings(self) -> dict[int, Examples]:
        """Each client's data."""
        x, y = self.data.train
        return {number: Examples(x[rows], y[rows]) for number, rows in self.clients.items()}


@functools.lru_cache(maxsize=4)
def load_data(name: str, root: Path) -> DataSet:
    """A data set, kept for the next piece of work of this process."""
    return data.load(name, root)


def make_task(spec: TaskSpec, loaded: DataSet) -> ModelTask:
    """The task of a specification on its data.

    Raises:
        LookupError: no such model.
        ValueError: the model does not take this data's shape.
    """
    return ModelTask(models.build(spec.model, loaded.input_shape, len(loaded.classes)), spec.init)


def prepare(spec: TrainingSpec, root: Path) -> Prepared:
    """Load, build and partition what a training needs."""
    loaded = load_data(spec.task.data, root)
    task = make_task(spec.task, loaded)
    key = Key(spec.seed)
    parts = partition(spec.federation, loaded.train.y, key.child("training", "partition"))
    clients = dict(enumerate(parts))
    test = loaded.test
    if spec.federation.test_samples is not None and spec.federation.test_samples < len(test.y):
        rows = subset(key.child("training", "test"), len(test.y), spec.federation.test_samples)
        test = Examples(test.x[rows], test.y[rows])
    x, y = loaded.train
    defense = registry.build_defense(spec.defense)
    holdings = {k: Examples(x[rows], y[rows]) for k, rows in clients.items()}
    setting = make_setting(task, spec.federation, holdings, defense.local)
    return Prepared(task, loaded, test, clients, defense, setting, key)


def run_training(spec: TrainingSpec, keep: Keep, store: Store, root: Path, device: str = "cpu") -> TrainingRecord:
    """Train once and store the record with what the attacks need of it."""
    start = time.perf_counter()
    ready = prepare(spec, root)
    engine = choose_engine(ready.task, device)
    training = train(
        ready.task,
        spec.federation,
        ready.defense,
        ready.holdings,
        ready.test,
        ready.key.child("training"),
        engine=engine,
        keep=keep,
        device=device,
    )
    execution = Execution(device, torch.get_num_threads(), engine)
    one_round, whole_run = _claims(ready, training)
    audited, unaudited = _audit(ready, spec)
    record = TrainingRecord(
        spec=spec,
        environment=environment(),
        execution=execution,
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
    )
    record = dataclasses.replace(record, flags=training_flags(record, len(ready.data.classes), unaudited))
    store.write_training(record, to_arrays(training, keep), time.perf_counter() - start)
    return record


def training_suffices(spec: TrainingSpec, keep: Keep, store: Store) -> bool:
    """Whether a stored training can serve these attacks without running again."""
    if store.read_training(spec.id) is None:
        return False
    arrays = store.read_arrays(store.training(spec.id) / "kept.npz")
    return arrays is not None and holds(arrays, keep)


def keep_for(cells: list[Cell]) -> Keep:
    """What a training must keep for these cells."""
    rounds = frozenset(number for cell in cells for number in cell.target.looks_at)
    real = frozenset(number for cell in cells if cell.target.kind != "probe" for number in cell.target.looks_at)
    return Keep(models=rounds, messages=real)


@functools.lru_cache(maxsize=2)
def _scene(folder: Path, training_id: str, root: Path, written: int) -> Scene:
    """The scene of a stored training, kept for the next cell of this process until it is written anew."""
    store = Store(folder)
    record = store.read_training(training_id)
    arrays = store.read_arrays(store.training(training_id) / "kept.npz")
    if record is None or arrays is None:
        raise ValueError(f"the stored training {training_id} cannot be read; run the study again")
    ready = prepare(record.spec, root)
    return Scene(
        task=ready.task,
        spec=record.spec.federation,
        defense=ready.defense,
        training=from_arrays(arrays, ready.setting, record, ready.key.child("training")),
        train=ready.data.train,
        test=ready.test,
        clients=ready.clients,
        engine=choose_engine(ready.task),
        key=ready.key,
    )


def stored_scene(spec: TrainingSpec, store: Store, root: Path) -> Scene:
    """The scene of a training that has been stored.

    Raises:
        ValueError: it has not, or cannot be read.
    """
    try:
        written = (store.training(spec.id) / "kept.npz").stat().st_mtime_ns
    except OSError as error:
        raise ValueError(f"the training {spec.id} of this cell has not been stored; run the study again") from error
    return _scene(store.folder, spec.id, root, written)


def run_attack(cell: Cell, store: Store, root: Path) -> Result:
    """Attack one cell of a stored training, score it, and store the result.

    The attack's randomness depends on the seed, the attack and the target, not on the defense: every defense meets the
    same starts.
    """
    start = time.perf_counter()
    scene = stored_scene(cell.training, store, root)
    attack = registry.build_attack(cell.attack)
    seen, truth = observe(scene, View.parse(cell.threat), cell.target)
    key = Key(cell.training.seed).child("attack", cell.attack.name, canonical(to_data(cell.target)))
    found = attack.run(seen, key)
    estimates, arrays = _score(found, truth)
    flags = cell_flags(attack, scene.defense, cell.target, found, truth, estimates)
    data_of = {
        "cell": to_data(cell),
        "estimates": [to_data(e) for e in estimates],
        "flags": [to_data(f) for f in flags],
        "arrays": arrays_digest(arrays),
    }
    result = Result(
        cell=cell,
        execution=Execution("cpu", torch.get_num_threads(), scene.engine),
        environment=environment(),
        estimates=estimates,
        flags=flags,
        digest=fingerprint(data_of, 64),
    )
    store.write_result(result, arrays, time.perf_counter() - start)
    return result


def _score(found: Reconstruction | Labels | Membership, truth: Truth) -> tuple[tuple[Estimate, ...], Arrays]:
    """Estimates, and the arrays to keep beside them."""
    if isinstance(found, Membership):
        assert truth.is_member is not None  # a membership target has candidates
        estimates = score_membership(found.scores, truth.is_member)
        return estimates, {"scores": found.scores.numpy(), "is_member": truth.is_member.numpy()}
    xs, ys = [victim.x for victim in truth.victims], [victim.y for victim in truth.victims]
    if isinstance(found, Labels):
        return score_labels(ys, found.labels), {}
    estimates, pictures = score_reconstruction(xs, ys, found.guesses)
    return estimates, {} if pictures is None else {"original": pictures.original, "guess": pictures.guess}


def _claims(ready: Prepared, training: Training) -> tuple[ClaimRecord, ClaimRecord]:
    """The defense's claim for its first round and for all of them."""
    first = ready.defense.init(ready.setting)
    states = list(itertools.accumulate(training.feedback[:-1], ready.defense.advance, initial=first))
    return (
        record_claim(ready.defense.claim(states[:1], ready.setting)),
        record_claim(ready.defense.claim(states, ready.setting)),
    )


def _audit(ready: Prepared, spec: TrainingSpec) -> tuple[AuditRecord | None, str]:
    """The audit that the study asks for, or why it could not be made; a training is none the worse for that."""
    if not spec.audit:
        return None, ""
    rounds, key = spec.federation.rounds, ready.key.child("training", "audit")
    try:
        return audit_defense(spec.defense, rounds, spec.audit, key, sends=ready.setting.sends), ""
    except ValueError as error:
        return None, " ".join(str(error).split())
