"""Recordings: what was written is read, never more than the bound, and nothing in a stranger's folder is trusted."""

import io
import json
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key, normal, uniform
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.data import DataMissing, DataUnreadable
from leakgauge.harness.federation.recording import LIST, Facts, Recorded, Recorder, load, read, spec_of
from tests.by_rows import by_rows
from tests.command import call

LAYOUT = Layout(("fc.weight", "fc.bias"), ((2, 3), (4,)))
FACTS = Facts(5, 3, "update", steps=2, batch=4, lr=0.1)
NONE = PartSpec("none")


def examples(name, n=6):
    return Examples(uniform(Key(0).child(name), (n, 3)), torch.arange(n) % 2)


def params(number):
    return normal(Key(number).child("params"), (LAYOUT.dim,))


def written(folder, rounds=2, clients=3, close=True, most_bytes=10**6, **more):
    """A recording of some rounds, and what its recorder kept."""
    recorder = Recorder(folder, FACTS, LAYOUT, NONE, most_bytes=most_bytes, **more)
    recorder.data(examples("train"), examples("auxiliary"), ("a", "b"))
    kept = []
    for number in range(rounds):
        recorder.model(number, params(number), 0.1 / (1 + number))
        for client in range(clients):
            one = Recorded(number, client, 8, bytes([number, client]) * 20, 2, 3, np.array([client, client + 1]))
            kept += [one] if recorder.message(one) else []
    if close:
        recorder.close()
    return recorder, kept


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def equal(one, other):
    return one[:6] == other[:6] and np.array_equal(one.rows, other.rows)


def test_planned_rounds_and_losses_are_read_and_a_loss_that_is_not_finite_is_unknown(tmp_path):
    with Recorder(tmp_path / "r", FACTS._replace(rounds=50), LAYOUT, NONE, most_bytes=10**6) as recorder:
        for number, loss in enumerate((2.5, None, float("nan"))):
            recorder.model(number, params(number), 0.1, loss)
    found = read(tmp_path / "r")
    assert [found.loss(number) for number in range(4)] == [2.5, None, None, None]
    assert spec_of(found).rounds == 50
    content = (tmp_path / "r" / LIST).read_text()
    (tmp_path / "r" / LIST).write_text(content.replace('"loss":2.5', '"loss":NaN'))
    with pytest.raises(DataUnreadable, match="cannot read"):
        read(tmp_path / "r")


def test_what_was_recorded_is_read_bit_for_bit(tmp_path):
    recorder, kept = written(tmp_path / "r", seed=7)
    found = read(tmp_path / "r")
    assert (found.facts, found.layout, found.defense, found.seed, found.closed) == (FACTS, LAYOUT, NONE, 7, True)
    assert recorder.written == size_of(tmp_path / "r")
    assert found.models == (0, 1)
    assert all(torch.equal(found.model(number), params(number)) for number in (0, 1))
    assert found.lr(1) == 0.05
    assert all(map(equal, [one for number in (0, 1) for one in found.messages(number)], kept))
    train, auxiliary = found.records
    assert torch.equal(train.x, examples("train").x)
    assert torch.equal(auxiliary.y, examples("auxiliary").y)
    spec = spec_of(found)
    assert (spec.clients, spec.participants, spec.rounds, spec.local_steps, spec.lr) == (5, 3, 2, 2, 0.1)


@given(most=st.integers(900, 6000), rounds=st.integers(1, 4), clients=st.integers(1, 5))
def test_a_recorder_never_writes_more_than_its_bound_and_keeps_whole_rounds_in_order(
    tmp_path_factory, most, rounds, clients
):
    folder = tmp_path_factory.mktemp("bounded") / "r"
    recorder = Recorder(folder, FACTS, LAYOUT, NONE, most_bytes=most)
    told = {}
    for number in range(rounds):
        told[number] = recorder.model(number, params(number), 0.1)
        assert size_of(folder) <= most
        for client in range(clients):
            kept = recorder.message(Recorded(number, client, 1, b"x" * 300, 1, 1))
            assert size_of(folder) <= most
            assert told[number] or not kept
            told[number, client] = kept
    recorder.close()
    assert size_of(folder) <= most
    found = read(folder)
    assert found.models == tuple(number for number in range(rounds) if told[number])
    assert found.sent == {
        number: clients_of
        for number in range(rounds)
        if (clients_of := tuple(k for k in range(clients) if told[number, k]))
    }
    lost = sum(not told[number] for number in range(rounds)), sum(not one for key, one in told.items() if key in told
                                                                and isinstance(key, tuple))  # fmt: skip
    assert found.left_out == lost


