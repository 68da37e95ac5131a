"""Signed statements: who holds a key says which files the results of a folder are.

    DIR/statement.json                      a DSSE envelope with one Ed25519 signature

Its payload is an in-toto Statement v1. The subjects are all files that count as results, by their SHA-256. The
predicate holds the study, the digests of the code and the environments that the results state, and our version.

Sources: DSSE 1.0 (envelope, and the bytes that are signed), in-toto attestation framework 1.0, RFC 8032 (Ed25519).
Differs: DSSE lets a reader accept any JSON and several signatures. Here, only the bytes that `sign` writes for the key
are accepted, so nothing is read as JSON that the key has not signed.
"""

from __future__ import annotations

import json
import os
import re
import stat
from base64 import b64decode, b64encode
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ImportError as error:
    raise ImportError("cryptography is not installed: from a checkout, pip install '.[sign]'") from error

from leakgauge import __version__
from leakgauge.harness.core.files import MISSING, Damaged, attempt, content, reason
from leakgauge.harness.core.stored import canonical, to_data
from leakgauge.harness.federation.recorder import DATA, LIST
from leakgauge.harness.study import store
from leakgauge.harness.study.store import StoreError

STATEMENT = "statement.json"
_RESULTS = ("study.json", "study*.toml", "cells", "trainings", "parts", LIST, DATA, "rounds", "recording", "client-*")
"""What counts as results, with all that lies in it. Pages, figures, logs and the quarantine do not."""

_MOST, _MOST_STATED = 2**40, 2**26  # maximum bytes of a file, and of a statement: room for 300,000 files
_PAYLOAD = "application/vnd.in-toto+json"
_KIND = {"_type": "https://in-toto.io/Statement/v1", "predicateType": "urn:leakgauge:results:1"}
_ENVELOPE = re.compile(
    rb'\{"payload":"([^"]*)","payloadType":"[^"]*","signatures":\[\{"keyid":"[^"]*","sig":"([^"]*)"\}\]\}\n'
)


def new_key(private: Path) -> Path:
    """Write a new private key, which only its owner may read, and beside it the public key; the path of the latter.

    Raises:
        StoreError: one of the two files exists or cannot be written.
    """
    key, public = Ed25519PrivateKey.generate(), private.with_suffix(".pub.pem")
    if public.exists():  # before there is a private key without a public one
        raise StoreError(f"cannot write {public}: it exists; name another file")
    try:
        with os.fdopen(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()))
    except OSError as error:
        raise StoreError(f"cannot write {private}: {error.strerror or error}; name another file") from error
    store.write_atomically(
        public, key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    )
    return public


def sign(folder: Path, private: Path) -> tuple[int, dict[str, str]]:
    """Write the signed statement of a folder's results; an earlier statement is replaced.

    Returns:
        How many files it covers, and the faults by file. With a fault, nothing is written.

    Raises:
        StoreError: the key cannot be used; the folder holds no results, is being written, or cannot be written.
    """
    key: Ed25519PrivateKey = _key(private, "private")
    if not folder.is_dir():
        raise StoreError(f"no results in {folder}: there is no such folder")
    with store.writing(folder):
        found, faults = _found(folder)
        subjects = {name: attempt(folder / name, _digest, faults, name) for name in found}
        if faults := faults | store.verify(folder)[1]:
            return 0, faults
        run = store.load_run(folder) if "study.json" in found else None
        manifests = (
            store.load(folder / name, store.unsealed, {}) for name in found if name.endswith(f"/{store.MANIFEST}")
        )
        predicate = {
            "leakgauge": __version__,
            "study": run and {"name": run.name, "hash": run.study_hash},
            "code": sorted({one.get("code", "") for one in manifests if one}),
            "environments": [to_data(one) for one in run.environments] if run else [],
        }
        payload = _payload(subjects, predicate)
        signed = _envelope(payload, key.sign(_encoded(payload)), key.public_key())
        if len(signed) > _MOST_STATED:
            raise StoreError(f"cannot sign {folder}: it has too many files: {len(found):,}")
        store.write_atomically(folder / STATEMENT, signed)
    return len(found), {}


