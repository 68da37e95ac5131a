"""The doctor names what is wrong with a defense, an attack or a task, and finds nothing wrong with what is right."""

import dataclasses
import itertools
import json
import sys

import pytest
import torch

from leakgauge.harness.core.errors import UnknownNameError
from leakgauge.harness.integrations import message_checks, suite
from leakgauge.harness.integrations.findings import Finding, finding
from leakgauge.harness.integrations.parts import named
from leakgauge.harness.integrations.quick import DefenseUnderTest, Effort, quick_study
from leakgauge.harness.integrations.suite import examine
from leakgauge.testing import checks_of
from tests import planted
from tests.by_rows import by_rows
from tests.command import call

QUICK = Effort(trials=200, evaluations=100, victims=2)
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def _paths(monkeypatch):
    """Folders that the doctor imports from are forgotten."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def first_fault(path):
    return next((one for one in examine(str(path), {}, QUICK) if one.mark == "FAIL"), None)


def fresh():
    """A name of a module that is not taken."""
    return f"planted_{next(NUMBERS)}"


@pytest.mark.table(6)
@pytest.mark.parametrize("name", planted.DEFENSE)
def test_a_planted_mistake_in_a_defense_is_named_with_its_place(name, tmp_path):
    mistake = planted.DEFENSE[name]
    found = first_fault(planted.write(tmp_path, "defense", name, mistake, fresh()))
    assert found is not None
    assert found.name == mistake.check, found
    assert all(word in found.text for word in mistake.words), found
    assert "\n" not in found.text


@pytest.mark.parametrize("name", planted.ATTACK)
@pytest.mark.matrix
def test_a_planted_mistake_in_an_attack_is_named_with_its_place(name, tmp_path):
    mistake = planted.ATTACK[name]
    path = planted.write(tmp_path, "attack", name, mistake, fresh())
    found = next((one for one in examine(str(path), {"steps": 30}, QUICK) if one.mark == "FAIL"), None)
    assert found is not None
    assert found.name == mistake.check, found
    assert all(word in found.text for word in mistake.words), found


CHEAP = [
    name
    for name, _ in checks_of("defense")
    if name not in ("claim", "distribution", "dependence", "audit", "training", "attacks")
]
"""The checks of messages, which need no study."""


def marks(found):
    return {one.name: one.mark for one in found}


def bare(folder, *, more=""):
    """The skeleton without likelihood, distribution and claim."""
    text = (planted.FOLDER / "my_defense.py").read_text("utf-8")
    path = folder / f"{fresh()}.py"
    path.write_text(text[: text.index("    # What follows is optional")] + more, encoding="utf-8")
    return path


def test_a_defense_without_claim_and_likelihood_is_measured_with_what_needs_neither(tmp_path):
    path = bare(tmp_path)
    found = list(examine(str(path), {}, QUICK))
    skipped = {name for name, mark in marks(found).items() if mark == "skipped"}
    assert skipped == {"memory", "plaintext", "clip", "noise", "likelihood", "assumptions", "claim", "distribution"}
    assert "FAIL" not in marks(found).values()
    said = {one.name: one.text for one in found}
    assert said["claim"] == "no `claim`: nothing is promised"
    assert "refused: MyDefense states no likelihood" in said["attacks"]
    assert "INCONCLUSIVE" in said["audit"]


@by_rows(
    ("", "MyDefense states no likelihood, which this needs; write `likelihood`"),
    (
        "    def likelihood(self, state, received, links):\n        return None\n",
        "expected a function of updates from MyDefense.likelihood, got None",
    ),
)
def test_an_attack_that_needs_a_likelihood_fails_in_one_line_and_others_run(more, message, tmp_path):
    part = named(str(bare(tmp_path, more=more)), {})
    target = {"kind": "probe", "count": 2}
    run = quick_study(
        {"data": "digits", "model": "linear"},
        [{"name": part.name}],
        [{"name": name, "target": target} for name in ("prior", "map")]
        + [{"name": "membership-cosine", "target": {"kind": "members", "count": 10, "round": 0}}],
        limit=True,
    )
    assert [one.message for one in run.failures.values()] == [message]
    assert {one.cell.attack.name for one in run.results.values()} == {"prior", "membership-cosine", "lineup"}
    (training,) = run.trainings.values()
    flags = [flag.code for flag in training.flags]
    assert ("no-likelihood" in flags) == (not more)
    assert training.one_round.verdict == "NOTHING PROMISED"


def test_a_claim_that_is_no_claim_ends_the_training_in_one_line(tmp_path):
    part = named(str(bare(tmp_path, more="    def claim(self, history, setting):\n        return None\n")), {})
    run = quick_study({"data": "digits", "model": "linear"}, [{"name": part.name}], [{"name": "prior"}])
    failure, *_ = run.failures.values()  # of the floor and of the lineups
    assert failure.message.endswith(
        "expected a Claim from MyDefense.claim, got None; without `claim` nothing is promised"
    )


@pytest.mark.parametrize("name", ["numpy", "no seed", "counter", "half the noise"])
def test_a_training_says_when_its_messages_belong_to_no_key(name, tmp_path):
    part = named(str(planted.write(tmp_path, "defense", name, planted.DEFENSE[name], fresh())), {})
    run = quick_study({"data": "digits", "model": "linear"}, [{"name": part.name}], [{"name": "prior"}])
    (training,) = run.trainings.values()
    (text,) = [flag.message for flag in training.flags if flag.code == "not-repeatable"] or [""]
    expected = {"numpy": "the global generator of numpy.random", "half the noise": ""}.get(name, "other bytes")
    assert expected in text
    assert bool(expected) == bool(text)


def test_noise_that_one_coordinate_lacks_is_seen_without_a_distribution(tmp_path):
    for more, marked in (("noise[7 % len(noise)] = 0", "FAIL"), ("pass", "skipped")):
        path = bare(tmp_path)
        path.write_text(path.read_text().replace(planted.NOISE, f"{planted.NOISE}\n        {more}"))
        (found,) = [one for one in examine_some(path, "noise")]
        assert found.mark == marked
        assert ("coordinates have no noise, unlike the others: 7" in found.text) == (marked == "FAIL")


def examine_some(path, *names):
    part = named(str(path), {})
    tested = DefenseUnderTest(part, QUICK)
    return [finding(name, suite._CHECKS["defense"][name], tested, part.folder) for name in names]


HONEST = {
    "signs": (
        "return pack_float32(update.abs().mean() * update.sign()), None",
        {"randomized: ClassVar[bool] = False": "clip: float"},
    ),
    "a rotation that is shared": (
        f"turn = torch.linalg.qr(rng.normal(link.key, 2 * {planted.SHAPE}, torch.float64))[0]\n        "
        f"return pack_float32(self.clipped(update).double() + turn.T @ ({planted.NOISE.partition('= ')[2]})), None",
        {},
    ),
    "rounding at random": (
        "return pack_float32((update / 0.1 + rng.uniform(private, tuple(update.shape))).floor() * 0.1), None",
        {},
    ),
    "some coordinates": (
        "return pack_float32(4 * update * (rng.uniform(private, tuple(update.shape)) < 0.25)), None",
        {},
    ),
}


@pytest.mark.table(3)
@pytest.mark.parametrize("name", HONEST)
def test_honest_mechanisms_of_other_kinds_pass(name, tmp_path):
    path, (send, more) = bare(tmp_path), HONEST[name]
    text = path.read_text().replace(f"        {planted.NOISE}\n", "").replace(planted.SEND, send)
    for new, before in more.items():
        text = text.replace(f"    {before}", f"    {new}\n    {before}", 1)
    path.write_text("from typing import ClassVar\n" + text)
    assert [one for one in examine_some(path, *CHEAP) if one.mark == "FAIL"] == []


@pytest.mark.matrix
def test_a_hungry_decoder_is_found(tmp_path):
    hungry = planted.Mistake(
        planted.READ, f"torch.zeros(len(received), 64).numpy().copy()\n        {planted.READ}", "", ()
    )
    (found,) = examine_some(planted.write(tmp_path, "defense", "", hungry, fresh()), "messages")
    assert found.mark == "FAIL"
    assert "bytes of memory; look at its length first" in found.text


@by_rows(
    ("def (:", "SyntaxError"),
    ("raise SystemExit(1)", "SystemExit: 1"),
    ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
    ("1 / 0", "ZeroDivisionError: division by zero at broken.py:1 (1 / 0)"),
    ("x = 1", "expected one public defense or attack in"),
    ("from leakgauge.defenses.gaussian import Gaussian", "got neither"),
)
def test_a_file_that_holds_no_part_is_refused_in_one_line(text, words, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    done = call("doctor", "broken.py")
    assert (done.exit_code, "Traceback" in done.output) == (2, False)
    (line,) = done.stderr.splitlines()
    assert words in line


def test_two_parts_in_a_file_need_a_name(tmp_path, monkeypatch):
    stem = fresh()
    text = (planted.FOLDER / "my_defense.py").read_text("utf-8")
    second = text[text.index("@dataclass") :].replace("MyDefense", "Other")
    (tmp_path / f"{stem}.py").write_text(f"{text}\n\n{second}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownNameError, match="got MyDefense, Other; name one as module:Class"):
        named(f"{stem}.py", {})
    assert named(f"{stem}:Other", {}).code.__name__ == "Other"
    for name, words in (
        (f"{stem}:Third", "no 'Third' in"),
        (f"{stem}:", "expected FILE.py"),
        ("nobody", "expected FILE"),
    ):
        with pytest.raises(UnknownNameError, match=words):
            named(name, {})


@by_rows(
    (["--set", "clip=-1"], 2, "expected clip > 0, got clip=-1.0"),
    (["--set", "width=2"], 2, "width: unknown key, got 2. Known: clip, epsilon, delta"),
)
def test_parameters_that_a_part_refuses_are_one_line(words, code, line, tmp_path):
    done = call("doctor", planted.FOLDER / "my_defense.py", *words)
    assert done.exit_code == code
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_class_without_a_method_is_refused_by_its_name(tmp_path):
    mistake = planted.Mistake("    def estimate(", "    def read(", "", ())
    path = planted.write(tmp_path, "defense", "", mistake, fresh())
    done = call("doctor", path)
    assert done.exit_code == 2
    assert done.stderr.endswith("expected `estimate` in MyDefense, got none\n")


def test_the_command_prints_a_line_for_each_check_and_has_a_code_of_its_own(tmp_path, monkeypatch):
    found = [
        Finding("ok", "class", "fine"),
        Finding("FAIL", "noise", "half"),
        Finding("skipped", "distribution", "none"),
    ]
    monkeypatch.setattr(suite, "examine", lambda what, parameters: iter(found))
    done = call("doctor", "x.py")
    assert done.exit_code == 7
    assert done.stdout.splitlines() == [
        "ok   class: fine",
        "FAIL noise: half",
        "—    distribution: none",
        "1 of 3 checks failed: noise",
    ]
    done = call("doctor", "x.py", "--json")
    assert done.exit_code == 7
    assert json.loads(done.stdout)[1] == {"mark": "FAIL", "name": "noise", "text": "half"}
    del found[1]
    done = call("doctor", "x.py")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "nothing wrong was found")


def test_a_watched_call_leaves_no_trace_behind():
    import sys as system

    assert (system.gettrace(), system.getprofile()) == (None, None)
    part = named(str(planted.FOLDER / "my_defense.py"), {})
    tested = DefenseUnderTest(part, QUICK)
    state = torch.get_rng_state()
    assert message_checks.check_keys(tested).startswith("same keys, same bytes")
    assert (system.gettrace(), system.getprofile()) == (None, None)
    assert torch.equal(state, torch.get_rng_state())
    assert dataclasses.is_dataclass(tested.defense)
