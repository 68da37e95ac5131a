"""Flower: a tap that records the models and messages of chosen rounds, without any effect on the training."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord

from leakgauge.harness.core.contract import Defense, Examples, LocalRule, Sender
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.sinks import line
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.federation.loop import make_plan, setting_of
from leakgauge.harness.federation.recording import Facts, Recorded, Recorder
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.integrations import flower
from leakgauge.harness.learn.batch import Indices

_ENTRY = 512  # upper estimate of the bytes of a line in a recording's list, and of a file's header
_ROW = 12  # bytes of a row's number in the list

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
    out as a whole, and so are all later rounds. A reply without an update of finite numbers is left out, and logged.
    The recording of a defense holds the secret of the shared keys, because `inspect` attacks as the server.

    Args:
        strategy: any with `configure_train`, `aggregate_train` and `start`; after `defend`, the defense's messages are
            recorded as they crossed the wire.
        folder: of the recording; missing or empty. `leakgauge inspect` attacks it.
        facts: how the clients train, which the strategy does not know. Its learning rate holds in rounds whose
            configuration has no `lr`. If its number of rounds is 0, the number given to `start` is used.
        rounds: counted from 0, which is Flower's round 1; None: all.
        most_bytes: the maximum size of the folder.
        rows: for each client, by `partition-id`, the rows of its records in the data, for clients that train on all
            of them in a round. Needs the mod `numbered` or `defended`; else a server cannot tell the clients apart.
        data, auxiliary, classes: the records themselves, other records of the same kind, and the names of the classes,
            to include in the recording.

    Raises:
        ValueError: the folder is not empty, facts contradict each other, or the strategy has a tap or the older API.
    """
    place = Path(folder)
    if isinstance(getattr(strategy, flower.HOOKED, None), _Tap):
        raise ValueError("expected a strategy without a tap, got one with it")
    if place.is_dir() and any(place.iterdir()):
        raise ValueError(f"expected an empty folder for a recording, got {folder}: name another one")
    flower.new_api(strategy)
    flower.federation(facts, 1)
    held = None if data is None else (data, auxiliary, tuple(classes))
    hooks = _Tap(strategy, _Folder(place, facts, most_bytes, rows or {}, held), rounds)
    for name in ("configure_train", "aggregate_train", "start"):
        setattr(strategy, name, getattr(hooks, name))
    setattr(strategy, flower.HOOKED, hooks)
    return strategy


