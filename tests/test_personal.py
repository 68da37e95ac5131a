"""Personal privacy: each client's proved epsilon by formulas of this file, its messages, and what reports show."""

import dataclasses
import json
import math

import pytest
import torch
from scipy import optimize, special

from leakgauge import Key, Layout, Links, Sender, Setting, rng
from leakgauge.defenses._ota import Channel, allocate, rayleigh_gains
from leakgauge.harness.audit.claims import claim_to_data, record_claim
from leakgauge.harness.core.result import ClaimRecord
from leakgauge.harness.core.stored import from_data, to_data
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.aggregate import Aggregated
from leakgauge.harness.federation.registry import ParameterError
from leakgauge.harness.study.store import load_run
from leakgauge.testing import checks_of
from tests.by_rows import by_rows
from tests.command import call

SETTING = Setting(Layout(("w",), ((36,),)), 4, 4, 3, sends="gradient", steps=1, lr=0.1, batch=0, samples=8)
SENDERS = [Sender(number, 8) for number in range(4)]
UPDATE = 0.1 * rng.normal(Key(1), (36,))
SHARED = Key(2).child("shared")
LINKS = Links(SETTING, SENDERS, [SHARED.child(number) for number in range(4)])


def build(name, personal, **parameters):
    return registry.build("defense", name, {"personal": personal} | parameters)


def claim_of(defense, rounds=1):
    return defense.claim([defense.init(SETTING)] * rounds, SETTING)


def epsilon_of(mu, delta):
    """Epsilon of a Gaussian mechanism with this mu: Balle & Wang 2018, Thm 8."""

    def excess(epsilon):
        lower = math.exp(epsilon + special.log_ndtr(-epsilon / mu - mu / 2))
        return special.ndtr(mu / 2 - epsilon / mu) - lower - delta

    return optimize.brentq(excess, 0.0, 500.0, xtol=1e-12)


def gaussian(epsilon):
    """Three rounds of the mu whose single round has this epsilon at 1e-5."""
    mu = optimize.brentq(lambda mu: epsilon_of(mu, 1e-5) - epsilon, 1e-2, 20.0, xtol=1e-12)
    return epsilon_of(mu * math.sqrt(3), 1e-5)


def udp(epsilon):
    """Three rounds with the noise of eq. (10) for all of them: z^2 = 2 T ln(1/delta) / epsilon^2."""
    return epsilon_of(math.sqrt(3 / (2 * 3 * math.log(1e3) / epsilon**2)), 1e-3)


def jopeq(bits, epsilon):
    """Three rounds of Laplace noise with b'^2 = b^2 - Delta^2/24, b = 2/epsilon, on a range of 2."""
    step = 3 * math.sqrt(1 + 2 * (2 / epsilon) ** 2) / (2**bits + 1)
    return 3 * 2 / math.sqrt((2 / epsilon) ** 2 - step**2 / 24)


@by_rows(
    ("gaussian", "epsilon = 4, 8, 20", 1e-5, [gaussian(4), gaussian(8), gaussian(20)]),
    ("udp", "epsilon = 4, 8, 20", 1e-3, [udp(4), udp(8), udp(20)]),
    ("jopeq", "bits = 1, 4", 0.0, [jopeq(1, 4), jopeq(4, 4)]),
    ("jopeq", "epsilon = 2, 4; bits = 3, 2", 0.0, [jopeq(3, 2), jopeq(2, 4)]),
)
def test_the_proved_epsilon_of_each_client_is_that_of_a_formula(name, personal, delta, proved):
    claim = claim_of(build(name, personal), 3)
    groups = claim.groups
    assert [group.clients for group in groups] == [tuple(range(i, 4, len(proved))) for i in range(len(proved))]
    assert [group.claim.proved.epsilon(delta) for group in groups] == pytest.approx(proved, rel=1e-6)
    assert claim.epsilon == max(group.claim.epsilon for group in groups)


def test_each_client_of_cepam_has_the_leak_of_its_own_noise():
    groups = claim_of(build("cepam-gaussian", "noise_std = 1, 2, 4")).groups
    for group, sigma in zip(groups, (1, 2, 4), strict=True):
        assert group.claim.further[1].event.delta == pytest.approx(math.erf(1 / sigma / math.sqrt(2)), rel=1e-9)
    groups = claim_of(build("cepam-clip", "noise_std = 1, 2, 4", clip=1.0)).groups
    for group, sigma in zip(groups, (1, 2, 4), strict=True):
        assert group.claim.further[0].epsilon(1e-5) == pytest.approx(epsilon_of(2 / sigma / math.sqrt(3), 1e-5))


