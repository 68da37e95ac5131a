"""Data sets by name: what a task is trained on and what an attack is after."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.errors import unknown

_BROKEN = (
    *(OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile, pickle.UnpicklingError),
    *(TypeError, AttributeError, LookupError, MemoryError),  # pickle, see the docs of UnpicklingError
    NotImplementedError,  # zipfile: a damaged version or method
    SyntaxError,  # Pillow: a damaged PNG chunk
)
"""What readers of damaged or closed files were seen to raise."""


class DataMissing(LookupError):
    """A file of a data set is not there; one line: what, where it was looked for, how to get it."""


class DataUnreadable(ValueError):
    """A file of a data set is there but cannot be used; one line: which, and what is wrong with it."""


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training and test examples with their names.

    Attributes:
        name: as asked for, e.g. `mnist` or `npz:faces.npz`.
        train, test: x float32 in [0, 1], [n, channels, height, width] for images, else [n, features]; y int64.
        classes: names, in the order of the labels.
        is_image: whether x holds images.
        public: whether a report may show its images by default.
        note: what a reader must know of this copy, e.g. that a part is missing; usually empty.

    Raises:
        ValueError: shapes, dtypes, counts, ranges or labels are not as above, or a split is empty.
    """

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]
    is_image: bool
    public: bool
    note: str = ""

    def __post_init__(self) -> None:
        for split, (x, y) in (("train", self.train), ("test", self.test)):
            _check(split, x, y, len(self.classes))
            if x.ndim != (4 if self.is_image else 2):
                raise ValueError(f"expected {4 if self.is_image else 2} axes in {split} x, got {tuple(x.shape)}")
        if self.train.x.shape[1:] != self.test.x.shape[1:]:
            raise ValueError(
                f"expected train and test of one shape, got {self.input_shape} and {tuple(self.test.x.shape[1:])}"
            )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch axis."""
        return tuple(self.train.x.shape[1:])

    @functools.cached_property
    def digest(self) -> str:
        """The first 16 hex digits of SHA-256 over the bytes of train x, train y, test x and test y."""
        sha = hashlib.sha256()
        for tensor in (*self.train, *self.test):
            sha.update(tensor.contiguous().numpy().reshape(-1).data)
        return sha.hexdigest()[:16]


class Source(NamedTuple):
    """How to get a data set: a line for lists, and a reader that takes the root folder."""

    summary: str
    read: Callable[[Path], DataSet]


def load(name: str, root: Path) -> DataSet:
    """The data set called `name`.

    Args:
        name: one of `names()`; in `folder:PATH` and `npz:PATH` a relative path starts at the working directory.
        root: where the downloaded sets lie; never written to. `digits`, `photos` and a user's own need none.

    Guarantees:
        Same files, same tensors, in the same order.

    Raises:
        UnknownNameError: the name is not known.
        ValueError: a form that needs a path has none.
        DataMissing: a file is not there.
        DataUnreadable: a file cannot be opened, is cut, or does not hold what it should.
    """
    from leakgauge.harness.data import files

    kind, colon, path = name.partition(":")
    if colon and kind in files.FORMS:
        if not path:
            raise ValueError(f"expected {kind}:PATH, got {name!r}")
        return files.FORMS[kind].read(Path(path).expanduser())
    known = _sources()
    if name in known:
        return known[name].read(root)
    raise unknown("data set", name, (listed for listed, _ in names()))


def names() -> tuple[tuple[str, str], ...]:
    """All names that `load` takes, each with a one-line summary."""
    from leakgauge.harness.data import files

    sources = _sources() | {f"{kind}:PATH": source for kind, source in files.FORMS.items()}
    return tuple((name, source.summary) for name, source in sources.items())


def default_root() -> Path:
    """The folder in the environment variable LEAKGAUGE_DATA, else ~/.cache/leakgauge."""
    return Path(os.environ.get("LEAKGAUGE_DATA") or "~/.cache/leakgauge").expanduser()


def split_by_class(x: torch.Tensor, y: torch.Tensor) -> tuple[Examples, Examples]:
    """The fixed split of a set that comes without one: of each class, every fifth example is a test example."""
    is_test = torch.zeros(len(y), dtype=torch.bool)
    for label in set(y.tolist()):
        is_test[(y == label).nonzero()[4::5]] = True
    return Examples(x[~is_test], y[~is_test]), Examples(x[is_test], y[is_test])


def find(what: str, folders: list[Path], names: list[str], hint: str) -> Path:
    """The first file called one of `names` in the first of `folders` that has one.

    Args:
        what: is looked for, e.g. `MNIST file`.
        hint: how to get it, for the message: a command or a URL.

    Raises:
        DataMissing: there is none.
        DataUnreadable: a folder on the way may not be entered.
    """
    for path in (folder / name for folder in folders for name in names):
        with reading(path):
            if path.exists():
                return path
    places = " and ".join(str(folder) for folder in folders)
    raise DataMissing(f"no {what}: looked for {' or '.join(names)} in {places}; {hint}")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns whatever goes wrong while `path` is read into one line that names it.

    Raises:
        DataUnreadable: instead of the errors by which a reader says that a file is broken or closed to us.
    """
    try:
        yield
    except (DataMissing, DataUnreadable):
        raise
    except _BROKEN as error:
        # a plain ValueError is our own sentence; of others, the type is half of the message
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise DataUnreadable(f"cannot read {path}: {kind}{' '.join(str(error).split())}") from error


@functools.cache
def _sources() -> dict[str, Source]:
    """Every set with a fixed name; read late, as the readers import this module."""
    from leakgauge.harness.data import adult, embedded, vision

    return {**embedded.SETS, **vision.SETS, **adult.SETS}


def _check(split: str, x: torch.Tensor, y: torch.Tensor, classes: int) -> None:
    """One split is what `DataSet` says."""
    if x.dtype != torch.float32 or y.dtype != torch.int64:
        raise ValueError(f"expected float32 x and int64 y in {split}, got {x.dtype} and {y.dtype}")
    if len(x) == 0 or y.shape != (len(x),):
        raise ValueError(f"expected one label for each of 1 or more {split} examples, got {len(x)} x and {len(y)} y")
    low, high = x.aminmax()
    if not (low >= 0 and high <= 1):
        raise ValueError(f"expected {split} x in [0, 1], got {low:g} to {high:g}")
    if not (y.min() >= 0 and y.max() < classes):
        raise ValueError(f"expected {split} labels from 0 to {classes - 1}, got {int(y.min())} to {int(y.max())}")
