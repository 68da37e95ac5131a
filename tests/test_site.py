"""The pages of docs/ do what they say: their code runs as printed, and every public name has an example."""

import ast
import json
import re
import runpy
import tomllib
from pathlib import PurePath

import pytest

import leakgauge
from leakgauge.harness.federation import registry
from tests.by_rows import by_rows
from tests.page_case import PAGES, ROOT, blocks, lines_missing, name_of, play

ELSEWHERE = ("README.md", "docs/studies.md", "docs/ci.md", "docs/how-to/officer.md", "docs/how-to/view.md")
"""Pages whose blocks do not run in their order: see tests/test_commands.py."""

PLAYED = [page for page in PAGES if name_of(page) not in ELSEWHERE and blocks(page)]

TEXT = {name_of(page): page.read_text("utf-8") for page in PAGES}


NAVIGATION = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
SECTIONS = {
    section.partition(":\n")[0].strip('" '): re.findall(r"([\w/-]+\.(?:md|ipynb))$", section, re.M)
    for section in re.split(r"^  - ", NAVIGATION, flags=re.M)[1:]
}
"""Pages by section of the navigation."""

MAIN = {
    f"docs/{page}"
    for name, pages in SECTIONS.items()
    if name != "API" and not name.startswith("Appendix")
    for page in pages
}
"""What a reader is asked to read; results and design are in the appendix."""


def written(page):
    """The text of a page; of a notebook, that of its cells and what they printed."""
    if page in TEXT:
        return TEXT[page]
    cells = json.loads((ROOT / page).read_text("utf-8"))["cells"]
    return " ".join("".join(part) for cell in cells for part in (cell["source"], *printed(cell)))


def printed(cell):
    return [output.get("text", ()) for output in cell.get("outputs", ())]


def is_slow(page):
    """Whether a page takes seconds: it starts processes, or attacks."""
    return page.parent.name == "how-to" or page.name == "run.md" or any(blocks(page, "sh"))


@pytest.mark.filterwarnings("default")  # warnings of Opacus, Flower and Ray
@pytest.mark.parametrize(
    "page", [pytest.param(page, id=name_of(page), marks=[pytest.mark.matrix] * is_slow(page)) for page in PLAYED]
)
@pytest.mark.ci(
    without=("docs/tutorial.md", "docs/how-to/own-defense.md", "docs/how-to/opacus.md", "docs/how-to/ci-elsewhere.md")
)
def test_a_page_runs_as_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    play(page, tmp_path)


def test_every_file_that_a_page_shows_is_used_on_it():
    for page in PLAYED:
        for block in blocks(page):
            stem = PurePath(block.title).stem
            rest = "".join(other.code for other in blocks(page) if other.title != block.title)
            used = re.search(rf"\b{stem}\b", rest) or ("pytest" in rest and stem.startswith("test_"))
            assert not block.title or used, (page, block.title)


def test_every_public_name_is_listed_and_has_an_example():
    pages = "".join(text for name, text in TEXT.items() if name.startswith("docs/api/"))
    for name in leakgauge.__all__:
        assert re.search(rf"```python\n[^`]*\b{name}\b", pages), name
        assert f"{name}`](" in TEXT["docs/api/index.md"], name


