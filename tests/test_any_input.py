"""Whatever is given to the doors: results, or one line of the documented kinds of error."""

import dataclasses
import tempfile
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from opacus import GradSampleModule, PrivacyEngine
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel
from torch.utils.data import DataLoader, TensorDataset

import leakgauge.opacus
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.federation import registry
from leakgauge.harness.study.store import StoreError
from tests.data_files import pixels
from tests.test_own_data import THINGS

pytestmark = pytest.mark.matrix

N = 24
X = pixels(N, 1, 4, 4, name="any").astype(np.float32) / 255
Y = np.arange(N) % 4


def answers(call):
    """Whether a call has a result; otherwise it raises a documented error, of one line for each problem."""
    refusal = None
    try:
        call()
    except (ValueError, LookupError, StoreError) as error:
        refusal = error
    lines = refusal.problems if isinstance(refusal, StudyError) else [str(refusal)]
    assert all(line.strip() and len(line.splitlines()) == 1 for line in lines), lines
    assert not isinstance(refusal, KeyError | IndexError), repr(refusal)  # of code that did not look
    return refusal is None


# what people bring


class Of(nn.Module):
    """A network whose forward returns something made of its scores."""

    def __init__(self, made, outputs):
        super().__init__()
        self.fc, self.made = nn.Linear(16, outputs), made

    def forward(self, x):
        return self.made(self.fc(x.flatten(1)))


@dataclasses.dataclass
class Result:
    loss: object
    logits: object


def fails(scores):
    raise SystemExit("out of\ntape")


RESULTS = [
    lambda scores: scores,
    lambda scores: (scores, None),
    lambda scores: [scores.sum(1), scores],
    lambda scores: {"logits": scores, "features": scores.exp()},
    lambda scores: {"a": scores, "b": -scores},
    lambda scores: Result(None, scores),
    lambda scores: scores[:, 0],
    lambda scores: scores[None],
    lambda scores: scores.detach(),
    lambda scores: scores / 0,
    lambda scores: scores.double(),
    lambda scores: scores.long(),
    lambda scores: {},
    lambda scores: scores if scores.sum() > 0 else -scores,
    lambda scores: None,
    lambda scores: "scores",
    fails,
]
WRAPPERS = [
    lambda net: net,
    DataParallel,
    GradSampleModule,
    nn.Module.eval,
    nn.Module.half,
    nn.Module.double,
    lambda net: net.to("meta"),
    lambda net: net.requires_grad_(False),
    lambda net: net.state_dict(),
    lambda net: lambda classes: net,
    lambda net: lambda: net,
    lambda net: type(net),
    lambda net: nn.Sequential(net, nn.BatchNorm1d(4)),
    lambda net: nn.Sequential(net, nn.Dropout(0.5)),
    lambda net: nn.Sequential(nn.LazyLinear(3), net),
    lambda net: nn.ModuleList([net]),
    lambda net: nn.Sequential(net, nn.ReLU(inplace=True)),
]


def network(made, wrap, outputs, weight):
    torch.manual_seed(0)
    net = Of(made, outputs)
    with torch.no_grad():
        net.fc.bias += weight
    return wrap(net)


MODELS = (
    st.builds(
        network,
        st.sampled_from(RESULTS),
        st.sampled_from(WRAPPERS),
        st.sampled_from([4, 4, 4, 1, 2, 10]),
        st.sampled_from([0.0, 0.0, 1e38, np.nan]),
    )
    | st.sampled_from(["mlp-small", "resnet18", "torchvision:nothing", "given:nobody", "", ":", "a:b"])
    | THINGS
)


def changed(x, y, factor, shift, kind, labels):
    with np.errstate(all="ignore"):
        x = (x * factor + shift).astype(kind)
    return x, labels(y)


