"""With a key, `verify` accepts the results that its owner signed, and no others."""

import base64
import hashlib
import json
import os
import shutil
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, x25519

from leakgauge.harness.core.rng import Key, integers, uniform
from leakgauge.harness.study import signed
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.signed import STATEMENT, faults_of
from leakgauge.harness.study.store import Store, load_run, sealed, verify, writing
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.command import call
from tests.stored import listed, rewrite
from tests.test_recording import written

TEXT = """
name = "small"
lineup = false
tasks = [{data = "digits", model = "mlp-small"}]
federations = [{clients = 4, rounds = 2, samples = 80, test_samples = 50, local_steps = 1}]
defenses = [{name = "none"}, {name = "gaussian", noise_std = 0.01}]
attacks = [{name = "prior", target = {round = 1, count = 2}}]
"""
TYPE = "application/vnd.in-toto+json"
ORDER = 2**252 + 27742317777372353535851937790883648493  # of the group of Ed25519 (RFC 8032, section 5.1)


class Case(NamedTuple):
    """A signed folder, a larger one of the same study that the same key signed, the key, and a stranger's."""

    folder: Path
    larger: Path
    key: Path
    public: Path
    stranger: Path


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


def secret(path):
    return serialization.load_pem_private_key(path.read_bytes(), None)


def encoded(kind, payload):
    return b" ".join([b"DSSEv1", b"%d" % len(kind), kind.encode(), b"%d" % len(payload), payload])


def compact(data):
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def keyid(key):
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_key().public_bytes(*form)).hexdigest()


def envelope(payload, *keys, kind=TYPE, encode=encoded):
    """An envelope with a signature of each key, written without the code under test."""
    made = [(keyid(key), key.sign(encode(kind, payload))) for key in keys]
    signatures = [{"keyid": name, "sig": base64.b64encode(one).decode()} for name, one in made]
    return {"payload": base64.b64encode(payload).decode(), "payloadType": kind, "signatures": signatures}


def read(at):
    """The envelope of a folder and its statement."""
    outer = json.loads((at / STATEMENT).read_bytes())
    return outer, json.loads(base64.b64decode(outer["payload"]))


def write(at, outer):
    (at / STATEMENT).write_bytes(compact(outer) + b"\n")


def sign_again(at, key, change=lambda statement: statement):
    """Sign a changed statement with a key, so well that only what it says is wrong."""
    write(at, envelope(compact(change(read(at)[1])), secret(key)))


def change_outer(change):
    def forge(at, case):
        outer = read(at)[0]
        write(at, change(outer) or outer)

    return forge


def change_inner(change):
    """A statement that the right key has signed, with other content."""

    def forge(at, case):
        def changed(statement):
            change(statement)
            return statement

        sign_again(at, case.key, changed)

    return forge


def raw(content):
    return lambda at, case: (at / STATEMENT).write_bytes(content)


def first(at, kind="cells", name="result.json"):
    return sorted(at.glob(f"{kind}/*/{name}"))[0]


def reseal(path, change):
    """Change a file that holds its own digest."""
    data = json.loads(path.read_bytes())
    del data["digest"]
    change(data)
    path.write_bytes(sealed(data))


def rewritten(path, change):
    def changed(data):
        change(data)
        return data

    rewrite(path, changed)


def arrays_changed(path, change):
    with np.load(path) as file:
        arrays = dict(file)
    name = max(sorted(arrays), key=lambda name: arrays[name].size)
    before, arrays[name] = arrays[name], change(arrays[name])
    assert not np.array_equal(before, arrays[name])
    np.savez_compressed(path, **arrays)
    listed(path)


def a_value(at, case):
    rewritten(first(at), lambda data: data["estimates"][0].update(value=0.01, low=0.0, high=0.02))


def an_accuracy(at, case):
    rewritten(first(at, "trainings", "record.json"), lambda data: data["evaluations"][-1].update(accuracy=0.99))


def a_claim(at, case):
    path = next(path for path in at.glob("trainings/*/record.json") if json.loads(path.read_bytes())["one_round"])
    rewritten(path, lambda data: data["one_round"].update(epsilon=0.1))


