"""Results state how they were computed, and a difference is named before the code is blamed."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import threadpoolctl
import torch

from leakgauge.harness.cli.main import AVX2
from leakgauge.harness.core.numerics import UNKNOWN, several, stated, unlike
from leakgauge.harness.core.result import Environment
from leakgauge.harness.core.sinks import LONGEST
from leakgauge.harness.core.stored import from_data, to_data
from leakgauge.harness.gate import baseline
from leakgauge.harness.gate.comparable import about_runs
from leakgauge.harness.gate.compare import compare
from leakgauge.harness.gate.measure import measured
from leakgauge.harness.gate.target import changes
from leakgauge.harness.study import environment
from leakgauge.harness.study.store import load_run
from leakgauge.reports.html import render
from tests import command, gate_case
from tests import report_fixtures as double
from tests.by_rows import by_rows
from tests.doubles import study_table
from tests.report_page import complete
from tests.test_run import contents

FEDERATION = {"clients": 2, "rounds": 1, "batch": 1, "samples": 20, "test_samples": 20, "local_steps": 1}
ATTACK = {"name": "dlg", "evaluations": 20, "target": {"count": 8}}
TABLE = study_table(FEDERATION, [{"name": "gaussian", "noise_std": 0.01}], [ATTACK], limit=False)
SCRIPT = """
import json, sys
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
run_study(resolve(json.loads(sys.argv[1])), sys.argv[2], workers=0)
"""
MAY = "the last digits may differ also with equal code, and one image may look quite different"
OURS = {"vector instructions": "AVX512", "BLAS of numpy": "openblas 1 SkylakeX (1 thread)", "processor": "A"}
OLD = Environment("abc", False, "3.11", {}, "Linux x86_64")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of a tiny study that ran, or was resumed, in a process of its own with these variables."""
    made: dict[tuple[object, ...], Path] = {}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(environment._NUMERICAL)}

    def run(*resumed, **variables):
        key = (*resumed, *variables.items())
        if key not in made:
            made[key] = resumed[0] if resumed else tmp_path_factory.mktemp("ran") / "out"
            words = [sys.executable, "-c", SCRIPT, json.dumps(TABLE), str(made[key])]
            done = subprocess.run(words, capture_output=True, text=True, env=clean | variables)
            assert done.returncode == 0, done.stderr
        return made[key]

    return run


SILENT = {
    "vector level": {"ATEN_CPU_CAPABILITY": "avx2"},
    "no vector unit": {"ATEN_CPU_CAPABILITY": "default"},
    "BLAS and variables": {"OPENBLAS_CORETYPE": "Haswell", "MKL_CBWR": "COMPATIBLE"},
}


@pytest.mark.parametrize("row", SILENT)
@pytest.mark.matrix
def test_how_runs_were_computed_is_named_first(row, ran, tmp_path):
    variables, here, there = SILENT[row], ran(), ran(**SILENT[row])
    ours, theirs = ({} | load_run(folder).numerics[0] for folder in (here, there))
    moved = {name for name in ours | theirs if ours.get(name) != theirs.get(name)}
    assert {name: theirs[name] for name in variables} == variables
    assert row != "no vector unit" or theirs["vector instructions"] == "basic", "torch followed the variable"
    words = [f"{name} {theirs[name]}" for name in moved & {"vector instructions", *variables}]

    found = json.loads(command.call("compare", here, there, "--format", "json").stdout)
    assert found["computed"].startswith("the first run was made with ")
    assert all(word in found["computed"] for word in words)
    assert [found[which]["numerics"] for which in ("first", "second")] == [[ours], [theirs]]
    shown = " ".join(command.call("compare", here, there, COLUMNS="4000").stdout.split())
    assert shown.index(MAY) < shown.index("Measure")

    base, out = tmp_path / "base.json", tmp_path / "check.json"
    baseline.write(baseline.Baseline(measured(load_run(here)), "the first"), base)
    done = command.call("check", there, "--baseline", base, "--accept-baseline", "a test", "--no-rerun", "--json", out)
    warnings = json.loads(out.read_text("utf-8"))["warnings"]
    at = next(at for at, warning in enumerate(warnings) if warning.startswith("this run was made with"))
    assert all(word in warnings[at] for word in words)
    assert "--rerun-base" in warnings[at + 1]
    assert f"warning: {warnings[at]}" in done.stdout
    assert command.call("check", here, "--baseline", base, "--accept-baseline", "a test").stdout.count(MAY) == 0


