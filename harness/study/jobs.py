"""The jobs of a study: run one training, attack one cell, or compute a part of an attack or of a limit."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from leakgauge.harness.audit.attacked import Promised, Proved, promised, proved_identification
from leakgauge.harness.audit.claims import claim_to_data, record_claim
from leakgauge.harness.audit.limit import Limit, NoLimit, limits
from leakgauge.harness.audit.standalone import audit_for_study, audited_part
from leakgauge.harness.audit.weights import suspicious
from leakgauge.harness.core.cell import Cell, FederationSpec, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.contract import (
    Defense,
    Examples,
    Labels,
    Membership,
    Observation,
    Reconstruction,
    Setting,
    claim_of,
)
from leakgauge.harness.core.result import (
    AuditRecord,
    BreachRecord,
    ClaimRecord,
    Estimate,
    Execution,
    Result,
    TrainingRecord,
)
from leakgauge.harness.core.rng import Key, integers, subset
from leakgauge.harness.core.stats import of_items
from leakgauge.harness.core.stored import canonical, fingerprint, to_data
from leakgauge.harness.core.table import Column
from leakgauge.harness.core.threats import Threat, View
from leakgauge.harness.data import DataSet
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Broadcast, Keep, Training, make_setting, train
from leakgauge.harness.federation.observe import Scene, Truth, before_rounds, observe
from leakgauge.harness.federation.recording import RecordedData, Recording, load
from leakgauge.harness.learn import models
from leakgauge.harness.learn.batch import Engine, choose_engine
from leakgauge.harness.learn.modules import paced
from leakgauge.harness.learn.partition import Holdings, partition
from leakgauge.harness.learn.prior import gaussian_prior
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.cache import known
from leakgauge.harness.study.environment import code_of, environment, shipped
from leakgauge.harness.study.flags import cell_flags, notice_flag, promise_flags, training_flags
from leakgauge.harness.study.joint import Batches, Found, at_once, fits
from leakgauge.harness.study.parts import of_guesses, of_limits, to_guesses, to_limits
from leakgauge.harness.study.recorded import as_recorded, clients_of, problems, shared_key, sizes_of
from leakgauge.harness.study.replay import from_arrays, holds, to_arrays
from leakgauge.harness.study.score import (
    score_labels,
    score_limits,
    score_membership,
    score_promise,
    score_reconstruction,
)
from leakgauge.harness.study.splits import groups, limit_id, named, victims_of
from leakgauge.harness.study.store import Arrays, Store, arrays_digest

_ASKED = 8
"""The number of clients that test a malicious server's broadcast; each test takes about a second."""


_BATCHES = Batches()
"""What this process found for cells whose jobs have not come yet."""


class Prepared(NamedTuple):
    """The ingredients of a training; `clients` are the rows of each client's data, `holdings` the data themselves."""

    task: ModelTask
    data: DataSet
    test: Examples
    clients: dict[int, Any]
    holdings: Holdings
    defense: Defense[Any, Any]
    setting: Setting
    key: Key


@functools.lru_cache(maxsize=4)
def load_data(name: str, root: Path) -> DataSet:
    """A data set, cached for the next jobs of this process."""
    return load(name, root)


def make_task(spec: TaskSpec, loaded: DataSet, federation: FederationSpec | None = None) -> ModelTask:
    """The task of a specification on its data.

    Args:
        federation: if its clients send updates, the running statistics of a user's model move as in torch.

    Raises:
        LookupError: there is no such model.
        ValueError: the model does not fit the shape of the data.
    """
    model = models.build(spec.model, loaded.input_shape, len(loaded.classes))
    if federation is not None and federation.algorithm == "fedavg":
        model = paced(model, federation.lr)
    if spec.inputs == "centered":
        model = models.scaled(model, torch.tensor(-1.0), torch.tensor(2.0))
    return ModelTask(models.scaled(model, loaded.low, loaded.span), spec.init, loaded.columns)


