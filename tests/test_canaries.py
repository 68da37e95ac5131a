"""Canaries inside a run: bounds below the truth, in the ranges of simulations, and above a false claim."""

import dataclasses
import math

import pytest
import torch
from scipy import stats

from leakgauge import Key, rng
from leakgauge.defenses.cepam_clip import CepamClip
from leakgauge.defenses.dp_fedavg import DPFedAvg
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.none import NoDefense
from leakgauge.defenses.ota import OTA
from leakgauge.defenses.sdq import SDQ
from leakgauge.harness.audit.canaries import audit_messages, audit_one_run, estimate_by_cosine
from leakgauge.harness.audit.one_run import fdp_mu, steinke_epsilon
from leakgauge.harness.core.claim import Horizon, Relation, Unit
from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.small import Federation
from tests.audit_case import at_most, deployed, setting_of, strongest_adversary
from tests.by_rows import by_rows
from tests.faults.library import ANY, last_bytes, lying
from tests.faulty import Faulty
from tests.test_audit_space import again

KEY = Key(0, ("canaries",))


def messages(defense, rounds=20, clients=10, d=36, key=KEY, threat=None, claim=None, norm=0.3):
    """The claim of one round, and its audit in a run of updates of this norm."""
    setting = setting_of(d, clients)
    run = Federation(defense, setting, (defense.init(setting),) * rounds)
    updates = norm / d**0.5 * rng.normal(KEY.child("updates"), (rounds, clients, d))
    claim = claim or defense.claim(run.history[:1], setting)
    return claim, audit_messages(run, updates, claim, threat or strongest_adversary(claim), 0.95, key)


def together(defense, canaries=500, rounds=4, guesses=100, key=KEY, d=None, claim=None):
    """The claim of all rounds, and the audit by canary clients."""
    run = deployed(defense, setting_of(d or canaries, canaries, rounds))
    claim = claim or defense.claim(run.history, run.setting)
    return claim, audit_one_run(run, claim, Threat.SERVER, guesses, 0.95, key)


def right(found):
    return found.counts.true_positives


@pytest.mark.matrix
def test_few_messages_of_an_honest_gaussian_end_in_the_simulated_range():
    # simulated, sigma = 2C (true 4.3772): 200 trials 1.86 (p5 .54, p95 3.31), 2000 trials 3.50 (3.11-4.00); a$
    # quarter of them is the pilot
    found = [messages(Gaussian(noise_std=2.0), key=KEY.child(i))[1] for i in range(10)]
    bounds = [one.epsilon_lower for one in found]
    assert sum(bound > 4.3772 for bound in bounds) <= at_most(0.05, 10)
    assert sum(bounds) / 10 == pytest.approx(1.86, abs=1.33)  # 5 standard errors: (3.31 - .54) / 3.29 / sqrt 10
    assert {(one.trials, one.method, one.counts.positives, one.counts.negatives) for one in found} == {
        (75, "Gaussian trade-off", 75, 75)
    }
    assert all(one.any_mechanism <= one.epsilon_lower for one in found)


@pytest.mark.parametrize(("noise", "epsilon", "low", "high"), [(2.0, 4.3772, 2.4, 4.3772), (4.0, 1.9931, 0.4, 1.9931)])
@pytest.mark.matrix
def test_two_thousand_messages_of_an_honest_gaussian_show_most_of_it(noise, epsilon, low, high):
    claim, found = messages(Gaussian(noise_std=noise), rounds=200)
    assert claim.epsilon == pytest.approx(epsilon, abs=1e-4)
    assert low < found.epsilon_lower < high
    assert found.trials == 750


def test_laplace_is_bounded_from_below_and_not_refuted():
    found = [messages(Laplace(epsilon=2.0), rounds=24, key=KEY.child(i))[1] for i in range(6)]
    assert sum(one.epsilon_lower > 2.0 for one in found) <= at_most(0.05, 6)
    assert sum(one.epsilon_lower for one in found) / 6 > 0.5  # 40 audits have a mean of 1.1 and a spread of 0.3
    # 180 of 240 messages: a quarter of the rounds is the pilot
    assert {(one.method, one.trials) for one in found} == {("Clopper-Pearson", 90)}


