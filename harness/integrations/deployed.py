"""The privacy mechanisms that Flower and NVFlare ship, as functions of one client's update, by their own formulas.

    leakgauge audit function:leakgauge.deployed.flower_local_dp --set epsilon=10 --set sensitivity=1e-4

Each takes a flat update [d] and returns what is sent in its place. They draw from numpy's global generator as the
packages do; as a defense, the private key seeds it. Strategies whose server adds noise to the mean are `dp-fedavg` with
`clip` C and `noise_std` zC, if clients have equal weights. docs/deployed.md has the verdict on each.

Sources: flwr 1.42 (`clientapp.mod`, `serverapp.strategy`, `common.secure_aggregation`), nvflare 2.9
(`app_common.filters`), and NVFlare's research/quantifying-data-leakage.
"""
# ruff: noqa: NPY002, TID251

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from leakgauge.harness.core.code import states

_MOST_PASSES = 10_000

Numbers = npt.NDArray[np.float64]


@states(noise=lambda of: of.sensitivity * math.sqrt(2 * math.log(1.25 / of.delta)) / of.epsilon)
def flower_local_dp(
    update: Numbers, clip: float = 1.0, sensitivity: float = 1.0, epsilon: float = 1.0, delta: float = 1e-5
) -> Numbers:
    """Flower's `LocalDpMod`: an l2 clip, and normal noise of sensitivity sqrt(2 ln(1.25 / delta)) / epsilon.

    Two updates within the clip are up to 2 clips apart, whatever `sensitivity` says; and the formula is that of Dwork &
    Roth 2014, Thm A.1, which holds below epsilon 1. Flower has no defaults; these are common in apps. Differs: Flower
    raises ZeroDivisionError for an update of zero.
    """
    noise = sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    return flower_clipping(update, clip) + np.random.normal(0.0, noise, update.shape)


def flower_clipping(update: Numbers, clip: float = 0.1) -> Numbers:
    """What leaves the client behind Flower's `fixedclipping_mod` and `adaptiveclipping_mod`: the clip, and no noise.

    The second mod also sends whether the update was clipped. With clipping on the server, not even the clip is there.
    """
    return update * min(1.0, clip / max(float(np.linalg.norm(update)), 1e-12))


class Adaptive(NamedTuple):
    """Noise of Flower's adaptive clipping: of the count of clipped clients, and of the sum in units of the clip.

    effective: multiplier of a Gaussian mechanism for one round, in which the clip shrinks by all but noise. As in the
    source, a client that is left out adds nothing to the sum and a half to the count.
    """

    count_noise: float
    sum_noise: float
    effective: float


def flower_adaptive(
    multiplier: float, sampled: int, count: float | None = None, quantile: float = 0.5, rate: float = 0.2
) -> Adaptive:
    """The noise of `DifferentialPrivacy{Server,Client}SideAdaptiveClipping` for a noise multiplier.

    Andrew et al. 2021, Thm 1, splits the multiplier z: the count gets `count`, and the sum (z^-2 - (2 count)^-2)^-1/2.
    Flower (1.42) first moves the clip by exp(-rate (clipped - quantile)) and then adds noise of the moved clip, but the
    updates were clipped by the one before: if all clients are clipped, the noise is exp(-rate (1 - quantile)) of that.
    Its `clipped` is the share that was clipped, where the source and Flower's older `DPFedAvgAdaptive` take the share
    that was not; so the clip shrinks if it is too small. `DPFedAvgAdaptive` also adds noise of the clip that was used:
    its numbers are those of rate 0.
    """
    count = sampled / 20 if count is None else count
    update = (multiplier**-2 - (2 * count) ** -2) ** -0.5
    shrunk = update * math.exp(-rate * (1 - quantile))
    return Adaptive(count, update, (shrunk**-2 + (2 * count) ** -2) ** -0.5)


