"""Forms of inputs: how far two inputs are apart, how guesses score, and data sets of tokens and series."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

import leakgauge
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.sdq import SDQ
from leakgauge.harness.audit import limit
from leakgauge.harness.audit.limit import NoLimit, limits
from leakgauge.harness.core.cell import TaskSpec
from leakgauge.harness.core.contract import Examples, Guess
from leakgauge.harness.core.form import PICTURE, SERIES, VECTOR, Tokens, Vocabulary, form_of
from leakgauge.harness.core.rng import Key, integers, normal, uniform
from leakgauge.harness.data import load
from leakgauge.harness.gate.judge import Rules, Verdict, judge
from leakgauge.harness.gate.measure import measured
from leakgauge.harness.learn import modules
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.language import Decoder
from leakgauge.harness.learn.models import build, names_for_tokens
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.prepare import make_task
from leakgauge.harness.study.score import identified, match, score_limits
from leakgauge.harness.study.store import load_run
from tests.test_limit import federation

KEY = Key(0, ("forms",))
WORDS = ("police", "killed", "kill", "the", "gunman", "<pad>")
NEWS = Tokens(Vocabulary(6, WORDS, padding=5), (5,) * 4)


def refused(make, words, kind):
    with pytest.raises(kind, match=re.escape(words)) as caught:
        make()
    assert "\n" not in str(caught.value)


def text(words):
    return torch.tensor([[float(WORDS.index(word)) for word in words.split()]])


@pytest.mark.parametrize(
    ("guess", "expected"),
    [  # Lin 2004, section 3.1: S2 and S3 against S1
        ("police kill the gunman", {"rouge1": 0.75, "rouge2": 1 / 3, "rougeL": 0.75, "in_place": 0.75, "words": 0.75}),
        ("the gunman kill police", {"rouge1": 0.75, "rouge2": 1 / 3, "rougeL": 0.5, "in_place": 0.0, "words": 0.75}),
        ("police killed the gunman", dict.fromkeys(NEWS.scores, 1.0)),
        ("the the the the", {"rouge1": 0.25, "rouge2": 0.0, "rougeL": 0.25, "words": 0.25, "exact_text": 0.0}),
    ],
)
def test_rouge_is_that_of_its_paper(guess, expected):
    found = NEWS.score(text("police killed the gunman"), text(guess))
    assert {name: found[name][0] for name in expected} == pytest.approx(expected)


def test_padding_counts_neither_for_nor_against_a_text():
    found = NEWS.score(text("police killed <pad> <pad>"), text("police kill <pad> <pad>"))
    assert {name: found[name][0] for name in ("words", "in_place", "rouge1", "rouge2", "rougeL")} == pytest.approx(
        {"words": 0.5, "in_place": 0.5, "rouge1": 0.5, "rouge2": 0.0, "rougeL": 0.5}
    )
    assert NEWS.score(text("<pad> <pad> <pad> <pad>"), text("the the the the"))["rouge1"] == 0


def rouge(a, b, n):
    """F1 by counting, one text at a time."""
    grams = [[tuple(x[i : i + n]) for i in range(len(x) - n + 1)] for x in (a, b)]
    common = sum(min(grams[0].count(gram), grams[1].count(gram)) for gram in set(grams[0]))
    return 2 * common / (len(grams[0]) + len(grams[1]))


def test_scores_of_random_texts_are_those_of_counting():
    form = Tokens(Vocabulary(7), (6,) * 9)
    a, b = (torch.from_numpy(integers(KEY.child(name), 18, 7)).view(2, 9).float() for name in "ab")
    found = form.score(a, b)
    for row, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        assert found["rouge1"][row] == pytest.approx(rouge(x, y, 1))
        assert found["rouge2"][row] == pytest.approx(rouge(x, y, 2))
        assert found["words"][row] == pytest.approx(len(set(x) & set(y)) / len(set(x)))
    costs = form.costs(a, b)
    for i, j in ((0, 0), (0, 1), (1, 0)):
        places = np.mean([u == v for u, v in zip(a[i], b[j], strict=True)])
        assert costs[i, j] == pytest.approx(1 - rouge(a[i].tolist(), b[j].tolist(), 1) - 1e-3 * places)


def test_texts_are_matched_and_identified_by_words_not_by_numbers():
    form = Tokens(Vocabulary(1000), (999,) * 4)
    x = torch.tensor([[1.0, 2, 3, 4], [900, 901, 902, 903]])
    near = torch.tensor([[901.0, 902, 903, 900], [5, 2, 3, 4]])
    assert match(x, near, form).tolist() == [1, 0]
    others = torch.tensor([[2.0, 3, 4, 5], [900, 901, 902, 905]])[:, None].flip(0)
    assert identified(x, near[[1, 0]], others.repeat(1, 2, 1), form).tolist() == [1, 1]
    # ids that are next to each other are different words
    assert identified(x[:1], x[:1] + 1, torch.tensor([[[500.0, 501, 2, 503]]]), form).tolist() == [1]
    assert identified(x[:1], x[:1] + 9, torch.tensor([[[500.0, 501, 11, 503]]]), form).tolist() == [0]


def test_a_blind_guess_is_typical_or_has_the_frequent_tokens():
    x = torch.tensor([[1.0, 2, 3], [1, 2, 4], [1, 2, 3], [7, 8, 9]])
    form = Tokens(Vocabulary(10), (9,) * 3)
    assert form.blind(x).tolist() == [1, 2, 3]
    assert form.blind(x, majority=True).tolist() == [1, 2, 3]
    assert form.has(x, "4", x).tolist() == [False, True, False, False]
    refused(lambda: form.has(x, "10", x), "expected a word of the vocabulary, or its number", ValueError)


def test_a_series_has_no_ssim_and_a_picture_has():
    x = uniform(KEY.child("series"), (3, 2, 9))
    found = SERIES.score(x, 0.5 * x + 0.2)
    assert found["correlation"] == pytest.approx(np.ones(3))
    assert form_of((2, 9)) is SERIES
    assert (form_of((1, 8, 8)), form_of((5,))) == (PICTURE, VECTOR)
    assert SERIES.score(x, torch.full_like(x, 0.5))["correlation"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [
        (lambda: Vocabulary(3, ("a",)), "a word for each of 3 ids"),
        (lambda: Vocabulary(3, unknown=3), "expected unknown from 0 to 2"),
        (lambda: leakgauge.tokens([[0, 1]] * 9, words=("a",)), "token ids from 0 to 0, got 0 to 1"),
        (lambda: leakgauge.tokens([[0.5, 1]] * 9), "expected x [n, T] of whole numbers"),
        (lambda: leakgauge.tokens([[-1, 1]] * 9), "token ids from 0"),
        (lambda: leakgauge.series(np.zeros((4, 2, 3, 5)), [0, 1] * 2), "[n, channels, T]"),
    ],
)
def test_what_is_no_form_is_refused_in_one_line(vocabulary, words):
    refused(vocabulary, words, ValueError)


def test_help_texts_are_different_texts_of_two_classes():
    data = load("help", Path())
    assert isinstance(data.form, Tokens)
    texts = [tuple(row) for part in (data.train, data.test) for row in part.x.tolist()]
    assert len(set(texts)) == len(texts) > 6000
    assert 0.4 < float(data.train.y.float().mean()) < 0.6
    words = data.form.vocabulary.texts(data.train.x[0])
    assert all(re.fullmatch(r"<unk>|[a-z]+|[0-9]+|\S", word) for word in words)
    assert load("help-next", Path()).classes == ()


@pytest.mark.parametrize("name", [name for name, _ in names_for_tokens()])
@pytest.mark.parametrize("data", ["help", "help-next"])
def test_networks_of_tokens_train_alike_in_all_engines(name, data):
    loaded = load(data, Path())
    if (name, data) == ("text-encoder", "help-next"):
        refused(lambda: make_task(TaskSpec(data, name), loaded), "sees the next token", ValueError)
        return
    task = make_task(TaskSpec(data, name), loaded)
    modules.check(task)
    params, few = task.init(KEY), [loaded.train._replace(x=loaded.train.x[:4], y=loaded.train.y[:4])]
    found = [
        train_clients(task, params, [Work(each, KEY) for each in few], LocalPlan(True, 1, None, 0, 0.1, 0.0), engine)
        for engine in ("loop", "vmap")
    ]
    assert torch.allclose(found[0].updates, found[1].updates, atol=1e-6)
    assert float(found[0].updates.norm()) > 0


def test_the_loss_of_next_tokens_is_that_of_torch():
    loaded = load("help-next", Path())
    task = make_task(TaskSpec("help-next", "text-decoder"), loaded)
    params, x = task.init(KEY), loaded.test.x[:3]
    made = Decoder(1000, (16,), 0).eval()
    made.load_state_dict(dict(zip(task.layout.names, task.layout.split(params), strict=True)))
    logits = made(x.long())
    expected = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), x[:, 1:].long(), reduction="none").mean(1)
    losses, right = task.tested(params, x, loaded.test.y[:3])
    assert torch.allclose(losses, expected, atol=1e-5)
    hits = (logits[:, :-1].argmax(2) == x[:, 1:]).float().mean(1).sum()
    assert right == pytest.approx(float(hits), abs=1e-6)


class Tied(nn.Module):
    """A user's language model with tied embeddings, whose result is a dictionary."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, input_ids):
        return {"logits": self.body(self.table(input_ids).cumsum(1)) @ self.table.weight.T}


