"""Attacks one cell of a stored training, scores the guesses, and stores the result.

A long search, or a long limit of the target, is done in parts (see `jobs`). On an accelerator, a search takes about as
long for a hundred victims as for one, so a part may have the victims of several cells. These need the same parameters:
the cells attack the common first model, with the same seed, model, data and federation, and their defenses differ.
Every attack that searches victims in groups takes such a batch, because each message's sender tells the defense and the
state behind the message.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from leakgauge.harness.audit.attacked import Promised, Proved, promised, proved_identification
from leakgauge.harness.audit.limit import Limit, NoLimit, limits
from leakgauge.harness.audit.weights import suspicious
from leakgauge.harness.core.cell import Cell, Target
from leakgauge.harness.core.contract import (
    Answer,
    Attack,
    Candidates,
    Defense,
    Guess,
    Labels,
    Likelihood,
    Link,
    Links,
    Membership,
    Named,
    Observation,
    Reconstruction,
    Sender,
    Traced,
    likelihood_of,
)
from leakgauge.harness.core.defense import Wrapper
from leakgauge.harness.core.device import capacity
from leakgauge.harness.core.form import Form
from leakgauge.harness.core.result import Estimate, Execution, Result
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import of_items
from leakgauge.harness.core.stored import canonical, fingerprint, to_data
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.observe import TrainedFederation, Truth
from leakgauge.harness.learn.prior import GaussianPrior, gaussian_prior
from leakgauge.harness.study.environment import code_behind, environment, shipped
from leakgauge.harness.study.flags import cell_flags, notice_flag, promise_flags
from leakgauge.harness.study.jobs import Job, RunContext, groups, limit_id, named, victims_of
from leakgauge.harness.study.prepare import StoredTraining, attack_key, claimed, observe_stored
from leakgauge.harness.study.score import (
    score_labels,
    score_limits,
    score_lineup,
    score_membership,
    score_promise,
    score_property,
    score_reconstruction,
    score_traced,
)
from leakgauge.harness.study.store import Arrays, arrays_digest

_ASKED = 8  # the number of clients that test a malicious server's broadcast; each test takes about a second

_COPIES, _STATE = 16, 2**20
"""Numbers that a search on an accelerator holds for each victim: copies of its gradient, and its inputs' steps."""


class _Member(Sender):
    federation: int


