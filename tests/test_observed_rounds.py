"""Observations of several rounds of one victim, and of sums of several users."""

import pytest
import torch

from leakgauge import Key, unpack_float32
from leakgauge.attacks.map import MAP
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.ota import OTA
from leakgauge.defenses.top_k import TopK
from leakgauge.harness.core.cell import Cell, FederationSpec, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.threats import Threat, View
from leakgauge.harness.federation.loop import Keep
from leakgauge.harness.federation.observe import observe
from leakgauge.harness.study.study import resolve
from leakgauge.harness.study.training import keep_for
from tests.by_rows import by_rows
from tests.doubles import Ruled, Summing, random_examples, small_task, study_table
from tests.victims import trained_federation

TASK = small_task()
TRAIN, TEST = random_examples(60, seed=1), random_examples(40, seed=2)
SERVER = View(Threat.SERVER)


def federation(defense, **federation):
    spec = FederationSpec(**{"clients": 4, "rounds": 4, "batch": 4, "algorithm": "fedsgd", **federation})
    return trained_federation(TASK, spec, defense, TRAIN, TEST, range(4))


def gradient(params, x, y):
    leaf = params.clone().requires_grad_()
    return torch.autograd.grad(TASK.loss(leaf, x, y), leaf)[0]


def test_the_same_images_are_sent_from_the_model_of_each_round():
    here = federation(Gaussian(clip=1e3, noise_std=1e-7))
    seen, truth = observe(here, SERVER, Target(round=1, count=2, rounds=3))
    assert [observed.model.round for observed in seen.observed_rounds] == [1, 2, 3]
    for observed in seen.observed_rounds:
        for message, victim in zip(observed.messages, truth.victims, strict=True):
            sent = unpack_float32(message.wire, TASK.layout.dim)
            expected = gradient(here.training.models[observed.model.round], *victim)
            torch.testing.assert_close(sent, expected, rtol=1e-3, atol=1e-6)
    wires = {message.wire for observed in seen.observed_rounds for message in observed.messages}
    assert len(wires) == 6


def test_the_first_of_several_rounds_is_what_one_round_shows():
    here = federation(Gaussian(noise_std=0.1))
    one, three = (observe(here, SERVER, Target(round=1, count=2, rounds=n))[0] for n in (1, 3))
    assert one.messages == three.messages
    assert one.later == ()


def test_a_victims_memory_carries_over_to_the_next_round():
    here = federation(TopK(fraction=0.05, feedback=True))
    first, second = observe(here, SERVER, Target(round=0, count=1, rounds=2))[0].observed_rounds
    fresh = observe(here, SERVER, Target(round=1, count=1))[0].observed_rounds[0]
    assert second.messages[0].wire != fresh.messages[0].wire
    assert first.messages[0].wire == observe(here, SERVER, Target(round=0, count=1))[0].messages[0].wire


@by_rows((Threat.SERVER, 2), (Threat.EAVESDROPPER, 2), (Threat.PARTICIPANT, 0), (Threat.PUBLIC, 0))
def test_only_adversaries_who_see_messages_see_later_rounds(threat, rounds):
    seen, _ = observe(federation(Gaussian(noise_std=0.1)), View(threat), Target(round=0, count=2, rounds=3))
    assert len(seen.later) == rounds
    shared = {message.shared is not None for observed in seen.later for message in observed.messages}
    assert shared <= {threat is Threat.SERVER}


def test_real_messages_of_several_rounds_need_the_same_samples_in_each():
    target = Target(kind="messages", round=0, count=2, rounds=3)
    seen, truth = observe(federation(Gaussian(noise_std=0.1), batch=0), SERVER, target)
    assert [len(observed.messages) for observed in seen.observed_rounds] == [2, 2, 2]
    assert [len(victim.y) for victim in truth.victims] == [10, 10]
    with pytest.raises(ValueError, match="the same samples behind a client's messages of several rounds"):
        observe(federation(Gaussian(noise_std=0.1)), SERVER, target)


def test_a_round_after_the_defense_has_stopped_is_refused():
    here = federation(Ruled(rounds=2))
    assert observe(here, SERVER, Target(round=1, count=1))[0].model.round == 1
    with pytest.raises(ValueError, match="there is no round 2: the training ended after 2 rounds"):
        observe(here, SERVER, Target(round=1, count=1, rounds=2))


def test_a_sum_holds_the_images_of_all_its_users():
    here = federation(Summing())
    seen, truth = observe(here, SERVER, Target(round=1, count=2, users=3, batch=2))
    params = here.training.models[1]
    assert [len(victim.y) for victim in truth.victims] == [6, 6]
    for message, victim in zip(seen.messages, truth.victims, strict=True):
        assert (message.users, message.images) == (3, 6)
        assert len({who.number % 4 for who in (message.sender, *message.others)}) == 3
        each = [gradient(params, victim.x[i : i + 2], victim.y[i : i + 2]) for i in (0, 2, 4)]
        torch.testing.assert_close(unpack_float32(message.wire, TASK.layout.dim), sum(each), rtol=1e-4, atol=1e-6)


def test_without_a_sum_the_same_users_are_single_victims():
    target = Target(round=1, count=2, users=3)
    summed, alone = (observe(federation(d), SERVER, target) for d in (Summing(), Gaussian(noise_std=0.1)))
    assert [message.users for message in alone[0].messages] == [1] * 6
    assert torch.equal(torch.cat([v.x for v in summed[1].victims]), torch.cat([v.x for v in alone[1].victims]))


def test_more_users_than_participants_are_refused():
    with pytest.raises(ValueError, match="expected users <= 4 participants, got 5"):
        observe(federation(Summing()), SERVER, Target(round=1, count=1, users=5))


@pytest.mark.matrix
def test_all_users_of_a_noisy_sum_are_reconstructed_together():
    here = federation(OTA(epsilon=1e5, clip=50.0, power=1e9))
    target = Target(round=0, count=1, users=2)
    seen, truth = observe(here, View.parse("server+labels"), target)
    (guess,) = MAP(prior="tv", tv=0.0, evaluations=300, labels="given").run(seen, Key(1)).guesses
    x = truth.victims[0].x
    guesses = [guess.x[list(order)] for order in ((0, 1), (1, 0))]
    worst = min((found - x).square().flatten(1).mean(1).max() for found in guesses)
    assert worst < 2e-3
    apart = (x[0] - x[1]).square().mean()
    assert worst < apart / 20


def test_a_training_keeps_the_models_of_all_observed_rounds():
    training = TrainingSpec(TaskSpec("digits", "linear"), FederationSpec(), PartSpec("none"), 0)
    cells = [Cell(training, PartSpec("map"), Target(round=2, rounds=3), "server")]
    cells.append(Cell(training, PartSpec("map"), Target(kind="messages", round=7, rounds=2), "server"))
    assert keep_for(cells) == Keep(frozenset({2, 3, 4, 7, 8}), frozenset({7, 8}))


def test_rounds_beyond_the_last_are_refused_before_anything_runs():
    attack = {"name": "map", "target": {"kind": "probe", "round": 1, "rounds": 3}}
    with pytest.raises(StudyError, match="looks at round 3, expected less than 3"):
        resolve(study_table({"rounds": 3}, ["none"], [attack]))
