"""Draw the pictures of docs/: `python .ci/pictures.py` writes docs/assets/*.svg, from the code and the tables.

A picture is 560 wide, so that its letters can be read on a phone, and follows the light or dark theme of its page.
"""

import math
import re
from pathlib import Path

from markupsafe import escape

from leakgauge.harness.core.metrics import MANY
from leakgauge.harness.core.rating import MOST_HIDDEN
from leakgauge.harness.core.threats import ADVERSARIES, SEES

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 560

STYLE = """
    text { font: 13px system-ui, sans-serif; fill: #50566b; }
    .name { font-size: 15px; font-weight: 600; fill: #1f2430; }
    .middle { text-anchor: middle; }
    .end { text-anchor: end; }
    rect, circle { fill: #eef1fb; stroke: #5b6bc0; }
    path { fill: none; stroke: #5b6bc0; stroke-width: 1.6; }
    .to { marker-end: url(#tip); }
    #tip path { fill: #5b6bc0; stroke: none; }
    .wire { fill: #fdf1dd; stroke: #c08a2a; }
    .bad { fill: #fbe3e1; stroke: #c0392b; }
    .good { fill: #e2f3e6; stroke: #2e8b57; }
    .plain { fill: #f6f6f3; stroke: #8a8a80; }
    .full { fill: #5b6bc0; }
    .faint { stroke: #b9bccb; stroke-width: 1; }
    .dash { stroke-dasharray: 5 4; }
    @media (prefers-color-scheme: dark) {
      text { fill: #b3b8cc; }
      .name { fill: #e6e8f0; }
      rect, circle { fill: #242a45; stroke: #8c9bea; }
      path { stroke: #8c9bea; }
      #tip path { fill: #8c9bea; }
      .wire { fill: #43351a; stroke: #e0b055; }
      .bad { fill: #47211f; stroke: #f0857a; }
      .good { fill: #1d3a28; stroke: #6fcf97; }
      .plain { fill: #2b2b29; stroke: #9a9a90; }
      .full { fill: #8c9bea; }
      .faint { stroke: #5a5f78; }
    }
"""
TIP = '<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'


