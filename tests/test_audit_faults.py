"""Seeded faults in each defense: the audit is above what is proved for the defense without the fault.

One table for each fault; `SENSELESS` gives the reason for each defense that is in no table.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import pytest
import torch

from leakgauge import Key, Link, Relation, Sender, Unit, rng
from leakgauge.harness.audit.bounds import split_threshold
from leakgauge.harness.audit.distinguishers import distinguishers
from leakgauge.harness.audit.engine import (
    HypothesisTest,
    apply_test,
    choose_test,
    contradicts,
)
from leakgauge.harness.audit.neighbors import pairs
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core.accounting import Leak
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.federation import registry
from tests.audit_case import audit_mechanism, deployed, setting_of, strongest_adversary
from tests.faulty import Faulty, with_changes

KEY = Key(0, ("faults",))


class Seeded(NamedTuple):
    """A fault and the audit that catches it.

    Attributes:
        dim: d, of three clients with 20 records each.
        proof: its unit and adversary, if it is not the claim's first proof.
    """

    faulty: Faulty
    trials: int
    dim: int = 2
    proof: tuple[Unit, Threat] | None = None


def made(name, **parameters):
    return registry.build("defense", name, parameters)


# n trials per input show log(n / 3.7) at most by Clopper-Pearson, hence the small epsilons
DEFENSES = {
    "gaussian": made("gaussian", epsilon=4.0),
    "laplace": made("laplace", epsilon=1.5),
    "jopeq": made("jopeq", epsilon=1.5, bits=8, gamma=6.0, scale="public"),
    "jopeq-sound": made("jopeq-sound", epsilon=1.5, bits=8, gamma=6.0),
    "t-noise": made("t-noise", s2=2.0, nu=6.0, scale="public"),
    "jopeq-t": made("jopeq-t", s2=2.0, nu=6.0, bits=8, gamma=6.0, scale="public"),
    "mvu": made("mvu", epsilon=1.5),
    "piecewise": made("piecewise", epsilon=1.5),
    "rqm": made("rqm", epsilon=1.5, levels=3),
    "ppr": made("ppr", epsilon=1.0),
    "privunit": made("privunit", epsilon=1.5),
    "sqsgd": made("sqsgd", epsilon=1.5, bits=1, ratio=1.0, share=0.1),
    "vqsgd": made("vqsgd", epsilon=1.5, repeats=1),
    "dp-sgd": made("dp-sgd", epsilon=4.0),
    "dp-fedavg": made("dp-fedavg", epsilon=4.0),
    "dp-ftrl": made("dp-ftrl", epsilon=4.0),
    "ota": made("ota", epsilon=4.0, delta=1e-2),
    "ota-orthogonal": made("ota-orthogonal", epsilon=4.0, delta=1e-2),
    "skellam": made("skellam", epsilon=1.5, delta=1e-2),
    "distributed-gaussian": made("distributed-gaussian", epsilon=1.5, delta=1e-2),
    "poisson-binomial": made("poisson-binomial", epsilon=1.5, delta=1e-2),
    "udp": made("udp", epsilon=4.0),
    "udp-crd": made("udp-crd", epsilon=4.0),
    "udp-lei": made("udp-lei", epsilon=4.0),
    "cepam-clip": made("cepam-clip", noise_std=2.0),
    "cepam-gaussian": made("cepam-gaussian", noise_std=2.0),
    "cepam-laplace": made("cepam-laplace", noise_scale=2.0),
    "sdq": made("sdq", gamma=6.0),
    "sdq-lattice": made("sdq-lattice", gamma=15.0),
}
UDP = ("udp", "udp-crd", "udp-lei")
SUMS = ("skellam", "distributed-gaussian", "poisson-binomial")
CEPAM = ("cepam-clip", "cepam-gaussian", "cepam-laplace")
PLAIN = ("gaussian", "laplace", "jopeq", "jopeq-sound", "t-noise", "jopeq-t")
SUBVECTOR = (Unit.SUBVECTOR, Threat.SERVER)
FEW = 60
"""Trials that show 2.79, for faults that reveal everything."""


def dim_of(name):
    """One coordinate if, of more, the clip leaves none that rounds to the same level for certain; else two."""
    return 1 if name in ("sqsgd", "vqsgd", *CEPAM) else 2


def less_noise(name, trials, quiet=0.5):
    return Seeded(Faulty(DEFENSES[name], DEFENSES[name], quiet=quiet), trials)


def twice_epsilon(name, trials):
    """For a channel without a noise scale."""
    return Seeded(with_changes(DEFENSES[name], epsilon=2 * DEFENSES[name].epsilon), trials, dim_of(name))


def halved(name, field):
    """Half the noise, for noise that the reader draws too: the reader knows it is half."""
    quiet = dataclasses.replace(DEFENSES[name], **{field: getattr(DEFENSES[name], field) / 2})
    # of 40 keys, 100 trials find it in 37 for Laplace noise, 200 in all
    return Seeded(Faulty(DEFENSES[name], quiet, reader=quiet), 200, 1, SUBVECTOR)


def on(field, name, dim=None, trials=FEW, proof=None):
    return Seeded(Faulty(DEFENSES[name], DEFENSES[name], **{field: True}), trials, dim or dim_of(name), proof)


def of_updates(field):
    """UDP with a clip of updates instead of records."""
    clipped = {name: dataclasses.replace(DEFENSES[name], clips="update") for name in UDP}
    return {f"{name}, of updates": Seeded(Faulty(one, one, **{field: True}), FEW) for name, one in clipped.items()}


def quarter(name):
    """A quarter of the noise: of half of it, 200 trials show 1.2, and no Gaussian is proved, which fewer would show."""

    class Quieter(type(DEFENSES[name])):
        def draw(self, variance, n, key):
            return super().draw(variance / 16, n, key)

    return Seeded(Faulty(DEFENSES[name], Quieter(**DEFENSES[name].parameters())), 200)


def farther(name):
    """Chances eight times as far from 1/2, like an eighth of the noise: few coins are proved by Renyi divergences."""

    class Farther(type(DEFENSES[name])):
        def coins(self, plan):
            trials, offset = super().coins(plan)
            return trials, 8 * offset

        def init(self, setting):
            return DEFENSES[name].init(setting)

    return Faulty(DEFENSES[name], Farther(**DEFENSES[name].parameters()))


HALF_THE_NOISE = {
    **{name: quarter(name) for name in SUMS[:2]},
    "poisson-binomial": Seeded(farther("poisson-binomial"), 200),
    **{name: less_noise(name, 100) for name in ("gaussian", "dp-sgd", "ota", "ota-orthogonal", *UDP)},
    **{name: less_noise(name, 200) for name in ("laplace", "jopeq", "jopeq-sound")},
    **{name: less_noise(name, 150) for name in ("dp-fedavg", "dp-ftrl")},
    # the largest ratio of t distributions is far out, where few trials end: with half the noise 300 show 2.5; 2.28 is
    # proved
    "t-noise": less_noise("t-noise", 300),
    # 0.4 of it, in 200 trials: with half, 200 would show 2.3 even without a lattice
    "jopeq-t": less_noise("jopeq-t", 200, 0.4),
    **{name: twice_epsilon(name, 200) for name in ("mvu", "rqm")},
    **{name: twice_epsilon(name, 100) for name in ("sqsgd", "vqsgd")},
    "piecewise": twice_epsilon("piecewise", 150),
    # what is proved is 4 times the epsilon of the vector, which is what the audit sees
    "ppr": Seeded(with_changes(DEFENSES["ppr"], epsilon=16.0), 150),
    "privunit": twice_epsilon("privunit", 150),
    "cepam-clip": halved("cepam-clip", "noise_std"),
    # a quarter of it: an average has the noise of one client more than is proved, because each client knows its own;
    # half shows a mu of 0.6 with 100 trials, and 0.71 is proved
    "cepam-clip, averages": Seeded(
        with_changes(DEFENSES["cepam-clip"], noise_std=0.5), 40, 2, (Unit.MESSAGE, Threat.PARTICIPANT)
    ),
    "cepam-gaussian": halved("cepam-gaussian", "noise_std"),
    "cepam-laplace": halved("cepam-laplace", "noise_scale"),
}

NOISY = (*PLAIN, "mvu", "piecewise", "ppr", "privunit", "rqm", "sqsgd", "vqsgd", *UDP, "ota", "ota-orthogonal")
SHARED_NOISE = {name: on("shared_noise", name) for name in NOISY if name != "ppr"}

REUSED_DITHER = {
    "sdq": on("reused", "sdq", 18, proof=(Unit.COORDINATE, Threat.SERVER)),
    "sdq-lattice": on("reused", "sdq-lattice", 36, proof=SUBVECTOR),
    **{name: on("reused", name, proof=SUBVECTOR) for name in CEPAM},
}

VQSGD = made("vqsgd", epsilon=4.0, repeats=1)
LOOSE_CLIP = {"clip": 1e5, "noise_std": DEFENSES["dp-sgd"].step_noise(setting_of(2)) / 1e5, "epsilon": None}
NO_CLIP = {
    **{
        name: on("unclipped", name)
        for name in (*PLAIN, "piecewise", "rqm", "dp-fedavg", "dp-ftrl", "ota", "ota-orthogonal", *UDP)
    },
    # without the clip all of the distribution is on one point: 4 instead of 2.09, of which 400 trials show 2.6
    "vqsgd": Seeded(Faulty(VQSGD, VQSGD, unclipped=True), 400, 64),
    # noise is a multiple of the clip: a bound that no record reaches, and the same noise
    "dp-sgd": Seeded(with_changes(DEFENSES["dp-sgd"], **LOOSE_CLIP), FEW),
    **of_updates("unclipped"),
    # clamped chances then move in all coordinates
    "poisson-binomial": on("unclipped", "poisson-binomial", 64, 200),
    "cepam-clip": on("unclipped", "cepam-clip", proof=SUBVECTOR),
}

SCALE_IN_CLEAR = {
    **{name: on("clear", name) for name in (*NOISY, *SUMS)},
    **of_updates("clear"),
    "cepam-clip": on("clear", "cepam-clip", proof=(Unit.MESSAGE, Threat.SERVER)),
}

FAULTS = {
    "half the noise": HALF_THE_NOISE,
    "noise from the shared stream": SHARED_NOISE,
    "a reused dither": REUSED_DITHER,
    "a missing clip": NO_CLIP,
    "a scale sent in clear": SCALE_IN_CLEAR,
}

_SHARED = "noise from the shared stream"
_UNPROTECTED = dict.fromkeys(
    ("none", "precode", "random-mask", "sdq", "sdq-lattice", "soteria", "top-k"),
    "nothing is promised, and messages have no noise",
)
_UNUSED = "no dither: an adversary with the shared key faces the same claim"
_WORST = "the proof holds for the worst dither, also a reused one; a test of the bytes below finds the fault"
_CHANNEL = "its level has no neighbor beyond the range: numbers are clamped to the last row"
_MODELS = "claimed against adversaries who see models, and hold no key and no message"

SENSELESS = {
    "half the noise": _UNPROTECTED,
    _SHARED: {
        **_UNPROTECTED,
        **dict.fromkeys(CEPAM, "all noise is shared, as in the paper"),
        "dp-sgd": "noise is drawn in local training, with keys that no defense sees",
        **dict.fromkeys(("dp-fedavg", "dp-ftrl"), _MODELS),
        **dict.fromkeys(SUMS, "the noise of the other clients stays"),
        "ppr": "trials draw fresh points: the key check and tests with one shared key find it",
    },
    "a reused dither": {
        **{name: why for name, why in _UNPROTECTED.items() if not name.startswith("sdq")},
        **dict.fromkeys(("jopeq", "jopeq-sound", "jopeq-t"), _WORST),
        **dict.fromkeys(
            ("gaussian", "laplace", "t-noise", "mvu", "piecewise", "privunit", "rqm", "sqsgd", "vqsgd"), _UNUSED
        ),
        **dict.fromkeys(("dp-sgd", "dp-fedavg", "dp-ftrl", "ota", "ota-orthogonal", *UDP, *SUMS), _UNUSED),
        "ppr": "the proof holds for any shared points",
    },
    "a missing clip": {
        **_UNPROTECTED,
        **dict.fromkeys(("cepam-gaussian", "cepam-laplace"), "no clip: updates are divided by a norm that is sent"),
        **dict.fromkeys(("mvu", "sqsgd"), _CHANNEL),
        **dict.fromkeys(SUMS[:2], "a rounded vector beyond the bound is shortened to it"),
        **dict.fromkeys(("ppr", "privunit"), "no clip: updates are divided by their norm, which is not sent"),
    },
    "a scale sent in clear": {
        **_UNPROTECTED,
        **dict.fromkeys(("cepam-gaussian", "cepam-laplace"), "a norm is sent in clear, and the claim assumes it known"),
        "dp-sgd": "an update's norm is a function of the noisy update, which is sent",
        **dict.fromkeys(("dp-fedavg", "dp-ftrl"), _MODELS),
    },
}
"""For each fault, the defenses in which it is no fault, or none that an audit could find."""


def as_proved(claim, unit, threat):
    """The claim that equals what is proved for a unit against an adversary."""
    proof = next(p for p in claim.further if p.unit is unit and p.event and threat in (p.against or Threat))
    delta = proof.event.delta if isinstance(proof.event, Leak) else 1e-2
    return dataclasses.replace(
        claim,
        epsilon=proof.epsilon(delta),
        delta=delta,
        unit=unit,
        relation=Relation.ANY_TWO,
        against=frozenset({threat}),
        proved=proof,
        further=(),
    )


def audited(seeded):
    """The claim and the result of its audit."""
    run = deployed(seeded.faulty, setting_of(seeded.dim))
    claim = seeded.faulty.claim(run.history, run.setting)
    if seeded.proof is not None:
        claim = as_proved(claim, *seeded.proof)
    mechanism = Mechanism(run, strongest_adversary(claim))
    find = given_the_scale if claim.unit in (Unit.COORDINATE, Unit.SUBVECTOR) and seeded.proof else choose_test
    test = find(mechanism, claim, seeded.trials, 0.95, KEY)
    return claim, apply_test(mechanism, claim, test, seeded.trials, 0.95, KEY)[0]


def given_the_scale(mechanism, claim, trials, confidence, key):
    """From end to end at one norm, by the likelihood ratio."""
    inputs = pairs(mechanism.defense, mechanism.federation.setting, claim.unit, claim.relation, key)[0]
    zero, one = (mechanism.run(inputs, bit, trials // 3, key.child("pilot", bit)) for bit in (0, 1))
    ratio = distinguishers(mechanism, inputs, zero, one)[0]
    assert ratio.name == "likelihood ratio"
    threshold = split_threshold(ratio.scores(zero), ratio.scores(one), claim.delta, confidence)
    return HypothesisTest(inputs, ratio, threshold)


def above_proof(claim, found):
    """Whether the bound at its own confidence is above the proof; verdicts take a stricter one and more trials."""
    return contradicts(claim, dataclasses.replace(found, strict=found.epsilon_lower))


@functools.cache
def honest(promised, trials, dim, proof):
    return audited(Seeded(Faulty(promised, promised), trials, dim, proof))


SLOW = {"jopeq-t", "sqsgd", "vqsgd", "t-noise", "cepam-clip, averages"}


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        pytest.param(fault, name, marks=[pytest.mark.slow] if name in SLOW else [])
        for fault, table in FAULTS.items()
        for name in table
    ],
)
@pytest.mark.table(5)
@pytest.mark.ci(without=[f"half the noise-{name}" for name in ("cepam-gaussian", "cepam-laplace", "jopeq-sound")])
def test_a_fault_is_above_what_is_proved_and_without_it_nothing_is(fault, name):
    seeded = FAULTS[fault][name]
    assert above_proof(*audited(seeded))
    assert not above_proof(*honest(seeded.faulty.promised, *seeded[1:]))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_defense_has_the_fault_or_a_reason_why_not(fault):
    seeded = {name.partition(",")[0] for name in FAULTS[fault]}
    assert not seeded & set(SENSELESS[fault])
    assert seeded | set(SENSELESS[fault]) == set(registry.classes("defense"))


DITHERED = (*REUSED_DITHER, *(name for name, why in SENSELESS["a reused dither"].items() if why is _WORST))


def repeats(defense, setting):
    """In how many of 20 rounds an update with the same private noise gives the message of the round before."""
    state, update = defense.init(setting), rng.normal(KEY.child("update"), (setting.dim,))
    links = [Link(setting, Sender(0, 20), KEY.child(number, "shared")) for number in range(21)]
    wires = [defense.encode(state, None, update, link, KEY.child("private"))[0] for link in links]
    return sum(a == b for a, b in itertools.pairwise(wires))


@pytest.mark.parametrize("name", DITHERED)
def test_a_dither_is_fresh_in_every_round_and_a_reused_one_shows(name):
    defense, setting = made(name), setting_of(36)
    assert repeats(defense, setting) == 0
    assert repeats(Faulty(defense, defense, reused=True), setting) == 20


@pytest.mark.parametrize(("name", "unit", "dim"), [("sdq", Unit.COORDINATE, 18), ("sdq-lattice", Unit.SUBVECTOR, 36)])
@pytest.mark.matrix
def test_what_moves_beside_the_unit_is_not_held_against_a_defense(name, unit, dim):
    # a pair at one norm moves a second part too: a replay of the whole message distinguished the two inputs
    run = deployed(DEFENSES[name], setting_of(dim))
    claim = as_proved(run.defense.claim(run.history, run.setting), unit, Threat.SERVER)
    assert not contradicts(claim, audit_mechanism(Mechanism(run, Threat.SERVER), claim, 200, 0.95, KEY))


def test_an_adversary_who_sees_the_same_with_both_inputs_bounds_nothing():
    run = deployed(Deaf(DEFENSES["laplace"], DEFENSES["laplace"]), setting_of(2))
    claim = run.defense.claim(run.history, run.setting)
    found = audit_mechanism(Mechanism(run, Threat.PUBLIC), claim, 40, 0.95, KEY)
    assert (found.epsilon_lower, found.distinguisher) == (0.0, "nothing to see")


class Deaf(Faulty):
    """Decodes every message to zero."""

    def decode(self, state, received, links, private):
        return torch.zeros(links.setting.dim)