def a_picture(at, case):
    arrays_changed(first(at, name="arrays.npz"), lambda pixels: pixels * 0)


def a_model(at, case):
    arrays_changed(first(at, "trainings", "kept.npz"), lambda numbers: numbers * 0)


def a_duration(at, case):
    reseal(first(at, name="timing.json"), lambda data: data.update(seconds=1e-3))


def other_code(at, case):
    reseal(first(at, name="manifest.json"), lambda data: data.update(code="0" * 16))


def a_title(at, case):
    reseal(at / "study.json", lambda data: data.update(title="another"))


def a_goal_in_the_text(at, case):
    (at / "study.toml").write_text("# none")
    reseal(at / "study.json", lambda data: data.update(text="# none"))


def values_exchanged(at, case):
    one, other = sorted(at.glob("cells/*/result.json"))
    held = [json.loads(path.read_bytes())["estimates"] for path in (other, one)]
    for path, estimates in zip((one, other), held, strict=True):
        rewritten(path, lambda data: data.update(estimates=estimates))  # noqa: B023


def files_exchanged(at, case):
    one, other = (path.parent for path in sorted(at.glob("cells/*/result.json")))
    one.rename(at / "cells/x")
    other.rename(one)
    (at / "cells/x").rename(other)


def arrays_exchanged(at, case):
    one, other = sorted(at.glob("cells/*/arrays.npz"))
    held = one.read_bytes()
    arrays_changed(one, lambda pixels: pixels + 1)  # first of all other bytes, because guesses of both may be equal
    other.write_bytes(held)
    listed(other)


def cells_added(at, case):
    shutil.copytree(case.larger, at, dirs_exist_ok=True, ignore=shutil.ignore_patterns(STATEMENT))


def a_cell_beside_the_plan(at, case):
    new = next(path for path in sorted(case.larger.glob("cells/*")) if not (at / "cells" / path.name).exists())
    shutil.copytree(new, at / "cells" / new.name)


def a_cell_removed(at, case):
    gone = first(at).parent
    shutil.rmtree(gone)
    ids = [cell.id for cell in Store(case.folder).cells()]
    reseal(at / "study.json", lambda data: data["cells"].pop(ids.index(gone.name)))


def pictures_removed(at, case):
    path = first(at, name="arrays.npz")
    path.unlink()
    reseal(path.parent / "manifest.json", lambda data: data["files"].pop(path.name))


def a_failure_added(at, case):
    (first(at).parent / "failure.json").write_bytes(sealed({}))


def a_part_added(at, case):
    cell = first(at).parent
    Store(at).write_part(f"{cell.name}-0-1", {"x": np.zeros(1)}, 1.0, "code")