LABELS = [
    lambda y: y,
    lambda y: y + 1,
    lambda y: 2 * (y % 2) - 1,
    lambda y: y * 0,
    lambda y: y.astype(float),
    lambda y: y / 3,
    lambda y: y[:, None],
    lambda y: np.eye(4)[y],
    lambda y: y[:-1],
    lambda y: y.astype(str),
    lambda y: y.astype(object),
    lambda y: y.tolist(),
    lambda y: np.where(y == 3, np.nan, y),
    lambda y: y.astype("M8[s]"),
    lambda y: 10**15 * y,
]
KINDS = ["f4", "f4", "f8", "f2", "u1", "i8", "?", "c8", "U8", "O"]
ARRAYS = st.builds(
    changed,
    st.sampled_from([X, X, X[:, 0], X.reshape(N, -1), X[:5], X[:0], X[..., None], X[:, :, :, 0], X[0]]),
    st.just(Y),
    st.sampled_from([1, 1, 1, 255, 1 / 255, 0, 1e30, np.inf]),
    st.sampled_from([0, 0, 0, -0.5, np.nan]),
    st.sampled_from(KINDS),
    st.sampled_from(LABELS),
)
FORMS = [
    lambda pair: pair,
    lambda pair: (*pair, *pair),
    lambda pair: (pair, pair),
    lambda pair: [pair, pair, pair],
    lambda pair: list(zip(*pair, strict=False)),
    lambda pair: zip(*pair, strict=True),
    lambda pair: [{"image": x, "label": y} for x, y in zip(*pair, strict=False)],
    lambda pair: iter([pair]),
    lambda pair: pair[0],
    lambda pair: {"x": pair[0], "y": pair[1]},
    lambda pair: (torch.from_numpy(pair[0]), torch.as_tensor(pair[1])),
    lambda pair: DataLoader(list(zip(*pair, strict=False)), batch_size=5, drop_last=True),
    lambda pair: (DataLoader(list(zip(*pair, strict=False)), batch_size=5, num_workers=0),) * 3,
]


def formed(pair, form):
    try:
        return form(pair)
    except (TypeError, ValueError):  # torch or numpy lack this form
        return pair


DATA = st.builds(formed, ARRAYS, st.sampled_from(FORMS)) | st.sampled_from(["digits", "npz:/nowhere", "x:y"]) | THINGS


def gradients(count, outputs):
    torch.manual_seed(0)
    net, found = Of(lambda scores: scores, outputs), []
    for number in range(count):
        loss = cross_entropy(net(torch.from_numpy(X[number : number + 1])), torch.tensor([0]))
        found.append(torch.autograd.grad(loss, list(net.parameters())))
    return found


SHAPES = [
    list,
    tuple,
    lambda parts: torch.cat([part.flatten() for part in parts]),
    lambda parts: torch.cat([part.flatten() for part in parts]).numpy(),
    lambda parts: {"module.fc.weight": parts[0], "fc.bias": parts[1]},
    lambda parts: {"fc.weight": parts[0], "module.fc.weight": parts[0]},
    lambda parts: {"fc.weight": parts[0], 3: parts[1]},
    lambda parts: [part.numpy() for part in parts],
    lambda parts: [part.to_sparse() for part in parts],
    lambda parts: [part * 1j for part in parts],
    lambda parts: [part / 0 for part in parts],
    lambda parts: [part.tolist() for part in parts],
    lambda parts: np.array([None, "a"], object),
    lambda parts: parts[0],
    lambda parts: parts[:1],
    lambda parts: [None, parts[1]],
    lambda parts: b"\0" * 4 * sum(part.numel() for part in parts),
    lambda parts: "gradient",
]
MESSAGES = st.none() | st.none() | THINGS
MESSAGES |= st.builds(
    lambda count, shape: list(map(shape, gradients(count, 4))), st.integers(0, 2), st.sampled_from(SHAPES)
)
MESSAGES |= st.builds(lambda shape: map(shape, gradients(2, 4)), st.sampled_from(SHAPES))
RECORDS = st.none() | st.just([[0], [1]]) | st.lists(st.lists(st.integers(-1, N)), max_size=2) | THINGS


