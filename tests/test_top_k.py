"""Gradient pruning: the sent coordinates and the residual."""

import numpy as np
import pytest
import torch

from leakgauge import Key, MessageError, pack_float32, pack_levels, rng
from leakgauge.defenses.top_k import TopK
from leakgauge.harness.core.claim import Verdict, judge
from tests.baselines_case import encode, estimate, score, setting_of
from tests.by_rows import by_rows


@by_rows(
    (1000, 0.01, 10 * 4 + 13),  # 10 numbers of 10 bits
    (1000, 0.2, 200 * 4 + 125),  # a bitmap
    (1000, 1.0, 4125),
    (1024, 1e-6, 4 + 2),
    (1, 0.3, 4),  # one coordinate: its position needs no bit
    (17, 0.1, 2 * 4 + 2),
)
def test_a_pruned_message_has_the_stated_size_and_carries_the_largest_exactly(d, fraction, size):
    defense, update = TopK(fraction=fraction), rng.normal(Key(8), (d,))
    wire, memory = encode(defense, update)
    assert memory is None
    assert len(wire) == size
    found = estimate(defense, wire, d)
    kept = found != 0
    assert int(kept.sum()) == defense.count(d)
    assert torch.equal(found[kept], update[kept])
    assert float(update[~kept].abs().max() if d > int(kept.sum()) else 0.0) <= float(update[kept].abs().min())


def test_pruning_sends_the_first_of_equal_magnitudes():
    wire, _ = encode(TopK(fraction=0.5), torch.tensor([1.0, -2.0, 1.0, -1.0, 2.0, 1.0]))
    assert estimate(TopK(fraction=0.5), wire, 6).tolist() == [1.0, -2.0, 0.0, 0.0, 2.0, 0.0]


def test_pruning_sends_a_zero_update_as_zeros_in_a_message_of_the_same_length():
    zero, some = (encode(TopK(), update)[0] for update in (torch.zeros(1000), rng.normal(Key(8), (1000,))))
    assert len(zero) == len(some)
    assert torch.equal(estimate(TopK(), zero, 1000), torch.zeros(1000))


def test_with_feedback_the_sent_values_and_the_residual_sum_to_all_updates():
    d, defense = 500, TopK(fraction=0.05, feedback=True)
    memory, sent, total = defense.remember(setting_of(d)), torch.zeros(d), torch.zeros(d)
    for number in range(5):
        update = rng.normal(Key(9).child(number), (d,))
        before = memory.clone()
        wire, after = encode(defense, update, memory=memory)
        assert torch.equal(memory, before)
        memory, total, sent = after, total + update, sent + estimate(defense, wire, d)
    # a float32 sum of five numbers below 8
    assert torch.allclose(sent + memory, total, atol=1e-5)
    assert not torch.allclose(sent, total, atol=1.0)
    assert TopK().remember(setting_of(d)) is None


def test_the_likelihood_of_pruning_bounds_the_dropped_coordinates():
    d, defense = 100, TopK(fraction=0.1)
    update = rng.normal(Key(10), (d,))
    wire = encode(defense, update)[0]
    found = estimate(defense, wire, d)
    smallest = float(found[found != 0].abs().min())
    beyond, off, flipped = update.clone(), update.clone(), torch.where(found == 0, -update, update)
    dropped, kept = int((found == 0).nonzero()[0]), int(found.nonzero()[0])
    beyond[dropped] = smallest + 3e-6
    off[kept] += 3e-6
    scores = score(defense, [wire] * 4, d, torch.stack([update, flipped, beyond, off])).tolist()
    assert scores[:2] == [0.0, 0.0]
    # 3 units of rounding; float32 resolves 1e-7 of a number near one
    assert scores[2:] == pytest.approx([4.5, 4.5], rel=0.3)


@by_rows(([3, 3], "2 increasing positions below 100"), ([4, 3], "increasing"), ([3, 100], "positions below 100"))
def test_pruned_positions_that_repeat_or_lie_beyond_the_end_are_refused(positions, message):
    wire = pack_levels(np.array(positions), 7) + pack_float32(torch.ones(2))
    with pytest.raises(MessageError, match=message):
        estimate(TopK(fraction=0.02), wire, 100)


def test_a_pruned_bitmap_with_another_number_of_positions_is_refused():
    bitmap = np.zeros(100, np.int64)
    bitmap[:49] = 1
    with pytest.raises(MessageError, match="expected 50 positions, got 49"):
        estimate(TopK(fraction=0.5), pack_levels(bitmap, 1) + pack_float32(torch.ones(50)), 100)


def test_pruning_promises_nothing():
    assert judge(TopK().claim([None], setting_of(10))).verdict is Verdict.NOTHING_PROMISED
