"""The questions of a study as frozen data: task, federation, defense, attack, target, and their ids.

An id is a fingerprint of the meaning: the same question has the same id in every study.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal

from leakgauge.harness.core.stored import PARAMETERS, fingerprint, to_data


class Size(StrEnum):
    """How much of a recipe runs: minutes, hours, or the experiment of the paper."""

    QUICK = "quick"
    STANDARD = "standard"
    PAPER = "paper"


Scalar = str | int | float | bool | None
_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class TaskSpec:
    """Data set and model, by name.

    Attributes:
        data: `digits`, `photos`, `mnist`, ...; for a user's own data `folder:PATH?size=64`, `npz:PATH?x=KEY&y=KEY`
            (options may be left out), `module:factory`, or `given:NAME` if it is registered in this process;
            `recording:DIR` for a training that ran elsewhere (see `federation.recording.load`).
        model: `mlp-small`, `lenet-dlg`, ... (see `leakgauge list tasks`); `module:factory`, `torchvision:NAME` or
            `given:NAME` for a user's own.
        init: `default`; `dlg`: weights and biases uniform in +-0.5 (Zhu et al. 2019); `zero`.
        inputs: `unit`: the model sees x, in [0, 1] for images; `centered`: it sees 2x - 1, like torchvision's
            `Normalize(.5, .5)`. Attacks recover x.
        loss: what clients minimize, as in `learn.losses.parse`: `cross-entropy?smoothing=0.1&weights=1,2`,
            `binary-cross-entropy`, `squared`, `hinge`, or `module:function`; empty: the model's own.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    data: str
    model: str
    init: Literal["default", "dlg", "zero"] = "default"
    inputs: Literal["unit", "centered"] = "unit"
    loss: str = ""


