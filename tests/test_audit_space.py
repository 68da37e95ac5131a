"""Neighbors from a space, all bytes, and statistics across rounds: each sees a class of faults that an audit missed."""

import struct

import pytest
import torch

from leakgauge import Key, Layout, Relation, Setting, Unit
from leakgauge.harness.audit import engine
from leakgauge.harness.audit.distinguishers import distinguishers
from leakgauge.harness.audit.neighbors import pairs, varied
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.small import Federation
from tests.audit_case import at_most, audit_mechanism, setting_of, strongest_adversary
from tests.by_rows import by_rows
from tests.faults.library import ANY, changed, last_bytes, lying, noiseless, only, telescoping, tensor_clip

KEY = Key(0, ("space",))
LAPLACE = registry.build("defense", "laplace", {"epsilon": 1.0})
GAUSSIAN = registry.build("defense", "gaussian", {"epsilon": 1.0})
UDP = registry.build("defense", "udp", {"epsilon": 1.0, "clips": "update"})
UNCLIPPED = changed(clip=1e6, epsilon=None, noise_std=GAUSSIAN.sigma)


def audited(defense, trials, setting, key=KEY):
    """The proved epsilon and the result of the audit."""
    federation = Federation.of(defense, setting)
    claim = defense.claim(federation.history, setting)
    mechanism = Mechanism(federation, strongest_adversary(claim))
    return claim.proved.epsilon(claim.delta), audit_mechanism(mechanism, claim, trials, 0.95, key)


def caught(defense, trials=300, setting=None, key=KEY):
    """The result of an audit that contradicts the proof."""
    proved, found = audited(defense, trials, setting or setting_of(36), key)
    assert found.strict > proved
    return found


SPACE = {
    "no noise for one client": (LAPLACE, noiseless, lambda u, link, p, n: link.sender.number == 1, 800),
    "no noise for large clients": (LAPLACE, noiseless, lambda u, link, p, n: link.sender.samples > 100, 500),
    "no noise above a norm": (LAPLACE, noiseless, lambda u, link, p, n: float(u.double().norm()) > 1e4, 500),
    "no noise below a norm": (GAUSSIAN, noiseless, lambda u, link, p, n: 0 < float(u.double().norm()) < 1e-2, 500),
    "no clip for one client": (GAUSSIAN, UNCLIPPED, lambda u, link, p, n: link.sender.number == 2, 300),
    "no clip above a norm": (GAUSSIAN, UNCLIPPED, lambda u, link, p, n: float(u.double().norm()) > 1e4, 300),
}


@pytest.mark.parametrize("fault", SPACE)
@pytest.mark.table(3)
def test_a_fault_of_some_senders_sizes_or_norms_is_caught_by_drawn_neighbors(fault):
    base, what, when, trials = SPACE[fault]
    found = caught(lying(base, only(when, what)), trials)
    assert found.pair == "drawn from a space"


@pytest.mark.matrix
def test_a_clip_of_each_tensor_is_caught_if_there_are_several():
    layout = Layout(("a", "b", "c"), ((121,), (44,), (35,)))
    setting = Setting(layout, 3, 3, 1, "update", 1, 0.1, 0, 20)
    gaussian = registry.build("defense", "gaussian", {"epsilon": 4.0})
    assert caught(lying(gaussian, tensor_clip), 600, setting).distinguisher in (
        "likelihood ratio",
        "linear",
        "direction",
    )


@by_rows((Unit.MESSAGE, Relation.ANY_TWO), (Unit.CLIENT, Relation.ADD_REMOVE), (Unit.COORDINATE, Relation.ANY_TWO))
def test_drawn_neighbors_have_all_norms_and_differ_as_the_unit_allows(unit, relation):
    inputs, *_ = varied(LAPLACE, setting_of(36), unit, relation, KEY)
    drawn = inputs.one if relation is Relation.ADD_REMOVE else inputs.zero
    exponents = drawn.double().norm(dim=1).log10()
    assert (exponents.min() < -3, exponents.max() > 23, bool((exponents.diff() > 0).all())) == (True, True, True)
    assert {sender.number for sender in inputs.senders} == {0, 1, 2}
    assert (
        {20 * k for k in range(1, 11)}
        >= {sender.samples for sender in inputs.senders}
        > {sender.samples for sender in inputs.senders[:1]}
    )
    moved = (inputs.one != inputs.zero).sum(1)
    assert bool((moved == 1).all()) is (unit is Unit.COORDINATE)
    assert bool((inputs.zero == 0).all()) is (relation is Relation.ADD_REMOVE)


def test_drawn_neighbors_of_a_self_scaled_defense_keep_norm_and_mean():
    defense = registry.build("defense", "jopeq", {})
    (inputs,) = varied(defense, setting_of(36), Unit.COORDINATE, Relation.ANY_TWO, KEY)
    assert len(set(inputs.focus.flatten().tolist())) > 3
    torch.testing.assert_close(inputs.zero.norm(dim=1), inputs.one.norm(dim=1), rtol=1e-6, atol=0.0)
    zero, one = inputs.hypotheses
    assert bool(((zero != one).sum(1) == 1).all())


