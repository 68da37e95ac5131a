"""Adult: whether a person earns over 50,000 dollars a year, from the 1994 US census."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.files import text
from leakgauge.harness.core.form import Table
from leakgauge.harness.core.table import Column
from leakgauge.harness.data import DataSet, Source, find, reading, unpacked

COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country"),
)
"""The columns in the order of the file."""

NUMERIC = {"age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week"}
"""The columns that are numbers (`continuous` in adult.names); the others are categories."""

CLASSES = ("<=50K", ">50K")

TOLERANCE = 0.319
"""A reconstructed number is right within this many standard deviations; guessing the mean of a normal distribution is
then right for a quarter of its draws. Source: Vero et al. 2023, "TabLeak: tabular data leakage in federated learning"
(arXiv 2210.01785)."""

Columns = npt.NDArray[np.str_]


def adult(root: Path) -> DataSet:
    """The 14 columns of Adult as [n, 108] features: numbers scaled, categories one-hot.

    The columns keep their order. A number is scaled to [0, 1] by the least and greatest training value; test values
    outside this range are clipped. A category has one feature per training value, sorted; the unknown `?` counts as a
    value. Label 1 is an income over 50,000 dollars. No row is left out.

    Raises:
        DataMissing: adult.data or adult.test is missing, both packed and unpacked.
        DataUnreadable: a row does not have 15 columns, a number cannot be parsed, or a category occurs only in test
            rows.

    Source: Becker and Kohavi 1996, UCI Machine Learning Repository, doi:10.24432/C5XW20.
    """
    (train_columns, train_y), (test_columns, test_y) = _rows(root, "adult.data"), _rows(root, "adult.test")
    train_x: list[npt.NDArray[np.float64]] = []
    test_x: list[npt.NDArray[np.float64]] = []
    columns = []
    with reading(root / "adult"):
        for name, train_values, test_values in zip(COLUMNS, train_columns, test_columns, strict=True):
            encode = _numbers if name in NUMERIC else _categories
            for parts, values in ((train_x, train_values), (test_x, test_values)):
                parts.append(encode(name, values, train_values))
            spread = float(train_x[-1].std()) if name in NUMERIC else 0.0
            columns.append(Column(name, train_x[-1].shape[1], TOLERANCE * spread))
        x = [torch.from_numpy(np.concatenate(parts, axis=1).astype(np.float32)) for parts in (train_x, test_x)]
        train, test = Examples(x[0], train_y), Examples(x[1], test_y)
        return DataSet("adult", train, test, CLASSES, public=True, stated=Table(tuple(columns)))


def _rows(root: Path, name: str) -> tuple[Columns, torch.Tensor]:
    """[14, n] texts and [n] labels of one file, without comments and empty lines."""
    hint = f"get it: https://archive.ics.uci.edu/ml/machine-learning-databases/adult/{name}"
    path = find("Adult file", [root / "adult", root], [name, f"{name}.gz"], hint)
    with reading(path):
        lines = text(unpacked(path)).splitlines()
        rows = [row for row in csv.reader(lines, skipinitialspace=True) if row and not row[0].startswith("|")]
        for number, row in enumerate(rows, start=1):
            if len(row) != len(COLUMNS) + 1:
                raise ValueError(f"expected {len(COLUMNS) + 1} columns, got {len(row)} in row {number}")
        if not rows:
            raise ValueError("expected rows, got none")
        table = np.array(rows).T
        income = np.char.rstrip(table[-1], ".")  # adult.test writes `>50K.`
        if not np.isin(income, CLASSES).all():
            raise ValueError(f"expected incomes {' and '.join(CLASSES)}, got {', '.join(np.unique(income))}")
        return table[:-1], torch.from_numpy((income == CLASSES[1]).astype(np.int64))


def _numbers(name: str, values: Columns, train: Columns) -> npt.NDArray[np.float64]:
    """[n, 1] in [0, 1], scaled by the range of the training values; 0 if that range is empty."""
    numbers, known = values.astype(np.float64)[:, None], train.astype(np.float64)
    low, high = known.min(), known.max()
    return np.zeros_like(numbers) if low == high else np.asarray(np.clip((numbers - low) / (high - low), 0, 1))


def _categories(name: str, values: Columns, train: Columns) -> npt.NDArray[np.float64]:
    """[n, number of training values], one-hot."""
    known = np.unique(train)
    if not np.isin(values, known).all():
        raise ValueError(f"expected a {name} of the training rows, got {', '.join(np.setdiff1d(values, known))}")
    return np.eye(len(known))[np.searchsorted(known, values)]


SETS = {"adult": Source("Adult census income: 32,561 + 16,281 rows, 108 features, 2 classes", adult)}
