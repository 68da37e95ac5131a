"""The nouns: what a model, a defense, an adversary and an attack are, and what passes between them.

A defense is two halves with bytes between them. What an adversary knows is a value, `Observation`, built in one place
(`harness.federation.observe`) from one table, `SEES`. An attack is a function of an observation and a
key; the truth never enters.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from leakgauge.harness.core.claim import Claim, Horizon
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import View
from leakgauge.harness.core.vec import Layout, Parts, Vector, weighted_mean

S = TypeVar("S")
M = TypeVar("M")


class Task(Protocol):
    """A model and its loss; the parameters are one flat [d] float32 vector in the order of `layout`."""

    @property
    def layout(self) -> Layout:
        """Names and shapes of the tensors in the flat vector."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch axis."""

    @property
    def classes(self) -> int:
        """Number of label classes."""

    @property
    def softmax(self) -> bool:
        """Whether the loss is softmax cross-entropy (False for hinge and squared loss)."""

    @property
    def smooth(self) -> bool:
        """Whether the scores are known to be a smooth function of the inputs (False with ReLU or max-pooling)."""

    def init(self, key: Key) -> Vector:
        """Fresh parameters."""

    def outputs(self, params: Vector, x: Tensor) -> Tensor:
        """[b, classes] scores of the inputs x [b, *input_shape], with dropout off."""

    def loss(self, params: Vector, x: Tensor, y: Tensor) -> Tensor:
        """Mean loss (a scalar) over x [b, *input_shape] and labels y: [b] int64, or [b, classes] probabilities."""


