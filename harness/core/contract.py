"""The interfaces of model, defense, adversary and attack, and the messages between them.

A defense has a client half and a server half; only bytes pass between them. An `Observation` is all that one adversary
sees. It is built in one place (`harness.federation.observe`) from one table (`SEES`). An attack is a function of an
observation and a key; it never sees the truth.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from leakgauge.harness.core.claim import Breach, Claim, Horizon, nothing_promised
from leakgauge.harness.core.device import moved
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.law import Law, StepLaw
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.table import Column
from leakgauge.harness.core.threats import View
from leakgauge.harness.core.vec import Layout, Parts, Vector, weighted_mean

S = TypeVar("S")
M = TypeVar("M")


class InTraining(NamedTuple):
    """scores: [b, classes]; term: a scalar added to their loss; None: nothing is added."""

    scores: Tensor
    term: Tensor | None = None


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
        """Number of label classes; 1 if the label is a number."""

    @property
    def softmax(self) -> bool:
        """Whether the loss is softmax cross-entropy (False for hinge and squared loss)."""

    @property
    def smooth(self) -> bool:
        """Whether the scores are known to be a smooth function of the inputs (False with ReLU or max-pooling)."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of a tabular input, in the order of its entries; empty: the inputs are not tabular."""

    @property
    def mixes(self) -> bool:
        """Whether the records of a batch change each other's scores while a client trains, as with a batch norm."""

    def init(self, key: Key) -> Vector:
        """Fresh parameters."""

    def outputs(self, params: Vector, x: Tensor) -> Tensor:
        """[b, classes] scores of the inputs x [b, *input_shape], with dropout off."""

    def in_training(self, params: Vector, x: Tensor) -> InTraining:
        """The scores that x has while a client trains: a batch norm uses the statistics of x."""

    def loss(self, params: Vector, x: Tensor, y: Tensor) -> Tensor:
        """The scalar that a client minimizes: the mean loss, plus a penalty if the task has one.

        x is [b, *input_shape]; the labels y are [b], or [b, classes] probabilities.
        """


class Examples(NamedTuple):
    """x: [n, *input_shape] float32, in [0, 1] for images; y: [n] int64, or float32 targets of a regression."""

    x: Tensor
    y: Tensor

    def on(self, device: torch.device | str) -> Examples:
        """The examples on a device."""
        return Examples(moved(self.x, device), moved(self.y, device))

    def double(self) -> Examples:
        """The examples in double precision; labels stay whole numbers."""
        return Examples(self.x.double(), self.y.double() if self.y.is_floating_point() else self.y)


@dataclass(frozen=True)
class Setting:
    """The public facts about a federation before it starts.

    Attributes:
        layout: the tensors in the flat vector; `layout.dim` is d.
        clients, participants, rounds: K clients, U of them in each of T rounds.
        sends: `gradient` (FedSGD) or `update` (FedAvg: local parameters minus global ones).
        steps: local SGD steps per message (1 for a gradient).
        lr: learning rate at round 0.
        batch: images per step; 0 means all images of the client.
        samples: number of samples of the smallest client.
        momentum: momentum of the local SGD, reset each round.
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

    @property
    def step_weights(self) -> list[float]:
        """The weight of each step's gradient in a message: 1, plus its share of later steps through momentum."""
        if self.sends == "gradient":
            return [1.0]
        return list(itertools.accumulate(self.momentum**k for k in range(self.steps)))


class Sender(NamedTuple):
    """The public facts about the client behind a message: its number and its number of training samples."""

    number: int
    samples: int


