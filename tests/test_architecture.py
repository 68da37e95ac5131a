"""Who imports whom: the one table of docs/architecture.md, read from the source of every module."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOP = ("harness", "attacks", "defenses", "reports", "studies")
FILES = sorted(path for package in TOP for path in (ROOT / package).rglob("*.py"))

_CORE = frozenset({"core"})
RULES = {
    "core": frozenset(),
    "data": _CORE,
    "learn": frozenset({"core", "data.torchvision_shim"}),
    "federation": frozenset({"core", "learn", "data"}),
    "audit": frozenset({"core", "learn", "data", "federation"}),
    "query": _CORE,
    "study": frozenset({"core", "learn", "data", "federation", "audit", "query"}),
    "integrations": frozenset({"core", "data", "learn", "federation", "audit", "study"}),
    "gate": frozenset({"core", "study"}),
    "cli": frozenset(
        {"core", "query", "data", "learn", "federation", "audit", "study", "integrations", "gate", "reports"}
    ),
    "attacks": frozenset({"core", "learn", "federation.round"}),
    "defenses": _CORE,
    "reports": frozenset(
        {
            "core.numerics",
            "core.cell",
            "core.result",
            "core.stats",
            "core.metrics",
            "core.labels",
            "core.threats",
            "core.cases",
            "core.rows",
            "core.rating",
            "core.errors",
            "query",
            "core.sinks",
            "core.stored",
            "gate.measure",
            "gate.judge",
            "gate.output",
            "gate.baseline",
            "gate.compare",
        }
    ),
    "studies": frozenset(),
}
"""What a room may import: another room, or a module of it. Its own modules are its own business."""

EXCEPTIONS: dict[tuple[str, str], str] = {}
"""(module, what it imports): the reason. At most three."""

OWNERS = {
    "torch.func": {
        "harness.learn.batch",
        "harness.learn.gradients",
        "harness.learn.called",
        "harness.learn.losses",
        "harness.learn.pruning",
        "attacks._engine.simulate",
    },
    "torchvision": {"harness.data.torchvision_shim"},
    "random": {"harness.core.rng"},
    "numpy.random": {"harness.core.rng"},
}
"""The only modules that may use these."""

LIGHT = (
    "reports",
    "harness.core.answer",
    "harness.core.cell",
    "harness.core.result",
    "harness.core.rows",
    "harness.query.lines",
    "harness.query.statements",
    "harness.core.stats",
    "harness.core.errors",
    "harness.study.store",
    "harness.federation.recorder",
    "harness.integrations.flower_records",
    "harness.integrations.flower_tap",
)
"""Start without torch."""


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
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


@functools.cache
def graph():
    return {name_of(path): imports(path) for path in FILES}


@functools.cache
def arrows():
    """(module, module of ours that it imports), sorted."""
    modules = {f"leakgauge.{name}" for name in graph()}
    return sorted(
        (name, other)
        for name, used in graph().items()
        for other in (full.removeprefix("leakgauge.") for full in used & modules)
        if other not in TOP and not any(one.startswith(f"leakgauge.{other}.") for one in used & modules)
    )


def within(name, *packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def room_of(name):
    """`core` for harness.core.rng, `attacks` for attacks.dlg."""
    parts = name.split(".")
    return parts[1] if parts[0] == "harness" and len(parts) > 1 else parts[0]


def is_allowed(name, other):
    here, there = room_of(name), room_of(other)
    if here == there:
        # an implementation is known to nobody but the registry, which scans; what families share is private
        alone = here in ("attacks", "defenses") and not other.split(".")[1].startswith("_")
        return not alone
    if (name, other) in EXCEPTIONS or there in RULES[here]:
        return True
    return within(other, *(f"harness.{one}" for one in RULES[here] if "." in one))


def violations(imported):
    return [f"{name} imports {other}" for name, other in imported if not is_allowed(name, other)]


def test_every_import_is_allowed():
    assert violations(arrows()) == []
    assert len(EXCEPTIONS) <= 3
    assert set(map(room_of, graph())) - {"harness"} == set(RULES)


def test_the_rules_have_no_circle():
    done = []
    while len(done) < len(RULES):
        ready = [room for room in RULES if room not in done and {one.split(".")[0] for one in RULES[room]} <= set(done)]
        assert ready, f"a circle among {set(RULES) - set(done)}"
        done += ready


def test_a_module_lies_in_a_room():
    loose = [path.name for path in (ROOT / "harness").glob("*.py")]
    assert loose == ["__init__.py"]


def test_a_private_module_is_imported_by_one_room():
    private = {other for _, other in arrows() if any(part.startswith("_") for part in other.split("."))}
    assert private
    for module in private:
        assert {room_of(name) for name, other in arrows() if other == module} == {room_of(module)}, module


def test_nothing_is_imported_by_a_name_that_another_package_may_have():
    every = [
        *FILES,
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "benchmarks").glob("*.py"),
        *(ROOT / "leakgauge").glob("*.py"),
    ]
    loose = [(str(path), name) for path in every for name in imports(path) if within(name, *TOP)]
    assert loose == []


def test_only_their_owners_use_what_is_theirs():
    for used, owners in OWNERS.items():
        users = {name for name, found in graph().items() if any(within(one, used) for one in found)}
        assert users <= owners, used
    light = [found for name, found in graph().items() if within(name, *LIGHT)]
    assert not [one for found in light for one in found if within(one, "torch")]


def test_bounds_of_scores_know_no_federation_and_the_engine_no_statistics():
    bounds, own = ("harness.audit.bounds", "harness.audit.one_run"), ("harness.core", "harness.audit.bounds")
    assert not [pair for pair in arrows() if pair[0] in bounds and not within(pair[1], *own)]
    assert not [name for name in graph()["harness.audit.engine"] if within(name, "numpy", "scipy", "statistics")]


def test_a_forbidden_import_is_seen(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("def f():\n    from leakgauge.attacks.dlg import DLG\n    import torchvision.ops\n")
    assert imports(path) == {"leakgauge.attacks.dlg", "leakgauge.attacks.dlg.DLG", "torchvision.ops"}
    assert len(arrows()) > 300
    unlawful = [
        ("harness.core.rng", "harness.learn.batch"),
        ("harness.audit.bounds", "harness.study.store"),
        ("defenses.gaussian", "defenses.laplace"),
        ("defenses.gaussian", "harness.learn.batch"),
        ("attacks.dlg", "harness.federation.observe"),
        ("harness.gate.judge", "reports.html"),
        ("harness.federation.registry", "attacks.dlg"),
    ]
    assert len(violations(unlawful)) == len(unlawful)
    assert (
        violations([("defenses.gaussian", "defenses._common.clip"), ("harness.gate.rerun", "harness.study.run")]) == []
    )
