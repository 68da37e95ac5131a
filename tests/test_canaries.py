"""Canaries inside a run: bounds below the truth, in the ranges of simulations, and above a claim that is false."""

import dataclasses
import math

import pytest
import torch
from scipy import stats

from leakgauge.defenses.cepam_clip import CepamClip
from leakgauge.defenses.dp_fedavg import DPFedAvg
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.none import NoDefense
from leakgauge.defenses.ota import OTA
from leakgauge.defenses.sdq import SDQ
from leakgauge.harness.audit.canaries import audit_messages, cosine_run, one_run
from leakgauge.harness.audit.engine import watcher
from leakgauge.harness.audit.one_run import fdp_epsilon, steinke_epsilon
from leakgauge.harness.core import rng
from leakgauge.harness.core.claim import Horizon, Relation, Unit
from leakgauge.harness.core.contract import Setting
from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.federation import registry
from tests.faults import Faulty

KEY = Key(0, ("canaries",))
ALPHA = 1e-6
"""False alarm of every statistical test here."""


def setting_of(clients, d, rounds=1):
    return Setting(Layout(("w",), ((d,),)), clients, clients, rounds, "update", 1, 0.1, 0, 20)


def at_most(rate, cases):
    """The most events of this rate, but for a false alarm of ALPHA."""
    return int(stats.binom.isf(ALPHA, cases, rate))


def messages(defense, rounds=20, clients=10, d=36, key=KEY, threat=None, claim=None, norm=0.3):
    """The claim of one round, and its audit in a run of updates of this norm."""
    setting, state = setting_of(clients, d), defense.init(setting_of(clients, d))
    updates = norm / d**0.5 * rng.normal(KEY.child("updates"), (rounds, clients, d))
    claim = claim or defense.claim([state], setting)
    history = [state] * rounds
    return claim, audit_messages(defense, setting, updates, history, claim, threat or watcher(claim), 0.95, key)


def together(defense, canaries=500, rounds=4, guesses=(100,), key=KEY, pair="from nothing", d=None, claim=None):
    """The claim of all rounds, and what canary clients bound."""
    setting = setting_of(canaries, d or canaries, rounds)
    history = [defense.init(setting)] * rounds
    claim = claim or defense.claim(history, setting)
    return claim, one_run(defense, setting, history, claim, canaries, guesses, 0.95, key, pair=pair)


# ---- messages


def test_few_messages_of_an_honest_gaussian_end_in_the_simulated_range():
    # AUDITING.md, sigma = 2C (true 4.3772): 200 trials 1.86 (p5 .54, p95 3.31), 2000 trials 3.50 (3.11-4.00)
    found = [messages(Gaussian(noise_std=2.0), key=KEY.child(i))[1] for i in range(10)]
    bounds = [one.epsilon_lower for one in found]
    assert sum(bound > 4.3772 for bound in bounds) <= at_most(0.05, 10)
    assert sum(bounds) / 10 == pytest.approx(1.86, abs=1.33)  # 5 standard errors: (3.31 - .54) / 3.29 / sqrt 10
    assert {(one.trials, one.pilot, one.method, one.counts.positives) for one in found} == {
        (200, 0, "Gaussian trade-off", 100)
    }
    assert all(one.any_mechanism <= one.epsilon_lower for one in found)


@pytest.mark.parametrize(("noise", "epsilon", "low", "high"), [(2.0, 4.3772, 2.4, 4.3772), (4.0, 1.9931, 0.4, 1.9931)])
def test_two_thousand_messages_of_an_honest_gaussian_tell_most_of_it(noise, epsilon, low, high):
    claim, found = messages(Gaussian(noise_std=noise), rounds=200)
    assert claim.epsilon == pytest.approx(epsilon, abs=1e-4)
    assert low < found.epsilon_lower < high
    assert found.trials == 2000


def test_laplace_is_bounded_from_below_and_not_refuted():
    found = [messages(Laplace(epsilon=2.0), rounds=24, key=KEY.child(i))[1] for i in range(6)]
    assert sum(one.epsilon_lower > 2.0 for one in found) <= at_most(0.05, 6)
    assert sum(one.epsilon_lower for one in found) / 6 > 0.5  # 40 of them have a mean of 1.1 and a spread of 0.3
    assert {(one.method, one.trials, one.pilot, one.pair) for one in found} <= {
        ("Clopper-Pearson", 180, 60, "one coordinate"),
        ("Clopper-Pearson", 180, 60, "one coordinate, from nothing"),
    }


