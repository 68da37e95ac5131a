"""Recurrent networks and attention of a user: torch's numbers, per record, and dropout by the masks of the key."""

import math
import re

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.functional import cross_entropy, one_hot
from torch.nn.utils.rnn import pack_padded_sequence

import leakgauge
from leakgauge import Key, rng
from leakgauge.attacks._engine.reconstruct import softened
from leakgauge.harness.learn import modules
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.doubles import study_table
from tests.test_own_models import GRADIENT, Wrong, batch, own, replace, trained

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

KEY, SHAPE = Key(0, ("recurrent",)), (2, 7)


class Series(nn.Module):
    """A recurrent layer over [b, 2, T], of which outputs and last states are read."""

    def __init__(self, kind, **options):
        super().__init__()
        self.options = {"batch_first": True, **options}
        self.rnn = kind(2, 5, **self.options)
        self.fc = nn.LazyLinear(3)

    def forward(self, x):
        first = self.options["batch_first"]
        self.rnn.flatten_parameters()
        h, last = self.rnn(x.transpose(1, 2) if first else x.permute(2, 0, 1))
        h = h[:, 2] if first else h[2]
        last = last if isinstance(last, tuple) else (last,)
        return self.fc(torch.cat([h, *(state.transpose(0, 1).flatten(1) for state in last)], 1))


class Cells(nn.Module):
    """A cell that a user's loop calls, with first states that are trained."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.fc, self.first = cell, nn.Linear(5, 3), nn.Parameter(torch.linspace(-1, 1, 5))

    def forward(self, x):
        state = self.first.expand(len(x), 5)
        state = (state, state) if isinstance(self.cell, nn.LSTMCell) else state
        for given in x.unbind(2):
            state = self.cell(given, state)
        return self.fc(state[0] if isinstance(state, tuple) else state)


class Filled(Cells):
    """A user's loop that writes the states of all steps into one tensor."""

    def forward(self, x):
        states, state = torch.zeros(len(x), 7, 5), torch.zeros(len(x), 5)
        for step in range(7):
            state = self.cell(x[:, :, step], state)
            states[:, step] = state * self.first
        return self.fc(states.amax(1))


class Alone(nn.GRU):
    """A layer whose own forward makes the first state and returns the last one; two of them share their weights."""

    def forward(self, x):
        return super().forward(x, torch.ones(1, x.shape[1], 5))[1][-1]


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.fc = Alone(2, 5), Alone(2, 5), nn.Linear(5, 3)
        for name, _ in self.a.named_parameters():
            setattr(self.b, name, getattr(self.a, name))

    def forward(self, x):
        return self.fc(self.a(x.permute(2, 0, 1)) + self.b(x.flip(2).permute(2, 0, 1)))


NETS = {
    "lstm": lambda: Series(nn.LSTM),
    "lstm with all": lambda: Series(nn.LSTM, num_layers=2, bidirectional=True, proj_size=3, batch_first=False),
    "lstm without bias": lambda: Series(nn.LSTM, bias=False, proj_size=2, num_layers=2),
    "gru": lambda: Series(nn.GRU, num_layers=2, bidirectional=True),
    "gru without bias": lambda: Series(nn.GRU, bias=False, batch_first=False),
    "tanh": lambda: Series(nn.RNN, bidirectional=True),
    "relu": lambda: Series(nn.RNN, num_layers=2, nonlinearity="relu"),
    "lstm cell": lambda: Cells(nn.LSTMCell(2, 5)),
    "gru cell": lambda: Cells(nn.GRUCell(2, 5, bias=False)),
    "tanh cell": lambda: Cells(nn.RNNCell(2, 5)),
    "relu cell": lambda: Cells(nn.RNNCell(2, 5, nonlinearity="relu")),
    "filled": lambda: Filled(nn.GRUCell(2, 5)),
    "shared": Shared,
}


def of_torch(task, net, params, x, y):
    """Torch's own scores, and gradient [d] of the mean loss."""
    leaf = params.clone().requires_grad_()
    tensors = dict(zip(task.layout.names, task.layout.split(leaf), strict=True))
    scores = functional_call(net, tensors, (x,))
    return scores.detach(), torch.autograd.grad(cross_entropy(scores, y), leaf)[0]


