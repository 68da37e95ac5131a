"""The code on the nodes of a Ray cluster: jobs run in a local store, and finished folders are sent back as bytes."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import ray

from leakgauge.harness.core.threads import one_thread
from leakgauge.harness.study.engine import resident
from leakgauge.harness.study.jobs import Job, Outcome, RunContext, perform

_KEPT = 2
"""The number of trainings on a worker's disk; it is also the number cached in memory (`prepare.StoredTraining`)."""


class Unfit(Exception):
    """A node would not give the same bytes as the driver; the message is one line."""


class Home(NamedTuple):
    """The settings that workers take from the driver.

    Attributes:
        root: the folder of the data.
        private: whether all nodes are this machine; else a node's LEAKGAUGE_DATA replaces `root`.
        paths: the folders of modules.
        cwd: the working folder, to which relative names refer.
        versions: of Python and of packages, as a result states them.
    """

    root: Path
    private: bool
    device: str
    paths: tuple[str, ...]
    cwd: str
    versions: dict[str, str]


class Where(NamedTuple):
    """A worker: its host, its process there, and Ray's name of the node."""

    host: str
    process: int
    node: str


class Order(NamedTuple):
    """A job and what it needs.

    Attributes:
        code: the digest of the code that should do the job.
        data: the digest of each data set that the job reads.
        reads: the folders of the store that the job reads, each with a reference to its files.
    """

    job: Job
    code: str
    data: Mapping[str, str]
    reads: Mapping[str, Any]


class Answer(NamedTuple):
    """How a job ended, and the files of its folder by name; empty if the job failed."""

    outcome: Outcome
    files: dict[str, bytes]


def versions() -> dict[str, str]:
    """The versions of Python and of packages, as a result states them."""
    from leakgauge.harness.study.environment import environment

    return {"Python": environment().python, **environment().packages}


class Worker:
    """A process on a node; it does one job at a time."""

    def __init__(self, home: Home) -> None:
        sys.path += [path for path in home.paths if path not in sys.path]
        with suppress(OSError):
            os.chdir(home.cwd)
        self.folder, self.lock = _scratch()
        own = "" if home.private else os.environ.get("LEAKGAUGE_DATA", "")
        self.context = RunContext(self.folder, Path(own or home.root), home.device)
        self.home = home
        self.has: dict[str, Any] = {}  # the folders of the store on this worker
        self.checked: set[tuple[str, str]] = set()

    def ready(self) -> Where:
        """The worker's context, after the imports for jobs.

        Raises:
            Unfit: Python or a package has another version than the driver's.
        """
        from leakgauge.harness.study import attack, training  # noqa: F401

        own, asked = versions(), self.home.versions
        others = [f"{name} {own.get(name)} instead of {asked[name]}" for name in asked if own.get(name) != asked[name]]
        if others:
            raise self._unfit(f"has {', '.join(others)}")
        return Where(platform.node(), os.getpid(), ray.get_runtime_context().get_node_id())

    def perform(self, order: Order) -> Answer:
        """Do a job, on one thread.

        Raises:
            Unfit: code or data of this node differ from the driver's.
        """
        self._check(order)
        for name, reference in order.reads.items():
            self._fetch(name, reference)
        with one_thread():
            outcome = perform(order.job, self.context)
        written = self.folder / order.job.writes
        files = {} if outcome.error else {path.name: path.read_bytes() for path in written.iterdir()}
        trainings = [name for name in self.has if name.startswith("trainings/")]
        for name in {order.job.writes, *self.has} - {*trainings[-_KEPT:]}:
            self._drop(name)
        return Answer(outcome, files)

    def leave(self) -> None:
        """Remove the folder of this worker."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _check(self, order: Order) -> None:
        """Raise `Unfit` if code or data of this node differ from the driver's."""
        from leakgauge.harness.study.environment import code_of
        from leakgauge.harness.study.prepare import load_data

        job = order.job
        try:
            own = code_of(job.training, *((job.cells[0].attack, job.cells[0].threat) if job.reads else ()))
            if own != order.code:
                raise self._unfit(f"has code {own} instead of {order.code}")
            for name, digest in order.data.items():
                if (name, digest) not in self.checked and load_data(name, self.context.root).digest != digest:
                    raise self._unfit(f"has another data set {name!r} in {self.context.root}")
                self.checked.add((name, digest))
        except (LookupError, ValueError, OSError) as error:
            raise self._unfit(f"cannot load what the job needs: {error}") from error

    def _unfit(self, problem: str) -> Unfit:
        """The error with the name of the node."""
        return Unfit(f"the node {platform.node()} {problem}")

    def _fetch(self, name: str, reference: Any) -> None:
        """Fetch a folder of the store, unless it is already on this worker."""
        if self.has.get(name) != reference:
            self._drop(name)
            (self.folder / name).mkdir(parents=True)
            for file, content in ray.get(reference).items():
                (self.folder / name / file).write_bytes(content)
        self.has[name] = self.has.pop(name, reference)  # the folder used last is the last entry

    def _drop(self, name: str) -> None:
        self.has.pop(name, None)
        shutil.rmtree(self.folder / name, ignore_errors=True)


class Gauge:
    """A process on a node that measures the memory of other processes."""

    def megabytes(self, process: int) -> float | None:
        """Resident memory of a process; None if it has ended."""
        return resident(process)


def _scratch() -> tuple[Path, TextIO]:
    """A new folder for this process, and its lock. Removes the folders of killed processes."""
    top, prefix = Path(tempfile.gettempdir()), f"leakgauge-ray-{os.getuid()}-"
    with (top / f"{prefix}lock").open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        for left in top.glob(f"{prefix}*/lock"):
            with suppress(OSError), left.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left.parent, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock
