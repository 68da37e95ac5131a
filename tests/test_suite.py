"""The suite of checks itself: each check finds a fault that no other check finds, and new files pass through it."""

import itertools
import subprocess
import sys

import pytest

from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.federation import registry
from leakgauge.harness.integrations.parts import built, named
from leakgauge.harness.integrations.suite import examine
from leakgauge.testing import ConformanceError, Effort, check_attack, check_defense, check_task, checks_of
from tests import planted
from tests.by_rows import by_rows
from tests.command import call
from tests.doubles import Counting

QUICK = Effort(trials=100, evaluations=40, victims=2)
NUMBERS = itertools.count()
PARAMETERS = {"defense": {}, "attack": {"steps": 60, "restarts": 1}}

ADD = "    def clipped("
"""The place of the skeleton at which methods are added."""

CLIPPED = "self.clipped(update)"
METHODS = {
    "a state that nobody else has": "def init(self, setting):\n        return COUNT.append(1) or len(COUNT)",
    "numbers in clear": "def plaintext_statistic(self, updates, setting):\n"
    "        return updates.norm(dim=1, keepdim=True)\n\n"
    "    def read_plaintext_statistic(self, received, setting):\n        return torch.zeros(len(received), 1).double()",
    "the first message": "def decode(self, state, received, links, private):\n"
    "        return self.estimate(state, received[0], links.each()[0])",
    "assumptions": "def violations(self, updates, links, lr):\n        updates[0].mul_(2)\n        return {}",
    "a repr": "def __repr__(self):\n        return 'mine'",
}


def method(name):
    return [(ADD, f"    {METHODS[name]}\n\n{ADD}")]


def mistaken(name):
    mistake = (planted.DEFENSE | planted.ATTACK)[name]
    return [(mistake.old, mistake.new)]


LARGE = "if len(update) > 1500:\n            raise ValueError('too long')"
SCORE = "return lambda update: ("

UNSTATED = ("def message_distribution(", "def _message_distribution(")
AUDITED = ("claim", "distribution", "dependence", "audit")
"""The checks that read the audit."""

ALONE = {
    ("defense", "class"): (method("a repr"), ()),
    ("defense", "parameters"): (mistaken("any value"), ()),
    ("defense", "encode"): ([("check_update(update)", "check_update(update)\n        update[10]")], ()),
    ("defense", "update"): (mistaken("not finite"), ()),
    ("defense", "keys"): (mistaken("torch, to read"), ()),
    ("defense", "private"): ([(planted.NOISE, f"{planted.NOISE} + 0 * rng.normal(Key(7), {planted.SHAPE})")], ()),
    ("defense", "memory"): (method("a state that nobody else has"), ()),
    ("defense", "plaintext"): (method("numbers in clear"), ()),
    ("defense", "mean"): (method("the first message"), ()),
    ("defense", "bound"): ([(planted.SUM, f"{planted.SUM} + 0 * update.square().sum()")], AUDITED),
    ("defense", "estimate"): (mistaken("twice the update"), ()),
    ("defense", "messages"): (mistaken("longer"), ()),
    ("defense", "clip"): (
        [UNSTATED, (planted.SUM, f"({CLIPPED} if update.norm() < 1e5 else update).double() + noise")],
        (),
    ),
    ("defense", "noise"): ([UNSTATED, (planted.NOISE, f"{planted.NOISE}\n        noise[40:41] = 0")], ()),
    ("defense", "likelihood"): (mistaken("sharp scores"), ()),
    ("defense", "assumptions"): (method("assumptions"), ()),
    ("defense", "claim"): (mistaken("half the claim"), ()),
    ("defense", "distribution"): (
        [(planted.NOISE, f"{planted.NOISE}.clamp(-3 * self.sigma, 3 * self.sigma)")],
        ("audit",),
    ),
    ("defense", "dependence"): (
        [(planted.NOISE, f"{planted.NOISE}\n        noise = -noise.abs() if link.sender.samples > 90_000 else noise")],
        ("audit",),
    ),
    ("defense", "audit"): (
        mistaken("half the noise"),
        ("noise", "likelihood", "claim", "distribution", "dependence"),
    ),
    ("defense", "training"): ([("check_update(update)", f"check_update(update)\n        {LARGE}")], ("attacks",)),
    ("defense", "attacks"): (
        [(SCORE, f"if links.setting.dim > 1500:\n            raise OSError\n        {SCORE}")],
        (),
    ),
    ("attack", "class"): ([("    def _search(", f"    {METHODS['a repr']}\n\n    def _search(")], ()),
    ("attack", "parameters"): ([("    steps: int = 200", "    weight: float = 1.0\n    steps: int = 200")], ()),
    ("attack", "needs"): ([('frozenset({"messages", "models"})', '{"messages", "models"}')], ()),
    ("attack", "truth"): (mistaken("the truth"), ()),
    ("attack", "keys"): (mistaken("torch"), ()),
    ("attack", "guesses"): (mistaken("one guess"), ("diverges", "floor")),
    ("attack", "threats"): (mistaken("an unnamed need"), ()),
    ("attack", "diverges"): (mistaken("an exception"), ()),
    ("attack", "floor"): (mistaken("a wrong sign"), ()),
}
"""For each check: what is replaced in a skeleton, and the other checks that fail too."""


