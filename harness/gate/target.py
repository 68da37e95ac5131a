"""The trusted baseline, rules and base of a rerun, all from the merge base with the target branch.

The checkout's baseline, the commit that it names, and the run come from the author of a change. Differences from the
target branch are listed; they count only if a person accepts them.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.metrics import GateTest, metric
from leakgauge.harness.gate.baseline import Baseline, BaselineError, parse, read
from leakgauge.harness.gate.changes import changes_since
from leakgauge.harness.gate.compare import provenance
from leakgauge.harness.gate.measure import Measure
from leakgauge.harness.gate.rerun import git, holds, rules_at
from leakgauge.harness.gate.rules import Rules

_BRANCHES = ("remotes/origin/main", "remotes/origin/master", "heads/main", "heads/master")


@dataclass(frozen=True)
class Trusted:
    """What a run is judged by.

    Attributes:
        base: the commit of a rerun.
        unaccepted: differences that nobody accepted.
        merge: the commit with whose code a change is compared; None: there is no target branch.
    """

    baseline: Baseline
    rules: Rules = field(default_factory=Rules)
    base: str | None = None
    unaccepted: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    merge: str | None = None


def trusted(path: Path, target: str | None = None, accepted: str | None = None) -> Trusted:
    """What a run is judged by, for the baseline `path` in the checkout around the working directory.

    Args:
        target: a commit or branch; None: the target of CI's pull request, else the first existing of `origin/main`,
            `origin/master`, `main` and `master`.
        accepted: if not empty, the reason why the checkout's baseline and rules count instead. If the measures of the
            two baselines differ, no commit is trusted for a rerun.

    Raises:
        BaselineError: the file is unreadable, or names a commit that is no ancestor of HEAD.
        StudyError: the target does not exist, or has no merge base with HEAD.
    """
    own = read(path)
    held = _held(path, own, target)
    if not (accepted or "").strip() or not held.unaccepted:
        return held
    notes = (f"accepted ({accepted}): {change}" for change in held.unaccepted)
    base = held.base if own.measured.measures == held.baseline.measured.measures else None
    return Trusted(own, base=base, warnings=(*held.warnings, *notes), merge=held.merge)


def changes(old: Baseline, new: Baseline) -> tuple[list[str], list[str]]:
    """How a baseline differs from an older one: changes that a person must accept, then additions and provenance.

    A lower number must be accepted too: it can widen the spread of a paired test, which then shows no rise.
    """
    before, after = old.measured.by_key(), new.measured.by_key()
    weaker = [f"removed from the baseline: {key}" for key in before if key not in after]
    weaker += [f"weakened in the baseline: {key} may lack numbers" for key in new.gaps if key not in old.gaps]
    weaker += [_changed(was, after[key]) for key, was in before.items() if after.get(key, was) != was]
    notes = [f"added to the baseline: {key}" for key in after if key not in before]
    notes += ["changed in the baseline: acknowledged files"] * (old.acknowledged != new.acknowledged)
    notes += ["changed in the baseline: how it was computed"] * (old.measured.numerics != new.measured.numerics)
    return weaker, notes + [f"changed in the baseline: {line}" for line in provenance(old.measured, new.measured)]


def _held(path: Path, own: Baseline, target: str | None) -> Trusted:
    merge = merge_base(target)
    if merge is None:
        why = "no git repository with a target branch and its history: the baseline cannot be verified"
        return Trusted(own, unaccepted=(f"{why}; fetch the branch, give --target or --accept-baseline",))
    root = git("rev-parse", "--show-toplevel")
    # the parent is resolved, not the file: a link would give the name of its target
    name = Path(os.path.relpath(path.parent.resolve() / path.name, root)).as_posix()
    edited = changes_since(merge).deciding
    unaccepted = [f"changed since the target branch: {file}, which decides this check" for file in edited]
    rules = rules_at(merge) if edited else Rules()
    held = _at(merge, name)
    is_new = held is None or own.measured.commit != held.measured.commit
    warnings = [*_about_commit(path, own, root, is_new=is_new)]
    if held is None:
        unaccepted.append(f"{path} is not in the target branch at {merge[:12]}, or cannot be read there")
        return Trusted(own, rules, None, (*unaccepted,), (*warnings,), merge)
    unlike, notes = changes(held, own)
    warnings += notes
    if merge == git("rev-parse", "HEAD"):
        before = _at("HEAD^", name)
        last = [] if before is None else [line for lines in changes(before, held) for line in lines]
        own_file = f"judged by its own baseline, in which its last commit made {counted(len(last), 'change')}"
        warnings += [f"HEAD is in the target branch: {own_file}; --target takes the commit before a push", *last[:3]]
    return Trusted(held, rules, _base(merge, name, held), (*unaccepted, *unlike), (*warnings,), merge)


def merge_base(target: str | None) -> str | None:
    """The merge base of HEAD with the target; None if there is none and no target was given."""
    named = os.environ.get("GITHUB_BASE_REF") or os.environ.get("CI_MERGE_REQUEST_TARGET_BRANCH_NAME")
    known = [f"refs/remotes/origin/{named}"] if named else [f"refs/{branch}" for branch in _BRANCHES]
    for ref in known if target is None else [target]:
        try:
            commit = git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
            return git("merge-base", "HEAD", commit)
        except StudyError as error:
            if target is not None:
                raise StudyError(
                    f"--target {target}", ["HEAD has no merge base with this target; fetch its history"]
                ) from error
    return None


def _at(commit: str, name: str) -> Baseline | None:
    try:
        return parse(git("show", f"{commit}:{name}"), name)
    except (BaselineError, StudyError):
        return None


def _base(merge: str, name: str, held: Baseline) -> str | None:
    """The commit up to the merge base that introduced the baseline's measures; HEAD's parent in place of HEAD."""
    base = merge
    for commit in git("log", "--format=%H", merge, "--", f":/{name}").split():
        older = _at(commit, name)
        if older is None or older.measured.measures != held.measured.measures:
            break
        base = commit
    if base != git("rev-parse", "HEAD"):
        return base
    return git("rev-parse", "HEAD^") if holds("rev-parse", "--verify", "--quiet", "HEAD^") else None


def _about_commit(path: Path, baseline: Baseline, root: str, *, is_new: bool) -> Iterable[str]:
    """A warning if the baseline's commit is no ancestor of HEAD; an error if git knows it, or if it `is_new`."""
    inside = Path(__file__).resolve().is_relative_to(root)
    for commit in re.findall(r"\b[0-9a-f]{40}\b", baseline.measured.commit):
        if holds("merge-base", "--is-ancestor", commit, "HEAD"):
            continue
        text = f"baseline {path}: its commit {commit[:12]} is no ancestor of HEAD"
        if (inside and is_new) or holds("cat-file", "-e", f"{commit}^{{commit}}"):
            raise BaselineError(f"{text}; make a new one with 'leakgauge baseline make'")
        if inside:
            yield text


def _changed(was: Measure, now: Measure) -> str:
    """How two measures of the same key differ: `weakened` if the new one allows more leakage."""
    fields = [field.name for field in dataclasses.fields(was)]
    names = [name for name in fields if getattr(was, name) != getattr(now, name)]
    sign = -1 if metric(was.metric).gate is GateTest.FALL else 1
    pairs = [(was.value, now.value), *zip(was.values, now.values, strict=False)]
    rises = any(a is not None and b is not None and sign * (b - a) > 0 for a, b in pairs)
    lifted = was.limit is not None and (now.limit is None or now.limit > was.limit)
    values = f" {was.value} -> {now.value}" if was.value != now.value else ""
    return f"{'weakened' if rises or lifted else 'changed'} in the baseline: {was.key}{values} ({', '.join(names)})"
