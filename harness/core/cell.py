"""What is asked: tasks, federations, defenses, attacks and targets as plain frozen data, and their names.

An id is a fingerprint of the meaning: the same question has the same id in every study.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Scalar = str | int | float | bool | None
_STRICT = {"extra": "forbid"}


def canonical(data: Any) -> str:
    """JSON with sorted keys and no spaces: one text for one value.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def fingerprint(data: Any, digits: int = 16) -> str:
    """The first `digits` hex digits of SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()[:digits]


@dataclass(frozen=True)
class TaskSpec:
    """Data set and model, by name.

    Attributes:
        data: `digits`, `photos`, `mnist`, ...; `folder:PATH` or `npz:PATH` for a user's own.
        model: `mlp-small`, `lenet-dlg`, ... (see `leakgauge list tasks`).
        init: `default`, or `dlg`: weights and biases uniform in +-0.5 (Zhu et al. 2019).
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    data: str
    model: str
    init: Literal["default", "dlg"] = "default"


@dataclass(frozen=True)
class FederationSpec:
    """The federated loop: who takes part, how long, and how a client trains.

    Attributes:
        clients: K, how many hold data.
        participants: U of them, chosen anew each round; None means all.
        rounds: communication rounds.
        algorithm: `fedavg` sends the update after local training, `fedsgd` the gradient of one batch.
        partition: `iid`, `shards` (label shards), `dirichlet`, `unbalanced` (log-normal sizes).
        alpha: concentration of `dirichlet`.
        shards: label shards a client, for `shards`.
        imbalance: standard deviation of the log of the sizes, for `unbalanced`.
        samples: training samples used in all; None means all that there are.
        local_steps: SGD steps a round; not together with local_epochs.
        local_epochs: passes over the local data a round.
        batch: samples a step; 0 means all of the client's.
        lr: learning rate at round 0.
        momentum: of the local SGD, reset each round.
        schedule: `constant`; `inverse`: lr / (1 + decay * round); `plateau`: times `decay` after `patience` evaluations
            without a lower test loss.
        decay: of the schedule.
        patience: of `plateau`.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        test_samples: size of the test set that is used; None means all.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    clients: int = 10
    participants: int | None = None
    rounds: int = 20
    algorithm: Literal["fedavg", "fedsgd"] = "fedavg"
    partition: Literal["iid", "shards", "dirichlet", "unbalanced"] = "iid"
    alpha: float = 0.5
    shards: int = 2
    imbalance: float = 0.5
    samples: int | None = None
    local_steps: int | None = None
    local_epochs: int | None = None
    batch: int = 32
    lr: float = 0.1
    momentum: float = 0.0
    schedule: Literal["constant", "inverse", "plateau"] = "constant"
    decay: float = 0.1
    patience: int = 10
    evaluate_every: int = 1
    test_samples: int | None = None

    def __post_init__(self) -> None:
        positive = ["clients", "rounds", "alpha", "shards", "lr", "decay", "patience", "evaluate_every"]
        optional = ["participants", "samples", "local_steps", "local_epochs", "test_samples"]
        for name in positive + [name for name in optional if getattr(self, name) is not None]:
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"expected {name} > 0, got {name}={getattr(self, name)}")
        if self.participants is not None and self.participants > self.clients:
            raise ValueError(
                f"expected participants <= clients, got participants={self.participants} and clients={self.clients}"
            )
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("expected local_steps or local_epochs, got both")
        if self.algorithm == "fedsgd" and (self.local_epochs is not None or (self.local_steps or 1) != 1):
            raise ValueError("expected no local_steps and no local_epochs with fedsgd: it sends one batch's gradient")
        if self.algorithm == "fedsgd" and self.momentum != 0:
            raise ValueError(f"expected momentum=0 with fedsgd: a single gradient has none, got {self.momentum}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"expected 0 <= momentum < 1, got momentum={self.momentum}")
        if self.batch < 0:
            raise ValueError(f"expected batch >= 0 (0: all), got batch={self.batch}")
        if not (self.imbalance >= 0 and math.isfinite(self.imbalance)):
            raise ValueError(f"expected imbalance >= 0, got imbalance={self.imbalance}")


@dataclass(frozen=True)
class PartSpec:
    """A defense or an attack: its name and all its parameters, defaults included."""

    name: str
    parameters: dict[str, Scalar] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """`name(key=value, ...)`, the keys in alphabetical order: the same before and after a file of sorted JSON."""
        inside = ", ".join(f"{key}={value}" for key, value in sorted(self.parameters.items()) if value is not None)
        return f"{self.name}({inside})" if inside else self.name


@dataclass(frozen=True)
class Target:
    """Where an attack looks.

    Attributes:
        kind: `probe`: `count` victims, each with a batch of its own, sent through the encode path at `round`;
            `messages`: the first `count` participants of the real round (by client number);
            `members`: `count` training records against `outside` that took no part.
        round: of `probe` and `messages` (default 0). Of `members` None: no message is looked at.
        count: victims, or records a side.
        batch: images of a victim, for `probe`.
        rounds: looked at one after another, from `round` on; the victims send the same images in each. Of `messages`
            only where every round takes all of a client's samples; of `members`, everybody's messages in each.
        users: for `probe`, clients that send at once. A channel that superposes delivers `count` sums of so many
            messages, the remaining clients being silent, as for an adversary who knows their data; of another defense
            these are `count` times `users` victims, of the same images.
        client: for `members`, in whose data membership is asked; None: in anybody's.
        outside: for `members`, how many took no part; None: as many as `count`.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    kind: Literal["probe", "messages", "members"] = "probe"
    round: int | None = None
    count: int = 8
    batch: int = 1
    rounds: int = 1
    users: int = 1
    client: int | None = None
    outside: int | None = None

    def __post_init__(self) -> None:
        members = self.kind == "members"
        if self.round is None and not members:
            object.__setattr__(self, "round", 0)
        if self.round is None and self.rounds != 1:
            raise ValueError("expected a round to start from with rounds")
        if not members and (self.client, self.outside) != (None, None):
            raise ValueError(f"expected no client and no outside with kind={self.kind!r}")
        for name in ("round", "client"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"expected {name} >= 0, got {name}={getattr(self, name)}")
        for name in ("count", "batch", "rounds", "users"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {name}={getattr(self, name)}")
        if self.outside is None:
            object.__setattr__(self, "outside", self.count if members else None)
        elif self.outside < 1:
            raise ValueError(f"expected outside >= 1, got outside={self.outside}")
        if self.kind != "probe" and (self.batch, self.users) != (1, 1):
            raise ValueError(f"expected no batch and no users with kind={self.kind!r}: they are what they are")

    @property
    def looks_at(self) -> range:
        """The rounds whose messages and models are looked at."""
        return range(0) if self.round is None else range(self.round, self.round + self.rounds)

    @property
    def images(self) -> int:
        """Of a probe, how many images are behind all its messages."""
        return self.count * self.users * self.batch


@dataclass(frozen=True)
class TrainingSpec:
    """One federated training: shared by every attack on it.

    Attributes:
        audit: trials with each of two inputs, of an audit of the defense by itself; 0: none.
    """

    task: TaskSpec
    federation: FederationSpec
    defense: PartSpec
    seed: int
    audit: int = 0

    def __post_init__(self) -> None:
        if self.audit < 0:
            raise ValueError(f"expected audit >= 0 (0: none), got audit={self.audit}")

    @property
    def meaning(self) -> dict[str, Any]:
        """What the id is made of; without an audit as it was before there were any, so that old results are found."""
        data = dataclasses.asdict(self)
        if not self.audit:
            del data["audit"]
        return data

    @functools.cached_property
    def id(self) -> str:
        """Sixteen hex digits of SHA-256 of the canonical JSON."""
        return fingerprint(self.meaning)


@dataclass(frozen=True)
class Cell:
    """One question: this attack, by this adversary, on this training. Semantics only; how it runs is `Execution`."""

    training: TrainingSpec
    attack: PartSpec
    target: Target
    threat: str

    @functools.cached_property
    def id(self) -> str:
        """Sixteen hex digits of SHA-256 of the canonical JSON."""
        return fingerprint({**dataclasses.asdict(self), "training": self.training.meaning})

    @property
    def label(self) -> str:
        """For people: defense, attack, where, adversary, seed."""
        where = self.target.kind if self.target.round is None else f"{self.target.kind} at round {self.target.round}"
        return f"{self.training.defense.label} x {self.attack.name}, {where}, {self.threat}, seed {self.training.seed}"
