"""Networks and messages of strangers: wrapped ones are like plain ones, and classes without a record are counted."""

import collections
import dataclasses

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel

from leakgauge.harness import data
from tests.by_rows import by_rows
from tests.command import call
from tests.data_files import one_line, pixels
from tests.test_doors import N, X, Y, inspected, net, ssim_of
from tests.test_strangers import STUDY


class Told(nn.Module):
    """A network whose forward returns more than its scores."""

    def __init__(self, told):
        super().__init__()
        self.net, self.told = net(), told

    def forward(self, x):
        return self.told(self.net(x))


@dataclasses.dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


Named = collections.namedtuple("Named", "logits aux")

NETWORKS = {
    "tuple": lambda: Told(lambda scores: (scores, scores[:, :5])),
    "features first": lambda: Told(lambda scores: (scores[:, :5], scores, None)),
    "list": lambda: Told(lambda scores: [scores]),
    "dictionary": lambda: Told(lambda scores: {"features": -scores, "logits": scores}),
    "one of a dictionary": lambda: Told(lambda scores: {"y": scores, "loss": scores.sum()}),
    "dataclass": lambda: Told(lambda scores: Output(None, scores)),
    "namedtuple": lambda: Told(lambda scores: Named(scores, -scores)),
    "DataParallel": lambda: DataParallel(net()),
    "compiled": lambda: torch.compile(net()),
    "compiled inside": lambda: DataParallel(nn.Sequential(torch.compile(net()))),
    "of Opacus": lambda: GradSampleModule(net()),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.ci(without=("compiled inside",))
def test_wrapped_networks_and_results_of_several_parts_are_inspected_like_plain_ones(kind, tmp_path):
    model = NETWORKS[kind]()
    run = inspected(tmp_path, model, (X, Y))
    assert not run.failures
    assert ssim_of(run, "analytic")["ssim"] > 0.99


def prefixed(prefix):
    model, sent = net(), []
    for number in range(2):
        loss = cross_entropy(model(torch.from_numpy(X[number : number + 1])), torch.tensor([Y[number]]))
        parts = torch.autograd.grad(loss, list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]
        sent.append({prefix + name: part for name, part in zip(names, parts, strict=True)})
    return sent


@pytest.mark.parametrize("wrap", [lambda plain: plain, DataParallel])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers_in_messages_do_not_count(prefix, wrap, tmp_path):
    run = inspected(
        tmp_path, wrap(net()), (X, Y), messages=prefixed(prefix), records=[[0], [1]], victims=None, attacks=["analytic"]
    )
    assert ssim_of(run, "analytic")["ssim"] > 0.99


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = net()

    def forward(self, x):
        return self.module(x)


def test_a_recording_of_a_wrapped_network_is_attacked_with_the_plain_one(tmp_path):
    inspected(tmp_path, Outer(), (X, Y))
    np.savez(tmp_path / "x.npz", x=X, y=Y)
    words = [
        "--model",
        "tests.test_doors:net",
        "--data",
        f"npz:{tmp_path / 'x.npz'}",
        "--attacks",
        "prior",
        "--no-limit",
    ]
    done = call("inspect", tmp_path / "recording", *words, "--workers", "0", "--allow-code", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output


def test_verify_reads_the_results_of_an_inspection_and_its_recording(tmp_path):
    inspected(tmp_path, net(), (X, Y), attacks=["prior"])
    done = call("verify", tmp_path)
    number = len([*tmp_path.glob("[ct]*s/*/")])
    assert done.output == f"{number} cells and trainings, 1 recorded model, 2 messages, all whole\n"
    (cell, *_), (training,) = tmp_path.glob("cells/*"), tmp_path.glob("trainings/*")
    broken = [cell / "result.json", training / "kept.npz", tmp_path / "recording/rounds/00000/client-00001.bin"]
    for path in broken:
        path.write_bytes(path.read_bytes()[:-1])
    done = call("verify", tmp_path)
    assert done.exit_code == 5
    assert {line.partition(":")[0] for line in done.output.splitlines()[:-1]} == {
        str(path.relative_to(tmp_path)) for path in broken
    }
    (tmp_path / "recording/recording.jsonl").unlink()
    assert "recording/recording.jsonl: is missing\n" in call("verify", tmp_path).output


def test_a_tensor_that_comes_twice_is_refused(tmp_path):
    twice = [one | other for one, other in zip(prefixed(""), prefixed("module."), strict=True)]
    with pytest.raises(ValueError, match=r"expected '1.weight' once, got it twice, also as 'module.1.weight'"):
        inspected(tmp_path, net(), (X, Y), messages=twice, victims=None)


@pytest.mark.parametrize("shape", [(1, 20), (2, 9), (3, 7), (20, 1), (20,)])
def test_series_are_scored(shape, tmp_path):
    x = pixels(N, *shape, name="series").astype(np.float32) / 255
    run = inspected(tmp_path, net(inputs=int(np.prod(shape))), (x, Y))
    assert not run.failures
    found = ssim_of(run, "analytic")
    assert found["mse"] < 1e-6
    assert ("ssim" in found) == (len(shape) == 2 and min(shape) >= 3)


def test_a_convolution_over_a_series_gets_series(tmp_path):
    x = pixels(N, 3, 20).astype(np.float32) / 255
    layers = (nn.Conv1d(3, 4, 3), nn.Flatten(), nn.Linear(72, 10))
    run = inspected(tmp_path / "a", nn.Sequential(*layers), (x, Y))
    assert {"correlation", "mse"} <= ssim_of(run, "analytic").keys()
    assert not run.failures
    assert not inspected(tmp_path / "b", nn.Sequential(nn.Flatten(1, 2), *layers), (x, Y), attacks=["prior"]).failures
    with pytest.raises(ValueError, match=r"its form is stated: series\(x, y\)"):
        inspected(tmp_path / "c", lambda: nn.Sequential(*layers), (x, Y))


@pytest.mark.parametrize(("batch", "records"), [(4, 60), (2, 40)])
@pytest.mark.parametrize("limit", [None, True])
def test_a_batch_norm_is_inspected_with_batches(batch, records, limit, tmp_path):
    model = net(10, nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), inputs=12)
    run = inspected(tmp_path, model, (X[:records], Y[:records]), batch=batch, limit=limit, attacks=None)
    assert not run.failures


# classes


@by_rows(
    Y % 5,
    np.where(Y == 4, 9, Y),
    np.where(Y == 9, 8, Y),
    Y * 0 + 7,
    Y * 0,
    np.where(Y < 5, 3, 9),
    Y % 5 + 2,
    (Y > 4) * 9,
)
def test_labels_that_miss_classes_of_the_network_are_the_outputs_that_they_name(labels, tmp_path):
    run = inspected(tmp_path, net(), (X, labels), attacks=["label-restoration", "analytic"], victims=6)
    assert not run.failures
    assert ssim_of(run, "label-restoration")["label_accuracy"] == 1
    assert ssim_of(run, "analytic")["ssim"] > 0.99


def test_codes_are_the_outputs_of_a_wide_network_and_a_stated_number_counts_for_a_shipped_one(tmp_path):
    labels = np.where(Y < 5, 40, 90)
    for number, (model, named) in enumerate(
        [(net(100), {}), (net(100), {"classes": 100}), ("mlp-small", {"classes": 100})]
    ):
        run = inspected(tmp_path / str(number), model, (X, labels), attacks=["prior"], **named)
        loaded = data.load("given:inspect", tmp_path)
        assert (len(loaded.classes), set(loaded.train.y.tolist())) == (100, {40, 90})
        assert not run.failures


@by_rows(
    (net(10), (X, np.where(Y == 9, 10, Y)), {}, "expected labels from 0 to 9 for 10 classes, got 0, 1"),
    (net(10), (X, np.arange(N) % 15), {}, "expected labels from 0 to 9 for 10 classes"),
    (net(10), (X, np.array(["a", "b"])[Y % 2]), {}, "got a, b; number the labels"),
    (net(10), (X, Y), {"classes": 7}, "expected classes=10, the number of the network's outputs, got classes=7"),
    ("mlp-small", (X, Y), {"classes": 7}, "expected labels from 0 to 6 for 7 classes"),
    (net(1), (X, Y), {}, "expected two classes, or numbers, for a network with one output, got 10 classes"),
    (net(1), (X, (Y % 2) * 2.0 - 1), {}, "expected 0 and 1 as the labels of two classes, got -1 and 1"),
)
def test_labels_that_do_not_fit_the_outputs_are_refused_in_one_line(model, held, named, words, tmp_path):
    with pytest.raises(ValueError) as error:
        inspected(tmp_path, model, held, **named)
    assert words in one_line(error)


def test_two_numbers_are_a_regression_if_one_says_so(tmp_path):
    assert not inspected(tmp_path, net(1), (X, (Y % 2) * 1.0), classes=0, attacks=["prior"]).failures


def test_a_file_states_classes_that_have_no_record(tmp_path):
    np.savez(tmp_path / "x.npz", x=X, y=np.where(Y < 5, 40, 90))
    loaded = data.load(f"npz:{tmp_path / 'x.npz'}?classes=100", tmp_path)
    assert (len(loaded.classes), set(loaded.train.y.tolist()), loaded.note) == (100, {40, 90}, "")
    for wrong in ("50", "1000000000", "-1", "x"):
        with pytest.raises(data.DataUnreadable) as error:
            data.load(f"npz:{tmp_path / 'x.npz'}?classes={wrong}", tmp_path)
        one_line(error)


def test_a_network_wider_than_the_data_of_a_study_is_told_to_state_classes(tmp_path, monkeypatch):
    (tmp_path / "wide_net.py").write_text(
        "from torch import nn\ndef make(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    np.savez(tmp_path / "x.npz", x=X, y=Y % 5)
    for end, code, words in (("", 2, "state them: npz:PATH?classes=10"), ("?classes=10", 0, "")):
        text = STUDY.replace('"digits"', f'"npz:{tmp_path / "x.npz"}{end}"').replace("mlp-small", "wide_net:make")
        text = text.replace("samples = 60, test_samples = 40", "samples = 20, test_samples = 5")
        (tmp_path / "s.toml").write_text(text)
        done = call("run", tmp_path / "s.toml", "-o", tmp_path / f"out{code}", "--workers", "0", "--allow-code")
        assert done.exit_code == code, done.output
        assert words in done.stderr