class Link(NamedTuple):
    """What one end of a client's connection to the server knows in a round, besides the message.

    `shared` is None for an adversary without the shared key. A link never holds a private key.
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
    """The links of several messages, in the order of the messages; `shared` as in `Link`."""

    setting: Setting
    senders: Sequence[Sender]
    shared: Sequence[Key] | None

    @property
    def keys(self) -> Sequence[Key]:
        """The shared keys, at an end that holds them."""
        assert self.shared is not None
        return self.shared

    def each(self) -> list[Link]:
        """One link per message."""
        keys: Sequence[Key | None] = [None] * len(self.senders) if self.shared is None else self.shared
        return [Link(self.setting, sender, key) for sender, key in zip(self.senders, keys, strict=True)]


class LocalRule(NamedTuple):
    """What a defense requires of local training.

    Attributes:
        clip: each record's gradient is scaled to an l2 norm of at most this before a batch is averaged; None: no bound.
        full_batch: always one step on all samples of the client, regardless of the study.
        poisson: each step samples every record independently, instead of cutting a permutation into batches.
    """

    clip: float | None = None
    full_batch: bool = False
    poisson: bool = False


class Likelihood(Protocol):
    """-log p(received | update) up to a constant, differentiable in the update."""

    def __call__(self, update: Tensor) -> Tensor:
        """[n] scores of update [n, d], one candidate for each of n received messages.

        If the channel superposes messages, update is [n, users, d]: the updates that it added up in each message.
        The update may be on an accelerator; the tensors that the function holds are then copied there (`core.device`).
        """


class Feedback(NamedTuple):
    """The public facts after a round: test losses of the model before and after it (None: not evaluated)."""

    round: int
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Defense(ABC, Generic[S, M]):
    """A frozen dataclass whose fields are its hyper-parameters; concrete classes are final.

    S is the type of the public state. M is the type of a client's memory, which never leaves the client.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    randomized: ClassVar[bool] = True
    """Whether two encodings of one update under one shared key can differ."""

    analog: ClassVar[bool] = False
    """Whether a message is a waveform (one real number per channel use) instead of bits."""

    superposes: ClassVar[bool] = False
    """Whether the channel adds up all messages of a round, so that only the sum arrives."""

    relies: ClassVar[str] = ""
    """The assumption of the claim that fails if a participant sends nothing in a round; empty: none does."""

    promises: ClassVar[Horizon] = Horizon.ONE_ROUND
    """The horizon for which the source states its epsilon."""

    @property
    def local(self) -> LocalRule:
        """The rule for local training; `encode` receives updates that follow this rule."""
        return LocalRule()

    def step_noise(self, setting: Setting) -> float:
        """Standard deviation of the noise in each local step's sum of gradients, in units of `local.clip`."""
        return 0.0

    def training_noise(self, setting: Setting, samples: int) -> float:
        """Standard deviation of the step noise in each coordinate of a message, for a client with `samples` samples.

        The noise of all steps is added up, each step weighted by momentum. The effect of a step's noise on the starting
        point of later steps is ignored. The learning rate is that of round 0, the number of steps that of the largest
        client.
        """
        scale = (self.local.clip or 0.0) * (1.0 if setting.sends == "gradient" else setting.lr)
        each = scale * self.step_noise(setting) * math.hypot(*setting.step_weights)
        return each / max(1, min(setting.batch or samples, samples))

    def parts(self, setting: Setting) -> Parts:
        """The sub-vectors of an update; by default each coordinate is its own sub-vector."""
        return Parts(torch.arange(setting.dim)[:, None])

    def init(self, setting: Setting) -> S:
        """The public state before round 0."""
        return None  # type: ignore[return-value]  # a stateless defense has S = None

    def remember(self, setting: Setting) -> M:
        """A client's memory before its first message."""
        return None  # type: ignore[return-value]  # a defense without memory has M = None

    @abstractmethod
    def encode(self, state: S, memory: M, update: Vector, link: Link, private: Key) -> tuple[bytes, M]:
        """Client: the bytes to send, and the client's new memory. Nothing but the bytes leaves the client.

        Args:
            update: [d] float32; not modified.
            link: the setting, this client, and the key that client and server share in this round.
            private: this client's own key of this round; no one else knows it.

        Raises:
            ValueError: update is not finite.
        """

    def transmit(self, state: S, wires: Sequence[bytes], links: Links, channel: Key) -> Sequence[bytes]:
        """Channel: the received messages. An over-the-air channel returns one superposition of all sent messages.

        Args:
            links: without shared keys.
            channel: key of the channel noise.
        """
        return wires

    @abstractmethod
    def estimate(self, state: S, received: bytes, link: Link) -> Vector:
        """The update [d] that one received message reveals.

        Args:
            link: `link.shared` is None for an outsider without the shared key.

        Raises:
            MessageError: the bytes are not a message of this defense.
        """

    def longest(self, state: S, link: Link) -> float:
        """The largest l2 norm of `estimate` for an honest message of any update; the server refuses larger norms.

        With unbounded noise, an honest message exceeds this norm with a probability below 1e-12. inf: there is no
        public bound, or no bytes decode to a larger norm. Must not use `link.shared`.
        """
        return math.inf

    def decode(self, state: S, received: Sequence[bytes], links: Links, private: Key) -> Vector:
        """Server: the mean update [d], by default `average` of the estimates of all messages.

        Args:
            links: with the shared keys.
            private: the server's own key of this round; no one else knows it.
        """
        updates = [self.estimate(state, wire, link) for wire, link in zip(received, links.each(), strict=True)]
        return self.average(updates, links, private)

    def average(self, updates: Sequence[Vector], links: Links, private: Key) -> Vector:
        """Server: the mean [d] of the estimated updates, by default weighted by the senders' numbers of samples.

        Args:
            updates: one estimate [d] per message; not modified.
            links, private: as for `decode`.
        """
        return weighted_mean(updates, [float(sender.samples) for sender in links.senders])

    def advance(self, state: S, feedback: Feedback) -> S:
        """The public state of the next round."""
        return state

    def compensated(self, memory: M, update: Vector) -> Vector:
        """What the message should carry, by which its error is judged; with error feedback, the residual is added."""
        return update

    def stops(self, state: S) -> bool:
        """Whether the federation ends before the round that has this state."""
        return False

    def likelihood(self, state: S, received: Sequence[bytes], links: Links) -> Likelihood:
        """The likelihood of candidate updates for an adversary that knows this defense, for n messages at once.

        Args:
            links: `links.shared` is None for an outsider without the shared keys.

        Raises:
            NoLikelihood: the defense states none (the default): attacks that need a likelihood are refused, others run.
        """
        raise NoLikelihood(f"{type(self).__name__} states no likelihood, which this needs; write `likelihood`")

    def in_clear(self, updates: Tensor, setting: Setting) -> Tensor:
        """[n, h] numbers that messages of updates [n, d] show without noise, such as a norm; differentiable.

        h is small; numbers that encode coordinates belong to `likelihood` instead.
        """
        return updates.new_zeros(len(updates), 0)

    def sent_in_clear(self, received: Sequence[bytes], setting: Setting) -> Tensor:
        """[n, h] float64: the numbers of `in_clear`, read from n messages; this needs no key.

        Raises:
            MessageError: the bytes are not a message of this defense.
        """
        return torch.empty(len(received), 0, dtype=torch.float64)

    def error_variance(self, state: S, received: Sequence[bytes], links: Links) -> Tensor | None:
        """[n, d] the variance of each coordinate given its message, for messages without Fisher information.

        A law whose support moves with the update, such as a uniform error, has no Fisher information. `inf`: the
        coordinate was not sent. None: the messages have Fisher information, the mean square of the slope of
        `likelihood`.

        Args:
            links: as for `likelihood`.
        """
        return None

    def law(self, state: S, memory: M, update: Vector, link: Link) -> Law | None:
        """The law of the message that `encode` sends for this update, as under Guarantees; None: none is stated.

        An audit tests the bytes against this law. For analog messages that do not superpose, it is the law of the
        received messages.

        Args:
            memory: the client's memory before this message.
        """
        return None

    def step_law(self, setting: Setting) -> StepLaw | None:
        """The law of a local step, for a record-level defense; None: local steps are ordinary SGD.

        It is stated apart from `local` and `step_noise`, because an audit tests these two against it.
        """
        return None

    def aggregate_law(self, state: S, updates: Sequence[Vector], links: Links) -> Law | None:
        """The law, given all updates of a round, of the received sum if messages superpose, else of the decoded mean.

        None: this law follows from those of the messages. The mean is read as float32.
        """
        return None

    def quieter(self) -> Defense[S, M] | None:
        """This defense with the least noise it allows, to audit the numbers under the noise; None: not stated."""
        return None

    def gauges(self, state: S, setting: Setting) -> dict[str, float]:
        """Public numbers of a round's state that a training records by round; by default none."""
        return {}

    def breaches(self, updates: Sequence[Vector], links: Links, lr: float) -> dict[str, Breach]:
        """How often one round breaks the assumptions of the claim, by their texts in `Claim.assumes`.

        A training adds up the counts of its rounds. Assumptions about a secret, about trust or about a choice have no
        count, because no message shows them. The training itself counts `EVERY_ROUND`.

        Args:
            updates: one [d] per sender, as `encode` receives them; not modified.
            links: without shared keys.
            lr: the learning rate of the round.
        """
        return {}

    def claim(self, history: Sequence[S], setting: Setting) -> Claim:
        """The claim for the rounds whose states are in `history`, one state per round; by default no promise."""
        return nothing_promised(len(history), f"{type(self).__name__} states no claim.")

    def parameters(self) -> dict[str, Any]:
        """The hyper-parameters, defaults included."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def likelihood_of(defense: Defense[Any, Any], state: Any, received: Sequence[bytes], links: Links) -> Likelihood:
    """The defense's likelihood.

    Raises:
        NoLikelihood: the defense states none, or returns something that is not a function.
    """
    found: Any = defense.likelihood(state, received, links)
    if not callable(found):
        name = type(defense).__name__
        raise NoLikelihood(f"expected a function of updates from {name}.likelihood, got {found!r}")
    score: Likelihood = found
    return score


def claim_of(defense: Defense[Any, Any], history: Sequence[Any], setting: Setting) -> Claim:
    """The defense's claim.

    Raises:
        ValueError: `Defense.claim` returns something that is not a `Claim`.
    """
    found: object = defense.claim(history, setting)
    if not isinstance(found, Claim):
        name = type(defense).__name__
        raise ValueError(f"expected a Claim from {name}.claim, got {found!r}; without `claim` nothing is promised")
    return found


class Snapshot(NamedTuple):
    """The model from which all clients train in a round, and the defense's public state in that round."""

    round: int
    params: Vector
    state: Any


