import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType

import pytest

from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.errors import UnknownNameError
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.registry import ParameterError
from tests.doubles import Counting, Echo


@pytest.fixture
def fresh():
    """The registry scans again, in the test and after it."""
    registry.classes.cache_clear()
    yield
    registry.classes.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", ["counting", "gaussian"])
def test_another_distribution_registers_by_entry_point_under_a_new_name(monkeypatch, name):
    found = EntryPoints([EntryPoint(name, "tests.doubles:Counting", "leakgauge.defenses")])
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: found.select(group=group))
    if name == "counting":
        assert registry.lookup("defense", name) is Counting
        assert name not in registry.classes("attack")
        assert list(registry.classes("defense")) == sorted(registry.classes("defense"))
        return
    with pytest.warns(UserWarning, match="plug-in gaussian = tests.doubles:Counting is left out: two defenses"):
        assert registry.classes("defense")["gaussian"] is Gaussian


def test_a_class_may_be_named_by_its_module():
    assert registry.lookup("attack", "tests.doubles:Echo") is Echo
    for name, message in (
        ("tests.nowhere:X", "No module named 'tests.nowhere'"),
        ("tests.doubles:Nobody", "has no attribute 'Nobody'"),
        ("tests.doubles:Counting", "expected a subclass of Attack"),
    ):
        with pytest.raises(UnknownNameError, match=message):
            registry.lookup("attack", name)


@pytest.mark.parametrize("count", [0, 2])
def test_a_file_holds_one_public_class(count, monkeypatch):
    odd = ModuleType("leakgauge.defenses.odd")
    names = {f"Odd{i}": type(f"Odd{i}", (Gaussian,), {"__module__": odd.__name__}) for i in range(count)}
    vars(odd).update({"Gaussian": Gaussian, **names})
    monkeypatch.setitem(sys.modules, odd.__name__, odd)
    with pytest.raises(ImportError, match=rf"expected one public defense class in {odd.__name__}, got {count}"):
        registry._of_file("defense", "odd")


def test_all_problems_of_the_parameters_are_reported_together():
    with pytest.raises(ParameterError) as caught:
        registry.build("defense", "gaussian", {"clip": "wide", "delta": True, "sigma": 1.0})
    assert caught.value.problems == [
        ("clip", "got 'wide', expected a number"),
        ("delta", "got True, expected a number"),
        ("sigma", "unknown key, got 1.0. Known: clip, epsilon, delta, noise_std"),
    ]


def test_a_specification_builds_what_it_names():
    assert registry.build_defense(PartSpec("gaussian", {"clip": 2, "noise_std": 1.0, "epsilon": None})) == Gaussian(
        clip=2.0, noise_std=1.0
    )
    assert registry.defaults("defense", "gaussian")["epsilon"] == 8.0
    info = registry.describe(PartSpec("prior"))
    assert (info.kind, info.floor, info.aware) == ("reconstruction", True, False)
