"""What the papers print, against what the recipes run: each difference is a line on the page, and nothing else is.

`PAPER` was typed from the text of the papers, not from the recipes, so that a recipe that changes fails here.
"""

import functools
import html
import json
import math
import re
import tomllib
from fnmatch import fnmatch

import numpy as np
import pytest
from typer.testing import CliRunner

from leakgauge.defenses._jopeq.privacy import surrogate_scale
from leakgauge.defenses._jopeq.quantizer import scalar_lattice
from leakgauge.defenses._ota import Channel, allocate, rayleigh_gains
from leakgauge.defenses._privquant import choose
from leakgauge.defenses.sqsgd import SqSGD
from leakgauge.harness.cli.main import app
from leakgauge.harness.cli.reproduce import recorded
from leakgauge.harness.core.cell import Size
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation.registry import formula
from leakgauge.harness.learn import models
from leakgauge.harness.query.lines import Reproduced
from leakgauge.harness.study.recipes import _EXTRA, _NOTHING, _departures, data, merged, recipe, recipes
from leakgauge.harness.study.study import expand, resolve
from leakgauge.reports.reproduction import reproduction, scoreboard
from tests.by_rows import by_rows
from tests.page_case import ROOT
from tests.test_recipes import SMALL


def of_defense(name):
    return lambda cell: cell.training.defense.parameters.get(name)


def of_federation(name):
    return lambda cell: getattr(cell.training.federation, name)


def records(cell):
    """The samples of a client; None means a share of the whole training set."""
    spec = cell.training.federation
    return None if spec.samples is None else math.floor(spec.samples / spec.clients)


RUNS = {
    "records of a client": records,
    "records of a user": records,
    "training images": of_federation("samples"),
    "samples": of_federation("samples"),
    "test images": of_federation("test_samples"),
    "model": lambda cell: cell.training.task.model,
    "models": lambda cell: cell.training.task.model,
    "data": lambda cell: cell.training.task.data,
    "images": lambda cell: cell.target.count,
    "learning rate": of_federation("lr"),
    "step at t = 1, 1/(lambda t)": of_federation("lr"),
    "clients": of_federation("clients"),
    "clients U": of_federation("clients"),
    "participants K": of_federation("participants"),
    "rounds": of_federation("rounds"),
    "rounds T": of_federation("rounds"),
    "batch": of_federation("batch"),
    "momentum": of_federation("momentum"),
    "local steps": of_federation("local_steps"),
    "factor of the learning rate": of_federation("decay"),
    "curves": of_federation("evaluate_on"),
    "digits of a client": of_federation("labels"),
    "T at the start": of_defense("rounds"),
    "clip C": of_defense("clip"),
    "norm bound U": of_defense("clip"),
    "delta": of_defense("delta"),
    "delta of a round": of_defense("delta"),
    "epsilon": of_defense("epsilon"),
    "epsilon of a round": of_defense("epsilon"),
    "bits": of_defense("bits"),
    "bits R": of_defense("bits"),
    "zeta of CRD": of_defense("zeta"),
    "beta of CRD": of_defense("beta"),
    "alpha": of_defense("alpha"),
    "beta": of_defense("beta"),
    "sampling ratio r": of_defense("ratio"),
    "radius and step of the quantizer": of_defense("gamma"),
    "radius of the quantizer": of_defense("gamma"),
    "norm that scales an update": of_defense("scale"),
    "power": of_defense("power"),
    "receiver's noise": of_defense("noise_variance"),
    "distribution of the gains": of_defense("fading"),
    "sigma": of_defense("noise_std"),
    "sigma of FL+Gaussian and FL+Gaussian+SDQ": of_defense("s2"),
    "b": of_defense("noise_scale"),
    "b of FL+Laplace and FL+Laplace+SDQ": of_defense("noise_std"),
    "T of the optimal UDP": of_federation("rounds"),
    "approaches": lambda cell: cell.training.defense.name,
    "gamma": of_defense("gamma"),
    "epsilon tilde": of_defense("local_epsilon"),
    "dimension n": of_defense("dimension"),
}
"""What runs, by the name of the parameter, read from a cell without the paths of the recipe."""

