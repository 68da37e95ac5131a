"""A user's own data: a folder of images, or an npz file."""

from __future__ import annotations

import math
import os
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from leakgauge.harness.core.files import regular
from leakgauge.harness.core.form import SERIES, Vocabulary
from leakgauge.harness.core.form import Form as InputForm
from leakgauge.harness.data import DataSet, DataUnreadable, Form, check_unpacked, find, reading
from leakgauge.harness.data.arrays import Array, Arrays, data_set, stacked

if TYPE_CHECKING:
    from PIL.Image import Image

_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as in torchvision.ImageFolder

_MOST_PIXELS = 4096  # maximum side to which images are resized
_LISTED = 12  # maximum number of keys of a file that an error names
IDS = "inputids"
"""The name that tokenizers give to token ids."""

INPUTS = ("x", "data", "image", "images", "img", "pixelvalues", "feature", "features", "input", "inputs", IDS)
LABELS = ("y", "label", "labels", "target", "targets")
"""Common names of inputs and labels, in lower case and with letters only."""


def folder(rest: str, options: Mapping[str, str]) -> DataSet:
    """Images in one folder per class: PATH/train/<class>/* with PATH/test/<class>/*, or PATH/<class>/*.

    Without `train` or `test`, every fifth image of a class, sorted by name, is a test image. Gray images (modes 1 and L
    of Pillow) have one channel; palette images and images with transparency become RGB, and if any image is RGB, gray
    images do too. Links to folders, to places outside PATH, or to images already included are left out, with a note.

    Args:
        rest: PATH.
        options: `size`, as in 64 or 64x48 (width x height): an image is resized until it covers this size, and its
            center is cut out.

    Raises:
        DataMissing: there is no such folder.
        DataUnreadable: an image cannot be read, or differs from the first one in size; a class has no image; `train`
            and `test` have different classes; the images are too large.
        ValueError: the size is invalid.
    """
    path, size = Path(rest).expanduser(), _size(options.get("size", ""))
    hint = "expected PATH/train/<class>/* with PATH/test/<class>/*, or PATH/<class>/*"
    find("image folder", [path.parent], [path.name], hint)
    with reading(path):
        split = (path / "train").is_dir() and (path / "test").is_dir()
        trees, lost = _trees(path, ("train", "test") if split else ("",))
        if not trees[0]:
            raise ValueError("expected a folder of images for each class, got none")
        classes, others = (tuple(tree) for tree in (trees[0], trees[-1]))
        if classes != others:
            raise ValueError(f"expected the same classes in train and test, got {classes} and {others}")
        x = _images([file for tree in trees for files in tree.values() for file in files], size)
        y = np.array([label for tree in trees for label, files in enumerate(tree.values()) for _ in files])
        count = sum(map(len, trees[0].values()))
        parts = [Arrays(x[rows], y[rows], is_first=True) for rows in (slice(count), slice(count, None))]
        note = f"{lost} links left out: to folders, out of the folder, or to images already included" if lost else ""
        return data_set(f"folder:{path}", parts[0], parts[1] if split else None, classes, note)


def npz(rest: str, options: Mapping[str, str]) -> DataSet:
    """The arrays of an npz file: inputs and labels, optionally those of a test set; see `arrays.data_set`.

    The arrays are found by common names (`x`, `images`, `X_train`, `labels`, `test_images`, ...) or named by options;
    if `x` or `y` is an option, a test set is used only if it is named too.

    Args:
        rest: PATH.
        options: the file's keys of `x`, `y`, `x_test` and `y_test`; `form`: `tokens` or `series`.

    Raises:
        DataMissing: there is no such file.
        DataUnreadable: the file is not as above, or holds pickled objects.
    """
    path = Path(rest).expanduser()
    find("npz file", [path.parent], [path.name], "make it: numpy.savez(PATH, x=..., y=...)")
    with reading(path), zipfile.ZipFile(path) as members:  # a member never unpacks to more than its declared size
        check_unpacked(sum(member.file_size for member in members.infolist()), path.stat().st_size)
    with reading(path), np.load(path, allow_pickle=False) as arrays:
        keys = _keys(list(arrays), {role: key for role, key in options.items() if role != "form"})
        content = {role: np.asarray(arrays[key]) for role, key in keys.items()}
        test = Arrays(content["x_test"], content["y_test"]) if "x_test" in content else None
        form = _form(options.get("form", ""), [content[role] for role in ("x", "x_test") if role in content])
        return data_set(f"npz:{path}", Arrays(content["x"], content["y"]), test, form=form)


def _form(name: str, xs: Sequence[Array]) -> InputForm | Vocabulary | None:
    """The form of a name."""
    if name not in ("", "tokens", "series"):
        raise ValueError(f"expected form=tokens or form=series, got form={name}")
    if name == "tokens":
        return Vocabulary(1 + max(int(np.nan_to_num(x).max(initial=0)) if x.dtype.kind in "iuf" else 0 for x in xs))
    return SERIES if name else None


def _keys(keys: Sequence[str], options: Mapping[str, str]) -> dict[str, str]:
    roles: dict[str, list[str]] = {role: [key] for role, key in options.items()}
    for key in keys:
        role = role_of(key)
        if role and role not in options and not (role.endswith("_test") and {"x", "y"} & options.keys()):
            roles.setdefault(role, []).append(key)
    several = [named for named in roles.values() if len(named) > 1]
    missing = set(options.values()) - set(keys)
    if set(roles) not in ({"x", "y"}, {"x", "y", "x_test", "y_test"}) or several or missing:
        names = ", ".join(repr(key[:40]) for key in keys[:_LISTED]) + (", ..." if len(keys) > _LISTED else "")
        test = "both or none of x_test and y_test"
        absent = f"no key {min(missing)[:40]!r}; " if missing else ""
        raise ValueError(
            f"{absent}expected one x and one y, with {test}, got the keys {names or 'of no array'}; "
            "name them: npz:PATH?x=KEY&y=KEY, and &x_test=KEY&y_test=KEY if there is a test set"
        )
    return {role: named[0] for role, named in roles.items()}


