"""The contract of a defense: three protocols, the values that they exchange, and defenses that wrap another one.

A defense has a client half and a server half; only bytes pass between them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from leakgauge.harness.core.claim import Arithmetic, Claim, Horizon, Proof, Violation, nothing_promised
from leakgauge.harness.core.distribution import MessageDistribution, StepDistribution
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout, Parts, Vector, weighted_mean

S = TypeVar("S")
M = TypeVar("M")


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
        optimizer, weight_decay, proximal, participation, server_optimizer, server_momentum, server_lr: see
            `FederationSpec`.
        equal: whether a round's mean is planned with equal weights and of U messages: clients have the same number of
            samples, and no number of messages is random.
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
    optimizer: str = "sgd"
    weight_decay: float = 0.0
    proximal: float = 0.0
    participation: str = "drawn"
    server_optimizer: str = "sgd"
    server_momentum: float = 0.0
    server_lr: float = 1.0
    equal: bool = True

    @property
    def groups(self) -> int:
        """The number of groups of clients that take turns; 1: clients do not."""
        return self.clients // self.participants if self.participation == "turns" else 1

    @property
    def turns(self) -> int:
        """The largest number of rounds in which one client takes part."""
        return -(-self.rounds // self.groups)

    @property
    def share(self) -> float:
        """The probability that a client takes part in a round, for whoever does not know; 1 if clients take turns."""
        return 1.0 if self.participation == "turns" else self.participants / self.clients

    @property
    def of_one_client(self) -> Setting:
        """The rounds in which one client takes part, and the clients of these rounds."""
        if self.groups == 1:
            return self
        return dataclasses.replace(self, clients=self.participants, rounds=self.turns, participation="drawn")

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
        prune: share of the nonzero entries of each record's representation, the input of the last dense layer, that are
            left out of the gradient of this layer's weight (`learn.pruning`); 0: none.
        bottleneck: the model gets a variational bottleneck of this width before its last dense layer
            (`Structure.bottlenecked`); 0: none.
        divergence: weight of the bottleneck's divergence in the loss, per bit.
    """

    clip: float | None = None
    full_batch: bool = False
    poisson: bool = False
    prune: float = 0.0
    bottleneck: int = 0
    divergence: float = 0.0


class Likelihood(Protocol):
    """-log p(received | update) up to a constant, differentiable in the update."""

    def __call__(self, update: Tensor) -> Tensor:
        """[n] scores of update [n, d], one candidate for each of n received messages.

        If the channel superposes messages, update is [n, users, d]: the updates that it added up in each message.
        The update may be on an accelerator; the tensors that the function holds are then copied there (`core.device`).
        """


class Apart(NamedTuple):
    """A likelihood as a sum: of the numbers that a message hides, and of those of `plaintext_statistic`, softened."""

    hidden: Callable[[Tensor], Tensor]
    clear: Callable[[Tensor], Tensor]

    def __call__(self, update: Tensor) -> Tensor:
        """The sum [n]."""
        return self.hidden(update) + self.clear(update)


class Feedback(NamedTuple):
    """The public facts after a round: test losses of the model before and after it (None: not evaluated)."""

    round: int
    before: float | None
    after: float | None


class Mechanism(ABC, Generic[S, M]):
    """What happens to an update between the client and the mean; S and M are as in `Defense`."""

    randomized: ClassVar[bool] = True
    """Whether two encodings of one update under one shared key can differ."""

    analog: ClassVar[bool] = False
    """Whether a message is a waveform (one real number per channel use) instead of bits."""

    superposes: ClassVar[bool] = False
    """Whether the channel adds up all messages of a round, so that only the sum arrives."""

    correlates: ClassVar[bool] = False
    """Whether the server's noise depends on that of earlier rounds: the server's key is then that of the whole run."""

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
            private: the server's own key of this round; no one else knows it. With `correlates`, it is the same key in
                every round, and `state` has to tell the rounds apart.
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


