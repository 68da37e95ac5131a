"""Tokens and series as data sets: a user's own, and the help texts that come with Python."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from leakgauge.harness.core.form import SERIES, Vocabulary
from leakgauge.harness.data import DataSet, Source
from leakgauge.harness.data.arrays import Array, Arrays, data_set
from leakgauge.harness.data.given import as_array

LENGTH, SIZE = 16, 1000
"""Tokens of a text of `help`, and the size of its vocabulary."""

_UNKNOWN = "<unk>"
_OF_DATA = "special types typesseq typesmapping string strings format customization attribute numeric objects context"
"""First words of the topics about types and their methods; they have about half of the text."""


def tokens(
    x: object,
    y: object = None,
    x_test: object = None,
    y_test: object = None,
    *,
    words: Sequence[str] = (),
    unknown: int | None = None,
    padding: int | None = None,
) -> DataSet:
    """Texts as a data set, for `leakgauge.inspect` and `given_data`.

    Args:
        x, x_test: [n, T] token ids, from 0; shorter texts are filled with `padding`.
        y, y_test: as in `given_data`; None: there are no labels, and the next token is predicted.
        words: the text of each id; empty: unknown.
        unknown, padding: as in `Vocabulary`.

    Raises:
        ValueError: x are no ids, labels do not fit, or `words` are fewer than the ids.

    Example:
        >>> tokens([[0, 2, 1], [2, 1, 1], [1, 0, 2]] * 5, words=("a", "b", "c")).form.name
        'tokens'
    """
    ids = [as_array(each) for each in (x, x_test) if each is not None]
    size = len(words) or 1 + max(int(each.max()) if each.size and each.dtype.kind in "iuf" else 0 for each in ids)
    splits = [Arrays(*pair) for pair in zip(ids, _labels(ids, (y, y_test)), strict=True)]
    vocabulary = Vocabulary(size, tuple(words), unknown, padding)
    return data_set("tokens", splits[0], splits[1] if len(splits) > 1 else None, form=vocabulary)


def series(x: object, y: object, x_test: object = None, y_test: object = None) -> DataSet:
    """Series as a data set, for `leakgauge.inspect` and `given_data`.

    Args:
        x, x_test: [n, channels, T] numbers.
        y, y_test: as in `given_data`.

    Raises:
        ValueError: shapes or labels do not fit.

    Example:
        >>> series(np.random.rand(20, 2, 8), np.arange(20) % 2).input_shape
        (2, 8)
    """
    test = None if x_test is None else Arrays(as_array(x_test), as_array(y_test))
    return data_set("series", Arrays(as_array(x), as_array(y)), test, form=SERIES)


def _labels(ids: Sequence[Array], given: Sequence[object]) -> list[Array]:
    return [
        np.zeros(len(each), np.float32) if y is None else as_array(y)
        for each, y in zip(ids, given[: len(ids)], strict=True)
    ]


def help_texts(root: Path, length: int = LENGTH, size: int = SIZE) -> DataSet:
    """Python's own help texts, cut into texts of `length` of the `size` commonest tokens; a token is a word or a sign.

    Labels say whether a topic is about types or about the language. Equal texts count once. Every fifth text is for
    testing. The texts differ a little between versions of Python.
    """
    from pydoc_data.topics import topics

    split = {topic: re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", text.lower()) for topic, text in sorted(topics.items())}
    counts = Counter(word for words in split.values() for word in words)
    known = [word for word, _ in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[: size - 1]]
    number = {word: place for place, word in enumerate(known, start=1)}
    labels: dict[tuple[int, ...], int] = {}
    for topic, words in split.items():
        of_data = re.split(r"[^a-z]|names", topic)[0] in _OF_DATA.split()
        ids = [number.get(word, 0) for word in words]
        for start in range(0, len(ids) - length + 1, length):
            labels.setdefault(tuple(ids[start : start + length]), int(of_data))
    arrays = Arrays(np.array([*labels]), np.array([*labels.values()]))
    vocabulary = Vocabulary(size, (_UNKNOWN, *known), unknown=0)
    return replace(data_set("help", arrays, None, ("language", "types"), form=vocabulary), public=True)


def help_without_labels(root: Path, length: int = LENGTH, size: int = SIZE) -> DataSet:
    """The same texts without labels, for models that predict the next token."""
    data = help_texts(root, length, size)
    train, test = (part._replace(y=torch.zeros(len(part.y))) for part in (data.train, data.test))
    return replace(data, name="help-next", train=train, test=test, classes=())


SETS = {
    "help": Source("Python's help texts in 16 tokens of 1,000: a class for types, one for the language", help_texts),
    "help-next": Source("the same without labels: the next token is predicted", help_without_labels),
}
