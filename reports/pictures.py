"""What the attacker sees: originals beside the reconstructions under each defence, as far as they may be shown."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from harness.cell import Target
from harness.result import Pictures, Result
from reports.labels import Label
from reports.notation import fixed, plural, where
from reports.select import RECOGNISABLE, Analysis, Group, is_recognisable

Images = Literal["public", "redact", "none"]
Pixels = npt.NDArray[np.float32]

MOST_IMAGES = 8
MOST_COLUMNS = 12
MOST_SETTINGS = 3
MOST_BYTES = 2_000_000
"""Of all pictures together, so that the page stays below 5 MB."""


class Tile(NamedTuple):
    """One picture, or a word in its place. `source` is a data URI or empty; `alt` describes it."""

    source: str
    alt: str
    word: str
    caption: str
    recognisable: bool


class Head(NamedTuple):
    """Whose pictures stand in a column, and by which attack."""

    defense: Label
    attack: str
    mean: str


class Grid(NamedTuple):
    """One setting: `rows` are images, their first tile the original. `notes` say what is left out and why."""

    setting: str
    where: str
    seed: int
    heads: tuple[Head, ...]
    rows: tuple[tuple[str, tuple[Tile, ...]], ...]
    notes: tuple[str, ...]


class Gallery(NamedTuple):
    """All grids, or the reason why there are none."""

    grids: tuple[Grid, ...]
    withheld: str
    recognisable: float = RECOGNISABLE


class _Shown(NamedTuple):
    """One column before it is drawn: SSIM of each image, and the pictures where they exist."""

    group: Group
    ssim: tuple[float | None, ...]
    pictures: Pictures | None
    lack: str


def data_uri(pixels: Pixels) -> str:
    """A PNG at the image's own size, [height, width, 1 or 3] float in [0, 1], as a data URI."""
    levels = np.clip(np.rint(pixels * 255), 0, 255).astype(np.uint8)
    image = Image.fromarray(levels[:, :, 0] if levels.shape[2] == 1 else levels[:, :, :3])
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _flat(batches: Pixels) -> Pixels:
    """[victims, batch, ...] as [images, ...]."""
    return batches.reshape(-1, *batches.shape[2:])