JOPEQ = {"radius and step of the quantizer": {"paper"}, "norm that scales an update": {"vector"}}
MNIST = JOPEQ | {"training images": {60_000}, "clients": {10}, "learning rate": {0.1}}
TESTED = {"test images": {10_000}}
INVERTED = JOPEQ | {"clients": {1}, "data": {"cifar10"}, "model": {"lenet-dlg"}}
UDP = {"clients U": {50}, "delta": {0.001}, "clip C": {"median"}, "learning rate": {"not given"}}
MLP = UDP | TESTED | {"data": {"mnist"}, "model": {"mlp"}, "records of a client": {800}}
CRD = MLP | {"zeta of CRD": {0.001}}
SEARCHED = {"T of the optimal UDP": {"by heuristic search"}}
FOUR = SEARCHED | {"approaches": {"udp", "udp-lei", "udp-crd"}}
FIVE = {"T at the start": {200}, "epsilon": {4.0, 8.0, 12.0, 16.0, 20.0}, "beta of CRD": {0.9}, "zeta of CRD": {0.001}}
FIVE |= FOUR
CEPAM = {
    "clients": {30},
    "records of a client": {2000},
    "momentum": {0.9},
    "local steps": {15},
    "learning rate": {0.01},
    "gamma": {"at most 16.67"},
}
CEPAM |= TESTED | {"factor of the learning rate": {0.5}, "data": {"mnist"}, "batch": {1}}
CURVES = {"curves": {"validation"}}
NORMAL = {
    "sigma": {0.1},
    "sigma of FL+Gaussian and FL+Gaussian+SDQ": {0.1},
    "dimension n": {1, 2, 3},
    "epsilon tilde": {5.9},
}
LAPLACE = {"b": {0.1}, "b of FL+Laplace and FL+Laplace+SDQ": {0.1}, "epsilon tilde": {5000.0}}
SQSGD = {"model": {"119,850 weights"}, "clients": {10}, "records of a client": {6000}, "batch": {32}, "rounds": {9400}}
SQSGD |= {"learning rate": {0.001}, "norm bound U": {10.0}, "alpha": {1.0}}
SQSGD |= TESTED | {"beta": {1.0}}
OTA = {"records of a user": {20}, "epsilon of a round": {1.2}, "delta of a round": {1e-4}, "receiver's noise": {1.0}}
OTA |= {"distribution of the gains": {"rayleigh"}, "step at t = 1, 1/(lambda t)": {1000.0}, "rounds T": {1000}}
OTA |= {"data": {"gaussian-regression"}, "model": {"linear-regression"}, "samples": {3000}}
PAPER = {
    "jopeq/figure-2": MNIST | TESTED | {"epsilon": {3.0, 3.5, 4.0}},
    "jopeq/figure-3": MNIST | TESTED | {"curves": {"validation"}, "model": {"linear"}, "epsilon": {4.0}, "bits R": {1}},
    "jopeq/table-1": MNIST | TESTED | {"models": {"linear", "mlp-small", "cnn2"}},
    "jopeq/table-2": TESTED
    | {"radius of the quantizer": {1.5, 3.0, 2.1}, "norm that scales an update": {"vector"}, "learning rate": {0.1}}
    | {"clients": {30}, "training images": {50_000}, "model": {"cnn3"}, "bits R": {1, 2}, "epsilon": {2.0, 3.0}},
    "jopeq/figure-4": INVERTED | {"images": {70}, "epsilon": {3.0}, "bits R": {8}},
    "jopeq/figure-5": INVERTED | {"bits R": {4, 8, 16, 32}},
    "jopeq/figure-6": INVERTED | {"epsilon": {10.0}, "bits R": {8}},
    "udp/figure-4": UDP
    | {"data": {"IPUMS-US"}, "model": {"svm"}, "records of a client": {128}, "participants K": {50, 30}},
    "udp/figure-5": MLP | {"participants K": {50}},
    "udp/figure-6": MLP | {"participants K": {30}},
    "udp/figure-7": CRD
    | SEARCHED
    | {"beta of CRD": {0.9}, "epsilon": {"several"}, "participants K": {"not given"}, "T at the start": {"150 to 300"}},
    "udp/figure-[89]": CRD | FOUR | {"beta of CRD": {0.9}, "T at the start": {200}, "participants K": {50, 30}},
    "udp/figure-10": CRD | {"beta of CRD": {0.9}, "T at the start": {200}, "participants K": {50, 30}},
    "udp/figure-11": UDP
    | {"data": {"cifar10"}, "model": {"cnn-udp"}, "records of a client": {800}, "participants K": {30}}
    | FIVE,
    "udp/figure-12": MLP | {"digits of a client": {4}, "participants K": {50}} | FIVE,
    "udp/figure-13": UDP | TESTED | {"data": {"mnist"}, "model": {"mlp"}, "participants K": {50}} | FIVE,
    "udp/figure-1[45]": CRD
    | {"participants K": {"not given"}, "T at the start": {200}, "beta of CRD": {0.5, 0.6, 0.7, 0.8, 0.9}},
    "sqsgd/figure-1": SQSGD
    | {"data": {"mnist", "emnist"}, "bits": {1, 3, 5}, "epsilon": {400.0}, "sampling ratio r": {0.005}},
    "sqsgd/figure-2": SQSGD
    | {"data": {"mnist", "emnist"}, "bits": {4}, "epsilon": {200.0, 300.0, 400.0}, "sampling ratio r": {0.005}},
    "sqsgd/figure-3": SQSGD | {"data": {"mnist", "emnist"}, "bits": {4}, "epsilon": {200.0, 300.0, 400.0}},
    "sqsgd/figure-4": SQSGD
    | {"data": {"fashion_mnist"}}
    | {"bits": {4}, "epsilon": {2000.0}, "sampling ratio r": {0.001, 0.005, 0.01, 0.05}},
    "sqsgd/figure-5": SQSGD
    | {"data": {"mnist"}, "bits": {1, 3, 5, 7}, "epsilon": {400.0}, "sampling ratio r": {"equal r log2 K"}},
    "ota/figure-4[ab]": OTA | {"power": {1000.0}},
    "ota/figure-4c": OTA,
    "cepam/figure-1a": CEPAM | CURVES | NORMAL | {"models": {"mlp-small"}},
    "cepam/figure-1b": CEPAM | CURVES | NORMAL | {"models": {"cnn2"}},
    "cepam/figure-2a": CEPAM | CURVES | LAPLACE | {"models": {"mlp-small"}},
    "cepam/figure-2b": CEPAM | CURVES | LAPLACE | {"models": {"cnn2"}},
    "cepam/figure-3": CEPAM | {"models": {"cnn2"}},
    "cepam/table-1": CEPAM | NORMAL | {"models": {"mlp-small", "cnn2"}},
    "cepam/table-2": CEPAM | LAPLACE | {"models": {"mlp-small", "cnn2"}},
}
"""The printed settings by recipe: in the harness's spelling, or in words that no run can equal."""

