"""A user's arrays as a data set: their shapes, types, scale and labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.form import Form, Series, Tokens, Vocabulary
from leakgauge.harness.data import DataSet, split_by_class

Array = npt.NDArray[Any]

CHANNELS = (1, 3)
_MAX_LABEL = 99_999  # larger labels are identifiers, not classes

# Labels are codes, such as 0 and 255, if fewer than one in this many numbers from 0 to the largest label occurs
_SPARSE = 10
_EACH = 5  # minimum mean number of examples per class if labels exceed `_MAX_LABEL`; identifiers have fewer
_MOST_IDS = 2**24  # float32 holds whole numbers below it
_LOOKED_AT = 1_000_000  # about the most entries that `odd_ranges` looks at

# standard deviation below which the constant of SSIM, 0.03^2, outweighs the variance of an image
_FLAT = 0.03
_APART, _SHIFTED = 1.8, 1.5  # ratio of the spreads, and shift in units of a spread; x and (x - 0.5) / 0.5 are apart
MAX_ITEMS = 1_000_000
"""Maximum number of items of a data set; the environment variable LEAKGAUGE_MAX_ITEMS overrides this limit."""

MAX_BYTES = 2**31
"""Maximum bytes of its inputs as float32; the environment variable LEAKGAUGE_MAX_UNPACKED overrides this limit."""


class Arrays(NamedTuple):
    """Inputs and labels of a split. is_first: images are known to have their channels second, as in torch."""

    x: Array
    y: Array
    is_first: bool = False


class _Scale(NamedTuple):
    """The scale that brings inputs to [0, 1], float64, of the shape of one input with axes of length 1."""

    low: Array
    span: Array

    def apply(self, x: Array) -> Array:
        """(x - low) / span."""
        return ((x - self.low) / self.span).astype(np.float32).clip(0, 1)


def data_set(
    name: str,
    train: Arrays,
    test: Arrays | None,
    classes: Sequence[str] = (),
    note: str = "",
    *,
    whole: bool = False,
    form: Form | Vocabulary | None = None,
) -> DataSet:
    """A data set of these arrays.

    Args:
        train: x [n, features], [n, height, width], or four axes with 1 or 3 channels second or last, of uint8, which is
            divided by 255, or of floats, integers or booleans. y [n] or [n, 1]: integers, booleans, texts, or floats,
            which make a regression. y [n, classes]: 0 and 1, whether an example has a class. y [n, a, b, ...] of
            integers: a class for each place, as in a segmentation.
        test: as `train`; None: every fifth example of a class, or of a regression, is for testing.
        classes: names of integer labels, if there are enough; otherwise the numbers are the names.
        whole: without `test`, all examples are for training, and the first one is for testing too.
        form: `SERIES`: x is [n, channels, T]; a vocabulary: x is [n, T] token ids; None: by the shape of x.

    Guarantees:
        If all x are in [0, 1], they are not scaled. Otherwise each channel, or each feature of a table, that leaves
        [0, 1] is scaled to [0, 1] by its range in train and test; a constant one becomes 0.
        Integers from 0 are class numbers; some classes may be missing. Other integers, such as -1 and 1, 1 to 10, or 0
        and 255, become the classes 0, 1, ... in ascending order, as do texts that are all numbers, and other texts in
        alphabetical order; the class names are the original labels. `DataSet.note` states the changes of inputs and
        labels, and odd ranges of the inputs.

    Raises:
        ValueError: the arrays have any other form, or a value is not finite.
    """
    parts = [train] if test is None else [train, test]
    suffixes = ("", "_test")[: len(parts)]
    for suffix, split in zip(suffixes, parts, strict=True):
        if split.x.ndim == 0 or split.y.ndim == 0 or len(split.x) != len(split.y):
            text = f"expected one label per example, got x{suffix} {split.x.shape} and y{suffix} {split.y.shape}"
            raise ValueError(text)
    form = form.vocabulary if isinstance(form, Tokens) else form
    read = {Series: _series, Vocabulary: _ids}.get(type(form), _inputs)
    xs = [read(f"x{suffix}", split.x, split.is_first) for suffix, split in zip(suffixes, parts, strict=True)]
    vocabulary = form if isinstance(form, Vocabulary) else None
    scale = None if vocabulary else _scale(xs)
    if vocabulary and len({x.shape[1:] for x in xs}) == 1:
        form = Tokens(vocabulary, tuple(np.concatenate(xs).max(0).astype(int).tolist()))
    stored = [x.astype(np.float32) if scale is None else scale.apply(x) for x in xs]
    ys, listed, coded = _labels([f"y{suffix}" for suffix in suffixes], [split.y for split in parts], len(classes))
    fits = len(classes) == len(listed) if coded or ys[0].ndim == 2 else len(classes) >= len(listed)
    names = tuple(classes) if listed and fits and train.y.dtype.kind in "biuf" else listed
    ranged = "" if scale is None else "inputs scaled to [0, 1] by their range (the model gets the original units)"
    odd = "" if vocabulary else odd_ranges(stored, xs)
    note = "; ".join(filter(None, (note, ranged, odd, coded)))
    first, *others = [Examples(torch.from_numpy(x.copy(order="C")), y) for x, y in zip(stored, ys, strict=True)]
    if not others and whole:
        others = [Examples(first.x[:1], first.y[:1])]
    both = (first, others[0]) if others else split_by_class(*first)
    low, span = (None, None) if scale is None else (torch.from_numpy(array.astype(np.float32)) for array in scale)
    kind = form if isinstance(form, Form) else None
    places = _of_places([split.y for split in parts])
    return DataSet(name, *both, names, public=False, note=note, stated=kind, places=places, low=low, span=span)


def check_size(items: int, entries: int) -> None:
    """Raise ValueError if there are too many items, or too many entries in all inputs together."""
    most = int(os.environ.get("LEAKGAUGE_MAX_ITEMS") or MAX_ITEMS)
    if items > most:
        raise ValueError(
            f"got {items:,} items, expected at most {most:,}; take fewer, or set the environment variable "
            "LEAKGAUGE_MAX_ITEMS=NUMBER"
        )
    size = int(os.environ.get("LEAKGAUGE_MAX_UNPACKED") or MAX_BYTES)
    if 4 * entries > size:
        raise ValueError(
            f"the inputs take {4 * entries:,} bytes or more, expected at most {size:,}; take fewer or smaller ones, or "
            "set the environment variable LEAKGAUGE_MAX_UNPACKED=BYTES"
        )


def stacked(images: Sequence[Array]) -> Array:
    """[n, ...] inputs of one shape, as one array; images [1, h, w] become RGB if others are [3, h, w].

    Raises:
        ValueError: shapes still differ; `args[1]` of the error is the number of the first input that differs.
    """
    color = any(image.ndim == 3 and len(image) == 3 for image in images)
    if color:
        images = [image.repeat(3, 0) if image.ndim == 3 and len(image) == 1 else image for image in images]
    for number, image in enumerate(images):
        if image.shape != images[0].shape:
            raise ValueError(f"expected the shape of the first, {images[0].shape}, got {image.shape}", number)
    return np.stack(images)


def _inputs(name: str, x: Array, is_first: bool) -> Array:
    """Features, or images with the channels second; uint8 becomes float32, other types are kept."""
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4:
        second, last = x.shape[1] in CHANNELS, x.shape[3] in CHANNELS
        if not (second or last) or (second and last and not is_first):
            raise ValueError(f"expected {name} with 1 or 3 channels second or last, and not both, got shape {x.shape}")
        x = x if second and (is_first or not last) else x.transpose(0, 3, 1, 2)
    elif x.ndim != 2:
        raise ValueError(f"expected {name} with 2, 3 or 4 axes, got shape {x.shape}")
    if x.dtype.kind not in "biuf":
        raise ValueError(f"expected {name} of numbers, got {x.dtype}; encode categories as numbers, such as one-hot")
    if not x.size:
        raise ValueError(f"expected 1 or more {name} with entries, got shape {x.shape}")
    if x.dtype == np.uint8:
        return np.asarray(torch.from_numpy(x.astype(np.float32, order="C")).div_(255))
    with np.errstate(over="ignore"):
        wrong = x.size - int(np.isfinite(x.astype(np.float32)).sum())
    if wrong:
        raise ValueError(f"expected finite {name}, got {wrong:,} of {x.size:,} values that are NaN, infinite or huge")
    return x


def _series(name: str, x: Array, is_first: bool) -> Array:
    """Series [n, channels, T]; of [n, T], each has one channel."""
    if x.ndim not in (2, 3):
        raise ValueError(f"expected {name} [n, channels, T], got shape {x.shape}")
    flat = _inputs(name, x.reshape(len(x), -1), is_first)
    return flat.reshape(x.shape if x.ndim == 3 else (len(x), 1, -1))


def _ids(name: str, x: Array, is_first: bool) -> Array:
    """Token ids [n, T] as floats."""
    if x.ndim != 2 or x.dtype.kind not in "iuf" or not x.size or not np.array_equal(x, np.floor(x)):
        raise ValueError(
            f"expected {name} [n, T] of whole numbers, the ids of tokens, got {x.dtype} of shape {x.shape}"
        )
    if not 0 <= x.min() <= x.max() < _MOST_IDS:
        raise ValueError(f"expected token ids from 0, and below {_MOST_IDS:,}, got {x.min()} to {x.max()}")
    return x.astype(np.float32)


def _scale(xs: Sequence[Array]) -> _Scale | None:
    """The scale from the range of all arrays of one input shape; None: all values, as float32, are in [0, 1]."""
    if len({x.shape[1:] for x in xs}) > 1:
        return None  # refused by `DataSet`
    axes = (0, *range(2, xs[0].ndim))
    low = np.minimum.reduce([x.min(axes, keepdims=True)[0].astype(np.float64) for x in xs])
    high = np.maximum.reduce([x.max(axes, keepdims=True)[0].astype(np.float64) for x in xs])
    outside = (low.astype(np.float32) < 0) | (high.astype(np.float32) > 1)
    if not outside.any():
        return None
    span = np.where(outside & (high > low), high - low, 1.0)
    if span.max() > np.finfo(np.float32).max:
        raise ValueError(f"expected x in a range of float32, got {low.min():g} to {high.max():g}")
    return _Scale(np.where(outside, low, 0.0), span)


def odd_ranges(stored: Sequence[Array], xs: Sequence[Array]) -> str:
    """A note if inputs in [0, 1] vary little, or otherwise in train than in test; `xs` are in the original units."""
    some = [x[:: x.size // _LOOKED_AT + 1] for x in stored]
    means, spreads = [[float(of(x, dtype=np.float64)) for x in some] for of in (np.mean, np.std)]
    if max(spreads) > _APART * min(spreads) or abs(means[0] - means[-1]) > _SHIFTED * max(*spreads, 1e-9):
        train, test = (f"{x.min():.3g} to {x.max():.3g}" for x in xs)
        return f"inputs are {train} in train and {test} in test: bring both to one scale, or scores mean little"
    if spreads[0] < _FLAT:
        text = f"inputs fill little of [0, 1], with a standard deviation of {spreads[0]:.2g}, so any guess scores well"
        return f"{text}: were they divided twice, or is one value huge?"
    return ""


def _labels(names: Sequence[str], ys: Sequence[Array], named: int) -> tuple[list[Tensor], tuple[str, ...], str]:
    """The labels of each split as tensors, the classes (empty for a regression), and a note on the labels.

    named: number of classes that have a name; integers below it are class numbers.
    """
    if _of_places(ys):
        ys = [y.reshape(len(y), -1).astype(np.int64) for y in ys]
        if any(y.size and y.min() < 0 for y in ys) or len({y.shape[1] for y in ys}) > 1:
            raise ValueError(f"expected {names[0]} of classes from 0, for the same places, got others")
        return (
            [torch.from_numpy(y.astype(np.float32)) for y in ys],
            (),
            f"labels are classes at {ys[0].shape[1]} places",
        )
    flat = [y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y for y in ys]
    if flat[0].ndim > 1:
        return _several(names, flat)
    for name, y in zip(names, flat, strict=True):
        if y.ndim != 1:
            raise ValueError(f"expected {name} with one axis, got shape {y.shape}")
        if y.dtype.kind not in "biufUS":
            raise ValueError(f"expected {name} of integers, texts, or floats for a regression, got {y.dtype}")
    kinds = {"biu": "integers", "f": "floats", "US": "texts"}
    groups = [next(kind for kind in kinds if y.dtype.kind in kind) for y in flat]
    if groups[0] != groups[-1]:
        raise ValueError(
            f"expected labels of one kind, got {kinds[groups[0]]} in train and {kinds[groups[-1]]} in test"
        )
    if groups[0] == "f":
        numbers = [_numbers(*pair) for pair in zip(names, flat, strict=True)]
        binary = len(np.unique(np.concatenate(flat))) == 2
        return numbers, (), "labels are two floats, which make a regression (integers make classes)" if binary else ""
    if groups[0] == "US":
        return *_ranked([y.astype(str) for y in flat]), ""
    return _integers(names, flat, named)


def _of_places(ys: Sequence[Array]) -> bool:
    """Whether labels are classes for each place of an input, as in a segmentation."""
    return all(y.ndim > 2 and y.dtype.kind in "biu" for y in ys)


def _several(names: Sequence[str], ys: Sequence[Array]) -> tuple[list[Tensor], tuple[str, ...], str]:
    """`_labels` of examples that have several numbers, or, as 0 and 1, several classes."""
    width = ys[0].shape[1]
    for name, y in zip(names, ys, strict=True):
        if y.ndim != 2 or not 0 < y.shape[1] == width or y.dtype.kind not in "biuf":
            wanted = f"expected {name} [n], or [n, {width}] of 0 and 1 for several classes, or of numbers"
            raise ValueError(f"{wanted}, got {y.dtype} of shape {y.shape}")
    marks = all(np.isin(y, (0, 1)).all() for y in ys)
    names = tuple(map(str, range(width))) if marks else ()
    rows = [torch.from_numpy(y.astype(np.float32)) for y in ys]
    return rows, names, "" if marks else f"labels are {width} numbers each, which make a regression"


def _integers(names: Sequence[str], ys: Sequence[Array], named: int) -> tuple[list[Tensor], tuple[str, ...], str]:
    """`_labels` of integers, which are class numbers or codes."""
    if any(y.size and int(y.max()) > np.iinfo(np.int64).max for y in ys):
        raise ValueError(f"expected {names[0]} of int64, got larger numbers; for a regression, make them floats")
    ints = [y.astype(np.int64) for y in ys]
    known = np.unique(np.concatenate(ints))
    low, high = (int(known[0]), int(known[-1])) if len(known) else (0, -1)
    if (low >= 0 and high < named) or (low == 0 and high < min(_MAX_LABEL + 1, _SPARSE * len(known))):
        return [torch.from_numpy(y) for y in ints], tuple(map(str, range(1 + high))), ""
    if _EACH * len(known) > sum(map(len, ints)) and max(high, -low) > _MAX_LABEL:
        text = f"expected {names[0]} up to {_MAX_LABEL}, got {len(known):,} different labels up to {max(high, -low)}"
        raise ValueError(f"{text}; for a regression, make them floats")
    tensors, classes = _ranked(ints)
    few = ", ".join(classes) if len(classes) <= 4 else f"{classes[0]}, {classes[1]}, ..., {classes[-1]}"
    return tensors, classes, f"labels {few} became the classes 0 to {len(classes) - 1} in ascending order"


def _ranked(ys: Sequence[Array]) -> tuple[list[Tensor], tuple[str, ...]]:
    known, places = np.unique(np.concatenate(ys), return_inverse=True)
    with suppress(ValueError):  # texts that are no numbers stay in alphabetical order
        order = np.argsort(known.astype(float), kind="stable")
        known, places = known[order], np.argsort(order)[places]
    parts = np.split(places.astype(np.int64), [len(ys[0])])[: len(ys)]
    return [torch.from_numpy(labels) for labels in parts], tuple(map(str, known.tolist()))


def _numbers(name: str, y: Array) -> Tensor:
    """Numeric labels as float32; raises ValueError if one is not finite."""
    with np.errstate(over="ignore"):
        labels = torch.from_numpy(y.astype(np.float32))
    if wrong := int((~labels.isfinite()).sum()):
        raise ValueError(f"expected finite {name}, got {wrong:,} of {len(y):,} that are NaN, infinite or huge")
    return labels
