"""The gate's outcome: lines for a terminal, JUnit XML, a Markdown summary, JSON and workflow annotations.

Names and reasons come from studies and error messages. `core.sinks` escapes them; long texts are cut with a mark.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from xml.etree import ElementTree

from leakgauge.harness.core.labels import counted, part_text
from leakgauge.harness.core.metrics import gated, metric
from leakgauge.harness.core.numerics import stated
from leakgauge.harness.core.sinks import clipped, command, line, markdown, spelled, table_head, table_row
from leakgauge.harness.gate.baseline import Baseline
from leakgauge.harness.gate.compare import Row
from leakgauge.harness.gate.judge import Check, Outcome, Verdict
from leakgauge.harness.gate.measure import Measure, Measured, image_names, titles

SCHEMA = 1
"""Version of the JSON; raised when a field changes its meaning or is removed."""

LARGEST_SUMMARY = 900_000
"""The most bytes of a summary; a job page drops a summary above 1 MiB."""

MOST_ANNOTATIONS = 10
"""The most annotations that a job page shows for one step and level."""

ICONS = dict(zip(Verdict, "✕!≠≠?✓", strict=True))

_TAGS = {
    Verdict.FAIL: "failure",
    Verdict.INCOMPLETE: "error",
    Verdict.INCONCLUSIVE: "skipped",
    Verdict.NOT_COMPARABLE: "skipped",
}
_MOST_NOTES = 20
_RESERVED = 200
"""Bytes for the lines between the parts of a summary."""

_HEADER = ("Verdict", "Check", "Baseline", "Now", "Change (90 %)", "n", "Smallest detectable", "Why")
_INTERVAL = "Each end of a 90 % interval is a one-sided 95 % bound. p is one-sided and adjusted by Holm over the run."


def word(check: Check) -> str:
    """The verdict of a check in words."""
    if check.verdict is Verdict.FAIL:
        return metric(check.metric).failed
    if check.verdict is Verdict.PASS:
        return metric(check.metric).passed
    return check.verdict.lower()


def headline(outcome: Outcome) -> str:
    """The verdict of a comparison in one phrase, with counts."""
    if outcome.problems:
        return "Not comparable: nothing was checked"
    if not outcome.checks:
        same = f"no code behind {counted(outcome.unchanged, 'measure')} changed"
        if outcome.unaccepted:
            return f"Not accepted: {counted(len(outcome.unaccepted), 'change')}; {same}"
        return f"No increase detected: {same}" if outcome.unchanged else "Nothing was checked"
    verdict, total = outcome.verdict, counted(len(outcome.checks), "check")
    if verdict is Verdict.NOT_ACCEPTED:
        what = f"{counted(len(outcome.unaccepted), 'change')} of the baseline, the rules or the code"
        return f"Not accepted: {what}, with {total}"
    hits = [check for check in outcome.checks if check.verdict is verdict]
    if verdict is Verdict.PASS:
        return f"No increase detected in {total}"
    if verdict is Verdict.FAIL:
        kinds = Counter(metric(check.metric).failed for check in hits)
        order = dict.fromkeys(known.failed for known in gated())
        text = ", ".join(f"{kind} in {kinds[kind]}" for kind in order if kind in kinds)
        return f"{text[0].upper()}{text[1:]} of {total}"
    end = " could not be made" if verdict is Verdict.INCOMPLETE else ""
    return f"{verdict.capitalize()}: {len(hits)} of {total}{end}"


def lines(outcome: Outcome, measured: Measured) -> Iterator[str]:
    """Problems and warnings, then the checks, worst first; a check that did not pass is followed by name and reason."""
    yield from (f"not comparable: {clipped(problem)}" for problem in outcome.problems)
    yield from (f"not accepted: {clipped(change_of_rules)}" for change_of_rules in outcome.unaccepted)
    yield from (f"warning: {clipped(warning)}" for warning in outcome.warnings)
    if not outcome.checks:
        return
    names, rows = titles(measured.measures), [("verdict", "check", "before -> now", "change (90 %)", "n", "detectable")]
    rows += [
        (
            check.verdict.value,
            clipped(check.key),
            f"{number(check.before)} -> {number(check.now)}",
            change(check.rise, check.low, check.high),
            str(check.n or ""),
            "" if check.smallest is None else signed(check.smallest),
        )
        for check in outcome.checks
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, check in zip(rows, (None, *outcome.checks), strict=True):
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        if check is not None and check.verdict is not Verdict.PASS:
            yield f"{'':<{widths[0]}}  {clipped(names.get(check.key, check.name))}"
            yield f"{'':<{widths[0]}}  {clipped(check.reason)}"
    yield from (f"rating  {defense} against {who}: {clipped(rating)}" for defense, who, rating in measured.ratings)


def first(outcome: Outcome) -> str:
    """The problem or check to look at first; empty if there is none."""
    if outcome.problems:
        return f": {clipped(outcome.problems[0])}"
    if outcome.verdict is Verdict.NOT_ACCEPTED:
        return f"; first: {clipped(outcome.unaccepted[0])}"
    if not outcome.checks or outcome.verdict is Verdict.PASS:
        return ""
    return f"; first: {clipped(outcome.checks[0].key)}: {clipped(outcome.checks[0].reason)}"


def moves(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The measures that moved, appeared or vanished, and how many of their single values differ."""
    return [
        {
            "key": row.key,
            "name": row.either.name,
            "kind": row.kind,
            "before": row.before and row.before.value,
            "after": row.after and row.after.value,
            **dict(zip(("differ", "of"), row.differing, strict=True)),
        }
        for row in rows
        if row.kind
    ]


