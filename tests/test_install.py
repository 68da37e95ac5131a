"""The import name: one top-level package, in a checkout and from a wheel, beside other packages of a user."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest
from mypy.modulefinder import FindModuleCache, SearchPaths

import leakgauge
from leakgauge.harness.federation import registry
from leakgauge.harness.study.study import load_study

ROOT = Path(__file__).parents[1]
TOP = ("leakgauge", "harness", "attacks", "defenses", "reports", "studies")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, f'build_{sys.argv[1]}')('dist'))"
STUDY = textwrap.dedent("""
    name = "tiny"
    lineup = false
    tasks = [{data = "digits", model = "mlp-small"}]
    federations = [{clients = 2, rounds = 1, samples = 40, test_samples = 20, algorithm = "fedsgd"}]
    defenses = [{name = "gaussian"}]
    attacks = [{name = "prior", target = {count = 1}}]
""")
UNRELATED = """
import pytest, tests

def test_unrelated(pytestconfig):
    assert tests.ANSWER == 42
    with pytest.raises(ImportError, match="of the user"):
        import harness
    print("plugin:", pytestconfig.pluginmanager.get_plugin("leakgauge").__file__)
"""


def python(*words, cwd, by=sys.executable, **environment):
    """The output of a successful call of this Python, or of another, without the settings of this test run."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PYTHON", "COV"))}
    command = [str(by), *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sources():
    """The files of the checkout that git does not ignore, relative to it."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(Path(name) for name in set(done.stdout.split("\0")) if name and os.path.lexists(ROOT / name))


def packaged():
    """The names of the files that every distribution must have."""
    inside = [path for path in sources() if path.parts[0] in TOP and not (ROOT / path).is_symlink()]
    return {str(path if path.parts[0] == "leakgauge" else "leakgauge" / path) for path in inside}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The paths of an sdist and of a wheel, built from a copy of the checkout, and of two from the sdist, one pure."""
    copy, unpacked = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("unpacked")
    for path in sources():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy / path, follow_symlinks=False)
    sdist, wheel = (copy / "dist" / python("-c", BUILD, kind, cwd=copy).split()[-1] for kind in ("sdist", "wheel"))
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (again,) = unpacked.iterdir()
    pure = again / "dist" / python("-c", BUILD, "wheel", cwd=again, LEAKGAUGE_PURE="1").split()[-1]
    shutil.rmtree(again / "build")
    return sdist, wheel, again / "dist" / python("-c", BUILD, "wheel", cwd=again).split()[-1], pure


@pytest.fixture(scope="module")
def installed(distributions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    words = ["install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", "--target", folder]
    python("-m", "pip", *words, distributions[1], cwd=folder)
    return folder


@pytest.fixture
def project(tmp_path):
    """A user's project with packages of the same names as our folders; their import fails, except that of `tests`."""
    for name in TOP[1:]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('{name} of the user')\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").write_text("ANSWER = 42\n")
    (tmp_path / "tests" / "test_unrelated.py").write_text(UNRELATED)
    (tmp_path / "tiny.toml").write_text(STUDY)
    return tmp_path


@pytest.mark.slow
def test_a_wheel_and_an_sdist_have_one_package_and_every_file_once(distributions):
    sdist, *wheels = distributions
    for number, wheel in enumerate(wheels):
        names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
        compiled = {"leakgauge/harness/core/_native.so"} if number < 2 and shutil.which("cc") else set()
        assert names == packaged() | compiled
        platform = sysconfig.get_platform().replace("-", "_") if compiled else "any"
        assert wheel.name == f"leakgauge-{leakgauge.__version__}-py3-none-{platform}.whl"
    with tarfile.open(sdist) as archive:
        files = [member.name.partition("/")[2] for member in archive if member.isfile()]
    assert {name.split("/")[0] for name in files if name.endswith("__init__.py")} == {"leakgauge"}
    assert {name for name in files if name.split("/")[0] in TOP} == packaged()


@pytest.mark.slow
@pytest.mark.parametrize("minor", range(11, 15))
def test_both_wheels_install_and_compile_for_every_python_at_hand(minor, distributions, tmp_path):
    kept = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/3.{minor}.*/bin/python"))
    if (found := shutil.which(f"python3.{minor}") if not kept else kept[-1]) is None:
        pytest.skip(f"no Python 3.{minor} here")
    for number, wheel in enumerate([distributions[1], distributions[3]]):
        words = ["install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
        python("-m", "venv", tmp_path / f"{number}", cwd=tmp_path, by=found)
        inside = tmp_path / f"{number}" / "bin" / "python"
        python("-m", "pip", *words, "--no-compile", wheel, cwd=tmp_path, by=inside)
        (folder,) = (tmp_path / f"{number}").glob("lib/*/site-packages/leakgauge")
        python("-W", "error", "-m", "compileall", "-q", folder, cwd=tmp_path, by=inside)
        library = folder / "harness" / "core" / "native.py"
        code = f"import runpy; print(runpy.run_path({str(library)!r})['library']() is not None)"
        has = library.with_name("_native.so").exists()
        assert (python("-c", code, cwd=tmp_path, by=inside).strip(), has) == (str(has), number == 0)


@pytest.mark.slow
def test_the_installed_wheel_works_beside_packages_of_the_same_names(installed, project):
    def leakgauge(*words):
        """The output of the command in the user's project."""
        return python("-m", "leakgauge", *words, cwd=project, PYTHONPATH=str(installed))

    words = ["-m", "pytest", "-s", "-p", "no:cacheprovider", "tests"]
    assert f"plugin: {installed}/leakgauge/" in python(*words, cwd=project, PYTHONPATH=str(installed))
    assert leakgauge("--version").startswith("leakgauge ")
    attacks = leakgauge("list", "attacks")
    assert all(f"\n{name} " in f"\n{attacks}" for name in registry.classes("attack"))
    assert f"{len(load_study('demo').cells)} cells" in leakgauge("show", "demo")
    assert "jopeq/table-2 " in leakgauge("reproduce", "--list")
    assert "[1/1] done" in leakgauge("run", "tiny.toml", "--out", "out", "--workers", 1)
    assert "</html>" in (project / "out" / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_the_demo_runs_from_the_installed_wheel(installed, project):
    python("-m", "leakgauge", "run", "demo", "--out", "out", cwd=project, PYTHONPATH=str(installed))
    python(ROOT / ".ci" / "check_demo.py", "out", cwd=project, PYTHONPATH=str(installed))


def test_an_editable_install_imports_this_checkout(tmp_path):
    code = "import leakgauge.harness; print(leakgauge.harness.__file__)"
    assert Path(python("-c", code, cwd=tmp_path).strip()).resolve() == ROOT / "harness" / "__init__.py"


def test_mypy_checks_every_module():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]["packages"]
    finder = FindModuleCache(SearchPaths((str(ROOT),), (), (), ()), None, None)
    found = [Path(one.path).resolve() for package in packages for one in finder.find_modules_recursive(package)]
    assert packages == ["leakgauge"]
    assert sorted(found) == sorted((ROOT / name).resolve() for name in packaged() if name.endswith(".py"))
