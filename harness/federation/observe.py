"""Builds the observation of one adversary, and the truth, which only the scoring sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import FederationSpec, Target
from leakgauge.harness.core.contract import (
    Defense,
    Examples,
    Marked,
    Message,
    Observation,
    ObservedRound,
    Sender,
    Snapshot,
)
from leakgauge.harness.core.errors import suggestion
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.table import spread_evenly
from leakgauge.harness.core.threats import View
from leakgauge.harness.federation.aggregate import aggregated, summed
from leakgauge.harness.federation.loop import Training, make_plan, planned, replay_state
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.batch import Engine, Indices, Work, train_clients
from leakgauge.harness.learn.tasks import ModelTask

NEAR_COPY = 1e-3
"""MSE between two inputs below which they are near-copies."""

IN_CANDIDATE_SET = 100
"""Size of the set among which a reconstruction must identify its true input; smaller if the data are fewer."""


class _Sent(NamedTuple):
    """The victims' messages by round, their data, and the training rows and clients behind the messages.

    order: for each message of later rounds, the place of its sender's message in the first; empty: they are alike.
    """

    rounds: tuple[ObservedRound, ...]
    victims: tuple[Examples, ...]
    rows: Indices
    senders: Collection[int]
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrainedFederation:
    """A finished training with its data: the source of every adversary's view.

    Attributes:
        clients: indices into `train` by client number.
        key: key of the study's seed, not of the training: its draws are the same for every defense.
        auxiliary: the adversary's auxiliary data; None: test samples that are not candidates.
        classes: class names, in the order of the labels.
    """

    task: ModelTask
    spec: FederationSpec
    defense: Defense[Any, Any]
    training: Training
    train: Examples
    test: Examples
    clients: Mapping[int, Indices]
    engine: Engine
    key: Key
    auxiliary: Examples | None = None
    classes: tuple[str, ...] = ()

    def rows(self, index: Any) -> Examples:
        """Training samples by index."""
        chosen = torch.as_tensor(index)
        return Examples(self.train.x[chosen], self.train.y[chosen])

    def among(self, rows: Indices, target: Target) -> Indices:
        """Those of these training samples that are of the target's classes."""
        return rows[are_of(self.train.y, self.classes, target.victim_classes)[rows]]


