"""Goals of defenses: a proved epsilon or a loss of accuracy, solved for the free parameter."""

import dataclasses
import json
from statistics import median

import pytest

from leakgauge.harness.core.contract import claim_of
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.data import default_root
from leakgauge.harness.federation.small import Federation
from leakgauge.harness.study.goal import TOLERANCE, goal_of, solve
from leakgauge.harness.study.prepare import prepare
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.store import Store
from leakgauge.harness.study.study import resolve
from leakgauge.reports.html import render
from tests.by_rows import by_rows
from tests.doubles import study_table

FEDERATION = {"clients": 20, "rounds": 10, "algorithm": "fedsgd", "batch": 0, "lr": 3.0, "evaluate_every": 10}
ATTACK = {"name": "prior", "target": {"kind": "probe", "round": 0, "count": 2}}


def study(*defenses, federation=FEDERATION, seeds=(0,)):
    return resolve(study_table(federation, defenses, [ATTACK], model="linear", seeds=list(seeds)))


def solved(name, federation=FEDERATION, **goal):
    """(the value of the solved parameters, or None; the sentence on it)."""
    cells, (note,) = solve(
        study({"name": name, "target": goal}, federation=federation).cells, default_root(), lambda specs: {}
    )
    return (cells[0].training.defense.parameters if cells else None), note


def reached(note):
    """The proved epsilon in a sentence."""
    return float(note.split(" has ")[1].split(" per ")[0].split(";")[0])


BY_MESSAGE = [
    "gaussian",
    "laplace",
    "jopeq-sound",
    "piecewise",
    "ppr",
    "privunit",
    "vqsgd",
    "laplace+sdq",
    "gaussian+sdq",
]
BY_CLIENT = ["udp", "udp-crd", "udp-lei", "ota", "ota-orthogonal", "skellam", "distributed-gaussian"]


@by_rows(*((name, "client", 8.0, "run") for name in BY_MESSAGE + BY_CLIENT), ("gaussian", "message", 0.7, "round"),
     ("dp-sgd", "record", 2.0, "run"), ("mvu", "coordinate", 1.0, "run"), ("rqm", "coordinate", 1.0, "run"),
     ("jopeq", "coordinate", 3.0, "round"),
     ("vqsgd", "message", 3000.0, "run"), ("laplace+sdq", "coordinate", 2.0, "round"))  # fmt: skip
def test_a_proved_epsilon_is_reached_within_one_percent(name, unit, epsilon, horizon):
    parameters, note = solved(name, proved_epsilon=epsilon, unit=unit, horizon=horizon)
    assert epsilon * (1 - TOLERANCE) <= reached(note) <= epsilon, note
    assert "target" not in parameters
    # a message's guarantee covers a client's, and the sentence says so
    assert (", which covers a client" in note) == (unit == "client" and name in BY_MESSAGE)


@pytest.mark.parametrize("name", ["jopeq", "jopeq-t", "cepam-gaussian", "cepam-clip", "cepam-laplace", "t-noise"])
def test_what_nothing_is_proved_for_is_out_of_reach(name):
    parameters, note = solved(name, proved_epsilon=8.0, unit="client")
    assert parameters is None
    assert "out of reach; the proved epsilon is infinite at every " in note


def test_what_moves_in_steps_stays_below():
    parameters, note = solved("sqsgd", proved_epsilon=50.0, unit="message")
    assert parameters["epsilon"] > 0
    assert reached(note) < 50 * (1 - TOLERANCE)
    assert "the nearest below" in note
    assert solved("mvu", proved_epsilon=8.0, unit="message")[0] is None


def test_more_noise_for_another_delta_adversary_and_horizon():
    def epsilon(**changes):
        return solved("ota", **{"proved_epsilon": 2.0, "unit": "client"} | changes)[0]["epsilon"]

    assert epsilon(horizon="round") > epsilon() > epsilon(delta=1e-9)
    assert epsilon() > epsilon(adversary="eavesdropper")


@by_rows(
    ({"name": "gaussian", "target": {}}, "expected proved_epsilon, accuracy_loss or clip, and only one"),
    ({"name": "gaussian", "target": {"proved_epsilon": 8.0}}, "unit: missing"),
    ({"name": "gaussian", "target": {"proved_epsilon": -1.0, "unit": "client"}}, "expected proved_epsilon > 0"),
    ({"name": "gaussian", "target": {"accuracy_loss": 2.0}}, "expected 0 < accuracy_loss < 1, got 2.0"),
    ({"name": "gaussian", "target": {"accuracy_loss": 0.1, "unti": "client"}}, "target.unti: unknown key"),
    ({"name": "none", "target": {"accuracy_loss": 0.1}}, "target: none has no parameter to solve for"),
    ({"name": "cepam-gaussian", "target": {"clip": "median"}}, "target: cepam-gaussian has no parameter to solve for"),
    ({"name": "dp-sgd", "target": {"clip": "median"}}, "target.clip: dp-sgd clips records' gradients"),
    ({"name": "gaussian", "target": {"clip": "mean"}}, "target.clip: got 'mean', expected 'median'"),
    ({"name": "gaussian", "target": {"accuracy_loss": 0.1, "parameter": "clap"}}, "it has clip, epsilon, delta"),
)
def test_a_wrong_goal_is_a_line_of_the_study(defense, problem):
    with pytest.raises(StudyError) as found:
        study(defense)
    assert problem in str(found.value)


