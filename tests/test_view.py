"""`leakgauge view`: the pages of a folder of runs, from a server that only reads, or as files."""

import dataclasses
import http.client
import os
import re
import shutil
import sys
import threading
from pathlib import Path
from types import ModuleType
from urllib.parse import quote, unquote

import pytest

from leakgauge.harness.cli.view import Runs, Server
from leakgauge.harness.core.cell import PartSpec, Target
from leakgauge.harness.core.rating import Ratings, Word
from leakgauge.harness.core.rows import rows
from leakgauge.harness.study.store import Store, load_run
from leakgauge.reports.sections import results
from leakgauge.reports.sections.ratings import WORDS
from leakgauge.reports.view import Links
from tests import report_fixtures as double
from tests.browser_case import HOSTILE, chromium, tab
from tests.command import call, refused
from tests.report_page import Page, complete
from tests.stored import on_disk

ASKED = [(attack, double.PROBE, "server") for attack in (double.MATCHING, double.MAP, double.PRIOR)]
ASKED += [(double.THRESHOLD, Target("members", count=200), "public")]
CELLS = double.grid([double.NONE, double.GAUSSIAN[1], double.LAPLACE[1]], ASKED, (0,))
FAILED, MISSING = CELLS[-1], CELLS[-2]
ODD = "a <b>&\"' %2F"
LINKS = Links()
LOG = [
    "start  training of gaussian clip=1, epsilon=4, delta=1e-5, seed 0",
    "done   gaussian clip=1, epsilon=4, delta=1e-5 under map, server, probe, round 0, seed 0: ssim 0.5",
    "done   gaussian clip=1, epsilon=4, delta=1e-5 under map weight=20, prior=tv, server, probe, round 0, seed 0: ssim",
    "start  training of gaussian clip=1, epsilon=4, delta=1e-5, seed 10",
    "start  training of gaussian clip=1, epsilon=4, delta=1e-53, seed 0",
    "start  training of laplace+gaussian clip=1, epsilon=4, delta=1e-5, seed 0",
    "done   gaussian clip=1, epsilon=4, delta=1e-5 under map weight=2, prior=tv, server, probe, round 0, seed 0: ssim",
    "done   gaussian clip=1, epsilon=4, delta=1e-5 under map, eavesdropper, probe, round 0, seed 0: ssim 0.5",
]
"""The first three lines are about one cell."""


def runs(folder):
    whole = double.make_run(CELLS, failed=lambda cell: cell == FAILED, missing=lambda cell: cell == MISSING)
    on_disk(whole, folder / "whole")
    (folder / "whole" / "run.log").write_text("\n".join(LOG))
    (folder / "whole" / "dossier.html").write_text("<!doctype html><title>dossier</title>")
    hostile = [PartSpec(name, {"epsilon": 2.0}) for name in HOSTILE]
    on_disk(double.make_run(double.grid(hostile, ASKED[:2], (0,)), name=HOSTILE[0]), folder / "deep" / ODD)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def server(folder):
    with Server(Runs(folder)) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def ask(server):
    """A request; returns the answer and its content."""

    def asked(path, method="GET", **headers):
        connection = http.client.HTTPConnection(server.address, timeout=60)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        content = answer.read().decode()
        connection.close()
        return answer, content

    return asked


def page(content):
    return complete(content.replace("None", ""))


def links(content):
    return [tag["href"] for tag in Page(content).all("a") if not tag["href"].startswith(("#", "data:"))]


def test_every_link_leads_to_a_page_and_every_page_is_reached_from_the_first(ask):
    seen, left = {}, ["/", f"/compare?run=whole&run={quote(f'deep/{ODD}')}"]
    while left:
        path = left.pop()
        answer, seen[path] = ask(path)
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8"), path
        assert "window.ran = 1<" not in seen[path]
        assert "could not be built" not in seen[path]
        left += [one for one in links(seen[path]) if one not in seen and one not in left]
    cells = [path for path in seen if "/cell/" in path]
    assert len(cells) == len(CELLS) + 2 * len(HOSTILE)
    assert {path.rpartition("/")[2] for path in seen} >= {"whole", "report", "dossier"}
    assert all(Page(text).open == [] for text in seen.values())