class Evidence(Generic[S, M]):
    """What messages show: their likelihood for adversaries that know the defense, and their distribution for audits."""

    def likelihood(self, state: S, received: Sequence[bytes], links: Links) -> Likelihood:
        """The likelihood of candidate updates for an adversary that knows this defense, for n messages at once.

        Args:
            links: `links.shared` is None for an outsider without the shared keys.

        Raises:
            NoLikelihood: the defense states none (the default): attacks that need a likelihood are refused, others run.
        """
        raise NoLikelihood(f"{type(self).__name__} states no likelihood, which this needs; write `likelihood`")

    def exact_likelihood(self, state: S, received: Sequence[bytes], links: Links) -> Likelihood:
        """The likelihood for tests between given updates, as `likelihood`, which may be smoothed for searches."""
        return self.likelihood(state, received, links)

    def plaintext_statistic(self, updates: Tensor, setting: Setting) -> Tensor:
        """[n, h] numbers that messages of updates [n, d] show without noise, such as a norm; differentiable.

        h is small; numbers that encode coordinates belong to `likelihood` instead.
        """
        return updates.new_zeros(len(updates), 0)

    def read_plaintext_statistic(self, received: Sequence[bytes], setting: Setting) -> Tensor:
        """[n, h] float64: the numbers of `plaintext_statistic`, read from n messages; this needs no key.

        Raises:
            MessageError: the bytes are not a message of this defense.
        """
        return torch.empty(len(received), 0, dtype=torch.float64)

    def error_variance(self, state: S, received: Sequence[bytes], links: Links) -> Tensor | None:
        """[n, d] the variance of each coordinate given its message, for messages without Fisher information.

        A distribution whose support moves with the update, such as a uniform error, has no Fisher information. `inf`:
        the coordinate was not sent. None: the messages have Fisher information, the mean square of the slope of
        `likelihood`.

        Args:
            links: as for `likelihood`.
        """
        return None

    def message_distribution(self, state: S, memory: M, update: Vector, link: Link) -> MessageDistribution | None:
        """The distribution of the message that `encode` sends for this update, as under Guarantees; None: none is
        stated.

        An audit tests the bytes against this distribution. For analog messages that do not superpose, it is the
        distribution of the received messages.

        Args:
            memory: the client's memory before this message.
        """
        return None

    def step_distribution(self, setting: Setting) -> StepDistribution | None:
        """The distribution of a local step, for a record-level defense; None: local steps are ordinary SGD.

        It is stated apart from `local` and `step_noise`, because an audit tests these two against it.
        """
        return None

    def aggregate_distribution(self, state: S, updates: Sequence[Vector], links: Links) -> MessageDistribution | None:
        """The distribution, given all updates of a round, of the received sum if messages superpose, else of the
        decoded mean.

        None: this distribution follows from those of the messages. The mean is read as float32.
        """
        return None

    def independent(
        self, history: Sequence[S], rounds: Sequence[MessageDistribution], setting: Setting
    ) -> Sequence[MessageDistribution] | None:
        """For a defense that `correlates`: independent parts to which all rounds together are equivalent.

        Args:
            rounds: the distribution of each round alone.

        Returns:
            As many parts as rounds; None: they are unknown, and so is the privacy loss over the rounds.
        """
        return None

    def settled(self, setting: Setting) -> dict[str, int]:
        """The parameters that follow from the federation, for an audit in a federation of another size."""
        return {}

    def state_metrics(self, state: S, setting: Setting) -> dict[str, float]:
        """Public numbers of a round's state that a training records by round; by default none."""
        return {}