def numbered(message: Any, context: Any, call_next: flower.CallNext) -> Any:
    """A mod of a ClientApp that adds the node's `partition-id` to replies, so that a tap knows the client."""
    reply = call_next(message, context)
    if flower.trains(message) and reply.has_content() and "partition-id" in context.node_config:
        reply.content[flower.OURS] = ConfigRecord({"client": int(context.node_config["partition-id"])})
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

    def write(self, start: _Start, server: flower.Server | None, sent: Sequence[Recorded]) -> None:
        """Write one round, if all of it fits."""
        if self.recorder is None:
            spec, seed = (flower.part("none", None)[0], None) if server is None else (server.spec, server.shared)
            if server is not None:
                self.facts = self.facts._replace(rounds=server.rounds)
            self.recorder = Recorder(self.place, self.facts, start.layout, spec, most_bytes=self.most_bytes, seed=seed)
            if self.data is not None:
                self.recorder.data(*self.data)
        size = _ENTRY + 4 * start.layout.dim
        rows = sum(len(message.rows) for message in sent if message.rows is not None)
        size += sum(_ENTRY + len(message.wire) for message in sent) + _ROW * rows
        if self.recorder.written + size + _ENTRY > self.most_bytes:
            self.full = True
            flower.LOG.warning("leakgauge: %s is full, rounds from %d on are not recorded", self.place, start.number)
            return
        loss = None if server is None else server.losses.get(start.number)
        self.recorder.model(start.number, start.params, start.lr, loss)
        for message in sent:
            self.recorder.message(message)

    def message(self, number: int, sender: Sender, wire: bytes, rule: LocalRule, known: bool) -> Recorded:
        """A message with what is known about the records behind it."""
        client, samples = sender
        plan = make_plan(flower.federation(self.facts, 1), self.facts.lr, rule)
        steps = plan.steps or -(-samples // plan.size(samples)) * (plan.epochs or 1)
        images = min(samples, steps * plan.size(samples))
        rows = self.rows.get(client) if known else None
        exact = rows is not None and len(rows) == images == samples
        return Recorded(number, client, samples, wire, images, steps, rows if exact else None)


@dataclass
class _Start:
    """The common start of all clients of a round."""

    number: int
    layout: Layout
    params: Vector
    lr: float


@dataclass
class _Tap:
    """The hooks of `tap`, in front of the methods of a strategy."""

    strategy: Any
    folder: _Folder
    rounds: Collection[int] | None
    layout: Layout | None = None
    start_of: _Start | None = None
    nodes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._configure, self._aggregate = self.strategy.configure_train, self.strategy.aggregate_train
        self._start = self.strategy.start
        self.weight = str(getattr(self.strategy, "weighted_by_key", "num-examples"))
        self.server: flower.Server | None = getattr(self.strategy, flower.HOOKED, None)

    def start(self, *args: Any, **named: Any) -> Any:
        """`Strategy.start`; its number of rounds is public, and the recording is complete at its end."""
        if self.server is None and not self.folder.facts.rounds:
            bound = inspect.signature(self._start).bind(*args, **named)
            bound.apply_defaults()
            self.folder.facts = self.folder.facts._replace(rounds=int(bound.arguments.get("num_rounds", 0)))
        try:
            return self._start(*args, **named)
        finally:
            if self.folder.recorder is not None:
                self.folder.recorder.close()

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        """The strategy's messages; the tap keeps the model in them."""
        messages = list(self._configure(server_round, arrays, config, grid))
        number, self.start_of = server_round - 1, None
        if messages and not self.folder.full and (self.rounds is None or number in self.rounds):
            try:
                self.start_of = self._read(number, messages, sorted(grid.get_node_ids()))
            except (ValueError, TypeError, OSError) as error:
                flower.LOG.warning("leakgauge: round %d is not recorded: %s", number, line(str(error)))
        return messages

    def _read(self, number: int, messages: Sequence[Any], nodes: Sequence[int]) -> _Start:
        base = flower.only(messages[0].content.array_records, "ArrayRecord")[1]
        self.layout = self.layout or flower.layout_of(base)
        for node in nodes:
            self.nodes.setdefault(node, len(self.nodes))
        return _Start(
            number, self.layout, flower.vector_of(base, self.layout), _rate(messages[0], self.folder.facts.lr)
        )

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> Any:
        """Record the replies, and give them to the strategy unchanged."""
        arrived, start = list(replies), self.start_of
        if start is not None:
            try:
                self.folder.write(start, self.server, self._messages(start, arrived))
            except (ValueError, TypeError, OSError) as error:
                self.folder.full = True
                flower.LOG.warning("leakgauge: rounds from %d on are not recorded: %s", start.number, line(str(error)))
        return self._aggregate(server_round, arrived)

    def _messages(self, start: _Start, arrived: Sequence[Any]) -> list[Recorded]:
        messages = dict[int, Recorded]()
        for reply in arrived:
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise MessageError(flower.error_of(reply))
                message = self._message(start, reply, node)
                if message.client in messages:
                    raise MessageError(f"client {message.client} has sent a message already")
                messages[message.client] = message
            except (ValueError, TypeError) as error:
                flower.LOG.warning(
                    "leakgauge: round %d, node %d is not recorded: %s", start.number, node, line(str(error))
                )
        return [messages[number] for number in sorted(messages)]

    def _message(self, start: _Start, reply: Any, node: int) -> Recorded:
        if self.server is not None:
            sealed, rule = self.server.sealed(reply), self.server.defense.local
            return self.folder.message(start.number, sealed.sender, self.server.here.opened(sealed), rule, known=True)
        stated = reply.content.config_records.get(flower.OURS, {}).get("client")
        number = self.nodes.setdefault(node, len(self.nodes)) if stated is None else int(stated)
        sender = Sender(number, flower.samples_of(reply, self.weight))
        wire = _plain(start, self.folder.facts, reply, sender)
        return self.folder.message(start.number, sender, wire, LocalRule(), known=stated is not None)


def _plain(start: _Start, facts: Facts, reply: Any, sender: Sender) -> bytes:
    """The bytes of an update that is sent without a defense."""
    defense: Defense[Any, Any] = flower.part("none", None)[1]
    update = flower.vector_of(flower.only(reply.content.array_records, "ArrayRecord")[1], start.layout) - start.params
    setting = setting_of(start.layout, flower.federation(facts, 1), [sender.samples], LocalRule())
    round_ = Round(defense, setting, defense.init(setting), start.number)
    nothing = Key(0)  # without a defense, nothing is random
    return round_.opened(round_.send(Client(sender, update, None, nothing, nothing))[0])


def _rate(message: Any, otherwise: float) -> float:
    for record in message.content.config_records.values():
        if isinstance(record.get("lr"), int | float) and record["lr"] > 0:
            return float(record["lr"])
    return otherwise


@dataclass(frozen=True)
class _ClientTap:
    """The mod of `recorded`."""

    folder: Path
    facts: Facts
    rounds: Collection[int] | None
    most_bytes: int

    def __call__(self, message: Any, context: Any, call_next: flower.CallNext) -> Any:
        if not flower.trains(message):
            return call_next(message, context)
        try:
            start = self._read(message, context)
        except (ValueError, TypeError) as error:
            flower.LOG.warning("leakgauge: nothing is recorded: %s", line(str(error)))
            return call_next(message, context)
        reply = call_next(message, context)
        if reply.has_content() and (self.rounds is None or start.number in self.rounds):
            try:
                self._write(start, reply, int(context.node_config.get("partition-id", 0)))
            except (ValueError, TypeError, OSError) as error:
                flower.LOG.warning("leakgauge: round %d is not recorded: %s", start.number, line(str(error)))
        return reply

    def _read(self, message: Any, context: Any) -> _Start:
        base = flower.only(message.content.array_records, "ArrayRecord")[1]
        known = context.state.get(f"{flower.OURS}-names")
        layout = flower.layout_of(base, None if known is None else known["names"])
        # a strategy's mean of counts is a float
        context.state[f"{flower.OURS}-names"] = ConfigRecord({"names": list(layout.names)})
        rounds = [
            record["server-round"] for record in message.content.config_records.values() if "server-round" in record
        ]
        if not rounds:
            raise MessageError("expected the number of the round as server-round in the configuration")
        return _Start(int(rounds[0]) - 1, layout, flower.vector_of(base, layout), _rate(message, self.facts.lr))

    def _write(self, start: _Start, reply: Any, number: int) -> None:
        place = self.folder / f"client-{number:05d}"
        used = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        folder = _Folder(place / f"round-{start.number:05d}", self.facts, self.most_bytes - used, {}, None)
        sender = Sender(number, flower.samples_of(reply, "num-examples"))
        wire = _plain(start, self.facts, reply, sender)
        folder.write(start, None, [folder.message(start.number, sender, wire, LocalRule(), known=False)])
        if folder.recorder is not None:
            folder.recorder.close()