UNPRINTED = ("mvu/scalar-estimation", "udp/figure-3")
"""A paper whose text is not at hand, and a recipe that cannot run."""

FORMULAS = ("ota/bound-17", "ota/figure-2", "ota/figure-3", "udp/figure-2")


@functools.cache
def written(name, size):
    """A recipe's study with one seed, its formulas, and its lines, whatever data sets are here."""
    table = tomllib.loads(recipes()[name].read_text("utf-8"))
    scaled = merged(table, table.get("scale", {}).get(size, {})) | {"name": name, "seeds": [0], "lineup": False}
    scaled = {key: value for key, value in scaled.items() if key not in _EXTRA}
    formulas = [one for each in table.get("formulas", []) for one in expand(each)]
    study = resolve(scaled if "tasks" in scaled else _NOTHING | scaled, spelled=not formulas)
    return study, formulas, tuple(_departures(name, table.get("printed", []), study, formulas))


def line(name, parameter, size=Size.QUICK):
    """The first line of a recipe about one parameter, or nothing."""
    return next((one for one in written(name, size)[2] if one.startswith(f"not as printed, {parameter}: ")), "")


def paper_of(name):
    (found,) = [printed for pattern, printed in PAPER.items() if fnmatch(name, pattern)]
    return found


def test_every_recipe_of_a_paper_is_compared_with_its_text():
    compared = {name for name in recipes() for pattern in PAPER if fnmatch(name, pattern)}
    assert {*recipes()} == compared | {*UNPRINTED, *FORMULAS}
    assert not [name for name in UNPRINTED if "printed" in tomllib.loads(recipes()[name].read_text("utf-8"))]


@pytest.mark.parametrize("size", Size)
@pytest.mark.parametrize("name", [name for name in recipes() if name not in (*UNPRINTED, *FORMULAS)])
@pytest.mark.matrix
def test_a_setting_that_runs_otherwise_than_the_paper_prints_has_a_line_and_no_other_has(name, size):
    study = written(name, size)[0]
    for parameter, printed in paper_of(name).items():
        runs = {RUNS[parameter](cell) for cell in study.cells} - {None}
        said = line(name, parameter, size)
        assert bool(said) == bool(runs and runs != printed), (parameter, runs, said)
        here = re.search(r"\), here (.*?): ", said)
        shown = {f"{one:g}" if isinstance(one, float) else str(one) for one in runs}
        assert not said or {*here[1].split(", ")} == shown


