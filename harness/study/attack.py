"""Attacks one cell of a stored training, scores the guesses, and stores the result; a long search is done in parts."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence

import numpy as np
import torch

from leakgauge.harness.audit.attacked import Promised, promised
from leakgauge.harness.audit.weights import suspicious
from leakgauge.harness.core.cell import Cell, Target
from leakgauge.harness.core.contract import Attack, Guess, Labels, Membership, Observation, Reconstruction
from leakgauge.harness.core.device import capacity
from leakgauge.harness.core.result import Estimate, Execution, Result
from leakgauge.harness.core.stats import of_items
from leakgauge.harness.core.stored import fingerprint, to_data
from leakgauge.harness.core.table import Column
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.observe import TrainedFederation, Truth
from leakgauge.harness.study.environment import code_behind, environment, shipped
from leakgauge.harness.study.flags import cell_flags, notice_flag, promise_flags
from leakgauge.harness.study.jobs import RunContext, groups, named, victims_of
from leakgauge.harness.study.joint import Batches, Found, fits
from leakgauge.harness.study.limits import Bounds, bounds_of
from leakgauge.harness.study.prepare import StoredTraining, attack_key, claimed, observe_stored
from leakgauge.harness.study.score import (
    score_labels,
    score_limits,
    score_membership,
    score_promise,
    score_reconstruction,
)
from leakgauge.harness.study.store import Arrays, arrays_digest

_ASKED = 8
"""The number of clients that test a malicious server's broadcast; each test takes about a second."""

_COPIES, _STATE = 16, 2**20
"""Numbers that a search on an accelerator holds for each victim: copies of its gradient, and its inputs' steps."""

_BATCHES = Batches()
"""What this process found for cells whose jobs have not come yet."""


def run_attack(cell: Cell, context: RunContext, parts: Sequence[str] = (), beside: Sequence[Cell] = ()) -> Result:
    """Attack one cell of a stored training, score it, and store the result.

    Args:
        parts: names of stored parts of the attack and of its limit; missing victims are computed.
        beside: cells of stored trainings whose victims may be searched in the same batch; for their own attacks, this
            process keeps what it finds.
    """
    start, store = time.perf_counter(), context.store
    stored = StoredTraining.of(cell.training, context)
    federation, attack = stored.federation, registry.build_attack(cell.attack)
    code = code_behind(store, cell.training, cell.attack, cell.threat)
    observation, truth = observe_stored(stored, cell.threat, cell.target, context.device)

    searched = {name: store.read_part(name, code) for name in parts if name.startswith(cell.id)}
    known = [(victims_of(name), to_guesses(arrays)) for name, arrays in searched.items() if arrays is not None]
    batch = _in_batch(cell, observation, beside, context) if context.device != "cpu" and not known else None
    answer = _search(cell, observation, known) if batch is None else batch.result

    bounds = bounds_of(cell, context, parts) if cell.limit and isinstance(answer, Reconstruction) else None
    estimates, arrays = scored(answer, truth, bounds, federation.task.columns)
    flags = cell_flags(
        attack, federation.defense, cell.target, answer, truth, estimates, bounds.limits if bounds else ""
    )
    if not attack.floor and not isinstance(answer, Labels):
        rounds, alone = tuple(cell.target.looks_at if observation.messages else ()), cell.target.kind == "probe"
        promise = _promised(stored, rounds, observation.view.threat, alone)
        shown = () if promise is None else score_promise(answer, truth, estimates, promise)
        flags = (*(promise_flags(shown, promise) if promise else ()), *flags)
        estimates += shown
    if cell.training.malice is not None:
        noticed = _noticed(federation, cell.target)
        estimates, flags = (*estimates, noticed), (*flags, notice_flag(noticed))

    content = {
        "cell": to_data(cell),
        "estimates": [to_data(estimate) for estimate in estimates],
        "flags": [to_data(flag) for flag in flags],
        "arrays": arrays_digest(arrays),
    }
    execution = Execution(context.device, torch.get_num_threads(), federation.engine)
    result = Result(cell, execution, environment(), estimates, flags, fingerprint(content, 64))
    spent = sum(store.seconds(store.part(name)) or 0.0 for name in searched)
    spent += 0.0 if batch is None else batch.elsewhere
    store.write_result(result, arrays, spent + time.perf_counter() - start, code)
    return result


def run_search(cell: Cell, victims: range, context: RunContext) -> None:
    """Attack some victims of a cell in whole groups, and store the guesses."""
    start = time.perf_counter()
    observation, _ = observe_stored(StoredTraining.of(cell.training, context), cell.threat, cell.target, context.device)
    answer = _search(cell, observation, [], victims)
    assert isinstance(answer, Reconstruction)  # only reconstructions are split
    arrays, code = of_guesses(answer), code_behind(context.store, cell.training, cell.attack, cell.threat)
    context.store.write_part(named(cell.id, victims), arrays, time.perf_counter() - start, code)


