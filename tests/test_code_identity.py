"""Results know all code behind them: what a user's part imports, and the compiled loops."""

import hashlib
import sys
import types
import zipfile
from importlib.util import spec_from_file_location

import pytest

from leakgauge.harness.core import native
from leakgauge.harness.gate import rerun
from leakgauge.harness.gate.comparable import problems
from leakgauge.harness.gate.compare import provenance
from leakgauge.harness.gate.measure import measured
from leakgauge.harness.study import environment
from leakgauge.harness.study.environment import code_of, sources
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve

ROOT = """
import importlib, json
import sources_direct
from sources_package import inner
from sources_package.deep.leaf import *
try:
    import sources_tried
except ImportError:
    pass
NAME = "sources_named"
def late():
    import sources_late
    importlib.import_module("sources_package.texted"), __import__(NAME)
"""
FILES = {
    "sources_direct": "import sources_second",
    "sources_second": "x = 1",
    "sources_tried": "x = 1",
    "sources_named": "x = 1",
    "sources_late": "x = 1",
    "sources_package.__init__": "x = 1",
    "sources_package.inner": "from . import beside\nfrom .other import x",
    "sources_package.beside": "x = 1",
    "sources_package.other": "x = 1",
    "sources_package.texted": "x = 1",
    "sources_package.deep.leaf": "from .. import above",
    "sources_package.above": "x = 1",
    "sources_root": ROOT,
}
"""Modules by name; the folder of `deep` has no `__init__`."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of modules that is searched last, as a study's; none is imported."""
    for name, text in FILES.items():
        path = (tmp_path / name.replace(".", "/")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_an_edit_of_any_imported_module_is_another_source_and_of_any_other_file_is_not(name, folder):
    before = sources({"sources_root"})
    (folder / "sources_unused.py").write_text("x = 1")
    assert sources({"sources_root"}) == before
    with (folder / name.replace(".", "/")).with_suffix(".py").open("a") as file:
        file.write("\n# edited")
    after = sources({"sources_root"})
    assert [one.split()[0] for one in before] == [one.split()[0] for one in after]
    assert len({*before} - {*after}) == 1
    assert not [one for one in sys.modules if one.startswith("sources_")]


def test_two_helpers_that_change_places_are_other_sources(folder):
    (folder / "sources_late.py").write_text("x = 2")
    before = sources({"sources_root"})
    (folder / "sources_late.py").rename(folder / "kept")
    (folder / "sources_tried.py").rename(folder / "sources_late.py")
    (folder / "kept").rename(folder / "sources_tried.py")
    assert sources({"sources_root"}) != before


def test_an_installed_distribution_counts_by_its_version_and_the_standard_library_does_not(folder, monkeypatch):
    (folder / "sources_root.py").write_text("import json, torch.nn, leakgauge.harness.core.rng, nowhere")
    (own, installed) = sources({"sources_root"})
    assert (own.split()[0], installed.split()[0]) == ("sources_root", "torch")
    site = folder / "site-packages"
    (site / "plugs").mkdir(parents=True)
    (site / "plugs" / "__init__.py").write_text("x = 1")
    info = site / "plugs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugs\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("plugs\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    sources.__globals__["_distributions"].cache_clear()
    (folder / "sources_root.py").write_text("import plugs")
    assert sources({"sources_root"})[0] == "plugs 1.0"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugs\nVersion: 1.1\n")
    assert sources({"sources_root"})[0] == "plugs 1.1"
    sources.__globals__["_distributions"].cache_clear()


def test_a_compiled_helper_counts_by_its_bytes(folder):
    (folder / "sources_root.py").write_text("def late():\n    import sources_compiled")
    (folder / "sources_compiled.so").write_bytes(b"\x7fELF\0first")
    before = sources({"sources_root"})
    (folder / "sources_compiled.so").write_bytes(b"\x7fELF\0other")
    assert len(before) == 2
    assert sources({"sources_root"}) != before


class Editable:
    """Finds one package, as the finder of a distribution that is installed in place."""

    def __init__(self, file):
        self.file = file

    def find_spec(self, name, path=None, target=None):
        where = {"submodule_search_locations": [str(self.file.parent)]}
        return spec_from_file_location(name, self.file, **where) if name == "sources_editable" else None


def test_a_module_of_an_editable_installation_counts(folder, monkeypatch):
    package = folder / "src" / "own"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from . import inner")
    (package / "inner.py").write_text("x = 1")
    (folder / "sources_root.py").write_text("import sources_editable")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable(package / "__init__.py")])
    before = sources({"sources_root"})
    assert [one.split()[0] for one in before] == ["sources_editable", "sources_editable.inner", "sources_root"]
    (package / "inner.py").write_text("x = 2")
    assert sources({"sources_root"}) != before


