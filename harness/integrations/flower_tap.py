"""Flower: a tap that records the models and messages of chosen rounds, without any effect on the training.

Needs numpy and flwr alone, so that it can run in a server without torch. Only a strategy with `defend` needs more.
"""

from __future__ import annotations

import atexit
import inspect
import io
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord

from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.layout import Layout
from leakgauge.harness.core.sinks import line
from leakgauge.harness.federation.recorder import Facts, Indices, Recorded, Recorder
from leakgauge.harness.integrations import flower_records as flower

if TYPE_CHECKING:
    from leakgauge.harness.core.contract import Examples
    from leakgauge.harness.integrations.flower import Server

_ENTRY = 512  # upper estimate of the bytes of a line in a recording's list, and of a file's header
_ROW = 12  # bytes of a row's number in the list

_WRAPPERS = ("_orig_mod.", "module.")  # prefixes that torch.compile and DataParallel add to names

_METHODS = ("configure_train", "aggregate_train", "start"), ("configure_fit", "aggregate_fit")
"""The methods of a strategy that a tap stands in front of, of `flwr.serverapp` and of the older API."""

MOST_BYTES = 10**9


def tap(
    strategy: Any,
    folder: str | Path,
    facts: Facts,
    *,
    rounds: Collection[int] | None = None,
    most_bytes: int = MOST_BYTES,
    rows: Mapping[int, Indices] | None = None,
    data: Examples | None = None,
    auxiliary: Examples | None = None,
    classes: Sequence[str] = (),
) -> Any:
    """The strategy itself, which from now on records the model of a round and every client's reply.

    An error in the tap is written to the log and never stops the training. A round that exceeds `most_bytes` is left
    out as a whole, and so are all later rounds. A reply without an update of finite numbers or without examples is left
    out, and logged. If clients send some of the model's arrays, as adapters or without a personal head, the recording
    holds these, and the log names the others. Arrays of 16 bits are recorded as float32.
    The recording of a defense holds the secret of the shared keys, because `inspect` attacks as the server.

    Args:
        strategy: of `flwr.serverapp.strategy`, with `configure_train`, `aggregate_train` and `start`; or of the older
            `flwr.server.strategy`, with `configure_fit` and `aggregate_fit`. After `defend`, the defense's messages are
            recorded as they crossed the wire.
        folder: of the recording; missing or empty. `leakgauge inspect` attacks it.
        facts: how the clients train, which the strategy does not know. Its learning rate holds in rounds whose
            configuration has no `lr`. If its number of rounds is 0, the number given to `start` is used; with the older
            API, such a recording is complete when the process ends.
        rounds: counted from 0, which is Flower's round 1; None: all.
        most_bytes: the maximum size of the folder.
        rows: for each client, by `partition-id`, the rows of its records in the data, for clients that train on all
            of them in a round. Needs the mod `numbered` or `defended`; else a server cannot tell the clients apart.
        data, auxiliary, classes: the records themselves, other records of the same kind, and the names of the classes,
            to include in the recording.

    Raises:
        ValueError: the folder is not empty, facts contradict each other, or the strategy has a tap or none of these
            methods.
    """
    place = Path(folder)
    if isinstance(getattr(strategy, flower.HOOKED, None), _Tap):
        raise ValueError("expected a strategy without a tap, got one with it")
    if place.is_dir() and any(place.iterdir()):
        raise ValueError(f"expected an empty folder for a recording, got {folder}: name another one")
    methods = next((names for names in _METHODS if hasattr(strategy, names[0])), None)
    if methods is None:
        raise ValueError(f"expected a strategy of Flower, got {type(strategy).__name__} without configure_train")
    flower.federation(facts, 1)
    held = None if data is None else (data, auxiliary, tuple(classes))
    hooks = _Tap(strategy, methods, _Folder(place, facts, most_bytes, rows or {}, held), rounds)
    for name in methods:
        setattr(strategy, name, getattr(hooks, name))
    setattr(strategy, flower.HOOKED, hooks)
    if "start" not in methods:  # the older API has no method at the end of a training
        atexit.register(hooks.folder.close)
    return strategy


