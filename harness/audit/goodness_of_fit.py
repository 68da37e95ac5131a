"""Tests of a defense's messages against the distribution that it states: the second instrument of an audit.

Distinguishing two inputs needs about e^epsilon trials; a distribution is tested with a few hundred messages at any
epsilon. The test does not measure epsilon. It shows whether the code is the mechanism of the proof.

Messages come from a small federation that runs the same round as training; `docs/audit-instruments.md` describes it.
Discrete ones also come from updates at the clip in few and in many coordinates, where they reveal most of an update.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import special
from torch import Tensor

from leakgauge.harness.audit import uniformity
from leakgauge.harness.audit.neighbors import clip_of, shaped
from leakgauge.harness.audit.uniformity import Sample, detectable_by_ratios
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Defense, Examples, Sender, Setting
from leakgauge.harness.core.distribution import (
    Additive,
    DistributionError,
    MessageDistribution,
    Reading,
    StepDistribution,
)
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.result import FitRecord, RangeRecord
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.federation.round import Client, Exchange, Round
from leakgauge.harness.federation.small import Federation
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask

LEVEL = 1e-3
"""The probability that any test rejects an honest defense."""

_TENSORS = (121, 44, 35)  # sizes of the tensors: odd, even, odd

_FEW, _WIDE = 2000, tuple(51 * size for size in _TENSORS)
"""The smallest number of numbers in a federation, and the sizes of the tensors if there are fewer."""

_LOUD: dict[str, tuple[tuple[tuple[int, ...], int], ...]] = {
    "coordinates": (((1815, 660, 525), 3),),
    "independent": (((1,), 5), ((19, 8, 5), 2), ((605, 220, 175), 3)),
    "dependent": (((5, 2, 1), 10), ((19, 8, 5), 1)),
}
"""Sizes of the tensors and numbers of federations for discrete messages from updates at the clip.

Numbers that each carry one coordinate err seldom, so many are needed. Other numbers reveal more about an update with
few coordinates; with many of them, a message without any error is rare. Dependent numbers are slow to read."""

_LONG, _WIDEST, _BRIEF = 256, 100_000, 5
"""The length of a dependent message if shorter messages never err, the most coordinates for it, and its rounds. Of many
numbers, only a part is sent unchanged, and the size of this part depends on the noise."""

_CLIENTS, _ROUNDS, _SMALLEST, _LARGEST = 20, 10, 20, 80_000
_MANY = 400  # clients of a larger federation, of which `_CLIENTS` send; every second run has these, or the study's
_LATE = (*range(5), 11, 51, 201, 1001, 10_000)  # the rounds that are looked at if the defense does not stop before
_BEFORE = 60  # messages that clients with a memory have sent before every second run
_ABSENT = (0, 1, 5, 15)  # clients whose messages do not arrive in rounds that are summed, in turn

LARGE = Layout(("matrix", "bias", "second matrix", "second bias"), ((784, 128), (128,), (128, 10), (10,)))
"""Tensors of 101,770 numbers in all."""

_TESTED, _FEWEST, _LONGEST = 1_000_000, 2, 1_000_000
"""How many numbers of large tensors are tested, the fewest senders of them, and the most numbers of one message."""

_NUMBERS = 20_000  # the least number of tested numbers, if `_MOST` messages hold them; it detects 3 % of missing noise

_MOST, _LEAST = 4000, 460
"""The largest and the least number of messages; with the least, 99 % of audits contain a fault of 1 in 100 messages."""

_TRAININGS = 100  # trained clients; each update has as many numbers as a message
_NORMS = (1.0, 1.0, 1 - 1e-6, 1 + 1e-6)  # norms near the clip, in clips
_STEPS = 8  # the most local steps
_SLOPE = 1e-4  # input entry of a record: so small that its label is large and no step changes the gradient
_RATE = 1e-6  # learning rate: so low that the model's own penalty has no effect
_EXACT = 1e-3  # difference, in clips, that float32 may cause between an update without noise and its definition

_TWINS, _HELD, _RUNS = 25, 5, 20
"""Pairs of messages that differ in the private key only, the most federations with one shared key each, and the whole
runs of a defense whose rounds are dependent."""

_PATTERNS = ("dense", "sparse", "constant", "zero", "one tensor", "random signs")
_SHARE = 0.05  # if discrete messages detect this missing share of noise, none from updates at the clip are added

_SILENT = 0.01
"""Sum of all absolute log likelihood ratios below which a discrete channel hardly errs and its noise is not visible."""

_SINGLE = 0.2  # share of updates at the clip with a single nonzero coordinate

_REPEATED, _EXACT_NORM = 0.2, 0.1
"""Shares of messages that repeat the client's previous update, and whose norm is the clip up to one in a million."""