def test_a_recording_that_was_cut_off_holds_what_is_complete(tmp_path):
    _, kept = written(tmp_path / "r", close=False)
    found = read(tmp_path / "r")
    assert not found.closed
    assert len(kept) == sum(map(len, found.sent.values())) == 6
    path = tmp_path / "r" / LIST
    path.write_bytes(path.read_bytes()[:-30])  # in the middle of a line
    assert sum(map(len, read(tmp_path / "r").sent.values())) == 5
    assert "is incomplete" in load(f"recording:{tmp_path}/r", tmp_path).note


def test_the_digest_of_the_data_set_changes_with_any_file(tmp_path):
    written(tmp_path / "a")
    written(tmp_path / "b", clients=2)
    written(tmp_path / "c")
    first, other, same = (load(f"recording:{tmp_path}/{name}", tmp_path).digest for name in "abc")
    assert first == same != other


def no_file(folder):
    (folder / "rounds/00001/client-00002.bin").unlink()


def other_bytes(folder):
    (folder / "rounds/00001/client-00002.bin").write_bytes(b"y" * 40)


def longer(folder):
    (folder / "rounds/00001/client-00002.bin").write_bytes(b"y" * 41)


def a_link(folder):
    path = folder / "rounds/00001/client-00002.bin"
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")


def a_pipe(folder):
    (folder / "rounds/00001/client-00002.bin").unlink()
    os.mkfifo(folder / "rounds/00001/client-00002.bin")


@pytest.mark.parametrize("damage", [no_file, other_bytes, longer, a_link, a_pipe])
def test_a_damaged_file_is_one_line_that_names_it(tmp_path, damage):
    written(tmp_path)
    damage(tmp_path)
    with pytest.raises((DataUnreadable, DataMissing), match=r"client-00002\.bin") as raised:
        read(tmp_path)
    assert "\n" not in str(raised.value)


def test_verify_names_every_faulty_file_of_a_recording_and_counts_what_it_names(tmp_path):
    folder = tmp_path / "r"
    written(folder)
    (folder / "unnamed.txt").write_text("x")  # no line names it
    done = call("verify", folder)
    assert (done.exit_code, done.output) == (0, "2 recorded models, 6 messages, all whole\n")
    no_file(folder)
    (folder / "rounds/00000/client-00002.bin").write_bytes(b"y" * 40)
    (folder / "rounds/00000/model.npy").write_bytes(b"")
    done = call("verify", folder, "--json")
    assert done.exit_code == 5
    found = json.loads(done.stdout)
    listed = {one["file"]: one["reason"] for one in found["faults"]}
    assert set(listed) == {
        "rounds/00000/model.npy",
        "rounds/00000/client-00002.bin",
        "rounds/00001/client-00002.bin",
    }
    assert listed["rounds/00001/client-00002.bin"] == "is missing"
    assert "SHA-256 differs" in listed["rounds/00000/client-00002.bin"]
    assert "has 0 bytes, not 168" in listed["rounds/00000/model.npy"]
    assert (found["models"], found["messages"], found["whole"], found["cut_off"]) == (2, 6, False, [])


def test_verify_says_of_a_recording_that_it_was_cut_off_and_finds_no_fault(tmp_path):
    for number in range(2):
        written(tmp_path / f"client-{number:05d}" / "round-00000", close=bool(number))
    done = call("verify", tmp_path)
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        "client-00000/round-00000/recording.jsonl: has no end: it was interrupted, or is still being written; "
        "what it names is complete",
        "4 recorded models, 12 messages, all whole",
    ]
    (tmp_path / "client-00001/round-00000" / LIST).write_bytes(b"null\n")
    assert "is damaged: line 1: expected one of start" in call("verify", tmp_path).output


def change(folder, which, **values):
    path = folder / LIST
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        if line["kind"] == which:
            line |= values
            break
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


