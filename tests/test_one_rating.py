"""Terminal, exports and page say the same about a case and an audit: what leaks, to whom it is promised, and where."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re

import pytest
import torch
from torch import nn

import leakgauge
from leakgauge.harness.core.labels import unpromised
from leakgauge.harness.core.result import AuditRecord, Estimate
from leakgauge.reports.export import rows_as, to_jsonl
from leakgauge.reports.html import render
from leakgauge.reports.sections.claims import claims
from leakgauge.reports.sections.leakage import leakage
from leakgauge.reports.sections.pictures import gallery
from leakgauge.reports.sections.verdict import verdict
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.tables import plain, to_matrix
from tests import report_fixtures as double
from tests.by_rows import by_rows
from tests.command import call
from tests.report_page import Page, content, small, with_ssim, with_trainings

QUIET = {"limit": False, "progress": False, "minutes": 0.1}
ATTACKS = [(attack, double.PROBE, "server") for attack in (double.MATCHING, double.MAP, double.PRIOR)]


def of_values(table, *defenses, hits=0):
    """A run with these SSIMs by defense and attack; the first images of `gaussian` under `map` are identified."""
    make = with_ssim(lambda cell: table.get((cell.training.defense.name, cell.attack.name), [0.6] * 8))

    def made(cell):
        found = hits if (cell.training.defense.name, cell.attack.name) == ("gaussian", "map") else 0
        return double.with_estimates(make(cell), make(cell).estimates[0], *double.of_lineups([1.0] * found + [0.0] * 8))

    return double.make_run(double.grid(defenses, ATTACKS, seeds=(0,)), make=made)


def strongest(run):
    """By defense: the attacks that the page marks, and the last column of the matrix for other programs."""
    analysis = Analysis(run)
    (matrix,) = content(leakage(analysis)).matrices
    lines = [line.strip("| ").split(" | ") for line in to_matrix(analysis).splitlines() if line.startswith("|")]
    last = {line[0]: line[-1] for line in lines}
    return {
        row.defense.name: (
            {head.attack.name for head, entry in zip(matrix.heads, row.entries, strict=True) if entry.strongest},
            last[row.defense.text],
        )
        for row in matrix.rows[:-1]
    }


CEILING = {("none", "map"): [0.9, 0.95] * 4, ("none", "matching"): [0.85, 0.9] * 4}


@by_rows(
    ({"matching": [0.1] * 8, "map": [0.601, 0.602] * 4}, 0, {"map"}, "map 0.601, Low"),
    # the interval contains the floor: nothing is marked as strongest
    ({"matching": [0.1] * 8, "map": [0.3, 0.95] * 4}, 0, set(), "nothing beats the floor"),
    # below the floor on average, but people are identified: stronger than a higher mean without a person
    ({"matching": [0.62, 0.63] * 4, "map": [0.2, 0.3] * 4}, 4, {"map"}, "map 0.250, High"),
)
def test_export_and_page_name_the_same_strongest_attack(gaussian, hits, marked, said):
    table = CEILING | {("gaussian", attack): values for attack, values in gaussian.items()}
    run = of_values(table, double.NONE, double.GAUSSIAN[0], hits=hits)
    assert strongest(run)["gaussian"] == (marked, said)
    words = {Analysis(run).rating(group).word for group in Analysis(run).defended}
    assert bool(words & {*LEAKING}) == bool(marked)


def test_an_undefended_row_whose_attack_misses_the_floor_is_too_weak_to_tell_everywhere():
    run = of_values({("none", "map"): [0.5, 0.7] * 4}, double.NONE, double.GAUSSIAN[0])
    assert strongest(run)["no defense"] == (set(), "too weak to tell")
    assert strongest(run)["gaussian"] == (set(), "too weak to tell")
    assert plain(run).count("too weak") >= 4
    assert "ceiling" not in plain(run).split("Ceiling", 1)[1]
    page = Page(render(run)).text
    assert "Too weak to tell: no attack beats the floor" in page
    assert "nothing beats the floor" not in to_matrix(Analysis(run))


def test_without_a_floor_no_surface_says_that_nothing_beats_it():
    cells = double.grid([double.NONE], ATTACKS[:1], seeds=(0,))
    run = double.make_run(cells, make=with_ssim(lambda cell: [0.1, 0.2] * 4))
    run = dataclasses.replace(
        run, results={k: double.with_estimates(r, r.estimates[0]) for k, r in run.results.items()}
    )
    assert strongest(run)["no defense"] == (set(), "no floor was measured")
    assert verdict(Analysis(run)).sentence == "The numbers allow no verdict"


def against(run, *names):
    """The same run, with claims against these adversaries only."""

    def claimed(one):
        pair = {name: dataclasses.replace(getattr(one, name), against=names) for name in ("one_round", "whole_run")}
        return dataclasses.replace(one, **pair)

    return with_trainings(run, claimed)


@by_rows(
    (("participant", "public"), "server", "not promised against server"),
    (("participant", "public"), "aggregator", "not promised against aggregator"),
    (("server",), "server+broadcast", "not promised against server+broadcast"),
    ((), "public", "not promised against public"),
    (("server",), "server+labels", ""),
    (("server",), "aggregator", ""),  # knows the messages, so their sum
    (("server",), "public", ""),
    (("malicious-server",), "server+broadcast", ""),
)
def test_a_row_says_whether_its_adversary_is_one_of_the_claim(names, threat, said):
    attacks = [(attack, double.PROBE, threat) for attack in (double.MATCHING, double.PRIOR)]
    run = against(double.make_run(small(attacks=attacks)), *names)
    analysis = Analysis(run)
    group = analysis.defended[0]
    assert (analysis.unpromised(group), analysis.unpromised(analysis.ceiling(group))) == (said, "")
    page, matrix = Page(render(run)).text, to_matrix(analysis)
    terminal = " ".join(plain(run, width=60).split())
    lines = csv.DictReader(io.StringIO(rows_as("csv", run).decode()))
    found = {row["verdict"] for row in lines if row["quantity"] == "ssim" and row["defense"] != "no defense"}
    objects = [json.loads(line) for line in to_jsonl(analysis).splitlines()]
    assert found == {said} == {one["promise"] for one in objects if one["defense"]["name"] != "none"}
    for text in (matrix, terminal, page):
        assert ("not promised against" in text) == bool(said)
        assert said in text
    assert (said in verdict(analysis).support) or not said


def test_an_adversary_of_another_version_is_nobody_s_promise():
    run = double.make_run(small())
    cell = dataclasses.replace(run.cells[0], threat="oracle")
    training = next(one for one in against(run, "server").trainings.values() if one.spec.defense.name == "gaussian")
    cell = dataclasses.replace(cell, training=training.spec)
    assert unpromised(cell, training) == "not promised against oracle"


def audited(change):
    """`generous` claims 2 and proves 1 in its own federation; its audit differs by `change`."""
    run = double.audited_run((0, 1))
    here = next(one.one_round for one in run.trainings.values() if one.spec.defense.name == "generous")
    terms = {"delta": here.delta, "horizon": here.horizon, "threat": "server"} | change
    audit = double.audit(here.epsilon, here.proved.epsilon, 0.5, here.unit)
    return with_trainings(run, lambda one: dataclasses.replace(one, audited=dataclasses.replace(audit, **terms)))


@by_rows({}, {"horizon": "whole run", "rounds": 20}, {"delta": 1e-9}, {"proved": 84.36}, {"threat": "oracle"},
     {"unit": "client"}, {"claimed": None}, {"horizon": "5 rounds"})  # fmt: skip
def test_a_bound_has_claim_and_proof_of_its_own_audit_in_its_own_line(change):
    run = audited(change)
    row = next(row for row in content(claims(Analysis(run))).rows if row.defense.name == "generous")
    (line,) = [line for line in row.lines if line.audited]
    assert line.horizon.endswith(", audit") == bool(change)
    audit: AuditRecord = next(iter(run.trainings.values())).audited
    shown = ["∞ (nothing promised)" if audit.claimed is None else f"{audit.claimed:.4g}", f"{audit.proved:.4g}"]
    assert [line.claimed.epsilon, line.proved.epsilon] == shown
    assert line.horizon.startswith(audit.horizon)
    said = " ".join(plain(run).split()).partition("generous: audited ")[2].partition(" d = 36")[0]
    for text in (f"({95} %, n = 1000, {audit.threat})", f"proved {audit.proved:.4g} per {audit.unit}", audit.horizon):
        assert text in said


def test_rows_of_an_audit_have_its_federation_and_each_bound_its_confidence():
    run = audited({"rounds": 20, "clients": 3})
    lines = [one for one in run.frame().to_dict("records") if one["quantity"].startswith("audit")]
    assert {(one["clients"], one["rounds"]) for one in lines} == {(3, 20)}
    levels = {one["quantity"]: one["level"] for one in lines}
    assert (levels["audited_epsilon"], levels["audited_strict"], levels["audited_ceiling"]) == (0.95, 0.999, 0.999)


@pytest.mark.parametrize("name", ["laplace", "piecewise"])
def test_the_audit_command_states_its_federation_and_the_bound_that_decides(name):
    said = call("audit", name, "--trials", "30").stdout
    found = json.loads(call("audit", name, "--trials", "30", "--json").stdout)
    size = "clients {clients}, rounds {rounds}, d {dim}".format(**found["setting"])
    assert f"claimed, proved and audited in the same federation: {size}" in said
    decides = re.search(r"verdict  by epsilon >= (\S+?)[ ,].*confidence 0.999, by (\S+)", said)
    assert decides.groups() == (f"{float(found['audited']['strict']):.4g}", found["audited"]["threat"])


# inspect


class Product(nn.Module):
    """No dense last layer, so that no label can be inferred."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.1, 0.1, 640).reshape(64, 10))

    def forward(self, x):
        return torch.tanh(x.flatten(1) @ self.weight)


