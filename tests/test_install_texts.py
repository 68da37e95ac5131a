"""leakgauge is not in a package index: no text tells people to install it from one, but from a checkout."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "harness", "attacks", "defenses", "reports", "leakgauge", "studies", "examples", "benchmarks")
TEXTS = {".md", ".py", ".toml", ".html", ".ipynb", ".cfg", ".yml"}
FILES = sorted({one for folder in FOLDERS for one in (ROOT / folder).rglob("*") if one.suffix in TEXTS})
FROM_AN_INDEX = re.compile(
    r"(?:install|add|download)(?:\s+(?:-\S+|[^\s'\"`]+\.txt))*\s+['\"`]?leakgauge(?![\w/-]*\.)"
    r"|['\"`]leakgauge\[|[:=]\s*leakgauge\s*[=><~]="
)


def test_the_pattern_sees_installations_from_an_index_and_no_others():
    seen = ("pip install leakgauge", "pip install 'leakgauge[ray]'", "uv add leakgauge", "pip install -U leakgauge")
    unseen = ("pip install '.[ray]'", "pip install dist/leakgauge-*.whl", "pip install --constraint constraints.txt .")
    assert [bool(FROM_AN_INDEX.search(text)) for text in (*seen, *unseen)] == [True] * 4 + [False] * 3


def test_no_text_installs_leakgauge_from_a_package_index():
    texts = [*FILES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    assert len(texts) > 300
    assert [one for one in texts if FROM_AN_INDEX.search(one.read_text("utf-8"))] == []


def test_the_page_about_ci_names_every_kind_of_file_that_owners_review():
    text = (ROOT / "docs" / "ci-threats.md").read_text("utf-8")
    (owned,) = re.findall(r"Have owners review ([^(]*)\(", text)
    for name in ("defenses/", "attacks/", "harness/", "leakgauge/", "pyproject.toml", "*.so", "Makefile", ".ci"):
        assert f"`{name}`" in owned
