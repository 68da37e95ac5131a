"""The pages of a folder of runs, from a local server that only reads, or as files."""

from __future__ import annotations

import ipaddress
import os
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from leakgauge.harness.core.files import content
from leakgauge.harness.core.sinks import line
from leakgauge.harness.gate.compare import ORDINALS, compare_all
from leakgauge.harness.study.store import Stored, StoreError, load_run, no_collection
from leakgauge.reports import html, view
from leakgauge.reports.charts.figures import slug
from leakgauge.reports.select import Analysis, Images
from leakgauge.reports.table import Fields

_PARTS = ("cells", "trainings", "parts", "quarantine")
"""Folders of a run, which hold no other runs."""

_MOST = 4
"""The runs that are kept in memory, those last asked for."""

_DOSSIER = "dossier.html"

_POLICY = "sandbox; default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Of a page that lies in the folder: it runs no script. The pages made here hold their own policy."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""No other site may show or read a page."""


class Runs:
    """The runs below a folder. A page is made when it is asked for; a run is read again when it has changed."""

    def __init__(self, folder: Path, images: Images = "public") -> None:
        self.folder, self.images, self._lock = folder.resolve(), images, threading.Lock()
        self._open: dict[str, tuple[dict[str, int], Analysis, dict[Path, tuple[int, Stored]]]] = {}
        self._rows: dict[str, tuple[dict[str, int], Fields]] = {}

    def found(self) -> dict[str, Path]:
        """The folders with a study by their names, which are their paths below the folder. No link is followed."""
        base = self.folder.parent if (self.folder / "study.json").is_file() else self.folder
        found = dict[str, Path]()
        for at, inside, files in os.walk(self.folder):
            inside[:] = sorted(name for name in inside if name not in _PARTS and not name.startswith("."))
            path = Path(at)
            if "study.json" in files and not any((path / name).is_symlink() for name in ("study.json", *_PARTS)):
                found[path.relative_to(base).as_posix()] = path
        return found

    def page(self, links: view.Links, *parts: str) -> str | bytes:
        """A page, by the parts of its address (see `Links.to`); `compare` is followed by the names of runs.

        Raises:
            LookupError: there is no such page.
            StoreError: a run cannot be read.
            ValueError: this many runs cannot be compared.
        """
        with self._lock, no_collection():
            match parts:
                case ():
                    return view.home_page(self.folder.name, self._listed(), links)
                case ("run", name):
                    return view.run_page(self._read(name), links)
                case ("run", name, "report"):
                    run, linked = self._read(name).analysis.run, links.files is not None
                    return html.render(run, images=self.images, linked=linked, home=links.to())
                case ("run", name, "dossier") if found := _content(self.found()[name] / _DOSSIER):
                    return found
                case ("run", name, "cell", identity):
                    shown = self._read(name)
                    return view.cell_page(shown, {cell.id: cell for cell in shown.analysis.run.cells}[identity], links)
                case ("compare", *names):
                    compared = compare_all(*(self._read(name).analysis.run for name in names))
                    return view.comparison_page(names, compared, links)
        raise LookupError(parts)

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Every page as a file, and what it shows, by their paths; runs that cannot be read have no pages."""
        names = [str(row[0]) for row in self._listed() if row[2]]
        safe = {name: f"{at}-{slug(name)[:60]}" for at, name in enumerate(names, 1)}
        yield from ((name, html.source(name).encode()) for name in (html.STYLE, html.SCRIPT))
        for parts in self._addresses(names):
            own = f"run/{safe[parts[1]]}" if parts[:1] == ("run",) else ""  # pictures lie beside the run's pages
            path = view.Links(safe, "").to(*(parts if own else parts[:1]))
            made = self.page(view.Links(safe, "../" * path.count("/")), *parts)
            if isinstance(made, str):
                up = os.path.relpath(own or ".", os.path.dirname(path) or ".")
                made, inside = html.taken_out(made, f"{up}/")
                yield from ((f"{own}/{name}", content) for name, content in inside.items())
            yield path, made if isinstance(made, bytes) else made.encode()

    def _addresses(self, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
        yield ()
        if 2 <= len(names) <= len(ORDINALS):
            yield ("compare", *names)
        for name in names:
            shown = self._read(name)
            yield from (("run", name), *(("run", name, more) for more in shown.more))
            yield from (("run", name, "cell", cell.id) for cell in shown.analysis.run.cells)

    def _listed(self) -> list[Fields]:
        for name, path in (found := self.found()).items():
            stamp = _stamp(path)
            if self._rows.get(name, ({}, ()))[0] != stamp:
                try:
                    self._rows[name] = stamp, view.row(name, self._read(name).analysis)
                except StoreError as error:
                    self._rows[name] = stamp, view.unreadable(name, str(error))
        return [self._rows[name][1] for name in found]

    def _read(self, name: str) -> view.Shown:
        path = self.found()[name]
        stamp = _stamp(path)
        before, analysis, seen = self._open.pop(name, ({}, None, {}))
        if analysis is None or before != stamp:
            analysis = Analysis(load_run(path, seen), images=self.images)
        self._open[name] = stamp, analysis, seen
        for old in list(self._open)[:-_MOST]:
            del self._open[old]
        log = _content(path / "run.log").decode(errors="replace").splitlines()
        return view.Shown(name, analysis, log, ("report", *["dossier"] * bool(_content(path / _DOSSIER))))


def _stamp(folder: Path) -> dict[str, int]:
    """When the study and each result of a run last changed: the last file of a result is renamed into its folder."""
    stamp = {"study.json": (folder / "study.json").stat().st_mtime_ns}
    for part in ("cells", "trainings"):
        with suppress(FileNotFoundError), os.scandir(folder / part) as entries:
            stamp |= {f"{part}/{one.name}": one.stat(follow_symlinks=False).st_mtime_ns for one in entries}
    return stamp


def _content(path: Path) -> bytes:
    """What a file of a run holds; nothing if it is missing, a link or too large."""
    try:
        return content(path, 2**26, links=False)
    except (OSError, ValueError):
        return b""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD; every other method is refused."""

    server: Server
    server_version, sys_version, timeout = "leakgauge", "", 60

    def do_GET(self) -> None:
        if not self.server.knows(self.headers.get_all("Host", [])):
            return self.send_error(403, f"expected the host {self.server.address}, as in the address that was printed")
        asked = urlsplit(self.path)
        parts = [unquote(part) for part in asked.path.split("/")[1:]]
        parts += parse_qs(asked.query).get("run", []) if parts == ["compare"] else []
        try:
            made = self.server.runs.page(view.Links(), *([] if parts == [""] else parts))
        except LookupError:
            return self.send_error(404, "there is no such page: begin at /")
        except (StoreError, ValueError) as error:
            return self.send_error(409, line(str(error)))
        if isinstance(made, bytes):
            return self._send(200, "text/html", _POLICY, made)
        return self._send(200, "text/html", "frame-ancestors 'none'", made.encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """One line."""
        self._send(code, "text/plain", "default-src 'none'", f"{code}: {message or 'refused'}\n".encode())

    def _send(self, code: int, kind: str, policy: str, made: bytes) -> None:
        self.send_response(code)
        about = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(made))}
        for name, value in (about | {"Content-Security-Policy": policy} | _HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(made)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Server(ThreadingHTTPServer):
    """Serves the pages of `runs`. `address`: host and port, which may have been free."""

    def __init__(self, runs: Runs, host: str = "127.0.0.1", port: int = 0) -> None:
        self.runs, self.host = runs, host
        super().__init__((host, port), _Handler)
        self.address = f"{host}:{self.server_port}"

    def server_bind(self) -> None:
        """Bind without asking who has this address."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, self.server_address[1]

    def knows(self, hosts: Sequence[str]) -> bool:
        """Whether a request names this server, and no name that somebody else may lead here (DNS rebinding)."""
        try:
            asked = urlsplit(f"//{hosts[0] if len(hosts) == 1 else ''}")
            if asked.hostname not in (self.host.lower(), "localhost", socket.gethostname().lower()):
                ipaddress.ip_address(asked.hostname or "")
            return (asked.port or 80) == self.server_port
        except ValueError:
            return False
