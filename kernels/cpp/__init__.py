"""Compiled code for a CPU: built once by the machine's own compiler, or not used.

All `.cpp` files of this folder become one library. Beyond attention and products of a few rows, it computes all decoder
layers of a step in one call (`kernels.decoder_layers`), float32 products (`kernels.linear`), those with int8 and other
coded weights (`kernels.quantized`), masks and draws (`kernels.sampling`). Float32 products take any number of rows with
tiles (AMX), 4,096 with AVX-512 where panels are small, else 64; int8 ones any number with AVX2, else 32; those with
blocks of GGUF files any number. The layers take any number where their products do, else 64. The library is optional.
Torch does the work without a compiler, with an unusual one, with `TROUPE_NATIVE=0` in the environment, or
where an operation's result differs from its reference. It draws the same tokens from the same logits, up to the last
bit of a logarithm.

How an operation is added:

* `<operation>.cpp` here, with its functions `extern "C"`, returning null or a `Refusal`. Arguments are pointers,
  `int64_t` and `double` alone. Tensors come as the address of their first number; sizes and strides count numbers, not
  bytes. Shared code is in headers, and all else in an unnamed namespace. `layer_parts.h` declares the functions of
  other files that `decoder_layers.cpp` calls from within its team of threads: such an operation is a function there and
  a parallel region around that.
* No argument may make a function access memory outside of its arrays. The binding checks type, shape and strides of
  tensors (`checks.py`); the function checks each index and offset before it computes (`refusal.h`). Memory that it
  keeps is `Memory`, and results come from `guard.empty`: `TROUPE_GUARD=1` puts guard bytes around both.
* Work is shared out by `#pragma omp parallel num_threads(threads)`, with `threads` the last argument: the caller gives
  `torch.get_num_threads()`. The pool is torch's own, since the library is linked to the OpenMP that torch has loaded.
  A second pool would spin against the first one after every operation.
* Threads that meet within a region do so by `Team` of team.h: it goes on with one thread where another program keeps a
  core and one is faster. So there is no `#pragma omp for` or `barrier` in what `layer_parts.h` has: threads that left
  would be waited for.
* Which thread computes a number must not change how it is computed: sums are never split by the number of threads.
* `kernels/<operation>/` binds it: `library.function("name", "pip")` with one letter per argument, compares it once with
  the reference on a small case, and keeps to torch where it differs (`checked`). Two mistakes to avoid: `x.data_ptr()`
  of a temporary, and a new tensor without a `dtype`, which gets the default that the host application has set.
"""

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch.autograd import profiler

from troupellm.kernels.cpp import build, guard
from troupellm.kernels.cpp.checks import RefusedCall

logger = logging.getLogger("troupellm.kernels")

Function = Callable[..., None]
Bound = TypeVar("Bound")
Result = TypeVar("Result")

_TYPES: dict[str, Any] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}


def in_profiles(label: str, function: Callable[..., Result]) -> Callable[..., Result]:
    """The function under a name in profiles of torch, which list only its own operators. Where none is being
    recorded it costs one look."""

    def call(*given: Any) -> Result:
        if not profiler._is_profiler_enabled:
            return function(*given)
        with profiler.record_function(label):
            return function(*given)

    return call


class Refusal(ctypes.Structure):
    """As in refusal.h."""

    _fields_ = (
        ("what", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("index", "value", "least", "end")),
    )


class Library:
    """The loaded library."""

    def __init__(self, path: str) -> None:
        self._loaded = ctypes.CDLL(path)
        self._check: Any = check_refusal
        if guard.ON:
            self._check = self._check_memory
            self._loaded["guard_memory"]()
            self._broken_guard = self._loaded["broken_guard"]
            self._broken_guard.restype = ctypes.c_char_p

    def function(self, name: str, arguments: str) -> Function:
        """One of its functions; the interpreter's lock is free while it runs. Profiles show it as native::NAME.

        Args:
            arguments: a letter for each: p pointer, i int64, d double.

        It raises RefusedCall for a number that would lead it out of its memory, and MemoryOverrun where guard bytes
        show that it left its memory all the same.

        Raises:
            AttributeError: there is no such function.
        """
        found = self._loaded[name]
        found.restype = ctypes.c_void_p
        found.errcheck = self._check
        found.argtypes = [_TYPES[letter] for letter in arguments]
        return in_profiles(f"native::{name}", found)

    def _check_memory(self, refusal: int | None, function: Any, given: tuple[Any, ...]) -> None:
        """After each call with `TROUPE_GUARD`."""
        check_refusal(refusal, function, given)
        if (buffer := self._broken_guard()) is not None:
            raise guard.MemoryOverrun(f"{function.__name__} wrote outside of its buffer {buffer.decode()}")
        if (argument := guard.overrun_argument(given)) is not None:
            raise guard.MemoryOverrun(f"{function.__name__} wrote outside of its argument {argument}")


def check_refusal(refusal: int | None, function: Any, given: tuple[Any, ...]) -> None:
    """After each call: `refusal` is null or the address of a `Refusal`."""
    if refusal is not None:
        why = Refusal.from_address(refusal)
        text = f"{why.what.decode()} {why.index} is {why.value}, not one of {why.least} to {why.end - 1}"
        raise RefusedCall(f"{function.__name__}: {text}")


@functools.cache
def load() -> Library | None:
    """The library, built on first use (seconds) and kept beside the source or in the user's cache; None without one.

    One that another process or machine has left and that cannot be loaded here is built anew, once.

    Raises:
        RuntimeError: the build with sanitizers is asked for, and their runtime is not loaded.
    """
    if build.sanitizer_is_missing():
        raise RuntimeError(f"{build.SWITCH}=asan needs LD_PRELOAD=libasan.so:libstdc++.so.6; `make asan` sets both")
    broken: list[Path] = []
    while (found := build.library(broken)) is not None:
        path, built = found
        try:
            return Library(str(path))
        except OSError as error:
            consequence = "torch computes instead" if built else "it is built anew"
            logger.warning("compiled code cannot be loaded, %s: %s", consequence, error)
        if built:
            build.give_up(path)
            return None
        broken.append(path)
    if broken:
        logger.warning("compiled code cannot be built anew, torch computes instead")
    return None


def checked(functions: Bound, agrees: bool, what: str) -> Bound | None:
    """The operation's functions; None, with a warning in the log, if their results differ from the reference."""
    if agrees:
        return functions
    logger.warning("compiled code for %s differs from its reference, torch computes instead", what)
    return None