def prepare(spec: TrainingSpec, root: Path) -> Prepared:
    """Load the data, build the model and the defense, and partition the data among the clients."""
    loaded = load_data(spec.task.data, root)
    task = make_task(spec.task, loaded, spec.federation)
    key = Key(spec.seed)
    y = loaded.train.y
    recorded = loaded.recording if isinstance(loaded, RecordedData) else None
    if spec.federation.validation >= len(y):
        raise ValueError(
            f"expected validation < {len(y)} training samples, got validation={spec.federation.validation}"
        )
    held = subset(key.child("training", "validation"), len(y), spec.federation.validation)
    if recorded is None:
        rest = np.delete(np.arange(len(y)), held)
        parts = partition(spec.federation, y[rest], key.child("training", "partition"))
        clients = {number: rest[rows] for number, rows in enumerate(parts)}
    else:
        clients = clients_of(recorded, len(y))
    holdings = Holdings(loaded.train, clients)
    test = loaded.test
    if spec.federation.evaluate_on == "train":
        test = Examples(*(torch.cat(parts) for parts in zip(*holdings.values(), strict=True)))
    elif spec.federation.evaluate_on == "validation":
        test = Examples(loaded.train.x[held], loaded.train.y[held])
    if spec.federation.test_samples is not None and spec.federation.test_samples < len(test.y):
        rows = subset(key.child("training", "test"), len(test.y), spec.federation.test_samples)
        test = Examples(test.x[rows], test.y[rows])
    defense = registry.build_defense(spec.defense)
    sized = holdings if recorded is None else sizes_of(recorded, len(y))
    setting = make_setting(task, spec.federation, sized, defense.local)
    return Prepared(task, loaded, test, clients, holdings, defense, setting, key)


def run_training(spec: TrainingSpec, keep: Keep, store: Store, root: Path, device: str = "cpu") -> TrainingRecord:
    """Run one training; store its record, and the models and messages that the attacks need."""
    start = time.perf_counter()
    ready = prepare(spec, root)
    engine, federation, key = choose_engine(ready.task, device), spec.federation, ready.key.child("training")
    if isinstance(ready.data, RecordedData):
        training = _recorded(spec, ready, ready.data.recording, keep)
    else:
        training = train(
            *(ready.task, federation, ready.defense, ready.holdings, ready.test, key),
            engine=engine,
            keep=keep,
            device=device,
            broadcasts=broadcasts(spec, ready, engine),
            strict=spec.strict,
        )
    states = _states(ready.defense, training)
    one_round, whole_run = _claims(spec.defense, ready, states)
    audited, unaudited = _audit(ready, spec, device)
    record = TrainingRecord(
        spec=spec,
        environment=environment(),
        execution=Execution(device, torch.get_num_threads(), engine),
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
        breaches=_breaches(training, one_round, whole_run),
        dropped=tuple(training.dropped),
        gauges=_gauges(ready, training, states[: len(training.message_bytes)]),
    )
    caveats = training_flags(
        *(record, len(ready.data.classes), unaudited),
        data=ready.data.note,
        unrepeated=training.unrepeated,
        scores=type(ready.defense).likelihood is not Defense.likelihood,
    )
    record = dataclasses.replace(record, flags=caveats)
    store.write_training(record, to_arrays(training, keep), time.perf_counter() - start, code_of(spec))
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
    before = before_rounds(scene_of(spec, ready, nothing, engine), View(Threat.MALICIOUS_SERVER), target)
    key = attack_key(spec.seed, spec.malice.attack, target)
    return dict.fromkeys(
        target.looks_at, lambda model, lr: attack.broadcast(dataclasses.replace(before, model=model, lr=lr), key)
    )


def training_suffices(spec: TrainingSpec, keep: Keep, store: Store) -> bool:
    """Whether the stored training has everything that these attacks need."""
    if store.read_training(spec.id) is None:
        return False
    arrays = store.read_arrays(store.training(spec.id) / "kept.npz")
    return arrays is not None and holds(arrays, keep)


def keep_for(cells: Iterable[Cell]) -> Keep:
    """The rounds that a training must keep for these cells."""
    targets = [cell.target for cell in cells]
    rounds = frozenset(number for target in targets for number in target.looks_at)
    return Keep(rounds, frozenset(number for one in targets if one.kind != "probe" for number in one.looks_at))


