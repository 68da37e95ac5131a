"""Random mask: the message, the server's estimate, and the likelihood."""

import pytest
import torch

from leakgauge import Key, rng
from leakgauge.defenses.random_mask import RandomMask
from leakgauge.harness.core.claim import Verdict, judge
from tests.baselines_case import encode, estimate, score, setting_of

PRIVATE = Key(1).child("private")
UPDATE = rng.normal(Key(3), (200,))


@pytest.mark.parametrize(("d", "share", "count"), [(200, 0.1, 20), (1001, 0.1, 100), (3, 0.1, 1), (17, 1.0, 17)])
def test_a_message_has_64_bits_and_32_for_each_sent_coordinate(d, share, count):
    update = rng.normal(Key(4), (d,))
    wire = encode(RandomMask(share=share), update, PRIVATE)[0]
    assert 8 * len(wire) == 64 + 32 * count
    found = estimate(RandomMask(share=share), wire, d)
    assert int((found != 0).sum()) == count
    assert torch.equal(found[found != 0], update[found != 0])


def test_an_outsider_reads_the_mask_from_the_message_and_every_message_has_its_own():
    wires = [encode(RandomMask(), UPDATE, PRIVATE.child(number))[0] for number in range(2)]
    masks = [estimate(RandomMask(), wire, 200, shared=None) != 0 for wire in wires]
    assert torch.equal(masks[0], estimate(RandomMask(), wires[0], 200) != 0)
    assert not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.table(2)
def test_the_mean_estimate_is_the_update_only_with_rescaling(rescale):
    # alpha 1e-6 over 200 coordinates: 6.0 deviations. A kept coordinate has probability 1/4, so the mean of 500
    # rescaled ones has standard deviation sqrt(3 / 500) = 0.077 of the coordinate; without rescaling it is 0.75 off
    defense, n = RandomMask(share=0.25, rescale=rescale), 500
    mean = sum(estimate(defense, encode(defense, UPDATE, PRIVATE.child(i))[0], 200) for i in range(n)) / n
    error = ((mean - UPDATE) / UPDATE).abs()
    assert (float(error.max()) < 6 * 0.0775) == rescale
    assert (float(error.min()) > 0.5) == (not rescale)


def test_the_server_rescales_and_the_message_stays_the_same():
    plain, scaled = RandomMask(), RandomMask(rescale=True)
    wire, _ = encode(plain, UPDATE)
    assert wire == encode(scaled, UPDATE)[0]
    assert torch.equal(estimate(scaled, wire, 200), 10 * estimate(plain, wire, 200))


@pytest.mark.parametrize("shared", [Key(2), None])
@pytest.mark.parametrize("rescale", [True, False])
def test_the_likelihood_counts_only_the_sent_coordinates(rescale, shared):
    defense = RandomMask(rescale=rescale)
    wire = encode(defense, UPDATE)[0]
    kept = estimate(defense, wire, 200) != 0
    elsewhere, off = torch.where(kept, UPDATE, -7 * UPDATE), UPDATE.clone()
    off[int(kept.nonzero()[0])] += 3e-6
    scores = score(defense, [wire] * 3, 200, torch.stack([UPDATE, elsewhere, off]), shared).tolist()
    assert scores[:2] == [0.0, 0.0]
    # 3 units of rounding; float32 resolves 1e-7 of a number near one
    assert scores[2] == pytest.approx(4.5, rel=0.3)


def test_a_random_mask_promises_nothing():
    assert judge(RandomMask().claim([None], setting_of(200))).verdict is Verdict.NOTHING_PROMISED
