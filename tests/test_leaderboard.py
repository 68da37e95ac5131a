"""The leaderboard: tuning, ranks, tracks, and the page."""

import itertools
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from leakgauge.harness.cli.leaderboard import _keep
from leakgauge.harness.cli.main import app
from leakgauge.harness.core.cell import FederationSpec, Size
from leakgauge.harness.core.errors import StudyError, UnknownNameError
from leakgauge.harness.study import leaderboard, standings, training, tuning
from leakgauge.harness.study.board import Board, Stage, board, boards, submitted
from leakgauge.harness.study.leaderboard import as_json, run_board
from leakgauge.harness.study.prepare import load_data
from leakgauge.harness.study.standings import joined
from leakgauge.harness.study.study import expand, resolve
from leakgauge.harness.study.tuning import Line, Trial
from leakgauge.reports import leaderboard as pages

BOARD = """
title = "A small board"
epsilons = [2.0, 8.0]
seeds = 3
stages = [{rounds = 0.5, settings = 4}, {rounds = 1.0, settings = 2, seeds = 2}]

[[tasks]]
name = "digits, 40 clients"
data = "digits"
model = "linear"
federation = {clients = 40, samples = 400, validation = 100, test_samples = 100}

[[tracks]]
name = "undefended"
title = "Without a defense"
adversary = "server"
federation = {algorithm = "fedsgd", batch = 0, schedule = "linear"}
grid = {rounds = [10], step = [1.0, 3.0]}

[[tracks]]
name = "model"
title = "Who sees only models"
adversary = "participant"
relation = "add-remove"
federation = {algorithm = "fedsgd", batch = 0, schedule = "linear"}
grid = {rounds = [4, 8], clip = [0.1], step = [0.1, 1.0], server_momentum = [0.0, 0.9]}

[[tracks]]
name = "messages"
title = "The server sees all messages, and each client sends one"
adversary = "server"
federation = {algorithm = "fedsgd", batch = 0, participation = "turns"}
grid = {rounds = [4, 8], clip = [0.1], step = [0.1, 1.0]}

[[entries]]
name = "no defense"
defense = {name = "none"}
tracks = ["undefended"]
epsilons = []

[[entries]]
name = "the server adds noise"
defense = {name = "dp-fedavg"}
tracks = ["model", "messages"]

[[entries]]
name = "clients add noise"
defense = {name = "gaussian"}
tracks = ["model", "messages"]

[[attacks]]
name = "lineup"
threat = "server+lineup"
target = {count = 30, among = 20}

[scale.quick]
seeds = 2
"""


