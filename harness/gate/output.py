"""What the gate says, for machines and job pages: JUnit XML, a Markdown summary, JSON and workflow annotations.

Names and reasons come from studies and error messages, so nothing here trusts them: control characters go, each form
escapes what it must, and what is too long is cut with a word that says so.
"""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree import ElementTree

from leakgauge.harness.gate.baseline import Baseline
from leakgauge.harness.gate.judge import Check, Outcome, Verdict
from leakgauge.harness.gate.measure import Measure, Measured

SCHEMA = 1
"""Of the JSON; it grows when a field changes its meaning or goes."""

LARGEST_SUMMARY = 900_000
"""Bytes: a job page drops a summary above 1 MiB whole."""

MOST_ANNOTATIONS = 10
"""That a job page shows of one step and level."""

ICONS = {
    Verdict.FAIL: "✕",
    Verdict.INCOMPLETE: "!",
    Verdict.NOT_COMPARABLE: "≠",
    Verdict.INCONCLUSIVE: "?",
    Verdict.PASS: "✓",
}

_TAGS = {
    Verdict.FAIL: "failure",
    Verdict.INCOMPLETE: "error",
    Verdict.INCONCLUSIVE: "skipped",
    Verdict.NOT_COMPARABLE: "skipped",
}
_LEAKS = "leakage increased"
_FAILED = {"epsilon": "audited epsilon too high", "accuracy": "accuracy fell", "bits": "more bits sent"}
_PASSED = {"accuracy": "no loss detected"}
_LONGEST = 400
"""Characters of a name or a sentence; an error message may hold a whole traceback."""

_MOST_NOTES = 20
_RESERVED = 200
"""Bytes for the lines that stand between the parts of a summary."""

