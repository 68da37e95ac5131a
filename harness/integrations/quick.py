"""A user's part under examination: its messages in a small federation, a quick audit and a quick study on digits."""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leakgauge.harness.audit import standalone
from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import TaskSpec
from leakgauge.harness.core.claim import Claim, Code, Horizon, Verdict, judge
from leakgauge.harness.core.contract import Defense, Links, Message, Sender, Setting, claim_of
from leakgauge.harness.core.errors import MessageError, StudyError
from leakgauge.harness.core.result import Run
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threads import one_thread
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.federation.round import Client, Exchange, Round
from leakgauge.harness.federation.small import Federation
from leakgauge.harness.integrations.findings import Fault, Skip
from leakgauge.harness.integrations.generators import Watched, watched
from leakgauge.harness.integrations.parts import Part, built
from leakgauge.harness.study.prepare import load_data, make_task
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve

DIM = 50
"""Default length of an update."""

SENDER = Sender(0, 8)
"""The client whose messages are examined."""


@dataclasses.dataclass(frozen=True)
class Wire:
    """Messages of a defense in a small federation; numbers name keys."""

    defense: Defense[Any, Any]
    dim: int = DIM

    @functools.cached_property
    def round_(self) -> Round:
        """The first round, of four clients with eight samples and a model of two tensors."""
        sizes = (self.dim - self.dim // 3, self.dim // 3) if self.dim > 2 else (self.dim,)
        layout = Layout(tuple(f"tensor {k}" for k in range(len(sizes))), tuple((size,) for size in sizes))
        setting = Setting(layout, 4, 4, 3, sends="gradient", steps=1, lr=0.1, batch=8, samples=8)
        return Round(self.defense, setting, self.defense.init(setting))

    @property
    def clip(self) -> float:
        """The norm to which the defense clips an update, by its parameter `clip`; 1 without it."""
        return float(self.defense.parameters().get("clip") or 1.0)

    def update(self, norm: float = 0.9, number: int = 0) -> Vector:
        """An update of this norm, in units of the clip."""
        drawn = rng.normal(Key(1).child("update", number), (self.dim,), torch.float64)
        length = float(torch.linalg.vector_norm(drawn))
        return (drawn * (norm * self.clip / length)).float()

    def client(self, update: Vector, private: int = 0, shared: int = 0, sender: Sender = SENDER) -> Client:
        """The client that sends this update."""
        memory = self.defense.remember(self.round_.setting)
        return Client(sender, update, memory, Key(0).child("private", private), Key(0).child("shared", shared))

    def exchange(self, update: Vector, private: int = 0, shared: int = 0) -> Exchange:
        """The message of this update, with silent other clients if the channel adds messages up."""
        return self.round_.among_silent([self.client(update, private, shared)], Key(0).child("others", private))

    def read(self, received: bytes, shared: int | None = 0) -> Vector:
        """The estimate of the server, or without the shared key; raises `Fault` unless it is shaped like an update."""
        key = None if shared is None else Key(0).child("shared", shared)
        return self.shaped(self.round_.read(Message(0, SENDER, received, key, SENDER.samples)), "estimate")

    def shaped(self, estimate: Any, method: str) -> Vector:
        """What a method returned; raises `Fault` unless it is shaped like an update, `MessageError` if not finite."""
        if not isinstance(estimate, Tensor) or estimate.shape != (self.dim,) or estimate.dtype != torch.float32:
            is_tensor = isinstance(estimate, Tensor)
            shown = f"{estimate.dtype} of shape {tuple(estimate.shape)}" if is_tensor else type(estimate).__name__
            raise Fault(f"`{method}` returns {shown}, expected a float32 tensor of shape ({self.dim},)")
        if not bool(estimate.isfinite().all()):
            raise MessageError("an estimate that is not finite")  # a round refuses such an estimate
        return estimate

    def estimates(self, update: Vector, privates: Sequence[int], shareds: Sequence[int]) -> Tensor:
        """[n, d] float64: the server's estimates from messages of one update."""
        rows = zip(privates, shareds, strict=True)
        read = [self.read(self.exchange(update, *keys).received[0], keys[1]) for keys in rows]
        return torch.stack(read).double()


_DIGITS = {"data": "digits", "model": "mlp-small"}
CLIENTS: dict[str, Any] = dict(clients=4, rounds=2, samples=240, test_samples=200, algorithm="fedsgd", batch=16, lr=0.1)


@dataclass(frozen=True)
class Effort:
    """The work of an examination: trials of the audit, evaluations of each search, and victims."""

    trials: int = 1000
    evaluations: int = 600
    victims: int = 4


@dataclass(frozen=True)
class DefenseUnderTest:
    """A defense under examination; its traced messages, its audit and its study are made once."""

    part: Part
    effort: Effort

    @functools.cached_property
    def defense(self) -> Defense[Any, Any]:
        """The defense with its parameters."""
        defense: Defense[Any, Any] = built(self.part)
        return defense

    @functools.cached_property
    def wire(self) -> Wire:
        """The messages of the defense."""
        return Wire(self.defense)

    @functools.cached_property
    def traced(self) -> tuple[Watched, Watched]:
        """One encoding, traced twice."""
        wire, update = self.wire, self.wire.update()
        once, again = (watched(lambda: wire.round_.encode(wire.client(update))[0], self.part.folder) for _ in range(2))
        return once, again

    def claim(self, rounds: int) -> Claim:
        """The claim of this number of rounds of the small federation, or of all if the defense stops earlier."""
        setting = self.wire.round_.setting
        return claim_of(self.defense, Federation.of(self.defense, setting).history[:rounds], setting)

    @functools.cached_property
    def _audited(self) -> dict[str, Any] | StudyError:
        try:
            return standalone.audit(self.part.name, self.part.parameters, {}, None, trials=self.effort.trials, seed=0)
        except StudyError as error:
            return error

    @property
    def audited(self) -> dict[str, Any]:
        """The result of `leakgauge audit`; each check that needs a failed audit shows its error."""
        if isinstance(self._audited, StudyError):
            raise Fault(" ".join(str(self._audited).split()))
        return self._audited

    @functools.cached_property
    def study(self) -> Run:
        """The study of the defense next to no defense."""
        ours = {"name": self.part.name, **self.part.parameters}
        return quick_study(_DIGITS, [{"name": "none"}, ours], attacks(self.effort))


@dataclass(frozen=True)
class TaskUnderTest:
    """A task under examination, with its study."""

    part: Part
    effort: Effort

    @property
    def spec(self) -> TaskSpec:
        """The task as a study names it; missing data are replaced by digits, a missing model by a small network."""
        module, name = vars(self.part.code), self.part.name
        data = f"{name}:data" if "data" in module else "digits"
        return TaskSpec(data, f"{name}:model" if "model" in module else "mlp-small")

    @functools.cached_property
    def study(self) -> Run:
        """The study of the task without a defense."""
        return quick_study({"data": self.spec.data, "model": self.spec.model}, [{"name": "none"}], attacks(self.effort))


def attacks(effort: Effort) -> list[dict[str, Any]]:
    """The floor and two attacks: one ignores the defense, the other uses its likelihood."""
    target = {"kind": "probe", "count": effort.victims}
    table = {"evaluations": effort.evaluations, "restarts": 1, "target": target}
    return [{"name": "prior", "target": target}, {"name": "idlg", **table}, {"name": "map", **table}]


@one_thread()
def quick_study(
    task: dict[str, Any], defenses: list[dict[str, Any]], attacked: list[dict[str, Any]], *, limit: bool = False
) -> Run:
    """The results of a study in this process, in a folder that is deleted afterwards."""
    table = {"name": "doctor", "tasks": [task], "federations": [CLIENTS], "defenses": defenses, "attacks": attacked}
    with tempfile.TemporaryDirectory() as folder:
        return run_study(resolve(table | {"limit": limit}, allow_code=True), Path(folder) / "runs", workers=0)


def check_claim(tested: DefenseUnderTest) -> str:
    """The claim states its horizon, grows with the rounds, and its own proof supports it."""
    defense = tested.defense
    if type(defense).claim is Defense.claim:
        raise Skip("no `claim`: nothing is promised")
    claimed = tested.audited["claimed"]
    first, three = tested.claim(1), tested.claim(3)
    several = len(Federation.of(defense, tested.wire.round_.setting).history)
    for claim, rounds in ((first, 1), (three, several)):
        if claim.horizon is not Horizon.of(rounds):
            expected = Horizon.of(rounds).value
            raise Fault(f"the claim for {rounds} rounds has the horizon {claim.horizon.value!r}, expected {expected!r}")
        if not claim.epsilon > 0 or not claim.proved.reason:
            raise Fault(f"expected epsilon > 0 and a proof with a reason, got {claim.epsilon} {claim.proved.reason!r}")
    if three.epsilon < first.epsilon:
        epsilons = f"{three.epsilon:.4g} is claimed for three rounds, {first.epsilon:.4g} for one"
        raise Fault(f"epsilon {epsilons}; it grows with the rounds")
    if judge(three).proved < judge(first).proved:
        raise Fault("a smaller epsilon is proved for three rounds than for one; count the rounds in the proof")
    told = f"{tested.audited['verdict']}: {tested.audited['reason']}"
    if tested.audited["verdict"] == Verdict.BROKEN.value:
        if not type(defense).__module__.startswith("leakgauge."):
            raise Fault(f"{told} Add noise, or claim what is proved")
        told += " The published claim is false; this is not a fault of the code."
    asked = defense.parameters().get("epsilon")
    also = f"; epsilon={asked} was asked for" if isinstance(asked, float) and asked != claimed["epsilon"] else ""
    return f"{told} ({claimed['horizon']}{also})"


def check_assumptions(tested: DefenseUnderTest) -> str:
    """`violations` counts assumptions that the claim states, and leaves the updates as they are."""
    defense, wire = tested.defense, tested.wire
    if type(defense).violations is Defense.violations:
        raise Skip("no assumption of the claim is counted")
    setting, updates = wire.round_.setting, [wire.update(0.9, number) for number in range(4)]
    before = torch.stack(updates)
    senders = [Sender(number, setting.samples) for number in range(4)]
    counted = defense.violations(updates, Links(setting, senders, None), setting.lr)
    if not torch.equal(before, torch.stack(updates)):
        raise Fault("`violations` modifies the updates that it is given; work on copies")
    unknown = counted.keys() - set(tested.claim(3).assumes)
    if unknown:
        raise Fault(f"`violations` counts {sorted(unknown)[0]!r}, which `claim` does not state in `assumes`")
    for text, count in counted.items():
        if not 0 <= count.broken <= count.of or not count.of:
            raise Fault(f"`violations` counts {count.broken} of {count.of} for {text!r}")
    return f"{len(counted)} assumptions are counted"


def check_distribution(tested: DefenseUnderTest) -> str:
    """The messages of a small federation against the stated distribution."""
    row = tested.audited["audited"]
    if "fit" not in row:
        raise Skip(
            "no `message_distribution` is stated: an audit cannot say that the code is the mechanism of the claim"
        )
    fit = row["fit"]
    if fit["rejects"]:
        raise Fault(
            f"messages depart from `message_distribution`: {', '.join(fit['rejects'][:3])}; it or `encode` is wrong"
        )
    power = f"; {fit['detects']:.1%} less noise would show" if fit["detects"] else ""
    return f"{fit['numbers']} numbers of {fit['messages']} messages follow `message_distribution`{power}"


def check_dependence(tested: DefenseUnderTest) -> str:
    """What messages depend on, tried with chosen keys (`audit.keys`)."""
    keys = tested.audited["audited"]["keys"]
    if keys["faults"]:
        raise Fault("; ".join(keys["faults"]))
    return f"nothing was found in {keys['messages']} messages with chosen keys"


def check_audit(tested: DefenseUnderTest) -> str:
    """A measured lower bound of epsilon."""
    row = tested.audited["audited"]
    epsilon, delta = row["epsilon_lower"], row["delta"]
    text = f"epsilon >= {epsilon:.4g} at delta {delta:g} by {row['trials']} trials ({row['pair']})"
    if row["verdict"] == Code.CONTRADICTED.value:
        raise Fault(f"code {row['verdict']}: {row['seen']}; {text}")
    return f"{text}; code {row['verdict']}: {row['seen']}"


def check_data(tested: TaskUnderTest) -> str:
    """The data can be used in a study."""
    if tested.spec.data == "digits":
        raise Skip("no `data`: the digits data set is used instead")
    loaded = load_data(tested.spec.data, Path())
    counts = f"{len(loaded.train.x):,} training and {len(loaded.test.y):,} test inputs"
    return f"{counts} {list(loaded.train.x.shape[1:])}, {len(loaded.classes)} classes"


def check_model(tested: TaskUnderTest) -> str:
    """The model accepts the data, and its parameters are drawn by a key."""
    loaded = load_data(tested.spec.data, Path())
    task = make_task(tested.spec, loaded)
    params, again = (task.init(Key(0)) for _ in range(2))
    if not bool((params == again).all()):
        raise Fault(
            "the same key gives different parameters; the factory must draw only from the seeded global generators"
        )
    scores: Any = task.outputs(params, loaded.train.x[:2])
    return f"{task.layout.dim:,} parameters in {len(task.layout.names)} tensors, scores {list(scores.shape[1:])}"


def check_training(tested: DefenseUnderTest | TaskUnderTest) -> str:
    """A training on digits with the defense, or a training of the task."""
    name = tested.part.name if tested.part.kind == "defense" else "none"
    ours = [training for training in tested.study.trainings.values() if training.spec.defense.name == name]
    if not ours:
        raise Fault(_failed(tested.study) or "no training of it was finished")
    wrong = [flag.message for flag in ours[0].flags if flag.code in ("not-repeatable", "dropped-clients")]
    if wrong:
        raise Fault("; ".join(wrong))
    last, first = ours[0].evaluations[-1], ours[0].evaluations[0]
    accuracy = f", accuracy {last.accuracy:.2f}" if last.accuracy is not None else ""
    sent = ours[0].message_bytes[-1]
    return f"2 rounds: loss {first.loss:.3f} to {last.loss:.3f}{accuracy}, {sent:,.0f} bytes a message"


def check_attacks(tested: DefenseUnderTest | TaskUnderTest) -> str:
    """What attacks see of digits behind the defense, or of the task's data."""
    run = tested.study
    if failed := _failed(run):
        raise Fault(failed)
    shown: dict[str, list[str]] = {}
    refused = [failure.message for failure in run.failures.values() if failure.kind == "NoLikelihood"]
    for result in run.results.values():
        ssim = next((e.value for e in result.estimates if e.name == "ssim" and e.value is not None), math.nan)
        name = "floor" if result.cell.attack.name == "prior" else result.cell.attack.name
        shown.setdefault(result.cell.training.defense.name, []).append(f"{name} {ssim:.2f}")
    rows = "; ".join(f"{name}: {', '.join(values)}" for name, values in shown.items())
    return f"mean SSIM {rows}{f'; refused: {refused[0]}' if refused else ''}"


def _failed(run: Run) -> str:
    """Why a cell failed, unless it needs a likelihood that the defense does not state."""
    failures = [failure for failure in run.failures.values() if failure.kind != "NoLikelihood"]
    return "; ".join(dict.fromkeys(f"{failure.cell.attack.name}: {failure.message}" for failure in failures))