@pytest.mark.parametrize("name", ["sources_zipped", "sources_zipped/__init__"])
def test_a_module_in_a_zip_file_counts_by_the_files_bytes(name, folder, monkeypatch):
    def pack(text):
        with zipfile.ZipFile(folder / "helpers.zip", "w") as file:
            file.writestr(f"{name}.py", text)
        sys.path_importer_cache.pop(str(folder / "helpers.zip"), None)
        return sources({"sources_root"})

    monkeypatch.setattr(sys, "path", [*sys.path, str(folder / "helpers.zip")])
    (folder / "sources_root.py").write_text("import sources_zipped")
    assert pack("x = 1") == pack("x = 1") != pack("x = 2")


PARTS = """
import torch
from leakgauge.attacks.prior import Prior
from leakgauge.defenses.gaussian import Gaussian
import sources_direct
class Own(Gaussian):
    pass
class Guess(Prior):
    pass
def model(channels, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))
def data():
    return torch.rand(40, 1, 8, 8), torch.arange(40) % 10
def prior(x, box):
    return None
"""
TABLE = {
    "name": "parts",
    "lineup": False,
    "tasks": [{"data": "digits", "model": "linear"}],
    "federations": [{"clients": 2, "rounds": 1, "samples": 20, "test_samples": 10, "algorithm": "fedsgd"}],
    "defenses": [{"name": "none"}],
    "attacks": [{"name": "prior", "target": {"count": 2}}],
}
KINDS = {
    "defense": {"defenses": [{"name": "sources_parts:Own"}]},
    "cascade": {"defenses": [{"name": "sources_parts:Own+sdq"}]},
    "attack": {"attacks": [{"name": "sources_parts:Guess", "target": {"count": 2}}]},
    "prior of an attack": {"attacks": [{"name": "map", "prior": "sources_parts:prior", "target": {"count": 2}}]},
    "model": {"tasks": [{"data": "digits", "model": "sources_parts:model"}]},
    "data": {"tasks": [{"data": "sources_parts:data", "model": "linear"}]},
    "data of the adversary": {"threats": ["server+auxiliary=sources_parts:data"]},
}


@pytest.fixture
def code(folder, monkeypatch):
    (folder / "sources_parts.py").write_text(PARTS)

    def found(changes):
        for name in [one for one in sys.modules if one.startswith("sources_")]:
            monkeypatch.delitem(sys.modules, name)
        environment._code.cache_clear()
        (cell, *_) = resolve(TABLE | changes, allow_code=True).cells
        return code_of(cell.training, cell.attack, cell.threat)

    yield found
    environment._code.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_a_helper_of_any_part_of_a_study_is_code_behind_its_result(kind, code, folder):
    before = code(KINDS[kind])
    assert before == code(KINDS[kind]) != code({})
    (folder / "sources_second.py").write_text("x = 0")
    assert code(KINDS[kind]) != before


@pytest.fixture
def loops(tmp_path, monkeypatch):
    """Replaces the compiled loops by a copy with one more byte at its end."""
    used = native.library()
    if used is None:
        pytest.skip("no compiler at the installation")
    caches = (environment.package, environment._versions, environment._code, environment.origin)

    def replace():
        copy = tmp_path / "_native.so"
        copy.write_bytes(used.content + b"\0")
        for module in (native, environment):
            monkeypatch.setattr(module, "library", lambda real="float": native.Library(copy, real))
        for cache in caches:
            cache.cache_clear()
        return hashlib.sha256(copy.read_bytes()).hexdigest()[:8]

    yield replace
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


def test_results_of_other_compiled_loops_are_of_other_code_and_state_theirs(loops, tmp_path):
    study = resolve(TABLE)
    run = run_study(study, tmp_path / "out", workers=0)
    now, bench = measured(run), rerun.Bench(tmp_path / "out")
    assert rerun.about_code(now, bench) == ()
    before, (cell, *_) = environment.origin().packages["compiled loops"], study.cells
    codes = code_of(cell.training), environment.numerics()["code"]
    short = loops()
    assert rerun.about_code(now, bench) == ("2 results made by other code: run the study again to check this code",)
    assert codes != (code_of(cell.training), environment.numerics()["code"])
    assert environment.origin().packages["compiled loops"] == f"{native.VERSION}+{short}" != before
    again = run_study(study, tmp_path / "out", workers=0)
    assert rerun.about_code(measured(again), bench) == ()
    assert (tmp_path / "out" / "quarantine").is_dir()


def test_a_baseline_of_other_compiled_loops_is_comparable(loops, tmp_path):
    study = resolve(TABLE)
    base = measured(run_study(study, tmp_path / "base", workers=0))
    loops()
    now = measured(run_study(study, tmp_path / "now", workers=0))
    assert now.packages["compiled loops"] != base.packages["compiled loops"]
    assert list(problems(now, base)) == []
    assert any("compiled loops: 4+" in line for line in provenance(base, now))


def test_what_else_this_process_has_loaded_changes_no_identity(folder, monkeypatch):
    found = sources({"sources_root"})
    stray = types.ModuleType("late")
    stray.__file__ = str(folder / "sources_second.py")
    (folder / "sources_root.py").write_text(f"{ROOT}\nWORD = 'late'\n")
    before = sources({"sources_root"})
    monkeypatch.setitem(sys.modules, "late", stray)
    assert sources({"sources_root"}) == before != found