@pytest.mark.parametrize("name", [*registry.classes("defense"), "laplace+sdq", "t-noise+sdq-lattice"])
def test_no_audit_of_messages_is_above_what_is_proved(name):
    defense = registry.build("defense", name, {})
    claim = defense.claim([defense.init(setting_of(6, 36))], setting_of(6, 36))
    if claim.unit is Unit.RECORD or defense.superposes or "messages" not in SEES[watcher(claim)]:
        with pytest.raises(ValueError, match=r"expected (a claim for a message|messages that)"):
            messages(defense, clients=6)
        return
    _, found = messages(defense, clients=6)
    assert 0 <= found.epsilon_lower <= claim.proved.epsilon(claim.delta)


def test_half_the_noise_of_a_message_is_caught():
    claim, found = messages(Faulty(Gaussian(noise_std=2.0), Gaussian(noise_std=1.0)), rounds=40)
    assert found.epsilon_lower > claim.epsilon == pytest.approx(4.3772, abs=1e-4)
    claim, found = messages(Faulty(Laplace(epsilon=1.0), Laplace(epsilon=2.0)), rounds=80)
    assert found.epsilon_lower > claim.epsilon == 1.0


def test_a_missing_clip_is_caught_and_large_updates_hide_no_canary():
    claim, found = messages(Faulty(Gaussian(noise_std=2.0), Gaussian(clip=1e9, noise_std=2.0)))
    assert found.epsilon_lower > claim.epsilon
    _, large = messages(Gaussian(noise_std=0.3), norm=1e4)
    assert large.counts.true_positives == large.counts.positives


def test_one_who_lacks_the_shared_keys_tells_less():
    # step 2 / 3 of the dithered quantizer: the dither is noise for those who cannot take it away
    seen = [messages(SDQ(bits=1), rounds=40, threat=threat)[1] for threat in (Threat.SERVER, Threat.EAVESDROPPER)]
    assert seen[0].counts.false_positives == 0
    assert seen[0].epsilon_lower >= seen[1].epsilon_lower


def test_neighbors_by_add_remove_are_half_as_far_apart():
    defense = Gaussian(noise_std=1.0)
    claim = dataclasses.replace(messages(defense, rounds=2)[0], relation=Relation.ADD_REMOVE)
    _, found = messages(defense, rounds=100, claim=claim)
    assert found.pair == "first coordinate, from nothing"
    assert 1.5 < found.epsilon_lower < gaussian_epsilon(1.0, 1e-5) < messages(defense, rounds=100)[1].epsilon_lower


@dataclasses.dataclass(frozen=True, eq=False)
class Remembers(NoDefense):
    """Sends what it sends, and remembers the last update; `met` notes what was there with each update."""

    met: list = dataclasses.field(default_factory=list)

    def remember(self, setting):
        return torch.zeros(setting.dim)

    def encode(self, state, memory, update, link, private):
        self.met.append((float(update.norm()), float(memory.norm())))
        return super().encode(state, None, update, link, private)[0], update


def test_a_client_remembers_its_real_messages_and_no_canary():
    defense = Remembers()
    messages(defense, rounds=4, clients=2)
    canaries = [memory for norm, memory in defense.met if norm > 50]
    assert max(canaries) < 1  # real updates have a norm of about 0.3
    assert sum(memory > 0 for memory in canaries) == 6  # two clients in the three rounds after the pilot's


# ---- canary clients


def test_one_run_of_an_honest_sum_ends_in_the_simulated_range():
    # mu = 1/2 as of AUDITING.md's z = 20, T = 100 (true 1.993), there .51 by Steinke and .73 by f-DP with m = 500
    found = [together(DPFedAvg(noise_std=4.0), key=KEY.child(i)) for i in range(6)]
    assert found[0][0].proved.epsilon(1e-5) == pytest.approx(1.9931, abs=1e-4)
    assert sum(one.epsilon_lower > 1.9931 for _, one in found) <= at_most(0.05, 6)
    right = sum(one.guesses[0].right for _, one in found)
    assert right / 600 == pytest.approx(expected_right(0.5, 500, 100), abs=5 * 0.5 / math.sqrt(600))
    for _, one in found:
        ((r, v),) = one.guesses
        assert one.any_mechanism == pytest.approx(steinke_epsilon(500, r, v, 1e-5))
        assert one.epsilon_lower == pytest.approx(fdp_epsilon(500, r, v, 1e-5))


def expected_right(mu, m, r):
    """Share of right guesses among the r / 2 highest of m scores, for large m: above the quantile t of the mixture."""
    share = r / 2 / m
    low, high = -10.0, 10.0
    for _ in range(60):
        t = (low + high) / 2
        above = (stats.norm.sf(t - mu) + stats.norm.sf(t)) / 2
        low, high = (t, high) if above > share else (low, t)
    return float(stats.norm.sf(t - mu) / (stats.norm.sf(t - mu) + stats.norm.sf(t)))