@pytest.mark.parametrize("name", [*registry.classes("defense"), "laplace+sdq", "t-noise+sdq-lattice"])
@pytest.mark.table(4)
def test_no_audit_of_messages_is_above_what_is_proved(name):
    defense = registry.build("defense", name, {})
    one_round = deployed(defense, setting_of(36, 6))
    claim = defense.claim(one_round.history, one_round.setting)
    if claim.unit is Unit.RECORD or defense.superposes or "messages" not in SEES[strongest_adversary(claim)]:
        with pytest.raises(ValueError, match=r"expected (a claim for a message|single messages that)"):
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


@pytest.mark.matrix
def test_an_adversary_without_the_shared_keys_learns_less():
    # step 2 / 3 of the dithered quantizer: the dither is noise for an adversary who cannot subtract it
    seen = [messages(SDQ(bits=1), rounds=40, threat=threat)[1] for threat in (Threat.SERVER, Threat.EAVESDROPPER)]
    assert seen[0].counts.false_positives == 0
    assert seen[0].epsilon_lower >= seen[1].epsilon_lower


@pytest.mark.matrix
def test_neighbors_by_add_remove_are_half_as_far_apart():
    defense = Gaussian(noise_std=1.0)
    claim = dataclasses.replace(messages(defense, rounds=2)[0], relation=Relation.ADD_REMOVE)
    _, found = messages(defense, rounds=100, claim=claim)
    assert found.pair.endswith("from nothing")
    assert 1.5 < found.epsilon_lower < gaussian_epsilon(1.0, 1e-5) < messages(defense, rounds=100)[1].epsilon_lower


@dataclasses.dataclass(frozen=True, eq=False)
class Remembers(NoDefense):
    """Sends plain updates, and remembers the last one; `met` lists the norms of each update and of the memory."""

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


UNSEEN = {
    "noise of the first message in all": (again, "rounds"),
    "none after the fifth message": (ANY["none after the fifth message"][1], None),
    "noise from the shared key": (ANY["the shared key's"][1], "replay"),
    "the norm in the last bytes": (last_bytes, None),
}


@pytest.mark.parametrize("fault", UNSEEN)
def test_a_fault_that_the_likelihood_ratio_does_not_see_is_caught_in_messages(fault):
    how, by = UNSEEN[fault]
    claim, found = messages(lying(Laplace(epsilon=1.0), how), rounds=40)
    assert found.strict > claim.epsilon
    assert found.distinguisher == by or by is None


def of_one_server_key(liar, honest, state, received, links, private):
    """The mean with the same noise in each round."""
    return honest(state, received, links, Key(5))


def without_noise_in_one_round(liar, honest, state, received, links, private):
    """The mean with hardly any noise in round 3."""
    if private.path[-2] == 3:
        return DPFedAvg(noise_std=1e-6).decode(state, received, links, private)
    return honest(state, received, links, private)


@pytest.mark.parametrize("fault", [of_one_server_key, without_noise_in_one_round])
def test_noise_of_the_server_that_is_reused_or_missing_in_a_round_is_caught_in_one_run(fault):
    honest = DPFedAvg(noise_std=20.0)
    claim, found = together(lying(honest, fault, "decode"), 300, 6, 60)
    assert found.strict > claim.proved.epsilon(claim.delta)
    assert together(honest, 300, 6, 60)[1].epsilon_lower <= claim.proved.epsilon(claim.delta)