@pytest.mark.parametrize(
    ("clients", "batch", "records", "members"), [(20, 0, 5, 5), (1, 0, 5, 12), (20, 10, 5, 5), (100, 0, 1, 1)]
)
def test_targets_fit_a_small_federation(clients, batch, records, members):
    federation, data = FederationSpec(clients=clients, samples=100, batch=batch), load_data("faces", Path())
    everybody = range(clients)
    whole = replace(federation, batch=1, local_epochs=5), replace(federation, batch=1, local_steps=2)
    sizes = [leaderboard._target({}, one, data, everybody)["batch"] for one in whole]
    assert sizes == [min(100 // clients, 60), min(100 // clients, 2)]
    lineup = leaderboard._target({"count": 20, "among": 20}, federation, data, everybody)
    assert lineup == {"batch": records, "count": 20, "among": 20}
    asked = {"kind": "members", "client": 3, "count": 12, "outside": 200}
    found = leaderboard._target(asked, federation, data, everybody)
    assert found == {"kind": "members", "client": min(3, clients - 1), "count": members, "outside": 40}
    for senders, client in (([2, 5], 2), ([4, 5], 4), ([3], 3)):
        assert leaderboard._target(asked, federation, data, senders)["client"] == client


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("board") / "small.toml"
    path.write_text(BOARD)
    return str(path)


def ran(made: Board, out: Path, **options) -> list[dict]:
    return run_board(made, out, out, workers=0, listen=lambda name: lambda *_: None, **options)


@pytest.fixture(scope="module")
def done(source, tmp_path_factory) -> tuple[Board, Path, list[dict]]:
    made, out = board(source, Size.QUICK), tmp_path_factory.mktemp("out")
    return made, out, ran(made, out)


def at(lines: list[dict], track: str, entry: str, epsilon: float | None) -> dict:
    (found,) = [one for one in lines if (one["track"], one["entry"], one["epsilon"]) == (track, entry, epsilon)]
    return found


def test_every_entry_is_on_the_board_once_a_track_and_epsilon_with_one_delta(done):
    _, _, lines = done
    assert len(lines) == 1 + 2 * 2 * 2
    assert {line["delta"] for line in lines} == {float(f"{40**-1.1:.6g}")}


def test_an_entry_whose_proof_excludes_the_adversary_is_not_in_the_track(done):
    line = at(done[2], "messages", "the server adds noise", 8.0)
    assert not line["accuracy"]
    assert "out of reach" in line["note"]
    assert "rank" not in line


def test_the_noise_gives_the_epsilon_of_the_track_against_its_adversary(done):
    for line in done[2]:
        if line["accuracy"] and line["epsilon"] is not None:
            proved = line["proved"][line["adversary"]]
            assert 0.98 * line["epsilon"] <= proved <= line["epsilon"]
    assert at(done[2], "model", "the server adds noise", 8.0)["proved"]["server"] == "inf"


def test_a_client_that_speaks_once_spends_the_epsilon_of_the_run_on_its_message(done):
    line = at(done[2], "messages", "clients add noise", 8.0)
    assert float(line["settings"].partition("epsilon=")[2].partition(",")[0]) == pytest.approx(8.0, rel=0.01)


def test_noise_of_clients_counts_in_full_where_only_models_are_seen(done):
    line = at(done[2], "model", "clients add noise", 8.0)
    assert float(line["settings"].partition("epsilon=")[2].partition(",")[0]) > 16  # of a message that is seen alone


def test_tuning_keeps_the_best_on_validation_records_and_tests_it_with_other_seeds(done):
    made, out, lines = done
    for line in lines:
        if line["accuracy"]:
            chosen, *others = line["trials"]
            assert chosen["kept"]
            assert len(chosen["scores"][-1]) == 2
            assert len(line["accuracy"]) == made.seeds
            finalists = [other for other in others if len(other["scores"]) == 2]
            assert all(sum(chosen["scores"][-1]) >= sum(other["scores"][-1]) for other in finalists)
    stored = [json.loads(path.read_bytes())["spec"] for path in (out / "runs").glob("trainings/*/record.json")]
    tuned = [spec for spec in stored if spec["seed"] >= tuning.TUNING]
    final = [spec for spec in stored if spec["seed"] < tuning.TUNING]
    assert tuned
    assert {spec["federation"].get("evaluate_on") for spec in tuned} == {"validation"}
    assert final
    assert {spec["federation"].get("evaluate_on", "test") for spec in final} == {"test"}


def test_an_early_stage_keeps_settings_with_each_number_of_rounds(done):
    for line in done[2]:
        if line["track"] == "model":
            left = [trial for trial in line["trials"] if len(trial["scores"]) > 1]
            assert {trial["setting"]["rounds"] for trial in left} == {4, 8}


def test_a_second_run_gives_the_same_bytes_and_trains_nothing(done, monkeypatch, tmp_path):
    made, out, lines = done
    monkeypatch.setattr("leakgauge.harness.study.training.train", None)
    assert as_json(made, Size.QUICK, ran(made, out)) == as_json(made, Size.QUICK, lines)


def test_an_interrupted_board_continues_with_the_same_bytes(done, source, tmp_path, monkeypatch):
    made, _, lines = done
    calls = []

    train = training.train

    def some(*args, **options):
        calls.append(1)
        if len(calls) == 15:
            raise KeyboardInterrupt
        return train(*args, **options)

    monkeypatch.setattr(training, "train", some)
    with pytest.raises(BaseException):  # noqa: B017 - Interrupted, or Ctrl-C itself
        ran(made, tmp_path)
    assert as_json(made, Size.QUICK, ran(made, tmp_path)) == as_json(made, Size.QUICK, lines)


def test_the_lineup_is_of_the_adversary_of_the_track_or_of_its_own_where_only_models_are_seen(done):
    for line in done[2]:
        people = [one for one in line.get("found", ()) if one["among"] >= 20]
        assert [one["adversary"] for one in people] == ["server"] * bool(line["accuracy"])
    known = at(done[2], "model", "the server adds noise", 8.0)
    assert pages._state(known, "server") == "half"
    assert "by the server, which is trusted here" in pages.leaderboard(json.loads(as_json(*done[:1], "quick", done[2])))
    (found,) = [one for one in at(done[2], "undefended", "no defense", None)["found"] if one["among"] == 20]
    assert found["value"] > 0.6
    assert found["n"] == 30


def test_entries_that_differ_less_than_the_tie_or_not_surely_share_a_rank():
    line = {"task": "t", "track": "x", "epsilon": 1.0}
    levels = {"best": 0.9, "near": 0.896, "noisy": 0.8, "worst": 0.7}
    wobble = {"noisy": [0.3, -0.3, 0.25, -0.2, 0.0]}
    tables = [
        {**line, "entry": name, "accuracy": [level + one for one in wobble.get(name, [0.001, 0.0, -0.001, 0.0, 0.0])]}
        for name, level in levels.items()
    ]
    standings.rank(tables)
    assert {one["entry"]: one["rank"] for one in tables} == {"best": 1, "near": 1, "noisy": 1, "worst": 4}
    # ranks follow the accuracies, and none splits what is closer than the tie
    spread = {"a": [0.163, 0.063, 0.113], "b": [0.112, 0.1121, 0.1119], "c": [0.11, 0.1101, 0.1099], "d": [0.02] * 3}
    tables = [{**line, "entry": name, "accuracy": accuracy} for name, accuracy in spread.items()]
    standings.rank(tables)
    assert {one["entry"]: one["rank"] for one in tables} == {"a": 1, "b": 1, "c": 1, "d": 4}


def test_equal_entries_have_two_ranks_in_five_percent_of_boards_or_less():
    line, split = {"task": "t", "track": "x", "epsilon": 1.0}, 0
    for accuracies in np.random.default_rng(0).normal(0.5, 0.05, (1000, 2, 5)):
        tables = [{**line, "entry": str(k), "accuracy": row.tolist()} for k, row in enumerate(accuracies)]
        standings.rank(tables)
        split += {one["rank"] for one in tables} != {1}
    assert split <= 73  # of 1,000 at 5 %: more have a probability of 1e-3


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("settings = 4}", "settings = 0}", "stages.0.settings: got 0, expected"),
        ("seeds = 3", "seeds = 0", "seeds: got 0, expected"),
        ("rounds = 0.5", "rounds = 0.0", "stages.0.rounds: got 0.0, expected"),
        ("step = [1.0, 3.0]", "step = []", "undefended: grid: expected a list of one value or more for 'step'"),
    ],
)
def test_an_impossible_board_is_refused(before, after, said, tmp_path):
    assert before in BOARD
    (tmp_path / "bad.toml").write_text(BOARD.replace(before, after, 1))
    with pytest.raises(StudyError) as refused:
        board(str(tmp_path / "bad.toml"), Size.STANDARD)
    assert said in str(refused.value)


