"""The lines of a leaderboard as plain data: ranks, and lines of two calls on one page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
import scipy.stats

from leakgauge.harness.core import stats
from leakgauge.harness.core.cases import gathered

Row = dict[str, Any]

TIE = 0.005
"""Entries whose accuracies are closer share a rank."""


def rank(lines: Iterable[Row]) -> None:
    """Give each line its rank among those of its task, track and epsilon, unless it has no result."""
    for alike in gathered(((each["task"], each["track"], each["epsilon"]), each) for each in lines).values():
        _rank([each for each in alike if each["accuracy"]])


def _rank(alike: list[Row]) -> None:
    """Ranks by mean accuracy.

    A new rank begins at an entry that is at least `TIE` behind the one before it, and surely behind one that shares
    that one's rank. It is one more than the number of entries before it.
    """
    order = sorted(alike, key=lambda each: -fmean(each["accuracy"]))
    pairs = list(combinations(range(len(order)), 2))
    surely = stats.holm(np.array([_surely(order[a]["accuracy"], order[b]["accuracy"]) for a, b in pairs]))
    sure = {pair for pair, p in zip(pairs, surely, strict=True) if p <= 0.05}
    first = 0
    for at, each in enumerate(order):
        apart = at and fmean(order[at - 1]["accuracy"]) - fmean(each["accuracy"]) >= TIE
        if apart and any((before, at) in sure for before in range(first, at)):
            first = at
        each["rank"] = first + 1


def _surely(a: Sequence[float], b: Sequence[float]) -> float:
    """p of a paired t test that both are equal; 0 or 1 if all differences are the same."""
    differences = np.round(np.subtract(a, b), 12)
    if len(differences) < 2 or np.ptp(differences) == 0:
        return float(len(differences) < 2 or differences[0] == 0)
    return float(scipy.stats.ttest_1samp(differences, 0.0).pvalue)


def joined(before: str, now: str) -> str:
    """The JSON `now`, with the lines, tasks, tracks and entries of `before` that it lacks; ranks are of all lines.

    Lines of a task, track or entry that has changed, but for its texts, are left out, and those of an entry that has
    left the board and is no submission; so are all lines if the seeds, the attacks or the stages of tuning have
    changed. They are results of another board.
    """
    new, old = json.loads(now), json.loads(before)
    if any(new[name] != old.get(name) for name in ("stages", "seeds", "attacks", "audit")):
        return now
    known, named = {_place(line) for line in new["lines"]}, {entry["name"] for entry in new["entries"]}
    old["entries"] = [one for one in old["entries"] if one["name"] in named or ":" in one["name"]]
    named |= {one["name"] for one in old["entries"]}
    kinds = ("tasks", "tracks", "entries")
    bare = {kind: list(map(_bare, old[kind])) for kind in kinds}
    changed = {one["name"] for kind in kinds for one in new[kind] if _bare(one) not in bare[kind]}
    new["lines"] += [
        line
        for line in old["lines"]
        if _place(line) not in known
        and line["entry"] in named
        and not {line["task"], line["track"], line["entry"]} & changed
    ]
    new["lines"].sort(key=_place)
    for kind in kinds:
        names = {one["name"] for one in new[kind]}
        new[kind] = [*(one for one in old[kind] if one["name"] not in names), *new[kind]]
    rank(new["lines"])
    return json.dumps(new, indent=1, sort_keys=True) + "\n"


def _bare(one: Row) -> Row:
    return {name: value for name, value in one.items() if name not in ("title", "good_for")}


def _place(line: Row) -> tuple[str, str, str, float]:
    return line["task"], line["track"], line["entry"], math.inf if line["epsilon"] is None else line["epsilon"]
