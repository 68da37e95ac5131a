"""The assumptions of a claim that messages can break: each is counted exactly, in the whole run."""

import dataclasses
import itertools
from dataclasses import dataclass

import pytest
import torch

from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.claim import EVERY_ROUND, Violation
from leakgauge.harness.core.contract import Link, Links, Sender
from leakgauge.harness.core.result import ViolationRecord
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.store import Store
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.doubles import Counting, random_examples, small_task, study_table
from tests.jopeq_case import build, setting_of
from tests.stored import rewrite
from tests.test_run import ECHO

COORDINATES = "all scaled coordinates are in [-1, 1], although nothing clips them"
PAIRS = "all scaled pairs are in the unit disc, although nothing clips them"
FIXED = "the number of participants is fixed beforehand and public"
FALLING = "no round's learning rate is above that of round 0"
SINGLE = "samples are drawn one per step, with replacement"
ONE_NORM = "all updates of a round have the same norm and the same weight"
ONE_WEIGHT = "all updates of a round have the same weight"

SHOWN_BY_NO_MESSAGE = {
    "neighboring updates have the same scale": "a choice of neighbors: two updates of one scale",
    "which records a step takes is secret": "a secret",
    "the server is trusted": "trust",
    "the server is honest and reveals no message": "trust",
    "the adversary does not take part and does not know which clients take part": "a secret",
    "the adversary does not know which clients take part (a share q); this multiplies epsilon by sqrt(q)": "a secret",
    "C and T do not depend on private data (the source takes C from the gradients' norms)": "a choice",
    "the test losses that shrink T are public; the test records are not covered": "a choice",
    "every client adds its noise and keeps it secret": "a secret",
    "the adversary hears the sum only through the server's receiver, with the stated noise and gains": "trust",
    "the adversary hears a message only through the server's receiver, with the stated noise and gains": "trust",
    "the secure sum is trusted: of a round's messages, nobody learns more than their sum": "trust",
    "it is public which clients send; a client that is left out sends its noise without an update": "a choice",
}

TASK = small_task()
CLIENTS = {k: random_examples(10 + 3 * k, seed=k) for k in range(5)}
TEST = random_examples(40, seed=99)


def violations(defense, updates, setting=None, sizes=None, lr=0.1):
    """The counts of one round in which client k sends the k-th update."""
    setting = setting or setting_of(len(updates[0]))
    senders = [Sender(k, size) for k, size in enumerate(sizes or [8] * len(updates))]
    return defense.violations(updates, Links(setting, senders, None), lr)


def ones_at(d, *places):
    update = torch.zeros(d)
    update[list(places)] = 1.0
    return update


@pytest.mark.parametrize("name", ["laplace", "jopeq", "laplace+sdq"])
@by_rows(
    (100, 4, 4),  # a number is sqrt(d / ones) / 3: here 5 / 3
    (100, 12, 0),  # 0.96
    (90, 10, 0),  # exactly 1, up to the float32 of the scale
    (99, 11, 0),
    (100, 0, 0),
)
def test_coordinates_beyond_three_times_the_norm_are_counted(d, ones, broken, name):
    found = violations(build(name, scale="vector"), [ones_at(d, *range(ones))])
    assert found == {COORDINATES: Violation(broken, d, "coordinate")}


@pytest.mark.parametrize("name", ["laplace", "jopeq"])
def test_each_tensor_has_its_own_scale_and_clients_add_up(name):
    defense, setting = build(name, scale="tensor"), setting_of(100, 50)
    flat = torch.tensor([1.0, -1.0] * 25)
    # 1 of 100 entries is 9.95 standard deviations away from the mean; a third of that is above 1
    spiked = torch.cat([ones_at(100, 7), 1e3 * flat])
    even = torch.cat([flat, flat, 1e-3 * flat])
    assert violations(defense, [spiked], setting) == {COORDINATES: Violation(1, 150, "coordinate")}
    assert violations(defense, [even], setting) == {COORDINATES: Violation(0, 150, "coordinate")}
    assert violations(defense, [spiked, even, spiked], setting)[COORDINATES][:2] == (2, 450)


