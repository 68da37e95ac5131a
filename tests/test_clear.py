"""Membership from numbers that a defense sends in clear: what is read, its two distributions, and what is refused."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from leakgauge import nothing_promised, pack_float32, unpack_float32
from leakgauge.attacks._members import clear
from leakgauge.attacks.active_membership import ActiveMembership
from leakgauge.attacks.membership_cosine import MembershipCosine
from leakgauge.defenses._common.plain import Plain
from leakgauge.defenses.cepam_gaussian import CepamGaussian
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.jopeq import JoPEQ
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.contract import Examples, LocalRule, Observation, Setting, Snapshot
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.core.stats import auc
from leakgauge.harness.core.threats import Threat, ThreatMismatch, View, require
from leakgauge.harness.federation.aggregate import aggregated
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from tests.by_rows import by_rows
from tests.doubles import Summing, small_task
from tests.victims import encoded

TASK, KEY, EACH, CLIENTS = small_task(), Key(3), 8, 30
NORM = MembershipCosine("norm")
ATTACKS = [NORM, ActiveMembership("norm")]
SENDS = [JoPEQ(), CepamGaussian()]
sends = pytest.mark.parametrize("defense", SENDS, ids=lambda one: type(one).__name__)
attacks = pytest.mark.parametrize("attack", ATTACKS, ids=lambda one: type(one).__name__)


@dataclasses.dataclass(frozen=True)
class Tells(Plain):
    """A user's defense that sends three sums of shares of the update in clear; `bound`: clips records."""

    reads: bool = True
    bound: float | None = None

    @property
    def local(self):
        return LocalRule(clip=self.bound)

    def encode(self, state, memory, update, link, private):
        wire, _ = super().encode(state, memory, update, link, private)
        return pack_float32(self.plaintext_statistic(update[None], link.setting)[0].float()) + wire, None

    def estimate(self, state, received, link):
        return super().estimate(state, received[12:], link)

    def plaintext_statistic(self, updates, setting):
        shares = normal(Key(5), (setting.dim, 3)).to(updates)
        return updates @ shares

    def read_plaintext_statistic(self, received, setting):
        if not self.reads:
            return super().read_plaintext_statistic(received, setting)
        return torch.stack([unpack_float32(wire[:12], 3) for wire in received]).double()

    def claim(self, history, setting):
        return nothing_promised(len(history), "It tells.")


