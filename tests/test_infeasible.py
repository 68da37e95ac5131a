"""Studies that ask for more than there is are refused before the first job: all problems at once, a line each."""

import pytest

from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.study.check import check_study
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.command import call

REGRESSION = {"data": "gaussian-regression", "model": "linear-regression"}
TEXT = {"data": "help", "model": "text-gru"}
CRAFTED = {"name": "model-replacement", "threat": "participant+craft"}


def table(task=(), federation=(), defense="gaussian", attack=(), target=(), **top):
    """A study of digits by four clients with 80 of 1,442 records, and 40 of 355 for tests."""
    fed = {"clients": 4, "rounds": 2, "samples": 80, "test_samples": 40, "algorithm": "fedsgd", **dict(federation)}
    return {
        "name": "small",
        "lineup": False,
        "tasks": [{"data": "digits", "model": "mlp-small", **dict(task)}],
        "federations": [{key: value for key, value in fed.items() if value is not None}],
        "defenses": [{"name": defense} if isinstance(defense, str) else defense],
        "attacks": [{"name": "prior", "target": {"count": 2, **dict(target)}, **dict(attack)}],
        **top,
    }


def members(**target):
    return table(attack={"name": "membership-loss", "target": {"kind": "members", "count": 10, **target}})


def goal(name, **asked):
    return {"name": name, "target": asked}


CLIENT = {"unit": "client"}
FEW = "federations.clients: got 4000, expected at most 200: a client has one sample or more"
SHARDS = "federations.shards: got 40 for each of 4 clients, expected at most 80 in all: a shard has one sample or more"
LABELS = "federations.labels: got {} for each of 4 clients, expected at most 10, so that some client has each of the 10"
RECORDS = "attacks.target (prior): expected at most 80 records, got count={} x users={} x batch={}"
TEST = "attacks.target (membership-loss): expected fewer than 40 non-members"
SENT = "attacks.target (prior): expected at most {} messages in round {}, got count={}"


@by_rows(
    (table(federation={"clients": 4000, "samples": 200}), FEW),
    (table(federation={"samples": 5000}), "federations.samples: got 5000, expected at most 1442 training samples"),
    (table(federation={"validation": 1442}), "federations.validation: got 1442, expected less than 1442 training"),
    (table(federation={"validation": 1400}), "federations.samples: got 80, expected at most 42 training samples"),
    (table(federation={"test_samples": 356}), "federations.test_samples: got 356, expected at most 355"),
    (table(federation={"test_samples": 81, "evaluate_on": "train"}), "federations.test_samples: got 81, expected at"),
    (
        table(federation={"partition": "sizes", "sizes": [[700]], "samples": None}),
        "federations.sizes: their sum is 2800, expected at most 1442 training samples",
    ),
    (table(federation={"partition": "shards", "shards": 40}), SHARDS),
    (table(federation={"partition": "labels", "labels": 11}), LABELS.format(11)),
    (table(federation={"partition": "labels", "labels": 2}), LABELS.format(2)),
    (
        table(federation={"partition": "labels", "labels": 9, "clients": 40, "samples": 45}),
        "federations.labels: label 0 has 4 samples, expected one for each of 36 clients",
    ),
    (table(task=REGRESSION, federation={"partition": "dirichlet"}), "federations.partition: got 'dirichlet', which"),
    (table(task={"model": "lenet-dlg", "data": "gaussian-regression"}), "tasks.model: model 'lenet-dlg' expects (chan"),
    (table(task={"model": "text-gru"}), "tasks.model: "),
    pytest.param(
        table(task=TEXT, attack={"name": "map"}),
        "attacks (map): it reads image, series, table, vector, not tokens: ",
        marks=pytest.mark.matrix,
    ),
    (table(threats=["server+auxiliary=photos"]), "auxiliary=photos: expected inputs (1, 8, 8) as in 'digits', got"),
    (table(target={"count": 81}), RECORDS.format(81, 1, 1)),
    (table(target={"count": 4, "batch": 30}), RECORDS.format(4, 1, 30)),
    (table(target={"count": 30, "users": 3}), RECORDS.format(30, 3, 1)),
    (table(defense="ota", target={"users": 5}), "attacks.target (prior): expected users <= 4 participants, got 5"),
    (members(count=81), "attacks.target (membership-loss): expected at most 80 members, got count=81"),
    (members(count=21, client=1), "attacks.target (membership-loss): expected at most 20 members, got count=21"),
    (members(outside=1363), TEST),
    (table(target={"kind": "messages", "count": 5}), SENT.format(4, 0, 5)),
    (table(federation={"participants": 2}, target={"kind": "messages", "count": 3}), SENT.format(2, 0, 3)),
    (table(defense="ota", target={"kind": "messages"}), SENT.format(1, 0, 2)),
    (
        table(federation={"participants": 1}, target={"kind": "messages", "count": 1, "rounds": 2}),
        SENT.format(0, 1, 1),
    ),
    (
        table(federation={"batch": 5}, target={"kind": "messages", "rounds": 2}),
        "attacks.target (prior): expected the same samples behind a client's messages of several rounds: needs batch",
    ),
    (
        table(defense="ota", federation={"participants": 2}),
        "defenses (ota): expected all clients to take part in every",
    ),
    (
        table(defense="dp-sgd", federation={"algorithm": "fedavg", "optimizer": "adam"}),
        "defenses (dp-sgd): expected plain SGD with a defense that adds noise in each step, got optimizer=adam",
    ),
    (table(task={"model": "resnet20-bn", "data": "photos"}, defense="dp-sgd"), "defenses (dp-sgd): model 'resnet20-bn"),
    (table(defense={"name": "udp", "rounds": 1}, target={"round": 1}), "attacks.target (prior): there is no round 1: "),
    (
        table(attack={**CRAFTED, "target": {"kind": "members", "count": 5, "round": 1, "client": 3}}),
        "attacks.target (model-replacement): target.client: got 3, the adversary itself; expected another client",
    ),
    (
        table(task={"model": "linear"}, attack={"name": "imprint", "threat": "malicious-server"}),
        "attacks (imprint): imprint needs a dense first layer with ReLU and a dense layer behind it; linear has no",
    ),
    (
        table(attack={"name": "property", "target": {"property": "hue", "count": 2, "batch": 4}}),
        "attacks.target (property): property: got 'hue', expected one of: brightness",
    ),
    (
        table(task=REGRESSION, defense=goal("gaussian", accuracy_loss=0.1)),
        "target.accuracy_loss: the task has no accuracy",
    ),
    (table(defense=goal("jopeq", proved_epsilon=8.0, **CLIENT)), "defenses.target: jopeq, proved epsilon 8 per client"),
    (table(target={"round": 2}), "attacks.target.round: looks at round 2, expected less than 2"),
    (members(client=4), "attacks.target.client: got 4, expected less than 4"),
    (table(attack={"name": "map", "threat": "participant"}), "attacks[0]: attack 'map' needs 'messages', which 'part"),
)
def test_an_infeasible_study_starts_no_job(study, line, tmp_path):
    heard = []
    with pytest.raises(StudyError) as caught:
        run_study(resolve(study), tmp_path, workers=0, listen=lambda *change: heard.append(change))
    (problem,) = caught.value.problems
    assert line in problem
    assert heard == []
    assert not (tmp_path / "trainings").exists()


