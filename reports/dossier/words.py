"""The words of the dossier, as tables. Those of page 1 name no epsilon, no SSIM and no parameter."""

from __future__ import annotations

import re
from typing import NamedTuple

from leakgauge.harness.core.labels import UNDEFENDED
from leakgauge.harness.core.rating import Finding, Word
from leakgauge.harness.core.result import chance
from leakgauge.reports.sections.checked import AUTHORS_WORD, BY_AUDIT
from leakgauge.reports.text.notation import listing

LONGEST = 60
"""The most characters of a name."""


class Observer(NamedTuple):
    """An adversary: who it is, what it looks at, and its place in the drawing of the system."""

    who: str
    source: str
    place: str


OBSERVERS = {
    "server": Observer("A server that follows the rules, but studies every message", "what the sites send", "server"),
    "colluding-server": Observer("A server that works with all other sites", "what the sites send", "server"),
    "malicious-server": Observer("A server that tampers with the model", "what the sites send", "server"),
    "aggregator": Observer(
        "A server that gets only the total of all messages", "the total of what the sites send", "server"
    ),
    "eavesdropper": Observer("Somebody who listens on the line", "what the sites send", "line"),
    "participant": Observer("Another site", "the shared model of each round", "site"),
    "public": Observer("Somebody who holds only the finished model", "the finished model", "model"),
}
"""By threat."""

_POWERS = {"broadcast": "chooses the model", "craft": "sends false messages"}

_PROTECTIONS = {
    "Rounding and noise on each number": ("jopeq", "jopeq-sound"),
    "Rounding and noise on pairs of numbers": ("jopeq-t",),
    "Rounding that acts like noise": ("cepam-gaussian", "cepam-laplace", "cepam-clip"),
    "Rounding": ("sdq", "sdq-lattice"),
    "Random noise on the whole message": ("gaussian",),
    "Random noise on each number": ("laplace",),
    "Random noise on some numbers": ("piecewise",),
    "A random direction in place of the message's own": ("privunit", "ppr"),
    "Random noise on pairs of numbers": ("t-noise",),
    "Random noise for each record": ("udp",),
    "Random noise for each record, less in later rounds": ("udp-crd", "udp-lei"),
    "Random noise in each training step": ("dp-sgd",),
    "Random noise that the server adds": ("dp-fedavg", "dp-ftrl"),
    "Noise on the radio by which all sites send at once": ("ota",),
    "Noise in separate radio channels": ("ota-orthogonal",),
    "Each message cut to a few random bits": ("mvu", "rqm", "vqsgd"),
    "Only a random part of each message is sent": ("sqsgd",),
    "Only a part of each message is sent, as it is": ("random-mask", "top-k"),
    "Parts of one layer's message are left out": ("soteria",),
    "Random numbers inside the model": ("precode",),
    "None": (UNDEFENDED,),
}

PROTECTIONS = {name: words for words, names in _PROTECTIONS.items() for name in names}
"""What a shipped defense does; another one is shown by its name alone."""

SENTENCES = {
    Word.LEAKS: "{people} can be recognized from {source}{promise}. Do not use real data with these settings.",
    Word.SOME: "From {source}, an observer can tell {what}{promise}. "
    "Change the protection and test again before real data is used.",
    Word.WEAK: "This test is too weak to tell what leaks{promise}. Do not use real data before a stronger test.",
    Word.HIDDEN: "These records stayed hidden in {source}{promise}. "
    "Use with records like these can be considered; any change needs a new test.",
}
"""The answer, and what to do, by rating."""

OUTCOMES = {
    Word.LEAKS: "recognizes people",
    Word.SOME: "learns something",
    Word.WEAK: "the test is too weak to tell",
    Word.HIDDEN: "finds nothing in these records",
}
"""What an adversary gets, by rating."""

FAILED = "The test failed: no attack finished. Nothing is known; repeat it before real data is used."
NOTHING = "No attack ran. Nothing is known; test before real data is used."

