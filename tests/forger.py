"""A forger of signed results: what one who lacks the key, or has it and lies, may write."""

import base64
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives import serialization

from leakgauge.harness.core.rng import integers, uniform
from leakgauge.harness.study import signed
from leakgauge.harness.study.signed import STATEMENT
from leakgauge.harness.study.store import Store, sealed
from tests.command import call
from tests.stored import listed, rewrite
from tests.test_recording import written

TYPE = "application/vnd.in-toto+json"


ORDER = 2**252 + 27742317777372353535851937790883648493  # of the group of Ed25519 (RFC 8032, section 5.1)


class Case(NamedTuple):
    """A signed folder, a larger one of the same study that the same key signed, the key, and a stranger's."""

    folder: Path
    larger: Path
    key: Path
    public: Path
    stranger: Path


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