class _Item(NamedTuple):
    """One tested message, sum or trained update: its distribution's reading, and what it was made from."""

    reading: Reading
    sender: Sender
    round: int
    run: int
    pattern: int
    update: Tensor
    product: bool = False


_Kinds = dict[str, list[_Item]]
"""The tested items by kind: `message`, `sum` and `training`."""


def check_fit(
    defense: Defense[Any, Any], like: Setting, key: Key, study: Setting | None = None, most_samples: int = 0
) -> FitRecord | None:
    """Test a defense's messages, its sums and its local training against their distributions; None if it states no
    distribution.

    Args:
        like: the federation whose defense is audited; the test uses its local training.
        study: a federation whose tensors, clients, participants, records and rounds are looked at, too.
        most_samples: the number of records of its largest client.

    Guarantees:
        If the messages follow the distribution, any test rejects with probability at most `LEVEL`.
        The same arguments give the same result.

    Raises:
        MessageError: the defense rejects its own messages, in `transmit` or `decode`.
    """
    federation = _aged(defense, _setting(like))
    try:
        kinds = _readings(federation, 0, key)
        if not any(kinds.values()):
            return None
        if 0 < _numbers(kinds) < _FEW:
            # the defense sends a share of the coordinates: with more coordinates, a message holds more numbers
            wide = _aged(defense, _setting(like, _WIDE))
            more = _readings(wide, 0, key)
            if _numbers(more) > _numbers(kinds):
                federation, kinds = wide, more
        values, kinds = _p_values(federation, kinds, key, study)
        setting, dims = federation.setting, (federation.setting.dim,) * 2
        clients = setting.clients, _larger(federation, study).setting.clients
        looked = [RangeRecord(_count(kinds), dims, clients, (_SMALLEST, _LARGEST), (0, federation.last))]
        for of_size, further in _at_size(defense, like, study, most_samples, key):
            looked.append(of_size)
            values |= further
        samples = [_sample(items, setting) for items in kinds.values() if _numbers({"": items})]
        # the level of one p-value, before a few more are added
        share = _detects(samples, LEVEL / max(1, len(values)))
        enough = share is not None and share <= _SHARE
        max_norm = _max_norm(defense, setting, kinds["message"], key, study, enough=enough)
    except DistributionError as error:
        return FitRecord((str(error),), 0.0, 1, 0, 1, None)
    messages, numbers = _count(kinds), _numbers(kinds)
    if not values:
        return FitRecord((), 1.0, messages, 0, 0, None, tuple(looked))
    for word, sample in max_norm.items():
        further = uniformity.ratio_values(sample.ratios, sample.groups) if sample.ratios is not None else {}
        values |= {f"{name}, {word} at the clip": p for name, p in further.items()}
    level = LEVEL / len(values)
    rejects = tuple(sorted((name for name, p in values.items() if not p >= level), key=values.__getitem__))
    least = min(1.0, min(values.values()) * len(values))
    share = _detects(samples, level, list(max_norm.values()))
    messages += sum(len(sample.uniforms) for sample in max_norm.values())
    return FitRecord(rejects, least, messages, numbers, len(values), share, tuple(looked))