def records():
    return (torch.arange(60 * 64).reshape(60, 1, 8, 8) * 0.618) % 1.0, torch.arange(60) % 10


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def inspected(tmp_path, model, attacks, **changes):
    return leakgauge.inspect(model, records(), folder=tmp_path / "x", attacks=attacks, **QUIET, **changes)


IDLG = {"name": "idlg", "evaluations": 40, "restarts": 1}


@pytest.mark.parametrize("public", [True, False])
def test_the_headline_of_an_app_that_leaks_says_so_with_pictures_of_granted_records(tmp_path, public):
    run = inspected(tmp_path, net(), ["prior", IDLG], victims=4, public=public)
    analysis = Analysis(run)
    found, (grid,) = verdict(analysis), content(gallery(analysis)).grids
    assert (found.sentence, found.badge.words) == ("Without a defense, this training leaks", "Leaks")
    assert "Inputs are reconstructed" in found.support
    assert (found.figures[1][1] != "0", found.figures[1][2]) == (True, "of 4")
    shown = [bool(tile.source) for _, row in grid.rows for tile in row]
    assert (all(shown), any(shown)) == (public, public)
    assert any("--show-records" in note for note in grid.notes) != public
    assert "this training leaks" in plain(run)


@by_rows(
        (["membership-cosine"], {"victims": 20}, "Without a defense, this training leaks"),
        ([IDLG], {"victims": 4}, "Without a defense, this training leaks"),  # no floor
        (["prior", IDLG | {"evaluations": 1}], {"victims": 4}, "Too weak to tell: no attack beats the floor"),
        (["prior"], {"victims": 4}, "Too weak to tell: no attack beats the floor"),
        (["prior", IDLG], {"victims": 4, "defense": {"name": "gaussian", "epsilon": 1e9}},
         "1 of 1 defense leaks under the attacks that ran"),
        (["prior", IDLG], {"victims": 4, "defense": {"name": "gaussian", "epsilon": 0.5}},
         "Too weak to tell: no attack beats the floor"),)  # fmt: skip
