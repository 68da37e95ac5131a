"""The attack `tokens` on held-out texts: exact ones without a defense, and what is left of them behind defenses.

Victims and the adversary have different halves of Python's help texts, without doubles.
"""

import dataclasses
import math
import re
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from torch import nn

from leakgauge.attacks._text.chances import Chances
from leakgauge.attacks._text.channel import Channel
from leakgauge.attacks._text.network import Network
from leakgauge.attacks._text.search import search
from leakgauge.attacks._text.spans import _chosen, in_places
from leakgauge.attacks.tokens import Tokens
from leakgauge.harness.core.cell import TaskSpec
from leakgauge.harness.core.contract import Examples, Message, Observation, Sender, Setting, Snapshot
from leakgauge.harness.core.form import Vocabulary
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.core.threats import View
from leakgauge.harness.data.arrays import Arrays, data_set
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn import modules
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.language import Decoder, Encoder, Gru, Lstm
from leakgauge.harness.study.prepare import make_task
from leakgauge.harness.study.score import match
from tests.doubles import small_task
from tests.victims import make

KEY = Key(0, ("tokens attack",))
T, V = 16, 1000


def halves(length, size):
    """[n, length] ids: victims' texts and the adversary's; a label says whether a text has many rare words."""
    words = re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", " ".join(topics[name] for name in sorted(topics)).lower())
    kinds, counts = np.unique(words, return_counts=True)
    number = {word: k + 1 for k, word in enumerate(kinds[np.argsort(-counts, kind="stable")[: size - 1]])}
    ids = np.array([number.get(word, 0) for word in words])
    parts = [
        np.unique(part[: len(part) // length * length].reshape(-1, length), axis=0)
        for part in np.split(ids, [len(ids) // 2])
    ]
    known = {tuple(row) for row in parts[1]}
    victims = np.array([row for row in parts[0] if tuple(row) not in known])
    return [
        torch.from_numpy(part[np.random.default_rng(1).permutation(len(part))]).float() for part in (victims, parts[1])
    ]


def labels(x, predicts):
    return torch.zeros(len(x), dtype=torch.int64) if predicts else ((x > 60).float().mean(1) > 0.35).long()


def observed(network, defense="none", *, victims=3, texts=1, length=T, size=V, predicts=False, parameters=None, **how):
    """What a server sees of the first victims' messages, and their texts [victims, texts, length]."""
    mine, own = halves(length, size)
    own = own[:2000]
    x, y = torch.cat([own, mine]).numpy(), labels(torch.cat([own, mine]), predicts).numpy()
    data = data_set("tokens", Arrays(x, y.astype(np.float32) if predicts else y), None, form=Vocabulary(size))
    torch.manual_seed(0)
    task = make_task(TaskSpec("given:x", modules.given("tokens attack", network())), data)
    params, mechanism = task.init(KEY), registry.build("defense", defense, parameters or {})
    setting = Setting(task.layout, 10, 10, 1, how.get("sends", "gradient"), how.get("steps", 1), 0.1, 0, texts)
    auxiliary = Examples(own, labels(own, predicts))
    if "crafted" in how:
        honest = Snapshot(0, params, mechanism.init(setting))
        view = View.parse("malicious-server")
        seen = Observation(view, setting, task, mechanism, 0.1, (), honest, auxiliary=auxiliary)
        params = how["crafted"].broadcast(seen, KEY.child("crafted"))
    x = mine[: victims * texts].view(victims, texts, length)
    plan = LocalPlan.of(setting)
    server, messages = Round(mechanism, setting, mechanism.init(setting)), []
    for number, part in enumerate(x):
        work = Work(Examples(part, labels(part, predicts)), KEY.child("train", number))
        update = train_clients(task, params, [work], plan, "loop").updates[0]
        update = update * (not how.get("silent", False))
        client = Client.of(Sender(number, texts), update, mechanism.remember(setting), KEY.child("message", number))
        (wire,) = server.among_silent([client], KEY.child("channel", number)).received
        messages.append(Message(0, client.sender, wire, client.shared, texts, setting.steps))
    model = Snapshot(0, params, mechanism.init(setting))
    seen = Observation(View.parse("server"), setting, task, mechanism, 0.1, tuple(messages), model, auxiliary=auxiliary)
    return seen, x


def scores(seen, x, attack=None):
    """The mean of each score, and the guesses."""
    form, guesses = seen.task.form, (attack or Tokens()).run(seen, Key(1)).guesses
    assert not any(guess.failure for guess in guesses)
    each = [form.score(part, guess.x[match(part, guess.x, form)]) for part, guess in zip(x, guesses, strict=True)]
    return {name: float(np.mean([found[name] for found in each])) for name in form.scores}, guesses


def floor(seen, x):
    """The best blind guess of words."""
    form = seen.task.form
    blind = [form.blind(seen.auxiliary.x, majority=most).expand(len(x), -1) for most in (False, True)]
    return max(float(form.score(x[:, 0], guess)["words"].mean()) for guess in blind)


def decoder():
    return Decoder(V, (T,), 2)


def encoder():
    return Encoder(V, (T,), 2)


class Scaled(nn.Module):
    """Words times the root of the width, plus waves as places, as in Vaswani et al. 2017; the batch is second."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(V, 64), nn.Linear(64, 2)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 64, 0.0), 2, enable_nested_tensor=False)
        turns = torch.arange(T)[:, None] * torch.exp(torch.arange(0, 64, 2) * (-math.log(10000.0) / 64))
        self.register_buffer("waves", torch.stack([turns.sin(), turns.cos()], 2).flatten(1))

    def forward(self, ids):
        h = self.table(ids) * 8.0 + self.waves[: ids.shape[1]]
        return self.head(self.body(h.transpose(0, 1)).mean(0))


class Stepwise(nn.Module):
    """A recurrent cell that is called for each token."""

    def __init__(self):
        super().__init__()
        self.table, self.cell, self.head = nn.Embedding(V, 48), nn.GRUCell(48, 48), nn.Linear(48, 2)

    def forward(self, ids):
        h = self.table.weight.new_zeros(len(ids), 48)
        for place in range(ids.shape[1]):
            h = self.cell(self.table(ids[:, place]), h)
        return self.head(h)


@pytest.mark.parametrize(
    ("network", "how"),
    [
        (encoder, {}),
        (decoder, {}),
        (encoder, {"defense": "dp-fedavg"}),
        (lambda: Encoder(V, (32,), 2), {"length": 32}),
        (Scaled, {}),
        (decoder, {"texts": 2}),
        (decoder, {"sends": "update", "steps": 2}),
        (lambda: Decoder(V, (T,), 0), {"predicts": True, "texts": 2}),
        (lambda: Lstm(V, 2), {}),
        (lambda: Gru(V, 0), {"predicts": True}),
    ],
    ids=["encoder", "decoder", "clip", "long", "waves", "batch", "steps", "next", "lstm", "next-gru"],
)
@pytest.mark.ci(without=("long",))
def test_undefended_texts_are_read_exactly(network, how):
    found, guesses = scores(*observed(network, **how))
    assert found["exact_text"] == 1.0
    assert all(guess.objective == 0 for guess in guesses)


@pytest.mark.parametrize("texts", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_texts_of_a_batch_of_an_encoder_are_read_exactly_each_with_its_label(texts):
    seen, x = observed(lambda: Encoder(2000, (T,), 2, 128), victims=2, texts=texts, size=2000)
    for part, guess in zip(x, Tokens().run(seen, Key(1)).guesses, strict=True):
        assert {tuple(text) for text in guess.x.tolist()} == {tuple(text) for text in part.tolist()}
        assert torch.equal(guess.y, labels(guess.x, False))


def test_positions_of_a_malicious_server_change_nothing_else_and_show_the_order_behind_jopeq():
    crafted = Tokens(sweeps=1, positions=10.0)
    seen, x = observed(encoder, "jopeq", victims=1, crafted=crafted)
    layout, model = seen.task.layout, seen.model.params
    pairs = list(zip(layout.names, layout.split(model), layout.split(seen.task.init(KEY)), strict=True))
    assert [name for name, now, before in pairs if not torch.equal(now, before)] == ["places.weight"]
    words = next(now for name, now, _ in pairs if name == "words.weight")
    assert float(dict((name, now) for name, now, _ in pairs)["places.weight"].std() / words.std()) == pytest.approx(
        10, rel=0.1
    )
    honest, _ = scores(*observed(encoder, "jopeq", victims=1), Tokens(sweeps=1))
    found, _ = scores(seen, x, crafted)
    assert found["in_place"] > honest["in_place"] + 0.1
    assert crafted.needs - Tokens().needs == {"broadcast"}
    with pytest.raises(ValueError, match="expected a network with trained positions"):
        observed(Scaled, crafted=crafted)


def test_of_several_vectors_a_text_those_with_the_wanted_sum_are_taken():
    moves = normal(KEY.child("moves"), (5, 6, 20), torch.float64)
    moves = moves + 5 * normal(KEY.child("alike"), (1, 6, 20), torch.float64)  # texts have similar effects
    truth = torch.tensor([3, 0, 5, 2, 2])
    goal = moves[torch.arange(5), truth].sum(0)
    assert _chosen(moves, goal, torch.zeros(5, dtype=torch.int64)).tolist() == truth.tolist()


def test_the_tensors_of_a_network_are_found_by_what_they_do():
    for network, predicts in ((decoder, False), (encoder, False), (lambda: Decoder(V, (T,), 0), True), (Scaled, False)):
        seen, _ = observed(network, victims=1, predicts=predicts)
        found, names = Network.of(seen.task, seen.model.params), seen.task.layout.names
        assert names[found.words] in ("words.weight", "table.weight")
        assert found.tied == predicts
        if network is Scaled:
            assert found.places is None
        else:
            assert names[found.places[0]] == "places.weight"
            assert found.places[1].tolist() == list(range(T))
        assert found.sites[0].local
        causal = [site.causal for site in found.sites[1:]]
        assert not any(site.local for site in found.sites[1:])
        assert all(causal) if network not in (encoder, Scaled) else not any(causal)


def test_a_network_without_an_embedding_of_ids_is_a_failure():
    class Numbers(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(T, 2)

        def forward(self, ids):
            return self.head(ids.to(self.head.weight.dtype) / V)

    seen, _ = observed(Numbers, victims=2)
    assert {guess.failure for guess in Tokens().run(seen, Key(1)).guesses} == {
        "expected an nn.Embedding that the network calls with the ids"
    }


def test_what_cannot_be_read_is_a_failure_or_refused():
    seen, _ = observed(encoder, victims=2)
    model = seen.model._replace(params=seen.model.params * math.nan)
    (first, second) = Tokens().run(dataclasses.replace(seen, model=model), Key(1)).guesses
    assert (first.failure, second.failure) == ("the model is not finite",) * 2
    silent, _ = observed(encoder, "none", victims=2, silent=True)
    for guess in Tokens().run(silent, Key(1)).guesses:
        assert (guess.failure, guess.evaluations) == ("the gradient is zero", 0)
    with pytest.raises(ValueError, match="expected texts of token ids, got inputs of the form image"):
        Tokens().run(make(small_task("mlp-small")).seen, Key(1))


def test_one_token_a_place_follows_from_sums_of_rows_of_places():
    places = normal(KEY.child("places"), (12, 8), torch.float64)
    truth = torch.tensor([0, 2, 1, 1, 3, 0, 2, 2, 3, 1, 0, 3])
    rows = torch.zeros(4, 8, dtype=torch.float64).index_add_(0, truth, places)
    found, misfit = in_places(rows, places)
    assert misfit < 1e-12
    assert found.tolist() == truth.tolist()


@pytest.mark.parametrize(("defense", "parameters"), [("gaussian", {"epsilon": 1e5}), ("jopeq", {})])
def test_a_text_that_is_almost_right_shows_which_tokens_to_try_at_a_place(defense, parameters):
    seen, x = observed(encoder, defense, victims=2, parameters=parameters)
    observed_round, params = seen.observed_rounds[0], seen.model.params
    chances, network = Chances.of(seen.auxiliary.x, V, 1), Network.of(seen.task, params)
    channel = Channel(seen, observed_round._replace(messages=seen.messages[:1]), network, chances, KEY)
    for message, text in zip(seen.messages, x.long(), strict=True):
        wrong = text.clone()
        wrong[0, 5] = int(text.flatten().bincount(minlength=V).argmin())
        table = channel.of(message).at_places(wrong, labels(text, False))
        assert table.shape == (V, T)
        assert (table > table[text[0], torch.arange(T)]).sum(0).max() < T  # absent tokens are less likely everywhere


def test_the_search_finds_a_text_by_its_own_energy():
    _, own = halves(T, V)
    chances, words = Chances.of(own, V, 1), torch.zeros(V, dtype=torch.float64)
    truth = own[5].long()[None]
    words[truth.flatten()] = 10.0
    found = search(lambda x: (x != truth).double().sum((1, 2)), chances, words, own[9].long()[None], 20, KEY)
    assert (found.energy, found.x.tolist()) == (0.0, truth.tolist())


def test_a_judge_decides_between_the_moves_that_the_energy_proposes():
    _, own = halves(T, V)
    chances, words = Chances.of(own, V, 1), torch.zeros(V, dtype=torch.float64)
    truth, other = own[5].long()[None], own[9].long()[None]
    words[truth.flatten()] = 10.0

    def wrong(near):
        return lambda x: (x != near).double().sum((1, 2))

    def misled(x):
        return wrong(truth)(x) - 3 * (x[:, 0, 0] == other[0, 0]).double()

    assert search(misled, chances, words, other, 20, KEY).x[0, 0] == other[0, 0] != truth[0, 0]
    found = search(misled, chances, words, other, 20, KEY, judge=wrong(truth))
    assert (found.energy, found.x.tolist()) == (0.0, truth.tolist())


def test_chances_are_those_of_counting():
    x = torch.tensor([[0.0, 1, 2], [0, 1, 1]])
    chances = Chances.of(x, 4, 1)
    share = (torch.tensor([2.0, 3, 1, 0]) + 0.5) / 8
    assert chances.token.exp() == pytest.approx(share.tolist())
    assert float(chances.after(torch.tensor(0), torch.tensor(1)).exp()) == pytest.approx((2 + 5 * share[1]) / 7)
    assert float(chances.after(torch.tensor(2), torch.tensor(3)).exp()) == pytest.approx(share[3])
    every = chances.after(torch.tensor(1).expand(4), torch.arange(4)).exp()
    assert float(every.sum()) == pytest.approx(1)
    text = torch.tensor([[3, 0, 1]])
    at = chances.at_places(text)
    for place, token in ((0, 2), (1, 3), (2, 0)):
        other = text.clone()
        other[0, place] = token
        gap = chances.of_texts(other[None]) - chances.of_texts(text[None])
        assert float(gap) == pytest.approx(float(at[token, 0, place] - at[text[0, place], 0, place]))


def test_a_blind_guess_is_left_where_noise_hides_the_text():
    seen, x = observed(encoder, "gaussian", victims=8, parameters={"epsilon": 8.0})
    found, guesses = scores(seen, x)
    assert all(guess.evaluations == 0 for guess in guesses)
    assert abs(found["words"] - floor(seen, x)) <= 0.05


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("defense", "parameters", "name", "least", "victims"),
    [
        ("jopeq", {"epsilon": 1.0}, "words", 0.6, 1),
        pytest.param("jopeq", {"epsilon": 1.0}, "words", 0.6, 3, marks=pytest.mark.slow),
        pytest.param("jopeq", {}, "words", 0.95, 3, marks=pytest.mark.slow),
        pytest.param("top-k", {}, "exact_text", 0.95, 3, marks=pytest.mark.slow),
    ],
)
def test_words_are_read_behind_defenses(defense, parameters, name, least, victims):
    seen, x = observed(encoder, defense, victims=victims, parameters=parameters)
    found, _ = scores(seen, x)
    assert found[name] >= least
    assert floor(seen, x) < 0.5


@pytest.mark.slow
def test_the_order_of_words_is_read_behind_jopeq():
    seen, x = observed(encoder, "jopeq", victims=50)
    guesses = Tokens(8).run(seen, Key(1)).guesses
    rouge = seen.task.form.score(x[:, 0], torch.cat([guess.x for guess in guesses]))["rouge2"]
    assert rouge.mean() - 1.96 * rouge.std() / math.sqrt(50) > 0.09


@pytest.mark.parametrize(
    "wrong", [{"sweeps": -1}, {"positions": -1.0}, {"positions": math.inf}, {"positions": math.nan}]
)
def test_parameters_are_checked(wrong):
    with pytest.raises(ValueError, match="expected sweeps >= 0 and finite positions >= 0, got"):
        Tokens(**wrong)