class Guarantee(Generic[S, M]):
    """What a defense promises, and what an audit needs to check it."""

    relies: ClassVar[str] = ""
    """The assumption of the claim that fails if a participant sends nothing in a round; empty: none does."""

    promises: ClassVar[Horizon] = Horizon.ONE_ROUND
    """The horizon for which the source states its epsilon."""

    arithmetic: ClassVar[Arithmetic] = Arithmetic.REALS
    """The numbers for which the proofs of the claim hold; may be a property. Messages of levels, indices or integers
    are `ROUNDING_SAFE` if they hold no float of the update, such as a norm, and no noise is added later, as to a mean.
    """

    def claim(self, history: Sequence[S], setting: Setting) -> Claim:
        """The claim for the rounds whose states are in `history`, one state per round; by default no promise."""
        return nothing_promised(len(history), f"{type(self).__name__} states no claim.")

    def summed_proof(self, history: Sequence[S], setting: Setting, senders: int) -> Proof | None:
        """The proof for an update instead of zero, if only a sum of so many messages is seen, each with its own noise.

        All messages have the same weight. `claim_of` sets unit, relation and adversaries of the proof, which joins
        those of `claim`, unless a subclass changes what is sent or decoded. None: nothing more is proved than for a
        message that is seen alone.
        """
        return None

    def violations(self, updates: Sequence[Vector], links: Links, lr: float) -> dict[str, Violation]:
        """How often one round breaks the assumptions of the claim, by their texts in `Claim.assumes`.

        A training adds up the counts of its rounds. Assumptions about a secret, about trust or about a choice have no
        count, because no message shows them. The training itself counts `EVERY_ROUND`.

        Args:
            updates: one [d] per sender, as `encode` receives them; not modified.
            links: without shared keys.
            lr: the learning rate of the round.
        """
        return {}

    def low_noise_variant(self) -> Defense[S, M] | None:
        """This defense with the least noise it allows, to audit the numbers under the noise; None: not stated."""
        return None


class OnTensors(ABC):
    """A defense of one record in a batch that acts on tensors of its own: what an audit looks at besides."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """The tensors."""

    @property
    @abstractmethod
    def looked_at(self) -> str:
        """What an audit saw of it, as the end of a sentence."""

    @abstractmethod
    def records(self, sender: Sender) -> int:
        """The records behind a message of this client."""


@dataclass(frozen=True)
class Defense(Mechanism[S, M], Evidence[S, M], Guarantee[S, M]):
    """A mechanism, its evidence and its guarantee: a frozen dataclass whose fields are its hyper-parameters.

    Only `encode` and `estimate` must be written. Concrete classes are final. S is the type of the public state, M that
    of a client's memory, which never leaves the client.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def parameters(self) -> dict[str, Any]:
        """The hyper-parameters, defaults included."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


class Wrapper(Defense[S, M]):
    """A defense around another one, which defines, delegates or refuses each member of `Defense`, or keeps its default.

    So no forgotten member silently has its default. A delegated method calls only methods of the wrapped defense, never
    what the wrapper changes. Members are listed by name, separated by spaces.

    Raises:
        TypeError: a class is created with members that are forgotten, unknown or given twice.
    """

    delegated: ClassVar[str] = ""
    """Members that are those of `wrapped`."""

    default: ClassVar[str] = ""
    """Members that are as in `Defense`."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Members without a meaning, with the reason; reading one raises NotImplementedError."""

    @property
    @abstractmethod
    def wrapped(self) -> Defense[Any, Any]:
        """The defense that the delegated members belong to."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Wrapper not in cls.__bases__:
            return  # it derives from a wrapper, which has all members
        members = {name for base in Defense.__mro__ for name in vars(base) if not name.startswith("_")}
        refused = {name: why for names, why in cls.refused.items() for name in names.split()}
        given = [*(vars(cls).keys() & members), *cls.delegated.split(), *cls.default.split(), *refused]
        if wrong := sorted(name for name in members | {*given} if given.count(name) != (name in members)):
            raise TypeError(f"expected {cls.__name__} to define or list each member of Defense once, not {wrong}")
        for name in cls.delegated.split():
            setattr(cls, name, property(attrgetter(f"wrapped.{name}")))
        for name, why in refused.items():
            setattr(cls, name, property(partial(_refuse, name, why)))


def _refuse(name: str, why: str, wrapper: object) -> NoReturn:
    raise NotImplementedError(f"{type(wrapper).__name__} has no {name}: {why}")
