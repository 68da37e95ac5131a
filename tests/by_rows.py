"""Tables of cases: the names of a row's values are those of the arguments of the test."""

import inspect

import pytest


def by_rows(*rows, **options):
    """`pytest.mark.parametrize` for a table: each row has the values of the first arguments of the test.

    A row is a tuple, a `pytest.param`, or anything else, which is the value of the first argument alone.
    """

    def parametrized(test):
        values = rows[0].values if isinstance(rows[0], type(pytest.param())) else rows[0]
        names = list(inspect.signature(test).parameters)
        names = names[: len(values)] if type(values) is tuple else names[0]  # a `NamedTuple` is one value
        return pytest.mark.parametrize(names, rows, **options)(test)

    return parametrized
