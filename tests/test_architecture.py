"""Who imports whom: the table of docs/architecture.md, read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("harness", "attacks", "defenses", "reports", "studies")
FILES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))
LEAVES = {f"harness.{name}" for name in ("rng", "vec", "cell", "result", "stats", "errors", "threats")}


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """Full names of everything that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules(names):
    """Those of ours among the imported names, as modules."""
    known = {name_of(path) for path in FILES}
    return {name for name in names if name in known}


GRAPH = {name_of(path): imports(path) for path in FILES}


def within(name, *packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def may_import(name):
    """The modules of ours that `name` may import; None: all but what is forbidden below."""
    if within(name, "reports"):
        allowed = ("cell", "result", "stats", "measure", "gate", "gate_output", "baseline")
        return (*(f"harness.{module}" for module in allowed), "reports")
    if within(name, "defenses"):
        allowed = (
            "harness.checks",
            "harness.contract",
            "harness.threats",
            "harness.rng",
            "harness.codec",
            "harness.accounting",
            "harness.cascade",
            "harness.claim",
            "harness.golomb",
            "harness.hadamard",
            "harness.vec",
            "defenses._",
        )
        return ("harness", *allowed)
    if within(name, "attacks"):
        allowed = ("contract", "threats", "rng", "batch", "models", "vec", "matching", "simulate", "shadows")
        return ("harness", *(f"harness.{module}" for module in allowed), "attacks._")
    return None


@pytest.mark.parametrize("name", sorted(GRAPH))
def test_a_module_imports_only_what_its_place_allows(name):
    allowed = may_import(name)
    for other in modules(GRAPH[name]):
        if allowed is not None and other not in OURS:
            assert other in allowed or any(p.endswith(("_", "reports")) and other.startswith(p) for p in allowed), (
                f"{name} imports {other}"
            )
        if name in LEAVES:
            assert other in LEAVES | {"harness"}, f"the leaf {name} imports {other}"
        if within(other, "attacks", "defenses") and not within(name, "attacks", "defenses"):
            pytest.fail(f"{name} imports {other}: only the registry knows implementations, and it scans")
        if within(other, "reports") and not within(name, "reports"):
            assert name == "harness.cli", f"{name} imports {other}"


@pytest.mark.parametrize("name", sorted(GRAPH))
def test_only_a_few_modules_touch_what_is_theirs(name):
    source = (ROOT / (name.replace(".", "/") + ".py")) if name not in OURS else None
    text = source.read_text("utf-8") if source and source.exists() else ""
    used = GRAPH[name]
    if name not in ("harness.batch", "harness.matching", "harness.simulate"):
        assert "torch.func" not in text, name
    if name != "harness.rng":
        assert not any(within(n, "random", "numpy.random") for n in used), name
        assert "np.random.default_rng" not in text, name
    if name != "harness.data.torchvision_shim":
        assert not any(within(n, "torchvision") for n in used), name
    if within(name, "reports") or name in (
        "harness.cell",
        "harness.result",
        "harness.stats",
        "harness.store",
        "harness.errors",
    ):
        assert not any(within(n, "torch") for n in used), name


def test_the_graph_was_read():
    assert len(GRAPH) > 40
    assert "harness.contract" in GRAPH["defenses.gaussian"]
    assert "harness.contract" not in may_import("reports.html")


def test_a_forbidden_import_is_seen(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("def f():\n    from attacks.dlg import DLG\n    import torchvision.ops\n")
    assert imports(path) == {"attacks.dlg", "attacks.dlg.DLG", "torchvision.ops"}


EVERY = [*FILES, *sorted((ROOT / "tests").glob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]


@pytest.mark.parametrize("path", EVERY, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_too_long(path):
    assert len(path.read_text("utf-8").splitlines()) <= 400, "is there a second idea in it?"
