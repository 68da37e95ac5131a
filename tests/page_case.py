"""The code blocks of the README and of docs/, and how they are run: as a reader runs them, in their order.

A block with a title is a file that the reader writes. A block of `sh` runs in bash. Blocks of `python` share their
names. A block of `text` after one of these shows lines that it prints.
A block below `<!-- needs flwr -->` runs where this package is installed.
"""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(
    r"(?:<!-- (?P<wait>needs \w+) -->\n)?"
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\\?\.\d+)?(?:e\\?-?\d+)?")
_ELSEWHERE = ("make", "pip", "docker")
"""Commands that set up a machine: other tests look at them."""


class Block(NamedTuple):
    """A code block; `line` of its page, `title`: the file that it is, `waits`: it needs a package that is not here."""

    language: str
    code: str
    title: str
    waits: bool
    line: int


def name_of(page):
    """The path of a page, as its links have it."""
    return page.relative_to(ROOT).as_posix()


def blocks(page, *languages):
    text = page.read_text("utf-8")
    found = [
        Block(
            match["language"],
            match["code"],
            match["title"] or "",
            _waits(match["wait"]),
            text.count("\n", 0, match.start("language")) + 1,
        )
        for match in _FENCE.finditer(text)
    ]
    return [block for block in found if not languages or block.language in languages]


def _waits(what):
    """Whether the package that a block needs is not here."""
    return what is not None and importlib.util.find_spec(what.split()[1]) is None


def commands(page):
    """The commands of a page as words: those in shell blocks, and those in indented lines."""
    text = page.read_text("utf-8")
    shell = "\n".join(block.code for block in blocks(page, "sh") if not block.waits)
    lines = shell.replace("\\\n", " ").splitlines()
    indented = re.findall(r"^    ((?:leakgauge|python) .*)$", text, re.MULTILINE)
    split = [shlex.split(line, comments=True) for line in (*lines, *indented)]
    return [bare for words in split if (bare := [word for word in words if not re.match(r"[A-Z_]+=", word)])]


def play(page, at):
    """Run the blocks of a page in the folder `at`, which is the working directory and on the path of imports."""
    names, printed = {"__name__": "page"}, None
    for block in blocks(page):
        if block.waits:
            continue
        if block.title:
            (at / block.title).parent.mkdir(parents=True, exist_ok=True)
            (at / block.title).write_text(block.code, "utf-8")
        elif block.language == "python":
            with _importing(at):
                printed = _python(page, block, names)
        elif block.language == "sh":
            printed = _shell(page, block, at)
        elif block.language == "text" and printed is not None:
            missing = lines_missing(block.code, printed)
            assert not missing, f"{name_of(page)}:{block.line}: not printed: {missing[0]!r}, but:\n{printed}"
            printed = None


def lines_missing(shown, printed):
    """The shown lines that were not printed, in this order; see `alike`."""
    rest = iter(printed.splitlines())
    wanted = [line for line in shown.splitlines() if line.strip() not in ("", "...")]
    return [line for line in wanted if not any(alike(line, have) for have in rest)]


def alike(shown, printed):
    """Whether a printed line is the shown one, up to spaces, and up to last digits: they differ between machines.

    `...` in the shown line stands for anything.
    """
    words = ".*".join(_NUMBER.sub("(N)", re.escape(" ".join(part.split()))) for part in shown.split("..."))
    found = re.fullmatch(words.replace("(N)", f"({_NUMBER.pattern})"), " ".join(printed.split()))
    numbers = _NUMBER.findall(re.escape(shown))
    return found is not None and all(map(_near, numbers, found.groups()))


def _near(shown, printed):
    """Whether two numbers differ by at most 2 %, or by 0.01."""
    one, other = (float(number.replace("\\", "").replace(",", "")) for number in (shown, printed))
    return abs(one - other) <= max(0.01, 0.02 * abs(one)) + 1e-9


@contextlib.contextmanager
def _importing(at):
    """The folder `at` is on the path of imports, and its modules are forgotten in the end."""
    sys.path.insert(0, str(at))
    try:
        yield
    finally:
        sys.path.remove(str(at))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(f"{at}{os.sep}"):
                del sys.modules[name]


def _python(page, block, names):
    code = "\n" * block.line + block.code  # tracebacks then name the line of the page
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, str(page), "exec"), names)
    return out.getvalue()


def _shell(page, block, at):
    script = "\n".join(line for line in block.code.splitlines() if line.split(" ")[0] not in _ELSEWHERE)
    script = script.replace("PYTHONPATH=.", f"PYTHONPATH=.{os.pathsep}{ROOT}")  # this checkout, installed or not
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {key: value for key, value in os.environ.items() if key != "LEAKGAUGE_ALLOW_CODE"}
    environment |= {"PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    done = subprocess.run(["bash", "-euc", script], cwd=at, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{name_of(page)}:{block.line}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr
