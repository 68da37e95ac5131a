"""What the attacker sees: originals beside the reconstructions under each defense, as far as they may be shown."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from leakgauge.harness.core.cell import Target
from leakgauge.harness.core.result import Pictures, Result
from leakgauge.reports.select import RECOGNIZABLE, Analysis, Group, is_recognizable
from leakgauge.reports.text.labels import UNDEFENDED, Label
from leakgauge.reports.text.notation import fixed, plural, where

Images = Literal["public", "redact", "none"]
Pixels = npt.NDArray[np.float32]

MOST_IMAGES = 8
MOST_DEFENSES = 12
MOST_SETTINGS = 3
MOST_BYTES = 2_000_000
"""Of all pictures together, so that the page stays below 5 MB."""


class Tile(NamedTuple):
    """One picture, or a word in its place. `source` is a data URI or empty; `alt` describes it."""

    source: str
    alt: str
    word: str
    caption: str
    recognizable: bool


class Column(NamedTuple):
    """By which attack the pictures of a column are. `word` says whether it knows the defense; empty for a control."""

    word: str
    attack: str
    mean: str


class Head(NamedTuple):
    """Whose pictures stand below: one column, or one of a naive and one of an aware attack."""

    defense: Label
    columns: tuple[Column, ...]


class Grid(NamedTuple):
    """One setting: `rows` are images, their first tile the original. `notes` say what is left out and why."""

    setting: str
    where: str
    seed: int
    heads: tuple[Head, ...]
    rows: tuple[tuple[str, tuple[Tile, ...]], ...]
    notes: tuple[str, ...]

    @property
    def columns(self) -> int:
        """Of reconstructions, the floor's among them."""
        return sum(len(head.columns) for head in self.heads)

    @property
    def opening(self) -> tuple[bool, ...]:
        """For each tile of a row, whether it is the first of its defense."""
        return (True, *(at == 0 for head in self.heads for at in range(len(head.columns))))


class Gallery(NamedTuple):
    """All grids, or the reason why there are none."""

    grids: tuple[Grid, ...]
    withheld: str
    recognizable: float = RECOGNIZABLE


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
    """The reconstruction of one image under one defense."""
    if shown.pictures is None:
        return Tile("", f"{name}: {shown.lack}", shown.lack, "", False)
    originals, guesses = _flat(shown.pictures.original), _flat(shown.pictures.guess)
    if at >= len(originals) or not np.array_equal(originals[at], original):
        return Tile("", f"{name}: another image", "another image", "", False)
    ssim = shown.ssim[at]
    if ssim is None or not np.isfinite(guesses[at]).all():
        return Tile("", f"{name}: failed", "failed", "no reconstruction", False)
    seen = is_recognizable(ssim)
    alt = f"{name}: reconstruction of image {at + 1}, SSIM {fixed(ssim, 2)}{', recognizable' if seen else ''}"
    return Tile("" if withheld else data_uri(guesses[at]), alt, "withheld" if withheld else "", fixed(ssim, 2), seen)


def _candidates(analysis: Analysis, setting: str) -> tuple[Target, list[tuple[Group, ...]]] | None:
    """The first target that has reconstructions, and on it the groups of each defense that are shown."""
    groups = [g for g in analysis.attacked if g.setting == setting and g.kind == "reconstruction"]
    target = next((g.column.target for g in groups if g.results), None)
    if target is None:
        return None
    found = []
    for defense in dict.fromkeys(group.defense.label for group in groups):
        mine = [g for g in groups if g.defense.label == defense and g.column.target == target]
        # without a defense there is nothing to know
        kinds = (
            [mine] if defense == UNDEFENDED else [[g for g in mine if g.info.aware is aware] for aware in (False, True)]
        )
        found.append(tuple(analysis.best(kind) or kind[0] for kind in kinds if kind))
    return target, [groups for groups in found if groups]


def _choose(found: list[tuple[Group, ...]]) -> list[tuple[Group, ...]]:
    """At most `MOST_DEFENSES` defenses in the study's order, no defense first; of more, those that leak most."""
    open_ = [groups for groups in found if groups[0].undefended]
    others = [groups for groups in found if not groups[0].undefended]
    kept = sorted(others, key=lambda groups: -_most(groups))[: MOST_DEFENSES - len(open_)]
    return open_ + [groups for groups in others if groups in kept]


def _most(groups: tuple[Group, ...]) -> float:
    """The highest mean SSIM under one defense."""
    return max(-1.0 if group.value is None else group.value for group in groups)


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
    target, defenses = found
    chosen = _choose(defenses)
    groups = [group for groups in chosen for group in groups]
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
    if not rows:
        notes.append("The images are too large for this page.")
    elif len(rows) < len(originals):
        notes.append(f"The first {len(rows)} of {plural(len(originals), 'image')}, in the order of the victims.")
    if len(chosen) < len(defenses):
        notes.append(f"{len(chosen)} of {len(defenses)} defenses: those that leak most by mean SSIM.")
    heads = tuple(Head(_name(analysis, g[0]), tuple(_column(analysis, one) for one in g)) for g in chosen)
    if floor is not None:
        heads = (*heads, Head(Label("floor", "", ""), (_column(analysis, floor),)))
    return Grid(analysis.settings[setting], where(target), seed, heads, rows, tuple(notes))


def _name(analysis: Analysis, group: Group) -> Label:
    """The defense of a group."""
    return analysis.defenses[group.defense.label]


def _column(analysis: Analysis, group: Group) -> Column:
    """The heading of one column."""
    word = "" if group.info.floor or group.undefended else "aware" if group.info.aware else "naive"
    attack = f"{analysis.attacks[group.column.attack.label].text}, {group.column.threat}"
    return Column(word, attack, fixed(group.value, 2))


def gallery(analysis: Analysis, images: Images) -> Gallery | None:
    """The grids of the first settings; None if no attack reconstructs images."""
    if not any(group.kind == "reconstruction" for group in analysis.attacked):
        return None
    if images == "none":
        return Gallery((), "Pictures were left out by the option --images none.")
    grids: list[Grid] = []
    budget, settings = MOST_BYTES, list(analysis.settings)[:MOST_SETTINGS]
    for left, setting in zip(range(len(settings), 0, -1), settings, strict=True):
        grid = _grid(analysis, setting, images, budget // left)
        if grid is not None:
            grids.append(grid)
            budget -= sum(len(tile.source) for _, row in grid.rows for tile in row)
    if not grids:
        return Gallery((), "No reconstruction finished, or none has pictures: there is nothing to show.")
    return Gallery(tuple(grids), "")