def watched(digits, defense, sends="gradient", steps=1, batch=0, clients=CLIENTS, seed=0, params=None):
    """A server's view of clients with eight records, which come first among the candidates; others follow."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(digits.y)))
    held, rest = order[: clients * EACH], order[clients * EACH + 200 :]
    rows = order[: clients * EACH + 200]
    setting = Setting(TASK.layout, clients, clients, 1, sends, steps, 0.1, batch, EACH)
    params = TASK.init(KEY) if params is None else params
    plan = LocalPlan(sends == "gradient", steps, None, batch, 0.1, 0.0, defense.local.clip)
    work = [Work(Examples(digits.x[part], digits.y[part]), KEY.child(k)) for k, part in enumerate(held.split(EACH))]
    updates = train_clients(TASK, params, work, plan, "loop").updates
    messages = encoded(setting, defense, updates, [EACH] * clients, KEY)
    return Observation(
        View.parse("server"),
        setting,
        TASK,
        defense,
        0.1,
        messages=messages,
        model=Snapshot(0, params, None),
        auxiliary=Examples(digits.x[rest], digits.y[rest]),
        candidates=Examples(digits.x[rows], digits.y[rows]),
    )


def ratios(seen):
    """[clients, candidates] of an honest round."""
    (observed,) = seen.observed_rounds
    return clear.by_batches(seen, observed, clear._numbers(seen, observed.messages), KEY)


def owns(seen):
    """[clients, candidates] bool."""
    owner = torch.arange(len(seen.candidates.y)) // EACH
    return owner == torch.arange(len(seen.messages))[:, None]


def rate(rows, members, others):
    """Mean AUC over messages of the candidates in `members` against those in `others`, both [k, n] bool."""
    each = [auc(r[m].numpy(), r[o].numpy()).value for r, m, o in zip(rows, members, others, strict=True)]
    return sum(each) / len(each)


@pytest.mark.parametrize(("defense", "least"), [(JoPEQ(), 0.65), (CepamGaussian(), 0.53), (Tells(), 0.65)])
def test_members_stand_out_from_their_own_client_and_not_from_another(digits, defense, least):
    seen = watched(digits, defense)
    rows, own = ratios(seen), owns(seen)
    outside = (torch.arange(own.shape[1]) >= CLIENTS * EACH).expand_as(own)
    assert rate(rows, own, outside) > least
    # 240 records against 200: the rate of indistinguishable ones has a standard deviation of about 0.03
    assert abs(rate(rows, ~own & ~outside, outside) - 0.5) < 0.1


def test_a_ratio_is_the_odds_of_membership(digits):
    """Sums of many entries are nearly normal, so the ratios must be calibrated, not only ordered."""
    found, member = [], []
    for seed in range(3):
        seen = watched(digits, Tells(), seed=seed)
        rows, own = ratios(seen), owns(seen)
        other = torch.zeros_like(own)
        other[:, CLIENTS * EACH :] = True
        found += [rows[own], rows[other][:: int(other.sum() / own.sum())][: int(own.sum())]]
        member += [torch.ones(int(own.sum())), torch.zeros(len(found[-1]))]
    chance, truth = torch.cat(found).sigmoid(), torch.cat(member).double()
    for low, high in ((0.0, 0.35), (0.35, 0.65), (0.65, 1.0)):
        within = (chance >= low) & (chance <= high)
        assert within.sum() > 150
        assert float(truth[within].mean()) == pytest.approx(float(chance[within].mean()), abs=0.12)


@pytest.mark.parametrize(("sent", "steps", "batch"), [("gradient", 1, 0), ("update", 1, 0), ("update", 4, 2)])
@pytest.mark.parametrize("defense", [*SENDS, Tells(), Tells(bound=0.5)], ids=repr)
def test_the_distribution_with_a_candidate_is_that_of_batches_that_hold_it(
    digits, defense, sent, steps, batch, monkeypatch
):
    """By slopes, as against an update for each pair of batch and candidate."""
    seen = watched(digits, defense, sent, steps, batch, clients=3)
    (observed,) = seen.observed_rounds
    each = clear._gradients(seen, seen.model.params, seen.candidates)[:5]
    made = []
    inside = clear._updates
    monkeypatch.setattr(clear, "_updates", lambda *given: made.append((given[2], inside(*given))) or made[-1][1])
    images = observed.messages[0].images
    monkeypatch.setattr(clear, "_ENTRIES", 100 * images * TASK.layout.dim)
    distribution = clear._simulated(seen, observed._replace(messages=observed.messages[:1]), each, KEY)
    assert len(made) == 3
    factor = (1.0 if sent == "gradient" else -0.1) / (batch or EACH)
    first = torch.cat([clear._gradients(seen, seen.model.params, Examples(b.x[:, 0], b.y[:, 0])) for b, _ in made])
    updates = torch.cat([update for _, update in made])
    torch.testing.assert_close(distribution.without, seen.defense.plaintext_statistic(updates, seen.setting).double())
    pairs = updates + factor * (each[:, None] - first)
    direct = torch.stack([seen.defense.plaintext_statistic(pair, seen.setting).double().mean(0) for pair in pairs])
    size = distribution.without.square().mean(0).max().sqrt()
    torch.testing.assert_close(distribution.mean_with, direct, rtol=1e-4, atol=1e-5 * float(size))


def test_a_number_that_only_rounding_moves_says_nothing():
    """Such as the mean of the last bias' gradient, which is zero whatever the records."""
    plain, shift = normal(KEY, (256, 1), torch.float64) + 5, torch.tensor([[0.5], [-0.2]]).double()
    alone = clear._Distribution(plain, plain.mean(0) + shift)
    blank = 1e-9 * normal(KEY.child("blank"), (258, 1), torch.float64)
    both = clear._Distribution(torch.cat([plain, blank[:256]], 1), torch.cat([alone.mean_with, blank[256:]], 1))
    sent = torch.tensor([[5.3], [4.0]]).double()
    moved = torch.cat([sent, torch.full((2, 1), 1e-7)], 1)  # another engine rounds otherwise
    torch.testing.assert_close(both.ratios(moved), alone.ratios(sent), rtol=0.05, atol=0.01)