def test_a_page_without_an_undefended_model_names_no_share_of_it(done):
    made, _, lines = done
    for changed in (
        [one for one in lines if one["defense"] != "none"],
        [{**one, "accuracy": [0.0 for _ in one["accuracy"]]} for one in lines],
    ):
        data = json.loads(as_json(made, Size.QUICK, changed))
        page, text = pages.leaderboard(data), pages.scoreboard(data)
        assert "could not be built" not in page
        assert not pages.headline(data)
        assert not [one for track in made.tracks for one in pages.charts(data, {"name": track.name})]
        assert "No epsilon is asked for" not in text or any(one["track"] == "undefended" for one in changed)


def test_a_submission_stands_once(source):
    made = submitted(board(source, Size.QUICK), ["mine:Mine", "mine:Mine"])
    assert [entry.name for entry in made.entries].count("mine:Mine") == 1


def test_after_a_part_of_the_rounds_only_settings_with_equal_rounds_are_compared(done, source):
    made = board(source, Size.QUICK)
    line = Line(made.tasks[0], made.tracks[1], made.entries[2], 8.0)

    def trial(rounds: int, score: float) -> Trial:
        spec = resolve({**line.table({"rounds": rounds}), "defenses": [{"name": "none"}]}).cells[0].training
        return Trial({"rounds": rounds}, spec, [[score]])

    trials = [trial(4, 0.9), trial(4, 0.8), trial(4, 0.7), trial(8, 0.2), trial(8, 0.1)]
    assert [one.score for one in tuning.kept(trials, 3, whole=False)] == [0.9, 0.2, 0.8]
    assert [one.score for one in tuning.kept(trials, 3, whole=True)] == [0.9, 0.8, 0.7]
    stopped = trials[3].at(1, Stage(0.25, 3)).federation
    assert (stopped.rounds, stopped.rounds_run, stopped.evaluate_on) == (8, 2, "validation")


