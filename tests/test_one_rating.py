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
from leakgauge.harness.core.result import AuditRecord
from leakgauge.reports.export import rows_as, to_jsonl
from leakgauge.reports.html import render
from leakgauge.reports.sections.answer import answer, headline
from leakgauge.reports.sections.claims import claims
from leakgauge.reports.sections.pictures import gallery
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.tables import to_matrix
from tests import report_fixtures as double
from tests.by_rows import by_rows
from tests.command import call
from tests.report_page import Page, content, part, small, with_trainings
from tests.terminal_text import plain

QUIET = {"limit": False, "progress": False, "minutes": 0.1}


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
    page, matrix, terminal = part(render(run), "attacks"), to_matrix(analysis), plain(run)
    lines = csv.DictReader(io.StringIO(rows_as("csv", run).decode()))
    found = {row["verdict"] for row in lines if row["quantity"] == "ssim" and row["defense"] != "no defense"}
    objects = [json.loads(line) for line in to_jsonl(analysis).splitlines()]
    assert found == {said} == {one["promise"] for one in objects if one["defense"]["name"] != "none"}
    for text in (matrix, terminal, page):
        assert ("not promised" in text) == bool(said)
    assert said in page
    assert analysis.rating(group).excluded == bool(said)
    assert (", against whom nothing is promised" in headline(analysis)[1]) == bool(said)


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
    made, draws = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), torch.Generator().manual_seed(0)
    for weights in made.parameters():
        nn.init.uniform_(weights, -0.125, 0.125, generator=draws)
    return made


def inspected(tmp_path, model, attacks, **changes):
    return leakgauge.inspect(model, records(), folder=tmp_path / "x", attacks=attacks, **QUIET, **changes)


WEAK = "Too weak to tell: the attacks on this training without a defense find nothing"
IDLG = {"name": "idlg", "evaluations": 40, "restarts": 1}


@pytest.mark.parametrize("public", [True, False])
def test_the_headline_of_an_app_that_leaks_says_so_with_pictures_of_granted_records(tmp_path, public):
    run = inspected(tmp_path, net(), ["prior", IDLG], victims=4, public=public)
    analysis = Analysis(run)
    found, (grid,) = content(answer(analysis)), content(gallery(analysis)).grids
    assert (found.sentence, found.badge.words) == ("Without a defense, this training leaks", "Leaks")
    seen = [one.flag for one in found.strip if one.name != "original"]
    assert sum(seen) > 2
    assert found.support.startswith(f"no defense, against server: {sum(seen)} of 4 people identified among 29.")
    shown = [bool(tile.source) for _, row in grid.rows for tile in row]
    shown += [bool(one.tile.source) for one in found.strip]
    assert (all(shown), any(shown)) == (public, public)
    assert any("--show-records" in note for note in grid.notes) != public
    assert "this training leaks" in plain(run)


@by_rows(
        (["membership-cosine"], {"victims": 20}, "Without a defense, this training leaks in part"),
        ([IDLG], {"victims": 4}, "Without a defense, this training leaks"),  # no floor
        (["prior", IDLG | {"evaluations": 1}], {"victims": 4}, WEAK),  # four labels and four of two say little
        (["prior"], {"victims": 4}, WEAK),
        (["prior", IDLG], {"victims": 4, "defense": {"name": "gaussian", "epsilon": 1e9}}, "1 of 1 defense leaks"),
        (["prior", IDLG], {"victims": 4, "defense": {"name": "gaussian", "epsilon": 0.5}},
         "The test of gaussian is too weak to tell"),)  # fmt: skip
def test_the_headline_of_an_inspection_is_what_was_found(attacks, changes, sentence, tmp_path):
    assert headline(Analysis(inspected(tmp_path, net(), attacks, **changes)))[0] == sentence


@pytest.mark.parametrize("defense", [None, "top-k"])
def test_the_headline_says_that_no_attack_fits_and_the_body_why(tmp_path, defense):
    run = inspected(tmp_path, Product(), None, victims=2, batch=2, defense=defense)
    # only the lineup fits, and two candidates are too few
    weak = WEAK if defense is None else "The test of top-k is too weak to tell"
    assert headline(Analysis(run))[0] == weak
    assert "attack idlg was left out: it needs messages of one record" in Page(render(run)).text
    assert weak in plain(run)


def test_an_attack_whose_cells_all_failed_found_nothing_to_say():
    run = double.make_run(small(double.NONE), failed=lambda cell: cell.attack != double.PRIOR)
    assert headline(Analysis(run))[0] == "No attack returned a value"
