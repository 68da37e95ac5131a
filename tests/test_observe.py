import dataclasses

import pytest
import torch

from leakgauge import Sender, unpack_float32
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.cell import FederationSpec, Target
from leakgauge.harness.core.threats import SEES, Threat, ThreatMismatch, View, require
from leakgauge.harness.federation.observe import observe
from tests.by_rows import by_rows
from tests.doubles import Counting, Echo, Summing, random_examples, small_task
from tests.victims import trained_federation

TASK = small_task()
TRAIN, TEST = random_examples(60, seed=1), random_examples(40, seed=2)
PROBE = Target(round=1, count=3, batch=2)
CLASSES = tuple("abcdefghij")


def federation(defense=None, **federation):
    spec = FederationSpec(**{"clients": 4, "rounds": 3, "batch": 4, "algorithm": "fedsgd", **federation})
    made = trained_federation(TASK, spec, defense or NoDefense(), TRAIN, TEST, range(3), messages={1})
    return dataclasses.replace(made, classes=CLASSES)


def gradient_of(here, victim):
    """The gradient [d] of a victim's images at the model of round 1."""
    params = here.training.models[1].clone().requires_grad_()
    return torch.autograd.grad(TASK.loss(params, *victim), params)[0]


def distances(images, others):
    """From each image, the l1 distance to the nearest of the others."""
    return torch.cdist(images.flatten(1).double(), others.flatten(1).double(), p=1).min(dim=1).values


@pytest.mark.parametrize("threat", list(Threat))
@by_rows(
    PROBE,
    Target(kind="messages", round=1, count=4),
    Target(kind="members", count=5),
    Target(kind="members", count=5, round=1),
)
def test_an_observation_holds_what_its_threat_model_lists_and_no_more(target, threat):
    if threat is Threat.AGGREGATOR and target.kind == "messages":
        target = dataclasses.replace(target, count=1)
    seen, _ = observe(federation(), View(threat), target)
    sees = SEES[threat]
    at_messages = target.round is not None
    assert (seen.messages is not None) == (bool(sees & {"messages", "sums"}) and at_messages)
    assert (seen.model is not None) == ("models" in sees and at_messages)
    assert (seen.models is not None) == ("models" in sees)
    assert (seen.final is not None) == ("final" in sees)
    assert (seen.candidates is not None) == (target.kind == "members")
    assert seen.auxiliary is not None
    assert (seen.others is not None) == ("others" in sees)
    assert seen.labels is None
    for message in seen.messages or ():
        assert (message.shared is not None) == ("shared" in sees)
    if seen.messages is not None and target.kind != "probe":
        senders = [[who.number for who in (message.sender, *message.others)] for message in seen.messages]
        assert senders == ([[0, 1, 2, 3]] if threat is Threat.AGGREGATOR else [[0], [1], [2], [3]])
        assert seen.model.round == 1


def test_nobody_sees_a_private_key_or_the_images():
    seen, truth = observe(federation(Gaussian(noise_std=0.1)), View(Threat.SERVER), PROBE)
    assert "private" not in repr(seen.messages)
    for victim in truth.victims:
        assert (distances(victim.x, seen.auxiliary.x) > 0).all()


@by_rows((PROBE, 3, 2), (Target(kind="messages", round=1, count=4), 4, 4))
def test_messages_are_the_gradients_of_the_victims_at_the_model_of_the_round(target, count, images):
    here = federation()
    seen, truth = observe(here, View(Threat.SERVER), target)
    assert len(seen.messages) == count
    for message, victim in zip(seen.messages, truth.victims, strict=True):
        sent = unpack_float32(message.wire, TASK.layout.dim)
        torch.testing.assert_close(sent, gradient_of(here, victim), rtol=1e-5, atol=1e-7)
        assert (message.images, message.steps) == (images, 1)


def test_a_probe_of_an_update_trains_as_a_client_would():
    seen, _ = observe(federation(algorithm="fedavg", local_steps=3), View(Threat.SERVER), PROBE)
    assert {message.steps for message in seen.messages} == {3}
    assert seen.setting.sends == "update"


def test_victims_are_the_same_for_every_defense_and_belong_to_clients():
    plain = observe(federation(), View(Threat.SERVER), PROBE)[1]
    noisy = observe(federation(Gaussian(noise_std=0.5)), View(Threat.PUBLIC), PROBE)[1]
    for left, right in zip(plain.victims, noisy.victims, strict=True):
        assert torch.equal(left.x, right.x)
    images = torch.cat([victim.x for victim in plain.victims])
    assert (distances(images, TRAIN.x[:40]) == 0).all()
    assert len(images.flatten(1).unique(dim=0)) == 6


