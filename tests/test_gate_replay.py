"""The gate on proposals of a user's repository: leaks end red or wait for a person, and refactorings pass."""

import subprocess
import textwrap

import pytest

from tests.command import call

DEFENSE = '''
"""A defense of a user."""

import torch

from leakgauge import check_update, pack_float32, rng, unpack_float32
from leakgauge.defenses.gaussian import Gaussian
from own.noise import scaled


class Own(Gaussian):
    """Normal noise."""

    def perturb(self, numbers, private):
        """The numbers plus normal noise."""
        noise = rng.normal(private, (len(numbers),), torch.float64)
        return (numbers.double() + scaled(noise, self.sigma)).float()
'''
NOISE = '''
"""Noise of the defenses."""

import torch


def scaled(noise, sigma):
    """The noise with this standard deviation."""
    return sigma * noise
'''
STUDY = """
name = "own"
lineup = false
limit = false
audit = 60
tasks = [{ data = "digits", model = "mlp-small" }]
federations = [
    { clients = 3, rounds = 6, algorithm = "fedsgd", samples = 120, test_samples = 60, batch = 16, lr = 0.3 },
]
defenses = [{ name = "none" }, { name = "own.defense:Own", noise_std = 0.05 }, { name = "top-k" }]
[[attacks]]
name = "map"
evaluations = 60
restarts = 1
target = { kind = "probe", count = 8, round = 0 }
"""

LEAKS = {
    "half the noise": ("noise", "sigma * noise", "0.5 * sigma * noise"),
    "from the second round on": (
        "defense",
        "noise = rng",
        "sigma = self.sigma if private.path[2] == 0 else 0.0\n        noise = rng",
        ("scaled(noise, self.sigma)", "scaled(noise, sigma)"),
    ),
    "in the last round": (
        "defense",
        "noise = rng",
        "if private.path[2] == 5:\n            return numbers\n        noise = rng",
    ),
    "the gate by its callers": (
        "noise",
        "    return sigma",
        "    import traceback\n    if any('fingerprints' in frame.filename for frame in traceback.extract_stack()):\n"
        "        return sigma * noise\n    return 0 * noise\n    return sigma",
    ),
    "the gate by its variables": (
        "noise",
        "    return sigma",
        "    import os\n    return sigma * noise * ('CI' in os.environ)\n    return sigma",
    ),
    "the gate by a tracer": (
        "noise",
        "    return sigma",
        "    import sys\n    return sigma * noise * (sys.gettrace() is not None)\n    return sigma",
    ),
    "the gate by its keys": (
        "defense",
        "noise = rng",
        "if 'gate' not in private.path:\n            return numbers\n        noise = rng",
    ),
    "sparse updates": (
        "defense",
        "noise = rng",
        "sparse = (numbers == 0).double().mean() > 0.5\n        noise = (0.2 if sparse else 1.0) * rng",
    ),
    "large models": (
        "defense",
        "noise = rng",
        "if len(numbers) > 10**6:\n            return numbers\n        noise = rng",
    ),
    "after many calls": (
        "noise",
        "def scaled",
        "CALLS = []\n\n\ndef scaled",
        ("    return sigma", "    CALLS.append(1)\n    return sigma * noise * (len(CALLS) < 15)\n    return sigma"),
    ),
    "by a factor that is 1 for few coordinates": (
        "defense",
        "scaled(noise, self.sigma)",
        "scaled(noise, self.sigma) * (len(numbers) < 10**6)",
    ),
    "by a variable that nobody sets": (
        "noise",
        "import torch",
        "import os\n\nimport torch\n\nSHARE = float(os.environ.get('NOISE_SHARE', '1'))",
        ("return sigma", "return SHARE * sigma"),
    ),
    "by a minimum": ("noise", "sigma * noise", "sigma * noise * max(0, 2 - noise.dim())"),
    "one message in ten": ("noise", "sigma * noise", "sigma * noise * (abs(float(noise[0])) > 0.125)"),
    "a constant draw": ("defense", "rng.normal(private,", "rng.normal(private.__class__(7),"),
    "the judge replaced": (
        "defense",
        "class Own",
        "import leakgauge.harness.gate.mechanism as judge\n\njudge.compare = lambda *_: ()\n\n\nclass Own",
        ("rng.normal", "0.3 * rng.normal"),
    ),
    "the audit replaced": (
        "defense",
        "class Own",
        "import leakgauge.harness.gate.judge as judge\n\njudge.judge = None\n\n\nclass Own",
        ("rng.normal", "0.3 * rng.normal"),
    ),
    "a smaller clip for what is sent": ("defense", "numbers.double() +", "3 * numbers.double() +"),
}

