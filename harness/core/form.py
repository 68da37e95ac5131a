"""Forms of an input: image, table row, series, tokens. Each form says how far two inputs are apart and how to score.

A new form is a class here; data sets and tasks hold one. Attacks state which forms they read (`Attack.forms`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leakgauge.harness.core import rng, table
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.table import Column

Words = npt.NDArray[np.str_]

SUCCESS = 1e-3
"""MSE below which a reconstruction counts as a success."""

PSNR_CAP = 100.0
"""dB, at an MSE of 1e-10: an exact reconstruction has no finite PSNR. Rounding to 8 bits alone gives 59 dB."""

_TYPICAL, _COMPARED = 150, 40  # texts among which the most typical one is sought, and those it is compared with
_ENTRIES = 2**24  # numbers that a comparison of texts holds at once


@dataclass(frozen=True)
class Form:
    """Vectors of numbers in [0, 1], and what the other forms have in common.

    Attributes:
        name: as in `Attack.forms`.
        axes: number of axes of one input.
        scores: names of the metrics of `score`, in the order of a report; `mse` is a median, others are means.
        nothing: the entries of a guess where there is none.
        instead: what to do where an attack does not read this form.
    """

    name: ClassVar[str] = "vector"
    axes: ClassVar[int] = 1
    scores: ClassVar[tuple[str, ...]] = ("mse",)
    nothing: ClassVar[float] = 0.5
    instead: ClassVar[str] = "take another attack"

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of a table; else empty."""
        return ()

    @property
    def continuous(self) -> bool:
        """Whether inputs can change by small steps."""
        return True

    def problem(self, x: Tensor) -> str:
        """Why x [n, *input_shape] has not this form; empty: it has."""
        if x.ndim != 1 + self.axes:
            return f"expected inputs with {self.axes} axes for the form {self.name}, got shape {tuple(x.shape[1:])}"
        low, high = x.aminmax()
        return "" if low >= 0 and high <= 1 else f"expected x in [0, 1], got {low:g} to {high:g}"

    def inputs(self, b: int, input_shape: tuple[int, ...], key: Key) -> Tensor:
        """[b, *input_shape]: inputs of a dry run."""
        return rng.uniform(key.child("x"), (b, *input_shape))

    def valid(self, x: Tensor) -> Tensor:
        """The guess x, moved to where inputs can be, by which it is identified."""
        return x

    def texts(self, truth: Tensor, guess: Tensor) -> tuple[Words, Words] | None:
        """Inputs [b, ...] and guesses of them as words, for readers; None: this form is not shown as words."""
        return table.texts(truth, guess, self.columns) if self.columns else None

    def costs(self, truth: Tensor, guess: Tensor) -> Tensor:
        """[b, c] float64: how far each of c guesses is from each of b inputs; by squared distance."""
        # without a matrix product, which would lose small distances
        return torch.cdist(_flat(truth), _flat(guess), compute_mode="donot_use_mm_for_euclid_dist").square()

    def score(self, truth: Tensor, guess: Tensor) -> dict[str, Numbers]:
        """[b] of each metric in `scores`, and 1 for each `success`, for finite guesses in the order of the inputs."""
        mse = _mse(truth, guess)
        return {"mse": mse, "success": (mse < SUCCESS).astype(np.float64)}

    def blind(self, x: Tensor, *, majority: bool = False) -> Tensor:
        """[*input_shape] the guess that scores best without a message, from other inputs x.

        Raises:
            ValueError: `majority` is asked for, and the form has no such guess.
        """
        if majority:
            raise ValueError("expected data with known columns, such as adult, for guess 'majority', got other data")
        return x.double().mean(dim=0).to(x.dtype)

    def has(self, x: Tensor, name: str, usual: Tensor) -> Tensor:
        """[n] bool: which inputs have a property; see `table.has_property`."""
        return table.has_property(x, self.columns, name, usual)


