"""The interfaces of model, defense, adversary and attack, and the messages between them.

A defense has a client half and a server half; only bytes pass between them. An `Observation` is all that one adversary
sees. It is built in one place (`harness.federation.observe`) from one table (`SEES`). An attack is a function of an
observation and a key; it never sees the truth.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from leakgauge.harness.core.defense import Apart as Apart
from leakgauge.harness.core.defense import Defense as Defense
from leakgauge.harness.core.defense import Feedback as Feedback
from leakgauge.harness.core.defense import Likelihood as Likelihood
from leakgauge.harness.core.defense import Link as Link
from leakgauge.harness.core.defense import Links as Links
from leakgauge.harness.core.defense import LocalRule as LocalRule
from leakgauge.harness.core.defense import OnTensors as OnTensors
from leakgauge.harness.core.defense import Sender as Sender
from leakgauge.harness.core.defense import Setting as Setting
from leakgauge.harness.core.device import moved
from leakgauge.harness.core.form import ALL, CONTINUOUS, Form
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.statements import claim_of as claim_of
from leakgauge.harness.core.statements import likelihood_of as likelihood_of
from leakgauge.harness.core.statements import log_likelihoods as log_likelihoods
from leakgauge.harness.core.threats import View
from leakgauge.harness.core.vec import Layout, Vector


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
        """Number of scores: of label classes, or of the numbers of a label."""

    @property
    def numbers(self) -> bool:
        """Whether the label is a number for each score, not a class."""

    @property
    def softmax(self) -> bool:
        """Whether the loss is softmax cross-entropy, without weights and smoothing."""

    @property
    def separable(self) -> bool:
        """Whether the loss of a batch is the mean of its records' losses."""

    @property
    def linked(self) -> bool:
        """Whether a record's gradient in its scores is `slope` (`link`(scores) - target), times its label's weight."""

    @property
    def bounded(self) -> bool:
        """Whether `link` is above 0, so that a negative entry of that gradient proves a label."""

    @property
    def balanced(self) -> bool:
        """Whether the entries of that gradient sum to 0."""

    @property
    def slope(self) -> float:
        """See `linked`."""

    def weights(self, labels: Tensor) -> Tensor:
        """See `linked`: [...] of class labels [...]."""

    def link(self, scores: Tensor) -> Tensor:
        """See `linked`: [..., classes] of the scores [..., classes]."""

    @property
    def smooth(self) -> bool:
        """Whether the scores are known to be a smooth function of the inputs (False with ReLU or max-pooling)."""

    @property
    def form(self) -> Form:
        """What an input is: an image, a table row, a series, tokens."""

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

        x is [b, *input_shape]; the labels y are [b], or targets [b, classes].
        """


class Examples(NamedTuple):
    """x: [n, *input_shape] float32, see `core.form`; y: [n] int64, or float32 numbers [n] or [n, k]."""

    x: Tensor
    y: Tensor

    def on(self, device: torch.device | str) -> Examples:
        """The examples on a device."""
        return Examples(moved(self.x, device), moved(self.y, device))

    def double(self) -> Examples:
        """The examples in double precision; labels stay whole numbers."""
        return Examples(self.x.double(), self.y.double() if self.y.is_floating_point() else self.y)


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


class ObservedRound(NamedTuple):
    """The victims' messages of one round, the model from which they trained, and the learning rate."""

    messages: tuple[Message, ...]
    model: Snapshot
    lr: float