@functools.lru_cache(maxsize=2)
def _scene(folder: Path, training_id: str, root: Path, written: int) -> Scene:
    """The scene of the stored training that was written at the time `written`, cached."""
    store = Store(folder)
    record = store.read_training(training_id)
    arrays = store.read_arrays(store.training(training_id) / "kept.npz")
    if record is None or arrays is None:
        raise ValueError(f"the stored training {training_id} cannot be read; run the study again")
    ready = prepare(record.spec, root)
    key = shared_key(ready.data, ready.key.child("training"))
    training = from_arrays(arrays, ready.setting, record, key)
    return scene_of(record.spec, ready, training, choose_engine(ready.task))


def scene_of(spec: TrainingSpec, ready: Prepared, training: Training, engine: Engine) -> Scene:
    """The scene of a training."""
    return Scene(
        task=ready.task,
        spec=spec.federation,
        defense=ready.defense,
        training=training,
        train=ready.data.train,
        test=ready.test,
        clients=ready.clients,
        engine=engine,
        key=ready.key,
    )


def attack_key(seed: int, attack: PartSpec, target: Target) -> Key:
    """The key of an attack on a target: the same for every defense."""
    return Key(seed).child("attack", attack.name, canonical(to_data(target)))


def seen_by(scene: Scene, view: View, root: Path) -> Scene:
    """The scene with the auxiliary data of this adversary, if they are from another data set than the victims'.

    The labels of such data do not apply to the victims and are drawn at random.
    """
    if not view.other:
        return scene
    x, classes = load_data(view.other, root).test.x, scene.task.classes
    drawn = torch.from_numpy(integers(scene.key.child("auxiliary", view.other), len(x), classes))
    return dataclasses.replace(scene, auxiliary=Examples(x, drawn.to(scene.train.y.dtype)))


def stored_scene(spec: TrainingSpec, store: Store, root: Path) -> Scene:
    """The scene of a stored training.

    Raises:
        ValueError: the training is not stored, or cannot be read.
    """
    try:
        written = (store.training(spec.id) / "kept.npz").stat().st_mtime_ns
    except OSError as error:
        raise ValueError(f"the training {spec.id} of this cell is not stored; run the study again") from error
    return _scene(store.folder, spec.id, root, written)


def run_search(cell: Cell, victims: range, store: Store, root: Path, device: str = "cpu") -> int:
    """Attack some victims of a cell in whole groups, and store the guesses; returns the number of victims."""
    start = time.perf_counter()
    seen, _ = observe_cell(cell, store, root, device)
    found = _searched(cell, seen, [], victims)
    assert isinstance(found, Reconstruction)  # only reconstructions are split
    arrays, seconds = of_guesses(found), time.perf_counter() - start
    store.write_part(named(cell.id, victims), arrays, seconds, _code_behind(cell, store))
    return len(victims)


def run_limit(cell: Cell, victims: range, store: Store, root: Path, device: str = "cpu") -> int:
    """Compute the limit of some victims of a cell's target, and store it; returns the number of victims."""
    start = time.perf_counter()
    seen, truth = observe_cell(cell, store, root, device)
    arrays = of_limits(_limits(stored_scene(cell.training, store, root), seen, truth, cell.target, victims))
    name, seconds = named(limit_id(cell), victims), time.perf_counter() - start
    store.write_part(name, arrays, seconds, _code_behind(cell, store))
    return len(victims)


def observe_cell(cell: Cell, store: Store, root: Path, device: str = "cpu") -> tuple[Observation, Truth]:
    """What the adversary of a cell of a stored training sees, and the truth; `device` is where it computes."""
    view = View.parse(cell.threat)
    seen, truth = observe(seen_by(stored_scene(cell.training, store, root), view, root), view, cell.target)
    return dataclasses.replace(seen, device=device), truth