def a_message(at, case):
    folder = at / "recording"
    path = folder / "rounds/00000/client-00001.bin"
    path.write_bytes(bytes(len(path.read_bytes())))
    lines = [json.loads(line) for line in (folder / "recording.jsonl").read_bytes().splitlines()]
    for line in lines:
        if line["kind"] == "message" and (line["round"], line["client"]) == (0, 1):
            line["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "recording.jsonl").write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def a_recording_of_a_client(at, case):
    written(at / "client-00000" / "round-00000")


def a_recording_at_the_top(at, case):
    shutil.copytree(at / "recording", at, dirs_exist_ok=True)


def unnamed(name, folder="cells/*"):
    def forge(at, case):
        os.close(os.open(os.fsencode(next(at.glob(folder)) if folder else at) + b"/" + name, os.O_CREAT | os.O_WRONLY))

    return forge


def upper_case(at, case):
    cell = next(path for path in at.glob("cells/*") if path.name != path.name.upper())
    shutil.copytree(cell, cell.with_name(cell.name.upper()))


def link(pattern):
    """The same bytes, behind a link."""

    def forge(at, case):
        path = next(at.glob(pattern))
        elsewhere = at.parent / f"elsewhere-{path.name}"
        path.rename(elsewhere)
        path.symlink_to(elsewhere)

    return forge


def pipe(pattern):
    def forge(at, case):
        path = next(at.glob(pattern))
        path.unlink()
        os.mkfifo(path)

    return forge


def removed(name):
    return lambda at, case: (at / name).unlink()


def of_another_folder(at, case):
    shutil.copy(case.larger / STATEMENT, at)


def signed_by_a_stranger(at, case):
    a_value(at, case)
    assert call("sign", at, "--key", case.stranger).exit_code == 0


def signed_by_a_stranger_in_the_name_of_the_key(at, case):
    signed_by_a_stranger(at, case)
    change_outer(lambda outer: outer["signatures"][0].update(keyid=keyid(secret(case.key))))(at, case)


def refreshed(at, case):
    """The digests in the statement are those of the forged files; the signature is the old one."""
    outer, statement = read(at)
    files = [path for path in (at / one["name"] for one in statement["subject"]) if path.is_file()]
    digests = {path.relative_to(at).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    statement["subject"] = [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(digests.items())]
    write(at, {**outer, "payload": base64.b64encode(compact(statement)).decode()})


def digests_edited(at, case):
    a_value(at, case)
    refreshed(at, case)


def two_signatures(at, case):
    payload = base64.b64decode(read(at)[0]["payload"])
    write(at, envelope(payload, secret(case.stranger), secret(case.key)))


def payload_of_another_type(at, case):
    payload = base64.b64decode(read(at)[0]["payload"])
    write(at, envelope(payload, secret(case.key), kind="application/json"))


def signed_without_its_type(at, case):
    payload = base64.b64decode(read(at)[0]["payload"])
    write(at, envelope(payload, secret(case.key), encode=lambda kind, payload: payload))


def key_twice_in_the_envelope(at, case):
    path = at / STATEMENT
    path.write_bytes(path.read_bytes().replace(b'{"payload":', b'{"payload":"e30=","payload":', 1))


def key_twice_in_the_payload(at, case):
    payload = compact(read(at)[1]).replace(b'{"_type":', b'{"_type":"x","_type":', 1)
    write(at, envelope(payload, secret(case.key)))


def second_form_of_the_signature(at, case):
    """S + L, which is S modulo the order of the group (RFC 8032 forbids it, section 5.1.7)."""
    outer = read(at)[0]
    held = base64.b64decode(outer["signatures"][0]["sig"])
    moved = int.from_bytes(held[32:], "little") + ORDER
    outer["signatures"][0]["sig"] = base64.b64encode(held[:32] + moved.to_bytes(32, "little")).decode()
    write(at, outer)


def second_form_of_base64(at, case):
    """The last letter of a signature of 64 bytes has four bits that mean nothing."""
    outer = read(at)[0]
    text, letters = outer["signatures"][0]["sig"], "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    outer["signatures"][0]["sig"] = f"{text[:-3]}{letters[letters.index(text[-3]) + 1]}=="
    assert base64.b64decode(outer["signatures"][0]["sig"]) == base64.b64decode(text)
    write(at, outer)


def huge(at, case):
    with (at / STATEMENT).open("r+b") as file:
        file.truncate(2**40)


def a_new_name(statement, change):
    subject = next(one for one in statement["subject"] if one["name"].endswith("result.json"))
    subject["name"] = change(subject["name"])
    statement["subject"].sort(key=lambda one: one["name"])


def a_new_digest(statement, digest):
    statement["subject"][0]["digest"] = digest


class Forgery(NamedTuple):
    """What a forger does.

    Attributes:
        named: in the name of a file that is refused.
        seen: `verify` without a key refuses it, too.
    """

    forge: Callable[[Path, Case], object]
    named: str
    seen: bool = False


FORGERIES = {
    "a value": Forgery(a_value, "result.json"),
    "an accuracy": Forgery(an_accuracy, "record.json"),
    "a claim": Forgery(a_claim, "record.json"),
    "a picture": Forgery(a_picture, "arrays.npz"),
    "a model": Forgery(a_model, "kept.npz"),
    "a duration": Forgery(a_duration, "timing.json"),
    "the digest of the code": Forgery(other_code, "manifest.json"),
    "the title of the study": Forgery(a_title, "study.json"),
    "the text of the study": Forgery(a_goal_in_the_text, "study.toml"),
    "values exchanged": Forgery(values_exchanged, "result.json"),
    "folders exchanged": Forgery(files_exchanged, "result.json", seen=True),
    "arrays exchanged": Forgery(arrays_exchanged, "arrays.npz"),
    "cells added": Forgery(cells_added, "cells/"),
    "a cell beside the plan": Forgery(a_cell_beside_the_plan, "manifest.json"),
    "a cell removed": Forgery(a_cell_removed, "result.json"),
    "pictures removed": Forgery(pictures_removed, "arrays.npz"),
    "a failure added": Forgery(a_failure_added, "failure.json"),
    "a part added": Forgery(a_part_added, "part.npz"),
    "a message": Forgery(a_message, "client-00001.bin"),
    "a recording of a client": Forgery(a_recording_of_a_client, "client-00000/round-00000/recording.jsonl"),
    "a recording at the top": Forgery(a_recording_at_the_top, "recording.jsonl"),
    "a second study": Forgery(unnamed(b"study-2.toml", ""), "study-2.toml"),
    "a file that no manifest names": Forgery(unnamed(b"notes.txt"), "notes.txt"),
    "a Cyrillic letter": Forgery(unnamed("result.js\u043en".encode()), "\u043e"),
    "another normal form": Forgery(unnamed("re\u0301sult.json".encode()), "re\u0301"),
    "a name that is no text": Forgery(unnamed(b"\xff"), "cells/"),
    "a name of two lines": Forgery(unnamed(b"x\nstudy.json: whole"), "study.json: whole"),
    "the study in upper case": Forgery(
        lambda at, case: (at / "study.json").rename(at / "STUDY.JSON"), "study.json", True
    ),
    "a cell in upper case": Forgery(upper_case, "cells/", seen=True),
    "a link to a file": Forgery(link("cells/*/result.json"), "result.json"),
    "a link to a cell": Forgery(link("cells/*"), "cells/"),
    "a link to all cells": Forgery(link("cells"), "cells"),
    "a link to a recording": Forgery(link("recording/rounds"), "recording/rounds"),
    "a link to the statement": Forgery(link(STATEMENT), STATEMENT),
    "a pipe for a result": Forgery(pipe("cells/*/timing.json"), "timing.json", seen=True),
    "a pipe for the statement": Forgery(pipe(STATEMENT), STATEMENT),
    "a pipe for the study": Forgery(pipe("study.json"), "study.json", seen=True),
    "no study": Forgery(removed("study.json"), "study.json", seen=True),
    "no statement": Forgery(removed(STATEMENT), STATEMENT),
    "the statement of another folder": Forgery(of_another_folder, "cells/"),
    "a stranger's signature": Forgery(signed_by_a_stranger, STATEMENT),
    "a stranger with the key's id": Forgery(signed_by_a_stranger_in_the_name_of_the_key, STATEMENT),
    "digests edited": Forgery(digests_edited, STATEMENT),
    "another type": Forgery(change_outer(lambda outer: outer.update(payloadType="text/plain")), STATEMENT),
    "another signed type": Forgery(payload_of_another_type, STATEMENT),
    "signed without its type": Forgery(signed_without_its_type, STATEMENT),
    "two signatures, one valid": Forgery(two_signatures, STATEMENT),
    "the signature twice": Forgery(
        change_outer(lambda outer: outer.update(signatures=outer["signatures"] * 2)), STATEMENT
    ),
    "no signature": Forgery(change_outer(lambda outer: outer.update(signatures=[])), STATEMENT),
    "an empty signature": Forgery(change_outer(lambda outer: outer["signatures"][0].update(sig="")), STATEMENT),
    "a short signature": Forgery(
        change_outer(lambda outer: outer["signatures"][0].update(sig=outer["signatures"][0]["sig"][:40])), STATEMENT
    ),
    "a second form of the signature": Forgery(second_form_of_the_signature, STATEMENT),
    "a second form of base64": Forgery(second_form_of_base64, STATEMENT),
    "no base64": Forgery(change_outer(lambda outer: outer.update(payload="%%%%%")), STATEMENT),
    "another id of the key": Forgery(
        change_outer(lambda outer: outer["signatures"][0].update(keyid="0" * 64)), STATEMENT
    ),
    "a further key of the envelope": Forgery(change_outer(lambda outer: {**outer, "note": "x"}), STATEMENT),
    "a key twice in the envelope": Forgery(key_twice_in_the_envelope, STATEMENT),
    "a key twice in the payload": Forgery(key_twice_in_the_payload, STATEMENT),
    "nothing": Forgery(raw(b""), STATEMENT),
    "null": Forgery(raw(b"null\n"), STATEMENT),
    "deep JSON": Forgery(raw(b"[" * 10**6), STATEMENT),
    "a terabyte": Forgery(huge, STATEMENT),
    "UTF-16": Forgery(raw("{}".encode("utf-16")), STATEMENT),
    "no subject": Forgery(change_inner(lambda data: data.update(subject=[])), "study.json"),
    "subjects of another shape": Forgery(change_inner(lambda data: data.update(subject={})), STATEMENT),
    "a path out of the folder": Forgery(
        change_inner(lambda data: a_new_name(data, lambda name: f"../{name}")), "result.json"
    ),
    "a path in a circle": Forgery(
        change_inner(lambda data: a_new_name(data, lambda name: f"cells/../{name}")), "result.json"
    ),
    "an absolute path": Forgery(change_inner(lambda data: a_new_name(data, lambda name: f"/{name}")), "result.json"),
    "a subject twice": Forgery(change_inner(lambda data: data["subject"].append(data["subject"][-1])), STATEMENT),
    "a digest in upper case": Forgery(
        change_inner(lambda data: a_new_digest(data, {"sha256": data["subject"][0]["digest"]["sha256"].upper()})),
        "cells/",
    ),
    "a digest of null": Forgery(change_inner(lambda data: a_new_digest(data, {"sha256": None})), STATEMENT),
    "no digest": Forgery(change_inner(lambda data: a_new_digest(data, {})), STATEMENT),
    "a weaker digest": Forgery(change_inner(lambda data: a_new_digest(data, {"sha1": "0" * 40})), STATEMENT),
    "a statement about something else": Forgery(
        change_inner(lambda data: data.update(predicateType="https://slsa.dev/provenance/v1")), STATEMENT
    ),
    "an older form": Forgery(
        change_inner(lambda data: data.update(_type="https://in-toto.io/Statement/v0.1")), STATEMENT
    ),
}


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


def number_changed(at, case, key):
    """Another number in a result or a record, at any place that holds one."""
    names = sorted([*at.glob("cells/*/result.json"), *at.glob("trainings/*/record.json")])
    path = names[int(integers(key.child("file"), 1, len(names))[0])]
    fields = {"value", "low", "high", "p", "accuracy", "loss"}

    def places(data):
        inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
        for name, one in inner:
            if type(one) is float and name in fields:
                yield data, name
            yield from places(one)

    def change(data):
        found = list(places(data))
        where, name = found[int(integers(key.child("place"), 1, len(found))[0])]
        where[name] = (where[name] + float(uniform(key.child("by"), (1,), 0.01, 1.0)[0])) % 1.0

    rewritten(path, change)


def arrays_moved(at, case, key):
    names = sorted([*at.glob("cells/*/arrays.npz"), *at.glob("trainings/*/kept.npz")])
    path = names[int(integers(key.child("file"), 1, len(names))[0])]
    arrays_changed(
        path, lambda numbers: numbers + np.asarray(1 + int(integers(key.child("by"), 1, 9)[0]), numbers.dtype)
    )


def a_duration_drawn(at, case, key):
    names = sorted(at.glob("*/*/timing.json"))
    path = names[int(integers(key.child("file"), 1, len(names))[0])]
    reseal(path, lambda data: data.update(seconds=1000 + int(integers(key.child("by"), 1, 1000)[0])))


def always(forge):
    """A forgery without a choice."""
    return lambda at, case, key: forge(at, case)


def signed_elsewhere(at, case):
    assert signed.sign(at, case.stranger)[1] == {}


DRAWN = (
    *map(always, (a_message, cells_added, a_cell_removed, values_exchanged, a_cell_beside_the_plan)),
    *[a_duration_drawn, arrays_moved, arrays_moved],
    *[number_changed] * 8,
)
STATEMENTS = (lambda at, case: None, lambda at, case: None, of_another_folder, refreshed, signed_elsewhere)
"""What becomes of the statement; first: nothing."""


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
