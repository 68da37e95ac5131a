"""Epsilon under the distribution that a defense states, compared with the epsilon that its author calls proved.

A proof is an author's sentence about the stated distribution, which the other tests compare with messages. Here its
number is checked: the distributions of two neighboring inputs have a privacy loss (`MessageDistribution.loss`), and
losses add up over rounds. A search over pairs of inputs refutes a proof that is too small; it does not prove one. It
takes no message.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from leakgauge.harness.audit.neighbors import FAR, pairs, varied
from leakgauge.harness.core import accounting
from leakgauge.harness.core.claim import Claim, Horizon, Relation, Unit
from leakgauge.harness.core.contract import Defense, Link, Links, Sender, Setting, claim_of
from leakgauge.harness.core.distribution import Additive, Integers, MessageDistribution, PairLoss, moved_by
from leakgauge.harness.core.result import StatedRecord
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stored import finite
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.federation.small import Federation

_ROUNDS = 10  # rounds of the second comparison: a proof for one round may be called one for all

_ROUNDING, _GRID, _SMALLEST = 1e-3, 0.02, 1e-9
"""Differences of two epsilons that are not counted: relative ones, with random batches by an accountant's grid, and an
absolute one."""

_FURTHER = 1e4  # inputs are also compared at this multiple, for clips above `neighbors.FAR`


def check_stated(defense: Defense[Any, Any], setting: Setting, key: Key) -> StatedRecord:
    """Compares the proof with the stated distribution: for the setting's rounds, for ten, and with smaller batches.

    Args:
        key: draws the pairs of inputs, and is the parent of the distributions' shared keys.

    Raises:
        ValueError: the claim cannot be computed.
    """
    more = replace(setting, rounds=max(_ROUNDS, setting.rounds))
    batches = replace(more, batch=max(1, setting.samples // 4), steps=max(2, setting.steps))
    records = [_compared(defense, each, key) for each in dict.fromkeys((setting, more, batches))]
    faults = tuple(dict.fromkeys(fault for record in records for fault in record.faults))
    lacks = next((record.lacks for record in records if record.lacks), "")
    federation, link = Federation.of(defense, setting), Link(setting, Sender(0, setting.samples), key.child("shared"))
    zero = torch.zeros(setting.dim)
    stated = defense.message_distribution(federation.history[0], defense.remember(setting), zero, link)
    count, distinct = sum(record.pairs for record in records), stated is not None and stated.distinct
    return replace(records[0], pairs=count, faults=faults, lacks=lacks, distinct=distinct)


def _compared(defense: Defense[Any, Any], setting: Setting, key: Key) -> StatedRecord:
    federation = Federation.of(defense, setting)
    claim = claim_of(defense, federation.history, setting)
    covered = len(federation.history) if claim.horizon is Horizon.WHOLE_RUN else 1
    federation = replace(federation, history=federation.history[:covered])
    step = _of_steps(federation, claim) if claim.unit is Unit.RECORD else None
    losses = list(_losses(federation, claim, key)) if step is None else []
    known = [loss for loss in losses if loss is not None]
    found = [(*loss.ends(claim.delta), loss.error) for loss in known] if step is None else [step]
    proved = claim.proved.epsilon(claim.delta)
    unknown = "no privacy loss can be computed from a stated distribution" if len(known) < len(losses) else ""
    if proved == math.inf:
        unknown = ""
    if not found:
        return StatedRecord(0.0, None, None, 0, unknown, ())
    low, high = max(each[0] for each in found), max(each[1] for each in found)
    sampled = accounting.is_sampled(claim.proved.event)
    least = proved * (1 + (_GRID if sampled else _ROUNDING)) + _SMALLEST
    at = f" at delta {claim.delta:g}" if claim.delta else ""
    about = f"per {claim.unit.value}{at} over {covered} {'round' if covered == 1 else 'rounds'}, proved {proved:.5g}"
    fault = f"two inputs have epsilon {low:.5g} under the stated distribution, {about}"
    lacks = f"from the stated distribution follows only epsilon {high:.5g} {about}"
    faults = (fault,) if low > least else ()
    error = min(each[2] for each in found)
    return StatedRecord(finite(low), finite(high), error, len(found), lacks if high > least else unknown, faults)


def _of_steps(federation: Federation, claim: Claim) -> tuple[float, float, float] | None:
    """Epsilon of one record by the stated local steps, as in `PairLoss.ends`, and `PairLoss.error`; None: unknown."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    defense, setting, rounds = federation.defense, federation.setting, len(federation.history)
    step = defense.step_distribution(setting)
    if step is None:
        return None
    rule, moves = defense.local, 1.0 if claim.relation is Relation.ADD_REMOVE else 2.0
    steps = 1 if step.single or rule.full_batch else setting.steps
    if step.noise > 0:
        event: Any = GaussianDpEvent(step.noise / moves)
        if step.share < 1:
            event = PoissonSampledDpEvent(step.share, event)
        total_event = accounting.repeat(event, rounds * steps)
        epsilon = accounting.epsilon(total_event, claim.delta) if claim.delta or step.share >= 1 else math.inf
        # the distributions of a replaced record are not those of a larger sensitivity
        attained = moves == 1 or step.share >= 1
        return epsilon if attained else 0.0, epsilon, (1 - accounting.delta(total_event, 0.0)) / 2
    if steps > 1 or step.share < 1:
        return None
    # the records are clipped in training, and the message has noise
    moved = moves * step.clip * (setting.lr if setting.sends == "update" else 1.0) / setting.samples
    total = PairLoss()
    for state in federation.history:
        link = Link(setting, Sender(0, setting.samples), Key(0, ("stated",)))
        stated = defense.message_distribution(state, defense.remember(setting), torch.zeros(setting.dim), link)
        if not isinstance(stated, Additive):
            return None
        d = len(stated.center)
        ways = (torch.eye(d, dtype=torch.float64)[0].numpy(), torch.full((d,), d**-0.5, dtype=torch.float64).numpy())
        losses = [loss for way in ways if (loss := moved_by(stated.noise, moved * way, stated.scale)) is not None]
        if len(losses) < len(ways):
            return None
        total = total.plus(max(losses, key=lambda loss: loss.ends(claim.delta)[1]))
    return *total.ends(claim.delta), total.error


