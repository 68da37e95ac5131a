"""UDP, CRD and Lei's approach as defenses: their noise on the wire, and their runs."""

import dataclasses
import itertools
import math

import pytest
import torch
from scipy import stats

from leakgauge import Key, Layout, MessageError, rng
from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses.udp import UDP
from leakgauge.defenses.udp_crd import UDPCRD
from leakgauge.defenses.udp_lei import UDPLei
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.claim import Verdict, judge
from leakgauge.harness.core.contract import Feedback, Link, Links, LocalRule, Sender, Setting
from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.federation.loop import Keep, make_plan, replay_state, train
from leakgauge.harness.learn.batch import Work, train_clients
from tests.by_rows import by_rows
from tests.doubles import random_examples, small_task
from tests.oracles import UDP_NOISE, follows

D = 200_000
DELTA = 1e-3
LOG = math.log(1e3)
SETTING = Setting(Layout(("w",), ((D,),)), 50, 50, 200, sends="update", steps=1, lr=0.01, batch=0, samples=800)
SENDER = Sender(0, 800)
PRIVATE, SHARED = Key(7), Key(8)
UPDATE = 0.01 * rng.normal(Key(1), (D,))

ALL = (UDP, UDPCRD, UDPLei)
TASK = small_task()
CLIENTS = {k: random_examples(10 + 3 * k, seed=k) for k in range(4)}
TEST = random_examples(40, seed=99)
SPEC = FederationSpec(clients=4, rounds=12, batch=4, lr=0.05, local_steps=3, momentum=0.5)


def encode(defense, state, update=UPDATE, sender=SENDER, setting=SETTING, private=PRIVATE):
    return defense.encode(state, None, update, Link(setting, sender, SHARED), private)[0]


def decode(defense, state, wire, setting=SETTING):
    return defense.estimate(state, wire, Link(setting, SENDER, None))


def history(defense, setting=SETTING, losses=lambda number: (None, None)):
    """The states of all rounds, and the state after them."""
    states = [defense.init(setting)]
    while not defense.stops(states[-1]) and len(states) <= setting.rounds:
        number = len(states) - 1
        states.append(defense.advance(states[-1], Feedback(number, *losses(number))))
    return states[:-1], states[-1]


def go(defense, spec=SPEC, keep=frozenset(), clients=CLIENTS):
    return train(TASK, spec, defense, clients, TEST, Key(0), engine="loop", keep=Keep(keep, keep))


@pytest.mark.parametrize(("q", "rounds", "epsilon", "expected"), UDP_NOISE)
def test_the_noise_is_the_golden_one(q, rounds, epsilon, expected):
    setting = dataclasses.replace(SETTING, rounds=rounds, participants=round(50 * q))
    defense = UDP(epsilon=epsilon)
    assert defense.sigma(defense.init(setting), SENDER, setting) == pytest.approx(expected, rel=5.1e-11)
    named = UDP(epsilon=epsilon, rounds=rounds)
    assert named.sigma(137, SENDER, dataclasses.replace(setting, rounds=7)) == pytest.approx(expected, rel=5.1e-11)
    discounted = UDPCRD(epsilon=epsilon)
    assert discounted.sigma(discounted.init(setting), SENDER, setting) == pytest.approx(expected, rel=5.1e-11)


@pytest.mark.parametrize(
    ("changes", "sends", "of_800"),
    # 2 C = 1
    [
        ({}, "update", 0.01 / 800),
        ({}, "gradient", 1 / 800),
        *(({"clips": "update"}, s, 1) for s in ("update", "gradient")),
    ],
)
def test_the_noise_is_the_multiplier_times_the_sensitivity(changes, sends, of_800):
    setting = dataclasses.replace(SETTING, sends=sends)
    defense = UDP(clip=0.5, **changes)
    z = math.sqrt(2 * 200 * LOG) / 8
    assert defense.sigma(0, SENDER, setting) == pytest.approx(z * of_800, rel=1e-12)
    smaller = 1 if changes else 4  # of a client with a quarter of the records
    assert defense.sigma(0, Sender(1, 200), setting) == pytest.approx(smaller * z * of_800, rel=1e-12)


