"""Flower: the bytes of a defense on the wire of an app, in both directions through `Round`.

    ClientApp(mods=[defended("gaussian", {"noise_std": 0.01})])                        # the client's half
    defend(FedAvg(), "gaussian", {"noise_std": 0.01}, facts=Facts(...), sizes=[600])   # the server's half

Flower's round 1 is round 0 here. Client k is the node whose `partition-id` is k, as in a simulation; nodes without a
`partition-id` are numbered by their ids. A number belongs to the first node that replies with it. Arrays of floats
enter a vector as float32, in the order of their record. Other arrays, such as the number of batches that a batch norm
has seen, are not sent back; the server keeps its own. The metrics of a reply are not protected: they are sent in the
clear.
"""

from __future__ import annotations

import inspect
import json
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from leakgauge.harness.core.cell import PartSpec, Scalar
from leakgauge.harness.core.contract import Defense, Feedback, LocalRule, Sender, Setting
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.sinks import line
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import replay_state, setting_of
from leakgauge.harness.federation.recording import Facts
from leakgauge.harness.federation.round import Client, Collected, Round, SealedMessage, client_key
from leakgauge.harness.integrations.flower_records import (
    HOOKED,
    LOG,
    OURS,
    CallNext,
    Mod,
    error_of,
    federation,
    layout_of,
    numbers_of,
    only,
    samples_of,
    trains,
)
from leakgauge.harness.integrations.flower_records import vector_of as numpy_vector_of


def part(defense: str, parameters: dict[str, Scalar] | None) -> tuple[PartSpec, Defense[Any, Any]]:
    """A defense, and its specification with all parameters."""
    built: Defense[Any, Any] = registry.build("defense", defense, parameters or {})
    return PartSpec(defense, built.parameters()), built


def vector_of(record: Any, layout: Layout) -> Vector:
    """[d] float32: the arrays of a record that are in the layout; errors as in `flower_records.vector_of`."""
    return torch.from_numpy(numpy_vector_of(record, layout))


class Order(NamedTuple):
    """What the server tells a client besides the model; losses: before rounds 0, 1, ... to this one, nan if unknown."""

    defense: str
    number: int
    rounds: int
    client: int
    counted: int
    facts: str
    sizes: list[int]
    names: list[str]
    losses: list[float]
    weight: str

    @classmethod
    def read(cls, message: Any) -> Order:
        """The order in a message."""
        record = message.content.config_records.get(OURS)
        if record is None or set(record) != set(cls._fields):
            raise MessageError("expected a strategy with leakgauge.flower.defend, got a message without its record")
        return cls(**record)

    def setting(self, layout: Layout, rule: LocalRule) -> Setting:
        """The public setting."""
        facts = registry.construct(Facts, json.loads(self.facts))
        return setting_of(layout, federation(facts, self.rounds), self.sizes, rule)

    def round(self, defense: Defense[Any, Any], setting: Setting) -> Round:
        """The round, with the state that follows from the losses."""
        known = [loss if math.isfinite(loss) else None for loss in self.losses]
        feedback = [Feedback(k, *pair) for k, pair in enumerate(pairwise(known))]
        return Round(defense, setting, replay_state(defense, setting, feedback), self.number)


_SECRET = "leakgauge-secret"  # the key in a run's configuration with the secret of the shared keys, for both sides


def defended(
    defense: str,
    parameters: dict[str, Scalar] | None = None,
    *,
    local: LocalRule | None = None,
    secret: int | None = None,
    seed: int | None = None,
) -> Mod:
    """A mod of a ClientApp: a reply holds the defense's bytes of the update instead of the trained arrays.

    The mod refuses to send anything if the server does not decode with the same defense and parameters. A memory of the
    defense stays in the state of the client's context. The rest of the setting is taken from the server.

    Args:
        defense, parameters: as in a study.
        local: the rule by which the app trains. It must be what the defense requires (`Defense.local`), with its
            noise, because a mod sees no records.
        secret: of the shared keys; by default `leakgauge-secret` of the run's configuration.
        seed: of all keys, for tests: the keys are those of a leakgauge training with this seed. Without a seed, private
            keys come from the operating system.

    Raises:
        UnknownNameError, ParameterError: no such defense.
        ValueError: the app does not train by the defense's rule.
    """
    spec, built = part(defense, parameters)
    if built.local != (local or LocalRule()):
        raise ValueError(
            f"{defense} requires {built.local} of local training; train with this rule and pass it as local="
        )
    return _Encoder(spec, built, secret, seed)


