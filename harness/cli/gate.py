"""The commands of the gate: `check`, and `baseline` with `update`, `show` and `diff`. Heavy imports happen inside them.

Exit codes: 0 no increase detected, 1 leakage increased, 2 wrong call, no results, or a bug of ours, 3 inconclusive
where that fails, 4 not comparable or no baseline, 5 a gated cell failed or is missing, 130 interrupted.
"""

from __future__ import annotations

import json
import math
import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from leakgauge.harness.gate.baseline import Baseline, Move
    from leakgauge.harness.gate.judge import Check, Outcome
    from leakgauge.harness.gate.measure import Measured

gate = typer.Typer()
baselines = typer.Typer(name="baseline", help="The numbers that 'check' compares with.", no_args_is_help=True)
gate.add_typer(baselines)

INCREASED, USAGE, NOT_COMPARABLE, INCOMPLETE, INTERRUPTED = 1, 2, 4, 5, 130

FolderArgument = Annotated[Path, typer.Argument(help="Folder of results that 'leakgauge run' made.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Inconclusive(StrEnum):
    """What becomes of a run of which some checks cannot tell."""

    warn = "warn"
    fail = "fail"


class Annotations(StrEnum):
    """Whether lines for a job page are printed."""

    auto = "auto"
    off = "off"


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what goes wrong into lines on standard error and an exit code; Python's own, 1, would say that it leaks."""
    from leakgauge.harness.core.errors import StudyError
    from leakgauge.harness.gate.baseline import BaselineError
    from leakgauge.harness.study.store import StoreError
    from leakgauge.harness.study.supervisor import Interrupted

    try:
        yield
    except (StudyError, StoreError) as error:
        raise _exit(USAGE, *str(error).splitlines()) from error
    except BaselineError as error:
        raise _exit(NOT_COMPARABLE, str(error)) from error
    except (Interrupted, KeyboardInterrupt) as error:
        raise _exit(INTERRUPTED, "stopped") from error
    except typer.Exit:
        raise
    except Exception as error:
        raise _exit(USAGE, "a bug; please report it:", *traceback.format_exc().splitlines()) from error


def _exit(code: int, *lines: str) -> typer.Exit:
    """The exit with this code, its reason on standard error."""
    for line in lines:
        typer.echo(f"leakgauge: {line}", err=True)
    return typer.Exit(code)


@gate.command()
def check(
    folder: FolderArgument,
    baseline: Annotated[Path, typer.Option(help="The file that 'leakgauge baseline update' made.")],
    rerun_base: Annotated[
        str | None, typer.Option(metavar="REF", help="Commit of the baseline, to run it again in this job.")
    ] = None,
    inconclusive: Annotated[
        Inconclusive, typer.Option(help="Of checks that cannot tell: warn and exit 0, or exit 3.")
    ] = Inconclusive.warn,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.")] = None,
    summary: Annotated[
        str | None,
        typer.Option(metavar="FILE|auto", help="Write Markdown to this file; auto: append to GITHUB_STEP_SUMMARY."),
    ] = None,
    to_json: Annotated[Path | None, typer.Option("--json", help="Write JSON to this file.")] = None,
    annotations: Annotated[
        Annotations, typer.Option(help="auto: print GitHub's annotations in a workflow of GitHub.")
    ] = Annotations.auto,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the data sets, for runs again; default LEAKGAUGE_DATA or ~/.cache/leakgauge."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes of runs again; default one a core.")] = None,
    no_rerun: Annotated[bool, typer.Option("--no-rerun", help="Do not run inconclusive cells again.")] = False,
) -> None:
    """Compare a run with a baseline. Exit code 0: no increase detected; 1: leakage increased."""
    from leakgauge.harness.gate.baseline import read
    from leakgauge.harness.gate.judge import Rules, judge
    from leakgauge.harness.gate.measure import measured
    from leakgauge.harness.gate.output import headline, titles
    from leakgauge.harness.gate.rerun import Bench, about_checkout, again, at_commit, base_commit
    from leakgauge.harness.study.store import load_run

    fails = inconclusive is Inconclusive.fail
    with _refusals():
        now = measured(load_run(folder))
        base = read(baseline)
        bench = Bench(folder, data, workers)
        if rerun_base is not None:
            base = replace(base, measured=at_commit(rerun_base, bench))
        outcome = judge(now, base.measured, Rules(), noise_sd=base.noise_sd)
        if not no_rerun:
            ref = rerun_base or base_commit(base.measured.commit, baseline, bench)
            outcome = again(outcome, ref, bench, Rules(), noise_sd=base.noise_sd)
        outcome = replace(outcome, warnings=(*about_checkout(now), *outcome.warnings))
        for line in _table(outcome, titles(now.measures)):
            typer.echo(line)
        _write_outputs(outcome, now, base, junit, summary, to_json, fails)
        if annotations is Annotations.auto:
            _annotate(outcome)
        typer.echo(f"leakgauge: {headline(outcome)}, against {baseline}{_first(outcome)}")
    raise typer.Exit(outcome.exit_code(inconclusive_fails=fails))


