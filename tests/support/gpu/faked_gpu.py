"""A GPU that is not there: tensors that say they are on one, and launches that are only written down.

Tensors are torch's fake ones, which have shapes, strides and a device, but no content. Code on them takes the paths of
a GPU, and each operation that mixes devices or needs a number from the device raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from troupellm.models.checkpoint.safetensors import RandomWeights
from troupellm.models.gpu.device import CpuDevice
from troupellm.models.gpu.host_transfer import Results, Staging
from troupellm.models.gpu.runner import CudaRunner

CUDA = torch.device("cuda", 0)
MULTIPROCESSORS = 132
aten = torch.ops.aten


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def key(self) -> str:
        """Triton's specialization key of a kernel, by its own rules: launches of one key share the compiled code."""
        _, specialization, options = self._bound()
        return f"{self.kernel.__name__} {specialization} {options}"

    def compile(self) -> Any:
        """For sm_90, as a launch on a device would."""
        import triton
        from triton.compiler import ASTSource

        backend = _backend()
        arguments, specialization, options = self._bound()
        given, signature, constants, attributes = self.kernel._pack_args(
            backend, self.options, arguments, specialization, options
        )
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=backend.target, options=given.__dict__)

    def _bound(self) -> tuple[dict[str, Any], list[tuple[str, Any]], dict[str, Any]]:
        arguments = (Place(value) if isinstance(value, Tensor) else value for value in self.arguments)
        found: tuple[dict[str, Any], list[tuple[str, Any]], dict[str, Any]] = _binder(self.kernel)(
            *arguments, **self.options
        )
        return found


@cache
def _binder(kernel: Any) -> Any:
    from triton.runtime.jit import create_function_from_signature

    return create_function_from_signature(kernel.signature, kernel.params, _backend())


@cache
def _backend() -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    return make_backend(GPUTarget("cuda", 90, 32))


class Place:
    """The properties of a tensor that Triton reads: its type, and whether its address is a multiple of 16."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self._address = tensor.dtype, tensor.storage_offset() * tensor.itemsize

    def data_ptr(self) -> int:
        return self._address


class AbsentGpu(CpuDevice):
    torch_device = CUDA

    def pinned(self, size: int) -> Tensor:
        with unset_fake_temporarily():
            return super().pinned(size)


class AbsentWeights(RandomWeights):
    """Of no numbers."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self._dtype = dtype

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=CUDA)


@contextmanager
def absent_gpu(*, answer: bool | None = None) -> Iterator[list[Launch]]:
    """Within it tensors are made without content, wherever they are. Gives the launches so far.

    Args:
        answer: the answer to code that asks the device a question, as loading does; numbers that are waited for are
            zeros then. None raises instead of waiting.
    """
    from triton.runtime.jit import JITFunction

    launches = list[Launch]()

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(Launch(self, grid, arguments, options))

    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), mode:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(Staging, "send", _send)
        patch.setattr(Results, "fetch", lambda self, numbers: numbers)
        patch.setattr("troupellm.models.gpu.runner.step_result", lambda plan, *_: plan)  # which the host reads
        patch.setattr(CudaRunner, "collect", lambda self, ticket: self.flights._tickets.popleft())
        with _Python(mode, answer):
            yield launches


def _send(self: Staging, *parts: np.ndarray, into: Tensor | None = None) -> list[Tensor]:
    """As `Staging.send`, with places as it has them."""
    total = sum(part.size for part in parts)
    there = torch.empty(total, dtype=torch.int64, device=CUDA) if into is None or into.numel() < total else into[:total]
    ends = np.cumsum([part.size for part in parts]).tolist()
    return [there[end - part.size : end].view(part.shape) for part, end in zip(parts, ends, strict=True)]


def _zeros(answer: bool, tensor: Tensor, *_: Any) -> np.ndarray:
    return np.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch."))


_WAITS: dict[Any, Any] = {
    Tensor.__bool__: lambda answer, _: answer,
    Tensor.__int__: lambda *_: 0,
    Tensor.__index__: lambda *_: 0,
    Tensor.item: lambda *_: 0,
    Tensor.numpy: _zeros,
    Tensor.tolist: lambda answer, tensor: _zeros(answer, tensor).tolist(),
}
"""Operations that need content, and their results instead."""


class _Python(TorchFunctionMode):
    """Calls that need a device before any operator: brackets, pinned memory, and copies of tensors with content."""

    def __init__(self, mode: FakeTensorMode, answer: bool | None) -> None:
        super().__init__()
        self._mode, self._answer = mode, answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            view, index = resolved(*args)
            return view if index is None else aten.index.Tensor(view, index)
        if func is Tensor.__setitem__:
            view, index = resolved(*args[:2])
            value = args[2] if isinstance(args[2], Tensor) else torch.full((), args[2], dtype=view.dtype, device=CUDA)
            return aten.copy_(view, value) if index is None else aten.index_put_(view, index, value)
        if func is Tensor.copy_:
            return aten.copy_(*args, **(kwargs or {}))
        if func is Tensor.__invert__:
            return aten.bitwise_not(args[0])
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.contiguous:
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        if self._answer is not None and func in _WAITS:
            return _WAITS[func](self._answer, *args)
        if func is Tensor.to:
            moved = args[0] if isinstance(args[0], FakeTensor) else self._mode.from_tensor(args[0])
            if any(_numbered(value) == CUDA for value in (*args[1:], *(kwargs or {}).values())):
                moved.constant = None  # whose content torch would copy
            args = (moved, *args[1:])
        given = {name: _numbered(value) for name, value in (kwargs or {}).items()}
        if func is torch.tensor and given.get("device") == CUDA:
            made = func(*args, **{**given, "device": None})
            return torch.empty(made.shape, dtype=made.dtype, device=CUDA)
        return func(*map(_numbered, args), **given)


def _numbered(value: Any) -> Any:
    """The device instead of "the current one", for which a driver is asked."""
    return CUDA if isinstance(value, str | torch.device) and str(value) == "cuda" else value


def resolved(tensor: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None] | None]:
    """A view by numbers and slices, and what tensors are to pick of it."""
    parts = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
        place = next(at for at, part in enumerate(parts) if part is Ellipsis)
        missing = tensor.dim() - sum(part is not None for part in parts) + 1
        parts[place : place + 1] = [slice(None)] * missing
    index = list[Tensor | None]()
    for part in parts:
        dim = len(index)
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, int):
            tensor = aten.select.int(tensor, dim, part)
            continue
        elif isinstance(part, slice):
            tensor = aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
        index.append(part if isinstance(part, Tensor) else torch.tensor(part) if isinstance(part, list) else None)
    return tensor, index if any(part is not None for part in index) else None