def moved(rows: Iterable[Row]) -> list[str]:
    """The same, one line for each measure."""
    texts = []
    for move in moves(rows):
        before, after = ("n/a" if move[side] is None else f"{move[side]:.6g}" for side in ("before", "after"))
        words = {"moved": f"{before} -> {after}", "appeared": f"new: {after}", "vanished": f"gone: {before}"}
        values = "  ({differ} of {of} values)".format(**move) if move["differ"] else ""
        texts.append(f"{words[move['kind']]:<24}  {move['key']}{values}")
    return texts or ["no measure moved"]


def described(baseline: Baseline) -> Iterator[str]:
    """The lines that describe a baseline."""
    run = baseline.measured
    yield f"{run.study}: {len(run.measures)} measures, study hash {run.study_hash}"
    yield f"reason: {baseline.reason}"
    if baseline.gaps:
        yield f"gaps: {', '.join(baseline.gaps)}"
    yield f"made on {run.machine} at {run.commit}{', with uncommitted changes' if run.dirty else ''}"
    yield f"computed with: {stated(run.numerics)}"
    yield f"packages: {', '.join(f'{name} {version}' for name, version in run.packages.items())}"
    yield f"data: {', '.join(f'{name} {digest}' for name, digest in run.data.items())}"
    keys = [clipped(measure.key) for measure in run.measures]
    width = max(map(len, keys))
    for key, measure in zip(keys, run.measures, strict=True):
        interval = (
            "" if measure.low is None or measure.high is None else f"[{number(measure.low)}, {number(measure.high)}]"
        )
        mark = measure.control or ("aware" if measure.aware else "")
        yield f"{key:<{width}}  {number(measure.value):>8}  {interval:<16}  n = {measure.n:<5}  {mark}".rstrip()


