"""matplotlib's SVG for a page with a strict policy: no style attributes, themed colors, short numbers, unique ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

_LINK = "{http://www.w3.org/1999/xlink}href"
_DROPPED_TAGS = ("metadata", "style", "title")
_DROPPED_PROPERTIES = ("font-family",)  # the page's own font is inherited
_LONG = re.compile(r"-?\d+\.\d{3,}")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_FONT = re.compile(r"(?:(?P<weight>bold|\d{3}) )?(?P<size>[\d.]+)px .*")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _declarations(style: str) -> dict[str, str]:
    """`fill: none; stroke: #000` as a mapping; the `font` shorthand as its size and weight."""
    declarations = {}
    for declaration in filter(None, (text.strip() for text in style.split(";"))):
        name, _, value = declaration.partition(":")
        declarations[name.strip()] = value.strip()
    shorthand = _FONT.fullmatch(declarations.pop("font", ""))
    if shorthand:
        declarations["font-size"] = shorthand["size"]
        if shorthand["weight"]:
            declarations["font-weight"] = shorthand["weight"]
    return {name: value for name, value in declarations.items() if name not in _DROPPED_PROPERTIES}


def _paint(element: ElementTree.Element, declarations: Mapping[str, str], colors: Mapping[str, str]) -> None:
    """Declarations as presentation attributes; a sentinel color as the class `f-NAME` (fill) or `k-NAME` (stroke)."""
    classes = []
    for name, value in declarations.items():
        color = colors.get(value.lower())
        if name in ("fill", "stroke") and color is not None:
            classes.append(f"{'f' if name == 'fill' else 'k'}-{color}")
        else:
            element.set(name, value)
    if classes:
        element.set("class", " ".join(classes))


def _clean(element: ElementTree.Element, prefix: str, colors: Mapping[str, str], wanted: set[str]) -> None:
    element.tag = _local(element.tag)
    declarations: dict[str, str] = {
        name: element.attrib.pop(name) for name in ("fill", "stroke") if name in element.attrib
    }
    declarations.update(_declarations(element.attrib.pop("style", "")))
    for name in list(element.attrib):
        value = element.attrib.pop(name)
        if name == "id" and value not in wanted:
            continue
        if name == "id":
            value = prefix + value
        elif name == _LINK:
            name, value = "href", "#" + prefix + value.removeprefix("#")
        elif name in ("d", "x", "y"):
            value = _LONG.sub(lambda number: f"{float(number[0]):.2f}", value)
        element.set(_local(name), _REFERENCE.sub(rf"url(#{prefix}\1)", value))
    _paint(element, declarations, colors)
    for child in list(element):
        if _local(str(child.tag)) in _DROPPED_TAGS:
            element.remove(child)
        else:
            _clean(child, prefix, colors, wanted)


def _add_titles(root: ElementTree.Element, titles: Mapping[str, Sequence[str]]) -> None:
    """A tooltip for each marker of a series, if matplotlib drew exactly one marker per point."""
    groups = {element.get("id", ""): element for element in root.iter()}
    for name, texts in titles.items():
        markers = [use for use in groups[name].iter("{http://www.w3.org/2000/svg}use")] if name in groups else []
        if len(markers) == len(texts):
            for marker, text in zip(markers, texts, strict=True):
                ElementTree.SubElement(marker, "tooltip").text = text


def embed(svg: str, *, prefix: str, colors: Mapping[str, str], titles: Mapping[str, Sequence[str]], label: str) -> str:
    """The `<svg>` element for a page whose policy forbids inline styles.

    Args:
        svg: a whole SVG file, as matplotlib writes it.
        prefix: prefix of every id, so that one page can hold several drawings.
        colors: class name by sentinel color, `#rrggbb` in lower case.
        titles: the tooltips of the markers in order, by id of their group.
        label: text for screen readers.

    Guarantees:
        No style attribute, no style element, no script, no reference outside the drawing.
        The same arguments give the same text.
    """
    root = ElementTree.fromstring(svg)
    _add_titles(root, titles)
    wanted = {use.get(_LINK, "").removeprefix("#") for use in root.iter()}
    wanted |= {
        name for element in root.iter() for value in element.attrib.values() for name in _REFERENCE.findall(value)
    }
    _clean(root, prefix, colors, wanted)
    for element in root.iter("tooltip"):
        element.tag = "title"
    width, height = root.attrib.pop("width", ""), root.attrib.pop("height", "")
    root.attrib.pop("version", None)
    if "viewBox" not in root.attrib:
        root.set("viewBox", f"0 0 {width.removesuffix('pt')} {height.removesuffix('pt')}")
    for name, value in {
        "role": "img",
        "aria-label": label,
        "stroke-linejoin": "round",
        "stroke-linecap": "butt",
    }.items():
        root.set(name, value)
    return ElementTree.tostring(root, encoding="unicode")
