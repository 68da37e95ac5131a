"""Checks of an attack: its class, its needs, its keys, its guesses, and whether it beats the floor."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leakgauge.harness.core.cell import FederationSpec, Malice, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.codec import pack_float32
from leakgauge.harness.core.contract import Attack, Labels, Membership, Named, Observation, Reconstruction, Traced
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import GRANTS, SEES, Threat, View
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep
from leakgauge.harness.federation.observe import TrainedFederation, Truth, observe
from leakgauge.harness.integrations.findings import Fault, Skip, told
from leakgauge.harness.integrations.generators import check_repeats, plain, watched
from leakgauge.harness.integrations.parts import Part, built
from leakgauge.harness.integrations.quick import CLIENTS, Effort
from leakgauge.harness.study.attack import scored
from leakgauge.harness.study.jobs import RunContext
from leakgauge.harness.study.prepare import StoredTraining
from leakgauge.harness.study.training import run_training

_KINDS = {
    "reconstruction": Reconstruction,
    "labels": Labels,
    "membership": Membership,
    "lineup": Named,
    "source": Traced,
    "linkability": Traced,
    "property": Membership,
}

TARGETS = {
    "membership": Target("members", round=0, count=20),
    "source": Target("members", round=0, count=20),
    "linkability": Target(count=12, batch=4, rounds=2, shuffled=True),
    "property": Target(count=20, batch=4, property="brightness", share=1.0),
}
"""The targets of attacks that need all victims, or all records, at once."""

_SHARES = {"lineup": "named", "source": "source", "linkability": "linked"}
"""The metrics whose value by chance is an estimate, too."""

_FLOORS = {"reconstruction": ("prior", "mse", False), "labels": ("label-prior", "label_accuracy", True)}
"""For each kind: the floor attack, which observes nothing, the metric, and whether a higher value is better."""

_TRUTH = ("harness.data", "harness.study", "harness.federation.observe", "harness.federation.loop")
"""Modules that know the victims' data."""

_CLASSES = 10  # the digits
_LOUD = 1e30  # entries of a gradient that make a search diverge


@dataclass(frozen=True)
class AttackUnderTest:
    """An attack under examination; its training runs once."""

    part: Part
    effort: Effort

    @functools.cached_property
    def attack(self) -> Attack:
        """The attack with its parameters."""
        attack: Attack = built(self.part)
        return attack

    @property
    def target(self) -> Target:
        """The target of the attack."""
        target = TARGETS.get(self.attack.kind) or Target(count=self.effort.victims)
        return dataclasses.replace(target, round=1) if "craft" in self.attack.needs else target

    @property
    def reads_images(self) -> bool:
        """Whether it reads images; otherwise it is tested on texts."""
        return "image" in self.attack.forms

    @functools.cached_property
    def views(self) -> list[View]:
        """The adversaries that see what the attack needs, the server first; side knowledge is granted."""
        needs = self.attack.needs
        views = [View(threat, (needs & GRANTS) - SEES[threat]) for threat in Threat]
        return [view for view in views if needs <= view.sees | ({"messages"} if view.messages else set())]

    @functools.cached_property
    def federation(self) -> TrainedFederation:
        """A training on digits, or texts, without a defense; the attack may take part in it."""
        task = TaskSpec("digits", "mlp-small") if self.reads_images else TaskSpec("help", "text-encoder")
        spec = TrainingSpec(task, FederationSpec(**CLIENTS), PartSpec("none"), seed=0)
        if self.attack.needs & {"broadcast", "craft"}:
            spec = dataclasses.replace(
                spec, malice=Malice(PartSpec(self.part.name, self.attack.parameters()), self.target)
            )
        with tempfile.TemporaryDirectory() as folder:
            context = RunContext(Path(folder), Path())
            run_training(spec, Keep(frozenset({0, 1}), frozenset({0, 1})), context)
            return StoredTraining.of(spec, context).federation

    def look(self, view: View, **changes: Any) -> tuple[Observation, Truth]:
        """What an adversary sees, and the truth; `changes` are changed fields of the target."""
        return observe(self.federation, view, dataclasses.replace(self.target, **changes))


def check_needs(tested: AttackUnderTest) -> str:
    """Kind and needs are known names, and at least one adversary sees everything that the attack needs."""
    attack = tested.attack
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
    if not tested.views:
        raise Fault(f"no adversary sees all of {', '.join(sorted(needs))}")
    return f"{', '.join(sorted(needs)) or 'nothing'}: for {', '.join(view.name for view in tested.views)}"


