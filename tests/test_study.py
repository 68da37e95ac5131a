import math
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakgauge.harness.core.cell import FederationSpec, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.errors import StudyError, UnknownNameError
from leakgauge.harness.study.study import expand, load_study, resolve, shipped
from tests.by_rows import by_rows
from tests.doubles import study_table

ECHO = "tests.doubles:Echo"


def table(**changes):
    defenses = ["none", {"name": "gaussian", "epsilon": [1.0, 8.0]}]
    attacks = [{"name": ECHO, "target": {"round": [0, 2]}}]
    return study_table({"clients": 4, "rounds": 3}, defenses, attacks, seeds=[0, 1]) | changes


def echo(**target):
    """Changes to an attack on this target."""
    return {"attacks": [{"name": ECHO, "target": target}]}


def problems(**changes):
    with pytest.raises(StudyError) as caught:
        resolve(table(**changes), "s.toml")
    return caught.value.problems


def test_the_grid_is_the_product_of_all_lists():
    study = resolve(table())
    assert len(study.cells) == 2 * 3 * 2  # seeds x (none, two gaussians) x rounds
    assert len(study.trainings) == 6
    assert len({cell.id for cell in study.cells}) == 12


def test_an_explicit_default_changes_no_id():
    written = ({}, {"epsilon": 8.0, "clip": 1.0, "delta": 1e-5}, {"epsilon": 8, "clip": 1})
    assert len({resolve(table(defenses=[{"name": "gaussian", **one}])).hash for one in written}) == 1


def test_a_duplicate_cell_is_dropped():
    assert len(resolve(table(defenses=[{"name": "none"}, {"name": "none"}])).cells) == 4


def test_all_problems_are_reported_together_with_path_value_and_expectation():
    found = problems(
        seeds=[0, 0],
        tasks=[{"data": "digits", "model": 3}],
        federations=[{"clients": 4, "participants": 5, "rounds": 3}, {"cleints": 4, "rounds": "many"}],
        defenses=[{"name": "gausian"}, {"name": "gaussian", "epsilon": [0.0, "high"]}, {"epsilon": 1.0}],
        attacks=[{"name": ECHO, "target": {"round": 9}}, {"name": ECHO, "color": "red"}],
    )
    text = "\n".join(found)
    for line in (
        "seeds: got [0, 0], expected each seed once",
        "tasks[0].model: got 3, expected a string",
        "federations[0]: expected participants <= clients, got participants=5 and clients=4",
        "federations[1].cleints: unknown key, got 4",
        "federations[1].rounds: got 'many', expected an integer",
        "defenses[0]: no defense 'gausian'; did you mean 'gaussian'? Known: ",
        "defenses[1]: expected epsilon > 0, got epsilon=0.0",
        "defenses[1].epsilon: got 'high', expected a number",
        "defenses[2]: name: missing",
        "attacks[1].color: unknown key, got 'red'",
    ):
        assert line in text, line


