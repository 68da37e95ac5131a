"""Networks of tokens and series as people write them: each is inspected, or refused with the cause."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import leakgauge
from leakgauge.harness.core.rng import Key, integers, uniform

KEY = Key(0, ("sequence models",))
V, T, N = 40, 8, 60


def ids(length=T, size=V, name="ids"):
    return torch.from_numpy(integers(KEY.child(name, size), N * length, size)).view(N, length)


Y = torch.from_numpy(integers(KEY.child("labels"), N, 3))


class Recommender(nn.Module):
    """A factorization: the first id is a user's, the second an item's."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(20, 6), nn.Embedding(V, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, pair):
        return self.head(self.users(pair[:, 0]) * self.items(pair[:, 1]))


class Lora(nn.Module):
    """A frozen layer with a trained update of low rank, as in Hu et al. 2022."""

    def __init__(self, inputs, outputs, rank=2):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, inputs) / 4), nn.Parameter(torch.randn(outputs, rank) / 4)

    def forward(self, h):
        return self.base(h) + h @ self.a.T @ self.b.T


class Adapted(nn.Module):
    """A frozen decoder with adapters."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(V, 8).requires_grad_(False)
        self.q, self.k, self.head = Lora(8, 8), Lora(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.words(x)
        scores = self.q(h) @ self.k(h).transpose(1, 2) / math.sqrt(8)
        return self.head((scores.softmax(-1) @ h).mean(1))


class Translator(nn.Module):
    """An encoder and a decoder; the first half of the ids is the source."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(V, 8)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        source, target = self.words(x).chunk(2, 1)
        mask = torch.full((T // 2, T // 2), -torch.inf).triu(1)
        return self.head(self.body(source, target, tgt_mask=mask)[:, -1])


class OfBert(nn.Module):
    """The classes of BERT in short: token, place and segment embeddings, buffers of ids, a pooler, dropout."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.words, self.places, self.types = nn.Embedding(V, 8, padding_idx=0), nn.Embedding(T, 8), nn.Embedding(2, 8)
        self.register_buffer("position_ids", torch.arange(T)[None])
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(dropout)
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, activation="gelu", batch_first=True)
        self.body = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.pooler, self.classifier = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None):
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        h = self.words(input_ids) + self.places(self.position_ids) + self.types(types)
        h = self.body(self.drop(self.norm(h)))
        return {"logits": self.classifier(self.pooler(h[:, 0]).tanh()), "hidden_states": h}


class OfGpt(nn.Module):
    """The classes of GPT-2 in short: tied embeddings, a causal mask as a buffer, attention written out."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, 8), nn.Embedding(T, 8)
        self.attention, self.norm, self.out = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 8)
        self.register_buffer("bias", torch.ones(T, T).tril().bool())
        self.lm_head = nn.Linear(8, V, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids):
        h = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        q, k, v = self.attention(self.norm(h)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / math.sqrt(8)).masked_fill(~self.bias, torch.finfo(torch.float32).min)
        return self.lm_head(h + self.out(scores.softmax(-1) @ v))


class Recurrent(nn.Module):
    """Next word by a recurrent layer with two layers."""

    def __init__(self, cell, classes=None):
        super().__init__()
        self.words, self.cell = nn.Embedding(V, 8), cell(8, 8, 2, batch_first=True)
        self.head, self.classes = nn.Linear(8, classes or V), classes

    def forward(self, x):
        states = self.cell(self.words(x))[0]
        return self.head(states[:, -1] if self.classes else states)


class Pooled(nn.Module):
    """Bag of words: `nn.EmbeddingBag`."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(V, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.words(x))


class Convolved(nn.Module):
    """Convolutions over embedded words (Kim 2014)."""

    def __init__(self, classes=3):
        super().__init__()
        self.words, self.conv, self.head = nn.Embedding(V, 8), nn.Conv1d(8, 6, 3), nn.Linear(6, classes)

    def forward(self, x):
        return self.head(self.conv(self.words(x).transpose(1, 2)).relu().amax(2))


class Wave(nn.Module):
    """A recurrent layer over a series [n, c, T]."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell(2, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.cell(x.transpose(1, 2))[0][:, -1])


WAVES = uniform(KEY.child("waves"), (N, 2, 20))
RATED = torch.stack([ids(1, 20, "users")[:, 0], ids(1, V, "items")[:, 0]], 1)
MARKS = (uniform(KEY.child("marks"), (N, 3)) > 0.6).float()
TEXTS = leakgauge.tokens(ids())
CASES = {
    "recommender": (Recommender, (RATED, uniform(KEY.child("stars"), (N,)))),
    "lora": (Adapted, (ids(), Y)),
    "encoder-decoder": (Translator, (ids(), Y)),
    "bert": (
        OfBert,
        [{"input_ids": x, "attention_mask": x * 0 + 1, "labels": y} for x, y in zip(ids(), Y, strict=True)],
    ),
    "gpt-2": (OfGpt, TEXTS),
    "next word by a GRU": (lambda: Recurrent(nn.GRU), TEXTS),
    "next word by an LSTM": (lambda: Recurrent(nn.LSTM), TEXTS),
    "topic by an LSTM": (lambda: Recurrent(nn.LSTM, 3), (ids(), Y)),
    "bag of words": (Pooled, (ids(), Y)),
    "convolution of words": (Convolved, (ids(), Y)),
    "several topics": (Convolved, (ids(), MARKS)),
    "series by convolution": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
        (WAVES, Y),
    ),
    "series by an LSTM": (lambda: Wave(nn.LSTM), (WAVES, Y)),
    "series by a GRU": (lambda: Wave(nn.GRU), (WAVES, Y)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ci(without=("topic by an LSTM", "next word by an LSTM", "next word by a GRU", "series by a GRU"))
def test_each_is_inspected_and_its_records_are_named(case, tmp_path):
    make, data = CASES[case]
    torch.manual_seed(0)
    run = leakgauge.inspect(make(), data, folder=tmp_path, victims=4, attacks=["prior"], lr=0.1)
    found = {one.cell.attack.name: {e.name: e.value for e in one.estimates} for one in run.results.values()}
    assert not run.failures
    assert found["lineup"]["named"] == 1.0
    assert not any(flag.code == "misfit" for training in run.trainings.values() for flag in training.flags)
    assert np.isfinite([training.evaluations[-1].loss for training in run.trainings.values()]).all()
