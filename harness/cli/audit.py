"""The commands `claim` and `audit`: claimed epsilon, proved epsilon, and a measured lower bound of a defense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from leakgauge.harness.cli import options as cli
from leakgauge.harness.core.code import import_from, named_code
from leakgauge.harness.core.sinks import say

if TYPE_CHECKING:
    from leakgauge.harness.core.answer import Answer, DefenseRecord
    from leakgauge.harness.core.cell import TrainingSpec
    from leakgauge.harness.core.result import TrainingRecord


def _seconds(text: str) -> float:
    unit = 60.0 if text.endswith("m") else 1.0
    try:
        return unit * float(text.removesuffix("m").removesuffix("s"))
    except ValueError:
        raise typer.BadParameter(f"got {text!r}, expected a time such as 30s or 2m") from None


def claim(
    defense: cli.DefenseArgument,
    set_: cli.SetOption = None,
    rounds: Annotated[int | None, Option(help="Rounds that the claim covers.")] = None,
    delta: Annotated[float | None, Option(help="Delta of the proved epsilon; default: the delta of the claim.")] = None,
    setting: cli.SettingOption = None,
    as_json: cli.JsonOption = False,
) -> None:
    """Show the epsilon that a defense claims, the epsilon that is proved, and the verdict."""
    from leakgauge.harness.cli.known import known
    from leakgauge.harness.core.answer import DefenseRecord
    from leakgauge.harness.core.stored import from_data, to_data
    from leakgauge.harness.study.environment import shipped

    def computed() -> DefenseRecord:
        from leakgauge.harness.audit import claims

        with cli.user_errors():
            tables = claims.assignments(set_ or [], "--set"), claims.assignments(setting or [], "--setting")
            return claims.claim(defense, *tables, rounds, delta).record

    if named_code([defense]):
        import_from(Path.cwd())
    if shipped("defense", defense):
        asked = ["claim", defense, set_, setting, rounds, delta]
        _print(from_data(DefenseRecord, known(asked, lambda: to_data(computed()))), as_json)
    else:
        _print(computed(), as_json)


def audit(
    defense: Annotated[str | None, Argument(help=cli.DEFENSE_HELP, metavar="DEFENSE")] = None,
    set_: cli.SetOption = None,
    by: Annotated[str, Option(help="trials, messages, one-run (canaries), cosine (estimate).")] = "trials",
    rounds: Annotated[int | None, Option(help="Rounds of a trial, or of the training.")] = None,
    trials: Annotated[int | None, Option(help="Trials with each input; default: 1000 to 3000.")] = None,
    budget: Annotated[float | None, Option(parser=_seconds, metavar="TIME", help="Trials within 30s or 2m.")] = None,
    confidence: Annotated[float | None, Option(help="Confidence of the lower bound; default: 0.95.")] = None,
    threat: Annotated[str | None, Option(help="The adversary; default: the one in the claim that sees most.")] = None,
    device: Annotated[str | None, Option(help="Where training and likelihoods run: cpu (default) or cuda.")] = None,
    setting: cli.SettingOption = None,
    scores: Annotated[Path | None, Option(help="Your canaries' scores: CSV or npz, columns score and in.")] = None,
    delta: Annotated[float | None, Option(help="Delta of the bound from --scores; default: 1e-5.")] = None,
    study: Annotated[str | None, Option(help="The defenses of this study (file or name), at its size.")] = None,
    only: Annotated[list[str] | None, Option(help="With --study: this defense alone; repeatable.")] = None,
    data: cli.DataOption = None,
    allow_code: cli.AllowCodeOption = False,
    seed: Annotated[int, Option(help="Seed of every random draw.")] = 0,
    as_json: cli.JsonOption = False,
) -> None:
    """Audit a defense: show a measured lower bound of epsilon beside the claimed and the proved epsilon."""
    own, measured = (set_, rounds, setting), (trials, budget, threat, device)
    if sum(value is not None for value in (defense, scores, study)) != 1:
        raise typer.BadParameter("expected one of a defense, --scores FILE and --study FILE")
    if study is None and (only or data):
        raise typer.BadParameter("--only and --data are for --study")
    if scores is not None:
        if by != "trials" or any(value is not None for value in (*own, *measured)):
            raise typer.BadParameter("--scores has no federation: it takes --delta, --confidence and --json only")
        _print_scores(scores, 1e-5 if delta is None else delta, 0.95 if confidence is None else confidence, as_json)
        return
    if delta is not None:
        raise typer.BadParameter("--delta is for --scores; the delta of a defense is that of its claim")
    from leakgauge.harness.audit.claims import assignments
    from leakgauge.harness.audit.standalone import audit as audited

    audited = partial(
        audited, trials=trials, budget=budget, confidence=confidence, threat=threat, device=device, seed=seed
    )
    if study is not None:
        if by != "trials" or any(value is not None for value in own):
            raise typer.BadParameter("--study states parameters, federation and rounds; it is audited by trials")
        _audit_study(audited, study, only or [], data, as_json, allow_code=allow_code)
        return
    assert defense is not None
    if named_code([defense]):
        import_from(Path.cwd())
    with cli.user_errors():
        tables = assignments(set_ or [], "--set"), assignments(setting or [], "--setting")
        found = audited(defense, *tables, rounds, by=by)
    _print(found.record, as_json)


def _audit_study(
    audited: Callable[..., Answer], source: str, only: list[str], data: Path | None, as_json: bool, *, allow_code: bool
) -> None:
    """Audit each distinct defense and federation of a study, and print each audit once it is finished."""
    from leakgauge.harness.audit.standalone import Studied
    from leakgauge.harness.cli.claim_text import claim_lines
    from leakgauge.harness.core.errors import StudyError, unknown
    from leakgauge.harness.data import default_root
    from leakgauge.harness.learn.partition import sizes
    from leakgauge.harness.study.goal import solve
    from leakgauge.harness.study.prepare import prepare
    from leakgauge.harness.study.study import load_study

    answers: dict[str, Answer] = {}
    problems, root = list[str](), data or default_root()
    with cli.user_errors():
        loaded = load_study(source, allow_code=allow_code)
        known = dict.fromkeys(spec.defense.name for spec in loaded.trainings)
        for name in only:
            if name not in known:
                raise unknown(f"defense in {loaded.name}", name, known)
        cells = tuple(cell for cell in loaded.cells if not only or cell.training.defense.name in only)
        specs: dict[str, TrainingSpec] = {}  # the first seed of each task, federation and defense
        for cell in solve(cells, root, _untrained)[0]:
            specs.setdefault(replace(cell.training.honest, seed=0, audit=0).id, cell.training.honest)
        for spec in specs.values():
            try:
                ready = prepare(spec, root)
                studied = Studied(ready.setting, max(sizes(ready.holdings).values()))
                asked = repr((spec.defense, studied))
                if asked not in answers:
                    answers[asked] = audited(spec.defense.name, spec.defense.parameters, {}, None, study=studied)
                    if not as_json:
                        say(*claim_lines(answers[asked].record, loaded.name), "")
            except StudyError as error:
                problems += error.problems
        if as_json:
            cli.print_json(list(answers.values()))
        if problems:
            raise StudyError(loaded.name, problems)


def _untrained(trainings: list[TrainingSpec]) -> dict[str, TrainingRecord]:
    """No records of trainings, because an audit of a study trains nothing."""
    from leakgauge.harness.core.errors import StudyError

    for spec in trainings:
        raise StudyError(spec.defense.name, ["its goal is solved by trainings; expected --only of the other defenses"])
    return {}


def _print_scores(path: Path, delta: float, confidence: float, as_json: bool) -> None:
    from leakgauge.harness.audit.scores import audit_scores, lines_of
    from leakgauge.harness.core.stored import VERSION, to_data

    with cli.user_errors():
        record = audit_scores(path, delta, confidence)
    if as_json:
        cli.print_json({"version": VERSION, "audited": to_data(record)})
    else:
        say(*lines_of(record, path))


def _print(record: DefenseRecord, as_json: bool) -> None:
    from leakgauge.harness.cli.claim_text import claim_lines

    if as_json:
        cli.print_json(record.answer())
    else:
        say(*claim_lines(record))