def _ssim_per_image(result: Result, images: int) -> tuple[float | None, ...]:
    """SSIM of each image; a victim's, where only that is known, stands for each image of its batch."""
    values = next((estimate.values for estimate in result.estimates if estimate.name == "ssim"), ())
    if not values or images % len(values):
        return (None,) * images
    return tuple(value for value in values for _ in range(images // len(values)))


def _shown(analysis: Analysis, group: Group, seed: int) -> _Shown:
    """What there is of one group at one seed."""
    result = next((r for r in group.results if r.cell.training.seed == seed), None)
    if result is None:
        failed = any(failure.cell.training.seed == seed for failure in group.failures)
        return _Shown(group, (), None, "failed" if failed else "not run")
    pictures = analysis.run.pictures(result.cell.id)
    if pictures is None:
        return _Shown(group, (), None, "no picture")
    return _Shown(group, _ssim_per_image(result, len(_flat(pictures.original))), pictures, "")


def _tile(shown: _Shown, at: int, original: Pixels, name: str, withheld: bool) -> Tile:
    """The reconstruction of one image under one defence."""
    if shown.pictures is None:
        return Tile("", f"{name}: {shown.lack}", shown.lack, "", False)
    originals, guesses = _flat(shown.pictures.original), _flat(shown.pictures.guess)
    if at >= len(originals) or not np.array_equal(originals[at], original):
        return Tile("", f"{name}: another image", "another image", "", False)
    ssim = shown.ssim[at]
    if ssim is None or not np.isfinite(guesses[at]).all():
        return Tile("", f"{name}: failed", "failed", "no reconstruction", False)
    seen = is_recognisable(ssim)
    alt = f"{name}: reconstruction of image {at + 1}, SSIM {fixed(ssim, 2)}{', recognisable' if seen else ''}"
    return Tile("" if withheld else data_uri(guesses[at]), alt, "withheld" if withheld else "", fixed(ssim, 2), seen)


def _candidates(analysis: Analysis, setting: str) -> tuple[Target, dict[str, Group]] | None:
    """The first target that has reconstructions, and on it the best attack of each defence by mean SSIM."""
    groups = [g for g in analysis.attacked if g.setting == setting and g.kind == "reconstruction"]
    target = next((g.column.target for g in groups if g.results), None)
    if target is None:
        return None
    best: dict[str, Group] = {}
    for defense in dict.fromkeys(group.defense.label for group in groups):
        mine = [g for g in groups if g.defense.label == defense and g.column.target == target]
        chosen = analysis.best(mine) or next(iter(mine), None)
        if chosen is not None:
            best[defense] = chosen
    return target, best


def _choose(best: dict[str, Group]) -> list[Group]:
    """At most `MOST_COLUMNS` groups in the study's order, no defence first; of more, those that leak most."""
    open_ = [group for group in best.values() if group.undefended]
    others = [group for group in best.values() if not group.undefended]
    room = MOST_COLUMNS - len(open_)
    kept = sorted(others, key=lambda group: -(group.value if group.value is not None else -1.0))[:room]
    chosen = {group.defense.label for group in kept}
    return open_ + [group for group in others if group.defense.label in chosen]


def _rows(
    analysis: Analysis, columns: list[_Shown], originals: Pixels, withheld: bool, budget: int
) -> Iterator[tuple[str, tuple[Tile, ...]]]:
    """The rows of a grid, as many as the budget of bytes allows."""
    for at, original in enumerate(originals[:MOST_IMAGES]):
        first = Tile("" if withheld else data_uri(original), f"original of image {at + 1}", "", "", False)
        first = first._replace(word="withheld" if withheld else "")
        names = [analysis.defenses[shown.group.defense.label].text for shown in columns]
        tiles = [_tile(shown, at, original, name, withheld) for shown, name in zip(columns, names, strict=True)]
        row = (first, *tiles)
        budget -= sum(len(tile.source) for tile in row)
        if budget < 0:
            return
        yield f"Image {at + 1}", row


def _grid(analysis: Analysis, setting: str, images: Images, budget: int) -> Grid | None:
    """The grid of one setting; None if it has no pictures."""
    found = _candidates(analysis, setting)
    if found is None:
        return None
    target, best = found
    groups = _choose(best)
    seed = next(result.cell.training.seed for group in groups for result in group.results)
    floor = next((analysis.floor(group) for group in groups if analysis.floor(group)), None)
    columns = [_shown(analysis, group, seed) for group in [*groups, *([floor] if floor else [])]]
    originals = next((_flat(c.pictures.original) for c in columns if c.pictures is not None), None)
    if originals is None:
        return None
    data = groups[0].cells[0].training.task.data
    withheld = images == "redact" or data not in analysis.run.public_data
    rows = tuple(_rows(analysis, columns, originals, withheld, budget))
    notes = []
    if withheld:
        why = (
            "by the option --images redact" if images == "redact" else f"the data set {data} is not known to be public"
        )
        notes.append(f"Pictures are withheld: {why}. The numbers under them are as measured.")
    if len(rows) < len(originals):
        notes.append(f"The first {len(rows)} of {plural(len(originals), 'image')}, in the order of the victims.")
    if len(groups) < len(best):
        notes.append(f"{len(groups)} of {len(best)} defences: those that leak most by mean SSIM.")
    return Grid(analysis.settings[setting], where(target), seed, _heads(analysis, columns), rows, tuple(notes))


def _heads(analysis: Analysis, columns: list[_Shown]) -> tuple[Head, ...]:
    """The headings of the columns; a control is called floor."""
    heads = []
    for shown in columns:
        group = shown.group
        name = Label("floor", "", "") if group.info.floor else analysis.defenses[group.defense.label]
        attack = f"{analysis.attacks[group.column.attack.label].text}, {group.column.threat}"
        heads.append(Head(name, attack, fixed(group.value, 2)))
    return tuple(heads)


def gallery(analysis: Analysis, images: Images) -> Gallery | None:
    """The grids of the first settings; None if no attack reconstructs images."""
    if not any(group.kind == "reconstruction" for group in analysis.attacked):
        return None
    if images == "none":
        return Gallery((), "Pictures were left out by the option --images none.")
    grids: list[Grid] = []
    budget = MOST_BYTES
    for setting in list(analysis.settings)[:MOST_SETTINGS]:
        grid = _grid(analysis, setting, images, budget)
        if grid is not None:
            grids.append(grid)
            budget -= sum(len(tile.source) for _, row in grid.rows for tile in row)
    if not grids:
        return Gallery((), "No reconstruction finished, or none has pictures: there is nothing to show.")
    return Gallery(tuple(grids), "")