def _searched(
    cell: Cell, seen: Observation, known: Sequence[tuple[range, Reconstruction]], victims: range | None = None
) -> Reconstruction | Labels | Membership:
    """The result of a cell's attack, group by group; victims with known guesses are not attacked again.

    The attack's randomness depends on the seed, the attack and the target, not on the defense: the attack starts from
    the same points against every defense.
    """
    attack = registry.build_attack(cell.attack)
    key = attack_key(cell.training.seed, cell.attack, cell.target)
    size = at_once(attack, seen)
    if size is None or cell.target.kind == "members" or seen.messages is None:
        return attack.run(seen, key)
    guesses = {i: guess for part, one in known for i, guess in zip(part, one.guesses, strict=True)}
    words = next((one.prior for _, one in known), "")
    wanted = range(len(seen.messages)) if victims is None else victims
    for group in groups(wanted, size):
        if not guesses.keys() >= set(group):
            found = attack.run(seen.of(group), key)
            assert isinstance(found, Reconstruction)  # only reconstructions have groups
            guesses |= zip(group, found.guesses, strict=True)
            words = found.prior
    return Reconstruction(tuple(guesses[i] for i in wanted), words)


def _in_batch(cell: Cell, seen: Observation, beside: Sequence[Cell], store: Store, root: Path) -> Found | None:
    """The guesses for a cell that is searched in a batch with others, now or before; None: it is searched alone."""

    def name(of: Cell) -> str:
        return f"{store.folder.absolute()} {of.id} {(store.training(of.training.id) / 'kept.npz').stat().st_mtime_ns}"

    if (before := _BATCHES.take(name(cell))) is not None:
        return before
    attack = registry.build_attack(cell.attack)
    size = at_once(attack, seen)
    # a user's attack may ask a defense for what a batch does not have, and a user's defense may need the CPU
    mine = shipped("attack", cell.attack.name) and shipped("defense", cell.training.defense.name)
    if not (beside and size and mine):
        return None
    others = (
        (name(one), functools.partial(lambda of: observe_cell(of, store, root, seen.device)[0], one))
        for one in beside
        if shipped("defense", one.training.defense.name)
        if fits(seen, registry.build_defense(one.training.defense))
    )
    key = attack_key(cell.training.seed, cell.attack, cell.target)
    return _BATCHES.search(attack, key, (name(cell), seen), others, size)


def run_attack(
    cell: Cell,
    store: Store,
    root: Path,
    parts: Sequence[str] = (),
    device: str = "cpu",
    beside: Sequence[Cell] = (),
) -> Result:
    """Attack one cell of a stored training, score it, and store the result.

    Args:
        parts: names of stored parts of the attack and of its limit; missing victims are computed.
        device: where searches and limits compute.
        beside: cells of stored trainings whose victims may be searched in the same batch; for their own attacks, this
            process keeps what it finds.
    """
    start = time.perf_counter()
    scene = stored_scene(cell.training, store, root)
    attack = registry.build_attack(cell.attack)
    seen, truth = observe_cell(cell, store, root, device)
    stored = [(one, store.read_part(one, _code_behind(cell, store))) for one in parts if one.startswith(cell.id)]
    known = [(victims_of(name), to_guesses(arrays)) for name, arrays in stored if arrays is not None]
    batch = None if known else _in_batch(cell, seen, beside, store, root)
    found = _searched(cell, seen, known) if batch is None else batch.result
    bounds = bounds_of(cell, store, root, parts, device) if cell.limit and isinstance(found, Reconstruction) else None
    estimates, arrays = scored(found, truth, bounds, scene.task.columns)
    flags = cell_flags(attack, scene.defense, cell.target, found, truth, estimates, bounds.limits if bounds else "")
    made = None if attack.floor else _promise_of(cell, seen, store, root)
    if made is not None and not isinstance(found, Labels):
        shown = score_promise(found, truth, estimates, made)
        estimates, flags = estimates + shown, promise_flags(shown, made) + flags
    if cell.training.malice is not None:
        noticed = _noticed(scene, cell.target)
        estimates, flags = (*estimates, noticed), (*flags, notice_flag(noticed))
    content = {
        "cell": to_data(cell),
        "estimates": [to_data(one) for one in estimates],
        "flags": [to_data(one) for one in flags],
        "arrays": arrays_digest(arrays),
    }
    execution = Execution(device, torch.get_num_threads(), scene.engine)
    result = Result(cell, execution, environment(), estimates, flags, fingerprint(content, 64))
    spent = sum(store.seconds(store.part(name)) or 0.0 for name, _ in stored)
    spent += 0.0 if batch is None else batch.elsewhere
    store.write_result(result, arrays, spent + time.perf_counter() - start, _code_behind(cell, store))
    return result


