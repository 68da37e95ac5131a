"""Originals next to the reconstructions under each defense, if the pictures may be shown."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from leakgauge.harness.core.cases import headline_estimate
from leakgauge.harness.core.cell import Cell
from leakgauge.harness.core.labels import Label, counted, where
from leakgauge.harness.core.metrics import RECOGNIZABLE
from leakgauge.harness.core.result import Pictures, Result
from leakgauge.reports.sections import Section
from leakgauge.reports.select import Analysis, Group, best, recognizable
from leakgauge.reports.text.notation import fixed

Pixels = npt.NDArray[np.float32] | npt.NDArray[np.str_]

MOST_IMAGES = 8
MOST_DEFENSES = 12
MOST_SETTINGS = 3
MOST_BYTES = 2_000_000
"""Limit for all pictures together, so that the page stays below 5 MB."""


class Tile(NamedTuple):
    """One picture (`source`, a data URI), a text, or a word instead. `alt` describes it.

    text: its words, and whether each is that of the original at its place.
    """

    source: str
    alt: str
    word: str = ""
    caption: str = ""
    recognizable: bool = False
    text: tuple[tuple[str, bool], ...] = ()

    @property
    def size(self) -> int:
        """About the bytes that it takes on the page."""
        return len(self.source) + sum(len(word) for word, _ in self.text)

    @classmethod
    def of(cls, shown: Pixels, original: Pixels, alt: str, caption: str = "", recognizable: bool = False) -> Tile:
        """The tile of an image or of a text."""
        if shown.dtype.kind == "U":
            words = zip(shown.tolist(), (shown == original).tolist(), strict=True)
            return cls("", alt, "", caption, recognizable, tuple(words))
        return cls(data_uri(shown), alt, "", caption, recognizable)


class _Shown(NamedTuple):
    """One column: SSIM and recognizability of each image, and the pictures, or the reason why there are none."""

    group: Group
    ssim: tuple[float | None, ...] = ()
    seen: tuple[bool, ...] = ()
    pictures: Pictures | None = None
    lack: str = ""


def data_uri(pixels: Pixels) -> str:
    """A PNG at the image's own size, [height, width, 1 or 3] float in [0, 1], as a data URI."""
    levels = np.clip(np.rint(pixels * 255), 0, 255).astype(np.uint8)
    image = Image.fromarray(levels[:, :, 0] if levels.shape[2] == 1 else levels[:, :, :3])
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _what(shown: Pixels) -> str:
    return "record" if shown.dtype.kind == "U" else "image"


def _flat(batches: Pixels) -> Pixels:
    """[victims, batch, ...] as [images, ...]."""
    return batches.reshape(-1, *batches.shape[2:])


