"""Takes the fingerprints of the code behind a study; `core.fingerprints` describes them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leakgauge.harness.core import rng
from leakgauge.harness.core.cases import training_identity
from leakgauge.harness.core.cell import Cell, Target, TrainingSpec
from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.contract import Answer, Attack, Feedback, LocalRule, Observation, claim_of, likelihood_of
from leakgauge.harness.core.errors import NoLikelihood, StudyError
from leakgauge.harness.core.fingerprints import COLUMNS, DRAWN, DRAWS, Fingerprint
from leakgauge.harness.core.labels import UNDEFENDED
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stored import fingerprint, to_data
from leakgauge.harness.core.threats import Threat, View
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.data import default_root
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import make_plan, train
from leakgauge.harness.federation.observe import observe
from leakgauge.harness.federation.round import Exchange
from leakgauge.harness.federation.small import Federation
from leakgauge.harness.learn.batch import Work, train_clients
from leakgauge.harness.study.attack import scored
from leakgauge.harness.study.prepare import Prepared, attack_key, prepare, seen_by, trained_federation
from leakgauge.harness.study.training import chosen_models, keep_for

_ALONG = Key(0).child("along")  # of the direction on which vectors are projected; no study draws from it
_LENGTHS = (0.1, 1.0, 20.0, 400.0)  # lengths of the updates whose messages are compared byte by byte
_SPARSE = 0.05  # share of the coordinates of a sparse update that are not zero
_ROUNDS = 12  # the most rounds of messages
_SCALES = (1.0, 400.0)  # lengths of the dense updates behind the draws: about that of a gradient, and above every clip
_EVALUATIONS = 20  # the most evaluations of a search

_REPLAYED = 3
"""The number of trainings on which the attacks are replayed: one without a defense, the rest spread over the others."""

_FRACTION = re.compile(r"\d+\.\d+(?:e-?\d+)?")


def take(cells: Sequence[Cell], data: Path | None = None) -> tuple[Fingerprint, ...]:
    """The fingerprints of the code behind these cells.

    Args:
        data: folder of the data sets; None: the default folder.

    Raises:
        StudyError: a data set is missing or unreadable, or a model does not fit it.
    """
    root, taken = default_root() if data is None else data, list[Fingerprint]()
    first: dict[str, list[Cell]] = {}  # of trainings that differ only in the seed, the first
    for cell in cells:
        of_training = first.setdefault(training_identity(replace(cell.training, audit=0)), [])
        if not of_training or of_training[0].training.id == cell.training.id:
            of_training.append(cell)
    trainings = [of_training[0].training for of_training in first.values()]
    replayed = _spread(trainings)
    for spec, of_training in zip(trainings, first.values(), strict=True):
        try:
            ready = prepare(spec, root)
        except (LookupError, ValueError, OSError) as error:  # a data set is missing, or a model does not fit it
            raise StudyError(spec.task.data, [str(error)]) from error
        if spec.malice is None:
            taken += [*_of_defense(spec, ready), *_draws(spec, ready)]
        taken += _of_training(spec, of_training if spec.id in replayed or spec.malice is not None else [], ready, root)
    return tuple({item.key: item for item in taken}.values())


def _spread(trainings: Sequence[TrainingSpec]) -> set[str]:
    others = [spec.id for spec in trainings if spec.defense.name != UNDEFENDED]
    plain = [spec.id for spec in trainings if spec.defense.name == UNDEFENDED][:1]
    count = min(_REPLAYED - len(plain), len(others))
    return {*plain, *(others[at * len(others) // count] for at in range(count))}


def _small(cell: Cell, training: TrainingSpec) -> Cell:
    few = {
        name: min(value, _EVALUATIONS)
        for name, value in cell.attack.parameters.items()
        if name in ("evaluations", "warm") and isinstance(value, int)
    }
    attack = replace(cell.attack, parameters=cell.attack.parameters | few)
    return replace(cell, training=training, attack=attack, target=_few(cell.target, training.federation.rounds_run - 1))


def _few(target: Target, first: int = 0) -> Target:
    most = 8 if target.kind == "members" else 2
    outside = target.outside and min(target.outside, most)
    round_ = None if target.round is None else first
    return replace(
        target, round=round_, rounds=2 if target.shuffled else 1, count=min(target.count, most), outside=outside
    )


def _case(spec: TrainingSpec, *more: Any) -> str:
    """The identity of a case: two fingerprints of the same parts are comparable if it is equal."""
    return fingerprint([to_data(spec.task), to_data(spec.federation), *more])


def _update(key: Key, dim: int, length: float) -> Vector:
    drawn = rng.normal(key, (dim,)).double()
    return torch.as_tensor(length * drawn / drawn.norm()).float()


def _thinned(key: Key, update: Vector) -> Vector:
    """The update without most of its coordinates, of the same length."""
    kept = torch.where(rng.uniform(key, (len(update),)) < _SPARSE, update, torch.zeros(()))
    return torch.as_tensor(kept * (update.norm() / kept.norm().clamp(min=1e-30)))


def _sketch(rows: torch.Tensor) -> tuple[float, ...]:
    """The length of each of the vectors [n, d], and its component along a fixed direction."""
    along = _update(_ALONG, rows.shape[1], 1.0).double()
    return _plain(torch.stack([rows.double().norm(dim=1), rows.double() @ along], 1))


def _plain(numbers: torch.Tensor) -> tuple[float, ...]:
    """The numbers with eight digits; NaN becomes zero, infinities become the largest number."""
    return tuple(float(f"{x:.8g}") for x in numbers.double().nan_to_num().flatten().tolist())


def _messages(
    federation: Federation, updates: Callable[[int], Sequence[Vector]], key: Key, numbers: Iterable[int]
) -> Iterator[tuple[int, Exchange, Vector]]:
    """The messages of the first clients with each round's updates, and the decoded mean, from a training's keys."""
    memories = None
    for number in numbers:
        own = key.child("round", number)
        exchange = federation.exchange(updates(number), own, number, memories=memories)
        memories = exchange.memories
        yield number, exchange, federation.round(number).decode(exchange, federation.round(number).server_key(key, own))


def _of_defense(spec: TrainingSpec, ready: Prepared) -> Iterator[Fingerprint]:
    defense, setting, key, case = ready.defense, ready.setting, spec.defense.key, _case(spec)
    few = _LENGTHS[: setting.participants]
    dense = [_update(ready.key.child("update", at), setting.dim, length) for at, length in enumerate(few)]
    kinds = dense, [_thinned(ready.key.child("kept", at), update) for at, update in enumerate(dense)]
    digest, decoded, scores = hashlib.sha256(), list[Vector](), list[torch.Tensor]()
    federation = Federation.of(defense, setting, rounds=min(setting.rounds, _ROUNDS))
    count = range(len(federation.history))
    for number, exchange, mean in _messages(federation, lambda at: kinds[at % 2], ready.key.child("training"), count):
        updates = kinds[number % 2]
        for wire in exchange.sent:
            digest.update(len(wire).to_bytes(8, "little") + wire)
        decoded.append(mean)
        if not defense.superposes:
            decoded += federation.estimates(exchange, Threat.SERVER, number)
        silent = [torch.zeros(setting.dim)] * (len(exchange.sent) - len(updates))
        true = torch.stack([*updates, *silent])
        with suppress(NoLikelihood):
            likelihood = likelihood_of(defense, federation.history[number], exchange.received, exchange.links)
            rows = true[None] if defense.superposes else true
            scores += [likelihood(share * rows).detach() for share in (1.0, 0.9)]
    yield Fingerprint("encode", key, "", case, digest.hexdigest()[:16])
    yield Fingerprint("estimate", key, "", case, numbers=_sketch(torch.stack(decoded)))
    if scores:
        yield Fingerprint("likelihood", key, "", case, numbers=_plain(torch.cat([score.flatten() for score in scores])))
    state = defense.init(setting)
    later = defense.advance(state, Feedback(0, None, None))
    claim = claim_of(defense, [state, state if defense.stops(later) else later], setting)
    yield Fingerprint("claim", key, "", case, fingerprint(_promised(claim)))


def _promised(claim: Claim) -> str:
    """The content of a claim and its proofs, before any accounting, with six digits of each number."""
    parts = [part for part in (claim, claim.proved, *claim.further, claim.attained) if part is not None]
    each = [{**vars(part), "against": sorted(threat.value for threat in part.against)} for part in parts]
    for fields in each:
        for inner in ("proved", "further", "attained"):
            fields.pop(inner, None)
        if groups := fields.pop("groups", ()):
            fields["groups"] = [(group.label, group.clients, _promised(group.claim)) for group in groups]
    return _FRACTION.sub(lambda fraction: f"{float(fraction[0]):.6g}", repr(each))


def _draws(spec: TrainingSpec, ready: Prepared) -> Iterator[Fingerprint]:
    """Statistics of messages of fixed updates, and of trained updates if the local training clips or adds noise."""
    defense, dim, case = ready.defense, ready.setting.dim, _case(spec)
    keys = [Key(ready.key.seed + 1 + at) for at in range(DRAWS * (len(_SCALES) + 1))]
    lengths = [*np.repeat(_SCALES, DRAWS), *[_SCALES[0]] * DRAWS]
    updates = [_update(key.child("update"), dim, length) for key, length in zip(keys, lengths, strict=True)]
    updates[-DRAWS:] = [_thinned(key, update) for key, update in zip(keys[-DRAWS:], updates[-DRAWS:], strict=True)]
    pairs = zip(updates, keys, strict=True)
    numbers = [x for update, key in pairs for x in _statistics(ready, update, update, key)]
    yield Fingerprint(DRAWN[0], spec.defense.key, "", case, numbers=tuple(numbers))
    noise = defense.step_noise(ready.setting)
    if defense.local == LocalRule() and not noise:
        return
    params, records = ready.task.init(ready.key), next(iter(ready.holdings.values()))
    work = [Work(records, key) for key in keys[:DRAWS]]
    plans = [make_plan(spec.federation, spec.federation.lr, *rule) for rule in ((), (defense.local, noise))]
    plain, own = (train_clients(ready.task, params, work, plan, "double").updates for plan in plans)
    rows = zip(plain, own, work, strict=True)
    numbers = [x for true, update, done in rows for x in _statistics(ready, true, update, done.key)]
    yield Fingerprint(DRAWN[1], spec.defense.key, "", case, numbers=tuple(numbers))


def _statistics(ready: Prepared, true: Vector, update: Vector, key: Key) -> list[float]:
    """`STATISTICS` of a client's messages in the first, second and last round; zeros for a round that there is not."""
    numbers, u = list[float](), true.double()
    energy = float(u @ u) + 1e-300
    federation = Federation.of(ready.defense, ready.setting)
    last = len(federation.history) - 1
    asked = sorted({0, min(1, last), last} - {-1})
    for _, _, mean in _messages(federation, lambda _: [update], key.child("training"), asked):
        share = float(mean.double() @ u) / energy
        rest = (mean.double() - share * u).square()
        floor = 1e-12 * energy / len(u)
        numbers += [share, math.log(float(rest.mean()) + floor), math.log(float(rest.median()) + floor)]
    return [float(f"{x:.6g}") for x in [*numbers, *[0.0] * COLUMNS][:COLUMNS]]


