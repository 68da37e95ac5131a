"""What leaves the program: no text of a hostile run or baseline is more than a text, in any sink."""

import ast
import csv
import dataclasses
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from leakgauge.harness.cli.progress import _view, logged
from leakgauge.harness.core.rows import COLUMNS, rows
from leakgauge.harness.core.sinks import (
    clean,
    command,
    element,
    harmless,
    latex,
    line,
    markdown,
    spelled,
    styled,
    table_row,
    visible,
)
from leakgauge.harness.gate import compare as comparing
from leakgauge.harness.gate.baseline import Baseline, to_text, write
from leakgauge.harness.gate.judge import Outcome, Rules, Verdict, judge
from leakgauge.harness.gate.measure import measured
from leakgauge.harness.gate.output import annotations, as_json, escaped, junit, summary
from leakgauge.harness.study.jobs import Outcome as Ended
from leakgauge.harness.study.schedule import Progress
from leakgauge.reports.compared import side_by_side, to_json
from leakgauge.reports.export import rows_as, to_jsonl
from leakgauge.reports.html import render
from leakgauge.reports.sections.changes import Against
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.tables import to_matrix
from tests import gate_case
from tests.by_rows import by_rows
from tests.command import call
from tests.hostile import PAYLOADS, hostile_baseline, hostile_folder, hostile_run, poisoned, tame_run
from tests.report_page import Page
from tests.terminal_text import plain

ROOT = Path(__file__).parents[1]
ALL = "".join(PAYLOADS)
RAW = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
OURS = re.compile(r"::(error|warning) title=leakgauge[^:]*::")
FAST = (Phase.explicit, Phase.generate)
"""Shrinking a run takes minutes."""

TEXTS = st.lists(st.sampled_from(PAYLOADS[:-1]) | st.text(max_size=6), min_size=1, max_size=4).map("".join)
PARTS = TEXTS.map(lambda text: text.encode(errors="ignore").decode())
"""Texts of cells: without lone surrogates, which no reader of results accepts."""


def said_well(text, *, ours=0):
    """No hidden character; no line is a workflow command, but for the last so many, which are ours."""
    assert not RAW.search(text)
    assert not re.search(r"##\w*\[", text)
    commands = [one.strip() for one in re.split(r"[\r\n]", text) if one.strip().startswith("::")]
    assert len(commands) == ours
    assert all(OURS.match(one) for one in commands)


def outcome_of(run, base):
    """A comparison with every verdict, each check, problem and warning with the hostile texts."""
    now = measured(run)
    text = base.reason
    found = judge(now, base.measured, Rules())
    checks = tuple(poisoned(gate_case.check(verdict, at), text) for at, verdict in enumerate(Verdict))
    return now, Outcome((*checks, *found.checks), (*found.problems, text), (*found.warnings, text))


TABLE = MarkdownIt("commonmark").enable("table").enable("strikethrough")


def markdown_well(text, *, ours=()):
    """No element, link, picture or code; every row of a table has as many cells as its head."""
    said_well(text)
    tokens = TABLE.parse(text)
    width = column = 0
    for token in tokens:
        assert token.type not in ("fence", "code_block", "hr", "blockquote_open"), token
        if token.type == "html_block":
            assert token.content.strip() in ours
        for child in token.children or ():
            assert child.type in ("text", "strong_open", "strong_close", "softbreak", "text_special"), child
        column = column + 1 if token.type in ("th_open", "td_open") else 0 if token.type == "tr_open" else column
        width = column if token.type == "thead_close" else 0 if token.type == "table_open" else width
        assert token.type != "tr_close" or column == width or not width
    for one in text.splitlines():
        if one.startswith("| "):
            assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", one)) in {
                len(re.findall(r"(?<!\\)(?:\\\\)*\|", head)) for head in text.splitlines() if head.startswith("| ---")
            }


def latex_well(text, columns):
    """Every row has its cells, and no character is active but ours."""
    said_well(text)
    body = text.split("\\endhead\n")[1].split("\\bottomrule")[0]
    caption = re.search(r"\\caption\{(.*)\} \\\\\n", text)
    for one in [*body.splitlines(), *([caption[1]] if caption else [])]:
        row = one.removesuffix(" \\\\")
        assert not row.lstrip().startswith(("[", "*"))
        for name in ("textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater"):
            row = row.replace(f"\\{name}{{}}", "")
        row = re.sub(r"\\[&%$#_{}]", "", row)
        row = re.sub(r"(\A|: |; | & ) *\{\}(?= *[\[*])", r"\1", row)
        assert one not in body.splitlines() or row.count(" & ") == columns - 1
        assert not re.search(r"[\\{}%$#^~<>_&]", row.replace(" & ", ""))