class Examples(NamedTuple):
    """x: [n, *input_shape] float32 in [0, 1] for images; y: [n] int64."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Setting:
    """What is public about a federation, before it starts.

    Attributes:
        layout: the tensors in the flat vector; `layout.dim` is d.
        clients, participants, rounds: K, U, T.
        sends: `gradient` (FedSGD) or `update` (FedAvg: local parameters minus global ones).
        steps: local SGD steps behind a message (1 for a gradient).
        lr: learning rate at round 0.
        batch: images behind one step; 0 means all of the client's.
        samples: of the client that has fewest.
        momentum: of the local SGD, reset each round.
    """

    layout: Layout
    clients: int
    participants: int
    rounds: int
    sends: str
    steps: int
    lr: float
    batch: int
    samples: int
    momentum: float = 0.0

    @property
    def dim(self) -> int:
        """d, the length of an update."""
        return self.layout.dim


class Sender(NamedTuple):
    """What everybody knows of the client behind a message: its number, and how many samples it trains on."""

    number: int
    samples: int


class Link(NamedTuple):
    """One client's line to the server in one round: what both ends know of a message.

    `shared` is None at the end of an adversary who lacks the shared key. A private key is never part of it.
    """

    setting: Setting
    sender: Sender
    shared: Key | None

    @property
    def key(self) -> Key:
        """The shared key, at an end that holds it."""
        assert self.shared is not None
        return self.shared


class Links(NamedTuple):
    """The lines of several messages, in their order; `shared` as in `Link`."""

    setting: Setting
    senders: Sequence[Sender]
    shared: Sequence[Key] | None

    @property
    def keys(self) -> Sequence[Key]:
        """The shared keys, at an end that holds them."""
        assert self.shared is not None
        return self.shared

    def each(self) -> list[Link]:
        """One link a message."""
        keys: Sequence[Key | None] = [None] * len(self.senders) if self.shared is None else self.shared
        return [Link(self.setting, who, key) for who, key in zip(self.senders, keys, strict=True)]


class LocalRule(NamedTuple):
    """What a defense asks of local training.

    Attributes:
        clip: every record's gradient is scaled to an l2 norm of at most this before a batch is averaged; None: no.
        full_batch: one step on all of the client's samples, whatever the study says.
        poisson: each step takes every sample independently, instead of cutting a permutation.
    """

    clip: float | None = None
    full_batch: bool = False
    poisson: bool = False


class Likelihood(Protocol):
    """-log p(received | update) up to a constant, differentiable in the update."""

    def __call__(self, update: Tensor) -> Tensor:
        """update: [n, d], one candidate for each of n received messages; returns [n].

        Where the channel superposes, [n, users, d]: the updates that it added up in each.
        """


class Feedback(NamedTuple):
    """What everybody knows after a round: test losses of the model before and after it (None: not evaluated)."""

    round: int
    before: float | None
    after: float | None


class MessageError(ValueError):
    """A message that this defense did not make: wrong length, wrong round, not finite."""


@dataclass(frozen=True)
class Defense(ABC, Generic[S, M]):
    """A frozen dataclass whose fields are its hyper-parameters; concrete classes are final.

    S is its public state (known to all), M what one client remembers and never sends.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    randomized: ClassVar[bool] = True
    """Whether two encodings of one update under one shared key differ."""

    analog: ClassVar[bool] = False
    """Whether a wire is a waveform: real numbers on channel uses, not bits."""

    superposes: ClassVar[bool] = False
    """Whether the channel adds all messages of a round up, so that none arrives by itself."""

    promises: ClassVar[Horizon] = Horizon.ONE_ROUND
    """The horizon for which the source states its epsilon."""

    @property
    def local(self) -> LocalRule:
        """What it asks of local training; the update that `encode` gets was made so."""
        return LocalRule()

    def step_noise(self, setting: Setting) -> float:
        """Standard deviation of the noise in each local step's sum of gradients, in units of the rule's clip."""
        return 0.0

    def parts(self, setting: Setting) -> Parts:
        """The sub-vectors of an update: single coordinates, unless the defense says otherwise."""
        return Parts(torch.arange(setting.dim)[:, None])

    def init(self, setting: Setting) -> S:
        """The public state before round 0."""
        return None  # type: ignore[return-value]  # a stateless defense has S = None

    def remember(self, setting: Setting) -> M:
        """What a client remembers before its first message."""
        return None  # type: ignore[return-value]  # a forgetful defense has M = None

    @abstractmethod
    def encode(self, state: S, memory: M, update: Vector, link: Link, private: Key) -> tuple[bytes, M]:
        """Client: the bytes that cross the wire, which are all that leaves the client, and its new memory.

        Args:
            update: [d] float32, not modified.
            link: this client as everybody knows it, the setting, and the key that client and server share this round.
            private: known to this client only, for this round only.

        Raises:
            ValueError: update is not finite.
        """

    def transmit(self, state: S, wires: Sequence[bytes], links: Links, channel: Key) -> Sequence[bytes]:
        """What arrives. An over-the-air channel returns one superposition of all messages.

        Args:
            links: without shared keys.
            channel: key of the channel's own noise.
        """
        return wires

    @abstractmethod
    def estimate(self, state: S, received: bytes, link: Link) -> Vector:
        """The update [d] that one received message shows.

        Args:
            link: its `shared` is None for an outsider who lacks the shared key.

        Raises:
            MessageError: these bytes are not a message of this defense.
        """

    def decode(self, state: S, received: Sequence[bytes], links: Links, private: Key) -> Vector:
        """Server: the mean update [d], weighted by the senders' numbers of samples.

        Args:
            links: with the shared keys.
            private: known to the server only, for this round only.
        """
        updates = [self.estimate(state, wire, link) for wire, link in zip(received, links.each(), strict=True)]
        return weighted_mean(updates, [float(who.samples) for who in links.senders])

    def advance(self, state: S, feedback: Feedback) -> S:
        """The public state of the next round."""
        return state

    def stops(self, state: S) -> bool:
        """Whether the federation ends before the round of this state."""
        return False

    @abstractmethod
    def likelihood(self, state: S, received: Sequence[bytes], links: Links) -> Likelihood:
        """How an adversary who knows this defense scores candidate updates, for n messages at once.

        Args:
            links: its `shared` is None for an outsider who lacks the shared keys.
        """

    @abstractmethod
    def claim(self, history: Sequence[S], setting: Setting) -> Claim:
        """The claim over the rounds whose states are in `history`: one state is one round."""

    def parameters(self) -> dict[str, Any]:
        """The hyper-parameters, defaults included."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


class Snapshot(NamedTuple):
    """The model of a round: what everybody trains from in it, and the defense's public state then."""

    round: int
    params: Vector
    state: Any