def test_opposite_ends_are_twice_as_far_apart_as_nothing_and_one_end():
    defense = OTA(epsilon=2.0, delta=1e-3)
    (claim, near), (_, far) = (together(defense, 300, 3, pair=pair) for pair in ("from nothing", "end to end"))
    mu = math.sqrt(3) * defense.init(setting_of(300, 300)).mu
    assert claim.proved.epsilon(claim.delta) == pytest.approx(gaussian_epsilon(mu, claim.delta))
    for one, moved in ((near, mu / 2), (far, mu)):
        assert one.guesses[0].right / 100 == pytest.approx(expected_right(moved, 300, 100), abs=5 * 0.05)
        assert one.epsilon_lower <= claim.proved.epsilon(claim.delta)
    assert far.guesses[0].right > near.guesses[0].right


def test_half_the_noise_of_a_sum_is_caught():
    # mu 1.12 is proved, 2.25 is there: with 600 canaries and 150 guesses the bound is above in 98 of 100 simulated runs
    promised, actual = OTA(epsilon=3.0, delta=1e-3), OTA(epsilon=6.0, delta=1e-3)
    claim, found = together(Faulty(promised, actual), 600, 2, (150,), pair="end to end")
    assert found.epsilon_lower > claim.proved.epsilon(claim.delta)
    _, honest = together(promised, 600, 2, (150,), pair="end to end")
    assert honest.epsilon_lower < claim.proved.epsilon(claim.delta)


def test_without_noise_all_guesses_are_right():
    claim, found = together(NoDefense(), 100, 2, (60,), claim=client_claim(2))
    assert found.guesses == ((60, 60),)
    assert found.epsilon_lower == found.any_mechanism == pytest.approx(steinke_epsilon(100, 60, 60, 1e-5))
    assert found.method == "one run"
    assert math.isinf(claim.proved.epsilon(claim.delta))


def client_claim(rounds):
    """Of a defense without one."""
    claim = NoDefense().claim([None] * rounds, setting_of(1, 1, rounds))
    return dataclasses.replace(claim, unit=Unit.CLIENT, delta=1e-5)


def test_more_canaries_than_coordinates_lie_on_the_sphere():
    _, found = together(DPFedAvg(noise_std=1e-6), 120, 1, (60,), d=60)
    assert 40 <= found.guesses[0].right < 60  # without noise, but each is noise to the others
    _, axes = together(DPFedAvg(noise_std=1e-6), 60, 1, (30,), d=60)
    assert axes.guesses[0].right == 30


def test_several_numbers_of_guesses_share_the_confidence():
    _, found = together(DPFedAvg(noise_std=1.0), 200, 1, (20, 80))
    assert [guess.made for guess in found.guesses] == [20, 80]
    one_by_one = [steinke_epsilon(200, r, v, 1e-5, 0.975) for r, v in found.guesses]
    as_gaussian = [fdp_epsilon(200, r, v, 1e-5, 0.975) for r, v in found.guesses]
    assert found.any_mechanism == pytest.approx(max(one_by_one))
    assert found.epsilon_lower == pytest.approx(max(one_by_one + as_gaussian))


def test_shared_noise_in_an_average_hides_clients_from_those_who_see_the_average():
    defense, setting = CepamClip(), setting_of(60, 60)
    claim = defense.claim([None], setting)
    (proof,) = (one for one in claim.further if Threat.PUBLIC in one.against)
    claim = dataclasses.replace(claim, unit=Unit.MESSAGE, relation=Relation.ANY_TWO, delta=1e-5, proved=proof)
    _, found = together(defense, 60, 1, (30,), claim=claim, pair="end to end")
    assert found.method.endswith("trade-off")
    assert 0 <= found.epsilon_lower <= proof.epsilon(1e-5)


def test_cosines_estimate_the_mu_of_a_full_update():
    # k 100, d 10,000, mu 1/2: a cosine has a standard deviation of 1 in these units; 0.1 % is lost to the others
    setting, defense, history = setting_of(100, 10_000, 4), DPFedAvg(noise_std=4.0), [None] * 4
    claim = defense.claim(history, setting)
    found = [cosine_run(defense, setting, history, claim, 100, KEY.child("cosine", i)) for i in range(6)]
    assert sum(one.mu for one in found) / 6 == pytest.approx(0.5, abs=5 / math.sqrt(600))
    assert found[0].kind == "estimate"
    assert found[0].null == "known"
    assert (found[0].k, found[0].d) == (100, 10_000)