_CONTROLS = re.compile(
    "[^\t\n\r\u0020-\u007e\u0085\u00a0-\u2029\u202f-\u2065\u206a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)
"""What XML 1.0 forbids or discourages, lone surrogates among it; and what turns the text that follows it around."""

_MARKDOWN = re.compile(r"([\\`*_\[\]{}#|~!])")
_HEADER = ("Verdict", "Check", "Baseline", "Now", "Change (90 %)", "n", "Smallest detectable", "Why")
_INTERVAL = "Each end of a 90 % interval is a one-sided 95 % bound. p is one-sided and adjusted by Holm over the run."


def word(check: Check) -> str:
    """The verdict of a check in words."""
    if check.verdict is Verdict.FAIL:
        return _FAILED.get(check.metric, "newly recognizable" if check.images else _LEAKS)
    if check.verdict is Verdict.PASS:
        return _PASSED.get(check.metric, "no increase detected")
    return check.verdict.value.lower()


def headline(outcome: Outcome) -> str:
    """The verdict of a comparison in one phrase, with counts."""
    total = counted(len(outcome.checks), "check")
    if outcome.problems:
        return "Not comparable: nothing was checked"
    if not outcome.checks:
        return "Nothing was checked"
    hits = [check for check in outcome.checks if check.verdict is outcome.verdict]
    match outcome.verdict:
        case Verdict.FAIL:
            kinds = Counter(_FAILED.get(check.metric, _LEAKS) for check in hits)
            text = ", ".join(f"{kind} in {kinds[kind]}" for kind in (_LEAKS, *_FAILED.values()) if kind in kinds)
            return f"{text[0].upper()}{text[1:]} of {total}"
        case Verdict.INCOMPLETE:
            return f"Incomplete: {len(hits)} of {total} could not be made"
        case Verdict.NOT_COMPARABLE:
            return f"Not comparable: {len(hits)} of {total}"
        case Verdict.INCONCLUSIVE:
            return f"Inconclusive: {len(hits)} of {total}"
        case Verdict.PASS:
            return f"No increase detected in {total}"


def junit(outcome: Outcome, measured: Measured) -> str:
    """JUnit XML: one test case a check, its class the defense and its name the key.

    | verdict | element |
    |---|---|
    | FAIL | failure |
    | INCOMPLETE, a problem of the whole comparison | error |
    | INCONCLUSIVE, NOT COMPARABLE | skipped |
    | PASS | none |

    Guarantees:
        Well-formed for every text in the outcome; characters that XML forbids are left out.
        Same arguments, same text: no date, no host.
    """
    root = ElementTree.Element("testsuites", name="leakgauge")
    suite = ElementTree.SubElement(root, "testsuite", name=clean(f"leakgauge check: {measured.study}"))
    counts: Counter[str] = Counter()
    known, names = measured.by_key(), titles(measured.measures)
    for at, problem in enumerate(outcome.problems, 1):
        case = ElementTree.SubElement(suite, "testcase", classname="comparison", name=f"problem {at}")
        counts["error"] += 1
        ElementTree.SubElement(case, "error", message=clipped(problem), type=Verdict.NOT_COMPARABLE.value)
    for check in outcome.checks:
        # a check that the run lacks has only its key, which begins with the defense
        defense = known[check.key].defense if check.key in known else check.key.split("/")[0]
        case = ElementTree.SubElement(suite, "testcase", classname=clipped(defense), name=clean(check.key))
        text = f"{clipped(names.get(check.key, check.name))}\n{numbers(check)}"
        tag = _TAGS.get(check.verdict)
        if tag is None:
            ElementTree.SubElement(case, "system-out").text = text
        else:
            counts[tag] += 1
            found = ElementTree.SubElement(case, tag, message=clipped(check.reason), type=check.verdict.value)
            found.text = text
    if outcome.warnings:
        ElementTree.SubElement(suite, "system-err").text = "\n".join(map(clipped, outcome.warnings))
    totals = {"failure": "failures", "error": "errors", "skipped": "skipped"}
    for element in (root, suite):
        element.set("tests", str(len(outcome.problems) + len(outcome.checks)))
        for tag, name in totals.items():
            element.set(name, str(counts[tag]))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def summary(outcome: Outcome, measured: Measured, base: Baseline, *, most: int = LARGEST_SUMMARY) -> str:
    """Markdown for a job page: the verdict, what is not a pass as a table, worst first, and the rest to unfold.

    Args:
        most: bytes. Rows that do not fit are left out, the best ones first, and a sentence counts them.
    """
    head = [f"## {ICONS[outcome.verdict]} leakgauge: {headline(outcome)}"]
    head += [""] if outcome.problems or outcome.warnings else []
    for name, notes in (("Not comparable", outcome.problems), ("Warning", outcome.warnings)):
        head += [f"- **{name}:** {escaped(note)}" for note in notes[:_MOST_NOTES]]
        if len(notes) > _MOST_NOTES:
            head.append(f"- {len(notes) - _MOST_NOTES} more")
    fold = ["", "<details><summary>Details</summary>", ""]
    tail = [_INTERVAL, "", *_origin(measured, base), "", "</details>", ""]
    top = table_head(_HEADER)
    room = most - _size([*head, *top, *fold, *top, *tail]) - _RESERVED
    moved = [check for check in outcome.checks if check.verdict is not Verdict.PASS]
    passed = [check for check in outcome.checks if check.verdict is Verdict.PASS]
    measures = base.measured.by_key() | measured.by_key()
    names = titles(measures.values())
    rows: list[str] = []
    for check in (*moved, *passed):
        row = table_row(_fields(check, names.get(check.key, check.name), measures.get(check.key)))
        room -= _size([row])
        if room < 0:
            break
        rows.append(row)
    shown, hidden = rows[: len(moved)], rows[len(moved) :]
    lines = [*head, *(["", *top, *shown] if shown else []), *fold, *([*top, *hidden, ""] if hidden else [])]
    if len(rows) < len(outcome.checks):
        lost = counted(len(outcome.checks) - len(rows), "check")
        lines += [f"{lost} left out here: this page would be too long.", ""]
    return "\n".join([*lines, *tail])


def as_json(outcome: Outcome, measured: Measured, base: Baseline, *, inconclusive_fails: bool = False) -> str:
    """All that the gate found, for programs: a stable order of keys, and null for a number that is none."""
    now, before = measured.by_key(), base.measured.by_key()
    checks = []
    for check in outcome.checks:
        measure = now.get(check.key) or before.get(check.key)
        case = {
            name: None if measure is None else getattr(measure, name)
            for name in ("defense", "attack", "threat", "target", "setting", "control")
        }
        checks.append({**dataclasses.asdict(check), "verdict": check.verdict.value, "word": word(check), **case})
    said = {
        "schema": SCHEMA,
        "verdict": outcome.verdict.value,
        "exit_code": outcome.exit_code(inconclusive_fails=inconclusive_fails),
        "headline": headline(outcome),
        "now": _source(measured),
        "baseline": {**_source(base.measured), "noise_sd": base.noise_sd, "reason": base.reason},
        "problems": outcome.problems,
        "warnings": outcome.warnings,
        "checks": checks,
    }
    return json.dumps(finite(said), indent=1, allow_nan=False) + "\n"


def annotations(outcome: Outcome) -> list[str]:
    """GitHub workflow commands, worst first, at most ten; the last says how many there are beside them."""
    found = [("error", "leakgauge: not comparable", problem) for problem in outcome.problems]
    for check in outcome.checks:
        if check.verdict is not Verdict.PASS:
            level = "error" if check.verdict in (Verdict.FAIL, Verdict.INCOMPLETE) else "warning"
            found.append((level, f"leakgauge: {word(check)}", f"{check.name}: {check.reason}"))
    found += [("warning", "leakgauge: warning", warning) for warning in outcome.warnings]
    if len(found) > MOST_ANNOTATIONS:
        left = found[MOST_ANNOTATIONS - 1 :]
        level = "error" if any(level == "error" for level, _, _ in left) else "warning"
        found = [*found[: MOST_ANNOTATIONS - 1], (level, "leakgauge", f"{len(left)} more: see the summary")]
    return [f"::{level} title={_property(title)}::{_data(text)}" for level, title, text in found]


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many decimals and no minus zero; `n/a` where there is none."""
    if value is None or not math.isfinite(value):
        return "n/a"
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if not text.strip("-0.") else text


def signed(value: float | None, digits: int = 3) -> str:
    """The same with a plus where it is positive."""
    text = number(value, digits)
    return f"+{text}" if value is not None and value > 0 and text.strip("-0.na/") else text


def change(value: float | None, low: float | None, high: float | None) -> str:
    """`+0.065 (+0.047 to +0.083)`, without the brackets where there is no interval."""
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
    seeds = len(measure.items) if measure is not None else 1
    size = len(measure.values) // seeds if measure is not None and seeds > 1 else 0
    names = [f"{at % size + 1} (seed no. {at // size + 1})" if size else str(at + 1) for at in images[:10]]
    more = f" and {len(images) - 10} more" if len(images) > 10 else ""
    return f"image{'s' if len(images) > 1 else ''} {', '.join(names)}{more}"


def titles(measures: Iterable[Measure]) -> dict[str, str]:
    """By key, what a measure is called among these: of defenses and attacks only the parameters in which they differ.

    Where there are several settings, each name ends in its own; what is still alike has the end of its key.
    """
    known = {measure.key: measure for measure in measures}
    short = _shortened(list(dict.fromkeys(label for one in known.values() for label in (one.defense, one.attack))))
    several = len({one.setting for one in known.values()}) > 1
    found = {}
    for key, one in known.items():
        named = dataclasses.replace(one, defense=short[one.defense], attack=short[one.attack])
        found[key] = f"{named.name} ({one.setting})" if several else named.name
    counts = Counter(found.values())
    return {key: f"{name} [{key[-6:]}]" if counts[name] > 1 else name for key, name in found.items()}


def _shortened(labels: Sequence[str]) -> dict[str, str]:
    """`name(key=value, ...)` without what all labels of that name share; another form stays as it is."""
    parts = {}
    for label in labels:
        name, _, inside = label.partition("(")
        pairs = inside.removesuffix(")").split(", ")
        if inside.endswith(")") and all("=" in pair for pair in pairs):
            parts[label] = (name, pairs)
    shared = {
        name: set.intersection(*(set(pairs) for other, pairs in parts.values() if other == name))
        for name in dict.fromkeys(name for name, _ in parts.values())
    }
    found = {label: label for label in labels}
    for label, (name, pairs) in parts.items():
        left = ", ".join(pair for pair in pairs if pair not in shared[name])
        found[label] = f"{name}({left})" if left else name
    return found


def counted(count: int, noun: str) -> str:
    """`1 check`, `2 checks`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def clean(text: str) -> str:
    """Without the characters that XML forbids and those that a terminal would act on."""
    return _CONTROLS.sub("", text)


def clipped(text: str) -> str:
    """Clean, on one line and not too long."""
    return _cut(" ".join(clean(text).split()))


def escaped(text: str) -> str:
    """A text as one piece of Markdown that means nothing but itself, also inside a table."""
    plain = _MARKDOWN.sub(r"\\\1", clipped(text))
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def table_head(names: Sequence[str]) -> list[str]:
    """The first two lines of a Markdown table."""
    return [table_row(names), table_row(["---"] * len(names))]


def table_row(fields: Iterable[str]) -> str:
    """One line of a Markdown table; the fields are escaped already."""
    return f"| {' | '.join(fields)} |"


def finite(data: Any) -> Any:
    """Plain data for JSON: numbers that are not finite become None."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _cut(text: str) -> str:
    """Not too long."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _fields(check: Check, name: str, measure: Measure | None) -> list[str]:
    """The columns of a check in the summary."""
    seen = f" ({pictured(check.images, measure)})" if check.images else ""
    return [
        f"{ICONS[check.verdict]} {word(check)}{seen}",
        escaped(name),
        number(check.before),
        number(check.now),
        change(check.rise, check.low, check.high),
        str(check.n),
        number(check.smallest),
        escaped(check.reason),
    ]


def _origin(measured: Measured, base: Baseline) -> list[str]:
    """What was compared."""
    lines = []
    for name, one in (("Now", measured), ("Baseline", base.measured)):
        commit = f"{one.commit}{' with uncommitted changes' if one.dirty else ''}"
        lines.append(f"- {name}: study {escaped(one.study)}, commit {escaped(commit)}, {escaped(one.machine)}")
    if base.reason:
        lines.append(f"- Reason of the baseline: {escaped(base.reason)}")
    return lines


def _source(measured: Measured) -> dict[str, Any]:
    """Where the numbers of a run come from."""
    names = ("study", "study_hash", "commit", "dirty", "machine", "data", "packages")
    return {name: getattr(measured, name) for name in names}


def _size(lines: Sequence[str]) -> int:
    """Bytes of these lines, each with its end."""
    return sum(len(line.encode()) + 1 for line in lines)


def _data(text: str) -> str:
    """The message of a workflow command; it may have lines."""
    return _cut(clean(text)).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """A property of a workflow command."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