class Message(NamedTuple):
    """One message as it crossed the wire. `shared` is None for an adversary without the key.

    images, steps: distinct images and SGD steps behind the message; both are public, like the clients' sizes.
    others: the remaining senders, if the channel added up several updates. `images` then counts all senders' images; in
        a probe every sender has the same number of images.
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
        """Number of clients whose updates this message holds."""
        return 1 + len(self.others)


def links_of(setting: Setting, messages: Sequence[Message]) -> Links:
    """The links of several messages as an adversary sees them; with shared keys only if it holds all of them."""
    keys = [message.shared for message in messages if message.shared is not None]
    senders = [message.sender for message in messages]
    return Links(setting, senders, keys if len(keys) == len(messages) else None)


class Sighting(NamedTuple):
    """The victims' messages of one round, the model from which they trained, and the learning rate."""

    messages: tuple[Message, ...]
    model: Snapshot
    lr: float


@dataclass(frozen=True)
class Observation:
    """All that one adversary sees. A field is None if this adversary does not see it.

    Attributes:
        lr: learning rate of the attacked round, the first one if there are several.
        messages: the victims' messages of that round; for membership, all clients' messages.
        model: the model of that round; needs `models`.
        later: messages, model and learning rate of the later attacked rounds, with the same victims and images; empty
            if one round is attacked.
        models: the models of all rounds that were kept.
        final: the parameters after the last round.
        auxiliary: data of the same kind that belong to no victim and are not candidates.
        candidates: the records whose membership is in question, in random order.
        suspect: the client in whose data membership is in question; None: in any client's data.
        others: data of the clients that are not attacked, by client number, without the victims' rows.
        labels: the labels of each victim's images, sorted; only if granted.
        device: where the adversary searches and trains; all tensors of the observation are on the CPU.
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
    device: str = "cpu"

    @property
    def sightings(self) -> tuple[Sighting, ...]:
        """All attacked rounds, for an attack that needs messages and models."""
        assert self.messages is not None
        assert self.model is not None
        return (Sighting(self.messages, self.model, self.lr), *self.later)

    def placed(self) -> Observation:
        """The same with the parameters of the attacked rounds on the device, for a search."""

        def there(model: Snapshot) -> Snapshot:
            return model._replace(params=moved(model.params, self.device))

        later = tuple(sighting._replace(model=there(sighting.model)) for sighting in self.later)
        return dataclasses.replace(self, model=None if self.model is None else there(self.model), later=later)

    def double(self) -> Observation:
        """The same with the attacked rounds' models and auxiliary data in double precision, for a search.

        A search carries the last digits of single precision on, so that it may end at other inputs on another
        processor.
        """

        def exact(model: Snapshot) -> Snapshot:
            return model._replace(params=model.params.double())

        later = tuple(sighting._replace(model=exact(sighting.model)) for sighting in self.later)
        auxiliary = None if self.auxiliary is None else self.auxiliary.double()
        model = None if self.model is None else exact(self.model)
        return dataclasses.replace(self, model=model, later=later, auxiliary=auxiliary)

    def of(self, victims: range) -> Observation:
        """The observation restricted to some victims, numbered by their messages."""

        def part(messages: tuple[Message, ...]) -> tuple[Message, ...]:
            return tuple(messages[i] for i in victims)

        return dataclasses.replace(
            self,
            messages=None if self.messages is None else part(self.messages),
            later=tuple(sighting._replace(messages=part(sighting.messages)) for sighting in self.later),
            labels=None if self.labels is None else tuple(self.labels[i] for i in victims),
        )


class Guess(NamedTuple):
    """An attack's result for one victim. `failure` is empty, or states why there is no usable reconstruction.

    x: [b, *input_shape]; y: [b] int64, or targets of a regression; objective: the attacker's objective, by which it
    chose among its restarts.
    """

    x: Tensor
    y: Tensor
    objective: float
    evaluations: int
    failure: str = ""


class Reconstruction(NamedTuple):
    """One guess per victim, in the order of the messages; `prior`: the attack's assumption about inputs, in words."""

    guesses: tuple[Guess, ...]
    prior: str = ""