def defend(
    strategy: Any,
    defense: str,
    parameters: dict[str, Scalar] | None = None,
    *,
    facts: Facts,
    sizes: Sequence[int],
    secret: int | None = None,
    seed: int | None = None,
    each: bool = False,
    loss: str = "loss",
) -> Any:
    """The strategy itself, which from now on decodes what `defended` clients send.

    The strategy gets one reply per round: the model moved by the defense's mean, with the total of the weights and the
    weighted means of the metrics. A client whose message is refused does not count (`Round.collect`), and the log has a
    line about it. A round without a counted message leaves the model as it is. Call `defend` before `tap`.

    The messages of a defense that superposes cross Flower's wire one by one and are added up here, so the server could
    look at them: the claim is about a channel that Flower does not have.

    Args:
        strategy: with `configure_train`, `aggregate_train`, `aggregate_evaluate` and `start`.
        facts: facts of the federation; its clients must train as stated.
        sizes: the numbers of samples of the clients, or the smallest and the largest.
        secret, seed: as for `defended`.
        each: give the strategy every client's decoded model, if it does not take a mean; not if messages superpose.
        loss: the metric of `evaluate_fn`, or else of the aggregated evaluation, which determines the defense's public
            state; a round without it gives no feedback.

    Raises:
        UnknownNameError, ParameterError: no such defense.
        ValueError: facts contradict each other, there is no secret, or `each` with sums.
    """
    spec, built = part(defense, parameters)
    if each and built.superposes:
        raise ValueError(f"expected each=False with {defense}: only the sum of its messages arrives")
    if not hasattr(strategy, "configure_train"):
        text = f"expected a strategy of flwr.serverapp.strategy, got {type(strategy).__name__} without configure_train"
        raise ValueError(f"{text}: with the older flwr.server.strategy, `tap` works and `defend` does not")
    if hasattr(strategy, HOOKED):
        raise ValueError("expected an unmodified strategy, got one with a defense or a tap: defend it once, then tap")
    if secret is None and seed is None:
        raise ValueError(f"expected a secret of the shared keys, as context.run_config[{_SECRET!r}], got none")
    server = Server(strategy, spec, built, facts, list(sizes), secret, seed, each, loss)
    for name in ("configure_train", "aggregate_train", "aggregate_evaluate", "start"):
        setattr(strategy, name, getattr(server, name))
    setattr(strategy, HOOKED, server)
    return strategy


@dataclass(frozen=True)
class _Encoder:
    """The mod of `defended`."""

    spec: PartSpec
    defense: Defense[Any, Any]
    secret: int | None
    seed: int | None

    def __call__(self, message: Any, context: Any, call_next: CallNext) -> Any:
        if not trains(message):
            return call_next(message, context)
        order = Order.read(message)
        if order.defense != self.spec.key:
            raise MessageError(f"expected a server that decodes {self.spec.key}, got one that decodes {order.defense}")
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        base = only(message.content.array_records, "ArrayRecord")[1]
        name, trained = only(reply.content.array_records, "ArrayRecord")
        layout = layout_of(base, order.names)
        setting = order.setting(layout, self.defense.local)
        number = int(context.node_config.get("partition-id", order.client))
        own = client_key(Key(self._seed(context)).child("training"), order.number, number)
        private = own if self.seed is not None else Key(secrets.randbits(128))
        sender, update = Sender(number, samples_of(reply, order.weight)), vector_of(trained, layout)
        update, memory = update - vector_of(base, layout), self._memory(context, setting, order.counted)
        client = Client(sender, update, memory, private.child("private"), own.child("shared"))
        sealed, after = order.round(self.defense, setting).send(client)
        for when, memory in (("before", client.memory), ("after", after)):
            context.state[f"{OURS}-{when}"] = _kept(memory)
        context.state[OURS] = ConfigRecord({"round": order.number})
        reply.content[name] = ArrayRecord({OURS: Array(np.frombuffer(sealed.wire, np.uint8))})
        reply.content[OURS] = ConfigRecord({"client": number, "fault": sealed.fault})
        return reply

    def _seed(self, context: Any) -> int:
        for seed in (self.seed, self.secret, context.run_config.get(_SECRET)):
            if seed is not None:
                return int(seed)
        raise MessageError(f"expected {_SECRET} in the run's configuration, or secret=, got none")

    def _memory(self, context: Any, setting: Setting, counted: int) -> Any:
        """The memory after the client's last message if that counted, else before it; a new one at the start."""
        if OURS not in context.state or counted < 0:
            return self.defense.remember(setting)
        when = "after" if context.state[OURS]["round"] == counted else "before"
        held = context.state[f"{OURS}-{when}"]
        return torch.from_numpy(held[OURS].numpy().copy()) if OURS in held else None