class Drawing:
    """An SVG of this height, made of boxes, arrows and words; `label` says in one sentence what it shows."""

    def __init__(self, label, height):
        self.label, self.height, self.parts = label, height, []

    def text(self, x, y, words, kind=""):
        """Words whose baseline is at y."""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>')

    def rect(self, x, y, width, height, kind="", round=6):
        """A rectangle with round corners."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round:g}"'
        self.parts.append(f'<rect class="{kind}" {place}/>')

    def box(self, x, y, width, name, *what, kind=""):
        """A box with a name and lines below it; its height follows from these."""
        self.rect(x, y, width, 32 + 17 * len(what), kind)
        self.text(x + width / 2, y + 21, name, "name middle")
        for number, words in enumerate(what, 1):
            self.text(x + width / 2, y + 21 + 17 * number, words, "middle")

    def path(self, way, kind="to"):
        """A line, by default with a tip."""
        self.parts.append(f'<path class="{kind}" d="{way}"/>')

    def pill(self, x, y, width, words, kind="bad"):
        """A round label."""
        self.rect(x, y, width, 26, kind, 13)
        self.text(x + width / 2, y + 18, words, "middle")

    def dot(self, x, y, radius, kind=""):
        """A circle."""
        self.parts.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def __str__(self):
        size = f'viewBox="-2 0 {WIDTH + 4} {self.height}" width="{WIDTH + 4}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self.label)}">'
        tip = f'<defs>{TIP}<path d="M0 0 L10 5 L0 10 z"/></marker></defs>'
        inside = "\n".join(f"  {one}" for one in (f"<style>{STYLE}  </style>", tip, *self.parts))
        return f"{head}\n{inside}\n</svg>\n"


def rows(page, heading):
    """The rows of the first table below a heading, as lists of cells."""
    text = (DOCS / page).read_text("utf-8").partition(f"\n{heading}\n")[2]
    table = text.partition("\n|")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table]


def sees():
    """Which adversary sees what, by the table of the code."""
    columns = {"messages": "/messages", "shared": "shared/keys", "sums": "/sums", "models": "round/models"}
    columns |= {"final": "final/model", "others": "others/data", "broadcast": "chooses/models"}
    drawing = Drawing("A table of the seven adversaries and what each of them sees", 44 + 44 * len(SEES))
    for column, words in enumerate(columns.values()):
        for line, word in enumerate(words.split("/")):
            drawing.text(235 + 50 * column, 14 + 15 * line, word, "middle")
    for row, (threat, seen) in enumerate(SEES.items()):
        y = 64 + 44 * row
        drawing.path(f"M0 {y - 24} H{WIDTH}", "faint")
        drawing.text(0, y - 4, threat.value, "name")
        drawing.text(0, y + 13, ADVERSARIES[threat.value].removeprefix("a server "))
        for column, what in enumerate(columns):
            drawing.dot(235 + 50 * column, y, 7 if what in seen else 2, "full" if what in seen else "plain")
    return drawing


def stands():
    """Where each adversary stands in a round."""
    drawing = Drawing("A round of a federation, and where each adversary reads it", 330)
    drawing.box(0, 50, 120, "client", "the victim")
    drawing.box(0, 150, 120, "client", "another one")
    drawing.box(245, 90, 110, "secure sum", "if there is one", kind="plain dash")
    drawing.box(450, 90, 110, "server", "averages")
    drawing.path("M120 74 C190 74 190 106 243 110")
    drawing.path("M120 174 C190 174 190 126 243 122")
    drawing.path("M355 115 H448")
    drawing.path("M505 139 V212 H60 V201")
    drawing.text(300, 230, "models of all rounds", "middle")
    drawing.box(430, 252, 130, "final model", "published")
    drawing.path("M505 212 V250")
    drawing.text(135, 66, "message")
    drawing.text(135, 192, "message")
    drawing.text(403, 107, "sum", "middle")
    drawing.pill(150, 8, 110, "eavesdropper")
    drawing.pill(360, 150, 90, "aggregator")
    drawing.pill(470, 30, 70, "server")
    drawing.pill(5, 246, 110, "participant")
    drawing.pill(300, 262, 70, "public")
    drawing.path("M200 34 V84 M403 150 V119 M505 56 V88 M60 246 V216 M370 275 H428", "dash")
    drawing.text(0, 322, "A malicious server chooses the models; a colluding server has the others' data, too.")
    return drawing


def units():
    """What differs between two neighbors, for each unit of privacy."""
    drawing = Drawing("The units of privacy: one record, one client, one message, a sub-vector, a coordinate", 276)
    drawing.rect(0, 30, 190, 190, "plain")
    drawing.text(0, 18, "client: all its data", "name")
    for place in range(12):
        drawing.rect(14 + 42 * (place % 4), 46 + 44 * (place // 4), 34, 34, "bad" if place == 5 else "")
    drawing.text(14, 204, "record: one example")
    drawing.path("M190 125 H246")
    drawing.text(250, 18, "message: one round's numbers", "name")
    drawing.rect(250, 30, 310, 64, "wire")
    for place in range(10):
        drawing.rect(260 + 29.5 * place, 50, 24, 24, "bad" if place == 3 else "good" if place in (6, 7) else "", 3)
    drawing.path("M360 76 V116", "bad")
    drawing.path("M463 76 V142", "good")
    drawing.text(270, 132, "coordinate: one number")
    drawing.text(330, 158, "sub-vector: a few numbers")
    for place in range(5):
        drawing.rect(250 + 64 * place, 176, 54, 26, "wire", 3)
    drawing.text(250, 220, "horizon: one round, or the whole run")
    drawing.text(0, 248, "An epsilon of 4 for a coordinate is 4d for a message of d numbers.")
    drawing.text(0, 268, "Epsilons of two units are never compared.")
    return drawing


def rating():
    """The questions that make a rating."""
    questions = (
        (f"Are people recognized among {MANY} or more", "candidates, more often than by chance?", "LEAKS", "bad"),
        (
            "Is anything else found beyond chance: one of 2 or 10,",
            "a member, a label, a property, after more rounds?",
            "SOME LEAK",
            "wire",
        ),
        (
            f"At most {MOST_HIDDEN:.0%} named among two, exact likelihood,",
            "of a model that learned, and no cell is lacking?",
            "HIDDEN",
            "good",
        ),
    )
    drawing = Drawing("The three questions that lead to one of four ratings", 292)
    for row, (first, second, word, kind) in enumerate(questions):
        y = 4 + 82 * row
        drawing.rect(0, y, 380, 52)
        drawing.text(14, y + 22, first)
        drawing.text(14, y + 40, second)
        drawing.rect(430, y + 6, 130, 40, kind)
        drawing.text(495, y + 31, word, "name middle")
        drawing.path(f"M380 {y + 26} H428")
        drawing.text(403, y + 20, "yes", "middle")
        drawing.path(f"M185 {y + 52} V{y + 80}")
        drawing.text(195, y + 71, "no")
    drawing.rect(0, 250, 370, 40, "plain")
    drawing.text(185, 275, "TOO WEAK TO TELL", "name middle")
    drawing.text(382, 275, "and what is missing")
    return drawing


def bars(label, found, lines, left, scale, height=24):
    """Bars of shares in [0, 1], each (name, value, kind); and vertical lines (value, words)."""
    drawing = Drawing(label, 30 + height * len(found))
    for row, (name, value, kind) in enumerate(found):
        y = 26 + height * row
        drawing.text(left - 8, y + height / 2 + 2, name, "end")
        drawing.rect(left, y, max(1.0, scale * value), height - 6, kind, 2)
        end = max([left + scale * at for at, _ in lines if 0 <= at - value < 0.1] + [left + max(1.0, scale * value)])
        drawing.text(end + 6, y + height / 2 + 2, f"{value:.3g}")
    for value, words in lines:
        drawing.path(f"M{left + scale * value:g} 20 V{drawing.height}", "dash")
        drawing.text(left + scale * value, 14, words, "middle")
    return drawing


def ceiling():
    """SSIM between floor and ceiling, from the study `adaptive`."""
    names = ("no defense", "`sdq`", "`jopeq`", "`laplace`", "`cepam-gaussian`", "`mvu`", "`gaussian`")
    table = {name: float(cell[:5]) for name, cell, *_ in rows("attacks.md", "## Every defense, every kind of attack")}
    (floor,) = re.findall(r"floor is an SSIM of (0\.\d+)", (DOCS / "attacks.md").read_text("utf-8"))
    found = [(name.strip("`"), table[name], "" if table[name] > float(floor) else "plain") for name in names]
    label = "SSIM of map behind six defenses, between the floor of a guess and the ceiling without a defense"
    return bars(label, found, ((float(floor), "floor: a guess"), (1.0, "ceiling")), 130, 370.0)


def named():
    """Share named among 100, from the study `lineup`."""
    found = []
    for name, *models in rows("attacks.md", "    leakgauge run lineup --out runs/lineup"):
        short = f"no defense and {name.count(',')} others" if "," in name else name.strip("`")
        first, second = (float(model.split(" [")[0].split(" / ")[2]) for model in models)
        found += [(short, first, "full"), ("", second, "plain")]
    label = (
        "Share named among 100 behind each defense: on CIFAR-10 behind LeNet (upper bar), on MNIST behind a dense net"
    )
    drawing = bars(label, found, ((0.01, "chance .01"),), 190, 320.0, 19)
    drawing.height += 20
    drawing.text(190, drawing.height - 4, "upper bar: CIFAR-10, LeNet; lower: MNIST, dense")
    return drawing


def epsilons():
    """Claimed, proved and audited on one axis, from the tables of claims."""
    table = rows("claims-tables.md", "## The papers' claims") + rows("claims-tables.md", "## Audits inside a run")[:1]
    table = [row for row in table if "inf" not in row and row[4] > "0"]
    drawing = Drawing("The claimed, proved and audited epsilon of defenses on one axis", 54 + 44 * len(table))

    def x(value):
        return 14 + 255 * math.log10(float(value) / 0.5)

    for tick in (0.5, 1, 2, 5, 10, 20, 50):
        drawing.path(f"M{x(tick):g} 44 V{drawing.height}", "faint")
        drawing.text(x(tick), 38, f"{tick:g}", "middle")
    for place, (shape, words) in enumerate(
        (("l9 6 l-9 6 z", "audited: at least"), ("l7 7 l-7 7 l-7 -7 z", "claimed"), ("v14", "proved: at most"))
    ):
        drawing.path(f"M{10 + 170 * place} {4 if place else 5} {shape}", "full")
        drawing.text(28 + 170 * place, 15, words)
    for row, (command, where, claimed, proved, audited, verdict) in enumerate(table):
        y = 82 + 44 * row
        name = command.split()[0].strip("`")
        drawing.text(14, y - 12, f"{name}, {where.split(', ')[0]}: {verdict}", "name")
        drawing.path(f"M{x(audited):g} {y} H{x(proved):g} M{x(proved):g} {y - 7} v14", "")
        drawing.path(f"M{x(audited) - 4:g} {y - 6} l9 6 l-9 6 z", "full")
        kind = "bad" if float(claimed) < float(audited) else "good"
        drawing.path(f"M{x(claimed):g} {y - 7} l7 7 l-7 7 l-7 -7 z", kind)
    return drawing


def study():
    """From a study to its report."""
    drawing = Drawing("The steps of a study, from the file to the report", 236)
    drawing.box(0, 2, 150, "study.toml", "a grid of questions", kind="plain")
    drawing.box(205, 2, 150, "trainings", "each runs once")
    drawing.box(410, 2, 150, "messages", "bytes of the defense", kind="wire")
    drawing.box(410, 94, 150, "observation", "what one adversary", "sees")
    drawing.box(205, 94, 150, "attacks", "one adversary each,", "and the floor", kind="bad")
    drawing.box(0, 94, 150, "scores", "against the truth,", "n and an interval")
    drawing.box(0, 198, 150, "rating")
    drawing.box(205, 198, 355, "report, terminal, exports, gate, dossier", kind="plain")
    for way in (
        "M150 27 H203",
        "M355 27 H408",
        "M485 51 V92",
        "M410 127 H357",
        "M205 127 H152",
        "M75 160 V196",
        "M150 214 H203",
    ):
        drawing.path(way)
    return drawing


def lineup():
    """What the attack `lineup` does with one message and its candidates."""
    drawing = Drawing(
        "A lineup: the update of each candidate is compared with the message, and the likeliest is named", 250
    )
    drawing.box(410, 84, 150, "message", "one of the k sent it", kind="wire")
    for row, (name, likely) in enumerate((("1", 0.25), ("2", 0.9), ("3", 0.4), ("k", 0.1))):
        y = 10 + 56 * row
        drawing.box(0, y, 120, f"candidate {name}")
        drawing.path(f"M120 {y + 16} H156")
        drawing.box(158, y, 100, "its update")
        drawing.path(f"M258 {y + 16} H290")
        drawing.rect(294, y + 6, 80 * likely, 20, "bad" if row == 1 else "plain", 2)
    drawing.path("M392 16 V204 M392 108 H410", "dash")
    drawing.text(60, 173, "...", "middle")
    drawing.text(60, 244, "bar: likelihood of the message under the update; the longest is named")
    return drawing


def picker():
    """The questions of `leakgauge init`."""
    drawing = Drawing("leakgauge init asks what you have; for a defense also what clients hold and who attacks", 262)
    drawing.box(150, 2, 260, "What do you have?", kind="wire")
    for x, name, what in (
        (0, "a defense", "of the catalogue or own"),
        (195, "an app", "Flower, Opacus, own"),
        (390, "a repository", "with CI"),
    ):
        drawing.box(x, 66, 170, name, what)
        drawing.path(f"M280 34 L{x + 85} 64")
    drawing.box(0, 146, 170, "Which data?", "pictures, tables, texts", "Which of 7 adversaries?", kind="wire")
    drawing.box(195, 146, 170, "tap it and inspect", "leakgauge inspect", "leakgauge.inspect(...)", kind="good")
    drawing.box(390, 146, 170, "make a baseline", "leakgauge baseline", "leakgauge gate", kind="good")
    for x in (85, 280, 475):
        drawing.path(f"M{x} 115 V144")
    drawing.rect(0, 226, 560, 32, "good")
    drawing.text(280, 247, "study.toml: defense and none, attacks of this adversary, the floor", "middle")
    drawing.path("M85 212 V224")
    return drawing


def gate():
    """How the gate decides."""
    steps = (
        ("Same output of the code for fixed keys?", "yes", "passes; nothing runs", "good"),
        ("Is the change recorded with a reason?", "no", "not accepted: 6", "wire"),
        ("Same distribution of the messages?", "no", "increased: 1", "bad"),
        ("Do attacks or audits find more?", "yes", "increased: 1", "bad"),
        ("Are there too few images to tell?", "yes", "reruns on twice as many", "plain"),
    )
    drawing = Drawing("The five questions of the gate, and the exit code behind each", 62 * len(steps) + 36)
    for row, (question, word, end, kind) in enumerate(steps):
        y = 2 + 62 * row
        drawing.rect(0, y, 310, 36)
        drawing.text(14, y + 23, question)
        drawing.path(f"M310 {y + 18} H368")
        drawing.text(338, y + 12, word, "middle")
        drawing.rect(370, y, 190, 36, kind)
        drawing.text(465, y + 23, end, "middle")
        drawing.path(f"M155 {y + 36} V{y + 60}")
        drawing.text(165, y + 53, "yes" if word == "no" else "no")
    drawing.rect(0, 62 * len(steps) + 2, 310, 32, "good")
    drawing.text(155, 62 * len(steps) + 23, "no increase: 0", "middle")
    return drawing


def tap():
    """Where the tap of an app stands, and what becomes of a recording."""
    drawing = Drawing("A tap copies the messages of an app into a recording, which leakgauge attacks elsewhere", 232)
    drawing.rect(0, 2, 560, 100, "plain")
    drawing.text(12, 22, "your app: its training stays as it is")
    drawing.box(14, 36, 130, "client", "its own training")
    drawing.box(214, 36, 120, "tap", "copies bytes", kind="wire")
    drawing.box(414, 36, 132, "strategy", "averages")
    drawing.path("M144 60 H212")
    drawing.path("M334 60 H412")
    drawing.text(178, 52, "reply", "middle")
    drawing.path("M274 85 V130")
    drawing.box(194, 132, 160, "recording", "models and messages", kind="wire")
    drawing.path("M354 156 H412")
    drawing.box(414, 132, 146, "inspect", "attacks, report", kind="bad")
    drawing.box(0, 132, 140, "you", "model and records")
    drawing.path("M70 181 V212 H487 V183", "dash to")
    drawing.text(274, 228, "known to the attacker: the network; for the score: the records", "middle")
    return drawing


def halves():
    """The two halves of a defense, and who calls what."""
    drawing = Drawing("A defense has a half on the client and a half on the server, with bytes between them", 240)
    drawing.box(0, 40, 170, "encode", "on the client")
    drawing.box(215, 40, 130, "bytes", "all that is sent", kind="wire")
    drawing.box(390, 40, 170, "estimate, decode", "on the server")
    drawing.path("M170 64 H213")
    drawing.path("M345 64 H388")
    drawing.text(85, 14, "update, private key", "middle")
    drawing.path("M85 18 V38")
    drawing.text(475, 14, "update that it reveals", "middle")
    drawing.path("M475 40 V20")
    drawing.box(195, 132, 170, "link", "setting, shared key", kind="plain")
    drawing.path("M195 156 H85 V91", "dash to")
    drawing.path("M365 156 H475 V91", "dash to")
    drawing.box(0, 190, 270, "likelihood", "what a message says: the adversary", kind="bad")
    drawing.box(290, 190, 270, "claim", "the promise and its proof: anybody", kind="good")
    return drawing


def trial():
    """How an audit makes a lower bound from two inputs."""
    drawing = Drawing(
        "An audit sends two neighbors many times, and bounds epsilon by how well a threshold tells them apart", 240
    )
    drawing.box(0, 8, 120, "input A", "n times")
    drawing.box(0, 92, 120, "input B", "its neighbor")
    drawing.box(180, 50, 120, "encode", "fresh keys", kind="wire")
    drawing.path("M120 32 C150 32 150 66 178 70")
    drawing.path("M120 116 C150 116 150 82 178 78")
    drawing.path("M300 74 H330")
    for center, kind in ((400, "bad"), (480, "good")):
        way = " L".join(
            f"{center + step} {130 - 100 * math.exp(-((step / 28) ** 2) / 2):.1f}" for step in range(-70, 71, 5)
        )
        drawing.path(f"M{way}", kind)
    drawing.path("M335 130 H556", "faint")
    drawing.path("M440 14 V130", "dash")
    drawing.text(440, 146, "threshold of the pilot", "middle")
    drawing.text(440, 164, "score of a message", "middle")
    drawing.rect(0, 184, 560, 50, "plain")
    drawing.text(14, 205, "If A is beyond the threshold in many messages and B in few,")
    drawing.text(14, 224, "epsilon is at least log(share of A / share of B), by the ends of exact intervals.")
    return drawing


def positions():
    """Why the positions of the tutorial's defense leak."""
    drawing = Drawing(
        "With an update in coordinate 0 this coordinate is always sent; with the zero update in a quarter of messages",
        150,
    )
    for row, (name, sent) in enumerate((("update (1, 0, 0, ...)", (0, 5, 9)), ("zero update", (3, 6, 10)))):
        y = 30 + 60 * row
        drawing.text(0, y + 21, name, "name")
        for place in range(12):
            kind = "bad" if place == 0 and not row else "wire" if place in sent else "plain"
            drawing.rect(180 + 31 * place, y, 26, 30, kind, 3)
    drawing.text(180, 18, "0: always sent above, in a quarter of messages below")
    drawing.text(180, 142, "filled: sent. The values have noise; the choice does not.")
    return drawing


