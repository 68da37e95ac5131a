"""Check a built site: nothing comes from elsewhere, and every link inside leads somewhere.

    python check_site.py build/site

Prints each fault as `page: fault`, and exits with 1 if there is one.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "audio": "src", "video": "src"}
"""Elements that a browser fetches, with the attribute that names what."""

_STYLE = re.compile(r"""(?:url\(\s*|@import\s+)["']?\s*((?:https?:)?//[^"')\s]+)""")


class Page(HTMLParser):
    """The names, links and fetched addresses of a page."""

    def __init__(self, text):
        super().__init__()
        self.names, self.links, self.fetched = set(), [], _STYLE.findall(text)
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Note what an element names, links and fetches."""
        found = {key: value or "" for key, value in attrs}
        self.names |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link" and found.get("rel") not in ("canonical", "alternate"):
            self.fetched.append(found.get("href", ""))
        self.fetched += [found[key] for key in (LOADED.get(tag, ""), "srcset") if found.get(key)]


def is_elsewhere(address):
    """Whether an address names a host."""
    return bool(urlsplit(address).netloc) and urlsplit(address).scheme != "data"


def faults(site):
    """Each fault of a site, as `page: fault`."""
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: no page"]
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name}: fetches {address}" for address in page.fetched if is_elsewhere(address)]
        here = [address for address in page.fetched if not is_elsewhere(address)]
        links = [link for link in page.links if not is_elsewhere(link)]
        found += [f"{name}: {fault}" for link in (*here, *links) if (fault := broken(link, path, pages, site))]
    for style in sorted(site.rglob("*.css")):
        found += [
            f"{style.relative_to(site)}: fetches {address}" for address in _STYLE.findall(style.read_text("utf-8"))
        ]
    return found


def broken(link, path, pages, site):
    """Why a link of the page at `path` leads nowhere; empty if it does lead somewhere."""
    parts = urlsplit(link)
    if parts.scheme in ("data", "mailto"):
        return ""
    # 404.html is shown at any address, so its links begin at the top
    start = site.resolve() if parts.path.startswith("/") else path.parent
    to = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
    to = to / "index.html" if to.is_dir() else to
    if not to.is_file():
        return f"no file for {link!r}"
    if parts.fragment and to in pages and unquote(parts.fragment) not in pages[to].names:
        return f"no anchor for {link!r}"
    return ""


if __name__ == "__main__":
    problems = faults(Path(sys.argv[1]))
    print("\n".join(problems) if problems else "the site fetches nothing from elsewhere; its links lead somewhere")
    sys.exit(bool(problems))