@pytest.mark.parametrize("kind", NETS)
def test_a_recurrent_network_has_the_scores_and_gradients_of_torch(kind):
    task, data = own(NETS[kind], SHAPE), batch(4, SHAPE)
    assert not task.mixes
    modules.check(task)
    params, net = task.init(KEY), NETS[kind]()
    net(data.x)  # gives lazy layers their shapes
    scores, gradient = of_torch(task, net, params, data.x, data.y)
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(task.outputs(params, data.x), scores, **close)
    torch.testing.assert_close(trained(task, params, data, GRADIENT), gradient, **close)
    each = gradients(task, params, data.x[:, None], one_hot(data.y, 3).float()[:, None])
    pairs = zip(data.x[:, None], data.y[:, None], strict=True)
    torch.testing.assert_close(each, torch.stack([of_torch(task, net, params, *pair)[1] for pair in pairs]), **close)
    norms = each.norm(dim=1, keepdim=True)
    clipped = trained(task, params, data, replace(GRADIENT, clip=float(norms.median())))
    torch.testing.assert_close(clipped, (each * (norms.median() / norms).clamp_max(1)).mean(0), **close)


class Stacked(nn.Module):
    """Two layers of an LSTM, with the dropout between them as a layer of its own."""

    def __init__(self):
        super().__init__()
        self.one = nn.LSTM(2, 5, bidirectional=True, batch_first=True)
        self.two = nn.LSTM(10, 5, bidirectional=True, batch_first=True)
        self.drop, self.fc = nn.Dropout(0.25), nn.Linear(50, 3)

    def forward(self, x):
        h, last = self.one(x.transpose(1, 2))
        h, then = self.two(self.drop(h))
        both = [torch.cat(pair).transpose(0, 1).flatten(1) for pair in zip(last, then, strict=True)]
        return self.fc(torch.cat([h[:, 2], *both], 1))


class Attentive(nn.Module):
    """Attention with dropout, in a layer of its own, an encoder and a decoder."""

    def __init__(self, **options):
        super().__init__()
        self.first = nn.MultiheadAttention(4, 2, 0.25, **options)
        self.encode = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.25, batch_first=True)
        self.decode = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.25)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        h = x.view(-1, 3, 4).transpose(0, 1)
        h = h + self.first(h, h, h, average_attn_weights=False)[0]
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype)
        return self.fc(self.decode(h, self.encode(h.transpose(0, 1)).transpose(0, 1), tgt_mask=mask).mean(0))


class Called(nn.Module):
    """Attention as functions; by hand, its weights are a product, a softmax and a dropout."""

    def __init__(self, *, by_hand):
        super().__init__()
        self.q, self.kv, self.fc, self.by_hand = nn.Linear(2, 8), nn.Linear(2, 4), nn.Linear(8, 3), by_hand

    def forward(self, x):
        h = x.transpose(1, 2)
        q = self.q(h).unflatten(2, (4, 2)).transpose(1, 2)
        k, v = self.kv(h).unflatten(2, (2, 1, 2)).permute(2, 0, 3, 1, 4)
        rate, causal = 0.25 if self.training else 0.0, torch.ones(7, 7, dtype=torch.bool).tril()
        if self.by_hand:
            weights = (0.3 * q @ k.transpose(2, 3)).masked_fill(~causal, -math.inf).softmax(-1)
            found = functional.dropout(weights, rate, self.training) @ v
        else:
            options = {"attn_mask": causal, "scale": 0.3, "enable_gqa": True}
            found = functional.scaled_dot_product_attention(q, k, v, dropout_p=rate, **options)
        return self.fc(found.transpose(1, 2).flatten(2).mean(1))


@by_rows(
    (lambda: Series(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.25), Stacked, [(7, 10)]),
    (lambda: Called(by_hand=False), lambda: Called(by_hand=True), [(4, 7, 7)]),
)
def test_dropout_inside_a_layer_is_that_between_layers(make, twin, masks):
    task, other, data = own(make, SHAPE), own(twin, SHAPE), batch(4, SHAPE)
    modules.check(task)
    assert task.model.apply.dropout == other.model.apply.dropout == tuple((shape, 0.25) for shape in masks)
    params = task.init(KEY)
    sent = [trained(task, params, data, GRADIENT, Key(seed)) for seed in (1, 1, 2)]
    assert torch.equal(sent[0], sent[1])
    assert not torch.allclose(sent[0], sent[2], atol=1e-6)
    clip = replace(GRADIENT, clip=1e9)
    for plan in (GRADIENT, clip):
        theirs = trained(other, params, data, plan, Key(1))
        torch.testing.assert_close(trained(task, params, data, plan, Key(1)), theirs, rtol=1e-5, atol=1e-6)
    assert own(lambda: make().eval(), SHAPE).model.apply.dropout == ()


