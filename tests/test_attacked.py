"""What proofs say of an attack's success, and what its success says of a claim: values, simulated coverage, edges."""

import math

import numpy as np
import pytest
import torch

from leakgauge import Layout, Proof, Relation, Unit, claim_over
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.jopeq import JoPEQ
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.audit.attacked import Promised, promised, shown_by_identification, shown_by_membership
from leakgauge.harness.core.contract import Examples, Guess, Membership, Reconstruction, Setting
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.federation.observe import Truth
from leakgauge.harness.study.flags import promise_flags
from leakgauge.harness.study.score import score_promise, score_reconstruction
from tests.by_rows import by_rows

SETTING = Setting(Layout(("w",), ((10,),)), 3, 3, 1, sends="gradient", steps=1, lr=0.1, batch=0, samples=8)
MALICIOUS = Threat.MALICIOUS_SERVER


def promise(epsilon=1.0, delta=0.0, relation=Relation.REPLACE, proved=math.inf):
    return Promised(epsilon, proved, delta, relation, Unit.MESSAGE)


def votes(epsilon, pairs, seed):
    """Scores of a randomized response of this epsilon for each pair, members first."""
    right = np.random.default_rng(seed).random(pairs) < 1 / (1 + math.exp(-epsilon))
    scores = torch.from_numpy(np.concatenate([right, ~right])).float()
    return scores, torch.arange(2 * pairs) < pairs


def test_all_right_of_a_hundred_show_what_the_interval_allows():
    # the share is at least 0.05^(1/16) = 0.829
    assert shown_by_identification(16, 16, 100, 0.0) == pytest.approx(math.log(82.9), abs=0.01)
    assert shown_by_identification(0, 16, 100, 0.0) == 0.0
    assert shown_by_identification(16, 16, 2, 0.0) == pytest.approx(math.log(0.5 / 0.171), abs=0.02)  # the complement


def test_a_delta_is_taken_off():
    without, with_delta = (shown_by_identification(3, 16, 100, at) for at in (0.0, 0.03))
    assert 0 < with_delta < without
    assert shown_by_identification(1, 16, 100, 0.5) == 0.0


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_blind_and_exact_mechanisms_are_refuted_in_one_of_twenty_cases_at_most(epsilon):
    draw = np.random.default_rng(1)
    share = math.exp(epsilon) / 100
    above = [shown_by_identification(int(k), 200, 100, 0.0) > epsilon for k in draw.binomial(200, share, 1000)]
    assert np.mean(above) < 0.065


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_guessed_members_of_randomized_response_refute_its_epsilon_in_one_of_twenty_cases_at_most(epsilon):
    shown = [shown_by_membership(*votes(epsilon, 60, seed), promise(epsilon)) for seed in range(300)]
    assert np.mean(np.array(shown) > epsilon) < 0.08
    assert np.mean(shown) >= epsilon / 3  # and the bound is not empty


def test_sure_guesses_show_a_large_epsilon_and_half_of_it_where_records_are_added():
    scores, members = votes(50.0, 60, 0)
    sure = shown_by_membership(scores, members, promise(1.0))
    assert sure == pytest.approx(2.8, abs=0.1)
    added = shown_by_membership(scores, members, promise(1.0, relation=Relation.ADD_REMOVE))
    assert added == pytest.approx(sure / 2)


def test_a_few_sure_guesses_among_many_blind_ones_count():
    draw = torch.Generator().manual_seed(0)
    scores, members = torch.randn(160, generator=draw), torch.arange(160) < 80
    scores[:30] = 100.0
    assert shown_by_membership(scores, members, promise()) > 1.5
    assert shown_by_membership(torch.zeros(160), members, promise()) == 0.0  # a tie is no right guess


@by_rows(
    (NoDefense(), None, None),
    (JoPEQ(), math.inf, "finite"),  # its claim is of a coordinate, the proof of a message is vast
    (Gaussian(epsilon=1.0), 1.0, "finite"),
    (Laplace(), math.inf, "finite"),
)
def test_only_claims_of_whole_inputs_speak(defense, claimed, proved):
    found = promised(defense.claim([defense.init(SETTING)], SETTING), MALICIOUS, alone=True)
    if claimed is None:
        assert found is None
    else:
        assert found.claimed == claimed
        assert math.isfinite(found.proved) == (proved == "finite")


def test_a_proof_against_others_or_by_sampling_does_not_speak_of_victims_encoded_alone():
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    sampled = Proof(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)), Unit.RECORD, "PLD", "sampled")
    claim = claim_over(1, 1.0, sampled, delta=1e-5, source="")
    assert promised(claim, MALICIOUS, alone=True) is None
    assert promised(claim, MALICIOUS, alone=False).claimed == 1.0
    public = Proof.gaussian(1.0, 1, Unit.RECORD, "", against=frozenset({Threat.PUBLIC}))
    other = claim_over(1, 1.0, public, delta=1e-5, against=frozenset({Threat.PUBLIC}), source="")
    assert promised(other, MALICIOUS, alone=False) is None
    assert promised(other, Threat.PUBLIC, alone=False).claimed == 1.0


def test_the_first_image_of_each_message_counts():
    xs = [torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(k)) for k in range(6)]
    ys = [torch.arange(4)] * 6
    guesses = [Guess(x, y, 0.0, 0) for x, y in zip(xs, ys, strict=True)]
    pool = torch.rand(99, 1, 8, 8, generator=torch.Generator().manual_seed(99))
    candidate_sets = tuple(np.tile(np.arange(99), (4, 1)) for _ in xs)
    truth = Truth(tuple(Examples(x, y) for x, y in zip(xs, ys, strict=True)), pool=pool, candidate_sets=candidate_sets)
    estimates, _ = score_reconstruction(xs, ys, guesses, truth.others())
    (one,) = score_promise(Reconstruction(tuple(guesses)), truth, estimates, promise(proved=2.0))
    assert (one.name, one.n) == ("identification_epsilon", 6)
    assert one.value == pytest.approx(shown_by_identification(6, 6, 100, 0.0))
    codes = [flag.code for flag in promise_flags((one,), promise(proved=2.0))]
    assert codes == ["proof-contradicted", "claim-contradicted"]
    assert [flag.code for flag in promise_flags((one,), promise(epsilon=9.0))] == []


def test_candidates_that_are_not_drawn_alike_show_nothing():
    scores, members = votes(50.0, 60, 0)
    assert score_promise(Membership(scores), Truth(is_member=members), (), promise()) == ()
    (one,) = score_promise(Membership(scores), Truth(is_member=members, alike=True), (), promise())
    assert (one.name, one.n) == ("membership_epsilon", 60)
    assert "claimed 1, proved inf per message" in one.note
