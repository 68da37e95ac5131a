"""A user's own data: a folder of images, or an npz file."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leakgauge.harness.core.contract import Examples
from leakgauge.harness.data import DataSet, DataUnreadable, Source, check_unpacked, find, reading, split_by_class

_CHANNELS = (1, 3)
_MAX_LABEL = 99_999  # larger labels are identifiers, not classes
_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as torchvision's ImageFolder


def folder(path: Path) -> DataSet:
    """Images in one folder per class: PATH/train/<class>/* with PATH/test/<class>/*, or PATH/<class>/*.

    Without `train` or `test`, every fifth image of a class, sorted by name, is a test image. Gray images (modes 1 and L
    of Pillow) have one channel; palette images and images with transparency become RGB. Links to folders, out of PATH,
    or to an image that is there anyway are left out, with a note.

    Raises:
        DataMissing: no such folder.
        DataUnreadable: an image cannot be read, or differs from the first one in size or channels; a class has no
            image; `train` and `test` have different classes; the images are too large.
    """
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
        examples = [_images(tree) for tree in trees]
        train, test = examples if split else split_by_class(*examples[0])
        note = f"{lost} links left out: to folders, out of the folder, or to images that are there" if lost else ""
        return DataSet(f"folder:{path}", train, test, classes, public=False, note=note)


def npz(path: Path) -> DataSet:
    """The arrays `x` and `y` of an npz file, with `x_test` and `y_test` if present.

    x: [n, features], [n, height, width], or four axes with the channels (1 or 3) second or last; uint8 is divided by
    255, floats must lie in [0, 1]. y: integers from 0. Without `x_test`, every fifth example of a class is for testing.

    Raises:
        DataMissing: no such file.
        DataUnreadable: the file is not as above, or holds pickled objects.
    """
    find("npz file", [path.parent], [path.name], "make it: numpy.savez(PATH, x=..., y=...)")
    with reading(path), zipfile.ZipFile(path) as members:  # what a member declares, its reader does not exceed
        check_unpacked(sum(member.file_size for member in members.infolist()), path.stat().st_size)
    with reading(path), np.load(path, allow_pickle=False) as arrays:
        if set(arrays) not in ({"x", "y"}, {"x", "y", "x_test", "y_test"}):
            raise ValueError(f"expected x and y, with both or none of x_test and y_test, got {', '.join(arrays)}")
        train = Examples(_inputs("x", arrays["x"]), _labels("y", arrays["y"]))
        if "x_test" in arrays:
            test = Examples(_inputs("x_test", arrays["x_test"]), _labels("y_test", arrays["y_test"]))
        elif len(train.x) == len(train.y):
            train, test = split_by_class(*train)
        else:
            raise ValueError(f"expected one label per example, got {len(train.x)} x and {len(train.y)} y")
        classes = tuple(str(label) for label in range(1 + max(torch.cat([train.y, test.y]).tolist(), default=-1)))
        return DataSet(f"npz:{path}", train, test, classes, public=False)


def _trees(path: Path, parts: Sequence[str]) -> tuple[list[dict[str, list[Path]]], int]:
    """The images in each part of a folder by class, sorted, and the number of links that are left out.

    A folder behind a link is not entered. A linked image counts if it lies in `path` and is not there by its own name.
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
    root, kept = path.resolve(), dict[Path, Path]()
    for file in sorted(named, key=Path.is_symlink):
        if (real := file.resolve()).is_relative_to(root):
            kept.setdefault(real, file)
    chosen = set(kept.values())
    links = {Path(at, name) for at, folders, names in os.walk(path) for name in folders + names}
    lost = sum(link.is_symlink() for link in links - chosen)
    trees = [{name: [file for file in files if file in chosen] for name, files in tree.items()} for tree in trees]
    if empty := [name for tree in trees for name, files in tree.items() if not files]:
        raise ValueError(f"expected images of each class, got no valid file for the classes {', '.join(empty)}")
    return trees, lost


def _images(tree: dict[str, list[Path]]) -> Examples:
    """All images, labeled by class."""
    images: list[npt.NDArray[np.uint8]] = []
    packed = 0
    for file in (file for files in tree.values() for file in files):
        packed += file.stat().st_size
        images.append(_image(file, images[0].nbytes * len(images) if images else 0, packed))
        if images[-1].shape != images[0].shape:
            raise DataUnreadable(
                f"cannot read {file}: expected the first image's {images[0].shape} (height, width, channels), "
                f"got {images[-1].shape}"
            )
    labels = [label for label, files in enumerate(tree.values()) for _ in files]
    return Examples(_inputs("images", np.stack(images)), torch.tensor(labels))


def _image(path: Path, before: int, packed: int) -> npt.NDArray[np.uint8]:
    """[height, width, 1 or 3] bytes; `before` of them, of all `packed` bytes on disk, are unpacked already."""
    from PIL import Image

    try:
        with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning), reading(path):
            image = Image.open(path)
        with reading(path), image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"expected 8 bits per channel, got an image of mode {image.mode}")
            check_unpacked(before + image.width * image.height, packed)
            pixels = np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataUnreadable(f"cannot read {path}: {error}; make the image smaller") from error
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _inputs(name: str, x: npt.NDArray[Any]) -> Tensor:
    """Features or images as float32, with the channels second."""
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4:
        is_first, is_last = x.shape[1] in _CHANNELS, x.shape[3] in _CHANNELS
        if is_first == is_last:
            raise ValueError(f"expected {name} with 1 or 3 channels second or last, and not both, got shape {x.shape}")
        x = x.transpose(0, 3, 1, 2) if is_last else x
    elif x.ndim != 2:
        raise ValueError(f"expected {name} with 2, 3 or 4 axes, got shape {x.shape}")
    if x.dtype == np.uint8:
        return torch.from_numpy(x.astype(np.float32, order="C")).div_(255)
    if not np.issubdtype(x.dtype, np.floating):
        raise ValueError(f"expected {name} of uint8 or floats, got {x.dtype}")
    return torch.from_numpy(x.astype(np.float32, order="C"))


def _labels(name: str, y: npt.NDArray[Any]) -> Tensor:
    """Labels as int64."""
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise ValueError(f"expected {name} with one axis of integers, got shape {y.shape} of {y.dtype}")
    if y.size and y.max() > _MAX_LABEL:
        raise ValueError(f"expected {name} up to {_MAX_LABEL}, got {y.max()}")
    return torch.from_numpy(y.astype(np.int64))


FORMS = {
    "folder": Source("a folder of images of one size: PATH/<class>/*, or PATH/train/<class>/* with PATH/test", folder),
    "npz": Source("an npz file with x and y, optionally x_test and y_test", npz),
}
"""By the text before the colon; the readers take PATH instead of the root folder."""