class Marked(NamedTuple):
    """A property of records. has: [n] bool, which auxiliary records have it; share: the larger share of victims."""

    has: Tensor
    share: float


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
        lineups: for each victim and each record in question, its candidates in random order, all of one label; only if
            granted.
        mates: for each victim, the other records of its message; only if granted.
        marked: the property that many or few of a victim's records have; None: none is in question.
        device: where the adversary searches and trains; all tensors of the observation are on the CPU.
    """

    view: View
    setting: Setting
    task: Task
    defense: Defense[Any, Any]
    lr: float
    messages: tuple[Message, ...] | None = None
    model: Snapshot | None = None
    later: tuple[ObservedRound, ...] = ()
    models: tuple[Snapshot, ...] | None = None
    final: Vector | None = None
    auxiliary: Examples | None = None
    candidates: Examples | None = None
    suspect: int | None = None
    others: Mapping[int, Examples] | None = None
    labels: tuple[Tensor, ...] | None = None
    lineups: tuple[tuple[Examples, ...], ...] | None = None
    mates: tuple[Examples, ...] | None = None
    marked: Marked | None = None
    device: str = "cpu"

    @property
    def observed_rounds(self) -> tuple[ObservedRound, ...]:
        """All attacked rounds, for an attack that needs messages and models."""
        assert self.messages is not None
        assert self.model is not None
        return (ObservedRound(self.messages, self.model, self.lr), *self.later)

    def placed(self) -> Observation:
        """The same with the parameters of the attacked rounds on the device, for a search."""
        return self._with_params(lambda params: moved(params, self.device))

    def double(self) -> Observation:
        """The same with the attacked rounds' models and auxiliary data in double precision, for a search.

        A search carries the last digits of single precision on, so that it may end at other inputs on another
        processor.
        """
        auxiliary = None if self.auxiliary is None else self.auxiliary.double()
        lineups = self.lineups and tuple(tuple(lineup.double() for lineup in each) for each in self.lineups)
        mates = self.mates and tuple(each.double() for each in self.mates)
        exact = self._with_params(Tensor.double)
        return dataclasses.replace(exact, auxiliary=auxiliary, lineups=lineups, mates=mates)

    def _with_params(self, change: Callable[[Vector], Vector]) -> Observation:
        def changed(model: Snapshot) -> Snapshot:
            return model._replace(params=change(model.params))

        later = tuple(observed._replace(model=changed(observed.model)) for observed in self.later)
        return dataclasses.replace(self, model=None if self.model is None else changed(self.model), later=later)

    def of(self, victims: range) -> Observation:
        """The observation restricted to some victims, numbered by their messages."""

        def part(messages: tuple[Message, ...]) -> tuple[Message, ...]:
            return tuple(messages[i] for i in victims)

        return dataclasses.replace(
            self,
            messages=None if self.messages is None else part(self.messages),
            later=tuple(observed._replace(messages=part(observed.messages)) for observed in self.later),
            labels=None if self.labels is None else tuple(self.labels[i] for i in victims),
            lineups=None if self.lineups is None else tuple(self.lineups[i] for i in victims),
            mates=None if self.mates is None else tuple(self.mates[i] for i in victims),
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


class Candidates(NamedTuple):
    """Log likelihoods of the candidates of one record, up to a common constant; float64.

    scores: [k], in the order of the lineup; references: [r], of other records of the label, which are no candidates.
    fits: [k], by how much the message is likelier than messages of the adversary's own that carry the candidate; NaN
        for all but the two likeliest candidates.
    """

    scores: Tensor
    references: Tensor
    fits: Tensor


class Named(NamedTuple):
    """For each victim, the candidates of each of its records in question.

    exact: whether the scores are the log likelihoods of the whole message; otherwise a better test may exist.
    """

    records: tuple[tuple[Candidates, ...], ...]
    exact: bool

    @property
    def among(self) -> int:
        """The number of candidates in the smallest lineup."""
        return min(len(candidates.scores) for each in self.records for candidates in each)


class Traced(NamedTuple):
    """[n, clients] float64: how likely each client is behind each of n records, or of n messages of later rounds.

    A client has its number, or the place of its message in the first attacked round.
    """

    scores: Tensor


Answer = Reconstruction | Labels | Membership | Named | Traced
"""What an attack returns."""


@dataclass(frozen=True)
class Attack(ABC):
    """A frozen dataclass whose fields are its parameters; concrete classes are final."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    kind: ClassVar[str]
    """`reconstruction`, `labels`, `membership`, `lineup`, `source`, `linkability` or `property`."""

    floor: ClassVar[bool] = False
    """Whether it uses nothing that the defense protects; it is then a control, not an attack."""

    @property
    def aware(self) -> bool:
        """Whether it uses its knowledge of the defense."""
        return False

    @property
    def forms(self) -> frozenset[str]:
        """Names of the forms of inputs that it reads; a reconstruction reads numbers, if it does not say otherwise."""
        return CONTINUOUS if self.kind == "reconstruction" else ALL

    @property
    def forges(self) -> bool:
        """Whether a participant with the grant `craft` sends bytes of its own choice, not what the defense encodes."""
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
    def run(self, seen: Observation, key: Key) -> Answer:
        """Attack an observation. If the attack diverges on a victim, its guess has a `failure`; nothing is raised."""

    def parameters(self) -> dict[str, Any]:
        """The parameters, defaults included."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