@dataclass(frozen=True)
class _Aged(Federation):
    """A federation in chosen rounds, of which this is the last."""

    last: int = 0


def _aged(defense: Defense[Any, Any], setting: Setting) -> _Aged:
    """The federation in rounds `_LATE`, or in its first ones if the defense stops or fails before."""
    early = Federation.of(defense, setting).history
    try:
        history = Federation.of(defense, setting, _LATE[-1] + 1).history
        late = _Aged(defense, setting, tuple(history[number] for number in _LATE), _LATE[-1])
        late.exchange([torch.zeros(setting.dim)], Key(0, ("late",)), len(_LATE) - 1)
    except (ValueError, LookupError, ArithmeticError):  # beyond the rounds of its setting, a defense may fail
        return _Aged(defense, setting, early, len(early) - 1)
    return late


def _larger(federation: _Aged, study: Setting | None) -> _Aged:
    """The federation with many clients, or those of the study; the same one if the defense refuses their number."""
    clients, participants = (study.clients, study.participants) if study else (_MANY, _MANY)
    try:
        setting = replace(federation.setting, clients=max(clients, _CLIENTS), participants=max(participants, _CLIENTS))
        return _aged(federation.defense, setting)
    except ValueError:
        return federation


def _at_size(
    defense: Defense[Any, Any], like: Setting, study: Setting | None, most_samples: int, key: Key
) -> Iterator[tuple[RangeRecord, dict[str, float]]]:
    """p-values of messages of large tensors, and of the study's federation, in the first and in the last round."""
    small = _setting(like)
    settings = [(replace(small, layout=LARGE), _SMALLEST, _LARGEST)]
    if study:
        same = {name: getattr(study, name) for name in ("layout", "clients", "participants", "rounds")}
        settings.append((replace(small, **same), study.samples, max(study.samples, most_samples)))
    for number, (setting, least, most) in enumerate(settings):
        count = min(setting.participants, max(_FEWEST, min(_CLIENTS, _TESTED // (2 * setting.dim))))
        senders = [Sender(k, int(size)) for k, size in enumerate(np.geomspace(least, most, count).round())]
        try:
            history = Federation.of(defense, setting).history
            federation = Federation(defense, setting, (history[0], history[-1]))
            read = _readings(federation, 0, key.child("size", number), senders)
        except (DistributionError, MessageError):
            raise
        except ValueError:
            continue  # the defense refuses so many numbers or clients
        if not _numbers(read):
            continue
        values = _of_kinds(read, setting, coarse=True)
        sizes = (setting.dim,) * 2, (setting.clients,) * 2
        looked = RangeRecord(_count(read), *sizes, (least, most), (0, len(history) - 1))
        yield looked, {f"{name}, d = {setting.dim}": p for name, p in values.items()}


def _p_values(federation: _Aged, kinds: _Kinds, key: Key, study: Setting | None) -> tuple[dict[str, float], _Kinds]:
    """All p-values by name, and the tested items; `kinds` has the items of the first federation."""
    run, setting, federations = 1, federation.setting, (federation, _larger(federation, study))
    while _numbers(kinds) > 0 and _too_few(kinds) and _count(kinds) < _MOST:
        more = _readings(federations[run % 2], run, key)
        kinds, run = {kind: items + more[kind] for kind, items in kinds.items()}, run + 1
    values = _of_kinds(kinds, setting, coarse=False)
    low_noise = federation.defense.low_noise_variant()
    if low_noise is not None:
        at_rest = _of_kinds(_readings(_aged(low_noise, setting), -1, key), setting, coarse=True)
        values |= {f"{name}, with little noise": p for name, p in at_rest.items()}
    held = list[_Item]()
    for number in range(_HELD):
        held += _readings(federation, -2 - number, key, shared=key.child("held", number))["message"]
        if not held or _numbers({"": held}) >= _FEW:
            break
    of_held = _of_kinds({"message": held}, setting, coarse=False)
    values |= {f"{name}, with one shared key": p for name, p in of_held.items()}
    values |= _repeats(federation, key.child("twins"), sums=False)
    if kinds["sum"]:
        values |= _repeats(federation, key.child("twin sums"), sums=True)
    return values | _of_runs(federation.defense, setting, key.child("runs")), kinds


def _of_runs(defense: Defense[Any, Any], setting: Setting, key: Key) -> dict[str, float]:
    """p-values of the independent parts of the sums of whole runs, for a defense whose noises are correlated."""
    federation, items = Federation.of(defense, setting), list[_Item]()
    for run in range(_RUNS if defense.correlates else 0):
        rounds = [*_sums(federation, key.child(run))]
        if len(rounds) < len(federation.history):
            return {}
        meant, found, updates = zip(*rounds, strict=True)
        ends = [defense.independent(federation.history, each, setting) or [] for each in (meant, found)]
        for number, (part, one, sent) in enumerate(zip(*ends, updates, strict=False)):
            if isinstance(part, Additive) and isinstance(one, Additive):
                wire, own = one.center.astype("<f4").tobytes(), key.child(run, "auditor", number)
                reading = _read(replace(part, fair=False), wire, own)
                items.append(_Item(reading, Sender(0, _CLIENTS), number, run, 0, sent))
    values = uniformity.p_values(_sample(items, setting), coarse=False) if items else {}
    return {f"{name}, of all rounds together": p for name, p in values.items()}


def _sums(federation: Federation, key: Key) -> Iterator[tuple[MessageDistribution, MessageDistribution, Tensor]]:
    """The stated distribution of each round's sum, the same with the sum itself as its center, and the sum of updates.

    The server has one key for all rounds.
    """
    defense, setting = federation.defense, federation.setting
    for number, state in enumerate(federation.history):
        own = key.child("round", number)
        updates = [_update(defense, setting, own.child(k), torch.zeros(setting.dim))[1] for k in range(_CLIENTS)]
        exchange = federation.exchange([one.clone() for one in updates], own, number)
        stated = defense.aggregate_distribution(state, updates, exchange.links)
        if isinstance(stated, Additive):
            total = federation.round(number).decode(exchange, key.child("server")).double().numpy()
            yield stated, replace(stated, center=total), torch.stack(updates).double().sum(0)


def _max_norm(
    defense: Defense[Any, Any], like: Setting, items: Sequence[_Item], key: Key, study: Setting | None, *, enough: bool
) -> dict[str, Sample]:
    """Discrete messages of updates at the clip, by the size of the update; `items` are messages of other updates.

    Args:
        enough: for distributions of single coordinates, `items` suffices and nothing is added.
    """
    samples: dict[str, Sample] = {}
    ratios = [item.reading.ratios for item in items if item.reading.ratios is not None and item.reading.ratios.size]
    if not ratios:
        return samples
    single, silent = bool((items[0].reading.places >= 0).any()), _is_silent(np.array(ratios))
    if (silent and (single or items[0].product)) or (single and enough):
        return samples
    federations = _LOUD["coordinates" if single else "independent" if items[0].product else "dependent"]
    if silent:
        times = max(1, min(_LONG // len(items[0].reading.uniforms), _WIDEST // like.dim))
        federations = ((tuple(times * size for size in like.layout.sizes), 1),)
    for sizes, runs in federations:
        setting = _setting(like, sizes)
        try:
            federation = _aged(defense, setting)
        except ValueError:
            continue  # no channel of this epsilon has so few coordinates
        both = federation, _larger(federation, study)
        if silent:
            both = (replace(federation, history=federation.history[-_BRIEF:]),) * 2
        own = key.child("clip", setting.dim)
        each = [_readings(both[run % 2], run, own, max_norm=True) for run in range(runs)]
        sample = _sample([item for kinds in each for item in kinds["message"]], setting)
        if sample.ratios is not None and not (silent and _is_silent(sample.ratios)):
            samples[f"d = {setting.dim}"] = sample
    return samples


def _is_silent(ratios: Numbers) -> bool:
    return bool(np.abs(ratios).sum() < _SILENT)


def _detects(samples: Sequence[Sample], level: float, max_norm: Sequence[Sample] = ()) -> float | None:
    """The smallest missing share of noise that shows in every kind of message; `max_norm`: more discrete messages."""
    shares: list[float | None] = []
    for sample in samples:
        if sample.ratios is None:
            shares.append(uniformity.detectable(sample.uniforms.size, level))
            continue
        each = [detectable_by_ratios(more.ratios, level) for more in (sample, *max_norm) if more.ratios is not None]
        shares.append(min((share for share in each if share is not None), default=None))
    known = [share for share in shares if share is not None]
    return max(known, default=None) if len(known) == len(shares) else None


def _too_few(kinds: _Kinds) -> bool:
    return _numbers(kinds) < _NUMBERS or max(len(items) for items in kinds.values() if _numbers({"": items})) < _LEAST


def _count(kinds: _Kinds) -> int:
    return sum(map(len, kinds.values()))


def _numbers(kinds: _Kinds) -> int:
    """The number of tested numbers of the kind with the fewest."""
    counts = [sum(len(item.reading.uniforms) for item in items) for items in kinds.values()]
    return min((number for number in counts if number), default=0)


def _of_kinds(kinds: _Kinds, setting: Setting, *, coarse: bool) -> dict[str, float]:
    return {
        name if kind == "message" else f"{name} of the {kind}": p
        for kind, items in kinds.items()
        if items and len(items[0].reading.uniforms)
        for name, p in uniformity.p_values(_sample(items, setting), coarse=coarse).items()
    }


def _readings(
    federation: Federation,
    run: int,
    key: Key,
    senders: Sequence[Sender] = (),
    *,
    max_norm: bool = False,
    shared: Key | None = None,
) -> _Kinds:
    """The messages and the sums of one federation that follow a distribution, ordered by round and sender.

    Args:
        senders: of large messages, without local training; empty: those of the small federation.
        max_norm: all updates are at the clip.
        shared: of all messages, which then follow the distribution given it; None: each has its own.
    """
    defense, setting, large = federation.defense, federation.setting, bool(senders)
    draw, kinds = _max_norm_update if max_norm else _update, _Kinds(message=[], sum=[], training=[])
    if not large:
        sizes = np.geomspace(_SMALLEST, _LARGEST, _CLIENTS // 2).astype(int).tolist()
        senders = [Sender(k, size) for k, size in enumerate(2 * sizes)]
        kinds["training"] = _trainings(defense, setting, run, key.child("training", run))
    updates = [torch.zeros(setting.dim) for _ in senders]
    memories, before = federation.memories(len(senders)), key.child("run", run, "before")
    if run % 2:
        clients = [
            Client.of(sender, update, memory, before.child(sender.number))
            for sender, update, memory in zip(senders, updates, memories, strict=True)
        ]
        memories = [grown(federation.round(), client, _BEFORE) for client in clients]
    for number, state in enumerate(federation.history):
        own = key.child("run", run, "round", number)
        drawn = [draw(defense, setting, own.child("update", k), last) for k, last in enumerate(updates)]
        patterns, updates = [pattern for pattern, _ in drawn], [update for _, update in drawn]
        sent = [update.clone() for update in updates]
        exchange = federation.exchange(sent, own, number, senders=senders, memories=memories, shared=shared)
        absent = 0 if defense.superposes else _ABSENT[number % len(_ABSENT)] * len(senders) // _CLIENTS
        arrived = exchange
        if absent:
            ends: dict[str, Any] = {"senders": senders[absent:], "memories": memories[absent:]}
            arrived = federation.exchange([update.clone() for update in updates[absent:]], own, number, **ends)
        distribution = defense.aggregate_distribution(state, updates[absent:], arrived.links)
        if distribution is not None:
            total = _arrives(federation.round(number), arrived, own.child("server"))
            reading, counted = _read(distribution, total, own.child("auditor")), Sender(0, len(senders) - absent)
            kinds["sum"].append(_Item(reading, counted, number, run, 0, torch.stack(updates).double().sum(0)))
        wires, links = exchange.sent if defense.superposes else exchange.received, exchange.links.each()
        # on a channel that superposes, the other participants follow
        for memory, update, wire, link, pattern in zip(memories, updates, wires, links, patterns, strict=False):
            distribution = defense.message_distribution(state, memory, update, link)
            if distribution is not None and shared is not None:
                distribution = distribution.given_shared
            # a long message without noise may differ from its definition by a sum's rounding
            if distribution is not None and not (large and (distribution.noiseless or distribution.quadratic)):
                reading = _read(distribution, wire, own.child("auditor", link.sender.number))
                kinds["message"].append(_Item(reading, link.sender, number, run, pattern, update, distribution.product))
        memories = exchange.memories
    return kinds


def grown(round_: Round, client: Client, messages: int) -> Any:
    """What a client remembers after so many messages; a memory that one message leaves empty stays so."""
    for number in range(messages):
        client = client._replace(memory=round_.encode(client._replace(private=client.private.child(number)))[1])
        if client.memory is None:
            break
    return client.memory


def _trainings(defense: Defense[Any, Any], setting: Setting, run: int, key: Key) -> list[_Item]:
    """Updates of local training on records with known gradients; each gradient has its own coordinate."""
    distribution = defense.step_distribution(setting)
    if distribution is None:
        return []
    # the loss (w.x - y)^2 is so steep that its gradient, -2 y x, stays the same; half of the norms are below the clip
    n, d = setting.samples, setting.dim
    norms = distribution.clip * torch.logspace(-1, 1, n)
    x, y = torch.zeros(n, d), norms / (2 * _SLOPE)
    x[torch.arange(n), 7 * torch.arange(n)] = _SLOPE
    plan = LocalPlan.of(setting, lr=_RATE).under(defense.local, defense.step_noise(setting))
    task, keys = ModelTask(build("linear-regression", (d,), 1)), [key.child(k) for k in range(_TRAININGS)]
    work = [Work(Examples(x, y), own) for own in keys]
    updates = train_clients(task, torch.zeros(d), work, plan, "loop").updates
    unit = distribution.clip / plan.size(n) * (1.0 if plan.gradient else -plan.lr)
    weights = np.cumsum(setting.momentum ** np.arange(1 if plan.gradient or distribution.single else setting.steps))
    center = np.zeros(d)
    center[7 * np.arange(n)] = -np.minimum(norms.numpy() / distribution.clip, 1.0)
    readings = _step_readings((updates.numpy() / unit).astype(np.float64), center, distribution, weights)
    sent = torch.from_numpy(center)
    return [_Item(reading, Sender(k % _CLIENTS, n), k // _CLIENTS, run, 0, sent) for k, reading in enumerate(readings)]


def _step_readings(
    updates: Numbers, center: Numbers, distribution: StepDistribution, weights: Numbers
) -> list[Reading]:
    """Readings of updates [n, d], in clips over batches; a record's own coordinate is a mixture over its steps."""
    steps = len(weights)
    taken = np.array(list(itertools.product((0, 1), repeat=steps))) if distribution.share < 1 else np.ones((1, steps))
    chances = np.prod(np.where(taken > 0, distribution.share, 1 - distribution.share), 1)
    shifts, spread = taken @ weights, distribution.noise * float(np.linalg.norm(weights))
    if spread == 0:
        if distribution.share == 1 and np.abs(updates - center * shifts[0]).max() > _EXACT:
            raise DistributionError("an update that is not the mean of clipped gradients")
        return [Reading(np.zeros(0), np.zeros(0, np.int64))] * len(updates)
    uniforms = (chances * special.ndtr((updates[..., None] - center[:, None] * shifts) / spread)).sum(-1)
    return [Reading(row, np.arange(len(center))) for row in uniforms]


def _repeats(federation: Federation, key: Key, *, sums: bool) -> dict[str, float]:
    """p-values of messages, or of sums, against others with the same updates and shared keys, but other noise."""
    defense, setting, state = federation.defense, federation.setting, federation.history[0]
    senders = [Sender(k, _SMALLEST) for k in range(_CLIENTS)] if sums else [Sender(1, 2 * _SMALLEST)]
    names: list[tuple[int, ...]] = [(k,) for k in range(_CLIENTS)] if sums else [()]
    round_, rows, memory, discrete = federation.round(), [], defense.remember(setting), False
    for number in range(_TWINS):
        own, row = key.child(number), []
        updates = [_update(defense, setting, own.child("update", *k), torch.zeros(setting.dim))[1] for k in names]
        for twin in range(2):
            clients = [
                Client(sender, update.clone(), memory, own.child("private", twin, *k), own.child("shared", *k))
                for sender, update, k in zip(senders, updates, names, strict=True)
            ]
            exchange = round_.exchange(clients, own.child("channel", twin))
            if sums:
                distribution = defense.aggregate_distribution(state, updates, exchange.links)
                wire = _arrives(round_, exchange, own.child("server", twin))
            else:
                distribution = defense.message_distribution(state, memory, updates[0], exchange.links.each()[0])
                wire = (exchange.sent if defense.superposes else exchange.received)[0]
            if distribution is None or distribution.from_shared:  # a shared key makes both equal
                return {}
            reading = _read(distribution, wire, own.child(twin))
            row.append(reading.uniforms)
            discrete = not sums and reading.bits is None
        rows.append(row)
    one, other = np.array(rows).swapaxes(0, 1)
    if not one.size:
        return {}
    values = uniformity.twin_values(one, other, discrete=discrete)
    return {f"{name}, of {'twin sums' if sums else 'twins'}": p for name, p in values.items()}


def _read(distribution: MessageDistribution, wire: bytes, own: Key) -> Reading:
    """The message as its distribution reads it; bytes that it cannot parse also depart from it.

    Of a very long message, every n-th number.
    """
    try:
        reading = distribution.read(wire, own)
    except MessageError as error:
        raise DistributionError(str(error)) from error
    step = len(reading.uniforms) // _LONGEST
    return reading if step < 2 else Reading(reading.uniforms[::step], reading.places[::step])


def _arrives(here: Round, exchange: Exchange, server: Key) -> bytes:
    """The bytes that a distribution of sums describes: the superposition, or the decoded mean as float32."""
    if here.defense.superposes:
        return exchange.received[0]
    return here.decode(exchange, server).numpy().astype("<f4").tobytes()


def _update(defense: Defense[Any, Any], setting: Setting, key: Key, last: Tensor) -> tuple[int, Tensor]:
    """The number of a pattern, and an update of this shape with a norm far below, near or far above the clip."""
    pick, place, near, high = rng.uniform(key.child("pick"), (4,), dtype=torch.float64).tolist()
    clip = clip_of(defense)
    if place < _REPEATED and bool(last.any()):
        return len(_PATTERNS), last
    if place > 1 - _EXACT_NORM and defense.local.clip is None:
        return len(_PATTERNS) + 1, _exact(setting, key, clip * _NORMS[int(near * len(_NORMS))], 1 if high < 0.5 else 16)
    pattern = int(pick * len(_PATTERNS))
    values = rng.normal(key.child("values"), (setting.dim,), torch.float64)
    if _PATTERNS[pattern] == "zero":
        return pattern, torch.zeros(setting.dim)
    values = shaped(_PATTERNS[pattern], values, setting.layout, key)
    if defense.local.clip is not None:
        # local training has already bounded its updates
        norm = defense.local.clip * (setting.lr if setting.sends == "update" else 1.0) * 10 ** (-3 * high)
    elif near < 0.5:
        norm = clip * 10 ** (2 * high - 1)
    else:
        norm = 10 ** (12 * high - 6) if near < 0.85 else 10 ** (6 + 24 * high)
    return pattern, (values * (norm / values.norm())).float()


def _exact(setting: Setting, key: Key, norm: float, count: int) -> Tensor:
    """An update of so many coordinates, a power of 4, of equal size: its norm is a float32 number exactly."""
    update = torch.zeros(setting.dim)
    places = torch.from_numpy(rng.permutation(key.child("places"), setting.dim)[:count])
    update[places] = rng.normal(key.child("values"), (count,)).sign() * (norm / count**0.5)
    return update


def _max_norm_update(defense: Defense[Any, Any], setting: Setting, key: Key, last: Tensor) -> tuple[int, Tensor]:
    """The number of a pattern, and an update with all coordinates, or a single one, far above the clip or at it."""
    clip, pick = clip_of(defense), rng.uniform(key.child("pick"), (1,)).item()
    if pick > 1 - _EXACT_NORM / 2:
        return 3, _exact(setting, key, clip, 4 ** int(np.log2(setting.dim) / 2))
    signs = rng.normal(key.child("values"), (setting.dim,)).sign()
    if pick > 1 - 1.5 * _EXACT_NORM:
        return 2, clip * signs
    values, pattern = 10 * clip * setting.dim * signs, int(pick < _SINGLE)
    if pattern:
        values[torch.from_numpy(rng.permutation(key.child("places"), setting.dim)[1:])] = 0.0
    return pattern, values


def _sample(items: Sequence[_Item], setting: Setting) -> Sample:
    readings = [item.reading for item in items]
    places = np.array([reading.places for reading in readings], np.int64)
    updates = [item.update.double().numpy() for item in items]

    def stacked(name: str) -> Any:
        """[n, ...] this field of the readings that have it; None: none has."""
        rows = [getattr(reading, name) for reading in readings if getattr(reading, name) is not None]
        return np.array(rows) if rows else None

    return Sample(
        uniforms=np.array([reading.uniforms for reading in readings]),
        places=places,
        tensors=np.repeat(np.arange(len(setting.layout.sizes)), setting.layout.sizes),
        carried=np.array([np.where(at >= 0, update[at], 0.0) for at, update in zip(places, updates, strict=True)]),
        norms=np.array([np.linalg.norm(update) for update in updates]),
        sizes=np.array([item.sender.samples for item in items]),
        senders=np.array([item.sender.number for item in items]),
        rounds=np.array([item.round for item in items]),
        runs=np.array([item.run for item in items]),
        patterns=np.array([item.pattern for item in items]),
        bits=stacked("bits"),
        lowest=stacked("lowest"),
        ratios=stacked("ratios"),
    )


def _setting(like: Setting, sizes: tuple[int, ...] = _TENSORS) -> Setting:
    """The federation of the test, with the local training of `like` and its share of records in a batch."""
    layout = Layout(tuple(f"tensor {number}" for number in range(len(sizes))), tuple((size,) for size in sizes))
    batch = max(1, round(_SMALLEST * min(1.0, like.batch / like.samples))) if like.batch else 0
    size: dict[str, Any] = {"clients": _CLIENTS, "participants": _CLIENTS, "rounds": _ROUNDS, "samples": _SMALLEST}
    return replace(like, layout=layout, steps=min(like.steps, _STEPS), batch=batch, **size)
