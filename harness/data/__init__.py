"""Data sets by name."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.errors import unknown
from leakgauge.harness.core.files import content, reason, regular
from leakgauge.harness.core.form import Form as InputForm
from leakgauge.harness.core.form import form_of

MAX_UNPACKED = 128 * 2**20
"""Bytes to which a packed file may grow; the environment variable LEAKGAUGE_MAX_UNPACKED overrides this limit."""

# A file may also grow by this factor: photographs grow 10 to 20 times, Fashion-MNIST 1.8, MNIST 5; a bomb 200 to
# 1,000
_RATIO = 50


_MOST_CLASSES = 100_000

_ELSEWHERE = ("recording",)  # prefixes before a colon that other packages handle


class DataMissing(LookupError):
    """A file of a data set is missing; one line names the file, the places searched, and how to get it."""


class DataUnreadable(ValueError):
    """A file of a data set cannot be used; one line gives the file and the reason."""


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training and test examples with their names.

    Attributes:
        name: as in `load`, e.g. `mnist` or `npz:faces.npz`.
        train, test: x [n, *input_shape] float32, in [0, 1] but for token ids; y [n] int64, or float32 numbers for a
            regression, or [n, classes] float32 of 0 and 1 for examples of several classes. For next tokens, y is 0.
        classes: class names, in the order of the labels; empty for a regression.
        public: whether a report may show its images by default.
        note: a remark for the reader about this copy, e.g. that a part is missing; usually empty.
        stated: the form of inputs; None: an image, a series or a vector, by the shape.
        places: whether a label [places] is a class for each place, as in a segmentation, as float32 numbers.
        low, span: float32, of the shape of one input or with axes of length 1, if x was scaled to [0, 1]; a model gets
            x * span + low. None: x is not scaled.

    Raises:
        ValueError: shapes, dtypes, counts or labels are not as above, inputs have not the form, or a split is empty.
    """

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]
    public: bool
    note: str = ""
    stated: InputForm | None = None
    places: bool = False
    low: torch.Tensor | None = None
    span: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for split, examples in (("train", self.train), ("test", self.test)):
            _check(split, examples, self.classes, self.form)
        if self.train.x.shape[1:] != self.test.x.shape[1:]:
            raise ValueError(
                f"expected train and test of one shape, got {self.input_shape} and {tuple(self.test.x.shape[1:])}"
            )
        if (self.low is None) != (self.span is None):
            raise ValueError("expected low and span, or neither, got one of them")

    @property
    def form(self) -> InputForm:
        """The form of the inputs."""
        return self.stated or form_of(self.input_shape)

    def original(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs x [n, *input_shape] in [0, 1], such as a reconstruction, in the units of the data."""
        return x if self.low is None or self.span is None else x * self.span + self.low

    def with_classes(self, count: int) -> DataSet:
        """The data with `count` classes, some without an example; a class whose name is a number gets this number.

        Labels of a regression that are whole numbers below `count` become classes.

        Raises:
            ValueError: a label is not below `count`, the data have names of fewer classes, or examples have several.
        """
        names, y = self.classes, self.train.y
        if len(names) == count:
            return self
        known = [*names] if y.ndim == 1 else [f"{y.shape[1]} columns"]
        if not names and y.ndim == 1:
            known = [f"{number:g}" for number in sorted({*y.tolist(), *self.test.y.tolist()})]
        if not 0 < count <= _MOST_CLASSES or not all(name.isdecimal() and int(name) < count for name in known):
            text = f"expected labels from 0 to {count - 1} for {count} classes, got {', '.join(known)[:40]}"
            raise ValueError(f"{text}; number the labels")
        numbers = torch.tensor([int(name) for name in names])
        train, test = (Examples(x, numbers[y] if names else y.long()) for x, y in (self.train, self.test))
        note = "; ".join(remark for remark in self.note.split("; ") if not remark.startswith("labels "))
        return replace(self, train=train, test=test, classes=tuple(map(str, range(count))), note=note)

    def like(self, other: DataSet) -> Examples:
        """The training examples in the scale and with the classes of other data.

        Classes are the same by name; if no name is in both data sets, by number.

        Raises:
            ValueError: the inputs have another shape or range, or the other data lack a class.
        """
        if self.input_shape != other.input_shape:
            raise ValueError(f"expected inputs {other.input_shape}, got {self.input_shape}")
        x, y = self.original(self.train.x), self.train.y
        x = x if other.low is None or other.span is None else (x - other.low) / other.span
        if self.form.continuous and not -1 <= float(x.min()) <= float(x.max()) <= 2:
            ranges = ("{:.3g} to {:.3g}".format(*data.original(data.train.x).aminmax()) for data in (other, self))
            raise ValueError("expected inputs on one scale with the other data, {}, got {}".format(*ranges))
        places = {name: place for place, name in enumerate(other.classes)}
        if y.ndim == 1 and not places.keys().isdisjoint(self.classes):
            if unknown := [name for name in self.classes if name not in places]:
                raise ValueError(f"expected classes of the other data, {', '.join(places):.40}, got {unknown[0]}")
            y = torch.tensor([places[name] for name in self.classes])[y]
        return Examples(self.form.valid(x) if not self.form.continuous else x.clamp(0, 1), y)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch axis."""
        return tuple(self.train.x.shape[1:])

    @functools.cached_property
    def digest(self) -> str:
        """The first 16 hex digits of SHA-256 over the bytes of train x, train y, test x, test y, and low and span."""
        sha = hashlib.sha256()
        for tensor in (*self.train, *self.test):
            sha.update(tensor.contiguous().numpy().reshape(-1).data)
        sha.update(self.scale)
        return sha.hexdigest()[:16]

    @property
    def scale(self) -> bytes:
        """The bytes of low and span; empty if x is not scaled."""
        return b"".join(tensor.contiguous().numpy().tobytes() for tensor in (self.low, self.span) if tensor is not None)


def _check(split: str, examples: Examples, classes: tuple[str, ...], form: InputForm) -> None:
    (x, y), several = examples, examples.y.ndim == 2
    kind = torch.int64 if classes and not several else torch.float32
    if x.ndim not in (2, 3, 4):
        raise ValueError(f"expected 2, 3 or 4 axes in {split} x, got {tuple(x.shape)}")
    if x.dtype != torch.float32 or y.dtype != kind:
        raise ValueError(f"expected float32 x and {str(kind)[6:]} y in {split}, got {x.dtype} and {y.dtype}")
    width = len(classes) or y.shape[-1]
    if x.numel() == 0 or y.shape != ((len(x), width) if several else (len(x),)):
        advice = "; give a test set, or 5 or more examples of a class (every fifth becomes a test example)"
        few = "" if len(x) else advice
        raise ValueError(f"expected 1 or more {split} examples with labels, got {len(x)} x and {len(y)} y{few}")
    last = len(classes) - 1
    if problem := form.problem(x):
        raise ValueError(f"{split}: {problem}")
    if several and classes and not bool(((y == 0) | (y == 1)).all()):
        raise ValueError(f"expected {split} labels of 0 and 1, one for each class, got other numbers")
    if classes and not several and not (y.min() >= 0 and y.max() <= last):
        raise ValueError(f"expected {split} labels from 0 to {last}, got {int(y.min())} to {int(y.max())}")
    if not classes and not bool(y.isfinite().all()):
        raise ValueError(f"expected finite {split} labels, got {int((~y.isfinite()).sum())} that are not")


class Source(NamedTuple):
    """A data set: its one-line summary, and its reader, which takes the root folder."""

    summary: str
    read: Callable[[Path], DataSet]


class Form(NamedTuple):
    """A way to name a user's own data: the text after `kind:`, a one-line summary, the reader and its options.

    read: takes the text between the colon and the options, the options by name, and if it is `nested`, i.e. loads other
    data sets, `root`.
    """

    rest: str
    summary: str
    read: Callable[..., DataSet]
    options: tuple[str, ...] = ()
    nested: bool = False


def load(name: str, root: Path | None = None) -> DataSet:
    """The data set named `name`.

    Args:
        name: one of `names()`. Options follow the last `?`, as in `folder:PATH?size=64`; if PATH itself contains a `?`,
            end it with another `?`. `classes=10`: there are 10, and some may have no example. A relative PATH starts at
            the working directory. `module:factory` names code, which is run: see `harness.data.given`.
        root: folder of the downloaded sets, never written to; default `LEAKGAUGE_DATA`, or `~/.cache/leakgauge`.

    Guarantees:
        The same files give the same tensors, in the same order.

    Raises:
        UnknownNameError: the name is unknown.
        ValueError: the path is missing in `folder:PATH` or `npz:PATH`, or an option is unknown or wrong.
        DataMissing: a file is missing.
        DataUnreadable: a file cannot be opened, is truncated, or has the wrong content; code fails or returns no data.
    """
    kind, _, rest = name.partition(":")
    form = _code() if is_code(name) else _forms().get(kind if ":" in name else "")
    if form is None:
        known = _sources()
        if name in known:
            return known[name].read(default_root() if root is None else root)
        raise unknown("data set", name, (listed for listed, _ in names()))
    rest, _, query = rest.rpartition("?") if "?" in rest else (rest, "", "")
    if not rest:
        raise ValueError(f"expected {kind}:{form.rest}, got {name!r}")
    options = _options(name, query, (*form.options, "classes"))
    count = options.pop("classes", "")
    given = {"root": root} if form.nested else {}
    data = form.read(f"{kind}:{rest}" if is_code(name) else rest, options, **given)
    with reading(Path(name)):
        return data.with_classes(int(count)) if count else data


def is_code(name: str) -> bool:
    """Whether a data set's name is `module:factory`, so that loading it imports and runs code."""
    kind, colon, _ = name.partition(":")
    return bool(colon) and kind not in (*_forms(), *_ELSEWHERE)


def _options(name: str, query: str, known: tuple[str, ...]) -> dict[str, str]:
    """The options after the `?` of a name: key=value, joined by `&`."""
    given: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        key, _, value = pair.partition("=")
        if key not in known or key in given or not value:
            options = (
                f"its options are {', '.join(f'{option}=...' for option in known)}" if known else "it has no options"
            )
            raise ValueError(f"{name!r}: got the option {pair!r}, but {options}, each once, after ? and joined by &")
        given[key] = value
    return given


def names() -> tuple[tuple[str, str], ...]:
    """All names that `load` accepts, each with a one-line summary."""
    listed = [(name, source.summary) for name, source in _sources().items()]
    listed += [(f"{kind}:{form.rest}", form.summary) for kind, form in _forms().items()]
    return (*listed, (_code().rest, _code().summary))


def default_root() -> Path:
    """The folder in the environment variable LEAKGAUGE_DATA, or ~/.cache/leakgauge."""
    return Path(os.environ.get("LEAKGAUGE_DATA") or "~/.cache/leakgauge").expanduser()


def split_by_class(x: torch.Tensor, y: torch.Tensor) -> tuple[Examples, Examples]:
    """The fixed split of a data set that has no split: every fifth example of each class is a test example.

    For a regression, whose y are numbers, every fifth of all examples is a test example.
    """
    is_test = torch.zeros(len(y), dtype=torch.bool)
    if y.is_floating_point():
        is_test[4::5] = True
    for label in set() if y.is_floating_point() else set(y.tolist()):
        is_test[(y == label).nonzero()[4::5]] = True
    return Examples(x[~is_test], y[~is_test]), Examples(x[is_test], y[is_test])


def find(what: str, folders: list[Path], names: list[str], hint: str) -> Path:
    """The first existing file among `names` in the first of `folders` that has one.

    Args:
        what: the kind of file for the error, e.g. `MNIST file`.
        hint: how to get it, for the error: a command or a URL.

    Raises:
        DataMissing: there is no such file.
        DataUnreadable: a folder on the path cannot be entered, or it is neither a folder nor a regular file.
    """
    for path in (folder / name for folder in folders for name in names):
        with reading(path):
            if path.exists():
                if not path.is_dir():
                    regular(path)
                return path
    places = " and ".join(str(folder) for folder in folders)
    raise DataMissing(f"no {what}: looked for {' or '.join(names)} in {places}; {hint}")


def most_unpacked(packed: int) -> int:
    """The bytes to which `packed` bytes on disk may grow."""
    return int(os.environ.get("LEAKGAUGE_MAX_UNPACKED") or max(MAX_UNPACKED, _RATIO * packed))


def check_unpacked(size: int, packed: int) -> None:
    """Raise ValueError if `size` bytes are too many for the contents of files of `packed` bytes."""
    if size > (most := most_unpacked(packed)):
        text = f"{packed:,} bytes unpack to {size:,} or more, expected at most {most:,}"
        raise ValueError(f"{text}; the environment variable LEAKGAUGE_MAX_UNPACKED=BYTES raises this limit")


def unpacked(path: Path) -> bytes:
    """The bytes of a file, unpacked if it is a `.gz`; raises ValueError if there are too many."""
    if path.suffix != ".gz":
        return content(path)
    packed = regular(path)
    with gzip.open(path) as file:
        data = file.read(most_unpacked(packed) + 1)
    check_unpacked(len(data), packed)
    return data


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error of a reader into one line that names `path`.

    Raises:
        DataUnreadable: instead of any other error, because a damaged file may raise anything in its decoder.
    """
    try:
        yield
    except (DataMissing, DataUnreadable):
        raise
    except Exception as error:
        raise DataUnreadable(f"cannot read {path}: {reason(error)}") from error


@functools.cache
def _forms() -> dict[str, Form]:
    from leakgauge.harness.data import features, files, given

    return files.FORMS | given.FORMS | features.FORMS


def _code() -> Form:
    from leakgauge.harness.data import given

    return given.CODE


@functools.cache
def _sources() -> dict[str, Source]:
    """The `SETS` of every module in this folder; a new data set needs only a new file."""
    names = [info.name for info in pkgutil.iter_modules(__path__) if not info.name.endswith("_shim")]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {name: source for module in modules for name, source in vars(module).get("SETS", {}).items()}