@by_rows(
    ({"tsks": []}, "tsks: unknown key; did you mean 'tasks'?"),
    ({"nonsense": 1}, "nonsense: unknown key, got 1. Known: name, title, seeds, threats, audit, limit, lineup, tasks"),
    ({"federations": [{"Clients": 4}]}, "federations[0].Clients: unknown key, got 4; did you mean 'clients'? Known: "),
    ({"defenses": [{"name": "Gaussian"}]}, "defenses[0]: no defense 'Gaussian'; did you mean 'gaussian'? Known: "),
    ({"attacks": []}, "attacks: got [], expected a list of at least 1 item"),
    ({"seeds": ["a"]}, "seeds.0: got 'a', expected an integer"),
    ({"attack_seeds": [1, 2]}, "attack_seeds: got [2], expected seeds among [0, 1]"),
    ({"attack_seeds": []}, "attack_seeds: got [], expected a list of at least 1 item"),
    (echo(kind="messages", victim_classes="3"), "attacks[0].target: expected no victim_classes with kind='messages'"),
    (echo(victim_classes=3), "attacks[0].target.victim_classes: got 3, expected a list"),
    (echo(round=3), "attacks.target.round: looks at round 3, expected less than 3"),
    (echo(round=-1), "attacks[0].target: expected round >= 0, got round=-1"),
    (echo(round="first"), "attacks[0].target.round: got 'first', expected an integer"),
    (echo(kind="members"), "expected probe or messages for a reconstruction attack"),
    ({"attacks": [{"name": "membership-loss", "target": {"kind": "probe"}}]}, "expected members for a membership"),
    ({"attacks": [{"name": "membership-loss", "target": {"kind": "members", "client": 4}}]}, "client: got 4, exp"),
    ({"attacks": [{"name": "fedmia", "target": {"kind": "members"}}]}, "target.round: missing; attack 'fedmia'"),
    ({"defenses": [{"name": 3}]}, "defenses[0]: name: got 3, expected a string"),
    ({"audit": -1}, "audit: got -1, expected greater than or equal to 0"),
    ({"audit": 0.5}, "audit: got 0.5, expected an integer"),
    ({"threats": ["sever"]}, "no threat 'sever'; known: server"),
    ({"threats": ["server+names"]}, "no grant 'names' in 'server+names'; known: broadcast, craft, labels"),
    ({"defenses": [{"name": "gaussian", "epsilon": math.inf}]}, "epsilon: got inf, expected a finite number"),
)
def test_each_problem_has_its_line(changes, message):
    found = problems(**changes)
    assert any(message in line for line in found), found


def test_wrong_outermost_keys_hide_no_problem_inside():
    found = problems(audit=-1, seeds="one", tsks=[], defenses=[{"name": "gaussian", "epsilon": "eight"}])
    assert [line.split(":")[0] for line in found] == ["seeds", "audit", "tsks", "defenses[0].epsilon"]
    incomplete = {key: value for key, value in table().items() if key not in ("name", "tasks")}
    with pytest.raises(StudyError) as error:
        resolve(incomplete | {"attacks": [{"name": "mapp"}]})
    assert [line.split(":")[0] for line in error.value.problems] == ["name", "tasks", "attacks[0]"]


@pytest.mark.parametrize("value", ["yes", -1, 0.5])
def test_a_wrong_lineup_is_one_line(value):
    assert problems(lineup=value) == [f"lineup: got {value!r}, expected true, false or a number of victims"]


def test_a_threat_must_see_what_the_attack_needs():
    (line,) = problems(threats=["public"])
    assert line == (
        f"attacks[0]: attack {ECHO!r} needs 'messages', which 'public' does not see; "
        "it sees: auxiliary, candidates, defense, final, setting, task"
    )


def test_granted_side_knowledge_and_an_attacks_own_threats_are_part_of_the_cell():
    wants = {"name": ECHO, "wants": "messages,labels"}
    (line,) = problems(attacks=[wants])
    assert line.endswith("grant it with threat server+labels")
    (line,) = problems(attacks=[{"name": "trap-weights"}])
    assert line.endswith("grant it with threat malicious-server")
    own = {"name": ECHO, "threat": ["server", "eavesdropper"]}
    study = resolve(table(attacks=[wants, own], threats=["server+labels"]))
    assert {cell.threat for cell in study.cells} == {"server+labels", "server", "eavesdropper"}