def _code_behind(cell: Cell, store: Store) -> str:
    """The code behind a cell, and the code of its training if that differs."""
    own = code_of(cell.training, cell.attack, cell.threat)
    made = store.examine(store.training(cell.training.id), arrays=False).code
    return own if made == code_of(cell.training) else f"{own} on {made}"


class Bounds(NamedTuple):
    """Bounds of any attack on one target: the limit of each victim or why there is none, and the proofs' bound."""

    limits: list[Limit] | str
    proved: Proved | None


def bounds_of(cell: Cell, store: Store, root: Path, parts: Sequence[str] = (), device: str = "cpu") -> Bounds:
    """The bounds of a cell, which are the same for every attack on its target; `parts` as for `run_attack`."""
    written, whole = (store.training(cell.training.id) / "kept.npz").stat().st_mtime_ns, limit_id(cell)
    stored = tuple(one for one in parts if one.startswith(whole))
    return _bounds(store.folder, root, written, _Asked(cell), stored, device)


class _Asked:
    """A cell that is compared only by its target, adversary and training."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.id = cell, limit_id(cell)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


@functools.lru_cache(maxsize=8)
def _bounds(folder: Path, root: Path, written: int, asked: _Asked, parts: tuple[str, ...], device: str) -> Bounds:
    """`bounds_of`, cached for the next attacks on the same messages."""
    cell, store = asked.cell, Store(folder)
    scene, target = _scene(folder, cell.training.id, root, written), cell.target
    seen, truth = observe_cell(cell, store, root, device)
    among = 1 + truth.rivals
    claim = _claim(scene, target.looks_at) if seen.messages and among > 1 else None
    proved = proved_identification(claim, seen.view.threat, among) if claim else None
    stored = [store.read_part(name, _code_behind(cell, store)) for name in sorted(parts, key=_first)]
    known = [arrays for arrays in stored if arrays is not None]
    if not parts or len(known) < len(stored):
        return Bounds(_limits(scene, seen, truth, target, None), proved)
    lacks = any("reason" in arrays for arrays in known)
    prior = None if lacks or seen.auxiliary is None else gaussian_prior(seen.auxiliary.x, 0.0)
    joined: dict[int, Limit] = {}
    for name, arrays in zip(sorted(parts, key=_first), known, strict=True):
        found = to_limits(arrays, prior) if not lacks or "reason" in arrays else []
        if isinstance(found, str):
            return Bounds(found, proved)
        joined |= zip(victims_of(name), found, strict=bool(found))
    return Bounds([joined[number] for number in range(len(truth.victims))], proved)


def _first(part: str) -> int:
    """The first victim of a part."""
    return victims_of(part).start


def _limits(scene: Scene, seen: Observation, truth: Truth, target: Target, only: range | None) -> list[Limit] | str:
    """The limit of some victims of a target, None: all; or the reason why there is none."""
    try:
        return limits(seen, truth.victims, scene.key.child("limit", canonical(to_data(target))), only)
    except NoLimit as error:
        return str(error)


def scored(
    found: Reconstruction | Labels | Membership, truth: Truth, bounds: Bounds | None, columns: Sequence[Column]
) -> tuple[tuple[Estimate, ...], Arrays]:
    """The estimates, and the arrays to store beside them."""
    if isinstance(found, Membership):
        assert truth.is_member is not None  # a membership target has candidates
        estimates = score_membership(found.scores, truth.is_member)
        return estimates, {"scores": found.scores.numpy(), "is_member": truth.is_member.numpy()}
    xs, ys = [victim.x for victim in truth.victims], [victim.y for victim in truth.victims]
    if isinstance(found, Labels):
        return score_labels(ys, found.labels), {}
    estimates, pictures = score_reconstruction(xs, ys, found.guesses, truth.others(), columns)
    if bounds is not None:
        estimates += score_limits(xs, found.guesses, *bounds)
    return estimates, {} if pictures is None else {"original": pictures.original, "guess": pictures.guess}


def _claims(spec: PartSpec, ready: Prepared, states: Sequence[Any]) -> tuple[ClaimRecord, ClaimRecord]:
    """The defense's claims for the first round and for all rounds."""
    one_round, whole_run = (claim_of(ready.defense, history, ready.setting) for history in (states[:1], states))
    return _recorded_claim(spec, one_round), _recorded_claim(spec, whole_run)


