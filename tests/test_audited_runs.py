"""A study with audits: what is stored, that it repeats, and that a failed audit does not fail the training."""

import dataclasses
import math
import shutil
from dataclasses import dataclass

import pytest

from leakgauge.harness.audit.standalone import MOST_ROUNDS, audit_for_study
from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.result import Flag
from leakgauge.harness.core.rng import Key
from leakgauge.harness.study.prepare import prepare
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.store import Store, load_run
from leakgauge.harness.study.study import resolve
from leakgauge.reports.html import render
from tests.audit_case import setting_of
from tests.doubles import Counting, nothing, study_table
from tests.report_page import complete
from tests.stored import rewrite
from tests.test_run import ECHO, contents

CHOOSY = "tests.test_audited_runs:Choosy"
KEY = Key(0, ("training", "audit"))
SMALL = dataclasses.replace(setting_of(650), clients=4, participants=4, rounds=2, steps=1, batch=32, samples=20)


@dataclass(frozen=True)
class Choosy(Counting):
    """A defense without a claim for a model as small as that of an audit."""

    def claim(self, history, setting):
        if setting.dim < 100:
            raise ValueError("expected d >= 100,\ngot d=36")
        return nothing(history)


def study(audit=20):
    """A study of three trainings with one cell each."""
    federation = {"clients": 4, "rounds": 2, "samples": 80, "test_samples": 50, "local_steps": 1}
    defenses = ["none", {"name": "laplace", "epsilon": 1.0}, CHOOSY]
    audited = {"audit": audit} if audit else {}
    return resolve(study_table(federation, defenses, [{"name": ECHO, "target": {"count": 1}}], **audited))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audited")
    assert len(run_study(study(), folder, workers=0).results) == 3
    return folder


def by_defense(run):
    return {record.spec.defense.name: record for record in run.trainings.values()}


def test_a_run_stores_the_audit_with_the_claim_of_the_small_federation(reference):
    found = by_defense(load_run(reference))
    audit = found["laplace"].audited
    assert (audit.claimed, audit.unit, audit.horizon, audit.rounds) == (1.0, "coordinate", "one round", 1)
    assert (audit.trials, audit.confidence, audit.threat) == (20, 0.95, "colluding-server")
    assert (audit.clients, audit.samples, audit.dim) == (3, 20, 36)
    assert audit.dim != found["laplace"].dim
    assert 0 <= audit.epsilon_lower <= 1.0
    assert not audit.refutes
    nothing_promised = found["none"].audited
    assert (nothing_promised.claimed, nothing_promised.proved) == (None, None)
    assert (nothing_promised.verdict, nothing_promised.refutes) == ("NOTHING PROMISED", False)
    rate = 0.025 ** (1 / 20)  # Clopper-Pearson of 20 of 20 right
    assert nothing_promised.epsilon_lower == pytest.approx(math.log(rate / (1 - rate)))
    setting, laplace = prepare(found["laplace"].spec, reference).setting, found["laplace"].spec.defense
    assert audit == audit_for_study(PartSpec("laplace", laplace.parameters), setting, 20, KEY, most_samples=20)
    assert (audit.code, audit.contradictions, audit.fit.rejects) == ("CONSISTENT", (), ())


def test_an_impossible_audit_leaves_a_note_and_the_training(reference):
    record = by_defense(load_run(reference))[CHOOSY]
    assert record.audited is None
    (flag,) = (flag for flag in record.flags if flag.code == "not-audited")
    assert flag == Flag("not-audited", "the audit could not be made: expected d >= 100, got d=36", "note")


def test_a_resumed_run_keeps_its_audits_and_has_the_same_bytes(reference, tmp_path):
    shutil.copytree(reference, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "cells")
    kept, lost, *_ = sorted((tmp_path / "trainings").iterdir())
    shutil.rmtree(lost)
    before = (kept / "record.json").stat().st_mtime_ns
    run_study(study(), tmp_path, workers=0)
    assert contents(tmp_path) == contents(reference)
    assert (kept / "record.json").stat().st_mtime_ns == before


def test_the_audit_changes_nothing_else_in_a_training(reference, tmp_path):
    audited, plain = by_defense(load_run(reference)), by_defense(run_study(study(audit=0), tmp_path, workers=0))
    for name, record in plain.items():
        assert record.audited is None
        assert record.digest == audited[name].digest
        assert record.one_round == audited[name].one_round
        assert record.spec.id != audited[name].spec.id


def test_a_record_from_before_there_were_audits_is_read(reference, tmp_path):
    plain = by_defense(run_study(study(audit=0), tmp_path, workers=0))["none"]
    store = Store(tmp_path)
    path = store.training(plain.spec.id) / "record.json"
    rewrite(path, lambda data: {key: value for key, value in data.items() if key != "audited"})
    assert store.read_training(plain.spec.id) == plain


def test_the_report_and_the_download_show_it(reference):
    run = load_run(reference)
    text = complete(render(run)).text
    assert "95 %, n = 20, server" in text
    assert "3 clients, d = 36" in text
    assert "the audit could not be made" in text
    frame = run.frame()
    claimed, audited = (frame[frame.quantity == f"audit{name}_epsilon"] for name in ("_claimed", "ed"))
    assert claimed.set_index("defense").verdict["no defense"] == "NOTHING PROMISED"
    assert set(audited[audited.defense.str.startswith("laplace")].n) == {20, 100}


@pytest.mark.matrix
def test_at_most_twenty_rounds_of_a_whole_run_are_audited():
    udp = PartSpec("udp", {})
    long = dataclasses.replace(SMALL, rounds=50)
    assert [audit_for_study(udp, one, 20, KEY).rounds for one in (SMALL, long)] == [2, MOST_ROUNDS]
    assert audit_for_study(PartSpec("laplace", {}), long, 20, KEY).rounds == 1


@pytest.mark.matrix
def test_an_audit_above_its_claim_refutes_it():
    found = audit_for_study(PartSpec("jopeq", {"epsilon": 2.0, "gamma": 10.0}), SMALL, 300, KEY)
    assert found.refutes
    assert (found.verdict, found.claimed, found.proved) == ("BROKEN", 2.0, None)
    assert found.epsilon_lower > 2.0
