"""The launches of a step on a GPU, counted without one: tensors are on torch's device "meta", and Triton's kernels are
noted instead of launched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from troupellm.kernels.common.triton import as_on_a_gpu

META = torch.device("meta")
ALLOCATIONS = ("aten::empty", "aten::new_empty")


class _Operations(TorchDispatchMode):
    """Notes torch's operations that are more than another view of a tensor, or memory for one."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.name().startswith(ALLOCATIONS):
            self._names.append(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def launches() -> Iterator[list[str]]:
    """Names of what is launched inside, in its order."""
    jit = pytest.importorskip("triton.runtime.jit")
    names: list[str] = []

    def run(kernel: Any, *arguments: Any, **options: Any) -> None:
        names.append(kernel.fn.__name__)

    with pytest.MonkeyPatch.context() as patch, as_on_a_gpu(META), _Operations(names):
        patch.setattr(jit.JITFunction, "run", run)
        yield names
