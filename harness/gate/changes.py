"""What a change of code may affect: its files, the parts of a study behind them, lines that nothing ran, new choices.

Files are read, never imported.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from leakgauge.harness.core.cell import Cell, PartSpec
from leakgauge.harness.core.code import named_code, task_code
from leakgauge.harness.core.threats import View
from leakgauge.harness.gate.rerun import committed, git
from leakgauge.harness.study.environment import named_modules

_COMPILED = (".so", ".pyc", ".pyd", ".dylib", ".a", ".o")
_PROSE = (".md", ".rst")
_RUNS = (".py", ".c", ".h", ".pth", *_COMPILED)

_BUILD = ("pyproject.toml", "setup.py", "setup.cfg", "Makefile", "constraints.txt")

_DECIDING = ("leakgauge/", "harness/", *_BUILD)
"""What runs and measures defenses, and computes and prints the verdict, in this project's repository."""

_EVERY_CELL = ("leakgauge.harness.study.run", "leakgauge.harness.study.fingerprints")
"""What they import is behind every cell of a study."""


@dataclass(frozen=True)
class Changes:
    """The changed code of the working tree.

    Attributes:
        before: the commit that it is compared with.
        digests: of the content of each changed file of code, by its path in the repository; empty for a removed file.
        others: the same of all other changed files, which code may read.
    """

    before: str
    digests: dict[str, str]
    others: dict[str, str]
    root: Path

    @property
    def deciding(self) -> list[str]:
        """Changed files that decide the verdict, and compiled code, which nobody can review.

        In another repository than this project's, only compiled code.
        """
        own = (self.root / "leakgauge" / "__init__.py").is_file()
        named = [file for file in self.digests if own and file.startswith(_DECIDING)]
        edited = [file for file in named if _meaning(_content(self.root / file)) != _meaning(self.committed(file))]
        return edited + [file for file in self.digests if file.endswith(_COMPILED)]

    def committed(self, file: str) -> bytes | None:
        """The content before; None: there was no such file."""
        return committed(self.before, file)


def changes_since(before: str) -> Changes:
    """The files that differ between a commit and the working tree of the repository around this folder.

    Raises:
        StudyError: git fails.
    """
    root = Path(git("rev-parse", "--show-toplevel"))
    names = git("diff", "--name-only", "-z", "--no-renames", before, "--", ":/").split("\0")
    names += git("ls-files", "-z", "--others", "--exclude-standard", "--full-name", ":/").split("\0")
    digests, others = dict[str, str](), dict[str, str]()
    for name in sorted(filter(None, names)):
        if name.endswith(_PROSE):
            continue
        content = _content(root / name)
        runs = name.endswith(_RUNS) or name in _BUILD or (root / name).is_symlink()
        (digests if runs else others)[name] = "" if content is None else hashlib.sha256(content).hexdigest()[:16]
    return Changes(before, digests, others, root)


@dataclass(frozen=True)
class Behind:
    """The changed files behind the parts of a study.

    Attributes:
        every: files behind every cell.
        defenses, attacks: further files, by the key of the part.
    """

    every: tuple[str, ...]
    defenses: dict[str, tuple[str, ...]]
    attacks: dict[str, tuple[str, ...]]

    def concerns(self, cell: Cell) -> bool:
        """Whether a changed file is behind a cell."""
        return bool(self.every or self.defenses.get(cell.training.defense.key) or self.attacks.get(cell.attack.key))

    @property
    def files(self) -> dict[str, list[str]]:
        """The parts that each file is behind."""
        found: dict[str, list[str]] = {file: ["every cell"] for file in self.every}
        for key, files in [*self.defenses.items(), *self.attacks.items()]:
            for file in files:
                found.setdefault(file, []).append(key)
        return found


def behind(changes: Changes, cells: Iterable[Cell], roots: Sequence[Path]) -> Behind:
    """The parts of a study that import a changed file, wherever the import stands, or whose code names it.

    Args:
        roots: the folder of the repository, then further folders in which its modules are searched.
    """
    find = functools.cache(functools.partial(_imports, tuple(roots)))

    def files(modules: Iterable[str]) -> frozenset[str]:
        """The changed files behind modules."""
        found = _closure(modules, find)
        texts = [content for file in found if (content := _content(roots[0] / file))] if changes.others else []
        read = {name for name in changes.others if any(Path(name).name.encode() in text for text in texts)}
        return frozenset(found & changes.digests.keys() | read)

    every, tasks = files(_EVERY_CELL), set[str]()
    defenses, attacks = dict[str, tuple[str, ...]](), dict[str, tuple[str, ...]]()
    for cell in cells:
        spec = cell.training
        for table, kind, part in ((defenses, "defense", spec.defense), (attacks, "attack", cell.attack)):
            if part.key not in table:
                table[part.key] = tuple(sorted(files(_modules(kind, part)) - every))
        tasks |= set(task_code(spec.task.model, spec.task.data, spec.task.loss))
        tasks |= set(task_code("", View.parse(cell.threat).other))
    every |= files(name.partition(":")[0] for name in tasks)
    return Behind(tuple(sorted(every)), defenses, attacks)


