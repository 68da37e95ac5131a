"""The architectures: counts as printed in the papers, and the same function as a torch module with the same weights."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from leakgauge import Key, rng
from leakgauge.harness.learn.models import build, names
from tests.torch_models import TWINS, Drop, cnn3, fill, owned

ALL = [name for name, _ in names()]

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)

COUNTS = [
    ("linear", MNIST, 10, 7_850),
    ("mlp-small", MNIST, 10, 25_818),  # JoPEQ, CEPAM
    ("mlp-32", MNIST, 10, 25_450),  # 784-32-10
    ("mlp-32-tanh", MNIST, 10, 25_450),
    ("mlp", MNIST, 10, 203_530),  # UDP: 784-256-10
    ("cnn2", MNIST, 10, 6_422),  # JoPEQ, CEPAM
    ("cnn3", CIFAR, 10, 169_578),  # JoPEQ
    ("lenet-dlg", CIFAR, 100, (75 + 300 + 300) * 12 + 36 + 768 * 100 + 100),  # DLG: fc 768-100
    ("lenet-dlg", CIFAR, 10, (75 + 300 + 300) * 12 + 36 + 768 * 10 + 10),  # JoPEQ: fc 768-10
    ("lenet5", MNIST, 10, 61_706),
    ("cnn-udp", CIFAR, 10, 75 * 16 + 16 + 36 * 36 * 16 * 10 + 10),  # UDP: padding 4 makes 36 x 36
    ("resnet20", CIFAR, 10, 269_722),  # He et al. 2016, table 6: 0.27M
    ("resnet20-bn", CIFAR, 10, 269_722 + 2 * 688),  # a mean and a variance for each of the 688 channels
    ("resnet110", CIFAR, 10, 1_727_962),  # He et al. 2016, table 6: 1.7M
    ("resnet110", MNIST, 10, 1_727_674),  # sqSGD, section 5: 1,722,224, a third of a percent fewer
    ("svm", (58,), 2, 58),  # UDP (32): one w for the 58 census features
    ("svm", (58,), 3, 174),
    ("linear-regression", (30,), 1, 30),  # OTA: d = 30
]

SMALLEST = [
    ("cnn2", 16),
    ("cnn3", 22),
    ("lenet-dlg", 1),
    ("lenet5", 12),
    ("cnn-udp", 1),
    ("resnet20", 1),
    ("resnet20-bn", 1),
]


def _draw(model):
    """Parameters and three inputs, in float64: the tolerance is of the arithmetic, not of the architecture."""
    params = rng.normal(Key(0, ("params",)), (model.layout.dim,), torch.float64) / 10
    return params, rng.uniform(Key(0, ("x",)), (3, *model.input_shape), dtype=torch.float64)


@pytest.mark.parametrize(("name", "shape", "classes", "count"), COUNTS)
def test_parameters_are_counted_as_in_the_paper(name, shape, classes, count):
    assert build(name, shape, classes).layout.dim == count


def test_every_architecture_has_a_count_and_a_twin():
    assert set(ALL) == {name for name, *_ in COUNTS} == set(TWINS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] if name == "resnet110" else []) for name in ALL]
)
def test_it_computes_what_the_torch_module_computes(name):
    model = build(name, CIFAR, 10)
    params, x = _draw(model)
    twin = copy.deepcopy(nn.Sequential(*TWINS[name])).double().eval()
    params = torch.cat(
        [
            part.abs().flatten() if "running_var" in own else part.flatten()
            for own, part in zip(model.layout.names, model.layout.split(params), strict=True)
        ]
    )
    fill(twin, params)
    assert [tuple(tensor.shape) for tensor in owned(twin)] == list(model.layout.shapes)
    scores, expected = model.apply(model.layout.split(params.requires_grad_()), x, None), twin(x)
    torch.testing.assert_close(scores, expected)
    assert scores.shape == (3, model.classes)
    assert scores.std() > 1e-3  # the comparison is not one of zeros
    (gradient,) = torch.autograd.grad(scores.square().sum(), params)
    expected.square().sum().backward()
    parts = zip(model.layout.names, model.layout.split(gradient), strict=True)
    mine = parameters_to_vector(part for own, part in parts if "running" not in own)
    torch.testing.assert_close(mine, parameters_to_vector(tensor.grad for tensor in twin.parameters()))


def test_dropout_comes_after_each_pooling():
    model = build("cnn3", CIFAR, 10)
    params, x = _draw(model)
    masks = [rng.uniform(Key(0, ("mask", i)), (3, *shape)) for i, (shape, _) in enumerate(model.apply.dropout)]
    twin = nn.Sequential(*cnn3([Drop(mask) for mask in masks])).double()
    vector_to_parameters(params, twin.parameters())
    torch.testing.assert_close(model.apply(model.layout.split(params), x, masks), twin(x))
    assert model.apply.dropout == (((32, 15, 15), 0.2), ((64, 6, 6), 0.2), ((128, 2, 2), 0.2))


@pytest.mark.parametrize("name", ALL)
def test_fan_in_is_that_of_the_layer(name):
    wanted = []
    for layer in nn.Sequential(*TWINS[name]).modules():
        if isinstance(layer, nn.GroupNorm | nn.BatchNorm2d):
            wanted += [0, -1] if isinstance(layer, nn.GroupNorm) else [0, -1, -1, 0]
        elif isinstance(layer, nn.Conv2d | nn.Linear):
            wanted += [layer.weight[0].numel()] * (1 if layer.bias is None else 2)
    assert list(build(name, CIFAR, 10).structure.fan_in) == wanted


@pytest.mark.parametrize(
    ("name", "hidden"),
    [("linear", ()), ("mlp-small", (32, 16)), ("mlp-32", (32,)), ("mlp-32-tanh", (32,)), ("mlp", (256,))],
)
def test_widths_describe_the_dense_stacks_and_no_other_model(name, hidden):
    assert build(name, MNIST, 10).widths == (784, *hidden, 10)
    stacks = ["linear", "mlp-small", "mlp-32", "mlp-32-tanh", "mlp"]
    assert [other for other in ALL if build(other, CIFAR, 10).widths] == stacks


def test_a_two_class_svm_scores_by_one_weight_vector():
    model = build("svm", (4,), 2)
    w, x = torch.tensor([1.0, -2.0, 0.5, 3.0]), torch.tensor([[1.0, 1.0, 2.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    scores = model.apply(model.layout.split(w), x, None)
    torch.testing.assert_close(scores[:, 1] - scores[:, 0], x @ w)


@pytest.mark.parametrize("name", ALL)
def test_a_model_survives_pickling_and_equals_itself_built_again(name):
    model = build(name, CIFAR, 10)
    assert pickle.loads(pickle.dumps(model)) == model == build(name, CIFAR, 10)
    assert model.name == name


@pytest.mark.parametrize(("name", "side"), SMALLEST)
def test_the_smallest_image_works_and_a_smaller_one_or_none_is_refused(name, side):
    model = build(name, (1, side, side + 3), 2)
    params, x = _draw(model)
    assert model.apply(model.layout.split(params), x, None).shape == (3, 2)
    with pytest.raises(ValueError, match=f"expects .*got input_shape=.1, {side - 1}, {side + 3}"):
        build(name, (1, side - 1, side + 3), 2)
    with pytest.raises(ValueError, match=rf"model '{name}' expects \(channels, height, width\).*got .*\(784,\)"):
        build(name, (784,), 10)


@pytest.mark.parametrize(("shape", "classes"), [((), 10), ((0,), 10), ((4,), 1)])
def test_empty_inputs_and_single_classes_are_refused(shape, classes):
    with pytest.raises(ValueError, match="model 'linear' expects"):
        build("linear", shape, classes)


def test_the_error_for_an_unknown_name_lists_the_known_and_suggests_the_nearest():
    with pytest.raises(LookupError, match=r"no model 'resnet-20'; did you mean 'resnet20'\? Known: cnn-udp, "):
        build("resnet-20", CIFAR, 10)