def fault(folder, kind, replaced):
    """A skeleton with a fault, as a file of this folder."""
    text = (planted.FOLDER / f"my_{kind}.py").read_text("utf-8").replace("\nfrom ", "\nCOUNT = []\nfrom ", 1)
    for old, new in replaced:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / f"alone_{next(NUMBERS)}.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _paths(monkeypatch, tmp_path):
    """Folders that the suite imports from are forgotten."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)


def test_every_check_has_a_fault():
    assert set(ALONE) == {(kind, name) for kind in ("defense", "attack") for name, _ in checks_of(kind)}


@pytest.mark.parametrize(("kind", "check"), ALONE, ids=map(" ".join, ALONE))
def test_a_check_finds_its_fault(kind, check, tmp_path):
    part = named(str(fault(tmp_path, kind, ALONE[kind, check][0])), PARAMETERS[kind])
    with pytest.raises(ConformanceError) as caught:
        dict(checks_of(kind, QUICK))[check](built(part) if check != "class" else part.code)
    assert [finding.name for finding in caught.value.findings] == [check]


@pytest.mark.matrix
@pytest.mark.ci(6)
@pytest.mark.parametrize(("kind", "check"), ALONE, ids=map(" ".join, ALONE))
def test_a_check_finds_a_fault_that_no_other_check_finds(kind, check, tmp_path):
    replaced, also = ALONE[kind, check]
    findings = examine(str(fault(tmp_path, kind, replaced)), PARAMETERS[kind], QUICK)
    failed = {finding.name: finding.text for finding in findings if finding.mark == "FAIL"}
    assert failed.keys() == {check, *also}, failed


def test_all_failed_checks_are_listed_in_one_error_with_advice(tmp_path):
    part = named(str(fault(tmp_path, "defense", [*mistaken("any value"), *mistaken("not finite")])), {})
    with pytest.raises(ConformanceError) as caught:
        check_defense(part.code, Effort(trials=30, evaluations=10, victims=1))
    assert [finding.name for finding in caught.value.findings] == ["parameters", "update"]
    first, *rest = str(caught.value).splitlines()
    assert first == f"{part.name} fails:"
    assert rest[0].startswith("  parameters: clip=nan, clip=inf, clip=-1.0")
    assert rest[1].endswith("begin it with leakgauge.check_update(update)")


def test_a_check_returns_its_finding_or_raises_and_takes_a_class_an_object_or_a_name():
    checks = dict(checks_of("defense"))
    for given in (Gaussian, Gaussian(), "gaussian"):
        assert checks["class"](given) == ("ok", "class", "gaussian(clip=1.0, epsilon=8.0, delta=1e-05)")
    assert checks["memory"](Gaussian(clip=2.0)) == ("skipped", "memory", "neither state nor memory")
    cascade = registry.build("defense", "laplace+sdq", {"bits": 3})
    assert "laplace+sdq(" in checks["class"](cascade).text
    with pytest.raises(ConformanceError, match=r"tests.doubles:Counting fails:\n  messages: "):
        checks["messages"](Counting)


@by_rows(
    (check_attack, Gaussian, "check_attack got the defense gaussian: use check_defense"),
    (check_defense, Effort, "expected a defense, an attack, a class of one, or the module of a task, got"),
    (check_task, "prior", "use check_attack"),
)
def test_a_part_of_another_kind_is_refused(check, given, words):
    with pytest.raises(TypeError, match=words):
        check(given)


STATEFUL = '''
"""A defense with a state and a memory, by a stranger."""

from dataclasses import dataclass

import torch

from leakgauge import Defense, check_update, pack_float32, positive, unpack_float32
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.federation import registry
from leakgauge.harness.integrations.parts import named
from leakgauge.harness.integrations.suite import examine
from leakgauge.testing import check_defense


@dataclass(frozen=True)
class Fading(Defense[float, torch.Tensor]):
    """Rounds each update to a grid that becomes finer; what is rounded away is added to the client's next update."""

    randomized = False
    step: float = 0.01

    def __post_init__(self):
        positive(step=self.step)

    def init(self, setting):
        return self.step

    def advance(self, state, feedback):
        return state / 2

    def remember(self, setting):
        return torch.zeros(setting.dim)

    def compensated(self, memory, update):
        return update + memory

    def encode(self, state, memory, update, link, private):
        check_update(update)
        sent = state * ((update + memory) / state).round()
        return pack_float32(sent), update + memory - sent

    def estimate(self, state, received, link):
        return unpack_float32(received, link.setting.dim)

    def likelihood(self, state, received, links):
        sent = torch.stack([unpack_float32(message, links.setting.dim) for message in received])
        return lambda update: (update - sent).square().sum(-1) / (2 * (state / 4) ** 2)


def test_it():
    check_defense(Fading)
'''

MEAN = '''
"""A stranger's attack on labels."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakgauge import Attack, Labels, Round
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.federation import registry
from leakgauge.harness.integrations.parts import named
from leakgauge.harness.integrations.suite import examine
from leakgauge.testing import check_attack


@dataclass(frozen=True)
class LastLayer(Attack):
    """The label of an image by the most negative entry of the last bias' gradient."""

    kind: ClassVar[str] = "labels"

    @property
    def needs(self):
        return frozenset({"messages", "models"})

    def run(self, seen, key):
        round_ = Round(seen.defense, seen.setting, seen.model.state, seen.model.round)
        sent = [round_.read(message)[-seen.task.classes :] for message in seen.messages]
        sent = sent if seen.setting.sends == "gradient" else [-bias for bias in sent]
        pairs = zip(sent, seen.messages, strict=True)
        return Labels(tuple(bias.argsort()[: message.images] for bias, message in pairs))


def test_it():
    check_attack(LastLayer)
'''


@pytest.mark.matrix
@pytest.mark.parametrize("text", [STATEFUL, MEAN], ids=["a defense with a state", "an attack"])
@pytest.mark.ci("an attack")
def test_a_new_part_is_one_file_that_passes_every_check_by_command_and_by_pytest(text, tmp_path):
    path = tmp_path / f"stranger_{next(NUMBERS)}.py"
    path.write_text(text, encoding="utf-8")
    done = call("doctor", path)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "nothing wrong was found"), done.output
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
