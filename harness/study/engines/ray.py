"""The engine on Ray: workers on the nodes of a cluster, or in a private Ray of this machine. Needs the extra `ray`.

A worker is an actor with one processor, and with one GPU if clients train there. It caches what the jobs of its slot
have in common, works in its own folder, and sends finished folders back: only this process writes to the store.
Ray itself never retries a job.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

try:
    import ray
except ImportError as error:
    raise ImportError("Ray is not installed: from a checkout, pip install '.[ray]'") from error
from ray.exceptions import RayError, RayTaskError
from ray.job_config import JobConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.search_path import variables
from leakgauge.harness.core.threads import one_thread
from leakgauge.harness.core.threats import View
from leakgauge.harness.study.engine import Died, Ended, Event, Started, resident
from leakgauge.harness.study.engines.workers import cores
from leakgauge.harness.study.environment import code_of, origin
from leakgauge.harness.study.jobs import Job, Outcome, RunContext, perform
from leakgauge.harness.study.orphans import inherited
from leakgauge.harness.study.store import MANIFEST

_LOOK = 2.0  # seconds between two checks of the cluster's size
_SENT = 8  # folders of the store in the cluster's memory, besides the folders that a running job needs
_TRIES = 3  # the most workers in a row that may die before they are ready


def _unusable(problem: object) -> StudyError:
    return StudyError("ray", [" ".join(str(problem).split())])


_KEPT = 2
"""The number of trainings on a worker's disk; it is also the number cached in memory (`prepare.StoredTraining`)."""


class _Unfit(Exception):
    """A node would not give the same bytes as the driver; the message is one line."""


class _Where(NamedTuple):
    """A worker: its host, its process there, and Ray's name of the node."""

    host: str
    process: int
    node: str


def _versions() -> dict[str, str]:
    return {"Python": origin().python, **origin().packages}


