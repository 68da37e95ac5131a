"""Epsilon under the stated distribution: it agrees with every proof, refutes false ones, and else there is a word."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import special, stats

from leakgauge import Key, audit, rng
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.audit import engine
from leakgauge.harness.audit.bounds import Counts
from leakgauge.harness.audit.claims import prepare
from leakgauge.harness.audit.stated import check_stated
from leakgauge.harness.core.claim import Code, Proof, Relation, Unit, Verdict
from leakgauge.harness.core.contract import claim_of
from leakgauge.harness.core.distribution import (
    Additive,
    Choices,
    Exact,
    Laplacian,
    MessageDistribution,
    Noise,
    Normal,
    PairLoss,
    StudentPairs,
)
from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.federation import registry
from tests.audit_case import strongest_adversary
from tests.faults.library import lying

KEY = Key(3)
SMALL = {"dim": 36, "clients": 3, "participants": 3, "samples": 20, "steps": 1, "batch": 0, "lr": 0.1, "momentum": 0.0}
SMALL |= {"sends": "update"}
CASCADES = [f"{one}+{other}" for one in ("laplace", "gaussian", "t-noise") for other in ("sdq", "sdq-lattice")]
EVERY = [*(name for name in registry.classes("defense") if name != "poisson-binomial"), *CASCADES]
"""All but one, whose sums have no stated distribution."""
UNKNOWN = ["cepam-clip", "cepam-gaussian", "cepam-laplace", "random-mask", "top-k"]
"""These promise nothing, and the adversary sees sums or messages without a stated distribution."""


def prepared(name, parameters=None, rounds=1, **setting):
    return prepare(name, parameters or {}, setting, rounds, None, SMALL)


def proved(federation):
    claim = claim_of(federation.defense, federation.history, federation.setting)
    return claim.proved.epsilon(claim.delta)


def number(value):
    return math.inf if value is None else value


SUMS = ("skellam", "distributed-gaussian")
"""Integers in a secure sum, which need more bits."""


def others(name):
    """Three settings of a defense."""
    known = {} if "+" in name else registry.defaults("defense", name)
    tables = [
        {"epsilon": 4.0},
        {"local_epsilon": 2.0},
        {"bits": 12 if name in SUMS else 3},
        {"gamma": 2.0},
        {"clip": 7.0},
        {"noise_std": 2.0},
    ]
    return [{}, *(table for table in tables if known.get(*table) is not None)][:3]


@pytest.mark.table(2)
@pytest.mark.parametrize(("rounds", "setting"), [(1, {}), (10, {}), (10, {"batch": 5, "steps": 4})])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.ci(without=("dp-sgd-10-setting2",))
def test_every_proof_follows_from_the_stated_distribution(name, rounds, setting):
    for parameters in others(name):
        federation = prepared(name, parameters, rounds, **setting)
        found, expected = check_stated(federation.defense, federation.setting, KEY), proved(federation)
        assert (found.faults, found.lacks) == ((), "")
        if name in UNKNOWN:
            assert (found.pairs, expected) == (0, math.inf)
        elif name == "vqsgd":  # its proof is an upper bound
            assert 0.6 * expected < found.high < expected
        elif name == "rqm":  # its worst inputs may lie inside the clip, where the search has no pair
            assert 0.99 * expected < found.high < expected * (1 + 1e-9)
        elif name == "skellam":  # its proof counts how far the noise is from normal
            assert 0.98 * expected < found.high < expected
        else:
            assert number(found.high) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("gamma", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("name", ["jopeq", "jopeq-sound", "laplace+sdq", "laplace+sdq-lattice", "gaussian+sdq"])
def test_levels_that_overload_have_the_loss_of_the_worst_dither(name, gamma):
    federation = prepared(name, {"gamma": gamma, "epsilon": 3.0})
    found = check_stated(federation.defense, federation.setting, KEY)
    assert (found.faults, found.lacks) == ((), "")
    assert found.high == pytest.approx(proved(federation), rel=1e-3)


def claiming(name, parameters=None, **changes):
    """A defense that proves something else."""

    def how(liar, honest, history, setting):
        claim = honest(history, setting)
        return dataclasses.replace(claim, **{key: change(claim, history, setting) for key, change in changes.items()})

    return lying(registry.build("defense", name, parameters or {}), how, "claim")


def smaller(share):
    """A proof of a share of the true epsilon."""

    def proof(claim, history, setting):
        right = claim.proved.epsilon(claim.delta)
        return dataclasses.replace(Proof.pure(share * right, 1, claim.unit, "so says the author."), unit=claim.unit)

    return proof


def one_round(claim, history, setting):
    """All rounds, proved as one."""
    event = claim.proved.event
    return dataclasses.replace(claim.proved, event=getattr(event, "event", None) or dataclasses.replace(event, times=1))


def unsampled(epsilon, share):
    """Steps that take a smaller share of records than the training does."""

    def proof(claim, history, setting):
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

        noise = registry.build("defense", "dp-sgd", {"epsilon": epsilon}).multiplier(setting)
        event = PoissonSampledDpEvent(share, GaussianDpEvent(noise))
        return dataclasses.replace(claim.proved, event=SelfComposedDpEvent(event, setting.steps * len(history)))

    return proof


def of_delta(value):
    """The epsilon at another delta, called that of the claim's delta."""
    return lambda claim, *_: Proof.pure(claim.proved.epsilon(value), 1, claim.unit, "at a larger delta.")


