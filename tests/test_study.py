import math
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakgauge.harness.core.cell import FederationSpec, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.errors import StudyError, UnknownNameError
from leakgauge.harness.study.study import expand, load_study, resolve, shipped

ECHO = "tests.doubles:Echo"


def table(**changes):
    """A small study."""
    base = {
        "name": "t",
        "seeds": [0, 1],
        "tasks": [{"data": "digits", "model": "mlp-small"}],
        "federations": [{"clients": 4, "rounds": 3}],
        "defenses": [{"name": "none"}, {"name": "gaussian", "epsilon": [1.0, 8.0]}],
        "attacks": [{"name": ECHO, "target": {"round": [0, 2]}}],
    }
    return {**base, **changes}


def problems(**changes):
    """What is wrong with a changed study."""
    with pytest.raises(StudyError) as caught:
        resolve(table(**changes), "s.toml")
    return caught.value.problems


def test_the_grid_is_the_product_of_all_lists():
    study = resolve(table())
    assert len(study.cells) == 2 * 3 * 2  # seeds x (none, two gaussians) x rounds
    assert len(study.trainings) == 6
    assert len({cell.id for cell in study.cells}) == 12


def test_defaults_are_filled_in_so_that_writing_one_out_changes_no_name():
    short = resolve(table(defenses=[{"name": "gaussian"}]))
    long = resolve(table(defenses=[{"name": "gaussian", "epsilon": 8.0, "clip": 1.0, "delta": 1e-5}]))
    assert short.hash == long.hash
    integer = resolve(table(defenses=[{"name": "gaussian", "epsilon": 8, "clip": 1}]))
    assert integer.hash == long.hash


def test_a_cell_written_twice_is_asked_once():
    assert len(resolve(table(defenses=[{"name": "none"}, {"name": "none"}])).cells) == 4


def test_everything_wrong_is_said_at_once_with_path_value_and_expectation():
    found = problems(
        seeds=[0, 0],
        tasks=[{"data": "digits", "model": 3}],
        federations=[{"clients": 4, "participants": 5, "rounds": 3}, {"cleints": 4, "rounds": "many"}],
        defenses=[{"name": "gausian"}, {"name": "gaussian", "epsilon": [0.0, "high"]}, {"epsilon": 1.0}],
        attacks=[{"name": ECHO, "target": {"round": 9}}, {"name": ECHO, "color": "red"}],
    )
    text = "\n".join(found)
    for said in (
        "seeds: got [0, 0], expected each seed once",
        "tasks[0].model: got 3, expected: input should be a valid string",
        "federations[0]: expected participants <= clients, got participants=5 and clients=4",
        "federations[1].cleints: unknown key, got 4",
        "federations[1].rounds: got 'many', expected: input should be a valid integer",
        "defenses[0]: no defense 'gausian'; did you mean 'gaussian'? Known: ",
        "defenses[1]: expected epsilon > 0, got epsilon=0.0",
        "defenses[1].epsilon: got 'high', expected: input should be a valid number",
        "defenses[2]: name: missing",
        "attacks[1].color: unknown key, got 'red'",
    ):
        assert said in text, said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tsks": []}, "tsks: unknown key, got []"),
        ({"attacks": []}, "attacks: got [], expected: list should have at least 1 item"),
        ({"seeds": ["a"]}, "seeds.0: got 'a', expected: input should be a valid integer"),
        (
            {"attacks": [{"name": ECHO, "target": {"round": 3}}]},
            "attacks.target.round: looks at round 3, expected less than 3",
        ),
        (
            {"attacks": [{"name": ECHO, "target": {"round": -1}}]},
            "attacks[0].target: expected round >= 0, got round=-1",
        ),
        (
            {"attacks": [{"name": "membership-loss", "target": {"client": 99}}]},
            "attacks[0].target: expected no client and no outside with kind='probe'",
        ),
        (
            {"attacks": [{"name": "membership-loss", "target": {"kind": "members", "client": 99}}]},
            "attacks.target.client: got 99, expected less than",
        ),
        ({"attacks": [{"name": ECHO, "target": {"kind": "members"}}]}, "does not go with a reconstruction attack"),
        ({"audit": -1}, "audit: got -1, expected: input should be greater than or equal to 0"),
        ({"audit": 0.5}, "audit: got 0.5, expected: input should be a valid integer"),
        ({"threats": ["sever"]}, "no threat 'sever'; known: server"),
        ({"threats": ["server+names"]}, "no grant 'names' in 'server+names'; known: labels"),
        ({"defenses": [{"name": "gaussian", "epsilon": math.inf}]}, "expected epsilon > 0, got epsilon=inf"),
    ],
)
def test_each_mistake_has_its_line(changes, said):
    found = problems(**changes)
    assert any(said in line for line in found), found