def step(kind):
    def train(model, x, y):
        if kind == "gradient":
            scores = model(x)
            return torch.autograd.grad(cross_entropy(scores, y), list(model.parameters()))
        if kind == "exit":
            raise SystemExit(3)
        if kind == "gone":
            del model.fc
        return kind

    return train


NUMBERS = st.sampled_from([1, 0, -1, 2, 1.0, 0.5, np.nan, np.inf, "1", None, True, [], np.int64(2), 2**63, 1e300])
PARTS = st.sampled_from(["none", "gaussian", "dp-sgd", "ota", "prior", "map", "x", "a+b", "", 3])
PARTS |= st.fixed_dictionaries({"name": PARTS}, optional={"epsilon": NUMBERS, "clip": NUMBERS, "guess": THINGS})
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(["lr", "batch", "momentum", "victims", "seed", "minutes", "audit", "workers"], NUMBERS),
        "classes": NUMBERS | st.sampled_from([0, 2, 4, 10]),
        "steps": st.sampled_from([1, 0, -1, 2, "1", None, 1.5]),
        "sends": st.sampled_from(["gradient", "update", "x", None]),
        "defense": PARTS | THINGS,
        "threats": st.just(["server", "public"]) | st.lists(st.text(max_size=8), max_size=2) | THINGS,
        "auxiliary": DATA,
        "train_step": st.sampled_from(["gradient", "exit", "gone", 3, None]).map(step) | THINGS,
        "root": THINGS,
        "public": THINGS,
    },
)


VALID = {"model": network(RESULTS[0], WRAPPERS[0], 4, 0.0), "data": (X, Y), "messages": None, "records": None}
VALID |= {"attacks": ["prior"], "limit": False, "progress": False}
ODD = {"model": MODELS, "data": DATA, "messages": MESSAGES, "records": RECORDS, "options": OPTIONS}


@st.composite
def calls(draw):
    """A valid call in which at most two parts are drawn."""
    call = dict(VALID)
    for name in draw(st.lists(st.sampled_from([*ODD]), max_size=2, unique=True)):
        call[name] = draw(ODD[name])
    if call["messages"] is None and call["records"] is not None:
        call["messages"] = gradients(2, 4)
    options = call.pop("options", {})
    chosen = draw(st.lists(st.sampled_from([*options]), max_size=2, unique=True)) if options else []
    return call | {name: options[name] for name in chosen}


@settings(max_examples=200)
@drawn(calls())
def test_an_inspection_has_results_or_one_line(call):
    with tempfile.TemporaryDirectory() as folder:
        answers(lambda: leakgauge.inspect(**call, folder=folder))


DEFENSES = [*registry.classes("defense")]
NAMES = st.sampled_from(DEFENSES) | st.builds("{}+{}".format, *[st.sampled_from(DEFENSES)] * 2) | st.text() | THINGS
VALUES = NUMBERS | st.floats() | st.integers() | THINGS
KEYS = ["dim", "clients", "participants", "samples", "steps", "batch", "lr", "momentum", "sends", "x"]
SMALL = st.integers(-2, 8)  # a large federation takes a while
CLAIM = {"name": "gaussian", "parameters": {}, "setting": {}, "rounds": None, "delta": None}
ODD_CLAIM = {
    "name": NAMES,
    "parameters": st.dictionaries(st.text(max_size=3), VALUES, max_size=2) | THINGS,
    "setting": st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=2) | THINGS,
    "rounds": VALUES,
    "delta": VALUES,
}
AUDIT = {"name": "gaussian", "parameters": {}, "setting": {}, "rounds": None, "seed": 0, "trials": 20}
ODD_AUDIT = {
    "name": st.sampled_from(["laplace", "none", "dp-sgd", "sdq"]) | THINGS,
    "parameters": ODD_CLAIM["parameters"],
    "setting": st.dictionaries(st.sampled_from(KEYS), SMALL, max_size=2) | THINGS,
    "rounds": NUMBERS | SMALL | THINGS,
    "seed": VALUES,
    "trials": NUMBERS.filter(lambda number: number != 2**63) | THINGS,
    "budget": NUMBERS.filter(lambda number: not (isinstance(number, int | float) and number > 2)) | THINGS,
    "confidence": VALUES,
    "threat": st.sampled_from(["server", "public", "aggregator"]) | st.text() | THINGS,
    "device": st.text() | THINGS,
    "by": st.sampled_from(["trials", "", "x"]) | THINGS,
}