@pytest.mark.parametrize("sends", ["update", "gradient"])
@by_rows(
    (UDP(clip=3.0), math.sqrt(2 * 200 * LOG) / 8),
    (UDP(clip=3.0, clips="update"), math.sqrt(2 * 200 * LOG) / 8),
    (UDPCRD(clip=3.0, rounds=50), math.sqrt(2 * 50 * LOG) / 8),
    (UDPLei(clip=3.0, first=9.0, slope=0.1), 9.0),
)
def test_each_sender_has_noise_of_exactly_the_stated_distribution(defense, z, sends):
    # alpha 1e-6; 200,000 errors detect a scale off by 6 % with a miss rate under 1e-6 (see the twin)
    setting = dataclasses.replace(SETTING, sends=sends)
    step = 0.01 if sends == "update" else 1.0
    state, errors = defense.init(setting), []
    for sender in (Sender(3, 800), Sender(4, 200)):
        wire = encode(defense, state, sender=sender, setting=setting, private=PRIVATE.child(sender.number))
        clipped = UPDATE * min(1.0, (3.0 if defense.clips == "update" else 4.5) / float(UPDATE.norm()))
        error = (decode(defense, state, wire, setting).double() - clipped.double()).numpy()
        sigma = z * 2 * 3.0 * (1 if defense.clips == "update" else step / sender.samples)
        assert len(wire) == 4 * D
        assert follows(error, stats.norm(scale=sigma).cdf)
        assert not follows(1.06 * error, stats.norm(scale=sigma).cdf)
        assert abs(stats.pearsonr(error[1:], error[:-1]).statistic) < 5 / D**0.5
        errors.append(error)
    assert abs(stats.pearsonr(*errors).statistic) < 5 / D**0.5


def test_only_the_update_is_clipped_by_the_message_and_a_message_of_another_length_is_refused():
    short = 0.5 * UPDATE / UPDATE.norm()
    for update, expected in ((UPDATE, 1.0), (short, 0.5)):
        clipping = UDP(clips="update", epsilon=1e9)
        found = decode(clipping, 0, encode(clipping, 0, update)).norm()
        assert float(found) == pytest.approx(expected, rel=1e-4)
    assert torch.allclose(decode(UDP(epsilon=1e9), 0, encode(UDP(epsilon=1e9), 0)), UPDATE, rtol=0, atol=1e-8)
    assert UDP(clip=2.0).local == LocalRule(clip=2.0, full_batch=True)
    assert UDP(clip=2.0, clips="update").local == LocalRule()
    with pytest.raises(MessageError, match="800000 bytes"):
        decode(UDP(), 0, b"\0" * 4)


def test_the_likelihood_is_the_density_of_each_sender():
    setting = dataclasses.replace(SETTING, layout=Layout(("w",), ((5,),)))
    defense, senders = UDP(), [Sender(0, 800), Sender(1, 100)]
    truth = 1e-3 * rng.normal(Key(2), (2, 5), torch.float64)
    rows = zip(truth, senders, strict=True)
    wires = [encode(defense, 0, row.float(), who, setting, Key(3).child(who.number)) for row, who in rows]
    score = defense.likelihood(0, wires, Links(setting, senders, None))
    other = truth + 1e-3
    for row, who in enumerate(senders):
        distribution = stats.norm(scale=defense.sigma(0, who, setting))
        sent = decode(defense, 0, wires[row], setting).double()
        expected = [-distribution.logpdf((sent - u[row]).numpy()).sum() for u in (truth, other)]
        found = score(other)[row] - score(truth)[row]
        assert float(found) == pytest.approx(expected[1] - expected[0], rel=1e-9)


@by_rows(({}, "update", 0.02), ({}, "gradient", 2.0), ({"clips": "update"}, "update", 2.0))
def test_the_likelihood_clips_a_candidate_to_the_norm_that_no_message_exceeds(changes, sends, bound):
    setting = dataclasses.replace(SETTING, sends=sends)
    defense = UDP(clip=2.0, epsilon=1e4, **changes)
    wires = [encode(defense, 0, bound * UPDATE / UPDATE.norm(), setting=setting)]
    score = defense.likelihood(0, wires, Links(setting, [SENDER], None))
    long, at, short = (scale * (UPDATE / UPDATE.norm())[None].double() for scale in (9 * bound, bound, 0.9 * bound))
    assert float(score(long)) == pytest.approx(float(score(at)), rel=1e-9)
    assert float(score(long)) != pytest.approx(float(score(short)), rel=1e-6)