@by_rows(
    ("start", {"version": 2}, "another version of leakgauge wrote it"),
    ("start", {"shapes": [[2, 3], [-4]]}, "non-negative lengths"),
    ("start", {"shapes": [[2**20, 2**20], [4]]}, "1 to 2,147,483,648 parameters"),
    ("start", {"names": ["a", "a"]}, "different names"),
    ("start", {"facts": {**FACTS._asdict(), "participants": 9}}, "participants <= clients"),
    ("start", {"facts": {**FACTS._asdict(), "sends": "code"}}, "'gradient' or 'update'"),
    ("start", {"extra": 1}, "unknown key"),
    ("model", {"round": -1}, "round from 0"),
    ("model", {"round": 10**12}, "round from 0"),
    ("model", {"lr": float("nan")}, "learning rate > 0, got nan"),
    ("model", {"size": 10**9}, "expected 10 numbers"),
    ("model", {"sha256": "0" * 64}, "SHA-256 differs"),
    ("message", {"client": 5}, "known client"),
    ("message", {"client": "../../x"}, "line 4"),
    ("message", {"client": 1}, "one message of a known client"),
    ("message", {"round": 4}, "a round with a model"),
    ("message", {"size": 10**12}, "a message of 1,000,000,000,000 bytes"),
    ("message", {"rows": [1, 1]}, "different rows"),
    ("message", {"images": 0}, "images=0"),
    ("data", {"kind": "code"}, "expected one of start, model"),
    ("end", {"kind": "start"}, "line 11"),
)
def test_a_list_that_says_something_impossible_is_one_line(kind, values, says, tmp_path):
    written(tmp_path)
    change(tmp_path, kind, **values)
    with pytest.raises((DataUnreadable, DataMissing), match=says) as raised:
        read(tmp_path)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("content", [b"", b"\n", b"[" * 10**5 + b"\n", b"null\n", b'{"kind":1}\n', b"\xff\xfe\n"])
def test_a_list_that_is_none_is_one_line(tmp_path, content):
    (tmp_path / LIST).write_bytes(content)
    with pytest.raises(DataUnreadable, match=LIST):
        read(tmp_path)


def test_a_folder_without_a_recording_says_so(tmp_path):
    with pytest.raises(DataMissing, match=f"there is no {LIST}"):
        read(tmp_path)


class Boom:
    def __reduce__(self):
        return os.mkdir, ("boom",)


def test_no_pickle_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    held = io.BytesIO()
    np.save(held, np.array([Boom()], dtype=object), allow_pickle=True)
    for content in (held.getvalue(), pickle.dumps(Boom())):
        folder = tmp_path / str(len(content))
        written(folder)
        (folder / "rounds/00000/model.npy").write_bytes(content)
        import hashlib

        change(folder, "model", size=len(content), sha256=hashlib.sha256(content).hexdigest())
        with pytest.raises(DataUnreadable, match=r"model\.npy"):
            read(folder).model(0)
    assert not (tmp_path / "boom").exists()


def test_a_recorder_refuses_what_contradicts_its_facts(tmp_path):
    recorder, _ = written(tmp_path / "r", close=False)
    with pytest.raises(ValueError, match="expected a model of 10 numbers"):
        recorder.model(5, torch.zeros(9), 0.1)
    with pytest.raises(ValueError, match="a new round"):
        recorder.model(1, params(0), 0.1)
    with pytest.raises(ValueError, match="the model of round 9 before its messages"):
        recorder.message(Recorded(9, 0, 1, b"", 1, 1))
    with pytest.raises(ValueError, match="a new client from 0 to 4"):
        recorder.message(Recorded(1, 0, 1, b"", 1, 1))
    with pytest.raises(ValueError, match="different rows"):
        recorder.message(Recorded(1, 4, 1, b"", 2, 1, np.array([3, 3])))
    with pytest.raises(ValueError, match="an empty folder"):
        Recorder(tmp_path / "r", FACTS, LAYOUT, NONE, most_bytes=10**6)
    with pytest.raises(ValueError, match="raise most_bytes"):
        Recorder(tmp_path / "s", FACTS, LAYOUT, NONE, most_bytes=700).data(examples("train", 99), None, ("a", "b"))
    with pytest.raises(ValueError, match="expected most_bytes >="):
        Recorder(tmp_path / "t", FACTS, LAYOUT, NONE, most_bytes=100)


def test_rows_beyond_the_records_and_missing_records_are_one_line(tmp_path):
    recorder, _ = written(tmp_path / "r", close=False)
    recorder.message(Recorded(1, 4, 1, b"", 1, 1, np.array([6])))
    with pytest.raises(DataUnreadable, match="rows below 6, got 6"):
        load(f"recording:{tmp_path}/r", tmp_path)
    Recorder(tmp_path / "bare", FACTS, LAYOUT, NONE, most_bytes=10**6).model(0, params(0), 0.1)
    with pytest.raises(ValueError, match=r"has no records: name data of their kind, as in .*\?data=mnist"):
        load(f"recording:{tmp_path}/bare", tmp_path)
    assert len(load(f"recording:{tmp_path}/bare?data=digits", tmp_path).train.y) > 1000
    with pytest.raises(ValueError, match="expected recording:DIR"):
        load(f"recording:{tmp_path}/bare?code=x", tmp_path)
