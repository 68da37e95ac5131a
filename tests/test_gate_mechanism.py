"""The gate by the code: fingerprints name changes, and distributions of messages are compared."""

import dataclasses
import functools

import pytest

from leakgauge import load_study, rng
from leakgauge.harness.core.fingerprints import DRAWN
from leakgauge.harness.federation import loop, registry
from leakgauge.harness.federation.round import Client
from leakgauge.harness.gate.mechanism import compare, distribution_checks
from leakgauge.harness.gate.rules import Verdict
from leakgauge.harness.study.fingerprints import take
from tests.faults.library import lying

SMALL = """
name = "small"
seeds = [0]
tasks = [{ data = "digits", model = "mlp-small" }]
federations = [{ clients = 4, rounds = 2, algorithm = "fedsgd", batch = 32, lr = 1.0 }]
defenses = [
    { name = ["none", "jopeq"] },
    { name = "gaussian", noise_std = 0.05 },
    { name = "top-k", fraction = 0.05, feedback = true },
    { name = "udp", epsilon = 700.0 },
]
limit = false
[[attacks]]
name = "idlg"
evaluations = 20
target = { kind = "probe", round = 0, count = 8 }
[[attacks]]
name = "prior"
guess = "mean"
target = { kind = "probe", round = 0, count = 8 }
"""
PRIVATE = {"private", "server", "channel", "noise"}
"""Names of the keys from which noise is drawn."""


@functools.cache
def smoke():
    """The fingerprints of the study `smoke` without attacks, and its cells by defense."""
    cells = [cell for cell in load_study("smoke").cells if cell.attack.parameters.get("guess") == "mean"]
    return cells, take(cells)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "small.toml"
    path.write_text(SMALL)
    return load_study(path)


@pytest.fixture(scope="module")
def before(small):
    return take(small.cells)


def redraw(monkeypatch, number=1):
    """Rename every client's private key, as an edit of a key's name does."""

    def of(cls, sender, update, memory, key):
        return cls(sender, update, memory, key.child("private", f"renamed {number}"), key.child("shared"))

    monkeypatch.setattr(Client, "of", classmethod(of))


def scale_noise(monkeypatch, factor):
    """Scale all that is drawn around zero by a client, the server or the channel."""

    def scaled(name, draw):
        def drawn(key, *rest, **more):
            own = PRIVATE & set(key.path) and "update" not in key.path
            return draw(key, *rest, **more) * factor if own else draw(key, *rest, **more)

        monkeypatch.setattr(rng, name, drawn)

    for name in ("normal", "laplace", "signed_exponential"):
        scaled(name, getattr(rng, name))


def instead(monkeypatch, name, change):
    """Another defense, or attack, in the place of this one."""

    def swapped(build):
        return lambda spec: change(build(spec)) if spec.name == name else build(spec)

    for kind in ("build_defense", "build_attack"):
        monkeypatch.setattr(registry, kind, swapped(getattr(registry, kind)))


def failing(now, before, changed):
    return [check.key.split("/")[0].split("(")[0] for check in distribution_checks(now, before, changed)
            if check.verdict is Verdict.FAIL]  # fmt: skip


def test_unchanged_code_has_equal_fingerprints(small, before):
    again = take(small.cells)
    assert again == before
    assert compare(again, before).lines == ()
    whats = {one.what for one in before}
    assert whats == {"encode", "estimate", "likelihood", "claim", "training", "attack", *DRAWN}


def with_clip(factor):
    return lambda one: lying(
        one, lambda liar, honest, *call: type(one).encode(dataclasses.replace(one, clip=factor * one.clip), *call)
    )


def forgetful(liar, honest, state, memory, update, link, private):
    """Error feedback whose residual is dropped."""
    return honest(state, liar.remember(link.setting), update, link, private)


CHANGES = {
    "clip twice as wide": ("gaussian", with_clip(2.0), {"encode", "estimate", "likelihood", "messages"}, True),
    "no clip": ("gaussian", with_clip(1e9), {"encode", "estimate", "likelihood", "messages"}, True),
    "dropped residual": (
        "top-k",
        lambda one: lying(one, forgetful),
        {"encode", "estimate", "likelihood", "messages"},
        True,
    ),
    "claim": (
        "gaussian",
        lambda one: lying(
            one, lambda liar, honest, *call: dataclasses.replace(honest(*call), epsilon=1e-3), method="claim"
        ),
        {"claim"},
        False,
    ),
    "likelihood": (
        "jopeq",
        lambda one: lying(
            one, lambda liar, honest, *call: lambda update: 1.1 * honest(*call)(update), method="likelihood"
        ),
        {"likelihood"},
        False,
    ),
    "weaker attack": ("idlg", lambda one: dataclasses.replace(one, evaluations=5), {"the attack"}, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found_named_and_tested(name, small, before, monkeypatch):
    part, change, whats, moves = CHANGES[name]
    instead(monkeypatch, part, change)
    now = take(small.cells)
    changed = compare(now, before)
    (line,) = changed.lines
    assert (line.split("(")[0], set(line.rpartition("): ")[2].split(", "))) == (part, whats)
    assert set(failing(now, before, changed)) == ({part} if moves else set())


def test_a_changed_training_is_found_and_explains_the_rest(small, before, monkeypatch):
    plan = loop.make_plan
    monkeypatch.setattr(loop, "make_plan", lambda spec, lr, *rest: dataclasses.replace(plan(spec, lr, *rest), batch=16))
    changed = compare(take(small.cells), before)
    assert (changed.lines, changed.training) == (("local training or the federated loop",), True)


@pytest.mark.matrix
def test_redrawn_noise_is_no_other_distribution(monkeypatch):
    cells, base = smoke()
    redraw(monkeypatch)
    now = take(cells)
    changed = compare(now, base)
    assert len(changed.defenses) > 15
    assert failing(now, base, changed) == []


@pytest.mark.slow
def test_twenty_redraws_raise_at_most_one_alarm(monkeypatch):
    cells, base = smoke()
    alarms = 0
    for number in range(20):
        redraw(monkeypatch, number)
        now = take(cells)
        alarms += bool(failing(now, base, compare(now, base)))
    assert alarms <= 1


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.5, 0.8])
def test_less_noise_is_found_in_every_defense_that_draws_it(factor, monkeypatch):
    cells, base = smoke()
    redraw(monkeypatch)
    scale_noise(monkeypatch, factor)
    now = take(cells)
    found = set(failing(now, base, compare(now, base)._replace(training=True)))
    noisy = {"t-noise", "jopeq", "jopeq-t", "jopeq-sound", "dp-fedavg", "dp-sgd", "gaussian", "laplace", "laplace+sdq"}
    assert found >= noisy | {"udp", "udp-crd", "udp-lei", "ota", "ota-orthogonal"}
    assert not found & {"none", "top-k", "random-mask", "soteria", "precode", "sdq", "sdq-lattice"}