def letters(key: str) -> str:
    """A key in lower case and with letters only."""
    return re.sub(r"[^a-z]", "", key.casefold())


def role_of(key: str) -> str:
    """The role of a key with a common name: x, y, x_test or y_test; empty for other keys."""
    plain = letters(key)
    for split, suffix in (("train", ""), ("test", "_test"), ("", "")):
        bare = plain.removeprefix(split).removesuffix(split)
        if bare in INPUTS + LABELS and split in plain:
            return ("x" if bare in INPUTS else "y") + suffix
    return ""


def _trees(path: Path, parts: Sequence[str]) -> tuple[list[dict[str, list[Path]]], int]:
    """The images in each part of a folder by class, sorted, and the number of links that are left out.

    Linked folders are not entered. A linked image counts if it lies in `path` and is not already included by its own
    name.
    """
    trees = [
        {
            entry.name: [Path(at, name) for at, _, names in sorted(os.walk(entry)) for name in sorted(names)]
            for entry in sorted((path / part).iterdir())
            if entry.is_dir() and not entry.is_symlink()
        }
        for part in parts
    ]
    named = [file for tree in trees for files in tree.values() for file in files if file.suffix.lower() in _ENDINGS]
    root, by_place = path.resolve(), dict[Path, Path]()
    for file in sorted(named, key=Path.is_symlink):
        if (real := file.resolve()).is_relative_to(root):
            by_place.setdefault(real, file)
    chosen = set(by_place.values())
    links = {Path(at, name) for at, folders, names in os.walk(path) for name in folders + names}
    lost = sum(link.is_symlink() for link in links - chosen)
    trees = [{name: [file for file in files if file in chosen] for name, files in tree.items()} for tree in trees]
    if empty := [name for tree in trees for name, files in tree.items() if not files]:
        raise ValueError(f"expected images of each class, got no valid file for the classes {', '.join(empty)}")
    return trees, lost


def _size(text: str) -> tuple[int, int] | None:
    """(width, height) of the option `size`; None: images are not resized."""
    if not text:
        return None
    match = re.fullmatch("([0-9]{1,4})(?:x([0-9]{1,4}))?", text)
    sides = [int(side or match[1]) for side in match.groups()] if match else [0]
    if not all(1 <= side <= _MOST_PIXELS for side in sides):
        raise ValueError(f"expected size=64 or size=64x48 (width x height) up to {_MOST_PIXELS}, got size={text}")
    return sides[0], sides[1]


def _images(files: Iterable[Path], size: tuple[int, int] | None) -> Array:
    """[n, channels, height, width]: all images."""
    images: list[Array] = []
    paths: list[Path] = []
    packed = most = 0
    for path in files:
        with reading(path):
            packed += regular(path)
        images.append(_image(path, most * len(images), packed, size))
        paths.append(path)
        most = max(most, images[-1].nbytes)
    check_unpacked(most * (len(images) - 1), packed)  # in case only the last image is RGB
    try:
        return stacked(images)
    except ValueError as error:
        text, number = error.args
        text = f"{text} (channels, height, width); add ?size=64 to resize"
        raise DataUnreadable(f"cannot read {paths[number]}: {text}") from error


def _image(path: Path, before: int, packed: int, size: tuple[int, int] | None) -> Array:
    """[1 or 3, height, width] bytes of an image.

    before, packed: bytes that earlier images took unpacked, and bytes of all images on disk so far.
    """
    from PIL import Image

    strict = warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning)
    with reading(path), strict, Image.open(path) as image:
        check_unpacked(before + max(image.width * image.height, math.prod(size) if size else 0), packed)
        return pixels(image, size)


def pixels(image: Image, size: tuple[int, int] | None = None) -> Array:
    """[1 or 3, height, width] bytes of an image, resized until it covers (width, height), and cropped to its center.

    Guarantees:
        The same pixels as torchvision's `Resize` (by bilinear filter) and `CenterCrop`, if `size` is a square.

    Raises:
        ValueError: the image has more than 8 bits per channel, or is so elongated that resizing makes it huge.
    """
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"expected 8 bits per channel, got an image of mode {image.mode}")
    image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    if size is not None:
        (width, height), (w, h) = size, image.size
        wide = width * h >= height * w
        scaled = (width, width * h // w) if wide else (height * w // h, height)
        check_unpacked(math.prod(scaled), 0)
        image = image.resize(scaled, resample=2)  # bilinear
        left, top = round((scaled[0] - width) / 2), round((scaled[1] - height) / 2)
        image = image.crop((left, top, left + width, top + height))
    values = np.asarray(image)
    return values[None] if values.ndim == 2 else values.transpose(2, 0, 1)


FORMS = {
    "folder": Form(
        "PATH",
        "a folder of images: PATH/<class>/*, or PATH/train/<class>/* with PATH/test; ?size=64 or ?size=64x48 resizes",
        folder,
        ("size",),
    ),
    "npz": Form(
        "PATH",
        "an npz file with x and y, optionally x_test and y_test; other keys: ?x=KEY&y=KEY&x_test=KEY&y_test=KEY; "
        "?form=tokens, ?form=series",
        npz,
        ("x", "y", "x_test", "y_test", "form"),
    ),
}
"""The forms of data in files, by the text before the colon."""