class _Worker:
    """A process on a node; it does one job at a time.

    Args:
        root: the folder of the data.
        private: whether all nodes are this machine; else a node's LEAKGAUGE_DATA replaces `root`.
        paths: the folders of modules.
        cwd: the working folder of the driver, to which relative names refer.
        asked: the versions of Python and of packages on the driver.
    """

    def __init__(
        self, root: Path, private: bool, device: str, paths: tuple[str, ...], cwd: str, asked: dict[str, str]
    ) -> None:
        sys.path += [path for path in paths if path not in sys.path]
        with suppress(OSError):
            os.chdir(cwd)
        self.folder, self.lock = _scratch()
        own = "" if private else os.environ.get("LEAKGAUGE_DATA", "")
        self.context, self.asked = RunContext(self.folder, Path(own or root), device), asked
        self.has: dict[str, Any] = {}  # the folders of the store on this worker
        self.checked: set[tuple[str, str]] = set()

    def ready(self) -> _Where:
        """The worker's context, after the imports for jobs; raises `_Unfit` if it has another version of a package."""
        from leakgauge.harness.study import attack, training  # noqa: F401

        own, asked = _versions(), self.asked
        others = [f"{name} {own.get(name)} instead of {asked[name]}" for name in asked if own.get(name) != asked[name]]
        if others:
            raise self._unfit(f"has {', '.join(others)}")
        return _Where(platform.node(), os.getpid(), ray.get_runtime_context().get_node_id())

    def perform(
        self, job: Job, code: str, data: Mapping[str, str], reads: Mapping[str, Any]
    ) -> tuple[Outcome, dict[str, dict[str, bytes]]]:
        """Do a job, on one thread; returns also the files of its folders by name, none if the job failed.

        Args:
            code, data: the digests of the code that should do the job, and of each data set that the job reads.
            reads: the folders of the store that the job reads, each with a reference to its files.

        Raises:
            _Unfit: code or data of this node differ from the driver's.
        """
        self._check(job, code, data)
        for name, reference in reads.items():
            self._fetch(name, reference)
        with one_thread():
            outcome = perform(job, self.context)
        wrote = {name: self.folder / name for name in job.writes if not outcome.error and (self.folder / name).exists()}
        files = {name: {path.name: path.read_bytes() for path in folder.iterdir()} for name, folder in wrote.items()}
        trainings = [name for name in self.has if name.startswith("trainings/")]
        for name in {*job.writes, *self.has} - {*trainings[-_KEPT:]}:
            self._drop(name)
        return outcome, files

    def leave(self) -> None:
        """Remove the folder of this worker."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _check(self, job: Job, code: str, data: Mapping[str, str]) -> None:
        from leakgauge.harness.study.prepare import load_data

        try:
            if (own := _code(job)) != code:
                raise self._unfit(f"has code {own} instead of {code}")
            for name, digest in data.items():
                if (name, digest) not in self.checked and load_data(name, self.context.root).digest != digest:
                    raise self._unfit(f"has another data set {name!r} in {self.context.root}")
                self.checked.add((name, digest))
        except (LookupError, ValueError, OSError) as error:
            raise self._unfit(f"cannot load what the job needs: {error}") from error

    def _unfit(self, problem: str) -> _Unfit:
        return _Unfit(f"the node {platform.node()} {problem}")

    def _fetch(self, name: str, reference: Any) -> None:
        if self.has.get(name) != reference:
            self._drop(name)
            (self.folder / name).mkdir(parents=True)
            for file, content in ray.get(reference).items():
                (self.folder / name / file).write_bytes(content)
        self.has[name] = self.has.pop(name, reference)  # the folder used last is the last entry

    def _drop(self, name: str) -> None:
        self.has.pop(name, None)
        shutil.rmtree(self.folder / name, ignore_errors=True)


def _code(job: Job) -> str:
    """The digests of the code that should do a job."""
    attacks = ((cell.training, cell.attack, cell.threat) for cell in job.cells)
    return " ".join(code_of(*each) for each in attacks) if job.reads else code_of(job.training)


class _Gauge:
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


@dataclass(eq=False)
class _Actor:
    """A worker."""

    handle: Any  # Ray's handle of the actor
    pending: Any  # the current call, which gets the worker ready or does a job; None: the worker is idle
    where: _Where | None = None  # the worker's context; None before it is ready
    slot: int | None = None  # of the job that the worker does
    job: Job | None = None


class RayEngine:
    """Runs jobs on Ray.

    Args:
        address: HOST:PORT of a cluster that has this machine as a node; None: a private Ray of this machine.
        slots: the most workers; default one for each processor, or for each GPU if clients train there.

    Raises:
        StudyError: the cluster does not exist or cannot be used.
    """

    def __init__(self, context: RunContext, address: str | None = None, slots: int | None = None) -> None:
        self.context, self.store, self.private, self.asked = context, context.store, address is None, slots
        self.is_ours = not ray.is_initialized()  # otherwise Ray belongs to the caller
        if self.is_ours and address is not None:
            _knock(address)
        gpus = 1 if context.device.startswith("cuda") else 0
        self.unit = "GPU" if gpus else "CPU"
        self.hire = ray.remote(_Worker).options(num_cpus=1, num_gpus=gpus, max_restarts=0, max_task_retries=0).remote
        self.actors: list[_Actor] = []
        self.last: dict[int, _Actor] = {}  # the worker that did a slot's last job
        self.parked: dict[int, Job] = {}  # jobs without a worker yet
        self.events: list[Event] = []
        self.sent: dict[str, tuple[int, Any]] = {}
        self.digests: dict[str, str] = {}
        self.gauges: dict[str, Any] = {}
        self.deaths, self.size, self.looked = 0, 0, -_LOOK
        # this thread lives as long as the engine: the kernel would end a private Ray with the thread that started it
        self.pool = ThreadPoolExecutor(1)
        self.opening = self.pool.submit(self._open, address)

    @property
    def slots(self) -> int:
        """The number of workers that the cluster has room for; a job without a worker waits for one.

        Raises:
            StudyError: the cluster cannot be used.
        """
        self.opening.result()
        return max(1, self.size)

    def start(self, slot: int, job: Job) -> None:
        """Give the job to the slot's last worker, or to any idle worker."""
        self.parked[slot] = job
        self._dispatch()

    def wait(self, seconds: float) -> list[Event]:
        """The events since the last call.

        Raises:
            StudyError: a node cannot do the jobs as this machine does.
            StoreError: the files of a job cannot be stored.
        """
        self._staff()
        pending = {actor.pending: actor for actor in self.actors if actor.pending is not None}
        if pending:
            for reference in ray.wait(list(pending), timeout=0 if self.events else seconds)[0]:
                self._settle(pending[reference])
        elif not self.events:
            time.sleep(seconds)
        self._dispatch()
        events, self.events = self.events, []
        return events

    def megabytes(self, slot: int) -> float | None:
        """Resident memory of a worker, measured by a process on its node."""
        actor = self.last.get(slot)
        if actor is None or actor.where is None or actor.slot != slot:
            return None
        if actor.where.node not in self.gauges:
            there = NodeAffinitySchedulingStrategy(actor.where.node, soft=False)
            self.gauges[actor.where.node] = ray.remote(_Gauge).options(num_cpus=0, scheduling_strategy=there).remote()
        resident: float | None = None
        with suppress(RayError):
            resident = ray.get(self.gauges[actor.where.node].megabytes.remote(actor.where.process), timeout=5)
        return resident

    def kill(self, slot: int) -> None:
        """End the slot's worker."""
        if self.parked.pop(slot, None) is None:
            self._dismiss(self.last[slot])

    def close(self) -> None:
        """End all workers, and also Ray if it is private."""
        wait([self.opening])
        idle = [actor for actor in self.actors if actor.pending is None]
        with suppress(RayError):
            ray.get([actor.handle.leave.remote() for actor in idle], timeout=5)
        for handle in [actor.handle for actor in self.actors] + list(self.gauges.values()):
            with suppress(RayError):
                ray.kill(handle)
        if self.is_ours:
            ray.shutdown()
        self.pool.shutdown()

    def _open(self, address: str | None) -> None:
        if self.is_ours:
            _connect(address, self.asked)
        root, device = self.context.root.absolute(), self.context.device
        self.home = root, self.private, device, tuple(sys.path), os.getcwd(), _versions()
        self._staff()
        if not self.size:
            raise _unusable(f"the cluster at {address} has no {self.unit}: give --workers if nodes will join it")

    def _staff(self) -> None:
        if time.monotonic() - self.looked >= _LOOK:
            self.looked = time.monotonic()
            self.size = int(ray.cluster_resources().get(self.unit, 0)) if self.asked is None else self.asked
        while len(self.actors) < self.size:
            handle = self.hire(*self.home)
            self.actors.append(_Actor(handle, handle.ready.remote()))

    def _dispatch(self) -> None:
        for slot, job in list(self.parked.items()):
            idle = [actor for actor in self.actors if actor.pending is None]
            if not idle:
                return
            taken = {id(actor) for other, actor in self.last.items() if other != slot}
            actor = min(idle, key=lambda free: (free is not self.last.get(slot), id(free) in taken))
            self.last = {other: last for other, last in self.last.items() if last is not actor} | {slot: actor}
            del self.parked[slot]
            actor.slot, actor.job, actor.pending = slot, job, actor.handle.perform.remote(*self._order(job))
            self.events.append(Started(slot))

    def _order(self, job: Job) -> tuple[Job, str, dict[str, str], dict[str, Any]]:
        """The arguments of `_Worker.perform`."""
        other = View.parse(job.cells[0].threat).other if job.reads else ""
        data = {} if self.private else {name: self._digest(name) for name in (job.training.task.data, other) if name}
        return job, _code(job), data, {name: self._sent(name) for name in job.reads}

    def _digest(self, name: str) -> str:
        from leakgauge.harness.study.prepare import load_data

        if name not in self.digests:
            self.digests[name] = load_data(name, self.context.root).digest
        return self.digests[name]

    def _sent(self, name: str) -> Any:
        """A reference to the files of a folder of the store; they are put into the cluster's memory once."""
        folder = self.store.folder / name
        written = (folder / MANIFEST).stat().st_mtime_ns
        known, reference = self.sent.pop(name, (0, None))
        if known != written:
            reference = ray.put({path.name: path.read_bytes() for path in folder.iterdir()})
        self.sent[name] = written, reference
        if len(self.sent) > _SENT:
            del self.sent[next(iter(self.sent))]
        return reference

    def _settle(self, actor: _Actor) -> None:
        try:
            answer: _Where | tuple[Outcome, dict[str, dict[str, bytes]]] = ray.get(actor.pending)
        except RayError as error:
            self._lost(actor, error)
            return
        actor.pending, slot, job = None, actor.slot, actor.job
        if isinstance(answer, _Where):
            actor.where, self.deaths = answer, 0
            return
        assert slot is not None
        assert job is not None
        actor.slot = actor.job = None
        outcome, folders = answer
        for name, files in folders.items():
            self.store.receive(self.store.folder / name, files)
        self.events.append(Ended(slot, outcome))

    def _lost(self, actor: _Actor, error: RayError) -> None:
        """Record that a worker died; raises StudyError if its node cannot do the jobs."""
        slot, host = actor.slot, actor.where.host if actor.where else "a node"
        cause = error.cause if isinstance(error, RayTaskError) else None
        if isinstance(cause, _Unfit):
            raise _unusable(f"{cause}: every node needs the same leakgauge and Python, packages and data") from error
        self._dismiss(actor)
        if slot is None:
            self.deaths += 1
            if self.deaths == _TRIES:
                raise _unusable(f"no worker gets ready: {str(error).splitlines()[-1]}") from error
            return
        how = "its node died" if "node has died" in str(error) else "out of memory, or killed"
        self.events.append(Died(slot, f"the worker process on {host} died ({how})"))

    def _dismiss(self, actor: _Actor) -> None:
        with suppress(RayError):
            ray.kill(actor.handle)
        self.actors.remove(actor)
        self.last = {slot: last for slot, last in self.last.items() if last is not actor}


def _connect(address: str | None, slots: int | None) -> None:
    """Join the cluster at an address, or start a private one; raises StudyError if it cannot be used."""
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}.items():
        os.environ.setdefault(name, value)
    words: dict[str, Any] = {"address": address or "local", "log_to_driver": False, "logging_level": "ERROR"}
    words["job_config"] = JobConfig(_client_job=True)  # its only effect: workers do not search the working folder first
    if address is None:
        words |= {"num_cpus": slots or cores(), "include_dashboard": False}
    try:
        with inherited(variables()):
            ray.init(**words)
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        raise _unusable(f"the cluster at {address} cannot be used: {error}" if address else error) from error


def _knock(address: str) -> None:
    """Raise StudyError if nothing listens at HOST:PORT, because Ray would wait for it."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()) or "/" in host:
        raise _unusable(f"expected --address HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        start = "start one there with 'ray start --head --port=6379'"
        raise _unusable(f"no cluster at {address} ({error.strerror or error}): {start}") from error