def half_the_noise(base):
    """The distribution and not the claim has half of the noise."""
    quiet = dataclasses.replace(base, epsilon=2 * base.epsilon)

    def how(liar, honest, state, memory, update, link):
        return quiet.message_distribution(quiet.init(link.setting), memory, update, link)

    return lying(base, how, "message_distribution")


FALSE = {
    "half of the noise, normal": lambda e: half_the_noise(Gaussian(epsilon=e)),
    "half of the noise, Laplace": lambda e: half_the_noise(registry.build("defense", "laplace", {"epsilon": e})),
    "half of the noise, MVU": lambda e: half_the_noise(registry.build("defense", "mvu", {"epsilon": e})),
    "half of the noise, PM": lambda e: half_the_noise(registry.build("defense", "piecewise", {"epsilon": e})),
    "half of the noise, RQM": lambda e: half_the_noise(registry.build("defense", "rqm", {"epsilon": e})),
    "half of the noise, PrivUnit": lambda e: half_the_noise(registry.build("defense", "privunit", {"epsilon": e})),
    "correlated noise as one round": lambda e: claiming("dp-ftrl", {"epsilon": e, "band": 3}, proved=smaller(0.3)),
    "normal noise at delta 0": lambda e: claiming("gaussian", {"epsilon": e}, delta=lambda *_: 0.0, proved=smaller(1)),
    "normal noise at delta 0 and a higher epsilon": lambda e: claiming(
        "gaussian", {"epsilon": e}, delta=lambda *_: 0.0, proved=lambda *_: Proof.pure(9e9, 1, Unit.MESSAGE, "large.")
    ),
    "a smaller delta": lambda e: claiming("gaussian", {"epsilon": e}, delta=lambda *_: 1e-9, proved=of_delta(1e-5)),
    "a delta ten times smaller": lambda e: claiming(
        "gaussian", {"epsilon": e}, delta=lambda *_: 1e-6, proved=of_delta(1e-5)
    ),
    "rounds as one, normal": lambda e: claiming("gaussian", {"epsilon": e}, proved=one_round),
    "rounds as one, Laplace": lambda e: claiming("laplace", {"epsilon": e}, proved=one_round),
    "rounds as one, MVU": lambda e: claiming("mvu", {"epsilon": e}, proved=one_round),
    "rounds as one, PM": lambda e: claiming("piecewise", {"epsilon": e}, proved=one_round),
    "rounds as one, RQM": lambda e: claiming("rqm", {"epsilon": e}, proved=one_round),
    "a shuffler that is not there, PM": lambda e: claiming("piecewise", {"epsilon": e}, proved=smaller(0.3)),
    "a shuffler that is not there, MVU": lambda e: claiming("mvu", {"epsilon": e}, proved=smaller(0.5)),
    "a shuffler that is not there, Laplace": lambda e: claiming("laplace", {"epsilon": e}, proved=smaller(0.8)),
    "a little less than is right": lambda e: claiming("laplace", {"epsilon": e}, proved=smaller(0.99)),
    "a wrong sampling rate": lambda e: claiming("dp-sgd", {"epsilon": e}, proved=unsampled(e, 0.01)),
    "a sampling rate of a fifth": lambda e: claiming("dp-sgd", {"epsilon": e}, proved=unsampled(e, 0.2)),
    "a record that is added": lambda e: claiming("dp-sgd", {"epsilon": e}, relation=lambda *_: Relation.REPLACE),
    "a client that is removed": lambda e: claiming("dp-fedavg", {"epsilon": e}, relation=lambda *_: Relation.REPLACE),
    "one coordinate for a message": lambda e: claiming(
        "laplace", {"epsilon": e}, unit=lambda *_: Unit.MESSAGE, proved=lambda *_: Proof.pure(e, 1, Unit.MESSAGE, "")
    ),
}


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("name", FALSE)
def test_a_proof_that_two_inputs_exceed_is_refuted_without_a_message(name, epsilon):
    liar = FALSE[name](epsilon)
    found = check_stated(liar, prepared("none").setting, KEY)
    assert any("two inputs have epsilon" in fault for fault in found.faults)