def test_the_state_of_the_round_is_public():
    seen, _ = observe(federation(Counting()), View(Threat.PARTICIPANT), Target(round=2))
    assert seen.model.state == 2


def test_if_the_channel_adds_the_other_clients_of_a_probe_are_silent_and_a_round_has_one_message():
    here = federation(Summing())
    seen, truth = observe(here, View(Threat.SERVER), PROBE)
    received = unpack_float32(seen.messages[0].wire, TASK.layout.dim)
    torch.testing.assert_close(received, gradient_of(here, truth.victims[0]), rtol=1e-5, atol=1e-7)
    assert seen.messages[0].sender == Sender(0, 2)
    seen, _ = observe(here, View(Threat.SERVER), Target(kind="members", count=5, round=1))
    (message,) = seen.messages
    assert [message.sender.number, *(other.number for other in message.others)] == [0, 1, 2, 3]
    assert (message.users, message.images) == (4, 16)


def test_labels_are_seen_only_where_granted():
    seen, truth = observe(federation(), View.parse("server+labels"), PROBE)
    assert [sorted(victim.y.tolist()) for victim in truth.victims] == [labels.tolist() for labels in seen.labels]


@pytest.mark.parametrize("target", [PROBE, Target(kind="members", count=5)])
def test_auxiliary_data_of_another_kind_replace_those_of_the_victims_kind(target):
    others = random_examples(7, seed=3)
    here, view = (
        dataclasses.replace(federation(), auxiliary=others),
        View.parse("server+labels+auxiliary=fashion_mnist"),
    )
    assert (view.name, view.other) == ("server+labels+auxiliary=fashion_mnist", "fashion_mnist")
    assert observe(here, view, target)[0].auxiliary is others
    assert observe(here, View.parse("server"), target)[0].auxiliary is not others
    with pytest.raises(ValueError, match="no auxiliary data from 'fashion_mnist'"):
        observe(federation(), view, target)


@by_rows("server+auxiliary=", "server+auxiliary=mnist+auxiliary=adult", "server+auxilary=mnist")
def test_a_wrong_grant_of_auxiliary_data_is_refused(text):
    with pytest.raises(ValueError, match=r"auxiliary="):
        View.parse(text)


@by_rows(
    (PROBE, {0, 1, 2, 3}, 34),
    (Target(kind="messages", round=1, count=2), {2, 3}, 20),
    (Target(kind="members", count=20), {0, 1, 2, 3}, 20),
)
def test_a_colluding_server_holds_the_others_data_but_nothing_of_the_victims(target, clients, rows):
    seen, truth = observe(federation(), View(Threat.COLLUDING_SERVER), target)
    assert set(seen.others) == clients
    held = torch.cat([data.x for data in seen.others.values()])
    assert len(held) == rows
    secret = [victim.x for victim in truth.victims] or [seen.candidates.x]
    assert (distances(torch.cat(secret), held) > 0).all()


def test_members_are_held_by_clients_and_the_others_by_nobody():
    seen, truth = observe(federation(), View(Threat.PUBLIC), Target(kind="members", count=20))
    for images, chosen in ((TRAIN.x[:40], truth.is_member), (TRAIN.x[40:], ~truth.is_member)):
        assert (distances(seen.candidates.x[chosen], images) == 0).all()
    assert truth.is_member.sum() == 20
    assert not truth.is_member[:20].all()
    assert "no client holds" in truth.note


def test_members_of_one_clients_data_are_its_records():
    target = Target(kind="members", client=2, count=10, outside=15)
    seen, truth = observe(federation(), View(Threat.COLLUDING_SERVER), target)
    assert torch.equal(distances(seen.candidates.x, TRAIN.x[20:30]) == 0, truth.is_member)
    assert (int(truth.is_member.sum()), len(truth.is_member)) == (10, 25)
    assert seen.suspect == 2
    assert set(seen.others) == {0, 1, 3}


def test_without_idle_samples_non_members_come_from_the_test_set_as_the_note_states():
    seen, truth = observe(federation(), View(Threat.PUBLIC), Target(kind="members", count=30))
    assert "test set" in truth.note
    assert len(seen.auxiliary.x) == 10
    assert (distances(seen.candidates.x[~truth.is_member], seen.auxiliary.x) > 0).all()


