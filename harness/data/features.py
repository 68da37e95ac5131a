"""Fixed public features of another data set's inputs: what clients hold if a public part of the model never trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.data import DataSet, Form, load

_SIDE, _STRIDE = 6, 2  # of a patch, and between patches, in pixels
_SHOWN = 20_000  # most public inputs that are looked at
_FEWEST = 20  # records of data that are their own public set
_WHITE, _OVER = 0.1, 0.25  # ridge of the whitening, for patches of unit variance; threshold of a response
_AT_ONCE = 200  # images whose responses are held at once
_KEY = Key(0).child("public features")


def _read(name: str, options: Mapping[str, str], root: Path | None) -> DataSet:
    """The data with features for inputs.

    `axes=K`: the coordinates along the K principal axes of the public inputs, each divided by the fourth root of its
    variance. `patches=K`: the responses to K random whitened patches of the public images, summed over the quarters of
    an image, 8 K numbers (Coates, Lee and Ng 2011, with patches for centers). Each row is scaled to length 1, and each
    feature to [0, 1] by its range in the public data; a private input beyond that range is clamped.

    If the data are their own public set, a tenth of the training records is public, and leaves the data.
    """
    axes, patches, other = options.get("axes", ""), options.get("patches", ""), options.get("public", "")
    if (bool(axes) == bool(patches)) or not (axes or patches).isdecimal() or not other:
        raise ValueError(f"features:{name}: expected ?axes=K&public=DATA or ?patches=K&public=DATA")
    data, public = load(name, root), load(other, root)
    given, known = data.train, public.train.x
    if data.digest == public.digest:
        if len(known) < _FEWEST:
            raise ValueError(f"features:{name}: expected {_FEWEST} records or more of its own, got {len(known)}")
        taken = rng.subset(_KEY.child("own"), len(known), len(known) // 10)
        rest = np.delete(np.arange(len(known)), taken)
        given, known = Examples(given.x[rest], given.y[rest]), known[taken]
    shown = public.original(known[:_SHOWN])
    if shown.shape[1:] != data.input_shape:
        raise ValueError(f"features:{name}: expected public inputs {data.input_shape}, got {tuple(shown.shape[1:])}")
    made = _axes(shown, int(axes)) if axes else _patches(shown, int(patches))
    seen = _unit(made(shown))
    low, span = seen.amin(0), (seen.amax(0) - seen.amin(0)).clamp(min=1e-6)

    def features(split: Examples) -> Examples:
        return Examples(((_unit(made(data.original(split.x))) - low) / span).clamp(0, 1), split.y)

    full = f"features:{name}?" + "&".join(f"{key}={value}" for key, value in options.items())
    train, test = features(given), features(data.test)
    return DataSet(full, train, test, data.classes, public=False, note=f"features from {other}", low=low, span=span)


class _axes:  # noqa: N801 - a function with memory
    """Principal axes of public inputs."""

    def __init__(self, shown: Tensor, count: int) -> None:
        flat = shown.flatten(1).double()
        if not 0 < count <= flat.shape[1]:
            raise ValueError(f"expected 1 to {flat.shape[1]} axes, got {count}")
        self.mean = flat.mean(0)
        values, vectors = torch.linalg.eigh((flat - self.mean).T @ (flat - self.mean) / len(flat))
        self.axes = vectors[:, -count:] / values[-count:].clamp(min=1e-12) ** 0.25

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = ((x.flatten(1).double() - self.mean) @ self.axes).float()
        return found


class _patches:  # noqa: N801 - a function with memory
    """Random patches of public images, whitened by the covariance of all public patches."""

    def __init__(self, shown: Tensor, count: int) -> None:
        if shown.ndim != 4 or min(shown.shape[2:]) < 2 * _SIDE:
            raise ValueError(f"expected images of {2 * _SIDE} pixels or more, got inputs {tuple(shown.shape[1:])}")
        rows = rng.subset(_KEY.child("images"), len(shown), min(len(shown), 2000))
        every = torch.nn.functional.unfold(shown[rows], _SIDE, stride=_STRIDE).transpose(1, 2).flatten(0, 1)
        self.shape = (*shown.shape[1:2], _SIDE, _SIDE)
        every = self._normal(every)
        self.mean = every.mean(0)
        centered = (every - self.mean).double()
        values, vectors = torch.linalg.eigh(centered.T @ centered / len(centered))
        white = (vectors / (values + _WHITE).sqrt() @ vectors.T).float()
        chosen = (every - self.mean)[rng.subset(_KEY.child("patches"), len(every), count)] @ white
        self.filters = white @ (chosen / chosen.norm(dim=1, keepdim=True)).T

    def _normal(self, patches: Tensor) -> Tensor:
        centered = patches - patches.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + 1e-2).sqrt()

    def __call__(self, x: Tensor) -> Tensor:
        out = []
        for part in torch.split(x, _AT_ONCE):
            each = torch.nn.functional.unfold(part, _SIDE, stride=_STRIDE).transpose(1, 2)
            answers = (self._normal(each) - self.mean) @ self.filters
            height, width = ((side - _SIDE) // _STRIDE + 1 for side in x.shape[2:])
            both = torch.cat([(answers - _OVER).relu(), (-answers - _OVER).relu()], 2).transpose(1, 2)
            grid = both.reshape(len(part), -1, height, width)
            out.append(torch.nn.functional.adaptive_avg_pool2d(grid, 2).flatten(1))
        return torch.cat(out)


def _unit(features: Tensor) -> Tensor:
    scaled: Tensor = features / features.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return scaled


FORMS = {
    "features": Form(
        "DATA",
        "fixed public features of another data set: ?axes=60&public=DATA, ?patches=100&public=DATA",
        _read,
        ("axes", "patches", "public"),
        nested=True,
    ),
}
