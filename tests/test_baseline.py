"""The committed file: it comes back as it was, and is refused where it cannot be trusted."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leakgauge.harness.core.cell import PartSpec, Target
from leakgauge.harness.gate.baseline import SCHEMA, Baseline, BaselineError, read, to_text, write
from leakgauge.harness.gate.compare import rows
from leakgauge.harness.gate.measure import Measure, Measured, measured
from leakgauge.harness.gate.output import moves
from leakgauge.harness.study.store import StoreError
from tests import command
from tests.by_rows import by_rows
from tests.report_fixtures import GAUSSIAN, MAP, MATCHING, NONE, THRESHOLD, audited_run, grid, make_run

PROBE = Target("probe", 0, 16)
MEMBERS = Target("members", count=40)
RUN = make_run(
    grid([NONE, *GAUSSIAN[:2]], [(MATCHING, PROBE, "server"), (MAP, PROBE, "server"), (THRESHOLD, MEMBERS, "public")])
)
BASE = Baseline(measured(RUN), "first numbers, ε and <b>")


def with_measure(base, at, **changes):
    measures = list(base.measured.measures)
    measures[at] = dataclasses.replace(measures[at], **changes)
    return dataclasses.replace(base, measured=dataclasses.replace(base.measured, measures=tuple(measures)))


def many(count, images):
    first = BASE.measured.measures[2]
    values = tuple(round(0.1 + at / 7, 6) for at in range(images))
    measures = [dataclasses.replace(first, key=f"{first.key}{at}", values=values) for at in range(count)]
    return dataclasses.replace(BASE, measured=dataclasses.replace(BASE.measured, measures=tuple(measures)))


@pytest.mark.parametrize("base", [BASE, Baseline(measured(audited_run((0, 1))), "audits")], ids=["run", "audits"])
def test_a_baseline_comes_back_as_it_was_and_is_the_same_bytes(base, tmp_path):
    write(base, tmp_path / "new" / "a.json")
    found = read(tmp_path / "new" / "a.json")
    assert found == base
    write(found, tmp_path / "b.json")
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "new" / "a.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "new"]


number = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
parts = st.builds(
    PartSpec, texts, st.dictionaries(texts, st.none() | st.booleans() | st.integers() | number | texts, max_size=3)
)
some_measures = st.builds(
    Measure,
    *[st.just("key"), st.just("ssim"), parts, st.none() | parts, texts, texts, texts, st.booleans()],
    *[st.sampled_from(["", "ceiling", "floor"]), st.none() | number, st.none() | number, st.none() | number],
    values=st.lists(st.none() | number, max_size=4).map(tuple),
    items=st.lists(texts, max_size=2).map(tuple),
    sides=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2).map(tuple),
    limit=st.none() | number,
    problem=texts,
)


@settings(max_examples=40, deadline=None)
@given(some_measures, texts, st.dictionaries(texts, texts, max_size=3))
def test_whatever_a_measure_holds_comes_back(tmp_path_factory, measure, text, table):
    run = Measured(text, text, table, text, True, table, text, (measure,))
    path = tmp_path_factory.getbasetemp() / "any.json"
    write(Baseline(run, text), path)
    assert read(path) == Baseline(run, text)


def test_mappings_are_sorted_so_that_equal_baselines_are_equal_bytes():
    turned = dict(reversed(BASE.measured.packages.items()))
    assert list(turned) != list(BASE.measured.packages)
    assert to_text(dataclasses.replace(BASE, measured=dataclasses.replace(BASE.measured, packages=turned))) == to_text(
        BASE
    )


def test_one_value_that_moves_changes_one_line_and_the_number_another():
    first = BASE.measured.measures[0]
    moved = with_measure(BASE, 0, value=0.5, values=(0.9999, *first.values[1:]))
    before, after = to_text(BASE).splitlines(), to_text(moved).splitlines()
    assert len(before) == len(after)
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert len(changed) == 2
    assert changed[0][1].strip().startswith('"value": 0.5, ')
    assert changed[1][1].strip().startswith('"values": [0.9999, ')


def test_fifty_checks_of_sixteen_images_are_below_40_kb():
    size = len(to_text(many(50, 16)).encode())
    assert 10_000 < size < 40_000
    assert size - len(to_text(many(50, 8)).encode()) < 50 * 8 * 11


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path):
    whole = to_text(BASE).encode()
    path = tmp_path / "cut.json"
    for keep in [0, 1, 20, *range(30, len(whole) - 1, 997), len(whole) - 2]:
        path.write_bytes(whole[:keep])
        with pytest.raises(BaselineError, match=r"cut\.json is truncated or not JSON: .*; restore it with git"):
            read(path)


def edited(old, new):
    """The text of a baseline with something else in the first place where `old` stands."""
    text = to_text(BASE)
    assert old in text
    return text.replace(old, new, 1)


@by_rows(
    ("no JSON at all", "truncated or not JSON"),
    ("<<<<<<< HEAD\n" + to_text(BASE), "truncated or not JSON"),
    ("[" * 100_000, "truncated or not JSON"),
    ("[]", "got schema None, expected 2; delete it and make a new one with 'leakgauge baseline make'"),
    (edited(f'"schema": {SCHEMA}', '"schema": 1'), "got schema 1, expected 2"),
    (edited(f'"schema": {SCHEMA}', '"schema": true'), "got schema True, expected 2"),
    (edited('"value": 0.', '"value": NaN, "x": 0.'), "measured.measures.0.value: Input should be a finite number"),
    (edited('"values": [', '"values": [NaN, '), "measured.measures.0.values.0: Input should be a finite number"),
    (edited('"values": [', '"values": ["0.5", '), "measured.measures.0.values.0: Input should be a valid number"),
    (edited('"values": [', '"values": [true, '), "measured.measures.0.values.0: Input should be a valid number"),
    (edited('"aware": false', '"aware": 0'), "measured.measures.0.aware: Input should be a valid boolean"),
    (edited('"metric": "ssim"', '"metric": "mse"'), "has a metric unknown to the gate: mse"),
    (edited('"study_hash": ', '"hash": '), "measured.study_hash: Field required"),
    (edited('"reason": ', '"verdict": "PASS", "reason": '), "verdict: Unexpected keyword argument"),
    (to_text(many(0, 16)), "it has no measures"),
    (to_text(with_measure(BASE, 1, key=BASE.measured.measures[0].key)), f"{BASE.measured.measures[0].key} is there"),
    (to_text(with_measure(BASE, 4, metric="auc", sides=((8, 9),))), "values for 17 records"),
)
def test_a_file_that_cannot_be_trusted_is_refused_in_one_line(text, said, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text, "utf-8")
    with pytest.raises(BaselineError) as caught:
        read(path)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert "leakgauge baseline make" in str(caught.value) or "restore it with git" in str(caught.value)


def test_no_file_says_what_makes_one(tmp_path):
    with pytest.raises(BaselineError, match=r"no baseline .*none\.json; make one with 'leakgauge baseline make'"):
        read(tmp_path / "none.json")
    with pytest.raises(BaselineError, match=r"cannot read baseline .*: expected a regular file, got a folder"):
        read(tmp_path)


def test_what_cannot_be_written_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "x.json"
    write(BASE, path)
    with pytest.raises(ValueError, match="JSON compliant"):
        write(with_measure(BASE, 0, value=float("nan")), path)
    assert read(path) == BASE
    with pytest.raises(StoreError, match="cannot write"):
        write(BASE, path / "inside.json")


def test_moves_are_what_moved_appeared_and_vanished():
    first, second, third = BASE.measured.measures[:3]
    assert moves(rows(BASE.measured, BASE.measured)) == []
    now = with_measure(BASE, 0, value=0.5, values=(0.9999, *first.values[1:]))
    now = with_measure(now, 1, values=(*second.values, 0.1))
    now = with_measure(now, 2, key="new/key").measured
    assert [tuple(move.values()) for move in moves(rows(BASE.measured, now))] == [
        (first.key, first.name, "moved", first.value, 0.5, 1, 32),
        (second.key, second.name, "moved", second.value, second.value, 1, 33),
        (third.key, third.name, "vanished", third.value, None, 0, 160),
        ("new/key", third.name, "appeared", None, third.value, 0, 160),
    ]


def test_the_file_can_be_read_without_this_program():
    data = json.loads(to_text(BASE))
    assert list(data) == ["schema", "reason", "measured"]
    assert data["measured"]["study"] == "invented-study"
    keys = [measure["key"] for measure in data["measured"]["measures"]]
    assert keys == [measure.key for measure in BASE.measured.measures]


def call(*words):
    return command.call("baseline", *words)


def test_a_baseline_is_shown(tmp_path):
    path = tmp_path / "base.json"
    write(BASE, path)
    shown = call("show", path)
    assert shown.exit_code == 0
    assert "reason: first numbers, ε and <b>" in shown.stdout
    lines = shown.stdout.splitlines()
    assert "computed with: vector instructions AVX512; MKL_CBWR AVX2; processor Invented" in lines
    assert [line.split()[0] for line in lines[6:]] == [measure.key for measure in BASE.measured.measures]
    assert "n = 32 " in lines[6]
    assert lines[6].endswith("ceiling")
    assert call("show", path, "--json").stdout == path.read_text("utf-8")


def test_a_diff_informs_and_judges_nothing(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    worse = with_measure(BASE, 0, value=0.99, values=(0.5,))
    packages = BASE.measured.packages | {"torch": "2.0.0"}
    write(BASE, old)
    write(dataclasses.replace(worse, measured=dataclasses.replace(worse.measured, packages=packages)), new)
    done = call("diff", old, new)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[1] == "packages, torch: 2.13.0 -> 2.0.0"
    assert done.stdout.splitlines()[2].endswith(f"{BASE.measured.measures[0].key}  (32 of 32 values)")
    (move,) = json.loads(call("diff", old, new, "--json").stdout)
    assert (move["kind"], move["after"]) == ("moved", 0.99)
    assert call("diff", old, old).stdout.splitlines()[1:] == ["no measure moved"]


def test_what_cannot_be_read_is_exit_code_4(tmp_path):
    write(BASE, tmp_path / "base.json")
    for words in (["show", "none.json"], ["diff", "base.json", "none.json"], ["diff", "none.json", "base.json"]):
        done = call(words[0], *(tmp_path / word for word in words[1:]))
        assert done.exit_code == 4
        assert "make one with 'leakgauge baseline make'" in done.stderr


SMALL = """
name = "small"
lineup = false
tasks = [{data = "digits", model = "linear"}]
federations = [{clients = 2, rounds = 1, samples = 40, test_samples = 10, algorithm = "fedsgd"}]
defenses = [{name = "none"}, {name = "gaussian", noise_std = 0.01}]
attacks = [{name = "prior", target = {count = 8}}]
"""


@pytest.mark.matrix  # trains
def test_one_command_makes_the_baseline_that_two_make(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CI", raising=False)
    (tmp_path / "study.toml").write_text(SMALL)
    made = command.call("baseline", "make", "study.toml", "--reason", "first numbers", "--workers", 0)
    assert made.exit_code == 0, made.output
    assert "measures of small" in made.stdout.splitlines()[-1]
    one = (tmp_path / "baselines" / "small.json").read_bytes()
    file = ["--reason", "first numbers"]
    assert call("update", "runs/small", *file, "--baseline", "two.json").exit_code == 0
    assert (tmp_path / "two.json").read_bytes() == one


def test_no_baseline_is_made_in_ci_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(SMALL)
    made = command.call("baseline", "make", "study.toml", "--reason", "first", CI="true")
    assert (made.exit_code, "CI is set" in made.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]
