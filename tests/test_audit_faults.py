"""Seeded faults in each defence: too little noise is caught by an audit, a dither that is reused by the bytes."""

import dataclasses
import itertools

import pytest

from harness import registry, rng
from harness.accounting import is_gaussian
from harness.audit import audit, contradicts, verdict, watcher
from harness.claim import Relation, Unit
from harness.contract import Sender, Setting
from harness.rng import Key
from harness.trials import Mechanism
from harness.vec import Layout
from tests.faults import Faulty, with_changes

KEY = Key(0, ("faults",))
WIDE = Setting(Layout(("all",), ((36,),)), 3, 3, 1, "update", 1, 0.1, 0, 20)
PAIR = dataclasses.replace(WIDE, layout=Layout(("all",), ((2,),)))


def made(name, **parameters):
    return registry.build("defense", name, parameters)


def halved(defense):
    """Of a t mechanism: a scale matrix of a sixth."""
    return {"s2": defense.noise.s2 / 6, "nu": defense.noise.nu}


T_NOISE = made("t-noise", epsilon=1.0)
FAULTS = {
    "t-noise": (T_NOISE, halved(T_NOISE), 300, WIDE),
    "jopeq": (made("jopeq", epsilon=1.0, gamma=6.0), {"epsilon": 4.0}, 300, WIDE),
    "jopeq-t": (made("jopeq-t", epsilon=1.0, bits=4, gamma=6.0), {"epsilon": 4.0}, 300, WIDE),
    "sqsgd": (made("sqsgd", epsilon=2.0, bits=1, ratio=1.0), {"epsilon": 14.0}, 600, PAIR),
    "piecewise": (made("piecewise", epsilon=1.0), {"epsilon": 4.0}, 300, PAIR),
    "vqsgd": (made("vqsgd", epsilon=2.0, repeats=1), {"epsilon": 6.0}, 300, PAIR),
    "dp-fedavg": (made("dp-fedavg", epsilon=4.0), {"epsilon": 10.0}, 300, WIDE),
    "ota-orthogonal": (made("ota-orthogonal", epsilon=1.2, delta=1e-2), {"epsilon": 4.0}, 600, WIDE),
    "udp-crd": (made("udp-crd", epsilon=4.0), {"epsilon": 8.0}, 300, WIDE),
    "udp-lei": (made("udp-lei", epsilon=4.0), {"epsilon": 8.0}, 300, WIDE),
}


def audited(defense, trials, setting, claim=None, key=KEY):
    """The claim and what an audit of it finds."""
    history = (defense.init(setting),)
    claim = claim or defense.claim(list(history), setting)
    return claim, audit(Mechanism(defense, setting, history, watcher(claim)), claim, trials, 0.95, key)


@pytest.mark.parametrize("name", FAULTS)
def test_noise_that_is_too_small_is_above_what_is_proved(name):
    defense, changes, trials, setting = FAULTS[name]
    claim, found = audited(with_changes(defense, **changes), trials, setting)
    assert contradicts(claim, found)
    assert "above what is proved" in verdict(claim, found)[1]
    assert not contradicts(*audited(Faulty(defense, defense), trials, setting))


def test_too_little_noise_of_cepam_is_above_what_is_proved_of_its_messages():
    # its own claim, of a record, is weaker than no noise: nothing could be above it
    defense = made("cepam-clip", noise_std=2.0)
    claim = defense.claim([defense.init(WIDE)], WIDE)
    proof = next(proof for proof in claim.further if proof.unit is Unit.MESSAGE and is_gaussian(proof.event))
    of_messages = dataclasses.replace(
        claim,
        unit=Unit.MESSAGE,
        relation=Relation.ANY_TWO,
        delta=1e-2,
        against=proof.against,
        proved=proof,
        further=(),
        epsilon=proof.epsilon(1e-2),
    )
    quiet = with_changes(defense, noise_std=defense.noise_std / 8)
    assert contradicts(*audited(quiet, 80, WIDE, of_messages))
    assert not contradicts(*audited(Faulty(defense, defense), 80, WIDE, of_messages))


DITHERED = ("sdq", "sdq-lattice", "jopeq", "jopeq-t", "jopeq-sound", "cepam-gaussian", "cepam-laplace", "cepam-clip")


class Reused:
    """A defence that draws its dither from one key for ever."""

    def __init__(self, defense):
        self.defense = defense

    def encode(self, *arguments, shared, **others):
        return self.defense.encode(*arguments, shared=KEY.child("dither"), **others)


def repeats(defense, setting, state):
    """In how many of 20 rounds an update with the same private noise gives the message of the round before."""
    update = rng.normal(KEY.child("update"), (setting.dim,))
    wires = [
        defense.encode(
            state,
            None,
            update,
            sender=Sender(0, 20),
            private=KEY.child("private"),
            shared=KEY.child(number, "shared"),
            setting=setting,
        )[0]
        for number in range(21)
    ]
    return sum(a == b for a, b in itertools.pairwise(wires))


@pytest.mark.parametrize("name", DITHERED)
def test_a_dither_is_fresh_in_every_round_and_one_that_is_reused_is_seen(name):
    defense = made(name)
    state = defense.init(WIDE)
    assert repeats(defense, WIDE, state) == 0
    assert repeats(Reused(defense), WIDE, state) == 20
