"""The code and the environment of a result: digest of the sources, commit, versions, machine and arithmetic.

A user's code counts with its modules and all that they import, but without the data files that they read.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.machinery import PathFinder, all_suffixes
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__  # type: ignore[import-not-found]

from leakgauge.harness.core.cell import Cell, PartSpec, TaskSpec, TrainingSpec
from leakgauge.harness.core.code import imported, named_code, task_code
from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.native import VERSION, library
from leakgauge.harness.core.numerics import VECTORS
from leakgauge.harness.core.result import Environment
from leakgauge.harness.core.stored import fingerprint
from leakgauge.harness.core.threads import linear_algebra
from leakgauge.harness.core.threats import View

if TYPE_CHECKING:
    from leakgauge.harness.study.store import Store

_PACKAGES = ("torch", "torchvision", "numpy", "scipy", "scikit-image", "scikit-learn", "dp-accounting", "opacus")

SOURCES = (
    *(f"harness/{room}" for room in ("core", "data", "learn", "federation", "audit", "study")),
    "attacks",
    "defenses",
)
"""The sources that a result may depend on. Commands, gate and reports only read results; ids cover studies as data."""


_NUMERICAL = (
    *("ATEN_", "BLIS_", "CUBLAS_", "CUDNN_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "GOTO_", "KMP_DETERMINISTIC_"),
    *("MKL_", "NPY_", "NVIDIA_TF32_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH_ALLOW_TF32_", "VECLIB_"),
)
"""Environment variables with these prefixes may change the last bit of a sum; packages set others of KMP_."""

CACHE = "LEAKGAUGE_CACHE"
"""Environment variable: the folder of the cache, or `off`."""


def cache_folder() -> Path | None:
    """The cache's folder: `LEAKGAUGE_CACHE`, or `leakgauge` in the user's cache; None: there is no cache."""
    named = os.environ.get(CACHE)
    if named == "off":
        return None
    try:
        folder = Path(named or os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return folder if named else folder / "leakgauge"
    except RuntimeError:  # a user without a home
        return None


def code_of(training: TrainingSpec, attack: PartSpec | None = None, threat: str = "") -> str:
    """The code behind a training, or behind an attack on it: two results of the same cell with equal codes are equal.

    Covers this package with its compiled loops, the user's code of a defense, of attacks, of their parameters, of a
    model and of data, with what it imports (`sources`), and the weights of a given model.
    """
    attacks = [part for part in (attack, training.malice.attack if training.malice else None) if part is not None]
    names = {("defense", name) for name in training.defense.name.split("+")}
    parts = frozenset(names | {("attack", part.name) for part in attacks})
    values = (value for part in (training.defense, *attacks) for value in part.parameters.values())
    named = [*named_code(values), *task_code("", View.parse(threat).other if threat else "")]
    modules, weights = _origin(training.task)
    return _code(parts, modules | {name.partition(":")[0] for name in named}, weights)


def _origin(task: TaskSpec) -> tuple[frozenset[str], str]:
    """The modules of a user's model and data, and the digest of given weights; empty for shipped models and data."""
    modules, weights = set[str](), ""
    if ":" in task.model:
        from leakgauge.harness.learn.modules import origin

        made = origin(task.model)
        modules, weights = set(made.modules), made.weights
    for name in task_code("", task.data, task.loss):
        modules |= {name.partition(":")[0], str(getattr(imported("data set", name), "__module__", ""))}
    return frozenset(modules), weights


def folders(store: Store, cells: Iterable[Cell]) -> dict[Path, str]:
    """The folders of cells and of their trainings, each with the code that should have made it.

    Raises:
        LookupError: there is no such defense or attack.
    """
    asked = list(cells)
    trainings = {store.training(cell.training.id): code_of(cell.training) for cell in asked}
    return trainings | {store.cell(cell.id): code_of(cell.training, cell.attack, cell.threat) for cell in asked}


def code_behind(store: Store, training: TrainingSpec, attack: PartSpec | None, threat: str) -> str:
    """The code behind an attack on a stored training or, without an attack, behind the limit of any; then the code of
    the training, if that differs.
    """
    own, made = code_of(training, attack, threat), store.examine(store.training(training.id), arrays=False).code
    return own if made == code_of(training) else f"{own} on {made}"


@functools.cache
def _code(
    parts: frozenset[tuple[Literal["defense", "attack"], str]], own: frozenset[str] = frozenset(), weights: str = ""
) -> str:
    """The digest of the sources of the package, of the modules of these parts, and of a user's task."""
    foreign = [part for part in parts if not shipped(*part)]
    if not foreign and not own:
        return fingerprint([package()])
    from leakgauge.harness.federation import registry

    modules = own | {registry.lookup(kind, name).__module__ for kind, name in foreign}
    modules |= {name.partition(":")[0] for _, name in foreign if ":" in name}
    return fingerprint([package(), *sources(modules), *([weights] if weights else [])])


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
            todo += named_modules(content, name if path.stem == "__init__" else name.rpartition(".")[0])
    return sorted(map(" ".join, digests.items()))