class Strange(Noise):
    """Noise whose privacy loss nobody knows."""

    def uniforms(self, noise):
        return special.expit(noise)


class Hidden(MessageDistribution):
    """A distribution of a user's own, without a loss."""

    def __init__(self, inner):
        self.inner = inner

    def read(self, wire, own):
        return self.inner.read(wire, own)


def stating(change):
    """A defense that states another distribution."""
    return lying(Gaussian(), lambda liar, honest, *call: change(honest(*call)), "message_distribution")


def louder(stated):
    """Noise that grows with the update, without a word in the header."""
    return dataclasses.replace(stated, scale=stated.scale * (1 + float(np.abs(stated.center).max())))


def audited(claim, counts):
    """An audit of a claim with these outcomes."""
    threat, trials = strongest_adversary(claim), counts.positives
    return engine.AuditResult(1.0, "", 1.0, 1.0, math.inf, 1e-5, 0.95, trials, "", "", threat, counts)


WORDS = {
    "no distribution": lambda stated: None,
    "an unknown noise": lambda stated: dataclasses.replace(stated, noise=Strange()),
    "a distribution of its own": Hidden,
    "noise that grows with the update": louder,
}


@pytest.mark.parametrize("name", WORDS)
def test_a_proof_that_does_not_follow_is_the_authors_word_and_never_green(name):
    liar = stating(WORDS[name])
    federation = prepared("none")
    found = check_stated(liar, federation.setting, KEY)
    assert found.lacks == "no privacy loss can be computed from a stated distribution"
    claim = claim_of(liar, federation.history, federation.setting)
    honest = audited(claim, Counts(50, 40, 99, 99))
    verdict, reason = engine.verdict(claim, honest, found)
    assert verdict is Verdict.AUTHORS_WORD
    assert reason.endswith("its author's word: no privacy loss can be computed from a stated distribution.")
    assert engine.verdict(claim, dataclasses.replace(honest, strict=9.0), found)[0] is Verdict.BROKEN
    assert engine.verdict(claim, honest)[0] is Verdict.HOLDS


def test_an_upper_bound_above_the_proof_refutes_nothing_but_is_no_proof():
    liar = claiming("laplace+sdq-lattice", {"epsilon": 4.0}, proved=smaller(0.9))
    found = check_stated(liar, prepared("none").setting, KEY)
    assert found.faults == ()
    assert found.lacks.startswith("from the stated distribution follows only epsilon 4 per coordinate over 1 round")


def test_the_update_in_clear_is_below_the_errors_that_the_distribution_leaves():
    federation = prepared("gaussian")
    claim = claim_of(federation.defense, federation.history, federation.setting)
    stated = check_stated(federation.defense, federation.setting, KEY)
    audit = audited(claim, Counts(1000, 0, 1000, 1000))
    faults = engine.inspect(claim, audit, None, stated=stated).contradictions
    least = f"under the stated distribution every test errs in {stated.error:.3g} of them on average"
    assert faults == (f"the test errs in 0 of 2000 trials; {least}",)
    fair = dataclasses.replace(
        audit, counts=Counts(1000 - round(1000 * stated.error), round(1000 * stated.error), 1000, 1000)
    )
    assert engine.inspect(claim, fair, None, stated=stated).code is Code.INCONCLUSIVE


def streams(count):
    """Noise of one of so many streams, from a generator that follows the private key."""

    def how(liar, honest, state, memory, update, link, private):
        seed = int(rng.integers(private.child("stream"), 1, count)[0])
        noise = np.random.default_rng(seed).standard_normal(link.setting.dim)
        rng.normal(private.child("drawn"), (1,))
        scale = liar.message_distribution(state, memory, update, link).scale
        center = liar.message_distribution(state, memory, update, link).center
        return (center + scale * noise).astype("<f4").tobytes(), memory

    return how


@pytest.mark.parametrize("count", [2**14, 2**16])
@pytest.mark.ci("65536")
def test_one_of_few_streams_of_noise_is_found_by_messages_of_trials_that_repeat(count, monkeypatch):
    liar = lying(registry.build("defense", "gaussian", {}), streams(count))
    monkeypatch.setattr(registry, "build", lambda *_: liar)
    found = audit("gaussian", {}, {}, None, trials=1000, seed=1)["audited"]
    assert any("messages of trials repeat the noise of another one" in fault for fault in found["contradicts"])