def test_drawn_neighbors_depend_on_the_key_only():
    first, again, other = (
        varied(LAPLACE, setting_of(36), Unit.COORDINATE, Relation.ANY_TWO, Key(seed))[0] for seed in (0, 0, 1)
    )
    assert torch.equal(first.one, again.one)
    assert not torch.equal(first.one, other.one)


def largest(liar, honest, state, memory, update, link, private):
    """Only the third of the numbers that are largest in magnitude is sent: their places have no noise."""
    wire, memory = honest(state, memory, update, link, private)
    sent = torch.frombuffer(bytearray(wire), dtype=torch.float32)
    sent[update.abs().argsort(stable=True)[: len(sent) * 2 // 3]] = 0.0
    return sent.numpy().tobytes(), memory


@pytest.mark.matrix
def test_a_choice_of_places_by_magnitude_is_caught_by_neighbors_with_numbers_elsewhere():
    assert caught(lying(GAUSSIAN, largest), 800).pair == "few numbers, elsewhere"


@pytest.mark.parametrize("d", [200, 25_000])
@pytest.mark.matrix
def test_a_norm_in_the_last_four_bytes_is_caught(d):
    assert caught(lying(LAPLACE, last_bytes), 60, setting_of(d)).pair.endswith("from nothing")


def fitted(defense, d, trials=40):
    """Names of the distinguishers that apply to an update from nothing."""
    setting = setting_of(d)
    mechanism = Mechanism(Federation.of(defense, setting), strongest_adversary(defense.claim([None], setting)))
    inputs = pairs(defense, setting, Unit.COORDINATE, Relation.ANY_TWO, KEY)[1]
    traces = [mechanism.run(inputs, bit, trials, KEY.child(bit)) for bit in (0, 1)]
    return {each.name for each in distinguishers(mechanism, inputs, *traces)}


def test_a_byte_beyond_the_first_256_is_seen_and_honest_bytes_are_not():
    assert "bytes" in fitted(lying(LAPLACE, zero_or_not), 2000)
    assert "bytes" not in fitted(registry.build("defense", "laplace", {"epsilon": 1e-3}), 2000)


def zero_or_not(liar, honest, state, memory, update, link, private):
    """Byte 7000 says whether the first number is zero."""
    wire, memory = honest(state, memory, update, link, private)
    sent = bytearray(wire)
    sent[7000] = int(update[0] != 0)
    return bytes(sent), memory


def again(liar, honest, state, memory, update, link, private):
    """The noise of the first round in all rounds; the memory starts as None."""
    private = private if memory is None else memory
    return honest(state, None, update, link, private)[0], private


def late_norm(liar, honest, state, memory, update, link, private):
    """The norm in the place of the last number, from the third round on."""
    count = memory or 0
    wire, _ = honest(state, None, update, link, private)
    norm = struct.pack("<f", float(update.double().norm().clamp(max=1e30)))
    return (wire[:-4] + norm if count > 1 else wire), count + 1


ROUNDS = {
    "noise of the first round in all": (again, {"rounds", "linear", "direction"}),
    "none after the fifth message": (ANY["none after the fifth message"][1], None),
    "none in one round": (ANY["none in one round"][1], None),
    "noise that cancels": (telescoping, {"rounds", "linear", "likelihood ratio", "direction"}),
    "a norm in later rounds": (late_norm, {"nearest", "bytes", "linear", "rounds", "direction"}),
}


@pytest.mark.parametrize("fault", ROUNDS)
@pytest.mark.matrix
def test_a_fault_across_rounds_is_caught(fault):
    how, by = ROUNDS[fault]
    found = caught(lying(UDP, how), 200, setting_of(4, rounds=8))
    assert by is None or found.distinguisher in by


@pytest.mark.matrix
def test_honest_mechanisms_are_not_contradicted():
    cases = [(LAPLACE, setting_of(36)), (GAUSSIAN, setting_of(36)), (UDP, setting_of(4, rounds=4))]
    for defense, setting in cases:
        found = [audited(defense, 60, setting, KEY.child("honest", i)) for i in range(6)]
        assert sum(one.epsilon_lower > proved for proved, one in found) <= at_most(0.05, 6, 1e-3)


@pytest.mark.slow
def test_few_audits_of_drawn_neighbors_end_above_the_truth(monkeypatch):
    monkeypatch.setattr(engine, "pairs", varied)
    for name in ("laplace", "gaussian"):
        defense = registry.build("defense", name, {"epsilon": 1.0, **({"delta": 0.05} if name == "gaussian" else {})})
        found = [audited(defense, 60, setting_of(4), KEY.child("many", i)) for i in range(300)]
        assert sum(one.epsilon_lower > proved for proved, one in found) <= at_most(0.05, 300, 1e-3)
