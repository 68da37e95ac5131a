"""Audits and claims of earlier studies: the same bytes as fresh ones, or not used at all."""

import dataclasses
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from leakgauge.harness.audit.claims import claim_to_data, prepare, record_claim
from leakgauge.harness.audit.standalone import audit_for_study
from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.contract import claim_of
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.result import AuditRecord, ClaimRecord
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stored import to_data
from leakgauge.harness.federation import registry
from leakgauge.harness.study import environment, training
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.store import sealed, to_json, unsealed
from leakgauge.harness.study.study import resolve
from leakgauge.harness.study.training import known
from tests.audit_case import setting_of
from tests.by_rows import by_rows
from tests.command import call
from tests.doubles import study_table
from tests.test_run import ECHO

LAPLACE = PartSpec("laplace", {"epsilon": 1.0})
SMALL = dataclasses.replace(setting_of(650), clients=4, participants=4, rounds=2, steps=1, batch=32, samples=20)
FEDERATION = {"clients": [4, 5], "rounds": 2, "samples": 80, "test_samples": 50, "local_steps": 1}
DEFENSES = [{"name": "laplace", "epsilon": 1.0}, "tests.doubles:Counting"]
TABLE = study_table(FEDERATION, DEFENSES, [{"name": ECHO, "target": {"count": 1}}], audit=20)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of answers, for code that is not newer than this process."""
    monkeypatch.setenv("LEAKGAUGE_CACHE", str(tmp_path))
    monkeypatch.setattr(training, "_LOADED", float("inf"))
    monkeypatch.setattr(training, "_WORTH", 0.0)
    return tmp_path / "audits"


def audited():
    return audit_for_study(LAPLACE, SMALL, 20, Key(0, ("audit",)))


@pytest.fixture(scope="module")
def fresh():
    return audited()


def never():
    raise AssertionError("an answer that is known was computed again")


def entry(folder):
    (found,) = folder.rglob("*.json")
    return found


def ask(compute, defense=LAPLACE, **question):
    return known(AuditRecord, defense, {"trials": 20, **question}, compute)


@pytest.mark.matrix
def test_a_known_audit_has_every_byte_of_a_fresh_one(folder, fresh):
    assert ask(lambda: fresh) is fresh
    again = ask(never)
    assert again == fresh
    assert to_json(to_data(again)) == to_json(to_data(audited()))


@pytest.mark.parametrize("name", [name for name in registry.classes("defense") if name != "mvu"])
@pytest.mark.matrix
def test_a_known_claim_has_every_byte_of_a_fresh_one(folder, name):
    federation = prepare(name, {}, {"dim": 500}, 2, None, {**TRAINING})
    claim = claim_of(federation.defense, federation.history, federation.setting)
    made = known(ClaimRecord, PartSpec(name, {}), claim_to_data(claim), lambda: record_claim(claim))
    again = known(ClaimRecord, PartSpec(name, {}), claim_to_data(claim), never)
    assert to_json(to_data(again)) == to_json(to_data(made))
    assert "..." not in json.dumps(claim_to_data(claim)), "numpy leaves the middle of a long array out"


TRAINING = {"dim": 500, "clients": 4, "participants": 4, "samples": 20, "steps": 1, "batch": 5, "lr": 0.1} | {
    "momentum": 0.0,
    "sends": "update",
}


@by_rows("digit", "cut", "empty", "question", "sealed again with another question", "another entry", "not JSON")
def test_an_entry_that_is_not_what_was_written_is_computed_again(change, folder, fresh):
    ask(lambda: fresh)
    path = entry(folder)
    content = path.read_bytes()
    data = unsealed(content)
    if change == "digit":
        content = content.replace(b'"trials": 20', b'"trials": 30', 1)
    elif change == "question":
        content = content.replace(b'"laplace"', b'"gaussian"', 1)
    elif change == "sealed again with another question":
        data["asked"]["question"]["trials"] = 300
        content = sealed(data)
    elif change == "another entry":
        ask(lambda: fresh, rounds=7)
        (other,) = set(folder.rglob("*.json")) - {path}
        content = other.read_bytes()
    else:
        content = {"cut": content[: len(content) // 2], "empty": b"", "not JSON": b"\xff" * 40}[change]
    assert content != path.read_bytes()
    path.write_bytes(content)
    computed = dataclasses.replace(fresh, trials=21)
    assert ask(lambda: computed) is computed
    assert ask(never) == computed, "the entry is replaced"


def test_other_questions_and_other_code_are_computed(folder, fresh, monkeypatch):
    ask(lambda: fresh)
    for other in ({"trials": 21}, {"rounds": 3}, {"key": "Key(seed=1)"}, {"defense": PartSpec("laplace", {})}):
        with pytest.raises(AssertionError, match="computed again"):
            ask(never, **other)
    with pytest.raises(AssertionError, match="computed again"):
        known(ClaimRecord, LAPLACE, {"trials": 20}, never)
    with monkeypatch.context() as changed:
        changed.setattr(environment, "package", lambda: "another digest of the sources")
        with pytest.raises(AssertionError, match="computed again"):
            ask(never)
    with monkeypatch.context() as changed:
        changed.setenv("MKL_CBWR", "COMPATIBLE")
        with pytest.raises(AssertionError, match="computed again"):
            ask(never)
    assert ask(never) == fresh


def test_an_edit_while_the_process_runs_makes_no_entry_and_reads_none(folder, fresh, monkeypatch):
    # its digest is that of the files, which is no longer that of the code in memory
    ask(lambda: fresh)
    monkeypatch.setattr(training, "_LOADED", 0.0)
    computed = dataclasses.replace(fresh, trials=21)
    assert ask(lambda: computed) is computed
    assert ask(lambda: computed, rounds=9) is computed
    assert len(list(folder.rglob("*.json"))) == 1


def test_off_reads_and_writes_nothing(folder, fresh, monkeypatch):
    monkeypatch.setenv("LEAKGAUGE_CACHE", "off")
    assert environment.cache_folder() is None
    assert ask(lambda: fresh) is fresh
    assert not folder.exists()


@pytest.mark.parametrize("command", ["gate", "check", "run --fresh-audits"])
def test_a_gate_and_a_run_that_is_asked_to_read_no_stored_answer(folder, monkeypatch, command):
    seen = []

    def load(*_, **__):
        seen.append(environment.cache_folder())
        raise StudyError("a study", ["nothing to do"])

    monkeypatch.setattr("leakgauge.harness.gate.target.trusted", load)
    monkeypatch.setattr("leakgauge.harness.study.study.load_study", load)
    monkeypatch.setattr("leakgauge.harness.study.store.load_run", load)
    name, *options = command.split()
    baseline = [] if name == "run" else ["--baseline", "a.json"]
    out = [] if name == "check" else ["-o", str(folder)]
    assert call(name, "smoke", *baseline, *out, *options).exit_code == 2
    assert seen == [None]
    assert environment.cache_folder() is not None, "only meanwhile"


def test_the_tests_themselves_use_no_stored_audit():
    assert os.environ["LEAKGAUGE_CACHE"] == "off"


def test_without_a_folder_named_it_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("LEAKGAUGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.cache_folder() == tmp_path / "leakgauge"


@pytest.mark.parametrize("broken", ["a file", "infinite"])
def test_what_cannot_be_stored_is_computed_and_returned(folder, fresh, broken):
    if broken == "a file":
        folder.write_text("no folder")
    else:
        fresh = dataclasses.replace(fresh, epsilon_lower=float("inf"))
    assert ask(lambda: fresh) is fresh
    assert ask(lambda: fresh) is fresh


def test_an_answer_that_reads_back_with_other_bytes_is_not_stored(folder, fresh):
    whole = dataclasses.replace(fresh, epsilon_lower=0)  # 0, which is read as 0.0
    assert ask(lambda: whole) is whole
    assert not list(folder.rglob("*.json"))


@pytest.mark.matrix
def test_many_at_once_read_whole_answers(folder, fresh):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: ask(lambda: fresh, rounds=number % 4), range(64)))
    assert found == [fresh] * 64
    assert len(list(folder.rglob("*.json"))) == 4
    assert not list(folder.rglob(".*")), "no temporary file stays"


def test_entries_of_old_code_are_removed(folder, fresh, monkeypatch):
    for number in range(12):
        monkeypatch.setattr(environment, "package", lambda number=number: f"code {number}")
        ask(lambda: fresh)
        os.utime(max(folder.iterdir(), key=lambda one: one.stat().st_mtime), (number, number))
    assert len(list(folder.iterdir())) == 8
    ask(never)


@pytest.mark.matrix
def test_studies_share_the_audits_of_shipped_defenses_and_no_byte_of_a_result_tells(folder, tmp_path, monkeypatch):
    first, second, off = tmp_path / "first", tmp_path / "second", tmp_path / "off"
    assert not run_study(resolve(TABLE), first, workers=0).failures
    kept = {path: json.loads(path.read_bytes())["asked"] for path in folder.rglob("*.json")}
    assert {asked["defense"]["name"] for asked in kept.values()} == {"laplace"}, "none of somebody's module"
    # four clients or five: the audits look at both sizes
    assert sum(asked["kind"] == "AuditRecord" for asked in kept.values()) == 2
    monkeypatch.setattr("leakgauge.harness.study.training.audit_for_study", lambda spec, *_: counted(spec, _))
    assert not run_study(resolve(TABLE), second, workers=0).failures
    monkeypatch.undo()
    assert os.environ["LEAKGAUGE_CACHE"] == "off"
    assert not run_study(resolve(TABLE), off, workers=0).failures
    assert records(first) == records(second) == records(off)
    shutil.rmtree(folder)


def counted(spec, rest):
    """An audit that only somebody's defense may still ask for."""
    assert spec.name == "tests.doubles:Counting"
    return audit_for_study(spec, *rest)


def records(folder):
    return {path.parent.name: path.read_bytes() for path in folder.rglob("record.json")}
