"""Networks for tokens: a causal decoder, an encoder, an LSTM and a GRU.

They take ids [b, T]. With classes they return scores [b, classes], else scores [b, T, vocabulary] of the next token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_WIDTH, _HEADS, _LAYERS = 64, 4, 3


class _Blocks(nn.Module):
    """Blocks of attention with the norm before each part, as in GPT-2 (Radford et al. 2019); no dropout."""

    def __init__(
        self, vocabulary: int, input_shape: tuple[int, ...], classes: int, *, causal: bool, width: int = _WIDTH
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(input_shape[0], width)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)
        sizes = width, _HEADS, 2 * width
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(*sizes, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(_LAYERS)
        )
        self.norm, self.causal = nn.LayerNorm(width), causal
        self.head = nn.Linear(width, classes) if classes else None

    def forward(self, ids: Tensor) -> Tensor:
        """Scores; see the module."""
        length = ids.shape[1]
        h = self.words(ids) + self.places.weight[:length]
        mask = h.new_full((length, length), -torch.inf).triu(1) if self.causal else None
        for block in self.blocks:
            h = block(h, src_mask=mask)
        h = self.norm(h)
        if self.head is None:  # the embedding is also the output layer
            return linear(h, self.words.weight)
        scores: Tensor = self.head(h[:, -1] if self.causal else h.mean(1))
        return scores


class Decoder(_Blocks):
    """Three causal blocks; the last place is classified, or each place predicts the next token."""

    def __init__(self, vocabulary: int, input_shape: tuple[int, ...], classes: int, width: int = _WIDTH) -> None:
        super().__init__(vocabulary, input_shape, classes, causal=True, width=width)


class Encoder(_Blocks):
    """Three blocks that look both ways; the mean over the places is classified."""

    def __init__(self, vocabulary: int, input_shape: tuple[int, ...], classes: int, width: int = _WIDTH) -> None:
        if not classes:
            raise ValueError("an encoder sees the next token: expected classes, or take text-decoder")
        super().__init__(vocabulary, input_shape, classes, causal=False, width=width)


class _Recurrent(nn.Module):
    """An embedding, a recurrent layer of width 64 and a dense layer."""

    def __init__(self, cell: type[nn.LSTM | nn.GRU], vocabulary: int, classes: int) -> None:
        super().__init__()
        self.words, self.cell = nn.Embedding(vocabulary, _WIDTH), cell(_WIDTH, _WIDTH, batch_first=True)
        self.head, self.classes = nn.Linear(_WIDTH, classes or vocabulary), classes

    def forward(self, ids: Tensor) -> Tensor:
        """Scores; see the module."""
        states, _ = self.cell(self.words(ids))
        scores: Tensor = self.head(states[:, -1] if self.classes else states)
        return scores


class Lstm(_Recurrent):
    """An LSTM of width 64 (Hochreiter and Schmidhuber 1997)."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__(nn.LSTM, vocabulary, classes)


class Gru(_Recurrent):
    """A GRU of width 64 (Cho et al. 2014)."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__(nn.GRU, vocabulary, classes)