def check_truth(tested: AttackUnderTest) -> str:
    """The attack's file imports no module that knows the victims' data, and the attack does not modify what it sees."""
    source = inspect.getsource(inspect.getmodule(tested.part.code) or tested.part.code)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in [f"{module}{alias.name}" for alias in node.names]:
            if name.removeprefix("leakgauge.").startswith(_TRUTH):
                raise Fault(f"line {node.lineno} imports {name}: an attack knows its observation and nothing else")
    observation, _ = tested.look(tested.views[0])
    before = plain(_tensors(observation))
    tested.attack.run(observation, Key(0))
    if plain(_tensors(observation)) != before:
        raise Fault("`run` modifies its observation; work on a copy, as in params.clone()")
    return "uses only its observation, and does not modify it"


def _tensors(observation: Observation) -> list[Any]:
    model = observation.model
    data = (*(observation.auxiliary or ()), *(observation.candidates or ()), *(observation.labels or ()))
    return [model.params if model else None, observation.final, *data]


def check_keys(tested: AttackUnderTest) -> str:
    """The same key gives the same result, and every random draw uses a key."""
    observation, _ = tested.look(tested.views[0], **({} if tested.target.whole else {"count": 1}))
    once, again = (watched(lambda: plain(tested.attack.run(observation, Key(0))), tested.part.folder) for _ in range(2))
    check_repeats(once, again, "`run`")
    return "same key, same result"


def check_guesses(tested: AttackUnderTest) -> str:
    """The attack gives one guess per victim, in the shape of its images."""
    observation, _ = tested.look(tested.views[0])
    return _fits(tested, observation, tested.attack.run(observation, Key(0)))


def _fits(tested: AttackUnderTest, observation: Observation, result: Any) -> str:
    """What a result holds; raises `Fault` unless it fits the observation."""
    wanted = _KINDS[tested.attack.kind]
    if not isinstance(result, wanted):
        raise Fault(f"expected `run` to return {wanted.__name__} for kind {tested.attack.kind!r}, got {result!r:.80}")
    if isinstance(result, Membership | Traced):
        return _check_scores(result.scores, observation, result)
    if isinstance(result, Named):
        return _check_lineups(result, observation)
    guesses = result.guesses if isinstance(result, Reconstruction) else ()
    if isinstance(result, Reconstruction):
        _check_shapes("images", [guess.x for guess in guesses], observation, observation.task.input_shape)
    labels = result.labels if isinstance(result, Labels) else [guess.y for guess in guesses]
    _check_shapes("labels", labels, observation, ())
    for y in labels:
        if y.dtype != torch.int64 or not bool(((y >= 0) & (y < _CLASSES)).all()):
            raise Fault(f"expected labels from 0 to {_CLASSES - 1} of type int64, got {y!r:.80}")
    for guess in guesses:
        if not guess.failure and not bool(guess.x.isfinite().all() and math.isfinite(guess.objective)):
            raise Fault("a guess is not finite and has no `failure`; give the reason: Guess(..., failure=...)")
    return f"{len(labels)} guesses of shape {tuple(guesses[0].x.shape if guesses else labels[0].shape)}"


def _check_scores(scores: Tensor, observation: Observation, result: Membership | Traced) -> str:
    """What a result holds; raises `Fault` unless each in question has its scores."""
    held, sent = observation.candidates, len(observation.messages or ())
    rows = len(held.y) if held else sent
    shape: tuple[int, ...] = (rows,)
    if isinstance(result, Traced):
        shape = (rows, observation.setting.clients) if held else (len(observation.later) * sent, sent)
    if scores.shape != shape or bool(scores.isnan().any() or (len(shape) == 1 and scores.isinf().any())):
        raise Fault(f"expected finite scores {list(shape)}, got shape {list(scores.shape)}")
    return f"finite scores {list(shape)}"


def _check_lineups(result: Named, observation: Observation) -> str:
    """What a result holds; raises `Fault` unless each candidate of each record has one score."""
    sizes = [[len(place.scores) for place in each] for each in result.records]
    expected = [[len(lineup.y) for lineup in each] for each in observation.lineups or ()]
    if sizes != expected:
        raise Fault(f"expected one score for each candidate, {expected}, got {sizes}")
    return f"the scores of {len(sizes)} lineups"


def _check_shapes(what: str, each: Sequence[Tensor], observation: Observation, shape: tuple[int, ...]) -> None:
    """Raise `Fault` unless each victim has values of this shape for each of its images."""
    messages = observation.messages or ()
    if len(each) != len(messages):
        raise Fault(f"expected {len(messages)} guesses, one per victim in the order of the messages, got {len(each)}")
    for values, message in zip(each, messages, strict=True):
        if values.shape != (message.images, *shape):
            raise Fault(f"{what} of a victim have shape {tuple(values.shape)}, expected {(message.images, *shape)}")


