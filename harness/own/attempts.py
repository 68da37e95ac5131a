"""Checks of an attack: its class, its needs, its keys, its guesses, and whether it beats the floor."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leakgauge.harness.core.cell import FederationSpec, Malice, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.codec import pack_float32
from leakgauge.harness.core.contract import Attack, Guess, Labels, Membership, Observation, Reconstruction
from leakgauge.harness.core.result import Estimate
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import GRANTS, SEES, Threat, View
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep
from leakgauge.harness.federation.observe import Scene, Truth, observe
from leakgauge.harness.own.findings import Fault, Skip, told
from leakgauge.harness.own.generators import check_repeats, watched
from leakgauge.harness.own.parts import Part, built
from leakgauge.harness.own.quick import CLIENTS, Effort
from leakgauge.harness.study.attack import scored
from leakgauge.harness.study.jobs import Place
from leakgauge.harness.study.prepare import StoredTraining
from leakgauge.harness.study.training import run_training

_KINDS = {"reconstruction": Reconstruction, "labels": Labels, "membership": Membership}

_FLOORS = {"reconstruction": ("prior", "mse", False), "labels": ("label-prior", "label_accuracy", True)}
"""For each kind: the floor attack, which observes nothing, the metric, and whether a higher value is better."""

_TRUTH = ("harness.data", "harness.study", "harness.federation.observe", "harness.federation.loop")
"""Modules that know the victims' data."""

_LOUD = 1e30
"""Entries of a gradient that make a search diverge."""


@dataclass(frozen=True)
class Trial:
    """An attack under examination."""

    part: Part
    effort: Effort

    @functools.cached_property
    def attack(self) -> Attack:
        """The attack with its parameters."""
        found: Attack = built(self.part)
        return found

    @property
    def target(self) -> Target:
        """The target of the attack."""
        if self.attack.kind == "membership":
            return Target("members", round=0, count=20)
        return Target(count=self.effort.victims)

    @functools.cached_property
    def views(self) -> list[View]:
        """The adversaries that see what the attack needs, the server first; side knowledge is granted."""
        needs = self.attack.needs
        views = [View(threat, (needs & GRANTS) - SEES[threat]) for threat in Threat]
        return [view for view in views if needs <= view.sees | ({"messages"} if view.messages else set())]

    @functools.cached_property
    def scene(self) -> Scene:
        """A training on digits without a defense; if the attack broadcasts, the server is malicious."""
        spec = TrainingSpec(TaskSpec("digits", "mlp-small"), FederationSpec(**CLIENTS), PartSpec("none"), seed=0)
        if "broadcast" in self.attack.needs:
            spec = dataclasses.replace(
                spec, malice=Malice(PartSpec(self.part.name, self.attack.parameters()), self.target)
            )
        with tempfile.TemporaryDirectory() as folder:
            place = Place(Path(folder), Path())
            run_training(spec, Keep(frozenset({0}), frozenset({0})), place)
            return StoredTraining.of(spec, place).scene

    def look(self, view: View, **changes: Any) -> tuple[Observation, Truth]:
        """What an adversary sees, and the truth; `changes` are changed fields of the target."""
        return observe(self.scene, view, dataclasses.replace(self.target, **changes))


