"""A participant that replaces the model: what it finds, what stops it, and where it may act."""

import dataclasses
import math

import pytest
import torch

from leakgauge.attacks.model_replacement import ModelReplacement
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import View
from leakgauge.harness.data import default_root
from leakgauge.harness.federation.observe import observe
from leakgauge.harness.study.jobs import RunContext
from leakgauge.harness.study.prepare import StoredTraining
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.doubles import study_table

FEDERATION = {"clients": 10, "rounds": 2, "samples": 300, "test_samples": 200, "batch": 0, "local_steps": 2, "lr": 0.05}
TARGET = {"kind": "members", "round": 1, "count": 16, "outside": 32}
CRAFT = View.parse("participant+craft")


def study(defenses=("none",), federation=(), target=(), seed=0, **options):
    one = {"name": "model-replacement", "threat": "participant+craft", "target": TARGET | dict(target), **options}
    return resolve(study_table(FEDERATION | dict(federation), defenses, [one], limit=False, seeds=[seed]))


def rates(tmp_path, *defenses, **changes):
    run = run_study(study(defenses, **changes), tmp_path, workers=0)
    assert not run.failures
    return {one.cell.training.defense.name: {e.name: e for e in one.estimates} for one in run.results.values()}


@by_rows(({}, 0.8), ({"algorithm": "fedsgd", "local_steps": None}, 0.8), ({"local_steps": 4, "batch": 10}, 0.7))
def test_members_are_found_without_seeing_a_message(federation, least, tmp_path):
    found = rates(tmp_path, "none", federation=federation)["none"]
    assert found["auc"].value > least
    assert found["auc"].n == 48


def test_a_participant_who_is_not_drawn_changes_nothing(tmp_path):
    made = study(federation={"participants": 1}, seed=1)
    run = run_study(made, tmp_path, workers=0)
    honest = resolve(
        study_table(made.trainings[0].federation.__dict__, ["none"], [{"name": "prior"}], limit=False, seeds=[1])
    )
    (record,), (other,) = run.trainings.values(), run_study(honest, tmp_path / "honest", workers=0).trainings.values()
    assert record.evaluations == other.evaluations
    assert record.digest == other.digest


def test_a_clip_keeps_the_model_where_it_was(tmp_path):
    found = rates(tmp_path, "dp-fedavg", {"name": "gaussian", "epsilon": 8.0})
    for estimates in found.values():
        assert estimates["auc"].low < 0.5
        assert "membership_epsilon" in estimates


def test_the_adversary_knows_its_own_records_so_no_candidate_is_among_them(tmp_path):
    made = study(target={"count": 270})
    run_study(made, tmp_path, workers=0)
    (cell,) = made.cells
    federation = StoredTraining.of(cell.training, RunContext(tmp_path, default_root())).federation
    seen, truth = observe(federation, CRAFT, cell.target)
    own = federation.rows(federation.clients[9]).x.flatten(1)
    members = seen.candidates.x[truth.is_member].flatten(1)
    assert len(members) == 270
    assert not (members[:, None] == own).all(2).any()
    assert truth.sources[truth.is_member].unique().tolist() == [*range(9)]
    assert seen.messages is None


def test_the_adversary_does_not_attack_itself(tmp_path):
    with pytest.raises(StudyError, match=r"target\.client: got 9, the adversary itself; expected another client"):
        run_study(study(target={"client": 9}), tmp_path, workers=0)


def test_a_claim_of_several_units_is_compared_by_the_least_proof(tmp_path):
    """Two proofs without a finite bound have no order but their epsilon."""
    found = rates(tmp_path, "cepam-clip")["cepam-clip"]
    assert math.isfinite(found["auc"].value)


@by_rows(
    ({"target": {**TARGET, "round": 0}}, "expected at least 1"),
    ({"target": {"kind": "members"}}, "target.round: missing"),
    ({"threat": "participant"}, "grant it with threat participant+craft"),
    ({"threat": "participant+craft+auxiliary=mnist"}, "fitted to data of one kind"),
)
def test_a_study_names_who_may_act_and_where(changes, says):
    one = {"name": "model-replacement", "threat": "participant+craft", "target": TARGET, **changes}
    with pytest.raises(StudyError) as caught:
        resolve(study_table(FEDERATION, ["none"], [one]))
    assert says in " ".join(caught.value.problems)


def test_the_model_after_the_attacked_round_must_be_known(tmp_path):
    made = study(federation={"rounds": 3})
    run = run_study(made, tmp_path / "one", workers=0)
    (failure,) = run.failures.values()
    assert failure.message.startswith("expected the model after round 1, which was not kept: give target.rounds >= 2")
    two = study(federation={"rounds": 3}, target={"rounds": 2})
    (result,) = run_study(two, tmp_path / "two", workers=0).results.values()
    assert {one.name: one for one in result.estimates}["auc"].value > 0.8


def test_the_score_reads_nothing_but_models_and_draws_nothing(tmp_path):
    made = study()
    run_study(made, tmp_path, workers=0)
    (cell,) = made.cells
    federation = StoredTraining.of(cell.training, RunContext(tmp_path, default_root())).federation
    seen, _ = observe(federation, CRAFT, cell.target)
    found = ModelReplacement().run(seen, Key(1)).scores
    bare = dataclasses.replace(seen, setting=seen.setting, others=None, suspect=3)
    torch.testing.assert_close(ModelReplacement().run(bare, Key(2)).scores, found)
    still = dataclasses.replace(seen, final=seen.model.params)  # nobody trained
    assert ModelReplacement().run(still, Key(1)).scores.std() < 0.1 * found.std()
