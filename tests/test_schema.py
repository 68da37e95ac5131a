"""The JSON schema of studies: made from the types that check a study; shipped and shown studies meet it."""

import copy
import json
import runpy
import tomllib

import pytest
from jsonschema import Draft202012Validator

from leakgauge.harness.cli import init
from tests.by_rows import by_rows
from tests.page_case import PAGES, ROOT, blocks

PLACE = ROOT / "studies" / "study.schema.json"
SCHEMA = json.loads(PLACE.read_text("utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)
FIRST = tomllib.loads(init.study_text("mine", "gaussian", "pictures", "server", "repository"))


def faults(table):
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(table)]


def test_the_file_is_what_its_command_writes():
    assert runpy.run_path(str(ROOT / ".ci" / "schema.py"))["text"]() == PLACE.read_text("utf-8")
    Draft202012Validator.check_schema(SCHEMA)


def test_every_study_that_is_shipped_or_shown_meets_the_schema():
    studies = {path.name: tomllib.loads(path.read_text("utf-8")) for path in (ROOT / "studies").glob("*.toml")}
    shown = [tomllib.loads(block.code) for page in PAGES for block in blocks(page, "toml")]
    studies |= {f"shown {at}": table for at, table in enumerate(shown) if {"name", "tasks", "defenses"} <= table.keys()}
    for path in (ROOT / "studies" / "papers").rglob("*.toml"):  # a recipe is a study with more keys, named by its file
        recipe = tomllib.loads(path.read_text("utf-8"))
        if "tasks" in recipe:  # others compute formulas
            studies[str(path)] = {key: recipe[key] for key in recipe.keys() & SCHEMA["properties"].keys()} | {
                "name": "a"
            }
    assert len(studies) > 50
    assert {name: found for name, table in studies.items() if (found := faults(table))} == {}


@by_rows(
    (("tasks", 0, "mdoel"), "linear"),
    (("federations", 0, "clients"), "ten"),
    (("federations", 0, "algorithm"), ["fedsgd", "fedprox"]),
    (("defenses", 1, "epsylon"), 8.0),
    (("defenses", 1, "clip"), "1"),
    (("attacks", 0, "target", "cuont"), 8),
    (("attacks", 0, "evaluations"), 1.5),
    (("seeds",), []),
    (("lines",), True),
)
def test_the_schema_refuses(where, value):
    table = copy.deepcopy(FIRST)
    inner = table
    for step in where[:-1]:
        inner = inner[step]
    inner[where[-1]] = value
    assert faults(FIRST) == []
    assert len(faults(table)) == 1


@pytest.mark.parametrize("name", ["mine:Own", "laplace+sdq", ["gaussian", "laplace"]])
def test_keys_of_code_of_ones_own_and_of_several_defenses_are_free(name):
    assert faults(FIRST | {"defenses": [{"name": name, "laplace.clip": [1.0, 2.0]}]}) == []
