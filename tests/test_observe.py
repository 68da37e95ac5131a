import numpy as np
import pytest
import torch

from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.cell import FederationSpec, Target
from leakgauge.harness.core.codec import unpack_float32
from leakgauge.harness.core.contract import Examples, Sender
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import SEES, Threat, ThreatMismatch, View, require
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.federation.observe import Scene, observe
from tests.doubles import Counting, Echo, Summing, random_examples, small_task

TASK = small_task()
TRAIN, TEST = random_examples(60, seed=1), random_examples(40, seed=2)
CLIENTS = {k: np.arange(10 * k, 10 * k + 10) for k in range(4)}
PROBE = Target(round=1, count=3, batch=2)


def scene(defense=None, train_set=TRAIN, **federation):
    spec = FederationSpec(**{"clients": 4, "rounds": 3, "batch": 4, "algorithm": "fedsgd", **federation})
    defense = defense or NoDefense()
    holdings = {k: Examples(train_set.x[rows], train_set.y[rows]) for k, rows in CLIENTS.items()}
    keep = Keep(frozenset({0, 1, 2}), frozenset({1}))
    training = train(TASK, spec, defense, holdings, TEST, Key(0).child("training"), engine="loop", keep=keep)
    return Scene(TASK, spec, defense, training, train_set, TEST, CLIENTS, "loop", Key(0))


@pytest.mark.parametrize("threat", list(Threat))
@pytest.mark.parametrize("target", [PROBE, Target(kind="messages", round=1, count=2), Target(kind="members", count=5)])
def test_an_observation_holds_what_the_table_says_and_no_more(threat, target):
    seen, _ = observe(scene(), View(threat), target)
    sees = SEES[threat]
    at_messages = target.kind != "members"
    assert (seen.messages is not None) == ("messages" in sees and at_messages)
    assert (seen.model is not None) == ("models" in sees and at_messages)
    assert (seen.models is not None) == ("models" in sees)
    assert (seen.final is not None) == ("final" in sees)
    assert (seen.candidates is not None) == (not at_messages)
    assert seen.auxiliary is not None
    assert (seen.others is not None) == ("others" in sees)
    assert seen.labels is None
    for message in seen.messages or ():
        assert (message.shared is not None) == ("shared" in sees)


def test_nobody_sees_a_private_key_or_the_images():
    seen, truth = observe(scene(Gaussian(noise_std=0.1)), View(Threat.SERVER), PROBE)
    held = repr(seen.messages)
    assert "private" not in held
    flat = seen.auxiliary.x.flatten(1)
    for victim in truth.victims:
        for image in victim.x.flatten(1):
            assert (flat - image).abs().sum(1).min() > 0


