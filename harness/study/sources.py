"""The sources of a user's code: its modules and all that they import, but no data files that they read."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from importlib.machinery import PathFinder, all_suffixes
from itertools import accumulate
from pathlib import Path

_distributions = functools.cache(importlib.metadata.packages_distributions)  # reads for a quarter of a second


def sources(modules: Collection[str]) -> list[str]:
    """A digest for each file behind the modules, and the version of each installed distribution that they name.

    An import counts wherever it stands, and so does a text that is the name of a module, as for `import_module`.
    Nothing is imported here. The standard library and this package are left out.

    Guarantees:
        What else this process has loaded changes nothing.
    """
    digests, todo, own = dict[str, str](), [*modules], {name.partition(".")[0] for name in modules}
    while todo:
        name = todo.pop()
        package = name.partition(".")[0]
        path = _file(name, loaded=package in own)
        is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        is_standard = not is_installed and path.is_relative_to(Path(os.__file__).parent)
        if package == "leakgauge" or name in digests or is_standard or not path.is_file():
            continue
        if is_installed and name not in modules:
            digests |= {name: importlib.metadata.version(name) for name in _distributions().get(package, [])}
        else:
            content = path.read_bytes()
            digests[name] = hashlib.sha256(content).hexdigest()
            todo += _named(content, name if path.stem == "__init__" else name.rpartition(".")[0])
    return sorted(map(" ".join, digests.items()))


def _file(name: str, *, loaded: bool) -> Path:
    """The file of a module, or of a package's `__init__`; a folder if there is none. This imports no package.

    loaded: whether a module that this process has loaded counts wherever it came from, or only if its path has it.
    """
    file, (package, *inner) = getattr(sys.modules.get(name) if loaded else None, "__file__", None), name.split(".")
    with suppress(ValueError):  # of `__main__`
        find = importlib.util.find_spec if loaded else PathFinder.find_spec
        specs = (finder.find_spec(package, None) for finder in sys.meta_path)  # for editable installations
        spec = None if file else find(package) or next(filter(None, specs), None)
        file = spec.origin if spec and spec.has_location and not inner else file
        stems = [Path(folder, *inner) for folder in (spec and spec.submodule_search_locations) or ()]
        ends = [end for suffix in all_suffixes() for end in (f"/__init__{suffix}", suffix)]
        file = file or next((one for stem in stems for end in ends if Path(one := f"{stem}{end}").is_file()), None)
    path = Path(file or "")
    return next((parent for parent in path.parents if parent.is_file()), path)  # the zip file that holds it


def _named(content: bytes, package: str) -> Iterator[str]:
    """The modules that a source in this package names, with their packages; none for compiled code."""
    with suppress(SyntaxError, ValueError):
        for node in [ast.Import([ast.alias(package)]), *ast.walk(ast.parse(content))]:
            names, inner = list[str](), list[str]()
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names, inner = ["." * node.level + (node.module or "")], [alias.name for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [node.value]
            for name in names:
                with suppress(ImportError):  # relative, but in no package
                    base = importlib.util.resolve_name(name, package)
                    for full in (base, *(f"{base}.{name}" for name in inner)):
                        if all(map(str.isidentifier, full.split("."))):
                            yield from accumulate(full.split("."), "{}.{}".format)
