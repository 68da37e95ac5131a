"""Short names of defenses, attacks and settings: only the parameters in which they differ are spelled out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from leakgauge.harness.core.cell import Cell, FederationSpec, PartSpec, Scalar, TaskSpec, canonical
from leakgauge.reports.text.notation import plural

_EXPONENT = re.compile(r"e([+-])0*(\d+)$")
UNDEFENDED = "none"
"""The name of the defense that does nothing."""


class Label(NamedTuple):
    """How a defense or an attack is called on a page.

    Attributes:
        name: without parameters; the defense `none` is called `no defense`.
        varying: the parameters in which the study's parts of this name differ.
        full: all parameters.
    """

    name: str
    varying: str
    full: str

    @property
    def text(self) -> str:
        """Name and varying parameters."""
        return f"{self.name} {self.varying}".strip()


def _value(value: Scalar) -> str:
    """One parameter's value as a study would spell it: `1`, `0.05`, `1e-5`."""
    return _EXPONENT.sub(r"e\1\2", f"{value:g}").replace("e+", "e") if isinstance(value, float) else str(value)


def written(parameters: dict[str, Scalar], names: Iterable[str]) -> str:
    """`key=value, ...` of the named parameters."""
    return ", ".join(f"{name}={_value(parameters[name])}" for name in names if parameters.get(name) is not None)


def label_parts(parts: Iterable[PartSpec]) -> dict[str, Label]:
    """The label of each part, by `PartSpec.label`."""
    distinct = {part.label: part for part in parts}
    values: dict[str, dict[str, set[Scalar]]] = {}
    for part in distinct.values():
        seen = values.setdefault(part.name, {})
        for name, value in part.parameters.items():
            seen.setdefault(name, set()).add(value)
    labels = {}
    for key, part in distinct.items():
        varying = [name for name in part.parameters if len(values[part.name][name]) > 1]
        shown = "no defense" if part.name == UNDEFENDED else part.name
        labels[key] = Label(shown, written(part.parameters, varying), written(part.parameters, part.parameters))
    return labels


def varying_parameters(parts: Sequence[PartSpec]) -> list[str]:
    """Names of the parameters in which parts of one name differ, in their order."""
    names = [name for part in parts for name in part.parameters]
    return [name for name in dict.fromkeys(names) if len({part.parameters.get(name) for part in parts}) > 1]


def setting_key(task: TaskSpec, federation: FederationSpec) -> str:
    """One text for one task and federation; cells of different settings are never compared."""
    return canonical([dataclasses.asdict(task), dataclasses.asdict(federation)])


def label_settings(cells: Iterable[Cell]) -> dict[str, str]:
    """A name for each setting: data and model, size of the federation, and what else differs between them."""
    settings = {}
    for cell in cells:
        task, federation = cell.training.task, cell.training.federation
        settings[setting_key(task, federation)] = (task, federation)
    fields = [field.name for field in dataclasses.fields(FederationSpec)]
    differing = [name for name in fields if len({getattr(f, name) for _, f in settings.values()}) > 1]
    inits = len({task.init for task, _ in settings.values()}) > 1
    labels = {}
    for key, (task, federation) in settings.items():
        size = f"{plural(federation.clients, 'client')}, {plural(federation.rounds, 'round')}, {federation.algorithm}"
        rest = [n for n in differing if n not in ("clients", "rounds", "algorithm")]
        more = [f"{name}={getattr(federation, name)}" for name in rest] + ([f"init={task.init}"] if inits else [])
        labels[key] = " · ".join([task.data, task.model, size, *more])
    return labels