@pytest.mark.slow
def test_a_hundred_rounds_of_the_sum_end_in_the_simulated_range():
    # AUDITING.md: z = 20, T = 100 (true 1.993), m = 500: .51 by Steinke, .73 by f-DP
    found = [together(DPFedAvg(noise_std=20.0), 500, 100, key=KEY.child(i))[1] for i in range(10)]
    assert sum(one.any_mechanism for one in found) / 10 == pytest.approx(0.51, abs=0.4)
    assert sum(one.epsilon_lower for one in found) / 10 == pytest.approx(0.73, abs=0.5)
    assert sum(one.epsilon_lower > 1.9931 for one in found) <= at_most(0.05, 10)


@pytest.mark.slow
def test_of_many_honest_runs_five_in_a_hundred_are_above_at_most():
    gaussian = [messages(Gaussian(noise_std=2.0), key=KEY.child("many", i))[1] for i in range(200)]
    assert sum(one.epsilon_lower > 4.37718 for one in gaussian) <= at_most(0.05, 200)
    sums = [together(DPFedAvg(noise_std=2.0), 200, 1, (60,), KEY.child("many", i))[1] for i in range(200)]
    assert sum(one.epsilon_lower > gaussian_epsilon(0.5, 1e-5) for one in sums) <= at_most(0.05, 200)


# ---- how it is asked


def test_the_same_key_gives_the_same_audits_and_another_one_others():
    first, again, other = (messages(Gaussian(noise_std=2.0), key=Key(seed))[1] for seed in (0, 0, 1))
    assert first == again
    assert first.counts != other.counts
    defense = DPFedAvg(noise_std=4.0)
    first, again, other = (together(defense, 200, 1, key=Key(seed))[1] for seed in (0, 0, 1))
    assert first == again
    assert first.guesses != other.guesses


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"updates": torch.zeros(3, 5)}, "expected updates \\[3, clients, 5\\]"),
        ({"updates": torch.zeros(2, 4, 5)}, "expected updates \\[3, clients, 5\\]"),
        ({"updates": torch.zeros(3, 1, 5)}, "two rounds and clients at least"),
        ({"updates": torch.full((3, 4, 5), math.nan)}, "finite"),
        ({"threat": Threat.PUBLIC}, "expected messages that public sees"),
        ({"confidence": 1.0}, "expected 0 < confidence < 1"),
        ({"horizon": Horizon.WHOLE_RUN}, "expected a claim of one round"),
        ({"unit": Unit.RECORD}, "a record acts through local training"),
    ],
)
def test_messages_that_cannot_be_audited_are_refused(changes, words):
    defense, setting = Gaussian(noise_std=1.0), setting_of(4, 5)
    given = {"updates": torch.zeros(3, 4, 5), "threat": Threat.SERVER, "confidence": 0.95} | changes
    claim = defense.claim([None], setting)
    claim = dataclasses.replace(claim, **{name: given[name] for name in ("horizon", "unit") if name in given})
    with pytest.raises(ValueError, match=words):
        audit_messages(defense, setting, given["updates"], [None] * 3, claim, given["threat"], given["confidence"], KEY)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"canaries": 0}, "expected 1 to 9 canaries"),
        ({"canaries": 10}, "expected 1 to 9 canaries"),
        ({"guesses": ()}, "expected numbers of guesses"),
        ({"guesses": (4, 9)}, "expected numbers of guesses from 1 to 8"),
        ({"guesses": (0,)}, "expected numbers of guesses"),
        ({"rounds": 0}, "expected a claim of all rounds, got 0"),
        ({"rounds": 1}, "expected a claim of all rounds, got 1"),
        ({"participants": 5}, "expected that all clients take part, got 5 of 9"),
        ({"unit": Unit.RECORD}, "expected a claim for a client's whole message"),
        ({"pair": "end to end"}, "expected a pair from .* by add-remove"),
        ({"pair": "both"}, "expected a pair"),
        ({"confidence": 0.0}, "expected 0 < confidence < 1"),
    ],
)
def test_runs_that_cannot_be_audited_are_refused(changes, words):
    given = {"canaries": 8, "guesses": (4,), "confidence": 0.95, "pair": "from nothing", "rounds": 2} | changes
    defense, setting = DPFedAvg(noise_std=1.0), setting_of(9, 9, 2)
    claim = defense.claim([None] * 2, setting)
    claim = dataclasses.replace(claim, unit=given.get("unit", claim.unit))
    setting = dataclasses.replace(setting, participants=given.get("participants", 9))
    history, m = [None] * given["rounds"], given["canaries"]
    with pytest.raises(ValueError, match=words):
        one_run(defense, setting, history, claim, m, given["guesses"], given["confidence"], KEY, pair=given["pair"])


def test_one_canary_has_no_cosines():
    setting, defense = setting_of(9, 9, 2), DPFedAvg(noise_std=1.0)
    with pytest.raises(ValueError, match="expected 2 to 9 canaries"):
        cosine_run(defense, setting, [None] * 2, defense.claim([None] * 2, setting), 1, KEY)