def test_the_list_has_progress_ratings_and_commits(ask, folder):
    text = page(ask("/")[1]).text
    assert f"{len(CELLS) - 2} of {len(CELLS)} 1 failed 1 missing" in text
    assert "4f0c2d7a4f" in text


@pytest.mark.parametrize("name", ["whole", f"deep/{ODD}"])
def test_all_runs_one_run_and_the_core_show_the_same_ratings(ask, folder, name):
    rated = Ratings(load_run(folder / name))
    keys = dict.fromkeys((one.setting, one.defense) for one in rated.all if one.defense != "none")
    first = [rated.of(*key)[0].word for key in keys]
    row = re.search(rf'<tr><th scope="row"><a href="/run/{re.escape(quote(name, safe=""))}">.*?</tr>', ask("/")[1])[0]
    assert f">{WORDS[min(first, key=[*Word].index)].words}<" in row
    assert re.findall(r'<td class="num">(\d+)</td>', row) == [str(first.count(word)) for word in Word]
    table = ask(f"/run/{quote(name, safe='')}")[1].partition('id="results"')[0]
    badges = re.findall(r'<span class="pill \w+">([^<]+)</span><span class="sub">', table)
    assert [one for one in badges if one in {badge.words for badge in WORDS.values()}]
    shown = [WORDS[one.word].words for one in rated.all]
    assert sorted(badge for badge in badges if badge in shown) == sorted(shown)


def test_a_cell_has_its_question_estimates_pictures_log_claim_digest_and_messages(ask):
    cell = next(cell for cell in CELLS if cell.training.defense == double.GAUSSIAN[1] and cell.attack == double.MAP)
    content = ask(f"/run/whole/cell/{cell.id}")[1]
    text = page(content).text
    result, training = double.result_of(cell), double.training_of(cell.training)
    for part in ("gaussian clip=1, delta=1e-5, epsilon=4", "map prior=tv, weight=20", result.digest, training.digest):
        assert part in text
    assert [f"{result.estimate('ssim').value:.3f}" in text, "0 48000 48.0 kB" in text] == [True, True]
    assert text.count("few-images") == 1
    assert "one round 4 (per record, δ = 1e−5)" in text
    assert content.count("data:image/png") == 2 * double.PROBE.count
    assert re.search("<code>([^<]*)</code></pre>", content)[1].splitlines() == LOG[:3]


@pytest.mark.parametrize(("cell", "status"), [(FAILED, "failed: RuntimeError: out of memory"), (MISSING, "missing")])
def test_a_cell_without_a_result_says_so(ask, cell, status):
    answer, content = ask(f"/run/whole/cell/{cell.id}")
    assert answer.status == 200
    assert f"Status {status}" in page(content).text


def test_pictures_are_withheld_unless_their_data_are_public(folder):
    cell = CELLS[0].id
    shown = [Runs(folder, images).page(LINKS, "run", "whole", "cell", cell) for images in ("redact", "none")]
    assert [("image/png" in text, "withheld" in text) for text in shown] == [(False, True), (False, False)]


UNKNOWN = [
    "/run/no",
    "/run/..%2f..",
    "/run/whole%2f..%2fdeep",
    "/../../etc/passwd",
    "/run/whole/cell/..%2f..%2fstudy.json",
    "/run/whole/study.json",
    f"/run/{quote(f'deep/{ODD}', safe='')}/dossier",
    "/compare?run=whole&run=no",
    "//etc/passwd",
    "/%00",
]


@pytest.mark.parametrize("path", UNKNOWN)
def test_an_unknown_name_is_not_found_in_one_line(ask, path):
    answer, content = ask(path)
    assert (answer.status, content) == (404, "404: there is no such page: begin at /\n")
    assert answer.headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize("path", ["/compare", "/compare?run=whole"])
def test_one_run_is_not_compared(ask, path):
    answer, content = ask(path)
    assert answer.status == 409
    assert re.fullmatch(r"409: expected 2 to 10 runs to compare, got [01]\n", content)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{}", "127.0.0.1:1", "127.0.0.1@evil.example:{}", ""])