def flower_secagg(update: Numbers, bound: float = 8.0, levels: int = 2**22) -> Numbers:
    """A client's numbers in the sum of Flower's SecAgg+: clamped and stochastically rounded to a grid, without noise.

    The masks cancel in the sum, which is all that a server of the protocol learns: the adversary `aggregator`.
    """
    step = 2 * bound / levels
    scaled = (np.clip(update, -bound, bound).astype(np.float64) + bound) / step
    up = np.ceil(scaled)
    return (up - (np.random.random(update.shape) < up - scaled)) * step - bound


def nvflare_percentile(update: Numbers, percentile: float = 10, gamma: float = 0.01, steps: int = 1) -> Numbers:
    """NVFlare's `PercentilePrivacy`: the smallest numbers become zero, the others are clamped to gamma per step."""
    each = update / steps
    return np.where(np.abs(each) < np.percentile(np.abs(each), percentile), 0, np.clip(each, -gamma, gamma)) * steps


def _svt(of: Any, size: int) -> tuple[float, str]:
    """The accountant's epsilon: `nvflare_svt` has the proof."""
    why = "the numbers above the noisy threshold among which some are drawn cost no more than a stop at as many."
    return of.selection + math.ceil(size * of.fraction) * of.noise_var, why


@states(delta=0.0, family="unknown", proves=_svt)
def nvflare_svt(
    update: Numbers,
    fraction: float = 0.1,
    selection: float = 0.1,
    noise_var: float = 0.1,
    gamma: float = 1e-5,
    tau: float = 1e-6,
    replace: bool = True,
) -> Numbers:
    """NVFlare's `SVTPrivacy`: a share of the numbers is drawn among those above a noisy threshold, and sent with noise.

    `selection` is NVFlare's `epsilon`; its accountant adds n `noise_var` for the n numbers that are sent. The standard
    technique stops at n numbers above the threshold (Lyu et al. 2017, Alg. 1). This one goes through all, repeats until
    there are n, and draws n of them. The accountant's epsilon holds all the same, for any two updates. Proof: a draw is
    the first number above the threshold in a random order. Fix the orders, the draws and the number of passes, which
    NVFlare sends too, and compare one update at threshold t with the other at t + gamma; this costs the threshold's
    epsilon. The numbers before a draw are never above, and fewer than n are above before the last pass: both get no
    less likely. Only the draws, and with replacement the numbers that complete n, must be above once: n numbers, each
    at a factor exp(2 gamma / scale). Sending all numbers above would cost more.
    """
    sent, values = math.ceil(update.size * fraction), np.clip(update, -gamma, gamma)
    of_threshold = selection / (1 + (2 * sent) ** (2 / 3))
    threshold = tau + np.random.laplace(scale=gamma / of_threshold)
    scale, above = 2 * gamma * sent / (selection - of_threshold), np.zeros(update.shape, bool)
    for _ in range(_MOST_PASSES):
        if above.sum() >= sent:
            break
        left = np.flatnonzero(~above)
        above[left] = np.abs(values[left]) + np.random.laplace(scale=scale, size=left.size) >= threshold
    else:
        raise ValueError(f"expected numbers above the threshold, got {above.sum()} of {sent}: NVFlare would not return")
    chosen = np.random.choice(np.flatnonzero(above), sent, replace)
    result = np.zeros(update.shape)
    result[chosen] = values[chosen] + np.random.laplace(scale=2 * gamma / noise_var, size=sent)
    return result


def nvflare_exclude_vars(update: dict[str, Numbers], exclude: str = "") -> dict[str, Numbers]:
    """NVFlare's `ExcludeVars`: tensors whose name matches the regular expression are not sent; here they are zero."""
    out = [name for name in update if exclude and re.search(exclude, name)]
    return {name: array * (name not in out) for name, array in update.items()}


def nvflare_gaussian(update: Numbers, sigma0: float = 0.1, max_percentile: float = 95) -> Numbers:
    """NVFlare's `GaussianPrivacy`, of its research code: noise relative to a percentile of the update, and no clip.

    Differs: an update of zero is sent as it is; NVFlare's raises IndexError.
    """
    sizes = np.abs(update[update != 0])
    scale = sigma0 * float(np.percentile(sizes, max_percentile)) if sizes.size else 0.0
    return update + np.random.normal(0.0, scale, update.shape)
