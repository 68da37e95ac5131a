"""DP-FTRL: the clients clip, and the server adds noise that later rounds partly take back."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leakgauge.defenses._common.server_noise import FIXED, HONEST, ServerNoise
from leakgauge.harness.core import rng
from leakgauge.harness.core.claim import Claim, Proof, Unit
from leakgauge.harness.core.contract import Feedback, Links, Setting
from leakgauge.harness.core.distribution import Additive, MessageDistribution, Normal
from leakgauge.harness.core.gaussian import gaussian_mu
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

_SOURCE = "Choquette-Choo et al. 2023, the sensitivity of a banded matrix; Balle & Wang 2018, Thm 8"

_ROUNDING = 1e-15  # smaller entries of C^-1, which fall off with the rounds, are below the rounding of a sum


class Turn(NamedTuple):
    """The number of a round, and the rounds and groups of all clients: a claim gets the setting of one client."""

    number: int
    rounds: int
    groups: int


@dataclass(frozen=True)
class DPFTRL(ServerNoise[Turn]):
    """DP-FTRL by a banded matrix: as `dp-fedavg`, but the noise of a round takes back a part of that of earlier rounds.

    The model is a sum over rounds, so noise that cancels over rounds harms it less. The noise of all T rounds is
    C^-1 Z: the rows of Z are independent normal noise, and C is lower triangular with constants c(0) = 1, c(1), ...,
    c(b-1) on its diagonals. Row t is y(t) = z(t) - c(1) y(t-1) - ... - c(b-1) y(t-b+1).

    The c(k) are the first b coefficients of 1 / sqrt((1 - x) (1 - m x)), m the server's momentum: of the square root of
    the matrix that maps the rounds' means to the models.

    Args:
        clip: C, bound on the l2 norm of a client's update, in units of the update.
        epsilon: privacy budget of the whole run of `setting.rounds` rounds, for one client, at `delta`; sets the noise.
            Default 8 unless `noise_std` is given.
        delta: delta of the guarantee for the whole run.
        noise_std: standard deviation sigma of an entry of Z, in units of the update: of the noise of round 0 in a
            coordinate of the sum. It replaces `epsilon`.
        band: b, the number of diagonals; by default the number of groups of clients that take turns. 1: independent
            noise. More than the number of groups is allowed, and costs more noise.

    Guarantees:
        Messages have 4 * d bytes.
        decode(messages) of round t is (sum(clip(u)) + y(t)) / U. y(t) is normal; its covariance with y(s) is sigma^2
        times entry (t, s) of C^-1 C^-T, in each coordinate.
        Let P be the rounds in which a client takes part. Adding or removing it moves C times the sums by at most
        clip * |C 1_P|, because the entries of C are not negative; equal updates attain this. If b is at most the number
        of groups, the columns do not overlap, and |C 1_P|^2 is the sum of their squared norms. All rounds are thus one
        Gaussian mechanism, also if updates depend on earlier models.
        No guarantee holds against an adversary that sees messages.

    Raises:
        ValueError: a parameter is out of range, or both `epsilon` and `noise_std` are given; with the setting, only
            drawn clients take part.

    Source: Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization: a unified approach to private
        training", without amplification; Kairouz et al. 2021, "Practical and private (deep) learning without sampling
        or shuffling" (DP-FTRL).
        Differs: C has equal entries along a diagonal, and is the truncated square root instead of the optimum over all
        banded matrices. Its error is within 6 % of the optimum with equal entries, for up to 100 rounds and 32
        diagonals. It is meant for a server with SGD and a constant learning rate; the guarantee holds for any.
    """

    correlates: ClassVar[bool] = True

    band: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.band is not None and self.band < 1:
            raise ValueError(f"expected band >= 1, got band={self.band}")

    def init(self, setting: Setting) -> Turn:
        """Round 0."""
        if setting.share < 1:
            raise ValueError(
                "expected clients that take turns (participation = 'turns') or all take part: others may take part in "
                f"any round; got {setting.participants} of {setting.clients} clients, {setting.participation}"
            )
        return Turn(0, setting.rounds, setting.groups)

    def advance(self, state: Turn, feedback: Feedback) -> Turn:
        """The next round."""
        return state._replace(number=state.number + 1)

    def diagonals(self, run: Setting | Turn, momentum: float) -> tuple[float, ...]:
        """c(0) = 1, c(1), ..., at most as many as rounds."""
        return _root(min(self.band or run.groups, run.rounds), momentum)

    def sigma(self, run: Setting | Turn, momentum: float) -> float:
        """Standard deviation of an entry of Z; `run` has the rounds and groups of all clients."""
        if self.noise_std is not None:
            return self.noise_std
        assert self.epsilon is not None  # __post_init__ sets one of the two
        diagonals = self.diagonals(run, momentum)
        phases = (range(first, run.rounds, run.groups) for first in range(min(run.groups, run.rounds)))
        moved = max(_moved(diagonals, taken, run.rounds) for taken in phases)
        return self.clip * moved / gaussian_mu(self.epsilon, self.delta)

    def noise(self, state: Turn, setting: Setting, private: Key) -> Tensor:
        """[d] float64: y(t) in units of sigma. Row z(s) is drawn from child s of the run's key."""
        inverse = _inverse(self.diagonals(setting, setting.server_momentum), state.number + 1)
        row = torch.zeros(setting.dim, dtype=torch.float64)
        for ago in np.flatnonzero(np.abs(inverse) > _ROUNDING).tolist():
            drawn = rng.normal(private.child(state.number - ago), (setting.dim,), torch.float64)
            row.add_(drawn, alpha=float(inverse[ago]))
        return row

    def decode(self, state: Turn, received: Sequence[bytes], links: Links, private: Key) -> Vector:
        """The sum of the clipped updates, plus noise from the server's key of the run, divided by U."""
        setting = links.setting
        total = self.sigma(setting, setting.server_momentum) * self.noise(state, setting, private)
        total += self.sent(received, links).sum(0, dtype=torch.float64)
        return (total / setting.participants).float()

    def aggregate_distribution(self, state: Turn, updates: Sequence[Vector], links: Links) -> MessageDistribution:
        """The distribution in this round alone: normal noise around the sum of the projected updates, divided by U."""
        setting = links.setting
        diagonals = self.diagonals(setting, setting.server_momentum)
        spread = float(np.linalg.norm(_inverse(diagonals, state.number + 1)))
        std = self.sigma(setting, setting.server_momentum) * spread / setting.participants
        return Additive(self.center(updates, links), Normal(), std)

    def independent(
        self, history: Sequence[Turn], rounds: Sequence[MessageDistribution], setting: Setting
    ) -> list[MessageDistribution]:
        """C times the means: row t is the sum of c(k) times the mean of round t - k, with noise of sigma / U."""
        diagonals = self.diagonals(setting, setting.server_momentum)
        std = self.sigma(setting, setting.server_momentum) / setting.participants
        centers = np.array([one.center for one in rounds if isinstance(one, Additive)])
        rows = [sum(c * row for c, row in zip(diagonals, centers[t::-1], strict=False)) for t in range(len(centers))]
        return [Additive(np.asarray(row), Normal(), std) for row in rows]

    def settled(self, setting: Setting) -> dict[str, int]:
        """The band."""
        return {"band": len(self.diagonals(setting, setting.server_momentum))}

    def claim(self, history: Sequence[Turn], setting: Setting) -> Claim:
        """(epsilon, delta) for one client that takes part in these rounds; adversaries see the models of all rounds."""
        taken = [state.number for state in history]
        run, momentum = (history[0] if history else self.init(setting)), setting.server_momentum
        moved = self.clip * _moved(self.diagonals(run, momentum), taken, max([run.rounds, *(t + 1 for t in taken)]))
        multiplier = self.sigma(run, momentum) / moved if taken else math.inf
        reason = (
            "one client moves all sums, times the matrix of the noise, by at most its clip times the columns' norm."
        )
        proved = Proof.gaussian(multiplier, min(1, len(taken)), Unit.CLIENT, reason)
        return self.against_models(len(history), proved.epsilon(self.delta), proved, _SOURCE, (HONEST, FIXED))


@functools.lru_cache(maxsize=64)
def _root(band: int, momentum: float) -> tuple[float, ...]:
    """The first coefficients of (1 - x)^-1/2 (1 - momentum x)^-1/2."""
    k = np.arange(1, band)
    plain = np.cumprod([1.0, *((2 * k - 1) / (2 * k))])
    return tuple(np.convolve(plain, plain * momentum ** np.arange(band))[:band].tolist())


def _moved(diagonals: Sequence[float], taken: Sequence[int], rounds: int) -> float:
    """|C 1_P| for the rounds P that are taken."""
    return float(np.linalg.norm(np.convolve(np.bincount(taken, minlength=rounds), diagonals)[:rounds]))


@functools.lru_cache(maxsize=256)
def _inverse(diagonals: tuple[float, ...], rounds: int) -> npt.NDArray[np.float64]:
    """The first entries of the first column of C^-1."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], diagonals, np.eye(1, rounds)[0]))
