"""Label restoration, its floor and its score."""

import dataclasses

import pytest
import torch

from leakgauge.attacks._engine.labels import apportion
from leakgauge.attacks.label_prior import LabelPrior
from leakgauge.attacks.label_restoration import LabelRestoration
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.core.contract import Examples, ObservedRound
from leakgauge.harness.core.rng import Key
from leakgauge.harness.study.score import score_labels
from tests.by_rows import by_rows
from tests.victims import make, only

KEY = Key(5).child("labels")


@pytest.mark.parametrize("images", [1, 4])
def test_labels_behind_a_bare_gradient_are_found(images):
    case = make(n=6, images=images)
    for found, truth in zip(
        LabelRestoration().run(only(case.seen, LabelRestoration().needs), KEY).labels, case.seen.labels, strict=True
    ):
        assert torch.equal(found.sort().values, truth)


def test_the_evidence_of_several_rounds_is_added_up():
    case = make(n=8)
    wrong = make(n=8, labels=(case.y + 1) % 10).seen
    right = ObservedRound(case.seen.messages, case.seen.model, case.seen.lr)
    seen = dataclasses.replace(wrong, later=(right, right))
    assert torch.equal(torch.cat(LabelRestoration().run(seen, KEY).labels), case.y.flatten())


def test_more_rounds_of_noisy_messages_reveal_more_labels():
    case, *others = (make(n=24, defense=Gaussian(clip=1e3, noise_std=1.5), key=Key(k)) for k in range(9))
    later = tuple(ObservedRound(other.seen.messages, case.seen.model, 0.1) for other in others)
    seen = (dataclasses.replace(case.seen, later=more) for more in ((), later))
    one, many = (torch.stack(LabelRestoration().run(each, KEY).labels) == case.y for each in seen)
    assert one.float().mean() < 0.9
    assert many.float().mean() > one.float().mean()


@by_rows(
    ([0.0, 2.0, 1.0], [1, 1, 2]), ([1.5, 1.5, 0.0], [0, 0, 1]), ([0.9, 0.9, 1.2], [0, 1, 2]), ([0.0, 0.0, 3.0], [2] * 3)
)
def test_counts_become_whole_labels_by_the_largest_remainder(counts, labels):
    assert apportion(torch.tensor(counts), 3).tolist() == labels


def test_the_floor_returns_the_most_frequent_labels_and_reads_no_message():
    case = make(n=2, images=4)
    silent = tuple(message._replace(wire=b"") for message in case.seen.messages)
    seen = dataclasses.replace(case.seen, messages=silent)  # its auxiliary labels: seven 2 and five 1
    assert [found.tolist() for found in LabelPrior().run(seen, KEY).labels] == [[1, 1, 2, 2]] * 2
    assert [found.tolist() for found in LabelPrior().run(make(n=2).seen, KEY).labels] == [[2]] * 2
    nothing = dataclasses.replace(seen, auxiliary=Examples(case.x[:0, 0], case.y[:0, 0]))
    with pytest.raises(ValueError, match="expected at least 1 auxiliary label, got 0"):
        LabelPrior().run(nothing, KEY)


def test_labels_are_scored_whatever_their_order():
    truth = [torch.tensor([1, 1, 2]), torch.tensor([0, 3, 3])]
    accuracy, exact = score_labels(truth, [torch.tensor([2, 1, 1]), torch.tensor([3, 0, 0])])
    assert (accuracy.name, accuracy.value, accuracy.n) == ("label_accuracy", pytest.approx(5 / 6), 6)
    assert (exact.name, exact.value, exact.n) == ("exact", 0.5, 2)
    assert exact.values == (1.0, 0.0)
    assert accuracy.low < 5 / 6 < accuracy.high


@pytest.mark.parametrize("guesses", [[], [torch.tensor([1, 2])], [torch.tensor([1])] * 2])
def test_another_number_of_labels_is_refused(guesses):
    with pytest.raises(ValueError, match=r"expected \[1\] labels of the victims"):
        score_labels([torch.tensor([1])], guesses)