@dataclass(frozen=True)
class FederationSpec:
    """The federated loop: clients, rounds, and how a client trains.

    Attributes:
        clients: K, the number of clients with data.
        participants: U, the number of clients of each round; None means all.
        participation: `drawn`: exactly U clients are drawn for each round; `poisson`: each client is drawn by itself,
            with probability U / K; `turns`: clients are dealt into K / U groups of U clients, which take turns, so that
            each client takes part once if there are as many rounds as groups (the remaining clients never take part).
        dropout: probability that the message of a client that takes part never arrives.
        rounds: communication rounds.
        stop_after: rounds after which the training ends early, with the noise and the learning rates of all `rounds`.
        algorithm: `fedavg` sends the update after local training, `fedsgd` the gradient of one batch.
        partition: `iid`, `shards` (label shards), `labels` (as many labels for each client), `dirichlet`, `unbalanced`
            (log-normal sizes), `sizes` (given sizes).
        alpha, shards, labels, imbalance: concentration of `dirichlet`, label shards per client of `shards`, labels per
            client of `labels`, standard deviation of the log of the sizes of `unbalanced`.
        sizes: samples of the clients of `sizes`, repeated until each client has a size. In a study, a list of such
            lists.
        samples: training samples of all clients together; None means the whole training set.
        local_steps: SGD steps per round; excludes local_epochs.
        local_epochs: passes over the local data per round.
        batch: samples per step; 0 means all samples of the client.
        lr: learning rate at round 0.
        momentum: momentum of the local SGD, reset each round.
        optimizer: of the local steps; `adam` and `adamw` with torch's defaults, and new moments in each round.
        weight_decay: lambda; added to the gradient as lambda w, or with `adamw` subtracted from w as lr lambda w.
        proximal: mu of FedProx (Li et al. 2020), which adds mu/2 |w - w0|^2 to the loss; w0 is the round's first model.
        schedule: `constant`; `linear`: lr (1 - round / rounds); `inverse`: lr / (1 + decay * round); `plateau`: times
            `decay` after `patience` evaluations without a lower test loss.
        decay, patience: parameters of the schedule.
        server_optimizer, server_momentum, server_lr: how the server moves the model with the mean of a round (Reddi et
            al. 2021, Algorithm 2); `adam` with torch's defaults. A mean gradient moves it by lr server_lr, an update
            by server_lr.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        test_samples: test samples used; None means the whole test set.
        interim_samples: size of the subset of test samples for evaluations that are not final, not of an attacked
            round, and not read by a defense or schedule; 0 means all test samples.
        evaluate_on: `test`; `train`: all clients' own samples; `validation`: the held-out training samples.
            `test_samples` and `interim_samples` apply to each of them.
        validation: training samples that no client gets, for `evaluate_on`, and for defenses and schedules that read
            losses; `samples` counts the remaining ones.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    clients: int = 10
    participants: int | None = None
    participation: Literal["drawn", "poisson", "turns"] = "drawn"
    dropout: float = 0.0
    rounds: int = 20
    stop_after: int | None = None
    algorithm: Literal["fedavg", "fedsgd"] = "fedavg"
    partition: Literal["iid", "shards", "labels", "dirichlet", "unbalanced", "sizes"] = "iid"
    alpha: float = 0.5
    shards: int = 2
    labels: int = 1
    imbalance: float = 0.5
    sizes: tuple[int, ...] = ()
    samples: int | None = None
    local_steps: int | None = None
    local_epochs: int | None = None
    batch: int = 32
    lr: float = 0.1
    momentum: float = 0.0
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    weight_decay: float = 0.0
    proximal: float = 0.0
    schedule: Literal["constant", "linear", "inverse", "plateau"] = "constant"
    decay: float = 0.1
    patience: int = 10
    server_optimizer: Literal["sgd", "adam"] = "sgd"
    server_momentum: float = 0.0
    server_lr: float = 1.0
    evaluate_every: int = 1
    test_samples: int | None = None
    interim_samples: int = 1000
    evaluate_on: Literal["test", "train", "validation"] = "test"
    validation: int = 0

    def __post_init__(self) -> None:
        names = ["clients", "rounds", "alpha", "shards", "labels", "lr", "decay", "patience", "evaluate_every"]
        names += ["participants", "samples", "local_steps", "local_epochs", "test_samples", "server_lr", "stop_after"]
        for name in names:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"expected {name} > 0, got {name}={value}")
        if self.participants is not None and self.participants > self.clients:
            raise ValueError(
                f"expected participants <= clients, got participants={self.participants} and clients={self.clients}"
            )
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("expected local_steps or local_epochs, got both")
        if self.algorithm == "fedsgd" and (self.local_epochs is not None or (self.local_steps or 1) != 1):
            raise ValueError("expected no local_steps and no local_epochs with fedsgd: it sends one batch's gradient")
        self._check_optimizer()
        self._check_samples()
        for name in ("batch", "interim_samples", "imbalance", "validation", "weight_decay", "proximal"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"expected {name} >= 0, got {name}={getattr(self, name)}")

    @property
    def rounds_run(self) -> int:
        """The number of rounds that run."""
        return min(self.rounds, self.stop_after or self.rounds)

    def _check_optimizer(self) -> None:
        single = self.algorithm == "fedsgd"
        if single and self.momentum != 0:
            raise ValueError(f"expected momentum=0 with fedsgd: a single gradient has none, got {self.momentum}")
        for name in ("momentum", "server_momentum", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"expected 0 <= {name} < 1, got {name}={getattr(self, name)}")
        if self.server_optimizer == "adam" and self.server_momentum:
            raise ValueError(f"expected server_momentum=0 with server_optimizer=adam, got {self.server_momentum}")
        if self.optimizer != "sgd" and (self.momentum or single):
            raise ValueError(f"expected optimizer=sgd with momentum or fedsgd, got {self.optimizer}")
        if single and (self.weight_decay or self.proximal):
            raise ValueError("expected no weight_decay and no proximal with fedsgd: a single gradient has none")

    def _check_samples(self) -> None:
        if bool(self.sizes) != (self.partition == "sizes") or min(self.sizes, default=1) < 1:
            raise ValueError(f"expected sizes >= 1 with partition sizes, and none otherwise, got {list(self.sizes)}")
        if self.sizes and self.samples is not None:
            raise ValueError(f"expected no samples beside sizes, whose sum is used, got samples={self.samples}")
        if self.evaluate_on == "validation" and not self.validation:
            raise ValueError("expected validation > 0 with evaluate_on=validation, got validation=0")


@dataclass(frozen=True)
class PartSpec:
    """A defense or an attack: its name and its parameters, defaults included but for those of `stored.PARAMETERS`."""

    name: str
    parameters: dict[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        later = PARAMETERS.get(self.name, {})
        stated = {key: value for key, value in self.parameters.items() if key not in later or value != later[key]}
        object.__setattr__(self, "parameters", stated)

    @functools.cached_property
    def key(self) -> str:
        """The part as one text, `name(key=value, ...)` with sorted keys: equal parts have equal keys."""
        inside = ", ".join(f"{key}={value}" for key, value in sorted(self.parameters.items()) if value is not None)
        return f"{self.name}({inside})" if inside else self.name


@dataclass(frozen=True)
class Target:
    """The messages or records that an attack targets.

    Attributes:
        kind: `probe`: `count` victims, each with its own batch, whose messages are encoded like those of `round`;
            `messages`: the first `count` participants of the real round, by client number; if only the sum of their
            messages arrives, all of them as one victim;
            `members`: `count` training records against `outside` records that took no part; or which client holds each
            of the training records.
        round: the first attacked round (default 0). None, for `members` only: no message is attacked.
        count: number of victims, or of member records; 1 for a sum of `messages`.
        batch: images per victim, for `probe`.
        rounds: number of attacked rounds, from `round` on; the victims send the same images in each round. `messages`
            needs rounds that use all samples of a client. `members` attacks all clients' messages in each round.
        users: for `probe`, the number of clients that send at once. A channel that superposes delivers `count` sums of
            `users` messages each; the remaining clients are silent, because the adversary knows their data. With any
            other defense, the same images belong to `count` times `users` separate victims.
        client: for `members`, the client in whose data membership is in question; None: any client.
        outside: for `members`, the number of non-members; None: `count`.
        among: the number of candidates of a lineup, the true record included; fewer if its label has fewer records.
        skip: for `probe`, the records that are passed over because other victims have them; with fewer records than
            these and the victims, the last victims have them again, and with fewer than the victims, there are fewer.
        shuffled: for `probe`, whether the victims have new numbers in each later round, as behind a shuffler.
        property: for `probe`, a property of records (see `table.has_property`) that half of the victims have in the
            share `share` of their records, and half in the share 1 - `share`; all victims have the same labels.
        share: the larger share.
        victim_classes: names of the classes of the victims, members, non-members and candidates; empty: all. In a
            study, one name, or a list of lists.
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
    among: int = 100
    skip: int = 0
    shuffled: bool = False
    property: str = ""
    share: float = 0.75
    victim_classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        members = self.kind == "members"
        if self.round is None and not members:
            object.__setattr__(self, "round", 0)
        if self.outside is None and members:
            object.__setattr__(self, "outside", self.count)
        if self.round is None and self.rounds != 1:
            raise ValueError(f"expected `round`, the first round, with rounds={self.rounds}, got none")
        if not members and (self.client, self.outside) != (None, None):
            raise ValueError(f"expected no client and no outside with kind={self.kind!r}")
        positive = dict.fromkeys(("count", "batch", "rounds", "users", "outside"), 1)
        for name, least in {"round": 0, "client": 0, "skip": 0, **positive, "among": 2}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"expected {name} >= {least}, got {name}={value}")
        if self.victim_classes and self.kind == "messages":
            raise ValueError(f"expected no victim_classes with kind='messages', got {', '.join(self.victim_classes)}")
        if self.kind != "probe" and (self.batch, self.users) != (1, 1):
            raise ValueError(f"expected no batch and no users with kind={self.kind!r}: the training fixes both")
        self._check_probe()

    def _check_probe(self) -> None:
        if self.shuffled and self.kind != "probe":
            raise ValueError(f"expected kind='probe' if shuffled, got {self.kind!r}")
        if self.shuffled and (self.rounds < 2 or self.count < 2):
            raise ValueError(f"expected rounds >= 2 and count >= 2 if shuffled, got {self.rounds} and {self.count}")
        if (self.shuffled or self.property) and self.users > 1:
            raise ValueError(f"expected users=1 if shuffled, or with a property, got users={self.users}")
        if self.property and not 0.5 < self.share <= 1:
            raise ValueError(f"expected 0.5 < share <= 1, got {self.share}")

    @builtins.property  # `property` is a field here
    def looks_at(self) -> range:
        """The attacked rounds."""
        return range(0) if self.round is None else range(self.round, self.round + self.rounds)

    @builtins.property
    def whole(self) -> bool:
        """Whether an attack needs all victims, or all records, at once."""
        return self.kind == "members" or self.shuffled or bool(self.property)

    @builtins.property
    def images(self) -> int:
        """For a probe, the number of images behind all its messages."""
        return self.count * self.users * self.batch


