"""Accuracy against leakage as one picture: a point a defense, drawn as SVG that follows the theme of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup
from rich.cells import cell_len

from leakgauge.harness.core.sinks import visible

MOST_NAMES = 12
"""The most defenses that are all named; of more, only those with a reason are."""

_FAR = 30.0  # points of accuracy above a model that guesses from which on that is left out

_CHARACTER, _LINE, _SIZE = 6.9, 15.0, 7.0  # widths of a letter, of a line, and of half a marker, in pixels


class Spot(NamedTuple):
    """One defense. Shares are in percent.

    Attributes:
        name: of the defense; note: a short remark below it, such as `claim broken`.
        about: all numbers in one line.
        state: class of its rating: `leaks`, `some`, `weak` or `hides`; or of its proof: `full`, `half` or `hollow`.
        x, left, right: accuracy and its range; x None: not known.
        y, low, high: leakage with its interval.
        named: whether it is named even among many.
    """

    name: str
    note: str
    about: str
    state: str
    x: float | None
    left: float
    right: float
    y: float
    low: float
    high: float
    named: bool


class Frame(NamedTuple):
    """What stands around the points: reference lines and words.

    Attributes:
        x_words, y_words: of the axes.
        lines: height in percent, words, and class of each horizontal line.
        guess: accuracy of a model that guesses, in percent; None: unknown.
        corner: least accuracy and most leakage of the best corner; None: no corner.
    """

    x_words: str
    y_words: str
    lines: tuple[tuple[float, str, str], ...]
    guess: float | None
    corner: tuple[float, float] | None


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.bottom <= other.top or other.bottom <= self.top)


class _Scale(NamedTuple):
    """Where numbers lie in a drawing of this size; accuracies from `start` to 100 %."""

    width: float
    height: float
    start: float

    def x(self, value: float) -> float:
        return 44 + (self.width - 64) * (value - self.start) / max(1e-9, 100 - self.start)

    def y(self, value: float) -> float:
        return 30 + (self.height - 80) * (100 - value) / 100


def drawn(spots: Sequence[Spot], frame: Frame) -> Markup:
    """The picture for wide and for narrow pages."""
    wide, narrow = (_svg(spots, frame, *size) for size in ((800.0, 350.0), (460.0, 400.0)))
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(wide, narrow)


_ALONE = """svg { --ink: #1f2430; --muted: #6b7080; --page: #ffffff; --grid: #e3e5ec; --s1: #3d5bd9; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6e8f0; --muted: #a2a8bd; --page: #15171f; --grid: #2c3040; --s1: #8c9bea; }
}
text { font: 12.5px system-ui, sans-serif; fill: var(--muted); } .name { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--grid); } .floor, .ci, .lead { stroke: var(--muted); } .floor { stroke-dasharray: 2 4; }
.ci { stroke-width: 2; opacity: 0.5; } .ci.thin { stroke-width: 1.2; } .lead { opacity: 0.5; }
.full circle, .half path { fill: var(--s1); }
.half circle, .hollow circle { fill: var(--page); stroke: var(--s1); stroke-width: 2; }
"""


def alone(picture: Markup, title: str) -> str:
    """The wide form of a picture of proofs as a file of its own, which follows the theme of its reader."""
    svg = str(picture).partition('<div class="wide">')[2].partition("</div>")[0]
    head, _, rest = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).partition(">")
    about = Markup("<title>{}</title>").format(visible(title))
    return f"{head}>{about}<style>{_ALONE}</style>{rest}\n"


def _svg(spots: Sequence[Spot], frame: Frame, width: float, height: float) -> Markup:
    least = min((spot.left for spot in spots if spot.x is not None), default=50.0)
    if frame.guess is not None and frame.guess > least - _FAR:
        least = min(least, frame.guess)
    scale = _Scale(width, height, max(0.0, 10 * ((least - 3) // 10)))
    pairs = _placed(spots, scale)
    left = scale.x(scale.start) + 6
    notes = [_Box(left, y - 11, left + 6.2 * len(words), y + 3) for y, words in _notes(frame, scale)]
    parts = [*_frame(frame, scale), *_intervals(pairs, scale), *_names(pairs, scale, notes), *_markers(pairs)]
    title = Markup('role="img" aria-label="{}, {}: one point a defense"').format(frame.y_words, frame.x_words)
    return Markup('<svg viewBox="0 0 {:g} {:g}" {}>{}</svg>').format(width, height, title, Markup("").join(parts))


def _placed(spots: Sequence[Spot], scale: _Scale) -> list[tuple[Spot, float, float]]:
    """Each point with its place; equal places stand side by side, and unknown accuracies in a row."""
    pairs, taken = list[tuple[Spot, float, float]](), list[_Box]()
    for number, spot in enumerate(spots):
        step = (scale.width - 120) / max(1, len(spots))
        x = scale.x(spot.x) if spot.x is not None else 80 + step * (number + 0.5)
        y = scale.y(spot.y)
        for move in (0, 1, -1, 2, -2, 3, -3, 4, -4):
            box = _around(x + 15 * move, y)
            if not any(box.meets(other) for other in taken) and 40 < x + 15 * move < scale.width - 8:
                x += 15 * move
                break
        taken.append(_around(x, y))
        pairs.append((spot, x, y))
    return pairs


def _around(x: float, y: float) -> _Box:
    return _Box(x - _SIZE, y - _SIZE, x + _SIZE, y + _SIZE)


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start", more: str = "") -> Markup:
    form = '<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}"{}>{}</text>'
    return Markup(form).format(kind, x, y, anchor, Markup(more), visible(words))


def _stroke(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    form = '<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>'
    return Markup(form).format(kind, x1, y1, x2, y2)


def _frame(frame: Frame, scale: _Scale) -> Iterator[Markup]:
    left, right, bottom = scale.x(scale.start), scale.x(100), scale.y(0)
    if frame.corner is not None:
        x, y = scale.x(frame.corner[0]), scale.y(frame.corner[1])
        form = '<rect class="best" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="3"/>'
        yield Markup(form).format(x, y, right - x, bottom - y)
        yield _text(right - 6, y - 5, "best corner", "bestt", "end")
    for share in range(0, 101, 25):
        yield _stroke("grid", left, scale.y(share), right, scale.y(share))
        yield _text(left - 6, scale.y(share) + 4, f"{share} %", "tick", "end")
    if frame.x_words:
        step = 10 if 100 - scale.start <= 60 else 20
        for share in range(int(scale.start), 101, step):
            yield _text(scale.x(share), bottom + 18, f"{share} %", "tick", "middle")
        yield _text(right, bottom + 38, f"{frame.x_words} →", "axis", "end")
    yield _text(2, 12, f"↑ {frame.y_words}", "axis")
    for (y, words), (height, _, kind) in zip(_notes(frame, scale), frame.lines, strict=True):
        yield _stroke(kind, left, scale.y(height), right, scale.y(height))
        yield _text(left + 6, y, words, f"{kind}t")
    if frame.guess is not None and frame.guess > scale.start:
        at = scale.x(frame.guess)
        yield _stroke("floor", at, scale.y(100), at, bottom)
        turn = f' transform="rotate(-90 {at - 5:.1f} {scale.y(50):.1f})"'
        yield _text(at - 5, scale.y(50), "a model that guesses", "floort", "middle", turn)


def _notes(frame: Frame, scale: _Scale) -> list[tuple[float, str]]:
    return [(scale.y(share) + (14 if share > 50 else -5), words) for share, words, _ in frame.lines]


def _intervals(pairs: Sequence[tuple[Spot, float, float]], scale: _Scale) -> Iterator[Markup]:
    for spot, x, y in pairs:
        yield _stroke(f"ci {spot.state}", x, scale.y(spot.low), x, scale.y(spot.high))
        if spot.x is not None and spot.right > spot.left:
            yield _stroke(f"ci thin {spot.state}", scale.x(spot.left), y, scale.x(spot.right), y)


def _names(pairs: Sequence[tuple[Spot, float, float]], scale: _Scale, notes: Sequence[_Box]) -> Iterator[Markup]:
    """The name of each point at the first free place: beside it, or above or below it with a line that leads there."""
    taken = [*notes, *(_around(x, y) for _, x, y in pairs)]
    many = len(pairs) > MOST_NAMES
    for spot, x, y in sorted(pairs, key=lambda pair: (not pair[0].named, pair[1])):
        if many and not spot.named:
            continue
        capitals = sum(letter.isupper() for letter in spot.name)  # in bold type half as wide again
        length = _CHARACTER * max(cell_len(visible(spot.name)) + capitals / 2, len(spot.note))
        rows = 1 + bool(spot.note)
        for dx, dy, anchor in _tries():
            edge = x + dx
            start = edge if anchor == "start" else edge - length if anchor == "end" else edge - length / 2
            box = _Box(start, y + dy - _LINE + 3, start + length, y + dy + 3 + _LINE * (rows - 1))
            inside = box.left > 2 and box.right < scale.width - 2 and box.top > 16 and box.bottom < scale.height - 46
            if inside and not any(box.meets(other) for other in taken):
                taken.append(box)
                if abs(dy) > 12:
                    yield _stroke("lead", x, y, x, y + dy + (4 if dy < 0 else -11))
                yield _text(edge, y + dy, spot.name, "name", anchor)
                if spot.note:
                    yield _text(edge, y + dy + _LINE, spot.note, "brk", anchor)
                break


def _tries() -> Iterator[tuple[float, float, str]]:
    """Places of a name around its point, the nearest first."""
    yield from ((11, 4, "start"), (-11, 4, "end"))
    for far in (18, 34, 50, 66, 82, 98, 114):
        for side in (-far, far):
            yield from ((4, side, "start"), (-4, side, "end"), (0, side, "middle"))


_SHAPES = {
    "leaks": '<rect x="{l:.1f}" y="{t:.1f}" width="14" height="14" rx="2"/>'
    '<path d="M{a:.1f} {b:.1f}l6.8 6.8m0-6.8l-6.8 6.8"/>',
    "some": '<path d="M{x:.1f} {t:.1f}l7.5 13.5h-15z"/>',
    "hides": '<circle cx="{x:.1f}" cy="{y:.1f}" r="6.5"/>',
    "weak": '<circle cx="{x:.1f}" cy="{y:.1f}" r="6.5"/><text x="{x:.1f}" y="{q:.1f}" text-anchor="middle">?</text>',
    "full": '<circle cx="{x:.1f}" cy="{y:.1f}" r="6.5"/>',
    "half": '<circle cx="{x:.1f}" cy="{y:.1f}" r="6.5"/><path d="M{x:.1f} {u:.1f}a6.5 6.5 0 0 0 0 13z"/>',
    "hollow": '<circle cx="{x:.1f}" cy="{y:.1f}" r="6.5"/>',
}
"""The shape of each rating, and of each proof: color is never alone."""


def _markers(pairs: Sequence[tuple[Spot, float, float]]) -> Iterator[Markup]:
    for spot, x, y in pairs:
        shape = _SHAPES[spot.state].format(x=x, y=y, l=x - 7, t=y - 7, a=x - 3.4, b=y - 3.4, q=y + 4, u=y - 6.5)
        form = '<g class="pt {}" tabindex="0"><title>{}</title>{}</g>'
        yield Markup(form).format(spot.state, visible(spot.about), Markup(shape))
