"""Shared code of the Triton kernels of all operations. Importing this package does not import triton.

Writing a kernel:
    - It lives in `kernels/<operation>/triton_<what>.py`, which imports triton at its top; nothing imports that file at
      load: the operation's dispatch imports it inside a function, once `by_kernels(device)` has said that it is wanted.
    - `language.py` beside this file has functions that run in Triton's interpreter as they do on a device:
      `dot` (instead of `tl.dot`), `cast` (instead of `.to` bfloat16 or float8), `tanh`. All arithmetic is in float32:
      bfloat16 is only loaded, cast, stored and given to `dot`.
    - Tile sizes, warps and stages come from a function of the shapes that returns a `Launch` out of a fixed table. They
      never come from `@triton.autotune`, which times launches: impossible while a CUDA graph is captured.
    - Numbers that differ from step to step, such as the number of rows, are named in `do_not_specialize`. So are
      tensors that begin at any address, such as those of a part of the rows. Triton compiles one kernel for 1, one for
      multiples of 16 and one for all else, while a request waits for it. Constants that follow from the number of rows
      come out of a short list, which `models.gpu.warm_up` goes through.
    - No `make_block_ptr` (gone in 3.9), no `tl.extra`, no inline assembly; block ids are made int64 before they are
      multiplied; masked-out places are masked in the load as well, because memory there may hold NaN.
    - A function that returns in a branch of a constant `if` needs the `else`; only compiling shows it.

Testing a kernel:
    - `tests/kernels/triton/checks/<operation>.py` holds ordinary pytest tests against the reference, on tensors of
      `check_device()`. `tests/kernels/triton/test_checks.py` runs each such file in a process of its own under
      TRITON_INTERPRET=1 (a read out of bounds there ends that process alone). A tile costs some
      10 ms: quick cases are a few dozen tiles each, and cover between them ragged lengths, blocks in any order,
      groups of heads, odd sizes and memory of NaN; the rest is marked slow. By hand: `TRITON_INTERPRET=1 pytest
      tests/kernels/triton/checks/X.py`. On a machine with a GPU the same files run compiled
      (load_tests/README.md, "The GPU script", says how without our plugins).
    - `tests/kernels/triton/checks/<operation>_sm90.py` compiles the kernel at real shapes with
      `offline.compile_for(...)`, without a device, and asserts registers, spills, shared memory and pipelined buffers.
      One compilation takes about half a second: one or two per kernel, the rest marked slow. These tests catch
      errors in kernels that the quick tests neither run nor compile.
"""

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch options of one kernel for one kind of shape."""

    warps: int = 4
    stages: int = 3
    constants: dict[str, int] = field(default_factory=dict)
    """Tile sizes, as the kernel names them."""
    occupancy: int = 1
    """Programs that share a multiprocessor, for persistent grids."""
    registers: int | None = None
    """Most of them per thread, so that programs share a multiprocessor; None leaves it to the compiler."""

    @property
    def options(self) -> dict[str, int]:
        """Keywords of a launch: constants and compiler options."""
        return {**self.constants, **self.compiling}

    @property
    def compiling(self) -> dict[str, int]:
        """Compiler options alone."""
        most = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **most}


@functools.cache
def installed() -> bool:
    """True if triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """True if kernels run in Triton's interpreter, on tensors of the CPU. Read when a kernel's file is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable(device: torch.device) -> bool:
    """True if kernels run on tensors of `device` in this process."""
    return installed() and (interpreting() if device.type == "cpu" else device.type == "cuda")


_also: ContextVar[str] = ContextVar("also", default="cuda")


@contextmanager
def as_on_a_gpu(device: torch.device) -> Iterator[None]:
    """For tests of whole models: operations on tensors of `device` are computed by kernels inside, as on a GPU.

    That is the CPU under the interpreter, or "meta" where launches are counted. The tests of one kernel do without:
    they compare it with what the operations give.
    """
    token = _also.set(device.type)
    try:
        yield
    finally:
        _also.reset(token)


def by_kernels(device: torch.device) -> bool:
    """True if kernels, and not torch or compiled code, compute operations on tensors of `device`."""
    return device.type in ("cuda", _also.get()) and installed()


def check_device() -> torch.device:
    """The device on which kernels are tested: the CPU with the interpreter, else the GPU."""
    return torch.device("cpu" if interpreting() else "cuda")


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter has four, so that persistent grids are cut in odd places."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`, as a tile's sides must be."""
    return 1 << max(number - 1, 0).bit_length()
