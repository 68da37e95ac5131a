"""The likelihoods of defenses that perturb, quantize or drop at the client: distributions, slopes, best candidates."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from leakgauge import Key, Link, Links, Sender, pack_float32, pack_levels, rng
from leakgauge.defenses._privquant import choose
from leakgauge.defenses.dp_fedavg import DPFedAvg
from leakgauge.defenses.dp_ftrl import DPFTRL
from leakgauge.defenses.dp_sgd import DPSGD
from leakgauge.defenses.mvu import MVU
from leakgauge.defenses.ota_orthogonal import OTAOrthogonal
from leakgauge.defenses.piecewise import Piecewise
from leakgauge.defenses.ppr import PPR
from leakgauge.defenses.privunit import PrivUnit
from leakgauge.defenses.random_mask import RandomMask
from leakgauge.defenses.rqm import RQM
from leakgauge.defenses.sqsgd import SqSGD
from leakgauge.defenses.top_k import TopK
from leakgauge.defenses.udp import UDP
from leakgauge.defenses.udp_crd import UDPCRD
from leakgauge.defenses.udp_lei import UDPLei
from leakgauge.defenses.vqsgd import VQSGD
from tests.baselines_case import SENDERS, setting_of
from tests.oracles import coordinate_product

D, N = 256, 60
SETTING = setting_of(D, sends="gradient")
UPDATE = rng.normal(Key(1), (D,)) / D**0.5  # of norm 1

DEFENSES = {
    "random-mask": RandomMask(share=0.5),
    "top-k": TopK(fraction=0.25),
    "dp-fedavg": DPFedAvg(clip=0.5),
    "dp-ftrl": DPFTRL(clip=0.5),
    "dp-sgd": DPSGD(clip=2.0, noise_std=0.1),
    "udp": UDP(clip=2.0, epsilon=50.0),
    "udp-crd": UDPCRD(clip=2.0, epsilon=50.0),
    "udp-lei": UDPLei(clip=2.0, epsilon=50.0),
    "ota-orthogonal": OTAOrthogonal(clip=2.0, epsilon=30.0),
    "mvu": MVU(clip=0.2, epsilon=4.0, bits=2),
    "piecewise": Piecewise(clip=0.2, epsilon=320.0),
    "rqm": RQM(clip=0.2, epsilon=4.0, levels=6),
    "ppr": PPR(clip=1.0, epsilon=32.0, form="ball"),
    "privunit": PrivUnit(clip=1.0, epsilon=60.0, form="ball"),
    "vqsgd": VQSGD(clip=2.0, epsilon=20.0),
    "sqsgd": SqSGD(clip=1.0, epsilon=200.0, bits=3, ratio=0.5),
    "sqsgd as the identity": SqSGD(clip=1.0, epsilon=3000.0, bits=10, ratio=0.5),
}
every_distribution = pytest.mark.parametrize("name", DEFENSES)


def wires_of(defense, update, keys, setting):
    """One message a key; the noise of DP-SGD is added here, as in training."""
    state = defense.init(setting)
    sent = []
    for key in keys:
        noisy = update
        if isinstance(defense, DPSGD):
            noisy = update + defense.noise_std * defense.clip / 8 * rng.normal(key.child("step"), update.shape)
        link = Link(setting, SENDERS[0], key.child("shared"))
        wire, _ = defense.encode(state, defense.remember(setting), noisy, link, key.child("private"))
        sent += defense.transmit(state, [wire], Links(setting, SENDERS[:1], None), key.child("channel"))
    return sent


def distribution_of(defense, wires, keys, setting, senders=None):
    shared = None if keys is None else [key.child("shared") for key in keys]
    who = SENDERS[:1] * len(wires) if senders is None else senders
    return defense.likelihood(defense.init(setting), wires, Links(setting, who, shared))


@every_distribution
def test_over_many_messages_the_truth_scores_better_than_other_candidates(name):
    # paired over 60 messages; the mean difference exceeds 6 standard errors, a false pass of an equal pair is under
    # 1e-8. No candidate is a longer multiple of the truth: a defense that clips cannot distinguish it
    defense, keys = DEFENSES[name], [Key(2).child(i) for i in range(N)]
    score = distribution_of(defense, wires_of(defense, UPDATE, keys, SETTING), keys, SETTING)
    true = score(UPDATE.expand(N, -1))
    turned = rng.normal(Key(3), (D,)) / D**0.5
    wrong = {"other": turned, "shrunk": 0.3 * UPDATE, "turned": 0.6 * UPDATE + 0.8 * turned, "opposite": -UPDATE}
    for what, candidate in wrong.items():
        worse = (score(candidate.expand(N, -1)) - true).double()
        assert float(worse.mean()) > 6 * float(worse.std()) / N**0.5, what


@every_distribution
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_score_is_not_negative_has_the_updates_type_and_finite_slopes_at_any_distance(name, dtype):
    defense, keys = DEFENSES[name], [Key(4).child(i) for i in range(6)]
    wires = wires_of(defense, UPDATE, keys, SETTING)
    candidates = torch.stack([UPDATE, torch.zeros(D), 1e-30 * UPDATE, 1e3 * UPDATE, -1e6 * UPDATE, torch.ones(D)])
    for known in (keys, None):
        z = candidates.to(dtype).requires_grad_()
        value = distribution_of(defense, wires, known, SETTING)(z)
        (slope,) = torch.autograd.grad(value.sum(), z)
        assert value.dtype == dtype
        assert value.shape == (6,)
        assert (value >= 0).all()
        assert torch.isfinite(value).all()
        assert torch.isfinite(slope).all()


@every_distribution
def test_messages_are_scored_separately(name):
    defense, keys = DEFENSES[name], [Key(5).child(i) for i in range(3)]
    wires, candidates = wires_of(defense, UPDATE, keys, SETTING), rng.normal(Key(6), (3, D)) / D**0.5
    together = distribution_of(defense, wires, keys, SETTING)(candidates)
    alone = [
        distribution_of(defense, wires[i : i + 1], keys[i : i + 1], SETTING)(candidates[i : i + 1]) for i in range(3)
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-4)


def test_the_chances_of_all_pairs_of_vqsgds_points_sum_to_one():
    setting, d = setting_of(3), 3
    defense = VQSGD(clip=1.0, epsilon=2.0, repeats=2)
    wires = [pack_levels(np.array(pair), 3) for pair in itertools.product(range(2 * d), repeat=2)]
    for scale in (0.0, 0.4, 5.0):
        chances = (-distribution_of(defense, wires, None, setting)(scale * UPDATE[:d].double().expand(36, -1))).exp()
        assert float(chances.sum()) == pytest.approx(1.0, abs=1e-9)


def test_the_chances_of_all_pairs_of_mvus_columns_sum_to_one():
    setting, defense = setting_of(2), MVU(clip=0.5, epsilon=4.0, bits=2)
    wires = [pack_levels(np.array(pair), 2) for pair in itertools.product(range(4), repeat=2)]
    for value in (0.0, 0.11, -3.0):
        update = torch.tensor([value, 0.3], dtype=torch.float64)
        chances = (-distribution_of(defense, wires, None, setting)(update.expand(16, -1))).exp()
        assert float(chances.sum()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("epsilon", [2.5, 10.0])
def test_the_blurred_density_of_piecewise_has_the_same_mass_for_every_input(epsilon):
    # up to a constant; the blur puts mass beyond the largest output, most at the ends: a third for inputs at the clip
    distribution = Piecewise(epsilon=epsilon).output_distribution(1)

    def mass(t):
        y = torch.linspace(-distribution.bound, distribution.bound, 20_001, dtype=torch.float64)
        return float(integrate.simpson((-distribution.misfit(y, torch.tensor(t, dtype=torch.float64))).exp(), x=y))

    middle = mass(0.0)
    assert [mass(t) for t in (0.3, -0.6)] == pytest.approx([middle] * 2, rel=0.02)


def test_pruning_of_an_update_with_fewer_than_k_entries_reveals_that_the_rest_is_zero():
    defense, update = TopK(fraction=0.25), torch.zeros(D)
    update[:10] = 1.0
    score = distribution_of(defense, wires_of(defense, update, [Key(7)], SETTING), [Key(7)], SETTING)
    beside = update.clone()
    beside[D - 1] = 3e-6
    assert float(score(update[None])) == 0.0
    assert float(score(beside[None])) == pytest.approx(4.5, rel=1e-3)


def test_equal_magnitudes_that_pruning_did_not_send_cost_nothing():
    defense, update = TopK(fraction=0.25), torch.ones(D)
    score = distribution_of(defense, wires_of(defense, update, [Key(8)], SETTING), [Key(8)], SETTING)
    assert float(score(update[None])) == 0.0
    assert float(score(torch.where(torch.arange(D) < D // 4, 1.0, -0.5)[None])) == 0.0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("sends", ["gradient", "update"])
def test_dp_sgd_is_normal_with_the_variance_of_noise_repeated_by_momentum(sends, momentum):
    defense = DPSGD(clip=2.0, noise_std=0.5)
    steps = 1 if sends == "gradient" else 5
    setting = setting_of(3, sends=sends, steps=steps, momentum=momentum, batch=4)
    # the recursion of local training on the noise alone, one basis vector a step
    velocity, moved = np.zeros(steps), np.zeros(steps)
    for number in range(steps):
        velocity = momentum * velocity + np.eye(steps)[number]
        moved = moved + velocity
    weights = np.array([1.0]) if sends == "gradient" else 0.1 * moved
    senders = [Sender(0, 40), Sender(1, 2)]
    sent = 0.01 * rng.normal(Key(9), (2, 3))
    score = distribution_of(defense, [pack_float32(row) for row in sent], None, setting, senders)
    one, other = (0.01 * rng.normal(Key(10).child(i), (2, 3), torch.float64) for i in range(2))
    for row, size in enumerate((4, 2)):
        distribution = stats.norm(scale=np.linalg.norm(weights) * 0.5 * 2.0 / size)
        expected = distribution.logpdf(sent[row] - one[row]).sum() - distribution.logpdf(sent[row] - other[row]).sum()
        assert float(score(other)[row] - score(one)[row]) == pytest.approx(expected, rel=1e-5)


def test_dp_sgd_does_not_clip_a_step_that_drew_more_records_than_its_share():
    # 12 of 40 records were drawn, 4 on average: their sum over 4 has a norm of 3 clips
    defense, setting = DPSGD(clip=2.0, noise_std=0.5), setting_of(D, sends="gradient", batch=4)
    sum_of_clipped = 3 * 2.0 * UPDATE / UPDATE.norm()
    score = distribution_of(defense, [pack_float32(sum_of_clipped)], None, setting, [Sender(0, 40)])
    assert float(score(sum_of_clipped[None])) == pytest.approx(0.0, abs=1e-6)
    beyond = 11 * 2.0 * UPDATE / UPDATE.norm()  # 40 records cannot reach this
    assert float(score(beyond[None])) == pytest.approx(float(score(10 / 11 * beyond[None])), rel=1e-5)


@pytest.mark.parametrize("defense", [Piecewise(clip=0.2, epsilon=320.0), SqSGD(clip=1.0, epsilon=600.0, ratio=0.5)])
def test_without_the_shared_key_the_distribution_is_wider(defense):
    # the mean cost of reversing the update: smaller without the key, which selects the sent coordinates
    keys = [Key(11).child(i) for i in range(N)]
    wires = wires_of(defense, UPDATE, keys, SETTING)
    costs = []
    for known in (keys, None):
        score = distribution_of(defense, wires, known, SETTING)
        costs.append(float((score(-UPDATE.expand(N, -1)) - score(UPDATE.expand(N, -1))).mean()))
    assert costs[0] > 1.0
    assert abs(costs[1]) < 0.1 * costs[0]
    assert math.isfinite(costs[1])


def test_sqsgds_distribution_is_exact_near_the_received_levels_and_continued_where_it_has_no_slope():
    for channel in (choose(64, 16, 100.0), choose(64, 16, 2000.0)):
        middle = torch.full((1, 64), 8, dtype=torch.int64)
        level = 2.0 / 15
        near = (0.5 + 0.89 * rng.uniform(Key(12), (1, 64), -1.0, 1.0, torch.float64)) * level
        exact, ours = (coordinate_product(channel, middle, near, 1.0), channel.misfit(middle, near, 1.0))
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)
        far = torch.full((1, 64), 0.5 * level + 2 * level, dtype=torch.float64, requires_grad=True)
        scores = coordinate_product(channel, middle, far, 1.0), channel.misfit(middle, far, 1.0)
        flat, sloped = (torch.autograd.grad(score.sum(), far)[0] for score in scores)
        assert float(flat.abs().max()) == 0.0
        assert (sloped > 0).all()
        assert float(channel.misfit(middle, far.detach(), 1.0)) > float(ours)
