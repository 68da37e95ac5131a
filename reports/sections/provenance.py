"""Where the numbers come from, and how to make them again."""

from __future__ import annotations

import json
import shlex
from typing import NamedTuple

from leakgauge.harness.core.result import Environment, Execution, Run
from leakgauge.reports.sections.verdict import environments
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.notation import duration, plural

LONGEST_STUDY = 100_000
"""Characters of the resolved study; the list of cells is left out above, as all results has it."""


class Provenance(NamedTuple):
    """The section: facts as (name, value), package versions, digests, the commands, and the study as it was written."""

    facts: tuple[tuple[str, str], ...]
    packages: tuple[tuple[str, str], ...]
    data: tuple[tuple[str, str], ...]
    trainings: tuple[tuple[str, str, str, str], ...]
    study: str
    commands: tuple[str, ...]
    caution: str
    text: str


def _commits(found: tuple[Environment, ...]) -> str:
    """The commits, each clean or dirty."""
    return (
        "; ".join(dict.fromkeys(f"{e.commit}, {'dirty' if e.dirty else 'clean'} checkout" for e in found)) or "unknown"
    )


def _study(study: dict[str, object]) -> str:
    """The study as JSON, without the text that it was written as, and without its cells where these are many."""
    study = {key: value for key, value in study.items() if key != "text"}
    text = json.dumps(study, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    if len(text) <= LONGEST_STUDY:
        return text
    kept = {key: value for key, value in study.items() if key != "cells"}
    kept["cells"] = "left out here for their length; all results lists them"
    return json.dumps(kept, indent=2, ensure_ascii=False, allow_nan=False, default=str)[:LONGEST_STUDY]


def _commands(run: Run, found: tuple[Environment, ...]) -> tuple[str, ...]:
    """Three lines that make the report again; study.toml lies in the folder of the results, and is on this page."""
    name = "study.toml" if run.study.get("text") else run.name
    commit = found[0].commit if found else "COMMIT"
    first = f"pip install leakgauge  # {commit}" if commit.startswith("release") else f"git checkout {commit}"
    return first, f"leakgauge run {shlex.quote(name)} -o results", "leakgauge report results"


def _packages(found: tuple[Environment, ...]) -> tuple[tuple[str, str], ...]:
    """The versions of each package, several where machines differed."""
    versions: dict[str, dict[str, None]] = {}
    for environment in found:
        for name, version in environment.packages.items():
            versions.setdefault(name, {})[version] = None
    return tuple((name, " / ".join(several)) for name, several in sorted(versions.items()))


def provenance(analysis: Analysis) -> Provenance:
    """All that is known of the run."""
    run, found = analysis.run, environments(analysis)
    executions: list[Execution] = [t.execution for t in run.trainings.values()] + [
        r.execution for r in run.results.values()
    ]
    how = dict.fromkeys(f"{e.device}, {plural(e.threads, 'thread')}, engine {e.engine}" for e in executions)
    seeds = sorted({cell.training.seed for cell in run.cells})
    facts = (
        ("Study", f"{run.name}, hash {run.study_hash}"),
        ("Commit", _commits(found)),
        ("Python", " / ".join(dict.fromkeys(e.python for e in found)) or "unknown"),
        ("Machine", "; ".join(dict.fromkeys(e.machine for e in found)) or "unknown"),
        ("Execution", "; ".join(how) or "unknown"),
        ("Seeds", ", ".join(map(str, seeds)) or "none"),
        ("Computing time", duration(sum(run.seconds.values())) + " over all processes" if run.seconds else "unknown"),
    )
    trainings = tuple(
        (analysis.defenses[t.spec.defense.label].text, str(t.spec.seed), identity, t.digest)
        for identity, t in run.trainings.items()
        if t.spec.defense.label in analysis.defenses
    )
    caution = ""
    if any(environment.dirty for environment in found):
        caution = "The checkout differed from its commit: these lines may not make the same numbers."
    elif len(found) > 1:
        caution = "The results come from several environments: they agree within tolerances, not byte for byte."
    data = tuple(sorted(run.data_hashes.items()))
    return Provenance(
        facts,
        _packages(found),
        data,
        trainings,
        _study(run.study),
        _commands(run, found),
        caution,
        str(run.study.get("text", "")),
    )
