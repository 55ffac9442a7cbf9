"""Where tensors of a host and of a device that is not there meet: who computes what, and for what the host waits."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from troupellm.tests.support.gpu.faked_gpu import CUDA, resolved

CPU = torch.device("cpu")
KNOWN = 1 << 16
"""Whole numbers of a tensor whose values are kept, at most."""
aten = torch.ops.aten
EMPTY = (
    aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default,
    aten.empty_like.default,
)  # fmt: skip


SIZED = (aten.nonzero.default, aten.bincount.default, aten.repeat_interleave.Tensor)
"""Operators whose output size depends on their input's numbers."""


class Device(Protocol):
    """The device: what of the host's memory is pinned, and for what the host has waited."""

    mode: FakeTensorMode
    waits: list[str]

    def pin(self, tensor: Tensor) -> Tensor: ...
    def is_pinned(self, tensor: Tensor) -> bool: ...


class Border(TorchDispatchMode):
    """Operators: those of the host are computed, those of the device have what they would give described."""

    def __init__(self, gpu: Device) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        device = kwargs.get("device")
        if not there and (device is None or device.type == "cpu"):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func._can_decompose():
            with self:  # so that all of its parts come by here
                return func.decompose(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            known = self._host(func, args[0])
            with unset_fake_temporarily():
                return known.item()
        if func is aten.equal.default:
            pair = [self._host(func, tensor) for tensor in args]
            with unset_fake_temporarily():
                return func(*pair)
        if func is aten._to_copy.default and there and device is not None and device.type == "cpu":
            return self._host(func, args[0], kwargs.get("dtype"))
        if func is aten.copy_.default:
            return self._copy(func, *args, **kwargs)
        if func in SIZED and kwargs.get("output_size") is None:
            known = self._host(func, args[0])
            with unset_fake_temporarily():
                counted = func(known, *args[1:], **kwargs)
            return self._moved(counted)
        if func is aten._to_copy.default and not there:
            if not (kwargs.get("non_blocking") and self._gpu.is_pinned(args[0])):
                self._gpu.waits.append(f"{func} to the device")
            with unset_fake_temporarily():
                moved = args[0].to(kwargs.get("dtype") or args[0].dtype, copy=True)
            return self._moved(moved)
        if func in (aten.index.Tensor, aten.index_put_.default) and any(map(of_host, args[1])):
            self._gpu.waits.append(f"{func} by numbers of the host")
        kwargs = {**kwargs, "generator": None} if "generator" in kwargs else kwargs
        found = func(*tree_map(self._described, args), **tree_map(self._described, kwargs))
        _know(func, args, kwargs, found)
        return found

    def _host(self, func: Any, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Copied to the host, for which it waits."""
        self._gpu.waits.append(str(func))
        return _content(tensor, dtype)

    def _copy(self, func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(target, FakeTensor):
            if of_host(source) and source.dim() and not (non_blocking and self._gpu.is_pinned(source)):
                self._gpu.waits.append(f"{func} to the device")
            found: Tensor = func(target, self._described(source))
            _know(func, (target, source), {}, found)
            return found
        if not (non_blocking and self._gpu.is_pinned(target)):
            self._gpu.waits.append(f"{func} to the host")
        with unset_fake_temporarily():
            return target.copy_(_content(source))

    def _described(self, value: Any) -> Any:
        """A tensor of the host, where only its shape and its device are asked for."""
        if not of_host(value):
            return value
        found = self._gpu.mode.from_tensor(value)
        found.constant = None
        return found

    def _moved(self, tensor: Tensor) -> Tensor:
        """A tensor of the host, on the device."""
        found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)
        if not tensor.dtype.is_floating_point and tensor.numel() <= KNOWN:
            found.known = tensor  # type: ignore[attr-defined]
        return found


def of_host(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def _content(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    known = getattr(tensor, "known", None)
    with unset_fake_temporarily():
        if known is None:
            return torch.zeros(tensor.shape, dtype=dtype or tensor.dtype)
        return known.to(dtype or tensor.dtype, copy=True)  # type: ignore[no-any-return]


def _know(func: Any, args: Any, kwargs: Any, found: Any) -> None:
    """Compute whole numbers that are few and follow from few, where other numbers are zeros."""
    made = [value for value in tree_leaves(found) if isinstance(value, FakeTensor)]
    sizes = [value.numel() for value in (*made, *tree_leaves((args, kwargs))) if isinstance(value, Tensor)]
    if max(sizes, default=0) > KNOWN or all(value.dtype.is_floating_point for value in made):
        return
    if func._schema.is_mutable and getattr(args[0], "known", None) is None:
        return
    with unset_fake_temporarily():
        here, named = tree_map(_here, (args, kwargs))
        values = func(*here, **named)
        if func in EMPTY:
            values.zero_()
    if func._schema.is_mutable:
        return
    for value, out in zip((value for value in tree_leaves(values) if isinstance(value, Tensor)), made, strict=True):
        if not out.dtype.is_floating_point:
            out.known = value  # type: ignore[attr-defined]


def _here(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        known = getattr(value, "known", None)
        return torch.zeros(value.shape, dtype=value.dtype) if known is None else known
    return CPU if isinstance(value, torch.device) else value


NUMBERS: dict[Any, Any] = {
    Tensor.__int__: int, Tensor.__index__: int, Tensor.__float__: float, Tensor.__bool__: bool,
}  # fmt: skip


class Python(TorchFunctionMode):
    """Calls of torch's Python part that would ask a driver before any operator is called."""

    def __init__(self, gpu: Device) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is Tensor.pin_memory:
            with unset_fake_temporarily():
                return self._gpu.pin(first.clone())
        if func is Tensor.is_pinned:
            return self._gpu.is_pinned(first)
        if func is Tensor.numpy and isinstance(first, FakeTensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if isinstance(first, FakeTensor):
            if func is Tensor.__getitem__:
                view, index = resolved(*args)
                return view if index is None else aten.index.Tensor(view, index)
            if func is Tensor.__setitem__:
                view, index = resolved(*args[:2])
                value = args[2]
                if not isinstance(value, Tensor):
                    value = torch.full((), value, dtype=view.dtype, device=CUDA)
                return aten.copy_(view, value) if index is None else aten.index_put_(view, index, value)
            if func is Tensor.copy_:
                return aten.copy_(*args, **kwargs)
            if func is Tensor.data_ptr:
                return first.untyped_storage()._cdata + first.storage_offset() * first.itemsize
            if func in NUMBERS:
                return NUMBERS[func](first.item())
            if func is Tensor.__invert__:
                return aten.bitwise_not(first)
            if func is Tensor.contiguous and not kwargs:
                return first if first.is_contiguous() else first.clone(memory_format=torch.contiguous_format)
        kwargs = {name: _numbered(value) for name, value in kwargs.items()}
        pinned = kwargs.pop("pin_memory", False)
        if func is torch.tensor and kwargs.get("device") == CUDA:
            del kwargs["device"]
            return func(*args, **kwargs).to(CUDA)
        found = func(*map(_numbered, args), **kwargs)
        return self._gpu.pin(found) if pinned else found


def _numbered(value: Any) -> Any:
    """The device instead of "the current one", for which a driver is asked."""
    return CUDA if isinstance(value, str | torch.device) and str(value) == "cuda" else value