def test_a_simulated_client_trains_as_a_client_does(digits):
    seen = watched(digits, Tells(), "update", 4, 2, clients=3)
    (observed,) = seen.observed_rounds
    rows = torch.arange(EACH)[None]
    batch = Examples(digits.x[rows], digits.y[rows])
    mine = clear._updates(seen, observed._replace(messages=observed.messages[:1]), batch, KEY)[0]
    here = seen.model.params
    for part in rows[0].split(2):
        leaf = here.clone().requires_grad_()
        here = here - 0.1 * torch.autograd.grad(TASK.loss(leaf, digits.x[part], digits.y[part]), leaf)[0]
    torch.testing.assert_close(mine, here - seen.model.params, rtol=1e-3, atol=1e-6)


@sends
@attacks
def test_nothing_but_the_numbers_in_clear_is_read(digits, defense, attack):
    seen = watched(digits, defense, clients=4)
    few = Examples(*(part[:12] for part in seen.candidates))
    if attack is not NORM:
        params = attack.broadcast(dataclasses.replace(seen, candidates=few), KEY)
        seen = watched(digits, defense, clients=4, params=params)
    seen = dataclasses.replace(seen, candidates=few, suspect=0)
    size = 4 if isinstance(defense, CepamGaussian) else defense.scaling.header_size(TASK.layout)
    a, b, *rest = seen.messages
    other = a._replace(wire=a.wire[:size] + b.wire[size:])
    assert other.wire != a.wire
    before = attack.run(seen, KEY).scores
    assert torch.equal(attack.run(dataclasses.replace(seen, messages=(other, b, *rest)), KEY).scores, before)
    swapped = a._replace(wire=b.wire[:size] + a.wire[size:])
    assert not torch.equal(attack.run(dataclasses.replace(seen, messages=(swapped, b, *rest)), KEY).scores, before)


@attacks
@by_rows(
    (NoDefense(), (0, 0)),
    (Gaussian(), (0, 0)),
    (JoPEQ(scale="public"), (0, 0)),
    (Summing(), (0, 0)),
    (aggregated(JoPEQ()), (0, 0)),
    (Tells(reads=False), (3, 0)),
    ids=["none", "gaussian", "jopeq-public", "summing", "aggregated", "unread"],
)
def test_a_defense_without_numbers_in_clear_is_refused(defense, given, digits, attack):
    seen = watched(digits, defense, clients=2)
    with pytest.raises(ValueError, match=r"in the clear, such as a norm, got {} from .* and {} from".format(*given)):
        attack.run(seen, KEY)


def test_fewer_than_two_auxiliary_records_and_several_steps_are_refused(digits):
    seen = watched(digits, JoPEQ(), clients=2)
    alone = Examples(*(part[:1] for part in seen.auxiliary))
    with pytest.raises(ValueError, match="expected at least 2 auxiliary records to simulate batches, got 1"):
        NORM.run(dataclasses.replace(seen, auxiliary=alone), KEY)
    with pytest.raises(ValueError, match="expected messages of one local step for statistic norm"):
        ActiveMembership("norm").run(watched(digits, JoPEQ(), "update", 4, 2, clients=2), KEY)
    with pytest.raises(ValueError, match="expected a statistic that reads `Traffic`, got norm"):
        NORM.evidence(None, 0)