def element_well(text, like):
    """The page has the elements that a page of harmless texts may have, no handler and no address of a stranger."""
    assert not RAW.search(text)
    page, tame = Page(text), Page(like)
    assert page.open == []
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in tame.tags}
    assert {name for _, found in page.tags for name in found} <= {name for _, found in tame.tags for name in found}
    for _, found in page.tags:
        address = found.get("href", found.get("src", "#"))
        assert address.startswith(("#", "data:image/", "data:application/zip"))
    assert page.inline == tame.inline


def table_of(run, found):
    """What the terminal shows of a run, narrow and wide, and of a comparison."""
    buffer = io.StringIO()
    for width in (30, 140):
        Console(file=buffer, width=width).print(side_by_side([found]).terminal(width))
    return buffer.getvalue() + plain(run, width=40) + plain(run, width=200, details=True)


@settings(max_examples=6, phases=FAST)
@given(PARTS, TEXTS)
@example(ALL, ALL + "\ud800")
@example("::error::x", "::error::x")
@pytest.mark.matrix
def test_no_text_of_a_hostile_run_or_baseline_is_more_than_a_text(cells, reason):
    run = dataclasses.replace(hostile_run(cells), name=reason)
    base = dataclasses.replace(hostile_baseline(cells), reason=reason)
    now, outcome = outcome_of(run, base)
    compared = comparing.compare(run, tame_run())
    for text in (table_of(run, compared), rows_as("csv", run).decode(), to_jsonl(Analysis(run))):
        said_well(text)
    said_well(as_json(outcome, now, base) + to_json(compared) + spelled(to_text(base)))
    shown = annotations(outcome)
    said_well("\n".join(shown), ours=len(shown))
    folds = ("<details><summary>Details</summary>", "</details>")
    markdown_well(summary(outcome, now, base), ours=folds)
    few = ["ssim", "auc", "finished", "claimed_epsilon", "audited_epsilon"]
    tables = side_by_side([compared]).markdown(escaped), to_matrix(Analysis(run)), rows_as("md", run, few).decode()
    for text in tables:
        markdown_well(text)
    suite = ElementTree.fromstring(junit(outcome, now).encode())
    assert len(list(suite.iter("testcase"))) == len(outcome.checks) + len(outcome.problems)
    texts = [text for one in suite.iter() for text in (one.text or "", *one.attrib.values())]
    said_well("\n".join(texts) + junit(outcome, now))
    names = ["defense", "note", "quantity"]
    for columns in (names, names[::-1]):
        latex_well(rows_as("tex", run, few, columns).decode(), 3)


@settings(max_examples=5, phases=FAST)
@given(PARTS)
@example(ALL)
def test_a_csv_reads_back_as_the_cleaned_texts_with_no_formula(text):
    run = hostile_run(text)
    lines = list(csv.DictReader(io.StringIO(rows_as("csv", run).decode(), newline="")))
    found = list(rows(run))
    assert len(lines) == len(found)
    for one, row in zip(lines, found, strict=True):
        for name, field in one.items():
            if COLUMNS[name] == "str":
                assert not field.startswith(
                    ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
                )
                assert field.replace("'", "") == clean(row.get(name) or "").replace("'", "")


@pytest.mark.parametrize("text", [ALL, '</script><b>" onload="x'])
@pytest.mark.matrix
def test_a_page_of_hostile_texts_has_no_element_of_theirs(text):
    run, base = hostile_run(text), hostile_baseline(text)
    tame = tame_run()
    like = outcome_of(tame, Baseline(measured(tame), "why"))
    now, outcome = outcome_of(run, base)
    against = Against(outcome, now, base)
    tame_page = render(tame, images="none", against=Against(like[1], like[0], Baseline(like[0], "why")))
    page = render(run, images="none", against=against)
    assert "could not be built" not in page
    element_well(page, tame_page)
    element_well(f"<body>{run._repr_html_()}</body>", f"<body>{tame._repr_html_()}</body>")


def calls(folder, other, base):
    """Every command that shows results, a baseline or a study."""
    yield from (("report", str(folder)), ("report", str(folder), "--against", str(base)))
    yield from (("export", str(folder), "--to", to) for to in ("csv", "tex", "md", "jsonl", "matrix"))
    yield ("export", str(folder), "--to", "csv", "--columns", "defense,note")
    yield from (("compare", str(folder), str(other), "--format", to) for to in ("table", "md", "json"))
    yield from (("check", str(folder), "--baseline", str(base)), ("check", str(other), "--baseline", str(base)))
    yield from (("baseline", "show", str(base)), ("baseline", "show", str(base), "--json"))
    yield ("baseline", "diff", str(base), str(base.with_name("other.json")))
    yield ("baseline", "update", str(folder), "--reason", "x", "--baseline", str(base))