@baselines.command()
def update(
    folder: FolderArgument,
    reason: Annotated[str, typer.Option(help="Why these numbers are accepted; it is kept in the file.")],
    baseline: Annotated[Path | None, typer.Option(help="The file; default baselines/STUDY.json.")] = None,
    accept_increase: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="An increase that is accepted, or a pattern as 'gaussian/*'; may be repeated."
        ),
    ] = None,
    noise_sd: Annotated[
        float | None,
        typer.Option(min=0, help="Standard deviation of an image's SSIM over repeated runs; default 0.012."),
    ] = None,
) -> None:
    """Make a run the baseline. Each increase over the one before must be accepted by its key."""
    from leakgauge.harness.gate.baseline import NOISE_SD, Baseline, read, write
    from leakgauge.harness.gate.judge import Rules, judge
    from leakgauge.harness.gate.measure import measured
    from leakgauge.harness.study.store import load_run

    _check_update(reason, noise_sd)
    with _refusals():
        now = measured(load_run(folder))
        _check_complete(now)
        path = baseline if baseline is not None else _default_path(now.study)
        before = read(path) if path.exists() else None
        outcome = None
        if before is not None:
            outcome = judge(now, before.measured, Rules(), noise_sd=before.noise_sd)
            _print_compared(before.measured, now, outcome)
        _check_accepted(outcome, accept_increase or [])
        write(Baseline(now, NOISE_SD if noise_sd is None else noise_sd, reason.strip()), path)
    was = "the first" if before is None else f"before: {before.reason}"
    dirty = ", made with uncommitted changes" if now.dirty else ""
    typer.echo(f"leakgauge: wrote {path}: {len(now.measures)} measures of {now.study}{dirty} ({was})")


@baselines.command()
def show(
    file: Annotated[Path, typer.Argument(help="A baseline.")],
    as_json: JsonOption = False,
) -> None:
    """Show what a baseline holds."""
    from leakgauge.harness.gate.baseline import read, to_text

    with _refusals():
        found = read(file)
    if as_json:
        typer.echo(to_text(found), nl=False)
        return
    for line in _shown(found):
        typer.echo(line)


@baselines.command()
def diff(
    old: Annotated[Path, typer.Argument(help="A baseline.")],
    new: Annotated[Path, typer.Argument(help="A later one.")],
    as_json: JsonOption = False,
) -> None:
    """Show which measures of two baselines moved, appeared or vanished. It informs, and judges nothing."""
    from dataclasses import asdict

    from leakgauge.harness.gate.baseline import moves, provenance, read

    with _refusals():
        before, after = read(old), read(new)
    found = moves(before.measured, after.measured)
    if as_json:
        typer.echo(json.dumps([asdict(move) for move in found], indent=1))
        return
    typer.echo(f"{old} ({before.reason}) -> {new} ({after.reason})")
    for line in [*provenance(before.measured, after.measured), *_moved(found)]:
        typer.echo(line)


def _check_update(reason: str, noise_sd: float | None) -> None:
    """Refuse an update that a machine makes, or that says nothing of itself."""
    if os.environ.get("CI", "").strip().lower() not in ("", "0", "false"):
        raise _exit(USAGE, "CI is set: a baseline is updated by a person, in a commit that others review")
    if not reason.strip() or not reason.isprintable():
        raise _exit(USAGE, f"expected --reason with a line of text, got {reason!r}")
    if noise_sd is not None and not math.isfinite(noise_sd):
        raise _exit(USAGE, f"expected --noise-sd to be finite, got {noise_sd}")


def _check_complete(now: Measured) -> None:
    """Refuse a run of which a measure has no number."""
    lacking = [f"{measure.key}: {measure.problem}" for measure in now.measures if measure.problem]
    if lacking:
        raise _exit(INCOMPLETE, "this run is not complete, nothing was written:", *lacking)


def _default_path(study: str) -> Path:
    """`baselines/STUDY.json`."""
    if Path(study).name != study or not study.isprintable():
        raise _exit(USAGE, f"the name of study {study!r} is no file name; give --baseline FILE")
    return Path("baselines") / f"{study}.json"


def _check_accepted(outcome: Outcome | None, accepted: list[str]) -> None:
    """Refuse what accepts nothing, and an increase that is not accepted."""
    from leakgauge.harness.gate.output import headline

    rises = [] if outcome is None else [one for one in outcome.checks if _rises(one)]
    for pattern in accepted:
        if not any(fnmatchcase(one.key, pattern) for one in rises):
            known = ", ".join(one.key for one in rises) or "none"
            raise _exit(USAGE, f"--accept-increase {pattern!r} matches no increase; increases: {known}")
    left = [one for one in rises if not any(fnmatchcase(one.key, pattern) for pattern in accepted)]
    if outcome is not None and left:
        lines = [f"  {one.key}: {one.reason}" for one in left]
        said = f"{headline(outcome)}; nothing was written; accept each with --accept-increase KEY"
        raise _exit(INCREASED, said, *lines)


