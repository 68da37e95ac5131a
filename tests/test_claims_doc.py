"""The first table of `docs/claims-tables.md` has the numbers that its commands print."""

import re
import shlex
from pathlib import Path

import pytest

from leakgauge.harness.audit.claims import assignments
from leakgauge.harness.audit.standalone import audit

LINES = (Path(__file__).parents[1] / "docs" / "claims-tables.md").read_text().splitlines()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if re.match(r"\| `.*--trials", line)]


def parsed(command):
    name, *words = shlex.split(command.strip("`"))
    options = list(zip(words[::2], words[1::2], strict=True))

    def given(flag):
        return [value for key, value in options if key == flag]

    one = {key.strip("-"): value for key, value in options}
    return (
        (name, assignments(given("--set"), "--set"), assignments(given("--setting"), "--setting")),
        int(one["rounds"]) if "rounds" in one else None,
        {"trials": int(one["trials"]), "threat": one.get("threat"), "seed": 0},
    )


def near(printed, found):
    """Whether a printed number is the found one, rounded to its digits."""
    if "inf" in (printed, found):
        return printed == str(found)
    digits = max(1, len(re.sub(r"^0+", "", printed.replace(".", ""))))
    return float(printed) == pytest.approx(found, rel=0.6 * 10.0 ** (1 - digits), abs=1e-9)


def is_slow(command):
    """Whether a row takes seconds: many trials, or a defense whose encoder is slow."""
    return int(command.split()[-1].strip("`")) > 300 or "cepam" in command


@pytest.mark.usefixtures("without_fit")
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row[0], marks=pytest.mark.slow if is_slow(row[0]) else pytest.mark.matrix) for row in ROWS],
)
def test_a_row_is_what_its_command_prints(row):
    command, where, claimed, proved, audited, verdict = row
    deployment, rounds, options = parsed(command)
    found = audit(*deployment, rounds, **options)
    unit, delta, horizon = where.split(", ")
    assert (found["claimed"]["unit"], found["claimed"]["horizon"]) == (unit, horizon)
    assert near(delta, found["claimed"]["delta"])
    assert near(claimed, found["claimed"]["epsilon"])
    assert near(proved, found["proved"]["epsilon"])
    assert near(audited, found["audited"]["epsilon_lower"])
    assert found["verdict"] == verdict


def test_every_claim_of_the_papers_has_a_row():
    assert {row[0].split()[0].strip("`") for row in ROWS} == {"jopeq", "sdq", "jopeq-t", "udp", "cepam-gaussian", "ota"}