def test_a_submission_stands_in_every_track_that_its_proof_allows(source, tmp_path):
    made = submitted(board(source, Size.QUICK), ["gaussian"])
    assert made.entries[-1].tracks == ("model", "messages")
    made = replace(made, epsilons=(8.0,), seeds=1, stages=(Stage(1.0, 1),), attacks=())
    lines = ran(made, tmp_path, only=["gaussian"])
    assert {line["entry"] for line in lines} == {"no defense", "gaussian"}
    assert all(line["accuracy"] for line in lines)


@pytest.mark.parametrize("name", ["ota", "skellam", "poisson-binomial"])
def test_a_defense_that_adds_messages_up_is_not_where_nobody_is_trusted(source, tmp_path, name):
    made = submitted(board(source, Size.QUICK), [name])
    made = replace(made, epsilons=(8.0,), seeds=1, stages=(Stage(1.0, 1),), attacks=())
    lines = ran(made, tmp_path, only=[name])
    line = at(lines, "messages", name, 8.0)
    assert not line["trials"]
    assert "added up on the way" in line["note"]
    assert f"{name}: not in this track. {line['note']}." in pages.leaderboard(json.loads(as_json(made, "quick", lines)))
    assert not Line(made.tasks[0], made.tracks[2], made.entries[-1], None).trusts_sums  # no epsilon is asked for
    assert not Line(made.tasks[0], made.tracks[1], made.entries[-1], 8.0).trusts_sums


def test_an_attack_that_failed_stands_on_the_page(source, tmp_path, monkeypatch):
    made = replace(board(source, Size.QUICK), epsilons=(8.0,), seeds=1, stages=(Stage(1.0, 1),))

    def broken(*_, **__):
        raise ValueError("no candidate")

    monkeypatch.setattr("leakgauge.attacks.lineup.Lineup.run", broken)
    lines = ran(made, tmp_path, only=["clients add noise"])
    assert at(lines, "messages", "clients add noise", 8.0)["failed"] == ["an attack failed, lineup: no candidate"]
    text = "clients add noise, ε = 8: an attack failed, lineup: no candidate."
    assert text in pages.leaderboard(json.loads(as_json(made, Size.QUICK, lines)))