@dataclass(frozen=True)
class Truth:
    """The data behind the messages, or the membership of the candidates. Only `harness.study.score` sees it.

    Attributes:
        victims: each victim's images and labels; empty for membership.
        is_member: [n] bool, one per candidate; or one per victim, whether many of its records have the property; None
            for other targets.
        sources: [n], the client behind each candidate, or behind each message of later rounds; -1: none has it.
        note: a remark for the reader on the choice of candidates.
        alike: whether members and non-members are drawn from the same records, uniformly.
        pool: [n, ...] all training inputs; None for membership.
        places: for each victim, where the true record is in each of its lineups.
        candidate_sets: for each victim [b, k]: rows of the pool that no victim sent, k for each of its inputs; empty if
            there are no such rows. A reconstruction identifies its input if it is nearer to the input than to all of
            these rows.
    """

    victims: tuple[Examples, ...] = ()
    is_member: Tensor | None = None
    sources: Tensor | None = None
    note: str = ""
    alike: bool = False
    pool: Tensor | None = None
    candidate_sets: tuple[Indices, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()

    @property
    def rivals(self) -> int:
        """The number of inputs of a candidate set besides the true input."""
        return min((rows.shape[1] for rows in self.candidate_sets), default=0)

    def others(self) -> Iterator[Tensor] | None:
        """The inputs [b, k, ...] of each victim's candidate set, one victim at a time; None if there are none."""
        if self.pool is None or not self.candidate_sets:
            return None
        pool = self.pool
        return (pool[torch.from_numpy(rows)] for rows in self.candidate_sets)


def are_of(y: Tensor, known: Sequence[str], wanted: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which records with labels y [n] are of the wanted classes; all if none is named.

    Raises:
        ValueError: a class is not known, or a record has no class or several.
    """
    if not wanted:
        return np.ones(len(y), np.bool_)
    if not known or y.ndim > 1:
        raise ValueError(f"victim_classes: got {', '.join(wanted)}, expected data with one class for each record")
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"victim_classes: no class {unknown[0]!r}{suggestion(unknown[0], known)}")
    return torch.isin(y, torch.tensor([known.index(name) for name in wanted])).numpy()


def observe(federation: TrainedFederation, view: View, target: Target) -> tuple[Observation, Truth]:
    """What the adversary `view` sees of the trained federation at `target`, and the truth.

    This is the only place that builds an observation: a field that `view.sees` does not name stays None.

    Raises:
        ValueError: the trained federation lacks something that the target needs; the error names it.
    """
    if target.kind == "members":
        return _members(federation, view, target)
    made = _probes(federation, view, target) if target.kind == "probe" else _real_messages(federation, view, target)
    observed_rounds, victims, rows, senders, order = made
    lineups, places, note = _lineups(federation, view, victims, rows, target.among)
    observation = dataclasses.replace(
        _base(federation, view, observed_rounds),
        auxiliary=_auxiliary(federation, view, federation.test),
        others=_others(federation, rows, senders) if "others" in view.sees else None,
        labels=tuple(map(_sorted, (victim.y for victim in victims))) if "labels" in view.sees else None,
        lineups=lineups if "lineup" in view.sees else None,
        mates=tuple(Examples(*(part[1:] for part in victim)) for victim in victims) if "mates" in view.sees else None,
    )
    if target.property and observation.auxiliary is not None:
        marked = Marked(_having(federation, target.property, observation.auxiliary.x), target.share)
        observation = dataclasses.replace(observation, marked=marked)
    truth = Truth(
        victims,
        torch.from_numpy(_many(federation, target)) if target.property else None,
        torch.tensor(order) if order else None,
        note=note,
        pool=federation.train.x,
        candidate_sets=_candidate_sets(federation, target, victims, rows),
        places=places,
    )
    return observation, truth


def check_target(federation: TrainedFederation, view: View, target: Target) -> None:
    """Refuse a target for which the clients' data, or who takes part, do not suffice, as `observe` does.

    Args:
        federation: of its training, setting and feedback are used. It need not have run.

    Raises:
        ValueError: the federation lacks something that the target needs; the error names it.
    """
    for number in target.looks_at:
        _check_round(federation.training, number)
    defense, setting = _defense(federation, view), federation.training.setting
    if target.kind == "members":
        _in_question(federation, view, target)
    elif target.kind == "probe":
        _probe_rows(federation, target, defense)
    elif len(federation.clients) == setting.clients:  # otherwise a recording, which has its own messages
        key = federation.key.child("training")
        plan = planned(federation.spec, defense, setting, federation.clients, key, target.looks_at)
        _attacked(target, list(plan.messages.values()), plan.truth, sums=defense.superposes)


def _check_round(training: Training, number: int) -> None:
    trained = len(training.feedback)
    if number >= trained:
        raise ValueError(f"there is no round {number}: the training ended after {trained} rounds")


class _Candidates(NamedTuple):
    """The rows of the members in the training set, the non-members, their rows in the test set, if any, and a note."""

    rows: Indices
    others: Examples
    test_rows: Indices
    note: str
    key: Key


def _in_question(federation: TrainedFederation, view: View, target: Target) -> _Candidates:
    """Members and non-members; non-members are samples that no client holds, or test samples if these are too few."""
    used = np.sort(np.concatenate(list(federation.clients.values())))
    idle = federation.among(np.setdiff1d(np.arange(len(federation.train.y)), used), target)
    if "craft" in view.sees:  # the adversary is the last client, and knows its own records
        used = np.setdiff1d(used, federation.clients[max(federation.clients)])
    key = federation.key.child("candidates")
    inside, outside = target.count, target.outside or target.count
    if target.client is not None:
        if target.client not in federation.clients:
            raise ValueError(f"there is no client {target.client}: expected less than {len(federation.clients)}")
        if "craft" in view.sees and target.client == max(federation.clients):
            raise ValueError(f"target.client: got {target.client}, the adversary itself; expected another client")
        used, key = np.sort(federation.clients[target.client]), key.child("client", target.client)
    used = federation.among(used, target)
    tested = np.flatnonzero(are_of(federation.test.y, federation.classes, target.victim_classes))
    if inside > len(used):
        raise ValueError(f"expected at most {len(used)} members{_of(target)}, got count={inside}")
    rows = used[rng.subset(key.child("members"), len(used), inside)]
    test_rows = np.empty(0, np.int64)
    note = "non-members are training samples that no client holds"
    if len(idle) >= outside:
        others = federation.rows(idle[rng.subset(key.child("others"), len(idle), outside)])
    elif outside < len(tested):
        note = "non-members come from the test set: part of the difference may lie between the two sets"
        test_rows = tested[rng.subset(key.child("others"), len(tested), outside)]
        others = Examples(federation.test.x[test_rows], federation.test.y[test_rows])
    else:
        raise ValueError(
            f"expected fewer than {len(tested)} non-members{_of(target)} (there are too few idle training samples, and "
            f"the attacker's own data come from the test set too), got outside={outside}"
        )
    return _Candidates(rows, others, test_rows, note, key)


def _members(federation: TrainedFederation, view: View, target: Target) -> tuple[Observation, Truth]:
    rows, others, test_rows, note, key = _in_question(federation, view, target)
    members, inside, outside = federation.rows(rows), len(rows), len(others.y)
    order = torch.from_numpy(rng.permutation(key.child("order"), inside + outside))
    x, y = torch.cat([members.x, others.x])[order], torch.cat([members.y, others.y])[order]
    free = np.setdiff1d(np.arange(len(federation.test.y)), test_rows)
    traffic = [
        _observed(federation, number, federation.training.messages.get(number, ()), view) for number in target.looks_at
    ]
    observation = dataclasses.replace(
        _base(federation, view, traffic),
        candidates=Examples(x, y) if "candidates" in view.sees else None,
        suspect=target.client,
        auxiliary=_auxiliary(federation, view, Examples(federation.test.x[free], federation.test.y[free])),
        others=_others(federation, rows, {target.client}) if "others" in view.sees else None,
    )
    uniform = target.client is None or federation.spec.partition in ("iid", "unbalanced")
    is_member = (torch.arange(inside + outside) < inside)[order]
    holder = {int(row): number for number, held in federation.clients.items() for row in held}
    sources = torch.tensor([holder[int(row)] for row in rows] + [-1] * outside)[order]
    return observation, Truth((), is_member, sources, note, uniform and not len(test_rows))


def _of(target: Target) -> str:
    return f" of {', '.join(target.victim_classes)}" if target.victim_classes else ""


def _auxiliary(federation: TrainedFederation, view: View, alike: Examples) -> Examples | None:
    """The adversary's auxiliary data: `alike`, of the victims' kind, unless the view names other data."""
    if "auxiliary" not in view.sees:
        return None
    if view.other and federation.auxiliary is None:
        raise ValueError(f"the trained federation has no auxiliary data from {view.other!r}")
    return federation.auxiliary if view.other else alike


def _base(federation: TrainedFederation, view: View, observed_rounds: Sequence[ObservedRound] = ()) -> Observation:
    training, sees = federation.training, view.sees
    if "shared" not in sees:
        bare = [tuple(message._replace(shared=None) for message in each.messages) for each in observed_rounds]
        observed_rounds = [each._replace(messages=sent) for each, sent in zip(observed_rounds, bare, strict=True)]
    first = observed_rounds[0] if observed_rounds else None
    return Observation(
        view=view,
        setting=training.setting,
        task=federation.task,
        defense=_defense(federation, view),
        lr=federation.spec.lr if first is None else first.lr,
        messages=first.messages if first and view.messages else None,
        model=first.model if first and "models" in sees else None,
        later=tuple(observed_rounds[1:]) if view.messages and "models" in sees else (),
        models=tuple(_snapshot(federation, t) for t in sorted(training.models)) if "models" in sees else None,
        final=training.final if "final" in sees else None,
    )


def _defense(federation: TrainedFederation, view: View) -> Defense[Any, Any]:
    return aggregated(federation.defense) if "sums" in view.sees else federation.defense


def before_rounds(federation: TrainedFederation, view: View, target: Target) -> Observation:
    """What an active adversary knows before the attacked rounds: no message and no model; the loop adds the model.

    Args:
        federation: its training may not have started yet.
    """
    if target.kind == "members":
        observation, _ = observe(federation, view, dataclasses.replace(target, round=None, rounds=1))
    else:
        observation = dataclasses.replace(_base(federation, view), auxiliary=federation.test)
    return dataclasses.replace(observation, models=None, final=None)


def _candidate_sets(
    federation: TrainedFederation, target: Target, victims: Sequence[Examples], rows: Indices
) -> tuple[Indices, ...]:
    """`Truth.candidate_sets`: drawn like the victims, so a blind guess is right once in `IN_CANDIDATE_SET`."""
    others = np.setdiff1d(federation.among(np.arange(len(federation.train.y)), target), rows)
    count, key, made = min(IN_CANDIDATE_SET - 1, len(others)), federation.key.child("lineups"), 0
    candidate_sets = []
    for victim in victims if count else ():
        numbers = range(made, made := made + len(victim.y))
        each = [others[rng.subset(key.child(number), len(others), count)] for number in numbers]
        candidate_sets.append(np.stack(each))
    return tuple(candidate_sets)


def _sorted(y: Tensor) -> Tensor:
    """Labels [b], or rows of numbers [b, k], in ascending order."""
    return y.sort().values if y.ndim == 1 else y[np.lexsort(y.T.flip(0).numpy())]


def _lineups(
    federation: TrainedFederation, view: View, victims: Sequence[Examples], rows: Indices, among: int
) -> tuple[tuple[tuple[Examples, ...], ...], tuple[tuple[int, ...], ...], str]:
    """For each record in question: candidates of its label in random order, the place of the record, and a note.

    Rivals are drawn from the training records that no victim sent, and if these are too few, from those of the others.
    The labels of a regression count as equal within a tenth of all records; rows of many values, by their means.
    """
    if "lineup" not in view.sees:
        return (), (), ""
    key, labels = federation.key.child("lineup"), federation.train.y
    if labels.ndim == 2:
        rows_, kinds = torch.unique(labels, dim=0, return_inverse=True)
        labels = kinds if 10 * len(rows_) <= len(labels) else labels.mean(1)
    if labels.is_floating_point():
        labels = torch.bucketize(labels, torch.quantile(labels.double(), torch.linspace(0, 1, 11)[1:-1].double()))
    classes, free = labels.numpy(), np.setdiff1d(np.arange(len(labels)), rows)
    lineups, places, start, copies = list[tuple[Examples, ...]](), list[tuple[int, ...]](), 0, 0
    least = among
    for victim in victims:
        sent = rows[start : start + len(victim.y)]
        numbers = sent[:1] if "mates" in view.sees else sent
        asked = list[tuple[Examples, int]]()
        for number in numbers:
            own, rivals = key.child(int(number)), free[classes[free] == classes[number]]
            chosen = rivals[rng.subset(own.child("rivals"), len(rivals), min(among - 1, len(rivals)))]
            if (lacking := among - 1 - len(chosen)) > 0:
                others = np.setdiff1d(np.intersect1d(rows, np.flatnonzero(classes == classes[number])), sent)
                more = others[rng.subset(own.child("others"), len(others), min(lacking, len(others)))]
                chosen = np.concatenate([chosen, more])
            order = rng.permutation(own.child("order"), 1 + len(chosen))
            lineup = federation.rows(np.append(number, chosen)[order])
            place = int(np.flatnonzero(order == 0)[0])
            off = (lineup.x - lineup.x[place]).square().flatten(1).mean(1)
            copies += int((off < NEAR_COPY).sum()) - 1
            least = min(least, len(lineup.y))
            asked.append((lineup, place))
        lineups.append(tuple(lineup for lineup, _ in asked))
        places.append(tuple(place for _, place in asked))
        start += len(victim.y)
    notes = [f"a label has too few records: the smallest lineup has {least}"] if least < among else []
    notes += [f"{copies} candidates nearly equal their true record (MSE < {NEAR_COPY:g})"] if copies else []
    return tuple(lineups), tuple(places), "; ".join(notes)


def _observed(federation: TrainedFederation, number: int, messages: Sequence[Message], view: View) -> ObservedRound:
    model = _snapshot(federation, number)
    if "sums" in view.sees:
        messages = summed(Round(federation.defense, federation.training.setting, model.state, number), messages)
    return ObservedRound(tuple(messages), model, federation.training.learning_rates[number])


def _snapshot(federation: TrainedFederation, number: int) -> Snapshot:
    training = federation.training
    _check_round(training, number)
    if number not in training.models:
        raise ValueError(f"the model of round {number} was not kept; kept: {sorted(training.models)}")
    state = replay_state(federation.defense, training.setting, training.feedback[:number])
    return Snapshot(number, training.models[number], state)


def _probe_rows(federation: TrainedFederation, target: Target, defense: Defense[Any, Any]) -> tuple[Indices, int]:
    """The training rows of the victims of a probe, and how many of them send at once."""
    together = target.users if defense.superposes else 1
    if together > federation.training.setting.participants:
        raise ValueError(f"expected users <= {federation.training.setting.participants} participants, got {together}")
    used = federation.among(np.sort(np.concatenate(list(federation.clients.values()))), target)
    if target.skip:
        most = max(1, len(used) // (target.users * target.batch))
        target = dataclasses.replace(target, count=min(target.count, most))
    if target.images > len(used) and not target.property:
        raise ValueError(
            f"expected at most {len(used)} records{_of(target)}, got count={target.count} x users={target.users} x "
            f"batch={target.batch}"
        )
    if target.property:
        return _sharing(federation, used, target), together
    drawn = np.roll(rng.permutation(federation.key.child("victims"), len(used)), -target.skip)
    return used[drawn[: target.images]], together


def _probes(federation: TrainedFederation, view: View, target: Target) -> _Sent:
    """Victims with images of the clients, encoded like real messages; the images depend only on the study's seed."""
    defense = _defense(federation, view)
    rows, together = _probe_rows(federation, target, defense)
    data, observed_rounds = list(map(federation.rows, rows.reshape(-1, target.batch))), list[ObservedRound]()
    memories = [federation.defense.remember(federation.training.setting) for _ in data]
    order, orders = np.arange(len(data)), list[int]()
    for number in target.looks_at:
        if target.shuffled and observed_rounds:  # all that belongs to a client takes another number
            turn = rng.permutation(federation.key.child("shuffle", number), len(data))
            data, memories, order = [data[i] for i in turn], [memories[i] for i in turn], order[turn]
            orders += order.tolist()
        observed, memories = _probed(federation, defense, data, memories, number, together)
        observed_rounds.append(observed)
    groups = rows.reshape(-1, together * target.batch)
    return _Sent(tuple(observed_rounds), tuple(map(federation.rows, groups)), rows, (), tuple(orders))


def _having(federation: TrainedFederation, name: str, x: Tensor) -> Tensor:
    """[n] which records have a property; the test data define what is large."""
    return federation.task.form.has(x, name, federation.test.x)


def _many(federation: TrainedFederation, target: Target) -> npt.NDArray[np.bool_]:
    """[count] which half of the victims, drawn at random, has the property in many records."""
    return np.asarray(rng.permutation(federation.key.child("many"), target.count) % 2 == 0)


def _sharing(federation: TrainedFederation, used: Indices, target: Target) -> Indices:
    """The rows of victims, half of whom have many records with the property, evenly over the labels, and half few.

    All victims have the same labels. Several victims may have the same record.
    """
    having, labels = _having(federation, target.property, federation.train.x[used]), federation.train.y[used]
    key, many = federation.key.child("sharing"), round(target.share * target.batch)
    if labels.is_floating_point():
        labels = torch.zeros(len(labels))
    both = np.isin(labels, np.intersect1d(labels[having], labels[~having]))  # a label needs records of both kinds
    if not both.any():
        raise ValueError(f"no label has records with and without {target.property!r}; take more samples")
    able, rows = labels[torch.from_numpy(both)], list[int]()
    common = able[torch.from_numpy(rng.integers(key, target.batch, len(able)))]
    for victim, most in enumerate(_many(federation, target)):
        marks = spread_evenly(common[None], torch.tensor([many if most else target.batch - many]))[0]
        for label, mark in sorted({*zip(common.tolist(), marks.tolist(), strict=True)}):
            alike = used[((labels == label) & (having == mark)).numpy()]
            wanted = int(((common == label) & (marks == mark)).sum())
            if len(alike) < wanted:
                words = f"records of label {label} that {'have' if mark else 'do not have'} {target.property!r}"
                raise ValueError(f"expected at least {wanted} {words}, got {len(alike)}; take more samples")
            own = key.child(victim, int(label), int(mark))
            rows += alike[rng.subset(own, len(alike), wanted)].tolist()
    return np.array(rows)


def _probed(
    federation: TrainedFederation,
    defense: Defense[Any, Any],
    data: Sequence[Examples],
    memories: list[Any],
    number: int,
    together: int,
) -> tuple[ObservedRound, list[Any]]:
    """The messages of one round from clients who keep data and memory over the rounds, and the memories after it."""
    setting, model = federation.training.setting, _snapshot(federation, number)
    lr = federation.training.learning_rates[number]
    plan = make_plan(federation.spec, lr, federation.defense.local, federation.defense.step_noise(setting))
    if plan.gradient:
        plan = dataclasses.replace(plan, batch=0, poisson=False)
    round_, key = Round(defense, setting, model.state, number), federation.key.child("probe", number)
    clients, steps = list[Client](), list[int]()
    for k, (examples, memory) in enumerate(zip(data, memories, strict=True)):
        work = Work(examples, key.child(k, "train"))
        trained = train_clients(federation.task, model.params, [work], plan, federation.engine)
        clients.append(Client.of(Sender(k, len(examples.y)), trained.updates[0], memory, key.child(k)))
        steps.append(len(trained.batches[0]))
    messages, after = list[Message](), list[Any]()
    for first in range(0, len(clients), together):
        group = clients[first : first + together]
        exchange = round_.among_silent(group, key.child(first))
        (received,), (sender, *others) = exchange.received, (client.sender for client in group)
        images = together * sender.samples
        messages.append(Message(number, sender, received, group[0].shared, images, steps[first], tuple(others)))
        after += exchange.memories
    return ObservedRound(tuple(messages), model, lr), after


def _real_messages(federation: TrainedFederation, view: View, target: Target) -> _Sent:
    """The first senders' messages and data; if only the sum of all messages arrives, its senders are one victim."""
    training, observed_rounds, sums = federation.training, list[ObservedRound](), _defense(federation, view).superposes
    for number in target.looks_at:
        if not training.messages.get(number):
            raise ValueError(f"no message of round {number} reached the receiver, or it was not kept")
        observed_rounds.append(_observed(federation, number, training.messages[number], view))
    chosen, sent = _attacked(target, [each.messages for each in observed_rounds], training.truth, sums=sums)
    observed_rounds = [each._replace(messages=some) for each, some in zip(observed_rounds, sent, strict=True)]
    rows = [federation.clients[client][used] for client, used in chosen.items()]
    victims = [np.concatenate(rows)] if sums else rows
    return _Sent(tuple(observed_rounds), tuple(map(federation.rows, victims)), np.concatenate(rows), chosen.keys())


def _attacked(
    target: Target, sent: Sequence[Sequence[Message]], known_truth: Mapping[int, Mapping[int, Indices]], *, sums: bool
) -> tuple[dict[int, Indices], list[tuple[Message, ...]]]:
    """The samples behind the attacked messages by client, and these messages of each round."""
    chosen, attacked = dict[int, Indices](), list[tuple[Message, ...]]()
    for number, received in zip(target.looks_at, sent, strict=True):
        truth = known_truth[number]
        if not chosen:
            known = [message for message in received if sums or message.sender.number in truth]
            chosen = _behind(known[0], truth) if sums else {k: truth[k] for k in _senders(*known[: target.count])}
        messages = tuple(message for message in received if chosen.keys() >= set(_senders(message)))
        if len(messages) < target.count:
            raise ValueError(
                f"expected at most {len(messages)} messages in round {number}, got count={target.count}: no "
                "more of the attacked clients took part with known records"
            )
        if any(set(rows) != set(truth.get(client, ())) for client, rows in chosen.items()):
            raise ValueError("expected the same samples behind a client's messages of several rounds: needs batch = 0")
        attacked.append(messages)
    return chosen, attacked


def _senders(*messages: Message) -> list[int]:
    return [sender.number for message in messages for sender in (message.sender, *message.others)]


def _behind(message: Message, truth: Mapping[int, Indices]) -> dict[int, Indices]:
    """The samples of each sender of a sum; raises ValueError unless all are known and equally many."""
    senders = _senders(message)
    if unknown := [str(number) for number in senders if number not in truth]:
        listed = ", ".join(unknown[:8])
        raise ValueError(f"the sum of round {message.round} has messages of clients with unknown records: {listed}")
    if len(sizes := {len(truth[number]) for number in senders}) > 1:
        text = f"expected equally many records from each sender of the sum in round {message.round}"
        raise ValueError(f"{text}, got {min(sizes)} to {max(sizes)}: attacks assume equal numbers")
    return {number: truth[number] for number in senders}


def _others(federation: TrainedFederation, taken: Indices, senders: Collection[int | None]) -> dict[int, Examples]:
    return {
        number: federation.rows(np.setdiff1d(rows, taken))
        for number, rows in federation.clients.items()
        if number not in senders
    }
