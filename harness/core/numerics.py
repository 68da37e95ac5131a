"""How results were computed, in words: vector instructions, BLAS and its threads, processor, and variables.

The same code rounds differently with other vector instructions, and a search carries last digits on to other images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from leakgauge.harness.core.labels import counted

VECTORS = "vector instructions"
"""The name of torch's level, such as AVX512, in `Environment.numerics`."""

UNKNOWN = "unknown vector instructions, BLAS and threads"  # of results of earlier versions


def unlike(runs: Mapping[str, Sequence[Mapping[str, str]]]) -> str:
    """How runs were computed, if that differs or is not known; empty if all results state the same.

    Args:
        runs: the different values of `Environment.numerics` of each run, by words such as "the first run was".
    """
    known = [one for made in runs.values() for one in made if one]
    differ = [name for name in {name for one in known for name in one} if len({one.get(name) for one in known}) > 1]
    if not differ and all(made and all(made) for made in runs.values()):
        return ""
    differ.sort(key=_order)
    names, others = differ[:3] or [VECTORS], differ[3:]  # a sentence of bearable length; the JSON has all
    more = f" ({counted(len(others), 'other difference')})" if others else ""
    texts = (f"{who} made with {', '.join(_facts(made, names))}" for who, made in runs.items())
    end = "the last digits may differ also with equal code, and one image may look quite different"
    return f"{'; '.join(texts)}{more}: {end}"


def several(made: Sequence[Mapping[str, str]]) -> str:
    """That one run's results were computed in several ways; empty if they state the same, or none states it."""
    return unlike({"these results were": made}) if len(made) > 1 else ""


def stated(made: Sequence[Mapping[str, str]]) -> str:
    """All that a run states of how it was computed."""
    texts = ("; ".join(f"{name} {one[name]}" for name in sorted(one, key=_order)) for one in made)
    return " or ".join(text or UNKNOWN for text in texts) or UNKNOWN


def _order(name: str) -> tuple[bool, bool, bool, str]:
    return name != VECTORS, not name.isupper(), name != "processor", name  # variables in capitals are causes


def _facts(made: Sequence[Mapping[str, str]], names: Sequence[str]) -> Iterator[str]:
    """What a run states of these names; several values are joined by "or"."""
    if not (made and all(made)):
        yield UNKNOWN
    for name in names:
        if values := dict.fromkeys(one.get(name, "none") for one in made if one):
            yield f"no {name}" if [*values] == ["none"] else f"{name} {' or '.join(values)}"
