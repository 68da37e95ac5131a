"""A hook of mkdocs: each notebook of docs/notebooks is a page with its outputs, and can be downloaded."""

import json
import shutil
from pathlib import Path


def on_files(files, config):
    """Notebooks become pages, as Markdown does."""
    for file in files:
        if file.src_uri.endswith(".ipynb"):
            file.is_documentation_page = lambda: True
            for place in ("dest_uri", "url", "abs_dest_path"):  # of a file that would be copied
                vars(file).pop(place, None)


def on_page_read_source(page, config):
    """The Markdown of a notebook; nothing for other pages."""
    if not page.file.src_uri.endswith(".ipynb"):
        return None
    path = Path(page.file.abs_src_path)
    title, *cells = (text for cell in json.loads(path.read_text("utf-8"))["cells"] for text in parts(cell))
    link = f'<a href="{path.name}" download>Download this notebook</a>'
    first, _, rest = title.partition("\n")
    return "\n\n".join([first, link, rest, *cells])


def on_post_build(config):
    """Beside each page lies its notebook."""
    for path in Path(config.docs_dir, "notebooks").glob("*.ipynb"):
        shutil.copy(path, Path(config.site_dir, "notebooks"))


def parts(cell):
    """A cell as Markdown: its source, then what it printed and showed."""
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
    for output in cell.get("outputs", ()):
        shown = output.get("data", {})
        if "text/html" in shown:
            yield f'<div class="output">{"".join(shown["text/html"])}</div>'
        elif text := "".join(output.get("text", shown.get("text/plain", ""))):
            yield f"```text\n{text.rstrip()}\n```"
