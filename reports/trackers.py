"""Results for an experiment tracker, W&B or MLflow: one run of it for each training, and one for each attack on it.

Where they go, the tracker reads from its own settings, such as WANDB_MODE or MLFLOW_TRACKING_URI.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.result import Run
from leakgauge.harness.core.rows import Row, rows

_QUESTION = ("data", "model", "algorithm", "clients", "rounds", "defense", "server", "attack", "adversary", "target")


class Entry(NamedTuple):
    """A training, or an attack on one.

    Attributes:
        identity, name: its id, and its question in short.
        question: the fields of the question, and `seed`.
        final: each number by its quantity, horizon and unit, with `_low`, `_high` and `_n` where they are known.
        by_round: the numbers of each round.
    """

    identity: str
    name: str
    question: dict[str, Any]
    final: dict[str, float]
    by_round: dict[int, dict[str, float]]


def entries(run: Run) -> Iterator[Entry]:
    """The rows of `core.rows`, by training and by cell."""
    alike = gathered((row.get("cell") or row["training"], row) for row in rows(run))
    for identity, group in alike.items():
        question = {name: group[0][name] for name in (*_QUESTION, "seed") if group[0].get(name) is not None}
        name = " under ".join(str(question[part]) for part in ("defense", "attack") if part in question)
        known, used = [row for row in group if row.get("value") is not None], Counter[str]()
        by_round = dict[int, dict[str, float]]()
        final = dict[str, float]()
        for row in known:
            if "round" in row:
                by_round.setdefault(row["round"], {})[row["quantity"]] = float(row["value"])
            else:
                final |= _numbers(row, used)
        yield Entry(identity, f"{name}, seed {question['seed']}", question, final, dict(sorted(by_round.items())))


def _numbers(row: Row, used: Counter[str]) -> dict[str, float]:
    key = "/".join(filter(None, (row["quantity"], row.get("horizon"), row.get("privacy_unit"))))
    key = re.sub(r"[^\w./ -]", "_", key)  # what MLflow takes
    used[key] += 1
    key += f"/{used[key]}" if used[key] > 1 else ""
    ends = {f"{key}_{end}": row[end] for end in ("low", "high", "n") if row.get(end) is not None}
    return {key: float(row["value"]), **{name: float(value) for name, value in ends.items()}}


def send(to: Literal["wandb", "mlflow"], run: Run) -> int:
    """Write all entries of a run to a project of W&B, or to an experiment of MLflow, of the study's name.

    W&B writes over an earlier entry of the same id; MLflow adds one, with the id as its tag `leakgauge`.

    Returns:
        The number of entries.

    Raises:
        ImportError: the tracker is not installed.
    """
    try:
        tracker = importlib.import_module(to)
    except ImportError as error:
        raise ImportError(f"{to} is not installed: from a checkout, pip install '.[{to}]'") from error
    made, project = list(entries(run)), re.sub(r"[^\w. +-]", "_", run.name)
    if to == "mlflow":
        tracker.set_experiment(project)
    for one in made:
        (_to_wandb if to == "wandb" else _to_mlflow)(tracker, project, one)
    return len(made)


def _to_wandb(wandb: Any, project: str, one: Entry) -> None:
    about = {"name": one.name, "config": one.question, "id": one.identity, "resume": "allow"}
    with wandb.init(project=project, job_type="attack" if "attack" in one.question else "training", **about) as logged:
        for round_, numbers in one.by_round.items():
            logged.log(numbers, step=round_)
        logged.summary.update(one.final)


def _to_mlflow(mlflow: Any, project: str, one: Entry) -> None:
    with mlflow.start_run(run_name=one.name, tags={"leakgauge": one.identity}):
        mlflow.log_params(one.question)
        for round_, numbers in one.by_round.items():
            mlflow.log_metrics(numbers, step=round_)
        mlflow.log_metrics(one.final)