def test_one_run_of_an_honest_sum_ends_in_the_simulated_range():
    # mu = 1/2, as with z = 20 and T = 100 (true 1.993); simulated with m = 500: .51 by Steinke and .73 by f-DP
    found = [together(DPFedAvg(noise_std=4.0), key=KEY.child(i)) for i in range(6)]
    assert found[0][0].proved.epsilon(1e-5) == pytest.approx(1.9931, abs=1e-4)
    assert sum(one.epsilon_lower > 1.9931 for _, one in found) <= at_most(0.05, 6)
    share = sum(right(one) for _, one in found) / 600
    assert share == pytest.approx(expected_right(0.5, 500, 100), abs=5 * 0.5 / math.sqrt(600))
    for _, one in found:
        assert one.any_mechanism == pytest.approx(steinke_epsilon(500, 100, right(one), 1e-5))
        assert one.epsilon_lower == pytest.approx(gaussian_epsilon(fdp_mu(500, 100, right(one)), 1e-5))


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
    claim, far = together(defense, 300, 3)
    _, near = together(defense, 300, 3, claim=dataclasses.replace(claim, relation=Relation.ADD_REMOVE))
    assert (near.pair, far.pair) == ("from nothing", "end to end")
    mu = math.sqrt(3) * defense.init(setting_of(300, 300)).mu
    assert claim.proved.epsilon(claim.delta) == pytest.approx(gaussian_epsilon(mu, claim.delta))
    for one, moved in ((near, mu / 2), (far, mu)):
        assert right(one) / 100 == pytest.approx(expected_right(moved, 300, 100), abs=5 * 0.05)
        assert one.epsilon_lower <= claim.proved.epsilon(claim.delta)
    assert right(far) > right(near)


def test_half_the_noise_of_a_sum_is_caught():
    # mu 1.12 is proved, 2.25 is true: with 600 canaries and 150 guesses, 98 of 100 simulated bounds are above
    promised, actual = OTA(epsilon=3.0, delta=1e-3), OTA(epsilon=6.0, delta=1e-3)
    claim, found = together(Faulty(promised, actual), 600, 2, 150)
    assert found.epsilon_lower > claim.proved.epsilon(claim.delta)
    _, honest = together(promised, 600, 2, 150)
    assert honest.epsilon_lower < claim.proved.epsilon(claim.delta)


def test_without_noise_all_guesses_are_right():
    nothing = NoDefense().claim([None] * 2, setting_of(1, 1, 2))
    claim = dataclasses.replace(nothing, unit=Unit.CLIENT, delta=1e-5)
    claim, found = together(NoDefense(), 100, 2, 60, claim=claim)
    assert (right(found), found.counts.positives) == (60, 60)
    assert found.epsilon_lower == found.any_mechanism == pytest.approx(steinke_epsilon(100, 60, 60, 1e-5))
    assert found.method == "one run"
    assert math.isinf(claim.proved.epsilon(claim.delta))


def test_more_canaries_than_coordinates_lie_on_the_sphere():
    _, found = together(DPFedAvg(noise_std=1e-6), 120, 1, 60, d=60)
    assert 40 <= right(found) < 60  # without noise, but each is noise to the others
    _, axes = together(DPFedAvg(noise_std=1e-6), 60, 1, 30, d=60)
    assert right(axes) == 30


def test_shared_noise_in_an_average_hides_clients_from_an_adversary_who_sees_the_average():
    defense = CepamClip()
    claim = defense.claim([None], setting_of(60, 60))
    (proof,) = (one for one in claim.further if Threat.PUBLIC in one.against)
    claim = dataclasses.replace(claim, unit=Unit.MESSAGE, relation=Relation.ANY_TWO, delta=1e-5, proved=proof)
    _, found = together(defense, 60, 1, 30, claim=claim)
    assert found.method.endswith("trade-off")
    assert 0 <= found.epsilon_lower <= proof.epsilon(1e-5)


def test_cosines_estimate_the_mu_of_a_full_update_and_one_canary_has_none():
    # k 100, d 10,000, mu 1/2: a cosine has a standard deviation of 1 in these units; 0.1 % is lost to the others
    defense = DPFedAvg(noise_std=4.0)
    run = deployed(defense, setting_of(10_000, 100, 4))
    claim = defense.claim(run.history, run.setting)
    found = [estimate_by_cosine(run, claim, KEY.child("cosine", i)) for i in range(6)]
    assert sum(one.mu for one in found) / 6 == pytest.approx(0.5, abs=5 / math.sqrt(600))
    assert (found[0].canaries, found[0].dim) == (100, 10_000)
    alone = deployed(defense, setting_of(9, 1, 2))
    with pytest.raises(ValueError, match="expected cosines"):
        estimate_by_cosine(alone, defense.claim(alone.history, alone.setting), KEY)