def faults_of(folder: Path, public: Path) -> dict[str, str]:
    """Why the results in a folder are not those that this key signed, by file; empty if they are.

    Guarantees:
        Empty only if the key signed the statement, each of its files is there with its digest, and no other file that
        counts as a result is there. No link below the folder is followed, and no name in a statement is a path to read.

    Raises:
        StoreError: the public key cannot be used.
    """
    faults = dict[str, str]()
    stated = attempt(folder / STATEMENT, partial(_stated, _key(public, "public")), faults)
    if stated is None:
        return faults
    found, faults = _found(folder)
    for name in sorted(found):
        if name in stated:
            attempt(folder / name, partial(_digest, stated=stated[name]), faults, name)
        else:
            faults[name] = "is not in the signed statement; sign again if it belongs to the results"
    return {name: f"{MISSING}, but in the signed statement" for name in sorted(stated) if name not in found} | faults


def _found(folder: Path) -> tuple[set[str], dict[str, str]]:
    """The names of all files that count as results, and why others cannot be read."""
    found, faults = set[str](), dict[str, str]()
    todo = [path for name in _RESULTS for path in folder.glob(name)]
    for path in todo:  # which grows
        name = path.relative_to(folder).as_posix()
        inside = attempt(path, _inside, faults, name)
        todo += inside or ()
        if inside is None and name not in faults:
            found.add(name)
    return found, faults


def _inside(path: Path) -> list[Path] | None:
    """What lies in a folder; None: it is none."""
    path.name.encode()  # raises for a name that is no text, which no statement can hold
    return list(path.iterdir()) if stat.S_ISDIR(path.lstat().st_mode) else None


def _digest(path: Path, stated: str | None = None) -> str:
    return sha256(content(path, _MOST, links=False, sha256=stated)).hexdigest()


def _payload(subjects: dict[str, Any], predicate: object) -> bytes:
    listed = [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(subjects.items())]
    return canonical({**_KIND, "subject": listed, "predicate": predicate}).encode()


def _encoded(payload: bytes) -> bytes:
    """The bytes that are signed: DSSE's encoding of type and payload, each with its length."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD), _PAYLOAD.encode(), len(payload), payload)


def _envelope(payload: bytes, signature: bytes, key: Ed25519PublicKey) -> bytes:
    keyid = sha256(key.public_bytes(pem.Encoding.DER, pem.PublicFormat.SubjectPublicKeyInfo)).hexdigest()
    signatures = [{"keyid": keyid, "sig": b64encode(signature).decode()}]
    text = canonical({"payload": b64encode(payload).decode(), "payloadType": _PAYLOAD, "signatures": signatures})
    return f"{text}\n".encode()


def _stated(key: Ed25519PublicKey, path: Path) -> dict[str, str]:
    """The digests by name in a statement that the key has signed; raises Damaged for any other."""
    data = content(path, _MOST_STATED, links=False)
    if (parts := _ENVELOPE.fullmatch(data)) is None:
        raise Damaged("is no envelope with one signature as 'leakgauge sign' writes it")
    payload, signature = map(b64decode, parts.groups())
    refusal = Damaged("is not signed by this key: another key signed it, or it was changed")
    try:
        key.verify(signature, _encoded(payload))
    except InvalidSignature as error:
        raise refusal from error
    if data != _envelope(payload, signature, key):  # bytes that no signature covers
        raise refusal
    statement = json.loads(payload)
    subjects = {one["name"]: str(one["digest"]["sha256"]) for one in statement["subject"]}
    if payload != _payload(subjects, statement["predicate"]):
        raise Damaged("is signed by this key, but is no statement about results")
    return subjects


def _key(path: Path, kind: Literal["private", "public"]) -> Any:
    """The Ed25519 key in a PEM file; raises StoreError."""
    try:
        text = content(path, 2**16)
        key = pem.load_pem_private_key(text, None) if kind == "private" else pem.load_pem_public_key(text)
        if isinstance(key, Ed25519PrivateKey | Ed25519PublicKey):
            return key
        wrong = type(key).__name__
    except Exception as error:  # OSError, ValueError, UnsupportedAlgorithm, TypeError for a password
        wrong = reason(error)
    raise StoreError(f"cannot use {path}: expected a {kind} key of Ed25519 in PEM, without a password; got {wrong}")