def test_a_step_by_the_rule_moves_by_no_more_than_the_sensitivity():
    # every gradient is longer than C: clipped, a replaced record moves the update by 2 lr C / n at most
    params = TASK.init(Key(4))
    data = random_examples(20, seed=5)
    other = random_examples(20, seed=6)
    changed = data._replace(x=data.x.clone(), y=data.y.clone())
    changed.x[3], changed.y[3] = other.x[4], (data.y[3] + 1) % 10
    moved = {}
    for name, rule in (("clipped", UDP(clip=0.1).local), ("not", LocalRule(full_batch=True))):
        plan = make_plan(SPEC, SPEC.lr, rule)
        work = [Work(data, Key(9)), Work(changed, Key(9))]
        updates, batches = train_clients(TASK, params, work, plan, "loop")
        assert [sorted(batch) for batch in batches[0]] == [list(range(20))]
        moved[name] = float((updates[0] - updates[1]).norm()), float(updates[0].norm())
    allowed = 2 * SPEC.lr * 0.1 / 20
    assert allowed / 2 < moved["clipped"][0] <= allowed * 1.0001
    assert moved["clipped"][1] <= SPEC.lr * 0.1 * 1.0001
    assert moved["not"][0] > 2 * allowed


def test_udp_ends_after_its_rounds_or_with_the_federation():
    assert [UDP(rounds=2).stops(state) for state in (0, 1, 2)] == [False, False, True]
    assert not UDP().stops(10_000)
    assert history(UDP(rounds=2)) == ([0, 1], 2)


def trace(number):
    """The model improves by twice zeta, except by half of it in rounds 5, 9 and 12."""
    return (1.0, 1.0 - 5e-4) if number in (5, 9, 12) else (1.0, 1.0 - 2e-3)


def test_crd_runs_the_golden_trace():
    # an independent script, in units of the sensitivity: 2 lr C / n = 1; six decimals
    setting = dataclasses.replace(SETTING, lr=0.5, rounds=20)
    defense = UDPCRD()
    states, last = history(defense, setting, trace)
    expected = [(20, 2.077823)] * 6 + [(18, 1.923690)] * 4 + [(17, 1.799447)] * 3 + [(16, 1.558367)] * 3
    assert [state.schedule.rounds for state in states] == [rounds for rounds, _ in expected]
    sigmas = [defense.sigma(state, Sender(0, 1), setting) for state in states]
    assert sigmas == pytest.approx([sigma for _, sigma in expected], abs=5.1e-7)
    assert last.schedule.spent == pytest.approx(4.632474, abs=5.1e-7)
    made = defense.claim(states, setting)
    assert made.epsilon == pytest.approx(8, rel=1e-12)
    assert judge(made).proved == pytest.approx(8.353, abs=5e-4)


@pytest.mark.parametrize(("before", "after"), [(None, 1.0), (1.0, None), (None, None)])
def test_a_round_that_was_not_evaluated_shrinks_nothing(before, after):
    states, _ = history(UDPCRD(), losses=lambda number: (before, after))
    assert len(states) == 200
    assert {state.schedule.rounds for state in states} == {200}
    sigmas = [UDPCRD().sigma(state, SENDER, SETTING) for state in states]
    assert sigmas == pytest.approx([UDP().sigma(0, SENDER, SETTING)] * 200, rel=1e-11)