def odd(valid, strategies):
    """Valid arguments, of which at most two are drawn."""
    chosen = st.lists(st.sampled_from([*strategies]), max_size=2, unique=True)
    parts = chosen.flatmap(lambda names: st.fixed_dictionaries({name: strategies[name] for name in names}))
    return parts.map(lambda drawn_parts: valid | drawn_parts)


def with_parameters(name):
    """A claim of a defense with odd values of its own parameters."""
    keys = sorted(registry.defaults("defense", name))
    values = (
        st.dictionaries(st.sampled_from(keys), VALUES | st.floats(1e-12, 1e12), max_size=2) if keys else st.just({})
    )
    return values.map(lambda parameters: CLAIM | {"name": name, "parameters": parameters})


@settings(max_examples=60)
@drawn(odd(CLAIM, ODD_CLAIM) | st.sampled_from(DEFENSES).flatmap(with_parameters))
def test_a_claim_is_computed_or_one_line(asked):
    answers(lambda: leakgauge.claim(**asked))


@settings(max_examples=25)
@drawn(odd(AUDIT, ODD_AUDIT))
def test_an_audit_is_done_or_one_line(asked):
    answers(lambda: leakgauge.audit(**asked))


def private():
    """What `make_private` returns for a small network, without its own warnings."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    items = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = PrivacyEngine().make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data_loader=DataLoader(items, batch_size=6),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    return dict(zip(("model", "optimizer", "loader"), made, strict=True))


ODD_OPACUS = {
    "model": THINGS,
    "optimizer": st.just(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)) | THINGS,
    "loader": st.just((X, Y)) | THINGS,
    "seed": st.sampled_from([1.5, "1", None, np.nan, [], True]),
    "trials": st.sampled_from([0, -1, 1.5, "1", np.nan, [], True]),
    "epochs": st.sampled_from([0, -1, 1.5, "1", None, np.nan, [], True]),
    "delta": st.sampled_from([0, -1, 1.5, "1", None, np.nan, [], True]),
    "attacks": st.sampled_from(["map", ["x"], [3], [np.nan], 3, 0, {"name": "map"}, [{"name": "map", "x": 1}]]),
    "victims": st.sampled_from([0, -1, 1.5, "1", None, np.nan, [], True]),
    "minutes": st.sampled_from([0, -1, "1", None, np.nan, np.inf, [], True]),
    "loss": st.sampled_from(["x", "cross-entropy?x=1", 3, [], nn.MSELoss(reduction="sum")]),
    "folder": st.sampled_from([3, None, "a\0b"]),
}


@settings(max_examples=60)
@drawn(st.sampled_from([*ODD_OPACUS]).flatmap(lambda name: ODD_OPACUS[name].map(lambda part: {name: part})))
def test_an_inspection_of_opacus_refuses_odd_parts_in_one_line(part):
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Opacus
        call = private() | {"epochs": 1, "folder": folder} | part
        assert not answers(lambda: leakgauge.opacus.inspect(**call))


def test_the_valid_calls_have_results(tmp_path):
    assert answers(lambda: leakgauge.inspect(**VALID, folder=tmp_path))
    assert answers(lambda: leakgauge.claim(**CLAIM))
    assert answers(lambda: leakgauge.audit(**AUDIT))
    with pytest.raises(TypeError):
        answers(lambda: len(3))
