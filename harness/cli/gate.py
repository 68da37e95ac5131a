"""The commands of the gate: `gate`, `check`, and `baseline` with `update`, `acknowledge`, `show` and `diff`.

Exit codes: 0 no increase detected, 1 leakage increased, 2 invalid arguments or no results, 3 inconclusive with
`--inconclusive fail`, 4 not comparable or no baseline, 5 a gated cell failed or is missing, 6 an unaccepted change of
the baseline or of the rules, 70 a bug in leakgauge, 130 interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from leakgauge.harness.cli import options as cli
from leakgauge.harness.core.sinks import clipped, emit, say, spelled

if TYPE_CHECKING:
    from leakgauge.harness.gate.baseline import Baseline, Move
    from leakgauge.harness.gate.judge import Check, Outcome
    from leakgauge.harness.gate.measure import Measured
    from leakgauge.harness.gate.rerun import Bench
    from leakgauge.harness.gate.target import Trusted

baselines = typer.Typer(name="baseline", help="The numbers that 'check' compares with.", no_args_is_help=True)

BaselineArgument = Annotated[Path, typer.Argument(help="A baseline.")]
InconclusiveOption = Annotated[
    Literal["warn", "fail"], typer.Option(help="On an inconclusive check: warn and exit 0, or exit 3.")
]
SummaryOption = Annotated[
    str | None,
    typer.Option(metavar="FILE|auto", help="Write Markdown to this file; auto: append to GITHUB_STEP_SUMMARY."),
]
BaselineOption = Annotated[Path, typer.Option(help="The file that 'leakgauge baseline update' wrote.")]
TargetOption = Annotated[
    str | None,
    typer.Option(metavar="REF", help="The branch whose baseline counts; default: that of CI, else origin/main."),
]
AcceptOption = Annotated[
    str | None, typer.Option(metavar="REASON", help="Judge by the baseline and the rules of this checkout.")
]
JunitOption = Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.")]
ToJsonOption = Annotated[Path | None, typer.Option("--json", help="Write JSON to this file.")]
AnnotationsOption = Annotated[
    Literal["auto", "off"], typer.Option(help="auto: print GitHub annotations in a GitHub workflow.")
]


def gate(
    study: cli.StudyArgument,
    baseline: BaselineOption,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the new results.")],
    target: TargetOption = None,
    accept_baseline: AcceptOption = None,
    inconclusive: InconclusiveOption = "warn",
    junit: JunitOption = None,
    summary: SummaryOption = None,
    to_json: ToJsonOption = None,
    annotations: AnnotationsOption = "auto",
    data: cli.DataOption = None,
    workers: cli.WorkersOption = None,
    allow_code: cli.AllowCodeOption = False,
) -> None:
    """Check this code against a baseline: run and judge what changed. Exit code 0: no increase; 1: an increase."""
    from leakgauge.harness.cli.progress import listener
    from leakgauge.harness.gate.baseline import read
    from leakgauge.harness.gate.mechanism import gate as judged
    from leakgauge.harness.gate.target import trusted
    from leakgauge.harness.study.study import load_study

    with cli.computed_anew(), cli.user_errors(cli.NOT_COMPARABLE):
        asked = load_study(study, allow_code=allow_code)
        held, own = trusted(baseline, target, accept_baseline), read(baseline)
        with listener(asked.name) as listen:
            now, outcome = judged(asked, out, held.baseline, own, held.rules, data=data, workers=workers, listen=listen)
        refused, warnings = (*held.unaccepted, *outcome.unaccepted), (*held.warnings, *outcome.warnings)
        outcome = replace(outcome, unaccepted=refused, warnings=warnings)
        fails = inconclusive == "fail"
        raise _published(outcome, now, held.baseline, baseline, fails, junit, summary, to_json, annotations)


def check(
    folder: cli.FolderArgument,
    baseline: BaselineOption,
    target: TargetOption = None,
    accept_baseline: AcceptOption = None,
    rerun_base: Annotated[
        bool, typer.Option("--rerun-base", help="Rerun the baseline by the target's code instead of using its numbers.")
    ] = False,
    inconclusive: InconclusiveOption = "warn",
    junit: JunitOption = None,
    summary: SummaryOption = None,
    to_json: ToJsonOption = None,
    annotations: AnnotationsOption = "auto",
    data: cli.DataOption = None,
    workers: cli.WorkersOption = None,
    no_rerun: Annotated[bool, typer.Option("--no-rerun", help="Do not rerun inconclusive checks.")] = False,
    allow_code: cli.AllowCodeOption = False,
) -> None:
    """Compare a run with a baseline. Exit code 0: no increase detected; 1: leakage increased."""
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
        fails = inconclusive == "fail"
        raise _published(outcome, now, base, baseline, fails, junit, summary, to_json, annotations)


def _published(
    outcome: Outcome,
    now: Measured,
    base: Baseline,
    path: Path,
    fails: bool,
    junit: Path | None,
    summary: str | None,
    to_json: Path | None,
    annotations: str,
) -> typer.Exit:
    """Print the outcome, write the requested files, and return the exit. `fails`: whether INCONCLUSIVE does."""
    from leakgauge.harness.gate import output
    from leakgauge.harness.gate.measure import titles

    say(*_table(outcome, titles(now.measures)))
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
    say(f"leakgauge: {output.headline(outcome)}, against {path}{known}{_first(outcome)}")
    return typer.Exit(outcome.exit_code(inconclusive_fails=fails))


@baselines.command()
def acknowledge(
    file: BaselineArgument,
    study: cli.StudyArgument,
    reason: Annotated[str, typer.Option(help="Why the code behind the numbers changed; stored in the file.")],
    data: cli.DataOption = None,
    allow_code: cli.AllowCodeOption = False,
) -> None:
    """Record the fingerprints of this code in a baseline and keep its numbers; 'gate' tests what changed."""
    from leakgauge.harness.gate.baseline import read, write
    from leakgauge.harness.gate.mechanism import compare
    from leakgauge.harness.study.prints import take
    from leakgauge.harness.study.study import load_study

    _check_update(reason)
    with cli.user_errors(cli.NOT_COMPARABLE):
        before, found = read(file), load_study(study, allow_code=allow_code)
        if found.name != before.measured.study:
            raise cli.refusal(cli.USAGE, f"{file} is of the study {before.measured.study!r}, not of {found.name!r}")
        prints = take(found.cells, data)
        write(replace(before, prints=prints, reason=reason.strip()), file)
    lines = compare(prints, before.prints).lines or ("nothing changed",)
    say(*(f"leakgauge: {clipped(line)}" for line in lines), f"leakgauge: wrote {file}: {len(prints)} fingerprints")


@baselines.command()
def update(
    folder: cli.FolderArgument,
    reason: Annotated[str, typer.Option(help="Why these numbers are accepted; stored in the file.")],
    baseline: Annotated[Path | None, typer.Option(help="The file; default: baselines/STUDY.json.")] = None,
    accept_increase: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="An accepted increase, or a pattern such as 'gaussian/*'; repeatable."),
    ] = None,
    allow_gaps: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A measure, or a pattern, that may lack numbers: a known gap; repeatable."),
    ] = None,
) -> None:
    """Make a run the baseline. Each increase over the previous baseline must be accepted by its key."""
    from leakgauge.harness.gate.baseline import Baseline, read, write
    from leakgauge.harness.gate.judge import Rules, judge
    from leakgauge.harness.gate.measure import measured
    from leakgauge.harness.study.store import load_run

    _check_update(reason)
    with cli.user_errors(cli.NOT_COMPARABLE):
        now = measured(load_run(folder))
        gaps = _check_complete(now, allow_gaps or [])
        path = baseline if baseline is not None else _default_path(now.study)
        before = read(path) if path.exists() else None
        outcome = None
        if before is not None:
            outcome = judge(now, before.measured, Rules(), gaps=before.gaps)
            _print_compared(before.measured, now, outcome)
        _check_accepted(outcome, accept_increase or [])
        prints = () if before is None else before.prints
        write(Baseline(now, reason.strip(), gaps, prints), path)
    previous = "the first" if before is None else f"before: {before.reason}"
    dirty = ", made with uncommitted changes" if now.dirty else ""
    known = f", gaps: {', '.join(gaps)}" if gaps else ""
    say(f"leakgauge: wrote {path}: {len(now.measures)} measures of {now.study}{dirty} ({previous}){known}")
    say("leakgauge: for 'leakgauge gate', record the code's fingerprints with 'leakgauge baseline acknowledge'")


@baselines.command()
def show(file: BaselineArgument, as_json: cli.JsonOption = False) -> None:
    """Show the contents of a baseline."""
    from leakgauge.harness.gate.baseline import read, to_text

    with cli.user_errors(cli.NOT_COMPARABLE):
        found = read(file)
    if as_json:
        emit(spelled(to_text(found)))
    else:
        say(*_shown(found))


@baselines.command()
def diff(
    old: BaselineArgument,
    new: Annotated[Path, typer.Argument(help="A later baseline.")],
    as_json: cli.JsonOption = False,
) -> None:
    """Show which measures of two baselines moved, appeared or vanished. Never fails the build."""
    from leakgauge.harness.gate.baseline import moves, provenance, read

    with cli.user_errors(cli.NOT_COMPARABLE):
        before, after = read(old), read(new)
    found = moves(before.measured, after.measured)
    if as_json:
        cli.print_json([asdict(move) for move in found])
        return
    say(f"{old} ({before.reason}) -> {new} ({after.reason})")
    say(*provenance(before.measured, after.measured), *_moved(found))


def _judged(now: Measured, held: Trusted, bench: Bench, *, rerun_base: bool, rerun: bool) -> tuple[Baseline, Outcome]:
    """The baseline, rerun on request, and the outcome of the comparison with it."""
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
    """Refuse an update in CI, or without a printable reason."""
    if os.environ.get("CI", "").strip().lower() not in ("", "0", "false"):
        raise cli.refusal(cli.USAGE, "CI is set: a person updates a baseline, in a commit that others review")
    if not reason.strip() or not reason.isprintable():
        raise cli.refusal(cli.USAGE, f"expected --reason with one line of text, got {reason!r}")


def _check_complete(now: Measured, allowed: list[str]) -> tuple[str, ...]:
    """The keys of the allowed gaps; refuses a pattern that matches no gap, and a gap that no pattern matches."""
    lacking = {measure.key: measure.problem for measure in now.measures if measure.problem}
    for pattern in allowed:
        if not any(fnmatchcase(key, pattern) for key in lacking):
            known = ", ".join(lacking) or "none"
            raise cli.refusal(cli.USAGE, f"--allow-gaps {pattern!r} matches no gap; gaps: {known}")
    left = [key for key in lacking if not any(fnmatchcase(key, pattern) for pattern in allowed)]
    if left:
        head = "this run is incomplete, nothing was written; accept each gap with --allow-gaps KEY:"
        raise cli.refusal(cli.INCOMPLETE, head, *(f"{key}: {lacking[key]}" for key in left))
    return tuple(lacking)


def _default_path(study: str) -> Path:
    """`baselines/STUDY.json`."""
    if Path(study).name != study or not study.isprintable():
        raise cli.refusal(cli.USAGE, f"the study name {study!r} is not a file name; give --baseline FILE")
    return Path("baselines") / f"{study}.json"


def _check_accepted(outcome: Outcome | None, accepted: list[str]) -> None:
    """Refuse a pattern that matches no increase, and an increase that no pattern matches."""
    from leakgauge.harness.gate.judge import Verdict
    from leakgauge.harness.gate.output import headline

    checks = [] if outcome is None else outcome.checks
    rises: list[Check] = [one for one in checks if one.verdict is Verdict.FAIL]
    for pattern in accepted:
        if not any(fnmatchcase(one.key, pattern) for one in rises):
            known = ", ".join(one.key for one in rises) or "none"
            raise cli.refusal(cli.USAGE, f"--accept-increase {pattern!r} matches no increase; increases: {known}")
    left = [one for one in rises if not any(fnmatchcase(one.key, pattern) for pattern in accepted)]
    if outcome is not None and left:
        head = f"{headline(outcome)}; nothing was written; accept each with --accept-increase KEY"
        raise cli.refusal(cli.INCREASED, head, *(f"  {one.key}: {one.reason}" for one in left))


def _print_compared(before: Measured, now: Measured, outcome: Outcome) -> None:
    from leakgauge.harness.gate.baseline import moves

    say(*_moved(moves(before, now)))
    notes = [f"nothing could be compared: {problem}" for problem in outcome.problems]
    notes += [f"warning: {warning}" for warning in outcome.warnings]
    say(*(f"leakgauge: {note}" for note in notes), err=True)


def _write(path: Path, text: str, *, append: bool = False) -> None:
    """Write a text file that other users of the machine may read.

    Raises:
        StoreError: the file cannot be written.
    """
    from leakgauge.harness.study.store import StoreError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error


def _table(outcome: Outcome, named: dict[str, str]) -> Iterable[str]:
    """Problems and warnings, then the checks, worst first; a check that did not pass is followed by name and reason."""
    from leakgauge.harness.gate.judge import Verdict
    from leakgauge.harness.gate.output import change, number, signed

    for problem in outcome.problems:
        yield f"not comparable: {clipped(problem)}"
    for change_of_rules in outcome.unaccepted:
        yield f"not accepted: {clipped(change_of_rules)}"
    for warning in outcome.warnings:
        yield f"warning: {clipped(warning)}"
    if not outcome.checks:
        return
    rows = [("verdict", "check", "before -> now", "change (90 %)", "detectable")]
    rows += [
        (
            one.verdict.value,
            clipped(one.key),
            f"{number(one.before)} -> {number(one.now)}",
            change(one.rise, one.low, one.high),
            "" if one.smallest is None else signed(one.smallest),
        )
        for one in outcome.checks
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, one in zip(rows, (None, *outcome.checks), strict=True):
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        if one is not None and one.verdict is not Verdict.PASS:
            yield f"{'':<{widths[0]}}  {clipped(named.get(one.key, one.name))}"
            yield f"{'':<{widths[0]}}  {clipped(one.reason)}"


def _first(outcome: Outcome) -> str:
    from leakgauge.harness.gate.judge import Verdict

    if outcome.problems:
        return f": {clipped(outcome.problems[0])}"
    if outcome.verdict is Verdict.NOT_ACCEPTED:
        return f"; first: {clipped(outcome.unaccepted[0])}"
    if not outcome.checks or outcome.verdict is Verdict.PASS:
        return ""
    return f"; first: {clipped(outcome.checks[0].key)}: {clipped(outcome.checks[0].reason)}"


def _moved(found: Iterable[Move]) -> list[str]:
    lines = []
    for move in found:
        before, after = (("n/a" if value is None else f"{value:.6g}") for value in (move.before, move.after))
        what = {"moved": f"{before} -> {after}", "appeared": f"new: {after}", "vanished": f"gone: {before}"}[move.kind]
        values = f"  ({move.differ} of {move.of} values)" if move.differ else ""
        lines.append(f"{what:<24}  {move.key}{values}")
    return lines or ["no measure moved"]


def _shown(found: Baseline) -> Iterable[str]:
    from leakgauge.harness.gate.output import number

    run = found.measured
    dirty = ", with uncommitted changes" if run.dirty else ""
    yield f"{run.study}: {len(run.measures)} measures, study hash {run.study_hash}"
    yield f"reason: {found.reason}"
    if found.gaps:
        yield f"gaps: {', '.join(found.gaps)}"
    yield f"made on {run.machine} at {run.commit}{dirty}"
    yield f"packages: {', '.join(f'{name} {version}' for name, version in run.packages.items())}"
    yield f"data: {', '.join(f'{name} {digest}' for name, digest in run.data.items())}"
    keys = [clipped(measure.key) for measure in run.measures]
    width = max(map(len, keys))
    for key, one in zip(keys, run.measures, strict=True):
        interval = "" if one.low is None or one.high is None else f"[{number(one.low)}, {number(one.high)}]"
        mark = one.control or ("aware" if one.aware else "")
        yield f"{key:<{width}}  {number(one.value):>8}  {interval:<16}  n = {one.n:<5}  {mark}".rstrip()
