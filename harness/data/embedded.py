"""Data sets of installed packages, which need no download and no configuration."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.data import DataSet, Source, find, reading, split_by_class

SIDE = 32
STRIDE = 8
FLAT = 0.05
CAPS = {"train": 400, "test": 100}
"""Maximum number of crops per class. Without it, class sizes would differ by a factor of up to three in training and
ten in testing."""

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
"""The photographs by file name, with their reduction factor, chosen so that a crop shows an object and not a texture.
motorcycle_right is left out, because it shows the same scene as motorcycle_left."""


def digits(root: Path) -> DataSet:
    """1,797 handwritten digits of 8x8 pixels with 17 gray levels, from scikit-learn; 80 % of each class for training.

    Source: Alpaydin and Kaynak 1998, UCI "Optical Recognition of Handwritten Digits" (its test set).
    """
    bunch = _digits()
    x = torch.from_numpy(bunch.images).to(torch.float32).div_(16).unsqueeze(1)
    train, test = split_by_class(x, torch.from_numpy(bunch.target).to(torch.int64))
    return DataSet("digits", train, test, tuple(map(str, bunch.target_names)), public=True)


@functools.cache
def _digits() -> Any:
    from sklearn.datasets import load_digits

    return load_digits()


class Crop(NamedTuple):
    """A square of `SIDE` pixels: its split, and its upper left corner in the reduced photograph."""

    photo: str
    split: str
    top: int
    left: int


def photos(root: Path) -> DataSet:
    """Color crops of 32x32 pixels from eight photographs in scikit-image's wheel; the photograph is the class.

    A photograph is reduced by the mean of blocks of 2x2 or 3x3 pixels (`FACTORS`) and cut on a grid of 8 pixels:
    training crops from the left two thirds of its width, test crops from the rest. Crops of one split overlap, so they
    are not independent samples.

    Guarantees:
        No pixel of a photograph is in both a training and a test crop.
        No crop is flat: the standard deviation over its pixels, averaged over the channels, is at least 0.05. The SSIM
        of a flat crop is meaningless.
        At most 400 training and 100 test crops per class, evenly chosen from the grid.
        Nothing is downloaded.

    Three of the files are JPEG, so `digest` depends on the decoder of the installed Pillow.

    Source: scikit-image, `skimage/data`; licenses in its README.txt.
    """
    crops = photo_crops()
    cut = np.stack([_pixels(reduced_photo(crop.photo), crop) for crop in crops])
    x = torch.from_numpy(cut).permute(0, 3, 1, 2).to(torch.float32).contiguous()
    y = torch.tensor([list(FACTORS).index(crop.photo) for crop in crops])
    is_test = torch.tensor([crop.split == "test" for crop in crops])
    train, test = Examples(x[~is_test], y[~is_test]), Examples(x[is_test], y[is_test])
    return DataSet("photos", train, test, tuple(FACTORS), public=True)


@functools.cache
def photo_crops() -> tuple[Crop, ...]:
    """The crops of `photos`: by class, the training crops before the test crops."""
    crops = []
    for name in FACTORS:
        photo = reduced_photo(name)
        height, width, _ = photo.shape
        edge = width * 2 // 3
        for split, start, stop in (("train", 0, edge), ("test", edge, width)):
            tops, lefts = range(0, height - SIDE + 1, STRIDE), range(start, stop - SIDE + 1, STRIDE)
            grid = [Crop(name, split, top, left) for top in tops for left in lefts]
            shown = [crop for crop in grid if _pixels(photo, crop).std(axis=(0, 1)).mean() >= FLAT]
            chosen = np.linspace(0, len(shown) - 1, min(CAPS[split], len(shown))).round().astype(int)
            crops += [shown[index] for index in chosen]
    return tuple(crops)


def _pixels(photo: npt.NDArray[np.float64], crop: Crop) -> npt.NDArray[np.float64]:
    """[SIDE, SIDE, 3] pixels of a crop of the reduced photograph."""
    return photo[crop.top : crop.top + SIDE, crop.left : crop.left + SIDE]


def _in_wheel(what: str, *names: str) -> Path:
    """The file of one of these names in scikit-image's wheel; raises DataMissing."""
    import skimage  # only for its folder: skimage.data would download a missing file

    return find(what, [Path(skimage.__file__).parent / "data"], [*names], "get it: pip install 'scikit-image>=0.26'")


@functools.cache
def reduced_photo(name: str) -> npt.NDArray[np.float64]:
    """[height, width, 3] in [0, 1], read-only: the photograph reduced by block means, without incomplete blocks.

    Raises:
        DataMissing: the installed scikit-image does not contain it.
    """
    from PIL import Image

    path = _in_wheel("photograph", f"{name}.png", f"{name}.jpg")
    with reading(path), Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.float64) / 255
    factor = FACTORS[name]
    height, width = pixels.shape[0] // factor, pixels.shape[1] // factor
    blocks = pixels[: height * factor, : width * factor].reshape(height, factor, width, factor, 3)
    reduced = np.asarray(blocks.mean(axis=(1, 3)))
    reduced.setflags(write=False)
    return reduced


def faces(root: Path) -> DataSet:
    """100 portraits and 100 pieces of background of 25x25 gray pixels, in scikit-image's wheel.

    The first 60 of each class are for training. Nothing is downloaded.

    Source: scikit-image, `skimage/data/lfw_subset.npy`, drawn from Huang et al. 2012, "Learning to align from scratch".
    """
    x = torch.from_numpy(_faces()).to(torch.float32).unsqueeze(1)
    y = torch.tensor([1] * 100 + [0] * 100)
    is_test = torch.arange(200) % 100 >= 60
    train, test = Examples(x[~is_test], y[~is_test]), Examples(x[is_test], y[is_test])
    return DataSet("faces", train, test, ("background", "face"), public=True)


@functools.cache
def _faces() -> npt.NDArray[np.float64]:
    path = _in_wheel("portraits", "lfw_subset.npy")
    with reading(path):
        return np.asarray(np.load(path), np.float64)


def gaussian_regression(root: Path) -> DataSet:
    """3,000 records of 30 features and a number, all independent standard normal; test and training records are equal.

    Source: Seif, Tandon, Li 2020, section 4. The number does not depend on the features, so the best weights are small.
    """
    drawn = rng.normal(Key(0).child("gaussian-regression"), (3000, 31))
    x, y = drawn[:, :30], drawn[:, 30].contiguous()
    low, high = x.min(), x.max()
    examples = Examples(((x - low) / (high - low)).clamp(0, 1), y)
    return DataSet(
        "gaussian-regression", examples, examples, (), public=True, low=low.reshape(1), span=(high - low).reshape(1)
    )


SETS = {
    "digits": Source("1,797 handwritten digits, 8x8 gray, from scikit-learn; no download", digits),
    "faces": Source("100 portraits and 100 backgrounds, 25x25 gray, from scikit-image; no download", faces),
    "photos": Source("32x32 color crops of 8 photographs, from scikit-image; no download", photos),
    "gaussian-regression": Source(
        "3,000 records of 30 normal features and a normal number; no download", gaussian_regression
    ),
}
