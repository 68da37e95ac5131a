"""What the target branch vouches for: baseline, rules and the base of a rerun, all from the merge base with it.

The baseline of the checkout, the commit that it names, and the run belong to whoever proposes a change. What differs is
listed; it counts only if a person accepts it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.metrics import GateTest, metric
from leakgauge.harness.gate.baseline import Baseline, BaselineError, parse, provenance, read
from leakgauge.harness.gate.measure import Measure
from leakgauge.harness.gate.rerun import git, holds, rules_at
from leakgauge.harness.gate.rules import Rules

_CODE = ("harness/gate", "harness/cli/gate.py", "harness/core/metrics.py", "harness/core/stats.py")
"""The code that decides a check."""

_BRANCHES = ("remotes/origin/main", "remotes/origin/master", "heads/main", "heads/master")
_CI_BRANCH = ("GITHUB_BASE_REF", "CI_MERGE_REQUEST_TARGET_BRANCH_NAME")
"""Variables with the target branch of a pull request."""

_MOST = 3
"""Changes of the last commit that a warning names."""


@dataclass(frozen=True)
class Trusted:
    """What a run is judged by.

    Attributes:
        base: the commit that a rerun takes; None: no commit is trusted.
        unaccepted: changes of what judges, which nobody accepted.
        root: folder of the repository.
    """

    baseline: Baseline
    rules: Rules = field(default_factory=Rules)
    base: str | None = None
    unaccepted: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    root: Path = Path()


def trusted(path: Path, target: str | None = None, accepted: str | None = None) -> Trusted:
    """What a run is judged by, where the checkout around the working directory has the baseline `path`.

    Args:
        target: a commit or branch; None: that of CI's pull request, else `origin/main`, `origin/master`, `main` or
            `master`, the first that is there.
        accepted: why the baseline and the rules of the checkout count instead; no commit is trusted to rerun what the
            target's baseline does not hold.

    Raises:
        BaselineError: the file is unreadable, or names a commit that is no ancestor of HEAD.
        StudyError: there is no such target, or no merge base with it.
    """
    own = read(path)
    found = _held(path, own, target)
    if accepted is None or not found.unaccepted:
        return found
    notes = (f"accepted ({accepted}): {change}" for change in found.unaccepted)
    base = found.base if own.measured.measures == found.baseline.measured.measures else None
    return Trusted(own, base=base, warnings=(*found.warnings, *notes), root=found.root)


def changes(old: Baseline, new: Baseline) -> tuple[list[str], list[str]]:
    """How a baseline differs from an older one: changes that need a person, then additions and provenance.

    A lower number needs one too: it can widen the spread of a paired test, which then shows no rise.
    """
    before, after = old.measured.by_key(), new.measured.by_key()
    counted = [f"removed from the baseline: {key}" for key in before if key not in after]
    if old.noise_sd != new.noise_sd:
        word = "weakened" if new.noise_sd > old.noise_sd else "changed"
        counted.append(f"{word} in the baseline: noise_sd {old.noise_sd:g} -> {new.noise_sd:g}")
    counted += [f"weakened in the baseline: {key} may lack numbers" for key in new.gaps if key not in old.gaps]
    counted += [line for key, was in before.items() if key in after for line in _changed(was, after[key])]
    notes = [f"added to the baseline: {key}" for key in after if key not in before]
    return counted, notes + [f"changed in the baseline: {line}" for line in provenance(old.measured, new.measured)]


def _held(path: Path, own: Baseline, target: str | None) -> Trusted:
    """What the target branch vouches for, with the checkout's changes of it."""
    merge = _merge_base(target)
    if merge is None:
        why = "no git repository with a target branch and its history: nobody vouches for the baseline"
        return Trusted(own, unaccepted=(f"{why}; fetch the branch, give --target or --accept-baseline",))
    root = Path(git(Path(), "rev-parse", "--show-toplevel"))
    # not of the file itself: a link would name what it points to
    name = Path(os.path.relpath(path.parent.resolve() / path.name, root)).as_posix()
    edited = git(root, "diff", "--name-only", merge, "--", *_CODE).splitlines()
    unaccepted = [f"changed since the target branch: {file}, which decides this check" for file in edited]
    rules = rules_at(merge, root) if edited else Rules()
    try:
        held = _at(merge, name, root)
    except (BaselineError, StudyError) as error:
        what = str(error) if isinstance(error, BaselineError) else f"{path} is not in the target branch"
        warnings = _about_commit(path, own, root, is_new=True)
        return Trusted(own, rules, None, (*unaccepted, f"{what} at {merge[:12]}"), (*warnings,), root)
    counted, notes = changes(held, own)
    warnings = [*_about_commit(path, own, root, is_new=own.measured.commit != held.measured.commit), *notes]
    if merge == git(root, "rev-parse", "HEAD"):
        warnings += _about_last(name, held, root)
    return Trusted(held, rules, _base(merge, name, held, root), (*unaccepted, *counted), (*warnings,), root)