def test_a_request_to_another_name_is_refused(ask, server, host):
    answer, content = ask("/", Host=host.format(server.server_port))
    assert (answer.status, content.count("\n")) == (403, 1)
    assert server.address in content
    assert ask("/", Host=f"localhost:{server.server_port}")[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_reading_is_answered(ask, method):
    answer, content = ask("/", method)
    assert (answer.status, content.count("\n")) == (501, 1)


def test_a_head_has_the_headers_without_the_page(ask):
    answer, content = ask("/", "HEAD")
    assert (answer.status, content) == (200, "")
    assert int(answer.headers["Content-Length"]) == len(ask("/")[1].encode())


def test_a_page_holds_its_policy_and_a_dossier_runs_nothing(ask):
    answer, content = ask("/")
    assert "script-src 'sha256-" in Page(content).policy
    assert Page(content).policy.endswith("form-action 'self'")
    assert Page(ask("/run/whole")[1]).policy.endswith("form-action 'none'")
    assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert ask("/run/whole/dossier")[0].headers["Content-Security-Policy"].startswith("sandbox; default-src 'none'")


def test_the_server_writes_nothing(ask, folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for path in ("/", "/run/whole", f"/run/whole/cell/{CELLS[0].id}", "/run/whole/report"):
        ask(path)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_progress_is_seen_while_a_run_is_written_and_only_what_changed_is_read_again(tmp_path, monkeypatch):
    whole = double.make_run(CELLS)
    done = CELLS[:4]
    kept = {cell.id: whole.results[cell.id] for cell in done}
    on_disk(dataclasses.replace(whole, results=kept, trainings={}), tmp_path / "live")
    shown, read, examine = Runs(tmp_path), [], Store.examine
    monkeypatch.setattr(Store, "examine", lambda *words, **more: read.append(words[1].name) or examine(*words, **more))
    assert f"4 of {len(CELLS)}" in page(shown.page(LINKS)).text
    read.clear()
    shown.page(LINKS)
    assert read == []
    Store(tmp_path / "live").write_result(whole.results[CELLS[5].id], {}, 1.0)
    assert f"5 of {len(CELLS)}" in page(shown.page(LINKS)).text
    assert not set(read) & set(kept)
    assert CELLS[5].id in read


def test_a_damaged_folder_is_named_and_the_others_are_shown(folder, tmp_path):
    shutil.copytree(folder / "whole", tmp_path / "whole")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "study.json").write_text("{}")
    text = page(Runs(tmp_path).page(LINKS)).text
    assert "bad" in text
    assert "Cannot be read" in text
    assert f"{len(CELLS) - 2} of {len(CELLS)}" in text


def test_a_folder_that_is_a_run_is_listed_and_links_are_not_followed(folder, tmp_path):
    assert list(Runs(folder / "whole").found()) == ["whole"]
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "elsewhere").symlink_to(folder / "whole")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "study.json").symlink_to(folder / "whole" / "study.json")
    shutil.copytree(folder / "whole", tmp_path / "own")
    for name in ("dossier.html", "run.log"):
        (tmp_path / "own" / name).unlink()
        (tmp_path / "own" / name).symlink_to(folder / "whole" / name)
    shown = Runs(tmp_path)
    assert list(shown.found()) == ["own"]
    assert "dossier" not in shown.page(LINKS, "run", "own")
    assert 'id="log"' not in shown.page(LINKS, "run", "own", "cell", CELLS[0].id)


def test_a_bundle_has_the_same_pages_and_all_that_its_links_name(folder, tmp_path):
    done = call("view", folder, "--bundle", tmp_path / "site")
    assert (done.exit_code, done.output) == (0, f"bundle: {tmp_path / 'site' / 'index.html'}\n")
    files = sorted(path for path in (tmp_path / "site").rglob("*") if path.is_file())
    pages = {path: Page(path.read_text("utf-8")) for path in files if path.suffix == ".html"}
    named = {tmp_path / "site" / "index.html"}
    for path, made in pages.items():
        every = [*made.all("a"), *made.all("img"), *made.all("link"), *made.all("script")]
        for address in (tag.get("href") or tag.get("src") for tag in every):
            if address and not address.startswith("#"):
                assert not re.match("/|[a-z]+:", address), (path, address)
                named.add(Path(os.path.normpath(path.parent / unquote(address))))
    assert named == set(files)
    assert len([path for path in pages if path.parent.name == "cell"]) == len(CELLS) + 2 * len(HOSTILE)
    assert "<form" not in (tmp_path / "site" / "index.html").read_text("utf-8")
    assert "expected a new or an empty folder" in refused("view", folder, "--bundle", tmp_path / "site")


