"""With a key, `verify` accepts the results that its owner signed, and no others."""

import base64
import hashlib
import json
import os
import shutil
import stat
import tomllib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, x25519

from leakgauge.harness.core.rng import Key, integers
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.signed import STATEMENT, faults_of
from leakgauge.harness.study.store import load_run, verify, writing
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.command import call
from tests.forger import (
    DRAWN,
    FORGERIES,
    STATEMENTS,
    TYPE,
    Case,
    a_value,
    compact,
    encoded,
    envelope,
    first,
    link,
    read,
    secret,
    unnamed,
)
from tests.test_recording import written

TEXT = """
name = "small"
lineup = false
tasks = [{data = "digits", model = "mlp-small"}]
federations = [{clients = 4, rounds = 2, samples = 80, test_samples = 50, local_steps = 1}]
defenses = [{name = "none"}, {name = "gaussian", noise_std = 0.01}]
attacks = [{name = "prior", target = {round = 1, count = 2}}]
"""


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    at = tmp_path_factory.mktemp("signed")
    made = Case(at / "small", at / "larger", at / "me.pem", at / "me.pub.pem", at / "stranger.pem")
    for folder, seeds in ((made.folder, [0]), (made.larger, [0, 1])):
        study = resolve(tomllib.loads(TEXT) | {"seeds": seeds})
        assert len(run_study(study, folder, workers=0).results) == 2 * len(seeds)
    written(made.folder / "recording")
    for words in ((made.folder, "--new-key", made.key), (made.larger, "--key", made.key), ("--new-key", made.stranger)):
        done = call("sign", *words)
        assert done.exit_code == 0, done.output
    return made


@pytest.fixture
def copy(case, tmp_path):
    return shutil.copytree(case.folder, tmp_path / "copy")


@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.table(3)
def test_a_forgery_is_refused_with_a_line_a_reason(name, case, copy):
    forge, named, seen = FORGERIES[name]
    forge(copy, case)
    assert bool(verify(copy)[1]) == seen, "a forger who is found without a key has not tried"
    done = call("verify", copy, "--key", case.public)
    assert (done.exit_code, done.stderr) == (5, ""), done.output
    *reasons, end = done.stdout.splitlines()
    assert end.endswith(f"{len(reasons)} files damaged, missing or not as signed")
    assert any(named in reason.rpartition(": ")[0] for reason in reasons), reasons
    assert all(len(reason) < 400 for reason in reasons)


def test_json_says_that_whole_results_are_not_those_that_were_signed(case, copy):
    a_value(copy, case)
    found = json.loads(call("verify", copy, "--key", case.public, "--json").stdout)
    assert (found["signed"], found["whole"]) == (False, False)
    assert {Path(one["file"]).name for one in found["faults"]} == {"manifest.json", "result.json"}
    assert json.loads(call("verify", copy, "--json").stdout)["whole"]
    (copy / STATEMENT).unlink()
    assert faults_of(copy, case.public) == {STATEMENT: "is missing"}


def test_there_are_many_kinds_of_forgeries_and_most_are_unseen_without_a_key():
    assert len(FORGERIES) >= 70
    assert sum(one.seen for one in FORGERIES.values()) <= 6


def contents(at):
    """All files but the statement."""
    files = [path for path in at.rglob("*") if path.is_file() and path.name != STATEMENT]
    return {path.relative_to(at): path.read_bytes() for path in files}


def pick(key, among):
    return among[int(integers(key, 1, len(among))[0])]


@pytest.mark.matrix
def test_100_of_100_forged_and_resealed_folders_are_refused(case, tmp_path):
    honest, accepted = contents(case.folder), []
    for number in range(100):
        key, at = Key(49).child("forged", number), tmp_path / str(number)
        shutil.copytree(case.folder, at)
        pick(key.child("kind"), DRAWN)(at, case, key)
        pick(key.child("statement"), STATEMENTS)(at, case)
        assert contents(at) != honest
        assert verify(at)[1] == {}, "the forger has not resealed what was changed"
        accepted += [number] if not faults_of(at, case.public) else []
        shutil.rmtree(at)
    assert accepted == []


