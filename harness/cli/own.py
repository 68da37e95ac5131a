"""The commands `new` and `doctor`: write the skeleton of a user's defense, attack or task, and check it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from leakgauge.harness.cli import options as cli
from leakgauge.harness.core.sinks import say

_KINDS = ("defense", "attack", "task")
_MARKS = {"ok": "ok  ", "FAIL": "FAIL", "skipped": "—   "}


def new(
    kind: Annotated[str, Argument(help="What to write.", metavar="defense|attack|task")],
    file: Annotated[Path, Argument(help="The file, such as my_defense.py. Nothing is overwritten.")],
) -> None:
    """Write a runnable skeleton of a defense, an attack or a task, and a small study of it."""
    with cli.user_errors():
        code, study = _write(kind, file)
    say(f"wrote {code} and {study}; next:", f"  leakgauge doctor {code}")
    say(f"  leakgauge run {study} -o runs/{code.stem} --allow-code")


def _write(kind: str, file: Path) -> tuple[Path, Path]:
    """Write a skeleton that runs unchanged, and next to it a small study of it; returns both paths."""
    from importlib import resources

    from leakgauge.harness.core.errors import StudyError, unknown

    if kind not in _KINDS:
        raise unknown("skeleton", kind, _KINDS)
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise StudyError("new", [f"expected a file such as my_{kind}.py (letters, digits, _), got {str(file)!r}"])
    paths = file, file.with_suffix(".toml")
    there = [str(path) for path in paths if path.exists()]
    if there:
        raise StudyError("new", [f"{' and '.join(there)} is there already; nothing is overwritten, name another file"])
    folder = resources.files("leakgauge.harness.integrations.skeletons")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            text = folder.joinpath(f"my_{kind}{path.suffix}").read_text("utf-8")
            with path.open("x", encoding="utf-8") as out:
                out.write(text.replace(f"my_{kind}", file.stem))
    except OSError as error:
        raise StudyError("new", [f"cannot write {file}: {error}"]) from error
    return paths


def doctor(
    what: Annotated[str, Argument(help="FILE.py, module:Class, or a name. It is imported: no --allow-code is needed.")],
    set_: cli.SetOption = None,
    as_json: cli.JsonOption = False,
) -> None:
    """Check a defense, an attack or a task: one line per check; a failed check says what is wrong, where, and a fix."""
    from leakgauge.harness.audit.claims import assignments
    from leakgauge.harness.integrations.suite import examine

    findings = []
    with cli.user_errors():
        for finding in examine(what, assignments(set_ or [], "--set")):
            findings.append(finding)
            if not as_json:
                say(f"{_MARKS[finding.mark]} {finding.name}: {finding.text}")
    if as_json:
        cli.print_json([finding._asdict() for finding in findings])
    wrong = [finding.name for finding in findings if finding.mark == "FAIL"]
    if not as_json:
        failed = f"{len(wrong)} of {len(findings)} checks failed: {', '.join(wrong)}"
        say(failed if wrong else "nothing wrong was found")
    if wrong:
        raise typer.Exit(cli.UNSOUND)
