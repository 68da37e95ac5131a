"""Tables of cases: the names of a row's values are those of the arguments of the test."""

import inspect

import pytest


def by_rows(*rows, **options):
    """`pytest.mark.parametrize` for a table; each row has the values of the first arguments of the test."""

    def parametrized(test):
        values = getattr(rows[0], "values", rows[0])  # those of a `pytest.param`, or the row itself
        names = list(inspect.signature(test).parameters)[: len(values)]
        return pytest.mark.parametrize(names, rows, **options)(test)

    return parametrized