def _score_per_image(result: Result, images: int) -> tuple[float | None, ...]:
    """SSIM of each image, ROUGE-1 of each text, right columns of each record; a victim's one counts for its batch."""
    scores = (estimate.values for estimate in result.estimates if estimate.name in ("ssim", "rouge1", "columns"))
    values = next(scores, ())
    if not values or images % len(values):
        return (None,) * images
    return tuple(value for value in values for _ in range(images // len(values)))


def _shown(analysis: Analysis, group: Group, seed: int) -> _Shown:
    result = next((r for r in group.case.results if r.cell.training.seed == seed), None)
    if result is None:
        failed = any(failure.cell.training.seed == seed for failure in group.case.failures)
        return _Shown(group, lack="failed" if failed else "not run")
    pictures = analysis.run.pictures(result.cell.id)
    if pictures is None:
        return _Shown(group, lack="no picture")
    return _Shown(group, _score_per_image(result, len(_flat(pictures.original))), recognizable(result), pictures)


def _tile(shown: _Shown, at: int, original: Pixels, name: str, withheld: bool) -> Tile:
    if shown.pictures is None:
        return Tile("", f"{name}: {shown.lack}", shown.lack)
    originals, guesses = _flat(shown.pictures.original), _flat(shown.pictures.guess)
    if at >= len(originals) or not np.array_equal(originals[at], original):
        return Tile("", f"{name}: another image", "another image")
    ssim = shown.ssim[at]
    if ssim is None or not (shown.pictures.of_text or np.isfinite(guesses[at]).all()):
        return Tile("", f"{name}: failed", "failed", "no reconstruction")
    is_recognizable = at < len(shown.seen) and shown.seen[at]
    what, score = _what(original), "score" if shown.pictures.of_text else "SSIM"
    seen = ", recognizable" if is_recognizable else ""
    alt = f"{name}: reconstruction of {what} {at + 1}, {score} {fixed(ssim, 2)}{seen}"
    if withheld:
        return Tile("", alt, "withheld", fixed(ssim, 2), is_recognizable)
    return Tile.of(guesses[at], original, alt, fixed(ssim, 2), is_recognizable)


def _candidates(analysis: Analysis, setting: str) -> list[tuple[Group, ...]]:
    """The best naive and best aware group of each defense on the first target with reconstructions."""
    groups = [g for g in analysis.attacked if g.setting == setting and g.case.kind == "reconstruction"]
    target = next((g.case.target for g in groups if g.case.results), None)
    kinds: dict[str, dict[bool, list[Group]]] = {}
    for group in groups:
        if group.case.target == target:
            # without a defense, an attack is neither naive nor aware
            aware = group.case.info.aware and not group.undefended
            kinds.setdefault(group.defense, {False: [], True: []})[aware].append(group)
    return [tuple(best(kind) or kind[0] for kind in row.values() if kind) for row in kinds.values()]


def _choose(defenses: list[tuple[Group, ...]]) -> list[tuple[Group, ...]]:
    undefended = [groups for groups in defenses if groups[0].undefended]
    others = [groups for groups in defenses if not groups[0].undefended]
    most = sorted(others, key=lambda row: -max(-1.0 if group.value is None else group.value for group in row))
    chosen = most[: MOST_DEFENSES - len(undefended)]
    return undefended + [row for row in others if row in chosen]


def _rows(
    analysis: Analysis, columns: Sequence[_Shown], originals: Pixels, withheld: bool, budget: int
) -> Iterator[tuple[str, tuple[Tile, ...]]]:
    names = [analysis.defenses[shown.group.defense].text for shown in columns]
    for at, original in enumerate(originals[:MOST_IMAGES]):
        what = _what(original)
        alt = f"original of {what} {at + 1}"
        tiles = [_tile(shown, at, original, name, withheld) for shown, name in zip(columns, names, strict=True)]
        row = (Tile("", alt, "withheld") if withheld else Tile.of(original, original, alt), *tiles)
        budget -= sum(tile.size for tile in row)
        if budget < 0:
            return
        yield f"{what.capitalize()} {at + 1}", row


def _grid(analysis: Analysis, setting: str, budget: int) -> dict[str, Any] | None:
    """One setting. The first tile of a row is the original; `notes` say what is left out, with the reason.

    `columns`: number of columns of reconstructions, with the floor. `opening`: which tiles of a row begin a defense.
    """
    defenses = _candidates(analysis, setting)
    if not defenses:
        return None
    chosen = _choose(defenses)
    groups = [group for row in chosen for group in row]
    seed = next(result.cell.training.seed for group in groups for result in group.case.results)
    floor = next((analysis.floor(group) for group in groups if analysis.floor(group)), None)
    parts = [(analysis.defenses[row[0].defense], row) for row in chosen]
    parts += [(Label("floor", "", ""), (floor,))] if floor is not None else []
    grid = _drawn(analysis, parts, seed, budget)
    if grid is not None and len(chosen) < len(defenses):
        more = f"{len(chosen)} of {len(defenses)} defenses are shown: those with the highest mean SSIM."
        grid["notes"] = (*grid["notes"], more)
    return grid


def _drawn(
    analysis: Analysis, parts: Sequence[tuple[Label, tuple[Group, ...]]], seed: int, budget: int
) -> dict[str, Any] | None:
    """The grid of these groups, by defense, on one target; None without pictures."""
    groups = [group for _, row in parts for group in row]
    columns = [_shown(analysis, group, seed) for group in groups]
    originals = next((_flat(c.pictures.original) for c in columns if c.pictures is not None), None)
    if originals is None:
        return None
    data, notes = groups[0].case.training.task.data, []
    withheld = analysis.images == "redact" or data not in analysis.run.public_data
    if withheld:
        why = f"the data set {data} is not known to be public"
        if analysis.images == "redact":
            why = "option --images redact"
        elif data.startswith("recording:"):
            why = "the records were not granted; inspect into a new folder with --show-records or public=True"
        notes.append(f"Pictures are withheld: {why}. The numbers below them are unchanged.")
    rows = tuple(_rows(analysis, columns, originals, withheld, budget))
    if not rows:
        notes.append(f"The {_what(originals)}s are too large for this page.")
    elif len(rows) < len(originals):
        shown = counted(len(originals), _what(originals))
        notes.append(f"The first {len(rows)} of {shown}, in the order of the victims.")
    return {
        "setting": analysis.settings[groups[0].setting],
        "what": _what(originals).capitalize(),
        "where": where(groups[0].case.target),
        "seed": seed,
        "heads": [{"defense": label, "columns": [_column(analysis, group) for group in row]} for label, row in parts],
        "columns": sum(len(row) for _, row in parts),
        "opening": (True, *(at == 0 for _, row in parts for at in range(len(row)))),
        "rows": rows,
        "notes": tuple(notes),
    }


def of_cell(analysis: Analysis, cell: Cell) -> dict[str, Any] | None:
    """The originals and guesses of one cell, or why they are withheld; None without pictures."""
    group = next(group for group in analysis.groups if cell in group.case.cells)
    if analysis.images == "none" or cell.id not in analysis.run.results:
        return None
    grid = _drawn(analysis, [(analysis.defenses[group.defense], (group,))], cell.training.seed, MOST_BYTES)
    if grid is None:
        return None
    head = headline_estimate(analysis.run.results[cell.id], group.case.kind)
    grid["heads"][0]["columns"][0]["mean"] = fixed(None if head is None else head.value, 2)  # not over the seeds
    return {"grids": [grid], "withheld": "", "alone": True}


def _column(analysis: Analysis, group: Group) -> dict[str, str]:
    """The attack of a column. `word`: `naive` or `aware` of the defense; empty for a control."""
    info = group.case.info
    word = "" if info.floor or group.undefended else "aware" if info.aware else "naive"
    attack = f"{analysis.attack_text(group)}, {group.case.threat}"
    return {"word": word, "attack": attack, "mean": fixed(group.value, 2)}


def gallery(analysis: Analysis) -> dict[str, Any] | None:
    """The grids of the first settings, or why they are withheld; None if no attack reconstructs images."""
    if not any(group.case.kind == "reconstruction" for group in analysis.attacked):
        return None
    if analysis.images == "none":
        return {"grids": (), "withheld": "Pictures are left out: option --images none."}
    grids: list[dict[str, Any]] = []
    budget, settings = MOST_BYTES, list(analysis.settings)[:MOST_SETTINGS]
    for left, setting in zip(range(len(settings), 0, -1), settings, strict=True):
        grid = _grid(analysis, setting, budget // left)
        if grid is not None:
            grids.append(grid)
            budget -= sum(tile.size for _, row in grid["rows"] for tile in row)
    withheld = "" if grids else "No finished reconstruction has pictures."
    return {"grids": grids, "withheld": withheld, "recognizable": RECOGNIZABLE, "alone": False}


def strip(analysis: Analysis, setting: str) -> list[dict[str, Any]]:
    """One record under each defense, or without a defense several records; empty without pictures.

    The picture is that of the attack with the highest mean score, the flag that of the attack that identifies most
    people. The record is the first whose flags agree with each defense's majority: it is never chosen by eye.
    """
    found = [] if analysis.images == "none" else _candidates(analysis, setting)
    if not found:
        return []
    chosen = _choose(found)[: _STRIP - 1]
    seed = next(result.cell.training.seed for row in found for group in row for result in group.case.results)
    columns = [(_shown(analysis, best(row) or row[0], seed), _flags(row, seed)) for row in chosen]
    originals = next((_flat(shown.pictures.original) for shown, _ in columns if shown.pictures is not None), None)
    if originals is None:
        return []
    data = chosen[0][0].case.training.task.data
    withheld = analysis.images == "redact" or data not in analysis.run.public_data
    usual = [[2 * sum(flags) >= len(flags)] for _, flags in columns]
    agree = (at for at in range(len(originals)) if [flags[at : at + 1] for _, flags in columns] == usual)
    at = next(agree, 0)
    alone = len(chosen) == 1
    tiles = list[dict[str, Any]]()
    for record in range(min(_STRIP // 2, len(originals))) if alone else [at]:
        original = originals[record]
        alt = f"original of {_what(original)} {record + 1}"
        first = Tile("", alt, "withheld") if withheld else Tile.of(original, original, alt)
        tiles.append({"tile": first, "name": "original", "flag": None, "people": "never sent"})
        for shown, flags in columns:
            name = "recovered" if alone else analysis.defenses[shown.group.defense].text
            tile, rating = _tile(shown, record, original, name, withheld), analysis.rating(shown.group)
            flag = flags[record] if record < len(flags) else None
            people = "" if alone or rating.people is None else f"{rating.people.hits} of {rating.people.n} people"
            tiles.append({"tile": tile, "name": name, "flag": flag, "people": people})
    return tiles


_STRIP = 9  # pictures in a row


def _flags(row: tuple[Group, ...], seed: int) -> list[bool]:
    """Whether each record is identified, by the attack on this defense that identifies most."""
    results = [result for group in row for result in group.case.results if result.cell.training.seed == seed]
    found = (estimate for result in results for estimate in result.estimates if estimate.name == "identification")
    return max(([value == 1 for value in estimate.values] for estimate in found), key=sum, default=[])


SECTION = Section("pictures", "Originals and reconstructions", "Reconstructions", gallery, 40)