def test_a_folder_without_results_and_a_taken_port_are_wrong_calls(folder, server, tmp_path):
    assert "no results below" in refused("view", tmp_path)
    assert "cannot listen at 127.0.0.1" in refused("view", folder, "--port", server.server_port)


@pytest.mark.matrix
def test_axe_core_objects_to_nothing_on_any_page_and_every_row_is_linked(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "_MOST", 2)  # a script makes the other rows
    shown = Runs(folder)
    wanted = {"home": (), "run": ("run", "whole"), "cell": ("run", "whole", "cell", CELLS[0].id)}
    wanted["compare"] = ("compare", "whole", f"deep/{ODD}")
    with chromium() as browser:
        for name, parts in wanted.items():
            path = tmp_path / f"{name}-page.html"
            path.write_text(shown.page(LINKS, *parts), encoding="utf-8")
            with tab(browser, path) as seen:
                seen.open()
                axe = seen.axe()
                assert (name, axe(False), axe(True), seen.poor_contrasts()) == (name, [], [], [])
                if name == "run":
                    links = seen.page.locator("#cells tbody th a").evaluate_all("all => all.map(one => one.pathname)")
                    assert links == [f"/run/whole/cell/{cell.id}" for cell in CELLS]
                seen.check()


class _Logged:
    """A run of a tracker, which keeps what it is told."""

    def __init__(self, **about):
        self.about, self.summary, self.rounds = about, {}, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def log(self, numbers, step):
        self.rounds[step] = numbers


def tracker(monkeypatch, name):
    """A module of this name with the calls that an export makes, and the runs that it was told of."""
    made, module = [], ModuleType(name)

    def start(**about):
        made.append(_Logged(**about))
        return made[-1]

    def metrics(numbers, step=None):
        if step is None:
            made[-1].summary.update(numbers)
        else:
            made[-1].log(numbers, step)

    module.init = module.start_run = start
    module.set_experiment = lambda project: None
    module.log_params = lambda question: made[-1].about.update(config=question)
    module.log_metrics = metrics
    monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_an_export_to_a_tracker_has_a_run_for_each_training_and_attack_with_every_number(folder, monkeypatch, name):
    made, run = tracker(monkeypatch, name), load_run(folder / "whole")
    done = call("export", folder / "whole", "--to", name)
    assert (done.exit_code, len(made)) == (0, len(run.trainings) + len(run.cells))
    assert done.output == f"{name}: {len(made)} runs of invented-study\n"
    ids = [one.about["id"] if name == "wandb" else one.about["tags"]["leakgauge"] for one in made]
    assert sorted(ids) == sorted([*run.trainings, *(cell.id for cell in run.cells)])
    known = [row for row in rows(run) if row.get("value") is not None]
    for identity, one in zip(ids, made, strict=True):
        own = [row for row in known if (row.get("cell") or row["training"]) == identity]
        assert set(one.rounds) == {row["round"] for row in own if "round" in row}
        assert all(one.rounds[row["round"]][row["quantity"]] == row["value"] for row in own if "round" in row)
        values = [row["value"] for row in own if "round" not in row]
        ends = ("_low", "_high", "_n")
        assert [value for key, value in one.summary.items() if not key.endswith(ends)] == values
        assert all(re.fullmatch(r"[\w./ -]+", key) for key in one.summary)
        assert one.about["config"]["defense"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_without_a_tracker_one_line_says_what_to_install(folder, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    assert refused("export", folder / "whole", "--to", name).endswith(f"from a checkout, pip install '.[{name}]'")
    assert "need a format with rows" in refused("export", folder / "whole", "--to", name, "--items")
