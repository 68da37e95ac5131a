"""Gradients of many batches at shared parameters, differentiable in the inputs.

Gradients of chains of known layers are computed by hand (`learn.kernels`); gradients of other models are mapped over
the instances, and one backward pass through them gives every instance its own slope. `kernel_of` decides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy, one_hot, softplus

from leakgauge.harness.core.contract import Task
from leakgauge.harness.core.native import library_for
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.kernels import Kernel
from leakgauge.harness.learn.layers import Conv
from leakgauge.harness.learn.tasks import ModelTask

_TOGETHER = 32  # number of instances whose gradients are computed at once; the patches of an image take up to 2 MB


_IN_BLOCKS = 8  # most images per instance for a kernel of residual blocks, which keeps 14 MB per image of a ResNet-20
_PATCHES = 4  # the same without compiled loops and with batch norms: it also keeps patches, of 14 MB per image
_FEW = 64  # with more channels, and more than one image, the compiled loops are not faster: 1.0 to 1.4 for `cnn3`


def gradients(task: Task, params: Vector, x: Tensor, y: Tensor) -> Tensor:
    """Gradients [m, d] of the loss at the shared parameters, one per batch; differentiable in x and y.

    Args:
        x: [m, b, *input_shape].
        y: [m, b, classes] probabilities or numbers; [m, b] numbers if there is one score.
    """
    kernel = kernel_of(task, params, x.shape[1])
    if kernel is not None:
        chunks = zip(torch.split(x, _TOGETHER), torch.split(y, _TOGETHER), strict=True)
        rows = [_ByHand.apply(kernel, *chunk) for chunk in chunks]  # type: ignore[no-untyped-call]
        return torch.cat(rows) if len(rows) > 1 else rows[0]
    if len(x) == 1:  # mapping over a single instance takes 1.5 times as long as no mapping
        leaf = params.detach().requires_grad_()
        again = x.requires_grad or y.requires_grad
        with torch.enable_grad():
            return torch.autograd.grad(batch_loss(leaf, x[0], y[0], task), leaf, create_graph=again)[0][None]
    mapped: Tensor = vmap(grad(batch_loss), in_dims=(None, 0, 0, None))(params, x, y, task)
    return mapped


class _ByHand(torch.autograd.Function):
    """`gradients` by a kernel, inside autograd."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, x: Tensor, y: Tensor) -> Tensor:
        gradients, ctx.trace = kernel.trace(x, y)
        ctx.save_for_backward(x, y)
        # autograd's node belongs to the result: if the trace had the result, the two would keep each other alive
        return gradients.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[None, Tensor, Tensor]:
        assert len(ctx.saved_tensors) == 2  # this access raises if x or y was modified in place
        return None, *ctx.trace.pull(slopes)


def kernel_of(task: Task, params: Vector, images: int, *, blocks: bool = False) -> Kernel | None:
    """The hand-written kernel if it supports the task and is faster; None: use `vmap`.

    Args:
        blocks: whether networks with residual blocks may use a kernel.

    Time of `vmap` over time by hand, measured on one CPU core, 3x32x32, 2 to 8 instances, with the compiled loops of
    `learn.convolution` (`benchmarks/matching.py`): 4 for the LeNet of DLG with one image and 3 with four, 4 for `cnn2`
    with one or four, 3 for `lenet5`. Without them: 2.0 to 2.5 for the LeNet with one image and 1.2 with four, 2.1 to
    2.5 for `cnn2` and `lenet5` with one image and 1.2 to 1.5 with four. `mlp`: 3 to 6 (in smaller chunks by hand). A
    ResNet-20: with the loops 1.8 with one image, 1.2 to 1.6 with 8; without them 1.1 to 1.5 with one image, and less
    than 1 with four.

    On an NVIDIA H200 (`benchmarks/gpu.py`) with one image: 3.4 and 5.2 for the LeNet with 8 and 256 instances, 5.7 for
    `mlp`, 6.5 for a ResNet-20.
    """
    if type(task) is not ModelTask or not task.softmax or task.model.l2 or task.structure is None:
        return None
    structure, compiled = task.structure, library_for(params) is not None
    if structure.sampled is not None:
        return None
    if not structure.is_chain:
        most = _IN_BLOCKS if compiled else _PATCHES if task.mixes else 1
        return Kernel(structure, params) if blocks and images <= most else None
    convs = [layer for layer in structure.layers if isinstance(layer, Conv)]
    slow = any(conv.outputs > _FEW for conv in convs) if compiled else bool(convs) and convs[0].stride == 1
    return None if images > 1 and slow else Kernel(structure, params)


def targets_of(task: Task, y: Tensor, dtype: torch.dtype) -> Tensor:
    """The argument y of `gradients` for known labels: probabilities [..., classes], or the numbers themselves."""
    return y.to(dtype) if task.numbers else one_hot(y, task.classes).to(dtype)


def batch_loss(params: Vector, x: Tensor, y: Tensor, task: Task) -> Tensor:
    """The task's loss for targets y as in `gradients`; softmax cross-entropy is computed accurately.

    The gradient of softmax cross-entropy in the scores is p - y. For a confident and correct prediction, this
    difference loses most digits in float32, and matching then stalls long before it finds the image (MSE 0.1 instead of
    5e-4). So the entry of the likeliest label is computed as minus the sum of the others.
    """
    if not task.softmax:
        return task.loss(params, x, y)
    scores, term = task.in_training(params, x)
    likeliest = y.argmax(dim=1, keepdim=True)
    gaps = scores - scores.gather(1, likeliest)
    itself = torch.arange(task.classes, device=y.device) == likeliest
    others = gaps.masked_fill(itself, -torch.inf).logsumexp(dim=1)
    # the likeliest label's gap is zero but masked anyway: its slopes, +1 and -1, would cancel the digits of the others
    loss = (softplus(others) - (y.masked_fill(itself, 0.0) * gaps).sum(dim=1)).mean()
    return loss if term is None else loss + term


def losses(task: Task, params: Vector, x: Tensor, y: Tensor, *, chunk: int = 256) -> Tensor:
    """[n] losses of single examples x [n, *input_shape] and y [n], computed `chunk` at a time."""

    def by_scores(params: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(task.outputs(params, x), y)

    # a trained model uses its running statistics, not those of a batch
    each = vmap(by_scores if task.mixes and task.softmax else task.loss, in_dims=(None, 0, 0))
    batches = zip(torch.split(x[:, None], chunk), torch.split(y[:, None], chunk), strict=True)
    with torch.no_grad():
        return torch.cat([each(params, *batch) for batch in batches])


def keep_freed_memory() -> None:
    """Free one large, untouched block: glibc then keeps up to 64 MiB of freed memory instead of 128 KiB.

    Otherwise each evaluation returns megabytes to the system, and the next evaluation faults them in again: 1,100 to
    1,600 page faults, a third of the time.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)  # glibc ignores blocks above 32 MiB