def junit(outcome: Outcome, measured: Measured) -> str:
    """JUnit XML with one test case per check: the class is the defense, the name is the key.

    | verdict | element |
    |---|---|
    | FAIL | failure |
    | INCOMPLETE, a problem of the whole comparison | error |
    | INCONCLUSIVE, NOT COMPARABLE | skipped |
    | PASS | none |

    Guarantees:
        The XML is well-formed for every text in the outcome; characters that XML forbids are removed.
        The same arguments give the same text: no date, no host.
    """
    root = ElementTree.Element("testsuites", name="leakgauge")
    suite = ElementTree.SubElement(root, "testsuite", name=line(f"leakgauge check: {measured.study}"))
    refused = (*outcome.problems, *outcome.unaccepted)
    counts = Counter({"error": len(refused)})
    known, names = measured.by_key(), titles(measured.measures)
    for at, problem in enumerate(refused, 1):
        case = ElementTree.SubElement(suite, "testcase", classname="comparison", name=f"problem {at}")
        what = Verdict.NOT_COMPARABLE if at <= len(outcome.problems) else Verdict.NOT_ACCEPTED
        ElementTree.SubElement(case, "error", message=clipped(problem), type=what.value)
    for check in outcome.checks:
        # a check that the run lacks has only a key, which starts with the defense
        defense = part_text(known[check.key].defense) if check.key in known else check.key.split("/")[0]
        case = ElementTree.SubElement(suite, "testcase", classname=clipped(defense), name=line(check.key))
        text = f"{clipped(names.get(check.key, check.name))}\n{numbers(check)}"
        tag = _TAGS.get(check.verdict)
        if tag is None:
            ElementTree.SubElement(case, "system-out").text = text
        else:
            counts[tag] += 1
            found = ElementTree.SubElement(case, tag, message=clipped(check.reason), type=check.verdict.value)
            found.text = text
    if measured.ratings:
        properties = ElementTree.Element("properties")
        for defense, adversary, rating in measured.ratings:
            name = line(f"rating of {defense} against {adversary}")
            ElementTree.SubElement(properties, "property", name=name, value=clipped(rating))
        suite.insert(0, properties)
    if outcome.warnings:
        ElementTree.SubElement(suite, "system-err").text = "\n".join(map(clipped, outcome.warnings))
    for element in (root, suite):
        element.set("tests", str(len(refused) + len(outcome.checks)))
        for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            element.set(name, str(counts[tag]))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def summary(outcome: Outcome, measured: Measured, base: Baseline, *, most: int = LARGEST_SUMMARY) -> str:
    """Markdown for a job page: the verdict, a table of all checks that did not pass, worst first, and the rest folded.

    Args:
        most: bytes. Rows that do not fit are left out, starting with the best verdicts, and a sentence counts them.
    """
    head = [f"## {ICONS[outcome.verdict]} leakgauge: {headline(outcome)}"]
    each = (("Not comparable", outcome.problems), ("Not accepted", outcome.unaccepted), ("Warning", outcome.warnings))
    head += [""] if any(notes for _, notes in each) else []
    for name, notes in each:
        head += [f"- **{name}:** {escaped(note)}" for note in notes[:_MOST_NOTES]]
        if len(notes) > _MOST_NOTES:
            head.append(f"- {len(notes) - _MOST_NOTES} more")
    fold = ["", "<details><summary>Details</summary>", ""]
    rated = [table_row(map(escaped, rating)) for rating in measured.ratings[:_MOST_NOTES]]
    rated = ["", *table_head(("Defense", "Adversary", "Rating")), *rated, ""] if rated else []
    tail = [_INTERVAL, *rated, "", *_origin(measured, base), "", "</details>", ""]
    top = table_head(_HEADER)
    room = most - _size([*head, *top, *fold, *top, *tail]) - _RESERVED
    moved = sum(check.verdict is not Verdict.PASS for check in outcome.checks)
    measures = base.measured.by_key() | measured.by_key()
    names = titles(measures.values())
    rows: list[str] = []
    for check in sorted(outcome.checks, key=lambda check: check.verdict is Verdict.PASS):
        row = table_row(_fields(check, names.get(check.key, check.name), measures.get(check.key)))
        room -= _size([row])
        if room < 0:
            break
        rows.append(row)
    shown, hidden = rows[:moved], rows[moved:]
    lines = [*head, *(["", *top, *shown] if shown else []), *fold, *([*top, *hidden, ""] if hidden else [])]
    if len(rows) < len(outcome.checks):
        lost = counted(len(outcome.checks) - len(rows), "check")
        lines += [f"{lost} left out here: this page would be too long.", ""]
    return "\n".join([*lines, *tail])


def as_json(outcome: Outcome, measured: Measured, base: Baseline, *, inconclusive_fails: bool = False) -> str:
    """The whole outcome as JSON: a stable order of keys, and null for a missing number."""
    now, before = measured.by_key(), base.measured.by_key()
    checks = []
    for check in outcome.checks:
        measure = now.get(check.key) or before.get(check.key)
        case: dict[str, str | None] = dict.fromkeys(("defense", "attack", "threat", "target", "setting", "control"))
        if measure is not None:
            case |= {name: getattr(measure, name) for name in ("threat", "target", "setting", "control")}
            case["defense"] = part_text(measure.defense)
            case["attack"] = "" if measure.attack is None else part_text(measure.attack)
        checks.append({**dataclasses.asdict(check), "verdict": check.verdict.value, "word": word(check), **case})
    content = {
        "schema": SCHEMA,
        "verdict": outcome.verdict.value,
        "exit_code": outcome.exit_code(inconclusive_fails=inconclusive_fails),
        "headline": headline(outcome),
        "now": measured.source(),
        "baseline": {**base.measured.source(), "reason": base.reason},
        "problems": outcome.problems,
        "unaccepted": outcome.unaccepted,
        "unchanged": outcome.unchanged,
        "warnings": outcome.warnings,
        "ratings": [dict(zip(("defense", "adversary", "rating"), one, strict=True)) for one in measured.ratings],
        "checks": checks,
    }
    return json_text(content)