def _merge_base(target: str | None) -> str | None:
    """The merge base of HEAD with the target; None if there is none and none was asked for."""
    named = next(filter(None, map(os.environ.get, _CI_BRANCH)), None)
    known = [f"refs/remotes/origin/{named}"] if named else [f"refs/{one}" for one in _BRANCHES]
    for ref in known if target is None else [target]:
        if target is not None or holds(Path(), "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"):
            try:
                commit = git(Path(), "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
                return git(Path(), "merge-base", "HEAD", commit)
            except StudyError as error:
                if target is None:
                    return None
                raise StudyError(f"--target {target}", ["no merge base of HEAD with it; fetch its history"]) from error
    return None


def _at(commit: str, name: str, root: Path) -> Baseline:
    """The baseline in a commit."""
    return parse(git(root, "show", f"{commit}:{name}").encode(), f"{name} at {commit[:12]}")


def _base(merge: str, name: str, held: Baseline, root: Path) -> str | None:
    """The commit up to the merge base that gave the baseline its measures; its parent if that is HEAD itself."""
    base = merge
    for commit in git(root, "log", "--format=%H", merge, "--", name).split():
        try:
            if _at(commit, name, root).measured.measures != held.measured.measures:
                break
        except (BaselineError, StudyError):
            break
        base = commit
    if base != git(root, "rev-parse", "HEAD"):
        return base
    return git(root, "rev-parse", "HEAD^") if holds(root, "rev-parse", "--verify", "--quiet", "HEAD^") else None


def _about_last(name: str, held: Baseline, root: Path) -> Iterable[str]:
    """Warnings where HEAD is the target itself, so that its own commits are taken as they are."""
    yield "HEAD is in the target branch: judged by its own baseline; for a push, give --target the commit before it"
    try:
        lines = [line for part in changes(_at("HEAD^", name, root), held) for line in part]
    except (BaselineError, StudyError):
        return
    if lines:
        more = f"; and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
        yield f"the last commit changed the baseline: {'; '.join(lines[:_MOST])}{more}"


def _about_commit(path: Path, baseline: Baseline, root: Path, *, is_new: bool) -> Iterable[str]:
    """Warnings about the commit that a baseline names; nothing rests on it.

    Raises:
        BaselineError: it is no ancestor of HEAD; for one that git does not know, only if the checkout `is_new` with it.
    """
    inside = Path(__file__).resolve().is_relative_to(root)
    for commit in re.findall(r"\b[0-9a-f]{40}\b", baseline.measured.commit):
        known = holds(root, "cat-file", "-e", f"{commit}^{{commit}}")
        if known and holds(root, "merge-base", "--is-ancestor", commit, "HEAD"):
            continue
        text = f"baseline {path}: its commit {commit[:12]} is no ancestor of HEAD"
        if known or (inside and is_new):
            raise BaselineError(f"{text}; make a new one with 'leakgauge baseline update'")
        if inside:
            yield text


def _changed(was: Measure, now: Measure) -> Iterable[str]:
    """One line if two measures of the same key differ: weakened, if more may leak now."""
    names = [one.name for one in dataclasses.fields(was) if getattr(was, one.name) != getattr(now, one.name)]
    if not names:
        return
    sign = -1 if metric(was.metric).gate is GateTest.FALL else 1
    pairs = [(was.value, now.value), *zip(was.values, now.values, strict=False)]
    rises = any(a is not None and b is not None and sign * (b - a) > 0 for a, b in pairs)
    lifted = was.limit is not None and (now.limit is None or now.limit > was.limit)
    values = f" {was.value} -> {now.value}" if was.value != now.value else ""
    word = "weakened" if rises or lifted else "changed"
    yield f"{word} in the baseline: {was.key}{values} ({', '.join(names)})"
