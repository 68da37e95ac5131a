"""The residual networks of He et al. for small images, with group norm instead of batch norm.

Batch norm is no function of the parameters and one example: its statistics mix the examples of a batch, and they leak.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import conv2d, group_norm, linear, pad, relu

from leakgauge.harness.learn.layers import Slot, Tensors, conv, dense, norm, stack

_WIDTHS = (16, 32, 64)
"""Channels of the three stages."""

_GROUPS = 2
"""Groups of a norm: best for ResNet-20 on label-skewed clients (Hsieh et al. 2020; issue 1 of their repository)."""

_STEM, _BLOCK, _HEAD = 3, 6, 2
"""Tensors of the stem, of a block and of the head."""


def resnet_tensors(channels: int, classes: int, depth: int) -> Tensors:
    """Tensors of a ResNet of `depth` = 6 n + 2 layers: a stem, three stages of n blocks and a dense head.

    Source: He et al. 2016, section 4.2. Differs: group norm. The shortcuts are their option A, without parameters.

    Raises:
        ValueError: depth is not 6 n + 2 with n >= 1.
    """
    blocks, rest = divmod(depth - 2, 6)
    if blocks < 1 or rest:
        raise ValueError(f"expected depth = 6 n + 2 with n >= 1, got depth={depth}")
    layers = [conv("stem", channels, _WIDTHS[0], 3, bias=False), norm("stem_norm", _WIDTHS[0])]
    inputs = _WIDTHS[0]
    for stage, outputs in enumerate(_WIDTHS, start=1):
        for number in range(1, blocks + 1):
            layers.append(_block(f"stage{stage}.block{number}", inputs, outputs))
            inputs = outputs
    return stack(*layers, dense("fc", inputs, classes))


def _block(name: str, inputs: int, outputs: int) -> list[Slot]:
    """The tensors of one residual block."""
    return [
        *conv(f"{name}.conv1", inputs, outputs, 3, bias=False),
        *norm(f"{name}.norm1", outputs),
        *conv(f"{name}.conv2", outputs, outputs, 3, bias=False),
        *norm(f"{name}.norm2", outputs),
    ]


def apply_resnet(tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
    """[b, classes] scores of x [b, channels, height, width]; the depth follows from the number of tensors."""
    h = relu(group_norm(conv2d(x, tensors[0], padding=1), _GROUPS, tensors[1], tensors[2]))
    for start in range(_STEM, len(tensors) - _HEAD, _BLOCK):
        h = _apply_block(tensors[start : start + _BLOCK], h)
    return linear(h.mean((2, 3)), tensors[-2], tensors[-1])


def _apply_block(tensors: Sequence[Tensor], h: Tensor) -> Tensor:
    """One residual block; where it widens, it halves height and width and the shortcut's new channels are zero."""
    conv1, scale1, bias1, conv2, scale2, bias2 = tensors
    new = conv1.shape[0] - conv1.shape[1]
    stride = 2 if new else 1
    inner = relu(group_norm(conv2d(h, conv1, stride=stride, padding=1), _GROUPS, scale1, bias1))
    inner = group_norm(conv2d(inner, conv2, padding=1), _GROUPS, scale2, bias2)
    shortcut = pad(h[:, :, ::2, ::2], (0, 0, 0, 0, 0, new)) if new else h
    return relu(inner + shortcut)