BAD = """
name = "bad"
seeds = [0, 1]
tasks = [{data = "digits", model = ["linear", "text-gru"]}]
federations = [{clients = 4, rounds = 2, samples = [80, 5000], test_samples = 400, algorithm = "fedsgd"}]
defenses = [{name = "none"}, {name = "gaussian", epsilon = [1.0, 8.0]}, {name = "top-k"}]
[[attacks]]
name = ["prior", "map"]
target = {count = 81}
[[attacks]]
name = "membership-loss"
target = {kind = "members", count = 81}
"""
"""Five problems in 176 cells."""


def test_show_run_and_a_dry_run_name_all_problems_at_once(tmp_path):
    (tmp_path / "bad.toml").write_text(BAD)
    said = [
        call(*words, tmp_path / "bad.toml", *more)
        for words, more in ((["show"], []), (["show"], ["--json"]), (["run"], ["-o", tmp_path / "out"]))
    ]
    said.append(call("run", tmp_path / "bad.toml", "-o", tmp_path / "out", "--dry-run"))
    assert {done.exit_code for done in said} == {2}
    assert {done.stdout for done in said} == {""}
    (lines,) = {tuple(done.stderr.splitlines()) for done in said}
    keys = [line.removeprefix("leakgauge: bad: ").split(":")[0] for line in lines]
    assert sorted(keys) == sorted(
        ["federations.test_samples", "federations.samples", "tasks.model"]
        + [f"attacks.target ({name})" for name in ("prior", "map", "membership-loss", "lineup")]
    )
    assert max(map(len, lines)) < 250


def test_what_fits_exactly_is_not_refused():
    fits = [
        table(federation={"samples": 1442, "clients": 1442, "test_samples": 355}),
        table(federation={"partition": "shards", "shards": 20}),
        table(target={"count": 80}),
        table(federation={"participants": 2}, target={"kind": "messages", "count": 2}),
        members(count=80, outside=1362),
        members(count=20, client=3),
        table(attacks=[{"name": "prior"}, {"name": "imprint", "threat": "malicious-server", "target": {"round": 1}}]),
    ]
    for study in fits:
        assert list(check_study(resolve(study))) == ["digits"]
