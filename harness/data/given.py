"""A user's own data as Python objects: arrays or torch data sets, registered in this process or made by a factory."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate

from leakgauge.harness.core.errors import UnknownNameError, unknown
from leakgauge.harness.core.files import reason
from leakgauge.harness.core.form import Form as InputForm
from leakgauge.harness.core.form import Vocabulary
from leakgauge.harness.core.rng import Key, global_generators
from leakgauge.harness.data import DataMissing, DataSet, DataUnreadable, Form
from leakgauge.harness.data.arrays import Array, Arrays, check_size, data_set, stacked
from leakgauge.harness.data.files import IDS, letters, pixels, role_of

_KEY = Key(0).child("given data")  # seed of the global generators while a user's code makes and reads its data
_EXPECTED = (
    "expected a torch Dataset with a length, a pair (train, test) of them, arrays (x, y) or (x, y, x_test, y_test), a "
    "DataLoader or an iterator of items (x, y), or a leakgauge DataSet"
)

_GIVEN: dict[str, DataSet] = {}


@runtime_checkable
class _Items(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> object: ...


@runtime_checkable
class _ArrayLike(Protocol):
    """An array, a tensor, or a table of pandas."""

    def __array__(self) -> Array: ...


class _Read(NamedTuple):
    """Arrays of a split, the names of its classes if known, and whether items are drawn at random, or token ids."""

    arrays: Arrays
    classes: tuple[str, ...] = ()
    drew: bool = False
    tokens: bool = False


def given(name: str, data: object) -> str:
    """Register data under a name in this process, read once; returns `given:NAME`, the name for studies.

    Args:
        data: a torch `Dataset` with a length, or a list, of items (x, y) or of dictionaries with keys such as `image`
            and `label`; x is a tensor, an array or a PIL image, y a number, a text, or 0 and 1 for each class. Or an
            iterator or a `DataLoader` of items or batches, or a list of batches, see `_gathered`. Or arrays (x, y) of
            numpy, torch or pandas; `arrays.data_set` states their allowed contents. Or a pair (train, test) of these,
            or (x, y, x_test, y_test). Or a `DataSet`. Worker processes do not have the data: run the study with
            `workers=0`.

    Guarantees:
        The global generators of torch, numpy and Python start at the same state whenever items are read, and are
        restored afterwards. If items are drawn at random, as by a random transform, one draw of each is taken, and
        `DataSet.note` says so.

    Raises:
        ValueError: the name is empty or contains a `?`.
        DataUnreadable: the data have none of these forms, or cannot be read.

    Example:
        >>> import numpy as np
        >>> given("mine", (np.arange(40.0).reshape(20, 2), np.arange(20) % 2))
        'given:mine'
    """
    whole(name, data, split=True)
    return f"given:{name}"


FormOf = Callable[[Array], InputForm | Vocabulary | None]
"""Inputs of a split -> their form; None: by their shape."""


def whole(name: str, data: object, *, split: bool = False, form_of: FormOf = lambda x: None) -> bool:
    """Register data as `given` does; returns whether they have a test part.

    split: of data without one, every fifth example is for testing; else all are for training, and the first one is for
        testing too. form_of: the form of inputs that nothing else tells.
    """
    if not name or "?" in name:
        raise ValueError(f"expected a name without '?', got {name!r}")
    text = f"given:{name}"
    with _one_line(text), global_generators(_KEY) as state:
        _GIVEN[name], has_test = _data_set(text, data, state, split, form_of)
    return has_test


def _registered(name: str, options: Mapping[str, str]) -> DataSet:
    if name not in _GIVEN:
        raise UnknownNameError(
            f"no data 'given:{name}' in this process, which has {', '.join(map(repr, _GIVEN)) or 'none'}; call "
            "given(NAME, data) first, and run the study with workers=0"
        )
    return _GIVEN[name]


def _made(name: str, options: Mapping[str, str]) -> DataSet:
    """The data set that `module:factory` returns; the name may also be that of the data themselves."""
    module, _, attribute = name.partition(":")
    with _one_line(name), global_generators(_KEY) as state:
        try:
            made = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            from leakgauge.harness.data import names

            listing = unknown("data set", name, (listed for listed, _ in names()))
            raise UnknownNameError(f"{error}: {listing}") from error
        if callable(made) and not isinstance(made, _Items | _ArrayLike):
            made = made()
        return _data_set(name, made, state, True, lambda x: None)[0]


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    try:
        yield
    except (DataMissing, DataUnreadable, UnknownNameError):
        raise
    except (Exception, SystemExit) as error:
        raise DataUnreadable(f"cannot read {name!r}: {reason(error)}") from error


def _data_set(
    name: str, data: object, state: Callable[[], object], split: bool, form_of: FormOf
) -> tuple[DataSet, bool]:
    """The data, and whether they have a test part; `split` as in `whole`."""
    if isinstance(data, DataSet):
        return dataclasses.replace(data, name=name), True
    parts = _parts(data)
    splits = [_read(_gathered(part), at, state) for part, at in zip(parts, ("train", "test"), strict=False)]
    check_size(sum(len(each.arrays.x) for each in splits), sum(each.arrays.x.size for each in splits))
    train, *test = splits
    note = "the items are drawn at random, as by a transform: one draw of each was taken"
    drew = any(each.drew for each in splits)
    arrays = train.arrays, test[0].arrays if test else None
    form = form_of(train.arrays.x)
    if any(each.tokens for each in splits):
        form = Vocabulary(1 + max(int(each.arrays.x.max(initial=0)) for each in splits))
    return data_set(name, *arrays, train.classes, note if drew else "", whole=not split, form=form), bool(test)


def _parts(data: object) -> list[object]:
    """The training part of the data, and the test part if they have one."""
    listed = list(data) if isinstance(data, tuple | list) else []
    if any(isinstance(part, _ArrayLike) for part in listed):
        if len(listed) not in (2, 4):
            raise ValueError(f"{_EXPECTED}, got {len(listed)} arrays")
        return list(zip(listed[::2], listed[1::2], strict=True))
    sets = bool(listed) and all(isinstance(part, Dataset | DataLoader) for part in listed)
    if sets and len(listed) != 2:
        raise ValueError(f"{_EXPECTED}, got {len(listed)} data sets")
    return listed if len(listed) == 2 and (sets or isinstance(data, tuple)) else [data]


def _gathered(data: object) -> object:
    """A part with items by number: iterators, iterable data sets and loaders are read once, others are returned.

    Batches, in which every item has as many labels as inputs, are taken apart, also those of a list. A `DataLoader`
    with torch's own batches in order or shuffled gives its data set, so that rows keep their numbers; any other one is
    read in its own order.

    Raises:
        ValueError: it yields nothing, or more than `arrays.check_size` allows: it may have no end.
    """
    batches = isinstance(data, tuple | list) and not _is_arrays(data) and bool(data) and _is_batch(data[0])
    if not isinstance(data, Iterable) or not (batches or _is_stream(data)):
        return data
    plain = (RandomSampler, SequentialSampler)
    if isinstance(data, DataLoader) and data.collate_fn is default_collate and type(data.sampler) in plain:
        return _gathered(data.dataset)
    items, entries = list[tuple[Array, Array]](), 0
    with _one_line(type(data).__name__), global_generators(_KEY):
        for item in data:
            x, y = (as_array(half).copy() for half in _halves(item))  # a generator may fill the same array again
            items.append((x, y))
            entries += x.size
            check_size(len(items), entries)
    if not items:
        raise ValueError(f"expected items (x, y), got none from a {type(data).__name__}; an iterator is read only once")
    if all(map(_is_batch, items)):
        return [pair for x, y in items for pair in zip(x, y, strict=True)]
    return items


def _is_arrays(part: object) -> TypeGuard[tuple[Any, Any] | list[Any]]:
    """Whether a part is (x, y) of all its examples."""
    return isinstance(part, tuple | list) and len(part) == 2 and any(isinstance(half, _ArrayLike) for half in part)


def _is_batch(item: object) -> bool:
    """Whether an item has as many labels as inputs."""
    try:
        x, y = map(as_array, _halves(item))
    except ValueError:
        return False
    return x.ndim > 1 and y.ndim > 0 and len(x) == len(y)


def _is_stream(data: object) -> TypeGuard[Iterable[object]]:
    """Whether data can only be read one after the other."""
    return isinstance(data, IterableDataset) or (isinstance(data, Iterable) and not isinstance(data, _Items))


def _read(items: object, split: str, state: Callable[[], object]) -> _Read:
    if _is_arrays(items):
        return _Read(Arrays(as_array(items[0]), as_array(items[1]), isinstance(items[0], Tensor)))
    if not isinstance(items, _Items) or isinstance(items, str | bytes | Mapping | _ArrayLike):
        raise ValueError(f"{_EXPECTED}, got {type(items).__name__}")
    count, xs, ys, before = len(items), [], [], state()
    check_size(count, 0)
    for number in range(count):
        try:
            x, y = _pair(items[number])
        except (Exception, SystemExit) as error:
            raise ValueError(f"{split} item {number}: {reason(error)}") from error
        if number == 0:
            check_size(count, count * x.size)
        xs.append(x)
        ys.append(y)
    drew = state() != before or (count > 0 and not np.array_equal(_pair(items[0])[0], xs[0]))
    kinds = {"text" if isinstance(y, str) else "number" for y in ys}
    if len(kinds) > 1:
        raise ValueError(f"expected {split} labels of one kind, got numbers and texts")
    if len(lengths := {np.size(y) for y in ys}) > 1:
        raise ValueError(f"expected {split} labels of one length, got {min(lengths)} and {max(lengths)}")
    try:
        x = stacked(xs) if xs else np.empty((0, 0))
    except ValueError as error:
        text, number = error.args
        advice = "resize them in the dataset's transform, as by torchvision's Resize and CenterCrop"
        raise ValueError(f"{split} item {number}: {text}; {advice}") from error
    classes = getattr(items, "classes", ())
    names = tuple(map(str, classes)) if isinstance(classes, list | tuple) else ()
    is_first, tokens = x.ndim == 4 and x.shape[1] in (1, 3), count > 0 and _has_ids(items[0])
    return _Read(Arrays(x, np.array(ys), is_first), names, drew, tokens)


def _pair(item: object) -> tuple[Array, Any]:
    """The input and the label of an item: a number, a text, or an array of 0 and 1 for each class."""
    x, y = _halves(item)
    label: Any = as_array(y)
    if _has_ids(item) and label.shape == np.shape(x):  # the next tokens
        return as_array(x), 0.0
    if label.ndim == 1 and label.size > 1 and label.dtype.kind in "biuf" and np.isin(label, (0, 1)).all():
        return as_array(x), label
    if label.ndim > 1 and label.dtype.kind in "biu":  # a class for each place
        return as_array(x), label
    if label.size != 1 or label.dtype.kind not in "biufU":
        text = f"expected a label of one number or text, got {type(y).__name__} of shape {label.shape}"
        raise ValueError(f"{text}; give batches as a DataLoader or an iterator" if label.size > 1 else text)
    return as_array(x), label.reshape(()).item()


def _has_ids(item: object) -> bool:
    """Whether an item has token ids, as those of a tokenizer."""
    return isinstance(item, Mapping) and any(letters(str(key)) == IDS for key in item)


def _halves(item: object) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        roles = [(role_of(str(key)), value) for key, value in item.items()]
        halves = [[value for role, value in roles if role == half] for half in ("x", "y")]
        if _has_ids(item) and not halves[1]:
            return halves[0][0], np.float32(0)
        if [len(values) for values in halves] != [1, 1]:
            keys = ", ".join(repr(str(key)[:40]) for key in item)
            raise ValueError(f"expected one input and one label, as in {{'image': ..., 'label': ...}}, got {keys}")
        return halves[0][0], halves[1][0]
    if not isinstance(item, tuple | list) or len(item) != 2:
        got = f"{len(item)} parts" if isinstance(item, tuple | list) else type(item).__name__
        raise ValueError(f"expected (x, y), or a dictionary with an input and a label, got {got}")
    return item[0], item[1]


def as_array(x: Any) -> Array:
    """A tensor, a PIL image or anything that numpy converts, as an array; PIL images get the channels first."""
    if isinstance(x, Tensor):
        x = x.detach().cpu().to_dense()
        return np.asarray(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x)
    if type(x).__module__.startswith("PIL."):
        return pixels(x)
    if np.ma.is_masked(x):
        raise ValueError("expected an array without masked entries, got some; fill them, or leave their rows out")
    try:
        array = np.asarray(x)
        plain = np.array(array.tolist()) if array.dtype == object and array.size else array
    except ValueError as error:
        raise ValueError(f"expected an array, got a {type(x).__name__} of parts that differ in shape") from error
    texts = plain.dtype.kind == "U" and all(isinstance(text, str) for text in array.flat)
    return plain if plain.dtype.kind in "biuf" or texts else array


FORMS = {"given": Form("NAME", "data registered in this process by harness.data.given.given(NAME, data)", _registered)}
"""The form of registered data, by the text before the colon."""

CODE = Form("module:factory", "code that returns a torch Dataset, (train, test), or arrays (x, y); --allow-code", _made)