def numbered(message: Any, context: Any, call_next: flower.CallNext) -> Any:
    """A mod of a ClientApp that adds the node's `partition-id` to replies, so that a tap knows the client."""
    reply = call_next(message, context)
    if flower.trains(message) and reply.has_content() and "partition-id" in context.node_config:
        number = int(context.node_config["partition-id"])
        reply.content[flower.OURS] = ConfigRecord({"client": number})
        if "fitres.metrics" in reply.content.config_records:  # of the older API, whose strategies see these alone
            reply.content.config_records["fitres.metrics"][flower.OURS] = number
    return reply


def recorded(
    folder: str | Path, facts: Facts, *, rounds: Collection[int] | None = None, most_bytes: int = MOST_BYTES
) -> flower.Mod:
    """A mod of a ClientApp that records what this client gets and sends: one folder for each round and client.

    Use it if the server cannot be changed. A client's process may end with each message, so each message has its own
    recording, `client-NNNNN/round-NNNNN`. The mod records the update in the clear: list it after `defended` in `mods`.

    Args:
        facts, rounds: as for `tap`.
        most_bytes: the maximum size of all recordings of this client.
    """
    flower.federation(facts, 1)
    return _ClientTap(Path(folder), facts, rounds, most_bytes)


@contextmanager
def _noted(what: str, after: Callable[[], None] | None = None) -> Iterator[None]:
    """Whatever goes wrong inside is a line of the log, and the training goes on."""
    try:
        yield
    except Exception as error:
        flower.LOG.warning("leakgauge: %s not recorded: %s", what, line(str(error) or type(error).__name__))
        if after is not None:
            after()


def _bare(record: Any) -> dict[str, Any]:
    """A record's arrays by name, without the prefixes of wrappers; those of the older API do not state their type."""
    for prefix in _WRAPPERS:
        record = {name.removeprefix(prefix): array for name, array in record.items()}
    return {name: array if str(array.dtype) else flower.numbers_of(array) for name, array in record.items()}


def _placed(sent: Mapping[str, Any], base: Mapping[str, Any]) -> Mapping[str, Any]:
    """A reply's arrays under the model's names; arrays that are only numbered fit by their shapes.

    Raises:
        MessageError: fewer numbered arrays than the model's, which fit in several ways or in none.
    """
    if list(sent) != [str(at) for at in range(len(sent))] or len(sent) > len(base):
        return sent
    first, last = (_fit(list(sent.values())[::way], list(base.items())[::way]) for way in (1, -1))
    if first is None or last is None or first != last[::-1]:
        text = f"expected {len(base)} arrays, or fewer that fit in one way, got {len(sent)} arrays without names"
        raise MessageError(f"{text}: with flwr.serverapp, arrays have names")
    return dict(zip(first, sent.values(), strict=True))


def _fit(arrays: Sequence[Any], places: Sequence[tuple[str, Any]]) -> list[str] | None:
    """The first names in order whose shapes are those of the arrays."""
    left = iter(places)
    names = [next((name for name, held in left if held.shape == array.shape), "") for array in arrays]
    return names if all(names) else None