@pytest.mark.parametrize("name", [name for name in recipes() if name not in UNPRINTED])
@pytest.mark.matrix
def test_a_difference_at_the_size_of_the_paper_has_a_reason_of_its_own(name):
    smaller = [one for one in written(name, Size.PAPER)[2] if one.endswith(": the run is smaller than the paper's")]
    assert not smaller


@by_rows(
    *((f"jopeq/{name}", "radius and step of the quantizer") for name in ("figure-2", "figure-3", "table-1")),
    ("jopeq/figure-2", "SNR"),
    ("jopeq/figure-5", "axis"),
    ("jopeq/table-2", "radius of Table II"),
    ("jopeq/table-2", "training images here"),
    ("jopeq/table-2", "quantizer"),
    *((f"jopeq/{name}", "local training") for name in ("figure-2", "figure-3", "table-1", "table-2")),
    ("jopeq/figure-5", "bits R"),
    ("udp/figure-11", "clients U"),
    ("udp/figure-11", "test images here"),
    *((f"udp/figure-{n}", "the optimum") for n in (8, 9)),
    *(("udp/figure-12", f"digits of a client, the {which}") for which in ("amounts", "sets")),
    *((f"udp/figure-{n}", "weights p_i of the mean") for n in (4, 6, 8, 9, 10, 11)),
    *((f"sqsgd/figure-{n}", "sampling ratio r") for n in (1, 2, 5)),
    *((f"sqsgd/figure-{n}", "learning rate") for n in (1, 2, 3, 4, 5)),
    *((f"sqsgd/figure-{n}", "panel") for n in (1, 2, 3)),
    *(("sqsgd/figure-3", parameter) for parameter in ("bits", "bytes of a message")),
    *(("sqsgd/figure-4", parameter) for parameter in ("coordinates sent", "epsilon")),
    ("sqsgd/figure-5", "bits of a message"),
    *((f"sqsgd/figure-{n}", parameter) for n in (1, 2, 3, 4, 5) for parameter in ("kappa", "left side of (8)")),
    ("ota/figure-4c", "claim"),
    ("ota/bound-17", "gains"),
    ("ota/figure-2", "signal"),
    *((f"ota/{name}", "epsilon of a user") for name in ("figure-3", "bound-17")),
    *((f"cepam/{name}", "gamma") for name in ("figure-1a", "figure-1b", "figure-2a", "figure-2b", "figure-3")),
    *((f"cepam/{name}", "gamma") for name in ("table-1", "table-2")),
    ("cepam/figure-3", "claim"),
    # siblings
    ("udp/figure-4", "data"),
    *((f"udp/figure-{n}", "clip C") for n in range(4, 16)),
    *((f"ota/figure-4{letter}", "rounds T") for letter in "bc"),
    *((f"ota/figure-4{letter}", "training loss") for letter in "abc"),
    *((f"jopeq/figure-{n}", "attack") for n in (4, 5, 6)),
    *((f"cepam/{name}", "what halves the learning rate") for name in ("figure-1a", "table-2")),
    *((f"cepam/{name}", "records of the local steps") for name in ("figure-1a", "table-2")),
    *((f"cepam/{name}", "test of a dither") for name in ("figure-1b", "table-1")),
    *((f"cepam/{name}", "test images of a client") for name in ("figure-3", "table-2")),
    ("cepam/table-1", "code of a message"),
    ("cepam/figure-3", "axis"),
    ("udp/figure-4", "loss of the SVM"),
    *((f"udp/figure-{n}", "local training") for n in range(5, 16)),
    *((f"udp/figure-{n}", "losses that steer CRD") for n in range(7, 16)),
    *((f"udp/figure-{n}", "model to which the noise is added") for n in range(7, 16)),
    *((f"udp/figure-{n}", "loss") for n in (4, 5, 6, 7, 8, 11, 14, 15)),
    *((f"udp/figure-{n}", "accuracy") for n in (9, 12, 13)),
    ("udp/figure-10", "experiments"),
)
def test_the_known_departures_are_on_the_page(name, parameter):
    assert line(name, parameter)


def weights(model, shape=(1, 28, 28)):
    return models.build(model, shape, 10).layout.dim


def sent(size, ratio=0.005):
    return SqSGD(ratio=ratio).sent(size)


def kept(size, bits, epsilon=400.0, ratio=0.005):
    """m of PrivQuant; 1 means that it changes nothing."""
    return choose(sent(size, ratio), 1 << bits, epsilon).normalizer


CEPAM_ITEMS = ("figure-1a", "figure-1b", "figure-2a", "figure-2b", "figure-3", "table-1", "table-2")
LENET = 119_850
SMALL_ONES = {"mlp-small": 25_818, "lenet5": 61_706, "resnet110": 1_727_674}