def rooms():
    """The rooms of the code."""
    drawing = Drawing("The rooms, each above those that it may import", 460)
    stack = (
        (("cli", "the command, the fixtures of pytest"),),
        (("integrations", "Flower, Opacus, doctor"), ("gate", "baselines, verdicts")),
        (("study", "cells, jobs, engines, the store, scores"),),
        (("audit", "trials, tests of messages, bounds, the limit"),),
        (("federation", "one round, the loop, what an adversary sees"),),
        (("learn", "models, local training"), ("data", "data sets by name")),
        (("core", "contracts, claims, keys, threats, records, statistics"),),
    )
    for row, line in enumerate(stack):
        width = (380 - 10 * (len(line) - 1)) / len(line)
        for place, (name, what) in enumerate(line):
            drawing.box(place * (width + 10), 2 + 66 * row, width, name, what)
    for row, name, what in (
        (1, "reports", "pages, exports"),
        (4, "attacks", "core, learn, a round"),
        (6, "defenses", "core"),
    ):
        drawing.box(410, 2 + 66 * row, 150, name, what, kind="plain")
    drawing.path("M395 2 V452", "dash")
    return drawing


def message():
    """The way of one message, from a client's records to a score."""
    drawing = Drawing("The way of one message, from a client's records to a score", 436)
    lines = (
        (
            "client",
            ("local training", "learn.batch", ""),
            ("encode", "private, shared key", ""),
            ("bytes", "all that leaves it", "wire"),
        ),
        (
            "server",
            ("next model", "federation.loop", ""),
            ("average", "the mean update", ""),
            ("estimate", "checked by Round", ""),
        ),
        (
            "adversary",
            ("Attack.run", "knows the defense", "bad"),
            ("Observation", "all that it sees", ""),
            ("observe", "by the table SEES", ""),
        ),
        (
            "result",
            ("score", "study.score", ""),
            ("Result", "n and an interval", ""),
            ("report, gate", "read records only", ""),
        ),
    )
    for row, (side, *boxes) in enumerate(lines):
        y = 24 + 104 * row
        drawing.text(0, y - 8, side, "name")
        for place, (name, what, kind) in enumerate(boxes):
            drawing.box(188 * place, y, 154, name, what, kind=kind)
        for x in (154, 342):
            drawing.path(f"M{x} {y + 24} h32" if row in (0, 3) else f"M{x + 34} {y + 24} h-32")
    drawing.path("M453 73 V126")
    drawing.path("M77 128 V75")
    drawing.path("M530 48 H548 V256 H532")
    drawing.path("M77 281 V334")
    drawing.rect(0, 410, 154, 24, "plain dash")
    drawing.text(77, 427, "the truth", "middle")
    drawing.path("M77 410 V387", "dash to")
    drawing.text(166, 427, "is never shown to an attack")
    return drawing


PICTURES = (
    sees,
    stands,
    units,
    rating,
    ceiling,
    named,
    epsilons,
    study,
    lineup,
    picker,
    gate,
    tap,
    halves,
    trial,
    positions,
    rooms,
    message,
)


def drawn():
    """The text of each picture, by its file's name."""
    return {f"{picture.__name__}.svg": str(picture()) for picture in PICTURES}


if __name__ == "__main__":
    for name, text in drawn().items():
        (DOCS / "assets" / name).write_text(text, "utf-8")
