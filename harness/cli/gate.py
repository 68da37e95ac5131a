"""The commands of the gate: `gate`, `check`, and `baseline` with `make`, `update`, `acknowledge`, `show`, `diff`."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from leakgauge.harness.cli import options as cli
from leakgauge.harness.cli.run import run
from leakgauge.harness.core.sinks import clipped, emit, say, spelled

if TYPE_CHECKING:
    from leakgauge.harness.gate.baseline import Baseline
    from leakgauge.harness.gate.judge import Outcome
    from leakgauge.harness.gate.measure import Measured
    from leakgauge.harness.gate.rerun import Bench
    from leakgauge.harness.gate.target import Trusted

BaselineArgument = Annotated[Path, Argument(help="A baseline.")]
InconclusiveOption = Annotated[Literal["warn", "fail"], Option(help="An inconclusive check: a warning, or exit 3.")]
SummaryOption = Annotated[str | None, Option(metavar="FILE|auto", help="Write Markdown; auto: to GITHUB_STEP_SUMMARY.")]
BaselineOption = Annotated[Path, Option(help="The file that 'leakgauge baseline make' wrote.")]
FileOption = Annotated[Path | None, Option("--baseline", help="The file; default: baselines/STUDY.json.")]
IncreaseOption = Annotated[list[str] | None, Option(help="An accepted increase, or a pattern; repeatable.")]
TargetOption = Annotated[str | None, Option(help="Branch whose baseline counts; default: CI's, or origin/main.")]
AcceptOption = Annotated[str | None, Option(metavar="REASON", help="Judge by this checkout's baseline and rules.")]
JunitOption = Annotated[Path | None, Option(help="Write JUnit XML to this file.")]
ToJsonOption = Annotated[Path | None, Option("--json", help="Write JSON to this file.")]
AnnotationsOption = Annotated[Literal["auto", "off"], Option(help="auto: GitHub annotations in a GitHub workflow.")]


def gate(
    study: cli.StudyArgument,
    baseline: BaselineOption,
    out: Annotated[Path, Option("-o", "--out", help="Folder of the new results.")],
    target: TargetOption = None,
    accept_baseline: AcceptOption = None,
    inconclusive: InconclusiveOption = "warn",
    junit: JunitOption = None,
    summary: SummaryOption = None,
    to_json: ToJsonOption = None,
    annotations: AnnotationsOption = "auto",
    data: cli.DataOption = None,
    workers: cli.WorkersOption = None,
    draw: Annotated[int | None, Option(min=0, help="The number that a replay draws from; default a new one.")] = None,
    allow_code: cli.AllowCodeOption = False,
) -> None:
    """Check a change of code: run what it concerns by the code before and after it, and judge the difference."""
    from leakgauge.harness.cli.progress import listener
    from leakgauge.harness.core.code import code_allowed
    from leakgauge.harness.gate.baseline import read
    from leakgauge.harness.gate.mechanism import gate as judged
    from leakgauge.harness.gate.replay import by_code_of
    from leakgauge.harness.gate.rerun import Bench
    from leakgauge.harness.gate.target import trusted

    with cli.computed_anew(), cli.user_errors(cli.NOT_COMPARABLE):
        held, own = trusted(baseline, target, accept_baseline), read(baseline)
        if held.merge is not None and (code := by_code_of(held.merge, sys.argv[1:])) is not None:
            raise typer.Exit(code)
        bench = Bench(out, data, workers, code_allowed(allow_code))
        with listener(study) as listen:
            now, outcome = judged(study, held, own, bench, secrets.randbelow(2**40) if draw is None else draw, listen)
        refused, warnings = (*held.unaccepted, *outcome.unaccepted), (*held.warnings, *outcome.warnings)
        if accept_baseline:
            warnings, refused = (*warnings, *(f"accepted ({accept_baseline}): {text}" for text in refused)), ()
        outcome = replace(outcome, unaccepted=refused, warnings=warnings)
        raise _published(outcome, now, held.baseline, baseline, inconclusive, (junit, to_json, summary, annotations))


def check(
    folder: cli.FolderArgument,
    baseline: BaselineOption,
    target: TargetOption = None,
    accept_baseline: AcceptOption = None,
    rerun_base: Annotated[bool, Option("--rerun-base", help="Rerun the baseline by the target's code.")] = False,
    inconclusive: InconclusiveOption = "warn",
    junit: JunitOption = None,
    summary: SummaryOption = None,
    to_json: ToJsonOption = None,
    annotations: AnnotationsOption = "auto",
    data: cli.DataOption = None,
    workers: cli.WorkersOption = None,
    no_rerun: Annotated[bool, Option("--no-rerun", help="Do not rerun inconclusive checks.")] = False,
    allow_code: cli.AllowCodeOption = False,
) -> None:
    """Check a finished run against a baseline."""
    from leakgauge.harness.core.code import code_allowed, import_from
    from leakgauge.harness.gate.measure import measured
    from leakgauge.harness.gate.rerun import Bench
    from leakgauge.harness.gate.target import trusted
    from leakgauge.harness.study.store import load_run

    with cli.computed_anew(), cli.user_errors(cli.NOT_COMPARABLE):
        if code_allowed(allow_code):
            import_from(Path.cwd())
        now, held = measured(load_run(folder)), trusted(baseline, target, accept_baseline)
        bench = Bench(folder, data, workers, allow_code)
        base, outcome = _judged(now, held, bench, rerun_base=rerun_base, rerun=not no_rerun)
        raise _published(outcome, now, base, baseline, inconclusive, (junit, to_json, summary, annotations))


Files = tuple[Path | None, Path | None, str | None, str]
"""The values of `--junit`, `--json`, `--summary` and `--annotations`."""


def _published(outcome: Outcome, now: Measured, base: Baseline, path: Path, inconclusive: str, to: Files) -> typer.Exit:
    """Print the outcome, write the requested files, and return the exit."""
    from leakgauge.harness.gate import output

    fails, (junit, to_json, summary, annotations) = inconclusive == "fail", to
    say(*output.lines(outcome, now))
    if junit is not None:
        _write(junit, output.junit(outcome, now))
    if to_json is not None:
        _write(to_json, output.as_json(outcome, now, base, inconclusive_fails=fails))
    page = os.environ.get("GITHUB_STEP_SUMMARY") if summary == "auto" else summary
    if page:
        _write(Path(page), output.summary(outcome, now, base), append=summary == "auto")
    if annotations == "auto" and os.environ.get("GITHUB_ACTIONS") == "true":
        emit("".join(f"{line}\n" for line in output.annotations(outcome)))
    known = f", with {len(base.gaps)} accepted gaps" if base.gaps else ""
    say(f"leakgauge: {output.headline(outcome)}, against {path}{known}{output.first(outcome)}")
    return typer.Exit(outcome.exit_code(inconclusive_fails=fails))


def make(
    study: cli.StudyArgument,
    reason: Annotated[str, Option(help="Why these numbers are accepted; stored in the file.")],
    baseline: FileOption = None,
    out: Annotated[Path | None, Option("-o", "--out", help="Folder of the results; default: runs/STUDY.")] = None,
    accept_increase: IncreaseOption = None,
    data: cli.DataOption = None,
    workers: cli.WorkersOption = None,
    allow_code: cli.AllowCodeOption = False,
) -> None:
    """Run a study and make it the baseline; the same command resumes."""
    from leakgauge.harness.study.study import load_study

    _check_update(reason)
    with cli.user_errors():
        name = load_study(study, allow_code=allow_code).name
    path = baseline or _default_path(name)
    folder = out or Path("runs") / name
    run(study, folder, data=data, workers=workers, allow_code=allow_code)
    update(folder, reason, path, accept_increase)


def acknowledge(
    file: BaselineArgument,
    reason: Annotated[str, Option(help="Why the behavior of the code changed; stored in the file.")],
    target: TargetOption = None,
) -> None:
    """Record in a baseline that the changed files of code are meant to behave in another way; 'gate' judges how."""
    from leakgauge.harness.gate.baseline import read, write
    from leakgauge.harness.gate.changes import changes_since
    from leakgauge.harness.gate.target import merge_base

    _check_update(reason)
    with cli.user_errors(cli.NOT_COMPARABLE):
        before, merge = read(file), merge_base(target)
        if merge is None:
            raise cli.refusal(cli.USAGE, "no git repository with a target branch and its history; give --target")
        changes = changes_since(merge)
        digests = changes.digests | changes.others
        write(replace(before, acknowledged=before.acknowledged | digests, reason=reason.strip()), file)
    say(*(f"leakgauge: {clipped(name)}" for name in digests or ["nothing changed"]))
    say(f"leakgauge: wrote {file}: {len(digests)} changed files acknowledged")


def update(
    folder: cli.FolderArgument,
    reason: Annotated[str, Option(help="Why these numbers are accepted; stored in the file.")],
    baseline: FileOption = None,
    accept_increase: IncreaseOption = None,
    allow_gaps: Annotated[list[str] | None, Option(metavar="KEY", help="A known gap or pattern; repeatable.")] = None,
) -> None:
    """Make a run the baseline. Each increase over the previous baseline must be accepted by its key."""
    from leakgauge.harness.gate.baseline import Baseline, read, write
    from leakgauge.harness.gate.compare import rows
    from leakgauge.harness.gate.judge import Outcome, Rules, judge
    from leakgauge.harness.gate.measure import measured
    from leakgauge.harness.gate.output import moved
    from leakgauge.harness.study.store import load_run

    _check_update(reason)
    with cli.user_errors(cli.NOT_COMPARABLE):
        now = measured(load_run(folder))
        gaps = _check_complete(now, allow_gaps or [])
        path = baseline if baseline is not None else _default_path(now.study)
        before, outcome = read(path) if path.exists() else None, Outcome((), (), ())
        if before is not None:
            outcome = judge(now, before.measured, Rules(), gaps=before.gaps)
            say(*moved(rows(before.measured, now)))
            notes = [f"nothing could be compared: {problem}" for problem in outcome.problems]
            notes += [f"warning: {warning}" for warning in outcome.warnings]
            say(*(f"leakgauge: {note}" for note in notes), err=True)
        _check_accepted(outcome, accept_increase or [])
        write(Baseline(now, reason.strip(), gaps, {} if before is None else before.acknowledged), path)
    previous = "the first" if before is None else f"before: {before.reason}"
    dirty = ", made with uncommitted changes" if now.dirty else ""
    known = f", gaps: {', '.join(gaps)}" if gaps else ""
    say(f"leakgauge: wrote {path}: {len(now.measures)} measures of {now.study}{dirty} ({previous}){known}")


def show(file: BaselineArgument, as_json: cli.JsonOption = False) -> None:
    """Show the contents of a baseline."""
    from leakgauge.harness.gate.baseline import read, to_text
    from leakgauge.harness.gate.output import described

    with cli.user_errors(cli.NOT_COMPARABLE):
        held = read(file)
    if as_json:
        emit(spelled(to_text(held)))
    else:
        say(*described(held))


def diff(
    old: BaselineArgument,
    new: Annotated[Path, Argument(help="A later baseline.")],
    as_json: cli.JsonOption = False,
) -> None:
    """Show which measures of two baselines moved, appeared or vanished. Never fails the build."""
    from leakgauge.harness.core.numerics import unlike
    from leakgauge.harness.gate.baseline import read
    from leakgauge.harness.gate.compare import provenance, rows
    from leakgauge.harness.gate.output import moved, moves

    with cli.user_errors(cli.NOT_COMPARABLE):
        before, after = read(old), read(new)
    found = rows(before.measured, after.measured)
    if as_json:
        cli.print_json(moves(found))
        return
    say(f"{old} ({before.reason}) -> {new} ({after.reason})")
    runs = {"the old baseline was": before.measured.numerics, "the new one was": after.measured.numerics}
    say(*filter(None, [unlike(runs)]), *provenance(before.measured, after.measured), *moved(found))


def _judged(now: Measured, held: Trusted, bench: Bench, *, rerun_base: bool, rerun: bool) -> tuple[Baseline, Outcome]:
    from leakgauge.harness.gate.judge import Outcome, judge
    from leakgauge.harness.gate.rerun import about_code, again, at_commit

    base = held.baseline
    if elsewhere := about_code(now, bench):
        return base, Outcome((), elsewhere, held.warnings, held.unaccepted)
    if rerun_base:
        if held.base is None:
            raise cli.refusal(cli.USAGE, "--rerun-base: no commit of the target branch is known to rerun")
        base = replace(base, measured=at_commit(held.base, bench, base.measured))
    outcome = judge(now, base.measured, held.rules, gaps=base.gaps)
    if rerun:
        outcome = again(outcome, held.base, bench, held.rules)
    return base, replace(outcome, unaccepted=held.unaccepted, warnings=(*held.warnings, *outcome.warnings))


def _check_update(reason: str) -> None:
    if os.environ.get("CI", "").strip().lower() not in ("", "0", "false"):
        raise cli.refusal(cli.USAGE, "CI is set: a person updates a baseline, in a commit that others review")
    if not reason.strip() or not reason.isprintable():
        raise cli.refusal(cli.USAGE, f"expected --reason with one line of text, got {reason!r}")


def _unaccepted(option: str, what: str, keys: Iterable[str], patterns: list[str]) -> list[str]:
    """The keys that no pattern matches; refuses a pattern that matches no key."""
    keys = list(keys)
    for pattern in patterns:
        if not any(fnmatchcase(key, pattern) for key in keys):
            known = f"{what}s: {', '.join(keys) or 'none'}"
            raise cli.refusal(cli.USAGE, f"{option} {pattern!r} matches no {what}; {known}")
    return [key for key in keys if not any(fnmatchcase(key, pattern) for pattern in patterns)]


def _check_complete(now: Measured, allowed: list[str]) -> tuple[str, ...]:
    lacking = {measure.key: measure.problem for measure in now.measures if measure.problem}
    if left := _unaccepted("--allow-gaps", "gap", lacking, allowed):
        head = "this run is incomplete, nothing was written; accept each gap with --allow-gaps KEY:"
        raise cli.refusal(cli.INCOMPLETE, head, *(f"{key}: {lacking[key]}" for key in left))
    return tuple(lacking)


def _default_path(study: str) -> Path:
    if Path(study).name != study or not study.isprintable():
        raise cli.refusal(cli.USAGE, f"the study name {study!r} is not a file name; give --baseline FILE")
    return Path("baselines") / f"{study}.json"


def _check_accepted(outcome: Outcome, accepted: list[str]) -> None:
    from leakgauge.harness.gate.judge import Verdict
    from leakgauge.harness.gate.output import headline

    rises = {check.key: check.reason for check in outcome.checks if check.verdict is Verdict.FAIL}
    if left := _unaccepted("--accept-increase", "increase", rises, accepted):
        head = f"{headline(outcome)}; nothing was written; accept each with --accept-increase KEY"
        raise cli.refusal(cli.INCREASED, head, *(f"  {key}: {rises[key]}" for key in left))


def _write(path: Path, text: str, *, append: bool = False) -> None:
    """Write a text file that other users of the machine may read."""
    from leakgauge.harness.study.store import StoreError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