def test_seeds_without_attacks_belong_to_the_same_search():
    asked = {"name": "gaussian", "target": {"proved_epsilon": 8.0, "unit": "message"}}
    table = study_table(FEDERATION, [asked], [ATTACK], model="linear", seeds=[0, 1], attack_seeds=[1], audit=5)
    cells, notes = solve(resolve(table).cells, default_root(), lambda specs: {})
    assert (len(cells), len(notes), len({cell.training.defense.key for cell in cells})) == (2, 1, 1)


def test_each_goal_of_a_sweep_is_solved():
    cells = study({"name": "gaussian", "target": {"proved_epsilon": [1.0, 8.0], "unit": "message"}}).cells
    assert [goal_of(cell.training.defense).proved_epsilon for cell in cells] == [1.0, 8.0]
    found, notes = solve(cells, default_root(), lambda specs: {})
    first, second = (cell.training.defense.parameters["epsilon"] for cell in found)
    assert 0 < first < second
    assert len(notes) == 2


def test_a_clip_at_the_median_norm_is_that_of_undefended_trainings_and_leaves_the_rest_as_it_is(tmp_path):
    goal = {"clip": "median"}
    asked = study(
        {"name": "gaussian", "target": goal, "epsilon": 3.0},
        {"name": "udp", "target": goal, "clips": "update"},
        federation={**FEDERATION, "rounds": 3, "lr": 0.5},
        seeds=(0, 1),
    )
    run = run_study(asked, tmp_path, workers=0)
    stored = [json.loads(path.read_text("utf-8")) for path in tmp_path.glob("trainings/*/record.json")]
    plain = [one for one in stored if one["spec"]["defense"]["name"] == "none"]
    norms = [norm for one in plain for norm in one["state_metrics"]["update_norm"]]
    assert len(norms) == 6
    chosen = [one.spec.defense.parameters for one in run.trainings.values()]
    assert len(chosen) == 4
    assert {one["clip"] for one in chosen} == {float(f"{median(norms):.6g}")}
    assert {one["epsilon"] for one in chosen if "calibration" not in one} == {3.0}
    assert all("this choice is not private" in note for note in run.study["goals"])


@pytest.mark.matrix
def test_a_loss_of_accuracy_is_found_by_trainings_that_the_study_uses_again(tmp_path):
    asked = study(
        {"name": "none"},
        {"name": "gaussian", "target": {"accuracy_loss": 0.15}},
        {"name": "sqsgd", "target": {"accuracy_loss": 0.15}},
        {"name": "gaussian", "clip": 1.0, "target": {"proved_epsilon": 3.0, "unit": "message", "horizon": "round"}},
    )
    seen = []
    run = run_study(asked, tmp_path, workers=0, listen=lambda progress, outcome: seen.append(outcome))
    trials = [one.job.training for one in seen if one is not None and one.job.kind == "trial"]
    trained = [one.job.training for one in seen if one is not None and one.job.kind == "training"]
    assert len(run.results) == len(run.cells) == 3
    names = {record.spec.defense.name for record in run.trainings.values()}
    assert names == {"none", "gaussian"}
    # only the goal of an epsilon needed a training after the search
    assert [spec.defense.parameters["epsilon"] for spec in trained] == [pytest.approx(3.0, rel=TOLERANCE)]
    plain = next(r.accuracy for r in run.trainings.values() if r.spec.defense.name == "none")
    chosen = next(r for r in run.trainings.values() if r.spec in trials and r.spec.defense.name == "gaussian")
    loss = plain - chosen.accuracy
    by_name = {note.split(",")[0]: note for note in run.study["goals"] if "accuracy loss" in note}
    assert f"loses {loss:.3f} +- " in by_name["gaussian"]
    width = float(by_name["gaussian"].split("+- ")[1])
    assert abs(loss - 0.15) <= width < 0.1
    assert "out of reach, the search found no epsilon that loses less" in by_name["sqsgd"]
    page = render(run)
    assert "Goals of this study" in page
    assert "out of reach, the search found no epsilon that loses less" in page
    again = []
    run_study(asked, tmp_path, workers=0, listen=lambda progress, outcome: again.append(outcome))
    assert [one for one in again if one is not None] == []
    assert len(list((tmp_path / "trainings").iterdir())) == len({spec.id for spec in trials}) + 1