@dataclass(frozen=True)
class BatchedCells(Wrapper[Any, Any]):
    """The defenses of several federations with one setting and one rule for local training.

    It has what a search for the inputs behind messages uses; the state is a tuple, with one state per federation.
    """

    delegated: ClassVar[str] = "local step_noise training_noise superposes"
    default: ClassVar[str] = "analog correlates randomized remember"  # `encode` asks each defense for its memory
    refused: ClassVar[dict[str, str]] = {
        "exact_likelihood parts init longest decode average advance compensated stops plaintext_statistic "
        "read_plaintext_statistic error_variance message_distribution state_metrics step_distribution "
        "aggregate_distribution independent settled relies promises arithmetic claim summed_proof violations "
        "low_noise_variant parameters": "the defenses of a batch differ"
    }

    each: tuple[Defense[Any, Any], ...]
    known: dict[int, tuple[object, Likelihood]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def wrapped(self) -> Defense[Any, Any]:
        """The first defense; only what `alike` compares is delegated to it."""
        return self.each[0]

    def encode(self, state: Any, memory: Any, update: Vector, link: Link, private: Key) -> tuple[bytes, Any]:
        """The first message of a client, by its own federation's defense."""
        at = _federation(link.sender)
        wire, _ = self.each[at].encode(state[at], self.each[at].remember(link.setting), update, link, private)
        return wire, None

    def transmit(self, state: Any, wires: Sequence[bytes], links: Links, channel: Key) -> Sequence[bytes]:
        """Each message through its own federation's channel."""
        received: list[bytes] = []
        for wire, sender in zip(wires, links.senders, strict=True):
            at = _federation(sender)
            received += self.each[at].transmit(state[at], [wire], Links(links.setting, [sender], None), channel)
        return received

    def estimate(self, state: Any, received: bytes, link: Link) -> Vector:
        """The estimate of the message's own defense."""
        at = _federation(link.sender)
        return self.each[at].estimate(state[at], received, link)

    def likelihood(self, state: Any, received: Sequence[bytes], links: Links) -> Likelihood:
        """The likelihoods of the messages' own defenses, one after the other."""
        likelihoods, sizes = list[Likelihood](), list[int]()
        for at, members in itertools.groupby(range(len(received)), lambda i: _federation(links.senders[i])):
            places = list(members)
            span = slice(places[0], places[-1] + 1)
            keys = None if links.shared is None else links.shared[span]
            wires, own_links = received[span], Links(links.setting, links.senders[span], keys)
            asked = wires, own_links.senders, keys
            if at not in self.known or self.known[at][0] != asked:
                self.known[at] = asked, likelihood_of(self.each[at], state[at], wires, own_links)
            likelihoods.append(self.known[at][1])
            sizes.append(len(wires))

        def score(update: Tensor) -> Tensor:
            pieces = zip(likelihoods, torch.split(update, sizes), strict=True)
            return torch.cat([likelihood(piece) for likelihood, piece in pieces])

        return score


def _federation(sender: Sender) -> int:
    assert isinstance(sender, _Member)  # `joined` made it
    return sender.federation


def joined(observations: Sequence[Observation]) -> Observation:
    """One observation of all victims, in order, without what only one has; the observations are `alike`."""
    first, messages, states = observations[0], [], []
    for number, observation in enumerate(observations):
        assert observation.messages is not None
        assert observation.model is not None
        states.append(observation.model.state)
        for sent in observation.messages:
            sender = _Member(*sent.sender)
            sender.federation = number
            messages.append(sent._replace(sender=sender))
    assert first.model is not None
    return dataclasses.replace(
        first,
        defense=BatchedCells(tuple(observation.defense for observation in observations)),
        messages=tuple(messages),
        model=first.model._replace(state=tuple(states)),
        labels=None if first.labels is None else tuple(label for each in observations for label in each.labels or ()),
        models=None,
        final=None,
        others=None,
    )


def alike(observation: Observation, other: Observation) -> bool:
    """Whether victims of two observations of one attack, target and adversary may share a batch."""
    ours, defense, setting = observation.defense, other.defense, observation.setting
    return (
        observation.model is not None
        and other.model is not None
        and not (observation.later or other.later)
        and not (ours.superposes or defense.superposes)
        and ours.local == defense.local
        and (setting, observation.lr) == (other.setting, other.lr)
        and ours.step_noise(setting) == defense.step_noise(setting)
        and torch.equal(observation.model.params, other.model.params)
    )


Split = Reconstruction | Named
"""What is found victim by victim."""


class Bounds(NamedTuple):
    """Bounds of any attack on one target: the limit of each victim or why there is none, and the proofs' bound."""

    limits: list[Limit] | str
    proved: Proved | None


def bounds_of(cell: Cell, context: RunContext, parts: Sequence[str] = ()) -> Bounds:
    """The bounds of a cell, which are the same for every attack on its target.

    Args:
        parts: names of stored parts of the limit, among others; missing victims are computed.
    """
    ours = sorted((name for name in parts if name.startswith(limit_id(cell))), key=lambda name: victims_of(name).start)
    code = code_behind(context.store, cell.training, None, cell.threat) if ours else ""
    stored = StoredTraining.of(cell.training, context)
    return _bounds(stored, cell.threat, cell.target, context.device, tuple(ours), code)


@functools.lru_cache(maxsize=8)
def _bounds(
    stored: StoredTraining, threat: str, target: Target, device: str, parts: tuple[str, ...], code: str
) -> Bounds:
    """`bounds_of`, cached for the next attacks on the same messages."""
    observation, truth = observe_stored(stored, threat, target, device)
    among = 1 + truth.rivals
    claim = claimed(stored.federation, target.looks_at) if observation.messages and among > 1 else None
    proved = proved_identification(claim, observation.view.threat, among) if claim else None
    known = {name: stored.store.read_part(name, code) for name in parts}
    whole = [(victims_of(name), arrays) for name, arrays in known.items() if arrays is not None]
    if not parts or len(whole) < len(parts):
        return Bounds(_limits(stored.federation, observation, truth, target), proved)
    for _, arrays in whole:
        if "reason" in arrays:
            return Bounds(str(arrays["reason"]), proved)
    assert observation.auxiliary is not None  # without auxiliary data there is a reason
    prior = gaussian_prior(observation.auxiliary.x, 0.0)
    joined = dict(pair for victims, arrays in whole for pair in zip(victims, to_limits(arrays, prior), strict=True))
    return Bounds([joined[number] for number in range(len(truth.victims))], proved)


def _limits(
    federation: TrainedFederation, observation: Observation, truth: Truth, target: Target, only: range | None = None
) -> list[Limit] | str:
    try:
        return limits(observation, truth.victims, federation.key.child("limit", canonical(to_data(target))), only)
    except NoLimit as error:
        return str(error)


def of_limits(bounds: Sequence[Limit] | str) -> Arrays:
    """The arrays of limits, or of the reason why there are none; without the directions, which the prior gives."""
    if isinstance(bounds, str):
        return {"reason": np.array(bounds, np.str_)}
    each = {f"errors {i}": np.stack([limit.error, limit.average, limit.blind]) for i, limit in enumerate(bounds)}
    about = np.array([(limit.basis.shape[1], limit.linear) for limit in bounds], np.int64)
    return {"about": about, **each}


def to_limits(arrays: Arrays, prior: GaussianPrior) -> list[Limit]:
    """The limits from the arrays of `of_limits`; `prior`: the prior of the attacker's data."""
    known = []
    for i, (axes, linear) in enumerate(arrays["about"].tolist()):
        error, average, blind = arrays[f"errors {i}"]
        known.append(Limit(error, average, blind, prior.axes[0][:, :axes], bool(linear)))
    return known


def run_attack(cell: Cell, context: RunContext, parts: Sequence[str] = ()) -> Result:
    """Attack one cell of a stored training, score it, and store the result.

    Args:
        parts: names of stored parts of the attack and of its limit; missing victims are computed.
    """
    start, store = time.perf_counter(), context.store
    stored = StoredTraining.of(cell.training, context)
    federation, attack = stored.federation, registry.build_attack(cell.attack)
    code = code_behind(store, cell.training, cell.attack, cell.threat)
    observation, truth = observe_stored(stored, cell.threat, cell.target, context.device)
    check_form(attack, federation.task.form)

    searched = {name: store.read_part(name, code) for name in parts if name.startswith(cell.id)}
    known = [(victims_of(name), to_parts(arrays)) for name, arrays in searched.items() if arrays is not None]
    answer = _search(cell, observation, known)

    bounds = bounds_of(cell, context, parts) if cell.limit and isinstance(answer, Reconstruction) else None
    estimates, arrays = scored(answer, truth, bounds, federation.task.form)
    flags = cell_flags(
        attack, federation.defense, cell.target, answer, truth, estimates, bounds.limits if bounds else ""
    )
    if not attack.floor and not isinstance(answer, Labels):
        rounds, alone = tuple(cell.target.looks_at if observation.messages else ()), cell.target.kind == "probe"
        promise = _promised(stored, rounds, observation.view.threat, alone)
        shown = () if promise is None else score_promise(answer, truth, estimates, promise)
        if isinstance(answer, Named) and (proved := _provable(stored, rounds, observation.view.threat, answer.among)):
            estimates += (Estimate("named_bound", proved.share, None, None, 0, proved.words),)
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
    result = Result(cell, execution, environment(context.device), estimates, flags, fingerprint(content, 64))
    spent = sum(store.seconds(store.part(name)) or 0.0 for name in searched)
    store.write_result(result, arrays, spent + time.perf_counter() - start, code)
    return result


def check_form(attack: Attack, form: Form) -> None:
    """Raise ValueError if an attack does not read this form of inputs."""
    if form.name not in attack.forms:
        raise ValueError(f"it reads {', '.join(sorted(attack.forms))}, not {form.name}: {form.instead}")


def run_part(job: Job, context: RunContext) -> None:
    """Search some victims of cells in whole groups, or compute their limit, as the job says, and store the result."""
    if len(job.cells) > 1:
        _run_batches(job, context)
        return
    start, (cell,) = time.perf_counter(), job.cells
    stored = StoredTraining.of(cell.training, context)
    observation, truth = observe_stored(stored, cell.threat, cell.target, context.device)
    if job.kind == "limit":
        arrays = of_limits(_limits(stored.federation, observation, truth, cell.target, job.victims))
    else:
        answer = _search(cell, observation, [], job.victims)
        assert isinstance(answer, Split)  # only these are split
        arrays = of_parts(answer)
    code = code_behind(context.store, cell.training, cell.attack if job.kind == "search" else None, cell.threat)
    context.store.write_part(Path(job.writes[0]).name, arrays, time.perf_counter() - start, code)


def _search(
    cell: Cell, observation: Observation, known: Sequence[tuple[range, Split]], victims: range | None = None
) -> Answer:
    """The result of a cell's attack, group by group; victims with known results are not attacked again."""
    attack = registry.build_attack(cell.attack)
    key = _key(cell)
    size = at_once(attack, observation)
    if size is None or cell.target.whole or observation.messages is None:
        return attack.run(observation, key)
    parts, done = list(known), {number for those, _ in known for number in those}
    there = len(observation.messages)  # fewer than planned if the records are too few
    victims = range(there) if victims is None else range(victims.start, min(victims.stop, there))
    for group in groups(victims, size):
        if not done >= set(group):
            result = attack.run(observation.of(group), key)
            assert isinstance(result, Reconstruction | Named)  # only these have groups
            parts.append((group, result))
    if not victims:
        return Named((), exact=True)
    whole = {number: each for those, part in parts for number, each in zip(those, part[0], strict=False)}
    results: tuple[Any, ...] = tuple(whole[number] for number in victims)
    last = next(part for _, part in reversed(parts) if part[0])
    return type(last)(results, last[1])  # type: ignore[arg-type]  # prior, or exact


def _key(cell: Cell) -> Key:
    return attack_key(cell.training.seed, cell.attack, cell.target)


def at_once(attack: Attack, observation: Observation) -> int | None:
    """How many victims an attack takes at once; None: all."""
    size = attack.at_once(observation.setting.dim)
    if size is None or observation.device == "cpu":
        return size
    return max(size, capacity(torch.device(observation.device)) // (_COPIES * observation.setting.dim + _STATE))


def _run_batches(job: Job, context: RunContext) -> None:
    """Search the victims of cells together, as many at once as the device holds, and store the guesses of each cell.

    There are no guesses for a cell that does not fit, or whose batch fails: it is attacked alone, and reports errors.
    """
    first, start, joining = job.cells[0], time.perf_counter(), list[tuple[Cell, Observation]]()
    # a user's attack may ask a defense for what a batch does not have, and a user's defense may need the CPU
    for cell in job.cells if shipped("attack", first.attack.name) else ():
        if not shipped("defense", cell.training.defense.name):
            continue
        try:
            stored = StoredTraining.of(cell.training, context)
            seen, _ = observe_stored(stored, cell.threat, cell.target, context.device)
        except Exception:  # its own attack reports the error
            continue
        if seen.messages is not None and not seen.task.form.columns and alike(joining[0][1] if joining else seen, seen):
            joining.append((cell, seen))
    if not joining:
        return
    attack, count = registry.build_attack(first.attack), len(job.victims)
    size = at_once(attack, joining[0][1]) or 0
    for some in groups(range(len(joining)), max(1, size // count)):
        batch = joining[some.start : some.stop]
        if len(batch) == 1:
            continue
        try:
            found = attack.run(joined([seen for _, seen in batch]), _key(first))
        except Exception:  # of one defense, or of the memory
            continue
        assert isinstance(found, Reconstruction)  # only these have batches
        seconds, start = (time.perf_counter() - start) / len(batch), time.perf_counter()
        for number, (cell, _) in enumerate(batch):
            own = Reconstruction(found.guesses[number * count : (number + 1) * count], found.prior)
            code = code_behind(context.store, cell.training, cell.attack, cell.threat)
            context.store.write_part(named(cell.id, job.victims), of_parts(own), seconds, code)


def scored(answer: Answer, truth: Truth, bounds: Bounds | None, form: Form) -> tuple[tuple[Estimate, ...], Arrays]:
    """The estimates, and the arrays to store beside them."""
    if isinstance(answer, Traced):
        assert truth.sources is not None
        return score_traced(answer, truth.sources, bool(truth.victims)), {}
    if isinstance(answer, Membership):
        assert truth.is_member is not None  # a membership target has candidates
        if truth.victims:
            return score_property(answer.scores, truth.is_member), {}
        estimates = score_membership(answer.scores, truth.is_member)
        return estimates, {"scores": answer.scores.numpy(), "is_member": truth.is_member.numpy()}
    xs, ys = [victim.x for victim in truth.victims], [victim.y for victim in truth.victims]
    if isinstance(answer, Labels):
        return score_labels(ys, answer.labels), {}
    if isinstance(answer, Named):
        return score_lineup(answer, truth.places), {}
    assert isinstance(answer, Reconstruction)
    estimates, pictures = score_reconstruction(xs, ys, answer.guesses, truth.others(), form)
    if bounds is not None:
        estimates += score_limits(xs, answer.guesses, *bounds)
    return estimates, {} if pictures is None else {"original": pictures.original, "guess": pictures.guess}


@functools.lru_cache(maxsize=64)
def _promised(stored: StoredTraining, rounds: tuple[int, ...], threat: Threat, alone: bool) -> Promised | None:
    """The defense's promise for these rounds, cached for the next attacks, because accounting may take seconds."""
    return promised(claimed(stored.federation, rounds), threat, alone=alone)


@functools.lru_cache(maxsize=64)
def _provable(stored: StoredTraining, rounds: tuple[int, ...], threat: Threat, among: int) -> Proved | None:
    """The proofs' bound on naming one of `among` candidates, cached like `_promised`."""
    return proved_identification(claimed(stored.federation, rounds), threat, among)


def _noticed(federation: TrainedFederation, target: Target) -> Estimate:
    """How many of the first eight clients notice the parameters of the first attacked round, with their own data."""
    params, key = federation.training.models[target.looks_at[0]], federation.key.child("notice")
    numbers = sorted(federation.clients)[:_ASKED]
    noticed = [
        suspicious(federation.task, params, federation.rows(federation.clients[k]), key.child(k)) for k in numbers
    ]
    tests = ", ".join(sorted({name for names in noticed for name in names}))
    return dataclasses.replace(of_items("detectable", [float(bool(names)) for names in noticed]), note=tests)


def of_parts(answer: Split) -> Arrays:
    """The arrays of an attack's results for some victims."""
    if isinstance(answer, Named):
        each = [(f"{i} {j}", place) for i, places in enumerate(answer.records) for j, place in enumerate(places)]
        return {
            "exact": np.array(answer.exact),
            "sizes": np.array([len(places) for places in answer.records], np.int64),
            **{f"{name} {at}": array.numpy() for at, place in each for name, array in place._asdict().items()},
        }
    guesses = answer.guesses
    images = {f"{name} {i}": getattr(guess, name).numpy() for i, guess in enumerate(guesses) for name in ("x", "y")}
    return {
        "objective": np.array([guess.objective for guess in guesses], np.float64),
        "evaluations": np.array([guess.evaluations for guess in guesses], np.int64),
        "failure": np.array([guess.failure for guess in guesses], np.str_),
        "prior": np.array(answer.prior, np.str_),
        **images,
    }


def to_parts(arrays: Arrays) -> Split:
    """An attack's results for some victims, from the arrays of `of_parts`."""
    if "exact" in arrays:
        records = []
        for i, size in enumerate(arrays["sizes"].tolist()):
            places = [[torch.from_numpy(arrays[f"{name} {i} {j}"]) for name in Candidates._fields] for j in range(size)]
            records.append(tuple(Candidates(*place) for place in places))
        return Named(tuple(records), bool(arrays["exact"]))
    rows = zip(arrays["objective"], arrays["evaluations"], arrays["failure"], strict=True)
    guesses = []
    for i, (value, count, failure) in enumerate(rows):
        x, y = (torch.from_numpy(arrays[f"{name} {i}"]) for name in ("x", "y"))
        guesses.append(Guess(x, y, float(value), int(count), str(failure)))
    return Reconstruction(tuple(guesses), str(arrays["prior"]))