def check_needs(trial: Trial) -> str:
    """Kind and needs are known names, and at least one adversary sees everything that the attack needs."""
    attack = trial.attack
    kind: object = getattr(attack, "kind", None)
    if kind not in _KINDS:
        raise Fault(f"expected kind: ClassVar[str] to be one of {', '.join(_KINDS)}, got {kind!r}")
    known = frozenset().union(*SEES.values()) | GRANTS
    needs: object = attack.needs
    if not isinstance(needs, frozenset):
        raise Fault(f"expected `needs` to be a frozenset of names, got {needs!r}")
    unknown = sorted(map(str, needs - known))
    if unknown:
        raise Fault(f"`needs` names {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    if not trial.views:
        raise Fault(f"no adversary sees all of {', '.join(sorted(needs))}")
    return f"{', '.join(sorted(needs)) or 'nothing'}: for {', '.join(view.name for view in trial.views)}"


def check_truth(trial: Trial) -> str:
    """The attack's file imports no module that knows the victims' data, and the attack does not modify what it sees."""
    source = inspect.getsource(inspect.getmodule(trial.part.found) or trial.part.found)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in [f"{module}{alias.name}" for alias in node.names]:
            if name.removeprefix("leakgauge.").startswith(_TRUTH):
                raise Fault(f"line {node.lineno} imports {name}: an attack knows its observation and nothing else")
    seen, _ = trial.look(trial.views[0])
    before = _parts(seen)
    trial.attack.run(seen, Key(0))
    if any(not torch.equal(one, other) for one, other in zip(before, _parts(seen), strict=True)):
        raise Fault("`run` modifies its observation; work on a copy, as in params.clone()")
    return "uses only its observation, and does not modify it"


def _parts(seen: Observation) -> list[Tensor]:
    """Copies of the tensors of an observation."""
    found = [seen.model.params] if seen.model else []
    found += [seen.final] if seen.final is not None else []
    for data in (seen.auxiliary, seen.candidates):
        found += [data.x, data.y] if data else []
    return [one.clone() for one in found]


def check_keys(trial: Trial) -> str:
    """The same key gives the same result, and every random draw uses a key."""
    seen, _ = trial.look(trial.views[0], **({} if trial.attack.kind == "membership" else {"count": 1}))
    one, other = (watched(lambda: _plain(trial.attack.run(seen, Key(0))), trial.part.folder) for _ in range(2))
    check_repeats(one, other, "`run`")
    return "same key, same result"


def _plain(found: Any) -> list[bytes]:
    """A result as bytes that can be compared."""
    if isinstance(found, Reconstruction):
        return [part.detach().numpy().tobytes() for guess in found.guesses for part in (guess.x, guess.y)]
    if isinstance(found, Labels):
        return [one.numpy().tobytes() for one in found.labels]
    return [found.scores.detach().numpy().tobytes()] if isinstance(found, Membership) else [repr(found).encode()]


def check_guesses(trial: Trial) -> str:
    """The attack gives one guess per victim, in the shape of its images."""
    seen, _ = trial.look(trial.views[0])
    return _fits(trial, seen, trial.attack.run(seen, Key(0)))


def _fits(trial: Trial, seen: Observation, found: Any) -> str:
    """What a result holds; raises `Fault` unless it fits the observation."""
    wanted = _KINDS[trial.attack.kind]
    if not isinstance(found, wanted):
        raise Fault(f"expected `run` to return {wanted.__name__} for kind {trial.attack.kind!r}, got {found!r:.80}")
    if isinstance(found, Membership):
        n = len(seen.candidates.y) if seen.candidates else 0
        if found.scores.shape != (n,) or not bool(found.scores.isfinite().all()):
            raise Fault(f"expected {n} finite scores, one per candidate, got shape {tuple(found.scores.shape)}")
        return f"{n} finite scores"
    messages = seen.messages or ()
    each = list(found.labels) if isinstance(found, Labels) else [one.x for one in _guesses(found)]
    if len(each) != len(messages):
        raise Fault(f"expected {len(messages)} guesses, one per victim in the order of the messages, got {len(each)}")
    inputs = () if isinstance(found, Labels) else seen.task.input_shape
    for one, message in zip(each, messages, strict=True):
        if one.shape != (message.images, *inputs):
            raise Fault(f"a guess has shape {tuple(one.shape)}, expected {(message.images, *inputs)}")
    for guess in _guesses(found):
        if not guess.failure and not bool(guess.x.isfinite().all() and math.isfinite(guess.objective)):
            raise Fault("a guess is not finite and has no `failure`; give the reason: Guess(..., failure=...)")
    return f"{len(each)} guesses of shape {tuple(each[0].shape)}"


def _guesses(found: Any) -> tuple[Guess, ...]:
    """The guesses of a reconstruction; empty for any other result."""
    return found.guesses if isinstance(found, Reconstruction) else ()


def check_threats(trial: Trial) -> str:
    """The attack runs for every adversary that sees what it needs; it may refuse two images in a message."""
    refused = ""
    for view in trial.views:
        for changes in ({},) if trial.attack.kind == "membership" else ({"count": 1}, {"count": 1, "batch": 2}):
            seen, _ = trial.look(view, **changes)
            try:
                _fits(trial, seen, trial.attack.run(seen, Key(0)))
            except Fault as error:
                raise Fault(f"for {view.name}: {error}") from error
            except Exception as error:
                text = told(error, trial.part.folder)
                if not (isinstance(error, ValueError) and "batch" in changes):
                    raise Fault(f"it fails for {view.name}: {text}; name what it needs in `needs`") from error
                refused = f"; two images in a message are refused: {text}"
    return f"it runs for {', '.join(view.name for view in trial.views)}{refused}"


def check_diverges(trial: Trial) -> str:
    """If the search diverges for a victim, the attack gives a guess with a failure, not an exception."""
    seen, _ = trial.look(trial.views[0])
    if not seen.messages or trial.attack.kind == "membership":
        raise Skip("the attack reads no victim's message")
    wire = pack_float32(torch.full((seen.setting.dim,), _LOUD))
    loud = dataclasses.replace(seen, messages=(seen.messages[0]._replace(wire=wire), *seen.messages[1:]))
    try:
        found = trial.attack.run(loud, Key(0))
    except Exception as error:
        text = f"a victim with a gradient of {_LOUD:g} ends the attack on all of them: {told(error, trial.part.folder)}"
        raise Fault(f"{text}; return a Guess with a `failure`") from error
    _fits(trial, loud, found)
    return f"a victim with a gradient of {_LOUD:g} does not prevent guesses for the others"


def check_floor(trial: Trial) -> str:
    """The attack beats the floor attack, which observes nothing, on undefended digits."""
    attack = trial.attack
    if attack.floor:
        raise Skip("it is a floor itself")
    seen, truth = trial.look(trial.views[0])
    found = attack.run(seen, Key(0))
    numbers = {one.name: one for one in scored(found, truth, None, ())[0]}
    if attack.kind == "membership":
        auc = numbers["auc"]
        if (auc.low or 0.0) <= 0.5:
            raise Skip(
                f"AUC {auc.value or 0:.2f} of {auc.n} records is no better than random guessing; try a longer training"
            )
        return f"AUC {auc.value:.2f} of {auc.n} records, random guessing has 0.50"
    name, metric, more = _FLOORS[attack.kind]
    blind: Any = registry.build("attack", name, {}).run(_all(trial), Key(0))
    floor = {one.name: one for one in scored(blind, truth, None, ())[0]}
    mine, least = (_value(one[metric]) for one in (numbers, floor))
    shown = f"{metric} {mine:.3g}, the floor has {least:.3g}"
    if attack.kind == "reconstruction":
        shown += f"; SSIM {numbers['ssim'].value or 0:.2f}, the floor {floor['ssim'].value or 0:.2f}"
    if not (mine > least if more else mine < least):
        raise Fault(f"{shown}: on undefended digits the attack is no better than one that observes nothing")
    return shown


def _value(one: Estimate) -> float:
    """The value of an estimate; NaN if there is none."""
    return math.nan if one.value is None else one.value


def _all(trial: Trial) -> Observation:
    """What a server sees of the same victims."""
    return trial.look(View(Threat.SERVER))[0]