@by_rows(
    (Target(round=1, count=21, batch=2), "expected at most 40 records, got count=21 x users=1 x batch=2"),
    (Target(kind="messages", round=1, count=5), "expected at most 4 messages in round 1, got count=5"),
    (Target(kind="messages", round=2, count=1), "message of round 2 reached the receiver, or it was not kept"),
    (Target(kind="members", count=41), "expected at most 40 members, got count=41"),
    (Target(kind="members", count=40), "expected fewer than 40 non-members"),
    (Target(kind="members", client=4), "there is no client 4: expected less than 4"),
    (Target(kind="members", client=1, count=11), "expected at most 10 members, got count=11"),
    (
        Target(round=1, count=5, victim_classes=("d",)),
        "expected at most 4 records of d, got count=5 x users=1 x batch=1",
    ),
    (Target(kind="members", count=9, victim_classes=("d", "f")), "expected at most 8 members of d, f, got count=9"),
    (Target(kind="members", count=4, victim_classes=("d",)), "expected fewer than 4 non-members of d "),
    (Target(kind="members", count=2, client=1, victim_classes=("d",)), "expected at most 1 members of d, got count=2"),
    (Target(victim_classes=("a", "D")), "victim_classes: no class 'D'; did you mean 'd'. Known: a, b, "),
)
def test_a_target_that_the_scene_lacks_is_refused(target, message):
    with pytest.raises(ValueError, match=message):
        observe(federation(), View(Threat.SERVER), target)


@by_rows(PROBE, Target(kind="members", count=5), Target(kind="members", client=2, count=5, round=1))
def test_all_classes_are_what_no_class_is(target):
    here, view = federation(), View.parse("server+lineup")
    (seen, truth), (same, again) = (
        observe(here, view, one) for one in (target, dataclasses.replace(target, victim_classes=CLASSES))
    )
    assert [wire.wire for wire in seen.messages or ()] == [wire.wire for wire in same.messages or ()]
    for one, other in zip(truth.victims, again.victims, strict=True):
        assert torch.equal(one.x, other.x)
    for one, other in zip(truth.candidate_sets, again.candidate_sets, strict=True):
        assert (one == other).all()
    assert seen.candidates is None or torch.equal(seen.candidates.x, same.candidates.x)


@by_rows((("d",), 0, 1), (("f", "d"), 0, 2), (("f", "d"), 6, 2))
def test_victims_and_the_candidates_of_their_identification_are_of_the_named_classes(names, skip, batch):
    target = Target(round=1, count=3, batch=batch, skip=skip, victim_classes=names)
    seen, truth = observe(federation(), View.parse("server+lineup"), target)
    wanted = {CLASSES.index(name) for name in names}
    assert {int(y) for victim in truth.victims for y in victim.y} == wanted
    assert {int(y) for lineups in seen.lineups for lineup in lineups for y in lineup.y} == wanted
    rows = torch.cat([torch.from_numpy(each).flatten() for each in truth.candidate_sets])
    assert {*TRAIN.y[rows].tolist()} == wanted
    victims = torch.cat([victim.x for victim in truth.victims])
    assert len(victims.flatten(1).unique(dim=0)) == 3 * batch
    assert (distances(victims, TRAIN.x[rows]) > 0).all()


@by_rows((3, None, 4), (2, 2, 2))
def test_members_and_the_others_are_of_the_named_classes(count, client, outside):
    target = Target(kind="members", count=count, client=client, outside=outside, victim_classes=("d", "f"))
    seen, truth = observe(federation(), View.parse("server"), target)
    assert {*seen.candidates.y[truth.is_member].tolist()} | {*seen.candidates.y[~truth.is_member].tolist()} <= {3, 5}
    held = TRAIN.x[:40] if client is None else TRAIN.x[10 * client : 10 * client + 10]
    assert torch.equal(distances(seen.candidates.x, held) == 0, truth.is_member)
    assert int(truth.is_member.sum()) == count


def test_records_without_one_class_have_no_victims_of_a_class():
    here = dataclasses.replace(federation(), classes=())
    with pytest.raises(ValueError, match="got d, expected data with one class for each record"):
        observe(here, View(Threat.SERVER), Target(victim_classes=("d",)))


def test_a_need_that_is_not_seen_is_named():
    require(Echo().needs, "echo", View(Threat.EAVESDROPPER))
    with pytest.raises(
        ThreatMismatch, match="attack 'echo' needs 'shared', which 'eavesdropper' does not see; it sees: "
    ):
        require(Echo(wants="messages,shared").needs, "echo", View(Threat.EAVESDROPPER))
