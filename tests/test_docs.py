"""The documentation is complete; its examples are run by tests/test_site.py and tests/test_commands.py."""

import re
import subprocess
import tomllib

from leakgauge.harness import data
from leakgauge.harness.cli import options
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.federation import recording, registry
from leakgauge.harness.gate import judge
from leakgauge.harness.learn import models
from leakgauge.harness.study.study import resolve, shipped
from tests.page_case import ROOT, blocks

STUDIES = (ROOT / "docs" / "studies.md").read_text("utf-8")


def test_the_studies_that_a_page_shows_resolve():
    first, noise, goals = (tomllib.loads(block.code) for block in blocks(ROOT / "docs" / "studies.md", "toml"))
    assert len(resolve(first).cells) == 2 * 3 * (4 + 4)  # and two lineups for each of two targets
    assert len(resolve(noise).claims) == 1
    assert len(resolve(first | goals).cells) == 2 * 6 * (4 + 4)


def test_every_threat_and_exit_code_is_named():
    codes = STUDIES.partition("Exit codes:")[2].partition("\n\n")[0]
    for code in (0, options.USAGE, options.INCOMPLETE, options.INTERRUPTED):
        assert re.search(rf"\b{code}\b", codes)
    page = (ROOT / "docs" / "ci.md").read_text("utf-8")
    assert not [
        code for code in {*judge._CODES.values(), options.USAGE, 3, options.INTERRUPTED} if f"\n| {code} |" not in page
    ]
    assert not [threat for threat in Threat if f"`{threat.value}`" not in STUDIES]


def test_every_part_is_named_in_the_catalogue():
    catalogue = (ROOT / "docs" / "catalogue.md").read_text("utf-8")
    names = [*registry.classes("defense"), *registry.classes("attack"), *shipped()]
    names += [name for name, _ in [*data.names(), recording.FORM, *models.names(), *models.names_for_tokens()]]
    assert not [name for name in names if f"`{name}`" not in catalogue]


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    forbidden = ("/" + "work/", "/" + "root/", "/" + "opt/wheels")
    for path in ROOT.rglob("*"):
        folders = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part != ".ci" for part in folders) or "runs" in folders
        if path.is_file() and path.suffix in (".py", ".md", ".toml", ".txt", ".html", ".css", ".js", "") and not hidden:
            text = path.read_text("utf-8", errors="ignore")
            assert not any(word in text for word in forbidden), path


def test_one_command_counts_the_lines_and_files_of_the_product():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    product = ("harness/", "attacks/", "defenses/", "reports/", "leakgauge/")
    files = [ROOT / name for name in tracked if name.startswith(product) and name.endswith(".py")]
    lines = sum(path.read_bytes().count(b"\n") for path in files)
    said = subprocess.run([ROOT / ".ci" / "size"], cwd="/", capture_output=True, text=True, check=True).stdout
    assert said == f"{lines} lines in {len(files)} files\n"
    first = subprocess.run([ROOT / ".ci" / "size", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"\d+ lines in \d+ files\n", first)
    assert any("skeletons" in path.parts for path in files)