def test_a_probe_goes_through_the_encode_path_at_the_model_of_its_round():
    here = scene()
    seen, truth = observe(here, View(Threat.SERVER), PROBE)
    assert len(seen.messages) == 3
    for message, victim in zip(seen.messages, truth.victims, strict=True):
        params = here.training.models[1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(TASK.loss(params, *victim), params)
        sent = unpack_float32(message.wire, TASK.layout.dim)
        torch.testing.assert_close(sent, gradient, rtol=1e-5, atol=1e-7)
        assert (message.images, message.steps) == (2, 1)


def test_a_probe_of_an_update_trains_as_a_client_would():
    seen, _ = observe(scene(algorithm="fedavg", local_steps=3), View(Threat.SERVER), PROBE)
    assert {message.steps for message in seen.messages} == {3}
    assert seen.setting.sends == "update"


def test_victims_are_the_same_for_every_defense_and_belong_to_clients():
    plain = observe(scene(), View(Threat.SERVER), PROBE)[1]
    noisy = observe(scene(Gaussian(noise_std=0.5)), View(Threat.PUBLIC), PROBE)[1]
    for left, right in zip(plain.victims, noisy.victims, strict=True):
        assert torch.equal(left.x, right.x)
    held = TRAIN.x[:40].flatten(1)
    images = torch.cat([victim.x for victim in plain.victims]).flatten(1)
    assert all((held - image).abs().sum(1).min() == 0 for image in images)
    assert len(images.unique(dim=0)) == 6


def test_real_messages_come_with_the_samples_behind_them():
    here = scene()
    seen, truth = observe(here, View(Threat.SERVER), Target(kind="messages", round=1, count=4))
    for message, victim in zip(seen.messages, truth.victims, strict=True):
        params = here.training.models[1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(TASK.loss(params, *victim), params)
        sent = unpack_float32(message.wire, TASK.layout.dim)
        torch.testing.assert_close(sent, gradient, rtol=1e-5, atol=1e-7)
        assert message.images == 4


def test_the_state_of_the_round_is_public():
    seen, _ = observe(scene(Counting()), View(Threat.PARTICIPANT), Target(round=2))
    assert seen.model.state == 2


def test_where_the_channel_adds_a_probe_meets_the_others_silent():
    here = scene(Summing())
    seen, truth = observe(here, View(Threat.SERVER), PROBE)
    params = here.training.models[1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(TASK.loss(params, *truth.victims[0]), params)
    received = seen.messages[0]
    torch.testing.assert_close(unpack_float32(received.wire, TASK.layout.dim), gradient, rtol=1e-5, atol=1e-7)
    assert received.sender == Sender(0, 2)
    with pytest.raises(ValueError, match="no single client's message of round 1 reached the receiver"):
        observe(here, View(Threat.SERVER), Target(kind="messages", round=1, count=1))


def test_labels_are_seen_only_where_granted():
    seen, truth = observe(scene(), View.parse("server+labels"), PROBE)
    assert [sorted(victim.y.tolist()) for victim in truth.victims] == [labels.tolist() for labels in seen.labels]


@pytest.mark.parametrize(
    ("target", "clients", "rows"),
    [
        (PROBE, {0, 1, 2, 3}, 34),
        (Target(kind="messages", round=1, count=2), {2, 3}, 20),
        (Target(kind="members", count=20), {0, 1, 2, 3}, 20),
    ],
)
def test_a_colluding_server_holds_the_others_data_but_nothing_of_the_victims(target, clients, rows):
    seen, truth = observe(scene(), View(Threat.COLLUDING_SERVER), target)
    assert set(seen.others) == clients
    held = torch.cat([data.x for data in seen.others.values()]).flatten(1)
    assert len(held) == rows
    secret = [victim.x for victim in truth.victims] or [seen.candidates.x]
    for image in torch.cat(secret).flatten(1):
        assert (held - image).abs().sum(1).min() > 0


def test_members_are_held_by_clients_and_the_others_by_nobody():
    seen, truth = observe(scene(), View(Threat.PUBLIC), Target(kind="members", count=20))
    held, idle = TRAIN.x[:40].flatten(1), TRAIN.x[40:].flatten(1)
    for x, member in zip(seen.candidates.x.flatten(1), truth.is_member, strict=True):
        assert ((held if member else idle) - x).abs().sum(1).min() == 0
    assert truth.is_member.sum() == 20
    assert not truth.is_member[:20].all()
    assert "no client holds" in truth.note


def test_membership_in_one_clients_data_is_asked_of_its_records_alone():
    target = Target(kind="members", client=2, count=10, outside=15)
    seen, truth = observe(scene(), View(Threat.COLLUDING_SERVER), target)
    mine = TRAIN.x[torch.as_tensor(CLIENTS[2])].flatten(1)
    for x, member in zip(seen.candidates.x.flatten(1), truth.is_member, strict=True):
        assert ((mine - x).abs().sum(1).min() == 0) == member
    assert (int(truth.is_member.sum()), len(truth.is_member)) == (10, 25)
    assert seen.suspect == 2
    assert set(seen.others) == {0, 1, 3}


@pytest.mark.parametrize("threat", list(Threat))
def test_who_asks_for_membership_may_look_at_everybodys_messages_round_by_round(threat):
    seen, _ = observe(scene(), View(threat), Target(kind="members", count=5, round=1))
    sees = SEES[threat]
    assert (seen.messages is not None) == ("messages" in sees)
    if seen.messages is not None:
        assert [message.sender.number for message in seen.messages] == [0, 1, 2, 3]
        assert seen.model.round == 1
        assert all((message.shared is not None) == ("shared" in sees) for message in seen.messages)


def test_where_the_channel_adds_the_round_has_one_message_of_all():
    seen, _ = observe(scene(Summing()), View(Threat.SERVER), Target(kind="members", count=5, round=1))
    (message,) = seen.messages
    assert [message.sender.number, *(other.number for other in message.others)] == [0, 1, 2, 3]
    assert message.users == 4
    assert message.images == 16


def test_without_idle_samples_non_members_come_from_the_test_set_and_the_note_says_so():
    seen, truth = observe(scene(), View(Threat.PUBLIC), Target(kind="members", count=30))
    assert "test set" in truth.note
    outside = seen.candidates.x[~truth.is_member].flatten(1)
    auxiliary = seen.auxiliary.x.flatten(1)
    assert len(auxiliary) == 10
    assert all((auxiliary - x).abs().sum(1).min() > 0 for x in outside)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (Target(round=1, count=21, batch=2), "expected at most 40 images, got 21 x 1 victims x 2"),
        (Target(kind="messages", round=1, count=5), "expected at most 4 messages in round 1, got count=5"),
        (Target(kind="messages", round=2, count=1), "message of round 2 reached the receiver, or it was not kept"),
        (Target(kind="members", count=41), "expected at most 40 members, got count=41"),
        (Target(kind="members", count=40), "expected fewer than 40 non-members"),
        (Target(kind="members", client=4), "there is no client 4: expected less than 4"),
        (Target(kind="members", client=1, count=11), "expected at most 10 members, got count=11"),
    ],
)
def test_a_target_that_is_not_there_is_refused(target, said):
    with pytest.raises(ValueError, match=said):
        observe(scene(), View(Threat.SERVER), target)


def test_a_channel_that_adds_has_no_single_message_to_attack():
    with pytest.raises(ValueError, match="no single client's message of round 1 reached"):
        observe(scene(Summing()), View(Threat.SERVER), Target(kind="messages", round=1, count=1))


def test_a_need_that_is_not_seen_is_named():
    require(Echo().needs, "echo", View(Threat.EAVESDROPPER))
    with pytest.raises(
        ThreatMismatch, match="attack 'echo' needs 'shared', which 'eavesdropper' does not see; it sees: "
    ):
        require(Echo(wants="messages,shared").needs, "echo", View(Threat.EAVESDROPPER))