@pytest.mark.matrix
def test_no_command_prints_a_stranger_s_control_characters_or_workflow_commands(tmp_path):
    folder, other = hostile_folder(hostile_run(ALL), tmp_path / "a"), hostile_folder(tame_run(), tmp_path / "b")
    base = tmp_path / "base.json"
    write(hostile_baseline(ALL), base)
    write(hostile_baseline("::stop-commands::t "), tmp_path / "other.json")
    for words in calls(folder, other, base):
        found = call(*words, GITHUB_ACTIONS="true", COLUMNS="60")
        assert found.exception is None or isinstance(found.exception, SystemExit), words
        assert found.output
        commands = sum(one.startswith("::error title=leakgauge") for one in found.output.splitlines())
        assert words[0] == "check" or not commands
        said_well(found.output.replace("::warning title=leakgauge", "-"), ours=commands)
    shown = call("baseline", "show", base, "--json").output
    assert json.loads(shown) == json.loads(base.read_text())


def test_progress_of_hostile_jobs_is_lines_of_text(tmp_path, capsys):
    class Job:
        def text(self, names):
            return ALL

    job = Job()
    ended = Ended(job, 1.0, ALL, ALL, f"Trace\n{ALL}\n{'::error::x'}")  # type: ignore[arg-type]
    progress = Progress(2, running=[job])
    logged(lambda *_: None, tmp_path, verbose=True)(progress, ended)
    said_well(capsys.readouterr().out + (tmp_path / "run.log").read_text())
    assert len((tmp_path / "run.log").read_text().splitlines()) == 2
    buffer = io.StringIO()
    Console(file=buffer, width=40).print(_view(f"{'x' * 40}::error::y {ALL}", progress, [ended]))
    said_well(buffer.getvalue())


@given(TEXTS)
@example(ALL)
def test_each_sink_s_function_leaves_only_text(text):
    for made in (line(text), markdown(text), markdown(text, bare=True), latex(text), styled(text).plain):
        said_well(made)
    for made in (line(text), markdown(text), latex(text)):
        assert len(f"x{made}".splitlines()) == 1
    (only,) = command("error", text, text).splitlines()
    head, title, *_ = only.split("::", 2)[1].partition(" title=")
    assert head == "error"
    assert title
    assert not re.search(r"[:,]", _[0])
    assert TABLE.parse(table_row([markdown(text)] * 3))
    said_well(harmless(text))


@by_rows("gaussian clip=1, epsilon=1e-5", "rose by 0.1 (90: 0.09 to 0.2)", "  a   b", "é 数据 عربي")
def test_a_harmless_text_stays_as_it_is(text):
    every = clean, line, visible, spelled, harmless, latex, element, lambda one: markdown(one, bare=True)
    assert {made(text) for made in every} == {styled(text).plain, text}
    assert markdown("_x_ noise_std, a::b", bare=True) == r"\_x\_ noise_std, a::b"


CHILDREN = frozenset({"harness.gate.rerun", "harness.study.environment"})
"""They read what git and a child process wrote."""

OWNERS = {
    "print": frozenset({"harness.cli.options"}),
    "echo": frozenset({"harness.core.sinks"}),
    "secho": frozenset[str](),
    "stdout": frozenset({"harness.core.sinks", "harness.cli.options", *CHILDREN}),
    "stderr": frozenset({"harness.core.sinks", *CHILDREN}),
    "Text": frozenset({"harness.core.sinks"}),
    "Console": frozenset({"harness.cli.options", "harness.cli.progress"}),
    "Markup": frozenset({"reports.charts.plane", "reports.html", "reports.sections.asked"}),
    "write_text": frozenset[str](),
    "emit": frozenset({"harness.core.sinks", *(f"harness.cli.{name}" for name in ("options", "gate", "report"))}),
    "HTML": frozenset({"harness.cli.progress"}),
    "warn": frozenset({"harness.cli.fixture", "harness.cli.list", "harness.federation.registry"}),
    "escape": frozenset({"harness.core.sinks", "harness.cli.python", "reports.html", "reports.view"}),
}
"""Who may call what a text leaves by. The sinks clean; the others get their texts from the sinks, or own none."""


def uses(source):
    """The names of `OWNERS` that a module calls, or whose methods it calls."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            parts = [one for one in ast.walk(node.func) if isinstance(one, ast.Name | ast.Attribute)]
            found |= {one.id if isinstance(one, ast.Name) else one.attr for one in parts}
    return found & OWNERS.keys()


def test_no_other_path_prints_a_text():
    loose = []
    for path in sorted(
        one for top in ("harness", "reports", "attacks", "defenses") for one in (ROOT / top).rglob("*.py")
    ):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        loose += [(name, use) for use in uses(path.read_text("utf-8")) if name not in OWNERS[use]]
    assert loose == []
    assert uses("sys.stdout.write(x)\nprint(1)\ntyper.echo(2)\nText(3)") == {"stdout", "print", "echo", "Text"}