def ids(n, length, size, name):
    return torch.from_numpy(integers(KEY.child(name), n * length, size)).view(n, length)


ITEMS = [{"input_ids": row, "attention_mask": row * 0 + 1, "labels": row.clone()} for row in ids(40, 6, 30, "items")]


@pytest.mark.parametrize(
    "data",
    [
        ITEMS,
        [{"input_ids": item["input_ids"]} for item in ITEMS],
        leakgauge.tokens(ids(40, 6, 30, "items")),
        leakgauge.tokens(ids(40, 6, 30, "items"), x_test=ids(20, 6, 30, "test")),
    ],
)
@pytest.mark.ci(2)
def test_a_users_language_model_is_inspected(data, tmp_path):
    run = leakgauge.inspect(Tied(), data, folder=tmp_path, victims=3, attacks=["prior"], lr=0.1)
    found = {one.cell.attack.name: {e.name: e.value for e in one.estimates} for one in run.results.values()}
    assert found["lineup"]["named"] == 1.0
    assert found["prior"]["exact_text"] == 0.0
    assert not run.failures


@pytest.mark.parametrize("kind", ["integers", "dictionaries", "npz"])
def test_a_users_classifier_of_tokens_is_inspected(kind, tmp_path):
    x, y = ids(60, 5, 20, "classes"), ids(60, 1, 3, "labels")[:, 0]
    network = nn.Sequential(nn.Embedding(20, 6), nn.Flatten(), nn.Linear(30, 3))
    np.savez(tmp_path / "x.npz", x=x.numpy(), y=y.numpy())
    data = {
        "integers": (x.numpy(), y.numpy()),
        "dictionaries": [{"input_ids": a.tolist(), "label": int(b)} for a, b in zip(x, y, strict=True)],
        "npz": f"npz:{tmp_path / 'x.npz'}?form=tokens",
    }[kind]
    run = leakgauge.inspect(network, data, folder=tmp_path / "out", victims=4, attacks=["prior"], minutes=0.2)
    found = {one.cell.attack.name: {e.name: e.value for e in one.estimates} for one in run.results.values()}
    assert found["lineup"]["named"] == 1.0
    assert not run.failures
    with pytest.raises(ValueError, match=r"attacks \(dlg\): it reads .*, not tokens: take lineup"):
        leakgauge.inspect(network, data, folder=tmp_path / "no", victims=4, attacks=["prior", "dlg"], minutes=0.2)