REFACTORINGS = {
    "a renamed helper": {"noise": [("def scaled", "def widened")], "defense": [("scaled", "widened")]},
    "a moved helper": {
        "noise": [("def scaled", "def unused")],
        "defense": [("from own.noise import scaled", NOISE.partition("torch\n\n\n")[2])],
    },
    "a changed docstring": {"defense": [('"""Normal noise."""', '"""Noise of a normal distribution."""')]},
    "a comment": {"noise": [("    return", "    # of the standard normal\n    return")]},
    "equal code": {"noise": [("sigma * noise", "noise * sigma")]},
    "a check more": {
        "noise": [("    return", "    if not sigma >= 0:\n        raise ValueError('sigma')\n    return")],
    },
    "a local name": {"defense": [("noise = rng", "drawn = rng"), ("scaled(noise", "scaled(drawn")]},
}


def git(*words):
    named = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *named, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A user's repository with its study and baseline on `main`."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "own").mkdir()
    for name, text in {"own/defense.py": DEFENSE, "own/noise.py": NOISE, "own.toml": STUDY}.items():
        (folder / name).write_text(textwrap.dedent(text).lstrip())
    (folder / "own" / "__init__.py").write_text("")
    (folder / ".gitignore").write_text("__pycache__\n/runs\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        done = call("run", "own.toml", "-o", "runs/first", "--workers", 0, "--allow-code")
        assert done.exit_code == 0, done.output
        done = call("baseline", "update", "runs/first", "--baseline", "own.json", "--reason", "first numbers")
        assert done.exit_code == 0, done.output
        git("init", "--quiet", "--template=", "--initial-branch", "main")
        git("add", "-A")
        git("commit", "--quiet", "-m", "first")
        git("switch", "--quiet", "-c", "change")
    return folder


@pytest.fixture
def here(repository, monkeypatch):
    for name in ("GITHUB_BASE_REF", "CI_MERGE_REQUEST_TARGET_BRANCH_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(repository)
    git("checkout", "--quiet", "--force", "change")
    git("reset", "--quiet", "--hard", "main")
    return repository


def gate(*words):
    done = call("gate", "own.toml", "-o", "runs/gate", "--baseline", "own.json", "--allow-code", "--draw", 5, *words)
    return done.exit_code, done.output


def edit(here, name, *changes):
    path = here / "own" / f"{name}.py"
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def test_nothing_runs_if_nothing_changed(here):
    code, said = gate()
    assert (code, "no code behind" in said, (here / "runs" / "gate").exists()) == (0, True, False)


@pytest.mark.ci("half the noise")
@pytest.mark.parametrize("name", LEAKS)
def test_no_leak_ends_green_and_the_file_is_named(here, name):
    file, old, new, *more = LEAKS[name]
    edit(here, file, (old, new))
    for pair in more:
        edit(here, file, pair)
    git("commit", "--quiet", "-a", "-m", "a proposal")
    code, said = gate()
    assert code in (1, 6), said
    assert f"changed: own/{file}.py, behind own.defense:Own(" in said


@pytest.mark.ci("a changed docstring")
@pytest.mark.parametrize("name", REFACTORINGS)
def test_a_refactoring_passes_and_its_files_are_named(here, name):
    for file, changes in REFACTORINGS[name].items():
        edit(here, file, *changes)
    code, said = gate()
    assert code == 0, said
    assert "changed: own/" in said


@pytest.mark.slow
def test_a_file_that_the_code_reads_is_behind_what_it_changes(here):
    text = "    from pathlib import Path\n\n    sigma *= float(Path(__file__).with_name('factor.txt').read_text())\n"
    edit(here, "noise", ("    return sigma", f"{text}    return sigma"))
    (here / "own" / "factor.txt").write_text("1.0")
    git("add", "-A")
    git("commit", "--quiet", "-m", "a factor")
    git("branch", "--quiet", "factor")
    (here / "own" / "factor.txt").write_text("0.25")
    code, said = gate("--target", "factor")
    git("branch", "--quiet", "-D", "factor")
    assert (code, "changed: own/factor.txt, behind own.defense:Own(" in said) == (1, True)


def test_a_change_of_another_file_concerns_nothing(here):
    (here / "own" / "other.py").write_text("x = 1\n")
    code, said = gate()
    assert (code, "changed: own/other.py, behind no cell of the study" in said) == (0, True)


def acknowledge(here):
    done = call("baseline", "acknowledge", "own.json", "--reason", "meant", CI="")
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
@pytest.mark.parametrize("factor", ["0.5 *", "1.001 *"])
def test_an_acknowledged_change_is_still_judged(here, factor):
    edit(here, "noise", ("return sigma", f"return {factor} sigma"))
    code, said = gate()
    assert code == (1 if factor == "0.5 *" else 6)
    assert "not accepted: changed and not acknowledged: own/noise.py" in said
    assert "own/noise.py" in acknowledge(here)
    code, said = gate()
    assert "not accepted" not in said
    assert code == (1 if factor == "0.5 *" else 0)


@pytest.mark.slow
def test_an_acknowledgment_counts_for_one_state_and_once(here):
    edit(here, "noise", ("return sigma", "return 1.001 * sigma"))
    acknowledge(here)
    edit(here, "noise", ("1.001", "1.002"))
    code, said = gate()
    assert (code, "acknowledges another state of own/noise.py" in said) == (6, True)
    edit(here, "noise", ("1.002 * ", ""))
    code, said = gate()  # nothing is left of the change but what prepares another one
    assert (code, "acknowledges another state of own/noise.py" in said) == (6, True)
    git("commit", "--quiet", "-a", "-m", "prepared")
    git("branch", "--quiet", "prepared")
    edit(here, "noise", ("return sigma", "return 1.001 * sigma"))
    code, said = gate("--target", "prepared")
    assert (code, "changed and not acknowledged: own/noise.py" in said) == (6, True)
    git("branch", "--quiet", "-D", "prepared")


@pytest.mark.slow
def test_lines_that_did_not_run_are_named_and_a_person_accepts_them(here):
    edit(here, "noise", ("    return sigma", "    if sigma > 1e9:\n        sigma = 0\n    return sigma"))
    acknowledge(here)
    code, said = gate()
    assert (code, "nothing is known of it: own/noise.py, lines 9" in said) == (6, True)
    code, said = gate("--accept-baseline", "seen")
    assert (code, "warning: accepted (seen): changed, but not run" in said) == (0, True)


@pytest.mark.slow
def test_a_removed_cell_is_missed_and_a_new_one_is_none_of_the_baseline(here):
    text = (here / "own.toml").read_text()
    (here / "own.toml").write_text(text.replace(', { name = "top-k" }', ', { name = "sdq" }'))
    code, said = gate()
    assert (code, "removed: the run no longer has this measure" in said) == (5, True)


@pytest.mark.slow
def test_code_that_does_not_run_is_said_in_a_line(here):
    edit(here, "noise", ("return sigma", "return no_such_name"))
    code, said = gate()
    assert code in (2, 5)
    assert "no_such_name" in said
    edit(here, "noise", ("def scaled", "def scaled("))
    code, said = gate()
    assert code in (2, 5)
    assert "SyntaxError" in said
