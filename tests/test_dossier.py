"""The dossier: four pages for a person who decides. Each question has its answer on page 1 or 2, in these words.

| question | page | words of the answer, for the run `LEAKING` |
|---|---|---|
| Does it leak? | 1 | People can be recognized |
| From where? | 1 | from what the sites send |
| What shall I do? | 1 | Do not use real data with these settings |
| How many people, of how many? | 1 | 12 of 16 people were picked out |
| What did the attack have? | 1 | a message and 100 pictures, one of them the right one |
| And among more people? | 1 | in a larger test probably 48 to 93 % |
| Is that more than guessing? | 1 | guessing gets 1 % |
| Who could do it? | 1 | A server that follows the rules, but studies every message: recognizes people |
| Who was not considered? | 1 | A server that tampers with the model |
| What leaves a site? | 1 | never leave a site; numbers computed from them do |
| Which protection is in use? | 1 | Protection: random noise on the whole message (gaussian) |
| What is promised, and is it kept? | 2 | The promise holds by its proof |
| Can one tell whose record was used? | 2 | The test did not ask this. The question is open. |
| How sure is this? | 2 | The method works: without protection, the attack picks out 16 of 16 people |
| What helps? | 2 | No tested protection was shown to hide these records |
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re

import numpy as np
import pytest

import leakgauge
from leakgauge.harness.core.errors import UnknownNameError
from leakgauge.harness.core.result import Estimate, Pictures
from leakgauge.harness.core.stats import against, mean, of_items
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.federation import registry
from leakgauge.reports.dossier.pages import LENGTH, render
from leakgauge.reports.dossier.words import OBSERVERS, PROTECTIONS, observer
from tests import report_fixtures as double
from tests.by_rows import by_rows
from tests.command import call, refused
from tests.hostile import PAYLOADS, hostile_run
from tests.report_page import Page, with_trainings

QUESTIONS = [line.split(" | ") for line in __doc__.splitlines() if line.endswith(" |")][1:]
USED = double.GAUSSIAN[2]  # whose claim is finite
IMAGES = (double.MATCHING, double.PROBE, "server")
PAGES = ["answer", "promise", "others", "files"]


def share(name, hits, n, among):
    return against(of_items(name, [1.0] * hits + [0.0] * (n - hits)), 1 / among)


def identified(hits, n=16):
    return mean("ssim", [0.5] * n), share("identification", hits, n, 100)


def hidden(hits, n=400):
    """A lineup of pairs whose likelihood is exact."""
    return share("named", hits, n, 2), mean("posterior_gap", [-0.01, 0.01] * (n // 2))


def auc(value, p):
    return (Estimate("auc", value, value - 0.1, value + 0.1, 60, "DeLong", higher_leaks=True, chance=0.5, p=p),)


def run_of(found, *attacks, kind="", seeds=(0,), **changes):
    """A run with these estimates by defense or attack, else with 16 of 16 identified."""
    defenses = [
        one for one in (double.NONE, USED, *double.LAPLACE[:1]) if one in (double.NONE, USED) or one.name in found
    ]

    def make(cell):
        names = cell.training.defense.name, cell.attack.name
        return double.with_estimates(
            double.result_of(cell), *next((found[n] for n in names if n in found), identified(16))
        )

    run = double.make_run(double.grid(defenses, attacks or [IMAGES], seeds), make=make, **changes)
    infos = {key: dataclasses.replace(info, kind=kind or info.kind) for key, info in run.attacks.items()}
    return dataclasses.replace(run, attacks=infos)


def pages_of(run, **options):
    """The text of each page, after the checks that hold for each dossier."""
    made = render(run, **options)
    page = Page(made)
    assert page.open == []
    assert [one["id"] for one in page.all("section")] == PAGES
    assert "break-after: page" in page.inline["style"][0]
    assert len(page.text.split()) <= LENGTH
    assert {name for name, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object", "base", "form", "a"})
    assert {name for _, attributes in page.tags for name in attributes if name.startswith("on")} == set()
    assert {one["src"].partition(",")[0] for one in page.all("img")} <= {"data:image/png;base64"}
    (style,) = page.inline["style"]
    assert not re.search(r"url\(|@import", style)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert page.policy == policy
    assert not re.search(r"\b(nan|inf|None|undefined)\b", page.text.replace("None no defense", ""))
    texts = [Page(body).text for body in re.findall(r"<section id=.*?</section>", made, re.DOTALL)]
    assert not re.search(r"ssim|epsilon|ε", texts[0], re.IGNORECASE)
    return dict(zip(PAGES, texts, strict=True))


LEAKING = run_of({"gaussian": identified(12), "laplace": identified(3)})


@pytest.mark.parametrize(("question", "at", "words"), [[part.strip("| ") for part in row] for row in QUESTIONS])
def test_a_question_has_its_answer_on_the_first_two_pages(question, at, words):
    assert words in pages_of(LEAKING)[PAGES[int(at) - 1]], question


def test_an_officer_has_at_least_ten_questions():
    assert len(QUESTIONS) >= 10
    assert {row[1] for row in QUESTIONS} == {"1", "2"}


LINEUP = (double.LINEUP, double.PROBE, "server+lineup")
MEMBERS = (double.THRESHOLD, dataclasses.replace(double.PROBE, kind="members", count=100, round=None), "public")


@by_rows(
    (
        {"gaussian": identified(12)},
        [IMAGES],
        "",
        "People can be recognized from what the sites send. Do not use",
        "12 of 16",
    ),
    (
        {"lineup": (share("named", 60, 80, 2),)},
        [LINEUP],
        "",
        "From what the sites send, an observer can tell which of 2 records is behind a message. Change",
        "60 of 80",
    ),
    (
        {"gaussian": hidden(190)},
        [LINEUP],
        "",
        "These records stayed hidden in what the sites send. Use with",
        "190 of 400",
    ),
    ({"gaussian": hidden(33, 60)}, [LINEUP], "", "too weak to tell what leaks. Do not use", "more messages, "),
    (
        {"gaussian": identified(0)},
        [IMAGES],
        "",
        "too weak to tell what leaks. Do not use",
        "a line-up of known records",
    ),
    (
        {"threshold": auc(0.8, 1e-6)},
        [MEMBERS],
        "",
        "From the finished model, an observer can tell whether a person’s record was used.",
        "80 % of the times",
    ),
    (
        {"threshold": auc(0.6, 0.4)},
        [MEMBERS],
        "",
        "This test is too weak to tell",
        "a method that proves what this observer",
    ),
    (
        {"lineup": (share("source", 30, 40, 4),)},
        [LINEUP],
        "source",
        "which site a record belongs to",
        "30 of 40 records",
    ),
    (
        {"lineup": (share("linked", 30, 40, 4),)},
        [LINEUP],
        "linkability",
        "which messages come from one",
        "30 of 40 messages",
    ),
)
def test_each_rating_has_its_own_first_page(found, attacks, kind, sentence, count):
    first = pages_of(run_of(found, *attacks, kind=kind))["answer"]
    assert sentence in first
    assert count in first
    assert ("no all-clear" in first) == ("too weak" in sentence)
    assert ("can be considered" in first) == ("hidden" in sentence)


def test_a_foreseen_finding_says_after_how_many_rounds():
    nats = mean("nats", [0.9, 1.0, 1.1] * 40)
    first = pages_of(run_of({"gaussian": (share("named", 3, 120, 20), nats)}, LINEUP))["answer"]
    assert "an observer can tell which record is behind the messages of many rounds" in first
    assert re.search(r"half of the people are named among 20 after \d+ rounds", first)


def of_claims(run, *names):
    """The same run, with claims against these adversaries only."""

    def claimed(one):
        pair = {name: dataclasses.replace(getattr(one, name), against=names) for name in ("one_round", "whole_run")}
        return dataclasses.replace(one, **pair)

    return with_trainings(run, claimed)


@by_rows(
    ({"gaussian": identified(12)}, [IMAGES], "send, and nothing is promised against this observer. Do not use"),
    ({"gaussian": identified(0)}, [IMAGES], "leaks, and nothing is promised against this observer. Do not use"),
    ({"gaussian": hidden(190)}, [LINEUP], "send, but nothing is promised against this observer. Use with"),
)
def test_an_adversary_outside_the_promise_is_no_all_clear(found, attacks, sentence):
    pages = pages_of(of_claims(run_of(found, *attacks), "public"))
    assert sentence in pages["answer"]
    assert ", not promised" in pages["answer"]
    assert "not made against the observer of page 1" in pages["promise"]


def test_the_worst_observer_decides_whether_or_not_it_is_promised():
    found = {"gaussian": identified(12), "threshold": auc(0.6, 0.4)}
    first = pages_of(of_claims(run_of(found, IMAGES, MEMBERS), "public"))["answer"]
    assert "People can be recognized" in first
    assert "finished model: " in first


def test_failed_and_missing_attacks_are_counted_and_a_run_without_any_result_says_so():
    attacks = [IMAGES, (double.MAP, double.PROBE, "server")]
    lost = run_of({"gaussian": identified(0)}, *attacks, failed=lambda cell: cell.attack == double.MAP)
    pages = pages_of(lost)
    assert "of 2 attacks, 1 failed" in pages["answer"]
    assert "Of 2 attacks, 1 failed" in pages["promise"] + pages["others"]
    gone = pages_of(run_of({}, failed=lambda cell: cell.training.defense == USED))
    assert "The test failed: no attack finished." in gone["answer"]
    assert "No training finished" in gone["promise"]
    floors = pages_of(run_of({}, (double.PRIOR, double.PROBE, "server")))
    assert "No attack ran. Nothing is known" in floors["answer"]


def test_the_worst_defense_in_use_is_the_subject_unless_one_is_named():
    run = run_of({"gaussian": identified(12), "laplace": identified(1)})
    assert "(gaussian)" in pages_of(run)["answer"]
    assert "(laplace)" in pages_of(run, defense="laplace")["answer"]
    assert "No protection is in use" in pages_of(run, defense="none")["answer"]
    alone = double.make_run(
        double.grid([double.NONE], [IMAGES], (0,)),
        make=lambda c: double.with_estimates(double.result_of(c), *identified(9)),
    )
    assert "No protection is in use" in pages_of(alone)["answer"]
    assert "Nothing is promised." in pages_of(alone)["promise"]
    with pytest.raises(UnknownNameError, match="no defense 'laplas'; did you mean"):
        render(run, defense="laplas")


def test_a_protection_that_hides_the_records_is_proposed_with_its_cost():
    run = run_of({"gaussian": (share("named", 90, 100, 20),), "laplace": hidden(190)}, LINEUP)
    pages = pages_of(run)
    assert re.search(
        r"Random noise on each number \(laplace\) hid these records, (for \d+ points|without loss)", pages["others"]
    )
    assert "hid these records" in pages["promise"]


# pictures


def test_redacted_pictures_are_not_on_the_page():
    shown, redacted, left_out = (render(LEAKING, images=how) for how in ("public", "redact", "none"))
    assert [made.count("<img") for made in (shown, redacted, left_out)] == [6, 0, 0]
    assert [made.count("withheld") for made in (shown, redacted, left_out)] == [0, 6, 0]
    assert "Withheld: nobody said" in Page(render(run_of({"gaussian": identified(12)}, public=()))).text


def test_texts_show_their_words_and_rows_their_fields():
    texts = Pictures(np.array([[["the", "left", "lung"]]] * 3), np.array([[["the", "right", "lung"]]] * 3))
    scores = mean("rouge1", [0.7] * 16), share("identification", 12, 16, 100)
    run = dataclasses.replace(run_of({"gaussian": scores}), pictures=lambda _: texts)
    first = pages_of(run)["answer"]
    assert "People’s texts can be recognized" in first
    assert "the left lung the right lung original recovered" in first
    assert "lung" not in pages_of(run, images="redact")["answer"]
    rows = mean("columns", [0.5] * 16), share("identification", 12, 16, 100)
    cells = Pictures(np.array([[["age 47", "sex #1"]]] * 3), np.array([[["age 47", "sex #0"]]] * 3))
    table = dataclasses.replace(run_of({"gaussian": rows}), pictures=lambda _: cells)
    assert "age 47, sex #1 age 47, sex #0 original recovered" in " ".join(
        pages_of(table)["answer"].replace(" ,", ",").split()
    )


def test_members_have_no_pictures():
    assert "<img" not in render(run_of({"threshold": auc(0.8, 1e-6)}, MEMBERS))


# every run


@pytest.mark.parametrize(
    "run", [double.full_run(), double.checked_run(), double.audited_run()], ids=lambda run: run.name
)
def test_every_protection_of_a_run_has_a_dossier(run):
    for name in {cell.training.defense.key for cell in run.cells}:
        pages_of(run, defense=name)


@pytest.mark.parametrize("text", PAYLOADS, ids=range(len(PAYLOADS)))
def test_hostile_names_are_escaped(text):
    page = Page(render(hostile_run(text)))
    assert page.open == []
    assert {name for name, _ in page.tags}.isdisjoint({"script", "img"})
    assert len(page.text.split()) <= LENGTH
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x08]", page.text)


def test_the_promise_is_carried_in_words():
    pages = pages_of(double.checked_run(), defense="points(epsilon=2.0)")
    assert "is not kept" in pages["promise"]
    assert " 88.08 " in pages["promise"]  # e^2 / (1 + e^2)
    audited = pages_of(double.audited_run(), defense="dithered")["promise"]
    assert "measured: at least 2.834, with 1 000 trials" in audited


def test_every_adversary_has_words_and_every_word_a_defense():
    assert {*OBSERVERS} == {threat.value for threat in Threat}
    assert {*PROTECTIONS} <= {*registry.classes("defense")}
    assert observer("server+broadcast").who.endswith("studies every message and chooses the model")
    assert observer("oracle").who == "oracle"


TINY = """
name = "tiny"
limit = false
lineup = false
[[tasks]]
data = "digits"
model = "linear"
[[federations]]
clients = 4
rounds = 1
algorithm = "fedsgd"
samples = 40
test_samples = 20
[[defenses]]
name = ["none", "sdq"]
[[attacks]]
name = "analytic"
target = { count = 3, among = 20 }
"""


def test_the_command_writes_the_dossier_of_a_real_run(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    run = leakgauge.run(tmp_path / "tiny.toml", tmp_path / "out", workers=0, progress=False)
    done = call("report", tmp_path / "out", "--for", "officer")
    assert (done.exit_code, done.stdout) == (0, f"dossier: {tmp_path / 'out' / 'dossier.html'}\n")
    assert (tmp_path / "out" / "dossier.html").read_text() == render(run)
    assert "Protection: rounding (sdq)" in pages_of(run)["answer"]
    assert "--defense needs --for officer" in refused("report", tmp_path / "out", "--defense", "sdq")
    assert "need --for researcher" in refused("report", tmp_path / "out", "--for", "officer", "--layout", "dir")
    assert "no defense 'sdk'" in refused("report", tmp_path / "out", "--for", "officer", "--defense", "sdk")


@pytest.mark.parametrize(("name", "horizon"), [("dithered", "one round"), ("generous", "the whole run")])
def test_a_measured_loss_stands_beside_the_claim_of_its_own_horizon(name, horizon):
    page = pages_of(double.audited_run(), defense=name)["promise"]
    assert re.search(rf"claimed privacy loss ε = [\d.]+ per [\w-]+ for {horizon}\b[^;]*; measured: at least", page)