def test_no_other_bytes_are_a_statement(case, copy):
    path = copy / STATEMENT
    honest = path.read_bytes()
    drawn = [int(at) for at in integers(Key(49).child("bytes"), 200, len(honest))]
    for bit, at in enumerate([*range(40), *range(len(honest) - 200, len(honest)), *drawn]):
        flipped = honest[at] ^ (1 << bit % 8)
        for other in (honest[:at] + bytes([flipped]) + honest[at + 1 :], honest[:at], honest[: at + 1] + honest[at:]):
            path.write_bytes(other)
            assert list(faults_of(copy, case.public)) == [STATEMENT]
    path.write_bytes(honest)
    assert faults_of(copy, case.public) == {}


def test_honest_results_pass_with_the_key_and_without(case, copy):
    done = call("verify", copy, "--key", case.public)
    assert (done.exit_code, done.output) == (
        0,
        "4 cells and trainings, 2 recorded models, 6 messages, all whole and as signed\n",
    )
    assert json.loads(call("verify", copy, "--key", case.public, "--json").stdout)["signed"]
    assert "signed" not in json.loads(call("verify", copy, "--json").stdout)
    for name in ("report.html", "lock"):  # no results
        (copy / name).write_text("")
    (copy / "quarantine").mkdir()
    assert call("verify", copy, "--key", case.public).exit_code == 0
    assert call("sign", copy, "--key", case.key).exit_code == 0
    assert (copy / STATEMENT).read_bytes() == (case.folder / STATEMENT).read_bytes()


def test_the_envelope_is_that_of_dsse_and_the_statement_that_of_in_toto(case):
    """Written and checked here without the code under test; the encoded text is the example of DSSE's protocol."""
    hello = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert encoded("http://example.com/HelloWorld", b"hello world") == hello
    outer, statement = read(case.folder)
    payload = base64.b64decode(outer["payload"])
    key = serialization.load_pem_public_key(case.public.read_bytes())
    key.verify(base64.b64decode(outer["signatures"][0]["sig"]), encoded(TYPE, payload))
    assert compact(envelope(compact(statement), secret(case.key))) + b"\n" == (case.folder / STATEMENT).read_bytes()
    assert (outer["payloadType"], statement["_type"]) == (TYPE, "https://in-toto.io/Statement/v1")
    subjects = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    counted = [path for path in case.folder.rglob("*") if path.is_file() and path.name not in (STATEMENT, "run.log")]
    assert subjects == {
        path.relative_to(case.folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in counted
    }


def test_the_statement_says_which_study_code_and_environment(case):
    run, about = load_run(case.folder), read(case.folder)[1]["predicate"]
    assert about["study"] == {"name": "small", "hash": run.study_hash}
    (made,) = run.environments
    assert about["environments"] == [
        {
            "commit": made.commit,
            "dirty": made.dirty,
            "machine": made.machine,
            "numerics": made.numerics,
            "packages": made.packages,
            "python": made.python,
        }
    ]
    assert about["code"] == sorted(
        {json.loads(path.read_bytes())["code"] for path in case.folder.glob("*/*/manifest.json")}
    )
    assert about["leakgauge"]


def test_results_that_came_later_are_refused_until_they_are_signed(case, copy):
    run_study(resolve(tomllib.loads(TEXT)), copy, workers=0)  # everything is finished: nothing changes
    assert faults_of(copy, case.public) == {}
    run_study(resolve(tomllib.loads(TEXT) | {"seeds": [0, 1]}), copy, workers=0)
    assert call("verify", copy).exit_code == 0
    done = call("verify", copy, "--key", case.public)
    assert done.exit_code == 5
    assert done.output.count("is not in the signed statement; sign again if it belongs to the results") == 4 * 4
    assert call("sign", copy, "--key", case.key).exit_code == 0
    assert call("verify", copy, "--key", case.public).exit_code == 0


def test_a_recording_alone_is_signed(case, tmp_path):
    written(tmp_path / "r")
    assert call("sign", tmp_path / "r", "--key", case.key).output.startswith("signed: 10 files in ")
    assert call("verify", tmp_path / "r", "--key", case.public).exit_code == 0
    (tmp_path / "r/rounds/00002").mkdir()
    assert faults_of(tmp_path / "r", case.public) == {}
    (tmp_path / "r/rounds/00002/model.npy").write_bytes(b"")
    assert list(faults_of(tmp_path / "r", case.public)) == ["rounds/00002/model.npy"]


@by_rows(
    (lambda at: first(at, name="arrays.npz").write_bytes(b""), "arrays.npz: has changed"),
    (lambda at: shutil.rmtree(first(at).parent), "manifest.json: is missing"),
    (lambda at: link("cells/*/result.json")(at, None), "result.json: is damaged: expected a regular file"),
    (lambda at: unnamed(b"\xff")(at, None), "is damaged: UnicodeEncodeError"),
)
def test_a_damaged_folder_is_not_signed(damage, text, case, copy):
    before = (copy / STATEMENT).read_bytes()
    damage(copy)
    done = call("sign", copy, "--key", case.key)
    assert done.exit_code == 5
    assert text in done.stderr
    assert f"nothing is signed: 1 files of {copy} are faulty" in done.stderr
    assert (copy / STATEMENT).read_bytes() == before


def test_a_folder_that_is_being_written_is_not_signed(case, copy):
    with writing(copy):
        done = call("sign", copy, "--key", case.key)
    assert done.exit_code == 2
    assert "is being written by process" in done.stderr


def as_pem(key):
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(*form)


KEYS = {
    "missing": lambda path, case: None,
    "empty": lambda path, case: path.write_bytes(b""),
    "private": lambda path, case: shutil.copy(case.key, path),
    "x25519": lambda path, case: path.write_bytes(as_pem(x25519.X25519PrivateKey.generate())),
    "elliptic curve": lambda path, case: path.write_bytes(as_pem(ec.generate_private_key(ec.SECP256R1()))),
    "no PEM": lambda path, case: path.write_bytes(b"\x00" * 32),
    "large": lambda path, case: path.write_bytes(case.public.read_bytes() + b" " * 2**16),
    "a pipe": lambda path, case: os.mkfifo(path),
    "a folder": lambda path, case: path.mkdir(),
}


@pytest.mark.parametrize("name", KEYS)
def test_what_is_no_public_key_of_ed25519_is_refused_in_one_line(name, case, tmp_path):
    path = tmp_path / "key.pem"
    KEYS[name](path, case)
    done = call("verify", case.folder, "--key", path)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"leakgauge: cannot use {path}: expected a public key of Ed25519 in PEM")


