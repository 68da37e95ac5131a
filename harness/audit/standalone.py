"""Audits asked without a study: of a defense by itself, or inside a federated run.

| `by` | what is audited | says |
|---|---|---|
| `trials` | the defense on two inputs, many times: `harness.audit.engine` | a lower bound for the claim's rounds |
| `messages` | every message of a real training on digits: `canaries.audit_messages` | a lower bound for one round |
| `one-run` | what rounds decode to, with canary clients: `canaries.one_run` | a lower bound for all rounds together |
| `cosine` | the same: `canaries.cosine_run` | an estimate for all rounds together, which changes no verdict |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from leakgauge.harness import data
from leakgauge.harness.audit.bounds import Counts
from leakgauge.harness.audit.canaries import audit_messages, cosine_run, one_run
from leakgauge.harness.audit.claim_record import record_claim
from leakgauge.harness.audit.claims import (
    USUAL,
    Asked,
    Delta,
    described,
    epsilon_in_json,
    exact_delta,
    plain,
    prepare,
    ratios_delta,
)
from leakgauge.harness.audit.engine import Audited, choose, counted, verdict, watcher
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core.cell import FederationSpec, Scalar
from leakgauge.harness.core.claim import Claim, Relation, Unit
from leakgauge.harness.core.contract import Defense, Examples, Setting
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.federation.loop import Keep, make_plan, make_setting, train
from leakgauge.harness.federation.round import client_key
from leakgauge.harness.learn.batch import Work, choose_engine, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.partition import partition
from leakgauge.harness.learn.tasks import ModelTask

_SMALL = {**USUAL, "dim": 36, "clients": 3, "participants": 3, "samples": 20, "steps": 1, "batch": 0, "lr": 0.1}
"""What is small is quick, and a bound for a small model is one for the mechanism."""

_ALL = {**_SMALL, "participants": None}
"""Inside a run everybody takes part."""

_DIGITS_DIM = 650
"""Parameters of a softmax regression on digits."""

_CANARIES = 10
"""So many a guess: 100 guesses of 1000 canaries, fixed before any run."""


class _Way(NamedTuple):
    """What one `by` takes: the federation where nobody says, its rounds (None: the defense's), and options."""

    setting: dict[str, Any]
    rounds: int | None
    options: frozenset[str]


_WAYS = {
    "trials": _Way(_SMALL, None, frozenset({"trials", "confidence", "threat"})),
    # 10 clients x 200 rounds: 2,000 messages
    "messages": _Way({**_ALL, "dim": _DIGITS_DIM, "clients": 10}, 200, frozenset({"confidence", "threat"})),
    # as many coordinates as canaries, so that none is in another's way
    "one-run": _Way({**_ALL, "dim": 1000, "clients": 1000}, 10, frozenset({"confidence", "threat"})),
    # a hundredth as many canaries as coordinates
    "cosine": _Way({**_ALL, "dim": 30_000, "clients": 300}, 10, frozenset()),
}


def ask_audit(
    name: str,
    parameters: dict[str, Scalar],
    setting: dict[str, Scalar],
    rounds: int | None,
    *,
    trials: int | None = None,
    confidence: float | None = None,
    threat: str | None = None,
    seed: int,
    by: str = "trials",
) -> dict[str, Any]:
    """What `ask` tells, with an audit under it: the key `audited`, and the verdict of both.

    | key of `audited` | of which `by` | what |
    |---|---|---|
    | by, delta, unit | all | the unit is the claim's |
    | pair | all | what input 0 and input 1 are |
    | epsilon_lower, confidence, threat, method, any_mechanism | all but cosine | as `audit.Audited` |
    | trials | trials | with each of the two inputs |
    | messages, pilot | messages | counted, half of them with each input; not counted |
    | distinguisher, true_positives, false_positives | trials, messages | as `audit.Audited` |
    | rounds | all but trials | of the run |
    | canaries | one-run, cosine | clients, all of them |
    | guesses, right | one-run | as `canaries.Guesses` |
    | epsilon_estimate, mu, dim, null, kind | cosine | as `one_run.CosineAudit`; no bound |
    | delta_at | all, where it is known | `ask.Delta`, with the claimed epsilon |

    Args:
        setting: what differs from the small federation of this `by`.
        rounds: T; by default as `ask` has it for trials, 200 for messages, 10 for canary clients.
        trials: with each of the two inputs; by default 1000.
        confidence: of the lower bound; by default 0.95.
        threat: who looks; by default the adversary of the claim who sees most. What a round decodes to, all see.

    Raises:
        UnknownNameError: as `ask`.
        StudyError: as `ask`; an option that this `by` has no use for; a claim that it cannot audit.
    """
    _check(setting, by, {"trials": trials, "confidence": confidence, "threat": threat})
    usual = _WAYS[by]
    asked = prepare(name, parameters, setting, usual.rounds if rounds is None else rounds, None, usual.setting)
    level, key = 0.95 if confidence is None else confidence, Key(seed, ("audit",))
    try:
        if by == "messages":
            digits = _Digits.of(asked, key.child("run"))
            asked = asked._replace(setting=digits.setting)
        claim = asked.defense.claim(asked.history[:1] if by == "messages" else asked.history, asked.setting)
        looks = watcher(claim) if threat is None else Threat(threat)
        _check_fit(name, asked.defense, claim, looks, by)
        if by == "messages":
            found = _by_messages(digits, claim, looks, level, key)
        elif by == "one-run":
            found = _by_one_run(asked, claim, looks, level, key)
        elif by == "cosine":
            found = _by_cosine(asked, claim, key)
        else:
            found = _by_trials(asked, claim, looks, 1000 if trials is None else trials, level, key)
    except ValueError as error:
        raise error if isinstance(error, StudyError) else StudyError(name, [str(error)]) from error
    known = exact_delta(claim, looks) or found.sampled
    row = {"by": by, **found.row, "delta": claim.delta, "unit": claim.unit.value}
    row |= {} if known is None else {"delta_at": {"epsilon": claim.epsilon, **known._asdict()}}
    return (
        described(name, asked.defense, asked.setting)
        | plain(record_claim(claim))
        | {"audited": row}
        | (found.judged or {})
    )


def prepare_audit(name: str, parameters: dict[str, Scalar], setting: dict[str, Scalar], rounds: int | None) -> Asked:
    """The defense in the small federation that it is audited in by trials.

    Raises:
        UnknownNameError, StudyError: as `ask`.
    """
    return prepare(name, parameters, setting, rounds, None, _SMALL)


def lines(row: dict[str, Any]) -> list[str]:
    """What was audited, for people: of the key `audited`."""
    what = f"a {row['unit']}, delta {row['delta']:g}"
    if row["by"] == "cosine":
        found = (
            f"  ESTIMATE epsilon about {_short(row['epsilon_estimate'])} {what}, no bound (cosines of {_clients(row)}, "
            f"{row['pair']}; d {row['dim']}, mu {row['mu']:.4g})"
        )
    else:
        plain = row["method"] in ("Clopper-Pearson", "one run")
        sure = "" if plain else f"; {_short(row['any_mechanism'])} without taking it for Gaussian"
        found = (
            f"  audited  epsilon >= {_short(row['epsilon_lower'])} {what}, confidence {row['confidence']:g}, "
            f"by {row['threat']} ({row['method']}{sure}; {_counted(row)})"
        )
    if "delta_at" not in row:
        return [found]
    at = row["delta_at"]
    how = "exact, of the pair that attains the proof"
    if at["method"] != "exact":
        how = f"{at['low']:.4g} to {at['high']:.4g}, {at['n']} trials an input, by the defense's own law"
    return [found, f"  delta    {at['delta']:.4g} at epsilon {at['epsilon']:.6g} ({how})"]


class _Found(NamedTuple):
    """Keys of `audited`, the verdict with its reason where there is a new one, and what the trials say of delta."""

    row: dict[str, Any]
    judged: dict[str, str] | None = None
    sampled: Delta | None = None


def _by_trials(asked: Asked, claim: Claim, looks: Threat, trials: int, confidence: float, key: Key) -> _Found:
    """`harness.audit.engine`."""
    mechanism = Mechanism(asked.defense, asked.setting, tuple(asked.history), looks)
    way = choose(mechanism, claim, trials, confidence, key)
    found = counted(mechanism, claim, way, trials, confidence, key)
    sampled = None
    if looks in claim.against and mechanism.sees_messages and way.inputs.draw is None and not exact_delta(claim, looks):
        # the trials that were counted, made again
        runs = (mechanism.run(way.inputs, bit, trials, key.child("counted", bit), only="loss") for bit in (0, 1))
        zeros, ones = (run.loss.numpy() for run in runs if run.loss is not None)
        most = claim.proved.epsilon(0.0) if claim.delta == 0 else math.inf
        sampled = ratios_delta(zeros, ones, claim.epsilon, confidence, most)
    return _bound(claim, found, {"trials": trials, **_told_apart(found)}, sampled)


def _by_messages(digits: _Digits, claim: Claim, looks: Threat, confidence: float, key: Key) -> _Found:
    """`canaries.audit_messages`; half of the messages are the trials with each input."""
    updates, history = digits.train()
    run = audit_messages(digits.defense, digits.setting, updates, history, claim, looks, confidence, key)
    counts, method = run.counts, "likelihood ratio"
    each = min(counts.positives, counts.negatives)
    found = Audited(
        run.epsilon_lower, run.delta, confidence, each, method, run.pair, looks, run.method, run.any_mechanism, counts
    )
    return _bound(
        claim, found, {"messages": run.trials, "pilot": run.pilot, "rounds": len(history)} | _told_apart(found)
    )


def _by_one_run(asked: Asked, claim: Claim, looks: Threat, confidence: float, key: Key) -> _Found:
    """`canaries.one_run`; all clients are canaries, from end to end where neighbors may be so far apart."""
    defense, setting, history = asked
    m = setting.clients
    pair: Literal["from nothing", "end to end"] = "end to end"
    if claim.relation is Relation.ADD_REMOVE:
        pair = "from nothing"
    found = one_run(defense, setting, history, claim, m, (max(1, m // _CANARIES),), confidence, key, pair=pair)
    ((made, right),) = found.guesses
    as_trials = Audited(
        *(found.epsilon_lower, found.delta, confidence, m, "guesses", pair, looks, found.method, found.any_mechanism),
        Counts(right, made - right, made, made),
    )
    row, judged, _ = _bound(claim, as_trials, {"canaries": m, "rounds": found.rounds, "guesses": made, "right": right})
    assert judged is not None
    # a coin says which of the two inputs a canary client has
    return _Found(row, judged | {"reason": judged["reason"].replace("trials an input", "canary clients")})


def _by_cosine(asked: Asked, claim: Claim, key: Key) -> _Found:
    """`canaries.cosine_run`: no bound, no verdict."""
    found = cosine_run(*asked, claim, asked.setting.clients, key)
    said = {"mu": found.mu, "dim": found.d, "null": found.null, "kind": found.kind, "pair": "from nothing"}
    counted = {"canaries": found.k, "rounds": len(asked.history)}
    return _Found({"epsilon_estimate": epsilon_in_json(found.epsilon)} | said | counted)


@dataclass(frozen=True, eq=False)
class _Digits:
    """A softmax regression on digits, each client with as many samples: a training with the defense in it."""

    defense: Defense[Any, Any]
    task: ModelTask
    spec: FederationSpec
    clients: dict[int, Examples]
    test: Examples
    setting: Setting
    key: Key

    @classmethod
    def of(cls, asked: Asked, key: Key) -> _Digits:
        """With the clients, samples, steps, batch and learning rate that were asked for."""
        public, digits = asked.setting, data.load("digits", Path())
        samples, there = public.clients * public.samples, len(digits.train.y)
        if samples > there:
            raise StudyError("audit", [f"setting.samples: got {samples} of all clients, expected at most {there}"])
        task = ModelTask(build("linear", digits.input_shape, len(digits.classes)))
        spec = FederationSpec(
            clients=public.clients,
            rounds=public.rounds,
            algorithm="fedsgd" if public.sends == "gradient" else "fedavg",
            samples=samples,
            local_steps=public.steps,
            batch=public.batch,
            lr=public.lr,
            evaluate_every=public.rounds,
        )
        parts = partition(spec, digits.train.y, key.child("partition"))
        clients = {k: Examples(digits.train.x[part], digits.train.y[part]) for k, part in enumerate(parts)}
        setting = make_setting(task, spec, clients, asked.defense.local)
        return cls(asked.defense, task, spec, clients, digits.test, setting, key.child("training"))

    def train(self) -> tuple[Tensor, list[Any]]:
        """[T, clients, d], the updates before the defense, trained again from each round's model; public states."""
        engine, defense = choose_engine(self.task), self.defense
        keep = Keep(models=frozenset(range(self.spec.rounds)))
        run = train(self.task, self.spec, defense, self.clients, self.test, self.key, engine=engine, keep=keep)
        updates, history = [], [defense.init(self.setting)]
        for number, lr in enumerate(run.learning_rates):
            plan = make_plan(self.spec, lr, defense.local, defense.step_noise(self.setting))
            work = [Work(mine, client_key(self.key, number, k).child("train")) for k, mine in self.clients.items()]
            updates.append(train_clients(self.task, run.models[number], work, plan, engine).updates)
            history.append(defense.advance(history[-1], run.feedback[number]))
        return torch.stack(updates), history[:-1]


def _check(setting: dict[str, Scalar], by: str, options: dict[str, Any]) -> None:
    """Refuse what makes no sense, all at once."""
    if by not in _WAYS:
        raise StudyError("audit", [f"by: got {by!r}, known: {', '.join(_WAYS)}"])
    problems = []
    for name, value in options.items():
        if value is None:
            continue
        if name not in _WAYS[by].options:
            problems.append(f"{name}: got {value}, of which an audit by {by} makes no use")
        elif name == "trials" and value < 1:
            problems.append(f"trials: got {value}, expected at least 1")
        elif name == "confidence" and not 0 < value < 1:
            problems.append(f"confidence: got {value}, expected 0 < confidence < 1")
        elif name == "threat" and value not in (known := [one.value for one in Threat]):
            problems.append(f"threat: got {value!r}, known: {', '.join(known)}")
    clients = setting.get("clients", _WAYS[by].setting["clients"])
    if by != "trials" and setting.get("participants", clients) != clients:
        problems.append(f"setting.participants: got {setting['participants']}, expected all of {clients} clients")
    if by == "messages" and setting.get("dim", _DIGITS_DIM) != _DIGITS_DIM:
        problems.append(f"setting.dim: got {setting['dim']}, the model that is trained has {_DIGITS_DIM}")
    if problems:
        raise StudyError("audit", problems)


def _check_fit(name: str, defense: Defense[Any, Any], claim: Claim, looks: Threat, by: str) -> None:
    """Refuse a claim that this way cannot audit, and say which ways can."""
    no: dict[str, str] = {}
    if claim.unit not in (Unit.CLIENT, Unit.MESSAGE):
        no |= dict.fromkeys(("one-run", "cosine"), f"its unit is a {claim.unit.value}, and a canary is a client")
    elif claim.delta == 0:
        no["cosine"] = "its claim is at delta 0, where Gaussian laws have no epsilon"
    if claim.unit is Unit.RECORD:
        no["messages"] = "its unit is a record, which acts through local training"
    elif defense.superposes:
        no["messages"] = "its channel adds all messages up"
    elif "messages" not in SEES[looks]:
        no["messages"] = f"{looks.value} sees no messages"
    if by in no:
        fits = " or ".join(way for way in _WAYS if way not in no)
        raise StudyError(name, [f"cannot be audited by {by}: {no[by]}; expected --by {fits}"])


def _told_apart(found: Audited) -> dict[str, Any]:
    """How, and how often."""
    positives = {"true_positives": found.counts.true_positives, "false_positives": found.counts.false_positives}
    return {"distinguisher": found.distinguisher} | positives


def _bound(claim: Claim, found: Audited, counted: dict[str, Any], sampled: Delta | None = None) -> _Found:
    """A lower bound with what was counted for it, and the verdict."""
    judged, reason = verdict(claim, found)
    row = {
        "epsilon_lower": epsilon_in_json(found.epsilon_lower),
        "confidence": found.confidence,
        "pair": found.pair,
        "threat": found.threat.value,
        "method": found.method,
        "any_mechanism": epsilon_in_json(found.any_mechanism),
    }
    return _Found(row | counted, {"verdict": judged.value, "reason": reason}, sampled)


def _counted(row: dict[str, Any]) -> str:
    """What the bound rests on."""
    if row["by"] == "one-run":
        return f"{_clients(row)}, {row['pair']}; {row['right']} of {row['guesses']} guesses right"
    trials, of = row.get("trials"), ""
    positives, negatives = trials, trials
    if trials is None:
        positives, negatives = row["messages"] // 2, -(-row["messages"] // 2)
        of = f"{row['messages']} messages of {row['rounds']} rounds{', others chose' if row['pilot'] else ''}; "
    return (
        f"{row['distinguisher']}, {row['pair']}; {of}{row['true_positives']} of {positives} right on input 1, "
        f"{row['false_positives']} of {negatives} wrong on input 0"
    )


def _clients(row: dict[str, Any]) -> str:
    """How many canary clients there were."""
    return f"{row['canaries']} canary clients in one run of {row['rounds']} rounds"


def _short(value: float | str) -> str:
    """Four digits, or inf."""
    return value if isinstance(value, str) else f"{value:.4g}"