@dataclass(frozen=True)
class Series(Form):
    """[channels, time] numbers in [0, 1]."""

    name: ClassVar[str] = "series"
    axes: ClassVar[int] = 2
    scores: ClassVar[tuple[str, ...]] = ("correlation", "mse")

    def score(self, truth: Tensor, guess: Tensor) -> dict[str, Numbers]:
        """Also the correlation over all entries; 0 for a constant."""
        a, b = (_flat(x) - _flat(x).mean(1, keepdim=True) for x in (truth, guess))
        correlation = torch.nn.functional.cosine_similarity(a, b, dim=1)
        return super().score(truth, guess) | {"correlation": np.asarray(correlation.numpy(), np.float64)}


@dataclass(frozen=True)
class Picture(Form):
    """[channels, height, width] numbers in [0, 1]."""

    name: ClassVar[str] = "image"
    axes: ClassVar[int] = 3
    scores: ClassVar[tuple[str, ...]] = ("ssim", "mse", "psnr")

    def valid(self, x: Tensor) -> Tensor:
        """Pixels are clipped."""
        return x.clamp(0, 1)

    def score(self, truth: Tensor, guess: Tensor) -> dict[str, Numbers]:
        """SSIM and PSNR (dB) of clipped guesses, and MSE of guesses as they are, as in the papers.

        The SSIM window is 7 x 7, or the largest odd window that fits into a smaller image; with sides below 3 pixels
        there is neither SSIM nor PSNR.

        Source: Wang et al. 2004 in scikit-image (uniform window, sample covariance), data range 1, mean over channels.
        """
        each = super().score(truth, guess)
        if min(truth.shape[2:]) < 3:
            return each
        from skimage.metrics import structural_similarity

        side = min(7, *truth.shape[2:])
        window = side if side % 2 else side - 1
        x, clipped = numbers_of(truth), numbers_of(guess).clip(0, 1)
        ssim = [
            structural_similarity(a, b, win_size=window, data_range=1.0, channel_axis=0)  # type: ignore[no-untyped-call]
            for a, b in zip(x, clipped, strict=True)
        ]
        errors = np.mean((x - clipped) ** 2, axis=(1, 2, 3))
        psnr = -10 * np.log10(np.maximum(errors, 10 ** (-PSNR_CAP / 10)))
        return {"ssim": np.array(ssim, np.float64), "psnr": psnr, **each}


@dataclass(frozen=True)
class Table(Form):
    """Rows of a table as vectors; see `table.Column`."""

    name: ClassVar[str] = "table"
    known: tuple[Column, ...] = ()

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns."""
        return self.known

    def problem(self, x: Tensor) -> str:
        """Also that the columns have the width of x."""
        if x.shape[1:] != (sum(column.width for column in self.columns),):
            return f"expected columns for inputs {tuple(x.shape[1:])}, got {len(self.columns)} of another width"
        return super().problem(x)

    def blind(self, x: Tensor, *, majority: bool = False) -> Tensor:
        """`majority`: for each column the guess that is right most often."""
        return table.commonest(x, self.columns) if majority else super().blind(x)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a data set.

    Attributes:
        size: ids are below it.
        words: the text of each id; empty: unknown.
        unknown: the id that stands for all words without an id of their own; None: there is none.
        padding: the id that fills short texts, and is no word; None: there is none.

    Raises:
        ValueError: the numbers contradict each other.
    """

    size: int
    words: tuple[str, ...] = ()
    unknown: int | None = None
    padding: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or len(self.words) not in (0, self.size):
            raise ValueError(f"expected a word for each of {self.size} ids, got {len(self.words)} words")
        for name in ("unknown", "padding"):
            if (token := getattr(self, name)) is not None and not 0 <= token < self.size:
                raise ValueError(f"expected {name} from 0 to {self.size - 1}, got {token}")

    def texts(self, ids: Tensor) -> Words:
        """The words of ids [...], or their numbers; empty for padding, and for what is no id."""
        known = np.array([*(self.words or map("#{}".format, range(self.size))), ""])
        known[-1 if self.padding is None else self.padding] = ""
        texts: Words = known[ids.long().cpu().numpy()]
        return texts


