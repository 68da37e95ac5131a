"""Code that a text names, as `module:Class` or `module:function`: a stranger's study may not have it imported."""

from __future__ import annotations

import os
from collections.abc import Iterable


def code_allowed(asked: bool) -> bool:
    """Whether a text may name code to import: by an option, or by LEAKGAUGE_ALLOW_CODE=1."""
    return asked or os.environ.get("LEAKGAUGE_ALLOW_CODE") == "1"


def named_code(values: Iterable[object]) -> list[str]:
    """Those values of a defense's or an attack's table that name code, as in `module:Class`."""
    return [value for value in values if isinstance(value, str) and ":" in value]
