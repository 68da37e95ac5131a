"""The four pages: the answer, the promise, what else was tested, and the rows for files."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import numpy as np

from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.rating import Finding, Rating, Word, adversary_of
from leakgauge.harness.core.result import Pictures, Run
from leakgauge.reports.dossier.promise import promise, rounds
from leakgauge.reports.dossier.subject import Subject, chosen
from leakgauge.reports.dossier.words import (
    FAILED,
    FOUND,
    NOTHING,
    OBSERVERS,
    OUTCOMES,
    SENTENCES,
    cut,
    ends,
    missing,
    observer,
    odds,
    times,
)
from leakgauge.reports.html import of_template
from leakgauge.reports.sections.checked import checked
from leakgauge.reports.sections.pictures import Tile
from leakgauge.reports.sections.provenance import provenance
from leakgauge.reports.select import Analysis, Images, best
from leakgauge.reports.text.notation import grouped

LENGTH = 800
"""The most words of the four pages."""

EXAMPLES, ROWS, TEXT = 3, 7, 6
"""The most examples, protections in the table, and words of a text that are shown."""

ENOUGH = 100
"""People; with fewer, a test says little about others."""


def render(run: Run, *, defense: str = "", images: Images = "public") -> str:
    """The dossier as HTML that loads nothing and has no script; the guarantees are those of `html.render`.

    Args:
        defense: see `subject.chosen`.
        images: see `Analysis`.

    Raises:
        UnknownNameError: no defense of the run has this name.
    """
    subject = chosen(Analysis(run, images=images), defense)
    pages = {"answer": _answer(subject), "promise": promise(subject), "files": _files(subject), "text": TEXT}
    for rows in range(ROWS, 0, -1):
        made = of_template("dossier.html", **pages, others=_others(subject, rows))
        if len(html.unescape(re.sub("<style>.*?</style>|<[^>]+>", " ", made, flags=re.DOTALL)).split()) <= LENGTH:
            break
    return made


# page 1


def _answer(subject: Subject) -> dict[str, object]:
    sites = subject.federation.clients
    tested = "+".join(one.adversary for one in subject.ratings).replace("broadcast", "malicious-server").split("+")
    count, words = _counted(subject)
    return {
        "sentence": _sentence(subject),
        "badge": subject.badge,
        "count": count,
        "words": words,
        "examples": _examples(subject),
        "sites": ["site 1", "site 2", "site 3" if sites < 4 else f"… site {grouped(sites)}"][:sites],
        "place": observer("server" if subject.rating is None else subject.rating.adversary).place,
        "accuracy": subject.accuracy,
        "system": _system(subject),
        "tested": [_tested(one) for one in subject.ratings] or ["Nobody"],
        "untested": [words.who for threat, words in OBSERVERS.items() if threat not in tested],
    }


def _tested(rating: Rating) -> str:
    promised = ", not promised" if rating.excluded else ""
    return f"{observer(rating.adversary).who}: {OUTCOMES[rating.word]}{promised}"


def _sentence(subject: Subject) -> str:
    rating = subject.rating
    if rating is None:
        return NOTHING
    if not any(group.case.results for group in subject.groups):
        return FAILED
    link = ", but" if rating.word is Word.HIDDEN else ", and"
    first = next(iter(rating.findings), None)
    return SENTENCES[rating.word].format(
        people=subject.nouns[0],
        source=observer(rating.adversary).source,
        promise=f"{link} nothing is promised against this observer" if rating.excluded else "",
        what="" if first is None else FOUND[subject.kind(first)][0].format(among=first.among),
    )


def _counted(subject: Subject) -> tuple[str, str]:
    rating = subject.rating
    if rating is None:
        return "?", "No attack returned a result."
    first = next(iter(rating.findings), None)
    if rating.word is Word.WEAK or first is None:
        lacks = "; ".join([*dict.fromkeys(map(missing, rating.lacks))][:4])
        told = "" if first is None or "; a coin" in lacks else f" {times(first)} {_told(subject, first)}"
        return "?", f"This is no all-clear. Missing: {lacks}.{told and f' So far, luck can explain this:{told}'}"
    if rating.word is Word.HIDDEN:
        two = next(one for one in rating.findings if one.among == 2)
        return times(two), f"{_told(subject, two)} By calculation, no attack on these messages does better."
    one = rating.people if rating.word is Word.LEAKS and rating.people is not None else first
    return times(one), _told(subject, one)


def _told(subject: Subject, finding: Finding) -> str:
    """What was counted, its 95 % interval, and the value of guessing."""
    words = FOUND[subject.kind(finding)][1]
    what = words.format(among=finding.among, records=subject.nouns[1], text=finding.text)
    if finding.high is None:
        return f"{what}."
    share = f"That is {100 * finding.value:.0f} %, in a larger test probably {ends(finding)}"
    return f"{what}. {share}; guessing gets {100 * finding.chance:.3g} %."


def _system(subject: Subject) -> str:
    protection = subject.words[:1].lower() + subject.words[1:] if subject.words != cut(subject.name) else ""
    named = f"{protection} ({subject.name})" if protection else cut(subject.name)
    protected = f"Protection: {named}." if subject.used else "No protection is in use."
    return (
        f"{counted(subject.federation.clients, 'site')} and a server train one program, the shared model, in "
        f"{counted(subject.federation.rounds, 'round')}. The {subject.nouns[1]} never leave a site; numbers computed "
        f"from them do, and can give people away. {protected}"
    )


def _examples(subject: Subject) -> dict[str, object] | None:
    """The first records, and what the attack with the highest score recovered; None: there is nothing to show."""
    analysis, rating = subject.analysis, subject.rating
    alike = [g for g in subject.groups if rating is not None and adversary_of(g.case.threat) == rating.adversary]
    group = best([g for g in alike if g.case.kind == "reconstruction"])
    if group is None or analysis.images == "none":
        return None
    result = group.case.results[0]
    pictures = analysis.run.pictures(result.cell.id)
    if pictures is None:
        return None
    data = subject.task.data
    withheld = analysis.images == "redact" or data not in analysis.run.public_data
    count = min(EXAMPLES, pictures.original.shape[0] * pictures.original.shape[1])
    flags = next((one.values for one in result.estimates if one.name == "identification"), ()) + (None,) * count
    named = [flags[at] == 1 and subject.word is Word.LEAKS for at in range(count)]  # recognized by this, as others were
    shown = [(*_tiles(pictures, at, withheld), found) for at, found in enumerate(named)]
    why = "on request" if analysis.images == "redact" else "nobody said that they may be shown"
    note = f"Withheld: {why}." if withheld else f"The first {count}, not chosen."
    if not any(named) and subject.nouns[1] in ("pictures", "texts"):
        note += f" The {subject.nouns[1]} could not be restored; "
        note += "people could still be picked out." if subject.word is Word.LEAKS else "that is no all-clear."
    note += f" They come from a public data set ({cut(data)}), not from your sites." if subject.shipped else ""
    return {"shown": shown, "note": note, "between": ", " if subject.nouns[1] == "rows" else " "}


def _tiles(pictures: Pictures, at: int, withheld: bool) -> tuple[Tile, Tile]:
    """A picture or a text, and what was recovered of it; words instead if it is withheld, or nothing was."""
    alts = f"Record {at + 1}, original", f"Record {at + 1}, recovered"
    if withheld:
        return Tile("", alts[0], "withheld"), Tile("", alts[1], "withheld")
    original, guess = (batches.reshape(-1, *batches.shape[2:])[at] for batches in (pictures.original, pictures.guess))
    is_whole = pictures.of_text or bool(np.isfinite(guess).all())
    made = Tile.of(guess, original, alts[1]) if is_whole else Tile("", alts[1], "failed")
    return Tile.of(original, original, alts[0]), made


# page 3


def _others(subject: Subject, most: int) -> dict[str, object]:
    rows = subject.alike
    others = [row for row in rows if row.used and row != subject]
    hid = [row for row in others if row.word is Word.HIDDEN and not any(one.excluded for one in row.ratings)]
    pick = max(hid, key=lambda row: row.accuracy or 0.0, default=None)
    title = "No other protection was tested."
    if pick is not None:
        title = f"{pick.words} ({cut(pick.label)}) hid these records{_cost(subject.bare, pick)}."
    elif others:
        title = "No tested protection was shown to hide these records."
    kept = [row for row in rows if not row.used or row in (subject, pick)]
    rest = sorted((row for row in rows if row.rating is not None and row not in kept), key=lambda row: row.badness)
    kept += rest[::-1][: max(0, most - len(kept))]
    shown = [row for row in rows if row in kept]
    guesses = {f"{100 * row.people.chance:.3g}" for row in shown if row.people is not None}
    return {
        "title": title,
        "guess": guesses.pop() if len(guesses) == 1 else "",
        "rows": [(row, row == subject, row == pick, "" if row.people is None else ends(row.people)) for row in shown],
        "more": len(rows) - len(kept),
        "helps": list(_helps(subject, pick)),
        "untested": list(_untested(subject)),
    }


def _cost(bare: Subject | None, pick: Subject) -> str:
    """What a protection costs, beside no protection; empty if it is unknown."""
    if bare is None or bare.accuracy is None or pick.accuracy is None:
        return ""
    lost = round(100 * (bare.accuracy - pick.accuracy))
    return f", for {counted(lost, 'point')} of accuracy" if lost > 0 else ", without loss of accuracy"


def _helps(subject: Subject, pick: Subject | None) -> Iterator[str]:
    """Advice; what this run did not test says so."""
    rating, hidden = subject.rating, subject.word is Word.HIDDEN
    if pick is not None and not hidden:
        claims = [checked(training)[0] for training in pick.trainings][:1]
        promises = [f" Its promise for one round: {odds(one.epsilon, one.delta)} of 100 guesses." for one in claims]
        yield f"{pick.words} ({cut(pick.label)}).{''.join(promises)}"
    elif subject.word in (Word.LEAKS, Word.SOME):
        yield "Take a protection whose promise over all rounds lets fewer guesses be right, and test again."
    if subject.word in (Word.WEAK, None):
        yield "Make a stronger test: page 1 says what is missing."
    if rating is not None and not hidden and observer(rating.adversary).source == OBSERVERS["server"].source:
        yield "Let the server see only the sum of many sites (not tested here)."
    if not hidden and subject.single and subject.federation.batch == 1:
        yield "Average many records into each message (not tested here)."
    if rating is None or max((one.n for one in rating.findings), default=0) < ENOUGH:
        yield f"Test with {ENOUGH} or more people before real data is used."
    yield "Test again after every change of data, model or settings."


def _untested(subject: Subject) -> Iterator[str]:
    if subject.single:
        yield f"Messages of several records{'' if subject.federation.batch == 1 else ', as this system sends'}"
    if len(subject.attacked) < subject.federation.rounds:
        yield f"Other rounds: attacked was {rounds(subject)}"
    if not any(group.case.kind == "membership" for group in subject.groups):
        yield "Whether a person’s record was used"
    if subject.lost:
        yield subject.lost
    yield f"{'Your data' if subject.shipped else 'Other data'}, your network, your access rules"


# page 4


def _files(subject: Subject) -> dict[str, object]:
    first = next((one.case for one in subject.rating.findings), None) if subject.rating is not None else None
    alike = [group for group in subject.groups if first in (None, group.case.identity)]
    commands = provenance(subject.analysis)["commands"]
    assert isinstance(commands, tuple)
    return {
        "study": f"{cut(subject.analysis.run.name)}, {cut(subject.label)}",
        "training": next((training.digest for training in subject.trainings), "no finished training"),
        "attack": next((result.digest for group in alike for result in group.case.results), "no finished attack"),
        "commands": [*commands[:-1], "leakgauge verify results"],
    }