class Labels(NamedTuple):
    """[b] int64 labels per victim, in the order of the messages; the order within a victim carries no information."""

    labels: tuple[Tensor, ...]


class Membership(NamedTuple):
    """[n] scores, one per candidate; a higher score means more likely a member."""

    scores: Tensor


@dataclass(frozen=True)
class Attack(ABC):
    """A frozen dataclass whose fields are its parameters; concrete classes are final."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    kind: ClassVar[str]
    """`reconstruction`, `labels` or `membership`."""

    floor: ClassVar[bool] = False
    """Whether it uses nothing that the defense protects; it is then a control, not an attack."""

    @property
    def aware(self) -> bool:
        """Whether it uses its knowledge of the defense."""
        return False

    @property
    @abstractmethod
    def needs(self) -> frozenset[str]:
        """Names of what the adversary must see: entries of `SEES`, or grants."""

    def broadcast(self, seen: Observation, key: Key) -> Vector:
        """The parameters [d] that the server broadcasts in an attacked round, for an attack that needs `broadcast`.

        Args:
            seen: what the server knows before the round: the honest model, auxiliary data, candidates; no message.
            key: the key of `run`, the same in every round.

        Raises:
            ValueError: the attack has no such parameters for this task.
        """
        raise NotImplementedError(f"{type(self).__name__} broadcasts nothing")

    def at_once(self, dim: int) -> int | None:
        """How many victims one `run` takes if the model has `dim` parameters; None: all victims of a target.

        A target with more victims is split into groups of this size, in order, perhaps on several workers: `run` sees
        one group and must not need the others. On an accelerator, groups are larger.
        """
        return None

    @abstractmethod
    def run(self, seen: Observation, key: Key) -> Reconstruction | Labels | Membership:
        """Attack an observation. If the attack diverges on a victim, its guess has a `failure`; nothing is raised."""

    def parameters(self) -> dict[str, Any]:
        """The parameters, defaults included."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