class Message(NamedTuple):
    """One message as it crossed the wire. `shared` is None for an adversary who does not hold the key.

    images: distinct images behind it, steps: SGD steps behind it; both public, as the clients' sizes are.
    others: where the channel added several updates up, the further senders; `images` are those of all, of probes
        equally many of each.
    """

    round: int
    sender: Sender
    wire: bytes
    shared: Key | None
    images: int
    steps: int = 1
    others: tuple[Sender, ...] = ()

    @property
    def users(self) -> int:
        """How many clients' updates this message holds."""
        return 1 + len(self.others)


def links_of(setting: Setting, messages: Sequence[Message]) -> Links:
    """The lines of several messages as an adversary sees them: without shared keys unless it holds all of them."""
    keys = [message.shared for message in messages if message.shared is not None]
    senders = [message.sender for message in messages]
    return Links(setting, senders, keys if len(keys) == len(messages) else None)


class Sighting(NamedTuple):
    """The victims' messages of one round, the model they trained from, and the learning rate."""

    messages: tuple[Message, ...]
    model: Snapshot
    lr: float


@dataclass(frozen=True)
class Observation:
    """All that one adversary sees. None: this adversary does not see it.

    Attributes:
        messages: the victims' messages of one round, the first that is looked at; where membership is asked about,
            everybody's.
        model: of that round; needs `models`.
        later: the same in later rounds, of the same victims on the same images; empty where one round is looked at.
        models: round by round, as far as they were kept.
        final: after the last round.
        auxiliary: data of the same kind that belongs to no victim and to no candidate.
        candidates: records whose membership is asked about, in random order.
        suspect: in which client's data; None: in anybody's.
        others: data of the clients that are not looked at, by client number, without the victims' rows.
        labels: the labels of each victim's images, sorted; only where granted.
        lr: learning rate of the round.
    """

    view: View
    setting: Setting
    task: Task
    defense: Defense[Any, Any]
    lr: float
    messages: tuple[Message, ...] | None = None
    model: Snapshot | None = None
    later: tuple[Sighting, ...] = ()
    models: tuple[Snapshot, ...] | None = None
    final: Vector | None = None
    auxiliary: Examples | None = None
    candidates: Examples | None = None
    suspect: int | None = None
    others: Mapping[int, Examples] | None = None
    labels: tuple[Tensor, ...] | None = None

    @property
    def sightings(self) -> tuple[Sighting, ...]:
        """All rounds that are looked at, for an attack that needs messages and models."""
        assert self.messages is not None
        assert self.model is not None
        return (Sighting(self.messages, self.model, self.lr), *self.later)


class Guess(NamedTuple):
    """What an attack says of one victim. `failure` is empty, or says why there is no usable reconstruction.

    x: [b, *input_shape], y: [b] int64; objective: of the attacker, the one that chose among the restarts.
    """

    x: Tensor
    y: Tensor
    objective: float
    evaluations: int
    failure: str = ""


class Reconstruction(NamedTuple):
    """One guess a victim, in the order of the messages."""

    guesses: tuple[Guess, ...]


class Labels(NamedTuple):
    """[b] int64 of each victim, in the order of the messages; the order inside says nothing."""

    labels: tuple[Tensor, ...]


class Membership(NamedTuple):
    """[n] scores, one a candidate; higher means a member."""

    scores: Tensor


@dataclass(frozen=True)
class Attack(ABC):
    """A frozen dataclass whose fields are its parameters; concrete classes are final."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    kind: ClassVar[str]
    """`reconstruction`, `labels` or `membership`."""

    floor: ClassVar[bool] = False
    """Whether it looks at nothing that the defense protects: a control, not an attack."""

    @property
    def aware(self) -> bool:
        """Whether it uses what it knows of the defense."""
        return False

    @property
    @abstractmethod
    def needs(self) -> frozenset[str]:
        """Names (keys of `SEES`, or grants) that the adversary must see."""

    @abstractmethod
    def run(self, seen: Observation, key: Key) -> Reconstruction | Labels | Membership:
        """Attack what was seen. A victim on whom it diverged is a guess with a `failure`, never an exception."""

    def parameters(self) -> dict[str, Any]:
        """The parameters, defaults included."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
