"""Writes skeletons of a defense, an attack or a task: `leakgauge new`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from leakgauge.harness.core.errors import StudyError, unknown

KINDS = ("defense", "attack", "task")


def write(kind: str, file: Path) -> tuple[Path, Path]:
    """Write a skeleton that runs unchanged, and next to it a small study of it; returns both paths.

    Raises:
        UnknownNameError: there is no such kind.
        StudyError: a file already exists, cannot be written, or its name is not a module name.
    """
    if kind not in KINDS:
        raise unknown("skeleton", kind, KINDS)
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise StudyError("new", [f"expected a file such as my_{kind}.py (letters, digits, _), got {str(file)!r}"])
    paths = file, file.with_suffix(".toml")
    there = [str(path) for path in paths if path.exists()]
    if there:
        raise StudyError("new", [f"{' and '.join(there)} is there already; nothing is overwritten, name another file"])
    folder = resources.files("leakgauge.harness.own.skeletons")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            text = folder.joinpath(f"my_{kind}{path.suffix}").read_text("utf-8")
            with path.open("x", encoding="utf-8") as out:
                out.write(text.replace(f"my_{kind}", file.stem))
    except OSError as error:
        raise StudyError("new", [f"cannot write {file}: {error}"]) from error
    return paths