def _modules(kind: str, part: PartSpec) -> Iterator[str]:
    for name in (*part.name.split("+"), *named_code(part.parameters.values())):
        yield name.partition(":")[0] if ":" in name else f"leakgauge.{kind}s.{name.replace('-', '_')}"


def _closure(modules: Iterable[str], find: functools._lru_cache_wrapper[tuple[str, tuple[str, ...]]]) -> set[str]:
    """The files, by their paths in the repository, behind modules."""
    todo, seen, files = [*modules], set[str](), set[str]()
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            file, names = find(name)
            files |= {file} - {""}
            todo += names
    return files


def _imports(roots: tuple[Path, ...], module: str) -> tuple[str, tuple[str, ...]]:
    """The file of a module in a repository, and the modules that it names; nothing if it lies elsewhere."""
    inner = module.replace(".", "/")
    for root in roots:
        for end in (".py", "/__init__.py"):
            path = root / f"{inner}{end}"
            if path.is_file() and (real := path.resolve()).is_relative_to(roots[0].resolve()):
                package = module if end == "/__init__.py" else module.rpartition(".")[0]
                return real.relative_to(roots[0].resolve()).as_posix(), tuple(named_modules(real.read_bytes(), package))
    return "", ()


def new_lines(changes: Changes, files: Iterable[str]) -> dict[str, set[int]]:
    """The changed lines of these files that have to run, by file.

    A line counts if it begins a statement that does more than raise an error, outside functions that stood anywhere in
    the changed files before.
    """
    known = {text for name in changes.digests for text in _functions(changes.committed(name))}
    found = dict[str, set[int]]()
    for name in (name for name in files if name.endswith(".py")):
        content, before = _content(changes.root / name) or b"", changes.committed(name) or b""
        found[name] = _lines(content, known) & _edited(before, content)
    return {name: lines for name, lines in found.items() if lines}


def new_choices(changes: Changes, files: Iterable[str]) -> dict[str, list[int]]:
    """The lines of these files with a choice that the changed files did not have before, by file.

    A choice may turn out otherwise for other clients, rounds, sizes or machines than those of a replay: a comparison, a
    minimum, a slice, a remainder, what only some clients or rounds are, or what is read from the machine. Choices are
    counted by their kind and constants, so that one that moved, or whose variables have other names, is not new.
    """
    before = Counter(key for name in changes.digests for key, _ in _choices(changes.committed(name) or b""))
    found = dict[str, list[int]]()
    for name in (name for name in files if name.endswith(".py")):
        for key, line in _choices(_content(changes.root / name) or b""):
            before[key] -= 1
            if before[key] < 0:
                found.setdefault(name, []).append(line)
    return {name: sorted(set(lines)) for name, lines in found.items()}


_SELECTS = re.compile(
    "min|max|clip|clamp.*|where|minimum|maximum|sign|heaviside|relu|floor.*|ceil|round|trunc|int|bool|any|all|get|pop|"
    "getattr|hasattr|isinstance|searchsorted|bucketize|fmod|remainder|isclose|allclose|equal|nonzero|masked_.*|index_fill|"
    "sigmoid|tanh|softplus|erf|islice|takewhile|next|attrgetter|itemgetter|methodcaller|from_bytes|not_|"
    "lt|le|gt|ge|eq|ne|less.*|greater.*|logical_.*|__.*__"
)
"""Functions whose results are the same for many arguments, and different for others."""

_MACHINE = re.compile(
    "environ.*|getenv|open|read_.*|exists|is_file|eval|exec|compile|globals|locals|vars|dir|id|hash|import_module|time.*|"
    "monotonic.*|perf_counter.*|process_time.*|now|today|getpid|gethostname|cpu_count|argv|stack|_getframe|gettrace|"
    "settrace|modules|platform|uname|urandom|default_rng|current_.*|os|sys|random|socket|inspect|gc|ctypes|subprocess|"
    "threading|datetime|traceback|importlib|builtins|__.*__"
)
"""Names of what differs between machines and processes."""

_WHO = re.compile("number|samples|rounds?|clients|participants|senders?|path")
"""Attributes that differ between clients or rounds."""

_OPERATORS = (ast.FloorDiv, ast.Mod, ast.Pow, ast.BitAnd, ast.BitOr, ast.BitXor, ast.LShift, ast.RShift)