def _recorded_claim(spec: PartSpec, claim: Claim) -> ClaimRecord:
    """The record of a claim; its accounting may be cached."""
    return known(ClaimRecord, spec, claim_to_data(claim), lambda: record_claim(claim))


def _gauges(ready: Prepared, training: Training, states: Sequence[Any]) -> dict[str, tuple[float, ...]]:
    """The numbers of the rounds' states and the norms of the updates, by name and round."""
    rounds = [ready.defense.gauges(state, ready.setting) for state in states]
    found = {name: tuple(one[name] for one in rounds) for name in (rounds[0] if rounds else ())}
    return found | ({"update_norm": tuple(training.norms)} if training.norms else {})


def _states(defense: Defense[Any, Any], training: Training) -> list[Any]:
    """The defense's public state in each round."""
    states = [defense.init(training.setting)]
    for feedback in training.feedback[:-1]:
        states.append(defense.advance(states[-1], feedback))
    return states


def _claim(scene: Scene, rounds: Sequence[int]) -> Claim:
    """The defense's claim for these rounds; for the whole run if there are none."""
    states = _states(scene.defense, scene.training)
    return claim_of(scene.defense, [states[number] for number in rounds] or states, scene.training.setting)


def _promise_of(cell: Cell, seen: Observation, store: Store, root: Path) -> Promised | None:
    """The defense's promise against the attack of a cell, over the rounds whose messages the attack sees."""
    written = (store.training(cell.training.id) / "kept.npz").stat().st_mtime_ns
    rounds, alone = tuple(cell.target.looks_at if seen.messages else ()), cell.target.kind == "probe"
    return _promised(store.folder, cell.training.id, root, written, rounds, seen.view.threat, alone)


@functools.lru_cache(maxsize=64)
def _promised(
    folder: Path, training_id: str, root: Path, written: int, rounds: tuple[int, ...], threat: Threat, alone: bool
) -> Promised | None:
    """`_promise_of`, cached for the next attacks, because accounting may take seconds."""
    return promised(_claim(_scene(folder, training_id, root, written), rounds), threat, alone=alone)


def _noticed(scene: Scene, target: Target) -> Estimate:
    """How many of the first eight clients notice the parameters of the first attacked round, with their own data."""
    params, key = scene.training.models[target.looks_at[0]], scene.key.child("notice")
    numbers = sorted(scene.clients)[:_ASKED]
    found = [suspicious(scene.task, params, scene.rows(scene.clients[k]), key.child(k)) for k in numbers]
    tests = ", ".join(sorted({name for names in found for name in names}))
    return dataclasses.replace(of_items("detectable", [float(bool(names)) for names in found]), note=tests)


def _breaches(training: Training, *claims: ClaimRecord) -> tuple[BreachRecord, ...]:
    """The counts of broken assumptions of these claims, in the order of the assumptions."""
    texts, found = dict.fromkeys(text for claim in claims for text in claim.assumes), training.breaches
    return tuple(BreachRecord(text, *found[text]) for text in texts if text in found)


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
        return known(AuditRecord, spec.defense, question, lambda: audit_for_study(*asked)), ""
    except ValueError as error:
        return None, " ".join(str(error).split())
