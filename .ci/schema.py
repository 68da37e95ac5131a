"""Write studies/study.schema.json, the JSON schema of studies, for editors; made from the types that check a study.

    python .ci/schema.py

It refuses unknown keys and wrong types. `leakgauge show` checks the rest: several keys together, data, your own code.
"""

import json
from pathlib import Path

from pydantic import TypeAdapter

from leakgauge.harness.core.cell import FederationSpec, Target, TaskSpec
from leakgauge.harness.federation import registry
from leakgauge.harness.query.lines import Figure
from leakgauge.harness.query.statements import Statement
from leakgauge.harness.study.goal import Goal
from leakgauge.harness.study.study import ZIP, _File

PLACE = Path(__file__).parents[1] / "studies" / "study.schema.json"
TEXT = {"type": "string"}
GROUP = {"type": "array", "items": TEXT}


def plain(schema):
    """A schema without titles, long texts and `null`, which TOML does not have."""
    if isinstance(schema, list):
        return [plain(one) for one in schema if one != {"type": "null"}]
    if not isinstance(schema, dict):
        return schema
    left = {key: plain(value) for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
    if isinstance(left.get("description"), str):
        left["description"] = left["description"].partition("\n")[0]
    if left.get("default", 0) is None:
        del left["default"]
    if len(left.get("anyOf", ())) == 1:
        left |= left.pop("anyOf")[0]
    return left


def of(kind):
    """The schema of a table that is one object of this type."""
    return plain(TypeAdapter(kind).json_schema())


def swept(kind, **others):
    """The same, where each value may be a list of values to try; `zip` names lists that go together."""
    table = of(kind)
    properties = {key: choice(value) for key, value in {**table["properties"], **others}.items()}
    group = {"anyOf": [GROUP, {"type": "array", "items": GROUP}]}
    return {**table, "properties": {**properties, ZIP: group}}


def choice(schema):
    """A value, or a list of values."""
    rest = {key: value for key, value in schema.items() if key == "default"}
    one = {key: value for key, value in schema.items() if key != "default"}
    return rest | {"anyOf": [one, {"type": "array", "items": one}]}


def parts(kind, **others):
    """Tables of defenses or attacks: the keys of each shipped one by its name; those of your own are free."""
    known = [(name, one) for name, one in registry.classes(kind).items() if one.__module__.startswith("leakgauge.")]
    name = {"anyOf": [{"enum": [name for name, _ in known]}, TEXT]}
    cases = [
        {
            "if": {"properties": {"name": {"const": name}}},
            "then": swept(one, name=TEXT, **others),
        }
        for name, one in known
    ]
    return {"type": "object", "required": ["name"], "properties": {"name": choice(name)}, "allOf": cases}


def schema():
    """The schema of a study."""
    target = swept(Target)
    classes = target["properties"]["victim_classes"]["anyOf"]
    target["properties"]["victim_classes"]["anyOf"] = [*classes, TEXT]
    whole = plain(_File.model_json_schema())
    tables = {
        "tasks": swept(TaskSpec),
        "federations": swept(FederationSpec),
        "defenses": parts("defense", personal=TEXT, target={"$ref": "#/$defs/goal"}),
        "attacks": parts("attack", threat=TEXT, target={"$ref": "#/$defs/target"}),
        "figures": of(Figure),
        "claims": of(Statement),
    }
    definitions = {"goal": swept(Goal), "target": target}
    for table in [*tables.values(), *definitions.values()]:
        definitions |= table.pop("$defs", {})
    for key, table in tables.items():
        whole["properties"][key]["items"] = table
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A study of leakgauge"}
    return head | whole | {"$defs": definitions}


def text():
    """The content of the file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


if __name__ == "__main__":
    PLACE.write_text(text(), "utf-8")