def check_threats(tested: AttackUnderTest) -> str:
    """The attack runs for every adversary that sees what it needs, and with nothing else.

    It may refuse two images in a message, or sums of messages.
    """
    refused = ""
    for view in tested.views:
        for changes in ({},) if tested.target.whole else ({"count": 1}, {"count": 1, "batch": 2}):
            observation = _only(tested.look(view, **changes)[0], tested.attack.needs)
            try:
                _fits(tested, observation, tested.attack.run(observation, Key(0)))
            except Fault as error:
                raise Fault(f"for {view.name}: {error}") from error
            except Exception as error:
                text = told(error, tested.part.folder)
                is_sum = "sums" in view.sees
                if not (isinstance(error, ValueError) and (is_sum or "batch" in changes)):
                    raise Fault(f"it fails for {view.name}: {text}; name what it needs in `needs`") from error
                refused = f"; {'sums of messages' if is_sum else 'two images in a message'} are refused: {text}"
    return f"it runs for {', '.join(view.name for view in tested.views)}{refused}"


def _only(observation: Observation, needs: frozenset[str]) -> Observation:
    fields = {"messages", "models", "final", "auxiliary", "candidates", "labels", "others"}
    hidden: dict[str, Any] = dict.fromkeys(fields - needs)
    if "models" in hidden:
        hidden["model"] = None
    hidden |= {name: None for grant, name in (("lineup", "lineups"), ("mates", "mates")) if grant not in needs}
    if "shared" not in needs and "messages" in needs:
        hidden["messages"] = tuple(message._replace(shared=None) for message in observation.messages or ())
    return dataclasses.replace(observation, **hidden)


def check_diverges(tested: AttackUnderTest) -> str:
    """If the search diverges for a victim, the attack gives a guess with a failure, not an exception."""
    observation, _ = tested.look(tested.views[0])
    if not observation.messages or tested.target.whole:
        raise Skip("the attack reads no victim's message")
    for what, extreme in _extremes(observation):
        try:
            result = tested.attack.run(extreme, Key(0))
        except Exception as error:
            text = f"a victim with {what} ends the attack on all of them: {told(error, tested.part.folder)}"
            raise Fault(f"{text}; return a Guess with a `failure`") from error
        _fits(tested, extreme, result)
    return f"a victim with a gradient of {_LOUD:g} or 0 does not prevent guesses for the others"


def _extremes(observation: Observation) -> Iterator[tuple[str, Observation]]:
    assert observation.messages is not None
    first, *others = observation.messages
    for value in (_LOUD, 0.0):
        message = first._replace(wire=pack_float32(torch.full((observation.setting.dim,), value)))
        yield f"a gradient of {value:g}", dataclasses.replace(observation, messages=(message, *others))
    if observation.model is not None:
        model = observation.model._replace(params=math.nan * observation.model.params)
        yield "a model that is not finite", dataclasses.replace(observation, model=model)


def check_floor(tested: AttackUnderTest) -> str:
    """The attack beats the floor attack, which observes nothing, on undefended digits or texts."""
    attack = tested.attack
    if attack.floor:
        raise Skip("it is a floor itself")
    observation, truth = tested.look(tested.views[0])
    numbers = {e.name: e for e in scored(attack.run(observation, Key(0)), truth, None, tested.federation.task.form)[0]}
    if attack.kind in ("membership", "property"):
        auc = numbers["auc" if attack.kind == "membership" else "property_auc"]
        if (auc.low or 0.0) <= 0.5:
            raise Skip(
                f"AUC {auc.value or 0:.2f} of {auc.n} records is no better than random guessing; try a longer training"
            )
        return f"AUC {auc.value:.2f} of {auc.n} records, random guessing has 0.50"
    if (name := _SHARES.get(attack.kind)) is not None:
        share, chance = numbers[name], numbers[name].chance or 0.0
        if (share.low or 0.0) <= chance:
            text = f"{share.value:.2f} {name} of {share.n} undefended digits, chance is {chance:.2f}"
            if attack.kind == "source":  # most records of a client are not behind its message
                raise Skip(text)
            raise Fault(text)
        return f"{share.value:.2f} {name} of {share.n}, chance is {chance:.2f}"
    name, metric, more = _FLOORS[attack.kind] if tested.reads_images else ("prior", "words", True)
    blind: Any = registry.build("attack", name, {}).run(tested.look(View(Threat.SERVER))[0], Key(0))
    floor = {e.name: e for e in scored(blind, truth, None, tested.federation.task.form)[0]}
    ours, least = (math.nan if e[metric].value is None else float(e[metric].value or 0) for e in (numbers, floor))
    shown = f"{metric} {ours:.3g}, the floor has {least:.3g}"
    if metric == "mse":
        shown += f"; SSIM {numbers['ssim'].value or 0:.2f}, the floor {floor['ssim'].value or 0:.2f}"
    if not (ours > least if more else ours < least):
        raise Fault(f"{shown}: on undefended digits the attack is no better than one that observes nothing")
    return shown