def annotations(outcome: Outcome) -> list[str]:
    """GitHub workflow commands, worst first, at most ten; the last states how many are left out."""
    commands = [("error", "leakgauge: not comparable", problem) for problem in outcome.problems]
    commands += [("error", "leakgauge: not accepted", change) for change in outcome.unaccepted]
    for check in outcome.checks:
        if check.verdict is not Verdict.PASS:
            level = "error" if check.verdict in (Verdict.FAIL, Verdict.INCOMPLETE) else "warning"
            commands.append((level, f"leakgauge: {word(check)}", f"{check.name}: {check.reason}"))
    commands += [("warning", "leakgauge: warning", warning) for warning in outcome.warnings]
    if len(commands) > MOST_ANNOTATIONS:
        left = commands[MOST_ANNOTATIONS - 1 :]
        level = "error" if any(level == "error" for level, _, _ in left) else "warning"
        commands = [*commands[: MOST_ANNOTATIONS - 1], (level, "leakgauge", f"{len(left)} more: see the summary")]
    return [command(*words) for words in commands]


def number(value: float | None) -> str:
    """A number with three decimals and no minus zero; `n/a` if it is missing."""
    if value is None or not math.isfinite(value):
        return "n/a"
    text = f"{value:.3f}"
    return text.removeprefix("-") if not text.strip("-0.") else text


def signed(value: float | None) -> str:
    """`number` with a plus sign if it is positive."""
    text = number(value)
    return f"+{text}" if value is not None and value > 0 and text.strip("-0.na/") else text


def change(value: float | None, low: float | None, high: float | None) -> str:
    """`+0.065 (+0.047 to +0.083)`; without an interval, the number alone."""
    ends = "" if low is None or high is None else f" ({signed(low)} to {signed(high)})"
    return f"{signed(value)}{ends}"


def numbers(check: Check) -> str:
    """The numbers of a check in one line."""
    parts = [f"before {number(check.before)}", f"now {number(check.now)}"]
    parts.append(f"change {change(check.rise, check.low, check.high)}")
    parts += [f"p {check.p:.2g}"] if check.p is not None else []
    parts.append(f"n {check.n}")
    parts += [f"smallest detectable rise {number(check.smallest)}"] if check.smallest is not None else []
    return ", ".join(parts)


def pictured(images: Sequence[int], measure: Measure | None) -> str:
    """`image 3`, `images 3, 7`, counted from 1 as the report does; with several seeds `image 3 (seed no. 2)`.

    Args:
        images: indices into the values of `measure`, from 0; the first ten are named.
    """
    if not images:
        return ""
    names = image_names(images[:10], measure)
    more = f" and {len(images) - 10} more" if len(images) > 10 else ""
    return f"image{'s' if len(images) > 1 else ''} {', '.join(names)}{more}"


def escaped(text: str) -> str:
    """A text as literal Markdown, cut to a maximum length."""
    return markdown(clipped(text))


def json_text(content: dict[str, Any]) -> str:
    """Multi-line JSON, with null for numbers that are not finite."""
    return spelled(json.dumps(finite(content), indent=1, allow_nan=False)) + "\n"


def finite(data: Any) -> Any:
    """Plain data for JSON, with None for numbers that are not finite."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _fields(check: Check, name: str, measure: Measure | None) -> list[str]:
    images = f" ({pictured(check.images, measure)})" if check.images else ""
    return [
        f"{ICONS[check.verdict]} {word(check)}{images}",
        escaped(name),
        number(check.before),
        number(check.now),
        change(check.rise, check.low, check.high),
        str(check.n),
        number(check.smallest),
        escaped(check.reason),
    ]


def _origin(measured: Measured, base: Baseline) -> list[str]:
    lines = []
    for name, run in (("Now", measured), ("Baseline", base.measured)):
        commit = f"{run.commit}{' with uncommitted changes' if run.dirty else ''}"
        lines.append(f"- {name}: study {escaped(run.study)}, commit {escaped(commit)}, {escaped(run.machine)}")
    return lines + ([f"- Reason of the baseline: {escaped(base.reason)}"] if base.reason else [])


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)