def test_a_threat_that_does_not_see_what_the_attack_needs_is_refused_with_what_it_sees():
    (line,) = problems(threats=["public"])
    assert line == (
        f"attacks[0]: attack {ECHO!r} needs 'messages', which 'public' does not see; "
        "it sees: auxiliary, candidates, defense, final, setting, task"
    )


def test_side_knowledge_is_granted_by_name_and_becomes_part_of_the_cell():
    wants = [{"name": ECHO, "wants": "messages,labels"}]
    (line,) = problems(attacks=wants)
    assert line.endswith("grant it with threat server+labels")
    study = resolve(table(attacks=wants, threats=["server+labels"]))
    assert {cell.threat for cell in study.cells} == {"server+labels"}


def test_an_attack_may_name_its_own_adversaries():
    study = resolve(table(attacks=[{"name": ECHO, "threat": ["server", "eavesdropper"]}], threats=["public"]))
    assert {cell.threat for cell in study.cells} == {"server", "eavesdropper"}


def test_a_file_is_read_and_named_in_its_errors(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        textwrap.dedent(f"""
        name = "mine"
        tasks = [{{data = "digits", model = "mlp-small"}}]
        federations = [{{clients = 2}}]
        defenses = [{{name = "none"}}]
        attacks = [{{name = "{ECHO}"}}]
        """)
    )
    assert len(load_study(path).cells) == 1
    path.write_text("name = 'x\n")
    with pytest.raises(StudyError, match=r"mine\.toml: is not TOML: "):
        load_study(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(StudyError, match=r"mine\.toml: cannot be read: "):
        load_study(path)


def test_an_unknown_study_names_the_shipped_ones():
    with pytest.raises(UnknownNameError, match="no study 'dem'; did you mean 'demo'"):
        load_study("dem")


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_study_resolves_and_has_a_title(name):
    assert load_study(name).cells
    assert shipped()[name]


@given(
    st.dictionaries(
        st.text("abc", min_size=1),
        st.one_of(st.integers(), st.lists(st.integers(), min_size=1, max_size=3)),
        max_size=4,
    )
)
def test_an_expansion_has_one_value_where_a_list_stood(data):
    found = list(expand(data))
    assert len(found) == math.prod(len(value) for value in data.values() if isinstance(value, list))
    assert all(list(one) == list(data) for one in found)
    assert all(not isinstance(value, list) for one in found for value in one.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": 0}, "expected clients > 0, got clients=0"),
        ({"lr": math.nan}, "expected lr > 0, got lr=nan"),
        ({"momentum": 1.0}, "expected 0 <= momentum < 1"),
        ({"batch": -1}, "expected batch >= 0"),
        ({"local_steps": 2, "local_epochs": 2}, "expected local_steps or local_epochs, got both"),
        ({"algorithm": "fedsgd", "local_epochs": 1}, "with fedsgd"),
        ({"algorithm": "fedsgd", "momentum": 0.9}, "expected momentum=0 with fedsgd"),
        ({"samples": 0}, "expected samples > 0"),
    ],
)
def test_an_impossible_federation_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        FederationSpec(**changes)


def test_an_audit_is_part_of_what_is_asked_and_none_leaves_the_names_as_they_were():
    plain, zero, asked = resolve(table()), resolve(table(audit=0)), resolve(table(audit=30))
    assert plain.hash == zero.hash != asked.hash
    assert {training.audit for training in asked.trainings} == {30}
    assert {training.audit for training in plain.trainings} == {0}
    assert not {t.id for t in plain.trainings} & {t.id for t in asked.trainings}
    assert not {cell.id for cell in plain.cells} & {cell.id for cell in asked.cells}
    assert "audit" not in plain.trainings[0].meaning  # so that results from before there were audits are found
    with pytest.raises(ValueError, match=r"expected audit >= 0 \(0: none\), got audit=-1"):
        TrainingSpec(TaskSpec("digits", "mlp"), FederationSpec(), PartSpec("none"), 0, audit=-1)


def test_a_target_fills_in_its_round():
    assert Target().round == 0
    assert Target(kind="members").round is None
    assert Target(kind="members", round=1, rounds=3).looks_at == range(1, 4)
    assert Target(kind="members", count=5).outside == 5
    with pytest.raises(ValueError, match="count >= 1"):
        Target(count=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "members", "rounds": 2}, "expected a round to start from with rounds"),
        ({"kind": "members", "batch": 2}, "expected no batch and no users with kind='members'"),
        ({"client": 1}, "expected no client and no outside with kind='probe'"),
        ({"kind": "members", "client": -1}, "expected client >= 0, got client=-1"),
        ({"kind": "members", "outside": 0}, "expected outside >= 1, got outside=0"),
        ({"round": -1}, "expected round >= 0, got round=-1"),
    ],
)
def test_an_impossible_target_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        Target(**changes)


def test_a_label_names_what_was_set():
    assert PartSpec("gaussian", {"epsilon": 8.0, "noise_std": None}).label == "gaussian(epsilon=8.0)"
    assert PartSpec("none").label == "none"