def _kept(memory: Any) -> Any:
    if memory is not None and not isinstance(memory, torch.Tensor):
        raise MessageError(f"expected a defense whose memory is a tensor or None, got {type(memory).__name__}")
    return ArrayRecord({} if memory is None else {OURS: Array(memory.numpy())})


@dataclass
class Server:
    """The server's half of `defend`, in front of the methods of a strategy."""

    strategy: Any
    spec: PartSpec
    defense: Defense[Any, Any]
    facts: Facts
    sizes: list[int]
    secret: int | None
    seed: int | None
    each: bool
    loss: str
    layout: Layout | None = None
    losses: dict[int, float] = field(default_factory=dict)
    nodes: dict[int, int] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        federation(self.facts, 1)
        self.weight = str(getattr(self.strategy, "weighted_by_key", "num-examples"))
        self.shared = self.secret if self.seed is None else self.seed
        self.private = Key(secrets.randbits(128))  # of the server alone, without a seed
        self._configure, self._aggregate = self.strategy.configure_train, self.strategy.aggregate_train
        self._evaluated, self._start = self.strategy.aggregate_evaluate, self.strategy.start

    def start(self, *args: Any, **named: Any) -> Any:
        """`Strategy.start`; its number of rounds is public, and its evaluations give the feedback."""
        bound = inspect.signature(self._start).bind(*args, **named)
        bound.apply_defaults()
        self.rounds = int(bound.arguments["num_rounds"])
        if bound.arguments.get("evaluate_fn") is not None:
            bound.arguments["evaluate_fn"] = partial(self._evaluate, bound.arguments["evaluate_fn"])
        return self._start(*bound.args, **bound.kwargs)

    def _evaluate(self, evaluate: Any, server_round: int, arrays: Any) -> Any:
        return self._noted(server_round, evaluate(server_round, arrays))

    def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
        """The clients' evaluation; its loss is kept until the server's own loss, which comes later, replaces it."""
        return self._noted(server_round, self._evaluated(server_round, replies))

    def _noted(self, server_round: int, metrics: Any) -> Any:
        """These metrics of the model before round `server_round`, counted from 0; their loss is kept."""
        if metrics is not None and self.loss in metrics:
            self.losses[server_round] = float(metrics[self.loss])
        return metrics

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
        """The strategy's messages, each with what `defended` needs; none if the defense ends the training."""
        messages = list(self._configure(server_round, arrays, config, grid))
        if not messages:
            return messages
        if len(messages) != self.facts.participants:
            raise ValueError(f"expected {self.facts.participants} participants as in facts, got {len(messages)}")
        self.base = only(messages[0].content.array_records, "ArrayRecord")[1]
        if any(only(one.content.array_records, "ArrayRecord")[1] != self.base for one in messages):
            raise ValueError("expected a strategy that sends all clients one model")
        self.layout = self.layout or layout_of(self.base)
        order = self._order(server_round - 1, self.layout)
        self.here = order.round(self.defense, order.setting(self.layout, self.defense.local))
        if self.defense.stops(self.here.state):
            LOG.warning("leakgauge: %s stops before round %d", self.spec.name, self.here.number)
            return []
        numbers = self._numbers(grid)
        for message in messages:
            node = message.metadata.dst_node_id
            own = order._replace(client=numbers[node], counted=self.counted.get(node, -1))
            message.content = RecordDict({**message.content, OURS: ConfigRecord(own._asdict())})
        return messages

    def _numbers(self, grid: Any) -> dict[int, int]:
        """A client number for each node; a node that has replied keeps its own."""
        numbers = {node: number for number, node in self.nodes.items()}
        free = iter(sorted(set(range(self.facts.clients)) - set(self.nodes)))
        try:
            return numbers | {node: next(free) for node in sorted(grid.get_node_ids()) if node not in numbers}
        except StopIteration:
            raise ValueError(f"expected {self.facts.clients} clients as in facts, but more nodes came") from None

    def _order(self, number: int, layout: Layout) -> Order:
        losses, facts = [self.losses.get(k, math.nan) for k in range(number + 1)], json.dumps(self.facts._asdict())
        known = self.spec.key, number, self.rounds
        return Order(*known, 0, -1, facts, self.sizes, list(layout.names), losses, self.weight)

    def sealed(self, reply: Any) -> SealedMessage:
        """The sealed message in a reply.

        Raises:
            MessageError: there is no sealed message, or its numbers are impossible or belong to another client.
        """
        node, stated = reply.metadata.src_node_id, reply.content.config_records.get(OURS, {})
        number, fault = stated.get("client"), stated.get("fault")
        if not isinstance(number, int) or not isinstance(fault, str) or not 0 <= number < self.facts.clients:
            raise MessageError(f"expected a reply of `defended` client 0 to {self.facts.clients - 1}, got {number!r}")
        if self.nodes.setdefault(number, node) != node:
            raise MessageError(f"client {number} is already another node")
        array = only(reply.content.array_records, "ArrayRecord")[1].get(OURS)
        held = np.empty(0) if array is None else numbers_of(array)
        if held.dtype != np.uint8:
            raise MessageError(f"expected a message of bytes, got {held.dtype}")
        key = client_key(self.master, self.here.number, number).child("shared")
        return SealedMessage(Sender(number, samples_of(reply, self.weight)), held.tobytes(), key, fault)

    @property
    def master(self) -> Key:
        """The key of the training."""
        assert self.shared is not None  # `defend` has checked it
        return Key(self.shared).child("training")

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> Any:
        """Decode the replies, and give the result to the strategy."""
        arrived: dict[int, tuple[SealedMessage, Any]] = {}
        for reply in replies:
            try:
                if reply.has_error():
                    raise MessageError(error_of(reply))
                sealed = self.sealed(reply)
                arrived[sealed.sender.number] = (sealed, reply)
            except (ValueError, TypeError) as error:
                self._refuse(f"node {reply.metadata.src_node_id}", str(error))
        if not arrived:
            return self._aggregate(server_round, [])
        run = self.master if self.seed is not None else self.private
        own = run.child("round", self.here.number)
        sealed_messages = [arrived[number][0] for number in sorted(arrived)]
        found = self.here.collect(sealed_messages, own.child("channel"), self.here.server_key(run, own))
        for number, reason in found.dropped.items():
            self._refuse(f"client {number}", reason)
        for sender in found.links.senders:
            self.counted[self.nodes[sender.number]] = self.here.number
        counted = [arrived[sender.number][1] for sender in found.links.senders]
        arrays, metrics = self._aggregate(server_round, self._decoded(found, counted))
        if arrays is not None and self.layout is not None:
            # other arrays keep the server's values: a mean of counts would not be a count
            arrays = ArrayRecord({k: v if k in self.layout.names else self.base[k] for k, v in arrays.items()})
        return arrays, metrics

    def _refuse(self, who: str, reason: str) -> None:
        LOG.warning("leakgauge: round %d, %s does not count: %s", self.here.number, who, line(reason))

    def _decoded(self, found: Collected[SealedMessage], counted: Sequence[Any]) -> list[Any]:
        """Replies with models for the strategy: one for all counted clients, or one for each."""
        if found.mean is None or self.layout is None:
            return []
        start = vector_of(self.base, self.layout)
        if self.each:
            moves, metrics = found.updates, [dict(only(one.content.metric_records, "")[1]) for one in counted]
        else:
            moves, metrics, counted = [found.mean], [self._means(counted)], counted[:1]
        for reply, move, one in zip(counted, moves, metrics, strict=True):
            names = [only(part, "")[0] for part in (reply.content.array_records, reply.content.metric_records)]
            parts = zip(self.layout.names, self.layout.split(start + move), strict=True)
            moved = {k: Array(part.numpy().astype(self.base[k].dtype)) for k, part in parts}
            arrays = ArrayRecord({**self.base, **moved})
            reply.content = RecordDict({names[0]: arrays, names[1]: MetricRecord(one)})
        return list(counted)

    def _means(self, counted: Sequence[Any]) -> dict[str, float]:
        rows = [only(one.content.metric_records, "")[1] for one in counted]
        weights = [samples_of(one, self.weight) for one in counted]
        names = [name for name in rows[0] if all(isinstance(row.get(name), int | float) for row in rows)]
        pairs = {name: zip(rows, weights, strict=True) for name in names}
        means = {name: math.fsum(row[name] * w for row, w in pairs[name]) / sum(weights) for name in names}
        return means | {self.weight: sum(weights)}
