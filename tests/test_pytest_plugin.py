"""The fixture `leakage` in a user's own test suite."""

import json

import pytest

from leakgauge.harness import data
from leakgauge.harness.cli import fixture as leakage
from leakgauge.harness.federation import registry

pytest_plugins = ["pytester"]

# a pytest run in this process unloads the modules that it imports, and numpy and torch cannot be loaded twice
assert leakage.Leakage
assert registry.classes("defense")
assert registry.classes("attack")
assert data.load("digits", data.default_root())

MINE = """
import dataclasses
import pytest
from leakgauge.defenses.gaussian import Gaussian

STD = 0.3

@dataclasses.dataclass(frozen=True)
class Mine(Gaussian):
    "A user's own defense."

    def parameters(self):
        return super().parameters() | {"noise_std": 0.3}

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "noise_std", STD)

@pytest.fixture
def leak(leakage):
    return leakage(Mine(noise_std=0.3), attacks=["analytic"], images=8, model="linear")

def test_mine(leak):
    leak.assert_no_increase()
"""


@pytest.fixture
def suite(pytester):
    def run(*options, text=MINE):
        pytester.makepyfile(test_mine=text)
        return pytester.runpytest_inprocess("-p", "no:xdist", "-p", "no:cacheprovider", "-q", *options)

    return run


def test_a_baseline_is_made_with_a_reason_and_then_compared(suite, pytester):
    suite().stdout.fnmatch_lines(["*no baseline*--leakage-update REASON*"])
    suite("--leakage-update", "first").assert_outcomes(passed=1)
    (made,) = (pytester.path / "leakage").iterdir()
    assert made.name == "test_mine.py-test_mine.json"
    assert json.loads(made.read_text())["reason"] == "first"
    suite().assert_outcomes(passed=1)
    suite("--leakage-baseline", "elsewhere").assert_outcomes(failed=1)


def test_less_noise_in_the_code_fails_in_one_line_with_the_defense(suite):
    suite("--leakage-update", "first").assert_outcomes(passed=1)
    done = suite(text=MINE.replace("STD = 0.3", "STD = 0.01"))
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*fail: test_mine:Mine*under analytic*newly recognizable*"])
    assert "Traceback" not in done.stdout.str()


def test_limits_without_a_baseline(suite):
    text = MINE.partition("def test_mine")[0] + (
        "def test_below(leak):\n    leak.assert_below(0.9)\n"
        "def test_not_below(leak):\n    leak.assert_below(-0.9)\n"
        "def test_few(leak):\n    leak.assert_recognizable(at_most=8)\n"
        "def test_too_many(leakage):\n"
        "    leakage('none', attacks=['analytic'], images=8, model='linear').assert_recognizable(at_most=7)\n"
    )
    done = suite(text=text)
    done.assert_outcomes(passed=2, failed=2)
    done.stdout.fnmatch_lines(["*leakage is not below -0.9: test_mine:Mine*over 8 images*"])
    done.stdout.fnmatch_lines(["*8 images are recognizable, at most 7 may be: image 1, 2*"])


def test_too_few_images_inner_classes_and_membership_attacks_are_refused(suite):
    text = MINE.partition("@pytest.fixture")[0] + (
        "def test_few(leakage):\n"
        "    leakage(Mine(noise_std=0.3), attacks=['analytic'], images=4, model='linear').assert_no_increase()\n"
        "def test_inside(leakage):\n"
        "    class Inner(Mine): pass\n"
        "    with pytest.raises(ValueError, match='top of a module'):\n"
        "        leakage(Inner(noise_std=0.3))\n"
        "def test_members(leakage):\n"
        "    with pytest.raises(ValueError, match='expected attacks that reconstruct'):\n"
        "        leakage(Mine(noise_std=0.3), attacks=['membership-loss'])\n"
    )
    suite("--leakage-update", "first", text=text).assert_outcomes(passed=3)
    done = suite(text=text)
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(["*4 images are too few*"])


@pytest.mark.parametrize(("ci", "reason", "message"), [("true", "first", "refused"), ("", " ", "say why")])
def test_an_update_needs_a_person_and_a_reason(suite, monkeypatch, ci, reason, message):
    monkeypatch.setenv("CI", ci)
    done = suite("--leakage-update", reason)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"*--leakage-update: *{message}*"])


@pytest.mark.slow
def test_parallel_tests_have_separate_files(suite, pytester):
    text = MINE + "\ndef test_mine_too(leak):\n    leak.assert_no_increase()\n"
    pytester.makepyfile(test_mine=text)
    for options in (["--leakage-update", "first"], []):
        pytester.runpytest_subprocess("-n", "2", "-q", *options).assert_outcomes(passed=2)
    assert {path.name for path in (pytester.path / "leakage").iterdir()} == {
        "test_mine.py-test_mine.json",
        "test_mine.py-test_mine_too.json",
    }


def test_the_plugin_costs_nothing_until_it_is_used(pytester):
    pytester.makepyfile("import sys\ndef test_light():\n    assert 'torch' not in sys.modules\n")
    pytester.runpytest_subprocess("-q", "-p", "no:hypothesispytest", "-p", "no:playwright").assert_outcomes(passed=1)