FOUND = {
    "named": (
        "which of {among} records is behind a message",
        "people were picked out. Each time the attack saw a message and {among} {records}, one of them the right one",
    ),
    "labels": ("the category of a record", "categories of records were guessed right"),
    "membership": (
        "whether a person’s record was used",
        "of the times, a record that was used is told from one that was not",
    ),
    "source": ("which site a record belongs to", "records were traced to their site"),
    "linkability": ("which messages come from one site", "messages were linked to their site"),
    "property": ("a property of a site’s records", "of the times, the site whose records have a property is found"),
    "foreseen": ("which record is behind the messages of many rounds", "{text}"),
}
"""By what was found: the words after `can tell`, and those after the number."""

_OF_TWO = r"given a message and two records, the attack picked the right one for \1 of \2 people"
_OF_TWO += "; a coin: half; luck can explain this"

_MISSING = (
    (r"^of ([\d\s]+) cells?, ", r"of \1 attacks, "),
    (r"^no lineup ran$", "a line-up of known records"),
    (r"^no lineup can tell .*", "a method that proves what this observer cannot learn"),
    (r"^the lineup has no rival$", "other records in the line-up"),
    (r"^the defense's likelihood .*", "proof that no better attack exists"),
    (r"^(\d+) of (\d+) named among 2: (\d+) messages would do$", rf"more messages, \3 in all would do ({_OF_TWO})"),
    (r"^(\d+) of (\d+) named among 2: more than (\d+) .*", rf"more messages, over \3 in all ({_OF_TWO})"),
)

"""What a rating lacks, in words after `Missing:`."""

NOUNS = {"ssim": ("People", "pictures"), "rouge1": ("People’s texts", "texts"), "columns": ("People’s records", "rows")}
"""By a metric that only this form of data has: what is recognized, and what the records are."""

UNITS = {
    "coordinate": "One number of a message",
    "sub-vector": "A few numbers of a message",
    "message": "A whole message, so its person",
    "record": "One record",
    "client": "All records of a site",
}

VERDICTS = {
    BY_AUDIT: "is not kept: a measurement shows it",
    "BROKEN": "is not kept",
    "UNPROVED": "is not proved",
    "VACUOUS": "is too weak to protect anybody",
    AUTHORS_WORD: "rests on its author’s word",
    "LOOSE": "holds by its proof",
    "HOLDS": "holds by its proof",
}

CODES = {
    "CONSISTENT": "The program does what its description says.",
    "CONTRADICTED": "The program differs from its description.",
    "INCONCLUSIVE": "Whether the program does what its description says is open.",
}


def cut(text: str) -> str:
    """A name of at most `LONGEST` characters."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def observer(adversary: str) -> Observer:
    """An adversary such as `server+broadcast`; an unknown one is shown as it is."""
    name, *powers = adversary.split("+")
    one = OBSERVERS.get(name, Observer(cut(name), "what it sees", "server"))
    return one._replace(who=listing([one.who, *(_POWERS.get(power, power) for power in powers)]))


def missing(lack: str) -> str:
    """One of `Rating.lacks` in words; those that are plain stay."""
    return next((re.sub(pattern, words, lack) for pattern, words in _MISSING if re.search(pattern, lack)), lack)


def odds(epsilon: float | None, delta: float) -> str:
    """How many of 100 guesses may be right under (epsilon, delta); None is infinity."""
    share = 1.0 if epsilon is None else chance(epsilon, delta)
    return "all 100" if share > 0.9999 else f"{100 * share:.4g}"


def times(finding: Finding) -> str:
    """`16 of 16`; for a rank statistic, the share of pairs that are ordered right; `half` for a foreseen finding."""
    if finding.n:
        return f"{finding.hits} of {finding.n}"
    return "half" if finding.high is None else f"{100 * finding.value:.0f} %"


def ends(finding: Finding) -> str:
    """The 95 % interval of a share: `79 to 100 %`."""
    return f"{100 * (finding.low or 0.0):.0f} to {100 * (1.0 if finding.high is None else finding.high):.0f} %"