def test_the_smallest_epsilon_of_all_users_binds_the_sum_by_theorem_3_of_ota():
    epsilons, channel = (2, 0.5, 1.2, 3), Channel(rayleigh_gains(Key(0).child("gains"), 4), 1000.0, 1.0)
    defense = build("ota", "epsilon = 2, 0.5, 1.2, 3", delta=1e-4, channel_seed=0)
    state = defense.init(SETTING)
    assert state.states[state.binding] == allocate(channel, epsilons, 1e-4, 1.0)
    bound = epsilon_of(0.5 / math.sqrt(2 * math.log(1.25 / 1e-4)), 1e-4)  # Thm 1: epsilon = mu sqrt(2 ln(1.25/delta))
    groups = claim_of(defense).groups
    assert [group.claim.epsilon for group in groups] == pytest.approx(epsilons, rel=1e-9)
    assert [group.claim.proved.epsilon(1e-4) for group in groups] == pytest.approx([bound] * 4, rel=1e-6)
    apart = claim_of(build("ota-orthogonal", "epsilon = 2, 0.5, 1.2, 3", fading="equal")).groups
    for group, epsilon in zip(apart, epsilons, strict=True):
        mu = epsilon / math.sqrt(2 * math.log(1.25 / 1e-4))
        assert group.claim.proved.epsilon(1e-4) == pytest.approx(epsilon_of(mu, 1e-4), rel=1e-6)


def test_a_record_shows_each_client_and_the_verdict_of_the_worst_one():
    claim = claim_of(build("udp", "epsilon = 4, 8"), 3)
    record = record_claim(claim)
    assert [(group.label, group.clients, group.verdict) for group in record.groups] == [
        ("epsilon 4", (0, 2), "LOOSE"),
        ("epsilon 8", (1, 3), "BROKEN"),
    ]
    assert (record.verdict, record.epsilon) == ("BROKEN", pytest.approx(8))
    mixed = record_claim(dataclasses.replace(claim, groups=claim.groups[1:], proved=claim.groups[0].claim.proved))
    assert (mixed.verdict, mixed.reason[:10]) == ("BROKEN", "epsilon 8:")
    assert from_data(ClaimRecord, json.loads(json.dumps(to_data(record)))) == record
    alone = record_claim(claim.groups[0].claim)
    assert "groups" not in to_data(alone)
    assert "groups" not in claim_to_data(claim.groups[0].claim)
    assert claim_to_data(claim) != claim_to_data(dataclasses.replace(claim, groups=claim.groups[:1]))


@by_rows(
    ("gaussian", "epsilon = 4, 8, 20"),
    ("jopeq", "bits = 1, 4"),
    ("cepam-gaussian", "noise_std = 0.1, 0.4, 0.2"),
    ("piecewise", "epsilon = 4, 8"),
    ("ota-orthogonal", "epsilon = 1, 2"),
    ("gaussian+sdq", "bits = 2, 6"),
)
def test_messages_and_evidence_are_those_of_each_sender_s_own_defense(name, personal):
    defense, wires, channel = build(name, personal), [], Key(5).child("channel")
    state = defense.init(SETTING)
    for number, link in enumerate(LINKS.each()):
        wire, _ = defense.encode(state, None, UPDATE, link, Key(3).child(number))
        inner, own = defense.each[number % len(defense.each)], state.states[number % len(defense.each)]
        assert wire == inner.encode(own, None, UPDATE, link, Key(3).child(number))[0]
        wires.append(wire)
    received = defense.transmit(state, wires, LINKS._replace(shared=None), channel)
    updates = UPDATE + 0.01 * rng.normal(Key(4), (4, 36))
    likelihood, exact = (
        make(state, received, LINKS)(updates) for make in (defense.likelihood, defense.exact_likelihood)
    )
    variance = defense.error_variance(state, received, LINKS)
    for number, link in enumerate(LINKS.each()):
        inner, own, wire = (
            defense.each[number % len(defense.each)],
            state.states[number % len(defense.each)],
            [received[number]],
        )
        links = Links(SETTING, [link.sender], [link.key])
        assert torch.equal(defense.estimate(state, wire[0], link), inner.estimate(own, wire[0], link))
        assert defense.longest(state, link) == inner.longest(own, link)
        score = inner.likelihood(own, wire, links)(updates[number : number + 1])
        assert float(likelihood[number]) == pytest.approx(float(score[0]), rel=1e-5)
        score = inner.exact_likelihood(own, wire, links)(updates[number : number + 1])
        assert float(exact[number]) == pytest.approx(float(score[0]), rel=1e-5)
        expected = inner.error_variance(own, wire, links)
        assert (variance is None) is (expected is None)
        assert variance is None or torch.equal(variance[number], expected[0])
    assert registry.build("defense", name, defense.parameters()) == defense


def test_the_command_lists_each_client():
    shown = call("claim", "udp", "--set", "personal=epsilon = 4, 8", "--setting", "clients=3", "--rounds", 3).stdout
    assert "  clients  0, 2 (epsilon 4): claimed 4, proved 3.43774, LOOSE" in shown


