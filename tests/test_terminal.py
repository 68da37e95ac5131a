"""What a terminal shows: no word is broken at 80 columns, in no command; the help; the progress."""

import contextlib
import io
import re
import shutil
import sys
import textwrap
import tomllib
from dataclasses import replace

import pytest
from typer.main import get_command

from leakgauge.harness.cli.main import app, main
from leakgauge.harness.cli.options import EXITS
from leakgauge.harness.core.labels import Names
from leakgauge.harness.study.study import resolve
from tests.command import call

STUDY = textwrap.dedent("""
    name = "narrow"
    title = "A study with a title of several words"
    tasks = [{data = "digits", model = "mlp-small"}]
    federations = [{clients = 3, rounds = 2, samples = 90, test_samples = 40, algorithm = "fedsgd"}]
    defenses = [{name = "none"}, {name = "gaussian", epsilon = [8.0, 200.0]}]
    lineup = 8
    [[attacks]]
    name = "prior"
    target = {count = 2}
    [[attacks]]
    name = "membership-loss"
    target = {kind = "members", count = 10}
""")


def pages(command, words=()):
    """The words before `--help` of every help page."""
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from pages(inner, (*words, name))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    """The lines that a command shows on a terminal of this width, without colors."""

    def show(columns, *words):
        stream = Terminal()
        with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
            for name in ("stdout", "stderr"):
                patch.setattr(sys, name, stream)
            patch.setattr(sys, "argv", ["leakgauge", *words])
            patch.setenv("COLUMNS", str(columns))
            patch.setenv("TERM", "xterm")
            main()
        return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stream.getvalue()).splitlines()

    return show


def words_of(lines):
    """The words, without frames and without numbers, some of which are times."""
    found = re.sub("[─-╿]", " ", "\n".join(lines)).split()
    return {word.rstrip(":") for word in found if re.search("[a-zA-Z]", word) and len(word) < 80}


def check_narrow(shown, *words):
    narrow, wide = shown(80, *words), shown(200, *words)
    assert wide
    assert words_of(wide) <= words_of(narrow)
    assert [line for line in narrow if len(line.rstrip()) > 80 and len(line.split()) > 1] == []


@pytest.mark.parametrize("words", list(pages(get_command(app))), ids=" ".join)
def test_no_word_of_a_help_page_is_broken_at_80_columns(words, shown):
    check_narrow(shown, *words, "--help")


COMMANDS = [words for words in pages(get_command(app)) if words and words != ("baseline",)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_ends_with_examples_of_the_command_and_its_exit_codes(words, shown):
    lines = [line.strip() for line in shown(120, *words, "--help")]
    at, exits = lines.index("Examples:"), lines.index("Exit codes:")
    options = {opt for parameter in command_of(words).params for opt in parameter.opts}
    for example in lines[at + 1 : exits - 1]:
        assert example.split()[: len(words) + 1] == ["leakgauge", *words]
        assert {word for word in example.split() if word.startswith("-")} <= options
    codes = dict(line.split(maxsplit=1) for line in lines[exits + 1 :] if line)
    assert codes.items() <= {str(code): text for code, text in EXITS.items()}.items()
    assert {"0", "2", "70", "130"} <= codes.keys()


def command_of(words):
    command = get_command(app)
    for word in words:
        command = command.commands[word]
    return command


def test_a_flag_has_no_type_and_the_commands_are_in_groups(shown):
    text = "\n".join(shown(80, "run", "--help"))
    assert re.search(r"--dry-run {3,}Only show the cells", text)
    assert "<bool>" not in "".join(line for words in pages(get_command(app)) for line in shown(80, *words, "--help"))
    panels = re.findall("╭─ ([A-Z].*?) ─", "\n".join(shown(80, "--help")))
    assert panels == ["Options", "Measure leakage", "Results", "Defenses, attacks and claims", "Gate (for CI)"]


def test_names_hold_what_differs_and_of_no_cells_everything():
    cells = resolve(tomllib.loads(STUDY)).cells
    names, full = Names(cells), Names()
    by_loss = [cell for cell in cells if cell.attack.name == "membership-loss"]
    assert [names.cell(cell) for cell in by_loss] == [
        f"{defense} under membership-loss, server, members"
        for defense in ("no defense", "gaussian epsilon=8", "gaussian epsilon=200")
    ]
    assert names.training(by_loss[1].training) == "gaussian epsilon=8"
    assert Names(by_loss).cell(by_loss[1]) == "gaussian epsilon=8 under membership-loss"
    assert full.training(by_loss[1].training) == "gaussian clip=1, epsilon=8, delta=1e-5, seed 0"
    other = replace(by_loss[0], training=replace(by_loss[0].training, seed=1))
    assert Names([by_loss[0], other]).cell(other) == "no defense under membership-loss, seed 1"
    wider = replace(other.training, federation=replace(other.training.federation, clients=2))
    assert "2 clients, 2 rounds, fedsgd" in Names([other, replace(other, training=wider)]).training(wider)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A study, its results, other results and a baseline."""
    at = tmp_path_factory.mktemp("terminal")
    (at / "narrow.toml").write_text(STUDY)
    done = call("run", at / "narrow.toml", "-o", at / "out", "--workers", 0)
    assert done.exit_code == 0, done.output
    (at / "said").write_text(done.stdout)
    shutil.copytree(at / "out", at / "other")
    done = call("baseline", "update", at / "out", "--reason", "x", "--baseline", at / "base.json", CI="")
    assert done.exit_code == 0, done.output
    return at


@pytest.mark.matrix
def test_a_progress_line_is_short_and_has_n_and_the_log_has_all_parameters(folder):
    lines = [line for line in (folder / "said").read_text().splitlines() if " done " in line]
    assert len(lines) == 15
    assert max(map(len, lines)) < 140
    assert any(
        re.search(r"gaussian epsilon=8 under membership-loss, server, members: auc 0\.\d+ \(n 20\)$", line)
        for line in lines
    )
    log = (folder / "out" / "run.log").read_text()
    assert "gaussian clip=1, epsilon=8, delta=1e-5 under membership-loss, server, members, seed 0: auc" in log


@pytest.mark.matrix
def test_details_add_a_row_for_each_attack(folder):
    plain, more = call("report", folder / "out").output, call("report", folder / "out", "--details").output
    assert "What each attack found" in more
    assert "What each attack found" not in plain
    assert plain.count("membership-loss") == 0
    assert more.count("membership-loss") == 3


@pytest.mark.matrix
@pytest.mark.parametrize(
    "words",
    [
        ("report", "out"),
        ("report", "out", "--details"),
        ("compare", "out", "other"),
        ("check", "out", "--baseline", "base.json", "--target", "none", "--accept-baseline", "x"),
        ("baseline", "show", "base.json"),
        ("show", "narrow.toml"),
        ("run", "narrow.toml", "-o", "out", "--dry-run"),
        ("list", "defenses"),
        ("list", "attacks"),
        ("list", "tasks"),
        ("list", "studies"),
        ("claim", "gaussian"),
        ("audit", "gaussian", "--trials", "20"),
        ("doctor", "none"),
    ],
    ids=" ".join,
)
def test_no_word_of_what_a_command_prints_is_broken_at_80_columns(words, shown, folder, monkeypatch):
    monkeypatch.chdir(folder)
    check_narrow(shown, *words)
