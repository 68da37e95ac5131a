"""Data sets that come with installed packages: nothing to download, nothing to configure."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from leakgauge.harness.core.contract import Examples
from leakgauge.harness.data import DataSet, Source, find, reading, split_by_class

SIDE = 32
STRIDE = 8
FLAT = 0.05
CAPS = {"train": 400, "test": 100}
"""Crops a class at most. Without a cap, classes differ in size by up to three in training and ten in testing."""

FACTORS = {
    "astronaut": 2,
    "chelsea": 2,
    "coffee": 2,
    "hubble_deep_field": 3,
    "ihc": 2,
    "motorcycle_left": 2,
    "retina": 3,
    "rocket": 2,
}
"""The photographs by file name, and by how much each is made smaller, so that a crop shows a thing and not a texture.
motorcycle_right is left out: the same scene as motorcycle_left."""


def digits(root: Path) -> DataSet:
    """1,797 handwritten digits of 8x8 pixels with 17 levels, from scikit-learn; 80 % of each class for training.

    Source: Alpaydin and Kaynak 1998, UCI "Optical Recognition of Handwritten Digits" (its test set).
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.from_numpy(bunch.images).to(torch.float32).div_(16).unsqueeze(1)
    train, test = split_by_class(x, torch.from_numpy(bunch.target).to(torch.int64))
    return DataSet("digits", train, test, tuple(str(name) for name in bunch.target_names), is_image=True, public=True)


class Crop(NamedTuple):
    """One square of `SIDE` pixels: its upper left corner in the reduced photograph, and its split."""

    photo: str
    split: str
    top: int
    left: int


def photos(root: Path) -> DataSet:
    """Color crops of 32x32 pixels from the eight photographs in scikit-image's wheel; the photograph is the class.

    A photograph is reduced by the mean of blocks of 2x2 or 3x3 pixels (`FACTORS`) and cut on a grid of 8 pixels:
    training crops from the left two thirds of its width, test crops from the rest. Crops of one split overlap each
    other, so they are not independent samples.

    Guarantees:
        No pixel of a photograph is in a training and in a test crop.
        No crop is flat: the standard deviation over its pixels, averaged over the channels, is at least 0.05. SSIM of a
        flat crop means nothing.
        At most 400 training and 100 test crops a class, evenly chosen from the grid.
        Nothing is downloaded.

    Three of the files are JPEG, so that `digest` depends on the decoder of the installed Pillow.

    Source: scikit-image, `skimage/data`; licenses in its README.txt.
    """
    crops = photo_crops()
    reduced = {name: reduced_photo(name) for name in FACTORS}
    cut = np.stack([reduced[photo][top : top + SIDE, left : left + SIDE] for photo, _, top, left in crops])
    x = torch.from_numpy(cut).permute(0, 3, 1, 2).to(torch.float32).contiguous()
    y = torch.tensor([list(FACTORS).index(crop.photo) for crop in crops])
    is_test = torch.tensor([crop.split == "test" for crop in crops])
    train, test = Examples(x[~is_test], y[~is_test]), Examples(x[is_test], y[is_test])
    return DataSet("photos", train, test, tuple(FACTORS), is_image=True, public=True)


@functools.cache
def photo_crops() -> tuple[Crop, ...]:
    """Where the crops of `photos` lie, in the order of its training and then its test examples of each class."""
    crops = []
    for name in FACTORS:
        photo = reduced_photo(name)
        for split, cap in CAPS.items():
            kept = [crop for crop in grid(name, split, *photo.shape[:2]) if not is_flat(photo, crop)]
            chosen = np.linspace(0, len(kept) - 1, min(cap, len(kept))).round().astype(int)
            crops += [kept[index] for index in chosen]
    return tuple(crops)


def grid(photo: str, split: str, height: int, width: int) -> list[Crop]:
    """All crops of one split: `train` left of two thirds of the width, `test` right of it."""
    edge = width * 2 // 3
    start, stop = (0, edge) if split == "train" else (edge, width)
    return [
        Crop(photo, split, top, left)
        for top in range(0, height - SIDE + 1, STRIDE)
        for left in range(start, stop - SIDE + 1, STRIDE)
    ]


def is_flat(photo: npt.NDArray[np.float64], crop: Crop) -> bool:
    """Whether nothing is to be seen in the crop: the spread of each channel is under `FLAT` on average."""
    pixels = photo[crop.top : crop.top + SIDE, crop.left : crop.left + SIDE]
    return bool(pixels.std(axis=(0, 1)).mean() < FLAT)


@functools.cache
def reduced_photo(name: str) -> npt.NDArray[np.float64]:
    """[height, width, 3] in [0, 1], read-only: the photograph, reduced by block means; a rest at the edges is cut.

    Raises:
        DataMissing: the installed scikit-image does not bring it along.
    """
    import skimage  # for its place only; skimage.data would download what is not there
    from PIL import Image

    folder = Path(skimage.__file__).parent / "data"
    path = find("photograph", [folder], [f"{name}.png", f"{name}.jpg"], "get it: pip install 'scikit-image>=0.26'")
    with reading(path), Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.float64) / 255
    factor = FACTORS[name]
    height, width = pixels.shape[0] // factor, pixels.shape[1] // factor
    blocks = pixels[: height * factor, : width * factor].reshape(height, factor, width, factor, 3)
    reduced = np.asarray(blocks.mean(axis=(1, 3)))
    reduced.setflags(write=False)
    return reduced


SETS = {
    "digits": Source("1,797 handwritten digits, 8x8 gray, from scikit-learn; no download", digits),
    "photos": Source("32x32 color crops of 8 photographs, from scikit-image; no download", photos),
}
