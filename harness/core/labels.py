"""Labels of defenses, attacks, settings, targets and cells in the terminal, the report, the gate and the exports.

A label names only the parameters in which the defenses or attacks of a study differ. Labels are never parsed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.cell import Cell, FederationSpec, PartSpec, Scalar, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.result import TrainingRecord
from leakgauge.harness.core.stored import canonical
from leakgauge.harness.core.threats import SEES

_EXPONENT = re.compile(r"e([+-])0*(\d+)$")
# What each adversary sees, by name; who sees messages also knows their sum
_SEES = {one.value: sees | ({"sums"} if "messages" in sees else set()) for one, sees in SEES.items()}

ARITHMETIC = {
    "exact": "the proof holds for what the program computes, in integers or fractions",
    "rounding-safe": "no low bits tell more; probabilities are right up to rounding, about 2^-53 to 2^-24 an outcome",
    "reals": "the proof is for exact real numbers, and the low bits of floats may tell more",
}
"""What each `claim.Arithmetic` means."""

UNDEFENDED = "none"
"""The name of the defense that does nothing."""


class Label(NamedTuple):
    """The label of a defense or an attack.

    Attributes:
        name: the name without parameters; the defense `none` is called `no defense`.
        varying: the parameters in which defenses or attacks of this name differ.
        full: all parameters.
    """

    name: str
    varying: str
    full: str

    @property
    def text(self) -> str:
        """Name and varying parameters."""
        return f"{self.name} {self.varying}".strip()


def value_text(value: Scalar) -> str:
    """One parameter's value as written in a study: `1`, `0.05`, `1e-5`."""
    return _EXPONENT.sub(r"e\1\2", f"{value:g}").replace("e+", "e") if isinstance(value, float) else str(value)


def written(parameters: Mapping[str, Scalar], names: Iterable[str]) -> str:
    """`key=value, ...` of the named parameters."""
    return ", ".join(f"{name}={value_text(parameters[name])}" for name in names if parameters.get(name) is not None)


def part_text(part: PartSpec) -> str:
    """A defense or an attack with all its parameters: `gaussian clip=1, epsilon=8`."""
    return f"{shown_name(part.name)} {written(part.parameters, part.parameters)}".strip()


def shown_name(name: str) -> str:
    """The name of a defense or an attack for readers; the defense `none` is called `no defense`."""
    return "no defense" if name == UNDEFENDED else name


def server_text(spec: TrainingSpec) -> str:
    """`honest`, or the attack that chooses the parameters that the server broadcasts, and its target."""
    return "honest" if spec.malice is None else f"{part_text(spec.malice.attack)}, {where(spec.malice.target)}"


def label_parts(parts: Iterable[PartSpec]) -> dict[str, Label]:
    """The label of each defense or attack, given all of them, by `PartSpec.key`."""
    distinct = {part.key: part for part in parts}
    named = gathered((part.name, part) for part in distinct.values())
    varying = {name: varying_parameters(alike) for name, alike in named.items()}
    labels = {}
    for key, part in distinct.items():
        short, full = (written(part.parameters, names) for names in (varying[part.name], part.parameters))
        labels[key] = Label(shown_name(part.name), short, full)
    return labels


def varying_parameters(parts: Sequence[PartSpec]) -> list[str]:
    """Names of the parameters in which defenses or attacks of one name differ, in their order."""
    names = [name for part in parts for name in part.parameters]
    return [name for name in dict.fromkeys(names) if len({part.parameters.get(name) for part in parts}) > 1]


def where(target: Target) -> str:
    """The target of an attack: `probe (face), round 0`, `members of client 3, rounds 0 to 9`."""
    kind = target.kind if target.client is None else f"{target.kind} of client {target.client}"
    kind += f" ({', '.join(target.victim_classes)})" if target.victim_classes else ""
    if target.round is None:
        return kind
    last = f" to {target.round + target.rounds - 1}" if target.rounds > 1 else ""
    batch = f", batch {target.batch}" if target.batch > 1 else ""
    users = f", {target.users} users at once" if target.users > 1 else ""
    own = ", own victims" if target.skip else ""
    return f"{kind}, round{'s' if last else ''} {target.round}{last}{batch}{users}{own}"