def test_a_wrong_backward_is_found_behind_token_ids():
    class Wrong(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(h):
            return h.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, slope):
            return slope * (1.0 + ctx.saved_tensors[0].cos())

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(Wrong.apply(self.table(x).mean(1)))

    data = leakgauge.tokens(ids(60, 5, 20, "classes"), ids(60, 1, 3, "labels")[:, 0])
    name = modules.given("wrong backward of tokens", Net)
    task = make_task(TaskSpec("given:x", name), replace(data, name="given:x"))
    refused(lambda: modules.check(task), "is the backward of a custom autograd.Function wrong?", ValueError)


def test_numbers_are_refused_by_networks_of_tokens_and_tokens_by_networks_of_numbers():
    refused(lambda: build("text-gru", (5,), 2), "takes token ids, got inputs of the form vector", ValueError)
    refused(lambda: build("mlp", (4,), 2, form=NEWS), "'mlp' takes numbers; for tokens take text-decoder", ValueError)
    refused(lambda: build("mlp", (4,), 0, "next-token"), "'next-token' needs token ids without labels", ValueError)
    noise = normal(KEY, (2, 4))
    assert NEWS.valid(noise * 10).unique().min() >= 0


class Segments(nn.Module):
    """A small U-Net with three classes."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        h = self.first(x).relu()
        return self.last(torch.cat([h, self.up(self.down(h).relu()).relu()], 1))


@pytest.mark.parametrize("items", [False, True])
@pytest.mark.ci("True")
def test_labels_of_many_places_are_segmentations(items, tmp_path):
    x = uniform(KEY.child("maps"), (60, 1, 8, 8))
    y = (3 * x[:, 0]).long().clamp(0, 2)
    data = [*zip(x, y, strict=True)] if items else (x, y)
    run = leakgauge.inspect(Segments(), data, folder=tmp_path, victims=3, attacks=["prior"], lr=0.1)
    (found,) = [one for one in run.results.values() if one.cell.attack.name == "lineup"]
    assert next(e.value for e in found.estimates if e.name == "named") == 1.0
    training = next(iter(run.trainings.values()))
    assert 0 < training.evaluations[-1].accuracy < 1
    refused(
        lambda: build("mlp", (1, 8, 8), 0, "cross-entropy-per-place", 64),
        "no scores for each place of a label",
        ValueError,
    )


def test_the_loss_of_places_is_that_of_torch():
    x, y = uniform(KEY.child("maps"), (2, 1, 8, 8)), torch.from_numpy(integers(KEY.child("y"), 128, 3)).view(2, 64)
    name = modules.given("segments", Segments())
    task = make_task(TaskSpec("given:x", name), load_places(x, y))
    params = task.init(KEY)
    expected = nn.functional.cross_entropy(modules._given["segments"](x), y.view(2, 8, 8))
    assert torch.allclose(task.loss(params, x, y.float()), expected)


def load_places(x, y):
    leakgauge.given_data("places", (x.repeat(5, 1, 1, 1), y.repeat(5, 1).view(10, 8, 8)))
    return load("given:places", Path())


def test_the_limit_of_a_text_is_the_power_of_the_test_of_two_texts(monkeypatch):
    monkeypatch.setattr(limit, "_MESSAGES", 4000)
    std, clip, v, t = 0.05, 100.0, 5, 3
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(v, 2), nn.Flatten(), nn.Linear(2 * t, 2))
    x, y = torch.from_numpy(integers(KEY.child("text"), t, v)).view(1, t).float(), torch.tensor([1])
    form = Tokens(Vocabulary(v), (v - 1,) * t)
    task = ModelTask(build(modules.given("few tokens", network), (t,), 2, form=form), stated=form)
    seen, truth = federation(1, Gaussian(clip=clip, noise_std=std), task, x[None])
    others = torch.from_numpy(integers(KEY.child("others"), 300, v)).view(-1, t).float()
    seen = replace(
        seen,
        model=seen.model._replace(params=task.init(KEY)),
        auxiliary=Examples(others, torch.zeros(100, dtype=torch.int64)),
    )

    def update(row):
        leaf = seen.model.params.clone().requires_grad_()
        return torch.autograd.grad(task.loss(leaf, row[None], y), leaf)[0].double()

    wrong = []
    for place in range(t):
        distances = []
        for token in set(range(v)) - {int(x[0, place])}:
            rival = x[0].clone()
            rival[place] = token
            distances.append(float((update(rival) - update(x[0])).norm()) / std)
        wrong.append(norm.sf(min(distances) / 2))
    truth = [truth[0]._replace(y=y)]
    (found,) = limits(seen, truth, KEY)
    assert found.error == pytest.approx([np.mean(wrong)], rel=0.05)
    (estimate,) = score_limits([x], [Guess(x, y, 0.0, 0)], [found])
    assert (estimate.name, estimate.value) == ("limit_wrong", pytest.approx(found.error[0]))
    uniform, truth = federation(1, SDQ(), task, x[None])
    uniform = replace(uniform, auxiliary=seen.auxiliary)
    refused(lambda: limits(uniform, truth, KEY), "have no Fisher information, which the limit of a text", NoLimit)


def test_the_gate_fails_where_more_words_of_texts_are_read_than_before(tmp_path):
    ids = torch.from_numpy(integers(KEY.child("gate"), 60 * 12, 50)).view(60, 12)
    network = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(96, 2))
    leakgauge.inspect(network, leakgauge.tokens(ids, ids[:, 0] % 2), attacks=["tokens"], folder=tmp_path / "run")
    now = measured(load_run(tmp_path / "run"))
    (words,) = [each for each in now.measures if each.metric == "words" and each.attack.name == "tokens"]
    assert words.values == (1.0,) * len(words.values)
    words = replace(words, control="")  # no defense is the ceiling, which is not judged
    before = replace(now, measures=(replace(words, values=(0.5,) * len(words.values)),))
    (check,) = judge(replace(now, measures=(words,)), before, Rules()).checks
    assert check.verdict is Verdict.FAIL
    assert "words" in check.reason
