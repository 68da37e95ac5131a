"""What a defense states of messages and of a training, checked and put together: its likelihoods and its claim."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from leakgauge.harness.core import claim as claims
from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.defense import Apart, Evidence, Guarantee, Likelihood, Link, Links, Setting
from leakgauge.harness.core.errors import NoLikelihood

_ROUNDING = 1e-7
"""Assumed standard deviation between the numbers in the clear of a message and those of its update as an adversary
computes it, as a share of the largest number: measured for gradients of single records, whose largest was 2e-7."""

_FORGIVEN = 12.0
"""Nats that numbers in the clear tell a search at most: about the logarithm of how many texts it tries."""


def likelihood_of(
    defense: Evidence[Any, Any], state: Any, received: Sequence[bytes], links: Links, *, exact: bool = False
) -> Likelihood:
    """The defense's likelihood.

    Args:
        exact: for a test between given updates, instead of a search.

    Raises:
        NoLikelihood: the defense states none, or returns something that is not a function.
    """
    method = defense.exact_likelihood if exact else defense.likelihood
    stated: Any = method(state, received, links)
    if not callable(stated):
        name = f"{type(defense).__name__}.{method.__name__}"
        raise NoLikelihood(f"expected a function of updates from {name}, got {stated!r}")
    score: Likelihood = stated
    return score


def log_likelihoods(
    defense: Evidence[Any, Any], state: Any, received: bytes, link: Link, together: int, *, search: bool = False
) -> Callable[[Tensor], Tensor]:
    """A function of many updates [n, d], or [n, users, d] of a sum: their log likelihoods [n], up to a constant.

    All are given the same message, which is read once. They are in double precision, if the defense's function takes
    it: the numbers of a long message add up to more digits than single precision has. Numbers that a message shows in
    the clear must agree up to rounding, where the likelihood may leave a search more room.

    Args:
        together: the number of updates for which the defense is asked at once.
        search: take the likelihood for searches, without its own term for numbers in the clear (`Apart`), and let these
            cost at most 12 nats, so that updates that are wrong in part differ by the rest.

    Raises:
        NoLikelihood: as `likelihood_of`.
    """
    shared = None if link.shared is None else [link.shared] * together
    links = Links(link.setting, [link.sender] * together, shared)
    stated: Callable[[Tensor], Tensor] = likelihood_of(defense, state, [received] * together, links, exact=not search)
    if search and isinstance(stated, Apart):
        stated = stated.hidden
    clear = defense.read_plaintext_statistic([received], link.setting)
    deviation = _ROUNDING * float(clear.abs().max()) if clear.any() else math.inf
    most = _FORGIVEN if search else math.inf

    def score(updates: Tensor) -> Tensor:
        rows = []
        for part in torch.split(updates, together):
            whole = torch.cat([part, part[-1:].expand(together - len(part), *part.shape[1:])])
            try:
                misfit = stated(whole.double())
            except RuntimeError:  # of a function for single precision
                misfit = stated(whole)
            if deviation < math.inf and part.dim() == 2:
                differs = defense.plaintext_statistic(whole.double(), link.setting) - clear
                misfit = misfit + (0.5 * (differs / deviation).square().sum(1)).clamp(max=most)
            rows.append(-misfit[: len(part)].double())
        return torch.cat(rows).nan_to_num(-math.inf, -math.inf, -math.inf)

    return score


def claim_of(defense: Guarantee[Any, Any], history: Sequence[Any], setting: Setting) -> Claim:
    """The defense's claim: of the rounds in which one client takes part, and of the client for which it is the largest.

    Raises:
        ValueError: `Defense.claim` returns something that is not a `Claim`.
    """
    spoken = [history[first :: setting.groups] for first in range(min(setting.groups, len(history)))]
    if all(state is None for state in history):
        spoken = spoken[:1]
    spoken, alone = spoken or [history], setting.of_one_client
    each: list[object] = [defense.claim(states, alone) for states in spoken]
    users = alone.participants if alone.equal and _adds_up(type(defense)) else 1
    stated: list[Claim] = [
        claims.in_sums(claim, partial(defense.summed_proof, states, alone), users)
        for claim, states in zip(each, spoken, strict=True)
        if isinstance(claim, Claim)
    ]
    if len(stated) < len(each):
        name, got = type(defense).__name__, next(claim for claim in each if not isinstance(claim, Claim))
        raise ValueError(f"expected a Claim from {name}.claim, got {got!r}; without `claim` nothing is promised")
    worst = max(stated, key=lambda claim: (claim.proved.epsilon(claim.delta), claim.epsilon))
    worst = dataclasses.replace(worst, arithmetic=defense.arithmetic)
    return worst if setting.groups == 1 else claims.over_turns(worst, len(history), setting.turns)


def _adds_up(kind: type) -> bool:
    """Whether the messages of a class are those of the class that states `summed_proof`."""
    places = {
        name: next((at for at, base in enumerate(kind.__mro__) if name in vars(base)), len(kind.__mro__))
        for name in ("summed_proof", "encode", "transmit", "estimate", "average", "decode")
    }
    return min(places.values()) == places["summed_proof"]