def test_a_bound_above_the_proof_by_chance_is_said():
    federation = prepared("gaussian")
    claim = claim_of(federation.defense, federation.history, federation.setting)
    lucky = dataclasses.replace(audited(claim, Counts(50, 40, 99, 99)), epsilon_lower=8.2, strict=7.0)
    found = engine.inspect(claim, lucky, None)
    assert found.reason.endswith("the bound is above the proved epsilon, as in 0.05 of audits of right code or fewer")
    assert "above" not in engine.inspect(claim, dataclasses.replace(lucky, epsilon_lower=7.9), None).reason


def pairs_of(noise, moved):
    center = np.zeros(len(moved))
    return Additive(center, noise, 2.0).loss(Additive(center + 2.0 * np.array(moved), noise, 2.0))


def test_losses_of_noise_at_a_distance():
    assert pairs_of(Normal(), [3.0, 4.0]) == PairLoss(squares=25.0)
    assert pairs_of(Laplacian(), [3.0, -4.0]) == PairLoss(7.0, rho=12.5)
    assert pairs_of(Laplacian(), [0.0, 0.0]) == PairLoss(rho=0.0)
    assert pairs_of(Normal(), [0.0, 0.0]) == PairLoss()


@pytest.mark.parametrize(("degrees", "r"), [(3.0, 0.5), (3.0, 5.0), (11.0, 2.0), (1.5, 30.0)])
def test_the_loss_of_a_t_pair_is_the_largest_log_ratio_of_its_densities(degrees, r):
    grid = np.linspace(-60, 60, 1201)
    points = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1)
    density = stats.multivariate_t([0, 0], np.eye(2), degrees).logpdf
    largest = (density(points) - density(points - np.array([0.6 * r, 0.8 * r]))).max()
    found = pairs_of(StudentPairs(degrees), [0.6 * r, 0.8 * r]).pure
    assert largest * (1 - 1e-12) <= found <= largest + 5e-3 * found


def test_the_loss_of_choices_is_that_of_the_worse_direction():
    one, other = np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([[0.5, 0.5], [0.5, 0.5]])
    found = Choices(one, 1).loss(Choices(other, 1))
    assert found == PairLoss(pytest.approx(math.log(5)))
    assert Choices(one, 1).loss(Choices(other, 1), among=np.array([0])) == PairLoss()
    impossible = np.array([[0.5, 0.5], [1.0, 0.0]])
    assert Choices(one, 1).loss(Choices(impossible, 1)).squares == math.inf
    assert Exact(b"a").loss(Exact(b"a")) == PairLoss()
    assert Exact(b"a").loss(Exact(b"b")).squares == math.inf


def test_a_header_in_clear_shows_everything():
    one, other = (Additive(np.zeros(2), Normal(), 1.0, header=np.array([value])) for value in (1.0, 1.0 + 1e-6))
    assert one.loss(other).squares == math.inf
    assert one.loss(one) == PairLoss()
    assert Additive(np.zeros(2), Normal(), 0.0).loss(Additive(np.array([0.0, 1e-9]), Normal(), 0.0)).squares == math.inf


def test_losses_add_up_and_bounded_ones_are_only_bounds_above_delta_zero():
    both = PairLoss(2.0).plus(PairLoss(squares=4.0))
    assert both == PairLoss(2.0, 4.0)
    assert both.ends(1e-5) == (0.0, 2.0 + gaussian_epsilon(2.0, 1e-5))
    assert PairLoss(2.0).ends(0.0) == (2.0, 2.0)
    assert PairLoss(2.0).ends(1e-5) == (0.0, 2.0)
    assert PairLoss(squares=4.0).ends(0.0) == (math.inf, math.inf)
    assert PairLoss(squares=4.0, attained=False).ends(1e-5)[0] == 0.0


def test_the_least_error_is_that_of_the_best_test():
    assert PairLoss(squares=4.0).error == pytest.approx(stats.norm.cdf(-1.0))
    assert PairLoss(1.0).error == pytest.approx(1 / (1 + math.e))  # randomized response
    # two numbers with Laplace noise that both move by half
    x = np.linspace(-15, 15, 1501)
    density, moved = (np.exp(-np.abs(x - center)) / 2 for center in (0.0, 0.5))
    shared = np.minimum(np.outer(density, density), np.outer(moved, moved)).sum() * (x[1] - x[0]) ** 2
    assert PairLoss(1.0).error < shared / 2
    assert PairLoss(1.0, 4.0).error < PairLoss(squares=4.0).error


@dataclass(frozen=True)
class Loud(Gaussian):
    """A clip that is larger than the inputs of trials."""

    clip: float = 1e4


def test_inputs_reach_clips_of_ten_thousand():
    found = check_stated(Loud(), prepared("none").setting, KEY)
    assert found.high == pytest.approx(8.0)
