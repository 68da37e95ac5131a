"""Membership from messages: the formulas, the owner of a record, sums, and messages with little information."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch

from leakgauge import Key, unpack_float32
from leakgauge.attacks._members import traffic as _traffic
from leakgauge.attacks._members.traffic import read
from leakgauge.attacks.fedmia import FedMIA
from leakgauge.attacks.membership_cosine import MembershipCosine
from leakgauge.attacks.membership_sum import MembershipSum
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.cell import FederationSpec, Target
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.stats import auc
from leakgauge.harness.core.threats import Threat, ThreatMismatch, View, require
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.observe import observe
from tests.by_rows import by_rows
from tests.doubles import Ruled, Summing, random_examples, small_task
from tests.victims import Says, make, trained_federation

TASK = small_task()
TRAIN, TEST = random_examples(80, seed=1), random_examples(10, seed=2)
KEY, SERVER, ROUNDS = Key(0), View(Threat.SERVER), 6
LIKELIHOOD = MembershipCosine("likelihood")
SINGLE = [MembershipCosine(), MembershipCosine("difference"), FedMIA(), FedMIA(pooled=False), LIKELIHOOD]
SUMS = [MembershipSum(), LIKELIHOOD]
single = pytest.mark.parametrize("attack", SINGLE, ids=repr)
sums = pytest.mark.parametrize("attack", SUMS, ids=repr)
every = pytest.mark.parametrize("attack", [*SINGLE, MembershipSum()], ids=repr)


@functools.cache
def federation(defense=None, **federation):
    """A federation on noise images with labels in turn, which the model can only memorize."""
    base = {"clients": 4, "rounds": ROUNDS, "batch": 5, "local_epochs": 2, "lr": 0.5, "evaluate_every": ROUNDS}
    spec = FederationSpec(**(base | federation))
    return trained_federation(TASK, spec, defense or NoDefense(), TRAIN, TEST, range(ROUNDS))


def look(here, client=0, rounds=ROUNDS):
    count = 40 if client is None else 10
    return observe(here, SERVER, Target(kind="members", round=0, rounds=rounds, count=count, outside=40, client=client))


def scores(attack, seen):
    return attack.run(seen, KEY).scores


def rate(attack, seen, truth):
    found, inside = scores(attack, seen).numpy(), truth.is_member.numpy()
    return auc(found[inside], found[~inside]).value


def only_messages(seen, keep):
    """The observation with those messages of each round that `keep(round, message)` names."""
    observed_rounds = [
        observed._replace(messages=tuple(m for m in observed.messages if keep(number, m)))
        for number, observed in enumerate(seen.observed_rounds)
    ]
    first, *later = observed_rounds
    return dataclasses.replace(seen, messages=first.messages, later=tuple(later))


@single
def test_members_stand_out_for_their_own_client_and_not_for_another(attack):
    seen, truth = look(federation())
    right = rate(attack, seen, truth)
    wrong = max(rate(attack, dataclasses.replace(seen, suspect=other), truth) for other in (1, 2, 3))
    if attack == MembershipCosine("difference"):  # |g|^2 dominates this statistic
        assert right > wrong
    else:
        assert right > 0.7 > 0.65 > wrong


@pytest.mark.parametrize("sends", ["gradient", "update"])
def test_every_statistic_is_its_formula_record_by_record(sends):
    seen = make(TASK, n=4, images=2, sends=sends, lr=0.25, steps=1 if sends == "gradient" else 3).seen
    (traffic,) = read(seen)
    params = seen.model.params
    step = 1.0 if sends == "gradient" else -0.25 * 3
    sent = [unpack_float32(m.wire, TASK.layout.dim).double() / step for m in seen.messages]
    wanted = {name: torch.zeros(4, 8, dtype=torch.float64) for name in ("cosine", "difference")}
    for i, (x, y) in enumerate(zip(*seen.candidates, strict=True)):
        leaf = params.clone().requires_grad_()
        g = torch.autograd.grad(TASK.loss(leaf, x[None], y[None]), leaf)[0].double()
        for k, u in enumerate(sent):
            wanted["cosine"][k, i] = (u @ g) / (u.norm() * g.norm())
            wanted["difference"][k, i] = u.norm() ** 2 - (u - g).norm() ** 2
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)
    close(traffic.cosines, wanted["cosine"])
    close(traffic.differences, wanted["difference"])


def test_a_record_is_clipped_as_the_defense_clips_it():
    plain = make(TASK, n=4).seen
    (free,), clip = read(plain), 0.5
    (bound,) = read(dataclasses.replace(plain, defense=Clips(clip=clip)))
    factor = (clip / free.gradient_norm).clamp(max=1.0)
    assert (factor < 1).any()
    torch.testing.assert_close(bound.gradient_norm, factor * free.gradient_norm)
    torch.testing.assert_close(bound.products, factor * free.products)


class Clips(Ruled):
    """No defense, except that records are clipped."""

    def estimate(self, state, received, link):
        return unpack_float32(received, link.setting.dim)


@every
def test_shuffled_candidates_have_shuffled_scores_in_any_chunks(attack, monkeypatch):
    seen, _ = look(federation(), rounds=2)
    order = torch.from_numpy(np.roll(np.arange(50)[::-1], 7).copy())
    shuffled = Examples(seen.candidates.x[order], seen.candidates.y[order])
    before = scores(attack, seen)
    monkeypatch.setattr(_traffic, "_CHUNK", 7)
    after = scores(attack, dataclasses.replace(seen, candidates=shuffled))
    torch.testing.assert_close(after, before[order], rtol=1e-4, atol=1e-6)


def test_a_candidate_that_is_alone_in_its_chunk_is_read_behind_any_model():
    seen = make(small_task("resnet20"), n=1).seen  # without a kernel by hand
    torch.testing.assert_close(scores(MembershipCosine(), seen), torch.ones(1).double(), rtol=1e-3, atol=0)


@every
def test_messages_without_information_leave_scores_finite(attack):
    for value in (0.0, math.nan, math.inf):
        found = scores(attack, dataclasses.replace(make(TASK).seen, defense=Says(value)))
        assert found.shape == (3,)
        assert found.isfinite().all()


@by_rows(
    ("top-k", {"fraction": 0.1}, 0),
    ("random-mask", {"share": 0.1}, 0),
    ("sqsgd", {"epsilon": 4000.0}, 0),
    ("sdq", {}, 0),
    ("laplace", {}, 0),
    ("ota", {"epsilon": 1000.0}, None),
)
def test_scores_are_finite_behind_a_defense(name, parameters, client):
    seen, _ = look(federation(registry.build("defense", name, parameters)), client, rounds=2)
    for attack in SUMS:
        assert scores(attack, seen).isfinite().all()


@pytest.mark.parametrize("attack", [MembershipCosine(), FedMIA()], ids=repr)
def test_rounds_without_the_suspect_are_left_out(attack):
    seen, truth = look(federation())
    absent = only_messages(seen, lambda number, message: number < 3 or message.sender.number != 0)
    early = dataclasses.replace(seen, later=seen.later[:2])
    torch.testing.assert_close(scores(attack, absent), scores(attack, early), rtol=1e-4, atol=1e-5)
    assert rate(attack, seen, truth) >= rate(attack, absent, truth) - 0.02


def test_clients_are_judged_by_the_rounds_they_take_part_in():
    here = federation(participants=3)
    seen, truth = look(here)
    took_part = [any(m.sender.number == 0 for m in observed.messages) for observed in seen.observed_rounds]
    assert 0 < sum(took_part) < ROUNDS
    assert rate(FedMIA(), seen, truth) > 0.65
    for attack in SUMS:
        assert scores(attack, seen).isfinite().all()


@single
def test_without_a_suspect_the_score_is_the_largest_among_the_clients(attack):
    seen, _ = look(federation(), rounds=2)
    each = torch.stack([scores(attack, dataclasses.replace(seen, suspect=k)) for k in range(4)])
    together = scores(attack, dataclasses.replace(seen, suspect=None))
    torch.testing.assert_close(together, each.amax(dim=0), rtol=1e-4, atol=1e-5)


@single
def test_a_suspect_who_sent_nothing_is_refused(attack):
    seen, _ = look(federation(), rounds=2)
    with pytest.raises(ValueError, match="expected a message of client 9 in the observed rounds, got none"):
        scores(attack, dataclasses.replace(seen, suspect=9))


def test_a_single_client_needs_the_cosine():
    seen, truth = look(federation())
    alone = only_messages(seen, lambda number, message: message.sender.number == 0)
    for attack in (FedMIA(), FedMIA(pooled=False)):
        with pytest.raises(ValueError, match=r"at least three messages in every round.*membership-cosine"):
            scores(attack, alone)
    for attack in (MembershipCosine(), MembershipCosine("likelihood")):
        torch.testing.assert_close(scores(attack, alone), scores(attack, seen), rtol=1e-4, atol=1e-5)
        assert rate(attack, alone, truth) > 0.7


@sums
def test_a_sum_reveals_the_same_whether_the_channel_or_the_attacker_adds(attack):
    (apart, _), (added, truth) = look(federation(), None), look(federation(Summing()), None)
    assert len(added.messages) == 1
    found = scores(attack, added)
    if attack == MembershipSum():  # the double's likelihood does not show which coordinates were sent
        torch.testing.assert_close(found, scores(attack, apart), rtol=1e-2, atol=1e-3)
    assert rate(attack, added, truth) > 0.55
    torch.testing.assert_close(scores(attack, dataclasses.replace(added, suspect=2)), found)


def test_swapped_messages_leave_a_sum_unchanged():
    attack = MembershipSum()
    seen, _ = look(federation(), None, rounds=1)
    a, b, *rest = seen.messages
    values = [unpack_float32(message.wire, TASK.layout.dim) for message in (a, b)]
    swapped = (a._replace(wire=b.wire), b._replace(wire=a.wire), *rest)
    assert not torch.equal(*values)
    found = scores(attack, dataclasses.replace(seen, messages=swapped))
    torch.testing.assert_close(found, scores(attack, seen), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attack", [one for one in SINGLE if isinstance(one, FedMIA)], ids=repr)
def test_what_compares_messages_refuses_a_channel_that_adds_them(attack):
    with pytest.raises(ValueError, match="use membership-sum instead"):
        scores(attack, look(federation(Summing()), None)[0])


@pytest.mark.parametrize("suspect", [None, 2])
def test_of_a_channel_that_adds_the_cosine_reads_the_sum(suspect):
    seen, _ = look(federation(Summing()), suspect)
    ranks = [scores(attack, seen).argsort() for attack in (MembershipCosine(), MembershipSum())]
    assert torch.equal(*ranks)


@every
def test_an_adversary_without_messages_is_refused(attack):
    for threat in (Threat.SERVER, Threat.EAVESDROPPER):
        require(attack.needs, "it", View(threat))
    for threat in (Threat.PARTICIPANT, Threat.PUBLIC):
        with pytest.raises(ThreatMismatch, match="'messages'"):
            require(attack.needs, "it", View(threat))


def test_the_likelihood_ratios_are_aware_of_the_defense():
    assert [attack.aware for attack in [*SINGLE, MembershipSum()]] == [False] * 4 + [True, False]
