"""The stored form: ids of questions do not follow names in code, and files of other versions are read or named."""

import dataclasses
import json
import re

import pytest

from leakgauge.harness.core import result, stored
from leakgauge.harness.core.cell import Cell, FederationSpec, Malice, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.stored import canonical, fingerprint, from_data, to_data
from leakgauge.harness.study.goal import Goal
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.store import Store, StoreError, load_run, verify
from leakgauge.harness.study.study import resolve
from tests.stored import as_written_by_version_1
from tests.test_integrity import study

PLAIN = TrainingSpec(TaskSpec("digits", "mlp-small"), FederationSpec(), PartSpec("none"), 0)
SQSGD = dataclasses.replace(PLAIN, defense=PartSpec("sqsgd", {"epsilon": 8.0, "reclip": True}))
RMIA = {"mode": "online", "shadows": 4, "offline_a": 0.3, "simulate": False}
MALICE = dataclasses.replace(PLAIN, malice=Malice(PartSpec("imprint", {"bins": 3}), Target(round=1)))
IDS = {
    "a4f2635299526f43": PLAIN,
    "d0b49856f2be1622": dataclasses.replace(PLAIN, audit=20, strict=True, seed=7),
    "c56e1435045e31d6": dataclasses.replace(PLAIN, federation=FederationSpec(partition="sizes", sizes=(4, 5), lr=1e-5)),
    "86650c7aca4eb649": SQSGD,
    "611be34584163562": dataclasses.replace(SQSGD, defense=PartSpec("sqsgd", {"reclip": False})),
    "50c62ed90f015ae0": MALICE,
    "e1e8c54f7f3ffdb5": Cell(PLAIN, PartSpec("map", {"evaluations": 500}), Target(), "server+labels"),
    "fbfa3e27fb1161e6": Cell(
        PLAIN,
        PartSpec("rmia", RMIA | {"temperature": 1.0, "variant": "online", "weight": 0.5}),
        Target(kind="members", count=3),
        "public",
    ),
    "27419fff549ad0a5": Cell(PLAIN, PartSpec("prior"), Target(count=3, batch=2), "server", limit=False),
}
"""Ids of stored results. A change of code must leave them: results would no longer be found."""


@pytest.mark.parametrize("name", IDS)
def test_the_ids_of_stored_results_stay(name):
    question = IDS[name]
    assert question.id == name
    assert from_data(type(question), to_data(question)) == question


def test_every_entry_of_the_tables_names_a_field():
    for name in stored.OMITTED:
        kind, field = name.split(".")
        owner = Goal if kind == "Goal" else globals().get(kind) or getattr(result, kind)
        assert field in {one.name for one in dataclasses.fields(owner)}, name


def test_only_values_at_their_first_default_are_left_out():
    assert "strict" not in to_data(PLAIN)
    assert to_data(dataclasses.replace(PLAIN, strict=True))["strict"] is True
    assert to_data(PartSpec("x", {"strict": False}))["parameters"] == {"strict": False}
    assert PartSpec("sqsgd", {"reclip": True}).key == "sqsgd"
    assert PartSpec("sqsgd", {"reclip": False}).key == "sqsgd(reclip=False)"


def test_nan_has_no_stored_form_and_order_of_keys_no_meaning():
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical({"a": float("nan")})
    assert fingerprint({"a": 1, "b": 2}) == fingerprint(json.loads('{"b": 2, "a": 1}'))
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.5})


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    run_study(study(), folder, workers=0)
    return folder


def test_a_folder_of_version_1_loads_verifies_and_is_not_run_again(reference, tmp_path):
    folder = as_written_by_version_1(reference, tmp_path / "old")
    now, before = load_run(reference), load_run(folder)
    assert (before.results, before.trainings) == (now.results, now.trainings)
    assert verify(folder)[1] == {}
    paths = [*folder.glob("*/*/result.json"), *folder.glob("*/*/record.json")]
    times = {path: path.stat().st_mtime_ns for path in paths}
    assert len(times) > 3
    run_study(study(), folder, workers=0)
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize("version", [0, 3, "two", None])
def test_a_record_of_an_unknown_version_is_named(reference, tmp_path, version):
    folder = as_written_by_version_1(reference, tmp_path / "odd", version=version)
    (first, *_), store = load_run(reference).trainings, Store(folder)
    fault = store.examine(store.training(first)).faults["record.json"]
    assert re.fullmatch(f"has the stored form {version}, .*; this one reads 1 to 2", fault)


def test_a_folder_without_digests_is_called_older(reference, tmp_path):
    folder = as_written_by_version_1(reference, tmp_path / "older")
    data = json.loads((folder / "study.json").read_text("utf-8"))
    del data["digest"]
    (folder / "study.json").write_text(json.dumps(data), "utf-8")
    with pytest.raises(StoreError, match="made by a version of leakgauge that is too old to be read"):
        load_run(folder)


def test_every_record_of_a_run_reads_back(reference):
    for record in [*load_run(reference).trainings.values(), *load_run(reference).results.values()]:
        assert from_data(type(record), to_data(record)) == record


def test_a_study_without_later_options_has_the_ids_of_earlier_versions():
    table = {"name": "x", "tasks": [{"data": "digits", "model": "linear"}], "defenses": [{"name": "none"}]}
    (cell,) = resolve(table | {"federations": [{"clients": 4, "rounds": 1}]}).cells
    assert {"labels", "sizes", "interim_samples"}.isdisjoint(to_data(cell)["training"]["federation"])
    assert {"audit", "malice", "strict"}.isdisjoint(to_data(cell)["training"])
