"""The table of `docs/claims.md` says what the tool says."""

import re
import shlex
from pathlib import Path

import pytest

from leakgauge.harness.audit.claims import assignments
from leakgauge.harness.audit.standalone import ask_audit

LINES = (Path(__file__).parents[1] / "docs" / "claims.md").read_text().splitlines()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if re.match(r"\| `.*--trials", line)]


def parsed(command):
    """Arguments of `ask_audit`."""
    name, *words = shlex.split(command.strip("`"))
    options = list(zip(words[::2], words[1::2], strict=True))

    def given(flag):
        return [value for key, value in options if key == flag]

    one = {key.strip("-"): value for key, value in options}
    return (
        (name, assignments(given("--set"), "--set"), assignments(given("--setting"), "--setting")),
        int(one["rounds"]) if "rounds" in one else None,
        {"trials": int(one["trials"]), "threat": one.get("threat"), "confidence": 0.95, "seed": 0},
    )


def near(said, found):
    """Whether a printed number is the found one, rounded as it is printed."""
    if "inf" in (said, found):
        return said == str(found)
    digits = max(1, len(re.sub(r"^0+", "", said.replace(".", ""))))
    return float(said) == pytest.approx(found, rel=0.6 * 10.0 ** (1 - digits), abs=1e-9)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row[0], marks=[pytest.mark.slow] * (int(row[0].split()[-1].strip("`")) > 1000))
        for row in ROWS
    ],
)
def test_a_row_is_what_its_command_prints(row):
    command, where, claimed, proved, audited, verdict = row
    who, rounds, how = parsed(command)
    found = ask_audit(*who, rounds, **how)
    unit, delta, horizon = where.split(", ")
    assert (found["claimed"]["unit"], found["claimed"]["horizon"]) == (unit, horizon)
    assert near(delta, found["claimed"]["delta"])
    assert near(claimed, found["claimed"]["epsilon"])
    assert near(proved, found["proved"]["epsilon"])
    assert near(audited, found["audited"]["epsilon_lower"])
    assert found["verdict"] == verdict


def test_all_that_the_papers_claim_is_there():
    assert {row[0].split()[0].strip("`") for row in ROWS} == {"jopeq", "sdq", "jopeq-t", "udp", "cepam-gaussian", "ota"}
