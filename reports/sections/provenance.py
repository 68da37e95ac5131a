"""The origin of the numbers, and the commands that reproduce them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.numerics import VECTORS, several
from leakgauge.harness.core.result import Environment, Run
from leakgauge.reports.sections import Section
from leakgauge.reports.select import Analysis
from leakgauge.reports.table import Column, Table
from leakgauge.reports.text.notation import duration

LONGEST_STUDY = 100_000
"""Characters of the resolved study; a longer study is shown without its cells, which “All results” lists."""


def _distinct(texts: Iterable[str], separator: str) -> str:
    return separator.join(dict.fromkeys(texts)) or "unknown"


def _study(study: dict[str, object]) -> str:
    shown = {key: value for key, value in study.items() if key != "text"}
    for less in ({}, {"cells": "left out for length, see “All results”"}):
        text = json.dumps(shown | less, indent=2, ensure_ascii=False, allow_nan=False, default=str)
        if len(text) <= LONGEST_STUDY:
            break
    return text[:LONGEST_STUDY]


def _commands(run: Run, environments: Sequence[Environment]) -> tuple[str, ...]:
    studies = run.study.get("studies", [run.study])
    commit = environments[0].commit if environments else "COMMIT"
    first = f"pip install .  # its checkout: {commit}" if commit.startswith("release") else f"git checkout {commit}"
    runs = []
    for number, study in enumerate(studies, 1):
        file = f"study-{number}.toml" if number > 1 else "study.toml"
        name = file if study.get("text") else study.get("name", run.name)
        runs.append(f"leakgauge run {shlex.quote(name)} -o results{' --merge' if number > 1 else ''}")
    return first, *runs, "leakgauge report results"


def provenance(analysis: Analysis) -> dict[str, Any]:
    """Everything known about the run: facts by name, tables, commands, and why these may give other numbers."""
    run, environments = analysis.run, analysis.run.environments
    executions = [record.execution for record in run.trainings.values()]
    executions += [result.execution for result in run.results.values()]
    how = (f"{e.device}, {counted(e.threads, 'thread')}, engine {e.engine}" for e in executions)
    seconds = duration(sum(run.seconds.values())) + ", all processes together" if run.seconds else "unknown"
    seeds = sorted({cell.training.seed for cell in run.cells})
    notes = {t.spec.task.data: f.message for t in run.trainings.values() for f in t.flags if f.code == "data"}
    data = [f"{name}: {notes[name]}" if name in notes else name for name in sorted(run.data_hashes)]
    versions = gathered(item for one in environments for item in (*one.packages.items(), *one.numerics.items()))
    packages = [(name, _distinct(found, " / ")) for name, found in sorted(versions.items())]
    trainings = [
        (analysis.defenses[record.spec.defense.key].text, str(record.spec.seed), identity, record.digest)
        for identity, record in run.trainings.items()
        if record.spec.defense.key in analysis.defenses
    ]
    hashes = sorted(run.data_hashes.items())
    columns = (Column(name, "mono") for name in ("Seed", "Training", "Digest"))
    facts = (
        ("Study", f"{run.name}, hash {run.study_hash}"),
        ("Commit", _distinct((f"{e.commit}, {'dirty' if e.dirty else 'clean'} checkout" for e in environments), "; ")),
        ("Python", _distinct((e.python for e in environments), " / ")),
        ("Machine", _distinct((e.machine for e in environments), "; ")),
        ("Vector instructions", _distinct((one.get(VECTORS, "unknown") for one in run.numerics), " / ")),
        ("Execution", _distinct(how, "; ")),
        ("Seeds", ", ".join(map(str, seeds)) or "none"),
        ("Data", "; ".join(data) or "none"),
        ("Computing time", seconds),
    )
    cautions = [f"{text[0].upper()}{text[1:]}." for text in [several(run.numerics)] if text]
    if any(environment.dirty for environment in environments):
        cautions.append("The checkout differed from its commit: these commands may not reproduce the numbers.")
    elif len(environments) > 1 and not cautions:
        cautions.append("The results come from several environments: they agree within tolerances, not byte for byte.")
    return {
        "facts": facts,
        "packages": Table("Packages and arithmetic behind the numbers", ("Name", "Version or value"), tuple(packages)),
        "data": Table("Hashes of the data sets", ("Data set", Column("Hash", "mono")), tuple(hashes)),
        "trainings": Table("Trainings", ("Defense", *columns), tuple(trainings)),
        "study": _study(run.study),
        "commands": _commands(run, environments),
        "caution": " ".join(cautions),
        "text": str(run.study.get("text", "")),
    }


def _tables(analysis: Analysis) -> list[Table]:
    shown = provenance(analysis)
    facts = Table("Provenance", ("Fact", Column("Value", "text")), shown["facts"])
    return [facts, *(shown[key] for key in ("packages", "data", "trainings"))]


SECTION = Section("provenance", "Provenance", "Provenance", provenance, 100, tables=_tables)