def test_lei_lowers_its_noise_linearly_and_stops_within_the_budget():
    defense = UDPLei()
    states, last = history(defense)
    z = [defense.noise_multiplier(state, SETTING) for state in states]
    first = math.sqrt(2 * 200 * LOG) / 8
    assert last == ()
    assert 0 < len(z) < 200
    assert z == pytest.approx([first * (1 - t / 400) for t in range(len(z))], rel=1e-12)
    rho = sum(1 / (2 * one**2) for one in z)
    made = defense.claim(states, SETTING)
    assert made.epsilon == pytest.approx(rho + 2 * math.sqrt(rho * LOG), rel=1e-12)
    assert 0.99 * 8 < made.epsilon <= 8
    assert judge(made).proved == pytest.approx(gaussian_epsilon(math.sqrt(2 * rho), DELTA), rel=1e-9)
    assert judge(made).verdict is Verdict.LOOSE


def test_lei_takes_its_start_and_its_slope():
    states, _ = history(UDPLei(first=100.0, slope=0.25))
    assert [UDPLei().noise_multiplier(state, SETTING) for state in states] == [100.0, 75.0, 50.0, 25.0]
    assert UDPLei(first=1e6, slope=0.0).init(SETTING) == (1e6,) * 200  # not the 3e12 rounds within the budget


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("participants", [1, 50])
def test_lei_pays_for_a_first_round_by_default(rounds, participants):
    # (10) would overspend there: q T below about 1.5
    setting = dataclasses.replace(SETTING, rounds=rounds, participants=participants)
    states, _ = history(UDPLei(), setting)
    assert states
    assert UDPLei().claim(states, setting).epsilon <= 8 * (1 + 1e-9)


def test_a_federation_sends_the_mean_of_clipped_gradients():
    # z is 4e-6 here: the message is nearly the step itself
    spec = dataclasses.replace(SPEC, rounds=1)
    training = go(UDP(clip=0.1, epsilon=1e6), spec, frozenset({0}))
    start = training.models[0]
    for message in training.messages[0]:
        data = CLIENTS[message.sender.number]
        rows = []
        for i in range(len(data.y)):
            leaf = start.clone().requires_grad_()
            rows.append(torch.autograd.grad(TASK.loss(leaf, data.x[i : i + 1], data.y[i : i + 1]), leaf)[0])
        expected = -SPEC.lr * clip_l2(torch.stack(rows), 0.1).mean(0)
        found = decode(UDP(), 0, message.wire, training.setting)
        assert float((found - expected).norm()) < 0.01 * float(expected.norm())
        assert (message.images, message.steps) == (len(data.y), 1)
    assert (training.setting.steps, training.setting.batch, training.setting.samples) == (1, 0, 10)


def test_a_federation_ends_when_the_budget_is_spent():
    training = go(UDP(rounds=5), keep=frozenset({0, 4, 11}))
    assert len(training.feedback) == 5
    assert sorted(training.messages) == [0, 4]
    defense = UDP(rounds=5)
    states = [replay_state(defense, training.setting, training.feedback[:t]) for t in range(5)]
    assert defense.claim(states, training.setting).epsilon == pytest.approx(8, rel=1e-9)
    assert training.evaluations[-1].round == 5


def test_a_federation_without_progress_ends_sooner_if_it_is_evaluated():
    # lr 1e-9: no round lowers the loss by zeta; T = 12, 10, 9, 9, ... as floor(0.9 (T - t)) + t
    still = dataclasses.replace(SPEC, lr=1e-9)
    defense = UDPCRD(epsilon=4.0)
    training = go(defense, still)
    states = [replay_state(defense, training.setting, training.feedback[:t]) for t in range(len(training.feedback))]
    rounds, t = 12, 0
    while t < rounds:
        rounds, t = math.floor(0.9 * (rounds - t)) + t, t + 1
    assert len(training.feedback) == t < 12
    assert states[0].schedule.rounds == 12 > states[-1].schedule.rounds
    noise = [defense.sigma(state, SENDER, training.setting) for state in states]
    assert all(later <= sooner for sooner, later in itertools.pairwise(noise))
    assert defense.claim(states, training.setting).epsilon <= 4 * (1 + 1e-9)
    unevaluated = go(UDPCRD(), dataclasses.replace(still, evaluate_every=2))
    assert len(unevaluated.feedback) == 12


def test_lei_ends_a_federation_within_the_budget():
    training = go(UDPLei())
    assert 0 < len(training.feedback) < 12
    states, _ = history(UDPLei(), training.setting)
    assert len(training.feedback) == len(states)