@pytest.mark.parametrize("name", ["t-noise", "jopeq-t", "t-noise+sdq-lattice"])
def test_a_pair_may_leave_the_disc_while_both_of_its_numbers_stay_inside(name):
    # entry i is paired with entry i + 100; a number is sqrt(100 / 2k) / 3, a pair sqrt(2) times as long
    found = violations(build(name, scale="vector"), [ones_at(200, *range(8), *range(100, 108))])
    assert found == {PAIRS: Violation(8, 100, "pair")}
    found = violations(build(name, scale="vector"), [ones_at(200, *range(12), *range(100, 112))])
    assert found == {PAIRS: Violation(0, 100, "pair")}
    odd = violations(build(name, scale="vector"), [ones_at(201, 0)])
    assert odd == {PAIRS: Violation(1, 101, "pair")}


@pytest.mark.parametrize("name", ["laplace", "jopeq", "t-noise", "jopeq-t", "mvu", "laplace+sdq", "t-noise+sdq"])
def test_a_public_scale_clips_and_breaks_nothing(name):
    assert violations(build(name, scale="public"), [1e6 * ones_at(100, 3)]) == {}


def test_mvu_clamps_whatever_its_scale():
    assert violations(build("mvu", scale="tensor"), [ones_at(100, 3)]) == {}


