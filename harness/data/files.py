"""A user's own data: a folder of images, or an npz file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leakgauge.harness.core.contract import Examples
from leakgauge.harness.data import DataSet, DataUnreadable, Source, find, reading, split_by_class
from leakgauge.harness.data.torchvision_shim import torchvision

_CHANNELS = (1, 3)
_MAX_LABEL = 99_999  # larger labels are identifiers, not classes


def folder(path: Path) -> DataSet:
    """Images in one folder per class: PATH/train/<class>/* with PATH/test/<class>/*, or PATH/<class>/*.

    Without `train` or `test`, every fifth image of a class, sorted by name, is a test image. Gray images (modes 1 and L
    of Pillow) have one channel; palette images and images with transparency become RGB.

    Raises:
        DataMissing: no such folder.
        DataUnreadable: an image cannot be read, or differs from the first one in size or channels; a class has no
            image; `train` and `test` have different classes.
    """
    hint = "expected PATH/train/<class>/* with PATH/test/<class>/*, or PATH/<class>/*"
    find("image folder", [path.parent], [path.name], hint)
    with reading(path):
        if (path / "train").is_dir() and (path / "test").is_dir():
            (train, classes), (test, others) = _image_tree(path / "train"), _image_tree(path / "test")
            if classes != others:
                raise ValueError(f"expected the same classes in train and test, got {classes} and {others}")
        else:
            examples, classes = _image_tree(path)
            train, test = split_by_class(*examples)
        return DataSet(f"folder:{path}", train, test, classes, public=False)


def npz(path: Path) -> DataSet:
    """The arrays `x` and `y` of an npz file, with `x_test` and `y_test` if present.

    x: [n, features], [n, height, width], or four axes with the channels (1 or 3) second or last; uint8 is divided by
    255, floats must lie in [0, 1]. y: integers from 0. Without `x_test`, every fifth example of a class is for testing.

    Raises:
        DataMissing: no such file.
        DataUnreadable: the file is not as above, or holds pickled objects.
    """
    find("npz file", [path.parent], [path.name], "make it: numpy.savez(PATH, x=..., y=...)")
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


def _image_tree(path: Path) -> tuple[Examples, tuple[str, ...]]:
    """All images in the class folders of `path`, sorted, and the names of the classes."""
    tree = torchvision().datasets.ImageFolder(str(path))
    images = [_image(Path(name)) for name, _ in tree.samples]
    for (name, _), image in zip(tree.samples, images, strict=True):
        if image.shape != images[0].shape:
            raise DataUnreadable(
                f"cannot read {name}: expected the first image's {images[0].shape} (height, width, channels), "
                f"got {image.shape}"
            )
    x = _inputs("images", np.stack(images))
    return Examples(x, torch.tensor([label for _, label in tree.samples])), tuple(tree.classes)


def _image(path: Path) -> npt.NDArray[np.uint8]:
    """[height, width, 1 or 3] bytes."""
    from PIL import Image

    with reading(path), Image.open(path) as image:
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"expected 8 bits per channel, got an image of mode {image.mode}")
        pixels = np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))
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