@pytest.mark.slow
def test_defenses_lose_what_was_asked(tmp_path):
    names = ["laplace+sdq", "cepam-clip", "cepam-laplace", "ota-orthogonal", "udp-lei"]
    federation = {"clients": 40, "rounds": 30, "algorithm": "fedsgd", "batch": 0, "lr": 3.0, "evaluate_every": 30}
    goals = [{"name": name, "target": {"accuracy_loss": 0.05}} for name in names]
    run = run_study(study(*goals, federation=federation, seeds=(0, 1)), tmp_path)
    assert len(run.study["goals"]) == len(names)
    for note in run.study["goals"]:
        loss, width = map(float, note.split(" loses ")[1].split(" +- "))
        assert abs(loss - 0.05) <= width < 0.05, note


def test_a_search_that_cannot_train_ends_with_a_line(tmp_path):
    federation = FEDERATION | {"local_steps": 3, "algorithm": "fedavg"}
    asked = study({"name": "ota", "target": {"accuracy_loss": 0.1}}, federation=federation)
    broken = dataclasses.replace(asked.cells[0].training.task, model="no-such")
    cells = tuple(
        dataclasses.replace(cell, training=dataclasses.replace(cell.training, task=broken)) for cell in asked.cells
    )
    with pytest.raises(StudyError, match="no-such"):
        run_study(dataclasses.replace(asked, cells=cells), tmp_path, workers=0)
    assert Store(tmp_path).folder == tmp_path


@pytest.mark.parametrize(("name", "other"), [("skellam", "aggregator"), ("ota", "public")])
def test_a_participant_knows_its_own_noise(name, other):
    goal = {"proved_epsilon": 2.0, "unit": "client"}
    own, all_ = (solved(name, adversary=adversary, **goal)[0] for adversary in ("participant", other))
    assert own["epsilon"] < all_["epsilon"]


def test_a_record_is_not_covered_by_a_client_that_is_there_or_not():
    asked = {"proved_epsilon": 2.0, "unit": "record", "adversary": "participant"}
    for name in ("dp-fedavg", "skellam"):
        parameters, note = solved(name, **asked)
        assert parameters is None
        assert "infinite" in note
    assert solved("gaussian", proved_epsilon=2.0, unit="record")[0] is not None  # any two messages


def test_any_two_inputs_are_not_covered_by_a_client_that_is_there_or_not():
    asked = {"proved_epsilon": 2.0, "unit": "client", "adversary": "participant"}
    assert solved("dp-fedavg", **asked)[0] is not None
    assert solved("dp-fedavg", relation="any-two-inputs", **asked)[0] is None
    both = [solved("gaussian", relation=one, proved_epsilon=2.0, unit="client")[0] for one in (None, "any-two-inputs")]
    assert both[0] == both[1]


def test_noise_in_local_steps_counts_that_batches_are_secret():
    federation = {"clients": 10, "rounds": 30, "algorithm": "fedavg", "local_steps": 1, "batch": 4, "lr": 0.1}
    for adversary in ("server", "participant"):
        (cell,), _ = solve(
            study(
                {"name": "dp-sgd", "target": {"proved_epsilon": 2.0, "unit": "record", "adversary": adversary}},
                federation=federation,
            ).cells,
            default_root(),
            lambda specs: {},
        )
        ready = prepare(cell.training, default_root())
        claim = claim_of(ready.defense, Federation.of(ready.defense, ready.setting).history, ready.setting)
        assert claim.proved.epsilon(claim.delta) == pytest.approx(2.0, rel=TOLERANCE)
        (known,) = claim.further  # of an adversary that knows the batches
        assert known.epsilon(claim.delta) > 4


def test_nothing_in_reach_is_an_error(tmp_path):
    asked = study({"name": "jopeq", "target": {"proved_epsilon": 8.0, "unit": "client"}})
    with pytest.raises(StudyError, match="out of reach; the proved epsilon is infinite"):
        run_study(asked, tmp_path, workers=0)


@pytest.mark.parametrize("name", ["dp-fedavg", "dp-ftrl"])
@pytest.mark.parametrize("taking", [{}, {"participation": "turns", "participants": 5}])
def test_an_adversary_that_sees_models_only_has_other_proofs(name, taking):
    taking = FEDERATION | taking
    parameters, note = solved(name, taking, proved_epsilon=4.0, unit="client", adversary="participant")
    assert reached(note) == pytest.approx(4.0, rel=TOLERANCE)
    assert solved(name, taking, proved_epsilon=4.0, unit="client")[0] is None
    assert parameters["clip"] == 1.0