@pytest.mark.slow
def test_a_hundred_rounds_of_the_sum_end_in_the_simulated_range():
    # simulated, z = 20, T = 100 (true 1.993), m = 500: .51 by Steinke, .73 by f-DP
    found = [together(DPFedAvg(noise_std=20.0), 500, 100, key=KEY.child(i))[1] for i in range(10)]
    assert sum(one.any_mechanism for one in found) / 10 == pytest.approx(0.51, abs=0.4)
    assert sum(one.epsilon_lower for one in found) / 10 == pytest.approx(0.73, abs=0.5)
    assert sum(one.epsilon_lower > 1.9931 for one in found) <= at_most(0.05, 10)


@pytest.mark.slow
def test_at_most_five_in_a_hundred_honest_runs_are_above():
    gaussian = [messages(Gaussian(noise_std=2.0), key=KEY.child("many", i))[1] for i in range(200)]
    assert sum(one.epsilon_lower > 4.37718 for one in gaussian) <= at_most(0.05, 200)
    sums = [together(DPFedAvg(noise_std=2.0), 200, 1, 60, KEY.child("many", i))[1] for i in range(200)]
    assert sum(one.epsilon_lower > gaussian_epsilon(0.5, 1e-5) for one in sums) <= at_most(0.05, 200)


def test_the_same_key_gives_the_same_audits_and_another_one_others():
    first, again, other = (messages(Gaussian(noise_std=2.0), key=Key(seed))[1] for seed in (0, 0, 1))
    assert first == again
    assert first.counts != other.counts
    defense = DPFedAvg(noise_std=4.0)
    first, again, other = (together(defense, 200, 1, key=Key(seed))[1] for seed in (0, 0, 1))
    assert first == again
    assert first.counts != other.counts


@by_rows(
    ({"updates": torch.zeros(3, 5)}, r"expected updates \[3, 4, 5\]"),
    ({"updates": torch.zeros(2, 4, 5)}, r"expected updates \[3, 4, 5\]"),
    ({"updates": torch.zeros(3, 3, 5)}, r"expected updates \[3, 4, 5\]"),
    ({"updates": torch.zeros(1, 4, 5), "rounds": 1}, "two rounds and clients at least"),
    ({"updates": torch.full((3, 4, 5), math.nan)}, "finite"),
    ({"threat": Threat.PUBLIC}, "expected single messages that public sees"),
    ({"confidence": 1.0}, "expected 0 < confidence < 1"),
    ({"horizon": Horizon.WHOLE_RUN}, "expected a claim of one round"),
    ({"unit": Unit.RECORD}, "a record acts through local training"),
)
def test_messages_that_cannot_be_audited_are_refused(changes, words):
    given = {"updates": torch.zeros(3, 4, 5), "threat": Threat.SERVER, "confidence": 0.95, "rounds": 3} | changes
    run = deployed(Gaussian(noise_std=1.0), setting_of(5, 4, given["rounds"]))
    claim = run.defense.claim([None], run.setting)
    claim = dataclasses.replace(claim, **{name: given[name] for name in ("horizon", "unit") if name in given})
    with pytest.raises(ValueError, match=words):
        audit_messages(run, given["updates"], claim, given["threat"], given["confidence"], KEY)


@by_rows(
    ({"guesses": 10}, "expected 1 to 9 guesses"),
    ({"guesses": 0}, "expected 1 to 9 guesses"),
    ({"rounds": 0}, "expected a claim of all rounds, got 0"),
    ({"rounds": 1}, "expected a claim of all rounds, got 1"),
    ({"participants": 5}, "expected that all clients take part, got 5 of 9"),
    ({"unit": Unit.RECORD}, "expected a claim for a client's whole message"),
    ({"confidence": 0.0}, "expected 0 < confidence < 1"),
)
def test_runs_that_cannot_be_audited_are_refused(changes, words):
    given = {"guesses": 4, "confidence": 0.95, "rounds": 2} | changes
    run = deployed(DPFedAvg(noise_std=1.0), setting_of(9, 9, 2))
    claim = run.defense.claim(run.history, run.setting)
    claim = dataclasses.replace(claim, unit=given.get("unit", claim.unit))
    setting = dataclasses.replace(run.setting, participants=given.get("participants", 9))
    run = dataclasses.replace(run, setting=setting, history=run.history[: given["rounds"]])
    with pytest.raises(ValueError, match=words):
        audit_one_run(run, claim, Threat.SERVER, given["guesses"], given["confidence"], KEY)