def _rises(one: Check) -> bool:
    """Whether a check says that leakage increased."""
    from leakgauge.harness.gate.judge import Verdict

    return one.verdict is Verdict.FAIL or bool(one.images)


def _print_compared(before: Measured, now: Measured, outcome: Outcome) -> None:
    """Old and new numbers, and why nothing could be compared where that is so."""
    from leakgauge.harness.gate.baseline import moves

    for line in _moved(moves(before, now)):
        typer.echo(line)
    for problem in outcome.problems:
        typer.echo(f"leakgauge: nothing could be compared: {problem}", err=True)
    for warning in outcome.warnings:
        typer.echo(f"leakgauge: warning: {warning}", err=True)


def _write_outputs(
    outcome: Outcome,
    now: Measured,
    base: Baseline,
    junit: Path | None,
    summary: str | None,
    to_json: Path | None,
    fails: bool,
) -> None:
    """Write the files that were asked for."""
    from leakgauge.harness.gate import output as gate_output

    if junit is not None:
        _write(junit, gate_output.junit(outcome, now))
    if to_json is not None:
        _write(to_json, gate_output.as_json(outcome, now, base, inconclusive_fails=fails))
    page = os.environ.get("GITHUB_STEP_SUMMARY") if summary == "auto" else summary
    if page:
        _write(Path(page), gate_output.summary(outcome, now, base), append=summary == "auto")


def _write(path: Path, text: str, *, append: bool = False) -> None:
    """Write a text as an ordinary file, which other users of the machine may read.

    Raises:
        StoreError: it cannot be written.
    """
    from leakgauge.harness.study.store import StoreError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error


def _annotate(outcome: Outcome) -> None:
    """Print annotations where GitHub reads them."""
    from leakgauge.harness.gate.output import annotations

    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in annotations(outcome):
            typer.echo(line)


def _table(outcome: Outcome, named: dict[str, str]) -> Iterable[str]:
    """Problems and warnings, then the checks, worst first; under each that did not pass, what it is and why."""
    from leakgauge.harness.gate.judge import Verdict
    from leakgauge.harness.gate.output import change, clean, clipped, number, signed

    for problem in outcome.problems:
        yield f"not comparable: {clipped(problem)}"
    for warning in outcome.warnings:
        yield f"warning: {clipped(warning)}"
    if not outcome.checks:
        return
    rows = [("verdict", "check", "before -> now", "change (90 %)", "detectable")]
    rows += [
        (
            one.verdict.value,
            clean(one.key),
            f"{number(one.before)} -> {number(one.now)}",
            change(one.rise, one.low, one.high),
            "" if one.smallest is None else signed(one.smallest),
        )
        for one in outcome.checks
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row, one in zip(rows, (None, *outcome.checks), strict=True):
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        if one is not None and one.verdict is not Verdict.PASS:
            yield f"{'':<{widths[0]}}  {clipped(named.get(one.key, one.name))}"
            yield f"{'':<{widths[0]}}  {clipped(one.reason)}"


def _first(outcome: Outcome) -> str:
    """What to look at first; empty where nothing asks for it."""
    from leakgauge.harness.gate.judge import Verdict
    from leakgauge.harness.gate.output import clean, clipped

    if outcome.problems:
        return f": {clipped(outcome.problems[0])}"
    if not outcome.checks or outcome.verdict is Verdict.PASS:
        return ""
    return f"; first: {clean(outcome.checks[0].key)}: {clipped(outcome.checks[0].reason)}"


def _moved(found: Iterable[Move]) -> list[str]:
    """One line a measure that moved, appeared or vanished."""
    lines = []
    for move in found:
        before, after = (("n/a" if value is None else f"{value:.6g}") for value in (move.before, move.after))
        what = {"moved": f"{before} -> {after}", "appeared": f"new: {after}", "vanished": f"gone: {before}"}[move.kind]
        values = f"  ({move.differ} of {move.of} values)" if move.differ else ""
        lines.append(f"{what:<24}  {move.key}{values}")
    return lines or ["no measure moved"]


def _shown(found: Baseline) -> Iterable[str]:
    """A baseline for people."""
    from leakgauge.harness.gate.output import number

    of = found.measured
    dirty = ", with uncommitted changes" if of.dirty else ""
    yield f"{of.study}: {len(of.measures)} measures, study hash {of.study_hash}, noise sd {found.noise_sd:g}"
    yield f"reason: {found.reason}"
    yield f"made on {of.machine} at {of.commit}{dirty}"
    yield f"packages: {', '.join(f'{name} {version}' for name, version in of.packages.items())}"
    yield f"data: {', '.join(f'{name} {digest}' for name, digest in of.data.items())}"
    width = max(len(measure.key) for measure in of.measures)
    for one in of.measures:
        interval = "" if one.low is None or one.high is None else f"[{number(one.low)}, {number(one.high)}]"
        mark = one.control or ("aware" if one.aware else "")
        yield f"{one.key:<{width}}  {number(one.value):>8}  {interval:<16}  n = {one.n:<5}  {mark}".rstrip()