class Names:
    """Short names of trainings and cells among these cells: only what differs between them. Of no cells: everything."""

    def __init__(self, cells: Iterable[Cell] = ()) -> None:
        among = tuple(cells)
        self._parts = label_parts(part for cell in among for part in (cell.training.defense, cell.attack))
        self._settings = label_settings(among)
        self._shared = [{text(cell) for cell in among} for text in _DIFFERING]

    def cell(self, cell: Cell) -> str:
        """Defense and attack; adversary, target, seed and setting where they differ."""
        words = [text(cell) for text, shared in zip(_DIFFERING, self._shared, strict=True) if shared != {text(cell)}]
        case = f"{self._part(cell.training.defense)} under {self._part(cell.attack)}"
        return ", ".join([case, *words, *self._setting(cell.training)])

    def training(self, spec: TrainingSpec) -> str:
        """The defense; seed and setting where they differ."""
        seed = f"seed {spec.seed}"
        return ", ".join([self._part(spec.defense), *[seed] * (self._shared[-1] != {seed}), *self._setting(spec)])

    def _part(self, part: PartSpec) -> str:
        return self._parts[part.key].text if part.key in self._parts else part_text(part)

    def _setting(self, spec: TrainingSpec) -> list[str]:
        known = self._settings.get(setting_key(spec.task, spec.federation), "")
        return [known] if len(self._settings) > 1 else []


_DIFFERING: tuple[Callable[[Cell], str], ...] = (
    lambda cell: cell.threat,
    lambda cell: where(cell.target),
    lambda cell: f"seed {cell.training.seed}",
)


def case_text(defense: str, attack: str, threat: str, target: str) -> str:
    """One case in one phrase; for a training, which has no attack, the defense alone."""
    return f"{defense} under {attack}, {threat}, {target}" if attack else defense


def unpromised(cell: Cell, training: TrainingRecord | None) -> str:
    """`not promised against server`, if no finite claim names the cell's adversary or one that sees as much.

    Empty without a defense or a finished training. Side knowledge changes no claim; broadcast parameters may.
    """
    if training is None or cell.training.defense.name == UNDEFENDED:
        return ""
    name, *grants = cell.threat.split("+")
    sees = _SEES.get(name, frozenset({name})) | ({"broadcast"} & {*grants})
    finite = [claim for claim in (training.one_round, training.whole_run) if claim.epsilon is not None]
    promised = any(sees <= _SEES.get(adversary, frozenset()) for claim in finite for adversary in claim.against)
    return "" if promised else f"not promised against {cell.threat}"


def assumption(method: str) -> str:
    """The assumption of an audit's bound about the mechanism, by the bound's method."""
    return "the distribution's family" if "Gaussian" in method else "nothing"


@functools.lru_cache
def setting_key(task: TaskSpec, federation: FederationSpec) -> str:
    """A text that identifies a task and federation; cells of different settings are never compared."""
    return canonical([dataclasses.asdict(task), dataclasses.asdict(federation)])


def setting_text(task: TaskSpec, federation: FederationSpec, more: Sequence[str] = ()) -> str:
    """Data and model, and the size of the federation."""
    size = f"{counted(federation.clients, 'client')}, {counted(federation.rounds, 'round')}, {federation.algorithm}"
    return " · ".join([task.data, task.model, size, *more])


def label_settings(cells: Iterable[Cell]) -> dict[str, str]:
    """A name for each setting, by `setting_key`: `setting_text`, and the other fields in which settings differ."""
    pairs = dict.fromkeys((cell.training.task, cell.training.federation) for cell in cells)
    settings = {setting_key(*pair): pair for pair in pairs}
    fields = [field.name for field in dataclasses.fields(FederationSpec)]
    names = [name for name in fields if name not in ("clients", "rounds", "algorithm")]
    names = [name for name in names if len({getattr(federation, name) for _, federation in settings.values()}) > 1]
    inits = len({task.init for task, _ in settings.values()}) > 1
    labels = {}
    for key, (task, federation) in settings.items():
        more = [f"{name}={getattr(federation, name)}" for name in names] + ([f"init={task.init}"] if inits else [])
        labels[key] = setting_text(task, federation, more)
    return labels


def unique(names: Mapping[str, str]) -> dict[str, str]:
    """The names by key; a name that several keys share gets the last six characters of each key appended."""
    counts = Counter(names.values())
    return {key: f"{name} [{key[-6:]}]" if counts[name] > 1 else name for key, name in names.items()}


def counted(count: int, noun: str) -> str:
    """`1 check`, `2 checks`, `4 batches`; thousands are grouped by a no-break space."""
    ending = "es" if noun.endswith(("ch", "x", "s")) else "s"
    return f"{count:,}".replace(",", "\u00a0") + f" {noun}" + ("" if count == 1 else ending)


def odds(chance: float) -> str:
    """The probability from `result.chance` that an adversary guesses one bit correctly, in words."""
    return "right over 99.99 %" if chance > 0.9999 else f"right up to {100 * chance:.4g} %"