def exported(name):
    """`__all__` of a module in the folder `leakgauge`; it may need a package that is not here."""
    tree = ast.parse((ROOT / "leakgauge" / f"{name}.py").read_text("utf-8"))
    (found,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    return set(found)


def test_the_page_of_the_api_lists_the_public_names_and_no_others():
    page = TEXT["docs/api/index.md"]
    names = page.partition("| name |")[2].partition("\n\n")[0]
    assert set(re.findall(r"\[`(\w+)`\]", names)) == set(leakgauge.__all__)
    modules = dict(re.findall(r"^\| \[`leakgauge\.(\w+)`\]\S+ \| (.*):", page, re.M))
    files = {path.stem for path in (ROOT / "leakgauge").glob("*.py")} - {"__init__", "__main__"}
    assert set(modules) == files
    for name, listed in modules.items():
        assert set(re.findall(r"`(\w+)`", listed)) == exported(name), name


def test_what_a_type_checker_sees_of_the_public_names_is_what_they_are():
    tree = ast.parse((ROOT / "leakgauge" / "__init__.py").read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    found = {}
    exec(compile(ast.Module(block.body, []), "stubs", "exec"), {}, found)
    found = {name: value for name, value in found.items() if name != "Any" and not name.startswith("_")}
    assert found.keys() == set(leakgauge.__all__) - {"__version__"}
    for name, value in found.items():
        assert getattr(leakgauge, name) is value, name


INNER = re.compile(r"\bleakgauge\.(harness|attacks|defenses|reports|studies)\b")
"""What is not public."""


def test_what_readers_copy_imports_only_public_names():
    pages = [name for name in TEXT if not name.startswith("docs/api/")]
    pages += [f"docs/api/{name}.md" for name in ("index", "run", "defenses", "attacks", "own")]
    code = {f"{name}:{block.line}": block.code for name in pages for block in blocks(ROOT / name, "python")}
    for path in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        code[path.name] = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    skeletons = (ROOT / "harness" / "integrations" / "skeletons").glob("my_*.py")
    code |= {path.name: path.read_text("utf-8") for path in (*skeletons, *(ROOT / "examples").rglob("*.py"))}
    assert {"my_defense.py", "my_attack.py", "my_task.py", "audit-my-mechanism.ipynb"} <= set(code)
    assert [place for place, text in code.items() if INNER.search(text)] == []
    assert INNER.search("from leakgauge.defenses.gaussian import Gaussian")


@pytest.mark.parametrize("name", ["flower", "opacus"])
def test_every_name_of_a_module_for_a_framework_has_a_section_and_an_example(name):
    code = "".join(block.code for block in blocks(ROOT / "docs" / "how-to" / f"{name}.md", "python"))
    for one in exported(name):
        assert re.search(rf"^::: [\w.]+\.{one}$", TEXT["docs/api/own.md"], re.M), one
        assert re.search(rf"\b{one}\b", code), one


def test_every_shipped_part_has_its_docstring_on_a_page():
    for kind in ("defense", "attack"):
        kinds = {name: f"{part.__module__}.{part.__qualname__}" for name, part in registry.classes(kind).items()}
        found = re.findall(r"^## (\S+)\n\n::: (\S+)$", TEXT[f"docs/api/{kind}s.md"], re.M)
        assert dict(found) == kinds


def test_every_page_is_in_the_navigation():
    listed = {f"docs/{page}" for pages in SECTIONS.values() for page in pages}
    notebooks = {name_of(path) for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    assert listed == set(TEXT) - {"README.md"} | notebooks
    assert {"I have a defense", "I have an app", "I have a repository"} <= set(SECTIONS)


def test_the_main_path_can_be_read():
    assert {f"docs/{page}" for pages in SECTIONS.values() for page in pages} > MAIN
    words = {page: len(written(page).split()) for page in MAIN}
    assert sum(words.values()) <= 30_000, words
    readme = TEXT["README.md"]
    assert len(readme.splitlines()) <= 45
    assert len(readme.split()) <= 350


def test_the_pictures_are_what_their_command_draws():
    drawn = runpy.run_path(str(ROOT / ".ci" / "pictures.py"))["drawn"]()
    shown = {page: set(re.findall(r"!\[[^]]{20,}\]\((?:\.\./)?assets/([\w-]+\.\w+)\)", TEXT[page])) for page in TEXT}
    for name, text in drawn.items():
        picture = (ROOT / "docs" / "assets" / name).read_text("utf-8")
        assert picture == text, f"docs/assets/{name}: write it with python .ci/pictures.py"
        assert 'role="img" aria-label="' in picture
        assert "prefers-color-scheme: dark" in picture
        assert any(name in names for names in shown.values()), f"no page shows {name} with words for it"
    assert len(set(drawn) & {name for page in MAIN if page in shown for name in shown[page]}) >= 10


def test_a_notebook_becomes_a_page_with_its_outputs():
    parts = runpy.run_path(str(ROOT / ".ci" / "notebooks.py"))["parts"]
    table = {"data": {"text/html": ["<table>", "</table>"], "text/plain": ["x"]}}
    cell = {"cell_type": "code", "source": ["a = 1\n", "a"], "outputs": [{"text": ["1\n"]}, table, {"data": {}}]}
    shown = ["```python\na = 1\na\n```", "```text\n1\n```", '<div class="output"><table></table></div>']
    assert list(parts(cell)) == shown
    assert list(parts({"cell_type": "markdown", "source": ["# A"]})) == ["# A"]


def test_what_a_page_shows_is_compared_with_what_is_printed():
    printed = "first\n  n = 3, epsilon >= 2.929 (right), delta 1e-05\nlast 1,000"
    assert lines_missing("first\nn = 3, epsilon >= 2.93 (...), delta 1e-05\n...\nlast 1,000\n", printed) == []
    assert lines_missing("n = 4, epsilon >= 2.93 (...), delta 1e-05", printed)
    assert lines_missing("n = 3, epsilon >= 2.85 (...), delta 1e-05", printed)
    assert lines_missing("last 1,000\nfirst", printed) == ["first"]
    assert lines_missing("irst", printed) == ["irst"]


@by_rows(
    ('<a href="b.html#here">b</a><a href="https://example.org">out</a><img src="b.html">', ""),
    ('<a href="b.html#gone">b</a>', "no anchor for 'b.html#gone'"),
    ('<a href="c.html">c</a>', "no file for 'c.html'"),
    ('<img src="c.png">', "no file for 'c.png'"),
    ('<script src="//cdn.example.org/x.js"></script>', "fetches //cdn.example.org/x.js"),
    ('<link rel="stylesheet" href="https://example.org/x.css">', "fetches https://example.org/x.css"),
    ("<style>a { background: url(https://example.org/x.png) }</style>", "fetches https://example.org/x.png"),
)
def test_the_check_of_a_site_sees_what_leads_nowhere_or_elsewhere(html, fault, tmp_path):
    check = runpy.run_path(str(ROOT / ".ci" / "check_site.py"))["faults"]
    (tmp_path / "a.html").write_text(html)
    (tmp_path / "b.html").write_text('<h2 id="here">b</h2>')
    assert check(tmp_path) == ([f"a.html: {fault}"] if fault else [])


def test_an_extra_that_a_page_installs_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = {extra for text in TEXT.values() for extra in re.findall(r"pip install [^\n]*\.\[(\w+)\]", text)}
    assert named
    assert named <= set(extras)


def test_the_citation_names_this_version_and_its_keywords():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert project["version"] == leakgauge.__version__
    for line in ("title: leakgauge", f"version: {leakgauge.__version__}", f"license: {project['license']}"):
        assert re.search(rf"^{re.escape(line)}$", citation, re.M)
    assert re.findall(r"^  - (?!name)(.*)$", citation, re.M) == project["keywords"]


def test_what_a_page_takes_from_the_code_is_defined_there():
    named = {one for text in TEXT.values() for one in re.findall(r"^::: ([\w.]+)$", text, re.M)}
    assert named
    for one in named:
        module, _, name = one.rpartition(".")
        outer = module.rpartition(".")[2]
        if outer[0].isupper():  # a method of a class
            module, name = module.removesuffix(f".{outer}"), rf"{outer}\b(.|\n)*\n    def {name}"
        path = ROOT.joinpath(*module.split(".")[1:])
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")
        assert re.search(rf"^(def|class) {name}\b|^{name}\b|^    \"{name}\"", source, re.M), one