def _losses(federation: Federation, claim: Claim, key: Key) -> Iterator[PairLoss | None]:
    """The loss of each pair of inputs over all rounds; None: it is unknown.

    One record moves an update no further than the whole update may move, so this bounds the loss of a record.
    """
    defense, setting = federation.defense, federation.setting
    # rounds with one state have one distribution, apart from the shared key
    rounds = Counter(map(id, federation.history))
    federation = replace(federation, history=tuple({id(state): state for state in federation.history}.values()))
    parts, record = claim.unit in (Unit.COORDINATE, Unit.SUBVECTOR), claim.unit is Unit.RECORD
    unit = Unit.MESSAGE if record else claim.unit
    asked = (defense, setting, unit, Relation.ANY_TWO if record else claim.relation, key.child("pairs"))
    for inputs in [*pairs(*asked), *varied(*asked)]:
        for number in range(len(inputs.zero) if inputs.zero.dim() == 2 else 1):
            row = inputs.row(number)
            among = None if row.focus is None else row.focus.numpy()
            sender = row.senders[0] if row.senders else Sender(0, setting.samples)
            for factor in (1.0,) if parts and row.focus is not None else (1.0, _FURTHER / FAR):
                both = [_stated(federation, claim, factor * update, sender, key) for update in (row.zero, row.one)]
                loss = _whole(both, among, rounds.values())
                # a header in clear shows what it holds of any message; a claim per part is for equal headers
                if loss is None:
                    yield None
                elif not (parts and loss.squares == math.inf):
                    yield loss._replace(attained=loss.attained and not record)


def _whole(
    both: list[list[MessageDistribution | None]], among: Integers | None, counts: Iterable[int]
) -> PairLoss | None:
    """The sum over the rounds, of which each distribution is that of `counts`."""
    total = PairLoss()
    for zero, one, count in zip(*both, counts, strict=True):
        loss = None if zero is None or one is None else zero.loss(one, among)
        if loss is None:
            return None
        total = total.plus(loss.times(count))
    return total


def _stated(
    federation: Federation, claim: Claim, update: Vector, sender: Sender, key: Key
) -> list[MessageDistribution | None]:
    """The distribution in each round of what the adversary sees: the message, or the sum with updates of zero."""
    defense, setting = federation.defense, federation.setting
    against = claim.proved.against or claim.against or {Threat.SERVER}
    summed = defense.superposes or not any("messages" in SEES[threat] for threat in against)
    found: list[MessageDistribution | None] = []
    for number, state in enumerate(federation.history):
        shared = [key.child("shared", number, client) for client in range(setting.participants)]
        if not summed:
            link = Link(setting, sender, shared[0])
            found.append(defense.message_distribution(state, defense.remember(setting), update, link))
            continue
        others = [Sender(client, setting.samples) for client in range(1, setting.participants)]
        links = Links(setting, [sender._replace(number=0), *others], shared)
        updates = [update, *(torch.zeros(setting.dim) for _ in others)]
        found.append(defense.aggregate_distribution(state, updates, links))
    rounds = [one for one in found if one is not None]
    if not defense.correlates or len(rounds) < len(found):
        return found
    parts = defense.independent(federation.history, rounds, setting)
    return [None] * len(rounds) if parts is None else [*parts]