def test_members_are_of_a_client_whose_message_crosses(source, tmp_path):
    kept = {
        "name": "membership-cosine",
        "target": {"kind": "members", "client": 3, "count": 1, "outside": 9, "round": 0},
    }
    made = replace(board(source, Size.QUICK), attacks=(kept,), seeds=1, epsilons=(8.0,), stages=(Stage(1.0, 1),))
    for number in range(4):  # with other rounds, other clients take their turn
        tracks = tuple(replace(track, grid={**track.grid, "rounds": [4 + number]}) for track in made.tracks)
        (tmp_path / str(number)).mkdir()
        lines = ran(replace(made, tracks=tracks), tmp_path / str(number), only=["clients add noise"])
        line = at(lines, "messages", "clients add noise", 8.0)
        assert line["failed"] == []
        assert line["found"]


def test_an_audit_stands_beside_each_entry_with_an_epsilon_or_why_there_is_none(source, tmp_path, monkeypatch):
    made = replace(board(source, Size.QUICK), epsilons=(8.0,), seeds=1, stages=(Stage(1.0, 1),), audit=60, attacks=())
    lines = ran(made, tmp_path, only=["clients add noise"])
    line = at(lines, "messages", "clients add noise", 8.0)
    audited = line["audited"]
    assert 0 < audited["strict"] <= audited["proved"] == pytest.approx(8, rel=1e-3)
    assert line["failed"] == []
    assert at(lines, "undefended", "no defense", None)["audited"] is None
    page = pages.leaderboard(json.loads(as_json(made, Size.QUICK, lines)))
    assert f"at least {audited['strict']:.2f}" in page

    def impossible(*_):
        raise ValueError("no neighbor")

    monkeypatch.setattr("leakgauge.harness.study.training.audited_part", impossible)
    (tmp_path / "none").mkdir()
    line = at(ran(made, tmp_path / "none", only=["clients add noise"]), "messages", "clients add noise", 8.0)
    assert line["audited"] is None
    assert line["failed"] == ["the audit could not be made: no neighbor"]
    assert line["accuracy"]


MINE = """
from leakgauge.defenses.gaussian import Gaussian


class Mine(Gaussian):
    \"\"\"Normal noise.\"\"\"
"""