def _of_training(spec: TrainingSpec, cells: Sequence[Cell], ready: Prepared, root: Path) -> Iterator[Fingerprint]:
    # a participant acts in the round before the attacked one
    last = int(spec.malice is not None and "craft" in registry.build_attack(spec.malice.attack).needs)
    malice = spec.malice and replace(spec.malice, target=_few(spec.malice.target, last))
    small = replace(spec, federation=replace(spec.federation, rounds=1 + last), malice=malice)
    asked = [_small(cell, small) for cell in cells]
    cases = [_case(spec, to_data(own.target), own.threat) for own in cells]
    of_attack = partial(Fingerprint, "attack", spec.defense.key)
    parts = ready.task, small.federation, ready.defense, ready.holdings, ready.test, ready.key.child("training")
    try:
        sent, wanted = chosen_models(small, ready, "double")
        trained = train(
            *parts, engine="double", keep=keep_for(asked), broadcasts=sent, crafts=wanted, held_out=ready.held_out
        )
    except ValueError as error:
        if malice is None:
            raise
        for own, case in zip(cells, cases, strict=True):  # its broadcast does not fit the model
            yield of_attack(own.attack.key, case, fingerprint(str(error)))
        return
    if spec.malice is None:
        tested = trained.evaluations[-1]
        measured = _plain(torch.tensor([tested.accuracy or 0.0, tested.loss], dtype=torch.float64))
        numbers = _sketch(trained.final[None]) + measured
        yield Fingerprint("training", spec.defense.key, "", _case(spec), numbers=numbers)
    federation = trained_federation(small, ready, trained, "double")
    for cell, own, case in zip(asked, cells, cases, strict=True):
        try:
            view = View.parse(cell.threat)
            seen, truth = observe(seen_by(federation, view, root), view, cell.target)
            attack, key = registry.build_attack(cell.attack), attack_key(spec.seed, cell.attack, cell.target)
            result = attack.run(seen, key) if own.target.whole else _searched(attack, seen, key)
            estimates, _ = scored(result, truth, None, federation.task.form)
        except ValueError as error:
            yield of_attack(own.attack.key, case, fingerprint(str(error)))
            continue
        values = [x for estimate in estimates for x in (estimate.value, *estimate.values) if x is not None]
        yield of_attack(own.attack.key, case, numbers=_plain(torch.tensor(values, dtype=torch.float64)))


def _searched(attack: Attack, seen: Observation, key: Key) -> Answer:
    """The attack's result in double precision, which hangs on no last digits; in single if it cannot mix the two."""
    try:
        return attack.run(seen.double(), key)
    except (RuntimeError, TypeError):
        return attack.run(seen, key)
