"""Measures the memory that this process holds, and gives unused memory back to the system."""

import ctypes
import gc
import os
from pathlib import Path

LARGE_BLOCK_BYTES = 256 * 1024
_STATM = Path("/proc/self/statm")
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Option numbers in glibc's malloc.h."""
_ARENAS = 2
"""Most arenas of the allocator: otherwise there is one for almost every thread, and each keeps its free memory."""


def resident_bytes() -> int:
    """Memory that the system has given to this process and not taken back; 0 where it does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def return_large_blocks() -> None:
    """Have the allocator return each large block as soon as it is free, if the C library supports it.

    Not for a process that computes a model: each large tensor would come from the system anew.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(_M_ARENA_MAX, _ARENAS)


def give_back() -> None:
    """Run the garbage collector, and have the allocator return free memory to the system, as far as it can."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Have the allocator return free memory to the system, as far as it can. Takes milliseconds; safe in any thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