@dataclass(frozen=True)
class Malice:
    """A malicious server's or participant's part in a training: the attack that chooses a model, and its target."""

    attack: PartSpec
    target: Target


@dataclass(frozen=True)
class TrainingSpec:
    """One federated training, shared by all attacks on it.

    Attributes:
        audit: trials per input of a separate audit of the defense, with two inputs; 0: no audit.
        malice: a malicious server broadcasts a model in the attacked rounds, and discards the updates of these rounds;
            a malicious participant moves the model there in the round before. None: all are honest.
        strict: the training fails instead of dropping a client for a round.
    """

    task: TaskSpec
    federation: FederationSpec
    defense: PartSpec
    seed: int
    audit: int = 0
    malice: Malice | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if self.audit < 0:
            raise ValueError(f"expected audit >= 0 (0: none), got audit={self.audit}")

    @property
    def honest(self) -> TrainingSpec:
        """The same training with an honest server and honest clients."""
        return dataclasses.replace(self, malice=None)

    @functools.cached_property
    def question(self) -> dict[str, Any]:
        """The stored form without the seed."""
        return {**to_data(self), "seed": None}

    @functools.cached_property
    def id(self) -> str:
        """Sixteen hex digits of SHA-256 of the stored form."""
        return fingerprint(to_data(self))


@dataclass(frozen=True)
class Cell:
    """One question: an attack by an adversary on a training. `Execution`, not the cell, holds how it runs.

    Attributes:
        limit: whether a reconstruction is compared with the best that any attack could do.
    """

    training: TrainingSpec
    attack: PartSpec
    target: Target
    threat: str
    limit: bool = True

    @functools.cached_property
    def id(self) -> str:
        """Sixteen hex digits of SHA-256 of the stored form."""
        return fingerprint(to_data(self))