def test_the_headline_of_an_inspection_is_what_was_found(attacks, changes, sentence, tmp_path):
    assert verdict(Analysis(inspected(tmp_path, net(), attacks, **changes))).sentence == sentence


@pytest.mark.parametrize("defense", [None, "top-k"])
def test_the_headline_says_that_no_attack_fits_and_the_body_why(tmp_path, defense):
    run = inspected(tmp_path, Product(), None, victims=2, batch=2, defense=defense)
    found = verdict(Analysis(run))
    # only the lineup fits, and two candidates are too few
    assert found.sentence == "Too weak to tell: no attack beats the floor"
    assert "attack idlg was left out: it needs messages of one record" in Page(render(run)).text
    assert "Too weak to tell" in plain(run)


def test_an_attack_whose_cells_all_failed_found_nothing_to_say():
    run = double.make_run(small(double.NONE), failed=lambda cell: cell.attack != double.PRIOR)
    assert verdict(Analysis(run)).sentence == "No attack returned a value"


def test_a_membership_attack_that_does_not_exceed_chance_is_too_weak_to_tell():
    def made(cell):
        auc = Estimate("auc", 0.52, 0.4, 0.6, 40, "DeLong", higher_leaks=True)
        return double.with_estimates(double.result_of(cell), auc)

    attacks = [(double.THRESHOLD, dataclasses.replace(double.PROBE, kind="members"), "server")]
    run = double.make_run(small(double.NONE, attacks=attacks), make=made)
    assert verdict(Analysis(run)).sentence == "Too weak to tell: no attack beats the floor"