def test_a_private_key_is_for_its_owner_alone_and_is_never_overwritten(case, tmp_path):
    path = tmp_path / "mine.pem"
    before = os.umask(0)
    try:
        done = call("sign", "--new-key", path)
    finally:
        os.umask(before)
    assert done.output == f"private key: {path}: keep it to yourself\npublic key: {tmp_path / 'mine.pub.pem'}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret(path).public_key() == serialization.load_pem_public_key((tmp_path / "mine.pub.pem").read_bytes())
    assert isinstance(secret(path), ed25519.Ed25519PrivateKey)
    assert path.read_bytes() != case.key.read_bytes()
    kept = path.read_bytes()
    for other in (path, tmp_path / "nothing/mine.pem"):
        (tmp_path / "mine.pub.pem").unlink(missing_ok=True)
        done = call("sign", "--new-key", other)
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
        assert f"cannot write {other}" in done.stderr
    assert path.read_bytes() == kept
    (tmp_path / "other.pub.pem").write_text("")
    assert call("sign", "--new-key", tmp_path / "other.pem").exit_code == 2
    assert not (tmp_path / "other.pem").exists()


def test_signing_takes_a_private_key_without_a_password(case, copy, tmp_path):
    locked = tmp_path / "locked.pem"
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked.write_bytes(secret(case.key).private_bytes(*form, serialization.BestAvailableEncryption(b"x")))
    for path in (locked, case.public):
        done = call("sign", copy, "--key", path)
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
        assert "expected a private key of Ed25519 in PEM, without a password" in done.stderr


@by_rows("", "DIR", "--key me.pem", "DIR --key me.pem --new-key other.pem")
def test_a_call_without_one_key_and_what_it_signs_is_refused(words):
    done = call("sign", *words.split())
    assert done.exit_code == 2
    assert "expected DIR --key PRIVATE.pem, or --new-key PRIVATE.pem" in done.stderr


def test_a_missing_folder_is_not_made(case, tmp_path):
    assert call("sign", tmp_path / "nothing", "--key", case.key).exit_code == 2
    assert not (tmp_path / "nothing").exists()
