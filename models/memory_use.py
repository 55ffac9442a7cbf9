"""What this process holds of the machine's memory, and giving back what nothing uses."""

import ctypes
import gc
import os
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Memory that the system has given to this process and not taken back; 0 where it does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def give_back() -> None:
    """Collect what is garbage, and have the allocator return free memory to the system, as far as it can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
