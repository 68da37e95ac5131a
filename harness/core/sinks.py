"""Output of text: for each sink, the one function that escapes untrusted text.

Names, reasons and messages come from studies, baselines, plug-ins and errors, and are not trusted.

| sink | function | what untrusted text cannot do |
|---|---|---|
| terminal | `say`; `styled` for a table | begin a line, a workflow command or markup |
| GitHub | `command` | end its command or begin another |
| Markdown | `markdown`, `table_row` | end its cell, or be markup, a link or an element |
| JUnit | `line`, `clipped`; the writer of the XML escapes | hold a character that XML forbids |
| HTML | `visible`, by the templates; `element` | be an element, or reverse the direction of the text after it |
| JSON | `spelled` | hold a workflow command |
| CSV | `harmless` | be a formula |
| LaTeX | `latex` | be a command |

No sink shows control characters, lone surrogates or changes of text direction. HTML and JSON spell them out, so JSON
loses no text; the other sinks drop them. Parquet and data frames hold the texts unchanged.
"""

from __future__ import annotations

import html
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from leakgauge.harness.core.cell import Scalar

if TYPE_CHECKING:
    from rich.text import Text

LONGEST = 400
"""Maximum number of characters of a name or a sentence; an error message may hold a whole traceback."""

# Characters that no page can show, that a terminal interprets, or that reverse the direction of the following text
_HIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\ufffe\uffff]"
)
# Start of the older workflow commands `##[error]` and `##vso[...]`, anywhere in a line
_BRACKET = re.compile(r"##(?=\w*\[)")
_COLONS = re.compile(r":(?=:)")
_COMMAND = re.compile(r"\A(\s*):(?=:)")  # the start of a workflow command; a runner drops the space before it
_MARKDOWN = re.compile(r"([\\`*_\[\]{}#|~!$])")
_INSIDE_WORD = re.compile(r"(?<=[^\W_])\\_(?=[^\W_])")
_SIGNS = "=+\\-@\uff1d\uff0b\uff0d\uff20"
# Where a formula or a workflow command could begin. A formula begins at a sign, also at a full-width sign of an East
# Asian keyboard. `;`, tabs and line ends start a new cell where the comma is the decimal mark
_FORMULA = re.compile(rf"\A(?=[{_SIGNS}\t\r\n]|[^\S\r\n]*::)|(?<=[;\t\r\n])(?=[{_SIGNS}]|[^\S\r\n]*::)")
_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_TEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"<": r"\textless{}", ">": r"\textgreater{}"}
_MATH = {"ε": r"\varepsilon", "δ": r"\delta", "∞": r"\infty", "≥": r"\geq", "≤": r"\leq"}
_MATH |= {"−": "-", "·": r"\cdot", "×": r"\times"}
_TEX |= {sign: rf"\ensuremath{{{name}}}" for sign, name in _MATH.items()} | {"–": "--"}

_Text = TypeVar("_Text", bound=str)


def visible(text: _Text) -> _Text:
    """The text with hidden characters spelled out as in JSON: `a\\u202eb`; `Markup` stays `Markup`."""
    return type(text)(_HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)) if _HIDDEN.search(text) else text


def spelled(document: str) -> str:
    """Equivalent JSON without hidden characters, and without workflow commands inside a line."""
    return _BRACKET.sub(r"#\\u0023", visible(document))


def clean(text: str) -> str:
    """The text without hidden characters; tabs and line ends stay."""
    return _BRACKET.sub("# #", _HIDDEN.sub("", text))


def line(text: str) -> str:
    """The cleaned text, on one line that is not a workflow command."""
    return _COMMAND.sub(r"\1: ", clean(" ".join(text.splitlines())).replace("\t", " "))


def clipped(text: str) -> str:
    """`line` with single spaces, cut to `LONGEST` and marked if cut."""
    return cut(" ".join(line(text).split()))


def cut(text: str) -> str:
    """The text, cut to `LONGEST` and marked if it is longer."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def say(*texts: str, err: bool = False) -> None:
    """Print each text on one line, which a terminal shows broken between words. `err`: on standard error."""
    stream = sys.stderr if err else sys.stdout
    any_encoding(stream)
    width = shutil.get_terminal_size().columns if stream.isatty() else 0
    stream.write("".join(f"{row}\n" for text in texts for row in _rows(line(text), width)))
    stream.flush()


def _rows(text: str, width: int) -> list[str]:
    """The text in rows of at most this width without a broken word; in one row if the width is 0."""
    if not 0 < width < len(text):
        return [text]
    inner = " " * (len(text) - len(text.lstrip()) + 2)
    rows = textwrap.wrap(text, width, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)
    return [line(row) for row in rows]


def any_encoding(stream: object) -> None:
    """Let a stream spell out characters that its encoding lacks, as in \\u2265, instead of failing."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="backslashreplace")


def emit(document: str | bytes) -> None:
    """Print a finished document that is already escaped."""
    import typer

    typer.echo(document, nl=False)


def styled(text: str, style: str = "", *, cropped: bool = False) -> Text:
    """A text for rich, without markup. rich may break lines anywhere, so workflow commands are escaped everywhere.

    Args:
        cropped: put the text on one line, which ends in dots if it is too long.
    """
    from rich.text import Text

    whole = _COLONS.sub(": ", clean(line(text) if cropped else text))
    return Text(whole, style=style, overflow="ellipsis" if cropped else None, no_wrap=cropped or None)


def command(level: str, title: str, text: str) -> str:
    """A GitHub workflow command, such as an annotation of the level `error`; the text may have several lines."""
    name = _data(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={name}::{_data(text)}"


def _data(text: str) -> str:
    return cut(clean(text)).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def markdown(text: str, *, bare: bool = False) -> str:
    """A text on one line as literal Markdown, also inside a table.

    Args:
        bare: leave `_` inside a word unescaped, where it has no meaning, for readers of the source.
    """
    plain = _MARKDOWN.sub(r"\\\1", line(text))
    plain = plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _INSIDE_WORD.sub("_", plain) if bare else plain


def table_head(names: Sequence[str]) -> list[str]:
    """The first two lines of a Markdown table."""
    return [table_row(names), table_row(["---"] * len(names))]


def table_row(fields: Iterable[str]) -> str:
    """One line of a Markdown table, from escaped fields."""
    return f"| {' | '.join(fields)} |"


def element(text: str) -> str:
    """A text in HTML that is made without a template."""
    return html.escape(visible(text))


def harmless(value: Scalar) -> str:
    """A value as a CSV field that no spreadsheet runs as a formula: a quote is put before each start of a formula.

    Numbers are unchanged: the number -0.5 comes from results, the text "-0.5" may come from outside.
    """
    if value is None:
        return ""
    return _FORMULA.sub("'", clean(value)) if isinstance(value, str) else str(value)


def latex(text: str) -> str:
    """A text in LaTeX, on one line.

    A leading `[` or `*` is protected; otherwise a row end before it would take it as its argument.
    """
    plain = "".join(_TEX.get(sign, sign) for sign in line(text))
    return f"{{}}{plain}" if plain.lstrip().startswith(("[", "*")) else plain