def test_the_numbers_of_weights_are_those_of_the_models():
    assert {name: weights(name) for name in SMALL_ONES} == SMALL_ONES
    assert "lenet5 has 61,706 weights" in line("sqsgd/figure-1", "model")
    assert "mlp-small with 25,818" in line("sqsgd/figure-1", "model")
    assert "1,727,674 weights" in line("sqsgd/figure-4", "model")


def given(name, size):
    """The parameters of a recipe's defenses, each once, by name of the defense; and the number of weights."""
    cells = written(name, size)[0].cells
    rows = [(one.training.defense.name, one.training.defense.parameters) for one in cells]
    (model,) = {one.training.task.model for one in cells}
    return [row for number, row in enumerate(rows) if row not in rows[:number]], SMALL_ONES[model]


@pytest.mark.parametrize("size", Size)
def test_sqsgd_sends_as_many_coordinates_as_in_the_paper(size):
    assert sent(LENET) == 512
    for number in (1, 2):
        rows, dim = given(f"sqsgd/figure-{number}", size)
        assert {sent(dim, one["ratio"]) for _, one in rows} == {512}
    assert [round(choose(512, 1 << bits, 400.0).normalizer, 2) for bits in (1, 3, 4)] == [1, 0.57, 0.45]
    rows, dim = given("sqsgd/figure-5", size)
    assert [sent(dim, one["ratio"]) for _, one in rows] == [2048, 512, 256, 256]
    assert [sent(LENET, 0.02 / one["bits"]) for _, one in rows] == [2048, 512, 256, 256]
    assert "2048, 512, 256 and 256 coordinates" in line("sqsgd/figure-5", "sampling ratio r")
    *first, last = (str(sent(dim, one["ratio"]) * one["bits"] // 8) for _, one in rows)
    assert f"{', '.join(first)} and {last} bytes" in line("sqsgd/figure-5", "bits of a message")


def test_the_coordinates_of_the_resnet():
    ratios, said = (0.001, 0.005, 0.01, 0.05), line("sqsgd/figure-4", "coordinates sent")
    small, epsilon = SMALL_ONES["mlp-small"], 31.25
    for size, before, after in ((1_722_224, "sent: ", " ("), (small, "resnet110; ", " with mlp-small")):
        *first, last = (str(sent(size, ratio)) for ratio in ratios)
        assert f"{before}{', '.join(first)} and {last}{after}" in said
    assert [sent(SMALL_ONES["resnet110"], ratio) for ratio in ratios] == [sent(1_722_224, ratio) for ratio in ratios]
    assert [round(kept(small, 4, epsilon, ratio), 2) for ratio in ratios] == [0.70, 0.20, 0.14, 0.06]
    assert [round(kept(1_722_224, 4, 2000.0, ratio), 2) for ratio in ratios] == [0.79, 0.23, 0.15, 0.07]
    assert ".70, .20, .14 and .06 with mlp-small, .79, .23, .15 and .07" in line("sqsgd/figure-4", "epsilon")
    assert epsilon / sent(small) * sent(1_722_224) == 2000.0
    for size in (Size.QUICK, Size.STANDARD):
        assert {one["epsilon"] for _, one in given("sqsgd/figure-4", size)[0]} == {epsilon}


def kappas(name, size):
    """The kappas of a recipe's sqSGD, in the order of its settings."""
    rows, dim = given(name, size)
    found = []
    for one in (its for defense, its in rows if defense == "sqsgd"):
        channel = choose(sent(dim, one["ratio"]), 1 << one["bits"], one["epsilon"])
        found.append(2 * channel.tau - channel.d - 1)
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("size", Size)
def test_the_kappas_of_sqsgd(size):
    for number in (1, 2, 3, 4, 5):
        *first, last = map(str, kappas(f"sqsgd/figure-{number}", size))
        assert f"{', '.join(first)} and {last} " in line(f"sqsgd/figure-{number}", "kappa")


@pytest.mark.parametrize("size", Size)
def test_the_bytes_of_the_three_methods(size):
    rows, dim = given("sqsgd/figure-3", size)
    position, found = math.ceil(math.log2(2 * dim)), {}
    for name, one in rows:
        count = {
            "sqsgd": lambda one: sent(dim, one["ratio"]) * one["bits"],
            "piecewise": lambda one: 32 * int(one["epsilon"] / 2.5),
            "vqsgd": lambda one: one["repeats"] * position,
        }[name](one)
        found.setdefault(name, []).append(math.ceil(count / 8))
    assert found["sqsgd"] == [320, 512, 640]
    assert found["piecewise"] == [320, 480, 640]
    assert found["vqsgd"] == pytest.approx([320, 512, 640], abs=2 if dim == SMALL_ONES["lenet5"] else 0)
    assert "320, 512 and 640 bytes of sqSGD" in line("sqsgd/figure-3", "bytes of a message")


def test_more_power_changes_nothing_from_20_db_on():
    _, formulas, _ = written("ota/figure-4c", Size.PAPER)
    assert "20 and 30 dB" in line("ota/figure-4c", "claim")
    noise = {}
    for one in formulas:
        gains = rayleigh_gains(Key(one["channel_seed"]).child("gains"), one["users"])
        found = allocate(Channel(gains, one["power"], 1.0), (1.2,) * one["users"], 1e-4, 1.0)
        noise.setdefault(one["power"], []).append(found.gradient_variance)
        arguments = {name: value for name, value in one.items() if name != "name"}
        assert formula(one["name"])(**arguments) == found.gradient_variance
    assert noise[1000.0] == pytest.approx(noise[100.0], rel=1e-12)
    assert max(noise[1.0]) > 2 * max(noise[100.0])


def test_the_records_that_give_the_printed_epsilon_of_cepam():
    chance = 1 - (1 - 1 / 1666) ** 15
    assert round(math.log1p(chance * math.expm1(5.9)), 2) == 1.45
    assert "1,666 is the number" in line("cepam/table-1", "records of a client")


def test_the_gamma_of_cepam_is_the_largest_of_its_printed_epsilon():
    chance = 1 - (1 - 1 / 1666) ** 15
    arguments = {"local_epsilon": 5000.0, "steps": 15, "samples": 1666, "clients": 30, "noise_scale": 0.1}
    assert formula("cepam_laplace.theorem_13")(**arguments, gamma=16.666) == pytest.approx(5000 + math.log(chance))
    assert formula("cepam_laplace.theorem_13")(**arguments, gamma=16.667) == math.inf
    for name in CEPAM_ITEMS:
        assert "16.67 is the largest" in line(f"cepam/{name}", "gamma")


@pytest.mark.parametrize("name", CEPAM_ITEMS)
def test_the_baselines_of_cepam_have_its_noise(name):
    for cell in written(f"cepam/{name}", Size.PAPER)[0].cells:
        its, dim = cell.training.defense.parameters, weights(cell.training.task.model)
        if "s2" in its:  # pairs of numbers, relative to 3 |u| / sqrt(dim / 2)
            sigma = math.sqrt(its["s2"] * 9 / (dim / 2)) * 16.666
            assert min(abs(sigma / one - 1) for one in (0.03, 0.1, 0.3, 1.0)) < 1e-3
        elif cell.training.defense.name.startswith("laplace"):
            assert its["noise_std"] * 3 / math.sqrt(dim) * 16.666 == pytest.approx(math.sqrt(2) * 0.1, rel=1e-4)


# printed: computed by an independent script, which rounds up the true numbers of cells, not their mean
@by_rows((0.1, (3.630, 3.573, 3.333)), (0.01, (6.663, 6.411, 6.207)), (0.001, (9.933, 9.751)))
def test_the_fixed_lengths_of_cepam(sigma, printed):
    found = [formula("cepam_gaussian.fixed_length")(n, sigma, 1.0) for n in range(1, len(printed) + 1)]
    assert found == pytest.approx(printed, abs=0.075)


@pytest.mark.parametrize("size", Size)
def test_the_rate_of_cepam_is_halved_after_ten_rounds_as_printed(size):
    for name in CEPAM_ITEMS:
        for spec in {cell.training.federation for cell in written(f"cepam/{name}", size)[0].cells}:
            assert (spec.schedule, spec.patience * spec.evaluate_every, spec.validation) == ("plateau", 10, 10_000)
            assert spec.samples == 1666 * spec.clients


def test_the_printed_tables_of_cepam_have_the_gains_that_are_tested():
    gains = [
        np.mean([84.42, 84.53, 83.85]) - np.array([82.50, 82.42, 83.14, 83.15]),
        np.mean([91.83, 91.61, 91.94]) - np.array([91.34, 91.46, 91.39, 90.74]),
        85.76 - np.array([83.02, 83.28, 83.78, 83.78]),
        92.66 - np.array([91.08, 91.00, 90.59, 90.86]),
    ]
    claims = [one for name in ("table-1", "table-2") for one in written(f"cepam/{name}", Size.QUICK)[0].claims]
    for kind, ends in (("every baseline", np.min), ("the weakest baseline", np.max)):
        margins = [100 * one.margin for one in claims if "gains" in one.text and kind in one.text]
        assert [least < ends(gain) < least + 0.5 for least, gain in zip(margins, gains, strict=True)] == [True] * 4


def test_the_radius_of_the_authors_code_runs_beside_the_printed_one():
    said = line("jopeq/figure-2", "radius and step of the quantizer")
    assert "1.5 sqrt(1 + 8/epsilon^2) with step 2 gamma/(2^R + 1)" in said
    for bits, epsilon in ((1, 4.0), (4, 3.0)):
        gamma = 1.5 * math.sqrt(1 + 8 / epsilon**2)
        assert scalar_lattice(bits, epsilon, "reference").step == pytest.approx(2 * gamma / (2**bits + 1))
        assert scalar_lattice(bits, epsilon, "paper").step == pytest.approx(2 * (2 * bits + 1 / epsilon) / 2**bits)
    step = scalar_lattice(1, 4.0, "reference").step
    assert 2 * surrogate_scale(4.0, step) ** 2 + step**2 / 12 == pytest.approx(2 * (2 / 4.0) ** 2)


def test_what_is_said_of_every_size_holds_at_every_size():
    for n in (1, 2, 3, 5):
        runs = [{cell.training.task.model for cell in written(f"sqsgd/figure-{n}", size)[0].cells} for size in Size]
        assert runs == [{"mlp-small"}, {"mlp-small"}, {"lenet5"}]
    runs = [{cell.training.task.model for cell in written("sqsgd/figure-4", size)[0].cells} for size in Size]
    assert runs == [{"mlp-small"}, {"mlp-small"}, {"resnet110"}]
    for size in Size:
        uses = {
            one.training.federation.rounds * (one.training.federation.clients if slots else 1)
            for one in written("ota/figure-4b", size)[0].cells
            if (slots := one.training.defense.name == "ota-orthogonal") or one.training.defense.name == "ota"
        }
        assert uses == ({150} if size is Size.QUICK else {1000, 1050})
        images = {cell.training.federation for cell in written("jopeq/figure-4", size)[0].cells}
        assert {(one.algorithm, one.batch, one.rounds) for one in images} == {("fedsgd", 1, 30 * 70)}


def gained(bits, epsilon):
    """JoPEQ's gain in dB over Laplace noise with SDQ, without overload, at the printed radius."""
    noise, error = 8 / epsilon**2, scalar_lattice(bits, epsilon, "paper").step ** 2 / 12
    return 10 * math.log10((noise + error) / max(noise, error))


def test_what_is_said_of_the_claims_holds_for_the_claims():
    def claims(name):
        return written(name, Size.QUICK)[0].claims

    gain = max(gained(4, epsilon) for epsilon in (3.0, 3.5, 4.0))
    (dominant,) = [one for one in claims("jopeq/figure-2") if "dominant" in one.text]
    assert round(gain, 2) == 0.71 < dominant.margin < min(gained(1, epsilon) for epsilon in (3.0, 3.5, 4.0))
    *_, limited = claims("cepam/figure-3")
    assert (limited.that, limited.margin, limited.a["defense.noise_std"]) == ("below", -0.005, 0.03)


PRINTED = """printed = [
    { parameter = "clients", value = 2, place = "section 1", path = "federation.clients" },
    { parameter = "rounds", value = 50, place = "section 2", path = "federation.rounds" },
    { parameter = "deviation", value = [10, 20.0], place = "Table 1", path = "defense.noise_std", why = "one & one" },
    { parameter = "records", value = 30, place = "section 3", path = "records" },
    { parameter = "test", value = "all", place = "section 4", why = "here a few" },
]
"""
LINES = [
    "not as printed, rounds: 50 (section 2), here 2: the run is smaller than the paper's",
    "not as printed, deviation: 10, 20 (Table 1), here 10: one & one",
    "not as printed, test: all (section 4): here a few",
]


def small_with(tmp_path, printed, clients=2):
    text = SMALL.replace("seeds =", f"{printed}seeds =").replace('"mnist"', '"digits"')
    (tmp_path / "small.toml").write_text(text.replace("clients = 2", f"clients = {clients}"))
    return str(tmp_path / "small.toml")


def test_the_terminal_the_page_and_the_files_state_each_difference_beside_the_verdicts(tmp_path):
    words = ["-o", str(tmp_path / "out"), "--data", str(tmp_path), "--workers", "0"]
    done = CliRunner().invoke(app, ["reproduce", small_with(tmp_path, PRINTED), *words])
    assert done.exit_code == 0, done.output
    shown, page = done.output.splitlines(), html.unescape((tmp_path / "out" / "index.html").read_text())
    for one in LINES:
        assert f"NOTE         small: {one}" in shown
        assert f'<p class="note">{one}.</p>' in page
        assert one in (tmp_path / "out" / "reproduce.json").read_text()
    (verdict,) = [number for number, one in enumerate(shown) if "small: noise costs accuracy" in one]
    assert shown[verdict - 3 : verdict] == [f"NOTE         small: {one}" for one in LINES]
    assert (tmp_path / "out" / "scoreboard.md").read_text().count("- small: not as printed, ") == 3


@pytest.mark.parametrize(("clients", "records"), [(2, 30), (3, 20), (7, 8)])
def test_a_line_follows_what_runs(clients, records, tmp_path):
    notes = recipe(small_with(tmp_path, PRINTED, clients), Size.QUICK, tmp_path).notes
    found = [one.partition(": the run")[0] for one in notes if one not in LINES]
    expected = [f"clients: 2 (section 1), here {clients}", f"records: 30 (section 3), here {records}"]
    assert found == [f"not as printed, {one}" for one in expected if clients != 2]


def test_a_size_at_which_a_setting_is_as_printed_has_no_line_about_it(tmp_path):
    assert recipe(small_with(tmp_path, PRINTED), Size.PAPER, tmp_path).notes == tuple(LINES[1:])


@by_rows(
    ('path = "records"', 'path = "recrds"'),
    ('path = "records"', "path = [1]"),
    ('path = "records"', 'paths = "records"'),
    (', place = "section 3"', ""),
    ("{ parameter", '"clients", { parameter'),
)
def test_a_printed_parameter_that_cannot_be_compared_is_refused(right, wrong, tmp_path):
    path = small_with(tmp_path, PRINTED.replace(right, wrong, 1))
    with pytest.raises(StudyError, match="printed: expected parameter, value, place, and a path that runs, got"):
        recipe(path, Size.QUICK, tmp_path)


@pytest.mark.matrix
def test_the_pages_of_the_command_hold_every_line():
    for size in (Size.QUICK, Size.STANDARD):
        notes = {name: written(name, size)[2] for name in recipes() if name not in UNPRINTED}
        made = [Reproduced(name, "", "", size, (), lines, "", (), (), (), ()) for name, lines in notes.items()]
        board = [
            one
            for one in scoreboard([{**data(one), "made_by": []} for one in made]).splitlines()
            if "not as printed, " in one
        ]
        assert len(board) == sum(map(len, notes.values()))
        shown = html.unescape(reproduction(made))
        assert not [one for lines in notes.values() for one in lines if f'<p class="note">{one}.</p>' not in shown]


RECORDED = ROOT / "docs" / "reproduction"


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recorded_recipe_has_the_statements_and_departures_of_today(path):
    kept = json.loads(path.read_text("utf-8"))
    study, _, lines = written(kept["name"], Size(path.parent.name))
    assert [(one["text"], one["own"]) for one in kept["claims"]] == [(one.text, one.own) for one in study.claims]
    assert [one for one in kept["notes"] if one.startswith("not as printed, ")] == list(lines)


@pytest.mark.parametrize(
    "folder", sorted(path for path in RECORDED.glob("*") if path.is_dir()), ids=lambda path: path.name
)
def test_a_recorded_page_is_made_of_the_recorded_recipes(folder):
    assert folder.with_suffix(".md").read_text("utf-8") == recorded(folder)


@pytest.mark.parametrize("size", ["quick", "standard"])
def test_a_paper_stands_first_in_five_lines_with_few_statements(size):
    kept = [json.loads(path.read_text("utf-8")) for path in sorted((RECORDED / size).glob("*.json"))]
    page = scoreboard(kept)
    for paper, part in ((part.partition("\n")[0], part) for part in page.split("\n## ")[1:]):
        lines = [line for line in part.partition("\n### ")[0].splitlines() if line.startswith("- ")]
        assert 1 <= len(lines) <= 5 or paper == "mvu"  # mvu has only statements of our own
        for line in lines:
            head, _, texts = line.partition("**: ")
            if "Open" not in head:
                number, more = int(head.rpartition(", ")[2]), re.search(r"and (\d+) more\.$", texts)
                left = int(more[1]) if more else 0
                shown = [one for one in kept for claim in one["claims"] if claim["text"] in texts and not claim["own"]]
                assert 1 <= number - left <= 3
                assert len(shown) >= number - left