def test_the_norm_needs_auxiliary_data_and_no_shared_key(digits):
    assert NORM.needs == MembershipCosine().needs | {"auxiliary"}
    for threat in (Threat.SERVER, Threat.EAVESDROPPER):
        require(NORM.needs, "it", View(threat))
    with pytest.raises(ThreatMismatch, match="'messages'"):
        require(NORM.needs, "it", View(Threat.PARTICIPANT))
    assert NORM.aware
    seen = watched(digits, JoPEQ(), clients=3)
    outside = tuple(message._replace(shared=None) for message in seen.messages)
    found = [NORM.run(one, KEY).scores for one in (seen, dataclasses.replace(seen, messages=outside))]
    assert torch.equal(*found)


def test_the_suspect_s_messages_alone_are_judged_and_rounds_add_up(digits):
    seen = watched(digits, CepamGaussian(), clients=4)
    (observed,) = seen.observed_rounds
    again = observed._replace(model=Snapshot(1, *observed.model[1:]))
    seen = dataclasses.replace(seen, later=(again,))
    own = [NORM.run(dataclasses.replace(seen, suspect=k), KEY).scores for k in range(4)]
    torch.testing.assert_close(NORM.run(seen, KEY).scores, torch.stack(own).amax(0))
    first = NORM.run(dataclasses.replace(seen, later=(), suspect=2), KEY).scores
    torch.testing.assert_close(own[2], 2 * first, rtol=0.3, atol=0.3)  # another 256 batches
    with pytest.raises(ValueError, match="expected a message of client 9"):
        NORM.run(dataclasses.replace(seen, suspect=9), KEY)


def test_a_record_that_a_message_may_leave_out_is_judged_by_the_mixture(digits):
    seen = dataclasses.replace(watched(digits, CepamGaussian(), clients=3), suspect=1)
    half = tuple(message._replace(images=4) for message in seen.messages)
    some = dataclasses.replace(seen, messages=half)
    found = NORM.run(some, KEY).scores
    row = clear.by_batches(
        some, some.observed_rounds[0]._replace(messages=half[1:2]), clear._numbers(some, half[1:2]), KEY.child(0)
    )
    torch.testing.assert_close(found, (0.5 + 0.5 * row[0].exp()).log())
    assert found.min() > math.log(0.5)


def test_every_set_up_to_a_size_has_its_value(monkeypatch):
    vectors = normal(KEY, (6, 4), torch.float64)
    gram = vectors @ vectors.T
    sets = clear._sets(gram, 4)
    for size, (members, values) in enumerate(sets):
        assert [tuple(row) for row in members.tolist()] == list(itertools.combinations(range(6), size))
        direct = torch.stack([vectors[row].sum(0).square().sum() for row in members])
        torch.testing.assert_close(values, direct)
    assert len(sets) == 5
    monkeypatch.setattr(clear, "_SETS", 1 + 6 + 15)
    assert len(clear._sets(gram, 4)) == 3
    monkeypatch.setattr(clear, "_SETS", 1)
    assert len(clear._sets(gram, 4)) == 2


def test_a_set_s_posterior_is_bayes_over_all_sets():
    gram = torch.diag(torch.tensor([1.0, 1.1, 2.2, 3.0], dtype=torch.float64))
    sets, chance, total, blur = clear._sets(gram, 4), 0.2, 2.15, 0.1
    weights = {
        row: 0.25 ** len(row) * (1 + ((float(sum(gram[i, i] for i in row)) - total) / blur) ** 2) ** -2
        for size in range(5)
        for row in itertools.combinations(range(4), size)
    }
    for i, found in enumerate(clear._posterior(sets, total, blur, chance, 4).tolist()):
        inside = sum(weight for row, weight in weights.items() if i in row)
        odds = inside / (sum(weights.values()) - inside)
        assert found == pytest.approx(math.log(odds / 0.25), rel=1e-9)


def test_unusable_gradients_leave_scores_finite(digits):
    seen = watched(digits, JoPEQ(), clients=2)
    for value in (math.inf, 1e12):
        broken = dataclasses.replace(seen, model=Snapshot(0, torch.full_like(seen.model.params, value), None))
        for attack in ATTACKS:
            assert attack.run(broken, KEY).scores.isfinite().all()
