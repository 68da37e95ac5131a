"""The import of torchvision beside a CPU-only torch."""

import subprocess
import sys

import pytest
import torch

from leakgauge.harness.data import torchvision_shim
from leakgauge.harness.data.torchvision_shim import torchvision


def test_the_module_comes_with_its_readers_and_a_plain_import_works_afterwards():
    module = torchvision()
    assert module.__name__ == "torchvision"
    assert module is torchvision() is sys.modules["torchvision"]
    assert issubclass(module.datasets.MNIST, torch.utils.data.Dataset)
    import torchvision.transforms.functional as functional

    assert functional.hflip(torch.tensor([[[0.0, 1.0]]])).tolist() == [[[1.0, 0.0]]]


@pytest.mark.parametrize("name", ["nms", "qnms"])
def test_the_operators_have_the_schema_of_torchvision(name):
    torchvision()
    schema = str(getattr(torch.ops.torchvision, name).default._schema)
    assert schema == f"torchvision::{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@pytest.mark.slow
def test_if_a_plain_import_works_nothing_is_declared():
    torchvision()
    if not torchvision_shim._declared:
        pytest.skip("torchvision's own operators are here, and nothing was declared")
    code = """
import torch
theirs = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    theirs.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from leakgauge.harness.data import torchvision_shim
print(torchvision_shim.torchvision().__name__, torchvision_shim._declared)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "torchvision []\n", done.stderr


def test_a_declared_operator_has_a_schema_and_no_kernel():
    torchvision()
    if not torchvision_shim._declared:
        pytest.skip("torchvision's own operators are here, with kernels")
    with pytest.raises(NotImplementedError, match="nms"):
        torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
