"""Random mask: what is sent, what the server makes of it, and what an attacker does."""

import dataclasses

import pytest
import torch

from leakgauge.defenses.random_mask import RandomMask
from leakgauge.harness.core import rng
from leakgauge.harness.core.claim import Verdict, judge
from leakgauge.harness.core.contract import (
    Link,
    Links,
    Sender,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout

PRIVATE, SHARED = Key(1).child("private"), Key(2).child("shared")
SENDER = Sender(0, 8)
SETTING = Setting(
    Layout(("w",), ((200,),)),
    clients=4,
    participants=4,
    rounds=3,
    sends="gradient",
    steps=1,
    lr=0.1,
    batch=8,
    samples=8,
)
UPDATE = rng.normal(Key(3), (200,))


def encode(defense, update, private=PRIVATE):
    setting = setting_of(len(update))
    return defense.encode(None, None, update, Link(setting, SENDER, SHARED), private)[0]


def estimate(defense, wire, d, shared=SHARED):
    return defense.estimate(None, wire, Link(setting_of(d), SENDER, shared))


def score(defense, wires, candidates, shared):
    setting, senders = setting_of(candidates.shape[-1]), [SENDER] * len(wires)
    return defense.likelihood(None, wires, Links(setting, senders, shared))(candidates)


def setting_of(d):
    return dataclasses.replace(SETTING, layout=Layout(("w",), ((d,),)))


@pytest.mark.parametrize(("d", "share", "count"), [(200, 0.1, 20), (1001, 0.1, 100), (3, 0.1, 1), (17, 1.0, 17)])
def test_a_message_is_64_bits_and_32_for_each_coordinate_that_is_sent(d, share, count):
    update = rng.normal(Key(4), (d,))
    wire = encode(RandomMask(share=share), update)
    assert 8 * len(wire) == 64 + 32 * count
    found = estimate(RandomMask(share=share), wire, d)
    assert int((found != 0).sum()) == count
    assert torch.equal(found[found != 0], update[found != 0])


def test_an_outsider_reads_the_mask_off_the_message_and_every_message_has_its_own():
    wires = [encode(RandomMask(), UPDATE, PRIVATE.child(number)) for number in range(2)]
    masks = [estimate(RandomMask(), wire, 200, shared=None) != 0 for wire in wires]
    assert torch.equal(masks[0], estimate(RandomMask(), wires[0], 200) != 0)
    assert not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize("rescale", [True, False])
def test_only_with_rescaling_the_mean_estimate_is_the_update(rescale):
    # alpha 1e-6 over 200 coordinates: 6.0 deviations. A kept coordinate has probability 1/4, so the mean of 4000
    # rescaled ones has standard deviation sqrt(3 / 4000) = 0.027 of the coordinate; without rescaling it is 0.75 off
    defense, n = RandomMask(share=0.25, rescale=rescale), 4000
    mean = sum(estimate(defense, encode(defense, UPDATE, PRIVATE.child(i)), 200) for i in range(n)) / n
    error = ((mean - UPDATE) / UPDATE).abs()
    assert (float(error.max()) < 6 * 0.0274) == rescale
    assert (float(error.min()) > 0.5) == (not rescale)


def test_the_server_rescales_so_that_the_message_is_the_same():
    plain, scaled = RandomMask(), RandomMask(rescale=True)
    wire = encode(plain, UPDATE)
    assert wire == encode(scaled, UPDATE)
    assert torch.equal(estimate(scaled, wire, 200), 10 * estimate(plain, wire, 200))


@pytest.mark.parametrize("shared", [[SHARED] * 3, None])
@pytest.mark.parametrize("rescale", [True, False])
def test_the_likelihood_counts_what_was_sent_and_nothing_else(rescale, shared):
    defense = RandomMask(rescale=rescale)
    wire = encode(defense, UPDATE)
    kept = estimate(defense, wire, 200) != 0
    elsewhere, off = torch.where(kept, UPDATE, -7 * UPDATE), UPDATE.clone()
    off[int(kept.nonzero()[0])] += 3e-6
    scores = score(defense, [wire] * 3, torch.stack([UPDATE, elsewhere, off]), shared).tolist()
    assert scores[:2] == [0.0, 0.0]
    # 3 units of rounding; float32 resolves 1e-7 of a number near one
    assert scores[2] == pytest.approx(4.5, rel=0.3)


def test_a_random_mask_promises_nothing():
    assert judge(RandomMask().claim([None], SETTING)).verdict is Verdict.NOTHING_PROMISED


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_out_of_range_is_named(share):
    with pytest.raises(ValueError, match=rf"expected 0 < share <= 1, got share={share}"):
        RandomMask(share=share)