@pytest.mark.matrix
def test_a_folder_from_two_environments_keeps_its_results_and_says_so(ran, tmp_path):
    here, there = ran(), ran(ATEN_CPU_CAPABILITY="avx2")
    copy = shutil.copytree(here, tmp_path / "mixed")
    (cell,) = (copy / "cells").iterdir()
    shutil.rmtree(cell)
    run = load_run(ran(copy, ATEN_CPU_CAPABILITY="avx2"))
    assert run.trainings == load_run(here).trainings, "the training is kept"
    assert len(run.numerics) == 2
    assert not run.missing
    page = complete(render(run)).text
    assert "These results were made with " in page
    assert MAY in page
    told = command.call("verify", copy).stdout
    assert "these results were made with" in told
    assert "all whole" in told
    assert len(json.loads(command.call("verify", copy, "--json").stdout)["numerics"]) == 2
    assert "ATEN_CPU_CAPABILITY none or avx2" in compare(load_run(here), run).computed
    assert [name for name in (here, there) if MAY in render(load_run(name)) + command.call("verify", name).stdout] == []


@pytest.mark.matrix
def test_variables_that_set_threads_change_no_byte_and_are_not_named(ran):
    one, two = (ran(OMP_NUM_THREADS=number, MKL_NUM_THREADS=number) for number in "12")
    assert contents(one) == contents(two)
    assert compare(load_run(one), load_run(two)).computed == ""
    assert all("(1 thread)" in text for name, text in load_run(two).numerics[0].items() if name.startswith("BLAS"))


