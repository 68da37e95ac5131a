"""A second device that is simulated on the CPU: its tensors claim to be on `meta` and refuse to mix with others."""

from collections import Counter

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
_BY_INDEX = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}
_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}


class Away(torch.Tensor):
    """A tensor of the simulated device; its numbers are in `here`, on the CPU."""

    @staticmethod
    def __new__(cls, here):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        made.here = here
        return made

    def __repr__(self, **kwargs):
        return f"Away({self.here!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatched(func, args, kwargs or {}, Counter())


class _Moves(TorchFunctionMode):
    """`Tensor.to` without the device's guard, which this build of torch does not have."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.tolist and isinstance(args[0], Away):
            return args[0].cpu().tolist()
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == DEVICE.type:
            return torch.ops.aten._to_copy.default(func(*args, **{**kwargs, "device": "cpu"}), device=DEVICE)
        if func is not torch.Tensor.to:
            return func(*args, **kwargs)
        tensor, *rest = args
        if rest and isinstance(rest[0], torch.Tensor):
            device, dtype = rest[0].device, rest[0].dtype
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*rest, **kwargs)
        device = tensor.device if device is None else device
        device = DEVICE if device.type == "meta" else device
        dtype = dtype or tensor.dtype
        if (device, dtype) == (tensor.device, tensor.dtype):
            return tensor
        return torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=device)


class Elsewhere(TorchDispatchMode):
    """While it is active, the device exists. `reads`: how often the program waited for numbers of the device."""

    def __init__(self):
        super().__init__()
        self.reads, self.moves = Counter(), _Moves()

    def __enter__(self):
        self.moves.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.moves.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatched(func, args, kwargs or {}, self.reads)


def dispatched(func, args, kwargs, reads):
    """Run an operation on the CPU; its result is where torch would put it."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    away = [one for one in tensors if isinstance(one, Away)]
    asked = kwargs.get("device")
    target = torch.device(asked).type == "meta" if asked is not None else bool(away)
    if func in _READS or (func in _COPIES and asked is not None and away and not target):
        reads[str(func)] += bool(away)
    if func in _BY_INDEX:
        reads[str(func)] += any(isinstance(one, Away) and one.dtype is torch.bool for one in args[1])
    if away and func not in _COPIES:
        checked = args[:1] if func in _BY_INDEX else (args, kwargs)
        stays = [one for one in tree_leaves(checked) if isinstance(one, torch.Tensor) and not isinstance(one, Away)]
        if any(one.ndim for one in stays):
            raise RuntimeError(f"{func}: expected all tensors on one device, got some on the CPU and some on {DEVICE}")
    if func is torch.ops.aten.copy_.default:
        args[0].here.copy_(_here(args[1])) if isinstance(args[0], Away) else args[0].copy_(_here(args[1]))
        return args[0]
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    found = func(*tree_map(_here, args), **tree_map(_here, kwargs))
    with torch.inference_mode(False):  # a wrapper cannot be an inference tensor
        return _placed(found, away) if target else found


def _placed(found, away):
    """The results as tensors of the device."""
    known = {id(one.here): one for one in away}

    def placed(one):
        if not isinstance(one, torch.Tensor):
            return one
        return known[id(one)] if id(one) in known else Away(one)

    return tree_map(placed, found)


def _here(one):
    return one.here if isinstance(one, Away) else one