@by_rows({}, {"add_zero_attn": True, "add_bias_kv": True}, {"kdim": 4, "vdim": 4, "bias": False})
def test_attention_of_torchs_layers_drops_by_the_key_and_else_has_torchs_gradient(options):
    task, data = own(lambda: Attentive(**options), (12,)), batch(4, (12,))
    modules.check(task)
    keys = 5 if "add_zero_attn" in options else 3
    shapes = [shape for shape, _ in task.model.apply.dropout]
    assert shapes[0] == (2, 3, keys)  # each record has its two heads
    assert shapes.count((2, 3, 3)) == 3 + (keys == 3)
    params, net = task.init(KEY), Attentive(**options).eval()
    keep = [torch.ones(4, *shape) for shape in shapes]
    leaf = params.clone().requires_grad_()
    (found,) = torch.autograd.grad(task.loss(leaf, data.x, data.y, keep), leaf)
    torch.testing.assert_close(found, of_torch(task, net, params, data.x, data.y)[1], rtol=1e-5, atol=1e-6)
    keep[0][2] = 0.0  # the third record's
    apart = task.losses(params, data.x, data.y, keep) - task.losses(params, data.x, data.y)
    assert (apart.abs() > 1e-6).tolist() == [False, False, True, False]
    sent = [trained(task, params, data, GRADIENT, Key(seed)) for seed in (1, 1, 2)]
    assert torch.equal(sent[0], sent[1])
    assert not torch.allclose(sent[0], sent[2], atol=1e-6)


class Asking(nn.Module):
    """What networks of transformers do: warn by the values of ids, and compute norms in float32."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(6, 6), nn.Linear(6, 3)

    def warn_if_padding_and_no_attention_mask(self, ids, mask):
        if 0 in ids:
            print("padding")

    def forward(self, x):
        self.warn_if_padding_and_no_attention_mask(x, None)
        h = self.body(x).to(torch.float32)
        h = h * torch.rsqrt(h.float().square().mean(-1, keepdim=True) + 1e-6)
        return self.fc(functional.softmax(h, dim=-1, dtype=torch.float32).to(x.dtype))


def test_warnings_by_ids_and_parts_in_float32_are_no_reason_to_refuse():
    modules.check(own(Asking))


class Backwards(Series):
    """An LSTM behind a function with a wrong backward."""

    def forward(self, x):
        return super().forward(Wrong.apply(x))


class Packed(Series):
    def forward(self, x):
        packed = pack_padded_sequence(x.transpose(1, 2), torch.full((len(x),), 7), batch_first=True)
        return self.fc(self.rnn(packed)[1][0][-1])


@by_rows(
    (Backwards, "is the backward of a custom autograd.Function wrong?"),
    (Packed, "layer 'rnn' (LSTM) fails on inputs of shape (2, 2, 7): ValueError: a packed sequence is laid out by"),
)
def test_a_wrong_backward_and_packed_sequences_are_refused(net, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        modules.check(own(lambda: net(nn.LSTM), SHAPE))


def test_the_relu_of_a_recurrent_layer_is_softened():
    task, x = own(NETS["relu"], SHAPE), batch(4, SHAPE).x
    params = task.init(KEY)
    gaps = [(softened(task, width).outputs(params, x) - task.outputs(params, x)).abs().max() for width in (0.3, 0.003)]
    assert gaps[0] > 3 * gaps[1] > 0
    assert softened(own(NETS["tanh"], SHAPE), 0.1) is None


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.ci("GRU")
def test_a_lineup_names_records_of_long_series_behind_defenses(kind, tmp_path):
    x, y = rng.uniform(KEY.child("series"), (240, 2, 64)), torch.arange(240) % 3
    data = leakgauge.given_data("long series", leakgauge.series(x, y))
    model = modules.given("recurrent", lambda: Series(kind))
    federation = {"clients": 3, "rounds": 1, "samples": 120, "test_samples": 40, "algorithm": "fedsgd", "batch": 1}
    attacks = [{"name": "prior", "target": {"round": 0, "count": 10}}]
    table = study_table(federation, ["jopeq", "cepam-gaussian"], attacks, data=data, model=model, lineup=0, limit=False)
    run = run_study(resolve(table, allow_code=True), tmp_path, workers=0)
    assert not run.failures
    found = [one for one in run.results.values() if one.cell.attack.name == "lineup"]
    named = {one.cell.training.defense.name: e for one in found for e in one.estimates if e.name == "named"}
    assert {name: (e.value, e.n) for name, e in named.items()} == dict.fromkeys(("jopeq", "cepam-gaussian"), (1.0, 10))