def test_a_submission_is_a_file_elsewhere_and_is_imported_only_with_permission(source, tmp_path, monkeypatch):
    (tmp_path / "submitted_defense.py").write_text(MINE)
    (tmp_path / "one.toml").write_text(
        BOARD.replace("[scale.quick]\nseeds = 2", "[scale.quick]\nseeds = 1\nepsilons = [8.0]")
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LEAKGAUGE_ALLOW_CODE", raising=False)
    monkeypatch.setattr("sys.path", [*sys.path])
    words = ["leaderboard", "one.toml", "-o", "out", "--submit", "submitted_defense:Mine", "--workers", "0"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "pass --allow-code" in refused.output
    assert "submitted_defense" not in sys.modules
    assert not (tmp_path / "out" / "leaderboard.json").exists()
    assert CliRunner().invoke(app, [*words, "--allow-code"]).exit_code == 0
    lines = json.loads((tmp_path / "out" / "leaderboard.json").read_text())["lines"]
    mine = [line for line in lines if line["entry"] == "submitted_defense:Mine"]
    assert {line["track"] for line in mine} == {"model", "messages"}
    assert "people named" in {one["what"] for one in at(lines, "messages", "submitted_defense:Mine", 8.0)["found"]}


def test_records_of_several_runs_join_and_are_ranked_together(done):
    made, _, lines = done
    first = as_json(made, Size.QUICK, [line for line in lines if line["entry"] != "clients add noise"])
    second = as_json(made, Size.QUICK, [line for line in lines if line["entry"] != "the server adds noise"])
    other = json.dumps({**json.loads(second), "tasks": [{"name": "another task"}]})
    assert [task["name"] for task in json.loads(joined(first, other))["tasks"]] == [made.tasks[0].name, "another task"]
    whole = json.loads(joined(first, second))["lines"]
    assert len(whole) == len(lines)
    assert sorted(map(standings._place, whole)) == sorted(map(standings._place, lines))
    assert {one["rank"] for one in whole if one["accuracy"]} >= {1}
    old = json.loads(first)
    old["entries"][1]["good_for"] = "the same entry in other words"
    assert len(json.loads(joined(json.dumps(old), second))["lines"]) == len(lines)
    old["entries"][1]["grid"] = {"rounds": [1]}
    left = {line["entry"] for line in json.loads(joined(json.dumps(old), second))["lines"]}
    assert left == {"no defense", "clients add noise"}
    gone = json.loads(first)
    gone["entries"] = [one for one in gone["entries"] if one["name"] != "the server adds noise"]
    without = {line["entry"] for line in json.loads(joined(first, json.dumps({**gone, "lines": []})))["lines"]}
    assert without == {"no defense"}
    for changed in ({"seeds": 5}, {"stages": []}, {"attacks": []}, {"audit": 9}):
        assert joined(json.dumps({**json.loads(first), **changed}), second) == second


def test_the_page_and_its_markdown_have_every_entry(done):
    made, _, lines = done
    data = json.loads(as_json(made, Size.QUICK, lines))
    page, text = pages.leaderboard(data), pages.scoreboard(data)
    for name in ("clients add noise", "the server adds noise", "no defense"):
        assert name in page
        assert name in text
    assert "the server adds noise: not in this track." in page
    assert 'data-sort="number"' in page
    assert "could not be built" not in page
    assert "people identified among 20" in page


def test_a_task_is_run_alone_and_one_that_is_not_there_is_refused(source, tmp_path):
    made = board("leaderboard", Size.STANDARD)
    some = tuning.lines_of(made, ["DP-SGD"], ["Adult, 10 clients"])
    assert {line.place.name for line in some} == {"Adult, 10 clients"}
    assert {line.entry.name for line in some} == {"no defense", "DP-SGD"}
    assert some == [line for line in tuning.lines_of(made, ["DP-SGD"]) if line.place.name == "Adult, 10 clients"]
    with pytest.raises(UnknownNameError, match="no task 'Adult'"):
        tuning.lines_of(made, (), ["Adult"])
    words = ["leaderboard", source, "-o", str(tmp_path), "--workers", "0", "--task", "digits"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "no task 'digits'" in refused.output


def test_a_record_is_a_page_with_its_pictures_and_the_same_again(done, tmp_path):
    made, _, lines = done
    first, again = (kept(as_json(made, Size.QUICK, lines), tmp_path / "one", times) for times in (1, 2))
    assert first == again
    shown = re.findall(r"]\(quick/([^)]+)\)", first["quick.md"].decode())
    assert sorted(shown) == sorted(name for name in first if name.endswith(".svg"))
    tracks = {line["track"] for line in lines if line["accuracy"] and line["epsilon"]}
    assert len([name for name in shown if name.startswith("kept-")]) == len(tracks)


def kept(text, folder, times):
    for _ in range(times):
        _keep(folder, "a board", text)
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_attack_of_another_board_in_the_folder_is_not_on_the_page(source, tmp_path):
    made = replace(board(source, Size.QUICK), epsilons=(8.0,), seeds=1, stages=(Stage(1.0, 1),))
    other = replace(made, attacks=({**made.attacks[0], "target": {"count": 20, "among": 20}},))
    used = [ran(one, tmp_path, only=["clients add noise"]) for one in (other, made)][1]
    (tmp_path / "fresh").mkdir()
    fresh = ran(made, tmp_path / "fresh", only=["clients add noise"])
    assert as_json(made, Size.QUICK, used) == as_json(made, Size.QUICK, fresh)
    assert {one["n"] for one in at(used, "messages", "clients add noise", 8.0)["found"]} == {30}


def test_another_setting_is_tried_in_place_of_one_that_does_not_reach_its_epsilon(source, monkeypatch):
    made = board(source, Size.QUICK)
    line = Line(made.tasks[0], made.tracks[1], made.entries[1], 8.0)
    monkeypatch.setattr(tuning, "solve", lambda cells, *_: ((), ["no noise"]) if few(cells) else (cells, []))

    def few(cells):
        return cells[0].training.federation.rounds == 4

    tuning.begin(line, 3, Path(), allow_code=False)
    assert [trial.rounds for trial in line.trials] == [8, 8, 8]
    assert line.note == ""


@pytest.mark.parametrize("name", ["ota", "dp-sgd"])
def test_a_marker_is_for_clients_and_for_a_server_that_sees_each_message(source, name):
    made, records = board(source, Size.QUICK), {"algorithm": "fedavg", "batch": 5, "local_steps": 1, "rounds": 4}
    entry = replace(made.entries[2], defense={"name": name, "delta": 0.01}, epsilons=())
    line = Line(replace(made.tasks[0]), replace(made.tracks[2], federation=records, grid={}), entry, None)
    (cell,) = resolve(line.table({})).cells
    of = {who: leaderboard._proved(line, cell.training, who, Path()) for who in ("server", "participant")}
    assert of["server"] == "inf"
    assert (of["participant"] == "inf") == (name == "dp-sgd")


def test_a_marker_says_against_whom_the_proof_is():
    line = {"adversary": "server", "proved": {"server": 8.0, "public": 1.0}}
    assert pages._state(line, "server") == "full"
    assert pages._state({**line, "proved": {"server": "inf", "public": 1.0}}, "server") == "half"
    assert pages._state({**line, "proved": {"server": "inf", "public": 9.0}}, "server") == "hollow"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (('tracks = ["undefended"]', 'tracks = ["nowhere"]'), "no track 'nowhere'"),
        (('data = "digits"', 'data = "digits"\ncolour = "red"'), "colour"),
        (("[scale.quick]", "[scale.tiny]"), "scale.tiny"),
        (('name = "clients add noise"', 'name = "no defense"'), "expected one of each name"),
        (('adversary = "participant"', 'adversary = "nobody"'), r"tracks\.1\.adversary: got 'nobody', expected"),
        (("samples = 400, ", ""), "expected samples > 0 in federation, got none"),
        (("validation = 100, ", ""), "expected validation > 0 in federation, got none"),
        (("stages = [", "stages = []\nunused = ["), "unused"),
        (("epsilons = [2.0, 8.0]", "epsilons = [-1.0, 8.0]"), r"epsilons\.0: got -1.0, expected greater than 0"),
        (('data = "digits"', 'data = "digits"\nepsilons = [0.0]'), r"tasks\.0\.epsilons\.0: got 0.0, expected greater"),
        (("epsilons = []", "epsilons = [nan]"), r"entries\.0\.epsilons\.0: got nan, expected greater"),
        (("test_samples = 100}", "test_samples = 100}\ngrid = {pth = [1]}"), "tunes 'pth'; known: clip, rounds"),
    ],
)
def test_a_wrong_board_is_refused_in_a_line(tmp_path, change, problem):
    path = tmp_path / "wrong.toml"
    path.write_text(BOARD.replace(*change, 1))
    with pytest.raises(StudyError, match=problem):
        board(str(path), Size.QUICK)


def test_a_wrong_parameter_of_an_attack_is_refused_and_not_left_out(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(BOARD.replace("among = 20", "amongst = 20"))
    with pytest.raises(StudyError, match="amongst"):
        ran(board(str(path), Size.QUICK), tmp_path / "out", only=["no defense"])
    assert not (tmp_path / "out").exists()  # before anything runs


def test_an_attack_that_names_code_asks_for_permission(source, tmp_path, monkeypatch):
    monkeypatch.delenv("LEAKGAUGE_ALLOW_CODE", raising=False)
    made = replace(board(source, Size.QUICK), attacks=({"name": "tests.doubles:Nothing"},))
    with pytest.raises(StudyError, match="pass --allow-code"):
        ran(made, tmp_path)


def test_a_published_entry_keeps_its_own_delta_and_one_without_any_gets_none(source):
    made = board(source, Size.QUICK)
    for entry, epsilon, delta in (({"name": "gaussian"}, None, 1e-5), ({"name": "laplace"}, 2.0, None)):
        line = Line(made.tasks[0], made.tracks[2], replace(made.entries[2], defense=entry), epsilon)
        (cell,) = resolve(line.table({"rounds": 4, "clip": 0.1, "step": 0.1})).cells
        assert cell.training.defense.parameters.get("delta") == delta


def test_an_unknown_board_or_entry_is_refused(source, tmp_path):
    with pytest.raises(UnknownNameError):
        board("nothing", Size.QUICK)
    with pytest.raises(UnknownNameError):
        ran(board(source, Size.QUICK), tmp_path, only=["clients ad noise"])


def test_shipped_boards_are_valid_at_every_size():
    for name in boards():
        for size in Size:
            made = board(name, size)
            for line in tuning.lines_of(made, ()):
                assert 0 < line.delta < 1
                assert line.settings(12)


def test_a_path_is_shared_by_the_rounds_and_a_task_has_its_own(tmp_path):
    (path := tmp_path / "paths.toml").write_text(
        BOARD.replace("test_samples = 100}", "test_samples = 100}\ngrid = {path = [6], step = [9.0]}").replace(
            "step = [0.1, 1.0], server_momentum = [0.0, 0.9]}", "path = [2, 4], server_momentum = [0.5]}"
        )
    )
    lines = tuning.lines_of(board(str(path), Size.STANDARD), ["the server adds noise"])
    line = next(one for one in lines if one.track.name == "model" and one.entry.defense["name"] == "dp-fedavg")
    rates = {one["rounds"]: line.table(one)["federations"][0]["lr"] for one in line.settings(12)}
    assert rates == {4: 6 / 4 * 0.5 / 0.1, 8: 6 / 8 * 0.5 / 0.1}


def test_no_setting_has_more_participants_than_clients_and_none_comes_twice(tmp_path):
    (path := tmp_path / "few.toml").write_text(
        BOARD.replace("step = [1.0, 3.0]}", "step = [1.0, 3.0], participants = [20, 50, 90]}")
    )
    (line,) = tuning.lines_of(board(str(path), Size.STANDARD), ["no defense"])
    settings = [(one["participants"], one["step"]) for one in line.settings(12)]
    assert sorted(settings) == [(20, 1.0), (20, 3.0), (40, 1.0), (40, 3.0)]


def test_an_entry_with_steps_has_no_path_of_its_track(tmp_path):
    (path := tmp_path / "steps.toml").write_text(
        BOARD.replace("step = [0.1, 1.0], server_momentum", "path = [2, 4], server_momentum").replace(
            'defense = {name = "gaussian"}', 'defense = {name = "gaussian"}\ngrid = {step = [0.2]}'
        )
    )
    lines = tuning.lines_of(board(str(path), Size.STANDARD), ["clients add noise"])
    grid = next(line.grid for line in lines if line.entry.defense["name"] == "gaussian" and line.track.name == "model")
    assert grid == {"rounds": [4, 8], "clip": [0.1], "server_momentum": [0.0, 0.9], "step": [0.2]}


def test_settings_are_spread_over_pairs_of_values():
    grid = {"rounds": [20, 40, 80], "clip": [0.1, 0.3], "step": [1.0, 2.0, 5.0, 12.0], "server_momentum": [0.5, 0.9]}
    chosen = tuning._spread(list(expand(grid)), 12)
    for a, b in itertools.combinations(grid, 2):
        times = Counter((one[a], one[b]) for one in chosen)
        assert len(times) == len(grid[a]) * len(grid[b])
        assert max(times.values()) - min(times.values()) <= 2
    assert len({(one["rounds"], one["step"]) for one in chosen}) == 12
    assert len(tuning._spread(list(expand({"lr": [0.1, 0.2]})), 12)) == 2