def _file(name: str, *, loaded: bool) -> Path:
    """The file of a module; a folder if there is none. `loaded`: wherever this process has it from. Imports nothing."""
    file, (package, *inner) = getattr(sys.modules.get(name) if loaded else None, "__file__", None), name.split(".")
    with suppress(ValueError):  # of `__main__`
        find = importlib.util.find_spec if loaded else PathFinder.find_spec
        specs = (finder.find_spec(package, None) for finder in sys.meta_path)  # for editable installations
        spec = None if file else find(package) or next(filter(None, specs), None)
        file = spec.origin if spec and spec.has_location and not inner else file
        stems = [Path(folder, *inner) for folder in (spec and spec.submodule_search_locations) or ()]
        ends = [end for suffix in all_suffixes() for end in (f"/__init__{suffix}", suffix)]
        file = file or next(
            (source for stem in stems for end in ends if Path(source := f"{stem}{end}").is_file()), None
        )
    path = Path(file or "")
    return next((parent for parent in path.parents if parent.is_file()), path)  # the zip file that holds it


def named_modules(content: bytes, package: str) -> Iterator[str]:
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


def shipped(kind: Literal["defense", "attack"], name: str) -> bool:
    """Whether a defense, all parts of a cascade, or an attack are files of this package, without a slow import."""
    folder, files = Path(__file__).parents[2] / f"{kind}s", name.replace("-", "_").split("+")
    return all(file.isidentifier() and (folder / f"{file}.py").is_file() for file in files)


@functools.cache
def package() -> str:
    """The digest of this package's sources and compiled loops at the first call in this process.

    The loops of another compiler round differently, so results of both are not of the same code.
    """
    loops, root = library(), Path(__file__).parents[2]
    digest = hashlib.sha256(b"" if loops is None else loops.content)
    files = (file for folder in SOURCES for kind in ("py", "c") for file in (root / folder).rglob(f"*.{kind}"))
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def environment(device: str = "cpu") -> Environment:
    """`origin` with the arithmetic of this process, at present; imports torch."""
    return replace(origin(), numerics=_numerics(device))


@functools.cache
def origin() -> Environment:
    """Commit, package versions and machine of this process; outside a checkout, the release stands for the commit."""
    commit = _git("rev-parse", "HEAD")
    return Environment(
        commit=commit or f"release {importlib.metadata.version('leakgauge')}",
        dirty=bool(_git("status", "--porcelain")) if commit else False,
        python=platform.python_version(),
        packages=_versions(),
        machine=f"{platform.system()} {platform.machine()}",
    )


@functools.cache
def _versions() -> dict[str, str]:
    loops = library()
    version = "none" if loops is None else f"{VERSION}+{hashlib.sha256(loops.content).hexdigest()[:8]}"
    return {name: importlib.metadata.version(name) for name in _PACKAGES} | {"compiled loops": version}


def numerics() -> dict[str, Any]:
    """Everything besides the question that may change the last bit of an answer: code, libraries and machine.

    Imports no torch: what torch and the BLAS choose follows from this, besides their threads.
    """
    return {
        "code": package(),
        "python": platform.python_version(),
        "packages": _versions(),
        "machine": [platform.system(), platform.machine()],
        "numerics": _given(),
    }


def _numerics(device: str = "cpu") -> dict[str, str]:
    """What decides how this process rounds, besides code and packages: what it is given, and what libraries chose.

    The threads are those of each library at present, so variables that set a number of threads are left out.
    """
    import torch
    from scipy import linalg  # noqa: F401  # loads its BLAS

    found = {name: value for name, value in _given().items() if value and not name.endswith("_NUM_THREADS")}
    level, threads = torch.backends.cpu.get_cpu_capability(), counted(torch.get_num_threads(), "thread")
    libraries = map(" ".join, re.findall(r"(Math Kernel Library|MKL-DNN)(?: Version)? (\S+)", torch.__config__.show()))
    found |= {
        VECTORS: "basic" if level == "DEFAULT" else level,
        "BLAS of torch": f"{' with '.join(libraries)} ({threads})",
    }
    packages = Path(np.__file__).parents[1]
    for one in linear_algebra().info():
        path = Path(one["filepath"])
        folder = path.relative_to(packages).parts[0] if path.is_relative_to(packages) else one["prefix"]
        owner = folder.partition(".")[0]  # a user's package may have loaded its own
        if one["user_api"] == "blas" and (owner in ("numpy", "scipy", "torch") or owner == one["prefix"]):
            words = filter(None, (one["internal_api"], one["version"], one.get("architecture")))
            found[f"BLAS of {owner}"] = f"{' '.join(words)} ({counted(one['num_threads'], 'thread')})"
    card = torch.cuda.get_device_name(device) if device != "cpu" and torch.cuda.is_available() else device
    return found | ({} if device == "cpu" else {"accelerator": card})


def _given() -> dict[str, str]:
    """The processor with the instructions that numpy may use, the C library, and the variables in `_NUMERICAL`."""
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_NUMERICAL)}
    vectors = " ".join(name for name in __cpu_dispatch__ if __cpu_features__[name])
    given = {"processor": _processor(), "C library": " ".join(platform.libc_ver()), f"{VECTORS} of numpy": vectors}
    return given | {name: value.encode(errors="backslashreplace").decode() for name, value in variables.items()}


@functools.cache
def _processor() -> str:
    """The name of the processor, because another processor may add sums in another order."""
    if sys.platform == "linux":
        with suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return platform.processor()


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