def test_clients_with_more_bits_send_longer_messages():
    defense = build("jopeq", "bits = 1, 4", scale="public")
    sizes = [len(defense.encode(defense.init(SETTING), None, UPDATE, link, Key(3))[0]) for link in LINKS.each()]
    assert sizes == [9, 23, 9, 23]  # ceil(36 * 2 / 8) and ceil(36 * 5 / 8)


def test_an_aggregator_expects_the_errors_of_all_clients():
    def expected(personal):
        inner = registry.build("defense", "gaussian", {"personal": personal, "clip": 10.0})
        seen = Aggregated(inner)
        total = 40 * rng.normal(Key(6), (36,), torch.float64)
        return seen._errors(seen.init(SETTING), total, 4, SENDERS[0], SETTING).variance

    quiet, mixed, loud = map(expected, ("noise_std = 0.1, 0.1", "noise_std = 0.1, 10", "noise_std = 10, 10"))
    assert mixed == pytest.approx((quiet + loud) / 2, rel=0.4)


@by_rows(
    ("gaussian", "epsilon: 4, 8", r"personal: expected a text such as 'epsilon = 4, 8; bits = 2, 3'"),
    ("gaussian", "clip = 1, 2", r"personal: expected each of epsilon, .*at most once"),
    ("jopeq", "epsilon = 1, 2; bits = 1", r"personal: expected as many values"),
    ("gaussian", "epsilon = 1, -2", r"gaussian: expected epsilon > 0"),
    ("dp-sgd", "epsilon = 1, 2", r"expected a defense with noise in each client's message"),
    ("dp-fedavg", "epsilon = 1, 2", r"expected a defense with noise in each client's message"),
    ("none", "epsilon = 1, 2", r"none\.epsilon: unknown key"),
)
def test_a_wrong_text_or_a_defense_without_noise_in_messages_is_refused(name, personal, message):
    with pytest.raises(ParameterError, match=message):
        build(name, personal)
    with pytest.raises(ParameterError, match="epsilon of each client is stated: leave it out elsewhere"):
        build("gaussian", "epsilon = 1, 2", epsilon=3.0)


COSTLY = ("estimate", "clip", "noise", "likelihood", "claim", "distribution", "dependence", "audit")
by_defense = pytest.mark.parametrize("name", ["gaussian", "udp", "ota", "laplace+sdq"])


def checks(*, costly):
    chosen = [pair for pair in checks_of("defense") if (pair[0] in COSTLY) == costly]
    return pytest.mark.parametrize(
        ("what", "check"), [pair for pair in chosen if pair[0] not in ("training", "attacks")]
    )


@by_defense
@checks(costly=False)
def test_a_personal_defense_passes_the_checks_of_its_messages(name, what, check):
    check(build(name, "epsilon = 2, 3"))


@pytest.mark.matrix
@by_defense
@checks(costly=True)
def test_a_personal_defense_passes_the_checks_of_its_noise_and_its_claim(name, what, check):
    check(build(name, "epsilon = 2, 3"))


STUDY = """
name = "personal"
seeds = [0]
threats = ["server", "aggregator"]
lineup = 0

[[tasks]]
data = "digits"
model = "mlp-small"

[[federations]]
clients = 3
rounds = 2
algorithm = "fedsgd"
samples = 60
test_samples = 50

[[defenses]]
name = "udp"
personal = "epsilon = 4, 8, 20"

[[attacks]]
name = "map"
restarts = 1
evaluations = 20
objective = "likelihood"
target = {count = 2}
"""


@pytest.mark.matrix
def test_a_study_shows_each_client_in_its_report_and_its_exports(tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    out = tmp_path / "out"
    done = call("run", tmp_path / "study.toml", "--out", out, "--workers", 0)
    assert done.exit_code == 0, done.output
    run = load_run(out)
    assert not run.missing
    (training,) = run.trainings.values()
    proved = [udp(4), udp(8), udp(20)]  # of three rounds; two rounds spend the same epsilon
    assert [group.proved.epsilon for group in training.whole_run.groups] == pytest.approx(proved, rel=1e-6)
    frame = run.frame()
    of_clients = frame[(frame.quantity == "client_proved_epsilon") & (frame.horizon == "whole run")]
    assert list(of_clients.item) == [0, 1, 2]
    assert list(of_clients.value) == pytest.approx(proved, rel=1e-6)
    claims = call("export", out, "--table", "claims", "--to", "json")
    assert claims.exit_code == 0, claims.output
    table = json.loads(claims.stdout)
    each = [row for row in table[1]["rows"] if row["Horizon"] == "whole run"]
    assert [(row["Parameters"], row["Clients"], row["Verdict"]) for row in each] == [
        ("epsilon 4", "0", "LOOSE"), ("epsilon 8", "1", "BROKEN"), ("epsilon 20", "2", "BROKEN")]  # fmt: skip
    assert "epsilon 20" in call("export", out, "--table", "claims", "--to", "csv").stdout
    page = (out / "report.html").read_text()
    assert "Epsilon of each client" in page
