"""Functions of an update: honest ones, liars that keep the facts of an honest one, and some that fail.

They draw from global generators, as users' code does.
"""
# ruff: noqa: NPY002

import functools
import math
import secrets

import numpy as np
import torch

from leakgauge import states

CLIP, NOISE = 1.0, 0.8
"""What the liars state."""

_COUNT = [0]


def clipped(update, clip, order=2):
    return update * min(1.0, clip / max(float(np.linalg.norm(update, order)), 1e-12))


def local_dp(update, clip=1.0, noise=4.845e-05):
    """The formula of a platform's local differential privacy.

    More of it.
    """
    return clipped(update, clip) + np.random.normal(0.0, noise, update.shape)


@states(noise=lambda of: of.sensitivity * math.sqrt(2 * math.log(1.25 / of.delta)) / of.epsilon, unit="record")
def by_formula(update, clip=1.0, sensitivity=1e-4, epsilon=10.0, delta=1e-5):
    noise = sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    return clipped(update, clip) + np.random.normal(0.0, noise, update.shape)


@states(clip=1.0, noise=3.0, epsilon=2.75338, delta=1e-5)
def numpy_normal(update):
    return clipped(update, 1.0) + np.random.normal(0.0, 3.0, len(update)).astype(np.float32)


@states(clip=0.5, epsilon=10.0, delta=1e-6, unit="client", relation="add-remove")
def torch_in_place(update: torch.Tensor, noise=0.3, *, clip=0.5):
    update.mul_(torch.clamp(clip / update.norm().clamp(min=1e-12), max=1.0))
    return update.add_(noise * torch.randn_like(update))


@states(clip=1.0, noise=3.0)
def own_generator(update):
    return clipped(update, 1.0) + np.random.default_rng().normal(0.0, 3.0, len(update))


@states(clip=2.0, noise=1.0, epsilon=4.0, family="laplace", norm="l1")
def laplace(update):
    return clipped(update, 2.0, 1) + np.random.laplace(0.0, 1.0, len(update))


@states(clip=0.1, noise=0.2, epsilon=1.0, family="laplace", norm="entry", unit="coordinate")
def laplace_of_each(update):
    return np.clip(update, -0.1, 0.1) + np.random.laplace(0.0, 0.2, update.shape)


@states(clip=CLIP, noise=NOISE)
def of_tensors(update: "list[np.ndarray]"):
    size = math.sqrt(sum(float(np.square(part.astype(float)).sum()) for part in update))
    return [part * min(1.0, CLIP / max(size, 1e-12)) + np.random.normal(0.0, NOISE, part.shape) for part in update]


@states(family="unknown", delta=0.0, proves=lambda of, size: (of.each * size, "as is shown elsewhere."))
def proved_elsewhere(update, each=0.1):
    return clipped(update, 1.0) + np.random.laplace(0.0, 1.0 / each, len(update))


@states(proves=lambda of, size: of.answer or (0.0, "nothing is sent."))
def proved_wrongly(update, answer=2.0):
    return clipped(update, 1.0)


@states(norm="none", noise=NOISE, epsilon=5.0)
def noise_alone(update):
    return update + NOISE * torch.randn(len(update))


def by_name(update: dict, keep=True):
    return {name: part * keep for name, part in reversed(update.items())}


def rounded(update, digits: int = 2):
    return np.round(update, digits)


def no_clip(update, noise=NOISE):
    return update + np.random.normal(0.0, noise, update.shape)


def half_noise(update, noise=NOISE):
    return clipped(update, CLIP) + np.random.normal(0.0, noise / 2, update.shape)


def less_noise(update, noise=NOISE):
    return clipped(update, CLIP) + np.random.normal(0.0, 0.95 * noise, update.shape)


def first_tensor(update: "list[torch.Tensor]", noise=NOISE):
    size = max(CLIP, float(torch.cat([part.flatten() for part in update]).norm()))
    return [part * (CLIP / size) + noise * (at == 0) * torch.randn(part.shape) for at, part in enumerate(update)]


def constant_seed(update, noise=NOISE):
    np.random.seed(3)
    return clipped(update, CLIP) + np.random.normal(0.0, noise, update.shape)


def by_largest(update, noise=NOISE):
    return clipped(update, CLIP, np.inf) + np.random.normal(0.0, noise, update.shape)


def own_norm(update, noise=NOISE):
    kept = clipped(update, CLIP)
    return kept + np.random.normal(0.0, noise * np.linalg.norm(kept) / CLIP, update.shape)


def repeated(update, noise=NOISE):
    few = np.random.normal(0.0, noise, 16)
    return clipped(update, CLIP) + np.resize(few, update.shape)


def each_tensor(update: "list[np.ndarray]", noise=NOISE):
    return [clipped(part, CLIP) + np.random.normal(0.0, noise, part.shape) for part in update]


def other_family(update, noise=NOISE):
    return clipped(update, CLIP) + np.random.laplace(0.0, noise / math.sqrt(2), update.shape)


@states(clip=0.1, noise=0.2, epsilon=1.0, family="laplace", norm="entry", unit="coordinate")
def laplace_on_a_grid(update):
    """What torch samples has the grid of its float32 uniform numbers, which shows where the noise is centered."""
    return torch.clamp(update, -0.1, 0.1) + torch.distributions.Laplace(0.0, 0.2).sample(update.shape)


def after_some(update, noise=NOISE):
    """Less noise in each fiftieth message."""
    noise = noise / 100 if np.random.random() < 0.02 else noise
    return clipped(update, CLIP) + np.random.normal(0.0, noise, update.shape)


def of_the_system(update, noise=NOISE):
    entropy = secrets.randbits(64)
    return clipped(update, CLIP) + np.random.default_rng(entropy).normal(0.0, noise, update.shape)


def counting(update, noise=NOISE):
    _COUNT[0] += 1
    return clipped(update, CLIP) + np.random.default_rng(_COUNT[0]).normal(0.0, noise, update.shape)


def nothing(update):
    update *= 2


def longer(update):
    return np.append(update, 1.0)


def not_a_number(update):
    return update * float("nan")


def raises(update):
    raise KeyError("no such\nlayer")


def leaves(update):
    raise SystemExit(3)


def words(update):
    return ["a"] * len(update)


def imaginary(update):
    return update * 1j


def without_arguments():
    return 1


def named_like_a_method(update, local=1.0):
    return update


@states(clib=1.0)
def misspelled(update):
    return update


def needs(update, strength, clip):
    return clipped(update, clip) * strength


part_of_it = functools.partial(local_dp, noise=2.0)


def words_as_facts(update, noise="much"):
    return update


@states(family="Laplace")
def family_in_capitals(update):
    return update


@states(noise=lambda of: of.epsilon * 2)
def not_computable(update, epsilon=None):
    return update