def _choices(content: bytes) -> Iterator[tuple[tuple[object, ...], int]]:
    """Kind and constants of each choice, with its line; a condition that only leads to an error is none."""
    todo: list[ast.AST] = [_parsed(content) or ast.Module([], [])]
    while todo:
        node = todo.pop()
        if _guards(node):
            continue
        parts: list[ast.AST] = []
        if isinstance(node, _DEFINED):
            parts = [
                *node.decorator_list,
                *node.body,
                *node.args.defaults,
                *(each for each in node.args.kw_defaults if each),
            ]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.target, *([node.value] if node.value else [])]
        todo += parts or ast.iter_child_nodes(node)
        if (key := _choice(node)) is not None:
            yield key, getattr(node, "lineno", 0)


def _guards(node: ast.AST) -> bool:
    """Whether a statement only raises an error, and its condition calls nothing that could change a value."""
    raises = isinstance(node, ast.If) and not node.orelse and all(isinstance(each, ast.Raise) for each in node.body)
    if not isinstance(node, ast.If | ast.Assert) or not (raises or isinstance(node, ast.Assert)):
        return False
    inner = [*ast.walk(node.test)]
    calls = {ast.unparse(each.func) for each in inner if isinstance(each, ast.Call)}
    return calls <= {"len", "abs", "isinstance"} and not any(isinstance(each, ast.NamedExpr) for each in inner)


def _choice(node: ast.AST) -> tuple[object, ...] | None:
    key, beside = tuple[object, ...](), list[ast.AST | None]()
    if isinstance(node, ast.Compare):
        key, beside = ("compare", *(type(each) for each in node.ops)), [node.left, *node.comparators]
    elif isinstance(node, ast.If | ast.IfExp | ast.While | ast.Match | ast.BoolOp | ast.ExceptHandler):
        key = ("if",)
    elif isinstance(node, ast.comprehension) and node.ifs:
        key = ("if", len(node.ifs))
    elif isinstance(node, ast.Slice):
        key, beside = ("slice",), [node.lower, node.upper, node.step]
    elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, _OPERATORS):
        beside = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
        key = (type(node.op),)
    elif isinstance(node, ast.Call) and _SELECTS.fullmatch(name := _last(node.func)):
        key, beside = ("call", name), [*node.args]
    elif isinstance(node, ast.Name | ast.Attribute | ast.alias) and not isinstance(
        getattr(node, "ctx", None), ast.Store
    ):
        name, who = _last(node), isinstance(node, ast.Attribute) and _WHO.fullmatch(_last(node))
        key = ("reads", name) if who or _MACHINE.fullmatch(name) else ()
    constants = [ast.dump(each) for each in beside if isinstance(each, ast.Constant | ast.UnaryOp)]
    return (*key, *sorted(constants)) if key else None


def _last(node: ast.AST) -> str:
    """The last name of a dotted name; of an import, the first."""
    if isinstance(node, ast.alias):
        return node.name.partition(".")[0]
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _edited(before: bytes, now: bytes) -> set[int]:
    """The numbers of the lines that are new."""
    blocks = difflib.SequenceMatcher(None, before.splitlines(), now.splitlines(), autojunk=False).get_opcodes()
    return {at + 1 for kind, _, _, start, end in blocks if kind != "equal" for at in range(start, end)}


_DEFINED = ast.FunctionDef | ast.AsyncFunctionDef

_SILENT = _DEFINED | ast.ClassDef | ast.Raise | ast.Pass | ast.Break | ast.Continue | ast.Global | ast.Nonlocal
"""Statements whose first line may have no instruction, or that only end something."""


def _lines(content: bytes, known: Collection[str]) -> set[int]:
    """The first lines of the statements outside functions that are `known`."""
    lines, todo = set[int](), [*ast.iter_child_nodes(_parsed(content) or ast.Module([], []))]
    while todo:
        node = todo.pop()
        if isinstance(node, _DEFINED) and _text(node) in known:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        bare = isinstance(node, ast.AnnAssign) and node.value is None
        bare |= isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not isinstance(node, _SILENT) and not bare:
            lines.add(node.lineno)
        todo += ast.iter_child_nodes(node)
    return lines


def _functions(content: bytes | None) -> set[str]:
    """The meaning of each function of a source."""
    tree = _parsed(content or b"")
    return set() if tree is None else {_text(node) for node in ast.walk(tree) if isinstance(node, _DEFINED)}


def _text(node: ast.AST) -> str:
    """The syntax tree; two docstrings are equal."""
    for each in ast.walk(node):
        body = getattr(each, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value.value = ""
    return ast.dump(node)


def _meaning(content: bytes | None) -> str | None:
    """The syntax tree of a source without docstrings; the source itself if it is none; None: there is no file."""
    tree = None if content is None else _parsed(content)
    return _text(tree) if tree is not None else None if content is None else content.decode("latin-1")


def _parsed(content: bytes) -> ast.Module | None:
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.parse(content)
    return None


def _content(path: Path) -> bytes | None:
    if path.is_symlink():
        return os.fsencode(os.readlink(path))
    return path.read_bytes() if path.is_file() else None