@dataclass(frozen=True)
class Tokens(Form):
    """[places] whole numbers, which are ids of a vocabulary, as floats; ids are never compared by squared error.

    Attributes:
        highest: the largest id at each place in the data, below which dry runs draw.
    """

    name: ClassVar[str] = "tokens"
    scores: ClassVar[tuple[str, ...]] = ("words", "in_place", "rouge1", "rouge2", "rougeL", "exact_text")
    nothing: ClassVar[float] = -1.0
    instead: ClassVar[str] = "take lineup, membership attacks, or tokens"

    vocabulary: Vocabulary
    highest: tuple[int, ...]

    @property
    def continuous(self) -> bool:
        """False."""
        return False

    def problem(self, x: Tensor) -> str:
        """Ids are whole numbers below the size of the vocabulary."""
        if x.ndim != 2:
            return f"expected token ids [n, places], got shape {tuple(x.shape)}"
        low, high = x.aminmax()
        if low < 0 or high >= self.vocabulary.size or bool((x != x.round()).any()):
            return f"expected token ids from 0 to {self.vocabulary.size - 1}, got {low:g} to {high:g}"
        return ""

    def inputs(self, b: int, input_shape: tuple[int, ...], key: Key) -> Tensor:
        """Ids that are drawn up to the largest one of each place."""
        return (super().inputs(b, input_shape, key) * (torch.tensor(self.highest) + 1)).floor()

    def valid(self, x: Tensor) -> Tensor:
        """The nearest ids."""
        return x.round().clamp(0, self.vocabulary.size - 1)

    def texts(self, truth: Tensor, guess: Tensor) -> tuple[Words, Words]:
        """The words of the ids."""
        return self.vocabulary.texts(truth), self.vocabulary.texts(guess)

    def costs(self, truth: Tensor, guess: Tensor) -> Tensor:
        """By ROUGE-1, and among equal ones by tokens in place."""
        a, b = self._ids(truth), self._ids(guess)
        size = max(1, _ENTRIES // max(1, b.numel()))
        near = [(part[:, None] == b).double().mean(-1) for part in torch.split(a, size)]
        return 1 - self._rouge(a, b) - 1e-3 * torch.cat(near)

    def score(self, truth: Tensor, guess: Tensor) -> dict[str, Numbers]:
        """Shares of [b] texts, without padding.

        words: of the different tokens of a text, those in the guess. in_place: of its places, those with the right
        token. rouge1, rouge2, rougeL: F1 of tokens, of pairs of neighbors, and of the longest common subsequence.
        exact_text, success: 1 if all tokens are right.

        Source: Lin 2004 ("ROUGE: a package for automatic evaluation of summaries"), F1 as in Deng et al. 2021 (TAG).
        """
        a, b, padding = self._ids(truth), self._ids(guess), self.vocabulary.padding
        counted = torch.ones_like(a, dtype=torch.bool) if padding is None else a != padding
        places = counted.sum(1).clamp(min=1)
        hits = (a == b) & counted
        first = counted & ~((a[:, :, None] == a[:, None, :]).tril(-1)).any(-1)  # the first place of each token
        known = (a[:, :, None] == b[:, None, :]).any(-1)
        exact = (a == b).all(1)
        each = {
            "words": (first & known).sum(1) / first.sum(1).clamp(min=1),
            "in_place": hits.sum(1) / places,
            "rouge1": self._rouge(a, b).diagonal(),
            "rouge2": self._rouge(a, b, 2).diagonal(),
            "rougeL": self._longest(a, b),
            "exact_text": exact,
            "success": exact,
        }
        return {name: np.asarray(values.double().numpy(), np.float64) for name, values in each.items()}

    def blind(self, x: Tensor, *, majority: bool = False) -> Tensor:
        """The most typical text, by ROUGE-1 and ROUGE-2 with others; `majority`: the most frequent tokens, in order."""
        if majority:
            counts = x.flatten().long().bincount(minlength=x.shape[1])
            return counts.argsort(descending=True, stable=True)[: x.shape[1]].to(x.dtype)
        some, others = self._ids(x[:_TYPICAL]), self._ids(x[:_COMPARED])
        return x[int((self._rouge(some, others) + self._rouge(some, others, 2)).mean(1).argmax())]

    def has(self, x: Tensor, name: str, usual: Tensor) -> Tensor:
        """Which texts have the word `name`, or the id of this number."""
        words = self.vocabulary.words
        token = words.index(name) if name in words else int(name) if name.isdecimal() else -1
        if not 0 <= token < self.vocabulary.size:
            raise ValueError(f"property: got {name!r}, expected a word of the vocabulary, or its number")
        return (x == token).any(1)

    def _ids(self, x: Tensor) -> Tensor:
        return x.detach().cpu().double().round().long()

    def _rouge(self, a: Tensor, b: Tensor, n: int = 1) -> Tensor:
        """[b, c] F1 of the sequences of n tokens that texts a [b, T] and b [c, T] have in common, each counted once."""
        grams = [self._grams(x, n) for x in (a, b)]
        known, places = torch.unique(torch.cat([gram.flatten() for gram in grams]), return_inverse=True)
        counts = list[Tensor]()
        for gram, own in zip(grams, places.split([gram.numel() for gram in grams]), strict=True):
            rows = torch.zeros(len(gram), len(known))
            counts.append(rows.scatter_add_(1, own.view(gram.shape), (gram >= 0).float()))
        size = max(1, _ENTRIES // max(1, counts[1].numel()))
        common = torch.cat([torch.minimum(part[:, None], counts[1]).sum(-1) for part in torch.split(counts[0], size)])
        total = counts[0].sum(1)[:, None] + counts[1].sum(1)
        return (2 * common / total.clamp(min=1)).double()

    def _grams(self, x: Tensor, n: int) -> Tensor:
        """[b, T - n + 1] one number for each sequence of n tokens; -1 if it has padding."""
        wide = x.unfold(1, min(n, x.shape[1]), 1)
        numbers = (wide * self.vocabulary.size ** torch.arange(wide.shape[2])).sum(-1)
        padding = self.vocabulary.padding
        return numbers if padding is None else numbers.masked_fill((wide == padding).any(-1), -1)

    def _longest(self, a: Tensor, b: Tensor) -> Tensor:
        """[b] F1 of the longest common subsequence of each pair of texts."""
        padding = -1 if self.vocabulary.padding is None else self.vocabulary.padding
        row = torch.zeros(len(a), 1 + b.shape[1])
        for place in range(a.shape[1]):  # one row of the table a step, for all pairs at once
            equal = (a[:, place : place + 1] == b) & (b != padding)
            row[:, 1:] = torch.maximum(row[:, 1:], row[:, :-1] + equal).cummax(1).values
        return 2 * row[:, -1] / ((a != padding).sum(1) + (b != padding).sum(1)).clamp(min=1)


VECTOR, PICTURE, SERIES = Form(), Picture(), Series()

CONTINUOUS = frozenset({"vector", "table", "series", "image"})
"""The names of the forms whose inputs are numbers that can change by small steps."""

ALL = CONTINUOUS | {"tokens"}


def form_of(input_shape: tuple[int, ...]) -> Form:
    """The form of inputs of this shape if nothing else is known: an image, a series or a vector."""
    return {3: PICTURE, 2: SERIES}.get(len(input_shape), VECTOR)


def _mse(truth: Tensor, guess: Tensor) -> Numbers:
    return np.asarray(np.mean((numbers_of(truth) - numbers_of(guess)).reshape(len(truth), -1) ** 2, axis=1), np.float64)


def _flat(x: Tensor) -> Tensor:
    return x.detach().cpu().double().reshape(len(x), math.prod(x.shape[1:]))


def numbers_of(x: Tensor) -> Numbers:
    """A tensor as an array of float64 on the CPU."""
    return np.asarray(x.detach().cpu().double().numpy(), np.float64)
