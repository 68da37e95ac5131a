"""The command `init`: what do you have, and who is your adversary? It writes a study, or names the commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from typer import Option

from leakgauge.harness.cli import options as cli
from leakgauge.harness.core.sinks import say
from leakgauge.harness.core.threats import ADVERSARIES

Have = Literal["defense", "app", "repository"]
Data = Literal["pictures", "tables", "texts"]
Adversary = Literal[
    "server", "colluding-server", "malicious-server", "aggregator", "eavesdropper", "participant", "public"
]

_WORDS = {
    "defense": "a defense, of the catalogue or of your own",
    "app": "an app that trains (Flower, Opacus, NVFlare, own code)",
    "repository": "a repository whose CI shall keep it from leaking",
    "pictures": "pictures",
    "tables": "rows of a table",
    "texts": "texts",
} | ADVERSARIES

_TASKS: dict[Data, tuple[str, str, str]] = {
    "pictures": ("faces", "cnn-udp", "mean"),
    "tables": ("adult", "mlp-small", "majority"),
    "texts": ("help", "text-encoder", "majority"),
}
"""Data, model, and the best blind guess, by kind of data."""

_NEXT: dict[Have, str] = {
    "app": """In Python, with your own model and records:

    run = leakgauge.inspect(model, (x, y), folder="runs/inspect")

A Flower app: wrap its strategy with leakgauge.flower.recorded and run it once, then

    leakgauge inspect recording --model MODEL --data DATA

An Opacus loop: leakgauge.opacus.inspect(model, optimizer, loader). Messages of other code: leakgauge.messages.
docs/how-to: own-model-and-data, flower, opacus, own-messages; docs/deployed: mods of Flower, filters of NVFlare.""",
    "defense": """wrote {path}; next:
  leakgauge show {path}{code}
  leakgauge run {path} -o runs/{name}{code}""",
    "repository": """wrote {path}; next, run it once, and commit it with its baseline:
  leakgauge baseline make {path} --reason "first numbers"{code}
In CI, on every change; exit code 1: leakage increased:
  leakgauge gate {path} -o runs/gate --baseline baselines/{name}.json{code}
docs/how-to/ci-elsewhere: an action for GitHub, a template for GitLab, a Dockerfile, a hook.""",
}


def init(
    have: Annotated[Have | None, Option(help="What you have.")] = None,
    adversary: Annotated[Adversary | None, Option(help="Who must not learn about people.")] = None,
    data: Annotated[Data | None, Option(help="What clients hold.")] = None,
    defense: Annotated[str, Option(help="A name of 'leakgauge list defenses', or module:Class.")] = "",
    out: Annotated[Path, Option("-o", "--out", help="The study; nothing is overwritten.")] = Path("study.toml"),
) -> None:
    """Choose by questions: write a study of a defense or for a repository's CI, or name the commands for an app."""
    from leakgauge.harness.core.errors import StudyError
    from leakgauge.harness.study.store import write_atomically
    from leakgauge.harness.study.study import load_study

    have = _asked("What do you have?", Have, have)
    if have == "app":
        say(*_NEXT[have].splitlines())
        return
    defense = defense or (typer.prompt("Which defense?", default="gaussian") if sys.stdin.isatty() else "gaussian")
    data, adversary = _asked("What do clients hold?", Data, data), _asked("Who attacks?", Adversary, adversary)
    with cli.user_errors():
        if out.exists():
            raise StudyError("init", [f"{out} is there already; nothing is overwritten, name another file with -o"])
        write_atomically(out, study_text(out.stem, defense, data, adversary, have).encode())
        code = " --allow-code" if ":" in defense else ""
        try:
            load_study(out, allow_code=bool(code))
        except Exception:
            out.unlink()
            raise
    say(*_NEXT[have].format(path=out, name=out.stem, code=code).splitlines())


def _asked(question: str, kinds: Any, given: Any) -> Any:
    """The choice that was given, or asked for at a terminal; else the first."""
    names = get_args(kinds)
    if given is not None or not sys.stdin.isatty():
        return given or names[0]
    say(question, *(f"  {number}  {_WORDS[name]}" for number, name in enumerate(names, 1)))
    while not 1 <= (number := typer.prompt("Number", default=1, type=int)) <= len(names):
        say(f"expected a number from 1 to {len(names)}")
    return names[number - 1]


def study_text(name: str, defense: str, data: Data, adversary: Adversary, have: Have = "defense") -> str:
    """A study of a defense beside none: attacks that this adversary can make, and the floor; short for CI."""
    source, model, _ = _TASKS[data]
    lines = [f"# {_WORDS[data]}; {_WORDS[adversary]}. 'leakgauge list attacks' has more.", f'name = "{name}"']
    lines += ["lineup = false"] * (have == "repository")
    lines += [f'threats = ["{adversary}"]', "", "[[tasks]]", f'data = "{source}"', f'model = "{model}"', ""]
    lines += ["[[federations]]", "clients = 10", "rounds = 20", 'algorithm = "fedsgd"', "batch = 0", "lr = 0.03", ""]
    lines += ["[[defenses]]", 'name = "none"          # the ceiling', "", "[[defenses]]", f'name = "{defense}"']
    for attack, target in _attacks(data, adversary):
        lines += ["", "[[attacks]]", *(f"{key} = {_toml(value)}" for key, value in attack.items())]
        lines += [f"target = {_toml(target)}"]
    return "\n".join([*lines, ""])


def _attacks(data: Data, adversary: Adversary) -> Iterator[tuple[dict[str, object], dict[str, object]]]:
    """Attacks with their targets; the floor is for those that guess records."""
    probe = {"kind": "probe", "count": 16}
    members: dict[str, object] = {"kind": "members", "count": 20, "outside": 60}
    seen = members | {"client": 0, "count": 8}  # in one client's data, from its messages
    if adversary in ("participant", "public"):
        name = "loss-trajectory" if adversary == "participant" else "membership-loss"
        yield {"name": name}, members | ({"round": 0, "rounds": 10} if adversary == "participant" else {})
        return
    strong: dict[str, object] = {"name": "tokens" if data == "texts" else "map"}
    if adversary == "malicious-server":
        strong = strong | {"positions": 10.0} if data == "texts" else {"name": "trap-weights"}
    yield strong, probe
    if adversary == "malicious-server" and data == "tables":  # it needs two dense layers
        yield {"name": "active-membership"}, {"kind": "members", "round": 0, "count": 10}
    else:
        yield {"name": "membership-cosine"}, seen | {"round": 0, "rounds": 10}
    yield {"name": "prior", "guess": _TASKS[data][2]}, probe


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(inner)}' for key, inner in value.items())} }}"
    return json.dumps(value)
