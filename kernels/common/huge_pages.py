"""Large pages under weights: a product of few rows is one walk through memory, which halts at the end of every page."""

import ctypes
import functools
import sys
from collections.abc import Callable

HUGE_PAGE = 2 * 2**20
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25


def prefer_huge_pages(address: int, size: int, *, written: bool = True) -> None:
    """Ask the system for large pages under a range. Only advice: whether it is taken does not matter.

    Args:
        written: gather at once what is there; else what will be written gets them then.
    """
    begin = -(-address // HUGE_PAGE) * HUGE_PAGE
    length = (address + size) // HUGE_PAGE * HUGE_PAGE - begin
    advise = _madvise()
    if length > 0 and advise is not None:
        advise(begin, length, MADV_HUGEPAGE)
        if written:
            advise(begin, length, MADV_COLLAPSE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The system call, on Linux."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    advise: Callable[[int, int, int], int] = function
    return advise