def _search(
    cell: Cell, observation: Observation, known: Sequence[tuple[range, Reconstruction]], victims: range | None = None
) -> Reconstruction | Labels | Membership:
    """The result of a cell's attack, group by group; victims with known guesses are not attacked again.

    The attack's randomness depends on the seed, the attack and the target, not on the defense: the attack starts from
    the same points against every defense.
    """
    attack = registry.build_attack(cell.attack)
    key = attack_key(cell.training.seed, cell.attack, cell.target)
    size = at_once(attack, observation)
    if size is None or cell.target.kind == "members" or observation.messages is None:
        return attack.run(observation, key)
    guesses = {i: guess for part, result in known for i, guess in zip(part, result.guesses, strict=True)}
    words = next((result.prior for _, result in known), "")
    wanted = range(len(observation.messages)) if victims is None else victims
    for group in groups(wanted, size):
        if not guesses.keys() >= set(group):
            result = attack.run(observation.of(group), key)
            assert isinstance(result, Reconstruction)  # only reconstructions have groups
            guesses |= zip(group, result.guesses, strict=True)
            words = result.prior
    return Reconstruction(tuple(guesses[i] for i in wanted), words)


def at_once(attack: Attack, observation: Observation) -> int | None:
    """How many victims an attack takes at once; None: all."""
    size = attack.at_once(observation.setting.dim)
    if size is None or observation.device == "cpu":
        return size
    return max(size, capacity(torch.device(observation.device)) // (_COPIES * observation.setting.dim + _STATE))


def _in_batch(cell: Cell, observation: Observation, beside: Sequence[Cell], context: RunContext) -> Found | None:
    """The guesses for a cell that is searched in a batch with others, now or before; None: it is searched alone."""

    def name(of: Cell) -> tuple[str, StoredTraining]:
        return of.id, StoredTraining.of(of.training, context)

    def observe(of: Cell) -> Observation:
        return observe_stored(StoredTraining.of(of.training, context), of.threat, of.target, observation.device)[0]

    if (before := _BATCHES.take(name(cell))) is not None:
        return before
    attack = registry.build_attack(cell.attack)
    size = at_once(attack, observation)
    # a user's attack may ask a defense for what a batch does not have, and a user's defense may need the CPU
    ours = shipped("attack", cell.attack.name) and shipped("defense", cell.training.defense.name)
    if not (beside and size and ours):
        return None
    others = (
        (name(other), functools.partial(observe, other))
        for other in beside
        if shipped("defense", other.training.defense.name)
        if fits(observation, registry.build_defense(other.training.defense))
    )
    key = attack_key(cell.training.seed, cell.attack, cell.target)
    return _BATCHES.search(attack, key, (name(cell), observation), others, size)


def scored(
    answer: Reconstruction | Labels | Membership, truth: Truth, bounds: Bounds | None, columns: Sequence[Column]
) -> tuple[tuple[Estimate, ...], Arrays]:
    """The estimates, and the arrays to store beside them."""
    if isinstance(answer, Membership):
        assert truth.is_member is not None  # a membership target has candidates
        estimates = score_membership(answer.scores, truth.is_member)
        return estimates, {"scores": answer.scores.numpy(), "is_member": truth.is_member.numpy()}
    xs, ys = [victim.x for victim in truth.victims], [victim.y for victim in truth.victims]
    if isinstance(answer, Labels):
        return score_labels(ys, answer.labels), {}
    estimates, pictures = score_reconstruction(xs, ys, answer.guesses, truth.others(), columns)
    if bounds is not None:
        estimates += score_limits(xs, answer.guesses, *bounds)
    return estimates, {} if pictures is None else {"original": pictures.original, "guess": pictures.guess}


@functools.lru_cache(maxsize=64)
def _promised(stored: StoredTraining, rounds: tuple[int, ...], threat: Threat, alone: bool) -> Promised | None:
    """The defense's promise for these rounds, cached for the next attacks, because accounting may take seconds."""
    return promised(claimed(stored.federation, rounds), threat, alone=alone)


def _noticed(federation: TrainedFederation, target: Target) -> Estimate:
    """How many of the first eight clients notice the parameters of the first attacked round, with their own data."""
    params, key = federation.training.models[target.looks_at[0]], federation.key.child("notice")
    numbers = sorted(federation.clients)[:_ASKED]
    noticed = [
        suspicious(federation.task, params, federation.rows(federation.clients[k]), key.child(k)) for k in numbers
    ]
    tests = ", ".join(sorted({name for names in noticed for name in names}))
    return dataclasses.replace(of_items("detectable", [float(bool(names)) for names in noticed]), note=tests)


def of_guesses(answer: Reconstruction) -> Arrays:
    """The arrays of an attack's guesses."""
    guesses = answer.guesses
    images = {f"{name} {i}": getattr(guess, name).numpy() for i, guess in enumerate(guesses) for name in ("x", "y")}
    return {
        "objective": np.array([guess.objective for guess in guesses], np.float64),
        "evaluations": np.array([guess.evaluations for guess in guesses], np.int64),
        "failure": np.array([guess.failure for guess in guesses], np.str_),
        "prior": np.array(answer.prior, np.str_),
        **images,
    }


def to_guesses(arrays: Arrays) -> Reconstruction:
    """An attack's guesses, from the arrays of `of_guesses`."""
    rows = zip(arrays["objective"], arrays["evaluations"], arrays["failure"], strict=True)
    guesses = []
    for i, (value, count, failure) in enumerate(rows):
        x, y = (torch.from_numpy(arrays[f"{name} {i}"]) for name in ("x", "y"))
        guesses.append(Guess(x, y, float(value), int(count), str(failure)))
    return Reconstruction(tuple(guesses), str(arrays["prior"]))
