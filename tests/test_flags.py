import torch

from leakgauge.attacks.idlg import IDLG
from leakgauge.attacks.map import MAP
from leakgauge.attacks.prior import Prior
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.cell import Target
from leakgauge.harness.core.contract import Guess, Membership, Reconstruction
from leakgauge.harness.core.result import Estimate, Evaluation, Flag
from leakgauge.harness.core.stats import mean
from leakgauge.harness.federation.observe import Truth
from leakgauge.harness.study.flags import cell_flags, training_flags
from tests.report_fixtures import full_run

MANY, FEW = Target(count=8), Target(count=3, batch=2)
FINE = Guess(torch.zeros(1, 1, 2, 2), torch.zeros(1), 0.1, 5)


def codes(attack, defense, target, failures=(), truth=None, estimates=()):
    guesses = tuple(FINE._replace(failure=failure) for failure in (failures or [""] * target.count))
    return [
        flag.code for flag in cell_flags(attack, defense, target, Reconstruction(guesses), truth or Truth(), estimates)
    ]


def test_an_attack_that_ignores_a_defense_is_naive_and_one_that_uses_it_is_not():
    assert "naive" in codes(IDLG(), Gaussian(), MANY)
    assert "naive" not in codes(MAP(), Gaussian(), MANY)
    assert "naive" not in codes(IDLG(objective="likelihood"), Gaussian(), MANY)
    assert "naive" not in codes(IDLG(), NoDefense(), MANY)
    assert codes(Prior(), Gaussian(), MANY) == []


def test_what_an_attack_believed_about_inputs_is_a_note():
    found = Reconstruction((FINE,) * 8, "normal distribution of 300 auxiliary inputs")
    (flag, *_) = cell_flags(MAP(), NoDefense(), MANY, found, Truth(), ())
    assert flag == Flag(
        "prior", "what the attack believes about inputs: normal distribution of 300 auxiliary inputs", "note"
    )


def test_failed_victims_and_few_images_have_a_warning():
    guesses = tuple(FINE._replace(failure=failure) for failure in ("the gradient is zero", "", "the gradient is zero"))
    (flag, *_) = cell_flags(IDLG(), NoDefense(), MANY, Reconstruction(guesses), Truth(), ())
    assert flag == Flag("failed-victims", "2 of 3 victims failed: the gradient is zero", "warning")
    assert [target for target in (FEW, MANY) if "few-images" in codes(IDLG(), NoDefense(), target)] == [FEW]


def test_fewer_than_four_batches_have_a_warning():
    batches = [Target(count=count, batch=batch) for count, batch in ((3, 4), (4, 4), (1, 1))]
    assert ["few-batches" in codes(IDLG(), NoDefense(), target) for target in batches] == [True, False, False]


def test_non_members_from_the_test_set_are_a_warning_and_idle_samples_a_note():
    members = Target(kind="members")
    found = Membership(torch.zeros(2))
    for note, severity in (("non-members come from the test set: ...", "warning"), ("no client holds", "note")):
        (flag,) = cell_flags(Prior(), NoDefense(), members, found, Truth(note=note), ())
        assert (flag.code, flag.severity) == ("candidates", severity)


def test_a_missing_number_has_its_reason():
    nothing = Estimate("tpr@0.1%", None, None, None, 10, "Clopper-Pearson", note="n/a: too few")
    found = cell_flags(Prior(), NoDefense(), Target(kind="members"), Membership(torch.zeros(2)), Truth(), (nothing,))
    assert [flag.message for flag in found] == ["tpr@0.1%: n/a: too few"]
    there = mean("ssim", [0.1, 0.2])
    assert codes(Prior(), NoDefense(), MANY, estimates=(there,)) == []


def test_a_model_that_learned_nothing_has_a_warning():
    record = next(iter(full_run().trainings.values()))
    for accuracy, wanted in ((0.14, ["no-learning"]), (0.5, []), (None, [])):
        last = Evaluation(9, accuracy, 1.0)
        changed = type(record)(**{**vars(record), "evaluations": (last,)})
        assert [flag.code for flag in training_flags(changed, 10)] == wanted


def test_an_audit_that_could_not_be_made_is_a_note_with_its_reason():
    record = next(iter(full_run().trainings.values()))
    flags = training_flags(record, 10, "no claim here")
    assert flags == (Flag("not-audited", "the audit could not be made: no claim here", "note"),)