@by_rows(
    ("ATEN_CPU_CAPABILITY", "avx2"),
    ("DNNL_MAX_CPU_ISA", "SSE41"),
    ("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX2"),
    ("KMP_DETERMINISTIC_REDUCTION", "1"),
    ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
    ("NPY_DISABLE_CPU_FEATURES", "AVX512F"),
    ("OMP_SCHEDULE", "\udcff"),
    ("ONEDNN_MAX_CPU_ISA", "SSE41"),
    ("OPENBLAS_CORETYPE", "Haswell"),
)
def test_a_variable_that_may_change_last_digits_is_recorded_and_part_of_the_key_of_the_cache(name, value, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    before, key = environment.environment().numerics, environment.numerics()
    assert name not in before
    monkeypatch.setenv(name, value)
    now = environment.environment().numerics
    assert now == before | {name: value.encode(errors="backslashreplace").decode()}
    assert environment.numerics() != key
    json.dumps(now, ensure_ascii=False).encode()


@by_rows("HOME", "LEAKGAUGE_DATA", "AWS_SECRET_ACCESS_KEY", "OMPI_COMM_WORLD_RANK", "KMP_AFFINITY", "OMP_NUM_THREADS")
def test_no_other_variable_is_recorded(name, monkeypatch):
    monkeypatch.setenv(name, "7")
    assert name not in environment.environment().numerics


def test_the_record_states_what_torch_and_the_libraries_use(monkeypatch):
    now = environment.environment().numerics
    known = {one["prefix"]: one for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"}
    texts = [text for name, text in now.items() if name in ("BLAS of numpy", "BLAS of scipy")]
    for one in known.values():
        assert any(one["version"] in text and (one.get("architecture") or "") in text for text in texts)
    assert {"vector instructions", "processor", "BLAS of torch"} <= now.keys()
    assert all(now.values())
    monkeypatch.setattr(torch.cuda, "get_device_name", "card {}".format)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert environment.environment("cuda").numerics == now | {"accelerator": "card cuda"}
    with threadpoolctl.threadpool_limits(2, "blas"):
        assert environment.environment().numerics["BLAS of numpy"].endswith("(2 threads)")


def test_what_a_user_s_package_has_loaded_changes_no_record(monkeypatch):
    before, loaded = environment.environment(), threadpoolctl.threadpool_info()
    place = Path(np.__file__).parents[1] / "faiss.libs" / "libopenblas.so"
    other = {"user_api": "blas", "internal_api": "openblas", "prefix": "libopenblas", "filepath": str(place)}
    other |= {"version": "0", "architecture": "Zen", "num_threads": 9}
    found = SimpleNamespace(info=lambda: [*loaded, other])
    monkeypatch.setattr(environment, "linear_algebra", lambda: found)
    assert environment.environment() == before
    other["filepath"] = "/usr/lib/libopenblas.so"  # of the system: it may be numpy's
    assert environment.environment().numerics["BLAS of libopenblas"] == "openblas 0 Zen (9 threads)"


def test_equal_statements_are_no_difference_and_unknown_is_never_equal():
    def said(*made):
        return unlike({"the first run was": made[0], "the second was": made[1]})

    assert said([OURS], [dict(reversed(OURS.items()))]) == ""
    for unknown in ([], [{}]):
        assert (
            said(unknown, unknown)
            == f"the first run was made with {UNKNOWN}; the second was made with {UNKNOWN}: {MAY}"
        )
        shown = f"the first run was made with vector instructions AVX512; the second was made with {UNKNOWN}: {MAY}"
        assert said([OURS], unknown) == shown
    assert said([OURS], [OURS, {}]).count(UNKNOWN) == 1
    assert several([OURS]) == several([{}]) == several([]) == ""
    assert several([OURS, {}]) == f"these results were made with {UNKNOWN}, vector instructions AVX512: {MAY}"
    assert stated([{}]) == stated([]) == UNKNOWN


def test_vector_instructions_come_first_and_a_long_sentence_is_not_cut():
    theirs = {name: value.replace("1", "2").replace("A", "B") for name, value in OURS.items()} | {"MKL_CBWR": "AVX2"}
    text = unlike({"the first run was": [OURS], "the second was": [theirs]})
    assert text.startswith("the first run was made with vector instructions AVX512, no MKL_CBWR, processor A;")
    assert f"(1 other difference): {MAY}" in text
    assert len(text) < LONGEST


def test_records_and_baselines_of_earlier_versions_are_read_as_unknown(tmp_path):
    assert "numerics" not in to_data(OLD)
    assert from_data(Environment, to_data(OLD)) == OLD
    now = dataclasses.replace(OLD, numerics=OURS)
    assert from_data(Environment, json.loads(json.dumps(to_data(now)))) == now
    held = baseline.Baseline(gate_case.measured(gate_case.measure()), "a reason")
    assert baseline.parse(baseline.to_text(held), "a file") == held
    data = json.loads(baseline.to_text(held))
    del data["measured"]["numerics"]
    old = baseline.parse(json.dumps(data), "a file")
    assert old.measured.numerics == ()
    (first, way_out, *rest) = about_runs(held.measured, old.measured)
    assert f"the baseline was made with {UNKNOWN}" in first
    assert "--rerun-base" in way_out
    assert rest == []
    assert changes(old, old) == ([], [])
    assert changes(old, held) == ([], ["changed in the baseline: how it was computed"])
    for name, one in (("old.json", old), ("new.json", held)):
        baseline.write(one, tmp_path / name)
    shown = command.call("baseline", "diff", tmp_path / "old.json", tmp_path / "new.json").stdout.splitlines()
    assert shown[1].startswith(f"the old baseline was made with {UNKNOWN}; the new one was made with vector")


def test_a_run_states_each_way_in_which_its_results_were_computed():
    run = double.make_run(double.grid([double.GAUSSIAN[0]], [(double.MATCHING, double.PROBE, "server")], (0, 1)))
    assert run.numerics == (double.ARITHMETIC,)
    first, *rest = run.results.values()
    other = dataclasses.replace(first, environment=dataclasses.replace(first.environment, numerics=OURS))
    mixed = dataclasses.replace(run, results={one.cell.id: one for one in (other, *rest)})
    assert len(mixed.numerics) == 2
    assert all(one in mixed.numerics for one in (OURS, double.ARITHMETIC))
    assert measured(mixed).numerics == mixed.numerics


SMALL = """
name = "small"
tasks = [{ data = "digits", model = "mlp-small" }]
federations = [{ clients = 2, rounds = 1, batch = 1, samples = 20, test_samples = 20, local_steps = 1 }]
defenses = [{ name = "none" }]
attacks = [{ name = "prior", guess = "mean", target = { kind = "probe", count = 2 } }]
lineup = false
limit = false
"""


@pytest.mark.matrix
@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_command_keeps_to_the_kernels_of_avx2_and_its_workers_do(workers, tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(environment._NUMERICAL)}
    words = [sys.executable, "-P", "-m", "leakgauge", "run", tmp_path / "small.toml", "-o", tmp_path / "out"]
    set_ = clean | {"LEAKGAUGE_KERNELS": "avx2"}
    done = subprocess.run([*words, "--workers", workers], capture_output=True, text=True, env=set_)
    assert done.returncode == 0, done.stderr
    (stated_,) = load_run(tmp_path / "out").numerics
    assert stated_.items() >= AVX2.items()
    assert stated_["vector instructions"] in ("AVX2", "basic")  # basic: a processor that has no AVX2


def test_numpy_is_imported_after_the_kernels_are_chosen():
    code = "import atexit; from leakgauge.harness.cli.main import main; atexit.register(see); main()"
    see = "def see(): import numpy; print(numpy._core._multiarray_umath.__cpu_features__['X86_V4'])\n"
    words = [sys.executable, "-c", see + code, "--version"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"LEAKGAUGE_KERNELS": "avx2"})
    assert done.stdout.splitlines()[1:] == ["False"], done.stderr


def test_other_kernels_are_refused():
    words = [sys.executable, "-P", "-m", "leakgauge", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"LEAKGAUGE_KERNELS": "sse"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "leakgauge: LEAKGAUGE_KERNELS: expected avx2, got 'sse'\n"