def test_a_file_is_read_and_named_in_its_errors(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(resources.files("leakgauge.studies").joinpath("demo.toml").read_text())
    assert load_study(path) == load_study("demo")
    for content, message in ((b"name = 'x\n", "is not TOML"), (b"\xff\xfe", "cannot be read")):
        path.write_bytes(content)
        with pytest.raises(StudyError, match=rf"mine\.toml: {message}: "):
            load_study(path)


def test_an_unknown_study_names_the_shipped_ones():
    with pytest.raises(UnknownNameError, match="no study 'dem'; did you mean 'demo'"):
        load_study("dem")


def test_every_shipped_study_resolves_and_has_a_title():
    for name, title in shipped().items():
        assert load_study(name).cells
        assert title


@given(
    st.dictionaries(
        st.text("abc", min_size=1),
        st.one_of(st.integers(), st.lists(st.integers(), min_size=1, max_size=3)),
        max_size=4,
    )
)
def test_an_expansion_has_one_value_for_each_list(data):
    found = list(expand(data))
    assert len(found) == math.prod(len(value) for value in data.values() if isinstance(value, list))
    assert all(list(one) == list(data) for one in found)
    assert all(not isinstance(value, list) for one in found for value in one.values())


def test_a_cell_without_a_limit_has_another_id_and_the_default_keeps_ids():
    plain, with_limit, without = resolve(table()), resolve(table(limit=True)), resolve(table(limit=False))
    assert plain.hash == with_limit.hash != without.hash
    assert {cell.limit for cell in without.cells} == {False}
    assert {training.id for training in without.trainings} == {training.id for training in plain.trainings}


def test_an_audit_is_part_of_the_id_and_no_audit_leaves_ids_unchanged():
    plain, zero, audited = resolve(table()), resolve(table(audit=0)), resolve(table(audit=30))
    assert plain.hash == zero.hash != audited.hash
    assert {training.audit for training in audited.trainings} == {30}
    assert {training.audit for training in plain.trainings} == {0}
    assert not {t.id for t in plain.trainings} & {t.id for t in audited.trainings}
    assert not {cell.id for cell in plain.cells} & {cell.id for cell in audited.cells}
    with pytest.raises(ValueError, match=r"expected audit >= 0 \(0: none\), got audit=-1"):
        TrainingSpec(TaskSpec("digits", "mlp"), FederationSpec(), PartSpec("none"), 0, audit=-1)


def test_accuracy_may_come_from_more_seeds_than_attacks():
    def made(**seeds):
        return resolve(table(audit=30, lineup=True, **seeds))

    alone, study = made(seeds=[1]), made(seeds=[0, 1, 2], attack_seeds=[1])
    assert [cell.id for cell in study.cells[: len(alone.cells)]] == [cell.id for cell in alone.cells]
    blind = study.cells[len(alone.cells) :]
    assert [cell.training.seed for cell in blind] == [0, 2] * 3  # three defenses
    assert {(cell.attack.name, cell.target.count, cell.threat, cell.limit) for cell in blind} == {
        ("prior", 1, "server", False)
    }
    assert {cell.training.audit for cell in blind} == {0}
    assert made(seeds=[0, 1], attack_seeds=[1, 0]).hash == made(seeds=[0, 1]).hash


def test_a_list_of_classes_is_swept_and_a_list_of_lists_takes_several():
    def of(classes):
        cells = resolve(
            table(defenses=[{"name": "none"}], seeds=[0], lineup=True, **echo(victim_classes=classes))
        ).cells
        return [(cell.attack.name, cell.target.count, cell.target.victim_classes) for cell in cells]

    assert of("3") == of(["3"]) == of([["3"]]) == [(ECHO, 8, ("3",)), ("lineup", 8, ("3",)), ("lineup", 200, ("3",))]
    assert [one[2] for one in of(["3", "5"]) if one[0] == ECHO] == [("3",), ("5",)]
    assert {one[2] for one in of([["3", "5"]])} == {("3", "5")}
    assert of([[]]) == [(*one[:2], ()) for one in of("3")]


def test_a_target_fills_in_its_round():
    assert Target().round == 0
    assert Target(kind="members").round is None
    assert Target(kind="members", round=1, rounds=3).looks_at == range(1, 4)
    assert Target(kind="members", count=5).outside == 5


@by_rows(
    (FederationSpec, {"clients": 0}, "expected clients > 0, got clients=0"),
    (FederationSpec, {"lr": math.nan}, "expected lr > 0, got lr=nan"),
    (FederationSpec, {"momentum": 1.0}, "expected 0 <= momentum < 1"),
    (FederationSpec, {"batch": -1}, "expected batch >= 0"),
    (FederationSpec, {"interim_samples": -1}, "expected interim_samples >= 0, got interim_samples=-1"),
    (FederationSpec, {"local_steps": 2, "local_epochs": 2}, "expected local_steps or local_epochs, got both"),
    (FederationSpec, {"algorithm": "fedsgd", "local_epochs": 1}, "with fedsgd"),
    (FederationSpec, {"algorithm": "fedsgd", "momentum": 0.9}, "expected momentum=0 with fedsgd"),
    (FederationSpec, {"samples": 0}, "expected samples > 0"),
    (FederationSpec, {"sizes": (4,)}, r"expected sizes >= 1 with partition sizes, and none otherwise, got \[4\]"),
    (FederationSpec, {"partition": "sizes"}, "expected sizes >= 1 with partition sizes"),
    (FederationSpec, {"partition": "sizes", "sizes": (4, 0)}, "expected sizes >= 1 with partition sizes"),
    (FederationSpec, {"partition": "sizes", "sizes": (4,), "samples": 8}, "expected no samples beside sizes"),
    (FederationSpec, {"evaluate_on": "validation"}, "validation > 0 with evaluate_on=validation, got validation=0"),
    (FederationSpec, {"validation": -1}, "expected validation >= 0, got validation=-1"),
    *((Target, wrong, "expected") for wrong in ({"rounds": 0}, {"users": 0}, {"kind": "messages", "users": 2})),
    (Target, {"count": 0}, "count >= 1"),
    (Target, {"kind": "members", "rounds": 2}, "expected `round`, the first round, with rounds=2, got none"),
    (Target, {"kind": "members", "batch": 2}, "expected no batch and no users with kind='members'"),
    (Target, {"client": 1}, "expected no client and no outside with kind='probe'"),
    (Target, {"kind": "members", "client": -1}, "expected client >= 0, got client=-1"),
    (Target, {"kind": "members", "outside": 0}, "expected outside >= 1, got outside=0"),
    (Target, {"round": -1}, "expected round >= 0, got round=-1"),
)
def test_an_impossible_federation_or_target_is_refused(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        kind(**changes)


def test_a_label_has_the_parameters_that_are_set():
    assert PartSpec("gaussian", {"epsilon": 8.0, "noise_std": None}).key == "gaussian(epsilon=8.0)"
    assert PartSpec("none").key == "none"


def excluding(*patterns, **changes):
    """The ids of the cells of a study of three defenses and three attacked rounds by two adversaries."""
    base = table(
        attacks=[{"name": ECHO, "target": {"round": [0, 1, 2]}}, {"name": "prior"}], threats=["server", "server+labels"]
    )
    return [cell.id for cell in resolve({**base, **changes, "exclude": list(patterns)}).cells]


@by_rows(
    ({"defense": "none"}, 16),
    ({"defense": ["none", "gaussian"], "attack": "prior"}, 12),
    ({"defense": {"name": "gaussian", "epsilon": 8}, "target": {"round": [1, 2]}, "threat": "server+labels"}, 4),
    ({"task": {"model": ["linear", "mlp-small"]}, "attack": ECHO, "data": "digits", "target": {"round": 2}}, 12),
)
def test_excluded_combinations_are_no_cells_and_the_others_keep_their_ids(pattern, number):
    every = excluding()
    left = excluding(pattern)
    assert len(every) == 48
    assert len(left) == 48 - number
    assert left == [one for one in every if one in left]


def test_an_exclusion_that_matches_nothing_or_everything_is_refused():
    for pattern in (
        {"defense": "gausian"},
        {"attack": "prior", "target": {"round": 1}},
        {"defence": "none"},
        {"target": {"rond": 1}},
        {},
        {"threat": []},
    ):
        with pytest.raises(StudyError, match=r"exclude\[1\]: .* matches no cell; expected values of the study"):
            excluding({"defense": "none"}, pattern)
    with pytest.raises(StudyError, match="exclude: matches every cell"):
        excluding({"defense": "none"}, {"defense": "gaussian"})
    assert "exclude: got 1, expected a list" in problems(exclude=1)