@dataclass
class _Folder:
    """A recording in progress."""

    place: Path
    facts: Facts
    most_bytes: int
    rows: Mapping[int, Indices]
    data: tuple[Examples, Examples | None, tuple[str, ...]] | None
    recorder: Recorder | None = None
    full: bool = False

    def write(self, start: _Start, layout: Layout, server: Server | None, sent: Sequence[Recorded]) -> None:
        """Write one round, if all of it fits."""
        if self.recorder is None:
            spec, seed = (PartSpec("none"), None) if server is None else (server.spec, server.shared)
            if server is not None:
                self.facts = self.facts._replace(rounds=server.rounds)
            self.recorder = Recorder(self.place, self.facts, layout, spec, most_bytes=self.most_bytes, seed=seed)
            if self.data is not None:
                self.recorder.data(*self.data)
        size = _ENTRY + 4 * layout.dim
        rows = sum(len(message.rows) for message in sent if message.rows is not None)
        size += sum(_ENTRY + len(message.wire) for message in sent) + _ROW * rows
        if self.recorder.written + size + _ENTRY > self.most_bytes:
            self.full = True
            flower.LOG.warning("leakgauge: %s is full, rounds from %d on are not recorded", self.place, start.number)
            return
        loss = None if server is None else server.losses.get(start.number)
        self.recorder.model(start.number, flower.vector_of(start.base, layout), start.lr, loss)
        for message in sent:
            self.recorder.message(message)

    def message(self, start: _Start, layout: Layout, sent: _Sent, full_batch: bool = False) -> Recorded:
        """A message with what is known about the records behind it."""
        client, samples = sent.client, sent.samples
        if not 0 <= client < self.facts.clients:
            raise MessageError(f"expected one of {self.facts.clients} clients as in facts, got client {client}")
        size = samples if full_batch or not self.facts.batch else min(self.facts.batch, samples)
        steps = 1 if full_batch else self.facts.steps or -(-samples // size) * (self.facts.epochs or 1)
        images = min(samples, steps * size)
        rows = self.rows.get(client) if sent.known else None
        exact = rows is not None and len(rows) == images == samples
        wire = _plain(start, layout, sent) if sent.wire is None else sent.wire
        return Recorded(start.number, client, samples, wire, images, steps, rows if exact else None)

    def close(self) -> None:
        """The recording is complete."""
        with _noted("the end is"):
            if self.recorder is not None:
                self.recorder.close()


@dataclass
class _Start:
    """The common start of all clients of a round: the model's arrays by name."""

    number: int
    base: Mapping[str, Any]
    lr: float


class _Sent(NamedTuple):
    """What a client sends, as arrays or as the bytes of a defense; `known` if its number is its own and not ours."""

    client: int
    samples: int
    known: bool
    arrays: Mapping[str, Any]
    wire: bytes | None = None


def _plain(start: _Start, layout: Layout, sent: _Sent) -> bytes:
    """The bytes of an update that is sent without a defense: float32."""
    update = flower.vector_of(sent.arrays, layout) - flower.vector_of(start.base, layout)
    if not np.isfinite(update).all():
        raise MessageError("expected a finite update, got nan or infinity")
    return update.astype("<f4").tobytes()


def _rate(tables: Iterable[Mapping[str, Any]], otherwise: float) -> float:
    rates = (table.get("lr") for table in tables)
    return next((float(lr) for lr in rates if isinstance(lr, int | float) and lr > 0), otherwise)


@dataclass
class _Tap:
    """The hooks of `tap`, in front of the methods of a strategy."""

    strategy: Any
    methods: Sequence[str]
    folder: _Folder
    rounds: Collection[int] | None
    layout: Layout | None = None
    start_of: _Start | None = None
    nodes: dict[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._configure, self._aggregate = (getattr(self.strategy, name) for name in self.methods[:2])
        self._start = getattr(self.strategy, "start", None)
        self.weight = str(getattr(self.strategy, "weighted_by_key", "num-examples"))
        self.server: Server | None = getattr(self.strategy, flower.HOOKED, None)

    def start(self, *args: Any, **named: Any) -> Any:
        """`Strategy.start`; its number of rounds is public, and the recording is complete at its end."""
        assert self._start is not None  # a method of this API
        with _noted("the number of rounds is"):
            if self.server is None and not self.folder.facts.rounds:
                bound = inspect.signature(self._start).bind(*args, **named)
                bound.apply_defaults()
                self.folder.facts = self.folder.facts._replace(rounds=int(bound.arguments.get("num_rounds", 0)))
        try:
            return self._start(*args, **named)
        finally:
            self.folder.close()

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        """The strategy's messages; the tap keeps the model in them."""
        messages = list(self._configure(server_round, arrays, config, grid))
        if self._records(server_round - 1, messages):
            with _noted(f"round {server_round - 1} is"):
                content = messages[0].content
                base = flower.only(content.array_records, "ArrayRecord")[1]
                self._begin(server_round - 1, base, content.config_records.values(), grid.get_node_ids())
        return messages

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[Any]:
        """The same of the older API."""
        orders = list(self._configure(server_round, parameters, client_manager))
        if self._records(server_round - 1, orders):
            with _noted(f"round {server_round - 1} is"):
                asked = orders[0][1]
                self._begin(server_round - 1, _numbered(asked.parameters), [asked.config], client_manager.all())
        return orders

    def _records(self, number: int, messages: Sequence[Any]) -> bool:
        self.start_of = None
        return bool(messages) and not self.folder.full and (self.rounds is None or number in self.rounds)

    def _begin(self, number: int, base: Mapping[str, Any], tables: Iterable[Any], nodes: Iterable[Any]) -> None:
        for node in sorted(nodes):
            self.nodes.setdefault(node, len(self.nodes))
        base = _bare(base) if self.server is None else base
        flower.layout_of(base)
        held = {name: flower.numbers_of(array) for name, array in base.items()}
        self.start_of = _Start(number, held, _rate(tables, self.folder.facts.lr))

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> Any:
        """Record the replies, and give them to the strategy unchanged."""
        arrived = list(replies)
        self._record([(reply.metadata.src_node_id, reply) for reply in arrived], self._sent)
        return self._aggregate(server_round, arrived)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """The same of the older API; SecAgg+ gives the strategy the sum in place of each result."""
        with _noted("failures are"):
            for failure in failures:
                text = failure if isinstance(failure, BaseException) else failure[1].status.message
                flower.LOG.warning("leakgauge: round %d, a client failed: %s", server_round - 1, line(str(text)))
        with _noted(f"round {server_round - 1} is"):
            pairs = [(proxy.cid, result) for proxy, result in results]
            if len(pairs) > 1 and len({id(result.parameters) for _, result in pairs}) == 1:
                flower.LOG.warning("leakgauge: round %d: only the sum of the messages arrives", server_round - 1)
                pairs = []
                if self.start_of is not None:
                    self.layout = self.layout or flower.layout_of(self.start_of.base)
            self._record(pairs, self._sent_older)
            if server_round == self.folder.facts.rounds:
                self.folder.close()
        return self._aggregate(server_round, results, failures)

    def _record(self, replies: Sequence[tuple[Any, Any]], read: Callable[[Any, Any], _Sent]) -> None:
        start = self.start_of
        if start is None:
            return
        sent = []
        for node, reply in replies:
            with _noted(f"round {start.number}, node {node} is"):
                one = read(node, reply)
                sent.append(one._replace(arrays=_placed(one.arrays, start.base)))
        with _noted(f"rounds from {start.number} on are", self._stop):
            layout = self.layout = self.layout or self._lay(start, [one.arrays for one in sent])
            if layout is not None:
                self.folder.write(start, layout, self.server, self._messages(start, layout, sent))

    def _stop(self) -> None:
        self.folder.full = True

    def _lay(self, start: _Start, records: Sequence[Mapping[str, Any]]) -> Layout | None:
        """The layout of what most clients send of the model; what is left out is said. None: nobody sends any of it."""
        if self.server is not None:
            return self.server.layout
        names = flower.floats(start.base)
        held = Counter(tuple(name for name in names if name in record) for record in records)
        kept = next((names for names, _ in held.most_common() if names), None)
        if kept is None:
            flower.LOG.warning("leakgauge: round %d is not recorded: no client sent arrays of the model", start.number)
            return None
        others = dict.fromkeys(name for record in [start.base, *records] for name in flower.floats(record))
        if left := [name for name in others if name not in kept]:
            flower.LOG.warning("leakgauge: %d arrays are not recorded: %s", len(left), line(", ".join(left)))
        return flower.layout_of(start.base, kept)

    def _messages(self, start: _Start, layout: Layout, sent: Sequence[_Sent]) -> list[Recorded]:
        messages = dict[int, Recorded]()
        for one in sent:
            with _noted(f"round {start.number}, client {one.client} is"):
                if one.client in messages:
                    raise MessageError(f"client {one.client} has sent a message already")
                full_batch = self.server is not None and self.server.defense.local.full_batch
                messages[one.client] = self.folder.message(start, layout, one, full_batch)
        return [messages[number] for number in sorted(messages)]

    def _sent(self, node: int, reply: Any) -> _Sent:
        if reply.has_error():
            raise MessageError(flower.error_of(reply))
        if self.server is not None:
            sealed = self.server.sealed(reply)
            return _Sent(*sealed.sender, True, {}, self.server.here.opened(sealed))
        stated = reply.content.config_records.get(flower.OURS, {}).get("client")
        tables = reply.content.metric_records.values()
        samples = next((table[self.weight] for table in tables if self.weight in table), None)
        return self._client(node, stated, samples, flower.only(reply.content.array_records, "ArrayRecord")[1])

    def _sent_older(self, node: str, reply: Any) -> _Sent:
        return self._client(node, reply.metrics.get(flower.OURS), reply.num_examples, _numbered(reply.parameters))

    def _client(self, node: Any, stated: Any, samples: Any, arrays: Any) -> _Sent:
        number = self.nodes.setdefault(node, len(self.nodes)) if stated is None else int(stated)
        if samples is None and stated is not None and number in self.folder.rows:
            samples = len(self.folder.rows[number])
        return _Sent(number, flower.whole(samples, self.weight), stated is not None, _bare(arrays))


def _numbered(parameters: Any) -> dict[str, Any]:
    """The arrays of the older API, which have no names."""
    arrays = [np.load(io.BytesIO(tensor), allow_pickle=False) for tensor in parameters.tensors]
    return {str(at): array for at, array in enumerate(arrays)}


@dataclass(frozen=True)
class _ClientTap:
    """The mod of `recorded`."""

    folder: Path
    facts: Facts
    rounds: Collection[int] | None
    most_bytes: int

    def __call__(self, message: Any, context: Any, call_next: flower.CallNext) -> Any:
        start = None
        if flower.trains(message):
            with _noted("the message is"):
                start = self._read(message, context)
        reply = call_next(message, context)
        if start is not None and reply.has_content() and (self.rounds is None or start.number in self.rounds):
            with _noted(f"round {start.number} is"):
                self._write(start, reply, int(context.node_config.get("partition-id", 0)))
        return reply

    def _read(self, message: Any, context: Any) -> _Start:
        base = _bare(flower.only(message.content.array_records, "ArrayRecord")[1])
        known = context.state.get(f"{flower.OURS}-names")
        # a strategy's mean of counts is a float
        names = flower.floats(base) if known is None else [name for name in known["names"] if name in base]
        context.state[f"{flower.OURS}-names"] = ConfigRecord({"names": list(names)})
        tables = list(message.content.config_records.values())
        stated = next((table["server-round"] for table in tables if "server-round" in table), message.metadata.group_id)
        if not str(stated).isdigit() or not int(stated):
            raise MessageError("expected the number of the round as server-round in the configuration")
        held = {name: flower.numbers_of(base[name]) for name in names}
        return _Start(int(stated) - 1, held, _rate(tables, self.facts.lr))

    def _write(self, start: _Start, reply: Any, number: int) -> None:
        place = self.folder / f"client-{number:05d}"
        used = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        folder = _Folder(place / f"round-{start.number:05d}", self.facts, self.most_bytes - used, {}, None)
        tables = reply.content.metric_records.values()
        counts = [table[name] for table in tables for name in ("num-examples", "num_examples") if name in table]
        arrays = _placed(_bare(flower.only(reply.content.array_records, "ArrayRecord")[1]), start.base)
        sent = _Sent(number, flower.whole(counts[0] if counts else None, "num-examples"), False, arrays)
        layout = flower.layout_of(start.base, [name for name in start.base if name in arrays])
        folder.write(start, layout, None, [folder.message(start, layout, sent)])
        folder.close()