def test_cepam_counts_unequal_norms_and_weights_and_the_draws():
    setting = dataclasses.replace(setting_of(4), steps=1, batch=1)
    long, short = torch.tensor([3.0, 0.0, 4.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    turned = torch.tensor([0.0, 5.0, 0.0, 0.0])
    gaussian, clip = build("cepam-gaussian"), build("cepam-clip")
    kept, broken = (Violation(count, 1, "round", covered=True) for count in (0, 1))
    drawn = Violation(0, 2, "message", covered=True)
    assert violations(gaussian, [long, turned], setting) == {SINGLE: drawn, ONE_NORM: kept}
    assert violations(gaussian, [long, short], setting)[ONE_NORM] == broken
    assert violations(gaussian, [long, turned], setting, sizes=[8, 9])[ONE_NORM] == broken
    assert violations(gaussian, [0 * long], setting)[ONE_NORM] == kept
    # clipped updates may have any norm, but the largest weight has the least noise of others around it
    assert violations(clip, [long, short], setting)[ONE_WEIGHT] == Violation(0, 1, "round")
    assert violations(clip, [long, turned], setting, sizes=[8, 9])[ONE_WEIGHT] == Violation(1, 1, "round")
    # several records are drawn without replacement, except from a client that has only one
    for changes in ({"steps": 2}, {"batch": 2}, {"batch": 0}):
        several = dataclasses.replace(setting, **changes)
        assert violations(clip, [long, short, long], several, sizes=[8, 1, 9])[SINGLE][:2] == (2, 3)


@pytest.mark.parametrize("name", ["udp", "udp-crd", "udp-lei"])
def test_a_learning_rate_above_that_of_round_0_is_counted(name):
    for lr, broken in ((0.1, 0), (0.05, 0), (0.1000001, 1)):
        assert violations(build(name), [torch.ones(4)], lr=lr) == {FALLING: Violation(broken, 1, "round")}
    assert violations(build(name, clips="update"), [torch.ones(4)], lr=9.0) == {}
    gradients = dataclasses.replace(setting_of(4), sends="gradient")
    assert violations(build(name), [torch.ones(4)], gradients, lr=9.0) == {}


def test_a_round_with_another_number_of_messages_is_counted():
    for users, broken in ((4, 0), (3, 1)):
        assert violations(build("dp-fedavg"), [torch.ones(4)] * users) == {FIXED: Violation(broken, 1, "round")}


VARIANTS = [
    *({"scale": mode} for mode in ("tensor", "vector", "public")),
    *({"clips": clips} for clips in ("records", "update")),
    {},
]


@pytest.mark.parametrize("name", [*registry.classes("defense"), "laplace+sdq", "t-noise+sdq-lattice", "gaussian+sdq"])
def test_every_assumption_is_either_counted_or_shown_by_no_message(name):
    known = registry.build("defense", name, {}).parameters()
    variants = [parameters for parameters in VARIANTS if parameters.keys() <= known.keys()]
    users = (4,) if name in ("ota", "dp-ftrl") else (4, 2)  # here all clients must take part
    for parameters, participants, sends in itertools.product(variants, users, ("update", "gradient")):
        setting = dataclasses.replace(setting_of(60, 7), participants=participants, sends=sends)
        defense = registry.build("defense", name, parameters)
        states = [defense.init(setting)] * 2
        updates = [normal(Key(k), (67,)) for k in range(participants)]
        counted, stated = violations(defense, updates, setting), set(defense.claim(states, setting).assumes)
        assert counted.keys() <= stated
        assert stated - counted.keys() - {EVERY_ROUND} <= SHOWN_BY_NO_MESSAGE.keys()
        assert all(0 <= one.broken <= one.of > 0 for one in counted.values())


@dataclass(frozen=True)
class Small(Counting):
    """It assumes that no coordinate exceeds a bound."""

    bound: float = 0.02

    def violations(self, updates, links, lr):
        assert links.shared is None
        beyond = [int((update.abs() > self.bound).sum()) for update in updates]
        return {"small": Violation(sum(beyond), sum(map(len, updates)), "coordinate")}


def run(defense, messages=(), **changes):
    spec = FederationSpec(**{"clients": 5, "participants": 3, "rounds": 4, "batch": 4, "lr": 0.5, **changes})
    kept = Keep(frozenset(), frozenset(messages))
    return train(TASK, spec, defense, CLIENTS, TEST, Key(0), engine="loop", keep=kept)


def test_a_training_adds_up_the_violations_of_all_clients_and_rounds():
    training = run(Small(), range(4))
    sent = [
        Small().estimate(message.wire[0], message.wire, Link(training.setting, message.sender, None))
        for messages in training.messages.values()
        for message in messages
    ]
    beyond = sum(abs(value) > Small().bound for update in sent for value in update.tolist())
    assert 0 < beyond < 12 * TASK.layout.dim
    rounds = {k: sum(m.sender.number == k for kept in training.messages.values() for m in kept) for k in CLIENTS}
    missed = sum(count < 4 for count in rounds.values())
    assert training.violations == {
        "small": Violation(beyond, 12 * TASK.layout.dim, "coordinate"),
        EVERY_ROUND: Violation(missed, 5, "client", covered=True),
    }
    assert missed > 0
    assert run(Small(), participants=5).violations[EVERY_ROUND].broken == 0


def test_the_count_of_jopeq_is_that_of_the_updates_which_clients_computed():
    plain = run(NoDefense(), [0], rounds=1)
    broken = 0
    for message in plain.messages[0]:
        update = NoDefense().estimate(None, message.wire, Link(plain.setting, message.sender, None)).double()
        for part in TASK.layout.split(update):
            deviations = (part - part.mean()).abs().flatten()
            broken += int((deviations > 3 * deviations.square().mean().sqrt()).sum())
    found = run(build("jopeq", scale="tensor"), rounds=1).violations[COORDINATES]
    assert found == Violation(broken, 3 * TASK.layout.dim, "coordinate")
    assert broken > 0


def test_a_schedule_that_raises_the_rate_breaks_the_proof_of_udp():
    training = run(build("udp", epsilon=100.0), rounds=8, schedule="plateau", decay=2.0, patience=1)
    above = sum(lr > 0.5 for lr in training.learning_rates)
    assert 0 < above < 8
    assert training.violations[FALLING] == Violation(above, 8, "round")


def test_a_study_stores_the_counts_of_its_claims_and_reads_results_without_them(tmp_path):
    federation = {"clients": 4, "participants": 3, "rounds": 3, "samples": 80, "test_samples": 50, "local_steps": 1}
    table = study_table(federation, ["jopeq", "gaussian"], [{"name": ECHO, "target": {"count": 1}}])
    trainings = run_study(resolve(table), tmp_path, workers=0).trainings
    found = {record.spec.defense.name: record for record in trainings.values()}
    coordinates, clients = found["jopeq"].violations
    assert (coordinates.assumption, coordinates.of) == (COORDINATES, 3 * 3 * found["jopeq"].dim)
    assert (coordinates.what, coordinates.covered, coordinates.voids) == ("coordinate", False, coordinates.broken > 0)
    assert coordinates.broken > 0
    # 3 of 4 clients take part in each of 3 rounds, so that 1 to 3 of them miss a round
    assert clients in [ViolationRecord(EVERY_ROUND, missed, 4, "client", covered=True) for missed in (1, 2, 3)]
    assert not clients.voids
    assert [one.assumption for one in found["gaussian"].violations] == [EVERY_ROUND]
    store, record = Store(tmp_path), found["jopeq"]
    path = store.training(record.spec.id) / "record.json"
    rewrite(path, lambda data: {key: value for key, value in data.items() if key != "violations"})
    assert store.read_training(record.spec.id) == dataclasses.replace(record, violations=())
